"""Sketches of prompts and their inverted index: three columns, ordered by fingerprint.

    fingerprint  uint64   rising; of equal ones that of the newest sketch last
    owner        uint32   the number of its sketch
    place        uint32   where it stands there

A sketch is the rows that its number owns. 16 bytes for each 64 tokens in all. Adding or dropping one copies the
columns, which is cheap enough at their rate; a dictionary of lists would take ten times the memory.
"""

from __future__ import annotations

import numpy as np

from kvstore.insight.divergence import LEAST_SHARED, MOST_OWNERS, PromptSketch
from kvstore.insight.trace import Column


class SketchTable:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._fingerprints = np.zeros(0, np.uint64)
        self._owners, self._places = np.zeros(0, np.uint32), np.zeros(0, np.uint32)
        self._tokens: dict[int, int] = {}  # tokens of each prompt, oldest sketch first

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def oldest(self) -> int:
        """Number of the oldest sketch; there must be one."""
        return next(iter(self._tokens))

    @property
    def size_bytes(self) -> int:
        return int(self._fingerprints.nbytes + self._owners.nbytes + self._places.nbytes)

    def add(self, number: int, sketch: PromptSketch) -> None:
        """number: new, and below 2**32. Of equal fingerprints within a sketch the first counts."""
        assert number not in self._tokens
        fingerprints, first = np.unique(sketch.fingerprints, return_index=True)
        at = np.searchsorted(self._fingerprints, fingerprints, side="right")
        self._fingerprints = np.insert(self._fingerprints, at, fingerprints)
        self._owners = np.insert(self._owners, at, np.uint32(number))
        self._places = np.insert(self._places, at, sketch.places[first])
        self._tokens[number] = sketch.tokens

    def forget(self, number: int) -> None:
        del self._tokens[number]
        stays = self._owners != number
        self._fingerprints, self._owners = self._fingerprints[stays], self._owners[stays]
        self._places = self._places[stays]

    def get(self, number: int) -> PromptSketch:
        mine = np.flatnonzero(self._owners == number)
        mine = mine[np.argsort(self._places[mine])]
        return PromptSketch(self._tokens[number], self._fingerprints[mine], self._places[mine])

    def nearest(self, sketch: PromptSketch, first_token: int, most: int = 4) -> list[int]:
        """As `SketchIndex.nearest`; each fingerprint finds its newest owners."""
        wanted = np.unique(sketch.fingerprints[np.searchsorted(sketch.places, first_token) :])
        stop = np.searchsorted(self._fingerprints, wanted, side="right")
        start = np.maximum(np.searchsorted(self._fingerprints, wanted), stop - MOST_OWNERS)
        counts = stop - start
        runs = np.repeat(stop - np.cumsum(counts), counts) + np.arange(int(counts.sum()))
        numbers, votes = np.unique(self._owners[runs], return_counts=True)
        least = max(LEAST_SHARED, (int(votes.max(initial=0)) + 1) // 2)
        ranked: Column = np.lexsort((-numbers.astype(np.int64), -votes))[:most]
        return [int(numbers[one]) for one in ranked if votes[one] >= least]

    def check(self) -> None:
        assert (self._fingerprints[1:] >= self._fingerprints[:-1]).all()
        assert len(self._fingerprints) == len(self._owners) == len(self._places)
        assert set(self._owners.tolist()) <= self._tokens.keys()
