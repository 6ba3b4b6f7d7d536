"""The table of those who wait for blocks: each is told once, for the right reason, whatever comes in which order."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asking import Asking
from kvstore.block.identity import Prompt
from kvstore.core.store import Store
from kvstore.node import EmbeddedStore
from kvstore.protocol import messages as m
from tiering.counts.awaits import MAX_AWAIT_SECONDS, AwaitEnd, Awaits, ParkedAwait
from waiting import FakeClock, wait_until
from workbench import MODEL, ids, open_at, plausible_pages, random_pages, small_layout

SEEDS = range(40)
STEPS = 250
LAYOUT = small_layout()
SLICES = [len(part.layers) for part in LAYOUT.parts]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    with open_at(tmp_path / "kv", dram="1MiB") as store:
        yield store
        store.check()


@dataclass
class Told:
    """Awaits of one store, each with how often it was told."""

    core: Store
    counts: Counter[ParkedAwait] = field(default_factory=Counter)

    def park(self, number: int, keys: list[bytes], seconds: float = 20.0) -> ParkedAwait:
        return self.core.park(number, keys, seconds, lambda one: self.counts.update([one]))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


# The table alone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_events_tells_each_once_and_rightly(seed: int) -> None:
    """Against a dictionary: a key is absent, pending or readable; time stands still but for one kind of step."""
    print(f"seed {seed}")
    draw, clock = random.Random(seed), FakeClock()
    awaits = Awaits(clock.monotonic_seconds, most=6)
    pending: set[tuple[int, bytes]] = set()
    readable: set[tuple[int, bytes]] = set()
    told: Counter[ParkedAwait] = Counter()
    parked: dict[ParkedAwait, float] = {}
    expected: dict[ParkedAwait, AwaitEnd] = {}

    def over(ones: list[ParkedAwait], why: AwaitEnd) -> None:
        for one in ones:
            del parked[one]
            expected[one] = why

    for _ in range(STEPS):
        name = draw.randrange(3), key(draw.randrange(8))
        match draw.randrange(8):
            case 0 | 1 | 2:
                number, length = name[0], draw.randrange(1, 4)
                first = draw.randrange(8 - length + 1)
                keys = [key(first + at) for at in range(length)]
                one = ParkedAwait(
                    number, b"%d" % (number // 2), keys, draw.choice([0.5, 2.0, 99.0]), lambda one: told.update([one])
                )
                awaits.register(one)
                over([late for late, at in parked.items() if at <= clock.monotonic_seconds()], AwaitEnd.DEADLINE)
                if sum(other.tenant == one.tenant for other in parked) >= 6:
                    expected[one] = AwaitEnd.FULL
                    continue
                parked[one] = clock.monotonic_seconds() + min(one.seconds, MAX_AWAIT_SECONDS)
                found = next((at for at, each in enumerate(keys) if (number, each) not in readable), length)
                if (number, keys[-1]) in readable:
                    found = length
                    over([one], AwaitEnd.READABLE)
                awaits.looked(one, found)
            case 3 if name not in readable:
                pending.discard(name)
                readable.add(name)
                over([one for one in parked if (one.number, one.keys[-1]) == name], AwaitEnd.READABLE)
                awaits.published(*name)
            case 4:
                pending.add(name)
            case 5 if name in pending:
                pending.discard(name)
                hit = [one for one in parked if one.number == name[0] and name[1] in (one.keys[-1], one.follows)]
                over(hit, AwaitEnd.SHORT)
                awaits.gave_up(*name)
            case 6:
                clock.advance(draw.choice([0.1, 1.0, 10.0]))
                awaits.expire()
                over([one for one, at in parked.items() if at <= clock.monotonic_seconds()], AwaitEnd.DEADLINE)
            case 7 if draw.random() < 0.3:
                one = draw.choice(list(parked)) if parked else None
                if one is not None:
                    over([one], AwaitEnd.CANCELLED)
                    awaits.end([one, one], AwaitEnd.CANCELLED)
                readable.discard(name)  # evicted: nothing is told of that
        assert {one: one.end for one in expected} == expected
        assert all(told[one] == 1 for one in expected) and all(not told[one] and one.end is None for one in parked)
        awaits.check(lambda number, each: (number, each) in readable)
        assert awaits.counts().parked == len(parked)
    awaits.end_all(AwaitEnd.GONE)
    assert awaits.counts().parked == 0 and not awaits.heads and all(one.end is AwaitEnd.GONE for one in parked)
    assert sum(awaits.counts().ended.values()) == len(expected) + len(parked)


def test_what_ended_early_is_not_kept_for_its_time() -> None:
    awaits = Awaits(FakeClock().monotonic_seconds)
    for at in range(20_000):
        one = ParkedAwait(0, b"t", [key(at)], 30.0, lambda _: None)
        awaits.register(one)
        awaits.end([one], AwaitEnd.CANCELLED)
    assert len(awaits._due) < 100
    awaits.check(lambda *_: False)


# With a store ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [0, 1, 3])
def test_a_put_that_ends_short_ends_the_waits_for_what_it_would_have_stored(
    store: EmbeddedStore, committed: int
) -> None:
    handle = store.namespace(model=MODEL, layout=LAYOUT)
    told, keys, door = Told(store._store), handle.hashed(ids(512)).keys, Asking(handle.door)
    before = told.park(handle.number, keys[:4])
    reply = door.reserve(handle.number, keys[:4])
    behind = told.park(handle.number, keys)  # of a later put, but it follows what this one stores
    apart = told.park(handle.number, keys[5:6])
    for part, slices in enumerate(SLICES):
        door.commit(reply.reservation, part, 0, [[bytes(16)] * slices] * committed)
    door.abort(reply.reservation)
    assert before.end is AwaitEnd.SHORT and apart.end is None
    assert behind.end is (None if committed else AwaitEnd.SHORT)
    assert store._store.awaited(before).blocks == committed
    told.core.awaits.end([behind, apart], AwaitEnd.CANCELLED)


def test_a_refill_that_is_given_up_ends_waits_too(store: EmbeddedStore) -> None:
    handle = store.namespace(model=MODEL, layout=LAYOUT)
    handle.put(ids(128), random_pages(LAYOUT, 2))
    prompt, door = handle.hashed(ids(128)), Asking(handle.door)
    with handle.lease(handle.match(prompt)) as lease:
        store._store.spans([lease.reply.places[0][1]])[0].view[4200] ^= 1
        door.report(lease.reply.lease, 1, 0)
    one = Told(store._store).park(handle.number, prompt.keys)
    assert one.end is None, "a block that is damaged may be stored again"
    door.abort(door.reserve(handle.number, prompt.keys).reservation)
    assert one.end is AwaitEnd.SHORT
    assert handle.put(ids(128), random_pages(LAYOUT, 2)).stored == 1
    assert Told(store._store).park(handle.number, prompt.keys).end is AwaitEnd.READABLE


def test_a_drop_and_a_close_end_all_waits(tmp_path: Path) -> None:
    store = open_at(tmp_path / "kv", dram="1MiB")
    one, two = (store.namespace(model=name, layout=LAYOUT) for name in ("a", "b"))
    told = Told(store._store)
    mine, theirs = told.park(one.number, [key(1)]), told.park(two.number, [key(1)])
    store.drop(one)
    assert mine.end is AwaitEnd.GONE and theirs.end is None
    store.close()
    assert theirs.end is AwaitEnd.GONE and told.core.awaited(theirs).blocks == 0
    assert told.park(two.number, [key(1)]).end is AwaitEnd.GONE


def test_a_thread_that_may_wait_and_one_that_must_not(store: EmbeddedStore) -> None:
    handle = store.namespace(model=MODEL, layout=LAYOUT)
    prompt = handle.hashed(ids(128))
    assert handle.await_block(prompt, 1, 1).end is AwaitEnd.DEADLINE
    pending, unwanted = handle.submit_await(prompt, 1, 30_000), handle.submit_await(prompt, 0, 30_000)
    assert not pending.is_ready() and pending.poll() is None
    found: list[m.Awaited] = []
    thread = threading.Thread(target=lambda: found.append(handle.await_block(prompt, 1, 30_000)))
    thread.start()
    wait_until(lambda: store._store.awaits.counts().parked == 3)
    unwanted.cancel()
    handle.put(ids(128), plausible_pages(LAYOUT, 2))
    thread.join(20)
    assert found == [m.Awaited(1, AwaitEnd.READABLE)] == [pending.poll()]
    assert pending.is_ready() and unwanted.poll() == m.Awaited(0, AwaitEnd.CANCELLED)
    assert store._store.awaits.counts().parked == 0


# Threads --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_threads_do_at_a_time_each_wait_is_told_once(tmp_path: Path, seed: int) -> None:
    """Puts, aborts, evictions, drops, cancels and awaits of the same chains."""
    print(f"seed {seed}")
    with open_at(tmp_path / "kv", dram="1MiB", extent="64KiB") as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        core, told, lock = store._store, Counter[ParkedAwait](), threading.Lock()
        prompts = [handle.hashed(ids(256, 1000 * at)) for at in range(6)]
        ones: list[ParkedAwait] = []
        ends_at = time.monotonic() + 1.5

        def work(which: int) -> None:
            draw, door = random.Random(1000 * seed + which), Asking(handle.door)
            while time.monotonic() < ends_at:
                prompt: Prompt = draw.choice(prompts)
                what = draw.randrange(6) if which else draw.randrange(5, 7)
                if what < 3:
                    one = core.park(handle.number, prompt.keys, draw.choice([0.002, 5.0]), lambda it: note(it))
                    with lock:
                        ones.append(one)
                elif what == 3:
                    reply = door.reserve(handle.number, prompt.keys)
                    if reply.reservation:
                        count = draw.randrange(len(reply.blocks) + 1)
                        for part, slices in enumerate(SLICES):
                            door.commit(reply.reservation, part, 0, [[bytes(16)] * slices] * count)
                        door.abort(reply.reservation)
                elif what == 4:
                    with lock:
                        some = ones[-3:]
                    core.awaits.end(some, AwaitEnd.CANCELLED)
                elif what == 5:
                    core.evict(draw.randrange(6))
                    core.awaits.expire()
                else:
                    store.drop(handle)

        def note(one: ParkedAwait) -> None:
            told.update([one])  # under the table's lock

        threads = [threading.Thread(target=work, args=(which,)) for which in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        store.check()
        core.awaits.end_all(AwaitEnd.GONE)
        assert all(one.end is not None for one in ones) and told == Counter(ones)
        assert {one.end for one in ones} >= {AwaitEnd.READABLE, AwaitEnd.SHORT, AwaitEnd.CANCELLED}
