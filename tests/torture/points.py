"""Every failpoint by name, what ends a process at one of them, and the wrappers that name each call to the disk.

The code itself names only what no wrapper can see: the steps inside of one call (`tiering.failpoint`). The wrappers
here name every call of `Files`, `FrameIndex` and `IndexMaker` by what it is for, and cut writes in half.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tiering.nvme.frame_index import Change, FrameIndex
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.slab import (
    DOUBTS,
    EMPTY,
    ENTRY,
    META,
    RECORDS,
    SLOTS_PER_RECORD,
    STAMP_PAGES,
    latest_stamp,
    split_doubt_key,
    split_entries,
    split_record_key,
)
from tiering.nvme.slab_files import DirectFiles
from tiering.slab_header import PAGE_BYTES, parse_slab_header
from tiering.tier import place_of
from torture.nursery import Voice

STAMP_NAME = f"{0:08x}.slab"
WRITES = (
    "stamp of an opening",  # a directory that was left in order is not any more
    "stamp of a session",
    "stamp of a close",
    "first slab header",
    "second slab header",
    "frame",
    "void",  # zeros over the header of a frame that was given up
)
SYNCS = ("stamp of an opening", "stamp of a session", "stamp of a close", "slab headers", "frames", "voids")
BATCHES = (
    "doubts",  # puts places in doubt before their frames are written
    "names",  # names frames that are durable, and takes their doubts away
    "forgets",  # forgets frames, and puts their places in doubt
    "frees",  # takes the doubt of voided places away
    "retires",  # forgets a slab that is about to be removed
    "gathers",  # what a rebuild read from headers
    "identifies",  # says for the first time which index this is: a new one, or one that is built again
)

POINTS = (
    *(f"{kind}: {how}" for kind in WRITES for how in ("first half written", "second half written", "written")),
    *(f"{kind}: synced" for kind in SYNCS),
    *(f"batch that {kind}: {how}" for kind in BATCHES for how in ("to be applied", "applied", "synced")),
    "batch: being applied",  # at some moment of it
    "headers read by a rebuild",
    "frame read",
    "slab created",
    "slab to be removed",
    "slab removed",
    "index to be discarded",
    "index discarded",
    "index opened",
    "index closed",
    "slabs closed",
    # In the code itself: inside `DirectFiles`, `write_secret_file` and `lmdb_index`.
    "draft made",
    "draft allocated",
    "draft synced",
    "draft renamed",
    "slab unlinked",
    "secret draft made",
    "secret written",
    "secret synced",
    "secret renamed",
    "index made",
    "index committed",
    "index half removed",
    "index file closed",
    "digest file made",
    "digest forgotten",
    # Around the tables of a store.
    "demotion durable, tables not told",
    "demotion told",
    "promotion read, tables not told",
    "promotion told",
    "eviction recorded, tier not told",
    "key of a new tenant made",
)
AT_FIRST = frozenset(point for point in POINTS if point.startswith("secret") or point == "key of a new tenant made")
"""Reached only while a directory gets to know its tenants."""
ONCE_A_SESSION = frozenset(
    point
    for point in POINTS
    if point.startswith(
        ("stamp", "index", "digest", "slabs closed", "headers read", "batch that gathers", "batch that identifies")
    )
) - {"index committed"}
"""Reached when a store is opened or closed, some of them only where the index is built again."""


class Trigger:
    """Ends this process at the `count`-th passage of one failpoint; after a while, at the next one."""

    def __init__(self, point: str, count: int, patience_seconds: float, say: Voice) -> None:
        assert point in POINTS
        self._point = point
        self._left = count
        self._deadline = time.monotonic() + patience_seconds
        self._say = say
        self._lock = threading.Lock()

    def is_due(self, point: str) -> bool:
        """Count a passage; whether this is the one at which to end."""
        assert point in POINTS, f"{point!r} is not in the list of failpoints"
        if point != self._point:
            return False
        with self._lock:
            self._left -= 1
            return self._left <= 0 or time.monotonic() > self._deadline

    def end(self, point: str) -> None:
        """SIGKILL."""
        self._say("at", point)
        os.kill(os.getpid(), signal.SIGKILL)

    def reach(self, point: str) -> None:
        """`Reach`."""
        if self.is_due(point):
            self.end(point)


class Pointed:
    """What it does not name goes to what is within."""

    def __init__(self, inner: Any, trigger: Trigger) -> None:
        self._inner, self._trigger = inner, trigger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class PointedFiles(Pointed):
    """`Files` of a store, each call named by what it is for."""

    def __init__(self, directory: Path, trigger: Trigger) -> None:
        super().__init__(DirectFiles(directory, trigger.reach), trigger)
        self._lock = threading.Lock()
        self._sizes = self._inner.sizes()
        self._written: dict[str, set[str]] = {}  # kinds of what was written since the last sync, by slab
        self._session = 0
        self._began = False
        self._bytes_of_frames: dict[str, int] = {}
        if STAMP_NAME in self._sizes:
            pages = [bytearray(PAGE_BYTES) for _ in range(STAMP_PAGES)]
            for page, buffer in enumerate(pages):
                self._inner.read(STAMP_NAME, page * PAGE_BYTES, memoryview(buffer))
            last = latest_stamp([bytes(page) for page in pages])
            self._session = last.session if last is not None else 0

    def create(self, name: str, size_bytes: int) -> None:
        self._inner.create(name, size_bytes)
        with self._lock:
            self._sizes[name] = size_bytes
            self._bytes_of_frames.pop(name, None)
        self._trigger.reach("slab created")

    def read(self, name: str, offset: int, into: memoryview) -> None:
        self._inner.read(name, offset, into)
        if self._began and name != STAMP_NAME:
            is_frame = into.nbytes == self._frame_bytes(name)
            self._trigger.reach("frame read" if is_frame else "headers read by a rebuild")

    def write(self, name: str, offset: int, data: memoryview) -> None:
        kind = self._kind(name, offset, data)
        for is_second, point in enumerate((f"{kind}: first half written", f"{kind}: second half written")):
            if self._trigger.is_due(point):
                self._write_half(name, offset, data, is_second)
                self._trigger.end(point)
        with self._lock:
            self._written.setdefault(name, set()).add(kind)
        self._inner.write(name, offset, data)
        self._trigger.reach(f"{kind}: written")

    def sync(self, name: str) -> None:
        with self._lock:
            kinds = self._written.pop(name, set())
        self._inner.sync(name)
        for kind in kinds:
            whole = {"frame": "frames", "void": "voids"}.get(kind, kind)
            self._trigger.reach(f"{'slab headers' if kind.endswith('slab header') else whole}: synced")

    def remove(self, name: str) -> None:
        self._trigger.reach("slab to be removed")
        self._inner.remove(name)
        self._trigger.reach("slab removed")

    def close(self) -> None:
        self._inner.close()
        self._trigger.reach("slabs closed")

    def _frame_bytes(self, name: str) -> int:
        known = self._bytes_of_frames.get(name)
        if known is None:
            page = bytearray(PAGE_BYTES)
            self._inner.read(name, 0, memoryview(page))
            known = self._bytes_of_frames[name] = parse_slab_header(bytes(page)).slot_class.frame_bytes
        return known

    def _kind(self, name: str, offset: int, data: memoryview) -> str:
        if name == STAMP_NAME:
            return f"stamp of {self._kind_of_stamp(bytes(data))}"
        if data.nbytes == PAGE_BYTES and offset == 0:
            return "first slab header"
        if data.nbytes == PAGE_BYTES and offset == self._sizes[name] - PAGE_BYTES:
            return "second slab header"
        return "void" if data.nbytes == PAGE_BYTES and not any(data) else "frame"

    def _kind_of_stamp(self, page: bytes) -> str:
        stamp = latest_stamp([page, page])
        assert stamp is not None
        if stamp.session > self._session:
            self._session, self._began = stamp.session, True
            return "a session"
        return "a close" if self._began else "an opening"

    def _write_half(self, name: str, offset: int, data: memoryview, is_second: int) -> None:
        """One half of what was to be written, and of what was there the other; trailing zeros are no part of either."""
        mixed = bytearray(data.nbytes)
        self._inner.read(name, offset, memoryview(mixed))
        cut = max(len(mixed.rstrip(b"\x00")), len(bytes(data).rstrip(b"\x00"))) // 2
        chosen = slice(cut, None) if is_second else slice(0, cut)
        mixed[chosen] = data.cast("B")[chosen]
        self._inner.write(name, offset, memoryview(mixed))


class PointedIndex(Pointed):
    """`FrameIndex` of a store, each batch named by all that it does."""

    def __init__(self, inner: FrameIndex, trigger: Trigger) -> None:
        super().__init__(inner, trigger)
        self._unsynced: list[str] = []

    def apply(self, changes: Sequence[Change]) -> None:
        kinds = self._kinds(changes)
        self._reach(kinds, "to be applied")
        if self._trigger.is_due("batch: being applied"):
            threading.Thread(target=self._end_soon, daemon=True).start()
        self._inner.apply(changes)
        self._reach(kinds, "applied")
        self._unsynced += kinds

    def sync(self) -> None:
        self._inner.sync()
        kinds, self._unsynced = self._unsynced, []
        self._reach(kinds, "synced")

    def close(self) -> None:
        self._inner.close()
        self._trigger.reach("index closed")

    def _reach(self, kinds: Sequence[str], how: str) -> None:
        for kind in kinds:
            self._trigger.reach(f"batch that {kind}: {how}")

    def _end_soon(self) -> None:
        time.sleep(Random().random() * 0.001)
        self._trigger.end("batch: being applied")

    def _kinds(self, changes: Sequence[Change]) -> list[str]:
        """What a batch does, from the difference that it makes."""
        if all(key != META for key, _ in changes):
            return ["gathers"]
        old = dict(zip((key for key, _ in changes), self._inner.get([key for key, _ in changes]), strict=True))
        kinds = [] if old[META] is not None else ["identifies"]
        named: set[int] = set()
        forgotten: set[int] = set()
        for key, value in changes:
            if key.startswith(RECORDS):
                before, after = _held(old[key]), _held(value)
                slab, record = split_record_key(key)
                place = [place_of(slab, record * SLOTS_PER_RECORD + at) for at in range(SLOTS_PER_RECORD)]
                named |= {place[at] for at in after - before}
                forgotten |= {place[at] for at in before - after}
                if value is None and old[key] is None and "retires" not in kinds:
                    kinds.append("retires")
        doubted = {split_doubt_key(key) for key, value in changes if key.startswith(DOUBTS) and value is not None}
        cleared = {split_doubt_key(key) for key, value in changes if key.startswith(DOUBTS) and value is None}
        facts = {"doubts": doubted - forgotten, "names": named, "forgets": forgotten, "frees": cleared - named}
        return kinds + [kind for kind, places in facts.items() if places]


def _held(record: bytes | None) -> set[int]:
    """Which slots of a record hold a frame, or one that is not used again."""
    if record is None:
        return set()
    entries = split_entries(record[: SLOTS_PER_RECORD * ENTRY.itemsize])
    return {at for at, state in enumerate(entries["state"].tolist()) if state != EMPTY}


class PointedMaker(Pointed):
    """`IndexMaker` of a store."""

    def __init__(self, directory: Path, trigger: Trigger) -> None:
        super().__init__(LmdbMaker(directory, trigger.reach), trigger)

    def open(self, *, clean: bool) -> FrameIndex:
        index = self._inner.open(clean=clean)
        self._trigger.reach("index opened")
        return PointedIndex(index, self._trigger)

    def discard(self) -> None:
        self._trigger.reach("index to be discarded")
        self._inner.discard()
        self._trigger.reach("index discarded")
