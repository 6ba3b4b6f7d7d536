"""Recurrent states beside KV in the halves of a connector, through a real store: each is of one place in a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch

from adapters.test_audit import EXACT
from adapters.test_paged_scheduler import Half
from engine_adapter.audit.blocks import compare_states
from engine_adapter.cost import StepWork
from engine_adapter.paged.pages import RegisteredGroup, layout_of, register
from engine_adapter.paged.requests import Boundary, Computed
from engine_adapter.paged.step_plan import LoadOrder, PageRun, SaveOrder, StepPlan
from engine_adapter.paged.worker import PagedWorker
from kvstore.block.account import MissReason
from kvstore.block.layout import Attention
from kvstore.block.pages import Pages
from kvstore.node import EmbeddedStore
from paged_engine import Request, SharedStore, named_of
from waiting import wait_until
from workbench import ids, plausible_pages

PAGES, PAGE = 20, 64
MEMORY = [torch.zeros(PAGES, PAGE, 1, 16), torch.zeros(PAGES, 1, 1, 96, dtype=torch.int8)]
GROUPS = [
    RegisteredGroup("kv", {"a": MEMORY[0]}, 1, (8, 8), PAGE, PAGES),
    RegisteredGroup(
        "state",
        {"b": MEMORY[1]},
        1,
        (96,),
        PAGE,
        PAGES,
        0,
        Attention.STATE,
        PAGE,
        1,
        "",
        (("float32", 24),),
        "bfloat16",
    ),
]
PAGES_OF = register(GROUPS, 0, "", lambda *given: None)
STATE = Pages({1: [torch.zeros(1, 1, 1, 96, dtype=torch.uint8)]}, [0], PAGE)
FACTS = replace(
    named_of(layout_of([PAGES_OF.facts], 1, 0), PAGES_OF.facts.groups),
    states=layout_of([PAGES_OF.facts], 1, 0, states=True),
)


def half_at(
    store: EmbeddedStore, ends: Sequence[int] = (), start: int = 0, state: Pages = STATE, **settings: object
) -> Half:
    """A half at a store with five blocks of `ids` from `start` on, and states behind some of them."""
    half, prompt = Half(SharedStore(store), facts=FACTS, **settings), ids(320, start)
    handle = half.half.opener.now()
    assert handle.put(prompt, plausible_pages(handle.layout, 5)).reason is None
    for end in ends:
        states, key = half.half.opener.states, handle.hashed(prompt).keys[end - 1]
        assert states.handle.put(states.prompt_of(key), state).stored == 1
    return half


def passing(half: Half, *boundaries: Boundary) -> StepPlan:
    return half.half.step(set(), [], [], StepWork((), 0), boundaries)


@contextmanager
def working(store: EmbeddedStore) -> Iterator[PagedWorker]:
    worker = PagedWorker(PAGES_OF, lambda _: SharedStore(store), time.monotonic, load_threads=1, save_bytes=1 << 20)
    with closing(worker):
        worker.begin(StepPlan(namespace=FACTS))
        assert worker._opened(0, 30) is not None
        yield worker


@pytest.mark.parametrize(("ends", "hit"), [((), 0), ((2,), 128), ((1, 3), 192), ((3, 5), 320)])
def test_a_hit_ends_at_a_state(store: EmbeddedStore, ends: tuple[int, ...], hit: int) -> None:
    half = half_at(store, ends)
    request = half.add("a", ids(330))
    assert half.matched(request)[0] == hit
    assert half.half.parted_at("a") == (320 if hit < 320 else 0), "the next one finds both there"
    told = half.told(request)
    assert told["hits"].get("dram", 0) == hit and told["misses"].get("no_state", 0) == 320 - hit
    wait_until(lambda: not store.usage().leases)


def test_a_state_at_the_prompts_end_is_of_no_use(store: EmbeddedStore) -> None:
    """One token is computed at least, and no state can be cut."""
    half = half_at(store, (4, 5))
    request = half.add("a", ids(320))
    assert half.matched(request) == (256, True)
    half.half.allocated("a", [half.pages(5), [0, 0, 0, 17]], 256)
    (order,) = half.half.step(set(), [], [], StepWork((), 0)).loads
    assert order.state is not None and order.state.tables == (PageRun(0, [17]),) and len(order.tables[0].pages) == 4
    half.told(request)


def test_only_whole_states_of_whole_blocks_are_saved(store: EmbeddedStore) -> None:
    half = half_at(store)
    half.matched(half.add("a", ids(330)))
    for tokens, pages in ((300, {1: 5}), (320, {0: 5}), (384, {1: 5})):
        assert passing(half, Boundary("a", tokens, pages)).saves == [], "within a block, of no state, not accepted"
    (order,) = passing(half, Boundary("a", 320, {1: 5})).saves
    assert order.is_state and order.tables == (PageRun(0, [5]),)
    handle = half.half.opener.now()
    assert order.keys == handle.hashed(ids(320)).keys[-1]
    assert passing(half, Boundary("a", 320, {1: 5})).saves == [], "once"
    assert half.half.step(set(), [], [5], StepWork((), 0)).cancelled_saves == [order.number], "its page is wanted"


def test_states_that_are_stored_are_not_saved_again(store: EmbeddedStore) -> None:
    half = half_at(store, (5,))
    assert half.matched(half.add("a", ids(330)))[0] == 320
    assert passing(half, Boundary("a", 320, {1: 5})).saves == []


@pytest.mark.parametrize("has_state", [True, False])
def test_without_its_state_nothing_is_loaded(store: EmbeddedStore, has_state: bool) -> None:
    half = half_at(store)
    handle, states = half.half.opener.now(), half.half.opener.states
    prompt = handle.hashed(ids(320))
    with working(store) as worker:
        MEMORY[1][9], MEMORY[1][3] = 0, torch.randint(0, 100, (1, 1, 96), dtype=torch.int8)
        if has_state:
            save = SaveOrder(1, "s", 0, prompt.keys[4], 0, (PageRun(0, [3]),), None, 0, is_state=True)
            worker.begin(StepPlan(saves=[save]))
            worker.start_saves()
            wait_until(lambda: not (worker._saves or worker._saving))
        of_state = states.handle.lease(states.match_of(prompt.keys[4]))
        with of_state, handle.lease(handle.match(ids(320))) as lease:
            tables = (PageRun(0, [4, 5, 6, 7, 8]),)
            behind = LoadOrder(0, "l", 0, of_state.ticket(), 0, PAGE, (PageRun(0, [9]),), False)
            order = LoadOrder(2, "l", 0, lease.ticket(), 0, 320, tables, False, state=behind)
            report = worker._load(order, 0.0)
        assert report.tokens == (320 if has_state else 0) and (report.reason is None) == has_state
        assert torch.equal(MEMORY[1][3], MEMORY[1][9]) == has_state
    store.release_request("l")


@pytest.mark.parametrize("compares_state", [True, False])
def test_an_audit_that_compared_no_state_proves_nothing(store: EmbeddedStore, compares_state: bool) -> None:
    half = half_at(store, (5,), audit=0.001)
    left = half.half.choice.holdout.first_left
    request: Request = half.add("a", ids(330))
    assert half.matched(request) == (0, False)
    assert half.half.parted_at("a") == 320, "vLLM ends a step there"
    computed = Computed("a", 330, lambda: [list(range(1, 7)), [0, 0, 0, 0, 9]])
    boundaries = [Boundary("a", 320 if compares_state else 325, {1: 9})]
    orders = half.half.step({"a"}, [computed], [], StepWork((), 1), boundaries).saves
    orders = [order for order in orders if order.ticket]
    assert [order.is_state for order in orders] == [False, True][: 1 + compares_state]
    for order in orders:
        half.half._audited(order.number, (EXACT,))
    half.told(request)
    assert half.half.choice.holdout.first_left == left - compares_state


def sums(seed: int) -> list[torch.Tensor]:
    """Of a prompt's tokens, decaying: as states are behind 256 and 320 of them."""
    terms = torch.randn(320, 24, generator=torch.Generator().manual_seed(seed))
    return [(terms[:stop] * 0.99 ** torch.arange(stop, 0, -1)[:, None]).sum(0) for stop in (256, 320)]


PLANTED = ["right", "of the block before", "of another prompt", "off by four times what is allowed"]


@pytest.mark.parametrize("planted", PLANTED)
def test_the_first_audited_hit_finds_another_state(store: EmbeddedStore, planted: str) -> None:
    """20 of 20: nothing of that namespace is loaded from there on."""
    with working(store) as worker:
        for run in range(20):
            before, now = sums(run)
            MEMORY[1][9] = now.view(torch.int8)
            raw = {1: [now.view(torch.uint8)]}
            tensors, made_of = {1: PAGES_OF.facts.groups[1].tensors}, getattr(torch, PAGES_OF.facts.groups[1].made_of)
            allowed = compare_states(raw, raw, tensors, made_of, 320, "raw").allowed_error
            each = (now * (1 + allowed / 2), before, sums(run + 20)[1], now * (1 + 4 * allowed))
            stored = each[PLANTED.index(planted)].view(torch.uint8).view(1, 1, 1, 96)
            half = half_at(store, (5,), 1000 * run, Pages({1: [stored]}, [0], PAGE), audit=0.001)
            assert half.matched(half.add("a", ids(330, 1000 * run))) == (0, False)
            worker.begin(passing(half, Boundary("a", 320, {1: 9})))
            worker.start_saves()
            wait_until(lambda: not (worker._saves or worker._saving))
            reports = worker.take_reports()
            assert reports is not None and reports.saves[0].results
            half.half.reported(reports)
            assert (half.half._refused or [None])[0] is (None if planted == "right" else MissReason.AUDIT)
