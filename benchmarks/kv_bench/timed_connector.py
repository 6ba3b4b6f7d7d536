"""Our vLLM connector with a clock on each hook and on each request's look-up, and connectors to compare it with.

The clocks add some 0.2 us per call. A hook that calls another counts once. Both halves have to be in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import isfunction
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from engine_adapter.paged import scheduler
from engine_adapter.paged.lookup import PrefixLookup
from engine_adapter.vllm_connector import KvStoreConnector, StepPlanMetadata
from kv_bench.ttft_vllm import FRAME_BYTES, LINK_FILE
from kvstore.client.handle import Match

ON_START_AND_END = frozenset(
    {"register_kv_caches", "get_handshake_metadata", "set_xfer_handshake_metadata", "reset_cache", "shutdown"}
)
"""Hooks outside of requests and steps."""
WAITS_WHEN_IDLE = frozenset({"get_finished", "get_transfer_results"})
"""In a step that computes nothing these hooks wait for loads to give them the processor; that is not counted."""


class TimedLookup(PrefixLookup):
    """A look-up that records when it found blocks, and when it had leased them."""

    def __init__(self, times: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self._times = times
        super().__init__(*args, **kwargs)

    def found(self) -> Match | None:
        match = super().found()
        if match is not None:
            self._times.setdefault("found", perf_counter())
        return match

    def matched(self, *args: Any, **kwargs: Any) -> int | None:
        tokens = super().matched(*args, **kwargs)
        if self.leases:
            self._times.setdefault("leased", perf_counter())
        return tokens


class TimedConnector(KvStoreConnector):
    """`times`: seconds and calls of this half's hooks."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        self.times: dict[str, tuple[float, int]] = {}
        self.depth, self.is_idle = 0, False
        self._lookup: dict[str, float] = {}
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            # The scheduler makes its own look-ups, and this process has only one scheduler.
            setattr(scheduler, PrefixLookup.__name__, partial(TimedLookup, self._lookup))

    def on_new_request(self, request: Any) -> None:
        self._lookup.clear()
        self._lookup["asked"] = perf_counter()
        super().on_new_request(request)

    def lookup_ms(self) -> tuple[float, float]:
        """Of the last request's look-up and lease, in the scheduler's half; 0 for what did not happen."""
        asked, found, leased = (self._lookup.get(name, 0.0) for name in ("asked", "found", "leased"))
        return 1e3 * max(0.0, found - asked), 1e3 * max(0.0, leased - found)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self.is_idle = isinstance(connector_metadata, StepPlanMetadata) and not connector_metadata.step.number
        super().bind_connector_metadata(connector_metadata)


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def timed(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        start = perf_counter()
        try:
            return hook(self, *args, **kwargs)
        finally:
            self.depth -= 1
            if not self.depth and not (self.is_idle and name in WAITS_WHEN_IDLE):
                seconds, calls = self.times.get(name, (0.0, 0))
                self.times[name] = seconds + perf_counter() - start, calls + 1

    return timed


HOOKS = tuple(
    name
    for name, member in vars(KvStoreConnector).items()
    if not name.startswith("_") and name not in ON_START_AND_END and isfunction(member)
)
for _name in HOOKS:
    setattr(TimedConnector, _name, _timed(_name, getattr(TimedConnector, _name)))


class LinkedConnector(TimedConnector):
    """Behind a link of known speed: a load that a step waits for is over no sooner than such a link would have brought
    it: overhead + frames / speed. The speed stands in a file (`bytes_per_second overhead_seconds`), and may be another
    one for each load."""

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        began, tokens = perf_counter(), 0
        if self._worker is not None:
            tokens = sum(one.stop_token - one.first_token for one in self._worker._orders.loads if one.waits)
        super().start_load_kv(*args, **kwargs)
        if tokens:
            speed, overhead = map(float, Path(os.environ[LINK_FILE]).read_text().split())
            ends = began + overhead + tokens * float(os.environ[FRAME_BYTES]) / speed
            sleep(max(0.0, ends - perf_counter()))


@dataclass
class Copies(KVConnectorMetadata):
    """Of one step: (page of the engine, slot in the file)."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)


class BareConnector(KVConnectorBase_V1):
    """The cheapest possible vLLM connector, as a baseline for ours; either half.

    Pages lie in one file of shared memory; the engine's thread copies them whole, before the step that needs them, and
    those that a request has made before the step behind its end. No checksum, no other process, no lease, no limit but
    the file's length: any connector takes at least this long for an external hit. Blocks are named by vLLM's own
    hashes, known in this process only. Settings: `path` of the file, `slots` in it; blocks without a free slot are not
    kept. One request at a time: pages that are to be saved must not be taken before."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._path, self._slots = settings["path"], settings["slots"]
        self._page_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._own_pages = 0
        self._kept: dict[bytes, int] = {}
        self._next = Copies()
        self._planes: list[tuple[torch.Tensor, torch.Tensor]] = []

    # Worker ----------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = [tensor.flatten(1).view(torch.uint8) for tensor in kv_caches.values()]
        sizes = [self._slots * layer.shape[1] for layer in layers]
        kept = torch.from_file(self._path, shared=True, size=sum(sizes), dtype=torch.uint8)
        kept.zero_()  # touch every page before measuring
        self._planes = [
            (layer, part.view(self._slots, -1)) for layer, part in zip(layers, kept.split(sizes), strict=True)
        ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Copies)
        for layer, kept in self._planes:
            for page, slot in metadata.saves:
                kept[slot].copy_(layer[page])
            for page, slot in metadata.loads:
                layer[page].copy_(kept[slot])

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    # Scheduler -------------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        first, most = num_computed_tokens // self._page_tokens, (request.num_tokens - 1) // self._page_tokens
        stop = self._own_pages = first
        while stop < min(most, len(request.block_hashes)) and request.block_hashes[stop] in self._kept:
            stop += 1
        return (stop - first) * self._page_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (table,) = blocks.get_block_ids()
        for at in range(self._own_pages, self._own_pages + num_external_tokens // self._page_tokens):
            self._next.loads.append((table[at], self._kept[request.block_hashes[at]]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        copies, self._next = self._next, Copies()
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        whole = request.num_computed_tokens // self._page_tokens
        for page, name in zip(block_ids[:whole], request.block_hashes, strict=False):
            if name not in self._kept and len(self._kept) < self._slots:
                self._kept[name] = len(self._kept)
                self._next.saves.append((page, self._kept[name]))
        return False, None
