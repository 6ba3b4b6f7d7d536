"""The demo's store as a sidecar, and a console that shows it in a browser: two processes that end with the demo.

For the last pass the sidecar is restarted on the same directory; the console stays, and shows the restart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvstore
from kvstore.block.errors import StoreError
from kvstore.client.connection import stat_at
from kvstore.client.framing import TimedOut
from kvstore.client.sidecar_store import SidecarStore
from kvstore.node import EmbeddedStore
from kvstore.status.tree import SidecarStatus
from tiering.clock import SystemClock

PORT = 9798
"""As for `kvstore console`; if it is in use, any free one."""
START_SECONDS, END_SECONDS = 60.0, 60.0
ANSWER_SECONDS = 5.0


class DemoSidecar:
    """Both processes run inside its context."""

    def __init__(self, directory: Path, dram: str, nvme: str) -> None:
        """directory: the store's, with its sockets. dram, nvme: budgets, such as "512MiB"."""
        self._directory = directory
        self._serve = ["serve", "--data", str(directory), "--dram", dram, "--nvme", nvme]
        self._sidecar: subprocess.Popen[str] | None = None
        self._console: subprocess.Popen[str] | None = None
        self.url = ""
        """Of the dashboard, once it runs."""

    def __enter__(self) -> DemoSidecar:
        try:
            self._start_sidecar()
            observed = ["console", "--socket", str(self._directory / "observe.sock"), "--keeper", str(os.getpid())]
            try:
                self._console, said = _start([*observed, "--listen", f"127.0.0.1:{PORT}"])
            except StoreError:
                self._console, said = _start([*observed, "--listen", "127.0.0.1:0"])
            self.url = str(said["console"])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> EmbeddedStore | SidecarStore:
        return kvstore.open(f"unix:{self._directory / 'kvstore.sock'}", engine="kvstore demo")

    def status(self) -> SidecarStatus:
        """Raises `StoreError`."""
        path = str(self._directory / "observe.sock")
        try:
            return stat_at(path, "kvstore demo", SystemClock(), ANSWER_SECONDS)
        except (StoreError, TimedOut, ValueError, OSError) as error:
            raise StoreError(f"{path}: {error}") from None

    def restart(self) -> None:
        """End the sidecar in order, which flushes dirty blocks, and start another that has recovered the disk. Raises
        `StoreError`."""
        _end(self._sidecar)
        self._start_sidecar()
        until = time.monotonic() + START_SECONDS
        while self.status().state == "warming":
            if time.monotonic() > until:
                raise StoreError("what is on disk could not be taken in")
            time.sleep(0.1)

    def wait(self) -> None:
        assert self._console is not None
        self._console.wait()

    def close(self) -> None:
        _end(self._console)
        _end(self._sidecar)
        self._console = self._sidecar = None

    def _start_sidecar(self) -> None:
        self._sidecar, _ = _start(self._serve)


def _start(arguments: Sequence[str]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start one of our commands; returns it and the line that it prints. It gets no signals from the terminal. Raises
    `StoreError`."""
    with tempfile.TemporaryFile("w+") as log:  # not a pipe: it would fill up
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore", *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            return process, json.loads(line)
        process.wait()
        log.seek(0)
        lines = log.read().strip().splitlines() or [f"status {process.returncode}"]
    raise StoreError(f"kvstore {arguments[0]} does not run: {lines[-1].removeprefix('kvstore: ')}")


def _end(process: subprocess.Popen[str] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
