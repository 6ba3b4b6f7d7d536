"""Closes in a forked child what belongs to the parent, before anything else runs there.

A child has its parent's memory and none of its threads: locks may be held for ever, and connections, files and shared
memory are the parent's. Owners of such things register here, and are closed in each child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ClosesAfterFork(Protocol):
    """Owns something that a forked child must not use."""

    def close_after_fork(self) -> None:
        """Called in the child, in its one thread. Takes no lock that the parent's threads may have held."""
        ...


_owners: weakref.WeakKeyDictionary[ClosesAfterFork, tuple[ClosesAfterFork, ...]] = weakref.WeakKeyDictionary()


def close_in_children(owner: ClosesAfterFork, *behind: ClosesAfterFork) -> None:
    """Close `owner`, then `behind`, in each forked child, as long as the owner lives."""
    _owners[owner] = behind


def _close_all() -> None:
    for owner, behind in list(_owners.items()):
        for one in (owner, *behind):
            one.close_after_fork()


os.register_at_fork(after_in_child=_close_all)
