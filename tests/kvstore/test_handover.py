"""Memory that others still map: a put waits for it, for a while, once, and never for long in all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handle import NamespaceHandle, PutResult
from kvstore.handover import LOOKS_SECONDS, REGAIN, TENANT_SECONDS, WAIT_SECONDS, Patience
from kvstore.identity import TenantKeys
from kvstore.miss import MissReason
from workbench import KIB, OTHER_SECRET, Bench, bench, ids, random_pages

ONE, TWO = b"one", b"two"

# Patience -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([ONE, TWO]), st.floats(0, 3), st.floats(0, WAIT_SECONDS)), max_size=60))
def test_a_tenant_waits_for_no_more_than_its_seconds_and_a_tenth_of_the_time(
    asked: list[tuple[bytes, float, float]],
) -> None:
    """Each ask: whose, how long after the one before, and how long it would wait. Waits may overlap."""
    patience, now = Patience(), 100.0
    waited = {ONE: 0.0, TWO: 0.0}
    under_way: list[tuple[float, float, bytes]] = []
    for number, (tenant, pause, seconds) in enumerate(asked):
        now += pause
        for one in sorted(one for one in under_way if one[0] <= now):
            under_way.remove(one)
            patience.end(one[2], one[1], one[0])
        if patience.begin(tenant, [number], now):
            under_way.append((now + seconds, seconds, tenant))
            waited[tenant] += seconds
        for total in waited.values():
            assert total <= TENANT_SECONDS + REGAIN * (now - 100.0) + 1e-9


def test_what_is_let_go_of_at_once_is_always_waited_for() -> None:
    patience = Patience()
    for number in range(1000):
        now = number * 0.05
        assert patience.begin(ONE, [number], now)
        patience.end(ONE, 0.005, now + 0.005)


def test_memory_is_waited_for_in_vain_once() -> None:
    patience = Patience()
    assert patience.begin(ONE, [1, 2], 0.0)
    patience.in_vain([1, 2])
    patience.end(ONE, WAIT_SECONDS, 0.2)
    assert not patience.begin(ONE, [1, 2], 10.0) and not patience.begin(TWO, [2], 10.0)
    assert patience.begin(TWO, [2, 3], 10.0), "there is some that may come"


def test_a_tenant_that_waited_for_long_waits_again_when_time_has_passed() -> None:
    patience, waits = Patience(), 0
    while patience.begin(ONE, [waits], 0.0):
        waits += 1
    assert waits == int(TENANT_SECONDS / WAIT_SECONDS)
    assert patience.begin(TWO, [waits], 0.0), "others wait for themselves"
    for _ in range(waits):
        patience.end(ONE, WAIT_SECONDS, 0.0)
    assert not patience.begin(ONE, [waits], 0.0)
    assert patience.begin(ONE, [waits], WAIT_SECONDS / REGAIN)


# In the store ---------------------------------------------------------------------------------------------------------


class Handing:
    """A store of four extents that one tenant has filled, and whose client maps them; another tenant's puts."""

    def __init__(self) -> None:
        self.bench: Bench = bench(dram=256 * KIB)
        self.first = self.bench.namespace()
        self.second = self.bench.namespace(keys=TenantKeys.derive(OTHER_SECRET))
        assert put(self.first, 20) == PutResult(0, 20, None, None)
        self.dram = self.bench.store._blocks.dram
        self.mapped = {number: self._share(number) for number in self.dram._extents}
        self.looks: list[float] = []
        self._wait = self.bench.store._waiting.wait
        self.bench.store._waiting.wait = self._look  # type: ignore[method-assign]
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
        refused = PutResult(0, 0, 0, MissReason.PINNED_FULL)
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


def test_a_tenant_s_puts_wait_only_for_so_long_in_all() -> None:
    """Whatever else is given back meanwhile, and is mapped as well."""
    with closing(Handing()) as h:
        real = h._wait

        def wait(seconds: float | None = None) -> bool:
            h.bench.clock.advance(seconds or 0.0)
            return real(0.0001)

        h._wait = wait  # type: ignore[method-assign, assignment]
        for number in range(20):
            h.bench.store._patience._in_vain.clear()  # as if it were another one each time
            assert put(h.second, 5, start=100_000 * number).reason is MissReason.PINNED_FULL
        spent = sum(h.looks)
        assert TENANT_SECONDS - WAIT_SECONDS < spent <= TENANT_SECONDS + REGAIN * spent
