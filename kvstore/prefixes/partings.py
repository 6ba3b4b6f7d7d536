"""Where a tenant's prompts part that are the same again behind: sketches of them compared, and alike ones together.

    a sketch came > parted, as its engine says by tokens; else held against those that share most
                  > of one kind, behind one start, nearly at one place: a group > a sentence for their writer

What its engine compared is exact, and as far back as that remembers; sketches also tell of prompts of other engines, of
other namespaces, and of hours ago. Pure: the namespaces' difference is handed in.
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
"""Of a group, the last ones: for medians."""


@dataclass(frozen=True, slots=True, repr=False)
class SketchedPrompt:
    """As `PromptTold` has it, but for its sketch; of a namespace by the store's number."""

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
        """What is kept of it beside its sketch."""
        return len(self.chain) + 400


@dataclass(slots=True)
class PartingGroup:
    """Prompts that part alike. place, last_place: over those that are exact, if any is. prompts, lost_tokens: that the
    sampled ones stand for, faded."""

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
        """One more."""
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
        """Medians of what an earlier one has at the place, and these."""
        known = [(one.tokens, one.earlier_tokens) for one in self.members]
        exact = [(mine, earlier) for mine, earlier in known if mine is not None and earlier is not None]
        if not exact:
            return None, None
        tokens, earlier = sorted(exact)[(len(exact) - 1) // 2]
        return earlier, tokens

    @property
    def equal_tokens(self) -> int:
        """A median."""
        return median_low(one.equal_tokens for one in self.members)

    def sentence(self, per_hour: float) -> str:
        """per_hour: what was counted, times this, is that of an hour."""
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
    """Of one tenant. One thread at a time."""

    def __init__(self, difference: Callable[[int, int], str]) -> None:
        """difference: of two namespaces, in words."""
        self._difference = difference
        self._table, self._number = SketchTable(), 0
        self._prompts: dict[int, SketchedPrompt] = {}
        self._kept_bytes = 0
        self.groups: list[PartingGroup] = []

    def __len__(self) -> int:
        """Sketches that are kept."""
        return len(self._prompts)

    @property
    def size_bytes(self) -> int:
        """Of these."""
        return self._table.size_bytes + self._kept_bytes

    def take(self, prompt: SketchedPrompt, sketch: PromptSketch, now: float) -> None:
        """A sketch came."""
        found = prompt.parted or self._parted(prompt, sketch)
        if found is not None:
            self._group(prompt, found).take(found, prompt.every, now)
        self._table.add(self._number, sketch)
        self._prompts[self._number] = prompt
        self._kept_bytes += prompt.size_bytes
        self._number += 1

    def forget_oldest(self) -> None:
        """There must be one."""
        number = self._table.oldest
        self._table.forget(number)
        self._kept_bytes -= self._prompts.pop(number).size_bytes

    def fade(self, factor: float) -> None:
        """What was counted so far counts less; what is hardly any is forgotten."""
        for one in self.groups:
            one.prompts *= factor
            one.lost_tokens *= factor
        self.groups = [one for one in self.groups if one.prompts >= 0.01]

    def check(self) -> None:
        """What has to hold."""
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
        return compare_sketches(kept, sketch, equal_blocks * block, stored)

    def _group(self, prompt: SketchedPrompt, found: Divergence) -> PartingGroup:
        """Where it belongs; one that lost least gives way where there are too many."""
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
