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
from kvstore.service.bell import BellEnd
from kvstore.service.wire import Answered, Clock, TooLate, TooLong, TooMuch, Wire
from tiering.errors import TierError
from tiering.extents import MappedExtent
from tiering.tier import SLOT_BITS, FrameSpan

A = TypeVar("A")
R = TypeVar("R")
Steps = Generator[m.Verb, Answered, R]
"""Questions of one verb, each answered before the next one, and what they lead to."""
_OTHER_KIND = "an answer of another kind"


class Away(Exception):
    """A question that was not answered, and as what miss that counts."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Run:
    """One connection. Thread-safe."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.name = wire.welcome.run
        self.max_keys = min(m.MAX_KEYS, max(1, wire.welcome.max_keys))
        """Blocks of one chain that may be asked for."""
        self.may_skip = wire.welcome.max_keys > m.OLDER_MAX_KEYS
        """Whether the sidecar knows `Reserve.skipped`."""
        self._long_until = 0.0  # when all long chains that were asked for may have been looked at
        self.namespaces: dict[int, int] = {}  # this client's number -> the sidecar's
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

    def answer(self, verb: m.Verb, seconds: float) -> Answered:
        """Ask, and wait. Raises `Away`."""
        return _named(lambda: self.wire.call(verb, seconds))

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
                yield from self.mapping(reply.places, writable=False)
            except BaseException:
                self.let_go(reply.lease)
                raise
        return reply

    def attach(self, lease: int, places: Sequence[Sequence[int]], seconds: float, map_seconds: float) -> bool:
        """Hold a lease of the session too; False where it is none, or not any more. Raises `Away`."""
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
        except BaseException:
            self.let_go(lease)
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

    def mapping(self, places: Sequence[Sequence[int]], *, writable: bool) -> Steps[None]:
        """Have the extents of these places mapped, those that are there still."""
        table = self.writable if writable else self.readable
        missing = sorted({place >> SLOT_BITS for column in places for place in column} - table.keys())
        for first in range(0, len(missing), m.MAX_EXTENTS):
            answered = yield m.Extents(missing[first : first + m.MAX_EXTENTS], writable)
            if not isinstance(answered.answer, m.ExtentsReply):
                raise Away(MissReason.UNREACHABLE, "no memory was handed over")
            left = deque(answered.descriptors)
            try:
                for extent in answered.answer.extents:
                    mapped = MappedExtent(left.popleft(), extent.size_bytes, writable=writable)
                    table[extent.number] = mapped, extent.frame_bytes
            except TierError as error:
                raise Away(MissReason.UNREACHABLE, str(error)) from None
            finally:
                for descriptor in left:
                    os.close(descriptor)

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
                    raise Away(MissReason.DEADLINE, "the sidecar did not answer in time")
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
        return _named(lambda: self._run.wire.submit(verb))


def taken(answered: Answered, kind: type[A]) -> A:
    """The answer, if it is of that kind. Raises `Away`."""
    answer = answered.answer
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, m.Failed):
        reason = MissReason.DISABLED if answer.fault is m.Fault.CLOSED else MissReason.UNREACHABLE
        raise Away(reason, answer.text)
    raise Away(MissReason.UNREACHABLE, _OTHER_KIND)


def spans(table: Mapping[int, tuple[MappedExtent, int]], places: Sequence[int]) -> list[FrameSpan]:
    """The bytes at places, up to the first whose extent is not mapped."""
    found = []
    for place in places:
        known = table.get(place >> SLOT_BITS)
        if known is None:
            break
        extent, frame_bytes = known
        found.append(extent.frame(place & (1 << SLOT_BITS) - 1, frame_bytes))
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
        raise Away(MissReason.UNREACHABLE, "the sidecar does not read what it is asked") from None
    except Unreachable as error:
        raise Away(MissReason.UNREACHABLE, str(error)) from None
