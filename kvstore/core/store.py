"""The store: the verbs of `Door` over blocks in tiers.

One lock guards the tables; it is not held while payloads are copied or hashed or extents are made (except for the one
frame that a reader reports as bad). A put: reserve (rows, then slots) > the producer fills the slots > commit (headers,
visibility) > abort what is left. A get: lease (pins) > the reader copies and verifies > release. Must never call the
clock or the disk itself, nor see a token.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counted_from
from itertools import islice
from numbers import Integral

import msgspec
import numpy as np

from kvstore.block.about import check_can_be_kept
from kvstore.block.account import REASON_OF_FINDING, HitTier, MissReason
from kvstore.block.errors import BadInput, StoreClosed
from kvstore.block.identity import NOWHERE, Identity, Namespace, NodeIdentity, TenantKeys, root_key
from kvstore.config import Limits
from kvstore.core.collective import ANSWER_SECONDS, Chain, CollectivePut, CollectivePuts, chain_of
from kvstore.core.dram_recovery import DramRecovery, read_first
from kvstore.core.leases import (
    ENDED_PLACES,
    ChainWaits,
    Endings,
    Fetched,
    LeasedFrames,
    LeaseEnd,
    LeaseRecord,
    LeaseTable,
    ReservationRecord,
    TierRuns,
    cut_runs,
    flat,
    join_runs,
    no_lease,
)
from kvstore.core.levels import Levels
from kvstore.core.nvme_recovery import NvmeRecovery
from kvstore.core.promote import SlotRequest
from kvstore.core.rows.index import NO_ROW, RowState, tier_runs
from kvstore.core.scrub import Adjustments, Retirement, Scrubbing
from kvstore.core.table import BlockTable, Lower, OpenedNamespace
from kvstore.core.usage import NamespaceUsage, StoreUsage, check_fits, kept_until, occupancy, retained_budget, tenancy
from kvstore.protocol import messages as m
from kvstore.protocol.door import Collective, StoreClient
from kvstore.protocol.hand_off import opened, sealed
from kvstore.protocol.replies import Grant, LeaseReply, MatchReply, ReserveReply
from kvstore.protocol.status import TenantStatus
from tiering.clock import Clock
from tiering.counts.awaits import AwaitEnd
from tiering.counts.tally import CheckedAt, Eviction
from tiering.dram.extents import Extent
from tiering.dram.mover import FrameCopy, MoveDone, MoveOutcome, Mover
from tiering.dram.unmap_wait import (
    COLLECTIVE_LOOKS,
    LOOKS_SECONDS,
    PUT_SECONDS,
    SharedExtent,
    Unmapped,
    UnmapWait,
    look,
)
from tiering.errors import BlockMissing, TierFull, TierUnavailable
from tiering.move_queue import MoveQueue
from tiering.nvme.scrub import ScrubLimits
from tiering.nvme.tier import NvmeTier
from tiering.residency import Evict, Grow, Vacate
from tiering.tier import Column, FrameSpan, MoveCounts, SlotClass, extent_of

RUN_OUT_AT_ONCE = 1024
"""Leases that are marked expired at a time."""
DROP_LOOKS_SECONDS = 0.1
"""Interval at which a drop checks whether moves of its namespace have ended."""
DROP_SECONDS = 30.0
"""Default timeout of a drop or a purge."""
LOCKED_BLOCKS = 2048
"""Longer chains are worked on in pieces of this many blocks: each holds the lock for a few milliseconds."""
LOCKED_PLACES = 2 * LOCKED_BLOCKS
"""The same for blocks of several parts, counted in frames."""
SEALED_BLOCKS = 256
"""The same for commits, at 10 us a block."""
ABORTED_PLACES = 1024
"""The same for aborted puts and dropped namespaces, at some microseconds a place."""
EVICTED_BLOCKS = 512
"""The same for evictions by an operator."""
RETIRED_BYTES = 16 << 20
"""The same for memory given back to the system; at least one extent."""
SCANNED_ROWS = 1 << 20
"""The same for scans of all rows for those of one namespace, at a nanosecond a row."""
GIVE_WAY_SECONDS = 1e-4
"""Pause between two pieces: without it this thread takes the lock again before a waiting one wakes up."""

_ASK_AGAIN = "ask again, or give it more time"


@dataclass(frozen=True, slots=True)
class _ExtentMove:
    """An extent being emptied: copies to make, outside the lock."""

    extent: int
    copies: list[FrameCopy]


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Memory that was given back and that clients still map."""

    mapped: list[int]


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
        self._blocks = blocks
        self._lower, self._mover = lower, mover
        self.name, self.node = name, node
        self._clock, self._limits = clock, limits
        self.awaits = blocks.index.awaits
        self._lock = threading.Lock()
        self._moves_done, self._joint_answered, self._waiting = (threading.Condition(self._lock) for _ in range(3))
        self._unmap_wait = UnmapWait()
        waits = ChainWaits(blocks, clock, self._lock, lambda: self._closed)
        self.park, self.awaited, self._await, self.readable = waits.park, waits.awaited, waits.wait, waits.readable
        self._jobs: dict[int, _ExtentMove] = {}
        self._leases = LeaseTable(limits.lease_seconds, new_number)
        self._endings = Endings(blocks.residency, blocks.dram, self._unpin)
        self._reservations: dict[int, ReservationRecord] = {}
        self._collective = CollectivePuts(limits.joint_seconds)
        self._new_reservation, self._pinned_bytes = new_number, 0
        self.forgotten: deque[int] = deque()  # as `Door.forgotten`: a finalizer may run under this very lock
        self._to_abort: deque[int] = deque()  # reservations whose producers have finished writing
        self._emptied: dict[int, None] = {}  # namespaces that may have empty extents
        self._drops: set[int] = set()  # namespaces that are being dropped
        self._unfound: set[int] = set()  # of them, those whose blocks matches no longer find, some being gone already
        self._lifting: list[tuple[int, list[int]]] = []  # pinned for leases that wait for promotions
        self._refreshing: deque[tuple[list[int], int]] = deque()  # used long chains, for `BlockTable.refreshed`
        self._levels: Levels | None = None
        self._nvme_recovery: NvmeRecovery | None = None
        self._dram_recovery: DramRecovery | None = None
        self._scrubbing: Scrubbing | None = None
        if lower is not None:
            assert queue is not None
            how = self._lock, self._pin, self._unpin, self._find_slots
            self._levels = Levels(blocks, lower, queue, mover.keys, clock, limits, *how)
            nvme_recovery = self._nvme_recovery = NvmeRecovery(blocks, lower, mover.keys, self._lock)
            if scrub is not None:
                behind = mover.keys, clock, self._lock, scrub, lambda: nvme_recovery.is_recovering
                self._scrubbing = Scrubbing(blocks, lower, self._levels, queue, *behind)
        self.adjustments = Adjustments(blocks, lower, self._lock, limits.retained_fraction, self._scrubbing)
        self._retirement = Retirement(blocks, self._levels, lower, self._lock, self._check_open)
        if taken_over:
            self._dram_recovery = DramRecovery(blocks, taken_over, mover.keys, self._lock)
        self._leaving: set[bytes] = set()  # tenants that are being purged, or were
        self.fetched: Fetched | None = None  # set by `fetch_with`
        self._closed = False
        self._closer: threading.Thread | None = None

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

    # Namespaces ----------------------------------------------------------------------------------------------------

    def _open(self, client: StoreClient, request: m.OpenNamespace) -> Grant:
        try:
            namespace = Namespace.unpack(request.packed)
        except ValueError as error:
            raise BadInput(f"not a namespace: {error}") from None
        grant = self.open_namespace(client.keys, namespace, request.payload_bytes)
        own = self.own_number(grant.number)
        client.named[own] = grant.number
        return msgspec.structs.replace(grant, number=own)

    def open_namespace(self, keys: TenantKeys, namespace: Namespace, payload_bytes: Sequence[int]) -> Grant:
        """Make a namespace known to a tenant; the same one again gives the same number. Raises `BadInput`."""
        check_can_be_kept(namespace, payload_bytes)
        wanted = namespace.digest()
        with self._lock:
            self._check_open()
            if keys.tenant in self._leaving:
                raise BadInput("this tenant is being purged, or its key was retired; connect again, or open it anew")
            space = self._find_space(keys.tenant, wanted)
            if space is None:
                check_fits(self._blocks, self._lower, self._limits, keys.tenant, namespace, payload_bytes)
                space = self._blocks.add_space(keys, namespace, payload_bytes)
            return Grant(
                space.number,
                keys.identity,
                tuple(stamp.pack() for stamp in space.stamps),
                tuple(stamp.payload_bytes for stamp in space.stamps),
                durable=self._levels is not None,
            )

    def own_number(self, number: int) -> int:
        """A namespace's number among its tenant's, from 0 on. Clients see only this one: it hides others' number."""
        with self._lock:
            spaces = self._blocks.spaces
            return sum(space.tenant == spaces[number].tenant for space in spaces[:number])

    def drop(self, number: int, seconds: float = DROP_SECONDS) -> int:
        """Forget every block of a namespace; returns how many were readable. Readers finish what they hold.

        Waits until recovery from disk is over. Raises `TierUnavailable` if it does not end in time, or if the disk does
        not forget; the message contains how far it came, and the drop may be repeated.
        """
        deadline = self._clock.monotonic_seconds() + seconds
        with self._lock:
            self._check_open()
            self._blocks.dropping.add(number)
            self.awaits.end_all(AwaitEnd.GONE, number)
            self._refreshing.clear()  # its rows may become another namespace's
        try:
            return self._drop(number, deadline)
        finally:
            with self._lock:
                self._serve_again([number])

    def purge(self, tenant: bytes, seconds: float = DROP_SECONDS) -> int:
        """Void every block of a tenant durably, give back its slabs, and serve it no more under these keys; returns how
        many blocks were readable. Raises `TierUnavailable` as `drop` does; the tenant is then still served."""
        deadline = self._clock.monotonic_seconds() + seconds
        with self._lock:
            self._check_open()
            self._leaving.add(tenant)
        try:
            with self._lock:
                self._await_taken_in(lambda: False, deadline)
                numbers = [space.number for space in self._blocks.spaces if space.tenant == tenant]
                self._blocks.dropping.update(numbers)
                for number in numbers:
                    self.awaits.end_all(AwaitEnd.GONE, number)
            readable = sum([self._drop(number, deadline) for number in numbers])
            if self._levels is not None and not self._levels.retire_slabs(tenant, deadline):
                raise TierUnavailable(f"the tenant's slabs were not given back; {_ASK_AGAIN}")
            with self._lock:
                self._blocks.index.forget(tenant)
            return readable
        except BaseException:
            with self._lock:
                self._leaving.discard(tenant)
                self._serve_again([space.number for space in self._blocks.spaces if space.tenant == tenant])
            raise

    def rotate(self, keys: TenantKeys) -> None:
        """Sign a tenant's frames in this epoch from now on."""
        with self._lock:
            self._blocks.rotate(keys)

    def retire(
        self, tenant: bytes, epochs: Container[tuple[bytes, int]], rows: Mapping[int, Sequence[int]] | None = None
    ) -> dict[int, list[int]]:
        """Remove a tenant's blocks that these epochs (key id and number) signed from every tier. rows: by namespace, as
        an earlier call returned them; None for all. Returns rows in use, to pass again later."""
        numbers = [space.number for space in list(self._blocks.spaces) if space.tenant == tenant]
        found = {one: self._rows_of(one).tolist() for one in numbers} if rows is None else rows
        left = {number: self._retirement.take_out(number, mine, epochs) for number, mine in found.items()}
        return {number: some for number, some in left.items() if some}

    def _serve_again(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self._drops and self._blocks.spaces[number].tenant not in self._leaving:
                self._blocks.dropping.discard(number)

    def _drop(self, number: int, deadline: float) -> int:
        """The lock is free between pieces. A second drop of this namespace waits for the first."""
        with self._lock:
            self._await_taken_in(lambda: number in self._drops, deadline)
            self._drops.add(number)
            self._blocks.dropping.add(number)  # a drop that ended just now has removed it
        try:
            readable = self._drop_rows(number, deadline)
            self._retire_emptied()
            if self._levels is not None and not self._levels.settle(deadline):
                raise TierUnavailable(f"the blocks are gone from memory, but not durably from the disk; {_ASK_AGAIN}")
            return readable
        finally:
            with self._lock:
                self._drops.discard(number)
                self._unfound.discard(number)
                self._moves_done.notify_all()

    def _drop_rows(self, number: int, deadline: float) -> int:
        with self._lock:
            self._await_taken_in(lambda: bool(self._jobs) or self._is_moving(number), deadline)
            self._expire_due()  # from here on the namespace has no leases, and gets none
            self._finish([*self._leases.expire_all(number), *self._endings.under_way_of(number)])
            self._await_taken_in(lambda: bool(self._jobs) or self._is_moving(number), deadline)
            self._cancel_all(number)
            if self.fetched is not None:
                self.fetched.forget(number)
            self._check_open()
            readable = self._blocks.index.visible_blocks(number)
            self._unfound.add(number)
            self._refreshing.clear()  # its rows may become another namespace's
        rows = self._rows_of(number)
        most = max(1, ABORTED_PLACES // len(self._blocks.spaces[number].classes))
        for first in range(0, len(rows), most):
            with self._lock:
                self._check_open()
                for row in rows[first : first + most].tolist():
                    self._drop_row(number, row, deadline)
                self._moves_done.wait(GIVE_WAY_SECONDS)
        with self._lock:
            self._check_open()
            self._emptied[number] = None
            if self._nvme_recovery is not None:
                self._nvme_recovery.forget(number)
        return readable

    def _rows_of(self, number: int) -> Column:
        """A namespace's rows that are not being stored, deepest first. The lock is free between pieces."""
        index, found = self._blocks.index, []
        with self._lock:
            for first in range(0, index.rows_end, SCANNED_ROWS):
                if first:
                    self._moves_done.wait(GIVE_WAY_SECONDS)
                    self._check_open()
                found.append(index.rows_and_depths(number, first, first + SCANNED_ROWS))
        rows, depths = map(np.concatenate, zip(*found, strict=True)) if found else (np.empty(0, np.int64),) * 2
        deepest_first: Column = rows[np.argsort(-depths, kind="stable")]
        return deepest_first

    def _drop_row(self, number: int, row: int, deadline: float) -> None:
        """Drop the row if it is still the namespace's. Under the lock, which is released while a move pins the row."""
        blocks = self._blocks
        while blocks.index.is_row_of(row, number) and blocks.residency.pins.counts[row]:
            left = deadline - self._clock.monotonic_seconds()
            if left <= 0:
                raise TierUnavailable(f"blocks are still on the move, and not all were dropped; {_ASK_AGAIN}")
            self._moves_done.wait(min(DROP_LOOKS_SECONDS, left))
            self._check_open()
        if blocks.index.is_row_of(row, number):
            blocks.drop(row)

    def _cancel_all(self, number: int) -> None:
        """Cancel a namespace's reservations. Under the lock, which is released between pieces."""
        while not self._closed:
            mine = (one for one in self._reservations.values() if one.namespace == number and not one.cancelled)
            record = next(mine, None)
            if record is None:
                return
            self._orphan_the_last(record, also_ending=True)
            if self._reservations.get(record.number) is record and not (record.cancelled or self._closed):
                self._cancel(record)

    def _retire_emptied(self) -> None:
        """Give back empty extents. Not under the lock: unmapping is slow."""
        most = max(1, RETIRED_BYTES // self._blocks.dram.extent_bytes)
        gone: list[Extent] = []
        while self._emptied:
            with self._lock:
                number = next(iter(self._emptied), None)
                if number is None or self._closed:
                    return
                gone = self._blocks.retire_empty(number, most)
                if len(gone) < most:
                    self._emptied.pop(number, None)
                else:
                    self._moves_done.wait(GIVE_WAY_SECONDS)
            gone.clear()

    def _await_taken_in(self, is_busy: Callable[[], bool], deadline: float) -> None:
        """Wait until recovery is over and no move is in flight. Under the lock. Raises `TierUnavailable`, and
        `StoreClosed` if the store was closed while the lock was released."""
        self._check_open()
        while (is_warming := self._is_recovering) or is_busy():
            left = deadline - self._clock.monotonic_seconds()
            if left <= 0:
                what = "what is on disk is still being taken in" if is_warming else "blocks are still on the move"
                raise TierUnavailable(f"{what}, and nothing was dropped; {_ASK_AGAIN}")
            self._moves_done.wait(min(DROP_LOOKS_SECONDS, left))
            self._check_open()
        if self._nvme_recovery is not None and self._nvme_recovery.failed:
            raise TierUnavailable(
                "some of what is on disk could not be taken in at the start, and would be back; mend the disk, "
                "open the store again, and drop the namespace then"
            )

    # Get -----------------------------------------------------------------------------------------------------------

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        """The longest readable prefix, and why it ends there."""
        with self._lock:
            if self._closed:
                return MatchReply(0, reason=MissReason.DISABLED, detail="the store is closed")
            if number in self._unfound:
                return MatchReply(0, reason=MissReason.DISABLED, detail="it is being dropped")
            if self._levels is None and (self.fetched is None or not self.fetched.is_any_marked):
                blocks = self._blocks.index.matched(number, keys)
                tiers: TierRuns = ((HitTier.DRAM, blocks),) if blocks else ()
            else:
                rows = self._blocks.index.match(number, keys)
                blocks, tiers = len(rows), self._tiers(rows)
            reason, detail = self._why(number, keys, blocks)
            return MatchReply(blocks, tiers, reason, detail)

    def lease(self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float) -> LeaseReply:
        """Pin the longest readable prefix; blocks in lower tiers are promoted until the deadline."""
        if len(keys) > self._locked_blocks(number):
            return self._lease_long(number, keys, first_block, deadline_ms)
        reply = self._lease(number, keys, first_block, deadline_ms)
        if reply is None:  # ended leases still pin
            self.finish_ending()
            reply = self._lease(number, keys, first_block, deadline_ms, takes_what_there_is=True)
        assert reply is not None
        return reply

    def lease_at_once(self, number: int, keys: Sequence[bytes], first_block: int) -> LeaseReply | None:
        """As `lease` if no block needs promotion, or if it is a miss; else None, and nothing is pinned."""
        return self._lease(number, keys, first_block, None) if len(keys) <= self._locked_blocks(number) else None

    def _locked_blocks(self, number: int) -> int:
        return max(1, min(LOCKED_BLOCKS, LOCKED_PLACES // len(self._blocks.spaces[number].classes)))

    def _lease(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int,
        deadline_ms: float | None,
        *,
        takes_what_there_is: bool = False,
    ) -> LeaseReply | None:
        """deadline_ms: None for no wait. takes_what_there_is: while ended leases pin, return a shorter lease, not
        None."""
        with self._lock:
            if self._closed:
                return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail="the store is closed")
            if number in self._blocks.dropping:
                return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail="it is being dropped")
            self._expire_due()
            rows = self._blocks.index.match(number, keys)
            end = LeaseEnd(*self._why(number, keys, len(rows)))
            wanted = rows[first_block:]
            affordable, limit = self._affordable(number, wanted)
            if affordable < len(wanted):
                if len(self._endings) and not takes_what_there_is:
                    return None
                end = LeaseEnd(MissReason.PINNED_FULL, limit, lacks_room=True)
                wanted = wanted[:affordable]
            if not wanted:  # nothing to pin: the caller has the blocks before `first_block`
                blocks = min(first_block, len(rows))
                return no_lease(first_block, blocks, self._tiers(rows[:blocks]), end)
            chain = rows[: first_block + len(wanted)]
            tiers = self._tiers(chain)  # before promotion: a promoted block counts as a hit of the tier it came from
            missing = [row for row in wanted if not self._blocks.is_above(row)] if self._levels is not None else []
            unverified = [row for row in wanted if row in self._blocks.unverified] if self._blocks.unverified else []
            if deadline_ms is None and (missing or unverified):
                return None
            self._pin(number, wanted)
            if not missing and not unverified:
                return self._grant(number, first_block, chain, wanted, tiers, end)
            waiting = (number, wanted)
            self._lifting.append(waiting)
        assert deadline_ms is not None
        deadline = self._clock.monotonic_seconds() + deadline_ms / 1000
        late = None
        try:
            if missing:
                assert self._levels is not None
                late = self._levels.promoter.bring_up(number, missing, deadline)
            if unverified and not read_first(self._blocks, self._lock, self._clock, unverified, deadline):
                late = late or MissReason.DEADLINE
        except BaseException:  # interrupted: no lease needs these pins any more
            with self._lock:
                self._end_lifting(waiting)
                self._unpin(number, wanted)
            raise
        with self._lock:
            self._end_lifting(waiting)
            return self._grant_what_is_up(number, first_block, chain, wanted, tiers, end, late)

    def _lease_long(self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float) -> LeaseReply:
        """`_lease` in pieces; the lock is free in between."""
        deadline = self._clock.monotonic_seconds() + deadline_ms / 1000
        wanted: list[int] = []
        waiting = (number, wanted)
        try:
            blocks, tiers, end = self._pin_long(waiting, keys, first_block)
            late = None
            missing = [row for row in wanted if not self._blocks.is_above(row)] if self._levels is not None else []
            if missing:
                assert self._levels is not None
                late = self._levels.promoter.bring_up(number, missing, deadline)
            unverified = [row for row in wanted if row in self._blocks.unverified] if self._blocks.unverified else []
            if unverified and not read_first(self._blocks, self._lock, self._clock, unverified, deadline):
                late = late or MissReason.DEADLINE
            found = self._found_long(number, wanted)
        except BaseException:  # interrupted: no lease needs these pins any more
            with self._lock:
                self._end_lifting(waiting)
                self._unpin(number, wanted)
            raise
        with self._lock:
            self._end_lifting(waiting)
            ready = len(found.generations)
            self._unpin(number, wanted[ready:])
            if self._closed:
                return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail="the store is closed")
            if ready < len(wanted):
                end = self._end_of_what_is_up(late, wanted[ready])
                blocks = first_block + ready
                tiers = cut_runs(tiers, blocks)
                del wanted[ready:]
            if not wanted:
                blocks = min(first_block, blocks)
                return no_lease(first_block, blocks, cut_runs(tiers, blocks), end)
            reply = self._granted(number, first_block, blocks, wanted, found, tiers, end)
            chain = self._blocks.index.chain(wanted[-1])
            self._blocks.counted(chain, ready)
            self._refreshing.append((chain, ready))
        try:
            self._refresh()
        except BaseException:  # interrupted: no client learns this lease's number
            self.release(reply.lease)
            raise
        return reply

    def _pin_long(
        self, waiting: tuple[int, list[int]], keys: Sequence[bytes], first_block: int
    ) -> tuple[int, TierRuns, LeaseEnd]:
        """Pin the readable prefix of a long chain. Returns how many blocks that is, the tiers they were found in, and
        why it ends there. waiting: pinned so far."""
        number, wanted = waiting
        blocks = 0
        tiers: list[tuple[HitTier, int]] = []
        may_wait = True  # once: for ended leases that still pin
        with self._lock:
            self._lifting.append(waiting)
            first = 0
            while first < len(keys):
                if self._closed:
                    return blocks, tuple(tiers), LeaseEnd(MissReason.DISABLED, "the store is closed")
                if number in self._blocks.dropping:
                    return blocks, tuple(tiers), LeaseEnd(MissReason.DISABLED, "it is being dropped")
                self._expire_due()
                asked = keys[first : first + LOCKED_BLOCKS]
                rows = self._blocks.index.match(number, asked)
                own = min(max(0, first_block - first), len(rows))
                affordable, limit = self._affordable(number, rows[own:])
                is_cut = affordable < len(rows) - own
                if is_cut and len(self._endings) and may_wait:
                    may_wait = False
                    self._finish_all()
                    continue
                rows = rows[: own + affordable]
                self._pin(number, rows[own:])
                wanted += rows[own:]
                blocks += len(rows)
                tiers = join_runs(tiers, self._tiers(rows))
                if is_cut:
                    return blocks, tuple(tiers), LeaseEnd(MissReason.PINNED_FULL, limit, lacks_room=True)
                if len(rows) < len(asked):
                    break
                first += LOCKED_BLOCKS
                self._moves_done.wait(GIVE_WAY_SECONDS)
            return blocks, tuple(tiers), LeaseEnd(*self._why(number, keys, blocks))

    def _found_long(self, number: int, rows: Sequence[int]) -> LeasedFrames:
        found = LeasedFrames(len(self._blocks.spaces[number].classes))
        blocks, state = self._blocks, self._blocks.index.state
        most = self._locked_blocks(number)
        with self._lock:
            for first in range(0, len(rows), most):
                if self._closed:
                    break
                some = rows[first : first + most]
                ready = 0
                for row in some:
                    if state(row) is not RowState.VISIBLE or not blocks.is_above(row) or row in blocks.unverified:
                        break
                    ready += 1
                found.add(blocks.residency, some[:ready])
                if ready < len(some):
                    break
                self._moves_done.wait(GIVE_WAY_SECONDS)
        found.flat = flat(found.places)
        return found

    def _refresh(self) -> None:
        """Mark used long chains as recent, one piece at a time."""
        with self._lock:
            while self._refreshing and not self._closed:
                chain, count = self._refreshing.popleft()
                self._blocks.refreshed(chain[:LOCKED_BLOCKS], count)
                if len(chain) > LOCKED_BLOCKS:
                    self._refreshing.appendleft((chain[LOCKED_BLOCKS:], max(0, count - LOCKED_BLOCKS)))
                self._moves_done.wait(GIVE_WAY_SECONDS)

    def release(self, lease: int) -> None:
        """Unpin; the places of an expired lease may be reused from now on."""
        with self._lock:
            record = self._leases.take(lease)
            if record is not None:
                self._finish([record])

    def expire(self, lease: int) -> None:
        """Expire a lease whose holder is unreachable and may still read: it pins nothing, and its places are not reused
        before it is released."""
        with self._lock:
            record = self._leases.expire(lease)
            if record is not None:
                self._finish([record])

    def begin_ending(self, released: Collection[int], expired: Collection[int]) -> None:
        """`release` some leases and `expire` others, quickly, however many: they are over at once; `finish_ending`, or
        a put or lease that lacks room, unpins them."""
        if not released and not expired:
            return
        with self._lock:
            records = [*map(self._leases.take, released), *map(self._leases.expire, expired)]
            if self._closed:
                return
            for record in records:
                if record is not None:
                    self._endings.begin(record)
            self._endings.work()

    def finish_ending(self) -> None:
        """Unpin the blocks of ended leases, and carry out pending aborts."""
        with self._lock:
            self._finish_all()
        while (reservation := self._next_to_abort()) is not None:
            self.abort(reservation)
        self._retire_emptied()

    def _next_to_abort(self) -> int | None:
        try:
            return self._to_abort.popleft()
        except IndexError:  # another thread was faster
            return None

    @property
    def is_ending(self) -> bool:
        """Whether `finish_ending` has work; may be read without the lock."""
        is_any = len(self._endings) > 0 or len(self._to_abort) > 0 or len(self._emptied) > 0
        return is_any and not self._closed

    def ending_places(self, tenant: bytes) -> int:
        """Places of a tenant's ended leases that are still pinned."""
        return self._endings.places_of(tenant)

    def attach(self, lease: int) -> bool:
        """Add a holder to a live lease; the lease ends when all its holders have released it."""
        with self._lock:
            if self._closed:
                return False
            self._expire_due()
            return self._leases.attach(lease, self._clock.monotonic_seconds())

    def is_leased(self, lease: int) -> bool:
        """Whether a lease still pins."""
        with self._lock:
            if self._closed:
                return False
            self._expire_due()
            return self._leases.is_live(lease, self._clock.monotonic_seconds())

    def report(self, lease: int, block: int, part: int) -> None:
        """A reader's check failed: verify the frame here, and quarantine the block if it fails here too."""
        with self._lock:
            record = self._leases.get(lease) if not self._closed else None
            self._blocks.counters["reported_frames"] += 1
            place = record.place(part, block - record.first_block) if record is not None else None
            if record is None or place is None:
                return
            row = record.rows[block - record.first_block]
            index, residency = self._blocks.index, self._blocks.residency
            if index.state(row) != RowState.VISIBLE or residency.place(row, part) != place:
                return
            size_bytes = self._blocks.spaces[record.namespace].classes[part].frame_bytes
            is_sound = self._blocks.verify(row, part)
            self._blocks.tally.checked(CheckedAt.REPORT, size_bytes, is_sound=is_sound)
            if not is_sound:
                self._blocks.quarantine(row)

    def _ticket(self, client: StoreClient, request: m.SealTicket | m.OpenTicket) -> m.Sealed | m.TicketOpened:
        number, now = client.named[request.namespace], self._clock.wall_seconds()
        space, identity = self._blocks.spaces[number], Identity.of(client.keys, self.node)
        about, others = (identity, space.classes[0].namespace, space.namespace.layout.block_tokens, now), self.fetched
        if isinstance(request, m.OpenTicket):
            return opened(request.ticket, *about, of_others=others is not None and others.is_served(client.keys.tenant))
        self._retain(number, request.keys, int(now + request.seconds))
        return sealed(request, *about, others.door if others is not None else "")

    def _retain(self, number: int, keys: Sequence[bytes], expires_at: int) -> None:
        """Retain the readable prefix of a chain until then. The lock is free between pieces."""
        for first in range(0, len(keys), LOCKED_BLOCKS):
            with self._lock:
                some = keys[first : first + LOCKED_BLOCKS]
                is_served = not self._closed and number not in self._blocks.dropping
                rows = self._blocks.index.match(number, some) if is_served else []
                self._blocks.renew(rows, 0, expires_at)
                if len(rows) < len(some):
                    return
                self._moves_done.wait(GIVE_WAY_SECONDS)

    # Put -----------------------------------------------------------------------------------------------------------

    def _reserve_for(self, client: StoreClient, verb: m.Reserve, seconds: float | None) -> ReserveReply:
        number, collective = client.named[verb.namespace], None
        if verb.collective:
            parts = tuple(verb.parts) or tuple(range(len(self._blocks.spaces[number].classes)))
            collective = Collective(verb.collective, parts, client.session_name)
        first, wish = verb.first_block, (verb.priority, verb.ttl_seconds)
        return self.reserve(number, verb.keys, first, *wish, collective, seconds, skipped=verb.skipped)

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
        with self._lock:
            if self._closed or number in self._blocks.dropping:
                return ReserveReply(0, 0, stopped_at=0, reason=MissReason.DISABLED)
            self._expire_due()
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
            with self._lock:
                self._collective.answered(put, reply, self._clock.monotonic_seconds())
                self._joint_answered.notify_all()
                joined = self._join(put, chain, collective)
        return joined

    def _join(self, put: CollectivePut, chain: Chain, collective: Collective) -> ReserveReply:
        """A share of a collective put, once the first participant has its answer. Under the lock."""
        if not self._joint_answered.wait_for(lambda: put.answer is not None, ANSWER_SECONDS):
            return ReserveReply(0, 0, stopped_at=0, reason=MissReason.DEADLINE)
        return self._collective.join(put, chain, collective.parts, self._new_reservation)

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
        with self._lock:
            if self._closed or number in self._blocks.dropping:
                return ReserveReply(0, 0, stopped_at=0, reason=MissReason.DISABLED)
            self._expire_due()
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
                reason, _ = self._why(number, keys, len(rows))
                return ReserveReply(0, skipped + present, stopped_at=skipped + present, reason=reason)
            parts = len(self._blocks.spaces[number].classes)
            record = ReservationRecord(self._new_reservation(), number, parts, priority, expires_at, room_until=ends_at)
            asked, record.is_fetched = len(keys), couriers > 0
            if self.fetched is not None and record.is_fetched:
                keys = keys[: present + self.fetched.room(number, couriers)]
            stopped_at, reason = self._begin_rows(record, keys, present, in_flight_rows)
            if stopped_at is None and len(keys) < asked:
                stopped_at, reason = len(keys), MissReason.BUSY
            if skipped:  # from here on counted in blocks of the chain
                record.indexes = [skipped + position for position in record.indexes]
                stopped_at = skipped + stopped_at if stopped_at is not None else None
            if not record.rows:
                return ReserveReply(0, skipped + present, stopped_at=stopped_at, reason=reason)
            self._reservations[record.number] = record
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
        elif stopped_at is None:
            stopped_at, reason = self._tail_evicted(record, keys, skipped)
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
        )

    def commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> int:
        """Seal the next blocks of a part and publish those that are complete; returns how many blocks are committed in
        all parts that are filled under this number."""
        done = 0
        for at in range(0, max(1, len(digests)), SEALED_BLOCKS):
            if at:
                with self._lock:
                    self._moves_done.wait(GIVE_WAY_SECONDS)
            done = self._commit(reservation, part, first + at, digests[at : at + SEALED_BLOCKS])
        self._refresh()
        if self._levels is not None:
            self._levels.flush_if_needed()
        return done

    def _commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> int:
        with self._lock:
            share = self._collective.participants.get(reservation)
            record = share.record if share is not None else self._reservations.get(reservation)
            if record is None or record.cancelled or record.is_ending or record.is_cancelling or self._closed:
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

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        """Make leading blocks durable for at most that long; returns how many are, and why not all."""
        if self._closed:
            return 0, MissReason.DISABLED
        if self._levels is None:
            return 0, MissReason.UNSUPPORTED
        with self._lock:
            self._expire_due()
        done, reason = self._levels.persist(number, keys, seconds)
        if reason in (MissReason.EVICTED, MissReason.PINNED_FULL):
            with self._lock:
                is_full = reason is MissReason.PINNED_FULL
                reason = self._who_has_the_room_below() if is_full else self._why(number, keys, done)[0]
        return done, reason

    def abort(self, reservation: int) -> None:
        """End a reservation; invisible blocks are given up. In a collective put for all; this producer writes no
        more."""
        with self._lock:
            if self._collective.participants.get(reservation) is not None:
                self._abort_share(self._collective.let_go(reservation).record)
            else:
                record = self._reservations.get(reservation)
                if record is None or self._closed or record.is_ending:
                    return
                record.is_ending = True
                try:
                    self._abort(record)
                finally:  # if it was interrupted, it may be asked for again
                    record.is_ending = False
        self._retire_emptied()
        if self._refreshing:  # soon: rows evicted meanwhile may become another namespace's
            self._refresh()

    def begin_abort(self, reservation: int) -> None:
        """Queue an `abort` for `finish_ending`."""
        self._to_abort.append(reservation)

    def _abort(self, record: ReservationRecord) -> None:
        """Under the lock, which is released between pieces: it may be cancelled, and the store closed, meanwhile."""
        if not record.cancelled:
            self._touch_published(record)
        most = max(1, ABORTED_PLACES // record.parts)
        while not (self._closed or record.cancelled) and len(record.rows) - record.published > most:
            self._give_up(record, len(record.rows) - most)
            self._moves_done.wait(GIVE_WAY_SECONDS)
        while not self._closed and len(record.abandoned_slots) > ABORTED_PLACES:
            self._blocks.free_abandoned_slots(record.abandoned_slots[-ABORTED_PLACES:])
            del record.abandoned_slots[-ABORTED_PLACES:]
            self._moves_done.wait(GIVE_WAY_SECONDS)
        if self._closed or self._reservations.get(record.number) is not record:
            return
        if record.cancelled:
            self._free_cancelled(record)
        else:
            self._give_up(record, record.published)
            self._blocks.free_abandoned_slots(record.abandoned_slots)
            del self._reservations[record.number]
            self._collective.freed(record)

    def cancel(self, reservation: int) -> None:
        """End a reservation whose unreachable producer may still write: its blocks go now, its slots with `abort`."""
        with self._lock:
            share = self._collective.participants.get(reservation)
            record = share.record if share is not None else self._reservations.get(reservation)
            if record is None or record.cancelled or record.is_ending or self._closed:
                return
            self._touch_published(record)
            self._orphan_the_last(record)
            if not (record.cancelled or record.is_ending or self._closed):
                self._cancel(record)
        self._retire_emptied()
        if self._refreshing:
            self._refresh()

    @property
    def runs_out_at(self) -> float:
        """When the next collective put or fetched block expires, in monotonic seconds; inf without any."""
        return self._collective.due_at if self.fetched is None else min(self._collective.due_at, self.fetched.due_at)

    def expire_due(self) -> None:
        """End collective puts that have expired, also without requests. Takes the lock only if one is due."""
        if self._clock.monotonic_seconds() < self.runs_out_at and not self.is_ending:
            return
        with self._lock:
            if not self._closed:
                self._expire_due()

    def collective_puts(self) -> dict[bytes, int]:
        """How many collective puts have slots, by session."""
        with self._lock:
            return self._collective.under_way()

    def spans(self, places: Sequence[int]) -> list[FrameSpan]:
        """The bytes at reserved or leased places, up to the first whose extent is gone. Raises `StoreClosed`."""
        spans = self._blocks.dram.spans_at(places)
        self._check_open()  # afterwards: spans may be missing because the store was closed meanwhile
        return spans

    def memory(self, held: int, places: Sequence[int], *, writable: bool = False) -> list[FrameSpan]:
        """As `Door.memory`: in the store's own process all memory is mapped."""
        return self.spans(places)

    # Other processes -----------------------------------------------------------------------------------------------

    def fetch_with(self, make: Callable[..., Fetched]) -> None:
        """Let couriers fetch blocks from elsewhere. make: builds `elsewhere.fetched` from the store's parts."""
        shared = self._blocks, self._clock, self._lock, self._pin, self._unpin, self._reservations, self._leases
        self.fetched = make(*shared, self._mover.keys)

    def share(self, extent: int, tenant: bytes, holder: int, fills: Collection[int] | None = None) -> SharedExtent:
        """Open an extent for another process: to read, or with `fills`, the namespaces it stores into, to write.

        Raises `BlockMissing` if the extent is gone, is another tenant's, or is to be written and belongs to none of
        these.
        """
        with self._lock:
            self._check_open()
            dram = self._blocks.dram
            if dram.gone([extent]) or dram.class_of(extent).tenant != tenant:
                raise BlockMissing("no extent of that number")
            spaces = self._blocks.spaces
            namespaces = {spaces[number].classes[0].namespace for number in fills or ()}
            if fills is not None and dram.class_of(extent).namespace not in namespaces:
                raise BlockMissing("no extent of a namespace that is being stored into")
            frame_bytes = dram.class_of(extent).frame_bytes
        # Without the lock: a client can make this slow by what it did to an extent.
        descriptor = dram.share(extent, holder, writable=fills is not None)
        return SharedExtent(descriptor, dram.extent_bytes, frame_bytes)

    def is_mapped(self, extent: int, holder: int) -> bool:
        """Whether a holder still has an extent mapped or open. Takes no lock; it can be slow."""
        return self._blocks.dram.is_shared(extent, holder)

    def unmapped(self, extents: Sequence[int], holder: int) -> Unmapped:
        """How many leading extents a holder has unmapped, as far as a short inquiry tells. Takes no lock."""
        is_shared = self._blocks.dram.is_shared
        return look(extents, lambda extent: is_shared(extent, holder), self._clock.thread_seconds)

    @property
    def retired_extents(self) -> int:
        """Extents given back since the start: while this does not change, `gone` has no news."""
        return self._blocks.dram.retired

    def tell_of_mapped(self, tell: Callable[[int], object]) -> None:
        """From now on call `tell` with each extent that is given back while clients map it. It runs under the lock: it
        must neither wait nor call the store."""
        self._blocks.dram.mapped_still = tell

    def gone(self, extents: Iterable[int]) -> list[int]:
        """Which of these extents were given back; clients that share them must unmap them."""
        with self._lock:
            return self._blocks.dram.gone(extents)

    # A lower tier -------------------------------------------------------------------------------------------------

    def start_loading(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        """Start recovery from disk in a thread; until it is done, a miss may be `warming`."""
        dram_recovery = self._dram_recovery
        if self._nvme_recovery is not None:
            self._blocks.dram.prepare()  # blocks on disk will be promoted
            self._nvme_recovery.start(
                tenants, lambda: dram_recovery.run(tenants) if dram_recovery is not None else None
            )
        elif dram_recovery is not None:
            threading.Thread(target=dram_recovery.run, args=(tenants,), name="kv-takeover", daemon=True).start()
        if self._scrubbing is not None:
            self._scrubbing.start()

    def prefault(self) -> None:
        """Fault in all of DRAM in the background, at the lowest priority."""
        dram = self._blocks.dram
        dram.prepare(dram.budget_bytes // dram.extent_bytes)

    @property
    def is_loaded(self) -> bool:
        """Whether recovery from disk is over, successful or not."""
        return not self._is_recovering

    def warmed(self, timeout_seconds: float) -> bool:
        """Whether recovery from disk is over after at most that long, and went well."""
        deadline = self._clock.monotonic_seconds() + timeout_seconds
        if self._nvme_recovery is not None and not self._nvme_recovery.wait(timeout_seconds):
            return False
        return self._dram_recovery is None or self._dram_recovery.wait(
            max(0.0, deadline - self._clock.monotonic_seconds())
        )

    @property
    def _is_recovering(self) -> bool:
        is_loading = self._nvme_recovery is not None and self._nvme_recovery.is_recovering
        return is_loading or (self._dram_recovery is not None and self._dram_recovery.is_recovering)

    # Operations ----------------------------------------------------------------------------------------------------

    def evict(self, blocks: int) -> int:
        """Evict up to that many of the worst leaves; returns how many went. Raises `BadInput`."""
        if not isinstance(blocks, Integral) or blocks < 0:
            raise BadInput(f"blocks={blocks!r}; give a whole number, 0 or more")
        with self._lock:
            self._check_open()
            self._expire_due()
            self._finish_all()
            gone = 0
            while True:
                self._check_open()
                most = min(EVICTED_BLOCKS, blocks - gone)
                evicted = self._blocks.evict_worst(most)
                gone += evicted
                if evicted < most or gone == blocks:
                    return gone
                self._moves_done.wait(GIVE_WAY_SECONDS)

    def usage(self) -> StoreUsage:
        with self._lock:
            lower = self._lower if not self._closed else None  # in a forked child its lock may never be free
            scrub = self._scrubbing.usage() if self._scrubbing is not None else None
            if not self._closed:
                self._blocks.dram.look_at_guarded()
            return StoreUsage(
                dram=self._blocks.dram.usage(),
                nvme=lower.tier.usage() if lower is not None else None,
                loading=self._nvme_recovery.progress if self._nvme_recovery is not None and lower is not None else None,
                blocks=0 if self._closed else self._blocks.index.visible_blocks(),
                leases=len(self._leases),
                reservations=len(self._reservations),
                pinned_bytes=self._pinned_bytes,
                counters=dict(self._blocks.counters) | (scrub.counters if scrub is not None else {}),
                scrub=scrub,
                guarded_bytes=self._blocks.dram.guarded_bytes(),
                dram_retained_bytes=self._blocks.residency.retained_bytes(),
                nvme_retained_bytes=lower.residency.retained_bytes() if lower is not None else None,
                dram_retained_budget_bytes=retained_budget(self._blocks.residency),
                nvme_retained_budget_bytes=retained_budget(lower.residency) if lower is not None else None,
                retained_fraction=self._limits.retained_fraction,
                write_budget=lower.admission.budget() if lower is not None else None,
                pinned_budget_bytes=self._pinned_budget_bytes(),
                dram_blocks=self._blocks.residency.blocks,
                nvme_blocks=lower.residency.blocks if lower is not None else None,
                tally=self._blocks.tally.now(),
            )

    def namespaces(self) -> list[NamespaceUsage]:
        """Every namespace and its usage; those on disk once they are recovered."""
        with self._lock:
            return occupancy(self._blocks) if not self._closed else []

    def namespace_of(self, number: int) -> Namespace:
        return self._blocks.spaces[number].namespace

    def difference(self, number: int, other: int) -> str:
        """The first field in which two namespaces differ, in words."""
        return self.namespace_of(number).difference(self.namespace_of(other))

    def tenants(self, names: Mapping[bytes, str]) -> list[TenantStatus]:
        """What these tenants use of each tier, under their names."""
        with self._lock:
            return tenancy(self._blocks, names) if not self._closed else []

    def kept_until(self, number: int, keys: Sequence[bytes]) -> float:
        """Until when a readable chain is retained, in the clock's seconds; 0 if it is not."""
        with self._lock:
            return kept_until(self._blocks, number, keys) if not self._closed else 0.0

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
        if self._scrubbing is not None and not self._closed:
            self._scrubbing.close()
        if self._nvme_recovery is not None and self._levels is not None and not self._closed:
            self._nvme_recovery.stop(self._limits.close_seconds)
            self._levels.close(self._limits.close_seconds)
        with self._lock:
            if self._closed:
                return
            self._closed = True
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
        return self._closed

    @property
    def is_stuck(self) -> bool:
        """Whether the store is closed while a call to its disk has not returned and may still write."""
        if self._closer is None or self._levels is None:
            return False
        return self._closer.is_alive() or not self._levels.close(0)

    def close_after_fork(self) -> None:
        """In a forked child: memory and threads are the parent's, so the store is closed here, under a new lock."""
        self._closed = True
        self._lock = threading.Lock()
        self._moves_done = threading.Condition(self._lock)
        self._joint_answered = threading.Condition(self._lock)
        self._waiting = threading.Condition(self._lock)

    def check(self) -> None:
        """Verify every invariant; for tests, and safe at any time."""
        with self._lock:
            if self._closed:
                return
            pins, held = self._endings.check([*self._leases.live(), *self._leases.expired()])
            copied = self._blocks.residency.held.counts()
            copied.subtract(held)
            assert not any(copied.values()), "what late readers may read is held for them, and nothing else is"
            for reservation in self._reservations.values():
                pins.update(reservation.repairs)
            for job in self._jobs.values():
                pins.update({copy.row for copy in job.copies})
            for _, rows in self._lifting:
                pins.update(rows)
            promoting = self._levels.promoter.promoting if self._levels is not None else set()
            demoting = self._levels.demoting if self._levels is not None else set()
            pins.update(promoting)
            for pinned in self._levels.pinned_for_demotion if self._levels is not None else ():
                pins.update(pinned)
            pins.update(self.fetched.pinned() if self.fetched is not None else ())
            namespaces = map(self._blocks.index.namespace_of, pins)
            assert self._pinned_bytes == sum(self._blocks.spaces[number].block_bytes for number in namespaces)
            self._blocks.check(pins, demoting)
            self._collective.check(self._reservations)

    def eviction_of(self, number: int, key: bytes) -> tuple[Eviction | None, bool]:
        """How a missing block was evicted, and whether it had a ttl. Takes no lock."""
        stamp, had_ttl = self._blocks.index.eviction(number, key)
        return self._blocks.tally.eviction(stamp), had_ttl

    # Inside: looking up --------------------------------------------------------------------------------------------

    def _why(self, number: int, keys: Sequence[bytes], blocks: int) -> tuple[MissReason | None, str]:
        if blocks == len(keys):
            return None, ""
        key, index = keys[blocks], self._blocks.index
        parent = index.find(number, keys[blocks - 1]) if blocks else NO_ROW
        finding = index.why_not(number, key, parent)
        reason = MissReason.DIVERGED if finding is None else REASON_OF_FINDING[finding]
        if reason is MissReason.EVICTED:
            self._blocks.tally.asked_again(index.stamp_of_eviction(number, key))
        if reason in (MissReason.DIVERGED, MissReason.ABSENT, MissReason.EVICTED) and self._is_recovering:
            return MissReason.WARMING, "what was there before a restart is still being taken in"
        if reason in (MissReason.DIVERGED, MissReason.ABSENT):
            if self._nvme_recovery is not None and self._nvme_recovery.failed:
                return MissReason.TIER_DOWN, "some of what is on disk could not be taken in at the start"
            other = index.elsewhere(number, key)
            if other >= 0:
                return MissReason.OTHER_NAMESPACE, self.difference(number, other)
        return reason, ""

    def _find_space(self, tenant: bytes, wanted: bytes) -> OpenedNamespace | None:
        mine = (one for one in self._blocks.spaces if one.tenant == tenant and one.classes[0].namespace == wanted)
        return next(mine, None)

    # Inside: leases ------------------------------------------------------------------------------------------------

    def _pinned_budget_bytes(self) -> int:
        return int(self._limits.pinned_fraction * self._blocks.dram.budget_bytes)

    def _affordable(self, number: int, wanted: Sequence[int]) -> tuple[int, str]:
        if not wanted:
            return 0, ""
        limits, mine = self._limits, self._leases.count_of(self._blocks.spaces[number].tenant)
        if len(self._leases) >= limits.leases:
            return 0, f"there are as many leases as limits.leases allows ({limits.leases})"
        if mine >= limits.most_leases:
            return 0, f"this tenant has as many leases as limits.tenant_leases allows ({limits.most_leases})"
        budget = self._pinned_budget_bytes()
        while True:
            blocks = max(0, budget - self._pinned_bytes) // self._blocks.spaces[number].block_bytes
            found = self._blocks.residency.pins.affordable(wanted, blocks)
            if found == len(wanted) or self.fetched is None or not self.fetched.give_way():
                return found, f"at most {budget} bytes may be pinned at once (limits.pinned_fraction of DRAM)"

    def _grant(
        self, number: int, first_block: int, chain: list[int], rows: list[int], tiers: TierRuns, end: LeaseEnd
    ) -> LeaseReply:
        self._blocks.used(chain[::-1], len(rows))
        found = LeasedFrames(len(self._blocks.spaces[number].classes))
        found.add(self._blocks.residency, rows)
        return self._granted(number, first_block, len(chain), rows, found, tiers, end)

    def _granted(
        self,
        number: int,
        first_block: int,
        blocks: int,
        rows: list[int],
        found: LeasedFrames,
        tiers: TierRuns,
        end: LeaseEnd,
    ) -> LeaseReply:
        now, tenant = self._clock.monotonic_seconds(), self._blocks.spaces[number].tenant
        lease = self._leases.add(number, first_block, rows, found.flat or flat(found.places), now, tenant)
        places, digests = tuple(found.places), tuple(found.header_digests)
        return LeaseReply(lease, first_block, blocks, places, digests, found.generations, tiers, *end)

    def _grant_what_is_up(
        self,
        number: int,
        first_block: int,
        chain: list[int],
        rows: list[int],
        tiers: TierRuns,
        end: LeaseEnd,
        late: MissReason | None,
    ) -> LeaseReply:
        if self._closed:
            return LeaseReply(0, first_block, 0, reason=MissReason.DISABLED, detail="the store is closed")
        index, blocks = self._blocks.index, self._blocks
        ready = 0
        while ready < len(rows) and index.state(rows[ready]) is RowState.VISIBLE and blocks.is_above(rows[ready]):
            if rows[ready] in blocks.unverified:
                break
            ready += 1
        self._unpin(number, rows[ready:])
        if ready < len(rows):
            end = self._end_of_what_is_up(late, rows[ready])
            chain = chain[: first_block + ready]
            tiers = cut_runs(tiers, len(chain))
        if not ready:
            return no_lease(first_block, len(chain), tiers, end)
        return self._grant(number, first_block, chain, rows[:ready], tiers, end)

    def _end_of_what_is_up(self, late: MissReason | None, row: int) -> LeaseEnd:
        if late is MissReason.PINNED_FULL:
            return LeaseEnd(*self._who_has_the_room(None), lacks_room=True)
        reason = late or REASON_OF_FINDING[self._blocks.index.why_lost(row)]
        return LeaseEnd(reason, "not all blocks could be brought up to DRAM in time")

    def _tiers(self, rows: Sequence[int]) -> TierRuns:
        found: TierRuns = ((HitTier.DRAM, len(rows)),) if rows else ()
        if self._levels is not None:
            found = tier_runs(rows, self._blocks.is_above, lambda: self._blocks.residency.listed_column)
        return found if self.fetched is None or not self.fetched.is_any_marked else self.fetched.tiers(rows, found)

    def _is_moving(self, number: int) -> bool:
        if any(waiting == number for waiting, _ in self._lifting):
            return True
        return self._levels is not None and self._levels.is_moving(number)

    def _end_lifting(self, waiting: tuple[int, list[int]]) -> None:
        self._lifting = [one for one in self._lifting if one is not waiting]
        self._moves_done.notify_all()

    def _finish(self, records: Iterable[LeaseRecord]) -> None:
        spent, records = 0, list(records)
        for record in records:  # from now on puts and leases that lack room find all of them
            if not self._closed:
                self._endings.begin(record)
        for record in records:
            while self._endings.is_under_way(record) and not self._closed:
                spent += self._endings.step(record, ENDED_PLACES - spent)
                if spent >= ENDED_PLACES:
                    spent = 0
                    self._moves_done.wait(GIVE_WAY_SECONDS)

    def _finish_all(self) -> None:
        self._finish(self._endings.under_way())

    def _pin(self, number: int, rows: Sequence[int]) -> None:
        """Pin distinct blocks of a namespace. Leases, repairs and moves pin alike: one block may have all three."""
        self._pinned_bytes += self._blocks.residency.pins.pin(rows) * self._blocks.spaces[number].block_bytes

    def _unpin(self, number: int, rows: Sequence[int]) -> None:
        self._pinned_bytes -= self._blocks.residency.pins.unpin(rows) * self._blocks.spaces[number].block_bytes

    def _expire_due(self) -> None:
        """Expire leases and all else that is due; called before anything that needs room or pins. Work that this only
        begins is finished by a put or lease that lacks the room."""
        while self.forgotten:
            record = self._leases.take(self.forgotten.popleft())
            if record is not None:
                self._endings.begin(record)
        for record in islice(self._leases.expire_due(self._clock.monotonic_seconds()), RUN_OUT_AT_ONCE):
            self._endings.begin(record)
            self._blocks.counters["lapsed_leases"] += 1
        self._endings.work()
        if self.fetched is not None:
            self.fetched.expire()
        if self._clock.monotonic_seconds() >= self._collective.due_at:
            for reservation in self._collective.expire_due(self._clock.monotonic_seconds()):
                self._touch_published(reservation)
                self._cancel(reservation)
                self._blocks.counters["lapsed_joint_puts"] += 1

    # Inside: storing -----------------------------------------------------------------------------------------------

    def _stand(self, number: int, keys: Sequence[bytes], in_flight_rows: Mapping[int, int]) -> bool:
        index = self._blocks.index
        rows = [index.find(number, key) for key in keys]
        return all(row in in_flight_rows or (row != NO_ROW and index.state(row) is RowState.VISIBLE) for row in rows)

    def _begin_rows(
        self, record: ReservationRecord, keys: Sequence[bytes], present: int, in_flight_rows: Mapping[int, int]
    ) -> tuple[int | None, MissReason | None]:
        """Rows for all blocks that are not readable, up to one that another put is storing.

        in_flight_rows: rows of other puts that this one may follow, with their reservations.
        """
        blocks, index = self._blocks, self._blocks.index
        parent = index.find(record.namespace, keys[present - 1]) if present else NO_ROW
        parent_key = (
            keys[present - 1] if present else root_key(blocks.spaces[record.namespace].namespace.layout.block_tokens)
        )
        filling = {row for other in self._reservations.values() for row in other.repairs}
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
        self._pin(record.namespace, sorted(record.repairs))
        return stopped

    def _find_slots(self, record: ReservationRecord | SlotRequest) -> MissReason | None:
        scarce = refused = False  # the machine had no memory for another extent: now, and at the last attempt
        unmap_wait = PUT_SECONDS if isinstance(record, ReservationRecord) else 0.0  # a lease has an engine's deadline
        has_waited = False
        for taken in range(self._limits.room_steps):
            ends_at = record.room_until if isinstance(record, ReservationRecord) else None
            if taken and ends_at is not None and self._clock.monotonic_seconds() >= ends_at:
                return MissReason.DEADLINE
            with self._lock:
                step: SlotClass | _ExtentMove | _Awaited | MissReason | None = MissReason.DISABLED
                if not record.cancelled and not self._closed:
                    step = self._take_slots(record, scarce, unmap_wait > 0)
                if step is None:
                    return None
                if isinstance(step, MissReason):
                    is_put = isinstance(record, SlotRequest) or not (record.is_fetched or record.cancelled)
                    if is_put and self.fetched is not None and not self._closed and self.fetched.give_way():
                        continue
                    if not len(self._endings) or has_waited or self._closed:
                        return step
                    has_waited = True  # ended leases pinned what could make room
                    self._finish_all()
                    continue
            if isinstance(step, _ExtentMove):
                self._vacate(step)
                scarce = False
            elif isinstance(step, _Awaited):
                waited, has_come = self._await_memory(record, step)
                unmap_wait = unmap_wait - waited if has_come else 0.0
            elif self._grow(step):
                refused = False
            else:
                if refused:  # not even after one was given back
                    return MissReason.TIER_DOWN
                scarce = refused = True
        return MissReason.DEADLINE

    def _await_memory(self, record: ReservationRecord | SlotRequest, awaited: _Awaited) -> tuple[float, bool]:
        """Wait until clients have unmapped this memory, other puts have taken it, or the wait is over. Returns how long
        it waited, and whether to look for slots again."""
        tenant, dram = self._blocks.spaces[record.namespace].tenant, self._blocks.dram
        is_collective = isinstance(record, ReservationRecord) and record.is_collective
        mapped = set(awaited.mapped)
        waited = 0.0
        with self._lock:
            began_at = self._clock.monotonic_seconds()
            if not self._unmap_wait.begin(tenant, awaited.mapped, began_at):
                return 0.0, True  # others began in between: look again
            try:
                for seconds in LOOKS_SECONDS[:COLLECTIVE_LOOKS] if is_collective else LOOKS_SECONDS:
                    if record.cancelled or self._closed:
                        return waited, False
                    self._waiting.wait(seconds)  # unmapping sends no notification
                    waited += seconds
                    now_mapped = dram.awaited()
                    mapped.intersection_update(now_mapped)
                    if not mapped or not now_mapped:
                        return waited, True
                if not is_collective:
                    self._unmap_wait.in_vain(mapped)
                return waited, False
            finally:
                now = self._clock.monotonic_seconds()
                self._unmap_wait.end(tenant, now - began_at, now, is_collective=is_collective)

    def _take_slots(
        self, record: ReservationRecord | SlotRequest, scarce: bool, is_patient: bool
    ) -> SlotClass | _ExtentMove | _Awaited | MissReason | None:
        """Slots for the next rows; returns what must happen outside the lock before there are more, or None if done."""
        blocks = self._blocks
        make_room = blocks.residency.room_within if scarce else blocks.residency.room
        take_places = blocks.make_place_above if isinstance(record, SlotRequest) else blocks.place
        classes = blocks.spaces[record.namespace].classes
        while record.filled < len(record.rows):
            missing = record.rows[record.filled :]
            free = min([blocks.dram.free_slots(slot_class) for slot_class in classes])
            if free:
                taken = missing[:free]
                for column, places in zip(record.places, take_places(record.namespace, taken), strict=True):
                    column += places
                record.filled += len(taken)
                continue
            blocks.dram.look_at_guarded()
            if all([blocks.dram.free_slots(slot_class) for slot_class in classes]):
                continue
            mapped = blocks.dram.awaited()
            if mapped:  # giving back more frees nothing before clients unmap this
                if is_patient and self._waits_for(record.namespace, mapped):
                    return _Awaited(mapped)
                if not blocks.evict_own(len(missing), record.namespace):
                    return self._no_room(record)
                continue
            groups = blocks.givers(record.namespace)
            move = make_room(classes, blocks.dram, groups)
            if isinstance(move, Evict):
                if not blocks.evict_for(record.namespace, len(missing)):
                    return self._no_room(record)  # the rest frees no extent, or leads to blocks that stay
            elif isinstance(move, Grow):
                return move.slot_class
            elif isinstance(move, Vacate):
                return self._start_vacating(move)
            elif scarce:
                return MissReason.TIER_DOWN
            else:  # no block may be evicted at all, or none for this tenant
                return MissReason.QUOTA if blocks.has_evictable() else self._no_room(record)
        return None

    def _no_room(self, record: ReservationRecord | SlotRequest) -> MissReason:
        if isinstance(record, SlotRequest):
            return MissReason.PINNED_FULL  # the lease's answer has the details
        reason, record.detail = self._who_has_the_room(record)
        return reason

    def _who_has_the_room(self, asker: ReservationRecord | None) -> tuple[MissReason, str]:
        """Why DRAM can evict nothing. `pinned_full` only if a client must release something first. Under the lock."""
        dram, levels = self._blocks.dram, self._levels
        if dram.awaited() or dram.guarded_bytes():
            return MissReason.DEADLINE, "memory that changes hands is still mapped by clients; try again"
        if self.fetched is not None and self.fetched.has_slots:
            return MissReason.DEADLINE, "blocks from elsewhere are on their way into what could make room; try again"
        if len(self._leases):
            return MissReason.PINNED_FULL, "what could make room is leased, or being stored or moved"
        is_moving = levels is not None and (levels.promoter.promoting or levels.demoting)
        if is_moving or self._jobs or self._lifting or any(one is not asker for one in self._reservations.values()):
            return MissReason.DEADLINE, "what could make room is being stored or moved; try again"
        return MissReason.QUOTA, "the prompt alone takes all the memory that it may; its first blocks are kept"

    def _who_has_the_room_below(self) -> MissReason:
        """The same for NVMe. Under the lock."""
        assert self._lower is not None
        if self._lower.tier.has_room():  # but the disk has no room for another slab
            return MissReason.TIER_DOWN
        if len(self._leases):
            return MissReason.PINNED_FULL
        may_go = next(self._lower.residency.worst(), None) is not None
        return MissReason.QUOTA if self._blocks.shares is not None and may_go else MissReason.DEADLINE

    def _waits_for(self, number: int, mapped: Collection[int]) -> bool:
        tenant = self._blocks.spaces[number].tenant
        return self._unmap_wait.may_wait(tenant, mapped, self._clock.monotonic_seconds())

    def _tail_evicted(
        self, record: ReservationRecord, keys: Sequence[bytes], skipped: int
    ) -> tuple[int, MissReason] | tuple[None, None]:
        """Blocks behind the last one to fill were readable, and may have been evicted to make room for it."""
        with self._lock:
            for position in range(record.indexes[-1] + 1 - skipped, len(keys)):
                if self._blocks.index.find(record.namespace, keys[position]) == NO_ROW:
                    return skipped + position, MissReason.EVICTED
        return None, None

    def _shorten(self, record: ReservationRecord, reason: MissReason) -> tuple[int, MissReason]:
        with self._lock:
            stopped_at = record.indexes[record.filled]
            if record.cancelled:
                record.detail = ""
                return stopped_at, MissReason.DISABLED
            self._give_up(record, record.filled)
            return stopped_at, reason

    def _publish(self, record: ReservationRecord, complete: int) -> None:
        if record.depends_on:
            return  # what these blocks follow comes first
        blocks = self._blocks
        start = record.published
        rows = record.rows[start:complete]
        blocks.publish(record.namespace, rows, record.generations[start:complete])
        if self.fetched is not None and record.is_fetched:
            self.fetched.came(record.namespace, rows, record.fetched_from)
            blocks.tally.stored_tokens -= len(rows) * blocks.spaces[record.namespace].namespace.layout.block_tokens
        if record.repairs:
            refilled = record.repairs.intersection(rows)
            record.repairs -= refilled
            self._unpin(record.namespace, sorted(refilled))
        record.published = complete
        if complete > start:
            blocks.counters["fetched_blocks" if record.is_fetched else "stored_blocks"] += complete - start
        if complete == len(record.rows):
            del self._reservations[record.number]
            self._touch_published(record)
            if record.is_collective and self._collective.visible(record, self._clock.monotonic_seconds()):
                self._publish_behind(record)

    def _publish_behind(self, record: ReservationRecord) -> None:
        for other in [one for one in self._reservations.values() if record.number in one.depends_on]:
            other.depends_on.discard(record.number)
            self._publish(other, min(other.done))

    def _touch_published(self, record: ReservationRecord) -> None:
        """Count a stored chain as used, as far as it is readable. Once: until then the reservation's rows pin it."""
        if not record.published:
            return
        chain = self._blocks.index.chain(record.rows[record.published - 1])
        if len(chain) <= LOCKED_BLOCKS:
            self._blocks.used(chain, record.published)
        else:
            self._blocks.counted(chain, record.published)
            self._refreshing.append((chain, record.published))

    def _give_up(self, record: ReservationRecord, start: int) -> None:
        for row in reversed(record.rows[start:]):
            if row in record.repairs:
                record.repairs.discard(row)
                self._blocks.index.not_refilled(row)
                self._blocks.unfill(row)
                self._unpin(record.namespace, [row])
            else:
                self._blocks.give_up(row)
        self._cut(record, start)

    def _cancel(self, record: ReservationRecord) -> None:
        """End a reservation whose namespace is dropped or whose producer is lost: its rows and their descendants go
        now, its slots once all producers are done."""
        for other in list(self._reservations.values()):
            if record.number in other.depends_on and not other.cancelled:
                self._cancel(other)
        self._orphan(record, record.published)
        record.depends_on.clear()
        record.cancelled = True
        if self._collective.lost(record, self._clock.monotonic_seconds()):
            self._free_cancelled(record)

    def _orphan_the_last(self, record: ReservationRecord, *, also_ending: bool = False) -> None:
        """Orphan the rows of a long reservation but for as many as `_cancel` takes at a time. Under the lock, which is
        released between pieces: the reservation may be cancelled or aborted and the store closed meanwhile.
        also_ending: also if it is being aborted."""
        most = max(1, ABORTED_PLACES // record.parts)
        record.is_cancelling = True
        while not (record.is_collective or record.cancelled or self._closed) and (also_ending or not record.is_ending):
            start = len(record.rows) - most
            if start <= record.published:
                return
            self._orphan(record, start)
            self._cut(record, start)
            self._moves_done.wait(GIVE_WAY_SECONDS)

    def _orphan(self, record: ReservationRecord, start: int) -> None:
        for row in reversed(record.rows[start:]):
            if row in record.repairs:
                record.repairs.discard(row)
                self._blocks.index.not_refilled(row)
                self._unpin(record.namespace, [row])
                record.abandoned_slots.extend(self._blocks.residency.forget(row))
            else:
                record.abandoned_slots.extend(self._blocks.orphan(row))

    def _cut(self, record: ReservationRecord, start: int) -> None:
        for column in (record.rows, record.parents, record.indexes, record.generations):
            del column[start:]
        record.filled = min(record.filled, start)

    def _abort_share(self, record: ReservationRecord) -> None:
        if self._closed:
            return
        if not record.cancelled:
            self._touch_published(record)
            self._cancel(record)
        elif not self._collective.is_written(record):
            self._free_cancelled(record)

    def _free_cancelled(self, record: ReservationRecord) -> None:
        self._reservations.pop(record.number, None)
        self._collective.freed(record)
        self._blocks.free_abandoned_slots(record.abandoned_slots)
        self._emptied[record.namespace] = None

    # Inside: room --------------------------------------------------------------------------------------------------

    def _grow(self, slot_class: SlotClass) -> bool:
        try:
            memory = self._blocks.dram.new_extent()
        except TierFull:
            return True  # another thread took the last of the budget: look again
        except TierUnavailable:
            return False
        self._blocks.dram.prepare()
        with self._lock:
            space = next(space for space in self._blocks.spaces if slot_class in space.classes)
            self._blocks.dram.adopt(memory, slot_class, space.about)
        return True

    def _start_vacating(self, move: Vacate) -> _ExtentMove:
        dram, residency = self._blocks.dram, self._blocks.residency
        part = dram.class_of(move.extent).part
        targets = dram.start_vacating(move.extent, len(move.rows))
        if move.rows:  # one extent is one slot class, which is one namespace
            self._pin(self._blocks.index.namespace_of(move.rows[0]), move.rows)
        copies = [
            FrameCopy(row, residency.place(row, part), target) for row, target in zip(move.rows, targets, strict=True)
        ]
        job = _ExtentMove(move.extent, copies)
        self._jobs[move.extent] = job
        return job

    def _vacate(self, job: _ExtentMove) -> None:
        results = [MoveDone(copy, MoveOutcome.GONE) for copy in job.copies]  # if the mover is interrupted
        try:
            results = self._mover.run(job.copies)
        finally:
            with self._lock:
                self._end_job(job, results)

    def _end_job(self, job: _ExtentMove, results: Sequence[MoveDone]) -> None:
        del self._jobs[job.extent]
        emptied = not self._closed
        for done in results:
            emptied = self._settle(done) and emptied
        if emptied:
            self._blocks.dram.retire(job.extent)
            self._blocks.counters["reclaimed_extents"] += 1
        elif not self._closed:
            self._blocks.dram.stop_vacating(job.extent)
        self._moves_done.notify_all()

    def _settle(self, done: MoveDone) -> bool:
        blocks, residency, copy = self._blocks, self._blocks.residency, done.copy
        if self._closed:
            return False
        self._unpin(blocks.index.namespace_of(copy.row), [copy.row])
        place_extent = extent_of(copy.source)
        part = blocks.dram.class_of(place_extent).part
        here = residency.place(copy.row, part) == copy.source
        in_use = residency.pins.counts[copy.row] or residency.is_held(copy.source)
        if done.outcome is not MoveOutcome.GONE and here and not in_use:
            is_sound = done.outcome is MoveOutcome.MOVED
            blocks.tally.checked(CheckedAt.MOVE, blocks.dram.class_of(place_extent).frame_bytes, is_sound=is_sound)
            if done.outcome is MoveOutcome.MOVED and blocks.relocate(copy.row, part, copy.target):
                blocks.counters["moved_frames"] += 1
                return True
            blocks.quarantine(copy.row)
            here = False
        blocks.dram.abort([copy.target])
        return not here

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")
