"""Where an engine's KV lies: page tables of several groups, and what cannot be pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block.errors import BadInput, LayoutMismatch
from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.block.pages import GroupPages, Pages, page_numbers
from workbench import blank_planes, refused

FULL = KvGroup("full", (0,), 1, (8,), "float16")
SLIDING = KvGroup("sliding", (1,), 1, (8,), "float16", Attention.SLIDING, 64)
LAYOUT = Layout((FULL, SLIDING))


def test_a_group_has_the_pages_it_is_given_and_all_others_the_table() -> None:
    pages = Pages({}, [4, 5, 6], 16, {"sliding": GroupPages([7, 8], 1), "large": GroupPages([9], 1, 24)})
    assert pages.of_group("sliding") == GroupPages([7, 8], 1, 16) and pages.of_group("sliding").stop_page == 3
    assert pages.of_group("full") == GroupPages([4, 5, 6], 0, 16) == Pages({}, [4, 5, 6], 16).of_group("sliding")
    assert pages.of_group("large") == GroupPages([9], 1, 24)
    assert pages.tokens == 48
    begins = Pages({}, [4, 5, 6], 16, {"sliding": GroupPages([7], 1, 24)}).first_tokens(LAYOUT, 48)
    assert begins == {"full": 48, "sliding": 72}


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_groups_with_planes_in_common_have_pages_of_their_own(kind: Any) -> None:
    plane = torch.zeros(9, 16, 1, 8, dtype=torch.float16)
    shared = {0: [plane], 1: [plane.as_strided(plane.shape, plane.stride())]}
    Pages(shared, kind([1, 2]), 16, {"sliding": GroupPages(kind([3, 4]))}).check_apart(LAYOUT)
    Pages(blank_planes(LAYOUT, 9, 16), kind([1, 2]), 16).check_apart(LAYOUT)
    for groups in ({}, {"sliding": GroupPages(kind([3, 2]))}):
        with refused(LayoutMismatch, "'full' and 'sliding'", "can hold one piece of a prompt only"):
            Pages(shared, kind([1, 2]), 16, groups).check_apart(LAYOUT)


@pytest.mark.parametrize(("small", "common"), [([5, 1], 1), ([7, 4], 7), ([2, 5, 4], None), ([], None)])
def test_pages_of_two_sizes_in_one_memory_are_told_apart_by_their_bytes(small: list[int], common: int | None) -> None:
    """Large pages 0 and 3 have the memory of small ones 0, 1, 6 and 7."""
    memory = torch.zeros(8 * 128, dtype=torch.float16)
    planes = {0: [memory.view(8, 16, 1, 8)], 1: [memory.view(4, 32, 1, 8)]}
    groups = {"full": GroupPages(small, 4 - len(small)), "sliding": GroupPages([3, 0], 0, 32)}
    pages = Pages(planes, range(4), 16, groups)
    if common is None:
        pages.check_apart(LAYOUT)
        return
    with refused(LayoutMismatch, "'full' and 'sliding'", f"page {common} of them"):
        pages.check_apart(LAYOUT)


def test_pages_of_two_sizes_that_lie_in_each_other_are_not_apart() -> None:
    """Where memory has the first tokens of all pages first, page 6 of 8 has a token where page 2 of 4 has one."""
    memory = torch.zeros(8 * 128, dtype=torch.float16)
    planes = {0: [memory.view(16, 8, 1, 8).transpose(0, 1)], 1: [memory.view(32, 4, 1, 8).transpose(0, 1)]}
    assert planes[0][0][6, 1].data_ptr() == planes[1][0][2, 3].data_ptr()
    pages = Pages(planes, [5, 6], 16, {"sliding": GroupPages([2], 0, 32)})
    with refused(LayoutMismatch, "'full' and 'sliding'", "planes in common"):
        pages.check_apart(LAYOUT)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_page_that_is_named_twice(kind: Any) -> None:
    """By a table that is used."""
    Pages({}, kind([5, 5]), 16, {"full": GroupPages([1, 2]), "sliding": GroupPages([1, 2])}).check_once(LAYOUT)
    for table, groups in (([1, 1], {}), ([1, 2], {"full": GroupPages(kind([1, 1]))})):
        with refused(LayoutMismatch, "names a page twice"):
            Pages({}, kind(table), 16, groups).check_once(LAYOUT)


@settings(max_examples=200)
@given(
    count=st.integers(0, 8),
    shapes=st.lists(st.tuples(st.integers(0, 32), st.sampled_from([0, 4, 16, 32, 64])), max_size=3),
    first=st.integers(0, 10),
    stop=st.integers(0, 10),
    kind=st.sampled_from([list, np.array, tuple]),
)
def test_a_cut_names_the_same_pages_for_the_same_tokens(
    count: int, shapes: list[tuple[int, int]], first: int, stop: int, kind: Any
) -> None:
    """Whatever the size of a group's pages; one that the cut would split is one line."""
    count = 4 * count  # all groups end at the end of a page
    groups = {}
    for at, (begin, size) in enumerate(shapes):
        pages_of_it = 16 * count // (size or 16)
        begin = min(begin, pages_of_it)
        groups[str(at)] = GroupPages(kind([1000 * (at + 1) + page for page in range(begin, pages_of_it)]), begin, size)
    pages = Pages({}, kind(list(range(count))), 16, groups)
    kept = range(min(first, stop, count), min(stop, count))
    tokens = range(16 * kept.start, 16 * kept.stop)
    if any(end % (size or 16) for _, size in shapes for end in (tokens.start, tokens.stop)):
        with pytest.raises(BadInput, match="splits a page"):
            pages.cut(first, stop)
        return
    cut = pages.cut(first, stop)
    assert page_numbers(cut.table) == list(kept)
    for at in groups:
        was, now = pages.of_group(at), cut.of_group(at)
        size = was.page_tokens
        named = {size * (was.first_page + page): number for page, number in enumerate(page_numbers(was.table))}
        found = {
            tokens.start + size * (now.first_page + page): number for page, number in enumerate(page_numbers(now.table))
        }
        assert now.page_tokens == size
        assert found == {token: number for token, number in named.items() if token in tokens}
