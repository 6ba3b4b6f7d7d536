"""A worker for the chaos device: jobs run when a test says so, in one thread, under a name of their own.

Who waits for a worker comes after all that it did until then, as with a lock; nothing else of the two is ordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from chaos import ChaosDevice
from happens_before import Clock, merge
from kv_kernels.worker import Worker


class ChaosWorker(Worker):
    """A worker whose jobs run when somebody waits for them, or at `pump`: a thread that is late, or not."""

    def __init__(self, device: ChaosDevice, name: str) -> None:
        self._device = device
        self._name = name
        self._late: deque[tuple[Clock, Callable[[], object]]] = deque()
        self._done: Clock = {}
        self._is_closed = False

    def submit(self, job: Callable[[], object], *, wakes: bool = True) -> bool:
        if self._is_closed:
            return False
        self._late.append((self._device.tick(), job))
        return True

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        while not is_ready() and timeout_s != 0.0 and self.pump():
            pass
        if is_ready():
            self._device.join(self._done)
            return True
        return False

    def notify(self) -> None:
        merge(self._done, self._device.tick())

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        while self.pump():
            pass
        return True

    def pump(self) -> bool:
        """Run the next job; False where there is none."""
        if not self._late:
            return False
        issued, job = self._late.popleft()
        with self._device.acting(self._name):
            self._device.join(issued)
            job()
            del job  # what it holds goes on this thread, and now
            merge(self._done, self._device.tick())
        return True
