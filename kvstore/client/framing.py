"""One connection to the sidecar: requests out, answers in, from any thread.

It has no thread of its own. Of the threads that wait for answers one reads the socket for all and files each answer,
undecoded, under its request's number; the thread that sent the request decodes it. A thread that must not block submits
and polls: a poll reads what has arrived unless another thread is reading, and never blocks. Requests that the socket
does not take yet are sent, in order, by the next thread that sends or polls. An answer that comes after its caller gave
up is undone if it stands for something (a lease, a reservation, descriptors), and is not decoded as a whole.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import NoReturn, TypeVar, Union

import msgspec

from kvstore.block.errors import Rejected, Unreachable
from kvstore.protocol import messages as m
from tiering.clock import Clock

T = TypeVar("T")
_READ_BYTES = 256 << 10
MAX_UNSENT_BYTES = 64 << 20
"""Submitted, and not taken by the socket: beyond it the sidecar is stuck. Thirty prompts of 65,536 blocks."""
LOOK_SECONDS = 0.5
"""Interval at which a long wait checks whether the sidecar is silent."""
_DESCRIPTOR = struct.Struct("i")
_MAX_ANSWER_BYTES = 64 << 20
"""More than a sidecar ever sends: a longer length means a broken peer."""


_BROKEN = (OSError, ValueError, IndexError, MemoryError)
"""While an answer is read: the socket's end, a malformed frame, descriptors that another thread closed meanwhile."""


class TimedOut(Exception):
    """No answer before the deadline. The connection is unaffected."""


@dataclass(slots=True)
class AnsweredCall:
    """An answer, and the descriptors that came with it, which the caller closes."""

    answer: m.Answer
    descriptors: list[int]


class Backpressure(Exception):
    """The sidecar does not read what was submitted, and the queue is full. The connection stays open."""


class Silent(Unreachable):
    """A process listens there and does not answer: a sidecar that hangs or is overloaded."""


HANGS = "the sidecar hangs, or has no time; see its log, and kvstore doctor"


_KeptAnswer = tuple[msgspec.Raw, object, list[int]]
"""An undecoded answer, its outline, and its descriptors. The thread that asked decodes it, so that the one that reads
for all does not pay."""


@dataclass(eq=False, slots=True)
class _OutgoingFrame:
    """number: of its request. rest: what the socket has not taken."""

    number: int
    rest: memoryview
    size: int


class FramedSocket:
    """A connection that has said hello. Every method may raise `Unreachable`; after that it is closed."""

    def __init__(
        self,
        path: str,
        engine: str,
        session: bytes,
        clock: Clock,
        seconds: float,
        fingerprint: bytes = b"",
        tenant: str = "",
    ) -> None:
        """Connect and say hello within that time. fingerprint, tenant: as in `Hello`. Raises `Unreachable`."""
        self._clock = clock
        self._send_lock = threading.Lock()
        self._state = threading.Condition()
        self._reading = False
        self._asked: dict[int, _KeptAnswer | None] = {}  # by number: None until the answer arrives
        self._numbers = count(1)
        self._unsent: deque[_OutgoingFrame] = deque()  # the holder of the send lock sends the first of them
        self._unsent_bytes = 0
        self._for_later: deque[_OutgoingFrame] = deque()
        self._read = bytearray()
        self._descriptors: deque[int] = deque()
        self._retired: list[int] = []
        self.too_late: deque[m.Verb] = deque()
        """Requests that undo the answers which came too late; the caller posts them."""
        self.closed = False
        self.heard_at = clock.monotonic_seconds()
        """When the last bytes arrived."""
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:  # no descriptors left
            raise Unreachable(f"{path} cannot be called ({error.strerror})") from None
        try:
            self._socket.settimeout(seconds)
            self._socket.connect(path)
            self._socket.setblocking(False)
            hello = m.Hello(m.OLDEST_SIDECAR_VERSION, m.NEWEST_VERSION, engine, session, fingerprint, tenant)
            answer = self.call(hello, seconds).answer
        except PermissionError:
            self.close()
            raise Rejected(
                f"{path} cannot be opened (Permission denied); run as the sidecar's user or, for a tenant's socket, "
                "as a member of its group (door.mode), who may also enter its directory"
            ) from None
        except (OSError, TimedOut) as error:
            self.close()
            why = getattr(error, "strerror", None) or str(error) or "too late"
            # BlockingIOError: the sidecar accepts no connections, and its backlog is full.
            kind = Silent if isinstance(error, TimedOut | TimeoutError | BlockingIOError) else Unreachable
            raise kind(f"{path} does not answer ({why})") from None
        except BaseException:
            self.close()
            raise
        if not isinstance(answer, m.Welcome):
            self.close()
            raise Rejected(f"{path} refused: {answer.text if isinstance(answer, m.Failed) else 'not a welcome'}")
        self.welcome = answer

    def call(self, verb: m.Verb, seconds: float, look: Callable[[], None] = lambda: None) -> AnsweredCall:
        """Send a request and wait for its answer. look: called every `LOOK_SECONDS` meanwhile; what it raises ends the
        wait. Raises `TimedOut`."""
        deadline = self._clock.monotonic_seconds() + seconds
        frame = self._new_frame(verb)
        number = frame.number
        with self._state:
            self._asked[number] = None
        try:
            self._send(frame, deadline)
            while True:
                look_at = self._clock.monotonic_seconds() + LOOK_SECONDS
                try:
                    kept = self._await(number, min(deadline, look_at))
                    break
                except TimedOut:
                    if deadline <= look_at:
                        raise
                look()
        except BaseException:
            self.cancel(number)
            raise
        return self._decoded(kept)

    def submit(self, verb: m.Verb) -> int:
        """Queue a request without blocking; returns the number for `poll` or `wait`. Raises `Backpressure`."""
        frame = self._new_frame(verb)
        number = frame.number
        with self._state:
            self._asked[number] = None
        try:
            self._submit(frame)
        except BaseException:
            self.cancel(number)
            raise
        return number

    def poll(self, number: int) -> AnsweredCall | None:
        """The answer to a submitted request, if it is there. Does not block. If it raises, `cancel` the number."""
        if self._unsent:
            self._push()
        if not self._state.acquire(blocking=False):
            return None
        try:
            kept = self._take_answer(number)
            reads = kept is None and not self._reading
            self._reading |= reads
        finally:
            self._state.release()
        if reads:
            try:
                self._receive(None)
            finally:
                with self._state:
                    self._reading = False
                    self._state.notify_all()
            with self._state:
                kept = self._take_answer(number)
        return self._decoded(kept) if kept is not None else None

    def has(self, number: int) -> bool:
        """Whether `poll` would return or raise, judged by what was read so far."""
        return self.closed or self._asked.get(number) is not None

    def wait(self, number: int, seconds: float) -> AnsweredCall:
        """Wait for the answer to a submitted request. Raises `TimedOut`, after which it may still be awaited or
        cancelled."""
        deadline = self._clock.monotonic_seconds() + seconds
        if self._unsent:
            self._send(None, deadline)
        return self._decoded(self._await(number, deadline))

    def cancel(self, number: int) -> None:
        """Give up an answer; if it stands for something, that is undone."""
        with self._state:
            kept = self._asked.pop(number, None)
        if kept is not None:
            self._undo(*kept[1:])

    def discard_answer(self, answered: AnsweredCall) -> None:
        """Undo an answer that failed its caller's check."""
        self._undo(answered.answer, answered.descriptors)

    def post(self, verb: m.Verb) -> None:
        """Queue a request without wanting an answer. Does not block."""
        try:
            self._submit(self._new_frame(verb))
        except Backpressure:
            self._hang_up()  # a lost release would leak its lease; the connection's end releases all

    def post_later(self, verb: m.Verb) -> None:
        """Queue a request without wanting an answer, to be sent with the next request of any kind: a send of its own
        would wake the sidecar, which may take the core that this thread runs on. Dropped if much waits already."""
        frame = self._new_frame(verb)
        with self._state:
            if self.closed:
                raise Unreachable("the connection is closed")
            if self._unsent_bytes + frame.size <= MAX_UNSENT_BYTES:
                self._unsent_bytes += frame.size
                self._for_later.append(frame)

    def retired(self) -> list[int]:
        """Extents that the sidecar gave back, each reported once."""
        if not self._retired:
            return []
        with self._state:
            retired, self._retired = self._retired, []
            return retired

    def close(self) -> None:
        """Hang up, after what was posted for later. Threads that wait for answers raise `Unreachable`."""
        if self._for_later:
            with self._state:
                self._unsent += drained(self._for_later)
            with suppress(Unreachable):
                self._push()
        with self._state:
            self.closed = True
            self._state.notify_all()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with self._send_lock:
            self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def close_after_fork(self) -> None:
        """In a forked child: the connection is the parent's, and so were the threads that may have held its locks."""
        self.closed = True
        self._send_lock, self._state = threading.Lock(), threading.Condition()
        os.close(self._socket.detach())
        while self._descriptors:
            os.close(self._descriptors.popleft())

    # Out -----------------------------------------------------------------------------------------------------------

    def _new_frame(self, verb: m.Verb) -> _OutgoingFrame:
        """Under a number of its own. Raises `TooLong`."""
        number = next(self._numbers)
        packed = memoryview(m.pack(m.Request(number, verb)))
        if len(packed) > m.LENGTH_BYTES + m.MAX_BODY_BYTES:
            raise TooLong(len(packed))
        return _OutgoingFrame(number, packed, len(packed))

    def _submit(self, frame: _OutgoingFrame) -> None:
        with self._state:
            if self.closed:
                raise Unreachable("the connection is closed")
            if self._unsent_bytes > MAX_UNSENT_BYTES:
                raise Backpressure
            self._queue(frame)
        self._push()

    def _queue(self, frame: _OutgoingFrame) -> None:
        """Under the state's lock."""
        self._unsent += drained(self._for_later)
        self._unsent_bytes += frame.size
        self._unsent.append(frame)

    def _push(self) -> None:
        """Send what the socket takes now. The send lock's holder pushes again after it: nothing stays behind."""
        while self._unsent and not self.closed and self._send_lock.acquire(blocking=False):
            try:
                if not self._flush(None, None):
                    return
            finally:
                self._send_lock.release()

    def _send(self, frame: _OutgoingFrame | None, deadline: float) -> None:
        """Send a frame, or without one the queue, and wait until the socket has taken it. Raises `TimedOut`."""
        if not self._send_lock.acquire(timeout=max(0.0, deadline - self._clock.monotonic_seconds())):
            raise TimedOut
        try:
            if self.closed:
                raise Unreachable("the connection is closed")
            if frame is not None:
                with self._state:
                    self._queue(frame)
            if not self._flush(frame, deadline):
                if frame is not None and len(frame.rest) == frame.size:
                    self._sent(frame)  # it need not be sent any more, unless it was begun
                raise TimedOut
        finally:
            self._send_lock.release()
        if self._unsent:
            self._push()

    def _flush(self, last: _OutgoingFrame | None, deadline: float | None) -> bool:
        """Send queued frames, up to `last` if given. False if the socket takes no more before the deadline (None: now).
        Under the send lock."""
        try:
            while self._unsent if last is None else last.rest:
                frame = self._unsent[0]
                try:
                    frame.rest = frame.rest[self._socket.send(frame.rest, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    if deadline is None or not self._wait(select.POLLOUT, deadline):
                        return False
                if not frame.rest:
                    self._sent(frame)
        except OSError as error:
            self._break(error)
        except BaseException:  # interrupted in the middle of a message
            self._hang_up()
            raise
        return True

    def _sent(self, frame: _OutgoingFrame) -> None:
        with self._state:
            self._unsent.remove(frame)
            self._unsent_bytes -= frame.size

    # In ------------------------------------------------------------------------------------------------------------

    def _await(self, number: int, deadline: float) -> _KeptAnswer:
        """Raises `TimedOut`, also if answers to others keep coming."""
        has_read = False
        while True:
            with self._state:
                while True:
                    kept = self._take_answer(number)
                    if kept is not None:
                        return kept
                    if has_read and self._clock.monotonic_seconds() >= deadline:
                        raise TimedOut
                    if not self._reading:
                        self._reading = True
                        break
                    if not self._state.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
                        raise TimedOut
            try:
                came = self._receive(deadline)
            finally:
                with self._state:
                    self._reading = False
                    self._state.notify_all()
            if not came:
                raise TimedOut
            has_read = True

    def _take_answer(self, number: int) -> _KeptAnswer | None:
        """Under the state's lock."""
        kept = self._asked[number]
        if kept is not None:
            del self._asked[number]
        elif self.closed:
            raise Unreachable("the connection is closed")
        return kept

    def _decoded(self, kept: _KeptAnswer) -> AnsweredCall:
        answer, _, descriptors = kept
        try:
            return AnsweredCall(m.unpack_answer(answer), descriptors)
        except ValueError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._break(error)

    def _receive(self, deadline: float | None) -> bool:
        try:
            if deadline is not None and not self._wait(select.POLLIN, deadline):
                return False
            try:
                piece = self._receive_piece()
            except BlockingIOError:
                return False
            if not piece:
                raise ConnectionResetError
            self.heard_at = self._clock.monotonic_seconds()
            self._read += piece
            self._take_answers()
        except _BROKEN as error:
            self._break(error)
        except BaseException:  # interrupted: part of an answer may be lost
            self._hang_up()
            raise
        return True

    def _receive_piece(self) -> bytes:
        """Descriptors are queued. (`socket.recv_fds` drops the flags that it is given.)"""
        room = socket.CMSG_SPACE(m.MAX_EXTENTS * _DESCRIPTOR.size)
        piece, beside, _, _ = self._socket.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in beside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(data) - len(data) % _DESCRIPTOR.size
                self._descriptors.extend(number for (number,) in _DESCRIPTOR.iter_unpack(data[:whole]))
        return piece

    def _take_answers(self) -> None:
        read = self._read
        while len(read) >= m.LENGTH_BYTES:
            length = int.from_bytes(read[: m.LENGTH_BYTES], "little")
            if length > _MAX_ANSWER_BYTES:
                raise ValueError("an answer that is too long")
            if len(read) < m.LENGTH_BYTES + length:
                return
            reply, answer = unpack_outline(bytes(memoryview(read)[m.LENGTH_BYTES : m.LENGTH_BYTES + length]))
            del read[: m.LENGTH_BYTES + length]
            descriptors: list[int] = []
            if isinstance(answer, m.ExtentsReply):
                if len(self._descriptors) < len(answer.extents):
                    raise ValueError("descriptors are missing")
                descriptors = [self._descriptors.popleft() for _ in answer.extents]
            elif isinstance(answer, m.NotifyPipeReply) and self._descriptors:  # else the process may have none left
                descriptors = [self._descriptors.popleft()]
                if not stat.S_ISFIFO(os.fstat(descriptors[0]).st_mode):
                    os.close(descriptors[0])
                    raise ValueError("a descriptor of something else")
            with self._state:
                self._retired += reply.retired
                is_asked = reply.number in self._asked
                if is_asked:
                    self._asked[reply.number] = reply.answer, answer, descriptors
            if reply.number == m.NO_NUMBER and isinstance(answer, m.Failed):  # the sidecar disconnects after it
                raise ConnectionRefusedError(answer.text)
            if not is_asked:
                self._undo(answer, descriptors)

    def _undo(self, answer: object, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(answer, LeasedOutline | m.Leased) and answer.reply.lease:
            self.too_late.append(m.Release([answer.reply.lease]))
        elif isinstance(answer, m.Attached) and answer.leases:
            self.too_late.append(m.Release(answer.leases))
        elif isinstance(answer, ReservedOutline | m.Reserved) and answer.reply.reservation:
            self.too_late.append(m.Abort(answer.reply.reservation))

    def _wait(self, event: int, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        remaining = deadline - self._clock.monotonic_seconds()
        return bool(poll.poll(max(0.0, remaining) * 1000))

    def _hang_up(self) -> None:
        with self._state:
            self.closed = True
            self._state.notify_all()

    def _break(self, error: Exception) -> NoReturn:
        self._hang_up()
        why = f"the sidecar ended it: {error}" if isinstance(error, ConnectionRefusedError) else type(error).__name__
        raise Unreachable(f"the connection broke ({why})") from None


def drained(queue: deque[T]) -> Iterator[T]:
    """The items of a queue; each goes to one of the threads that drain it."""
    while True:
        try:
            one = queue.popleft()
        except IndexError:
            return
        yield one


class TooLong(Exception):
    """A message that the sidecar would refuse; its argument is the length in bytes."""


# ---------------------------------------------------------------------------------------------------------------------
# How far the thread that reads for all decodes an answer.


class Outline(msgspec.Struct, array_like=True, frozen=True):
    """A `Reply` with an undecoded answer: the thread that sent the request decodes it, and late answers are never
    decoded."""

    number: int
    answer: msgspec.Raw
    retired: list[int] = []


class _HeldNumber(msgspec.Struct, frozen=True):
    lease: int = 0
    reservation: int = 0


class LeasedOutline(msgspec.Struct, array_like=True, frozen=True, tag="leased"):
    """Of `Leased`, the lease's number."""

    reply: _HeldNumber


class ReservedOutline(msgspec.Struct, array_like=True, frozen=True, tag="reserved"):
    """Of `Reserved`, the reservation's number."""

    reply: _HeldNumber


_WHOLE = (m.Attached, m.ExtentsReply, m.NotifyPipeReply, m.Failed)
_SKIPPED = tuple(
    msgspec.defstruct(f"{one.__name__}Outline", [], array_like=True, frozen=True, tag=one.__struct_config__.tag)
    for one in m.Answer.__args__
    if one not in (m.Leased, m.Reserved, *_WHOLE)
)


_outlines = msgspec.msgpack.Decoder(Outline)
_answer_outlines: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(
    Union[(LeasedOutline, ReservedOutline, *_WHOLE, *_SKIPPED)]
)


def unpack_outline(body: bytes | memoryview) -> tuple[Outline, object]:
    """A frame's body, decoded as far as the reading thread needs it, and its answer likewise: of a long one only what
    undoes it. Raises `ValueError`."""
    outline = m.decoded(_outlines, body, "a reply")
    return outline, m.decoded(_answer_outlines, outline.answer, "a reply")
