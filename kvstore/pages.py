"""Pages, and the contract of a codec that reads and writes them (floor 2).

`Pages` says where an engine's KV lies: per layer and plane one tensor of pages, any strides, and a page table. A codec
is bound once to a view of pages and one part (`Codec.bind`), and the bound `Coder` then encodes or decodes block by
block. Digests are taken by the coder, layer slice by layer slice while the bytes are hot in the cache: that is why the
digest function is handed in. The codecs themselves are in `codec`; nothing here imports torch.

A coder never calls bytes good that it has not compared; what it wrote into pages before a digest failed is garbage, and
the caller must not report those pages as loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kv_kernels.flaws import Flaw
from kvstore.errors import BadInput
from kvstore.layout import Layout, Part
from tiering.tier import FrameSpan

Digest = Callable[..., bytes]
"""Digest of one or several buffers taken as one: 16 bytes."""


@dataclass(frozen=True)
class Pages:
    """A view of paged KV, for reading or for writing.

    planes: for each layer number one tensor per plane (torch, or numpy of the same width in bytes), each of shape
        [pages, page_tokens, kv_heads, width] with any strides: a permuted view of whatever the engine has. All heads
        of the group are given; a part takes its share.
    table: the physical page of every logical page, in token order. Page i holds the tokens from i * page_tokens on,
        counted from the `first_token` that is passed beside the pages.
    """

    planes: Mapping[int, Sequence[Any]]
    table: Sequence[int]
    page_tokens: int

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise BadInput(f"page_tokens={self.page_tokens} is not a page size; give 1 or more")

    @property
    def tokens(self) -> int:
        """Tokens that these pages cover."""
        return len(self.table) * self.page_tokens


class Coder(Protocol):
    """A codec bound to pages and to one part. Not thread-safe; bind one per thread."""

    def encode(self, token: int, into: FrameSpan, digest: Digest) -> list[bytes] | Flaw:
        """Encode the block that starts `token` tokens into the pages; returns the digest of every layer slice, or why
        the codec cannot write this block: what it left in `into` is garbage then.

        into: the frame's payload, exactly `Codec.payload_bytes(part)` long.
        """
        ...

    def decode(self, payload: FrameSpan, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """Decode a block into the pages and compare a private copy of every layer slice with `expected`.

        The block's first token lies `token` tokens into the pages; its first `skip` tokens are left out (a multiple of
        the page), so token + skip >= 0. False when any digest differs.
        """
        ...


class Codec(Protocol):
    """One way to write a block's numbers as bytes. A namespace has exactly one codec."""

    name: str
    is_exact: bool
    """Whether what comes back is bit for bit what was given. What any other codec decoded must not be encoded again."""

    def payload_bytes(self, part: Part) -> int:
        """Bytes of a part's payload: the same for every block, and a whole number per layer slice."""
        ...

    def prepare(self, layout: Layout) -> None:
        """What takes time at first, as compiling does, so that no request waits for it. Called when a namespace is
        opened; safe to call again."""
        ...

    def bind(self, pages: Pages, layout: Layout, part: Part) -> Coder:
        """A coder for these pages. Raises `LayoutMismatch` where they are not what the layout says."""
        ...
