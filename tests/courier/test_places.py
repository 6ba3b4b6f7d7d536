"""What a courier found is kept for the fetch that may follow, and what came of it is known to who writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.block.account import HeldElsewhere, HitTier, Holder
from kvstore.block.identity import NodeIdentity
from kvstore.courier.locate import MOST_KEPT, MOST_NAMED, MOST_PLACES, Locator, Places
from kvstore.pool.directory import CHUNK_BLOCKS, MAX_HEADS, AliveTable, DirectoryDown, NodeEntry
from tiering.clock import SystemClock

PRINT, OTHER_PRINT, RUN = b"print...", b"another.", bytes(8)


def test_places_are_of_one_tenant_s_question_and_are_taken_once() -> None:
    """Each tenant's questions are numbered from 1 on."""
    locator = Locator(AliveTable(NodeIdentity()), None, None, None, None, SystemClock())
    of_a, of_b = Places(detail="a"), Places(detail="b")
    locator.keep("a", 1, of_a)
    locator.keep("b", 1, of_b)
    assert locator.kept("a", 1) is of_a and locator.kept("a", 1) is None
    assert locator.kept("c", 1) is None and locator.kept("b", 1) is of_b
    for number in range(MOST_KEPT + 1):
        locator.keep("a", number, of_a)
    assert locator.kept("a", 0) is None and locator.kept("a", 1) is of_a


class HintingDirectory:
    """Hints as a test says; None: it does not answer."""

    def __init__(self, holders: Sequence[Holder] | None) -> None:
        self.said = holders
        self.asked: list[tuple[list[int], float]] = []

    def alive(self) -> Mapping[bytes, NodeEntry]:
        return {}

    def holders(self, heads: Sequence[tuple[int, bytes]], seconds: float) -> list[Holder]:
        self.asked.append(([blocks for blocks, _ in heads], seconds))
        if self.said is None:
            raise DirectoryDown("at 10.0.0.1:6379 nothing answers")
        return list(self.said)


class SayingNodes:
    """Other nodes say how many blocks of a tenant they have; a node that is not there does not answer."""

    def __init__(self, blocks: dict[bytes, int]) -> None:
        self.blocks = blocks
        self.asked: list[int] = []

    def has(
        self, space: Any, nodes: Sequence[NodeEntry], keys: Sequence[bytes], first: int, seconds: float
    ) -> list[int | None]:
        self.asked.append(len(nodes))
        return [self.blocks.get(one.node) for one in nodes]


def number_of(node: int) -> bytes:
    return node.to_bytes(16, "big")


def asked_of(
    directory: HintingDirectory | None, nodes: SayingNodes, are_own: bool, blocks: int = 64, alive: int = 20
) -> HeldElsewhere:
    table, here = AliveTable(NodeIdentity()), SystemClock()
    prints = [(OTHER_PRINT,) if node == 5 else (OTHER_PRINT, PRINT) for node in range(alive)]
    entries = [NodeEntry(number_of(node), RUN, "127.0.0.1:1", prints[node]) for node in range(alive)]
    table.saw(entries, here.monotonic_seconds(), 60.0)
    locator = Locator(table, None, directory, nodes, None, here)  # type: ignore[arg-type]
    run: Any = SimpleNamespace(fingerprint=PRINT, by_id={bytes(32): SimpleNamespace(id=bytes(32))})
    keys = [index.to_bytes(32, "big") for index in range(blocks)]
    return locator.holders(run, bytes(32), keys, 60.0, are_own=are_own)


def holder(node: int, blocks: int = 32) -> Holder:
    return Holder(number_of(node), RUN, blocks, HitTier.NVME)


def test_a_router_is_told_what_the_directory_says_of_nodes_with_the_tenant_s_keys() -> None:
    directory, nodes = HintingDirectory([holder(1, 48), holder(5), holder(2), holder(77)]), SayingNodes({})
    found = asked_of(directory, nodes, are_own=True)
    assert found == HeldElsewhere([holder(1, 48), holder(2)]), "5 has other keys, 77 is gone"
    assert not nodes.asked and directory.asked == [([16, 32, 48, 64], 60.0)]
    down = asked_of(HintingDirectory(None), nodes, are_own=True)
    assert not down.holders and "directory" in down.left_out and "10.0.0.1" not in down.left_out
    assert asked_of(None, nodes, are_own=True).left_out


@pytest.mark.parametrize(
    ("blocks", "are_own", "last", "is_cut"),
    [
        (15, True, 0, False),
        (CHUNK_BLOCKS * MOST_PLACES + 15, True, 256, False),
        (CHUNK_BLOCKS * (MOST_PLACES + 2), True, 288, False),
        (CHUNK_BLOCKS * MAX_HEADS + 15, True, 16384, False),
        (1 << 16, True, 16384, True),
        (4096, False, 4096, False),
        (1 << 16, False, 4096, True),
    ],
)
def test_a_long_prompt_is_looked_up_at_as_many_places_as_a_short_one(
    blocks: int, are_own: bool, last: int, is_cut: bool
) -> None:
    """And the answer says so where its end is not looked at."""
    directory = HintingDirectory([])
    found = asked_of(directory, SayingNodes({}), are_own, blocks)
    ((places, _),) = directory.asked
    assert len(places) == min(last // CHUNK_BLOCKS, MOST_PLACES) and places[-1:] == ([last] if last else [])
    assert bool(found.left_out) is is_cut


@pytest.mark.parametrize("present", [0, 40])
def test_a_fetch_of_a_long_prompt_looks_at_no_more_places(present: int) -> None:
    directory = HintingDirectory([])
    locator = Locator(AliveTable(NodeIdentity()), None, directory, None, None, SystemClock())  # type: ignore[arg-type]
    keys = [index.to_bytes(32, "big") for index in range(1 << 16)]
    question = SimpleNamespace(keys=keys, present=present)
    look = SimpleNamespace(space=SimpleNamespace(id=bytes(32)), question=question)
    assert locator._hinted(look, 1.0) == []  # type: ignore[arg-type]
    ((places, _),) = directory.asked
    first = present // CHUNK_BLOCKS * CHUNK_BLOCKS
    assert len(places) == MOST_PLACES and places[0] == first + CHUNK_BLOCKS
    assert places[-1] == first + CHUNK_BLOCKS * MAX_HEADS


def test_of_keys_that_a_caller_gives_each_node_is_asked_itself() -> None:
    """They may be another tenant's, whose blocks a node does not tell of."""
    hinted = [holder(1, 48), holder(2), holder(3), holder(5)]
    nodes = SayingNodes({number_of(1): 40, number_of(2): 64, number_of(3): 0})
    found = asked_of(HintingDirectory(hinted), nodes, are_own=False)
    assert found == HeldElsewhere([holder(1, 40), holder(2, 32)]), "no more than both say"
    assert nodes.asked == [3]
    silent = asked_of(HintingDirectory(hinted), SayingNodes({number_of(1): 40}), are_own=False)
    assert list(silent.holders) == [holder(1, 40)] and silent.left_out
    many = [holder(node) for node in range(6, 6 + MOST_NAMED + 1)]
    nodes = SayingNodes({one.node: 64 for one in many})
    found = asked_of(HintingDirectory(many), nodes, are_own=False)
    assert nodes.asked == [MOST_NAMED] and len(found.holders) == MOST_NAMED and found.left_out
