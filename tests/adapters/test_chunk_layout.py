"""What a chunk is in the store's words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore
from engine_adapter.chunks import SLICE_BYTES, ChunkRun, chunk_key, chunk_layout, chunk_planes
from kvstore.block.codec import RawCodec
from kvstore.block.errors import BadInput
from kvstore.block.pages import Pages
from tiering.frame import MAX_SLICES, digest
from tiering.tier import FrameSpan

CHUNK_BYTES = 3 * (128 << 10)


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 784, 4096])
@pytest.mark.parametrize("size", [1, 4001, 4096, 12288, 1 << 20, 3 * (128 << 10), 40 << 20])
def test_layouts_hold_all_bytes_in_slices(tokens: int, size: int) -> None:
    layout = chunk_layout("g", tokens, [size])
    (part,) = layout.parts
    assert part.raw_bytes == size and layout.block_tokens == tokens
    assert len(part.layers) <= 32 and (len(part.layers) == 1 or part.slice_bytes >= SLICE_BYTES)


@pytest.mark.parametrize(("tokens", "size"), [(32768, 32768), (16385, 4096), (64, 0)])
def test_sizes_that_no_block_can_have_are_refused_in_one_line(tokens: int, size: int) -> None:
    with pytest.raises(BadInput, match="at most") as raised:
        chunk_layout("g", tokens, [size])
    assert "\n" not in str(raised.value)


def test_runs_of_several_sizes_are_several_groups_within_what_a_frame_can_name() -> None:
    layout = chunk_layout("g", 64, [128 << 10, 4096] + [16384] * 600)
    assert sum(part.raw_bytes for part in layout.parts) == (128 << 10) + 4096 + 600 * 16384
    assert len({group.name for group in layout.groups}) == len(layout.groups) == 5
    assert max(len(part.layers) for part in layout.parts) <= MAX_SLICES


@pytest.mark.parametrize("tokens", [64, 784])
@pytest.mark.parametrize("sizes", [[CHUNK_BYTES], [65536, 65536], [4096] * 8, [128 << 10, 192, 4096], [2352, 5, 1568]])
def test_planes_are_views_of_the_whole_chunk(sizes: list[int], tokens: int) -> None:
    slots, rng = 8, np.random.default_rng(3)
    memory = [rng.integers(0, 256, (slots, size + 64), dtype=np.uint8) for size in sizes]
    before = [one.copy() for one in memory]
    runs = [ChunkRun(one.ctypes.data, size + 64, size) for one, size in zip(memory, sizes, strict=True)]
    layout, planes = chunk_layout("g", tokens, sizes), chunk_planes(tokens, runs, slots)
    assert b"".join(plane[5].numpy().tobytes() for (plane,) in planes.values()) == b"".join(
        one[5, :size].tobytes() for one, size in zip(memory, sizes, strict=True)
    )
    pages = Pages(planes, [5, 2], tokens)
    for part in layout.parts:  # through the codec, from slots 5 and 2 to slot 7 and back again
        coder, rows = RawCodec().bind(pages, layout, part), tokens // part.group.row_tokens
        payloads = [bytearray(part.raw_bytes) for _ in range(2)]
        spans = [FrameSpan(np.frombuffer(one, np.uint8).ctypes.data, memoryview(one), one) for one in payloads]
        digests: list[list[bytes]] = [one for one in coder.encode([0, rows], spans, digest) if isinstance(one, list)]
        into = RawCodec().bind(Pages(planes, [7, 0], tokens), layout, part)
        assert into.decode(spans, [0, rows], 0, digests, digest) == 2
    for one, old, size in zip(memory, before, sizes, strict=True):
        assert np.array_equal(one[[7, 0], :size], old[[5, 2], :size])
        assert np.array_equal(one[1:7], old[1:7]) and np.array_equal(one[:, size:], old[:, size:]), "and nothing else"


def test_keys_tell_names_apart(tmp_path: Path) -> None:
    with kvstore.embedded(str(tmp_path / "kv"), dram="16MiB") as store:
        space = store.namespace(model="m", layout=chunk_layout("g", 64, [CHUNK_BYTES]))
        assert len({chunk_key(space, name) for name in (b"one", b"two", b"")}) == 3
