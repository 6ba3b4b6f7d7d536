"""Llamas with random weights, for timing: in this process, and as files for engines that start from them.

The weights lie wide enough apart that no token is repeated for ever. What imports this needs neither torch nor
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from kv_bench.process import Child, Parent
from kvstore.block.errors import BadInput

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
    with Child("kv_bench.llamas", [shape, str(directory)], "what makes a model") as child:
        child.hear()
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


def main() -> None:
    import torch

    parent = Parent()
    shape, directory = parent.job
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # billions are drawn in seconds there
    model = build(LLAMAS[shape], device, 65536, initializer_range=0.1)
    model.to(torch.bfloat16).save_pretrained(directory)
    parent.answer("saved")


def build(sizes: Mapping[str, int], device: Any, positions: int, **more: Any) -> Any:
    """The model, ready to run: bfloat16 on a GPU, float32 on a CPU. positions: tokens of the longest prompt and answer.
    Torch's global generators are left as they were."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    more |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    more |= {"max_position_embeddings": positions, "tie_word_embeddings": False}
    config: dict[str, Any] = {**sizes, **more, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
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
    main()
