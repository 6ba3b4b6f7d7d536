"""Puts in progress, and who fills what of a collective one: blocks whose parts several processes hold, stored as one.

Each rank of a tensor-parallel engine has its own heads of every layer, and a block is readable with all of them only.

    reserve, first participant      rows, and slots for all parts: an ordinary reservation
    reserve, each of the others     the same answer, with the slots of that participant's own parts
    commit                          each of its own parts
    the last commit of the last     the blocks are visible

A participant's parts are its *share*: a part is in one share only, so no slot ever has two writers. A share is over
once all its parts are committed, or when its process aborts, or is gone and maps nothing any more. A put is over when
it is visible, or lost: a share was given up early, a process is gone, or its time has passed. A lost put never becomes
visible, and its slots stay taken until the last share is over.

A participant that reserves after that gets the put's result and no slots: the others would not fill their parts again.

This file only keeps count; `reservations` reserves, publishes and frees, and holds the lock meanwhile.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import msgspec

from kvstore.block.account import HitTier, MissReason
from kvstore.protocol.messages import ReserveReply

MAX_UNDER_WAY = 256
"""Collective puts of one session at a time; a further one is refused with `quota`."""
ENDED_KEPT, ALL_ENDED_KEPT = 4096, 32_768
"""How many results are remembered, for one session and for all."""
ENDED_SECONDS = 120.0
"""For how long: a participant that comes later begins a new put, alone."""
ANSWER_SECONDS = 3.0
"""How long the other participants wait for the first one's answer."""

Name = tuple[bytes, int, str]
"""Session, namespace, and the name that the session's processes agreed on."""
Chain = tuple[int, int, bytes]
"""The first block, the number of blocks up to the end, and the last key, which stands for all before it."""


@dataclass(slots=True, kw_only=True)
class SlotRequest:
    """Blocks that need slots in DRAM: for a promotion or, as a `ReservationRecord`, for a put. `Room` finds them.

    rows: the blocks, in chain order. places: of each part, the slots of the first `filled` blocks. cancelled: it needs
    no more. detail: why it got no more. room_until: until when it waits for room, if it set a limit. is_collective:
    other processes wait for its answer. is_fetched: a courier fills it.
    """

    is_put: ClassVar[bool] = False
    namespace: int
    rows: list[int] = field(default_factory=list)
    places: list[list[int]]
    filled: int = 0
    cancelled: bool = False
    detail: str = ""
    room_until: float | None = None
    is_collective: bool = False
    is_fetched: bool = False


@dataclass(slots=True, kw_only=True)
class ReservationRecord(SlotRequest):
    """A put in progress. Its blocks become visible one after another, each when all its parts are committed and its
    parent is visible.

    rows, parents, indexes: the blocks to fill, in chain order. done: of each part, the committed blocks.

    repairs: lost rows among them, pinned while the reservation lives. abandoned_slots: places of a reservation that
    ended while a producer may still write. depends_on: reservations of the same session whose blocks these follow, and
    which must become visible first. is_ending: it is being aborted. is_cancelling: its producer was lost, and writes no
    more of it. fetched_from: where a courier has its blocks from.
    """

    is_put: ClassVar[bool] = True
    number: int
    priority: int
    expires_at: int
    done: list[int]
    parents: list[bytes] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    repairs: set[int] = field(default_factory=set)
    published: int = 0
    abandoned_slots: list[int] = field(default_factory=list)
    depends_on: set[int] = field(default_factory=set)
    is_ending: bool = False
    is_cancelling: bool = False
    fetched_from: HitTier = HitTier.PEER

    @property
    def parts(self) -> int:
        return len(self.done)


@dataclass(eq=False, slots=True)
class CollectivePut:
    """One put. answer: the first participant's, with all places; None until known. unclaimed: parts in no share yet.
    shares: numbers of the open ones. ending: the result, once it is over."""

    name: Name
    chain: Chain
    record: ReservationRecord | None = None
    answer: ReserveReply | None = None
    unclaimed: set[int] = field(default_factory=set)
    shares: set[int] = field(default_factory=set)
    expires_at: float = 0.0
    ending: ReserveReply | None = None


@dataclass(frozen=True, slots=True)
class Participant:
    """The parts of a put that one process fills."""

    put: CollectivePut
    record: ReservationRecord
    parts: tuple[int, ...]

    @property
    def done(self) -> int:
        """Blocks committed in all of its parts."""
        return min([self.record.done[part] for part in self.parts])


@dataclass(frozen=True, slots=True)
class _Ended:
    chain: Chain
    ending: ReserveReply
    until: float


class CollectivePuts:
    """All collective puts of a store."""

    def __init__(self, seconds: float) -> None:
        """seconds: how long a put may take after its first answer."""
        self._seconds = seconds
        self._puts: dict[Name, CollectivePut] = {}  # not over yet
        # Puts that have an answer, the first to expire in front.
        self._due: OrderedDict[Name, CollectivePut] = OrderedDict()
        self.due_at = inf  # when the first expires; may be read without the lock
        self._under_way: Counter[bytes] = Counter()
        self._of_record: dict[
            int, CollectivePut
        ] = {}  # by reservation, while it has slots: until the put is visible or freed
        self.participants: dict[int, Participant] = {}  # by the share's number
        self._ended: OrderedDict[Name, _Ended] = OrderedDict()
        self._ended_of: dict[bytes, deque[Name]] = {}

    # Coming --------------------------------------------------------------------------------------------------------

    def find(self, name: Name, chain: Chain, now: float) -> CollectivePut | ReserveReply | None:
        """The put of that name, or its result; None if no participant has reserved yet."""
        put = self._puts.get(name)
        if put is not None:
            return put
        self._forget(now)
        ended = self._ended.get(name)
        return _told(chain, ended.chain, ended.ending) if ended is not None else None

    def begin(self, name: Name, chain: Chain, now: float) -> CollectivePut | ReserveReply:
        """The first participant reserves. All get the same answer, also if the session has too many."""
        if self._under_way[name[0]] >= MAX_UNDER_WAY:
            refused = ReserveReply(0, 0, stopped_at=0, reason=MissReason.QUOTA)
            self._remember(name, _Ended(chain, refused, now + ENDED_SECONDS))
            return refused
        put = self._puts[name] = CollectivePut(name, chain)
        self._under_way[name[0]] += 1
        return put

    def reserved(self, put: CollectivePut, record: ReservationRecord) -> None:
        """Attach the put's reservation, whose slots come next."""
        put.record = record
        self._of_record[record.number] = put

    def answered(self, put: CollectivePut, reply: ReserveReply, now: float) -> None:
        """Record the first participant's answer, which is the others' too."""
        put.answer = reply
        if not reply.reservation:
            if put.record is not None:
                self._of_record.pop(put.record.number, None)
            self._end(put, reply, now)
        elif put.ending is None:
            put.unclaimed = set(range(len(reply.places)))
            put.expires_at = now + self._seconds
            self._due[put.name] = put
            self._set_due()

    def join(
        self, put: CollectivePut, chain: Chain, parts: Sequence[int], new_number: Callable[[], int]
    ) -> ReserveReply:
        """A share of those of the parts that are unclaimed, under a number of its own; or why there is none."""
        if chain != put.chain or put.ending is not None:
            assert put.answer is not None
            return _told(chain, put.chain, put.ending or put.answer)
        reply, record = put.answer, put.record
        assert reply is not None and record is not None and reply.reservation == record.number
        mine = tuple(part for part in parts if part in put.unclaimed)
        if not mine:
            return ReserveReply(0, reply.present, stopped_at=reply.blocks[0], reason=MissReason.IN_FLIGHT)
        put.unclaimed.difference_update(mine)
        number = new_number()
        put.shares.add(number)
        self.participants[number] = Participant(put, record, mine)
        places = tuple([*column] if part in mine else [] for part, column in enumerate(reply.places))
        return msgspec.structs.replace(reply, reservation=number, places=places)

    # Going on ------------------------------------------------------------------------------------------------------

    def let_go(self, number: int) -> Participant:
        """End a share: its process no longer writes into its slots."""
        share = self.participants.pop(number)
        share.put.shares.discard(number)
        return share

    def in_flight_rows(self, put: CollectivePut) -> dict[int, int]:
        """Rows of other puts of the same session and namespace, with their reservations. A put may follow these: its
        own processes are storing them."""
        rows: dict[int, int] = {}
        for other in self._due.values():
            if other.name[:2] == put.name[:2] and other.record is not None:
                rows.update(dict.fromkeys(other.record.rows[other.record.published :], other.record.number))
        return rows

    # Ending --------------------------------------------------------------------------------------------------------

    def visible(self, record: ReservationRecord, now: float) -> bool:
        """All of a reservation is visible; returns whether it was a collective one."""
        put = self._of_record.pop(record.number, None)
        if put is None:
            return False
        assert put.answer is not None and not put.shares, "what is visible was committed by all"
        stopped_at, reason = put.answer.stopped_at, put.answer.reason
        held = put.chain[1] if stopped_at is None else stopped_at
        in_flight = put.answer.in_flight
        self._end(put, ReserveReply(0, held, stopped_at=stopped_at, reason=reason, in_flight=in_flight), now)
        return True

    def lost(self, record: ReservationRecord, now: float) -> bool:
        """A reservation is given up for all; returns whether it was a collective one without open shares."""
        put = self._of_record.get(record.number)
        if put is None:
            return False
        present = put.answer.present if put.answer is not None else 0
        stopped_at = record.indexes[record.published] if record.published < len(record.indexes) else present
        ending = ReserveReply(0, present, stopped_at=stopped_at, reason=MissReason.DISABLED)
        self._end(put, ending, now)
        return not put.shares

    def freed(self, record: ReservationRecord) -> None:
        """The slots of a lost put were freed."""
        self._of_record.pop(record.number, None)

    def is_written(self, record: ReservationRecord) -> bool:
        """Whether a participant may still write into the slots of a lost put."""
        return bool(self._of_record[record.number].shares)

    def expire_due(self, now: float) -> Iterator[ReservationRecord]:
        """Expired puts; the caller gives each one up before it asks for the next."""
        while self._due:
            put = next(iter(self._due.values()))
            if put.expires_at > now:
                return
            assert put.record is not None
            yield put.record

    def _set_due(self) -> None:
        self.due_at = next(iter(self._due.values())).expires_at if self._due else inf

    def _end(self, put: CollectivePut, ending: ReserveReply, now: float) -> None:
        if put.ending is not None:
            return
        put.ending = ending
        del self._puts[put.name]
        if self._due.pop(put.name, None) is not None:
            self._set_due()
        session = put.name[0]
        self._under_way[session] -= 1
        if not self._under_way[session]:
            del self._under_way[session]
        self._remember(put.name, _Ended(put.chain, ending, now + ENDED_SECONDS))

    def _remember(self, name: Name, ended: _Ended) -> None:
        of_session = self._ended_of.setdefault(name[0], deque())
        if len(of_session) == ENDED_KEPT:
            del self._ended[of_session.popleft()]
        elif len(self._ended) == ALL_ENDED_KEPT:
            self._forget_oldest()
        self._ended[name] = ended
        self._ended_of.setdefault(name[0], of_session).append(name)

    def _forget(self, now: float) -> None:
        while self._ended and next(iter(self._ended.values())).until <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        name, _ = self._ended.popitem(last=False)
        of_session = self._ended_of[name[0]]
        assert of_session.popleft() == name, "both are in the order in which they ended"
        if not of_session:
            del self._ended_of[name[0]]

    # Facts ---------------------------------------------------------------------------------------------------------

    def under_way(self) -> dict[bytes, int]:
        """How many collective puts of each session have slots, lost ones that may still be written into included."""
        return Counter(put.name[0] for put in self._of_record.values())

    def check(self, reservations: Mapping[int, ReservationRecord]) -> None:
        """Verify that these tables and the store's reservations agree, and that no part has two writers."""
        for put in self._of_record.values():
            record = put.record
            assert record is not None and reservations.get(record.number) is record
            assert record.cancelled == (put.ending is not None)
            assert not record.cancelled or put.shares, "slots without a writer are freed"
            assert (put.name in self._due) == (put.answer is not None and put.ending is None)
        for number, share in self.participants.items():
            assert number in share.put.shares and self._of_record[share.record.number] is share.put
            assert share.done < share.record.filled, "it was over with its last block"
            assert not share.put.unclaimed.intersection(share.parts)
        for put in {share.put for share in self.participants.values()}:
            parts = [part for number in put.shares for part in self.participants[number].parts]
            assert len(parts) == len(set(parts)), "a part has one writer"
        for record in reservations.values():
            depends_on = [reservations[number] for number in record.depends_on]
            assert not record.depends_on or record.number in self._of_record
            assert not any(base.cancelled for base in depends_on), "what follows lost blocks is lost with them"
            assert not depends_on or not (record.cancelled or record.published), "what is before it comes first"
        assert self._under_way == Counter(put.name[0] for put in self._puts.values())
        assert self.due_at == min((put.expires_at for put in self._due.values()), default=inf)
        assert sum(map(len, self._ended_of.values())) == len(self._ended) <= ALL_ENDED_KEPT


def chain_of(keys: Sequence[bytes], first_block: int) -> Chain:
    """What all participants must agree on."""
    return first_block, len(keys), keys[-1] if keys else b""


def _told(asked: Chain, known: Chain, reply: ReserveReply) -> ReserveReply:
    """The put's answer, unless this participant asked for other blocks under the same name."""
    return reply if asked == known else ReserveReply(0, 0, stopped_at=0, reason=MissReason.DIVERGED)
