"""The directory that `benches.py restart` opens: a million blocks on a few hundred MiB of disk.

Everything that a start reads is real and written by the store's own code: keys, stamp, slab headers, and an index whose
records list every block, with the prefix keys of real chains, places, generations and MACs. One prompt is completely
real: it was put, and its frames can be read.

The frames of all other blocks are not: their slabs are sparse files, so a lease would find zeros and fail. A start
reads no frames unless the index is in doubt, which it is not here, and does not scrub. The index was written in one go,
slab by slab, so it is more compact than one that changed for weeks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch

from kvstore.bench.rig import BlockShape, PagePool
from kvstore.block.codec import codec_named
from kvstore.block.identity import PrefixHasher, root_key, token_bytes
from kvstore.client.handle import NamespaceHandle
from kvstore.config import MAX_SLAB_BYTES, StoreOptions, TierOptions
from kvstore.node import SESSION_BITS, StoreParts, open_embedded
from tiering.frame import frame_bytes
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.slab import ENTRY, entry_of, split_entries
from tiering.nvme.slab_files import DirectFiles
from tiering.slab_header import PAGE_BYTES

SHAPE = BlockShape(layers=1, block_tokens=64, kv_heads=1, head_dim=16)
"""A payload of one page."""

FRAME_BYTES = frame_bytes(SHAPE.payload_bytes)
MODEL = "0" * 40
REAL_BLOCKS = 32
DRAM_BYTES = 64 << 20
SMALLEST_SLAB_BYTES = 1 << 20
_TOGETHER = 16  # prompts stored concurrently, so that their blocks interleave
_STEP_BLOCKS = 32  # blocks of one prompt side by side


@dataclass(frozen=True, slots=True)
class Plan:
    """blocks: in all. prompt_blocks: of a chain. slab_bytes, slabs: the real prompt has its own slab."""

    blocks: int
    prompt_blocks: int

    @property
    def slab_bytes(self) -> int:
        """At least a store's own choice: a start reads two pages of each slab."""
        return min(MAX_SLAB_BYTES, max(SMALLEST_SLAB_BYTES, self.blocks * FRAME_BYTES // 8 // PAGE_BYTES * PAGE_BYTES))

    @property
    def slots(self) -> int:
        """Per slab."""
        return (self.slab_bytes - 2 * PAGE_BYTES) // FRAME_BYTES

    @property
    def budget_bytes(self) -> int:
        """Nominal size, holes included."""
        return self.slab_bytes * (1 + -(-(self.blocks - REAL_BLOCKS) // self.slots))


def build(directory: Path, plan: Plan, say: Callable[[str], None]) -> None:
    """Make the directory."""
    tiers = TierOptions(DRAM_BYTES, plan.budget_bytes, slab=plan.slab_bytes, scrub="off")
    parts = StoreParts(codec_named, indexes=LmdbMaker, files=_FilesWithHoles)
    with open_embedded(str(directory), StoreOptions(tiers), parts) as store:
        handle = store.namespace(model=MODEL, layout=SHAPE.layout)
        pages = PagePool(SHAPE, REAL_BLOCKS, 0, prompts=1).take()
        for planes in pages.planes.values():
            for plane in planes:
                plane.view(torch.int16).random_(-(1 << 15), 1 << 15)
        result = handle.put(real_prompt(), pages, durability="disk")
        assert result.stored == REAL_BLOCKS and result.reason is None, result
        inner = store._store
        assert inner.lower is not None
        tier, space = inner.lower.tier, inner.blocks.spaces[handle.number]
        (real,) = tier._ledger.pieces.values()
        identity = handle._grant.identity_key
        entries = _entries(plan, identity, (tier.session << SESSION_BITS) + (1 << SESSION_BITS - 1))
        done = REAL_BLOCKS
        while done < plan.blocks:
            tier.new_slab(space.sealers[0].stamp, real.mac_key, real.header.about)
            slab = tier._ledger.pieces[max(tier._ledger.pieces)]
            found = list(islice(entries, min(plan.slots, plan.blocks - done)))
            whole = b"".join(found).ljust(plan.slots * ENTRY.itemsize, b"\x00")
            tier._records.build(slab, split_entries(whole), is_proven=True)
            done += len(found)
            say(f"naming blocks: {done:,} of {plan.blocks:,}")
        tier._records.write([])


def real_prompt() -> np.ndarray:
    """Token ids of the one prompt whose frames can be read."""
    return _prompt(0, REAL_BLOCKS)


def real_pages() -> PagePool:
    """Pages that fit it."""
    return PagePool(SHAPE, REAL_BLOCKS, 0, prompts=1)


def found_blocks(handle: NamespaceHandle, plan: Plan) -> int:
    """How many blocks matches find, over all prompts of the directory."""
    others = -(-(plan.blocks - REAL_BLOCKS) // plan.prompt_blocks) + _TOGETHER  # the last ones are cut short
    prompts = (_prompt(number, plan.prompt_blocks) for number in range(1, 1 + others))
    return handle.match(real_prompt()).blocks + sum(handle.match(prompt).blocks for prompt in prompts)


class _FilesWithHoles(DirectFiles):
    """Slabs take no disk space until written."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._folder = directory

    def create(self, name: str, size_bytes: int) -> None:
        with open(self._folder / name, "xb") as file:
            os.truncate(file.fileno(), size_bytes)


def _entries(plan: Plan, identity: bytes, first_generation: int) -> Iterator[bytes]:
    """Index entries of all blocks, some prompts at a time, a few blocks of each in turn."""
    hasher = PrefixHasher(identity, SHAPE.block_tokens)
    root = root_key(SHAPE.block_tokens)
    generations = count(first_generation)
    numbers = count(1)
    while True:
        chains = [
            hasher.keys(token_bytes(_prompt(number, plan.prompt_blocks))) for number in islice(numbers, _TOGETHER)
        ]
        for first in range(0, plan.prompt_blocks, _STEP_BLOCKS):
            for chain in chains:
                for index in range(first, min(first + _STEP_BLOCKS, plan.prompt_blocks)):
                    parent = chain[index - 1] if index else root
                    yield entry_of(chain[index], parent, index, next(generations), 0, 0)


def _prompt(number: int, blocks: int) -> np.ndarray:
    tokens = np.arange(blocks * SHAPE.block_tokens, dtype=np.uint32)
    tokens[0] = number  # the first token is part of every key
    return tokens
