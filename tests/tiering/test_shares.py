"""Who gives way when a tier is full."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.policies.shares import THE_REST, Share, Shares

A, B, C = (bytes([number]) * 16 for number in range(3))
PIECES = 20


def test_whoever_holds_most_beyond_its_guarantee_gives_way() -> None:
    shares = Shares({A: Share(0.5), B: Share(0.2)})
    none_asks = [False] * 3
    assert shares.givers(1, [2, 9, 9], PIECES, none_asks) == [2, THE_REST, 1]
    assert shares.givers(THE_REST, [6, 10, 4], PIECES, none_asks) == [THE_REST]
    assert shares.givers(THE_REST, [0, 12, 8], PIECES, none_asks) == [2, 1]
    assert shares.givers(THE_REST, [0, 10, 4], PIECES, none_asks) == []


def test_what_none_asks_is_guaranteed_is_shared_by_weight() -> None:
    shares = Shares({A: Share(0, 3.0), B: Share(0, 1.0)})
    held = [0, 10, 10]
    for _ in range(20):
        giver = shares.givers(1, held, PIECES, [False] * 3)[0]
        held[giver] -= 1
        held[1] += 1
    assert held == [0, 15, 5]


def test_what_the_idle_borrowed_goes_first() -> None:
    shares = Shares({A: Share(0.3), B: Share(0.3)})
    held = [4, 7, 9]
    assert shares.givers(2, held, PIECES, [False, False, False]) == [2, 0, 1]
    assert shares.givers(2, held, PIECES, [False, True, False]) == [1, 2, 0]
    assert shares.givers(2, held, PIECES, [True, True, True]) == [0, 1, 2], "and never the one that asks"


def test_tenants_without_a_word_are_one_group() -> None:
    shares = Shares({A: Share(0.5)})
    for tenant in (B, A, C):
        shares.add_namespace(tenant)
    assert shares.of_namespace == [THE_REST, 1, THE_REST]
    assert shares.held({A: 3, B: 2, C: 4}) == [6, 3]


@st.composite
def tiers(draw: st.DrawFn) -> tuple[Shares, list[int], int]:
    parts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    parts = [part / max(100, sum(parts)) for part in parts]
    weights = [draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in parts]
    pieces = draw(st.integers(1, 60))
    shares = Shares(
        {bytes([at]): Share(part, weight) for at, (part, weight) in enumerate(zip(parts, weights, strict=True))}
    )
    held = [0] * len(shares)
    for group in draw(st.lists(st.integers(0, len(shares) - 1), min_size=pieces, max_size=pieces)):
        held[group] += 1
    return shares, held, pieces


@given(tier=tiers(), data=st.data())
@settings(deadline=None)
def test_within_its_guarantee_none_asks_loses_to_another_and_everybody_gets_it(
    tier: tuple[Shares, list[int], int], data: st.DataObject
) -> None:
    shares, held, pieces = tier
    guaranteed = [shares.guaranteed(group, pieces) for group in range(len(shares))]
    assert sum(guaranteed) <= pieces
    asker = data.draw(st.integers(0, len(shares) - 1))
    idle = data.draw(st.lists(st.booleans(), min_size=len(shares), max_size=len(shares)))
    givers = shares.givers(asker, held, pieces, idle)
    assert len(set(givers)) == len(givers)
    assert all(held[group] and (group == asker or held[group] > guaranteed[group]) for group in givers)
    if held[asker] < guaranteed[asker]:
        assert givers and givers[0] != asker


@pytest.mark.slow
@given(tier=tiers(), askers=st.lists(st.integers(0, 4), min_size=200, max_size=200))
@settings(deadline=None)
def test_those_who_want_more_end_with_what_their_weights_say(
    tier: tuple[Shares, list[int], int], askers: list[int]
) -> None:
    """All ask for room for long: nothing wanders any more, but to somebody who has nothing at all."""
    shares, held, pieces = tier
    everybody = list(range(len(shares)))
    for asker in [*askers, *everybody * (pieces + 1)]:
        givers = shares.givers(asker % len(shares), held, pieces, [False] * len(shares))
        if givers:
            held[givers[0]] -= 1
            held[asker % len(shares)] += 1
    settled = list(held)
    for asker in everybody:
        givers = shares.givers(asker, held, pieces, [False] * len(shares))
        assert not held[asker] or givers[0] == asker, (settled, asker)
    assert all(held[group] >= shares.guaranteed(group, pieces) for group in everybody)


def test_shares_change_for_those_who_have_a_group() -> None:
    shares = Shares({A: Share(0.5, 1.0), B: Share(0.2, 4.0)})
    shares.change({A: Share(0.1, 3.0), C: Share(0.9)})
    assert [shares.share_of(one) for one in (A, B, C)] == [Share(0.1, 3.0), Share(0.0, 4.0), None]
    assert sum(shares.parts()) == pytest.approx(1)
    none_asks = [False] * 3
    assert shares.givers(THE_REST, [6, 10, 4], PIECES, none_asks)[0] == THE_REST
    assert shares.givers(1, [0, 2, 18], PIECES, none_asks)[0] == 2, "it is guaranteed nothing any more"
    with pytest.raises(AssertionError):
        shares.change({A: Share(0.6), B: Share(0.6)})
