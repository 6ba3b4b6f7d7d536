"""Where prompts part: planted changes are each named right and found at their place, and nothing is found by chance."""

from __future__ import annotations

from timeit import repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.insight.divergence import (
    MOST_OWNERS,
    SHINGLE_TOKENS,
    PromptChange,
    SeenPrompt,
    Shingler,
    SketchIndex,
    compare_prompts,
)
from kvstore.insight.trace import Column

BLOCK = 64
SEEDS = range(20)
TEXT, OTHER = 30_000, 60_000
"""Token ids of a prompt are below the first; what is planted lies above it, so that its place is no matter of luck."""


def drawn(seed: int, tokens: int = 10_000) -> tuple[np.random.Generator, Column]:
    generator = np.random.default_rng(seed)
    return generator, generator.integers(0, TEXT, tokens).astype(np.uint32)


def planted(generator: np.random.Generator, tokens: int) -> Column:
    return generator.integers(TEXT, OTHER, tokens).astype(np.uint32)


def joined(*pieces: Column) -> Column:
    return np.concatenate(pieces)


SHINGLER = Shingler(b"a tenant's secret")


# Planted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_change_before_an_insertion_is_called_a_change(seed: int) -> None:
    generator, first = drawn(seed)
    place, later = int(generator.integers(0, 2000)), int(generator.integers(6000, 7000))
    second = joined(first[:later], planted(generator, 50), first[later:])
    second[place : place + 6] = planted(generator, 6)
    found = compare_prompts(SeenPrompt(first), SeenPrompt(second), BLOCK, SHINGLER)
    assert found is not None and (found.kind, found.place) == (PromptChange.CHANGED, place)


def test_what_goes_on_is_no_parting() -> None:
    _, first = drawn(0)
    for earlier, second in ((first, first), (first[:5000], first), (first, first[:5000])):
        assert compare_prompts(SeenPrompt(earlier), SeenPrompt(second), BLOCK, SHINGLER) is None


def test_what_is_stored_anyway_is_not_counted() -> None:
    generator, first = drawn(0)
    second = first.copy()
    second[40:46] = planted(generator, 6)
    assert compare_prompts(SeenPrompt(first), SeenPrompt(second), BLOCK, SHINGLER, 0).equal_tokens == 9954  # type: ignore[union-attr]
    found = compare_prompts(SeenPrompt(first), SeenPrompt(second), BLOCK, SHINGLER, 9000)
    assert found is not None and found.equal_tokens == 1000
    assert compare_prompts(SeenPrompt(first), SeenPrompt(second), BLOCK, SHINGLER, 9900) is None


# Sketches --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(0, 300), st.integers(SHINGLE_TOKENS, 400))
def test_equal_runs_have_equal_hashes_wherever_they_stand(seed: int, before: int, count: int) -> None:
    generator, run = drawn(seed, count)
    alone = SHINGLER.hashes(run)
    within = SHINGLER.hashes(joined(planted(generator, before), run, planted(generator, 50)))
    assert len(alone) == count - SHINGLE_TOKENS + 1
    assert (within[before : before + len(alone)] == alone).all()
    assert len(np.unique(within)) == len(within), "and others have not"


def test_another_key_has_other_fingerprints() -> None:
    _, tokens = drawn(1)
    one, other = SHINGLER.sketch(tokens), Shingler(b"another tenant's").sketch(tokens)
    assert len(np.intersect1d(one.fingerprints, other.fingerprints)) == 0


@pytest.mark.parametrize("count", [0, 1, SHINGLE_TOKENS - 1, SHINGLE_TOKENS])
def test_short_prompts_have_hardly_a_sketch(count: int) -> None:
    tokens = np.arange(count, dtype=np.uint32)
    assert len(SHINGLER.hashes(tokens)) == max(0, count - SHINGLE_TOKENS + 1)
    assert SHINGLER.sketch(tokens).tokens == count


def test_what_a_sketch_costs() -> None:
    """-s prints it."""
    _, tokens = drawn(2, 32_768)
    best = min(repeat(lambda: SHINGLER.sketch(tokens), number=10, repeat=20)) / 10
    sketch = SHINGLER.sketch(tokens)
    print(f"\n{1000 * best:.3f} ms for 32,768 tokens, {len(sketch.places)} fingerprints")
    assert 400 < len(sketch.places) < 640
    assert best < 0.05, "fifty milliseconds: no machine is that slow"


def test_the_index_finds_what_shares_most_and_forgets_the_oldest() -> None:
    index = SketchIndex(3)
    prompts = [drawn(seed, 4000)[1] for seed in range(4)]
    half = joined(prompts[1][:2000], prompts[2][2000:2600], drawn(9, 1000)[1])
    for number, tokens in enumerate(prompts):
        index.add(number, SHINGLER.sketch(tokens))
    assert len(index) == 3 and index.nearest(SHINGLER.sketch(prompts[0]), 0) == []
    assert index.nearest(SHINGLER.sketch(half), 0) == [1]
    assert index.nearest(SHINGLER.sketch(half), 2000) == [2]
    for number in range(4, 10):
        index.add(number, SHINGLER.sketch(drawn(number + 100, 4000)[1]))
    assert index.nearest(SHINGLER.sketch(half), 0) == []


@given(st.integers(0, 10_000), st.integers(0, 3000), st.integers(0, 40), st.integers(0, 40))
def test_any_single_change_is_at_its_place(seed: int, place: int, was: int, stands: int) -> None:
    generator, first = drawn(seed, 4000)
    earlier = joined(first[:place], planted(generator, was), first[place:])
    second = joined(first[:place], planted(generator, stands) + OTHER, first[place:]).astype(np.uint32)
    found = compare_prompts(SeenPrompt(earlier), SeenPrompt(second), BLOCK, SHINGLER)
    if not was and not stands:
        assert found is None
        return
    assert found is not None
    assert (found.place, found.earlier_tokens, found.tokens) == (place, was, stands)
    assert found.kind is (PromptChange.CHANGED if was and stands else PromptChange.INSERTED)
    assert found.equal_tokens == 4000 - place


def test_a_text_that_many_prompts_share_finds_the_newest_of_them() -> None:
    index, text = SketchIndex(MOST_OWNERS + 2), drawn(1, 4000)[1]
    for number in range(MOST_OWNERS + 4):
        index.add(number, SHINGLER.sketch(text))
    assert set(index.nearest(SHINGLER.sketch(text), 0, 40)) == set(range(4, MOST_OWNERS + 4))
