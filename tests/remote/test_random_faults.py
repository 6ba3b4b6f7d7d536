"""Faults drawn at random between workers and a real server: a read is the exact frame or a miss, in time; each slot
comes back once, and is not written into after that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import pytest

from remote.between import Harm, Proxy, proxy
from remote.frames import FRAME_BYTES, frame, halves, is_of, key_of
from tiering.clock import SystemClock
from tiering.remote import workers
from tiering.remote.driver import RemoteFault
from tiering.remote.valkey import ValkeyAddress, ValkeyEngine
from tiering.remote.workers import RemoteCall, RemoteWorkers
from valkey_server import ValkeyServer, valkey_server
from waiting import wait_until

CLOCK = SystemClock()
BLOCKS, SLOTS = 24, 12
STEPS = 300
LATE_SECONDS = 0.02
MOST_LATE = 0.1  # of all reads, on a machine that others use


@dataclass(repr=False)
class Slots:
    """Who has which; what a slot held when it came back must not change until it is lent again."""

    places: list[bytearray] = field(default_factory=lambda: [bytearray(FRAME_BYTES) for _ in range(SLOTS)])
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    came_back: dict[int, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lend(self) -> int | None:
        with self.lock:
            if not self.free:
                return None
            at = self.free.pop(0)
            assert bytes(self.places[at]) == self.came_back.pop(at, bytes(FRAME_BYTES)), "written into after its return"
            self.places[at][:] = b"\xee" * FRAME_BYTES
            return at

    def is_back(self, at: int) -> None:
        with self.lock:
            assert at not in self.free, "it came back twice"
            self.came_back[at] = bytes(self.places[at])
            self.free.append(at)


@dataclass(repr=False)
class World:
    server: ValkeyServer
    between: Proxy
    direct: ValkeyEngine
    workers: RemoteWorkers
    random: Random
    slots: Slots = field(default_factory=Slots)
    is_stopped: bool = False
    asked: int = 0
    hits: int = 0
    refused: int = 0
    late: int = 0

    def event(self) -> None:
        if self.is_stopped:
            if self.random.random() < 0.3:
                self.server.go_on()
                self.is_stopped = False
            return
        number, at = self.random.randrange(BLOCKS), self.random.randrange(FRAME_BYTES)
        match self.random.randrange(24):
            case 0:
                self.server.stop()
                self.is_stopped = True
            case 1:
                self.server.kill()
                self.server.start()
            case 2:
                self.server.empty()
            case 3:
                self.replace(number, frame((number + 1) % BLOCKS))
            case 4:
                self.replace(number, frame(number)[:at])
            case 5:
                self.replace(number, frame(number)[:at] + bytes([frame(number)[at] ^ 4]) + frame(number)[at + 1 :])
            case 6 | 7 | 8 | 9 | 10:
                self.between.plan(self.random.choice(list(Harm)), self.random.choice([0, 3, at, FRAME_BYTES]))
            case 11 | 12 | 13:
                self.fill()
            case _:
                self.between.well()

    def fill(self) -> None:
        for number in range(BLOCKS):
            self.direct.write(key_of(number), *halves(number), 0)

    def replace(self, number: int, value: bytes) -> None:
        self.direct.delete([key_of(number)])
        assert self.direct.write(key_of(number), b"", value, 0)

    def read(self) -> None:
        calls: list[tuple[int, int, float, RemoteCall[bool]]] = []
        for number in self.random.sample(range(BLOCKS), 3):
            at = self.slots.lend()
            if at is None:
                break
            deadline = CLOCK.monotonic_seconds() + self.random.choice([0.03, 0.06, 0.12])
            slot = memoryview(self.slots.places[at])
            read = partial(self.workers._engine.read, key_of(number), slot, deadline)
            call = self.workers.submit(read, deadline, lambda at=at: self.slots.is_back(at))  # type: ignore[misc]
            calls.append((number, at, deadline, call))
        for number, at, deadline, call in calls:
            self.asked += 1
            is_there, found = False, b""
            with suppress(RemoteFault):
                is_there = call.result()
                found = self.slots.came_back.get(at, b"")
            self.late += CLOCK.monotonic_seconds() > deadline + LATE_SECONDS
            if not is_there:
                continue
            if is_of(found, number):
                self.hits += 1
                assert found == frame(number)
            else:
                self.refused += 1
                ends_at = CLOCK.monotonic_seconds() + 0.1
                self.workers.submit(partial(self.workers._engine.delete, [key_of(number)], ends_at), ends_at)

    def finds_all(self) -> bool:
        """Whether each read of some blocks is a hit, now that all are there."""
        hits, asked = self.hits, self.asked
        self.read()
        return self.hits - hits == self.asked - asked > 0

    def write(self) -> None:
        number = self.random.randrange(BLOCKS)
        with suppress(RemoteFault):
            ends_at = CLOCK.monotonic_seconds() + 0.1
            write = partial(self.workers._engine.write, key_of(number), *halves(number), 0, ends_at)
            self.workers.submit(write, ends_at).result()


@contextmanager
def world(folder: Path, seed: int) -> Iterator[World]:
    with valkey_server(folder) as server, proxy(server.port) as between:
        engine = ValkeyEngine(ValkeyAddress("127.0.0.1", between.port), CLOCK)
        direct = ValkeyEngine(ValkeyAddress(path=server.socket_path), CLOCK, call_seconds=60.0, connect_seconds=60.0)
        workers = RemoteWorkers(engine, CLOCK)
        try:
            yield World(server, between, direct, workers, Random(seed))
        finally:
            workers.close()
            direct.close()


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4)]])
def test_exact_or_a_miss_in_time(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "FIRST_PAUSE_SECONDS", 0.02)  # else most reads are those of an open one
    monkeypatch.setattr(workers, "LONGEST_PAUSE_SECONDS", 0.05)
    with world(tmp_path, seed) as one:
        one.fill()
        for _ in range(STEPS):
            one.event()
            one.read()
            one.write()
        if one.is_stopped:
            one.server.go_on()
        one.between.well()
        wait_until(lambda: sorted(one.slots.free) == list(range(SLOTS)))
        print(f"seed {seed}: {one.hits} hits of {one.asked}, {one.refused} refused, {one.late} late")
        assert one.hits, "some of it was found meanwhile; how much depends on how busy the machine is"
        assert one.late <= MOST_LATE * one.asked
        one.fill()
        wait_until(one.finds_all)
        one.replace(0, frame(0))

        def heals() -> bool:
            into = memoryview(bytearray(FRAME_BYTES))
            with suppress(RemoteFault):
                ends_at = CLOCK.monotonic_seconds() + 1
                read = partial(one.workers._engine.read, key_of(0), into, ends_at)
                return one.workers.submit(read, ends_at).result() and is_of(bytes(into), 0)
            return False

        wait_until(heals)
        while one.slots.lend() is not None:  # which looks at what each holds
            pass
