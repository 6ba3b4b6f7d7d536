"""One request's look-up and lease, for a scheduler that must not wait.

    ASKED  the look-up is submitted      > WAITING  for blocks on their way (`BlockWait`) > ASKED again
                                         > FOUND  the stored length    > LEASING  the lease is submitted
    > HELD  pinned and verified in DRAM: these tokens are promised    > OVER  given to a load, released, or a miss

The engine calls `matched` in every step until it has an answer; at its deadline there is a miss. Any fault of the store
becomes a miss here. Must never import an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from logging import getLogger
from typing import Any

from engine_adapter.handoff import OPEN_MS, BlockWait
from engine_adapter.paged.settings import ConnectorSettings
from kvstore.block.account import Account, MissReason, reason_of
from kvstore.block.identity import Prompt
from kvstore.client.edge import contained
from kvstore.client.handle import Lease, Match, NamespaceHandle
from kvstore.client.pending import PendingReply
from kvstore.client.spans import NO_TRACE, RequestTrace
from kvstore.client.states import PrefixStates
from kvstore.protocol.told import told_name

_log = getLogger(__name__)

HELD_SECONDS = 20.0
"""If the engine has no room for this long, its lease is released, well before it expires, and taken anew."""


def account_unasked(tokens: int, block_tokens: int) -> Account:
    """The account of a prompt that has no loadable whole block behind the engine's own part."""
    tail, reason = tokens % block_tokens, MissReason.PARTIAL_BLOCK
    if not tail:
        tail, reason = 1, MissReason.LAST_TOKEN
    return Account.of([(MissReason.GRID, tokens - tail), (reason, tail)])


class PrefixLookup:
    """A prompt's look-up and lease. Not thread-safe."""

    def __init__(
        self,
        namespace: NamespaceHandle,
        prompt: Prompt,
        request: str,
        clock: Callable[[], float],
        settings: ConnectorSettings,
        *,
        wait: BlockWait | None = None,
        states: PrefixStates | None = None,
    ) -> None:
        """Submits the look-up. clock: monotonic seconds. settings: deadlines. wait: for blocks that are elsewhere, or
        that another engine stores. states: of a model that has recurrent ones, of which a load needs the one behind its
        last token; their namespace is `namespace` where it has no KV."""
        self.namespace = namespace
        self.prompt = prompt
        self.request = request
        self.account = Account.of([(MissReason.DISABLED, prompt.tokens)])
        self.detail = ""
        self.leases: list[Lease] = []
        """Of the KV and of the state, as far as the model has them."""
        self.ends: list[bool] = []
        """Of each full block of the prompt: whether the state behind it is stored."""
        self._states, self._has_kv = states, states is None or states.handle is not namespace
        self._clock = clock
        self._match_seconds, self._lease_ms = settings.match_deadline_ms / 1000, settings.lease_deadline_ms
        self._begun_at = clock()
        self.trace: RequestTrace = NO_TRACE
        """Notes when the look-up and the lease were answered."""
        self._asked_at = 0.0
        self._leased_at = 0.0
        self._match: Match | None = None
        self._seen: Match | None = None  # by a look-up of a wait that goes on
        self.is_over = False
        """It promises nothing any more."""
        self._wait = wait
        self._pending: list[PendingReply[Any]] = []
        """The match and the states' ends, or their leases."""
        self._leased_blocks = 0
        with contained(self._fail):
            self._look()

    @property
    def is_waiting(self) -> bool:
        return self._wait is not None and self._wait.is_parked

    def found(self) -> Match | None:
        """The look-up's answer; None while it is not there, or if there will be none."""
        if self._match is None and not self.is_over:
            with contained(self._fail):
                self._poll_match()
        return self._match

    def matched(self, first_token: int, stop_token: int, reason: MissReason) -> int | None:
        """The number of leading tokens promised, up to `stop_token`; None: ask again.

        first_token: the engine has those before it. stop_token: tokens found behind it are misses for this reason,
        except the prompt's last token. The promise stays until `take` or `give_back`.
        """
        with contained(self._fail):
            return self._matched(first_token, stop_token, reason)
        return 0

    def usable(self, match: Match, last_block: int) -> Match:
        """What can be loaded of a match up to that block: all of it, or up to the last state."""
        return self._states.cut(match, self.ends, last_block) if self._states is not None else match

    def take(self) -> list[Lease]:
        """The leases, for a load; the caller releases them."""
        leases, self.leases = self.leases, []
        self.is_over = True
        return leases

    def give_back(self) -> None:
        """Release what is held. Safe to call again."""
        self.is_over = True
        self._cancel()
        if self._wait is not None:
            self._wait.end()
        self._release()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Submit a look-up. Those of a wait do not count as the request's: only the one that ends the wait does, or one
        that finds all of the prompt."""
        wait = self._wait
        self._asked_at, self._counts_short = 0.0, wait is None or not wait.is_open
        self._counts = self._counts_short or self.namespace.has_courier
        if wait is not None and (wait.plan.policy is not None or self._seen is not None):
            self._match_seconds = max(self._match_seconds, OPEN_MS / 1000)
        if self._has_kv:
            self._pending.append(self._submitted(self._counts, self._counts_short))
        if self._states is not None:
            self._pending.append(self._states.submit(self.prompt, 1000 * self._match_seconds))

    def _submitted(self, counts: bool, counts_short: bool) -> PendingReply[Match]:
        return self.namespace.submit_match(
            self.prompt,
            deadline_ms=1000 * self._match_seconds,
            counts=counts,
            request=told_name(self.request),
            counts_short=counts_short,
        )

    def _poll_match(self) -> None:
        wait = self._wait
        if wait is not None and not wait.may_look():
            return
        match = self._seen if wait is not None and wait.is_over else None
        if match is None:
            match = self._polled()
            if match is None:
                return
            if wait is not None and wait.goes_on(match.blocks):
                self._seen = match
                return
        if self._has_kv and not (self._counts and (self._counts_short or match.blocks == len(match.keys))):
            self._submitted(counts=True, counts_short=True)  # for the store's own account; the answer is dropped
        if wait is not None:
            match = replace(match, account=wait.plan.account(match.account), detail=wait.plan.detail or match.detail)
        self._match, self.account, self.detail = match, match.account, match.detail
        self.trace.looked_up(self._clock() - self._begun_at, match.account)
        if not match.tokens:
            self.is_over = True

    def _polled(self) -> Match | None:
        if not self._pending:
            self._look()
        now = self._clock()
        self._asked_at = self._asked_at or now
        answers = [pending.poll() for pending in self._pending]
        if None in answers and now - self._asked_at < self._match_seconds:
            return None
        self._cancel()
        if None in answers:
            self.detail = f"no answer within {1000 * self._match_seconds:g} ms"
            self._miss(MissReason.DEADLINE)
            self.trace.looked_up(now - self._begun_at, self.account)
            return None
        if self._states is not None:
            self.ends = answers[-1] or []
        match: Match | None = answers[0] if self._has_kv or self._states is None else self._states.whole(self.prompt)
        return match

    def _matched(self, first_token: int, stop_token: int, reason: MissReason) -> int | None:
        match = self.found()
        if self.is_over:
            return 0
        if match is None:
            return None
        block = self.namespace.block_tokens
        blocks = min(match.tokens, stop_token) // block
        account = match.account.cut(match.account.asked - 1, MissReason.LAST_TOKEN).cut(blocks * block, reason)
        wanted = self.usable(replace(match.cut(blocks, account), keys=match.keys[:blocks]), blocks)
        if wanted.tokens <= first_token:
            self.account = wanted.account
            self.give_back()
            return 0
        while not self._is_good(first_token, wanted.blocks):
            self._release()
            if not self._pending:
                self._begun_at = self._clock()
                self._pending = self._leasing(wanted, first_token)
            leases = [pending.poll() for pending in self._pending]
            if None in leases:
                return None
            # They may have been submitted when the engine had more tokens of its own than now.
            self._pending, self._leased_at = [], self._clock()
            self.leases = [lease for lease in leases if lease is not None]
            self.trace.leased(self._leased_at - self._begun_at, self.leases[0].account)
            for one in self.leases:
                if one.reason is not None:
                    self.detail = one.detail or self.detail
        return self._promised(wanted, reason)

    def _leasing(self, wanted: Match, first_token: int) -> list[PendingReply[Any]]:
        pending: list[PendingReply[Any]] = []
        self._leased_blocks = wanted.blocks
        if self._has_kv:
            pending.append(self.namespace.submit_lease(wanted, first_token, self._lease_ms, self.request))
        if self._states is not None:
            state = self._states.match_of(wanted.keys[wanted.blocks - 1])
            pending.append(self._states.handle.submit_lease(state, 0, self._lease_ms, self.request))
        return pending

    def _promised(self, wanted: Match, reason: MissReason) -> int:
        """What the leases hold of what is wanted: where there are states, all of it or nothing."""
        first, tokens = self.leases[0], wanted.tokens
        if self._has_kv:
            # It may have been taken when more tokens were wanted than now.
            self.account = first.account.cut(tokens, reason)
            tokens = min(first.tokens, tokens)
        else:
            self.account = wanted.account
        if self._states is not None and (tokens < wanted.tokens or not self.leases[-1].tokens):
            why = next((one.reason for one in reversed(self.leases) if one.reason is not None), None)
            self.account, tokens = self.account.cut(0, why or MissReason.NO_STATE), 0
        if tokens <= first.first_token:
            self.give_back()
            return 0
        return tokens

    def _is_good(self, first_token: int, blocks: int) -> bool:
        if not self.leases or any(lease.released for lease in self.leases):
            return False
        if self._states is not None and self._leased_blocks != blocks:
            return False  # the state is of another place
        return self.leases[0].first_token <= first_token and self._clock() - self._leased_at <= HELD_SECONDS

    def _cancel(self) -> None:
        for pending in self._pending:
            pending.cancel()
        self._pending = []

    def _release(self) -> None:
        leases, self.leases = self.leases, []
        for lease in leases:
            lease.release()

    def _miss(self, reason: MissReason) -> None:
        self.account = Account.missed(reason, self.prompt.tokens, self.namespace.block_tokens)
        self.is_over = True

    def _fail(self, error: Exception) -> None:
        reason = reason_of(error)
        if reason is not MissReason.DISABLED:
            _log.warning("the store failed a look-up: %s: %s", type(error).__name__, str(error).partition("\n")[0])
        self._miss(reason)
