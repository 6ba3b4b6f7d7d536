"""Asks the kernel who has shared memory open or mapped, and frees its pages.

A holder is known by a lock on the byte that stands for it (`locks_between`). Such a lock belongs to the open file that
the holder was given, so the holder can drop it and keep the mapping. What no holder can hide is the open file itself,
which a mapping keeps alive: the kernel grants a write lease on a file only if no other open file of it exists
(fcntl(2), F_SETLEASE; Linux 5.3). `is_open_elsewhere` asks for one and gives it up again. Neither query sees a
descriptor opened with O_PATH, which maps nothing; once `free_pages` ran, opening it again finds it empty.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import weakref

_LOCK = struct.Struct("@hhqqi4x")  # struct flock of the 64-bit kernels: type, whence, start, length, pid
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_NO_LEASES = (errno.EINVAL, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class OpenFile:
    """A descriptor that is closed with the last reference to this object: a thread that asks the kernel about it
    without a lock never asks about another file that got the same number meanwhile."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False


def lock_byte(descriptor: int, holder: int) -> None:
    """Lock a holder's byte for reading. Raises `OSError`."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_RDLCK, holder, holder))


def locks_between(file: OpenFile, first: int, last: int) -> bool:
    """Whether another open file has a lock on one of these bytes. The kernel walks all locks on the file."""
    answer = fcntl.fcntl(file.number, fcntl.F_OFD_GETLK, _lock_of(fcntl.F_WRLCK, first, last))
    kind: int = _LOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def is_open_elsewhere(witness: OpenFile) -> bool | None:
    """Whether memory is open or mapped by another open file than `witness`, which was opened again read-only; None if
    this kernel grants no leases."""
    try:
        # If a client opens it in between, the kernel signals this process: use a signal that is ignored by default,
        # since the usual one would end the process.
        fcntl.fcntl(witness.number, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(witness.number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return None if error.errno in _NO_LEASES else True
    fcntl.fcntl(witness.number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def free_pages(descriptor: int, size_bytes: int) -> None:
    """Free all pages, also those that others map: they find zeros, in new pages charged to them. Raises `OSError`."""
    if _libc.fallocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, 0, size_bytes):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _lock_of(kind: int, first: int, last: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, first, last - first + 1, 0)
