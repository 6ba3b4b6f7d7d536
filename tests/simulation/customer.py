"""Uses an NVMe tier as the store does, and keeps books of what it was promised."""

from __future__ import annotations

from random import Random

from simulation.machine import CLASSES, MAC_KEY, STAMPS, Frame, Machine
from tiering.errors import TierUnavailable
from tiering.frame import HEADER_BYTES
from tiering.nvme.slab_recovery import Found
from tiering.nvme.tier import NvmeTier
from tiering.slots import FrameState
from tiering.tier import place_of

Name = tuple[int, bytes, int]
"""Part, key and generation."""
SEED = 20261121


class Customer:
    """What was acknowledged is there after every start, and what was given up and settled is not."""

    def __init__(self, machine: Machine, seed: int = SEED) -> None:
        self.machine = machine
        self.random = Random(seed)
        self.generation = 0
        self.frames: dict[Name, Frame] = {}
        self.owed: dict[Name, int] = {}  # acknowledged; where
        self.leaving: set[Name] = set()  # given up or not acknowledged: may be there or not
        self.gone: set[Name] = set()  # given up, and settled
        self.bad: set[Name] = set()  # quarantined
        self.index_lost = False  # and with it what was quarantined: headers do not say so

    @property
    def tier(self) -> NvmeTier:
        assert self.machine.tier is not None
        return self.machine.tier

    def frame(self, part: int = 0) -> Frame:
        self.generation += 1
        key = self.random.randrange(60).to_bytes(32, "big")
        frame = Frame(part, key, self.generation, self.random)
        self.frames[frame.name] = frame
        return frame

    def store(self, part: int, count: int) -> list[Name]:
        """Raises what the tier raises, once the places are given back."""
        if self.tier.free_slots(CLASSES[part]) < count:
            self.tier.new_slab(STAMPS[part], MAC_KEY, b"about")
        places = self.tier.reserve(CLASSES[part], count)
        try:
            return self.fill(part, places)
        except TierUnavailable:
            self.tier.abort(places)
            raise

    def evict(self, names: list[Name]) -> None:
        places = [self.owed.pop(name) for name in names]
        self.leaving.update(names)
        self.tier.delete(places)

    def claim(self, names: list[Name]) -> list[int]:
        """Evict frames for others that are to stand there."""
        places = [self.owed.pop(name) for name in names]
        self.leaving.update(names)
        self.tier.delete(places, claim=True)
        self.tier.await_claims(places)
        return places

    def fill(self, part: int, places: list[int], good: int | None = None) -> list[Name]:
        """New frames at these places; of which the first so many are found to be good while they are written."""
        frames = [self.frame(part) for _ in places]
        self.leaving.update(frame.name for frame in frames)
        chosen = places[:good]
        meanwhile = (lambda: chosen) if good is not None else None
        self.tier.commit(places, [memoryview(frame.bytes) for frame in frames], meanwhile)
        self.tier.abort(places[len(chosen) :])
        for frame, place in zip(frames, chosen, strict=False):
            self.leaving.discard(frame.name)
            self.owed[frame.name] = place
        return [frame.name for frame in frames[: len(chosen)]]

    def quarantine(self, name: Name) -> int:
        place = self.owed.pop(name)
        self.bad.add(name)
        self.leaving.add(name)
        self.tier.quarantine([place])
        return place

    def settle(self) -> None:
        self.tier.settle()
        self.has_settled()

    def has_settled(self) -> None:
        """What was given up is durably so, and may never be back."""
        self.gone |= self.leaving
        self.leaving.clear()

    def some(self, count: int) -> list[Name]:
        return self.random.sample(sorted(self.owed), min(count, len(self.owed)))

    def compare(self, found: list[Found] | None = None) -> None:
        """Read all that is owed; after a start, `found` is all that there is."""
        if found is not None:
            there: dict[Name, int] = {}
            for slab in found:
                for place, entry in zip(slab.places, slab.entries, strict=True):
                    name = (slab.header.slot_class.part, entry["key"].tobytes(), int(entry["generation"]))
                    if name in self.bad and (self.index_lost or name not in self.gone):
                        self.tier.quarantine([place])
                        continue
                    assert name not in self.gone, "given up, and back"
                    assert name not in there and (name in self.owed or name in self.leaving)
                    if name in self.owed or self.read(place) == self.frames[name].bytes:
                        there[name] = place
                    else:  # cut while it was written, and the index that knew so is gone
                        self.bad.add(name)
                        self.tier.quarantine([place])
            assert self.owed.keys() <= there.keys(), "acknowledged, and not there"
            self.gone |= self.leaving - there.keys()
            self.owed = there
            self.leaving.clear()
        for name, place in self.owed.items():
            assert self.read(place) == self.frames[name].bytes
        self.tier.check()

    def read(self, place: int) -> bytes:
        buffer = bytearray(HEADER_BYTES + 4096)
        self.tier.read(place, memoryview(buffer))
        return bytes(buffer)

    def restart(self) -> NvmeTier:
        self.machine.stop()
        self.compare(self.machine.start())
        return self.tier

    def crash(self, seed: int = 0) -> NvmeTier:
        self.machine.lose_power(Random(seed))
        self.compare(self.machine.start())
        return self.tier

    def no_other_header_is_valid(self) -> None:
        """Whatever an index that is built again would list is owed, or was quarantined."""
        for slab in self.tier._ledger.pieces.values():
            entries = self.tier._records.headers(slab, range(slab.slots.capacity))
            for slot in entries["state"].nonzero()[0].tolist():
                name = (slab.slot_class.part, entries["key"][slot].tobytes(), int(entries["generation"][slot]))
                bad = name in self.bad or slab.slots.states[slot] == FrameState.QUARANTINED
                assert bad or self.owed.get(name) == place_of(slab.number, slot), f"{name} could be taken for a frame"
