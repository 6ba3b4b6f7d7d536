"""Failpoints: names for the moments between two steps on a disk whose order matters.

Code that does such steps is handed a `Reach` and calls it between them, where no wrapper around `Files` or `FrameIndex`
could. Tests end the process at a name; otherwise nothing happens. Never on the path of a put to DRAM or a get from it.
"""

from __future__ import annotations

from collections.abc import Callable

Reach = Callable[[str], None]
"""Called with the name of the failpoint that was reached."""


def go_on(point: str) -> None:
    """A failpoint at which nothing happens."""
