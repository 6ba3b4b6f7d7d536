"""The contract of what moves blocks between pages and payloads.

A copy is bound to pages and one part. Everything is told for many blocks at once, so that a device can have all of them
under way. Must never say that a block is good whose digests it has not compared. Imports no torch: clients
import it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from enum import Enum
from typing import Protocol


class Flaw(Enum):
    """Why an encoder cannot write a block. Loops and kernels tell the value, or 0."""

    NONFINITE = 1  # a NaN or an infinity
    OUT_OF_RANGE = 2  # numbers too far apart for a scale in fp16


Digest = Callable[..., bytes]
"""Of one or several buffers taken as one: 16 bytes."""
Encoded = Generator[list[bytes] | Flaw, None, None]
"""Of each block in order the digests of its layer slices, or why it cannot be written, which is the last one then."""


class Span(Protocol):
    """A payload in this process's memory."""

    @property
    def address(self) -> int:
        """Where it starts."""
        ...

    @property
    def view(self) -> memoryview:
        """All of its bytes, writable where a block is encoded into it."""
        ...


class BlockCopy(Protocol):
    """Bound to pages: blocks to payloads and back. See `kvstore.block.pages.Coder`."""

    def encode(self, tokens: Sequence[int], into: Sequence[Span], digest: Digest) -> Encoded:
        """The blocks at `tokens` into payloads. Nothing writes into them any more once it has ended or is closed."""
        ...

    def decode(
        self,
        payloads: Sequence[Span],
        tokens: Sequence[int],
        skip: int,
        expected: Sequence[Sequence[bytes]],
        digest: Digest,
    ) -> int:
        """Payloads into the blocks at `tokens`; how many of the first ones have the digests expected."""
        ...
