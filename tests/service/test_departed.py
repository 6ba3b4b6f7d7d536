"""Connections that leave while their memory stays mapped: how many are kept, and what looking after them costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.block.identity import Namespace, TenantKeys
from kvstore.client.framing import FramedSocket
from kvstore.protocol import messages as m
from kvstore.service import sessions as departed
from kvstore.service.connections import DoorLimits
from kvstore.service.dispatch import MAX_SHARES
from kvstore.service.sessions import ClientState, DisconnectedClients, Session
from programs import start_python
from service.sidecar import Sidecar, wire_to
from tiering.dram.extents import MappedExtent
from tiering.tier import SLOT_BITS
from waiting import FakeClock, wait_until
from workbench import MODEL, OTHER_SECRET, SECRET, blank_pages, ids, random_pages, same_tokens, small_layout

RARELY = DoorLimits(sweep_seconds=10.0)
"""The door sweeps so seldom that what a test counts is of its own sweeps."""

LEAVE = """
import json, sys
from kvstore.block.errors import Unreachable
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from kvstore.client.framing import FramedSocket
from tiering.dram.extents import MappedExtent
from tiering.tier import SLOT_BITS
from torture.peer import packed_namespace

path, cycles, keys = sys.argv[1], int(sys.argv[2]), [bytes([number]) * 32 for number in range(1, 4)]
mapped, refusals = [], []
for cycle in range(cycles):
    try:
        wire = FramedSocket(path, "leaver", b"", SystemClock(), 60.0)
    except Unreachable as error:
        refusals.append(str(error))
        continue
    number = wire.call(m.OpenNamespace(packed_namespace(), [8192]), 60.0).answer.grant.number
    if not cycle:
        reply = wire.call(m.Reserve(number, keys, 0), 60.0).answer.reply
        wire.call(m.Commit(reply.reservation, 0, 0, [[bytes(16)] * 2] * 3), 60.0)
    lease = wire.call(m.LeasePrefix(number, keys, 0, 60_000.0), 60.0).answer.reply
    extents = sorted({place >> SLOT_BITS for place in lease.places[0]})
    answered = wire.call(m.Extents(extents, False), 60.0)
    for descriptor, extent in zip(answered.descriptors, answered.answer.extents, strict=True):
        mapped.append(MappedExtent(descriptor, extent.size_bytes, writable=False))
    if cycle % 2:
        wire.call(m.Release([lease.lease]), 60.0)
    wire.close()
print(json.dumps([len(mapped), refusals]), flush=True)
sys.stdin.readline()
"""


@contextmanager
def a_leaver(path: Path, cycles: int) -> Iterator[tuple[int, list[str]]]:
    """A process that came in, mapped memory, and left, so many times; what it has mapped, and how it was refused."""
    process = start_python(LEAVE, path, cycles)
    try:
        assert process.stdout is not None
        mapped, refusals = json.loads(process.stdout.readline())
        yield mapped, refusals
    finally:
        process.kill()
        process.communicate()


def swept(sidecar: Sidecar) -> int:
    """Questions to the kernel in one sweep."""
    before = sidecar.sessions.departed.looks
    sidecar.sessions.sweep()
    return sidecar.sessions.departed.looks - before


@pytest.mark.slow
def test_a_client_that_leaves_thousands_of_times_and_keeps_its_memory(tmp_path: Path) -> None:
    """It is turned away from some point on, and told why; a sweep costs no more for it; nobody else is the worse."""
    limits = DoorLimits(connections=96, sweep_seconds=10.0)
    with Sidecar(tmp_path, limits, dram="4MiB") as sidecar:
        others = tmp_path / "others.sock"
        sidecar.door.listen(others, sidecar.store.tenant_keys("other"))
        sidecar.path, mine = others, sidecar.path
        with sidecar.client() as other:
            handle = other.namespace(model=MODEL, layout=small_layout())
            with a_leaver(mine, 3000) as (mapped, refusals):
                share = limits.connections // 2
                assert share <= mapped < 2 * share and len(refusals) == 3000 - mapped
                assert all(f"{share} connections of this tenant are gone" in line for line in refusals)
                assert all("door.connections" in line and "\n" not in line for line in refusals)
                wait_until(lambda: len(sidecar.sessions.departed) == mapped)
                wait_until(lambda: sidecar.store.usage().leases == -(-mapped // 2))
                assert [swept(sidecar) for _ in range(5)] == [min(mapped, departed.LOOKS)] * 5
                pages, blank = random_pages(handle.layout, 8), blank_pages(handle.layout, 8)
                assert handle.put(ids(512), pages).stored == 8
                with handle.lease(handle.match(ids(512)), deadline_ms=60_000) as lease:
                    assert handle.get(lease, blank).tokens == 512
                assert same_tokens(pages, blank, range(512))
                with sidecar.client() as another:  # a further connection of the other tenant
                    assert another.namespace(model=MODEL, layout=small_layout()).match(ids(512)).blocks == 8
                assert len(sidecar.sessions.departed) == mapped
            wait_until(lambda: not sidecar.sessions.sweep())
            usage = sidecar.store.usage()
            assert (usage.leases, usage.dram.zombie, usage.pinned_bytes) == (0, 0, 0)
            assert sidecar.sessions.departed.count_of(sidecar.store.tenant_keys("default").tenant) == 0
            sidecar.path = mine
            with sidecar.client() as again:
                assert again.namespace(model=MODEL, layout=small_layout()).match(ids(512)).blocks == 0


def opened(path: Path, blocks: int) -> tuple[FramedSocket, int, list[int]]:
    """A connection, a lease of so many blocks that it stored, and the extents that they are in."""
    wire = wire_to(path)
    granted = wire.call(m.OpenNamespace(Namespace("m", small_layout(), "raw").pack(), [8192]), 60.0).answer
    assert isinstance(granted, m.Granted)
    keys = [number.to_bytes(32, "big") for number in range(1, blocks + 1)]
    reserved = wire.call(m.Reserve(granted.grant.number, keys, 0), 60.0).answer
    assert isinstance(reserved, m.Reserved)
    if reserved.reply.reservation:
        wire.call(m.Commit(reserved.reply.reservation, 0, 0, [[bytes(16)] * 2] * blocks), 60.0)
    leased = wire.call(m.LeasePrefix(granted.grant.number, keys, 0, 60_000.0), 60.0).answer
    assert isinstance(leased, m.Leased) and leased.reply.blocks == blocks
    return wire, leased.reply.lease, sorted({place >> SLOT_BITS for place in leased.reply.places[0]})


def mapped(wire: FramedSocket, extents: list[int]) -> list[MappedExtent]:
    answered = wire.call(m.Extents(extents, False), 60.0)
    assert isinstance(answered.answer, m.ExtentsReply)
    return [
        MappedExtent(descriptor, extent.size_bytes, writable=False)
        for descriptor, extent in zip(answered.descriptors, answered.answer.extents, strict=True)
    ]


def disconnected(among: DisconnectedClients, number: int, secret: bytes = SECRET) -> ClientState:
    """One of a tenant's that had mapped an extent."""
    caller = ClientState(number, Session(b"", TenantKeys.derive(secret), "e"), extents={7})
    assert among.add(caller)
    return caller


class Slow:
    """The kernel, which does not answer before it may, but about the third connection."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()

    def unmapped(self, extents: Sequence[int], holder: int) -> tuple[int, int, float]:
        self.asked.release()
        assert holder == 3 or self.may_answer.wait(20.0)
        return len(extents), len(extents), 0.0


@pytest.mark.parametrize("is_same", [True, False])
def test_two_threads_may_look_at_connections_of_one_tenant_at_a_time(is_same: bool) -> None:
    """One of them asks, also where both look at the same connection; the other one knows nothing new."""
    kernel = Slow()
    departed = DisconnectedClients(kernel)
    first, other, of_another_tenant = (disconnected(departed, n, OTHER_SECRET if n == 3 else SECRET) for n in (1, 2, 3))
    seen: list[tuple[bool, int]] = []
    thread = threading.Thread(target=lambda: seen.append(departed.look(first)))
    thread.start()
    assert kernel.asked.acquire(timeout=20.0)
    assert departed.look(first if is_same else other) == (True, 0)
    assert departed.look(first if is_same else other) == (True, 0), "and the first look goes on"
    assert departed.look(of_another_tenant) == (False, 1), "only its own tenant's are not asked about"
    kernel.may_answer.set()
    thread.join(20.0)
    assert seen == [(False, 1)] and departed.look(other) == (False, 1)


def test_whoever_maps_nothing_is_forgotten_at_once(tmp_path: Path) -> None:
    """Without any sweep, and without a question to the kernel."""
    with Sidecar(tmp_path, RARELY, dram="1MiB") as sidecar:
        wires = [opened(sidecar.path, 4)[0] for _ in range(8)]
        for wire in wires:
            wire.close()
        wait_until(lambda: sidecar.store.usage().leases == 0 and len(sidecar.sessions.departed) == 0)
        assert sidecar.sessions.departed.looks == 0


def test_an_extent_that_was_let_go_of_is_not_asked_about_again(tmp_path: Path) -> None:
    """One question a sweep, however many extents a connection had; all of them before it gives anything back."""
    with Sidecar(tmp_path, RARELY, dram="1MiB", extent="64KiB") as sidecar:
        wire, _, extents = opened(sidecar.path, 40)
        assert len(extents) >= 8
        held = mapped(wire, extents)
        wire.close()
        wait_until(lambda: len(sidecar.sessions.departed) == 1)
        wait_until(lambda: sidecar.sessions.departed.looks == 1)  # when it left
        assert [swept(sidecar) for _ in range(3)] == [1, 1, 1]
        asked = next(iter(sidecar.sessions.departed._gone.values())).mapped
        last = held[extents.index(asked[-1])]
        del held
        assert swept(sidecar) == len(extents)
        assert [swept(sidecar) for _ in range(3)] == [1, 1, 1]
        assert len(sidecar.sessions.departed) == 1 and sidecar.store.usage().leases == 1
        del last
        assert swept(sidecar) == 1
        assert len(sidecar.sessions.departed) == 0 and sidecar.store.usage().leases == 0


def test_sweeps_come_round_to_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who still map something do not stand before those who do not."""
    monkeypatch.setattr(departed, "LOOKS", 3)
    monkeypatch.setattr("kvstore.service.sessions.LOOKS", 3)
    with Sidecar(tmp_path, RARELY, dram="1MiB") as sidecar:
        held = []
        for number in range(10):
            wire, _, extents = opened(sidecar.path, 4)
            held.append(mapped(wire, extents))
            wire.close()
            wait_until(lambda number=number: len(sidecar.sessions.departed) == number + 1)  # type: ignore[misc]
        wait_until(lambda: sidecar.sessions.departed.looks == 10)
        del held[7:]
        assert [swept(sidecar) for _ in range(4)] == [3] * 4
        assert len(sidecar.sessions.departed) == 7 == sidecar.store.usage().leases
        held.clear()
        assert [swept(sidecar) for _ in range(3)] == [3, 3, 1]
        assert len(sidecar.sessions.departed) == 0 == sidecar.store.usage().leases


def test_one_connection_is_not_given_the_same_extent_without_end(tmp_path: Path) -> None:
    """The kernel walks over each descriptor's lock whenever it is asked."""
    with Sidecar(tmp_path, RARELY, dram="1MiB") as sidecar:
        wire, _, extents = opened(sidecar.path, 4)
        held = [mapped(wire, extents) for _ in range(MAX_SHARES)]
        answer = wire.call(m.Extents(extents, False), 60.0).answer
        assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, answer
        assert f"{MAX_SHARES} times" in answer.text and "\n" not in answer.text
        assert isinstance(wire.call(m.Extents(extents, True), 60.0).answer, m.Failed)  # to write in is the same
        other, _, _ = opened(sidecar.path, 4)
        assert len(mapped(other, extents)) == len(extents)
        held.clear()
        assert len(mapped(wire, extents)) == len(extents)
        wire.close()
        other.close()
