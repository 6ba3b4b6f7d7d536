"""The engine-neutral half of an adapter: grid, accounts, and a request's way through a real store, without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine_adapter.adapter import (
    SAVE_BYTES_PER_MS,
    SAVE_DEADLINE_MS,
    Report,
    StoreRequest,
    chosen_codec,
)
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.identity import Namespace
from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle, PutResult
from kvstore.client.states import PrefixStates, config_of_states
from workbench import bench, blank_pages, random_pages, small_layout

CHUNK = 128


def request_on(namespace: object, tokens: int, **options: object) -> StoreRequest:
    return StoreRequest(namespace, Report(tokens, CHUNK), **options)  # type: ignore[arg-type]


def test_a_save_has_time_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that was never full takes memory from the system first, some 2 GB a second."""
    namespace = bench().namespace()
    deadlines = []
    put: Callable[..., PutResult] = namespace.put

    def asked(*args: Any, deadline_ms: float, **options: Any) -> PutResult:
        deadlines.append(deadline_ms)
        return put(*args, deadline_ms=deadline_ms, **options)

    monkeypatch.setattr(namespace, "put", asked)
    request_on(namespace, 450).save(list(range(448)), random_pages(small_layout(), 7))
    assert deadlines == [SAVE_DEADLINE_MS + 7 * small_layout().raw_bytes / SAVE_BYTES_PER_MS]
    assert 1e9 / SAVE_BYTES_PER_MS >= 1000, "a GB has a second more, at least"


def test_a_request_that_is_given_up_pins_nothing() -> None:
    parts = bench()
    namespace = parts.namespace()
    tokens = list(range(300))
    request_on(namespace, 300).save(tokens[:256], random_pages(small_layout(), 4))
    request = request_on(namespace, 300)
    assert request.matched_tokens(tokens) == 256
    request.release()
    request.release()
    assert parts.store.usage().leases == 0
    parts.store.check()


def test_after_a_fault_the_store_is_left_alone() -> None:
    namespace = bench().namespace()
    tokens = list(range(200))
    pages = random_pages(small_layout(), 3)
    request = request_on(namespace, 200)
    request.save([1 << 40], pages)
    assert request.report.faults == 1 and "token ids" in request.report.fault
    assert request.report.put_reasons == {MissReason.UNSUPPORTED: 1}
    request.save(tokens[:192], pages)
    assert request.report.saved_blocks == 0
    other = request_on(namespace, 200)
    other.save(tokens[:192], pages)
    assert other.report.saved_blocks == 3


def test_percentiles_are_of_the_nearest_rank() -> None:
    report = Report(1, CHUNK)
    assert report.itl_percentile(99) == 0 and report.tokens_per_second == 0
    report.itl_ms = [float(value) for value in range(100, 0, -1)]
    assert (report.itl_percentile(0), report.itl_percentile(50), report.itl_percentile(99)) == (1, 50, 99)
    assert report.itl_percentile(100) == 100
    report.itl_ms = [10.0, 30.0]
    assert report.tokens_per_second == 50
    assert (report.restored_tokens, report.computed_tokens) == (0, 1)


def test_the_codec_that_an_adapter_takes(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen_codec(None, small_layout()) == "int8-kc64"
    assert chosen_codec("raw", small_layout()) == "raw"
    assert not caplog.messages
    opaque = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="float8_e4m3fn")
    assert chosen_codec(None, opaque) == "raw"
    assert "float8_e4m3fn" in caplog.text and "'raw'" in caplog.text


def test_kv_of_which_less_can_be_leased_than_a_state_covers_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = bench()
    namespace, tokens = parts.namespace(), list(range(300))
    group = KvGroup("state", (0,), 1, (96,), "uint8", Attention.STATE, row_tokens=64)
    config = config_of_states(namespace.namespace, "test")
    beside = Namespace(namespace.model, Layout((group,), 64), "raw", config=config)
    states = PrefixStates(NamespaceHandle(parts.door(), beside, codec_named("raw")))
    state = Pages({0: [torch.arange(96, dtype=torch.uint8)[None, None, None]]}, [0], 64)

    def request() -> StoreRequest:
        return StoreRequest(namespace, Report(300, 64), states=states)

    first = request()
    first.save(tokens[:256], random_pages(small_layout(), 4))
    first.save_state(tokens[:192], state)
    lease, into = namespace.lease, Pages({0: [torch.zeros(1, 1, 1, 96, dtype=torch.uint8)]}, [0], 64)
    second = request()
    assert second.matched_tokens(tokens) == 192 == second.load(blank_pages(small_layout(), 3), into)
    assert torch.equal(into.planes[0][0], state.planes[0][0]) and second.found_tokens == 256
    monkeypatch.setattr(
        namespace,
        "lease",
        lambda match, *a, **b: lease(match.cut(2, match.account.cut(128, MissReason.EVICTED)), *a, **b),
    )
    third = request()
    assert third.matched_tokens(tokens) == 0
    misses = third.report.account.misses
    assert (misses[MissReason.NO_STATE], misses[MissReason.EVICTED]) == (192, 64)
    third.release()
    assert parts.store.usage().leases == 0
