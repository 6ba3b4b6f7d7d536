"""The NVMe tier beyond its contract: batches of many threads, disks that fail, starts of every kind, slabs in doubt.

Most of it runs on a simulated disk, where a fault can be planned and a loss of power shows what is durable; what
depends on the kernel or on LMDB runs on a real directory as well. A customer keeps the books: what was acknowledged
is there after every restart, and what was given up and settled is not.
"""

from __future__ import annotations

import errno
import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from simulation.customer import Customer, Name
from simulation.disk import SimulatedFiles
from simulation.index import SimulatedIndex
from simulation.machine import CLASSES, MAC_KEY, SLAB_BYTES, STAMPS, Frame, Keys, Machine, OneKey
from simulation.power import PowerLoss
from tiering.errors import BlockMissing, IndexDoubtful, TierError, TierFull, TierUnavailable
from tiering.frame import Stamp, digest
from tiering.nvme.slab import (
    META,
    SLOTS_PER_RECORD,
    STAMP_PAGES,
    OtherFormat,
    StoreStamp,
    doubt_key,
    latest_stamp,
    open_record,
    record_key,
    slab_name,
    split_entries,
)
from tiering.nvme.tier import NvmeTier
from tiering.slab_header import PAGE_BYTES, SlabSizes
from tiering.slots import FrameState
from tiering.tier import extent_of, slot_of
from torture.tier import RealMachine
from waiting import together

SLOTS = 40


def io_error(code: int = errno.EIO) -> OSError:
    return OSError(code, "the disk said no")


@pytest.fixture(params=["simulated", "real"])
def customer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Customer]:
    machine = Machine() if request.param == "simulated" else RealMachine(tmp_path / "store")
    yield opened(machine)
    if machine.tier is not None:
        machine.tier.close()


def opened(machine: Machine | None = None) -> Customer:
    customer = Customer(machine if machine is not None else Machine())
    assert customer.machine.start() == []
    return customer


def stocked(customer: Customer | None = None) -> Customer:
    """Three slabs, frames in the first and the last run of slots, some places free again, one quarantined."""
    customer = customer or opened()
    customer.store(0, 36)
    customer.store(1, 5)
    customer.store(0, 10)
    customer.evict(customer.some(12))
    customer.quarantine(customer.some(1)[0])
    customer.settle()
    customer.store(0, 3)
    return customer


class SameMachine(Machine):
    """What it discards is emptied, so that faults planned for its index stay planned."""

    def discard(self) -> None:
        self.index._durable, self.index._pending, self.index._seen = {}, [], {}


def twin(customer: Customer) -> Customer:
    """The same disk and the same books once more, the tier not started."""
    other = Customer(customer.machine.copy(SameMachine))
    other.generation, other.frames = customer.generation, dict(customer.frames)
    other.owed, other.leaving = dict(customer.owed), set(customer.leaving)
    other.gone, other.bad = set(customer.gone), set(customer.bad)
    return other


# Batches --------------------------------------------------------------------------------------------------------------


class CountedIndex(SimulatedIndex):
    """Its `sync` takes a moment, as on a disk, and is counted."""

    syncs = 0

    def sync(self) -> None:
        time.sleep(0.002)
        super().sync()
        self.syncs += 1


class SlowMachine(Machine):
    def discard(self) -> None:
        self.index = CountedIndex(self.power)


def durable_entry(machine: Machine, tier: NvmeTier, place: int) -> Any:
    """What the index would say of a place after a loss of power at this moment."""
    slab = tier._ledger.pieces[extent_of(place)]
    record, at = divmod(slot_of(place), SLOTS_PER_RECORD)
    value = machine.index._durable[record_key(slab.number, record)]
    return split_entries(open_record(slab.header, record, value, MAC_KEY))[at]


def test_many_threads_share_their_syncs_and_nobody_is_answered_early() -> None:
    machine = SlowMachine(8 * SLAB_BYTES)
    machine.discard()
    customer = opened(machine)
    for part in (0, 1, 0, 1):
        customer.tier.new_slab(STAMPS[part], MAC_KEY, b"")
    index = machine.index
    assert isinstance(index, CountedIndex)
    threads, rounds = 12, 4
    before = index.syncs

    def work(number: int) -> None:
        random = Random(number)
        mine: list[int] = []
        for round_number in range(rounds):
            part = number % 2
            places = customer.tier.reserve(CLASSES[part], 2)
            frames = [Frame(part, random.randbytes(32), number << 8 | round_number, random) for _ in places]
            customer.tier.commit(places, [frame.bytes for frame in frames])
            for place, frame in zip(places, frames, strict=True):
                entry = durable_entry(machine, customer.tier, place)
                assert entry["key"].tobytes() == frame.key and entry["state"] == 1
                slab = customer.tier._ledger.pieces[extent_of(place)]
                offset = slab.header.offset(slot_of(place))
                assert machine.files._slabs[slab.name].durable[offset : offset + len(frame.bytes)] == frame.bytes
                assert customer.read(place) == frame.bytes
            mine += places
            if round_number % 2:
                customer.tier.delete([mine.pop(0)])
        customer.tier.settle()

    together(work, threads)
    commits = threads * rounds
    # Alone each commit takes two syncs of the index, and each eviction two more.
    assert index.syncs - before < commits, f"{index.syncs - before} syncs for {commits} commits"
    customer.tier.check()
    usage = customer.tier.usage()
    assert (usage.used, usage.deleting, usage.reserved) == (threads * (2 * rounds - rounds // 2), 0, 0)


def test_power_is_lost_under_many_threads() -> None:
    acknowledged = 0
    for last in range(3, 150, 3):
        customer = opened()
        for part in (0, 1):
            customer.tier.new_slab(STAMPS[part], MAC_KEY, b"")
        tier, machine = customer.tier, customer.machine
        machine.power.back(last)

        def work(number: int, customer: Customer = customer, tier: NvmeTier = tier) -> None:
            random = Random(number)
            mine: list[Name] = []
            for round_number in range(6):
                frame = Frame(number % 2, random.randbytes(32), number << 8 | round_number, random)
                customer.frames[frame.name] = frame
                customer.leaving.add(frame.name)
                (place,) = tier.reserve(CLASSES[frame.part], 1)
                try:
                    tier.commit([place], [frame.bytes])
                    customer.owed[frame.name] = place
                    customer.leaving.discard(frame.name)
                    mine.append(frame.name)
                    if round_number % 3 == 2:
                        given_up = mine.pop(0)
                        customer.leaving.add(given_up)
                        tier.delete([customer.owed.pop(given_up)])
                        tier.settle()
                        customer.leaving.discard(given_up)
                        customer.gone.add(given_up)
                except (PowerLoss, TierUnavailable):
                    return

        together(work, 5)
        acknowledged += len(customer.owed)
        customer.crash(last)
        customer.settle()
        customer.restart()
    assert acknowledged > 100


class Gate(SimulatedFiles):
    """Lets a chosen write, or the next sync, pass and then holds its caller until it is told otherwise."""

    def __init__(self, power: Any) -> None:
        super().__init__(power)
        self.holds: bytes | None = None
        self.holds_sync = False
        self.is_held, self.may_go = threading.Event(), threading.Event()

    def write(self, name: str, offset: int, data: memoryview) -> None:
        super().write(name, offset, data)
        if self.holds is not None and data.tobytes() == self.holds:
            self.is_held.set()
            assert self.may_go.wait(10)

    def sync(self, name: str) -> None:
        super().sync(name)
        if self.holds_sync:
            self.holds_sync = False
            self.is_held.set()
            assert self.may_go.wait(10)


def test_a_sync_that_fails_for_one_fails_all_that_were_written_before_it() -> None:
    # The kernel reports a failed write-back once: the next sync of the slab succeeds and covers nothing.
    machine = Machine()
    machine.files = gate = Gate(machine.power)
    customer = opened(machine)
    (given_up,) = customer.store(0, 1)
    frame = customer.frame()
    gate.holds = frame.bytes
    outcome: list[str] = []

    def commit() -> None:
        places = customer.tier.reserve(CLASSES[0], 1)
        try:
            customer.tier.commit(places, [frame.bytes])
            outcome.append("acknowledged")
        except TierUnavailable:
            customer.tier.abort(places)
            outcome.append("refused")

    thread = threading.Thread(target=commit)
    thread.start()
    assert gate.is_held.wait(10)
    customer.evict([given_up])
    gate.fail("sync", 1, io_error())
    with pytest.raises(TierUnavailable):
        customer.settle()
    customer.settle()
    gate.may_go.set()
    thread.join()
    assert outcome == ["refused"]
    customer.leaving.add(frame.name)
    customer.settle()
    assert customer.tier.usage().reserved == 0
    customer.crash()
    customer.store(0, 1)


def test_to_settle_is_to_wait_for_a_batch_of_others() -> None:
    # A batch that somebody else leads has taken up what was given up: until it is durable, nothing is.
    machine = Machine()
    machine.files = gate = Gate(machine.power)
    customer = opened(machine)
    (given_up,) = customer.store(0, 1)
    places, frame = customer.tier.reserve(CLASSES[0], 1), customer.frame()
    customer.leaving.add(frame.name)
    customer.tier.commit(places, [frame.bytes], lambda: [])  # written, and in doubt: only the batch is missing
    customer.tier.abort(places)
    customer.evict([given_up])
    gate.holds_sync = True
    leader = threading.Thread(target=lambda: customer.store(0, 1))
    leader.start()
    assert gate.is_held.wait(10)
    assert not customer.tier._commits._edits  # taken up
    is_settled = threading.Event()
    waiter = threading.Thread(target=lambda: (customer.tier.settle(), is_settled.set()))
    waiter.start()
    assert not is_settled.wait(0.2)
    gate.may_go.set()
    waiter.join()
    leader.join()
    usage = customer.tier.usage()
    assert is_settled.is_set() and usage.deleting == usage.reserved == 0
    customer.crash()


def test_the_tier_keeps_nothing_of_what_it_was_given() -> None:
    customer = opened()
    customer.tier.new_slab(STAMPS[0], MAC_KEY, b"")
    frames = [bytearray(customer.frame().bytes) for _ in range(3)]
    places = customer.tier.reserve(CLASSES[0], 3)
    customer.tier.commit(places, [memoryview(frame) for frame in frames])
    into = bytearray(len(frames[0]))
    customer.tier.read(places[0], memoryview(into))
    customer.machine.files.fail("write", 2, io_error())
    aborted = customer.tier.reserve(CLASSES[0], 3)
    with pytest.raises(TierUnavailable):
        customer.tier.commit(aborted, [memoryview(frame) for frame in frames])
    customer.tier.abort(aborted)
    gc.collect()  # the error has a traceback, and that has the frames
    for buffer in (*frames, into):
        buffer.append(0)  # a BufferError while anybody looks at it


# Disks that fail ------------------------------------------------------------------------------------------------------

Errand = Callable[[Customer], Any]
ERRANDS: list[Errand] = [
    lambda customer: customer.store(0, 3),
    lambda customer: customer.store(1, 2),
    lambda customer: customer.evict(customer.some(2)),
    lambda customer: customer.store(0, 4),
    lambda customer: customer.settle(),
    lambda customer: customer.evict(customer.some(2)),
    lambda customer: customer.store(1, 3),
    lambda customer: [customer.quarantine(name) for name in customer.some(1)],
    lambda customer: customer.store(0, SLOTS),
    lambda customer: customer.settle(),
    lambda customer: customer.evict([name for name, place in customer.owed.items() if extent_of(place) == 2]),
    lambda customer: customer.tier.retire(2),
    lambda customer: customer.store(1, 2),
]


def run_errands(customer: Customer) -> int:
    """All of them, whatever fails; how many did."""
    faults = 0
    for errand in ERRANDS:
        try:
            errand(customer)
        except (TierUnavailable, TierFull):
            faults += 1
        except (AssertionError, KeyError):
            # A slab that could not be made cannot be emptied either.
            if errand is not ERRANDS[-2] or 2 in customer.tier._ledger.pieces:
                raise
    return faults


def failing_calls() -> list[Any]:
    errors: list[tuple[str, BaseException]] = [
        ("write", io_error()),
        ("write", io_error(errno.ENOSPC)),
        ("sync", io_error()),
        ("create", io_error(errno.ENOSPC)),
        ("remove", io_error()),
        ("read", io_error()),
        ("get", IndexDoubtful("a page is damaged")),
        ("apply", TierFull("the index cannot grow")),
        ("apply", TierUnavailable("no space left")),
        ("sync of the index", IndexDoubtful("it cannot be written")),
    ]
    return [pytest.param(call, error, id=f"{call}, {error.args[0]}") for call, error in errors]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error"), failing_calls())
def test_any_one_call_fails(call: str, error: Any) -> None:
    """Every call of a kind in its turn; afterwards the disk works again."""
    reached = 0
    for nth in range(1, 200):
        customer = opened()
        machine = customer.machine
        disk: Any = machine.files if isinstance(error, OSError) else machine.index
        disk.fail(call.removesuffix(" of the index"), nth, error)
        faults = run_errands(customer)
        reached += faults
        is_over = bool(disk._faults)
        disk._faults.clear()
        broken = customer.tier._commits._broken is not None
        assert not broken or call in ("apply", "sync of the index"), "only the index can leave a batch half done"
        if broken:
            nothing_is_acknowledged(customer)
        else:
            customer.settle()
            usage = customer.tier.usage()
            assert (usage.reserved, usage.deleting) == (0, 0), "what was given back is free again"
            assert usage.used == len(customer.owed)
            nothing_is_left_over(customer, retired=(2,))
        customer.compare()
        if nth % 2:
            customer.crash(nth)
        elif customer.restart().rebuilds:
            raise AssertionError("an index that failed once is not damaged")
        if broken:
            run_errands(customer)
        customer.settle()
        customer.no_other_header_is_valid()
        customer.restart()
        nothing_is_left_over(customer)
        if is_over:
            assert faults == 0
            break
    # Reading belongs to starts and repairs: see the tests of those.
    assert reached or call == "read", "no fault came up"


def nothing_is_acknowledged(customer: Customer) -> None:
    """After the index failed in the middle of a batch."""
    tier = customer.tier
    with pytest.raises(TierUnavailable):
        customer.store(0, 1)
    with pytest.raises(TierUnavailable):
        tier.settle()
    if customer.owed:
        customer.evict(customer.some(1))
        with pytest.raises(TierUnavailable):
            tier.settle()
    with pytest.raises(TierUnavailable):
        tier.settle()


def nothing_is_left_over(customer: Customer, retired: tuple[int, ...] = ()) -> None:
    """Every slab on the disk is one that is used or left alone, and the budget knows of it."""
    tier = customer.tier
    sizes = customer.machine.files.sizes()
    known = {slab.name for slab in tier._ledger.pieces.values()} | {one.name for one in tier.left_alone}
    assert sizes.keys() == known | {slab_name(number) for number in (0, *retired) if slab_name(number) in sizes}
    assert tier.usage().taken_bytes == sum(sizes.values()) - STAMP_PAGES * PAGE_BYTES


def test_a_header_that_cannot_be_zeroed_takes_no_commit_back() -> None:
    # The batch is durable by then: the frame is acknowledged, and the zeros are tried again.
    customer = opened()
    first = customer.store(0, 2)
    customer.evict(first[:1])
    for nth in (1, 3, 4):  # the second one is the frame's own
        customer.machine.files.fail("write", nth, io_error())
    (second,) = customer.store(0, 1)
    assert customer.read(customer.owed[second]) == customer.frames[second].bytes
    with pytest.raises(TierUnavailable):
        customer.settle()
    customer.settle()
    customer.crash()


@pytest.mark.parametrize("refusals", [1, 2, 5])
def test_an_index_that_has_no_room_for_a_batch_takes_the_next_one(refusals: int) -> None:
    customer = stocked()
    changes = customer.tier._records.changes
    customer.evict(customer.some(2))
    for nth in range(1, refusals + 1):
        customer.machine.index.fail("apply", nth, TierUnavailable("no space left"))
    for nth in range(refusals):
        with pytest.raises(TierUnavailable):
            customer.settle() if nth % 2 else customer.store(0, 2)
    assert customer.tier._records.changes == changes, "what was refused does not count"
    customer.store(0, 2)
    customer.settle()
    usage = customer.tier.usage()
    assert (usage.reserved, usage.deleting) == (0, 0), "what was given up or refused is free"
    customer.no_other_header_is_valid()
    customer.crash(refusals)
    assert not customer.restart().rebuilds


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["create", "write", "sync"])
def test_a_slab_that_cannot_be_made(call: Any, code: int) -> None:
    customer = opened()
    for nth in (1, 2):
        before = customer.tier.usage()
        customer.machine.files.fail(call, nth if call == "write" else 1, io_error(code))
        with pytest.raises(TierFull if code == errno.ENOSPC else TierUnavailable):
            customer.tier.new_slab(STAMPS[0], MAC_KEY, b"")
        assert customer.tier.usage() == before
        nothing_is_left_over(customer)
    customer.store(0, 1)
    customer.crash()


def test_a_slab_that_can_neither_be_made_nor_removed_counts() -> None:
    customer = opened(Machine(2 * SLAB_BYTES))
    customer.machine.files.fail("sync", 1, io_error())
    customer.machine.files.fail("remove", 1, io_error())
    with pytest.raises(TierUnavailable):
        customer.tier.new_slab(STAMPS[0], MAC_KEY, b"")
    assert customer.tier.usage().taken_bytes == SLAB_BYTES
    customer.store(0, 1)
    with pytest.raises(TierFull):
        customer.tier.new_slab(STAMPS[0], MAC_KEY, b"")
    customer.restart()


def test_frames_that_cannot_be_read_are_an_operating_fault() -> None:
    customer = stocked()
    place = next(iter(customer.owed.values()))
    customer.machine.files.fail("read", 1, io_error())
    with pytest.raises(TierUnavailable):
        customer.read(place)
    customer.compare()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("call", ["read", "write", "sync", "get", "apply", "iterate", "sync of the index"])
def test_any_one_call_of_a_start_fails(call: str, clean: bool) -> None:
    """The start raises what is documented, the next one finds everything."""
    original = stocked()
    if clean:
        original.settle()
        original.machine.stop()
    reached = 0
    for lost_index in (False, True):
        for nth in range(1, 400):
            customer = twin(original)
            machine = customer.machine
            if lost_index:
                machine.discard()
                customer.index_lost = True
            error = io_error() if call in ("read", "write", "sync") else IndexDoubtful("a page is damaged")
            disk: Any = machine.files if isinstance(error, OSError) else machine.index
            disk.fail(call.removesuffix(" of the index"), nth, error)
            try:
                found = machine.start()
            except TierUnavailable:
                reached += 1
                found = machine.start()
            is_over = bool(disk._faults)
            disk._faults.clear()
            customer.index_lost |= customer.tier.rebuilds
            if customer.tier.left_alone:
                reached += 1
                machine.stop()
                found = machine.start()
            customer.compare(found)
            if is_over:
                break
    assert reached or call in ("get", "iterate"), "no fault came up"


def test_a_full_budget() -> None:
    customer = opened(Machine(2 * SLAB_BYTES))
    customer.store(0, SLOTS)
    assert customer.tier.has_room()
    customer.store(1, 1)
    assert not customer.tier.has_room()
    before = customer.tier.usage()
    assert before.taken_bytes == before.budget_bytes == 2 * SLAB_BYTES
    with pytest.raises(TierFull):
        customer.store(0, 1)
    assert customer.tier.reserve(CLASSES[0], 1) == []
    assert customer.tier.usage() == before
    customer.evict(customer.some(50))
    customer.settle()
    assert len(customer.tier.reserve(CLASSES[0], SLOTS)) == SLOTS


# Starts ---------------------------------------------------------------------------------------------------------------


def not_loaded(machine: Machine, threads: int = 1) -> NvmeTier:
    sizes = SlabSizes(machine.budget_bytes, SLAB_BYTES)
    return NvmeTier(machine.files, machine, OneKey(), sizes, machine.new_uid, threads)


def stamp_of(files: Any) -> StoreStamp:
    """The newest stamp of a directory."""
    pages = [bytearray(PAGE_BYTES) for _ in range(STAMP_PAGES)]
    for number, page in enumerate(pages):
        files.read("00000000.slab", number * PAGE_BYTES, memoryview(page))
    stamp = latest_stamp([bytes(page) for page in pages])
    assert stamp is not None
    return stamp


@pytest.mark.parametrize("page", range(STAMP_PAGES))
@pytest.mark.parametrize("clean", [True, False])
def test_no_session_number_comes_twice_when_a_stamp_rots(page: int, clean: bool) -> None:
    customer = stocked()
    customer.restart()
    used = customer.tier.session.number
    if clean:
        customer.machine.stop()
    else:
        customer.machine.lose_power(Random(0))
    customer.machine.files.flip("00000000.slab", (page * PAGE_BYTES + 20) * 8)
    customer.compare(customer.machine.start())
    assert customer.tier.session.number > used


def test_what_was_condemned_stays_condemned(customer: Customer) -> None:
    names = customer.store(0, 3)
    place = customer.quarantine(names[0])
    with pytest.raises(BlockMissing):
        customer.read(place)
    customer.settle()
    for _ in range(2):
        customer.restart()
        assert customer.tier.usage().quarantined == 1
        with pytest.raises(BlockMissing):
            customer.read(place)
        assert place not in customer.tier.reserve(CLASSES[0], SLOTS)
        customer.machine.stop()
        customer.compare(customer.machine.start())


def test_a_load_says_how_far_it_is() -> None:
    customer = stocked()
    customer.settle()
    said: list[tuple[int, int]] = []
    for lost in (False, True):
        customer.machine.stop()
        if lost:
            customer.machine.discard()
        said.clear()
        machine = customer.machine
        machine.tier = not_loaded(machine)
        assert customer.tier.usage().capacity == 0
        seen = 0
        for slab in customer.tier.load(lambda done, total: said.append((done, total))):
            seen += slab.header.slots
            assert customer.tier.usage().capacity == seen
            assert customer.tier.free_slots(slab.header.slot_class) > 0
        assert {total for _, total in said} == {3 * SLOTS}
        assert [done for done, _ in said] == sorted(done for done, _ in said) and said[-1] == (120, 120)
        assert list(customer.tier.load()) == []


def test_a_load_that_is_not_finished_is_no_clean_end() -> None:
    customer = stocked()
    customer.settle()
    machine = customer.machine
    machine.stop()
    machine.discard()
    customer.index_lost = True
    machine.tier = not_loaded(machine)
    loading = customer.tier.load()
    next(loading)
    loading.close()
    machine.stop()
    assert not stamp_of(machine.files).clean
    customer.compare(machine.start())
    assert customer.tier.rebuilds, "an index that is not finished does not say who it is"
    assert not customer.restart().rebuilds


def test_a_slab_can_be_used_while_others_are_loaded() -> None:
    customer = stocked()
    customer.settle()
    machine = customer.machine
    for lost in (False, True):
        machine.stop()
        if lost:
            machine.discard()
            customer.index_lost = True
        machine.tier = not_loaded(machine)
        found = []
        for number, slab in enumerate(customer.tier.load()):
            found.append(slab)
            if number == 0:
                names = customer.store(0, 2)
                customer.evict(names[:1])
        fresh = [name for name in names if name in customer.owed]
        places = {name: customer.owed.pop(name) for name in fresh}
        customer.leaving.discard(names[0])
        customer.compare(found)
        customer.owed.update(places)
        customer.gone.add(names[0])
        customer.settle()
        assert not customer.restart().rebuilds


def copy_of(machine: Machine) -> Any:
    """Something to put back with `put_back`: the index as it is now."""
    if isinstance(machine, RealMachine):
        target = machine.directory / "copy"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(machine.directory / "index", target)
        return target
    return machine.index.copy()


def put_back(machine: Machine, copy: Any) -> None:
    if isinstance(machine, RealMachine):
        shutil.rmtree(machine.directory / "index")
        shutil.copytree(copy, machine.directory / "index")
    else:
        copy.power = machine.power
        machine.index = copy


def test_a_frame_of_another_class_is_not_taken_in() -> None:
    customer = stocked()
    customer.settle()
    machine = customer.machine
    machine.stop()
    part, place = next((name[0], place) for name, place in customer.owed.items() if extent_of(place) == 1)
    frame = customer.frame(1 - part)
    machine.files.poke(slab_name(1), PAGE_BYTES + slot_of(place) * len(frame.bytes), frame.bytes)
    customer.owed = {name: at for name, at in customer.owed.items() if at != place}
    machine.discard()
    customer.index_lost = True
    customer.compare(machine.start())
    assert customer.tier.rebuilds and frame.name not in customer.owed


@pytest.mark.parametrize("sessions", [1, 2], ids=["the session before it", "the last but one"])
def test_an_index_of_before_a_session_that_was_cut_short_is_not_believed(sessions: int) -> None:
    """A crash leaves an index that is newer than its session's stamp; an older one was put there."""
    customer = stocked()
    customer.restart()
    copy = customer.machine.index.copy()
    customer.evict(customer.some(10))
    customer.settle()
    customer.store(0, 6)
    for _ in range(sessions):
        customer.crash()
    customer.machine.lose_power(Random(0))
    put_back(customer.machine, copy)
    customer.index_lost = True
    customer.compare(customer.machine.start())
    assert customer.tier.rebuilds


def test_the_index_of_another_directory_is_not_believed(customer: Customer, tmp_path: Path) -> None:
    is_real = isinstance(customer.machine, RealMachine)
    other = opened(RealMachine(tmp_path / "other") if is_real else Machine())
    other.machine.uids = 500
    other.machine.stop()
    if not is_real:  # a number that counts up makes the same identities in every simulated machine
        other.machine.discard()
        other.machine.files = SimulatedFiles(other.machine.power)
    other = opened(other.machine)
    stocked(customer)
    stocked(other)
    customer.settle()
    other.settle()
    customer.machine.stop()
    other.machine.stop()
    assert stamp_of(customer.machine.files).changes == stamp_of(other.machine.files).changes
    put_back(customer.machine, copy_of(other.machine))
    customer.index_lost = True
    customer.compare(customer.machine.start())
    assert customer.tier.rebuilds
    assert not customer.restart().rebuilds


def test_an_index_without_its_own_record_is_not_believed() -> None:
    customer = stocked()
    customer.settle()
    customer.machine.stop()
    for value in (None, b"", bytes(40)):
        customer.machine.index.reopen()
        customer.machine.index.apply([(META, value)])
        customer.machine.index.sync()
        customer.index_lost = True
        customer.compare(customer.machine.start())
        assert customer.tier.rebuilds
        customer.machine.stop()


def test_records_and_doubts_that_make_no_sense_are_passed_over() -> None:
    customer = stocked()
    customer.settle()
    customer.machine.stop()
    index = customer.machine.index
    index.reopen()
    index.apply([(record_key(1, 0) + b"x", b"x" * 40), (record_key(1, 0)[:6], b""), (record_key(1, 9), b"y")])
    index.apply([(record_key(77, 0), b"z"), (b"d" + bytes(3), b""), (b"d" + b"\xff" * 8, b""), (b"x", b"")])
    index.sync()
    customer.compare(customer.machine.start())
    assert not customer.tier.rebuilds
    customer.store(0, 4)
    customer.restart()


def test_a_record_that_is_damaged_while_it_is_in_use() -> None:
    customer = opened()
    names = customer.store(0, 6)
    bad = customer.quarantine(names[1])
    customer.evict(names[:1])
    customer.machine.files.fail("write", 1, io_error())
    with pytest.raises(TierUnavailable):  # its header is as it was
        customer.settle()
    key = record_key(1, 0)
    value = customer.machine.index.get([key])[0]
    assert value is not None
    customer.machine.index.apply([(key, value[:-1] + bytes([value[-1] ^ 1]))])
    customer.store(0, 1)
    customer.settle()
    customer.crash()
    with pytest.raises(BlockMissing):
        customer.read(bad)
    assert customer.tier.usage().quarantined == 1


def test_a_record_that_is_damaged_brings_no_evicted_frame_back() -> None:
    """Its slots are read from their headers then, and that of an evicted frame may still be there."""
    customer = opened()
    names = customer.store(0, 6)
    customer.evict(names[2:3])
    customer.tier._commits._void = lambda places: None  # type: ignore[method-assign]
    customer.settle()  # the index has forgotten it; before its header is void the power will go
    key = record_key(1, 0)
    value = customer.machine.index.get([key])[0]
    assert value is not None
    customer.machine.index.apply([(key, value[:-1] + bytes([value[-1] ^ 1]))])
    customer.machine.index.sync()
    customer.crash()
    assert set(customer.owed) == set(names) - {names[2]}


def test_a_record_that_is_right_goes_before_a_doubt() -> None:
    """Doubts have no MAC: one that nobody wrote takes nothing away."""
    customer = opened()
    names = customer.store(0, 6)
    customer.settle()
    customer.machine.index.apply([(doubt_key(customer.owed[name]), b"") for name in names])
    customer.machine.index.sync()
    customer.crash()
    assert set(customer.owed) == set(names)


# Slabs ----------------------------------------------------------------------------------------------------------------


def test_a_slab_that_is_given_back_is_gone(customer: Customer) -> None:
    names = customer.store(0, SLOTS)
    customer.store(1, 2)
    before = customer.tier.usage().taken_bytes
    customer.evict(names[1:])
    customer.quarantine(names[0])
    customer.tier.retire(1)
    customer.settle()
    usage = customer.tier.usage()
    assert usage.taken_bytes == before - SLAB_BYTES and usage.capacity == SLOTS
    assert slab_name(1) not in customer.machine.files.sizes()
    assert customer.tier.free_slots(CLASSES[0]) == 0
    assert not customer.restart().rebuilds
    assert [key for key, _ in customer.machine.index.iterate(record_key(1, 0)[:5])] == []
    customer.store(0, 3)
    customer.restart()


def test_power_is_lost_at_every_step_of_a_slabs_life() -> None:
    for last in range(1, 400):
        customer = opened()
        customer.store(1, 2)
        machine = customer.machine
        machine.power.back(last)
        try:
            customer.evict(customer.store(0, 2))
            customer.tier.retire(2)
            customer.store(0, 1)
            is_over = True
        except PowerLoss:
            is_over = False
        customer.crash(last)
        customer.settle()
        customer.store(0, 1)
        customer.restart()
        nothing_is_left_over(customer)
        if is_over:
            break
    assert is_over and last > 20


# Frames in the places of others ---------------------------------------------------------------------------------------


def test_claimed_places_take_the_next_frames_as_they_are(customer: Customer) -> None:
    names = customer.store(0, 6)
    customer.settle()
    places = customer.claim(names[1:4])
    assert customer.tier.usage().reserved == 3
    customer.tier.check()
    assert set(customer.fill(0, places)) <= set(customer.owed)
    customer.tier.check()
    assert customer.tier.usage()[:4] == (SLOTS - 6, 0, 6, 0)
    customer.settle()
    customer.restart()
    customer.index_lost = True
    customer.machine.stop()
    customer.machine.discard()
    customer.compare(customer.machine.start())
    nothing_is_left_over(customer)


def test_no_zeros_are_written_for_a_claim() -> None:
    customer = opened()
    names = customer.store(0, 6)
    customer.settle()
    written: list[int] = []
    real = customer.machine.files.write

    def write(name: str, offset: int, data: memoryview) -> None:
        written.append(len(data))
        real(name, offset, data)

    customer.machine.files.write = write  # type: ignore[method-assign]
    changes = customer.tier._records.changes
    customer.fill(0, customer.claim(names[:3]))
    assert written == [8192] * 3 and customer.tier._records.changes == changes + 2, "two batches of the index"


@pytest.mark.parametrize("index_too", [False, True])
def test_power_is_lost_at_every_step_of_a_claim(index_too: bool) -> None:
    for last in range(1, 400):
        customer = opened()
        names = customer.store(0, 6)
        customer.settle()
        customer.machine.power.back(last)
        try:
            places = customer.claim(names[:4])
            customer.fill(0, places, good=3)
            customer.settle()
            is_over = True
        except PowerLoss:
            is_over = False
        customer.index_lost = index_too
        customer.machine.lose_power(Random(last), index_too=index_too)
        customer.compare(customer.machine.start())
        customer.settle()
        customer.restart()
        nothing_is_left_over(customer)
        customer.no_other_header_is_valid()
        if is_over:
            break
    assert is_over and last > 10


@pytest.mark.parametrize("call", ["sync", "apply"])
def test_a_claim_that_cannot_be_made_durable_leaves_nothing_behind(call: str) -> None:
    customer = opened()
    names = customer.store(0, 6)
    customer.settle()
    customer.machine.index.fail(call, 1, TierUnavailable("no space left"))
    with pytest.raises(TierUnavailable):
        customer.claim(names[:3])
    assert customer.tier.usage().reserved == 0 and not customer.tier._commits._claimed
    customer.crash()
    customer.settle()
    assert customer.tier.usage()[1:4:2] == (0, 0)
    nothing_is_left_over(customer)


@pytest.mark.parametrize("good", [0, 2])
def test_what_turns_out_to_be_bad_while_it_is_written_is_not_there(customer: Customer, good: int) -> None:
    kept = customer.fill(0, _places(customer, 5), good)
    assert len(kept) == good and customer.tier.usage().used == good
    customer.settle()
    assert customer.tier.usage().free == SLOTS - good
    customer.restart()
    nothing_is_left_over(customer)


def test_work_that_fails_while_frames_are_written_commits_none(customer: Customer) -> None:
    def fail() -> list[int]:
        raise KeyboardInterrupt

    places = _places(customer, 5)
    frames = [customer.frame() for _ in places]
    customer.leaving.update(frame.name for frame in frames)
    with pytest.raises(KeyboardInterrupt):
        customer.tier.commit(places, [memoryview(frame.bytes) for frame in frames], fail)
    customer.tier.abort(places)
    customer.settle()
    assert customer.tier.usage().used == 0
    customer.restart()
    nothing_is_left_over(customer)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("has_work", [False, True])
def test_frames_are_written_by_several_threads(tmp_path: Path, threads: int, has_work: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("tiering.nvme.group_commit.PARALLEL_BYTES", 0)
    machine = RealMachine(tmp_path)
    machine.tier = not_loaded(machine, threads)
    list(machine.tier.load())
    customer = Customer(machine)
    customer.tier.new_slab(STAMPS[0], MAC_KEY, b"about")
    places = _places(customer, 30)
    frames = [customer.frame() for _ in places]
    writers: set[threading.Thread] = set()
    real = machine.files.write

    def write(name: str, offset: int, data: memoryview) -> None:
        writers.add(threading.current_thread())
        real(name, offset, data)

    machine.files.write = write  # type: ignore[method-assign]
    customer.tier.commit(places, [memoryview(frame.bytes) for frame in frames], (lambda: places) if has_work else None)
    assert len(writers) == threads and (threading.current_thread() in writers) == (threads == 1 or not has_work)
    customer.owed.update((frame.name, place) for frame, place in zip(frames, places, strict=True))
    customer.restart()

    def broken(name: str, offset: int, data: memoryview) -> None:
        if offset == customer.tier._ledger.pieces[1].header.offset(35):
            raise OSError(errno.EIO, "bad sector")
        real(name, offset, data)

    more = _places(customer, 8)
    assert {slot_of(place) for place in more} >= {35}
    machine.files.write = broken  # type: ignore[method-assign]
    with pytest.raises(TierUnavailable, match="cannot be written"):
        customer.tier.commit(more, [memoryview(customer.frame().bytes) for _ in more])
    customer.tier.abort(more)
    assert customer.tier.usage().used == 30
    customer.machine.stop()


def _places(customer: Customer, count: int) -> list[int]:
    if customer.tier.free_slots(CLASSES[0]) < count:
        customer.tier.new_slab(STAMPS[0], MAC_KEY, b"about")
    return customer.tier.reserve(CLASSES[0], count)


@pytest.mark.parametrize("pages", ["front", "back"])
@pytest.mark.parametrize("damage", ["zeros", "random", "another key", "unreadable"])
def test_one_header_of_a_slab_is_enough(pages: str, damage: str) -> None:
    customer = stocked()
    customer.settle()
    customer.machine.stop()
    files = customer.machine.files
    for number in (1, 2, 3):
        offset = 0 if pages == "front" else SLAB_BYTES - PAGE_BYTES
        if damage == "zeros":
            files.poke(slab_name(number), offset, bytes(PAGE_BYTES))
        elif damage == "random":
            files.poke(slab_name(number), offset, Random(1).randbytes(PAGE_BYTES))
        elif damage == "another key":  # a bit of the key's name: nobody has that key
            files.flip(slab_name(number), (offset + 12) * 8)
    if damage == "unreadable":
        files.fail("read", 3 if pages == "front" else 4, io_error())
    customer.compare(customer.machine.start(keys=Keys()))
    assert not customer.tier.rebuilds and customer.tier.left_alone == []
    customer.store(0, 2)


def test_a_slab_whose_headers_are_both_gone_is_left_alone(customer: Customer) -> None:
    stocked(customer)
    customer.settle()
    before = customer.tier.usage()
    in_it = [name for name, place in customer.owed.items() if extent_of(place) == 1]
    headers = []
    for offset in (0, SLAB_BYTES - PAGE_BYTES):
        page = bytearray(PAGE_BYTES)
        customer.machine.files.read(slab_name(1), offset, memoryview(page))
        headers.append((offset, bytes(page)))
        customer.machine.files.write(slab_name(1), offset, memoryview(bytes(PAGE_BYTES)))
    customer.machine.stop()
    kept = {name: (customer.owed.pop(name), customer.frames[name]) for name in in_it}
    customer.compare(customer.machine.start())
    (alone,) = customer.tier.left_alone
    assert (alone.name, alone.size_bytes) == (slab_name(1), SLAB_BYTES) and alone.reason
    usage = customer.tier.usage()
    assert usage.taken_bytes == before.taken_bytes and usage.capacity == before.capacity - SLOTS
    for name in in_it:
        with pytest.raises(BlockMissing):
            customer.read(kept[name][0])
    customer.store(0, 6)
    customer.settle()
    customer.machine.stop()
    for offset, page in headers:
        customer.machine.files.write(slab_name(1), offset, memoryview(page))
    customer.owed.update((name, place) for name, (place, _) in kept.items())
    customer.compare(customer.machine.start())
    assert customer.tier.left_alone == []


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_slab_whose_key_is_away_waits_for_it(rebuilt: bool) -> None:
    """Also where the index was built again meanwhile: nobody could say then what is in it."""
    customer = stocked()
    theirs = Stamp(b"key-id-0", 1, b"u" * 16, b"n" * 32, "raw", 0, 2, 64, 1, 4096)
    customer.tier.new_slab(theirs, MAC_KEY, b"theirs")
    customer.settle()
    machine = customer.machine
    machine.stop()
    customer.compare(machine.start(keys=Keys(b"u" * 16)))
    assert [one.name for one in customer.tier.left_alone] == [slab_name(4)], "though it never held a frame"
    machine.stop()
    customer.compare(machine.start(keys=Keys()))
    machine.stop()
    before = {name: machine.files.image(name) for name in machine.files.sizes()}
    mine = dict(customer.owed)
    customer.owed = {}
    if rebuilt:
        machine.discard()
        customer.index_lost = True
    found = machine.start(keys=Keys(b"t" * 16))
    assert [slab.header.about for slab in found] == [b"theirs"] and found[0].places == []
    assert [one.name for one in customer.tier.left_alone] == [slab_name(number) for number in (1, 2, 3)]
    assert customer.tier.rebuilds is rebuilt
    assert customer.tier.usage().taken_bytes == 4 * SLAB_BYTES
    with pytest.raises(BlockMissing):
        customer.read(next(iter(mine.values())))
    customer.tier.settle()
    machine.stop()
    assert all(machine.files.image(slab_name(number)) == before[slab_name(number)] for number in (1, 2, 3))
    customer.owed = mine
    customer.compare(machine.start(keys=Keys()))
    assert customer.tier.left_alone == []
    customer.evict(customer.some(3))
    customer.settle()
    customer.machine.lose_power(Random(3))
    customer.compare(machine.start(keys=Keys()))
    assert not customer.tier.rebuilds
    customer.restart()


def test_slabs_that_were_never_finished_are_removed() -> None:
    customer = opened()
    customer.store(0, 1)
    customer.machine.stop()
    files = customer.machine.files
    files.create(slab_name(7), SLAB_BYTES)
    files.create(slab_name(8), SLAB_BYTES)
    files.poke(slab_name(8), 0, b"half a header")
    customer.compare(customer.machine.start())
    assert customer.tier.left_alone == [] and files.sizes().keys() == {slab_name(0), slab_name(1)}


def test_what_is_no_slab_of_ours_is_left_alone(tmp_path: Path) -> None:
    machine = RealMachine(tmp_path)
    customer = opened(machine)
    customer.store(0, 2)
    machine.stop()
    slabs = tmp_path / "slabs"
    strangers = {
        "notes.slab": b"short",
        "zeros.slab": bytes(3 * PAGE_BYTES),
        "empty.slab": b"",
        "1.slab": (slabs / slab_name(1)).read_bytes(),
        "0000000A.slab": bytes(SLAB_BYTES),
        "000000001.slab": bytes(SLAB_BYTES),
        "ffffffffff.slab": bytes(SLAB_BYTES),
        "-0000001.slab": bytes(SLAB_BYTES),
        slab_name(5): (slabs / slab_name(1)).read_bytes()[:-100],  # cut short
        slab_name(6): (slabs / slab_name(1)).read_bytes()[: 20 * PAGE_BYTES],
        slab_name(7): b"",
        slab_name(8): (slabs / slab_name(1)).read_bytes(),  # a copy under another number
    }
    for name, content in strangers.items():
        (slabs / name).write_bytes(content)
    customer.compare(machine.start())
    assert {one.name for one in customer.tier.left_alone} == strangers.keys()
    assert customer.tier.usage().taken_bytes == SLAB_BYTES + sum(map(len, strangers.values()))
    machine.budget_bytes *= 20
    customer.restart()
    customer.store(1, 1)
    customer.restart()
    for name, content in strangers.items():
        assert (slabs / name).read_bytes() == content
    customer.tier.close()


def test_the_last_number_is_the_last() -> None:
    customer = opened()
    customer.store(0, 1)
    customer.machine.stop()
    customer.machine.files.create("ffffffff.slab", SLAB_BYTES)
    customer.machine.files.poke("ffffffff.slab", PAGE_BYTES, b"x")
    customer.compare(customer.machine.start())
    with pytest.raises(TierFull):
        customer.tier.new_slab(STAMPS[0], MAC_KEY, b"")
    customer.store(0, 1)
    customer.restart()


def test_a_directory_of_another_format_is_refused_and_untouched() -> None:
    customer = stocked()
    customer.settle()
    machine = customer.machine
    machine.stop()
    page = bytearray(stamp_of(machine.files).pack())
    page[8:12] = (2).to_bytes(4, "little")
    page[53:69] = digest(page[:53])
    ours = machine.files.image(slab_name(0))
    at = stamp_of(machine.files).page * PAGE_BYTES
    machine.files.poke(slab_name(0), at, bytes(page))
    before = {name: machine.files.image(name) for name in machine.files.sizes()}
    index = dict(machine.index._seen)
    for _ in range(2):
        with pytest.raises(OtherFormat, match="format 2"):
            machine.start()
    assert {name: machine.files.image(name) for name in machine.files.sizes()} == before
    assert machine.index._seen == index
    machine.files.poke(slab_name(0), 0, ours)
    customer.compare(machine.start())
    assert not customer.tier.rebuilds


def test_a_stamp_that_is_too_short() -> None:
    machine = Machine()
    machine.files.create(slab_name(0), PAGE_BYTES)
    with pytest.raises(TierUnavailable):
        machine.start()
    assert machine.files.sizes() == {slab_name(0): PAGE_BYTES}


def test_a_closed_tier_gives_typed_answers() -> None:
    customer = stocked()
    place = next(iter(customer.owed.values()))
    tier = customer.tier
    customer.settle()
    tier.close()
    tier.close()
    with pytest.raises(TierUnavailable):
        customer.read(place)
    with pytest.raises(TierUnavailable):
        customer.store(0, 1)
    with pytest.raises(TierError):
        tier.new_slab(STAMPS[0], MAC_KEY, b"")
    tier.delete([place])
    with pytest.raises(TierUnavailable):
        tier.settle()
    assert customer.machine.files.durable(slab_name(0)), "it says that the session ended in order"
    customer.machine.files.reopen()
    assert stamp_of(customer.machine.files).clean


def test_places_in_doubt_are_not_used_before_they_are_void() -> None:
    customer = opened()
    customer.store(0, 1)
    machine = customer.machine
    places = customer.tier.reserve(CLASSES[0], 3)
    frames = [customer.frame() for _ in places]
    machine.files.fail("sync", 1, io_error())
    with pytest.raises(TierUnavailable):
        customer.tier.commit(places, [frame.bytes for frame in frames])
    customer.tier.abort(places)
    assert customer.tier.usage().reserved == 3 and not set(places) & set(customer.tier.reserve(CLASSES[0], SLOTS))
    customer.leaving.update(frame.name for frame in frames)
    customer.crash()
    assert customer.tier.usage().reserved == 3, "the index says that their headers may be valid"
    assert all(customer.tier._ledger.state(place) == FrameState.RESERVED for place in places)
    customer.settle()
    assert customer.tier.usage().reserved == 0
    for place in places:
        offset = customer.tier._ledger.pieces[1].header.offset(slot_of(place))
        assert not any(machine.files.durable(slab_name(1))[offset : offset + PAGE_BYTES])
    assert set(places) <= set(customer.tier.reserve(CLASSES[0], SLOTS))
