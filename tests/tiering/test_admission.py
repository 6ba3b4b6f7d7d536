"""Who is written below DRAM: what was learned of it, and never more than the budget."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.policies import admission
from tiering.policies.admission import BUCKET_SECONDS, PAST, AdmitAll, LearnedAdmission

BLOCK = 1 << 20


class Load:
    """Requests of a few blocks each that leave DRAM one after the other, and come back or not."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.now = 0.0
        self.names = array("q")
        self.admission = LearnedAdmission(self.names, lambda: self.now, bytes_per_second)
        self.next_name = 0

    def come(self, blocks: int, behind: list[int] | None = None) -> list[int]:
        """A request brings so many new blocks behind others; its rows, the deepest first."""
        rows = []
        for _ in range(blocks):
            self.names.append(self.next_name)
            self.next_name += 1
            rows.append(len(self.names) - 1)
            self.admission.stored(rows[-1])
        chain = rows[::-1] + (behind or [])
        self.admission.used(chain, blocks)
        return chain

    def come_again(self, row: int) -> int:
        """A block that left and was not written is stored anew; its row."""
        self.names.append(self.names[row])
        self.admission.stored(len(self.names) - 1)
        self.admission.used([len(self.names) - 1], 1)
        return len(self.names) - 1

    def leave(self, row: int) -> bool:
        return self.admission.admits([row], BLOCK)


def test_what_is_left_of_a_budget_is_told_and_asking_changes_nothing() -> None:
    """An hour's at the start, never more; what is written goes off it, and time brings it back."""
    assert AdmitAll().budget() is None and Load().admission.budget() is None
    load = Load(10 * BLOCK)

    def left() -> float:
        found = load.admission.budget()
        assert found is not None and load.admission.budget() == found
        assert (found.bytes_per_second, found.most_bytes) == (10 * BLOCK, 36_000 * BLOCK)
        return found.left_bytes / BLOCK

    assert left() == 36_000
    written = sum(load.leave(row) for row in load.come(100))
    assert written and left() == 36_000 - written
    load.now += written / 20
    assert left() == 36_000 - written / 2
    load.now += 3_600
    assert left() == 36_000
    load.leave(load.come(1)[0])
    assert left() <= 36_000


@pytest.fixture(autouse=True)
def short_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LEAST_HISTORY", 500)


def taught(load: Load, rounds: int = 3_000) -> tuple[float, float]:
    """Requests of one block come back, those of forty do not: the shares of both that are written at the end."""
    load.admission.expect(0)
    written: dict[int, list[bool]] = {1: [], 40: []}
    for _ in range(rounds):
        load.now += 1
        for blocks in (1, 40):
            chain = load.come(blocks)
            written[blocks] += [load.leave(row) for row in chain[: 3 if blocks > 1 else 1]]
            if blocks == 1:
                load.leave(load.come_again(chain[0]))
    return tuple(sum(one[-500:]) / 500 for one in written.values())  # type: ignore[return-value]


def test_those_are_written_that_come_back() -> None:
    assert taught(Load()) == (1.0, 0.0)


def test_at_first_everything_is_written() -> None:
    load = Load()
    assert all(load.leave(row) for row in load.come(100))
    everything = AdmitAll()
    assert all(everything.admits([row], BLOCK) for row in range(10))


def test_that_it_was_not_written_is_not_held_against_it() -> None:
    """What comes back is counted by its name, wherever it comes from."""
    load = Load()
    load.admission.expect(0)
    for _ in range(4_000):
        chain = load.come(8)
        load.leave(chain[0])
    assert not load.leave(load.come(8)[0])
    for _ in range(4_000):
        chain = load.come(8)
        load.leave(chain[0])
        load.come_again(chain[0])
    assert load.leave(load.come(8)[0])


def test_what_is_written_takes_its_ancestors_along_and_pays_for_them() -> None:
    load = Load(bytes_per_second=10 * BLOCK / BUCKET_SECONDS)
    chain = load.come(30)
    assert not load.admission.admits(chain[:11], BLOCK)
    assert load.admission.admits(chain[:10], BLOCK)
    assert not load.admission.admits(chain[10:11], BLOCK)
    load.now += BUCKET_SECONDS / 10
    assert load.admission.admits(chain[10:11], BLOCK)


def test_a_budget_goes_to_those_that_come_back_first() -> None:
    everything, nothing = taught(Load(bytes_per_second=1.2 * BLOCK), 6_000)
    assert everything > 0.5 and nothing == 0.0


@given(
    seed=st.integers(0, 1 << 20),
    rate=st.floats(0.01 * BLOCK, 1_000 * BLOCK),
    backwards=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_no_more_is_written_than_the_budget_allows(seed: int, rate: float, backwards: bool) -> None:
    random, load = Random(seed), Load(rate)
    written, latest = 0, 0.0
    for _ in range(400):
        load.now += random.choice([0.0, 0.1, 3.0, 500.0, -100.0 if backwards else 0.0])
        latest = max(latest, load.now)
        chain = load.come(random.randrange(1, 30))
        way = chain[: random.randrange(1, len(chain) + 1)]
        if load.admission.admits(way, BLOCK):
            written += BLOCK * len(way)
        assert written <= rate * (BUCKET_SECONDS + latest) * (1 + 1e-9)


@given(seed=st.integers(0, 1 << 20), rate=st.floats(0.01 * BLOCK, 100 * BLOCK))
@settings(max_examples=30, deadline=None)
def test_what_is_written_without_asking_is_made_up_for_before_anything_else_is(seed: int, rate: float) -> None:
    """Whatever is asked stays within the budget with all that was not, but for what went beyond it unasked."""
    random, load = Random(seed), Load(rate)
    written = 0.0
    for _ in range(400):
        load.now += random.choice([0.0, 0.1, 3.0, 500.0])
        if random.random() < 0.1:
            unasked = random.randrange(1, 200) * BLOCK
            load.admission.spent(unasked)
            written += unasked
            left = load.admission.budget()
            assert left is not None and 0 <= left.left_bytes <= left.most_bytes
        way = load.come(random.randrange(1, 30))
        if load.admission.admits(way, BLOCK):
            written += BLOCK * len(way)
            assert written <= rate * (BUCKET_SECONDS + load.now) * (1 + 1e-9)


def test_behind_a_debt_it_goes_on_as_before() -> None:
    load = Load(bytes_per_second=100.0 * BLOCK)
    assert taught(load) == (1.0, 0.0)
    load.admission.spent(int(10 * BUCKET_SECONDS * 100 * BLOCK))
    assert taught(load, 600) == (0.0, 0.0)
    load.now += 11 * BUCKET_SECONDS
    assert taught(load) == (1.0, 0.0)


def test_what_it_remembers_is_bounded() -> None:
    load = Load()
    load.admission.expect(0)
    for _ in range(5 * 500):
        for row in load.come(3):
            load.leave(row)
    assert len(load.admission._left) == 500 and len(load.admission._past) == PAST * 500
    load.admission.expect(1 << 30)
    assert load.admission._history == admission.MOST_HISTORY


def test_of_blocks_from_before_a_restart_nothing_is_known() -> None:
    """They are taken for blocks that were used often, also once others were stored beside them."""
    load = Load()
    load.names.extend(range(1_000, 1_050))
    load.admission.found(range(50))
    often = load.admission._class_of(49)
    chain = load.come(20)
    load.admission.used([48, 47], 2)
    assert [load.admission._class_of(row) for row in (0, 47, 48, 49)] == [often] * 4
    assert load.admission._class_of(50) < often and load.leave(48)
    load.admission.found(range(chain[-1], chain[0] + 1))
    assert {load.admission._class_of(row) for row in chain} == {often}
