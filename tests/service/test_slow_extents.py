"""A tenant whose memory takes long to hand out, or to ask about, waits for itself, and nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.client.framing import FramedSocket
from kvstore.protocol import messages as m
from kvstore.service.connections import DoorLimits
from kvstore.service.dispatch import ALLOWED_SECONDS, RARELY
from kvstore.service.sessions import SELDOM, SLOW_SECONDS, DisconnectedClients, SlowTenants
from service.sidecar import Sidecar, wire_to
from service.test_departed import disconnected, opened
from tiering.dram.extents import MappedExtent
from tiering.dram.unmap_wait import Unmapped
from waiting import FakeClock
from workbench import OTHER_SECRET, SECRET


class Time:
    """now: it goes on as a test says. price: what the processor works for each time that it is asked for that."""

    now = worked = price = 0.0

    def seconds(self) -> float:
        return self.now

    def thread_seconds(self) -> float:
        self.worked += self.price
        return self.worked


def test_a_tenant_that_took_long_waits_and_no_other() -> None:
    time = Time()
    slow = SlowTenants(time.seconds, RARELY, ALLOWED_SECONDS)
    assert not slow.took(b"a", SLOW_SECONDS / 2) and not slow.waits(b"a")
    assert slow.took(b"a", ALLOWED_SECONDS + 1.5 * SLOW_SECONDS)
    assert slow.waits(b"a") and not slow.waits(b"b")
    time.now += 1.4 * RARELY * SLOW_SECONDS
    assert slow.waits(b"a")
    time.now += 0.2 * RARELY * SLOW_SECONDS
    assert not slow.waits(b"a")


def test_a_few_slow_hand_overs_are_allowed() -> None:
    """A virtual machine counts what its host took from it as a thread's time."""
    slow, each, count = SlowTenants(Time().seconds, RARELY, ALLOWED_SECONDS), 3 * SLOW_SECONDS, 0
    while not slow.waits(b"a"):
        slow.took(b"a", each)
        count += 1
    assert count == int(ALLOWED_SECONDS / each) + 1


def test_slow_hand_overs_take_a_hundredth_of_the_time() -> None:
    time, spent = Time(), 0.0
    slow = SlowTenants(time.seconds, RARELY, ALLOWED_SECONDS)
    for _ in range(10_000):
        time.now += 0.01
        if not slow.waits(b"a"):
            slow.took(b"a", 0.015)
            spent += 0.015
    assert time.now / RARELY <= spent <= time.now / RARELY + ALLOWED_SECONDS + 0.015


def handed_over(wire: FramedSocket, extents: Sequence[int]) -> int | m.Failed:
    answered = wire.call(m.Extents(list(extents), False), 60.0)
    if isinstance(answered.answer, m.Failed):
        return answered.answer
    for descriptor, one in zip(answered.descriptors, answered.answer.extents, strict=True):
        MappedExtent(descriptor, one.size_bytes, writable=False)
    return len(answered.answer.extents)


def test_what_takes_long_to_hand_out_is_handed_out_seldom(sidecar: Sidecar, tmp_path: Path) -> None:
    others = tmp_path / "others.sock"
    sidecar.door.listen(others, sidecar.store.tenant_keys("other"))
    (wire, _, extents), (other, _, theirs) = (opened(path, 9) for path in (sidecar.path, others))
    assert len(extents) > 1 and len(theirs) > 1
    time = Time()
    sidecar.handlers._slow = SlowTenants(time.seconds, RARELY, ALLOWED_SECONDS)
    sidecar.handlers._thread_seconds = time.thread_seconds
    assert handed_over(wire, extents) == len(extents)
    time.price = 2 * ALLOWED_SECONDS
    assert handed_over(wire, extents) == 1, "the others of this message are left out"
    time.price = 0.0
    refused = handed_over(wire, extents)
    assert isinstance(refused, m.Failed) and refused.fault is m.RequestFault.BUSY
    assert "locks on its memory" in refused.text and "try again" in refused.text and "\n" not in refused.text
    assert handed_over(other, theirs) == len(theirs)
    time.now += 2 * RARELY * ALLOWED_SECONDS
    assert handed_over(wire, extents) == len(extents)


def test_the_kernel_is_asked_without_the_lock_of_the_store(sidecar: Sidecar) -> None:
    """Whoever has the lock keeps all tenants waiting."""
    wire, _, extents = opened(sidecar.path, 9)
    answered = wire.call(m.Extents(extents, False), 60.0)
    (caller,) = sidecar.sessions._callers
    with ThreadPoolExecutor(1) as pool:
        with sidecar.core.lock:
            asked = pool.submit(sidecar.core.unmapped, extents, caller)
            try:
                found = asked.result(10)
            except TimeoutError:
                found = None
        assert found is not None and (found.unmapped, found.asked) == (0, 1)
    for descriptor, one in zip(answered.descriptors, answered.answer.extents, strict=True):
        MappedExtent(descriptor, one.size_bytes, writable=False)
    wire.call(m.Ping(), 60.0)  # by then the door has closed its own copies
    assert sidecar.core.unmapped(extents, caller).unmapped == len(extents)


def test_the_door_serves_while_a_sweep_takes_long(tmp_path: Path) -> None:
    with Sidecar(tmp_path, DoorLimits(sweep_seconds=0.001), dram="1MiB") as sidecar:
        begun, goes_on, sweeps = threading.Event(), threading.Event(), list[int]()

        def slow_sweep() -> int:
            sweeps.append(1)
            begun.set()
            assert goes_on.wait(10)
            return 0

        sidecar.sessions.sweep = slow_sweep  # type: ignore[method-assign]
        wire = wire_to(sidecar.path)
        assert begun.wait(60)
        for _ in range(100):
            assert isinstance(wire.call(m.Ping(), 60.0).answer, m.Done)
        assert len(sweeps) == 1, "one at a time"
        goes_on.set()
        wire.close()


class Mappings:
    """Everything is mapped, and it takes so long to say so."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.clock = seconds, FakeClock()
        self.asked: list[int] = []

    def unmapped(self, extents: Sequence[int], holder: int) -> Unmapped:
        self.asked.append(holder)
        return Unmapped(0, 1, self.seconds[holder])


def sweep(departed: DisconnectedClients, mappings: Mappings) -> list[int]:
    mappings.asked.clear()
    for gone in departed.turns():
        departed.look(gone)
    return list(mappings.asked)


def test_a_tenant_where_questions_are_slow_is_left_out_of_sweeps() -> None:
    mappings = Mappings({1: 0.003, 2: 0.003, 3: 0.0001})
    departed = DisconnectedClients(mappings)
    for number, secret in ((1, SECRET), (2, SECRET), (3, OTHER_SECRET)):
        disconnected(departed, number, secret)
    assert sorted(sweep(departed, mappings)) == [1, 3], "its second connection is left out at once"
    for _ in range(3):
        assert sweep(departed, mappings) == [3]
        mappings.clock.advance(SELDOM * 0.0011)
    assert sorted(sweep(departed, mappings)) == [2, 3], "the other one has its turn"
    assert departed.look(disconnected(departed, 4)) == (True, 0)
    nothing = disconnected(departed, 5)
    nothing.mapped = []
    assert departed.look(nothing) == (False, 0), "it has nothing to be asked about"
    assert len(departed) == 5
