"""The connector with every load and every save delayed, so that whatever may happen meanwhile does."""

from __future__ import annotations

import time
from typing import Any

from engine_adapter import paged_worker
from engine_adapter.vllm_connector import KvStoreConnector

DELAY_SECONDS = 0.05


class SlowConnector(KvStoreConnector):
    """Delays are between the order and the first byte, and between the last byte and the report."""

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
