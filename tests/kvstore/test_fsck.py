"""A directory that is checked offline: every damage is called what it is, where it is; nothing is written; a repair
leaves what is good, brings back nothing that was given up, and may be cut short at any moment."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import pytest
from rich.console import Console

import kvstore
from kvstore import fsck
from kvstore.block.errors import BadInput, DirectoryInUse, KeysUnusable
from kvstore.block.identity import KeyRing
from kvstore.block.key_file import KeyFile
from kvstore.client.handle import NamespaceHandle
from kvstore.fsck import FsckResult, SlabState, Slot
from kvstore.node import EmbeddedStore, new_uid
from programs import run_python
from tiering.errors import TierError
from tiering.frame import FrameHeader, digest, parse_header
from tiering.nvme.group_commit import BatchRequest, GroupCommit
from tiering.nvme.index_records import IndexState
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.slab import META, StoreStamp, doubt_key, record_key, slab_name
from tiering.nvme.slab_files import DirectFiles
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import PAGE_BYTES, SlabHeader, SlabSizes, read_slab_header
from tiering.tier import place_of
from workbench import MODEL, prompt_of, put_prompt, read_prompt, refused, small_layout

PROMPTS, BLOCKS = 3, 12
prompt = partial(prompt_of, blocks=BLOCKS)
OTHER_MODEL = "0123abcd"
FIRST, SECOND, OTHER = slab_name(1), slab_name(2), slab_name(3)
"""The first two are the namespace's that most tests damage, with 20 slots each; the third is another one's."""


# A directory ----------------------------------------------------------------------------------------------------------


def opened(path: Path, **options: Any) -> EmbeddedStore:
    sizes = {"dram": "1MiB", "nvme": "4MiB", "slab": "256KiB"}
    store = kvstore.open(f"embedded:{path}", **{**sizes, **options})
    assert store.warmed(20)
    return store


def namespace(store: EmbeddedStore, model: str = MODEL) -> NamespaceHandle:
    return store.namespace(model=model, layout=small_layout())


def stored(path: Path) -> None:
    """Three prompts of twelve blocks, and one of another namespace: 36 frames in two slabs, and 12 in a third."""
    with opened(path) as store:
        for number in range(PROMPTS):
            assert put_prompt(namespace(store), number, BLOCKS, durability="disk").stored == BLOCKS
        assert put_prompt(namespace(store, OTHER_MODEL), 0, BLOCKS, durability="disk").stored == BLOCKS


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stock") / "kv"
    stored(path)
    return path


@pytest.fixture
def kv(stock: Path, tmp_path: Path) -> Path:
    """A directory of one's own, closed in order."""
    return shutil.copytree(stock, tmp_path / "kv")


def slab_header(kv: Path, name: str) -> SlabHeader:
    ring = KeyRing(KeyFile(kv / "keys").by_name().values())
    return read_slab_header((kv / "nvme" / name).read_bytes()[:PAGE_BYTES], ring)


def frame_at(kv: Path, name: str, slot: int) -> bytes:
    header = slab_header(kv, name)
    start = header.offset(slot)
    return (kv / "nvme" / name).read_bytes()[start : start + header.slot_class.frame_bytes]


def header_at(kv: Path, name: str, slot: int) -> FrameHeader:
    return parse_header(frame_at(kv, name, slot)[:PAGE_BYTES])


def write(kv: Path, name: str, offset: int, data: bytes) -> None:
    with (kv / "nvme" / name).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def write_slot(kv: Path, name: str, slot: int, data: bytes, at: int = 0) -> None:
    write(kv, name, slab_header(kv, name).offset(slot) + at, data)


def flip(kv: Path, name: str, offset: int) -> None:
    byte = (kv / "nvme" / name).read_bytes()[offset]
    write(kv, name, offset, bytes([byte ^ 1]))


def flip_slot(kv: Path, name: str, slot: int, at: int) -> None:
    flip(kv, name, slab_header(kv, name).offset(slot) + at)


def change_index(kv: Path, change: Callable[[Any], None]) -> None:
    with lmdb.open(str(kv / "nvme" / "index")) as environment, environment.begin(write=True) as transaction:
        change(transaction)


def data_of(kv: Path) -> Path:
    return kv / "nvme" / "index" / "data.mdb"


def fingerprint(path: Path) -> dict[str, tuple[Any, ...]]:
    """Every file and folder with its contents and everything the system notes when it is written to."""
    found = {}
    for one in sorted([path, *path.rglob("*")]):
        facts = one.lstat()
        contents = hashlib.sha256(one.read_bytes()).hexdigest() if one.is_file() else ""
        found[str(one)] = (contents, facts.st_size, facts.st_mode, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns)
    return found


def checked(kv: Path) -> FsckResult:
    """A check, that has written nothing, and whose counts add up."""
    before = fingerprint(kv)
    result = fsck.check(kv)
    assert fingerprint(kv) == before, "a check has written something"
    for slab in result.slabs:
        assert sum(slab.counts.values()) == len(slab.slots)
        assert slab.header is None or len(slab.slots) == slab.header.slots
    assert result.checked_bytes == sum(slab.size_bytes for slab in result.slabs)
    return result


def said(result: FsckResult) -> list[tuple[str, str, int | None]]:
    return [(problem.what, problem.slab, problem.slot) for problem in result.problems.listed]


def delivered(store: EmbeddedStore, number: int, model: str = MODEL) -> int:
    """How many blocks of a prompt are there."""
    return read_prompt(namespace(store, model), number, BLOCKS).blocks


def found_by_a_store(kv: Path) -> list[int]:
    """Blocks of each prompt that a store delivers; then of the other namespace's."""
    with opened(kv) as store:
        counts = [delivered(store, number) for number in range(PROMPTS)] + [delivered(store, 0, OTHER_MODEL)]
        store.check()
    return counts


ALL = [BLOCKS] * PROMPTS + [BLOCKS]


def expected_prefixes(kv: Path, bad: set[tuple[str, int]]) -> list[int]:
    """How many blocks each prompt has left if these slots are lost: none behind the first that is."""
    lost = {header_at(kv, name, slot).prefix_key for name, slot in bad}
    with opened(kv) as store:
        keys = [namespace(store).match(prompt(number)).keys for number in range(PROMPTS)]
        keys.append(namespace(store, OTHER_MODEL).match(prompt(0)).keys)
    assert all(len(chain) == BLOCKS for chain in keys)
    return [next((at for at, key in enumerate(chain) if key in lost), BLOCKS) for chain in keys]


# All is well ----------------------------------------------------------------------------------------------------------


def test_a_sound_directory(kv: Path) -> None:
    result = checked(kv)
    assert result.is_well and result.problems.total == 0 and result.repair is None
    assert [(slab.name, slab.counts["good"], slab.counts["empty"]) for slab in result.slabs] == [
        (FIRST, 20, 0),
        (SECOND, 16, 4),
        (OTHER, 12, 8),
    ]
    assert result.totals()["good"] == 48 and sum(result.totals().values()) == 60
    assert (result.index, result.stamp.session, result.stamp.clean, result.stamp.faults) == (
        IndexState.GOOD,
        1,
        True,
        [],
    )
    groups = result.to_dict()["namespaces"]
    assert isinstance(groups, list) and [(one["slabs"], one["good"]) for one in groups] == [(2, 36), (1, 12)]
    header = slab_header(kv, FIRST)
    assert groups[0]["tenant"] == header.slot_class.tenant.hex()[:12]
    assert groups[0]["namespace"] == header.slot_class.namespace.hex()[:12]
    assert found_by_a_store(kv) == ALL


def test_a_directory_that_only_was_opened(tmp_path: Path) -> None:
    opened(tmp_path).close()
    result = checked(tmp_path)
    assert result.is_well and result.slabs == [] and result.checked_bytes == 0


def test_a_check_needs_no_lock_file_and_makes_none(kv: Path) -> None:
    (kv / "lock").unlink()
    assert checked(kv).is_well and not (kv / "lock").exists()


def test_progress_goes_over_all_bytes(kv: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    result = fsck.check(kv, lambda doing, done=0, total=0: steps.append((doing, done, total)))
    counted = [(done, total) for doing, done, total in steps if doing.startswith("checking")]
    assert counted == sorted(counted) and {total for _, total in counted} == {result.checked_bytes}
    assert 0.9 * result.checked_bytes < counted[-1][0] <= result.checked_bytes


def test_frames_that_are_larger_than_a_window_and_windows_of_many(kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_slot(kv, SECOND, 3, 5000)
    for window in (4096, 40_000, 1 << 22):
        monkeypatch.setattr("tiering.nvme.slab_scan.SPAN_BYTES", window)
        result = checked(kv)
        assert said(result) == [("damaged_payload", SECOND, 3)] and result.totals()["good"] == 47


# Every damage is called what it is ------------------------------------------------------------------------------------


def copied_over(kv: Path) -> None:
    write_slot(kv, FIRST, 4, frame_at(kv, FIRST, 9))


def older_generation(kv: Path) -> int:
    """A slot was given up and used again; the disk lost that write, and shows the frame before it. Returns the slot."""
    before = [frame_at(kv, OTHER, slot) for slot in range(20)]
    with opened(kv) as store:
        other = namespace(store, OTHER_MODEL)
        assert store.drop(other) == BLOCKS
        put_prompt(other, 0, BLOCKS, durability="disk")
    slots = [slot for slot in range(12) if any(frame_at(kv, OTHER, slot)[:PAGE_BYTES])]
    last = next(slot for slot in slots if header_at(kv, OTHER, slot).block_index == BLOCKS - 1)
    assert header_at(kv, OTHER, last).generation > parse_header(before[last][:PAGE_BYTES]).generation
    write_slot(kv, OTHER, last, before[last])
    return last


def test_a_lost_write_over_a_slot_that_is_used_again_is_not_taken_for_the_frame(kv: Path) -> None:
    slot = older_generation(kv)
    assert said(checked(kv)) == [("other_frame", OTHER, slot)]
    assert fsck.repair(kv).is_well and checked(kv).totals()["good"] == 47
    assert found_by_a_store(kv) == [*ALL[:3], BLOCKS - 1], "the old frame must not come back"


def test_many_problems_are_counted_and_the_first_ones_listed(kv: Path) -> None:
    for name, count in ((FIRST, 20), (SECOND, 16)):
        for slot in range(count):
            flip_slot(kv, name, slot, 6000)
    result = checked(kv)
    assert said(result) == [("damaged_payload", FIRST, slot) for slot in range(20)]
    assert result.problems.counts == {"damaged_payload": 36} and result.to_dict()["problems"] == 36
    console_lines = rendered(result)
    assert any(line.strip() == "and 16 more" for line in console_lines)


def rendered(result: FsckResult) -> list[str]:
    console = Console(width=100, record=True, file=io.StringIO())
    result.render(console)
    return console.export_text().splitlines()


def test_what_people_read(kv: Path) -> None:
    text = "\n".join(rendered(checked(kv)))
    assert "session 1, closed in order; index good" in text and "All is well: 48 good frames in 3 slabs" in text
    assert "damage" not in text.replace("damaged", "", 2), "but for the heads of two tables"
    flip_slot(kv, FIRST, 5, 5000)
    text = "\n".join(rendered(checked(kv)))
    assert f"{FIRST} slot 5: damaged payload: payload digest of layer slice 0 differs" in text
    assert "Not well: damaged payload 1; 47 good frames" in text and f"kvstore fsck {kv} --repair" in text
    text = "\n".join(rendered(fsck.repair(kv)))
    assert "Repaired: frames in the index 47, given up 1, slots emptied 0, slab headers written again 0" in text


def both_headers(kv: Path) -> None:
    size = (kv / "nvme" / FIRST).stat().st_size
    for offset in (0, size - PAGE_BYTES):
        write(kv, FIRST, offset + 100, b"damaged")


def cut(length: int) -> Callable[[Path], None]:
    def damage(kv: Path) -> None:
        os.truncate(kv / "nvme" / FIRST, length)

    return damage


UNUSABLE: list[tuple[str, Callable[[Path], None], str, str]] = [
    (
        "both headers",
        both_headers,
        FIRST,
        "the first header: slab header MAC differs; the last header: slab header MAC",
    ),
    ("cut at a page", cut(20 * PAGE_BYTES), FIRST, "bytes and the file has 81920"),
    ("cut in a page", cut(100_000), FIRST, "100000 bytes are not the size of a slab"),
    ("empty", cut(0), FIRST, "0 bytes are not the size"),
    ("another's name", lambda kv: (kv / "nvme" / "notes.slab").write_bytes(b"x"), "notes.slab", "not the name"),
    (
        "a copy under another number",
        lambda kv: shutil.copy(kv / "nvme" / FIRST, kv / "nvme" / slab_name(9)),
        slab_name(9),
        f"the header of slab {FIRST}",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "name", "words"), [one[1:] for one in UNUSABLE], ids=[one[0] for one in UNUSABLE])
def test_a_slab_that_cannot_be_used_is_told_and_never_touched(
    kv: Path, damage: Callable[[Path], None], name: str, words: str
) -> None:
    damage(kv)
    result = checked(kv)
    assert said(result) == [("unusable_slab", name, None)] and words in result.problems.listed[0].detail
    flip_slot(kv, SECOND, 1, 5000)
    before = (kv / "nvme" / name).read_bytes()
    repaired = fsck.repair(kv)
    assert repaired.repair is not None and repaired.repair.given_up == 1 and not repaired.is_well
    (line,) = repaired.repair.left
    assert name in line and "move it away" in line
    assert (kv / "nvme" / name).read_bytes() == before
    after = checked(kv)
    assert said(after) == [("unusable_slab", name, None)]
    unchanged = fingerprint(kv / "nvme")
    assert fsck.repair(kv).problems.total == 1 and fingerprint(kv / "nvme") == unchanged, "there is nothing to mend"
    (kv / "nvme" / name).unlink()
    assert fsck.repair(kv).is_well and checked(kv).is_well


def test_slabs_that_were_never_finished_are_no_damage(kv: Path) -> None:
    (kv / "nvme" / slab_name(7)).write_bytes(bytes(256 << 10))
    (kv / "nvme" / slab_name(8)).write_bytes(b"half a header".ljust(64 << 10, b"\x00"))
    result = checked(kv)
    assert result.is_well and [slab.state for slab in result.slabs[3:]] == [SlabState.UNFINISHED] * 2
    opened(kv).close()
    assert len(checked(kv).slabs) == 3, "as it was said, the start has removed them"


def stale(kv: Path) -> None:
    with opened(kv) as store:
        copy = data_of(kv).read_bytes()
        store.drop(namespace(store, OTHER_MODEL))
    data_of(kv).write_bytes(copy)


def foreign(kv: Path) -> None:
    with opened(kv.parent / "other") as store:
        put_prompt(namespace(store), 0, BLOCKS, durability="disk")
    shutil.copy(data_of(kv.parent / "other"), data_of(kv))


def garbage(kv: Path) -> None:
    """Pages that only a walk finds damaged, or that end whoever maps them."""
    path = data_of(kv)
    contents = bytearray(path.read_bytes())
    contents[2 * PAGE_BYTES :] = Random(3).randbytes(len(contents) - 2 * PAGE_BYTES)
    path.write_bytes(contents)


def damaged_records(kv: Path) -> None:
    def damage(transaction: Any) -> None:
        value = bytearray(transaction.get(record_key(2, 0)))
        value[500] ^= 1
        transaction.put(record_key(2, 0), bytes(value))
        transaction.put(record_key(2, 40), bytes(value))
        transaction.put(record_key(1, 0) + b"longer", b"value")

    change_index(kv, damage)


def header_page(page: int, damage: str) -> Callable[[Path], None]:
    def damaged(kv: Path) -> None:
        offset = page % (kv / "nvme" / FIRST).stat().st_size
        if damage == "zeros":
            write(kv, FIRST, offset, bytes(PAGE_BYTES))
        else:
            flip(kv, FIRST, offset + (12 if damage == "a bit of its key's name" else 100))

    return damaged


STAMP, INDEX, HEADER = ("stamp", slab_name(0), None), ("index", "", None), ("damaged_slab_header", FIRST, None)
Said = tuple[str, str, int | None]
FAULTS: list[tuple[str, Callable[[Path], object], list[Said], list[str], int]] = [
    # what, how, which problems, words of each one's line, good frames
    ("a header's bit", lambda kv: flip_slot(kv, FIRST, 5, 200), [("damaged_header", FIRST, 5)], ["MAC"], 47),
    ("a header's magic", lambda kv: flip_slot(kv, OTHER, 0, 0), [("damaged_header", OTHER, 0)], ["magic"], 47),
    ("its end", lambda kv: flip_slot(kv, FIRST, 19, 4095), [("damaged_header", FIRST, 19)], ["zero after its end"], 47),
    ("a payload", lambda kv: flip_slot(kv, FIRST, 5, 5000), [("damaged_payload", FIRST, 5)], ["layer slice 0"], 47),
    ("last", lambda kv: flip_slot(kv, SECOND, 14, 12287), [("damaged_payload", SECOND, 14)], ["layer slice 1"], 47),
    ("no payload", lambda kv: write_slot(kv, FIRST, 0, bytes(8192), 4096), [("damaged_payload", FIRST, 0)], [""], 47),
    ("a lost write", lambda kv: write_slot(kv, FIRST, 7, bytes(12288)), [("missing", FIRST, 7)], ["empty"], 47),
    ("misdirected", copied_over, [("other_frame", FIRST, 4)], ["another block or generation"], 47),
    (
        "a frame in an empty slot",
        lambda kv: write_slot(kv, SECOND, 18, frame_at(kv, FIRST, 9)),
        [("unnamed", SECOND, 18)],
        ["does not name"],
        48,
    ),
    ("noise", lambda kv: write_slot(kv, SECOND, 19, b"\x5a" * 4096), [("damaged_header", SECOND, 19)], [""], 48),
    (
        "another namespace's frame",
        lambda kv: write_slot(kv, FIRST, 2, frame_at(kv, OTHER, 2)),
        [("damaged_header", FIRST, 2)],
        ["slot class"],
        47,
    ),
    *(
        (f"{word} header: {damage}", header_page(page, damage), [HEADER], [word], 48)
        for page, word in ((0, "first"), (-PAGE_BYTES, "last"))
        for damage in ("a bit", "a bit of its key's name", "zeros")
    ),
    ("no slab", lambda kv: (kv / "nvme" / SECOND).unlink(), [("missing_slab", SECOND, None)], ["not there"], 32),
    ("stamp: older page", lambda kv: flip(kv, slab_name(0), PAGE_BYTES + 9), [STAMP], ["page 1"], 48),
    ("stamp: newer page", lambda kv: flip(kv, slab_name(0), 9), [STAMP], ["page 0"], 48),
    ("stamp: both", lambda kv: write(kv, slab_name(0), 0, bytes(8192)), [STAMP, INDEX], ["neither page", ""], 48),
    ("stamp: none", lambda kv: (kv / "nvme" / slab_name(0)).unlink(), [STAMP, INDEX], ["missing", ""], 48),
    (
        "stamp: short",
        lambda kv: os.truncate(kv / "nvme" / slab_name(0), PAGE_BYTES),
        [STAMP, INDEX],
        ["4096 bytes instead", "foreign: there is no stamp"],
        48,
    ),
    ("index: none", lambda kv: data_of(kv).unlink(), [INDEX], ["missing: there is none"], 48),
    ("index: no folder", lambda kv: shutil.rmtree(data_of(kv).parent), [INDEX], ["missing: there is none"], 48),
    ("index: cut", lambda kv: os.truncate(data_of(kv), 3 * PAGE_BYTES), [INDEX], ["doubtful: the probe"], 48),
    ("index: garbage", garbage, [INDEX], ["doubtful: the probe"], 48),
    ("index: another's", foreign, [INDEX], ["foreign: it belongs to another directory"], 48),
    ("index: no name", lambda kv: change_index(kv, lambda t: t.delete(META)), [INDEX], ["foreign: it does not"], 48),
    ("index: older", stale, [INDEX], ["stale: it has taken in"], 36),
    (
        "index: records",
        damaged_records,
        [("index_record", FIRST, None), ("index_record", SECOND, None), ("index_record", SECOND, None)],
        ["no slot's name", "slots 0 to 19", "slots from 1280 on"],
        48,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "problems", "words", "good"), [one[1:] for one in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_damage_is_called_what_it_is_and_repaired_at_no_cost_of_what_is_good(
    kv: Path, damage: Callable[[Path], object], problems: list[Said], words: list[str], good: int
) -> None:
    damage(kv)
    result = checked(kv)
    assert said(result) == problems and not result.is_well and result.totals()["good"] == good
    for problem, word in zip(result.problems.listed, words, strict=True):
        assert word in problem.detail
        assert problem.what != "index" or "reads every header" in problem.detail
    for what, name, slot in problems:
        (slab,) = [one for one in result.slabs if one.name == name and slot is not None] or [None]
        assert slab is None or slot is None or (slab.slots[slot] == Slot[what.upper()] and slab.is_damaged)
    kept = good_frames(kv, result)
    repaired = fsck.repair(kv)
    assert repaired.repair is not None and repaired.is_well
    assert repaired.repair.headers_rewritten == problems.count(HEADER)
    after = checked(kv)
    assert after.is_well and good_frames(kv, after) == kept and len(kept) == good
    if good == 48:
        assert found_by_a_store(kv) == ALL


def good_frames(kv: Path, result: FsckResult) -> dict[tuple[str, int], bytes]:
    frames = {}
    for slab in result.slabs:
        raw = (kv / "nvme" / slab.name).read_bytes()
        for slot in [slot for slot, one in enumerate(slab.slots) if one == Slot.GOOD]:
            assert slab.header is not None
            start = slab.header.offset(slot)
            frames[slab.name, slot] = raw[start : start + slab.header.slot_class.frame_bytes]
    return frames


def test_a_doubt_costs_no_frame_that_the_index_vouches_for(kv: Path) -> None:
    """A doubt has no MAC: it may have rotted into another slot's name."""
    change_index(kv, lambda transaction: transaction.put(doubt_key(place_of(1, 5)), b""))
    flip_slot(kv, SECOND, 13, 9000)
    assert checked(kv).totals()["good"] == 47
    assert fsck.repair(kv).is_well and checked(kv).totals()["good"] == 47


def test_slabs_that_wait_to_be_read_speak_for_themselves(kv: Path) -> None:
    """A slab whose keys were away while the index was built again: the next start that has them reads its headers."""
    keys = (kv / "keys").read_bytes()
    with opened(kv, tenant="another"):
        pass
    change_index(kv, lambda transaction: transaction.delete(META))
    both = (kv / "keys").read_text()
    write_keys_text(kv, json.dumps({"version": 1, "tenants": {"another": json.loads(both)["tenants"]["another"]}}))
    opened(kv, tenant="another").close()
    write_keys_text(kv, both)
    result = checked(kv)
    assert result.is_well and result.index is IndexState.GOOD and result.totals()["good"] == 48
    assert keys != (kv / "keys").read_bytes() and found_by_a_store(kv) == ALL


def write_keys_text(kv: Path, text: str) -> None:
    (kv / "keys").write_text(text)
    (kv / "keys").chmod(0o600)


# Slots in doubt, and frames that were given up ------------------------------------------------------------------------


@pytest.fixture
def dropped(kv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as a process leaves it that is killed when the index has forgotten the frames of a namespace that
    was dropped, and their headers still stand."""
    with opened(kv) as store, monkeypatch.context() as patch:
        patch.setattr(GroupCommit, "_void", lambda *_: None)
        assert store.drop(namespace(store, OTHER_MODEL)) == BLOCKS
        lower = store._store.blocks.lower
        assert lower is not None
        lower.tier._commits.join(BatchRequest())
        return shutil.copytree(kv, tmp_path / "killed")


def test_slots_in_doubt_are_no_damage(dropped: Path) -> None:
    result = checked(dropped)
    assert result.is_well and result.stamp.clean is False and result.index is IndexState.GOOD
    assert result.totals()["in_doubt"] == BLOCKS and result.totals()["good"] == 36
    assert "Slots in doubt are no damage" in "\n".join(rendered(result))
    assert found_by_a_store(dropped) == [*ALL[:3], 0]
    assert checked(dropped).totals()["in_doubt"] == 0, "as it was said, the start has emptied them"


def test_what_was_evicted_does_not_come_back_by_a_repair(dropped: Path) -> None:
    flip_slot(dropped, FIRST, slot_of_block(dropped, FIRST, BLOCKS - 1), 5000)
    repaired = fsck.repair(dropped)
    assert repaired.is_well and repaired.repair is not None
    assert (repaired.repair.emptied, repaired.repair.given_up) == (BLOCKS, 1)
    assert checked(dropped).totals()["in_doubt"] == 0
    data_of(dropped).unlink()
    assert found_by_a_store(dropped) == [BLOCKS - 1, BLOCKS, BLOCKS, 0], "not even without that index"


def slot_of_block(kv: Path, name: str, block: int) -> int:
    """Where the first prompt's block of this number stands in its slab."""
    slots = slab_header(kv, name).slots
    filled = [slot for slot in range(slots) if any(frame_at(kv, name, slot)[:PAGE_BYTES])]
    return next(slot for slot in filled if header_at(kv, name, slot).block_index == block)


def test_without_its_index_what_the_headers_say_is_what_there_is(dropped: Path) -> None:
    data_of(dropped).unlink()
    result = checked(dropped)
    assert said(result) == [("index", "", None)] and result.totals()["good"] == 48
    assert fsck.repair(dropped).is_well and found_by_a_store(dropped) == ALL


def test_frames_that_were_given_up_before_are_no_damage_and_stay_given_up(kv: Path) -> None:
    flip_slot(kv, FIRST, 5, 5000)
    with opened(kv) as store:
        short = [delivered(store, number) for number in range(PROMPTS)]
    assert sum(short) < PROMPTS * BLOCKS
    result = checked(kv)
    assert result.is_well and result.totals()["given_up"] == 1
    assert Slot(result.slabs[0].slots[5]) is Slot.GIVEN_UP
    flip_slot(kv, FIRST, 5, 5000)  # it is as it was, and still not to be trusted
    flip_slot(kv, OTHER, slot_of_block(kv, OTHER, BLOCKS - 1), 5000)
    assert fsck.repair(kv).is_well
    after = checked(kv)
    assert after.is_well and after.totals()["given_up"] == 2 and Slot(after.slabs[0].slots[5]) is Slot.GIVEN_UP


# A disk that does not give what it holds ------------------------------------------------------------------------------


@pytest.fixture
def bad_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, int], bool]]:
    """Pages that the disk cannot read, and whether writing them mends them: (file, offset) -> mended."""
    pages: dict[tuple[str, int], bool] = {}
    really_read, really_write = os.preadv, os.pwritev

    def touched(descriptor: int, buffers: list[memoryview], offset: int) -> list[tuple[str, int]]:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        stop = offset + sum(len(buffer) for buffer in buffers)
        return [page for page in pages if page[0] == name and offset <= page[1] < stop]

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        if touched(descriptor, buffers, offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really_read(descriptor, buffers, offset)

    def pwritev(descriptor: int, buffers: list[Any], offset: int) -> int:
        for page in touched(descriptor, buffers, offset):
            if not pages[page]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            del pages[page]
        return really_write(descriptor, buffers, offset)

    monkeypatch.setattr("tiering.files.os.preadv", preadv)
    monkeypatch.setattr("tiering.files.os.pwritev", pwritev)
    yield pages


def test_sectors_that_cannot_be_read(kv: Path, bad_pages: dict[tuple[str, int], bool]) -> None:
    first, second = slab_header(kv, FIRST), slab_header(kv, SECOND)
    bad_pages[FIRST, first.offset(3)] = True  # a frame's header
    bad_pages[FIRST, first.offset(11) + 2 * PAGE_BYTES] = False  # a frame's payload
    bad_pages[SECOND, second.offset(17) + PAGE_BYTES] = False  # behind the header of an empty slot
    bad_pages[OTHER, 0] = True  # a slab's header
    bad_pages[slab_name(0), PAGE_BYTES] = True  # a page of the stamp
    result = checked(kv)
    assert said(result) == [
        ("stamp", slab_name(0), None),
        ("unreadable", FIRST, 3),
        ("unreadable", FIRST, 11),
        ("damaged_slab_header", OTHER, None),
    ]
    details = [problem.detail for problem in result.problems.listed]
    assert details[1].startswith("its header: Input/output") and details[2].startswith("its payload: Input/output")
    assert result.totals()["good"] == 46 and Slot(result.slabs[1].slots[17]) is Slot.EMPTY
    repaired = fsck.repair(kv)
    assert repaired.is_well and repaired.repair is not None
    assert (repaired.repair.emptied, repaired.repair.given_up, repaired.repair.headers_rewritten) == (1, 1, 1)
    after = checked(kv)
    assert after.is_well and after.totals()["good"] == 46 and after.totals()["given_up"] == 1


def test_a_sector_that_cannot_be_written_either_ends_a_repair_before_the_index_goes(
    kv: Path, bad_pages: dict[tuple[str, int], bool]
) -> None:
    bad_pages[FIRST, slab_header(kv, FIRST).offset(3)] = False
    index = data_of(kv).read_bytes()
    with refused(TierError, "slot 3", FIRST, "Input/output error", "sound disk"):
        fsck.repair(kv)
    assert data_of(kv).read_bytes() == index
    with opened(kv) as store:
        assert delivered(store, 0, OTHER_MODEL) == BLOCKS, "with its index it still serves the rest"


# Without keys ---------------------------------------------------------------------------------------------------------


def test_without_keys_digests_are_checked_and_nothing_is_repaired(kv: Path) -> None:
    flip_slot(kv, FIRST, 5, 5000)
    flip_slot(kv, FIRST, 6, 200)  # in the digests, which nobody vouches for
    (kv / "keys").rename(kv.parent / "keys")
    result = checked(kv)
    assert not result.is_well and not result.has_keys
    assert [slab.state for slab in result.slabs] == [SlabState.NEEDS_KEYS] * 3
    assert result.problems.counts == {"needs_keys": 3, "damaged_payload": 2} and result.totals()["good"] == 46
    text = "\n".join(rendered(result))
    assert "Without keys only digests can be checked" in text and f"Restore {kv}/keys from a backup" in text
    before = fingerprint(kv)
    with refused(KeysUnusable, f"{kv}/keys is missing", "restore it from a backup"):
        fsck.repair(kv)
    assert fingerprint(kv) == before
    (kv.parent / "keys").rename(kv / "keys")
    assert said(checked(kv)) == [("damaged_payload", FIRST, 5), ("damaged_header", FIRST, 6)]


def test_keys_of_another_directory(kv: Path) -> None:
    opened(kv.parent / "other").close()
    write_keys_text(kv, (kv.parent / "other" / "keys").read_text())
    result = checked(kv)
    assert result.has_keys and result.problems.counts == {"needs_keys": 3} and result.totals()["good"] == 48
    before = fingerprint(kv)
    with refused(KeysUnusable, f"{kv}/keys does not hold the keys of 3 slabs", "restore it"):
        fsck.repair(kv)
    assert fingerprint(kv) == before


def test_keys_that_cannot_be_used(kv: Path) -> None:
    write_keys_text(kv, "{")
    for verb in (fsck.check, fsck.repair):
        with pytest.raises(KeysUnusable, match="damaged"):
            verb(kv)


# What cannot be checked -----------------------------------------------------------------------------------------------


def test_what_is_no_stores_directory(kv: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare" / "nvme").mkdir(parents=True)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "nvme").write_text("no folder")
    cases = [
        (tmp_path / "none", ("does not exist",)),
        (tmp_path / "file", ("is a file",)),
        (tmp_path / "empty", ("has no nvme/", "give a store's directory")),
        (tmp_path / "bare", ("holds no slabs",)),
        (tmp_path / "odd", ("holds no slabs",)),
        (kv / "nvme", ("has no nvme/", f"give {kv}")),
    ]
    before = fingerprint(tmp_path)
    for path, words in cases:
        for verb in (fsck.check, fsck.repair):
            with refused(BadInput, str(path), *words):
                verb(path)
    assert fingerprint(tmp_path) == before


def test_another_format_is_refused(kv: Path) -> None:
    page = bytearray(StoreStamp(9, 3, bytes(16), 0, True).pack())
    page[8:12] = struct.pack("<I", 2)
    used = bytes(page[:53])
    write(kv, slab_name(0), PAGE_BYTES, used + digest(used))
    before = fingerprint(kv)
    for verb in (fsck.check, fsck.repair):
        with refused(BadInput, str(kv / "nvme"), "format 2", "knows format 1"):
            verb(kv)
    assert fingerprint(kv) == before


def test_a_directory_in_use(kv: Path) -> None:
    with opened(kv):
        for verb in (fsck.check, fsck.repair):
            with refused(DirectoryInUse, str(kv), f"process {os.getpid()}", "close that store"):
                verb(kv)
    assert checked(kv).is_well


def test_while_it_is_checked_nobody_opens_it(kv: Path) -> None:
    """And who is refused is told the process that checks, though the check has not written that down."""
    (kv / "lock").write_text("999999\n")
    seen = []

    def show(doing: str, done: int = 0, steps: int = 0) -> None:
        with pytest.raises(DirectoryInUse) as caught:
            opened(kv)
        seen.append(str(caught.value))

    fsck.check(kv, show)
    assert seen and all(f"process {os.getpid()}" in line for line in seen), seen
    opened(kv).close()


# Repairs --------------------------------------------------------------------------------------------------------------


def damaged_in_many_ways(kv: Path) -> set[tuple[str, int]]:
    """Damages of every sort; returns the slots whose frames are lost."""
    write_slot(kv, SECOND, 18, frame_at(kv, FIRST, 9))
    write_slot(kv, SECOND, 19, b"\x5a" * 4096)
    flip_slot(kv, FIRST, 19, 200)
    flip_slot(kv, SECOND, 13, 9000)
    write_slot(kv, SECOND, 14, bytes(4096))
    flip(kv, FIRST, 100)
    flip(kv, OTHER, (kv / "nvme" / OTHER).stat().st_size - PAGE_BYTES + 100)
    return {(FIRST, 19), (SECOND, 13), (SECOND, 14)}


def test_after_a_repair_a_store_finds_exactly_the_good_frames(kv: Path, tmp_path: Path) -> None:
    want = expected_prefixes(kv, {(FIRST, 19), (SECOND, 13), (SECOND, 14)})
    bad = damaged_in_many_ways(kv)
    assert checked(kv).totals()["good"] == 48 - len(bad)
    steps: list[str] = []
    repaired = fsck.repair(kv, lambda doing, done=0, total=0: steps.append(doing))
    assert repaired.repair is not None and repaired.is_well
    assert repaired.repair == (2, 3, 1, 45, [])
    assert "building the index" in steps
    after = checked(kv)
    assert after.is_well and after.totals()["good"] == 45 and after.totals()["given_up"] == 1
    again = fsck.repair(kv)
    assert again.repair == (0, 0, 0, 45, []) and again.is_well
    assert sum(want) < 48 and found_by_a_store(kv) == want
    with opened(kv) as store:
        for number in range(PROMPTS):
            put_prompt(namespace(store), number, BLOCKS, durability="disk")
    assert checked(kv).is_well and found_by_a_store(kv) == ALL, "and what was lost is filled again"


def test_after_a_repair_no_frame_waits_to_be_proved(dropped: Path) -> None:
    """Else each start would read every payload again."""
    flip_slot(dropped, FIRST, 19, 200)
    good = fsck.repair(dropped).totals()["good"]
    ring = KeyRing(KeyFile(dropped / "keys").by_name().values())
    files, maker = DirectFiles(dropped / "nvme"), LmdbMaker(dropped / "nvme" / "index")
    tier = NvmeTier(files, maker, ring, SlabSizes(4 << 20, 256 << 10), new_uid)
    found = list(tier.load())
    tier.close()
    assert sum(len(one.places) for one in found) == good > 0 and all(one.is_proven for one in found)


def test_nothing_to_repair_is_nothing_changed(kv: Path) -> None:
    before = fingerprint(kv / "nvme")
    repaired = fsck.repair(kv)
    assert repaired.is_well and repaired.repair == (0, 0, 0, 48, [])
    assert fingerprint(kv / "nvme") == before and "Nothing to repair." in "\n".join(rendered(repaired))


KILLED = """
import os, shutil, signal, sys, time
from pathlib import Path
from random import Random
from kvstore import fsck

stock, folder, seed, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

def repair(kv, last=None):
    points = []
    def reach(point):
        points.append(point)
        if len(points) == last:
            os.kill(os.getpid(), signal.SIGKILL)
    fsck.repair(kv, reach=reach)
    return points

start = time.monotonic()
points = repair(shutil.copytree(stock, folder / "whole"))
seconds = time.monotonic() - start
print(len(points), flush=True)
random = Random(seed)
chosen = [("point", at) for at in random.sample(range(1, len(points) + 1), min(count, len(points)))]
chosen += [("moment", random.uniform(0.3, 1) * seconds) for _ in range(count)]
for number, (sort, at) in enumerate(chosen):
    kv = shutil.copytree(stock, folder / f"killed-{number}")
    child = os.fork()
    if child == 0:
        try:
            repair(kv, at if sort == "point" else None)
        finally:
            os._exit(0)
    if sort == "moment":
        time.sleep(at)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert sort == "moment" or os.WTERMSIG(status) == signal.SIGKILL, status
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_repair_that_is_killed_leaves_a_directory_that_opens(dropped: Path, tmp_path: Path, seed: int) -> None:
    flip_slot(dropped, FIRST, slot_of_block(dropped, FIRST, BLOCKS - 1), 5000)
    flip(dropped, FIRST, 100)
    want = [BLOCKS - 1, BLOCKS, BLOCKS, 0]
    folder = tmp_path / "copies"
    folder.mkdir()
    points = run_python(KILLED, dropped, folder, seed, 4)
    print(f"seed {seed}; points of one repair: {points}")
    assert int(points) >= 4
    copies = sorted(folder.iterdir())
    assert len(copies) == 1 + 2 * 4
    for number, copy in enumerate(copies):
        if number % 2:  # one half is repaired once more, the other one is opened as it is
            assert fsck.repair(copy).is_well and checked(copy).is_well, copy.name
        assert found_by_a_store(copy) == want, copy.name
