"""Commands that serve, as a user's shell runs them: until a test is through with them, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from waiting import wait_until


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
