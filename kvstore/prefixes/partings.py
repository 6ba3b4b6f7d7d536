"""Finds where a tenant's prompts part although they are equal again later: compares sketches, and groups the results.

    a sketch came > parted, as its engine says by tokens; else compared with those that share most
                  > of one kind, behind one start, nearly at one place: a group > a sentence for the prompts' author

An engine's own comparison is exact but only covers its recent prompts; sketches also cover other engines, other
namespaces, and hours. Pure: the namespaces' difference is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low

from kvstore.insight.divergence import (
    LEAST_EQUAL_TOKENS,
    LEAST_START_TOKENS,
    SAME_PLACE_TOKENS,
    Divergence,
    PromptChange,
    PromptSketch,
    advice,
    compare_sketches,
    shared_sketch_start,
    tokens_in_words,
)
from kvstore.prefixes.hottest import equal_start
from kvstore.prefixes.sketches import SketchTable
from kvstore.protocol.told import LINK_BYTES

MOST_GROUPS = 128
MOST_MEMBERS = 32
"""The last so many of a group give its medians."""


@dataclass(frozen=True, slots=True, repr=False)
class SketchedPrompt:
    """`PromptTold` without the sketch; its namespace by the store's number."""

    namespace: int
    block_tokens: int
    every: int
    stored_tokens: int
    chain: bytes
    start: bytes = b""
    salt: bytes = b""
    adapter: bytes = b""
    parted: Divergence | None = None

    @property
    def size_bytes(self) -> int:
        """Of what is kept beside the sketch."""
        return len(self.chain) + 400


@dataclass(slots=True)
class PartingGroup:
    """Prompts that part alike. place, last_place: over the exact ones, if any. prompts, lost_tokens: extrapolated from
    the sample, decayed."""

    namespace: int
    block_tokens: int
    kind: PromptChange
    what: str
    start: bytes
    place: int
    last_place: int
    is_exact: bool
    seen_at: float = 0.0
    sampled: int = 0
    prompts: float = 0.0
    lost_tokens: float = 0.0
    members: deque[Divergence] = field(default_factory=lambda: deque(maxlen=MOST_MEMBERS))

    def is_near(self, found: Divergence) -> bool:
        """Whether it is the same place, as far as both are known."""
        within = SAME_PLACE_TOKENS if self.is_exact and found.is_exact else self.block_tokens
        return self.place - within <= found.place <= self.last_place + within

    def take(self, found: Divergence, every: int, now: float) -> None:
        if found.is_exact and not self.is_exact:
            self.place = self.last_place = found.place
            self.is_exact = True
            self.members.clear()
        if found.is_exact == self.is_exact:
            self.place, self.last_place = min(self.place, found.place), max(self.last_place, found.place)
            self.members.append(found)
        self.seen_at = now
        self.sampled += 1
        self.prompts += every
        self.lost_tokens += every * found.equal_tokens

    def lengths(self) -> tuple[int | None, int | None]:
        """Medians: tokens at the place in the earlier prompts, and in these."""
        known = [(one.tokens, one.earlier_tokens) for one in self.members]
        exact = [(mine, earlier) for mine, earlier in known if mine is not None and earlier is not None]
        if not exact:
            return None, None
        tokens, earlier = sorted(exact)[(len(exact) - 1) // 2]
        return earlier, tokens

    @property
    def equal_tokens(self) -> int:
        return median_low(one.equal_tokens for one in self.members)

    def sentence(self, per_hour: float) -> str:
        """per_hour: turns counts into those of an hour."""
        place = f"token {self.place:,}"
        if self.kind is PromptChange.SHORT:
            place = f"{self.place:,} tokens"
        elif self.last_place != self.place:
            place = f"tokens {self.place:,} to {self.last_place:,}"
        elif not self.is_exact:
            place = f"the block from token {self.place:,} on"
        prompts = max(1, round(self.prompts * per_hour))
        return advice(
            self.kind,
            "1 prompt an hour" if prompts == 1 else f"{prompts:,} prompts an hour",
            place,
            self.lengths(),
            self.equal_tokens,
            f"{tokens_in_words(self.lost_tokens * per_hour)} tokens/h computed that were stored",
            self.what,
            self.block_tokens,
        )


class Partings:
    """One tenant's. Not thread-safe."""

    def __init__(self, difference: Callable[[int, int], str]) -> None:
        """difference: describes how two namespaces differ."""
        self._difference = difference
        self._table, self._number = SketchTable(), 0
        self._prompts: dict[int, SketchedPrompt] = {}
        self._kept_bytes = 0
        self.groups: list[PartingGroup] = []

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def size_bytes(self) -> int:
        """Memory of all sketches."""
        return self._table.size_bytes + self._kept_bytes

    def take(self, prompt: SketchedPrompt, sketch: PromptSketch, now: float) -> None:
        """Compare a new sketch with earlier ones, and keep it."""
        found = prompt.parted or self._parted(prompt, sketch)
        if found is not None:
            self._group(prompt, found).take(found, prompt.every, now)
        self._table.add(self._number, sketch)
        self._prompts[self._number] = prompt
        self._kept_bytes += prompt.size_bytes
        self._number += 1

    def forget_oldest(self) -> None:
        """Drop the oldest sketch; there must be one."""
        number = self._table.oldest
        self._table.forget(number)
        self._kept_bytes -= self._prompts.pop(number).size_bytes

    def fade(self, factor: float) -> None:
        """Decay counts, and drop groups with hardly any left."""
        for one in self.groups:
            one.prompts *= factor
            one.lost_tokens *= factor
        self.groups = [one for one in self.groups if one.prompts >= 0.01]

    def check(self) -> None:
        self._table.check()
        assert len(self._table) == len(self._prompts) and len(self.groups) <= MOST_GROUPS
        assert self._kept_bytes == sum(one.size_bytes for one in self._prompts.values())

    def _parted(self, prompt: SketchedPrompt, sketch: PromptSketch) -> Divergence | None:
        for number in self._table.nearest(sketch, prompt.stored_tokens):
            found = self._compared(self._prompts[number], self._table.get(number), prompt, sketch)
            if found is not None:
                return found
        return None

    def _compared(
        self, earlier: SketchedPrompt, kept: PromptSketch, prompt: SketchedPrompt, sketch: PromptSketch
    ) -> Divergence | None:
        of_earlier = earlier.namespace, earlier.adapter, earlier.salt
        block, stored = prompt.block_tokens, prompt.stored_tokens
        if of_earlier != (prompt.namespace, prompt.adapter, prompt.salt):
            lost = shared_sketch_start(kept, sketch) // block * block - stored
            if lost < LEAST_EQUAL_TOKENS:
                return None
            what = "adapter" if earlier.adapter != prompt.adapter else ""
            if earlier.namespace != prompt.namespace:
                what = self._difference(prompt.namespace, earlier.namespace)
            kind = PromptChange.NAMESPACE if what else PromptChange.SALTED
            return Divergence(kind, 0, None, None, lost, what=what)
        equal_blocks = equal_start(earlier.chain, prompt.chain, LINK_BYTES) // LINK_BYTES
        return compare_sketches(kept, sketch, equal_blocks * block, block, stored)

    def _group(self, prompt: SketchedPrompt, found: Divergence) -> PartingGroup:
        """The group that it belongs to, or a new one; if there are too many, the one with the smallest loss goes."""
        is_apart = found.kind in (PromptChange.NAMESPACE, PromptChange.SALTED)
        start = prompt.start if is_apart or found.place >= LEAST_START_TOKENS or not found.is_exact else b""
        for one in self.groups:
            alike = one.namespace, one.kind, one.what, one.start
            if alike == (prompt.namespace, found.kind, found.what, start) and one.is_near(found):
                return one
        if len(self.groups) >= MOST_GROUPS:
            self.groups.remove(min(self.groups, key=lambda one: (one.lost_tokens, one.seen_at)))
        place, exact = found.place, found.is_exact
        new = PartingGroup(prompt.namespace, prompt.block_tokens, found.kind, found.what, start, place, place, exact)
        self.groups.append(new)
        return new
