"""A data server's side of the protocol, over any transport: its offers, and the allowed requests and answers of a
puller."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from kvstore.peers import sealed
from kvstore.peers import transport as t
from kvstore.peers.tokens import HeldOffer, Offers, proof_of, seal_key
from tiering.clock import Clock


class Bell:
    """Wakes a thread that sleeps on descriptors: `descriptor` is readable once `ring` was called. Thread-safe; ringing
    a closed bell does nothing."""

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


MOST_CONNECTIONS = 512
MOST_STRANGERS = 128
"""Connections that have not named their offer yet."""


class FrameDoor(ABC):
    """A holder's data server. A subclass serves its transport, in a thread that it starts."""

    transport: str
    address: str
    """HOST:PORT that peers dial, once it listens."""

    def __init__(self, listen: str, clock: Clock, random_bytes: Callable[[int], bytes], seal: str) -> None:
        """listen: HOST:PORT. seal: auto or always. Raises `BadInput`."""
        self._host, self._port = t.listened(listen)
        self._is_sealed = t.must_seal(self._host, seal)
        if self._is_sealed:
            sealed.needs_sealing()
        self._clock, self._offers = clock, Offers(random_bytes)
        self._connections: dict[Any, None] = {}  # the oldest first
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"kvstore-{self.transport}-door", daemon=True)

    def offer(self, frames: t.OfferedFrames, secret: bytes) -> t.PullOffer:
        """Let the node that has the secret pull these frames, once, within 5 s. Raises `PullBusy`, also after `close`;
        the caller then releases the frames."""
        offer = self._offers.add(frames, secret, self._is_sealed, self._clock.monotonic_seconds())
        self.wake()
        blocks = len(frames.spans) // len(frames.frame_bytes)
        return t.PullOffer(offer.token, self.address, self.transport, blocks, frames.frame_bytes, self._is_sealed)

    def pinned(self) -> int:
        """Offers whose frames are not released yet."""
        return self._offers.pinned()

    @abstractmethod
    def wake(self) -> None:
        """Wake the thread that ends overdue offers: it may sleep without a limit."""

    def close(self) -> None:
        """All pins are gone afterwards."""
        self._is_over = True
        if self._thread.is_alive():
            self.wake()
            self._thread.join()
        self._offers.end_all()

    @abstractmethod
    def _run(self) -> None:
        """The thread, until `_is_over`."""

    @abstractmethod
    def _drop(self, one: Any) -> None: ...

    def _has_room(self) -> bool:
        """For another connection; the oldest of too many strangers makes room."""
        strangers = [one for one in list(self._connections) if one.offer is None]  # others end by themselves
        if len(strangers) >= MOST_STRANGERS:
            self._drop(strangers[0])
            return True
        return len(self._connections) < MOST_CONNECTIONS


class Serving:
    """One connection's state. deadline: when it ends in any case."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.offer: HeldOffer | None = None
        self.seal: sealed.FrameSeal | None = None
        self.number = 0  # of the next frame
        self._asked: deque[tuple[int, int]] = deque()  # request, frames
        self._asked_to = self._most = 0  # requested frames end here; offered frames

    @property
    def needs(self) -> int:
        """Bytes of the puller's next message."""
        if self.offer is None:
            return t.HELLO.size
        return t.RECORD.size + (sealed.TAG_BYTES if self.seal is not None else 0)

    @property
    def has_all(self) -> bool:
        frames = self.offer.frames if self.offer is not None else None
        return frames is not None and self.number == len(frames.spans)

    def greet(self, offers: Offers, hello: bytes, now: float) -> bytes:
        """The answer to its first message. Without an offer the connection ends, without a reason."""
        offer = offers.take(hello, now)
        if offer is None:
            return _record(t.PullStatus.REFUSED, 0, 0, 0, 0)
        self.offer, self.deadline = offer, offer.until
        self._most = len(offer.frames.spans) if offer.frames is not None else 0
        if offer.is_sealed:
            self.seal = sealed.FrameSeal(seal_key(offer.token, offer.secret))
        return _record(t.PullStatus.WELCOME, 0, 0, 0, 0) + proof_of(hello, offer.secret)

    def note(self, message: bytes) -> None:
        """Take a request for frames: in order, eight at a time, and no more than offered. Raises `PeerFault`."""
        raw = message[: t.RECORD.size]
        record = t.checked_record(raw, t.ASK_MAGIC)
        if self.seal is not None:
            sealed.opened(self.seal.opening(sealed.ASKED, record.request, raw), message[t.RECORD.size :])
        is_next = record.number == self._asked_to and 0 < record.follow <= t.FRAMES_ASKED
        if not is_next or record.number + record.follow > self._most or len(self._asked) >= t.REQUESTS_UNDER_WAY:
            raise t.PeerFault("a request that no puller sends")
        self._asked_to += record.follow
        self._asked.append((record.request, record.follow))

    def next_frame(self) -> tuple[bytes, memoryview] | None:
        if not self._asked or self.offer is None or self.offer.frames is None:
            return None
        request, follow = self._asked.popleft()
        if follow > 1:
            self._asked.appendleft((request, follow - 1))
        frame = t.as_bytes(self.offer.frames.spans[self.number])
        record = _record(t.PullStatus.FRAME, follow - 1, request, self.number, frame.nbytes)
        self.number += 1
        self.offer.frames.sent(frame.nbytes)
        return record, frame


def _record(status: t.PullStatus, follow: int, request: int, number: int, frame_bytes: int) -> bytes:
    return t.RECORD.pack(t.FRAME_MAGIC, t.VERSION, status, follow, request, number, frame_bytes)
