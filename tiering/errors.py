"""Typed faults of a tier. A miss is not one of them: a shorter answer is a value."""

from __future__ import annotations


class TierError(Exception):
    """Any operating fault of a tier. errno: of the system call behind it, if the cause does not tell."""

    errno: int | None = None


class TierFull(TierError):
    """There is no free place of the kind asked for; the caller decides what to evict."""


class TierUnavailable(TierError):
    """The tier cannot be reached, or was closed."""


class BlockMissing(TierError):
    """The place named holds no readable frame."""


class BlockCorrupt(TierError):
    """A frame failed a check: its bytes are not what was committed. The message names the check, never the bytes."""


class EpochRetired(BlockCorrupt):
    """A frame signed in a retired epoch: perhaps intact, but not to be used."""


class IndexDoubtful(TierError):
    """The index of durable frames cannot be trusted, and is rebuilt from the frames' headers."""
