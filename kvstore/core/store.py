"""The store: the verbs of `Door` over blocks in tiers.

One lock guards the tables; it is not held while payloads are copied or hashed or extents are made (except for the one
frame that a reader reports as bad). A put (`reservations`): reserve (rows, then slots) > the producer fills the slots >
commit (headers, visibility) > abort what is left. A get (`leases`): lease (pins) > the reader copies and verifies >
release. Must never call the clock or the disk itself, nor see a token.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count as counted_from
from itertools import islice

import msgspec

from kvstore.block.account import REASON_OF_FINDING, HitTier, MissReason
from kvstore.block.errors import BadInput, StoreClosed
from kvstore.block.identity import NOWHERE, Identity, Namespace, NodeIdentity, TenantKeys
from kvstore.config import Limits
from kvstore.core import Fetched, Shared
from kvstore.core.collective import CollectivePuts, ReservationRecord
from kvstore.core.dram_recovery import DramRecovery, Recovery
from kvstore.core.lease_pieces import Endings, LongLeases
from kvstore.core.leases import IS_CLOSED, IS_DROPPED, ChainWaits, LeaseTable, Leasing
from kvstore.core.levels import Levels
from kvstore.core.namespaces import NamespaceVerbs
from kvstore.core.nvme_recovery import NvmeRecovery
from kvstore.core.reservations import Reservations
from kvstore.core.room import Room, SharedExtents
from kvstore.core.rows.below import Lower
from kvstore.core.rows.index import NO_ROW, TierRuns, tier_runs
from kvstore.core.scrub import Adjustments, Scrubbing
from kvstore.core.table import BlockTable
from kvstore.core.usage import UsageReports
from kvstore.protocol import messages as m
from kvstore.protocol.door import Collective, StoreClient
from kvstore.protocol.hand_off_ticket import opened, sealed
from kvstore.protocol.replies import Grant, LeaseReply, MatchReply, ReserveReply
from tiering.clock import Clock
from tiering.counts.awaits import AwaitEnd
from tiering.counts.tally import Eviction
from tiering.dram.mover import Mover
from tiering.move_queue import MoveQueue
from tiering.nvme.scrub import ScrubLimits
from tiering.nvme.tier import NvmeTier
from tiering.tier import FrameSpan, MoveCounts

RUN_OUT_AT_ONCE = 1024
"""Leases that are marked expired at a time."""
DROP_SECONDS = 30.0
"""Default timeout of a drop or a purge."""


class Store:
    """All tenants' blocks of one process. Thread-safe."""

    def __init__(
        self,
        blocks: BlockTable,
        mover: Mover,
        clock: Clock,
        limits: Limits,
        queue: MoveQueue | None = None,
        scrub: ScrubLimits | None = None,
        new_number: Callable[[], int] | None = None,
        taken_over: Sequence[int] = (),
        name: bytes = b"",
        lower: Lower[NvmeTier] | None = None,
        node: NodeIdentity = NOWHERE,
    ) -> None:
        """queue: for moves between DRAM and NVMe, if there is NVMe. scrub: how NVMe is scrubbed. lower: NVMe, as in
        `blocks`.

        new_number: draws a unique number above 0 for a lease or reservation; tenants see these. taken_over: an earlier
        process's extents in the DRAM tier. name: unique to this run. node: this node's identity.
        """
        new_number = new_number or counted_from(1).__next__
        self._blocks, self._lower, self._mover = blocks, lower, mover
        self._clock, self._limits = clock, limits
        self.name, self.node = name, node
        self.awaits = blocks.index.awaits
        self.forgotten: deque[int] = deque()  # as `Door.forgotten`: a finalizer may run under this very lock
        self._to_abort: deque[int] = deque()  # reservations whose producers have finished writing
        self._closer: threading.Thread | None = None
        pins, rules = (self._pin, self._unpin), (self._expire_due, self._check_open)
        shared = self._shared = Shared(clock, limits, *pins, *rules, self._why, self._tiers)
        leases = self._leases = LeaseTable(limits.lease_seconds, new_number)
        reservations: dict[int, ReservationRecord] = {}
        self._reservations, self._collective = reservations, CollectivePuts(limits.joint_seconds)
        endings = self._endings = Endings(shared, leases, blocks.residency, blocks.dram)
        room = self._room = Room(shared, blocks, lower, mover, leases, endings, reservations, self._is_any_moving)
        self._levels: Levels | None = None
        self._scrubbing: Scrubbing | None = None
        self._nvme_recovery: NvmeRecovery | None = None
        if lower is not None:
            assert queue is not None
            self._levels = Levels(blocks, lower, queue, mover.keys, clock, limits, shared.lock, *pins, room.find_slots)
            nvme_recovery = self._nvme_recovery = NvmeRecovery(blocks, lower, mover.keys, shared.lock)
            if scrub is not None:
                behind = mover.keys, clock, shared.lock, scrub, lambda: nvme_recovery.is_recovering
                self._scrubbing = Scrubbing(blocks, lower, self._levels, queue, *behind)
        self._dram_recovery = DramRecovery(blocks, taken_over, mover.keys, shared.lock) if taken_over else None
        self._recovery = Recovery(blocks.dram, self._nvme_recovery, self._dram_recovery)
        self.adjustments = Adjustments(blocks, lower, shared.lock, limits.retained_fraction, self._scrubbing)
        self._leasing = Leasing(shared, blocks, leases, self._levels, room.why_full)
        self._long_leases = LongLeases(shared, blocks, leases, self._leasing, endings, self._levels)
        self._puts = Reservations(shared, blocks, reservations, self._collective, room, self._long_leases, new_number)
        parts = leases, endings, self._long_leases, self._puts, room
        self._namespaces = NamespaceVerbs(shared, blocks, *parts, lower, self._levels, self._recovery)
        self._reports = UsageReports(shared, blocks, lower, leases, reservations, self._recovery, self._scrubbing)
        self._serve(ChainWaits(shared, blocks), SharedExtents(shared, blocks))

    def _serve(self, waits: ChainWaits, extents: SharedExtents) -> None:
        """The verbs that one part of the store serves alone."""
        leasing, endings, puts = self._leasing, self._endings, self._puts
        namespaces, reports = self._namespaces, self._reports
        self.open_namespace, self.own_number = namespaces.open, namespaces.own_number
        self.rotate, self.retire = namespaces.rotate, namespaces.retire
        self.park, self.awaited, self._await, self.readable = waits.park, waits.awaited, waits.wait, waits.readable
        self.attach, self.is_leased, self.report = leasing.attach, leasing.is_leased, leasing.report
        self.release, self.expire, self.begin_ending = endings.release, endings.expire, endings.begin_all
        self.reserve, self.abort, self.cancel = puts.reserve, puts.abort, puts.cancel
        self.share, self.gone = extents.share, extents.gone
        self.is_mapped, self.unmapped = extents.is_mapped, extents.unmapped
        self.evict, self.usage, self.namespaces = self._room.evict, reports.usage, reports.namespaces
        self.tenants, self.kept_until = reports.tenants, reports.kept_until

    def handle(self, client: StoreClient, request: m.Verb, seconds: float | None = None) -> m.Answer:
        """Serve a tenant's client. The request is trusted: the sidecar's socket side checks it first. seconds: how long
        a put may wait for room. Raises `BadInput`, `StoreClosed`, `TierError`."""
        match request:
            case m.MatchPrefix():
                return m.Matched(self.match(client.named[request.namespace], request.keys))
            case m.LeasePrefix():
                number = client.named[request.namespace]
                return m.Leased(self.lease(number, request.keys, request.first_block, request.deadline_ms))
            case m.Attach():
                return m.Attached([lease for lease in request.leases if self.attach(lease)])
            case m.Release():
                for lease in request.leases:
                    self.release(lease)
            case m.ReportFrame():
                self.report(request.lease, request.block, request.part)
            case m.Reserve():
                return m.Reserved(self._reserve_for(client, request, seconds))
            case m.Commit():
                return m.Counted(self.commit(request.reservation, request.part, request.first, request.digests))
            case m.Abort():
                self.abort(request.reservation)
            case m.Persist():
                number = client.named[request.namespace]
                return m.Persisted(*self.persist(number, request.keys, request.seconds))
            case m.OpenNamespace():
                return m.Granted(self._open(client, request))
            case m.Changes():
                told = self._blocks.index.changes.since(client.named[request.namespace], request.after)
                return m.Changed(self.name, *told[:3], list(told.indexes))
            case m.Drop():
                return m.Counted(self.drop(client.named[request.namespace], request.seconds))
            case m.Await():
                return self._await(client.named[request.namespace], request.keys, request.seconds)
            case m.SealTicket() | m.OpenTicket():
                return self._ticket(client, request)
            case _:
                raise BadInput(f"{m.name_of(request)} is for a sidecar; this is a store")
        return m.Done()

    # Namespaces ------------------------------------------------------------------------------------------------------

    def _open(self, client: StoreClient, request: m.OpenNamespace) -> Grant:
        try:
            namespace = Namespace.unpack(request.packed)
        except ValueError as error:
            raise BadInput(f"not a namespace: {error}") from None
        grant = self._namespaces.open(client.keys, namespace, request.payload_bytes)
        own = self._namespaces.own_number(grant.number)
        client.named[own] = grant.number
        return msgspec.structs.replace(grant, number=own)

    def drop(self, number: int, seconds: float = DROP_SECONDS) -> int:
        """Forget every block of a namespace; returns how many were readable. Readers finish what they hold.

        Waits until recovery from disk is over. Raises `TierUnavailable` if it does not end in time, or if the disk does
        not forget; the message contains how far it came, and the drop may be repeated.
        """
        return self._namespaces.drop(number, seconds)

    def purge(self, tenant: bytes, seconds: float = DROP_SECONDS) -> int:
        """Void every block of a tenant durably, give back its slabs, and serve it no more under these keys; returns how
        many blocks were readable. Raises `TierUnavailable` as `drop` does; the tenant is then still served."""
        return self._namespaces.purge(tenant, seconds)

    # Get -------------------------------------------------------------------------------------------------------------

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        """The longest readable prefix, and why it ends there."""
        with self._shared.lock:
            if self._shared.closed:
                return MatchReply(0, reason=MissReason.DISABLED, detail=IS_CLOSED)
            if number in self._namespaces.unfound:
                return MatchReply(0, reason=MissReason.DISABLED, detail=IS_DROPPED)
            fetched = self._shared.fetched
            if self._levels is None and (fetched is None or not fetched.is_any_marked):
                blocks = self._blocks.index.matched(number, keys)
                tiers: TierRuns = ((HitTier.DRAM, blocks),) if blocks else ()
            else:
                rows = self._blocks.index.match(number, keys)
                blocks, tiers = len(rows), self._tiers(rows)
            reason, detail = self._why(number, keys, blocks)
            return MatchReply(blocks, tiers, reason, detail)

    def lease(self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float) -> LeaseReply:
        """Pin the longest readable prefix; blocks in lower tiers are promoted until the deadline."""
        if len(keys) > self._leasing.locked_blocks(number):
            return self._long_leases.lease(number, keys, first_block, deadline_ms)
        reply = self._leasing.lease(number, keys, first_block, deadline_ms)
        if reply is None:  # ended leases still pin
            self.finish_ending()
            reply = self._leasing.lease(number, keys, first_block, deadline_ms, takes_what_there_is=True)
        assert reply is not None
        return reply

    def lease_at_once(self, number: int, keys: Sequence[bytes], first_block: int) -> LeaseReply | None:
        """As `lease` if no block needs promotion, or if it is a miss; else None, and nothing is pinned."""
        if len(keys) > self._leasing.locked_blocks(number):
            return None
        return self._leasing.lease(number, keys, first_block, None)

    def finish_ending(self) -> None:
        """Unpin the blocks of ended leases, and carry out pending aborts."""
        with self._shared.lock:
            self._endings.finish_all()
        while (reservation := self._next_to_abort()) is not None:
            self.abort(reservation)
        self._room.retire_emptied()

    def _next_to_abort(self) -> int | None:
        try:
            return self._to_abort.popleft()
        except IndexError:  # another thread was faster
            return None

    @property
    def is_ending(self) -> bool:
        """Whether `finish_ending` has work; may be read without the lock."""
        is_any = bool(self._leases.ending or self._to_abort or self._room.emptied)
        return is_any and not self._shared.closed

    def ending_places(self, tenant: bytes) -> int:
        """Places of a tenant's ended leases that are still pinned."""
        return self._leases.ending_places[tenant]

    def _ticket(self, client: StoreClient, request: m.SealTicket | m.OpenTicket) -> m.Sealed | m.TicketOpened:
        number, now = client.named[request.namespace], self._clock.wall_seconds()
        space, identity = self._blocks.spaces[number], Identity.of(client.keys, self.node)
        about = identity, space.classes[0].namespace, space.namespace.layout.block_tokens, now
        others = self._shared.fetched
        if isinstance(request, m.OpenTicket):
            return opened(request.ticket, *about, of_others=others is not None and others.is_served(client.keys.tenant))
        self._long_leases.retain(number, request.keys, int(now + request.seconds))
        return sealed(request, *about, others.door if others is not None else "")

    # Put -------------------------------------------------------------------------------------------------------------

    def _reserve_for(self, client: StoreClient, verb: m.Reserve, seconds: float | None) -> ReserveReply:
        number, collective = client.named[verb.namespace], None
        if verb.collective:
            parts = tuple(verb.parts) or tuple(range(len(self._blocks.spaces[number].classes)))
            collective = Collective(verb.collective, parts, client.session_name)
        first, wish = verb.first_block, (verb.priority, verb.ttl_seconds)
        return self.reserve(number, verb.keys, first, *wish, collective, seconds, skipped=verb.skipped)

    def commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> int:
        """Seal the next blocks of a part and publish those that are complete; returns how many blocks are committed in
        all parts that are filled under this number."""
        done = self._puts.commit(reservation, part, first, digests)
        if self._long_leases.refreshing:
            self._long_leases.refresh()
        if self._levels is not None:
            self._levels.flush_if_needed()
        return done

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        """Make leading blocks durable for at most that long; returns how many are, and why not all."""
        if self._shared.closed:
            return 0, MissReason.DISABLED
        if self._levels is None:
            return 0, MissReason.UNSUPPORTED
        with self._shared.lock:
            self._expire_due()
        done, reason = self._levels.persist(number, keys, seconds)
        if reason in (MissReason.EVICTED, MissReason.PINNED_FULL):
            with self._shared.lock:
                is_full = reason is MissReason.PINNED_FULL
                reason = self._room.why_full_below() if is_full else self._why(number, keys, done)[0]
        return done, reason

    def begin_abort(self, reservation: int) -> None:
        """Queue an `abort` for `finish_ending`."""
        self._to_abort.append(reservation)

    @property
    def runs_out_at(self) -> float:
        """When the next collective put or fetched block expires, in monotonic seconds; inf without any."""
        fetched = self._shared.fetched
        return self._collective.due_at if fetched is None else min(self._collective.due_at, fetched.due_at)

    def expire_due(self) -> None:
        """End collective puts that have expired, also without requests. Takes the lock only if one is due."""
        if self._clock.monotonic_seconds() < self.runs_out_at and not self.is_ending:
            return
        with self._shared.lock:
            if not self._shared.closed:
                self._expire_due()

    def collective_puts(self) -> dict[bytes, int]:
        """How many collective puts have slots, by session."""
        with self._shared.lock:
            return self._collective.under_way()

    def spans(self, places: Sequence[int]) -> list[FrameSpan]:
        """The bytes at reserved or leased places, up to the first whose extent is gone. Raises `StoreClosed`."""
        spans = self._blocks.dram.spans_at(places)
        self._check_open()  # afterwards: spans may be missing because the store was closed meanwhile
        return spans

    def memory(self, held: int, places: Sequence[int], *, writable: bool = False) -> list[FrameSpan]:
        """As `Door.memory`: in the store's own process all memory is mapped."""
        return self.spans(places)

    # Other processes -------------------------------------------------------------------------------------------------

    @property
    def fetched(self) -> Fetched | None:
        """Blocks that couriers fetch; set by `fetch_with`."""
        return self._shared.fetched

    def fetch_with(self, make: Callable[..., Fetched]) -> None:
        """Let couriers fetch blocks from elsewhere. make: builds `elsewhere.fetched` from the store's parts."""
        shared = self._blocks, self._clock, self._shared.lock, self._pin, self._unpin, self._reservations, self._leases
        self._shared.fetched = make(*shared, self._mover.keys)

    @property
    def retired_extents(self) -> int:
        """Extents given back since the start: while this does not change, `gone` has no news."""
        return self._blocks.dram.retired

    def tell_of_mapped(self, tell: Callable[[int], object]) -> None:
        """From now on call `tell` with each extent that is given back while clients map it. It runs under the lock: it
        must neither wait nor call the store."""
        self._blocks.dram.mapped_still = tell

    # A lower tier ----------------------------------------------------------------------------------------------------

    def start_loading(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        """Start recovery from disk in a thread; until it is done, a miss may be `warming`."""
        self._recovery.start(tenants)
        if self._scrubbing is not None:
            self._scrubbing.start()

    def prefault(self) -> None:
        """Fault in all of DRAM in the background, at the lowest priority."""
        dram = self._blocks.dram
        dram.prepare(dram.budget_bytes // dram.extent_bytes)

    @property
    def is_loaded(self) -> bool:
        """Whether recovery from disk is over, successful or not."""
        return not self._recovery.is_under_way

    def warmed(self, timeout_seconds: float) -> bool:
        """Whether recovery from disk is over after at most that long, and went well."""
        return self._recovery.wait(timeout_seconds, self._clock)

    # Operations ------------------------------------------------------------------------------------------------------

    def namespace_of(self, number: int) -> Namespace:
        return self._blocks.spaces[number].namespace

    def difference(self, number: int, other: int) -> str:
        """The first field in which two namespaces differ, in words."""
        return self.namespace_of(number).difference(self.namespace_of(other))

    def moves(self) -> list[MoveCounts]:
        return self._levels.queue.counts() if self._levels is not None else []

    @property
    def move_queue(self) -> MoveQueue | None:
        """The queue that runs the moves; None without NVMe."""
        return self._levels.queue if self._levels is not None else None

    def close(self) -> None:
        """Flush dirty blocks to NVMe, as far as there is time; then refuse every request and give the memory back.
        Readers keep what they have mapped."""
        if self._dram_recovery is not None:
            self._dram_recovery.stop()
        if self._scrubbing is not None and not self._shared.closed:
            self._scrubbing.close()
        if self._nvme_recovery is not None and self._levels is not None and not self._shared.closed:
            self._nvme_recovery.stop(self._limits.close_seconds)
            self._levels.close(self._limits.close_seconds)
        with self._shared.lock:
            if self._shared.closed:
                return
            self._shared.closed = True
            self.awaits.end_all(AwaitEnd.GONE)
            if self._levels is not None:
                self._levels.promoter.is_over = True
            self._blocks.dram.close()
        if self._lower is not None:
            # In a thread of its own: a disk that hangs must not block `close`.
            closer = threading.Thread(target=self._lower.tier.close, name="kv-close", daemon=True)
            try:
                closer.start()
            except RuntimeError:  # no thread available
                self._lower.tier.close()
                return
            self._closer = closer
            closer.join(self._limits.close_seconds)

    @property
    def clock(self) -> Clock:
        """For code that waits on this store."""
        return self._clock

    @property
    def closed(self) -> bool:
        return self._shared.closed

    @property
    def is_stuck(self) -> bool:
        """Whether the store is closed while a call to its disk has not returned and may still write."""
        if self._closer is None or self._levels is None:
            return False
        return self._closer.is_alive() or not self._levels.close(0)

    def close_after_fork(self) -> None:
        """In a forked child: memory and threads are the parent's, so the store is closed here, under a new lock."""
        self._shared.closed = True
        self._shared.renew_lock()

    def check(self) -> None:
        """Verify every invariant; for tests, and safe at any time."""
        with self._shared.lock:
            if self._shared.closed:
                return
            pins, held = self._endings.check([*self._leases.live.values(), *self._leases.expired()])
            copied = self._blocks.residency.held.counts()
            copied.subtract(held)
            assert not any(copied.values()), "what late readers may read is held for them, and nothing else is"
            for reservation in self._reservations.values():
                pins.update(reservation.repairs)
            for job in self._room.vacating.values():
                pins.update({copy.row for copy in job.copies})
            for _, rows in self._leases.promoting:
                pins.update(rows)
            promoting = self._levels.promoter.promoting if self._levels is not None else set()
            demoting = self._levels.demoting if self._levels is not None else set()
            pins.update(promoting)
            for pinned in self._levels.pinned_for_demotion if self._levels is not None else ():
                pins.update(pinned)
            pins.update(self._shared.fetched.pinned() if self._shared.fetched is not None else ())
            namespaces = map(self._blocks.index.namespace_of, pins)
            assert self._leases.pinned_bytes == sum(self._blocks.spaces[number].block_bytes for number in namespaces)
            self._blocks.check(pins, demoting)
            self._collective.check(self._reservations)

    def eviction_of(self, number: int, key: bytes) -> tuple[Eviction | None, bool]:
        """How a missing block was evicted, and whether it had a ttl. Takes no lock."""
        stamp, had_ttl = self._blocks.index.eviction(number, key)
        return self._blocks.tally.eviction(stamp), had_ttl

    # Inside ----------------------------------------------------------------------------------------------------------

    def _why(self, number: int, keys: Sequence[bytes], blocks: int) -> tuple[MissReason | None, str]:
        if blocks == len(keys):
            return None, ""
        key, index = keys[blocks], self._blocks.index
        parent = index.find(number, keys[blocks - 1]) if blocks else NO_ROW
        finding = index.why_not(number, key, parent)
        reason = MissReason.DIVERGED if finding is None else REASON_OF_FINDING[finding]
        if reason is MissReason.EVICTED:
            self._blocks.tally.asked_again(index.stamp_of_eviction(number, key))
        if reason in (MissReason.DIVERGED, MissReason.ABSENT, MissReason.EVICTED) and self._recovery.is_under_way:
            return MissReason.WARMING, "what was there before a restart is still being taken in"
        if reason in (MissReason.DIVERGED, MissReason.ABSENT):
            if self._recovery.failed:
                return MissReason.TIER_DOWN, "some of what is on disk could not be taken in at the start"
            other = index.elsewhere(number, key)
            if other >= 0:
                return MissReason.OTHER_NAMESPACE, self.difference(number, other)
        return reason, ""

    def _tiers(self, rows: Sequence[int]) -> TierRuns:
        found: TierRuns = ((HitTier.DRAM, len(rows)),) if rows else ()
        if self._levels is not None:
            found = tier_runs(rows, self._blocks.is_above, lambda: self._blocks.residency.listed_column)
        fetched = self._shared.fetched
        return found if fetched is None or not fetched.is_any_marked else fetched.tiers(rows, found)

    def _is_any_moving(self) -> bool:
        return self._levels is not None and bool(self._levels.promoter.promoting or self._levels.demoting)

    def _pin(self, number: int, rows: Sequence[int]) -> None:
        """Pin distinct blocks of a namespace. Leases, repairs and moves pin alike: one block may have all three."""
        self._leases.pinned_bytes += self._blocks.residency.pins.pin(rows) * self._blocks.spaces[number].block_bytes

    def _unpin(self, number: int, rows: Sequence[int]) -> None:
        self._leases.pinned_bytes -= self._blocks.residency.pins.unpin(rows) * self._blocks.spaces[number].block_bytes

    def _expire_due(self) -> None:
        """Expire leases and all else that is due; called before anything that needs room or pins. Work that this only
        begins is finished by a put or lease that lacks the room."""
        leases, endings, now = self._leases, self._endings, self._clock.monotonic_seconds()
        while self.forgotten:
            record = leases.take(self.forgotten.popleft())
            if record is not None:
                endings.begin(record)
        if leases.live:
            for record in islice(leases.expire_due(now), RUN_OUT_AT_ONCE):
                endings.begin(record)
                self._blocks.counters["lapsed_leases"] += 1
        if leases.ending:
            endings.work()
        if self._shared.fetched is not None:
            self._shared.fetched.expire()
        if now >= self._collective.due_at:
            self._puts.expire_due(now)

    def _check_open(self) -> None:
        if self._shared.closed:
            raise StoreClosed("the store is closed")
