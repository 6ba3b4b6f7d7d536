"""What a chunk is in the store's words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore
from engine_adapter.chunks.layout import chunk_layout, chunk_planes, chunk_prompt
from kvstore.block.errors import BadInput

CHUNK_BYTES = 3 * (128 << 10)


@pytest.mark.parametrize("tokens", [64, 256, 4096])
@pytest.mark.parametrize("size", [4096, 12288, 1 << 20, 3 * (128 << 10), 40 << 20])
def test_layouts_hold_all_bytes_in_slices(tokens: int, size: int) -> None:
    layout = chunk_layout("g", tokens, size)
    (part,) = layout.parts
    assert part.raw_bytes == size and layout.block_tokens == tokens
    assert len(part.layers) <= 32 and (len(part.layers) == 1 or part.slice_bytes >= 128 << 10)


@pytest.mark.parametrize(("tokens", "size"), [(16, 4096), (0, 4096), (8192, 8192), (100, 4000), (192, 4096), (64, 0)])
def test_sizes_that_no_block_can_have_are_refused_in_one_line(tokens: int, size: int) -> None:
    with pytest.raises(BadInput, match="multiple of 64 tokens") as raised:
        chunk_layout("g", tokens, size)
    assert "\n" not in str(raised.value)


def test_planes_are_views_of_the_whole_chunk(tmp_path: Path) -> None:
    with kvstore.embedded(str(tmp_path / "kv"), dram="16MiB") as store:
        space = store.namespace(model="m", layout=chunk_layout("g", 64, CHUNK_BYTES))
        memory = np.random.default_rng(3).integers(0, 256, (8, CHUNK_BYTES), dtype=np.uint8)
        planes = chunk_planes(space, memory)
        assert all(np.shares_memory(plane, memory) for (plane,) in planes.values())
        assert b"".join(plane[5].tobytes() for (plane,) in planes.values()) == memory[5].tobytes()
        tokens, extra_keys = chunk_prompt(space, b"one")
        assert len(space.match(tokens, extra_keys).keys) == 1
        assert space.match(tokens, extra_keys).keys != space.match(*chunk_prompt(space, b"two")).keys
