"""The demo's model: a small Llama over bytes, trained by us, or a Llama or a hybrid with random weights from a seed.

The trained one is in `trained/` with a note of its origin: 1.8 million parameters, trained on the sources of Python's
standard library in pieces of up to 4,096 bytes. Every token is a byte; there is no tokenizer. Both run on the CPU in
float32.

A random one does the work of a trained model of its shape in the same time, and writes gibberish. Its weights are drawn
wider than for training: so every answer depends on the whole prompt, and two candidates for the next token are rarely
close. It cannot measure a codec's quality: nearly even attention averages every error away. The hybrid is a Qwen 3.5:
three layers of four keep a recurrent state in place of KV.
"""

from __future__ import annotations

import json
from hashlib import sha256
from importlib import resources
from typing import Any

import torch
from safetensors.torch import load
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from kvstore.block.errors import StoreError

FOLDER = "trained"
VOCABULARY = 256
INITIALIZER_RANGE = 0.08


LINEAR: dict[str, Any] = {f"linear_num_{one}_heads": 4 for one in ("key", "value")} | {
    f"linear_{one}_head_dim": 64 for one in ("key", "value")
}
"""The hybrid's recurrent layers."""


def load_trained() -> torch.nn.Module:
    """The model in `trained/`, ready to run. Raises `StoreError` if its files are damaged."""
    folder = resources.files("kvstore.demo").joinpath(FOLDER)
    weights = folder.joinpath("model.safetensors").read_bytes()
    expected, found = trained_origin()["sha256"], sha256(weights).hexdigest()
    if found != expected:
        raise StoreError(
            f"{folder.joinpath('model.safetensors')} is damaged: SHA-256 {found[:16]}..., expected {expected[:16]}...; "
            "install kvstore again"
        )
    config = json.loads(folder.joinpath("config.json").read_text("utf-8"))
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    missing = model.load_state_dict(load(weights), strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys, (
        "embeddings are tied, nothing else"
    )
    return _ready(model)


def trained_origin() -> dict[str, Any]:
    """The trained model's sources, its digest, and its loss on held-out text."""
    text = resources.files("kvstore.demo").joinpath(FOLDER, "ORIGIN.json").read_text("utf-8")
    origin: dict[str, Any] = json.loads(text)
    return origin


def build_model(seed: int, positions: int, layers: int = 3, *, is_hybrid: bool = False) -> torch.nn.Module:
    """The random model of this seed, ready to run. Torch's global generator is left as it was.

    positions: tokens of the longest prompt and answer. layers: of a Llama; a hybrid has four.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4 if is_hybrid else layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": positions,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = (
            Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, **LINEAR))
            if is_hybrid
            else LlamaForCausalLM(LlamaConfig(**shape))
        )
    return _ready(model)


def _ready(model: torch.nn.Module) -> torch.nn.Module:
    return model.to(torch.float32).eval()


def describe_model(model: torch.nn.Module, is_trained: bool) -> dict[str, object]:
    config: Any = model.config
    return {
        "type": config.model_type,
        "weights": "trained" if is_trained else "random",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
