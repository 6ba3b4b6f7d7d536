"""Couriers' reports for people: the latest of each courier counts, at most one a second.

A courier's connections, one for each tenant, share one session token, and it reports over one of them.
"""

from __future__ import annotations

import threading
from math import isfinite

from msgspec.structs import replace

from kvstore.protocol import courier as c
from kvstore.protocol.words import printable
from kvstore.service.sessions import ClientState
from tiering.clock import Clock

TOLD_SECONDS = 1.0
MOST_COURIERS, MOST_REASONS = 4, 16
MOST_COUNT = (1 << 63) - 1
"""The largest number in a message: a sum of several may be larger."""
MOST_NUMBER = 1e9
"""Of gigabytes a second and of milliseconds. Clients reject a status with much larger numbers."""


class FiguresTold:
    """Of all couriers. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[bytes, tuple[float, ClientState, c.CourierFigures]] = {}

    def tell(self, caller: ClientState, figures: c.CourierFigures) -> None:
        now, token = self._clock.monotonic_seconds(), caller.session.token
        with self._lock:
            before = self._told.get(token)
            if before is not None and now - before[0] < TOLD_SECONDS:
                return
            if before is None and len(self._told) >= MOST_COURIERS:
                del self._told[min(self._told, key=lambda one: self._told[one][0])]
            self._told[token] = now, caller, _cleaned(figures)

    def left(self, caller: ClientState) -> None:
        with self._lock:
            token = caller.session.token
            if token in self._told and self._told[token][1] is caller:
                del self._told[token]

    def figures(self) -> c.CourierFigures:
        with self._lock:
            all_told = [figures for _, _, figures in self._told.values()]
        names = ("fetching", "fetched_blocks", "fetched_bytes", "dropped_hints")
        return c.CourierFigures(
            [one for told in all_told for one in told.sources][: c.MAX_SOURCES],
            [one for told in all_told for one in told.reasons][:MOST_REASONS],
            *(min(MOST_COUNT, sum(getattr(told, name) for told in all_told)) for name in names),
        )


def _cleaned(figures: c.CourierFigures) -> c.CourierFigures:
    sources = [
        replace(
            one,
            kind=printable(one.kind),
            name=printable(one.name),
            state=printable(one.state),
            refused={printable(why): count for why, count in one.refused.items()},
            gbps=_number(one.gbps),
            p99_ms=_number(one.p99_ms),
            detail=printable(one.detail),
        )
        for one in figures.sources
    ]
    return replace(figures, sources=sources, reasons=[printable(one) for one in figures.reasons])


def _number(value: float) -> float:
    return min(value, MOST_NUMBER) if isfinite(value) and value >= 0 else 0.0
