"""Pages, and the contract of a codec that reads and writes them (floor 2).

`Pages` says where an engine's KV lies: per layer and plane one tensor of pages, any strides, and a page table. A codec
is bound once to a view of pages and one part (`Codec.bind`), and the bound `Coder` then encodes or decodes blocks, as
many at a time as there are. Digests are taken by the coder, in host memory layer slice by layer slice while the bytes
are hot in the cache: that is why the digest function is handed in. The codecs themselves are in `codec`; nothing here
imports torch.

A coder never calls bytes good that it has not compared; what it wrote into pages before a digest failed is garbage, and
the caller must not report those pages as loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any, Protocol

from kv_kernels.copies import Digest, Encoded
from kvstore.errors import BadInput, LayoutMismatch
from kvstore.layout import Layout, Part
from tiering.tier import FrameSpan

__all__ = ["Codec", "Coder", "Digest", "Encoded", "Pages"]

_TABLE = "give one page number each, as a list, an array or a tensor of one dimension"


@dataclass(frozen=True)
class Pages:
    """A view of paged KV, for reading or for writing.

    planes: for each layer number one tensor per plane (torch, or numpy's unsigned integers of the same width), each
        of shape [pages, page_tokens, kv_heads, width] with any strides: a permuted view of whatever the engine has. All
        heads of the group are given; a part takes its share.
    table: the physical page of every logical page, in token order. Page i holds the tokens from i * page_tokens on,
        counted from the `first_token` that is passed beside the pages.
    """

    planes: Mapping[int, Sequence[Any]]
    table: Sequence[int]
    page_tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.page_tokens, Integral) or self.page_tokens < 1:
            raise BadInput(f"page_tokens={self.page_tokens!r} is not a page size; give a whole number, 1 or more")
        try:
            len(self.table)
        except TypeError:
            raise BadInput(f"a page table of type {type(self.table).__name__}; {_TABLE}") from None

    @property
    def tokens(self) -> int:
        """Tokens that these pages cover."""
        return len(self.table) * self.page_tokens

    def page_numbers(self) -> list[int]:
        """The page table as Python integers. Addresses are computed from them, and an int32 of an array would overflow;
        and those of a tensor are only then equal to each other. Raises `LayoutMismatch`."""
        try:
            return [index(page) for page in self.table]
        except TypeError:
            raise LayoutMismatch(f"the page table holds something else than integers; {_TABLE}") from None


class Coder(Protocol):
    """A codec bound to pages and to one part. Not thread-safe; bind one per thread.

    Both verbs take any number of blocks, of which the first token of block i lies tokens[i] tokens into the pages.
    """

    def encode(self, tokens: Sequence[int], into: Sequence[FrameSpan], digest: Digest) -> Encoded:
        """Encode blocks; yields of each in order the digest of every layer slice, or why the codec cannot write that
        block: what is in its payload then, and in those behind it, is garbage, and there is nothing more to come.

        into: of each block the frame's payload, exactly `Codec.payload_bytes(part)` long. What was yielded has landed;
        later blocks may be under way, so close the generator before the other slots are given up.
        """
        ...

    def decode(
        self,
        payloads: Sequence[FrameSpan],
        tokens: Sequence[int],
        skip: int,
        expected: Sequence[Sequence[bytes]],
        digest: Digest,
    ) -> int:
        """Decode blocks into the pages and compare a private copy of every layer slice with `expected`; returns how
        many leading blocks are good: those before the first of which any digest differs.

        skip: tokens of the first block that are left out (a multiple of the page), so that tokens[0] + skip >= 0.
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
