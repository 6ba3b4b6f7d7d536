"""Hot prefixes: what a tree of chains counts, against counting every prefix of every chain."""

from __future__ import annotations

import secrets
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from kvstore.prefixes.hottest import PrefixTree
from tiering.frame import KEY_BYTES

BLOCK = 64
SEED = secrets.randbits(32)
print(f"seed {SEED}")


def chain(*names: int) -> bytes:
    """Keys: each names its block and all before it."""
    keys, state = [], 0
    for name in names:
        state = hash((state, name))
        keys.append(state.to_bytes(8, "little", signed=True) * (KEY_BYTES // 8))
    return b"".join(keys)


def naive(chains: list[bytes], least_tokens: float) -> dict[bytes, int]:
    """By the definition, the longest prefixes first: uses that no reported longer one explains."""
    uses = Counter(one[:stop] for one in chains for stop in range(KEY_BYTES, len(one) + 1, KEY_BYTES))
    reported: dict[bytes, int] = {}
    for prefix in sorted(uses, key=len, reverse=True):
        below = [one for one in reported if len(one) > len(prefix) and one.startswith(prefix)]
        nearest = [one for one in below if not any(one != it and one.startswith(it) for it in below)]
        own = uses[prefix] - sum(uses[one] for one in nearest)
        if own > 0 and own * len(prefix) // KEY_BYTES * BLOCK >= least_tokens:
            reported[prefix] = own
    return reported


@seed(SEED)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=30),
    st.floats(0, 0.5),
)
def test_a_tree_reports_what_counting_all_prefixes_does(names: list[list[int]], share: float) -> None:
    chains = [chain(*one) for one in names]
    tree = PrefixTree(BLOCK, 1000)
    for one in chains:
        tree.found(one, 1.0, 0.0)
        tree.check()
    total = sum(len(one) for one in chains) // KEY_BYTES * BLOCK
    assert tree.found_tokens() == pytest.approx(total)
    found = {one.node.keys(): one.uses for one in tree.hottest(share * total)}
    assert found == pytest.approx(naive(chains, share * total))


def test_a_prefix_that_conversations_share_ends_where_they_part() -> None:
    tree = PrefixTree(BLOCK, 1000)
    for number in range(1000):
        tree.found(chain(*range(15), 1000 + number, 1, 2, 3, 4), 1.0, float(number))
        if number % 4 == 0:
            tree.granted(chain(*range(15), 1000 + number, 1, 2, 3, 4), 5, 1.0)
    (one,) = tree.hottest(0.01 * tree.found_tokens())
    assert (one.node.end, one.uses, one.node.keys()) == (15, 1000, chain(*range(15)))
    assert one.saved_blocks == 250 * 10, "of the first 5 each engine had its own"


def test_what_a_longer_one_saved_is_not_counted_again() -> None:
    tree = PrefixTree(BLOCK, 1000)
    for keys, times in ((chain(1, 2, 3, 4), 10), (chain(1, 2, 9), 1), (chain(1, 2), 5)):
        for _ in range(times):
            tree.found(keys, 2.0, 0.0)
            tree.granted(keys, 1, 2.0)
    found = {one.node.end: (one.uses, one.saved_blocks) for one in tree.hottest(10 * BLOCK)}
    assert found == {4: (20, 60), 2: (12, 12)}


def test_a_lease_that_is_shorter_than_its_look_up_counts_for_the_look_up() -> None:
    """As an engine's that computes what is behind its grid; of the first block each has its own."""
    tree = PrefixTree(BLOCK, 1000)
    for number in range(10):
        for times in (1, 2):
            tree.found(chain(*range(54), 100 + number, 1, 2), times, 0.0)
            tree.granted(chain(*range(54)), 1, times)
    for number in range(30):
        tree.found(chain(*range(54), 1000 + number), 1.0, 0.0)  # too few each to be reported
        tree.granted(chain(*range(54)), 1, 1.0)
    rows = tree.hottest(2 * 57 * BLOCK)
    assert sorted((row.node.end, row.uses, row.leases) for row in rows) == [(54, 30, 30), *[(57, 3, 3)] * 10]
    assert [row.saved_blocks for row in rows] == [53 * row.uses for row in rows]


@seed(SEED)
@given(
    st.integers(0, 3), st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=7), st.data()), max_size=30)
)
def test_where_all_are_reported_each_granted_block_is_somewhere(
    first: int, asked: list[tuple[list[int], st.DataObject]]
) -> None:
    """Each look-up with one lease, of all of it or of less. All of them begin at one block: where some begin later, and
    a prompt parts from them in between, what each left out is known of their sum alone."""
    tree, granted = PrefixTree(BLOCK, 1000), 0
    for names, data in asked:
        stop = data.draw(st.integers(first + 1, len(names)))
        tree.found(chain(*names), 1.0, 0.0)
        tree.granted(chain(*names[:stop]), first, 1.0)
        granted += stop - first
    rows = tree.hottest(0)
    assert sum(row.leases for row in rows) == pytest.approx(len(asked))
    assert sum(row.saved_blocks for row in rows) == pytest.approx(granted)
    assert all(row.leases <= row.uses * (1 + 1e-9) for row in rows)


def test_a_tree_is_bounded_and_keeps_what_is_hot() -> None:
    draw = np.random.default_rng(SEED)
    tree = PrefixTree(BLOCK, 1000)
    for number in range(5000):
        hot = number % 3 == 0
        tree.found(chain(*range(8)) if hot else chain(*draw.integers(0, 1 << 40, 12).tolist()), 1.0, float(number))
        tree.shrink(100, 500)
        assert tree.nodes <= 100 and tree.blocks <= 500
    tree.check()
    assert {one.node.end: one.uses for one in tree.hottest(1000 * BLOCK)} == {8: 1667}
    tree.fade(0.5)
    assert tree.hottest(0)[-1].node.end in (8, 12) and max(one.uses for one in tree.hottest(0)) == 1667 / 2
    tree.check()


@pytest.mark.slow
def test_a_chain_of_many_ends_is_walked_without_recursion() -> None:
    tree = PrefixTree(BLOCK, 1000)
    keys = chain(*range(3000))
    for stop in range(KEY_BYTES, len(keys) + 1, KEY_BYTES):
        tree.found(keys[:stop], 1.0, 0.0)
    assert tree.nodes == 3000 and tree.blocks == 3000
    assert tree.hottest(0)[0].node.end == 3000
    tree.shrink(10, 10)
    tree.check()
    assert tree.nodes <= 10
