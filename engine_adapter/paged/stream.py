"""Orders the work that a worker's own threads do on a device behind what its engine has put into its stream.

    engine's thread   mark()                   where its stream is: behind the step that has just been put in
    another thread    with behind(mark): ...   this thread's work comes after it, on a stream of its own

An engine puts its steps into a stream that is current in its own thread only. Another thread that reads its pages
without a mark reads them before they are written. On a CPU a step is done when the next line runs, and nothing here
does anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class EngineStream:
    """Of one device. Any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._own = threading.local()

    def mark(self) -> Any:
        """A point in the calling thread's stream; not while it captures a graph."""
        return self._module.current_stream(self._device).record_event() if self._module is not None else None

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Work put in within this context comes after the mark; it does not wait for it on the host."""
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
        """Wait until everything that this thread has put in is done."""
        if self._module is not None:
            self._module.current_stream(self._device).synchronize()
