"""The KV of models: the whole table, what a config.json says, and what is refused rather than guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.block.errors import BadInput
from kvstore.insight.models import MODELS, KvKind, model_named, model_of_config

MIB = 1 << 20

# Each model whose config.json is not below: bytes a token (without those of windows, chunks and an indexer), of windows
# and chunks, how long those are, bytes of an indexer, and MiB of a sequence's state.
TABLE: dict[str, tuple[int, ...]] = {
    "llama-2-7b": (524_288,), "llama-2-70b": (327_680,), "llama-3.2-1b": (32_768,), "llama-3.2-3b": (114_688,),
    "llama-3.1-70b": (327_680,), "llama-3.3-70b": (327_680,), "llama-3.1-405b": (516_096,),
    "llama-4-maverick": (49_152, 147_456, 8192), "mixtral-8x7b": (131_072,), "mixtral-8x22b": (229_376,),
    "mistral-large-2": (360_448,), "qwen2.5-14b": (196_608,), "qwen2.5-32b": (262_144,), "qwen2.5-72b": (327_680,),
    "qwen3-8b": (147_456,), "qwen3-30b-a3b": (98_304,), "qwen3-235b-a22b": (192_512,),
    "qwen3-coder-480b-a35b": (253_952,), **dict.fromkeys(("qwen3.5-27b", "qwen3.6-27b"), (65_536, 0, 0, 0, 147)),
    **dict.fromkeys(("qwen3.5-35b-a3b", "qwen3.6-35b-a3b"), (20_480, 0, 0, 0, 61)),
    "qwen3.5-122b-a10b": (24_576, 0, 0, 0, 147), "gemma-2-27b": (188_416, 188_416, 4096),
    "gemma-3-12b": (65_536, 327_680, 1024), "gemma-3-27b": (81_920, 425_984, 1024),
    "gemma-4-31b": (81_920, 819_200, 1024), "gpt-oss-120b": (36_864, 36_864, 128),
    **dict.fromkeys(("deepseek-r1", "deepseek-v3.1", "kimi-k2.5", "kimi-k2.7"), (70_272,)),
    "glm-4.5": (376_832,), "glm-4.7": (376_832,), "glm-5.1": (89_856, 0, 0, 10_296), "kimi-k3": (27_648, 0, 0, 0, 429),
    "minimax-m2.5": (253_952,), "minimax-m2.7": (253_952,), "minimax-m3": (122_880, 0, 0, 14_592), "phi-4": (204_800,),
    "nemotron-3-super": (8_192, 0, 0, 0, 162), "nemotron-3-ultra": (12_288, 0, 0, 0, 389),
    "nemotron-h-56b": (40_960, 0, 0, 0, 870),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    full, short, tokens, index, state_mib = (*TABLE[name], 0, 0, 0, 0)[:5]
    model = MODELS[name]
    assert model.bytes_per_token("bfloat16", KvKind.FULL, KvKind.LATENT) == full
    assert model.bytes_per_token("bfloat16", KvKind.WINDOW, KvKind.CHUNK) == short
    assert {one.tokens for one in model.layers if one.tokens} == ({tokens} if tokens else set())
    assert model.bytes_per_token("bfloat16", KvKind.INDEX) == index
    assert round(model.state_bytes / MIB) == state_mib


def test_the_table_has_no_row_that_is_not_tested() -> None:
    assert MODELS.keys() == TABLE.keys() ^ dict(CONFIGS).keys()
    assert all(one.source.startswith("config.json of ") for one in MODELS.values())


@pytest.mark.parametrize(
    "given", ["llama-3.1-8b", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"]
)
def test_names_as_people_write_them(given: str) -> None:
    assert model_named(given) is MODELS["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("deepseek-ai/DeepSeek-V4", "compressed 4:1 and 128:1"),
        ("deepseek-v4.1-flash", "compressed 4:1 and 128:1"),
        ("lama-3.1-8b", "is not in the table; near it: llama-3.1-8b"),
        ("", "is not in the table; see kvstore plan --models, or give --config FILE"),
        ("x" * 10_000, "is not in the table"),
    ],
)
def test_a_name_that_is_not_known_is_refused(given: str, says: str) -> None:
    with pytest.raises(BadInput, match=says) as raised:
        model_named(given)
    assert len(str(raised.value)) < 500


# config.json -----------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GEMMA_3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 2560,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27, "model_type": "siglip_vision_model"},
}
QWEN_3_5 = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 60,
        "num_key_value_heads": 2,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 128,
        "mtp_num_hidden_layers": 1,
    },
}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "num_key_value_heads": 128}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.1-8b", LLAMA),
    ("qwen3-32b", LLAMA | {"model_type": "qwen3", "num_hidden_layers": 64, "num_attention_heads": 64, "head_dim": 128}),
    ("qwen2.5-7b", LLAMA | {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28}
     | {"num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131_072, "use_sliding_window": False}),
    ("phi-4-mini", LLAMA | {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24}
     | {"sliding_window": 262_144, "max_position_embeddings": 131_072}),
    ("mistral-7b", LLAMA | {"model_type": "mistral", "sliding_window": None}),
    ("gemma-2-9b", LLAMA | {"model_type": "gemma2", "num_hidden_layers": 42, "head_dim": 256, "sliding_window": 4096}),
    ("gemma-3-4b", GEMMA_3),
    ("gemma-4-26b-a4b", {"model_type": "gemma4", "text_config": LLAMA | {"model_type": "gemma4_text"}
     | {"num_hidden_layers": 30, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2}
     | {"attention_k_eq_v": True, "sliding_window": 1024, "num_kv_shared_layers": 0}}),
    ("gpt-oss-20b", LLAMA | {"model_type": "gpt_oss", "num_hidden_layers": 24, "head_dim": 64, "sliding_window": 128}),
    ("llama-4-scout", {"model_type": "llama4", "text_config": LLAMA | {"model_type": "llama4_text"}
     | {"num_hidden_layers": 48, "head_dim": 128, "attention_chunk_size": 8192}}),
    ("deepseek-v3", LLAMA | MLA | {"model_type": "deepseek_v3", "num_hidden_layers": 61}),
    ("kimi-k2", LLAMA | MLA | {"model_type": "kimi_k2", "num_hidden_layers": 61}),
    ("deepseek-v3.2", LLAMA | MLA | {"model_type": "deepseek_v32", "num_hidden_layers": 61, "index_head_dim": 128}),
    ("glm-4.7-flash", LLAMA | MLA | {"model_type": "glm4_moe_lite", "num_hidden_layers": 47, "head_dim": 64}),
    ("glm-5", LLAMA | MLA | {"model_type": "glm_moe_dsa", "num_hidden_layers": 78}),
    ("glm-5.2", LLAMA | MLA | {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "index_topk_freq": 4}),
    ("qwen3.5-397b-a17b", QWEN_3_5),
    ("qwen3-next-80b-a3b", QWEN_3_5["text_config"] | {"model_type": "qwen3_next", "num_hidden_layers": 48}  # type: ignore[operator]
     | {"layer_types": None, "linear_num_value_heads": 32}),
    ("nemotron-super-49b", LLAMA | {"model_type": "nemotron-nas", "hidden_size": 8192, "num_attention_heads": 64}
     | {"num_hidden_layers": 80, "num_key_value_heads": None}
     | {"block_configs": [{"attention": {"n_heads_in_group": 8, "no_op": False}}] * 49
        + [{"attention": {"n_heads_in_group": None, "no_op": True}}] * 31}),
    ("nemotron-3-nano", LLAMA | {"model_type": "nemotron_h", "num_hidden_layers": 52, "num_key_value_heads": 2}
     | {"head_dim": 128, "hybrid_override_pattern": "M" * 23 + "*" * 6 + "E" * 23, "mamba_num_heads": 64}
     | {"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}),
    ("mimo-v2-flash", LLAMA | {"model_type": "mimo_v2_flash", "num_hidden_layers": 48, "num_key_value_heads": 4}
     | {"head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
     | {"sliding_window": 128, "hybrid_layer_pattern": [int(at not in range(0, 9)) for at in range(48)]}),
    ("step-3.7-flash", LLAMA | {"model_type": "step3p7", "num_hidden_layers": 45, "sliding_window": 512}
     | {"layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config"), CONFIGS, ids=lambda one: one if isinstance(one, str) else "")
def test_a_config_says_what_the_table_says(name: str, config: dict[str, Any]) -> None:
    model = model_of_config("config.json", json.dumps(config))
    assert set(model.layers) == set(MODELS[name].layers)
    assert model.state_bytes == MODELS[name].state_bytes


@pytest.mark.parametrize(
    ("field", "at"), [("mamba_ssm_dtype", "qwen3-next-80b-a3b"), ("mamba_ssm_cache_dtype", "nemotron-3-nano")]
)
def test_a_config_says_how_wide_its_states_are(field: str, at: str) -> None:
    config = dict(CONFIGS)[at]
    model, full = model_of_config("config.json", json.dumps(config | {field: "bfloat16"})), MODELS[at]
    assert [one.tensors[1][1] for one in model.states] == ["bfloat16"] and model.state_bytes < 0.52 * full.state_bytes
    with pytest.raises(BadInput, match="the dtype 'int4' of its states; allowed: float32, float16, bfloat16"):
        model_of_config("config.json", json.dumps(config | {field: "int4"}))


def test_layers_that_share_kv_have_none_of_their_own() -> None:
    config = LLAMA | {"model_type": "gemma4", "head_dim": 256, "sliding_window": 512, "num_hidden_layers": 12}
    whole = model_of_config("config.json", json.dumps(config))
    assert [(one.kind, one.layers, one.widths) for one in whole.layers] == [
        (KvKind.WINDOW, 10, (256, 256)),
        (KvKind.FULL, 2, (512, 512)),
    ]
    fewer = model_of_config("config.json", json.dumps(config | {"num_kv_shared_layers": 6}))
    assert [(one.kind, one.layers) for one in fewer.layers] == [(KvKind.WINDOW, 5), (KvKind.FULL, 1)]


def test_head_dim_goes_before_hidden_and_heads() -> None:
    given = model_of_config("config.json", json.dumps(LLAMA | {"head_dim": 64}))
    assert given.bytes_per_token("bfloat16") == 65_536
    assert model_of_config("config.json", json.dumps(LLAMA)).bytes_per_token("bfloat16") == 131_072


def test_layers_for_drafts_are_told() -> None:
    assert "1 layers for drafts" in model_of_config("config.json", json.dumps(QWEN_3_5)).notes[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "config.json: no JSON; give the config.json of a model"),
        ("[]", "config.json: list in place of an object"),
        ({}, "model_type None is not known"),
        (LLAMA | {"model_type": "llamba"}, "model_type 'llamba' is not known, and what its layers keep is not guessed"),
        (LLAMA | {"model_type": "deepseek_v4"}, "compressed 4:1 and 128:1"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers=None; it has to be a whole number from 1 to 1024"),
        (LLAMA | {"num_hidden_layers": 1e3}, "num_hidden_layers=1000.0; it has to be a whole number"),
        (LLAMA | {"num_hidden_layers": 10**400}, "num_hidden_layers=a number of 1329 bits"),
        (LLAMA | {"hidden_size": 4097}, "hidden_size=4097 is no multiple of num_attention_heads=32"),
        (LLAMA | {"sliding_window": 4096}, "sliding_window=4096 and no layer_types: which layers"),
        (LLAMA | {"layer_types": ["full_attention"]}, "it has to name each of 32 layers"),
        (LLAMA | {"layer_types": ["sparse"] * 32}, "layer_types has 'sparse', and what such a layer keeps"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "sliding_window=None; it has to be"),
        (LLAMA | {"layer_types": ["linear_attention"] * 32}, "linear attention in a llama"),
        (LLAMA | {"model_type": "gemma3", "sliding_window": 8, "sliding_window_pattern": 0}, "a pattern of 0 layers"),
        (LLAMA | {"num_kv_shared_layers": 32}, "num_kv_shared_layers=32; it has to be a whole number below 32"),
        (LLAMA | {"model_type": "nemotron-nas", "block_configs": [1]}, "it has to describe each of 32 layers"),
        (LLAMA | {"model_type": "nemotron-nas", "block_configs": [{}] * 32}, "no attention for layer 0"),
        (LLAMA | {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "it has to name each layer as M"),
        (LLAMA | {"model_type": "deepseek_v3"}, "kv_lora_rank=None"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(config: Any, says: str) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(BadInput) as raised:
        model_of_config("config.json", text)
    assert str(raised.value).startswith("config.json: ") and says in str(raised.value)
    assert "\n" not in str(raised.value)
