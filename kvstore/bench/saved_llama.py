"""A Llama of random weights as files, for an engine that starts from them (floor 4).

    python -m kvstore.bench.saved_llama SHAPE DIRECTORY

Weights lie wide enough apart that no token is repeated for ever. Prompts are token ids, so there is no tokenizer. It is
a program of its own, so that whoever starts engines needs neither torch nor transformers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.bench.vllm_rows import LLAMAS


def save(shape: str, directory: str) -> None:
    """In bfloat16. Raises `KeyError` for a shape that is not known."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **LLAMAS[shape],
        max_position_embeddings=32768,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    save(sys.argv[1], sys.argv[2])
