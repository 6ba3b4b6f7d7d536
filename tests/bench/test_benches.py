"""Each bench in its smallest form: which rows it has, that they are sound, and that what is wrong is a fault.

How fast anything is, no test asserts: everything runs on the real store with frames of a few KiB.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra: hf)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

import torch
from rich.console import Console

import benches
from kv_bench import codec, codec_quality, corpus, kernels, lookup, nvme, on_device, restart, tiers, ttft
from kv_bench.process import Sidecar
from kv_bench.rig import BlockShape
from kv_kernels.int8 import KC64, Axis
from kvstore.block.errors import BadInput, StoreError
from kvstore.cli.terminal import BAD_INPUT
from kvstore.demo.passes import load_trained
from kvstore.traffic.row import BenchResult
from paged_memory import kernels_can_run

__all__ = ["kernels_can_run"]
pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = BlockShape(layers=2, block_tokens=64, kv_heads=2, head_dim=8)
LOOKUP = lookup.LookupOptions(1024, 64, 32, 400, laps=3, door_laps=5, clients=2, client_laps=1, client_seconds=0.2)
NVME = nvme.NvmeOptions((SHAPE,), 48 * SHAPE.payload_bytes, laps=2)
TIERS = tiers.TiersOptions(
    shapes=(SHAPE,),
    working_set_bytes=tiers.PROMPTS * 3 * SHAPE.payload_bytes,
    laps=2,
    door=tiers.DoorOptions((SHAPE,), 12 * 64, laps=2),
    host_pages=(SHAPE,),
    nvme=NVME,
)
SPEED = codec.SpeedOptions(layers=2, kv_heads=2, head_dim=64, block_tokens=64, blocks=3, laps=1)
QUALITY = codec_quality.QualityOptions(windows=4, prefixes=(512, 3840))
KERNELS = replace(kernels.SMALL, laps=1)
TTFT = replace(ttft.SMALL, contexts=(256,), laps=2, copy_bytes=1 << 16)
RESTART = restart.RestartOptions(700, 64, laps=1, sidecar_laps=1)

ROW = "value unit samples low high limit_of limit ratio ratio_low ratio_high target target_of met".split()


def quiet(line: str) -> None: ...


@dataclass(frozen=True)
class Bench:
    """run: in its smallest form. lists: of each list in its JSON how many rows it has, and their names besides those of
    every row. about: of what else is in it. words: of what people see."""

    name: str
    run: Callable[[], BenchResult]
    lists: dict[str, tuple[int, str]]
    about: str = ""
    words: str = ""


TIER = "tier path payload_bytes prompt_tokens page_order verified threads cpu_ratio"
KERNEL = "kernel codec kv_bytes bytes_moved seconds gb_per_second copy_gb_per_second is_host_bound matches_twin"
TRANSFER = (
    "direction codec layers_at_once kv_bytes wire_bytes seconds gb_per_second kv_gb_per_second limit_gb_per_second "
    "is_direct matches_twin"
)
STEP = (
    "beside streams context_tokens steps step_ms_p50 step_ms_p99 slowdown_p50 slowdown_p99 transfer_gb_per_second "
    "most_slowdown"
)
QUALITIES = (
    "variant codec prefix_tokens relative_k_percent relative_v_percent kl_nats perplexity_percent top1_percent "
    "nats_per_byte holds"
)
FIRST_TOKEN = (
    "context_tokens path codec laps ttft_ms ttft_ms_low ttft_ms_high lookup_ms restored_ms save_ms bytes_moved "
    "suffix_ms limit_ms speedup cold_mfu target_speedup tokens"
)
BENCHES = (
    Bench("tiers", lambda: tiers.run(TIERS, quiet), {"rows": (29, TIER)}, "disk", "loop memcpy"),
    Bench(
        "lookup",
        lambda: lookup.run(LOOKUP, quiet),
        {
            "matches": (5, "by blocks prompts"),
            "clients": (1, "clients ms_p50 ms_p99 times_chain"),
            "figures": (6, "figure"),
        },
        words="tables of a block",
    ),
    Bench(
        "restart",
        lambda: restart.run(RESTART, quiet),
        {"rows": (3, "how opened answered slowest_match_ms"), "sidecar": (2, "how ready")},
        "bytes_per_block index_bytes",
        "700 blocks killed",
    ),
    Bench(
        "codec",
        lambda: codec.result_of(codec.speed(quiet, SPEED), codec_quality.run(QUALITY, quiet)),
        {
            "sizes": (6, "codec kv bound"),
            "speed": (36, "dtype page_order codec path core_gb_per_second"),
            "quality": (16, QUALITIES),
            "variants": (8, "variant prefix_tokens scored_bytes loss_change channel_spread bfloat16_percent"),
        },
        "block_tokens pool_dtype quality_of speed_options threads",
        "1.94 int8-kc64 outlier",
    ),
    Bench(
        "kernels",
        lambda: kernels.run(KERNELS, quiet, "cpu"),
        {
            "plan": (6, "load calls"),
            "kernels": (6, KERNEL),
            "ways": (4, "direction codec payload_bytes"),
            "transfers": (12, TRANSFER),
            "decode": (4, STEP),
        },
        "device route",
        "gather_quantize wire",
    ),
    Bench("ttft", lambda: ttft.run(TTFT, quiet, "cpu"), {"rows": (6, FIRST_TOKEN)}, "engine device rates left_out"),
)


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_a_bench_has_its_rows(bench: Bench) -> None:
    result = bench.run()
    told = json.loads(json.dumps(result.to_dict()))
    assert told["bench"] == bench.name and told["faults"] == []
    wanted = {"bench", "machine", "faults", *bench.lists, *bench.about.split()} | ({"options"} & told.keys())
    assert set(told) == wanted
    for name, (count, names) in bench.lists.items():
        assert len(told[name]) == count
        for row in told[name]:
            assert {*ROW, *names.split()} <= row.keys(), f"{name}: {row}"
            assert row["value"] >= 0 and row["samples"] >= 1 and row["met"] in (None, True, False)
            assert (row["target"] is None) == (row["met"] is None)
            if row["ratio_low"] is not None:
                assert (
                    0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"] and row["limit"] > 0 and row["limit_of"]
                )
    shown = io.StringIO()
    result.render(Console(file=shown, width=250))
    assert all(word in shown.getvalue() for word in bench.words.split(" ")), shown.getvalue()
    checks = {"tiers": tiers_are_whole, "codec": eight_bits_hold, "kernels": every_row_is_its_twins}
    {**checks, "ttft": tiers_are_hit}.get(bench.name, lambda result: None)(result)


def tiers_are_whole(result: BenchResult) -> None:
    disk = result.about["disk"]
    assert disk["delivered_bytes"] == NVME.laps * 2 * 48 * SHAPE.payload_bytes, "promote and get, all cold"
    paths = [(row["path"], row.limit_of) for row in result.rows if row["tier"] == "nvme"]
    assert paths == [("promote", "loop"), ("get", "loop"), ("persist", "loop")] and disk["why_not_fio"]
    assert all(row.target is None for row in result.rows), "targets are for large frames"
    orders = {row["page_order"] for row in result.rows if row["tier"] == "dram" and row["threads"] == 2}
    assert orders == {tiers.HEAD_MAJOR, tiers.TOKEN_MAJOR}


def eight_bits_hold(result: BenchResult) -> None:
    for row in result.rows:
        if row.unit == "attention %":
            is_raw = row["codec"] == codec.RAW
            assert row.value == 0 if is_raw else 0.3 < row.value <= 1.2 and row["kl_nats"] < 1e-3
    spreads = {row["variant"]: row["channel_spread"] for row in result.rows if "channel_spread" in row.details}
    assert spreads["bias 100"] > 3 * spreads["outlier 13"] > 3 * 8 > 3 * spreads["plain"]
    bits = {(row["codec"], row["kv"]): row.value for row in codec.size_rows()}
    assert bits[KC64, "head_dim 64"] == 8 + (2 * 16 / 64 + 16 / 64) / 2, "scale and zero of K, scale of V"


def every_row_is_its_twins(result: BenchResult) -> None:
    plans, moves, ways, transfers, steps = [section.rows for section in result.sections]
    assert all(row.value > 0 for row in ways), "both ways moved the same bytes"
    assert all(row["calls"] <= (96 if row["load"] == "by layers" else 24) for row in plans if row["blocks"] == 512)
    for row in [*moves, *transfers]:
        assert row["matches_twin"] and row.met is None
    assert all((row["transfer_gb_per_second"] > 0) == (row["beside"] != "nothing") for row in steps)


def tiers_are_hit(result: BenchResult) -> None:
    kv_bytes = 256 * 2 * 2 * 2 * 16 * 4
    for row in result.rows:
        assert sum(row["tokens"].values()) == 256 + TTFT.suffix_tokens
        assert row["tokens"].get(row["path"], 0) == (256 if row["path"] in ("dram", "hbm") else 0)
        moved = {("dram", "raw"): kv_bytes, ("hbm", "raw"): 2 * kv_bytes}.get((row["path"], row["codec"]))
        assert moved in (None, row["bytes_moved"])


# What is wrong is found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["save", "load", "digest"])
def test_a_kernel_that_writes_nothing_is_a_fault(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    route = kernels.route_named("twins", torch.device("cpu"))._replace(**{kernel: lambda *_: None})
    monkeypatch.setattr(kernels, "route_named", lambda *_: route)
    found = kernels.run(KERNELS, quiet, "cpu", ("kernels",))
    names = {"save": ("gather of raw", "gather_quantize"), "load": ("scatter", "dequantize_scatter")}
    said = zip(found.faults, names.get(kernel, ("digest_slices", "digest_slices")), strict=True)
    assert all(line.startswith(name) and "did not write" in line for line, name in said)


def test_a_kernel_that_cannot_be_launched_is_one_line_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    route = kernels.route_named("twins", torch.device("cpu"))._replace(load=fails)
    monkeypatch.setattr(kernels, "route_named", lambda *_: route)
    found = kernels.run(KERNELS, quiet, "cpu", ("kernels",))
    names = ("scatter of raw", "dequantize_scatter of int8-kc64")
    assert found.faults == [f"{it} failed: OutOfMemoryError: CUDA out of memory." for it in names]
    assert len(found.rows) == 4


def test_a_transfer_that_cannot_page_lock_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device.AtOnceDevice, "register", lambda *_, **__: "not here")
    monkeypatch.setattr(kernels, "WAIT_SECONDS", 1.0)
    monkeypatch.setattr(kernels, "DIRECTIONS", ("load",))
    found = kernels.run(KERNELS, quiet, "cpu", ("transfers",))
    assert len(found.faults) == 4 and all("could not be page-locked" in line for line in found.faults)


@pytest.mark.usefixtures("kernels_can_run")
def test_the_kernels_themselves_run_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DIRECTIONS", ("both",))
    one = KERNELS.shape.payload_bytes
    options = replace(KERNELS, kv_bytes=(one,), transfer_bytes=one, route="triton")
    found = kernels.run(options, quiet, stages=("kernels", "transfers"))
    assert found.faults == [] and found.about["route"] == "triton" and len(found.rows) == 10


def test_k_along_the_wrong_axis_fails_on_the_bias_and_random_weights_would_hide_it() -> None:
    """Pages whose K lies as [width, tokens] and are taken for [tokens, width]: nothing else would notice."""

    def along_tokens(k: Any, v: Any) -> tuple[Any, Any]:
        turned = codec_quality.there_and_back(k.transpose(1, 2).contiguous(), Axis.CHANNEL).transpose(1, 2)
        return turned, codec_quality.CODECS[KC64](k, v)[1]

    model = load_trained()
    texts = corpus.windows(corpus.read_sources(held_out=True), 512 + codec_quality.CONTINUATION, 2)
    rms = codec_quality.key_rms(model, texts[0])
    codecs = {KC64: codec_quality.CODECS[KC64], "wrong": along_tokens}
    _, found = codec_quality.measure(model, codec_quality.BIAS, rms, texts, codecs)
    assert found[KC64]["attention_percent"] <= 1.2 < 10 < found["wrong"]["attention_percent"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = type(model)(type(model.config)(**model.config.to_dict())).eval()
    _, hidden = codec_quality.measure(untrained, codec_quality.PLAIN, 0.0, texts[:1])
    assert found[KC64]["attention_percent"] > 2 * hidden[KC64]["attention_percent"]
    row = codec_quality._variant_row("outlier 13", 512, 1, dict.fromkeys(
        ("scored_bytes", "loss_change", "channel_spread", "bfloat16_percent", "nats_per_byte"), 0.002))  # fmt: skip
    (line,) = codec_quality.failures([row])
    assert "outlier 13" in line and "another function" in line


def test_a_directory_of_which_not_all_is_found_is_no_measurement(tmp_path: Path) -> None:
    plan, made = restart.Plan(blocks=700, prompt_blocks=64), tmp_path / "store"
    restart.build(made, plan, quiet)
    (last,) = sorted((made / "nvme").glob("*.slab"))[-1:]
    with last.open("r+b") as slab:
        slab.write(bytes(4096))  # one of its two headers
        slab.seek(-4096, io.SEEK_END)
        slab.write(bytes(4096))
    store = {"data": str(made), "dram": restart.DRAM_BYTES, "nvme": plan.budget_bytes, "slab": plan.slab_bytes}
    with Sidecar({**store, "scrub": "off"}, has_health=True) as sidecar:
        sidecar.ready()
        with pytest.raises(AssertionError, match="of 700 blocks are back"):
            restart.check_all_is_found(sidecar, plan)


def test_a_match_that_is_not_whole_is_no_measurement() -> None:
    with Sidecar({"dram": "4MiB", "nvme": "off"}) as sidecar:
        sidecar.greeted()
        with (
            pytest.raises(StoreError, match=r"lookup ended with 1: AssertionError: Match\(blocks=0"),
            lookup.clients_of(replace(LOOKUP, clients=1), sidecar.socket, 3) as clients,
        ):
            clients.match()


def test_what_is_still_in_dram_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = nvme.NvmeSide(SHAPE, 48, tmp_path / "store")
    side.promote()
    monkeypatch.setattr(side, "_make_cold", lambda: None)
    monkeypatch.setattr(side, "_turns", iter([0]))
    with pytest.raises(AssertionError, match="not cold"):
        side.promote()
    side.store.close()


def test_a_prefix_that_does_not_come_from_its_tier_is_a_fault_and_what_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ttft.run(replace(TTFT, seconds=0.0), quiet, "cpu")
    assert found.about["left_out"] == ["256 tokens: no time for it in 0 seconds"] and not found.rows
    monkeypatch.setattr(ttft, "_dram_bytes", lambda *_: 1 << 20)  # room for less than half of the prefix
    found = ttft.run(replace(TTFT, contexts=(4096,), codecs=("raw",), laps=1), quiet, "cpu")
    assert any("4096 tokens were to come from dram" in fault for fault in found.faults)
    monkeypatch.undo()
    monkeypatch.setattr(ttft, "available_bytes", lambda: 1 << 20)
    found = ttft.run(replace(TTFT, laps=1), quiet, "cpu")
    assert [row["path"] for row in found.rows] == ["cold"] and "(--context)" in found.about["left_out"][0]


def refused(script: str, *given: str) -> None:
    """Raises what a script of its own says of its input."""
    command = [sys.executable, str(Path(benches.__file__).with_name(script)), *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (BAD_INPUT, ""), ended
    raise BadInput(ended.stderr.strip())


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda folder: tiers.run(TIERS, quiet, "tape"), "dram, door, nvme"),
        (lambda folder: nvme.run(replace(NVME, data=f"{folder}/no"), quiet), "is not a directory"),
        (lambda folder: restart.run(restart.RestartOptions(data=f"{folder}/file/x"), quiet), "another directory"),
        (lambda folder: codec.SpeedOptions(laps=0), "laps=0"),
        (lambda folder: kernels.run(replace(KERNELS, route="hip"), quiet, "cpu"), "allowed: triton, twins"),
        (lambda folder: ttft.run(replace(TTFT, shape="9b"), quiet, "cpu"), "allowed: tiny, 1b, 8b"),
        (lambda folder: on_device.device_named("rocm"), "allowed: cuda, cpu"),
        (lambda folder: refused("silent_sidecar.py", "llama"), "silent_sidecar.py: engine='llama'; allowed: hf, vllm"),
        (lambda folder: refused("soak.py", f"{folder}/no"), "soak.py: trace=.*no. .* allowed: JSON"),
        (lambda folder: refused("soak.py", f"{folder}/file"), "soak.py: file has no request in it"),
    ],
)
def test_what_cannot_be_is_one_line(work: Callable[[str], object], words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=words) as caught:
        work(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_too_little_memory_or_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tiers, nvme):
        monkeypatch.setattr(module, "available_bytes", lambda: 1 << 10)
    for only in tiers.TIERS:
        with pytest.raises(BadInput, match=r"of memory and may take .* free some"):
            tiers.run(TIERS, quiet, only)
    monkeypatch.undo()
    monkeypatch.setattr(restart, "disk_room", lambda _: 1 << 20)
    with pytest.raises(BadInput, match=r"--blocks.*--data.*of disk"):
        restart.run(replace(RESTART, data=str(tmp_path)), quiet)
