"""The chaos device itself: every order that is legal and no other, and what it calls a hazard."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaos import POISON, ChaosDevice, ChaosStream
from chaos_worker import ChaosWorker
from happens_before import HazardError, Pageable, Race, Released, Shadow, Undefined
from kv_kernels.device import Direction, Region, region

SEEDS = range(40)


def streams(device: ChaosDevice) -> tuple[ChaosStream, ChaosStream]:
    copies, kernels = device.lanes(Direction.LOAD)
    assert isinstance(copies, ChaosStream) and isinstance(kernels, ChaosStream)
    return copies, kernels


def put(stream: ChaosStream, body: Callable[[], object], reads: list[Region], writes: list[Region]) -> None:
    stream.launch(lambda: stream.device.run(body), lambda: reads, lambda: writes)


def test_every_order_that_is_legal_comes_up_and_no_other() -> None:
    seen = set()
    for seed in range(400):
        device = ChaosDevice(Random(seed))
        first, second = streams(device)
        order: list[str] = []
        put(first, lambda order=order: order.append("a"), [], [])
        event = first.record()
        put(first, lambda order=order: order.append("b"), [], [])
        put(second, lambda order=order: order.append("x"), [], [])
        second.wait(event)
        put(second, lambda order=order: order.append("y"), [], [])
        device.finish()
        seen.add("".join(order))
    assert seen == {"abxy", "axby", "axyb", "xaby", "xayb"}


def test_a_lazy_device_runs_what_is_waited_for_and_no_more() -> None:
    device = ChaosDevice(Random(1), eagerness=0.0)
    first, second = streams(device)
    order: list[str] = []
    put(first, lambda: order.append("a"), [], [])
    event = first.record()
    put(second, lambda: order.append("x"), [], [])
    put(first, lambda: order.append("b"), [], [])
    assert order == []
    event.wait()
    assert order == ["a"]
    device.finish()
    assert sorted(order) == ["a", "b", "x"]


def test_an_eager_device_runs_all_at_once() -> None:
    device = ChaosDevice(Random(1), eagerness=1.0)
    order: list[str] = []
    put(device.compute(), lambda: order.append("a"), [], [])
    assert order == ["a"]


def test_who_looks_long_enough_sees_an_event_done() -> None:
    for seed in SEEDS:
        device = ChaosDevice(Random(seed), eagerness=0.0)
        event = device.compute().record()
        assert any(event.is_done() for _ in range(60))


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_race_is_found_where_the_bytes_come_out_right(seed: int, eagerness: float) -> None:
    """An eager device runs in the order of the calls: a missing wait changes no byte."""
    device = ChaosDevice(Random(seed), eagerness=eagerness)
    memory = device.memory(16)
    device.host_write([region(memory)], "writes")
    first, second = streams(device)
    with pytest.raises(Race, match="nothing orders them"):
        put(first, lambda: memory.fill_(3), [], [region(memory)])
        put(second, lambda: None, [Region(memory.data_ptr() + 15, 1)], [])
        if eagerness:
            assert bool((memory == 3).all())
        device.finish()
    with pytest.raises(Race):
        first.record()  # and it is not forgotten


@pytest.mark.parametrize("seed", SEEDS)
def test_an_order_may_lead_through_others(seed: int) -> None:
    """By events and stream order, through the host, and from a worker to who waits for it."""
    device = ChaosDevice(Random(seed))
    memory = device.memory(16)
    first, second = streams(device)
    put(first, lambda: memory.fill_(1), [], [region(memory)])
    second.wait(first.record())
    second.record().wait()
    device.host_read([region(memory)], "reads")
    device.host_write([region(memory)], "writes")
    put(device.compute(), lambda: memory.fill_(2), [region(memory)], [region(memory)])
    worker = ChaosWorker(device, "worker")
    event, done = device.compute().record(), []

    def job() -> None:
        event.wait()
        device.host_write([region(memory)], "writes")
        done.append(True)

    worker.submit(job)
    assert not worker.wait(lambda: bool(done), 0.0)
    assert worker.wait(lambda: bool(done), 1.0)
    device.host_write([region(memory)], "writes")
    device.finish()


def test_a_host_thread_is_not_ordered_with_another() -> None:
    device = ChaosDevice(Random(1))
    memory = device.memory(16)
    device.host_write([region(memory)], "writes")
    with device.acting("other"), pytest.raises(Race, match=r"other \(reads\) and engine \(writes\)"):
        device.host_read([region(memory)], "reads")


def test_poison_is_not_read() -> None:
    device = ChaosDevice(Random(1))
    memory = device.memory(16)
    assert memory.tolist() == [POISON] * 16
    device.host_write([Region(memory.data_ptr(), 15)], "writes")
    put(device.compute(), lambda: None, [Region(memory.data_ptr(), 15)], [])
    device.compute().record().wait()
    with pytest.raises(Undefined, match="which nobody has written"):
        device.host_read([region(memory)], "reads")


def test_what_was_released_is_not_touched() -> None:
    for touch in (ChaosDevice.host_read, ChaosDevice.host_write):
        device = ChaosDevice(Random(1))
        memory = device.memory(16)
        device.host_write([region(memory)], "writes")
        device.release([Region(memory.data_ptr() + 8, 8)], "evicts")
        assert memory[8:].tolist() == [POISON] * 8
        device.host_read([Region(memory.data_ptr(), 8)], "reads")
        with pytest.raises(Released, match=r"after engine \(evicts\)"):
            touch(device, [region(memory)], "touches")
    device = ChaosDevice(Random(1))
    memory = device.memory(16)
    device.compute().release([region(memory)])
    device.compute().take([region(memory)])
    with pytest.raises(Undefined):
        put(device.compute(), lambda: None, [region(memory)], [])
        device.finish()


def test_a_copy_finds_its_host_memory_pinned() -> None:
    device = ChaosDevice(Random(1), lambda address, size_bytes, writable: "" if writable else "read-only")
    target, source = device.memory(16), torch.arange(16, dtype=torch.uint8)
    device.host_write([region(source)], "writes")
    assert device.host.register(source.data_ptr(), 16, writable=False) == "read-only"
    assert not device.host.register(source.data_ptr(), 15, writable=True)
    device.compute().copy([target[:15]], [source[:15]])
    with pytest.raises(Pageable, match="not pinned"):
        device.compute().copy([target], [source])


def test_a_seed_repeats_an_order() -> None:
    def order(seed: int) -> list[int]:
        device, seen = ChaosDevice(Random(seed)), list[int]()
        for at in range(30):
            put(streams(device)[at % 2], lambda at=at: seen.append(at), [], [])
        device.finish()
        return seen

    assert all(order(seed) == order(seed) for seed in SEEDS)
    assert len({tuple(order(seed)) for seed in SEEDS}) > 5


ACTORS = ("a", "b", "c")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["read", "write", "order", "release", "take"]),
            st.sampled_from(ACTORS),
            st.sampled_from(ACTORS),
            st.integers(0, 11),
            st.integers(1, 12),
        ),
        max_size=25,
    )
)
def test_the_shadow_agrees_with_one_that_keeps_every_access_of_every_byte(
    steps: list[tuple[str, str, str, int, int]],
) -> None:
    shadow, clocks = Shadow(), {actor: {actor: 1} for actor in ACTORS}
    known: dict[str, set[int]] = {actor: set() for actor in ACTORS}  # of each actor, the accesses it comes after
    accesses: list[tuple[str, str, range]] = []
    states = ["undefined"] * 24
    for verb, actor, other, start, size in steps:
        if verb == "order":
            for name, step in clocks[other].items():
                clocks[actor][name] = max(clocks[actor].get(name, 0), step)
            clocks[other][other] += 1
            known[actor] |= known[other]
            continue
        touched = range(start, start + size)
        earlier = [
            at
            for at, (was, _, bytes_) in enumerate(accesses)
            if (verb != "read" or was != "read") and set(bytes_) & set(touched)
        ]
        races = any(at not in known[actor] and accesses[at][1] != actor for at in earlier)
        bad = {states[at] for at in touched}
        unusable = verb != "take" and ("released" in bad or (verb == "read" and "undefined" in bad))
        try:
            getattr(shadow, verb)(actor, clocks[actor], verb, [Region(1000 + start, size)])
        except HazardError as error:
            assert races or unusable, error
            assert isinstance(error, Race) or unusable
            return
        assert not races and not unusable
        for at in touched:
            states[at] = {"read": states[at], "write": "defined", "release": "released", "take": "undefined"}[verb]
        known[actor].add(len(accesses))
        accesses.append((verb, actor, touched))
