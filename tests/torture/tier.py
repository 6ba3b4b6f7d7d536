"""A bare NVMe tier on a real directory, in a process that is killed at random moments.

The child stores, evicts and settles; the parent keeps a journal of what it heard and compares what is there afterwards.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from simulation.machine import CLASSES, MAC_KEY, PAYLOAD_BYTES, SLAB_BYTES, STAMPS, Frame, Machine
from tiering.errors import TierFull
from tiering.frame import HEADER_BYTES
from tiering.nvme.frame_index import FrameIndex
from tiering.nvme.lmdb_index import discard, open_index
from tiering.nvme.slab_files import DirectFiles
from tiering.nvme.slab_recovery import Found
from torture.nursery import Nursery, Voice

KEYS = 60
THREADS = 2
BUDGET_BYTES = 6 * SLAB_BYTES
LONGEST_LIFE_SECONDS = 0.25
READY_WITHIN_SECONDS = 60

Name = tuple[int, bytes, int]
"""Part, key and generation."""


class RealMachine(Machine):
    """The tier on a real directory: direct I/O and LMDB."""

    def __init__(self, directory: Path) -> None:
        super().__init__(BUDGET_BYTES)
        self.directory = directory
        self.switch_on()

    def switch_on(self) -> None:
        """A process begins to use the directory."""
        self.files = DirectFiles(self.directory / "slabs")  # type: ignore[assignment]

    def open(self, *, clean: bool) -> FrameIndex:
        self.index = open_index(self.directory / "index", 1 << 20, clean=clean)  # type: ignore[assignment]
        return self.index

    def discard(self) -> None:
        discard(self.directory / "index")

    def stop(self) -> None:
        assert self.tier is not None
        self.tier.close()
        self.tier = None
        self.switch_on()

    def vanish(self) -> None:
        """As if the process were gone: nothing is finished, and the stamp says so."""
        self.tier = None
        self.index.close()
        self.files.close()
        self.switch_on()

    def new_uid(self) -> bytes:
        return os.urandom(16)


def frame_of(name: Name) -> Frame:
    """The one frame of that name: whoever finds it knows what its bytes must be."""
    part, key, generation = name
    return Frame(part, key, generation, Random(f"{part} {key.hex()} {generation}"))


# The child ------------------------------------------------------------------------------------------------------------


def live(say: Voice, directory: str, seed: int) -> None:
    """Until it is killed."""
    Worker(Path(directory), seed, say).live()


class Worker:
    """Stores, evicts and settles at random, and says so, one short line each.

    ready 0               what was there is taken in
    begin THREAD NAME     a frame is about to be stored
    stored THREAD NAME    it is acknowledged
    evict THREAD NAME     is about to be given up
    settled THREAD        what this thread gave up before may never be back
    """

    def __init__(self, directory: Path, seed: int, say: Voice) -> None:
        self.seed, self.say_line = seed, say
        self.machine = RealMachine(directory)
        self.lock = threading.Lock()  # as a store's: it guards what is whose, and is not held while disks work
        self.generation = 0
        self.free: list[tuple[Name, int]] = []

    def live(self) -> None:
        for slab in self.machine.start():
            for place, name in zip(slab.places, names_of(slab), strict=True):
                self.free.append((name, place))
        assert self.machine.tier is not None
        self.generation = self.machine.tier.session << 32
        self.say("ready", 0)
        threads = [threading.Thread(target=self.work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def work(self, thread: int) -> None:
        random = Random(f"{self.seed} {thread}")
        try:
            while True:
                action = random.random()
                if action < 0.5:
                    self.store(thread, random)
                elif action < 0.85:
                    self.evict(thread, random, random.randrange(1, 8))
                else:
                    self.settle(thread)
        except BaseException:
            self.say_line.fault()

    def store(self, thread: int, random: Random) -> None:
        tier = self.machine.tier
        assert tier is not None
        part, count = random.randrange(2), random.randrange(1, 6)
        try:
            with self.lock:
                if tier.free_slots(CLASSES[part]) < count:
                    tier.new_slab(STAMPS[part], MAC_KEY, b"about")
        except TierFull:
            self.evict(thread, random, 20)
            self.settle(thread)
        places = tier.reserve(CLASSES[part], count)
        names = []
        for _ in places:
            with self.lock:
                self.generation += 1
                names.append((part, random.randrange(KEYS).to_bytes(32, "big"), self.generation))
        for name in names:
            self.say("begin", thread, name)
        tier.commit(places, [memoryview(frame_of(name).bytes) for name in names])
        for name in names:
            self.say("stored", thread, name)
        with self.lock:
            self.free += zip(names, places, strict=True)

    def evict(self, thread: int, random: Random, count: int) -> None:
        tier = self.machine.tier
        assert tier is not None
        with self.lock:
            random.shuffle(self.free)
            chosen = [self.free.pop() for _ in range(min(count, len(self.free)))]
        for name, _ in chosen:
            self.say("evict", thread, name)
        tier.delete([place for _, place in chosen])

    def settle(self, thread: int) -> None:
        assert self.machine.tier is not None
        self.machine.tier.settle()
        self.say("settled", thread)

    def say(self, what: str, thread: int, name: Name | None = None) -> None:
        self.say_line(what, thread, *(() if name is None else (name[0], name[1].hex(), name[2])))


def names_of(slab: Found) -> list[Name]:
    part = slab.header.slot_class.part
    return [(part, entry["key"].tobytes(), int(entry["generation"])) for entry in slab.entries]


# The parent -----------------------------------------------------------------------------------------------------------


class Witness:
    """What the child was heard to say, in a journal that is durable before it counts, and what follows from it."""

    def __init__(self, directory: Path, nursery: Nursery, seed: int) -> None:
        self.directory = directory
        self.nursery = nursery
        self.random = Random(seed)
        self.seed = seed
        self.owed: set[Name] = set()  # acknowledged and not given up
        self.leaving: dict[Name, int] = {}  # may be there or not; by the thread that gave it up
        self.begun: set[Name] = set()  # may be there or not
        self.gone: set[Name] = set()  # given up, and settled
        self.counts: Counter[str] = Counter()
        self.journal = os.open(directory / "journal", os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)

    def run(self, kills: int, report: Callable[[int], None] | None = None) -> dict[str, int]:
        try:
            for number in range(kills):
                self.let_one_live(number)
                self.compare()
                if report is not None:
                    report(number + 1)
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}: {error}") from error
        finally:
            os.close(self.journal)
        return dict(self.counts)

    def let_one_live(self, number: int) -> None:
        child = self.nursery.start(directory=str(self.directory), seed=self.seed * 1_000_003 + number)
        # One in eight dies while it is being born or opens; the others some time after they began to work.
        if self.random.random() < 0.125:
            child.listen(time.monotonic() + self.random.random() * 0.1)
        else:
            is_ready = child.listen(time.monotonic() + READY_WITHIN_SECONDS, b"ready")
            assert is_ready, "the child does not open the directory"
            child.listen(time.monotonic() + self.random.random() * LONGEST_LIFE_SECONDS)
        child.kill()
        status = self.nursery.bury(child)
        os.write(self.journal, child.heard)
        os.fsync(self.journal)
        for line in child.lines():
            assert not line.startswith("fault"), line
            self.note(line.split())
        assert status == -signal.SIGKILL, f"the child ended by itself, with status {status}"
        self.counts["kills"] += 1

    def note(self, words: list[str]) -> None:
        what, thread = words[0], int(words[1])
        if what == "settled":
            for name in [name for name, by in self.leaving.items() if by == thread]:
                del self.leaving[name]
                self.gone.add(name)
            self.counts["settled"] += 1
        if len(words) < 5:
            return
        name = int(words[2]), bytes.fromhex(words[3]), int(words[4])
        if what == "begin":
            assert name not in self.begun | self.owed | self.gone, "a generation was used twice"
            self.begun.add(name)
        elif what == "stored":
            self.begun.remove(name)
            self.owed.add(name)
            self.counts["stored"] += 1
        elif what == "evict":
            self.owed.remove(name)
            self.leaving[name] = thread
            self.counts["evicted"] += 1

    def compare(self) -> None:
        machine = RealMachine(self.directory)
        if self.random.random() < 0.2:
            machine.discard()
        found = machine.start()
        tier = machine.tier
        assert tier is not None and not tier.left_alone, "a slab cannot be used any more"
        self.counts["rebuilds"] += tier.rebuilds
        there: set[Name] = set()
        for slab in found:
            for place, name in zip(slab.places, names_of(slab), strict=True):
                assert name not in self.gone, f"{name} was given up, and is back"
                assert name in self.owed or name in self.leaving or name in self.begun, f"{name} was never stored"
                frame = bytearray(HEADER_BYTES + PAYLOAD_BYTES)
                tier.read(place, memoryview(frame))
                if bytes(frame) != frame_of(name).bytes:
                    assert name in self.begun and machine.read(place) is None, f"{name} has other bytes"
                    tier.quarantine([place])
                    continue
                assert name not in there, "a frame stands in two places"
                there.add(name)
        missing = self.owed - there
        assert not missing, f"{len(missing)} acknowledged frames are not there, {min(missing)} among them"
        tier.settle()
        tier.check()
        self.gone |= (self.leaving.keys() | self.begun) - there
        self.owed = there
        self.leaving.clear()
        self.begun.clear()
        self.counts["frames"] += len(there)
        if self.random.random() < 0.5:
            machine.stop()
        else:
            machine.vanish()
        machine.files.close()


def kill(kills: int, seed: int, report: Callable[[int], None] | None = None) -> dict[str, int]:
    """That many children, each killed in the middle of its work on the one directory; what happened."""
    with tempfile.TemporaryDirectory() as directory, Nursery(__name__) as nursery:
        return Witness(Path(directory), nursery, seed).run(kills, report)
