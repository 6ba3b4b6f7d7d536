"""The store itself: one lock, keys only.

1. The store knows keys, places and digests. Tokens, pages and payload bytes stay with its clients. 2. One lock guards
all tables. Nothing is read, hashed, written or waited for while it is held. 3. A block is readable when all its parts
are committed and its parent is readable; it goes leaf first, as a whole. 4. A pinned block is neither evicted nor
moved; a slot is not reused while a late reader may have it mapped. 5. Bytes are used only after a check: MAC, name,
generation and digest, at each hop between tiers. 6. Every miss has a reason, and every limit in effect is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.block.account import HitTier, MissReason
from kvstore.config import Limits
from kvstore.core.rows.index import TierRuns
from tiering.clock import Clock

GIVE_WAY_SECONDS = 1e-4
"""Pause between two pieces of long work, in `Shared.moves_done`: without it this thread takes the lock again before a
waiting one wakes up."""


class Fetched(Protocol):
    """Blocks that couriers fetch (`kvstore.elsewhere`), as the store sees them: slots of reservations that are
    `is_fetched`, and adopted blocks, pinned for a moment and marked with their origin. Called under the store's lock;
    `due_at` may be read without it."""

    due_at: float
    """When `expire` next has work."""
    door: str
    """The address at which peers reach this node."""

    def is_served(self, tenant: bytes) -> bool:
        """Whether any courier serves a tenant."""
        ...

    @property
    def is_any_marked(self) -> bool:
        """Whether any block is marked with an origin."""
        ...

    @property
    def has_slots(self) -> bool:
        """Whether couriers hold slots that are not filled yet."""
        ...

    def room(self, number: int, tenants: int) -> int:
        """How many more blocks of a namespace couriers may reserve now, if so many tenants have couriers."""
        ...

    def came(self, number: int, rows: Sequence[int], tier: HitTier) -> None:
        """Adopted blocks became readable."""
        ...

    def expire(self) -> None:
        """Unpin adopted blocks whose time is over."""
        ...

    def give_way(self) -> bool:
        """An engine lacks room: unpin some more adopted blocks; False if there are none."""
        ...

    def forget(self, number: int) -> None:
        """A namespace is dropped."""
        ...

    def tiers(self, rows: Sequence[int], runs: TierRuns) -> TierRuns:
        """Where blocks were found; one from elsewhere that no lease has had yet counts as its origin's."""
        ...

    def pinned(self) -> list[int]:
        """Verify its own tables; returns all pinned rows, each once."""
        ...


@dataclass(eq=False)
class Shared:
    """What all parts of one store share besides its tables: above all the lock that guards these.

    pin, unpin: rows of a namespace. expire_due: to be called before anything that needs room or pins. check_open:
    raises where the store is closed. why: the reason a chain is readable for so many blocks and no longer, with
    details. tiers: where rows are found. All are called under the lock.

    fetched: set where couriers fetch blocks. closed: the tables are void. moves_done: a condition of the lock, notified
    as moves end; long work waits at it to let others have the lock.
    """

    clock: Clock
    limits: Limits
    pin: Callable[[int, Sequence[int]], None]
    unpin: Callable[[int, Sequence[int]], None]
    expire_due: Callable[[], None]
    check_open: Callable[[], None]
    why: Callable[[int, Sequence[bytes], int], tuple[MissReason | None, str]]
    tiers: Callable[[Sequence[int]], TierRuns]
    fetched: Fetched | None = None
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.moves_done = threading.Condition(self.lock)

    def renew_lock(self) -> None:
        """In a forked child, where a thread that is not there may hold the parent's."""
        self.lock = threading.Lock()
        self.moves_done = threading.Condition(self.lock)
