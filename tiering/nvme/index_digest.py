"""A digest of the index file from its orderly end, so that a file that rotted since is not mapped.

LMDB checks nothing of what it reads: a flipped bit in a closed file can end the process that maps it, or hide pairs
from it. So the digest of the whole file stands beside it from an orderly end to the next start, which reads the file
once more before it maps it: at the speed of the disk, where a walk through it takes a process of its own.

    magic 8 | transaction 8 | xxh3_128 of the file 16 | xxh3_128 of the former 16

It is not synced: a note of another transaction, or a torn one, counts for nothing. It is no secret and proves nothing
against a writer of the directory; the records' MACs do that.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from enum import Enum
from pathlib import Path

import xxhash

from tiering.failpoint import Reach, go_on

DIGEST_FILE = "data.digest"
_NOTE = struct.Struct("<8sQ16s")
_MAGIC = b"KVINDEX\x00"
_READ_BYTES = 1 << 20


class Comparison(Enum):
    """The file is as it was closed, it is not, or there is no note for it."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


def note(data: Path, transaction: int, reach: Reach = go_on) -> None:
    """Record a file that was just closed. Raises `OSError`."""
    used = _NOTE.pack(_MAGIC, transaction, _digest_of(data))
    path = data.with_name(DIGEST_FILE)
    path.touch(mode=0o600)
    reach("digest file made")
    path.write_bytes(used + xxhash.xxh3_128_digest(used))


def compare(data: Path, transaction: int) -> Comparison:
    """Compare the file now with its note. transaction: the last one that the file says it holds. Raises `OSError`."""
    try:
        # If something else stands there, a pipe must not make this wait, nor a link lead elsewhere.
        descriptor = os.open(data.with_name(DIGEST_FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return Comparison.UNKNOWN
        raise
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        raw = os.read(descriptor, _NOTE.size + 17) if is_file else b""
    finally:
        os.close(descriptor)
    used = raw[: _NOTE.size]
    if len(raw) != _NOTE.size + 16 or xxhash.xxh3_128_digest(used) != raw[_NOTE.size :]:
        return Comparison.UNKNOWN
    magic, noted_transaction, digest = _NOTE.unpack(used)
    if magic != _MAGIC or noted_transaction != transaction:
        return Comparison.UNKNOWN
    return Comparison.SAME if digest == _digest_of(data) else Comparison.DIFFERENT


def forget(data: Path) -> None:
    """Remove the note, since the file is about to change. Raises `OSError`."""
    data.with_name(DIGEST_FILE).unlink(missing_ok=True)


def _digest_of(data: Path) -> bytes:
    hasher = xxhash.xxh3_128()
    descriptor = os.open(data, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while piece := os.read(descriptor, _READ_BYTES):
            hasher.update(piece)
    finally:
        os.close(descriptor)
    return hasher.digest()
