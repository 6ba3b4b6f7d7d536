"""The sentences that people read first: each says what is so, with a figure, and what to do about it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from console.test_figures import NOW, PAGE, REASONS, facts, what_if
from kvstore.block.account import MissReason
from kvstore.console.answers import FAULTS, MOST_TEXT, answers_of
from kvstore.console.events import ConsoleEvent
from kvstore.console.figures import Answers, Contact, HealthLine, facts_of_tenant
from kvstore.console.http_api import PAGES, help_page
from kvstore.console.reasons import FINE
from kvstore.console.rings import Rings, SidecarReading
from kvstore.status import tree
from tiering.faults import FaultKind, MachineFault
from tiering.tier import ScrubUsage

HERE, GONE = Contact(True, NOW - 9000, NOW), Contact(False, NOW - 200, NOW - 202, "no answer")
ENGINES = [tree.SessionStatus("vllm 1", "default", 1, 0, 0, 0, NOW - 5)]
HELP = help_page(PAGE, b'<main id="main"></main>').decode()


def counts(**misses: int) -> tree.LookupCounts:
    return tree.LookupCounts(10_000, {"engine": 2000, "dram": 1000}, misses)


def status(**changed: Any) -> tree.SidecarStatus:
    return facts(**{"looked": counts(absent=2000), "sessions": ENGINES, "up_seconds": 7200.0, **changed})


def said(one: tree.SidecarStatus | None, contact: Contact = HERE, **more: Any) -> Answers:
    """Each leads to a place that there is."""
    found = answers_of(NOW, contact, one, REASONS, **more)
    for line in (found.saved, found.missed, found.next):
        path, _, anchor = line.page.partition("#")
        assert path.partition("?")[0] in (*PAGES, "/help") and line.level in ("ok", "warning", "error")
        assert path != "/help" or not anchor or f'id="{anchor}"' in HELP, line.page
        assert line.text.endswith(".") and ".." not in line.text and line.text.isprintable(), line.text
    return found


# What it saves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("savings", "text"),
    [
        (tree.SavingsStatus(2470.0, 10.0, 4), "Saved 41 GPU minutes {since}, 12 % of prefill (4 engines)."),
        (tree.SavingsStatus(5.0, 0.5, 1), "Saved 4.5 GPU seconds {since}, 12 % of prefill (1 engine)."),
        (tree.SavingsStatus(36_000.0, 0.0, 2), "Saved 10 GPU hours {since}"),
        (tree.SavingsStatus(1.0, 61.0, 2), "Loads took 60 GPU seconds longer than prefill would have {since}"),
        (None, "Saved 12 % of prefill {since}; GPU time is unknown: the adapters of vLLM and"),
    ],
)
def test_what_it_saves_is_gpu_time_and_a_share_of_what_engines_lacked(savings: Any, text: str) -> None:
    """1,000 of the 8,000 tokens that the engine's own cache did not have."""
    assert said(status(savings=savings)).saved.text.startswith(text.format(since="since the sidecar began 2 h ago"))


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    nothing = said(None, Contact(False, NOW, None, "no such file"))
    assert "not known" in nothing.saved.text and "not known" in nothing.missed.text and nothing.next.level == "error"
    empty = said(status(looked=tree.LookupCounts()))
    assert empty.saved.text.startswith("Saved nothing yet: no engine has requested a token")
    assert empty.missed.text.startswith("No miss") and empty.next.text.startswith("Nothing to do until")
    assert "kvstore run" in said(facts()).next.text
    no_hit = said(status(looked=tree.LookupCounts(100, {}, {"absent": 100})))
    assert "none of 100 requested tokens" in no_hit.saved.text and "kvstore lint" in no_hit.next.text


def test_what_stopped_answering_is_told_as_it_was() -> None:
    old = said(status(savings=tree.SavingsStatus(60.0, 0.0, 1)), GONE)
    for line in (old.saved, old.missed):
        assert line.text.startswith("Until the sidecar stopped answering 3 min ago: ") and line.level == "warning"
    assert old.next.level == "error" and "kvstore doctor" in old.next.text


def test_a_day_that_was_watched_is_told_instead_of_all_since_the_start() -> None:
    rings = Rings()
    for hour in range(26):
        at = NOW + 3600 * hour
        assert (rings.day(at) is None) is (hour < 24)
        grown = {"asked": 1000 * hour, "hit.dram": 250 * hour, "miss.quota": 100 * hour, "saved_ms": 60_000 * hour}
        rings.take(SidecarReading("a", at, NOW, grown, {}))
    day = rings.day(NOW + 3600 * 25)
    assert day is not None and 23_900 <= day["asked"] <= 24_100
    found = said(status(savings=tree.SavingsStatus(9e9, 0.0, 3)), day=day)
    assert found.saved.text == "Saved 24 GPU minutes in the last 24 hours, 25 % of prefill (3 engines)."
    assert "quota, 10 % of" in found.missed.text and found.missed.page == "/misses?window=24h#quota"


# Why a miss -----------------------------------------------------------------------------------------------------------


def test_the_largest_avoidable_miss_is_none_that_is_fine_or_new() -> None:
    looked = counts(absent=4000, partial_block=2000, audit=900, evicted=950, deadline=100)
    line = said(status(looked=looked)).missed
    assert line.text == "Largest avoidable miss: evicted, 9.5 % of 10,000 tokens requested since the sidecar began."
    assert (line.level, line.page) == ("warning", "/misses#evicted")
    small = said(status(looked=counts(absent=4000, evicted=99)))
    assert small.missed.text.startswith("Largest miss: absent, 40 %") and "no avoidable miss" in small.missed.text
    assert small.missed.level == "ok" and small.next.text.startswith("Nothing to do: no avoidable miss")
    assert "evicted, less than 0.1 % of" in said(status(looked=counts(evicted=9))).missed.text
    assert said(status(looked=counts(grid=5000))).missed.text == "No avoidable miss since the sidecar began."


def test_every_reason_has_something_to_do_that_is_no_riddle() -> None:
    for reason in set(MissReason) - FINE - {MissReason.ABSENT, MissReason.DIVERGED}:
        looked = counts(**{reason: 5000})
        for tenant in (None, "red"):
            line = said(status(looked=looked), tenant=tenant).next
            assert line.level == "warning" and line.page == f"/help#{reason}", line
            assert reason.replace("_", " ") in line.text and "nothing" not in line.text.partition(";")[0].lower()
    assert "--mamba-cache-mode align" in said(status(looked=counts(no_state=5000))).next.text
    assert "Ask the operator" in said(status(looked=counts(quota=5000)), tenant="red").next.text


# What next ------------------------------------------------------------------------------------------------------------


def test_more_room_is_named_with_what_it_brings_where_blocks_are_evicted() -> None:
    dram, nvme = tree.TierStatus("dram", 400, 400, {}), tree.TierStatus("nvme", 600, 600, {})
    estimate = what_if((400, 0.0), (800, 0.2), (1600, 0.6), ceiling=0.6)
    looked = counts(absent=2000, evicted=3000)
    both = said(status(tiers=[dram, nvme], whatif=estimate, looked=looked)).next
    assert both.text == "Raise store.nvme from 600 B to 1.6 KiB: hits rise by about 30.0 points of requested tokens."
    assert both.page == "/#whatif"
    alone = said(status(tiers=[structs.replace(dram, budget_bytes=1000)], whatif=estimate, looked=looked)).next
    assert alone.text.startswith("Raise store.dram from 1000 B to 2 KiB")
    flat = structs.replace(
        estimate, curve=[tree.WhatIfPoint(400, None, 0.6)], points=[tree.WhatIfPoint(None, None, 0.6)]
    )
    assert said(status(tiers=[dram], whatif=flat, looked=looked)).next.text.startswith("For evicted: ")
    assert said(status(tiers=[dram], whatif=estimate)).next.text.startswith("Nothing to do")


def test_what_is_broken_comes_before_what_could_be_better() -> None:
    worse = counts(absent=2000, evicted=3000)

    def line(**changed: Any) -> HealthLine:
        return said(status(looked=worse, **changed)).next

    def broken(kind: str, what: str = "new slabs") -> dict[str, Any]:
        one = MachineFault(what, kind, 12, 300.0, 4.0, "detail")
        return {"faults": [one], "reasons": [str(one)], "health": f"degraded ({one})"}

    nvme = tree.TierStatus("nvme", 4 << 30, 1 << 30, {})
    assert line(**broken("disk full"), tiers=[nvme]).text.startswith("Free 3 GiB on the data directory's disk")
    for kind in FaultKind:
        assert (kind in FAULTS) == (line(**broken(kind)).text == f"{FAULTS.get(kind)}."), kind
    assert "12 new slabs failed" in line(**broken("meteor")).text
    scrub = ScrubUsage(1, 1, 1, 1, 2, 0, 0, False, 1.0, NOW)
    damaged = line(**broken("disk full"), scrub=scrub)
    assert damaged.level == "error" and "this host's disk," in damaged.text and "kvstore fsck" in damaged.text
    assert "memory and disk" in said(status(looked=structs.replace(worse, reports=1))).next.text
    assert line(state="warming").text.startswith("Wait until") and "once it has ended" in line(state="stopping").text
    assert line(policy_note="no such file").text == "Set store.policy again: no such file."
    assert line(savings=tree.SavingsStatus(1.0, 61.0, 2)).text.startswith("Look for a slow disk")
    left = ConsoleEvent(NOW, "info", "engine", "vllm 1 of default left.")
    away = answers_of(NOW, HERE, status(sessions=[]), REASONS, events=[left]).next
    assert away.text == "Start the engine again: none is attached; vllm 1 of default left."
    restarts = [ConsoleEvent(NOW - 60 * at, "warning", "restart", "The sidecar began again.") for at in range(4)]
    assert "4 times in half an hour" in said(status(), events=restarts).next.text
    assert said(status(), events=restarts[:2]).next.text.startswith("Nothing to do")


def test_what_others_named_is_cut_to_a_line() -> None:
    warning = "<img src=x onerror=alert(1)>\n" + "vllm " * 200
    text = said(status(warnings=[warning])).next.text
    assert text.startswith("See to a warning: <img src=x onerror=alert(1)> vllm") and len(text) < MOST_TEXT + 40
    assert len(said(status(looked=counts(**{"x" * 900: 5000}))).missed.text) < 2 * MOST_TEXT


def test_a_tenant_is_told_of_itself_alone() -> None:
    def space(tenant: str, looked: tree.LookupCounts) -> tree.NamespaceStatus:
        return tree.NamespaceStatus("1", "1", tenant, "m", "l", "raw", 0, 64, 1, 1, 1, None, None, None, looked)

    spaces = [space("red", counts(quota=500)), space("blue", counts(evicted=7777))]
    whole = status(
        namespaces=spaces, looked=tree.LookupCounts.summed(one.looked for one in spaces), warnings=["blue is wrong"],
        whatif=what_if((400, 0.0), (1600, 0.6), ceiling=0.6), savings=tree.SavingsStatus(4321.0, 0.0, 5),
        health="degraded (x)",
    )  # fmt: skip
    for contact in (HERE, GONE):
        found = said(facts_of_tenant(whole, "red"), contact, tenant="red")
        texts = " ".join(one.text for one in (found.saved, found.missed, found.next))
        assert "12 % of prefill" in texts and "quota, 5.0 % of 10,000 tokens" in texts
        assert not [word for word in ("blue", "GPU", "evicted", "engines)", "degraded", "points") if word in texts]
