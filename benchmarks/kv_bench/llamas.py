"""Llamas with random weights, for timing: in this process, and as files for engines that start from them.

The weights lie wide enough apart that no token is repeated for ever. What imports this needs neither torch nor
transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from kvstore.block.errors import BadInput, StoreError

TINY, MID, ONE_B, EIGHT_B = "tiny", "mid", "1b", "8b"
_FIELDS = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"


def _llama(sizes: str) -> Mapping[str, int]:
    return dict(zip(_FIELDS.split(), map(int, sizes.split()), strict=True))


LLAMAS: Mapping[str, Mapping[str, int]] = {
    TINY: _llama("1000 256 512 4 8 4 32"),  # 3.5 million parameters
    MID: _llama("4000 1024 2816 8 16 4 64"),  # 98 million
    ONE_B: _llama("32768 2048 8192 16 32 8 64"),  # Llama 3.2 1B with a smaller vocabulary, for a GPU
}
"""By shape, of those that are saved as files. They are run in bfloat16."""
TTFT_SHAPES: Mapping[str, Mapping[str, int]] = {
    TINY: _llama("256 64 128 2 4 2 16"),
    ONE_B: LLAMAS[ONE_B],
    EIGHT_B: _llama("128256 4096 14336 32 32 8 128"),  # Llama 3 8B
}
"""By shape, of those that are built in this process."""
NOT_LINEAR = ("embed_tokens", "lm_head")
"""Parameters that most prompt tokens skip: only the last token's logits are computed."""
PRODUCT_WIDTH, PRODUCTS = {"cuda": 8192, "cpu": 512}, 10
_NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def kv_bytes_per_token(shape: str) -> int:
    llama = LLAMAS[shape]
    return 2 * 2 * llama["num_hidden_layers"] * llama["num_key_value_heads"] * llama["head_dim"]


def parse_tokens(given: str) -> int:
    """Of "8k" or "8192". Raises `BadInput`."""
    text = given.strip().lower()
    number = text.removesuffix("k")
    if not number.isdecimal() or not int(number):
        raise BadInput(f"context={given!r} is not a number of tokens; write e.g. 8192 or 8k")
    return int(number) * (1024 if text.endswith("k") else 1)


def save_model(shape: str, directory: Path) -> None:
    """Random weights, and a tokenizer of which each word is a token: w17 is the token 17. Raises `StoreError`."""
    command = [sys.executable, "-P", "-m", "kv_bench.llamas", shape, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoreError(f"a model could not be made: {(done.stderr.strip() or 'no reason given')[-300:]}")
    size = LLAMAS[shape]["vocab_size"]
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


def main(shape: str, directory: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")  # billions are drawn in seconds there
    more = {"max_position_embeddings": 65536, "initializer_range": 0.1, "tie_word_embeddings": False, **_NO_TOKENS}
    config: dict[str, Any] = {**LLAMAS[shape], **more}
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    model.to(torch.bfloat16).save_pretrained(directory)


# --- in this process -------------------------------------------------------------------------------------------------


def build(shape: str, device: Any, positions: int) -> Any:
    """The model, ready to run: bfloat16 on a GPU, float32 on a CPU. positions: tokens of the longest prompt and answer.
    Torch's global generators are left as they were."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 5e5}
    more = {"max_position_embeddings": positions, "rope_parameters": rope, "tie_word_embeddings": False, **_NO_TOKENS}
    config: dict[str, Any] = {**TTFT_SHAPES[shape], **more}
    before, cuda = torch.get_default_dtype(), [device.index or 0] if device.type == "cuda" else []
    torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
    try:
        with torch.random.fork_rng(devices=cuda), torch.device(device):
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(LlamaConfig(**config))
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
    attention: float = 2 * config.num_hidden_layers * config.num_attention_heads * 2 * config.head_dim * (tokens / 2)
    return tokens * (2 * linear + attention)


def peak_flops(device: Any, dtype: Any, timer: Any) -> float:
    import torch

    width = PRODUCT_WIDTH[device.type]
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    timed = timer.timed(lambda: left @ right)
    timed()
    return float(2 * width**3 / median(timed().wall for _ in range(PRODUCTS)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
