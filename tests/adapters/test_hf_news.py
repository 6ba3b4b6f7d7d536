"""What transformers' adapter tells of its requests: the same as its reports, beside what the sidecar saw of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from hf_models import ask as answered
from hf_models import ask_all as answered_all
from hf_models import small_model, some_prompt
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.cli import ask
from kvstore.node import SystemClock
from service.sidecar import Sidecar
from waiting import wait_until

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from engine_adapter.adapter import Report  # noqa: E402
from engine_adapter.hf_cache import CacheNews, PrefixCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CLOCK = SystemClock()


@pytest.fixture
def cache(sidecar: Sidecar) -> Iterator[PrefixCache]:
    with sidecar.client() as store:
        yield PrefixCache(small_model("llama"), store, chunk_tokens=128, codec="raw", deadline_ms=5000)


def why(sidecar: Sidecar, request: str) -> Any:
    wait_until(lambda: bool(sidecar.told.why(request, sidecar.store.tenant_names(), str).found))
    wait_until(lambda: ask.why(str(sidecar.admin_path), CLOCK, request).found[0].told is not None)
    (found,) = ask.why(str(sidecar.admin_path), CLOCK, request).found
    return found


def test_a_requests_record_has_its_reports_account_and_what_the_sidecar_saw(
    cache: PrefixCache, sidecar: Sidecar
) -> None:
    prompt = some_prompt(400)
    cold = answered(cache, prompt, 2).report
    warm = answered(cache, prompt, 2).report
    assert cold.request != warm.request and warm.restored_tokens == 384
    for report in (cold, warm):
        found = why(sidecar, report.request)
        account = report.account.to_dict()
        told = found.told
        assert {"asked": told.asked, "hits": told.hits, "misses": told.misses} == account
        assert told.saved_blocks == report.saved_blocks and found.engine == "t"
        assert found.looked[0].wanted == 6 and found.looked[0].blocks == (6 if report is warm else 0)
    assert why(sidecar, cold.request).leases == [] and why(sidecar, cold.request).told.load_ms == 0
    (lease,) = why(sidecar, warm.request).leases
    assert (lease.blocks, lease.wanted, lease.tiers) == (6, 6, {"dram": 6})
    assert why(sidecar, warm.request).told.load_ms == pytest.approx(warm.lookup_ms + warm.restored_ms)


def test_a_batchs_rows_are_requests_of_their_own(cache: PrefixCache, sidecar: Sidecar) -> None:
    answers = answered_all(cache, [some_prompt(200), some_prompt(300, seed=2)], 2)
    assert [why(sidecar, one.report.request).told.asked for one in answers] == [200, 300]


def test_savings_are_told_once_the_speed_is_known(cache: PrefixCache, sidecar: Sidecar) -> None:
    reports = [answered(cache, some_prompt(400, seed), 1).report for seed in (1, 1)]
    why(sidecar, reports[-1].request)
    assert sidecar.admin.facts().savings is None, "it is not known yet"
    for seed in range(2, 6):
        answered(cache, some_prompt(400, seed), 1)
    assert cache._news.speed.is_learned
    before = cache._news.speed.more_seconds(0, 384)
    warm = answered(cache, some_prompt(400, 2), 1).report
    after = cache._news.speed.more_seconds(0, 384)
    assert warm.restored_tokens == 384 and before is not None and after is not None
    why(sidecar, warm.request)
    savings = sidecar.admin.facts().savings
    assert savings is not None and savings.engines == 1 and savings.ttft_saved_ms is None
    gain = savings.saved_seconds - savings.regret_seconds
    taken = (warm.lookup_ms + warm.restored_ms) / 1000
    assert min(before, after) - taken - 1e-9 <= gain <= max(before, after) - taken + 1e-9


def test_a_sidecar_that_is_gone_costs_an_answer_nothing(cache: PrefixCache, sidecar: Sidecar) -> None:
    prompt = some_prompt(400)
    before = answered(cache, prompt, 4).token_ids
    sidecar.door.close(5)
    answer = answered(cache, prompt, 4)
    assert answer.token_ids == before or answer.report.restored_tokens == 0
    began = time.perf_counter()
    for _ in range(100):
        cache._news.requests_end(cache.namespace, [answer.report])
    assert time.perf_counter() - began < 5, "a hundred of them, on the busiest machine"


def test_a_store_in_this_process_and_none_at_all_are_told_nothing() -> None:
    assert answered(PrefixCache(small_model("llama")), some_prompt(100), 1).report.request


def test_several_passes_at_once_teach_nothing_and_one_does() -> None:
    news = CacheNews()
    news.pass_begins(0, 256, 1.0)
    news.pass_begins(256, 512, 1.1)
    news.pass_ends(2.0)
    news.pass_ends(2.5)
    assert news.speed.typical_step_seconds == 0
    news.pass_begins(0, 256, 3.0)
    news.pass_ends(3.5)
    assert news.speed.typical_step_seconds == pytest.approx(0.5)


@pytest.mark.parametrize(("long_pass", "short_pass"), [(1.0, 0.125), (0.001, 0.008)])
def test_what_took_longer_than_computing_is_regret(long_pass: float, short_pass: float) -> None:
    """Also where computing seems to cost nothing, since the longer passes were the faster ones."""
    news = CacheNews()
    for tokens, seconds in ((1024, long_pass), (128, short_pass)) * 10:
        news.pass_begins(0, tokens, 0.0)
        news.pass_ends(seconds)
    per_token = news.speed.more_seconds(0, 512)
    assert per_token is not None and (per_token == 0) == (long_pass < short_pass)
    slow = Report(513, 64, Account.of([(HitTier.NVME, 512), (MissReason.LAST_TOKEN, 1)]), restored_ms=3000.0)
    assert news._gain(slow) == pytest.approx(per_token - 3.0) and news._gain(slow) < 0
    assert news._gain(Report(513, 64, Account.of([(MissReason.ABSENT, 513)]), lookup_ms=50.0)) == 0
