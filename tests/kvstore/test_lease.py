"""The table of leases: the order in which they run out, and what is left of one that did."""

from __future__ import annotations

from array import array

import pytest

from kvstore.core.table import LeaseTable


def places(*given: int) -> array[int]:
    return array("q", given)


def table() -> LeaseTable:
    return LeaseTable(lease_seconds=10)


def test_a_lease_lasts_as_long_as_all_do() -> None:
    leases = table()
    first = leases.add(0, 0, [1, 2], places(7, 8), now=100.0)
    second = leases.add(1, 3, [5], places(9), now=104.0)
    assert first != second and len(leases) == 2
    assert list(leases.expire_due(109.9)) == []
    (record,) = leases.expire_due(110.0)
    assert (record.number, list(record.rows), record.first_block) == (first, [1, 2], 0)
    assert [record.place(0, 0), record.place(0, 1)] == [7, 8] and record.has_expired and not record.is_released
    assert leases.get(first) is record and leases.get(second) is not None
    assert [other.number for other in leases.live.values()] == [second]
    assert [record.number for record in leases.expire_due(1000.0)] == [second]
    assert list(leases.live.values()) == []


def test_one_that_ran_out_is_kept_until_it_is_taken() -> None:
    leases = table()
    number = leases.add(0, 0, [1], places(7), now=0.0)
    (record,) = leases.expire_due(10.0)
    assert len(leases) == 1, "it still keeps its slots from reuse"
    assert leases.take(number) is record and leases.take(number) is None and len(leases) == 0


def test_a_live_one_is_taken_once() -> None:
    leases = table()
    number = leases.add(0, 0, [1], places(7), now=0.0)
    record = leases.take(number)
    assert record is not None and record.is_released and not record.has_expired
    assert leases.take(number) is None and leases.take(99) is None
    assert list(leases.expire_due(1000.0)) == []


@pytest.mark.parametrize("has_run_out", [False, True])
def test_a_lease_ends_with_the_last_of_its_holders(has_run_out: bool) -> None:
    """Others may be copying under it, whoever lets go first."""
    leases = table()
    number = leases.add(0, 0, [1], places(7), now=0.0, owner=b"a")
    assert leases.attach(number) and leases.attach(number)
    if has_run_out:
        assert len(list(leases.expire_due(10.0))) == 1
        assert not leases.attach(number), "it pins nothing that a new holder could count on"
    for _ in range(2):
        assert leases.take(number) is None and leases.get(number) is not None
        assert leases.is_live(number) is not has_run_out and leases.counts[b"a"] == len(leases) == 1
    record = leases.take(number)
    assert record is not None and record.number == number
    assert leases.get(number) is None and leases.counts[b"a"] == len(leases) == 0


def test_all_leases_of_a_namespace_end_at_once() -> None:
    leases = table()
    numbers = [leases.add(namespace, 0, [row], places(row), now=0.0) for row, namespace in enumerate([0, 1, 0])]
    assert [record.number for record in leases.expire_all(0)] == [numbers[0], numbers[2]]
    assert [record.number for record in leases.live.values()] == [numbers[1]]
    assert list(leases.expire_all(0)) == []


def test_numbers_are_never_used_again() -> None:
    leases = table()
    seen = set()
    for _ in range(5):
        number = leases.add(0, 0, [1], places(7), now=0.0)
        leases.take(number)
        seen.add(number)
    assert len(seen) == 5 and 0 not in seen, "0 is no lease"
