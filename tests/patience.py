"""Waits as long as a busy machine makes it, where a test says nothing of time.

The product's own defaults suit an engine, for which a late answer is a miss: on a busy machine one of some thousands
is. A test that means a deadline, or a limit of a client, names its own; these are for all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from kvstore.client import handle
from kvstore.client.connection import CallLimits
from kvstore.client.handle import NamespaceHandle

SECONDS = 10.0


def wait_for_leases() -> None:
    """Of matches and leases in this process, from here on: for blocks that come up from lower tiers."""
    for verb in (NamespaceHandle.submit_match, NamespaceHandle.lease, NamespaceHandle.submit_lease):
        _set_defaults(verb, deadline_ms=1000 * SECONDS)


def wait_for_sidecars() -> None:
    """And of clients in this process, for answers."""
    _set_defaults(CallLimits.__init__, match=SECONDS, lease=SECONDS, fill=6 * SECONDS)
    handle.LOCATE_GRACE_SECONDS = SECONDS


def _set_defaults(function: Callable[..., Any], **wanted: float) -> None:
    defaults = {
        name: one.default
        for name, one in inspect.signature(function).parameters.items()
        if one.default is not one.empty
    }
    assert wanted.keys() <= defaults.keys()
    function.__defaults__ = (*(defaults | wanted).values(),)  # type: ignore[attr-defined]
