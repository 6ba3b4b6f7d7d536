"""Descriptors that a client sends: the door's thread drops none, since it would wait for as long as its close takes.

What takes long here is a TCP socket that lingers for a minute, of which the sidecar has the last descriptor. Others
have to be served meanwhile; the test ends the minute by closing the other side.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.protocol import messages as m
from kvstore.service import connections as door
from kvstore.service.connections import MOST_UNCLOSED, SO_PASSRIGHTS, Closer, DescriptorsSent
from service.sidecar import Sidecar
from torture.peer import Peer, come_in
from waiting import SOON_SECONDS, wait_until

LINGER_SECONDS = 60
PINGS = 4000  # the door reads nothing behind them before it has answered most of them


def kernel_refuses() -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        except OSError:
            return False
        return True


class Lingering:
    """A TCP socket that is full: its last close waits for the other side, which never reads."""

    def __init__(self) -> None:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            listening.bind(("127.0.0.1", 0))
            listening.listen(1)
            self.full = socket.create_connection(listening.getsockname())
            self.other, _ = listening.accept()
        self.full.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self.full.send(b"x" * 65536)
        self.full.setblocking(True)
        self.full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))

    def send_last(self, through: socket.socket, piece: bytes, flags: int = 0) -> None:
        """Send its descriptor beside some bytes, so that whoever drops it closes it."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self.full.fileno()))
        through.sendmsg([piece], [rights], flags)
        os.close(self.full.detach())

    def end(self) -> None:
        """Whoever waits in its close waits no more."""
        if self.other.fileno() < 0:
            return
        self.other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.other.close()
        if self.full.fileno() >= 0:
            self.full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            self.full.close()


@pytest.fixture
def lingering() -> Iterator[Callable[[], Lingering]]:
    made: list[Lingering] = []

    def make() -> Lingering:
        made.append(Lingering())
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sidecar's end, which may hold descriptors, and a client's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert door.may_hold_descriptors(ours)
        yield ours, theirs


@pytest.fixture
def older_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every socket may hold descriptors, as before Linux 6.16."""
    monkeypatch.setattr(door, "refuse_descriptors", lambda _: None)


@contextmanager
def held(sidecar: Sidecar, last: tuple[socket.socket, bytes] | None = None) -> Iterator[None]:
    """The door's thread reads nothing meanwhile, so that the sender's own close is not the last one. last: what it
    reads before and has not served yet."""
    notify, is_held, goes_on = sidecar.sessions.notify, threading.Event(), threading.Event()

    def wait() -> None:
        is_held.set()
        goes_on.wait()

    sidecar.sessions.notify = wait  # type: ignore[method-assign]
    if last is None:
        Peer(str(sidecar.path)).close()  # it wakes up
    else:
        last[0].sendall(last[1])
    assert is_held.wait(SOON_SECONDS)
    try:
        yield
    finally:
        sidecar.sessions.notify = notify  # type: ignore[method-assign]
        goes_on.set()


# Where the kernel refuses them ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not kernel_refuses(), reason="SO_PASSRIGHTS is there from Linux 6.16 on")
@pytest.mark.parametrize("flags", [0, socket.MSG_OOB])
@pytest.mark.parametrize("which", ["path", "admin_path"])
def test_descriptors_are_refused_to_the_sender_and_the_connection_is_served_on(
    sidecar: Sidecar, which: str, flags: int
) -> None:
    path, rights = getattr(sidecar, which), (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))
    nameless = Peer(str(path), SOON_SECONDS)  # it said no hello, and was not accepted yet perhaps
    with pytest.raises(PermissionError):
        nameless.socket.sendmsg([b"x"], [rights], flags)
    assert isinstance(nameless.ask(m.Hello(1, 1, "test")), m.Welcome)
    with pytest.raises(PermissionError):
        nameless.socket.sendmsg([b"x"], [rights], flags)
    assert isinstance(nameless.ask(m.Ping()), m.Done | m.Failed)
    nameless.close()


# Where it does not ----------------------------------------------------------------------------------------------------


def read_until_sent(sock: socket.socket) -> bytes:
    """What was read before descriptors were seen; a look goes on to what follows, so that it may be none."""
    read = b""
    with pytest.raises(DescriptorsSent):
        while True:
            read += door.receive(sock, 6)
    return read


@pytest.mark.parametrize("before", [b"", b"before"])
def test_bytes_that_descriptors_came_with_are_not_read(
    pair: tuple[socket.socket, socket.socket], before: bytes
) -> None:
    ours, theirs = pair
    reading, writing = os.pipe()
    theirs.sendall(before)
    socket.send_fds(theirs, [b"beside"], [writing] * 100)
    theirs.sendall(b"behind")
    os.close(writing)
    for _ in range(3):  # nothing was read of it, and none of them was dropped
        assert before.startswith(read_until_sent(ours))
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):  # the pipe's other end is open still
        os.read(reading, 1)
    ours.close()
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_descriptors_beside_an_out_of_band_byte_are_seen(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    reading, writing = os.pipe()
    theirs.sendall(b"before")
    theirs.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", writing))], socket.MSG_OOB)
    os.close(writing)
    assert b"before".startswith(read_until_sent(ours))
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    os.close(reading)


def say_nothing(sidecar: Sidecar) -> socket.socket:
    return Peer(str(sidecar.path), SOON_SECONDS).socket


def say_little(sidecar: Sidecar) -> socket.socket:
    sock = say_nothing(sidecar)
    sock.sendall(b"\1")
    return sock


def ask_much(sidecar: Sidecar) -> socket.socket:
    peer = come_in(sidecar.path)
    peer.socket.sendall(m.pack(m.Request(7, m.Ping())) * PINGS)
    return peer.socket


def ask_much_of_the_operators(sidecar: Sidecar) -> socket.socket:
    peer = come_in(sidecar.admin_path)
    peer.socket.sendall(m.pack(m.Request(7, m.Ping())) * 10)
    return peer.socket


WAYS = [say_nothing, say_little, ask_much, ask_much_of_the_operators]


@pytest.mark.parametrize("flags", [0, socket.MSG_OOB])
@pytest.mark.parametrize("way", WAYS)
def test_others_are_served_while_a_descriptor_that_was_sent_lingers(
    older_kernel: None,
    sidecar: Sidecar,
    lingering: Callable[[], Lingering],
    way: Callable[[Sidecar], socket.socket],
    flags: int,
) -> None:
    other = come_in(sidecar.path)
    full, sock = lingering(), way(sidecar)
    with held(sidecar):
        full.send_last(sock, m.pack(m.Request(8, m.Ping())), flags)
    sock.settimeout(SOON_SECONDS)
    with suppress(ConnectionError):
        while sock.recv(1 << 18):  # until it is hung up on
            pass
    assert isinstance(other.ask(m.Ping()), m.Done)
    assert isinstance(come_in(sidecar.path).ask(m.Ping()), m.Done)
    come_in(sidecar.admin_path).close()
    sock.close()
    assert isinstance(other.ask(m.Ping()), m.Done)


def test_others_are_served_while_what_lies_unread_behind_a_connection_lingers(
    older_kernel: None, sidecar: Sidecar, lingering: Callable[[], Lingering]
) -> None:
    """It is closed by the sidecar for another reason, a message that is none."""
    other = come_in(sidecar.path)
    for _ in range(3):
        full, peer = lingering(), come_in(sidecar.path)
        with held(sidecar, (peer.socket, b"\xff" * 8)):
            full.send_last(peer.socket, b"x")
        while peer.reply() is not None:
            pass
        assert isinstance(other.ask(m.Ping()), m.Done)


def unclosed(sidecar: Sidecar, full: Lingering) -> Closer:
    """Of a tenant: as many as may be, behind one that lingers."""
    closer = sidecar.door._listeners[0].closer
    with held(sidecar):
        full.send_last(say_nothing(sidecar), b"x")
    wait_until(lambda: len(sidecar.door) == 0 and len(closer) == 1)
    for one in [say_nothing(sidecar) for _ in range(MOST_UNCLOSED - 1)]:
        one.close()
    wait_until(lambda: len(closer) == MOST_UNCLOSED)
    return closer


def test_a_tenant_whose_closes_linger_has_a_bounded_number_of_them(
    older_kernel: None, sidecar: Sidecar, lingering: Callable[[], Lingering]
) -> None:
    full = lingering()
    closer = unclosed(sidecar, full)
    for _ in range(10):
        say_nothing(sidecar).close()
        operator = come_in(sidecar.admin_path)  # is let in, and the tenant's connections were looked at meanwhile
        operator.close()
        assert len(closer) == MOST_UNCLOSED
    full.end()
    assert isinstance(come_in(sidecar.path).ask(m.Ping()), m.Done)
    wait_until(lambda: len(closer) == 0)


def test_a_door_ends_while_those_who_wait_to_be_let_in_sent_descriptors(
    older_kernel: None, tmp_path: Path, lingering: Callable[[], Lingering]
) -> None:
    sidecar = Sidecar(tmp_path, dram="1MiB")
    first, second = lingering(), lingering()
    closer = unclosed(sidecar, first)
    waiting = say_nothing(sidecar)  # in the queue of the listening socket
    second.send_last(waiting, b"x")
    sidecar.door.close(1.0)
    assert sidecar.door._thread is None or not sidecar.door._thread.is_alive()  # it did not wait for either
    first.end()
    second.end()
    wait_until(lambda: len(closer) == 0)
    sidecar.store.close()
    waiting.close()
