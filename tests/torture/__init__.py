"""Long runs against the promises of a whole store: `python -m torture` (see `__main__`).

nursery   forks children that are to be killed
tier      a bare NVMe tier on a real directory
points    every failpoint by name, and the wrappers that end a process at one
child     a process that uses a whole store, from several threads
witness   what such a process said, and whether the directory keeps it
campaign  many such processes: killed at random moments, or at every failpoint
"""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[int], None]
"""Called with how much of a run is done."""


def quiet(done: int) -> None:
    """A `Report` that tells no one."""
