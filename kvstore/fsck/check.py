"""Checks a store's directory offline, and repairs it.

A check writes nothing. A repair needs the keys and follows this order, so that a start after an interrupted repair
finds the old index or rebuilds it from headers, and never brings back an evicted frame:

    1  where one copy of a slab header is damaged, rewrite it from the other
    2  overwrite with zeros the frame headers that are damaged, in doubt, or contradict a trusted index; sync
    3  discard the index, and have the tier rebuild it from the headers
    4  quarantine frames that the rebuild finds and the check did not find good: neither they nor their slots are used

Step 2 uses the old index while it still exists, which is why evicted frames stay gone. A slab without a header that
verifies is never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvstore.block.display_names import read_names
from kvstore.block.errors import BadInput, DirectoryInUse, KeysUnusable
from kvstore.block.identity import KeyRing
from kvstore.block.key_file import KeyFile
from kvstore.fsck.frames import Examiner, ShowProgress
from kvstore.fsck.headers import IndexView, look_at_index, look_at_slabs, look_at_stamp
from kvstore.fsck.result import (
    DIGEST_PREFIX,
    FsckResult,
    IndexState,
    Problems,
    RepairResult,
    Seen,
    SlabResult,
    SlabState,
    Slot,
)
from kvstore.keys.store_keys import ring_of
from kvstore.node import SystemClock, new_uid
from tiering.clock import Clock
from tiering.errors import TierUnavailable
from tiering.failpoint import Reach, go_on
from tiering.files import DirectoryLock, ReadingLock, names_in
from tiering.nvme.lmdb_index import LmdbMaker, open_to_read
from tiering.nvme.slab import STAMP_PAGES, STAMP_SLAB, OtherFormat, slab_name
from tiering.nvme.slab_files import DirectFiles, Files, ReadOnlyFiles
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import PAGE_BYTES, SlabSizes
from tiering.tier import extent_of, slot_of

_ZERO_PAGE = memoryview(bytes(PAGE_BYTES))
Lock = TypeVar("Lock", ReadingLock, DirectoryLock)


def quiet(doing: str, done: int = 0, steps: int = 0) -> None:
    """Reports no progress."""


def check(
    directory: str | Path, show: ShowProgress = quiet, clock: Clock | None = None, pool: str | None = None
) -> FsckResult:
    """Verify every frame of a store's directory that is not in use. Writes nothing. pool: directory of the tenants'
    keys, if they are a pool's.

    Raises `BadInput` if it is not a store's directory, `DirectoryInUse`, and `KeysUnusable` for a damaged key file.
    """
    path = _store_directory(directory)
    lock = _locked(ReadingLock, path)
    try:
        return _examined(path, _StoredKeys(path, pool), show, clock or SystemClock())
    finally:
        lock.release()


def repair(
    directory: str | Path,
    show: ShowProgress = quiet,
    clock: Clock | None = None,
    reach: Reach = go_on,
    pool: str | None = None,
) -> FsckResult:
    """`check`, then repair as described above. Raises as `check` does, and `KeysUnusable` if keys are missing: without
    them nothing is written. reach: called at failpoints. pool: as for `check`."""
    path = _store_directory(directory)
    reading = _locked(ReadingLock, path)
    try:
        _refuse_without_keys(path, _StoredKeys(path, pool))
    finally:
        reading.release()
    lock = _locked(DirectoryLock, path)
    try:
        keys = _StoredKeys(path, pool)
        found = _examined(path, keys, show, clock or SystemClock())
        _refuse_without_keys(path, keys)
        found.repair = _mended(path, keys.ring, found, show, reach)
        return found
    finally:
        lock.release()


# Looking --------------------------------------------------------------------------------------------------------------


def _store_directory(directory: str | Path) -> Path:
    path = Path(directory)
    try:
        names = names_in(path)
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; give a store's directory") from None
    except NotADirectoryError:
        raise BadInput(f"{path} is a file; give a store's directory") from None
    if "nvme" not in names:
        hint = f"give {path.absolute().parent}" if path.absolute().name == "nvme" else "give a store's directory"
        raise BadInput(f"{path} has no nvme/, so a store has nothing on disk there; {hint}")
    try:
        slabs = ReadOnlyFiles(path / "nvme").sizes()
    except NotADirectoryError:
        slabs = {}
    if not slabs:
        raise BadInput(f"{path / 'nvme'} holds no slabs, so it is not a store's; give a store's directory")
    return path


def _locked(lock: type[Lock], path: Path) -> Lock:
    try:
        return lock(path)
    except BlockingIOError as error:
        raise DirectoryInUse(f"{path} is in use by process {error}; close that store first") from None


class _StoredKeys:
    """A directory's own keys and its pool's. Reads only."""

    def __init__(self, path: Path, pool: str | None) -> None:
        own = KeyFile(path / "keys")
        self.is_there = own.is_there
        self.ring, self.names = ring_of(own, pool)


def _refuse_without_keys(path: Path, keys: _StoredKeys) -> None:
    files = ReadOnlyFiles(path / "nvme")
    try:
        look_at_stamp(files)
        needy = [slab for slab in look_at_slabs(files, keys.ring) if slab.state is SlabState.NEEDS_KEYS]
    except OtherFormat as error:
        raise _other_format(path, error) from None
    finally:
        files.close()
    if needy or not keys.is_there:
        what = f"does not hold the keys of {len(needy)} slabs" if keys.is_there else "is missing"
        raise KeysUnusable(
            f"{path / 'keys'} {what}, so nothing can be verified and nothing is repaired; restore it from a backup, or "
            "give --keys, where these are a pool's"
        )


def _other_format(path: Path, error: OtherFormat) -> BadInput:
    return BadInput(f"{path / 'nvme'} was written in {error}; use the version that wrote it")


def _examined(path: Path, keys: _StoredKeys, show: ShowProgress, clock: Clock) -> FsckResult:
    start = clock.monotonic_seconds()
    ring = keys.ring
    files, index, problems = ReadOnlyFiles(path / "nvme"), None, Problems()
    try:
        show("looking at the slabs")
        stamp, stamp_result = look_at_stamp(files)
        for fault in stamp_result.faults:
            problems.add("stamp", fault, slab_name(STAMP_SLAB))
        slabs = look_at_slabs(files, ring)
        show("looking at the index")
        index, state, detail = look_at_index(lambda: open_to_read(path / "nvme" / "index"), stamp)
        if state is not IndexState.GOOD and slabs:
            problems.add("index", f"{state.value}: {detail}; the next start reads every header")
        view = IndexView(index) if index is not None else None
        examiner = Examiner(files, ring, view, problems, show)
        reading = clock.monotonic_seconds()
        examiner.examine(slabs)
    except OtherFormat as error:
        raise _other_format(path, error) from None
    finally:
        if index is not None:
            index.close()
        files.close()
    end = clock.monotonic_seconds()
    return FsckResult(
        str(path),
        keys.is_there,
        stamp_result,
        state,
        detail,
        slabs,
        problems,
        examiner.checked_bytes,
        end - start,
        end - reading,
        tenant_names={tenant.hex()[:DIGEST_PREFIX]: name for tenant, name in keys.names.items()},
        model_names={
            (tenant[:DIGEST_PREFIX], digest[:DIGEST_PREFIX]): name
            for tenant, names in read_names(path / "names").items()
            for digest, name in names.items()
        },
    )


# Mending --------------------------------------------------------------------------------------------------------------


def _mended(path: Path, ring: KeyRing, found: FsckResult, show: ShowProgress, reach: Reach) -> RepairResult:
    left = [
        f"{slab.name} ({slab.detail}); move it away to have its space back"
        for slab in found.slabs
        if slab.state is SlabState.UNUSABLE
    ]
    if found.problems.total == len(left):
        return RepairResult(0, 0, 0, found.totals()["good"], left)
    files = DirectFiles(path / "nvme", reach)
    try:
        show("writing slab headers")
        rewritten = _write_headers(files, found.slabs)
        reach("fsck headers written")
        emptied = _empty(files, found.slabs, lambda slab: show(f"emptying slots of {slab}"))
        _clear_stamp(files)
    finally:
        files.close()
    reach("fsck slots emptied")
    maker = LmdbMaker(path / "nvme" / "index", reach)
    maker.discard()
    reach("fsck index discarded")
    frames, given_up = _build_index(path, ring, maker, found, show, reach)
    if frames != found.totals()["good"]:
        left.append(f"{found.totals()['good'] - frames} good frames were not found again; check once more")
    return RepairResult(rewritten, emptied, given_up, frames, left)


def _write_headers(files: Files, slabs: list[SlabResult]) -> int:
    written = 0
    for slab in slabs:
        for offset in slab.bad_offsets:
            try:
                files.write(slab.name, offset, memoryview(slab.good_page))
                files.sync(slab.name)
            except OSError as error:
                raise TierUnavailable(f"a header of {slab.name} cannot be written: {error.strerror}") from error
            written += 1
    return written


def _empty(files: Files, slabs: list[SlabResult], show: Callable[[str], None]) -> int:
    """Zero the frame headers that a rebuild must not find, and unreadable ones. Durable on return."""
    emptied = 0
    for slab in slabs:
        assert slab.header is not None or not slab.slots
        slots = [slot for slot in range(len(slab.slots)) if _is_to_be_empty(slab.seen[slot], slab.slots[slot])]
        if slots and slab.header is not None:
            show(slab.name)
            for slot in slots:
                try:
                    files.write(slab.name, slab.header.offset(slot), _ZERO_PAGE)
                    files.read(slab.name, slab.header.offset(slot), memoryview(bytearray(PAGE_BYTES)))
                except OSError as error:
                    raise TierUnavailable(
                        f"slot {slot} of {slab.name} cannot be emptied ({error.strerror}); "
                        "move that slab away, or the directory to a sound disk, and run --repair again"
                    ) from error
            files.sync(slab.name)
        emptied += len(slots)
    return emptied


def _is_to_be_empty(seen: int, slot: int) -> bool:
    if seen in (Seen.DAMAGED_HEADER, Seen.UNREADABLE_HEADER):
        return True
    return seen != Seen.EMPTY and slot in (Slot.IN_DOUBT, Slot.OTHER_FRAME, Slot.UNNAMED)


def _clear_stamp(files: Files) -> None:
    """Remove a stamp of wrong length and zero its unreadable pages: either would keep the tier from opening."""
    name = slab_name(STAMP_SLAB)
    size = files.sizes().get(name)
    if size is None:
        return
    if size != STAMP_PAGES * PAGE_BYTES:
        files.remove(name)
        return
    for number in range(STAMP_PAGES):
        try:
            files.read(name, number * PAGE_BYTES, memoryview(bytearray(PAGE_BYTES)))
        except OSError:
            files.write(name, number * PAGE_BYTES, _ZERO_PAGE)
            files.sync(name)


def _build_index(
    path: Path, ring: KeyRing, maker: LmdbMaker, found: FsckResult, show: ShowProgress, reach: Reach
) -> tuple[int, int]:
    slots = {slab.header.number: slab.slots for slab in found.slabs if slab.header is not None}
    size = sum(slab.size_bytes for slab in found.slabs)
    tier = NvmeTier(DirectFiles(path / "nvme", reach), maker, ring, SlabSizes(size, size), new_uid)
    frames = given_up = 0
    try:
        for one in tier.load(lambda done, total: show("building the index", done, total)):
            bad = [int(place) for place in one.places if slots[extent_of(place)][slot_of(place)] != Slot.GOOD]
            tier.quarantine(bad)
            frames += len(one.places) - len(bad)
            given_up += len(bad)
        reach("fsck frames given up")
        tier.settle()
        tier.proved(slots)
    finally:
        tier.close()
    return frames, given_up
