"""Which files this process has open: what a test opened, and not what garbage of other tests still closes.

A file is named by its device and inode, since the number of a descriptor is given to the next file at once; each is
counted as often as it is open.
"""

from __future__ import annotations

import gc
import os
from collections import Counter

OpenFiles = Counter[tuple[int, int, str]]


def open_files(containing: str = "") -> OpenFiles:
    """Every open file of this process whose path contains the text, once what is garbage has been closed."""
    gc.collect()
    found: OpenFiles = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            path, status = os.readlink(f"/proc/self/fd/{number}"), os.stat(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that the listing itself used, or one that another thread just closed
            continue
        if containing in path:
            found[status.st_dev, status.st_ino, path] += 1
    return found


def opened_since(before: OpenFiles, containing: str = "") -> OpenFiles:
    """What is open now and was not before."""
    return open_files(containing) - before
