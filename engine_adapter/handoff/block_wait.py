"""How long a request waits for blocks that another engine stores, for a scheduler that must not wait itself.

    ticket opened > look > all that was promised is there                          over
                         > parked: the store tells when the next block is there  > look
                         > that would take longer than computing it, or ended short: over

The first block is waited for as long as a quarter of what computing the missing tokens takes; every block that has come
allows for as much again as computing it would have taken. So blocks are waited for as long as they come sooner than
they would be computed, and a wait in vain costs a quarter of the prompt. What a ticket names is compared with the
prompt's own keys, and no other keys are ever looked up: a stale or forged one shortens a wait, and nothing else.

Being asked whether it is over looks at no socket, takes no lock and hashes nothing; `ParkedWaits.read` looks once for
all of them. Must never import an engine.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.block.account import Account, MissReason
from kvstore.block.identity import Prompt
from kvstore.client.handle import Match, NamespaceHandle
from kvstore.client.pending import PendingReply
from kvstore.protocol import messages as m
from tiering.counts.awaits import MAX_AWAIT_SECONDS, AwaitEnd

FIRST_SHARE = 0.25
"""Of the time that computing what is missing takes: how long the first block is waited for."""
UNLEARNED_SECONDS = 2.0
"""The same for an engine that has not learned how fast it computes, and between two blocks."""
OPEN_MS = 250.0
"""A ticket is opened by then, or it is not waited for."""
_HIDDEN = frozenset({MissReason.ABSENT, MissReason.IN_FLIGHT, MissReason.DIVERGED, MissReason.EVICTED})
"""What the store says of blocks that a ticket would have promised."""

Seconds = Callable[[int, int], float | None]
"""That computing a prompt's tokens from the first to before the second takes; None where that is not known."""


class ParkedWaits:
    """Those of one scheduler that wait for the store. One thread."""

    def __init__(self) -> None:
        self._parked: dict[PendingReply[m.Awaited], None] = {}

    def __bool__(self) -> bool:
        return bool(self._parked)

    def add(self, pending: PendingReply[m.Awaited]) -> None:
        """One more."""
        self._parked[pending] = None

    def remove(self, pending: PendingReply[m.Awaited]) -> None:
        """It is over."""
        self._parked.pop(pending, None)

    def read(self) -> None:
        """Look whether anything came for any of them, once: whoever is asked then knows."""
        for pending in self._parked:
            pending.poll()
            return


class BlockWait:
    """Of one request. One thread."""

    def __init__(
        self,
        namespace: NamespaceHandle,
        prompt: Prompt,
        ticket: str,
        compute: Seconds,
        clock: Callable[[], float],
        parked: ParkedWaits,
        least_seconds: float,
    ) -> None:
        """ticket: "" to wait for all full blocks of the prompt. least_seconds: for which the first block is waited for
        in any case."""
        self._namespace, self._prompt = namespace, prompt
        self._compute, self._clock, self._parked = compute, clock, parked
        self._least_seconds = least_seconds
        self._wanted = (prompt.tokens - 1) // namespace.block_tokens if prompt.tokens else 0
        self._opening = namespace.submit_open(ticket, OPEN_MS) if ticket else None
        self._pending: PendingReply[m.Awaited] | None = None
        self._began: tuple[float, int] | None = None  # when it was looked first, and how many blocks were there
        self._is_over = False
        self.refused: MissReason | None = None
        self.detail = ""

    def may_look(self) -> bool:
        """Whether to look how much is there; else something is waited for, and this is asked again."""
        if self._opening is not None:
            told = self._opening.poll()
            if told is None:
                return False
            self._opening = None
            self._opened(told)
        if self._pending is not None:
            if not self._pending.is_ready():
                return False
            told_awaited = self._pending.poll()
            if told_awaited is None:
                return False
            self._parked.remove(self._pending)
            self._pending = None
            self._is_over = told_awaited.end not in (AwaitEnd.READABLE, AwaitEnd.DEADLINE)
            if told_awaited.end is not AwaitEnd.READABLE:
                self.detail = f"{self.detail}: {told_awaited.end}"
        return True

    def goes_on(self, match: Match) -> bool:
        """It was looked, and so much is there: whether to wait for the next block."""
        now = self._clock()
        if self._is_over or match.blocks >= self._wanted:
            return False
        if self._began is None:
            self._began = now, match.blocks
        left = self._limit(match.blocks) - now
        if left <= 0:
            return False
        self.detail = f"waited for block {match.blocks + 1} of {self._wanted}, which another engine was to store"
        self._pending = self._namespace.submit_await(self._prompt, match.blocks, 1000 * left)
        self._parked.add(self._pending)
        return True

    def account(self, account: Account) -> Account:
        """What is told of the prompt: why its ticket was of no use, where it was of none."""
        if self.refused is None:
            return account
        origins = [(one.origin, one.tokens) for one in account.segments]
        return Account.of([(self.refused if origin in _HIDDEN else origin, tokens) for origin, tokens in origins])

    def end(self) -> None:
        """Nobody waits any more. Safe to call again."""
        self._is_over = True
        if self._opening is not None:
            self._opening.cancel()
        if self._pending is not None:
            self._parked.remove(self._pending)
            self._pending.cancel()
        self._opening = self._pending = None

    # Inside ----------------------------------------------------------------------------------------------------------

    def _opened(self, told: m.TicketOpened) -> None:
        keys = self._prompt.keys
        if told.reason is not None:
            self._refuse(told.reason, told.detail)
        elif not 0 < told.blocks <= len(keys) or keys[told.blocks - 1] != told.head:
            self._refuse(MissReason.STALE_HINT, "the ticket is of another prompt")
        else:
            self._wanted = min(self._wanted, told.blocks)

    def _refuse(self, reason: MissReason, detail: str) -> None:
        self.refused, self.detail, self._is_over = reason, detail, True

    def _limit(self, blocks: int) -> float:
        """Until when the block behind so many is waited for."""
        assert self._began is not None
        began_at, first = self._began
        tokens = self._namespace.block_tokens
        missing = self._compute(first * tokens, self._wanted * tokens)
        arrived = self._compute(first * tokens, blocks * tokens)
        if missing is None or arrived is None:
            since = self._clock() if blocks > first else began_at
            return min(since + UNLEARNED_SECONDS, began_at + MAX_AWAIT_SECONDS)
        seconds = max(self._least_seconds, FIRST_SHARE * missing) + arrived
        return began_at + min(seconds, MAX_AWAIT_SECONDS)
