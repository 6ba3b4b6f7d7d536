"""Where an engine's KV lies: page tables of several groups, and what cannot be pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block.errors import LayoutMismatch
from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.block.pages import GroupPages, Pages, page_numbers
from workbench import blank_planes, one_line

FULL = KvGroup("full", (0,), 1, (8,), "float16")
SLIDING = KvGroup("sliding", (1,), 1, (8,), "float16", Attention.SLIDING, 64)
LAYOUT = Layout((FULL, SLIDING))


def test_a_group_has_the_pages_it_is_given_and_all_others_the_table() -> None:
    mine = GroupPages([7, 8], 1)
    pages = Pages({}, [4, 5, 6], 16, {"sliding": mine})
    assert pages.of_group("sliding") is mine and mine.stop_page == 3
    assert pages.of_group("full") == GroupPages([4, 5, 6]) == Pages({}, [4, 5, 6], 16).of_group("sliding")
    assert pages.tokens == 48


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_groups_with_planes_in_common_have_pages_of_their_own(kind: Any) -> None:
    plane = torch.zeros(9, 16, 1, 8, dtype=torch.float16)
    shared = {0: [plane], 1: [plane.as_strided(plane.shape, plane.stride())]}
    Pages(shared, kind([1, 2]), 16, {"sliding": GroupPages(kind([3, 4]))}).check_apart(LAYOUT)
    Pages(blank_planes(LAYOUT, 9, 16), kind([1, 2]), 16).check_apart(LAYOUT)
    for groups in ({}, {"sliding": GroupPages(kind([3, 2]))}):
        with pytest.raises(LayoutMismatch) as caught:
            Pages(shared, kind([1, 2]), 16, groups).check_apart(LAYOUT)
        assert one_line(caught.value, "'full' and 'sliding'", "can hold one piece of a prompt only")


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_page_that_is_named_twice(kind: Any) -> None:
    """By a table that is used."""
    Pages({}, kind([5, 5]), 16, {"full": GroupPages([1, 2]), "sliding": GroupPages([1, 2])}).check_once(LAYOUT)
    for table, groups in (([1, 1], {}), ([1, 2], {"full": GroupPages(kind([1, 1]))})):
        with pytest.raises(LayoutMismatch) as caught:
            Pages({}, kind(table), 16, groups).check_once(LAYOUT)
        assert one_line(caught.value, "names a page twice")


@settings(max_examples=200)
@given(
    count=st.integers(0, 8),
    firsts=st.lists(st.integers(0, 8), max_size=3),
    first=st.integers(0, 10),
    stop=st.integers(0, 10),
    kind=st.sampled_from([list, np.array, tuple]),
)
def test_a_cut_names_the_same_pages_for_the_same_tokens(
    count: int, firsts: list[int], first: int, stop: int, kind: Any
) -> None:
    groups = {
        str(at): GroupPages(
            kind([100 * (at + 1) + page for page in range(min(begin, count), count)]), min(begin, count)
        )
        for at, begin in enumerate(firsts)
    }
    pages = Pages({}, kind(list(range(count))), 16, groups)
    cut = pages.cut(first, stop)
    kept = range(min(first, stop, count), min(stop, count))
    assert page_numbers(cut.table) == list(kept)
    for at in groups:
        was, now = pages.of_group(at), cut.of_group(at)
        named = {was.first_page + page: number for page, number in enumerate(page_numbers(was.table))}
        found = {kept.start + now.first_page + page: number for page, number in enumerate(page_numbers(now.table))}
        assert found == {page: named[page] for page in kept if page in named}
