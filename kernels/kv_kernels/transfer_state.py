"""Transfers under way: how a load or a save ends.

`transfer` makes them, puts their work into the streams and records the events; the worker settles them. Must never call
them done while any of their work may still touch pages, slots or tables.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import NamedTuple

from kv_kernels.device import Event
from kv_kernels.pinned import Hold
from kv_kernels.worker import Worker

_log = logging.getLogger(__name__)


class LayerSlice(NamedTuple):
    """Layers first .. stop - 1, and where they lie in every frame: bytes from the address that the slot is told by."""

    first: int
    stop: int
    offset_bytes: int
    size_bytes: int


def layer_slices(layers: int, layer_bytes: int, layers_at_once: int, offset_bytes: int = 0) -> list[LayerSlice]:
    """Slices of a payload of equal layers, which begins `offset_bytes` into the slot.

    layers_at_once: few let the engine begin early, and make small copies (below about 1 MiB a copy engine idles); all
    make one slice, and neighbouring slots one copy, where a slot is told with its header.
    """
    return [
        LayerSlice(first, stop, offset_bytes + first * layer_bytes, (stop - first) * layer_bytes)
        for first in range(0, layers, layers_at_once)
        for stop in [min(first + layers_at_once, layers)]
    ]


class TransferOutcome(Enum):
    PENDING = "pending"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"  # `error` says why


class Transfer:
    """One load or save. With any outcome but PENDING, none of its work touches pages, slots or tables any more.

    The exception is a FAILED one that `is_stranded`: the device may still be running it.
    """

    def __init__(self, worker: Worker, kernel: object, hold: Hold, is_direct: bool) -> None:
        self.is_direct = is_direct
        self.is_stranded = False
        self.error: BaseException | None = None
        self.outcome = TransferOutcome.PENDING
        self._worker = worker
        self._kernel: object | None = kernel
        self._hold = hold
        self.is_cancelled = False
        self.is_put_in = False
        self._copied: Event | None = None
        self._launched: Event | None = None

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the outcome is known; False if that takes longer."""
        return self._worker.wait(lambda: self.outcome is not TransferOutcome.PENDING, timeout_s)

    def cancel(self) -> None:
        """Put in no more of it, and do not call it done. Work in the streams is still done."""
        self.is_cancelled = True

    def put_in(self, copied: Event | None, launched: Event | None) -> None:
        """All of it is in the streams, or no more will be; it is done with these events. None: the device failed."""
        self._copied, self._launched = copied, launched
        self.is_put_in = True
        self._worker.notify()

    def failed(self, error: BaseException) -> None:
        """The first one is kept, without its traceback: the frames in it would keep tables and tensors alive."""
        _log.debug("in a transfer", exc_info=error)
        self.error = self.error or error.with_traceback(None)

    def settle(self) -> None:
        """On the worker, once all of it is in the streams: wait for the ends."""
        if self._landed(self._copied):
            self._hold.release()
        if self._landed(self._launched):
            self._kernel = None
        outcome = TransferOutcome.CANCELLED if self.is_cancelled else TransferOutcome.DONE
        if self.error is not None:
            outcome = TransferOutcome.FAILED
            _log.warning("a transfer failed: %s: %s", type(self.error).__name__, self.error)
        self.outcome = outcome
        self._worker.notify()

    def _landed(self, event: Event | None) -> bool:
        """Wait for the end of a stream's part; False if it cannot be learnt."""
        try:
            if event is None:
                raise RuntimeError("the device took no event")
            event.wait()
        except RuntimeError as error:
            self.failed(error)
            self.is_stranded = True
        return not self.is_stranded
