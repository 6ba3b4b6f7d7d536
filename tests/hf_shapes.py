"""Small copies of the models of 2026, by kind of KV: 4 layers, hidden 64, wide random weights, windows of 96 tokens.

Sizes are small, proportions as they are: heads, latents, states, which layer is of which kind.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

VOCABULARY, WINDOW = 512, 96
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS: dict[str, Any] = {**BASE, "head_dim": 16}
WINDOWS = {"sliding_window": WINDOW}
THREE_TO_ONE = {**WINDOWS, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
MLA: dict[str, Any] = {**BASE, **LATENT, "qk_nope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 1}
MLA |= {"n_group": 1, "topk_group": 1}
INDEXED = {**MLA, **ROUTED, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 64}
"""Many heads of the indexer: with few, scores are 0 for many tokens, and which of them are taken is chance."""
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
GRANITE4 = {"mamba_n_heads": 4, "mamba_d_head": 32, "num_local_experts": 0, "shared_intermediate_size": 128}
MAMBA2 = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
LLAMA4 = {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2}
LLAMA4 |= {"num_local_experts": 2}
DEEPSEEK4 = {"num_key_value_heads": 1, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "sliding_window": 64}
DEEPSEEK4 |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
KIMI: dict[str, Any] = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
KIMI |= {"linear_num_heads": 2, "linear_head_dim": 16}
GEMMA4 = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
GEMMA4 |= {"global_head_dim": 32}
NEMOTRON = {"layers_block_type": ["mamba", "moe", "attention", "mamba"], "moe_shared_expert_intermediate_size": 32}
FALCON = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
MIMO: dict[str, Any] = {"v_head_dim": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_v_head_dim": 8}
MIMO |= {"layer_types": ["full_attention", "sliding_attention"] * 2}
ROPE = {"rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}
LLAMA3 |= {"original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **ROPE}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0 + n for n in range(8)], **ROPE}
NTK = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, **ROPE}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], **ROPE}
EYES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
QWEN_EYES: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 14}
QWEN_EYES |= {"out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TOKENS = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1": ("LlamaForCausalLM", {**HEADS, "rope_parameters": LLAMA3}),
    "Qwen2.5": ("Qwen2ForCausalLM", BASE),
    "Qwen3": ("Qwen3ForCausalLM", HEADS),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", {**HEADS, **EXPERTS}),
    "Qwen3 YaRN": ("Qwen3ForCausalLM", {**HEADS, "rope_parameters": YARN}),
    "GLM-4 9B": ("Glm4ForCausalLM", HEADS),
    "GLM-4.5": ("Glm4MoeForCausalLM", {**HEADS, **ROUTED, "first_k_dense_replace": 1}),
    "Mistral 7B v0.3": ("MistralForCausalLM", {**HEADS, "sliding_window": None}),
    "Ministral 3": ("Ministral3ForCausalLM", {**HEADS, "sliding_window": None}),
    "Granite 3": ("GraniteForCausalLM", BASE),
    "MiniMax M2": ("MiniMaxM2ForCausalLM", {**HEADS, **LOCAL}),
    "Hunyuan dense": ("HunYuanDenseV1ForCausalLM", HEADS),
    "Hunyuan 3": ("HYV3ForCausalLM", {**HEADS, **EXPERTS}),
    "Phi-4": ("Phi3ForCausalLM", BASE),
    "OLMo 2": ("Olmo2ForCausalLM", BASE),
    "SmolLM3": ("SmolLM3ForCausalLM", BASE),
    "Seed-OSS": ("SeedOssForCausalLM", HEADS),
    "ERNIE 4.5 MoE": ("Ernie4_5_MoeForCausalLM", {**BASE, **ERNIE}),
    "Llama 4": ("Llama4ForCausalLM", {**HEADS, **LLAMA4}),
    "Qwen3-Next": ("Qwen3NextForCausalLM", {**HEADS, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 32}),
    "Qwen3.5": ("Qwen3_5ForCausalLM", {**HEADS, **DELTA}),
    "DeepSeek V3": ("DeepseekV3ForCausalLM", {**MLA, **ROUTED}),
    "DeepSeek V3.2": ("DeepseekV32ForCausalLM", INDEXED),
    "DeepSeek V4": ("DeepseekV4ForCausalLM", {**HEADS, **ROUTED, **DEEPSEEK4}),
    "Kimi Linear": ("KimiLinearForCausalLM", {**MLA, **EXPERTS, **KIMI}),
    "GLM-4.7 Flash": ("Glm4MoeLiteForCausalLM", {**MLA, **ROUTED}),
    "GLM-5": ("GlmMoeDsaForCausalLM", INDEXED),
    "gpt-oss": ("GptOssForCausalLM", {**HEADS, **LOCAL, **WINDOWS}),
    "Gemma 2": ("Gemma2ForCausalLM", {**HEADS, **WINDOWS}),
    "Gemma 3": ("Gemma3ForCausalLM", {**HEADS, **THREE_TO_ONE}),
    "Gemma 4": ("Gemma4ForCausalLM", {**HEADS, **THREE_TO_ONE, **GEMMA4}),
    "Mistral 7B v0.1": ("MistralForCausalLM", {**HEADS, **WINDOWS}),
    "Nemotron-H": ("NemotronHForCausalLM", {**HEADS, **MAMBA2, **ROUTED, **NEMOTRON}),
    "Granite 4 hybrid": (
        "GraniteMoeHybridForCausalLM",
        {**BASE, **GRANITE4, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
    ),
    "Granite 4 Micro": ("GraniteMoeHybridForCausalLM", {**BASE, **GRANITE4, "layer_types": ["attention"] * 4}),
    "MiniMax M1": (
        "MiniMaxForCausalLM",
        {**HEADS, **LOCAL, "block_size": 64, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "Hunyuan dense, NTK": ("HunYuanDenseV1ForCausalLM", {**HEADS, "rope_parameters": NTK}),
    "Phi-4-mini": ("Phi3ForCausalLM", {**BASE, "original_max_position_embeddings": 1024, "rope_parameters": LONG}),
    "OLMo 3": ("Olmo3ForCausalLM", {**BASE, **WINDOWS}),
    "Command A": ("Cohere2ForCausalLM", {**BASE, **WINDOWS}),
    "EXAONE 4": ("Exaone4ForCausalLM", {**BASE, **WINDOWS, "sliding_window_pattern": 4}),
    "Falcon-H1": ("FalconH1ForCausalLM", {**HEADS, **FALCON}),
    "LFM2": ("Lfm2ForCausalLM", {**BASE, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "MiMo-V2-Flash": ("MiMoV2FlashForCausalLM", {**HEADS, **WINDOWS, **ROUTED, **MIMO}),
    "Mistral Small 3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": T.MistralConfig(**{**HEADS, "sliding_window": None}),
            "vision_config": T.PixtralVisionConfig(**EYES, image_size=56, head_dim=16),
            "image_token_index": 10,
        },
    ),
    "Gemma 3 4B": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": T.Gemma3TextConfig(**{**HEADS, **THREE_TO_ONE}),
            "vision_config": T.SiglipVisionConfig(**EYES, image_size=28),
            "mm_tokens_per_image": 4,
            "image_token_index": 10,
            "boi_token_index": 11,
            "eoi_token_index": 12,
        },
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**BASE, "rope_parameters": MROPE},
            "vision_config": {**QWEN_EYES, "window_size": 112, "fullatt_block_indexes": [0]},
            **QWEN_TOKENS,
        },
    ),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**HEADS, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            "vision_config": {**QWEN_EYES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **QWEN_TOKENS,
        },
    ),
}
"""The class, which names its configuration, and the configuration's fields, by the name of the model."""
BESIDE = {"OLMo Hybrid": ("OlmoHybridForCausalLM", {**HEADS, **DELTA})}
"""Of whose kind another one is in the table."""


def model_of_shape(name: str, **changes: Any) -> Any:
    class_name, fields = {**SHAPES, **BESIDE}[name]
    torch.manual_seed(0)
    made = getattr(T, class_name)
    return spread(made(made.config_class(**{**fields, **changes})))


def spread(model: Any) -> Any:
    """With weights so far apart that no token is repeated for ever, and no settings of its class for `generate`."""
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.2)
    model.generation_config = T.GenerationConfig(pad_token_id=0)
    return model.eval()
