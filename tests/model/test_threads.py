"""Four threads at once on three namespaces and a mebibyte: every byte that comes back is compared, nothing hangs.

The number of operations is fixed and the seeds are printed; what differs between two runs is how the threads
interleave, which a short switch interval makes as bad as it can be.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asking import Asking
from kvstore.block.account import MissReason
from kvstore.block.errors import StoreClosed
from kvstore.client import get as getting
from kvstore.client import handle
from kvstore.client.handle import Lease
from kvstore.config import Limits
from model.store_model import BLOCK_TOKENS, LATENT, SHARDED, WHOLE, OpenStore, Owned, Prompt, open_store

THREADS = 4
OPERATIONS = 1500
SEEDS = (1, 2)
HANGS_AFTER_SECONDS = 180
PROMPTS = [Prompt((first, *rest)) for first in range(12) for rest in ((), (0,), (0, 1), (2, 1, 0))]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenStore]:
    opened = open_store(tmp_path, limits=Limits(lease_seconds=5, pinned_fraction=0.5))
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def puts_and_gets_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "WINDOW_BLOCKS", 2)
    monkeypatch.setattr(getting, "PIECE_BLOCKS", 2)


@pytest.fixture(autouse=True)
def threads_change_places_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Worker:
    """One thread's random operations."""

    def __init__(self, opened: OpenStore, spaces: list[Owned], seed: int, damage: bool) -> None:
        self.opened, self.spaces, self.damage = opened, spaces, damage
        self.chance = random.Random(seed)
        self.held: list[tuple[Owned, Prompt, Lease]] = []
        self.counts: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        for _ in range(operations):
            act = self.chance.choices(
                [self.put, self.read, self.hold, self.read_held, self.let_go, self.half_a_put, self.evict, self.drop],
                [30, 30, 10, 10, 8, 6, 4, 2],
            )[0]
            act(self.chance.choice(self.spaces), self.chance.choice(PROMPTS))
        while self.held:
            self.let_go(*self.held[-1][:2])

    def put(self, space: Owned, prompt: Prompt) -> None:
        result = space.put(prompt)
        self.counts[f"put: {result.reason}"] += 1
        assert (result.stopped_at is None) == (result.reason is None)
        assert result.reason in (None, *EXPECTED_OF_A_PUT)
        assert result.present + result.stored <= len(prompt.letters)

    def read(self, space: Owned, prompt: Prompt) -> None:
        with space.handle.lease(space.match(prompt)) as lease:
            self.load(space, prompt, lease)

    def hold(self, space: Owned, prompt: Prompt) -> None:
        if len(self.held) < 3:
            self.held.append((space, prompt, space.handle.lease(space.match(prompt))))

    def read_held(self, space: Owned, prompt: Prompt) -> None:
        if self.held:
            chosen = self.chance.choice(self.held)
            if self.damage:
                self.flip(*chosen)
            self.load(*chosen)

    def let_go(self, space: Owned, prompt: Prompt) -> None:
        if self.held:
            _, _, lease = self.held.pop()
            if self.chance.random() < 0.5:
                lease.release()  # else forgotten: the last reference goes at the end of this call

    def half_a_put(self, space: Owned, prompt: Prompt) -> None:
        """A producer that gives up."""
        reply = Asking(space.door).reserve(space.handle.number, space.match(prompt).keys, 0, 0, None)
        if reply.reservation:
            for place in reply.places[0]:
                space.door.memory(0, [place])[0].view[-1] = 1
            Asking(space.door).abort(reply.reservation)

    def evict(self, space: Owned, prompt: Prompt) -> None:
        self.opened.store.evict(3)
        self.opened.clock.advance(0.5)

    def drop(self, space: Owned, prompt: Prompt) -> None:
        self.counts["dropped blocks"] += self.opened.drop(space)
        self.opened.core.check()

    def load(self, space: Owned, prompt: Prompt, lease: Lease) -> None:
        """Whatever is reported as loaded is what was put; without damage that is all that was leased."""
        style = self.chance.choice(["heads", "tokens"])
        pages = space.pages(lease.tokens, self.chance.choice([32, 64]), style, seed=self.chance.randrange(100))
        before = pages.snapshot()
        loaded = space.handle.get(lease, pages.pages)
        assert loaded.account.asked == prompt.tokens
        assert loaded.reason in ((None, MissReason.CORRUPT) if self.damage else (None,))
        assert loaded.reason is not None or loaded.tokens == lease.tokens
        kv = {token: space.kv(prompt, token // BLOCK_TOKENS) for token in range(0, loaded.tokens, BLOCK_TOKENS)}
        pages.expect(before, kv, ignore_from=None if loaded.reason is None else loaded.tokens)
        self.counts["tokens"] += loaded.tokens
        self.counts["corrupt"] += loaded.reason is not None

    def flip(self, space: Owned, prompt: Prompt, lease: Lease) -> None:
        if lease.blocks:
            block = self.chance.randrange(lease.blocks)
            frames = space.frames(lease, block)
            if not frames:
                return  # quarantined before, and its extent is gone
            self.chance.choice(frames).view[self.chance.choice([0, 100, 4095, 4096, 5000])] ^= (
                1 << self.chance.randrange(8)
            )


NO_ROOM = (MissReason.PINNED_FULL, MissReason.DEADLINE, MissReason.QUOTA)
EXPECTED_OF_A_PUT = (MissReason.IN_FLIGHT, MissReason.DISABLED, MissReason.EVICTED, *NO_ROOM)


def together(workers: list[Callable[[], None]]) -> None:
    """Run each in a thread; a failure in any is a failure, and a hang shows where everybody stands."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in workers]
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_AFTER_SECONDS + 5)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs; all stacks are above"
    finally:
        faulthandler.cancel_dump_traceback_later()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("damage", [False, True], ids=["intact", "damaged"])
@pytest.mark.parametrize("seed", SEEDS)
def test_threads_at_random(opened: OpenStore, seed: int, damage: bool) -> None:
    print(f"seed {seed}")
    layouts = (("a", WHOLE, "default"), ("b", SHARDED, "default"), ("a", LATENT, "other"))
    spaces = [opened.namespace(model, layout, tenant) for model, layout, tenant in layouts]
    workers = [Worker(opened, spaces, seed * 100 + number, damage) for number in range(THREADS)]
    together([lambda worker=worker: worker.run(OPERATIONS) for worker in workers])  # type: ignore[misc]
    counts = sum((worker.counts for worker in workers), Counter())
    opened.core.evict(0)
    opened.core.check()
    usage = opened.core.usage()
    print(dict(counts), usage)
    left = usage.dram
    assert (usage.leases, usage.reservations, usage.pinned_bytes, left.zombie, left.reserved) == (0, 0, 0, 0, 0)
    assert counts["tokens"] and usage.counters["evicted_blocks"] and usage.counters["reclaimed_extents"]
    assert bool(counts["corrupt"]) == damage
    for space in spaces:
        opened.drop(space)
    assert opened.core.usage().dram.capacity == 0, "with all namespaces dropped all memory is given back"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_closes_under_everybody(opened: OpenStore, seed: int) -> None:
    print(f"seed {seed}")
    spaces = [opened.namespace("a", WHOLE), opened.namespace("b", SHARDED)]
    chance = random.Random(seed)

    def use(number: int) -> None:
        own = random.Random(seed * 100 + number)
        for _ in range(OPERATIONS):
            space, prompt = own.choice(spaces), own.choice(PROMPTS)
            result = space.put(prompt)
            assert result.reason is None or result.reason in EXPECTED_OF_A_PUT
            with space.handle.lease(space.match(prompt)) as lease:
                pages = space.pages(lease.tokens)
                loaded = space.handle.get(lease, pages.pages)
                assert loaded.reason in (None, MissReason.DISABLED)
            try:
                opened.core.evict(1)
                if own.random() < 0.05:
                    opened.drop(space)
            except StoreClosed:
                assert opened.core.closed

    def close() -> None:
        while opened.core.usage().counters.get("reclaimed_extents", 0) < chance.randrange(5, 30):
            pass
        opened.store.close()

    together([*(lambda number=number: use(number) for number in range(THREADS - 1)), close])  # type: ignore[misc]
    assert opened.core.closed and opened.core.usage().dram.taken_bytes == 0
