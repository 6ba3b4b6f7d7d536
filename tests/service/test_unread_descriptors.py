"""Descriptors that clients do not read: they are bounded by connection and by tenant, and cost nobody else any."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.protocol import messages as m
from kvstore.service import connections as door
from kvstore.service.connections import MOST_OF_CONNECTION, Connection, TenantUnread, Unread, share_of
from service.sidecar import Sidecar
from tiering.faults import SENT, FaultKind
from torture.peer import Peer, come_in
from waiting import wait_until

BELL = m.Ping(wants_bell=True)
SHARE = 150


# What the kernel says -------------------------------------------------------------------------------------------------


class Pair:
    """A connection's two ends, and what is counted of it."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.is_closed = False
        self.unread = Unread(self.ours, self)  # type: ignore[arg-type]

    def close(self, sock: socket.socket) -> None:
        self.is_closed = True
        sock.close()

    def send(self, count: int) -> None:
        self.unread.count()
        if count:
            self.unread.queued(count)
            socket.send_fds(self.ours, [b"answer"], [self.ours.fileno()] * count)
            self.unread.sent(count)
        else:
            self.ours.sendall(b"answer")
            self.unread.sent_behind()

    def read(self, answers: int) -> None:
        for _ in range(answers):
            _, descriptors, _, _ = socket.recv_fds(self.theirs, len(b"answer"), 100)
            for one in descriptors:
                os.close(one)


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair()
    yield one
    one.ours.close()
    one.theirs.close()


@pytest.mark.parametrize(
    ("sent", "read", "left"),
    [
        ([3], 0, 3),
        ([3], 1, 0),
        ([3, 4], 0, 7),
        ([3, 4], 1, 7),  # the last of them were not read: they may be any
        ([3, 4], 2, 0),
        ([0, 0, 3], 2, 3),
        ([3, 0, 0], 0, 3),
        ([3, 0, 0], 1, 0),  # what was sent behind them says nothing of them
        ([0, 3, 0, 4, 0], 3, 7),
        ([0, 3, 0, 4, 0], 4, 0),
        ([0, 0], 0, 0),
    ],
)
def test_descriptors_are_unread_until_the_client_has_read_the_answer_that_they_came_with(
    pair: Pair, sent: list[int], read: int, left: int
) -> None:
    for count in sent:
        pair.send(count)
    pair.read(read)
    assert pair.unread.count() == left


def test_what_is_unread_when_a_connection_ends_counts_until_the_client_has_read_or_left(pair: Pair) -> None:
    other, tenant = Pair(), TenantUnread()
    for one in (pair, other):
        tenant.add(one.unread)
        one.send(10)
        tenant.ended(one.unread)
    assert tenant.count() == 20 and not pair.is_closed
    pair.read(1)
    assert pair.theirs.recv(1) == b""  # it was hung up on
    assert tenant.count() == 10 and pair.is_closed and not other.is_closed
    other.theirs.close()
    assert tenant.count() == 0 and other.is_closed


def test_shares_are_of_what_the_kernel_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
        most = min(soft, 1000) // 2
        assert [share_of(tenants) for tenants in (0, 1, 2, 1000)] == [most, most, most // 2, MOST_OF_CONNECTION]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# At the door ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sidecar]:
    """With two tenants, each of which may have as many unread as a share is."""
    monkeypatch.setattr(door, "MOST_OF_ALL", 2 * SHARE)
    assert share_of(2) == SHARE
    with Sidecar(tmp_path, dram="1MiB") as one:
        one.door.listen(tmp_path / "other.sock", one.store.tenant_keys("other"))
        yield one


def connections(sidecar: Sidecar) -> list[Connection]:
    """Of the first tenant, those that came first before others."""
    there = [one for one in sidecar.door._connections if one.listener is sidecar.door._listeners[0]]
    return sorted(there, key=lambda one: one.socket.fileno())


def rang(sidecar: Sidecar) -> int:
    return sidecar.door.usage().served.get("ping", 0)


def hear_all(peer: Peer, count: int) -> list[m.Answer]:
    answers = []
    for number in range(count):
        reply = peer.reply()
        assert reply is not None and reply.number == number
        answers.append(reply.answer)
    return answers


def ask_unheard(peer: Peer, count: int) -> None:
    peer.socket.sendall(b"".join(m.pack(m.Request(number, BELL)) for number in range(count)))


def test_who_does_not_read_descriptors_is_not_read_from(sidecar: Sidecar) -> None:
    peer, other = come_in(sidecar.path), come_in(sidecar.path)
    ask_unheard(peer, 500)
    wait_until(lambda: rang(sidecar) == MOST_OF_CONNECTION)
    for _ in range(20):
        assert isinstance(other.ask(m.Ping()), m.Done)
    for _ in range(2):  # it is looked at again in each sweep, and nothing is taken from it there either
        swept_at = sidecar.door._swept_at
        wait_until(lambda: sidecar.door._swept_at > swept_at)  # noqa: B023
    assert rang(sidecar) == MOST_OF_CONNECTION + 20
    assert all(isinstance(one, m.NotifyPipeReply) for one in hear_all(peer, 500))
    assert isinstance(peer.ask(BELL), m.NotifyPipeReply)
    peer.close()
    other.close()


def test_a_tenant_that_does_not_read_has_its_share_and_others_have_theirs(sidecar: Sidecar, tmp_path: Path) -> None:
    peers = [come_in(sidecar.path) for _ in range(4)]
    for peer in peers:
        ask_unheard(peer, MOST_OF_CONNECTION)
    wait_until(lambda: rang(sidecar) == 4 * MOST_OF_CONNECTION)
    assert sidecar.door._listeners[0].unread.count() == SHARE
    late = come_in(sidecar.path)
    assert isinstance(late.ask(BELL), m.Done)
    refused = late.ask(m.Extents([1], False))
    assert isinstance(refused, m.Failed) and refused.fault is m.RequestFault.BUSY and "read" in refused.text
    assert isinstance(late.ask(m.Ping()), m.Done)
    other = come_in(tmp_path / "other.sock")
    assert isinstance(other.ask(BELL), m.NotifyPipeReply)
    assert other.ask(m.Extents([1], False)) == m.ExtentsReply([])
    hear_all(peers[0], MOST_OF_CONNECTION)
    assert isinstance(late.ask(BELL), m.NotifyPipeReply)
    for peer in (*peers, late, other):
        peer.close()


def test_connections_that_ended_with_some_unread_count_for_their_tenant(sidecar: Sidecar) -> None:
    """The sidecar has a descriptor open for each, and asks the kernel about it: there are no more than connections."""
    most = sidecar.door._most(sidecar.door._listeners[0])
    ended = []
    for _ in range(most):
        peer = come_in(sidecar.path)
        ask_unheard(peer, 1)
        wait_until(lambda: all(one.unread.sent_count for one in connections(sidecar)))  # and no longer queued
        peer.socket.shutdown(socket.SHUT_WR)
        wait_until(lambda: not connections(sidecar))
        ended.append(peer)
    unread = sidecar.door._listeners[0].unread
    assert unread.ended_count == len(unread) == most
    late = Peer(str(sidecar.path))
    refused = late.ask(m.Hello(1, 1, "test"))
    assert (
        isinstance(refused, m.Failed) and refused.fault is m.RequestFault.BUSY and "have not read all" in refused.text
    )
    late.close()
    hear_all(ended[0], 1)  # one of them reads
    wait_until(lambda: sidecar.door._listeners[0].unread.ended_count == most - 1)
    come_in(sidecar.path).close()
    for peer in ended:
        peer.close()


def test_to_be_hung_up_on_frees_no_share(sidecar: Sidecar) -> None:
    """The descriptors are under way for as long as the client keeps its end open."""
    (tenant, *_), kept = sidecar.door._listeners, []
    for _ in range(4):
        peer = come_in(sidecar.path)
        ask_unheard(peer, MOST_OF_CONNECTION - 1)
        wait_until(lambda: not any(one.has_message() or one.read for one in connections(sidecar)))
        peer.socket.sendall(b"\xff" * 8)
        wait_until(lambda: not connections(sidecar))
        kept.append(peer)
    assert tenant.unread.count() == SHARE
    late = come_in(sidecar.path)
    assert isinstance(late.ask(BELL), m.Done)
    assert isinstance(
        hear_all(kept[0], MOST_OF_CONNECTION - 1)[-1], m.NotifyPipeReply
    )  # what was sent can be read still
    assert isinstance(late.ask(BELL), m.NotifyPipeReply)
    for peer in kept[1:]:
        peer.close()
    wait_until(lambda: tenant.unread.count() == 0 and not tenant.unread._holding)
    late.close()
    kept[0].close()


# Where the kernel sends no more of them -------------------------------------------------------------------------------

_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24
_VERSION_3 = 0x20080522


def give_up_privileges() -> None:
    """This thread is bound by RLIMIT_NOFILE from now on, as a service user's are."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE)
    assert libc.capset(header, data) == 0


class Hoard:
    """Descriptors of this user that are under way and that nobody reads: as many as the kernel allows."""

    def __init__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []

    def begin(self) -> None:
        most = max(map(int, os.listdir("/proc/self/fd"))) + 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, self._limits[0]), self._limits[1]))
        sent = 0
        with suppress(OSError):  # ETOOMANYREFS, where this thread has no privileges either
            while sent <= most:
                self._pairs.append(socket.socketpair())
                socket.send_fds(self._pairs[-1][0], [b"x"], [0] * 200)
                sent += 200

    def end(self) -> None:
        for ours, theirs in self._pairs:
            ours.close()
            theirs.close()
        self._pairs.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


@pytest.fixture
def hoard(sidecar: Sidecar) -> Iterator[Hoard]:
    notify = sidecar.sessions.notify

    def once() -> None:
        sidecar.sessions.notify = notify  # type: ignore[method-assign]
        give_up_privileges()

    sidecar.sessions.notify = once  # type: ignore[method-assign]
    come_in(sidecar.path).close()
    assert sidecar.sessions.notify is notify
    one = Hoard()
    one.begin()
    yield one
    one.end()


def test_an_answer_that_the_kernel_does_not_send_waits_and_others_are_served(sidecar: Sidecar, hoard: Hoard) -> None:
    faults = sidecar.store.faults
    peers, other = [come_in(sidecar.path) for _ in range(3)], come_in(sidecar.path)
    for peer in peers:
        peer.socket.sendall(m.pack(m.Request(7, BELL)) + m.pack(m.Request(8, m.Ping())))
    wait_until(lambda: any(one.what == SENT and one.count > 10 for one in faults.now()))  # it is tried again and again
    assert set(faults.failing[SENT]) == {FaultKind.NO_DESCRIPTORS}
    assert isinstance(other.ask(m.Ping()), m.Done)
    assert len(connections(sidecar)) == 4
    hoard.end()
    for peer in peers:
        replies = [peer.reply(), peer.reply()]
        assert [(one.number, type(one.answer)) for one in replies if one] == [(7, m.NotifyPipeReply), (8, m.Done)]
    assert SENT not in faults.failing
    for peer in (*peers, other):
        peer.close()
