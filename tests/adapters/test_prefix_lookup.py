"""One request's way to a promise: a real store in this process, whose answers come when a test says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from adapters.test_paged_scheduler import FACTS, LAYOUT, Late, put
from engine_adapter.paged import lookup as prefix_lookup
from engine_adapter.paged.lookup import PrefixLookup
from engine_adapter.paged.settings import ConnectorSettings
from kvstore.block.account import MissReason
from kvstore.block.errors import StoreClosed
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from kvstore.protocol.messages import LeasePrefix, MatchPrefix
from waiting import FakeClock, wait_until
from workbench import ids

GRID = MissReason.GRID


@pytest.fixture(autouse=True)
def _stored(store: EmbeddedStore) -> Iterator[None]:
    """And in the end nothing of it is leased."""
    put(store, ids(320))
    yield
    wait_until(lambda: not store.usage().leases)


class Asked:
    """A look-up of 330 tokens, of which 320 are stored."""

    def __init__(self, store: EmbeddedStore, tokens: int = 330) -> None:
        self.late = Late(store)
        self.clock = FakeClock()
        self.handle: NamespaceHandle = self.late.namespace(model=FACTS.model, layout=LAYOUT)
        self.lookup = PrefixLookup(
            self.handle,
            self.handle.hashed(ids(tokens)),
            "r",
            self.clock.monotonic_seconds,
            ConnectorSettings("unix:x", match_deadline_ms=20, lease_deadline_ms=5000),
        )

    def matched(self, first: int = 0, stop: int = 320, reason: MissReason = GRID) -> int:
        found: list[int | None] = []
        wait_until(lambda: found.append(self.lookup.matched(first, stop, reason)) or found[-1] is not None)
        return found[-1]


@pytest.mark.parametrize(("first", "stop", "tokens"), [(0, 320, 320), (96, 320, 320), (0, 100, 64), (64, 329, 320)])
def test_what_is_promised_is_pinned_until_it_is_given_back(
    store: EmbeddedStore, first: int, stop: int, tokens: int
) -> None:
    asked = Asked(store)
    assert asked.matched(first, stop) == tokens
    assert asked.lookup.account.hit_tokens == tokens and asked.lookup.account.asked == 330
    assert asked.matched(first, stop) == tokens and store.usage().leases == 1
    assert store.evict(100) == 5 - (tokens // 64)
    (lease,) = asked.lookup.take()
    assert lease.tokens == tokens and asked.lookup.is_over
    asked.lookup.give_back()
    assert asked.lookup.take() == [] and store.usage().leases == 1, "it is the taker's"
    lease.release()


@pytest.mark.parametrize(("stop", "keys", "found"), [(329, 5, 5), (319, 4, 5), (100, 1, 5)])
def test_a_lease_of_less_says_what_was_found(store: EmbeddedStore, stop: int, keys: int, found: int) -> None:
    """By that the sidecar knows which look-up it belongs to, and counts what was asked for once."""
    asked = Asked(store)
    asked.matched(0, stop)
    (lease,) = asked.late.of_kind(LeasePrefix)
    assert len(lease.keys) == keys and lease.found == found
    asked.lookup.give_back()


@pytest.mark.parametrize("stop", [256, 128, 64])
def test_a_decision_for_less_is_less_in_the_account_too(store: EmbeddedStore, stop: int) -> None:
    """What is pinned already may be more than what is wanted by now."""
    asked = Asked(store)
    assert asked.matched(0, 320) == 320
    assert asked.matched(0, stop, MissReason.CHEAPER_TO_COMPUTE) == stop
    assert asked.lookup.account.hit_tokens == stop
    assert asked.lookup.account.misses[MissReason.CHEAPER_TO_COMPUTE] == 320 - stop
    assert asked.matched(0, 320) == 320
    assert asked.lookup.account.hit_tokens == 320, "and no less than it could be"
    asked.lookup.give_back()


def test_a_lease_that_has_waited_long_is_taken_anew(store: EmbeddedStore) -> None:
    asked = Asked(store)
    assert asked.matched() == 320
    (first,) = asked.lookup.leases
    asked.clock.advance(prefix_lookup.HELD_SECONDS + 1)
    assert asked.matched() == 320 and asked.lookup.leases[0] is not first
    assert first.released
    asked.lookup.give_back()


def test_a_lease_that_brings_nothing_is_a_miss_with_its_reason(store: EmbeddedStore) -> None:
    asked = Asked(store)
    assert asked.lookup.found() is not None
    assert store.evict(100) == 5
    assert asked.matched() == 0 and asked.lookup.is_over
    assert asked.lookup.account.hit_tokens == 0 and asked.lookup.account.asked == 330


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("no\nmore"), MissReason.UNREACHABLE), (StoreClosed("closed"), MissReason.DISABLED)],
)
@pytest.mark.parametrize("kind", [MatchPrefix, LeasePrefix])
def test_a_fault_of_the_store_is_a_miss_and_one_line(
    store: EmbeddedStore, kind: type, error: Exception, reason: MissReason, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Asked(store)

    submit = asked.handle.door.submit

    def fails(request: Any, *given: Any) -> Any:
        if isinstance(request, kind):
            raise error
        return submit(request, *given)

    asked.handle.door.submit = fails  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, "engine_adapter"):
        lookup = PrefixLookup(asked.handle, asked.lookup.prompt, "r", float, ConnectorSettings("unix:x"))
        assert lookup.matched(0, 320, GRID) == 0 and lookup.is_over
    assert lookup.account.misses == {reason: 320, MissReason.PARTIAL_BLOCK: 10}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (reason is MissReason.UNREACHABLE)
    assert all("\n" not in line and "RuntimeError" in line for line in lines)
