"""vLLM's own scheduler and both halves of its offloading, with the store below, and workers that compute KV and states
by a formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from engines.tier_engine import be_patient, offloading, opened
from scheduled_engine import FormulaEngine


class ScheduledTier(FormulaEngine):
    """With vLLM's `OffloadingConnector` and the recorded tier."""

    layout = KVCacheLayout.LBHNC

    def __init__(
        self, model: Path, specs: Sequence[dict[str, KVCacheSpec]], tier: dict[str, Any], ranks: int = 1, **more: Any
    ) -> None:
        block = max(spec.block_size for stage in specs for spec in stage.values())
        blocks = more.pop("blocks_per_chunk", 1)
        given = dict(max_model_len=8 * block, max_num_batched_tokens=3 * block, max_num_seqs=4)
        given |= dict(num_gpu_blocks_override=64, skip_tokenizer_init=True, enforce_eager=True)
        transfer = offloading([tier], blocks_per_chunk=blocks, cpu_bytes_to_use=32 << 20)
        super().__init__(specs, ranks=ranks, model=str(model), transfer=transfer, **{**given, **more})
        (self.tier,) = self.connector.connector_scheduler.manager.secondary_tiers
        be_patient(self.tier)
        opened(self.tier)

    @property
    def model_executor(self) -> ScheduledTier:
        """As vLLM's core has it."""
        return self

    def get_kv_cache_specs(self) -> Sequence[dict[str, KVCacheSpec]]:
        """As vLLM's executor has them, by rank."""
        return self.of_rank

    def ask(self, name: str, prompt: Sequence[int], **more: Any) -> int:
        """Alone, to its end; how many tokens were not computed. more: as in `add`."""
        before = self.brought
        self.add(name, prompt, **more)
        self.run()
        return self.brought - before

    def forget(self) -> None:
        """Nothing is left in the engine's own cache, nor in the primary tier."""
        assert self.scheduler.reset_prefix_cache(reset_connector=True)


def adapter_of(name: str, number: int, path: Path) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=False)
