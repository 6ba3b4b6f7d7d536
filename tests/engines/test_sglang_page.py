"""What SGLang's own controller found, in its own cache and in the store: the sidecar's, its metrics', the API's and the
page's numbers, equal to the token."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

import engines.sglang_cpu  # noqa: F401  prepares what the others import, or skips where there is no SGLang
from console.browser import CHROMIUM, PIECES, Browser
from console.running import console
from engines.conftest import sidecar_python, started
from engines.sglang_cpu import PAGE, HiCache, hashes_of, prompt_of, save_weights
from kvstore.cli import ask
from kvstore.node import SystemClock
from metrics.scraped import Scrape
from waiting import wait_until

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="there is no chromium here: apt-get install --no-install-recommends chromium fonts-dejavu-core",
    ),
]
OWN, LONG = 3, 150
"""Pages in SGLang's own cache, and of a prompt that it asks for in two batches."""


def test_what_sglang_had_itself_and_what_it_loaded_is_on_the_page(tmp_path: Path) -> None:
    with started("sgpage", "--http", "127.0.0.1:0") as sidecar:
        admin, prompt, other = f"{sidecar.directory}/admin.sock", prompt_of(LONG, seed=1), prompt_of(7, seed=2)
        with HiCache(sidecar.url, save_weights(tmp_path / "weights")).opened() as engine:
            engine.write(prompt)
            names = hashes_of(prompt)
            # The pages before these are in its own cache: it tells their names, and asks for those behind.
            for pages, before in ((prompt[OWN * PAGE :], OWN), (other, 0), (prompt[: 5 * PAGE], 0)):
                engine.read(pages, prefix_keys=names[:before] or None, last_hash=names[before - 1] if before else None)
            wanted = {"engine": OWN * PAGE, "dram": (LONG - OWN + 5) * PAGE}
            asked = sum(wanted.values()) + len(other)
            wait_until(lambda: ask.stat(admin, SystemClock()).looked.asked_tokens >= asked)
        looked = ask.stat(admin, SystemClock()).looked
        assert (looked.asked_tokens, looked.hit_tokens, looked.found_tokens) == (asked, wanted, 0)
        assert looked.miss_tokens == {"absent": len(other)}
        with urllib.request.urlopen(f"http://127.0.0.1:{sidecar.said['http_port']}/metrics", timeout=20) as answer:
            page = Scrape(answer.read().decode())
        assert page.adds_up() and page.total("asked_tokens_total") == asked
        assert {tier: page.total("granted_tokens_total", tier=tier) for tier in wanted} == wanted
        observe = sidecar.directory / "observe.sock"
        with console(observe, python=sidecar_python()) as shown, Browser(tmp_path / "profile") as browser:
            status = shown.until("/api/status", lambda one: one["looked"] is not None)
            assert status["looked"]["hit_tokens"] == wanted and status["looked"]["asked_tokens"] == asked
            browser.open(f"{shown.url}?window=run")
            browser.until("document.querySelector('[data-piece]')")
            assert browser.value(PIECES) == {**wanted, "absent": len(other)}
            assert browser.logged == []
