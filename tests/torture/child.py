"""A process that uses a whole store from several threads until it is killed, and says what it does and was told.

opening, ready           the store is about to be opened; is open
space NUMBER NAME        the number of a namespace in this session
put CALL NAME LETTERS    blocks are about to be stored
durable CALL             the whole chain is acknowledged as durable
ended CALL               nothing of that call will be stored any more
gone NUMBER KEY          NVMe is about to give a block up
drop CALL NAME           a namespace is about to be dropped
dropped CALL             it was dropped, for good
closing, closed          the store is about to be closed; is closed
at POINT                 a failpoint was reached, and this is the end
fault WHAT               something happened that must not
"""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from kvstore.block.account import MissReason
from kvstore.block.errors import StoreClosed
from kvstore.block.layout import Layout
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from model.store_model import BLOCK_TOKENS, LATENT, SHARDED, WHOLE, PagedKv, Prompt, block_kv
from tiering.errors import TierUnavailable
from tiering.failpoint import go_on
from tiering.nvme.lmdb_index import LmdbMaker, discard
from tiering.nvme.slab_files import DirectFiles
from torture.nursery import Voice
from torture.points import ONCE_A_SESSION, PointedFiles, PointedMaker, Trigger
from workbench import open_at

THREADS = 3
STEPS, FEW_STEPS = 20, 4
"""At most so many of each thread in a session, and where opening and closing is the point."""
REMOVALS, MANY_REMOVALS = 0.15, 0.5
"""How often the index is lost before an opening."""
PATIENCE_SECONDS = 1.0
"""After this long a failpoint is not passed a certain number of times any more: the next time is the last."""

DEPTH, TREES = 4, 4
LETTERS = [
    (number % TREES, *(10 * level + (number // TREES >> level - 1) % 2 for level in range(1, DEPTH)))
    for number in range(TREES << DEPTH - 1)
]
"""Prompts that share prefixes: some first blocks, and behind each block one of two others."""

LAYOUTS: dict[str, Layout] = {"whole": WHOLE, "shards": SHARDED, "latent": LATENT}
SPACES = ("default/whole", "default/shards", "default/latent")
GUESTS = tuple(f"guest-{number}/latent" for number in range(8))
"""Namespaces of tenants that are not there at first."""

SIZES: dict[str, Any] = {"nvme": "1MiB", "slab": "64KiB", "extent": "64KiB"}
DRAM = ("1MiB", "1MiB", "2MiB", "8MiB")


class Space:
    """One namespace of an open store: puts and reads of prompts whose KV everybody knows."""

    def __init__(self, store: EmbeddedStore, name: str) -> None:
        tenant, _, layout = name.partition("/")
        self.name = name
        self.layout = LAYOUTS[layout]
        self.owner = store.for_tenant(tenant)
        self.handle: NamespaceHandle = self.owner.namespace(model="weights", layout=self.layout)
        self.number = self.handle.door.number_in_store(self.handle.number)
        """As evictions name it, for whatever tenant."""

    def put(self, letters: tuple[int, ...], durability: str) -> bool:
        """Whether the whole chain is held, and durable where that was asked."""
        prompt = Prompt(letters)
        pages = self._pages(len(letters), "tokens")
        for block in range(len(letters)):
            pages.write(block * BLOCK_TOKENS, block_kv(self.layout, self.name, prompt.chain(block)))
        return self.handle.put(prompt.token_ids, pages.pages, durability=durability).stopped_at is None

    def read(self, letters: tuple[int, ...], deadline_ms: float) -> tuple[int, MissReason | None]:
        """How many blocks could be read, and why not more; every byte of the pages is compared."""
        prompt = Prompt(letters)
        with self.handle.lease(self.handle.match(prompt.token_ids), deadline_ms=deadline_ms) as lease:
            pages = self._pages(len(letters), "heads")
            before = pages.snapshot()
            loaded = self.handle.get(lease, pages.pages)
            blocks = loaded.tokens // BLOCK_TOKENS
            kv = {
                block * BLOCK_TOKENS: block_kv(self.layout, self.name, prompt.chain(block)) for block in range(blocks)
            }
            pages.expect(before, kv, ignore_from=None if loaded.reason is None else loaded.tokens)
            return blocks, loaded.reason or lease.reason

    def _pages(self, blocks: int, style: str) -> PagedKv:
        return PagedKv(self.layout, blocks, BLOCK_TOKENS, style, "numpy", seed=blocks)


def live(say: Voice, directory: str, seed: int, guests: list[str], point: str | None = None, at: int = 1) -> None:
    """Session after session. guests: tenants that have blocks here. point: where to end, at its `at`-th passage."""
    trigger = Trigger(point, at, PATIENCE_SECONDS, say) if point is not None else None
    life = Life(Path(directory), Random(seed), say, trigger, guests)
    if point in ONCE_A_SESSION:
        life.most_steps, life.removals = FEW_STEPS, MANY_REMOVALS
    while True:
        life.session()


class Life:
    """All sessions of one process."""

    def __init__(self, directory: Path, random: Random, say: Voice, trigger: Trigger | None, guests: list[str]) -> None:
        self.directory, self.random, self.say, self.trigger = directory, random, say, trigger
        self.reach = trigger.reach if trigger is not None else go_on
        self.calls = count()
        self.names = [*SPACES, *guests]
        self.closing = False
        self.most_steps, self.removals = STEPS, REMOVALS

    def session(self) -> None:
        """Open, work, close."""
        if self.random.random() < self.removals and self.directory.exists():
            discard(self.directory / "nvme" / "index")
        self.say("opening")
        self.store = self.open()
        self.spaces = [self.enter(name) for name in self.names]
        self.say("ready")
        self.closing = False
        steps = self.random.randrange(2, self.most_steps + 1)
        threads = [
            threading.Thread(target=self.work, args=(Random(self.random.random()), steps)) for _ in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        if self.random.random() < 0.5:
            for thread in threads:
                thread.join()
        else:
            threads[0].join()
        self.closing = True
        self.say("closing")
        self.store.close()
        for thread in threads:
            thread.join()
        self.say("closed")

    def open(self) -> EmbeddedStore:
        trigger = self.trigger
        store = open_at(
            self.directory,
            dram=self.random.choice(DRAM),
            **SIZES,
            indexes=LmdbMaker if trigger is None else lambda path: PointedMaker(path, trigger),
            files=DirectFiles if trigger is None else lambda path: PointedFiles(path, trigger),
            gone=self.gone,
            reach=self.reach,
        )
        if trigger is not None:
            _point_at_tables(store, trigger)
        return store

    def enter(self, name: str) -> Space:
        space = Space(self.store, name)
        self.say("space", space.number, name)
        return space

    def gone(self, number: int, key: bytes) -> None:
        self.say("gone", number, key.hex())
        self.reach("eviction recorded, tier not told")

    def work(self, random: Random, steps: int) -> None:
        acts = [self.put, self.read, self.evict, self.drop, self.check, self.invite]
        try:
            for _ in range(steps):
                random.choices(acts, [50, 35, 8, 2, 2, 3])[0](random, random.choice(self.spaces))
        except (StoreClosed, TierUnavailable):
            if not self.closing:
                self.say.fault()
        except BaseException:
            self.say.fault()

    def put(self, random: Random, space: Space) -> None:
        call, letters = next(self.calls), random.choice(LETTERS)[: random.randrange(1, DEPTH + 1)]
        durability = random.choice(["volatile", "disk", "disk"])
        self.say("put", call, space.name, *letters)
        try:
            if space.put(letters, durability) and durability == "disk":
                self.say("durable", call)
        finally:
            self.say("ended", call)

    def read(self, random: Random, space: Space) -> None:
        letters = random.choice(LETTERS)
        blocks, reason = space.read(letters, random.choice([0, 50, 1000]))
        assert self.closing or reason is not MissReason.TIER_DOWN
        assert reason is not MissReason.CORRUPT, f"block {blocks} of {letters} fails a check"

    def evict(self, random: Random, space: Space) -> None:
        self.store.evict(random.randrange(1, 12))

    def drop(self, random: Random, space: Space) -> None:
        call = next(self.calls)
        self.say("drop", call, space.name)
        space.owner.drop(space.handle)
        self.say("dropped", call)

    def check(self, random: Random, space: Space) -> None:
        self.store.check()

    def invite(self, random: Random, space: Space) -> None:
        """Blocks of a tenant that may be new."""
        name = random.choice(GUESTS)
        if name in self.names:
            return
        self.names.append(name)
        guest = self.enter(name)
        self.reach("key of a new tenant made")
        self.spaces.append(guest)
        self.put(random, guest)


def _point_at_tables(store: EmbeddedStore, trigger: Trigger) -> None:
    """Failpoints around what a store notes of a move, which is not on any disk."""
    blocks = store._store.blocks
    below = blocks.below
    assert below is not None
    demoted, promoted = below.demoted, blocks.promoted

    def point_at_demoted(*arguments: Any, **options: Any) -> None:
        trigger.reach("demotion durable, tables not told")
        demoted(*arguments, **options)
        trigger.reach("demotion told")

    def point_at_promoted(*arguments: Any, **options: Any) -> None:
        trigger.reach("promotion read, tables not told")
        promoted(*arguments, **options)
        trigger.reach("promotion told")

    below.demoted, blocks.promoted = point_at_demoted, point_at_promoted  # type: ignore[method-assign]
