"""`kvstore bench lookup`: the cost of a match, and of a block in the tables, in bytes and in garbage collection.

Two stores hold chains of blocks as puts make them, but without payloads, of which the large one would need terabytes.
The limit of a match is the chain of hashes alone. Then one client of a sidecar matches, and many at once; the limit of
these is what the same processes hash when they do nothing else.
"""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain, count
from statistics import median
from time import perf_counter, sleep, thread_time

import numpy as np

from kv_bench.measure import Cost, Say, Stopwatch, Turn, against, repeated, resident_bytes, time_row, timed
from kv_bench.process import Child, Parent, Sidecar, open_patiently
from kv_bench.rig import MODEL, SMALLEST, BlockShape, PagePool, prompt_of
from kvstore.block.codec import RawCodec
from kvstore.block.errors import StoreError
from kvstore.block.identity import KeyRing, Namespace, PrefixHasher, TenantKeys, token_bytes
from kvstore.client.handle import NamespaceHandle
from kvstore.config import MIN_DRAM_BYTES, Limits
from kvstore.core.index import NO_ROW, PrefixIndex
from kvstore.core.store import Store
from kvstore.core.table import BlockTable
from kvstore.node import EmbeddedDoor, SystemClock
from kvstore.traffic.row import MS, BenchResult, Row, Section, Target, quantile
from tiering.dram.extents import ExtentPool
from tiering.dram.tier import DramTier
from tiering.frame import frame_bytes
from tiering.policies.lru import LeafFirstLru
from tiering.residency import Pins, Residency
from tiering.slots import SlotTable

MATCH_TARGET, GROWTH_TARGET = 2.2, 1.7
"""Limits of match time / time of the chain of hashes, and of match time in the large index / in the small one."""
DOOR_TARGET, CLIENTS_TARGET = 2.97, 3.7
"""In chains: a match of one client, 0.8 ms where the chain is 0.27; time per match over all clients, 1,000 a second."""
BYTES_TARGET, PAUSE_TARGET_MS = 300, 50.0
"""Limits for a block in all tables together, and of a garbage collection."""
_TOGETHER, _STEP_BLOCKS = 64, 8
"""Prompts that are being stored at the same time, so that their blocks come mixed; blocks that one adds at a time."""
_SLOTS_OF_EXTENT = 512
_HEAD_START_SECONDS = 0.05
"""Time for all client processes to read their order."""


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """small_blocks, large_blocks: in the two indexes, whole prompts; a sidecar holds as many as the small one."""

    prompt_tokens: int = 32768
    block_tokens: int = SMALLEST.block_tokens
    small_blocks: int = 10_000
    large_blocks: int = 2_000_000
    laps: int = 200
    door_laps: int = 2000
    clients: int = 8
    client_laps: int = 5
    client_seconds: float = 1.0

    @property
    def prompt_blocks(self) -> int:
        return self.prompt_tokens // self.block_tokens

    @property
    def shape(self) -> BlockShape:
        return BlockShape(1, self.block_tokens, 1, 8)


def run(options: LookupOptions, say: Say) -> BenchResult:
    program_ms = longest_collection_ms()
    gc.freeze()
    try:
        small = FilledStore(options, options.small_blocks, say)
        before = resident_bytes()
        large = FilledStore(options, options.large_blocks, say)
        gc.collect()
        grown = resident_bytes() - before
        tables_ms = longest_collection_ms()
    finally:
        gc.unfreeze()
    say(f"matching, {options.laps} laps")
    contenders = {
        (filled.blocks, prompts): filled.match(rotating=rotating)
        for filled in (small, large)
        for prompts, rotating in (("the same", False), ("in turn", True))
    }
    measured = against(hashing(options), contenders, options.laps)
    rows = [
        time_row({"by": "this process", "blocks": blocks, "prompts": prompts}, found, "chain", MATCH_TARGET)
        for (blocks, prompts), found in measured.items()
    ]
    growth = measured[large.blocks, "in turn"].seconds / measured[small.blocks, "in turn"].seconds
    one, together = through_a_sidecar(options, say)
    title = f"a match of {options.prompt_tokens:,} tokens, all stored; ratio: to the chain of hashes alone"
    at_most = partial(Target, is_least=False, of="value")
    figures = [
        Row({"figure": "match, large to small index"}, growth, "times", target=at_most(GROWTH_TARGET)),
        Row({"figure": "tables of a block"}, large.footprint(), "bytes", target=at_most(BYTES_TARGET)),
        Row({"figure": "a block, as the process grew"}, grown / large.blocks, "bytes", target=at_most(BYTES_TARGET)),
        Row({"figure": "garbage collection of the blocks"}, tables_ms, MS, target=at_most(PAUSE_TARGET_MS)),
        Row({"figure": "garbage collection of this program"}, program_ms, MS),
        Row({"figure": "slowest insertion of a block"}, large.longest_insert * 1e3, MS),
    ]
    sections = [
        Section([*rows, one], title, name="matches"),
        Section([together], "by as many client processes together", name="clients"),
        Section(figures, "the index", name="figures"),
    ]
    return BenchResult("lookup", options, sections)


def longest_collection_ms() -> float:
    gc.collect()
    return 1e3 * max(timed(gc.collect)().wall for _ in range(3))


class FilledStore:
    """A store whose tables hold so many blocks of whole prompts, and a handle on it."""

    def __init__(self, options: LookupOptions, blocks: int, say: Say) -> None:
        self.blocks = blocks
        self.longest_insert = 0.0
        self._options = options
        self._chains = blocks // options.prompt_blocks
        keys = TenantKeys.derive(os.urandom(32))
        ring = KeyRing([keys])
        dram = DramTier(ExtentPool(1 << 20, 1 << 16))
        self._index, self._policy = PrefixIndex(), LeafFirstLru()
        self._residency = Residency(self._policy, Pins())
        store = Store(BlockTable(self._index, self._residency, dram, ring), SystemClock(), Limits())
        self._handle = NamespaceHandle(
            EmbeddedDoor(store, keys), Namespace(MODEL, options.shape.layout, "raw"), RawCodec()
        )
        self._hasher = PrefixHasher(keys.identity, options.block_tokens)
        for rows in self._fill():
            say(f"filling an index of {blocks:,} blocks: {rows:,}")
        self._slots = [SlotTable(_SLOTS_OF_EXTENT) for _ in range(-(-blocks // _SLOTS_OF_EXTENT))]

    def match(self, *, rotating: bool) -> Turn:
        order = np.random.default_rng(7).permutation(self._chains).tolist() if rotating else [0]
        tokens = self._options.prompt_tokens
        return matching(self._handle, self._options, lambda turn: prompt_of(order[turn % len(order)], tokens))

    def footprint(self) -> float:
        """Bytes per block in the tables, counted object by object: keys and row numbers, dictionaries, columns."""
        names = [table for names in self._index._names for table in (names.visible, names.hidden)]
        key, row = next(reversed(names[0].items()))
        columns = [self._index, self._residency, self._residency.pins, self._policy, *self._slots]
        tables = sum(map(sys.getsizeof, names)) + sum(map(_column_bytes, columns))
        return _allocated(sys.getsizeof(key)) + _allocated(sys.getsizeof(row)) + tables / self.blocks

    def _fill(self) -> Iterator[int]:
        rows, blocks = 0, self._options.prompt_blocks
        for first in range(0, self._chains, _TOGETHER):
            numbers = range(first, min(first + _TOGETHER, self._chains))
            tokens = [token_bytes(prompt_of(number, self._options.prompt_tokens)) for number in numbers]
            chains = [self._hasher.keys(prompt) for prompt in tokens]
            parents = [NO_ROW] * len(chains)
            for start in range(0, blocks, _STEP_BLOCKS):
                for number, keys in enumerate(chains):
                    parents[number] = self._extend(parents[number], keys[start : start + _STEP_BLOCKS])
            rows += len(chains) * blocks
            yield rows

    def _extend(self, parent: int, keys: list[bytes]) -> int:
        """Add blocks behind `parent`, as `BlockTable` does when they are stored; returns the last."""
        index, residency = self._index, self._residency
        for key in keys:
            start = perf_counter()
            row = index.insert(0, key, parent)
            residency.grow_to(row)
            index.publish(row)
            residency.published(row, row + 1)
            residency.listed(row)
            if parent != NO_ROW:
                residency.child_came(parent)
            parent = row
            self.longest_insert = max(self.longest_insert, perf_counter() - start)
        return parent


def _column_bytes(table: object) -> int:
    values = [value for one in vars(table).values() for value in (one if isinstance(one, list) else [one])]
    return sum(sys.getsizeof(value) for value in values if isinstance(value, array | bytearray | np.ndarray))


def _allocated(size_bytes: int) -> int:
    return -(-size_bytes // 16) * 16


# --- through the door of a sidecar -----------------------------------------------------------------------------------


def through_a_sidecar(options: LookupOptions, say: Say) -> tuple[Row, Row]:
    stored, blocks = options.small_blocks // options.prompt_blocks, options.prompt_blocks
    size = frame_bytes(options.shape.payload_bytes)
    say("filling a sidecar")
    # Prompts need not end with an extent.
    with Sidecar({"dram": MIN_DRAM_BYTES + 2 * stored * blocks * size, "nvme": "off"}) as sidecar:
        with sidecar.client() as client:
            handle = client.namespace(model=MODEL, layout=options.shape.layout)
            pages, prompts = PagePool(options.shape, blocks).take(), []
            for number in range(stored):
                prompts.append(prompt_of(number, options.prompt_tokens))
                result = handle.put(prompts[-1], pages)
                assert result.stored == blocks, result
            say(f"matching through the door, {options.door_laps} laps")
            order = np.random.default_rng(7).permutation(stored).tolist()
            one = _one(options, matching(handle, options, lambda turn: prompts[order[turn % stored]]), stored * blocks)
        say(f"starting {options.clients} clients")
        with clients_of(options, sidecar.socket, stored) as clients:
            say(f"matching by {options.clients} clients, {options.client_laps} laps")
            return one, _together(options, clients, one["limit"])


def _one(options: LookupOptions, match: Turn, blocks: int) -> Row:
    found = against(hashing(options), {"match": match}, options.door_laps)["match"]
    slow = {"ms_p99": 1e3 * found.seconds_p99, "chain_ms_p99": 1e3 * found.limit_seconds_p99}
    what = {"by": "a sidecar's socket", "blocks": blocks, "prompts": "in turn"}
    return time_row(what, found, "chain", DOOR_TARGET, **slow)


def _together(options: LookupOptions, clients: Clients, chain_ms: float) -> Row:
    """ratio: of the matches to what the same processes hash when they do nothing else. ms_p50, ms_p99: how long a
    client waits for one. times_chain: time for each match more / the chain of a client that has the machine alone."""
    found = against(clients.hash, {"match": clients.match}, options.client_laps)["match"]
    waited = [1e3 * seconds for turn in clients.waits[-options.client_laps :] for seconds in turn]
    details = {"ms_p50": median(waited), "ms_p99": quantile(waited, 0.99)}
    details["times_chain"] = found.seconds * 1e3 / chain_ms
    target = Target(CLIENTS_TARGET, is_least=False, of="times_chain")
    beside = "hashing only", 1 / found.limit_seconds, found.ratio, found.low, found.high
    what = {"clients": options.clients}
    return Row(what, 1 / found.seconds, "matches/s", found.laps, None, None, *beside, target, details)


@dataclass
class Clients:
    """Client processes of one sidecar, each this file. seconds: of a turn. waits: of every match, by turn."""

    children: Sequence[Child]
    seconds: float
    waits: list[list[float]] = field(default_factory=list)

    def match(self) -> Cost:
        cost, seconds = self._turn("match")
        self.waits.append(seconds)
        return cost

    def hash(self) -> Cost:
        return self._turn("hash")[0]

    def _turn(self, work: str) -> tuple[Cost, list[float]]:
        start = perf_counter() + _HEAD_START_SECONDS
        for child in self.children:
            child.say({"work": work, "start": start, "seconds": self.seconds})
        answers = [child.hear() for child in self.children]
        seconds = list(chain(*(answer["seconds"] for answer in answers)))
        if not seconds:
            raise StoreError(f"nothing was done in {self.seconds} s; give the clients longer")
        return Cost(self.seconds / len(seconds), sum(answer["cpu"] for answer in answers) / len(seconds)), seconds


@contextmanager
def clients_of(options: LookupOptions, socket: str, stored: int) -> Iterator[Clients]:
    """stored: prompts. Raises `StoreError` if one does not start."""
    job = {"socket": socket, "prompts": stored, "options": asdict(options)}
    with ExitStack() as stack:
        numbers = range(options.clients)
        children = [stack.enter_context(Child("kv_bench.lookup", {**job, "number": one})) for one in numbers]
        assert all([child.hear() == "ready" for child in children])
        yield Clients(children, options.client_seconds)


# --- matches and chains, here and in a client ------------------------------------------------------------------------


def matching(handle: NamespaceHandle, options: LookupOptions, prompt_at: Callable[[int], np.ndarray]) -> Turn:
    turns = count()

    def match() -> Cost:
        prompt = prompt_at(next(turns))
        watch = Stopwatch(thread_time)
        found = handle.match(prompt)
        cost = watch.cost()
        assert found.blocks == options.prompt_blocks and found.reason is None, found
        return cost

    return match


def hashing(options: LookupOptions) -> Turn:
    """The limit: the keys of one prompt, one keyed BLAKE2b-256 per block over the key before and the block's tokens."""
    raw, step = token_bytes(prompt_of(0, options.prompt_tokens)), options.block_tokens * 4
    base = blake2b(digest_size=32, key=bytes(32), person=b"kv-bench")

    def chain() -> Cost:
        watch = Stopwatch(thread_time)
        parent = bytes(32)
        for at in range(0, len(raw) - step + 1, step):
            state = base.copy()
            state.update(parent + raw[at : at + step])
            parent = state.digest()
        return watch.cost()

    return chain


def main() -> None:
    parent = Parent()
    job = parent.job
    options = LookupOptions(**job["options"])
    order = np.random.default_rng(job["number"]).permutation(job["prompts"]).tolist()
    prompts = [prompt_of(number, options.prompt_tokens) for number in order]
    with open_patiently(job["socket"]) as store:
        handle = store.namespace(model=MODEL, layout=options.shape.layout)
        match, hashes = matching(handle, options, lambda turn: prompts[turn % len(prompts)]), hashing(options)
        work: dict[str, Callable[[int], object]] = {"match": lambda _: match(), "hash": lambda _: hashes()}
        parent.answer("ready")
        for turn in parent:
            sleep(max(0.0, turn["start"] - perf_counter()))
            watch = Stopwatch()
            seconds = repeated(work[turn["work"]], turn["seconds"])
            parent.answer({"seconds": seconds, "cpu": watch.cost().cpu})


if __name__ == "__main__":
    main()
