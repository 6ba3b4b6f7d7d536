"""A sidecar's prefix diagnostics: bounded whatever comes, each tenant its own, of next to no cost to a look-up. A tree
of chains counts what counting every prefix of every chain does."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from timeit import repeat

import msgspec
import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from kvstore.insight import prefixes as module
from kvstore.insight.curve import HALF_LIFE_SECONDS
from kvstore.insight.prefixes import PrefixBook, PrefixTree, SpaceNames, Standing
from kvstore.protocol import messages as m
from kvstore.protocol.told import PrefixFigures, RequestTold, SavingsTold
from tiering.frame import KEY_BYTES

BLOCK, BLOCK_BYTES = 64, 4096
RED, BLUE = b"r" * 16, b"b" * 16
SEED = secrets.randbits(32)
print(f"seed {SEED}")
SPACES = {number: SpaceNames(f"digest-{number}", f"model-{number}") for number in range(100)}


class Time:
    """Moves when it is told to."""

    now = 1000.0

    def monotonic_seconds(self) -> float:
        return self.now

    wall_seconds = thread_seconds = monotonic_seconds


def a_book(*tenants: bytes) -> tuple[PrefixBook, Time]:
    time = Time()
    book = PrefixBook(time)
    for number, tenant in enumerate(tenants or (RED,)):
        book.opened(tenant, number, BLOCK_BYTES, BLOCK)
    return book, time


def keys(*names: int) -> list[bytes]:
    return [
        b"".join(one.to_bytes(4, "little") for one in names[: stop + 1])[-KEY_BYTES:].ljust(KEY_BYTES, b".")
        for stop in range(len(names))
    ]


def all_there(number: int, chain: Sequence[bytes]) -> Standing:
    return Standing(len(chain), {"dram": len(chain)}, None)


def shown(book: PrefixBook, names: Mapping[bytes, str] | None = None, *, of_all: bool = True) -> PrefixFigures:
    return book.figures(names or {RED: "red"}, SPACES, all_there, of_all=of_all)


# Look-ups --------------------------------------------------------------------------------------------------------


def test_what_few_ask_for_is_counted_exactly() -> None:
    book, time = a_book()
    for number in range(20):
        book.looked_up(RED, 0, keys(1, 2, 3, 100 + number), 3)
        book.granted(RED, 0, keys(1, 2, 3, 100 + number), 1, 3)
        time.now += 60
        book.step()
    time.now += 3600 - 20 * 60
    figures = shown(book)
    (row,) = figures.hottest
    assert (row.tenant, row.namespace, row.model) == ("red", "digest-0", "model-0")
    assert (row.tokens, row.bytes, row.stored_tokens, row.tiers) == (192, 3 * BLOCK_BYTES, 192, {"dram": 3})
    assert row.id == keys(1, 2, 3)[-1].hex()[:8] and row.used_at == 1000.0 + 20 * 60
    assert row.saved_tokens_per_hour == pytest.approx(row.requests_per_hour * 2 * BLOCK)
    assert row.saved_seconds_per_hour is None and row.retained_until is None
    assert (figures.lookups, figures.sampled, figures.dropped) == (20, 20, 0)
    book.check()


@pytest.mark.slow
def test_what_many_ask_for_is_sampled_without_a_bias() -> None:
    book, time = a_book()
    seconds, rate = 100, 2000
    for _ in range(seconds):
        for number in range(rate):
            book.looked_up(RED, 0, keys(1, 2, 3) if number % 4 else keys(7, 8, 9, 10), 3 if number % 4 else 4)
            if number % 100 == 99:
                book.step()
        time.now += 1
        book.step()
    rows = {row.tokens: row for row in shown(book).hottest}
    assert rows[192].requests_per_hour == pytest.approx(0.75 * rate * 3600, rel=0.1)
    assert rows[256].requests_per_hour == pytest.approx(0.25 * rate * 3600, rel=0.1)
    figures = shown(book)
    assert figures.lookups == seconds * rate and figures.sampled < figures.lookups / 10 and figures.dropped == 0


def test_what_counted_half_an_hour_ago_counts_half() -> None:
    book, time = a_book()
    time.now += 86_400
    book.step()
    for _ in range(20):
        book.looked_up(RED, 0, keys(1, 2, 3), 3)
    book.step()
    before = shown(book).hottest[0].requests_per_hour
    time.now += HALF_LIFE_SECONDS
    book.step()
    after = shown(book).hottest[0].requests_per_hour
    assert after == pytest.approx(before / 2) and before == pytest.approx(20 * 3600 * math.log(2) / HALF_LIFE_SECONDS)
    time.now += 40 * HALF_LIFE_SECONDS
    book.step()
    assert shown(book).hottest == []


@pytest.mark.slow
def test_queues_and_trees_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NODES", 256)
    book, time = a_book(RED, BLUE)
    draw = np.random.default_rng(3)
    for _ in range(60):
        for number in range(2000):
            book.looked_up(RED, 0, [draw.bytes(KEY_BYTES) for _ in range(3)] if number % 2 else keys(1, 2), 2)
        book.looked_up(BLUE, 1, keys(5, 6, 7), 3)
        book.check()
        time.now += 1
        book.step()
        book.check()
        trees = [tree for mine in book._tenants.values() for tree in mine.trees.values()]
        assert sum(one.nodes for one in trees) <= module.MOST_NODES + module.LEAST_NODES * len(trees)
    both = shown(book, {RED: "red", BLUE: "blue"})
    assert {(one.tenant, one.tokens) for one in both.hottest} == {("red", 128), ("blue", 192)}
    assert shown(book, {BLUE: "blue"}).lookups == 60


def test_a_look_up_that_is_longer_than_the_queue_is_left_out_and_counted() -> None:
    book, _ = a_book()
    book.looked_up(RED, 0, [b"k" * KEY_BYTES] * (module.MOST_QUEUED_BLOCKS + 1), module.MOST_QUEUED_BLOCKS + 1)
    for _ in range(2000 * module.ONE_IN):
        book.looked_up(RED, 0, keys(1), 1)
    book.check()
    assert shown(book).dropped > 0
    book.step()


def test_many_namespaces_of_one_tenant_take_no_more() -> None:
    book, time = a_book()
    for number in range(500):
        book.opened(RED, number, BLOCK_BYTES, BLOCK)
        for name in range(40):
            book.looked_up(RED, number, keys(name, name + 1), 2)
        time.now += 1
        book.step()
    book.check()
    (mine,) = book._tenants.values()
    assert len(mine.trees) == module.MOST_TREES and sum(one.nodes for one in mine.trees.values()) <= module.MOST_NODES


def test_seconds_saved_are_the_tenants_own_and_never_absurd() -> None:
    book, _ = a_book(RED, BLUE)
    for tenant, number in ((RED, 0), (BLUE, 1)):
        for _ in range(10):
            book.looked_up(tenant, number, keys(1, 2), 2)
            book.granted(tenant, number, keys(1, 2), 0, 2)
    request = RequestTold("r", 200, {"dram": 100, "engine": 50}, {"absent": 50})
    running = RequestTold("r", 200, {"dram": 100, "engine": 50}, {"absent": 50}, counts=True)
    for first, savings in ((running, SavingsTold(1.0, 0.5)), (request, SavingsTold(1.0))):
        book.told(RED, m.Tell([first], savings, namespace=0))  # and once more when it is over
    book.told(BLUE, m.Tell([request], SavingsTold(1e9)))
    book.step()
    rows = {row.tenant: row for row in shown(book, {RED: "red", BLUE: "blue"}).hottest}
    assert rows["red"].saved_seconds_per_hour == pytest.approx(rows["red"].saved_tokens_per_hour * 1.5 / 100)
    assert rows["blue"].saved_seconds_per_hour == rows["blue"].saved_tokens_per_hour


def test_of_what_a_tenant_is_shown_nothing_is_anothers() -> None:
    book, time = a_book(RED, BLUE)

    def feed(tenant: bytes, number: int, times: int) -> None:
        for _ in range(times):
            book.looked_up(tenant, number, keys(number, 2, 3), 3)

    feed(RED, 0, 10)
    book.step()
    alone = shown(book, of_all=False)
    feed(BLUE, 1, 5000)
    book.step()
    time.now += module.FRESH_SECONDS
    beside = shown(book, of_all=False)
    assert replace_seconds(beside) == replace_seconds(alone)
    assert {one.tenant for one in shown(book, {RED: "red", BLUE: "blue"}).hottest} == {"red", "blue"}
    book.forget(RED)
    assert shown(book).hottest == [] and shown(book).lookups == 0
    feed(RED, 0, 3)
    book.step()
    book.check()
    assert shown(book).lookups == 0, "until it opens a namespace again"


def replace_seconds(figures: PrefixFigures) -> PrefixFigures:
    return msgspec.structs.replace(figures, seconds=0.0)


# Cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [24, 512])
def test_what_it_takes_of_a_look_up(blocks: int) -> None:
    """-s prints it: at the door, and behind it, of a look-up and its lease, where there are thousands a second."""
    book, time = a_book()
    draw = np.random.default_rng(1)
    stem = [draw.bytes(KEY_BYTES) for _ in range(blocks // 2)]
    chains = [stem + [draw.bytes(KEY_BYTES) for _ in range(blocks - len(stem))] for _ in range(200)]

    def at_the_door() -> None:
        for chain in chains:
            book.looked_up(RED, 0, chain, blocks)
            book.granted(RED, 0, chain, 0, blocks)

    def whole() -> None:
        at_the_door()
        book.step()

    for _ in range(3):
        whole()
    time.now += 0.01
    door = min(repeat(at_the_door, setup=book.step, number=1, repeat=10)) / len(chains)
    all_ = min(repeat(whole, number=1, repeat=10)) / len(chains)
    copied = np.ones(2 << 20, np.uint8)
    into = np.zeros_like(copied)
    copy = min(repeat(lambda: np.copyto(into, copied), number=5, repeat=10)) / 5
    print(
        f"\n{1e6 * door:.2f} us at the door, {1e6 * all_:.2f} us in all, {blocks} blocks; a copy: {1e6 * copy:.0f} us"
    )
    assert all_ < 0.01 * blocks * copy


# A tree ---------------------------------------------------------------------------------------------------------


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
