"""Finds where two prompts stop being equal although they are equal again later, and how they differ there. A chain of
block keys cannot tell that: every key behind the first difference differs.

    tokens  > every run of 32 has a keyed hash, the same wherever it stands > one in 64 is kept: the prompt's sketch
    sketches > an inverted index finds the prompt that shares most > compared behind the block where the chains part
    tokens of both, where they are at hand > the exact place, and how many tokens replace how many

A sketch takes 12 bytes for each 64 tokens, so it can be kept where prompts may not. Without the secret key,
fingerprints reveal nothing about a prompt. Pure: no clock, no file; keeps no tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import numpy as np

from kvstore.insight.trace import Column

SHINGLE_TOKENS = 32
"""Length of a hashed run; two prompts count as equal again where this many tokens are equal."""
SKETCH_EVERY = 64
"""A sketch keeps one fingerprint in this many; a power of two."""
LEAST_EQUAL_TOKENS = 256
"""Fewer equal tokens behind the difference are not reported."""
LEAST_SHARED = 4
"""In fingerprints: about what LEAST_EQUAL_TOKENS leave in a sketch."""
LEAST_START_TOKENS = 16
"""A shared start of fewer tokens is chance, or a begin-of-text token."""
NEAR_TOKENS = 512
"""A place where two prompts are equal again within this many tokens is preferred."""
SAME_PLACE_TOKENS = 32
"""Prompts that part within this many tokens of each other count as parting at one place of their template."""
MOST_PAIRS = 4096
"""Order is compared for at most this many runs; of more, for every n-th."""
MOST_OWNERS = 8
"""The newest sketches are listed per fingerprint, so that a phrase which all prompts share does not list them all."""

_U64 = np.uint64


class PromptChange(StrEnum):
    """How a prompt differs from an earlier one. INSERTED: one prompt has tokens that the other lacks. SHORT: the shared
    start is shorter than one block."""

    CHANGED = "changed"
    INSERTED = "inserted"
    REORDERED = "reordered"
    SHORT = "shorter than a block"
    SALTED = "other salt"
    NAMESPACE = "other namespace"


@dataclass(frozen=True, slots=True)
class Divergence:
    """How a prompt differs from an earlier one. In tokens.

    place: the first token that differs. earlier_tokens, tokens: how many
    tokens lie between there and where both are equal again, in the earlier prompt and in this one; None if there is no
    single such place. equal_tokens: tokens of this prompt behind the difference that the earlier one has too. what: the
    namespace field that differs.
    """

    kind: PromptChange
    place: int
    earlier_tokens: int | None
    tokens: int | None
    equal_tokens: int
    what: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class PromptSketch:
    """tokens: length of the prompt. fingerprints: uint64, ordered by place. places: uint32, first token of each run."""

    tokens: int
    fingerprints: Column
    places: Column


class Shingler:
    """Hashes runs of tokens under one key. Equal runs have equal hashes under equal keys, and only then.

    With t_i = a keyed number of token i, B odd and all modulo 2**64, the run at i has sum(t_(i+k) * B**k): the
    difference of two prefix sums of t_i * B**i, divided by B**i, which is possible since B is odd. R. M. Karp and M. O.
    Rabin, IBM J. Res. Dev. 31 (2), 1987; sampling by value: U. Manber, USENIX Winter 1994.
    """

    def __init__(self, key: bytes) -> None:
        """key: 1 to 64 bytes, secret if sketches leave this process. Not thread-safe."""
        digest = blake2b(digest_size=32, key=key, person=b"kv-shingles-v1").digest()
        token, xor, base, final = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8, 16, 24))
        self._token, self._xor, self._final = _U64(token | 1), _U64(xor), _U64(final | 1)
        self._base = base | 5
        self._inverse = pow(self._base, -1, 1 << 64)
        self._powers = self._inverses = np.zeros(0, _U64)

    def hashes(self, tokens: Column) -> Column:
        """Hash every run. tokens: uint32. Returns uint64, one for each first token: len(tokens) - 31 of them."""
        count = len(tokens)
        if count < SHINGLE_TOKENS:
            return np.zeros(0, _U64)
        if len(self._powers) < count:
            size = 1 << (count - 1).bit_length()
            self._powers = _powers(self._base, size)
            self._inverses = _powers(self._inverse, size) * self._final
        sums = np.zeros(count + 1, _U64)
        np.cumsum((np.multiply(tokens, self._token, dtype=_U64) ^ self._xor) * self._powers[:count], out=sums[1:])
        found: Column = sums[SHINGLE_TOKENS:] - sums[:-SHINGLE_TOKENS]
        found *= self._inverses[: len(found)]
        return found

    def sketch(self, tokens: Column) -> PromptSketch:
        """Keep one run in 64, chosen by its hash. Takes 0.1 ms for 32,768 tokens."""
        found = self.hashes(tokens)
        places = np.flatnonzero(found < _U64((1 << 64) // SKETCH_EVERY))
        kept = found[places]
        kept ^= kept >> _U64(29)
        kept *= self._final
        kept ^= kept >> _U64(32)
        return PromptSketch(len(tokens), kept, places.astype(np.uint32))


def _powers(base: int, count: int) -> Column:
    powers = np.full(count, base, _U64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


class SketchIndex:
    """Sketches by number, searchable by shared fingerprints. When full, it drops the oldest."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._sketches: dict[int, PromptSketch] = {}
        self._order: deque[int] = deque()
        self._owners: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._sketches)

    def add(self, number: int, sketch: PromptSketch) -> None:
        """number: must be new."""
        assert number not in self._sketches
        if len(self._order) >= self._most:
            self._forget(self._order.popleft())
        self._sketches[number] = sketch
        self._order.append(number)
        for one in np.unique(sketch.fingerprints).tolist():
            owners = self._owners.setdefault(one, [])
            owners.append(number)
            if len(owners) > MOST_OWNERS:
                del owners[0]  # and not the newest, which is forgotten last

    def nearest(self, sketch: PromptSketch, first_token: int, most: int = 4) -> list[int]:
        """Numbers of the sketches that share most fingerprints with the prompt from first_token on, best first. Leaves
        out those that share less than half as much as the best, or fewer than `LEAST_SHARED`."""
        votes: Counter[int] = Counter()
        for one in sketch.fingerprints[np.searchsorted(sketch.places, first_token) :].tolist():
            votes.update(self._owners.get(one, ()))
        best = max(votes.values(), default=0)
        least = max(LEAST_SHARED, (best + 1) // 2)
        return [number for number, count in votes.most_common(most) if count >= least]

    def _forget(self, number: int) -> None:
        for one in np.unique(self._sketches.pop(number).fingerprints).tolist():
            owners = self._owners[one]
            if number in owners:
                owners.remove(number)
            if not owners:
                del self._owners[one]


# Comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class SeenPrompt:
    """tokens: uint32. salt: prompts with different salts share nothing. fields: those of its namespace."""

    tokens: Column
    salt: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


def compare_prompts(
    earlier: SeenPrompt, prompt: SeenPrompt, block_tokens: int, shingler: Shingler, stored_tokens: int = 0
) -> Divergence | None:
    """Compare a prompt with an earlier one by the tokens of both.

    None if they share too little, if nothing is lost (one continues the other), or if they part for good behind a
    shared block. stored_tokens: leading tokens of the prompt that are found anyway; equal_tokens counts only those
    behind them.
    """
    place = shared_start(earlier.tokens, prompt.tokens)
    if prompt.fields != earlier.fields or prompt.salt != earlier.salt:
        lost = place // block_tokens * block_tokens - stored_tokens
        if lost <= 0:
            return None
        what = _other_field(earlier.fields, prompt.fields)
        kind = PromptChange.NAMESPACE if what else PromptChange.SALTED
        return Divergence(kind, 0, None, None, lost, what=what)
    if place == min(len(earlier.tokens), len(prompt.tokens)):
        return None
    found = _behind(earlier.tokens, prompt.tokens, place, shingler, stored_tokens)
    if found is None and LEAST_START_TOKENS <= place < block_tokens and not stored_tokens:
        return Divergence(PromptChange.SHORT, place, None, None, 0)
    return found


def shared_start(one: Column, other: Column) -> int:
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    at = int(differs.argmax()) if count else 0
    return at if count and differs[at] else count


def _other_field(earlier: Mapping[str, str], fields: Mapping[str, str]) -> str:
    for name in sorted(earlier.keys() | fields.keys()):
        if earlier.get(name) != fields.get(name):
            return f"{name} is {earlier.get(name, 'not set')} in one and {fields.get(name, 'not set')} in the other"
    return ""


def _behind(old: Column, new: Column, place: int, shingler: Shingler, stored_tokens: int) -> Divergence | None:
    old_hashes, new_hashes = shingler.hashes(old[place:]), shingler.hashes(new[place:])
    equal = _covered(np.isin(new_hashes, old_hashes), len(new) - place, stored_tokens - place)
    if equal < LEAST_EQUAL_TOKENS:
        return None
    pairs = _unique_pairs(old_hashes, new_hashes)
    if _out_of_order(pairs[:, 0], SHINGLE_TOKENS):
        return Divergence(PromptChange.REORDERED, place, None, None, equal)
    near = NEAR_TOKENS + 1
    first = _first_again(old_hashes[:near], new_hashes[:near]) or _first_again(old_hashes, new_hashes)
    assert first is not None  # some run is equal, or `equal` were 0
    kind = PromptChange.CHANGED if min(first) else PromptChange.INSERTED
    return Divergence(kind, place, *first, equal)


def _covered(is_equal: Any, tokens: int, skipped: int) -> int:
    edges = np.zeros(tokens + 1, np.int64)
    edges[: len(is_equal)] += is_equal
    edges[SHINGLE_TOKENS : SHINGLE_TOKENS + len(is_equal)] -= is_equal
    return int((np.cumsum(edges)[max(skipped, 0) : tokens] > 0).sum())


def _unique_pairs(old: Column, new: Column) -> Column:
    """Places of hashes that occur exactly once on each side: [pairs, 2], ordered by the second column."""
    old_values, old_at, old_counts = np.unique(old, return_index=True, return_counts=True)
    new_values, new_at, new_counts = np.unique(new, return_index=True, return_counts=True)
    once = old_values[old_counts == 1], new_values[new_counts == 1]
    _, first, second = np.intersect1d(*once, assume_unique=True, return_indices=True)
    pairs = np.stack([old_at[old_counts == 1][first], new_at[new_counts == 1][second]], 1)
    ordered: Column = pairs[np.argsort(pairs[:, 1])]
    return ordered


def _out_of_order(places: Column, least: int) -> bool:
    if (places[1:] >= places[:-1]).all():
        return False
    step = -(-len(places) // MOST_PAIRS)
    tails: list[int] = []  # for each length, the smallest last place of a rising sequence
    looked = places[::step].tolist()
    for one in looked:
        at = bisect_right(tails, one)
        tails[at : at + 1] = [one]
    return (len(looked) - len(tails)) * step >= least


def _first_again(old: Column, new: Column) -> tuple[int, int] | None:
    _, was, stands = np.intersect1d(old, new, return_indices=True)
    if not len(was):
        return None
    at = int(np.argmin((was + stands) * (NEAR_TOKENS * 4) + np.abs(was - stands)))
    return int(was[at]), int(stands[at])
