"""What is written to a remote engine, and when."""

from __future__ import annotations

import pytest

from tiering.remote.writes import RemoteWrites, WriteQueue


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("all", {(1, False), (1, True), (2, False), (2, True)}),
        ("learned", {(1, True), (2, False), (2, True)}),
        ("none", set()),
    ],
)
def test_what_is_wanted(policy: str, wanted: set[tuple[int, bool]]) -> None:
    asked = [(uses, is_retained) for uses in (1, 2) for is_retained in (False, True)]
    assert {one for one in asked if RemoteWrites(policy).wants(*one)} == wanted


def test_a_full_queue_loses_its_oldest_and_says_so() -> None:
    queue = WriteQueue[int](most=3)
    for block in (1, 2, 3, 3, 4, 5):
        queue.offer(block)
    assert queue.dropped == 2 and [queue.take(0.0) for _ in range(4)] == [3, 4, 5, None]


def test_what_is_forgotten_is_not_written() -> None:
    queue = WriteQueue[int]()
    queue.offer(1)
    queue.offer(2)
    queue.forget(1)
    queue.forget(9)
    assert len(queue) == 1 and queue.take(0.0) == 2 and queue.seconds_until_next(0.0) is None
