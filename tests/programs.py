"""Programs that a test runs in processes of their own, with the packages of this checkout, and what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}"}


def run_python(program: str, *arguments: object, **options: Any) -> str:
    """What it prints, without the space around it; it has to end well."""
    given = {"env": {**os.environ, **PATHS}, "timeout": 120, **options}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def start_python(program: str, *arguments: object) -> subprocess.Popen[str]:
    """One that is told by its standard input when it may end."""
    command, env = [sys.executable, "-c", program, *map(str, arguments)], {**os.environ, **PATHS}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


KVSTORE = (sys.executable, "-m", "kvstore")


@contextmanager
def serving_program(
    command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """One that serves until it is killed, and what it printed, as JSON, once it did. options: of the process."""
    environment = env if env is not None else {**os.environ, **PATHS}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=environment, **pipes, **options)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def refused_start(*words: str, env: Mapping[str, str] | None = None) -> str:
    """The line with which kvstore does not begin."""
    environment = env if env is not None else {**os.environ, **PATHS}
    done = subprocess.run([*KVSTORE, *words], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout, done.stderr
    return done.stderr


def fetched(port: int, path: str, data: bytes | None = None, token: str = "") -> tuple[int, str]:
    """The status and the text of an answer over HTTP, of an error too. data: what is posted."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
