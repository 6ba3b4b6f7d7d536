"""Derives events from two successive readings of the sidecar. Pure: it compares, and knows no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from kvstore.status.tree import SessionStatus, SidecarStatus

MOST_EACH = 20
"""Events of one kind per reading; one more event counts the rest."""


class ConsoleEvent(msgspec.Struct, frozen=True):
    """at: Unix time. level: "info", "warning" or "error". page: where the numbers are. text: one sentence."""

    at: float
    level: str
    kind: str
    text: str
    page: str = "/"


def events_between(before: SidecarStatus | None, after: SidecarStatus) -> list[ConsoleEvent]:
    """Events in order of display. before: None at the first reading."""
    at = after.at
    if before is None:
        text = f"The console sees the sidecar: {after.state}, {_plural(after.blocks, 'block')}, {_up(after)}."
        return [ConsoleEvent(at, "info", "contact", text)]
    if before.run != after.run:
        text = f"The sidecar began again (run {after.run[:8]}, {after.state}); its counts begin at 0."
        return [ConsoleEvent(at - after.up_seconds, "warning", "restart", text)]
    return [
        *_of_the_state(before, after),
        *_of_integrity(before, after),
        *_of_engines(before, after),
        *_of_the_door(before, after),
    ]


def _of_the_state(before: SidecarStatus, after: SidecarStatus) -> Iterator[ConsoleEvent]:
    at = after.at
    if before.state != after.state:
        level = "info" if after.state in ("ready", "stopping") else "warning"
        yield ConsoleEvent(at, level, "state", f"The sidecar is {after.state}; it was {before.state}.")
    was, now = ({one.what: one for one in facts.faults} for facts in (before, after))
    for what in list(now.keys() - was.keys())[:MOST_EACH]:
        yield ConsoleEvent(at, "error", "fault", f"{what} fails: {now[what].detail}.", "/moves")
    for what in list(was.keys() - now.keys())[:MOST_EACH]:
        yield ConsoleEvent(at, "info", "fault", f"{what} works again.", "/moves")
    names, earlier = ({one.tenant for one in facts.tenants} for facts in (after, before))
    for name in sorted(names - earlier)[:MOST_EACH]:
        yield ConsoleEvent(at, "info", "tenant", f"Tenant {name} has a key now.", "/tenants")
    for name in sorted(earlier - names)[:MOST_EACH]:
        yield ConsoleEvent(at, "warning", "tenant", f"Tenant {name} was purged.", "/tenants")


def _of_integrity(before: SidecarStatus, after: SidecarStatus) -> Iterator[ConsoleEvent]:
    at = after.at
    reports = after.looked.reports - before.looked.reports
    if reports > 0:
        text = f"Readers reported {_plural(reports, 'block')} that failed a check; nothing of them was used."
        yield ConsoleEvent(at, "error", "corrupt", text)
    quarantined = [sum(one.slots.get("quarantined", 0) for one in facts.tiers) for facts in (before, after)]
    if quarantined[1] > quarantined[0]:
        text = f"{_plural(quarantined[1] - quarantined[0], 'slot')} quarantined: no frame is stored there again."
        yield ConsoleEvent(at, "error", "quarantine", text)
    if before.scrub is not None and after.scrub is not None:
        damaged = after.scrub.damaged - before.scrub.damaged
        if damaged > 0:
            text = f"The scrub found {_plural(damaged, 'damaged frame')} on disk."
            yield ConsoleEvent(at, "error", "scrub", text, "/moves")
        if after.scrub.passes > before.scrub.passes:
            text = f"A scrub pass over the disk has ended; {after.scrub.damaged:,} frames were damaged since the start."
            yield ConsoleEvent(at, "info", "scrub", text, "/moves")


def _of_engines(before: SidecarStatus, after: SidecarStatus) -> Iterator[ConsoleEvent]:
    was, now = Counter(map(_name, before.sessions)), Counter(map(_name, after.sessions))
    for word, names in (("attached", now - was), ("left", was - now)):
        for engine, tenant, _ in list(names)[:MOST_EACH]:
            yield ConsoleEvent(after.at, "info", "engine", f"{engine or 'An engine'} of {tenant} {word}.", "/engines")
        if len(names) > MOST_EACH:
            text = f"And {len(names) - MOST_EACH:,} more engines {word}."
            yield ConsoleEvent(after.at, "info", "engine", text, "/engines")


def _of_the_door(before: SidecarStatus, after: SidecarStatus) -> Iterator[ConsoleEvent]:
    refused = after.door.refused - before.door.refused
    if refused > 0:
        text = f"{_plural(refused, 'connection')} turned away: a limit, or a user who may not come in."
        yield ConsoleEvent(after.at, "warning", "refused", text, "/engines")
    malformed = after.door.malformed - before.door.malformed
    if malformed > 0:
        text = f"{_plural(malformed, 'message')} that could not be read; each ended its connection."
        yield ConsoleEvent(after.at, "warning", "malformed", text, "/engines")
    lapsed = after.counters.get("lapsed_leases", 0) - before.counters.get("lapsed_leases", 0)
    if lapsed > 0:
        text = f"{_plural(lapsed, 'lease')} ran out before the engine gave them back."
        yield ConsoleEvent(after.at, "warning", "lapsed", text, "/engines")


def _name(one: SessionStatus) -> tuple[str, str, float]:
    return one.engine, one.tenant or "a tenant that is gone", one.since


def _up(facts: SidecarStatus) -> str:
    return f"up {facts.up_seconds:,.0f} s, run {facts.run[:8]}"


def _plural(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"
