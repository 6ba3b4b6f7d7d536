"""What a sidecar is up to, in a word: for probes, metrics and `kvstore stat`."""

from __future__ import annotations

from enum import StrEnum


class Readiness(StrEnum):
    """What a sidecar is up to."""

    READY = "ready"
    WARMING = "warming"  # it serves, and may call a miss warming
    DEGRADED = "degraded"  # it serves; something ran out or fails, or what is on disk could not all be taken in
    STOPPING = "stopping"
