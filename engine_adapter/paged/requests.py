"""The scheduler half's records of an engine's requests."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from math import inf
from typing import Any, Protocol, TypeVar, cast

from engine_adapter.audit.audits import AuditVerdict
from engine_adapter.cost import Decision, LoadChoice
from engine_adapter.handoff import FetchPolicy
from engine_adapter.paged.announcements import Announcements
from engine_adapter.paged.lookup import PrefixLookup
from engine_adapter.paged.step_plan import LoadOrder
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.identity import ExtraKey, Prompt
from kvstore.client.edge import contained
from kvstore.client.handle import Lease, NamespaceHandle
from kvstore.client.pending import PendingReply
from kvstore.client.spans import NO_TRACE, RequestTrace
from kvstore.protocol.messages import Located, Sealed
from kvstore.protocol.told import MAX_TOLD_REQUESTS, MAX_TOLD_TEXT, RequestTold, SavingsTold, told_name

TELL_SECONDS = 1.0
MOST_WAITING = 64 * MAX_TOLD_REQUESTS
"""Reports for a store that is not reached; of more, the first ones are lost."""
TICKET_SECONDS = 60.0
"""For how long a ticket is good, and its blocks are retained."""
NEVER = 1 << 62
"""More tokens than any request has."""
Method = TypeVar("Method", bound=Callable[..., Any])


def edge(otherwise: object) -> Callable[[Method], Method]:
    """A decorator: an exception in a method switches the store off for this engine (the
    method's object is told by its `broke`), and the engine runs on."""

    def guarded(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any) -> Any:
            with contained(self.broke):
                return method(self, *args)
            return otherwise

        return cast(Method, call)

    return guarded


class EngineRequest(Protocol):
    """A request in its engine's present state. due: kept here for the engine's side: the number of computed tokens that
    completes the next block to offer."""

    due: int

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """The prompt's, and those generated and accepted."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    def token_ids(self, first: int, stop: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a request's KV depends on besides its tokens, and its user's wishes. refused: why it is neither looked up
    nor saved, else None. ttl, priority: None if not given. ignored: wishes that were not understood. ticket: of the
    engine that computes its prompt; awaits: another engine computes it, without a ticket. hands_over: another engine
    continues it, with a ticket from here. trace: notes what the store does for it."""

    extra_keys: tuple[ExtraKey, ...] = ()
    refused: MissReason | None = None
    detail: str = ""
    reads: bool = True
    saves: bool = True
    ttl: float | None = None
    priority: int | None = None
    ignored: tuple[str, ...] = ()
    ticket: str = ""
    awaits: bool = False
    hands_over: bool = False
    trace: RequestTrace = NO_TRACE

    def kept_seconds(self, usual: float | None, handed_over: float) -> float | None:
        """For how long its blocks are retained. usual: if it does not say; handed_over: the least if it hands over."""
        given = self.ttl if self.ttl is not None else usual
        return max(given or 0.0, handed_over) if self.hands_over else given

    @property
    def is_kept(self) -> bool:
        """Whether its user asked for retention, also of blocks that are stored already."""
        return self.ttl is not None or (self.priority or 0) > 0


@dataclass(frozen=True, slots=True)
class Computed:
    """A request that reaches its `due` tokens in this step. stop: tokens up to which KV is complete after it, and
    accepted for certain. tables: every group's pages of it."""

    request_id: str
    stop: int
    tables: Callable[[], Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Boundary:
    """A step of a request computes the states behind its first `tokens` tokens. pages: with these, by page table."""

    request_id: str
    tokens: int
    pages: Mapping[int, int]


@dataclass(slots=True)
class LoadUnderWay:
    """state: of its request. tokens: up to which pages are verified, as far as is known. waiting: ranks that have
    not reported. is_first: of its request's first admission, which the account describes. pages: if a step waits
    for the load, from the first that it brings to the request's last. account: set if the request is over and not
    counted yet."""

    state: RequestState = field(repr=False)
    order: LoadOrder
    leases: Sequence[Lease]
    waiting: set[int]
    tokens: int
    is_first: bool
    pages: tuple[int, ...] = ()
    seconds: float = 0.0
    reason: MissReason | None = None
    account: Account | None = None

    @property
    def is_whole(self) -> bool:
        return self.tokens >= self.order.stop_token

    @property
    def end(self) -> int:
        """The token up to which its request's KV is there."""
        return max(self.tokens, self.order.first_token)

    @property
    def why(self) -> MissReason:
        return self.reason or MissReason.UNREACHABLE


@dataclass(slots=True)
class AuditUnderWay:
    """block: the one that is compared, with the state behind it where there are states. pending: the leases of what is
    stored and not compared yet, of a state by True. orders: comparisons in progress. is_partial: something was not
    compared."""

    block: int
    pending: dict[bool, PendingReply[Lease]]
    leases: list[Lease] = field(default_factory=list)
    orders: set[int] = field(default_factory=set)
    verdicts: list[AuditVerdict] = field(default_factory=list)
    is_partial: bool = False


@dataclass(eq=False, slots=True)
class RequestState:
    """A request from `added` to `finished`. account, detail: of its first admission. number: of the namespace in which
    the prompt was hashed. late_at: computed tokens at which its look-up says how much is stored, if its admission did
    not wait for that (0: no more). stop_token, stop_reason: up to where a load would go, decided when the engine itself
    had `chosen_for` tokens. offered: blocks up to which its KV was offered, or is held. taken_tokens: the engine's and
    the store's, at its last admission. held_out: whether its hit is computed all the same, None until that is decided.
    added_at, and found_tokens in the store: until its first token, to learn what hits save. sealing: the pending query
    for its ticket. is_renewed: the retention of its stored blocks was renewed as it asks.
    is_counted: its hits and misses were reported. ends: numbers of blocks behind which the state is stored, or was
    offered. parted_at: tokens up to which KV was found, where states end before that."""

    request: EngineRequest
    facts: RequestSpec
    account: Account
    detail: str = ""
    number: int = -1
    prompt: Prompt = field(default_factory=lambda: Prompt(0, []))
    lookup: PrefixLookup | None = None
    late_at: int = 0
    local_tokens: int = 0
    chosen_for: int = -1
    stop_token: int = 0
    stop_reason: MissReason = MissReason.GRID
    waits: bool = True
    is_admitted: bool = False
    offered: int = 0
    taken_tokens: int = 0
    load: LoadUnderWay | None = None
    load_ms: float = 0.0
    saved_blocks: int = 0
    put_reasons: Counter[MissReason] = field(default_factory=Counter)
    audit: AuditUnderWay | None = None
    held_out: bool | None = None
    added_at: float = 0.0
    found_tokens: int = 0
    sealing: PendingReply[Sealed] | None = None
    is_renewed: bool = False
    is_counted: bool = False
    ends: set[int] = field(default_factory=set)
    parted_at: int = 0

    def hit_tiers(self, tokens: int) -> dict[HitTier, int]:
        """The tiers of this many tokens that are loaded for it. Empty if unknown."""
        found: dict[HitTier, int] = {**self.account.hits}
        found.pop(HitTier.ENGINE, None)
        return found if sum(found.values()) == tokens else {}

    def seal(self, namespace: NamespaceHandle, seconds: float) -> None:
        if self.facts.hands_over and self.sealing is None and self.prompt.keys:
            self.sealing = namespace.submit_seal(self.prompt, seconds)

    @property
    def is_to_renew(self) -> bool:
        """Whether its stored blocks are still to be retained as it asks."""
        return self.facts.is_kept and not self.is_renewed

    def take_renewal(self, computed: int) -> int:
        """How many leading blocks to renew, once and with the prompt's last step; 0 for none."""
        held = min(self.offered, len(self.prompt.keys))
        if not held or not self.is_to_renew or computed < self.request.num_prompt_tokens:
            return 0
        self.is_renewed = True
        return held

    def outcome(self) -> dict[str, Any]:
        """What becomes of it, as far as is known."""
        return {
            **self.account.to_dict(),
            "detail": self.detail,
            "load_ms": round(self.load_ms, 3),
            "saved_blocks": self.saved_blocks,
            "put_reasons": {str(reason): count for reason, count in self.put_reasons.items()},
        }

    def told(self) -> dict[str, Any]:
        """The report for its user when it is over. load_ms: None if its load has not been reported yet. ticket: for the
        next engine."""
        told = self.outcome()
        if self.load is not None:
            told["load_ms"] = None
        if self.facts.ignored:
            told["ignored"] = list(self.facts.ignored)
        if self.sealing is not None:
            sealed = self.sealing.poll()
            self.sealing.cancel()
            if sealed is not None and sealed.ticket:
                told["ticket"] = sealed.ticket
        return told


class RequestFetch(FetchPolicy):
    """By what the engine's cost model has learned. Not thread-safe."""

    def __init__(
        self,
        state: RequestState,
        block_tokens: int,
        choice: LoadChoice,
        announced: Announcements[Any],
        clock: Callable[[], float],
        is_busy: Callable[[], bool],
    ) -> None:
        """is_busy: whether the engine runs other requests meanwhile."""
        super().__init__(max(0, state.prompt.tokens - 1) // block_tokens, 0.0, block_tokens)
        self._state, self._choice, self._announced = state, choice, announced
        self._clock, self._is_busy = clock, is_busy
        self._decision: Decision | None = None
        self._began_at = 0.0
        self._first = self._last = 0  # the blocks that are expected

    def asks(self, blocks: int) -> bool:
        """Not for an admitted request, and never for the last token, which is computed."""
        local = self._state.local_tokens // self._block_tokens
        asks = not self._state.is_admitted and self._most > max(blocks, local)
        self._choice.costs.counts["locates"] += asks
        return asks

    def choose(self, located: Located, blocks: int) -> tuple[int, float]:
        """Announces fetched blocks to routers once they are here, like stored ones."""
        assert located.tier is not None
        block, state = self._block_tokens, self._state
        usable, self._began_at = min(located.blocks, self._most), self._clock()
        self._decision, seconds = self._choice.costs.choose_fetch(
            located.tier,
            blocks * block,
            state.local_tokens,
            usable * block,
            state.prompt.tokens,
            block,
            # `located.milliseconds` is for all located blocks; fewer take proportionally less.
            located.milliseconds * (usable - blocks) / (located.blocks - blocks),
            self._is_busy(),
            self._began_at,
        )
        self._first, self._last = blocks, blocks + self._decision.load_tokens // block
        self._announced.expect(state.request, state.prompt.keys[self._first : self._last], self._first)
        return self._last, seconds

    def learn(self, *, came: bool) -> None:
        decision, self._decision, now = self._decision, None, self._clock()
        if decision is not None:
            seconds, name = now - self._began_at, self._state.request.request_id
            self._choice.costs.fetch_ended(decision, seconds, now, came=came, of_ticket=bool(self._state.facts.ticket))
            if came:
                self._choice.fetch_seconds[name] = self._choice.fetch_seconds.get(name, 0.0) + seconds

    def looked(self, blocks: int) -> None:
        """Expect no longer the blocks that did not come."""
        keys = b"".join(self._state.prompt.keys[: self._last])
        self._announced.saved(keys, self._first, blocks)


class RequestNews:
    """The outcomes of requests and what hits saved, reported to the store at most once a second, for its account,
    `kvstore why` and the console. Of a request that runs on, the tokens are reported before its end. A step reports,
    and where no further one comes, a timer does. One thread adds."""

    def __init__(self, late: Callable[[], None] = lambda: None) -> None:
        """late: called in a thread of its own where no step has called `tell` for a second though something waits."""
        self._late, self._lock = late, threading.Lock()
        self._timer: threading.Timer | None = None
        self._waiting: deque[RequestTold] = deque(maxlen=MOST_WAITING)
        self._told_at = -TELL_SECONDS
        self.due_at = inf
        """From when on `tell` has something to send; inf if nothing waits."""
        self._judged: tuple[object, float, float] = (None, 0.0, 0.0)  # of the last report, in ms

    def add(self, state: RequestState) -> None:
        """Report a request whose hits and misses are known; they count with its first report."""
        counts, state.is_counted = not state.is_counted, True
        outcome = {**state.outcome(), "detail": state.detail[:MAX_TOLD_TEXT]}
        told = RequestTold(told_name(state.request.request_id), counts=counts, **outcome)
        with self._lock:
            self._waiting.append(told)
        self.is_due()
        if self._timer is None:
            timer = threading.Timer(TELL_SECONDS, self._on_time)
            timer.daemon = True
            with suppress(RuntimeError):  # no thread available: a step reports
                timer.start()
                self._timer = timer

    def is_due(self) -> None:
        self.due_at = min(self.due_at, self._told_at + TELL_SECONDS)

    def add_running(self, states: Iterable[RequestState]) -> None:
        """Those of them that were not reported yet."""
        for state in states:
            if state.is_admitted and state.load is None and not state.is_counted:
                self.add(state)

    def tell(
        self, namespace: NamespaceHandle | None, choice: LoadChoice, gpus: int, now: float, seconds: float
    ) -> None:
        """Send the report. choice: knows what hits save; gpus: that a step uses. seconds: that it may wait for another
        message."""
        if namespace is None:
            return
        with self._lock:
            self._told_at, self.due_at = now, inf
            told = list(self._waiting)
            self._waiting.clear()
            counts, measured = choice.costs.counts, choice.saving.estimate()
            of, saved, regretted = self._judged
            if of is not choice:
                saved = regretted = 0.0
            self._judged = choice, counts["saved_ms"], counts["regret_ms"]
            savings = SavingsTold(
                gpus * (counts["saved_ms"] - saved) / 1000,
                gpus * (counts["regret_ms"] - regretted) / 1000,
                measured.mean_ms if measured is not None else None,
                measured.standard_error_ms if measured is not None else None,
            )
        namespace.tell(told, savings, seconds=seconds)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting:
            self._late()

    def _on_time(self) -> None:
        self._timer = None
        if self._waiting:
            self._late()


SAVING = "ttft_saved_ms_"
"""Keys of an engine's counts with this prefix are present values; all others are increments."""
LOAD_SECONDS = "load_seconds"
"""There, a list: of each load that ended whole. All else are numbers."""


def counted(account: Account) -> dict[str, int]:
    """A request's counts: it, the tokens asked for, and those of each tier and reason, which add up to these."""
    hits = {f"hit_{tier}": tokens for tier, tokens in account.hits.items()}
    misses = {f"miss_{reason}": tokens for reason, tokens in account.misses.items()}
    return {"requests": 1, "asked": account.asked, **hits, **misses}
