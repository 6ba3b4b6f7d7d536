"""How long a request waits for blocks that are not here: that are fetched, or that another engine stores.

    ticket opened > look > all that was promised, or is of use, is there           over
                         > more is elsewhere, and worth it: fetched              > look
                         > wait: the store tells when the next block is there    > look
                         > that would take longer than computing it, or ended short: over

Without a ticket there is one fetch, and no other wait. With one, missing blocks are looked for elsewhere again and
again during the wait, since the other engine may be on another node. Located blocks that did not come in the end are
misses with the reason for that; located blocks that were not wanted are misses as `cheaper_to_compute`.

A request waits for the first block at most a quarter of the time that computing the missing tokens takes; each block
that arrives extends the wait by the time that computing it would have taken. So a request waits as long as blocks
arrive sooner than it would compute them, and a wait in vain costs a quarter of computing the prompt. A ticket's key is
compared with the prompt's own keys, and no other keys are ever looked up: a stale or forged ticket can only shorten a
wait.

`FetchPolicy` decides how far to fetch, `WaitPlan` what comes next. `wait_for_blocks` blocks its thread; `BlockWait` is
for a scheduler that must not. Asking it whether it is over reads no socket, takes no lock and hashes nothing;
`ParkedWaits.read` reads the socket once for all waits. Must never import an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from engine_adapter.cost import LEAST_WAIT_SECONDS, PATIENCE
from kvstore.block.account import Account, MissReason
from kvstore.block.identity import Prompt
from kvstore.client.handle import NamespaceHandle
from kvstore.client.pending import PendingReply
from kvstore.protocol import messages as m
from tiering.counts.awaits import MAX_AWAIT_SECONDS, AwaitEnd

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


# Waits ----------------------------------------------------------------------------------------------------------------


FIRST_SHARE = 0.25
"""Longest wait for the first block, as a share of the time that computing the missing blocks takes."""
UNLEARNED_SECONDS = 2.0
"""Longest wait for each block, if the engine has not learned how fast it computes."""
OPEN_MS = 250.0
"""Deadline of each of a wait's look-ups, and for opening a ticket: one that is not open by then is not waited for."""
RELOCATE_SECONDS = 0.05
"""How often the store is asked for the number of blocks while another engine, perhaps on another node, stores them."""
_HIDDEN = frozenset({MissReason.ABSENT, MissReason.IN_FLIGHT, MissReason.DIVERGED, MissReason.EVICTED})
"""The store's reasons for blocks that a ticket would have promised."""

Seconds = Callable[[int, int], float | None]
"""Time to compute a prompt's tokens from the first to before the second; None if unknown."""


class WaitPolicy:
    """Decides for one prompt whether to go on waiting, and accounts for it. refused: why its ticket was useless."""

    def __init__(
        self, prompt: Prompt, block_tokens: int, compute: Seconds, clock: Callable[[], float], least_seconds: float
    ) -> None:
        """least_seconds: the first block is waited for at least so long."""
        self._keys, self._block_tokens = prompt.keys, block_tokens
        self._compute, self._clock, self._least_seconds = compute, clock, least_seconds
        self._wanted = max(0, prompt.tokens - 1) // block_tokens
        self._began: tuple[float, int] | None = None  # the first look: when, and how many blocks were there
        self._came: tuple[float, int] = (0.0, -1)  # the same when the last block came
        self.is_over = False
        self.is_of_ticket = False
        self.refused: MissReason | None = None
        self.detail = ""

    def opened(self, told: m.TicketOpened) -> None:
        """Take what the ticket promises."""
        reason, detail = told.reason, told.detail
        if reason is None and not (0 < told.blocks <= len(self._keys) and self._keys[told.blocks - 1] == told.head):
            reason, detail = MissReason.STALE_HINT, "the ticket is of another prompt"
        if reason is not None:
            self.refused, self.detail, self.is_over = reason, detail, True
        else:
            self._wanted, self.is_of_ticket = min(self._wanted, told.blocks), True

    def located(self, located: m.Located) -> None:
        """The store told how much is elsewhere. If a ticket's node does not answer, or has nothing, that is the reason
        of the miss."""
        if self.is_of_ticket and located.reason in (MissReason.STALE_HINT, MissReason.UNREACHABLE):
            self.refused, self.detail = located.reason, located.detail

    def seconds_left(self, blocks: int) -> float:
        """How long to wait for the next block, with `blocks` of them here; 0 ends the wait."""
        left = 0.0
        if not self.is_over and blocks < self._wanted:
            now = self._clock()
            self._began = self._began or (now, blocks)
            self._came = (now, blocks) if blocks > self._came[1] else self._came
            left = max(0.0, self._limit(blocks) - now)
        if left:
            self.detail = f"waited for block {blocks + 1} of {self._wanted}, which another engine was to store"
        elif blocks >= self._wanted and (self.refused is None or self.is_of_ticket):
            self.detail, self.refused = "", None
        self.is_over = not left
        return left

    def ended(self, end: AwaitEnd) -> None:
        self.is_over = end not in (AwaitEnd.READABLE, AwaitEnd.DEADLINE)
        if end is not AwaitEnd.READABLE:
            self.detail = f"{self.detail}: {end}"

    def account(self, account: Account) -> Account:
        """The account; if the ticket was useless, with the reason for that instead of the store's."""
        if self.refused is None:
            return account
        origins = [(one.origin, one.tokens) for one in account.segments]
        return Account.of([(self.refused if origin in _HIDDEN else origin, tokens) for origin, tokens in origins])

    def _limit(self, blocks: int) -> float:
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


@dataclass(frozen=True, slots=True)
class AwaitStep:
    """Wait for one block, for this long. located: the number from `m.Located`, if it is fetched meanwhile."""

    block: int
    seconds: float
    located: int = 0


class WaitPlan:
    """One request's plan: what to do after each answer. policy: for blocks that another engine stores, if it is to wait
    for them. fetch: for blocks elsewhere, where there is a courier. Pure."""

    def __init__(self, policy: WaitPolicy | None, fetch: FetchPolicy) -> None:
        self.policy, self.fetch = policy, fetch
        self._blocks = 0
        self._is_fetching = self._has_fetched = self._skips_fetch = self._was_fetched = False

    def is_open(self, has_courier: bool) -> bool:
        """Whether it may wait for anything after another look."""
        may_wait = self.policy is not None and not self.policy.is_over
        return may_wait or (has_courier and not self.fetch.is_over)

    def looked(self, blocks: int, has_courier: bool) -> AwaitStep | m.Located | None:
        """After a look that found `blocks` of them: what to wait for before the next look; None for nothing. An empty
        `m.Located` means that the store is to be asked what is elsewhere."""
        if self._has_fetched:
            self.fetch.looked(blocks)
            self._skips_fetch |= blocks <= self._blocks
        self._blocks, self._has_fetched = blocks, False
        left = self.policy.seconds_left(blocks) if self.policy is not None else 0.0
        skips, self._skips_fetch = self._skips_fetch, False
        may_fetch = has_courier and not skips and (left > 0 or not self.fetch.is_over)
        if may_fetch and self.fetch.asks(blocks):
            return m.Located(0, 0)
        return self._waiting(left, has_courier)

    def located(self, located: m.Located) -> AwaitStep | None:
        """What is elsewhere is known: what to wait for before the next look; None: nothing, and the last look
        stands."""
        stop, seconds = self.fetch.chosen(located, self._blocks)
        if stop > self._blocks:
            self._is_fetching = True
            return AwaitStep(stop - 1, seconds, located.number)
        left = 0.0
        if self.policy is not None:
            left = self.policy.seconds_left(self._blocks)
            self.policy.located(located)
        return self._waiting(left, has_courier=True)

    def awaited(self, awaited: m.Awaited) -> None:
        """The wait for the last `AwaitStep` is over."""
        if self._is_fetching:
            self._is_fetching, self._has_fetched, self._was_fetched = False, True, True
            self._skips_fetch = awaited.end is not AwaitEnd.READABLE  # not to ask a failing holder again at once
            self.fetch.ended(awaited)
        elif self.policy is not None:
            is_ours = awaited.end is AwaitEnd.SHORT and self._was_fetched  # not another engine's put
            self._skips_fetch |= is_ours
            self.policy.ended(AwaitEnd.DEADLINE if is_ours else awaited.end)

    def ended(self) -> None:
        """The request is over. Safe to call again."""
        if self._is_fetching or self._has_fetched:
            self.fetch.looked(self._blocks)
        self._is_fetching = self._has_fetched = False
        self.fetch.is_over = True
        if self.policy is not None:
            self.policy.is_over = True

    def account(self, account: Account) -> Account:
        account = self.fetch.account(account)
        return self.policy.account(account) if self.policy is not None else account

    @property
    def detail(self) -> str:
        """Why it waited in vain, in words; or nothing."""
        return (self.policy.detail if self.policy is not None else "") or self.fetch.detail

    def _waiting(self, left: float, has_courier: bool) -> AwaitStep | None:
        if not left:
            return None
        return AwaitStep(self._blocks, min(left, RELOCATE_SECONDS) if has_courier else left)


def wait_for_blocks(namespace: NamespaceHandle, prompt: Prompt, ticket: str, plan: WaitPlan, blocks: int) -> bool:
    """In a thread that may wait, after a look that found `blocks` of them: wait until the plan's blocks are here, or
    will not come soon. Returns whether it waited, so that another look is due."""
    has_waited = False
    while (step := plan.looked(blocks, namespace.has_courier)) is not None:
        if isinstance(step, m.Located):
            step = plan.located(namespace.locate(prompt, ticket))
            if step is None:
                break
        plan.awaited(namespace.await_block(prompt, step.block, 1000 * step.seconds, step.located))
        blocks, has_waited = namespace.match(prompt, counts=False).blocks, True
    return has_waited


class ParkedWaits(dict[PendingReply[m.Awaited], None]):
    """The waits of one scheduler that the store has not answered, in their order. Used by one thread."""

    def read(self) -> None:
        """Read the socket once for all of them: afterwards each knows whether it was answered."""
        for pending in self:
            if not pending.is_ready():
                pending.poll()
                return


class BlockWait:
    """The wait of one request. Used by one thread."""

    def __init__(
        self, namespace: NamespaceHandle, prompt: Prompt, ticket: str, plan: WaitPlan, parked: ParkedWaits
    ) -> None:
        """ticket: "" to wait for all full blocks of the prompt, where there is a policy for that."""
        self.plan = plan
        self.is_over = False
        """Whether nothing more is waited for, so that the last look stands."""
        self._namespace, self._prompt, self._ticket, self._parked = namespace, prompt, ticket, parked
        self._opening = namespace.submit_open(ticket, OPEN_MS) if ticket and plan.policy is not None else None
        self._locating: PendingReply[m.Located] | None = None
        self._pending: PendingReply[m.Awaited] | None = None

    @property
    def is_open(self) -> bool:
        return self.plan.is_open(self._namespace.has_courier)

    @property
    def is_parked(self) -> bool:
        return self._opening is not None or self._pending is not None

    def may_look(self) -> bool:
        """Whether the caller may look again how much is there, unless it is over. False: it still waits; ask again."""
        if self._opening is not None:
            told = self._opening.poll()
            if told is None:
                return False
            self._opening = None
            assert self.plan.policy is not None
            self.plan.policy.opened(told)
        if self._locating is not None:
            located = self._locating.poll()
            if located is None:
                return False
            self._locating = None
            self._park(self.plan.located(located))
        if self._pending is not None:
            awaited = self._pending.poll() if self._pending.is_ready() else None
            if awaited is None:
                return False
            self._parked.pop(self._pending, None)
            self._pending = None
            self.plan.awaited(awaited)
        return True

    def goes_on(self, blocks: int) -> bool:
        """Whether it goes on waiting after a look that found `blocks` of them."""
        step = self.plan.looked(blocks, self._namespace.has_courier)
        if isinstance(step, m.Located):
            self._locating = self._namespace.submit_locate(self._prompt, self._ticket)
            return True
        self._park(step)
        return not self.is_over

    def end(self) -> None:
        """The request is over. Safe to call again."""
        if self._pending is not None:
            self._parked.pop(self._pending, None)
        for pending in (self._opening, self._locating, self._pending):
            if pending is not None:
                pending.cancel()
        self._opening = self._locating = self._pending = None
        self.plan.ended()

    def _park(self, step: AwaitStep | None) -> None:
        self.is_over = step is None
        if step is not None:
            self._pending = self._namespace.submit_await(self._prompt, step.block, 1000 * step.seconds, step.located)
            self._parked[self._pending] = None
