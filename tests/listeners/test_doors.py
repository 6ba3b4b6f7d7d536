"""Every listener that the programs open, besieged at every stage of a request: a good caller is served all the while.

One table: a row for each listener, a column for each stage at which a caller can stop. Besiegers are more than the
listener has places for, and come again when they are ended.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import programs
from console.running import console
from elsewhere.courier import RawCourier
from kv_bench.process import free_port
from kvstore.cli import ask
from kvstore.listeners.places import Place, TakenPlaces
from kvstore.network.grpc_server import KEPT, MOST_CONNECTIONS
from kvstore.peers import transport as t
from kvstore.peers.sockets import SocketFrameDoor, SocketPullTransport
from kvstore.protocol import messages as m
from network.running import beside, ended_by_peer, network, token_file, token_of
from openai_api.running import RunningProxy
from openai_api.small_openai import Asked, SmallOpenAi
from peers.frames import SECRET, Source, random_bytes
from service.sidecar import Sidecar
from service.test_serve import serving
from tiering.clock import SystemClock
from torture.peer import Peer
from waiting import wait_until
from workbench import MODEL, small_layout

OPERATOR = "operator-token-0123456789"
ROUNDS = 4
SECONDS = 20.0
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
        "unread": theirs + b"Content-Length: 2\r\n\r\n{}",  # and its answer is not read
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
def console_door(sidecars: dict[str, Sidecar]) -> Iterator[Door]:
    tokens = f"{OPERATOR}\nother {token_of('other')}\n"
    with console(sidecars["default"].observe_path, tokens=tokens) as shown:
        port = int(shown.url.rstrip("/").rpartition(":")[2])
        shown.until("/api/status", lambda one: one["contact"]["connected"])
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
        with RunningProxy(*flags, limits={"requests": 16}, server={"connections": 64}) as proxy:
            asked = {"model": "m", "prompt": "p", "max_tokens": 1}

            def is_served() -> bool:  # 503 says that sixteen others are under way, and to come again
                try:
                    http_call(proxy.port, path, "", asked)
                except urllib.error.HTTPError as error:
                    assert (error.code, error.headers["retry-after"]) == (503, "1"), error.read()
                    return False
                return True

            yield Door(tcp(proxy.port), lambda: wait_until(is_served), http_stages(path, "x"), 150)
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
        made: list[RawCourier] = []

        def is_let_in() -> bool:
            with suppress(BlockingIOError):  # the kernel's queue was full at this moment
                made.append(RawCourier(one.courier_path))
            return bool(made)

        wait_until(is_let_in)
        with closing(made[0]) as there:
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
def door_named(
    sidecars: dict[str, Sidecar], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Door]]:
    """Each program is started once it is asked for."""
    folder = tmp_path_factory.mktemp("doors")
    makers: dict[str, Callable[[], Any]] = {
        "console": lambda: console_door(sidecars),
        "query grpc": lambda: network_doors(sidecars, folder),
        "pd-proxy": proxy_door,
        "metrics": lambda: metrics_door(folder),
        "pull": pull_door,
    }
    found = socket_doors(sidecars)
    with ExitStack() as stack:

        def named(name: str) -> Door:
            if name not in found:
                key = next(one for one in makers if name in one.split())
                made = stack.enter_context(makers[key]())
                found.update(made if isinstance(made, dict) else {name: made})
            return found[name]

        yield named


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
def test_a_good_caller_is_served_while_others_stop_at_a_stage(
    door_named: Callable[[str], Door], name: str, stage: str
) -> None:
    door = door_named(name)
    assert set(door.stages) == set(TABLE[name]), "every stage of a listener is in the table"
    door.good()
    with Siege(door, door.stages[stage]):
        for _ in range(ROUNDS):
            door.good()
    door.good()


def test_a_newcomer_is_kept_while_one_caller_waits_in_most_places() -> None:
    ended: list[str] = []
    places = TakenPlaces(16)
    for caller in (None, *["a"] * 14, None):
        places.take(Place(partial(ended.append, str(caller)), caller))
    assert places.make_room() and ended == ["a"]


def test_grpc_lets_callers_in_behind_as_many_as_it_takes(door_named: Callable[[str], Door]) -> None:
    door = door_named("grpc")
    socks = [door.connect() for _ in range(MOST_CONNECTIONS + 40)]
    for one in socks:
        with suppress(OSError):
            one.sendall(door.stages["head"])  # grpc itself ends those that say nothing, after a while
    try:
        wait_until(lambda: ended_by_peer(socks) >= len(socks) - KEPT)
        door.good()
    finally:
        for one in socks:
            one.close()


# What HTTP allows in a request ----------------------------------------------------------------------------------------

BODY = b"Content-Length: 2\r\n"
LONG = b"a" * 20_000
REQUESTS = {  # the status at a listener that serves POST, and at metrics, where there is none
    "a coding": (b"POST", b"", b"1.1", BODY + b"Content-Encoding: gzip\r\n", 415, 405),
    "a transfer coding": (b"POST", b"", b"1.1", b"Transfer-Encoding: gzip\r\n", 501, 405),
    "two lengths": (b"POST", b"", b"1.1", BODY + b"Transfer-Encoding: chunked\r\n", 400, 405),
    "chunks of HTTP/1.0": (b"POST", b"", b"1.0", b"Transfer-Encoding: chunked\r\n", 400, 405),
    "another expectation": (b"POST", b"", b"1.1", BODY + b"Expect: tea\r\n", 417, 405),
    "too long a body": (b"POST", b"", b"1.1", b"Content-Length: 99999999\r\nExpect: 100-continue\r\n", 413, 405),
    "no such method": (b"BREW", b"", b"1.1", b"", 501, 501),
    "options": (b"OPTIONS", b"", b"1.1", b"", 405, 405),
    "options of all": (b"OPTIONS", b"*", b"1.1", b"", 404, 405),
    "delete": (b"DELETE", b"", b"1.1", b"", 405, 405),
    "another version": (b"GET", b"", b"2.0", b"", 505, 505),
    "a long target": (b"GET", b"/" + LONG, b"1.1", b"", 414, 414),
    "long headers": (b"GET", b"", b"1.1", b"X: " + LONG + b"\r\n", 431, 431),
    "no path": (b"GET", b"x", b"1.1", b"", 400, 400),
    "two hosts": (b"GET", b"", b"1.1", b"Host: 127.0.0.1\r\n", 400, 400),
    "no host": (b"GET", b"", b"1.1", b"-host", 400, 400),
    "whole address": (b"GET", b"absolute", b"1.1", b"", 405, 200),
    "head": (b"HEAD", b"", b"1.1", b"", 405, 200),
}
PATHS = {
    "console": (b"/api/operator/none", OPERATOR),
    "query": (b"/query", token_of("default")),
    "pd-proxy": (b"/v1/completions", "x"),
    "metrics": (b"/metrics", "x"),
}
ELSEWHERE = {  # where a listener has an answer of its own
    ("console", "options of all"): 405,
    ("console", "whole address"): 404,
    ("console", "head"): 404,
    ("console", "too long a body"): 413,
}


def statuses(sock: socket.socket) -> tuple[list[int], bytes]:
    received = b""
    with suppress(OSError):
        while piece := sock.recv(1 << 16):
            received += piece
    lines = received.split(b"\r\n")
    return [int(one.split()[1]) for one in lines if one.startswith(b"HTTP/1.1 ")], received


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("what", REQUESTS)
def test_what_http_allows_and_is_not_served_is_answered_as_the_standard_says(
    door_named: Callable[[str], Door], name: str, what: str
) -> None:
    door, (path, token) = door_named(name), PATHS[name]
    method, target, version, headers, served, scraped = REQUESTS[what]
    wanted = ELSEWHERE.get((name, what), scraped if name == "metrics" else served)
    if name == "console" and method == b"POST":
        path = b"/login"
    target = {b"": path, b"absolute": b"http://127.0.0.1" + path}.get(target, target)
    host = b"" if headers == b"-host" else b"Host: 127.0.0.1\r\n"
    head = method + b" " + target + b" HTTP/" + version + b"\r\n" + host + headers.removeprefix(b"-host")
    with door.connect() as sock:
        sock.settimeout(SECONDS)
        sock.sendall(head + b"Connection: close\r\nAuthorization: Bearer " + token.encode() + b"\r\n\r\n")
        found, received = statuses(sock)
    assert found == [wanted], received[:400]
    assert b"\r\ndate: " in received.lower()
    assert wanted != 405 or b"\r\nallow: " in received.lower()
    assert wanted != 415 or b"accept-encoding: identity" in received
    assert method != b"HEAD" or received.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("name", [one for one in PATHS if one != "metrics"])
def test_a_body_that_is_no_body_is_its_clients_fault(door_named: Callable[[str], Door], name: str) -> None:
    door, (path, token) = door_named(name), PATHS[name]
    path = b"/login" if name == "console" else path
    head = b"POST " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + token.encode()
    with door.connect() as sock:
        sock.settimeout(SECONDS)
        sock.sendall(head + b"\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"no length\r\n")
        found, received = statuses(sock)
    assert found == [400] and b'{"error":' in received, received[:400]


# Tokens and names -----------------------------------------------------------------------------------------------------


def test_wrong_tokens_of_others_keep_nobody_out_and_are_told_to_wait(door_named: Callable[[str], Door]) -> None:
    door = door_named("console")
    wrong = door.stages["wrong"].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    seen: list[int] = []
    for _ in range(14):
        with door.connect() as sock:
            sock.settimeout(SECONDS)
            sock.sendall(wrong)
            found, received = statuses(sock)
            seen += found
            assert found != [429] or b"retry-after: 60" in received
        door.good()
    assert set(seen) <= {401, 429} and seen[-3:] == [429] * 3


TWO_ADDRESSES = """
import socket
known = socket.getaddrinfo
def getaddrinfo(host, *more, **named):
    found = known("127.0.0.1", *more, **named)
    if host != "localhost":
        return known(host, *more, **named)
    return found + [(*one[:4], ("127.0.0.2", one[4][1])) for one in found]
socket.getaddrinfo = getaddrinfo
"""
"""A host on which `localhost` has two addresses."""


@pytest.mark.parametrize("program", ["network", "query", "console", "pd-proxy", "serve"])
def test_a_name_is_served_at_each_of_its_addresses_or_not_at_all(
    sidecars: dict[str, Sidecar], tmp_path: Path, program: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(TWO_ADDRESSES)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{programs.PATHS['PYTHONPATH']}"}
    folder = sidecars["default"].path.parent
    flags = {
        "console": ["console", "--socket", str(sidecars["default"].observe_path), "--listen"],
        "pd-proxy": ["pd-proxy", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--listen"],
        "serve": ["serve", "--data", str(tmp_path / "kv"), "--dram", "16MiB", "--nvme", "off", "--http"],
        "network": ["network", *beside(folder, None)[:-2], "--token-file", str(token_file(tmp_path)), "--listen"],
        "query": ["network", *beside(folder, token_file(tmp_path)), "--http"],
    }[program]  # fmt: skip
    with socket.create_server(("127.0.0.2", free_port())) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", *flags, f"localhost:{port}"],
            capture_output=True, text=True, env=environment, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2 and "cannot be listened on" in done.stderr and "127.0.0.2" in done.stderr, done
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 5)
    command = [sys.executable, "-m", "kvstore", *flags, f"localhost:{port}", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            for host in ("127.0.0.1", "127.0.0.2"):
                socket.create_connection((host, port), SECONDS).close()
        finally:
            process.terminate()
