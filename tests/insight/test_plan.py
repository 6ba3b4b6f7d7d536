"""Plans: figures by hand, what holds of any request, and refusals that are said first."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.errors import BadInput
from kvstore.block.layout import Layout
from kvstore.block.pages import block_bytes, default_codec, payload_bytes
from kvstore.insight.models import MODELS, described
from kvstore.insight.plan import PlanRequest, TierSpeed, TraceFigures, plan

GB = 10**9
EIGHT = PlanRequest(MODELS["llama-3.1-8b"])
RAW = replace(EIGHT, codec="raw")
FAST = TierSpeed("dram", 12e9, 0.002)


def value(request: PlanRequest, key: str) -> float:
    found = plan(request).figure(key).value
    assert found is not None
    return found


# By hand ---------------------------------------------------------------------------------------------------------


def test_blocks_are_what_a_store_makes_of_them() -> None:
    layout = Layout.gqa(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=64)
    assert value(RAW, "stored_bytes_per_token") == block_bytes("raw", layout) / 64 == 131_072 + 64
    assert value(EIGHT, "stored_bytes_per_token") == block_bytes("int8-kc64", layout) / 64
    assert value(EIGHT, "codec_ratio") == pytest.approx(1.92, abs=0.01)
    assert plan(EIGHT).codec == default_codec(layout) == "int8-kc64"
    assert value(replace(RAW, tensor_parallel=4), "overhead_bytes_per_token") == 4 * 64, "a header for each part"
    small = described(1, 1, 17)
    request = PlanRequest(small, codec="raw")
    padded = -(-payload_bytes("raw", Layout.gqa(layers=1, kv_heads=1, head_dim=17, dtype="bfloat16").parts[0]) // 4096)
    assert value(request, "stored_bytes_per_token") == (4096 + 4096 * padded) / 64


def test_published_examples() -> None:
    assert value(PlanRequest(described(80, 64, 128, "float16")), "bytes_per_token") == 2_621_440
    of_4096 = PlanRequest(described(80, 8, 128, "float16"), codec="raw", context_tokens=4096)
    assert value(of_4096, "bytes_per_token") * 4096 == 1_342_177_280
    assert value(of_4096, "context_bytes") == 1_342_177_280 + 64 * 4096, "and a header for each of 64 blocks"


def test_break_even_by_hand() -> None:
    """8B at 10,000 tokens a second: 1.31 GB/s raw and 0.68 in 8 bits, half of it behind 30,500 tokens; 70B at 8,000:
    2.62; a latent at 10,000: 0.70. 2 ms before a load at 12 GB/s: from 22 tokens, so from one block on."""
    request = replace(RAW, context_tokens=30_500, tiers=(FAST,))
    assert value(request, "dram_least_bandwidth") == pytest.approx(1.31e9, rel=0.01)
    assert value(request, "dram_least_bandwidth_deep") == pytest.approx(1.31e9 / 2, rel=0.01)
    assert value(replace(request, codec=""), "dram_least_bandwidth") == pytest.approx(0.68e9, rel=0.01)
    seventy = PlanRequest(MODELS["llama-3.1-70b"], codec="raw", prefill_rate=8000, tiers=(FAST,))
    assert value(seventy, "dram_least_bandwidth") == pytest.approx(2.62e9, rel=0.01)
    latent = PlanRequest(MODELS["deepseek-v3"], codec="raw", tiers=(FAST,))
    assert value(latent, "dram_least_bandwidth") == pytest.approx(0.70e9, rel=0.01)
    assert value(request, "dram_shortest_prefix") in (22, 23)
    assert value(request, "dram_shortest_blocks") == 1


def test_the_shortest_prefix_is_where_the_two_times_cross() -> None:
    for model in ("llama-3.1-8b", "gemma-3-27b", "deepseek-v3"):
        slow = TierSpeed("nvme", 0.8e9, 0.05)
        request = PlanRequest(MODELS[model], tiers=(slow,))
        shortest = int(value(request, "nvme_shortest_prefix"))
        for tokens, pays in ((shortest - 1, False), (shortest, True), (2 * shortest, True)):
            at = replace(request, context_tokens=tokens)
            assert (value(at, "nvme_load_seconds") < value(at, "nvme_compute_seconds")) is pays, (model, tokens)


def test_sizes_for_a_window_by_hand() -> None:
    """26,500 new tokens a second are 3.5 GB/s of an 8B model, 3.1 TB in 15 minutes, 1.6 TB in 8 bits."""
    request = replace(RAW, new_tokens_per_second=26_500.0, window_seconds=900.0)
    assert value(request, "new_bytes_per_second") == pytest.approx(3.5e9, rel=0.01)
    assert value(request, "window_bytes") == pytest.approx(3.1e12, rel=0.01)
    assert value(replace(request, codec=""), "window_bytes") == pytest.approx(1.6e12, rel=0.02)
    half = replace(request, dram_bytes=int(value(request, "window_bytes")) // 2)
    assert value(half, "covered_seconds") == pytest.approx(450, rel=1e-6)
    assert value(half, "nvme_bytes") == pytest.approx(half.dram_bytes, rel=1e-6)
    assert value(half, "drive_writes_per_day") == pytest.approx(86_400 / 450, rel=1e-6)
    full = replace(half, nvme_bytes=2 * half.dram_bytes)
    assert value(full, "covered_seconds") == pytest.approx(1350, rel=1e-6)
    assert value(full, "drive_writes_per_day") == pytest.approx(96, rel=1e-6)


def test_users_by_hand() -> None:
    request = replace(EIGHT, gpu_memory_bytes=80 * GB, weights_bytes=16 * GB, activation_bytes=GB, context_tokens=4096)
    assert value(request, "kv_pool_bytes") == 72 * GB - 17 * GB
    assert value(request, "users") == 55 * GB // (4096 * 131_072) == 102
    assert value(request, "longest_context") == 55 * GB // 131_072
    assert value(replace(request, users=10), "longest_context") == 55 * GB // 1_310_720
    assert value(replace(request, weights_bytes=90 * GB), "users") == 0
    assert value(replace(request, weights_bytes=90 * GB), "longest_context") == 0
    two = replace(request, tensor_parallel=2)
    assert value(two, "users") == 63 * GB // (4096 * 65_536)


def test_a_latent_is_whole_on_each_gpu_and_heads_are_divided() -> None:
    latent = PlanRequest(MODELS["deepseek-v3"], tensor_parallel=8)
    assert value(latent, "bytes_per_token_and_gpu") == 70_272
    assert value(replace(EIGHT, tensor_parallel=8), "bytes_per_token_and_gpu") == 131_072 / 8
    assert value(replace(EIGHT, tensor_parallel=16), "bytes_per_token_and_gpu") == 131_072 / 8, "heads are copied"
    link = TierSpeed("dram", 12e9, 0.0, is_per_gpu=True)
    assert value(replace(latent, tiers=(link,)), "dram_load_seconds") == value(
        replace(latent, tensor_parallel=1, tiers=(link,)), "dram_load_seconds"
    )
    assert value(replace(EIGHT, tensor_parallel=8, tiers=(link,)), "dram_load_seconds") == pytest.approx(
        value(replace(EIGHT, tiers=(link,)), "dram_load_seconds") / 8, rel=0.01
    )


def test_of_a_window_a_load_brings_its_end_and_blocks_have_all() -> None:
    request = PlanRequest(MODELS["gemma-3-27b"], codec="raw", context_tokens=102_400, tiers=(FAST,))
    assert value(request, "context_bytes") > 102_400 * (81_920 + 425_984)
    loaded = (value(request, "dram_load_seconds") - 0.002) * 12e9
    assert loaded == pytest.approx(102_400 * 81_920 + 1024 * 425_984, rel=0.01)
    deep = 81_920 * 10_000 / (1 + 2 * 102_400 / 61_000)
    assert value(request, "dram_least_bandwidth_deep") == pytest.approx(deep, rel=0.01), (
        "one token more is full layers'"
    )


def test_states_are_sized_by_the_policy_that_keeps_them() -> None:
    """147 MiB each 18,816 tokens are 8,182 B a token, an eighth of 65,536; a load brings one, 12.8 ms at 12 GB/s."""
    qwen = PlanRequest(MODELS["qwen3.5-27b"], new_tokens_per_second=1000, tiers=(FAST,))
    assert value(qwen, "state_bytes") == 153_944_064 and value(qwen, "state_tokens") == 2349
    assert value(qwen, "state_every_tokens") == 18_816
    assert value(qwen, "state_bytes_per_token") == 153_944_064 / 18_816 <= 65_536 / 8
    assert value(replace(qwen, block_tokens=784, codec="raw"), "state_every_tokens") == 24 * 784
    assert value(replace(qwen, state_share=0.5), "state_every_tokens") == 4736
    without = replace(qwen, state_share=0)
    assert plan(without).figure("state_every_tokens").value is None
    assert value(qwen, "new_bytes_per_second") - value(without, "new_bytes_per_second") == pytest.approx(
        8_181_550, 1e-3
    )
    alone = replace(qwen, model=replace(qwen.model, states=()))
    assert value(qwen, "dram_load_seconds") - value(alone, "dram_load_seconds") == pytest.approx(153_944_064 / 12e9)
    assert value(qwen, "dram_shortest_prefix") > value(alone, "dram_shortest_prefix")


# Of any request ---------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(sorted(MODELS))


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    model = MODELS[draw(NAMES)]
    ranks = [one for one in (1, 2, 4, 8) if all(one <= each.kv_heads or each.kv_heads == 1 for each in model.layers)]
    return PlanRequest(
        model,
        block_tokens=64 * draw(st.integers(1, 8)),
        tensor_parallel=draw(st.sampled_from([one for one in ranks if one in (1, 2)])),
        context_tokens=draw(st.integers(1, 1 << 20)),
        gpu_memory_bytes=draw(st.integers(1, 10**12)),
        weights_bytes=draw(st.integers(1, 10**12)),
        window_seconds=draw(st.floats(1, 1e6)),
        new_tokens_per_second=draw(st.floats(1, 1e6)),
        prefill_rate=draw(st.floats(1, 1e6)),
        tiers=(TierSpeed("dram", draw(st.floats(1e6, 1e12)), draw(st.floats(0, 1))),),
    )


@given(requests())
def test_the_longest_context_fits_and_one_token_more_does_not(request: PlanRequest) -> None:
    longest = int(value(request, "longest_context"))
    if longest:
        assert value(replace(request, context_tokens=longest), "users") >= 1
    if longest < (1 << 31) - 1:
        assert value(replace(request, context_tokens=longest + 1), "users") == 0


@given(requests())
def test_eight_bits_take_less_than_all_and_frames_are_counted(request: PlanRequest) -> None:
    raw = replace(request, codec="raw")
    assert value(raw, "payload_bytes_per_token") == value(raw, "bytes_per_token")
    assert value(request, "stored_bytes_per_token") <= value(raw, "stored_bytes_per_token")
    assert value(request, "stored_bytes_per_token") >= value(request, "payload_bytes_per_token") + 4096 / 512


@given(requests())
def test_every_number_has_a_formula_and_goes_into_json(request: PlanRequest) -> None:
    found = plan(request)
    figures = [one for section in found.sections for one in section.figures]
    assert all(one.formula and one.words and one.text for one in figures)
    assert len({one.key for one in figures}) == len(figures)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["figures"].keys() == {one.key for one in figures}


# Refusals --------------------------------------------------------------------------------------------------------


def test_what_an_engine_does_not_serve_is_said() -> None:
    def said(name: str) -> str:
        return " ".join(plan(PlanRequest(MODELS[name])).refusals)

    assert said("llama-3.1-8b") == ""
    assert "With transformers it is served in part: prompts with videos" in said("gemma-3-4b")
    assert "With SGLang it is served in part: page hashes" in said("qwen3.5-27b") and "vLLM" not in said("qwen3.5-27b")


def test_an_indexer_has_no_eight_bits() -> None:
    request = PlanRequest(MODELS["deepseek-v3.2"])
    assert plan(request).codec == "raw"
    with pytest.raises(BadInput, match="cannot write KV of dtype uint8"):
        plan(replace(request, codec="int8-kc64"))


@pytest.mark.parametrize("speed", [0.0, float("nan")])
def test_a_tier_that_cannot_be_is_refused(speed: float) -> None:
    with pytest.raises(BadInput, match="bytes per second of dram; give 1 or more"):
        TierSpeed("dram", speed, 0.0)


def test_a_load_that_never_pays_is_said() -> None:
    never = replace(RAW, prefill_rate=1e11, tiers=(TierSpeed("nvme", 1.0, 3600.0),))
    found = plan(never).figure("nvme_shortest_prefix")
    assert (found.value, found.text) == (None, "-")


def test_a_recording_takes_the_place_of_a_guess() -> None:
    found = TraceFigures("some.jsonl", 10, 100.0, 64_000, 32_000, 0.4, 0.5, ((GB, 0.3), (2 * GB, 0.46), (4 * GB, 0.5)))
    request = replace(EIGHT, trace=found)
    assert value(request, "new_tokens_per_second") == 320
    assert value(request, "window_bytes") == 320 * value(EIGHT, "stored_bytes_per_token") * 900
    assert value(request, "enough_bytes") == 2 * GB
    assert plan(replace(request, trace=replace(found, sizes=((GB, 0.1),)))).figure("enough_bytes").value is None
    assert not any("hit rate" in note for note in plan(request).notes)
