"""Rows of `kvstore bench kernels`: pages to payloads and back, beside a plain copy on the device.

The limit is a copy between two buffers of the device in the same run, right before and after each turn. Both count
bytes read and written: a kernel that quantizes reads 16 bits and writes 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kvstore.bench.engines.on_device import DeviceClock
from kvstore.bench.engines.paged_pool import (
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

TARGETS = {"gather_quantize": 0.70, "dequantize_scatter": 0.70}
"""Share of the copy's byte rate, on a GPU, from `TARGETED_BYTES` of KV on."""
TARGETED_BYTES = 256 << 20
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel on one size of KV: decimal GB/s of bytes read and written, beside the copy's in the same run.

    kv_bytes: of the pages involved. bytes_moved: read and written per call. ratio: of the two rates, median over laps,
    with quartiles. is_host_bound: the host launched more slowly than the device ran, so the figure is not the kernel's.
    matches_twin: whether the first block equals the twin's, bit for bit.
    """

    kernel: str
    codec: str
    kv_bytes: int
    bytes_moved: int
    seconds: float
    gb_per_second: float
    copy_gb_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    target: float | None
    is_host_bound: bool
    matches_twin: bool

    @property
    def met(self) -> bool | None:
        """None without a target."""
        return None if self.target is None else self.ratio >= self.target

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}


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
    clock: DeviceClock,
    faults: list[str],
) -> Iterator[KernelRow]:
    """Rows of one size. kv_bytes: whole blocks of `shape`. faults: gets a line for each kernel that cannot be launched,
    which has no row, and for each that differs from its twin."""
    blocks = kv_bytes // shape.payload_bytes
    pool = PagedPool(shape, blocks, page_tokens, device, seed=1)
    target = PagedPool(shape, blocks, page_tokens, device, seed=2)
    source, copied = (torch.randint(0, 256, (kv_bytes,), dtype=torch.uint8, device=device) for _ in range(2))
    limit = clock.timed(lambda: copied.copy_(source))
    is_targeted = device.type == "cuda" and kv_bytes >= TARGETED_BYTES
    for codec in CODECS:
        contenders = []
        matches = []
        for contender in _contenders(shape, codec, pool, target, device, route):
            name = f"{contender.kernel} of {codec}"
            try:
                contender.launch()  # compiles
                clock.wait()
                is_right = contender.check()
            except FAILURES as error:
                faults.append(f"{name} failed: {told(error)}")
                continue
            contenders.append(contender)
            matches.append(is_right)
            if not is_right:
                faults.append(f"{name} did not write what its twin in plain torch writes")
        turns = {contender.kernel: clock.timed(contender.launch) for contender in contenders}
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
) -> KernelRow:
    share = contender.bytes_moved / (2 * kv_bytes)  # relative to the copy's bytes
    return KernelRow(
        contender.kernel,
        contender.codec,
        kv_bytes,
        contender.bytes_moved,
        found.seconds,
        contender.bytes_moved / found.seconds / 1e9,
        2 * kv_bytes / found.limit_seconds / 1e9,
        found.ratio * share,
        found.low * share,
        found.high * share,
        target,
        is_late,
        matches,
    )
