"""The NVMe rows measure what they say: cold blocks, whole prompts, a full tier; how fast, no test asserts.

Frames of 12 KiB, on the disk of the test's own directory.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from kvstore.bench import measure, nvme, rig, tiers
from kvstore.bench.disk import file_system
from kvstore.bench.rig import HEAD_MAJOR, memcpy_row
from kvstore.bench.row import BenchResult
from kvstore.block.errors import BadInput
from tiering.frame import frame_bytes

SHAPE = rig.BlockShape(layers=2, block_tokens=64, kv_heads=2, head_dim=8)
BLOCKS = 48
SMALL = nvme.NvmeOptions(shapes=(SHAPE,), turn_bytes=BLOCKS * SHAPE.payload_bytes, laps=2)
FIO = shutil.which("fio")
PATHS = ("promote", "get", "persist")


def rendered(result: Any) -> str:
    """What a person sees."""
    console = Console(file=io.StringIO(), width=200)
    result.render(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchResult, list[str]]:
    data = tmp_path_factory.mktemp("bench")
    said: list[str] = []
    result = tiers.run(tiers.TiersOptions(nvme=replace(SMALL, data=str(data))), said.append, "nvme")
    assert list(data.iterdir()) == [], "nothing is left behind"
    return result, said


@pytest.mark.slow
def test_every_path_has_a_row(measured: tuple[BenchResult, list[str]]) -> None:
    result, said = measured
    assert [(row["tier"], row["path"], row.limit_of) for row in result.rows] == [
        ("nvme", path, "loop") for path in PATHS
    ]
    for row in result.rows:
        assert row["payload_bytes"] == SHAPE.payload_bytes and row["verified"] and row["threads"] == 1
        assert 0 < row.ratio_low <= row.ratio <= row.ratio_high and row["cpu_ratio"] > 0
        assert row.value > 0 and row.limit > 0
        assert row.target is None and row.met is None, "targets are for frames of 2 MiB and above"
    assert any("filling" in line for line in said) and any("durable" in line for line in said)


@pytest.mark.slow
def test_what_cold_turns_delivered_is_counted(measured: tuple[BenchResult, list[str]]) -> None:
    disk = nvme.Disk(**measured[0].about["disk"])
    turns = SMALL.laps * 2  # promote and get
    assert disk.delivered_bytes == turns * BLOCKS * SHAPE.payload_bytes
    assert disk.read_bytes is None or disk.read_bytes >= 0
    assert (disk.fio, disk.why_not_fio) == ("", "fio is not installed")
    assert disk.limits.keys() == {"loop"}


def test_both_tiers_have_the_same_fields_in_json(measured: tuple[BenchResult, list[str]]) -> None:
    plain = json.loads(json.dumps(measured[0].to_dict()))
    assert plain["bench"] == "tiers" and len(plain["rows"]) == len(PATHS)
    assert plain["disk"]["direct"] in (True, False) and plain["disk"]["file_system"]
    dram = memcpy_row("dram", "get", SHAPE, HEAD_MAJOR, True, 1, 4, measure.Against(1.0, 0.8, 0.8, 0.7, 0.9, 0.8))
    assert plain["rows"][0].keys() == dram.to_dict().keys()


def test_a_person_is_told_what_the_limit_is(measured: tuple[BenchResult, list[str]]) -> None:
    text = " ".join(rendered(measured[0]).split())
    assert "fio is not installed" in text and "loop" in text and "memcpy" not in text
    assert "syncs slabs and index several times" in text


@pytest.mark.skipif(FIO is None, reason="fio is not installed")
def test_with_fio_each_path_has_a_row_against_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[float] = []
    monkeypatch.setattr(nvme, "sleep", rested.append)
    rows, disk = nvme.run(replace(SMALL, laps=1, data=str(tmp_path), fio=FIO), lambda _: None)
    assert [(row["path"], row.limit_of) for row in rows] == [
        (path, limit) for path in PATHS for limit in ("fio", "loop")
    ]
    assert disk.fio.startswith("fio-") and not disk.why_not_fio and disk.limits.keys() == {"fio", "loop"}
    assert disk.fio in disk.describe()
    assert len(rested) == 8, "whatever is not fio waits as long as fio does: 5 turns of the loop, one of each path"
    assert 0 < min(rested) <= max(rested) < 1


@pytest.mark.parametrize(
    ("direct", "kind", "says", "judged"),
    [(True, "ext4", "direct I/O", True), (False, "ext4", "buffered", False), (True, "tmpfs", "no disk", False)],
)
def test_targets_are_for_disks_and_direct_io(direct: bool, kind: str, says: str, judged: bool) -> None:
    large = rig.BlockShape(8, 64)
    one = object.__new__(nvme._Measured)
    one.direct, one.file_system = direct, kind
    found = measure.Against(1.0, 0.9, 0.9, 0.8, 1.0, 0.5)
    rows = {path: one._row(path, "fio", large, 4, found) for path in PATHS}
    assert {path: row.target and row.target.number for path, row in rows.items()} == (
        {"promote": 0.92, "get": None, "persist": 0.88} if judged else dict.fromkeys(PATHS)
    )
    if judged:
        assert (rows["promote"].met, rows["persist"].met) == (False, True)
    assert rows["get"].value == pytest.approx(4 * (2 << 20) / 1e9)
    assert says in nvme.Disk(kind, direct, 4, {"loop": {}}, "", "why", 0, None).describe()


@pytest.mark.slow
def test_files_in_memory_are_no_disk() -> None:
    if not os.access("/dev/shm", os.W_OK) or file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("there is no file system in memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as data:
        rows, disk = nvme.run(replace(SMALL, laps=1, data=data), lambda _: None)
    assert disk.file_system == "tmpfs" and "no target is judged" in disk.describe()
    assert [row.target for row in rows] == [None] * len(PATHS)


# One side ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def side(tmp_path: Path) -> Iterator[nvme.NvmeSide]:
    side = nvme.NvmeSide(SHAPE, BLOCKS, tmp_path / "store")
    yield side
    side.store.close()


def test_every_slab_holds_one_prompt(side: nvme.NvmeSide) -> None:
    size = frame_bytes(SHAPE.payload_bytes)
    usage = side.store.usage()
    assert usage.nvme is not None
    assert (usage.nvme.used, usage.nvme.free, usage.nvme.capacity) == (nvme.PROMPTS * BLOCKS, 0, nvme.PROMPTS * BLOCKS)
    for number, prompt in enumerate(side._stored):
        path, offset = side._slabs[number]
        raw = path.read_bytes()[offset : offset + BLOCKS * size]
        for at, key in enumerate(side._handle.match(prompt).keys):
            assert key in raw[at * size : at * size + 4096], "block by block, in order"


@pytest.mark.parametrize("path", ["promote", "get"])
def test_a_cold_turn_brings_every_block_up(side: nvme.NvmeSide, path: str) -> None:
    for turn in range(1, 2 * nvme.PROMPTS):
        cost = getattr(side, path)()
        assert cost.wall > 0 and cost.cpu > 0
        counters = side.store.usage().counters
        assert counters["promoted_blocks"] == side.cold_blocks == turn * BLOCKS
    side.check()


def test_what_is_still_in_dram_is_not_measured(side: nvme.NvmeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    side.promote()
    monkeypatch.setattr(side, "_make_cold", lambda: None)
    monkeypatch.setattr(side, "_turns", iter([0]))
    with pytest.raises(AssertionError, match="not cold"):
        side.promote()


def test_get_fills_the_pages(side: nvme.NvmeSide) -> None:
    planes = [plane for planes in side._pool.planes.values() for plane in planes]
    stored = [plane.view(torch.int16).clone() for plane in planes]
    for plane in planes:
        plane.zero_()
    side.get()
    assert all(torch.equal(plane.view(torch.int16), bits) for plane, bits in zip(planes, stored, strict=True))
    assert all(len(bits.unique()) > 100 for bits in stored), "random bits, not zeros"


def test_persist_makes_a_whole_prompt_durable_in_a_full_tier(side: nvme.NvmeSide) -> None:
    for _ in range(3):
        before = side.store.usage()
        side.persist()
        after = side.store.usage()
        assert before.nvme is not None and after.nvme is not None
        for name in ("demoted_blocks", "evicted_blocks"):
            assert after.counters[name] - before.counters.get(name, 0) == BLOCKS
        assert after.nvme.used == before.nvme.used == nvme.PROMPTS * BLOCKS
        assert after.nvme.capacity == before.nvme.capacity
    side.check()


def test_the_limit_uses_the_slots_that_the_store_reads_into(side: nvme.NvmeSide) -> None:
    def addresses() -> set[int]:
        store = side.store._store
        places = {
            store.blocks.residency.place(row, 0)
            for row in store.blocks.index.match(side._handle.number, side._handle.match(side._stored[0]).keys)
        }
        return {store.spans([place])[0].address for place in places}

    side.promote()
    used = addresses()
    with side.dram_frames() as frames:
        assert len(frames) == BLOCKS and {len(frame) for frame in frames} == {frame_bytes(SHAPE.payload_bytes)}
        lent = {np.frombuffer(frame, np.uint8).ctypes.data for frame in frames}
    assert lent == used
    side.check()


# What cannot be measured ------------------------------------------------------------------------------------------


def test_too_little_memory_or_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as scarce:
        scarce.setattr(nvme, "available_bytes", lambda: 1 << 20)
        with pytest.raises(BadInput, match=r"of memory.*--only dram"):
            nvme.run(replace(SMALL, data=str(tmp_path)), lambda _: None)
    monkeypatch.setattr(nvme, "disk_room", lambda _: 1 << 20)
    with pytest.raises(BadInput, match=r"of disk.*--data"):
        nvme.run(replace(SMALL, data=str(tmp_path)), lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"file is not a directory; give one on the disk"):
        nvme.run(replace(SMALL, data=str(tmp_path / "file")), lambda _: None)


def test_a_tier_that_is_none_is_said() -> None:
    with pytest.raises(BadInput, match=r"only='tape'.*dram, door, nvme"):
        tiers.run(only="tape")
