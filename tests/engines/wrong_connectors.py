"""Connectors that do something wrong on purpose: too late, with other numbers, or half of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from engine_adapter.paged import worker as paged_worker
from engine_adapter.paged.step_plan import LoadOrder, LoadReport
from engine_adapter.vllm_connector import KvStoreConnector
from kvstore.block.account import MissReason
from kvstore.block.pages import Pages

DELAY_SECONDS = 0.05


class SlowConnector(KvStoreConnector):
    """Every load and every save is delayed, so that whatever may happen meanwhile does: before the first byte, and
    between the last one and the report."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self._worker
        assert isinstance(worker, paged_worker.PagedWorker)
        load, begin, end = worker._load, worker.begin_reading, worker.end_reading

        def slow_load(*args: Any) -> Any:
            time.sleep(DELAY_SECONDS / 2)
            try:
                return load(*args)
            finally:
                time.sleep(DELAY_SECONDS / 2)

        def slow_begin(save: Any) -> bool:
            time.sleep(DELAY_SECONDS / 2)
            return begin(save)

        def slow_end() -> None:
            time.sleep(DELAY_SECONDS / 2)
            end()

        worker._load, worker.begin_reading, worker.end_reading = slow_load, slow_begin, slow_end


class ReversingConnector(KvStoreConnector):
    """Saves every block with the numbers of each token in reverse: digests and names are right, the numbers are not.
    (Whole tokens in another order would not show: attention asks for a set of them.)"""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self._worker
        assert isinstance(worker, paged_worker.PagedWorker)
        save, pages = worker._save, worker.pages.pages

        def reversed_pages(*args: Any, **kwargs: Any) -> Pages:
            given = pages(*args, **kwargs)
            table = torch.tensor(given.table)
            planes = {layer: [plane[table].flip(3) for plane in both] for layer, both in given.planes.items()}
            return Pages(planes, range(len(given.table)), given.page_tokens)

        def save_reversed(*args: Any) -> Any:
            worker.pages.pages = reversed_pages  # type: ignore[method-assign]
            try:
                return save(*args)
            finally:
                worker.pages.pages = pages  # type: ignore[method-assign]

        worker._save = save_reversed  # type: ignore[method-assign]


class FailingConnector(KvStoreConnector):
    """Every third load brings half of its blocks, and leaves numbers in the pages of the others that mean nothing."""

    FIRST, EVERY = 1, 3

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self._worker
        assert isinstance(worker, paged_worker.PagedWorker)
        load, loads = worker._load, iter(range(1 << 30))

        def fails(order: LoadOrder, *args: Any) -> LoadReport:
            report: LoadReport = load(order, *args)
            if next(loads) % self.EVERY != self.FIRST or report.tokens < order.stop_token:
                return report
            page = worker.pages.facts.page_tokens
            tokens = (order.first_token + order.stop_token) // 2 // page * page
            for run in order.tables:
                for number in run.pages[tokens // page - run.first :]:
                    for plane in (plane for planes in worker.pages._planes.values() for plane in planes):
                        plane[number] = 3.0
            return replace(report, tokens=tokens, reason=MissReason.CORRUPT)

        worker._load = fails  # type: ignore[method-assign]


class HalvingConnector(FailingConnector):
    """Every load does."""

    FIRST, EVERY = 0, 1
