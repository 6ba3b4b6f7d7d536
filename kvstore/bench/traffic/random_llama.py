"""Llamas with random weights as files, for engines that start from them.

    python -m kvstore.bench.traffic.random_llama SHAPE DIRECTORY

The weights say nothing of quality. They lie wide enough apart that no token is repeated for ever. What imports this
needs neither torch nor transformers: the program alone does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.block.errors import StoreError

TINY, MID = SHAPES = ("tiny", "mid")
ONE_B = "1b"
_FIELDS = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
LLAMAS: Mapping[str, Mapping[str, Any]] = {
    shape: dict(zip(_FIELDS.split(), map(int, sizes.split()), strict=True))
    for shape, sizes in {
        TINY: "1000 256 512 4 8 4 32",  # 3.5 million parameters
        MID: "4000 1024 2816 8 16 4 64",  # 98 million
        ONE_B: "32768 2048 8192 16 32 8 64",  # Llama 3.2 1B with a smaller vocabulary, for a GPU
    }.items()
}
"""By shape. They are run in bfloat16."""


def kv_bytes_per_token(shape: str) -> int:
    """K and V of all layers."""
    llama = LLAMAS[shape]
    return 2 * 2 * int(llama["num_hidden_layers"] * llama["num_key_value_heads"] * llama["head_dim"])


def save_model(shape: str, directory: Path) -> None:
    """Random weights, and a tokenizer of which each word is a token: w17 is the token 17. Raises `StoreError`."""
    command = [sys.executable, "-P", "-m", "kvstore.bench.traffic.random_llama", shape, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoreError(f"a model could not be made: {(done.stderr.strip() or 'no reason given')[-300:]}")
    size = int(LLAMAS[shape]["vocab_size"])
    words = {f"w{number}": number for number in range(size - 1)} | {"<unk>": size - 1}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "chat_template": template}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def _main(shape: str, directory: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")  # billions are drawn in seconds there
    config = LlamaConfig(
        **LLAMAS[shape],
        max_position_embeddings=65536,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
