"""Connects engines' queries for blocks that are elsewhere with couriers: the `Parking` of a sidecar that has some.

    engine    Locate, Await(located)     parked, in no thread
    courier   Questions, Reserve, Adopt, and the queries by which any client looks up and reads

Each tenant has a table of its questions. One lock guards all of them, for a few additions; only the socket threads take
it, never under the store's lock, and no client is notified under either: a wait that ends under the store's lock is
recorded, and the socket thread tells the courier.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import count, islice
from math import inf, isfinite
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import BadInput, StoreError
from kvstore.block.identity import Identity
from kvstore.core.index import RowState, TierRuns
from kvstore.core.leases import join_runs
from kvstore.core.shared import Fetched
from kvstore.core.store import Store
from kvstore.elsewhere.questions import FETCHED_TIERS, NO_COURIER, UNREACHABLE, OpenQuestion, TenantQuestions, last_of
from kvstore.node import EmbeddedStore
from kvstore.protocol import courier as c
from kvstore.protocol import messages as m
from kvstore.protocol.courier import ReadableBlock
from kvstore.protocol.hand_off_ticket import HandOff, hand_off_in
from kvstore.protocol.messages import ReserveReply
from kvstore.protocol.words import printable
from kvstore.service.dispatch import Handlers, LeftElsewhere, Parked, ParkedLocate, Parking, Response
from kvstore.service.sessions import COURIERS, ClientState, Sessions
from kvstore.status.declared import picked
from kvstore.status.tree import ElsewhereStatus, SourceStatus
from tiering.clock import Clock
from tiering.counts.awaits import MAX_AWAIT_SECONDS, AwaitEnd, ParkedAwait
from tiering.counts.changes import BlockPlace
from tiering.errors import BlockCorrupt
from tiering.faults import RateLimitedLog
from tiering.frame import HEADER_BYTES, MacKeys, Stamp, open_header, parse_header


class AdoptFault(StrEnum):
    """What was wrong with an `Adopt`."""

    RESERVATION = "reservation"  # not one of that connection's, or already over
    TIER = "tier"  # neither a peer nor a remote tier
    ORDER = "order"  # not the next blocks of a part of that reservation, or more than were reserved
    FORM = "form"  # not a frame's header
    TENANT = "tenant"
    NAMESPACE = "namespace"
    CODEC = "codec"
    PART = "part"
    SIZE = "size"  # of the block, of its slices, or of the payload
    BLOCK = "block"  # another block's prefix key
    PARENT = "parent"
    INDEX = "index"
    KEY = "key"  # signed with a key that this store does not hold
    EPOCH = "epoch"  # signed in an epoch that was retired
    MAC = "mac"


# Headers of frames that another store sealed: no field is trusted that the MAC does not cover, and nothing of a header
# is passed on but its digests.


class WantedFrame(NamedTuple):
    """The block that belongs into a slot: its prefix key, its parent's, and the number of blocks before it."""

    key: bytes
    parent: bytes
    depth: int


class HeaderRefused(Exception):
    def __init__(self, why: AdoptFault, at: int, detail: str = "") -> None:
        super().__init__(detail or f"header {at} is not of the frame that is wanted there: another {why}")
        self.why = why


def digests_of(
    headers: Sequence[bytes], stamp: Stamp, wanted: Sequence[WantedFrame], keys: MacKeys
) -> list[tuple[bytes, ...]]:
    """The digests of each header, which must be the wanted frame's, of that slot class. Raises `HeaderRefused`."""
    return [_digests(raw, at, stamp, one, keys) for at, (raw, one) in enumerate(zip(headers, wanted, strict=True))]


def _digests(raw: bytes, at: int, stamp: Stamp, wanted: WantedFrame, keys: MacKeys) -> tuple[bytes, ...]:
    try:
        header = parse_header(raw)
    except BlockCorrupt as error:
        text = f"header {at} is none: {error}; give the {HEADER_BYTES} bytes before a frame's payload"
        raise HeaderRefused(AdoptFault.FORM, at, text) from None
    found = header.stamp
    for why, is_right in (
        (AdoptFault.TENANT, found.tenant == stamp.tenant),
        (AdoptFault.NAMESPACE, found.namespace == stamp.namespace),
        (AdoptFault.CODEC, found.codec == stamp.codec),
        (AdoptFault.PART, (found.part, found.parts) == (stamp.part, stamp.parts)),
        (AdoptFault.SIZE, found == stamp),
        (AdoptFault.BLOCK, header.prefix_key == wanted.key),
        (AdoptFault.PARENT, header.parent == wanted.parent),
        (AdoptFault.INDEX, header.block_index == wanted.depth),
    ):
        if not is_right:
            raise HeaderRefused(why, at)
    key = keys.mac_key(found.tenant, found.key_id, found.epoch)
    if not key:
        why, text = (AdoptFault.KEY, "not known here") if key is None else (AdoptFault.EPOCH, "retired")
        raise HeaderRefused(why, at, f"header {at} was signed with a key that is {text}, in epoch {found.epoch}")
    try:
        return open_header(raw, keys).digests
    except BlockCorrupt as error:
        raise HeaderRefused(AdoptFault.MAC, at, f"header {at}: {error}") from None


MOST_OF_TENANT = 8
"""Couriers of one tenant, and as many that disconnected while they may map memory."""
GRACE_SECONDS = 10.0
"""How long after the start, or the last courier's end, a missing courier is reported."""
RESERVED_SECONDS, LOOK_SECONDS = 60.0, 1.0
"""How long a courier may take to fill a reservation, and how often that is checked."""
FORGET_SECONDS = 1.0
"""How long a drop or a purge waits for couriers' answers."""

_log = logging.getLogger(__name__)


class CourierDesk(Parking):
    """Of one sidecar. Thread-safe."""

    has_couriers = True

    def __init__(self, store: EmbeddedStore, sessions: Sessions, handlers: Handlers, door: str = "") -> None:
        """door: the address for other nodes."""
        super().__init__(store.core)
        self._sessions, self._handlers, self._embedded = sessions, handlers, store
        self._clock = store.core.clock
        self._lock = threading.Lock()
        self._books: dict[bytes, TenantQuestions] = {}  # of tenants that have couriers
        self._no_book = TenantQuestions(count(1))  # of all others: without a courier nothing is asked
        self._numbers = defaultdict[bytes, Iterator[int]](lambda: count(1))  # of a tenant's questions, never reused
        self._alone_since = self._clock.monotonic_seconds()  # without couriers since then
        self._due: deque[tuple[float, bytes]] = deque()  # of locates, which all have the same time limit
        self._looks_at = 0.0  # when reservations are next checked
        self._over: deque[tuple[bytes, OpenQuestion]] = deque()  # fetches that no waiter is left for
        self._dropping: Counter[tuple[bytes, bytes]] = Counter()  # tenant, and namespace or all
        self._refusals: Counter[AdoptFault] = Counter()
        self._logged = RateLimitedLog(_log, self._clock)
        self.told = FiguresTold(self._clock)
        self.fetched = store.core.fetched = FetchedBlocks(store.core, self, door)
        verbs = m.OpenNamespace, m.Namespaces, m.MatchPrefix, m.LeasePrefix, m.Release, m.Extents, m.Abort, m.Changes
        self.verbs = {
            **handlers.shared(*verbs, m.Ping),
            m.Reserve: self._reserve,
            m.Adopt: self._adopt,
            m.Questions: self._questions,
            m.Holdings: self._holdings,
        }
        handlers.parking = self

    # Couriers --------------------------------------------------------------------------------------------------------

    def greet(self, hello: m.Hello) -> tuple[ClientState | None, m.Answer]:
        """A courier's hello: its client state from now on, or why it is refused."""
        if not hello.tenant:
            return None, m.Failed(m.RequestFault.BAD_INPUT, "a hello to courier.sock names its tenant; give one")
        try:
            self._embedded.keys.known(hello.tenant)  # a courier's hello must not make keys for its name
            keys = self._embedded.tenant_keys(hello.tenant)
        except StoreError as error:
            return None, m.failed(m.RequestFault.BAD_INPUT, str(error))
        mine = [one for one in self._sessions.callers() if one.is_courier and one.keys.tenant == keys.tenant]
        if max(len(mine), self._sessions.departed.count_of(keys.tenant + COURIERS)) >= MOST_OF_TENANT:
            text = f"{MOST_OF_TENANT} couriers of this tenant are there, or are gone and map memory still; end some"
            return None, m.Failed(m.RequestFault.BUSY, text)
        return self._handlers.greet(keys, hello, is_courier=True)

    def is_served(self, tenant: bytes) -> bool:
        with self._lock:
            return self._book(tenant).courier is not None

    def left(self, caller: ClientState) -> None:
        if not caller.is_courier:
            return
        tenant = caller.keys.tenant
        with self._lock:
            book = self._book(tenant)
            ended = book.left(caller)
            heir = book.courier if len(book) else None
            if not book.couriers and self._books.pop(tenant, None) is not None:
                self._alone_since = self._clock.monotonic_seconds()
        self.told.left(caller)
        self._end(ended, NO_COURIER)
        self._ring(heir)

    def _reserve(self, caller: ClientState, verb: m.Reserve) -> m.Answer:
        if verb.priority or verb.ttl_seconds is not None or verb.collective or verb.parts:
            raise BadInput("a courier's reservation has no priority, ttl, collective or parts; leave them out")
        number = caller.named.get(verb.namespace)
        if number is not None and self._is_dropping(caller.keys.tenant, number):
            return m.Reserved(ReserveReply(0, 0, stopped_at=verb.skipped, reason=MissReason.DISABLED))
        with self._lock:
            tenants = len(self._books.keys() | {caller.keys.tenant})
        return self._handlers.reserve(caller, verb, couriers=tenants)

    def _adopt(self, caller: ClientState, verb: m.Adopt) -> m.Answer:
        try:
            return m.Counted(self._adopted(caller, verb))
        except HeaderRefused as error:
            with self._lock:
                self._refusals[error.why] += 1
            self._logged.warn(f"adopt {error.why}", "what a courier brought was refused: %s", error)
            raise BadInput(f"nothing of this was adopted: {error}") from None

    def _adopted(self, caller: ClientState, verb: m.Adopt) -> int:
        progress, count = caller.reservations.get(verb.reservation), len(verb.headers)
        if progress is None:
            raise HeaderRefused(AdoptFault.RESERVATION, 0, "no reservation of that number is this connection's")
        if verb.tier not in FETCHED_TIERS:
            raise HeaderRefused(AdoptFault.TIER, 0, f"tier {verb.tier}; give {' or '.join(FETCHED_TIERS)}")
        order = HeaderRefused(
            AdoptFault.ORDER,
            0,
            f"part {verb.part}, blocks from {verb.first} on, {count} of them: give those that follow the last ones, "
            f"no more than the {progress.blocks} that were reserved",
        )
        if verb.part not in progress.parts or not 0 <= verb.first <= progress.blocks - count:
            raise order
        wanted = self.fetched.wanted(verb.reservation, verb.part, verb.first, count)
        if wanted is None:  # the namespace is being dropped
            return 0
        digests = digests_of(verb.headers, *wanted, self.fetched.keys)
        if not self._sessions.claim(progress, verb.part, verb.first, count):
            raise order
        self.fetched.comes_from(verb.reservation, verb.tier)
        done = self._store.commit(verb.reservation, verb.part, verb.first, digests)
        if done == progress.blocks:
            self._sessions.ended(caller, verb.reservation)
        return done

    def _holdings(self, caller: ClientState, verb: m.Holdings) -> m.Answer:
        number = caller.named.get(verb.namespace)
        if number is None:
            raise BadInput(f"namespace {verb.namespace} was not opened on this connection; open it first")
        return m.HoldingsReply(*self.fetched.listed(number, verb.after))

    def _questions(self, caller: ClientState, verb: m.Questions) -> m.Answer:
        self._sessions.asked(caller)  # first: questions from here on notify it again
        if verb.told is not None:
            self.told.tell(caller, verb.told)
        ended = []
        with self._lock:
            if caller not in self._sessions.callers():  # `left` was called, or is about to be
                self.told.left(caller)
                return c.QuestionsReply()
            tenant = caller.keys.tenant
            book = self._books.setdefault(tenant, TenantQuestions(self._numbers[tenant]))
            for answer in _cleaned(verb.answers):
                one = book.answered(caller, answer)
                if one is not None and not self._is_located(book, one):
                    ended.append(one)
            asked = book.take(caller)
        self._end(ended, "")
        return asked

    # Engines ---------------------------------------------------------------------------------------------------------

    def locate(self, caller: ClientState, verb: m.Locate) -> Response | m.Answer:
        number, tenant = caller.named[verb.namespace], caller.keys.tenant
        present = self._store.readable(number, verb.keys)
        if present == len(verb.keys):
            return m.Located(0, present)
        where = self._whence(caller, number, verb)
        if isinstance(where, m.TicketOpened):
            return m.Located(0, present, reason=where.reason, detail=where.detail)
        if self._is_dropping(tenant, number):
            return m.Located(0, present, reason=MissReason.DISABLED, detail="it is being dropped")
        parked = ParkedLocate()
        until = self._clock.monotonic_seconds() + c.LOCATE_SECONDS
        with self._lock:
            book = self._book(tenant)
            courier = book.courier
            if courier is None:
                return m.Located(0, present, reason=UNREACHABLE, detail=NO_COURIER)
            question = c.LocateQuestion(book.number(), verb.namespace, verb.keys, present, *where)
            if not book.add(OpenQuestion(question, parked, until)):
                return m.Located(0, present, reason=MissReason.BUSY, detail="as much is asked as may be")
            self._due.append((until, tenant))
        self._ring(courier)
        return Response(m.Located(0, present), parked=parked)

    def _whence(
        self, caller: ClientState, number: int, verb: m.Locate
    ) -> tuple[str, bytes, bytes] | tuple[()] | m.TicketOpened:
        if not verb.ticket:
            return ()
        identity, space = Identity.of(caller.keys, self._store.node), self._store.namespace_of(number)
        now = self._clock.wall_seconds()
        found = hand_off_in(verb.ticket, identity, space.digest(), space.layout.block_tokens, now)
        if not isinstance(found, HandOff):
            return found
        return (found.door, found.owner, found.incarnation) if found.owner != identity.node else ()

    def park(
        self, caller: ClientState, number: int, verb: m.Await, tell: Callable[[ParkedAwait], object]
    ) -> ParkedAwait | Response:
        if not verb.located:
            return super().park(caller, number, verb, tell)
        tenant = caller.keys.tenant
        with self._lock:
            book = self._book(tenant)
            place = book.place(verb.located, verb.namespace, self._clock.monotonic_seconds())
        if place is None:
            return self._not_fetched(number, verb, "what was located is not known any more; locate it again")
        keys = place.question.keys
        blocks = last_of(keys, verb.keys[-1])
        if not 0 < blocks <= place.blocks:
            raise BadInput(
                f"the last key is none of the {place.blocks} blocks of located={verb.located}; give one of these"
            )
        at = place.question
        asked = c.FetchQuestion(
            book.number(),
            at.number,
            at.namespace,
            keys[:blocks],
            at.present,
            min(verb.seconds, MAX_AWAIT_SECONDS),
            at.door,
            at.node,
            at.incarnation,
        )
        fetch = OpenQuestion(asked, None)

        def ended(one: ParkedAwait) -> None:
            self._over.append((tenant, fetch))
            tell(one)

        one = fetch.asker = self._store.park(number, verb.keys, verb.seconds, ended, fetch)
        if one.end is not None:
            return one
        with self._lock:
            courier = book.courier
            is_asked = courier is not None and book.add(fetch)
            if is_asked and one.end is not None:  # it ended meanwhile, perhaps before the question was added
                book.no_more(fetch)
        if not is_asked:
            reason = UNREACHABLE if courier is None else MissReason.BUSY
            text = NO_COURIER if courier is None else "as much is asked as may be"
            fetch.answer = c.QuestionAnswered(asked.number, 0, reason=reason, detail=text)
            self._store.awaits.end([one], AwaitEnd.SHORT)
        self._ring(courier)
        return one

    def _not_fetched(self, number: int, verb: m.Await, detail: str) -> Response:
        blocks = self._store.readable(number, verb.keys)
        if blocks == len(verb.keys):
            return Response(m.Awaited(blocks, AwaitEnd.READABLE))
        return Response(m.Awaited(blocks, AwaitEnd.SHORT, MissReason.STALE_HINT, detail))

    def awaited(self, one: Parked) -> Response:
        """With what is known about the fetch's end."""
        if isinstance(one, ParkedLocate):
            assert one.answer is not None
            return Response(one.answer)
        answer = self._store.awaited(one)
        if not isinstance(one.fetch, OpenQuestion) or answer.end is AwaitEnd.READABLE:
            return Response(answer)
        found = one.fetch.answer
        if found is None:
            reason = MissReason.DEADLINE if answer.end is AwaitEnd.DEADLINE else None
            return Response(replace(answer, reason=reason))
        return Response(replace(answer, reason=found.reason or MissReason.STALE_HINT, detail=found.detail))

    def cancel(self, ones: Sequence[Parked]) -> None:
        super().cancel(ones)
        wanted = {one for one in ones if isinstance(one, ParkedLocate)}
        if not wanted:
            return
        with self._lock:
            for book in self._books.values():
                for one in book:
                    if one.asker in wanted:
                        book.no_more(one)
        for parked in wanted:
            self._tell(parked, m.Located(0, 0, reason=MissReason.DISABLED, detail="cancelled"))

    def leased(self, lease: int) -> None:
        self.fetched.leased(lease)

    # The socket thread -----------------------------------------------------------------------------------------------

    @property
    def due_at(self) -> float:
        try:
            return min(super().due_at, self._due[0][0])
        except IndexError:
            return super().due_at

    def expire(self) -> None:
        super().expire()
        now, late = self._clock.monotonic_seconds(), []
        with self._lock:
            tenants = set()
            while self._due and self._due[0][0] <= now:
                tenants.add(self._due.popleft()[1])
            for tenant in tenants & self._books.keys():
                late += self._books[tenant].expire(now)
        self._end(late, f"no courier answered in {1000 * c.LOCATE_SECONDS:.0f} ms", MissReason.DEADLINE)

    def tell_couriers(self) -> None:
        if self._clock.monotonic_seconds() >= self._looks_at:
            self._cancel_late()
        if not self._over:
            return
        couriers = set()
        with self._lock:
            while self._over:
                tenant, one = self._over.popleft()
                self._book(tenant).no_more(one)
                couriers.add(one.courier if one.is_over else None)
        for courier in couriers:
            self._ring(courier)

    def _cancel_late(self) -> None:
        """A reservation that a courier neither fills nor aborts would keep engines from storing the same blocks."""
        now = self._clock.monotonic_seconds()
        self._looks_at = now + LOOK_SECONDS
        for caller in self._sessions.callers():
            for number, progress in list(caller.reservations.items()) if caller.is_courier else ():
                if progress.began_at + RESERVED_SECONDS <= now:
                    self._store.cancel(number)

    # Giving up -------------------------------------------------------------------------------------------------------

    @contextmanager
    def forgetting(self, tenant: bytes, digest: bytes = b"") -> Iterator[LeftElsewhere]:
        name, left = (tenant, digest), LeftElsewhere()
        with self._lock:
            self._dropping[name] += 1
            self._book(tenant).forget()
        try:
            if not digest:
                self._forget(tenant, digest, left)
            yield left
            if digest:
                self._forget(tenant, digest, left)
        finally:
            with self._lock:
                self._dropping[name] -= 1
                self._dropping += Counter()

    def _forget(self, tenant: bytes, digest: bytes, left: LeftElsewhere) -> None:
        done = threading.Event()
        with self._lock:
            book = self._book(tenant)
            courier = book.courier
            one = OpenQuestion(c.Forget(book.number(), digest), done)
            is_asked = courier is not None and book.add(one)
        self._ring(courier)
        if is_asked and not done.wait(FORGET_SECONDS):
            with self._lock:
                book.no_more(one)
        answer, rest = one.answer, "what other nodes and remote engines have of it remains until it is evicted there"
        if answer is None:
            left.line = f"{'no courier answered in time' if is_asked else NO_COURIER}: {rest}"
            return
        remains = rest if answer.reason is not None else ""
        if answer.blocks:
            remains = f"{answer.blocks} blocks remain elsewhere"
        left.line = ": ".join(filter(None, (remains, answer.detail or answer.reason)))
        left.not_reached = answer.not_reached

    def _is_dropping(self, tenant: bytes, number: int) -> bool:
        if not self._dropping:
            return False
        return any((tenant, one) in self._dropping for one in (b"", self._store.namespace_of(number).digest()))

    # Inside ----------------------------------------------------------------------------------------------------------

    def _book(self, tenant: bytes) -> TenantQuestions:
        """Under the lock."""
        return self._books.get(tenant, self._no_book)

    def _is_located(self, book: TenantQuestions, one: OpenQuestion) -> bool:
        """If it was a locate, answer it; returns whether it was. Under the lock, which also guards its place."""
        if not isinstance(one.ask, c.LocateQuestion) or not isinstance(one.asker, ParkedLocate):
            return False
        self._tell(one.asker, book.locate(one.ask, one.answer, self._clock.monotonic_seconds()))
        return True

    def _end(self, ones: Iterable[OpenQuestion], detail: str, reason: MissReason = UNREACHABLE) -> None:
        """End these waits: no more blocks come. detail, reason: for those that no courier answered."""
        for one in ones:
            if isinstance(one.ask, c.LocateQuestion) and isinstance(one.asker, ParkedLocate):
                self._tell(one.asker, m.Located(0, one.ask.present, reason=reason, detail=detail))
            elif isinstance(one.asker, ParkedAwait):
                one.answer = one.answer or c.QuestionAnswered(one.ask.number, 0, reason=reason, detail=detail)
                self._store.awaits.end([one.asker], AwaitEnd.SHORT)
            elif isinstance(one.asker, threading.Event):
                one.asker.set()

    @staticmethod
    def _tell(parked: ParkedLocate, answer: m.Located) -> None:
        if parked.answer is None:
            parked.answer = answer
            parked.tell(parked)

    def _ring(self, courier: object) -> None:
        if isinstance(courier, ClientState):
            self._sessions.ring(courier)

    # Facts -----------------------------------------------------------------------------------------------------------

    def reasons(self) -> list[str]:
        with self._lock:
            seconds = self._clock.monotonic_seconds() - self._alone_since if not self._books else 0.0
        if seconds > GRACE_SECONDS:
            return ["no courier is there: what other nodes and remote engines have is not fetched"]
        return self.told.figures().reasons

    def status(self) -> ElsewhereStatus:
        with self._lock:
            couriers = sum(book.couriers for book in self._books.values())
            refused = {str(why): self._refusals[why] for why in AdoptFault}
        told, fetched = self.told.figures(), self.fetched
        return picked(
            ElsewhereStatus,
            told,
            fetched,
            couriers=couriers,
            adopted={str(tier): fetched.adopted[tier] for tier in FETCHED_TIERS},
            refused=refused,
            sources=[picked(SourceStatus, one) for one in told.sources],
        )

    def check(self) -> None:
        """Verify the invariants of the tables; for tests."""
        with self._lock:
            for book in self._books.values():
                book.check()


# Blocks that couriers fetch: their slots, and how long each is kept for the engine that waits for it ---------------


KEPT_SECONDS = 1.0
"""How long a fetched block is pinned for the engine that waits for it."""
SHARE_OF_DRAM = 1 / 8
MOST_MARKS = 1 << 16
GIVES_WAY_AT_ONCE = 64
LISTED_AT_ONCE, SCANNED_AT_ONCE = 2048, 1 << 17
"""Readable blocks in one listing, and rows scanned for them: the lock is held for about a millisecond."""


class _Mark(NamedTuple):
    number: int
    generation: int
    tier: HitTier


class FetchedBlocks(Fetched):
    """Of one store with couriers. Thread-safe."""

    def __init__(self, store: Store, parking: Parking, door: str = "") -> None:
        """parking: knows whose couriers are there. door: the address for other nodes."""
        self.keys, self.door = store.blocks.keys, door
        self._parking = parking
        self._blocks, self._clock, self._lock = store.blocks, store.clock, store.lock
        self._reservations, self._leases = store.reservations, store.leases
        self._pins: OrderedDict[int, tuple[int, float]] = (
            OrderedDict()
        )  # row > namespace, until; the first to end first
        self.marks: OrderedDict[int, _Mark] = OrderedDict()
        self.kept_bytes = 0  # of pinned blocks
        self._tenants: Counter[bytes] = Counter()  # the same by tenant
        self.adopted = Counter[HitTier]()
        """Blocks since the start, by origin."""
        self.gave_way = 0
        """Blocks that were unpinned because others lacked room."""

    # Under the lock: called by the store -----------------------------------------------------------------------------

    def is_served(self, tenant: bytes) -> bool:
        return self._parking.is_served(tenant)

    @property
    def has_slots(self) -> bool:
        return any(one.is_fetched for one in self._reservations.values())

    def room(self, number: int, tenants: int) -> int:
        """As `Fetched.room`: if several tenants have couriers, each takes at most half of what is left."""
        left = int(SHARE_OF_DRAM * self._blocks.dram.budget_bytes) - self.kept_bytes
        mine, tenant = 0, self._blocks.spaces[number].tenant
        for one in self._reservations.values():
            if one.is_fetched:
                space = self._blocks.spaces[one.namespace]
                parts = len(space.classes)
                unfilled = 0 if one.cancelled else len(one.rows) - one.published
                held = unfilled + -(-len(one.abandoned_slots) // parts)
                left -= held * space.block_bytes
                mine += held * space.block_bytes if space.tenant == tenant else 0
        mine += self._tenants[tenant]
        if tenants > 1:
            left = (left - mine) // 2
        return max(0, left) // self._blocks.spaces[number].block_bytes

    def came(self, number: int, rows: Sequence[int], tier: HitTier) -> None:
        until = self._clock.monotonic_seconds() + KEPT_SECONDS
        generation = self._blocks.residency.generation
        fresh = [row for row in rows if row not in self._pins]
        self._blocks.pin(number, fresh)
        self._count(number, len(fresh))
        for row in rows:
            self._pins[row] = number, until
            self._pins.move_to_end(row)
            self.marks[row] = _Mark(number, generation(row), tier)
            self.marks.move_to_end(row)
        self._next_due()
        while len(self.marks) > MOST_MARKS:
            self.marks.popitem(last=False)
        self.adopted[tier] += len(rows)

    def expire(self) -> None:
        now = self._clock.monotonic_seconds()
        while self._pins and next(iter(self._pins.values()))[1] <= now:
            self._let_go([next(iter(self._pins))])

    def give_way(self) -> bool:
        some = list(islice(self._pins, GIVES_WAY_AT_ONCE))
        self._let_go(some)
        self.gave_way += len(some)
        return bool(some)

    def forget(self, number: int) -> None:
        self._let_go([row for row, (of, _) in self._pins.items() if of == number])
        for row in [row for row, mark in self.marks.items() if mark.number == number]:
            del self.marks[row]

    def tiers(self, rows: Sequence[int], runs: TierRuns) -> TierRuns:
        if self.marks.keys().isdisjoint(rows):
            return runs
        found: list[tuple[HitTier, int]] = []
        at = 0
        for tier, number in runs:
            for row in rows[at : at + number]:
                mark = self._mark_of(row) if tier is HitTier.DRAM else None
                found = join_runs(found, [(mark.tier if mark is not None else tier, 1)])
            at += number
        return tuple(found)

    def pinned(self) -> list[int]:
        for row, (number, _) in self._pins.items():
            assert self._blocks.index.is_row_of(row, number), "what is pinned is there"
        assert self.kept_bytes == sum(self._blocks.spaces[number].block_bytes for number, _ in self._pins.values())
        assert sum(self._tenants.values()) == self.kept_bytes <= SHARE_OF_DRAM * self._blocks.dram.budget_bytes
        return list(self._pins)

    # Called by the desk ----------------------------------------------------------------------------------------------

    def leased(self, lease: int) -> None:
        """An engine was granted this lease: its blocks need not be kept any longer."""
        if not self.marks and not self._pins:
            return
        with self._lock:
            record = self._leases.get(lease)
            rows = record.rows if record is not None else ()
            self._let_go([row for row in rows if row in self._pins])
            for row in rows:
                self.marks.pop(row, None)

    def wanted(self, reservation: int, part: int, first: int, count: int) -> tuple[Stamp, list[WantedFrame]] | None:
        """The next frames of a part; None if the reservation was cancelled."""
        with self._lock:
            record = self._reservations.get(reservation)
            if record is None or record.cancelled or record.is_ending or first + count > record.filled:
                return None
            stop, key = first + count, self._blocks.index.key
            columns = zip(record.rows[first:stop], record.parents[first:stop], record.indexes[first:stop], strict=True)
            wanted = [WantedFrame(key(row), parent, depth) for row, parent, depth in columns]
            return self._blocks.spaces[record.namespace].stamps[part], wanted

    def comes_from(self, reservation: int, tier: HitTier) -> None:
        with self._lock:
            record = self._reservations.get(reservation)
            if record is not None:
                record.fetched_from = tier

    def listed(self, number: int, after: int) -> tuple[list[ReadableBlock], int]:
        """Some readable blocks of a namespace, from a position on, and the position to go on from; 0 at the end."""
        index, found = self._blocks.index, list[ReadableBlock]()
        with self._lock:
            stop = min(after + SCANNED_AT_ONCE, index.rows_end)
            if number in self._blocks.dropping or after >= index.rows_end:
                return [], 0
            rows, depths = index.rows_and_depths(number, after, stop)
            some = rows[:LISTED_AT_ONCE]
            for row, depth in zip(some.tolist(), depths[:LISTED_AT_ONCE].tolist(), strict=True):
                if index.state(row) is RowState.VISIBLE:
                    where = BlockPlace.DRAM if self._blocks.is_above(row) else BlockPlace.NVME
                    found.append((index.key(row), depth, int(where)))
            after = int(some[-1]) + 1 if len(some) < len(rows) else stop
            return found, after if after < index.rows_end else 0

    def _mark_of(self, row: int) -> _Mark | None:
        mark = self.marks.get(row)
        if mark is None:
            return None
        if self._blocks.index.is_row_of(row, mark.number) and self._blocks.residency.generation(row) == mark.generation:
            return mark
        del self.marks[row]  # another block has this row
        return None

    def _let_go(self, rows: Collection[int]) -> None:
        for row in rows:
            number, _ = self._pins.pop(row)
            self._blocks.unpin(number, [row])
            self._count(number, -1)
        self._next_due()

    def _next_due(self) -> None:
        self.due_at = next(iter(self._pins.values()))[1] if self._pins else inf

    def _count(self, number: int, blocks: int) -> None:
        space = self._blocks.spaces[number]
        self.kept_bytes += blocks * space.block_bytes
        self._tenants[space.tenant] += blocks * space.block_bytes
        if not self._tenants[space.tenant]:
            del self._tenants[space.tenant]


# Couriers' reports for people: the latest of each courier counts, at most one a second -----------------------------


TOLD_SECONDS = 1.0
MOST_COURIERS, MOST_REASONS = 4, 16
MOST_COUNT = (1 << 63) - 1
"""The largest number in a message: a sum of several may be larger."""
MOST_NUMBER = 1e9
"""Of gigabytes a second and of milliseconds. Clients reject a status with much larger numbers."""


class FiguresTold:
    """Of all couriers. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[bytes, tuple[float, ClientState, c.CourierFigures]] = {}

    def tell(self, caller: ClientState, figures: c.CourierFigures) -> None:
        now, token = self._clock.monotonic_seconds(), caller.session.token
        with self._lock:
            before = self._told.get(token)
            if before is not None and now - before[0] < TOLD_SECONDS:
                return
            if before is None and len(self._told) >= MOST_COURIERS:
                del self._told[min(self._told, key=lambda one: self._told[one][0])]
            figures = _cleaned(figures)
            sources = [replace(one, gbps=_number(one.gbps), p99_ms=_number(one.p99_ms)) for one in figures.sources]
            self._told[token] = now, caller, replace(figures, sources=sources)

    def left(self, caller: ClientState) -> None:
        with self._lock:
            token = caller.session.token
            if token in self._told and self._told[token][1] is caller:
                del self._told[token]

    def figures(self) -> c.CourierFigures:
        with self._lock:
            all_told = [figures for _, _, figures in self._told.values()]
        names = ("fetching", "fetched_blocks", "fetched_bytes", "dropped_hints")
        return c.CourierFigures(
            [one for told in all_told for one in told.sources][: c.MAX_SOURCES],
            [one for told in all_told for one in told.reasons][:MOST_REASONS],
            *(min(MOST_COUNT, sum(getattr(told, name) for told in all_told)) for name in names),
        )


def _cleaned(value: Any) -> Any:
    """With all text that is in it made printable: a courier may have it from others."""
    if type(value) is str:
        return printable(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_cleaned, value))
    if isinstance(value, dict):
        return type(value)((_cleaned(key), one) for key, one in value.items())
    if isinstance(value, msgspec.Struct):
        return replace(value, **{name: _cleaned(getattr(value, name)) for name in value.__struct_fields__})
    return value


def _number(value: float) -> float:
    return min(value, MOST_NUMBER) if isfinite(value) and value >= 0 else 0.0
