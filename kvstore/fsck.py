"""`kvstore fsck`: verifies a store's directory that no process uses, and repairs it.

A check judges stamp, slab headers, index and slots by the functions that a start uses (`tiering/nvme/`: session,
slab_recovery, index_records, slab_scan), reads every payload besides, and writes nothing. A repair needs the keys and
follows this order, so that a start after an interrupted repair finds the old index or rebuilds it from headers, and
never brings back an evicted frame:

    1  where one copy of a slab header is damaged, rewrite it from the other
    2  overwrite with zeros the frame headers that are damaged, in doubt, or contradict a trusted index; sync
    3  discard the index, and have the tier rebuild it from the headers
    4  quarantine frames that the rebuild finds and the check did not find good: neither they nor their slots are used

Step 2 uses the old index while it still exists, which is why evicted frames stay gone. A slab without a header that
verifies is never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from kvstore.block.display_names import read_names
from kvstore.block.errors import BadInput, KeysUnusable
from kvstore.block.identity import KeyRing
from kvstore.block.key_file import KeyFile
from kvstore.config import format_size
from kvstore.keys.store_keys import locked, ring_of
from kvstore.node import new_uid
from tiering.clock import SystemClock
from tiering.errors import BlockCorrupt, TierUnavailable
from tiering.failpoint import Reach, go_on
from tiering.files import DirectoryLock, ReadingLock, names_in
from tiering.nvme.frame_index import FrameIndex
from tiering.nvme.index_records import IndexReader, IndexState, SlabEntries, known_index
from tiering.nvme.lmdb_index import LmdbMaker, open_to_read
from tiering.nvme.slab import (
    ENTRY,
    SLOTS_PER_RECORD,
    STAMP_PAGES,
    STAMP_SLAB,
    UNREAD,
    OtherFormat,
    StoreStamp,
    latest_stamp,
    slab_name,
    slab_number,
    split_entries,
)
from tiering.nvme.slab_files import DirectFiles, Files, ReadOnlyFiles, read_page
from tiering.nvme.slab_recovery import header_copies, never_held_frames, slot_states
from tiering.nvme.slab_scan import Seen, SlabScan, SlotFound
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import FORMAT_VERSION, PAGE_BYTES, SlabHeader, SlabSizes
from tiering.slots import FrameState
from tiering.tier import extent_of, slot_of

READERS = 2
STEP_BYTES = 64 << 20
"""Frames of so many bytes are read between two reports of progress."""
LISTED_PROBLEMS = 20
SHOWN_SLABS = 20
DIGEST_PREFIX = 12
"""Hexadecimal digits shown of a tenant's or namespace's digest: enough to tell them apart."""

ShowProgress = Callable[..., None]
"""Called with what is being done and, where known, steps done of how many."""

_ZERO_PAGE = memoryview(bytes(PAGE_BYTES))


def quiet(doing: str, done: int = 0, steps: int = 0) -> None:
    """Reports no progress."""


def check(directory: str | Path, show: ShowProgress = quiet, pool: str | None = None) -> FsckResult:
    """Verify every frame of a store's directory that is not in use. Writes nothing. pool: directory of the tenants'
    keys, if they are a pool's.

    Raises `BadInput` if it is not a store's directory, `DirectoryInUse`, and `KeysUnusable` for a damaged key file.
    """
    path = _store_directory(directory)
    with locked(ReadingLock, path):
        return _examined(path, _StoredKeys(path, pool), show)


def repair(
    directory: str | Path, show: ShowProgress = quiet, reach: Reach = go_on, pool: str | None = None
) -> FsckResult:
    """`check`, then repair as described above. Raises as `check` does, and `KeysUnusable` if keys are missing: without
    them nothing is written. reach: called at failpoints. pool: as for `check`."""
    path = _store_directory(directory)
    with locked(ReadingLock, path), _slabs_of(path) as files:
        keys = _StoredKeys(path, pool)
        _look_at_stamp(files)
        _refuse_without_keys(path, keys, _look_at_slabs(files, keys.ring))
    with locked(DirectoryLock, path):
        keys = _StoredKeys(path, pool)
        found = _examined(path, keys, show)
        _refuse_without_keys(path, keys, found.slabs)
        found.repair = _mended(path, keys.ring, found, show, reach)
        return found


# The directory --------------------------------------------------------------------------------------------------------


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


@contextmanager
def _slabs_of(path: Path) -> Iterator[Files]:
    """The slabs, to be read only. `OtherFormat` is the user's to mend."""
    files = ReadOnlyFiles(path / "nvme")
    try:
        yield files
    except OtherFormat as error:
        raise BadInput(f"{path / 'nvme'} was written in {error}; use the version that wrote it") from None
    finally:
        files.close()


class _StoredKeys:
    """A directory's own keys and its pool's. Reads only."""

    def __init__(self, path: Path, pool: str | None) -> None:
        own = KeyFile(path / "keys")
        self.is_there = own.is_there
        self.ring, self.names = ring_of(own, pool)


def _refuse_without_keys(path: Path, keys: _StoredKeys, slabs: Sequence[SlabResult]) -> None:
    needy = [slab for slab in slabs if slab.state is SlabState.NEEDS_KEYS]
    if needy or not keys.is_there:
        what = f"does not hold the keys of {len(needy)} slabs" if keys.is_there else "is missing"
        raise KeysUnusable(
            f"{path / 'keys'} {what}, so nothing can be verified and nothing is repaired; restore it from a backup, or "
            "give --keys, where these are a pool's"
        )


# Looking --------------------------------------------------------------------------------------------------------------


def _examined(path: Path, keys: _StoredKeys, show: ShowProgress) -> FsckResult:
    clock = SystemClock()
    start = clock.monotonic_seconds()
    found = FsckResult(str(path), keys.is_there)
    with _slabs_of(path) as files:
        show("looking at the slabs")
        stamp, found.stamp = _look_at_stamp(files)
        for fault in found.stamp.faults:
            found.problems.add("stamp", fault, slab_name(STAMP_SLAB))
        found.slabs = _look_at_slabs(files, keys.ring)
        show("looking at the index")
        known = known_index(lambda: open_to_read(path / "nvme" / "index"), stamp)
        found.index, found.index_detail = known.state, known.detail
        try:
            if known.opened is None and found.slabs:
                fault = f"{known.state.value}: {known.detail}; the next start reads every header"
                found.problems.add("index", fault)
            reading = clock.monotonic_seconds()
            _Examiner(files, keys.ring, known.opened, found, show).examine()
        finally:
            if known.opened is not None:
                known.opened.close()
    end = clock.monotonic_seconds()
    found.seconds, found.read_seconds = end - start, end - reading
    found.tenant_names = {tenant.hex()[:DIGEST_PREFIX]: name for tenant, name in keys.names.items()}
    found.model_names = {
        (tenant[:DIGEST_PREFIX], digest[:DIGEST_PREFIX]): name
        for tenant, names in read_names(path / "names").items()
        for digest, name in names.items()
    }
    return found


def _look_at_stamp(files: Files) -> tuple[StoreStamp | None, StampResult]:
    """The newest stamp, and faults of its file. Raises `OtherFormat`."""
    name = slab_name(STAMP_SLAB)
    size = files.sizes().get(name)
    if size is None:
        return None, StampResult(None, None, ["the stamp is missing"])
    if size != STAMP_PAGES * PAGE_BYTES:
        return None, StampResult(None, None, [f"the stamp has {size} bytes instead of {STAMP_PAGES * PAGE_BYTES}"])
    pages, faults = [], []
    for number in range(STAMP_PAGES):
        try:
            pages.append(read_page(files, name, number * PAGE_BYTES))
        except OSError as error:
            faults.append(f"page {number} of the stamp cannot be read: {error.strerror}")
            pages.append(b"\xff" * PAGE_BYTES)
    last = latest_stamp(pages)
    if last is None:
        return None, StampResult(None, None, faults or ["neither page of the stamp is whole"])
    other = pages[1 - last.page]
    is_first = last.sequence == 1 and not other.strip(b"\x00")
    if not faults and not is_first and latest_stamp(pages, besides=last) is None:
        faults.append(f"page {1 - last.page} of the stamp is damaged; the other one counts")
    return last, StampResult(last.session, last.clean, faults)


def _look_at_slabs(files: Files, keys: KeyRing) -> list[SlabResult]:
    """Every slab but the stamp, judged by its two header pages; ordered by name."""
    stamp = slab_name(STAMP_SLAB)
    return [_look_at_slab(files, keys, name, size) for name, size in sorted(files.sizes().items()) if name != stamp]


def _look_at_slab(files: Files, keys: KeyRing, name: str, size: int) -> SlabResult:
    try:
        copies = list(header_copies(files, keys, name, size))
    except BlockCorrupt as error:
        return SlabResult(name, size, SlabState.UNUSABLE, str(error))
    good = next((copy for copy in copies if copy.fault is None), None)
    bad = [copy for copy in copies if good is None or copy.page != good.page]
    detail = "; ".join(f"the {'last' if copy.offset else 'first'} header: {_words(copy.fault)}" for copy in bad)
    if good is not None:
        state = SlabState.ONE_HEADER if bad else SlabState.GOOD
        return SlabResult(name, size, state, detail, good.header, good.page, tuple(copy.offset for copy in bad))
    told = next((copy for copy in copies if copy.header is not None), None)
    if told is not None:
        return SlabResult(name, size, SlabState.NEEDS_KEYS, str(told.fault), told.header)
    with suppress(OSError):
        if never_held_frames(files, name, size, [copy.fault for copy in copies if copy.fault is not None]):
            return SlabResult(name, size, SlabState.UNFINISHED, "it has no header and never held a frame")
    return SlabResult(name, size, SlabState.UNUSABLE, detail)


def _words(fault: Exception | None) -> str:
    if isinstance(fault, OSError):
        return f"cannot be read: {fault.strerror}"
    return str(fault or "not the same")


class _Examiner:
    """Reads the frames of slabs, and compares each slot with the index. index: a trusted one, or None."""

    def __init__(
        self, files: Files, keys: KeyRing, index: FrameIndex | None, found: FsckResult, show: ShowProgress
    ) -> None:
        self._files = files
        self._keys = keys
        self._index = IndexReader(index) if index is not None else None
        self._found = found
        self._show = show

    def examine(self) -> None:
        """Read every frame; fills in each slab's `slots` and `to_empty`. Called once."""
        slabs, problems = self._found.slabs, self._found.problems
        doubts = self._index.doubts() if self._index is not None else {}
        for slab in slabs:
            before = self._found.checked_bytes
            if slab.state in _SLAB_PROBLEMS:
                what, detail = _SLAB_PROBLEMS[slab.state]
                problems.add(what, detail or slab.detail, slab.name)
            if slab.header is not None:
                frames = self._frames(slab, slab.header)
                self._judge(slab, slab.header, frames, doubts.get(slab.header.number, []))
            self._found.checked_bytes = before + slab.size_bytes
        there = {slab_number(slab.name) for slab in slabs}
        for number in sorted(self._index.slabs() - there) if self._index is not None else ():
            problems.add("missing_slab", "the index names frames in it, and the file is not there", slab_name(number))

    def _frames(self, slab: SlabResult, header: SlabHeader) -> list[SlotFound]:
        scan = SlabScan(self._files, None if slab.state is SlabState.NEEDS_KEYS else self._keys, READERS)
        total, frame_bytes = sum(one.size_bytes for one in self._found.slabs), header.slot_class.frame_bytes
        step = max(1, STEP_BYTES // frame_bytes)
        frames: list[SlotFound] = []
        for first in range(0, header.slots, step):
            slots = range(first, min(first + step, header.slots))
            frames += scan.frames(slab.name, header, slots)
            self._found.checked_bytes += len(slots) * frame_bytes
            self._show(f"checking {slab.name}", self._found.checked_bytes, total)
        return frames

    def _judge(self, slab: SlabResult, header: SlabHeader, frames: list[SlotFound], doubts: list[int]) -> None:
        entries, damaged, faults = self._entries(header, frames)
        for fault in faults:
            self._found.problems.add("index_record", fault, slab.name)
        states, packed = slot_states(entries, doubts, damaged), entries.tobytes()
        slab.slots = bytearray(header.slots)
        for slot, frame in enumerate(frames):
            entry = packed[slot * ENTRY.itemsize : (slot + 1) * ENTRY.itemsize]
            verdict = slab.slots[slot] = _verdict(frame, states[slot], entry)
            if _is_to_be_empty(frame.seen, verdict):
                slab.to_empty.append(slot)
            if verdict > Slot.GIVEN_UP:
                self._found.problems.add(verdict.name.lower(), _DETAIL.get(verdict, frame.detail), slab.name, slot)

    def _entries(self, header: SlabHeader, frames: list[SlotFound]) -> SlabEntries:
        """As a start has them: by the index, or by headers where there is none to trust."""

        def by_headers(slots: range) -> bytes:
            return b"".join(frame.entry for frame in frames[slots.start : slots.stop])

        mac_key = self._keys.slab_key(header.slot_class.tenant, header.key_id, header.epoch)
        if self._index is not None and mac_key is not None and not self._index.marked(UNREAD, [header.number]):
            return self._index.slab_entries(header, mac_key, by_headers)
        # No record counts without the key; a slab that the index has not read yet is read as without an index.
        damaged = set(range(-(-header.slots // SLOTS_PER_RECORD))) if mac_key is None else set()
        return SlabEntries(split_entries(by_headers(range(header.slots))), damaged, [])


def _verdict(frame: SlotFound, state: int, entry: bytes) -> Slot:
    """Classify a slot: its contents against the state and the entry that a start gives it."""
    if state == FrameState.QUARANTINED:
        return Slot.GIVEN_UP
    if frame.seen is Seen.UNREADABLE_HEADER:
        return Slot.UNREADABLE
    if state == FrameState.RESERVED:
        return Slot.IN_DOUBT
    if frame.seen in _DAMAGE:
        return _DAMAGE[frame.seen]
    if frame.seen is Seen.EMPTY:
        return Slot.MISSING if state == FrameState.RESIDENT else Slot.EMPTY
    if state != FrameState.RESIDENT:
        return Slot.UNNAMED
    return Slot.GOOD if frame.entry == entry else Slot.OTHER_FRAME


def _is_to_be_empty(seen: Seen, verdict: Slot) -> bool:
    """Whether a rebuild must not find the slot's header."""
    if seen in (Seen.DAMAGED_HEADER, Seen.UNREADABLE_HEADER):
        return True
    return seen is not Seen.EMPTY and verdict in (Slot.IN_DOUBT, Slot.OTHER_FRAME, Slot.UNNAMED)


# Mending --------------------------------------------------------------------------------------------------------------


def _mended(path: Path, ring: KeyRing, found: FsckResult, show: ShowProgress, reach: Reach) -> RepairResult:
    left = [
        f"{slab.name} ({slab.detail}); move it away to have its space back"
        for slab in found.slabs
        if slab.state is SlabState.UNUSABLE
    ]
    good = found.totals()["good"]
    if found.problems.total == len(left):
        return RepairResult(0, 0, 0, good, left)
    files = DirectFiles(path / "nvme", reach)
    try:
        show("writing slab headers")
        rewritten = _write_headers(files, found.slabs)
        reach("fsck headers written")
        emptied = _empty(files, found.slabs, show)
        _clear_stamp(files)
    finally:
        files.close()
    reach("fsck slots emptied")
    maker = LmdbMaker(path / "nvme" / "index", reach)
    maker.discard()
    reach("fsck index discarded")
    frames, given_up = _build_index(path, ring, maker, found, show, reach)
    if frames != good:
        left.append(f"{good - frames} good frames were not found again; check once more")
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


def _empty(files: Files, slabs: list[SlabResult], show: ShowProgress) -> int:
    """Zero the frame headers that a rebuild must not find, and unreadable ones. Durable on return."""
    emptied = 0
    for slab in slabs:
        if slab.to_empty:
            assert slab.header is not None
            show(f"emptying slots of {slab.name}")
            for slot in slab.to_empty:
                try:
                    files.write(slab.name, slab.header.offset(slot), _ZERO_PAGE)
                    read_page(files, slab.name, slab.header.offset(slot))
                except OSError as error:
                    raise TierUnavailable(
                        f"slot {slot} of {slab.name} cannot be emptied ({error.strerror}); "
                        "move that slab away, or the directory to a sound disk, and run --repair again"
                    ) from error
            files.sync(slab.name)
        emptied += len(slab.to_empty)
    return emptied


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
            read_page(files, name, number * PAGE_BYTES)
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


# The result: one object, as JSON and as text for people. Tenants and namespaces appear as prefixes of their opaque
# digests; keys and contents are never shown --------------------------------------------------------------------------


class Slot(IntEnum):
    """Classification of a slot; each has exactly one. The first four are in order, the others damaged."""

    EMPTY = 0
    GOOD = 1  # header MAC, slot class and all payload digests are right, and the index lists it
    IN_DOUBT = 2  # was being written or evicted when the store ended; the next start empties it
    GIVEN_UP = 3  # quarantined: failed a check before; neither it nor its slot is used
    DAMAGED_HEADER = 4  # neither zeros nor a header that verifies
    DAMAGED_PAYLOAD = 5  # the header verifies, the payload does not match it
    UNREADABLE = 6  # the disk returns an error
    MISSING = 7  # the index lists a frame, and the slot is empty
    OTHER_FRAME = 8  # the index lists another frame than the slot contains
    UNNAMED = 9  # a good frame that the index does not list


DAMAGED = tuple(slot for slot in Slot if slot > Slot.GIVEN_UP)

_DAMAGE: dict[int, Slot] = {
    Seen.DAMAGED_HEADER: Slot.DAMAGED_HEADER,
    Seen.DAMAGED_PAYLOAD: Slot.DAMAGED_PAYLOAD,
    Seen.UNREADABLE_PAYLOAD: Slot.UNREADABLE,
}
_DETAIL: dict[int, str] = {
    Slot.MISSING: "the index names a frame, and the slot is empty",
    Slot.OTHER_FRAME: "the index names another block or generation",
    Slot.UNNAMED: "the index does not name this frame",
}


class SlabState(Enum):
    """State of a slab's headers."""

    GOOD = "good"
    ONE_HEADER = "one_header"  # one of the two copies is damaged
    UNUSABLE = "unusable"  # neither copy is usable, or it is not a slab of this directory: starts never touch it
    NEEDS_KEYS = "needs_keys"  # written under keys that are missing: digests are checked, MACs cannot be
    UNFINISHED = "unfinished"  # no header, and it never held a frame: the next start removes it


_SLAB_PROBLEMS = {
    SlabState.ONE_HEADER: ("damaged_slab_header", ""),
    SlabState.UNUSABLE: ("unusable_slab", ""),
    SlabState.NEEDS_KEYS: ("needs_keys", "it was written under keys that are not at hand"),
}


class Problem(NamedTuple):
    """slab: the file's name, empty for the directory; slot: None for all of it."""

    what: str
    slab: str
    slot: int | None
    detail: str


@dataclass
class Problems:
    """Counts all problems, and keeps the first ones in full."""

    listed: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, detail: str, slab: str = "", slot: int | None = None) -> None:
        self.counts[what] += 1
        if len(self.listed) < LISTED_PROBLEMS:
            self.listed.append(Problem(what, slab, slot, detail))

    @property
    def total(self) -> int:
        return self.counts.total()


@dataclass
class SlabResult:
    """good_page: the correct header; bad_offsets: copies that have to be rewritten.

    slots: a byte for each slot, a `Slot`; empty if the slots are unknown. to_empty: slots whose header a repair zeroes.
    """

    name: str
    size_bytes: int
    state: SlabState
    detail: str = ""
    header: SlabHeader | None = None
    good_page: bytes = b""
    bad_offsets: tuple[int, ...] = ()
    slots: bytearray = field(default_factory=bytearray)
    to_empty: list[int] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        return _sum([self])

    @property
    def owner(self) -> tuple[str, str]:
        """Prefixes of the tenant's and the namespace's digests."""
        if self.header is None:
            return "", ""
        owner = self.header.slot_class
        return owner.tenant.hex()[:DIGEST_PREFIX], owner.namespace.hex()[:DIGEST_PREFIX]

    @property
    def is_damaged(self) -> bool:
        in_order = self.state in (SlabState.GOOD, SlabState.UNFINISHED)
        return not in_order or any(self.slots.count(slot) for slot in DAMAGED)

    def to_dict(self) -> dict[str, object]:
        tenant, namespace = self.owner
        owner = self.header.slot_class if self.header is not None else None
        return {
            "slab": self.name,
            "bytes": self.size_bytes,
            "state": self.state.value,
            "detail": self.detail,
            "tenant": tenant or None,
            "namespace": namespace or None,
            "part": owner.part if owner is not None else None,
            "frame_bytes": owner.frame_bytes if owner is not None else None,
            "slots": len(self.slots),
            **self.counts,
        }


class StampResult(NamedTuple):
    """How the directory was left. session and clean: None without a readable stamp. faults: of its file."""

    session: int | None
    clean: bool | None
    faults: list[str]


class RepairResult(NamedTuple):
    """left: what a repair must not or cannot mend, one line each."""

    headers_rewritten: int
    emptied: int
    given_up: int
    frames: int
    left: list[str]


@dataclass
class FsckResult:
    """The result of a check, filled in as it goes on, and of the repair if there was one.

    seconds: of the whole check. read_seconds: of reading `checked_bytes`. tenant_names: of tenants whose keys are here,
    by digest prefix; model_names: the engines' names of models, by tenant and namespace.
    """

    directory: str
    has_keys: bool
    stamp: StampResult = field(default_factory=lambda: StampResult(None, None, []))
    index: IndexState = IndexState.MISSING
    index_detail: str = ""
    slabs: list[SlabResult] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    checked_bytes: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0
    repair: RepairResult | None = None
    tenant_names: Mapping[str, str] = field(default_factory=dict)
    model_names: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether nothing is damaged, or a repair left nothing damaged."""
        return not self.problems.total if self.repair is None else not self.repair.left

    @property
    def gb_per_second(self) -> float:
        return self.checked_bytes / self.read_seconds / 1e9 if self.read_seconds else 0.0

    def totals(self) -> dict[str, int]:
        return _sum(self.slabs)

    def namespaces(self) -> Iterator[tuple[dict[str, Any], list[SlabResult]]]:
        """What there is of each namespace, and its slabs."""
        groups: dict[tuple[str, str], list[SlabResult]] = {}
        for slab in self.slabs:
            if slab.header is not None:
                groups.setdefault(slab.owner, []).append(slab)
        for (tenant, namespace), slabs in groups.items():
            facts = {"tenant": tenant, "namespace": namespace, "slabs": len(slabs), **_sum(slabs)}
            facts["tenant_name"] = self.tenant_names.get(tenant)
            facts["name"] = self.model_names.get((tenant, namespace))
            yield facts, slabs

    def to_dict(self) -> dict[str, object]:
        return {
            "directory": self.directory,
            "ok": self.is_well,
            "format": FORMAT_VERSION,
            "keys": self.has_keys,
            "stamp": self.stamp._asdict(),
            "index": {"state": self.index.value, "detail": self.index_detail},
            "slabs": [slab.to_dict() for slab in self.slabs],
            "totals": self.totals(),
            "namespaces": [facts for facts, _ in self.namespaces()],
            "problems": self.problems.total,
            "problems_by_kind": dict(self.problems.counts),
            "first_problems": [{**one._asdict(), "slab": one.slab or None} for one in self.problems.listed],
            "checked_bytes": self.checked_bytes,
            "seconds": self.seconds,
            "gb_per_second": self.gb_per_second,
            "repair": self.repair._asdict() if self.repair is not None else None,
        }

    # For people ------------------------------------------------------------------------------------------------------

    def render(self, console: Any) -> None:
        for part in (*self._facts(), *self._tables(), *self._listed_problems(), *self._verdict()):
            console.print(Text(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))

    def _facts(self) -> Iterator[str]:
        ended = {True: "closed in order", False: "not closed in order", None: "not known"}[self.stamp.clean]
        session = "unknown session" if self.stamp.session is None else f"session {self.stamp.session}"
        index = f"index {self.index.value} ({self.index_detail})"
        yield f"{self.directory}: format {FORMAT_VERSION}, {session}, {ended}; {index}"
        if not self._all_keys:
            yield "Without keys only digests can be checked: who wrote the headers is not known."
        if self.totals()["in_doubt"]:
            yield "Slots in doubt are no damage: the next start empties them."

    def _tables(self) -> Iterator[Table]:
        room = SHOWN_SLABS
        for facts, slabs in self.namespaces():
            whose = f"{facts['tenant_name']} ({facts['tenant']})" if facts["tenant_name"] else facts["tenant"]
            title = f"tenant {whose}, namespace {facts['namespace']}" + (f", {facts['name']}" if facts["name"] else "")
            table = Table(
                title=Text(title),
                title_justify="left",
                title_style="bold",
                box=None,
                padding=(0, 2, 0, 0),
                pad_edge=False,
            )
            for name in ("slab", "part", "frame"):
                table.add_column(name)
            for name in ("slots", "good", "empty", "in doubt", "given up", "damaged"):
                table.add_column(name, justify="right")
            shown = sorted(slabs, key=lambda slab: not slab.is_damaged)[:room]
            room -= len(shown)
            for slab in shown:
                assert slab.header is not None
                owner = slab.header.slot_class
                table.add_row(slab.name, str(owner.part), format_size(owner.frame_bytes), *_row(slab.counts))
            if len(slabs) > 1:
                table.add_row(f"all {len(slabs)}", "", "", *_row(facts))
            yield table

    def _listed_problems(self) -> Iterator[str]:
        for problem in self.problems.listed:
            where = problem.slab + (f" slot {problem.slot}" if problem.slot is not None else "")
            yield ": ".join(part for part in (where, problem.what.replace("_", " "), problem.detail) if part)
        if self.problems.total > len(self.problems.listed):
            yield f"and {self.problems.total - len(self.problems.listed)} more"

    def _verdict(self) -> Iterator[str]:
        good = "good frames" if self._all_keys else "frames whose digests fit"
        slabs = f"{len(self.slabs)} slab{'s' * (len(self.slabs) != 1)}"
        size = f"{format_size(self.checked_bytes)} in {self.read_seconds:.2f} s ({self.gb_per_second:.2f} GB/s)"
        read = f"{self.totals()['good']} {good} in {slabs}; read {size}"
        if not self.problems.total:
            yield f"All is well: {read}"
            if self.repair is not None:
                yield "Nothing to repair."
            return
        kinds = ", ".join(f"{what.replace('_', ' ')} {count}" for what, count in self.problems.counts.most_common())
        yield f"Not well: {kinds}; {read}"
        if self.repair is not None:
            yield (
                f"Repaired: frames in the index {self.repair.frames}, given up {self.repair.given_up}, slots emptied "
                f"{self.repair.emptied}, slab headers written again {self.repair.headers_rewritten}"
            )
            yield from (f"Left as it is: {line}" for line in self.repair.left)
        elif self._all_keys:
            yield f"kvstore fsck {self.directory} --repair gives up what is damaged and builds the index again."
        else:
            yield f"Restore {self.directory}/keys from a backup and check again; nothing is repaired without."

    @property
    def _all_keys(self) -> bool:
        return self.has_keys and not any(slab.state is SlabState.NEEDS_KEYS for slab in self.slabs)


def _sum(slabs: Sequence[SlabResult]) -> dict[str, int]:
    return {slot.name.lower(): sum(slab.slots.count(slot) for slab in slabs) for slot in Slot}


def _row(facts: Mapping[str, Any]) -> list[str]:
    counts = [int(facts[slot.name.lower()]) for slot in Slot]
    columns = (Slot.GOOD, Slot.EMPTY, Slot.IN_DOUBT, Slot.GIVEN_UP)
    return [str(n) for n in (sum(counts), *(counts[slot] for slot in columns), sum(counts[slot] for slot in DAMAGED))]
