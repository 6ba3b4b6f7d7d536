"""What DRAM alone holds, in the order in which it is looked at."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.unwritten import Unwritten


def test_what_is_used_is_looked_at_last() -> None:
    unwritten = Unwritten()
    for row in range(4):
        unwritten.came(row, 10 + row)
    unwritten.used([1, 0, 9])
    assert unwritten.oldest(3) == [2, 3, 1] and unwritten.oldest(9) == [2, 3, 1, 0]
    assert len(unwritten) == 4 and unwritten.waiting_bytes == 46


def test_what_was_declined_waits_again_once_it_is_used() -> None:
    unwritten = Unwritten()
    unwritten.came(1, 10)
    unwritten.came(2, 20)
    unwritten.decline(1)
    assert unwritten.oldest(9) == [2] and 1 in unwritten and not unwritten.waits(1)
    assert unwritten.waiting_bytes == 20
    unwritten.used([1])
    assert unwritten.oldest(9) == [2, 1] and unwritten.waiting_bytes == 30
    unwritten.decline(2)
    unwritten.went(2)
    unwritten.used([2])
    assert 2 not in unwritten and len(unwritten) == 1


ACTS = st.lists(st.tuples(st.sampled_from(["came", "went", "used", "decline"]), st.integers(0, 5)), max_size=60)


@given(acts=ACTS)
@settings(deadline=None)
def test_it_keeps_its_books(acts: list[tuple[str, int]]) -> None:
    unwritten = Unwritten()
    waiting: dict[int, int] = {}
    declined: dict[int, int] = {}
    for at, (act, row) in enumerate(acts):
        if act == "came":
            declined.pop(row, None)
            waiting.pop(row, None)
            waiting[row] = at
            unwritten.came(row, at)
        elif act == "went":
            waiting.pop(row, None)
            declined.pop(row, None)
            unwritten.went(row)
        elif act == "used":
            size = waiting.pop(row, declined.pop(row, None))
            if size is not None:
                waiting[row] = size
            unwritten.used([row])
        elif row in waiting:
            declined[row] = waiting.pop(row)
            unwritten.decline(row)
        assert unwritten.oldest(9) == list(waiting)
        unwritten.check([*waiting, *declined])
