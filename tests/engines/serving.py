"""Commands that serve, as a user's shell runs them: until a test is through with them, and nothing of them is left. And
what is asked of them over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.openai.client import samples_of
from waiting import wait_until

SECONDS = 120.0


@contextmanager
def serving(script: str, ports: list[int], log: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Once what serves at these ports is healthy. script: of bash. What it says goes to the log."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-ec", script], cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until(lambda: process.poll() is not None or all(map(_is_healthy, ports)))
        assert process.poll() is None, log.read_text(errors="replace")[-6000:]
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # also to what they have started
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(30)


def _is_healthy(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


class Server:
    """always: in the body of whatever is posted."""

    def __init__(self, url: str, **always: Any) -> None:
        self.url, self._always = url, always

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=SECONDS) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of those with these labels."""
        samples = (one for one in samples_of(self.metrics()) if one.name == name)
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    def post(self, path: str, **body: Any) -> tuple[Any, Mapping[str, str]]:
        """An answer, which is text where it is streamed, and its headers."""
        content = json.dumps({**self._always, **body}).encode()
        asked = urllib.request.Request(self.url + path, content, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            said = answer.read().decode()
            return said if body.get("stream") or not said else json.loads(said), answer.headers


def chunks_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
