"""The rows of the door measure what they say: a real sidecar, full, whole prompts; how fast, no test asserts.

Frames of 12 KiB, and a sidecar of 1 MiB.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstore.bench import rig, sidecar, tiers
from kvstore.bench import rig as door
from kvstore.bench import rig as rows
from kvstore.bench.row import BenchResult
from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, StoreError
from tiering.frame import digest, frame_bytes

SHAPE = rig.BlockShape(layers=2, block_tokens=64, kv_heads=2, head_dim=8)
BLOCKS = 12
TOKENS = BLOCKS * SHAPE.block_tokens
SMALL = door.DoorOptions(shapes=(SHAPE,), prompt_tokens=TOKENS, laps=2)
STORE = dict(zip(("dram", "extent"), door.memory_of(SHAPE, BLOCKS), strict=True), nvme="off")


@pytest.fixture(scope="module")
def measured() -> tuple[BenchResult, list[str]]:
    said: list[str] = []
    return tiers.run(tiers.TiersOptions(door=SMALL, host_pages=(SHAPE,)), said.append, "door"), said


def test_both_paths_have_a_row_with_and_without_verification(measured: tuple[BenchResult, list[str]]) -> None:
    result, said = measured
    assert [(row["path"], row["verified"]) for row in result.rows] == [
        ("get", True),
        ("put", True),
        ("get", False),
        ("put", False),
        (tiers.HOST_POOL, True),
        (tiers.HOST_POOL, False),
    ]
    for row in result.rows[:4]:
        assert (row["tier"], row.limit_of, row["threads"], row["page_order"]) == ("door", "memcpy", 1, rows.HEAD_MAJOR)
        assert (row["payload_bytes"], row["prompt_tokens"]) == (SHAPE.payload_bytes, TOKENS)
        assert 0 < row.ratio_low <= row.ratio <= row.ratio_high and row["cpu_ratio"] > 0
        assert row.value > 0 and row.limit > 0
        assert row.target is None and row.met is None, "targets are for frames of 2 MiB and above"
    for row in result.rows[4:]:
        assert (row["tier"], row.limit_of, row["threads"], row["page_order"]) == ("door", "memcpy", 1, tiers.HOST_POOL)
        assert (row["payload_bytes"], row["prompt_tokens"]) == (
            SHAPE.payload_bytes,
            tiers.BATCH_PAGES * SHAPE.block_tokens,
        )
        assert 0 < row.ratio_low <= row.ratio <= row.ratio_high and row.value > 0
        assert row.target is None, "targets are for pages of 1 MiB and above"
    assert any("sidecar" in line for line in said) and any("put" in line for line in said)


def test_door_rows_as_json_and_as_text(measured: tuple[BenchResult, list[str]]) -> None:
    plain = json.loads(json.dumps(measured[0].to_dict()))
    assert [row["prompt_tokens"] for row in plain["rows"]] == [TOKENS] * 4 + [8192] * 2 and plain["disk"] is None
    assert plain["options"]["door"]["prompt_tokens"] == TOKENS
    console = Console(file=io.StringIO(), width=200)
    measured[0].render(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "sidecar" in text and f"{TOKENS} " in text
    assert "without verification" in text and "fio" not in text and "threads" not in text.splitlines()[2]


@pytest.mark.parametrize(
    ("path", "verified", "target"),
    [("get", True, 0.68), ("put", True, 0.68), ("get", False, 0.90), ("put", False, 0.88)],
)
def test_the_targets_of_the_door(path: str, verified: bool, target: float) -> None:
    assert rows.TARGETS["door", path, verified, 1] == target
    assert {shape.payload_bytes for shape in door.DoorOptions().shapes} == {2 << 20, 8 << 20}
    assert door.DoorOptions().prompt_tokens == 32768
    assert tiers.HOST_POOL_TARGETS == {True: 0.68, False: 0.88}
    assert {shape.payload_bytes for shape in tiers.TiersOptions().host_pages} == {1 << 20, 4 << 20}


# One side ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> rig.PagePool:
    return rig.PagePool(SHAPE, BLOCKS, 0, prompts=1)


@pytest.fixture
def served() -> Iterator[sidecar.Sidecar]:
    with sidecar.Sidecar(STORE) as one:
        yield one


def test_a_side_stores_new_blocks_into_a_full_sidecar(served: sidecar.Sidecar, pool: rig.PagePool) -> None:
    with served.client() as client:
        side = door.DoorSide(SHAPE, BLOCKS, pool, client, digest)
        handle = side._handles[0]
        slots = STORE["dram"] // STORE["extent"] * (STORE["extent"] // frame_bytes(SHAPE.payload_bytes))
        for _ in range(2):
            side.get(0)
            side.put(0)
        last = next(side._numbers)
        found = [handle.match(side._prompt(number)) for number in range(last)]
        assert sum(match.blocks for match in found) == slots, "every slot is in use"
        assert found[-1].blocks == BLOCKS and found[0].reason is MissReason.EVICTED


def test_without_verification_no_payload_is_digested(served: sidecar.Sidecar, pool: rig.PagePool) -> None:
    taken: list[int] = []

    def counted(*buffers: Any) -> bytes:
        taken.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return digest(*buffers)

    with served.client() as client:
        side = door.DoorSide(SHAPE, BLOCKS, pool, client, counted)
        for path in ("get", "put"):
            taken.clear()
            getattr(side, path)(0)
            assert taken == [SHAPE.payload_bytes // SHAPE.layers] * (SHAPE.layers * BLOCKS)
    assert rig.DIGESTS[True] is digest and rig.DIGESTS[False] is rig.no_digest


def test_frames_fill_extents_and_a_prompt_may_be_pinned() -> None:
    for shape, blocks in ((SHAPE, 1), (SHAPE, BLOCKS), (rig.BlockShape(8, 64), 512), (rig.BlockShape(32, 64), 273)):
        dram, extent = door.memory_of(shape, blocks)
        size = frame_bytes(shape.payload_bytes)
        assert extent % size == 0 and dram % extent == 0 and extent >= 64 << 10 and dram >= 1 << 20
        assert dram // size >= door.ROOM * blocks
        assert dram < door.ROOM * blocks * size + extent + (1 << 20)


def test_prompts_are_as_long_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    block = door.BUFFERS * frame_bytes(SHAPE.payload_bytes)
    monkeypatch.setattr(door, "available_bytes", lambda: int(5 * block / door.MEMORY_SHARE) + 1)
    assert door._blocks(SHAPE, SMALL) == 5
    monkeypatch.setattr(door, "available_bytes", lambda: 1 << 40)
    assert door._blocks(SHAPE, SMALL) == BLOCKS
    monkeypatch.setattr(door, "available_bytes", lambda: int(block))
    with pytest.raises(BadInput, match=r"of memory.*free some.*--only"):
        tiers.run(tiers.TiersOptions(door=SMALL), only="door")


def test_a_prompt_of_less_than_a_block_is_refused() -> None:
    with pytest.raises(BadInput, match="prompt_tokens=63; give 64"):
        door.DoorOptions(shapes=(SHAPE,), prompt_tokens=63)


@pytest.mark.parametrize("only", ["dram", "door"])
def test_a_disk_is_named_where_one_is_measured(only: str, tmp_path: Path) -> None:
    options = tiers.TiersOptions(nvme=tiers.nvme.NvmeOptions(data=str(tmp_path)))
    with pytest.raises(BadInput, match=f"names a disk, and --only {only} measures none"):
        tiers.run(options, only=only)


# The sidecar ------------------------------------------------------------------------------------------------------


def test_a_sidecar_is_a_process_that_leaves_nothing_behind() -> None:
    with sidecar.Sidecar(STORE) as one:
        process = one._process.pid
        assert 0 < one.greeted() <= one.greeted()
        assert process != os.getpid() and Path(f"/proc/{process}").exists()
    assert not Path(f"/proc/{process}").exists() and not Path(one.socket).parent.exists()


def test_a_sidecar_that_cannot_start_says_why() -> None:
    with (
        pytest.raises(StoreError, match=r"ended with 2: .*dram='nothing' is not a size"),
        sidecar.Sidecar({"dram": "nothing"}) as one,
    ):
        one.greeted()
    assert not Path(one.socket).parent.exists()


def test_a_sidecar_that_was_killed_or_has_to_warn_is_no_measurement() -> None:
    with pytest.raises(StoreError, match="ended with -9"), sidecar.Sidecar(STORE) as one:
        one.greeted()
        one.kill()
        one.end()
    with pytest.raises(StoreError, match="frames cannot be read"), sidecar.Sidecar(STORE) as one:
        one.greeted()
        with one._log.open("a") as log:
            log.write("frames cannot be read\n")


def test_a_sidecar_goes_when_a_bench_fails() -> None:
    with pytest.raises(RuntimeError, match="in the bench"), sidecar.Sidecar(STORE) as one:
        one.greeted()
        raise RuntimeError("in the bench")
    assert one._process.returncode == -9
