"""Memory of this process alone: zeros that become memory when they are touched, and that can grow.

numpy's own large zeros come in huge pages. The first touch of such a page may wait for milliseconds until the system
has one, and growing them copies everything.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np


class LazyRecords:
    """Zeroed records, page-aligned. array: all of them; replaced when they grow."""

    def __init__(self, count: int, dtype: np.dtype[Any]) -> None:
        """count: 1 or more."""
        self._memory = mmap(-1, count * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
        self.array: Any = np.frombuffer(self._memory, dtype)

    def grow_to(self, count: int) -> None:
        """Append zeros up to so many. The old pages are moved: no caller may hold the array."""
        dtype = self.array.dtype
        self.array = None
        try:
            self._memory.resize(count * dtype.itemsize)
        finally:  # also without memory for it: the old records stay
            self.array = np.frombuffer(self._memory, dtype)
