"""Memory of this process alone: zeros that become memory when they are touched, and that can grow.

numpy's own zeros come in huge pages where they are large. Whoever touches such a page first may wait for milliseconds
until the system has one, and to grow them copies all that is there.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np


class LazyRecords:
    """Zeroed records from the beginning of a page on. `array`: all of them; another one once they have grown."""

    def __init__(self, count: int, dtype: np.dtype[Any]) -> None:
        """count: 1 or more."""
        self._memory = mmap(-1, count * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
        self.array: Any = np.frombuffer(self._memory, dtype)

    def grow_to(self, count: int) -> None:
        """So many of them, by zeros. What is there is moved by its pages; or copied, where somebody still holds the
        array, who sees nothing any more of what is done here."""
        dtype, before = self.array.dtype, self._memory
        self.array = None
        try:
            before.resize(count * dtype.itemsize)
        except BufferError:
            more = mmap(-1, count * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
            more[: len(before)] = before[:]
            self._memory = more
        finally:  # also where there is no memory: what was there is there
            self.array = np.frombuffer(self._memory, dtype)
