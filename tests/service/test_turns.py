"""Who comes first is decided between tenants, whatever connections they make; two of them share a sidecar here.

The door's thread is held until all have asked, so that what it serves first is its choice and not a race.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvstore.block.identity import Namespace
from kvstore.protocol import messages as m
from kvstore.service import local_door
from kvstore.service.accounting import Lines, ServiceShare, Turns
from kvstore.service.connections import (
    LARGE_BURST_BYTES,
    LARGE_BYTES,
    LARGE_LINE,
    Connection,
    DoorLimits,
    Listener,
)
from kvstore.service.sessions import ClientState
from service.sidecar import Sidecar
from service.test_sent_descriptors import held
from torture.peer import Peer, come_in, opened_by
from waiting import SOON_SECONDS, wait_until
from workbench import small_layout

CROWD = 40


# The choice -----------------------------------------------------------------------------------------------------------


def served(shares: dict[str, ServiceShare], wants: dict[str, Iterator[float]], pieces: int) -> list[tuple[str, float]]:
    """That many pieces of those who always want another one."""
    told = []
    for _ in range(pieces):
        name = min(shares, key=lambda one: shares[one].starts_at)
        cost = next(wants[name])
        shares[name].begin()
        shares[name].pay(cost)
        told.append((name, cost))
    return told


@pytest.mark.parametrize("seed", range(20))
def test_tenants_that_always_want_more_get_the_same(seed: int) -> None:
    random, turns = Random(seed), Turns()
    most = {name: random.choice([1.0, 10.0, 1000.0]) for name in "abcd"}
    wants = {name: iter(lambda most=one: random.uniform(0.0, most), None) for name, one in most.items()}
    shares = {name: ServiceShare(turns) for name in most}
    got = dict.fromkeys(most, 0.0)
    for name, cost in served(shares, wants, 3000):
        got[name] += cost
        for one in most:
            for other in most:
                assert got[one] - got[other] <= most[one] + most[other], f"seed {seed}"


@pytest.mark.parametrize("was_away", [0, 1, 1000])
def test_whoever_comes_is_next_and_has_saved_up_nothing(was_away: int) -> None:
    """However long the others were served before, or the newcomer was away."""
    turns = Turns()
    shares = {name: ServiceShare(turns) for name in "ab"}
    endless = {name: iter(lambda: 1.0, None) for name in "abc"}
    served(shares, endless, 500)
    shares["c"] = ServiceShare(turns)
    if was_away:
        served({"c": shares["c"]}, endless, 10)
        served({name: shares[name] for name in "ab"}, endless, 2 * was_away)
    order = [name for name, _ in served(shares, endless, 30)]
    assert "c" in order[:3]
    assert all(8 <= order.count(name) <= 12 for name in "abc")


def test_a_free_thread_is_for_the_tenant_with_fewest_at_work() -> None:
    lines: Lines[str] = Lines(8, "t")
    one, other = lines.new_line(), lines.new_line()
    one.waiting.extend(f"a{at}" for at in range(100))
    assert [lines.begin() for _ in range(7)] == ["a0", "a1", "a2", "a3", "a4", "a5", None]  # two are left to others
    other.waiting.extend("bcd")
    assert [lines.begin() for _ in range(3)] == ["b", "c", None]
    one.end(1.0)
    assert lines.begin() == "d"
    other.end(1.0)
    other.end(1.0)
    assert [lines.begin() for _ in range(2)] == ["a6", None]  # six are at work for it again
    one.end(1.0)
    one.leave_out(lambda piece: piece < "a8")
    assert lines.begin() == "a8" and (one.running, other.running) == (6, 1)


def test_a_tenant_that_is_alone_has_all_threads() -> None:
    lines: Lines[int] = Lines(3, "t")
    line = lines.new_line()
    line.waiting.extend(range(5))
    assert [lines.begin() for _ in range(4)] == [0, 1, 2, None]


# At the door ----------------------------------------------------------------------------------------------------------


class Crowded:
    """A sidecar with two tenants' sockets, which says in which order it serves."""

    def __init__(self, directory: Path) -> None:
        self.sidecar = Sidecar(directory, dram="1MiB")
        self.other_path = directory / "other.sock"
        self.sidecar.door.listen(self.other_path, self.sidecar.store.tenant_keys("other"))
        self.order: list[str] = []
        self._peers: list[Peer] = []
        release_request = self.sidecar.sessions.release_request

        def watched(caller: ClientState, request: str) -> None:
            self.order.append(request[:1])
            release_request(caller, request)

        self.sidecar.sessions.release_request = watched  # type: ignore[method-assign]

    def come_in(self, path: Path) -> Peer:
        self._peers.append(come_in(path, SOON_SECONDS))
        return self._peers[-1]

    def leave(self, peer: Peer) -> None:
        self._peers.remove(peer)
        peer.close()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self.sidecar.__exit__()


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Crowded]:
    one = Crowded(tmp_path)
    yield one
    one.close()


def say(peer: Peer, what: str, times: int = 1) -> None:
    peer.socket.sendall(m.pack(m.Request(2, m.ReleaseRequest(what))) * times)


def hear(peer: Peer, times: int = 1) -> None:
    for _ in range(times):
        assert peer.reply() is not None


def test_a_tenant_that_works_does_not_wait_for_connections_that_asked_for_nothing_yet(crowded: Crowded) -> None:
    worker = crowded.come_in(crowded.other_path)
    for _ in range(300):
        worker.ask(m.Ping())
    fresh = [crowded.come_in(crowded.sidecar.path) for _ in range(CROWD)]
    with held(crowded.sidecar):
        for peer in fresh:
            say(peer, "a", 20)
        say(worker, "b")
    hear(worker)
    for peer in fresh:
        hear(peer, 20)
    assert crowded.order.index("b") <= 1 and crowded.order.count("a") == 20 * CROWD


def test_one_connection_gets_as_much_as_many_of_another_tenant(crowded: Crowded) -> None:
    worker = crowded.come_in(crowded.other_path)
    crowd = [crowded.come_in(crowded.sidecar.path) for _ in range(CROWD)]
    with held(crowded.sidecar):
        for peer in crowd:
            say(peer, "a", 10)
        say(worker, "b", 100)
    hear(worker, 100)
    last = len(crowded.order) - crowded.order[::-1].index("b")
    assert crowded.order[:last].count("a") <= 110
    for peer in crowd:
        hear(peer, 10)


def test_an_answer_given_at_once_costs_no_change_of_what_is_watched_and_no_round_more(crowded: Crowded) -> None:
    """A change is a system call, and a round some of them; the next client waits meanwhile."""
    worker, door = crowded.come_in(crowded.other_path), crowded.sidecar.door
    selector, take_turn = door._selector, door._take_turn
    changes: list[str] = []
    for name in ("register", "unregister", "modify"):
        change = getattr(selector, name)
        setattr(selector, name, lambda *given, name=name, change=change: changes.append(name) or change(*given))
    goes_on: list[bool] = []
    door._take_turn = lambda ready: goes_on.append(take_turn(ready)) or goes_on[-1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(10):
        worker.ask(m.Ping())
    assert changes == [] and goes_on and not any(goes_on)


def test_nothing_is_read_of_a_connection_whose_turn_has_not_come(
    crowded: Crowded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns end after one message each, so all the others wait: none of them fills the sidecar's memory meanwhile."""
    monkeypatch.setattr(local_door, "TURN_SECONDS", -1.0)
    crowd = [crowded.come_in(crowded.sidecar.path) for _ in range(CROWD)]
    take_turn = crowded.sidecar.door._take_turn
    waiting: list[int] = []
    read: list[Connection] = []

    def watched(ready: dict[Connection, None]) -> bool:
        has_more = take_turn(ready)
        waiting.append(len(ready))
        read.extend(one for one in ready if one.interest & selectors.EVENT_READ)
        return has_more

    crowded.sidecar.door._take_turn = watched  # type: ignore[method-assign]
    with held(crowded.sidecar):
        for peer in crowd:
            say(peer, "a", 2)
    for peer in crowd:
        hear(peer, 2)
    assert max(waiting) == CROWD and read == []


def test_connections_and_hellos_are_paid_for_by_their_tenant(crowded: Crowded) -> None:
    """Whoever hangs up and comes anew gains nothing by it."""
    worker = crowded.come_in(crowded.other_path)
    tenants = {listener.path: listener.share for listener in crowded.sidecar.door._listeners}
    worker.ask(m.Ping())
    before = {path: share.starts_at for path, share in tenants.items()}
    for _ in range(10):
        crowded.leave(crowded.come_in(crowded.sidecar.path))
    for _ in range(10):
        silent = Peer(str(crowded.sidecar.path), SOON_SECONDS)
        silent.close()
    crowded.come_in(crowded.sidecar.path)
    spent = {path: share._ends_at - before[path] for path, share in tenants.items()}
    assert spent[crowded.sidecar.path] > 60 > spent[crowded.other_path]
    operator = crowded.come_in(crowded.sidecar.admin_path)
    operator.ask(m.Ping())
    assert tenants[crowded.sidecar.admin_path]._ends_at > before[crowded.sidecar.admin_path]


def test_a_tenant_that_opens_namespaces_does_not_wait_for_fresh_connections_that_do(crowded: Crowded) -> None:
    """One thread opens them, and reads large messages."""
    worker = crowded.come_in(crowded.other_path)
    space = m.OpenNamespace(Namespace("m", small_layout(), "raw").pack(), [8192])
    granted = worker.ask(space)
    assert isinstance(granted, m.Granted)
    for _ in range(20):
        worker.ask(space)
    first, *fresh = [crowded.come_in(crowded.sidecar.path) for _ in range(CROWD)]
    large = "x" * LARGE_BYTES
    with crowded.sidecar.core.lock:  # which the first one waits for, and all behind it
        first.socket.sendall(m.pack(m.Request(2, space)))
        ours, theirs = (one.lines[LARGE_LINE] for one in crowded.sidecar.door._listeners if one.is_tenants)
        wait_until(lambda: ours.running == 1)
        for peer in fresh:
            say(peer, "a" + large)
        wait_until(lambda: len(ours.waiting) == len(fresh))
        say(worker, "b" + large)
        wait_until(lambda: len(theirs.waiting) == 1)
    for peer in (first, worker, *fresh):
        hear(peer)
    assert crowded.order[0] == "b" and crowded.order.count("a") == len(fresh)


def test_a_request_for_the_pool_does_not_wait_behind_those_of_another_tenant(crowded: Crowded) -> None:
    """They are reserved for while nothing is served; those of who is gone never are."""
    worker, gone = crowded.come_in(crowded.other_path), crowded.come_in(crowded.sidecar.path)
    crowd = [crowded.come_in(crowded.sidecar.path) for _ in range(CROWD)]
    numbers = {peer: opened_by(peer) for peer in (worker, gone, *crowd)}
    door, started, goes_on = crowded.sidecar.door, [], threading.Event()
    reserve = crowded.sidecar.core.reserve

    def watched(namespace: int, keys: list[bytes], *rest: Any, **named: Any) -> Any:
        started.append(keys[0][:1])
        goes_on.wait()
        return reserve(namespace, keys, *rest, **named)

    crowded.sidecar.core.reserve = watched  # type: ignore[method-assign, assignment]
    verbs = [m.Reserve(0, [b"a" + bytes([at]) * 31], 0) for at in range(4)]
    try:
        line = door._listeners[0].lines[0]
        for at, peer in enumerate((*crowd, gone), 1):
            for verb in verbs:
                peer.socket.sendall(m.pack(m.Request(2, msgspec.structs.replace(verb, namespace=numbers[peer]))))
            wait_until(lambda count=4 * at: line.running + len(line.waiting) == count)
        assert line.running == len(started) == 12
        crowded.leave(gone)
        wait_until(lambda: line.running + len(line.waiting) == 4 * CROWD)
        worker.socket.sendall(m.pack(m.Request(2, m.Reserve(numbers[worker], [b"b" * 32], 0))))
        wait_until(lambda: len(started) == 13)
        assert started[-1] == b"b"
    finally:
        goes_on.set()
    for peer in (worker, *crowd):
        hear(peer, 1 if peer is worker else 4)
    assert len(started) == 4 * CROWD + 1 and not line.running


def test_what_takes_long_does_not_wait_behind_that_of_another_tenant(crowded: Crowded) -> None:
    """Of eight threads one tenant has six at most, however many connections it has."""
    worker = crowded.come_in(crowded.other_path)
    crowd = [crowded.come_in(crowded.sidecar.path) for _ in range(CROWD)]
    numbers = {peer: opened_by(peer) for peer in (worker, *crowd)}
    started: list[bytes] = []
    goes_on = threading.Event()

    def watched(namespace: int, keys: list[bytes], seconds: float) -> tuple[int, None]:
        started.append(keys[0][:1])
        goes_on.wait()
        return len(keys), None

    crowded.sidecar.core.persist = watched  # type: ignore[method-assign, assignment]
    try:
        line = crowded.sidecar.door._listeners[0].lines[1]
        for at, peer in enumerate(crowd, 1):
            peer.socket.sendall(m.pack(m.Request(2, m.Persist(numbers[peer], [b"a" * 32], 1.0))))
            wait_until(lambda count=at: line.running + len(line.waiting) == count)
        wait_until(lambda: line.running == len(started) == min(6, CROWD))
        worker.socket.sendall(m.pack(m.Request(2, m.Persist(numbers[worker], [b"b" * 32], 1.0))))
        wait_until(lambda: b"b" in started)
    finally:
        goes_on.set()
    for peer in (worker, *crowd):
        hear(peer)
    assert len(started) == CROWD + 1 and not line.running and not line.waiting


def test_a_connection_that_is_made_anew_owes_no_more_than_a_second() -> None:
    """However much one that is gone asked for."""
    limits = DoorLimits()
    with socket.socketpair()[0] as listening:
        listener = Listener(Path("door"), listening, None, None)
        connection = made(listener, 0.0, m.MAX_BODY_BYTES)
        connection.pay(1e9)
        connection.large_bytes = -1e12
        connection.discard(limits, 0.0)
        later = made(listener, 1.1, 0)
        assert later.may_ask(limits, 1.1) and not made(listener, 0.9, 0).may_ask(limits, 0.9)
        large = made(listener, 1.1, LARGE_BYTES + 1)
        assert large.may_ask(limits, 1.1)


@pytest.mark.parametrize("length", [0, LARGE_BYTES, LARGE_BYTES + 1, m.MAX_BODY_BYTES])
def test_a_connection_that_is_made_anew_has_saved_up_nothing(length: int) -> None:
    """Its buckets are as full as the emptiest of those that are gone; whoever stays has no use of others' going."""
    limits = DoorLimits()
    with socket.socketpair()[0] as listening:
        anew, stays = [Listener(Path("door"), listening, None, None) for _ in range(2)]
        taken = [0, 0]
        connection = made(stays, 0.0, length)
        while connection.may_ask(limits, 0.0):
            taken[0] += 1
        while True:
            connection = made(anew, 0.0, length)
            is_taken = connection.may_ask(limits, 0.0)
            made(anew, 0.0, length).discard(limits, 0.0)  # one that asked for nothing
            connection.discard(limits, 0.0)
            if not is_taken:
                break
            taken[1] += 1
        assert 10 < taken[1] <= taken[0] <= taken[1] + 1  # sums are rounded
        assert anew.buckets(limits, 60.0) == (limits.burst, LARGE_BURST_BYTES)


def made(listener: Listener, now: float, length: int) -> Connection:
    """A connection with a message of that length."""
    connection = Connection(socket.socketpair()[0], listener, now, DoorLimits())
    connection.read += length.to_bytes(m.LENGTH_BYTES, "little")
    return connection
