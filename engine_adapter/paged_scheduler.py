"""The half of a connector that is with an engine's scheduler: it decides what is loaded and saved (floor 3).

    request   added (looked up) > matched (asked until there is an answer) > allocated (a load is ordered)
              > step after step: what was computed is offered > finished
    step      orders for the workers > their reports

Nothing here waits. Tokens are hashed here, once; what leaves this process are prefix keys. This is the edge at which
any fault of the store becomes a miss. Must never import an engine, and must never offer a token's KV before the engine
has accepted the token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Protocol

from engine_adapter.adapter import OpenStore
from engine_adapter.connector_settings import ConnectorSettings, LoadMode, SavePolicy
from engine_adapter.prefix_lookup import PrefixLookup, after_engine
from engine_adapter.step_orders import LoadOrder, NamespaceFacts, PageRun, SaveOrder, StepOrders, StepReports
from kvstore.handle import Lease, NamespaceHandle
from kvstore.identity import ExtraKey, Prompt
from kvstore.miss import Account, HitTier, MissReason

_log = getLogger(__name__)

QUICK_LOAD_MS = 2.0
"""A load that takes no longer is worth a step's time."""
USUAL_BYTES_PER_SECOND = 4e9
"""Of a load, until one was seen."""
RETRY_SECONDS = 1.0
"""Between two attempts to open a namespace."""
NEVER = 1 << 62
"""More tokens than a request has."""
MAX_SAVED_EVENTS = 4096
"""Kept until somebody asks for them."""


class EngineRequest(Protocol):
    """A request as its engine has it now. due: kept here for the engine's side: how many computed tokens complete the
    next block that is to be offered."""

    due: int

    @property
    def request_id(self) -> str:
        """The engine's name for it."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt, and what was generated and accepted."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt alone."""
        ...

    def token_ids(self, first: int, stop: int) -> list[int]:
        """Known tokens."""
        ...


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a request's KV depends on besides its tokens, and what its user wants. refused: why it is not looked up and
    not saved, else None."""

    extra_keys: tuple[ExtraKey, ...] = ()
    refused: MissReason | None = None
    detail: str = ""
    reads: bool = True
    saves: bool = True
    ttl: float | None = None
    priority: int = 0
    ignored: tuple[str, ...] = ()
    """Of what its user asked for: what was not understood."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A request of which a step computes as much as is `due`. stop: tokens up to which KV is complete after it, and
    accepted for certain. tables: every group's pages of it."""

    request_id: str
    stop: int
    tables: Callable[[], Sequence[Sequence[int]]]


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    lease: Lease
    waiting: set[int]
    tokens: int
    seconds: float = 0.0
    reason: MissReason | None = None


@dataclass(slots=True)
class _Save:
    request: EngineRequest
    order: SaveOrder
    first_block: int
    stop_block: int
    pages: frozenset[int]
    waiting: set[int]
    held: int
    reason: MissReason | None = None
    dropped: bool = False


@dataclass(eq=False, slots=True)
class _State:
    """One request. account: of its first admission. offered: blocks up to which its KV was offered, or is held."""

    request: EngineRequest
    facts: RequestFacts
    number: int
    prompt: Prompt
    account: Account
    detail: str
    lookup: PrefixLookup | None = None
    local_tokens: int = 0
    promised: int = 0
    is_parked: bool = False
    is_admitted: bool = False
    offered: int = 0
    load: _Load | None = None
    load_ms: float = 0.0
    loaded_tokens: int = 0
    saved_blocks: int = 0
    put_reasons: dict[MissReason, int] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerCounts:
    """In tokens unless named otherwise. hits, misses: by tier and by reason; their sum is what was asked for. A load
    that failed is a miss."""

    requests: int = 0
    asked: int = 0
    hits: dict[HitTier, int] = field(default_factory=dict)
    misses: dict[MissReason, int] = field(default_factory=dict)
    loads: int = 0
    failed_loads: int = 0
    saved_blocks: int = 0
    dropped_saves: int = 0

    def to_dict(self) -> dict[str, int]:
        """Flat, with those left out that are zero."""
        flat = {
            "requests": self.requests,
            "asked": self.asked,
            **{f"hit_{tier}": tokens for tier, tokens in self.hits.items()},
            **{f"miss_{reason}": tokens for reason, tokens in self.misses.items()},
            "loads": self.loads,
            "failed_loads": self.failed_loads,
            "saved_blocks": self.saved_blocks,
            "dropped_saves": self.dropped_saves,
        }
        return {name: count for name, count in flat.items() if count}

    def add(self, account: Account) -> None:
        """One more request."""
        self.requests += 1
        self.asked += account.asked
        for tier, tokens in account.hits.items():
            self.hits[tier] = self.hits.get(tier, 0) + tokens
        for reason, tokens in account.misses.items():
            self.misses[reason] = self.misses.get(reason, 0) + tokens


class PagedScheduler:
    """The scheduler's half. One thread, but for the one that opens namespaces."""

    def __init__(
        self, settings: ConnectorSettings, open_store: Callable[[], OpenStore], clock: Callable[[], float]
    ) -> None:
        """open_store: in the session that the workers join. clock: monotonic seconds."""
        self.settings = settings
        self.counts = SchedulerCounts()
        self._open_store = open_store
        self._clock = clock
        self._store: OpenStore | None = None
        self._facts: NamespaceFacts | None = None
        self._told = -1
        self._namespace: NamespaceHandle | None = None
        self._opened = threading.Event()
        self._closed = threading.Event()
        self._ranks: tuple[int, ...] = (0,)
        self._page_tokens = 1
        self._page_bytes = 1
        self._refused: tuple[MissReason, str] | None = (MissReason.DISABLED, "the workers have said nothing yet")
        self._states: dict[str, _State] = {}
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._saving_pages: dict[int, int] = {}
        self._decoded: set[int] = set()
        """Pages that hold what an inexact codec restored: it must not be encoded again."""
        self._taken: set[int] = set()
        """Pages that were given to requests since the last step."""
        self._orders = StepOrders()
        self._next_number = 1
        self._running: set[str] = set()
        self._failures: dict[int, int] = {}
        self._newly_saved: list[tuple[EngineRequest, int, int]] = []
        self._bytes_per_second = USUAL_BYTES_PER_SECOND

    # The namespace ---------------------------------------------------------------------------------------------------

    def use(self, facts: NamespaceFacts, ranks: Sequence[int], page_bytes: int) -> None:
        """From now on requests belong to this namespace; it is opened in the background, however long that takes."""
        self._facts, self._ranks = facts, tuple(ranks)
        self._page_tokens, self._page_bytes = facts.layout.page_tokens, page_bytes
        self._namespace = None
        self._refused = (MissReason.UNREACHABLE, "the store is not there yet")
        self._opened.clear()
        threading.Thread(target=self._open, args=(facts,), name="kv-open-scheduler", daemon=True).start()

    def wait_open(self, seconds: float) -> bool:
        """For an engine that starts: whether the store is there, within that time."""
        return self._opened.wait(seconds)

    def refuse(self, reason: MissReason, detail: str) -> None:
        """Nothing is looked up and nothing is saved."""
        self._namespace, self._refused = None, (reason, detail)

    @property
    def block_tokens(self) -> int:
        """Of a stored block; 0 while nothing can be stored."""
        return self._namespace.block_tokens if self._namespace is not None else 0

    @property
    def refused(self) -> tuple[MissReason, str] | None:
        """Why nothing is looked up at the moment."""
        return self._refused

    def renamed(self, weights_epoch: int) -> None:
        """The weights were changed in place: what was stored before, and what is computed now, is not theirs."""
        if self._facts is None:
            return
        old = self._facts
        for state in self._states.values():
            self._let_go(state)
            state.facts = RequestFacts(refused=MissReason.DISABLED, detail="it began before the weights were changed")
        changed = NamespaceFacts(
            old.number + 1, old.session, old.model, old.layout, old.codec, weights_epoch, old.config
        )
        self.use(changed, self._ranks, self._page_bytes)

    def _open(self, facts: NamespaceFacts) -> None:
        """In a thread of its own, until it is there or is not wanted any more."""
        is_first = True
        while not self._closed.is_set() and self._facts is facts:
            try:
                if self._store is None:
                    self._store = self._open_store()
                handle = self._store.namespace(
                    model=facts.model,
                    layout=facts.layout,
                    codec=facts.codec,
                    weights_epoch=facts.weights_epoch,
                    config=facts.config,
                )
            except Exception as error:
                line = str(error).partition("\n")[0]
                if is_first:
                    _log.warning("the store is not there yet, every look-up is a miss until it is: %s", line)
                is_first = False
                self._refused = (MissReason.UNREACHABLE, line)
                self._closed.wait(RETRY_SECONDS)
                continue
            if self._facts is facts:
                self._namespace, self._refused = handle, None
                self._opened.set()
                _log.info("prefixes are looked up in namespace %s", handle.namespace.digest().hex()[:12])
            return

    # A request -------------------------------------------------------------------------------------------------------

    def added(self, request: EngineRequest, facts: RequestFacts) -> None:
        """A new request: its look-up begins."""
        state = _State(request, facts, -1, Prompt(0, []), Account.of([]), "")
        self._states[request.request_id] = state
        self._look_up(state)

    def matched(self, request_id: str, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind the engine's own that are promised, and whether they are loaded beside its steps.

        None: ask again in the next step. local_tokens: what the engine itself has, a page boundary.
        """
        state = self._states.get(request_id)
        if state is None:
            return 0, False
        state.local_tokens, state.promised = local_tokens, 0
        if state.lookup is None or (state.is_admitted and state.lookup.is_over):
            self._look_up(state)  # it was preempted, and comes again with what it had generated
        lookup = state.lookup
        if lookup is None:
            return 0, False
        tokens = self._promised(state, lookup, local_tokens)
        if tokens is None:
            return None, False
        if not state.is_admitted:
            state.account, state.detail = lookup.account, lookup.detail
        state.promised = max(0, tokens - local_tokens)
        return state.promised, bool(state.promised) and not self._waits(state)

    def allocated(self, request_id: str, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has room. tokens: how many of those that were promised it wants; 0 for none, and for the second
        call after a load."""
        state = self._states.get(request_id)
        if state is None:
            return
        lookup, promised = state.lookup, state.promised
        state.promised = 0
        if state.is_parked:
            state.is_parked = False
            return
        first = state.local_tokens // self._page_tokens
        for table in tables:
            self._taken.update(table[first:])
        if lookup is not None:
            found = lookup.found()
            self._is_offered(state, found.blocks if found is not None else 0)
        if not state.is_admitted:
            state.is_admitted = True
            state.account = after_engine(state.account, state.local_tokens)
        if not tokens or lookup is None or not promised:
            if lookup is not None:
                lookup.give_back()
            return
        lease = lookup.take()
        if lease is None:
            return
        self._order_load(state, lease, tables, state.local_tokens, state.local_tokens + min(tokens, promised))

    def finished(self, request_id: str) -> dict[str, object] | None:
        """It is over, or was given up. What its user is told."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        self._running.discard(request_id)
        self._let_go(state)
        self.counts.add(state.account)
        return {
            **state.account.to_dict(),
            "detail": state.detail,
            "load_ms": state.load_ms,
            "saved_blocks": state.saved_blocks,
            "put_reasons": {str(reason): count for reason, count in state.put_reasons.items()},
            **({"ignored": list(state.facts.ignored)} if state.facts.ignored else {}),
        }

    def hit_tiers(self, request_id: str, tokens: int) -> dict[HitTier, int]:
        """Of that many tokens that are loaded for a request: from which tiers."""
        state = self._states.get(request_id)
        if state is None:
            return {}
        found: dict[HitTier, int] = {}
        for tier, count in state.account.hits.items():
            if tier is not HitTier.ENGINE:
                found[tier] = count
        return found if sum(found.values()) == tokens else {}

    def take_counts(self) -> SchedulerCounts:
        """What was counted since it was last asked."""
        counts, self.counts = self.counts, SchedulerCounts()
        return counts

    def take_saved(self) -> list[tuple[EngineRequest, int, int]]:
        """Blocks that the store has got since it was last asked: (request, first block, stop block)."""
        saved, self._newly_saved = self._newly_saved, []
        return saved

    # A step ----------------------------------------------------------------------------------------------------------

    def step(self, running: set[str], due: Sequence[Computed], grown: Iterable[int]) -> StepOrders:
        """What the workers do around this step. running: requests of which it computes anything. due: those of them
        that complete a block. grown: pages that are new to requests that ran before."""
        orders, self._orders = self._orders, StepOrders()
        taken, self._taken = self._taken, set()
        taken.update(grown)
        if taken:
            orders.fenced += sorted({self._saving_pages[page] for page in taken if page in self._saving_pages})
            self._decoded -= taken
        for one in due:
            state = self._states.get(one.request_id)
            if state is not None:
                self._offer(state, one, orders)
        self._running = running
        orders.failures_seen = dict(self._failures)
        orders.is_idle = not running
        if self._facts is not None and self._told != self._facts.number:
            self._told = self._facts.number
            orders.namespace = self._facts
        return orders

    def reported(self, reports: StepReports) -> None:
        """What the workers have done."""
        for report in reports.loads:
            load = self._loads.get(report.number)
            if load is None:
                continue
            load.waiting.discard(report.rank)
            load.seconds = max(load.seconds, report.seconds)
            if report.tokens < load.tokens:
                load.tokens, load.reason = report.tokens, report.reason
            if not load.waiting:
                del self._loads[report.number]
                self._loaded(load)
        for saved in reports.saves:
            save = self._saves.get(saved.number)
            if save is None:
                continue
            save.waiting.discard(saved.rank)
            save.dropped |= saved.dropped
            if saved.reason is not None or saved.dropped:
                save.held = min(save.held, max(saved.held, save.first_block))
                save.reason = saved.reason
            if not save.waiting:
                del self._saves[saved.number]
                self._saved(save, saved.stored)
        self._failures.update(reports.failures)

    def close(self) -> None:
        """Everything is let go of."""
        self._closed.set()
        for request_id in list(self._states):
            self.finished(request_id)
        store = self._store
        if store is not None:
            store.close()  # type: ignore[attr-defined]

    # Loads -----------------------------------------------------------------------------------------------------------

    def _look_up(self, state: _State) -> None:
        request, facts = state.request, state.facts
        if state.lookup is not None:
            state.lookup.give_back()
        state.lookup = None
        tokens = request.num_tokens
        reason, detail = self._refused or (MissReason.DISABLED, "")
        if facts.refused is not None:
            reason, detail = facts.refused, facts.detail
        if not state.is_admitted:
            state.account, state.detail = Account.of([(reason, tokens)]), detail
        namespace = self._namespace
        if namespace is None or facts.refused is not None or self._facts is None:
            return
        block = namespace.block_tokens
        known = state.prompt if state.number == self._facts.number else Prompt(0, [])
        first = len(known.keys) * block
        state.prompt = namespace.hashed(request.token_ids(first, tokens), facts.extra_keys, known)
        state.number = self._facts.number
        if not facts.reads:
            return
        state.lookup = PrefixLookup(
            namespace,
            state.prompt,
            request.request_id,
            self._clock,
            match_deadline_ms=self.settings.match_deadline_ms,
            lease_deadline_ms=self.settings.lease_deadline_ms,
        )

    def _promised(self, state: _State, lookup: PrefixLookup, local_tokens: int) -> int | None:
        stop = (state.prompt.tokens - 1) // self._page_tokens * self._page_tokens
        return lookup.matched(local_tokens, stop, MissReason.GRID)

    def _waits(self, state: _State) -> bool:
        """Whether the step that needs the load waits for it."""
        mode = self.settings.load
        if mode is not LoadMode.AUTO:
            return mode is not LoadMode.ASYNC
        size = state.promised / self._page_tokens * self._page_bytes
        is_alone = not (self._running - {state.request.request_id} or self._loads)
        return is_alone or 1000 * size / self._bytes_per_second < QUICK_LOAD_MS

    def _order_load(
        self, state: _State, lease: Lease, tables: Sequence[Sequence[int]], first_token: int, stop_token: int
    ) -> None:
        assert self._facts is not None
        waits = self._waits(state)
        runs = _runs(tables, first_token, stop_token, self._page_tokens)
        order = LoadOrder(
            self._number(),
            state.request.request_id,
            self._facts.number,
            lease.ticket(),
            first_token,
            stop_token,
            runs,
            waits,
            self.settings.load is LoadMode.LAYERWISE,
        )
        state.load = load = _Load(order, lease, set(self._ranks), stop_token)
        self._loads[order.number] = load
        self._orders.loads.append(order)
        block = lease.tokens // lease.blocks if lease.blocks else 1
        self._is_offered(state, max(state.offered, stop_token // block))
        state.is_parked = not waits
        self.counts.loads += 1

    def _loaded(self, load: _Load) -> None:
        load.lease.release()
        order = load.order
        size = (order.stop_token - order.first_token) / self._page_tokens * self._page_bytes
        is_whole = load.tokens >= order.stop_token
        if is_whole and load.seconds > 0 and size > 1 << 20:
            self._bytes_per_second += 0.2 * (size / load.seconds - self._bytes_per_second)
        if not is_whole:
            self.counts.failed_loads += 1
        state = self._states.get(order.request)
        if state is None or state.load is not load:
            return
        state.load = None
        state.load_ms += 1000 * load.seconds
        state.loaded_tokens += max(0, load.tokens - order.first_token)
        tokens = max(load.tokens, order.first_token)
        if not is_whole:
            state.facts = replace(state.facts, reads=False)  # or it could go on like that for ever
            state.account = state.account.cut(tokens, load.reason or MissReason.UNREACHABLE)
            self._is_offered(state, min(state.offered, tokens // max(1, self.block_tokens)))
        if self._namespace is not None and not self._namespace.is_exact:
            pages = (tokens - order.first_token) // self._page_tokens
            self._decoded.update(page for run in order.tables for page in run.pages[:pages])

    # Saves -----------------------------------------------------------------------------------------------------------

    def _offer(self, state: _State, one: Computed, orders: StepOrders) -> None:
        """Order a save of the blocks that this step completes."""
        facts, namespace, policy = state.facts, self._namespace, self.settings.save
        is_other = self._facts is None or state.number != self._facts.number
        if namespace is None or is_other or facts.refused is not None or not facts.saves or policy is SavePolicy.NONE:
            state.request.due = NEVER
            return
        block = namespace.block_tokens
        stop = min(one.stop, state.request.num_tokens)
        if policy is SavePolicy.PROMPT:
            stop = min(stop, state.request.num_prompt_tokens)
        stop_block = stop // block
        if stop_block <= state.offered:
            if stop < one.stop:
                state.request.due = NEVER  # there is no more of it to come
            return
        if stop_block > len(state.prompt.keys):
            first = len(state.prompt.keys) * block
            state.prompt = namespace.hashed(
                state.request.token_ids(first, stop_block * block), facts.extra_keys, state.prompt
            )
        tables = one.tables()
        for first_block, last_block in self._exact_runs(tables, state.offered, stop_block, block):
            self._order_save(state, tables, first_block, last_block, orders)
        self._is_offered(state, stop_block)

    def _exact_runs(
        self, tables: Sequence[Sequence[int]], first_block: int, stop_block: int, block: int
    ) -> list[tuple[int, int]]:
        """Runs of blocks whose pages are all as the engine computed them."""
        if not self._decoded:
            return [(first_block, stop_block)]
        per_block = block // self._page_tokens
        runs: list[tuple[int, int]] = []
        for number in range(first_block, stop_block):
            pages = [page for table in tables for page in table[number * per_block : (number + 1) * per_block]]
            if not self._decoded.isdisjoint(pages):
                continue
            if runs and runs[-1][1] == number:
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        return runs

    def _order_save(
        self, state: _State, tables: Sequence[Sequence[int]], first_block: int, stop_block: int, orders: StepOrders
    ) -> None:
        assert self._facts is not None
        block = self._facts.layout.block_tokens
        facts = state.facts
        order = SaveOrder(
            self._number(),
            state.request.request_id,
            self._facts.number,
            b"".join(state.prompt.keys[:stop_block]),
            first_block * block,
            _runs(tables, first_block * block, stop_block * block, self._page_tokens),
            facts.ttl if facts.ttl is not None else self.settings.ttl,
            facts.priority or self.settings.priority,
        )
        pages = frozenset(page for run in order.tables for page in run.pages)
        self._saves[order.number] = _Save(
            state.request, order, first_block, stop_block, pages, set(self._ranks), stop_block
        )
        self._saving_pages.update(dict.fromkeys(pages, order.number))
        orders.saves.append(order)

    def _saved(self, save: _Save, stored: int) -> None:
        for page in save.pages:
            if self._saving_pages.get(page) == save.order.number:
                del self._saving_pages[page]
        if stored and len(self._newly_saved) < MAX_SAVED_EVENTS:
            self._newly_saved.append((save.request, save.first_block, min(save.held, save.stop_block)))
        self.counts.saved_blocks += stored
        self.counts.dropped_saves += save.dropped
        state = self._states.get(save.order.request)
        if state is None:
            return
        state.saved_blocks += stored
        if save.reason is not None:
            state.put_reasons[save.reason] = state.put_reasons.get(save.reason, 0) + 1
        if save.held < save.stop_block:
            state.offered = min(state.offered, save.held)  # offered again when the next block is due

    def _is_offered(self, state: _State, blocks: int) -> None:
        """So many blocks of it, and no more, were offered or are held."""
        state.offered = blocks
        saves = state.facts.refused is None and state.facts.saves and self.settings.save is not SavePolicy.NONE
        state.request.due = (blocks + 1) * self.block_tokens if saves and self.block_tokens else NEVER

    def _let_go(self, state: _State) -> None:
        if state.lookup is not None:
            state.lookup.give_back()
            state.lookup = None

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number


def _runs(tables: Sequence[Sequence[int]], first_token: int, stop_token: int, page_tokens: int) -> tuple[PageRun, ...]:
    """Of each group the pages of these tokens."""
    first, stop = first_token // page_tokens, -(-stop_token // page_tokens)
    return tuple(PageRun(first, list(table[first:stop])) for table in tables)


def namespace_config(**fields: object) -> Mapping[str, str]:
    """Fields of a namespace as text; empty ones are left out."""
    return {name: str(value) for name, value in fields.items() if value not in (None, "", {})}
