"""The demo's model: a small Llama over bytes, with random weights from a seed (floor 4).

It computes exactly what a trained model of its shape computes, in the same time, and it writes gibberish. The weights
are drawn wider than for training: then every answer depends on the whole prompt, and two candidates for the next token
are rarely close, so that a single wrong block shows in the tokens. Every token is a byte; there is no tokenizer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
INITIALIZER_RANGE = 0.08


def build_model(seed: int, positions: int, layers: int = 3) -> torch.nn.Module:
    """The model of this seed, on the CPU in float32, ready to run. Torch's global generator is left as it was.

    positions: the longest prompt and its answer, in tokens.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=positions,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = LlamaForCausalLM(config)
    return model.to(torch.float32).eval()


def describe_model(model: torch.nn.Module) -> dict[str, object]:
    """For `--json`: shape and number of parameters."""
    config: Any = model.config
    return {
        "type": config.model_type,
        "weights": "random",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
