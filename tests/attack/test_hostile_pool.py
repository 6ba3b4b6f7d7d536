"""A directory and a holder that are an attacker's: a node dials what it may, believes nothing, and works on."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
valkey = pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")

from courier.nodes import Asker, Node, pool  # noqa: E402
from kvstore.block.account import HitTier  # noqa: E402
from kvstore.block.identity import Namespace  # noqa: E402
from kvstore.peers.tokens import HAS, PULL, PullTerms, ask_mac, hello_for  # noqa: E402
from kvstore.pool.directory import NodeEntry, chunk_heads, entry_bytes, hint_value  # noqa: E402
from kvstore.protocol import messages as m  # noqa: E402
from kvstore.wire import peer_pb2  # noqa: E402
from kvstore.wire.peer_pb2_grpc import PeerServicer, PeerStub, add_PeerServicer_to_server  # noqa: E402
from tiering.frame import KEY_BYTES, frame_bytes  # noqa: E402
from valkey_server import valkey_server  # noqa: E402
from waiting import wait_until  # noqa: E402

RUN, BLOCKS = b"a run of", 20
CHOSEN = b"\r\nCONFIG SET dir /tmp\r\nFLUSHALL\r\n"[:32]
"""A token by which a server that speaks in lines could be made to do something."""
Lie = Callable[[str], peer_pb2.OpenPullResponse]


def offer(address: str, **other: Any) -> peer_pb2.OpenPullResponse:
    """As a holder answers, but for what is named."""
    right = {"token": CHOSEN, "transport": "sockets", "blocks": 1, "frame_bytes": FRAMES, "nonce": bytes(16)}
    return peer_pb2.OpenPullResponse(**{**right, "address": address, **other})


FRAMES: list[int] = []
LIES: dict[str, Lie] = {
    "a service of its choice": offer,
    "sealed": lambda address: offer(address, is_sealed=True),
    "a short token": lambda address: offer(address, token=b"x"),
    "a long token": lambda address: offer(address, token=b"x" * 100_000),
    "a short nonce": lambda address: offer(address, nonce=b""),
    "no blocks": lambda address: offer(address, blocks=0),
    "too many blocks": lambda address: offer(address, blocks=(1 << 32) - 1),
    "frames of other sizes": lambda address: offer(address, frame_bytes=[1 << 62]),
    "frames of many parts": lambda address: offer(address, frame_bytes=[8192] * 100_000),
    "another transport": lambda address: offer(address, transport="ucx"),
    "no transport": lambda address: offer(address, transport="\x1b[2J" * 1000),
    "a name": lambda address: offer("localhost:" + address.rpartition(":")[2]),
    "a path": lambda address: offer("unix:/tmp/x"),
    "a long address": lambda address: offer("1" * 500_000),
    "a reason with anything": lambda address: peer_pb2.OpenPullResponse(reason="\n\x1b[31m" * 10_000),
    "port 0": lambda address: offer("127.0.0.1:0"),
}


class Liar(PeerServicer):  # type: ignore[misc]
    """Has everything, and offers what the first key's lie says."""

    def __init__(self) -> None:
        self.lies: dict[bytes, tuple[Lie, str]] = {}
        self.asked: list[bytes] = []

    def Has(self, request: Any, context: Any) -> Any:
        return peer_pb2.HasResponse(blocks=len(request.keys) // KEY_BYTES)

    def OpenPull(self, request: Any, context: Any) -> Any:
        first = request.keys[:KEY_BYTES]
        self.asked.append(first)
        lie, address = self.lies[first]
        return lie(address)


class Service:
    """Of this host, and none of the pool's: keeps what it is sent."""

    def __init__(self, family: socket.AddressFamily, where: Any) -> None:
        self.heard: list[bytes] = []
        self._listener = socket.socket(family)
        self._listener.bind(where)
        self._listener.listen(64)
        self.name = self._listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(0.5)
                with sock, suppress(OSError):
                    self.heard.append(b"")
                    while piece := sock.recv(1 << 16):
                        self.heard[-1] += piece

    def close(self) -> None:
        self._listener.close()


@contextmanager
def attacked(folder: Path) -> Iterator[tuple[Node, Any]]:
    with (
        valkey_server(folder) as server,
        valkey.Valkey(unix_socket_path=server.socket_path) as client,
        pool(folder / "pool", 1, {"directory": f"valkey+unix:{server.socket_path}"}) as (node,),
    ):
        wait_until(lambda: client.scard("kv:nodes") == 1)
        yield node, client


def enter(client: Any, node: bytes, address: str, fingerprints: tuple[bytes, ...]) -> None:
    entry = NodeEntry(node, RUN, address, fingerprints, (1,), ("sockets",))
    client.set(b"kv:n:" + node, entry_bytes(entry), px=600_000)
    client.sadd("kv:nodes", node)


def hint(client: Any, asker: Asker, keys: list[bytes], node: bytes) -> None:
    for _, name in chunk_heads(Namespace.digest(asker.handle.namespace), keys):
        client.hset(b"kv:h:" + name, node, hint_value(RUN, HitTier.DRAM))


def resident(process: Any) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


def test_a_holder_that_lies_in_every_field(tmp_path: Path) -> None:
    liar, service = Liar(), Service(socket.AF_INET, ("127.0.0.1", 0))
    server = grpc.server(ThreadPoolExecutor(4))
    add_PeerServicer_to_server(liar, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with attacked(tmp_path) as (node, client), ExitStack() as stack:
        stack.callback(lambda: server.stop(0))
        stack.callback(service.close)
        node.put(0)
        asker = stack.enter_context(Asker(node))
        fingerprint = asker.wire.welcome.fingerprint
        for at, lie in enumerate(LIES.values(), 1):
            keys = asker.hashed(at, BLOCKS).keys
            liar.lies[keys[0]] = lie, f"127.0.0.1:{service.name[1]}"
            other = secrets.token_bytes(16)
            enter(client, other, f"127.0.0.1:{port}", (fingerprint,))
            hint(client, asker, keys, other)
        wait_until(lambda: sum(one["kind"] == "peer" for one in node.stat()["elsewhere"]["sources"]) == len(LIES))
        listed = asker._ask(m.Namespaces(0), m.NamespacesReply).namespaces
        FRAMES[:] = [frame_bytes(one) for one in listed[0].payload_bytes]
        for at, name in enumerate(LIES, 1):
            began = time.monotonic()
            got = asker.get(at, BLOCKS, 1.0, 5.0)
            took = time.monotonic() - began
            print(f"{name}: {got.located.number and got.awaited} {took:.2f} s; heard {len(service.heard)}")
            assert got.blocks == 0 and took < 8.0, (name, got)
            assert got.located.number, (name, got.located)
        print(service.heard)
        assert not any(CHOSEN[:16] in one for one in service.heard), "no byte is the holder's choice"
        assert asker.get(0, BLOCKS, 1.0, 5.0).is_right
        log = node.log()
        print("log", len(log), log[-3000:])
        assert len(log) < 40_000 and "\x1b" not in log
        facts = node.stat()
        assert facts["reservations"] == 0 and facts["leases"] == 0, facts
        print(json.dumps(facts["elsewhere"])[:3000])


def test_a_directory_with_anything_in_it(tmp_path: Path) -> None:
    with attacked(tmp_path) as (node, client), ExitStack() as stack:
        here = Service(socket.AF_INET, ("127.0.0.1", 0))
        local = Service(socket.AF_UNIX, str(tmp_path / "x"))
        short = Service(socket.AF_UNIX, str(tmp_path / "7"))
        for one in (here, local, short):
            stack.callback(one.close)
        node.put(0)
        asker = stack.enter_context(Asker(node))
        client.sadd("kv:nodes", b"x" * (32 << 20), b"\xff" * 16, b"e")
        wait_until(lambda: client.scard("kv:nodes") == 1)  # it is made anew
        fingerprint = asker.wire.welcome.fingerprint
        keys = asker.hashed(1, BLOCKS).keys
        addresses = [
            f"127.0.0.1:{here.name[1]}",
            f"unix:{tmp_path}/x",
            "unix:7",
            f"unix://{tmp_path}/x",
            "x" * 290 + ":1",
            "dns://127.0.0.1/x:1",
            "127.0.0.1:99999",
            "127.0.0.1:1\r\nHost: x",
            "ipv4:127.0.0.1:1,127.0.0.2:2",
            "",
            "a b:1",
            "10.255.255.1:7470",
            "[::1]:1",
            "\u0000:1",
            "xds:///x",
            "vsock:1:2",
        ]
        for address in addresses:
            one = secrets.token_bytes(16)
            enter(client, one, address, (fingerprint,))
            hint(client, asker, keys, one)
        for value in (
            b"",
            b"{",
            b"[" * 8000,
            b"x" * (1 << 20),
            b'{"node":1}',
            entry_bytes(NodeEntry(bytes(16), RUN, "x:1")),
        ):
            one = secrets.token_bytes(16)
            client.set(b"kv:n:" + one, value)
            client.sadd("kv:nodes", one)
        one = secrets.token_bytes(16)
        client.lpush(b"kv:n:" + one, "list")
        client.sadd("kv:nodes", one)
        wait_until(lambda: sum(one["kind"] == "peer" for one in node.stat()["elsewhere"]["sources"]) >= 3)
        before = resident(node.network)
        for _ in range(20):
            asker.locate(keys)
            time.sleep(0.02)
        names = [name for _, name in chunk_heads(Namespace.digest(asker.handle.namespace), asker.hashed(2, 48).keys)]
        client.eval("for i=1,200000 do redis.call('HSET', KEYS[1], i, 'x') end", 1, b"kv:h:" + names[0])
        client.set(b"kv:h:" + names[1], b"x" * (64 << 20))
        client.hset(b"kv:h:" + names[2], mapping={secrets.token_bytes(16): b"x" * (8 << 20) for _ in range(4)})
        for _ in range(20):
            found = asker.locate(asker.hashed(2, 48).keys)
            assert not found.number, found
            time.sleep(0.05)
        print("heard", here.heard[:3], local.heard, short.heard)
        assert not local.heard and not short.heard, "no path is dialled"
        for broken in (lambda: client.set("kv:nodes", "x"), lambda: client.delete("kv:nodes"), client.flushall):
            client.delete("kv:nodes")
            broken()
            time.sleep(2.0)
            assert asker.get(0, BLOCKS, 1.0, 2.0).is_right
            wait_until(lambda: client.type("kv:nodes") == b"set")
        wait_until(lambda: client.type("kv:nodes") == b"set" and client.scard("kv:nodes") == 1)
        wait_until(lambda: not node.stat()["elsewhere"]["reasons"])
        print("sources", json.dumps(node.stat()["elsewhere"]["sources"])[:2000], node.stat()["elsewhere"]["reasons"])
        grown = resident(node.network) - before
        log = node.log()
        print(f"grown {grown >> 20} MiB; log {len(log)}", log[-3000:])
        assert grown < 48 << 20 and len(log) < 20_000


def test_who_has_the_tenant_s_key_pins_no_more_than_may_be(tmp_path: Path) -> None:
    """Forged and replayed questions of a process that knows the key: what is pinned by them is bounded, and ends."""
    with attacked(tmp_path) as (node, _), ExitStack() as stack:
        for number in range(3):
            node.put(number, 40)
        asker = stack.enter_context(Asker(node))
        keys = asker.hashed(1, 40).keys
        space, welcome = Namespace.digest(asker.handle.namespace), asker.wire.welcome
        listed = asker._ask(m.Namespaces(0), m.NamespacesReply).namespaces[0]
        key = asker._ask(m.OpenNamespace(listed.packed, listed.payload_bytes), m.Granted).grant.identity_key
        channel = stack.enter_context(grpc.insecure_channel(node.address, [("grpc.enable_http_proxy", 0)]))
        stub = PeerStub(channel)

        def asked(kind: Any, of: list[bytes], what: bytes, first: int = 0, **other: Any) -> Any:
            terms = PullTerms(secrets.token_bytes(16), secrets.token_bytes(16), welcome.node, space, first, of)
            fields = {
                "fingerprint": welcome.fingerprint,
                "namespace": space,
                "first_block": first,
                "node": terms.asking,
            }
            given = {**fields, "keys": b"".join(of), "nonce": terms.nonce, "mac": ask_mac(key, terms, what), **other}
            return kind(**given)

        has, open_pull = peer_pb2.HasRequest, peer_pb2.OpenPullRequest
        many = [*keys, *(secrets.token_bytes(32) for _ in range(65_536 - len(keys)))]
        wait_until(lambda: stub.Has(asked(has, keys, HAS), timeout=20).blocks == 40)  # it lists namespaces now and then
        assert stub.Has(asked(has, many, HAS), timeout=20).blocks == 40
        assert stub.Has(asked(has, keys, PULL), timeout=20).reason == "key_mismatch", "the MAC of the other question"
        assert stub.Has(asked(has, keys, HAS, first_block=1), timeout=20).reason == "key_mismatch"
        offers, reasons = [], set()
        again = asked(open_pull, keys, PULL, transports=["sockets"], wait_ms=(1 << 32) - 1)
        for at in range(60):
            request = again if at % 2 else asked(open_pull, many[:600], PULL, (1 << 32) - 1, transports=["sockets"])
            answer = stub.OpenPull(request, timeout=20)
            if answer.token:
                offers.append(answer)
            reasons.add(answer.reason)
        assert len(offers) <= 32 and "busy" in reasons, (len(offers), reasons)
        assert node.stat()["leases"] <= 32
        node.put(7, 40)
        assert asker.get(7, 40, 1.0, 5.0).is_right
        wait_until(lambda: node.stat()["leases"] == 0)
        for one in offers:  # they are over, and nobody has their secret
            with socket.create_connection(("127.0.0.1", node.pull_port)) as wire:
                wire.settimeout(10)
                wire.sendall(hello_for(one.token, secrets.token_bytes(32), False))
                assert len(wire.recv(1 << 12)) <= 32
        print(len(offers), reasons, node.log()[-1500:])
