"""Blocks in the pool: what comes out is what went in, through any page table, and always a prefix."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.hf.hbm_blocks import HbmBlocks
from kvstore.block.pages import Pages
from workbench import blank_planes, random_planes, same_tokens, small_layout

CPU = torch.device("cpu")
KEYS = [bytes([number]) * 32 for number in range(80)]


def pool_of(blocks: int, **layout: object) -> HbmBlocks:
    chosen = small_layout(**layout)
    return HbmBlocks(chosen, CPU, blocks * chosen.raw_bytes)


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("blocks", [1, 5, 70])
def test_what_comes_out_is_what_went_in(page_tokens: int, dtype: str, blocks: int) -> None:
    layout = small_layout(dtype=dtype)
    pool = HbmBlocks(layout, CPU, 80 * layout.raw_bytes)
    count = blocks * 64 // page_tokens
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(1))[:count].tolist()
    source = Pages(random_planes(layout, count + 3, page_tokens), order, page_tokens)
    target = Pages(blank_planes(layout, count + 3, page_tokens), order[::-1], page_tokens)
    pool.save(KEYS[:blocks], source, range(0))
    assert pool.leading(KEYS) == blocks
    pool.load(KEYS[:blocks], target)
    assert same_tokens(source, target, range(64 * blocks))
    untouched = sorted(set(range(count + 3)) - set(order))
    assert not any(plane[untouched].any() for planes in target.planes.values() for plane in planes)


def test_a_prompt_larger_than_the_pool_keeps_its_beginning() -> None:
    pool = pool_of(4)
    pages = Pages(random_planes(small_layout(), 10, 64), range(10), 64)
    for blocks in (2, 6, 10):
        pool.save(KEYS[:blocks], pages, range(0))
        assert pool.leading(KEYS) == min(blocks, 4)
    assert pool.usage().blocks == 4


def test_the_ends_of_old_prompts_make_room_first() -> None:
    pool = pool_of(6)
    pages = Pages(random_planes(small_layout(), 10, 64), range(10), 64)
    pool.save(KEYS[:4], pages, range(0))
    pool.save(KEYS[40:44], pages, range(0))
    assert pool.leading(KEYS[40:]) == 4
    assert pool.leading(KEYS) == 2


def test_a_pool_that_is_too_small_for_one_block_holds_nothing() -> None:
    pool = pool_of(0)
    pool.save(KEYS[:3], Pages(random_planes(small_layout(), 3, 64), range(3), 64), range(0))
    assert pool.leading(KEYS) == 0


def test_a_block_whose_filling_failed_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real memory, a real copy: only the moment at which it fails is chosen."""
    pool = pool_of(4)
    pages = Pages(random_planes(small_layout(), 4, 64), range(4), 64)
    copies = []
    copy_of = torch.Tensor.copy_

    def failing(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copies.append(source)
        if len(copies) == 3:
            raise KeyboardInterrupt
        return copy_of(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(KeyboardInterrupt):
        pool.save(KEYS[:4], pages, range(0))
    monkeypatch.undo()
    assert pool.leading(KEYS) == 2
    target = Pages(blank_planes(small_layout(), 2, 64), range(2), 64)
    pool.load(KEYS[:2], target)
    assert same_tokens(pages, target, range(128))


def test_what_was_decoded_is_found_but_is_not_as_computed() -> None:
    pool = pool_of(6)
    pages = Pages(random_planes(small_layout(), 6, 64), range(6), 64)
    pool.save(KEYS[:5], pages, range(2, 4))
    assert (pool.leading(KEYS), pool.computed(KEYS)) == (5, 2)
    target = Pages(blank_planes(small_layout(), 5, 64), range(5), 64)
    pool.load(KEYS[:5], target)
    assert same_tokens(pages, target, range(320))
    pool.save(KEYS[:5], pages, range(0))
    assert pool.usage().blocks == 5, "a block has one of its two names"
    assert (pool.leading(KEYS), pool.computed(KEYS)) == (5, 2)
