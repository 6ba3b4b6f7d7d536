"""Pulls over UCX, for RDMA and device memory where the machine has them: the same messages, frames by tag into slots.

Records travel in an endpoint's stream, frames as tagged messages; slots are posted before their frames are requested,
so that RDMA writes them in place. Each worker is driven by one thread, which sleeps on its descriptor when there is
nothing to do: a puller's by the thread that pulls, the data server's by its own.

A deadline does not cancel posted receives. After a fault the endpoint is closed, and a slot is free when UCX has
reported the end of its receive (`free_slots`). UCX reads any host's messages into memory of its own, and its listener
is at all addresses of the host: use it on a network of trusted hosts only. A slot, or a span, may be anything that has
a buffer or `__cuda_array_interface__`; sealed frames are opened by the CPU, into host memory. The one file that imports
`ucxx`.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from math import inf
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.peers import sealed
from kvstore.peers import transport as t
from kvstore.peers.reader import FramePuller, PullTransport
from kvstore.peers.serving import Bell, FrameDoor, Serving
from kvstore.peers.tokens import Offers
from tiering.clock import Clock

try:
    from ucxx._lib import libucxx as ucx
    from ucxx._lib.arr import Array

    _IS_HERE = True
except (ModuleNotFoundError, ImportError):
    _IS_HERE = False

CONNECT_SECONDS = 5.0
"""UCX does not report that a port has no listener."""
_CLOSE_SECONDS = 0.1
_SLEEP_SECONDS = 0.5
"""A thread polls its worker this often even if no event wakes it."""
_UNDER_WAY = 4
"""Frames that the server has given to UCX for one puller; if it seals them, 2, in as many buffers."""


def needs_ucx() -> None:
    """Raises `BadInput` without ucxx."""
    if _IS_HERE:
        return
    why = "the package ucxx is not installed"
    if find_spec("ucp") is not None:
        why += "; ucp (ucx-py), which is, is archived, and ucxx has taken its place"
    raise BadInput(f"transport = ucx: {why}; pip install 'prefix-kvstore[ucx]', or take transport = sockets")


def _context(options: Mapping[str, str]) -> Any:
    needs_ucx()
    try:
        return ucx.UCXContext(dict(options), (ucx.Feature.TAG, ucx.Feature.STREAM, ucx.Feature.WAKEUP))
    except ucx.UCXError as error:
        raise BadInput(f"UCX does not start with {dict(options)}: {error}; look at UCX_TLS") from None


class _Worker:
    """Driven by one thread at a time; `ring` wakes it from any other."""

    def __init__(self, context: Any) -> None:
        self.ucx = ucx.UCXWorker(context)
        self.ucx.init_blocking_progress_mode()
        self._bell = Bell()
        self._poll = select.poll()
        self._poll.register(self.ucx.epoll_file_descriptor, select.POLLIN)
        self._poll.register(self._bell.descriptor, select.POLLIN)

    def ring(self) -> None:
        self._bell.ring()

    def turn(self, seconds: float) -> None:
        """Let UCX work; if it has nothing to do, sleep for this long at most."""
        is_idle = True
        while self.ucx.progress_once():
            is_idle = False
        if is_idle and self.ucx.arm() and self._poll.poll(1000 * min(max(seconds, 0.0), _SLEEP_SECONDS)):
            self._bell.hear()

    def cancel(self) -> None:
        """Have UCX end its work at closed or broken endpoints, which it does not do by itself."""
        self.ucx.cancel_inflight_requests()
        self.turn(0.01)

    def close(self) -> None:
        self.ucx = None
        self._bell.close()


class _Underway:
    """A send or a receive, and the memory that UCX uses for it until it has completed."""

    def __init__(self, move: Callable[..., Any], memory: Any, *tag: Any) -> None:
        self._memory = Array(memory)
        self._request = move(self._memory, *tag)

    @property
    def is_over(self) -> bool:
        """Whether UCX no longer touches the memory."""
        return bool(self._request.completed)

    def check(self) -> None:
        """Raises UCX's error if it failed."""
        self._request.check_error()


class UcxPullTransport(PullTransport):
    """Over UCX. options: UCX's own, such as TLS."""

    name = "ucx"

    def __init__(self, clock: Clock, *, seal: str = "auto", options: Mapping[str, str] | None = None) -> None:
        """Raises `BadInput`."""
        super().__init__(clock, seal=seal)
        self._context = _context(options or {})

    def _dialled(
        self, offer: t.PullOffer, secret: bytes, seal: sealed.FrameSeal | None, deadline: float
    ) -> UcxPullReader:
        host, port = t.numeric_address(offer.address)
        worker = _Worker(self._context)
        try:
            endpoint = ucx.UCXEndpoint.create(worker.ucx, host, port, True)
        except ucx.UCXError as error:
            worker.close()
            raise t.PeerFault(f"{offer.address} cannot be reached: {error}") from None
        return UcxPullReader(worker, endpoint, offer, secret, seal, self._clock)


class UcxPullReader(FramePuller):
    """One connection, with a worker of its own."""

    def __init__(
        self,
        worker: _Worker,
        endpoint: Any,
        offer: t.PullOffer,
        secret: bytes,
        seal: sealed.FrameSeal | None,
        clock: Clock,
    ) -> None:
        super().__init__(offer, secret, seal, clock)
        self.breaks = (OSError, ucx.UCXError)
        self._worker, self._endpoint, self._tag = worker, endpoint, _tag(offer.token, secret)
        self._ring = memoryview(bytearray(max(offer.frame_bytes) + sealed.TAG_BYTES if seal is not None else 0))
        self._posted: dict[int, _Underway] = {}  # receives by the frame's number
        self._others: list[_Underway] = []
        self._lock = threading.RLock()  # of the worker, and of these:
        self._is_closed = False
        self._when_free: list[Callable[[], None]] = []

    def greet(self, deadline: float) -> None:
        """Also reads whether it may pull: nothing else shows that there is a server."""
        deadline = min(deadline, self._clock.monotonic_seconds() + CONNECT_SECONDS)
        with self._lock:
            super().greet(deadline)
            try:
                self.hear_welcome(deadline)
            except self.breaks as error:
                raise t.PeerFault(f"no door for data answers at {self._offer.address}: {error}") from None

    def pull(self, slots: Sequence[memoryview], check: Callable[[int, memoryview], bool], deadline: float) -> int:
        if self._seal is not None and not all(isinstance(slot, memoryview) for slot in slots):
            raise BadInput("sealed frames are opened by the processor; give slots in host memory, as memoryviews")
        with self._lock:
            return super().pull(slots, check, deadline)

    def free_slots(self, when_free: Callable[[], None]) -> bool:
        with self._lock:
            if all(move.is_over for move in self._posted.values()):
                return True
            self._when_free.append(when_free)
            return False

    def _expect(self, number: int, views: Sequence[memoryview]) -> None:
        if self._seal is None:
            for at, view in enumerate(views, number):
                self._posted[at] = _Underway(self._endpoint.tag_recv, view, _tag_of(self._tag, at))

    def _fill_slot(self, record: bytes, view: memoryview, deadline: float) -> None:
        if self._seal is None:
            self._wait(self._posted[self._number], deadline)
            del self._posted[self._number]
            return
        size = len(view)
        message = self._ring[: size + sealed.TAG_BYTES]
        self._wait(_Underway(self._endpoint.tag_recv, message, _tag_of(self._tag, self._number)), deadline)
        opening = self._seal.opening(sealed.FRAMES, self._number, record)
        for at in range(0, size, sealed.PIECE_BYTES):
            into = view[at : at + sealed.PIECE_BYTES]
            opening.update_into(message[at : at + len(into)], into)
        sealed.opened(opening, message[size:])

    def _fill(self, view: memoryview, deadline: float) -> None:
        self._wait(_Underway(self._endpoint.stream_recv, view), deadline)

    def _write(self, said: bytes, deadline: float) -> None:
        self._wait(_Underway(self._endpoint.stream_send, said), deadline)

    def _wait(self, move: _Underway, deadline: float) -> None:
        self._others.append(move)
        while not move.is_over:
            if self._is_over:
                raise t.PeerFault("the pull was ended from here")
            self._worker.turn(t.seconds_left(self._clock, deadline))
        self._others.remove(move)
        move.check()

    def _hang_up(self) -> None:
        self._worker.ring()  # a thread that pulls then raises
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            _end(self._endpoint)
            until = self._clock.monotonic_seconds() + _CLOSE_SECONDS
            while not self._is_quiet() and self._clock.monotonic_seconds() < until:
                self._worker.cancel()
            if self._is_quiet():
                self._endpoint = None
                self._worker.close()
            else:
                threading.Thread(target=self._quarantine, name="kvstore-pull-quarantine", daemon=True).start()

    def _is_quiet(self) -> bool:
        return all(move.is_over for move in (*self._posted.values(), *self._others))

    def _quarantine(self) -> None:
        while True:
            with self._lock:
                self._worker.cancel()
                if self._is_quiet():
                    break
        self._endpoint = None
        self._worker.close()
        for when_free in self._when_free:
            when_free()


class UcxFrameDoor(FrameDoor):
    """Over UCX."""

    transport = "ucx"

    def __init__(
        self,
        listen: str,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        *,
        seal: str = "auto",
        options: Mapping[str, str] | None = None,
    ) -> None:
        """listen: HOST:PORT that peers dial; UCX itself listens at all addresses of the host. Raises `BadInput`."""
        super().__init__(listen, clock, random_bytes, seal)
        self._worker = _Worker(_context(options or {}))
        try:
            self._listener = ucx.UCXListener.create(self._worker.ucx, self._port, self._accept, deliver_endpoint=True)
        except ucx.UCXError as error:
            raise BadInput(f"UCX cannot listen at port {self._port}: {error}; give another address") from None
        self.address = t.written_address(self._host, self._listener.port)
        self._leaving: list[_Served] = []  # closed, with unfinished sends
        self._thread.start()

    def wake(self) -> None:
        self._worker.ring()

    def _run(self) -> None:
        due = 0.0
        while not self._is_over:
            self._worker.turn(due - self._clock.monotonic_seconds())
            if self._leaving:
                self._worker.cancel()
            now = self._clock.monotonic_seconds()
            for one in list(self._connections):
                try:
                    is_over = now >= one.deadline or not one.go_on(self._offers, now)
                except (OSError, ucx.UCXError, t.PeerFault):
                    is_over = True
                if is_over:
                    self._drop(one)
            self._leaving = [one for one in self._leaving if not self._has_left(one)]
            due = min((one.deadline for one in self._connections), default=inf)
            due = min(due, self._offers.end_due(now), now + 0.01 if self._leaving else inf)
        for one in list(self._connections):
            self._drop(one)
        while self._leaving:
            self._worker.cancel()
            self._leaving = [one for one in self._leaving if not self._has_left(one)]
        self._listener = None
        self._worker.close()

    def _accept(self, endpoint: Any) -> None:
        """Called by UCX, in the server's thread."""
        if self._has_room():
            self._connections[_Served(endpoint, self._clock.monotonic_seconds() + t.HANDSHAKE_SECONDS)] = None

    def _drop(self, one: _Served) -> None:
        del self._connections[one]
        _end(one.endpoint)
        if not self._has_left(one):
            self._leaving.append(one)

    def _has_left(self, one: _Served) -> bool:
        if not one.is_quiet():
            return False
        one.endpoint = None
        if one.offer is not None:
            self._offers.end(one.offer)
        return True


class _Served(Serving):
    def __init__(self, endpoint: Any, deadline: float) -> None:
        super().__init__(deadline)
        self.endpoint = endpoint
        self._heard = memoryview(bytearray(t.HELLO.size))
        self._hearing: _Underway | None = None
        self._sends: list[_Underway] = []
        self._tag = 0
        self._rings: list[tuple[bytearray, _Underway]] = []  # each with the send that reads it
        self._is_refused = False

    def go_on(self, offers: Offers, now: float) -> bool:
        """Take what UCX has done, and give it more to do. False: the puller is gone."""
        if not self.endpoint.alive:
            return False
        self._note_sent()
        if self._hearing is not None and self._hearing.is_over:
            self._hearing.check()
            said, self._hearing = bytes(self._heard[: self.needs]), None
            if self.offer is not None:
                self.note(said)
            else:
                self._sends.append(_Underway(self.endpoint.stream_send, self.greet(offers, said, now)))
                self._is_refused = self.offer is None  # it may read that until its deadline
                self._tag = _tag(self.offer.token, self.offer.secret) if self.offer is not None else 0
        if self._hearing is None and not self._is_refused:
            self._hearing = _Underway(self.endpoint.stream_recv, self._heard[: self.needs])
        if self.offer is None:
            return True
        while self._has_room() and (found := self.next_frame()) is not None:
            self._send(*found)
        if self.has_all and not self._sends:
            offers.end(self.offer)
        return True

    def is_quiet(self) -> bool:
        """Whether UCX reads and writes none of its memory any more."""
        return all(one.is_over for one in self._sends) and (self._hearing is None or self._hearing.is_over)

    def _note_sent(self) -> None:
        for one in [one for one in self._sends if one.is_over]:
            one.check()
            self._sends.remove(one)

    def _has_room(self) -> bool:
        if self.seal is None:
            return len(self._sends) < 2 * _UNDER_WAY  # a record and a frame each
        return len(self._rings) < 2 or self._rings[0][1].is_over

    def _send(self, record: bytes, frame: memoryview) -> None:
        tag = _tag_of(self._tag, self.number - 1)
        self._sends.append(_Underway(self.endpoint.stream_send, record))
        if self.seal is None:
            self._sends.append(_Underway(self.endpoint.tag_send, frame, tag))
            return
        assert self.offer is not None and self.offer.frames is not None
        most = max(self.offer.frames.frame_bytes) + sealed.TAG_BYTES
        ring = bytearray(most) if len(self._rings) < 2 else self._rings.pop(0)[0]
        message = memoryview(ring)[: len(frame) + sealed.TAG_BYTES]
        sealing = self.seal.sealing(sealed.FRAMES, self.number - 1, record)
        for at in range(0, len(frame), sealed.PIECE_BYTES):
            piece = frame[at : at + sealed.PIECE_BYTES]
            sealing.update_into(piece, message[at : at + len(piece)])
        sealing.finalize()
        message[len(frame) :] = sealing.tag
        self._rings.append((ring, _Underway(self.endpoint.tag_send, message, tag)))
        self._sends.append(self._rings[-1][1])


def _end(endpoint: Any) -> None:
    """At once; requests in flight are cancelled, and report it."""
    with contextlib.suppress(ucx.UCXError):
        endpoint.close_blocking(int(_CLOSE_SECONDS * 1e9), 1)


def _tag(token: bytes, secret: bytes) -> int:
    return int.from_bytes(blake2b(token, key=secret, digest_size=5, person=b"kv-pull-tag").digest(), "big") << 24


def _tag_of(tag: int, number: int) -> Any:
    return ucx.UCXXTag(tag | number & 0xFFFFFF)
