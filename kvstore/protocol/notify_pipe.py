"""A pipe by which the sidecar notifies a client: readable while there is something to ask for.

A pipe and not a socket, so that a client can send nothing back, descriptors of memory least of all. Its ends are two
open files, so that a client cannot change the end that the sidecar writes to. When the pipe is full the sidecar drops
the byte: those before it say the same.
"""

from __future__ import annotations

import os

_READ_BYTES = 64


class NotifyPipe:
    """The sidecar's end."""

    def __init__(self, descriptor: int) -> None:
        """Takes over a non-blocking pipe's descriptor."""
        self._descriptor = descriptor

    def notify(self) -> bool:
        """Does not block; returns whether the client may still be listening."""
        try:
            os.write(self._descriptor, b"!")
        except BlockingIOError:  # full
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


class NotifyPipeEnd:
    """A client's end."""

    def __init__(self, descriptor: int) -> None:
        """Takes it over."""
        os.set_blocking(descriptor, True)
        self._descriptor = descriptor

    def wait(self) -> bool:
        """Wait for a notification; False once the sidecar has closed the pipe, or this end was closed."""
        try:
            return bool(os.read(self._descriptor, _READ_BYTES))
        except OSError:
            return False

    def close(self) -> None:
        """Close this end, once; not while a thread waits."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def new_notify_pipe() -> tuple[NotifyPipe, int]:
    """The sidecar's end, and the descriptor to send to the client. Raises `OSError`."""
    theirs, ours = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return NotifyPipe(ours), theirs
