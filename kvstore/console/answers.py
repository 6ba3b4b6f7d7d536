"""What people ask first, each answered in one sentence with a figure and a page where more stands: what does the store
save, why is there a miss, what to do next. Whether all is well is `kvstore.console.figures.health_of`. Pure; what
engines and tenants named is cut here, and escaped where it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from kvstore.block.account import HitTier, MissReason
from kvstore.config import format_size
from kvstore.console.events import ConsoleEvent
from kvstore.console.figures import Answers, Contact, HealthLine, health_of, integrity_of, rate_at, reading_of, span
from kvstore.console.reasons import FINE, ReasonText
from kvstore.status.tree import SidecarStatus
from tiering.faults import FaultKind

FIRST_TIME = (MissReason.ABSENT, MissReason.DIVERGED)
"""Of prompts that are new: whether they can be avoided is for their author to say."""
ENGINES_OWN = frozenset({MissReason.OTHER_NAMESPACE, MissReason.NO_STATE, MissReason.UNSUPPORTED})
ENGINES_OWN |= {MissReason.NONFINITE, MissReason.OUT_OF_RANGE}
"""What a tenant can mend itself; the rest is the operator's."""
LEAST_SHARE, LEAST_POINTS = 0.01, 0.005
"""Of requested tokens: below these nothing is to be done."""
SCALES = (2, 4, 8)
MOST_TEXT = 240
"""Characters of what a client, an engine or the machine said."""
OFTEN, OFTEN_SECONDS = 3, 1800.0
SPEAK = "the adapters of vLLM and transformers report it after about eight prompts"
FAULTS = {
    FaultKind.DISK_FAULT: "Replace the disk below the data directory: it returns errors",
    FaultKind.DISK_HANGS: "Look at the disk below the data directory: it does not answer",
    FaultKind.FILES_GONE: "Restart the sidecar: files of its data directory were removed",
    FaultKind.NO_DESCRIPTORS: "Raise the sidecar's limit of open files (LimitNOFILE)",
    FaultKind.NO_MEMORY: "Free memory on this host, or lower store.dram",
    FaultKind.NO_THREADS: "Raise the sidecar's limit of threads (TasksMax)",
}


class Miss(NamedTuple):
    """The reason, and its tokens."""

    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Period:
    """What was counted, by the console's names of counters. words: when that was; ago: how long that is; query: of
    pages that show it."""

    words: str
    ago: str
    query: str
    sums: Mapping[str, int]

    @property
    def asked(self) -> int:
        return self.sums.get("asked", 0)

    @property
    def hits(self) -> int:
        """Of this store, without what engines had in their own cache."""
        return sum(self._named("hit.").values()) - self.own

    @property
    def own(self) -> int:
        return self.sums.get(f"hit.{HitTier.ENGINE}", 0)

    @property
    def gpu_seconds(self) -> float:
        """Saved, as far as engines reported it; negative where loads took longer than computing."""
        return (self.sums.get("saved_ms", 0) - self.sums.get("regret_ms", 0)) / 1000

    def share(self, tokens: int) -> float:
        return tokens / self.asked if self.asked else 0.0

    def misses(self, reasons: Sequence[str] = ()) -> list[Miss]:
        """Those that are not fine, the largest first; of these reasons alone, or of all but those of new prompts."""
        found = [Miss(name, tokens) for name, tokens in self._named("miss.").items() if tokens > 0 and name not in FINE]
        chosen = [one for one in found if (one.reason in reasons if reasons else one.reason not in FIRST_TIME)]
        return sorted(chosen, key=lambda one: -one.tokens)

    def _named(self, prefix: str) -> dict[str, int]:
        return {name[len(prefix) :]: count for name, count in self.sums.items() if name.startswith(prefix)}


def answers_of(
    now: float,
    contact: Contact,
    facts: SidecarStatus | None,
    reasons: Mapping[str, ReasonText],
    day: Mapping[str, int] | None = None,
    events: Sequence[ConsoleEvent] = (),
    tenant: str | None = None,
) -> Answers:
    """facts: for a tenant's reader only what the tenant may see. day: counters of the last 24 hours, if all of these
    are known. events: the newest first."""
    if facts is None:
        unknown = HealthLine("warning", "What it saves is not known: no sidecar has answered.", "/help")
        why = HealthLine("warning", "Why tokens were missed is not known: no sidecar has answered.", "/help#down")
        todo = "Tell the operator that no sidecar answers this console."
        if tenant is None:
            todo = "Start the sidecar with kvstore serve, or give this console the path of its socket with --socket."
        return Answers(unknown, why, HealthLine("error", todo, "/help#down"))
    began = span(max(0.0, now - facts.at + facts.up_seconds))
    period = Period("since the sidecar began", f" {began} ago", "", reading_of(facts).counters)
    if day is not None:
        period = Period("in the last 24 hours", "", "?window=24h", day)
    found = Answers(
        _saved(facts, period, tenant), _missed(period), _next(now, contact, facts, period, reasons, events, tenant)
    )
    if contact.connected:
        return found
    ago = f"Until the sidecar stopped answering {span(max(0.0, now - contact.since))} ago: "
    saved, missed = (HealthLine("warning", ago + _inner(one.text), one.page) for one in (found.saved, found.missed))
    return Answers(saved, missed, found.next)


def _saved(facts: SidecarStatus, period: Period, tenant: str | None) -> HealthLine:
    when = period.words + period.ago
    if not period.asked:
        page = "/engines" if tenant is None else "/tenants"
        return HealthLine("ok", f"Saved nothing yet: no engine has requested a token {when}.", page)
    of_prefill = f"{_percent(period.hits, period.asked - period.own)} of prefill"
    if tenant is not None:
        tokens = f"{period.hits:,} of {period.asked - period.own:,} tokens"
        return HealthLine("ok", f"Saved {of_prefill} {when}, {tokens}.", "/prefixes")
    told = facts.savings
    if told is None and not period.hits:
        text = f"Saved nothing {when}: none of {period.asked:,} requested tokens came from this store."
        return HealthLine("ok", text, f"/misses{period.query}")
    if told is None:
        text = f"Saved {of_prefill} {when}; GPU time is unknown: {SPEAK}."
        return HealthLine("ok", text, "/prefixes")
    net, who = period.gpu_seconds, f"({told.engines:,} engine{'s' * (told.engines != 1)})"
    if net < 0:
        text = f"Loads took {_gpu_time(-net)} longer than prefill would have {when} {who}."
        return HealthLine("warning", text, "/help#slower-than-computing")
    return HealthLine("ok", f"Saved {_gpu_time(net)} {when}, {of_prefill} {who}.", "/prefixes")


def _missed(period: Period) -> HealthLine:
    if not period.asked:
        return HealthLine("ok", "No miss: no token was requested.", "/misses")

    def line(level: str, before: str, one: Miss, after: str = "") -> HealthLine:
        share = f"{_percent(one.tokens, period.asked)} of {period.asked:,} tokens"
        text = f"{before}: {_word(one.reason)}, {share} requested {period.words}{after}."
        return HealthLine(level, text, f"/misses{period.query}#{quote(one.reason[:64])}")

    avoidable, new = period.misses(), period.misses(FIRST_TIME)
    if avoidable and period.share(avoidable[0].tokens) >= LEAST_SHARE:
        return line("warning", "Largest avoidable miss", avoidable[0])
    if new:
        return line("ok", "Largest miss", new[0], ": new prompts; no avoidable miss reaches 1 %")
    if avoidable:
        return line("ok", "Largest avoidable miss", avoidable[0])
    return HealthLine("ok", f"No avoidable miss {period.words}.", f"/misses{period.query}")


def _next(
    now: float,
    contact: Contact,
    facts: SidecarStatus,
    period: Period,
    reasons: Mapping[str, ReasonText],
    events: Sequence[ConsoleEvent],
    tenant: str | None,
) -> HealthLine:
    """One recommendation: what serves nothing, or less than it could, comes before what could be saved."""
    if tenant is None:
        found = _fault(now, contact, facts, events) or _engine_away(facts, period, events)
        if found is None and period.gpu_seconds < 0:
            text = "Look for a slow disk or a busy host; engines' cost_model declines slow loads once it has learned."
            found = HealthLine("warning", text, "/help#slower-than-computing")
        if found is not None or (found := _more_room(facts, period)) is not None:
            return found
    elif not contact.connected:
        todo = "Tell the operator that the sidecar does not answer; engines compute every prompt until it does."
        return HealthLine("error", todo, "/help#down")
    top = next((one for one in period.misses() if period.share(one.tokens) >= LEAST_SHARE), None)
    if top is not None and top.reason not in reasons:
        text = f"Update this console: it does not know the reason {_word(top.reason)} of a newer sidecar."
        return HealthLine("warning", text, "/misses")
    if top is not None:
        remedy, who = reasons[top.reason].remedy, f"For {_word(top.reason)}: "
        if tenant is not None and top.reason not in ENGINES_OWN:
            who = f"Ask the operator, for {_word(top.reason)}: "
        return HealthLine("warning", who + _inner(remedy), f"/help#{top.reason}")
    if not period.asked:
        return HealthLine("ok", "Nothing to do until an engine requests a token.", "/help")
    if sum(period.share(one.tokens) for one in period.misses(FIRST_TIME)) >= 0.5:
        text = "Nothing to do here; kvstore lint shows whether new prompts differ earlier than they need."
        return HealthLine("ok", text, "/help#absent")
    return HealthLine("ok", "Nothing to do: no avoidable miss reaches 1 % of requested tokens.", "/misses")


def _fault(now: float, contact: Contact, facts: SidecarStatus, events: Sequence[ConsoleEvent]) -> HealthLine | None:
    """What health names, mended."""
    if not contact.connected:
        text = "Run kvstore doctor on its host and restart the sidecar; engines compute every prompt until it answers."
        return HealthLine("error", text, "/help#down")
    if health_of(now, contact, facts).level == "error":
        reported = integrity_of(facts).reported
        what = "memory and disk" if reported else "disk"
        text = f"Test this host's {what}, then run kvstore fsck on the data directory of the stopped sidecar."
        return HealthLine("error", text, "/help#damaged")
    restarts = sum(one.kind == "restart" and one.at > now - OFTEN_SECONDS for one in events)
    if restarts >= OFTEN:
        text = f"Read the sidecar's log: it restarted {restarts} times in half an hour."
        return HealthLine("warning", text, "/help#restarting")
    if facts.state == "stopping":
        return HealthLine("warning", "Start the sidecar again once it has ended.", "/help#stopping")
    for fault in facts.faults:
        if fault.kind == FaultKind.DISK_FULL:
            nvme = next((one for one in facts.tiers if one.name == "nvme"), None)
            left = nvme.budget_bytes - nvme.taken_bytes if nvme is not None else 0
            room = format_size(left).replace(".0 ", " ") if left > 0 else "space"
            return HealthLine("warning", f"Free {room} on the data directory's disk, or lower store.nvme.", "/moves")
        if fault.kind in FAULTS:
            return HealthLine("warning", f"{FAULTS[FaultKind(fault.kind)]}.", "/moves")
    if facts.health.startswith("degraded"):
        why = facts.reasons[0] if facts.reasons else facts.health
        return HealthLine("warning", f"See to what does not work: {_cut(why)}.", "/moves")
    if facts.state == "warming":
        return HealthLine("warning", "Wait until the disk is taken in; hits rise by themselves.", "/help#still-warming")
    if facts.warnings:
        return HealthLine("warning", f"See to a warning: {_cut(facts.warnings[0])}.", "/help#warnings")
    if facts.policy_note:
        return HealthLine("warning", f"Set store.policy again: {_cut(facts.policy_note)}.", "/help#warnings")
    return None


def _engine_away(facts: SidecarStatus, period: Period, events: Sequence[ConsoleEvent]) -> HealthLine | None:
    if facts.sessions or facts.hidden_sessions:
        return None
    if not period.asked:
        text = "Start an engine: kvstore run -- ENGINE COMMAND attaches it to this sidecar."
        return HealthLine("warning", text, "/engines")
    texts = (one.text for one in events if one.kind == "engine" and one.text.endswith(" left."))
    left = next((f"; {_cut(text)}" for text in texts), "")
    return HealthLine("warning", f"Start the engine again: none is attached{left}.", "/engines")


def _more_room(facts: SidecarStatus, period: Period) -> HealthLine | None:
    """More of the lowest tier, where blocks are evicted and the estimate says that they come back."""
    told, tiers = facts.whatif, facts.tiers
    if told is None or not told.asked_tokens or not tiers or not period.sums.get(f"miss.{MissReason.EVICTED}"):
        return None
    today = rate_at(told, told.budget_bytes)
    gains = {scale: rate_at(told, scale * told.budget_bytes) - today for scale in SCALES}
    scale = next((one for one in SCALES if gains[one] >= max(LEAST_POINTS, gains[SCALES[-1]] / 2)), None)
    if scale is None:
        return None
    lowest = tiers[-1]
    size = lowest.budget_bytes + (scale - 1) * told.budget_bytes
    sizes = " to ".join(format_size(one).replace(".0 ", " ") for one in (lowest.budget_bytes, size))
    points = f"hits rise by about {100 * gains[scale]:.1f} points of requested tokens"
    return HealthLine("warning", f"Raise store.{lowest.name} from {sizes}: {points}.", "/#whatif")


def _word(reason: str) -> str:
    return _cut(reason.replace("_", " "))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line.removesuffix(".") if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 1]}\u2026"


def _inner(text: str) -> str:
    """As it stands behind a colon."""
    return text[:1].lower() + text[1:]


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole > 0 else 0.0
    return "less than 0.1 %" if 0 < share < 0.1 else f"{share:.1f} %" if share < 9.95 else f"{share:.0f} %"


def _gpu_time(seconds: float) -> str:
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} GPU {unit}"
    return f"{seconds:.1f} GPU seconds" if seconds < 10 else f"{seconds:.0f} GPU seconds"
