"""Three nodes and a directory: what one stored, the others serve; and whatever ends or stops, nothing wrong is served,
nothing is left pinned, and nobody waits beyond its time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")

from courier.nodes import Asker, Node, pool, wait_for_peers
from kvstore.block.account import MissReason
from kvstore.courier.courier import TOLD_SECONDS
from kvstore.protocol import messages as m
from valkey_server import ValkeyServer, server_of_module
from waiting import wait_until

BLOCKS = 20
LATE_SECONDS = 1.0
"""That a busy machine may add to a deadline."""

directory = server_of_module


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, directory: ValkeyServer) -> Iterator[list[Node]]:
    network = {"directory": f"valkey+unix:{directory.socket_path}"}
    with pool(tmp_path_factory.mktemp("pool"), 3, network) as nodes:
        wait_for_peers(nodes, 2)
        yield nodes


@pytest.fixture
def healed(three: list[Node], directory: ValkeyServer) -> Iterator[list[Node]]:
    """All of it runs again afterwards."""
    yield three
    if directory.process.poll() is not None:
        directory.start()
    for one in three:
        for process, start in ((one.sidecar, one.start_sidecar), (one.network, one.start_network)):
            assert process is not None
            if process.poll() is not None:
                start()
            else:
                os.kill(process.pid, signal.SIGCONT)
    wait_for_peers(three, 2)


def all_is_let_go(node: Node) -> bool:
    stat = node.stat()
    return stat["elsewhere"]["kept_bytes"] == 0 and stat["awaits"]["parked"] == 0


def blocks_in(node: Node) -> int:
    """Fetched from peers and engines, by what the courier told last."""
    return sum(one["blocks_in"] for one in node.stat()["elsewhere"]["sources"])


def sent_by(node: Node) -> int:
    """Blocks that other nodes pulled, once its courier has told of all."""
    told = [-1]

    def has_told_all() -> bool:
        told.append(sum(one["blocks_out"] for one in node.stat()["elsewhere"]["sources"]))
        return told[-2] == told[-1]

    wait_until(has_told_all, lambda: time.sleep(2 * TOLD_SECONDS))
    return told[-1]


def test_what_one_stored_is_served_on_the_others(three: list[Node]) -> None:
    three[0].put(1)
    for one in three[1:]:
        got = one.get(1)
        assert (got.blocks, got.is_right) == (BLOCKS, True), got
        assert got.tiers == {"peer": BLOCKS} and got.located.tier == "peer", got
        again = one.get(1)
        assert again.tiers == {"dram": BLOCKS} and again.is_right, "it is this node's now"
    wait_until(lambda: blocks_in(three[1]) >= BLOCKS)
    wait_until(lambda: all_is_let_go(three[1]))


def test_a_tail_beyond_the_last_chunk_and_a_prefix_that_is_here_already(three: list[Node]) -> None:
    three[0].put(2, 40)
    three[1].put(2, 7)
    got = three[1].get(2, 40)
    assert got.blocks == 40 and got.is_right and got.tiers == {"dram": 7, "peer": 33}, got


def test_what_several_engines_wait_for_is_fetched_once(three: list[Node]) -> None:
    three[0].put(3)
    before = sent_by(three[0])
    with ThreadPoolExecutor(4) as engines:
        found = list(engines.map(lambda _: three[1].get(3), range(4)))
    assert all(got.blocks == BLOCKS and got.is_right for got in found), found
    assert sent_by(three[0]) == before + BLOCKS


def test_a_question_for_what_nobody_has_is_answered_at_once(three: list[Node]) -> None:
    with Asker(three[2]) as asker:
        keys = asker.hashed(999, BLOCKS).keys
        found = asker.locate(keys)
        assert not found.number and not found.blocks


@pytest.mark.parametrize("way", ["killed", "stopped", "emptied"])
def test_without_a_directory_every_node_works_alone(healed: list[Node], directory: ValkeyServer, way: str) -> None:
    number = 10 + ["killed", "stopped", "emptied"].index(way)
    healed[0].put(number)
    wait_until(lambda: healed[1].get(number, locates=1.0).blocks == BLOCKS)
    if way == "emptied":
        directory.empty()
    else:
        (directory.kill if way == "killed" else directory.stop)()
        with Asker(healed[2]) as asker:
            began_at = time.monotonic()
            found = asker.locate(asker.hashed(number, BLOCKS).keys)
            assert not found.number and time.monotonic() - began_at < LATE_SECONDS
        healed[2].put(100 + number)
        got = healed[2].get(100 + number)
        assert got.blocks == BLOCKS and got.is_right, "its own blocks"
        wait_until(lambda: any("directory" in line for line in healed[2].stat()["elsewhere"]["reasons"]))
        assert healed[2].stat()["state"] == "degraded"
        (directory.start if way == "killed" else directory.go_on)()
    wait_until(lambda: healed[2].get(number, locates=1.0).blocks == BLOCKS)
    wait_until(lambda: not any("directory" in line for line in healed[2].stat()["elsewhere"]["reasons"]))


def test_a_drop_names_the_nodes_that_it_does_not_reach(healed: list[Node], directory: ValkeyServer) -> None:
    """And says that it cannot name them all while the directory does not answer."""
    import json

    healed[0].put(60)
    space = healed[0].space()
    others = {(one.stat()["node"], one.address) for one in healed[1:]}

    def drop() -> tuple[set[tuple[str, str]], str]:
        told = json.loads(healed[0].command("drop", space, "--json").stdout)
        return {(one["node"], one["address"]) for one in told["not_reached"]}, told["elsewhere"]

    nodes, line = drop()
    assert nodes == others and line.startswith("2 other nodes were not reached"), line
    assert "directory" not in line
    directory.kill()
    wait_until(lambda: not [one for one in healed[0].stat()["elsewhere"]["sources"] if one["kind"] == "peer"])
    nodes, line = drop()
    assert not nodes and "the directory does not answer" in line and "not all known" in line


def test_a_holder_that_stops_costs_its_waiters_no_more_than_their_time(healed: list[Node]) -> None:
    healed[0].put(20)
    with Asker(healed[1]) as asker:
        keys = asker.hashed(20, BLOCKS).keys
        located = asker.find(keys)
        assert healed[0].network is not None
        os.kill(healed[0].network.pid, signal.SIGSTOP)
        began_at = time.monotonic()
        awaited = asker.awaits(keys, located, 0.7)
        took = time.monotonic() - began_at
        assert awaited.blocks == 0 and awaited.reason in (MissReason.DEADLINE, MissReason.UNREACHABLE), awaited
        assert took < 0.7 + LATE_SECONDS
        wait_until(lambda: all_is_let_go(healed[1]))
        healed[1].put(20)
        assert healed[1].get(20).is_right, "its slots can be had"


@pytest.mark.parametrize("which", ["network", "sidecar"])
def test_a_fetch_whose_process_is_killed_leaves_nothing_behind(healed: list[Node], which: str) -> None:
    number = 30 + ["network", "sidecar"].index(which)
    healed[0].put(number)
    with Asker(healed[1]) as asker:
        keys = asker.hashed(number, BLOCKS).keys
        located = asker.find(keys)
        assert healed[0].network is not None and located.number
        os.kill(healed[0].network.pid, signal.SIGSTOP)  # so that it is under way for long
        told: list[object] = []

        def wait() -> None:
            try:
                verb = m.Await(asker.number, [keys[located.blocks - 1]], 20.0, located.number)
                told.append(asker.wire.call(verb, 60.0).answer)
            except Exception as error:
                told.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: healed[1].stat()["elsewhere"]["fetching"] > 0 or bool(told))
        (healed[1].kill_network if which == "network" else healed[1].kill_sidecar)()
        waiter.join(30.0)
        assert told, "who waits is told"
        if which == "network":
            assert isinstance(told[0], m.Awaited) and told[0].reason is MissReason.UNREACHABLE, told
            wait_until(lambda: all_is_let_go(healed[1]))
    if which == "sidecar":
        healed[1].start_sidecar()
    healed[1].put(number)
    got = healed[1].get(number)
    assert got.blocks == BLOCKS and got.is_right


def test_a_courier_that_is_upgraded_before_and_after_its_sidecar(healed: list[Node]) -> None:
    for number, (stops, starts) in enumerate(
        [(Node.kill_network, Node.start_network), (Node.kill_sidecar, Node.start_sidecar)], 40
    ):
        healed[0].put(number)
        stops(healed[1], signal.SIGTERM)
        starts(healed[1])
        wait_until(lambda: healed[1].get(number, locates=1.0).blocks == BLOCKS)  # noqa: B023
        stops(healed[0], signal.SIGTERM)
        starts(healed[0])
        healed[0].put(number + 50)
        wait_until(lambda: healed[1].get(number + 50, locates=1.0).blocks == BLOCKS)  # noqa: B023
