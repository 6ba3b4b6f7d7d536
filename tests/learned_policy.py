"""An adaptive policy that goes by worth from the start, by worth that means nothing: for tables that must not care."""

from __future__ import annotations

from array import array

import numpy as np

from tiering.policies import adaptive_loops as loops
from tiering.policies.adaptive import Adaptive


def by_worth(names: array[int], seed: int) -> Adaptive:
    """As if the guard had said so, whatever is learned later."""
    policy = Adaptive(names, seed)
    policy._numbers[loops.RULE] = 1
    policy._scores[loops.OWN_SCORE] = 1e9
    shape = loops.KINDS, loops.AGES
    policy._learned[loops.WORTH] = np.random.default_rng(seed).random(shape)
    return policy
