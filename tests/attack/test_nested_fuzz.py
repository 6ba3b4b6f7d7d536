"""Fuzzing within what is packed, sealed, signed or checked, in short; `make torture` runs it at length.

5,000 cases in all: of the parsers in this process, of a sidecar and of a client through sockets, of directories.
"""

from __future__ import annotations

from random import Random

import pytest

from torture.nested import TARGETS, nested, outcome
from torture.nested_disk import CHANGES, directories
from torture.nested_door import clients, door

SEED = 25


@pytest.mark.slow
def test_parsers_take_what_is_right_and_refuse_the_rest() -> None:
    counts = nested(4000, SEED)
    for name in TARGETS:
        assert counts.get(f"{name} refused", 0) + counts.get(f"{name} taken", 0) > 10, f"{name}: {counts}"
        assert counts.get(f"{name} taken", 0), f"{name}: nothing gets past its first check"
    assert sum(counts[f"{name} refused"] for name in TARGETS) > 1000


@pytest.mark.slow
def test_a_sidecar_under_odd_requests_serves_another_tenant() -> None:
    told = door(650, SEED)
    assert told["refused"] > 100 and told["answered"] > 10 and told["pings"] > 0


@pytest.mark.slow
def test_a_client_of_an_odd_sidecar_has_misses() -> None:
    counts = clients(310, SEED)
    assert (
        counts["read missed"] > 30 and counts["put missed"] > 10 and counts["drop refused"] and counts["open refused"]
    )


@pytest.mark.slow
def test_a_directory_with_odd_contents_is_opened_or_refused() -> None:
    counts = directories(60, SEED)
    assert all(any(one.startswith(name) for one in counts) for name in CHANGES), counts


@pytest.mark.parametrize("name", TARGETS)
def test_a_case_is_the_same_when_it_is_repeated(name: str) -> None:
    for number in range(5):
        assert outcome(name, Random(f"{SEED} {number}")) == outcome(name, Random(f"{SEED} {number}"))
