"""A sidecar that hangs: one request of a client is late, and no other waits until it answers again."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from asking import Asking
from kvstore.block.account import MissReason
from kvstore.cli import ask
from kvstore.client.framing import LOOK_SECONDS, FramedSocket, TimedOut
from kvstore.client.handle import NamespaceHandle
from kvstore.client.pending import PendingReply
from kvstore.client.socket_door import CallLimits
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from service.sidecar import Sidecar, patient
from service.test_engines import lease_of
from service.test_serve import serving
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, random_pages, same_tokens, small_layout

LAYOUT = small_layout()
PAGES = random_pages(LAYOUT, 8)
CLOCK = SystemClock()
LONG = 60.0
AT_ONCE = 20.0
"""Of verbs that may take `LONG`: a third of it is no measure of speed."""


def stop(pid: int) -> None:
    """Until none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all((one / "stat").read_text().rpartition(")")[2].split()[0] == "T" for one in tasks.iterdir()))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a sidecar printed that all tests here stop and continue."""
    with serving(tmp_path_factory.mktemp("sidecar"), "--nvme", "off") as (_, said):
        yield said


@contextmanager
def client(said: dict[str, Any], **limits: float) -> Iterator[NamespaceHandle]:
    """Of a sidecar that holds `ids(512)`. All verbs but a look-up have a minute, unless the test says otherwise."""
    with kvstore.open(f"unix:{said['serving'][0]}") as store:
        handle = patient(store).namespace(model=MODEL, layout=LAYOUT)  # type: ignore[arg-type]
        assert handle.put(ids(512), PAGES).reason is None
        handle.door._limits = CallLimits(**{"match": 0.2, "lease": LONG, "fill": LONG, **limits})  # type: ignore
        yield handle


def reason_of(ask: Callable[[], Any]) -> MissReason | None:
    answer = ask()
    return answer.reason if answer is not None else None


def is_back(handle: NamespaceHandle) -> bool:
    return handle.match(ids(512)).blocks == 8


def held(said: dict[str, Any]) -> tuple[int, int]:
    """Leases and reservations that the sidecar knows of."""
    facts = ask.stat(str(Path(said["serving"][0]).with_name("admin.sock")), CLOCK)
    return facts.leases, facts.reservations


@pytest.mark.slow
def test_after_one_time_out_every_verb_misses_at_once_until_a_ping_is_answered(said: dict[str, Any]) -> None:
    with client(said) as handle:
        match, lease, other = handle.match(ids(512)), lease_of(handle), lease_of(handle)
        ticket = other.ticket()
        verbs: dict[str, Callable[[], Any]] = {
            "match": lambda: handle.match(ids(512)),
            "lease": lambda: handle.lease(match, deadline_ms=LONG * 1000),
            "put": lambda: handle.put(ids(512, 1), PAGES),
            "attach": lambda: handle.attach(ticket),
            "submit_match": lambda: handle.submit_match(ids(512), deadline_ms=LONG * 1000).poll(),
            "submit_lease": lambda: handle.submit_lease(match, deadline_ms=LONG * 1000).poll(),
        }
        with stopped(said["pid"]):
            assert handle.match(ids(512)).reason is MissReason.DEADLINE
            started = time.monotonic()
            for _ in range(20):
                assert {name: reason_of(ask) for name, ask in verbs.items()} == dict.fromkeys(
                    verbs, MissReason.UNREACHABLE
                )
            missed = handle.match(ids(530))
            assert missed.account.to_dict()["misses"] == {"unreachable": 512, "partial_block": 18}
            assert "has not answered" in missed.detail
            with pytest.raises(kvstore.Unreachable):
                Asking(handle.door).drop(handle.number)  # type: ignore[attr-defined]
            blank = blank_pages(LAYOUT, 8)
            assert handle.get(lease, blank).tokens == 512, "its memory is mapped"
            assert same_tokens(PAGES, blank, range(512))
            lease.release()
            assert time.monotonic() - started < AT_ONCE
        wait_until(lambda: is_back(handle))
        assert handle.put(ids(512, 1), PAGES).stored == 8
        other.release()
        wait_until(lambda: held(said) == (0, 0))


@pytest.mark.slow
def test_a_put_outlives_a_sidecar_that_is_late_with_everything_for_a_moment(said: dict[str, Any]) -> None:
    """As where the machine has no memory to give: longer than a look-up may take is not silent yet. It is looked at
    twice meanwhile."""
    with client(said, connect=5.0, ping=600.0) as handle:
        touch = handle.door._touch  # type: ignore[attr-defined]
        touch.nudge.set()  # the last ping that comes by itself: one under way would not be a suspected sidecar's
        wait_until(lambda: not touch.nudge.is_set())
        assert is_back(handle)
        stop(said["pid"])
        goes_on = threading.Timer(2.5 * LOOK_SECONDS, os.kill, (said["pid"], signal.SIGCONT))
        goes_on.start()
        try:
            result = handle.put(ids(512, 50_000), PAGES)
        finally:
            goes_on.join()
        assert (result.stored, result.reason) == (8, None), result.detail
        wait_until(lambda: is_back(handle))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["lease", "put", "attach", "submit_lease"])
def test_whatever_is_late_first_nobody_waits_behind_it(said: dict[str, Any], verb: str) -> None:
    """What may be long on its way does not tell a silent sidecar from a slow one: the ping that follows does."""
    with client(said, lease=0.1) as handle:
        match, other = handle.match(ids(512)), lease_of(handle)
        ticket = other.ticket()
        first: dict[str, Callable[[], Any]] = {
            "lease": lambda: handle.lease(match, deadline_ms=1),
            "put": lambda: handle.put(ids(64, 3), random_pages(LAYOUT, 1), deadline_ms=100),
            "attach": lambda: handle.attach(ticket),
            "submit_lease": lambda: wait_until(handle.submit_lease(match, deadline_ms=1).poll),
        }
        with stopped(said["pid"]):
            assert first[verb]().reason is MissReason.DEADLINE
            handle.door._limits = CallLimits(match=LONG, lease=LONG, fill=LONG)  # type: ignore[attr-defined]
            wait_until(lambda: handle.door._run.breaker.is_open)  # type: ignore[attr-defined]
            started = time.monotonic()
            assert handle.match(ids(512)).reason is MissReason.UNREACHABLE
            assert handle.put(ids(512, 1), PAGES).reason is MissReason.UNREACHABLE
            assert time.monotonic() - started < AT_ONCE
        other.release()
        wait_until(lambda: is_back(handle))
        wait_until(lambda: held(said) == (0, 0))


@pytest.mark.slow
def test_a_sidecar_that_answered_behind_a_ping_and_fell_silent_is_found_out(said: dict[str, Any]) -> None:
    """The ping is still on its way when another answer comes, and that is the last one."""
    with client(said, ping=0.01, connect=0.1) as handle:
        door = handle.door
        with stopped(said["pid"]):
            wait_until(lambda: door._run.breaker.is_open and door._run.pinged is not None)
            door._run.wire.heard_at = time.monotonic()
            door._run.breaker.answered()
            wait_until(lambda: door._run.breaker.is_open)
        wait_until(lambda: is_back(handle))


def test_one_ping_is_under_way_however_long_it_takes(said: dict[str, Any]) -> None:
    with client(said, ping=0.01, connect=0.02) as handle:
        with stopped(said["pid"]):
            wait_until(lambda: handle.door._run.breaker.is_open)  # type: ignore[attr-defined]
            wire = handle.door._run.wire  # type: ignore[attr-defined]
            numbers = repr(wire._numbers)
            for _ in range(100):
                assert handle.match(ids(512)).reason is MissReason.UNREACHABLE
                time.sleep(0.002)
            assert repr(wire._numbers) == numbers, "nothing else was sent"
            assert len(wire._asked) == 1
        wait_until(lambda: is_back(handle))


def test_a_reservation_that_came_too_late_is_given_back(said: dict[str, Any]) -> None:
    with client(said) as handle:
        keys = handle.hashed(ids(512, 7)).keys
        with stopped(said["pid"]):
            reply = Asking(handle.door).reserve(handle.number, keys, 0, 0, None, None, 0.1)
            assert reply.reason is MissReason.DEADLINE and not reply.reservation
        wait_until(lambda: is_back(handle))
        wait_until(lambda: held(said) == (0, 0))
        began = time.monotonic()  # its answer may yet be under way
        wait_until(lambda: handle.put(ids(512, 7), PAGES).stored == 8)
        assert time.monotonic() - began < 25, "and not `in_flight` for half a minute"


def test_a_put_does_not_wait_long_for_a_sidecar_that_is_silent(said: dict[str, Any]) -> None:
    with client(said, fill=20.0) as handle:
        with stopped(said["pid"]):
            result = handle.put(ids(512, 5), PAGES)
            assert (result.present, result.stored, result.reason) == (0, 0, MissReason.UNREACHABLE)
        wait_until(lambda: is_back(handle))


def test_a_put_whose_commit_is_late_says_so_and_leaves_nothing(said: dict[str, Any]) -> None:
    with client(said, fill=0.3) as handle:
        pid = said["pid"]

        class StopsIt:
            def begin(self) -> bool:
                stop(pid)
                return True

            def end(self) -> None:
                pass

        try:
            result = handle.put(ids(512, 5), PAGES, reading=StopsIt())
            assert (result.stored, result.reason) == (0, MissReason.DEADLINE)
            wait_until(lambda: handle.door._run.breaker.is_open)  # a ping told
            result = handle.put(ids(512, 6), PAGES)
            assert result.reason is MissReason.UNREACHABLE
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: is_back(handle))
        wait_until(lambda: held(said) == (0, 0))


@pytest.mark.slow
def test_a_new_connection_that_nobody_answers_costs_one_verb(tmp_path: Path, said: dict[str, Any]) -> None:
    """The listener of a sidecar that hangs takes connections all the same."""
    path = tmp_path / "silent.sock"
    with client(said) as handle, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen(64)
        door: Any = handle.door
        door._path = str(path)
        door._run.wire.close()
        wait_until(lambda: door._is_silent or handle.match(ids(512)).reason is None)
        door._limits = CallLimits(connect=LONG, match=LONG, fill=LONG, lease=LONG)
        started = time.monotonic()
        for _ in range(20):
            assert handle.match(ids(512)).reason is MissReason.UNREACHABLE
            assert handle.put(ids(512, 1), PAGES).reason is MissReason.UNREACHABLE
        assert time.monotonic() - started < AT_ONCE


def test_a_request_that_is_slow_does_not_keep_others_from_a_sidecar_that_answers(
    sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    handle.put(ids(512), PAGES)
    door: Any = handle.door
    handle.match(ids(512))
    lock = sidecar.core.lock
    with lock:  # verbs of the store wait, and a ping is answered
        reply = Asking(door).reserve(handle.number, handle.hashed(ids(512, 2)).keys, 0, 0, None, None, 0.05)
        assert reply.reason is MissReason.DEADLINE
        before = door._run.wire.heard_at
        wait_until(lambda: door._run.wire.heard_at > before)
        assert not door._run.breaker.is_open
    assert handle.match(ids(512)).blocks == 8


class Ticking(SystemClock):
    """A hundredth of a second goes by with each look."""

    seconds = 0.0

    def monotonic_seconds(self) -> float:
        self.seconds += 0.01
        return self.seconds


def test_answers_to_others_that_never_end_keep_nobody_beyond_his_deadline(sidecar: Sidecar) -> None:
    flood = m.pack(m.Reply(7, m.Leased(m_lease(0))))
    pieces = []
    wire = FramedSocket(str(sidecar.path), "test", b"s" * 16, CLOCK, 10.0)

    def flooded() -> bytes:
        pieces.append(1)
        assert len(pieces) < 100, "it reads on, whatever the time is"
        return flood

    wire._clock, wire._receive_piece = Ticking(), flooded  # type: ignore[method-assign]
    with pytest.raises(TimedOut):
        wire.call(m.Ping(), 0.05)
    assert 1 <= len(pieces) <= 5 and not wire.closed
    wire.close()


def m_lease(lease: int) -> Any:
    """A reply of a few thousand blocks."""
    return kvstore.protocol.door.LeaseReply(
        lease, 0, 4000, (list(range(4000)),), ([b"d" * 16] * 4000,), list(range(4000))
    )


FORGOTTEN: dict[str, tuple[Callable[[NamespaceHandle, Any], object], type[m.Answer], int]] = {
    "leases that are cancelled": (
        lambda handle, match: handle.submit_lease(match, deadline_ms=5000).cancel(),
        m.Leased,
        0,
    ),
    "leases that nobody keeps": (lambda handle, match: bool(handle.submit_lease(match, deadline_ms=5000)), m.Leased, 0),
    "look-ups that are cancelled": (lambda handle, match: handle.submit_match(ids(512)).cancel(), m.Matched, 1),
    "look-ups that nobody keeps": (lambda handle, match: bool(handle.submit_match(ids(512))), m.Matched, 1),
    "changes that are cancelled": (lambda handle, match: handle.submit_changes(1).cancel(), m.Changed, 0),
    "leases of some of its blocks": (
        lambda handle, match: handle.submit_lease(match, first_token=128, deadline_ms=5000).cancel(),
        m.Leased,
        0,
    ),
}
"""What is asked for and forgotten; its answer, and how many of that kind somebody does wait for."""


@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_nobody_waits_for_any_more_is_not_decoded_and_still_given_back(
    sidecar: Sidecar, handle: NamespaceHandle, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Forgotten answers about thousands of blocks would cost the next verb of the client their decoding."""
    forget, kind, awaited = FORGOTTEN[name]
    handle.put(ids(512), PAGES)
    match = handle.match(ids(512))
    decoded: list[object] = []
    whole = m.unpack_answer

    def counted(raw: Any) -> Any:
        decoded.append(answer := whole(raw))
        return answer

    monkeypatch.setattr(m, "unpack_answer", counted)
    for _ in range(20):
        forget(handle, match)
    assert handle.match(ids(512)).blocks == 8
    wait_until(lambda: sidecar.store.usage().leases == 0)
    assert sum(isinstance(answer, kind) for answer in decoded) == awaited


@pytest.mark.slow
def test_a_namespace_is_opened_at_the_sidecar_that_follows_one_that_hung(tmp_path: Path) -> None:
    """The one that hangs is killed while somebody waits for it."""
    with serving(tmp_path, "--nvme", "off") as (_, said), kvstore.open(f"unix:{said['serving'][0]}") as store:
        patient(store).namespace(model=MODEL, layout=LAYOUT)  # type: ignore[arg-type]
        door = store._door  # type: ignore[union-attr]
        door._limits = CallLimits(match=0.05, open=LONG)
        hung = door._run
        stop(said["pid"])
        wait_until(lambda: hung.breaker.is_open)
        opened: list[NamespaceHandle] = []
        waiting = threading.Thread(target=lambda: opened.append(store.namespace(model="another", layout=LAYOUT)))
        waiting.start()
        os.kill(said["pid"], signal.SIGKILL)  # its keeper starts another one
        waiting.join(AT_ONCE)
        assert opened and door._run is not hung
        assert opened[0].put(ids(512), PAGES).reason is None


@pytest.mark.slow
def test_a_poll_never_waits_for_a_sidecar_that_is_stopped(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off") as (_, said):
        store = kvstore.open(f"unix:{said['serving'][0]}")
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        handle.put(ids(512), PAGES)
        match = handle.match(ids(512))
        os.kill(said["pid"], signal.SIGSTOP)
        try:
            took: list[float] = []
            for number in range(20):  # also when the socket takes no more
                start = time.perf_counter()
                asked: list[PendingReply[Any]] = [handle.submit_match(ids(64 * 2000), deadline_ms=50) for _ in range(5)]
                asked.append(handle.submit_lease(match, deadline_ms=20, request="a"))
                submitted = time.monotonic()
                store.release_request("b")
                answers = list[Any]()

                def is_answered(asked: list[PendingReply[Any]] = asked, answers: list[Any] = answers) -> bool:
                    one = time.perf_counter()
                    answers[:] = [pending.poll() for pending in asked]
                    took.append((time.perf_counter() - one) / len(asked))
                    return None not in answers

                wait_until(is_answered)
                assert time.monotonic() < submitted + 5, "it is due after 70 ms"
                assert {answer.reason for answer in answers} <= {MissReason.DEADLINE, MissReason.UNREACHABLE}
                assert answers[-1].account.asked == 512
                if not number:
                    assert {answer.reason for answer in answers} == {MissReason.DEADLINE}
                    assert time.perf_counter() - start >= 0.05
            assert statistics.quantiles(took, n=20)[-1] < 0.001, "19 of 20; the machine is not ours alone"
            start = time.perf_counter()
            store.release_request("a")
            assert time.perf_counter() - start < 0.05
        finally:
            os.kill(said["pid"], signal.SIGCONT)
        patient(store)
        wait_until(lambda: wait_until(handle.submit_match(ids(512)).poll).blocks == 8)
        lease = lease_of(handle)
        assert handle.get(lease, blank_pages(LAYOUT, 8)).tokens == 512
        lease.release()
        store.close()


@pytest.mark.slow
def test_nothing_that_is_submitted_waits_for_a_sidecar_that_is_not_there(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "64MiB") as (_, said):
        store = kvstore.open(f"unix:{said['serving'][0]}")
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        handle.put(ids(512), PAGES, durability="disk")
    took = list[float]()

    def are_all_asked() -> bool:
        start = time.perf_counter()
        match = handle.submit_match(ids(512)).poll()
        took.append(time.perf_counter() - start)
        assert match is None or match.reason is MissReason.UNREACHABLE
        return len(took) == 200

    wait_until(are_all_asked)
    assert statistics.quantiles(took, n=20)[-1] < 0.002
    with serving(tmp_path, "--nvme", "64MiB"):
        patient(store)
        wait_until(lambda: wait_until(handle.submit_match(ids(512)).poll).blocks == 8)  # no blocking call was made
        lease = wait_until(handle.submit_lease(wait_until(handle.submit_match(ids(512)).poll), deadline_ms=5000).poll)
        blank = blank_pages(LAYOUT, 8)
        assert handle.get(lease, blank).tokens == 512 and same_tokens(PAGES, blank, range(512))
        lease.release()
    store.close()
