"""The NVMe tier on a disk that loses power: what was acknowledged is there, what was given up stays away.

One run is a life of several sessions on one disk. Each ends in order or at a random effect on the disk, and now and
then the index is lost as well. After each start everything that is there is read and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from simulation.machine import CLASSES, MAC_KEY, STAMPS, Frame, Machine
from simulation.power import PowerLoss
from tiering.errors import TierFull
from tiering.nvme.slab_recovery import Found
from tiering.nvme.tier import NvmeTier
from tiering.slots import FrameState
from tiering.tier import place_of

KEYS = 60
SESSIONS = 4
STEPS = 24


class Life:
    """A disk, and what it owes: frames by name (part, key, generation)."""

    def __init__(self, seed: int, make: Callable[..., NvmeTier] = NvmeTier) -> None:
        self.random = Random(seed)
        self.make = make
        self.machine = Machine()
        self.generation = 0
        self.written: dict[tuple[int, bytes, int], Frame] = {}
        self.owed: dict[tuple[int, bytes, int], int | None] = {}  # acknowledged; where, in this session
        self.in_flight: set[tuple[int, bytes, int]] = set()  # neither acknowledged nor gone: may be there or not
        self.index_lost = False
        self.losses = self.rebuilds = self.kept = 0

    def run(self) -> None:
        for _ in range(SESSIONS):
            self.start()
            if self.random.random() < 0.8:
                self.machine.power.back(last=self.random.randrange(1, 120))
            try:
                for _ in range(STEPS):
                    self.step()
                self.machine.stop()
                self.forget_what_settled()
            except PowerLoss:
                self.losses += 1
                lost = self.random.random() < 0.3
                self.machine.lose_power(self.random, index_too=lost)
                self.index_lost = self.index_lost or lost

    def start(self) -> None:
        """Open, which may itself be cut short, and compare."""
        while True:
            if self.random.random() < 0.3:
                self.machine.power.back(last=self.random.randrange(1, 20))
            try:
                found = self.machine.start(self.make)
                break
            except PowerLoss:
                self.losses += 1
                self.machine.lose_power(self.random)
        self.machine.power.back()
        assert self.machine.tier is not None
        self.rebuilds += self.machine.tier.rebuilds
        assert self.index_lost or not self.machine.tier.rebuilds, "a good index was thrown away"
        self.index_lost = False
        self.compare(found)

    def compare(self, found: list[Found]) -> None:
        tier = self.machine.tier
        assert tier is not None and not tier.left_alone
        there: dict[tuple[int, bytes, int], int] = {}
        for slab in found:
            part = slab.header.slot_class.part
            for place, entry in zip(slab.places, slab.entries, strict=True):
                name = (part, entry["key"].tobytes(), int(entry["generation"]))
                header = self.machine.read(place)
                if header is None:  # cut while it was written; the index that knew so is gone
                    assert name not in self.owed, f"{name} was acknowledged and cannot be read"
                    tier.quarantine([place])
                    continue
                assert name in self.owed or name in self.in_flight, f"{name} is back, which was given up"
                assert (header.stamp.part, header.prefix_key, header.generation) == name
                frame = bytearray(len(self.written[name].bytes))
                tier.read(place, memoryview(frame))
                assert bytes(frame) == self.written[name].bytes
                assert name not in there, "a frame stands in two places"
                there[name] = place
        missing = self.owed.keys() - there.keys()
        assert not missing, f"acknowledged and gone: {missing}"
        self.kept += len(there)
        self.owed = dict(there)
        self.in_flight.clear()
        tier.settle()
        tier.check()
        self.check_void()

    def check_void(self) -> None:
        """Once all is settled, no header but those of frames that are owed could be taken for one."""
        tier = self.machine.tier
        assert tier is not None
        for slab in tier._ledger.pieces.values():
            entries = tier._records.headers(slab, range(slab.slots.capacity))
            for slot in entries["state"].nonzero()[0].tolist():
                name = (slab.slot_class.part, entries["key"][slot].tobytes(), int(entries["generation"][slot]))
                bad = slab.slots.states[slot] == FrameState.QUARANTINED
                assert bad or self.owed.get(name) == place_of(slab.number, slot), f"{name} could be taken for a frame"

    def step(self) -> None:
        action = self.random.random()
        if action < 0.45:
            self.store(self.random.randrange(1, 6))
        elif action < 0.6:
            self.replace(self.random.randrange(1, 8))
        elif action < 0.85:
            self.evict(self.random.randrange(1, 8))
        else:
            assert self.machine.tier is not None
            self.machine.tier.settle()
            self.forget_what_settled()

    def store(self, count: int) -> None:
        tier = self.machine.tier
        assert tier is not None
        part = self.random.randrange(2)
        if tier.free_slots(CLASSES[part]) < count:
            try:
                tier.new_slab(STAMPS[part], MAC_KEY, b"about")
            except TierFull:
                self.evict(8)
                tier.settle()
                self.forget_what_settled()
        self.fill(part, tier.reserve(CLASSES[part], count))

    def replace(self, count: int) -> None:
        """Evict frames for others that go to their places; or think better of it."""
        tier = self.machine.tier
        assert tier is not None
        part = self.random.randrange(2)
        mine = sorted(name for name in self.owed if name[0] == part)
        names = self.random.sample(mine, min(count, len(mine)))
        places = [place for name in names if (place := self.owed.pop(name)) is not None]
        self.in_flight.update(names)
        tier.delete(places, claim=True)
        tier.await_claims(places)
        if self.random.random() < 0.2:
            tier.abort(places)
        elif places:
            self.fill(part, places)

    def fill(self, part: int, places: list[int]) -> None:
        """Store a new frame at each place; some of them turn out to be bad while they are written."""
        tier = self.machine.tier
        assert tier is not None
        frames = []
        for _ in places:
            self.generation += 1
            frame = Frame(part, self.random.randrange(KEYS).to_bytes(32, "big"), self.generation, self.random)
            self.written[frame.name] = frame
            self.in_flight.add(frame.name)
            frames.append(frame)
        good = places[: self.random.randrange(len(places))] if places and self.random.random() < 0.2 else places
        tier.commit(places, [memoryview(frame.bytes) for frame in frames], lambda: good)
        for frame, place in zip(frames, good, strict=False):
            self.in_flight.discard(frame.name)
            self.owed[frame.name] = place
        tier.abort(places[len(good) :])

    def evict(self, count: int) -> None:
        tier = self.machine.tier
        assert tier is not None
        names = self.random.sample(sorted(self.owed), min(count, len(self.owed)))
        places = [self.owed.pop(name) for name in names]
        self.in_flight.update(names)
        tier.delete([place for place in places if place is not None])

    def forget_what_settled(self) -> None:
        """Evictions are durable: what they gave up may never be back."""
        self.in_flight.clear()


def live(seeds: range, make: Callable[..., NvmeTier] = NvmeTier) -> dict[str, int]:
    """That many lives; what happened in them."""
    sums = {"losses": 0, "rebuilds": 0, "frames": 0}
    for seed in seeds:
        life = Life(seed, make)
        try:
            life.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        sums["losses"] += life.losses
        sums["rebuilds"] += life.rebuilds
        sums["frames"] += life.kept
    return sums


@pytest.mark.slow
def test_power_losses() -> None:
    sums = live(range(60))
    assert sums["losses"] > 100 and sums["rebuilds"] > 10 and sums["frames"] > 500, sums
