"""A small engine with paged KV around the two halves of a connector: requests, pages, and steps in vLLM's order.

    schedule   running ones get pages (the last ones lose theirs) > waiting ones are matched and admitted > orders
    execute    each worker: begin > loads > forward > saves > what is over, reports
    output     failed loads > tokens > reports > parked requests whose loads are over        (a step later, if `ahead`)

A token's KV is a function of all tokens up to it, so what belongs into each page is known: the forward looks at every
page that it reads. Where one is wrong it writes wrong numbers, as attention would, and unless the step's output is
thrown away for a load that failed, that is the end of the test. Source: vLLM 0.32, v1/core/sched/scheduler.py.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random
from typing import Any

import numpy
import torch

from engine_adapter.cost import StepWork
from engine_adapter.paged.pages import EnginePages, RegisteredGroup, layout_of, register
from engine_adapter.paged.requests import Computed, RequestSpec
from engine_adapter.paged.scheduler import PagedScheduler
from engine_adapter.paged.settings import ConnectorSettings
from engine_adapter.paged.step_plan import GroupSpec, LoadOrder, LoadReport, NamespaceSpec, StepPlan, StepReports
from engine_adapter.paged.worker import PagedWorker
from kvstore.block.account import MissReason
from kvstore.block.layout import Attention, Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from waiting import wait_until
from workbench import blank_pages

HEADS, WIDTH = 2, 8
"""Of each layer, of all ranks."""
SECONDS = 60
"""Nothing takes longer."""
SLEEP_CYCLES = 200_000
"""Of a GPU, before each write: a tenth of a millisecond."""


# Pages -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How an engine lays a page. shape: of (pages, tokens, heads, width). planes: K and V as [pages, tokens, heads,
    width]. is_turned: axes 1 and 2 lie in memory in the other order."""

    shape: Callable[[int, int, int, int], tuple[int, ...]]
    planes: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    is_turned: bool = False

    def turned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers and shape [..., pages, axis 1, axis 2, axis 3], as they lie in this form's memory."""
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2) if self.is_turned else tensor


def _slabs(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pages, heads, tokens, both = tensor.shape
    rows = tensor.view(pages, heads, 2 * tokens, both // 2).permute(0, 2, 1, 3)
    return rows[:, :tokens], rows[:, tokens:]


def _across(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pages, heads, tokens, both = tensor.shape
    k = tensor.view(pages, heads, -1)[..., : tokens * both // 2].unflatten(2, (both // 2, tokens))
    return k.permute(0, 3, 1, 2), _slabs(tensor)[1]


FORMS: dict[str, Form] = {
    "heads-first": Form(lambda p, n, h, w: (p, h, n, 2 * w), lambda t: t.transpose(1, 2).chunk(2, -1)),
    "heads-first, turned": Form(lambda p, n, h, w: (p, h, n, 2 * w), lambda t: t.transpose(1, 2).chunk(2, -1), True),
    "tokens-first": Form(lambda p, n, h, w: (p, n, h, 2 * w), lambda t: t.chunk(2, -1)),
    "slabs": Form(lambda p, n, h, w: (p, h, n, 2 * w), _slabs),
    "slabs-k-across": Form(lambda p, n, h, w: (p, h, n, 2 * w), _across),
    "planes-0-tokens": Form(lambda p, n, h, w: (2, p, n, h, w), lambda t: t.unbind(0)),
    "planes-1-tokens": Form(lambda p, n, h, w: (p, 2, n, h, w), lambda t: t.unbind(1)),
    "planes-0-heads": Form(lambda p, n, h, w: (2, p, h, n, w), lambda t: t.transpose(2, 3).unbind(0)),
    "planes-1-heads": Form(lambda p, n, h, w: (p, 2, h, n, w), lambda t: t.transpose(2, 3).unbind(1)),
}


def packing_of(form: str) -> str:
    """What the adapter calls it: how it lies in memory is no part of a payload."""
    return form.removesuffix(", turned")


@dataclass(frozen=True)
class Shape:
    """An engine. windows: of each KV group, 0 for full attention. ahead: steps that are scheduled before the output of
    the last one is known. kernel_pages: to a page."""

    pages: int = 40
    page_tokens: int = 32
    form: str = "slabs"
    windows: tuple[int, ...] = (0,)
    layers_each: int = 2
    ranks: int = 1
    dtype: str = "float32"
    kernel_pages: int = 1
    ahead: int = 0
    budget: int = 256
    most_running: int = 6
    own_cache: bool = True
    codec: str = "raw"
    error: float = 0.0
    """How far a number may be off for the codec."""
    device: str = "cpu"
    """On any other one steps are put into a stream of the engine's own, and each is long on its way."""


def hashes_of(tokens: Sequence[int], weights: int = 0, before: int | None = None) -> numpy.ndarray:
    """Behind each token, of all tokens up to it and of the weights. before: the hash of what precedes them."""
    value, found = before or 0x9E3779B97F4A7C15 + weights, numpy.empty(len(tokens), numpy.uint64)
    for at, token in enumerate(tokens):
        value = ((value ^ (token + 1)) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) % (1 << 64)
        found[at] = value = value ^ (value >> 31)
    return found


def bytes_of(hashes: numpy.ndarray, layer: int, count: int) -> torch.Tensor:
    """[hashes, count]: of each what a layer makes of it."""
    places = numpy.arange(1 + layer * 4096, 1 + layer * 4096 + -(-count // 8), dtype=numpy.uint64)
    mixed = (hashes[:, None] ^ (places * numpy.uint64(0xD1342543DE82EF95))) * numpy.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> numpy.uint64(29)
    mixed *= numpy.uint64(0xBF58476D1CE4E5B9)
    return torch.from_numpy(mixed.view(numpy.uint8)[:, :count].copy())


def kv_numbers(tokens: Sequence[int], layers: int, weights: int) -> torch.Tensor:
    """[layers, 2, tokens, HEADS, WIDTH] in 0 .. 1: of each token a function of all tokens up to it, and of the
    weights."""
    made = bytes_of(hashes_of(tokens, weights), 0, layers * 2 * HEADS * WIDTH).to(torch.float32) / 256
    return made.view(len(tokens), layers, 2, HEADS, WIDTH).permute(1, 2, 0, 3, 4).contiguous()


def named_of(
    layout: Layout | None, groups: tuple[GroupSpec, ...] = (), *, session: str = "", codec: str = "raw"
) -> NamespaceSpec:
    """The namespace of an engine with a table for each group. groups: those of the layout, if none are given."""
    assert layout is not None
    page = layout.page_tokens
    groups = groups or tuple(
        GroupSpec(
            one.name, one.layers, one.kv_heads, one.plane_widths, one.dtype, one.attention, one.window, page, table=at
        )
        for at, one in enumerate(layout.groups)
    )
    tables = tuple(group.page_tokens for group in groups)
    return NamespaceSpec(0, session, "3f5e1c0d9a", layout, codec, 0, {}, "", groups, tables)


# Requests ----------------------------------------------------------------------------------------------------------


class Status(Enum):
    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    OVER = "over"


@dataclass(eq=False)
class Request:
    """`EngineRequest`. stream: all tokens that it will ever have, of which `known` are known. flying: steps of it whose
    output is not known. stale: of these, those before it was preempted."""

    request_id: str
    stream: list[int]
    num_prompt_tokens: int
    numbers: torch.Tensor
    due: int = 0
    known: int = 0
    computed: int = 0
    placeholders: int = 0
    flying: int = 0
    named: int = 0
    stale: int = 0
    was_parked: bool = False
    status: Status = Status.WAITING
    tables: list[list[int]] = field(default_factory=list)
    told: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return self.known

    @property
    def account(self) -> dict[str, Any]:
        """What is told of it once it is over: where each token of its prompt came from."""
        told = self.told
        assert told is not None and told["asked"] == self.num_prompt_tokens
        assert sum(told["hits"].values()) + sum(told["misses"].values()) == told["asked"], told
        return told

    def token_ids(self, first: int, stop: int) -> list[int]:
        assert stop <= self.known, "a token that the engine does not know yet"
        return self.stream[first:stop]


@dataclass(eq=False)
class Step:
    """One on its way. scheduled: (first token, tokens). tables: as they were. read_wrong: who read a wrong page.
    thrown_away: whose output is."""

    number: int
    orders: StepPlan
    scheduled: dict[Request, tuple[int, int]]
    samples: set[Request]
    tables: dict[Request, list[list[int]]]
    has_sync_loads: bool
    read_wrong: set[Request] = field(default_factory=set)
    thrown_away: set[Request] = field(default_factory=set)
    reports: StepReports | None = None
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


class PagePool:
    """Free and cached pages. Page 0 is nobody's. A freed page may be the next one that is given away."""

    def __init__(self, pages: int, random: Random) -> None:
        self.free = deque(range(1, pages))
        self.users = [0] * pages
        self.cached: dict[tuple[int, int], int] = {}
        self.names: dict[int, tuple[int, int]] = {}
        self.decoded: set[int] = set()
        self._random = random

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() if self._random.random() < 0.5 else self.free.popleft() for _ in range(count)]
        for page in taken:
            self.forget(page)
            self.decoded.discard(page)
            self.users[page] = 1
        return taken

    def touch(self, pages: Sequence[int]) -> None:
        """One more user, of pages that are cached."""
        for page in pages:
            if not self.users[page]:
                self.free.remove(page)
            self.users[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            if page:
                self.users[page] -= 1
                assert self.users[page] >= 0
                if not self.users[page]:
                    self.free.append(page)

    def name(self, page: int, name: tuple[int, int]) -> None:
        if name not in self.cached and page not in self.names:
            self.cached[name], self.names[page] = page, name

    def forget(self, page: int) -> None:
        name = self.names.pop(page, None)
        if name is not None:
            del self.cached[name]

    def forget_all(self) -> None:
        self.cached.clear()
        self.names.clear()


# Workers -----------------------------------------------------------------------------------------------------------


class Gate:
    """Saves wait here before they read, as they would for the store, or behind others."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def let(self, saves: int) -> None:
        self._permits.release(max(1, saves))

    def open(self) -> None:
        self._is_open = True
        self._permits.release(16)

    def shut(self) -> None:
        self._is_open = False
        while self._permits.acquire(blocking=False):
            pass

    def go_through(self) -> None:
        if not self._is_open:
            assert self._permits.acquire(timeout=SECONDS)


@dataclass
class Faults:
    """What goes wrong, and how slow things are. failing: the share of loads that bring a part, or nothing. pause: of a
    save in the middle of reading, and of a load; seconds at most."""

    seed: int = 0
    failing: float = 0.0
    pause: float = 0.0


class SlowWorker(PagedWorker):
    """The real one, at a gate. Loads that fail leave numbers that mean nothing behind."""

    def __init__(self, gate: Gate, faults: Faults, *given: Any, **options: Any) -> None:
        self.gate = gate
        self.faults = faults
        self.pause = Random(faults.seed)
        super().__init__(*given, **options)

    def begin_reading(self, save: Any) -> bool:
        self.gate.go_through()
        may = super().begin_reading(save)
        if may:
            time.sleep(self.faults.pause * self.pause.random())
        return may

    def _load(self, order: LoadOrder, asked_at: float) -> LoadReport:
        draw = Random(self.faults.seed * 1_000_003 + order.number * 31 + self._rank)
        time.sleep(self.faults.pause * draw.random())
        report = super()._load(order, asked_at)
        if draw.random() >= self.faults.failing:
            return report
        page = self.pages.facts.page_tokens
        tokens = draw.randrange(order.first_token, min(report.tokens, order.stop_token - 1) + 1) // page * page
        tokens = max(tokens, order.first_token)
        for run, group in zip(order.tables, self.pages.facts.groups, strict=True):
            for number in run.pages[max(0, tokens // page - run.first) :]:
                for planes in self.pages._planes.values():
                    for plane in planes:
                        plane[number * group.split : (number + 1) * group.split] = 3
        self.pages.stream.wait()
        return replace(report, tokens=tokens, reason=MissReason.CORRUPT)


class Rank:
    """One worker with its pages: tensors by layer, and K and V of each as the engine itself sees them. stacked: the
    same by group, [layers, pages, tokens, heads, width]."""

    def __init__(self, shape: Shape, rank: int) -> None:
        form, heads = FORMS[shape.form], HEADS // shape.ranks
        self.heads = slice(rank * heads, (rank + 1) * heads)
        split, dtype = shape.kernel_pages, getattr(torch, shape.dtype)
        size = form.shape(shape.pages * split, shape.page_tokens // split, heads, WIDTH)
        layers = len(shape.windows) * shape.layers_each
        memory = form.turned(torch.full((layers, *size), 2.0, dtype=dtype, device=shape.device))
        self.tensors = {f"layer.{number}": memory[number] for number in range(layers)}
        self.planes = [form.planes(tensor) for tensor in self.tensors.values()]
        self.stacked = [
            [
                plane.as_strided((shape.layers_each, *plane.shape), (memory.stride(0), *plane.stride()))
                for plane in self.planes[first]
            ]
            for first in range(0, layers, shape.layers_each)
        ]
        names = list(self.tensors)
        groups = [
            RegisteredGroup(
                f"group{at}",
                {name: self.tensors[name] for name in names[at * shape.layers_each : (at + 1) * shape.layers_each]},
                heads,
                (WIDTH, WIDTH),
                shape.page_tokens,
                shape.pages,
                window,
                Attention.SLIDING if window else Attention.FULL,
                table=at,
            )
            for at, window in enumerate(shape.windows)
        ]
        tokens = shape.page_tokens // split

        def write(name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
            for plane, part in zip(form.planes(self.tensors[name]), (key, value), strict=True):
                plane[slots // tokens, slots % tokens] = part

        self.pages: EnginePages = register(groups, rank, "", write)
        assert self.pages.facts.packing == packing_of(shape.form), self.pages.facts


class SharedStore:
    """A store in this process that several halves use: whoever opened it closes it."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store = store
        self.release_request = store.release_request

    def namespace(self, **given: Any) -> NamespaceHandle:
        return self.store.namespace(**given)

    def close(self) -> None:
        """It is not theirs."""


# The engine --------------------------------------------------------------------------------------------------------


class PagedEngine:
    """Close it, or use it as a context. open_store: of a session."""

    def __init__(
        self,
        shape: Shape,
        open_store: Callable[[str], Any],
        random: Random,
        *,
        faults: Faults | None = None,
        session: str = "",
        save_patience: float = 0.0,
        **settings: Any,
    ) -> None:
        given = {"cost_model": False, "audit": 0.0, "match_deadline_ms": 5000, "lease_deadline_ms": 5000, **settings}
        self.shape = shape
        self.random = random
        self.gate = Gate()
        self.gate.open()
        self.faults = faults or Faults()
        self.weights = 0
        self.ranks = [Rank(shape, rank) for rank in range(shape.ranks)]
        self._stream = torch.cuda.Stream() if shape.device != "cpu" else None
        self.pool = PagePool(shape.pages, random)
        self.layers = len(shape.windows) * shape.layers_each
        checked = ConnectorSettings.of({"url": "unix:none", **given})
        self.half = PagedScheduler(checked, lambda: open_store(session), time.monotonic, random.random, time.sleep)
        self.workers = [
            SlowWorker(
                self.gate,
                replace(self.faults, seed=self.faults.seed + rank),
                one.pages,
                open_store,
                time.monotonic,
                load_threads=checked.load_threads,
                save_bytes=checked.save_bytes,
                save_patience=save_patience,
            )
            for rank, one in enumerate(self.ranks)
        ]
        facts = [one.pages.facts for one in self.ranks]
        self.layout = layout_of(facts, HEADS, checked.block_tokens)
        named = named_of(self.layout, facts[0].groups, session=session, codec=shape.codec)
        self.half.use(named, range(shape.ranks))
        assert self.half.wait_open(SECONDS)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.flying: deque[Step] = deque()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.arrived: dict[str, int] = {}
        self.over: list[Request] = []
        self.steps = 0
        self.preemptions = 0
        self.crossed: deque[bytes] = deque(maxlen=100)
        """Orders and reports, as they went from process to process."""
        self.turned_back: list[Request] = []
        """Of the last failed loads that a step waited for."""
        self.step()  # tells the workers of the namespace
        assert all(one._opened(0, SECONDS) is not None for one in self.workers)

    def __enter__(self) -> PagedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.gate.open()
        for worker in self.workers:
            worker.close()
        self.half.close()

    @property
    def handle(self) -> NamespaceHandle:
        return self.half.opener.now()

    # What its users do

    def add(self, name: str, prompt: Sequence[int], outputs: int = 1, facts: RequestSpec | None = None) -> Request:
        """A request. What it will answer is known here, and to the forward."""
        salt = sum(ord(letter) for letter in name)
        stream = [*prompt, *((salt * 31 + 7 * at) % 997 for at in range(outputs))]
        request = Request(name, stream, len(prompt), kv_numbers(stream, self.layers, self.weights), known=len(prompt))
        self.requests[name] = request
        self.waiting.append(request)
        self.half.added(request, facts or RequestSpec())
        return request

    def abort(self, request: Request) -> None:
        if request.status is Status.OVER:
            return
        is_loading = request.status is Status.PARKED and request.request_id not in self.received
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.received.discard(request.request_id)
        self.failed.discard(request.request_id)
        self._end(request, frees=not is_loading)

    def forget(self) -> None:
        """The engine's own cache is empty from now on; whatever runs begins again."""
        self.drain()
        for request in reversed(list(self.running)):
            self._preempt(request)
        self.pool.forget_all()

    def change_weights(self) -> None:
        """The same, and numbers are others from now on. What was loaded and does not run yet is given up."""
        self.forget()
        for request in [one for one in self.waiting if one.tables]:
            self.abort(request)
        self.weights += 1
        for request in self.requests.values():
            request.numbers = kv_numbers(request.stream, self.layers, self.weights)
        self.half.renamed(self.weights)

    def ask(self, name: str, prompt: Sequence[int], outputs: int = 1, facts: RequestSpec | None = None) -> Request:
        """Alone, to its end."""
        request = self.add(name, prompt, outputs, facts)
        self.run()
        return request

    def run(self) -> None:
        """Until nothing is left to do."""
        deadline = time.monotonic() + SECONDS
        while self.requests or self.flying:
            self.step()
            if time.monotonic() > deadline:
                left = [(name, one.status, one.computed, one.known) for name, one in self.requests.items()]
                loads = [(worker._loading, len(worker._loads), worker._done_loads) for worker in self.workers]
                raise AssertionError(f"they do not come to an end: {left}; {self.half._loads._under_way}; {loads}")

    def settle(self) -> None:
        """Until nothing waits to be saved, and that is known."""
        deadline = time.monotonic() + SECONDS
        while self.is_saving or self.half._plan._offers:
            assert time.monotonic() < deadline, "saves do not come to an end"
            self.step()
            time.sleep(0.001)
        self.drain()

    @property
    def is_saving(self) -> bool:
        return any(worker._saves or worker._saving for worker in self.workers)

    def drain(self) -> None:
        while self.flying:
            self._output(self.flying.popleft())

    def step(self) -> None:
        """As vLLM's engine core does."""
        step = self._schedule()
        self.flying.append(step)
        with torch.cuda.stream(self._stream):  # what is put into one is done later; on a CPU there is none
            self._execute(step)
        while len(self.flying) > self.shape.ahead or (self.flying and not step.scheduled):
            self._output(self.flying.popleft())

    # Schedule

    def _schedule(self) -> Step:
        self.steps += 1
        scheduled: dict[Request, tuple[int, int]] = {}
        grown: list[int] = []
        budget, has_preempted = self.shape.budget, False
        for request in list(self.running):
            if request.status is not Status.RUNNING or budget <= 0:
                continue
            is_last = request.placeholders and request.computed + 2 - request.placeholders >= len(request.stream)
            tokens = min(request.known + request.placeholders - request.computed, budget)
            if is_last or tokens <= 0:
                continue
            self._free_behind_windows(request)
            while (more := self._grow(request, request.computed + tokens)) is None:
                has_preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if more is None:
                break
            grown += more
            self._name_pages(request, min(request.computed + tokens, request.known))
            scheduled[request] = (request.computed, tokens)
            budget -= tokens
        orders_before = len(self.half._orders.loads)
        if not has_preempted:
            budget = self._admit(scheduled, budget)
        has_sync_loads = any(order.waits for order in self.half._orders.loads[orders_before:])
        return self._ordered(scheduled, grown, has_sync_loads)

    def _admit(self, scheduled: dict[Request, tuple[int, int]], budget: int) -> int:
        skipped: list[Request] = []
        # Those whose loads are beside the steps come first, also where a load failed and their pages are free again:
        # if there is no room for one of them, nobody behind it is looked at.
        self.waiting = deque(sorted(self.waiting, key=lambda request: not request.was_parked))
        while self.waiting and budget > 0 and len(self.running) < self.shape.most_running:
            request = self.waiting.popleft()
            name = request.request_id
            if request.stale or (request.status is Status.PARKED and name not in self.received):
                skipped.append(request)
                continue
            if request.status is Status.PARKED:
                self._unpark(request)
            own, loaded, is_async = [], 0, False
            if not request.computed:
                own = self._own_hit(request)
                local = len(own) * self.shape.page_tokens
                promised, is_async = self.half.matched(name, local)
                if promised is None:
                    skipped.append(request)
                    continue
                loaded, computed = promised, local + promised
            else:
                computed = request.computed
            assert computed < request.known, "one token is computed at least"
            tokens = 0 if is_async else min(request.known - computed, budget)
            if not self._allocate(request, own, computed, tokens, is_async):
                self.waiting.appendleft(request)
                break
            self.half.allocated(name, request.tables, loaded)
            request.computed = computed
            if is_async:
                request.status, request.was_parked = Status.PARKED, True
                skipped.append(request)
                continue
            request.status, request.was_parked = Status.RUNNING, False
            self.running.append(request)
            self._name_pages(request, min(computed + tokens, request.known))
            scheduled[request] = (computed, tokens)
            budget -= tokens
        self.waiting.extendleft(reversed(skipped))
        return budget

    def _ordered(self, scheduled: dict[Request, tuple[int, int]], grown: list[int], has_sync_loads: bool) -> Step:
        due, samples, prefills = [], set(), []
        for request, (first, tokens) in scheduled.items():
            if first + tokens >= request.due:
                final = min(first + tokens, request.num_tokens)
                due.append(Computed(request.request_id, final, lambda one=request: [list(t) for t in one.tables]))
            if tokens > 1:
                prefills.append((first, tokens))
        work = StepWork(prefills, len(scheduled) - len(prefills))
        orders = self.half.step({one.request_id for one in scheduled}, due, grown, work)
        self._check_decoded(orders)
        for request, (first, tokens) in scheduled.items():
            request.computed = first + tokens
            request.flying += 1
            if request.computed >= request.known + request.placeholders:
                samples.add(request)
                request.placeholders += 1
        tables = {one: [list(table) for table in one.tables] for one in scheduled}
        return Step(self.steps, orders, scheduled, samples, tables, has_sync_loads)

    def _check_decoded(self, orders: StepPlan) -> None:
        """What an inexact codec restored is not encoded again."""
        if self.shape.error:
            self.pool.decoded.update(page for order in orders.loads for run in order.tables for page in run.pages)
            saved = {page for order in orders.saves for run in order.tables for page in run.pages}
            assert self.pool.decoded.isdisjoint(saved), "decoded numbers are saved"

    # Execute

    def _execute(self, step: Step) -> None:
        given: list[StepPlan] = [pickle.loads(self._crossing(step.orders)) for _ in self.workers]
        for worker, orders in zip(self.workers, given, strict=True):
            worker.begin(orders)
            worker.begin(orders)
            if step.has_sync_loads:
                worker.start_loads()
        if step.scheduled:
            self._forward(step)
        for worker in self.workers:
            if not step.has_sync_loads:
                worker.start_loads()
            worker.start_saves()
        for worker in self.workers:
            received, failed, invalid = worker.finished()
            for name in received:
                self.arrived[name] = self.arrived.get(name, 0) + 1
                if self.arrived[name] == len(self.workers):
                    del self.arrived[name]
                    step.received.add(name)
            step.failed |= failed
            step.invalid |= invalid
            reports = worker.take_reports()
            if reports is not None:
                reports = pickle.loads(self._crossing(reports))
                if step.reports is None:
                    step.reports = reports
                else:
                    step.reports.merge(reports)
        if len(self.shape.windows) > 1 or self.shape.windows[0]:
            step.invalid.clear()
        else:
            step.failed.clear()

    def _crossing(self, told: StepPlan | StepReports) -> bytes:
        crossed = pickle.dumps(told)
        self.crossed.append(crossed)
        return crossed

    def _forward(self, step: Step) -> None:
        """Layer by layer where loads come so, else all layers of a group together."""
        each = self.shape.layers_each
        size = 1 if any(worker.awaited_layers for worker in self.workers) else each
        for first_layer in range(0, self.layers, size):
            group = first_layer // each
            layers = range(first_layer - group * each, first_layer - group * each + size)
            for layer in range(first_layer, first_layer + size):
                for worker in self.workers:
                    worker.wait_layer(f"layer.{layer}")
            for request in step.scheduled:
                self._compute(step, request, group, layers)

    def _compute(self, step: Step, request: Request, group: int, layers: range) -> None:
        """These layers of a group: read what is there, and write what is new."""
        first, tokens = step.scheduled[request]
        table, window = step.tables[request][group], self.shape.windows[group]
        seen = max(0, first + 1 - window) if window else 0
        assert all(table[seen // self.shape.page_tokens :]), "a page that was freed and is read"
        start = group * self.shape.layers_each
        numbers = request.numbers[start + layers.start : start + layers.stop]
        places = self._places(table, seen, first + tokens)
        old, new = ([part[cut] for part in places] for cut in (slice(first - seen), slice(first - seen, None)))
        for rank in self.ranks:
            for number, planes in enumerate(rank.stacked[group]):
                wanted = numbers[:, number, seen:first, rank.heads]
                if first > seen and not self._is_right(planes[layers.start : layers.stop, old[0], old[1]], wanted):
                    step.read_wrong.add(request)
        if request in step.read_wrong:
            numbers = 1.5 - numbers
        for rank in self.ranks:
            for number, planes in enumerate(rank.stacked[group]):
                made = numbers[:, number, first : first + tokens, rank.heads].to(planes.device, planes.dtype)
                if self.shape.device != "cpu":
                    torch.cuda._sleep(SLEEP_CYCLES)
                planes[layers.start : layers.stop, new[0], new[1]] = made

    def _places(self, table: Sequence[int], first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of these tokens: kernel pages, and tokens in them."""
        size = self.shape.page_tokens
        kernel = size // self.shape.kernel_pages
        tokens = torch.arange(first, stop)
        slots = torch.tensor(table)[tokens // size] * size + tokens % size
        return slots // kernel, slots % kernel

    def _is_right(self, held: torch.Tensor, wanted: torch.Tensor) -> bool:
        if not self.shape.error:
            return torch.equal(held, wanted.to(held.device, held.dtype))
        return bool((held.float() - wanted.to(held.device)).abs().amax() <= self.shape.error)

    # Output

    def _output(self, step: Step) -> None:
        for name in step.failed:
            request = self.requests.get(name)
            if request is not None and request.status is Status.PARKED:
                request.computed = 0
                self.failed.add(name)
        if step.invalid:
            self._invalid(step)
        for request, (_, tokens) in step.scheduled.items():
            assert tokens
            request.flying -= 1
            is_stale = request.stale > 0
            request.stale -= is_stale
            if request in step.thrown_away:
                continue
            assert request not in step.read_wrong, (
                f"step {step.number}: {request.request_id} reads numbers that are not its prefix's"
            )
            if request.status is Status.OVER or request not in step.samples:
                continue
            request.known += 1
            if not is_stale:
                request.placeholders -= 1
            if request.known == len(request.stream):
                (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
                self._end(request, frees=True)
        self.half.reported(step.reports)
        for page in self.half.take_invalid_pages():
            self.pool.forget(page)
        for name in step.received:
            request = self.requests.get(name)
            assert request is not None, "a load that nobody waits for"
            if request.status is Status.PARKED:
                self.received.add(name)
            else:
                assert request.status is Status.OVER
                self._free(request)
                del self.requests[name]

    def _invalid(self, step: Step) -> None:
        """Loads that failed: go back to before them. Of requests that share a page, the first one computes it again.
        What others may find under these pages' names, nobody looks after."""
        size = self.shape.page_tokens
        self.pool.decoded -= step.invalid
        for request in self.waiting:
            if request.status is Status.PARKED:
                pages = request.tables[0][: -(-request.computed // size)]
                at = next((at for at, page in enumerate(pages) if page in step.invalid), None)
                if at is not None:
                    request.computed = at * size
                    self.failed.add(request.request_id)
        marked: set[int] = set()
        self.turned_back.clear()
        for request in self.running:
            before = request.computed - step.scheduled.get(request, (0, 0))[1]
            places = [at for at in range(-(-before // size)) if request.tables[0][at] in step.invalid]
            mine = [at for at in places if request.tables[0][at] not in marked]
            if places:
                assert not self.shape.ahead, "a step that was scheduled since is not taken back"
                marked.update(request.tables[0][at] for at in mine)
                request.computed = mine[0] * size if mine else before
                request.placeholders = 0
                step.thrown_away.add(request)
                self.turned_back.append(request)

    # Pages

    def _own_hit(self, request: Request) -> list[int]:
        found: list[int] = []
        size = self.shape.page_tokens
        while self.shape.own_cache and (len(found) + 1) * size < request.known:
            page = self.pool.cached.get(self._page_name(request, len(found)))
            if page is None:
                break
            found.append(page)
        return found

    def _page_name(self, request: Request, at: int) -> tuple[int, int]:
        stop = (at + 1) * self.shape.page_tokens
        return stop, hash((self.weights, tuple(request.stream[:stop])))

    def _name_pages(self, request: Request, tokens: int) -> None:
        """Each page once, whatever becomes of it: vLLM keeps a count."""
        if self.shape.own_cache:
            whole = tokens // self.shape.page_tokens
            for at in range(request.named, whole):
                self.pool.name(request.tables[0][at], self._page_name(request, at))
            request.named = max(request.named, whole)

    def _allocate(self, request: Request, own: list[int], computed: int, tokens: int, is_async: bool) -> bool:
        """Pages up to so many tokens; all or none. computed: what is there before the next step."""
        size = self.shape.page_tokens
        if request.tables:
            self._free_behind_windows(request)
            new = [max(0, -(-(computed + tokens) // size) - len(table)) for table in request.tables]
        else:
            behind = [max(0, computed - window + 1) // size if window else 0 for window in self.shape.windows]
            new = [max(0, -(-(computed + tokens) // size) - max(len(own), gone)) for gone in behind]
        wanted = sum(new)
        if is_async:  # it is not preempted meanwhile: its prompt has to fit, beside that of others
            others = [one for one in self.requests.values() if one.status in (Status.WAITING, Status.PARKED)]
            held = [(one, len(one.tables[0])) for one in others if one.tables]
            for one, pages in [*held, (request, -(-computed // size))]:
                wanted += max(0, -(-one.known // size) - pages) * len(self.shape.windows)
        if wanted > len(self.pool.free) - sum(not self.pool.users[page] for page in own):
            return False
        if not request.tables:
            self.pool.touch(own)
            request.named = len(own)
            request.tables = [own + [0] * (gone - len(own)) for gone in behind]
        for table, count in zip(request.tables, new, strict=True):
            table += self.pool.take(count)
        return True

    def _grow(self, request: Request, tokens: int) -> list[int] | None:
        wanted = -(-tokens // self.shape.page_tokens)
        missing = [max(0, wanted - len(table)) for table in request.tables]
        if sum(missing) > len(self.pool.free):
            return None
        more: list[int] = []
        for table, count in zip(request.tables, missing, strict=True):
            taken = self.pool.take(count)
            table += taken
            more += taken
        return more

    def _free_behind_windows(self, request: Request) -> None:
        """Pages that no token sees again; steps that are on their way still do."""
        flying = sum(step.scheduled[request][1] for step in self.flying if request in step.scheduled)
        assert request.tables
        for table, window in zip(request.tables, self.shape.windows, strict=True):
            if not window:
                continue
            for at in range(max(0, request.computed - flying - window + 1) // self.shape.page_tokens):
                self.pool.give_back(table[at : at + 1])
                table[at] = 0

    def _unpark(self, request: Request) -> None:
        name = request.request_id
        self.received.remove(name)
        request.status = Status.WAITING
        if name in self.failed:
            self.failed.remove(name)
            if not request.computed:
                self._free(request)
        if request.computed:
            self._name_pages(request, request.computed)
        if request.computed == request.known:
            request.computed -= 1

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.status, request.computed, request.placeholders = Status.WAITING, 0, 0
        request.stale = request.flying
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _end(self, request: Request, *, frees: bool) -> None:
        request.status = Status.OVER
        request.told = self.half.finished(request.request_id)
        self.over.append(request)
        if frees:
            self._free(request)
            del self.requests[request.request_id]

    def _free(self, request: Request) -> None:
        for table in request.tables:
            self.pool.give_back(table)
        request.tables, request.named = [], 0


# What is stored ----------------------------------------------------------------------------------------------------


def check_nothing_is_held(store: EmbeddedStore, *engines: PagedEngine) -> None:
    """For anybody, once these engines are closed, which they are here."""
    for engine in engines:
        engine.settle()
        engine.close()
    wait_until(lambda: not store.usage().leases and not store.core.awaits.counts().parked)
    usage = store.usage()
    assert (usage.reservations, usage.pinned_bytes) == (0, 0)
    store.check()


def stored_blocks(handle: NamespaceHandle, stream: Sequence[int]) -> Iterator[tuple[int, Pages]]:
    """All that a store has of a prompt: of each block its first token, and one page with it."""
    block = handle.block_tokens
    for first in range(0, len(stream) - block + 1, block):
        match = handle.match(stream[: first + block])
        pages = blank_pages(handle.layout, 1, block)
        with handle.lease(match, first, 5000) as lease:
            if handle.get(lease, pages, first).tokens < first + block:
                return
        yield first, pages


def wrong_blocks(handle: NamespaceHandle, stream: Sequence[int], weights: int, error: float) -> tuple[int, list[int]]:
    """How many blocks are stored, and the first tokens of those that hold something else than the stream's KV."""
    numbers = kv_numbers(stream, len(handle.layout.layers), weights)
    lies_across = handle.is_exact and "slabs-k-across" in handle.layout.packing
    count, wrong = 0, set()
    for first, pages in stored_blocks(handle, stream):
        count += 1
        for group in handle.layout.groups:
            start = max(0, handle.block_tokens - group.window + 1) if group.window else 0
            for layer in group.layers:
                for number, plane in enumerate(pages.planes[layer]):
                    wanted = numbers[layer, number, first + start : first + handle.block_tokens]
                    read = _turned(plane[0], handle.layout.page_tokens) if lies_across and not number else plane[0]
                    if not bool(((read[start:].float() - wanted).abs() <= error).all()):
                        wrong.add(first)
    return count, sorted(wrong)


def _turned(block: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """K of a block [token, head, width] whose pages hold of each head [width, token] numbers in a row."""
    heads_first = block.unflatten(0, (-1, page_tokens)).transpose(1, 2).contiguous()
    as_written = heads_first.view(*heads_first.shape[:2], heads_first.shape[3], page_tokens)
    return as_written.permute(0, 3, 1, 2).flatten(0, 1)
