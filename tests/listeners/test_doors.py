"""Every listener that the programs open, besieged at every stage of a request: a good caller is served all the while.

One table: a row for each listener, a column for each stage at which a caller can stop. Besiegers are more than the
listener has places for, and come again when they are ended.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from console.running import console
from elsewhere.courier import RawCourier
from kvstore.cli import ask
from kvstore.peers import transport as t
from kvstore.peers.door import SocketFrameDoor
from kvstore.peers.sockets import SocketPullTransport
from kvstore.protocol import messages as m
from network.running import beside, network, token_file, token_of
from openai_api.running import RunningProxy
from openai_api.small_openai import Asked, SmallOpenAi
from peers.frames import SECRET, Source, random_bytes
from service.sidecar import Sidecar
from service.test_serve import serving
from tiering.clock import SystemClock
from torture.peer import Peer
from workbench import MODEL, small_layout

OPERATOR = "operator-token-0123456789"
ROUNDS = 4
SECONDS = 20.0
"""For one good call beside others' tests: what a besieged listener of before never answered within."""
LAYOUT = small_layout()


@dataclass
class Door:
    """good: a whole call on a connection of its own, checked. stages: what a besieger sends before it stops. most: how
    many besiegers there are."""

    connect: Callable[[], socket.socket]
    good: Callable[[], None]
    stages: dict[str, bytes]
    most: int
    log: Callable[[], int] = field(default=lambda: 0)


class Siege:
    """Connections that stop at one stage. Those that are ended come again, 400 a second at most."""

    def __init__(self, door: Door, said: bytes) -> None:
        self._door, self._said = door, said
        self._socks: list[socket.socket] = []
        self._over = threading.Event()
        for _ in range(door.most):
            self._come()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Siege:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SECONDS)
        for one in self._socks:
            one.close()

    def _come(self) -> None:
        with suppress(OSError):  # turned away at once
            sock = self._door.connect()
            sock.setblocking(False)
            self._socks.append(sock)
            with suppress(OSError):
                sock.send(self._said)

    def _go_on(self) -> None:
        while not self._over.wait(0.05):
            for one in [one for one in self._socks if is_ended(one)][:20]:
                self._socks.remove(one)
                one.close()
                self._come()


def is_ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


# Stages ---------------------------------------------------------------------------------------------------------------


def http_stages(path: str, other: str, method: str = "POST") -> dict[str, bytes]:
    """other: another tenant's token."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
    theirs = head + b"Authorization: Bearer " + other.encode() + b"\r\n"
    return {
        "silent": b"",
        "line": head[:5],
        "head": head + b"X: ",
        "body": head + b"Content-Length: 1000\r\n\r\n{",
        "body of another tenant": theirs + b"Content-Length: 1000\r\n\r\n{",
        "expects": theirs + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n",
        "unread": (theirs + b"Content-Length: 2\r\n\r\n{}") * 100,
    }


def grpc_stages(other: str) -> dict[str, bytes]:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = struct.pack(">I", 0)[1:] + b"\4\0" + bytes(4)

    def call(*more: tuple[str, str]) -> bytes:
        named = [(":method", "POST"), (":scheme", "http"), (":path", "/kvstore.v1.Store/Namespaces")]
        named += [(":authority", "x"), ("te", "trailers"), ("content-type", "application/grpc")]
        named += [("grpc-timeout", "30S"), *more]
        block = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in named
        )
        return preface + settings + struct.pack(">I", len(block))[1:] + b"\1\4" + struct.pack(">I", 1) + block

    return {
        "silent": b"",
        "line": preface[:5],
        "head": preface + settings,
        "body": call(),
        "body of another tenant": call(("authorization", f"Bearer {other}")),
    }


def socket_stages(hello: m.Hello) -> dict[str, bytes]:
    whole = m.pack(m.Request(1, hello))
    return {"silent": b"", "length": whole[:2], "hello": whole[:-1]}


HELLO = m.Hello(m.OLDEST_VERSION, m.NEWEST_VERSION, "t")


# Doors ----------------------------------------------------------------------------------------------------------------


def tcp(port: int) -> Callable[[], socket.socket]:
    return lambda: socket.create_connection(("127.0.0.1", port), SECONDS)


def unix(path: Path) -> Callable[[], socket.socket]:
    return lambda: Peer(str(path), SECONDS).socket


def http_call(port: int, path: str, token: str, body: Any = None) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        assert answer.status == 200 and answer.read()


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sidecar]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Sidecar(tmp_path_factory.mktemp(name), couriers=name == "default"))
            for name in ("default", "other")
        }


@contextmanager
def console_door(sidecars: dict[str, Sidecar], folder: Path) -> Iterator[Door]:
    (folder / "console").write_text(f"{OPERATOR}\nother {token_of('other')}\n")
    with console(sidecars["default"].observe_path, "--token-file", str(folder / "console")) as shown:
        port = int(shown.url.rstrip("/").rpartition(":")[2])
        shown.until("/api/status", lambda one: one["contact"]["connected"], Authorization=f"Bearer {OPERATOR}")
        stages = http_stages("/login", token_of("other"))
        stages["unread"] = http_stages("/api/status", token_of("other"), "GET")["unread"]
        stages["wrong"] = b"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer wrong\r\n\r\n"
        yield Door(tcp(port), lambda: http_call(port, "/api/status", OPERATOR), stages, 300)
        shown.process.terminate()
        assert shown.process.communicate(timeout=SECONDS)[1].count("\n") <= 3, "a line for each request that is refused"


@contextmanager
def network_doors(sidecars: dict[str, Sidecar], folder: Path) -> Iterator[dict[str, Door]]:
    sockets = {name: one.path for name, one in sidecars.items()}
    flags = beside(sidecars["default"].path.parent, token_file(folder, tuple(sockets)), **sockets)
    with network(*flags, "--http", "127.0.0.1:0") as running:
        port, target = running.http_port, int(running.target.rpartition(":")[2])
        assert port is not None

        def call() -> None:
            with closing(running.of_tenant()) as caller:
                caller.namespaces()

        asked = {"model": MODEL, "token_ids": [1] * 64}
        query = Door(
            tcp(port), lambda: http_call(port, "/query", token_of("default"), asked),
            http_stages("/query", token_of("other")), 600,
        )  # fmt: skip
        yield {"query": query, "grpc": Door(tcp(target), call, grpc_stages(token_of("other")), 1100)}
        running.process.terminate()
        assert running.process.communicate(timeout=SECONDS)[1].count("\n") <= 3


@contextmanager
def proxy_door() -> Iterator[Door]:
    async def completes(asked: Asked) -> None:
        await asked.json({"id": "d", "choices": [{"text": "one"}]})

    path = "/v1/completions"
    engine = SmallOpenAi({path: completes})
    try:
        flags = "--prefill", engine.url, "--decode", engine.url, "--legs", "shared-storage"
        with RunningProxy(*flags, limits={"connections": 64, "requests": 16}) as proxy:
            asked = {"model": "m", "prompt": "p", "max_tokens": 1}
            yield Door(tcp(proxy.port), lambda: http_call(proxy.port, path, "", asked), http_stages(path, "x"), 150)
    finally:
        engine.close()


@contextmanager
def metrics_door(folder: Path) -> Iterator[Door]:
    with serving(folder, "--nvme", "off", "--http", "127.0.0.1:0") as (_, said):
        port = said["http_port"]
        stages = http_stages("/metrics", "x", "GET")
        del stages["body"], stages["body of another tenant"], stages["expects"]  # no body is read: it is answered
        yield Door(tcp(port), lambda: http_call(port, "/metrics", ""), stages, 100)


@contextmanager
def pull_door() -> Iterator[Door]:
    door = SocketFrameDoor("127.0.0.1:0", SystemClock(), random_bytes, seal="auto")

    def pulls() -> None:
        source, deadline = Source(3), time.monotonic() + SECONDS
        offer = door.offer(source.offered(), SECRET)
        reader = SocketPullTransport(SystemClock(), seal="auto").connect(offer, SECRET, deadline)
        slots = source.slots()
        assert reader.pull(slots, source.check(), deadline) == 6
        reader.close()

    try:
        stages = {"silent": b"", "hello": bytes(t.HELLO.size - 1)}
        yield Door(tcp(t.numeric_address(door.address)[1]), pulls, stages, 600)
    finally:
        door.close()


def socket_doors(sidecars: dict[str, Sidecar]) -> dict[str, Door]:
    one = sidecars["default"]

    def engine() -> None:
        with one.client() as store:
            store.namespace(model=MODEL, layout=LAYOUT)

    def courier() -> None:
        with closing(RawCourier(one.courier_path)) as there:
            assert isinstance(there.welcome, m.Welcome)

    def asks(path: Path) -> Callable[[], None]:
        return lambda: (ask.stat(str(path), SystemClock()), None)[1]

    greeted = {"greeted": m.pack(m.Request(1, HELLO))}
    stages = socket_stages(HELLO)
    return {
        "api": Door(unix(one.path), engine, stages, 300),
        "admin": Door(unix(one.admin_path), asks(one.admin_path), stages | greeted, 20),
        "observe": Door(unix(one.observe_path), asks(one.observe_path), stages | greeted, 20),
        "courier": Door(unix(one.courier_path), courier, stages, 300),
    }


@pytest.fixture(scope="module")
def doors(sidecars: dict[str, Sidecar], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Door]]:
    folder = tmp_path_factory.mktemp("doors")
    with ExitStack() as stack:
        found = socket_doors(sidecars)
        found["console"] = stack.enter_context(console_door(sidecars, folder))
        found |= stack.enter_context(network_doors(sidecars, folder))
        found["pd-proxy"] = stack.enter_context(proxy_door())
        found["metrics"] = stack.enter_context(metrics_door(folder))
        found["pull"] = stack.enter_context(pull_door())
        yield found


HTTP = ("silent", "line", "head", "body", "body of another tenant", "expects", "unread")
TABLE = {
    "console": (*HTTP, "wrong"),
    "query": HTTP,
    "pd-proxy": HTTP,
    "metrics": ("silent", "line", "head", "unread"),
    "grpc": ("silent", "line", "head", "body", "body of another tenant"),
    "pull": ("silent", "hello"),
    "api": ("silent", "length", "hello"),
    "admin": ("silent", "length", "hello", "greeted"),
    "observe": ("silent", "length", "hello", "greeted"),
    "courier": ("silent", "length", "hello"),
}


@pytest.mark.parametrize("name, stage", [(name, stage) for name, stages in TABLE.items() for stage in stages])
def test_a_good_caller_is_served_while_others_stop_at_a_stage(doors: dict[str, Door], name: str, stage: str) -> None:
    door = doors[name]
    assert set(door.stages) == set(TABLE[name]), "every stage of a listener is in the table"
    door.good()
    with Siege(door, door.stages[stage]):
        for _ in range(ROUNDS):
            door.good()
    door.good()
