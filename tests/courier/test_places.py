"""What a courier found is kept for the fetch that may follow, and what came of it is known to who writes."""

from __future__ import annotations

from kvstore.block.identity import NodeIdentity
from kvstore.courier.locate import MOST_KEPT, Locator, Places
from kvstore.courier.uses import Uses
from kvstore.pool.members import AliveTable
from tiering.clock import SystemClock


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


def test_blocks_that_the_remote_engine_did_not_have_may_be_written_to_it() -> None:
    uses, keys = Uses(), [bytes([number]) * 32 for number in range(4)]
    uses.came(keys)
    assert all(map(uses.has_come, keys))
    uses.did_not_come(keys[2:])
    assert [uses.has_come(key) for key in keys] == [True, True, False, False]
