"""What is far away is found by the request that comes again, also after the way to it stalled; and no engine waits
longer for it."""

from __future__ import annotations

import ssl
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")

from courier.nodes import Asker, Node, make_keys, pool, wait_for_peers
from kv_bench.process import free_port
from kvstore.block.errors import Unreachable
from kvstore.client.framing import TimedOut
from kvstore.courier.figures import MANY_LATE
from kvstore.network.links import CallTime, TenantLink
from kvstore.pool.directory import CHUNK_BLOCKS
from remote.between import proxy
from remote.distance import Distance, distance
from remote.test_valkey import certified
from service.sidecar import Sidecar
from tiering.clock import SystemClock
from valkey_server import valkey_server
from waiting import wait_until

PROMPTS, BLOCKS = 4, CHUNK_BLOCKS
STALL_SECONDS, FOUND_SECONDS = 0.5, 2.0
ROUND_TRIPS_MS = (0, 1, 2, 5, 20)
ENGINE_SECONDS = 0.005


def is_found(asker: Asker, number: int, waits: list[float], seconds: float = FOUND_SECONDS) -> bool:
    """Whether an engine that asks again and again hears of it in that time. waits: how long each answer took."""
    keys = asker.hashed(number, BLOCKS).keys
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        began_at = time.monotonic()
        located = asker.locate(keys)
        waits.append(time.monotonic() - began_at)
        if located.number:
            assert located.blocks == BLOCKS
            return True
        time.sleep(0.05)  # until the next request comes
    return False


def stalls(way: Distance, asker: Asker, before: list[int], after: list[int]) -> None:
    """What was found before one stall is found after it."""
    waits: list[float] = []
    for number in before:
        assert is_found(asker, number, waits), number
    way.stall()
    ends_at = time.monotonic() + STALL_SECONDS
    try:
        while time.monotonic() < ends_at:
            is_found(asker, after[0], waits, 0.1)
    finally:
        way.go_on()
    found = [is_found(asker, number, waits) for number in after]
    assert all(found), (found, way.connections, asker.node.stat()["elsewhere"])
    assert statistics.median(waits) < 1.5 * ENGINE_SECONDS, sorted(waits)


def source_of(node: Node, kind: str) -> dict[str, Any]:
    """What it says of its directory, remote tier or only peer."""
    (found,) = [one for one in node.stat()["elsewhere"]["sources"] if one["kind"] == kind]
    return found


def numbers_of(round_trip_ms: int) -> list[int]:
    return [100 * (round_trip_ms + 1) + at for at in range(2 * PROMPTS)]


def put_far(writes: Node, numbers: list[int]) -> None:
    """Into the remote tier."""
    before = source_of(writes, "remote")["blocks_out"]
    for number in numbers:
        writes.put(number, BLOCKS)
    wait_until(lambda: source_of(writes, "remote")["blocks_out"] >= before + BLOCKS * len(numbers))


@contextmanager
def far_tier(folder: Path, *, is_tls: bool = False) -> Iterator[tuple[list[Node], Distance]]:
    """Two nodes, and a remote tier that is farther away."""
    with ExitStack() as stack:
        port, url = stack.enter_context(valkey_server(folder)).port, "valkey://127.0.0.1:{}"
        if is_tls:
            certificate, key = certified(folder)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            port, url = stack.enter_context(proxy(port, context)).port, f"valkeys://127.0.0.1:{{}}?ca={certificate}"
        way = stack.enter_context(distance(port))
        nodes = stack.enter_context(pool(folder, 2, remote={"url": url.format(way.port), "writes": "all", "ttl": 3600}))
        nodes[1].put(1, BLOCKS)  # its namespace is there
        wait_until(lambda: bool(nodes[0].stat()["elsewhere"]["sources"]))
        yield nodes, way


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Node], Distance]]:
    with far_tier(tmp_path_factory.mktemp("far")) as found:
        yield found


@pytest.mark.parametrize("round_trip_ms", ROUND_TRIPS_MS)
def test_a_remote_tier_that_stalled_is_found_again(far: tuple[list[Node], Distance], round_trip_ms: int) -> None:
    (writes, reads), way = far
    numbers = numbers_of(round_trip_ms)
    way.seconds = 0.0
    put_far(writes, numbers)
    way.seconds = round_trip_ms / 2000
    with Asker(reads) as asker:
        stalls(way, asker, numbers[:PROMPTS], numbers[PROMPTS:])
    got = reads.get(numbers[-1], BLOCKS)
    assert got.is_right and got.tiers == {"remote": BLOCKS}, got


def test_a_remote_tier_behind_tls_that_stalled_is_found_again(tmp_path: Path) -> None:
    with far_tier(tmp_path, is_tls=True) as ((writes, reads), way):
        for round_trip_ms in (2, 20):
            numbers = numbers_of(round_trip_ms)
            way.seconds = 0.0
            put_far(writes, numbers)
            way.seconds = round_trip_ms / 2000
            with Asker(reads) as asker:
                stalls(way, asker, numbers[:PROMPTS], numbers[PROMPTS:])


def test_a_remote_tier_that_is_too_far_away_is_counted_and_said(far: tuple[list[Node], Distance]) -> None:
    (_, reads), way = far
    before = source_of(reads, "remote")
    with Asker(reads) as asker:
        way.seconds = 0.01
        for number in range(3000, 3000 + 2 * MANY_LATE):
            asker.locate(asker.hashed(number, BLOCKS).keys)
            time.sleep(0.03)  # or they would wait for each other's threads
        wait_until(lambda: source_of(reads, "remote")["late"] >= before["late"] + MANY_LATE)
        wait_until(lambda: any("too late" in why for why in reads.stat()["elsewhere"]["reasons"]))
        said = reads.stat()
        assert said["state"] == "degraded", said["elsewhere"]
        assert source_of(reads, "remote")["failures"] == before["failures"], "to be late is no failure"
        way.seconds = 0.0
        numbers = iter(range(3100, 4000))

        def is_well() -> bool:
            asker.locate(asker.hashed(next(numbers), BLOCKS).keys)
            return not reads.stat()["elsewhere"]["reasons"]

        wait_until(is_well)


def test_a_directory_that_stalled_is_asked_again(tmp_path: Path) -> None:
    pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")
    with ExitStack() as stack:
        way = stack.enter_context(distance(stack.enter_context(valkey_server(tmp_path)).port))
        network = {"directory": f"valkey://127.0.0.1:{way.port}"}
        holds, asks = stack.enter_context(pool(tmp_path, 2, network))
        wait_for_peers([holds, asks], 1)
        asks.put(1, BLOCKS)
        every = [number for round_trip_ms in (0, 5, 20) for number in numbers_of(round_trip_ms)]
        for number in every:
            holds.put(number, BLOCKS)
        wait_until(lambda: source_of(holds, "directory")["hints"] >= len(every))
        with Asker(asks) as asker:
            for round_trip_ms in (0, 5, 20):
                way.seconds = round_trip_ms / 2000
                numbers = numbers_of(round_trip_ms)
                stalls(way, asker, numbers[:PROMPTS], numbers[PROMPTS:])
        wait_until(lambda: source_of(asks, "directory")["late"] > 0)


def test_a_node_whose_link_stalled_is_found_again(tmp_path: Path) -> None:
    keys, port = make_keys(tmp_path), free_port()
    with ExitStack() as stack:
        way = stack.enter_context(distance(port))
        asks = Node(tmp_path / "asks", keys, {"peers": [f"127.0.0.1:{way.port}"]}, {})
        holds = Node(tmp_path / "holds", keys, {"peers": [asks.address]}, {}, port=port)
        for one in (holds, asks):
            stack.callback(one.close)
            one.start()
        wait_for_peers([asks], 1)
        asks.put(1, BLOCKS)
        for round_trip_ms in (0, 5, 20):
            way.seconds = round_trip_ms / 2000
            numbers = numbers_of(round_trip_ms)
            for number in numbers:
                holds.put(number, BLOCKS)
            with Asker(asks) as asker:
                stalls(way, asker, numbers[:PROMPTS], numbers[PROMPTS:])
        wait_until(lambda: source_of(asks, "peer")["late"] > 0)


def test_calls_of_short_deadlines_reach_a_sidecar_that_is_slow_to_greet(tmp_path: Path) -> None:
    """The network process connects to a limit of its own: the next call has the connection."""
    clock, far_away = SystemClock(), str(tmp_path / "far.sock")
    with Sidecar(tmp_path) as sidecar, distance(str(sidecar.path), far_away) as way:
        way.seconds = 0.02
        link = TenantLink("default", far_away, clock)
        node = ""
        for _ in range(10):
            with suppress(Unreachable, TimedOut):
                node = link.node(CallTime(clock, clock.monotonic_seconds() + 0.03))
        assert len(node) == 32
        link.close()


def test_a_remote_tier_without_room_says_so_and_is_written_to_once_it_has_some(tmp_path: Path) -> None:
    options = ["--maxmemory", "4mb", "--maxmemory-policy", "noeviction"]
    with valkey_server(tmp_path, options) as server:
        remote = {"url": f"valkey://127.0.0.1:{server.port}", "writes": "all", "ttl": 3600}
        with pool(tmp_path, 1, remote=remote) as (writes,):
            for number in range(20):
                writes.put(number, 40)

            def is_full() -> bool:
                return bool(source_of(writes, "remote")["unwritten"] >= 2)

            wait_until(is_full)
            said = writes.stat()
            assert said["state"] == "degraded" and source_of(writes, "remote")["blocks_out"] < 800
            (reason,) = said["elsewhere"]["reasons"]
            assert "no room" in reason and "maxmemory" in reason
            assert writes.log().count("no room") == 1, writes.log()
            assert server.say(b"CONFIG", b"SET", b"maxmemory", b"1gb").startswith(b"+OK")
            wait_until(lambda: source_of(writes, "remote")["blocks_out"] == 800)
            wait_until(lambda: writes.stat()["state"] == "ready")
