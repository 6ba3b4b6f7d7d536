"""The chaos device itself: every order that is legal and no other, and what it calls a hazard."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from chaos import ChaosDevice, ChaosStream
from happens_before import HazardError, Race, Region, Shadow
from kv_kernels.cuda import Direction

SEEDS = range(40)


def streams(device: ChaosDevice) -> tuple[ChaosStream, ChaosStream]:
    copies, kernels = device.lanes(Direction.LOAD)
    assert isinstance(copies, ChaosStream) and isinstance(kernels, ChaosStream)
    return copies, kernels


def test_every_order_that_is_legal_comes_up_and_no_other() -> None:
    seen = set()
    for seed in range(400):
        device = ChaosDevice(Random(seed))
        first, second = streams(device)
        order: list[str] = []
        first.step(lambda order=order: order.append("a"))
        event = first.record()
        first.step(lambda order=order: order.append("b"))
        second.step(lambda order=order: order.append("x"))
        second.wait(event)
        second.step(lambda order=order: order.append("y"))
        device.finish()
        seen.add("".join(order))
    assert seen == {"abxy", "axby", "axyb", "xaby", "xayb"}


def test_a_lazy_device_runs_what_is_waited_for_and_no_more() -> None:
    device = ChaosDevice(Random(1), eagerness=0.0)
    first, second = streams(device)
    order: list[str] = []
    first.step(lambda: order.append("a"))
    event = first.record()
    second.step(lambda: order.append("x"))
    first.step(lambda: order.append("b"))
    assert order == []
    event.synchronize()
    assert order == ["a"]
    device.finish()
    assert sorted(order) == ["a", "b", "x"]


def test_an_eager_device_runs_all_at_once() -> None:
    device = ChaosDevice(Random(1), eagerness=1.0)
    order: list[str] = []
    device.compute().step(lambda: order.append("a"))
    assert order == ["a"]


def test_a_seed_repeats_an_order() -> None:
    def order(seed: int) -> list[int]:
        device, seen = ChaosDevice(Random(seed)), list[int]()
        for at in range(30):
            streams(device)[at % 2].step(lambda at=at: seen.append(at))
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
