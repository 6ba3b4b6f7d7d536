"""A real engine's own counts, the sidecar's, its metrics', the API's and those on the page in a real browser: equal, to
the token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from adapters.test_hf_cache import model_of, prompt_of
from console.browser import CHROMIUM, PIECES, Browser
from console.running import console
from engine_adapter.hf_cache import PrefixCache
from metrics.busy_sidecar import metrics_of, scrape
from service.sidecar import Sidecar
from waiting import wait_until

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no chromium here: apt-get install --no-install-recommends chromium fonts-dejavu-core",
)


def test_what_transformers_counted_is_on_the_page_with_what_its_own_pool_had(tmp_path: Path) -> None:
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    with Sidecar(tmp_path, dram="64MiB") as sidecar, console(sidecar.observe_path) as shown, sidecar.client() as store:
        cache = PrefixCache(model_of(), store, deadline_ms=10_000, hbm="1MiB")
        long, other = prompt_of(1200), prompt_of(700, seed=1)
        new = PrefixCache(model_of(), store, deadline_ms=10_000)  # as after a restart: it has nothing itself
        asked_for = [long, long, other, [*long[:600], *other], long[:512], other[:300]]
        for one, tokens in [*((cache, tokens) for tokens in asked_for), (new, long)]:
            one.generate(tokens, max_new_tokens=2)
            account: Any = one.report.account.to_dict()
            hits.update(account["hits"])
            misses.update(account["misses"])
            assert account["asked"] == len(tokens)
        asked = sum(hits.values()) + sum(misses.values())
        wait_until(lambda: sidecar.admin.facts().looked.asked_tokens == asked)
        looked = sidecar.admin.facts().looked
        assert (looked.hit_tokens, looked.miss_tokens, looked.found_tokens) == (dict(hits), dict(misses), 0)
        assert hits["hbm"] and hits["dram"] and misses["last_token"] and misses["partial_block"]
        shown.until("/api/series?window=15m", lambda one: one["sums"].get("asked") == looked.asked_tokens)
        assert shown.ask("/api/status").json["looked"]["hit_tokens"] == looked.hit_tokens
        page = scrape(metrics_of(sidecar))
        assert page.adds_up() and page.total("asked_tokens_total") == looked.asked_tokens
        for tier, count in hits.items():
            assert page.total("granted_tokens_total", tier=tier) == count
        for reason, count in misses.items():
            assert page.total("missed_tokens_total", reason=reason) == count
        with Browser(tmp_path / "profile") as browser:
            browser.open(f"{shown.url}?window=run")
            browser.until("document.querySelector('[data-piece]')")
            pieces, wanted = browser.value(PIECES), {**hits, **misses}
            if joined := [name for name in wanted if name not in pieces]:  # each below a hundredth of all
                wanted["others"] = sum(wanted.pop(name) for name in joined)
            assert pieces == wanted
            sentence = browser.value("document.getElementById('sentence').textContent")
            assert f"{sum(hits.values()):,} did not have to be computed" in sentence
            assert browser.logged == []
