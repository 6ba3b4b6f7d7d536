"""Rows of `benches.py kernels`: what running streams notice of loads and saves beside them.

A Llama with random weights decodes eight streams token by token through transformers and the adapter's buffers, as
`PrefixCache` does. Before each step the engine's thread starts new transfers to keep two in flight per direction; that
time counts as part of the step. Laps without and with transfers take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter

import torch

from engine_adapter.hf.buffers import BufferSet
from engine_adapter.hf.layers import ModelCall, even_cache
from engine_adapter.hf.model import layout_of
from kv_bench.engines.random_llama import build
from kv_bench.engines.transfer_rows import BOTH, LOAD, SAVE, Transfers, finish
from kv_kernels.transfer_state import Transfer
from kvstore.bench.measure import quantile
from kvstore.bench.row import MS, Row, Target

ALONE = "nothing"
BESIDE = (ALONE, LOAD, SAVE, BOTH)
UNDER_WAY = 2
MOST_SLOWDOWN = 1.05
"""Of the median step beside loads, on a GPU."""


class Streams:
    """Eight prompts of equal length with their KV, decoded from the same place each lap."""

    def __init__(self, model_shape: str, streams: int, context: int, steps: int, device: torch.device) -> None:
        model = build(model_shape, device, context + steps)
        layout = layout_of(model)
        capacity = -(-(context + steps) // layout.block_tokens) * layout.block_tokens
        self._planes = BufferSet(layout, streams, capacity, device).of_rows(0, streams)
        for planes in self._planes:
            for plane in planes:
                plane.normal_()
        self._call = ModelCall(model)
        self._device, self._streams, self._context = device, streams, context

    def lap(self, steps: int, beside: BesideTransfers) -> list[float]:
        """Seconds of each step."""
        cache = even_cache(self._planes, self._context)
        newest = torch.zeros(self._streams, 1, dtype=torch.int64, device=self._device)
        times = []
        for _ in range(steps):
            start = perf_counter()
            beside.keep_going()
            newest = self._call(newest, cache).argmax(-1, keepdim=True)
            newest.tolist()  # as an engine hands tokens out
            times.append(perf_counter() - start)
        return times


class BesideTransfers:
    """Keeps transfers in flight, in one direction or both; none if `direction` is `nothing`."""

    def __init__(self, transfers: Transfers, direction: str) -> None:
        self._transfers = transfers
        self._directions = {ALONE: (), BOTH: (LOAD, SAVE)}.get(direction, (direction,))
        self._under_way: dict[str, list[Transfer]] = {direction: [] for direction in self._directions}
        self.finished = 0

    def keep_going(self) -> None:
        """Start a transfer for each that ended."""
        for direction, under_way in self._under_way.items():
            ended = [transfer for transfer in under_way if transfer.is_done()]
            for transfer in ended:
                finish(transfer)
                under_way.remove(transfer)
                self.finished += 1
            while len(under_way) < UNDER_WAY:
                under_way.extend(self._transfers.start(direction))

    def drain(self) -> None:
        """Wait for all in flight."""
        for under_way in self._under_way.values():
            while under_way:
                finish(under_way.pop(0))
                self.finished += 1


def measure(
    streams: Streams, transfers: Transfers, count: int, context: int, laps: int, steps: int, *, is_targeted: bool
) -> Iterator[Row]:
    """One row for each kind of traffic, from `laps` times `steps` steps of each. count: of streams."""
    transfers.run(SAVE)  # so that what is loaded are frames
    streams.lap(steps, BesideTransfers(transfers, ALONE))
    times: dict[str, list[float]] = {name: [] for name in BESIDE}
    moved = dict.fromkeys(BESIDE, 0)
    spent = dict.fromkeys(BESIDE, 0.0)
    for _ in range(laps):
        for name in BESIDE:
            beside = BesideTransfers(transfers, name)
            start = perf_counter()
            times[name].extend(streams.lap(steps, beside))
            beside.drain()
            spent[name] += perf_counter() - start
            moved[name] += beside.finished * transfers.wire_bytes
    for name in BESIDE:
        rate = moved[name] / spent[name] / 1e9
        yield row_of(name, times[name], times[ALONE], count, context, rate, is_targeted=is_targeted)


def row_of(
    beside: str,
    times: Sequence[float],
    alone: Sequence[float],
    streams: int,
    context: int,
    rate: float,
    *,
    is_targeted: bool,
) -> Row:
    """Steps of all streams beside transfers, which moved so many GB/s meanwhile; held against those beside nothing."""
    p50, p99 = 1e3 * median(times), 1e3 * quantile(times, 0.99)
    slower = p50 / (1e3 * median(alone))
    most = MOST_SLOWDOWN if is_targeted and beside == LOAD else None
    return Row(
        {"beside": beside, "streams": streams, "context_tokens": context},
        p50,
        MS,
        len(times),
        limit_of=ALONE,
        limit=1e3 * median(alone),
        ratio=slower,
        target=None if most is None else Target(most, is_least=False),
        details={
            "steps": len(times),
            "step_ms_p50": p50,
            "step_ms_p99": p99,
            "slowdown_p50": slower,
            "slowdown_p99": quantile(times, 0.99) / quantile(alone, 0.99),
            "transfer_gb_per_second": rate,
            "most_slowdown": most,
        },
    )
