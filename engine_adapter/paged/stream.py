"""Orders a worker's own threads behind its engine on a device's streams.

    engine's thread   mark()                   its position in the stream: behind the step just enqueued
    another thread    with behind(mark): ...   this thread's work comes after it, on a stream of its own

An engine enqueues its steps in a stream that is current in its own thread only. Another thread that reads its pages
without a mark reads them before they are written. On a CPU steps run synchronously, and all of this does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class EngineStream:
    """The streams of one device. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._own = threading.local()

    def mark(self) -> Any:
        """A point in the calling thread's stream; not while it captures a graph."""
        return self._module.current_stream(self._device).record_event() if self._module is not None else None

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Work enqueued within this context comes after the mark; the host does not wait."""
        if self._module is None:
            yield
            return
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = self._module.Stream(self._device)
        stream.wait_event(mark)
        with self._module.stream(stream):
            yield

    def wait(self) -> None:
        """Wait until everything that this thread has enqueued is done."""
        if self._module is not None:
            self._module.current_stream(self._device).synchronize()
