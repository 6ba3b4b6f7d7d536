"""How long after its deadline a call of a remote engine ends, by the clock."""

from __future__ import annotations

import time

import pytest

from remote.between import Harm, proxy, saying
from remote.distance import distance
from remote.frames import frame, halves, key_of
from remote.test_valkey import on, server, slot, soon
from tiering.remote.driver import RemoteTimedOut
from valkey_server import ValkeyServer

__all__ = ["server"]
LIMIT, LATE = 0.2, 0.15  # how much later on a busy machine


@pytest.mark.parametrize("answer", [b"$", b"$6", b"$69632\r\n" + bytes(100)])
def test_half_an_answer_ends_at_the_deadline(answer: bytes) -> None:
    """And takes no processor until then: half a line is not looked at again and again."""
    with saying(answer) as port:
        engine = on(port)
        began, worked = time.monotonic(), time.thread_time()
        with pytest.raises(RemoteTimedOut):
            engine.read(key_of(1), slot(), soon(LIMIT))
        assert LIMIT <= time.monotonic() - began < LIMIT + LATE
        assert time.thread_time() - worked < LIMIT / 4
        engine.close()


@pytest.mark.parametrize("after", [0, 3, 5000])
def test_a_server_that_drips_ends_at_the_deadline(after: int, server: ValkeyServer) -> None:
    """Every byte comes in time; their sum does not."""
    server.empty()
    with proxy(server.port) as between:
        engine = on(between.port)
        engine.write(key_of(1), *halves(1), 0)
        between.plan(Harm.DRIP, after)
        began = time.monotonic()
        with pytest.raises(RemoteTimedOut):
            engine.read(key_of(1), slot(), soon(LIMIT))
        assert LIMIT <= time.monotonic() - began < LIMIT + LATE
        assert engine.read(key_of(1), into := slot()) and bytes(into) == frame(1)
        engine.close()


def test_a_connection_that_was_made_too_late_serves_the_next_call(server: ValkeyServer) -> None:
    server.empty()
    with distance(server.port) as way:
        engine = on(way.port)
        engine.write(key_of(1), *halves(1), 0)
        engine.close()
        way.seconds, engine = 0.05, on(way.port)  # connecting takes two round trips, a call one
        with pytest.raises(RemoteTimedOut):
            engine.exists([key_of(1)], soon(0.15))
        assert engine.exists([key_of(1)], soon(0.15)) == [True]
        assert way.connections == 2
        engine.close()
