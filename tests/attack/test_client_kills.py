"""Clients of a sidecar are killed and stopped in the middle of copies and fills, and sidecars under their clients.

`make torture ARGS="--clients 2000 --restarts 50"` runs the same for longer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torture.clients import clients, nursery, restarts
from torture.nursery import Nursery

SEED = 1


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


def test_twenty_four_clients_are_killed_or_stopped(children: Nursery) -> None:
    sums = clients(children, 24, SEED)
    assert sums["kills"] == 24 and sums["times nothing was left"] == 1, sums
    for what in ("gets", "raw bytes compared", "blocks stored", "resumes", "evictions from memory"):
        assert sums[what] > 0, (what, sums)


def test_two_sidecars_are_killed_under_their_clients(children: Nursery) -> None:
    sums = restarts(children, 2, SEED)
    assert sums["restarts"] == 2 and sums["times nothing was left"] == 2, sums
    assert sums["calm: found there again"] == sums["calm: blocks in memory before"] > 0, sums
