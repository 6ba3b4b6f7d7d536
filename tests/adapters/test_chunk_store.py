"""Opaque chunks in a real sidecar: what is promised is pinned, what is copied is verified, and no fault gets out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from engine_adapter.chunks import (
    ChunkJob,
    ChunkLimits,
    ChunkOutcomes,
    ChunkRun,
    ChunkSpace,
    ChunkState,
    ChunkStore,
    chunk_layout,
)
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.block.errors import Unreachable
from kvstore.client.handle import NamespaceHandle
from service.sidecar import Sidecar, number_of, patient
from tiering.frame import HEADER_BYTES
from waiting import wait_until

SECONDS = 30
SLOTS, CHUNK_BYTES, CHUNK_TOKENS = 16, 3 * (128 << 10), 64
LIMITS = ChunkLimits(lease_ms=10_000.0)


def name_of(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def group_of(name: bytes) -> int:
    return int.from_bytes(name[-4:], "big")


def memory_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (SLOTS, CHUNK_BYTES), dtype=np.uint8)


class Wrapped:
    """A store whose namespaces a test gets at first. Closing it is the test's affair."""

    def __init__(self, store: Any, wrap: Callable[[NamespaceHandle], Any] = lambda handle: handle) -> None:
        self._store, self._wrap = store, wrap

    def namespace(self, **more: Any) -> Any:
        return self._wrap(self._store.namespace(**more))

    def close(self) -> None:
        pass


class Engine:
    """What an engine does with chunks: asks until there is an answer, and waits for its jobs."""

    def __init__(self, store: Any, limits: ChunkLimits = LIMITS, seed: int = 1, groups: int = 1, **more: Any) -> None:
        self.memory = memory_of(seed)
        self.outcomes = ChunkOutcomes()
        layout = chunk_layout("group", CHUNK_TOKENS, [CHUNK_BYTES])
        runs = [ChunkRun(self.memory.ctypes.data, CHUNK_BYTES, CHUNK_BYTES)]
        given = store if isinstance(store, Wrapped) else Wrapped(store)
        specs = [NamespaceSpec(1, "", "m", layout, "raw", 0, {"group": str(group)}) for group in range(groups)]
        self.spaces = [ChunkSpace(spec, runs, SLOTS, (given, given), self.outcomes) for spec in specs]
        self.chunks = ChunkStore(self.spaces, group_of, limits, self.outcomes, **more)
        self.jobs = 0

    def opened(self) -> Engine:
        wait_until(lambda: all(space.handle is not None for space in self.spaces))
        return self

    def ask(self, names: Sequence[bytes], owner: str = "a") -> list[ChunkState]:
        def verdicts() -> list[ChunkState] | None:
            found = [self.chunks.ask(owner, name) for name in names]
            return found if ChunkState.PENDING not in found else None

        return wait_until(verdicts, lambda: self.chunks.proceed(0.001))

    def begin_store(self, names: Sequence[bytes], slots: Sequence[int]) -> int:
        self.jobs += 1
        self.chunks.store(self.jobs, names, slots)
        return self.jobs

    def begin_load(self, names: Sequence[bytes], slots: Sequence[int], owner: str = "a") -> int:
        self.jobs += 1
        self.chunks.load(self.jobs, owner, names, slots)
        return self.jobs

    def ended(self, job: int) -> ChunkJob:
        found: list[ChunkJob] = []
        wait_until(lambda: bool(found.extend(self.chunks.finished()) or found))
        assert [it.number for it in found] == [job]
        return found[0]

    def store(self, names: Sequence[bytes], slots: Sequence[int]) -> ChunkJob:
        return self.ended(self.begin_store(names, slots))

    def load(self, names: Sequence[bytes], slots: Sequence[int], owner: str = "a") -> ChunkJob:
        return self.ended(self.begin_load(names, slots, owner))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.chunks.close()


@pytest.fixture
def engine(sidecar: Sidecar) -> Iterator[Engine]:
    with sidecar.client() as store, Engine(store) as engine:
        yield engine.opened()


def leases(sidecar: Sidecar) -> int:
    return int(sidecar.store.usage().leases)


NAMES = [name_of(number) for number in range(5)]


def test_what_was_stored_is_loaded_bit_for_bit(engine: Engine, sidecar: Sidecar) -> None:
    before = engine.memory.copy()
    stored = engine.store(NAMES, [3, 1, 4, 0, 2])
    assert set(stored.good) == set(NAMES) and stored.failed == [] and stored.size_bytes == 5 * CHUNK_BYTES
    assert engine.ask([*NAMES, name_of(99)]) == [ChunkState.HELD] * 5 + [ChunkState.MISSING]
    assert leases(sidecar) == 5, "what is held is pinned"
    (space,) = sidecar.admin.facts().namespaces
    looked = space.looked
    assert space.block_tokens == CHUNK_TOKENS, "accounts are in the chunks' tokens"
    told = (looked.asked_tokens, looked.found_tokens, sum(looked.hit_tokens.values()), looked.miss_tokens)
    assert told == (6 * CHUNK_TOKENS, 0, 5 * CHUNK_TOKENS, {"absent": CHUNK_TOKENS})
    loaded = engine.load(NAMES[:4], [10, 11, 12, 13])
    assert set(loaded.good) == set(NAMES[:4]) and loaded.failed == []
    assert np.array_equal(engine.memory[10:14], before[[3, 1, 4, 0]])
    untouched = [*range(10), 14, 15]
    assert np.array_equal(engine.memory[untouched], before[untouched])
    engine.chunks.forget("a")
    wait_until(lambda: leases(sidecar) == 0)
    assert engine.outcomes.take() == {"stored": 5, "held": 5, "missing": 1, "loaded": 4}
    assert engine.outcomes.take() == {}


def test_another_process_finds_them_and_another_group_does_not(engine: Engine, sidecar: Sidecar) -> None:
    engine.store(NAMES, range(5))
    with sidecar.client() as store, Engine(store, seed=7, groups=2) as other:
        other.opened()
        same_in_another_group = [name_of(number, 1) for number in range(5)]
        in_no_group = [name_of(0, 2)]
        assert (
            other.ask([*NAMES, *same_in_another_group, *in_no_group])
            == [ChunkState.HELD] * 5 + [ChunkState.MISSING] * 6
        )
        assert other.load(NAMES, range(5)).failed == []
        assert np.array_equal(other.memory[:5], engine.memory[:5])


def test_a_chunk_of_an_unknown_group_or_without_a_slot_is_not_stored(sidecar: Sidecar) -> None:
    names = [name_of(number) for number in range(3)]
    with sidecar.client() as store, Engine(store) as engine:
        engine.opened().chunks._space_of = lambda name: {names[1]: -1, names[2]: 1}.get(name, 0)
        assert engine.store(names, []).failed == names and engine.store([], []).failed == []
        assert engine.store(names, range(3)).failed == [names[2], names[1]]
        assert engine.ask(names) == [ChunkState.HELD, ChunkState.MISSING, ChunkState.MISSING]
        assert sidecar.store.usage().counters["stored_blocks"] == 1


def test_what_is_there_is_not_stored_again(engine: Engine) -> None:
    engine.store(NAMES, range(5))
    again = engine.store([*NAMES, name_of(5)], range(5, 11))
    assert len(again.good) == 6, "a chunk that is there is as good as stored"
    assert engine.ask(NAMES) == [ChunkState.HELD] * 5
    engine.load(NAMES, range(11, 16))
    assert np.array_equal(engine.memory[11:16], engine.memory[:5]), "the first bytes stay"


def test_what_is_missing_stays_so_for_whoever_asked(engine: Engine) -> None:
    assert engine.ask(NAMES) == [ChunkState.MISSING] * 5
    engine.store(NAMES, range(5))
    assert engine.ask(NAMES) == [ChunkState.MISSING] * 5, "else a request would never be through with its look-up"
    assert engine.ask(NAMES, "b") == [ChunkState.HELD] * 5
    engine.chunks.forget("a")
    assert engine.ask(NAMES) == [ChunkState.HELD] * 5


def test_what_nobody_wants_any_more_is_released(engine: Engine, sidecar: Sidecar) -> None:
    engine.store(NAMES, range(5))
    engine.ask(NAMES, "a")
    engine.ask(NAMES[:2], "b")
    engine.chunks.forget("a")
    wait_until(lambda: leases(sidecar) == 2)
    engine.chunks.forget("b")
    wait_until(lambda: leases(sidecar) == 0)
    for _ in range(20):  # forgotten before there is an answer
        for name in NAMES:
            engine.chunks.ask("c", name)
        engine.chunks.forget("c")
    wait_until(lambda: engine.chunks.proceed() is None and leases(sidecar) == 0)
    assert not engine.chunks._asked and not engine.chunks._of_owner and not engine.chunks._missing


def test_what_nobody_comes_for_is_released(sidecar: Sidecar) -> None:
    now = [0.0]
    with sidecar.client() as store, Engine(store, clock=lambda: now[0]) as engine:
        engine.opened().store(NAMES, range(5))
        engine.ask(NAMES)
        now[0] = LIMITS.hold_seconds + 2
        assert engine.chunks.finished() == []
        wait_until(lambda: leases(sidecar) == 0)
        assert engine.load(NAMES, range(5)).failed == NAMES, "what is not held is not loaded"


def test_a_flipped_bit_fails_that_chunk_alone(engine: Engine, sidecar: Sidecar) -> None:
    engine.store(NAMES, range(5))
    engine.ask(NAMES)
    lease = engine.chunks._asked[NAMES[2]].lease
    assert lease is not None and number_of(lease)
    sidecar.core.spans([lease.reply.places[0][0]])[0].view[HEADER_BYTES + CHUNK_BYTES - 9] ^= 4
    loaded = engine.load(NAMES, range(10, 15))
    assert loaded.failed == [NAMES[2]] and len(loaded.good) == 4
    good = [0, 1, 3, 4]
    assert np.array_equal(engine.memory[[10 + n for n in good]], engine.memory[good])
    assert engine.ask([NAMES[2]]) == [ChunkState.MISSING], "and is not promised to that request again"
    wait_until(lambda: sidecar.store.usage().counters.get("quarantined_blocks") == 1)
    assert engine.ask([NAMES[2]], "b") == [ChunkState.MISSING]
    engine.store([NAMES[2]], [2])
    assert engine.ask([NAMES[2]], "c") == [ChunkState.HELD], "stored anew, it is good again"


def test_the_end_of_a_prefix_is_evicted_before_its_beginning(tmp_path: Path) -> None:
    all_pinned = kvstore.Limits(pinned_fraction=1.0)
    with Sidecar(tmp_path, dram="4MiB", extent="2MiB", limits=all_pinned) as sidecar, sidecar.client() as store:
        limits = replace(LIMITS, load_threads=1, save_threads=1)  # two may end in another order
        with Engine(store, limits) as engine:
            engine.opened()
            while not sidecar.store.usage().counters.get("evicted_blocks"):
                engine.store([name_of(1000 + engine.jobs)], [0])
            fits = engine.jobs - 1
            prefix = [name_of(number) for number in range(fits)]
            assert 3 <= fits <= SLOTS and len(engine.store(prefix, range(fits)).good) == fits
            engine.store([name_of(50), name_of(51)], [0, 1])
            assert engine.ask(prefix) == [ChunkState.HELD] * (fits - 2) + [ChunkState.MISSING] * 2


def test_a_store_that_is_away_is_missing_chunks_and_failed_jobs(tmp_path: Path) -> None:
    path = f"unix:{tmp_path / 'kvstore.sock'}"
    with patient(kvstore.open(path)) as store, Engine(store) as engine:
        assert engine.ask(NAMES) == [ChunkState.MISSING] * 5
        assert engine.store(NAMES, range(5)).failed == NAMES
        assert engine.load(NAMES, range(5)).failed == NAMES
        assert engine.outcomes.take()["refused_stores"] == 5
        engine.chunks.forget("a")
        with Sidecar(tmp_path):
            engine.opened()
            assert len(engine.store(NAMES, range(5)).good) == 5
            assert engine.ask(NAMES) == [ChunkState.HELD] * 5
        late = engine.load(NAMES, range(5, 10))  # leases of a sidecar that is gone, whose memory may be mapped still
        for name in late.good:
            assert np.array_equal(engine.memory[5 + NAMES.index(name)], engine.memory[NAMES.index(name)])
        engine.chunks.forget("a")
        assert engine.ask(NAMES) == [ChunkState.MISSING] * 5
        assert len(engine.store(NAMES, range(5)).failed) == 5
        engine.chunks.forget("a")
        with Sidecar(tmp_path):
            wait_until(lambda: bool(engine.store(NAMES, range(5)).good))
            assert len(engine.store(NAMES, range(5)).good) == 5
            assert engine.ask(NAMES, "later") == [ChunkState.HELD] * 5
            assert engine.load(NAMES, range(10, 15), "later").failed == []
            assert np.array_equal(engine.memory[10:15], engine.memory[:5])


class Silent:
    def __init__(self, space: NamespaceHandle) -> None:
        self._space = space
        self.submitted = self.cancelled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def submit_match(self, *_: Any) -> Any:
        self.submitted += 1
        return self

    def poll(self) -> None:
        return None

    def cancel(self) -> None:
        self.cancelled += 1


def test_an_answer_that_does_not_come_is_a_miss(sidecar: Sidecar) -> None:
    now = [0.0]
    with sidecar.client() as store, Engine(Wrapped(store, Silent), clock=lambda: now[0]) as engine:
        silent: Any = engine.opened().spaces[0].handle
        assert [engine.chunks.ask("a", name) for name in NAMES] == [ChunkState.PENDING] * 5
        engine.chunks.proceed(0.001)
        assert [engine.chunks.ask("a", name) for name in NAMES] == [ChunkState.PENDING] * 5
        assert (silent.submitted, silent.cancelled) == (5, 0)
        now[0] = LIMITS.lease_ms / 1000 + LIMITS.ask_seconds + 0.001
        assert [engine.chunks.ask("a", name) for name in NAMES] == [ChunkState.MISSING] * 5
        assert silent.cancelled == 5
        engine.chunks.proceed()
        assert not engine.chunks._under_way and not engine.chunks._waiting


class Held:
    """A namespace whose gets and puts wait until they are let through."""

    def __init__(self, space: NamespaceHandle) -> None:
        self._space = space
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._space, name)

        def waiting(*args: Any, **more: Any) -> Any:
            self.begun.release()
            assert self.go.wait(SECONDS)
            return inner(*args, **more)

        return waiting if name in ("get", "put") else inner


@pytest.fixture
def held(sidecar: Sidecar) -> Iterator[tuple[Engine, Held]]:
    limits = replace(LIMITS, load_threads=1, drain_seconds=0.05, queued_stores=6)
    with sidecar.client() as store, Engine(Wrapped(store, Held), limits) as engine:
        storing: Any = engine.opened().spaces[0].writing(SECONDS)
        yield engine, storing
        storing.go.set()


def test_a_drain_waits_for_what_has_begun_and_fails_the_rest(held: tuple[Engine, Held]) -> None:
    engine, space = held
    job = engine.begin_store(NAMES, range(5))
    assert space.begun.acquire(timeout=SECONDS)
    threading.Timer(0.3, space.go.set).start()
    engine.chunks.drain()
    (finished,) = engine.chunks.finished()
    assert finished.number == job and set(finished.failed) == set(NAMES), "none of them had begun to be read"
    assert len(engine.store(NAMES, range(5)).good) == 5, "and it goes on after that"
    engine.chunks.drain()


def test_stores_that_wait_are_bounded(held: tuple[Engine, Held]) -> None:
    engine, space = held
    first = engine.begin_store(NAMES, range(5))
    refused = engine.begin_store([name_of(8), name_of(9)], [8, 9])
    assert engine.begin_store([name_of(7)], [7]) > refused
    assert engine.ended(refused + 1).failed == [name_of(7)]
    space.go.set()
    jobs: dict[int, ChunkJob] = {}
    wait_until(lambda: jobs.update({job.number: job for job in engine.chunks.finished()}) or len(jobs) == 2)
    assert len(jobs[first].good) == 5
    assert (jobs[refused].good, jobs[refused].failed) == ([name_of(8)], [name_of(9)]), "the beginning is taken"
    assert engine.outcomes.take()["refused_stores"] == 2


def test_a_job_above_the_bound_is_stored_whole_where_nothing_waits(held: tuple[Engine, Held]) -> None:
    engine, space = held
    names = [name_of(number) for number in range(10)]
    first = engine.begin_store(names, range(10))
    assert engine.ended(engine.begin_store([name_of(11)], [11])).failed, "behind it the bound holds"
    space.go.set()
    assert set(engine.ended(first).good) == set(names)


def test_closing_waits_for_a_copy_and_lets_go_of_what_is_held(sidecar: Sidecar) -> None:
    made: list[Held] = []

    def held_one(handle: NamespaceHandle) -> Any:
        made.append(Held(handle))
        made[-1].go.set()
        return made[-1]

    with sidecar.client() as store, Engine(Wrapped(store, held_one), replace(LIMITS, load_threads=1)) as engine:
        engine.opened().store(NAMES, range(5))
        assert engine.ask(NAMES) == [ChunkState.HELD] * 5
        for space in made:
            space.go.clear()
            while space.begun.acquire(blocking=False):
                pass
        job = engine.begin_load(NAMES, range(5, 10))
        reading: Any = engine.spaces[0].handle
        assert reading.begun.acquire(timeout=SECONDS)
        threading.Timer(0.2, reading.go.set).start()
        engine.chunks.close()
        after = engine.memory.copy()
        engine.chunks.close()
        (loaded,) = [it for it in engine.chunks.finished() if it.number == job]
        assert set(loaded.good) | set(loaded.failed) == set(NAMES) and loaded.good, "what had begun was finished"
        assert engine.chunks.ask("a", NAMES[0]) is not ChunkState.HELD
        refused, unloaded = engine.begin_store(NAMES, range(5)), engine.begin_load(NAMES, range(5))
        ended = {it.number: it for it in engine.chunks.finished()}
        assert [(ended[one].good, ended[one].failed) for one in (refused, unloaded)] == [([], NAMES)] * 2
        wait_until(lambda: leases(sidecar) == 0)
        assert np.array_equal(engine.memory, after), "nothing touches it any more"
        assert not any(thread.name.startswith("kv-chunk") for thread in threading.enumerate())


def test_while_a_store_is_being_opened_nothing_waits(sidecar: Sidecar) -> None:
    go, tries = threading.Event(), []

    def wrap(handle: NamespaceHandle) -> NamespaceHandle:
        tries.append(1)
        if len(tries) <= 2:  # for look-ups, and for stores
            assert go.wait(SECONDS)
            raise Unreachable("not yet")
        return handle

    with sidecar.client() as store, Engine(Wrapped(store, wrap)) as engine:
        assert engine.ask(NAMES) == [ChunkState.MISSING] * 5
        assert len(engine.store(NAMES, range(5)).failed) == 5
        engine.chunks.drain()
        go.set()
        engine.opened()
        assert len(engine.store(NAMES, range(5)).good) == 5


def test_what_may_be_asked_at_a_time_is_bounded(sidecar: Sidecar) -> None:
    with sidecar.client() as store, Engine(store, replace(LIMITS, asked=3)) as engine:
        engine.opened().store(NAMES, range(5))
        assert engine.ask(NAMES) == [ChunkState.HELD] * 3 + [ChunkState.MISSING] * 2
        assert engine.load(NAMES[:3], range(3)).failed == []
        assert engine.ask(NAMES[3:], "b") == [ChunkState.HELD] * 2
