"""The scrub's walk and pace, on a still clock over a real tier on a simulated disk: each frame once, never faster."""

from __future__ import annotations

from random import Random

import pytest

from simulation.machine import MAC_KEY, Machine
from tiering.frame import Sealer, Stamp, digest
from tiering.nvme.scrub import LEAST_CHARGE_BYTES, CheckResult, Scrub, ScrubLimits
from tiering.nvme.tier import NvmeTier, Resident
from tiering.slab_header import SlabSizes
from tiering.tier import SlotClass, extent_of
from waiting import FakeClock

SEED = 20261120
RATE = 1 << 20  # a power of two, and so are all times and sizes here: no sum is rounded
PAGE = 4096
SLAB_BYTES = 2 * PAGE + 256 * 1024
SIZES = SlabSizes(64 * SLAB_BYTES, SLAB_BYTES)
PAYLOADS = [PAGE, 60 * 1024, 124 * 1024]  # with their headers 8, 64 and 128 KiB; 32, 4 and 2 of them in a slab


class Shelf(Machine):
    """A tier of small slabs with frames of three sizes, and what stands where."""

    tier: NvmeTier

    def __init__(self) -> None:
        super().__init__(64 * SLAB_BYTES)
        assert not self.start(lambda files, maker, keys, sizes, uid: NvmeTier(files, maker, keys, SIZES, uid))
        stamps = [Stamp(b"key-id-0", 1, b"t" * 16, b"n" * 32, "raw", at, 3, 64, 1, PAYLOADS[at]) for at in range(3)]
        self.stamps, self.sealers = stamps, [Sealer(one, MAC_KEY) for one in stamps]
        self.classes = [SlotClass(one.tenant, one.namespace, one.part, one.frame_bytes) for one in stamps]
        self.frames = [
            sealer.seal(bytes(32), bytes(32), 0, 1, [digest(bytes(payload))]) + bytes(payload)
            for sealer, payload in zip(self.sealers, PAYLOADS, strict=True)
        ]
        self.there: dict[int, int] = {}  # place -> which frame of all that were ever put
        self.number = 0

    def put(self, part: int, count: int) -> list[int]:
        """More frames, in a new slab if need be."""
        if self.tier.free_slots(self.classes[part]) < count:
            self.tier.new_slab(self.stamps[part], MAC_KEY, b"")
        places = self.tier.reserve(self.classes[part], count)
        self.tier.commit(places, [self.frames[part]] * len(places))
        for place in places:
            self.number += 1
            self.there[place] = self.number
        self.tier.own(places, [self.there[place] for place in places])
        return places

    def evict(self, places: list[int]) -> None:
        self.tier.delete(places)
        for place in places:
            del self.there[place]


def scrub_of(shelf: Shelf, clock: FakeClock, turn: int = 0, **limits: float) -> Scrub:
    chosen = {"bytes_per_second": RATE, "window_bytes": 128 * 1024, "first_seconds": 0.0, **limits}
    return Scrub(shelf.tier, ScrubLimits(**chosen), clock, turn)  # type: ignore[arg-type]


def run_pass(scrub: Scrub, clock: FakeClock, verdicts: dict[int, CheckResult] | None = None) -> list[int]:
    """All of the next pass; the places in the order in which they were visited. verdicts: where not good."""
    places = []
    passes = scrub.usage().passes
    clock.advance(scrub.seconds_until_due())
    while scrub.usage().passes == passes:
        for frame in scrub.window():
            scrub.spent(frame)
            scrub.visited(frame, (verdicts or {}).get(frame.place, CheckResult.GOOD))
            places.append(frame.place)
        if scrub.usage().in_pass:
            clock.advance(scrub.seconds_until_due())
    return places


# The walk -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED, SEED + 12))
def test_every_frame_is_visited_once_in_a_pass_whatever_comes_and_goes(seed: int) -> None:
    print("seed", seed)
    random = Random(seed)
    shelf, clock = Shelf(), FakeClock()
    scrub = scrub_of(shelf, clock, turn=random.randrange(1000), pass_seconds=random.choice([0.0, 1e4]))
    before: set[int] = set()
    visited: list[int] = []
    seen_in_all = 0
    for _ in range(40):
        churn(shelf, random)
    while (passes := scrub.usage().passes) < 12:
        churn(shelf, random)
        clock.advance(scrub.seconds_until_due() if random.random() < 0.9 else 0.0)
        if not scrub.usage().in_pass:
            before, visited = set(shelf.there.values()), []
        window = scrub.window()
        for frame in window[: random.randrange(len(window) + 1)]:  # the rest was refused, or made way
            if random.random() < 0.1:
                churn(shelf, random)
            scrub.spent(frame)
            scrub.visited(frame, random.choice([CheckResult.GOOD, CheckResult.UNREADABLE]))
            visited.append(frame.row)
        assert len(set(visited)) == len(visited), "a frame was visited twice"
        if scrub.usage().passes > passes:
            missed = (before & set(shelf.there.values())) - set(visited)
            assert not missed, f"{len(missed)} frames stood there all the while and were not visited"
            seen_in_all += len(visited)
    print(seen_in_all, shelf.tier.slab_numbers())
    assert seen_in_all > 200 and shelf.tier.slab_numbers()[-1] > 10


def churn(shelf: Shelf, random: Random) -> None:
    """Frames come, in new slabs too; frames go; slabs that are empty are given back."""
    choice = random.random()
    if choice < 0.5 and len(shelf.there) < 100 and shelf.tier.has_room():
        shelf.put(random.randrange(3), random.randrange(1, 7))
    elif choice < 0.6 and shelf.there:
        shelf.evict(random.sample(sorted(shelf.there), random.randrange(1, 1 + min(4, len(shelf.there)))))
    elif choice < 0.65 and shelf.there:  # all of one slab
        number = extent_of(random.choice(sorted(shelf.there)))
        shelf.evict([place for place in shelf.there if extent_of(place) == number])
    elif choice < 0.8:
        shelf.tier.settle()
        for number in shelf.tier.empty_slabs():
            if random.random() < 0.7:
                shelf.tier.retire(number)


def test_the_tier_names_readable_frames_in_order_with_their_owners() -> None:
    shelf = Shelf()
    small, large = shelf.put(0, 5), shelf.put(2, 2)
    sizes = [one.frame_bytes for one in shelf.stamps]
    everything = shelf.tier.residents(0, 1 << 62, 1 << 40)
    assert [one.place for one in everything] == sorted(small) + sorted(large)
    assert [(one.row, one.part, one.frame_bytes) for one in everything] == [
        (shelf.there[one.place], part, sizes[part]) for one, part in zip(everything, [0] * 5 + [2] * 2, strict=True)
    ]
    assert shelf.tier.residents(0, 1 << 62, 2 * sizes[0]) == everything[:2]
    assert shelf.tier.residents(0, 1 << 62, 0) == everything[:1], "at least one"
    assert shelf.tier.residents(small[0] + 1, large[0], 1 << 40) == everything[1:5]
    assert shelf.tier.residents(small[0], small[0], 1 << 40) == []
    shelf.evict(small[1:2])
    [again] = shelf.tier.residents(small[0], small[0] + 1, 0)
    assert again != everything[0] and again._replace(evictions=0) == everything[0], "an eviction in its slab shows"
    shelf.tier.quarantine(small[2:3])
    assert [one.place for one in shelf.tier.residents(0, large[0], 1 << 40)] == [small[0], *small[3:]]
    [unknown] = shelf.tier.reserve(shelf.classes[0], 1)
    assert not shelf.tier.residents(unknown, unknown + 1, 0)
    shelf.tier.commit([unknown], [shelf.frames[0]])
    assert shelf.tier.residents(unknown, unknown + 1, 0)[0].row == -1
    assert shelf.tier.slab_numbers() == [1, 2]


def test_a_slot_that_is_used_again_for_the_same_block_is_not_the_same_frame() -> None:
    shelf = Shelf()
    [place] = shelf.put(2, 1)
    shelf.tier.own([place], [7])
    before = shelf.tier.residents(place, place + 1, 0)
    shelf.evict([place])
    shelf.tier.settle()
    while place not in (places := shelf.put(2, 1)):
        shelf.evict(places)
        shelf.tier.settle()
    shelf.tier.own([place], [7])
    after = shelf.tier.residents(place, place + 1, 0)
    assert after != before and after[0][:2] == before[0][:2] == (place, 7)


def test_programs_that_never_run_for_a_whole_pass_see_all_slabs_in_time() -> None:
    shelf = Shelf()
    for _ in range(24):
        shelf.put(2, 2)
    seen: set[int] = set()
    for turn in range(1, 13):  # each comes as far as a quarter of a pass
        clock = FakeClock()
        scrub = scrub_of(shelf, clock, turn=turn)
        while clock.monotonic < 1000 + 24 * 256 * 1024 / RATE / 4:
            for frame in scrub.window():
                scrub.spent(frame)
                scrub.visited(frame, CheckResult.GOOD)
                seen.add(extent_of(frame.place))
            clock.advance(scrub.seconds_until_due())
        assert not scrub.usage().passes
    assert seen == set(range(1, 25))


# The pace -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEED, SEED + 12))
def test_no_stretch_of_time_sees_more_than_the_rate_and_one_window(seed: int) -> None:
    """Bytes read from one window's beginning to another's are paid for by the time between the two, for all pairs."""
    print("seed", seed)
    random = Random(seed)
    shelf, clock = Shelf(), FakeClock()
    for part in (0, 1, 2, 0, 2, 1):
        shelf.put(part, random.randrange(1, 3))
    rate = RATE << random.randrange(6)
    scrub = scrub_of(
        shelf, clock, bytes_per_second=rate, pass_seconds=0, window_bytes=random.choice([1, 64 << 10, 1 << 20])
    )
    begun: list[tuple[float, int]] = []
    while len(begun) < 200:
        window = scrub.window()
        if window:
            start, spent = clock.monotonic, 0
            for frame in window[: random.randrange(len(window) + 1)]:
                clock.advance(random.choice([0, 0, 0.125, 2.0**-9]))  # reading takes time of its own
                for _ in range(random.choice([1, 1, 1, 2])):  # a frame that failed is read again
                    scrub.spent(frame)
                    spent += frame.frame_bytes
                scrub.visited(frame, CheckResult.GOOD)
            begun.append((start, spent))
        if random.random() < 0.05:
            scrub.pause(random.choice([0.25, 4.0]))
        clock.advance(random.choice([scrub.seconds_until_due(), scrub.seconds_until_due(), 2.0**-7, 0.0, 8.0]))
    total = [0]
    for _, spent in begun:
        total.append(total[-1] + spent)
    assert total[-1] > 1 << 20
    for first in range(len(begun)):
        for last in range(first + 1, len(begun)):
            allowed = rate * (begun[last][0] - begun[first][0])
            assert total[last] - total[first] <= allowed, (first, last)


def test_a_pass_takes_its_bytes_over_the_rate_and_no_longer() -> None:
    shelf, clock = Shelf(), FakeClock()
    for _ in range(10):
        shelf.put(2, 2)
    scrub = scrub_of(shelf, clock)
    assert len(run_pass(scrub, clock)) == 20
    usage = scrub.usage()
    size = 20 * shelf.stamps[2].frame_bytes
    assert (usage.passes, usage.frames, usage.bytes, usage.damaged) == (1, 20, size, 0)
    assert usage.last_pass_seconds == size / RATE and usage.last_pass_ended == clock.wall_seconds()
    assert usage.counters == {"scrubbed_frames": 20}


def test_small_frames_are_paid_for_as_larger_ones() -> None:
    shelf, clock = Shelf(), FakeClock()
    shelf.put(0, 30)
    scrub = scrub_of(shelf, clock)
    run_pass(scrub, clock)
    assert scrub.usage().last_pass_seconds == 30 * LEAST_CHARGE_BYTES / RATE


def test_passes_begin_a_day_apart_and_the_first_after_a_minute() -> None:
    shelf, clock = Shelf(), FakeClock()
    shelf.put(1, 2)
    scrub = Scrub(shelf.tier, ScrubLimits(RATE), clock)
    assert scrub.seconds_until_due() == 60 and not scrub.window() and not scrub.usage().in_pass
    run_pass(scrub, clock)
    assert clock.monotonic_seconds() == 1060 + 2 * 64 * 1024 / RATE
    assert scrub.seconds_until_due() == 1060 + 86400 - clock.monotonic_seconds() and not scrub.window()
    run_pass(scrub, clock)
    assert scrub.usage().passes == 2 and clock.monotonic_seconds() - 86400 == 1060 + 2 * 64 * 1024 / RATE
    assert (scrub.usage().frames, scrub.usage().last_pass_frames) == (4, 2)


def test_nothing_is_due_in_a_pause_and_the_pass_goes_on_where_it_was() -> None:
    shelf, clock = Shelf(), FakeClock()
    shelf.put(2, 2)
    scrub = scrub_of(shelf, clock)
    first = scrub.window()[0]
    scrub.pause(30)
    assert scrub.seconds_until_due() == 30 and not scrub.window()
    clock.advance(30)
    assert scrub.window()[0] == first
    scrub.pause(2)
    scrub.pause(1)
    assert scrub.seconds_until_due() == 2


# Frames that cannot be read -------------------------------------------------------------------------------------------


def test_a_frame_is_given_up_after_three_passes_in_a_row_and_told_once() -> None:
    shelf, clock = Shelf(), FakeClock()
    places = shelf.put(0, 5)
    scrub = scrub_of(shelf, clock, pass_seconds=0)
    bad = {places[1]: CheckResult.UNREADABLE, places[3]: CheckResult.UNREADABLE}
    for verdicts in (bad, bad, {places[1]: CheckResult.UNREADABLE}):
        assert run_pass(scrub, clock, verdicts) == sorted(places) and not (scrub.given_up() and verdicts is bad)
    run_pass(scrub, clock, bad)
    assert not scrub.given_up(), "one was told in the pass before, the other one was read in between"
    assert (scrub.usage().unreadable, scrub.usage().frames) == (7, 13)


def test_what_is_given_up_is_the_frame_that_was_met() -> None:
    shelf, clock = Shelf(), FakeClock()
    places = shelf.put(0, 3)
    scrub = scrub_of(shelf, clock, pass_seconds=0, unreadable_passes=2)
    told: list[Resident] = []
    for _ in range(3):
        run_pass(scrub, clock, {places[2]: CheckResult.UNREADABLE})
        told += scrub.given_up()
    assert [(one.place, one.row) for one in told] == [(places[2], shelf.there[places[2]])]


def test_a_tier_that_cannot_be_read_at_all_loses_no_frame_by_that() -> None:
    shelf, clock = Shelf(), FakeClock()
    places = shelf.put(0, 5)
    scrub = scrub_of(shelf, clock, pass_seconds=0)
    for _ in range(10):
        run_pass(scrub, clock, dict.fromkeys(places, CheckResult.UNREADABLE))
        assert not scrub.given_up()
    run_pass(scrub, clock, dict.fromkeys(places[1:], CheckResult.UNREADABLE))
    assert not scrub.given_up(), "the passes in which nothing could be read do not count"


def test_no_more_suspects_are_remembered_than_the_limit() -> None:
    shelf, clock = Shelf(), FakeClock()
    places = shelf.put(0, 9)
    scrub = scrub_of(shelf, clock, pass_seconds=0, unreadable_passes=1, suspects=4)
    run_pass(scrub, clock, dict.fromkeys(places[1:], CheckResult.UNREADABLE))
    assert len(scrub.given_up()) == 4 and scrub.usage().unreadable == 8
