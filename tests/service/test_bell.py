"""Memory changes hands between clients: whoever maps what was given back is rung for, and lets go of it at once."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from descriptors import open_files, opened_since
from kvstore.block.account import MissReason
from kvstore.block.errors import Unreachable
from kvstore.client import socket_door as remote_door
from kvstore.client.handle import NamespaceHandle, PutResult
from kvstore.client.sidecar_store import SidecarStore
from kvstore.protocol import messages as m
from programs import run_python, start_python
from service.sidecar import Sidecar, sidecar_fixture, wire_to
from tiering.dram.unmap_wait import TENANT_SECONDS, WAIT_SECONDS
from tiering.frame import digest
from torture.peer import Peer, opened_by, reply_in
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

KEYS = [bytes([number]) * 32 for number in range(200)]
sidecar = sidecar_fixture(dram="1MiB", extent="64KiB")
"""Sixteen extents, of five blocks each."""


def put(handle: NamespaceHandle, number: int, blocks: int = 8) -> PutResult:
    return handle.put(ids(64 * blocks, 100_000 * number), random_pages(handle.layout, blocks))


def opened(store: SidecarStore, model: str) -> NamespaceHandle:
    return store.namespace(model=model, layout=small_layout())


class Listener(Peer):
    """A bare client with a bell."""

    def __init__(self, sidecar: Sidecar) -> None:
        super().__init__(str(sidecar.path))
        assert isinstance(self.ask(m.Hello(1, 1, "test")), m.Welcome)
        self.memory: list[int] = []
        self.notify_pipe = self.ask_for_bell()
        self.namespace = opened_by(self)

    def ask_for_bell(self) -> int:
        (notify_pipe,) = self.handed_over(m.Ping(True))
        return notify_pipe

    def handed_over(self, verb: m.Verb) -> list[int]:
        self.socket.sendall(m.pack(m.Request(1, verb)))
        piece, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 18, m.MAX_EXTENTS)
        assert isinstance(reply_in(piece).answer, m.NotifyPipeReply | m.ExtentsReply)
        return descriptors

    def fill(self, blocks: int) -> None:
        """Have memory, and keep it as if it were mapped."""
        reserved = self.ask(m.Reserve(self.namespace, KEYS[:blocks], 0))
        assert isinstance(reserved, m.Reserved) and len(reserved.reply.places[0]) == blocks
        extents = sorted({place >> 24 for place in reserved.reply.places[0]})
        self.memory += self.handed_over(m.Extents(extents, True))
        digests = [[digest(bytes(4096))] * 2 for _ in range(blocks)]
        assert self.ask(m.Commit(reserved.reply.reservation, 0, 0, digests)) == m.Counted(blocks)

    def rings(self, seconds: float = 20.0) -> int:
        """How often it was rung, once it was."""
        ready, _, _ = select.select([self.notify_pipe], [], [], seconds)
        return len(os.read(self.notify_pipe, 64)) if ready else 0

    def told(self) -> list[int]:
        """What a ping tells."""
        self.socket.sendall(m.pack(m.Request(2, m.Ping())))
        reply = self.reply()
        assert reply is not None
        return reply.retired

    def close(self) -> None:
        super().close()
        for descriptor in (self.notify_pipe, *self.memory):
            os.close(descriptor)


@pytest.fixture
def listener(sidecar: Sidecar) -> Iterator[Listener]:
    listener = Listener(sidecar)
    yield listener
    listener.close()


# The main job ---------------------------------------------------------------------------------------------------------


def test_no_put_is_refused_while_memory_changes_hands(sidecar: Sidecar) -> None:
    """Each of the two fills all of it in its turn, and the other one's client does nothing."""
    with sidecar.client() as one, sidecar.client() as two:
        handles = [opened(one, "one"), opened(two, "two")]
        wait_until(lambda: all(store._door._run.notify_pipe is not None for store in (one, two)))  # type: ignore[union-attr]
        for turn in range(6):
            for number in range(12):
                assert put(handles[turn % 2], 100 * turn + number) == PutResult(0, 8, None, None)


OTHER = """
import sys
from kvstore.client.sidecar_store import open_sidecar
from kvstore.block.codec import codec_named
from kvstore.node import SystemClock
from waiting import wait_until
from workbench import ids, random_pages, small_layout

store = open_sidecar(sys.argv[1], codecs=codec_named, clock=SystemClock(), session="a" * 32, engine="other")
handle = store.namespace(model="other", layout=small_layout())
print(handle.put(ids(64 * 75), random_pages(handle.layout, 75)).stored, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_client_that_is_stopped_keeps_nobody_waiting_for_long(sidecar: Sidecar) -> None:
    """It maps nearly all memory, and lets go of it when it runs again."""
    with ExitStack() as stack:
        other = start_python(OTHER, sidecar.path)
        stack.callback(other.wait)
        stack.callback(other.kill)
        assert other.stdout is not None and other.stdout.readline() == "75\n"
        store = stack.enter_context(sidecar.client())
        handle = opened(store, MODEL)
        assert put(handle, 0, blocks=5).stored == 5, "the last extent"
        other.send_signal(signal.SIGSTOP)
        for number in range(1, 30):
            result = put(handle, number, blocks=5)
            assert result.stored == 5 or result.reason is MissReason.DEADLINE
        spent, _ = next(iter(sidecar.core._room._unmap_wait._spent.values()))
        assert 0 < spent < TENANT_SECONDS + WAIT_SECONDS
        other.send_signal(signal.SIGCONT)
        wait_until(lambda: put(handle, 100, blocks=40).reason is None)


# Who is rung for, and when --------------------------------------------------------------------------------------------


def test_it_is_rung_once_until_the_client_asks(sidecar: Sidecar, listener: Listener) -> None:
    listener.fill(40)
    with sidecar.client() as store:
        handle = opened(store, MODEL)
        number = 0
        while listener.rings(0) == 0:
            put(handle, number := number + 1)
            assert number < 1000
        caller = next(one for one in sidecar.sessions._callers.values() if one.session.engine == "test")
        given_back = sidecar.core.blocks.dram.mapped_still
        for extent in sorted(caller.extents):
            given_back(extent)
        assert listener.rings(0.2) == 0, "it has not asked yet"
        assert listener.told()
        assert listener.rings(0.2) == 0, "the answer to a ping is read by whoever asked"
        given_back(min(caller.extents))
        assert listener.rings() == 1


def test_whoever_maps_nothing_of_it_is_not_rung_for(sidecar: Sidecar, listener: Listener) -> None:
    with sidecar.client() as one, sidecar.client() as two:
        handles = [opened(one, "one"), opened(two, "two")]
        stored = [put(handles[turn % 2], 100 * turn + number) for turn in range(4) for number in range(12)]
    assert sidecar.core.blocks.dram.retired > 10, [(one.stored, one.reason) for one in stored]
    assert listener.rings(0.2) == 0


def test_it_is_rung_where_an_answer_that_nobody_waits_for_told_it(sidecar: Sidecar, listener: Listener) -> None:
    listener.fill(40)
    assert sidecar.core.drop(listener.namespace) == 40
    assert listener.rings() == 1
    listener.told()
    listener.fill(40)
    # Before the door looks at what was given back: as if the answer to this had come first.
    sidecar.core.blocks.dram.mapped_still = lambda extent: None
    assert sidecar.core.drop(listener.namespace) == 40
    assert isinstance(listener.ask(m.Release([1])), m.Done)
    assert listener.rings() == 1


# What a bell costs, and what it cannot do -----------------------------------------------------------------------------


@pytest.mark.slow
def test_bells_are_closed_with_their_connections_and_for_others(sidecar: Sidecar) -> None:
    before = open_files("pipe:")
    listener = Listener(sidecar)
    for _ in range(100):
        notify_pipe = listener.ask_for_bell()
        assert select.select([listener.notify_pipe], [], [], 20)[0] and os.read(listener.notify_pipe, 1) == b"", (
            "it has another one"
        )
        os.close(listener.notify_pipe)
        listener.notify_pipe = notify_pipe
    wait_until(lambda: opened_since(before, "pipe:").total() == 2)
    listener.close()
    wait_until(lambda: not opened_since(before, "pipe:"))


def test_whoever_fills_his_bell_or_closes_it_holds_up_nobody(sidecar: Sidecar, listener: Listener) -> None:
    full = os.open(f"/proc/self/fd/{listener.notify_pipe}", os.O_WRONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(full, bytes(4096))
    (caller,) = sidecar.sessions._callers.values()
    listener.fill(40)
    assert sidecar.core.drop(listener.namespace) == 40
    wait_until(lambda: caller.is_rung)
    assert caller.notify_pipe is not None, "it is full, so that there is something to be read"
    listener.told()
    os.close(full)
    os.close(listener.notify_pipe)
    listener.notify_pipe = os.open(os.devnull, os.O_RDONLY)
    listener.fill(40)
    assert sidecar.core.drop(listener.namespace) == 40
    wait_until(lambda: caller.notify_pipe is None)
    assert listener.told()


def test_a_client_without_a_bell_is_told_when_it_asks(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of an earlier version; and it asks more often while memory moves."""
    monkeypatch.setattr(sidecar.sessions, "new_notify_pipe", lambda caller: None)
    asked: list[float] = []
    look_after = remote_door.SocketDoor.look_after

    def noted(self: remote_door.SocketDoor) -> float:
        asked.append(look_after(self))
        return asked[-1]

    monkeypatch.setattr(remote_door.SocketDoor, "look_after", noted)
    with sidecar.client() as one, sidecar.client() as two:
        handles = [opened(one, "one"), opened(two, "two")]
        assert put(handles[0], 0, blocks=75).stored == 75
        wait_until(lambda: put(handles[1], 1, blocks=40).reason is None)
        usual = one._door._limits.ping
        assert {usual, usual / remote_door.MOVING_SHARE} >= set(asked) and usual / remote_door.MOVING_SHARE in asked


def test_an_answer_without_its_bell_is_no_bell(sidecar: Sidecar) -> None:
    """A process that has no descriptor left is handed none."""
    wire = wire_to(sidecar.path)
    receive = wire._receive_piece

    def without() -> bytes:
        piece = receive()
        while wire._descriptors:
            os.close(wire._descriptors.popleft())
        return piece

    wire._receive_piece = without  # type: ignore[method-assign]
    answered = wire.call(m.Ping(True), 10.0)
    assert answered.answer == m.NotifyPipeReply() and not answered.descriptors
    assert isinstance(wire.call(m.Ping(), 10.0).answer, m.Done)
    wire.close()


@pytest.mark.slow
def test_a_descriptor_of_something_else_is_no_bell(sidecar: Sidecar) -> None:
    wire = wire_to(sidecar.path)
    receive, before = wire._receive_piece, open_files("/dev/null")

    def another() -> bytes:
        piece = receive()
        wire._descriptors.appendleft(os.open(os.devnull, os.O_RDONLY))
        return piece

    wire._receive_piece = another  # type: ignore[method-assign]
    with pytest.raises(Unreachable):
        wire.call(m.Ping(True), 10.0)
    wire.close()
    assert not opened_since(before, "/dev/null")


# A client's own life --------------------------------------------------------------------------------------------------


def test_one_thread_listens_however_often_it_is_asked(sidecar: Sidecar) -> None:
    def listening() -> int:
        return sum(thread.name == "kv-bell" for thread in threading.enumerate())

    wait_until(lambda: listening() == 0)
    with sidecar.client() as store:
        opened(store, MODEL)
        wait_until(lambda: listening() == 1)
        for _ in range(5):
            store._door.look_after()
        assert listening() == 1
    wait_until(lambda: listening() == 0)


def test_a_client_asks_for_a_bell_until_there_is_one(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(sidecar.sessions, "new_notify_pipe", lambda caller: None)
        store = sidecar.client()
        opened(store, MODEL)
        store._door.look_after()
        assert store._door._run is not None and store._door._run.notify_pipe is None
    wait_until(lambda: store._door._run is not None and store._door._run.notify_pipe is not None)
    store.close()


def test_what_a_client_mapped_is_let_go_of_when_the_sidecar_hangs_up(sidecar: Sidecar) -> None:
    """At once, and not when it would have asked the next time."""
    with sidecar.client() as store:
        handle = opened(store, MODEL)
        assert put(handle, 0).stored == 8
        store._door._limits = replace(store._door._limits, ping=1000.0)
        run = store._door._run
        assert run is not None
        wait_until(lambda: run.notify_pipe is not None)
        store._door._touch.nudge.set()  # from now on it asks every thousand seconds
        (connection,) = sidecar.door._connections
        wait_until(lambda: not store._door._touch.nudge.is_set())
        connection.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: store._door._run is not None and store._door._run is not run)
        assert put(handle, 0).present == 8


FORKING = """
import os, sys
from kvstore.client.sidecar_store import open_sidecar
from kvstore.block.codec import codec_named
from kvstore.node import SystemClock
from waiting import wait_until
from workbench import ids, random_pages, small_layout

store = open_sidecar(sys.argv[1], codecs=codec_named, clock=SystemClock(), session="a" * 32, engine="other")
handle = store.namespace(model="other", layout=small_layout())
wait_until(lambda: store._door._run.notify_pipe is not None)

def is_open(inode):
    for number in range(1024):
        try:
            if os.fstat(number).st_ino == inode:
                return True
        except OSError:
            pass
    return False

bell = os.fstat(store._door._run.notify_pipe._descriptor).st_ino
assert is_open(bell)
child = os.fork()
assert child or store._door._run is None
assert child or not is_open(bell)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handle.put(ids(64), random_pages(handle.layout, 1)).stored + handle.match(ids(64)).blocks >= 1
else:
    assert handle.put(ids(64), random_pages(handle.layout, 1)).stored == 1
    wait_until(lambda: store._door._run.notify_pipe is not None)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_forked_child_has_a_bell_of_its_own(sidecar: Sidecar) -> None:
    run_python(FORKING, sidecar.path)
