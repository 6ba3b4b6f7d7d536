"""Prompts in a file: read or refused with the line, the hit rate as a store would have it, and sentences that help.
Planted changes are each named right and found at their place, and nothing is found by chance."""

from __future__ import annotations

import json
from timeit import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.errors import BadInput
from kvstore.insight.lint import (
    MOST_OWNERS,
    MOST_PROMPT_TOKENS,
    SHINGLE_TOKENS,
    Divergence,
    FilePrompt,
    LintResult,
    PromptChange,
    bytes_as_tokens,
    compare_prompts,
    lint,
    read_file_prompts,
    run_hashes,
    sketch,
)
from kvstore.insight.trace import Column

GENERATOR = np.random.default_rng(3)
SYSTEM = GENERATOR.integers(0, 30_000, 3000).tolist()


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(30_000, 60_000, count).tolist()


def judged(*lines: Any, block: int = 64, text: bool = False, **options: Any) -> LintResult:
    tokenise = bytes_as_tokens if text else None
    prompts = read_file_prompts("some.jsonl", [json.dumps(one) for one in lines], tokenise)
    return lint("some.jsonl", prompts, block, tokenise=tokenise, **options)


def only(result: LintResult) -> Any:
    (group,) = result.groups
    return group


# Kinds -----------------------------------------------------------------------------------------------------------


def test_a_time_near_the_start() -> None:
    stamped = [SYSTEM[:40] + tokens(6, seed) + SYSTEM[40:] + tokens(10, 1000 + seed) for seed in range(21)]
    result = judged(*stamped)
    group = only(result)
    assert (group.kind, group.prompts, group.first_place, group.last_place) == (PromptChange.CHANGED, 20, 40, 40)
    assert (group.earlier_tokens, group.tokens, group.equal_tokens, group.lost_tokens) == (6, 6, 2960, 20 * 2960)
    assert result.hit_tokens == 0 and group.lines == (1, 2)
    assert group.sentence == (
        "20 prompts part at token 40, differ for 6 tokens, and are the same again for 2,960: 59,200 tokens computed "
        "that were stored. Move what changes to the end."
    )
    assert result.possible_hit_rate == pytest.approx(20 * 2960 / (21 * 3016))


def test_an_insertion_in_some() -> None:
    group = only(judged(SYSTEM, SYSTEM[:700] + tokens(3, 1) + SYSTEM[700:]))
    assert (group.kind, group.first_place, group.earlier_tokens, group.tokens) == (PromptChange.INSERTED, 700, 0, 3)
    assert "1 prompt parts at token 700, has 3 tokens more there, and is the same again for 2,300" in group.sentence
    group = only(judged(SYSTEM[:700] + tokens(1, 1) + SYSTEM[700:], SYSTEM))
    assert "has 1 token fewer there" in group.sentence


def test_documents_in_another_order() -> None:
    one, two, three = (tokens(900, seed) for seed in (1, 2, 3))
    group = only(judged(SYSTEM[:100] + one + two + three, SYSTEM[:100] + two + three + one))
    assert (group.kind, group.first_place, group.equal_tokens) == (PromptChange.REORDERED, 100, 2700)
    assert "Write these parts in one order" in group.sentence


def test_a_salt_and_a_namespace() -> None:
    group = only(judged({"token_ids": SYSTEM}, {"token_ids": SYSTEM, "cache_salt": "a"}))
    assert (group.kind, group.equal_tokens) == (PromptChange.SALTED, 2944) and "one salt, or none" in group.sentence
    group = only(judged({"token_ids": SYSTEM, "model": "a"}, {"token_ids": SYSTEM, "model": "b"}))
    assert group.kind is PromptChange.NAMESPACE and "(model is a in one and b in the other)" in group.sentence
    group = only(judged({"token_ids": SYSTEM, "model": "a"}, {"token_ids": SYSTEM}))
    assert "(model is a in one and not set in the other)" in group.sentence
    again = judged(*({"token_ids": SYSTEM, "cache_salt": one} for one in ("a", "b", "a", "b")))
    assert again.hit_tokens == 2 * 2944 and again.groups[0].prompts == 1


def test_a_salt_for_each_user_costs_each_of_them_and_nobody_twice() -> None:
    result = judged(*({"token_ids": SYSTEM, "cache_salt": str(user % 60)} for user in range(120)))
    group = only(result)
    assert (group.kind, group.prompts, group.lost_tokens) == (PromptChange.SALTED, 59, 59 * 2944)
    assert result.hit_tokens == 60 * 2944
    goes_on = [{"token_ids": SYSTEM[:length], "cache_salt": salt} for salt in "ab" for length in (1000, 3000)]
    assert sum(one.lost_tokens for one in judged(*goes_on).groups) == 960 + (2944 - 960), "what b has itself is no loss"


def test_a_start_that_fills_no_block() -> None:
    result = judged(*(SYSTEM[:40] + tokens(500, seed) for seed in range(5)))
    group = only(result)
    assert (group.kind, group.prompts, group.first_place, group.lost_tokens) == (PromptChange.SHORT, 4, 40, 0)
    assert "4 prompts share 40 tokens at the start, which fill no block of 64" in group.sentence
    assert judged(*(SYSTEM[:40] + tokens(500, seed) for seed in range(5)), block=16).groups == ()


def test_nothing_is_said_of_prompts_that_have_nothing_in_common() -> None:
    assert judged(*(tokens(1000, seed) for seed in range(200))).groups == ()


def test_places_of_one_template_are_one_group_and_the_largest_is_first() -> None:
    """A name of one to eight tokens before a time; and a few prompts with an insertion elsewhere."""
    other = GENERATOR.integers(0, 30_000, 1000).tolist()
    lines = [SYSTEM[:30] + tokens(1 + seed % 8, seed) + SYSTEM[30:] for seed in range(30)]
    lines += [other[:500] + tokens(2 * seed, 99) + other[500:] for seed in range(3)]
    result = judged(*lines)
    assert result.groups[0].prompts == 29 and result.groups[0].first_place == 30
    assert result.groups[-1].kind is PromptChange.INSERTED and result.groups[-1].first_place == 500


# Planted changes -------------------------------------------------------------------------------------------------

TEXT, OTHER = 30_000, 60_000
"""Token ids of a prompt are below the first; what is planted lies above it, so that its place is no matter of luck."""


def drawn(seed: int, tokens: int = 10_000) -> tuple[np.random.Generator, Column]:
    generator = np.random.default_rng(seed)
    return generator, generator.integers(0, TEXT, tokens).astype(np.uint32)


def planted(generator: np.random.Generator, tokens: int) -> Column:
    return generator.integers(TEXT, OTHER, tokens).astype(np.uint32)


def compared(earlier: Column, prompt: Column, stored_tokens: int = 0) -> Divergence | None:
    return compare_prompts(FilePrompt(earlier), FilePrompt(prompt), 64, stored_tokens)


@pytest.mark.parametrize("seed", range(20))
def test_a_change_before_an_insertion_is_called_a_change(seed: int) -> None:
    generator, first = drawn(seed)
    place, later = int(generator.integers(0, 2000)), int(generator.integers(6000, 7000))
    second = np.concatenate([first[:later], planted(generator, 50), first[later:]])
    second[place : place + 6] = planted(generator, 6)
    found = compared(first, second)
    assert found is not None and (found.kind, found.place) == (PromptChange.CHANGED, place)


@given(st.integers(0, 10_000), st.integers(0, 3000), st.integers(0, 40), st.integers(0, 40))
def test_any_single_change_is_at_its_place(seed: int, place: int, was: int, stands: int) -> None:
    generator, first = drawn(seed, 4000)
    earlier = np.concatenate([first[:place], planted(generator, was), first[place:]])
    second = np.concatenate([first[:place], planted(generator, stands) + OTHER, first[place:]]).astype(np.uint32)
    found = compared(earlier, second)
    if not was and not stands:
        assert found is None
        return
    assert found is not None
    assert (found.place, found.earlier_tokens, found.tokens) == (place, was, stands)
    assert found.kind is (PromptChange.CHANGED if was and stands else PromptChange.INSERTED)
    assert found.equal_tokens == 4000 - place


def test_what_goes_on_is_no_parting_and_what_is_stored_anyway_is_not_counted() -> None:
    generator, first = drawn(0)
    for earlier, second in ((first, first), (first[:5000], first), (first, first[:5000])):
        assert compared(earlier, second) is None
    second = first.copy()
    second[40:46] = planted(generator, 6)
    for stored, equal in ((0, 9954), (9000, 1000)):
        found = compared(first, second, stored)
        assert found is not None and found.equal_tokens == equal
    assert compared(first, second, 9900) is None


@given(st.integers(0, 1000), st.integers(0, 300), st.integers(0, 400))
def test_equal_runs_have_equal_hashes_wherever_they_stand(seed: int, before: int, count: int) -> None:
    generator, run = drawn(seed, count)
    alone = run_hashes(run)
    within = run_hashes(np.concatenate([planted(generator, before), run, planted(generator, 50)]))
    assert len(alone) == max(0, count - SHINGLE_TOKENS + 1)
    assert (within[before : before + len(alone)] == alone).all()
    assert len(np.unique(within)) == len(within), "and others have not"


def test_what_a_sketch_costs() -> None:
    """-s prints it."""
    _, tokens = drawn(2, 32_768)
    best = min(repeat(lambda: sketch(tokens), number=10, repeat=20)) / 10
    places, _ = sketch(tokens)
    print(f"\n{1000 * best:.3f} ms for 32,768 tokens, {len(places)} hashes")
    assert 400 < len(places) < 640
    assert best < 0.05, "fifty milliseconds: no machine is that slow"


def test_prompts_are_compared_with_the_last_ones_and_with_that_which_shares_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.insight.lint.MOST_SKETCHES", 3)
    first, second, third = (tokens(4000, seed) for seed in range(3))
    half = tokens(9, 7) + second[:2000] + third[2000:2600]
    assert only(judged(first, second, third, half)).lines == (2, 4)
    assert judged(first, second, third, tokens(500, 8), tokens(9, 7) + first).groups == ()


def test_a_text_that_many_prompts_share_finds_the_newest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.insight.lint.MOST_SKETCHES", MOST_OWNERS // 2)
    assert only(judged(*(tokens(9, seed) + SYSTEM for seed in range(2 * MOST_OWNERS)))).prompts == 2 * MOST_OWNERS - 1


# Hits ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=12), st.integers(1, 4))
def test_hits_are_those_of_a_cache_without_an_end(prompts: list[list[int]], block: int) -> None:
    known: set[tuple[int, ...]] = set()
    hits = 0
    for one in prompts:
        starts = [tuple(one[: block * (at + 1)]) for at in range(len(one) // block)]
        hits += block * next((at for at, start in enumerate(starts) if start not in known), len(starts))
        known.update(starts)
    assert judged(*prompts, block=block).hit_tokens == hits


# Text ------------------------------------------------------------------------------------------------------------

RULES = "\n".join(f"Rule {number}: answer in {number} words and name the source of each." for number in range(60))


def test_the_part_of_a_template_is_named() -> None:
    chats: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "system", "content": f"You help.\nToday is {day}.\n{RULES}"},
                {"role": "user", "content": [{"type": "text", "text": f"question {day}"}]},
            ]
        }
        for day in ("Monday, 3", "Tuesday, 4")
    ]
    group = only(judged(*chats, text=True))
    assert group.kind is PromptChange.CHANGED
    assert group.where == "They part in message 1 (system), line 2 of the text, behind 'Today is '"
    batch = [{"custom_id": "1", "method": "POST", "body": one} for one in chats]
    assert only(judged(*batch, text=True)) == group


def test_tools_in_another_order_are_reordered() -> None:
    tools = [
        {"name": name, "description": f"{name}: {RULES.replace('Rule', name)}"} for name in ("find", "read", "send")
    ]
    chats = [{"messages": [{"role": "user", "content": "go"}], "tools": given} for given in (tools, tools[::-1])]
    group = only(judged(*chats, text=True))
    assert group.kind is PromptChange.REORDERED and group.where.startswith("They part in tools, line 1")


def test_places_in_text_are_those_of_characters() -> None:
    ids, starts = bytes_as_tokens("a\u00e9\u4e2d\U0001f600b")
    assert list(ids) == list("a\u00e9\u4e2d\U0001f600b".encode())
    assert list(starts) == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert bytes_as_tokens("") == ([], [])
    lines = ["\u4e2d" * 30 + day + RULES for day in ("Monday", "Friday")]
    before = repr("\u4e2d" * 24)
    assert only(judged(*lines, text=True)).where == f"They part in line 1 of the text, behind {before}"


# Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "no JSON; give a list of token ids, a text, or an object"),
        ("[" * 100_000, "no JSON"),
        ("3", "3 is no prompt; give a list of token ids, a text"),
        ("null", "None is no prompt"),
        ('{"question": "x"}', "None is no prompt"),
        ('"text"', "it has text, and no tokenizer was given; give --tokenizer"),
        ("[1, true]", "one is true or false"),
        ("[1, -1]", "token ids must be integers from 0 to 4294967295"),
        ("[1, 4294967296]", "token ids must be integers from 0 to 4294967295"),
        ("[1, 1e400]", "token ids must be integers"),
        ('{"token_ids": [1], "cache_salt": 3}', "cache_salt=3; give text"),
        ('{"token_ids": [1], "namespace": 3}', "namespace=3; give text, or an object of texts"),
        ('{"messages": ["x"]}', "message 1 is 'x'; give an object with role and content"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, says: str) -> None:
    with pytest.raises(BadInput) as raised:
        read_file_prompts("some.jsonl", ["[1]", "", line], None)
    assert str(raised.value).startswith("some.jsonl line 3: ") and says in str(raised.value)
    assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


def test_half_of_a_character_is_no_text() -> None:
    with pytest.raises(BadInput, match="line 1: half of a surrogate pair"):
        read_file_prompts("some.jsonl", ['"\\ud800"'], bytes_as_tokens)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=f"line 1: {MOST_PROMPT_TOKENS + 1} tokens; give at most {MOST_PROMPT_TOKENS}"):
        read_file_prompts("some.jsonl", ["[" + "1," * MOST_PROMPT_TOKENS + "1]"], None)
    monkeypatch.setattr("kvstore.insight.lint.MOST_TOKENS", 5)
    with pytest.raises(BadInput, match="line 2: more than 5 tokens"):
        read_file_prompts("some.jsonl", ["[1, 2, 3]"] * 3, None)
    with pytest.raises(BadInput, match="has no prompt in it; on each line give"):
        read_file_prompts("some.jsonl", ["", " "], None)
