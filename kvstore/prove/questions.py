"""What an engine is asked, and what it answers: prompts of token ids, and the tokens and log probabilities of answers.

The prompts differ within their first two tokens, so that none finds another one's blocks; the questions about
boundaries share the beginning of one document, up to each end of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

BOUNDARY_TOKENS = 384
"""Of the document whose page boundaries are asked about: three blocks of 128 tokens."""
TAIL_TOKENS = 5
_WORDS = (
    "the river letter old town market carried quiet seven harbour stone window evening north train before winter small "
    "garden answer light number paper under station moved every second house written glass morning between field road "
    "after bridge count water children yellow door map long story found kept never cold open island page"
).split()


class Question(NamedTuple):
    """boundary: for how many tokens it goes on like the document; 0 for a prompt of its own."""

    name: str
    tokens: list[int]
    boundary: int = 0


class Answer(NamedTuple):
    """tokens: as the engine names them. logprobs: of these. gaps: by how much each was likelier than the next one.
    cached: prompt tokens that were not computed. tiers: where these came from, if the connector says so. seconds: until
    the whole answer was there."""

    tokens: list[str]
    logprobs: list[float]
    gaps: list[float]
    cached: int
    tiers: dict[str, int]
    seconds: float


def text_of(words: int, seed: int) -> str:
    """Sentences, for a tokenizer."""
    chosen = Random(seed).choices(_WORDS, k=words)
    return " ".join(word.capitalize() if at % 12 == 0 else word for at, word in enumerate(chosen)) + "."


def drawn_tokens(count: int, vocabulary: int, seed: int) -> list[int]:
    """For an engine without a tokenizer. The first ids are left out: these are often special."""
    random, low = Random(seed), min(32, vocabulary // 2)
    return [random.randrange(low, vocabulary) for _ in range(count)]


def questions_of(texts: Sequence[Sequence[int]], page_tokens: int, longest: int) -> list[Question]:
    """texts: tokens, of each at least `longest`; the first one is the document. Lengths go up to `longest`, mostly
    next to multiples of a page and of 128 tokens, which are what stores keep."""
    document, *others = texts
    found, least = [], min(2 * 128 + page_tokens, longest)
    for number, tokens in enumerate(others):
        length = least + (longest - least) * number // max(1, len(others) - 1)
        nearest = length // 128 * 128 + (-1, 0, 1, page_tokens, page_tokens // 2)[number % 5]
        found.append(Question(f"prompt {number + 1}", list(tokens[: max(2, min(nearest, longest))])))
    for number, stop in enumerate(range(page_tokens, min(BOUNDARY_TOKENS, longest - TAIL_TOKENS) + 1, page_tokens)):
        tail = others[number % len(others)][:TAIL_TOKENS]
        found.append(Question(f"boundary {stop}", [*document[:stop], *tail], stop))
    return found
