"""What one request waits for before its load is decided: blocks that are fetched from elsewhere, or stored just now.

Ties the order of things (`handoff`) to what this engine has learned (`LoadChoice`), and tells routers of what is
fetched. Must never import an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_adapter.cost.fetches import FetchDecision
from engine_adapter.handoff.block_wait import BlockWait, ParkedWaits, WaitPlan, WaitPolicy
from engine_adapter.handoff.fetch import FetchPolicy
from engine_adapter.paged.announcements import Announcements
from engine_adapter.paged.load_choice import LoadChoice
from engine_adapter.paged.requests import RequestState
from kvstore.client.handle import NamespaceHandle
from kvstore.protocol import messages as m


class RequestFetch:
    """`FetchChoice` of one request. One thread."""

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
        self._state, self._block_tokens, self._choice, self._announced = state, block_tokens, choice, announced
        self._clock, self._is_busy = clock, is_busy
        self._decision: FetchDecision | None = None
        self._began_at = 0.0
        self._first = self._stop = 0  # the blocks that are expected

    def asks(self, blocks: int) -> bool:
        """A request that is admitted waits for nothing, and its last token is computed."""
        local = self._state.local_tokens // self._block_tokens
        asks = not self._state.is_admitted and self._usable > max(blocks, local)
        self._choice.costs.counts.locates += asks
        return asks

    def choose(self, located: m.Located, blocks: int) -> tuple[int, float]:
        """What is fetched is told to routers when it is here, as what is stored."""
        assert located.tier is not None
        block, state = self._block_tokens, self._state
        self._decision = decision = self._choice.fetches.choose(
            located.tier,
            blocks * block,
            state.local_tokens,
            min(located.blocks, self._usable) * block,
            state.prompt.tokens,
            block,
            # Said of all that was located; less of it is fetched in less.
            located.milliseconds * (min(located.blocks, self._usable) - blocks) / (located.blocks - blocks),
            self._is_busy(),
            self._clock(),
        )
        self._began_at = self._clock()
        self._first, self._stop = blocks, max(blocks, decision.tokens // block)
        self._announced.expect(state.request, state.prompt.keys[self._first : self._stop], self._first)
        return self._stop, decision.seconds

    def ended(self, *, came: bool) -> None:
        """It teaches how fast such blocks come."""
        decision, self._decision, now = self._decision, None, self._clock()
        if decision is not None:
            seconds, name = now - self._began_at, self._state.request.request_id
            self._choice.fetches.ended(decision, seconds, now, came=came)
            if came:
                self._choice.fetch_seconds[name] = self._choice.fetch_seconds.get(name, 0.0) + seconds

    def looked(self, blocks: int) -> None:
        """Of what is not here nothing is expected any more."""
        keys = b"".join(self._state.prompt.keys[: self._stop])
        self._announced.saved(keys, self._first, blocks)

    @property
    def _usable(self) -> int:
        """Blocks that a load could bring."""
        return max(0, self._state.prompt.tokens - 1) // self._block_tokens


def wait_of(
    state: RequestState,
    namespace: NamespaceHandle,
    choice: LoadChoice,
    announced: Announcements[Any],
    parked: ParkedWaits,
    clock: Callable[[], float],
    is_busy: Callable[[], bool],
    least_seconds: float,
) -> BlockWait:
    """Of a request before it is admitted first. least_seconds: for which a ticket's first block is waited for."""
    facts, block = state.facts, namespace.block_tokens
    policy = None
    if facts.ticket or facts.awaits:
        policy = WaitPolicy(state.prompt, block, choice.costs.prefill.more_seconds, clock, least_seconds)
    fetch = FetchPolicy(RequestFetch(state, block, choice, announced, clock, is_busy), block)
    return BlockWait(namespace, state.prompt, facts.ticket, WaitPlan(policy, fetch), parked)
