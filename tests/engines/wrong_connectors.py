"""A connector that does something wrong where a test wants it: too late, with other numbers, or half of it. A fault is
methods in place of the worker's own."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar

import torch

from engine_adapter.paged.step_plan import LoadOrder, LoadReport
from engine_adapter.paged.worker import PagedWorker
from engine_adapter.vllm_connector import KvStoreConnector
from kvstore.block.account import MissReason
from kvstore.block.pages import Pages

DELAY_SECONDS = 0.05


def late(worker: PagedWorker) -> None:
    """Every load and every save is delayed, so that whatever may happen meanwhile does: before the first byte, and
    between the last one and the report."""
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

    def slow_end(save: Any) -> None:
        time.sleep(DELAY_SECONDS / 2)
        end(save)

    worker._load, worker.begin_reading, worker.end_reading = slow_load, slow_begin, slow_end


def reversed_numbers(worker: PagedWorker) -> None:
    """Saves every block with the numbers of each token in reverse: digests and names are right, the numbers are not.
    (Whole tokens in another order would not show: attention asks for a set of them.)"""
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


def half_of_it(worker: PagedWorker) -> None:
    """Every third load brings half of its blocks, and leaves numbers in the pages of the others that mean nothing."""
    load, loads = worker._load, iter(range(1 << 30))

    def fails(order: LoadOrder, *args: Any) -> LoadReport:
        report: LoadReport = load(order, *args)
        if next(loads) % 3 != 1 or report.tokens < order.stop_token:
            return report
        page = worker.pages.facts.page_tokens
        tokens = (order.first_token + order.stop_token) // 2 // page * page
        for run in order.tables:
            for number in run.pages[tokens // page - run.first :]:
                for plane in (plane for planes in worker.pages._planes.values() for plane in planes):
                    plane[number] = 3.0
        return replace(report, tokens=tokens, reason=MissReason.CORRUPT)

    worker._load = fails  # type: ignore[method-assign]


FAULTS = {fault.__name__: fault for fault in (late, reversed_numbers, half_of_it)}


class ChangingConnector(KvStoreConnector):
    """Nothing is wrong with it until a test says what. Tests of different faults share an engine with it."""

    OPEN_SECONDS = 60.0
    halves: ClassVar[list[ChangingConnector]] = []
    """Both, in an engine of one process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.halves.append(self)

    @classmethod
    def become(cls, wrong: str | None) -> None:
        """wrong: of `FAULTS`, from here on."""
        for half in cls.halves:
            if half._worker is not None:
                for name in ("_load", "_save", "begin_reading", "end_reading"):
                    vars(half._worker).pop(name, None)
                if wrong is not None:
                    FAULTS[wrong](half._worker)

    @classmethod
    def wait_open(cls) -> bool:
        """Once it was given another namespace: whether the store has opened that."""
        return all(half.half.wait_open(cls.OPEN_SECONDS) for half in cls.halves if half._worker is None)
