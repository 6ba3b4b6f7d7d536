"""How long a save waits for its engine."""

from __future__ import annotations

import pytest

from engine_adapter.paged.save_plan import HURRIED_SECONDS, QUIET_SECONDS, SavePatience


def test_it_waits_for_a_quiet_while_behind_a_step() -> None:
    unmap_wait = SavePatience(1.0)
    assert unmap_wait and unmap_wait.seconds_left(10.0, 10.0) == 0, "no step so far"
    unmap_wait.step_began()
    assert unmap_wait.seconds_left(10.0, 10.1) == QUIET_SECONDS, "it looks again"
    unmap_wait.step_ended(10.2)
    assert unmap_wait.seconds_left(10.0, 10.21) == pytest.approx(QUIET_SECONDS - 0.01)
    unmap_wait.step_ended(10.22)
    assert unmap_wait.seconds_left(10.0, 10.2 + QUIET_SECONDS) == 0, "nothing was computed meanwhile"


def test_it_waits_no_longer_than_it_is_told() -> None:
    unmap_wait = SavePatience(1.0)
    unmap_wait.step_began()
    assert unmap_wait.seconds_left(10.0, 10.99) == pytest.approx(0.01)
    assert unmap_wait.seconds_left(10.0, 11.0) == unmap_wait.seconds_left(10.0, 20.0) == 0


def test_one_that_was_lost_makes_others_hurry_for_a_while() -> None:
    unmap_wait = SavePatience(1.0)
    unmap_wait.step_began()
    unmap_wait.gave_up(10.0)
    assert unmap_wait.seconds_left(10.0, 10.0) == unmap_wait.seconds_left(19.9, 10 + HURRIED_SECONDS - 0.1) == 0
    assert unmap_wait.seconds_left(20.0, 10 + HURRIED_SECONDS) == QUIET_SECONDS


def test_without_any_it_is_always_its_turn() -> None:
    unmap_wait = SavePatience(0.0)
    unmap_wait.step_began()
    assert not unmap_wait and unmap_wait.seconds_left(10.0, 10.0) == 0
