"""From an engine's prompts to what people are told: each planted change is named right at its place, by tokens and by
sketches alone, nothing is by chance, and it costs an engine next to nothing.

    engine    PromptSampler on a real namespace > PromptTold, as the wire has it
    sidecar   checked_prompt > Partings of the tenant
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from timeit import repeat
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from kvstore.block.account import Account, MissReason
from kvstore.block.identity import ExtraKey
from kvstore.client.handle import NamespaceHandle
from kvstore.insight.divergence import SHINGLE_TOKENS, SKETCH_EVERY, Divergence, PromptChange, compare_sketches
from kvstore.insight.trace import Column
from kvstore.node import EmbeddedStore
from kvstore.prefixes.book import checked_prompt
from kvstore.prefixes.partings import Partings
from kvstore.prefixes.sampler import LEAST_MISSED, MOST_PROMPTS, PromptSampler, Sampled
from kvstore.protocol import messages as m
from kvstore.protocol.told import MAX_SKETCHED_TOKENS, PromptTold
from workbench import MODEL, open_at, small_layout

BLOCK = 64
LAYOUT = small_layout()
SEEDS = range(20)
TEXT, OTHER = 30_000, 60_000
PREFILL_RATE = 25_000
"""Tokens a second: of a model of 8B on a large GPU."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    with open_at(tmp_path_factory.mktemp("kv"), dram="16MiB") as store:
        yield store


class Pair(NamedTuple):
    """swapped: of the first one, where the tokens begin, part and end whose two sides change places in the second."""

    first: Column
    second: Column
    place: int
    lengths: tuple[int | None, int | None] = (None, None)
    swapped: tuple[int, int, int] | None = None


def drawn(draw: np.random.Generator, tokens: int, first: int = 0) -> Column:
    return (first + draw.integers(0, TEXT, tokens)).astype(np.uint32)


def timestamp(seed: int) -> Pair:
    draw = np.random.default_rng(seed)
    first, place, length = drawn(draw, 10_000), int(draw.integers(0, 2000)), int(draw.integers(1, 30))
    second = first.copy()
    second[place : place + length] = OTHER + np.arange(length)
    return Pair(first, second, place, (length, length))


def insertion(seed: int) -> Pair:
    draw = np.random.default_rng(seed)
    first, place, length = drawn(draw, 10_000), int(draw.integers(0, 2000)), int(draw.integers(1, 500))
    second = np.concatenate([first[:place], drawn(draw, length, OTHER), first[place:]])
    return Pair(first, second, place, (0, length))


def reorder(seed: int) -> Pair:
    draw = np.random.default_rng(seed)
    system = drawn(draw, int(draw.integers(0, 500)))
    documents = [drawn(draw, int(size)) for size in draw.integers(400, 2000, 5)]
    shift = int(draw.integers(1, 5))
    order = np.roll(np.arange(5), shift)
    for number, one in enumerate(documents):
        one[0] = OTHER + number
    first = np.concatenate([system, *documents])
    swapped = len(system), len(first) - sum(map(len, documents[-shift:])), len(first)
    second = np.concatenate([system, *(documents[one] for one in order)])
    return Pair(first, second, len(system), swapped=swapped)


def short(seed: int) -> Pair:
    draw = np.random.default_rng(seed)
    place = int(draw.integers(16, BLOCK))
    first = drawn(draw, 5000)
    return Pair(first, np.concatenate([first[:place], drawn(draw, 5000, OTHER)]), place)


def told_of(
    sampler: PromptSampler, handle: NamespaceHandle, tokens: Column, extra: Sequence[ExtraKey] = (), stored: int = 0
) -> PromptTold:
    told = sampler.sketched(Sampled(handle, tokens, extra, stored))
    body = m.pack(m.Request(1, m.Tell([], None, [told])))
    verb = m.unpack_request(body[m.LENGTH_BYTES :]).verb
    assert isinstance(verb, m.Tell) and verb.prompts == [told], "the wire takes it"
    return told


def by_tokens(told: PromptTold) -> Divergence | None:
    return checked_prompt(told, 0, BLOCK)[0].parted


def by_sketches(*prompts: tuple[PromptTold, int]) -> Partings:
    """As the sidecar has it where these came from engines that had seen no other. In namespaces by number."""
    partings = Partings(lambda one, other: f"field is {one} here and {other} there")
    for told, number in prompts:
        partings.take(*checked_prompt(msgspec.structs.replace(told, parted=None), number, BLOCK), 0.0)
    partings.check()
    return partings


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (timestamp, PromptChange.CHANGED),
        (insertion, PromptChange.INSERTED),
        (reorder, PromptChange.REORDERED),
        (short, PromptChange.SHORT),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_planted_change_is_named_at_its_place(
    store: EmbeddedStore, made: object, kind: PromptChange, seed: int
) -> None:
    assert callable(made)
    pair, handle = made(seed), store.namespace(model=MODEL, layout=LAYOUT)
    sampler, draw = PromptSampler(1, lambda: 0.0), np.random.default_rng(1000 + seed)
    for _ in range(5):  # others are between them
        assert by_tokens(told_of(sampler, handle, drawn(draw, 3000, 2 * OTHER))) is None
    first = told_of(sampler, handle, pair.first)
    for _ in range(5):
        assert by_tokens(told_of(sampler, handle, drawn(draw, 3000, 2 * OTHER))) is None
    second = told_of(sampler, handle, pair.second)
    found = by_tokens(second)
    assert found is not None
    assert (found.kind, found.place, found.earlier_tokens, found.tokens) == (kind, pair.place, *pair.lengths)
    groups = by_sketches((first, 0), (second, 0)).groups
    if kind is PromptChange.SHORT:  # nothing is equal again, so sketches tell nothing: that takes their engine
        assert groups == []
        return
    (group,) = groups
    # A sketch has one of 64 runs, by the store's key: an order shows where it has one of each side that changed places.
    old, new = (checked_prompt(one, 0, BLOCK)[1] for one in (first, second))
    if pair.swapped is not None:
        start, middle, stop = pair.swapped
        sides = [
            (old.places >= at) & (old.places + SHINGLE_TOKENS <= end) for at, end in ((start, middle), (middle, stop))
        ]
        kind = PromptChange.REORDERED if all(one.any() for one in sides) else PromptChange.INSERTED
    fork = pair.place // BLOCK * BLOCK
    assert (group.kind, group.place, group.is_exact) == (kind, fork, False)
    was, stands = (dict(zip(one.fingerprints.tolist(), one.places.tolist(), strict=True)) for one in (old, new))
    shared = [
        run
        for run, place in stands.items()
        if place >= fork
        and was.get(run, -1) >= fork  # in the block where they part: behind the place, not before
        and (place != was[run] or place + SHINGLE_TOKENS > fork + BLOCK)
    ]
    assert group.equal_tokens == min(SKETCH_EVERY * len(shared), len(pair.second) - fork)
    # Each equal run is in it by a chance of 1 in 64, and ends of what is equal have none: six deviations of that.
    strays = 6 * (SKETCH_EVERY * found.equal_tokens) ** 0.5 + 2 * SHINGLE_TOKENS + BLOCK
    assert abs(group.equal_tokens - found.equal_tokens) <= strays


@pytest.mark.parametrize("seed", SEEDS)
def test_a_salt_and_another_namespace_are_named(store: EmbeddedStore, seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokens = drawn(draw, int(draw.integers(2000, 9000)))
    second = np.concatenate([tokens, drawn(draw, 100)])
    handle = store.namespace(model=MODEL, layout=LAYOUT)
    sampler = PromptSampler(1, lambda: 0.0)
    plain = told_of(sampler, handle, tokens)
    salted = told_of(sampler, handle, second, [ExtraKey(b"salt:%d" % seed)])
    found = by_tokens(salted)
    assert found is not None and (found.kind, found.place) == (PromptChange.SALTED, 0)
    assert found.equal_tokens == len(tokens) // BLOCK * BLOCK
    adapted = told_of(sampler, handle, second, [ExtraKey(b"adapter:%d" % seed)])
    changed = by_tokens(adapted)
    assert changed is not None and changed.kind is PromptChange.NAMESPACE and changed.what.startswith("adapter is ")
    (group,) = by_sketches((plain, 0), (salted, 0)).groups
    assert (group.kind, group.place) == (PromptChange.SALTED, 0)
    assert group.equal_tokens == pytest.approx(found.equal_tokens, abs=4 * BLOCK, rel=0.1)
    other = store.namespace(model=MODEL, layout=LAYOUT, weights_epoch=1 + seed)
    elsewhere = told_of(PromptSampler(1, lambda: 0.0), other, second)
    (group,) = by_sketches((plain, 7), (elsewhere, 8)).groups
    assert (group.kind, group.what) == (PromptChange.NAMESPACE, "field is 8 here and 7 there")
    (group,) = by_sketches((plain, 0), (adapted, 0)).groups
    assert (group.kind, group.what) == (PromptChange.NAMESPACE, "adapter")


@pytest.mark.slow
def test_nothing_is_told_of_a_thousand_random_prompts(store: EmbeddedStore) -> None:
    draw, handle = np.random.default_rng(7), store.namespace(model=MODEL, layout=LAYOUT)
    sampler, partings = PromptSampler(1, lambda: 0.0), Partings(lambda one, other: "")
    for number in range(1000):
        tokens = np.concatenate([np.zeros(1, np.uint32), drawn(draw, 2000)])
        told = told_of(sampler, handle, tokens, [ExtraKey(b"salt:%d" % (number % 3))] if number % 2 else ())
        assert told.parted is None
        partings.take(*checked_prompt(told, number % 4, BLOCK), 0.0)
    assert partings.groups == [] and len(partings) == 1000 and len(sampler.kept) == MOST_PROMPTS
    assert partings.size_bytes < 7 << 20


def test_what_goes_on_or_was_evicted_is_no_parting(store: EmbeddedStore) -> None:
    draw, handle = np.random.default_rng(3), store.namespace(model=MODEL, layout=LAYOUT)
    whole = drawn(draw, 8000)
    sampler = PromptSampler(1, lambda: 0.0)
    told = [told_of(sampler, handle, whole[:stop]) for stop in (8000, 8000, 5000, 7999, 3001)]
    assert [one.parted for one in told] == [None] * 5
    assert by_sketches(*((one, 0) for one in told)).groups == []


def test_what_was_found_all_the_same_is_not_counted_as_lost(store: EmbeddedStore) -> None:
    pair, handle = timestamp(1), store.namespace(model=MODEL, layout=LAYOUT)
    sampler = PromptSampler(1, lambda: 0.0)
    first, second = told_of(sampler, handle, pair.first), told_of(sampler, handle, pair.second, (), 9000)
    found = by_tokens(second)
    assert found is not None and found.equal_tokens == 1000
    (group,) = by_sketches((first, 0), (second, 0)).groups
    assert group.equal_tokens <= 1000
    sketches = [checked_prompt(one, 0, BLOCK)[1] for one in (first, second)]
    assert compare_sketches(*sketches, 0, BLOCK, 9990) is None and compare_sketches(*sketches, 0, BLOCK) is not None


# What is sampled -------------------------------------------------------------------------------------------------


def missed(tokens: int, reason: MissReason = MissReason.ABSENT) -> Account:
    return Account.missed(reason, tokens, BLOCK)


def test_few_are_sampled_and_their_tokens_are_not_looked_at_else(store: EmbeddedStore) -> None:
    handle = store.namespace(model=MODEL, layout=LAYOUT)
    chances = [one / 1000 for one in range(1000)]
    asked = []
    sampler = PromptSampler(100, chances.pop)

    def token_ids() -> list[int]:
        asked.append(len(chances))
        return list(range(2000))

    for _ in range(1000):
        sampler.offer(handle, missed(2000), (), token_ids)
        sampler.settle()
    assert asked == list(range(9, -1, -1))
    chances += [0.0] * 10
    sampler.offer(handle, missed(LEAST_MISSED), (), token_ids)
    for reason in (MissReason.AUDIT, MissReason.DEADLINE, MissReason.UNREACHABLE, MissReason.CHEAPER_TO_COMPUTE):
        sampler.offer(handle, missed(2000, reason), (), token_ids)
    sampler.offer(handle, missed(2000), [ExtraKey(b"content:9:cat", 7)], token_ids)
    PromptSampler(0, chances.pop).offer(handle, missed(2000), (), token_ids)
    assert len(asked) == 10
    sampler.close()


def test_what_comes_too_fast_is_left_out_and_an_end_waits_for_nothing(store: EmbeddedStore) -> None:
    handle = store.namespace(model=MODEL, layout=LAYOUT)
    sampler = PromptSampler(1, lambda: 0.0)
    for number in range(100):
        sampler.offer(handle, missed(40_000), (), lambda number=number: range(number, 40_000 + number))  # type: ignore[misc]
    sampler.close()
    PromptSampler(1, lambda: 0.0).close()


def test_long_prompts_are_cut_and_memory_is_bounded(store: EmbeddedStore) -> None:
    draw, handle = np.random.default_rng(5), store.namespace(model=MODEL, layout=LAYOUT)
    sampler = PromptSampler(1, lambda: 0.0)
    for _ in range(20):
        told = told_of(sampler, handle, drawn(draw, MAX_SKETCHED_TOKENS))
        assert told.tokens == MAX_SKETCHED_TOKENS and len(told.chain) == MAX_SKETCHED_TOKENS // BLOCK * 4
    assert sum(len(one.seen.tokens) for one in sampler.kept.values()) <= 1 << 21


def test_under_other_weights_nothing_is_compared(store: EmbeddedStore) -> None:
    pair = timestamp(2)
    sampler = PromptSampler(1, lambda: 0.0)
    told_of(sampler, store.namespace(model=MODEL, layout=LAYOUT), pair.first)
    told = told_of(sampler, store.namespace(model=MODEL, layout=LAYOUT, weights_epoch=5), pair.second)
    assert told.parted is None


@pytest.mark.parametrize("tokens", [2048, 32_768])
def test_what_it_takes_of_an_engine(store: EmbeddedStore, tokens: int) -> None:
    """-s prints it: all of it, over the prefill of the hundred prompts of which this is one."""
    draw, handle = np.random.default_rng(5), store.namespace(model=MODEL, layout=LAYOUT)
    first = drawn(draw, tokens)
    prompts = []
    for number in range(32):
        prompts.append(first.copy())
        prompts[-1][40:46] = OTHER + 6 * number + np.arange(6)
    sampler = PromptSampler(1, lambda: 0.0)
    told_of(sampler, handle, first)
    waiting = iter(prompts)
    best = min(repeat(lambda: sampler.sketched(Sampled(handle, next(waiting), (), 0)), number=1, repeat=32))
    share = best / (100 * tokens / PREFILL_RATE)
    print(f"\n{1000 * best:.2f} ms for {tokens:,} tokens: {100 * share:.4f} % of what 100 of them take to be computed")
    assert share < 0.002
