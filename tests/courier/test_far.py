"""What is far away is found by the request that comes again, also after the way to it stalled; and no engine waits
longer for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")

from courier.nodes import Asker, Node, pool
from remote.distance import Distance, distance
from valkey_server import valkey_server
from waiting import wait_until

PROMPTS, BLOCKS = 4, 4
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


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Node], Distance]]:
    folder = tmp_path_factory.mktemp("far")
    with valkey_server(folder) as server, distance(server.port) as way:
        remote = {"url": f"valkey://127.0.0.1:{way.port}", "writes": "all", "ttl": 3600}
        with pool(folder, 2, remote=remote) as nodes:
            yield nodes, way


@pytest.mark.parametrize("round_trip_ms", ROUND_TRIPS_MS)
def test_a_remote_tier_that_stalled_is_found_again(far: tuple[list[Node], Distance], round_trip_ms: int) -> None:
    (writes, reads), way = far
    way.seconds = round_trip_ms / 2000
    numbers = [100 * (round_trip_ms + 1) + at for at in range(2 * PROMPTS)]
    for number in numbers:
        writes.put(number, BLOCKS)

    def are_written() -> bool:
        (source,) = writes.stat()["elsewhere"]["sources"]
        return bool(source["blocks_out"] >= BLOCKS * len(numbers) * (1 + ROUND_TRIPS_MS.index(round_trip_ms)))

    wait_until(are_written)
    waits: list[float] = []
    before, after = numbers[:PROMPTS], numbers[PROMPTS:]
    reads.put(numbers[0] + 50, BLOCKS)  # the namespace is there
    with Asker(reads) as asker:
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
        assert all(found), (found, way.connections, reads.stat()["elsewhere"])
    assert statistics.median(waits) < 2 * ENGINE_SECONDS, sorted(waits)[-5:]
