"""Blocks in the pool: what comes out is what went in, and always a prefix."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.adapter import HbmBlocks
from kvstore.block.pages import Pages
from workbench import random_planes, small_layout

KEYS = [bytes([number]) * 32 for number in range(80)]
LAYOUT = small_layout()


def pool_of(blocks: int) -> HbmBlocks:
    return HbmBlocks(LAYOUT, blocks * LAYOUT.raw_bytes)


def some_pages(blocks: int) -> Pages:
    return Pages(random_planes(LAYOUT, blocks, 64), range(blocks), 64)


def test_the_ends_of_old_prompts_make_room_first() -> None:
    pool, pages = pool_of(6), some_pages(10)
    pool.save(KEYS[:4], pages)
    pool.save(KEYS[40:44], pages)
    assert pool.leading(KEYS[40:]) == 4 and pool.leading(KEYS) == 2
    pool.load(KEYS[:2], some_pages(2))
    pool.save(KEYS[50:54], pages)
    assert pool.leading(KEYS) == 2 and pool.leading(KEYS[40:]) == 0, "what was used last stays"


def test_a_block_whose_copy_failed_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real memory, a real copy: only the moment at which it fails is chosen."""
    pool, pages, copies = pool_of(4), some_pages(4), list[int]()
    clone = torch.Tensor.clone

    def failing(source: torch.Tensor) -> torch.Tensor:
        copies.append(1)
        if len(copies) == 2 * 4 + 3:
            raise KeyboardInterrupt
        return clone(source)

    monkeypatch.setattr(torch.Tensor, "clone", failing)
    with pytest.raises(KeyboardInterrupt):
        pool.save(KEYS[:4], pages)
    monkeypatch.undo()
    assert pool.leading(KEYS) == 2
