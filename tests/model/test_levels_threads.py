"""Four threads at once on two tiny tiers: every byte is compared, nothing hangs, nothing leaks; and the power goes.

The seeds are printed; what differs between two runs is how the threads interleave, which a short switch interval makes
as bad as it can be. Bytes are a function of the block's name alone, so a block may go and come as it likes.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from asking import Asking
from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import StoreClosed
from kvstore.client import get as getting
from kvstore.client import handle
from kvstore.config import Limits
from kvstore.core.index import NO_ROW
from model.store_model import BLOCK_TOKENS, LATENT, SHARDED, WHOLE, OpenStore, Owned, Prompt
from simulation.two_tiers import Disk, Sizes, bugs, open_two_tiers, wait_until_idle
from tiering.errors import TierUnavailable

THREADS = 4
OPERATIONS = 250
SEEDS = (1, 2)
HANGS_AFTER_SECONDS = 180
SPACES = (("default", "a", WHOLE), ("default", "b", SHARDED), ("other", "a", LATENT))
PROMPTS = [Prompt((first, *rest)) for first in range(8) for rest in ((), (0,), (0, 1), (2, 1, 0, 0), (0, 1, 1, 2, 0))]
LIMITS = Limits(lease_seconds=5, pinned_fraction=0.5, close_seconds=20)
LONG_MS = 30_000
NO_ROOM = {MissReason.PINNED_FULL, MissReason.DEADLINE, MissReason.QUOTA}
OF_A_PUT = {MissReason.IN_FLIGHT, MissReason.EVICTED, MissReason.DISABLED} | NO_ROOM
OF_A_PUT |= {MissReason.ABSENT, MissReason.DIVERGED, MissReason.OTHER_NAMESPACE}  # its namespace was dropped meanwhile
OF_A_LEASE = {MissReason.EVICTED, MissReason.DISABLED} | NO_ROOM
OF_A_LEASE |= {MissReason.IN_FLIGHT}  # it was evicted since the match, and somebody stores it again


@pytest.fixture(autouse=True)
def threads_change_places_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(handle, "WINDOW_BLOCKS", 2)  # puts and gets come in pieces
    monkeypatch.setattr(getting, "PIECE_BLOCKS", 2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Scene:
    """A store on a simulated disk, and the keys of what it owes: acknowledged as durable and not given up since."""

    def __init__(self, directory: Path, disk: Disk | None = None, limits: Limits = LIMITS) -> None:
        self.directory = directory
        self.disk = disk or Disk()
        self.owed: dict[tuple[str, bytes], Prompt] = {}
        self.opened: OpenStore = open_two_tiers(directory, self.disk, Sizes(), limits, gone=self._gone)
        self.spaces = [self.opened.namespace(model, layout, tenant) for tenant, model, layout in SPACES]
        self.over = False  # closed, or without power: requests may be refused

    def _gone(self, number: int, key: bytes) -> None:
        for space in self.spaces:
            if space.number == number:
                self.owed.pop((space.name, key), None)

    def owe(self, space: Owned, prompt: Prompt, keys: list[bytes]) -> None:
        """A put was acknowledged. Between that and now NVMe may have given a block up again."""
        with self.opened.core.lock:
            for block, key in enumerate(keys):
                row = self.opened.blocks.index.find(space.number, key)
                if row != NO_ROW and self.opened.blocks.is_below(row):
                    self.owed[space.name, key] = Prompt(prompt.letters[: block + 1])


class Worker:
    """One thread's random operations."""

    def __init__(self, scene: Scene, seed: int, *, damages: bool = False) -> None:
        """damages: it flips bits of frames that it holds."""
        self.scene = scene
        self.damage = {MissReason.CORRUPT} if damages else set()
        self.chance = Random(seed)
        self.held: list[tuple[Owned, Prompt, Any]] = []
        self.counts: Counter[str] = Counter()
        self.acts = 0
        self.ended = False

    def run(self) -> None:
        try:
            self.act()
        finally:
            self.ended = True

    def act(self) -> None:
        acts = [self.put, self.load, self.hold, self.load_held, self.let_go, self.half_a_put, self.evict, self.drop]
        for _ in range(OPERATIONS):
            (act,) = self.chance.choices(acts, [30, 30, 8, 8, 8, 4, 8, 1])
            act(self.chance.choice(self.scene.spaces), self.chance.choice(PROMPTS))
            self.acts += 1
        while self.held:
            self.let_go(*self.held[-1][:2])

    def put(self, space: Owned, prompt: Prompt) -> None:
        durability = self.chance.choice(["volatile", "disk"])
        pages = space.pages(prompt.tokens)
        for block in range(len(prompt.letters)):
            pages.write(block * BLOCK_TOKENS, space.kv(prompt, block))
        result = space.handle.put(prompt.token_ids, pages.pages, durability=durability)
        self.counts[f"put {durability}: {result.reason}"] += 1
        assert (result.stopped_at is None) == (result.reason is None)
        assert result.present + result.stored <= len(prompt.letters)
        assert result.reason is None or result.reason in OF_A_PUT | self.damage or self.scene.over, result
        if result.reason is None and durability == "disk":
            self.scene.owe(space, prompt, space.match(prompt).keys)

    def load(self, space: Owned, prompt: Prompt) -> None:
        with self._lease(space, prompt) as lease:
            self._compare(space, prompt, lease)

    def hold(self, space: Owned, prompt: Prompt) -> None:
        if len(self.held) < 3:
            self.held.append((space, prompt, self._lease(space, prompt)))

    def load_held(self, space: Owned, prompt: Prompt) -> None:
        if self.held:
            chosen = self.chance.choice(self.held)
            if self.damage:
                self._flip(*chosen)
            self._compare(*chosen)

    def let_go(self, space: Owned, prompt: Prompt) -> None:
        if self.held:
            _, _, lease = self.held.pop()
            if self.chance.random() < 0.5:
                lease.release()  # else forgotten

    def half_a_put(self, space: Owned, prompt: Prompt) -> None:
        """A producer that gives up."""
        reply = Asking(space.door).reserve(space.handle.number, space.match(prompt).keys, 0, 0, None)
        if reply.reservation:
            Asking(space.door).abort(reply.reservation)

    def evict(self, space: Owned, prompt: Prompt) -> None:
        try:
            self.scene.opened.store.evict(self.chance.choice([1, 5, 100]))
            self.scene.opened.clock.advance(0.5)
            self.scene.opened.core.check()
        except StoreClosed:
            assert self.scene.over

    def drop(self, space: Owned, prompt: Prompt) -> None:
        try:
            self.counts["dropped"] += self.scene.opened.drop(space)
        except (StoreClosed, TierUnavailable):
            assert self.scene.over

    def _flip(self, space: Owned, prompt: Prompt, lease: Any) -> None:
        frames = space.frames(lease, self.chance.randrange(lease.blocks)) if lease.blocks else []
        if frames:  # else it was quarantined before, and its extent is gone
            view = self.chance.choice(frames).view
            view[self.chance.choice([0, 100, 4095, 4096, 5000])] ^= 1 << self.chance.randrange(8)

    def _lease(self, space: Owned, prompt: Prompt) -> Any:
        match = space.match(prompt)
        lease = space.handle.lease(match, deadline_ms=self.chance.choice([LONG_MS, LONG_MS, 0]))
        if lease.blocks < match.blocks:
            self.counts[f"lease: {lease.reason}"] += 1
            assert lease.reason in OF_A_LEASE | self.damage or self.scene.over, lease.reason
        return lease

    def _compare(self, space: Owned, prompt: Prompt, lease: Any) -> None:
        reasons = OF_A_LEASE | self.damage if not self.scene.over else set(MissReason)
        tokens = _compared(space, prompt, lease, reasons)
        self.counts["blocks compared"] += tokens // BLOCK_TOKENS
        self.counts["cut short"] += tokens < lease.tokens
        self.counts["from NVMe"] += HitTier.NVME in lease.account.hits


def _compared(space: Owned, prompt: Prompt, lease: Any, reasons: Collection[MissReason] = ()) -> int:
    """Load what was leased; the tokens that came, all of them right. reasons: why fewer may come than were leased."""
    pages = space.pages(lease.tokens)
    before = pages.snapshot()
    loaded = space.handle.get(lease, pages.pages)
    assert loaded.account.asked == prompt.tokens
    assert loaded.tokens == lease.tokens or loaded.reason in reasons, loaded
    kv = {token: space.kv(prompt, token // BLOCK_TOKENS) for token in range(0, loaded.tokens, BLOCK_TOKENS)}
    pages.expect(before, kv, ignore_from=loaded.tokens)
    return loaded.tokens


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


def nothing_is_left(scene: Scene) -> None:
    """Everything was let go of: no pin, no slot, no move remains."""
    core = scene.opened.core
    wait_until_idle(core)
    core.evict(0)
    core.check()
    assert not bugs(core), bugs(core)
    usage = core.usage()
    assert (usage.leases, usage.reservations, usage.pinned_bytes) == (0, 0, 0)
    assert (usage.dram.reserved, usage.dram.zombie) == (0, 0)
    lower = scene.opened.blocks.lower
    assert lower is not None
    lower.tier.settle()
    below = lower.tier.usage()
    assert (below.reserved, below.deleting, below.quarantined) == (0, 0, 0)
    assert below.used == sum(
        len(space.classes)
        for space in scene.opened.blocks.spaces
        for row in scene.opened.blocks.index.rows(space.number)
        if scene.opened.blocks.is_below(row)
    ), "a frame on disk that no block knows of"


def find_the_owed(scene: Scene, owed: dict[tuple[str, bytes], Prompt]) -> None:
    """In a store that was opened anew: all of it is there, bit for bit."""
    for (name, _), prompt in owed.items():
        (space,) = [one for one in scene.spaces if one.name == name]
        assert space.match(prompt).blocks == len(prompt.letters), f"{prompt} in {name} is gone"
        with space.handle.lease(space.match(prompt), deadline_ms=LONG_MS) as lease:
            assert _compared(space, prompt, lease) == prompt.tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_at_random(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    scene = Scene(tmp_path)
    workers = [Worker(scene, seed * 100 + number) for number in range(THREADS)]
    together([worker.run for worker in workers])
    counts = sum((worker.counts for worker in workers), Counter())
    print(dict(counts), scene.opened.core.usage().counters)
    nothing_is_left(scene)
    assert counts["from NVMe"] and scene.opened.core.usage().counters["nvme_evicted_blocks"]
    owed = dict(scene.owed)
    scene.disk.cut_power()
    scene.opened.close()
    scene.disk.crash(Random(seed), index_too=seed % 2 == 0)
    again = Scene(tmp_path, scene.disk)
    assert again.opened.store.warmed(60)
    find_the_owed(again, owed)
    nothing_is_left(again)
    for space in again.spaces:
        again.opened.drop(space)
    nothing_is_left(again)
    assert again.opened.core.usage().dram.capacity == 0
    again.opened.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_at_random_over_frames_that_are_damaged(tmp_path: Path, seed: int) -> None:
    """No lease runs out meanwhile."""
    print(f"seed {seed}")
    scene = Scene(tmp_path, limits=replace(LIMITS, lease_seconds=86_400))
    workers = [Worker(scene, seed * 100 + number, damages=True) for number in range(THREADS)]
    together([worker.run for worker in workers])
    counts = sum((worker.counts for worker in workers), Counter())
    core = scene.opened.core
    wait_until_idle(core)
    core.evict(0)
    core.check()
    usage = core.usage()
    print(dict(counts), usage.counters)
    assert not bugs(core), bugs(core)
    assert (usage.leases, usage.reservations, usage.pinned_bytes) == (0, 0, 0)
    assert (usage.dram.reserved, usage.dram.zombie) == (0, 0)
    assert counts["cut short"] and usage.counters["quarantined_blocks"]
    for space in scene.spaces:
        scene.opened.drop(space)
    assert core.usage().dram.capacity == 0, "with all namespaces dropped all memory is given back"
    scene.opened.close()


@pytest.mark.parametrize("end", ["power", "close"])
def test_an_end_under_everybody(tmp_path: Path, end: str) -> None:
    print(f"seeds {SEEDS}")
    found = 0
    for seed in SEEDS:
        (tmp_path / str(seed)).mkdir()
        found += end_under_everybody(tmp_path / str(seed), seed, end)
    assert found, "nothing was owed at any end"


def end_under_everybody(tmp_path: Path, seed: int, end: str) -> int:
    """Closed, or without power, while all threads work; returns how many blocks were owed then, and were found."""
    scene, chance = Scene(tmp_path), Random(seed)
    workers = [Worker(scene, seed * 100 + number) for number in range(THREADS - 1)]
    owed: dict[tuple[str, bytes], Prompt] = {}
    enough = chance.randrange(50, OPERATIONS)

    def finish() -> None:
        while sum(worker.acts for worker in workers) < enough and not any(worker.ended for worker in workers):
            threading.Event().wait(0.001)
        scene.over = True
        if end == "close":
            return scene.opened.store.close()
        with scene.opened.core.lock:
            owed.update(scene.owed)
            return scene.disk.cut_power()

    together([*(worker.run for worker in workers), finish])
    scene.opened.core.check()
    scene.opened.close()
    if end == "close":
        owed.update(scene.owed)
    else:
        scene.disk.crash(chance)
    again = Scene(tmp_path, scene.disk)
    assert again.opened.store.warmed(60)
    find_the_owed(again, owed)
    nothing_is_left(again)
    again.opened.close()
    return len(owed)
