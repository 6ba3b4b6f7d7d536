"""What the worker's half does, one thing at a time: real pages, a real store in this process, orders by hand."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvstore
from engine_adapter.audit.audits import AuditVerdict
from engine_adapter.paged import plans as save_plan
from engine_adapter.paged import worker as paged_worker
from engine_adapter.paged.pages import EnginePages, layout_of
from engine_adapter.paged.plans import page_runs
from engine_adapter.paged.step_plan import LeaseHere, LoadOrder, NamespaceSpec, PageRun, SaveOrder, StepPlan, WorkerSpec
from engine_adapter.paged.step_plan import StepReports as Reports
from engine_adapter.paged.worker import PagedWorker
from kvstore.block.account import MissReason
from kvstore.client.handle import Lease, NamespaceHandle
from kvstore.node import EmbeddedStore
from paged_engine import Rank, Shape, SharedStore, kv_numbers, named_of, wrong_blocks
from waiting import wait_until
from workbench import ids

SECONDS = 30


class GatedWorker(PagedWorker):
    """Saves stop before they read, in the middle of it, and loads before they begin, where a test says so."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.before_read, self.in_read, self.load_gate = threading.Event(), threading.Event(), threading.Event()
        self.reads = threading.Event()
        for event in (self.before_read, self.in_read, self.load_gate):
            event.set()
        self.layer_gate: threading.Semaphore | None = None
        super().__init__(*given, **options)

    def begin_reading(self, save: Any) -> bool:
        self.before_read.wait(SECONDS)
        may = super().begin_reading(save)
        if may:
            self.reads.set()
            self.in_read.wait(SECONDS)
        return may

    def _load(self, *given: Any) -> Any:
        self.load_gate.wait(SECONDS)
        return super()._load(*given)

    def _loaded(self, *given: Any) -> Iterator[Any]:
        for loaded in super()._loaded(*given):
            if self.layer_gate is not None:
                self.layer_gate.acquire(timeout=SECONDS)
            yield loaded


class Bench:
    """A worker with pages, and a handle on the same namespace. save_pages: that may wait to be saved."""

    def __init__(
        self, store: EmbeddedStore, shape: Shape | None = None, *, save_pages: int = 128, **options: Any
    ) -> None:
        self.shape = shape or Shape(pages=30)
        self.rank = Rank(self.shape, 0)
        self.layout = layout_of([self.rank.pages.facts], 2, 64)
        self.facts = replace(named_of(self.layout, self.rank.pages.facts.groups), model="m")
        self.handle: NamespaceHandle = store.namespace(model="m", layout=self.layout)
        given = {"load_threads": 1, "save_bytes": save_pages * self.rank.pages.facts.page_bytes, **options}
        self.worker = GatedWorker(self.rank.pages, lambda session: SharedStore(store), time.monotonic, **given)
        self.begin(namespace=self.facts)
        assert self.worker._opened(0, SECONDS) is not None
        self.number = 10
        self.leases: list[Lease] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for event in (self.worker.before_read, self.worker.in_read, self.worker.load_gate):
            event.set()
        self.worker.close()
        for lease in self.leases:
            lease.release()

    def begin(self, **orders: Any) -> StepPlan:
        step = StepPlan(**orders)
        self.worker.begin(step)
        return step

    def step(self, **orders: Any) -> StepPlan:
        """A whole one, which has computed by the time that its saves begin."""
        step = self.begin(**orders)
        if step.loads:
            self.worker.start_loads()
        self.worker.start_saves()
        return step

    def fill(self, tokens: list[int], table: list[int]) -> None:
        numbers = kv_numbers(tokens, len(self.layout.layers), 0)
        for layer, planes in enumerate(self.rank.planes):
            for number, plane in enumerate(planes):
                for at in range(len(tokens)):
                    plane[table[at // self.shape.page_tokens], at % self.shape.page_tokens] = numbers[layer, number, at]

    def is_right(self, tokens: list[int], table: list[int], first: int, stop: int, layers: int = 2) -> bool:
        numbers = kv_numbers(tokens, len(self.layout.layers), 0)
        size = self.shape.page_tokens
        return all(
            torch.equal(self.rank.planes[layer][number][table[at // size], at % size], numbers[layer, number, at])
            for layer in range(layers)
            for number in range(2)
            for at in range(first, stop)
        )

    def save(self, tokens: list[int], table: list[int], first: int = 0) -> SaveOrder:
        self.number += 1
        keys = self.handle.hashed(tokens).keys
        tables = page_runs([table] * len(self.shape.windows), first, 64 * len(keys), self.facts.groups)
        return SaveOrder(self.number, f"r{self.number}", 0, b"".join(keys), first, tables, None, 0)

    def leased(self, tokens: list[int], first: int = 0) -> Lease:
        self.leases.append(self.handle.lease(self.handle.match(tokens), first))
        return self.leases[-1]

    def load(self, tokens: list[int], table: list[int], first: int = 0, **given: Any) -> LoadOrder:
        self.number += 1
        lease = self.leased(tokens, first)
        stop = given.pop("stop", len(tokens) // 64 * 64)
        tables = page_runs([table] * len(self.shape.windows), first, stop, self.facts.groups)
        options = {"waits": True, **given}
        return LoadOrder(self.number, f"r{self.number}", 0, lease.ticket(), first, stop, tables, **options)

    def stored(self, tokens: list[int]) -> None:
        """These blocks, from the first pages on."""
        table = list(range(1, 1 + -(-len(tokens) // self.shape.page_tokens)))
        self.fill(tokens, table)
        self.step(saves=[self.save(tokens, table)])
        assert self.reports(saves=1).saves[0].reason is None

    def reports(self, **counts: int) -> Reports:
        found = Reports()

        def are_there() -> bool:
            found.merge(self.worker.take_reports() or Reports())
            return all(len(getattr(found, kind)) >= count for kind, count in counts.items())

        wait_until(are_there)
        return found


@pytest.fixture
def bench(store: EmbeddedStore) -> Iterator[Bench]:
    with Bench(store) as bench:
        yield bench


def blocks_for(seconds: float, call: Callable[[], Any]) -> threading.Thread:
    """A call in a thread, which has not returned after that time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert thread.is_alive(), "it did not wait"
    return thread


def ends(thread: threading.Thread) -> None:
    thread.join(SECONDS)
    assert not thread.is_alive()


# Fences --------------------------------------------------------------------------------------------------------------


def test_a_fence_does_not_wait_for_a_save_of_other_pages(bench: Bench) -> None:
    bench.fill(ids(64), [1, 2])
    bench.worker.in_read.clear()
    first, other = bench.save(ids(64), [1, 2]), bench.save(ids(64, 100), [3, 4])
    bench.step(saves=[first, other])
    assert bench.worker.reads.wait(SECONDS)
    fence = threading.Thread(target=lambda: bench.begin(cancelled_saves=[other.number, 99]), daemon=True)
    fence.start()
    ends(fence)  # while the first save reads
    (report,) = bench.reports(saves=1).saves
    assert (report.number, report.dropped, report.stored) == (other.number, True, 0)
    bench.worker.in_read.set()
    (report,) = bench.reports(saves=1).saves
    assert (report.number, report.stored) == (first.number, 1)


def test_a_fence_waits_for_the_save_that_reads(bench: Bench) -> None:
    order = bench.save(ids(64), [1, 2])
    bench.worker.in_read.clear()
    bench.step(saves=[order])
    assert bench.worker.reads.wait(SECONDS)
    fence = blocks_for(0.1, lambda: bench.begin(cancelled_saves=[order.number]))
    bench.worker.in_read.set()
    ends(fence)
    assert bench.reports(saves=1).saves[0].stored == 1, "it had begun to read"


def test_a_save_waits_for_loads_and_goes_when_they_are_over(bench: Bench) -> None:
    bench.stored(ids(64))
    load = bench.load(ids(64), [11, 12], waits=False)
    bench.worker.load_gate.clear()
    bench.step(loads=[load], saves=[bench.save(ids(64, 700), [5, 6])])
    time.sleep(0.1)
    assert not bench.worker._saving
    bench.worker.load_gate.set()
    found = bench.reports(saves=1)
    assert found.saves[0].stored == 1, "before the engine takes the load's report"
    wait_until(lambda: bool(bench.worker.finished()[0]))


def test_with_windows_a_fence_waits_a_little_for_saves_that_wait(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing behind could be stored any more without those pages."""
    with Bench(store, Shape(windows=(0, 40))) as bench:
        monkeypatch.setattr(paged_worker, "WINDOW_FENCE_SECONDS", SECONDS)
        order = bench.save(ids(128), [1, 2, 3, 4])
        order = SaveOrder(order.number, "r", 0, order.keys, 0, (order.tables[0], PageRun(0, [5, 6, 7, 8])), None, 0)
        bench.worker.before_read.clear()
        bench.step(saves=[order])
        fence = blocks_for(0.1, lambda: bench.begin(cancelled_saves=[order.number]))
        bench.worker.before_read.set()
        ends(fence)
        (report,) = bench.reports(saves=1).saves
        assert report.stored == 2 and not report.dropped
        monkeypatch.setattr(paged_worker, "WINDOW_FENCE_SECONDS", 0.05)
        bench.worker.before_read.clear()
        last = bench.save(ids(128, 700), [1, 2, 3, 4])
        bench.step(saves=[last])
        bench.begin(cancelled_saves=[last.number])
        bench.worker.before_read.set()
        assert bench.reports(saves=1).saves[0].dropped


def test_a_save_waits_for_the_engine_to_have_nothing_to_do(store: EmbeddedStore) -> None:
    with Bench(store, save_patience=SECONDS) as bench:
        bench.fill(ids(64), [1, 2])
        bench.step(number=1, saves=[bench.save(ids(64), [1, 2])])
        for number in range(2, 30):
            time.sleep(save_plan.QUIET_SECONDS / 5)
            bench.worker.take_reports()
            assert len(bench.worker._saves) == 1, "it runs"
            bench.begin(number=number)
        bench.worker.take_reports()
        assert bench.reports(saves=1).saves[0].stored == 1, "while it only asks, it has nothing to do"


def test_a_save_waits_no_longer_than_that(store: EmbeddedStore) -> None:
    with Bench(store, save_patience=0.2) as bench:
        bench.fill(ids(64), [1, 2])
        started = time.monotonic()
        bench.step(number=1, saves=[bench.save(ids(64), [1, 2])])
        wait_until(lambda: not bench.worker._saves and not bench.worker._saving)
        assert time.monotonic() - started >= 0.2, "the step is still on"
        assert bench.reports(saves=1).saves[0].stored == 1


def test_where_waiting_loses_something_saves_do_not_wait(store: EmbeddedStore) -> None:
    """When much waits, behind a save that a fence has cost, where an audit has a lease, and at the end."""
    with Bench(store, save_patience=SECONDS, save_pages=8) as bench:
        bench.fill(ids(256), [1, 2, 3, 4, 5, 6, 7, 8])
        first = bench.save(ids(128), [1, 2, 3, 4])
        bench.step(number=1, saves=[first])
        time.sleep(0.1)
        assert len(bench.worker._saves) == 1
        bench.step(number=2, saves=[bench.save(ids(64), [1, 2])])
        wait_until(lambda: len(bench.worker._save_reports) == 1)
        assert bench.reports(saves=1).saves[0].number == first.number
        bench.begin(number=3, cancelled_saves=[bench.number])
        assert bench.reports(saves=1).saves[0].dropped
        bench.step(number=4, saves=[bench.save(ids(192), [1, 2, 3, 4, 5, 6], first=128)])
        assert bench.reports(saves=1).saves[0].stored == 1
    with Bench(store, save_patience=SECONDS) as bench:
        bench.fill(ids(64, 500), [1, 2])
        bench.step(number=1, saves=[bench.save(ids(64, 500), [1, 2])])
        assert len(bench.worker._saves) == 1
    assert bench.handle.match(ids(64, 500)).blocks == 1


def test_a_save_behind_a_waiting_one_does_not_wake_the_saver(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would take a core and the interpreter's lock from the step, to find that it has to wait."""
    with Bench(store, save_patience=SECONDS) as bench:
        changed, woken = bench.worker._savers, []
        wake, me = changed.notify_all, threading.get_ident()

        def counted() -> None:
            if threading.get_ident() == me:
                woken.append(step)
            wake()

        monkeypatch.setattr(changed, "notify_all", counted)
        bench.fill(ids(192), [1, 2, 3, 4, 5, 6])
        orders = [
            bench.save(ids(64 * blocks), list(range(1, 2 * blocks + 1)), first=64 * blocks - 64) for blocks in (1, 2, 3)
        ]
        orders[2] = replace(orders[2], is_urgent=True)
        for step, order in enumerate(orders, 1):
            bench.step(number=step, saves=[order])
        assert woken == [1, 3], "the first, and the one that another engine waits for"
        assert [report.stored for report in bench.reports(saves=3).saves] == [1, 1, 1]


def test_a_save_that_finds_no_room_ends_the_patience(store: EmbeddedStore) -> None:
    with Bench(store, save_patience=SECONDS, save_pages=8) as bench:
        bench.fill(ids(320), list(range(1, 11)))
        bench.step(number=1, saves=[bench.save(ids(128), [1, 2, 3, 4])])
        bench.step(number=2, saves=[bench.save(ids(320), list(range(1, 11)), first=128)])
        dropped, stored = bench.reports(saves=2).saves
        assert dropped.dropped and dropped.reason is MissReason.BUSY and stored.stored == 2
        bench.step(number=3, saves=[bench.save(ids(320), list(range(1, 11)), first=128)])
        assert bench.reports(saves=1).saves[0].stored == 3, "the next one has room, and waits for nobody"


def test_between_two_pieces_a_save_waits_again(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_worker, "PIECE_BYTES", 1)
    with Bench(store, save_patience=SECONDS) as bench:
        bench.fill(ids(256), [1, 2, 3, 4, 5, 6, 7, 8])
        order = bench.save(ids(256), [1, 2, 3, 4, 5, 6, 7, 8])
        bench.worker.in_read.clear()
        bench.step(number=1, saves=[order])
        bench.worker.take_reports()
        assert bench.worker.reads.wait(SECONDS)
        bench.begin(number=2)
        bench.worker.in_read.set()
        wait_until(lambda: bench.handle.match(ids(256)).blocks == 1)
        time.sleep(0.1)
        assert bench.handle.match(ids(256)).blocks == 1, "the next one waits for the step"
        bench.begin(number=3, cancelled_saves=[order.number])
        (report,) = bench.reports(saves=1).saves
        assert (report.stored, report.dropped) == (1, True)
    assert wrong_blocks(bench.handle, ids(256), 0, 0.0) == (1, [])


# Loads ---------------------------------------------------------------------------------------------------------------


def test_a_worker_in_the_schedulers_process_reads_with_its_lease(bench: Bench) -> None:
    bench.stored(ids(128))
    order = bench.load(ids(128), [15, 16, 17, 18])
    here = replace(order, ticket=b"", here=LeaseHere(bench.leases[0], bench.handle))
    bench.step(loads=[here])
    assert bench.is_right(ids(128), [15, 16, 17, 18], 0, 128)
    (report,) = bench.reports(loads=1).loads
    assert (report.tokens, report.reason) == (128, None)
    assert not bench.leases[0].released, "its holder lets go of it when it hears of the load"
    elsewhere = pickle.loads(pickle.dumps(here))
    assert elsewhere == replace(order, ticket=b"")


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_load_does_not_bring_is_named_by_its_pages(bench: Bench, waits: bool) -> None:
    bench.stored(ids(256))
    order = bench.load(ids(192), list(range(11, 19)), 64, stop=256, waits=waits)
    bench.step(loads=[order])
    ended = wait_until(lambda: found if (found := bench.worker.finished())[2] else None)
    parked = set() if waits else {order.request}
    assert ended == (parked, parked, {17, 18})
    assert bench.reports(loads=1).loads[0].tokens == 192


@pytest.mark.parametrize("ticket", [b"", b"no ticket of anybody's", None])
def test_a_ticket_that_names_nothing_is_a_load_that_brought_nothing(bench: Bench, ticket: bytes | None) -> None:
    bench.stored(ids(256))
    order = bench.load(ids(256), list(range(11, 19)), 96)
    bench.leases[0].release()
    bench.step(loads=[order if ticket is None else replace(order, ticket=ticket)])
    assert bench.worker.finished() == (set(), set(), set(range(14, 19)))
    reports = bench.reports(loads=1)
    assert reports.loads[0].tokens == 96 and reports.loads[0].reason is MissReason.STALE_HINT
    assert reports.failures == {0: 1}


def test_a_layer_is_waited_for_until_it_is_there(bench: Bench) -> None:
    bench.stored(ids(256))
    table = list(range(11, 19))
    order = bench.load(ids(256), table, layerwise=True)
    gate = bench.worker.layer_gate = threading.Semaphore(0)
    bench.begin(loads=[order])
    bench.worker.start_loads()
    first = blocks_for(0.1, lambda: bench.worker.wait_layer("layer.0"))
    gate.release()
    ends(first)
    assert bench.is_right(ids(256), table, 0, 256, layers=1)
    second = blocks_for(0.1, lambda: bench.worker.wait_layer("layer.1"))
    other = blocks_for(0.05, lambda: bench.worker.wait_layer("a layer of another name"))
    saves = blocks_for(0.05, bench.worker.start_saves)
    gate.release()
    ends(second)
    assert bench.is_right(ids(256), table, 0, 256)
    gate.release(9)
    ends(other)
    ends(saves)
    assert bench.reports(loads=1).loads[0].tokens == 256
    bench.worker.wait_layer("layer.1")


def test_an_idle_step_waits_a_little_for_loads_and_no_other_does(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.stored(ids(64))
    bench.worker.load_gate.clear()
    order = bench.load(ids(64), [11, 12], waits=False)

    def took(idle_seconds: float, **orders: Any) -> float:
        monkeypatch.setattr(paged_worker, "IDLE_WAIT_SECONDS", idle_seconds)
        bench.step(**orders)
        started = time.monotonic()
        assert bench.worker.finished() == (set(), set(), set())
        return time.monotonic() - started

    assert took(SECONDS) < SECONDS / 2, "there is no load"
    assert took(SECONDS, loads=[order], number=1) < SECONDS / 2, "there is something to compute"
    assert took(0.4) >= 0.35
    monkeypatch.setattr(paged_worker, "IDLE_WAIT_SECONDS", SECONDS)
    bench.begin()
    waiting = threading.Timer(0.05, bench.worker.load_gate.set)
    waiting.start()
    started = time.monotonic()
    assert bench.worker.finished()[0] == {order.request}
    assert time.monotonic() - started < SECONDS / 2, "until one is over, and no longer"


def test_a_load_of_a_namespace_that_is_no_more_is_over_at_once(bench: Bench) -> None:
    """After the weights were changed nobody waits for the old namespace to come back."""
    bench.stored(ids(64))
    order = bench.load(ids(64), [11, 12], waits=False)
    saves = [bench.save(ids(64, 100 * number), [1, 2]) for number in range(1, 5)]
    started = time.monotonic()
    bench.step(namespace=NamespaceSpec(1, "", "m", bench.layout, "raw", 1, {}), loads=[order], saves=saves)
    wait_until(lambda: bool(bench.worker.finished()[0]))
    reports = bench.reports(loads=1, saves=4)
    assert time.monotonic() - started < paged_worker.OPEN_SECONDS / 2
    assert reports.loads[0].reason is MissReason.DISABLED, "the store is there, and asked for nothing"
    assert {report.reason for report in reports.saves} == {MissReason.DISABLED}


def test_without_a_store_loads_and_saves_end_in_time(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_worker, "OPEN_SECONDS", 0.05)
    rank = Rank(Shape(), 0)

    def none(session: str) -> Any:
        raise kvstore.Unreachable("there is no store")

    worker = PagedWorker(rank.pages, none, time.monotonic, load_threads=2, save_bytes=1 << 20)
    layout = layout_of([rank.pages.facts], 2, 64)
    load = LoadOrder(1, "a", 0, b"", 0, 64, (PageRun(0, [1, 2]),), waits=False)
    save = SaveOrder(2, "b", 0, bytes(32), 0, (PageRun(0, [3, 4]),), None, 0)
    worker.begin(StepPlan([load], [save], namespace=NamespaceSpec(0, "", "m", layout, "raw", 0, {})))
    worker.start_loads()
    worker.start_saves()
    received, reports = set[str](), Reports()
    wait_until(
        lambda: received and reports.saves,
        lambda: (received.update(worker.finished()[0]), reports.merge(worker.take_reports() or Reports())),
    )
    assert reports.loads[0].reason is reports.saves[0].reason is MissReason.UNREACHABLE
    worker.close(1.0)


# Saves ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_saved_or_compared_of_a_step_that_waited_for_a_load_that_failed(bench: Bench) -> None:
    """Its numbers are wrong and are computed again: they say nothing about what is stored."""
    bench.stored(ids(256))
    order = bench.load(ids(256), list(range(11, 19)))
    bench.leases[0].release()
    bench.fill(ids(64, 500), [20, 21])
    audit = audit_of(bench.leased(ids(128), 64).ticket(), 64, (PageRun(2, [13, 14]),))
    bench.step(loads=[order], saves=[audit, bench.save(ids(64, 500), [20, 21])])
    first = bench.reports(saves=2)
    assert first.saves[0].results == ()
    assert first.saves[1].dropped and first.saves[1].reason is None and first.failures == {0: 1}
    bench.step(saves=[bench.save(ids(64, 500), [20, 21])])
    assert bench.reports(saves=1).saves[0].dropped, "the scheduler does not know yet"
    bench.step(saves=[bench.save(ids(64, 500), [20, 21])], failures_seen={0: 1, 1: 7})
    assert bench.reports(saves=1).saves[0].stored == 1


def test_no_more_waits_to_be_saved_than_may(store: EmbeddedStore) -> None:
    with Bench(store, save_pages=5) as bench:
        bench.worker.before_read.clear()
        orders = [bench.save(ids(64, 100 * number), [2 * number, 2 * number + 1]) for number in range(1, 5)]
        bench.step(saves=orders)
        dropped = bench.reports(saves=2).saves
        assert [report.number for report in dropped] == [order.number for order in orders[2:]]
        assert {(report.dropped, report.reason) for report in dropped} == {(True, MissReason.BUSY)}
        bench.worker.before_read.set()
        assert [report.stored for report in bench.reports(saves=2).saves] == [1, 1]
        bench.step(saves=[bench.save(ids(128, 1000), [20, 21, 22, 23])])
        assert bench.reports(saves=1).saves[0].stored == 2, "there is room again"


def test_close_saves_what_waits_as_far_as_there_is_time(store: EmbeddedStore) -> None:
    bench = Bench(store)
    bench.fill(ids(256), list(range(1, 9)))
    bench.step(saves=[bench.save(ids(256), list(range(1, 9)))])
    bench.worker.close()
    assert bench.handle.match(ids(256)).blocks == 4
    bench.worker.close()
    late = Bench(store)
    late.worker.before_read.clear()
    late.step(saves=[late.save(ids(256, 900), list(range(1, 9)))])
    started = time.monotonic()
    late.worker.close(0.2)
    assert time.monotonic() - started < 3.0
    late.worker.before_read.set()


# Audits --------------------------------------------------------------------------------------------------------------


def audit_of(ticket: bytes, first: int, tables: tuple[PageRun, ...]) -> SaveOrder:
    return SaveOrder(77, "a", 0, b"", first, tables, None, 0, is_urgent=True, ticket=ticket)


def audited(bench: Bench, tables: tuple[PageRun, ...], first: int = 64, behind: int = 0, **orders: Any) -> Any:
    bench.step(saves=[audit_of(bench.leased(ids(128), first).ticket(), first, tables)], **orders)
    report = bench.reports(saves=1 + behind).saves[behind]
    return [result.verdict for result in report.results]


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "exact"), (1e-6, "close"), (0.1, "drifted")])
def test_an_audit_says_how_far_the_stored_block_is_from_the_computed_one(
    bench: Bench, off: float, verdict: str
) -> None:
    bench.stored(ids(128))
    bench.fill(ids(128), [11, 12, 13, 14])
    bench.rank.planes[1][0][torch.tensor([13, 14])] *= 1 + off
    assert audited(bench, (PageRun(2, [13, 14]),)) == [AuditVerdict(verdict)]
    bench.rank.planes[1][0][torch.tensor([11, 12])] += 1
    assert audited(bench, (PageRun(2, [13, 14]),)) == [AuditVerdict(verdict)], "the block's own pages alone"


WHOLE, REST, NOTHING = PageRun(2, [3, 4]), PageRun(3, [4]), PageRun(4, [])
"""What an engine still has of a group's pages of the second block."""


@pytest.mark.parametrize(
    ("window", "second", "changed", "verdict"),
    [
        (40, WHOLE, [], AuditVerdict.EXACT),
        (40, WHOLE, [1], AuditVerdict.DRIFTED),
        (40, REST, [1], AuditVerdict.EXACT),
        (40, NOTHING, [0, 1], AuditVerdict.DRIFTED),
        (20, WHOLE, [1], AuditVerdict.EXACT),
        (20, REST, [1], AuditVerdict.EXACT),
        (20, NOTHING, [0, 1], AuditVerdict.DRIFTED),
    ],
)
def test_of_two_groups_each_is_compared_whose_pages_a_load_would_bring_and_the_engine_has(
    store: EmbeddedStore,
    window: int,
    second: PageRun,
    changed: list[int],
    verdict: AuditVerdict,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a window of 20 tokens, a load brings the block's last page only."""
    with Bench(store, Shape(windows=(0, window))) as bench:
        bench.stored(ids(128))
        for group in changed:
            bench.rank.planes[2 * group + 1][1][4] += 1
        assert audited(bench, (WHOLE, second)) == [verdict]
    assert not caplog.records, "nothing has failed"


def test_an_audit_whose_pages_are_somebody_elses_finds_nothing(bench: Bench) -> None:
    bench.stored(ids(128))
    bench.worker.before_read.clear()
    bench.step(saves=[audit_of(bench.leased(ids(128), 64).ticket(), 64, (PageRun(2, [13, 14]),))])
    bench.begin(cancelled_saves=[77])
    bench.worker.before_read.set()
    assert bench.reports(saves=1).saves[0].results == ()


def test_an_audit_does_not_wait_for_the_engine(store: EmbeddedStore) -> None:
    """Its lease would run out; what waits before it goes as well."""
    with Bench(store) as bench:
        bench.stored(ids(128))
    with Bench(store, save_patience=SECONDS) as bench:
        bench.fill(ids(128), [11, 12, 13, 14])
        bench.step(number=1, saves=[bench.save(ids(64, 500), [1, 2])])
        assert audited(bench, (PageRun(2, [13, 14]),), behind=1, number=2) == [AuditVerdict.EXACT]
        assert bench.handle.match(ids(64, 500)).blocks == 1


@pytest.mark.parametrize("which", range(2))
def test_a_lease_that_is_gone_ends_an_audit_without_a_verdict(bench: Bench, which: int) -> None:
    bench.stored(ids(128))
    ticket = [b"x" * 40, bench.handle.lease(bench.handle.match(ids(64)), 0).ticket()][which]
    bench.step(saves=[audit_of(ticket, 64, (PageRun(2, [13, 14]),))])
    assert bench.reports(saves=1).saves[0].results == ()


# Pages that are registered again -------------------------------------------------------------------------------------


def test_pages_that_moved_are_used_once_nothing_reads_the_old_ones(bench: Bench) -> None:
    """A save that reads them ends first, one that waits is dropped: what it would read is gone."""
    tokens, table = ids(128), [*range(1, 9)]
    bench.fill(tokens, table)
    bench.worker.in_read.clear()
    bench.step(saves=[bench.save(tokens, table), bench.save(ids(64, 9), table)])
    assert bench.worker.reads.wait(SECONDS)
    leaving = blocks_for(0.1, bench.worker.leave_pages)
    assert [one.dropped for one in bench.reports(saves=1).saves] == [True]
    bench.worker.in_read.set()
    ends(leaving)
    assert bench.reports(saves=1)
    bench.rank = Rank(bench.shape, 0)
    bench.worker.register(bench.rank.pages)
    bench.stored(tokens)
    order = bench.load(tokens, [*range(11, 19)])
    bench.step(loads=[order])
    assert bench.reports(loads=1).loads[0].tokens == 128 and bench.is_right(tokens, [*range(11, 19)], 0, 128)


@pytest.mark.parametrize("kind", ["of another form", "of none"])
def test_pages_that_lie_otherwise_than_those_that_were_told_are_left_alone(bench: Bench, kind: str) -> None:
    tokens, table = ids(128), [*range(1, 9)]
    bench.stored(tokens)
    right, facts = bench.rank.pages, bench.rank.pages.facts
    other = (
        replace(facts, packing="another") if kind == "of another form" else WorkerSpec(0, 1, (), "", "", "", 0, "no")
    )
    bench.worker.register(EnginePages(other, {}))
    assert (other.refused or "lie otherwise than before") in bench.worker.pages.facts.refused
    bench.step(saves=[bench.save(ids(64, 9), table)])
    (saved,) = bench.reports(saves=1).saves
    assert (saved.stored, saved.reason) == (0, MissReason.UNSUPPORTED)
    order = bench.load(tokens, table, 64)
    bench.step(loads=[order])
    (loaded,) = bench.reports(loads=1).loads
    assert (loaded.tokens, loaded.reason) == (64, MissReason.UNSUPPORTED)
    assert bench.worker.finished()[2] == {*table[64 // bench.shape.page_tokens : 128 // bench.shape.page_tokens]}
    bench.worker.register(right)
    order = bench.load(tokens, table)
    bench.step(loads=[order])
    assert bench.reports(loads=1).loads[0].tokens == 128, "those that were told"
