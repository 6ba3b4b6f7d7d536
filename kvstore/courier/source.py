"""What fills a fetch's slots: the contract of sources, and what they have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvstore.block.account import HitTier, MissReason
from kvstore.courier.figures import Figures
from kvstore.courier.window import Forged, ReservedWindow
from kvstore.pool.speeds import PEER_PRIOR, SourcePrior
from tiering.clock import Clock


@dataclass(frozen=True, slots=True)
class Filled:
    """A source's result for a window. reason: why there are no more blocks; None if it is full."""

    reason: MissReason | None = None
    detail: str = ""


NOT_WANTED = Filled(MissReason.DISABLED, "no engine waits for it any more")


class Stops:
    """Ends what a fetch waits for, from another thread. over: the fetch is to end."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None

    def waits_for(self, stop: Callable[[], None] | None) -> None:
        """A wait begins. stop: ends it; None once it is over."""
        with self._lock:
            self._stop = stop
        if stop is not None and self.over.is_set():
            stop()

    def end(self) -> None:
        self.over.set()
        with self._lock:
            stop = self._stop
        if stop is not None:
            stop()


class Source(ABC):
    """One source, for one fetch. counted_as: in figures and speeds. name: for people. publishes: whether a ticket says
    that it will have more soon."""

    tier: HitTier
    prior: SourcePrior = PEER_PRIOR

    def __init__(
        self, counted_as: Hashable, name: str, figures: Figures, clock: Clock, *, publishes: bool = False
    ) -> None:
        self.name, self.publishes = name, publishes
        self._counted_as, self._figures, self._clock = counted_as, figures, clock

    def fill(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Bring the blocks of the window that the source has, and have the sidecar adopt them."""
        began_at = self._clock.monotonic_seconds()
        filled = self._read(window, stops)
        window.adopt()
        if isinstance(window.failed, Forged):
            self._figures.refused(self._counted_as, "header")
            filled = self._forged(str(window.failed))
        if window.adopted:
            now, size = self._clock.monotonic_seconds(), window.adopted * window.space.block_bytes
            self._figures.came(self._counted_as, window.adopted, size)
            self._figures.speeds.learn(self._counted_as, size, now - began_at, now, self.prior)
        return filled

    @abstractmethod
    def _read(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Fill slots in order, each frame checked by the window."""

    def _forged(self, detail: str) -> Filled:
        """The sidecar refused what came."""
        return Filled(MissReason.CORRUPT, detail)
