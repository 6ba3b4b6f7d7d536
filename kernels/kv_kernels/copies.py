"""The contract of copies between pages and payloads.

A copy is bound to pages and one part. Each call is for many blocks, so that a device can have all of them in flight.
Must never say that a block is good whose digests it has not compared. Imports no torch: clients import it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from enum import Enum
from typing import Protocol


class Flaw(Enum):
    """Why an encoder cannot write a block. Loops and kernels return the value, or 0; a higher one is worse."""

    OUT_OF_RANGE = 1  # numbers too far apart for a scale in fp16
    NONFINITE = 2  # a NaN or an infinity


Digest = Callable[..., bytes]
"""Of one or several buffers taken as one: 16 bytes."""
Digests = Sequence[Sequence[bytes]]
"""Of each block in order those of its layer slices."""
Encoded = Generator[list[bytes] | Flaw, None, None]
"""Of each block in order the digests of its layer slices, or why it cannot be written, which then comes last."""


class Span(Protocol):
    """A payload in this process's memory: where it starts, and its bytes, writable where a block is encoded into it."""

    @property
    def address(self) -> int: ...

    @property
    def view(self) -> memoryview: ...


Spans = Sequence[Span]
"""Of each block its payload."""


class BlockCopy(Protocol):
    """A codec bound to pages and to one part. Not thread-safe; bind one per thread.

    Both verbs take any number of blocks, of which the first token of block i lies tokens[i] tokens into the pages of
    the part's group. A token here, and in all of `kv_kernels`, is one row of a plane, whatever that covers.
    """

    def encode(self, tokens: Sequence[int], into: Spans, digest: Digest) -> Encoded:
        """Encode blocks; yields for each in order the digest of every layer slice. For a block that the codec cannot
        write it yields the reason and ends: the payloads of that block and of those after it are garbage.

        into: of each block the frame's payload, exactly `Codec.payload_bytes(part)` long. A payload is complete once
        its digests are yielded; later ones may be in flight, so close the generator before giving up their slots.
        """
        ...

    def decode(self, payloads: Spans, tokens: Sequence[int], skip: int, expected: Digests, digest: Digest) -> int:
        """Decode blocks into the pages and compare the digest of a private copy of every layer slice with `expected`.
        Returns how many leading blocks are good: those before the first one with a digest that differs.

        skip: tokens of the first block that are left out (a multiple of the page), so that tokens[0] + skip >= 0.
        """
        ...
