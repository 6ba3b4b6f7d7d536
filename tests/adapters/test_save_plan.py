"""Which pages are read by which save, and which hold decoded numbers: the plan beside one that looks at everything."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.save_plan import FREED, SavePlan, page_runs
from engine_adapter.step_orders import PageRun, SaveOrder, SaveReport
from kvstore.miss import MissReason

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
