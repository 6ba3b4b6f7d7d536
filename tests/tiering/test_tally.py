"""What tiers count of themselves: ages of evicted blocks and of those that come back, and events that only add up."""

from __future__ import annotations

from kvstore.core.index import NO_ROW, PrefixIndex
from tiering.counts.histogram import HistogramCounts
from tiering.counts.tally import EVICTIONS, CheckedAt, EvictedTo, Eviction, EvictionCause, Tally, TierName
from tiering.residency import LastUses
from waiting import FakeClock

TENANT = b"t" * 16


def ages(counts: HistogramCounts) -> dict[float, int]:
    """How many are up to each bound, those that none is left out."""
    return {bound: count for bound, count in zip((*counts.bounds, float("inf")), counts.counts, strict=True) if count}


def uses_of(clock: FakeClock) -> LastUses:
    uses = LastUses(clock.monotonic_seconds)
    uses.grow_to(8)
    return uses


def test_an_evicted_block_is_as_old_as_its_last_use() -> None:
    clock = FakeClock()
    tally, uses = Tally(clock.monotonic_seconds), uses_of(clock)
    uses.used([0, 1])
    clock.advance(50)
    uses.used([1])
    clock.advance(200)
    tally.evicted(TierName.DRAM, EvictedTo.NVME, uses.idle_seconds(0))
    tally.evicted(TierName.DRAM, EvictedTo.NOTHING, uses.idle_seconds(1))
    clock.advance(10_000)
    tally.evicted(TierName.NVME, EvictedTo.NOTHING, uses.idle_seconds(0))
    now = tally.now()
    assert ages(now.idle[TierName.DRAM]) == {300.0: 2} and now.idle[TierName.DRAM].sum == 450
    assert ages(now.idle[TierName.NVME]) == {21600.0: 1}
    assert now.evicted == {pair: int(pair in (EVICTIONS[0], EVICTIONS[1], EVICTIONS[4])) for pair in EVICTIONS}


def test_of_blocks_from_an_earlier_run_no_age_is_told() -> None:
    clock = FakeClock()
    tally, uses = Tally(clock.monotonic_seconds), uses_of(clock)
    uses.used([3])
    uses.found(3)
    clock.advance(100)
    ages_told = [uses.idle_seconds(row) for row in (3, 4)]  # 4 was never used
    assert ages_told == [None, None]
    for age in (*ages_told, None):  # the last one was never listed, and has no row
        tally.evicted(TierName.NVME, EvictedTo.NOTHING, age)
    now = tally.now()
    assert not ages(now.idle[TierName.NVME]) and now.evicted[TierName.NVME, EvictedTo.NOTHING] == 3


def test_what_was_evicted_and_is_asked_for_counts_once() -> None:
    clock = FakeClock()
    tally, index = Tally(clock.monotonic_seconds), PrefixIndex(forgotten_limit=2)
    number = index.add_namespace(TENANT)
    keys = [bytes([at]) * 32 for at in range(3)]
    for at, key in enumerate(keys):
        row = index.insert(number, key, NO_ROW)
        index.publish(row)
        index.remove(row, remember=True, stamp=tally.stamp(TierName.NVME if at == 1 else TierName.DRAM))
        clock.advance(20)
    for _ in range(2):
        for key in keys:  # the first one is remembered no more
            tally.asked_again(index.stamp_of_eviction(number, key))
    now = tally.now()
    assert ages(now.wanted_again[TierName.DRAM]) == {60.0: 1} and ages(now.wanted_again[TierName.NVME]) == {60.0: 1}
    assert (now.wanted_again[TierName.DRAM].sum, now.wanted_again[TierName.NVME].sum) == (20, 40)
    assert index.remembered == {TENANT: 2}
    for at, key in enumerate(keys):  # how it went is known for as long as that it did
        eviction = tally.eviction(index.eviction(number, key)[0])
        tier = TierName.NVME if at == 1 else TierName.DRAM
        assert eviction == (Eviction(tier, EvictionCause.ROOM, 60.0 - 20 * at) if at else None)
    clock.advance(1000)
    stamp = tally.stamp(TierName.DRAM, EvictionCause.DROP)
    tally.asked_again(stamp)
    assert tally.eviction(stamp) == Eviction(TierName.DRAM, EvictionCause.DROP, 0.0)
    assert ages(tally.now().wanted_again[TierName.DRAM]) == {60.0: 1}, "what was dropped is not waited for"


def test_checks_count_bytes_and_damage() -> None:
    tally = Tally()
    tally.checked(CheckedAt.LOAD, 4096, is_sound=True)
    tally.checked(CheckedAt.LOAD, 4096, is_sound=False)
    tally.checked(CheckedAt.MOVE, 0, is_sound=False)
    now = tally.now()
    assert (now.verified_bytes[CheckedAt.LOAD], now.damaged[CheckedAt.LOAD]) == (8192, 1)
    assert (now.verified_bytes[CheckedAt.MOVE], now.damaged[CheckedAt.MOVE]) == (0, 1)
    assert sum(now.damaged.values()) == 2
