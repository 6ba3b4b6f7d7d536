"""What is written to a remote engine, and when."""

from __future__ import annotations

import pytest

from tiering.remote import writes
from tiering.remote.writes import NO_ROOM_SECONDS, RemoteWrites, WriteQueue


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


def test_a_full_queue_loses_its_oldest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "MOST_QUEUED", 3)
    queue = WriteQueue[int]()
    for block in (1, 2, 3, 3, 4, 5):
        queue.offer(block)
    assert queue.dropped == 2 and [queue.take(0.0) for _ in range(4)] == [3, 4, 5, None]


def test_what_is_forgotten_is_not_written() -> None:
    queue = WriteQueue[int]()
    queue.offer(1)
    queue.offer(2)
    queue.forget(1)
    queue.forget(9)
    assert len(queue) == 1 and queue.take(0.0) == 2 and not queue.has_one(0.0)


def test_an_engine_without_room_is_left_alone_for_a_while() -> None:
    queue = WriteQueue[int]()
    queue.offer(1)
    queue.no_room(5.0)
    assert queue.take(5.0) is None and not queue.has_one(5.0)
    assert queue.take(5.0 + NO_ROOM_SECONDS) == 1
