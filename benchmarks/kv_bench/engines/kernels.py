"""`benches.py kernels`: what moves KV on and off a device, beside copies of the same run.

    kernels    pages to payloads and back, and digests, beside a copy on the device      (`kernel_rows`)
    transfers  loads and saves of whole frames, beside a copy of pinned memory           (`transfer_rows`)
    decode     the steps of running streams, without and with transfers beside them      (`decode_rows`)

Written for one GPU. On a CPU the same code runs on small shapes, with plain torch in place of the kernels and a
synchronous device: that shows that it runs, and its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kv_bench.engines import decode_rows, kernel_rows, transfer_rows
from kv_bench.engines.on_device import describe, device_named, give_memory_back, timer_of
from kv_bench.engines.paged_pool import FAILURES, route_named, told
from kv_bench.engines.random_llama import ONE_B, SHAPES, TINY
from kv_kernels.device_transfers import SEGMENT_BYTES
from kv_kernels.int8 import KC64
from kvstore.bench.measure import Progress, teller
from kvstore.bench.rig import BlockShape
from kvstore.bench.row import BenchResult, Row, Section
from kvstore.block.errors import BadInput
from kvstore.config import format_size, parse_size

KERNELS, TRANSFERS, DECODE = STAGES = ("kernels", "transfers", "decode")


@dataclass(frozen=True, slots=True)
class KernelsOptions:
    """shape: of a block. kv_bytes: sizes of KV for the kernels. transfer_bytes: KV per load or save. segment_bytes: of
    a staging segment. laps: turns of each. route: triton or twins; None to choose by device. model: decodes `streams`
    streams behind `context_tokens`, in `decode_laps` laps of `steps` steps."""

    shape: BlockShape = field(default_factory=lambda: BlockShape(32, 64))
    page_tokens: int = 16
    kv_bytes: tuple[int, ...] = (256 << 20, 1 << 30)
    transfer_bytes: int = 1 << 30
    segment_bytes: int = SEGMENT_BYTES
    laps: int = 9
    route: str | None = None
    model: str = ONE_B
    streams: int = 8
    context_tokens: int = 2048
    decode_laps: int = 8
    steps: int = 50


SMALL = KernelsOptions(
    shape=BlockShape(2, 64, 2, 16),
    kv_bytes=(64 << 10,),
    transfer_bytes=64 << 10,
    segment_bytes=16 << 10,
    laps=2,
    model=TINY,
    context_tokens=64,
    decode_laps=2,
    steps=4,
)
"""Takes seconds on a CPU."""


@dataclass
class KernelsResult:
    """All rows and their conditions. faults: what failed, one line each."""

    options: KernelsOptions
    device: torch.device
    route: str
    kernels: list[Row] = field(default_factory=list)
    transfers: list[Row] = field(default_factory=list)
    decode: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def found(self) -> BenchResult:
        """A table for each stage, and what its words mean."""
        facts, options = describe(self.device), self.options
        sections = [
            Section(
                self.kernels,
                f"on {facts['name']}, kernels: {self.route}",
                "GB/s of bytes read and written; ratio: to a copy on the device. is host bound: the host was late.",
                KERNELS,
                ("bytes moved", "gb per second", "copy gb per second"),
            ),
            Section(
                self.transfers,
                "loads and saves",
                "layers at once: of a frame; wire: what crosses between host and device, both directions together; kv: "
                "the same counted as numbers of 16 bits; ratio: to one plain copy of pinned memory, by wall time. is "
                "direct: the extents were page-locked, without a detour.",
                TRANSFERS,
                ("gb per second", "limit gb per second"),
            ),
            Section(
                self.decode,
                f"steps of {options.streams} streams of a random {options.model} Llama, by wall time",
                name=DECODE,
                left_out=("streams", "context tokens", "steps", "step ms p50", "slowdown p50", "most slowdown"),
            ),
        ]
        return BenchResult("kernels", options, sections, {"device": facts, "route": self.route}, self.faults)


def run(
    options: KernelsOptions | None = None,
    progress: Progress = None,
    device: str | None = None,
    stages: Sequence[str] = (),
) -> KernelsResult:
    """Measure the given stages, or all. Raises `BadInput` for a missing device, or a size without a whole block."""
    chosen = device_named(device)
    options = options or (KernelsOptions() if chosen.type == "cuda" else SMALL)
    wanted = _checked(options, stages)
    result = KernelsResult(options, chosen, route_named(options.route, chosen).name)
    say = teller(progress)
    for stage in wanted:
        with _noting(result.faults, stage):
            give_memory_back(chosen)
            {KERNELS: _kernels, TRANSFERS: _transfers, DECODE: _decode}[stage](result, say)
    return result


def _kernels(result: KernelsResult, say: Any) -> None:
    options, device = result.options, result.device
    route, timer = route_named(options.route, device), timer_of(device)
    for size in options.kv_bytes:
        say(f"kernels on {format_size(size)} of KV")
        kv_bytes = size // options.shape.payload_bytes * options.shape.payload_bytes
        result.kernels.extend(
            kernel_rows.measure(
                options.shape, options.page_tokens, kv_bytes, options.laps, device, route, timer, result.faults
            )
        )


def _transfers(result: KernelsResult, say: Any) -> None:
    options, device = result.options, result.device
    say(f"transfers of {format_size(options.transfer_bytes)} of KV")
    route, timer = route_named(options.route, device), timer_of(device)
    for row in transfer_rows.measure(
        options.shape,
        options.page_tokens,
        options.transfer_bytes,
        options.segment_bytes,
        options.laps,
        device,
        route,
        timer,
    ):
        result.transfers.append(row)
        if not row["matches_twin"]:
            result.faults.append(
                f"{row['direction']} of {row['codec']} did not move what its twin in plain torch moves"
            )
        if not row["is_direct"]:
            result.faults.append(
                f"{row['direction']} of {row['codec']} took a detour: its extents could not be page-locked"
            )


def _decode(result: KernelsResult, say: Any) -> None:
    options, device = result.options, result.device
    say(f"{options.streams} streams of a random {options.model} Llama")
    streams = decode_rows.Streams(options.model, options.streams, options.context_tokens, options.steps, device)
    route = route_named(options.route, device)
    with transfer_rows.Transfers(
        options.shape,
        options.page_tokens,
        KC64,
        options.transfer_bytes,
        options.shape.layers,
        options.segment_bytes,
        device,
        route,
    ) as transfers:
        result.decode.extend(
            decode_rows.measure(
                streams,
                transfers,
                options.streams,
                options.context_tokens,
                options.decode_laps,
                options.steps,
                is_targeted=device.type == "cuda",
            )
        )


def _checked(options: KernelsOptions, stages: Sequence[str]) -> tuple[str, ...]:
    for stage in stages:
        if stage not in STAGES:
            raise BadInput(f"stage={stage!r}; allowed: {', '.join(STAGES)}, or leave it out for all")
    if options.model not in SHAPES:
        raise BadInput(f"model={options.model!r}; allowed: {', '.join(SHAPES)}")
    block = options.shape.payload_bytes
    for size in (*options.kv_bytes, options.transfer_bytes):
        if size < block:
            raise BadInput(
                f"{format_size(size)} of KV hold no block of {format_size(block)}; give more, or fewer layers"
            )
    if options.page_tokens < 1 or options.shape.block_tokens % options.page_tokens:
        raise BadInput(
            f"pages of {options.page_tokens} tokens do not divide a block of {options.shape.block_tokens}; give a "
            "divisor of it"
        )
    return tuple(stage for stage in STAGES if stage in stages) or STAGES


def options_for(
    device: str | None,
    shape: Mapping[str, int | None],
    *,
    page_tokens: int | None = None,
    sizes: Sequence[str] = (),
    laps: int | None = None,
) -> KernelsOptions:
    """The device's default options, with what was given in their place. shape: fields of a block's shape by name.
    sizes: of KV as people write them; the largest is also the transfers'. Raises `BadInput`."""
    usual = KernelsOptions() if device_named(device).type == "cuda" else SMALL
    given: dict[str, Any] = {"page_tokens": page_tokens, "laps": laps}
    given["shape"] = replace(usual.shape, **{name: number for name, number in shape.items() if number is not None})
    if sizes:
        given["kv_bytes"] = tuple(parse_size(size, "size") for size in sizes)
        given["transfer_bytes"] = max(given["kv_bytes"])
    return replace(usual, **{name: value for name, value in given.items() if value is not None})


@contextmanager
def _noting(faults: list[str], stage: str) -> Iterator[None]:
    """Turn a failing stage into one line, so that the next is measured."""
    try:
        yield
    except BadInput:
        raise
    except FAILURES as error:
        faults.append(f"the stage {stage} ended early: {told(error)}")
