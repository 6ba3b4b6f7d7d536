"""`bench ttft` on a CPU: paths, tiers and limits are what they say; how fast anything is, no test asserts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from kv_bench.engines import random_llama, ttft
from kv_bench.engines.on_device import timer_of
from kvstore.block.errors import BadInput
from workbench import one_line

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = replace(ttft.SMALL, contexts=(256,), laps=2, copy_bytes=1 << 16)
KV_BYTES = 256 * 2 * 2 * 2 * 16 * 4
"""Of the prefix: 2 layers, K and V, 2 heads, 16 numbers, float32."""


@pytest.fixture(scope="module")
def result() -> ttft.TtftResult:
    return ttft.run(TINY, device="cpu")


def test_every_path_has_a_row_from_its_tier(result: ttft.TtftResult) -> None:
    assert [(row["path"], row["codec"]) for row in result.rows] == [
        ("cold", ""),
        ("fill", "raw"),
        ("dram", "raw"),
        ("hbm", "raw"),
        ("fill", "int8-kc64"),
        ("dram", "int8-kc64"),
    ]
    assert result.faults == []
    for row in result.rows:
        assert sum(row["tokens"].values()) == 256 + TINY.suffix_tokens
        assert row["tokens"].get(row["path"], 0) == (256 if row["path"] in ("dram", "hbm") else 0)
        assert 0 < row["ttft_ms_low"] <= row["ttft_ms"] <= row["ttft_ms_high"] and row["cold_mfu"] > 0


def test_limits_are_of_the_bytes_that_move(result: ttft.TtftResult) -> None:
    rows = {(row["path"], row["codec"]): row for row in result.rows}
    assert rows["dram", "raw"]["bytes_moved"] == KV_BYTES and rows["hbm", "raw"]["bytes_moved"] == 2 * KV_BYTES
    assert KV_BYTES / 4 < rows["dram", "int8-kc64"]["bytes_moved"] < KV_BYTES / 3
    for row in result.rows:
        if row["path"] in ("cold", "fill"):
            assert row["limit_ms"] is None and row.ratio is None
            continue
        rate = result.rates.device_bytes_per_second if row["path"] == "hbm" else result.rates.pinned_bytes_per_second
        assert row["limit_ms"] == pytest.approx(1e3 * row["bytes_moved"] / rate + row["suffix_ms"])
        assert row.ratio == pytest.approx(row["limit_ms"] / row["ttft_ms"])
        assert row["speedup"] == pytest.approx(rows["cold", ""]["ttft_ms"] / row["ttft_ms"])
        assert row["target_speedup"] is None and row.met is None, "targets are for the 8B shape on a GPU"


def test_as_json_and_as_text(result: ttft.TtftResult) -> None:
    plain = json.loads(json.dumps(result.found().to_dict()))
    assert plain["bench"] == "ttft" and plain["engine"] == "hf" and len(plain["rows"]) == 6
    console = Console(file=io.StringIO(), width=200)
    result.found().render(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "cold mfu" in text and "int8-kc64" in text and "beside:" in text


def test_a_prefix_that_does_not_come_from_its_tier_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "_dram_bytes", lambda *_: 1 << 20)  # room for less than half of the prefix
    found = ttft.run(replace(TINY, contexts=(4096,), codecs=("raw",), laps=1), device="cpu")
    assert any("4096 tokens were to come from dram" in fault for fault in found.faults)


def test_what_there_is_no_time_for_is_named() -> None:
    found = ttft.run(replace(TINY, contexts=(128, 256), laps=1, seconds=0.0), device="cpu")
    assert found.left_out == [f"{context} tokens: no time for it in 0 seconds" for context in (128, 256)]
    assert not found.rows and not found.faults


def test_what_there_is_no_memory_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "available_bytes", lambda: 1 << 20)
    found = ttft.run(replace(TINY, laps=1), device="cpu")
    assert [row["path"] for row in found.rows] == ["cold"] and not found.faults
    assert len(found.left_out) == 2 and all("give a shorter --context" in line for line in found.left_out)


def test_a_length_that_fails_is_one_line_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ttft._Length._suffix_seconds

    def fails(length: ttft._Length, cache: Any) -> float:
        if length._context == 128:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")
        return measured(length, cache)

    monkeypatch.setattr(ttft._Length, "_suffix_seconds", fails)
    found = ttft.run(replace(TINY, contexts=(128, 256), codecs=("raw",), laps=1), device="cpu")
    assert found.faults == ["128 tokens ended early: OutOfMemoryError: CUDA out of memory."]
    assert [row["context_tokens"] for row in found.rows] == [256] * 4


def test_what_would_not_end_in_time_is_not_begun() -> None:
    now = 0.0
    budget = ttft.Budget(100.0, lambda: now)
    assert budget.begin("cold", 1000)
    now = 10.0
    budget.spent("cold", 1000)
    assert budget.begin("cold", 8999) and not budget.begin("cold", 9001), "90 seconds are left, 10 ms a token"
    assert budget.begin("raw", 10**9), "nothing is known of it"
    now = 101.0
    assert not budget.begin("raw", 1)


@pytest.mark.parametrize(("tokens", "gigaflop_per_token"), [(2048, 14.5), (8192, 16.1), (32768, 22.5), (131072, 48.3)])
def test_flops_are_those_of_a_causal_prefill(tokens: int, gigaflop_per_token: float) -> None:
    flops = random_llama.prefill_flops(random_llama.outline("8b"), tokens)
    assert flops / tokens / 1e9 == pytest.approx(gigaflop_per_token, rel=0.005)


def test_random_models_leave_torch_as_it_was() -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    one, other = (random_llama.build("tiny", torch.device("cpu"), 64) for _ in range(2))
    assert torch.equal(torch.rand(3), want) and torch.get_default_dtype() is torch.float32
    assert torch.equal(one.lm_head.weight, other.lm_head.weight) and bool(one.lm_head.weight.any())
    assert bool(one.model.rotary_emb.inv_freq.isfinite().all()), "a buffer that is not drawn"
    assert not one.training
    assert random_llama.peak_flops(torch.device("cpu"), torch.float32, timer_of(torch.device("cpu"))) > 1e6
    assert 15e9 < random_llama.weights_bytes("8b") < 18e9


def test_what_does_not_fit_is_one_line() -> None:
    for options, named in (
        (replace(TINY, shape="9b"), "allowed: tiny, 1b, 8b"),
        (replace(TINY, contexts=(300,)), "use 256"),
    ):
        with pytest.raises(BadInput) as caught:
            ttft.run(options, device="cpu")
        assert one_line(caught.value, named)
    with pytest.raises(BadInput, match="allowed: hf"):
        ttft.run(TINY, device="cpu", engine="vllm")


@pytest.mark.parametrize(("given", "tokens"), [("8k", 8192), ("128K", 131072), (" 300 ", 300)])
def test_lengths_as_people_write_them(given: str, tokens: int) -> None:
    assert ttft.parse_tokens(given) == tokens


@pytest.mark.parametrize("given", ["", "k", "0", "8m", "-1", "1.5k"])
def test_lengths_that_are_none(given: str) -> None:
    with pytest.raises(BadInput, match=r"write e\.g\. 8192 or 8k"):
        ttft.parse_tokens(given)


def test_options_take_what_was_given() -> None:
    options = ttft.options_for("cpu", shape="1b", contexts="1k,2k", chunk_tokens=512, laps=4)
    assert (options.shape, options.contexts, options.chunk_tokens, options.laps) == ("1b", (1024, 2048), 512, 4)
    assert ttft.options_for("cpu") == ttft.SMALL
