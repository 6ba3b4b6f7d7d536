"""The engine-neutral half of an adapter: grid, accounts, and a request's way through a real store, without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine_adapter.adapter import (
    SAVE_BYTES_PER_MS,
    SAVE_DEADLINE_MS,
    Report,
    StoreRequest,
    chosen_codec,
)
from engine_adapter.hf.hbm_blocks import HbmBlocks
from kvstore.block.account import HitTier, MissReason
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import PutResult
from workbench import bench, blank_pages, plausible_pages, random_pages, same_tokens, small_layout

CHUNK = 128


def request_on(namespace: object, tokens: int, **options: object) -> StoreRequest:
    return StoreRequest(namespace, Report(tokens, CHUNK), **options)  # type: ignore[arg-type]


def test_a_request_saves_and_another_loads() -> None:
    parts = bench()
    namespace = parts.namespace()
    tokens = list(range(450))
    pages = random_pages(small_layout(), 7)
    first = request_on(namespace, 450)
    assert first.matched_tokens(tokens) == 0
    assert first.report.account.misses == {MissReason.ABSENT: 448, MissReason.PARTIAL_BLOCK: 2}
    assert first.load(pages) == 0
    first.save(tokens[:128], Pages(pages.planes, pages.table[:2], 64))
    first.save(tokens[:448], pages)
    first.release()
    assert first.report.saved_blocks == 7 and not first.report.put_reasons

    second = request_on(namespace, 450)
    into = blank_pages(small_layout(), 7)
    assert second.matched_tokens(tokens) == 384
    assert parts.store.usage().leases == 1, "what was promised is pinned"
    assert second.load(into) == 384
    assert same_tokens(pages, into, range(384))
    assert parts.store.usage().leases == 0
    assert second.report.account.misses == {MissReason.GRID: 64, MissReason.PARTIAL_BLOCK: 2}
    assert second.load(into) == 384, "loading again changes nothing"
    assert second.report.lookup_ms > 0 and second.report.restored_ms > 0 and first.report.save_ms > 0


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


@pytest.mark.parametrize("codec", ["raw", "int8-kc64"])
@pytest.mark.parametrize("is_pooled", [False, True])
def test_what_was_decoded_is_not_encoded_again(codec: str, is_pooled: bool) -> None:
    """Six blocks are restored and go meanwhile; two are computed behind them. With an inexact codec the six are not
    offered, so the two cannot be stored; with an exact one all are."""
    parts = bench()
    namespace = parts.namespace(codec=codec)
    tokens, pages = list(range(8 * 64 + 1)), plausible_pages(small_layout(), 8)
    request_on(namespace, 385).save(tokens[:384], Pages(pages.planes, range(6), 64))
    pool = HbmBlocks(small_layout(), 100 * small_layout().raw_bytes) if is_pooled else None
    request = request_on(namespace, len(tokens), pool=pool)
    assert request.matched_tokens(tokens) == 384 == request.load(pages)
    parts.store.evict(6)
    request.save(tokens[:512], pages)
    if codec == "raw":
        assert (request.report.saved_blocks, request.report.put_reasons) == (8, {})
    else:
        assert (request.report.saved_blocks, request.report.put_reasons) == (0, {MissReason.EVICTED: 1})
    if pool is not None:  # the next request finds them there, and must not offer them either
        other = request_on(namespace, len(tokens), pool=pool)
        assert other.matched_tokens(tokens) == 512 == other.load(pages)
        assert other.report.account.hits == {HitTier.HBM: 512}
        parts.store.evict(8)
        other.save(tokens[:512], pages)
        assert other.report.saved_blocks == (8 if codec == "raw" else 0)
    parts.store.check()


def test_what_the_pool_has_as_it_was_computed_is_offered_again() -> None:
    """Two blocks are computed here, two more come from the store, two are computed behind them."""
    parts = bench()
    namespace = parts.namespace(codec="int8-kc64")
    tokens, pages = list(range(6 * 64 + 1)), plausible_pages(small_layout(), 6)
    pool = HbmBlocks(small_layout(), 100 * small_layout().raw_bytes)
    request_on(namespace, 257).save(tokens[:256], Pages(pages.planes, range(4), 64))
    request_on(namespace, 129, pool=pool).save(tokens[:128], Pages(pages.planes, range(2), 64))
    request = request_on(namespace, len(tokens), pool=pool)
    assert request.matched_tokens(tokens) == 256 == request.load(pages)
    assert request.report.account.hits == {HitTier.HBM: 128, HitTier.DRAM: 128}
    parts.store.evict(4)
    request.save(tokens[:384], pages)
    assert (request.report.saved_blocks, request.report.put_reasons) == (2, {MissReason.EVICTED: 1})
    assert namespace.match(tokens).blocks == 2
    request_on(namespace, 257).save(tokens[:256], Pages(pages.planes, range(4), 64))
    request.save(tokens[:384], pages)
    assert namespace.match(tokens).blocks == 6


def test_what_the_pool_gets_between_look_up_and_load_is_not_what_was_restored() -> None:
    """Another request computes the same blocks, while this one has a lease on those of the store."""
    parts = bench()
    namespace = parts.namespace(codec="int8-kc64")
    tokens, pages = list(range(4 * 64 + 1)), plausible_pages(small_layout(), 4)
    request_on(namespace, 257).save(tokens[:256], pages)
    pool = HbmBlocks(small_layout(), 100 * small_layout().raw_bytes)
    request = request_on(namespace, len(tokens), pool=pool)
    assert request.matched_tokens(tokens) == 256
    request_on(namespace, 257, pool=pool).save(tokens[:256], pages)
    restored = blank_pages(small_layout(), 4)
    assert request.load(restored) == 256
    assert request.report.account.hits == {HitTier.DRAM: 256}
    parts.store.evict(4)
    request.save(tokens[:256], restored)
    assert request.report.saved_blocks == 0, "it would be encoded a second time"


def test_the_codec_that_an_adapter_takes(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen_codec(None, small_layout()) == "int8-kc64"
    assert chosen_codec("raw", small_layout()) == "raw"
    assert not caplog.messages
    opaque = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="float8_e4m3fn")
    assert chosen_codec(None, opaque) == "raw"
    assert "float8_e4m3fn" in caplog.text and "'raw'" in caplog.text
