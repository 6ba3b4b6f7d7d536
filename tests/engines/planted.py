"""Faults that `kvstore prove` has to name: a worker of vLLM that spoils its engine's own cache, and a connector of this
store that puts blocks into the wrong pages, or loses the draft's KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from vllm.v1.worker.cpu_worker import CPUWorker

from engine_adapter.paged.step_plan import LoadOrder, LoadReport
from engine_adapter.paged.worker import PagedWorker
from engine_adapter.vllm_connector import KvStoreConnector


class SpoilsOwnCache(CPUWorker):
    """Turns the signs of the first page of each request that finds something in the engine's own cache."""

    def execute_model(self, scheduler_output: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            if new.num_computed_tokens:
                for plane in self.model_runner.kv_caches:
                    first = new.block_ids[0][0]
                    # Blocks are the first dimension, or the second behind K and V.
                    (plane[:, first] if plane.shape[0] == 2 else plane[first]).neg_()
        return super().execute_model(scheduler_output)


def into_the_first_page(worker: PagedWorker) -> None:
    """Every load puts the tokens of all pages into the first one; the others keep what lay in them. (All pages in
    another order would not show: attention asks for a set of tokens.)"""
    load = worker._load

    def misplaced(order: LoadOrder, *args: Any) -> LoadReport:
        tables = [replace(run, pages=run.pages[:1] * len(run.pages)) for run in order.tables]
        report: LoadReport = load(replace(order, tables=tables), *args)
        return report

    worker._load = misplaced  # type: ignore[method-assign]


def without_the_drafts(worker: PagedWorker) -> None:
    """Every load leaves nothing but zeros in the pages of the draft model's layers."""
    load = worker._load

    def emptied(order: LoadOrder, *args: Any) -> LoadReport:
        report: LoadReport = load(order, *args)
        drafted = [number for name, number in worker.pages.numbers.items() if "draft" in name]
        assert drafted, f"no layer is a draft's: {list(worker.pages.numbers)}"
        for plane in (plane for number in drafted for plane in worker.pages._planes[number]):
            for run in order.tables:
                plane[list(run.pages)] = 0
        return report

    worker._load = emptied  # type: ignore[method-assign]


class _Planted(KvStoreConnector):
    fault: ClassVar[Callable[[PagedWorker], None]]

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None, "its pages are served"
        if "_load" not in vars(self._worker):
            type(self).fault(self._worker)


class OnePageConnector(_Planted):
    fault = into_the_first_page


class DraftlessConnector(_Planted):
    fault = without_the_drafts
