"""What a holder has let go of is asked in a moment, and no longer."""

from __future__ import annotations

import pytest

from tiering.dram.unmap_wait import LOOK_SECONDS, Unmapped, look


@pytest.mark.parametrize("mapped", range(6))
def test_it_goes_up_to_the_first_that_is_mapped(mapped: int) -> None:
    extents, asked = [10, 11, 12, 13, 14], list[int]()

    def is_mapped(extent: int) -> bool:
        asked.append(extent)
        return extent == 10 + mapped

    found = look(extents, is_mapped, lambda: 0.0)
    assert found == Unmapped(mapped, len(asked), 0.0) and asked == extents[: mapped + 1]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_it_ends_when_a_question_took_long(is_mapped: bool) -> None:
    now = 0.0

    def ask(extent: int) -> bool:
        nonlocal now
        now += 0.6 * LOOK_SECONDS
        return is_mapped

    found = look(range(100), ask, lambda: now)
    assert found.asked == (1 if is_mapped else 2) and found.unmapped == (0 if is_mapped else 2)
    assert found.seconds == now


def test_nothing_is_asked_about_nothing() -> None:
    assert look([], lambda extent: True, lambda: 0.0) == Unmapped(0, 0, 0.0)
