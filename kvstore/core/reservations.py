"""Puts: blocks are reserved, filled by their producers, committed and published; or aborted, or cancelled.

    reserve   rows for what is missing, then slots: free ones, or those that `Room` finds
    commit    a part's headers are sealed; a block is published when all its parts are, and its parent is visible
    abort     the producer writes no more: what is not visible is given up
    cancel    the producer is unreachable and may still write: rows go now, slots once it is known to have stopped

Long puts are ended in pieces, with the lock free in between.

A put is *collective* where several processes hold the parts of its blocks, as each rank of a tensor-parallel engine has
its own heads of every layer: a block is readable with all of them only.

    reserve, first participant      rows, and slots for all parts: an ordinary reservation
    reserve, each of the others     the same answer, with the slots of that participant's own parts
    commit                          each of its own parts
    the last commit of the last     the blocks are visible

A participant's parts are its *share*: a part is in one share only, so no slot ever has two writers. A share is over
once all its parts are committed, or when its process aborts, or is gone and maps nothing any more. A put is over when
it is visible, or lost: a share was given up early, a process is gone, or its time has passed. A lost put never becomes
visible, and its slots stay taken until the last share is over. A participant that reserves after that gets the put's
result and no slots: the others would not fill their parts again. `CollectivePuts` keeps count of this.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

import msgspec

from kvstore.block.account import MissReason
from kvstore.block.identity import root_key
from kvstore.core.index import NO_ROW, RowState
from kvstore.core.leases import Leasing
from kvstore.core.room import Room
from kvstore.core.shared import GIVE_WAY_SECONDS, ReservationRecord, Shared
from kvstore.protocol.door import Collective
from kvstore.protocol.messages import ReserveReply

SEALED_BLOCKS = 256
"""Blocks committed under one hold of the lock, at 10 us a block."""
ABORTED_PLACES = 1024
"""Places of aborted puts, and of dropped namespaces, given up under one hold of the lock, at some microseconds each."""
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


class Reservations:
    """Runs the puts of one store. Thread-safe."""

    def __init__(self, shared: Shared, room: Room, leasing: Leasing) -> None:
        """leasing: marks long chains as used."""
        self._shared, self._blocks, self._clock = shared, shared.blocks, shared.clock
        self._records = shared.reservations
        self.collective = self._collective = CollectivePuts(shared.limits.joint_seconds)
        self._room, self._leasing, self._new_number = room, leasing, shared.new_number
        self._pin, self._unpin = shared.blocks.pin, shared.blocks.unpin
        self._answered = threading.Condition(shared.lock)  # the first participant of a collective put has its answer

    def reserve(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int,
        priority: int,
        ttl_seconds: float | None,
        collective: Collective | None = None,
        seconds: float | None = None,
        *,
        skipped: int = 0,
        couriers: int = 0,
    ) -> ReserveReply:
        """Reserve rows and slots for the missing blocks from `first_block` on, as far as there is room or can be made
        within `seconds`. skipped: blocks of the chain before the first key, which must be readable; 0 for a collective
        put. couriers: if a courier asks, the number of tenants with couriers."""
        ends_at = self._clock.monotonic_seconds() + seconds if seconds is not None else None
        if collective is None:
            return self._reserve(number, keys, first_block, priority, ttl_seconds, None, ends_at, skipped, couriers)
        name, chain = (collective.session, number, collective.name), chain_of(keys, first_block)
        with self._shared.lock:
            if self._shared.closed or number in self._blocks.dropping:
                return ReserveReply(0, 0, stopped_at=0, reason=MissReason.DISABLED)
            self._shared.end_due()
            now = self._clock.monotonic_seconds()
            found = self._collective.find(name, chain, now)
            if isinstance(found, CollectivePut):
                return self._join(found, chain, collective)
            put = found or self._collective.begin(name, chain, now)
            if isinstance(put, ReserveReply):
                return put
        reply = ReserveReply(0, 0, stopped_at=0, reason=MissReason.DISABLED)  # for the others if this is interrupted
        try:
            reply = self._reserve(number, keys, first_block, priority, ttl_seconds, put, ends_at)
        finally:
            with self._shared.lock:
                self._collective.answered(put, reply, self._clock.monotonic_seconds())
                self._answered.notify_all()
                joined = self._join(put, chain, collective)
        return joined

    def _join(self, put: CollectivePut, chain: Chain, collective: Collective) -> ReserveReply:
        if not self._answered.wait_for(lambda: put.answer is not None, ANSWER_SECONDS):
            return ReserveReply(0, 0, stopped_at=0, reason=MissReason.DEADLINE)
        return self._collective.join(put, chain, collective.parts, self._new_number)

    def _reserve(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int,
        priority: int,
        ttl_seconds: float | None,
        put: CollectivePut | None,
        ends_at: float | None,
        skipped: int = 0,
        couriers: int = 0,
    ) -> ReserveReply:
        """put: the collective put that this is for; its number goes to no client. ends_at: when to stop making room."""
        with self._shared.lock:
            if self._shared.closed or number in self._blocks.dropping:
                return ReserveReply(0, 0, stopped_at=0, reason=MissReason.DISABLED)
            self._shared.end_due()
            rows = self._blocks.index.match(number, keys)
            present, first_block = len(rows), first_block - skipped  # counted in keys
            expires_at = int(self._clock.wall_seconds() + ttl_seconds) if ttl_seconds is not None else 0
            if present and (priority > 0 or expires_at):
                self._blocks.renew(rows, priority, expires_at)
            if present == len(keys):
                return ReserveReply(0, skipped + present)
            if present and self._blocks.index.depth(rows[-1]) != skipped + present - 1:  # the keys are not one chain
                return ReserveReply(0, 0, stopped_at=0, reason=MissReason.DIVERGED)
            in_flight_rows = self._collective.in_flight_rows(put) if put is not None else {}
            is_cut_off = skipped > 0 and not present
            if is_cut_off or (
                present < first_block and not self._stand(number, keys[present:first_block], in_flight_rows)
            ):
                in_flight = self._in_flight(number, keys, present)
                reason = MissReason.IN_FLIGHT if in_flight else self._shared.why(number, keys, present)[0]
                present += skipped
                return ReserveReply(0, present, stopped_at=present, reason=reason, in_flight=in_flight)
            parts = len(self._blocks.spaces[number].classes)
            record = ReservationRecord(
                number=self._new_number(),
                namespace=number,
                priority=priority,
                expires_at=expires_at,
                done=[0] * parts,
                places=[[] for _ in range(parts)],
                room_until=ends_at,
                is_fetched=couriers > 0,
            )
            asked = len(keys)
            if record.is_fetched:
                keys = keys[: present + self._shared.fetched.room(number, couriers)]
            stopped_at, reason = self._begin_rows(record, keys, present, in_flight_rows)
            in_flight = self._in_flight(number, keys, stopped_at) if reason is MissReason.IN_FLIGHT else 0
            if stopped_at is None and len(keys) < asked:
                stopped_at, reason = len(keys), MissReason.BUSY
            if skipped:  # from here on counted in blocks of the chain
                record.indexes = [skipped + position for position in record.indexes]
                stopped_at = skipped + stopped_at if stopped_at is not None else None
            if not record.rows:
                return ReserveReply(0, skipped + present, stopped_at=stopped_at, reason=reason, in_flight=in_flight)
            self._records[record.number] = record
            if put is not None:
                self._collective.reserved(put, record)
                record.is_collective = True
        try:
            short = self._find_slots(record)
        except BaseException:  # interrupted: no client will learn this reservation's number
            self.abort(record.number)
            raise
        if short is not None:
            stopped_at, reason = self._shorten(record, short)
        elif stopped_at is None:  # blocks behind the last one to fill may have been evicted to make room for it
            with self._shared.lock:
                for position in range(record.indexes[-1] + 1 - skipped, len(keys)):
                    if self._blocks.index.find(number, keys[position]) == NO_ROW:
                        stopped_at, reason = skipped + position, MissReason.EVICTED
                        break
        present += skipped
        if not record.filled:
            self.abort(record.number)
            return ReserveReply(0, present, stopped_at=stopped_at, reason=reason, detail=record.detail)
        return ReserveReply(
            record.number,
            present,
            record.indexes[: record.filled],
            tuple(record.places),
            stopped_at,
            reason,
            record.detail,
            in_flight if reason is MissReason.IN_FLIGHT else 0,
        )

    def _in_flight(self, number: int, keys: Sequence[bytes], start: int | None) -> int:
        index = self._blocks.index
        filling = {row for other in self._records.values() for row in other.repairs}
        rows = (index.find(number, key) for key in keys[start:])
        is_awaited = (row != NO_ROW and (index.state(row) is RowState.PENDING or row in filling) for row in rows)
        return sum(takewhile(bool, is_awaited))

    def _stand(self, number: int, keys: Sequence[bytes], in_flight_rows: Mapping[int, int]) -> bool:
        index = self._blocks.index
        rows = [index.find(number, key) for key in keys]
        return all(row in in_flight_rows or (row != NO_ROW and index.state(row) is RowState.VISIBLE) for row in rows)

    def _begin_rows(
        self, record: ReservationRecord, keys: Sequence[bytes], present: int, in_flight_rows: Mapping[int, int]
    ) -> tuple[int | None, MissReason | None]:
        """Rows for all blocks that are not readable, up to one that another put is storing. in_flight_rows: of puts
        that this one may follow, with their reservations."""
        blocks, index = self._blocks, self._blocks.index
        parent = index.find(record.namespace, keys[present - 1]) if present else NO_ROW
        parent_key = (
            keys[present - 1] if present else root_key(blocks.spaces[record.namespace].namespace.layout.block_tokens)
        )
        filling = {row for other in self._records.values() for row in other.repairs}
        stopped: tuple[int | None, MissReason | None] = (None, None)
        for position in range(present, len(keys)):
            key = keys[position]
            row = index.find(record.namespace, key)
            state = index.state(row) if row != NO_ROW else RowState.FREE
            if row not in in_flight_rows and (state == RowState.PENDING or row in filling or row in record.repairs):
                stopped = (position, MissReason.IN_FLIGHT)
                break
            if row != NO_ROW and index.parent(row) != parent:  # not one chain: this key has another parent
                stopped = (position, MissReason.DIVERGED)
                break
            if row in in_flight_rows:
                record.depends_on.add(in_flight_rows[row])
            elif state != RowState.VISIBLE:
                if row == NO_ROW:
                    row = blocks.begin(record.namespace, key, parent, record.priority, record.expires_at)
                else:
                    index.renew(row, record.priority, record.expires_at)
                    record.repairs.add(row)
                record.rows.append(row)
                record.parents.append(parent_key)
                record.indexes.append(position)
            parent, parent_key = row, key
        record.generations.extend(blocks.next_generations(record.namespace, len(record.rows)))
        if record.repairs:
            self._pin(record.namespace, sorted(record.repairs))
        return stopped

    def _find_slots(self, record: ReservationRecord) -> MissReason | None:
        """Slots that are free, as a rule; or else what `Room` can do."""
        with self._shared.lock:
            is_open = not (record.cancelled or self._shared.closed)
            classes = self._blocks.spaces[record.namespace].classes if is_open else ()
            if classes and min(map(self._blocks.dram.free_slots, classes)) >= len(record.rows):
                places = self._blocks.place(record.namespace, record.rows)
                for column, found in zip(record.places, places, strict=True):
                    column += found
                record.filled = len(record.rows)
                return None
        return self._room.find_slots(record)

    def _shorten(self, record: ReservationRecord, reason: MissReason) -> tuple[int, MissReason]:
        with self._shared.lock:
            stopped_at = record.indexes[record.filled]
            if record.cancelled:
                record.detail = ""
                return stopped_at, MissReason.DISABLED
            self._give_up(record, record.filled)
            return stopped_at, reason

    # Filling ---------------------------------------------------------------------------------------------------------

    def commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> int:
        """As `Store.commit`."""
        done = 0
        for at in range(0, max(1, len(digests)), SEALED_BLOCKS):
            if at:
                with self._shared.lock:
                    self._shared.moves_done.wait(GIVE_WAY_SECONDS)
            done = self._commit(reservation, part, first + at, digests[at : at + SEALED_BLOCKS])
        return done

    def _commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> int:
        with self._shared.lock:
            share = self._collective.participants.get(reservation)
            record = share.record if share is not None else self._records.get(reservation)
            if record is None or record.cancelled or record.is_ending or record.is_cancelling or self._shared.closed:
                return 0
            assert share is None or part in share.parts, "each fills its own parts"
            start = record.done[part]
            assert first == start, "blocks are committed in their order"
            assert start + len(digests) <= record.filled, "committed more blocks than were reserved"
            stop = start + len(digests)
            columns = (record.rows, record.parents, record.indexes, record.generations)
            unsealed = zip(*(column[start:stop] for column in columns), digests, strict=True)
            self._blocks.seal(record.namespace, part, list(unsealed))
            record.done[part] = stop
            done = share.done if share is not None else min(record.done)
            if share is not None and done == record.filled:
                self._collective.let_go(reservation)
            self._publish(record, min(record.done))
            return done

    def _publish(self, record: ReservationRecord, complete: int) -> None:
        if record.depends_on:
            return  # what these blocks follow comes first
        blocks = self._blocks
        start = record.published
        rows = record.rows[start:complete]
        blocks.publish(record.namespace, rows, record.generations[start:complete])
        if record.is_fetched:
            self._shared.fetched.came(record.namespace, rows, record.fetched_from)
            blocks.tally.stored_tokens -= len(rows) * blocks.spaces[record.namespace].namespace.layout.block_tokens
        if record.repairs:
            refilled = record.repairs.intersection(rows)
            record.repairs -= refilled
            self._unpin(record.namespace, sorted(refilled))
        record.published = complete
        if complete > start:
            blocks.counters["fetched_blocks" if record.is_fetched else "stored_blocks"] += complete - start
        if complete == len(record.rows):
            del self._records[record.number]
            self._touch_published(record)
            if record.is_collective and self._collective.visible(record, self._clock.monotonic_seconds()):
                self._publish_behind(record)

    def _publish_behind(self, record: ReservationRecord) -> None:
        for other in [one for one in self._records.values() if record.number in one.depends_on]:
            other.depends_on.discard(record.number)
            self._publish(other, min(other.done))

    def _touch_published(self, record: ReservationRecord) -> None:
        """Count a stored chain as used, as far as it is readable. Once: until then the reservation's rows pin it."""
        if not record.published:
            return
        self._blocks.used(self._blocks.index.chain(record.rows[record.published - 1]), record.published)

    # Ending ----------------------------------------------------------------------------------------------------------

    def abort(self, reservation: int) -> None:
        """End a reservation; invisible blocks are given up. In a collective put for all; this producer writes no
        more."""
        with self._shared.lock:
            if self._collective.participants.get(reservation) is not None:
                self._abort_share(self._collective.let_go(reservation).record)
            else:
                record = self._records.get(reservation)
                if record is None or self._shared.closed or record.is_ending:
                    return
                record.is_ending = True
                try:
                    self._abort(record)
                finally:  # if it was interrupted, it may be asked for again
                    record.is_ending = False
        self._room.retire_emptied()
        if self._blocks.refreshing:  # soon: rows evicted meanwhile may become another namespace's
            self._leasing.refresh()

    def cancel(self, reservation: int) -> None:
        """End a reservation whose unreachable producer may still write: its blocks go now, its slots with `abort`."""
        with self._shared.lock:
            share = self._collective.participants.get(reservation)
            record = share.record if share is not None else self._records.get(reservation)
            if record is None or record.cancelled or record.is_ending or self._shared.closed:
                return
            self._touch_published(record)
            self._orphan_the_last(record)
            if not (record.cancelled or record.is_ending or self._shared.closed):
                self._cancel(record)
        self._room.retire_emptied()
        if self._blocks.refreshing:
            self._leasing.refresh()

    def cancel_all(self, number: int) -> None:
        """Cancel a namespace's reservations. Under the lock, which is released between pieces."""
        while not self._shared.closed:
            mine = (one for one in self._records.values() if one.namespace == number and not one.cancelled)
            record = next(mine, None)
            if record is None:
                return
            self._orphan_the_last(record, also_ending=True)
            if self._records.get(record.number) is record and not (record.cancelled or self._shared.closed):
                self._cancel(record)

    def expire_due(self, now: float) -> None:
        """Cancel collective puts whose time is over. Under the lock."""
        for record in self._collective.expire_due(now):
            self._touch_published(record)
            self._cancel(record)
            self._blocks.counters["lapsed_joint_puts"] += 1

    def _abort(self, record: ReservationRecord) -> None:
        """Under the lock, which is released between pieces: it may be cancelled, and the store closed, meanwhile."""
        if not record.cancelled:
            self._touch_published(record)
        most = max(1, ABORTED_PLACES // record.parts)
        while not (self._shared.closed or record.cancelled) and len(record.rows) - record.published > most:
            self._give_up(record, len(record.rows) - most)
            self._shared.moves_done.wait(GIVE_WAY_SECONDS)
        while not self._shared.closed and len(record.abandoned_slots) > ABORTED_PLACES:
            self._blocks.free(record.abandoned_slots[-ABORTED_PLACES:])
            del record.abandoned_slots[-ABORTED_PLACES:]
            self._shared.moves_done.wait(GIVE_WAY_SECONDS)
        if self._shared.closed or self._records.get(record.number) is not record:
            return
        if record.cancelled:
            self._free_cancelled(record)
        else:
            self._give_up(record, record.published)
            self._blocks.free(record.abandoned_slots)
            del self._records[record.number]
            self._collective.freed(record)

    def _abort_share(self, record: ReservationRecord) -> None:
        if self._shared.closed:
            return
        if not record.cancelled:
            self._touch_published(record)
            self._cancel(record)
        elif not self._collective.is_written(record):
            self._free_cancelled(record)

    def _give_up(self, record: ReservationRecord, start: int) -> None:
        self._blocks.free(self._removed(record, start))
        self._cut(record, start)

    def _cancel(self, record: ReservationRecord) -> None:
        """Rows and their descendants go now, slots once all producers are done."""
        for other in list(self._records.values()):
            if record.number in other.depends_on and not other.cancelled:
                self._cancel(other)
        record.abandoned_slots += self._removed(record, record.published)
        record.depends_on.clear()
        record.cancelled = True
        if self._collective.lost(record, self._clock.monotonic_seconds()):
            self._free_cancelled(record)

    def _orphan_the_last(self, record: ReservationRecord, *, also_ending: bool = False) -> None:
        """But for as many rows as `_cancel` takes at a time. Under the lock, which is released between pieces: the
        reservation may be cancelled or aborted and the store closed meanwhile."""
        most = max(1, ABORTED_PLACES // record.parts)
        record.is_cancelling = True
        while not (record.is_collective or record.cancelled or self._shared.closed) and (
            also_ending or not record.is_ending
        ):
            start = len(record.rows) - most
            if start <= record.published:
                return
            record.abandoned_slots += self._removed(record, start)
            self._cut(record, start)
            self._shared.moves_done.wait(GIVE_WAY_SECONDS)

    def _removed(self, record: ReservationRecord, start: int) -> list[int]:
        """The places of its blocks from there on, which are not stored; a repaired one's row stays, lost."""
        places: list[int] = []
        for row in reversed(record.rows[start:]):
            if row in record.repairs:
                record.repairs.discard(row)
                self._blocks.index.not_refilled(row)
                self._unpin(record.namespace, [row])
                places += self._blocks.residency.forget(row)
            else:
                places += self._blocks.orphan(row)
        return places

    def _cut(self, record: ReservationRecord, start: int) -> None:
        for column in (record.rows, record.parents, record.indexes, record.generations):
            del column[start:]
        record.filled = min(record.filled, start)

    def _free_cancelled(self, record: ReservationRecord) -> None:
        self._records.pop(record.number, None)
        self._collective.freed(record)
        self._blocks.free(record.abandoned_slots)
        self._room.emptied[record.namespace] = None
