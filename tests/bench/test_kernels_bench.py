"""`bench kernels` on a CPU: every row is there and checked against the twins; how fast anything is, no test asserts."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from kv_bench.engines import decode_rows, kernel_rows, kernels, paged_pool, transfer_rows
from kv_bench.engines.on_device import device_named, timer_of
from kv_bench.engines.paged_pool import HEADER, PagedPool, new_payloads, route_named
from kvstore.bench.measure import Against
from kvstore.bench.rig import BlockShape
from kvstore.bench.row import Row
from kvstore.block.errors import BadInput
from paged_memory import kernels_can_run
from workbench import one_line

__all__ = ["kernels_can_run"]

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SHAPE = BlockShape(2, 64, 2, 16)
TINY = replace(kernels.SMALL, kv_bytes=(2 * SHAPE.payload_bytes,), transfer_bytes=3 * SHAPE.payload_bytes)


@pytest.fixture(scope="module")
def result() -> kernels.KernelsResult:
    return kernels.run(TINY, device="cpu")


def rendered(result: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    result.render(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_kernel_and_codec_has_a_row_that_matches_its_twin(result: kernels.KernelsResult) -> None:
    seen = [(row["kernel"], row["codec"]) for row in result.kernels]
    quantized = [
        (kernel, codec)
        for codec in ("int8-kc64",)
        for kernel in ("gather_quantize", "dequantize_scatter", "digest_slices")
    ]
    assert seen == [("gather", "raw"), ("scatter", "raw"), ("digest_slices", "raw"), *quantized]
    for row in result.kernels:
        assert row["matches_twin"] and 0 < row.ratio_low <= row.ratio <= row.ratio_high
        assert row.target is None and row.met is None, "targets are for a GPU"
    assert result.faults == []


def test_bytes_are_those_read_and_written(result: kernels.KernelsResult) -> None:
    raw = 2 * SHAPE.payload_bytes
    moved = {(row["kernel"], row["codec"]): row["bytes_moved"] for row in result.kernels}
    assert moved["gather", "raw"] == moved["scatter", "raw"] == 2 * raw
    # K: a code, and of 64 tokens a scale and a zero point per channel; V: a code, and a scale per token and head.
    channels, tokens = 2 * 2 * 16, 2 * 2 * 64
    small = 2 * (raw // 2 + (2 * channels * 2 + tokens * 2) * 2) // 2
    assert moved["gather_quantize", "int8-kc64"] == moved["dequantize_scatter", "int8-kc64"] == raw + small
    assert moved["digest_slices", "raw"] == raw + 2 * 2 * 16
    assert {row["kv_bytes"] for row in result.kernels} == {raw}


def test_every_direction_codec_and_slicing_has_a_row(result: kernels.KernelsResult) -> None:
    seen = {(row["direction"], row["codec"], row["layers_at_once"]) for row in result.transfers}
    assert seen == {
        (direction, codec, layers)
        for direction in ("load", "save", "both")
        for codec in ("raw", "int8-kc64")
        for layers in (2, 1)
    }
    for row in result.transfers:
        times = 2 if row["direction"] == "both" else 1
        assert row["kv_bytes"] == times * 3 * SHAPE.payload_bytes and row["matches_twin"] and row["is_direct"]
        assert (row["wire_bytes"] < row["kv_bytes"]) == (row["codec"] != "raw")
        assert row.ratio > 0 and row.met is None


def test_steps_are_counted_beside_each_kind_of_transfer(result: kernels.KernelsResult) -> None:
    assert [row["beside"] for row in result.decode] == ["nothing", "load", "save", "both"]
    for row in result.decode:
        assert row["steps"] == TINY.decode_laps * TINY.steps and 0 < row["step_ms_p50"] <= row["step_ms_p99"]
        assert (row["transfer_gb_per_second"] > 0) == (row["beside"] != "nothing")
    assert result.decode[0]["slowdown_p50"] == result.decode[0]["slowdown_p99"] == 1.0


def test_as_json_and_as_text(result: kernels.KernelsResult) -> None:
    plain = json.loads(json.dumps(result.found().to_dict()))
    assert plain["bench"] == "kernels" and plain["route"] == "twins" and plain["device"]["name"] == "cpu"
    assert len(plain["kernels"]) == 6 and plain["faults"] == []
    text = rendered(result.found())
    assert "gather_quantize" in text and "wire" in text and "beside" in text and "matches twin" in text


@pytest.mark.usefixtures("kernels_can_run")
def test_the_kernels_themselves_run_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_rows, "DIRECTIONS", ("both",))
    one = SHAPE.payload_bytes
    options = replace(TINY, kv_bytes=(one,), transfer_bytes=one, laps=1, route="triton")
    found = kernels.run(options, stages=("kernels", "transfers"))
    assert found.faults == [] and found.route == "triton"
    assert len(found.kernels) == 6 and len(found.transfers) == 4 and not found.decode


@pytest.mark.parametrize("kernel", ["gather", "scatter", "gather_quantize", "dequantize_scatter", "digest"])
def test_a_kernel_that_writes_nothing_is_found(kernel: str) -> None:
    route = replace(route_named("twins", CPU), **{kernel: lambda *_: None})
    rows = list(kernel_rows.measure(SHAPE, 16, SHAPE.payload_bytes, 1, CPU, route, timer_of(CPU), []))
    wrong = {row["kernel"] for row in rows if not row["matches_twin"]}
    assert wrong == {"digest_slices" if kernel == "digest" else kernel}


@pytest.mark.parametrize("kernel", ["gather_quantize", "dequantize_scatter"])
def test_one_wrong_bit_is_found(kernel: str) -> None:
    pool, route = PagedPool(SHAPE, 1, 16, CPU, seed=3), route_named("twins", CPU)
    payloads = new_payloads(SHAPE, "int8-kc64", 1, CPU)
    assert not route.save(pool.pools, "int8-kc64", pool.table, payloads, HEADER).any()
    route.loader(pool.pools, "int8-kc64", pool.table, payloads, HEADER)()
    check = paged_pool.is_saved if kernel == "gather_quantize" else paged_pool.is_loaded
    route.save(pool.pools, "int8-kc64", pool.table, payloads, HEADER)
    route.loader(pool.pools, "int8-kc64", pool.table, payloads, HEADER)()
    if kernel == "gather_quantize":
        route.save(pool.pools, "int8-kc64", pool.table, payloads, HEADER)
        assert check(pool, "int8-kc64", pool.table, payloads.clone(), HEADER)
        payloads[0, HEADER + 7] ^= 1
        assert not check(pool, "int8-kc64", pool.table, payloads, HEADER)
    else:
        assert check(pool, "int8-kc64", pool.table, payloads, HEADER)
        pool.planes[1][0][0, 0, 0].view(torch.int16)[3] ^= 1
        assert not check(pool, "int8-kc64", pool.table, payloads, HEADER)


def test_wrong_bits_are_a_fault_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(route_named("twins", CPU), gather=lambda *_: None)
    monkeypatch.setattr(kernels, "route_named", lambda *_: broken)
    found = kernels.run(replace(TINY, laps=1), device="cpu", stages=("kernels",))
    assert found.faults == ["gather of raw did not write what its twin in plain torch writes"]


def test_a_stage_that_fails_is_one_line_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Iterator[Row]:
        raise RuntimeError("CUDA error: misaligned address\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(kernel_rows, "measure", fails)
    monkeypatch.setattr(transfer_rows, "DIRECTIONS", ("save",))
    found = kernels.run(replace(TINY, laps=1), device="cpu", stages=("kernels", "transfers"))
    assert found.faults == ["the stage kernels ended early: RuntimeError: CUDA error: misaligned address"]
    assert not found.kernels and len(found.transfers) == 4


def test_a_kernel_that_cannot_be_launched_is_one_line_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    broken = replace(route_named("twins", CPU), scatter=fails)
    monkeypatch.setattr(kernels, "route_named", lambda *_: broken)
    found = kernels.run(replace(TINY, laps=1), device="cpu", stages=("kernels",))
    assert found.faults == ["scatter of raw failed: OutOfMemoryError: CUDA out of memory."]
    assert [row["kernel"] for row in found.kernels][:2] == ["gather", "digest_slices"] and len(found.kernels) == 5


def test_what_triton_raises_is_one_line() -> None:
    triton = pytest.importorskip("triton")
    assert any(issubclass(triton.compiler.errors.CompilationError, kind) for kind in paged_pool.FAILURES)
    assert paged_pool.told(triton.TritonError("one\ntwo")) == "TritonError: one"


def test_a_transfer_that_cannot_page_lock_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_bench.engines.on_device.AtOnceHost.register", lambda *_, **__: "not here")
    monkeypatch.setattr(transfer_rows, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(transfer_rows, "DIRECTIONS", ("load",))
    found = kernels.run(replace(TINY, laps=1), device="cpu", stages=("transfers",))
    assert len(found.faults) == 4 and "could not be page-locked" in found.faults[0]
    assert all(row["matches_twin"] and not row["is_direct"] for row in found.transfers)


@pytest.mark.parametrize(
    ("direction", "moved"), [("load", (True, False)), ("save", (False, True)), ("both", (True, True))]
)
def test_the_plain_copy_moves_what_it_says(direction: str, moved: tuple[bool, bool]) -> None:
    plain = transfer_rows.PlainCopy(4096, CPU, timer_of(CPU))
    (loaded_from, saved_to), (loaded_to, saved_from) = plain._host, plain._there
    loaded_from.fill_(1), loaded_to.fill_(2), saved_from.fill_(3), saved_to.fill_(4)
    plain.run(direction, 4000)
    for target, source, old, is_moved in ((loaded_to, 1, 2, moved[0]), (saved_to, 3, 4, moved[1])):
        assert bool((target[:4000] == (source if is_moved else old)).all()) and bool((target[4000:] == old).all())


def test_ratios_are_of_bytes_per_second() -> None:
    contender = kernel_rows._Contender("gather_quantize", "int8-kc64", lambda: None, 1500, lambda: True)
    row = kernel_rows._row(contender, 1000, Against(1.0, 1.0, 0.9, 0.8, 1.0, 1.0), 0.7, False, True)
    assert row.ratio == pytest.approx(0.9 * 1500 / 2000) and row.met is False
    assert row.value == row["gb_per_second"] == pytest.approx(1500e-9)
    assert row.limit == row["copy_gb_per_second"] == pytest.approx(2000e-9)
    assert replace(row, ratio=0.7).met is True


def test_a_slower_step_misses_its_target() -> None:
    row = decode_rows.row_of("load", [1.06], [1.0], 8, 64, 1.0, is_targeted=True)
    assert row.met is False and row["most_slowdown"] == 1.05 and row["slowdown_p99"] == 1.06
    assert decode_rows.row_of("load", [1.05], [1.0], 8, 64, 1.0, is_targeted=True).met is True
    assert decode_rows.row_of("save", [1.06], [1.0], 8, 64, 1.0, is_targeted=True).met is None


def test_what_does_not_fit_is_one_line() -> None:
    for options, named in (
        (replace(TINY, kv_bytes=(1024,)), "hold no block"),
        (replace(TINY, page_tokens=7), "do not divide"),
        (replace(TINY, model="3b"), "allowed: tiny, 1b, 8b"),
        (replace(TINY, route="hip"), "allowed: triton, twins"),
    ):
        with pytest.raises(BadInput) as caught:
            kernels.run(options, device="cpu")
        assert one_line(caught.value, named)
    with pytest.raises(BadInput, match="allowed: kernels, transfers, decode"):
        kernels.run(TINY, device="cpu", stages=("gather",))
    with pytest.raises(BadInput, match="allowed: cuda, cpu"):
        device_named("rocm")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused() -> None:
    with pytest.raises(BadInput, match="sees no GPU"):
        kernels.run(device="cuda")


def test_without_triton_its_route_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_pool, "_HAS_TRITON", False)
    with pytest.raises(BadInput, match=r"pip install '\.\[gpu\]'"):
        route_named("triton", CPU)


def test_options_take_what_was_given() -> None:
    options = kernels.options_for("cpu", {"layers": 3, "kv_heads": None}, sizes=("1MiB", "2MiB"), laps=4)
    assert options.shape == replace(kernels.SMALL.shape, layers=3)
    assert (options.kv_bytes, options.transfer_bytes, options.laps) == ((1 << 20, 2 << 20), 2 << 20, 4)
