"""Processes that use a whole store are killed at random moments and at every failpoint; and the judge is judged.

`make torture ARGS="--points 20 --stores 1000"` runs the same for longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvstore.node import EmbeddedStore
from model.store_model import Prompt, block_kv
from tiering.nvme.lmdb_index import LmdbMaker
from torture.campaign import nursery, points, stores
from torture.child import LETTERS, SIZES, Space
from torture.nursery import Nursery
from torture.points import POINTS
from torture.witness import Witness
from workbench import open_at

SEED = 1
WHOLE = "default/whole"


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


@pytest.mark.slow
def test_a_process_is_killed_at_every_failpoint(children: Nursery) -> None:
    sums = points(children, 1, SEED)
    assert {point: sums.get(point) for point in POINTS} == dict.fromkeys(POINTS, 1)
    assert sums["blocks compared"] > 0 and sums["evicted blocks"] > 0, sums


@pytest.mark.slow
def test_five_processes_are_killed_at_random_moments(children: Nursery) -> None:
    sums = stores(children, 5, SEED)
    assert sums["kills"] == 5 and sums["comparisons"] > 0, sums


# The judge ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    one = Witness(tmp_path, SEED)
    one.random = Random(SEED)
    yield one
    one.close()


def opened(witness: Witness, **options: object) -> EmbeddedStore:
    return open_at(witness.store_directory, dram="2MiB", indexes=LmdbMaker, **{**SIZES, **options})


def stored(witness: Witness, *letters: int, name: str = WHOLE) -> None:
    """Durable, and nobody has heard of it."""
    with opened(witness) as store:
        assert Space(store, name).put(letters, "disk")


def key_of(witness: Witness, *letters: int) -> str:
    with opened(witness) as store:
        return Space(store, WHOLE).handle.match(Prompt(letters).token_ids).keys[-1].hex()


def hear(witness: Witness, *lines: str) -> None:
    said = ["opening", f"space 0 {WHOLE}", "ready", *lines]
    witness.hear("\n".join(said).encode(), said)


def test_what_was_acknowledged_must_be_there(witness: Witness) -> None:
    stored(witness, 1, 10)
    hear(witness, f"put 0 {WHOLE} 1 10", "durable 0", "ended 0")
    witness.compare()
    hear(witness, f"put 0 {WHOLE} 1 10 20", "durable 0", "ended 0")
    with pytest.raises(AssertionError, match="1 of 3 blocks that are owed are not there"):
        witness.compare()


def test_what_nobody_stored_must_not_be_there(witness: Witness) -> None:
    stored(witness, 1)
    with pytest.raises(AssertionError, match="1 blocks are there that were given up"):
        witness.compare()


def test_what_was_found_must_stay_and_what_was_not_must_stay_away(witness: Witness) -> None:
    stored(witness, 1)
    hear(witness, f"put 0 {WHOLE} 1 10 20", "ended 0")
    witness.compare()
    stored(witness, 1, 10)
    with pytest.raises(AssertionError, match="1 blocks are there that were given up"):
        witness.compare()
    os.rename(witness.store_directory, witness.directory / "other")
    with pytest.raises(AssertionError, match="of 1 blocks that are owed are not there"):
        witness.compare()


def test_what_was_stored_again_after_it_had_gone_is_owed_again(witness: Witness) -> None:
    key = key_of(witness, 2)
    hear(witness, f"put 0 {WHOLE} 2", "durable 0", f"gone 0 {key}", f"put 1 {WHOLE} 2", "durable 1")
    with pytest.raises(AssertionError, match="are not there"):
        witness.compare()


def test_what_was_dropped_must_stay_away_but_for_what_was_put_meanwhile(witness: Witness) -> None:
    stored(witness, 1)
    stored(witness, 2)
    puts = [f"put 0 {WHOLE} 1", "durable 0", "ended 0", f"put 1 {WHOLE} 2", f"drop 2 {WHOLE}", "dropped 2", "ended 1"]
    hear(witness, *puts)
    with pytest.raises(AssertionError, match=r"1 blocks are there that were given up: \[.*letters=\(1,\)"):
        witness.compare()


def test_other_bytes_are_noticed(witness: Witness) -> None:
    with opened(witness) as store:
        space = Space(store, WHOLE)
        pages = space._pages(1, "tokens")
        kv = block_kv(space.layout, WHOLE, Prompt((1,)).chain(0))
        wrong = {layer: [plane.copy() for plane in planes] for layer, planes in kv.items()}
        wrong[0][1][-1, -1, -1] ^= 1
        pages.write(0, wrong)
        assert space.handle.put(Prompt((1,)).token_ids, pages.pages, durability="disk").stopped_at is None
    hear(witness, f"put 0 {WHOLE} 1", "durable 0")
    with pytest.raises(AssertionError, match="other bytes"):
        witness.compare()


def test_a_fault_of_a_process_is_noticed(witness: Witness) -> None:
    with pytest.raises(AssertionError, match="fault it did not work"):
        witness.hear(b"", ["opening", "fault it did not work"])


@pytest.mark.slow
def test_a_failpoint_that_is_not_reached_is_noticed(children: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torture.campaign.REACHED_WITHIN_SECONDS", 0)
    with pytest.raises(AssertionError, match="'slabs closed' was not reached"):
        points(children, 1, SEED, names=["slabs closed"])


# The record of evictions ----------------------------------------------------------------------------------------------


def test_what_the_disk_gives_up_is_recorded_while_it_is_still_there(witness: Witness) -> None:
    recorded: list[tuple[int, bytes]] = []
    held: list[bool] = []

    def gone(number: int, key: bytes) -> None:
        recorded.append((number, key))
        blocks = store._store.blocks
        held.append(blocks.is_below(blocks.index.find(number, key)))

    store = opened(witness, gone=gone)
    with store:
        spaces = [Space(store, WHOLE), Space(store, "default/shards")]
        owed: set[tuple[int, bytes]] = set()
        for letters in LETTERS[::2]:
            for space in spaces:
                if space.put(letters, "disk"):
                    keys = space.handle.match(Prompt(letters).token_ids).keys
                    owed |= {(space.handle.number, key) for key in keys}
        below = {(number, key) for number, key in owed if _is_below(store, number, key)}
        assert len(recorded) > 20 and owed - below <= set(recorded) and all(held)
        spaces[0].owner.drop(spaces[0].handle)
        of_the_dropped = {one for one in below if one[0] == spaces[0].handle.number}
        assert of_the_dropped and of_the_dropped <= set(recorded) and all(held)


def _is_below(store: EmbeddedStore, number: int, key: bytes) -> bool:
    blocks = store._store.blocks
    row = blocks.index.find(number, key)
    return row >= 0 and blocks.is_below(row)
