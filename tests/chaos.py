"""A device on the CPU that runs work in any order that is legal, and finds what only luck keeps right.

Each stream is a queue. A seeded scheduler runs its operations one at a time: some at once, some only when somebody
waits for them, in any order that streams and events allow. What each operation reads and writes is checked with vector
clocks (`happens_before`), so that a missing wait is found in every order, also in those where the bytes come out right.

    in a kernel     what a transfer launches runs when its turn comes
    in host code    `host_read`, `host_write`, `take` and `release` say what it does with which memory; `acting` says
                    which thread it is

Memory that nobody has written, or that was released, holds POISON. Copies from or to host memory must find it pinned.
The first hazard is raised where it is found and again by every later call. Must never order what the contract does not.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch

from happens_before import Clock, HazardError, Pageable, Region, Shadow, merge, region
from kv_kernels.cuda import LANES, Direction, Rows, host_tensor
from kv_kernels.transfer import LayerSlice

POISON = 0xA5
ENGINE = "engine"
Touched = Callable[[Any, range, LayerSlice], tuple[Sequence[Region], ...]]


@dataclass(slots=True)
class _Operation:
    """What a stream does when it is its turn."""

    label: str
    issued: Clock  # what its host thread had done before
    event: ChaosEvent | None = None
    waits: bool = False
    reads: Sequence[Region] = ()
    writes: Sequence[Region] = ()
    released: Sequence[Region] = ()
    taken: Sequence[Region] = ()
    is_copy: bool = False
    bodies: list[Callable[[], object]] = field(default_factory=list)


class NoWait:
    """Who does not wait for whom: names of streams, or of a host thread as the first."""

    def __init__(self, waiter: str = "", awaited: str = "") -> None:
        self.waiter = waiter
        self.awaited = awaited
        self.times = 0

    def __call__(self, waiter: str, awaited: str) -> bool:
        is_dropped = (waiter, awaited) == (self.waiter, self.awaited)
        self.times += is_dropped
        return is_dropped


class ChaosEvent:
    """Holds the clock of what it recorded."""

    def __init__(self, stream: ChaosStream) -> None:
        self.stream = stream
        self.clock: Clock | None = None

    def synchronize(self) -> None:
        device = self.stream.device
        if not device.no_wait(device.actor, self.stream.name):
            device.drive(self)

    def query(self) -> bool:
        return self.clock is not None


class ChaosStream:
    """A queue of operations. name: an actor."""

    def __init__(self, device: ChaosDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.queue: deque[_Operation] = deque()
        self.clock: Clock = {name: 0}
        self._count = 0

    def record(self) -> ChaosEvent:
        event = ChaosEvent(self)
        self._put("records", event=event)
        return event

    def wait(self, event: ChaosEvent) -> None:
        if not self.device.no_wait(self.name, event.stream.name):
            self._put("waits", event=event, waits=True)

    def copy(self, rows: Rows, is_pinned: bool = True) -> None:
        for target, source, size in rows.T.tolist():
            reads, writes = [Region(source, size)], [Region(target, size)]
            if is_pinned or self.device._random.random() < 0.5:  # the driver may leave any copy to the stream
                self._put(
                    "copies", reads=reads, writes=writes, is_copy=is_pinned, bodies=[_copier(writes[0], reads[0])]
                )
            elif self.name.startswith(Direction.LOAD.value):  # by the driver: the host's side is read now
                self.device.host_read(reads, "a copy by the driver")
                kept = bytes(host_tensor(*reads[0]).numpy())
                self._put("copies", writes=writes, bodies=[partial(ctypes.memmove, target, kept, size)])
            else:  # written before the call returns
                self.device.drive(self.record())
                self.device.host_read(reads, "a copy by the driver")
                self.device.host_write(writes, "a copy by the driver")
                ctypes.memmove(target, source, size)

    def launch(self, work: Any) -> None:
        """A transfer's launch, bound to its arguments. Where it is to fail, it runs all the same."""
        staged, frames, layers = work.args
        pages, tables, findings, slots = self.device.touched(work.func.__self__, frames, layers)
        sources, targets = [region(staged)], pages
        if staged.dim() == 1:  # a kernel that reaches the slots itself, through a scratch
            sources, findings = slots, [*findings, region(staged)]
            if not all(map(self.device.reaches, slots)):
                raise Pageable(f"a kernel in {self.name} reaches slots that are not pinned")
        if self.name.startswith(Direction.SAVE.value):
            sources, targets = targets, sources
        self._put("runs a kernel", reads=[*sources, *tables], writes=[*targets, *findings], bodies=[work])
        self.device.launches += 1
        if (error := self.device.failures.get(self.device.launches)) is not None:
            raise error

    def step(self, body: Callable[[], object], reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        """Work of the engine's own, or of a test's."""
        self._put("runs a kernel", reads=reads, writes=writes, bodies=[body])

    def release(self, regions: Iterable[Region]) -> None:
        """Memory that was used by this stream is given back in its order, as an engine does with pages and tensors."""
        self._put("releases", released=list(regions))

    def take(self, regions: Iterable[Region]) -> None:
        """The mirror of `release`: given out again, undefined."""
        self._put("takes", taken=list(regions))

    def _put(
        self,
        verb: str,
        event: ChaosEvent | None = None,
        waits: bool = False,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        released: Sequence[Region] = (),
        taken: Sequence[Region] = (),
        is_copy: bool = False,
        bodies: Sequence[Callable[[], object]] = (),
    ) -> None:
        with self.device.lock:
            self._count += 1
            label = f"operation {self._count} of {self.name}, which {verb}"
            operation = _Operation(
                label, self.device.tick(), event, waits, reads, writes, released, taken, is_copy, list(bodies)
            )
            self.device.note(operation)
            self.queue.append(operation)
            self.device.some()


class ChaosDevice:
    """Streams "compute", "load 0", "load 1", "save 0" and so on. random: decides every order; a seed repeats it."""

    def __init__(
        self,
        random: Random,
        refuse: Callable[[int, int, bool], str] = lambda address, size_bytes, writable: "",
        eagerness: float | None = None,
        knows_host: bool = True,
        no_wait: NoWait | None = None,
        touched: Touched = lambda transfer, frames, layers: transfer.touched(frames, layers),
    ) -> None:
        """eagerness: how likely it is, after each call, that something runs; 0 runs what is waited for only.
        knows_host: whether all that host code writes is said; if not, memory that is not the device's counts as
        written. no_wait: a wait that is left out. touched: of a transfer's launch its pages, what else it
        reads, what else it writes, and its slots; refuse: why not, if memory is not to be page-locked."""
        self.lock = threading.RLock()
        self.no_wait = no_wait or NoWait()
        self._random = random
        self._eagerness = random.choice([0.0, 0.3, 0.7, 1.0]) if eagerness is None else eagerness
        self._shadow = Shadow(is_defined=not knows_host)
        self.touched = touched
        self._refuse = refuse
        self._registered: dict[int, int] = {}
        self.refused = self.registrations = 0
        self._compute = ChaosStream(self, "compute")
        self._lanes = {
            direction: [ChaosStream(self, f"{direction.value} {number}") for number in range(LANES)]
            for direction in Direction
        }
        self._streams = [self._compute, *[stream for lanes in self._lanes.values() for stream in lanes]]
        self._memory: list[torch.Tensor] = []
        self._threads: dict[str, Clock] = {}
        self._acting = threading.local()
        self.launches = 0
        self.failures: dict[int, BaseException] = {}  # of launches, by their number from 1 on: they raise
        self._found: HazardError | None = None

    def lanes(self, direction: Direction) -> Sequence[ChaosStream]:
        return self._lanes[direction]

    def compute(self) -> ChaosStream:
        return self._compute

    def memory(self, size_bytes: int) -> torch.Tensor:
        memory = torch.full((size_bytes,), POISON, dtype=torch.uint8)
        with self.lock:
            self._memory.append(memory)  # never freed, so that an address stays what it was
            self._shadow.forget([region(memory)])
        return memory

    def tables(self, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Given back where the last holder lets go: the device's in the order of the compute stream, as torch does."""
        device, host = self.memory(size_bytes), self.memory(size_bytes)
        with self.lock:
            self._registered[host.data_ptr()] = size_bytes
        given = device.view(-1), host.view(-1)
        weakref.finalize(given[0], self._give_back, partial(self._compute.release, [region(device)])).atexit = False
        weakref.finalize(given[1], self._give_back, partial(self.release, [region(host)], "frees")).atexit = False
        return given

    @staticmethod
    def _give_back(release: Callable[[], object]) -> None:
        with suppress(HazardError):  # which every later call raises; this is a finalizer
            release()

    # --- host memory

    def register(self, address: int, size_bytes: int, *, writable: bool) -> str:
        refusal = self._refuse(address, size_bytes, writable)
        with self.lock:
            if refusal:
                self.refused += 1
            else:
                assert address not in self._registered, "registered once"
                self._registered[address] = size_bytes
                self.registrations += 1
        return refusal

    def unregister(self, address: int) -> None:
        with self.lock:
            size = self._registered.pop(address)
            self.host_settle([Region(address, size)], "unregistering")

    def copy(self, rows: Rows) -> None:
        for target, source, size in rows.T.tolist():
            self.host_read([Region(source, size)], "a copy by the host")
            self.host_write([Region(target, size)], "a copy by the host")
            ctypes.memmove(target, source, size)

    def reaches(self, touched: Region) -> bool:
        """Inside one piece of pinned memory."""
        return any(
            start <= touched.address and touched.address + touched.size_bytes <= start + size
            for start, size in self._registered.items()
        )

    def finish(self) -> None:
        """Run all that is left. Raises the first hazard of all."""
        with self.lock:
            while self._step(self._ready()):
                pass
            self._raise()
            assert not any(stream.queue for stream in self._streams), "streams wait for each other in a circle"

    # --- host threads

    @property
    def actor(self) -> str:
        """Who the calling thread is."""
        name: str = getattr(self._acting, "name", ENGINE)
        return name

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """The calling thread is this actor here."""
        before = self.actor
        self._acting.name = name
        try:
            yield
        finally:
            self._acting.name = before

    def tick(self) -> Clock:
        """The acting thread's clock now; what it does later is later. Handed to another thread: `join`."""
        with self.lock:
            self._raise()
            clock = self._clock()
            issued = dict(clock)
            clock[self.actor] += 1
            return issued

    def join(self, clock: Clock) -> None:
        """The acting thread comes after that clock."""
        with self.lock:
            merge(self._clock(), clock)

    def host_read(self, regions: Iterable[Region], label: str) -> None:
        with self.lock, self._noting():
            self._shadow.read(self.actor, self._clock(), f"{self.actor} ({label})", regions)

    def host_write(self, regions: Iterable[Region], label: str) -> None:
        with self.lock, self._noting():
            self._shadow.write(self.actor, self._clock(), f"{self.actor} ({label})", regions)

    def host_settle(self, regions: Iterable[Region], label: str) -> None:
        """All that was done with these must come before."""
        with self.lock, self._noting():
            self._shadow.settle(self.actor, self._clock(), f"{self.actor} ({label})", regions)

    def release(self, regions: Iterable[Region], label: str) -> None:
        """The host gives memory back, now: slots that are evicted."""
        regions = list(regions)
        with self.lock, self._noting():
            self._shadow.release(self.actor, self._clock(), f"{self.actor} ({label})", regions)
            _poison(regions)

    def take(self, regions: Iterable[Region], label: str) -> None:
        regions = list(regions)
        with self.lock, self._noting():
            self._shadow.take(self.actor, self._clock(), f"{self.actor} ({label})", regions)
            _poison(regions)

    # --- the scheduler

    def drive(self, event: ChaosEvent) -> None:
        """Run operations until the event is done, those it needs or any others; the acting thread comes after it."""
        with self.lock:
            while event.clock is None:
                self._raise()
                ready = self._ready() if self._random.random() < self._eagerness else [self._needed(event)]
                ran = self._step(ready)
                assert ran or self._found is not None, "the event is in the queue of a stream"
            self._raise()
            merge(self._clock(), event.clock)

    def some(self) -> None:
        while self._random.random() < self._eagerness and self._step(self._ready()):
            pass
        self._raise()

    def note(self, operation: _Operation) -> None:
        """It is put into a stream. Raises `HazardError` for what no order makes right."""
        with self._noting():
            self._check_reach(operation)

    def _check_reach(self, operation: _Operation) -> None:
        """A copy needs device memory, or pinned; when it is put in, and when it runs."""
        for one in [*operation.reads, *operation.writes] if operation.is_copy else []:
            known = any(
                memory.data_ptr() <= one.address and one.address + one.size_bytes <= memory.data_ptr() + len(memory)
                for memory in self._memory
            )
            if not known and not self.reaches(one):
                raise Pageable(f"{operation.label} touches {one.size_bytes} bytes at {one.address:#x}, not pinned")

    def _ready(self) -> list[ChaosStream]:
        return [stream for stream in self._streams if stream.queue and not _is_held(stream.queue[0])]

    def _needed(self, event: ChaosEvent) -> ChaosStream:
        stream = event.stream
        while _is_held(stream.queue[0]):
            awaited = stream.queue[0].event
            assert awaited is not None
            stream = awaited.stream
        return stream

    def _step(self, ready: Sequence[ChaosStream]) -> bool:
        if not ready or self._found is not None:
            return False
        stream = self._random.choice(ready)
        operation = stream.queue.popleft()
        merge(stream.clock, operation.issued)
        stream.clock[stream.name] += 1
        if operation.event is not None:
            if operation.waits:
                assert operation.event.clock is not None
                merge(stream.clock, operation.event.clock)
            else:
                operation.event.clock = dict(stream.clock)
        try:
            self._check_reach(operation)
            self._shadow.read(stream.name, stream.clock, operation.label, operation.reads)
            self._shadow.write(stream.name, stream.clock, operation.label, operation.writes)
            self._shadow.release(stream.name, stream.clock, operation.label, operation.released)
            self._shadow.take(stream.name, stream.clock, operation.label, operation.taken)
        except HazardError as error:
            self._found = error
            return False
        for body in operation.bodies:
            body()
        _poison([*operation.released, *operation.taken])
        return True

    def _clock(self) -> Clock:
        return self._threads.setdefault(self.actor, {self.actor: 1})

    @contextmanager
    def _noting(self) -> Iterator[None]:
        self._raise()
        try:
            yield
        except HazardError as error:
            self._found = error
            raise

    def _raise(self) -> None:
        if self._found is not None:
            raise self._found


def _is_held(operation: _Operation) -> bool:
    return operation.waits and operation.event is not None and operation.event.clock is None


def _copier(target: Region, source: Region) -> Callable[[], object]:
    """Has addresses only, as a copy engine does."""
    return lambda: host_tensor(*target).copy_(host_tensor(*source))


def _poison(regions: Iterable[Region]) -> None:
    for one in regions:
        host_tensor(*one).fill_(POISON)
