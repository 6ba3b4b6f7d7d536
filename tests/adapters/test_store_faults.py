"""A namespace that is opened in the background, of a store that may come late; and reasons that are true: of a store
that is away, on its way, refuses, or fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from adapters.test_paged_scheduler import FACTS, LAYOUT
from engine_adapter.paged import namespace_opener as opened_namespace
from engine_adapter.paged.namespace_opener import NamespaceOpener
from engine_adapter.paged.requests import RequestSpec
from engine_adapter.paged.scheduler import PagedScheduler
from engine_adapter.paged.settings import ConnectorSettings
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.block.account import MissReason, reason_of
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, LayoutMismatch, LeaseExpired, NotReady, Rejected, StoreClosed, Unreachable
from kvstore.block.identity import Namespace
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from paged_engine import Request, SharedStore
from service.sidecar import Sidecar
from waiting import SOON_SECONDS, FakeClock, wait_until
from workbench import MODEL, bench, blank_pages, ids, random_pages, small_layout


def facts(number: int, epoch: int = 0, model: str = "m") -> NamespaceSpec:
    return NamespaceSpec(number, "", model, LAYOUT, "raw", epoch, {})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_namespace, "RETRY_SECONDS", 0.01)


def test_who_waits_for_it_is_told_once_when_it_is_open(store: EmbeddedStore) -> None:
    may_open, told = threading.Event(), threading.Semaphore(0)

    def comes() -> Any:
        assert may_open.wait(SOON_SECONDS)
        return SharedStore(store)

    opened = NamespaceOpener(comes)
    opened.want(facts(0))
    opened.tell_when_open(told.release)
    assert not told.acquire(blocking=False), "it is not open yet"
    may_open.set()
    assert told.acquire(timeout=SOON_SECONDS) and opened.now() is not None
    opened.want(facts(1, 8))
    assert opened.wait(1, SOON_SECONDS) is not None
    assert not told.acquire(blocking=False), "it was told once"
    opened.tell_when_open(told.release)
    assert told.acquire(blocking=False), "it is open already"
    opened.close(1.0)


def test_a_store_that_comes_late_is_tried_until_it_is_there(
    store: EmbeddedStore, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    is_there, tries = threading.Event(), []

    def comes() -> Any:
        tries.append(1)
        if not is_there.is_set():
            raise kvstore.Unreachable("no socket there\nand more")
        return SharedStore(store)

    with caplog.at_level(logging.INFO, "engine_adapter"):
        opened = NamespaceOpener(comes)
        opened.want(facts(0))
        started = time.monotonic()
        assert opened.wait(0, 0.1) is None and opened.now() is None
        assert time.monotonic() - started >= 0.1
        assert opened.why_not()[1] == "no socket there" and len(tries) > 2
        is_there.set()
        assert opened.wait(0, SOON_SECONDS) is not None
    assert len(caplog.records) == 1, "one line, however often it is tried"
    opened.close(1.0)


def test_one_that_cannot_be_opened_does_not_keep_the_next_from_it(store: EmbeddedStore, soon: None) -> None:
    opened = NamespaceOpener(lambda: SharedStore(store))
    opened.want(NamespaceSpec(0, "", "m", LAYOUT, "no such codec", 0, {}))
    assert opened.wait(0, 0.05) is None and "no such codec" in opened.why_not()[1]
    opened.want(facts(1))
    assert opened.wait(1, SOON_SECONDS) is not None
    opened.close(1.0)


def test_close_hangs_up_and_ends_the_thread(store: EmbeddedStore, soon: None) -> None:
    closed = []

    class Told(SharedStore):
        def close(self) -> None:
            closed.append(1)

    opened = NamespaceOpener(lambda: Told(store))
    opened.want(facts(0))
    assert opened.wait(0, SOON_SECONDS)
    opened.close(SOON_SECONDS)
    opened.close(SOON_SECONDS)
    assert closed == [1] and opened._thread is not None and not opened._thread.is_alive()


# Reasons that are true ------------------------------------------------------------------------------------------------


class Gated(SharedStore):
    """Opens a namespace once it is let."""

    def __init__(self, store: EmbeddedStore) -> None:
        super().__init__(store)
        self.gate = threading.Event()

    def namespace(self, **given: Any) -> Any:
        assert self.gate.wait(SOON_SECONDS)
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
    assert half.wait_open(SOON_SECONDS)
    gated.gate.clear()
    half.renamed(7)  # a reset on purpose: the store is there all the time
    assert missed(half)[0] == {"warming": 320, "partial_block": 10}
    gated.gate.set()
    assert half.wait_open(SOON_SECONDS)
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


def test_a_connection_that_was_made_anew_is_warming_until_its_namespaces_are_open(sidecar: Sidecar) -> None:
    with sidecar.opened() as handle:
        handle.put(ids(512), random_pages(small_layout(), 8))
        door: Any = handle.door
        door._run.namespaces.clear()
        match: Any = handle.submit_match(ids(530)).poll()
        assert match.account.to_dict()["misses"] == {"warming": 512, "partial_block": 18}
        wait_until(lambda: bool(door._run.namespaces))
        assert wait_until(handle.submit_match(ids(512)).poll).blocks == 8


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
