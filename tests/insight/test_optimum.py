"""The optimum is the published one on the public traces, and on small traces nothing that is tried does better."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.insight.replay import optimal_hits
from recorded import made_of, recorded

# Hits of MIN with bypass over blocks that were asked for, partly filled ones among them: what two more implementations,
# in two languages, agree on to four digits.
MEASURED = {
    "mooncake_conversation": {1_000: 0.1907, 5_000: 0.3412, 10_000: 0.3664, 30_000: 0.3664, 100_000: 0.3664},
    "mooncake_synthetic": {1_000: 0.2767, 5_000: 0.5263, 10_000: 0.6180, 30_000: 0.6396},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [(name, size) for name, sizes in MEASURED.items() for size in sizes])
def test_it_has_the_figures_that_were_measured(name: str, blocks: int) -> None:
    trace = recorded(name)
    assert f"{optimal_hits(trace, blocks).sum() / len(trace.blocks):.4f}" == f"{MEASURED[name][blocks]:.4f}"


def best_of_all(prompts: list[list[int]], capacity: int) -> int:
    """By trying everything that could be held after each request: whole prefixes, of what was held and what came."""
    states = {frozenset[tuple[int, ...]](): 0}
    for ids in prompts:
        chain = [tuple(ids[: depth + 1]) for depth in range(len(ids))]
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for held, hits in states.items():
            found = next((depth for depth, block in enumerate(chain) if block not in held), len(chain))
            all_blocks = held | set(chain)
            for size in range(min(capacity, len(all_blocks)) + 1):
                for kept in combinations(sorted(all_blocks), size):
                    chosen = frozenset(kept)
                    if all(len(block) == 1 or block[:-1] in chosen for block in chosen):
                        following[chosen] = max(following.get(chosen, 0), hits + found)
        states = following
    return max(states.values())


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6),
    capacity=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_nothing_does_better(prompts: list[list[int]], capacity: int) -> None:
    assert int(optimal_hits(made_of(*prompts), capacity).sum()) == best_of_all(prompts, capacity)


def test_hits_are_told_by_request() -> None:
    assert optimal_hits(made_of([1, 2], [1, 3], [1, 2, 4], []), 10).tolist() == [0, 1, 2, 0]
