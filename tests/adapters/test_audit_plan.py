"""From the choice of a hit that is computed all the same to the verdict: the plan alone, with a real store's leases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from adapters.test_audit import CLOSE, DRIFTED, EXACT
from adapters.test_paged_scheduler import FACTS, put
from engine_adapter.audit.audits import AuditResult, AuditVerdict
from engine_adapter.cost import LoadChoice
from engine_adapter.paged.plans import AuditPlan, SavePlan
from engine_adapter.paged.requests import Computed, RequestSpec, RequestState
from engine_adapter.paged.step_plan import NamespaceSpec, SaveReport, StepPlan
from kvstore.block.account import Account
from kvstore.node import EmbeddedStore
from paged_engine import Request
from waiting import wait_until
from workbench import ids

TABLE = list(range(1, 12))


@pytest.fixture(autouse=True)
def _no_lease_is_left(store: EmbeddedStore) -> Iterator[None]:
    yield
    wait_until(lambda: not store.usage().leases)


class Held:
    """A request that is held out, of 330 tokens of which 320 are stored."""

    def __init__(self, store: EmbeddedStore, ranks: tuple[int, ...] = (0,), facts: NamespaceSpec = FACTS) -> None:
        self.choice = LoadChoice(1.0, is_on=False, audit=1.0, choose=lambda: 0.0)
        numbers = count(50)
        self.saves = SavePlan(ranks, FACTS.groups, 64)
        self.plan = AuditPlan(self.choice, facts, self.saves, numbers, 5000)
        self.handle = put(store, ids(320))
        self.state = self.of("a")

    def of(self, name: str) -> RequestState:
        request = Request(name, ids(330), 330, None, known=330)  # type: ignore[arg-type]
        state = RequestState(request, RequestSpec(), Account.of([]))
        state.prompt = self.handle.hashed(ids(330))
        return state

    def begins(self) -> bool:
        return self.plan.begins(self.state, self.handle.match(ids(330)), self.handle, None, 0.0)

    def computed(self, stop: int = 330) -> StepPlan:
        """Steps until the lease is there; where it cannot be needed yet, one."""
        orders, one = StepPlan(), Computed("a", stop, lambda: [TABLE])

        def is_over() -> bool:
            self.plan.computed(self.state, one, orders)
            return bool(orders.saves) or stop < 320 or self.state.audit is None or not self.state.audit.pending

        wait_until(is_over)
        return orders

    def reported(self, orders: StepPlan, rank: int, *results: AuditResult) -> AuditVerdict | None:
        (order,) = orders.saves
        offer = self.saves.reported(SaveReport(order.number, "a", rank, 0, 0, 0.0, results=results))
        return self.plan.reported(order.number, offer.results or ()) if offer is not None else None


def test_the_last_block_that_could_be_used_is_compared(store: EmbeddedStore) -> None:
    held = Held(store)
    assert held.begins() and held.plan.name
    assert held.computed(319).saves == []
    orders = held.computed(320)
    (order,) = orders.saves
    assert (order.first_token, order.tables[0].first, order.tables[0].pages) == (256, 8, [9, 10])
    assert held.saves.taken({9}) == [order.number] and held.saves.taken({8}) == []
    assert held.computed().saves == [], "once"
    assert held.reported(orders, 0, CLOSE) is AuditVerdict.CLOSE
    assert held.saves.taken({9}) == [] and held.plan.take_outcomes() == {AuditVerdict.CLOSE: 1}
    assert held.plan.take_outcomes() == {}
    assert held.choice.holdout.begins("b", 0.0), "the next one may be held out"


def test_all_ranks_have_to_compare_and_the_worst_counts(store: EmbeddedStore) -> None:
    held = Held(store, (0, 1, 2))
    assert held.begins()
    orders = held.computed()
    assert held.reported(orders, 1, EXACT) is None and held.reported(orders, 0, DRIFTED) is None
    assert held.saves.taken({9}) != [], "the third one reads"
    assert held.reported(orders, 2, EXACT) is AuditVerdict.DRIFTED
    assert held.plan.take_outcomes() == {AuditVerdict.EXACT: 2, AuditVerdict.DRIFTED: 1}
    assert held.reported(orders, 2, DRIFTED) is None, "it is over"


def test_where_one_rank_has_nothing_to_say_nothing_was_compared(store: EmbeddedStore) -> None:
    """It alone knows that its step was computed behind a load that failed."""
    held = Held(store, (0, 1))
    assert held.begins()
    orders = held.computed()
    assert held.reported(orders, 0, DRIFTED) is None and held.reported(orders, 1) is None
    assert held.plan.take_outcomes() == {"given_up": 1}


@pytest.mark.parametrize("page", [1, 9, 10])
def test_what_was_computed_behind_decoded_numbers_is_not_compared(store: EmbeddedStore, page: int) -> None:
    """They are another block's, or less exact than what the stored block was computed from."""
    held = Held(store)
    held.saves.decoded([page], 7)
    assert held.begins()
    assert held.computed().saves == [] and held.choice.holdout.begins("b", 0.0)
    held.state = held.of("b")
    held.saves.taken({page})
    held.saves.decoded([11], 7)
    held.plan.ended(held.state)
    held.choice.holdout.ended("b")
    assert held.begins() and held.computed().saves, "behind the block it does not matter"
    held.plan.close()


def test_with_an_inexact_codec_every_other_time_the_first_block_is_compared(store: EmbeddedStore) -> None:
    held = Held(store, facts=replace(FACTS, codec="int8-kc64"))
    seen = []
    for name in "abcd":
        held.state = held.of(name)
        assert held.begins()
        orders = held.computed()
        seen.append(orders.saves[0].first_token)
        held.reported(orders, 0, CLOSE)
    assert seen == [0, 256, 0, 256]


@pytest.mark.parametrize(("verdict", "is_sound"), [(EXACT, True), (CLOSE, True), (DRIFTED, False), (None, False)])
def test_first_hits_count_where_nothing_was_wrong(
    store: EmbeddedStore, verdict: AuditResult | None, is_sound: bool
) -> None:
    held = Held(store)
    left = held.choice.holdout.first_left
    assert held.begins()
    held.reported(held.computed(), 0, *([verdict] if verdict is not None else []))
    assert held.choice.holdout.first_left == left - is_sound
