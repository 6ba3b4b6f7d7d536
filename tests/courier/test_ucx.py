"""Nodes that pull over UCX, through the whole courier; and what they do where UCX does not reach a node."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("ucxx", reason="ucxx is not installed (extra: ucx)")

from courier.nodes import Node, pool, wait_for_peers
from kvstore.pool.choice import LONGEST_UNREACHED_SECONDS, UNREACHED_SECONDS, UsableTransports
from waiting import wait_until

BLOCKS = 12
UCX = {"transport": "ucx"}


def ways_to(node: Node) -> str:
    """How a node reaches the other one, as it tells people."""
    (peer,) = [one for one in node.stat()["elsewhere"]["sources"] if one["kind"] == "peer"]
    return str(peer["detail"])


@pytest.mark.slow
def test_blocks_come_over_ucx(tmp_path: Path) -> None:
    with pool(tmp_path, 2, UCX, static=True) as nodes:
        wait_for_peers(nodes, 1)
        for giver, taker, number in ((0, 1, 1), (1, 0, 2)):
            nodes[giver].put(number, BLOCKS)
            got = nodes[taker].get(number, BLOCKS)
            assert got.blocks == BLOCKS and got.is_right and got.tiers == {"peer": BLOCKS}, got
            wait_until(lambda node=nodes[taker]: ways_to(node) == "over ucx")


@pytest.mark.slow
def test_a_node_that_ucx_does_not_reach_is_pulled_from_over_sockets(tmp_path: Path) -> None:
    """Here UCX of the node that dials may use nothing that leads to another process, and warns of a device that is not
    there."""
    with pool(tmp_path, 2, UCX, static=True) as nodes:
        nodes[1].kill_network()
        nodes[1].wrap = ("env", "UCX_TLS=self", "UCX_NET_DEVICES=none0")
        nodes[1].start_network()
        wait_for_peers(nodes, 1)
        nodes[0].put(1, BLOCKS)
        got = nodes[1].get(1, BLOCKS)
        assert got.blocks == BLOCKS and got.is_right and got.tiers == {"peer": BLOCKS}, got
        wait_until(lambda: ways_to(nodes[1]) == "over sockets; not reached over ucx")
        nodes[0].put(2, BLOCKS)
        assert nodes[1].get(2, BLOCKS).blocks == BLOCKS
    assert "is not reached over ucx, and another transport is taken" in nodes[1].log()
    assert "UCX  WARN" in nodes[1].log(), "on standard error, not between the lines that a program reads"


def test_a_transport_that_fails_is_left_out_for_longer_each_time_and_the_last_one_never() -> None:
    usable, node, other, now = UsableTransports(["ucx", "sockets"]), b"n" * 16, b"o" * 16, 1000.0
    assert usable.names(node, now) == ["ucx", "sockets"] and usable.told(node, now) == ""
    seconds = UNREACHED_SECONDS
    for _ in range(10):
        usable.failed(node, "ucx", now)
        assert usable.names(node, now + seconds - 0.1) == ["sockets"] and usable.names(other, now) == ["ucx", "sockets"]
        assert usable.told(node, now) == "not reached over ucx"
        assert usable.names(node, now + seconds) == ["ucx", "sockets"]
        now, seconds = now + seconds, min(2 * seconds, LONGEST_UNREACHED_SECONDS)
    usable.worked(node, "ucx")
    usable.failed(node, "ucx", now)
    assert usable.names(node, now + UNREACHED_SECONDS) == ["ucx", "sockets"], "as at the first time"
    usable.failed(node, "sockets", now)
    assert usable.names(node, now)[-1] == "sockets"
    assert UsableTransports(["sockets"]).told(node, now) == ""
