"""Rows of `benches.py kernels`: pages to payloads and back beside a plain copy on the device.

The limit is a copy between two buffers of the device in the same run, right before and after each turn. Both count
bytes read and written: a kernel that quantizes reads 16 bits and writes 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kv_bench.engines.on_device import DeviceTimer
from kv_bench.engines.paged_pool import (
    CODECS,
    FAILURES,
    HEADER,
    RAW,
    PagedPool,
    Route,
    are_digests,
    is_loaded,
    is_saved,
    new_payloads,
    payload_bytes,
    told,
)
from kvstore.bench.measure import Against, against
from kvstore.bench.rig import BlockShape
from kvstore.bench.row import Row, Target, rate_row

TARGETS = {"gather_quantize": 0.70, "dequantize_scatter": 0.70}
"""Share of the copy's byte rate, on a GPU, from `TARGETED_BYTES` of KV on."""
TARGETED_BYTES = 256 << 20
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Contender:
    """launch: one call. bytes_moved: per call. check: whether it wrote what the twin writes."""

    kernel: str
    codec: str
    launch: Callable[[], None]
    bytes_moved: int
    check: Callable[[], bool]


def measure(
    shape: BlockShape,
    page_tokens: int,
    kv_bytes: int,
    laps: int,
    device: torch.device,
    route: Route,
    timer: DeviceTimer,
    faults: list[str],
) -> Iterator[Row]:
    """The rows of one size, one by one. kv_bytes: whole blocks of `shape`. faults: gets a line for each kernel that
    cannot be launched, which has no row, and for each that does not write what its twin writes."""
    blocks = kv_bytes // shape.payload_bytes
    pool = PagedPool(shape, blocks, page_tokens, device, seed=1)
    target = PagedPool(shape, blocks, page_tokens, device, seed=2)
    source, copied = (torch.randint(0, 256, (kv_bytes,), dtype=torch.uint8, device=device) for _ in range(2))
    limit = timer.timed(lambda: copied.copy_(source))
    is_targeted = device.type == "cuda" and kv_bytes >= TARGETED_BYTES
    for codec in CODECS:
        contenders = []
        matches = []
        for contender in _contenders(shape, codec, pool, target, device, route):
            name = f"{contender.kernel} of {codec}"
            try:
                contender.launch()  # compiles
                timer.wait()
                is_right = contender.check()
            except FAILURES as error:
                faults.append(f"{name} failed: {told(error)}")
                continue
            contenders.append(contender)
            matches.append(is_right)
            if not is_right:
                faults.append(f"{name} did not write what its twin in plain torch writes")
        turns = {contender.kernel: timer.timed(contender.launch) for contender in contenders}
        found = against(limit, turns, laps)
        for contender, is_right in zip(contenders, matches, strict=True):
            kernel = contender.kernel
            is_late = sum(turns[kernel].is_late[-laps:]) * 2 > laps
            wanted = TARGETS.get(kernel) if is_targeted else None
            yield _row(contender, kv_bytes, found[kernel], wanted, is_late, is_right)


def _contenders(
    shape: BlockShape, codec: str, pool: PagedPool, target: PagedPool, device: torch.device, route: Route
) -> Iterator[_Contender]:
    """Saving kernels first: the loading ones read their output."""
    table, blocks = pool.table, len(pool.table)
    payloads = new_payloads(shape, codec, blocks, device)
    raw, small = blocks * shape.payload_bytes, blocks * payload_bytes(shape, codec)
    status = torch.zeros(blocks, dtype=torch.int32, device=device)
    names = ("gather", "scatter") if codec == RAW else ("gather_quantize", "dequantize_scatter")
    save = route.saver(pool.pools, codec, table, payloads, HEADER, status)
    saved = partial(is_saved, pool, codec, table, payloads[:1], HEADER)
    yield _Contender(names[0], codec, save, raw + small, saved)
    load = route.loader(target.pools, codec, table, payloads, HEADER)
    loaded = partial(is_loaded, target, codec, table, payloads[:1], HEADER)
    yield _Contender(names[1], codec, load, raw + small, loaded)
    keys, slice_bytes = route.digest_keys(device), payload_bytes(shape, codec) // shape.layers
    into = torch.zeros(blocks, shape.layers, 2, dtype=torch.int64, device=device)
    yield _Contender(
        "digest_slices",
        codec,
        lambda: route.digest(payloads, HEADER, slice_bytes, into, keys),
        small + blocks * shape.layers * DIGEST_BYTES,
        lambda: are_digests(payloads[:1], HEADER, slice_bytes, into[:1]),
    )


def _row(
    contender: _Contender, kv_bytes: int, found: Against, target: float | None, is_late: bool, matches: bool
) -> Row:
    """GB/s of bytes read and written, beside those of the copy. is_host_bound: the host put calls in more slowly than
    the device did them, so the figure is none of the kernel's. matches_twin: whether the first block is the twin's, bit
    for bit."""
    moved, copied = contender.bytes_moved, 2 * kv_bytes
    return rate_row(
        {"kernel": contender.kernel, "codec": contender.codec, "kv_bytes": kv_bytes},
        found,
        moved,
        "copy",
        None if target is None else Target(target),
        limit_bytes=copied,
        bytes_moved=moved,
        seconds=found.seconds,
        gb_per_second=moved / found.seconds / 1e9,
        copy_gb_per_second=copied / found.limit_seconds / 1e9,
        is_host_bound=is_late,
        matches_twin=matches,
    )
