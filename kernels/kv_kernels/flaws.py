"""Why a codec cannot write a block. Imports nothing, so that those who only pass it on stay light."""

from __future__ import annotations

from enum import Enum


class Flaw(Enum):
    """What an encoder found in a block that it cannot write. Loops and kernels tell the value, or 0."""

    NONFINITE = 1  # a NaN or an infinity
    OUT_OF_RANGE = 2  # numbers too far apart for a scale in fp16
