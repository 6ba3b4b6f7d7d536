"""Who is alive, by this host's clock; and that a copied data directory keeps quiet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.identity import NodeIdentity
from kvstore.pool.directory import (
    FORGOTTEN_SECONDS,
    NODE_SECONDS,
    AliveTable,
    ClaimState,
    NodeClaim,
    NodeEntry,
)

HERE = NodeIdentity(b"h" * 16, b"run now.")
BEFORE, CLONE = b"run bef.", b"run cln."


def entry(number: int, run: bytes = b"12345678") -> NodeEntry:
    return NodeEntry(number.to_bytes(16, "big"), run, "a:1")


def test_an_entry_is_believed_for_some_seconds_and_the_last_one_counts() -> None:
    table = AliveTable(HERE)
    table.saw([entry(1), NodeEntry(HERE.node, CLONE, "a:1")], 100.0)
    table.saw([entry(1, b"87654321")], 101.0)
    assert table.alive(101.0 + NODE_SECONDS - 0.1) == {entry(1).node: entry(1, b"87654321")}
    assert table.alive(101.0 + NODE_SECONDS) == {}
    table.saw([entry(2)], 200.0)
    table.gone(entry(2).node)
    assert table.alive(200.0) == {}


def test_the_entry_of_the_run_before_is_waited_for() -> None:
    claim = NodeClaim(HERE)
    assert not claim.look(BEFORE, 0.0) and claim.state == ClaimState.UNSURE
    assert not claim.look(BEFORE, NODE_SECONDS) and claim.state == ClaimState.UNSURE
    assert claim.look(None, NODE_SECONDS + 1) and claim.state == ClaimState.OURS


def test_another_run_that_stays_or_takes_our_place_is_a_clone() -> None:
    stays = NodeClaim(HERE)
    assert not stays.look(CLONE, 0.0)
    assert not stays.look(CLONE, FORGOTTEN_SECONDS + 0.1) and stays.state == ClaimState.CLONED
    assert stays.look(None, 20.0) and stays.state == ClaimState.OURS, "it is gone"
    assert not stays.look(CLONE, 21.0) and stays.state == ClaimState.CLONED, "the place was ours"


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), st.floats(0.1, 3.0)), max_size=60), st.data())
def test_of_two_that_look_before_they_write_one_is_left(
    turns: list[tuple[str, bool, float]], data: st.DataObject
) -> None:
    """Two runs of one node, and a key that expires; each may be slow between looking and writing."""
    runs = {"a": b"run a...", "b": b"run b..."}
    claims = {who: NodeClaim(NodeIdentity(HERE.node, run)) for who, run in runs.items()}
    now, key, until = 0.0, None, 0.0
    pending: dict[str, bool] = {}
    for who, writes, seconds in turns:
        now += seconds
        found = key if now < until else None
        if who in pending:
            pending.pop(who)
            key, until = runs[who], now + NODE_SECONDS
        elif claims[who].look(found, now):
            if writes:
                key, until = runs[who], now + NODE_SECONDS
            else:
                pending[who] = True  # it writes with its next turn
    for _ in range(12):
        for who in runs:
            now += 0.75
            found = key if now < until else None
            if claims[who].look(found, now):
                key, until = runs[who], now + NODE_SECONDS
    assert sorted(claim.state for claim in claims.values()) == [ClaimState.CLONED, ClaimState.OURS]


def test_a_lost_entry_is_noticed_once_it_was_written() -> None:
    claim = NodeClaim(HERE)
    assert not claim.was_lost(None)
    claim.wrote()
    assert claim.was_lost(None) and not claim.was_lost(HERE.incarnation)
