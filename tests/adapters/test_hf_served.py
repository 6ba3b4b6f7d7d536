"""What `served` says of transformers' architectures, against what `PrefixCache` makes of small copies of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.block.errors import BadInput

pytest.importorskip("transformers")

import transformers as T

from engine_adapter.hf_cache import PrefixCache
from hf_models import GATED
from kvstore.insight.served import Verdict, shapes

pytestmark = pytest.mark.usefixtures("one_thread")

FOUR: dict[str, Any] = {**GATED, "num_hidden_layers": 4, "head_dim": 16}
WINDOW: dict[str, Any] = {**FOUR, "sliding_window": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDTHS = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MLA: dict[str, Any] = {**GATED, **EXPERTS, **WIDTHS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
INDEX: dict[str, Any] = {**MLA, "topk_group": 1, "index_n_heads": 2, "index_head_dim": 32}
HEADS = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
BY_LENGTH = {"rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
SMALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 3.1 / 3.3": ("LlamaConfig", "Llama", FOUR),
    "Phi-4-mini / 3.5-mini": (
        "Phi3Config",
        "Phi3",
        {**GATED, "rope_parameters": {**BY_LENGTH, "rope_type": "longrope"}, "original_max_position_embeddings": 512},
    ),
    "Hunyuan dense with dynamic NTK": (
        "HunYuanDenseV1Config",
        "HunYuanDenseV1",
        {**FOUR, "rope_parameters": {**BY_LENGTH, "rope_type": "dynamic"}},
    ),
    "Mistral 7B v0.1": ("MistralConfig", "Mistral", WINDOW),
    "Gemma 2": ("Gemma2Config", "Gemma2", WINDOW),
    "Gemma 4 (text)": ("Gemma4TextConfig", "Gemma4", {**WINDOW, "global_head_dim": 32}),
    "gpt-oss": ("GptOssConfig", "GptOss", {**WINDOW, "num_local_experts": 4}),
    "MiMo-V2-Flash": ("MiMoV2FlashConfig", "MiMoV2Flash", FOUR),
    "Llama 4 (text)": (
        "Llama4TextConfig",
        "Llama4",
        {**FOUR, "attention_chunk_size": 64, "num_local_experts": 2, "intermediate_size_mlp": 64},
    ),
    "DeepSeek V3 / R1 / Kimi K2": ("DeepseekV3Config", "DeepseekV3", {**MLA, "topk_group": 1}),
    "DeepSeek V3.2": ("DeepseekV32Config", "DeepseekV32", INDEX),
    "GLM-5": ("GlmMoeDsaConfig", "GlmMoeDsa", INDEX),
    "DeepSeek V4": ("DeepseekV4Config", "DeepseekV4", {**GATED, "num_hidden_layers": 4}),
    "Qwen3-Next": ("Qwen3NextConfig", "Qwen3Next", {**FOUR, **EXPERTS, **HEADS, "num_experts": 4}),
    "Falcon-H1": ("FalconH1Config", "FalconH1", {**GATED, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
    "Gemma 3 4B and larger (with pictures)": (
        "Gemma3Config",
        "Gemma3",
        {"text_config": WINDOW, "vision_config": {**VISION, "intermediate_size": 32}, "mm_tokens_per_image": 4},
    ),
}
"""Configuration, class and fields."""


@pytest.mark.parametrize("name", SMALL)
def test_what_is_said_of_an_architecture_is_what_the_adapter_does(name: str, tmp_path: Path) -> None:
    config, kind, fields = SMALL[name]
    suffix = "ForConditionalGeneration" if "vision_config" in fields else "ForCausalLM"
    model = getattr(T, kind + suffix)(getattr(T, config)(**fields)).eval()
    (said,) = (answer for shape, _, answer in shapes() if shape == name)
    with kvstore.open(f"embedded:{tmp_path}", dram="16MiB") as store:
        try:
            PrefixCache(model, store, codec="raw")
        except BadInput as error:
            assert said.verdict is Verdict.REFUSED, error
        else:
            assert said.verdict is not Verdict.REFUSED, said
