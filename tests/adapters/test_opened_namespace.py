"""A namespace that is opened in the background, of a store that may come late."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

import kvstore
from adapters.test_paged_scheduler import LAYOUT
from engine_adapter.paged import namespace_opener as opened_namespace
from engine_adapter.paged.namespace_opener import NamespaceOpener
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.node import EmbeddedStore
from paged_engine import SharedStore

SECONDS = 30


def facts(number: int, epoch: int = 0, model: str = "m") -> NamespaceSpec:
    return NamespaceSpec(number, "", model, LAYOUT, "raw", epoch, {})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_namespace, "RETRY_SECONDS", 0.01)


def test_who_waits_for_it_is_told_once_when_it_is_open(store: EmbeddedStore) -> None:
    may_open, told = threading.Event(), threading.Semaphore(0)

    def comes() -> Any:
        assert may_open.wait(SECONDS)
        return SharedStore(store)

    opened = NamespaceOpener(comes)
    opened.want(facts(0))
    opened.tell_when_open(told.release)
    assert not told.acquire(blocking=False), "it is not open yet"
    may_open.set()
    assert told.acquire(timeout=SECONDS) and opened.now() is not None
    opened.want(facts(1, 8))
    assert opened.wait(1, SECONDS) is not None
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
        assert opened.wait(0, SECONDS) is not None
    assert len(caplog.records) == 1, "one line, however often it is tried"
    opened.close(1.0)


def test_one_that_cannot_be_opened_does_not_keep_the_next_from_it(store: EmbeddedStore, soon: None) -> None:
    opened = NamespaceOpener(lambda: SharedStore(store))
    opened.want(NamespaceSpec(0, "", "m", LAYOUT, "no such codec", 0, {}))
    assert opened.wait(0, 0.05) is None and "no such codec" in opened.why_not()[1]
    opened.want(facts(1))
    assert opened.wait(1, SECONDS) is not None
    opened.close(1.0)


def test_close_hangs_up_and_ends_the_thread(store: EmbeddedStore, soon: None) -> None:
    closed = []

    class Told(SharedStore):
        def close(self) -> None:
            closed.append(1)

    opened = NamespaceOpener(lambda: Told(store))
    opened.want(facts(0))
    assert opened.wait(0, SECONDS)
    opened.close(SECONDS)
    opened.close(SECONDS)
    assert closed == [1] and opened._thread is not None and not opened._thread.is_alive()
