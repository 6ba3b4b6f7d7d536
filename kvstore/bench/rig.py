"""What `bench tiers` measures with: pages, stocked stores, and memory for the limit (floor 4).

Everything is walked through in turn, so that a turn never finds its bytes in a cache, and every byte of it was touched
before the first turn. The stores are the product's own, put together as `node` does it, without a directory.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch

from kvstore.bench.measure import Together, Turn
from kvstore.codec import RawCodec
from kvstore.config import DramConfig, Limits
from kvstore.handle import NamespaceHandle
from kvstore.identity import KeyRing, Namespace, TenantKeys
from kvstore.layout import Layout
from kvstore.node import TenantDoor, build_store
from kvstore.pages import Digest, Pages
from tiering.extents import Extent
from tiering.frame import DIGEST_BYTES, digest, frame_bytes

EXTENT_BYTES = 64 << 20
PROMPTS = 4
"""A working set is this many prompts: by the time that one comes round again, the others have swept the caches."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A block: bfloat16 K and V of `layers` layers, `kv_heads` heads of `head_dim`, `block_tokens` tokens."""

    layers: int
    block_tokens: int
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def layout(self) -> Layout:
        """As the store sees it."""
        return Layout.gqa(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            block_tokens=self.block_tokens,
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block's one frame without its header."""
        return self.layout.raw_bytes


class PagePool:
    """An engine's pages for a whole working set, handed out prompt by prompt, round and round. Thread-safe.

    page_tokens 0: a page is a block, [head, token, dim], so that each plane of a block is one run of bytes. Otherwise
    pages of that many tokens, [token, head, dim], as engines often keep them: a block is gathered out of rows.
    """

    def __init__(self, shape: Shape, blocks: int, page_tokens: int, prompts: int = PROMPTS) -> None:
        """blocks: of a prompt. prompts: in the working set."""
        self.page_tokens = page_tokens or shape.block_tokens
        self._pages_of_prompt = blocks * shape.block_tokens // self.page_tokens
        self._prompts = prompts
        self._next = count()
        pages = self._pages_of_prompt * prompts
        self.planes = {layer: [_plane(shape, pages, page_tokens) for _ in range(2)] for layer in range(shape.layers)}

    def take(self) -> Pages:
        """The pages of the next prompt."""
        first = next(self._next) % self._prompts * self._pages_of_prompt
        return Pages(self.planes, range(first, first + self._pages_of_prompt), self.page_tokens)


class Traffic:
    """Whole prompts through handles, one for each thread: what a user calls."""

    def __init__(self, shape: Shape, blocks: int, pool: PagePool, handles: Sequence[NamespaceHandle]) -> None:
        """blocks: of a prompt."""
        self._handles = handles
        self._pool = pool
        self._prompt_tokens = blocks * shape.block_tokens
        self._numbers = count()
        self._rounds = count()
        self._stored: list[np.ndarray] = []

    def get(self, thread: int) -> None:
        """Match, lease, get and release the next stored prompt, whole."""
        handle = self._handles[thread]
        prompt = self._stored[next(self._rounds) % len(self._stored)]
        pages = self._pool.take()
        with handle.lease(handle.match(prompt)) as lease:
            loaded = handle.get(lease, pages)
        assert loaded.tokens == len(prompt), f"{loaded.tokens} of {len(prompt)} tokens loaded: {loaded.reason}"

    def put(self, thread: int) -> None:
        """Store a prompt that was never seen, whole."""
        self._put(self._prompt(next(self._numbers)), thread)

    def stock(self, prompts: int) -> None:
        """Store new prompts, which are those that `get` asks for from now on."""
        self._stored = [self._prompt(next(self._numbers)) for _ in range(prompts)]
        for prompt in self._stored:
            self._put(prompt, 0)

    def _put(self, prompt: np.ndarray, thread: int) -> None:
        result = self._handles[thread].put(prompt, self._pool.take())
        assert result.reason is None and result.stored, f"stored {result.stored} blocks: {result.reason}"

    def _prompt(self, number: int) -> np.ndarray:
        tokens = np.arange(self._prompt_tokens, dtype=np.uint32)
        tokens[0] = number  # the first token is in every key of the chain
        return tokens


class Side(Traffic):
    """A store in this process, filled to its last slot, with digests or without."""

    def __init__(self, shape: Shape, blocks: int, pool: PagePool, threads: int, digest: Digest) -> None:
        """blocks: of a prompt."""
        keys = TenantKeys.derive(secrets.token_bytes(32))
        size = frame_bytes(shape.payload_bytes)
        extent = size * max(1, EXTENT_BYTES // size)
        extents = -(-PROMPTS * blocks * size // extent)
        self.store = build_store(DramConfig(extents * extent, extent), Limits(), KeyRing([keys]))
        namespace = Namespace("0" * 40, shape.layout, RawCodec.name)
        handles = [NamespaceHandle(TenantDoor(self.store, keys), namespace, RawCodec(), digest) for _ in range(threads)]
        super().__init__(shape, blocks, pool, handles)
        while not self.store.usage().counters.get("evicted_blocks"):
            self.put(0)
        self.stock(PROMPTS)

    def check(self) -> None:
        """Nothing failed on the way: every invariant holds and no frame was called bad."""
        self.store.check()
        counters = self.store.usage().counters
        assert not counters.get("quarantined_blocks") and not counters.get("reported_frames"), counters


class Memcpy:
    """The limit: `memmove` of whole payloads between an extent of shared memory and private memory, one thread."""

    def __init__(self, shape: Shape, blocks: int, prompts: int = PROMPTS) -> None:
        """blocks: of a prompt. prompts: in each of the two memories."""
        self._payload = shape.payload_bytes
        self._turn_bytes = blocks * self._payload
        self._bytes = prompts * self._turn_bytes
        self._extent = Extent(self._bytes)
        self._private = torch.ones(self._bytes, dtype=torch.uint8)
        self._next = count()

    def get(self, _: int) -> None:
        """The direction of a get: out of the extent."""
        self._move(self._private.data_ptr(), self._extent.address)

    def put(self, _: int) -> None:
        """The direction of a put: into the extent."""
        self._move(self._extent.address, self._private.data_ptr())

    def close(self) -> None:
        """Give the extent back."""
        self._extent.close()

    def _move(self, target: int, source: int) -> None:
        first = next(self._next) * self._turn_bytes % self._bytes
        for at in range(first, first + self._turn_bytes, self._payload):
            ctypes.memmove(target + at, source + at, self._payload)


def no_digest(*_: object) -> bytes:
    """Stands for a digest where none is taken."""
    return bytes(DIGEST_BYTES)


DIGESTS: dict[bool, Digest] = {True: digest, False: no_digest}
"""What is taken with verification, and without."""


def turn_of(team: Together, work: Callable[[int], None], threads: int) -> Turn:
    """A turn in which each thread, called by its number, does the work once."""
    pieces = [partial(work, thread) for thread in range(threads)]
    return lambda: team.run(pieces)


def _plane(shape: Shape, pages: int, page_tokens: int) -> torch.Tensor:
    if page_tokens:
        return torch.ones(pages, page_tokens, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16)
    blocks = torch.ones(pages, shape.kv_heads, shape.block_tokens, shape.head_dim, dtype=torch.bfloat16)
    return blocks.permute(0, 2, 1, 3)
