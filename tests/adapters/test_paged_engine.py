"""The two halves of a connector in a small engine, through a real store: no page that is read is ever wrong, and no
block that is stored.

An engine that draws what happens next: prompts that share prefixes, chunks, preemption, requests that are given up,
loads that fail half-way, saves that wait until their pages are somebody else's. That it would find what is wrong is
shown by taking one precaution out at a time.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest
import torch

import kvstore
from engine_adapter.paged import worker as paged_worker
from engine_adapter.paged.requests import RequestSpec
from engine_adapter.paged.step_plan import NamespaceSpec, StepPlan, StepReports
from kvstore.block.account import HitTier
from kvstore.block.identity import Prompt
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from paged_engine import SECONDS, Faults, PagedEngine, Request, Shape, SharedStore, Status, wrong_blocks
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, prompt_values, random_pages, small_layout

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = int(os.environ.get("PAGED_SEED", "0")) or SystemRandom().randrange(1 << 30)
STEPS = int(os.environ.get("PAGED_STEPS", "300"))
HISTORIES = 40
"""Drawn for what is wrong, at most: the rarest shows in two of five, so that it stays hidden once in 10^8 runs."""
INT8_ERROR = 1 / 250
"""Numbers lie in 0 .. 1, and half a step of 8 bits is half of 1 / 127 at most; rounded up to what bfloat16 adds."""


def engine_at(store: EmbeddedStore, shape: Shape, random: Random, **options: Any) -> PagedEngine:
    return PagedEngine(shape, lambda session: SharedStore(store), random, **options)


@dataclass
class Drawn:
    """What was asked of an engine, and in which namespace: streams, by weights."""

    streams: list[tuple[int, list[int]]]
    facts: list[NamespaceSpec]


def drive(engine: PagedEngine, random: Random, steps: int, evict: Callable[[int], object], weights: bool) -> Drawn:
    """Requests come and go for so many steps. Then all that is left is brought to its end."""
    stems = [[random.randrange(997) for _ in range(500)] for _ in range(4)]
    drawn = Drawn([], [engine.half._facts])
    asked: list[Request] = []
    for number in range(steps):
        if len(engine.requests) < 9 and random.random() < 0.4:
            prompt = random.choice(stems)[: random.randrange(1, 450)]
            if asked and random.random() < 0.3:  # a conversation goes on
                prompt = random.choice(asked).stream[:500]
            prompt = prompt + [random.randrange(997) for _ in range(random.randrange(1, 100))]
            room = (engine.shape.pages - 1) // len(engine.shape.windows) * engine.shape.page_tokens
            asked.append(engine.add(f"r{number}", prompt[: room - 70], random.choice([1, 3, 20, 70])))
            drawn.streams.append((engine.weights, asked[-1].stream))
        turned_back = [one for one in engine.turned_back if one.status is Status.RUNNING]
        if turned_back and random.random() < 0.3:  # given up before it has computed what did not come
            engine.abort(random.choice(turned_back))
        chance = random.random()
        if engine.requests and chance < 0.04:
            engine.abort(random.choice(list(engine.requests.values())))
        elif chance < 0.08:
            engine.forget()
        elif chance < 0.11:
            evict(random.randrange(1, 6))
        elif chance < 0.15:
            random.choice([engine.gate.open, engine.gate.shut])()
        elif chance < 0.155 and weights:
            engine.change_weights()
            assert engine.half.wait_open(30)
            drawn.facts.append(engine.half._facts)
        elif chance < 0.5:
            engine.gate.let(random.randrange(1, 3))
        engine.step()
    engine.gate.open()
    engine.run()
    engine.settle()
    return drawn


def check_accounts(engine: PagedEngine) -> dict[str, Any]:
    """Of every request: where each token of its prompt came from. All that was counted."""
    counts = engine.half.take_counts()
    assert counts["requests"] == len(engine.over)
    assert sum(tokens for name, tokens in counts.items() if name.startswith(("hit_", "miss_"))) == counts["asked"]
    assert all(request.account for request in engine.over)
    return counts


def check_stored(store: Any, drawn: Drawn, error: float) -> int:
    """Everything that is stored is right; how many blocks that is."""
    blocks = 0
    for number, facts in enumerate(drawn.facts):
        handle = store.namespace(
            model=facts.model, layout=facts.layout, codec=facts.codec, weights_epoch=facts.weights_epoch
        )
        for weights, stream in drawn.streams:
            if weights <= number:
                count, wrong = wrong_blocks(handle, stream, number, error)
                assert not wrong, f"what is stored of tokens {wrong} is not their KV"
                blocks += count
    return blocks


SHAPES = {
    "as it is": Shape(),
    "ahead": Shape(ahead=1, form="planes-0-tokens"),
    "ahead, pages turned": Shape(ahead=1, page_tokens=16, form="heads-first, turned"),
    "ahead, pages in pieces": Shape(ahead=1, kernel_pages=2, form="heads-first"),
    "pages of a block": Shape(pages=24, page_tokens=64, form="planes-1-heads"),
    "blocks of a page": Shape(pages=14, page_tokens=128, form="slabs-k-across"),
    "no cache of its own": Shape(own_cache=False, dtype="bfloat16"),
    "8 bits": Shape(codec="int8-kc64", error=INT8_ERROR),
    "8 bits, ahead": Shape(codec="int8-kc64", error=INT8_ERROR, ahead=1),
    "two ranks": Shape(ranks=2),
    "two ranks, ahead": Shape(ranks=2, ahead=1),
    "nothing but windows": Shape(windows=(100,), own_cache=False),
    "windows": Shape(pages=80, windows=(0, 20), own_cache=False),
    "windows, ahead": Shape(pages=80, windows=(0, 100), own_cache=False, ahead=1),
}


ON_A_GPU = {
    "on a GPU": Shape(device="cuda"),
    "on a GPU, ahead": Shape(device="cuda", ahead=1, form="planes-0-tokens"),
    "on a GPU, as vLLM's": Shape(device="cuda", ahead=1, page_tokens=16, form="heads-first, turned"),
    "on a GPU, 8 bits": Shape(device="cuda", codec="int8-kc64", error=INT8_ERROR, ahead=1),
}
SHAPES |= ON_A_GPU if torch.cuda.is_available() else {}

MODES = ("auto", "async", "sync", "layerwise")
ALL_MODES = [(name, mode) for name, shape in SHAPES.items() for mode in (MODES if not shape.ahead else ["async"])]
"""For `PAGED_ALL=1`; otherwise each shape has one or two of the modes. An engine that schedules ahead has loads beside
its steps only."""
FEW_MODES = [(name, mode) for name, mode in ALL_MODES if SHAPES[name].ahead] + [
    (name, mode)
    for at, (name, mode) in enumerate((name, mode) for name, mode in ALL_MODES if not SHAPES[name].ahead)
    if at % 5 in (0, 3)
]


@pytest.mark.parametrize(("name", "load"), ALL_MODES if os.environ.get("PAGED_ALL") else FEW_MODES)
def test_no_page_that_is_read_is_wrong_and_no_block_that_is_stored(name: str, load: str, tmp_path: Path) -> None:
    print(f"PAGED_SEED={SEED}")
    shape, random = SHAPES[name], Random(f"{SEED} {name} {load}")
    audit = random.choice([0.0, 0.3])
    faults = Faults(random.randrange(1000), failing=0.15, pause=0.003)
    with Sidecar(tmp_path, dram="8MiB") as sidecar:
        engine = PagedEngine(
            shape,
            sidecar.client,
            random,
            faults=faults,
            session="5e" * 16,
            load=load,
            audit=audit,
            load_threads=random.choice([1, 2]),
            save_patience=random.choice([0.0, 0.0, 0.02]),
        )
        with engine:
            drawn = drive(engine, random, STEPS, sidecar.store.evict, weights=random.random() < 0.5)
            while not engine.half._counts["hit_dram"] and engine.steps < 20 * STEPS:  # few may find anything
                more = drive(engine, random, STEPS, sidecar.store.evict, weights=False)
                drawn = Drawn(drawn.streams + more.streams, drawn.facts)
            counts = check_accounts(engine)
            assert engine.half._refused is None, "no fault, and nothing has drifted"
        with sidecar.client() as client:
            blocks = check_stored(client, drawn, shape.error)
        told = f"{counts}, {engine.preemptions} times preempted, {blocks} blocks at the end, {engine.steps} steps"
        print(told)
        assert counts["saved_blocks"] > 0 and counts["hit_dram"] > 0, told


# It finds what is wrong ----------------------------------------------------------------------------------------------


def on_half(**changed: Any) -> Callable[[PagedEngine], object]:
    return lambda engine: vars(engine.half).update(changed)


def on_workers(**changed: Any) -> Callable[[PagedEngine], object]:
    return lambda engine: [vars(worker).update(changed) for worker in engine.workers]


def no_fences(engine: PagedEngine) -> None:
    engine.half._plan.taken = lambda pages: []  # type: ignore[method-assign]


def no_growth(engine: PagedEngine) -> None:
    step = engine.half.step
    engine.half.step = lambda running, due, grown, work: step(running, due, [], work)  # type: ignore[method-assign]


def no_second_admission(engine: PagedEngine) -> None:
    allocated = engine.half.allocated

    def once(name: str, tables: Any, tokens: int) -> None:
        allocated(name, [] if name in engine.half._loads._parked else tables, tokens)

    engine.half.allocated = once  # type: ignore[method-assign]


def stale_saves(engine: PagedEngine) -> None:
    for worker in engine.workers:

        def start(worker: Any = worker, start: Any = worker.start_saves) -> None:
            worker._orders.failures_seen = {worker._rank: worker._failures}
            start()

        worker.start_saves = start  # type: ignore[method-assign]


WRONGS: dict[str, tuple[Callable[[PagedEngine], object], Shape, str]] = {
    "no fences": (no_fences, Shape(), "auto"),
    "pages of a growing request are not fenced": (no_growth, Shape(), "auto"),
    "pages of a second admission are not fenced": (no_second_admission, Shape(), "async"),
    "a fence waits for nothing": (on_workers(_fence=lambda numbers: None), Shape(ahead=1), "async"),
    "saved behind a load that failed": (stale_saves, Shape(), "sync"),
    "pages that a failed load left behind stay cached": (on_half(take_invalid_pages=set), Shape(), "sync"),
    "pages that did not come are not named": (on_workers(_mark_invalid=lambda report, order: None), Shape(), "async"),
    "decoded numbers are encoded again": (on_half(_is_exact=True), Shape(codec="int8-kc64", error=INT8_ERROR), "sync"),
}


@pytest.mark.parametrize("name", WRONGS)
def test_what_is_wrong_is_found(name: str, tmp_path: Path) -> None:
    """By the test above, with one precaution less."""
    print(f"PAGED_SEED={SEED}")
    break_it, shape, load = WRONGS[name]
    for attempt in range(HISTORIES):
        random = Random(f"{SEED} {name} {attempt}")
        faults = Faults(attempt, failing=0.3, pause=0.003)
        with (
            kvstore.embedded(str(tmp_path / str(attempt)), dram="8MiB") as store,
            engine_at(store, shape, random, faults=faults, load=load) as engine,
        ):
            break_it(engine)
            try:
                drawn = drive(engine, random, STEPS, store.evict, weights=False)
                check_stored(store, drawn, shape.error)
            except AssertionError as error:
                assert any(word in str(error) for word in ("not its prefix's", "not their KV", "are saved")), error
                return
    raise AssertionError(f"nothing was found in {HISTORIES} histories")


# One thing at a time -------------------------------------------------------------------------------------------------


def test_a_page_that_is_given_away_while_its_save_waits_is_not_read(store: EmbeddedStore) -> None:
    with engine_at(store, Shape(pages=14), Random(1)) as engine:
        engine.gate.shut()
        engine.ask("a", ids(300))
        wait_until(lambda: bool(engine.workers[0]._saving))  # it is at the gate
        engine.ask("b", ids(300, 500))
        engine.gate.open()
        engine.settle()
        assert engine.half.take_counts()["dropped_saves"] == 1
        assert wrong_blocks(engine.handle, ids(300), 0, 0.0)[1] == []
        assert wrong_blocks(engine.handle, ids(300, 500), 0, 0.0) == (4, [])


def test_a_decoded_block_is_not_put_again(store: EmbeddedStore) -> None:
    """Evicted from the store while an engine has its decoded pages: it is not stored from those."""
    shape = Shape(codec="int8-kc64", error=INT8_ERROR)
    with engine_at(store, shape, Random(1)) as one:
        one.ask("a", ids(260))
        one.settle()
        exact = stored_values(one.handle, ids(256))
    with engine_at(store, shape, Random(2), save="all") as other:
        loaded = other.ask("b", ids(330))
        other.settle()
        assert loaded.account["hits"] == {"dram": 256}
        assert store.evict(100) >= 5
        own = other.ask("c", ids(400))
        other.settle()
        assert own.account["hits"] == {"engine": 320}
        assert other.handle.match(ids(400)).blocks == 0, "nothing of what was decoded"
        other.forget()
        other.ask("d", ids(400))
        other.settle()
        assert other.handle.match(ids(400)).blocks == 6, "computed anew, and stored"
        assert torch.equal(stored_values(other.handle, ids(256)), exact)


def stored_values(handle: NamespaceHandle, stream: list[int]) -> torch.Tensor:
    """K of the second layer, of a prompt that is stored as a whole."""
    pages = blank_pages(handle.layout, len(stream) // 64, 64)
    with handle.lease(handle.match(stream)) as lease:
        assert handle.get(lease, pages).tokens == len(stream)
    return prompt_values(pages, 1, 0, 0, len(stream))


def test_what_was_evicted_meanwhile_is_offered_again_with_the_next_block(store: EmbeddedStore) -> None:
    with engine_at(store, Shape(pages=60), Random(1)) as engine:
        request = engine.add("a", ids(330), 200)
        while request.known < 390:
            engine.step()
        engine.drain()
        wait_until(lambda: not engine.is_saving)
        assert engine.handle.match(request.stream).blocks == 6
        assert store.evict(3) == 3 and engine.handle.match(request.stream).blocks == 3
        while request.status is not Status.OVER:
            engine.step()
            wait_until(lambda: not engine.is_saving)
        assert engine.handle.match(request.stream).blocks == len(request.stream) // 64


WINDOWS = pytest.mark.parametrize("windows", [(20,), (100,), (0, 100), (100, 40)])


@WINDOWS
def test_prompts_longer_than_every_window_are_loaded_whole(
    store: EmbeddedStore, windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the engine has only the last pages. However slow the machine: what is given up is nobody's hit."""
    monkeypatch.setattr(paged_worker, "WINDOW_FENCE_SECONDS", SECONDS)
    shape = Shape(pages=80, windows=windows, own_cache=False)
    with engine_at(store, shape, Random(1)) as one:
        first = one.ask("a", ids(300), 60)
        one.settle()
        count, wrong = wrong_blocks(one.handle, first.stream, 0, 0.0)
        # Of a window shorter than a page, pages are gone before a block that is generated is complete.
        assert not wrong and count == (4 if max(windows) == 20 else 5)
    with engine_at(store, shape, Random(2)) as other:
        second, third = other.ask("b", ids(300)), other.ask("c", [*first.stream[:339], 5])
        assert other.half.take_counts().get("failed_loads") is None
    assert second.account["hits"] == {"dram": 256} and third.account["hits"] == {"dram": 64 * count}


@WINDOWS
def test_blocks_that_are_offered_when_their_pages_are_gone_are_not_others(
    store: EmbeddedStore, windows: tuple[int, ...]
) -> None:
    """A save is given up, its pages leave the window, and the blocks are offered again with what is left of them."""
    shape = Shape(pages=80, windows=windows, own_cache=False)
    with engine_at(store, shape, Random(1)) as engine:
        (worker,) = engine.workers
        worker._save_bytes = 0
        request = engine.add("a", ids(200), 200)
        while request.known < 230:
            engine.step()
        worker._save_bytes = 1 << 30
        engine.run()
        engine.settle()
        assert set(request.account["put_reasons"]) == {"busy", "incomplete"}
        assert wrong_blocks(engine.handle, request.stream, 0, 0.0) == (0, [])


def test_orders_and_reports_name_no_tokens(store: EmbeddedStore) -> None:
    token = 123456789
    with engine_at(store, Shape(), Random(1)) as engine:
        engine.ask("a", [token] * 200)
        engine.settle()
        engine.forget()
        assert engine.ask("b", [token] * 200).account["hits"] == {"dram": 192}
        told = [pickle.loads(crossed) for crossed in engine.crossed]
        for kind in ("saves", "loads"):
            assert {type(one) for one in told if getattr(one, kind)} == {StepPlan, StepReports}
        for crossed in engine.crossed:
            assert token.to_bytes(4, "little") not in crossed and token.to_bytes(4, "big") not in crossed
            assert str(token).encode() not in crossed


@pytest.mark.parametrize("load", MODES)
def test_a_load_that_fails_is_computed_and_counted(store: EmbeddedStore, load: str) -> None:
    with engine_at(store, Shape(), Random(1)) as engine:
        engine.ask("a", ids(300))
        engine.settle()
    with engine_at(store, Shape(), Random(1), faults=Faults(3, failing=1.0), load=load) as other:
        request = other.ask("b", ids(300))
        lost = request.account["misses"].get("corrupt", 0)
        assert lost > 0 and lost + request.account["hits"].get("dram", 0) == 256, request.told
        counts = other.half.take_counts()
        assert counts["failed_loads"] == counts["loads"] == 1 and counts["miss_corrupt"] == lost
        assert counts.get("hit_dram", 0) == 256 - lost
        other.settle()


@pytest.mark.parametrize("is_broken", [False, True])
def test_pages_that_a_step_waits_for_are_nobody_elses_until_they_are_there(
    store: EmbeddedStore, is_broken: bool
) -> None:
    """The engine names them at once. The request that loads them comes with another one, and is given up when they did
    not come: the other one must not go on behind them."""
    with engine_at(store, Shape(), Random(1)) as one:
        one.ask("a", ids(330))
        one.settle()
    with engine_at(store, Shape(), Random(2), faults=Faults(3, failing=1.0), load="sync") as other:
        if is_broken:
            other.half._loads._is_unsure = lambda state, local_tokens: False  # type: ignore[method-assign]
        first, second = (other.add(name, [*ids(320), 7]) for name in "bc")
        while not other.turned_back:
            other.step()
        assert (second in other.turned_back) == is_broken
        other.abort(first)
        if is_broken:
            with pytest.raises(AssertionError, match="not its prefix's"):
                other.run()
        else:
            other.run()


# Who wants blocks to be kept has them kept, also where they were stored before: loaded, or held by the engine ---------

BLOCKS = 3
RENEWED = {"as it is": Shape(), "8 bits": Shape(codec="int8-kc64", error=1 / 250), "two ranks": Shape(ranks=2)}


@pytest.mark.parametrize("wish", [RequestSpec(ttl=600.0), RequestSpec(priority=100)])
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("name", RENEWED)
def test_a_wish_holds_for_what_is_stored_already(name: str, forgets: bool, wish: RequestSpec, tmp_path: Path) -> None:
    shape = RENEWED[name]
    with kvstore.embedded(str(tmp_path), dram="64MiB") as store:
        engine = PagedEngine(shape, lambda session: SharedStore(store), Random(1), session="5e" * 16)
        with engine:
            prompt = ids(BLOCKS * engine.layout.block_tokens + 5)
            for number, facts in enumerate((None, None, wish)):
                request = engine.ask(f"r{number}", prompt, 1, facts)
                engine.settle()
                assert (store.usage().dram_retained_bytes > 0) == (facts is wish)
                if forgets:
                    engine.forget()
            tier = HitTier.DRAM if forgets else HitTier.ENGINE
            assert request.account["hits"] == {str(tier): BLOCKS * engine.layout.block_tokens}
            renewed = store.usage().dram_retained_bytes
            engine.ask("new", ids(len(prompt), start=400), 1, wish)
            engine.settle()
            assert store.usage().dram_retained_bytes == 2 * renewed, "as much as of one that is stored with it"


def test_a_renewal_stores_nothing_and_says_how_much_there_is(store: EmbeddedStore) -> None:
    layout = small_layout()
    handle = store.namespace(model=MODEL, layout=layout)
    handle.put(ids(128), random_pages(layout, 2))
    assert handle.renew(handle.hashed(ids(192)), 600.0) == 2
    assert handle.renew(handle.hashed(ids(64, start=500)), 600.0) == 0
    assert handle.renew(Prompt(0, []), 600.0) == 0
    usage = store.usage()
    assert (usage.blocks, usage.reservations) == (2, 0)
