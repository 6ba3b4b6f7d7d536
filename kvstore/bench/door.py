"""The rows of the local door in `kvstore bench tiers`: put and get through a sidecar, against memcpy (floor 4).

The same calls as in the rows of DRAM, by a client in this process to `kvstore serve` in another: keys, places and
digests cross the socket, and bytes are copied and digested here, from and to memory that both have mapped. A put is a
reservation, filled in place, and a commit. One sidecar at a time, DRAM only, filled to its last slot: with
verification, then without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from kvstore.bench.measure import Together, against, available_bytes
from kvstore.bench.rig import DIGESTS, EXTENT_BYTES, Memcpy, PagePool, Shape, Traffic, turn_of
from kvstore.bench.rows import DOOR, HEAD_MAJOR, Row, memcpy_row
from kvstore.bench.sidecar import Sidecar
from kvstore.codec import RawCodec
from kvstore.config import MIN_DRAM_BYTES, MIN_EXTENT_BYTES, format_size
from kvstore.errors import BadInput
from kvstore.handle import NamespaceHandle
from kvstore.identity import Namespace
from kvstore.miss import MissReason
from kvstore.pages import Digest
from kvstore.service.client import SidecarStore
from tiering.frame import frame_bytes

ROOM = 1.3
"""In the sidecar, in prompts: one that fills it would be more than may be pinned. The pages have one, and each of the
limit's two buffers."""
BUFFERS = ROOM + 3
MEMORY_SHARE = 0.8
"""Of the memory that is available, how much may be taken."""


@dataclass(frozen=True, slots=True)
class Options:
    """shapes: the frames to measure. prompt_tokens: of a prompt, which is what a turn moves; fewer where
    `BUFFERS` times as much is more than `MEMORY_SHARE` of the memory that is available. laps: turns of each.
    """

    shapes: tuple[Shape, ...] = (Shape(8, 64), Shape(32, 64))
    prompt_tokens: int = 32768
    laps: int = 16

    def __post_init__(self) -> None:
        largest = max(shape.block_tokens for shape in self.shapes)
        if self.prompt_tokens < largest:
            raise BadInput(f"prompt_tokens={self.prompt_tokens}; give {largest} or more, which is a block")


def run(options: Options, say: Callable[[str], None]) -> list[Row]:
    """Measure every shape. Raises `BadInput` where there is too little memory."""
    return [row for shape in options.shapes for row in _measure(shape, options, say)]


class DoorSide(Traffic):
    """A sidecar filled to its last slot, and a handle behind its socket, with digests or without."""

    def __init__(self, shape: Shape, blocks: int, pool: PagePool, client: SidecarStore, digest: Digest) -> None:
        """blocks: of a prompt. client: of a sidecar with memory as `memory_of` says."""
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
        self.get(0)  # a page that is mapped is not touched before somebody reads it


def memory_of(shape: Shape, blocks: int) -> tuple[int, int]:
    """Of a sidecar for prompts of so many blocks: its budget, and the size of its extents, which frames fill."""
    size = frame_bytes(shape.payload_bytes)
    wanted = ceil(ROOM * blocks)
    frames = max(min(wanted, EXTENT_BYTES // size), -(-MIN_EXTENT_BYTES // size), 1)
    extent = frames * size
    return -(-max(wanted * size, MIN_DRAM_BYTES) // extent) * extent, extent


def _measure(shape: Shape, options: Options, say: Callable[[str], None]) -> list[Row]:
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


def _blocks(shape: Shape, options: Options) -> int:
    """Of a prompt: as many as are wanted, or as memory allows."""
    spare, each = int(MEMORY_SHARE * available_bytes()), int(BUFFERS * frame_bytes(shape.payload_bytes))
    fit = spare // each
    if not fit:
        raise BadInput(
            f"the rows of the door need {format_size(each)} of memory and may take {format_size(spare)}, "
            f"{MEMORY_SHARE:.0%} of what is available; free some, or leave them out with --only"
        )
    return min(options.prompt_tokens // shape.block_tokens, fit)
