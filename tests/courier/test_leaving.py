"""A node that leaves in order: what was hot on it is on another node afterwards, and nothing else is; what a stranger
offers is taken by no other node."""

from __future__ import annotations

import json
import secrets
import signal
from pathlib import Path

import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")

from courier.nodes import Asker, Node, pool, wait_for_peers  # noqa: E402
from kvstore.block.account import MissReason  # noqa: E402
from kvstore.block.identity import Namespace  # noqa: E402
from kvstore.courier.link import MOST_CHAINS, Uses  # noqa: E402
from kvstore.courier.sources import MOST_OFFERED_BLOCKS, MOST_OFFERED_CHUNKS, hottest  # noqa: E402
from kvstore.peers.tokens import HAS, PullTerms, ask_mac  # noqa: E402
from kvstore.wire import peer_pb2  # noqa: E402
from kvstore.wire.peer_pb2_grpc import PeerStub  # noqa: E402
from waiting import wait_until  # noqa: E402

BLOCKS = 20
HOT, COLD = (1, 2), (3, 4)


def _chain(name: int, blocks: int) -> list[bytes]:
    return [name.to_bytes(4, "big") + at.to_bytes(28, "big")[::-1] for at in range(blocks)]


def test_what_is_hot_is_what_was_named_again_and_is_bounded() -> None:
    uses, space = Uses(), bytes(32)
    shared, often = _chain(1, 40), _chain(2, 20)
    for tail in range(3, 6):
        uses.note_chain(space, shared + _chain(tail, 30))
    for _ in range(5):
        uses.note_chain(space, often)
    assert hottest(uses.chains(), uses.of) == [(space, often), (space, shared[:32])], (
        "the hottest first; tails of one request are not hot"
    )
    for name in range(100, 100 + 2 * MOST_CHAINS):
        for _ in range(2):
            uses.note_chain(space, _chain(name, 5000))
    found = hottest(uses.chains(), uses.of)
    assert len(uses.chains()) == MOST_CHAINS
    assert 0 < sum(-(-len(keys) // 16) for _, keys in found) <= MOST_OFFERED_CHUNKS


@pytest.mark.parametrize("with_keeper", [False, True])
def test_what_was_hot_is_served_by_another_node_afterwards(tmp_path: Path, with_keeper: bool) -> None:
    with pool(tmp_path, 2, static=True, with_keeper=with_keeper) as (leaves, stays):
        wait_for_peers((leaves, stays), 1)
        with Asker(stays) as other:  # an engine of the model: a node without its namespace takes nothing
            _ask_for(other, 9)
            for number in (*HOT, *COLD):
                leaves.put(number)
            with Asker(leaves) as asker:
                for number in (*HOT, *HOT):
                    _ask_for(asker, number)
                for number in COLD:
                    asker.locate(asker.hashed(number, BLOCKS + 2).keys)
            if with_keeper:
                leaves.kill_sidecar(signal.SIGTERM)
            else:
                leaves.kill_network(signal.SIGTERM)
                leaves.kill_sidecar()
            got = {number: stays.get(number, BLOCKS, locates=0.0) for number in (*HOT, *COLD)}
        assert [got[number].blocks for number in HOT] == [BLOCKS, BLOCKS], got
        assert [got[number].blocks for number in COLD] == [0, 0], got
        assert all(one.is_right for one in got.values())
        assert stays.stat()["elsewhere"]["fetching"] == 0


def test_a_killed_node_hands_nothing_over_and_strangers_offers_are_refused(tmp_path: Path) -> None:
    with pool(tmp_path, 2, static=True) as (leaves, stays):
        wait_for_peers((leaves, stays), 1)
        leaves.put(1)
        with Asker(stays) as asker, Asker(leaves) as engine:
            keys = asker.hashed(1, BLOCKS).keys
            for _ in range(2):
                _ask_for(engine, 1)
            _ask_for(asker, 9)
            welcome, space = asker.wire.welcome, Namespace.digest(asker.handle.namespace)
            _offers_of_strangers(stays, welcome.node, welcome.fingerprint, space, keys, engine.wire.welcome.node)
            leaves.kill_network()
            got = stays.get(1, BLOCKS, locates=0.0)
        assert got.blocks == 0, got


def _ask_for(asker: Asker, number: int) -> None:
    """A request that goes on where nothing is stored, until the courier had the time to answer."""
    keys = asker.hashed(number, BLOCKS + 2).keys
    wait_until(lambda: asker.locate(keys).reason is MissReason.ABSENT)


def _offers_of_strangers(
    node: Node, holder: bytes, fingerprint: bytes, space: bytes, keys: list[bytes], known: bytes
) -> None:
    with grpc.insecure_channel(node.address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub, nonce = PeerStub(channel), secrets.token_bytes(16)
        common = {"fingerprint": fingerprint, "namespace": space, "node": known, "nonce": nonce}
        terms = PullTerms(nonce, known, holder, space, 0, keys)
        for mac in (b"", ask_mac(bytes(32), terms, HAS), ask_mac(bytes(32), terms), secrets.token_bytes(32)):
            answer = stub.Offer(peer_pb2.OfferRequest(**common, keys=b"".join(keys), mac=mac), timeout=10)
            assert answer.reason == "key_mismatch" and not answer.blocks
        long = secrets.token_bytes(32) * (MOST_OFFERED_BLOCKS + 1)
        for wrong in ({"keys": long}, {"keys": b"x" * 33}, {"keys": b""}, {"keys": b"".join(keys), "first_block": 1}):
            with pytest.raises(grpc.RpcError) as error:
                stub.Offer(peer_pb2.OfferRequest(**common, **wrong, mac=bytes(32)), timeout=10)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, json.dumps(sorted(wrong))
