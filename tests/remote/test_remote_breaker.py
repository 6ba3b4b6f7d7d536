"""When a remote engine is not asked."""

from __future__ import annotations

from tiering.remote.workers import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, MOST_FAILURES, RemoteBreaker


def opened(now: float = 0.0) -> RemoteBreaker:
    one = RemoteBreaker()
    for _ in range(MOST_FAILURES):
        one.failed(now, "silent")
    return one


def test_pauses_grow_to_a_bound() -> None:
    one, now, pauses = opened(), 0.0, []
    for _ in range(10):
        began = now
        while not one.takes_probe(now):
            now += 0.125
        pauses.append(now - began)
        one.probed(now, "silent")
        assert one.is_open
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 8.0] and set(pauses[4:]) == {LONGEST_PAUSE_SECONDS}


def test_after_a_good_probe_it_is_on_trial() -> None:
    one = opened()
    assert one.takes_probe(1.0)
    one.probed(1.0, "")
    assert not one.is_open
    one.failed(1.0, "silent")
    assert one.is_open and not one.takes_probe(1.0 + FIRST_PAUSE_SECONDS), "and the pause is longer"
