"""Which pages are read by which save, and which hold decoded numbers: the plan beside one that looks at everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.paged.save_plan import FREED, SavePlan, page_runs
from engine_adapter.paged.step_plan import PageRun, SaveOrder, SaveReport
from kvstore.block.account import MissReason

PAGES = st.sets(st.integers(1, 12), min_size=1, max_size=5)


def order(number: int, pages: list[int], first_block: int = 0) -> SaveOrder:
    return SaveOrder(number, f"r{number}", 0, b"", first_block * 64, (PageRun(0, pages),), None, 0)


def report(number: int, rank: int = 0, held: int = 9, stored: int = 0, **given: object) -> SaveReport:
    return SaveReport(number, f"r{number}", rank, held, stored, 0.0, **given)  # type: ignore[arg-type]


@dataclass
class Simple:
    """The same in the simplest way: all saves, one by one."""

    saves: dict[int, tuple[set[int], set[int]]] = field(default_factory=dict)
    audits: dict[int, set[int]] = field(default_factory=dict)
    decoded: dict[int, int] = field(default_factory=dict)

    def readers(self, pages: set[int]) -> list[int]:
        found = [number for number, (read, _) in self.saves.items() if read & pages]
        return sorted(found + [number for number, read in self.audits.items() if read & pages])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), PAGES),
        st.tuples(st.just("audit"), PAGES),
        st.tuples(st.just("taken"), PAGES),
        st.tuples(st.just("load"), PAGES),
        st.tuples(st.just("load failed"), PAGES),
        st.tuples(st.just("report"), st.integers(0, 40)),
        st.tuples(st.just("compared"), st.integers(0, 40)),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from([(0,), (0, 1)]))
@settings(max_examples=150)
def test_every_save_that_reads_a_page_is_named_until_all_ranks_have_reported(
    steps: list[tuple[str, object]], ranks: tuple[int, ...]
) -> None:
    plan, simple, loads = SavePlan(ranks, 32, 64), Simple(), list[int]()
    for number, (what, given_) in enumerate(steps, 1):
        pages = sorted(given_) if isinstance(given_, set) else []
        if what == "save":
            plan.add(order(number, pages), 0, 1)
            simple.saves[number] = set(pages), set(ranks)
        elif what == "audit":
            plan.watch(number, [PageRun(0, pages)])
            simple.audits[number] = set(pages)
        elif what == "taken":
            assert plan.taken(set(pages)) == simple.readers(set(pages))
            for page in pages:
                simple.decoded.pop(page, None)
        elif what == "load":
            plan.taken(set(pages))  # whoever is loaded into pages was given them
            plan.decoded(pages, number)
            simple.decoded.update(dict.fromkeys(pages, number))
            loads.append(number)
        elif what == "load failed" and loads:
            plan.computed(pages, loads[0])
            for page in pages:
                if simple.decoded.get(page) == loads[0]:
                    del simple.decoded[page]
            loads.pop(0)
        elif what == "report" and simple.saves:
            chosen = sorted(simple.saves)[int(given_) % len(simple.saves)]  # type: ignore[call-overload]
            waiting = simple.saves[chosen][1]
            offer = plan.reported(report(chosen, waiting.pop()))
            assert (offer is None) == bool(waiting)
            if not waiting:
                del simple.saves[chosen]
        elif what == "compared" and simple.audits:
            chosen = sorted(simple.audits)[int(given_) % len(simple.audits)]  # type: ignore[call-overload]
            del simple.audits[chosen]
            plan.unwatch(chosen)
            plan.unwatch(chosen)
        assert len(plan) == len(simple.saves)
        for page in range(1, 13):
            assert plan.exact_runs([[page, page]], 0, 1) == ([] if page in simple.decoded else [(0, 1)])
    assert plan.taken(set(range(1, 13))) == simple.readers(set(range(1, 13)))


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=24, max_size=24), min_size=1, max_size=3),
    st.sets(st.integers(1, 30)),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_runs_of_blocks_without_a_decoded_page(
    tables: list[list[int]], decoded: set[int], one: int, other: int
) -> None:
    plan = SavePlan((0,), 32, 64)
    plan.decoded(decoded, 1)
    first, stop = sorted((one, other))
    runs = plan.exact_runs(tables, first, stop)
    wanted = {
        block
        for block in range(first, stop)
        if not any(page in decoded for table in tables for page in table[2 * block : 2 * block + 2])
    }
    assert {block for start, end in runs for block in range(start, end)} == wanted
    if decoded:
        assert all(end < start for (_, end), (start, _) in pairwise(runs)), "as few as can be"
        assert all(start < end for start, end in runs)


@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(0, 9),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_the_pages_of_a_run_of_tokens(tables: list[list[int]], freed: int, one: int, other: int) -> None:
    first, stop = sorted((one, other))
    first = first // 32 * 32
    given_ = [[FREED] * min(freed, len(tables[0])) + tables[0][freed:], *tables[1:]]
    for table, run in zip(given_, page_runs(given_, first, stop, 32), strict=True):
        wanted = [(at, page) for at, page in enumerate(table) if first <= 32 * at < stop]
        while wanted and wanted[0][1] == FREED:
            wanted.pop(0)
        assert run.pages == [page for _, page in wanted]
        assert not wanted or run.first == wanted[0][0]


def test_a_save_of_several_ranks_holds_what_all_of_them_hold() -> None:
    plan = SavePlan((0, 1, 2), 32, 64)
    plan.add(order(1, [1, 2, 3, 4, 5, 6]), 0, 3)
    assert plan.reported(report(1, 2, held=3, stored=3)) is None
    assert plan.reported(report(1, 0, held=1, stored=1, reason=MissReason.QUOTA)) is None
    offer = plan.reported(report(1, 1, held=3, stored=3))
    assert offer is not None and (offer.held, offer.stored, offer.reason) == (1, 3, MissReason.QUOTA)
    assert plan.reported(report(1, 1)) is None and not offer.dropped


@pytest.mark.parametrize(
    ("held", "given_", "wanted"),
    [
        (6, {}, 6),
        (5, {"reason": MissReason.QUOTA}, 5),
        (2, {"reason": MissReason.EVICTED}, 2),
        (0, {"dropped": True}, 4),
        (5, {"dropped": True, "reason": MissReason.DISABLED}, 5),
    ],
)
def test_what_is_held_after_a_save_of_blocks_4_and_5(held: int, given_: dict[str, object], wanted: int) -> None:
    """What was dropped says nothing about the blocks before."""
    plan = SavePlan((0,), 32, 64)
    plan.add(order(1, [1, 2, 3, 4], 4), 4, 6)
    offer = plan.reported(report(1, held=held, **given_))
    assert offer is not None and offer.held == wanted
