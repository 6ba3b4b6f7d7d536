"""`kvstore bench kernels`: what moves KV between device and host, beside copies of the same run.

    kernels    pages to payloads and back, and digests, beside a copy on the device      (`kernel_rows`)
    transfers  loads and saves of whole frames, beside a copy of pinned memory           (`transfer_rows`)
    decode     the steps of running streams, without and with transfers beside them      (`decode_rows`)

Written for one GPU. On a CPU the same code runs on small shapes, with plain torch in place of the kernels and a
synchronous device: that shows that it runs, and its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table

from kv_kernels.device_transfers import SEGMENT_BYTES
from kv_kernels.int8 import KC64
from kvstore.bench.engines import decode_rows, kernel_rows, transfer_rows
from kvstore.bench.engines.decode_rows import DecodeRow
from kvstore.bench.engines.kernel_rows import KernelRow
from kvstore.bench.engines.on_device import clock_of, describe, device_named, give_memory_back
from kvstore.bench.engines.paged_pool import FAILURES, route_named, told
from kvstore.bench.engines.random_llama import ONE_B, SHAPES, TINY
from kvstore.bench.engines.transfer_rows import TransferRow
from kvstore.bench.measure import Progress, machine
from kvstore.bench.rig import BlockShape
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
    kernels: list[KernelRow] = field(default_factory=list)
    transfers: list[TransferRow] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {
            "bench": "kernels",
            "machine": machine(),
            "device": describe(self.device),
            "route": self.route,
            "options": asdict(self.options),
            "kernels": [row.to_dict() for row in self.kernels],
            "transfers": [row.to_dict() for row in self.transfers],
            "decode": [row.to_dict() for row in self.decode],
            "faults": self.faults,
        }

    def render(self, console: Any) -> None:
        facts = describe(self.device)
        console.print(f"on {facts['name']}, kernels: {self.route}")
        if self.kernels:
            console.print(_table(self.kernels, _KERNEL_COLUMNS))
            console.print(
                f"GB/s of bytes read and written; ratio: to a copy on the device, median over {self.options.laps} laps."
            )
        if self.transfers:
            console.print(_table(self.transfers, _TRANSFER_COLUMNS))
            console.print(
                "layers: of a frame at once; wire: GB/s that cross between host and device, both directions together; "
                "KV: the same counted as numbers of 16 bits; ratio: to one plain copy of pinned memory, by wall time."
            )
        if self.decode:
            console.print(_table(self.decode, _DECODE_COLUMNS))
            console.print(
                f"steps of {self.options.streams} streams of a random {self.options.model} Llama, by wall time; "
                "slower: than with nothing beside them."
            )


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
    say = partial(_tell, progress)
    for stage in wanted:
        with _noting(result.faults, stage):
            give_memory_back(chosen)
            {KERNELS: _kernels, TRANSFERS: _transfers, DECODE: _decode}[stage](result, say)
    return result


def _kernels(result: KernelsResult, say: Any) -> None:
    options, device = result.options, result.device
    route, clock = route_named(options.route, device), clock_of(device)
    for size in options.kv_bytes:
        say(f"kernels on {format_size(size)} of KV")
        kv_bytes = size // options.shape.payload_bytes * options.shape.payload_bytes
        result.kernels.extend(
            kernel_rows.measure(
                options.shape, options.page_tokens, kv_bytes, options.laps, device, route, clock, result.faults
            )
        )


def _transfers(result: KernelsResult, say: Any) -> None:
    options, device = result.options, result.device
    say(f"transfers of {format_size(options.transfer_bytes)} of KV")
    route, clock = route_named(options.route, device), clock_of(device)
    for row in transfer_rows.measure(
        options.shape,
        options.page_tokens,
        options.transfer_bytes,
        options.segment_bytes,
        options.laps,
        device,
        route,
        clock,
    ):
        result.transfers.append(row)
        if not row.matches_twin:
            result.faults.append(f"{row.direction} of {row.codec} did not move what its twin in plain torch moves")
        if not row.is_direct:
            result.faults.append(f"{row.direction} of {row.codec} took a detour: its extents could not be page-locked")


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


def _tell(progress: Progress, what: str) -> None:
    if progress is not None:
        progress(what)


def _table(rows: Sequence[Any], columns: dict[str, Any]) -> Table:
    table = Table()
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _target(row: Any, target: float | None) -> str:
    return "" if target is None else f"{target:.2f} {'met' if row.met else 'missed'}"


def _rate(gb_per_second: float) -> str:
    return f"{gb_per_second:,.1f}" if gb_per_second >= 0.1 else f"{gb_per_second:.2g}"


_KERNEL_COLUMNS: dict[str, Any] = {
    "kernel": lambda row: row.kernel,
    "codec": lambda row: row.codec,
    "KV": lambda row: format_size(row.kv_bytes),
    "ms": lambda row: f"{1e3 * row.seconds:.3f}",
    "GB/s": lambda row: _rate(row.gb_per_second),
    "copy": lambda row: _rate(row.copy_gb_per_second),
    "ratio": lambda row: f"{row.ratio:.2f}" + (" (host)" if row.is_host_bound else ""),
    "quartiles": lambda row: f"{row.ratio_low:.2f} .. {row.ratio_high:.2f}",
    "twin": lambda row: "same" if row.matches_twin else "DIFFERS",
    "target": lambda row: _target(row, row.target),
}
_TRANSFER_COLUMNS: dict[str, Any] = {
    "path": lambda row: row.direction,
    "codec": lambda row: row.codec,
    "layers": lambda row: str(row.layers_at_once),
    "KV": lambda row: format_size(row.kv_bytes),
    "ms": lambda row: f"{1e3 * row.seconds:.2f}",
    "wire GB/s": lambda row: _rate(row.gb_per_second),
    "KV GB/s": lambda row: _rate(row.kv_gb_per_second),
    "copy": lambda row: _rate(row.limit_gb_per_second),
    "ratio": lambda row: f"{row.ratio:.2f}" + ("" if row.is_direct else " (detour)"),
    "quartiles": lambda row: f"{row.ratio_low:.2f} .. {row.ratio_high:.2f}",
    "target": lambda row: _target(row, row.target),
}
_DECODE_COLUMNS: dict[str, Any] = {
    "beside": lambda row: row.beside,
    "steps": lambda row: str(row.steps),
    "p50 ms": lambda row: f"{row.step_ms_p50:.2f}",
    "p99 ms": lambda row: f"{row.step_ms_p99:.2f}",
    "p50 slower": lambda row: f"{row.slowdown_p50:.2f}",
    "p99 slower": lambda row: f"{row.slowdown_p99:.2f}",
    "wire GB/s": lambda row: f"{row.transfer_gb_per_second:.1f}",
    "target": lambda row: _target(row, row.most_slowdown),
}
