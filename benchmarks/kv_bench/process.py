"""Processes that a bench starts: children that answer lines, HTTP servers, the measured sidecar and its console."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Self
from urllib.request import urlopen

import kvstore
from kvstore.block.errors import StoreError, Unreachable
from kvstore.client.framing import FramedSocket
from kvstore.client.sidecar_store import CallLimits, SidecarStore
from kvstore.config import DEFAULT_TENANT
from kvstore.node import SystemClock
from kvstore.status.tree import Readiness

HOST = "127.0.0.1"
KVSTORE = (sys.executable, "-P", "-m", "kvstore")
LONGEST_SECONDS = 120.0
"""Timeout of every wait for a sidecar or a child's end."""
ENGINE_SECONDS = 900.0
"""Of a child's answer, which an engine may take its time for."""
START_SECONDS = 300.0
LOOK_SECONDS, CALL_SECONDS, END_SECONDS = 0.05, 0.005, 30.0
"""Interval of polls, and of a client's calls, until something is up; after which it is killed."""
_PATIENT = CallLimits(match=LONGEST_SECONDS, lease=LONGEST_SECONDS, fill=LONGEST_SECONDS)


def error_in(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return ([line for line in lines if "Error" in line] or lines or ["no log"])[-1][-500:]


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        port: int = one.getsockname()[1]
        return port


class Child:
    """`python -m MODULE`, which gets a job and then lines, each of JSON, and answers by lines; its side is `Parent`. A
    context manager: it ends with its input, or is killed where it does not."""

    def __init__(
        self, module: str, job: object, name: str = "", settings: Mapping[str, str | None] | None = None
    ) -> None:
        """name: for messages. settings: of its environment, in place of this process's; None for none."""
        self.name = name or module
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        environment = {**os.environ, **(settings or {})}
        answers, theirs = os.pipe()  # engines and UCX log to standard output
        self._answers = os.fdopen(answers)
        with os.fdopen(theirs, "w"):
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                text=True,
                pass_fds=(theirs,),
                env={setting: value for setting, value in environment.items() if value is not None},
            )
        self.say(job)

    def say(self, line: object) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            print(json.dumps(line), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        """Its next answer. Raises `StoreError` where it has ended or takes too long."""
        watch = threading.Timer(ENGINE_SECONDS, self.process.kill)
        watch.start()
        try:
            line = self._answers.readline()
        finally:
            watch.cancel()
        if not line:
            self.process.wait(LONGEST_SECONDS)
            self._log.seek(0)
            raise StoreError(f"{self.name} ended with {self.process.returncode}: {error_in(self._log.read())}")
        return json.loads(line)

    def ask(self, line: object) -> Any:
        """The answer. Raises `StoreError`."""
        self.say(line)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            if kind is None:
                self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # it is measured already
        finally:
            self.process.kill()
            self.process.wait()
            self._answers.close()
            self._log.close()


class Parent:
    """In a `Child`, the process that started it: its job, and each line that it says."""

    def __init__(self) -> None:
        self._answers = os.fdopen(int(sys.argv[1]), "w")
        self.job = json.loads(sys.stdin.readline())

    def answer(self, line: object) -> None:
        print(json.dumps(line), file=self._answers, flush=True)

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, sys.stdin)


class Server:
    """An HTTP server in its own process group. A context manager: ends it, or kills it after a failure."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, scratch: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        """command: must listen at that port. settings: of its environment."""
        self.name, self.url, self._port = name, f"http://{HOST}:{port}", port
        self._log = scratch / f"{name}.log"
        with self._log.open("wb") as log:
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            environment = {**os.environ, **(settings or {})}
            self._process = subprocess.Popen(command, start_new_session=True, env=environment, **how)

    def wait(self) -> None:
        """Wait until it is healthy. Raises `StoreError`."""
        give_up_at = perf_counter() + START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None or perf_counter() > give_up_at:
                what = f"ended with {self._process.returncode} or was not there after {START_SECONDS:.0f} s"
                raise StoreError(f"the engine '{self.name}' {what}: {error_in(self._log.read_text(errors='replace'))}")
            sleep(5 * LOOK_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._signal(signal.SIGKILL)  # includes its child processes
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _is_healthy(self) -> bool:
        with suppress(OSError, HTTPException):
            return get(self._port, "/health").status == 200
        return False


def get(port: int, path: str, timeout: float = 2.0) -> HTTPResponse:
    connection = HTTPConnection(HOST, port, timeout=timeout)
    connection.request("GET", path)
    return connection.getresponse()


class Sidecar:
    """`kvstore serve` from its start on, with its files in a temporary directory. It logs warnings only; a bench should
    cause none, so `end` fails if there is one. A context manager: ends it in order, or kills it after a failure."""

    def __init__(self, store: Mapping[str, str | int], *, has_health: bool = False, token: str = "") -> None:
        """store: settings of that section; without `data`, a directory that is removed with the sidecar. token: of the
        default tenant, if a network process is to run at `grpc`."""
        self._scratch = tempfile.TemporaryDirectory(prefix="kvstore-")
        scratch = self.folder = Path(self._scratch.name)
        self.grpc, self.socket = f"unix:{scratch / 'grpc'}", str(scratch / "door")
        self.observe = str(scratch / "kv" / "observe.sock")
        settings = {"door_socket": self.socket, "log_level": "warning"}
        settings |= {f"store_{name}": str(value) for name, value in {"data": scratch / "kv", **store}.items()}
        if has_health:
            settings["http_listen"] = f"{HOST}:0"
        if token:
            (scratch / "tokens").write_text(f"operator-token-of-a-bench\n{DEFAULT_TENANT} {token}")
            settings |= {"network_listen": self.grpc, "network_token_file": str(scratch / "tokens")}
        self._log = scratch / "log"
        with self._log.open("wb") as log:
            self._started = perf_counter()
            self._process = subprocess.Popen(
                [*KVSTORE, "serve", "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {f"KVSTORE_{name}".upper(): value for name, value in settings.items()},
            )

    @cached_property
    def told(self) -> dict[str, Any]:
        """What it prints once it serves, such as its `pid`. Empty where it has ended."""
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        return told

    @property
    def http(self) -> str:
        """Of health and metrics."""
        return f"http://{HOST}:{self.told['http_port']}"

    @property
    def keeper(self) -> int:
        return self._process.pid

    def greeted(self) -> float:
        """Call until it answers a hello, and disconnect; returns seconds from the process's start.

        Raises `StoreError` if it cannot start.
        """
        while True:
            try:
                name = f"kvstore bench {kvstore.__version__}"
                wire = FramedSocket(self.socket, name, b"", SystemClock(), LONGEST_SECONDS)
            except Unreachable as error:
                self._check_alive(str(error))
                sleep(CALL_SECONDS)
                continue
            seconds = perf_counter() - self._started
            wire.close()
            return seconds

    def ready(self) -> float:
        """Poll until everything on disk can be found; returns seconds from the process's start. Raises `StoreError`,
        also if part of it could not be loaded."""
        while True:
            try:
                state = json.load(get(self.told.get("http_port", 0), "/readyz", LONGEST_SECONDS))["state"]
            except OSError as error:
                state = str(error)
            if state == Readiness.READY:
                return perf_counter() - self._started
            if state == Readiness.DEGRADED:
                raise StoreError("a sidecar could not take in all that is on disk")
            self._check_alive(state)
            sleep(LOOK_SECONDS)

    def client(self) -> SidecarStore:
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
                self._process.wait(2.0)
        if self._process.returncode or self._logged():
            raise self._failure()

    def kill(self) -> None:
        """SIGKILL to the supervisor and the sidecar; neither can react."""
        with suppress(OSError):  # an interrupt hits the sidecar too, which may have ended
            self._process.send_signal(signal.SIGSTOP)
            for sidecar in Path(f"/proc/{self.keeper}/task/{self.keeper}/children").read_text().split():
                os.kill(int(sidecar), signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
    store = kvstore.open(f"unix:{socket}", engine=f"kvstore bench {kvstore.__version__}")
    assert isinstance(store, SidecarStore)
    store._door._limits = _PATIENT
    return store


def console_command(sidecar: Sidecar) -> list[str]:
    """Starts a console at a port of the system's choice, which it says in one line of JSON."""
    return [*KVSTORE, "console", "--socket", sidecar.observe, "--listen", f"{HOST}:0", "--json"]


@contextmanager
def viewed(sidecar: Sidecar) -> Iterator[tuple[int, str]]:
    """A console shows the sidecar, and a page's stream is read; yields the console's process and its address."""
    with subprocess.Popen(console_command(sidecar), stdout=subprocess.PIPE, text=True) as console:
        try:
            assert console.stdout is not None
            url = json.loads(console.stdout.readline())["console"]
            with urlopen(f"{url}api/stream", timeout=LONGEST_SECONDS) as stream:
                reading = [sys.executable, "-P", "-c", "import sys\nwhile sys.stdin.buffer.read1(1 << 16): pass"]
                with subprocess.Popen(reading, stdin=stream.fileno()) as page:
                    yield console.pid, url
                    page.kill()
        finally:
            console.terminate()
            console.send_signal(signal.SIGCONT)
