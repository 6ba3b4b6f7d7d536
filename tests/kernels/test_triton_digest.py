"""Digests taken on a device are those that frames carry: XXH3-128 of each layer slice, whatever its length."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_kernels import triton_digest
from kv_kernels.triton_digest import digest_keys, digest_slices
from paged_memory import DEVICE
from tiering.frame import digest


def payload_of(blocks: int, row_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (blocks, row_bytes), dtype=torch.uint8, generator=generator)


def found_in(payload: torch.Tensor, at: int, slice_bytes: int, slices: int) -> list[list[bytes]]:
    there = payload.to(DEVICE)
    into = torch.zeros(len(payload), slices + 1, 2, dtype=torch.int64, device=DEVICE)[:, :slices]  # rows with a gap
    digest_slices(there[:, at:], slice_bytes, into, digest_keys(there.device))
    assert torch.equal(there.cpu(), payload)
    return [[struct.pack(">qq", high, low) for low, high in row] for row in into.tolist()]


def wanted_of(payload: torch.Tensor, at: int, slice_bytes: int, slices: int) -> list[list[bytes]]:
    starts = [at + number * slice_bytes for number in range(slices)]
    return [[digest(row[start : start + slice_bytes].numpy()) for start in starts] for row in payload]


# Around the ends of stripes (64 bytes) and of blocks (1,024), where XXH3 does things differently.
EDGES = [248, 256, 264, 320, 1016, 1024, 1032, 1080, 1088, 1096, 2040, 2048, 2056, 3072, 5000, 10240]


@pytest.mark.slow
@pytest.mark.parametrize("slice_bytes", EDGES)
def test_lengths_at_the_edges(slice_bytes: int) -> None:
    payload = payload_of(2, 4096 + 2 * slice_bytes + 24, slice_bytes)
    assert found_in(payload, 4096, slice_bytes, 2) == wanted_of(payload, 4096, slice_bytes, 2)


@pytest.mark.slow
@given(words=st.integers(31, 500), blocks=st.integers(1, 3), slices=st.integers(1, 3), at=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_any_length(words: int, blocks: int, slices: int, at: int) -> None:
    payload = payload_of(blocks, 8 * (at + slices * words) + 8, words)
    assert found_in(payload, 8 * at, 8 * words, slices) == wanted_of(payload, 8 * at, 8 * words, slices)


@pytest.mark.parametrize("filler", [0x00, 0xFF])
def test_numbers_at_the_ends_of_their_range(filler: int) -> None:
    payload = torch.full((1, 4096), filler, dtype=torch.uint8)
    assert found_in(payload, 0, 2048, 2) == wanted_of(payload, 0, 2048, 2)


@pytest.mark.parametrize("slice_bytes", [248, 1096, 2048])
def test_every_bit_counts(slice_bytes: int) -> None:
    payload = payload_of(1, slice_bytes, 1)
    ((before,),) = found_in(payload, 0, slice_bytes, 1)
    seen = {before}
    for bit in range(0, 8 * slice_bytes, 977):
        payload[0, bit // 8] ^= 1 << bit % 8
        ((after,),) = found_in(payload, 0, slice_bytes, 1)
        assert after not in seen
        seen.add(after)
        payload[0, bit // 8] ^= 1 << bit % 8


def test_nothing_to_digest() -> None:
    assert found_in(payload_of(2, 512, 1), 0, 256, 0) == [[], []]


def test_a_launch_is_on_the_payloads_device_and_may_have_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device. A grid has 65,535 programs at most along any axis but the first."""
    launches: list[tuple[torch.device | None, tuple[int, ...]]] = []
    entered: list[torch.device] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: launches.append((entered[-1] if entered else None, grid))

    monkeypatch.setattr(triton_digest, "on_device", on_device, raising=False)
    monkeypatch.setattr(triton_digest, "_digest_slice", Noted())
    payload = torch.zeros(70_000, 256, dtype=torch.uint8, device=DEVICE)
    into = torch.zeros(70_000, 1, 2, dtype=torch.int64, device=DEVICE)
    digest_slices(payload, 256, into, digest_keys(payload.device))
    assert launches == [(payload.device, (70_000, 1))]
