"""Who has touched which bytes, and whether two accesses are ordered: vector clocks over regions.

An actor is a stream or a host thread. Its clock counts its own steps and says how many of each other actor's it comes
after. Two accesses to the same bytes, at least one of them a write, are a race unless the later one's clock covers the
earlier one's step: whatever the order in which they happened to run (FastTrack, Flanagan and Freund, PLDI 2009).

Bytes are also undefined until they are written, and released ones may not be touched. Must never miss an overlap:
regions are cut where accesses begin and end, down to the byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Clock = dict[str, int]


class Region(NamedTuple):
    """Bytes of memory, the device's or the host's."""

    address: int
    size_bytes: int


def region(tensor: torch.Tensor) -> Region:
    """Of a contiguous tensor."""
    assert tensor.is_contiguous(), "a region is one run of bytes"
    return Region(tensor.data_ptr(), tensor.nbytes)


class HazardError(AssertionError):
    """Something that is wrong in some order of events, be it not in this one."""


class Race(HazardError):
    """Two accesses without an order between them."""


class Undefined(HazardError):
    """Bytes were read that nobody has written since they were made, or taken again."""


class Released(HazardError):
    """Bytes were touched that their owner had given back."""


class Pageable(HazardError):
    """A copy by a stream touches host memory that is not page-locked."""


def merge(clock: Clock, other: Clock) -> None:
    """Come after all that the other comes after."""
    for actor, step in other.items():
        if step > clock.get(actor, 0):
            clock[actor] = step


@dataclass(frozen=True, slots=True)
class _Access:
    actor: str
    step: int
    label: str

    def is_before(self, actor: str, clock: Clock) -> bool:
        return self.actor == actor or clock.get(self.actor, 0) >= self.step


@dataclass(slots=True)
class _Cell:
    """Bytes up to the next cell that have the same history."""

    written: _Access | None = None
    read: dict[str, _Access] = field(default_factory=dict)
    is_defined: bool = False
    released: str = ""

    def copy(self) -> _Cell:
        return _Cell(self.written, dict(self.read), self.is_defined, self.released)


class Shadow:
    """What is known of all memory."""

    def __init__(self, is_defined: bool = False) -> None:
        """is_defined: of memory that nothing was said of."""
        self._starts = [0]
        self._cells = [_Cell(is_defined=is_defined)]

    def read(self, actor: str, clock: Clock, label: str, regions: Iterable[Region]) -> None:
        """Raises `HazardError`."""
        access = _Access(actor, clock[actor], label)
        for region in regions:
            for cell in self._over(region):
                _against(access, clock, cell.written, region)
                _usable(label, cell, region)
                if not cell.is_defined:
                    raise Undefined(f"{label} reads {_named(region)}, which nobody has written")
                cell.read[actor] = access

    def write(self, actor: str, clock: Clock, label: str, regions: Iterable[Region]) -> None:
        """Raises `HazardError`."""
        access = _Access(actor, clock[actor], label)
        for region in regions:
            for cell in self._over(region):
                self._own(access, clock, cell, region)
                _usable(label, cell, region)
                cell.is_defined = True

    def release(self, actor: str, clock: Clock, label: str, regions: Iterable[Region]) -> None:
        """Nobody may touch these until they are taken again. Counts as a write. Raises `HazardError`."""
        access = _Access(actor, clock[actor], label)
        for region in regions:
            for cell in self._over(region):
                self._own(access, clock, cell, region)
                _usable(label, cell, region)
                cell.is_defined, cell.released = False, label

    def take(self, actor: str, clock: Clock, label: str, regions: Iterable[Region]) -> None:
        """Bytes that are new or were released are somebody's again, and undefined. Raises `HazardError`."""
        access = _Access(actor, clock[actor], label)
        for region in regions:
            for cell in self._over(region):
                self._own(access, clock, cell, region)
                cell.is_defined, cell.released = False, ""

    def forget(self, regions: Iterable[Region]) -> None:
        """These are new memory: nobody has touched them, and they are undefined."""
        for region in regions:
            for cell in self._over(region):
                cell.written, cell.is_defined, cell.released = None, False, ""
                cell.read.clear()

    def settle(self, actor: str, clock: Clock, label: str, regions: Iterable[Region]) -> None:
        """Only look whether all accesses so far come before this. Raises `HazardError`."""
        access = _Access(actor, clock[actor], label)
        for region in regions:
            for cell in self._over(region):
                for earlier in [cell.written, *cell.read.values()]:
                    _against(access, clock, earlier, region)

    @staticmethod
    def _own(access: _Access, clock: Clock, cell: _Cell, region: Region) -> None:
        for earlier in [cell.written, *cell.read.values()]:
            _against(access, clock, earlier, region)
        cell.written = access
        cell.read.clear()

    def _over(self, region: Region) -> Iterator[_Cell]:
        if region.size_bytes <= 0:
            return iter(())
        first = self._cut(region.address)
        return iter(self._cells[first : self._cut(region.address + region.size_bytes)])

    def _cut(self, address: int) -> int:
        """The cell that begins here."""
        at = bisect_left(self._starts, address)
        if at == len(self._starts) or self._starts[at] != address:
            self._starts.insert(at, address)
            self._cells.insert(at, self._cells[at - 1].copy())
        return at


def _against(access: _Access, clock: Clock, earlier: _Access | None, region: Region) -> None:
    if earlier is not None and not earlier.is_before(access.actor, clock):
        raise Race(f"{access.label} and {earlier.label} touch {_named(region)}, and nothing orders them")


def _usable(label: str, cell: _Cell, region: Region) -> None:
    if cell.released:
        raise Released(f"{label} touches {_named(region)} after {cell.released}")


def _named(region: Region) -> str:
    return f"{region.size_bytes} bytes at {region.address:#x}"
