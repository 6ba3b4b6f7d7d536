"""Where prompts part, from their sketches alone: a table of columns against one of lists, and each planted change."""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np
import pytest

from kvstore.insight.divergence import MOST_OWNERS, Divergence, PromptChange, PromptSketch, Shingler, SketchIndex
from kvstore.insight.trace import Column
from kvstore.prefixes.partings import MOST_GROUPS, Partings, SketchedPrompt
from kvstore.prefixes.sketches import SketchTable

BLOCK = 64
SHINGLER = Shingler(b"a tenant's")
SEED = secrets.randbits(32)
print(f"seed {SEED}")
PLAIN = SketchedPrompt(0, BLOCK, 100, 0, b"", b"start")


def drawn(draw: np.random.Generator, tokens: int) -> Column:
    return draw.integers(0, 30_000, tokens).astype(np.uint32)


def test_a_table_of_columns_finds_what_one_of_lists_does() -> None:
    draw = np.random.default_rng(SEED)
    table, index = SketchTable(), SketchIndex(40)
    texts = [drawn(draw, 400) for _ in range(200)]
    for number in range(120):
        tokens = np.concatenate([texts[one] for one in draw.choice(200, 6, replace=False)])
        sketch = SHINGLER.sketch(tokens)
        first = int(draw.integers(0, 1500))
        assert set(table.nearest(sketch, first, 40)) == set(index.nearest(sketch, first, 40))
        table.add(number, sketch)
        index.add(number, sketch)
        if len(table) > 40:
            table.forget(table.oldest)
        table.check()
        kept = table.get(number)
        assert kept.tokens == len(tokens) and (np.diff(kept.places.astype(np.int64)) > 0).all()
        assert set(kept.fingerprints.tolist()) == set(sketch.fingerprints.tolist())
    assert len(table) == 40 and table.oldest == 80 and table.size_bytes < 40 * 2500 // 64 * 16 * 2


def test_a_text_that_many_prompts_share_finds_the_newest_of_them() -> None:
    """Also once the older ones are forgotten, which had filled its list when the newer ones came."""
    shared = drawn(np.random.default_rng(SEED), 2000)
    table, index = SketchTable(), SketchIndex(MOST_OWNERS + 2)
    sketch = SHINGLER.sketch(shared)
    for number in range(3 * MOST_OWNERS):
        table.add(number, sketch)
        index.add(number, sketch)
        if len(table) > MOST_OWNERS + 2:
            table.forget(table.oldest)
        newest = set(range(max(0, number - MOST_OWNERS + 1), number + 1))
        assert set(index.nearest(sketch, 0, 40)) == set(table.nearest(sketch, 0, 40)) == newest


def test_nothing_in_an_empty_table_and_of_an_empty_sketch() -> None:
    table, empty = SketchTable(), PromptSketch(3, np.zeros(0, np.uint64), np.zeros(0, np.uint32))
    full = SHINGLER.sketch(drawn(np.random.default_rng(1), 5000))
    assert table.nearest(full, 0) == [] and table.nearest(empty, 0) == []
    table.add(0, empty)
    table.add(1, full)
    assert table.nearest(full, 0) == [1] and table.nearest(full, 4999) == [] and table.get(0).tokens == 3
    table.forget(0)
    table.forget(1)
    assert len(table) == 0 and table.size_bytes == 0


def test_a_fingerprint_that_all_have_costs_no_more_than_a_few() -> None:
    draw = np.random.default_rng(SEED)
    table, shared = SketchTable(), drawn(draw, 5000)
    for number in range(300):
        table.add(number, SHINGLER.sketch(np.concatenate([shared, drawn(draw, 300)])))
    assert table.nearest(SHINGLER.sketch(shared), 0) == [299, 298, 297, 296], "the newest"


# Groups ----------------------------------------------------------------------------------------------------------


def sketch() -> PromptSketch:
    return PromptSketch(9000, np.zeros(0, np.uint64), np.zeros(0, np.uint32))


def parted(kind: PromptChange = PromptChange.CHANGED, place: int = 40, **more: object) -> Divergence:
    return Divergence(kind, place, 6, 6, 8000, **more)  # type: ignore[arg-type]


def test_alike_ones_are_one_group_and_are_said_in_a_sentence() -> None:
    partings = Partings(lambda one, other: "")
    for number in range(20):
        partings.take(replace(PLAIN, parted=parted(place=40 + number % 3)), sketch(), float(number))
    partings.take(replace(PLAIN, parted=parted(place=900)), sketch(), 20.0)
    partings.take(replace(PLAIN, start=b"other", parted=parted()), sketch(), 20.0)
    partings.take(replace(PLAIN, parted=parted(PromptChange.REORDERED)), sketch(), 20.0)
    assert [one.sampled for one in partings.groups] == [20, 1, 1, 1]
    assert partings.groups[0].sentence(0.5) == (
        "1,000 prompts an hour part at tokens 40 to 42, differ for 6 tokens, and are the same again for 8,000: "
        "8.0 M tokens/h computed that were stored. Move what changes to the end."
    )
    assert partings.groups[1].sentence(0.01).startswith("1 prompt an hour parts at token 900, differs for 6 tokens")
    partings.check()
    partings.fade(0.5)
    assert partings.groups[0].prompts == 1000 and len(partings) == 23
    partings.fade(1e-6)
    assert partings.groups == []


def test_what_tokens_tell_is_believed_over_what_sketches_do() -> None:
    partings = Partings(lambda one, other: "")
    by_sketch = Divergence(PromptChange.CHANGED, 0, None, None, 7000, is_exact=False)
    for found in (by_sketch, parted(), by_sketch):
        partings.take(replace(PLAIN, parted=found), sketch(), 0.0)
    (group,) = partings.groups
    assert (group.place, group.is_exact, group.lengths(), group.equal_tokens) == (40, True, (6, 6), 8000)
    assert group.prompts == 300


def test_groups_are_bounded_and_those_that_lost_most_stay() -> None:
    partings = Partings(lambda one, other: "")
    partings.take(replace(PLAIN, every=1000, parted=parted(place=7)), sketch(), 0.0)
    for number in range(3 * MOST_GROUPS):
        partings.take(replace(PLAIN, parted=parted(place=1000 * number + 500)), sketch(), float(number))
        partings.check()
    assert len(partings.groups) == MOST_GROUPS and partings.groups[0].place == 7


@pytest.mark.parametrize(
    ("kind", "lengths", "words"),
    [
        (PromptChange.INSERTED, (0, 3), "have 3 tokens more there"),
        (PromptChange.INSERTED, (1, 0), "have 1 token fewer there"),
        (PromptChange.INSERTED, (None, None), "at the block from token 64 on, have tokens more or fewer there"),
        (PromptChange.CHANGED, (None, None), "differ for some tokens"),
        (PromptChange.CHANGED, (5, 6), "differ for 6 tokens (where an earlier one has 5)"),
        (PromptChange.REORDERED, (None, None), "in another order"),
        (PromptChange.SHORT, (None, None), "share 64 tokens at the start"),
        (PromptChange.SALTED, (None, None), "under another cache_salt"),
        (PromptChange.NAMESPACE, (None, None), "in another namespace (codec is raw here and int8-kc64 there)"),
    ],
)
def test_each_kind_has_its_words(kind: PromptChange, lengths: tuple[int | None, int | None], words: str) -> None:
    partings = Partings(lambda one, other: "")
    is_exact = lengths != (None, None) or kind in (PromptChange.SHORT, PromptChange.SALTED, PromptChange.NAMESPACE)
    what = "codec is raw here and int8-kc64 there" if kind is PromptChange.NAMESPACE else ""
    found = Divergence(kind, 64, *lengths, 8000, is_exact, what)
    partings.take(replace(PLAIN, parted=found), sketch(), 0.0)
    said = partings.groups[0].sentence(1.0)
    assert words in said and said.endswith("."), said
