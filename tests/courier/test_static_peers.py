"""Nodes that are told of each other: no directory; keys that differ; certificates; what a stranger asks."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")

from courier.nodes import Asker, Node, ending, make_keys, pool, wait_for_peers  # noqa: E402
from kv_bench.process import free_port  # noqa: E402
from kvstore.block.identity import Namespace  # noqa: E402
from kvstore.courier.dialling import Dialled, GrpcPeers, PeerAway  # noqa: E402
from kvstore.peers.tokens import PullTerms, ask_mac  # noqa: E402
from kvstore.wire import peer_pb2  # noqa: E402
from kvstore.wire.peer_pb2_grpc import PeerStub  # noqa: E402
from network.running import Issuer  # noqa: E402
from tiering.clock import SystemClock  # noqa: E402
from waiting import wait_until  # noqa: E402

BLOCKS = 20
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with pool(tmp_path_factory.mktemp("pool"), 2, static=True) as nodes:
        wait_for_peers(nodes, 1)
        yield nodes


def test_a_list_of_peers_works_without_a_directory(two: list[Node]) -> None:
    two[0].put(1, 5)
    got = two[1].get(1, 5)
    assert got.blocks == 5 and got.is_right and got.tiers == {"peer": 5}, got


def test_a_ticket_s_node_is_asked_while_it_publishes(two: list[Node]) -> None:
    import threading

    from kvstore.protocol import messages as m

    with Asker(two[0]) as giver, Asker(two[1]) as taker:
        keys = giver.hashed(3, BLOCKS).keys
        ticket = giver.ticket(keys)
        located = taker.locate(keys, ticket)
        for _ in range(50):
            if located.number:
                break
            located = taker.locate(keys, ticket)
        assert located.number and located.blocks == BLOCKS, located
        got: list[m.Awaited] = []
        waiter = threading.Thread(target=lambda: got.append(taker.awaits(keys, located, 20.0)))
        waiter.start()
        two[0].put(3, 12)
        two[0].put(3, BLOCKS)
        waiter.join(30.0)
        assert got and got[0].blocks == 1, got
    assert two[1].get(3).is_right


@pytest.mark.slow
def test_nothing_is_fetched_from_a_node_with_other_keys(two: list[Node], tmp_path: Path) -> None:
    other = Node(tmp_path / "other", None, {"peers": [two[0].address]}, {})
    with ending(other):
        other.start()
        two[0].put(5)
        with Asker(other) as asker:
            for _ in range(20):
                found = asker.locate(asker.hashed(5, BLOCKS).keys)
                assert not found.number and not found.blocks
        wait_until(lambda: any("key_mismatch" in one for one in other.stat()["elsewhere"]["reasons"]))


def test_who_has_no_keys_is_told_nothing_and_pins_nothing(two: list[Node]) -> None:
    two[0].put(6)
    with Asker(two[0]) as asker:
        keys = asker.hashed(6, BLOCKS).keys
        space = Namespace.digest(asker.handle.namespace)
        fingerprint = asker.wire.welcome.fingerprint
        holder, key = asker.wire.welcome.node, bytes(32)
    channel = grpc.insecure_channel(two[0].address, [("grpc.enable_http_proxy", 0)])
    stub = PeerStub(channel)
    me, nonce = secrets.token_bytes(16), secrets.token_bytes(16)
    terms = PullTerms(nonce, me, holder, space, 0, keys)
    common = {"fingerprint": fingerprint, "namespace": space, "keys": b"".join(keys), "node": me, "nonce": nonce}
    unsigned = peer_pb2.HasRequest(**common, mac=b"")
    wait_until(lambda: stub.Has(unsigned, timeout=10).reason != "absent")  # the namespace is known to its courier
    for mac in (b"", bytes(32), ask_mac(key, terms), secrets.token_bytes(32)):
        assert stub.Has(peer_pb2.HasRequest(**common, mac=mac), timeout=10).reason == "key_mismatch"
        asked = peer_pb2.OpenPullRequest(**common, mac=mac, transports=["sockets"])
        answer = stub.OpenPull(asked, timeout=10)
        assert answer.reason == "key_mismatch" and not answer.token and not answer.blocks
    unknown = stub.Has(peer_pb2.HasRequest(**{**common, "fingerprint": bytes(8)}, mac=bytes(32)), timeout=10)
    assert unknown.reason == "key_mismatch", "the same answer as to a wrong MAC"
    for wrong in ({"nonce": b"x"}, {"node": b"x"}, {"namespace": b"x" * 31}, {"keys": b"x" * 33}, {"keys": b""}):
        with pytest.raises(grpc.RpcError) as error:
            stub.Has(peer_pb2.HasRequest(**{**common, **wrong}, mac=bytes(32)), timeout=10)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, wrong
    with pytest.raises(grpc.RpcError) as error:
        stub.Has(peer_pb2.HasRequest(**common, mac=bytes(32)))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, "a call without a deadline"
    with socket.create_connection(("127.0.0.1", two[0].pull_port)) as wire:
        wire.sendall(secrets.token_bytes(72))
        wire.settimeout(10)
        while wire.recv(4096):
            pass
    channel.close()
    assert two[1].get(6).is_right, "and the others are served"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")
@pytest.mark.slow
def test_nodes_know_each_other_by_certificates(two: list[Node], tmp_path: Path) -> None:
    """Sealed, too; and a node that answers with another one's certificate is asked nothing."""
    issuer = Issuer(tmp_path / "ca")
    ports = [free_port() for _ in range(2)]
    nodes = []
    for at, port in enumerate(ports):
        peers = [f"127.0.0.1:{other}" for other in ports if other != port]
        pems = {key: str(tmp_path / f"{at}.{key}") for key in ("certificate", "key")}
        settings = {"peers": peers, "seal": "always", **pems, "client_ca": str(issuer.ca)}
        nodes.append(Node(tmp_path / f"c{at}", two[0].keys, settings, {}, port=port))
    with ending(*nodes):
        for at, one in enumerate(nodes):
            one.start_sidecar()
            node = one.stat()["node"]
            names = f"URI:kvstore:node:{node},DNS:{node}.node.kvstore,IP:127.0.0.1"
            certificate, key = issuer.issue(f"node{at}", names)
            shutil.copy(certificate, tmp_path / f"{at}.certificate")
            shutil.copy(key, tmp_path / f"{at}.key")
            one.start_network()
        wait_for_peers(nodes, 1)
        nodes[0].put(7)
        got = nodes[1].get(7)
        assert got.is_right and got.tiers == {"peer": BLOCKS}, got
        zero = "0" * 32
        names = f"URI:kvstore:node:{zero},DNS:{zero}.node.kvstore,IP:127.0.0.1"
        stranger, key = issuer.issue("stranger", names)
        nodes[0].kill_network()
        shutil.copy(stranger, tmp_path / "0.certificate")
        shutil.copy(key, tmp_path / "0.key")
        nodes[0].start_network()
        nodes[0].put(8)
        wait_until(lambda: any("does not answer" in one for one in nodes[1].stat()["elsewhere"]["reasons"]))
        assert nodes[1].get(8, locates=2.0).blocks == 0


def test_without_certificates_no_other_host_is_dialled_whatever_a_directory_says() -> None:
    calls = GrpcPeers(None, SystemClock())
    for address in ("10.0.0.1:7470", "[2001:db8::1]:7470", "example.com:7470", "x"):
        with pytest.raises(PeerAway, match="certificate"):
            calls.ask("WhoAreYou", Dialled(address, b""), peer_pb2.WhoAreYouRequest(), 1.0)
        assert calls.has(Dialled(address, bytes(16)), peer_pb2.HasRequest(), 1.0) is None
    calls.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--peer", "10.0.0.9:7470"], "certificate"),
        (["--peer", "127.0.0.1:0"], "the port that the other node listens at"),
        pytest.param(["--pull", "127.0.0.1:7471"], "--peer or --directory", marks=SLOW),
        pytest.param(["--directory-password-file", "x"], "--directory-password-file is for other nodes", marks=SLOW),
        pytest.param(["--directory", "http://x"], "valkey://", marks=SLOW),
        pytest.param(["--directory", "valkey://127.0.0.1:1", "--seal", "never"], "auto or always", marks=SLOW),
        pytest.param(["--remote", "http://x"], "remote.url", marks=SLOW),
        pytest.param(
            ["--remote", "valkey://127.0.0.1:1", "--remote-writes", "some"], "all, learned or none", marks=SLOW
        ),
        pytest.param(["--listen", "unix:/tmp/x.sock", "--peer", "127.0.0.1:1"], "no UNIX socket", marks=SLOW),
        pytest.param(["--listen", "none"], "listen is missing", marks=SLOW),
    ],
)
def test_what_cannot_be_is_one_clear_line(tmp_path: Path, flags: list[str], words: str) -> None:
    from network.running import beside, fails, token_file

    given = beside(tmp_path, token_file(tmp_path))
    if "--listen" in flags:
        given = [one for at, one in enumerate(given) if "--listen" not in (one, given[at - 1])]
    assert words in fails(*given, *flags)


@SLOW
def test_a_drop_and_a_purge_name_every_node_that_they_do_not_reach(tmp_path: Path) -> None:
    """Those of `network.peers` that are down too: an operator has to go there all the same."""
    away = free_port()
    ports = [free_port(), free_port()]
    keys = make_keys(tmp_path, tenants=("second",))
    nodes = []
    for at in range(2):
        peers = [f"127.0.0.1:{one}" for one in (ports[1 - at], away)]
        nodes.append(Node(tmp_path / f"n{at}", keys, {"peers": peers}, {}, port=ports[at], tenants=("second",)))
    here, there = nodes
    with ending(*nodes):
        for one in nodes:
            one.start()
        wait_for_peers(nodes, 1)
        for tenant in ("default", "second"):
            there.put(1, BLOCKS, tenant)
            here.put(1, BLOCKS, tenant)
        other = {"node": there.stat()["node"], "address": there.address}
        down = {"node": "", "address": f"127.0.0.1:{away}"}
        space = here.space()
        told = json.loads(here.command("drop", space, "--tenant", "default", "--json").stdout)
        assert told["blocks"] == BLOCKS and told["not_reached"] == [down, other]
        assert told["elsewhere"].startswith("2 other nodes were not reached and may have copies")
        assert there.get(1, BLOCKS).tiers == {"dram": BLOCKS}, "it keeps its own"
        text = here.command("purge", "second", "--yes").stdout
        assert f"not reached: {other['node']} at {other['address']}" in text
        assert f"not reached: unknown node at {down['address']}" in text
        there.kill_network()
        wait_until(lambda: not [one for one in here.stat()["elsewhere"]["sources"] if one["kind"] == "peer"])
        told = json.loads(here.command("drop", space, "--tenant", "default", "--json").stdout)
        assert told["not_reached"] == [down, other], "it is not forgotten when it is down"
