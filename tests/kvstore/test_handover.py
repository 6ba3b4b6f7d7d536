"""Memory that others still map: a put waits for it, for a while, once, and never for long in all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.account import MissReason
from kvstore.block.identity import TenantKeys
from kvstore.client.handle import NamespaceHandle, PutResult
from kvstore.protocol.door import Collective
from tiering.dram.unmap_wait import (
    COLLECTIVE_LOOKS,
    LOOKS_SECONDS,
    MOMENT_SECONDS,
    MOST_WAITING,
    REGAIN,
    TENANT_SECONDS,
    WAIT_SECONDS,
    UnmapWait,
)
from workbench import KIB, OTHER_SECRET, Bench, bench, ids, random_pages

ONE, TWO = b"one", b"two"

# Patience -------------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from([ONE, TWO]), st.floats(0, 1), st.floats(0, WAIT_SECONDS), st.booleans()), max_size=200
    )
)
def test_a_tenant_waits_for_moments_and_for_no_more_than_its_seconds_and_a_tenth_of_the_time(
    asked: list[tuple[bytes, float, float, bool]],
) -> None:
    """Each ask: whose, how long after the one before, how long it would wait, and whether it is joint. Waits may
    overlap, and so the last of them exceed what is left."""
    unmap_wait, now = UnmapWait(), 100.0
    charged = {ONE: 0.0, TWO: 0.0}
    under_way: list[tuple[float, float, bytes, bool]] = []
    for number, (tenant, pause, seconds, is_collective) in enumerate(asked):
        now += pause
        for one in sorted(one for one in under_way if one[0] <= now):
            under_way.remove(one)
            unmap_wait.end(one[2], one[1], one[0], is_collective=one[3])
        if unmap_wait.begin(tenant, [number], now):
            under_way.append((now + seconds, seconds, tenant, is_collective))
            charged[tenant] += seconds if is_collective else max(0.0, seconds - MOMENT_SECONDS)
        assert len(under_way) <= MOST_WAITING
        for total in charged.values():
            assert total <= TENANT_SECONDS + MOST_WAITING * WAIT_SECONDS + REGAIN * (now - 100.0) + 1e-9


def test_what_is_let_go_of_at_once_is_always_waited_for() -> None:
    """One after the other, with nothing between them."""
    unmap_wait, now = UnmapWait(), 0.0
    for number in range(2000):
        assert unmap_wait.begin(ONE, [number], now)
        now += MOMENT_SECONDS
        unmap_wait.end(ONE, MOMENT_SECONDS, now)


@pytest.mark.parametrize("is_collective", [False, True])
def test_a_tenant_that_waited_for_long_waits_again_when_time_has_passed(*, is_collective: bool) -> None:
    unmap_wait, waits = UnmapWait(), 0
    while unmap_wait.begin(ONE, [waits], 0.0):
        unmap_wait.end(ONE, WAIT_SECONDS, 0.0, is_collective=is_collective)
        waits += 1
    charged = WAIT_SECONDS if is_collective else WAIT_SECONDS - MOMENT_SECONDS
    assert waits == ceil(TENANT_SECONDS / charged)
    assert unmap_wait.begin(TWO, [waits], 0.0), "others wait for themselves"
    over = waits * charged - TENANT_SECONDS
    assert not unmap_wait.begin(ONE, [waits], over / REGAIN - 0.01)
    assert unmap_wait.begin(ONE, [waits], over / REGAIN + 0.01)
    assert not UnmapWait().begin(ONE, [], 0.0)


# In the store ---------------------------------------------------------------------------------------------------------


class Handing:
    """A store of four extents that one tenant has filled, and whose client maps them; another tenant's puts."""

    def __init__(self) -> None:
        self.bench: Bench = bench(dram=256 * KIB)
        self.first = self.bench.namespace()
        self.second = self.bench.namespace(keys=TenantKeys.derive(OTHER_SECRET))
        assert put(self.first, 20) == PutResult(0, 20, None, None)
        self.dram = self.bench.store.blocks.dram
        self.mapped = {number: self._share(number) for number in self.dram._extents}
        self.looks: list[float] = []
        self._wait = self.bench.store._room._unmapping.wait
        self.bench.store._room._unmapping.wait = self._look  # type: ignore[method-assign]
        self.meanwhile: Callable[[], object] = lambda: None

    def _share(self, number: int) -> int:
        store, keys = self.bench.store, self.bench.keys
        return store.share(number, keys.tenant, holder=7).descriptor

    def _look(self, seconds: float | None = None) -> bool:
        assert seconds is not None
        self.looks.append(seconds)
        self.meanwhile()
        return self._wait(seconds)

    def let_go(self, *, of_all: bool = True) -> None:
        """The client unmaps all that it has, or one extent that was given back."""
        for number in list(self.mapped) if of_all else self.dram.gone(self.mapped)[:1]:
            os.close(self.mapped.pop(number))

    def close(self) -> None:
        self.let_go()
        self.bench.store.check()
        self.bench.store.close()


def put(handle: NamespaceHandle, blocks: int, start: int = 0) -> PutResult:
    return handle.put(ids(64 * blocks, start), random_pages(handle.layout, blocks))


def test_a_put_waits_until_others_have_unmapped() -> None:
    with closing(Handing()) as h:
        h.meanwhile = lambda: h.let_go() if len(h.looks) == 3 else None
        assert put(h.second, 5) == PutResult(0, 5, None, None)
        assert h.looks == list(LOOKS_SECONDS[:3])
        assert put(h.second, 5, start=100_000).stored == 5
        assert len(h.looks) == 3, "nobody maps the next one"


def test_what_nobody_lets_go_of_is_waited_for_once() -> None:
    with closing(Handing()) as h:
        refused = PutResult(0, 0, 0, MissReason.DEADLINE)
        assert put(h.second, 5) == refused and h.looks == list(LOOKS_SECONDS)
        there = h.bench.store.usage().blocks
        for start in (100_000, 200_000):
            assert put(h.second, 5, start) == refused
        assert h.looks == list(LOOKS_SECONDS)
        assert h.bench.store.usage().blocks == there, "nobody loses anything more for it"
        h.let_go()
        assert put(h.second, 5, start=300_000).stored == 5 and h.looks == list(LOOKS_SECONDS)


def test_whoever_has_blocks_of_its_own_replaces_these_then() -> None:
    with closing(Handing()) as h:
        h.meanwhile = lambda: h.let_go(of_all=False) if len(h.looks) == 1 else None
        assert put(h.second, 5).stored == 5 and len(h.looks) == 1
        for number in range(1, 6):
            assert put(h.second, 5, start=100_000 * number).stored == 5
        assert len(h.looks) == 1 + len(LOOKS_SECONDS)
        assert h.second.match(ids(320, 500_000)).blocks == 5 and h.second.match(ids(320)).blocks == 0
        assert h.first.match(ids(1280)).blocks == 10, "one extent was had, and another waited for in vain"


@pytest.mark.parametrize("ends", ["dropped", "closed"])
def test_a_put_that_waits_ends_with_its_namespace_and_with_the_store(ends: str) -> None:
    h = Handing()
    store, other = h.bench.store, threading.Thread()

    def end() -> None:
        nonlocal other
        if len(h.looks) == 2:  # the lock is held by the put until it waits
            act = store.close if ends == "closed" else (lambda: store.drop(1))
            other = threading.Thread(target=act)
            other.start()

    h.meanwhile = end
    assert put(h.second, 5) == PutResult(0, 0, 0, MissReason.DISABLED)
    other.join(20)
    assert not other.is_alive() and len(h.looks) < len(LOOKS_SECONDS)
    h.close()


def test_a_put_that_is_interrupted_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its way to the wait, and within it."""

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with closing(Handing()) as h:
        room = h.bench.store._room
        for where, name in ((room, "_await_memory"), (room._unmapping, "wait")):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    put(h.second, 5)
            assert room._unmap_wait._waiting == 0
        h.meanwhile = h.let_go
        assert put(h.second, 5).stored == 5


def test_who_finds_all_places_taken_on_its_way_to_the_wait_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Handing()) as h:
        unmap_wait, real = h.bench.store._room._unmap_wait, h.bench.store._room._await_memory

        def await_memory(*given: Any) -> tuple[float, bool]:
            unmap_wait._waiting += MOST_WAITING
            return real(*given)

        monkeypatch.setattr(h.bench.store._room, "_await_memory", await_memory)
        assert put(h.second, 5) == PutResult(0, 0, 0, MissReason.DEADLINE) and h.looks == []
        assert unmap_wait._waiting == MOST_WAITING


def test_a_tenant_s_puts_wait_only_for_so_long_in_all() -> None:
    """Whatever else is given back meanwhile, and is mapped as well."""
    with closing(Handing()) as h:
        real = h._wait

        def wait(seconds: float | None = None) -> bool:
            h.bench.clock.advance(seconds or 0.0)
            return real(0.0001)

        h._wait = wait  # type: ignore[method-assign, assignment]
        for number in range(20):
            h.bench.store._room._unmap_wait._in_vain.clear()  # as if it were another one each time
            assert put(h.second, 5, start=100_000 * number).reason is MissReason.DEADLINE
        waits = len(h.looks) // len(LOOKS_SECONDS)
        charged = waits * (WAIT_SECONDS - MOMENT_SECONDS)
        assert TENANT_SECONDS < charged < TENANT_SECONDS + WAIT_SECONDS + REGAIN * sum(h.looks)


def test_a_put_waits_in_vain_once_whatever_is_given_back_meanwhile() -> None:
    with closing(Handing()) as h:
        h.meanwhile = h.bench.store._room._unmap_wait._in_vain.clear
        assert put(h.second, 5).reason is MissReason.DEADLINE
        assert h.looks == list(LOOKS_SECONDS)


def test_what_others_took_was_not_waited_for_in_vain() -> None:
    """It looks again at once, and waits for what is given back then."""
    with closing(Handing()) as h:
        awaited = h.dram.awaited
        later: list[int] = []

        def taken_by_others() -> list[int]:
            return later or awaited()

        h.dram.awaited = taken_by_others  # type: ignore[method-assign]

        def meanwhile() -> None:
            later[:] = [10**9 + len(h.looks)] if len(h.looks) < 4 else []
            if len(h.looks) == 4:
                h.let_go()

        h.meanwhile = meanwhile
        assert put(h.second, 5).stored == 5
        assert h.looks == [LOOKS_SECONDS[0]] * 4, "another extent each time"


def test_a_joint_put_waits_for_a_moment_only() -> None:
    """Others wait for it meanwhile."""
    with closing(Handing()) as h:
        keys = [bytes([number]) * 32 for number in range(5)]
        for name in ("a", "b"):
            reply = h.bench.store.reserve(1, keys, 0, 0, None, Collective(name, (0,), b"session"))
            assert reply.reservation == 0 and reply.reason is MissReason.DEADLINE
        assert h.looks == 2 * list(LOOKS_SECONDS[:COLLECTIVE_LOOKS])
