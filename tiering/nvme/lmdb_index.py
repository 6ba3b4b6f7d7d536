"""The index of durable frames in an LMDB file.

LMDB maps its file into this process and believes what it finds there: a file that is too short ends the process with
SIGBUS, a wrong page number reads wild memory. So before it is mapped an existing file is either byte for byte what its
last owner closed (`is_as_closed`), or walked by a process that may die of it (`probe`). What fails is not mended:
`IndexDoubtful` says so, the caller discards the file and builds a new one from the slabs' headers.

It must never vouch for a value: a flipped bit inside one passes every check here, and the caller's MAC finds it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb
import xxhash

import tiering
from tiering.errors import IndexDoubtful, TierError, TierFull, TierUnavailable
from tiering.failpoint import Reach, go_on
from tiering.files import Unfit, open_regular, sync_directory
from tiering.nvme.frame_index import Change

FIRST_MAP_BYTES = 64 << 20
LARGEST_MAP_BYTES = 64 << 30
"""A map is doubled when it is full, up to here."""

LARGEST_KEY_BYTES, LARGEST_VALUE_BYTES = 511, 4080
"""LMDB's own limit, and what fits one page of its own: a value of several pages that later shrinks keeps them all, and
LMDB's verifier takes that for damage."""

PROBE_SECONDS = 10
PROBE_BYTES_PER_SECOND = 32 << 20
"""A probe's limit is `PROBE_SECONDS` and a second more for each of these bytes: several times what it needs."""

DATA_FILE, LOCK_FILE, DIGEST_FILE = "data.mdb", "lock.mdb", "data.digest"

_META = struct.Struct("=44x H 46x H 50x Q")
"""Of a meta page of LMDB 0.9: flags of the tree of free pages, flags of the tree of pairs, transaction."""
_INTEGER_KEYS = 0x08

_PROBE_SOUND, _PROBE_DAMAGED = 0, 3
# Isolated from the environment and the current folder; the folders of this package and of LMDB's come as arguments.
_PROBE_PROGRAM = "import sys; sys.path += sys.argv[2:]; from tiering.nvme.lmdb_index import probe; probe(sys.argv[1])"

_OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LITTLE_SPACE_BYTES = 1 << 20
# The machine or its setup is at fault, not the file: discarding it would not help.
_NOT_THE_FILE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EBUSY}
)


def open_index(directory: Path, map_bytes: int, *, clean: bool, reach: Reach = go_on) -> LmdbIndex:
    """The index in `directory`, a new one (and the directory, mode 0700) if there is none.

    `clean` is whether the last owner closed it: then it must be what was closed, or it is doubtful. If that is not
    known, or it was not closed, the whole file is walked by another process first. The caller
    holds an exclusive lock on the directory: a file must not be opened twice in one process, nor be changed while it
    is probed. A file that an operator removed looks like an index that never was.

    `map_bytes` is how large the file may become before the map is moved to a larger one. Raises `IndexDoubtful`
    (discard, open again, rebuild; the message names the check) and `TierUnavailable` (no permission, no space).
    """
    with _opening(directory):
        is_new_directory = _make_directory(directory)
        path = directory / DATA_FILE
        size_bytes = _size_of(path)
        if size_bytes is not None and not (clean and is_as_closed(path)):
            _probe_in_a_process(directory, size_bytes)
        path.with_name(DIGEST_FILE).unlink(missing_ok=True)  # since the file is about to change
        reach("digest forgotten")
        environment = _environment(directory, map_bytes)
        if size_bytes is None:
            reach("index made")
            sync_directory(directory)
            if is_new_directory:
                sync_directory(directory.parent)
    return LmdbIndex(directory, environment, reach)


def open_to_read(directory: Path) -> LmdbIndex | None:
    """The index as it stands, None if there is none; nothing is written, not even LMDB's lock file.

    For an inspection from outside: another process always walks the file first. The caller holds a lock on the
    directory that keeps its owner out. Raises as `open_index`; `apply` is refused.
    """
    with _opening(directory):
        size_bytes = _size_of(directory / DATA_FILE)
        if size_bytes is None:
            return None
        _probe_in_a_process(directory, size_bytes)
        environment = lmdb.open(
            os.fsencode(directory), readonly=True, create=False, lock=False, readahead=False, max_dbs=0
        )
    return LmdbIndex(directory, environment)


def discard(directory: Path, reach: Reach = go_on) -> None:
    """Remove LMDB's two files and the digest, durably, and nothing else. Fine if there are none.

    Raises `TierUnavailable`.
    """
    try:
        for name in (DATA_FILE, LOCK_FILE, DIGEST_FILE):
            (directory / name).unlink(missing_ok=True)
            reach("index half removed")
        if directory.is_dir():
            sync_directory(directory)
    except OSError as error:
        raise TierUnavailable(f"cannot remove the index in {directory}: {error.strerror}") from error


class LmdbMaker:
    """Opens the index of a directory: `tiering.nvme.frame_index.IndexMaker`."""

    def __init__(self, directory: Path, reach: Reach = go_on) -> None:
        self._directory = directory
        self._reach = reach

    def open(self, *, clean: bool) -> LmdbIndex:
        return open_index(self._directory, FIRST_MAP_BYTES, clean=clean, reach=self._reach)

    def discard(self) -> None:
        discard(self._directory, self._reach)


class LmdbIndex:
    """A `FrameIndex` in one LMDB file; `open_index` makes it. Unusable in a forked child.

    Any call may raise `IndexDoubtful`, after which only `close` makes sense, or `TierUnavailable`.
    """

    def __init__(self, directory: Path, environment: lmdb.Environment, reach: Reach = go_on) -> None:
        self.directory = directory
        self._reach = reach
        self._environment: lmdb.Environment | None = environment

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        assert all(0 < len(key) <= LARGEST_KEY_BYTES for key in keys), "a key has 1 to 511 bytes"
        environment = self._open_environment()
        with _typed_errors(self.directory, "read"), environment.begin() as transaction:
            get = transaction.get
            return [get(key) for key in keys]

    def apply(self, changes: Sequence[Change]) -> None:
        """As in the contract. `TierFull` if the map cannot grow any more; whatever is raised, nothing was applied."""
        for key, value in changes:
            assert 0 < len(key) <= LARGEST_KEY_BYTES, "a key has 1 to 511 bytes"
            assert value is None or len(value) <= LARGEST_VALUE_BYTES, "a value has at most 4080 bytes"
        environment = self._open_environment()
        if not changes:
            return
        # Each round doubles the map and the last one raises.
        while True:
            try:
                with environment.begin(write=True) as transaction:
                    put, delete = transaction.put, transaction.delete
                    for key, value in changes:
                        if value is None:
                            delete(key)
                        else:
                            put(key, value)
                self._reach("index committed")
                return
            except lmdb.MapFullError:
                environment = self._grow(environment)
            except lmdb.Error as error:
                raise _typed(error, self.directory, "write") from error

    def iterate(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        environment = self._open_environment()
        with _typed_errors(self.directory, "read"), environment.begin() as transaction:
            cursor = transaction.cursor()
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return
            for key, value in cursor.iternext():
                if not key.startswith(prefix):
                    return
                yield key, value

    def sync(self) -> None:
        with _typed_errors(self.directory, "sync"):
            self._open_environment().sync(True)

    def close(self) -> None:
        """Close the file, without a `sync`. Safe to call twice."""
        if self._environment is not None:
            environment, self._environment = self._environment, None
            try:
                is_writer, transaction = not environment.flags()["readonly"], environment.info()["last_txnid"]
                environment.close()
                if is_writer:
                    self._reach("index file closed")
                    _note(self.directory / DATA_FILE, transaction, self._reach)
            except (OSError, lmdb.Error):
                environment.close()  # the next start has the file walked instead

    def _open_environment(self) -> lmdb.Environment:
        if self._environment is None:
            raise TierUnavailable("the index is closed")
        return self._environment

    def _grow(self, environment: lmdb.Environment) -> lmdb.Environment:
        map_bytes = environment.info()["map_size"]
        if map_bytes >= LARGEST_MAP_BYTES:
            full = TierFull(f"the index cannot grow beyond {map_bytes >> 20} MiB")
            full.errno = errno.EFBIG
            raise full
        # The file is opened anew because a map that cannot be moved in place would leave an environment without one.
        with _typed_errors(self.directory, "grow"):
            environment.close()
            self._environment = None
            self._environment = _environment(self.directory, min(2 * map_bytes, LARGEST_MAP_BYTES))
        return self._environment


# --- opening ---------------------------------------------------------------------------------------------------------


def _environment(directory: Path, map_bytes: int) -> lmdb.Environment:
    page_bytes = resource.getpagesize()
    return lmdb.open(
        os.fsencode(directory),  # py-lmdb takes text for UTF-8, which a path need not be
        map_size=-(-map_bytes // page_bytes) * page_bytes,
        subdir=True,
        create=True,
        mode=0o600,
        max_dbs=0,
        # A commit writes its pages, waits for the disk, and then writes the meta page without waiting. A crash finds
        # this meta page or the one before it, whose pages nothing has overwritten yet: the last batch is there or it
        # is not, never in part. The contract's `sync` makes the last meta page durable.
        sync=True,
        metasync=False,
        # Pages that wait for commit stay out of the map: it is read-only, and no stray write of this process gets in.
        writemap=False,
        readahead=False,
    )


def _size_of(path: Path) -> int | None:
    """Of the file, which is not mapped; None if there is none. Raises `IndexDoubtful`, and `OSError` if it cannot be
    read."""
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except Unfit:
        raise IndexDoubtful("it is not a regular file") from None
    with os.fdopen(descriptor) as file:
        return os.fstat(file.fileno()).st_size


# --- the digest ------------------------------------------------------------------------------------------------------
#
# LMDB checks nothing of what it reads: a flipped bit in a closed file can end the process that maps it, or hide pairs
# from it. So the digest of the whole file stands beside it from an orderly end to the next start, which reads the file
# once more before it maps it: at the speed of the disk, where a walk through it takes a process of its own.
#
#     magic 8 | transaction 8 | xxh3_128 of the file 16 | xxh3_128 of the former 16
#
# It is not synced: a torn note counts for nothing. It is no secret and proves nothing against a writer of the
# directory; the records' MACs do that.

_NOTE = struct.Struct("<8sQ16s")
_NOTE_MAGIC = b"KVINDEX\x00"


def _note(data: Path, transaction: int, reach: Reach) -> None:
    """Record a file that was just closed. Raises `OSError`."""
    used = _NOTE.pack(_NOTE_MAGIC, transaction, _digest_of(data))
    path = data.with_name(DIGEST_FILE)
    path.touch(mode=0o600)
    reach("digest file made")
    path.write_bytes(used + xxhash.xxh3_128_digest(used))


def is_as_closed(data: Path) -> bool:
    """Whether the file is what its note says; False without a note. Raises `OSError`, and `IndexDoubtful` if it is
    not."""
    try:
        descriptor = open_regular(data.with_name(DIGEST_FILE), os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, Unfit):
        return False
    with os.fdopen(descriptor, "rb") as file:
        raw = file.read(_NOTE.size + 17)
    used = raw[: _NOTE.size]
    if len(raw) != _NOTE.size + 16 or xxhash.xxh3_128_digest(used) != raw[_NOTE.size :]:
        return False
    magic, _, digest = _NOTE.unpack(used)
    if magic != _NOTE_MAGIC:
        return False
    if digest != _digest_of(data):
        raise IndexDoubtful("it is not what was closed")
    return True


def _digest_of(data: Path) -> bytes:
    with os.fdopen(os.open(data, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()


# --- the probe -------------------------------------------------------------------------------------------------------


def _probe_in_a_process(directory: Path, size_bytes: int) -> None:
    if not sys.executable:
        raise IndexDoubtful("there is no interpreter to probe it with")
    limit_seconds = PROBE_SECONDS + size_bytes / PROBE_BYTES_PER_SECOND
    packages = (tiering, lmdb, xxhash)
    folders = [os.fspath(Path(str(one.__file__)).absolute().parent.parent) for one in packages]
    command = [sys.executable, "-I", "-c", _PROBE_PROGRAM, os.fspath(directory), *folders]
    null = subprocess.DEVNULL
    try:
        status = subprocess.run(command, stdin=null, stdout=null, stderr=null, timeout=limit_seconds).returncode
    except OSError as error:
        raise IndexDoubtful(f"the probe cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise IndexDoubtful(f"the probe took longer than {limit_seconds:.0f} s") from None
    if status < 0:
        raise IndexDoubtful(f"the probe was ended by signal {-status}")
    if status == _PROBE_DAMAGED:
        raise IndexDoubtful("the probe found its structure damaged")
    if status != _PROBE_SOUND:
        raise IndexDoubtful(f"the probe failed with status {status}")


def probe(directory: str) -> None:
    """Walk everything that a later read or write of the index may touch, and exit: 0 is sound. It may well crash.

    LMDB's own verifier reads the file without mapping it: both trees, every page, and that no page is both in use and
    free, which a reader would never see and a writer would build on. Then the engine itself reads every pair.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A py-lmdb without its verifier ends the probe here: an index that cannot be checked is doubtful.
    from lmdb.verify import VerifyError, verify

    try:
        if verify(directory):
            sys.exit(_PROBE_DAMAGED)
        with (
            lmdb.open(
                os.fsencode(directory), readonly=True, lock=False, create=False, readahead=False, max_dbs=0
            ) as environment,
            environment.begin() as transaction,
        ):
            count = sum(1 for _ in transaction.cursor().iternext())
            if count != environment.stat()["entries"] or not _are_ours(directory, environment.stat()["psize"]):
                sys.exit(_PROBE_DAMAGED)
    except (VerifyError, lmdb.Error):
        sys.exit(_PROBE_DAMAGED)
    sys.exit(_PROBE_SOUND)


def _are_ours(directory: str, page_bytes: int) -> bool:
    """Whether both meta pages name the kinds of map that we have, and transactions in a row: the verifier accepts other
    kinds, which a write may end the process for, and an older one of the two that a flipped bit has made the newer."""
    with open(os.path.join(directory, DATA_FILE), "rb") as file:
        raw = file.read(2 * page_bytes)
    (free, pairs, even), (*kinds, odd) = _META.unpack_from(raw), _META.unpack_from(raw, page_bytes)
    is_new = even == odd == 0
    return [free, pairs] == kinds == [_INTEGER_KEYS, 0] and (is_new or abs(even - odd) == 1)


# --- the disk --------------------------------------------------------------------------------------------------------


def _make_directory(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise TierUnavailable(f"{directory} is there and no directory, which it has to be; move it away") from None
        return False
    return True


@contextmanager
def _opening(directory: Path) -> Iterator[None]:
    if lmdb.version()[:2] != (0, 9):
        raise TierUnavailable(f"the index is in the format of LMDB 0.9, and this is {lmdb.version()}")
    with _typed_errors(directory, "open"):
        yield


@contextmanager
def _typed_errors(directory: Path, act: str) -> Iterator[None]:
    try:
        yield
    except (OSError, lmdb.Error) as error:
        raise _typed(error, directory, act) from error


def _typed(error: OSError | lmdb.Error, directory: Path, act: str) -> TierError:
    """The caller's error: either the index has to be discarded, or discarding would not help."""
    code = error.errno if isinstance(error, OSError) else error.code
    # LMDB's own codes are negative; 0 is the binding's, which refused the call (a file that is open here already).
    if code in _OUT_OF_SPACE or (code == errno.EIO and _has_little_space(directory)):
        full = TierUnavailable(f"cannot {act} the index in {directory}: no space left for it")
        full.errno = errno.ENOSPC  # whatever LMDB made of it
        return full
    if code in _NOT_THE_FILE or (isinstance(error, OSError) and code != errno.EIO):
        refused = TierUnavailable(f"cannot {act} the index in {directory}: {os.strerror(code or 0)}")
        refused.errno = code
        return refused
    if code == 0 or isinstance(error, lmdb.ReadersFullError):
        return TierUnavailable(f"cannot {act} the index in {directory}: {error}")
    return IndexDoubtful(f"cannot {act} it: {error}")


def _has_little_space(directory: Path) -> bool:
    """LMDB reports a write that stopped half way, which is how a disk gets full, as an input/output error."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize < _LITTLE_SPACE_BYTES
