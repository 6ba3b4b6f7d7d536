"""The overview in twelve states of a sidecar, as a browser shows them: each of the four sentences stands where it is
seen without scrolling. The console is a process of its own; what it is told is a real sidecar's report, changed to the
state. The pictures lie in build/pictures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from console.browser import CHROMIUM, Browser
from console.running import RunningConsole, console, serve_traffic
from kvstore.protocol import messages as m
from kvstore.service.connections import Response
from kvstore.status import tree
from service.sidecar import Sidecar
from tiering.faults import MachineFault
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.tier import ScrubUsage

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: see test_browser.py")
PICTURES = Path(__file__).resolve().parents[2] / "build" / "pictures"
LOOKS = (("light", 1280, 900), ("dark", 1280, 900), ("light", 390, 844), ("dark", 390, 844))
LOWEST = 600
"""Pixels from the top of the page."""
TOKENS = {"": "operator-" + "o" * 16, "red": "red-" + "r" * 24}
SHOWN = "['health', 'saved', 'missed', 'next'].map(one => document.getElementById(one))"
HOSTILE = "<img src=x onerror=alert(1)> " + "vllm" * 99
GIB = 1 << 30


class Recorded:
    """What an observers' socket tells: what it is given."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._admin = sidecar.admin
        self.real = self.facts = sidecar.admin.facts()
        self.answers = threading.Event()
        self.answers.set()

    def serve(self, verb: m.Verb) -> Response:
        self.answers.wait(60)
        if isinstance(verb, m.Stat):
            return Response(m.StatReply(structs.replace(self.facts, at=time.time())))
        return self._admin.observe(verb)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Recorded, RunningConsole]]:
    directory = tmp_path_factory.mktemp("recorded")
    with Sidecar(directory, dram="2MiB", nvme="4MiB", indexes=LmdbMaker) as sidecar:
        assert sidecar.store.warmed(20)
        serve_traffic(sidecar)
        one = Recorded(sidecar)
        socket = directory / "recorded.sock"
        sidecar.door.listen(socket, one.serve, 0o600)
        tokens = f"{TOKENS['']}\nred {TOKENS['red']}"
        with console(socket, tokens=tokens) as shown:
            yield one, shown
            one.answers.set()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


# The states -----------------------------------------------------------------------------------------------------------


def looked(**misses: int) -> tree.LookupCounts:
    """Of a million tokens; those that are not missed are hits."""
    asked = 1_184_000
    hits = asked - sum(misses.values())
    own = {"engine": hits // 4, "dram": hits // 2, "nvme": hits - hits // 4 - hits // 2}
    blocks = {"hit_blocks": dict.fromkeys(own, 1), "miss_blocks": dict.fromkeys(misses, 1)}
    return tree.LookupCounts(asked, own, dict(misses), granted_tokens=hits - hits // 4, **blocks)


def sized(facts: tree.SidecarStatus) -> tree.SidecarStatus:
    """Of a size as people have it, with four engines."""
    dram, nvme = facts.tiers
    tiers = [
        structs.replace(dram, budget_bytes=64 * GIB, taken_bytes=64 * GIB),
        structs.replace(nvme, budget_bytes=512 * GIB, taken_bytes=480 * GIB),
    ]
    assert facts.whatif is not None
    return structs.replace(
        facts,
        tiers=tiers,
        up_seconds=11_000.0,
        sessions=[tree.SessionStatus(f"vllm {at}", "default", 2, 1, 8, 0, facts.at - 9000) for at in range(4)],
        savings=tree.SavingsStatus(2470.0, 10.0, 4, 310.0, 25.0),
        scrub=ScrubUsage(64 << 20, 3, 27_000, 9 << 30, 0, 0, 0, False, 1.0, facts.at - 7200, 9000),
        whatif=larger(facts.whatif, 576 * GIB),
    )


def larger(one: tree.WhatIfStatus, budget: int) -> tree.WhatIfStatus:
    times = budget / one.budget_bytes
    curve, points = (
        [structs.replace(at, size_bytes=round(times * at.size_bytes) if at.size_bytes else None) for at in some]
        for some in (one.curve, one.points)
    )
    return structs.replace(one, budget_bytes=budget, curve=curve, points=points)


def fault(what: str, kind: str, detail: str) -> dict[str, Any]:
    one = MachineFault(what, kind, 12, 300.0, 4.0, detail)
    return {"faults": [one], "reasons": [str(one)], "health": f"degraded ({one})", "state": "degraded"}


def states(told: tree.SidecarStatus) -> dict[str, list[tree.SidecarStatus]]:
    """What is told one after the other, by the state's name."""
    real, calm = sized(told), looked(absent=300_000, partial_block=21_000)
    empty = {"looked": tree.LookupCounts(), "whatif": None, "savings": None, "namespaces": [], "blocks": 0}

    def changed(**fields: Any) -> tree.SidecarStatus:
        return structs.replace(real, **{"looked": calm, "whatif": None, **fields})

    assert real.scrub is not None
    tenants = [tree.TenantStatus(name, 0.25, 1.0, GIB, GIB, GIB, GIB) for name in ("red", "blue")]
    own = structs.replace(told.namespaces[0], looked=looked(quota=90_000, absent=30_000))
    of_two = [structs.replace(own, tenant=one.tenant) for one in tenants]
    other_keys = f"{HOSTILE} of tenant red hashes with other keys: it misses as key_mismatch"
    crash = {"up_seconds": 8.0, "savings": None, "looked": looked(warming=1_000_000, absent=20_000), "state": "warming"}
    disk_full = fault("new slabs", "disk full", "No space left on device")
    by_name: dict[str, list[tree.SidecarStatus]] = {
        "fresh": [structs.replace(real, **empty, up_seconds=5.0, sessions=[])],
        "busy": [changed(looked=looked(absent=200_000, evicted=112_480, partial_block=9000), whatif=real.whatif)],
        "degraded": [changed(**fault("connections", "no descriptors", "Too many open files"))],
        "disk full": [changed(**disk_full, looked=looked(absent=200_000, evicted=30_000))],
        "damaged": [changed(scrub=replace(real.scrub, damaged=3), looked=looked(absent=200_000, corrupt=640))],
        "evicting": [changed(looked=looked(absent=90_000, evicted=610_000), whatif=real.whatif)],
        "engine away": [changed(), changed(sessions=[])],
        "hybrid without states": [changed(looked=looked(absent=90_000, no_state=510_000), savings=None)],
        "two tenants": [changed(tenants=tenants, namespaces=of_two, warnings=[other_keys])],
        "nothing asked": [structs.replace(real, **empty)],
        "after a crash": [changed(), changed(run="cd" * 16, **crash, loading=tree.RecoveryStatus(12_000, 98_000, 900))],
        "hung": [changed(looked=looked(absent=200_000, evicted=112_480), whatif=real.whatif)],
    }
    return {
        name: [structs.replace(one, run=f"{at:02x}{one.run[2:]}") for one in several]
        for at, (name, several) in enumerate(by_name.items())
    }


WORDS = {
    "fresh": ("Ready", "Saved nothing yet", "No miss", "Start an engine"),
    "busy": ("Ready", "Saved 41 GPU minutes", "evicted, 9.5 %", "Raise store.nvme from 512 GiB"),
    "degraded": ("no descriptors", "Saved 41 GPU minutes", "absent, 25 %", "limit of open files"),
    "disk full": ("disk full", "% of prefill (4 engines)", "evicted, 2.5 %", "Free 32 GiB"),
    "damaged": ("3 frames damaged", "Saved", "Largest miss: absent", "kvstore fsck"),
    "evicting": ("Ready", "Saved", "evicted, 52 %", "points"),
    "engine away": ("Ready", "Saved", "absent", "none is attached; vllm"),
    "hybrid without states": ("Ready", "GPU time is unknown", "no state, 43 %", "Turn on states"),
    "two tenants": ("Ready", "Saved", "absent", "See to a warning: <img src=x"),
    "nothing asked": ("Ready", "Saved nothing yet", "No miss", "until an engine requests"),
    "after a crash": ("Warming", " s ago; GPU time", "warming, 84 %", "Wait until the disk"),
    "hung": ("does not answer", "Until the sidecar stopped", "Until the sidecar stopped", "restart the sidecar"),
}


def bring(recorded: tuple[Recorded, RunningConsole], name: str) -> None:
    """The console knows the state."""
    told, shown = recorded
    for facts in states(told.real)[name]:
        told.facts = facts
        sessions = len(facts.sessions)
        shown.until("/api/status", lambda one, at=facts, n=sessions: one["run"] == at.run and one["sessions"] == n)
    if name == "hung":
        told.answers.clear()
        shown.until("/api/status", lambda one: not one["contact"]["connected"])


def measured(browser: Browser, name: str, url: str) -> None:
    for theme, width, height in LOOKS:
        browser.looks(width, height, theme)
        browser.open(url)
        browser.until(f"{SHOWN}.every(Boolean)")
        browser.picture(PICTURES / f"{name.replace(' ', '-')}-{theme}-{width}.png")
        boxes = browser.value(f"{SHOWN}.map(one => one.getBoundingClientRect().bottom + scrollY)")
        cut = browser.value(f"{SHOWN}.map(one => one.scrollWidth - one.clientWidth)")
        print(f"{name}, {theme}, {width}: {[round(one) for one in boxes]}")
        assert boxes == sorted(boxes) and boxes[-1] <= LOWEST and cut == [0, 0, 0, 0], (name, width, boxes, cut)
        widths = browser.value("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], (name, widths)
        assert browser.value("document.querySelectorAll('#main img').length") == 0


def test_the_four_sentences_are_seen_in_every_state(
    recorded: tuple[Recorded, RunningConsole], browser: Browser
) -> None:
    _, shown = recorded
    PICTURES.mkdir(parents=True, exist_ok=True)
    browser.looks(1280, 900, "light")
    browser.log_in(shown.url, TOKENS[""])
    for name, words in WORDS.items():
        bring(recorded, name)
        measured(browser, name, shown.url)
        texts = browser.value(f"{SHOWN}.map(one => one.querySelector('span').textContent)")
        assert all(word.lower() in text.lower() for word, text in zip(words, texts, strict=True)), (name, texts)
        assert all(len(text) < 300 for text in texts), (name, texts)
        links = browser.value("[...document.querySelectorAll('.answer a')].map(one => one.pathname + one.hash)")
        assert len(links) >= 3, (name, links)
    assert [one for one in browser.logged if "ERR_" not in one and "EventSource" not in one] == []


def test_a_tenants_reader_sees_four_sentences_of_its_own(
    recorded: tuple[Recorded, RunningConsole], browser: Browser
) -> None:
    recorded[0].answers.set()
    bring(recorded, "two tenants")
    url = recorded[1].url
    browser.call("Network.clearBrowserCookies")
    browser.log_in(url, TOKENS["red"], then=f"{SHOWN}.every(Boolean)")
    measured(browser, "a tenant", f"{url}tenants")
    texts = browser.value(f"{SHOWN}.map(one => one.textContent)")
    assert "Ready: the sidecar serves red." in texts[0]
    assert "quota, 7.6 % of 1,184,000 tokens" in texts[2] and "Ask the operator, for quota" in texts[3]
    assert "blue" not in browser.value("document.getElementById('main').textContent")
