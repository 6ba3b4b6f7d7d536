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


def test_what_is_preferred_comes_first_until_it_is_put_off() -> None:
    unwritten = Unwritten()
    for row in range(4):
        unwritten.came(row, 10)
    unwritten.decline(3)
    for row in (2, 3, 9):
        unwritten.prefer(row)
    unwritten.used([2, 0])
    assert unwritten.preferred(9) == [2, 3] and unwritten.preferred(1) == [2] and unwritten.oldest(9) == [1, 0]
    assert len(unwritten) == 4 and unwritten.waiting_bytes == 40 and unwritten.waits(3)
    unwritten.put_off(2)
    unwritten.decline(3)
    assert unwritten.preferred(9) == [] and unwritten.oldest(9) == [1, 0, 2] and unwritten.declined() == {3: 10}


ACTS = st.lists(
    st.tuples(st.sampled_from(["came", "went", "used", "prefer", "put_off", "decline"]), st.integers(0, 5)), max_size=60
)


@given(acts=ACTS)
@settings(deadline=None)
def test_it_keeps_its_books(acts: list[tuple[str, int]]) -> None:
    unwritten = Unwritten()
    preferred: dict[int, int] = {}
    waiting: dict[int, int] = {}
    declined: dict[int, int] = {}
    for at, (act, row) in enumerate(acts):
        here = next((one for one in (preferred, waiting, declined) if row in one), None)
        if act == "came" or act == "went":
            if here is not None:
                del here[row]
            if act == "came":
                waiting[row] = at
                unwritten.came(row, at)
            else:
                unwritten.went(row)
        elif act == "used":
            if here is waiting or here is declined:
                waiting[row] = here.pop(row)
            unwritten.used([row])
        elif act == "prefer":
            if here is waiting or here is declined:
                preferred[row] = here.pop(row)
            unwritten.prefer(row)
        elif here is waiting or here is preferred:
            (declined if act == "decline" else waiting)[row] = here.pop(row)
            (unwritten.decline if act == "decline" else unwritten.put_off)(row)
        assert unwritten.preferred(9) == list(preferred) and unwritten.oldest(9) == list(waiting)
        assert unwritten.declined() == declined
        unwritten.check([*preferred, *waiting, *declined])
