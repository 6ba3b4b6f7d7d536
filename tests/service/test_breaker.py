"""When a client stops asking a sidecar, and when it asks again."""

from __future__ import annotations

import pytest

from kvstore.client.connection import SILENCE_SECONDS, Breaker


def test_silence_opens_it_and_an_answer_to_a_ping_closes_it() -> None:
    breaker = Breaker()
    assert breaker.was_late(10.0, 9.0, 10.05, is_quick=True), "a ping is due"
    assert breaker.is_open and "for 2.0 s" in breaker.detail(12.0)
    assert not breaker.was_late(10.1, 9.0, 10.2, is_quick=True), "one ping is enough"
    breaker.answered()
    assert not breaker.is_open and not breaker.is_suspected


@pytest.mark.parametrize("heard_at", [10.0, 10.01, 99.0])
def test_any_answer_since_it_was_asked_is_a_sign_of_life(heard_at: float) -> None:
    breaker = Breaker()
    assert not breaker.was_late(10.0, heard_at, 10.05, is_quick=True)
    assert not breaker.is_open and not breaker.is_suspected


def test_what_may_be_long_on_its_way_makes_it_suspected_until_a_ping_is_late_too() -> None:
    breaker = Breaker()
    assert breaker.was_late(10.0, 9.0, 15.0, is_quick=False)
    assert breaker.is_suspected and not breaker.is_open, "others are asked on"
    assert breaker.was_late(15.0, 9.0, 15.05, is_quick=True)
    assert breaker.is_open


def test_a_deadline_that_is_shorter_than_any_machines_pauses_says_nothing() -> None:
    breaker = Breaker()
    assert not breaker.was_late(10.0, 9.0, 10.0 + SILENCE_SECONDS / 2, is_quick=True)
    assert not breaker.is_open and not breaker.is_suspected
