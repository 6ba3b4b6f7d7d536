"""Llamas with random weights, for timing: their cost, and what the device could do at most.

Random weights say nothing of quality: a codec's errors look several times smaller than with trained ones. They are
drawn on the device, and not zeros, which a GPU would multiply faster.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kv_bench.engines.on_device import DeviceTimer
from kvstore.bench.traffic.random_llama import LLAMAS, ONE_B
from kvstore.block.errors import BadInput

TINY, EIGHT_B = "tiny", "8b"
SHAPES = (TINY, ONE_B, EIGHT_B)
_SHAPES: dict[str, dict[str, Any]] = {
    TINY: {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    ONE_B: dict(LLAMAS[ONE_B]),
    EIGHT_B: {  # Llama 3 8B
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
ROPE_THETA = 5e5
NOT_LINEAR = ("embed_tokens", "lm_head")
"""Parameters that most prompt tokens skip: only the last token's logits are computed."""

PRODUCT_WIDTH = {"cuda": 8192, "cpu": 512}
PRODUCTS = 10


def weights_bytes(shape: str) -> int:
    """In bfloat16, plus a tenth. Raises `BadInput` for an unknown shape."""
    return int(2.2 * sum(parameter.numel() for parameter in outline(shape).parameters()))


def outline(shape: str) -> Any:
    """The model without weights, for counting. Raises `BadInput`."""
    if shape not in SHAPES:
        raise BadInput(f"shape={shape!r}; allowed: {', '.join(SHAPES)}")
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**_SHAPES[shape]))


def build(shape: str, device: torch.device, positions: int) -> Any:
    """The model, ready to run: bfloat16 on a GPU, float32 on a CPU. positions: tokens of the longest prompt and answer.
    Torch's global generators are left as they were."""
    config = LlamaConfig(
        **_SHAPES[shape],
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    before = torch.get_default_dtype()
    cuda = [device.index or 0] if device.type == "cuda" else []
    torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
    try:
        with torch.random.fork_rng(devices=cuda), torch.device(device):
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def prefill_flops(model: Any, tokens: int) -> float:
    """Of a prompt, with half of the attention's square (causal): 2 per linear parameter and token, 2 per product of a
    query with half of the keys, and 2 per product of its weights with half of the values."""
    config = model.config
    linear: int = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and not any(part in name for part in NOT_LINEAR)
    )
    widths = 2 * config.head_dim
    attention: float = 2 * config.num_hidden_layers * config.num_attention_heads * widths * (tokens / 2)
    return tokens * (2 * linear + attention)


def peak_flops(device: torch.device, dtype: torch.dtype, timer: DeviceTimer) -> float:
    """Per second, of a product of large square matrices of random numbers."""
    width = PRODUCT_WIDTH[device.type]
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    timed = timer.timed(lambda: left @ right)
    timed()
    return 2 * width**3 / median(timed().wall for _ in range(PRODUCTS))
