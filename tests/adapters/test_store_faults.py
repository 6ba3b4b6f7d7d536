"""Reasons that are true: of a store that is away, on its way, refuses, or fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.test_opened_namespace import facts
from adapters.test_paged_scheduler import FACTS, SECONDS
from engine_adapter.paged import namespace_opener as opened_namespace
from engine_adapter.paged.namespace_opener import NamespaceOpener
from engine_adapter.paged.requests import RequestSpec
from engine_adapter.paged.scheduler import PagedScheduler
from engine_adapter.paged.settings import ConnectorSettings
from kvstore.block.account import MissReason, reason_of
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, LayoutMismatch, LeaseExpired, NotReady, Rejected, StoreClosed, Unreachable
from kvstore.block.identity import Namespace
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from paged_engine import Request, SharedStore
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import MODEL, FakeClock, bench, blank_pages, ids, random_pages, small_layout


class Gated(SharedStore):
    """Opens a namespace once it is let."""

    def __init__(self, store: EmbeddedStore) -> None:
        super().__init__(store)
        self.gate = threading.Event()

    def namespace(self, **given: Any) -> Any:
        assert self.gate.wait(SECONDS)
        return super().namespace(**given)

    def close(self) -> None:
        self.gate.set()


def scheduler(open_store: Callable[[], Any]) -> PagedScheduler:
    clock = FakeClock()
    settings = ConnectorSettings.of({"url": "unix:none", "audit": 0.0})
    half = PagedScheduler(settings, open_store, clock.monotonic_seconds, lambda: 0.0, clock.advance)
    half.use(FACTS, [0])
    return half


def missed(half: PagedScheduler, tokens: int = 330) -> tuple[Any, Any]:
    """What a request is told for which nothing could be asked."""
    half.added(Request("a", ids(tokens), tokens, None, known=tokens), RequestSpec())  # type: ignore[arg-type]
    assert half.matched("a", 0) == (0, False)
    told: Any = half.finished("a")
    return told["misses"], told["detail"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreClosed("closed"), MissReason.DISABLED),
        (NotReady("soon"), MissReason.WARMING),
        (Unreachable("away"), MissReason.UNREACHABLE),
        (Rejected("not for you"), MissReason.UNREACHABLE),
        (LeaseExpired("over"), MissReason.STALE_HINT),
        (BadInput("no such codec"), MissReason.UNSUPPORTED),
        (LayoutMismatch("other pages"), MissReason.UNSUPPORTED),
        (RuntimeError("?"), MissReason.UNREACHABLE),
    ],
)
def test_a_fault_counts_as_what_it_is(error: Exception, reason: MissReason) -> None:
    assert reason_of(error) is reason


@pytest.mark.parametrize(("tokens", "tail"), [(330, 10), (320, 0), (63, 63), (1, 1)])
def test_a_tail_is_no_blocks_whatever_becomes_of_the_store(tokens: int, tail: int) -> None:
    def never() -> Any:
        raise Unreachable("no socket there")

    half = scheduler(never)
    wait_until(lambda: half.opener.why_not()[0] is MissReason.UNREACHABLE)
    misses, detail = missed(half, tokens)
    assert misses == {name: count for name, count in (("unreachable", tokens - tail), ("partial_block", tail)) if count}
    assert detail == "no socket there"
    half.close()


def test_while_its_namespace_is_being_opened_a_store_is_warming(store: EmbeddedStore) -> None:
    gated = Gated(store)
    half = scheduler(lambda: gated)
    assert missed(half) == ({"warming": 320, "partial_block": 10}, "the namespace is being opened")
    gated.gate.set()
    assert half.wait_open(SECONDS)
    gated.gate.clear()
    half.renamed(7)  # a reset on purpose: the store is there all the time
    assert missed(half)[0] == {"warming": 320, "partial_block": 10}
    gated.gate.set()
    assert half.wait_open(SECONDS)
    half.close()


def test_a_namespace_that_is_not_opened_says_why(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_namespace, "RETRY_SECONDS", 0.01)
    error: Exception = Unreachable("away")

    def fails() -> Any:
        raise error

    opened = NamespaceOpener(fails)
    assert opened.why_not()[0] is MissReason.DISABLED
    opened.want(facts(0))
    for error, reason in (
        (Unreachable("away"), MissReason.UNREACHABLE),
        (NotReady("there, and not ready"), MissReason.WARMING),
        (BadInput("no such codec"), MissReason.UNSUPPORTED),
    ):
        wait_until(lambda reason=reason: opened.why_not()[0] is reason)  # type: ignore[misc]
        assert opened.why_not()[1] == str(error)
    assert opened.why(0) is MissReason.UNSUPPORTED
    error = Unreachable("away")
    opened.want(facts(1))
    assert opened.why(0) is MissReason.DISABLED, "nobody wants that one any more"
    opened.close(1.0)
    assert opened.why(1) is MissReason.DISABLED


def test_a_codec_is_prepared_before_anything_is_asked_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling it takes as long as a sidecar's start, and looked like one that is not there."""
    order: list[str] = []
    door, codec = bench().door(), codec_named("raw")
    call = door.call

    def noted(request: Any, *given: Any) -> Any:
        order.append(type(request).__name__)
        return call(request, *given)

    monkeypatch.setattr(door, "call", noted)
    monkeypatch.setattr(codec, "prepare", lambda layout: order.append("prepared"))
    NamespaceHandle(door, Namespace(MODEL, small_layout(), "raw", 0, {}), codec)
    assert order == ["prepared", "OpenNamespace"]


def test_a_connection_that_was_made_anew_is_warming_until_its_namespaces_are_open(tmp_path: Path) -> None:
    with Sidecar(tmp_path, dram="1MiB") as sidecar, sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        handle.put(ids(512), random_pages(small_layout(), 8))
        door: Any = handle.door
        door._run.namespaces.clear()
        match: Any = handle.submit_match(ids(530)).poll()
        assert match.account.to_dict()["misses"] == {"warming": 512, "partial_block": 18}
        wait_until(lambda: bool(door._run.namespaces))
        pending = handle.submit_match(ids(512))
        wait_until(lambda: pending.poll() is not None)
        assert pending.poll().blocks == 8  # type: ignore[union-attr]


def test_a_get_whose_connection_is_gone_is_unreachable_and_not_disabled(tmp_path: Path) -> None:
    with Sidecar(tmp_path, dram="1MiB") as sidecar:
        store = sidecar.client()
        handle = store.namespace(model=MODEL, layout=small_layout())
        handle.put(ids(512), random_pages(small_layout(), 8))
        lease = handle.lease(handle.match(ids(512)))
    door: Any = handle.door
    wait_until(lambda: door._run is None)
    assert handle.get(lease, blank_pages(small_layout(), 8)).reason is MissReason.UNREACHABLE
    store.close()
    assert handle.get(lease, blank_pages(small_layout(), 8)).reason is MissReason.DISABLED
