"""All causal classes of transformers with default configurations, made small: how many answer from a hit as they do
without a store, and what is said of the others.

PYTHONPATH=.:kernels:tests python tests/adapters/test_hf_sweep.py [TYPE ...]
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import kvstore

T = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from adapters.test_hf_shapes import prompt_of  # noqa: E402
from engine_adapter.hf_cache import PrefixCache  # noqa: E402
from hf_shapes import spread  # noqa: E402

SMALL = {
    64: "hidden_size d_model n_embd dim word_embed_proj_dim embedding_size dim_model",
    128: "intermediate_size ffn_dim d_ff n_inner decoder_ffn_dim dim_ff intermediate_size_mlp",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads mamba_n_heads mamba_num_heads linear_num_value_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts",
    2: "num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok num_experts_per_token moe_k linear_num_heads "
    "linear_num_key_heads n_groups",
    1: "n_group topk_group mamba_n_groups encoder_layers depth",
    16: "head_dim dim_head qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "mamba_d_state ssm_state_size state_size index_n_heads index_head_dim hidden_size_per_layer_input",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim "
    "global_head_dim",
    8: "qk_rope_head_dim rotary_dim",
    512: "vocab_size vocab_size_per_layer_input",
    2048: "max_position_embeddings n_positions",
    0: "num_kv_shared_layers",
}
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}
INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 512}
INDEXER |= {"indexer_compress_ratio": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "bailing_hybrid": {"layer_group_size": 2, "first_k_dense_replace": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}
"""What a default of many layers does not leave to four."""
VARIED: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 4, "head_dim": 8},
    {"num_hidden_layers": 8, "num_layers": 8},
)
DROPPED = (
    (),
    ("head_dim",),
    ("num_hidden_layers",),
    ("mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim"),
)
IDS: tuple[dict[str, Any], ...] = (
    {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
)
LARGEST, SECONDS = 100_000_000, 60
SERVED, MOST_TRIES = "served", 12


def of_the_class(kind: str) -> Any:
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return getattr(T, named if isinstance(named, str) else named[0])


def small_ones(kind: str) -> Iterator[Any]:
    """Models of the class, or what kept them from being built: not every size fits with every other one."""
    made = of_the_class(kind)
    configs = dict.fromkeys([made.config_class, CONFIG_MAPPING[kind]])
    for config_class, dropped, varied, ids in product(configs, DROPPED, VARIED, IDS):
        try:
            base = config_class()
            text = base.get_text_config()
            fields = {name: size for name, size in _sizes_of(text, **varied).items() if name not in dropped}
            fields |= ids | OWN.get(kind, {})
            if text is not base:
                fields = {name: fields for name in ("text_config", "llm_config") if hasattr(base, name)}
            beside = [name for name in ("vision_config", "audio_config") if getattr(base, name, None) is not None]
            fields |= {name: _sizes_of(getattr(base, name)) for name in beside}
            torch.manual_seed(0)
            with torch.device("meta"):
                size = sum(one.numel() for one in made(config_class(**fields)).parameters())
            if size > LARGEST:
                raise ValueError(f"{size} parameters")
            model = spread(made(config_class(**fields)))
        except Exception as error:  # of foreign code, which raises whatever it likes
            yield error
            continue
        yield model


def _sizes_of(config: Any, **varied: Any) -> dict[str, Any]:
    return {name: size for name, size in {**SIZES, **varied}.items() if _has(config, name)}


def _has(config: Any, name: str) -> bool:
    try:
        held = getattr(config, name)
    except AttributeError:
        return False
    except Exception:  # attributes that may differ by layer
        return True
    return (isinstance(held, int) and not isinstance(held, bool)) or (held is None and name == "head_dim")


def verdict(kind: str) -> str:
    """`served`, or why not."""
    said, tries = "", 0
    for model in small_ones(kind):
        if isinstance(model, Exception):
            said = said or f"not built: {type(model).__name__}: {' '.join(str(model).split())[:100]}"
            continue
        tries += 1
        prompt, ids = prompt_of(200, 1), torch.tensor([prompt_of(200, 1)])
        try:
            with tempfile.TemporaryDirectory() as at, kvstore.embedded(at, dram="128MiB", extent="16MiB") as store:
                cache = PrefixCache(model, store, codec="raw", chunk_tokens=128)
                given = {"max_new_tokens": 6, "do_sample": False}
                expected = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
                for restored in (0, 192):
                    assert torch.equal(cache.generate(prompt, **given), expected), "WRONG"
                    assert cache.report.restored_tokens == restored, f"{cache.report.restored_tokens} restored"
            return SERVED
        except Exception as error:  # of foreign code as well
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if tries == MOST_TRIES or "depends on the tokens behind" in said:
            break
    return said


def bounded(kind: str) -> str:
    """`verdict`, within a minute: some classes look into vocabularies of their own."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return verdict(kind)
    except TimeoutError:
        return f"not within {SECONDS} seconds"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_most_causal_classes_of_transformers_are_served_and_none_wrongly() -> None:
    found = {kind: bounded(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert not {kind: said for kind, said in found.items() if "WRONG" in said}
    assert sum(said == SERVED for said in found.values()) >= 150, found


def main() -> int:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for kind in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        said = bounded(kind)
        counts[said if said == SERVED else said.partition(":")[0]] += 1
        print(f"{kind:26} {said}", flush=True)
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
