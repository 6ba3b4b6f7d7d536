"""An engine's paged pools on a device, and the kernels between them and payloads: triton's, or twins in plain torch."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kv_bench.rig import BlockShape
from kv_bench.script import one_of
from kv_kernels import reference
from kv_kernels.int8 import KC64
from kv_kernels.pools import PoolTable
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput
from tiering.frame import HEADER_BYTES, digest, frame_bytes

try:
    from kv_kernels import triton_digest, triton_int8, triton_raw
except ImportError:
    _HAS_TRITON = False
    _COMPILER_ERRORS: tuple[type[Exception], ...] = ()
else:
    _HAS_TRITON = True
    _COMPILER_ERRORS = (triton_raw.triton.TritonError,)

RAW = "raw"
CODECS = (RAW, KC64)
TRITON, TWINS = ROUTES = ("triton", "twins")
FAILURES: tuple[type[Exception], ...] = (RuntimeError, OSError, ValueError, *_COMPILER_ERRORS)
"""What work on a device can raise: by torch and CUDA (out of memory included), the system, triton."""


@dataclass(frozen=True, slots=True)
class Route:
    """The kernels, called as those of `kv_kernels`; digest_keys: last argument of `digest`."""

    name: str
    gather: Callable[..., None]
    scatter: Callable[..., None]
    gather_quantize: Callable[..., None]
    dequantize_scatter: Callable[..., None]
    digest: Callable[..., None]
    digest_keys: Callable[[torch.device], torch.Tensor]

    def saver(
        self, pools: PoolTable, codec: str, table: torch.Tensor, payloads: torch.Tensor, at: int, status: torch.Tensor
    ) -> Callable[[], None]:
        """Pages into payloads, and each block's status, int32: a call that only launches."""
        if codec == RAW:
            return lambda: self.gather(pools, table, payloads, at)
        return lambda: self.gather_quantize(pools, codec, table, payloads, status, at)

    def loader(
        self, pools: PoolTable, codec: str, table: torch.Tensor, payloads: torch.Tensor, at: int
    ) -> Callable[[], None]:
        if codec == RAW:
            return lambda: self.scatter(pools, table, payloads, at)
        return lambda: self.dequantize_scatter(pools, codec, table, payloads, at)


def route_named(given: str | None, device: torch.device) -> Route:
    """None: triton on a GPU, the twins on a CPU. Raises `BadInput` if triton is missing."""
    name = given or (TRITON if device.type == "cuda" else TWINS)
    one_of("route", name, ROUTES)
    if name == TWINS:
        return _TWINS
    if not _HAS_TRITON:
        raise BadInput("the kernels need the package triton; run in a checkout: pip install '.[gpu]'")
    raw, eight_bits = (triton_raw.gather, triton_raw.scatter), triton_int8
    quantizing = eight_bits.gather_quantize, eight_bits.dequantize_scatter
    return Route(TRITON, *raw, *quantizing, triton_digest.digest_slices, triton_digest.digest_keys)


def told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no more is known'}"


def _digest(payload: torch.Tensor, payload_at: int, slice_bytes: int, into: torch.Tensor, keys: torch.Tensor) -> None:
    for row, digests in zip(payload.cpu().numpy(), into, strict=True):
        for number in range(into.shape[1]):
            at = payload_at + number * slice_bytes
            high, low = struct.unpack(">qq", digest(row[at : at + slice_bytes]))
            digests[number, 0], digests[number, 1] = low, high


_TWINS = Route(
    TWINS,
    reference.gather,
    reference.scatter,
    reference.gather_quantize,
    reference.dequantize_scatter,
    _digest,
    lambda device: torch.empty(0, dtype=torch.int64, device=device),
)


class PagedPool:
    """K and V of every layer, [pages, page_tokens, heads, width] in bfloat16, random.

    table: int64 [blocks, pages of a block], a permutation of all pages.
    """

    def __init__(self, shape: BlockShape, blocks: int, page_tokens: int, device: torch.device, seed: int) -> None:
        pages = blocks * shape.block_tokens // page_tokens
        generator = torch.Generator(device).manual_seed(seed)
        size = (pages, page_tokens, shape.kv_heads, shape.head_dim)
        self.planes = [
            [torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2)]
            for _ in range(shape.layers)
        ]
        self.pools = PoolTable.of(self.planes)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.table = order.view(blocks, -1).to(device)

    def is_saved(self, codec: str, row: torch.Tensor, at: int) -> bool:
        """Whether a payload, uint8 [1, bytes], equals the twin's of the first block."""
        before, status = row.clone(), torch.zeros(1, dtype=torch.int32, device=row.device)
        _TWINS.saver(self.pools, codec, self.table[:1], row, at, status)()
        return torch.equal(before, row)

    def is_loaded(self, codec: str, row: torch.Tensor, at: int) -> bool:
        before = self._first_block()
        _TWINS.loader(self.pools, codec, self.table[:1], row, at)()
        return torch.equal(before, self._first_block())

    def _first_block(self) -> torch.Tensor:
        rows = [plane[self.table[0]].view(torch.int16).flatten() for layer in self.planes for plane in layer]
        return torch.cat(rows)


def payload_bytes(shape: BlockShape, codec: str) -> int:
    (part,) = shape.layout.parts
    return codec_named(codec).payload_bytes(part)


def new_payloads(shape: BlockShape, codec: str, blocks: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(blocks, frame_bytes(payload_bytes(shape, codec)), dtype=torch.uint8, device=device)


def are_digests(row: torch.Tensor, slice_bytes: int, found: torch.Tensor) -> bool:
    """Whether `found`, int64 [1, slices, 2], are the digests of a frame's payload, uint8 [1, bytes]."""
    want = torch.zeros(found.shape, dtype=torch.int64)
    _digest(row, HEADER_BYTES, slice_bytes, want, want)
    return torch.equal(found.cpu(), want)
