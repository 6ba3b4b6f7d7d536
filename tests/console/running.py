"""A sidecar that served hits, misses and an eviction, and a console beside it, as processes and in this one."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from service.sidecar import Sidecar
from service.test_serve import PATHS
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, random_pages, small_layout

LAYOUT = small_layout()


def serve_traffic(sidecar: Sidecar, prompts: int = 60) -> None:
    """More than a small store holds, each prompt asked for before it is put and some of them again; then, with many
    prompts, on until a look-up has missed something that was evicted."""
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT, name="small model")

        def ask_for(number: int) -> None:
            prompt = ids(640, 100_000 * number)
            match = handle.match(prompt)
            if match.blocks:
                with handle.lease(match, deadline_ms=5000) as lease:
                    handle.get(lease, blank_pages(LAYOUT, match.blocks))
            else:
                handle.put(prompt, random_pages(LAYOUT, 10, seed=number))

        for number in [*range(prompts), *range(prompts - 4, prompts), *range(8)]:
            ask_for(number)
        for number in range(prompts, 1000 if prompts >= 60 else prompts):
            if sidecar.admin.facts().looked.miss_tokens.get("evicted"):
                break
            ask_for(number)
            ask_for(number - 55)
        else:
            assert prompts < 60, "nothing was evicted"
    while sidecar.whatif.step() or sidecar.prefixes.step():  # no thread does it here
        pass


@dataclass
class Answered:
    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass
class RunningConsole:
    url: str
    pid: int
    process: subprocess.Popen[str]

    def ask(self, path: str, method: str = "GET", data: bytes | None = None, **headers: str) -> Answered:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url.rstrip("/") + path, data, named, method=method)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=20) as answer:
                return Answered(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as answer:
            return Answered(answer.code, answer.headers, answer.read())

    def until(self, path: str, holds: Any, **headers: str) -> Any:
        answers: list[Answered] = []

        def is_there() -> bool:
            answers.append(self.ask(path, **headers))
            return answers[-1].status == 200 and bool(holds(answers[-1].json))

        wait_until(is_there)
        return answers[-1].json


@contextmanager
def console(
    socket: Path, *flags: str, listen: str = "127.0.0.1:0", python: str = sys.executable
) -> Iterator[RunningConsole]:
    command = [
        python,
        "-m",
        "kvstore",
        "console",
        "--json",
        "--socket",
        str(socket),
        "--listen",
        listen,
        *flags,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"PATH": "/usr/bin:/bin", **PATHS}
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        said = json.loads(line)
        yield RunningConsole(said["console"], said["pid"], process)
    finally:
        process.kill()
        process.communicate()
