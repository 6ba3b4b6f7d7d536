"""The contract of copies between pages and payloads.

A copy is bound to pages and one part. Each call is for many blocks, so that a device can have all of them in flight.
Must never say that a block is good whose digests it has not compared. Imports no torch: clients import it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from enum import Enum
from typing import Protocol


class Flaw(Enum):
    """Why an encoder cannot write a block. Loops and kernels return the value, or 0."""

    NONFINITE = 1  # a NaN or an infinity
    OUT_OF_RANGE = 2  # numbers too far apart for a scale in fp16


Digest = Callable[..., bytes]
"""Of one or several buffers taken as one: 16 bytes."""
Encoded = Generator[list[bytes] | Flaw, None, None]
"""Of each block in order the digests of its layer slices, or why it cannot be written, which then comes last."""


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
        """The blocks at `tokens` into payloads, which are no longer written to once it has ended or is closed."""
        ...

    def decode(
        self,
        payloads: Sequence[Span],
        tokens: Sequence[int],
        skip: int,
        expected: Sequence[Sequence[bytes]],
        digest: Digest,
    ) -> int:
        """Payloads into the blocks at `tokens`; returns how many leading blocks have the expected digests."""
        ...
