"""How much of one prompt is fetched from elsewhere, and how blocks that do not come are accounted.

    looked, and more would be of use > LOCATING > nothing is worth it           over
                                                > FETCHING: awaited > looked   over, or, with a ticket, again

`FetchPolicy` decides how far; `block_wait` decides what comes next. Located blocks that did
not come in the end are misses with the reason for that; located blocks that were not wanted are misses as
`cheaper_to_compute`. Must never import an engine.
"""

from __future__ import annotations

from math import inf

from engine_adapter.cost.model import LEAST_WAIT_SECONDS, PATIENCE
from kvstore.block.account import Account, MissReason
from kvstore.protocol import messages as m
from tiering.counts.awaits import AwaitEnd

REASON_OF_END: dict[AwaitEnd, MissReason | None] = {
    AwaitEnd.READABLE: None,
    AwaitEnd.SHORT: MissReason.STALE_HINT,
    AwaitEnd.DEADLINE: MissReason.DEADLINE,
    AwaitEnd.CANCELLED: MissReason.DISABLED,
    AwaitEnd.GONE: MissReason.UNREACHABLE,
    AwaitEnd.FULL: MissReason.BUSY,
}
"""The reason if the store gives none for a fetch that did not come. Has every `AwaitEnd`."""


class FetchPolicy:
    """The fetches of one prompt. is_over: nothing more is fetched, except while a ticket is waited for. reason: why the
    last fetch did not bring all, None if it did. This one is of an engine that has not learned what computing takes: it
    fetches all useful blocks, unless the store expects that to take longer than `seconds`."""

    def __init__(self, usable_blocks: int, seconds: float, block_tokens: int) -> None:
        self._most, self._seconds, self._block_tokens = usable_blocks, seconds, block_tokens
        self._located, self._stop, self._where = 0, 0, ""
        self.is_over = False
        self.reason: MissReason | None = None
        self.detail = ""

    def asks(self, blocks: int) -> bool:
        """Whether blocks behind the first `blocks`, which are here, would be of use: if so, the store is asked."""
        return self._most > blocks

    def choose(self, located: m.Located, blocks: int) -> tuple[int, float]:
        """Up to which block to fetch, `blocks` for none; and for how many seconds to wait for that: a few times as long
        as is expected; if that is unknown, for all of the time."""
        stop = min(located.blocks, self._most)
        told = 1e-3 * located.milliseconds * (stop - blocks) / max(1, located.blocks - blocks)
        if self._seconds < told < inf:
            return blocks, 0.0
        return stop, min(self._seconds, max(LEAST_WAIT_SECONDS, PATIENCE * told))

    def learn(self, *, came: bool) -> None:
        """The fetch that was chosen is over. came: all of it."""

    def looked(self, blocks: int) -> None:
        """After a fetch, or when it is not waited for any more: `blocks` of them are here."""

    def chosen(self, located: m.Located, blocks: int) -> tuple[int, float]:
        """As `choose`, of what was located: no more than `blocks` where nothing is."""
        stop, seconds = blocks, 0.0
        if located.number and located.blocks > blocks and located.tier is not None:
            self._located = max(self._located, located.blocks)
            stop, seconds = self.choose(located, blocks)
            self._where = f"{located.tier} {located.where}".strip()
        if stop > blocks:
            self._stop, self.reason, self.detail = max(self._stop, stop), None, ""
        else:
            self.is_over = True
        return stop, seconds

    def ended(self, awaited: m.Awaited) -> None:
        self.is_over = True
        came = awaited.end is AwaitEnd.READABLE
        self.learn(came=came)
        self.reason = awaited.reason or REASON_OF_END[awaited.end]
        if not came:
            self.detail = awaited.detail or f"block {self._stop} was to come from {self._where}: {awaited.end}"

    def account(self, account: Account) -> Account:
        """The account, with the reasons why located blocks did not come."""
        if self._located:
            account = account.missed_before(self._located * self._block_tokens, MissReason.CHEAPER_TO_COMPUTE)
        if self._stop and self.reason is not None:
            account = account.missed_before(self._stop * self._block_tokens, self.reason)
        return account
