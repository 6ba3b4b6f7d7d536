"""Whom loads hold up: drawn histories beside a plain model of the rules, and the rules one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.paged.load_plan import LoadPlan
from engine_adapter.paged.requests import LoadUnderWay, RequestSpec, RequestState
from engine_adapter.paged.step_plan import LoadOrder, LoadReport
from kvstore.block.account import Account, MissReason
from kvstore.block.identity import Prompt
from paged_engine import Request

PAGE, BLOCK = 32, 64


def state_of(name: str, *keys: str) -> RequestState:
    request = Request(name, [0] * 400, 400, None, known=400)  # type: ignore[arg-type]
    state = RequestState(request, RequestSpec(), Account.of([]))
    state.prompt = Prompt(400, [key.encode() for key in keys])
    return state


def load_of(number: int, state: RequestState, *, waits: bool, first: int = 0, ranks: int = 1) -> LoadUnderWay:
    """Of 320 tokens; its pages are numbered from 100 times its own number on."""
    order = LoadOrder(number, state.request.request_id, 0, b"", first, 320, (), waits)
    pages = tuple(range(100 * number + first // PAGE, 100 * number + 12)) if waits else ()
    return LoadUnderWay(state, order, None, set(range(ranks)), 320, is_first=True, pages=pages)


def report(number: int, tokens: int, rank: int = 0) -> LoadReport:
    return LoadReport(number, "", rank, tokens, 0.001, None if tokens >= 320 else MissReason.CORRUPT)


KEYS = ("a", "ab", "abc", "abcd", "abcde")


def test_whoever_may_share_pages_of_a_load_waits_until_it_is_known() -> None:
    plan, first = LoadPlan(PAGE, BLOCK), state_of("first", *KEYS)
    plan.add(load_of(1, first, waits=True, first=128))
    same, other, unknown = state_of("same", *KEYS), state_of("other", "a", "ax", "axc"), state_of("unknown")
    assert plan.asks(same, 160) and plan.asks(unknown, 160), "pages behind token 128 may be those"
    assert not plan.asks(same, 128) and not plan.asks(same, 0), "what lies before is the engine's own"
    assert not plan.asks(other, 160), "another prompt by then"
    assert not plan.asks(first, 160)
    assert plan.reported(report(1, 320)) is not None
    assert not plan.asks(same, 160) and plan.take_invalid_pages() == set()


def test_a_load_beside_the_steps_is_nobody_elses_matter() -> None:
    plan = LoadPlan(PAGE, BLOCK)
    plan.add(load_of(1, state_of("first", *KEYS), waits=False))
    assert not plan.asks(state_of("same", *KEYS), 320)
    assert plan.resumes("first") and not plan.resumes("first")


def test_what_a_failed_load_left_behind_begins_where_it_ended() -> None:
    plan = LoadPlan(PAGE, BLOCK)
    plan.add(load_of(1, state_of("first", *KEYS), waits=True, first=64, ranks=2))
    assert plan.reported(report(1, 320)) is None and plan.take_invalid_pages() == set()
    load = plan.reported(report(1, 192, rank=1))
    assert load is not None and (load.end, load.is_whole, load.why) == (192, False, MissReason.CORRUPT)
    assert plan.take_invalid_pages() == set(range(106, 112)) and plan.take_invalid_pages() == set()
    assert plan.reported(report(1, 0)) is None and len(plan) == 0


def test_after_giving_up_all_pages_on_their_way_are_nobodys_and_nobody_waits() -> None:
    plan = LoadPlan(PAGE, BLOCK)
    plan.add(load_of(1, state_of("first", *KEYS), waits=True))
    plan.give_up()
    assert plan.take_invalid_pages() == set(range(100, 112))
    assert not plan.asks(state_of("same", *KEYS), 320)


@given(st.lists(st.tuples(st.sampled_from(["add", "turned away", "asks", "resumes", "ended"]), st.integers(0, 4))))
def test_whoever_was_turned_away_waits_for_those_that_are_parked_and_nobody_for_ever(
    history: list[tuple[str, int]],
) -> None:
    plan, states = LoadPlan(PAGE, BLOCK), [state_of(f"r{number}") for number in range(5)]
    parked: set[str] = set()
    turned_away: set[str] = set()
    for number, (what, at) in enumerate(history, 1):
        name = f"r{at}"
        if what == "add" and name not in turned_away:
            plan.add(load_of(number, states[at], waits=False))
            parked.add(name)
        elif what == "turned away" and name in parked:
            plan.turn_away(name)
            parked.discard(name)
            turned_away.add(name)
        elif what == "asks":
            parked.discard(name)
            assert plan.asks(states[at], 0) == (name in turned_away and bool(parked))
        elif what == "resumes":
            assert plan.resumes(name) == (name in parked)
            if name not in parked:
                turned_away.discard(name)
            parked.discard(name)
        elif what == "ended":
            plan.ended(name)
            parked.discard(name)
            turned_away.discard(name)
        assert plan.takes_no_more == bool(turned_away)
    for name in sorted(parked):
        assert plan.resumes(name)
    assert not any(plan.asks(state, 0) for state in states)
