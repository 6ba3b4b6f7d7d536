"""What is written to a remote engine, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.remote.writes import BURST_SECONDS, NO_ROOM_SECONDS, RemoteWrites, WriteQueue


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
        queue.offer(block, 10)
    assert queue.dropped == 2 and [queue.take(0.0) for _ in range(4)] == [3, 4, 5, None]


def test_what_is_forgotten_is_not_written() -> None:
    queue = WriteQueue[int]()
    queue.offer(1, 10)
    queue.offer(2, 10)
    queue.forget(1)
    queue.forget(9)
    assert len(queue) == 1 and queue.take(0.0) == 2 and queue.seconds_until_next(0.0) is None


def test_an_engine_without_room_is_left_alone_for_a_while() -> None:
    queue = WriteQueue[int]()
    queue.offer(1, 10)
    queue.no_room(5.0)
    assert queue.take(5.0) is None and queue.seconds_until_next(5.0) == NO_ROOM_SECONDS
    assert queue.take(5.0 + NO_ROOM_SECONDS) == 1


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 0.3)), min_size=1, max_size=200), st.integers(500, 5000))
def test_never_more_than_the_rate(blocks: list[tuple[int, float]], rate: int) -> None:
    queue, now, left = WriteQueue[int](bytes_per_second=float(rate)), 0.0, []
    sizes = dict(enumerate(size for size, _ in blocks))
    for number, (size, pause) in enumerate(blocks):
        queue.offer(number, size)
        now += pause
        while (taken := queue.take(now)) is not None:
            left.append((now, sizes[taken]))
    for at, _ in left:
        within = sum(size for when, size in left if at <= when < at + 1.0)
        assert within <= rate * (1 + BURST_SECONDS) + max(sizes.values()) + 1e-6
    assert queue.dropped == 0
