"""The couriers' questions of one tenant, and their answers: tables, without a lock, a clock or a store.

    locate    asked > handed to a courier > answered, or timed out             > a place, for a few seconds
    fetch     asked > handed to a courier > answered, or without a waiter      > reported as over, if it was handed out
    forget    asked > handed to a courier > answered, or given up

The courier that asked last gets the questions. When it disconnects, they go to the next one. The tables are bounded by
questions and by bytes of keys; answers are bounded before anything is built from them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from kvstore.block.account import HitTier, MissReason
from kvstore.protocol import courier as c
from tiering.frame import KEY_BYTES

MOST_QUESTIONS, MOST_KEY_BYTES = c.MAX_QUESTIONS, 16 << 20
"""Open questions, and the bytes of their keys."""
MOST_PLACES, MOST_PLACE_BYTES, PLACE_SECONDS = 256, 16 << 20, 10.0
"""Located places, the bytes of their keys, and how long they are valid."""
REPLY_BYTES = 1 << 20
"""Of keys, in one `QuestionsReply`; it has at least one question."""
FETCHED_TIERS = (HitTier.PEER, HitTier.REMOTE)
UNREACHABLE = MissReason.UNREACHABLE
NO_COURIER = "no courier is there that could ask for it"

Ask = c.LocateQuestion | c.FetchQuestion | c.Forget
Courier = Hashable


@dataclass(eq=False, slots=True)
class OpenQuestion:
    """asker: the wait it belongs to, for the desk. courier: the one it was handed to. is_over: of a fetch, that its
    courier must be told so. answer: None before it, and if there will be none."""

    ask: Ask
    asker: object
    until: float = inf
    courier: Courier | None = None
    is_over: bool = False
    answer: c.QuestionAnswered | None = None

    @property
    def key_bytes(self) -> int:
        return 0 if isinstance(self.ask, c.Forget) else KEY_BYTES * len(self.ask.keys)


@dataclass(frozen=True, slots=True)
class LocatedChain:
    """A chain with blocks elsewhere: those of `keys` behind the first `present`."""

    question: c.LocateQuestion
    blocks: int
    until: float


class TenantQuestions:
    """Of one tenant. Callers hold the desk's lock; `now`: monotonic seconds."""

    def __init__(self, numbers: Iterator[int]) -> None:
        """numbers: for its questions, never reused."""
        self._numbers = numbers
        self._open: dict[int, OpenQuestion] = {}  # one that is over stays until that is reported to its courier
        self._places: OrderedDict[int, LocatedChain] = OrderedDict()
        self._couriers: dict[Courier, None] = {}  # the one that asked last at the end
        self._is_deaf = False  # a question timed out before the courier asked for it

    def __len__(self) -> int:
        return len(self._open)

    @property
    def courier(self) -> Courier | None:
        """The courier that gets the questions; None if there is none, or if it was notified and has not asked."""
        return next(reversed(self._couriers), None) if not self._is_deaf else None

    @property
    def couriers(self) -> int:
        """Connected couriers that have asked."""
        return len(self._couriers)

    def number(self) -> int:
        return next(self._numbers)

    def add(self, one: OpenQuestion) -> bool:
        """False if there are too many."""
        key_bytes = sum(other.key_bytes for other in self._open.values())
        if len(self._open) >= MOST_QUESTIONS or key_bytes + one.key_bytes > MOST_KEY_BYTES:
            return False
        self._open[one.ask.number] = one
        return True

    def take(self, courier: Courier) -> c.QuestionsReply:
        """Questions for a courier, each once; from now on they belong to it."""
        self._couriers.pop(courier, None)
        self._couriers[courier] = None
        self._is_deaf = False
        asked: list[Ask] = []
        size, unasked = 0, deque(one for one in self if one.courier is None)
        while unasked and (not asked or size < REPLY_BYTES):
            one = unasked.popleft()
            one.courier = courier
            asked.append(one.ask)
            size += one.key_bytes
        over = [one for one in self if one.is_over and one.courier is courier]
        for one in over:
            del self._open[one.ask.number]
        return c.QuestionsReply(
            [one for one in asked if isinstance(one, c.LocateQuestion)],
            [one for one in asked if isinstance(one, c.FetchQuestion)],
            [one for one in asked if isinstance(one, c.Forget)],
            [one.ask.number for one in over],
            bool(unasked),
        )

    def answered(self, courier: Courier, answer: c.QuestionAnswered) -> OpenQuestion | None:
        """The question that this answers; None if it was not the courier's, or is over."""
        one = self._open.get(answer.number)
        if one is None or one.courier is not courier or one.is_over:
            return None
        one.answer = answer
        return self._open.pop(answer.number)

    def no_more(self, one: OpenQuestion) -> None:
        """A question is given up; if it is a fetch, its courier gets a report."""
        if self._open.get(one.ask.number) is not one or one.is_over:
            return
        one.is_over = one.courier is not None and isinstance(one.ask, c.FetchQuestion)
        if not one.is_over:
            del self._open[one.ask.number]

    def expire(self, now: float) -> list[OpenQuestion]:
        """The questions that timed out."""
        late = [one for one in self if one.until <= now]
        for one in late:
            self._is_deaf |= one.courier is None
            del self._open[one.ask.number]
        return late

    def left(self, courier: Courier) -> list[OpenQuestion]:
        """A courier disconnected: its questions go to another courier; without one they all end, and are returned."""
        if courier not in self._couriers:
            return []
        was_latest = next(reversed(self._couriers)) is courier
        del self._couriers[courier]
        self._is_deaf &= not was_latest
        for one in self:
            if one.courier is courier:
                one.courier = None
                if one.is_over:
                    del self._open[one.ask.number]
        if self._couriers:
            return []
        ended, self._open = list(self), {}
        return ended

    # Places ----------------------------------------------------------------------------------------------------------

    def locate(self, question: c.LocateQuestion, answer: c.QuestionAnswered | None, now: float) -> c.Located:
        """A courier's answer, checked; its place is kept for `PLACE_SECONDS`."""
        blocks = min(answer.blocks, len(question.keys)) if answer is not None and answer.tier in FETCHED_TIERS else 0
        if answer is None or blocks <= question.present:
            reason, detail = (answer.reason, answer.detail) if answer is not None else (None, "")
            return c.Located(0, question.present, reason=reason, detail=detail)
        self._places[question.number] = LocatedChain(question, blocks, now + PLACE_SECONDS)
        while self._place_bytes > MOST_PLACE_BYTES or len(self._places) > MOST_PLACES or self._first_until <= now:
            self._places.popitem(last=False)
        milliseconds = answer.milliseconds if answer.milliseconds >= 0 else inf  # also false for NaN
        told = answer.where, answer.reason, answer.detail
        return c.Located(question.number, blocks, answer.tier, milliseconds, *told)

    @property
    def _place_bytes(self) -> int:
        return KEY_BYTES * sum(len(one.question.keys) for one in self._places.values())

    @property
    def _first_until(self) -> float:
        return next(iter(self._places.values())).until

    def place(self, number: int, namespace: int, now: float) -> LocatedChain | None:
        """None if it is unknown or too old."""
        found = self._places.get(number)
        return found if found is not None and found.until > now and found.question.namespace == namespace else None

    def forget(self) -> None:
        """Drop all places."""
        self._places.clear()

    def check(self) -> None:
        """Verify that the tables agree, and bounds hold."""
        assert all(number == one.ask.number for number, one in self._open.items())
        assert sum(one.key_bytes for one in self._open.values()) <= MOST_KEY_BYTES
        assert len(self._open) <= MOST_QUESTIONS and len(self._places) <= MOST_PLACES
        assert self._place_bytes <= MOST_PLACE_BYTES
        assert all(one.courier in self._couriers for one in self._open.values() if one.courier is not None)
        assert self._couriers or not self._open, "what no courier can answer is not asked"

    def __iter__(self) -> Iterator[OpenQuestion]:
        return iter(list(self._open.values()))


def last_of(keys: Sequence[bytes], wanted: bytes) -> int:
    """The number of blocks in a chain up to that one, itself included; 0 if it is not in it."""
    try:
        return len(keys) - next(at for at, key in enumerate(reversed(keys)) if key == wanted)
    except StopIteration:
        return 0
