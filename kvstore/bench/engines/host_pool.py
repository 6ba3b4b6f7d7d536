"""The row `get, host pool` of `kvstore bench tiers`: pages of an engine's own host pool, got through the local door.

What SGLang's HiCache asks a storage backend for: a batch of opaque pages, K and V of each in one run (page-first
layouts), straight into the pool. Beside memcpy of as many bytes, from an extent into private memory, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import sleep
from typing import Any

import torch

from engine_adapter.chunks.layout import ChunkRun, chunk_layout
from engine_adapter.chunks.space import ChunkOutcomes, ChunkSpace
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.bench import rig as door
from kvstore.bench.measure import Together, against
from kvstore.bench.rig import DIGESTS, DOOR, BlockShape, Memcpy, TierRow, row_of, turn_of
from kvstore.bench.sidecar import LOOK_SECONDS, Sidecar
from kvstore.block.codec import RawCodec
from kvstore.block.identity import Namespace
from kvstore.block.layout import Layout
from kvstore.block.pages import Digest
from kvstore.client.handle import NamespaceHandle
from kvstore.client.sidecar_store import SidecarStore
from kvstore.config import format_size

HOST_PAGES = (BlockShape(4, 64), BlockShape(16, 64))
"""Pages of 1 and of 4 MiB."""
HOST_POOL, BATCH_PAGES, BATCHES = "get, host pool", 128, 4
"""A path, how many pages it moves in a turn, and how many times as many there are."""
HOST_POOL_BYTES = 1 << 20
"""The targets hold for pages from this size on."""
HOST_POOL_TARGETS = {True: 0.68, False: 0.88}
"""By whether they are verified."""
OPEN_SECONDS = 30.0


class HostPool:
    """Pages of an engine's host pool, [K or V, page, bytes], and as many in a sidecar, with digests or without."""

    def __init__(self, shape: BlockShape, client: SidecarStore, digest: Digest) -> None:
        self._client, self._digest = client, digest
        self.pages, half = BATCHES * BATCH_PAGES, shape.payload_bytes // 2
        self._memory = torch.ones(2, self.pages, half, dtype=torch.uint8)
        runs = [ChunkRun(plane.data_ptr(), half, half) for plane in self._memory]
        layout = chunk_layout("kv", shape.block_tokens, [half, half])
        spec = NamespaceSpec(1, "", "0" * 40, layout, RawCodec.name, 0, {})
        self._space = ChunkSpace(spec, runs, self.pages, (self, self), ChunkOutcomes())
        self._names = [b"%064x" % number for number in range(self.pages)]
        self._turns = count()
        held = self._space.store([], self._names, self._space.pages(range(self.pages)), 1000 * OPEN_SECONDS)
        assert all(held), "a sidecar did not take them"
        while self._space.handle is None:
            sleep(LOOK_SECONDS)

    def get(self, _: int) -> None:
        """Load the next batch."""
        first = next(self._turns) % BATCHES * BATCH_PAGES
        names = self._names[first : first + BATCH_PAGES]
        loaded = self._space.load(names, self._space.pages(range(first, first + BATCH_PAGES)), 1000.0)
        assert loaded == BATCH_PAGES, f"{loaded} of {BATCH_PAGES} pages loaded"

    def namespace(self, *, model: str, layout: Layout, codec: str = "", **more: Any) -> NamespaceHandle:
        """As a store's, with the digest of this side."""
        return NamespaceHandle(self._client._door, Namespace(model, layout, codec), RawCodec(), self._digest)

    def close(self) -> None:
        """End the threads that opened it."""
        self._space.close()


def run(shape: BlockShape, laps: int, say: Callable[[str], None]) -> list[TierRow]:
    """Measure pages of this shape, with verification and without."""
    limit = Memcpy(shape, BATCH_PAGES, BATCHES)
    dram, extent = door.memory_of(shape, BATCHES * BATCH_PAGES)
    rows = []
    try:
        for verified, digest in DIGESTS.items():
            say(f"{format_size(shape.payload_bytes)} pages of a host pool, verified: {'yes' if verified else 'no'}")
            with Sidecar({"dram": dram, "extent": extent, "nvme": "off"}) as sidecar, sidecar.client() as client:
                side = HostPool(shape, client, digest)
                with Together(1) as alone:
                    turns = {HOST_POOL: turn_of(alone, side.get, 1)}
                    found = against(turn_of(alone, limit.get, 1), turns, laps)[HOST_POOL]
                target = HOST_POOL_TARGETS[verified] if shape.payload_bytes >= HOST_POOL_BYTES else None
                about = dict(tier=DOOR, path=HOST_POOL, page_order=HOST_POOL, limit="memcpy")
                rows.append(row_of(found, shape, BATCH_PAGES, **about, verified=verified, threads=1, target=target))
                side.close()
    finally:
        limit.close()
    return rows
