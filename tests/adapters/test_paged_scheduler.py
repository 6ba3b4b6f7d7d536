"""What the scheduler's half decides, one thing at a time: a real store in this process, and no workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.test_audit import DRIFTED, EXACT
from engine_adapter.audit.audits import AuditResult
from engine_adapter.cost import LoadChoice, StepWork
from engine_adapter.paged.requests import NEVER, Computed, RequestNews, RequestSpec, RequestState
from engine_adapter.paged.scheduler import PagedScheduler
from engine_adapter.paged.settings import ConnectorSettings
from engine_adapter.paged.step_plan import LoadReport, NamespaceSpec, SaveOrder, SaveReport, StepPlan, StepReports
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.errors import BadInput
from kvstore.block.layout import Layout
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from kvstore.protocol import messages as m
from kvstore.protocol.told import RequestTold
from paged_engine import Request, SharedStore, named_of
from tiering.frame import KEY_BYTES
from waiting import SOON_SECONDS, FakeClock, wait_until
from workbench import ids, plausible_pages

PAGE = 32
LAYOUT = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=PAGE, block_tokens=64)
FACTS = named_of(LAYOUT)
LEARNS_NOTHING = LoadChoice(1.0, is_on=False, audit=0.0, choose=lambda: 1.0)


def handle_of(store: EmbeddedStore) -> NamespaceHandle:
    return store.namespace(model=FACTS.model, layout=LAYOUT)


def put(store: EmbeddedStore, tokens: Sequence[int]) -> NamespaceHandle:
    handle = handle_of(store)
    blocks = len(tokens) // 64
    assert handle.put(tokens[: 64 * blocks], plausible_pages(LAYOUT, blocks)).reason is None
    return handle


class Late(SharedStore):
    """Its answers come when a test says so. Everything behind that is the real one."""

    def __init__(self, store: EmbeddedStore, *, is_late: bool = False) -> None:
        super().__init__(store)
        self.is_late = is_late
        self.requests: list[Any] = []

    def namespace(self, **given: Any) -> NamespaceHandle:
        handle = super().namespace(**given)
        submit = handle.door.submit

        def submit_late(request: Any, *given: Any) -> Any:
            self.requests.append(request)
            answer = submit(request, *given)
            poll, is_ready = answer.poll, answer.is_ready
            answer.poll = lambda: None if self.is_late else poll()
            answer.is_ready = lambda: not self.is_late and is_ready()
            return answer

        handle.door.submit = submit_late
        return handle

    def of_kind(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]


class Half:
    """A scheduler's half, and what an engine would do around it."""

    def __init__(
        self,
        store: Any,
        *,
        ranks: int = 1,
        facts: NamespaceSpec = FACTS,
        choose: Callable[[], float] = lambda: 0.0,
        **settings: Any,
    ) -> None:
        given = {"cost_model": False, "audit": 0.0, "lease_deadline_ms": 5000, "load": "async", **settings}
        self.clock = FakeClock()
        checked = ConnectorSettings.of({"url": "unix:none", **given})
        self.half = PagedScheduler(checked, lambda: store, self.clock.monotonic_seconds, choose, self.clock.advance)
        self.half.use(facts, range(ranks))
        assert self.half.wait_open(SOON_SECONDS)
        self.ranks = ranks
        self.next_page = 1

    def add(self, name: str, prompt: Sequence[int], facts: RequestSpec | None = None, more: int = 0) -> Request:
        stream = [*prompt, *range(5000, 5000 + more)]
        request = Request(name, stream, len(prompt), None, known=len(prompt))  # type: ignore[arg-type]
        self.half.added(request, facts or RequestSpec())
        return request

    def matched(self, request: Request, local: int = 0) -> tuple[int, bool]:
        return wait_until(
            lambda: found if (found := self.half.matched(request.request_id, local))[0] is not None else None
        )

    def admit(self, request: Request, local: int = 0, tokens: int | None = None) -> int:
        """With pages for what is promised, or for so many tokens."""
        promised, _ = self.matched(request, local)
        count = -(-(tokens or local + promised) // PAGE)
        request.tables = [self.pages(count)]
        self.half.allocated(request.request_id, request.tables, promised)
        request.computed = local + promised
        return promised

    def admitted(
        self, name: str, prompt: Sequence[int], facts: RequestSpec | None = None, more: int = 0, **given: Any
    ) -> Request:
        request = self.add(name, prompt, facts, more)
        self.admit(request, **given)
        return request

    def pages(self, count: int) -> list[int]:
        self.next_page += count
        return list(range(self.next_page - count, self.next_page))

    def step(self, *requests: Request, grown: Sequence[int] = (), upto: int | None = None) -> StepPlan:
        due = []
        for request in requests:
            stop = upto or request.known
            if stop >= request.due:
                due.append(Computed(request.request_id, stop, lambda one=request: one.tables))
        running = {request.request_id for request in requests}
        return self.half.step(running, due, grown, StepWork((), len(requests)))

    def loaded(self, orders: StepPlan, tokens: int | None = None, rank: int = 0) -> None:
        """What a worker says of the only load."""
        (order,) = orders.loads
        stop = order.stop_token if tokens is None else tokens
        reason = None if stop >= order.stop_token else MissReason.CORRUPT
        report = LoadReport(order.number, order.request, rank, stop, 0.004, reason)
        self.half.reported(StepReports(loads=[report]))

    def saved(self, orders: StepPlan, held: int, stored: int, **given: Any) -> None:
        """What a worker says of the only save."""
        (order,) = orders.saves
        report = SaveReport(order.number, order.request, 0, held, stored, 0.004, **given)
        self.half.reported(StepReports(saves=[report]))

    def told(self, request: Request) -> Any:
        return self.half.finished(request.request_id)


def stored_half(store: EmbeddedStore, stored: int = 320, **settings: Any) -> Half:
    """At a store that has the blocks of so many tokens."""
    put(store, ids(stored))
    return Half(SharedStore(store), **settings)


# The look-up ---------------------------------------------------------------------------------------------------------


def test_no_answer_in_time_is_a_miss_and_a_late_question_is_not_a_late_answer(store: EmbeddedStore) -> None:
    put(store, ids(320))
    late = Late(store)
    half = Half(late)
    late.is_late = True
    one, other = half.add("a", ids(330)), half.add("b", ids(330))
    assert half.half.matched("a", 0) == (None, False) == half.half.matched("b", 0)
    half.clock.advance(0.019)
    assert half.half.matched("a", 0) == (None, False)
    half.clock.advance(0.002)
    assert half.half.matched("a", 0) == (0, False)
    late.is_late = False
    assert half.half.matched("a", 0) == (0, False), "it stays what it was"
    assert half.matched(other) == (320, True), "it was there when it was asked for"
    told = half.told(one)
    assert told["misses"] == {"deadline": 320, "partial_block": 10}
    assert told["detail"] == "no answer within 20 ms"


@pytest.mark.parametrize(
    ("tokens", "local", "hits"),
    [(320, 0, {"dram": 256}), (330, 96, {"engine": 96, "dram": 224}), (330, 320, {"engine": 320})],
)
def test_a_hit_lies_behind_the_engines_own_tokens_and_ends_before_the_last_one(
    store: EmbeddedStore, tokens: int, local: int, hits: dict[str, int]
) -> None:
    half = stored_half(store)
    request = half.add("a", ids(tokens))
    promised = half.admit(request, local)
    assert promised == hits.get("dram", 0)
    assert half.half.hit_tiers("a", 224) == ({HitTier.DRAM: 224} if promised == 224 else {})
    told = half.told(request)
    assert told["hits"] == hits and sum(told["misses"].values()) == tokens - sum(hits.values())
    assert ("last_token" in told["misses"]) == (tokens == 320)


def test_a_lease_that_was_asked_for_behind_more_of_the_engines_own_is_asked_for_again(store: EmbeddedStore) -> None:
    """The engine's own cache shrinks while the lease is on its way: what is promised is what is pinned."""
    put(store, ids(320))
    late = Late(store)
    half = Half(late)
    request = half.add("a", ids(330))
    half.half._look_up(half.half._states["a"])
    assert half.half._states["a"].lookup.found() is not None  # type: ignore[union-attr]
    late.is_late = True
    assert half.half.matched("a", 128) == (None, False), "the lease is asked for"
    late.is_late = False
    assert half.admit(request) == 320
    (order,) = half.step().loads
    with handle_of(store).attach(order.ticket) as lease:
        assert lease.first_token == 0 and lease.tokens == 320
    assert half.told(request)["hits"] == {"dram": 320}


def test_a_store_that_comes_later_is_used_from_then_on(store: EmbeddedStore) -> None:
    half = stored_half(store)
    half.half.opener._handle, handle = None, half.half.opener._handle
    request = half.add("a", ids(330))
    half.half.opener._handle = handle
    assert half.matched(request) == (320, True), "asked for when it is admitted, if not before"
    assert half.told(request)["hits"] == {"dram": 320}


@pytest.mark.parametrize(
    ("tokens", "local", "rest"),
    [
        (330, 320, {"partial_block": 10}),
        (384, 320, {"grid": 63, "last_token": 1}),
        (63, 32, {"partial_block": 31}),
        (63, 0, {"partial_block": 63}),
        (64, 32, {"grid": 31, "last_token": 1}),
        (1, 0, {"partial_block": 1}),
    ],
)
def test_where_no_block_is_to_be_had_no_answer_is_waited_for(
    store: EmbeddedStore, tokens: int, local: int, rest: dict[str, int]
) -> None:
    late = Late(store, is_late=True)
    half = Half(late)
    request = half.add("a", ids(tokens))
    began = half.clock.monotonic_seconds()
    assert half.half.matched("a", local) == (0, False) and half.clock.monotonic_seconds() == began
    half.half.allocated("a", [half.pages(-(-tokens // PAGE))], 0)
    told = half.told(request)
    assert told["hits"] == ({"engine": local} if local else {})
    assert told["misses"] == rest
    wait_until(lambda: not store.usage().leases)


def test_where_one_more_block_could_be_had_its_answer_is_waited_for(store: EmbeddedStore) -> None:
    put(store, ids(384))
    half = Half(late := Late(store, is_late=True))
    request = half.add("a", ids(385))
    assert half.half.matched("a", 320) == (None, False)
    late.is_late = False
    assert half.matched(request, 320) == (64, True)


def with_its_own(half: Half, beside: int) -> Request:
    """A request of 330 tokens of which the engine has 320 itself."""
    for number in range(beside):
        half.add(f"o{number}", ids(50, 3000))
    request = half.add("a", ids(330), more=200)
    assert half.half.matched("a", 320) == (0, False)
    request.tables = [half.pages(17)]
    half.half.allocated("a", request.tables, 0)
    return request


@pytest.mark.parametrize("beside", [0, 1])
@pytest.mark.parametrize(("stored", "is_answered"), [(320, True), (192, True), (0, True), (320, False)])
def test_what_is_stored_is_known_later_where_nobody_waited_for_it(
    store: EmbeddedStore, stored: int, is_answered: bool, beside: int
) -> None:
    """Where that is never answered, all is saved. beside: others in the engine; without one, nothing is asked before
    the engine says what it has itself."""
    if stored:
        put(store, ids(stored))
    half = Half(late := Late(store, is_late=True))
    request = with_its_own(half, beside)
    assert len(late.of_kind(m.MatchPrefix)) == beside
    assert half.step(request, upto=330).saves == [], "nobody knows yet"
    request.known = 331
    assert half.step(request, upto=331).saves == [] and len(late.of_kind(m.MatchPrefix)) == 1
    late.is_late = not is_answered
    half.clock.advance(0 if is_answered else 60)
    request.known = 332
    saves = half.step(request, upto=332).saves
    found = stored if is_answered else 0
    assert [(save.first_token, len(save.keys) // KEY_BYTES) for save in saves] == ([(found, 5)] if found < 320 else [])
    request.known = 400
    (save,) = half.step(request, upto=400).saves
    assert save.first_token == 320
    half.told(request)
    wait_until(lambda: not store.usage().leases)


def test_a_block_that_is_new_is_saved_with_the_step_that_computes_it(store: EmbeddedStore) -> None:
    """Whoever ends with one token leaves it behind."""
    half = Half(late := Late(store, is_late=True))
    request = half.add("a", ids(384))
    assert half.half.matched("a", 320) == (0, False) and not late.of_kind(m.MatchPrefix)
    request.tables = [half.pages(12)]
    half.half.allocated("a", request.tables, 0)
    (save,) = half.step(request, upto=384).saves
    assert (save.first_token, len(save.keys) // KEY_BYTES) == (320, 6)


def test_only_prompts_are_saved_also_where_it_is_known_late_what_is_stored(store: EmbeddedStore) -> None:
    half = Half(late := Late(store, is_late=True), save="prompt")
    request = with_its_own(half, 0)
    for known in (330, 331):
        request.known = known
        assert half.step(request).saves == []
    late.is_late, request.known = False, 400
    (save,) = half.step(request).saves
    assert (save.first_token, len(save.keys) // KEY_BYTES) == (0, 5)
    assert request.due == NEVER or not half.step(request).saves


def test_a_request_that_is_alone_and_comes_to_nothing_is_accounted_for(store: EmbeddedStore) -> None:
    half = Half(late := Late(store))
    told = half.told(half.add("a", ids(330)))
    assert told["misses"] == {"disabled": 330} and not late.of_kind(m.MatchPrefix)


# Held out ------------------------------------------------------------------------------------------------------------


def test_a_request_that_is_held_out_stays_so_and_is_asked_about_once(store: EmbeddedStore) -> None:
    half = stored_half(store, audit=0.5)
    request = half.add("a", ids(330))
    for local in (0, 64, 0, 32):
        assert half.matched(request, local) == (0, False)
        assert half.half.choice.holdout.compares("a")
    half.half.allocated("a", [half.pages(11)], 0)
    told = half.told(request)
    assert told["hits"] == {"engine": 32} and told["misses"]["audit"] == 320 - 32
    wait_until(lambda: not store.usage().leases)


def test_a_hit_after_a_preemption_is_not_loaded_where_all_are_audited(store: EmbeddedStore) -> None:
    """What it had stored itself is found when it comes again."""
    half = Half(SharedStore(store), audit=1.0)
    request = half.add("a", ids(330))
    assert half.admit(request, tokens=330) == 0
    (save,) = half.step(request, upto=330).saves
    put(store, ids(320))
    half.saved(StepPlan(saves=[save]), 5, 5)
    for _ in range(2):
        assert half.admit(request) == 0, "it was preempted"
    half.told(request)
    wait_until(lambda: not store.usage().leases)


def test_what_is_compared_is_held_before_its_request_runs(store: EmbeddedStore) -> None:
    """Or one that ends with its first token would be over first, and no comparison would ever come of it."""
    put(store, ids(320))
    half = Half(late := Late(store), audit=1.0)
    request = half.add("a", ids(330))
    half.half._look_up(half.half._states["a"])
    assert half.half._states["a"].lookup.found() is not None  # type: ignore[union-attr]
    late.is_late = True
    assert half.half.matched("a", 0) == (None, False)
    late.is_late = False
    request.tables = [half.pages(11)]
    assert half.matched(request) == (0, False)
    half.half.allocated("a", request.tables, 0)
    (order,) = half.step(request).saves
    half.told(request)
    half.half.reported(compared(order, EXACT))
    assert half.half.take_counts()["audited_exact"] == 1
    wait_until(lambda: not store.usage().leases)


# Loads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [320, 128, 0])
def test_a_load_that_ends_after_its_request_is_over_is_counted(store: EmbeddedStore, tokens: int) -> None:
    half = stored_half(store)
    request = half.admitted("a", ids(330))
    orders = half.step()
    told = half.told(request)
    assert told["load_ms"] is None and told["hits"] == {"dram": 320}, "nobody knows better yet"
    assert half.half.take_counts().get("requests") is None
    half.loaded(orders, tokens)
    counts = half.half.take_counts()
    assert counts["requests"] == 1 and counts["asked"] == 330
    assert counts.get("hit_dram", 0) == tokens and counts.get("failed_loads", 0) == (tokens < 320)
    assert counts.get("miss_corrupt", 0) == 320 - tokens
    wait_until(lambda: not store.usage().leases)


def test_what_decisions_cost_and_what_hits_save_is_counted(store: EmbeddedStore) -> None:
    put(store, ids(320))
    drawn = iter([0.0, 0.9] * 3)
    half = Half(SharedStore(store), audit=0.5, choose=lambda: next(drawn))
    half.half.choice.holdout.first_left = 0  # the first hits were compared, and nothing found
    counted = []
    for number in range(6):  # every other one is computed all the same
        request = half.add(f"{number}", ids(330))
        tokens = half.admit(request, tokens=330)
        assert tokens == (0, 320)[number % 2]
        half.clock.advance(0.1 if tokens else 0.5)
        orders = half.step(request, upto=330)
        audits = [SaveReport(one.number, one.request, 0, 0, 0, 0.0) for one in orders.saves if one.ticket]
        loads = [LoadReport(load.number, load.request, 0, 320, 0.004, None) for load in orders.loads]
        half.half.reported(StepReports(loads=loads, saves=audits, step=orders.number))
        half.told(request)
        counted.append(half.half.take_counts())
    assert [one["cost_decisions"] for one in counted] == [1] * 6
    assert sum(one.get("cost_loaded_tokens", 0) for one in counted) >= 3 * 320
    assert [one.get("ttft_saved_ms_mean") for one in counted[:3]] == [None] * 3, "two of each are needed"
    assert counted[-1]["ttft_saved_ms_mean"] == pytest.approx(400, abs=1)
    assert counted[-1].get("ttft_saved_ms_standard_error", 0) < 1
    assert half.half.take_counts() == {}


def test_who_was_turned_away_lets_those_pass_that_hold_pages(store: EmbeddedStore) -> None:
    """Or, first in the queue and without room, it would keep them from ever beginning."""
    half = stored_half(store)
    first, second = half.add("a", ids(330)), half.add("b", [*ids(320), 7])
    for request in (first, second):
        assert half.admit(request) == 320
    one, other = half.step().loads
    reports = [
        LoadReport(one.number, "a", 0, 0, 0.004, MissReason.UNREACHABLE),
        LoadReport(other.number, "b", 0, 320, 0.004),
    ]
    half.half.reported(StepReports(loads=reports))
    assert half.half.matched("a", 0) == (None, False), "the other one has its pages and does not run yet"
    late = half.add("c", [*ids(320), 8])
    wait_until(lambda: half.half._states["c"].lookup is not None and half.half._states["c"].lookup.found() is not None)
    assert half.half.matched("c", 0) == (None, False), "and nobody new takes pages"
    half.half.allocated("b", second.tables, 0)
    assert half.matched(first) == (0, False)
    half.half.allocated("a", first.tables, 0)
    assert half.matched(late) == (320, True)
    assert half.told(first)["misses"] == {"unreachable": 320, "partial_block": 10}


def test_what_is_on_its_way_for_a_step_is_nobody_elses(store: EmbeddedStore) -> None:
    """The engine may take pages for its own into which the step only just loads."""
    half = stored_half(store, load="sync")
    first = half.admitted("a", ids(330))
    sharer, other = half.add("b", [*ids(320), 7]), half.add("c", ids(330, 500))
    assert half.half.matched("b", 320) == (None, False)
    assert half.half.matched("b", 64) == (None, False)
    assert half.matched(sharer) == (320, False), "it has none of them"
    assert half.matched(other, 0) == (0, False)
    orders = half.step(first)
    assert half.half.matched("b", 320) == (None, False), "nobody knows yet"
    half.loaded(orders, 160)
    assert half.half.take_invalid_pages() == set(first.tables[0][5:]) and half.half.take_invalid_pages() == set()
    assert half.half.matched("b", 160)[0] is not None


def test_after_a_fault_of_our_own_nobody_is_held_up_and_nothing_is_shared(store: EmbeddedStore) -> None:
    half = stored_half(store, load="sync")
    first = half.admitted("a", ids(330))
    half.step(first)
    half.half.broke(RuntimeError("for a test"))
    assert half.half.take_invalid_pages() == set(first.tables[0])
    sharer = half.add("b", [*ids(320), 7])
    assert half.half.matched(sharer.request_id, 320) == (0, False)
    half.half.renamed(1)
    assert half.matched(half.add("c", ids(330))) == (0, False), "other weights do not mend it"


def test_what_another_connector_brings_is_not_saved(store: EmbeddedStore) -> None:
    half = Half(SharedStore(store))
    ours, theirs = half.add("a", ids(330)), half.add("b", ids(330, 500))
    for request in (ours, theirs):
        half.admit(request, tokens=330)
    half.half.begins_with("a", 0)
    half.half.begins_with("b", 128)
    half.half.begins_with("nobody", 128)
    (save,) = half.step(ours, theirs, upto=330).saves
    assert save.request == "a" and theirs.due == NEVER


def test_a_comparison_under_way_when_weights_change_reads_pages_until_it_ends(store: EmbeddedStore) -> None:
    half = stored_half(store, audit=1.0, ranks=2)
    held_out = half.add("a", ids(330))
    held_out.tables = [half.pages(11)]
    (audit,) = drifted(half, held_out).saves
    page = held_out.tables[0][9]
    half.half.renamed(1)
    for rank in (0, 1):
        assert half.half._plan.taken({page}) == [audit.number]
        half.half.reported(StepReports(saves=[replace(audit, rank=rank, results=())]))
    assert half.half._plan.taken({page}) == []
    assert half.half.take_counts()["audited_given_up"] == 1


@pytest.mark.parametrize(("said", "ttl", "priority"), [({"priority": 0}, 5.0, 0), ({"ttl": 7.0}, 7.0, 3)])
def test_what_a_request_says_goes_before_what_the_engine_was_told(
    store: EmbeddedStore, said: dict[str, Any], ttl: float, priority: int
) -> None:
    half = Half(SharedStore(store), ttl=5.0, priority=3)
    request = half.admitted("a", ids(64), RequestSpec(**said), tokens=64)
    (save,) = half.step(request).saves
    assert (save.ttl, save.priority) == (ttl, priority)


def test_a_codec_that_is_none_for_these_pages_changes_nothing(store: EmbeddedStore) -> None:
    half = stored_half(store)
    group = replace(LAYOUT.groups[0], dtype="float8_e4m3fn")
    layout = Layout((group,), LAYOUT.block_tokens, LAYOUT.page_tokens)
    with pytest.raises(BadInput):
        half.half.use(replace(FACTS, number=1, layout=layout, codec="int8-kc64"), (0,))
    assert half.matched(half.add("a", ids(330))) == (320, True)


def test_a_load_is_over_when_every_rank_has_reported_and_brings_what_the_worst_did(store: EmbeddedStore) -> None:
    half = stored_half(store, ranks=3)
    request = half.admitted("a", ids(330))
    orders = half.step()
    half.loaded(orders, rank=2)
    half.loaded(orders, 128, rank=0)
    assert half.half._loads and store.usage().leases == 1
    half.loaded(orders, 192, rank=1)
    assert not half.half._loads
    told = half.told(request)
    assert told["hits"] == {"dram": 128} and told["misses"]["corrupt"] == 192 and told["load_ms"] == 4.0
    wait_until(lambda: not store.usage().leases)


def test_a_load_that_failed_and_gives_its_pages_back_is_admitted_anew_without_the_store(store: EmbeddedStore) -> None:
    half = stored_half(store)
    request = half.admitted("a", ids(330))
    half.loaded(half.step(), 0)
    assert half.admit(request, tokens=330) == 0
    told = half.told(request)
    assert told["hits"] == {} and told["misses"]["corrupt"] == 320


def test_a_request_that_comes_again_is_looked_up_with_what_it_generated(store: EmbeddedStore) -> None:
    half = Half(SharedStore(store), save="none")
    request = half.add("a", ids(100), more=100)
    assert half.admit(request, tokens=200) == 0
    request.known = 200
    put(store, request.stream)
    assert half.admit(request) == 192
    (order,) = half.step().loads
    assert (order.first_token, order.stop_token) == (0, 192)
    told = half.told(request)
    assert told["asked"] == 100 and sum(told["misses"].values()) == 100, "of its first admission"


def test_a_load_of_the_second_admission_that_fails_is_no_miss_of_the_first(store: EmbeddedStore) -> None:
    half = stored_half(store)
    request = half.admitted("a", ids(330))
    half.loaded(half.step())
    half.admit(request)
    half.loaded(half.step(), 64)
    assert half.told(request)["hits"] == {"dram": 320}


def test_an_engine_that_counts_on_tokens_hears_of_a_lease_that_is_gone(store: EmbeddedStore) -> None:
    half = stored_half(store)
    request = half.add("a", ids(330))
    assert half.matched(request) == (320, True)
    half.half.refuse(MissReason.AUDIT, "drifted")
    half.half.allocated("a", [half.pages(10)], 320)
    (order,) = half.step().loads
    assert order.ticket == b"" and order.stop_token == 320, "an order that fails"


def test_a_load_that_failed_says_nothing_of_pages_that_are_another_loads_by_now(store: EmbeddedStore) -> None:
    """A step ahead: its request is given up, and its pages are loaded into anew, before that it failed is known."""
    facts = named_of(LAYOUT, codec="int8-kc64")
    half = Half(SharedStore(store), facts=facts, load="sync")
    handle = half.half.opener.now()
    assert handle is not None and handle.put(ids(320), plausible_pages(LAYOUT, 5)).stored == 5
    one, other = half.add("a", ids(330)), half.add("b", ids(330))
    half.admit(one)
    first = half.step(one)
    half.told(one)
    assert half.matched(other) == (320, False)
    half.half.allocated("b", one.tables, 320)
    second = half.step(other)
    half.loaded(first, 0)
    half.loaded(second)
    assert half.half._plan.exact_runs(one.tables, 0, 5) == [], "they hold what the second one restored"


@pytest.mark.parametrize(
    ("mode", "others", "ranks", "waits", "is_here"),
    [
        ("async", 0, 1, False, False),
        ("async", 1, 1, False, False),
        ("sync", 1, 1, True, True),
        ("sync", 0, 2, True, False),
        ("layerwise", 1, 1, True, False),
        ("auto", 0, 1, True, True),
    ],
)
def test_when_a_load_is_waited_for_and_where_one_worker_may_read_with_the_schedulers_lease(
    store: EmbeddedStore, mode: str, others: int, ranks: int, waits: bool, is_here: bool
) -> None:
    half = stored_half(store, load=mode, ranks=ranks)
    busy = [half.add(f"o{number}", ids(50, 3000)) for number in range(others)]
    for one in busy:
        half.admit(one, tokens=50)
    half.step(*busy)
    request = half.add("a", ids(330))
    assert half.matched(request) == (320, not waits)
    half.half.allocated("a", [half.pages(10)], 320)
    (order,) = half.step(*busy).loads
    assert (order.waits, order.layerwise) == (waits, mode == "layerwise")
    assert (order.here is not None) == is_here and order.ticket
    for rank in range(ranks):
        half.loaded(StepPlan(loads=[order]), rank=rank)
    half.told(request)
    wait_until(lambda: not store.usage().leases)


# Saves ---------------------------------------------------------------------------------------------------------------


def test_blocks_are_offered_as_they_are_complete_and_only_accepted_tokens(store: EmbeddedStore) -> None:
    half = Half(SharedStore(store))
    request = half.admitted("a", ids(150), more=100, tokens=256)
    assert request.due == 64
    assert [half.step(request, upto=63).saves, request.due] == [[], 64]
    (first,) = half.step(request, upto=100).saves
    assert (first.first_token, len(first.keys), first.tables[0].pages) == (0, 32, request.tables[0][:2])
    assert request.due == 128
    (second,) = half.step(request, upto=150).saves
    assert (second.first_token, len(second.keys)) == (64, 64) and request.due == 192
    request.known = 200
    (third,) = half.step(request, upto=300).saves
    assert (third.first_token, third.tables[0].first) == (128, 4) and third.tables[0].pages == request.tables[0][4:6]
    assert third.keys == b"".join(handle_of(store).hashed(request.stream[:192]).keys)


@pytest.mark.parametrize(
    ("settings", "facts", "blocks"),
    [
        ({}, RequestSpec(), 3),
        ({"save": "prompt"}, RequestSpec(), 2),
        ({"save": "none"}, RequestSpec(), 0),
        ({}, RequestSpec(saves=False), 0),
        ({}, RequestSpec(refused=MissReason.UNSUPPORTED, detail="no"), 0),
        ({}, RequestSpec(reads=False), 3),
    ],
)
def test_what_is_offered_is_what_was_wanted(
    store: EmbeddedStore, settings: dict[str, Any], facts: RequestSpec, blocks: int
) -> None:
    half = Half(SharedStore(store), **settings)
    request = half.admitted("a", ids(150), facts, more=60, tokens=224)
    orders = half.step(request).saves
    request.known = 210
    orders += half.step(request).saves
    assert sum(len(order.tables[0].pages) * PAGE // 64 for order in orders) == blocks
    if blocks < 3:
        assert request.due >= NEVER or not blocks, "and nobody asks again"
    told = half.told(request)
    assert sum(told["misses"].values()) == 150
    if facts.refused:
        assert told["misses"] == {"unsupported": 150} and told["detail"] == "no"


def test_what_was_dropped_is_offered_again_and_what_is_held_is_not(store: EmbeddedStore) -> None:
    half = Half(SharedStore(store))
    half.half.announce(lambda request, number: (request.request_id, number))
    request = half.admitted("a", ids(400), tokens=400)
    half.saved(half.step(request, upto=128), 0, 0, dropped=True)
    orders = half.step(request, upto=192)
    assert orders.saves[0].first_token == 0
    half.saved(orders, 3, 3)
    told = [(one.block, one.came, one.went) for one in half.half.announced.take()]
    assert told == [(("a", number), HitTier.DRAM, None) for number in range(3)]
    orders = half.step(request, upto=320)
    assert orders.saves[0].first_token == 192
    half.saved(orders, 4, 1, reason=MissReason.QUOTA)
    assert half.step(request, upto=384).saves[0].first_token == 256
    told = half.told(request)
    assert told["put_reasons"] == {"quota": 1} and told["saved_blocks"] == 4
    counts = half.half.take_counts()
    assert counts["saved_blocks"] == 4 and counts["dropped_saves"] == 1


def test_a_save_of_several_ranks_holds_what_all_of_them_hold(store: EmbeddedStore) -> None:
    half = Half(SharedStore(store), ranks=2)
    request = half.admitted("a", ids(400), tokens=400)
    (order,) = half.step(request, upto=192).saves
    for rank, held, reason in ((1, 3, None), (0, 1, MissReason.QUOTA)):
        report = SaveReport(order.number, order.request, rank, held, held, 0.004, reason=reason)
        half.half.reported(StepReports(saves=[report]))
    assert half.step(request, upto=256).saves[0].first_token == 64
    told = half.told(request)
    assert told["saved_blocks"] == 3 and told["put_reasons"] == {"quota": 1}


# When it ends --------------------------------------------------------------------------------------------------------


def drifted(half: Half, request: Request) -> StepReports:
    """What is reported of a request that is held out and whose block is another one."""
    half.matched(request)
    half.half.allocated(request.request_id, request.tables, 0)
    (order,) = wait_until(lambda: half.step(request).saves)
    return compared(order, DRIFTED)


def compared(order: SaveOrder, result: AuditResult) -> StepReports:
    assert order.ticket
    return StepReports(saves=[SaveReport(order.number, order.request, 0, 0, 0, 0.0, results=(result,))])


def test_after_drift_what_comes_is_a_miss_and_what_runs_goes_on(store: EmbeddedStore) -> None:
    half = stored_half(store, audit=1.0)
    running = half.admitted("r", ids(200, 1000), more=200, tokens=400)
    (save,) = half.step(running).saves
    held_out = half.add("a", ids(330))
    held_out.tables = [half.pages(11)]
    half.half.reported(drifted(half, held_out))
    assert half.half.take_counts()["audited_drifted"] == 1
    late = half.add("b", ids(330))
    assert half.matched(late) == (0, False)
    half.half.allocated("b", [[1, 2, 3]], 0)
    running.known = 300
    orders = half.step(running, late)
    assert save.number in orders.cancelled_saves, "its pages are somebody else's now"
    assert orders.saves == [] and running.due == NEVER
    told = half.told(late)
    assert told["misses"] == {"audit": 330} and "is not what this engine computes" in told["detail"]
    half.saved(StepPlan(saves=[save]), 3, 3)
    assert half.told(running)["saved_blocks"] == 3 and half.told(held_out) is not None
    wait_until(lambda: not store.usage().leases)
    half.half.renamed(1)
    assert half.half.wait_open(SOON_SECONDS)
    assert "audit" not in half.told(half.add("n", ids(330)))["misses"], "other weights end a drift"


def no_tokens(first: int, stop: int) -> list[int]:
    raise RuntimeError("they cannot be had any more")


def test_a_fault_ends_the_stores_use_and_not_the_engine_with_one_line(
    store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    half = stored_half(store)
    sound = half.admitted("s", ids(200, 1000), more=200, tokens=400)
    (save,) = half.step(sound).saves
    with caplog.at_level(logging.INFO, "engine_adapter"):
        for name in "ab":
            broken = Request(name, ids(330), 330, None, known=330)  # type: ignore[arg-type]
            broken.token_ids = no_tokens  # type: ignore[method-assign]
            half.half.added(broken, RequestSpec())
            assert half.half.matched(name, 0) == (0, False)
            half.half.allocated(name, [[1, 2, 3]], 0)
            half.step(broken)
            told = half.told(broken)
            assert told is not None and sum(told["misses"].values()) == 330
    assert [record.levelname for record in caplog.records] == ["ERROR"], caplog.text
    sound.known = 300
    orders = half.step(sound)
    assert orders.saves == [] and sound.due == NEVER
    half.saved(StepPlan(saves=[save]), 3, 3)
    late = half.add("late", ids(330))
    assert half.matched(late) == (0, False)
    assert half.told(late)["misses"] == {"disabled": 330}
    assert "RuntimeError" in half.half._refused[1]  # type: ignore[index]


def test_a_fault_while_a_block_is_offered_ends_the_stores_use(store: EmbeddedStore) -> None:
    half = Half(SharedStore(store))
    broken = half.admitted("a", ids(130), more=200, tokens=330)
    broken.token_ids = no_tokens  # type: ignore[method-assign]
    broken.known = 200
    assert half.step(broken).saves == [] and broken.due == NEVER
    assert half.told(half.add("b", ids(100)))["misses"] == {"disabled": 100}


def test_weights_that_were_changed_are_another_namespace(store: EmbeddedStore) -> None:
    half = stored_half(store)
    early, waiting = half.add("a", ids(200, 1000), more=100), half.add("w", ids(330))
    half.admit(early, tokens=300)
    first = half.step(early)
    assert first.namespace == FACTS
    assert half.matched(waiting)[0] == 320
    half.half.renamed(17)
    assert half.half.wait_open(SOON_SECONDS)
    wait_until(lambda: not store.usage().leases)
    early.known = 300
    orders = half.step(early)
    assert (orders.namespace.number, orders.namespace.weights_epoch) == (1, 17)
    assert orders.saves == [] and early.due == NEVER and half.step().namespace is None
    assert half.matched(waiting) == (0, False)
    half.saved(first, 3, 3)
    assert half.told(waiting)["misses"] == {"disabled": 330}
    late = half.add("l", ids(330))
    assert half.admit(late, tokens=330) == 0, "nothing is stored under these weights"
    (save,) = half.step(late).saves
    assert save.namespace == 1
    half.half.allocated("x", [late.tables[0][:1]], 0)
    assert half.step().cancelled_saves == [save.number]


def test_before_a_worker_has_spoken_nothing_is_asked(store: EmbeddedStore) -> None:
    half = PagedScheduler(
        ConnectorSettings.of({"url": "unix:none"}), lambda: SharedStore(store), float, float, lambda _: None
    )
    request = Request("a", ids(100), 100, None, known=100)  # type: ignore[arg-type]
    half.added(request, RequestSpec())
    assert half.matched("a", 0) == (0, False) and not half.wait_open(0.0)
    half.allocated("a", [[1, 2, 3, 4]], 0)
    assert half.step({"a"}, [], [], StepWork((), 1)).namespace is None
    half.renamed(3)
    told: Any = half.finished("a")
    assert told["misses"] == {"disabled": 100} and half.block_tokens == 0
    assert half.finished("a") is None and half.matched("a", 0) == (0, False), "it is not there any more"
    half.close()


def state_of(name: str, *, is_admitted: bool = True) -> RequestState:
    request: Any = SimpleNamespace(request_id=name, num_prompt_tokens=1)
    return RequestState(request, RequestSpec(), Account.missed(MissReason.ABSENT, 1, 64), is_admitted=is_admitted)


class Outcomes:
    """What became of requests, as a namespace is told of it."""

    def __init__(self) -> None:
        self.told: list[RequestTold] = []
        self.news = RequestNews(self.report)

    def report(self) -> None:
        namespace: Any = SimpleNamespace(tell=lambda requests, savings, seconds: self.told.extend(requests))
        self.news.tell(namespace, LEARNS_NOTHING, 1, 0.0, 0.0)


def test_what_no_further_step_reports_a_timer_does_and_the_end() -> None:
    outcomes, burst = Outcomes(), [str(number) for number in range(100)]
    for name in burst:
        outcomes.news.add(state_of(name))
    wait_until(lambda: len(outcomes.told) == 100)
    outcomes.news.add(state_of("last"))
    outcomes.news.close()
    assert [one.request for one in outcomes.told] == [*burst, "last"]


def test_the_tokens_of_a_request_that_runs_on_are_reported_once() -> None:
    outcomes, long, waits = Outcomes(), state_of("long"), state_of("waits", is_admitted=False)
    for _ in range(3):
        outcomes.news.add_running([long, waits])
        outcomes.report()
    long.saved_blocks = 7
    for state in (long, waits):
        outcomes.news.add(state)
    outcomes.report()
    told = [("long", 0, True), ("long", 7, False), ("waits", 0, True)]
    assert [(one.request, one.saved_blocks, one.counts) for one in outcomes.told] == told


def test_a_request_whose_name_is_no_text_is_told_all_the_same() -> None:
    """A client may give one with half of a pair of surrogates, which no message can carry."""
    outcomes = Outcomes()
    outcomes.news.add(state_of("\ud800" + "x" * 400))
    outcomes.news.close()
    (one,) = outcomes.told
    assert one.request.startswith("?x") and m.pack(m.Request(1, m.Tell([one])))
