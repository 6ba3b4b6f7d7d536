"""`kvstore bench lookup`: the cost of a match, and of a block in the tables, in bytes and in garbage collection.

Two stores, a small and a large one, are filled with chains of blocks: rows in the index, in the residency table and in
the policy's list, as puts make them, but without payloads, of which the large one would need terabytes. A match is the
user's own call for a prompt given as an array, all of it stored. Its limit is the chain of hashes alone over the same
bytes, right before and right after.

A prompt that is asked for repeatedly finds its part of the index in CPU caches; so prompts also take turns. Matches
through a sidecar's socket are in `lookup_door`.
"""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter, thread_time

import numpy as np

from kvstore.bench import lookup_door
from kvstore.bench.measure import Cost, Progress, Stopwatch, against, resident_bytes, teller
from kvstore.bench.rig import Chain, LookupOptions, Prompts
from kvstore.bench.row import MS, BenchResult, Row, Section, Target, time_row
from kvstore.block.codec import RawCodec
from kvstore.block.identity import KeyRing, Namespace, PrefixHasher, TenantKeys, token_bytes
from kvstore.block.layout import Layout
from kvstore.client.handle import NamespaceHandle
from kvstore.config import Limits
from kvstore.core.rows.index import NO_ROW, PrefixIndex
from kvstore.core.store import Store
from kvstore.core.table import BlockTable
from kvstore.node import EmbeddedDoor, SystemClock
from tiering.dram.extents import ExtentPool
from tiering.dram.tier import DramTier
from tiering.policies.lru import LeafFirstLru
from tiering.residency import Pins, Residency
from tiering.slots import SlotTable

MATCH_TARGET = 2.2
"""Limit of match time / time of the chain of hashes."""
GROWTH_TARGET = 1.7
"""Limit of match time in the large index / in the small one."""
BYTES_TARGET = 300
"""Limit for a block in all tables together."""
PAUSE_TARGET_MS = 50.0
"""Limit of a garbage collection."""

EMBEDDED = "this process"
WORDS = (
    "garbage collection: the longest full one, of all that came with the blocks, or of all that this program has "
    "imported. The slowest insertion is one at which a dictionary of all blocks grew."
)

_TOGETHER = 64  # prompts that are being stored at the same time, so that their blocks come mixed
_STEP_BLOCKS = 8  # how many blocks one of them adds at a time
_SLOTS_OF_EXTENT = 512


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes per block in the large index's tables, counted object by object, and by the process's growth.

    keys: prefix keys and row numbers, as objects. names: the dictionaries. index, residency, policy, slots: columns.
    """

    keys: float
    names: float
    index: float
    residency: float
    policy: float
    slots: float
    process: float

    @property
    def counted(self) -> float:
        """All tables together."""
        return self.keys + self.names + self.index + self.residency + self.policy + self.slots


def run(options: LookupOptions | None = None, progress: Progress = None) -> BenchResult:
    """Fill both indexes, then match in both, turn by turn; then the same through the door of a sidecar."""
    options = options or LookupOptions()
    say = teller(progress)
    program_ms = longest_collection_ms()
    gc.freeze()
    try:
        small = _Filled(options, options.small_blocks, say)
        before = resident_bytes()
        large = _Filled(options, options.large_blocks, say)
        gc.collect()
        grown = resident_bytes() - before
        tables_ms = longest_collection_ms()
    finally:
        gc.unfreeze()
    say(f"matching, {options.laps} laps")
    limit = Chain(options)
    contenders = {
        (filled.blocks, prompts): filled.match(rotating=rotating)
        for filled in (small, large)
        for prompts, rotating in (("the same", False), ("in turn", True))
    }
    measured = against(limit.turn, contenders, options.laps)
    rows = [
        time_row({"by": EMBEDDED, "blocks": blocks, "prompts": prompts}, found, "chain", Target(MATCH_TARGET, False))
        for (blocks, prompts), found in measured.items()
    ]
    growth = measured[large.blocks, "in turn"].seconds / measured[small.blocks, "in turn"].seconds
    one, together = lookup_door.run(options, say)
    title = f"a match of {options.prompt_tokens:,} tokens, all stored; ratio: to the chain of hashes alone"
    sections = [
        Section([*rows, one], title, name="matches"),
        Section([together], "by as many client processes together", name="clients"),
        Section(_figures(growth, large, grown, program_ms, tables_ms), "the index", WORDS, name="figures"),
    ]
    return BenchResult("lookup", options, sections)


def _figures(growth: float, large: _Filled, grown: int, program_ms: float, tables_ms: float) -> list[Row]:
    footprint, at_most = large.footprint(grown), partial(Target, is_least=False, of="value")
    parts = {f"{name}_per_block": value for name, value in asdict(footprint).items() if name != "process"}
    bytes_target = at_most(BYTES_TARGET)
    return [
        Row({"figure": "match, large to small index"}, growth, "times", target=at_most(GROWTH_TARGET)),
        Row({"figure": "tables of a block"}, footprint.counted, "bytes", target=bytes_target, details=parts),
        Row({"figure": "a block, as the process grew"}, footprint.process, "bytes", target=bytes_target),
        Row({"figure": "garbage collection of the blocks"}, tables_ms, MS, target=at_most(PAUSE_TARGET_MS)),
        Row({"figure": "garbage collection of this program"}, program_ms, MS),
        Row({"figure": "slowest insertion of a block"}, large.longest_insert * 1e3, MS),
    ]


def longest_collection_ms(times: int = 3) -> float:
    """The longest of several full garbage collections, by the collector's own callbacks."""
    pauses: list[float] = []
    started = [0.0]

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            started[0] = perf_counter()
        else:
            pauses.append(perf_counter() - started[0])

    gc.collect()
    gc.callbacks.append(note)
    try:
        for _ in range(times):
            gc.collect()
    finally:
        gc.callbacks.remove(note)
    return max(pauses) * 1e3


class _Filled:
    """A store whose tables hold so many blocks of whole prompts, and a handle on it."""

    def __init__(self, options: LookupOptions, blocks: int, say: Callable[[str], None]) -> None:
        self.blocks = blocks
        self.longest_insert = 0.0
        self._prompts = Prompts(options)
        self._chain_blocks = options.prompt_blocks
        self._chains = blocks // self._chain_blocks
        keys = TenantKeys.derive(os.urandom(32))
        ring = KeyRing([keys])
        dram = DramTier(ExtentPool(1 << 20, 1 << 16))
        self._index, self._policy = PrefixIndex(), LeafFirstLru()
        self._residency = Residency(self._policy, Pins())
        store = Store(BlockTable(self._index, self._residency, dram, ring), SystemClock(), Limits())
        layout = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=options.block_tokens)
        self.handle = NamespaceHandle(EmbeddedDoor(store, keys), Namespace("0" * 40, layout, "raw"), RawCodec())
        self._hasher = PrefixHasher(keys.identity, options.block_tokens)
        for rows in self._fill():
            say(f"filling an index of {blocks:,} blocks: {rows:,}")
        tables = -(-blocks // _SLOTS_OF_EXTENT)
        self._slots = [SlotTable(_SLOTS_OF_EXTENT) for _ in range(tables)]

    def match(self, *, rotating: bool) -> Callable[[], Cost]:
        """A turn: the match of a whole prompt."""
        order = np.random.default_rng(7).permutation(self._chains).tolist() if rotating else [0]
        turn = iter(range(sys.maxsize))

        def one() -> Cost:
            prompt = self._prompts[order[next(turn) % len(order)]]
            watch = Stopwatch(thread_time)
            found = self.handle.match(prompt)
            cost = watch.cost()
            assert found.blocks == self._chain_blocks and found.reason is None, found
            return cost

        return one

    def footprint(self, grown_bytes: int) -> Footprint:
        """grown_bytes: growth of the process while filling."""
        names = [table for names in self._index._names for table in (names.visible, names.hidden)]
        key, row = next(reversed(names[0].items()))
        sizes = (
            _allocated(sys.getsizeof(key)) + _allocated(sys.getsizeof(row)),
            sum(map(sys.getsizeof, names)) / self.blocks,
            _column_bytes(self._index) / self.blocks,
            (_column_bytes(self._residency) + _column_bytes(self._residency.pins)) / self.blocks,
            _column_bytes(self._policy) / self.blocks,
            sum(map(_column_bytes, self._slots)) / self.blocks,
        )
        return Footprint(*sizes, grown_bytes / self.blocks)

    def _fill(self) -> Iterator[int]:
        """As puts do: some prompts at a time, a few blocks of each in turn. Yields the rows so far."""
        rows = 0
        for first in range(0, self._chains, _TOGETHER):
            chains = [
                self._hasher.keys(token_bytes(self._prompts[number]))
                for number in range(first, min(first + _TOGETHER, self._chains))
            ]
            parents = [NO_ROW] * len(chains)
            for start in range(0, self._chain_blocks, _STEP_BLOCKS):
                for number, chain in enumerate(chains):
                    parents[number] = self._extend(parents[number], chain[start : start + _STEP_BLOCKS])
            rows += len(chains) * self._chain_blocks
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
    """Bytes of a table's columns of any kind."""
    total = 0
    for value in vars(table).values():
        for column in value if isinstance(value, list) else [value]:
            if isinstance(column, array | bytearray | np.ndarray):
                total += sys.getsizeof(column)
    return total


def _allocated(size_bytes: int) -> int:
    """The allocator's size for a small object: a multiple of 16 bytes."""
    return -(-size_bytes // 16) * 16
