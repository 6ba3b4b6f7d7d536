"""The simulated index loses what it may lose and nothing else: whole batches, from the end, never what was synced."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest

from simulation.index import SimulatedIndex
from simulation.power import Power, PowerLoss
from tiering.errors import TierUnavailable

KEY = b"number of batches"
SEEDS = range(60)


def batches(index: SimulatedIndex) -> int:
    """How many batches of `write` are there; each of them must be whole, and none may follow a lost one."""
    (last,) = index.get([KEY])
    count = int(last) if last else 0
    expected = [(b"%04d%c" % (number, half), b"") for number in range(1, count + 1) for half in b"ab"]
    assert list(index.iterate(b"0")) == expected
    return count


def write(index: SimulatedIndex, number: int) -> None:
    index.apply([(b"%04da" % number, b""), (b"%04db" % number, b""), (KEY, b"%d" % number)])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crash_keeps_what_was_synced_and_first_ones_of_the_rest(seed: int) -> None:
    chance = random.Random(seed)
    index = SimulatedIndex()
    synced = written = 0
    for number in range(1, 20):
        write(index, number)
        written = number
        if chance.random() < 0.2:
            index.sync()
            synced = number
    assert batches(index) == written and index.unsynced == written - synced
    index.crash(chance)
    assert synced <= batches(index) <= written
    assert index.unsynced == 0, "what survived one crash survives the next"


@pytest.mark.parametrize(
    ("acts", "kept"),
    [
        ("write write write", {0, 1, 2, 3}),
        ("write sync write cut", {1, 2}),  # the batch that is cut off is kept or lost
        ("write sync cut", {0, 1}),  # a sync that is cut off promises nothing
    ],
)
def test_what_a_crash_may_keep(acts: str, kept: set[int]) -> None:
    found = set()
    for seed in SEEDS:
        steps = acts.removesuffix(" cut").split()
        power = Power(last=len(steps) if acts.endswith("cut") else None)
        index = SimulatedIndex(power)
        for number, step in enumerate(steps, 1):
            with pytest.raises(PowerLoss) if number == power.last else nullcontext():
                index.sync() if step == "sync" else write(index, steps[:number].count("write"))
        power.back()
        index.crash(random.Random(seed))
        found.add(batches(index))
    assert found == kept


def test_when_the_machine_is_off_nothing_has_an_effect() -> None:
    for seed in SEEDS:
        power = Power(last=2)
        index = SimulatedIndex(power)
        write(index, 1)
        with pytest.raises(PowerLoss):
            write(index, 2)
        for _ in range(2):
            with pytest.raises(PowerLoss):
                index.apply([(b"too late", b"")])
        power.back()
        index.crash(random.Random(seed))
        assert index.get([b"too late"]) == [None] and batches(index) <= 2


def test_a_planned_fault_comes_once_and_has_no_effect() -> None:
    index = SimulatedIndex()
    write(index, 1)
    index.fail("apply", 2, TierUnavailable("no space left for it"))
    index.fail("sync", 1, OSError("planned"))
    write(index, 2)
    with pytest.raises(TierUnavailable):
        write(index, 3)
    with pytest.raises(OSError):
        index.sync()
    assert batches(index) == 2 and index.unsynced == 2
    write(index, 3)
    index.sync()
    index.fail("get", 1, OSError("planned"))
    index.fail("iterate", 1, OSError("planned"))
    with pytest.raises(OSError):
        index.get([KEY])
    with pytest.raises(OSError):
        next(index.iterate(b""))
    assert batches(index) == 3
