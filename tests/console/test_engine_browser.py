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

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no chromium here: apt-get install --no-install-recommends chromium fonts-dejavu-core",
)
OF_THE_ENGINE = {"grid", "last_token", "partial_block"}
"""Of what the store has, and of what is shorter than a block, it computed this: the store knows no reason for it."""


def test_what_transformers_counted_is_on_the_page(tmp_path: Path) -> None:
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    with Sidecar(tmp_path, dram="64MiB") as sidecar, console(sidecar.observe_path) as shown, sidecar.client() as store:
        cache = PrefixCache(model_of(), store, deadline_ms=10_000)
        long, other = prompt_of(1200), prompt_of(700, seed=1)
        for tokens in (long, long, other, [*long[:600], *other], long[:512], other[:300]):
            account: Any = cache.generate(tokens, max_new_tokens=2).report.account.to_dict()
            hits.update(account["hits"])
            misses.update(account["misses"])
            assert account["asked"] == len(tokens)
        looked = sidecar.admin.facts().looked
        assert dict(hits) == looked.hit_tokens, "what the engine loaded, and nothing else, was leased"
        told = {reason: tokens for reason, tokens in misses.items() if reason not in OF_THE_ENGINE}
        assert told == looked.miss_tokens
        assert misses["grid"] + misses["last_token"] == looked.found_tokens
        assert sum(hits.values()) + sum(misses.values()) - misses["partial_block"] == looked.asked_tokens
        shown.until("/api/series?window=15m", lambda one: one["sums"].get("asked") == looked.asked_tokens)
        assert shown.ask("/api/status").json["looked"]["hit_tokens"] == looked.hit_tokens
        page = scrape(metrics_of(sidecar))
        assert page.adds_up() and page.total("asked_tokens_total") == looked.asked_tokens
        assert page.total("granted_tokens_total") == sum(hits.values())
        with Browser(tmp_path / "profile") as browser:
            browser.open(f"{shown.url}?window=run")
            browser.until("document.querySelector('[data-piece]')")
            wanted = {**hits, **told, "found": misses["grid"] + misses["last_token"]}
            assert browser.value(PIECES) == wanted
            sentence = browser.value("document.getElementById('sentence').textContent")
            assert f"{sum(hits.values()):,} did not have to be computed" in sentence
            assert browser.logged == []
