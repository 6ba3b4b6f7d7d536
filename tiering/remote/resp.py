"""RESP, the protocol of Valkey and Redis, for frames: sent from our memory, and received straight into it.

The usual clients copy large values several times; here a SET is a `sendmsg` of header and payload, and a GET arrives in
the slot except for the few bytes that came with its first line. That line is read into a small buffer: peeking would
spin on half a line, and TLS cannot peek. A value comes in pieces, and its reader is told of each: what has come is
digested while the rest is on its way. The rest of the deadline limits every system call that waits, and those that do
not are counted: a server that drips bytes is late as any other. Sizes are compared before a byte of the value is read.

After any exception the socket's state is unknown: the connection is closed, never reused.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tiering.clock import Clock
from tiering.remote.driver import Arrived, WrongSize, ignored

Reply: TypeAlias = "bytes | int | list[Reply] | None"
Piece: TypeAlias = bytes | memoryview

BUFFER_BYTES = 512
"""Also the longest line."""
PIECE_BYTES = 128 << 10
"""Most bytes of a value in one call: so many are still in the processor's cache when they are digested."""
POLLS = 256
"""So many calls for a value take what is there and do not wait; later ones do. A server on this host sends the rest
meanwhile: to sleep for it and to be woken takes longer than the sending."""
MAX_STRING_BYTES, MAX_ITEMS, MAX_DEPTH = 64 << 10, 1024, 6
"""Of a small reply: bytes of all its strings, items in all, nesting of lists."""
SLACK_SECONDS = 0.001
"""A wait may pass the deadline by this: setting a socket's timeout is a system call, too. For the kernel 0 means
none."""
_TIMEVAL = struct.Struct("@ll")
_CODE_CHARACTERS, _TEXT_BYTES = 24, 200
_DIGITS = 18
_SHORT = re.compile(rb"\$([1-9]\d{0,3})\r\n")


class RespFault(Exception):
    """The server's bytes do not answer the request."""


class TooLarge(RespFault):
    """More strings than a reply may have."""


class ErrorReply(RespFault):
    """The server refused. code: the first word of its error. text: all of it, which may name keys."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code)
        self.code, self.text = code, text


@dataclass(slots=True)
class ReplyRoom:
    """What small replies may still have: items, and bytes of strings."""

    items: int = MAX_ITEMS
    string_bytes: int = MAX_STRING_BYTES


def command(*words: bytes) -> bytes:
    return b"".join((b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)))


def set_command(key: bytes, value: Sequence[Piece], ttl_ms: int) -> list[Piece]:
    """SET NX of a value in pieces, as pieces to send."""
    options = [b"NX", *([b"PX", b"%d" % ttl_ms] if ttl_ms else [])]
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(key), key, sum(map(len, value)))
    return [head, *value, b"".join((b"\r\n", *(b"$%d\r\n%b\r\n" % (len(one), one) for one in options)))]


class RespConnection:
    """A connected socket. Not thread-safe."""

    def __init__(self, sock: socket.socket, clock: Clock, buffer_bytes: int = BUFFER_BYTES) -> None:
        """buffer_bytes: a large buffer is for many small replies."""
        self._socket = sock
        self._clock = clock
        self._buffer = bytearray(buffer_bytes)
        self._is_tls = isinstance(sock, ssl.SSLSocket)  # its timeouts are Python's, a poll before each call
        if not self._is_tls:
            sock.settimeout(None)
        self._limits = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}  # set before each call to the socket
        self._at = self._end = 0  # start and end of unread bytes in the buffer
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def is_in_step(self) -> bool:
        """Whether nothing is unread or readable: neither the rest of an answer nor the connection's end."""
        return self._at == self._end and not self._readable.poll(0)

    def send(self, pieces: Sequence[Piece], deadline: float) -> None:
        """Send everything. Raises OSError, including TimeoutError at the deadline."""
        rest = [view for piece in pieces if (view := memoryview(piece).cast("B"))]
        while rest:
            self._wait_at_most(deadline, socket.SO_SNDTIMEO)
            try:
                sent = self._socket.send(rest[0]) if self._is_tls else self._socket.sendmsg(rest)
            except BlockingIOError:  # at the kernel's limit
                continue
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][sent:]

    def reply_into(self, slot: memoryview, deadline: float, arrived: Arrived = ignored) -> bool:
        """Receive the answer to a GET: False if there is no value, else the slot is filled. arrived: as in
        `RemoteEngine.read`."""
        expected = b"$%d\r\n" % len(slot)
        line = self._line(deadline, len(expected))  # no further byte: the value goes straight to the slot
        if line in (b"$-1", b"_"):
            return False
        if line[:1] != b"$":
            raise _fault(line)
        size = _number(line[1:])
        if size != len(slot):
            raise WrongSize(f"a value of {size:,} bytes where {len(slot):,} were expected")
        self._fill(slot, deadline, arrived)
        self._end_of_bulk(deadline)
        return True

    def reply(self, deadline: float, room: ReplyRoom | None = None) -> Reply:
        """Receive a small answer. room: of several; by default this one has all of it. Raises `ErrorReply`, and
        `RespFault` if it is malformed or too large."""
        return self._small(deadline, MAX_DEPTH, room if room is not None else ReplyRoom())

    def _small(self, deadline: float, depth: int, room: ReplyRoom) -> Reply:
        room.items -= 1
        if room.items < 0 or depth < 0:
            raise RespFault("an answer of too many items")
        line = self._line(deadline)
        kind, text = line[:1], line[1:]
        if line in (b"$-1", b"*-1", b"_"):
            return None
        if kind == b"+":
            return bytes(text)
        if kind == b":":
            return _number(text)
        if kind == b"$":
            size = _number(text)
            room.string_bytes -= size
            if room.string_bytes < 0:
                raise TooLarge(f"a value of {size} bytes where a few were expected")
            value = bytearray(size)
            self._fill(memoryview(value), deadline)
            self._end_of_bulk(deadline)
            return bytes(value)
        if kind in (b"*", b"~", b"%"):
            count = _number(text) * (2 if kind == b"%" else 1)
            if count > room.items:
                raise RespFault("an answer of too many items")
            return [self._string(room) or self._small(deadline, depth - 1, room) for _ in range(count)]
        raise _fault(line)

    def _string(self, room: ReplyRoom) -> bytes:
        """A short string that is here already, as most are; else nothing."""
        if found := _SHORT.match(self._buffer, self._at, self._end):
            size, begin = int(found[1]), found.end()
            end = begin + size
            if size <= room.string_bytes and self._buffer.startswith(b"\r\n", end, self._end):
                room.items, room.string_bytes = room.items - 1, room.string_bytes - size
                self._at = end + 2
                return bytes(self._buffer[begin:end])
        return b""

    def _line(self, deadline: float, first: int | None = None) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._at, self._end)) < 0:
            self._receive(deadline, first)
            first = None
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line

    def _end_of_bulk(self, deadline: float) -> None:
        while self._end - self._at < 2:
            self._receive(deadline)
        if self._buffer[self._at : self._at + 2] != b"\r\n":
            raise RespFault("a value that does not end where it was said to")
        self._at += 2

    def _receive(self, deadline: float, most: int | None = None) -> None:
        if self._at:  # a few bytes
            held = self._end - self._at
            self._buffer[:held] = self._buffer[self._at : self._end]
            self._at, self._end = 0, held
        if self._end == len(self._buffer):
            raise RespFault(f"a line of more than {self._end} bytes")
        self._end += self._received(memoryview(self._buffer)[self._end :][:most], deadline, 0)

    def _fill(self, view: memoryview, deadline: float, arrived: Arrived = ignored) -> None:
        held = min(len(view), self._end - self._at)
        view[:held] = self._buffer[self._at : self._at + held]
        self._at += held
        arrived(held)
        polls = 0 if self._is_tls else POLLS
        while held < len(view):
            piece = view[held : held + PIECE_BYTES]
            if polls:
                polls -= 1
                count = self._there(piece, socket.MSG_DONTWAIT)
            else:
                count = self._received(piece, deadline, 0 if self._is_tls else socket.MSG_WAITALL)
            if count:
                held += count
                arrived(held)

    def _there(self, view: memoryview, flags: int) -> int:
        try:
            count = self._socket.recv_into(view, 0, flags)
        except BlockingIOError:  # not to wait, or at the kernel's limit
            return 0
        if not count:
            raise ConnectionResetError("it closed the connection")
        return count

    def _received(self, view: memoryview, deadline: float, flags: int) -> int:
        while True:
            self._wait_at_most(deadline, socket.SO_RCVTIMEO)
            if count := self._there(view, flags):
                return count

    def _wait_at_most(self, deadline: float, option: int) -> None:
        left = deadline - self._clock.monotonic_seconds()
        if left <= 0:
            raise TimeoutError
        if 0.0 <= self._limits[option] - left <= SLACK_SECONDS:
            return
        self._limits[option] = left = max(left, SLACK_SECONDS)
        if self._is_tls:
            self._socket.settimeout(left)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))

    def interrupt(self) -> None:
        """From another thread: make the call in progress fail soon."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is gone
            pass

    def close(self) -> None:
        self._socket.close()


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > _DIGITS:
        raise RespFault("a length that is no number")
    return int(text)


def _fault(line: bytes) -> RespFault:
    if line[:1] not in (b"-", b"!"):
        return RespFault(f"an answer of a kind that was not asked for: {line[:1]!r}")
    code = line[1:].split(b" ", 1)[0][:_CODE_CHARACTERS].decode("ascii", "replace")
    text = line[1:][:_TEXT_BYTES].decode("utf-8", "replace")
    return ErrorReply(code if code.isalnum() and code.isupper() else "an error", text)
