"""What holds on one connection to the sidecar: numbers that it gave, leases, memory as it is mapped here (floor 2).

A verb that takes several questions (a lease, then the memory that it is in) is written as a generator of them. Whoever
waits has it walked through by `walk`; whoever must not wait polls an `Asked`, which goes on as answers come.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from kvstore.door import LeaseReply, ReserveReply
from kvstore.errors import Unreachable
from kvstore.miss import MissReason
from kvstore.pending import BLOCK_SECONDS, MAX_QUEUED_SECONDS, SHORT_BLOCKS
from kvstore.service import messages as m
from kvstore.service.answers import check_answer
from kvstore.service.bell import BellEnd
from kvstore.service.breaker import Breaker
from kvstore.service.wire import Answered, Clock, TooLate, TooLong, TooMuch, Wire
from tiering.errors import TierError
from tiering.extents import MappedExtent
from tiering.frame import frame_bytes
from tiering.tier import SLOT_BITS, FrameSpan

A = TypeVar("A")
R = TypeVar("R")
Steps = Generator[m.Verb, Answered, R]
"""Questions of one verb, each answered before the next one, and what they lead to."""
_OTHER_KIND = "an answer of another kind"
QUICK_SECONDS = 0.04
"""Whoever waits for less says more of himself than of the sidecar where there is no answer."""
QUICK_KEYS = 1000
"""A look-up of more may take a sidecar milliseconds, in a thread that it has one of."""


REASON_OF_FAULT = {
    m.Fault.VERSION: MissReason.UNREACHABLE,  # these two end the connection
    m.Fault.MALFORMED: MissReason.UNREACHABLE,
    m.Fault.BAD_INPUT: MissReason.UNSUPPORTED,
    m.Fault.BUSY: MissReason.BUSY,
    m.Fault.CLOSED: MissReason.DISABLED,
}
"""What a request that a sidecar answered, and did not serve, counts as. Total."""


class Away(Exception):
    """A question that was not answered, and as what miss that counts."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Run:
    """One connection. Thread-safe."""

    def __init__(self, wire: Wire, clock: Clock, silent: Callable[[], bool] = lambda: False) -> None:
        """silent: has a ping sent soon, without waiting for it; whether there is somebody to send it."""
        self.wire = wire
        self.breaker = Breaker()
        self._clock = clock
        self._silent = silent
        self.name = wire.welcome.run
        self.max_keys = min(m.MAX_KEYS, max(1, wire.welcome.max_keys))
        """Blocks of one chain that may be asked for."""
        self.may_skip = wire.welcome.max_keys > m.OLDER_MAX_KEYS
        """Whether the sidecar knows `Reserve.skipped`."""
        self._long_until = 0.0  # when all long chains that were asked for may have been looked at
        self.namespaces: dict[int, int] = {}  # this client's number -> the sidecar's
        self._frames: dict[int, tuple[int, ...]] = {}  # by the sidecar's number: bytes of a frame of each part
        self.readable: dict[int, tuple[MappedExtent, int]] = {}  # by number: the extent, and the bytes of its frames
        self.writable: dict[int, tuple[MappedExtent, int]] = {}
        self.reservations: dict[int, ReserveReply] = {}
        self.bell: BellEnd | None = None  # closed by whoever listens at it
        self._holding = threading.Lock()
        self._held: dict[int, int] = {}  # by the sidecar's number of a lease: how often it is held here

    def close(self) -> None:
        """Hang up, and let go of the memory, but for what somebody is reading at the moment."""
        self.wire.close()
        self.readable.clear()
        self.writable.clear()

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        self._holding = threading.Lock()
        self.readable.clear()
        self.writable.clear()
        if self.bell is not None:
            self.bell.close()
        self.wire.forget()

    def settle(self) -> None:
        """Undo what came too late. Waits for nothing."""
        for undo in self.wire.too_late():
            if not isinstance(undo, m.Release):
                self.post(undo)
                continue
            with self._holding:
                ended = [lease for lease in undo.leases if lease not in self._held]
                if ended:
                    self.post(m.Release(ended))

    def allowance(self, blocks: int, now: float) -> float:
        """For how many seconds an answer about so many blocks is waited for, beside what is given for any: messages of
        a connection are taken in their order, and others may have asked for long chains."""
        queued = min(max(0.0, self._long_until - now), MAX_QUEUED_SECONDS)
        if blocks > SHORT_BLOCKS:
            self._long_until = now + queued + BLOCK_SECONDS * blocks
        return queued + BLOCK_SECONDS * blocks

    # Asking --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `Away` where the sidecar is silent."""
        if self.breaker.is_open:
            raise Away(MissReason.UNREACHABLE, self.breaker.detail(self._clock.monotonic_seconds()))

    def was_late(self, asked_at: float, *, is_quick: bool) -> None:
        """A request is due. Whether that was the request or the sidecar, a ping tells."""
        now, breaker = self._clock.monotonic_seconds(), self.breaker
        if breaker.was_late(asked_at, self.wire.heard_at, now, is_quick=is_quick) and not self._silent():
            breaker.answered()  # nobody pings, so that it would never be asked again

    def answer(self, verb: m.Verb, seconds: float) -> Answered:
        """Ask, and wait. Raises `Away`."""
        self.check()
        asked_at = self._clock.monotonic_seconds()
        try:
            answered = _named(lambda: self.wire.call(verb, seconds))
        except Away as away:
            if away.reason is MissReason.DEADLINE:
                self.was_late(asked_at, is_quick=is_quick(verb) and seconds >= QUICK_SECONDS)
            raise
        return self.believed(verb, answered)

    def believed(self, verb: m.Verb, answered: Answered) -> Answered:
        """An answer that can be one to that question. Raises `Away`, and undoes any other."""
        frames = self._frames.get(verb.namespace) if isinstance(verb, m.Lease | m.Reserve) else None
        try:
            check_answer(verb, answered.answer, len(frames) if frames is not None else None)
        except ValueError as error:
            self.wire.disown(answered)
            self.settle()
            raise Away(MissReason.UNREACHABLE, f"the sidecar answered what cannot be: {error}") from None
        if isinstance(verb, m.OpenNamespace) and isinstance(answered.answer, m.Granted):
            grant = answered.answer.grant
            self._frames[grant.number] = tuple(frame_bytes(max(0, size)) for size in grant.payload_bytes)
        return answered

    def ask(self, verb: m.Verb, kind: type[A], seconds: float) -> A:
        """Ask for an answer of a kind. Raises `Away`."""
        return taken(self.answer(verb, seconds), kind)

    def post(self, verb: m.Verb) -> None:
        """Ask, and want no answer. Waits for nothing."""
        try:
            self.wire.post(verb)
        except Unreachable:
            pass

    def walk(self, steps: Steps[R], first_seconds: float, further_seconds: float) -> R:
        """Ask, and wait, question by question. Raises `Away`."""
        seconds = first_seconds
        try:
            verb = next(steps)
            while True:
                verb = steps.send(self.answer(verb, seconds))
                seconds = further_seconds
        except StopIteration as done:
            result: R = done.value
            return result
        finally:
            steps.close()

    # Leases --------------------------------------------------------------------------------------------------------

    def leasing(self, verb: m.Lease) -> Steps[LeaseReply]:
        """A lease, and the memory that it is in. Whoever stops half way holds nothing."""
        reply = taken((yield verb), m.Leased).reply
        if reply.lease:
            with self._holding:
                self._held[reply.lease] = self._held.get(reply.lease, 0) + 1
            try:
                yield from self.mapping(reply.places, writable=False, namespace=verb.namespace)
            except BaseException:
                self.let_go(reply.lease)
                raise
        return reply

    def attach(self, lease: int, places: Sequence[Sequence[int]], seconds: float, map_seconds: float) -> bool:
        """Hold a lease of the session too; False where it is none, or not any more. Raises `Away`."""
        self.check()
        asked_at = self._clock.monotonic_seconds()
        with self._holding:  # so that no release overtakes it
            self._held[lease] = self._held.get(lease, 0) + 1
            number: int | None = None
            try:
                number = _named(lambda: self.wire.submit(m.Attach([lease])))
            finally:
                if number is None:
                    self._count_down(lease)
        try:
            answered = _named(lambda: self.wire.wait(number, seconds))
            is_held = lease in taken(answered, m.Attached).leases
            if is_held:
                self.walk(self.mapping(places, writable=False), map_seconds, map_seconds)
        except BaseException as error:
            self.let_go(lease)
            if isinstance(error, Away) and error.reason is MissReason.DEADLINE:
                self.was_late(asked_at, is_quick=True)
            raise
        if not is_held:
            self.let_go(lease)
        return is_held

    def let_go(self, lease: int) -> None:
        """Hold it once less. Waits for nothing."""
        with self._holding:
            if not self._count_down(lease):
                self.post(m.Release([lease]))

    def _count_down(self, lease: int) -> int:
        left = self._held.pop(lease, 0) - 1
        if left > 0:
            self._held[lease] = left
        return left

    # Memory --------------------------------------------------------------------------------------------------------

    def mapping(self, places: Sequence[Sequence[int]], *, writable: bool, namespace: int | None = None) -> Steps[None]:
        """Have the extents of these places mapped, those that are there still. namespace: whose parts are in them."""
        table = self.writable if writable else self.readable
        missing = sorted({place >> SLOT_BITS for column in places for place in column} - table.keys())
        for first in range(0, len(missing), m.MAX_EXTENTS):
            answered = yield m.Extents(missing[first : first + m.MAX_EXTENTS], writable)
            handed_over = taken(answered, m.ExtentsReply)
            left = deque(answered.descriptors)
            try:
                for extent in handed_over.extents:
                    mapped = MappedExtent(left.popleft(), extent.size_bytes, writable=writable)
                    table[extent.number] = mapped, extent.frame_bytes
            except TierError as error:
                raise Away(MissReason.UNREACHABLE, str(error)) from None
            finally:
                for descriptor in left:
                    os.close(descriptor)
        frames = self._frames.get(namespace, ()) if namespace is not None else ()
        for column, size in zip(places, frames, strict=False):
            here = [table[extent] for extent in {place >> SLOT_BITS for place in column} if extent in table]
            if any(found != size for _, found in here):
                raise Away(MissReason.UNREACHABLE, "the sidecar answered what cannot be: frames of another size")

    def unmap(self, numbers: Iterable[int]) -> None:
        """These were given back; who still reads in one keeps it for as long."""
        for number in numbers:
            self.readable.pop(number, None)
            self.writable.pop(number, None)


class Asked(Generic[R]):
    """`Submitted`: a verb whose answers are polled for. Belongs to one thread at a time."""

    def __init__(
        self,
        run: Run,
        steps: Steps[R],
        clock: Clock,
        seconds: float,
        further_seconds: float,
        missed: Callable[[MissReason, str], R],
        forsaken: deque[Asked[R]],
    ) -> None:
        """Ask the first question. further_seconds: for each further one, whenever it was polled for. missed: the answer
        where there is none. forsaken: to be cancelled by somebody else. Raises `Away`.
        """
        self._run = run
        self._steps = steps
        self._clock = clock
        self._deadline = clock.monotonic_seconds() + seconds
        self._further_seconds = further_seconds
        self._missed = missed
        self._forsaken = forsaken
        self._number = self._submit(next(steps))

    def poll(self) -> R | None:
        """The answer, once it is there; after the deadline a miss."""
        try:
            while True:
                answered = _named(lambda: self._run.wire.poll(self._number))
                if answered is None:
                    if self._clock.monotonic_seconds() < self._deadline:
                        return None
                    self._run.was_late(self._asked_at, is_quick=self._is_quick)
                    raise Away(MissReason.DEADLINE, "the sidecar did not answer in time")
                answered = self._run.believed(self._verb, answered)
                self._number = self._submit(self._steps.send(answered))
                self._deadline = max(self._deadline, self._clock.monotonic_seconds() + self._further_seconds)
        except StopIteration as done:
            result: R = done.value
            return result
        except Away as away:
            self.cancel()
            return self._missed(away.reason, away.detail)

    def cancel(self) -> None:
        """Whatever comes is given back."""
        self._run.wire.cancel(self._number)
        self._steps.close()
        self._run.settle()

    def forsake(self) -> None:
        """A finalizer calls this: somebody cancels it soon."""
        self._forsaken.append(self)

    def _submit(self, verb: m.Verb) -> int:
        self._run.check()
        self._asked_at, self._is_quick, self._verb = self._clock.monotonic_seconds(), is_quick(verb), verb
        return _named(lambda: self._run.wire.submit(verb))


def is_quick(verb: m.Verb) -> bool:
    """Whether a sidecar that runs answers this at once, whatever it is doing otherwise."""
    if isinstance(verb, m.Match):
        return len(verb.keys) <= QUICK_KEYS
    return isinstance(verb, m.Ping | m.Attach)


def taken(answered: Answered, kind: type[A]) -> A:
    """The answer, if it is of that kind. Raises `Away`."""
    answer = answered.answer
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, m.Failed):
        raise Away(REASON_OF_FAULT[answer.fault], answer.text)
    raise Away(MissReason.UNREACHABLE, _OTHER_KIND)


def spans(table: Mapping[int, tuple[MappedExtent, int]], places: Sequence[int]) -> list[FrameSpan]:
    """The bytes at places, up to the first whose extent is not mapped, or has no such slot."""
    found = []
    for place in places:
        known = table.get(place >> SLOT_BITS)
        if known is None:
            break
        extent, size = known
        slot = place & (1 << SLOT_BITS) - 1
        if (slot + 1) * size > len(extent.view):
            break
        found.append(extent.frame(slot, size))
    return found


def _named(ask: Callable[[], R]) -> R:
    """What came of a question, or `Away` with the reason."""
    try:
        return ask()
    except TooLate:
        raise Away(MissReason.DEADLINE, "the sidecar did not answer in time") from None
    except TooLong as error:
        raise Away(MissReason.UNSUPPORTED, f"a message of {error} bytes, which is too long") from None
    except TooMuch:
        raise Away(MissReason.BUSY, "the sidecar has not read yet what was asked before") from None
    except Unreachable as error:
        raise Away(MissReason.UNREACHABLE, str(error)) from None
