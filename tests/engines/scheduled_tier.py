"""vLLM's own scheduler and both halves of its offloading, with the store below, and workers that compute KV and states
by a formula: what belongs into each page is known, and all that an attention of its kind would read is compared. No
model runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from engines.tier_engine import SECONDS, be_patient, offloading, opened

MIXED = np.uint64(0x9E3779B97F4A7C15)


def hashes_of(tokens: Sequence[int], seed: int) -> np.ndarray:
    """Behind each token, of all tokens up to it and of the weights."""
    found, value = np.empty(len(tokens), np.uint64), seed + 1
    for at, token in enumerate(tokens):
        value = (value * 0x5851F42D4C957F2D + token + 1) % (1 << 64)
        found[at] = value = value ^ (value >> 31)
    return found


def bytes_of(hashes: np.ndarray, layer: int, count: int) -> torch.Tensor:
    """[hashes, count]: what a layer makes of each."""
    mixed = (hashes ^ np.uint64(layer + 1)) * MIXED
    return torch.from_numpy(np.tile(mixed.view(np.uint8).reshape(-1, 8), -(-count // 8))[:, :count].copy())


class ScheduledTier:
    """A vLLM without a model. specs: of each stage's layers, one after the other."""

    def __init__(
        self, model: Path, specs: Sequence[dict[str, KVCacheSpec]], tier: dict[str, Any], ranks: int = 1, **more: Any
    ) -> None:
        blocks, self.model_executor = more.pop("blocks_per_chunk", 1), self
        self.specs = [stage for stage in specs for _ in range(ranks)]
        every = [spec for stage in specs for spec in stage.values()]
        block = max(spec.block_size for spec in every)
        transfer = KVTransferConfig(**offloading([tier], blocks_per_chunk=blocks, cpu_bytes_to_use=32 << 20))
        given = dict(max_model_len=8 * block, block_size=block, max_num_batched_tokens=3 * block, max_num_seqs=4)
        given |= dict(num_gpu_blocks_override=64, skip_tokenizer_init=True, async_scheduling=False, enforce_eager=True)
        self.vllm_config = config = EngineArgs(
            model=str(model), enable_prefix_caching=True, kv_transfer_config=transfer, **{**given, **more}
        ).create_engine_config()
        cache, parallel, layout = config.cache_config, config.parallel_config, KVCacheLayout.LBHNC
        cache.block_size, cache.kv_cache_layout = block, layout.name
        states = [spec.block_size for spec in every if isinstance(spec, MambaSpec)]
        cache.mamba_cache_mode, cache.mamba_block_size = ("align", states[0]) if states else ("none", None)
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = ranks, len(specs)
        parallel.world_size, parallel.distributed_executor_backend = len(self.specs), "mp"
        count = len(self.specs)
        with set_current_vllm_config(config):
            groups = kv_cache_utils.get_kv_cache_configs(config, self.specs, [1 << 30] * count)
        of_all = kv_cache_utils.generate_scheduler_kv_cache_config(groups)
        cache.num_gpu_blocks, sizes = of_all.num_blocks, kv_cache_utils.resolve_kv_cache_block_sizes(of_all, config)
        of_all.hash_block_size, hasher = sizes[1], get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        self.workers, self.layers = list[Any](), list[list[tuple[int, Any, int, torch.Tensor]]]()
        for rank in range(count):
            parallel.rank = rank
            self.workers.append(KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, groups[rank]))
            pages = allocate_kv_cache(groups[rank], torch.device("cpu"), layout)
            self.workers[rank].register_kv_caches(pages)
            numbers = {name: 64 * rank + at for at, name in enumerate(self.specs[rank])}
            self.layers.append(
                [
                    (numbers[name], group.kv_cache_spec, table, pages[name].view(torch.uint8))
                    for table, group in enumerate(groups[rank].kv_cache_groups)
                    for name in group.layer_names
                ]
            )
        parallel.rank = 0
        self.scheduler = Scheduler(
            config, of_all, StructuredOutputManager(config), block_size=sizes[0], hash_block_size=sizes[1]
        )
        kv_cache_utils.init_none_hash(hasher)
        self._hasher = kv_cache_utils.get_request_block_hasher(sizes[1], hasher)
        self.connector: Any = self.scheduler.get_kv_connector()
        (self.tier,) = self.connector.connector_scheduler.manager.secondary_tiers
        be_patient(self.tier)
        opened(self.tier)
        self.streams, self.arrived, self.brought = dict[str, np.ndarray](), dict[str, int](), 0
        self.compared = 0
        """Pages that were loaded or cached, and are right."""

    def get_kv_cache_specs(self) -> Sequence[dict[str, KVCacheSpec]]:
        """As vLLM's executor has them, by rank."""
        return self.specs

    def __enter__(self) -> ScheduledTier:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.workers, self.connector):
            one.shutdown()

    def ask(self, name: str, prompt: Sequence[int], **more: Any) -> int:
        """Alone, to its end; how many tokens were not computed. more: as in `add`."""
        before = self.brought
        self.add(name, prompt, **more)
        self.run()
        return self.brought - before

    def run(self) -> None:
        deadline = time.monotonic() + SECONDS
        while self.scheduler.has_unfinished_requests() or self.connector.has_pending_push_work():
            assert time.monotonic() < deadline, "it does not come to an end"
            self.step()

    def add(self, name: str, prompt: Sequence[int], *, lora: Any = None, weights: int = 0, outputs: int = 1) -> None:
        """A request. weights: what its KV is made by."""
        self.streams[name] = hashes_of([*prompt, *range(outputs)], weights)
        params = SamplingParams(max_tokens=outputs, ignore_eos=True)
        params.update_from_generation_config({}, 1 << 30)
        given = dict(sampling_params=params, pooling_params=None, lora_request=lora, block_hasher=self._hasher)
        self.scheduler.add_request(Request(request_id=name, prompt_token_ids=list(prompt), **given))

    def forget(self) -> None:
        """Nothing is left in the engine's own cache, nor in the primary tier."""
        assert self.scheduler.reset_prefix_cache(reset_connector=True)

    def step(self) -> None:
        """As vLLM's engine core does."""
        output, reports = self.scheduler.schedule(), []
        self.brought += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        for worker, layers in zip(self.workers, self.layers, strict=True):
            with _as(worker):
                worker.handle_preemptions(output.kv_connector_metadata)
                hooks = KVConnectorModelRunnerMixin._get_kv_connector_output(output)
                with set_forward_context(None, self.vllm_config), hooks as report:
                    for name, tokens in output.num_scheduled_tokens.items():
                        self._compute(name, self._first(output, name), tokens, layers)
                reports.append(report)
        merged = reports[0]
        metas = [one.kv_connector_worker_meta for one in reports if one.kv_connector_worker_meta is not None]
        for other in metas[1:]:
            metas[0] = metas[0].aggregate(other)
        merged.kv_connector_worker_meta = metas[0] if metas else None
        for name in (name for one in reports for name in one.finished_recving or ()):
            self.arrived[name] = self.arrived.get(name, 0) + 1
        merged.finished_recving = {name for name, count in self.arrived.items() if count == len(reports)}
        self.arrived = {name: count for name, count in self.arrived.items() if count < len(reports)}
        sampled = [self._sampled(output, name) for name in output.num_scheduled_tokens]
        names = {name: at for at, name in enumerate(output.num_scheduled_tokens)}
        made = dict(req_ids=list(names), req_id_to_index=names, sampled_token_ids=sampled)
        self.scheduler.update_from_output(output, ModelRunnerOutput(**made, kv_connector_output=merged))

    def _first(self, output: Any, name: str) -> int:
        for new in output.scheduled_new_reqs:
            if new.req_id == name:
                return int(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        return int(cached.num_computed_tokens[cached.req_ids.index(name)])

    def _sampled(self, output: Any, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        made = request.num_computed_tokens - request.num_prompt_tokens
        return [made] if request.num_computed_tokens >= request.num_prompt_tokens else []

    def _compute(
        self, name: str, first: int, tokens: int, layers: Sequence[tuple[int, Any, int, torch.Tensor]]
    ) -> None:
        hashes, tables = self.streams[name], self.scheduler.kv_cache_manager.get_block_ids(name)
        for number, spec, at, pages in layers:
            table, size, stop = torch.tensor(tables[at]), spec.block_size, first + tokens
            if isinstance(spec, MambaSpec):
                flat = pages.flatten(1)
                if first:
                    before = bytes_of(hashes[first - 1 : first], number, flat.shape[1])[0]
                    self._compare(name, number, flat[table[(first - 1) // size]], before)
                flat[table[(stop - 1) // size]] = bytes_of(hashes[stop - 1 : stop], number, flat.shape[1])[0]
                continue
            sees = max(0, first - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
            old, new = np.arange(sees, first), np.arange(first, stop)
            width = pages[0, :, 0].numel()
            if len(old):
                held = pages[table[old // size], :, old % size].flatten(1)
                self._compare(name, number, held, bytes_of(hashes[old], number, width))
            made = bytes_of(hashes[new], number, width)
            pages[table[new // size], :, new % size] = made.view(tokens, *pages[0, :, 0].shape)

    def _compare(self, name: str, layer: int, held: torch.Tensor, wanted: torch.Tensor) -> None:
        assert torch.equal(held, wanted), f"{name}: what layer {layer} reads is not its prefix's"
        self.compared += 1


@contextmanager
def _as(worker: Any) -> Any:
    kv_transfer_state._KV_CONNECTOR_AGENT = worker
    yield
    kv_transfer_state._KV_CONNECTOR_AGENT = None


def adapter_of(name: str, number: int, path: Path) -> Any:
    """What a request has of its LoRA."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=False)
