"""Our vLLM connector behind a link of known speed: what `vllm_break_even.py` starts its engine with.

A load that a step waits for is over no sooner than such a link would have brought it: overhead + frames / speed. The
speed stands in a file (`bytes_per_second overhead_seconds`), and may be another one for each load.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from kv_bench.engines.timed_connector import TimedConnector

LINK_FILE = "KVSTORE_BENCH_LINK"
FRAME_BYTES = "KVSTORE_BENCH_FRAME_BYTES"
"""Of a token, its share of a frame's header and padding within."""


class LinkedConnector(TimedConnector):
    """Either half; the worker's waits."""

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        began, tokens = perf_counter(), 0
        if self._worker is not None:
            tokens = sum(one.stop_token - one.first_token for one in self._worker._orders.loads if one.waits)
        super().start_load_kv(*args, **kwargs)
        if tokens:
            speed, overhead = map(float, Path(os.environ[LINK_FILE]).read_text().split())
            ends = began + overhead + tokens * float(os.environ[FRAME_BYTES]) / speed
            sleep(max(0.0, ends - perf_counter()))
