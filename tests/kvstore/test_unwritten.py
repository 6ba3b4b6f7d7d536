"""What DRAM alone holds, in the order in which it is looked at."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.rows.below import DirtyBlocks


def test_what_is_used_is_looked_at_last() -> None:
    dirty = DirtyBlocks()
    for row in range(4):
        dirty.came(row, 10 + row)
    dirty.used([1, 0, 9])
    assert dirty.oldest(3) == [2, 3, 1] and dirty.oldest(9) == [2, 3, 1, 0]
    assert len(dirty) == 4 and dirty.waiting_bytes == 46


def test_what_was_declined_waits_again_once_it_is_used() -> None:
    dirty = DirtyBlocks()
    dirty.came(1, 10)
    dirty.came(2, 20)
    dirty.decline(1)
    assert dirty.oldest(9) == [2] and 1 in dirty and not dirty.waits(1)
    assert dirty.waiting_bytes == 20
    dirty.used([1])
    assert dirty.oldest(9) == [2, 1] and dirty.waiting_bytes == 30
    dirty.decline(2)
    dirty.discard(2)
    dirty.used([2])
    assert 2 not in dirty and len(dirty) == 1


def test_what_is_preferred_comes_first_until_it_is_put_off() -> None:
    dirty = DirtyBlocks()
    for row in range(4):
        dirty.came(row, 10)
    dirty.decline(3)
    for row in (2, 3, 9):
        dirty.prioritize(row)
    dirty.used([2, 0])
    assert dirty.prioritized(9) == [2, 3] and dirty.prioritized(1) == [2] and dirty.oldest(9) == [1, 0]
    assert len(dirty) == 4 and dirty.waiting_bytes == 40 and dirty.waits(3)
    dirty.requeue(2)
    dirty.decline(3)
    assert dirty.prioritized(9) == [] and dirty.oldest(9) == [1, 0, 2] and dirty.declined() == {3: 10}


ACTS = st.lists(
    st.tuples(st.sampled_from(["came", "discard", "used", "prioritize", "requeue", "decline"]), st.integers(0, 5)),
    max_size=60,
)


@given(acts=ACTS)
@settings(deadline=None)
def test_it_keeps_its_books(acts: list[tuple[str, int]]) -> None:
    dirty = DirtyBlocks()
    prioritized: dict[int, int] = {}
    waiting: dict[int, int] = {}
    declined: dict[int, int] = {}
    for at, (act, row) in enumerate(acts):
        here = next((one for one in (prioritized, waiting, declined) if row in one), None)
        if act == "came" or act == "discard":
            if here is not None:
                del here[row]
            if act == "came":
                waiting[row] = at
                dirty.came(row, at)
            else:
                dirty.discard(row)
        elif act == "used":
            if here is waiting or here is declined:
                waiting[row] = here.pop(row)
            dirty.used([row])
        elif act == "prioritize":
            if here is waiting or here is declined:
                prioritized[row] = here.pop(row)
            dirty.prioritize(row)
        elif here is waiting or here is prioritized:
            (declined if act == "decline" else waiting)[row] = here.pop(row)
            (dirty.decline if act == "decline" else dirty.requeue)(row)
        assert dirty.prioritized(9) == list(prioritized) and dirty.oldest(9) == list(waiting)
        assert dirty.declined() == declined
        dirty.check([*prioritized, *waiting, *declined])
