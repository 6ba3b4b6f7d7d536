"""A small random Llama in a directory, for tests of engines that load from files."""

from __future__ import annotations

import random
from pathlib import Path

import torch

VOCABULARY = 1000


def save_model(place: Path, seed: int = 0) -> Path:
    """4 layers, hidden 256, 8 heads, 4 KV heads. Weights of a range that makes tokens depend on the whole prompt: with
    the usual one a random model repeats a token, whatever its KV is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    return place


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Token ids that nothing ends at."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]
