"""The quality of the INT8 codecs on the trained model: what holds, what does not, and that a wrong axis would show."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")

import torch
from rich.console import Console

from kv_bench import codec, codec_quality, codec_speed
from kv_bench.codec import RAW
from kv_bench.codec_quality import (
    BIAS,
    CODECS,
    CONTINUATION,
    LARGEST_LOSS_CHANGE,
    OUTLIER,
    PLAIN,
    VARIANTS,
    QualityOptions,
    QualityResult,
    key_rms,
    measure,
)
from kv_bench.corpus import read_sources, windows
from kv_kernels.int8 import KC64, Axis, dequantize, quantize
from kvstore.bench.row import Target, number
from kvstore.block.errors import BadInput
from kvstore.demo.model import load_trained

LARGEST_PERCENT = 1.2
"""The attention's error that int8-kc64 must keep to."""

WINDOWS = 4
WRONG_AXIS = "int8-kc64, wrong axis"


@pytest.fixture(scope="module")
def result() -> QualityResult:
    return codec_quality.run(QualityOptions(windows=WINDOWS, prefixes=(512, 3840)))


def attention(result: QualityResult, name: str) -> dict[tuple[str, int], float]:
    return {
        (one.variant, one.prefix_tokens): quality.attention_percent
        for one in result.variants
        for quality in one.codecs
        if quality.codec == name
    }


def test_int8_kc64_holds_on_every_variant_and_at_length(result: QualityResult) -> None:
    found = attention(result, KC64)
    assert set(found) == {(variant.name, prefix) for variant in VARIANTS for prefix in (512, 3840)}
    assert all(0.3 < percent <= LARGEST_PERCENT for percent in found.values()), found
    for one in result.variants:
        quality = one.codecs[list(CODECS).index(KC64)]
        assert quality.kl_nats < 1e-3 and quality.top1_percent > 97 and abs(quality.perplexity_percent) < 1


def test_k_along_the_wrong_axis_fails_on_the_bias() -> None:
    """Pages whose K lies as [width, tokens] and are taken for [tokens, width]: nothing else would notice."""

    def along_tokens(k: Any, v: Any) -> tuple[Any, Any]:
        turned = dequantize(*quantize(k.transpose(1, 2).contiguous(), Axis.CHANNEL), k.dtype).transpose(1, 2)
        return turned, CODECS[KC64](k, v)[1]

    model, texts = load_trained(), windows(read_sources(held_out=True), 512 + CONTINUATION, 2)
    rms = key_rms(model, texts[0])
    right, wrong = measure(
        model, BIAS, rms, texts, lambda _: None, {KC64: CODECS[KC64], WRONG_AXIS: along_tokens}
    ).codecs
    assert right.attention_percent <= LARGEST_PERCENT < 10 < wrong.attention_percent
    assert wrong.kl_nats > 100 * right.kl_nats


def test_the_variants_leave_the_function_and_make_k_hard(result: QualityResult) -> None:
    assert result.failures == []
    by_variant = {one.variant: one for one in result.variants if one.prefix_tokens == 512}
    for name, one in by_variant.items():
        assert abs(one.nats_per_byte - by_variant[PLAIN.name].nats_per_byte) < 1e-4
        assert (one.channel_spread > 8) is (name != PLAIN.name), "a channel that stands out"
    assert by_variant[BIAS.name].channel_spread > 3 * by_variant[OUTLIER.name].channel_spread


def test_a_variant_that_is_another_function_is_a_failure(result: QualityResult) -> None:
    other = replace(result.variants[1], nats_per_byte=result.variants[0].nats_per_byte + 2 * LARGEST_LOSS_CHANGE)
    (failure,) = replace(result, variants=[result.variants[0], other]).failures
    assert OUTLIER.name in failure and "another function" in failure
    lost = replace(result.variants[1], nats_per_byte=float("nan"))
    assert replace(result, variants=[result.variants[0], lost]).failures


def test_raw_is_the_reference_itself(result: QualityResult) -> None:
    for one in result.variants:
        raw = one.codecs[0]
        assert raw.codec == RAW and raw.attention_percent == raw.kl_nats == raw.perplexity_percent == 0
        assert raw.top1_percent == 100 and one.bfloat16_percent > 0.1


def test_random_weights_would_hide_the_error() -> None:
    """Why the model is trained: with nearly even attention every error averages out."""
    model, texts = load_trained(), windows(read_sources(held_out=True), 512 + CONTINUATION, 1)
    shape = model.config.to_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = type(model)(type(model.config)(**shape)).eval()
    found = [measure(one, PLAIN, 0.0, texts, lambda _: None).codecs[-1].attention_percent for one in (model, untrained)]
    assert found[0] > 2 * found[1]


def test_json_and_tables_say_the_same(result: QualityResult) -> None:
    whole = codec.result_of(result.found())
    found = json.loads(json.dumps(whole.to_dict()))
    assert found["bench"] == "codec" and found["quality_of"]["model"]["weights"] == "trained"
    first = found["variants"][0]
    assert (first["samples"], first["scored_bytes"]) == (WINDOWS, WINDOWS * (CONTINUATION - 1))
    codecs = found["quality"][:2]
    assert [one["codec"] for one in codecs] == [RAW, KC64] and codecs[1]["holds"] is True
    assert len(found["quality"]) == 2 * len(found["variants"]) == 2 * len(result.variants)
    shown = io.StringIO()
    whole.render(Console(file=shown, width=120))
    for text in (number(codecs[1]["value"]), "After 3,840 bytes"):
        assert text in shown.getvalue()
    assert "Control:" in shown.getvalue() and "int8-kc64 holds on every" in shown.getvalue()


def test_sizes_follow_from_the_form() -> None:
    bits = {(row["codec"], row["kv"]): row.value for row in codec.size_rows()}
    assert bits[RAW, "head_dim 128"] == 16
    assert bits[KC64, "head_dim 64"] == 8 + (2 * 16 / 64 + 16 / 64) / 2  # scale and zero of K, scale of V
    assert bits[KC64, "MLA, 576 wide"] == 8 + 16 / 64
    shown = io.StringIO()
    codec.result_of().render(Console(file=shown, width=120))
    assert "1.94" in shown.getvalue() and "--quality" in shown.getvalue()
    assert "quality" not in codec.result_of().to_dict()


@pytest.mark.parametrize("given", [0, 65])
def test_windows_say_what_is_allowed(given: int) -> None:
    with pytest.raises(BadInput, match=f"windows={given}; give 1 to 64"):
        QualityOptions(windows=given)


def test_every_codec_dtype_and_order_has_its_speed() -> None:
    """Counted, not timed: the bench is run by people."""
    options = codec_speed.SpeedOptions(layers=2, kv_heads=2, head_dim=64, block_tokens=64, blocks=3, laps=1)
    (section,), about, _ = codec_speed.run(options)
    rows = {(row["codec"], row["path"], row["dtype"], row["page_order"]): row for row in section.rows}
    assert len(rows) == len(section.rows) == 2 * 2 * 3 * 3 and about["threads"] == 1
    assert all(row.value > 0 and row["core_gb_per_second"] > 0 and row["ratio"] > 0 for row in section.rows)
    assert {row["dtype"] for row in section.rows if row.target} == {"bfloat16", "float16"}
    assert {row.target for row in section.rows} == {None, Target(4.0, of="core_gb_per_second")}
    assert not any(row.target for row in section.rows if row["codec"] == RAW)
    whole = codec.result_of(([section], about, []))
    found = json.loads(json.dumps(whole.to_dict()))
    assert found["speed"][0]["codec"] == RAW and "quality" not in found and whole.faults == []
    shown = io.StringIO()
    whole.render(Console(file=shown, width=200))
    for text in codec_speed.PAGE_ORDERS:
        assert text in shown.getvalue()
    with pytest.raises(BadInput, match="laps=0"):
        codec_speed.SpeedOptions(laps=0)
