"""The index file of a closed directory is damaged: cut, overwritten, swapped, or one of its bits is turned round.

Each time another process opens the directory, takes everything in, reads and verifies it, goes on to use it, and opens
it once more. It must live; it must offer no frame as readable that does not hold what was stored; and it must miss none
that was acknowledged, for the slabs are whole.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from simulation.customer import Customer, Name
from simulation.machine import CLASSES, Frame
from tiering.errors import TierFull, TierUnavailable
from tiering.nvme.lmdb_index import DATA_FILE, DIGEST_FILE, LOCK_FILE
from tiering.nvme.slab_recovery import Found
from tiering.nvme.tier import NvmeTier
from torture.tier import RealMachine

SEED = 20261123
PAGE_BYTES = 4096
FLIPS = 120
LIVED, FAILED = 0, 1
Damage = Callable[[Path], object]
"""What is done to a directory."""


class Stock:
    """A directory that was left in order or in the middle of its life, and what it owes."""

    def __init__(self, directory: Path, seed: int, *, clean: bool) -> None:
        self.directory = directory
        self.keep: object = None
        self._as_it_was = directory.with_name(directory.name + " as it was")
        machine = RealMachine(directory)
        self.customer = Customer(machine, seed)
        machine.start()
        self._live()
        machine.stop()
        self.older_index = (directory / "index" / DATA_FILE).read_bytes()
        machine.start()
        self._live()
        if clean:
            machine.stop()
        else:
            self.customer.evict(self.customer.some(3))  # not durably
            machine.vanish()
        machine.files.close()
        self.index = (directory / "index" / DATA_FILE).read_bytes()
        shutil.copytree(directory, self._as_it_was)

    def _live(self) -> None:
        for step in range(40):
            with suppress(TierFull):
                self.customer.store(self.customer.random.randrange(2), 4)
            if step % 4 == 3:
                self.customer.evict(self.customer.some(5))
                self.customer.settle()

    def restore(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(self._as_it_was, self.directory)

    # In the other process

    def open(self, *, may_miss: bool) -> Counter[str]:
        """Changes nothing but the index and the stamp."""
        counts: Counter[str] = Counter()
        self._start(RealMachine(self.directory), counts, may_miss=may_miss)
        return counts

    def _start(self, machine: RealMachine, counts: Counter[str], *, may_miss: bool) -> NvmeTier:
        self._check(machine, machine.start(), counts, may_miss=may_miss)
        assert machine.tier is not None
        counts["rebuilds"] = machine.tier.rebuilds
        return machine.tier

    def open_and_use(self, *, may_miss: bool) -> Counter[str]:
        counts: Counter[str] = Counter()
        machine = RealMachine(self.directory)
        tier = self._start(machine, counts, may_miss=may_miss)
        tier.settle()
        tier.check()
        new: dict[Name, Frame] = {}
        for part in range(2):
            places = tier.reserve(CLASSES[part], 3)
            frames = [Frame(part, bytes([at]) * 32, 1 << 40 | at, Random(at)) for at in range(len(places))]
            tier.commit(places, [memoryview(frame.bytes) for frame in frames])
            new.update((frame.name, frame) for frame in frames)
        machine.stop()
        found = machine.start()
        there = self._check(machine, found, counts, new, may_miss=may_miss)
        assert new.keys() <= there, "what was stored after the damage is gone"
        machine.stop()
        counts["went on"] += 1
        return counts

    def _check(
        self,
        machine: RealMachine,
        found: list[Found],
        counts: Counter[str],
        new: dict[Name, Frame] | None = None,
        *,
        may_miss: bool,
    ) -> set[Name]:
        tier, there = machine.tier, set()
        assert tier is not None and not tier.left_alone
        for slab in found:
            part = slab.header.slot_class.part
            for place, entry in zip(slab.places, slab.entries, strict=True):
                name = (part, entry["key"].tobytes(), int(entry["generation"]))
                frame = bytearray(slab.header.slot_class.frame_bytes)
                tier.read(place, memoryview(frame))
                known = self.customer.frames.get(name) or (new or {}).get(name)
                if known is None or frame != known.bytes:
                    header = machine.read(place)
                    is_found_out = header is None or (header.stamp.part, header.prefix_key, header.generation) != name
                    assert is_found_out and may_miss, f"{name} is offered at {place}, where something else stands"
                    counts["offered, and found out by its reader"] += 1
                    tier.quarantine([place])
                    continue
                assert name not in there, f"{name} is there twice"
                there.add(name)
        missing = self.customer.owed.keys() - there
        assert may_miss or not missing, f"{len(missing)} acknowledged frames are gone"
        back = there - self.customer.owed.keys() - self.customer.leaving - (new or {}).keys()
        assert may_miss or not back, f"{len(back)} frames are back that were given up"
        counts["missing"] += len(missing)
        return there


def in_another_process(work: Callable[[], Counter[str]]) -> tuple[int, str]:
    """How it ended (its exit status, or minus the signal that ended it), and what it said."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        status = FAILED
        try:
            os.write(into, repr(dict(work())).encode())
            status = LIVED
        except BaseException:
            os.write(into, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(status)
    os.close(into)
    heard = b""
    while piece := os.read(out, 1 << 16):
        heard += piece
    os.close(out)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), heard.decode()


@functools.cache
def stock(*, clean: bool) -> Stock:
    """In memory where that can be: what is waited for here is never the disk."""
    memory = "/dev/shm"
    parent = tempfile.TemporaryDirectory(prefix="kv-index-", dir=memory if os.access(memory, os.W_OK) else None)
    made = Stock(Path(parent.name) / "kv", SEED, clean=clean)
    made.keep = parent
    return made


def attempt(stock: Stock, damage: Damage, what: str, *, may_miss: bool = False, use: bool = True) -> Counter[str]:
    """use: the process goes on to use the directory."""
    stock.restore()
    damage(stock.directory / "index")
    work = stock.open_and_use if use else stock.open
    status, said = in_another_process(lambda: work(may_miss=may_miss))
    assert status >= 0, f"{what}: the process was ended by signal {-status}"
    assert status == LIVED, f"{what}: {said}"
    return Counter(eval(said))


def flipped(stock: Stock, bit: int) -> Damage:
    def flip(index: Path) -> None:
        damaged = bytearray(stock.index)
        damaged[bit // 8] ^= 1 << bit % 8
        (index / DATA_FILE).write_bytes(damaged)

    return flip


def replaced(contents: bytes) -> Damage:
    return lambda index: (index / DATA_FILE).write_bytes(contents)


def index_damage(count: int, seed: int, report: Callable[[int], None] | None = None) -> dict[str, int]:
    """That many single bits turned round, most of them in a file that was closed in order; what became of them."""
    counts: Counter[str] = Counter()
    for number in range(count):
        random = Random(f"{seed} {number}")
        chosen = stock(clean=random.random() < 0.95)
        bit = random.randrange(len(chosen.index) * 8)
        what = f"seed {seed}, flip {number}, bit {bit}"
        counts.update(attempt(chosen, flipped(chosen, bit), what, use=number % 8 == 0))
        counts["flips"] += 1
        if report is not None:
            report(number + 1)
    return dict(counts)


# Tests ----------------------------------------------------------------------------------------------------------------


def test_a_directory_that_nobody_damaged() -> None:
    for clean in (True, False):
        counts = attempt(stock(clean=clean), lambda index: None, f"undamaged, clean={clean}")
        assert not counts["rebuilds"] and not counts["missing"]


def test_single_bits() -> None:
    print(f"seed {SEED}")
    counts = index_damage(FLIPS, SEED)
    print(counts)
    assert counts["flips"] == FLIPS and counts["rebuilds"] > FLIPS // 2


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "left"])
def test_every_length(clean: bool) -> None:
    chosen, random = stock(clean=clean), Random(SEED)
    size = len(chosen.index)
    lengths = {*range(0, size, PAGE_BYTES), *(random.randrange(size) for _ in range(10)), 1, size - 1}
    for length in sorted(lengths):
        what = f"cut to {length} of {size} bytes, clean={clean}"
        counts = attempt(chosen, replaced(chosen.index[:length]), what, use=length % 3 == 0)
        assert counts["rebuilds"] or (not clean and length >= size - PAGE_BYTES), "the last page is a free one"
    # LMDB may have made the file longer than it needs.
    attempt(chosen, replaced(chosen.index + bytes(3 * PAGE_BYTES)), "made longer")


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "left"])
def test_other_contents(clean: bool) -> None:
    chosen, random = stock(clean=clean), Random(SEED)
    size = len(chosen.index)
    for what, contents in {
        "noise": random.randbytes(size),
        "zeros": bytes(size),
        "noise behind the meta pages": chosen.index[: 2 * PAGE_BYTES] + random.randbytes(size - 2 * PAGE_BYTES),
        "zeros behind the meta pages": chosen.index[: 2 * PAGE_BYTES] + bytes(size - 2 * PAGE_BYTES),
        "the index of another directory": stock(clean=not clean).index,
    }.items():
        assert attempt(chosen, replaced(contents), f"{what}, clean={clean}")["rebuilds"]
    for page in range(0, size, PAGE_BYTES):
        contents = chosen.index[:page] + random.randbytes(PAGE_BYTES) + chosen.index[page + PAGE_BYTES :]
        if clean or page < 3 * PAGE_BYTES or page % (4 * PAGE_BYTES) == 0:
            attempt(chosen, replaced(contents), f"noise in the page at {page}, clean={clean}", use=False)


def test_an_older_copy_of_the_index() -> None:
    """After an end in order the stamp knows better. After a crash it knows how the index was when the session began:
    an older copy than that is thrown away; one of that very moment knows nothing of what the session did. What it
    offers then is found out by whoever reads it, and what it does not know of is missed."""
    closed = stock(clean=True)
    assert attempt(closed, replaced(closed.older_index), "an older copy")["rebuilds"]

    def with_its_digest(index: Path) -> None:
        replaced(closed.older_index)(index)
        (index / DIGEST_FILE).unlink()

    assert attempt(closed, with_its_digest, "an older copy without a digest")["rebuilds"]
    left = stock(clean=False)
    counts = attempt(left, replaced(left.older_index), "an older copy after a crash", may_miss=True)
    assert counts["missing"] and counts["offered, and found out by its reader"]


def test_files_that_are_not_what_they_should_be() -> None:
    chosen = stock(clean=True)

    def without(name: str) -> Damage:
        return lambda index: (index / name).unlink()

    def noise(name: str, size: int) -> Damage:
        return lambda index: (index / name).write_bytes(Random(SEED).randbytes(size))

    def a_pipe(index: Path) -> None:
        (index / DATA_FILE).unlink()
        os.mkfifo(index / DATA_FILE)

    def a_link(index: Path) -> None:
        (index / DATA_FILE).rename(index / "elsewhere")
        (index / DATA_FILE).symlink_to(index / "elsewhere")

    for damage, what, rebuilds in (
        (without(LOCK_FILE), "no lock file", False),
        (noise(LOCK_FILE, 100), "a lock file of noise", False),
        (noise(LOCK_FILE, 1 << 16), "a long lock file of noise", False),
        (without(DATA_FILE), "no file", True),
        (without(DIGEST_FILE), "no digest", False),
        (noise(DIGEST_FILE, 48), "a digest of noise", False),
        (shutil.rmtree, "no folder", True),
        (a_pipe, "a pipe", True),
        (a_link, "a link", True),
    ):
        assert bool(attempt(chosen, damage, what)["rebuilds"]) is rebuilds, what


def test_an_index_that_may_not_be_read_is_not_thrown_away() -> None:
    chosen = stock(clean=True)
    chosen.restore()
    (chosen.directory / "index" / DATA_FILE).chmod(0)
    nobody = 65534
    if os.getuid() == 0:
        chosen.directory.parent.chmod(0o755)
        for path in (chosen.directory, *chosen.directory.rglob("*")):
            os.chown(path, nobody, nobody)

    def as_nobody() -> Counter[str]:
        if os.getuid() == 0:
            os.setgid(nobody)
            os.setuid(nobody)
        with pytest.raises(TierUnavailable, match="Permission denied"):
            RealMachine(chosen.directory).start()
        return Counter()

    status, said = in_another_process(as_nobody)
    assert status == LIVED, said
    assert (chosen.directory / "index" / DATA_FILE).stat().st_size == len(chosen.index)
