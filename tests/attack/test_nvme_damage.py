"""A directory whose bytes are not what was written: every read gives exactly what was stored, or is detected.

A stock is a simulated directory with a history: frames that are held, frames that were evicted and whose slots were
used again, slots that are free. One round takes a copy of it, does one damage to each of many places that have nothing
to do with each other (a frame's slot, a record of the index, a slab's header, the stamp), opens it, reads everything
that is there and verifies as a reader does. So a round costs what one case would, and counts as hundreds: whatever was
not damaged must be there, and what was damaged must be as it was, detected, or absent. What the damage to a slot, a
record or a slab may take with it is written down before the start. A failure names its round, which repeats it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from simulation.machine import MAC_KEY, SLAB_BYTES, Keys, Machine
from tiering.errors import BlockCorrupt, TierFull
from tiering.frame import HEADER_BYTES, Sealer, Stamp, digest, open_header, verify_payload
from tiering.nvme.slab import DOUBTS, META, SLOTS_PER_RECORD, STAMP_PAGES, doubt_key, record_key, slab_name
from tiering.nvme.slab_recovery import Found
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import PAGE_BYTES
from tiering.tier import SlotClass, extent_of, place_of

SECTOR_BYTES = 512
TENANT = b"t" * 16

Name = tuple[int, bytes, int]
"""Part, key and generation. The parts of a block share key and generation."""

# One payload fills its pages, one is followed by zeros, and one is large.
SIZES = (4096, 3000, 10_000)
STAMPS = [Stamp(b"key-id-0", 1, TENANT, b"n" * 32, "raw", part, 3, 64, 2, size) for part, size in enumerate(SIZES)]
CLASSES = [SlotClass(one.tenant, one.namespace, one.part, one.frame_bytes) for one in STAMPS]
SEALERS = [Sealer(one, MAC_KEY) for one in STAMPS]


def frame_of(part: int, key: bytes, generation: int, random: Random) -> bytes:
    stamp = STAMPS[part]
    payload = random.randbytes(stamp.payload_bytes)
    halves = [digest(payload[: stamp.slice_bytes]), digest(payload[stamp.slice_bytes :])]
    header = SEALERS[part].seal(key, bytes(32), 3, generation, halves)
    return (header + payload).ljust(stamp.frame_bytes, b"\x00")


class Stock:
    """A directory after an orderly end, and everything that was ever in it."""

    def __init__(self, seed: int) -> None:
        self.machine = Machine(12 * SLAB_BYTES)
        self.written: dict[Name, bytes] = {}
        self.held: dict[int, Name] = {}  # by place
        self.earlier: dict[int, list[bytes]] = {}  # what stood at a place before
        self.starts: dict[int, tuple[str, int]] = {}  # slab and offset of every slot
        self._live(Random(seed))
        self.files, self.index = self.machine.files, self.machine.index
        self.images = {name: self.files.image(name) for name in self.files.sizes()}
        self.places = sorted(self.starts)
        self.index.reopen()
        self.records = [key for key, _ in self.index.iterate(b"r")]

    def _live(self, random: Random) -> None:
        self.machine.start(keys=Keys())
        tier = self.machine.tier
        assert tier is not None
        for stamp in (*STAMPS, *STAMPS):
            tier.new_slab(stamp, MAC_KEY, b"about")
        for number, slab in tier._ledger.pieces.items():
            for slot in range(slab.slots.capacity):
                self.starts[place_of(number, slot)] = slab.name, slab.header.offset(slot)
        for generation in range(1, 140):
            key = random.randrange(40).to_bytes(32, "big")
            for part in range(3):
                if tier.free_slots(CLASSES[part]) == 0:
                    self._evict(tier, [place for place in self.held if self.held[place][0] == part][:5])
                (place,) = tier.reserve(CLASSES[part], 1)
                frame = frame_of(part, key, generation, random)
                tier.commit([place], [frame])
                self.held[place] = (part, key, generation)
                self.written[self.held[place]] = frame
            if generation % 10 == 0:
                self._evict(tier, random.sample(sorted(self.held), 12))
            if generation == 110:
                self.older_index = self.machine.index.copy()
        self._evict(tier, random.sample(sorted(self.held), 20))
        self.machine.stop()

    def _evict(self, tier: NvmeTier, places: list[int]) -> None:
        for place in places:
            self.earlier.setdefault(place, []).append(self.written[self.held.pop(place)])
        tier.delete(places)
        tier.settle()

    def bytes_at(self, place: int) -> bytes:
        name, offset = self.starts[place]
        return self.images[name][offset : offset + self.frame_bytes(place)]

    def frame_bytes(self, place: int) -> int:
        return CLASSES[(extent_of(place) - 1) % 3].frame_bytes


@functools.cache
def stock(seed: int = 0) -> Stock:
    return Stock(seed)


class Round:
    """Damages to one copy, and what they may do."""

    def __init__(self, stock: Stock, random: Random, counts: Counter[str]) -> None:
        self.stock, self.random, self.counts = stock, random, counts
        self.machine = stock.machine.copy()
        self.kinds: dict[int, str] = {}  # places whose bytes were changed, and how
        self.hidden: set[int] = set()  # places that the index or a slab may say nothing of any more
        self.shown: set[int] = set()  # places that an index of another time may name
        self.put_back: set[Name] = set()  # frames whose bytes were put somewhere by hand
        self.damages = 0

    # Damage to slots

    def damage_slots(self, share: float, only: str | None = None) -> None:
        for place in self.stock.places:
            if self.random.random() < share:
                kind = only or self.random.choice(SLOT_DAMAGES)
                content = getattr(self, kind)(place, self.stock.bytes_at(place))
                if content is None:
                    continue
                name, offset = self.stock.starts[place]
                self.machine.files.poke(name, offset, content)
                self.kinds[place] = kind
                self.damages += 1

    def flip(self, place: int, content: bytes) -> bytes:
        # Half of the flips hit the header, whose used bytes are few.
        region = self.random.choice((256, HEADER_BYTES, len(content), len(content)))
        bit = self.random.randrange(region * 8)
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)

    def torn(self, place: int, content: bytes) -> bytes | None:
        """Sectors or pages of what stood here before, or of zeros, between those of now."""
        before = self.random.choice([*self.stock.earlier.get(place, []), bytes(len(content))])
        grain = self.random.choice((SECTOR_BYTES, PAGE_BYTES))
        mixed = bytearray(content)
        for start in range(0, len(content), grain):
            if self.random.random() < 0.5:
                mixed[start : start + grain] = before[start : start + grain]
        if bytes(mixed) == before:
            self._note_put_back(before)
        return bytes(mixed)

    def misdirected(self, place: int, content: bytes) -> bytes:
        """The bytes of another slot, whatever its slab and class; what does not fit is cut off."""
        other = self.stock.bytes_at(self.random.choice(self.stock.places))
        self._note_put_back(other)
        return other[: len(content)] + content[len(other) :]

    def stale(self, place: int, content: bytes) -> bytes | None:
        if place not in self.stock.earlier:
            return None
        before = self.random.choice(self.stock.earlier[place])
        self._note_put_back(before)
        return before

    def zeroed(self, place: int, content: bytes) -> bytes:
        return self._page(content, bytes(PAGE_BYTES))

    def noise(self, place: int, content: bytes) -> bytes:
        return self._page(content, self.random.randbytes(PAGE_BYTES))

    def _page(self, content: bytes, page: bytes) -> bytes:
        at = self.random.randrange(0, len(content), PAGE_BYTES)
        return content[:at] + page + content[at + PAGE_BYTES :]

    def _note_put_back(self, frame: bytes) -> None:
        try:
            header = open_header(frame[:HEADER_BYTES], Keys())
        except BlockCorrupt:
            return
        self.put_back.add((header.stamp.part, header.prefix_key, header.generation))

    # Damage to the index

    def damage_records(self, share: float) -> None:
        index, values = self.machine.index, self.stock.index._seen
        for key in self.stock.records:
            if self.random.random() >= share:
                continue
            value = values[key]
            kind = self.random.choice(("flipped", "swapped", "dropped", "duplicated", "cut", "key flipped"))
            other = self.random.choice(self.stock.records)
            changes: list[tuple[bytes, bytes | None]] = []
            if kind == "flipped":
                changes = [(key, flipped(value, self.random))]
            elif kind == "swapped":
                changes = [(key, values[other]), (other, value)]
            elif kind == "dropped":
                changes = [(key, None)]
                self._hide(key)
            elif kind == "duplicated":
                changes = [(record_key(self.random.randrange(9), self.random.randrange(3)), value)]
            elif kind == "cut":
                changes = [(key, value[: self.random.randrange(len(value))])]
            else:
                changes = [(key, None), (flipped(key, self.random), value)]
                self._hide(key)
            index.apply(changes)
            self.damages += 1
        if self.random.random() < share:
            place = self.random.choice(self.stock.places)
            index.apply([(doubt_key(place), b"")])
            self.hidden.add(place)  # if its record is damaged too, the doubt counts
            index.apply([(DOUBTS + self.random.randbytes(self.random.randrange(12)), b"")])
            self.damages += 2
        # A record that is not there says that nothing is: swaps and copies may have made up for one, or not.
        for key in self.stock.records:
            if key not in index._seen:
                self._hide(key)

    def roll_back_records(self, share: float) -> None:
        """Whole records of another time, valid in themselves."""
        for key in self.stock.records:
            value = self.stock.older_index._seen.get(key)
            if value is not None and self.random.random() < share:
                self.machine.index.apply([(key, value)])
                self._hide(key)
                self.shown.update(self._run(key))
                self.damages += 1

    def _run(self, key: bytes) -> list[int]:
        slab, record = int.from_bytes(key[1:5], "big"), int.from_bytes(key[5:9], "big")
        return [place_of(slab, record * SLOTS_PER_RECORD + at) for at in range(SLOTS_PER_RECORD)]

    def _hide(self, key: bytes) -> None:
        self.hidden.update(self._run(key))

    def damage_meta(self) -> None:
        """After this the index is not the one that belongs to the slabs."""
        value = self.machine.index._seen[META]
        self.machine.index.apply([(META, self.random.choice([None, b"", flipped(value, self.random)]))])
        self.damages += 1

    # Damage to slab headers and the stamp

    def damage_headers(self, share: float) -> None:
        for number in range(1, 7):
            for offset in (0, SLAB_BYTES_OF[number] - PAGE_BYTES):
                if self.random.random() < share:
                    self._damage_page(slab_name(number), offset)
        for number in range(1, 7):
            image = self.machine.files.image(slab_name(number))
            pages = image[:PAGE_BYTES], image[-PAGE_BYTES:]
            before = self.stock.images[slab_name(number)]
            if pages[0] != before[:PAGE_BYTES] and pages[1] != before[-PAGE_BYTES:]:
                self.hidden.update(place for place in self.stock.places if extent_of(place) == number)

    def damage_stamps(self) -> None:
        for page in range(STAMP_PAGES):
            if self.random.random() < 0.5:
                self._damage_page(slab_name(0), page * PAGE_BYTES)

    def _damage_page(self, name: str, offset: int) -> None:
        page = self.machine.files.image(name)[offset : offset + PAGE_BYTES]
        kind = self.random.choice(("flip", "flip", "zeros", "noise", "another's"))
        if kind == "flip":
            page = flipped(page, self.random, self.random.choice((200, PAGE_BYTES)))
        elif kind == "another's":
            page = self.stock.images[slab_name(self.random.randrange(7))][:PAGE_BYTES]
        else:
            page = bytes(PAGE_BYTES) if kind == "zeros" else self.random.randbytes(PAGE_BYTES)
        self.machine.files.poke(name, offset, page)
        self.damages += 1

    # What is there afterwards

    def check(self) -> None:
        found = self.machine.start(keys=Keys())
        tier = self.machine.tier
        assert tier is not None
        seen: set[int] = set()
        for slab in found:
            self._check_slab(tier, slab, seen)
        if self.machine.tier is not None and tier.rebuilds:
            self.counts["rebuilds"] += 1
        for place, name in self.stock.held.items():
            if place not in seen:
                if place in self.kinds or place in self.hidden:
                    self.counts["absent"] += 1
                else:
                    raise AssertionError(f"{name} at {place} was not damaged, and is not there")
        self.counts["damages"] += self.damages
        self.counts["rounds"] += 1

    def _check_slab(self, tier: NvmeTier, slab: Found, seen: set[int]) -> None:
        part, frame = slab.header.slot_class.part, bytearray(slab.header.slot_class.frame_bytes)
        written, held = self.stock.written, self.stock.held
        keys, generations = slab.entries["key"].tolist(), slab.entries["generation"].tolist()
        for place, key, generation in zip(slab.places, keys, generations, strict=True):
            seen.add(place)
            name = part, key, generation
            tier.read(place, memoryview(frame))
            if not verifies(frame, slab.header.slot_class, key, generation):
                is_damaged = place in self.kinds or place in self.shown
                assert is_damaged, f"{name} at {place} was not damaged, and does not verify"
                self.counts["detected"] += 1
                continue
            truth = written.get(name)
            assert truth is not None, f"{name} at {place} verifies, and was never stored"
            size = HEADER_BYTES + SIZES[part]
            assert frame[:size] == truth[:size], f"{name} at {place} verifies, and has other bytes"
            if held.get(place) == name:
                self.counts["unharmed" if place in self.kinds else "whole"] += 1
            else:
                assert name in self.put_back, f"{name} was given up, and is back at {place}"
                assert tier.rebuilds or place in self.shown or not self.index_is_whole, (
                    f"{name} stands at {place} by mistake, and an index that is whole does not name it"
                )
                self.counts["put back by hand"] += 1

    index_is_whole = True

    def go_on(self) -> None:
        """The directory is used as it is: new frames, evictions, an orderly end, another start."""
        tier = self.machine.tier
        assert tier is not None
        frames = {}
        for part in (0, 1, 2):
            if tier.free_slots(CLASSES[part]) < 4:
                try:
                    tier.new_slab(STAMPS[part], MAC_KEY, b"")
                except TierFull:
                    continue
            places = tier.reserve(CLASSES[part], 4)
            for number, place in enumerate(places):
                name = part, self.random.randbytes(32), 1 << 40 | number
                frames[name] = frame_of(*name, self.random)
                tier.commit([place], [frames[name]])
            tier.delete(places[:1])
            del frames[next(name for name in frames if name[0] == part)]
        tier.settle()
        tier.check()
        self.machine.stop()
        there = {}
        for slab in self.machine.start(keys=Keys()):
            part = slab.header.slot_class.part
            for place, entry in zip(slab.places, slab.entries, strict=True):
                there[part, entry["key"].tobytes(), int(entry["generation"])] = place
        tier = self.machine.tier
        assert tier is not None
        new = {name: place for name, place in there.items() if name[2] >> 40}
        assert new.keys() == frames.keys()
        for name, place in new.items():
            frame = bytearray(len(frames[name]))
            tier.read(place, memoryview(frame))
            assert frame == frames[name]
        self.counts["went on"] += 1


SLOT_DAMAGES = ("flip", "torn", "misdirected", "stale", "zeroed", "noise")
SLAB_BYTES_OF = {
    number: 2 * PAGE_BYTES
    + (SLAB_BYTES - 2 * PAGE_BYTES) // CLASSES[(number - 1) % 3].frame_bytes * CLASSES[(number - 1) % 3].frame_bytes
    for number in range(1, 7)
}


def flipped(content: bytes, random: Random, length: int | None = None) -> bytes:
    damaged = bytearray(content)
    bit = random.randrange((length or len(content)) * 8)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def verifies(frame: bytearray, slot_class: SlotClass, key: bytes, generation: int) -> bool:
    """As a reader: the header under its MAC, the block that the index named, every slice of the payload."""
    try:
        header = open_header(bytes(frame[:HEADER_BYTES]), Keys())
        stamp = header.stamp
        if SlotClass(stamp.tenant, stamp.namespace, stamp.part, stamp.frame_bytes) != slot_class:
            return False
        if (header.prefix_key, header.generation) != (key, generation):
            return False
        verify_payload(header, memoryview(frame)[HEADER_BYTES:])
    except BlockCorrupt:
        return False
    return True


# Rounds ---------------------------------------------------------------------------------------------------------------


def slots_alone(round: Round) -> None:
    """The index is whole: a slot without a frame stays without one, whatever stands in it."""
    round.damage_slots(0.9, "flip" if round.random.random() < 0.8 else None)


def slots_without_index(round: Round) -> None:
    round.machine.discard()
    round.damage_slots(0.9, "flip" if round.random.random() < 0.8 else None)


def records(round: Round) -> None:
    round.damage_slots(0.3)
    round.damage_records(0.5)
    round.index_is_whole = False


def older_records(round: Round) -> None:
    round.damage_slots(0.2)
    round.roll_back_records(0.7)
    round.index_is_whole = False


def headers(round: Round) -> None:
    round.damage_slots(0.3)
    round.damage_headers(0.4)


def everything(round: Round) -> None:
    round.damage_slots(0.5)
    round.damage_records(0.3)
    round.index_is_whole = False
    if round.random.random() < 0.5:
        round.damage_meta()
    round.damage_headers(0.2)
    round.damage_stamps()


PLANS: tuple[tuple[Callable[[Round], None], float], ...] = (
    (slots_alone, 0.5),
    (slots_without_index, 0.2),
    (records, 0.1),
    (older_records, 0.05),
    (headers, 0.05),
    (everything, 0.1),
)


def damage(count: int, seed: int, report: Callable[[int], None] | None = None) -> dict[str, int]:
    """At least so many damages; what became of them. Every eighth round goes on to use the directory."""
    counts: Counter[str] = Counter()
    number = 0
    while counts["damages"] < count:
        one_round(seed, number, counts)
        number += 1
        if report is not None:
            report(counts["damages"])
    return dict(counts)


def one_round(seed: int, number: int, counts: Counter[str]) -> None:
    random = Random(f"{seed} {number}")
    round = Round(stock(number % 2), random, counts)
    (plan,) = random.choices([plan for plan, _ in PLANS], [weight for _, weight in PLANS])
    try:
        plan(round)
        round.check()
        if number % 8 == 0:
            round.go_on()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}, round {number} ({plan.__name__}): {type(error).__name__}: {error}"
        ) from error


# Tests ----------------------------------------------------------------------------------------------------------------

SEED = 20261121


@pytest.mark.slow
def test_damage_of_every_kind() -> None:
    counts = damage(30_000, SEED)
    print(counts)
    assert counts["detected"] > 5000 and counts["went on"] > 5 and counts["rebuilds"] > 10
