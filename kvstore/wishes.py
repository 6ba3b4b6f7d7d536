"""What is wished of blocks, for `tiering.retention`: columns of the index, by row (floor 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.prefix_index import PrefixIndex


class Sized(Protocol):
    """A namespace, as far as it matters here."""

    @property
    def block_bytes(self) -> int:
        """What one of its blocks takes."""
        ...


class IndexWishes:
    """`Wishes` of a store."""

    def __init__(self, index: PrefixIndex, spaces: Sequence[Sized], groups: Sequence[int] | None) -> None:
        """spaces, groups: by the namespace's number; groups: None where all tenants are one."""
        self._index = index
        self._spaces = spaces
        self._groups = groups
        self.hint = index.retention
        self.hinted = index.hinted
        self.parent = index.parent
        self.depth = index.depth

    def size_bytes(self, row: int) -> int:
        """As `Wishes.size_bytes`."""
        return self._spaces[self._index.namespace_of(row)].block_bytes

    def group(self, row: int) -> int:
        """As `Wishes.group`."""
        return self._groups[self._index.namespace_of(row)] if self._groups is not None else 0
