"""What all parts of one store share: its tables, and the lock that guards them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Sized
from itertools import count
from math import inf

from kvstore.block.account import HitTier, MissReason
from kvstore.config import Limits
from kvstore.core.collective import CollectivePuts, ReservationRecord
from kvstore.core.rows.index import TierRuns
from kvstore.core.table import BlockTable, LeaseTable
from tiering.clock import Clock
from tiering.nvme.tier import NvmeTier

GIVE_WAY_SECONDS = 1e-4
"""Pause between two pieces of long work, in `Shared.moves_done`: without it this thread takes the lock again before a
waiting one wakes up."""


class Fetched:
    """Blocks that couriers fetch, of a store that has no couriers: `kvstore.elsewhere` has those of one that does. They
    are slots of reservations that are `is_fetched`, and adopted blocks, pinned for a moment and marked with their
    origin. Called under the store's lock; `due_at` may be read without it."""

    due_at = inf
    """When `expire` next has work."""
    door = ""
    """The address at which peers reach this node."""
    marks: Sized = ()
    """Blocks that are marked with an origin."""

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

    @abstractmethod
    def tiers(self, rows: Sequence[int]) -> TierRuns:
        """Where these rows are found. Under the lock."""

    @abstractmethod
    def check_open(self) -> None:
        """Raises `StoreClosed`."""
