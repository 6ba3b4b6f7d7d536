"""How long a request waits for blocks that another engine stores.

    ticket opened > look > all that was promised is there                          over
                         > wait: the store tells when the next block is there    > look
                         > that would take longer than computing it, or ended short: over

The first block is waited for as long as a quarter of what computing the missing tokens takes; every block that has come
allows for as much again as computing it would have taken. So blocks are waited for as long as they come sooner than
they would be computed, and a wait in vain costs a quarter of the prompt. What a ticket names is compared with the
prompt's own keys, and no other keys are ever looked up: a stale or forged one shortens a wait, and nothing else.

`wait_for_blocks` waits; `BlockWait` is for a scheduler that must not. Asking it whether it is over looks at no socket,
takes no lock and hashes nothing; `ParkedWaits.read` looks once for all of them. Must never import an engine.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.block.account import Account, MissReason
from kvstore.block.identity import Prompt
from kvstore.client.handle import NamespaceHandle
from kvstore.client.pending import PendingReply
from kvstore.protocol import messages as m
from tiering.counts.awaits import MAX_AWAIT_SECONDS, AwaitEnd

FIRST_SHARE = 0.25
"""Of the time that computing what is missing takes: how long the first block is waited for."""
UNLEARNED_SECONDS = 2.0
"""The same for an engine that has not learned how fast it computes, and between two blocks."""
OPEN_MS = 250.0
"""A ticket is opened by then, or it is not waited for; a look takes no longer either, of which a wait has several."""
_HIDDEN = frozenset({MissReason.ABSENT, MissReason.IN_FLIGHT, MissReason.DIVERGED, MissReason.EVICTED})
"""What the store says of blocks that a ticket would have promised."""

Seconds = Callable[[int, int], float | None]
"""That computing a prompt's tokens from the first to before the second takes; None where that is not known."""


class WaitPolicy:
    """Of one prompt: whether to wait on, and what to tell of it. refused: why its ticket was of no use."""

    def __init__(
        self, prompt: Prompt, block_tokens: int, compute: Seconds, clock: Callable[[], float], least_seconds: float
    ) -> None:
        """least_seconds: for which the first block is waited for in any case."""
        self._keys, self._block_tokens = prompt.keys, block_tokens
        self._compute, self._clock, self._least_seconds = compute, clock, least_seconds
        self._wanted = max(0, prompt.tokens - 1) // block_tokens
        self._began: tuple[float, int] | None = None  # when it was looked first, and how many blocks were there
        self._came: tuple[float, int] = (0.0, -1)  # the same of the last block that came
        self.is_over = False
        self.refused: MissReason | None = None
        self.detail = ""

    def opened(self, told: m.TicketOpened) -> None:
        """What its ticket promises."""
        reason, detail = told.reason, told.detail
        if reason is None and not (0 < told.blocks <= len(self._keys) and self._keys[told.blocks - 1] == told.head):
            reason, detail = MissReason.STALE_HINT, "the ticket is of another prompt"
        if reason is not None:
            self.refused, self.detail, self.is_over = reason, detail, True
        else:
            self._wanted = min(self._wanted, told.blocks)

    def seconds_left(self, blocks: int) -> float:
        """So many blocks are there: for how long to wait for the next one; 0 when that is over."""
        left = 0.0
        if not self.is_over and blocks < self._wanted:
            now = self._clock()
            self._began = self._began or (now, blocks)
            self._came = (now, blocks) if blocks > self._came[1] else self._came
            left = max(0.0, self._limit(blocks) - now)
        if left:
            self.detail = f"waited for block {blocks + 1} of {self._wanted}, which another engine was to store"
        elif blocks >= self._wanted and self.refused is None:
            self.detail = ""
        self.is_over = not left
        return left

    def ended(self, end: AwaitEnd) -> None:
        """The wait for that block is over."""
        self.is_over = end not in (AwaitEnd.READABLE, AwaitEnd.DEADLINE)
        if end is not AwaitEnd.READABLE:
            self.detail = f"{self.detail}: {end}"

    def account(self, account: Account) -> Account:
        """What is told of the prompt: why its ticket was of no use, where it was of none."""
        if self.refused is None:
            return account
        origins = [(one.origin, one.tokens) for one in account.segments]
        return Account.of([(self.refused if origin in _HIDDEN else origin, tokens) for origin, tokens in origins])

    def _limit(self, blocks: int) -> float:
        """Until when the block behind so many is waited for."""
        assert self._began is not None
        began_at, first = self._began
        start = first * self._block_tokens
        missing = self._compute(start, self._wanted * self._block_tokens)
        arrived = self._compute(start, blocks * self._block_tokens)
        if missing is None or arrived is None:
            longest = max(self._least_seconds, UNLEARNED_SECONDS)
            return min(self._came[0] + longest, began_at + MAX_AWAIT_SECONDS)
        seconds = max(self._least_seconds, FIRST_SHARE * missing) + arrived
        return began_at + min(seconds, MAX_AWAIT_SECONDS)


def wait_for_blocks(namespace: NamespaceHandle, prompt: Prompt, ticket: str, clock: Callable[[], float]) -> WaitPolicy:
    """In a thread that may wait: until what a ticket promises can be read, or will not come soon."""
    policy = WaitPolicy(prompt, namespace.block_tokens, lambda *_: None, clock, 0.0)
    policy.opened(namespace.open_ticket(ticket))
    while left := policy.seconds_left(blocks := namespace.match(prompt, counts=False).blocks):
        policy.ended(namespace.await_block(prompt, blocks, 1000 * left).end)
    return policy


class ParkedWaits:
    """Those of one scheduler that wait for the store. One thread."""

    def __init__(self) -> None:
        self._parked: dict[PendingReply[m.Awaited], None] = {}

    def add(self, pending: PendingReply[m.Awaited]) -> None:
        """One more."""
        self._parked[pending] = None

    def remove(self, pending: PendingReply[m.Awaited]) -> None:
        """It is over."""
        self._parked.pop(pending, None)

    def read(self) -> None:
        """Look whether anything came for any of them, once: each that is asked then knows."""
        for pending in self._parked:
            if not pending.is_ready():
                pending.poll()
                return


class BlockWait:
    """Of one request. One thread."""

    def __init__(
        self, namespace: NamespaceHandle, prompt: Prompt, ticket: str, policy: WaitPolicy, parked: ParkedWaits
    ) -> None:
        """ticket: "" to wait for all full blocks of the prompt."""
        self.policy = policy
        self._namespace, self._prompt, self._parked = namespace, prompt, parked
        self._opening = namespace.submit_open(ticket, OPEN_MS) if ticket else None
        self._pending: PendingReply[m.Awaited] | None = None

    def may_look(self) -> bool:
        """Whether to look how much is there; else something is waited for, and this is asked again."""
        if self._opening is not None:
            told = self._opening.poll()
            if told is None:
                return False
            self._opening = None
            self.policy.opened(told)
        if self._pending is not None:
            awaited = self._pending.poll() if self._pending.is_ready() else None
            if awaited is None:
                return False
            self._parked.remove(self._pending)
            self._pending = None
            self.policy.ended(awaited.end)
        return True

    def goes_on(self, blocks: int) -> bool:
        """It was looked, and so many are there: whether to wait for the next block."""
        left = self.policy.seconds_left(blocks)
        if left:
            self._pending = self._namespace.submit_await(self._prompt, blocks, 1000 * left)
            self._parked.add(self._pending)
        return bool(left)

    def end(self) -> None:
        """It is not wanted any more. Safe to call again."""
        self.policy.is_over = True
        if self._opening is not None:
            self._opening.cancel()
        if self._pending is not None:
            self._parked.remove(self._pending)
            self._pending.cancel()
        self._opening = self._pending = None
