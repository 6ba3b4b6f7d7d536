"""What a thread does behind a mark: on a GPU it comes after the engine's step, and on a CPU there is nothing to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from adapters.test_paged_worker import Bench, audit_of
from engine_adapter.audit.audits import AuditVerdict
from engine_adapter.paged.pages import EngineStream
from engine_adapter.paged.step_plan import PageRun
from kvstore.node import EmbeddedStore
from waiting import wait_until
from workbench import ids

LATE_CYCLES = 200_000_000
"""A tenth of a second or so."""


def seen_by_another_thread(order: EngineStream, mark: Any, page: torch.Tensor, *, waits: bool) -> list[float]:
    seen: list[float] = []

    def look() -> None:
        if waits:
            with order.behind(mark):
                copy = page.clone()
                order.wait()
                seen.append(float(copy.amin()))
        else:
            with torch.cuda.stream(torch.cuda.Stream()):
                seen.append(float(page.clone().amin()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(30)
    return seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU for torch")
@pytest.mark.parametrize("waits", [True, False])
def test_on_a_gpu_a_page_is_read_after_the_step_that_writes_it(waits: bool) -> None:
    page = torch.zeros(1 << 16, device="cuda")
    order, engine = EngineStream(page.device), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(engine):
        torch.cuda._sleep(LATE_CYCLES)
        page.fill_(7.0)
        mark = order.mark()
    assert seen_by_another_thread(order, mark, page, waits=waits) == [7.0 if waits else 0.0]
    torch.cuda.synchronize()


def test_on_a_cpu_nothing_is_put_off() -> None:
    order = EngineStream(torch.device("cpu"))
    assert order.mark() is None
    with order.behind(None):
        order.wait()


class Recorded(EngineStream):
    """A stream that says who did what. Marks are numbers; a step is one of the engine's."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.steps = 0
        self.told: list[tuple[str, int]] = []
        self.here = threading.local()

    def mark(self) -> int:
        assert threading.current_thread() is threading.main_thread(), "the engine's"
        return self.steps

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        self.here.mark = mark
        yield
        del self.here.mark

    def wait(self) -> None:
        self.told.append(("waited", self.here.mark))

    def tell(self, what: str, call: Any) -> Any:
        def told(*given: Any, **options: Any) -> Any:
            self.told.append((what, getattr(self.here, "mark", -1)))
            return call(*given, **options)

        return told


def test_all_that_threads_of_a_worker_do_with_pages_is_behind_the_step_it_belongs_to(store: EmbeddedStore) -> None:
    with Bench(store) as bench:
        bench.stored(ids(128))
        stream = bench.worker.pages.stream = Recorded()
        for name in ("_load", "begin_reading", "end_reading"):
            setattr(bench.worker, name, stream.tell(name.strip("_"), getattr(bench.worker, name)))
        stream.steps = 5
        load = bench.load(ids(128), [9, 10, 11, 12], waits=False)
        bench.step(loads=[load])
        stream.steps = 6
        wait_until(lambda: bool(bench.worker.finished()[0]))
        audit = audit_of(bench.leases[0].ticket(), 64, (PageRun(2, [3, 4]),))
        bench.step(saves=[audit, bench.save(ids(64, 700), [5, 6])])
        stream.steps = 7
        assert bench.reports(saves=2).saves[0].results[0].verdict is AuditVerdict.EXACT
        bench.step(loads=[bench.load(ids(128), [9, 10, 11, 12])])
    read = [("begin_reading", 6), ("waited", 6), ("end_reading", 6)]
    assert stream.told[0] == ("load", 5)
    assert stream.told[1:4] == read, "copies are made before the pages are given back"
    assert stream.told[4:6] == [("begin_reading", 6), ("end_reading", 6)]
    assert stream.told[6:] == [("load", -1)], "the engine's own thread is where its stream is"
