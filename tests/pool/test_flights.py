"""One leader at a time; who joined is told once, and of every end."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.pool.flights import MAX_JOINED, Flights

KEYS = st.integers(0, 5)
LEADERS = st.integers(0, 3)


class FlightsMachine(RuleBasedStateMachine):
    """Against a table of who leads what."""

    @initialize(most=st.integers(1, 8))
    def begin_all(self, most: int) -> None:
        self.most, self.now = most, 0.0
        self.flights: Flights[int] = Flights(most)
        self.led: dict[int, tuple[int, float]] = {}
        self.waiting: Counter[tuple[int, int]] = Counter()
        self.told: list[tuple[int, int]] = []
        self.joined = 0

    def over(self, keys: list[int]) -> None:
        """What joined these must have been told, in any order."""
        want = sorted((key, ticket) for key, ticket in self.waiting if key in keys)
        assert sorted(self.told) == want
        for key, ticket in want:
            del self.waiting[key, ticket]
        self.told.clear()
        for key in keys:
            del self.led[key]

    @rule(keys=st.lists(KEYS, unique=True), leader=LEADERS, seconds=st.integers(0, 9))
    def begin(self, keys: list[int], leader: int, seconds: int) -> None:
        mine = self.flights.begin(keys, leader, self.now, self.now + seconds)
        late = [key for key in keys if key in self.led and self.led[key][1] <= self.now]
        self.over(late)
        for key in keys:
            assert not (key in mine and key in self.led), "two leaders of one thing"
            if key in mine:
                self.led[key] = (leader, self.now + seconds)
            else:
                assert key in self.led or len(self.led) >= self.most

    @rule(key=KEYS)
    def join(self, key: int) -> None:
        ticket = self.joined = self.joined + 1
        joined = self.flights.join(key, lambda: self.told.append((key, ticket)))
        assert joined == (key in self.led)
        self.waiting.update([(key, ticket)] * joined)

    @rule(keys=st.lists(KEYS, unique=True), leader=LEADERS)
    def end(self, keys: list[int], leader: int) -> None:
        self.flights.end(keys, leader)
        self.over([key for key in keys if key in self.led and self.led[key][0] == leader])

    @rule(leader=LEADERS)
    def leader_dies(self, leader: int) -> None:
        self.flights.leave(leader)
        self.over([key for key, of in self.led.items() if of[0] == leader])

    @rule(seconds=st.integers(0, 5))
    def time_goes_on(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def as_many_as_are_led(self) -> None:
        if hasattr(self, "led"):
            assert len(self.flights) == len(self.led) <= self.most


TestFlights = FlightsMachine.TestCase
TestFlights.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_of_many_threads_each_thing_is_fetched_once() -> None:
    """All begin with the same things, and wait for what others lead."""
    flights: Flights[int] = Flights()
    fetched: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    lock, together = threading.Lock(), threading.Barrier(8)

    def told(key: int) -> None:
        with lock:
            ended[key] += 1

    joined: Counter[int] = Counter()

    def fetch(worker: int) -> None:
        together.wait()
        mine = flights.begin(range(100), worker, 0.0, 1.0)
        waits = [key for key in set(range(100)) - set(mine) if flights.join(key, partial(told, key))]
        with lock:
            fetched.update(mine)
            joined.update(waits)
        together.wait()  # none ends before all have begun
        flights.end(mine, worker)

    threads = [threading.Thread(target=fetch, args=(worker,)) for worker in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert fetched == Counter(range(100))
    assert joined == ended == Counter({key: 7 for key in range(100)})
    assert len(flights) == 0


def test_those_who_joined_one_flight_are_bounded() -> None:
    flights: Flights[int] = Flights()
    flights.begin([1], "leader", 0.0, 1.0)
    joined = sum(flights.join(1, lambda: None) for _ in range(MAX_JOINED + 5))
    assert joined == MAX_JOINED


def test_those_who_joined_are_told_when_their_leader_leaves() -> None:
    flights, told = Flights[str](), list[str]()
    assert flights.begin(["a", "b"], "leader", 0.0, 10.0) == ["a", "b"]
    assert [key for key in "abc" if flights.join(key, partial(told.append, key))] == ["a", "b"]
    flights.end(["a"], "leader")
    assert told == ["a"]
    flights.leave("leader")
    assert told == ["a", "b"] and not len(flights)
    assert flights.begin(["b"], "another", 1.0, 10.0) == ["b"]
