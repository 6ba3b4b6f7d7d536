"""A remote tier: what one node wrote to a Valkey, another one without NVMe reads; what was damaged there, or dropped,
it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")

from courier.nodes import Asker, Node, ending, pool
from edge.children import children_of
from kvstore.block.account import MissReason
from network.running import ENVIRONMENT
from valkey_server import ValkeyServer, server_of_module
from waiting import wait_until

BLOCKS = 20

engine = server_of_module


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, engine: ValkeyServer) -> Iterator[list[Node]]:
    remote = {"url": f"valkey+unix:{engine.socket_path}", "writes": "all", "ttl": 3600}
    with pool(tmp_path_factory.mktemp("pool"), 2, remote=remote) as nodes:
        yield nodes


def frames(engine: ValkeyServer) -> set[bytes]:
    """Names of all that are there."""
    return {line for line in engine.say(b"KEYS", b"kvf:f:*").split(b"\r\n") if line.startswith(b"kvf:f:")}


def stored(two: Sequence[Node], engine: ValkeyServer, number: int) -> set[bytes]:
    """A prompt that node 0 stored; the names of its frames."""
    before = frames(engine)
    two[0].put(number)
    wait_until(lambda: len(frames(engine) - before) >= BLOCKS)
    return frames(engine) - before


def test_what_one_wrote_another_reads(two: list[Node], engine: ValkeyServer) -> None:
    stored(two, engine, 1)
    got = two[1].get(1)
    assert got.is_right and got.tiers == {"remote": BLOCKS} and got.located.tier == "remote", got
    assert two[1].get(1).tiers == {"dram": BLOCKS}
    name = next(iter(frames(engine)))
    assert 0 < int(engine.say(b"TTL", name).strip(b":\r\n")) <= 3600

    def is_told() -> bool:
        (source,) = two[1].stat()["elsewhere"]["sources"]
        assert source["kind"] == "remote" and source["state"] == "up"
        return bool(source["blocks_in"] == BLOCKS)

    wait_until(is_told)


def altered(two: list[Node], engine: ValkeyServer, blocks: int, at: int) -> set[bytes]:
    """Frames of which one bit is another one."""
    names = stored(two, engine, blocks)
    for name in names:
        _, _, value = engine.say(b"GET", name).partition(b"\r\n")
        frame = bytearray(value[:-2])
        frame[at] ^= 1
        assert engine.say(b"SET", name, bytes(frame)).startswith(b"+OK")
    return names


def test_a_flipped_bit_is_a_miss_and_is_counted(two: list[Node], engine: ValkeyServer) -> None:
    names = altered(two, engine, 2, 4096 + 77)
    got = two[1].get(2)
    assert got.blocks == 0 and got.awaited is not None and got.awaited.reason is MissReason.CORRUPT, got
    wait_until(lambda: two[1].stat()["elsewhere"]["sources"][0]["refused"].get("frame", 0) >= 1)
    wait_until(lambda: len(names - frames(engine)) >= 1)


def test_a_header_of_other_keys_is_not_taken_over(two: list[Node], engine: ValkeyServer) -> None:
    altered(two, engine, 3, 13)  # of the key id: what names a block does not look at it
    got = two[1].get(3)
    assert got.blocks == 0 and got.is_right, got
    wait_until(lambda: two[1].stat()["elsewhere"]["sources"][0]["refused"].get("header", 0) >= 1)
    assert sum(two[1].stat()["elsewhere"]["refused"].values()) >= 1


def test_a_server_that_hangs_costs_no_more_than_the_time_of_who_waits(two: list[Node], engine: ValkeyServer) -> None:
    stored(two, engine, 4)
    with Asker(two[1]) as asker:
        keys = asker.hashed(4, BLOCKS).keys
        located = asker.find(keys)
        engine.stop()
        try:
            began_at = time.monotonic()
            awaited = asker.awaits(keys, located, 0.7)
            assert awaited.blocks == 0 and time.monotonic() - began_at < 0.7 + 1.0
            assert awaited.reason in (MissReason.DEADLINE, MissReason.UNREACHABLE), awaited
        finally:
            engine.go_on()
    wait_until(lambda: two[1].get(4, locates=1.0).blocks == BLOCKS)


def test_what_was_dropped_is_not_served(two: list[Node], engine: ValkeyServer) -> None:
    stored(two, engine, 6)
    (space,) = two[0].stat()["namespaces"]
    admin = str(two[0].folder / "kv" / "admin.sock")
    command = [sys.executable, "-m", "kvstore", "drop", space["id"], "--socket", admin]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    time.sleep(1.2)  # the other node has read the salt again by then
    with Asker(two[1]) as asker:
        keys = asker.hashed(6, BLOCKS).keys
        for _ in range(30):
            found = asker.locate(keys)
            assert not found.number and not found.blocks
    stored(two, engine, 7)
    assert two[1].get(7).tiers == {"remote": BLOCKS}


def test_the_keeper_starts_the_courier_and_starts_it_again(tmp_path: Path, engine: ValkeyServer) -> None:
    remote = {"url": f"valkey+unix:{engine.socket_path}", "ttl": 3600}
    with pool(tmp_path, 1, remote=remote, with_keeper=True) as (one,):
        wait_until(lambda: one.stat()["elsewhere"]["couriers"] == 1)
        stored([one], engine, 8)
        assert one.sidecar is not None
        (courier,) = children_of(one.sidecar.pid, "agent")
        os.kill(courier, signal.SIGKILL)
        wait_until(lambda: one.stat()["elsewhere"]["couriers"] == 0)
        wait_until(lambda: one.stat()["elsewhere"]["couriers"] == 1)
        stored([one], engine, 9)


def test_a_sidecar_without_couriers_is_asked_nothing(tmp_path: Path, engine: ValkeyServer) -> None:
    """As one of an earlier version, or one that was not told of it."""
    earlier = Node(tmp_path / "earlier", None, {}, {})
    with ending(earlier):
        earlier.start_sidecar()
        flags = ["--observe-socket", str(earlier.folder / "kv" / "observe.sock"), "--data", str(earlier.folder / "kv")]
        remote = ["--remote", f"valkey+unix:{engine.socket_path}", "--listen", "none"]
        earlier.network = earlier._run("network", None, "network", "--json", *flags, *remote)
        wait_until(lambda: "courier.sock does not answer" in earlier.log())
        time.sleep(1.0)
        assert earlier.log().count("courier.sock") == 1, "once, however often it calls"
        earlier.put(1)
        assert earlier.network.poll() is None
