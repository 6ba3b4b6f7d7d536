"""Who is named for answers that differ: a table of engines and stores with one fault each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.prove.judge import Party, Reference, Way, grain_of, strain
from kvstore.prove.proof import Proof
from kvstore.prove.questions import Answer, questions_of

NAMES = [*(f"prompt {number}" for number in range(20)), *(f"boundary {stop}" for stop in range(16, 400, 16))]
LENGTHS = dict.fromkeys(NAMES, 400)
PROMPTS = [name for name in NAMES if name.startswith("prompt")]
BOUNDARIES = [name for name in NAMES if name.startswith("boundary")]


def answer(name: str, *, off: float = 0.0, changes: int | None = None, cached: int = 0) -> Answer:
    """off: of each log probability. changes: the token from which on others are given."""
    tokens = [f"{name} {at}" for at in range(8)]
    if changes is not None:
        tokens[changes:] = [f"other {at}" for at in range(changes, 8)]
    return Answer(tokens, [-0.5 + off] * 8, [2.0] * 8, cached, {}, 0.1)


@dataclass
class Told:
    """What an engine alone answers, and one with a store; a fault changes some of it."""

    alone: dict[Way, dict[str, Answer]] = field(default_factory=dict)
    ways: dict[Way, dict[str, Answer]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cold = {name: answer(name) for name in NAMES}
        prompts = {name: answer(name, off=1e-4) for name in PROMPTS}
        self.alone = {Way.COLD: cold, Way.REPEATED: dict(prompts), Way.AT_ONCE: dict(prompts), Way.OWN: dict(prompts)}
        stored = (Way.COLD, Way.OWN, Way.STORE, Way.AT_ONCE, Way.ABORTED, Way.EVICTED, Way.RESTARTED)
        self.ways = {way: {name: one._replace(cached=256) for name, one in prompts.items()} for way in stored}
        self.ways[Way.BOUNDARIES] = {name: answer(name) for name in BOUNDARIES}
        self.ways[Way.OTHER_WEIGHTS] = {name: answer(name, changes=0) for name in PROMPTS}

    def wrong(self, way: Way, names: list[str], **how: Any) -> None:
        self.ways[way] = {**self.ways[way], **{name: answer(name, **how) for name in names}}

    def proof(self) -> Proof:
        found = {"codec": "raw", "shares": {}, "reference_drafts": None} | self.more
        return Proof.of(Reference(self.alone, LENGTHS), self.ways, **found)


def nothing(told: Told) -> None: ...


def own_cache(told: Told) -> None:
    told.alone[Way.OWN] = {name: answer(name, changes=0, off=-3.0) for name in PROMPTS}
    told.ways[Way.OWN] = told.alone[Way.OWN]


def batching(told: Told) -> None:
    """Close tokens: another batch gives another one of them."""
    for way in (Way.AT_ONCE, Way.OWN):
        for name in PROMPTS[:13]:
            told.alone[way][name] = answer(name, changes=3)._replace(gaps=[0.02] * 8)
    told.wrong(Way.STORE, PROMPTS[5:9], changes=3)
    told.ways[Way.STORE] = {name: one._replace(gaps=[0.02] * 8) for name, one in told.ways[Way.STORE].items()}


def page_table(told: Told) -> None:
    told.wrong(Way.STORE, PROMPTS, changes=0)
    told.wrong(Way.BOUNDARIES, BOUNDARIES[7:], changes=1)
    told.wrong(Way.RESTARTED, PROMPTS, changes=0)


def own_cache_beside_the_connector(told: Told) -> None:
    told.wrong(Way.OWN, PROMPTS[:1], changes=2)


def aborts(told: Told) -> None:
    told.wrong(Way.ABORTED, PROMPTS[3:5], off=0.2)


def cold_runs(told: Told) -> None:
    told.wrong(Way.COLD, PROMPTS[:2], changes=4)


def codec(told: Told) -> None:
    told.wrong(Way.STORE, PROMPTS, off=0.05)
    told.ways[Way.RAW] = dict(told.alone[Way.OWN])
    told.more["codec"] = "int8-kc64"


def drafts_kept_wrong(told: Told) -> None:
    told.more |= {"shares": {Way.STORE: 0.1}, "reference_drafts": 0.8}


def drafts_in_the_answers(told: Told) -> None:
    told.wrong(Way.STORE, PROMPTS[:4], changes=1)
    told.ways[Way.WITHOUT_DRAFTS] = dict(told.alone[Way.OWN])


def in_16_bits(told: Told, off: float = 0.03) -> None:
    cold = told.alone[Way.COLD].items()
    told.alone[Way.COLD] = {name: one._replace(gaps=[(at + 1) / 128] * 8) for at, (name, one) in enumerate(cold)}
    told.wrong(Way.STORE, PROMPTS[:2], off=off)


def weights(told: Told) -> None:
    told.ways[Way.OTHER_WEIGHTS] = {name: answer(name, cached=256) for name in PROMPTS}


def nothing_found(told: Told) -> None:
    told.ways = {
        way: {name: one._replace(cached=0) for name, one in answers.items()} for way, answers in told.ways.items()
    }


@pytest.mark.parametrize(
    ("fault", "who", "says"),
    [
        (nothing, [], "identity holds"),
        (own_cache, [Party.ENGINE], "its own cache: other tokens for 20 of 20"),
        (batching, [Party.ENGINE], "many at once: other tokens for 13 of 20"),
        (page_table, [Party.PAGES], "the shortest shared beginning that breaks has 128 tokens"),
        (own_cache_beside_the_connector, [Party.OWN_CACHE], "1 of 20 questions (prompt 0)"),
        (aborts, [Party.CONNECTOR], "after an abort 2 of 20"),
        (cold_runs, [Party.CONNECTOR], "before anything is stored"),
        (codec, [Party.CODEC], 'set "codec": "raw"'),
        (drafts_kept_wrong, [Party.DRAFTS], "10% of the drafts are accepted, 80% by the engine alone"),
        (drafts_in_the_answers, [Party.DRAFTS], "without drafts none"),
        (nothing_found, [Party.CONNECTOR], "nothing is proven of it"),
        (in_16_bits, [], "identity holds"),
        (partial(in_16_bits, off=0.3), [Party.CONNECTOR], "store 2 of 20"),
        (weights, [Party.WEIGHTS], "5,120 tokens of KV of the earlier ones"),
    ],
)
def test_the_one_that_broke_the_answers_is_named(fault: Any, who: list[Party], says: str) -> None:
    told = Told()
    fault(told)
    proof = told.proof()
    assert [one.who for one in proof.findings] == who
    assert any(says in line for line in proof.lines()), list(proof.lines())
    assert proof.is_held == (who in ([], [Party.ENGINE]))
    page = proof.page()
    assert ("Identity holds" in page) == proof.is_held and page.count("<svg") == 2
    assert proof.to_dict()["held"] == proof.is_held


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8), st.floats(0, 1))
def test_answers_are_apart_by_what_shows(one: list[int], other: list[int], off: float) -> None:
    """Never less than the log probabilities of their common beginning say, and the same from both sides."""

    def made(tokens: list[int], off: float) -> Answer:
        return Answer([str(token) for token in tokens], [-1.0 + off] * len(tokens), [0.5] * len(tokens), 0, {}, 0.0)

    left, right = made(one, 0.0), made(other, off)
    found = strain(left, right)
    assert found == pytest.approx(strain(right, left))
    common = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if one == other:
        assert found == pytest.approx(off if one else 0.0)
    else:
        assert found >= (off if common else 0.0) - 1e-9
        assert found > 0.2 or one[:common] == other[:common]


@given(st.integers(2, 40), st.integers(64, 4096), st.sampled_from([16, 32, 64]))
def test_questions_differ_and_share_what_they_say(count: int, longest: int, page_tokens: int) -> None:
    texts = [[number] * longest for number in range(count)]
    found = questions_of(texts, page_tokens, longest)
    assert len({tuple(one.tokens) for one in found}) == len(found) and len({one.name for one in found}) == len(found)
    for one in found:
        assert 2 <= len(one.tokens) <= longest
        if one.boundary:
            assert one.tokens[: one.boundary] == texts[0][: one.boundary]
            assert one.tokens[one.boundary] != 0 and one.boundary % page_tokens == 0
        else:
            assert one.tokens[0] != 0


@given(
    st.integers(3, 10), st.lists(st.integers(0, 4000), min_size=20, max_size=60, unique=True), st.floats(-1e-6, 1e-6)
)
def test_the_last_bit_of_logits_in_16_bits_is_seen(bits: int, steps: list[int], noise: float) -> None:
    found = grain_of([step / 2**bits + noise for step in (*steps, 1)])
    assert found == 2.0**-bits
    assert grain_of([step / 2**bits + step**0.5 / 1000 for step in (*steps, 1)]) == 0
