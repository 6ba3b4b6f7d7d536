"""Extents: shared memory from one pool with one byte budget.

An extent is one memfd, sealed against shrinking and growing, mapped into this process, and every page of it touched
before it is used: a first touch inside a copy runs at a tenth of memcpy's speed. The pages are huge ones where the
kernel has some, which are sooner made, mapped by each client, and filled from a disk. An extent belongs to one slot
class for its whole life. It never changes hands: a client that was given its descriptor keeps a mapping, so memory for
another class is a new memfd. Nothing has a name in a file system, nothing is left behind.

Other processes get their own descriptor (`share`), locked for reading on one byte that stands for its holder. Such a
lock belongs to the open file, and a mapping keeps that open: so the kernel knows whether a holder may still read or
write, however it ended (`is_shared`). A holder can drop its lock and keep its mapping, at its own cost: before a shared
extent counts as free, the kernel has confirmed that no other process has it open, and its pages are freed. What no
holder can hide is the open file itself: the kernel grants a write lease on a file only if no other open file of it
exists (fcntl(2), F_SETLEASE; Linux 5.3). `is_open_elsewhere` asks for one and gives it up again. Neither query sees a
descriptor opened with O_PATH, which maps nothing; once `free_pages` ran, opening it again finds it empty.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Protocol

from tiering.errors import TierFull, TierUnavailable
from tiering.faults import EXTENT_THREADS, EXTENTS, FaultKind, FaultReports, Unheard, kind_of
from tiering.files import open_again
from tiering.tier import FrameSpan, MappedMemory

PREFAULT_STEP_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20
"""Of x86-64, and of arm64 with small pages of 4 KiB. Where they have another size the kernel makes none."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1; needs no privilege, and no setting but that shared huge pages are not denied
_PAGE_BYTES = 4096
MAX_HOLDER = 1 << 62
SLOW_QUESTION_SECONDS, RARELY = 0.001, 100
"""A slower kernel query is repeated so rarely that it takes a hundredth of the time."""
LOOK_SECONDS = 0.002
"""One look asks no further query after this."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LOCK = struct.Struct("@hhqqi4x")  # struct flock of the 64-bit kernels: type, whence, start, length, pid
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_NO_LEASES = (errno.EINVAL, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)

# Called through a plain library handle: that releases the interpreter lock, which mmap's own madvise does not, and it
# costs one descriptor per extent, where Python's mmap keeps a second one for as long as any view exists.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _PROT_NONE = 0x10, 0


class OpenFile:
    """A descriptor that is closed with the last reference to this object: a thread that asks the kernel about it
    without a lock never asks about another file that got the same number meanwhile."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False


class Extent:
    """`size_bytes` of shared memory, zeroed if new. `view` is all of it; `address` is where it starts in this process.

    name: under which a supervisor holds it for the next process (`tiering.dram.keeping`), or nothing.
    """

    def __init__(self, size_bytes: int, descriptor: int | None = None) -> None:
        """descriptor: of memory that an earlier process made and clients may still map; this takes it over."""
        self.size_bytes = size_bytes
        self.name = b""
        self.is_huge = False
        """Whether it was made here, in huge pages but for a rest smaller than one."""
        self._was_shared = descriptor is not None
        number = (
            os.memfd_create("kv-extent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if descriptor is None else descriptor
        )
        self._file: OpenFile | None = OpenFile(number)
        self._witness: OpenFile | None = None
        try:
            if descriptor is None:
                os.fchmod(number, 0o600)  # else any client, running as any user, could reopen it for writing
                os.ftruncate(number, size_bytes)
                fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
            self.memory, self.view = _mapped(number, size_bytes)
            _advise(self.address, size_bytes, mmap.MADV_DONTDUMP)  # prompt text can be recovered from KV
            if descriptor is None:
                self._prefault()
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """Of the shared memory; -1 once closed."""
        return self._file.number if self._file is not None else -1

    @property
    def address(self) -> int:
        """Where it starts in this process."""
        return self.memory.address

    def frame(self, slot: int, frame_bytes: int) -> FrameSpan:
        """The bytes of a slot."""
        start = slot * frame_bytes
        return FrameSpan(self.memory.address + start, self.view[start : start + frame_bytes], self.memory)

    def share(self, holder: int, *, writable: bool) -> int:
        """A new descriptor for another process; the caller closes it once it is sent. holder: from 0 to 2**62.

        Raises `TierUnavailable`. Needs no lock: the extent may be closed meanwhile.
        """
        file = self._file
        if file is None:
            raise TierUnavailable("shared memory was given back")
        self._was_shared = True
        try:
            descriptor = open_again(file.number, writable=writable)
        except OSError as error:
            raise TierUnavailable(f"shared memory cannot be opened again: {error.strerror}") from error
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_RDLCK, holder, holder))
        except OSError as error:
            os.close(descriptor)
            raise TierUnavailable(f"shared memory cannot be locked: {error.strerror}") from error
        return descriptor

    def is_shared(self, first: int = 0, last: int = MAX_HOLDER) -> bool:
        """Whether a descriptor made for one of these holders, or a mapping of it, is alive anywhere, unless that holder
        has dropped its lock. Needs no lock; slow if a client has placed many locks, all of which the kernel walks."""
        file = self._file
        if not self._was_shared or file is None:
            return False
        answer = fcntl.fcntl(file.number, fcntl.F_OFD_GETLK, _lock_of(fcntl.F_WRLCK, first, last))
        kind: int = _LOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def is_open_elsewhere(self) -> bool:
        """Whether another process has it open or mapped, whatever locks say; asked once no client is given it any more.
        Also True if the kernel cannot tell now."""
        if not self._was_shared or self._file is None:
            return False
        try:
            if self._witness is None:
                self._witness = OpenFile(open_again(self._file.number, writable=False))
        except OSError:  # no descriptors left, or a client has a lease on it
            return True
        witness = self._witness  # kept, and with it its number, as long as this asks about it
        try:
            # If a client opens it in between, the kernel signals this process: use a signal that is ignored by default,
            # since the usual one would end the process.
            fcntl.fcntl(witness.number, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(witness.number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            return self.is_shared() if error.errno in _NO_LEASES else True  # this kernel may grant no leases
        fcntl.fcntl(witness.number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def free_pages(self) -> None:
        """Free its memory, which is not to be read any more, also for holders that dropped their lock: they find zeros,
        in new pages charged to them. Where that fails, the pages go with the last mapping."""
        if self._was_shared and self._file is not None:
            _libc.fallocate(self._file.number, _KEEP_SIZE_AND_PUNCH_HOLE, 0, self.size_bytes)

    def close(self) -> None:
        """Close the descriptor. The mapping goes with its last view: a reader is never cut off."""
        self._file = self._witness = None

    def _prefault(self) -> None:
        self.is_huge = self.size_bytes >= HUGE_PAGE_BYTES
        for start in range(0, self.size_bytes, PREFAULT_STEP_BYTES):
            length = min(PREFAULT_STEP_BYTES, self.size_bytes - start)
            self.is_huge = self.is_huge and self._made_huge(start, length // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
            try:
                _advise(self.address + start, length, _MADV_POPULATE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel older than 5.14
                    raise
                for page in range(start, start + length, _PAGE_BYTES):
                    self.view[page] = 0

    def _made_huge(self, start: int, length: int) -> bool:
        try:
            # It makes one around a page that is there. Writing to one would end this process if there is no memory.
            for page in range(start, start + length, HUGE_PAGE_BYTES):
                _advise(self.address + page, _PAGE_BYTES, _MADV_POPULATE_WRITE)
            _advise(self.address + start, length, _MADV_COLLAPSE)
        except OSError:  # an older kernel, or no free memory in such pieces
            return False
        return True


class MappedExtent:
    """An extent of another process, mapped into this one; unmapped when its last view goes."""

    def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
        """Takes the descriptor over. Raises `TierUnavailable`, also if its size is another, or may change."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if os.fstat(descriptor).st_size != size_bytes or seals & _SEALS != _SEALS:
                raise TierUnavailable("shared memory of another size, or that may change its size")
            self.memory, view = _mapped(descriptor, size_bytes, writable=writable)
        except OSError as error:
            raise TierUnavailable(f"shared memory cannot be mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self.view = view if writable else view.toreadonly()


class MemoryKeeper(Protocol):
    """Holds descriptors for the next process. Never blocks and never raises: memory that is not kept leads to
    misses."""

    def new_name(self) -> bytes:
        """A new name of `keeping.NAME_BYTES`, never used before."""
        ...

    def keep(self, name: bytes, extent: int, ledger: int) -> None:
        """Hold copies of these descriptors until `forget`."""
        ...

    def forget(self, name: bytes) -> None:
        """Close them."""
        ...


class ExtentPool:
    """Extents of one size, within a byte budget. Thread-safe; creation runs outside the lock.

    Extents may be made ahead (`prepare`), so that the next put does not wait for the kernel to clear pages. They are
    memory of this process within the budget, but not taken. An extent that was taken back while another process has it
    open or mapped counts as taken until that process unmaps it.
    """

    def __init__(
        self,
        budget_bytes: int,
        extent_bytes: int,
        keeper: MemoryKeeper | None = None,
        faults: FaultReports | None = None,
        now: Callable[[], float] = lambda: 0.0,
        thread_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """keeper: notified when an extent that it keeps is closed. faults: notified when the machine has no memory for
        one. now: seconds that never go back. thread_seconds: CPU time of the calling thread, which shows slow kernel
        queries."""
        assert extent_bytes % _PAGE_BYTES == 0 and 0 < extent_bytes <= budget_bytes
        self.budget_bytes = budget_bytes
        self.extent_bytes = extent_bytes
        self._keeper = keeper
        self.faults = faults or Unheard()
        self._now = now
        self._thread_seconds = thread_seconds
        self._lock = threading.Lock()
        self._prepared = threading.Condition(self._lock)
        self._taken_bytes = 0
        self._ahead = 0
        self._preparing = False
        self._awaiting = 0
        self._spares: list[Extent] = []
        # Extents that were taken back and clients still have open, with their owners; and when each is asked about.
        self._lingering: dict[int, tuple[Extent, bytes]] = {}
        self._asked_at: dict[int, float] = {}
        self._taken_back = count(1)
        self._closed = False

    @property
    def taken_bytes(self) -> int:
        """Bytes of extents that exist or are being made for a caller, or that another process keeps alive."""
        with self._lock:
            self._take_back()
            return self._taken_bytes

    def awaited(self) -> list[int]:
        """If clients' mappings alone leave no room: the extents that were taken back and are still mapped, by numbers
        that are never reused."""
        with self._lock:
            return [] if self._has_room() else list(self._lingering)

    def has_room(self) -> bool:
        """Whether one more extent fits the budget."""
        with self._lock:
            return self._has_room()

    def _has_room(self) -> bool:
        """Under the lock."""
        self._take_back()
        return self._taken_bytes + self.extent_bytes <= self.budget_bytes

    def lingering(self) -> Counter[bytes]:
        """How many extents that were taken back from each owner are not free yet, as of the last look."""
        with self._lock:
            return Counter(owner for _, owner in self._lingering.values())

    def _take_back(self) -> None:
        """Free extents that no other process has open any more. Under the lock."""
        for number in self.let_go(self._asked_at, lambda number: self._lingering[number][0].is_open_elsewhere()):
            extent, _ = self._lingering.pop(number)
            extent.free_pages()
            self._close(extent)
            self._taken_bytes -= extent.size_bytes

    def let_go(self, asked_at: dict[int, float], is_held: Callable[[int], bool]) -> list[int]:
        """Which of these clients do not hold any more, as far as a short look tells; they leave `asked_at`.

        asked_at: by number, when each is asked about next: where the kernel answers slowly, more rarely.
        """
        if not asked_at:
            return []
        gone, now, worked = [], self._now(), self._thread_seconds()
        ends_at = worked + LOOK_SECONDS
        for number in [number for number, not_before in asked_at.items() if now >= not_before]:
            if worked > ends_at:
                break
            is_still_held = is_held(number)
            before, worked = worked, self._thread_seconds()
            took = worked - before
            if is_still_held:
                asked_at[number] = now + RARELY * took if took > SLOW_QUESTION_SECONDS else now
            else:
                del asked_at[number]
                gone.append(number)
        return gone

    def prepare(self, ahead: int = 1) -> None:
        """From now on keep so many extents ready ahead, as far as budget and memory allow."""
        with self._lock:
            self._ahead = max(self._ahead, ahead)
            self._prepare()

    def create(self) -> Extent:
        """A new, prefaulted extent. Raises `TierFull` at the budget and `TierUnavailable` if the kernel has none."""
        with self._lock:
            self._await_prepared()
            if self._closed:
                raise TierUnavailable("the pool was closed")
            if not self._has_room():
                raise TierFull(f"all {self.budget_bytes} bytes of the DRAM budget are taken")
            self._taken_bytes += self.extent_bytes
            spare = self._spares.pop() if self._spares else None
            self._prepare()
        if spare is not None:
            return spare
        try:
            return self._make()
        except BaseException:
            with self._lock:
                self._taken_bytes -= self.extent_bytes
            raise

    def take_over(self, extent: Extent) -> bool:
        """Take over an earlier process's memory if it has this pool's extent size and fits the budget; returns whether.
        If not, it is given back, and counts until no client maps it."""
        with self._lock:
            self._taken_bytes += extent.size_bytes
            if extent.size_bytes == self.extent_bytes and self._taken_bytes <= self.budget_bytes:
                return True
        self.destroy(extent)
        return False

    def destroy(self, extent: Extent, owner: bytes = b"") -> bool:
        """Take an extent back; its bytes are free at once (True), or when no other process has it open. owner: charged
        until then."""
        with self._lock:
            if extent.is_open_elsewhere() and not self._closed:
                number = next(self._taken_back)
                self._lingering[number], self._asked_at[number] = (extent, owner), 0.0
                return False
            is_closed = self._closed
        if not is_closed:  # a closed one's readers go on
            extent.free_pages()
        self._close(extent)
        with self._lock:
            self._taken_bytes -= extent.size_bytes
        return True

    def close(self) -> None:
        """Refuse further extents. One being made ahead is given back when it is ready. Readers are unaffected."""
        with self._lock:
            self._closed = True
            mapped = [extent for extent, _ in self._lingering.values()]
            self._lingering, self._asked_at = {}, {}
            self._taken_bytes -= sum(extent.size_bytes for extent in mapped)
            unused, self._spares = self._spares, []
        for extent in (*mapped, *unused):
            self._close(extent)

    def _close(self, extent: Extent) -> None:
        extent.close()
        if extent.name and self._keeper is not None:
            self._keeper.forget(extent.name)

    def _await_prepared(self) -> None:
        """Wait for an extent being made ahead: it is ready sooner than a new one, but serves one caller only. Under the
        lock."""
        self._awaiting += 1
        try:
            self._prepared.wait_for(
                lambda: (
                    not self._preparing
                    or bool(self._spares)
                    or (self._awaiting > 1 and self._taken_bytes + 2 * self.extent_bytes <= self.budget_bytes)
                )
            )
        finally:
            self._awaiting -= 1

    def _make(self) -> Extent:
        try:
            extent = Extent(self.extent_bytes)
        except OSError as error:
            self.faults.failed(EXTENTS, kind_of(error), str(error))
            raise TierUnavailable(f"no shared memory: {error.strerror}") from error
        except MemoryError as error:
            self.faults.failed(EXTENTS, FaultKind.NO_MEMORY, "no memory for its tables")
            raise TierUnavailable("no memory for another extent") from error
        self.faults.worked(EXTENTS)
        return extent

    def _wants_another(self) -> bool:
        """Under the lock."""
        self._take_back()
        made = len(self._spares) + 1
        return made <= self._ahead and self._taken_bytes + made * self.extent_bytes <= self.budget_bytes

    def _prepare(self) -> None:
        """Under the lock."""
        if self._closed or self._preparing or not self._wants_another():
            return

        def run() -> None:
            while True:
                extent = None
                with suppress(TierUnavailable):  # a caller of `create` gets its own error
                    extent = self._make()
                with self._lock:
                    goes_on = extent is not None and not self._closed
                    if extent is not None and not self._closed:
                        self._spares.append(extent)
                        extent = None
                    self._preparing = goes_on = goes_on and self._wants_another()
                    self._prepared.notify_all()
                if extent is not None:
                    extent.close()
                if not goes_on:
                    return

        self._preparing = True
        try:
            threading.Thread(target=run, name="kv-extent", daemon=True).start()
            self.faults.worked(EXTENT_THREADS)
        except (RuntimeError, MemoryError) as error:  # no more threads
            self._preparing = False
            self.faults.failed(EXTENT_THREADS, kind_of(error), "of one that makes extents ahead")


def found_extent(descriptor: int) -> Extent | None:
    """Shared memory of an earlier process, mapped for writing; None, and closed, if it is no such memory."""
    size_bytes = os.fstat(descriptor).st_size
    try:
        is_ours = size_bytes > 0 and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no shared memory at all
        is_ours = False
    if not is_ours:
        os.close(descriptor)
        return None
    try:
        return Extent(size_bytes, descriptor)
    except OSError:  # it cannot be mapped, and was closed
        return None


def _mapped(descriptor: int, size_bytes: int, *, writable: bool = True) -> tuple[MappedMemory, memoryview]:
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    # The kernel maps huge pages as such only from a multiple of their size on, and does not choose one by itself.
    reserved_bytes = rounded_up(size_bytes, _PAGE_BYTES) + HUGE_PAGE_BYTES
    reserved = _mmap(None, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = rounded_up(reserved, HUGE_PAGE_BYTES)
    try:
        _mmap(address, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, reserved_bytes)
        raise
    end = address + rounded_up(size_bytes, _PAGE_BYTES)
    for start, stop in ((reserved, address), (end, reserved + reserved_bytes)):
        if start < stop:
            _libc.munmap(start, stop - start)
    memory = MappedMemory(address, size_bytes, writable)
    mapped = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(mapped, _left, address, size_bytes, memory.leaving).atexit = False
    return memory, memoryview(mapped).cast("B")


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found: int = _libc.mmap(address, size_bytes, protection, flags, descriptor, 0)
    if found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def rounded_up(number: int, unit: int) -> int:
    """The next multiple of the unit."""
    return -(-number // unit) * unit


def _left(address: int, size_bytes: int, leaving: Sequence[Callable[[Callable[[], object]], object]]) -> None:
    unmap: Callable[[], object] = partial(_libc.munmap, address, size_bytes)
    for leave in leaving:
        unmap = partial(leave, unmap)
    unmap()


def _advise(address: int, size_bytes: int, advice: int) -> None:
    if _libc.madvise(address, size_bytes, advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _lock_of(kind: int, first: int, last: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, first, last - first + 1, 0)


class BlankExtent(Extent):
    """An extent's size without its memory: for tables that run without payload."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.name = b""
        self.view = memoryview(bytearray())

        self._file = self._witness = None
        self._was_shared = False

    def close(self) -> None: ...


class BlankPool(ExtentPool):
    """A pool of blank extents."""

    def _make(self) -> Extent:
        return BlankExtent(self.extent_bytes)
