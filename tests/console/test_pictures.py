"""Pictures of every page, for docs/dashboard.md: of a sidecar that a real engine (transformers) asks, saves to and
loads from, and that evicts. KVSTORE_PICTURES=docs/images writes them there, after a minute of it."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from console.browser import CHROMIUM, Browser
from console.running import console
from hf_models import small_model
from kvstore.block.account import HitTier, MissReason
from kvstore.block.codec import codec_named
from kvstore.cli import ask
from kvstore.client.sidecar_store import open_sidecar
from kvstore.console.http_api import PAGES
from kvstore.node import SystemClock
from service.sidecar import Sidecar, patient
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import wait_until

pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra: plot)")

from engine_adapter.hf_cache import PrefixCache  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: see test_browser.py"),
]
ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("KVSTORE_PICTURES", "")
SECONDS = 70.0 if FOLDER else 3.0
WIDTH, HEIGHT = 1160, 700
MOST_BYTES = 100_000
COLOURS = 48
TOKEN = "correct-horse-battery"
CONVERSATIONS = 40
LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
"""So that computing takes longer than loading, as with real models."""
QUERIES = {
    "/plan": "?model=llama-3.1-8b&gpu_memory=80GB&weights=16GB&users=8&context_tokens=16384&dram=256GiB&nvme=2TiB"
    "&new_tokens_per_second=5000"
}


def conversation(number: int) -> list[int]:
    """Behind one system prompt, of 320 tokens."""
    draw = random.Random(7)
    ids = [draw.randrange(512) for _ in range(100_000)]
    return [*ids[:320], *ids[1000 * number + 1000 :][: 256 + 64 * (number % 7)]]


def ask_for_a_while(sidecar: Sidecar, cache: PrefixCache) -> str:
    """Conversations, the popular ones more often. Returns the last request's name."""
    draw = random.Random(7)
    ends_at = time.monotonic() + SECONDS
    while True:
        number = int(CONVERSATIONS * draw.random() ** 2)
        cache.generate(conversation(number), max_new_tokens=2)
        report = cache.report
        while sidecar.whatif.step():  # no thread does it here
            pass
        sidecar.prefixes.step()
        if time.monotonic() > ends_at and {MissReason.EVICTED, HitTier.DRAM} <= {
            one.origin for one in report.account.segments
        }:
            return report.request


def save_small(taken: Path, at: Path) -> None:
    with image.open(taken) as picture:
        small = picture.convert("RGB").quantize(COLOURS, image.Quantize.MAXCOVERAGE, dither=0)  # also rare colours
        small.save(at, optimize=True)
    print(at, at.stat().st_size)
    assert at.stat().st_size <= MOST_BYTES


@pytest.mark.slow
def test_each_page_has_a_picture(tmp_path: Path) -> None:
    folder = ROOT / FOLDER if FOLDER else tmp_path / "small"
    folder.mkdir(exist_ok=True)
    with Sidecar(tmp_path, dram="6MiB", nvme="10MiB", indexes=LmdbMaker) as sidecar, Browser(tmp_path / "p") as browser:
        assert sidecar.store.warmed(20)
        flags = ["--operator", str(sidecar.admin_path), "--audit-file", str(tmp_path / "audit")]
        flags += ["--tenant-socket", f"default={sidecar.path}"]
        store = open_sidecar(
            str(sidecar.path), codecs=codec_named, clock=SystemClock(), session="aa" * 16, engine="transformers"
        )
        with console(sidecar.observe_path, *flags, tokens=TOKEN) as shown, patient(store):
            browser.looks(WIDTH, HEIGHT, "light")
            browser.log_in(shown.url, TOKEN)
            cache = PrefixCache(small_model("llama", **LARGER), store, chunk_tokens=128, deadline_ms=5000)
            last = ask_for_a_while(sidecar, cache)
            asked = sidecar.admin.facts().looked.asked_tokens
            shown.until("/api/series?window=15m", lambda one: one["sums"].get("asked") == asked)
            wait_until(lambda: ask.why(str(sidecar.admin_path), SystemClock(), last).found[0].told is not None)
            space = sidecar.admin.facts().namespaces[0].id
            order = {"tenant": "default", "namespace": space, "confirm": space, "prompts": json.dumps(conversation(0))}
            done = shown.act("warm", order)
            assert done.status == 200, done.body
            for page in PAGES:
                query = f"?id={last}" if page == "/request" else QUERIES.get(page, "")
                browser.open(f"{shown.url.rstrip('/')}{page}{query}")
                browser.until("!document.querySelector('.wait')")
                browser.until("document.querySelector('#main section:not(.wait)')")
                name = f"console-{page.strip('/') or 'overview'}.png"
                browser.picture(tmp_path / name)
                save_small(tmp_path / name, folder / name)


def test_the_docs_have_each_page_and_each_picture() -> None:
    text = (ROOT / "docs" / "dashboard.md").read_text()
    for picture in (ROOT / "docs" / "images").glob("console-*.png"):
        assert f"images/{picture.name}" in text, picture.name
        assert picture.stat().st_size <= MOST_BYTES, picture.name
    for page in PAGES:
        if page != "/":
            assert f"`{page}`" in text, f"docs/dashboard.md has no section of the page {page}"
