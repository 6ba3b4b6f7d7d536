"""Compares answers with those of the engine alone, and says where they part and which of the parties did it.

    the engine alone    asked cold twice, from its own cache, and many at once: how far these are apart is its spread
    with the store      asked in every way; what is outside the spread, the engine did not do
    who                 ways that are right clear a party: the engine's own cache, raw blocks, no drafts

Pure: it has answers, and asks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from statistics import median
from typing import NamedTuple

from kvstore.prove.questions import Answer

Answers = Mapping[str, Answer]
"""By the question's name."""
LEAST_SPREAD = 1e-3
"""In nats: what the last bits of 32-bit sums in another order come to."""
LEAST_GRAINS = 8
"""The same of an engine that computes in 16 bits, in grains: its sums have another order in every shape of a batch, of
which the engine alone may show none."""
COARSEST_GRAIN, FINEST_GRAIN, EXACT = 2.0**-3, 2.0**-10, 1e-5
"""Of logits below 32 in bfloat16 and below 2 in float16; and how well a difference of two log probabilities in 32 bits
is known. In nats."""
LEAST_GAPS = 16
"""Fewer different ones tell no grain."""
SLACK = 2.0
"""The engine's spread is what a few dozen of answers showed; so many times that is still taken for its own."""
FEWER_DRAFTS = 0.1
"""Drafts are wrong where the share of them that is accepted falls by so much."""


class Way(StrEnum):
    """How a question is answered."""

    COLD = "cold"
    REPEATED = "cold again"
    OWN = "own cache"
    AT_ONCE = "at once"
    STORE = "store"
    BOUNDARIES = "boundaries"
    ABORTED = "after an abort"
    RESTARTED = "after a restart"
    EVICTED = "after eviction"
    OTHER_WEIGHTS = "other weights"
    RAW = "store, raw"
    WITHOUT_DRAFTS = "store, no drafts"


FROM_THE_STORE = (Way.STORE, Way.BOUNDARIES, Way.AT_ONCE, Way.ABORTED, Way.RESTARTED, Way.EVICTED)
"""Ways in which an engine with a store may take blocks from it."""


class Party(StrEnum):
    ENGINE = "the engine alone"
    OWN_CACHE = "the engine's own cache"
    PAGES = "the connector's page table"
    CONNECTOR = "the connector"
    CODEC = "KV in 8 bits"
    DRAFTS = "the drafts' KV"
    WEIGHTS = "stale weights"


class Blame(NamedTuple):
    """who: broke the answers. what: how it shows. remedy: what would help."""

    who: Party
    what: str
    remedy: str


class Compared(NamedTuple):
    """Of one way: questions, those with the same tokens, and those that are outside of the engine's spread; the largest
    distance of log probabilities; and prompt tokens asked and taken from a cache."""

    asked: int
    same: int
    broken: tuple[str, ...]
    distance: float
    prompt_tokens: int
    cached: int
    tiers: Mapping[str, int]
    seconds: float


def strain(one: Answer, other: Answer) -> float:
    """How far the numbers behind two answers are apart at least, in nats: the largest difference of log probabilities
    until the tokens part, and there half of what one was likelier by."""
    found = 0.0
    for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            return max(found, min(one.gaps[at], other.gaps[at]) / 2)
        found = max(found, abs(one.logprobs[at] - other.logprobs[at]))
    return found if len(one.tokens) == len(other.tokens) else inf


def grain_of(gaps: Sequence[float]) -> float:
    """The power of two, in nats, of which all gaps are multiples: the last bit of logits in 16 bits. 0 where there is
    none, as of logits in 32 bits."""
    if len({round(gap / FINEST_GRAIN) for gap in gaps}) < LEAST_GAPS:
        return 0.0
    grain = COARSEST_GRAIN
    while any([abs(gap - grain * round(gap / grain)) > EXACT for gap in gaps]):
        grain /= 2
        if grain < FINEST_GRAIN:
            return 0.0
    return grain


class Reference:
    """The engine alone. ways: its answers; COLD is among them. lengths: tokens of each question."""

    def __init__(self, ways: Mapping[Way, Answers], lengths: Mapping[str, int]) -> None:
        self.ways, self.lengths = ways, lengths
        cold = ways[Way.COLD]
        apart = [strain(answer, cold[name]) for answers in ways.values() for name, answer in answers.items()]
        grain = grain_of([gap for answer in cold.values() for gap in answer.gaps])
        self.spread = max(LEAST_SPREAD, LEAST_GRAINS * grain, SLACK * max(apart))

    def compared(self, answers: Answers) -> Compared:
        """Beside what the engine alone answers in any way."""
        cold = self.ways[Way.COLD]
        broken = [name for name, answer in answers.items() if not self._knows(name, answer)]
        tiers: dict[str, int] = {}
        for answer in answers.values():
            for tier, count in answer.tiers.items():
                tiers[tier] = tiers.get(tier, 0) + count
        return Compared(
            len(answers),
            sum([answer.tokens == cold[name].tokens for name, answer in answers.items()]),
            tuple(broken),
            max([0.0, *(strain(answer, cold[name]) for name, answer in answers.items())]),
            sum([self.lengths[name] for name in answers]),
            sum([answer.cached for answer in answers.values()]),
            tiers,
            median([answer.seconds for answer in answers.values()]) if answers else 0.0,
        )

    def _knows(self, name: str, answer: Answer) -> bool:
        known = [answers[name] for answers in self.ways.values() if name in answers]
        return any([strain(answer, one) <= self.spread for one in known])

    def own_findings(self) -> list[Blame]:
        """What the engine alone breaks."""
        found = []
        cold = self.ways[Way.COLD]
        for way, where in (
            (Way.REPEATED, "asked once more"),
            (Way.AT_ONCE, "many at once"),
            (Way.OWN, "its own cache"),
        ):
            answers = self.ways.get(way, {})
            other = [name for name, answer in answers.items() if answer.tokens != cold[name].tokens]
            if other:
                found.append((where, len(other), len(answers)))
        if not found:
            return []
        places = "; ".join(f"{where}: other tokens for {count} of {of} prompts" for where, count, of in found)
        only_own = [where for where, *_ in found] == ["its own cache"]
        remedy = "what the store returns can be no more exact than this; compare with a larger dtype (--dtype float32)"
        if only_own:
            remedy += ", or leave out --enable-prefix-caching"
        return [Blame(Party.ENGINE, f"without any store, {places}", remedy)]


def findings_of(
    reference: Reference,
    ways: Mapping[Way, Answers],
    *,
    codec: str = "",
    drafts: Mapping[Way, float] | None = None,
    reference_drafts: float | None = None,
) -> list[Blame]:
    """Who broke which answers. codec: of stored blocks, where it is known. drafts: the share of accepted drafts of each
    way; reference_drafts: of the engine alone, from its own cache."""
    found = reference.own_findings()
    broken = {way: one for way, answers in ways.items() if (one := reference.compared(answers)).broken}
    if stale := ways.get(Way.OTHER_WEIGHTS):
        hits = sum([answer.cached for answer in stale.values()])
        broken.pop(Way.OTHER_WEIGHTS, None)
        if hits:
            what = f"after the weights had changed, {hits:,} tokens of KV of the earlier ones were still used"
            found.append(Blame(Party.WEIGHTS, what, "the connector has to name blocks by the weights' contents"))
    if not any([answer.cached for way in FROM_THE_STORE for answer in ways.get(way, {}).values()]):
        what = "nothing came from the store in any way, so nothing is proven of it"
        found.append(Blame(Party.CONNECTOR, what, "see in the engine's log whether the connector opened its store"))
    clean = [way for way in ways if way not in broken]
    if Way.COLD in broken:
        found.append(
            Blame(
                Party.CONNECTOR,
                f"{_names(broken[Way.COLD])} are answered otherwise before anything is stored",
                "start the engine with the connector and without a store, and compare again",
            )
        )
    elif Way.OWN in broken:
        what = f"{_names(broken[Way.OWN])} come otherwise from the engine's own cache, only where the connector is"
        found.append(Blame(Party.OWN_CACHE, what, "the connector touches pages that it does not own; report this"))
    elif stored := {way: one for way, one in broken.items() if way in FROM_THE_STORE}:
        found.append(_of_the_store(stored, clean, codec))
    if drafts and reference_drafts is not None and Way.STORE in drafts:
        if drafts[Way.STORE] < reference_drafts - FEWER_DRAFTS:
            what = f"{drafts[Way.STORE]:.0%} of the drafts are accepted, {reference_drafts:.0%} by the engine alone"
            found.append(
                Blame(
                    Party.DRAFTS, what, "the draft model's KV is not what it computed; its layers are to be kept, too"
                )
            )
    return found


def _of_the_store(stored: Mapping[Way, Compared], clean: Sequence[Way], codec: str) -> Blame:
    ways = ", ".join(f"{way} {len(one.broken)} of {one.asked}" for way, one in stored.items())
    if Way.RAW in clean:
        what = f"with codec {codec or 'of 8 bits'}: {ways}; with codec raw none"
        return Blame(Party.CODEC, what, 'set "codec": "raw" where answers have to be the same, at twice the bytes')
    if Way.WITHOUT_DRAFTS in clean:
        return Blame(Party.DRAFTS, f"with drafts: {ways}; without drafts none", "leave out --speculative-config")
    boundaries = stored.get(Way.BOUNDARIES)
    if boundaries is not None:
        first = min([int(name.split()[1]) for name in boundaries.broken])
        what = f"{ways}; the shortest shared beginning that breaks has {first} tokens"
        return Blame(Party.PAGES, what, "blocks come back into the wrong pages, or with other numbers; report this")
    return Blame(Party.CONNECTOR, ways, "only blocks taken in these ways are wrong; report this")


def _names(compared: Compared) -> str:
    shown = ", ".join(compared.broken[:3])
    return (
        f"{len(compared.broken)} of {compared.asked} questions ({shown}{', ...' if len(compared.broken) > 3 else ''})"
    )
