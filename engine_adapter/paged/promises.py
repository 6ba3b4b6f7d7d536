"""What requests are promised: their look-ups, and up to which token what these find is loaded.

    looked up > found > how much of it is loaded is chosen, or that it is audited > leased > promised
              > given to a load, or released

A request for which no block can be loaded does not wait for its look-up: it is looked up late, once its computed blocks
could be saved. Nothing here waits, except a third of a millisecond in a step that has nothing else to do. Must never
import an engine. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_adapter.cost.load_choice import LoadChoice
from engine_adapter.handoff.block_wait import BlockWait, ParkedWaits
from engine_adapter.paged.announcements import Announcements
from engine_adapter.paged.audit_plan import AuditPlan
from engine_adapter.paged.lookup import PrefixLookup, account_unasked
from engine_adapter.paged.namespace_opener import NamespaceOpener
from engine_adapter.paged.requests import TICKET_SECONDS, RequestState, wait_of
from engine_adapter.paged.settings import ConnectorSettings, SavePolicy
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.block.account import Account, MissReason
from kvstore.block.identity import Prompt
from kvstore.client.handle import NamespaceHandle

IDLE_WAIT_SECONDS = 0.0003
"""How long each step of an engine that runs nothing waits for answers: otherwise an answer costs it a whole step."""
IDLE_PAUSE_SECONDS = 0.00002
AWAIT_PAUSE_SECONDS = 0.001
"""How long such a step sleeps, once, if all it could do is wait for blocks that another engine stores."""
HELD_OUT = "computed all the same, as the first hits of an engine and a share of all others are (audit)"


class Promises:
    def __init__(
        self,
        settings: ConnectorSettings,
        namespace: NamespaceOpener,
        clock: Callable[[], float],
        pause: Callable[[float], None],
        is_busy: Callable[[], bool],
        announced: Callable[[], Announcements[Any]],
    ) -> None:
        """clock: monotonic seconds. pause: sleeps. is_busy: whether the engine runs requests. announced: to routers;
        blocks that are fetched for a request are announced, too."""
        self._settings = settings
        self._namespace = namespace
        self._clock, self._pause = clock, pause
        self._is_busy, self._announced = is_busy, announced
        self._idle_seconds = IDLE_WAIT_SECONDS
        self._parked = ParkedWaits()
        self._facts: NamespaceSpec | None = None
        self._choice: LoadChoice | None = None
        self._audits: AuditPlan | None = None
        self._block_tokens, self._page_tokens = 0, 1
        self.refused: tuple[MissReason, str] | None = (MissReason.DISABLED, "the workers have said nothing yet")
        """Why nothing is looked up: a reason, and words; None if requests are."""

    def use(self, facts: NamespaceSpec, choice: LoadChoice, audits: AuditPlan) -> None:
        """From now on requests are looked up in this namespace."""
        self._facts, self._choice, self._audits = facts, choice, audits
        self._block_tokens, self._page_tokens = facts.layout.block_tokens, facts.layout.page_tokens

    def step_begins(self) -> None:
        """A step is scheduled: the next one may wait again. Reads what has been answered."""
        self._idle_seconds = IDLE_WAIT_SECONDS
        if self._parked.waiting:
            self._parked.read()

    # A request's look-up ---------------------------------------------------------------------------------------------

    def is_asked(self, state: RequestState) -> bool:
        is_read = state.facts.refused is None and state.facts.reads and self.refused is None
        return is_read and self._namespace.now() is not None

    def look_up(self, state: RequestState) -> None:
        """Submit a request's look-up, or note why it is a miss."""
        request, facts, tokens = state.request, state.facts, state.request.num_tokens
        self.let_go(state)
        state.chosen_for, state.late_at = -1, 0
        namespace = self._namespace.now() if self.refused is None else None
        if facts.refused is not None:
            reason, detail = facts.refused, facts.detail
        elif self.refused is not None:
            reason, detail = self.refused
        elif namespace is None:
            reason, detail = self._namespace.why_not()
        else:
            reason, detail = MissReason.DISABLED, "the request is not to read what is cached"
        if not state.is_admitted:
            is_asked = self.refused is None and facts.refused is None  # a tail is missed in any case
            state.account = Account.missed(reason, tokens, self._block_tokens if is_asked else 0)
            state.detail = detail
        if namespace is None or facts.refused is not None or self._facts is None:
            return
        known = state.prompt if state.number == self._facts.number else Prompt(0, [])
        state.prompt = namespace.hashed(
            request.token_ids(len(known.keys) * namespace.block_tokens, tokens), facts.extra_keys, known
        )
        state.number = self._facts.number
        if self._settings.save is not SavePolicy.NONE:
            state.seal(namespace, TICKET_SECONDS)
        if facts.reads:
            state.lookup = PrefixLookup(
                namespace,
                state.prompt,
                request.request_id,
                self._clock,
                self._settings,
                wait=self._wait_of(state, namespace),
                trace=facts.trace,
            )

    def ask_late(self, state: RequestState, computed: int) -> None:
        """Look up a request whose admission did not wait for that; called in each step until the answer is there."""
        if state.late_lookup is None:
            self.look_up(state)
            state.late_lookup, state.lookup = state.lookup, None
        late = state.late_lookup
        match = late.found() if late is not None else None
        if late is not None and match is None and not late.is_over:
            state.late_at = computed + 1
            return
        state.late_at, state.late_lookup = 0, None
        if late is not None:
            late.give_back()
        state.offered = min(state.offered, match.blocks if match is not None else 0)

    def let_go(self, state: RequestState) -> None:
        """Release what its look-ups hold. Safe to call again."""
        for lookup in (state.lookup, state.late_lookup):
            if lookup is not None:
                lookup.give_back()
        state.lookup = state.late_lookup = None
        if self._choice is not None and state.load is None:
            self._choice.dropped(state.request.request_id)

    # What it is promised ---------------------------------------------------------------------------------------------

    def tokens(self, state: RequestState, local_tokens: int) -> int | None:
        """The token up to which a request's KV is promised; None: ask again in the next step. local_tokens: of the
        engine's own cache."""
        if state.lookup is not None and state.is_admitted and state.lookup.is_over:
            self.let_go(state)  # it was preempted, and comes again with its generated tokens
        if self._gains_nothing(state, local_tokens):
            return 0
        if state.lookup is None:
            self.look_up(state)
        lookup = state.lookup
        if lookup is None:
            return 0
        tokens = self._promised(state, lookup, local_tokens)
        while tokens is None and not self._is_busy() and self._idle_seconds > 0:
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
        tokens, block, lookup = state.request.num_tokens, self._block_tokens, state.lookup
        if not block or (tokens - 1) // block * block > local_tokens:
            return False
        if state.facts.hands_over:
            return False  # evicted blocks are saved again before it is over
        if lookup is None and not self.is_asked(state):
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
        match = lookup.found()
        if match is None:
            return 0 if lookup.is_over else None
        if state.chosen_for != local_tokens and self._choice is not None and self._audits is not None:
            state.chosen_for = local_tokens
            block, page = self._block_tokens, self._page_tokens
            is_hit = min(match.tokens, state.prompt.tokens - 1) // block * block > local_tokens
            takes_all = self._choice.holdout.takes_all
            # Also after a preemption if all hits are computed: nothing is loaded uncompared.
            if is_hit and state.held_out is None and (takes_all or not state.is_admitted):
                state.held_out = self._audits.begins(state, match, lookup.namespace, self._clock())
            # If all hits are computed, chance has not chosen which: the saving cannot be learned from them.
            state.found_tokens = match.tokens if is_hit and not takes_all else 0
            cap = (state.prompt.tokens - 1) // page * page
            name, is_busy, now = state.request.request_id, self._is_busy(), self._clock()
            state.stop_token, state.stop_reason = self._choice.stop_token(
                name, match, local_tokens, cap, block, is_busy, now
            )
        if state.held_out:
            if self._audits is not None and not self._audits.is_ready(state):
                return None  # a request of one token would be over before its block could be compared
            lookup.detail = HELD_OUT
            return lookup.matched(local_tokens, local_tokens, MissReason.AUDIT)
        return lookup.matched(local_tokens, state.stop_token, state.stop_reason)

    def _wait_of(self, state: RequestState, namespace: NamespaceHandle) -> BlockWait | None:
        choice, least = self._choice, self._settings.lease_deadline_ms / 1000
        if state.is_admitted or choice is None:
            return None
        return wait_of(state, namespace, choice, self._announced(), self._parked, self._clock, self._is_busy, least)
