"""A real vLLM engine on the CPU with the store as its secondary tier."""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import models
from kvstore.client.socket_door import CallLimits
from waiting import wait_until

BLOCK_TOKENS, BLOCKS_PER_CHUNK = 32, 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
SMALL = ("--dram", "32MiB", "--nvme", "64MiB")
"""Its sidecar's sizes."""


class Engine:
    def __init__(self, model: Path, tiers: Sequence[Mapping[str, Any]] | None) -> None:
        """tiers: secondary tiers; None for an engine without any connector."""
        transfer = offloading(tiers) if tiers is not None else None
        options = {"block_size": BLOCK_TOKENS, "skip_tokenizer_init": True, "max_model_len": 2048}
        models.prepare()
        with _out_of_sight("llvmlite.binding.ffi"):
            self.llm = models.start(model, transfer, **options)
        self._core: Any = self.llm.llm_engine.engine_core
        self.tier: Any = None
        if tiers:
            (self.tier,) = self._core.engine_core.scheduler.connector.connector_scheduler.manager.secondary_tiers
            be_patient(self.tier)

    def generate(self, prompt: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Prompt tokens that were not computed, and eight tokens."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        (answer,) = self.llm.generate([{"prompt_token_ids": list(prompt)}], wanted, use_tqdm=False)
        return answer.num_cached_tokens or 0, tuple(answer.outputs[0].token_ids)

    def reset(self) -> None:
        """Nothing is left in the engine's own cache, nor in the primary tier."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def close(self) -> None:
        self._core.shutdown()


@contextmanager
def _out_of_sight(module: str) -> Iterator[None]:
    """On a CPU vLLM 0.32 looks into every module that is loaded, and stumbles over one of those behind numba, which
    this process may have imported before."""
    hidden = sys.modules.pop(module, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[module] = hidden


@contextmanager
def engine(model: Path, tiers: Sequence[Mapping[str, Any]] | None) -> Iterator[Engine]:
    """An engine that leaves nothing behind, the memory of its primary tier included."""
    before = set(Path("/dev/shm").glob("vllm_offload_*.mmap"))
    running: Engine | None = None
    try:
        running = Engine(model, tiers)
        yield running
    finally:
        if running is not None:
            running.close()
        for left in set(Path("/dev/shm").glob("vllm_offload_*.mmap")) - before:
            if left.stat().st_uid == os.getuid():
                left.unlink(missing_ok=True)


def tier_of(url: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "RecordedTier", "module_path": "engines.cpu_tiering", "url": url, **parameters}


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Token ids that nothing ends at. Of one seed all begin alike."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(tokens)]


def offloading(tiers: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """How vLLM is told to offload: these secondary tiers below a worker that runs on a CPU."""
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "engines.cpu_tiering",
        "cpu_bytes_to_use": 16 << 20,
        "blocks_per_chunk": BLOCKS_PER_CHUNK,
        "secondary_tiers": [dict(tier) for tier in tiers],
        **more,
    }
    given = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {**given, "kv_connector_extra_config": extra}


def opened(tier: Any) -> None:
    """Return when the tier has its namespaces."""
    wait_until(lambda: all(space.handle is not None for space in tier._chunks._spaces))


def be_patient(tier: Any) -> None:
    """Answers may be as late as a busy machine makes them: a late one would be a miss, which is not what is tested."""
    for store in tier._stores:
        store._door._limits = CallLimits(match=10.0, lease=10.0)
    tier._chunks._answer_seconds = 30.0


def takes(function: Any) -> set[str]:
    """Names of a function's parameters, but self."""
    return set(inspect.signature(function).parameters) - {"self"}
