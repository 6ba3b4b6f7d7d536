"""Rows of different numbers of parts: what is known of each, and what memory they take."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tiering.policies.lru import LeafFirstLru
from tiering.residency import Pins, Residency
from tiering.tier import NO_PLACE, place_of


def residency() -> Residency:
    return Residency(LeafFirstLru(), Pins())


def entries(table: Residency) -> int:
    """For how many parts behind the first there is memory."""
    table._further.check()
    return sum(len(one.places) for one in table._further._tables.values())


def test_a_row_takes_memory_for_its_own_parts_alone() -> None:
    table = residency()
    table.reserved(range(5000), [range(5000)])
    assert entries(table) == 0
    table.reserved([5000], [[place_of(part, 1)] for part in range(256)])
    assert entries(table) == 255 * 2, "its own, and as many of nobody"
    table.reserved(range(5001, 5011), [range(10), range(10)])
    assert entries(table) == 255 * 2 + 11
    assert table.forget(5000) == [place_of(part, 1) for part in range(256)]
    assert entries(table) == 11, "a table that nobody is in any more goes"


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_each_row_knows_its_own(seed: int) -> None:
    random.seed(seed)
    table, rows = residency(), range(60)
    table.grow_to(max(rows))
    known: dict[int, list[tuple[int, bytes | None]]] = {}
    fresh = iter(range(10**6))
    for _ in range(600):
        row = random.choice(rows)
        if row not in known:
            others = [one for one in rows if one not in known and one != row]
            together = [row, *random.sample(others, k=min(len(others), random.randint(0, 2)))]
            places = [[next(fresh) for _ in together] for _ in range(random.choice([1, 2, 3, 9]))]
            table.reserved(together, places)
            known.update({one: [(column[at], None) for column in places] for at, one in enumerate(together)})
        elif random.random() < 0.4:
            assert table.forget(row) == [place for place, _ in known.pop(row)]
        else:
            part, place, digest = random.randrange(len(known[row])), next(fresh), random.randbytes(16)
            known[row][part] = (place, digest)
            table.moved(row, part, place)
            table.part_sealed(row, part, digest)
        least = sum(len(parts) - 1 for parts in known.values())
        assert least <= entries(table) <= least + 1 + 2 + 8, "beside what rows have, one slot of each table"
    for row in rows:
        parts = known.get(row, [])
        assert table.all_places(row) == [place for place, _ in parts]
        for part in range(9):
            assert table.place(row, part) == (parts[part][0] if part < len(parts) else NO_PLACE)
        for part, (_, digest) in enumerate(parts):
            if digest is not None or part:
                assert table.header_digest(row, part) == (digest or bytes(16)), "not of a block before"
    for count in (1, 2, 3, 9):
        mine = [row for row in rows if row not in known or len(known[row]) == count]
        for part in range(count):
            want = [known[row][part][0] if row in known else NO_PLACE for row in mine]
            assert table.places_of(mine, part) == want
            if part:
                assert table._further.places_column(np.array(mine), part).tolist() == want


def test_what_is_in_use_is_told_by_any_part() -> None:
    table = residency()
    table.reserved(range(4), [[place_of(1, row) for row in range(4)]])
    table.reserved([4, 5], [[place_of(2, row), place_of(2, row + 4)] for row in range(3)])
    for row in range(6):
        table.listed(row)
    assert table.all_in_use() == [] and table.pieces_in_use() == set()
    table.held.defer_reuse([place_of(2, 6)])
    assert table.all_in_use() == [5] and table.is_in_use(5) and not table.is_in_use(4)
    table.held.allow_reuse([place_of(2, 6)])
    table.moved(4, 2, place_of(9, 9))
    table.pins.pin([4])
    assert table.all_in_use() == [4] and table.pieces_in_use() == {2, 9}


def test_what_was_there_before_a_restart_comes_in_columns() -> None:
    table = residency()
    table.reserved([3], [[7], [8]])
    rows = range(10, 14)
    places = [np.arange(4) + 100 * part for part in range(3)]
    table.loaded(rows, np.full(4, -1), np.arange(4) + 50, places)
    assert entries(table) == (1 + 1) + 2 * (4 + 1)
    for row in rows:
        assert table.all_places(row) == [row - 10, row + 90, row + 190] and table.generation(row) == row + 40
    assert table.forget(11) == [1, 101, 201] and table.all_places(13) == [3, 103, 203]
    entries(table)
