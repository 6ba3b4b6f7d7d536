"""Waiting for what another thread or process brings about, and that tells no event."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_SECONDS = 240.0


def wait_until(is_so: Callable[[], bool]) -> None:
    """Looks again and again. Fails after `SOON_SECONDS`, before the limit of a test ends the whole run."""
    deadline = time.monotonic() + SOON_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)
