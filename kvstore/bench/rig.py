"""The rig of `bench tiers`: pages, stocked stores, and memory for the limit.

All memory is walked through in turn, so that a turn never finds its bytes in a cache, and every byte is touched before
the first turn. The stores are the product's own, built as `node` builds them, without a directory.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import count
from math import ceil
from time import thread_time
from typing import Any

import numpy as np
import torch

from kvstore.bench.measure import Against, Cost, Stopwatch, Together, Turn, against, available_bytes
from kvstore.bench.row import Row, Target, rate_row
from kvstore.bench.sidecar import Sidecar
from kvstore.block.account import MissReason
from kvstore.block.codec import RawCodec
from kvstore.block.errors import BadInput
from kvstore.block.identity import KeyRing, Namespace, TenantKeys, token_bytes
from kvstore.block.layout import Layout
from kvstore.block.pages import Digest, Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.client.sidecar_store import SidecarStore
from kvstore.config import MIN_DRAM_BYTES, MIN_EXTENT_BYTES, DramConfig, Limits, format_size
from kvstore.node import EmbeddedDoor, build_store
from tiering.dram.extents import Extent
from tiering.frame import DIGEST_BYTES, digest, frame_bytes

EXTENT_BYTES = 64 << 20
PROMPTS = 4
"""Prompts of a working set: enough that the others flush the caches before one comes round again."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """bfloat16 K and V of `layers` layers, `kv_heads` heads of `head_dim`, `block_tokens` tokens."""

    layers: int
    block_tokens: int
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def layout(self) -> Layout:
        return Layout.gqa(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            block_tokens=self.block_tokens,
        )

    @property
    def payload_bytes(self) -> int:
        """Without header."""
        return self.layout.raw_bytes


class PagePool:
    """An engine's pages for a whole working set, handed out prompt by prompt, cyclically. Thread-safe.

    page_tokens 0: a page is a block, [head, token, dim], so each plane of a block is contiguous. Otherwise pages of so
    many tokens, [token, head, dim], as engines often keep them: a block is gathered from rows.
    """

    def __init__(self, shape: BlockShape, blocks: int, page_tokens: int, prompts: int = PROMPTS) -> None:
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
    """Whole prompts through handles, one per thread: the user's own calls."""

    def __init__(self, shape: BlockShape, blocks: int, pool: PagePool, handles: Sequence[NamespaceHandle]) -> None:
        """blocks: of a prompt."""
        self._handles = handles
        self._pool = pool
        self._prompt_tokens = blocks * shape.block_tokens
        self._numbers = count()
        self._rounds = count()
        self._stored: list[np.ndarray] = []

    def get(self, thread: int) -> None:
        """Match, lease, get and release the next stored prompt."""
        handle = self._handles[thread]
        prompt = self._stored[next(self._rounds) % len(self._stored)]
        pages = self._pool.take()
        with handle.lease(handle.match(prompt)) as lease:
            loaded = handle.get(lease, pages)
        assert loaded.tokens == len(prompt), f"{loaded.tokens} of {len(prompt)} tokens loaded: {loaded.reason}"

    def put(self, thread: int) -> None:
        """Store a new prompt."""
        self._put(self._prompt(next(self._numbers)), thread)

    def stock(self, prompts: int) -> None:
        """Store new prompts, for `get` to ask for from now on."""
        self._stored = [self._prompt(next(self._numbers)) for _ in range(prompts)]
        for prompt in self._stored:
            self._put(prompt, 0)

    def _put(self, prompt: np.ndarray, thread: int) -> None:
        result = self._handles[thread].put(prompt, self._pool.take())
        assert result.reason is None and result.stored, f"stored {result.stored} blocks: {result.reason}"

    def _prompt(self, number: int) -> np.ndarray:
        tokens = np.arange(self._prompt_tokens, dtype=np.uint32)
        tokens[0] = number  # the first token is part of every key
        return tokens


class Side(Traffic):
    """A store in this process, filled to its last slot, with digests or without."""

    def __init__(self, shape: BlockShape, blocks: int, pool: PagePool, threads: int, digest: Digest) -> None:
        """blocks: of a prompt."""
        keys = TenantKeys.derive(secrets.token_bytes(32))
        size = frame_bytes(shape.payload_bytes)
        extent = size * max(1, EXTENT_BYTES // size)
        extents = -(-PROMPTS * blocks * size // extent)
        self.store = build_store(DramConfig(extents * extent, extent), Limits(), KeyRing([keys]))
        namespace = Namespace("0" * 40, shape.layout, RawCodec.name)
        handles = [
            NamespaceHandle(EmbeddedDoor(self.store, keys), namespace, RawCodec(), digest) for _ in range(threads)
        ]
        super().__init__(shape, blocks, pool, handles)
        while not self.store.usage().counters.get("evicted_blocks"):
            self.put(0)
        self.stock(PROMPTS)

    def check(self) -> None:
        """Assert every invariant, and that no frame was found bad."""
        self.store.check()
        counters = self.store.usage().counters
        assert not counters.get("quarantined_blocks") and not counters.get("reported_frames"), counters


class Memcpy:
    """The limit: one thread's `memmove` of whole payloads between an extent of shared memory and private memory."""

    def __init__(self, shape: BlockShape, blocks: int, prompts: int = PROMPTS) -> None:
        """blocks: of a prompt. prompts: in each of the two memories."""
        self._payload = shape.payload_bytes
        self._turn_bytes = blocks * self._payload
        self._bytes = prompts * self._turn_bytes
        self._extent = Extent(self._bytes)
        self._private = torch.ones(self._bytes, dtype=torch.uint8)
        self._next = count()

    def get(self, _: int) -> None:
        """Out of the extent, as a get."""
        self._move(self._private.data_ptr(), self._extent.address)

    def put(self, _: int) -> None:
        """Into the extent, as a put."""
        self._move(self._extent.address, self._private.data_ptr())

    def close(self) -> None:
        self._extent.close()

    def _move(self, target: int, source: int) -> None:
        first = next(self._next) * self._turn_bytes % self._bytes
        for at in range(first, first + self._turn_bytes, self._payload):
            ctypes.memmove(target + at, source + at, self._payload)


def no_digest(*_: object) -> bytes:
    """In place of a digest, without verification."""
    return bytes(DIGEST_BYTES)


DIGESTS: dict[bool, Digest] = {True: digest, False: no_digest}
"""With verification, and without."""


def turn_of(team: Together, work: Callable[[int], None], threads: int) -> Turn:
    """A turn in which each thread does the work once, called with its number."""
    pieces = [partial(work, thread) for thread in range(threads)]
    return lambda: team.run(pieces)


def _plane(shape: BlockShape, pages: int, page_tokens: int) -> torch.Tensor:
    if page_tokens:
        return torch.ones(pages, page_tokens, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16)
    blocks = torch.ones(pages, shape.kv_heads, shape.block_tokens, shape.head_dim, dtype=torch.bfloat16)
    return blocks.permute(0, 2, 1, 3)


# ---------------------------------------------------------------------------------------------------------------------
# Rows of `kvstore bench tiers`: a path of one tier beside its limit.


DRAM, DOOR, NVME = TIERS = ("dram", "door", "nvme")

HEAD_MAJOR = "[head, token, dim]"
TOKEN_MAJOR = "[token, head, dim]"
NO_PAGES = ""

TARGETED_BYTES = 2 << 20
"""Targets hold from this payload size on."""

TARGETS: dict[tuple[str, str, bool, int], float] = {
    (DRAM, "get", True, 1): 0.70,
    (DRAM, "put", True, 1): 0.70,
    (DRAM, "get", True, 2): 0.85,
    (DRAM, "put", True, 2): 0.85,
    (DRAM, "get", False, 1): 0.92,
    (DRAM, "put", False, 1): 0.90,
    (DOOR, "get", True, 1): 0.68,
    (DOOR, "put", True, 1): 0.68,
    (DOOR, "get", False, 1): 0.90,
    (DOOR, "put", False, 1): 0.88,
}
"""(tier, path, with verification, threads): share of one thread's memcpy, for pages in the payload's own order."""


def row_of(
    found: Against,
    shape: BlockShape,
    blocks: int,
    *,
    tier: str,
    path: str,
    page_order: str,
    verified: bool,
    threads: int,
    limit: str,
    target: float | None,
) -> Row:
    """One path at one frame size, in GB/s of payload. blocks: that one thread moves in one turn, which are the row's
    prompt_tokens. page_order: of the pages that bytes come from or go to. threads: that call the store. cpu_ratio: as
    the ratio, of processor time over all threads of this process."""
    what = {
        "tier": tier,
        "path": path,
        "payload_bytes": shape.payload_bytes,
        "prompt_tokens": blocks * shape.block_tokens,
        "page_order": page_order,
        "verified": verified,
        "threads": threads,
    }
    wanted = None if target is None else Target(target)
    return rate_row(what, found, blocks * shape.payload_bytes, limit, wanted, cpu_ratio=found.cpu_ratio)


def memcpy_row(
    tier: str, path: str, shape: BlockShape, order: str, verified: bool, threads: int, blocks: int, found: Against
) -> Row:
    """The same beside memcpy, with its target where there is one."""
    is_targeted = order == HEAD_MAJOR and shape.payload_bytes >= TARGETED_BYTES
    return row_of(
        found,
        shape,
        blocks,
        tier=tier,
        path=path,
        page_order=order,
        verified=verified,
        threads=threads,
        limit="memcpy",
        target=TARGETS.get((tier, path, verified, threads)) if is_targeted else None,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The rows of the API socket in `kvstore bench tiers`: put and get through a sidecar, against memcpy.
#
# The same calls as in the rows of DRAM, by a client in this process to `kvstore serve` in another: keys, places and
# digests cross the socket; bytes are copied and digested here, between memory that both have mapped. A put is a
# reservation, filled in place, and a commit. One sidecar at a time, DRAM only, filled to its last slot: with
# verification, then without.


ROOM = 1.3
"""Of the sidecar, in prompts: leases may not pin all of it. Pages and each of the limit's buffers have room for one."""
BUFFERS = ROOM + 3
MEMORY_SHARE = 0.8
"""Share of the available memory that may be taken."""


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """shapes: of the frames. prompt_tokens: of a prompt, moved per turn; fewer if `BUFFERS` times as much exceeds
    `MEMORY_SHARE` of the available memory. laps: turns of each."""

    shapes: tuple[BlockShape, ...] = (BlockShape(8, 64), BlockShape(32, 64))
    prompt_tokens: int = 32768
    laps: int = 16

    def __post_init__(self) -> None:
        largest = max(shape.block_tokens for shape in self.shapes)
        if self.prompt_tokens < largest:
            raise BadInput(f"prompt_tokens={self.prompt_tokens}; give {largest} or more, which is a block")


def run(options: DoorOptions, say: Callable[[str], None]) -> list[Row]:
    """Measure every shape. Raises `BadInput` where there is too little memory."""
    return [row for shape in options.shapes for row in _measure(shape, options, say)]


class DoorSide(Traffic):
    """A sidecar filled to its last slot, and a handle behind its socket, with digests or without."""

    def __init__(self, shape: BlockShape, blocks: int, pool: PagePool, client: SidecarStore, digest: Digest) -> None:
        """blocks: of a prompt. client: of a sidecar with memory as by `memory_of`."""
        namespace = Namespace("0" * 40, shape.layout, RawCodec.name)
        handle = NamespaceHandle(client._door, namespace, RawCodec(), digest)
        super().__init__(shape, blocks, pool, [handle])
        dram, extent = memory_of(shape, blocks)
        slots = dram // extent * (extent // frame_bytes(shape.payload_bytes))
        for _ in range(slots // blocks + 1):
            self.put(0)
        first = handle.match(self._prompt(0))
        assert first.blocks < blocks and first.reason is MissReason.EVICTED, f"not full: {first.reason}"
        self.stock(1)
        self.get(0)  # touches the mapped pages


def memory_of(shape: BlockShape, blocks: int) -> tuple[int, int]:
    """A sidecar's budget for prompts of so many blocks, and its extent size, a multiple of the frame."""
    size = frame_bytes(shape.payload_bytes)
    wanted = ceil(ROOM * blocks)
    frames = max(min(wanted, EXTENT_BYTES // size), -(-MIN_EXTENT_BYTES // size), 1)
    extent = frames * size
    return -(-max(wanted * size, MIN_DRAM_BYTES) // extent) * extent, extent


def _measure(shape: BlockShape, options: DoorOptions, say: Callable[[str], None]) -> list[Row]:
    subject = f"{format_size(shape.payload_bytes)} frames through the door"
    say(f"{subject}: filling memory")
    blocks = _blocks(shape, options)
    pool = PagePool(shape, blocks, 0, prompts=1)
    limit = Memcpy(shape, blocks, prompts=1)
    dram, extent = memory_of(shape, blocks)
    rows = []
    try:
        for verified, digest in DIGESTS.items():
            say(f"{subject}: filling a sidecar")
            with Sidecar({"dram": dram, "extent": extent, "nvme": "off"}) as sidecar, sidecar.client() as client:
                side = DoorSide(shape, blocks, pool, client, digest)
                for path in ("get", "put"):
                    say(f"{subject}: {path}, {'verified' if verified else 'without verification'}")
                    with Together(1) as alone:
                        turns = {path: turn_of(alone, getattr(side, path), 1)}
                        found = against(turn_of(alone, getattr(limit, path), 1), turns, options.laps)[path]
                    rows.append(memcpy_row(DOOR, path, shape, HEAD_MAJOR, verified, 1, blocks, found))
    finally:
        limit.close()
    return rows


def _blocks(shape: BlockShape, options: DoorOptions) -> int:
    """Blocks of a prompt: as many as wanted, or as memory allows."""
    spare, each = int(MEMORY_SHARE * available_bytes()), int(BUFFERS * frame_bytes(shape.payload_bytes))
    fit = spare // each
    if not fit:
        raise BadInput(
            f"the rows of the door need {format_size(each)} of memory and may take {format_size(spare)}, "
            f"{MEMORY_SHARE:.0%} of what is available; free some, or leave them out with --only"
        )
    return min(options.prompt_tokens // shape.block_tokens, fit)


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """prompt_tokens, block_tokens: of every prompt. small_blocks, large_blocks: in the two indexes, whole prompts; a
    sidecar holds as many as the small one. laps, door_laps: measurements of a match, embedded and through the socket.
    clients: processes that match at once, client_laps times for client_seconds."""

    prompt_tokens: int = 32768
    block_tokens: int = 64
    small_blocks: int = 10_000
    large_blocks: int = 2_000_000
    laps: int = 200
    door_laps: int = 2000
    clients: int = 8
    client_laps: int = 5
    client_seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.prompt_tokens // self.block_tokens <= self.small_blocks <= self.large_blocks:
            raise BadInput(
                f"prompts of {self.prompt_tokens} tokens in indexes of {self.small_blocks} and {self.large_blocks} "
                "blocks: give prompts of at least one block, indexes of at least one prompt, the larger one last"
            )

    @property
    def prompt_blocks(self) -> int:
        return self.prompt_tokens // self.block_tokens


class Prompts:
    """Prompt n is 0, 1, 2, ... except for its first token, n, which is part of every key."""

    def __init__(self, options: LookupOptions) -> None:
        self._tokens = np.arange(options.prompt_tokens, dtype=np.uint32)

    def __getitem__(self, number: int) -> np.ndarray[Any, Any]:
        tokens = self._tokens.copy()
        tokens[0] = number
        return tokens


class Chain:
    """The limit: only one keyed BLAKE2b-256 per block over the key before and the block's tokens."""

    def __init__(self, options: LookupOptions) -> None:
        self._raw = token_bytes(Prompts(options)[0])
        self._step = options.block_tokens * 4
        self._base = blake2b(digest_size=32, key=bytes(32), person=b"kv-bench")

    def turn(self) -> Cost:
        """The keys of one prompt."""
        raw, step, base = self._raw, self._step, self._base
        watch = Stopwatch(thread_time)
        parent = bytes(32)
        for at in range(0, len(raw) - step + 1, step):
            state = base.copy()
            state.update(parent + raw[at : at + step])
            parent = state.digest()
        return watch.cost()
