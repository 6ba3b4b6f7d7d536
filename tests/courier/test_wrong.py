"""What is wrong is told while it is so: it ends when it is over, or was not seen for a minute."""

from __future__ import annotations

import pytest

from kvstore.courier.figures import AGAIN_SECONDS, MOST_WRONG, OncePerKind
from waiting import FakeClock


def test_a_reason_lasts_as_long_as_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    told = OncePerKind(clock)
    for _ in range(3):
        told.say("peer a", "a does not answer")
        told.say("keys b", "b has other keys")
        clock.advance(AGAIN_SECONDS / 4)
    assert told.reasons() == ["a does not answer", "b has other keys"]
    assert len(caplog.records) == 2, "each once"
    told.ended("peer a", "a answers")
    assert told.reasons() == ["b has other keys"]
    clock.advance(AGAIN_SECONDS)
    assert told.reasons() == [], "what was seen once is not wrong for ever"


def test_what_comes_and_goes_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    told = OncePerKind(clock)
    caplog.set_level("INFO")
    for _ in range(5):
        told.say("writes", "no room")
        assert told.reasons() == ["no room"]
        told.ended("writes", "room again")
        assert told.reasons() == []
    assert [one.message for one in caplog.records] == ["no room", "room again"]
    clock.advance(AGAIN_SECONDS)
    told.say("writes", "no room")
    assert len(caplog.records) == 3


def test_what_is_told_is_bounded_and_makes_room_for_what_is_wrong_now(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    told = OncePerKind(clock)
    for number in range(2 * MOST_WRONG):
        told.say(f"forged {number}", str(number))
    assert len(told.reasons()) == len(caplog.records) == MOST_WRONG
    clock.advance(AGAIN_SECONDS)
    told.say("sidecar", "it does not answer")
    assert told.reasons() == ["it does not answer"]
