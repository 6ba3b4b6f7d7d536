"""A real vLLM's own counts, the sidecar's, its metrics', the API's and those on the page in a real browser: equal, to
the token."""

from __future__ import annotations

import random
import subprocess
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from console.browser import CHROMIUM, PIECES, Browser
from console.running import console
from engines.conftest import Pair, sidecar_python
from engines.session import named
from kvstore.cli import ask
from kvstore.node import SystemClock
from kvstore.protocol.status import LookupCounts
from metrics.scraped import Scrape

NEEDED = "fastapi", "h11", "markdown_it"
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="there is no chromium here: apt-get install --no-install-recommends chromium fonts-dejavu-core",
    ),
    pytest.mark.skipif(
        subprocess.run([sidecar_python(), "-c", f"import {', '.join(NEEDED)}"], capture_output=True).returncode != 0,
        reason=f"the sidecar's Python, {sidecar_python()}, lacks one of the console's packages: {', '.join(NEEDED)}",
    ),
]
OF_THE_ENGINE = {"grid", "last_token", "partial_block"}
"""Of what the store has, and of what is shorter than a block, it computed this: the store knows no reason for it."""
BLOCK = 128


def drawn(tokens: int) -> list[int]:
    draw = random.Random(tokens)
    return [draw.randrange(999) for _ in range(tokens)]


def looked(pair: Pair) -> LookupCounts:
    return ask.stat(pair.admin, SystemClock()).looked


def more(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Of each name that has grown, by how much."""
    grown = {name: tokens - before.get(name, 0) for name, tokens in after.items()}
    return {name: tokens for name, tokens in grown.items() if tokens}


def test_what_vllm_counted_is_on_the_page(pair: Pair, tmp_path: Path) -> None:
    long, other = drawn(1200), drawn(700)
    prompts = [long, long, other, [*long[: 4 * BLOCK], *other], long[: 4 * BLOCK], other[:300]]
    steps: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):  # what comes again comes from the store, not from vLLM's own cache
        steps += [{"do": "generate", "prompts": [prompt], "max_tokens": 1, "as": f"{number}"}]
        steps += [{"do": "settle"}, {"do": "reset"}]
    steps += [{"do": "generate", "prompts": [[1, 2, 3]], "max_tokens": 1, "as": "short"}]  # brings the last reports
    steps += [{"do": "counted", "as": "counted"}, {"do": "metrics", "as": "metrics"}]
    before = looked(pair)
    told = named(steps, pair.with_store(steps))
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    for one in [*map(str, range(len(prompts))), "short"]:
        (answer,) = told[one]
        hits.update(answer["kvstore"]["hits"])
        misses.update(answer["kvstore"]["misses"])
        assert answer["cached"] == sum(answer["kvstore"]["hits"].values())
    asked = sum(map(len, prompts)) + 3
    assert sum(hits.values()) + sum(misses.values()) == asked and hits["dram"] > 0

    by_origin = {name: tokens for name, tokens in told["counted"].items() if name.startswith(("hit_", "miss_"))}
    assert by_origin == {f"hit_{name}": tokens for name, tokens in hits.items()} | {
        f"miss_{name}": tokens for name, tokens in misses.items()
    }, "what the connector counted for vLLM's metrics"
    assert told["metrics"]["vllm:prompt_tokens"] == asked
    assert told["metrics"]["vllm:external_prefix_cache_hits"] == hits["dram"]

    after = looked(pair)
    assert more(after.hit_tokens, before.hit_tokens) == dict(hits), "what vLLM loaded, and nothing else, was leased"
    of_the_store = {reason: tokens for reason, tokens in misses.items() if reason not in OF_THE_ENGINE}
    assert more(after.miss_tokens, before.miss_tokens) == of_the_store
    assert after.found_tokens - before.found_tokens == misses["grid"] + misses["last_token"]
    assert after.asked_tokens - before.asked_tokens == asked - misses["partial_block"]

    with urllib.request.urlopen(f"http://127.0.0.1:{pair.http_port}/metrics", timeout=20) as answer:
        page = Scrape(answer.read().decode())
    assert page.adds_up() and page.total("asked_tokens_total") == after.asked_tokens
    assert page.total("granted_tokens_total") - page.total("revoked_tokens_total") == sum(after.hit_tokens.values())
    for reason, tokens in after.miss_tokens.items():
        assert page.total("missed_tokens_total", reason=reason) == tokens

    with console(pair.observe, python=sidecar_python()) as shown, Browser(tmp_path / "profile") as browser:
        status = shown.until("/api/status", lambda one: one["looked"] is not None)
        assert status["looked"]["hit_tokens"] == after.hit_tokens
        assert status["looked"]["miss_tokens"] == after.miss_tokens
        assert status["looked"]["asked_tokens"] == after.asked_tokens
        browser.open(f"{shown.url}?window=run")
        browser.until("document.querySelector('[data-piece]')")
        pieces = browser.value(PIECES)
        wanted = {**after.hit_tokens, **after.miss_tokens, "found": after.found_tokens}
        joined = {name for name, tokens in wanted.items() if tokens and name not in pieces}
        if joined:  # below a hundredth of all: other tests of this engine asked for more
            wanted["others"] = sum(wanted.pop(name) for name in joined)
        assert pieces == {name: tokens for name, tokens in wanted.items() if tokens}
        sentence = browser.value("document.getElementById('sentence').textContent")
        assert f"Of {after.asked_tokens:,} prompt tokens" in sentence
        assert f"{sum(after.hit_tokens.values()):,} did not have to be computed" in sentence
        assert browser.logged == []
