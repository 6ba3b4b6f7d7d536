"""One line per kind and minute, whatever is warned of; none is lost from the count."""

from __future__ import annotations

import logging
import threading

import pytest

from tiering.faults import MOST_KINDS, RateLimitedLog
from waiting import FakeClock


@pytest.fixture
def hand() -> FakeClock:
    return FakeClock(0.0)


@pytest.fixture
def warnings(hand: FakeClock) -> RateLimitedLog:
    return RateLimitedLog(logging.getLogger("tests.rate_limited"), hand)


def test_one_line_per_kind_and_minute(
    warnings: RateLimitedLog, hand: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(120):
        hand.monotonic = float(second)
        warnings.warn("disk", "the disk is full at %d s", second)
        warnings.warn("memory", "no memory at %d s", second)
    assert caplog.messages == [
        "the disk is full at 0 s",
        "no memory at 0 s",
        "the disk is full at 60 s (59 more like this were not logged)",
        "no memory at 60 s (59 more like this were not logged)",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_kinds_without_end_are_bounded_in_lines_and_in_memory(
    warnings: RateLimitedLog, hand: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A client may name the kinds."""
    for number in range(10_000):
        warnings.warn(f"kind {number}", "%d", number)
    assert len(caplog.messages) == MOST_KINDS + 1  # and one for all the others
    assert len(warnings._kinds) <= MOST_KINDS + 1
    hand.monotonic = 60.0
    for number in range(10_000, 20_000):
        warnings.warn(f"kind {number}", "%d", number)
    told = caplog.messages[MOST_KINDS + 1 :]
    assert len(told) <= MOST_KINDS + 1 and len(warnings._kinds) <= MOST_KINDS + 1


def test_no_warning_is_lost_from_the_count(
    warnings: RateLimitedLog, hand: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Not of a kind that made room for others either."""
    given = 0
    for minute in range(4):
        for number in range(3 * MOST_KINDS):
            for _ in range(3):
                hand.monotonic = 61.0 * minute
                warnings.warn(f"{minute} {number}", "x")
                given += 1
    hand.monotonic = 1000.0
    for number in range(2 * MOST_KINDS):  # new kinds, which the old ones make room for
        warnings.warn(f"last {number}", "x")
        given += 1
    hand.monotonic = 2000.0
    for kind in list(warnings._kinds):
        warnings.warn(kind, "x")
        given += 1
    hand.monotonic = 3000.0
    for number in range(MOST_KINDS + 1):  # the last one has to share
        warnings.warn(f"after {number}", "x")
        given += 1
    suppressed = sum(int(line.split("(")[1].split()[0]) for line in caplog.messages if "(" in line)
    assert len(caplog.messages) + suppressed == given


def test_a_percent_sign_of_a_client_is_text(
    warnings: RateLimitedLog, hand: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    warnings.warn("one", "%s", "100 %d %s")
    hand.monotonic = 30.0
    warnings.warn("one", "%s", "unseen")
    hand.monotonic = 61.0
    warnings.warn("one", "%s", "50 %d")
    assert caplog.messages == ["100 %d %s", "50 %d (1 more like this were not logged)"]


def test_many_threads_write_one_line(warnings: RateLimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    together = threading.Barrier(8)

    def warn() -> None:
        together.wait()
        for _ in range(200):
            warnings.warn("disk", "full")

    threads = [threading.Thread(target=warn) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert caplog.messages == ["full"] and warnings._kinds["disk"].suppressed == 1599
