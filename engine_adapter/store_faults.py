"""What a fault of the store counts as, at the edge at which it becomes a miss (floor 3)."""

from __future__ import annotations

from kvstore.errors import BadInput, LeaseExpired, NotReady, StoreClosed
from kvstore.miss import MissReason


def reason_of(error: Exception) -> MissReason:
    """Of anything that a verb, or the opening of a store, may raise."""
    if isinstance(error, StoreClosed):
        return MissReason.DISABLED
    if isinstance(error, NotReady):
        return MissReason.WARMING
    if isinstance(error, LeaseExpired):
        return MissReason.STALE_HINT
    if isinstance(error, BadInput):
        return MissReason.UNSUPPORTED
    return MissReason.UNREACHABLE
