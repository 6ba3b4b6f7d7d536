"""Transfers under way: what the engine sees of a load or a save, and how each ends.

`transfer` makes them, puts their work into the streams and records the events; the worker settles them. Must never call
them done while any of their work may still touch pages, slots or tables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from kv_kernels.device import Event, Stream
from kv_kernels.pinned import Hold
from kv_kernels.worker import Worker, survived

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
    REJECTED = "rejected"  # a load whose verdict, or a save whose publication, said no
    CANCELLED = "cancelled"
    FAILED = "failed"  # `error` says why


class Transfer:
    """One load or save. When `is_done`, none of its work touches pages, slots or tables any more.

    The exception is a FAILED one that `is_stranded`: the device may still be running it.
    """

    def __init__(self, worker: Worker, kernel: object, hold: Hold, is_direct: bool) -> None:
        self.is_direct = is_direct
        self.is_stranded = False
        self.error: BaseException | None = None
        self._worker = worker
        self._kernel: object | None = kernel
        self._hold = hold
        self._outcome = TransferOutcome.PENDING
        self.is_cancelled = False
        self.is_put_in = False
        self._copied: Event | None = None
        self._launched: Event | None = None

    @property
    def outcome(self) -> TransferOutcome:
        return self._outcome

    def is_done(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the outcome is known; False if that takes longer."""
        return self._worker.wait(lambda: self._outcome is not TransferOutcome.PENDING, timeout_s)

    def cancel(self) -> None:
        """Put in no more of it, and neither publish it nor call it loaded. Work in the streams is still done."""
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

    def _ended(self, outcome: TransferOutcome) -> None:
        if self.error is not None:
            outcome = TransferOutcome.FAILED
            _log.warning("a transfer failed: %s: %s", type(self.error).__name__, self.error)
        if not self.is_stranded:
            self._kernel = None
        self._outcome = outcome
        self._worker.notify()

    def settle(self) -> None:
        """On the worker, once all of it is in the streams: wait for the ends, make the calls."""
        raise NotImplementedError

    def _call(self, handed_in: Callable[[], object]) -> bool:
        answers: list[bool] = []
        return survived(lambda: answers.append(bool(handed_in())), self.failed) and answers[0]

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


class Loading(Transfer):
    """A load under way; its layers can be waited for one by one."""

    def __init__(
        self,
        worker: Worker,
        kernel: object,
        hold: Hold,
        is_direct: bool,
        slices: Sequence[LayerSlice],
        release: Callable[[], object],
        verdict: Callable[[], bool] | None,
    ) -> None:
        super().__init__(worker, kernel, hold, is_direct)
        self._slices = slices
        self._layers: list[Event | None] = [None] * len(slices)
        self._release = release
        self._verdict = verdict

    def wait_layer(self, layer: int, stream: Stream, timeout_s: float) -> bool:
        """Let `stream` wait for a layer, before it reads the layer's pages.

        The host waits only where the load is not direct. False where the layer does not come, or took longer: its pages
        hold garbage, and are free to be overwritten when the load is done. Raises ValueError for a layer that is not
        in the load.
        """
        index = next((at for at, part in enumerate(self._slices) if part.first <= layer < part.stop), None)
        if index is None:
            raise ValueError(f"layer {layer} is in none of this load's slices: {[part[:2] for part in self._slices]}")
        self._worker.wait(lambda: self._layers[index] is not None or self.is_put_in, timeout_s)
        event = self._layers[index]
        if event is None:
            return False
        stream.wait(event)
        return True

    def layers_launched(self, index: int, event: Event) -> None:
        """The slice of this number is in its pages after the event."""
        self._layers[index] = event
        self._worker.notify()

    def settle(self) -> None:
        outcome = TransferOutcome.CANCELLED
        if self._landed(self._copied):
            self._hold.release()
            self._call(self._release)
        if self._landed(self._launched) and not self.is_cancelled and self.error is None:
            is_good = self._verdict is None or self._call(self._verdict)
            outcome = TransferOutcome.DONE if is_good else TransferOutcome.REJECTED
        self._ended(outcome)


class Saving(Transfer):
    """A save under way; its pages can be waited for before it is done."""

    def __init__(
        self,
        worker: Worker,
        kernel: object,
        hold: Hold,
        is_direct: bool,
        publish: Callable[[], bool],
        abort: Callable[[], object],
    ) -> None:
        super().__init__(worker, kernel, hold, is_direct)
        self._publish = publish
        self._abort = abort
        self._pages_read: Event | None = None

    def wait_pages(self, stream: Stream, timeout_s: float) -> bool:
        """Let `stream` wait until the pages have been read, before it overwrites them.

        The host waits only where the save is not direct. False where that took longer, or cannot be learnt: the pages
        must not be reused before the save is done.
        """
        self._worker.wait(lambda: self._pages_read is not None or self.is_put_in, timeout_s)
        event = self._pages_read
        if event is None:
            return False
        stream.wait(event)
        return True

    def pages_launched(self, event: Event) -> None:
        """All pages have been read after the event."""
        self._pages_read = event
        self._worker.notify()

    def are_pages_read(self) -> bool:
        """Whether the pages may be reused, as the host sees it. Never blocks."""
        return self._pages_read is not None and self._pages_read.is_done()

    def settle(self) -> None:
        outcome = TransferOutcome.CANCELLED
        if self._landed(self._launched) and self._landed(self._copied):
            self._hold.release()
            if self.is_cancelled or self.error is not None:
                self._call(self._abort)
            else:
                outcome = TransferOutcome.DONE if self._call(self._publish) else TransferOutcome.REJECTED
        self._ended(outcome)
