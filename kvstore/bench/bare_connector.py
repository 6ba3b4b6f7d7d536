"""The least that a vLLM connector can do, to measure ours beside it (floor 4).

Pages lie in one file of shared memory and are copied whole, by the engine's own thread, before the step that needs them
and after the step that made them. There is no checksum, no other process, no lease and no limit but the file's length:
what this one takes for an external hit, any connector takes. Blocks are named by vLLM's own hashes and known in this
process alone. Must never be used for anything but a bench.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole


@dataclass
class Copies(KVConnectorMetadata):
    """Of one step: (page of the engine, slot in the file)."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)


class BareConnector(KVConnectorBase_V1):
    """Either half. Settings: `path` of the file, `slots` in it; blocks that find no slot are not kept."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._path, self._slots = settings["path"], settings["slots"]
        self._page_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._requests: dict[str, Any] = {}
        self._own_pages: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._kept: dict[bytes, int] = {}
        self._next = Copies()
        self._planes: list[tuple[torch.Tensor, torch.Tensor]] = []

    # Worker ----------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Map a file with as many slots for each layer. Pages are the tensors' first axis."""
        layers = [tensor.flatten(1).view(torch.uint8) for tensor in kv_caches.values()]
        size = sum(self._slots * layer.shape[1] for layer in layers)
        kept = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)
        kept.zero_()  # every page of the file is there before it is measured
        parts = kept.split([self._slots * layer.shape[1] for layer in layers])
        self._planes = [
            (layer, part.view(self._slots, layer.shape[1])) for layer, part in zip(layers, parts, strict=True)
        ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All of it, before the step goes on."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Copies)
        for layer, kept in self._planes:
            for page, slot in metadata.loads:
                layer[page].copy_(kept[slot])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is there already."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """All of it, before the step is over."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Copies)
        for layer, kept in self._planes:
            for page, slot in metadata.saves:
                kept[slot].copy_(layer[page])

    # Scheduler -------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Its hashes grow as its tokens do."""
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Whole pages behind the engine's own, one token left to compute."""
        first, most = num_computed_tokens // self._page_tokens, (request.num_tokens - 1) // self._page_tokens
        stop = self._own_pages[request.request_id] = first
        while stop < min(most, len(request.block_hashes)) and request.block_hashes[stop] in self._kept:
            stop += 1
        return (stop - first) * self._page_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has pages."""
        (table,) = blocks.get_block_ids()
        first = self._own_pages[request.request_id]
        for at in range(first, first + num_external_tokens // self._page_tokens):
            self._next.loads.append((table[at], self._kept[request.block_hashes[at]]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Loads, and every page that is full when this step is over."""
        copies, self._next = self._next, Copies()
        new = {one.req_id: one.block_ids for one in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        grown = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request_id in new:
                self._tables[request_id] = list(new[request_id][0])
            elif grown.get(request_id):
                self._tables[request_id] += grown[request_id][0]
            first = request.num_computed_tokens // self._page_tokens
            stop = (request.num_computed_tokens + scheduled) // self._page_tokens
            for at in range(first, min(stop, len(request.block_hashes))):
                name = request.block_hashes[at]
                if name not in self._kept and len(self._kept) < self._slots:
                    self._kept[name] = len(self._kept)
                    copies.saves.append((self._tables[request_id][at], self._kept[name]))
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing of it is waited for."""
        self._requests.pop(request.request_id, None)
        self._own_pages.pop(request.request_id, None)
        self._tables.pop(request.request_id, None)
        return False, None
