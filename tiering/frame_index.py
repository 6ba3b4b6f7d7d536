"""The index of durable frames: which slot of which slab holds what (floor 1).

A sorted map from bytes to bytes, changed in batches that apply as a whole. It is never the truth: slabs carry headers
with a MAC, and whatever looks wrong in here is thrown away and built again from those. So this contract is small:
order, atomicity, and a `sync` behind which nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

Change = tuple[bytes, bytes | None]
"""A key, and its new value or None to remove it."""


class FrameIndex(Protocol):
    """A sorted map on disk. Calls are serialised by the caller; `get` and `iterate` see what was applied."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values, None where there is none."""
        ...

    def apply(self, changes: Sequence[Change]) -> None:
        """All of these or none, in this order. Durable after the next `sync`, lost or kept whole before it."""
        ...

    def iterate(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Pairs whose key starts with `prefix`, in the order of their keys, as of the first step."""
        ...

    def sync(self) -> None:
        """Everything applied so far survives a crash."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...
