"""A real vLLM's own counts, the sidecar's, its metrics', the API's and those on the page in a real browser: equal, to
the token."""

from __future__ import annotations

import random
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from console.browser import CHROMIUM, PIECES, Browser
from console.running import console
from engines import models
from engines.conftest import Run, sidecar_python, started
from kvstore.block.errors import BadInput
from kvstore.cli import ask
from kvstore.node import SystemClock
from metrics.scraped import Scrape
from waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="there is no chromium here: apt-get install --no-install-recommends chromium fonts-dejavu-core",
    ),
]
BLOCK, BURST = 128, 100
TOLD_SECONDS = 2.0
"""From the last token of a burst until `kvstore why` knows all of it."""


def drawn(tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * seed + tokens)
    return [draw.randrange(999) for _ in range(tokens)]


def plan_of(url: str, model: str, idle: Path) -> dict[str, Any]:
    """Prompts that are in vLLM's own cache, others that are in the store alone, and one in both; then a burst."""
    long, other = drawn(1200), drawn(700)
    both = [*long[: 4 * BLOCK], *other]
    steps: list[dict[str, Any]] = []
    for number, (prompt, is_forgotten) in enumerate(
        [
            (long, False),
            (long, False),  # all but the last of its blocks is vLLM's own
            (other, True),
            (long[: 6 * BLOCK], False),  # the store's
            (long, False),  # first vLLM's own, then the store's
            (both, False),
            (both, False),
            (long[: 4 * BLOCK], False),  # it gains nothing from the store
            (other[:300], True),
            (other[:100], False),
            ([1, 2, 3], False),
        ]
    ):
        steps += [{"do": "generate", "prompts": [prompt], "max_tokens": 1, "as": f"{number}"}, {"do": "settle"}]
        steps += [{"do": "reset"}] if is_forgotten else []
    burst = [[*long[:BLOCK], *drawn(BLOCK, 1 + number)] for number in range(BURST)]
    steps += [{"do": "generate", "prompts": burst, "at_once": BURST, "max_tokens": 2, "as": "burst"}]
    steps += [{"do": "metrics", "as": "metrics"}, {"do": "idle", "file": str(idle)}]
    steps += [{"do": "generate", "prompts": [drawn(200, 999)], "max_tokens": 1, "as": "last"}]
    options = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": BURST}
    transfer = models.connector(url)
    return {"model": model, "transfer": transfer, "options": options, "steps": steps, "multiprocessing": True}


def known(admin: str, requests: int) -> int:
    """Of the requests that an engine named so, one after the other: how many it has reported, to the last token."""
    count = 0
    for number in range(requests):
        for name in (f"{number}-", f"{number}"):
            with suppress(BadInput):
                record = next(
                    one for one in ask.why(admin, SystemClock(), name).found if one.request.split("-")[0] == f"{number}"
                )
                told = record.told
                count += told is not None and told.asked == sum(told.hits.values()) + sum(told.misses.values())
                break
    return count


def test_what_vllm_counted_is_on_the_page_with_what_its_own_cache_had(
    saved: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    idle = tmp_path / "idle"
    with started("page", "--http", "127.0.0.1:0") as sidecar, ThreadPoolExecutor(1) as beside:
        admin, plan = f"{sidecar.directory}/admin.sock", plan_of(sidecar.url, saved(), idle)
        running = beside.submit(run, plan)
        wait_until(lambda: idle.exists() or running.done())
        ended_at, asked = time.monotonic(), sum(1 for one in plan["steps"] if one["do"] == "generate") - 2 + BURST
        assert not running.done(), running.result()
        wait_until(lambda: known(admin, asked) == asked or time.monotonic() > ended_at + 20)
        seconds = time.monotonic() - ended_at
        after = ask.stat(admin, SystemClock()).looked
        with urllib.request.urlopen(f"http://127.0.0.1:{sidecar.said['http_port']}/metrics", timeout=20) as answer:
            page = Scrape(answer.read().decode())
        observe = sidecar.directory / "observe.sock"
        with console(observe, python=sidecar_python()) as shown, Browser(tmp_path / "profile") as browser:
            status = shown.until("/api/status", lambda one: one["looked"] is not None)
            browser.open(f"{shown.url}?window=run")
            browser.until("document.querySelector('[data-piece]')")
            pieces, sentence = browser.value(PIECES), browser.value("document.getElementById('sentence').textContent")
            assert browser.logged == []
        idle.unlink()
        told = running.result()
        assert known(admin, asked + 1) == asked + 1, "also the last one, of an engine that has ended in order"
    assert seconds < TOLD_SECONDS, f"{seconds:.1f} s"

    hits, misses = Counter[str](), Counter[str]()
    for name, answers in told.items():
        for one in answers if name not in ("metrics", "last") else ():
            hits.update(one["kvstore"]["hits"])
            misses.update(one["kvstore"]["misses"])
            assert one["cached"] == sum(one["kvstore"]["hits"].values())
    assert hits["engine"] > hits["dram"] > 0, "its own cache was warm"
    counted = told["metrics"]
    assert counted["vllm:prefix_cache_hits"] == hits["engine"]
    assert counted["vllm:external_prefix_cache_hits"] == hits["dram"]
    assert counted["vllm:prompt_tokens"] == after.asked_tokens == sum(hits.values()) + sum(misses.values())
    assert (after.hit_tokens, after.miss_tokens, after.found_tokens) == (dict(hits), dict(misses), 0)
    assert page.adds_up() and page.total("asked_tokens_total") == after.asked_tokens
    for tier, tokens in hits.items():
        assert page.total("granted_tokens_total", tier=tier) - page.total("revoked_tokens_total", tier=tier) == tokens
    for reason, tokens in misses.items():
        assert page.total("missed_tokens_total", reason=reason) == tokens
    assert {name: status["looked"][name] for name in ("asked_tokens", "hit_tokens", "miss_tokens")} == {
        "asked_tokens": after.asked_tokens,
        "hit_tokens": dict(hits),
        "miss_tokens": dict(misses),
    }
    wanted = {**hits, **misses}
    joined = [name for name in wanted if name not in pieces]
    if joined:  # each below a hundredth of all
        wanted["others"] = sum(wanted.pop(name) for name in joined)
    assert pieces == wanted
    assert f"Of {after.asked_tokens:,} prompt tokens" in sentence
    assert f"{sum(hits.values()):,} did not have to be computed" in sentence
    assert f"{hits['engine']:,} were in the engine's own cache, {hits['dram']:,} came from this store" in sentence
