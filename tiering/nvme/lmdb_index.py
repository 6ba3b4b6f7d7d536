"""The index of durable frames in an LMDB file.

LMDB maps its file into this process and believes what it finds there: a file that is too short ends the process with
SIGBUS, a wrong page number reads wild memory. So an existing file is looked at before it is mapped (`_check_file`,
always), and then it is either byte for byte what its last owner closed (`compare`), or walked by a process that may die
of it (`probe`). What fails is not mended: `IndexDoubtful` says so, the caller discards the file and builds a
new one from the slabs' headers.

It must never vouch for a value: a flipped bit inside one passes every check here, and the caller's MAC finds it. It
must never let a read transaction outlive the map it reads from.
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
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import NamedTuple

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

MOST_OPEN_ITERATIONS = 62
PAIRS_PER_STEP = 1024

PROBE_SECONDS = 10
PROBE_BYTES_PER_SECOND = 32 << 20
"""A probe's limit is `PROBE_SECONDS` and a second more for each of these bytes: several times what it needs."""

DATA_FILE, LOCK_FILE, DIGEST_FILE = "data.mdb", "lock.mdb", "data.digest"

# Meta pages 0 and 1 of LMDB 0.9 (64 bit, the host's byte order); transaction n is committed by writing page n % 2.
#
#   0  page number 8 | pad 2 | flags 2 | lower 2 | upper 2
#  16  magic 4 | version 4 | address 8 | map size 8
#  40  tree of free pages: page size 4 | flags 2 | depth 2 | branch, leaf, overflow pages, entries, root: 8 each
#  88  tree of pairs:      pad 4       | flags 2 | depth 2 | the same
# 136  last page 8 | transaction 8
_META = struct.Struct("=QHHHH IIQQ IHHQQQQQ IHHQQQQQ QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_PAGES = 2
_META_FLAG, _INTEGER_KEYS = 0x08, 0x08
_NO_PAGE = (1 << 64) - 1
_PAGE_SIZES = (4096, 8192, 16384, 32768)
_DEEPEST = 32
_SMALLEST_ENTRY_BYTES = 2 + 8 + 1  # its place in the page's table, its header, one byte of key

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
        there = _check_file(path)
        if there is not None:
            since = compare(path, there.transaction) if clean else Comparison.UNKNOWN
            if since is Comparison.DIFFERENT:
                raise IndexDoubtful("it is not what was closed")
            if since is Comparison.UNKNOWN:
                _probe_in_a_process(directory, there.size_bytes)
        path.with_name(DIGEST_FILE).unlink(missing_ok=True)  # since the file is about to change
        reach("digest forgotten")
        environment = _environment(directory, map_bytes)
        if there is None:
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
        there = _check_file(directory / DATA_FILE)
        if there is None:
            return None
        _probe_in_a_process(directory, there.size_bytes)
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
        self._walks: set[_Walk] = set()

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
                self._cover_last_page(environment)
                return
            except lmdb.MapFullError:
                environment = self._grow(environment)
            except lmdb.Error as error:
                raise _typed(error, self.directory, "write") from error

    def iterate(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """As in the contract. While an iteration lives, pages that its snapshot needs are not reused: finish it soon.

        At most `MOST_OPEN_ITERATIONS` at once.
        """
        environment = self._open_environment()
        with _typed_errors(self.directory, "read"):
            walk = _Walk(environment, prefix)
        self._walks.add(walk)
        try:
            while pairs := self._step(walk):
                yield from pairs
        finally:
            self._walks.discard(walk)
            walk.end()

    def sync(self) -> None:
        with _typed_errors(self.directory, "sync"):
            self._open_environment().sync(True)

    def close(self) -> None:
        """Close the file, without a `sync`. Iterations end with `TierUnavailable`. Safe to call twice."""
        if self._environment is not None:
            for walk in self._walks:
                walk.end()
            self._walks.clear()
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

    def _step(self, walk: _Walk) -> list[tuple[bytes, bytes]]:
        self._open_environment()
        with _typed_errors(self.directory, "read"):
            return walk.take(PAIRS_PER_STEP)

    def _cover_last_page(self, environment: lmdb.Environment) -> None:
        """Make the file as long as its meta page says.

        LMDB does not write a page that one transaction took from the end and gave back, so an intact file may end early
        and would look truncated at the next open.
        """
        path = self.directory / DATA_FILE
        needed_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        with suppress(OSError):  # the batch is applied, and not lost: at worst the next start rebuilds needlessly
            if path.stat().st_size < needed_bytes:
                os.truncate(path, needed_bytes)

    def _grow(self, environment: lmdb.Environment) -> lmdb.Environment:
        map_bytes = environment.info()["map_size"]
        if map_bytes >= LARGEST_MAP_BYTES:
            full = TierFull(f"the index cannot grow beyond {map_bytes >> 20} MiB")
            full.errno = errno.EFBIG
            raise full
        # Moving the map pulls it away under every snapshot: what open iterations have yet to read is read now. The file
        # is opened anew because a map that cannot be moved in place would leave an environment without one.
        with _typed_errors(self.directory, "grow"):
            for walk in self._walks:
                walk.detach()
            environment.close()
            self._environment = None
            self._environment = _environment(self.directory, min(2 * map_bytes, LARGEST_MAP_BYTES))
        return self._environment


class _Walk:
    """A snapshot, read in order and in pieces."""

    def __init__(self, environment: lmdb.Environment, prefix: bytes) -> None:
        self._prefix = prefix
        self._transaction = environment.begin()
        try:
            cursor = self._transaction.cursor()
            found = cursor.set_range(prefix) if prefix else cursor.first()
        except lmdb.Error:
            self._transaction.abort()
            raise
        self._pairs: Iterator[tuple[bytes, bytes]] = cursor.iternext() if found else iter(())

    def take(self, count: int) -> list[tuple[bytes, bytes]]:
        """The next pairs, none at the end."""
        pairs = list(islice(self._pairs, count))
        # Keys come in order, so the last one speaks for those before it.
        if pairs and not pairs[-1][0].startswith(self._prefix):
            self._pairs = iter(())
            pairs = [pair for pair in pairs if pair[0].startswith(self._prefix)]
        return pairs

    def detach(self) -> None:
        """Read the rest into memory and release the snapshot."""
        rest: list[tuple[bytes, bytes]] = []
        while pairs := self.take(PAIRS_PER_STEP):
            rest += pairs
        self._pairs = iter(rest)
        self._transaction.abort()

    def end(self) -> None:
        self._pairs = iter(())
        self._transaction.abort()


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
        # No other process opens the file, but the table of readers is what keeps pages of open iterations from reuse.
        lock=True,
        max_readers=MOST_OPEN_ITERATIONS + 2,
        readahead=False,
    )


class _Tree(NamedTuple):
    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Meta(NamedTuple):
    page_bytes: int
    free: _Tree
    pairs: _Tree
    last_page: int
    transaction: int


class _There(NamedTuple):
    """A file that passed the first look."""

    size_bytes: int
    transaction: int


def _check_file(path: Path) -> _There | None:
    """Without mapping it. Raises `IndexDoubtful` for what LMDB would stumble over, and `OSError` if it cannot be
    read."""
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except Unfit:
        raise IndexDoubtful("it is not a regular file") from None
    try:
        size_bytes = os.fstat(descriptor).st_size
        first = _read_meta(descriptor, 0, 0)
        metas = (first, _read_meta(descriptor, 1, first.page_bytes))
    finally:
        os.close(descriptor)
    _check_metas(metas)
    newest = max(metas, key=lambda meta: meta.transaction)
    if newest.last_page < _META_PAGES - 1 or size_bytes < (newest.last_page + 1) * newest.page_bytes:
        raise IndexDoubtful("it is shorter than its meta page says")
    _check_tree("pairs", newest.pairs, newest, flags=0)
    _check_tree("free pages", newest.free, newest, flags=_INTEGER_KEYS)
    return _There(size_bytes, newest.transaction)


def _read_meta(descriptor: int, number: int, offset: int) -> _Meta:
    raw = os.pread(descriptor, _META.size, offset)
    if len(raw) < _META.size:
        raise IndexDoubtful(f"meta page {number} is cut off")
    page, _, flags, _, _, magic, version, _, _, *rest = _META.unpack(raw)
    free, pairs, (last_page, transaction) = _Tree(*rest[:8]), _Tree(*rest[8:16]), rest[16:]
    if magic != _MAGIC or version != _VERSION:
        raise IndexDoubtful(f"meta page {number} has another magic or version")
    if page != number or flags != _META_FLAG:
        raise IndexDoubtful(f"meta page {number} has the header of another page")
    # The record of the free pages lends its unused first field to the page size of the file.
    if free.pad not in _PAGE_SIZES:
        raise IndexDoubtful(f"meta page {number} has an impossible page size")
    return _Meta(free.pad, free, pairs, last_page, transaction)


def _check_metas(metas: tuple[_Meta, _Meta]) -> None:
    even, odd = metas
    if even.page_bytes != odd.page_bytes:
        raise IndexDoubtful("the meta pages differ in page size")
    # Page 1 is untouched until the first transaction; from then on the two hold the last two.
    is_new = even.transaction == odd.transaction == 0
    if not is_new and (even.transaction % 2 or not odd.transaction % 2 or abs(even.transaction - odd.transaction) != 1):
        raise IndexDoubtful("the meta pages are not of two transactions in a row")


def _check_tree(name: str, tree: _Tree, meta: _Meta, *, flags: int) -> None:
    pages = tree.branch_pages + tree.leaf_pages + tree.overflow_pages
    if tree.root == _NO_PAGE:
        is_plausible = tree.depth == tree.entries == pages == 0
    else:
        is_plausible = (
            _META_PAGES <= tree.root <= meta.last_page
            and 1 <= tree.depth <= _DEEPEST
            and tree.leaf_pages >= 1
            and pages <= meta.last_page + 1 - _META_PAGES
            and 1 <= tree.entries <= tree.leaf_pages * (meta.page_bytes // _SMALLEST_ENTRY_BYTES)
        )
    if not is_plausible or tree.flags != flags:
        raise IndexDoubtful(f"the root of the tree of {name} is impossible")


# --- the digest ------------------------------------------------------------------------------------------------------
#
# LMDB checks nothing of what it reads: a flipped bit in a closed file can end the process that maps it, or hide pairs
# from it. So the digest of the whole file stands beside it from an orderly end to the next start, which reads the file
# once more before it maps it: at the speed of the disk, where a walk through it takes a process of its own.
#
#     magic 8 | transaction 8 | xxh3_128 of the file 16 | xxh3_128 of the former 16
#
# It is not synced: a note of another transaction, or a torn one, counts for nothing. It is no secret and proves nothing
# against a writer of the directory; the records' MACs do that.

_NOTE = struct.Struct("<8sQ16s")
_NOTE_MAGIC = b"KVINDEX\x00"


class Comparison(Enum):
    """The file is as it was closed, it is not, or there is no note for it."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


def _note(data: Path, transaction: int, reach: Reach) -> None:
    """Record a file that was just closed. Raises `OSError`."""
    used = _NOTE.pack(_NOTE_MAGIC, transaction, _digest_of(data))
    path = data.with_name(DIGEST_FILE)
    path.touch(mode=0o600)
    reach("digest file made")
    path.write_bytes(used + xxhash.xxh3_128_digest(used))


def compare(data: Path, transaction: int) -> Comparison:
    """Compare the file now with its note. transaction: the last one that the file says it holds. Raises `OSError`."""
    try:
        descriptor = open_regular(data.with_name(DIGEST_FILE), os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, Unfit):
        return Comparison.UNKNOWN
    with os.fdopen(descriptor, "rb") as file:
        raw = file.read(_NOTE.size + 17)
    used = raw[: _NOTE.size]
    if len(raw) != _NOTE.size + 16 or xxhash.xxh3_128_digest(used) != raw[_NOTE.size :]:
        return Comparison.UNKNOWN
    magic, noted_transaction, digest = _NOTE.unpack(used)
    if magic != _NOTE_MAGIC or noted_transaction != transaction:
        return Comparison.UNKNOWN
    return Comparison.SAME if digest == _digest_of(data) else Comparison.DIFFERENT


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
            if count != environment.stat()["entries"]:
                sys.exit(_PROBE_DAMAGED)
    except (VerifyError, lmdb.Error):
        sys.exit(_PROBE_DAMAGED)
    sys.exit(_PROBE_SOUND)


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
