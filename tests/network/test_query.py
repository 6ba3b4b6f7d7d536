"""POST /query and /query_by_hash: what a router is told, who may ask, and what clients send that costs them alone."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import ssl
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from kvstore.block.identity import ExtraKey
from kvstore.network.query import IDLE_SECONDS, MOST_BODIES, MOST_BODY_BYTES, MOST_CONNECTIONS
from network.running import (
    OPERATOR_TOKEN,
    Issuer,
    RunningNetwork,
    beside,
    certified,
    ended_by_peer,
    network,
    token_file,
    token_of,
)
from programs import fetched
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sidecar]]:
    """Of two tenants; the other one has nothing of this prompt."""
    with ExitStack() as stack:
        found = {}
        for name in ("default", "other"):
            found[name] = stack.enter_context(Sidecar(tmp_path_factory.mktemp(name)))
            store = stack.enter_context(found[name].client())
            handle = store.namespace(model=MODEL, layout=LAYOUT, name="org/small model")
            if name == "default":
                handle.put(ids(640), random_pages(LAYOUT, 10))
                salt = ExtraKey(b"salt:" + blake2b(b"pepper", digest_size=32).digest())
                handle.put(ids(320), random_pages(LAYOUT, 5), extra_keys=[salt])
        yield found


@pytest.fixture(scope="module")
def running(sidecars: dict[str, Sidecar]) -> Iterator[RunningNetwork]:
    folder = sidecars["default"].path.parent
    sockets = {name: one.path for name, one in sidecars.items()}
    with network(*beside(folder, token_file(folder, tuple(sockets)), **sockets), "--http", "127.0.0.1:0") as process:
        yield process


def post(running: RunningNetwork, path: str, body: Any, token: str | None = None, tenant: str = "default") -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert running.http_port is not None
    status, text = fetched(running.http_port, path, data, token or token_of(tenant))
    return status, json.loads(text)


def test_a_router_is_told_tokens_by_tier_and_nothing_is_counted(
    running: RunningNetwork, sidecars: dict[str, Sidecar]
) -> None:
    before = sidecars["default"].admin.facts()
    expected = {"longest_matched": 640, "GPU": 0, "CPU": 640, "DISK": 0, "DP": {}, "load_ms": None}
    expected |= {"is_asked": True, "partial_detail": ""}
    for model in (MODEL, "org/small model"):
        asked = {"model": model, "token_ids": ids(700), "block_size": 16, "lora_name": None, "unknown": [1]}
        wait_until(lambda asked=asked: post(running, "/query", asked)[1]["default"])
        assert post(running, "/query", asked) == (200, {"default": {before.node: expected}})
    asked = {"model": MODEL, "token_ids": ids(700)}
    for more, found in (
        ({"tenant_id": "default", "instance_id": before.node}, 640),
        ({"cache_salt": "pepper"}, 320),
        ({"cache_salt": "other"}, 0),
        ({"token_ids": ids(63)}, 0),
    ):
        _, answer = post(running, "/query", asked | more)
        assert answer["default"][before.node]["longest_matched"] == found
    assert post(running, "/query", asked | {"instance_id": "0" * 32}) == (200, {"default": {}})
    assert post(running, "/query", asked | {"model": "none"}) == (200, {"default": {}})
    _, other = post(running, "/query", asked, tenant="other")
    (instance,) = other["other"].values()
    assert instance["longest_matched"] == 0 and list(other) == ["other"]
    after = sidecars["default"].admin.facts()
    assert after.looked == before.looked and after.leases == before.leases == 0


def test_a_router_that_holds_the_identity_key_asks_by_hashes(
    running: RunningNetwork, sidecars: dict[str, Sidecar]
) -> None:
    with sidecars["default"].client() as store:
        keys = store.namespace(model=MODEL, layout=LAYOUT).hashed(ids(700)).keys
    node = sidecars["default"].admin.facts().node
    asked = {"model": MODEL, "block_hashes": [one.hex() for one in keys]}
    _, answer = post(running, "/query_by_hash", asked)
    assert answer["default"][node]["CPU"] == 640
    _, answer = post(running, "/query_by_hash", asked, tenant="other")
    assert [one["longest_matched"] for one in answer["other"].values()] == [0]
    for wrong in (["x"], ["00"], [keys[0].hex() + "0"], [7], [None], "x"):
        assert post(running, "/query_by_hash", asked | {"block_hashes": wrong})[0] == 400


def test_what_is_refused_is_said_in_a_line(running: RunningNetwork) -> None:
    asked = {"model": MODEL, "token_ids": [1] * 64}
    for path, body, status, words in (
        ("/query", b"{", 400, "not a query"),
        ("/query", b"\xff", 400, "not a query"),
        ("/query", b"[" * 100_000, 400, "not a query"),
        ("/query", {}, 400, "model"),
        ("/query", asked | {"model": ""}, 400, "model"),
        ("/query", asked | {"token_ids": [-1]}, 400, "token_ids"),
        ("/query", asked | {"token_ids": [1 << 32]}, 400, "token_ids"),
        ("/query", asked | {"token_ids": [1.5]}, 400, "token_ids"),
        ("/query", asked | {"lora_name": "x"}, 400, "adapters"),
        ("/query", asked | {"tenant_id": "other"}, 403, "tenant_id"),
        ("/query", asked | {"tenant_id": "no such one"}, 403, "tenant_id"),
        ("/query_by_hash", asked | {"cache_salt": "x"}, 400, "cache_salt"),
        ("/", asked, 404, "/query"),
        ("/query", b" " * (MOST_BODY_BYTES + 1), 413, "bytes"),
    ):
        answer = post(running, path, body)
        assert answer[0] == status and words in answer[1]["error"], answer
    assert post(running, "/query", asked, token="wrong")[0] == 401
    assert post(running, "/query", asked, token=OPERATOR_TOKEN)[0] == 403
    assert running.http_port is not None and fetched(running.http_port, "/query")[0] == 405


def raw(running: RunningNetwork) -> socket.socket:
    assert running.http_port is not None
    return socket.create_connection(("127.0.0.1", running.http_port), timeout=60)


HEAD = f"POST /query HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token_of('default')}\r\n"


def test_requests_follow_each_other_on_a_connection(running: RunningNetwork) -> None:
    body = json.dumps({"model": MODEL, "token_ids": ids(640)})
    request = f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with raw(running) as sock:
        sock.sendall(request * 3)  # at once
        seen = b""
        while seen.count(b'"longest_matched":640') < 3:
            piece = sock.recv(1 << 16)
            assert piece, seen
            seen += piece
        sock.sendall(f"{HEAD}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert b"100" in sock.recv(1 << 16)
        sock.sendall(body.encode())
        assert b'"longest_matched":640' in sock.recv(1 << 16)


def test_a_body_of_a_stranger_is_not_read_and_nonsense_ends_its_connection(running: RunningNetwork) -> None:
    stranger = HEAD.replace(token_of("default"), "wrong")
    for request, status in (
        (f"{stranger}Content-Length: 4000000\r\n\r\n", b"401"),
        (f"{HEAD}Content-Length: x\r\n\r\n", b"400"),
        ("\x16\x03\x01\x02\x00 nonsense\r\n\r\n", b"400"),
    ):
        with raw(running) as sock:
            sock.sendall(request.encode("latin-1"))
            seen = b""
            try:
                while piece := sock.recv(1 << 16):
                    seen += piece
            except ConnectionResetError:
                pass
            assert status in seen.split(b"\r\n")[0], (request[:60], seen[:100])
    assert post(running, "/query", {"model": MODEL, "token_ids": []})[0] == 200


def test_one_caller_s_slow_bodies_take_no_place_of_another_s(running: RunningNetwork) -> None:
    asked, body = {"model": MODEL, "token_ids": []}, json.dumps({"model": MODEL, "token_ids": []})
    head = f"{HEAD}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    slow = [raw(running) for _ in range(MOST_BODIES)]
    try:
        for one in slow:
            one.sendall(head)
            assert b" 100 " in one.recv(1 << 16), "its body is being read"
        with raw(running) as further:
            further.sendall(head)
            assert b" 429 " in further.recv(1 << 16).split(b"\r\n")[0]
        assert post(running, "/query", asked)[0] == 429
        assert post(running, "/query", asked, tenant="other")[0] == 200
        slow[0].sendall(body.encode())
        assert b" 200 " in slow[0].recv(1 << 16).split(b"\r\n")[0]
        slow[1].close()  # one that gives up makes room as well
        wait_until(lambda: post(running, "/query", asked)[0] == 200)
    finally:
        for one in slow:
            one.close()
    wait_until(lambda: post(running, "/query", asked)[0] == 200)


def test_connections_that_come_all_at_once_make_room_for_as_many(running: RunningNetwork) -> None:
    body = json.dumps({"model": MODEL, "token_ids": []})
    more, began = 60, time.monotonic()
    silent = [raw(running) for _ in range(MOST_CONNECTIONS)]
    try:
        assert post(running, "/query", {"model": MODEL, "token_ids": []})[0] == 200  # all of them were let in
        os.kill(running.process.pid, signal.SIGSTOP)
        silent += [raw(running) for _ in range(more)]
        os.kill(running.process.pid, signal.SIGCONT)
        silent[-1].sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert b" 200 " in silent[-1].recv(1 << 16)
        wait_until(lambda: ended_by_peer(silent) >= more)
        assert time.monotonic() - began < IDLE_SECONDS, "all that are idle have ended by now"
    finally:
        os.kill(running.process.pid, signal.SIGCONT)
        for one in silent:
            one.close()


def test_what_clients_send_is_in_no_log(sidecars: dict[str, Sidecar], tmp_path: Path) -> None:
    """Requests cut off at each of some bytes, by an end, by half of one and by a reset, and random bytes."""
    folder = sidecars["default"].path.parent
    body = json.dumps({"model": MODEL, "token_ids": ids(640)})
    request = f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    rng = random.Random(seed := random.randrange(1 << 30))
    print("seed", seed)
    with network(*beside(folder, token_file(tmp_path)), "--http", "127.0.0.1:0") as running:
        for number in range(120):
            sent = request[: rng.randrange(len(request) + 1)] if number % 3 else rng.randbytes(rng.randrange(300))
            with raw(running) as sock:
                sock.sendall(sent)
                if number % 4 == 1:
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass
                elif number % 4 == 2:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with raw(running) as sock:  # a client that hangs up before its answer
            sock.sendall(request)
        assert post(running, "/query", {"model": MODEL, "token_ids": []})[0] == 200
        running.process.terminate()
        out, errors = running.process.communicate(timeout=60)
        assert (running.process.returncode, out, errors) == (0, "", "")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")
def test_routers_of_other_hosts_come_with_certificates(sidecars: dict[str, Sidecar], tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "ca")
    with certified(sidecars["default"].path.parent, issuer, "--http", "127.0.0.1:0") as running:
        data = json.dumps({"model": MODEL, "token_ids": ids(640)}).encode()

        def asked(names: str, name: str) -> tuple[int, Any]:
            context = ssl.create_default_context(cafile=issuer.ca)
            context.load_cert_chain(*issuer.issue(name, names))
            url = f"https://localhost:{running.http_port}/query"
            request = urllib.request.Request(url, data, {"Authorization": f"Bearer {token_of('default')}"})
            try:
                with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                    return answer.status, json.loads(answer.read())
            except urllib.error.HTTPError as error:
                return error.code, None

        _, answer = asked("URI:kvstore:tenant:default", "router")
        assert [one["CPU"] for one in answer["default"].values()] == [640]
        assert asked("DNS:nobody", "nobody")[0] == 401 and asked("URI:kvstore:operator", "operator")[0] == 403
        context = ssl.create_default_context(cafile=issuer.ca)
        assert running.http_port is not None
        seen = b""
        with (
            socket.create_connection(("localhost", running.http_port), timeout=60) as plain,
            suppress(ssl.SSLError, ConnectionError),  # TLS ends it, before HTTP says a word
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            secured.sendall(b"POST /query HTTP/1.1\r\nHost: localhost\r\n\r\n")
            seen = secured.recv(1 << 16)
        assert not seen
