"""One thread for work that an engine's thread must not wait for.

Jobs run one after another in order of arrival; nothing is begun after `close`. Jobs that register memory and jobs that
launch kernels must never share a worker: a refusal by CUDA stays behind as the thread's last error.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Set

MAX_JOBS = 4096

_log = logging.getLogger(__name__)


class Worker:
    """A daemon thread. cpus: where it runs, so that memory it touches first is near them; empty: anywhere."""

    def __init__(self, name: str, cpus: Set[int] = frozenset()) -> None:
        self._cpus = cpus
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object], *, wakes: bool = True) -> bool:
        """Run it later, after all earlier ones; False if too many wait, or after `close`. A job never raises.

        wakes: if not, it may begin with the next `notify` only, and the thread does not disturb the caller until then.
        """
        with self._changed:
            if self._is_closed or len(self._jobs) >= MAX_JOBS:
                return False
            self._jobs.append(job)
            if wakes:
                self._changed.notify_all()
        return True

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until that is so; False if time is over first. Checked again after each job and `notify`."""
        with self._changed:
            return self._changed.wait_for(is_ready, timeout_s)

    def notify(self) -> None:
        """A condition that a thread may wait for has changed."""
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, do those that are here, and end; returns whether it ended in time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._cpus:
            try:
                os.sched_setaffinity(0, self._cpus)  # of this thread alone
            except OSError as error:
                _log.warning("the thread %s stays on any CPU: %s", self._thread.name, error.strerror)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # a cancelled task's, too: neither the worker nor who waits for it may end
                _log.error("a job of the thread %s failed", self._thread.name, exc_info=error)
            del job  # so that its objects do not live until the next one comes
            self.notify()
