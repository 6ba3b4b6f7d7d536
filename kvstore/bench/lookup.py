"""`kvstore bench lookup`: matching a long prompt, and what a block costs in the index (floor 4).

The tables are the product's own: prefix index, residency and policy, filled with rows as a store would fill them, and
matched through its handle, door and lock. Frames are left out: two million of them would be terabytes, and a match
looks at none. The limit is the prompt's hash chain alone, taken in the same run: whoever names blocks by what they hold
has to compute it. Prompts rotate, so that most rows and keys of a large index are not in the processor's caches.

Pauses are those of full garbage collections of what the store holds: everything that the process had before, which is
torch and its like, is frozen for that time and measured by itself.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.table import Table

from kvstore.bench.measure import Progress, available_bytes, machine, quantile, quiet_collector, resident_bytes
from kvstore.blocks import Blocks
from kvstore.codec import codec_named
from kvstore.config import Limits, format_size
from kvstore.errors import BadInput
from kvstore.handle import NamespaceHandle
from kvstore.identity import KeyRing, Namespace, PrefixHasher, TenantKeys, token_bytes
from kvstore.layout import Layout
from kvstore.node import SystemClock, TenantDoor
from kvstore.prefix_index import NO_ROW, PrefixIndex
from kvstore.store import Store
from tiering.dram import DramTier
from tiering.extents import ExtentPool
from tiering.mover import Mover
from tiering.policies.lru import LeafFirstLru
from tiering.residency import Residency

Tokens = np.ndarray[Any, np.dtype[np.uint32]]

BLOCK_TOKENS = 64
EXPECTED_BYTES_PER_BLOCK = 400
"""For the check that memory will do; what a block really takes is measured."""

MATCH_LIMIT_RATIO = 0.6 / 0.27
BYTES_LIMIT = 300.0
GROWTH_LIMIT = 1.7
PAUSE_LIMIT_MS = 50.0


@dataclass(frozen=True, slots=True)
class Options:
    """prompt_tokens: of every prompt. sizes: blocks in the index. probes: different prompts that are matched in turn,
    rounds: how often each. collections: full garbage collections with the largest index loaded."""

    prompt_tokens: int = 32768
    sizes: tuple[int, ...] = (10_000, 2_000_000)
    probes: int = 64
    rounds: int = 5
    collections: int = 5
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One index size. Times in milliseconds, p50 and p99 over all matches; chain_ms: the hash chain alone, beside them.

    ratio: match / chain, medians of the same run. bytes_per_block: growth of this process's resident memory.
    """

    blocks: int
    match_ms: float
    match_ms_p99: float
    chain_ms: float
    ratio: float
    bytes_per_block: float


@dataclass(frozen=True)
class LookupResult:
    """All sizes, the longest pause of a full garbage collection over the tables, and the targets. others_pause_ms: of
    one over everything else in this process."""

    options: Options
    rows: list[Row] = field(default_factory=list)
    pause_ms: float = 0.0
    others_pause_ms: float = 0.0

    @property
    def growth(self) -> float:
        """Match in the largest index / match in the smallest."""
        return self.rows[-1].match_ms / self.rows[0].match_ms

    @property
    def targets(self) -> dict[str, tuple[float, float]]:
        """What is to be reached, by name: (value, upper limit). Only a large index tells the bytes of a block."""
        return {
            "match / hash chain": (self.rows[0].ratio, MATCH_LIMIT_RATIO),
            "match, largest / smallest index": (self.growth, GROWTH_LIMIT),
            "bytes per block, largest index": (self.rows[-1].bytes_per_block, BYTES_LIMIT),
            "longest collection, ms": (self.pause_ms, PAUSE_LIMIT_MS),
        }

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "bench": "lookup",
            "machine": machine(),
            "options": asdict(self.options),
            "rows": [asdict(row) for row in self.rows],
            "growth": self.growth,
            "collection_pause_ms": self.pause_ms,
            "collection_pause_ms_of_everything_else": self.others_pause_ms,
            "targets": {
                name: {"value": value, "limit": limit, "met": value <= limit}
                for name, (value, limit) in self.targets.items()
            },
        }

    def render(self, console: Any) -> None:
        """A table of sizes and a table of targets."""
        table = Table("blocks", "match p50", "match p99", "hash chain p50", "ratio", "bytes per block")
        for row in self.rows:
            table.add_row(
                f"{row.blocks:,}",
                f"{row.match_ms:.3f} ms",
                f"{row.match_ms_p99:.3f} ms",
                f"{row.chain_ms:.3f} ms",
                f"{row.ratio:.2f}",
                f"{row.bytes_per_block:.0f}",
            )
        console.print(table)
        goals = Table("target", "value", "at most", "")
        for name, (value, limit) in self.targets.items():
            goals.add_row(name, f"{value:.2f}", f"{limit:.2f}", "met" if value <= limit else "missed")
        console.print(goals)
        console.print(
            f"prompts of {self.options.prompt_tokens} tokens as arrays, {self.options.probes} in rotation; a full "
            f"collection of all tables took at most {self.pause_ms:.1f} ms, one of everything else in this process "
            f"(torch and its like) {self.others_pause_ms:.1f} ms"
        )


def run(options: Options | None = None, progress: Progress = None) -> LookupResult:
    """Fill an index of each size, then match in all of them in turn. Raises `BadInput` where memory will not do."""
    options = options or Options()
    needed = sum(options.sizes) * EXPECTED_BYTES_PER_BLOCK
    if needed > available_bytes():
        raise BadInput(
            f"this bench needs about {format_size(needed)} of memory and {format_size(available_bytes())} are "
            "available; free some, or give smaller sizes"
        )
    others_pause_ms = _longest_pause_ms(options.collections)
    gc.freeze()
    try:
        loaded = [_Loaded(options, blocks, progress) for blocks in sorted(options.sizes)]
        pause_ms = _longest_pause_ms(options.collections)
    finally:
        gc.unfreeze()
    if progress is not None:
        progress("matching")
    with quiet_collector():
        for _ in range(options.rounds):
            for probe in range(options.probes):
                for index in loaded:
                    index.probe(probe)
    return LookupResult(options, [index.row() for index in loaded], pause_ms, others_pause_ms)


class _Loaded:
    """A store whose tables hold so many blocks, all of them chains of one prompt's length, and prompts to match."""

    def __init__(self, options: Options, blocks: int, progress: Progress) -> None:
        self._options = options
        self._chain_blocks = options.prompt_tokens // BLOCK_TOKENS
        self._chains = max(1, blocks // self._chain_blocks)
        self.blocks = self._chains * self._chain_blocks
        keys = TenantKeys.derive(bytes(range(32)))
        self._hasher = PrefixHasher(keys.identity, BLOCK_TOKENS)
        self._index, self._residency = PrefixIndex(), Residency(LeafFirstLru())
        ring = KeyRing([keys])
        dram = DramTier(ExtentPool(1 << 20, 1 << 16))
        store = Store(Blocks(self._index, self._residency, dram, ring), Mover(dram, ring), SystemClock(), Limits())
        layout = Layout.gqa(layers=1, kv_heads=1, head_dim=16, dtype="float16", block_tokens=BLOCK_TOKENS)
        self._handle = NamespaceHandle(TenantDoor(store, keys), Namespace("bench", layout, "raw"), codec_named("raw"))
        gc.collect()
        before = resident_bytes()
        for chain in range(self._chains):
            if progress is not None and chain % 64 == 0:
                progress(f"index of {self.blocks:,} blocks: {chain * self._chain_blocks:,}")
            self._add(self._hasher.keys(token_bytes(self._prompt(chain))))
        gc.collect()
        self.bytes_per_block = (resident_bytes() - before) / self.blocks
        generator = np.random.default_rng(options.seed)
        chosen = generator.choice(self._chains, size=options.probes, replace=self._chains < options.probes)
        self._probes: Sequence[Tokens] = [self._prompt(int(chain)) for chain in chosen]
        self._match_seconds: list[float] = []
        self._chain_seconds: list[float] = []

    def probe(self, number: int) -> None:
        """Match one prompt, and hash its chain alone."""
        prompt = self._probes[number]
        start = perf_counter()
        match = self._handle.match(prompt)
        middle = perf_counter()
        self._hasher.keys(token_bytes(prompt))
        end = perf_counter()
        assert match.tokens == match.account.hit_tokens == self._options.prompt_tokens, "the prompt is stored whole"
        self._match_seconds.append(middle - start)
        self._chain_seconds.append(end - middle)

    def row(self) -> Row:
        """What was measured."""
        match_seconds, chain_seconds = median(self._match_seconds), median(self._chain_seconds)
        return Row(
            self.blocks,
            1e3 * match_seconds,
            1e3 * quantile(self._match_seconds, 0.99),
            1e3 * chain_seconds,
            match_seconds / chain_seconds,
            self.bytes_per_block,
        )

    def _prompt(self, chain: int) -> Tokens:
        generator = np.random.default_rng((self._options.seed, chain))
        return generator.integers(0, 128_000, self._options.prompt_tokens, dtype=np.uint32)

    def _add(self, keys: Sequence[bytes]) -> None:
        """One chain into all tables, as a put leaves it."""
        index, policy, parent = self._index, self._residency.policy, NO_ROW
        rows = []
        for key in keys:
            row = index.insert(self._handle.number, key, parent)
            self._residency.grow_to(row)
            index.publish(row)
            self._residency.published(row, row + 1)
            policy.inserted(row, index.depth(row), 0, 0.0)
            if parent != NO_ROW:
                policy.became_inner(parent)
            rows.append(row)
            parent = row
        policy.touched(rows[::-1])


def _longest_pause_ms(collections: int) -> float:
    """The longest of so many full garbage collections."""
    pauses = []
    for _ in range(collections):
        start = perf_counter()
        gc.collect()
        pauses.append(1e3 * (perf_counter() - start))
    return max(pauses)
