"""Starts and ends the sidecar that a bench measures: `kvstore serve` in its own process.

Its socket, configuration and log lie in a temporary directory. It logs warnings only; a bench should cause none, so
`end` fails if there is one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter, sleep
from types import TracebackType

import kvstore
from kvstore.block.errors import StoreError, Unreachable
from kvstore.client.framing import FramedSocket
from kvstore.client.sidecar_store import CallLimits, SidecarStore
from kvstore.config import DEFAULT_TENANT
from kvstore.node import SystemClock
from kvstore.status.tree import Readiness

ENGINE = f"kvstore bench {kvstore.__version__}"
LONGEST_SECONDS = 120.0
"""Timeout of every wait for a sidecar."""
CALL_SECONDS = 0.005
"""Interval of calls until it is up."""
LOOK_SECONDS = 0.05
"""Interval of polls until it is ready."""
END_SECONDS = 2.0
"""Interval of signals until it ends."""
_HOST = "127.0.0.1"
_PATIENT = CallLimits(match=LONGEST_SECONDS, lease=LONGEST_SECONDS, fill=LONGEST_SECONDS)


class Sidecar:
    """A sidecar from its start on. A context manager: ends it in order, or kills it after a failure."""

    def __init__(
        self, store: Mapping[str, str | int], *, has_health: bool = False, tokens: Mapping[str, str] | None = None
    ) -> None:
        """store: settings of that section; without `data`, a directory that is removed with the sidecar. tokens: by
        tenant, the default tenant's included, if a network process is to run at `grpc`; a tenant's socket has its
        name."""
        self._scratch = tempfile.TemporaryDirectory(prefix="kvstore-")
        scratch = self.folder = Path(self._scratch.name)
        self.grpc = f"unix:{scratch / 'grpc'}"
        lines = ["operator-token-of-a-bench", *(f"{name} {token}" for name, token in (tokens or {}).items())]
        (scratch / "tokens").write_text("\n".join(lines))
        others = [name for name in tokens or () if name != DEFAULT_TENANT]
        self.socket = str(scratch / "door")
        self.http_port = 0
        """Port of health and metrics, once `ready`."""
        self._log = scratch / "log"
        config = scratch / "config.toml"
        config.write_text(
            _as_toml(
                {
                    "store": {"data": str(scratch / "kv"), **store},
                    "door": {"socket": self.socket},
                    "http": {"listen": f"{_HOST}:0"} if has_health else {},
                    "log": {"level": "warning"},
                    "network": {"listen": self.grpc, "token_file": str(scratch / "tokens")} if tokens else {},
                    **{f"tenants.{name}": {"socket": str(scratch / name)} for name in others},
                }
            )
        )
        command = [sys.executable, "-P", "-m", "kvstore", "serve", "--json", "--config", os.fspath(config)]
        with self._log.open("wb") as log:
            self._started = perf_counter()
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)

    def greeted(self) -> float:
        """Call until it answers a hello, and disconnect; returns seconds from the process's start.

        Raises `StoreError` if it cannot start.
        """
        while True:
            try:
                wire = FramedSocket(self.socket, ENGINE, b"", SystemClock(), LONGEST_SECONDS)
            except Unreachable as error:
                self._check_alive(str(error))
                sleep(CALL_SECONDS)
                continue
            seconds = perf_counter() - self._started
            wire.close()
            return seconds

    def ready(self) -> float:
        """Poll until everything on disk can be found; returns seconds from the process's start.

        Call `greeted` first. Raises `StoreError`, also if part of it could not be loaded.
        """
        assert self._process.stdout is not None
        port = self.http_port = json.loads(self._process.stdout.readline() or "{}").get("http_port", 0)
        while True:
            try:
                connection = HTTPConnection(_HOST, port, timeout=LONGEST_SECONDS)
                connection.request("GET", "/readyz")
                state = json.load(connection.getresponse())["state"]
                connection.close()
            except OSError as error:
                state = str(error)
            if state == Readiness.READY:
                return perf_counter() - self._started
            if state == Readiness.DEGRADED:
                raise StoreError("a sidecar could not take in all that is on disk")
            self._check_alive(state)
            sleep(LOOK_SECONDS)

    def client(self) -> SidecarStore:
        """A store behind its socket."""
        self.greeted()
        return open_patiently(self.socket)

    def end(self) -> None:
        """SIGTERM. Raises `StoreError` if it does not end in order, or logged a warning."""
        give_up_at = perf_counter() + LONGEST_SECONDS
        while self._process.poll() is None:
            if perf_counter() > give_up_at:
                raise StoreError("a sidecar did not end")
            self._process.terminate()  # repeatedly: Python handles it late if its main thread blocks
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        if self._process.returncode or self._logged():
            raise self._failure()

    def kill(self) -> None:
        """SIGKILL to the supervisor and the sidecar; neither can react."""
        keeper = self._process.pid
        with suppress(OSError):  # an interrupt hits the sidecar too, which may have ended
            self._process.send_signal(signal.SIGSTOP)
            for sidecar in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
                os.kill(int(sidecar), signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._process.returncode is None:
                self.end()
        finally:
            if self._process.returncode is None:
                self.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._scratch.cleanup()

    def _check_alive(self, answer: str) -> None:
        if self._process.poll() is not None:
            raise self._failure()
        if perf_counter() - self._started > LONGEST_SECONDS:
            raise StoreError(f"a sidecar was waited for in vain for {LONGEST_SECONDS:.0f} s: {answer}")

    def _failure(self) -> StoreError:
        return StoreError(f"a sidecar ended with {self._process.returncode}: {self._logged()[-500:]}")

    def _logged(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if '"level": "info"' not in line)


def open_patiently(socket: str) -> SidecarStore:
    """Open as an engine does, but with deadlines that make late answers slow rather than misses."""
    store = kvstore.open(f"unix:{socket}", engine=ENGINE)
    assert isinstance(store, SidecarStore)
    store._door._limits = _PATIENT
    return store


def _as_toml(sections: Mapping[str, Mapping[str, str | int]]) -> str:
    """Every value as text: a JSON string is a TOML string."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(str(value))}\n" for key, value in section.items())
        for name, section in sections.items()
    )
