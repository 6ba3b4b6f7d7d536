"""Plain torch versions of the transfer operations, on any device (floor 0).

What every faster route is compared with: `host` on the CPU, the kernels on a GPU. Written for reading, one index
operation per plane; the only file in this folder that must be right by inspection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Digest = Callable[..., bytes]


class Span(Protocol):
    """A payload in this process's memory."""

    @property
    def view(self) -> memoryview:
        """All of its bytes, writable."""
        ...


def gather(plane: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
    """Pages [pages, page_tokens, heads, width] named by `pages` as one block [heads, tokens, width], contiguous."""
    index = torch.tensor(list(pages), dtype=torch.int64, device=plane.device)
    chosen = plane.index_select(0, index)
    return chosen.flatten(0, 1).transpose(0, 1).contiguous()


def scatter(block: torch.Tensor, plane: torch.Tensor, pages: Sequence[int]) -> None:
    """The mirror of `gather`: [heads, tokens, width] into the pages named, and into no other."""
    heads, tokens, width = block.shape
    chosen = block.transpose(0, 1).reshape(len(pages), tokens // len(pages), heads, width)
    for position, page in enumerate(pages):
        plane[page].copy_(chosen[position])


class RawCopy:
    """Copies blocks between pages on any device and payloads in host memory, bit for bit."""

    def __init__(
        self, planes: Sequence[Sequence[Any]], table: Sequence[int], page_tokens: int, block_tokens: int
    ) -> None:
        """planes: per layer slice, per plane, a tensor [pages, page_tokens, heads, width]; table: physical pages."""
        self._planes = [[_as_integers(plane) for plane in layer] for layer in planes]
        self._table = table
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens

    def encode(self, token: int, into: Span, digest: Digest) -> list[bytes]:
        """Copy the block at `token` into a payload; returns each layer slice's digest, taken from the payload."""
        first = token // self._page_tokens
        pages = self._table[first : first + self._block_tokens // self._page_tokens]
        digests, offset = [], 0
        for layer in self._planes:
            start = offset
            for plane in layer:
                block = _bytes(gather(plane, pages)).cpu()
                torch.frombuffer(into.view, dtype=torch.uint8, count=block.numel(), offset=offset).copy_(block)
                offset += block.numel()
            digests.append(digest(into.view[start:offset]))
        return digests

    def decode(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """Copy a payload into the block at `token`, without its first `skip` tokens; False if any digest differs.

        A layer slice is verified in a private copy before any of it reaches the pages.
        """
        first = (token + skip) // self._page_tokens
        pages = self._table[first : first + (self._block_tokens - skip) // self._page_tokens]
        offset = 0
        for layer, want in zip(self._planes, expected, strict=True):
            sizes = [plane.shape[2] * self._block_tokens * plane.shape[3] * plane.element_size() for plane in layer]
            private = torch.frombuffer(bytearray(payload.view[offset : offset + sum(sizes)]), dtype=torch.uint8)
            if digest(private.numpy()) != want:
                return False
            offset += sum(sizes)
            for plane, data in zip(layer, private.split(sizes), strict=True):
                block = data.to(plane.device).view(plane.dtype)
                block = block.view(plane.shape[2], self._block_tokens, plane.shape[3])
                scatter(block[:, skip:], plane, pages)
        return True


def _as_integers(plane: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: every device can index those, which is not so of float8."""
    return plane.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plane.element_size()])


def _bytes(block: torch.Tensor) -> torch.Tensor:
    return block.view(torch.uint8).flatten()
