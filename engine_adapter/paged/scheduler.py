"""The half of a connector in an engine's scheduler: it decides what is loaded and saved.

    request   added (looked up) > matched (called until there is an answer) > allocated (a load is ordered)
              > step after step: computed blocks are offered > finished
    step      orders for the workers > their reports

    promise   looked up > found > how much of it is loaded is chosen, or that it is audited > leased > promised
              > given to a load, or released

A request for which no block can be loaded does not wait for its look-up: it is looked up late, once its computed blocks
could be saved. Nothing here waits, except a third of a millisecond in a step that has nothing else to do. Tokens are
hashed in this half, once; only prefix keys leave this process. Any fault of the store becomes a miss here. Must never
import an engine, and must never offer a token's KV before the engine has accepted the token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from logging import getLogger
from typing import Any

from engine_adapter.audit.audits import AuditResult, AuditVerdict
from engine_adapter.cost import SYNCHRONOUS_MS, LoadChoice, StepWork
from engine_adapter.handoff import BlockWait, ParkedWaits, WaitPlan, WaitPolicy
from engine_adapter.paged.announcements import Announcements
from engine_adapter.paged.lookup import PrefixLookup, account_unasked
from engine_adapter.paged.namespace_opener import NamespaceOpener
from engine_adapter.paged.plans import AuditPlan, LoadPlan, SavePlan, page_runs
from engine_adapter.paged.requests import (
    LOAD_SECONDS,
    NEVER,
    SAVING,
    TELL_SECONDS,
    TICKET_SECONDS,
    Boundary,
    Computed,
    EngineRequest,
    LoadUnderWay,
    RequestFetch,
    RequestNews,
    RequestSpec,
    RequestState,
    counted,
    edge,
)
from engine_adapter.paged.settings import ConnectorSettings, LoadMode, SavePolicy
from engine_adapter.paged.step_plan import (
    LeaseHere,
    LoadOrder,
    LoadReport,
    NamespaceSpec,
    PageRun,
    SaveOrder,
    SaveReport,
    StepPlan,
    StepReports,
)
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.codec import codec_named
from kvstore.block.identity import Prompt
from kvstore.block.layout import Attention
from kvstore.block.states import StatePolicy
from kvstore.client.edge import contained
from kvstore.client.handle import NamespaceHandle, OpenStore

CLOSE_SECONDS = 1.0

IDLE_WAIT_SECONDS = 0.0003
"""How long each step of an engine that runs nothing waits for answers: otherwise an answer costs it a whole step."""
IDLE_PAUSE_SECONDS = 0.00002
AWAIT_PAUSE_SECONDS = 0.001
"""How long such a step sleeps, once, if all it could do is wait for blocks that another engine stores."""
HELD_OUT = "computed all the same, as the first hits of an engine and a share of all others are (audit)"

_log = getLogger(__name__)


class PagedScheduler:
    """The scheduler's half. Not thread-safe."""

    def __init__(
        self,
        settings: ConnectorSettings,
        open_store: Callable[[], OpenStore],
        clock: Callable[[], float],
        choose: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        """open_store: in the session that the workers join. clock: monotonic seconds. choose: uniform random numbers in
        [0, 1). pause: sleeps."""
        self.settings = settings
        self._clock, self._choose = clock, choose
        self.choice = self._new_choice(1.0)
        self.opener = NamespaceOpener(open_store, is_told=True)
        """Opens the namespace; says why it is not open."""
        self._facts: NamespaceSpec | None = None
        self._told, self._step, self._numbers = -1, 0, count(2)
        self._ranks: tuple[int, ...] = (0,)
        self._is_exact, self._is_broken = True, False
        self._states: dict[str, RequestState] = {}
        self._loads, self._plan = LoadPlan(1, 1), SavePlan((0,), (), 1)
        self._audits: AuditPlan | None = None
        self._kept_states: StatePolicy | None = None
        self._saving: dict[int, EngineRequest] = {}
        self._taken: set[int] = set()
        """Pages given to requests since the last step."""
        self._orders = StepPlan()
        self._running: set[str] = set()
        self._failures: dict[int, int] = {}
        self._counts, self._load_seconds = Counter[str](), list[float]()
        self.announced: Announcements[Any] = Announcements(clock, lambda *_: None, lambda: None)
        self._announces = False
        self._first_tokens: list[tuple[int, float, bool, int, int]] = []
        """Awaited first tokens: (step, when its request was added, whether it was held out, prompt, found tokens)."""
        self._news = RequestNews(lambda: self._tell_news(0.0))
        self._pause = pause
        self._idle_seconds = IDLE_WAIT_SECONDS
        self._parked = ParkedWaits()
        self._refused: tuple[MissReason, str] | None = (MissReason.DISABLED, "the workers have said nothing yet")
        """Why nothing is looked up: a reason, and words; None if requests are."""

    # The namespace ---------------------------------------------------------------------------------------------------

    def use(self, facts: NamespaceSpec, ranks: Sequence[int]) -> None:
        """From now on requests belong to this namespace, which is opened in the background. Raises `BadInput`, and
        changes nothing, if the codec cannot store such pages."""
        layout, settings, codec = facts.layout, self.settings, codec_named(facts.codec)
        payload_bytes = sum(codec.payload_bytes(part) for part in layout.parts)
        if self._facts is None:  # orders in flight read and write pages as before
            self._loads = LoadPlan(layout.page_tokens, layout.block_tokens)
            self._plan = SavePlan(ranks, facts.kv_groups, layout.block_tokens)
        self._facts, self._ranks = facts, tuple(ranks)
        if not self._is_broken:
            self._refused = None  # also after drift: these are other weights, or renamed ones
        self._is_exact = codec.is_exact
        if facts.states is not None:
            per_token = payload_bytes // layout.block_tokens if facts.has_kv else 0
            self._kept_states = StatePolicy(layout.block_tokens, facts.states.raw_bytes, per_token)
        self.choice = self._new_choice(payload_bytes / layout.block_tokens)
        self.announced.forget()
        self._audits = AuditPlan(self.choice, facts, self._plan, self._numbers, settings.lease_deadline_ms)
        self.opener.want(facts)

    def _new_choice(self, bytes_per_token: float) -> LoadChoice:
        settings = self.settings
        return LoadChoice(bytes_per_token, is_on=settings.cost_model, audit=settings.audit, choose=self._choose)

    def wait_open(self, seconds: float) -> bool:
        """For an engine that starts: whether the store is reached within that time."""
        return self._facts is not None and self.opener.wait(self._facts.number, seconds) is not None

    def refuse(self, reason: MissReason, detail: str) -> None:
        """Look up and save nothing from now on. Loads and saves in flight finish."""
        self._refused = (reason, detail)
        for state in self._states.values():
            self._let_go(state)
            self._end_audit(state)

    def broke(self, error: Exception) -> None:
        """A bug in the connector: the engine goes on without the store until it ends. The outcome of loads that steps
        wait for is unknown: no request may use their pages."""
        if not self._is_broken:
            _log.error("nothing is looked up or saved any more in this engine", exc_info=error)
        self._is_broken = True
        self._refused = (MissReason.DISABLED, f"a fault in the adapter: {type(error).__name__}")
        self._loads.give_up()

    def renamed(self, weights_epoch: int) -> None:
        """The weights were changed in place: KV stored before is not found any more, and KV of requests that run now is
        not stored."""
        if self._facts is None:
            return
        for state in self._states.values():
            self._let_go(state)
            self._end_audit(state)
            state.facts = RequestSpec(refused=MissReason.DISABLED, detail="it began before the weights were changed")
        if self._audits is not None:
            self._audits.close()
        self._collect()
        self.use(replace(self._facts, number=self._facts.number + 1, weights_epoch=weights_epoch), self._ranks)

    @property
    def block_tokens(self) -> int:
        """Tokens of a stored block; 0 if nothing can be stored."""
        return self._facts.layout.block_tokens if self._facts is not None else 0

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    @property
    def page_tokens(self) -> int:
        return self._facts.layout.page_tokens if self._facts is not None else 1

    # A request -------------------------------------------------------------------------------------------------------

    @edge(None)
    def added(self, request: EngineRequest, facts: RequestSpec) -> None:
        """A new request: its look-up is submitted, unless it is the only request. Then the engine calls `matched` at
        once, and may need no look-up, which would take CPU time from the step that computes the request."""
        account = Account.of([(MissReason.DISABLED, request.num_tokens)])
        state = RequestState(request, facts, account, added_at=self._clock())
        self._states[request.request_id] = state
        if self._running or len(self._states) > 1 or not self._is_asked(state) or facts.hands_over:
            self._look_up(state)

    @edge((0, False))
    def matched(self, request_id: str, local_tokens: int) -> tuple[int | None, bool]:
        """The tokens promised behind the engine's own, and whether they are loaded beside its steps.

        None: ask again in the next step. local_tokens: of the engine's own cache, a page boundary.
        """
        state = self._states.get(request_id)
        if state is None:
            return 0, False
        if self._loads.asks(state, local_tokens):
            return None, False
        state.local_tokens = local_tokens
        tokens = self._promised_tokens(state, local_tokens)
        if tokens is None:
            return None, False
        promised = max(0, tokens - local_tokens)
        if not promised:
            return 0, False
        state.waits = self._waits(state, promised)  # decided once: a parked request waits for a report
        if not state.waits and self._loads.takes_no_more:
            return None, False
        return promised, not state.waits

    def allocated(self, request_id: str, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has room for a request. tokens: how many behind its own it counts on; 0 for none, and for the
        second call after a load beside its steps."""
        state = self._states.get(request_id)
        local = state.local_tokens if state is not None else 0
        for table, page in zip(tables, self._facts.table_tokens if self._facts is not None else (), strict=False):
            self._taken.update(table[local // page :])
        if state is None or self._loads.resumes(request_id):
            return
        lookup = state.lookup
        found = lookup.found() if lookup is not None else None
        if found is None and state.late_at:  # asked for when its first token is there
            self._is_offered(state, state.local_tokens // self.block_tokens)
        else:
            state.late_at = 0
            self._is_offered(state, found.blocks if found is not None else 0)
        is_first = not state.is_admitted
        state.taken_tokens = state.local_tokens + tokens
        if is_first:
            state.is_admitted = True
            account = state.account.behind(HitTier.ENGINE, state.local_tokens)
            # Tokens that the engine does not take are no hit; another connector beside this one may have them too.
            state.account = account.cut(state.local_tokens + tokens, MissReason.DISABLED)
            self._news.is_due()
        if tokens and self._facts is not None:
            self._order_load(state, self._facts, tables, state.local_tokens + tokens, is_first=is_first)
        elif lookup is None or found is not None or lookup.is_over:
            self._let_go(state)  # a later answer says which blocks need not be saved

    def begins_with(self, request_id: str, computed: int) -> None:
        """The request runs from now on, with this many tokens. If another connector has brought some of them, the
        request is not saved: that load's outcome would be reported too late."""
        state = self._states.get(request_id)
        if state is not None and computed > state.taken_tokens:
            state.facts = replace(state.facts, saves=False)
            self._is_offered(state, state.offered)

    @edge(None)
    def finished(self, request_id: str) -> dict[str, object] | None:
        """A request is over, or was given up. Returns the report for its user."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        self._running.discard(request_id)
        self._loads.ended(request_id)
        self._let_go(state)
        self._end_audit(state)
        told = {**state.told(), "block_tokens": self.block_tokens}
        if state.load is not None:
            state.load.account = state.account  # counted and reported when it is known how the load ended
        else:
            self._counts.update(counted(state.account))
            self._news.add(state)
        return told

    def parted_at(self, request_id: str) -> int:
        """Where the engine should keep a request's states, besides where it does: KV was found up to there, and states
        were not. 0 for nowhere."""
        state = self._states.get(request_id)
        return state.parted_at if state is not None else 0

    def hit_tiers(self, request_id: str, tokens: int) -> dict[HitTier, int]:
        state = self._states.get(request_id)
        return state.hit_tiers(tokens) if state is not None else {}

    # A step ----------------------------------------------------------------------------------------------------------

    def step(
        self,
        running: set[str],
        due: Sequence[Computed],
        grown: Iterable[int],
        work: StepWork,
        boundaries: Iterable[Boundary] = (),
    ) -> StepPlan:
        """The workers' orders for this step. running: all requests that it computes. due: those of them that complete a
        block. grown: new pages of requests that ran before. boundaries: at which recurrent states can be read."""
        orders, self._orders = self._orders, StepPlan()
        if running:
            self._step += 1
            orders.number = self._step
        taken, self._taken = self._taken, set()
        taken.update(grown)
        if taken:
            orders.cancelled_saves += self._plan.taken(taken)
        if not self._is_exact:
            for load in orders.loads:
                self._plan.decoded((page for run in load.tables for page in run.pages), load.number)
        self._offer_all(due, orders)
        for one in boundaries:
            with contained(self.broke):
                self._offer_state(one, orders)
        self._running = running
        self._idle_seconds = IDLE_WAIT_SECONDS
        if self._parked:
            self._parked.read()
        if self._failures:
            orders.failures_seen = dict(self._failures)
        if self._facts is not None and self._told != self._facts.number:
            self._told = self._facts.number
            orders.namespace = self._facts
        if running:
            self.choice.step_begins(self._step, work, self._clock(), any(load.waits for load in orders.loads))
        return orders

    @edge(None)
    def reported(self, reports: StepReports | None) -> None:
        """A step, not necessarily the last scheduled one, is over; these are the workers' reports."""
        now = self._clock()
        if now >= self._news.due_at:  # after a step no code is in a cache: each call that is not needed is felt
            self._news.add_running(self._states.values())
            self._tell_news(TELL_SECONDS)
        if self._announces:
            self.announced.step()
        if reports is None:
            return
        if reports.step:
            self.choice.step_ends(reports.step, now)
            while self._first_tokens and self._first_tokens[0][0] <= reports.step:
                _, added_at, held_out, prompt_tokens, found_tokens = self._first_tokens.pop(0)
                self.choice.saving.record(held_out, prompt_tokens, found_tokens, now - added_at)
        for loaded in reports.loads:
            self._loaded(loaded)
        for saved in reports.saves:
            self._saved_some(saved)
        self._failures.update(reports.failures)

    def take_invalid_pages(self) -> set[int]:
        """Since the last call: pages without KV after a failed load that a step waited for, and pages computed behind
        them. The engine must not use them as cached for any request."""
        return self._loads.take_invalid_pages()

    def take_counts(self) -> dict[str, Any]:
        """Since the last call, by the names of `ConnectorNumbers`, those of a table with its prefix; without zeros."""
        self._collect()
        counts: dict[str, Any] = {**self._counts, LOAD_SECONDS: self._load_seconds}
        self._counts, self._load_seconds = Counter(), []
        if "requests" in counts and (saving := self.choice.saving.estimate()) is not None:
            counts |= {f"{SAVING}mean": saving.mean_ms, f"{SAVING}standard_error": saving.standard_error_ms}
        return {name: count for name, count in counts.items() if count}

    def _tell_news(self, seconds: float) -> None:
        self._news.tell(self.opener.now(), self.choice, len(self._ranks), self._clock(), seconds)

    def _collect(self) -> None:
        self._counts.update({f"cost_{name}": count for name, count in self.choice.take_costs().items()})
        if self._audits is not None:
            self._counts.update({f"audited_{it}": blocks for it, blocks in self._audits.take_outcomes().items()})

    def announce(self, describe: Callable[[Any, int], Any]) -> None:
        """Announce blocks from now on. describe: as in `Announcements`."""
        self.announced, self._announces = Announcements(self._clock, describe, self.opener.now), True

    def close(self) -> None:
        for request_id in list(self._states):
            self.finished(request_id)
        if self._audits is not None:
            self._audits.close()
        self._news.close()
        self.opener.close(CLOSE_SECONDS)

    # A request's look-up ---------------------------------------------------------------------------------------------

    def _is_asked(self, state: RequestState) -> bool:
        is_read = state.facts.refused is None and state.facts.reads and self._refused is None
        return is_read and self.opener.now() is not None

    def _look_up(self, state: RequestState) -> None:
        request, facts, tokens = state.request, state.facts, state.request.num_tokens
        self._let_go(state)
        state.chosen_for, state.late_at = -1, 0
        namespace = self.opener.now() if self._refused is None else None
        if facts.refused is not None:
            reason, detail = facts.refused, facts.detail
        elif self._refused is not None:
            reason, detail = self._refused
        elif namespace is None:
            reason, detail = self.opener.why_not()
        else:
            reason, detail = MissReason.DISABLED, "the request is not to read what is cached"
        if not state.is_admitted:
            is_asked = self._refused is None and facts.refused is None  # a tail is missed in any case
            state.account = Account.missed(reason, tokens, self.block_tokens if is_asked else 0)
            state.detail = detail
        if namespace is None or facts.refused is not None or self._facts is None:
            return
        known = state.prompt if state.number == self._facts.number else Prompt(0, [])
        state.prompt = namespace.hashed(
            request.token_ids(len(known.keys) * namespace.block_tokens, tokens), facts.extra_keys, known
        )
        state.number = self._facts.number
        if self.settings.save is not SavePolicy.NONE:
            state.seal(namespace, TICKET_SECONDS)
        if facts.reads:
            state.lookup = PrefixLookup(
                namespace,
                state.prompt,
                request.request_id,
                self._clock,
                self.settings,
                wait=self._wait_of(state, namespace) if self._facts.has_kv else None,
                states=self.opener.states,
            )
            state.lookup.trace = facts.trace

    def _ask_late(self, state: RequestState, computed: int) -> None:
        """Look up a request whose admission did not wait for that; called in each step until the answer is there."""
        if state.lookup is None:
            self._look_up(state)
        late = state.lookup
        match = late.found() if late is not None else None
        if late is not None and match is None and not late.is_over:
            state.late_at = computed + 1
            return
        state.late_at = 0
        self._let_go(state)
        state.offered = min(state.offered, match.blocks if match is not None else 0)

    def _let_go(self, state: RequestState) -> None:
        if state.lookup is not None:
            state.lookup.give_back()
        state.lookup = None
        if state.load is None:
            self.choice.dropped(state.request.request_id)

    # What it is promised ---------------------------------------------------------------------------------------------

    def _promised_tokens(self, state: RequestState, local_tokens: int) -> int | None:
        """The token up to which a request's KV is promised; None: ask again in the next step. local_tokens: of the
        engine's own cache."""
        if state.lookup is not None and state.is_admitted and (state.lookup.is_over or state.late_at):
            self._let_go(state)  # it was preempted, and comes again with its generated tokens
        if self._gains_nothing(state, local_tokens):
            return 0
        if state.lookup is None:
            self._look_up(state)
        lookup = state.lookup
        if lookup is None:
            return 0
        tokens = self._promised(state, lookup, local_tokens)
        while tokens is None and not self.is_busy and self._idle_seconds > 0:
            nap, began = AWAIT_PAUSE_SECONDS if lookup.is_waiting else IDLE_PAUSE_SECONDS, self._clock()
            self._pause(nap)
            self._parked.read()
            tokens = self._promised(state, lookup, local_tokens)
            self._idle_seconds -= max(self._clock() - began, nap)
        if tokens is not None and not state.is_admitted:
            state.account, state.detail = lookup.account, lookup.detail
        return tokens

    def _gains_nothing(self, state: RequestState, local_tokens: int) -> bool:
        """Whether no whole block behind the engine's own tokens can be loaded and no answer is there yet: the request
        then does not wait for an answer that only the account needs."""
        tokens, block, lookup = state.request.num_tokens, self.block_tokens, state.lookup
        if not block or (tokens - 1) // block * block > local_tokens:
            return False
        if state.facts.hands_over:
            return False  # evicted blocks are saved again before it is over
        if lookup is None and not self._is_asked(state):
            return False
        if lookup is not None and (lookup.is_over or lookup.found() is not None):
            return False
        state.late_at = tokens + (not state.facts.is_kept)  # its stored blocks are renewed with its last step
        if self._facts is not None and state.number != self._facts.number:
            state.number, state.prompt = self._facts.number, Prompt(0, [])  # hashed when a block is to be saved
        if not state.is_admitted:
            state.account, state.detail = account_unasked(tokens, block), ""
        return True

    def _promised(self, state: RequestState, lookup: PrefixLookup, local_tokens: int) -> int | None:
        found = lookup.found()
        if found is None:
            return 0 if lookup.is_over else None
        whole = (state.prompt.tokens - 1) // self.block_tokens
        match = lookup.usable(found, whole)
        if state.chosen_for != local_tokens and self._audits is not None:
            state.chosen_for = local_tokens
            state.ends.update(at for at, is_end in enumerate(lookup.ends, 1) if is_end)
            if self._facts is not None and self._facts.has_kv and min(found.blocks, whole) > match.blocks:
                state.parted_at = min(found.blocks, whole) * self.block_tokens
            block, page = self.block_tokens, self.page_tokens
            is_hit = min(match.tokens, state.prompt.tokens - 1) // block * block > local_tokens
            takes_all = self.choice.holdout.takes_all
            # Also after a preemption if all hits are computed: nothing is loaded uncompared.
            if is_hit and state.held_out is None and (takes_all or not state.is_admitted):
                states, now = self.opener.states, self._clock()
                state.held_out = self._audits.begins(state, match, lookup.namespace, states, now)
                if state.held_out and states is not None:
                    state.parted_at = match.tokens  # to be compared there
            # If all hits are computed, chance has not chosen which: the saving cannot be learned from them.
            state.found_tokens = match.tokens if is_hit and not takes_all else 0
            cap = (state.prompt.tokens - 1) // page * page
            name, is_busy, now = state.request.request_id, self.is_busy, self._clock()
            state.stop_token, state.stop_reason = self.choice.stop_token(
                name, match, local_tokens, cap, block, is_busy, now
            )
        if state.held_out:
            if self._audits is not None and not self._audits.is_ready(state):
                return None  # a request of one token would be over before its block could be compared
            lookup.detail = HELD_OUT
            return lookup.matched(local_tokens, local_tokens, MissReason.AUDIT)
        return lookup.matched(local_tokens, state.stop_token, state.stop_reason)

    def _wait_of(self, state: RequestState, namespace: NamespaceHandle) -> BlockWait | None:
        choice, facts, block = self.choice, state.facts, namespace.block_tokens
        if state.is_admitted:
            return None
        policy = None
        if facts.ticket or facts.awaits:
            least_seconds = self.settings.lease_deadline_ms / 1000
            policy = WaitPolicy(state.prompt, block, choice.costs.prefill.more_seconds, self._clock, least_seconds)
        fetch = RequestFetch(state, block, choice, self.announced, self._clock, lambda: self.is_busy)
        return BlockWait(namespace, state.prompt, facts.ticket, WaitPlan(policy, fetch), self._parked)

    # Loads -----------------------------------------------------------------------------------------------------------

    @property
    def _is_told_by_page(self) -> bool:
        if self._facts is None or len(self._facts.table_tokens) > 1:
            return False
        return all(group.attention is Attention.FULL for group in self._facts.groups)

    def _waits(self, state: RequestState, promised: int) -> bool:
        mode = self.settings.load
        if not self._is_told_by_page:
            return False  # such a step could not be taken back
        if mode is not LoadMode.AUTO:
            return mode is not LoadMode.ASYNC
        is_alone = not (self._running - {state.request.request_id} or self._loads)
        return is_alone or self.choice.load_ms(promised, self._clock()) < SYNCHRONOUS_MS

    def _order_load(
        self, state: RequestState, facts: NamespaceSpec, tables: Sequence[Sequence[int]], stop: int, *, is_first: bool
    ) -> None:
        waits, name, first, lookup = state.waits, state.request.request_id, state.local_tokens, state.lookup
        # Without a lease the order fails at the worker: an engine that counts on these tokens must learn that.
        leases = lookup.take() if lookup is not None else []
        tickets = [lease.ticket() for lease in leases] or [b""]
        is_layerwise, here = self.settings.load is LoadMode.LAYERWISE, None
        if lookup is not None and leases and waits and not is_layerwise and len(self._ranks) == 1:
            here = LeaseHere(leases[0], lookup.namespace)
        block, of_kv = self.block_tokens, page_runs(tables, first, stop, facts.kv_groups)
        of_state = page_runs(tables, first, stop, facts.state_groups)
        behind = LoadOrder(0, name, facts.number, tickets[-1], 0, block, of_state, waits) if of_state else None
        order = LoadOrder(
            next(self._numbers), name, facts.number, tickets[0], first, stop, of_kv, waits, is_layerwise, here, behind
        )
        state.load = LoadUnderWay(state, order, leases, set(self._ranks), stop, is_first=is_first)
        if waits:
            state.load.pages = tuple(tables[0][first // self.page_tokens :])
        self._loads.add(state.load)
        self._orders.loads.append(order)
        self._is_offered(state, max(state.offered, stop // block))
        self._counts["loads"] += 1
        self.choice.begins(name, self._clock())

    def _loaded(self, report: LoadReport) -> None:
        load = self._loads.reported(report)
        if load is None:
            return
        for lease in load.leases:
            lease.release()
        order, tokens, is_whole = load.order, load.end, load.is_whole
        self._load_seconds += [load.seconds] if is_whole else []
        self._counts["failed_loads"] += not is_whole
        load.state.facts.trace.loaded(load.seconds, tokens - order.first_token)
        seconds = load.seconds if order.waits else None
        self.choice.ended(order.request, seconds, tokens - order.first_token, self._clock())
        if not is_whole:  # the engine computes these
            self._plan.computed(order, tokens)
        is_miss = load.is_first and not is_whole
        state = load.state
        if state.load is not load:
            return
        state.load = None
        state.load_ms += 1000 * load.seconds
        if load.account is not None:  # its request is over
            state.account = load.account.cut(tokens, load.why) if is_miss else load.account
            self._counts.update(counted(state.account))
            self._news.add(state)
            return
        self._news.is_due()
        if not order.waits:
            state.local_tokens = tokens  # the engine has these tokens, and asks for room for the rest
            if not is_whole and (not tokens or not self._is_told_by_page):
                self._loads.turn_away(order.request)
        if not is_whole:
            state.facts = replace(state.facts, reads=False)  # otherwise this could repeat for ever
            state.account = state.account.cut(tokens, load.why) if is_miss else state.account
            self._is_offered(state, min(state.offered, tokens // self.block_tokens))

    # Saves -----------------------------------------------------------------------------------------------------------

    def _offer_all(self, due: Sequence[Computed], orders: StepPlan) -> None:
        for one in due:
            state = self._states.get(one.request_id)
            if state is None:
                continue
            state.request.due = NEVER  # until it is known what comes next, and for good after a fault
            with contained(self.broke):
                self._offer(state, one, orders)

    def _offer(self, state: RequestState, one: Computed, orders: StepPlan) -> None:
        if self._audits is not None:
            self._audits.computed(state, one, orders)
        if state.found_tokens and one.stop >= state.request.num_prompt_tokens:
            asked, found = state.account.asked, state.found_tokens
            self._first_tokens.append((self._step, state.added_at, bool(state.held_out), asked, found))
            state.found_tokens = 0
        namespace = self._saves_into(state)
        if namespace is None or self._facts is None or not self._facts.has_kv:
            state.request.due = NEVER
            return
        block = namespace.block_tokens
        stop = self._stop_of(state, one.stop)
        if state.late_at and one.stop >= state.late_at:
            self._ask_late(state, one.stop)
        stop_block = stop // block
        if stop_block <= state.offered:
            if held := state.take_renewal(one.stop):
                self._order_save(state, self._runs(one.tables(), held, held), held, held, orders)
            if stop < one.stop and not state.late_at:
                state.request.due = NEVER  # none of it will be offered any more
            else:
                self._is_offered(state, state.offered)
            return
        self._hash_to(state, namespace, stop_block)
        tables = one.tables()
        for first_block, last_block in self._plan.exact_runs(tables, state.offered, stop_block):
            self._order_save(state, self._runs(tables, first_block, last_block), first_block, last_block, orders)
        self._is_offered(state, stop_block)

    def _runs(self, tables: Sequence[Sequence[int]], first_block: int, stop_block: int) -> tuple[PageRun, ...]:
        assert self._facts is not None
        block = self.block_tokens
        return page_runs(tables, first_block * block, stop_block * block, self._facts.kv_groups)

    def _saves_into(self, state: RequestState) -> NamespaceHandle | None:
        """The namespace for what this request computes now; None if that is not to be saved."""
        is_other = self._facts is None or state.number != self._facts.number or self._refused is not None
        facts = state.facts
        if is_other or facts.refused is not None or not facts.saves or self.settings.save is SavePolicy.NONE:
            return None
        return self.opener.now()

    def _stop_of(self, state: RequestState, stop: int) -> int:
        """Up to where KV that is complete may be saved."""
        if self.settings.save is SavePolicy.PROMPT:
            return min(stop, state.request.num_prompt_tokens)
        return min(stop, state.request.num_tokens)

    def _hash_to(self, state: RequestState, namespace: NamespaceHandle, blocks: int) -> None:
        known = len(state.prompt.keys)
        if blocks > known:
            token_ids = state.request.token_ids(known * namespace.block_tokens, blocks * namespace.block_tokens)
            state.prompt = namespace.hashed(token_ids, state.facts.extra_keys, state.prompt)

    def _offer_state(self, one: Boundary, orders: StepPlan) -> None:
        """Save the states behind a whole block, unless they are stored or not worth their room."""
        state = self._states.get(one.request_id)
        namespace = self._saves_into(state) if state is not None else None
        if state is None or namespace is None or self._facts is None or self._audits is None:
            return
        blocks, rest = divmod(one.tokens, namespace.block_tokens)
        groups = self._facts.state_groups
        if rest or one.tokens > self._stop_of(state, one.tokens) or not all(g.table in one.pages for g in groups):
            return
        self._hash_to(state, namespace, blocks)
        tables = tuple(PageRun(0, [one.pages[group.table]]) for group in groups)
        self._audits.passed(state, blocks, tables, orders)
        kept = self._kept_states
        if blocks in state.ends or kept is None:
            return
        prompt, parted_at = state.request.num_prompt_tokens, state.parted_at
        if kept.wanted(one.tokens - 1, one.tokens, prompt, parted_at=parted_at, end=one.tokens):
            state.ends.add(blocks)
            self._order_save(state, tables, blocks - 1, blocks, orders, is_state=True)

    def _order_save(
        self,
        state: RequestState,
        tables: Sequence[PageRun],
        first_block: int,
        stop_block: int,
        orders: StepPlan,
        *,
        is_state: bool = False,
    ) -> None:
        assert self._facts is not None
        facts, keys = state.facts, state.prompt.keys
        order = SaveOrder(
            next(self._numbers),
            state.request.request_id,
            self._facts.number,
            b"".join(keys[first_block if is_state else 0 : stop_block]),
            0 if is_state else first_block * self.block_tokens,
            tuple(tables),
            facts.kept_seconds(self.settings.ttl, TICKET_SECONDS),
            facts.priority if facts.priority is not None else self.settings.priority,
            facts.hands_over,
            is_state,
        )
        self._plan.add(order, first_block, stop_block)
        if not is_state:
            self.announced.expect(state.request, keys[first_block:stop_block], first_block)
        self._saving[order.number] = state.request
        orders.saves.append(order)

    def _saved_some(self, report: SaveReport) -> None:
        offer = self._plan.reported(report)
        if offer is None:
            return
        if offer.order.ticket:
            self._audited(report.number, offer.results or ())
            return
        request = self._saving.pop(report.number)
        self._counts["saved_blocks"] += offer.stored
        self._counts["dropped_saves"] += offer.dropped
        if not offer.order.is_state:
            self.announced.saved(offer.order.keys, offer.first_block, offer.held)
        state = self._states.get(offer.order.request)
        if state is None or state.request is not request:
            return
        state.saved_blocks += offer.stored
        if offer.reason is not None:
            state.put_reasons[offer.reason] += 1
        if offer.order.is_state:
            return  # its pages may be gone: no second attempt
        if offer.held < offer.stop_block:
            state.offered = min(state.offered, offer.held)  # offered again when the next block is due

    def _is_offered(self, state: RequestState, blocks: int) -> None:
        state.offered = blocks
        saves = state.facts.refused is None and state.facts.saves and self.settings.save is not SavePolicy.NONE
        saves &= self._facts is None or self._facts.has_kv
        due = (blocks + 1) * self.block_tokens if saves and self.block_tokens else NEVER
        if state.late_at and due != NEVER:
            due = min(due, state.late_at)
        if state.found_tokens or state.audit is not None or (blocks and state.is_to_renew):
            due = min(due, state.request.num_prompt_tokens)
        state.request.due = due

    # Audits ----------------------------------------------------------------------------------------------------------

    def _audited(self, number: int, results: tuple[AuditResult, ...]) -> None:
        audits = self._audits
        if audits is not None and audits.reported(number, results) is AuditVerdict.DRIFTED:
            self.refuse(MissReason.AUDIT, f"what is stored in namespace {audits.name} is not what this engine computes")

    def _end_audit(self, state: RequestState) -> None:
        if self._audits is not None:
            self._audits.ended(state)
