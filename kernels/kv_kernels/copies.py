"""The contract of what moves blocks between pages and payloads, and the loop of those that do it one by one (floor 0).

A copy is bound to pages and one part. Everything is told for many blocks at once, so that a device can have all of them
under way. Must never say that a block is good whose digests it has not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from kv_kernels.flaws import Flaw

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


class Copy(Protocol):
    """Bound to pages: blocks to payloads and back. See `kvstore.pages.Coder`."""

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


class BlockByBlock:
    """A copy that does one block after another, on the calling thread."""

    def encode(self, tokens: Sequence[int], into: Sequence[Span], digest: Digest) -> Encoded:
        """As `Copy.encode`."""
        encode_block = self.encode_block
        for token, payload in zip(tokens, into, strict=True):
            encoded = encode_block(token, payload, digest)
            yield encoded
            if isinstance(encoded, Flaw):
                return

    def decode(
        self,
        payloads: Sequence[Span],
        tokens: Sequence[int],
        skip: int,
        expected: Sequence[Sequence[bytes]],
        digest: Digest,
    ) -> int:
        """As `Copy.decode`."""
        decode_block = self.decode_block
        good = 0
        for payload, token, want in zip(payloads, tokens, expected, strict=True):
            if not decode_block(payload, token, skip, want, digest):
                break
            good += 1
            skip = 0
        return good

    def encode_block(self, token: int, into: Span, digest: Digest) -> list[bytes] | Flaw:
        """The block at `token` into a payload: the digests of its layer slices, taken from the payload, or a flaw."""
        raise NotImplementedError

    def decode_block(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """A payload into the block at `token`, without its first `skip` tokens; False where a digest differs."""
        raise NotImplementedError
