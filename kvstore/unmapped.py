"""What a holder of shared memory has let go of, as far as it can be found out in a moment (floor 2). Pure: it is handed
the question to the kernel, and what the processor has worked: a busy machine makes no question slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiering.extents import LOOK_SECONDS


class Unmapped(NamedTuple):
    """What was found out. unmapped: so many extents, from the first on, the holder has let go of. asked: so many
    questions that took. seconds: of the processor."""

    unmapped: int
    asked: int
    seconds: float


def look(extents: Sequence[int], is_mapped: Callable[[int], bool], thread_seconds: Callable[[], float]) -> Unmapped:
    """Up to the first that may be mapped still."""
    unmapped, began_at, seconds = 0, thread_seconds(), 0.0
    while unmapped < len(extents) and seconds <= LOOK_SECONDS:
        may_be_mapped = is_mapped(extents[unmapped])
        seconds = thread_seconds() - began_at
        if may_be_mapped:
            return Unmapped(unmapped, unmapped + 1, seconds)
        unmapped += 1
    return Unmapped(unmapped, unmapped, seconds)
