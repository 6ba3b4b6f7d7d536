"""What DRAM alone holds, in the order in which it is looked at."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.table import DirtyBlocks

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
        assert dirty.prioritized(2) == list(prioritized)[:2] and dirty.oldest(2) == list(waiting)[:2]
        waits = {**prioritized, **waiting}
        assert (len(dirty), dirty.waiting_bytes) == (len(waits), sum(waits.values()))
        assert dirty.waits(row) == (row in waits) and (row in dirty) == (row in waits or row in declined)
        assert dirty.declined() == declined
        dirty.check([*prioritized, *waiting, *declined])
