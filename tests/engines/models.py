"""Small models of random weights, and how a vLLM on a CPU is started with them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OPTConfig,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parents[2]


PATIENT: dict[str, Any] = {
    "audit": 0,
    "cost_model": False,
    "match_deadline_ms": 10_000,
    "lease_deadline_ms": 10_000,
    "traces": True,  # nothing comes of it where no request has a parent
}
"""Settings with which what is found is loaded, on a machine that is busy with something else as well."""


def save_llama(
    directory: Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int | None = None,
    vocab: int = 1000,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
) -> Path:
    """Weights wide enough apart that no token is repeated for ever, which would hide errors. window: of every layer,
    which makes a Mistral of it."""
    torch.manual_seed(seed)
    config_kind, kind = (MistralConfig, MistralForCausalLM) if window else (LlamaConfig, LlamaForCausalLM)
    config = config_kind(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=16384,
        initializer_range=0.1,
        tie_word_embeddings=False,
        **({"sliding_window": window} if window else {}),
    )
    kind(config).to(dtype).save_pretrained(directory)
    save_tokenizer(directory, vocab)
    return directory


_WINDOWED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma": (Gemma3ForCausalLM, Gemma3TextConfig, dict(query_pre_attn_scalar=64)),
    # Layers that see all have heads of twice the width, and vLLM has pages of two sizes.
    "gemma 4": (Gemma4ForCausalLM, Gemma4TextConfig, dict(global_head_dim=128, hidden_size_per_layer_input=32)),
    "olmo": (Olmo3ForCausalLM, Olmo3Config, {}),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
}


def save_windowed(
    directory: Path, *, family: str = "gemma", window: int = 192, vocab: int = 1000, seed: int = 0
) -> Path:
    """Layers that see all, and layers that see a window: two of each three of the latter kind."""
    torch.manual_seed(seed)
    model, config, more = _WINDOWED[family]
    if family == "gemma 4":
        more = {**more, "vocab_size_per_layer_input": vocab}
    shape: dict[str, Any] = dict(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=16384,
        initializer_range=0.1,
    )
    model(config(**shape, **more)).save_pretrained(directory)
    save_tokenizer(directory, vocab)
    return directory


def save_neox(directory: Path, *, vocab: int = 1000, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=16384,
        initializer_range=0.1,
    )
    GPTNeoXForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory, vocab)
    return directory


def save_deepseek(directory: Path, *, vocab: int = 1000, seed: int = 0) -> Path:
    """K and V as one latent plane of 512 + 64 numbers for all heads, of which vLLM reuses nothing on CPUs."""
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=4,  # no experts: a layer of them is not what is tested
        max_position_embeddings=16384,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory, vocab)
    return directory


def save_blip(directory: Path, *, vocab: int = 1000, seed: int = 0) -> Path:
    """Takes a picture of 56 x 56, eight tokens before the prompt's. Its processor needs no torchvision."""
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    torch.manual_seed(seed)
    encoder = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.3
    )
    text = OPTConfig(
        vocab_size=vocab,
        hidden_size=256,
        ffn_dim=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        word_embed_proj_dim=256,
        init_std=0.1,
    )
    config = Blip2Config(
        vision_config={**encoder, "image_size": 56, "patch_size": 14},
        qformer_config={**encoder, "vocab_size": vocab, "encoder_hidden_size": 64},
        text_config=text.to_dict(),
        num_query_tokens=8,
        image_token_index=vocab - 2,
    )
    model = Blip2ForConditionalGeneration(config).float()
    torch.nn.init.normal_(model.query_tokens, std=0.5)
    model.save_pretrained(directory)
    tokens = save_tokenizer(directory, vocab, image_token="<image>")
    processor = BlipImageProcessorPil(size={"height": 56, "width": 56})
    Blip2Processor(image_processor=processor, tokenizer=tokens, num_query_tokens=8).save_pretrained(directory)
    return directory


def picture(*seed: int) -> Any:
    """Of `save_blip`'s size."""
    drawn = np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


def has_fp8() -> bool:
    """Whether this processor is one on which vLLM keeps KV in fp8."""
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512f" in flags or "amx_tile" in flags


def takes_windows() -> bool:
    """Whether this vLLM can be told that a load has failed of which pages are missing in its tables."""
    from engine_adapter.vllm_connector import KVConnectorTransferResults

    return KVConnectorTransferResults is not None


def tells_states() -> bool:
    """Whether this vLLM tells in which pages recurrent states are whole."""
    from vllm.v1.core.sched import output

    return "boundary_state_offloads" in getattr(
        getattr(output, "KVConnectorBlockState", None), "__dataclass_fields__", ()
    )


def save_trained(directory: Path) -> Path:
    """The demo's model, which has learned something: a token is a byte."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ROOT / "kvstore/demo/trained" / name, directory)
    save_tokenizer(directory, 256)
    return directory


def save_adapter(directory: Path, *, seed: int, layers: int = 4, hidden: int = 256, kv_width: int = 128) -> Path:
    """A LoRA for `save_llama`'s model, as peft writes it; K and V are others with it. Each file is replaced whole."""
    drawn = torch.Generator().manual_seed(seed)
    rank, outputs = 8, {"q_proj": hidden, "k_proj": kv_width, "v_proj": kv_width}
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": 0.1
        * torch.randn((rank, hidden) if side == "A" else (width, rank), generator=drawn)
        for layer in range(layers)
        for name, width in outputs.items()
        for side in "AB"
    }
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(outputs), "bias": "none"}
    directory.mkdir(exist_ok=True)
    for name, content in (
        ("adapter_model.safetensors", safetensors.torch.save(weights)),
        ("adapter_config.json", json.dumps(config).encode()),
    ):
        (directory / f"{name}.new").write_bytes(content)
        (directory / f"{name}.new").replace(directory / name)
    return directory


def save_tokenizer(directory: Path, vocab: int, **special: str) -> PreTrainedTokenizerFast:
    """One word for each id; the last ones are special."""
    names = [*special.values(), "<unk>"]
    first = vocab - len(names)
    words = {f"w{number}": number for number in range(first)} | {name: first + at for at, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    more: dict[str, Any] = {"pad_token": "<unk>", "extra_special_tokens": special} if special else {}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **more)
    made.save_pretrained(directory)
    return made


def prepare(kv_gib: int = 1, *, multiprocessing: bool = False, ranks: int = 1) -> None:
    """What vLLM reads from the environment; before it is imported."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(kv_gib),
        VLLM_ENABLE_V1_MULTIPROCESSING="1" if multiprocessing else "0",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_CPU_OMP_THREADS_BIND="|".join(str(core) for core in range(ranks)) if ranks > 1 else "auto",
    )


def connector(url: str, **extra: Any) -> dict[str, Any]:
    """The flag that switches the store on. extra: settings, beside those of a patient one that keeps KV as it is."""
    return {
        "kv_connector": "KvStoreConnector",
        "kv_connector_module_path": "engine_adapter.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, "codec": "raw", **PATIENT, **extra},
    }


CHANGING = {"kv_connector": "ChangingConnector", "kv_connector_module_path": "engines.wrong_connectors"}
"""In its place: one that may be told to do something wrong."""

ADMITS_BY_THE_CHUNK = dict(scheduler_reserve_full_isl=False)
"""A prompt is admitted where pages for its next chunk are free. By default newer engines wait for pages for all of it,
and then preempt only by chance; older ones have no such option."""


def start(path: Path, transfer: dict[str, Any] | None = None, **options: Any) -> Any:
    from vllm import LLM, EngineArgs
    from vllm.config import KVTransferConfig

    given = dict(enforce_eager=True, max_model_len=8192, dtype="float32", disable_log_stats=False, seed=0)
    given.update(
        (name, value) for name, value in options.items() if hasattr(EngineArgs, name) or name not in ADMITS_BY_THE_CHUNK
    )
    if transfer is not None:
        given["kv_transfer_config"] = KVTransferConfig(**transfer)
    if "deepseek" in (path / "config.json").read_text() and hasattr(EngineArgs, "attention_backend"):
        given["attention_backend"] = "CPU_MLA"  # with AMX vLLM would take a backend that has no float32
    return LLM(model=str(path), **given)
