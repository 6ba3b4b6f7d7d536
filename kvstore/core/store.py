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
from itertools import islice

import msgspec

from kvstore.block.account import REASON_OF_FINDING, HitTier, MissReason
from kvstore.block.errors import BadInput, StoreClosed
from kvstore.block.identity import NOWHERE, Identity, Namespace, NodeIdentity, TenantKeys
from kvstore.config import Limits, check_pieces
from kvstore.core.index import NO_ROW, TierRuns, tier_runs
from kvstore.core.leases import IS_CLOSED, IS_DROPPED, Leasing
from kvstore.core.levels import Levels
from kvstore.core.namespaces import NamespaceVerbs
from kvstore.core.recovery import Recovery
from kvstore.core.reservations import Reservations
from kvstore.core.room import Room
from kvstore.core.scrub import Scrubbing
from kvstore.core.shared import Shared
from kvstore.core.table import BlockTable
from kvstore.core.usage import UsageReports
from kvstore.protocol import messages as m
from kvstore.protocol.door import Collective, StoreClient
from kvstore.protocol.hand_off_ticket import opened, sealed
from kvstore.protocol.messages import Grant, LeaseReply, MatchReply, ReserveReply
from tiering.clock import Clock
from tiering.counts.awaits import AwaitEnd, ParkedAwait
from tiering.counts.tally import Eviction
from tiering.move_queue import MoveQueue
from tiering.nvme.scrub import ScrubLimits
from tiering.nvme.tier import NvmeTier
from tiering.policies.shares import Share
from tiering.tier import FrameSpan, MoveCounts

RUN_OUT_AT_ONCE = 1024
"""Leases that are marked expired at a time."""


class Store(Shared):
    """All tenants' blocks of one process. Thread-safe."""

    def __init__(
        self,
        blocks: BlockTable[NvmeTier],
        clock: Clock,
        limits: Limits,
        scrub: ScrubLimits | None = None,
        new_number: Callable[[], int] | None = None,
        name: bytes = b"",
        node: NodeIdentity = NOWHERE,
    ) -> None:
        """scrub: how NVMe is scrubbed. new_number: draws a unique number above 0 for a lease or reservation, which its
        tenant sees. name: unique to this run. node: this node's identity."""
        super().__init__(blocks, clock, limits, new_number)
        self.name, self.node = name, node
        self.awaits = blocks.index.awaits
        self.awaits.now = clock.monotonic_seconds
        self.forgotten: deque[int] = deque()  # as `Door.forgotten`: a finalizer may run under this very lock
        self._to_abort: deque[int] = deque()  # reservations whose producers have finished writing
        self._closer: threading.Thread | None = None
        self._room = Room(self)
        self._recovery = Recovery(self)
        self._levels: Levels | None = None
        self._scrubbing: Scrubbing | None = None
        if self.lower is not None:
            self._levels = Levels(self, self.lower, self._room)
            if scrub is not None:
                self._scrubbing = Scrubbing(self, self.lower, self._levels, self._recovery, scrub)
        self._leasing = Leasing(self, self._levels, self._room)
        self._puts = Reservations(self, self._room, self._leasing)
        self._namespaces = NamespaceVerbs(self, self._leasing, self._puts, self._room, self._levels, self._recovery)
        self._serve(UsageReports(self, self._recovery, self._scrubbing))

    def _serve(self, reports: UsageReports) -> None:
        leasing, leases, puts, room, namespaces = self._leasing, self.leases, self._puts, self._room, self._namespaces
        self.open_namespace, self.own_number = namespaces.open, namespaces.own_number
        self.drop, self.purge, self.warmed = namespaces.drop, namespaces.purge, self._recovery.wait
        self.rotate, self.retire = namespaces.rotate, namespaces.retire
        self.attach, self.is_leased, self.report = leasing.attach, leasing.is_leased, leasing.report
        self.release, self.expire, self.begin_ending = leases.release, leases.expire, leases.begin_all
        self.reserve, self.abort, self.cancel = puts.reserve, puts.abort, puts.cancel
        self.evict, self.share, self.gone = room.evict, room.share, room.gone
        self.is_mapped, self.unmapped = room.is_mapped, room.unmapped
        self.usage, self.namespaces = reports.usage, reports.namespaces
        self.tenants, self.kept_until = reports.tenants, reports.kept_until

    def handle(self, client: StoreClient, request: m.Verb, seconds: float | None = None) -> m.Answer:
        """Serve a tenant's client. The request is trusted: the sidecar's socket side checks it first. seconds: how long
        a put may wait for room. Raises `BadInput`, `StoreClosed`, `TierError`."""
        match request:
            case m.MatchPrefix():
                return m.Matched(self.match(client.named[request.namespace], request.keys))
            case m.Which():
                return m.Held(self.which(client.named[request.namespace], request.keys))
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
                told = self.blocks.index.changes.since(client.named[request.namespace], request.after)
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

    # Get -------------------------------------------------------------------------------------------------------------

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        """The longest readable prefix, and why it ends there."""
        with self.lock:
            if self.closed:
                return MatchReply(0, reason=MissReason.DISABLED, detail=IS_CLOSED)
            if number in self._namespaces.unfound:
                return MatchReply(0, reason=MissReason.DISABLED, detail=IS_DROPPED)
            if self._levels is None and not self.fetched.marks:
                blocks = self.blocks.index.matched(number, keys)
                tiers: TierRuns = ((HitTier.DRAM, blocks),) if blocks else ()
            else:
                rows = self.blocks.index.match(number, keys)
                blocks, tiers = len(rows), self.tiers(rows)
            reason, detail = self.why(number, keys, blocks)
            return MatchReply(blocks, tiers, reason, detail)

    def tiers(self, rows: Sequence[int]) -> TierRuns:
        found: TierRuns = ((HitTier.DRAM, len(rows)),) if rows else ()
        if self.lower is not None:
            found = tier_runs(rows, self.blocks.is_above, lambda: self.blocks.residency.listed_column)
        return self.fetched.tiers(rows, found) if self.fetched.marks else found

    def which(self, number: int, keys: Sequence[bytes]) -> bytes:
        """Which of these blocks are readable, each for itself, as in `m.Held`. Counts as nothing. Takes no lock:
        other requests would wait until all keys of a message are looked up, whether anything is stored or not."""
        is_served = not self.closed and number not in self._namespaces.unfound
        return self.blocks.index.which(number, keys) if is_served else b""

    def lease(self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float) -> LeaseReply:
        """Pin the longest readable prefix; blocks in lower tiers are promoted until the deadline."""
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
        with self.lock:
            self.leases.finish_all()
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
        is_any = bool(self.leases.ending or self._to_abort or self._room.emptied)
        return is_any and not self.closed

    def _ticket(self, client: StoreClient, request: m.SealTicket | m.OpenTicket) -> m.Sealed | m.TicketOpened:
        number, now = client.named[request.namespace], self.clock.wall_seconds()
        space, identity = self.blocks.spaces[number], Identity.of(client.keys, self.node)
        about = identity, space.classes[0].namespace, space.namespace.layout.block_tokens, now
        if isinstance(request, m.OpenTicket):
            return opened(request.ticket, *about, of_others=self.fetched.is_served(client.keys.tenant))
        self._leasing.retain(number, request.keys, int(now + request.seconds))
        return sealed(request, *about, self.fetched.door)

    # Put -------------------------------------------------------------------------------------------------------------

    def _reserve_for(self, client: StoreClient, verb: m.Reserve, seconds: float | None) -> ReserveReply:
        number, collective = client.named[verb.namespace], None
        if verb.collective:
            parts = tuple(verb.parts) or tuple(range(len(self.blocks.spaces[number].classes)))
            collective = Collective(verb.collective, parts, client.session_name)
        first, wish = verb.first_block, (verb.priority, verb.ttl_seconds)
        return self.reserve(number, verb.keys, first, *wish, collective, seconds, skipped=verb.skipped)

    def commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> int:
        """Seal the next blocks of a part and publish those that are complete; returns how many blocks are committed in
        all parts that are filled under this number."""
        done = self._puts.commit(reservation, part, first, digests)
        if self.blocks.refreshing:
            self._leasing.refresh()
        if self._levels is not None:
            self._levels.flush_if_needed()
        return done

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        """Make leading blocks durable for at most that long; returns how many are, and why not all."""
        if self.closed:
            return 0, MissReason.DISABLED
        if self._levels is None:
            return 0, MissReason.UNSUPPORTED
        with self.lock:
            self.end_due()
        done, reason = self._levels.persist(number, keys, seconds)
        if reason in (MissReason.EVICTED, MissReason.PINNED_FULL):
            with self.lock:
                is_full = reason is MissReason.PINNED_FULL
                reason = self._room.why_full_below() if is_full else self.why(number, keys, done)[0]
        return done, reason

    def begin_abort(self, reservation: int) -> None:
        """Queue an `abort` for `finish_ending`."""
        self._to_abort.append(reservation)

    @property
    def runs_out_at(self) -> float:
        """When the next collective put or fetched block expires, in monotonic seconds; inf without any."""
        return min(self._puts.collective.due_at, self.fetched.due_at)

    def expire_due(self) -> None:
        """End collective puts that have expired, also without requests. Takes the lock only if one is due."""
        if self.clock.monotonic_seconds() < self.runs_out_at and not self.is_ending:
            return
        with self.lock:
            if not self.closed:
                self.end_due()

    def collective_puts(self) -> dict[bytes, int]:
        """How many collective puts have slots, by session."""
        with self.lock:
            return self._puts.collective.under_way()

    def spans(self, places: Sequence[int]) -> list[FrameSpan]:
        """The bytes at reserved or leased places, up to the first whose extent is gone. Raises `StoreClosed`."""
        spans = self.blocks.dram.spans_at(places)
        self.check_open()  # afterwards: spans may be missing because the store was closed meanwhile
        return spans

    def memory(self, held: int, places: Sequence[int], *, writable: bool = False) -> list[FrameSpan]:
        """As `Door.memory`: in the store's own process all memory is mapped."""
        return self.spans(places)

    # A lower tier ----------------------------------------------------------------------------------------------------

    def start_loading(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        """Start recovery from disk in a thread; until it is done, a miss may be `warming`."""
        self._recovery.start(tenants)
        if self._scrubbing is not None:
            self._scrubbing.start()

    def prefault(self) -> None:
        """Fault in all of DRAM in the background, at the lowest priority."""
        dram = self.blocks.dram
        dram.prepare(dram.budget_bytes // dram.extent_bytes)

    @property
    def is_loaded(self) -> bool:
        """Whether recovery from disk is over, successful or not."""
        return not self._recovery.is_under_way

    # Waits for blocks: each is parked in the index's table, and takes no thread --------------------------------------

    def park(
        self,
        number: int,
        keys: Sequence[bytes],
        seconds: float,
        tell: Callable[[ParkedAwait], object],
        fetch: object = None,
    ) -> ParkedAwait:
        """Wait until the last of these keys is readable, which may be at once. `Awaits.expire` ends it at its deadline.
        fetch: as in `ParkedAwait`."""
        index = self.blocks.index
        one = ParkedAwait(number, self.blocks.spaces[number].tenant, keys, seconds, tell, fetch)
        self.awaits.register(one)
        with self.lock:
            if self._is_served(number):
                is_there = index.matched(number, keys[-1:])
                self.awaits.looked(one, len(keys) if is_there else index.matched(number, keys))
            else:
                self.awaits.end([one], AwaitEnd.GONE)
        return one

    def awaited(self, one: ParkedAwait) -> m.Awaited:
        """The answer to a wait that is over: how many leading keys are readable now."""
        assert one.end is not None
        return m.Awaited(self.readable(one.number, one.keys), one.end)

    def readable(self, number: int, keys: Sequence[bytes]) -> int:
        """How many leading blocks of these are readable now."""
        with self.lock:
            return self.blocks.index.matched(number, keys) if self._is_served(number) else 0

    def _await(self, number: int, keys: Sequence[bytes], seconds: float) -> m.Awaited:
        done = threading.Event()
        one = self.park(number, keys, seconds, lambda _: done.set())
        self.awaits.wait(one, done)
        return self.awaited(one)

    def _is_served(self, number: int) -> bool:
        return not self.closed and number not in self.blocks.dropping

    # Operations ------------------------------------------------------------------------------------------------------

    def check_shares(self, shares: Mapping[str, Share]) -> None:
        """shares: by tenants' names. Raises `BadInput` if a guarantee is less than a piece of a tier."""
        for name, tier in (("dram", self.blocks.dram), ("nvme", self.lower.tier if self.lower else None)):
            if tier is not None:
                check_pieces(shares, tier.pieces(), tier.piece_bytes, name)

    def change_shares(self, shares: Mapping[bytes, Share]) -> None:
        """shares: by tenant, of those that had some at the start. They count from the next time that a tier is full; a
        smaller budget ends the retention of blocks beyond it."""
        with self.lock:
            if self.blocks.shares is None:
                return
            self.blocks.shares.change(shares)
            parts = [part * self.limits.retained_fraction for part in self.blocks.shares.parts()]
            tiers = [(self.blocks.residency, self.blocks.dram.budget_bytes)]
            tiers += [(self.lower.residency, self.lower.tier.budget_bytes)] if self.lower else []
            for residency, budget_bytes in tiers:
                if residency.retention is not None:
                    residency.retention.resize([int(part * budget_bytes) for part in parts])

    def change_scrub(self, bytes_per_second: int) -> None:
        """Applies to later reads."""
        with self.lock:
            if self._scrubbing is not None:
                self._scrubbing.scrub.set_rate(bytes_per_second)

    def namespace_of(self, number: int) -> Namespace:
        return self.blocks.spaces[number].namespace

    def difference(self, number: int, other: int) -> str:
        """The first field in which two namespaces differ, in words."""
        return self.namespace_of(number).difference(self.namespace_of(other))

    def moves(self) -> list[MoveCounts]:
        return self._levels.queue.counts() if self._levels is not None else []

    @property
    def move_queue(self) -> MoveQueue | None:
        """The queue that runs the moves; None without NVMe."""
        return self._levels.queue if self._levels is not None else None

    def check_open(self) -> None:
        if self.closed:
            raise StoreClosed("the store is closed")

    def close(self) -> None:
        """Flush dirty blocks to NVMe, as far as there is time; then refuse every request and give the memory back.
        Readers keep what they have mapped."""
        if self._scrubbing is not None and not self.closed:
            self._scrubbing.close()
        self._recovery.stop(self.limits.close_seconds if not self.closed else 0)
        if self._levels is not None and not self.closed:
            self._levels.close(self.limits.close_seconds)
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self.awaits.end_all(AwaitEnd.GONE)
            if self._levels is not None:
                self._levels.is_over = True
            self.blocks.dram.close()
        if self.lower is not None:
            # In a thread of its own: a disk that hangs must not block `close`.
            closer = threading.Thread(target=self.lower.tier.close, name="kv-close", daemon=True)
            try:
                closer.start()
            except RuntimeError:  # no thread available
                self.lower.tier.close()
                return
            self._closer = closer
            closer.join(self.limits.close_seconds)

    @property
    def is_stuck(self) -> bool:
        """Whether the store is closed while a call to its disk has not returned and may still write."""
        if self._closer is None or self._levels is None:
            return False
        return self._closer.is_alive() or not self._levels.close(0)

    def close_after_fork(self) -> None:
        """In a forked child: memory and threads are the parent's, so the store is closed here, under a new lock."""
        self.closed = True
        self.renew_lock()

    def check(self) -> None:
        """Verify every invariant; for tests, and safe at any time."""
        with self.lock:
            if self.closed:
                return
            pins, held = self.leases.check()
            copied = self.blocks.residency.held.counts()
            copied.subtract(held)
            assert not any(copied.values()), "what late readers may read is held for them, and nothing else is"
            for reservation in self.reservations.values():
                pins.update(reservation.repairs)
            for job in self._room.vacating.values():
                pins.update({copy.row for copy in job.copies})
            for _, rows in self.leases.promoting:
                pins.update(rows)
            pins.update(self.blocks.promoting.keys())
            for pinned in self._levels.pinned_for_demotion if self._levels is not None else ():
                pins.update(pinned)
            pins.update(self.fetched.pinned())
            namespaces = map(self.blocks.index.namespace_of, pins)
            assert self.blocks.pinned_bytes == sum(self.blocks.spaces[number].block_bytes for number in namespaces)
            self.blocks.check(pins)
            self._puts.collective.check(self.reservations)

    def eviction_of(self, number: int, key: bytes) -> tuple[Eviction | None, bool]:
        """How a missing block was evicted, and whether it had a ttl. Takes no lock."""
        stamp, had_ttl = self.blocks.index.eviction(number, key)
        return self.blocks.tally.eviction(stamp), had_ttl

    # Inside ----------------------------------------------------------------------------------------------------------

    def why(self, number: int, keys: Sequence[bytes], blocks: int) -> tuple[MissReason | None, str]:
        if blocks == len(keys):
            return None, ""
        key, index = keys[blocks], self.blocks.index
        parent = index.find(number, keys[blocks - 1]) if blocks else NO_ROW
        finding = index.why_not(number, key, parent)
        reason = MissReason.DIVERGED if finding is None else REASON_OF_FINDING[finding]
        if reason is MissReason.EVICTED:
            self.blocks.tally.asked_again(index.stamp_of_eviction(number, key))
        if reason in (MissReason.DIVERGED, MissReason.ABSENT, MissReason.EVICTED) and self._recovery.is_under_way:
            return MissReason.WARMING, "what was there before a restart is still being taken in"
        if reason in (MissReason.DIVERGED, MissReason.ABSENT):
            if self._recovery.failed:
                return MissReason.TIER_DOWN, "some of what is on disk could not be taken in at the start"
            other = index.elsewhere(number, key)
            if other >= 0:
                return MissReason.OTHER_NAMESPACE, self.difference(number, other)
        return reason, ""

    def end_due(self) -> None:
        """Expire leases and all else that is due. Work that this only begins is finished by a put or lease that lacks
        the room."""
        leases, now = self.leases, self.clock.monotonic_seconds()
        while self.forgotten:
            record = leases.take(self.forgotten.popleft())
            if record is not None:
                leases.begin(record)
        if leases.live:
            for record in islice(leases.expire_due(now), RUN_OUT_AT_ONCE):
                leases.begin(record)
                self.blocks.counters["lapsed_leases"] += 1
        if leases.ending:
            leases.work()
        if now >= self.fetched.due_at:
            self.fetched.expire()
        if now >= self._puts.collective.due_at:
            self._puts.expire_due(now)
