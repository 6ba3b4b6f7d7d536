"""Faults that `kvstore prove` has to name: a worker of vLLM that spoils its engine's own cache, one that is not
repeatable, and a connector of this store that puts blocks into the wrong pages, or loses the draft's KV."""

from __future__ import annotations

from collections.abc import Callable, Collection
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


class NotRepeatable(CPUWorker):
    """Computes with other weights in a step with several requests."""

    def execute_model(self, scheduler_output: Any) -> Any:
        weights = self.model_runner.model.model.norm.weight.data
        kept = weights.clone()
        if len(scheduler_output.num_scheduled_tokens) > 1:
            weights[::2] *= 3
        try:
            return super().execute_model(scheduler_output)
        finally:
            weights.copy_(kept)


def the_first_page_everywhere(worker: PagedWorker) -> None:
    """Every load leaves the tokens of its first page in all of its pages. (The right ones in another order would not
    show: attention asks for a set of tokens.)"""

    def misplaced(plane: Any, pages: list[int]) -> None:
        plane[pages] = plane[pages[0]].clone()

    _after_loads(worker, worker.pages.numbers.values(), misplaced)


def without_the_drafts(worker: PagedWorker) -> None:
    """Every load leaves nothing but zeros in the pages of the draft model's layers."""

    def emptied(plane: Any, pages: list[int]) -> None:
        plane[pages] = 0

    drafted = [number for name, number in worker.pages.numbers.items() if "draft" in name]
    assert drafted, f"no layer is a draft's: {list(worker.pages.numbers)}"
    _after_loads(worker, drafted, emptied)


def _after_loads(worker: PagedWorker, numbers: Collection[int], spoil: Callable[[Any, list[int]], None]) -> None:
    """numbers: of layers. spoil: called for each plane of these with the pages of a load that is over."""
    load = worker._load

    def spoiled(order: LoadOrder, *args: Any) -> LoadReport:
        report: LoadReport = load(order, *args)
        for plane in (plane for number in numbers for plane in worker.pages._planes[number]):
            for run in order.tables:
                spoil(plane, list(run.pages))
        return report

    worker._load = spoiled  # type: ignore[method-assign]


class _Planted(KvStoreConnector):
    fault: ClassVar[Callable[[PagedWorker], None]]

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None, "its pages are served"
        if "_load" not in vars(self._worker):
            type(self).fault(self._worker)


class OnePageConnector(_Planted):
    fault = the_first_page_everywhere


class DraftlessConnector(_Planted):
    fault = without_the_drafts
