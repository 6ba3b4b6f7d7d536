"""Attacks on the sockets of a real sidecar, in short; `make torture` runs them at length."""

from __future__ import annotations

import pytest

from torture.door import half_open, messages
from torture.flood import flood


@pytest.mark.slow
def test_messages_as_they_should_not_be() -> None:
    counts = messages(500, seed=1)
    assert counts["messages"] == 500 and counts["connections"] > 100
    assert min(counts[what] for what in ("answered", "malformed", "refused", "unread")) > 10


@pytest.mark.slow
def test_connections_that_stop_half_way() -> None:
    """More than are let in."""
    counts = half_open(200, seed=1, silence_seconds=2.0)
    assert counts["silent"] == 200 and 100 < counts["unread"] < 200 and counts["turned_away"] > 50


@pytest.mark.slow
def test_floods() -> None:
    """How long others wait in a second of a machine that runs tests is no figure; that they are served is."""
    told = flood(1, seed=1, most_ms=50.0)
    assert int(told["messages"]) > 500
