"""vLLM's tiered offloading on a machine without a GPU: for tests of what stands behind it.

vLLM offers its copies between device and host for GPUs only. `CpuTieringSpec` is its own `TieringOffloadingSpec` with
a worker that copies between two memories of the host; lookups, promotions, cascades, the primary tier and its memory
are vLLM's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from engine_adapter.vllm_tier import _SLOTS_FIELD, KvStoreTier


class CopyingWorker(OffloadingWorker):
    """Copies at once, in the caller's thread: of each block what its KV group has of it."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region, self._each, self._groups = region, blocks_per_chunk, kv_caches.group_data_refs
        self._pairs = []
        for cache in kv_caches.tensors:
            size = cache.page_size_bytes
            blocks = cache.tensor.view(torch.int8).view(-1, size)
            chunks = region.create_next_worker_view(size * blocks_per_chunk)
            self._pairs.append((blocks, chunks.unflatten(1, (blocks_per_chunk, size))))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in self._places(src_spec, dst_spec):
            chunk[:] = block
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in self._places(dst_spec, src_spec):
            block[:] = chunk
        return self._end(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()

    def _places(self, blocks: GPULoadStoreSpec, chunks: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A block, and its place in a chunk. A group's first one may be in the middle of a chunk."""
        block_ids, chunk_ids = blocks.block_ids.tolist(), chunks.block_ids.tolist()
        for refs, count, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            skip = first % self._each
            for number, block in enumerate(block_ids[:count], skip):
                for ref in refs:
                    of_blocks, of_chunks = self._pairs[ref.tensor_idx]
                    at = chunk_ids[number // self._each], number % self._each
                    yield of_blocks[block, : ref.page_size_bytes], of_chunks[at][: ref.page_size_bytes]
            del block_ids[:count], chunk_ids[: -(-(count + skip) // self._each) if count else 0]
        assert not block_ids and not chunk_ids

    def _end(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """`{"spec_name": "CpuTieringSpec", "spec_module_path": "engines.cpu_tiering", ...}`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            names = inspect.signature(SharedOffloadRegion.__init__).parameters
            unit = "chunk" if "num_chunks" in names else "block"  # as 0.28 calls it
            count = self.num_chunks if unit == "chunk" else self.num_blocks
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                rank=self.config.parallel.rank,
                cpu_page_size=self.cpu_page_size_per_worker,
                **{f"num_{unit}s": count, f"kv_bytes_per_{unit}": self.kv_bytes_per_chunk},
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class RecordedTier(KvStoreTier):
    """The tier, and what passed through it."""

    def __init__(self, *args: Any, **parameters: Any) -> None:
        super().__init__(*args, **parameters)
        self.stored: list[bytes] = []
        self.loaded: list[bytes] = []
        self.jobs: list[Any] = []
        self.bytes_of: dict[bytes, bytes] = {}
        self.is_storing = True

    def submit_store(self, job_metadata: Any) -> None:
        if not self.is_storing:
            nothing: Any = {_SLOTS_FIELD: np.array([], np.int64)}
            super().submit_store(replace(job_metadata, keys=[], **nothing))
            return
        self.stored += [bytes(key) for key in job_metadata.keys]
        memory = np.asarray(self._primary_kv_view)
        for key, slot in zip(job_metadata.keys, getattr(job_metadata, _SLOTS_FIELD), strict=True):
            self.bytes_of[bytes(key)] = memory[int(slot)].tobytes()
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        self.loaded += [bytes(key) for key in job_metadata.keys]
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Any:
        jobs = list(super().get_finished_jobs())
        self.jobs += jobs
        return jobs
