"""Which blocks an engine has announced to routers, and where these can be read now: the source of its events.

    a save is ordered  > expected  > the store says that the block is there, or the save's report does  > announced
    announced          > the store says that it moved or went   > announced again, so that no router trusts old news

The store reports changes in order (`m.Changes`), so the last announcement of a block agrees with the store. If the
order is lost (the store restarted, or the engine asked too rarely), all announcements are taken back. Must never import
an engine, and never waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvstore.block.account import HitTier
from kvstore.client.handle import NamespaceHandle
from kvstore.client.pending import PendingReply
from kvstore.protocol import messages as m
from tiering.frame import KEY_BYTES

MOST_BLOCKS = 1 << 15
"""Expected or announced, some 700 bytes each; beyond that the oldest announcement is taken back."""
ASK_EVERY_SECONDS = 0.02

B = TypeVar("B")
PLACES: tuple[HitTier | None, ...] = (None, HitTier.DRAM, HitTier.NVME)
"""A block's place by its number in `m.Changed`."""


@dataclass(frozen=True, slots=True)
class Announcement(Generic[B]):
    """A change of a block's place. came: the fastest tier that has it from now on, None: no tier. went: where it was
    before."""

    block: B
    came: HitTier | None
    went: HitTier | None


@dataclass(slots=True)
class _Announced(Generic[B]):
    block: B
    is_noted: bool = False  # the store has reported on it
    place: HitTier | None = None  # as announced


class Announcements(Generic[B]):
    """The announcements of one engine, in one namespace at a time. Not thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float],
        describe: Callable[[Any, int], B | None],
        namespace: Callable[[], NamespaceHandle | None],
        most: int = MOST_BLOCKS,
    ) -> None:
        """clock: monotonic seconds. describe: a request's block, by its number, in the form of the engine's events;
        None if it is not announced. namespace: the one in use, None without any."""
        self._clock = clock
        self._describe = describe
        self._namespace = namespace
        self._most = most
        self._known: OrderedDict[bytes, _Announced[B]] = OrderedDict()  # by prefix key, the oldest first
        self._news: list[Announcement[B]] = []
        self._pending: PendingReply[m.Changed] | None = None
        self._asked_at: float | None = None
        self._run = b""
        self._after = 0
        self.resets = 0
        """How often all announcements were taken back."""

    def expect(self, request: Any, keys: Sequence[bytes], first_block: int) -> None:
        """A save of a request's blocks is ordered, from `first_block` on."""
        for number, key in enumerate(keys, first_block):
            known = self._known.get(key)
            block = self._describe(request, number) if known is None or known.place is None else known.block
            if block is None:
                continue
            if known is None:
                self._known[key] = _Announced(block)
            elif known.place is None:
                known.block, known.is_noted = block, False
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            _, oldest = self._known.popitem(last=False)
            self._tell(oldest, None)

    def saved(self, keys: bytes, first_block: int, held: int) -> None:
        """A save of blocks from `first_block` on has ended: the store holds the first `held` of the request's blocks;
        the others are not expected any more. keys: of all of them, joined. The store's own reports of a block take
        precedence: they are newer, or still to come."""
        if not self._known:
            return
        for number in range(first_block, len(keys) // KEY_BYTES):
            key = keys[KEY_BYTES * number : KEY_BYTES * (number + 1)]
            known = self._known.get(key)
            if known is None or known.is_noted:
                continue
            if number < held:
                self._tell(known, HitTier.DRAM)
            elif known.place is None:
                del self._known[key]

    def step(self) -> None:
        """Take the store's reports, and submit the next query for them."""
        if self._pending is not None:
            told = self._pending.poll()
            if told is None:
                return
            self._pending = None
            self._take(told)
        now, namespace = self._clock(), self._namespace()
        if namespace is not None and (self._asked_at is None or now - self._asked_at >= ASK_EVERY_SECONDS):
            self._asked_at = now
            self._pending = namespace.submit_changes(self._after)

    def take(self) -> list[Announcement[B]]:
        news, self._news = self._news, []
        return news

    def forget(self) -> None:
        """The namespace has changed: all announcements are taken back."""
        if self._pending is not None:
            self._pending.cancel()
        self._pending, self._run, self._after = None, b"", 0
        self._take_back()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _take(self, told: m.Changed) -> None:
        if not told.run:  # no sidecar answered: nothing is known, and nothing is lost yet
            return
        if told.is_lost or (self._run and told.run != self._run):
            self._take_back()
            self._run, self._after = told.run, told.next  # later saves' changes come after it
            return
        self._run, self._after = told.run, told.next
        for key, number in told.changes:
            known = self._known.get(key)
            if known is None:
                continue
            known.is_noted = True
            self._tell(known, PLACES[number])

    def _take_back(self) -> None:
        self.resets += 1
        for known in self._known.values():
            self._tell(known, None)
        self._known.clear()

    def _tell(self, known: _Announced[B], place: HitTier | None) -> None:
        if known.place is not place:
            self._news.append(Announcement(known.block, place, known.place))
            known.place = place
