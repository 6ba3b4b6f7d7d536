"""Buffers: pages are views of them, and a free list of them stays small."""

from __future__ import annotations

import torch

from engine_adapter.hf.buffers import MAX_FREE, BufferSet, FreeList
from workbench import small_layout

CPU = torch.device("cpu")


def test_pages_are_views_of_the_buffers() -> None:
    buffers = BufferSet(small_layout(), 2, 192, CPU)
    for planes in buffers.planes:
        for plane in planes:
            plane.copy_(torch.randn(plane.shape))
    pages = buffers.pages(1, 150)
    assert pages.tokens == 128 and list(pages.planes) == [0, 1]
    for layer, planes in enumerate(buffers.planes):
        for view, plane in zip(pages.planes[layer], planes, strict=True):
            assert view.shape == (3, 64, 2, 8)
            assert view.untyped_storage().data_ptr() == plane.untyped_storage().data_ptr()
            for token in (0, 63, 64, 191):
                assert torch.equal(view[token // 64, token % 64], plane[1, :, token])


def test_clearing_touches_one_row_behind_a_token() -> None:
    buffers = BufferSet(small_layout(), 2, 64, CPU)
    for planes in buffers.planes:
        for plane in planes:
            plane.fill_(float("nan"))
    buffers.clear(0, 10)
    for planes in buffers.planes:
        for plane in planes:
            assert plane[0, :, :10].isnan().all() and plane[1].isnan().all()
            assert not plane[0, :, 10:].any()


def test_the_free_list_reuses_and_stays_small() -> None:
    free = FreeList(small_layout(), CPU)
    first = free.take(1, 1000)
    assert first.capacity >= 1000 and first.capacity % 64 == 0 and first.capacity <= 1280
    free.give(first)
    assert free.take(1, 900) is first, "a smaller one fits in it"
    second = free.take(2, 100)
    assert second is not first
    third = free.take(1, 10)
    for buffers in (first, second, third):
        free.give(buffers)
    assert len(free._free) == MAX_FREE
    assert free.take(1, 5) is third
    large = free.take(4, 5000)
    assert large.rows == 4 and not free._free, "what did not fit was given back first"
