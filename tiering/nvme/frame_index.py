"""The index of durable frames: which slot of which slab holds what.

A sorted map from bytes to bytes, changed in atomic batches. It is never the truth: slabs carry headers with a MAC, and
if anything looks wrong here, the index is discarded and rebuilt from those. So the contract is small: order, atomicity,
and a `sync` after which nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

Change = tuple[bytes, bytes | None]
"""A key, and its new value or None to remove it."""


class FrameIndex(Protocol):
    """A sorted map on disk: keys of 1 to 511 bytes, values of at most 4080. `get` and `iterate` see what was applied.

    The caller serialises calls and the steps of iterations, which may come from different threads. Any of them may
    raise `TierUnavailable` (closed, no permission, no space) or `IndexDoubtful`: the index is damaged, and is to be
    closed, thrown away, and rebuilt.
    """

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in the order of the keys, None where there is none."""
        ...

    def apply(self, changes: Sequence[Change]) -> None:
        """All of these or none; of two changes of one key the later one counts.

        Durable after the next `sync`. Before it a crash keeps the batch whole or loses it, and all later ones with it.
        Raises `TierFull` if the map cannot become larger; nothing is applied then.
        """
        ...

    def iterate(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Pairs whose key starts with `prefix`, in the order of their keys. To be read to its end, or dropped, before
        the next call."""
        ...

    def sync(self) -> None:
        """Make everything applied so far survive a crash."""
        ...

    def close(self) -> None:
        """Close the file, which makes nothing durable. Later calls raise `TierUnavailable`. Safe to call twice."""
        ...


class IndexMaker(Protocol):
    """Opens the index that belongs to a directory, or begins a new one."""

    def open(self, *, clean: bool) -> FrameIndex:
        """The index as it was left; clean: closed in order by its owner. Raises `IndexDoubtful`."""
        ...

    def discard(self) -> None:
        """Remove it, so that the next `open` begins an empty one."""
        ...
