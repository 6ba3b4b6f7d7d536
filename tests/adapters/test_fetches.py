"""What is elsewhere: asked for beside the look-up, fetched where that is sooner than computing, waited for no longer
than that, and accounted for. Engines are `PagedEngine`s, which look at every number that they read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest

from engine_adapter import cost, handoff
from engine_adapter.cost import EXPLORE_EVERY, CostModel, Decision, LoadSpeed, PrefillSpeed
from engine_adapter.handoff import REASON_OF_END, AwaitStep, FetchPolicy, WaitPlan, WaitPolicy
from engine_adapter.paged.requests import RequestSpec
from far import Courier, FarStore
from kvstore.block.account import HitTier, MissReason
from kvstore.block.identity import Prompt
from kvstore.node import EmbeddedStore
from kvstore.protocol import messages as m
from paged_engine import PagedEngine, Request, Shape, SharedStore, Status, check_nothing_is_held
from tiering.counts.awaits import AwaitEnd
from waiting import wait_until
from workbench import open_at

SEED = int(os.environ.get("FETCH_SEED", "0")) or SystemRandom().randrange(1 << 30)
HISTORIES = int(os.environ.get("FETCH_HISTORIES", "12"))
BLOCK = 64


class Hosts:
    """Two engines, each over a store of its own; what the first one stored can be fetched for the second one."""

    def __init__(self, far: EmbeddedStore, near: EmbeddedStore, **options: Any) -> None:
        self.near = near
        self.random = Random(SEED)
        self.courier = Courier()
        given: dict[str, Any] = {"lease_deadline_ms": 200, **options}
        self.one = PagedEngine(Shape(), lambda _: SharedStore(far), Random(1), session="1")
        self.two = PagedEngine(Shape(), lambda _: FarStore(near, self.courier), Random(2), session="2", **given)

    def drawn(self, tokens: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(tokens)]

    def prompt(self, tokens: int) -> list[int]:
        """Stored on the first host, and known to be there."""
        prompt = self.drawn(tokens)
        self.one.ask(f"p{self.random.random()}", prompt)
        self.one.settle()
        self.courier.holds(self.one.handle, self.two.handle, prompt)
        return prompt

    def ask(self, name: str, prompt: list[int], spec: RequestSpec | None = None) -> dict[str, Any]:
        self.two.forget()
        return self.two.ask(name, prompt, 2, spec).account

    def handed_over(self, prompt: list[int]) -> RequestSpec:
        """What a request for it says that comes with a ticket."""
        near = self.two.handle
        return RequestSpec(ticket=near.seal(near.hashed(prompt), 60).ticket)

    def knows_couriers(self) -> None:
        """The first look-up tells an engine that there is one."""
        self.ask("first", [1] * 70)
        self.courier.asked.clear()


@contextmanager
def hosts(path: Path, **options: Any) -> Iterator[Hosts]:
    with open_at(path / "far", dram="16MiB") as far, open_at(path / "near", dram="16MiB") as near:
        made = Hosts(far, near, **options)
        with made.one, made.two:
            yield made
            check_nothing_is_held(near, made.one, made.two)
            assert made.courier.fetches == []


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    with hosts(tmp_path) as made:
        yield made


# The main job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [HitTier.PEER, HitTier.REMOTE])
def test_what_another_host_stored_is_fetched_and_counted_by_its_tier_once(two: Hosts, tier: HitTier) -> None:
    two.courier.tier = tier
    prompt = two.prompt(500)
    account = two.ask("a", prompt)
    assert account["hits"] == {str(tier): 448}, account
    assert two.ask("b", prompt)["hits"] == {"dram": 448}, "it is here now"
    longer = two.ask("c", [*prompt, *range(200)])
    assert longer["hits"] == {"dram": 448} and longer["misses"]["absent"] == 192, "and no more is elsewhere"


def test_what_is_here_and_what_is_elsewhere_are_one_prefix(two: Hosts) -> None:
    prompt = two.prompt(700)
    two.ask("short", prompt[:300])
    two.two.settle()
    assert two.ask("long", prompt)["hits"] == {"dram": 256, "peer": 384}


def test_a_prefix_that_is_here_as_a_whole_is_asked_of_no_other_node(two: Hosts) -> None:
    """In the store, or in the engine's own cache."""
    prompt = two.prompt(500)
    two.ask("a", prompt)
    for tokens in (63, 65, 448, 449, 500):
        two.courier.asked.clear()
        two.ask(f"{tokens}", prompt[:tokens])
        assert not two.courier.asked["Locate"] + two.courier.asked["Await"], tokens
    two.two.settle()
    assert two.near.evict(100)
    two.two.ask("its own", prompt, 2)
    assert not two.courier.asked["Locate"]


def test_each_request_is_one_look_up_to_the_store(two: Hosts) -> None:
    two.knows_couriers()
    counted: list[bool] = []
    door, near = two.two.handle.door, two.near
    submit = door.submit

    def noted(request: Any, *given: Any) -> Any:
        reply = submit(request, *given)
        if isinstance(request, m.MatchPrefix):
            is_whole = near.core.match(request.namespace, request.keys).blocks == len(request.keys)
            counted.append(request.counts and (request.counts_short or is_whole))
        return reply

    door.submit = noted  # type: ignore[method-assign]
    part, whole = two.prompt(500), two.prompt(500)
    for name, share, asked, looks in (
        ("nothing is elsewhere", 1.0, two.drawn(500), 2),
        ("part", 0.5, part, 2),
        ("whole", 1.0, whole, 2),
        ("here", 1.0, whole, 1),
    ):
        two.courier.brings = share
        counted.clear()
        two.ask(name, asked)
        assert (sum(counted), len(counted)) == (1, looks), name
        two.two.settle()


def test_what_is_fetched_is_told_to_routers_and_what_did_not_come_is_not(two: Hosts) -> None:
    two.two.half.announce(lambda request, number: (request.request_id, number))
    two.courier.brings = 0.5
    two.ask("a", two.prompt(500))
    two.two.settle()
    wait_until(lambda: two.two.step() or len(two.two.half.announced._news) >= 7)  # type: ignore[func-returns-value]
    news = [one.block for one in two.two.half.announced.take() if one.came is HitTier.DRAM]
    assert news[:3] == [("a", 0), ("a", 1), ("a", 2)]
    assert {number for name, number in news} == set(range(7)), "the others are told when they are saved"


# How long, and why not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(
    ("end", "reason", "missed"),
    [
        (AwaitEnd.SHORT, None, "stale_hint"),
        (AwaitEnd.SHORT, MissReason.UNREACHABLE, "unreachable"),
        (AwaitEnd.SHORT, MissReason.STALE_HINT, "stale_hint"),
        (None, None, "deadline"),
        (AwaitEnd.GONE, None, "unreachable"),
    ],
)
def test_what_was_located_and_did_not_come_is_a_miss_for_what_kept_it_away(
    two: Hosts, share: float, end: AwaitEnd | None, reason: MissReason | None, missed: str
) -> None:
    courier = two.courier
    courier.brings, courier.end = share, end
    prompt = two.prompt(500)
    courier.reason = reason
    account = two.ask("a", [*prompt[:448], *range(100)])
    came = 64 * int(share * 7)
    assert account["hits"] == ({"peer": came} if came else {})
    assert account["misses"] == {missed: 448 - came, "absent": 64, "partial_block": 36}, account
    assert "far away" in account["detail"]


def test_a_courier_that_brings_nothing_is_waited_for_no_longer_than_chosen(two: Hosts) -> None:
    two.courier.brings = None
    prompt = two.prompt(500)
    began = time.monotonic()
    account = two.ask("a", prompt)
    assert account["misses"]["deadline"] == 448 and account["hits"] == {}
    assert time.monotonic() - began >= cost.LEAST_WAIT_SECONDS
    counts = two.two.half.choice.costs.counts
    assert (counts["locates"], counts["fetches"], counts["short_fetches"]) == (1, 1, 1) and counts["regret_ms"] >= 50


def test_others_run_while_one_waits(two: Hosts) -> None:
    two.courier.brings = None
    two.courier.milliseconds = inf
    waits = two.two.add("waits", two.prompt(500), 2)
    others = [two.two.add(f"{at}", [at] * 40, 4) for at in range(4)]
    while any(one.status is not Status.OVER for one in others):
        two.two.step()
    assert waits.status is Status.WAITING and len(two.courier.fetches) == 1
    two.courier.bring(two.courier.fetches[0])
    two.two.run()
    assert waits.account["hits"] == {"peer": 448}


def test_a_locate_that_is_not_answered_costs_milliseconds(two: Hosts) -> None:
    two.courier.answers = False
    assert two.ask("a", two.prompt(500))["misses"]["absent"] == 448
    assert not two.courier.asked["Await"]


@pytest.mark.parametrize("steps", range(5))
def test_a_request_that_is_given_up_leaves_nothing(two: Hosts, steps: int) -> None:
    two.knows_couriers()
    two.courier.brings, two.courier.milliseconds = None, inf
    two.courier.answers = steps > 1
    request = two.two.add("a", two.prompt(500), 2)
    for _ in range(steps):
        two.two.step()
    assert bool(two.courier.fetches) is (steps > 1)
    two.two.abort(request)
    assert two.courier.fetches == [] and two.near.core.awaits.counts().parked == 0


# Tickets --------------------------------------------------------------------------------------------------------------


def test_a_ticket_goes_along_and_is_asked_again_while_the_other_engine_stores(
    two: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "RELOCATE_SECONDS", 0.005)
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 20.0)
    prompt, near = two.drawn(500), two.two.handle
    spec = two.handed_over(prompt)
    request = two.two.add("d", prompt, 2, spec)
    while two.courier.asked["Locate"] < 2:
        two.two.step()
    two.one.ask("p", prompt)
    two.one.settle()
    two.courier.holds(two.one.handle, near, prompt[:200])
    while near.match(prompt, counts=False).blocks < 3:
        two.two.step()
    two.courier.holds(two.one.handle, near, prompt)
    two.two.run()
    assert request.account["hits"] == {"peer": 448} and set(two.courier.tickets) == {spec.ticket}
    choice = two.two.half.choice
    assert choice is not None and choice.costs.counts["fetches"] > 0
    assert not choice.costs.loads.has_seen(HitTier.PEER), "how long the other engine computed is no speed"


@pytest.mark.parametrize("reason", [MissReason.UNREACHABLE, MissReason.STALE_HINT])
def test_a_ticket_whose_node_has_nothing_is_a_miss_for_that(
    tmp_path: Path, reason: MissReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 0.1)
    with hosts(tmp_path, lease_deadline_ms=50) as two:
        prompt = two.drawn(500)
        two.courier.reason = reason
        account = two.ask("d", prompt, two.handed_over(prompt))
        assert account["misses"][str(reason)] == 448, account


def test_a_holder_that_fails_at_once_is_not_asked_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 0.3)
    with hosts(tmp_path, lease_deadline_ms=50) as two:
        two.courier.brings = 0.0
        prompt = two.prompt(500)
        two.ask("d", prompt, two.handed_over(prompt))
        assert two.courier.asked["Locate"] <= 2 + 0.3 / handoff.RELOCATE_SECONDS


def test_what_a_courier_gives_up_is_no_put_that_was_given_up() -> None:
    """A fetch that is over gives its slots back a moment later, and ends a wait for the same block."""
    for was_fetched in (False, True):
        policy = WaitPolicy(Prompt(640, [bytes(32)] * 10), BLOCK, lambda *_: None, lambda: 0.0, 1.0)
        plan = WaitPlan(policy, FetchPolicy(9, 1.0, BLOCK))
        if was_fetched:
            assert isinstance(plan.looked(0, True), m.Located)
            assert plan.located(m.Located(1, 9, HitTier.PEER, 1.0)) is not None
            plan.awaited(m.Awaited(0, AwaitEnd.DEADLINE))
        else:
            policy.seconds_left(0)
        for _ in range(3):
            if was_fetched:
                assert plan.looked(0, True) == AwaitStep(0, handoff.RELOCATE_SECONDS), "it rests, and asks no sidecar"
            plan.awaited(m.Awaited(0, AwaitEnd.SHORT))
        assert policy.is_over is not was_fetched


# Everything at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", range(HISTORIES))
def test_whatever_comes_when_nothing_is_left_and_every_number_is_right(
    tmp_path: Path, history: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 0.1)
    monkeypatch.setattr(cost, "UNLEARNED_SECONDS", 0.1)
    seed = SEED + history
    print(f"FETCH_SEED={SEED}, history {history}")
    draw = Random(seed)
    with hosts(tmp_path, cost_model=draw.random() < 0.5, lease_deadline_ms=draw.choice([1, 50])) as two:
        courier = two.courier
        prompts = [two.prompt(draw.randrange(65, 600)) for _ in range(4)]
        asked: list[Request] = []
        for at in range(60):
            action = draw.random()
            if action < 0.3:
                prompt = draw.choice(prompts)
                prompt = prompt[: draw.randrange(1, len(prompt) + 1)] + [at] * draw.randrange(100)
                is_handed_over = draw.random() < 0.3 and len(prompt) > 64
                spec = two.handed_over(prompt) if is_handed_over else RequestSpec()
                spec = replace(spec, awaits=draw.random() < 0.05)
                asked.append(two.two.add(f"r{at}", prompt, draw.randrange(1, 5), spec))
            elif action < 0.4:
                two.two.abort(draw.choice(asked)) if asked else None
            elif action < 0.5 and courier.fetches:
                courier.bring(draw.choice(courier.fetches), draw.choice([0.0, 0.4, 1.0]))
            elif action < 0.53:
                courier.gone()
            elif action < 0.56:
                two.near.evict(draw.randrange(1, 20))
            elif action < 0.6:
                two.two.forget()
            else:
                courier.is_there = courier.is_there or draw.random() < 0.5
                courier.answers = draw.random() < 0.8
                courier.brings = draw.choice([None, None, 0.0, 0.5, 1.0])
                courier.end = draw.choice([None, AwaitEnd.SHORT, AwaitEnd.GONE])
                courier.milliseconds = draw.choice([0.0, 1.0, 1e6, inf])
                courier.reason = draw.choice([None, MissReason.UNREACHABLE])
                two.two.step()
        for one in list(courier.fetches):
            courier.bring(one, draw.choice([0.0, 1.0]))
        courier.brings = draw.choice([0.0, 1.0])
        two.two.run()
        assert all(one.account for one in asked)


# The parts ------------------------------------------------------------------------------------------------------------


def learned(seconds_per_token: float = 1e-3, *, is_on: bool = True) -> CostModel:
    prefill = PrefillSpeed()
    for tokens in (200, 400, 600, 800) * 4:
        prefill.observe([(0, tokens)], 0, 0.01 + seconds_per_token * tokens)
    return CostModel(prefill, LoadSpeed(), bytes_per_token=1000.0, is_on=is_on)


def chosen(
    costs: CostModel, ms: float = 1.0, here: int = 0, local: int = 0, located: int = 640, now: float = 0.0
) -> tuple[Decision, float]:
    return costs.choose_fetch(HitTier.PEER, here, local, located, 700, 64, ms, False, now)


def tokens(costs: CostModel, ms: float = 1.0, **given: Any) -> int:
    return chosen(costs, ms, **given)[0].load_tokens


def test_what_takes_longer_than_computing_is_declined_and_tried_once_in_a_while() -> None:
    costs = learned()
    assert (tokens(costs), tokens(costs, 300), tokens(costs, 1000), tokens(costs, 1e9)) == (640, 640, 0, 0)
    tried = [one for one, _ in (chosen(costs, ms=1000) for _ in range(640)) if one.load_tokens]
    assert len(tried) in (9, 10, 11) and all(one.is_explored and 64 <= one.load_tokens < 640 for one in tried)
    assert costs.counts["decisions"] == 0, "these count loads"
    assert tokens(learned(is_on=False), ms=1e6) == 640


def test_what_is_declined_of_fetches_and_of_loads_is_tried_for_itself() -> None:
    """A request often declines both, one after the other."""
    costs = learned(1e-6)
    tried = {True: 0, False: 0}
    for _ in range(3 * EXPLORE_EVERY):
        tried[True] += tokens(costs, ms=1000) > 0
        tried[False] += costs.choose(0, [(HitTier.NVME, 640)], 700, 64, 1.0, False, 0.0).load_tokens > 0
    assert tried == {True: 3, False: 3}


def test_what_the_engine_has_itself_comes_along_and_saves_nothing() -> None:
    costs = learned()
    assert tokens(costs, ms=300, here=64, local=320) == 576, "from where the store's part ends"
    assert tokens(costs, ms=300, local=576) == 0, "computing one block is sooner"
    assert tokens(costs, local=640) == tokens(costs, local=700) == 0


def test_the_wait_is_the_smaller_of_computing_and_a_few_times_what_is_expected() -> None:
    costs = learned()
    assert chosen(costs, ms=1)[1] == cost.LEAST_WAIT_SECONDS
    assert chosen(costs, ms=100)[1] == pytest.approx(0.4)
    assert chosen(costs, ms=300)[1] == pytest.approx(0.64, rel=0.05)
    unlearned = CostModel(PrefillSpeed(), LoadSpeed(), bytes_per_token=1000.0)
    assert chosen(unlearned, ms=1e5)[1] == cost.UNLEARNED_SECONDS and tokens(unlearned, ms=inf) == 640


def test_finished_fetches_teach_how_fast_a_tier_is() -> None:
    costs = learned(1e-4)
    assert tokens(costs, ms=inf) == 640
    for at in range(6):
        costs.fetch_ended(chosen(costs, ms=inf, now=at)[0], 1.0, float(at), came=True)
        if not tokens(costs, ms=inf, now=at):
            break
    assert tokens(costs, ms=inf, now=10.0) == 0, "a tenth of it is what computing takes"
    assert not costs.loads.has_seen(HitTier.DRAM) and not costs.loads.has_seen(HitTier.REMOTE)
    costs.fetch_ended(chosen(learned(is_on=False))[0], 0.5, 11.0, came=False)
    assert costs.counts["regret_ms"] == pytest.approx(500) and costs.counts["short_fetches"] == 1


@pytest.mark.parametrize("seconds", [-1.0, 0.0, inf, float("nan")])
def test_no_number_makes_it_raise(seconds: float) -> None:
    costs = learned()
    draw = Random(3)
    for _ in range(300):
        here, local, located, prompt, block = (draw.choice([-1, 0, 1, 64, 640, 1 << 40]) for _ in range(5))
        told_ms, is_busy = draw.choice([0.0, -1.0, 5.0, inf, float("nan")]), draw.random() < 0.5
        decision, wait = costs.choose_fetch(
            HitTier.PEER, here, local, located, prompt, block, told_ms, is_busy, seconds
        )
        assert wait >= 0 and decision.load_tokens >= 0
        costs.fetch_ended(decision, seconds, 0.0, came=draw.random() < 0.5)


def test_a_located_chain_is_waited_for_within_the_bound_that_was_given() -> None:
    bounded = FetchPolicy(10, 0.2, 64)
    assert bounded.choose(m.Located(1, 8, HitTier.PEER, 10.0), 0) == (8, cost.LEAST_WAIT_SECONDS)
    assert bounded.choose(m.Located(1, 8, HitTier.PEER, 500.0), 0) == (0, 0.0)
    assert bounded.choose(m.Located(1, 20, HitTier.PEER, 300.0), 0) == (10, 0.2)
    assert bounded.choose(m.Located(1, 20, HitTier.PEER, inf), 4) == (10, 0.2)
    assert not bounded.asks(10) and bounded.asks(9)
    assert set(REASON_OF_END) == set(AwaitEnd), "every end of a wait has a reason"
    policy = FetchPolicy(10, 1.0, 64)
    assert policy.chosen(m.Located(0, 9, HitTier.PEER, 1.0), 2) == (2, 0.0), "no number, nothing to fetch"
    assert policy.is_over
