"""What the console makes of a sidecar's answers: rings, restarts, gaps, events, words; and who may read it."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput
from kvstore.console.access import (
    FAILURE_SECONDS,
    LOGIN_SECONDS,
    MOST_FAILURES,
    Guard,
)
from kvstore.console.events import events_between
from kvstore.console.figures import (
    Contact,
    WhatIfFigures,
    health_of,
    misses_of,
    rate_at,
    reading_of,
    span,
    tenants_of,
    whatif_of,
)
from kvstore.console.http_api import help_page
from kvstore.console.reasons import FINE, reasons_of
from kvstore.console.rings import MOST_SERIES, STEPS, WINDOWS, Rings, SidecarReading
from kvstore.edge.tokens import Caller, Tokens
from kvstore.status.tree import (
    DoorStatus,
    LookupCounts,
    SessionStatus,
    SidecarStatus,
    TierStatus,
    WhatIfPoint,
    WhatIfStatus,
)
from tiering.tier import ScrubUsage
from waiting import FakeClock

NOW = 1_700_000_000.0
TOKEN = "correct-horse-battery"


def reading(at: float, asked: int, run: str = "a", began: float = NOW - 1000, **gauges: float) -> SidecarReading:
    return SidecarReading(run, at, began, {"asked": asked}, gauges)


def facts(**changed: Any) -> SidecarStatus:
    """Of a quiet sidecar, but for what is given."""
    given: dict[str, Any] = {
        "run": "ab" * 16,
        "pid": 7,
        "state": "ready",
        "at": NOW,
        "up_seconds": 600.0,
        "tiers": [TierStatus("dram", 1000, 500, {"used": 5, "free": 5, "quarantined": 0})],
        "blocks": 5,
        "leases": 0,
        "reservations": 0,
        "pinned_bytes": 0,
        "looked": LookupCounts(),
        "namespaces": [],
        "moves": [],
        "sessions": [],
        "departed": 0,
        "counters": {},
        "door": DoorStatus(0, 0, 0, 0, {}, None, None),
        "loading": None,
        "scrub": None,
        "health": "ok",
    }
    return SidecarStatus(**{**given, **changed})


# Rings ----------------------------------------------------------------------------------------------------------------


def test_the_slots_of_every_window_add_up_to_what_was_counted() -> None:
    rings, asked = Rings(), 100
    for look in range(1000):
        asked += look * 7 % 13
        rings.take(reading(NOW + 2.3 * look, asked))
    counted = asked - 100
    now = NOW + 2.3 * 999
    assert {name: rings.window(name, now).sums["asked"] for name in ("1h", "6h", "24h", "7d")} == dict.fromkeys(
        ("1h", "6h", "24h", "7d"), counted
    )
    assert rings.window("15m", now).sums["asked"] < counted


def test_what_was_counted_before_the_first_look_is_in_no_slot() -> None:
    rings = Rings()
    rings.take(reading(NOW, 1_000_000))
    assert rings.window("1h", NOW).sums == {} and rings.window("1h", NOW).seen_since is None
    rings.take(reading(NOW + 2, 1_000_005))
    assert rings.window("1h", NOW + 2).sums == {"asked": 5}


def test_slots_in_which_nobody_looked_are_unknown_and_zero_is_zero() -> None:
    rings = Rings()
    for at, asked in ((0, 0), (2, 5), (4, 5), (14, 5)):
        rings.take(reading(NOW + at, asked))
    found = rings.window("15m", NOW + 100)
    values = found.counters["asked"]
    known = {found.times[at] - int(NOW): value for at, value in enumerate(values) if value is not None}
    assert known == {0: 5.0, 10: 0.0} and found.seen_since == int(NOW)


def test_a_restart_counts_from_nothing_and_the_time_without_a_sidecar_is_a_gap() -> None:
    rings = Rings()
    rings.take(reading(NOW, 500))
    rings.take(reading(NOW + 2, 600))
    rings.take(reading(NOW + 65, 30, run="b", began=NOW + 61))
    found = rings.window("15m", NOW + 65)
    known = {found.times[at] - int(NOW): one for at, one in enumerate(found.counters["asked"]) if one is not None}
    assert known == {0: 100.0, 60: 30.0} and found.restarts == [NOW + 61] and found.sums["asked"] == 130


def test_an_hour_without_an_answer_of_the_same_run_is_spread_over_the_hour() -> None:
    rings = Rings()
    rings.take(reading(NOW, 0))
    rings.take(reading(NOW + 3600, 3600))
    found = rings.window("6h", NOW + 3600)
    known = [one for one in found.counters["asked"] if one is not None]
    assert sum(known) == 3600 and max(known) <= 60 and len(known) >= 60


def test_gauges_keep_the_last_value_of_a_slot_and_a_ring_forgets_what_is_older_than_it() -> None:
    rings = Rings()
    for look in range(800):
        rings.take(reading(NOW + 10 * look, look, pinned=float(look)))
    now = NOW + 7990
    found = rings.window("1h", now)
    assert list(found.gauges["pinned"])[-3:] == [797.0, 798.0, 799.0] and len(found.times) == 360
    assert found.sums["asked"] == 359 and rings.window("24h", now).sums["asked"] == 799


def test_a_clock_that_is_set_back_breaks_nothing() -> None:
    rings = Rings()
    for at, asked in ((100, 1), (200, 2), (50, 3), (60, 4), (60, 9), (210, 11)):
        rings.take(reading(NOW + at, asked))
    assert rings.window("15m", NOW + 210).sums["asked"] == 1 + 1 + 7


def test_rings_are_of_a_size_whatever_a_sidecar_calls_its_numbers() -> None:
    rings = Rings()
    for look in range(2):
        counters = {f"n{number}": look for number in range(500)}
        rings.take(SidecarReading("a", NOW + look, NOW, counters, {f"g{number}": 1.0 for number in range(500)}))
    found = rings.window("7d", NOW + 1)
    assert len(found.counters) + len(found.gauges) <= MOST_SERIES
    slots = sum(count for _, count in STEPS)
    assert slots * 8 * MOST_SERIES < 2_500_000
    assert all(seconds // step <= dict(STEPS)[step] for seconds, step in WINDOWS.values())


# Words ----------------------------------------------------------------------------------------------------------------


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "dashboard.md").read_text()
REASONS = reasons_of(PAGE)


def test_every_reason_has_words() -> None:
    assert set(REASONS) == set(MissReason) == set(MissReason) | FINE
    for reason, words in REASONS.items():
        for text in (words.meaning, words.cause, words.remedy):
            assert text[0].isupper() and text.endswith("."), reason


def test_the_consoles_help_has_all_of_that_page_and_its_links_lead_somewhere() -> None:
    page = PAGE
    shell = (Path(__file__).resolve().parents[2] / "kvstore" / "console" / "static" / "index.html").read_bytes()
    shown = help_page(page, shell).decode()
    anchors, links = re.findall(r'id="([^"]+)"', shown), re.findall(r'href="#([^"]+)"', shown)
    assert len(set(anchors)) == len(anchors) and set(links) <= set(anchors) >= set(REASONS) and len(links) > 5
    assert shown.startswith("<!doctype html>") and "Asking the console" not in shown
    words = unescape(re.sub(r"(?<=</td>)\n|<[^>]+>", "", shown))  # cells of a row without what is between them
    for reason, text in REASONS.items():
        assert f"{reason}{text.meaning}{text.cause}{text.remedy}" in words, reason
    for text in re.findall(r"^#+ (.+)$", page, re.MULTILINE):
        assert text in words
    assert not re.search(r"\]\(|`|\*|\|", words), "a form that is not read"


def test_what_a_document_says_is_text_in_the_help() -> None:
    shell = b'<main id="main">old</main>'
    shown = help_page('# <b>&\n`<i>` *<u>* [<s>](#x"y) [z](other.md#<a>)\n', shell).decode()
    assert not re.search(r"<[bisu]>|<a>|old", shown) and 'x"y' not in shown


def test_a_reason_of_a_newer_sidecar_is_shown_by_its_name() -> None:
    told = facts(looked=LookupCounts(asked_tokens=3, miss_tokens={"moonlight": 1, "evicted": 2}))
    found = misses_of(told, {"miss.moonlight": 1}, REASONS)
    assert [(one.reason, one.tokens, one.window_tokens) for one in found] == [("moonlight", 1, 1), ("evicted", 2, 0)]


def test_the_worst_comes_first() -> None:
    here = Contact(True, NOW, NOW)
    scrub = ScrubUsage(1, 1, 1, 1, 0, 0, 0, False, 1.0, NOW - 7200)

    def line(contact: Contact = here, **changed: Any) -> tuple[str, str]:
        one = health_of(NOW, contact, facts(**changed))
        return one.level, one.text

    assert line() == ("ok", "Ready. No check has failed in 10 min; there is no disk to scrub.")
    disk = [TierStatus("nvme", 1000, 500, {"used": 5_120, "free": 5, "quarantined": 0})]
    assert line(scrub=scrub, tiers=disk) == ("ok", "Ready. The last scrub pass ended 2 h ago.")
    for verified, words in ((0, "0 frames"), (1, "1 frame"), (5_000, "5,000 frames")):
        counted = dataclasses.replace(scrub, last_pass_frames=verified)
        text = f"Ready. The last scrub pass ended 2 h ago and verified {words}; 5,120 are on disk now."
        assert line(scrub=counted, tiers=disk) == ("ok", text)
    assert line(state="warming")[0] == line(state="stopping")[0] == "warning"
    assert line(health="degraded (disk full)")[1].count("degraded (disk full)") == 1
    level, text = line(health="degraded (disk full)", looked=LookupCounts(reports=2), scrub=scrub)
    assert level == "error" and "2 blocks reported" in text
    assert line(Contact(False, NOW, NOW, "gone"), looked=LookupCounts(reports=2))[1].startswith("The sidecar does not")
    assert health_of(NOW, Contact(False, NOW, None, "no such file"), None).level == "error"


def test_what_happened_is_told_once() -> None:
    before = facts(sessions=[SessionStatus("vllm 1", "default", 1, 0, 0, 0, NOW - 5)])
    after = replace_facts(
        before,
        at=NOW + 2,
        state="warming",
        looked=LookupCounts(reports=1),
        sessions=[SessionStatus("vllm 2", "default", 1, 0, 0, 0, NOW + 1)],
        door=DoorStatus(0, 0, 3, 1, {}, None, None),
        counters={"lapsed_leases": 2},
    )
    told = events_between(before, after)
    assert {one.kind for one in told} == {"state", "corrupt", "engine", "refused", "malformed", "lapsed"}
    assert sum(one.kind == "engine" for one in told) == 2 and events_between(after, after) == []
    again = events_between(before, replace_facts(before, run="cd" * 16, up_seconds=1.0, at=NOW + 9))
    assert [(one.kind, one.at) for one in again] == [("restart", NOW + 8)]
    assert [one.kind for one in events_between(None, before)] == ["contact"]


def replace_facts(one: SidecarStatus, **changed: Any) -> SidecarStatus:
    return msgspec.structs.replace(one, **changed)


def test_numbers_that_are_remembered_are_those_of_stat() -> None:
    told = facts(looked=LookupCounts(10, {"dram": 4}, {"absent": 6}, granted_tokens=4))
    found = reading_of(told)
    assert found.counters["asked"] == 10 and found.counters["hit.dram"] == 4 and found.counters["miss.absent"] == 6
    assert found.began_at == NOW - 600 and found.gauges["dram.taken_bytes"] == 500
    assert "wait_ms_p50" not in found.gauges and tenants_of(told) == []


def what_if(*curve: tuple[int, float], ceiling: float, budget: int = 1000) -> WhatIfStatus:
    points = [WhatIfPoint(int(scale * budget), scale, 0.0) for scale in (0.5, 1.0, 2.0)]
    told = WhatIfStatus(
        budget, points, [WhatIfPoint(*one[:1], None, one[1]) for one in curve], 64_000, 10.0, 1.0, 9, 60, 9, 0, ""
    )
    points = [
        structs.replace(
            one,
            token_hit_rate=rate_at(structs.replace(told, points=[WhatIfPoint(None, None, ceiling)]), one.size_bytes),
        )
        for one in points
    ]
    return structs.replace(told, points=[*points, WhatIfPoint(None, None, ceiling)])


def test_another_size_finds_what_the_curve_says_and_never_more_than_the_ceiling() -> None:
    told = what_if((400, 0.0), (800, 0.2), (1600, 0.6), ceiling=0.6)
    for size, rate in (
        (0, 0.0),
        (400, 0.0),
        (600, 0.1),
        (1000, 0.3),
        (1200, 0.4),
        (1600, 0.6),
        (10**15, 0.6),
        (None, 0.6),
    ):
        assert rate_at(told, size) == pytest.approx(rate), size
    found = whatif_of(facts(whatif=told), {"asked": 1000, "hit.dram": 200, "hit.nvme": 50, "hit.engine": 400})
    assert found.own_hit_rate == 0.25, "what the engine's own cache had is not the store's"
    assert [(one.size_bytes, round(one.token_hit_rate, 3), one.more_tokens_per_day) for one in found.sizes] == [
        (500, 0.05, -216_000),
        (1000, 0.3, 0),
        (2000, 0.6, 259_200),
        (1000 + (64 << 30), 0.6, 259_200),
        (1000 + 10**12, 0.6, 259_200),
        (None, 0.6, 259_200),
    ]
    assert [one.words for one in found.sizes][:2] == ["half of it", "what there is"]


def test_without_an_estimate_no_size_is_told() -> None:
    assert whatif_of(facts(), {}) == WhatIfFigures(None, 1000, None, [])
    nothing = structs.replace(what_if((400, 0.0), ceiling=0.0), asked_tokens=0)
    assert whatif_of(facts(whatif=nothing), {"asked": 0}).sizes == []


def test_spans_are_said_as_people_say_them() -> None:
    assert [span(one) for one in (0, 119, 120, 7200, 172_800)] == ["0 s", "119 s", "2 min", "2 h", "2 d"]


# Who may read ---------------------------------------------------------------------------------------------------------


def guard(host: str = "127.0.0.1", token: str | None = None, clock: FakeClock | None = None) -> Guard:
    return Guard(host, tokens_of(token) if token is not None else None, clock or FakeClock(), bytes)


def tokens_of(file: str) -> Tokens:
    return Tokens(file.encode(), "tokens", b"key")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_nobody_listens_to_other_hosts_without_a_token(host: str) -> None:
    with pytest.raises(BadInput, match="token"):
        guard(host)
    assert guard(host, TOKEN).has_token


@pytest.mark.parametrize(
    "host, is_known",
    [
        ("127.0.0.1:9798", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("[::1]:9798", True),
        ("evil.example:9798", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("127.0.0.1:x", False),
        ("127.0.0.1/x", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_only_names_of_this_host_are_answered(host: str, is_known: bool) -> None:
    assert guard().is_known_host(host) is is_known


def test_origins_are_compared_with_the_host_that_was_asked() -> None:
    one = guard()
    assert one.is_own_origin("http://localhost:1", "localhost:1")
    for origin in ("http://evil.example", "null", "http://localhost:2", "", "file://localhost:1"):
        assert not one.is_own_origin(origin, "localhost:1"), origin


def test_a_login_lasts_and_ends() -> None:
    clock = FakeClock()
    one = guard(token=TOKEN, clock=clock)
    assert not one.reader(None, "") and not one.reader("Bearer wrong-horse", "")
    assert one.reader(f"Bearer {TOKEN}", "") and not one.reader(f"Basic {TOKEN}", "")
    assert one.log_in("wrong") is None
    name = one.log_in(TOKEN)
    assert name is not None and one.reader(None, name) and not one.reader(None, "x")
    clock.advance(LOGIN_SECONDS + 1)
    assert not one.reader(None, name)
    name = one.log_in(TOKEN)
    assert name is not None
    one.log_out(name)
    assert not one.reader(None, name)


def test_other_tokens_end_every_login() -> None:
    one = guard(token=TOKEN)
    name = one.log_in(TOKEN)
    assert name is not None
    one.change_tokens(tokens_of("another-token-of-the-operator\nteam a-token-of-the-teams"))
    assert not one.reader(None, name) and not one.reader(f"Bearer {TOKEN}", "")
    assert one.reader("Bearer another-token-of-the-operator", "") == Caller()
    assert one.reader("Bearer a-token-of-the-teams", "") == Caller("team")


def test_who_tries_tokens_has_to_wait_and_who_has_one_has_not() -> None:
    clock = FakeClock()
    one = guard(token=TOKEN, clock=clock)
    assert [one.refused_for() for _ in range(MOST_FAILURES)] == [0.0] * MOST_FAILURES
    assert one.refused_for() == FAILURE_SECONDS and one.reader(f"Bearer {TOKEN}", "") == Caller()
    clock.advance(FAILURE_SECONDS + 1)
    assert one.refused_for() == 0.0 and one.log_in(TOKEN) is not None
