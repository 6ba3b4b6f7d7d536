"""Leases that are over, ended in pieces: how much is done at a time, and that nothing is lost or done twice."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvstore.block.account import MissReason
from kvstore.client.handle import NamespaceHandle
from kvstore.config import Limits
from kvstore.core import reservations, shared
from kvstore.core.shared import ENDED_PLACES, LEASE_COST, PART_COST
from workbench import Bench, bench, ids, random_pages, small_layout

from .test_long_chains import watched

BLOCKS, PARTS = 12, 4
ALL_TOKENS = ids(64 * BLOCKS)


def stocked(**options: Any) -> tuple[Bench, NamespaceHandle, list[bytes]]:
    """Twelve blocks of four parts."""
    a = bench(dram=4 << 20, **options)
    handle = a.namespace(small_layout(layers=4, kv_heads=2, layer_shards=2, head_shards=2))
    assert len(handle.layout.parts) == PARTS
    assert handle.put(ALL_TOKENS, random_pages(handle.layout, BLOCKS)).stored == BLOCKS
    return a, handle, handle.hashed(ALL_TOKENS).keys


def leases(a: Bench, handle: NamespaceHandle, keys: list[bytes], count: int) -> list[int]:
    return [a.store.lease(handle.number, keys, 0, 0).lease for _ in range(count)]


def is_at_rest(a: Bench) -> bool:
    a.store.check()
    usage = a.store.usage()
    residency = a.store.blocks.residency
    return (usage.leases, usage.pinned_bytes, usage.dram.zombie, bool(residency.held)) == (0, 0, 0, False)


class Walked:
    """How many rows and places were unpinned, held and let go in each turn with the lock."""

    def __init__(self, a: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns = [0]
        residency = a.store.blocks.residency
        for owner, name in (
            (residency.held, "defer_reuse"),
            (residency.held, "allow_reuse"),
            (residency.pins, "unpin"),
        ):
            self._count(owner, name, monkeypatch)
        self.gaps = watched(a.store, lambda count: self.turns.append(0))

    def _count(self, owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        really = getattr(owner, name)

        def counted(walked: Collection[int]) -> Any:
            self.turns[-1] += len(walked)
            return really(walked)

        monkeypatch.setattr(owner, name, counted)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """A piece is of as many rows and places as this, and a lease costs nothing else."""
    return cut_into(5, monkeypatch)


def cut_into(most: int, monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in (("ENDED_PLACES", most), ("LEASE_COST", 0), ("PART_COST", 0)):
        monkeypatch.setattr(shared, name, value)
    return most


@pytest.mark.parametrize("how", ["release", "lapse", "all at once", "drop", "time"])
def test_so_many_places_are_walked_at_a_time_and_no_more(
    how: str, in_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many leases end in one moment, and whatever ends them."""
    a, handle, keys = stocked(limits=Limits(lease_seconds=10))
    held = leases(a, handle, keys, 6)
    walked = Walked(a, monkeypatch)
    if how == "release":
        for lease in held:
            walked.turns.append(0)
            a.store.release(lease)
    elif how == "lapse":
        for lease in held:
            walked.turns.append(0)
            a.store.expire(lease)
    elif how == "all at once":
        a.store.begin_ending(held[:3], held[3:])
        walked.turns.append(0)
        a.store.finish_ending()
    elif how == "drop":
        assert a.store.drop(handle.number) == BLOCKS
    else:
        a.clock.advance(11)
        assert a.store.evict(0) == 0
    a.store.check()
    most = 2 * in_pieces if how == "time" else in_pieces  # whoever evicts does one piece in passing
    assert max(walked.turns) <= most
    places = {"release": 0, "all at once": 3}.get(how, 6) * BLOCKS * PARTS
    assert sum(walked.turns) == 6 * BLOCKS + places and len(walked.turns) >= sum(walked.turns) // in_pieces
    for lease in held:
        walked.turns.append(0)
        a.store.release(lease)
    assert max(walked.turns) <= most and is_at_rest(a)


def test_a_lease_is_over_as_soon_as_that_is_said(in_pieces: int) -> None:
    """What it pinned goes later, but nobody can use it or end it again."""
    a, handle, keys = stocked()
    released, expired = leases(a, handle, keys, 2)
    a.store.begin_ending([released], [expired])
    a.store.check()
    assert a.store.is_ending and a.store.usage().pinned_bytes > 0
    for lease in (released, expired):
        assert not a.store.is_leased(lease) and not a.store.attach(lease)
    pins = list(a.store.blocks.residency.pins.counts)
    a.store.begin_ending([released], [expired, released])
    assert a.store.usage().leases == 1 and sum(a.store.blocks.residency.pins.counts) <= sum(pins)
    a.store.finish_ending()
    assert not a.store.is_ending and a.store.usage().pinned_bytes == 0
    a.store.release(expired)
    assert is_at_rest(a)


def test_whoever_lacks_room_has_them_ended_first(in_pieces: int) -> None:
    """Neither a lease nor a put is refused for what nobody leases any more; at once it is not granted, so that the
    caller's thread goes on."""
    fraction = 13 * PARTS * 12 * 1024 / (4 << 20)
    a, handle, keys = stocked(limits=Limits(pinned_fraction=fraction))
    other = handle.hashed(ids(64 * BLOCKS, 5000)).keys
    assert handle.put(ids(64 * BLOCKS, 5000), random_pages(handle.layout, BLOCKS)).stored == BLOCKS
    a.store.begin_ending(leases(a, handle, keys, 3), ())
    assert a.store.lease_at_once(handle.number, other, 0) is None and a.store.is_ending
    reply = a.store.lease(handle.number, other, 0, 0)
    assert (reply.blocks, reply.reason) == (BLOCKS, None)
    refused = a.store.lease(handle.number, keys, 0, 0)
    assert refused.reason is MissReason.PINNED_FULL and not a.store.is_ending
    a.store.release(reply.lease)
    a.store.release(refused.lease)
    assert is_at_rest(a)


def test_a_put_evicts_what_leases_that_are_over_pin_still(in_pieces: int) -> None:
    a = bench(limits=Limits(pinned_fraction=1.0))
    handle = a.namespace()
    pages = random_pages(handle.layout, 80)
    assert handle.put(ids(64 * 80), pages).stored == 80
    keys = handle.hashed(ids(64 * 80)).keys
    a.store.begin_ending(leases(a, handle, keys, 2), ())
    assert a.store.is_ending
    assert handle.put(ids(64 * 20, 9000), random_pages(handle.layout, 20)).stored == 20
    a.store.check()


def test_leases_that_a_drop_ends_are_over_before_anybody_else_is_let_in(
    in_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lacks room between two pieces has all of them ended, and is not told that they are in the way."""
    a, handle, keys = stocked()
    numbers = leases(a, handle, keys, 6)
    seen: list[tuple[int, int]] = []
    watched(a.store, lambda count: seen.append((len(list(a.store.leases.live.values())), len(a.store.leases.ending))))
    a.store.drop(handle.number)
    assert seen[0] == (0, 6), "none of them is live or forgotten"
    for number in numbers:
        a.store.release(number)
    assert is_at_rest(a)


def test_a_short_end_gives_way_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for others each time."""
    a, handle, keys = stocked()
    walked = Walked(a, monkeypatch)
    for lease in leases(a, handle, keys, 3):
        a.store.release(lease)
    assert walked.gaps.count == 0 and ENDED_PLACES > BLOCKS * PARTS + LEASE_COST + PARTS * PART_COST
    assert is_at_rest(a)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, phases=[Phase.generate])  # a seed has no smaller one
@given(seed=st.integers(0, 1 << 32), most=st.integers(1, 40))
def test_however_leases_end_they_leave_the_pins_as_they_were(seed: int, most: int) -> None:
    """Whole, in pieces, by their time, by a connection that breaks off, twice, and with others coming in between: after
    each step pins and holds are those of the leases that are not over and of what is left of the others."""
    with pytest.MonkeyPatch.context() as patch:
        cut_into(most, patch)
        _end_in_any_way(random.Random(seed))


def _end_in_any_way(draw: random.Random) -> None:
    a, handle, keys = stocked(limits=Limits(lease_seconds=10))
    held: list[int] = []
    others = [a.store.lease(handle.number, keys[:3], 0, 0).lease]
    before = list(a.store.blocks.residency.pins.counts)

    def step() -> None:
        some = draw.sample(held, min(len(held), draw.randrange(4)))
        act = draw.randrange(9)
        if act < 2:
            first = draw.randrange(BLOCKS)
            held.append(a.store.lease(handle.number, keys[: draw.randint(first, BLOCKS)], first, 0).lease)
        elif act == 2:
            a.store.begin_ending(some, held[:2])
        elif act == 3:
            a.store.begin_ending((), some)
        elif act == 4:
            for lease in some:
                a.store.release(lease)
        elif act == 5:
            for lease in some:
                a.store.expire(lease)
        elif act == 6:
            a.clock.advance(draw.choice([1, 11]))
            if some and a.store.attach(some[0]):
                held.append(some[0])  # it has one more holder
        elif act == 7:
            with a.store.lock:
                row = a.store.blocks.index.find(handle.number, keys[draw.randrange(BLOCKS)])
                if row >= 0 and a.store.blocks.is_above(row) and a.store.blocks.index.state(row) == 2:
                    a.store.blocks.quarantine(row)
            handle.put(ALL_TOKENS, random_pages(handle.layout, BLOCKS))
        else:
            a.store.evict(draw.randrange(4))

    def check(_: int) -> None:
        a.store.check()

    def another(_: int) -> None:
        gaps.meanwhile = check
        step()

    gaps = watched(a.store, check)
    for turn in range(30):
        gaps.meanwhile = check if turn % 3 else another
        step()
        gaps.meanwhile = check
        a.store.check()
    for lease in held:
        a.store.release(lease)
    a.store.finish_ending()
    a.store.check()
    if a.store.is_leased(others[0]):
        now = list(a.store.blocks.residency.pins.counts)
        assert sum(now) == sum(before) == 3
    a.store.release(others[0])
    assert is_at_rest(a)


PUT_BLOCKS = 10


@pytest.mark.parametrize("meanwhile", ["nothing", "abort", "cancel", "drop", "commit", "put", "close", "interrupt"])
@pytest.mark.parametrize("committed", [0, 3])
@pytest.mark.parametrize("how", ["abort", "cancel", "later"])
def test_a_long_put_is_given_up_in_pieces(
    how: str, committed: int, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever others do in between, its slots are free in the end, and free once."""
    monkeypatch.setattr(reservations, "ABORTED_PLACES", 2 * PARTS)
    a, handle, _ = stocked()
    free = a.store.usage().dram
    keys = handle.hashed(ids(64 * PUT_BLOCKS, 7000)).keys
    reply = a.store.reserve(handle.number, keys, 0, 0, None)
    assert len(reply.blocks) == PUT_BLOCKS
    digests = [[bytes(16)] * len(handle.layout.parts[0].layers)]
    for part in range(PARTS):
        a.store.commit(reply.reservation, part, 0, digests * committed)

    def others(count: int) -> None:
        a.store.check()
        if count != 2:
            return
        if meanwhile == "abort":
            a.store.abort(reply.reservation)
        elif meanwhile == "cancel":
            a.store.cancel(reply.reservation)
        elif meanwhile == "drop":
            a.store.drop(handle.number)
        elif meanwhile == "commit":
            assert a.store.commit(reply.reservation, 0, committed, digests) == 0
        elif meanwhile == "put":
            assert a.store.reserve(handle.number, keys, 0, 0, None).present == committed
        elif meanwhile == "close":
            a.store.close()
        elif meanwhile == "interrupt":
            raise KeyboardInterrupt

    gaps = watched(a.store, others)
    try:
        if how == "abort":
            a.store.abort(reply.reservation)
        elif how == "cancel":
            a.store.cancel(reply.reservation)
        else:
            a.store.begin_abort(reply.reservation)
            a.store.finish_ending()
    except KeyboardInterrupt:
        assert meanwhile == "interrupt"
    assert gaps.count >= 2
    gaps.meanwhile = lambda count: None
    a.store.abort(reply.reservation)
    if meanwhile == "close":
        return
    a.store.check()
    assert not a.store.is_ending and a.store.match(handle.number, keys).blocks == (
        0 if meanwhile == "drop" else committed
    )
    usage = a.store.usage()
    if meanwhile != "put":  # it has reserved what was given up by then
        assert (usage.reservations, usage.dram.reserved) == (0, 0)
    if meanwhile not in ("put", "drop"):
        assert usage.dram.used == free.used + committed * PARTS


def test_a_commit_of_many_blocks_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says in the end how many are committed; one that was cancelled in between commits no more."""
    monkeypatch.setattr(reservations, "SEALED_BLOCKS", 3)
    a, handle, _ = stocked()
    digests = [[bytes(16)] * len(handle.layout.parts[0].layers)] * PUT_BLOCKS
    for cancels in (False, True):
        keys = handle.hashed(ids(64 * PUT_BLOCKS, 7000 + 1000 * cancels)).keys
        number = a.store.reserve(handle.number, keys, 0, 0, None).reservation
        told = [a.store.commit(number, part, 0, digests) for part in range(PARTS - 1)]

        def others(count: int, cancels: bool = cancels, number: int = number) -> None:
            a.store.check()
            if cancels and count == 2:
                a.store.cancel(number)

        gaps = watched(a.store, others)
        told.append(a.store.commit(number, PARTS - 1, 0, digests))
        assert gaps.count == 3
        assert told == [0] * (PARTS - 1) + [0 if cancels else PUT_BLOCKS]
        assert a.store.match(handle.number, keys).blocks == (6 if cancels else PUT_BLOCKS)
        watched(a.store)
        a.store.abort(number)
        a.store.check()
