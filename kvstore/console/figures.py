"""The figures that pages and API show, computed from the sidecar's status. Pure; token counts stay whole numbers.

The classes here are the API: their fields are only ever appended. None is "unknown" and is shown as "-"; 0 is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.block.account import HitTier
from kvstore.console.events import ConsoleEvent
from kvstore.console.reasons import FINE, NEWER, ReasonText
from kvstore.console.rings import SidecarReading
from kvstore.status.declared import picked
from kvstore.status.tree import (
    DoorStatus,
    LookupCounts,
    NamespaceStatus,
    RecoveryStatus,
    SavingsStatus,
    SessionStatus,
    SidecarStatus,
    TierStatus,
    WhatIfStatus,
)

MORE = (("64 GiB more", 64 << 30), ("1 TB more", 10**12))
"""Common upgrade sizes."""
MOST_LISTED = 500
"""Rows of one answer."""


class HealthLine(msgspec.Struct, frozen=True):
    """The most serious message. level: "ok", "warning" or "error"; page: where more stands."""

    level: str
    text: str
    page: str = "/"


class Answers(msgspec.Struct, frozen=True):
    """A sentence each: what the store saves, why tokens were missed (the largest avoidable miss), what to do next."""

    saved: HealthLine
    missed: HealthLine
    next: HealthLine


class Contact(msgspec.Struct, frozen=True):
    """connected: whether the last poll was answered. since: when that last changed. numbers_from: time of the numbers,
    None before the first ones. error: of the last poll."""

    connected: bool
    since: float
    numbers_from: float | None
    error: str = ""


class IntegrityFigures(msgspec.Struct, frozen=True):
    """reported: blocks that failed their reader's check. The other figures are the disk scrub's; None without one."""

    reported: int
    quarantined_slots: int
    verified_bytes: int | None = None
    verified_frames: int | None = None
    passes: int | None = None
    damaged: int | None = None
    unreadable: int | None = None
    mended: int | None = None
    in_pass: bool | None = None
    last_pass_ended: float | None = None


class ConsoleStatus(msgspec.Struct, frozen=True):
    """`/api/status`. at: the console's clock. Figures are None until the sidecar first answers, and for a tenant's
    reader, who sees only `looked`: what the tenant asked for and got. tenant: the reader's, None for one who sees
    everything. acts: whether the operator may drop, purge and warm at this console."""

    version: str
    at: float
    contact: Contact
    health: HealthLine
    run: str | None = None
    pid: int | None = None
    state: str | None = None
    up_seconds: float | None = None
    blocks: int | None = None
    leases: int | None = None
    reservations: int | None = None
    sessions: int | None = None
    namespaces: int | None = None
    pinned_bytes: int | None = None
    looked: LookupCounts | None = None
    tiers: list[TierStatus] = []
    retained_bytes: dict[str, int | None] = {}
    retained_budget_bytes: dict[str, int | None] = {}
    integrity: IntegrityFigures | None = None
    loading: RecoveryStatus | None = None
    policy: str | None = None
    nvme_writes: str | float | None = None
    events: list[ConsoleEvent] = []
    savings: SavingsStatus | None = None
    tenant: str | None = None
    acts: bool = False
    answers: Answers | None = None


class MissFigures(msgspec.Struct, frozen=True):
    """Tokens missed for one reason, since the sidecar began and in the window."""

    reason: str
    meaning: str
    cause: str
    remedy: str
    is_fine: bool
    tokens: int
    window_tokens: int


class TenantFigures(msgspec.Struct, frozen=True):
    """What a tenant has, and what it asked for and got since the sidecar began; as in `kvstore stat`."""

    tenant: str
    namespaces: int
    asked_tokens: int
    hit_tokens: dict[str, int]
    miss_tokens: dict[str, int]
    found_tokens: int
    granted_tokens: int
    share: float | None = None
    weight: float | None = None
    dram_bytes: int | None = None
    dram_guaranteed_bytes: int | None = None
    nvme_bytes: int | None = None
    nvme_guaranteed_bytes: int | None = None


class EngineFigures(msgspec.Struct, frozen=True):
    """Sessions, and the API socket that they use. hidden: further sessions."""

    sessions: list[SessionStatus]
    hidden: int
    departed: int
    door: DoorStatus


class OtherSize(msgspec.Struct, frozen=True):
    """What another total size would find. words: its difference from the present size. size_bytes: None for unlimited.
    more_tokens_per_day: saved from computing; negative for a smaller size."""

    words: str
    size_bytes: int | None
    token_hit_rate: float
    more_tokens_per_day: int


class WhatIfFigures(msgspec.Struct, frozen=True):
    """`/api/whatif`. estimate: None if this sidecar makes none. dram_bytes: the memory's part of the budget.
    own_hit_rate: actual share found in the last hour, None if nothing was asked for."""

    estimate: WhatIfStatus | None
    dram_bytes: int
    own_hit_rate: float | None
    sizes: list[OtherSize]


def reading_of(facts: SidecarStatus) -> SidecarReading:
    """Counters and gauges that the console keeps over time."""
    looked = facts.looked
    counters: dict[str, int] = {
        "asked": looked.asked_tokens,
        "found": looked.found_tokens,
        "granted": looked.granted_tokens,
        "lookups": looked.lookups,
        "leases": looked.leases,
        "reports": looked.reports,
        "stored_blocks": facts.counters.get("stored_blocks", 0),
        "requests": sum(facts.door.served.values()),
        "moved": sum(one.done for one in facts.moves),
        "moves_failed": sum(one.failed for one in facts.moves),
    }
    if facts.savings is not None:
        counters["saved_ms"] = round(1000 * facts.savings.saved_seconds)
        counters["regret_ms"] = round(1000 * facts.savings.regret_seconds)
    for tier in (HitTier.ENGINE, HitTier.DRAM, HitTier.NVME):
        counters[f"hit.{tier}"] = looked.hit_tokens.get(str(tier), 0)
    counters |= {f"hit.{name}": tokens for name, tokens in looked.hit_tokens.items()}
    counters |= {f"miss.{name}": tokens for name, tokens in looked.miss_tokens.items()}
    for one in facts.moves:
        counters[f"moves.{one.kind}"] = counters.get(f"moves.{one.kind}", 0) + one.done
    gauges: dict[str, float] = {
        "pinned_bytes": facts.pinned_bytes,
        "live_leases": facts.leases,
        "sessions": len(facts.sessions) + facts.hidden_sessions,
        "waiting_moves": sum(one.waiting for one in facts.moves),
    }
    for tier_status in facts.tiers:
        gauges[f"{tier_status.name}.taken_bytes"] = tier_status.taken_bytes
    for name, value in (("wait_ms_p50", facts.door.wait_ms_p50), ("wait_ms_p99", facts.door.wait_ms_p99)):
        if value is not None:
            gauges[name] = value
    return SidecarReading(facts.run, facts.at, facts.at - facts.up_seconds, counters, gauges)


def status_of(
    version: str, now: float, contact: Contact, facts: SidecarStatus | None, events: list[ConsoleEvent]
) -> ConsoleStatus:
    """The overview, also sent to every listening page."""
    health = health_of(now, contact, facts)
    if facts is None:
        return ConsoleStatus(version, now, contact, health, events=events)
    return picked(
        ConsoleStatus,
        facts,
        sessions=len(facts.sessions) + facts.hidden_sessions,
        namespaces=len(facts.namespaces) + facts.hidden_namespaces,
        retained_bytes={"dram": facts.dram_retained_bytes, "nvme": facts.nvme_retained_bytes},
        retained_budget_bytes={"dram": facts.dram_retained_budget_bytes, "nvme": facts.nvme_retained_budget_bytes},
        integrity=integrity_of(facts),
        loading=facts.loading if facts.state == "warming" else None,
        policy=facts.policy or None,
        version=version,
        at=now,
        contact=contact,
        health=health,
        events=events,
    )


def facts_of_tenant(facts: SidecarStatus, tenant: str) -> SidecarStatus:
    """The part of the status that a tenant may see. Fields that are not named here are left out."""
    spaces = [one for one in facts.namespaces if one.tenant == tenant]
    nothing: dict[str, Any] = dict.fromkeys(("leases", "reservations", "pinned_bytes", "departed", "pid"), 0)
    nothing |= {name: [] for name in ("tiers", "moves", "sessions")} | dict.fromkeys(("loading", "scrub"))
    return SidecarStatus(
        run=facts.run,
        state=facts.state,
        at=facts.at,
        up_seconds=facts.up_seconds,
        blocks=sum(one.blocks for one in spaces),
        looked=LookupCounts.summed(one.looked for one in spaces),
        namespaces=spaces,
        tenants=[one for one in facts.tenants if one.tenant == tenant],
        counters={},
        door=DoorStatus(0, 0, 0, 0, {}, None, None),
        **nothing,
    )


def status_of_tenant(
    version: str, now: float, contact: Contact, facts: SidecarStatus | None, tenant: str
) -> ConsoleStatus:
    """As `status_of`, for a tenant."""
    told = Contact(contact.connected, contact.since, contact.numbers_from if facts is not None else None)
    if facts is None:
        health = HealthLine("error", "No sidecar has answered yet.")
        return ConsoleStatus(version, now, told, health, tenant=tenant)
    health = HealthLine("ok", f"Ready: the sidecar serves {tenant}.")
    if facts.state in ("warming", "stopping"):
        health = HealthLine("warning", f"The sidecar serves {tenant}, and is {facts.state}: some tokens are missed.")
    if not contact.connected:
        health = HealthLine("error", "The sidecar does not answer; all numbers are old.")
    own, seen = facts_of_tenant(facts, tenant), ("run", "state", "up_seconds", "looked")
    shown = {name: getattr(own, name) for name in seen}
    return ConsoleStatus(version, now, told, health, tenant=tenant, **shown)


def integrity_of(facts: SidecarStatus) -> IntegrityFigures:
    quarantined, scrub = sum(one.slots.get("quarantined", 0) for one in facts.tiers), facts.scrub
    if scrub is None:
        return IntegrityFigures(facts.looked.reports, quarantined)
    own = {"reported": facts.looked.reports, "quarantined_slots": quarantined}
    return picked(IntegrityFigures, scrub, verified_bytes=scrub.bytes, verified_frames=scrub.frames, **own)


def health_of(now: float, contact: Contact, facts: SidecarStatus | None) -> HealthLine:
    if facts is None:
        return HealthLine(
            "error", f"No sidecar has answered yet: {contact.error or 'the first question is under way'}."
        )
    if not contact.connected:
        return HealthLine("error", f"The sidecar does not answer ({contact.error}); all numbers are old.", "/events")
    one = integrity_of(facts)
    if one.reported or one.quarantined_slots or one.damaged:
        text = f"Checks failed since the sidecar began: {one.reported:,} blocks reported by readers, "
        text += f"{one.damaged or 0:,} frames damaged on disk, {one.quarantined_slots:,} slots quarantined. "
        return HealthLine("error", f"{text}None of them was served.", "/events")
    if facts.state == "stopping":
        return HealthLine("warning", "The sidecar is ending: it answers what is under way, and takes nothing new.")
    if facts.health.startswith("degraded"):
        return HealthLine("warning", f"It serves, and something does not work: {facts.health}.", "/moves")
    if facts.state == "warming":
        at = facts.loading
        text = f": {at.slots:,} of {at.all_slots:,} slots looked at" if at is not None else ""
        return HealthLine("warning", f"Warming: it takes in what is on disk{text}. Some misses are called warming.")
    if facts.policy_note:
        return HealthLine("warning", f"It serves by the policy {facts.policy}: {facts.policy_note}.")
    if facts.scrub is None:
        return HealthLine("ok", f"Ready. No check has failed in {span(facts.up_seconds)}; there is no disk to scrub.")
    if facts.scrub.last_pass_ended is None:
        return HealthLine("ok", f"Ready. No check has failed in {span(facts.up_seconds)}; no scrub pass has ended yet.")
    ago, verified = span(max(0.0, now - facts.scrub.last_pass_ended)), facts.scrub.last_pass_frames
    text = f"Ready. The last scrub pass ended {ago} ago"
    if verified is not None:  # else the sidecar is of a version that does not report it
        on_disk = sum(one.slots.get("used", 0) for one in facts.tiers if one.name == "nvme")
        text += f" and verified {verified:,} frame{'s' * (verified != 1)}; {on_disk:,} are on disk now"
    return HealthLine("ok", f"{text}.")


def misses_of(
    facts: SidecarStatus, window_sums: Mapping[str, int], reasons: Mapping[str, ReasonText]
) -> list[MissFigures]:
    """Every reason with a token, largest in the window first. reasons: their words."""
    found = []
    for name, tokens in facts.looked.miss_tokens.items():
        own = {"reason": name, "is_fine": name in FINE, "tokens": tokens}
        words = reasons.get(name, NEWER)
        found.append(picked(MissFigures, words, window_tokens=window_sums.get(f"miss.{name}", 0), **own))
    return sorted(found, key=lambda one: (-one.window_tokens, -one.tokens))


def tenants_of(facts: SidecarStatus) -> list[TenantFigures]:
    """Every tenant that has a key or a namespace."""
    told = {one.tenant: one for one in facts.tenants}
    names = list(dict.fromkeys([*told, *(one.tenant for one in facts.namespaces)]))
    found = []
    for name in names[:MOST_LISTED]:
        spaces = [one.looked for one in facts.namespaces if one.tenant == name]
        looked = LookupCounts.summed(spaces)
        found.append(picked(TenantFigures, looked, told.get(name), tenant=name, namespaces=len(spaces)))
    return found


def namespaces_of(facts: SidecarStatus, tenant: str, first: int) -> tuple[list[NamespaceStatus], int]:
    """A page of namespaces, and how many there are. tenant: "" for all."""
    chosen = [one for one in facts.namespaces if tenant in ("", one.tenant)]
    return chosen[first : first + MOST_LISTED], len(chosen) + (0 if tenant else facts.hidden_namespaces)


def whatif_of(facts: SidecarStatus, hour: Mapping[str, int]) -> WhatIfFigures:
    """hour: sums of the counters over the last hour."""
    dram = next((one.budget_bytes for one in facts.tiers if one.name == "dram"), 0)
    asked, hits = hour.get("asked", 0), sum(hour.get(f"hit.{tier}", 0) for tier in (HitTier.DRAM, HitTier.NVME))
    own = hits / asked if asked else None
    told = facts.whatif
    if told is None or not told.asked_tokens:
        return WhatIfFigures(told, dram, own, [])
    wanted: list[tuple[str, int | None]] = [
        (_times(one.scale), one.size_bytes) for one in told.points if one.scale is not None
    ]
    wanted += [(words, told.budget_bytes + more) for words, more in MORE]
    wanted.sort(key=lambda one: one[1] or 0)
    wanted.append(("all that was ever asked for kept", None))
    today = rate_at(told, told.budget_bytes)
    a_day = told.tokens_per_second * 86_400
    sizes = [
        OtherSize(words, size, rate, round((rate - today) * a_day))
        for words, size in wanted
        for rate in [rate_at(told, size)]
    ]
    return WhatIfFigures(told, dram, own, sizes)


def rate_at(told: WhatIfStatus, size_bytes: int | None) -> float:
    """The share of tokens that a size would find, interpolated linearly. size_bytes: None for the ceiling."""
    ceiling = told.points[-1].token_hit_rate
    if size_bytes is None:
        return ceiling
    before_size, before = 0, 0.0
    for one in sorted((*told.curve, *told.points[:-1]), key=lambda one: one.size_bytes or 0):
        size = one.size_bytes or 0
        if size >= size_bytes:
            part = (size_bytes - before_size) / (size - before_size) if size > before_size else 1.0
            return before + part * (one.token_hit_rate - before)
        before_size, before = size, one.token_hit_rate
    return ceiling


def _times(scale: float) -> str:
    return "what there is" if scale == 1 else "half of it" if scale == 0.5 else f"{scale:g} times as much"


def span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
