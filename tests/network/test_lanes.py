"""Lanes: so many threads and so many calls for each caller, and calls that wait for their clients are given up."""

from __future__ import annotations

import threading

from kvstore.network.lanes import CLIENT_SECONDS, ROOM_SECONDS, CallerLanes, Lane
from waiting import FakeClock, wait_until


class Client:
    """One that is waited for until the call is given up."""

    def __init__(self, lane: Lane) -> None:
        self.began, self.over = threading.Event(), threading.Event()
        self._lane = lane

    def call(self) -> None:
        with self._lane.waiting(self.over.set):
            self.began.set()
            self.over.wait(60)


def waiting(lane: Lane, count: int) -> list[Client]:
    clients = [Client(lane) for _ in range(count)]
    assert all(lane.submit(one.call) for one in clients)
    return clients


def done(lane: Lane) -> bool:
    ended = threading.Event()
    return lane.submit(ended.set) is not None and ended.wait(60)


def all_began(clients: list[Client]) -> None:
    for one in clients:
        assert one.began.wait(60)


def test_one_caller_s_lane_is_no_other_s() -> None:
    clock = FakeClock()
    lanes = CallerLanes(clock, threads=2, most=4, long_most=1)
    full = waiting(lanes.of("a"), 4)
    all_began(full[:2])
    assert not lanes.of("a").submit(lambda: None), "four are under way"
    assert lanes.of("a") is lanes.of("a") is not lanes.of("b")
    assert done(lanes.of("b")) and done(lanes.of("a", is_long=True))
    assert len(lanes.all()) == 3
    for one in full:
        one.over.set()
    for lane in lanes.all():
        lane.close()
    assert not lanes.of("b").submit(lambda: None), "it is closed"


def test_a_call_is_given_up_where_its_client_is_late() -> None:
    clock = FakeClock()
    lane = Lane("t", threads=2, most=8, clock=clock)
    (client,) = waiting(lane, 1)
    all_began([client])
    clock.advance(CLIENT_SECONDS)
    lane.give_up_late()
    assert not client.over.is_set()
    clock.advance(0.01)
    lane.give_up_late()
    assert client.over.wait(60)
    lane.close()


def test_one_more_makes_the_oldest_give_up_where_all_wait_for_their_clients() -> None:
    clock = FakeClock()
    lane = Lane("t", threads=2, most=8, clock=clock)
    first = waiting(lane, 1)
    all_began(first)
    second = waiting(lane, 1)
    all_began(second)
    clock.advance(ROOM_SECONDS / 2)
    (third,) = waiting(lane, 1)
    assert not first[0].over.is_set(), "it has not waited for long"
    clock.advance(ROOM_SECONDS)
    (fourth,) = waiting(lane, 1)
    assert first[0].over.wait(60) and not second[0].over.is_set() and third.began.wait(60)
    lane.give_up_late()  # the fourth waits for a thread
    assert second[0].over.wait(60) and fourth.began.wait(60)
    third.over.set()
    fourth.over.set()
    lane.close()


def test_anybodys_lane_cannot_be_filled() -> None:
    """As health's: each caller who comes has room at once."""
    clock = FakeClock()
    lane = Lane("t", threads=4, most=64, clock=clock, room_seconds=0.0)
    clients: list[Client] = []
    for _ in range(200):
        clients += waiting(lane, 1)
        assert clients[-1].began.wait(60)
    assert done(lane)
    wait_until(lambda: sum(not one.over.is_set() for one in clients) <= 4)
    for one in clients:
        one.over.set()
    lane.close()
