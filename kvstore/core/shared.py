"""What all parts of one store share: its tables, above all that of its leases, and the lock that guards these."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import StoreClosed
from kvstore.config import Limits
from kvstore.core.collective import CollectivePuts, ReservationRecord
from kvstore.core.rows.index import TierRuns, tier_runs
from kvstore.core.table import BlockTable
from tiering.clock import Clock
from tiering.nvme.tier import NvmeTier

GIVE_WAY_SECONDS = 1e-4
"""Pause between two pieces of long work, in `Shared.moves_done`: without it this thread takes the lock again before a
waiting one wakes up."""


@dataclass(eq=False, slots=True)
class LeaseRecord:
    """rows: the pinned blocks in chain order, from block `first_block` on. places: of the frames, part after part: 8
    bytes each, since they are most of a lease's memory. holders: releases needed to end it. owner: the tenant.

    has_expired: it pins nothing any more, or soon. is_released: its last holder has released it. It then ends in pieces
    (see `Endings`): unpinned counts rows; held counts places, of which the first `let_go` are not held any more.
    """

    number: int
    namespace: int
    first_block: int
    rows: array[int]
    places: array[int]
    expires_at: float
    holders: int = 1
    owner: bytes = b""
    has_expired: bool = False
    is_released: bool = False
    unpinned: int = 0
    held: int = 0
    let_go: int = 0

    def place(self, part: int, at: int) -> int | None:
        """Where a part's frame of block `at` of the lease was when leased; None if there is none."""
        index = part * len(self.rows) + at
        return self.places[index] if part >= 0 and 0 <= at < len(self.rows) and index < len(self.places) else None


class LeaseTable:
    """All leases, in the order in which they expire: every lease lasts equally long."""

    def __init__(self, lease_seconds: float, new_number: Callable[[], int] | None = None) -> None:
        """new_number: draws a number above 0 that no other lease of this table ever has."""
        self.lease_seconds = lease_seconds
        self.live: dict[int, LeaseRecord] = {}
        """Leases that pin."""
        self.ending: dict[int, LeaseRecord] = {}
        """Leases that are over and still pin or hold places; `Endings` ends them."""
        self.ending_places: Counter[bytes] = Counter()
        """Of these, by tenant."""
        self.promoting: list[tuple[int, list[int]]] = []
        """Namespace and pinned rows of each lease that waits for promotions, and has no number yet."""
        self._lapsed: dict[int, LeaseRecord] = {}
        self._new_number = new_number or count(1).__next__
        self._of: Counter[bytes] = Counter()

    def add(
        self,
        namespace: int,
        first_block: int,
        rows: Sequence[int],
        places: array[int],
        now: float,
        owner: bytes = b"",
    ) -> int:
        """A new lease; returns its number. places: as in `LeaseRecord`."""
        number = self._new_number()
        expires_at = now + self.lease_seconds
        self.live[number] = LeaseRecord(
            number, namespace, first_block, array("i", rows), places, expires_at, owner=owner
        )
        self._of[owner] += 1
        return number

    def count_of(self, owner: bytes) -> int:
        """How many leases a tenant has."""
        return self._of[owner]

    def get(self, number: int) -> LeaseRecord | None:
        """A lease, live or expired."""
        return self.live.get(number) or self._lapsed.get(number)

    def is_live(self, number: int, now: float = -inf) -> bool:
        """Whether a lease pins at that time."""
        record = self.live.get(number)
        return record is not None and record.expires_at > now

    def attach(self, number: int, now: float = -inf) -> bool:
        """Add a holder to a live lease."""
        if not self.is_live(number, now):
            return False
        self.live[number].holders += 1
        return True

    def take(self, number: int) -> LeaseRecord | None:
        """Release one holder of a live or expired lease; the last one removes it and gets its record."""
        record = self.get(number)
        if record is not None and record.holders > 1:
            record.holders -= 1
            return None
        if record is not None:
            self._of[record.owner] -= 1
            record.is_released = True
        return self.live.pop(number, None) or self._lapsed.pop(number, None)

    def expire_due(self, now: float) -> Iterator[LeaseRecord]:
        """Expire leases whose time is over; each stays in the table until its reader releases it."""
        while self.live:
            record = next(iter(self.live.values()))
            if record.expires_at > now:
                return
            yield self._expire(record)

    def expire(self, number: int) -> LeaseRecord | None:
        """Expire a lease now, if it is live."""
        record = self.live.get(number)
        return self._expire(record) if record is not None else None

    def expire_all(self, namespace: int) -> Iterator[LeaseRecord]:
        """Expire every lease of a namespace now."""
        for record in [record for record in self.live.values() if record.namespace == namespace]:
            yield self._expire(record)

    def expired(self) -> Iterator[LeaseRecord]:
        """Leases that expired and were not released."""
        return iter(self._lapsed.values())

    def __len__(self) -> int:
        """Leases that pin or keep slots from reuse."""
        return len(self.live) + len(self._lapsed)

    def _expire(self, record: LeaseRecord) -> LeaseRecord:
        del self.live[record.number]
        self._lapsed[record.number] = record
        record.has_expired = True
        return record


class Fetched:
    """Blocks that couriers fetch, of a store that has no couriers: `kvstore.elsewhere` has those of one that does. They
    are slots of reservations that are `is_fetched`, and adopted blocks, pinned for a moment and marked with their
    origin. Called under the store's lock; `due_at` may be read without it."""

    due_at = inf
    """When `expire` next has work."""
    door = ""
    """The address at which peers reach this node."""

    @property
    def is_any_marked(self) -> bool:
        """Whether any block is marked with an origin."""
        return False

    @property
    def has_slots(self) -> bool:
        """Whether couriers hold slots that are not filled yet."""
        return False

    def is_served(self, tenant: bytes) -> bool:
        """Whether any courier serves a tenant."""
        return False

    def room(self, number: int, tenants: int) -> int:
        """How many more blocks of a namespace couriers may reserve now, if so many tenants have couriers."""
        return 0

    def came(self, number: int, rows: Sequence[int], tier: HitTier) -> None:
        """Adopted blocks became readable."""

    def expire(self) -> None:
        """Unpin adopted blocks whose time is over."""

    def give_way(self) -> bool:
        """An engine lacks room: unpin some more adopted blocks; False if there are none."""
        return False

    def forget(self, number: int) -> None:
        """A namespace is dropped."""

    def tiers(self, rows: Sequence[int], runs: TierRuns) -> TierRuns:
        """Where blocks were found; one from elsewhere that no lease has had yet counts as its origin's."""
        return runs

    def pinned(self) -> list[int]:
        """Verify its own tables; returns all pinned rows, each once."""
        return []


class Shared(ABC):
    """The tables of a store, which is the one class that is made of it. Those parts that say "under the lock" mean this
    one's.

    reservations: by number. fetched: replaced where couriers fetch blocks. closed: the tables are void. moves_done: a
    condition of the lock, notified as moves end; long work waits at it to let others have the lock.
    """

    def __init__(
        self, blocks: BlockTable[NvmeTier], clock: Clock, limits: Limits, new_number: Callable[[], int] | None
    ) -> None:
        self.blocks, self.lower, self.clock, self.limits = blocks, blocks.lower, clock, limits
        self.new_number = new_number or count(1).__next__
        self.leases = LeaseTable(limits.lease_seconds, self.new_number)
        self.reservations: dict[int, ReservationRecord] = {}
        self.collective = CollectivePuts(limits.joint_seconds)
        self.fetched = Fetched()
        self.closed = False
        self.renew_lock()

    def renew_lock(self) -> None:
        """In a forked child, where a thread that is not there may hold the parent's."""
        self.lock = threading.Lock()
        self.moves_done = threading.Condition(self.lock)

    @abstractmethod
    def end_due(self) -> None:
        """Expire leases and all else that is due; called, under the lock, before anything that needs room or pins."""

    @abstractmethod
    def why(self, number: int, keys: Sequence[bytes], blocks: int) -> tuple[MissReason | None, str]:
        """The reason a chain is readable for so many blocks and no longer, with details. Under the lock."""

    def tiers(self, rows: Sequence[int]) -> TierRuns:
        """Where these rows are found. Under the lock."""
        found: TierRuns = ((HitTier.DRAM, len(rows)),) if rows else ()
        if self.lower is not None:
            found = tier_runs(rows, self.blocks.is_above, lambda: self.blocks.residency.listed_column)
        return self.fetched.tiers(rows, found) if self.fetched.is_any_marked else found

    def check_open(self) -> None:
        """Raises `StoreClosed`."""
        if self.closed:
            raise StoreClosed("the store is closed")
