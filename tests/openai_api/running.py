"""`kvstore pd-proxy` in a process of its own, and raw clients of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from email.message import Message
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30.0
WITH_LIMITS = """
import sys, json
from dataclasses import replace
from kvstore.openai import proxy
of_proxy, of_server = json.loads(sys.argv.pop(1))
whole = proxy.ProxyLimits
proxy.LIMITS = replace(proxy.LIMITS, **of_server)
proxy.ProxyLimits = lambda **given: replace(whole(**given), **of_proxy)
from kvstore.cli.main import main
main()
"""
"""The command line, with limits that it does not offer."""


class Answered(NamedTuple):
    status: int
    body: bytes
    headers: Message

    @property
    def legs(self) -> tuple[str | None, str | None]:
        """What the proxy says of prefill, and who decoded."""
        return self.headers["x-kvstore-prefill"], self.headers["x-kvstore-decode"]


class RunningProxy:
    """A context. limits: of `ProxyLimits`; server: of the listener's `HttpLimits`."""

    def __init__(
        self,
        *arguments: str,
        limits: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        **environment: str,
    ) -> None:
        given = json.dumps([limits or {}, server or {}])
        command = [sys.executable, "-c", WITH_LIMITS, given, "pd-proxy", *arguments]
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        self._process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read()
        self.url: str = json.loads(line)["pd_proxy"]
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self) -> RunningProxy:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.end() == 0

    def end(self) -> int:
        self._process.terminate()
        try:
            self.said = self._process.communicate(timeout=SECONDS)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        assert "Traceback" not in self.said, self.said
        return self._process.returncode

    def asked(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """An answer whose head is there."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, content, {name.replace("_", "-"): value for name, value in headers.items()})
        return connection, connection.getresponse()

    def ask(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> Answered:
        connection, answer = self.asked(path, body, method, **headers)
        try:
            return Answered(answer.status, answer.read(), answer.headers)
        finally:
            connection.close()

    def health(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.ask("/health", method="GET").body)
        return told

    def error(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, dict[str, Any]]:
        """An answer that is an error as OpenAI's are."""
        status, said, _ = self.ask(path, body, method, **headers)
        error = json.loads(said)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return status, error

    def wire(self, sent: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        made.sendall(sent)
        return made


def events_of(body: bytes) -> list[Any]:
    """What the events of a stream say."""
    said = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in said]
