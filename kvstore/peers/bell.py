"""Wakes a thread that sleeps on descriptors."""

from __future__ import annotations

import os
import threading


class Bell:
    """`descriptor` is readable once `ring` was called. Thread-safe; ringing a closed bell does nothing."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False

    def ring(self) -> None:
        """From any thread."""
        with self._lock:
            if not self._is_closed:  # else the descriptor's number may be another file's
                os.eventfd_write(self.descriptor, 1)

    def hear(self) -> None:
        """Called by the woken thread."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Call once."""
        with self._lock:
            self._is_closed = True
            os.close(self.descriptor)
