"""A folder of slabs in memory that fails, rots and loses power on purpose: `Files` for tests.

It keeps two images of every slab, the one that a read sees and the one that is sure to survive, and between them the
versions of each page that were written and not yet synced. All chance comes from the generator that `crash` is given.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from simulation.power import Power, PowerLoss

PAGE_BYTES = 4096
SECTOR_BYTES = 512

Call = Literal["read", "write", "sync", "create", "remove"]


class SimulatedFiles:
    """`Files` in memory, on a disk whose worst days can be chosen.

    A loss of power. `create`, `write`, `sync` and `remove` step the `Power` before they have their effect. When it ends
    there, the write has reached the cache and the sync has done nothing; a create or remove that was cut is decided by
    `crash`: there as a whole, or not at all. Once it has returned, the name is durable. Calls that come after the one
    that was cut have no effect.

    A crash. Each sector (512 bytes) or each page (4096; one size per crash) that was written since it was last durable
    ends as its durable content or as that of any one of those writes: a later write can be lost while an earlier one
    survives, and a write can survive in pieces.

    A failed call (see `fail`). A read leaves anything in the caller's memory. A write leaves every other of its sectors
    in the cache, not synced. A create leaves nothing, a remove leaves the slab. A sync makes nothing durable, and what
    was waiting for it can be read until the crash, but no later sync makes it durable either: it must be written again.

    What was planned with `fail` and what `poke` and `flip` damaged outlasts a crash. A `Power` belongs to
    all disks of a machine: whoever calls `crash` on each of them also calls `Power.back`, once, before the next effect.
    """

    def __init__(self, power: Power | None = None) -> None:
        self.power = power if power is not None else Power()
        self._lock = threading.Lock()
        self._slabs: dict[str, _Slab] = {}
        self._cut: tuple[str, _Slab] | None = None  # what was being created or removed when the power went
        self._faults: dict[tuple[Call, int], OSError] = {}
        self._calls: Counter[Call] = Counter()
        self._closed = False

    # What `Files` promises -------------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        with self._lock:
            self._check_open()
            return {name: len(slab.cached) for name, slab in self._slabs.items()}

    def create(self, name: str, size_bytes: int) -> None:
        assert name.endswith(".slab") and "/" not in name, f"{name!r} is no slab's name"
        assert size_bytes > 0 and size_bytes % PAGE_BYTES == 0, f"{size_bytes} bytes are not whole pages"
        with self._lock:
            self._check_open()
            if name in self._slabs:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            slab = _Slab(bytearray(size_bytes), bytearray(size_bytes))
            try:
                self.power.step()
            except PowerLoss:
                if self._went_off_now():
                    self._cut = name, slab
                raise
            self._maybe_fail("create")
            self._slabs[name] = slab

    def read(self, name: str, offset: int, into: memoryview) -> None:
        with self._lock:
            content = self._range(name, offset, into.nbytes).cached[offset : offset + into.nbytes]
            try:
                self._maybe_fail("read")
            except OSError:
                content[len(content) // 2 :] = b"\xee" * (len(content) - len(content) // 2)
                raise
            finally:
                into.cast("B")[:] = content

    def write(self, name: str, offset: int, data: memoryview) -> None:
        with self._lock:
            slab = self._range(name, offset, data.nbytes)
            content = data.tobytes()
            try:
                self.power.step()
                self._maybe_fail("write")
            except PowerLoss:
                if self._went_off_now():
                    slab.write(offset, content)
                raise
            except OSError:
                slab.write(offset, _every_other_sector(content, bytes(slab.cached[offset : offset + len(content)])))
                raise
            slab.write(offset, content)

    def sync(self, name: str) -> None:
        with self._lock:
            slab = self._range(name, 0, 0)
            self.power.step()
            try:
                self._maybe_fail("sync")
            except OSError:
                slab.lose()
                raise
            slab.sync()

    def confirm(self, name: str) -> None:
        with self._lock:
            self._range(name, 0, 0)

    bring_back = confirm

    def remove(self, name: str) -> None:
        with self._lock:
            slab = self._range(name, 0, 0)
            try:
                self.power.step()
            except PowerLoss:
                if self._went_off_now():
                    self._cut = name, slab
                raise
            self._maybe_fail("remove")
            del self._slabs[name]

    def close(self) -> None:
        with self._lock:
            self._closed = True

    # What can be done to it ------------------------------------------------------------------------------------------

    def crash(self, random: Random) -> None:
        """The machine lost its power, now or in a call that was cut, and is on again with what reached the disk."""
        with self._lock:
            grain = random.choice((SECTOR_BYTES, PAGE_BYTES))
            if self._cut is not None:
                name, slab = self._cut
                self._slabs.pop(name, None)
                if random.random() < 0.5:
                    self._slabs[name] = slab
                self._cut = None
            for name in sorted(self._slabs):
                self._slabs[name].crash(random, grain)
            self._closed = False

    def reopen(self) -> None:
        """Another process opens the folder on the same running machine: nothing is lost, nothing becomes durable."""
        with self._lock:
            self._closed = False

    def fail(self, call: Call, nth: int, error: OSError) -> None:
        """The `nth` call of this kind from now on, counted from 1, raises `error`. Several may be planned."""
        assert nth >= 1
        with self._lock:
            self._faults[call, self._calls[call] + nth] = error

    def flip(self, name: str, bit: int) -> None:
        """Turn one bit of the slab round, counted from the lowest one of its first byte."""
        mask = 1 << bit % 8
        with self._lock:
            self._slabs[name].change(bit // 8, 1, lambda content: bytes([content[0] ^ mask]))

    def poke(self, name: str, offset: int, data: bytes) -> None:
        """Put bytes anywhere in the slab as if they had always been there; no alignment."""
        with self._lock:
            self._slabs[name].change(offset, len(data), lambda _: data)

    def image(self, name: str) -> bytes:
        """The slab as a read sees it."""
        with self._lock:
            return bytes(self._slabs[name].cached)

    def durable(self, name: str) -> bytes:
        """What every crash leaves of the slab, outside of what waits for a sync."""
        with self._lock:
            return bytes(self._slabs[name].durable)

    def copy(self) -> SimulatedFiles:
        """The same disk once more, open, with a `Power` of its own and without planned faults."""
        twin = SimulatedFiles()
        with self._lock:
            twin._slabs = {name: slab.copy() for name, slab in self._slabs.items()}
            if self._cut is not None:
                twin._cut = self._cut[0], self._cut[1].copy()
        return twin

    # Helpers, under the lock -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the folder is closed")

    def _range(self, name: str, offset: int, length: int) -> _Slab:
        assert name.endswith(".slab") and "/" not in name, f"{name!r} is no slab's name"
        assert offset >= 0 and offset % PAGE_BYTES == 0, f"offset {offset} is no page's"
        assert length % PAGE_BYTES == 0, f"{length} bytes are not whole pages"
        self._check_open()
        slab = self._slabs.get(name)
        if slab is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        if offset + length > len(slab.cached):
            raise OSError(errno.EIO, f"bytes {offset} to {offset + length} of {len(slab.cached)}", name)
        return slab

    def _went_off_now(self) -> bool:
        """After a `PowerLoss`: whether it was this call that was cut, or the machine was off already."""
        return self.power.steps == self.power.last

    def _maybe_fail(self, call: Call) -> None:
        self._calls[call] += 1
        error = self._faults.pop((call, self._calls[call]), None)
        if error is not None:
            raise error


@dataclass
class _Version:
    """What a page held after a write that is not durable yet. `lost`: a sync of it failed, another one is no use."""

    content: bytearray
    lost: bool = False


@dataclass
class _Slab:
    """Two images, and for each page in which they may differ its versions since it was durable, oldest first."""

    durable: bytearray
    cached: bytearray
    waiting: dict[int, list[_Version]] = field(default_factory=dict)  # by the page's offset

    def write(self, offset: int, content: bytes) -> None:
        self.cached[offset : offset + len(content)] = content
        for start in range(0, len(content), PAGE_BYTES):
            version = _Version(bytearray(content[start : start + PAGE_BYTES]))
            self.waiting.setdefault(offset + start, []).append(version)

    def sync(self) -> None:
        for page, versions in list(self.waiting.items()):
            # Only the newest version can still be made durable, and with it all older ones are gone for good.
            if not versions[-1].lost:
                self.durable[page : page + PAGE_BYTES] = versions[-1].content
                del self.waiting[page]

    def lose(self) -> None:
        for versions in self.waiting.values():
            for version in versions:
                version.lost = True

    def crash(self, random: Random, grain: int) -> None:
        for page, versions in sorted(self.waiting.items()):
            candidates = [self.durable[page : page + PAGE_BYTES], *(version.content for version in versions)]
            for start in range(0, PAGE_BYTES, grain):
                chosen = random.choice(candidates)[start : start + grain]
                self.durable[page + start : page + start + grain] = chosen
        self.waiting.clear()
        self.cached[:] = self.durable

    def change(self, offset: int, length: int, change: Callable[[bytes], bytes]) -> None:
        assert offset >= 0 and offset + length <= len(self.cached)
        for image in (self.durable, self.cached):
            image[offset : offset + length] = change(bytes(image[offset : offset + length]))
        for page, versions in self.waiting.items():
            first, last = max(offset, page), min(offset + length, page + PAGE_BYTES)
            for version in versions if first < last else ():
                whole = bytearray(length)
                whole[first - offset : last - offset] = version.content[first - page : last - page]
                version.content[first - page : last - page] = change(bytes(whole))[first - offset : last - offset]

    def copy(self) -> _Slab:
        waiting = {
            page: [_Version(bytearray(version.content), version.lost) for version in versions]
            for page, versions in self.waiting.items()
        }
        return _Slab(bytearray(self.durable), bytearray(self.cached), waiting)


def _every_other_sector(new: bytes, old: bytes) -> bytes:
    """What a write that failed half-way left."""
    mixed = bytearray(old)
    for start in range(0, len(new), 2 * SECTOR_BYTES):
        mixed[start : start + SECTOR_BYTES] = new[start : start + SECTOR_BYTES]
    return bytes(mixed)
