"""Exact stack distances of leaf-first LRU, two ways that share nothing with the product: by a list, and by a tree."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import inf
from typing import Any

import numpy as np

Request = tuple[Sequence[Hashable], int]
"""Names, the first block's first, and what each of them weighs."""


def by_list(requests: Iterable[Request]) -> list[list[float]]:
    """What lies between two uses of a block, and itself; `inf` for a first use. A request is judged, then used from its
    end on. Quadratic."""
    order: list[tuple[Hashable, int]] = []  # the oldest first
    found = []
    for names, weight in requests:
        told = []
        for name in names:
            at = order.index((name, weight)) if (name, weight) in order else None
            told.append(inf if at is None else float(sum(one for _, one in order[at:])))
        found.append(told)
        for name in reversed(names):
            if (name, weight) in order:
                order.remove((name, weight))
            order.append((name, weight))
    return found


def by_tree(requests: Sequence[Request]) -> list[list[float]]:
    """The same for long traces."""
    room = sum(len(names) for names, _ in requests) + 1
    sums, used_at, now, total = [0] * (room + 1), dict[Hashable, int](), 0, 0

    def add(at: int, weight: int) -> None:
        at += 1
        while at <= room:
            sums[at] += weight
            at += at & -at

    found = []
    for names, weight in requests:
        told = []
        for name in names:
            if (at := used_at.get(name)) is None:
                told.append(inf)
                continue
            before = 0
            while at:
                before += sums[at]
                at &= at - 1
            told.append(float(total - before))
        found.append(told)
        for name in reversed(names):
            if (at := used_at.get(name)) is not None:
                add(at, -weight)
                total -= weight
            used_at[name] = now
            add(now, weight)
            total += weight
            now += 1
    return found


def rates(requests: Sequence[Request], found: Sequence[Sequence[float]], sizes: Sequence[float]) -> Any:
    """The share of the weight asked for that each size finds; `inf` finds all but first uses."""
    distances = np.concatenate([np.asarray(told, float) for told in found])
    weights = np.concatenate([np.full(len(names), weight, float) for names, weight in requests])
    return np.array([weights[(distances <= size) & (distances < inf)].sum() / weights.sum() for size in sizes])
