"""What operators' commands print: tables for people, one object for scripts. Must never query a sidecar.

Text from clients is printed unchanged, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.block.account import MissReason
from kvstore.cli.ask import RecordSummary, Warmed
from kvstore.config import format_size
from kvstore.protocol.messages import Counted, WhyReply
from kvstore.protocol.told import LeaseNote, LookupNote, PrefixFigures, RequestRecord
from kvstore.status.tree import LookupCounts, NamespaceStatus, SidecarStatus, SourceStatus, TenantStatus, TierStatus

_SHOWN = 20
"""Rows of a table for people; further ones are only counted."""
_WIDE = 110
"""Terminal columns that fit a namespace's figures in one row."""


@dataclass(frozen=True, slots=True)
class WhyReport:
    """`kvstore why`."""

    reply: WhyReply

    def to_dict(self) -> dict[str, object]:
        return {"requests": [msgspec.to_builtins(one) for one in self.reply.found], "kept": self.reply.kept}

    def render(self, console: Any) -> None:
        """One line per event."""
        for one in self.reply.found:
            of = f" of {one.engine}" if one.engine else ""
            console.print(
                Text(f"{one.request}{of}, tenant {one.tenant}, {one.model or 'no model named'}"), soft_wrap=True
            )
            for line in _timeline(one):
                console.print(Text(f"  {line}"), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """`kvstore prefixes`."""

    figures: PrefixFigures

    def to_dict(self) -> dict[str, object]:
        return _built(self.figures)

    def render(self, console: Any) -> None:
        told = self.figures
        table = Table("prefix", "tenant", "model", box=None)
        for name in ("tokens", "requests/h", "tokens saved/h", "size", "readable"):
            table.add_column(name, justify="right")
        for row in told.hottest[:_SHOWN]:
            rates = (f"{row.requests_per_hour:,.1f}", f"{row.saved_tokens_per_hour:,.0f}")
            words = (f"{row.tokens:,}", *rates, format_size(row.bytes), f"{row.stored_tokens:,}")
            table.add_row(row.id, *(Text(one) for one in (row.tenant, row.model, *words)))
        console.print(table if told.hottest else Text("No prefix that was found stands out."))
        console.print(Text(f"{told.sampled:,} of {told.lookups:,} look-ups, of about the last hour"))


def _timeline(record: RequestRecord) -> Iterator[str]:
    if record.purged_at is not None:
        yield f"{_moment(record.purged_at)}  its tenant was purged: what was stored before is gone"
    notes: list[LookupNote | LeaseNote] = [*record.looked, *record.leases]
    for one in sorted(notes, key=lambda note: note.at):
        tiers = ", ".join(f"{tier} {count:,}" for tier, count in one.tiers.items() if count)
        is_lease = isinstance(one, LeaseNote)
        words = f"{'leased' if is_lease else 'looked up: found'} {one.blocks:,} of {one.wanted:,} blocks"
        words += f" from block {one.first_block:,} on" if isinstance(one, LeaseNote) else ""
        words += f" ({tiers})" if tiers else ""
        words += f" in {1000 * one.seconds:,.1f} ms"
        if one.reason:
            words += f"; the others: {one.reason}" + (f" ({one.detail})" if one.detail else "")
        yield f"{_moment(one.at)}  {words}"
        if one.reason == MissReason.EVICTED:
            yield f"    {_gone(one)}"
    if not notes:
        yield "nothing was looked up or leased for it, or it was forgotten"
    if record.reported:
        yield f"{_count(record.reported, 'block')} failed its check when it was read, and was not used"
    told = record.told
    if told is None or record.told_at is None:
        yield "its engine has not told what became of it"
        return
    hits = ", ".join(f"{name} {count:,}" for name, count in told.hits.items() if count) or "none"
    misses = ", ".join(f"{name} {count:,}" for name, count in told.misses.items() if count) or "none"
    yield f"{_moment(record.told_at)}  its engine: {told.asked:,} tokens; hits: {hits}; misses: {misses}"
    if told.detail:
        yield f"    {told.detail}"
    if told.load_ms:
        yield f"    it waited {told.load_ms:,.1f} ms for its load"
    if told.saved_blocks or told.put_reasons:
        refused = ", ".join(f"{name} {count:,}" for name, count in told.put_reasons.items())
        yield f"    saved {_count(told.saved_blocks, 'block')}" + (f"; not all: {refused}" if refused else "")


def _gone(note: LookupNote | LeaseNote) -> str:
    """How the first missing block went."""
    if note.gone is None:
        return "when and why the first of them went is not known any more"
    gone = note.gone
    why = {
        "room": f"from {gone.tier}, for room",
        "declined": "from dram, for room; nvme was not to have it (store.nvme_writes)",
        "ttl": f"from {gone.tier}, for room: its ttl was over, or more was to be kept than may be",
        "drop": "as its namespace was dropped",
    }.get(gone.cause, gone.cause)
    return f"the first of them went {_span(max(0.0, note.at - gone.at))} before, at {_moment(gone.at)[:8]}, {why}"


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%H:%M:%S}.{int(1000 * at) % 1000:03}"


@dataclass(frozen=True, slots=True)
class StatReport:
    """`kvstore stat`."""

    facts: SidecarStatus

    def to_dict(self) -> dict[str, object]:
        return _built(self.facts)

    def render(self, console: Any) -> None:
        console.print(self.group())

    def group(self) -> Group:
        """As `render`, for redrawing."""
        return Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        facts = self.facts
        state = f"{facts.state}, up {_span(facts.up_seconds)}, pid {facts.pid}, run {facts.run[:8]}"
        yield Text(f"{state}: {_count(facts.blocks, 'block')}, {_count(facts.leases, 'lease')}")
        if facts.health:
            yield Text(f"health: {facts.health}")
        for fault in facts.faults:
            yield Text(f"  {fault.what}: {fault.detail}")
        for warning in facts.warnings:
            yield Text(f"warning: {warning}")
        if facts.node:
            yield Text(f"node {facts.node}, incarnation {facts.incarnation}")
        for keys in facts.keys:
            also = f", accepted {', '.join(map(str, keys.accepted))}" if len(keys.accepted) > 1 else ""
            yield Text(f"keys of {keys.tenant}: {keys.fingerprint}, epoch {keys.epoch}{also}")
        if facts.fault_counts:
            counts = (f"{name.replace('_', ' ')} {count:,}" for name, count in facts.fault_counts.items())
            yield Text(f"faults since the start: {', '.join(counts)}")
        if facts.state == "warming" and facts.loading is not None:
            one = facts.loading
            line = f"loading: {one.slots:,} of {one.all_slots:,} slots, {one.blocks:,} blocks found"
            if one.to_verify_bytes:
                line += f", verified {format_size(one.verified_bytes)} of {format_size(one.to_verify_bytes)}"
            yield Text(line)
        yield _table(
            "tier|*budget|*taken|*used|*free|*reserved|*deleting|*quarantined|*zombie",
            [_tier_row(one) for one in facts.tiers],
        )
        yield from _looked_parts(facts.looked)
        pinned = f"pinned: {format_size(facts.pinned_bytes)} by {_count(facts.leases, 'lease')}"
        yield Text(f"{pinned}, {_count(facts.reservations, 'reservation')} under way")
        if facts.guarded_bytes:
            yield Text(
                f"guarded: {format_size(facts.guarded_bytes)} that clients of an earlier run still map; not used again "
                "before they let go"
            )
        yield from self._chosen_parts()
        if len(facts.tenants) > 1 or any(one.share is not None for one in facts.tenants):
            head = "tenant|*share|*weight|*dram|*guaranteed|*nvme|*guaranteed"
            yield _table(head, [_tenant_row(one) for one in facts.tenants])
        kept = [_kept_row(one) for one in facts.tenants if one.dram_retained_budget_bytes is not None]
        if kept:
            yield _table("kept for a time|*dram|*at most|*nvme|*at most", kept)
        if facts.namespaces:
            yield namespace_table(facts.namespaces, facts.at)
        if facts.hidden_namespaces:
            yield Text(f"and {facts.hidden_namespaces:,} more namespaces")
        if facts.moves:
            yield _table("moves|priority|*waiting|*running|*done|*failed", map(astuple, facts.moves))
        yield from self._session_parts()
        door = facts.door
        yield Text(
            f"door: {_count(door.connections, 'connection')}, {door.refused:,} refused, {door.malformed:,} malformed "
            f"messages, {sum(door.served.values()):,} requests; waited p50 {_ms(door.wait_ms_p50)}, "
            f"p99 {_ms(door.wait_ms_p99)}"
        )
        if facts.awaits.parked or any(facts.awaits.ended.values()):
            ended = ", ".join(f"{why} {count:,}" for why, count in facts.awaits.ended.items() if count)
            yield Text(f"awaits: {facts.awaits.parked:,} parked; over: {ended or 'none'}")
        yield from self._elsewhere_parts()
        if facts.counters:
            events = (f"{name.replace('_', ' ')} {count:,}" for name, count in sorted(facts.counters.items()))
            yield Text(f"events: {', '.join(events)}")
        scrub = facts.scrub
        if scrub is not None:
            doing = "in a pass" if scrub.in_pass else "waiting"
            yield Text(
                f"scrub: {doing}, {_count(scrub.passes, 'pass', 'passes')} done, {format_size(scrub.bytes)} verified, "
                f"{scrub.damaged:,} damaged, {scrub.unreadable:,} unreadable, {scrub.mended:,} mended"
            )

    def _chosen_parts(self) -> Iterator[RenderableType]:
        """The policy and its admission."""
        facts = self.facts
        if not facts.policy:  # another version's sidecar
            return
        words = f"policy: {facts.policy}"
        if facts.policy_note:
            words += f" ({facts.policy_note})"
        if facts.nvme_writes is not None:
            words += f"; nvme_writes: {facts.nvme_writes}"
            words += f", {_count(facts.counters.get('declined_blocks', 0), 'block')} declined"
        budget = facts.write_budget
        if budget is not None:
            left = f"{format_size(budget.left_bytes)} of at most {format_size(budget.most_bytes)}"
            words += f", {left} left to write, {format_size(budget.bytes_per_second)}/s more"
        yield Text(words)
        words = f"kept for a time: {format_size(facts.dram_retained_bytes)} of at most "
        words += f"{format_size(facts.dram_retained_budget_bytes)} of dram"
        if facts.nvme_retained_bytes is not None and facts.nvme_retained_budget_bytes is not None:
            words += f", {format_size(facts.nvme_retained_bytes)} of at most "
            words += f"{format_size(facts.nvme_retained_budget_bytes)} of nvme"
        yield Text(f"{words} (retained_fraction {facts.retained_fraction:g})")

    def _elsewhere_parts(self) -> Iterator[RenderableType]:
        """What couriers fetched."""
        one = self.facts.elsewhere
        if one is None:
            return
        came = ", ".join(f"{tier} {count:,}" for tier, count in one.adopted.items())
        words = f"elsewhere: {_count(one.couriers, 'courier connection')}; blocks adopted: {came}"
        words += f"; fetching {one.fetching:,}"
        words += f", {format_size(one.kept_bytes)} kept for who waits for them"
        if one.gave_way:
            words += f", {one.gave_way:,} gave way to others"
        refused = ", ".join(f"{why} {count:,}" for why, count in one.refused.items() if count)
        yield Text(words + (f"; refused: {refused}" if refused else ""))
        if one.sources:
            head = "elsewhere|name|state|*blocks in|*out|*unwritten|*bytes in|*out|*found|*of|*late|*failures|*GB/s"
            head += "|*p99 ms|*hints"
            yield _table(head, [_source_row(source) for source in one.sources])

    def _session_parts(self) -> Iterator[RenderableType]:
        facts = self.facts
        rows = [
            (
                one.engine or "-",
                one.tenant or "-",
                one.connections,
                one.leases,
                one.leased_blocks,
                one.reservations,
                f"{_span(facts.at - one.since)} ago",
            )
            for one in facts.sessions
        ]
        if rows:
            yield _table("engine|tenant|*connections|*leases|*leased blocks|*reservations|since", rows)
        if facts.hidden_sessions:
            yield Text(f"and {facts.hidden_sessions:,} more sessions")
        if facts.departed:
            yield Text(f"{_count(facts.departed, 'connection')} gone that may still map memory")


def _source_row(one: SourceStatus) -> tuple[object, ...]:
    counts = one.blocks_in, one.blocks_out, one.unwritten, format_size(one.bytes_in), format_size(one.bytes_out)
    speed = f"{one.gbps:.2f}" if one.gbps else "-", f"{one.p99_ms:.1f}" if one.p99_ms else "-"
    state = f"{one.state} ({one.detail})" if one.detail else one.state
    tried = one.found, one.lookups, one.late, one.failures
    return one.kind, one.name, state, *counts, *tried, *speed, one.hints


@dataclass(frozen=True, slots=True)
class NamespacesReport:
    """`kvstore namespaces`."""

    facts: SidecarStatus

    def to_dict(self) -> dict[str, object]:
        return {"state": self.facts.state, "namespaces": msgspec.to_builtins(self.facts.namespaces)}

    def render(self, console: Any) -> None:
        if self.facts.namespaces:
            console.print(namespace_table(self.facts.namespaces, self.facts.at, len(self.facts.namespaces)))
            for one in self.facts.namespaces:
                epoch = f", weights epoch {one.weights_epoch}" if one.weights_epoch else ""
                model = f"{one.name} ({one.model}); " if one.name else ""
                console.print(Text(f"{one.id}: {model}{one.layout}{epoch}"), soft_wrap=True)
        else:
            console.print(Text("No namespaces."))
        if self.facts.hidden_namespaces:
            console.print(Text(f"and {self.facts.hidden_namespaces:,} more"))
        if self.facts.state == "warming":
            console.print(Text("What is on disk is still being taken in: there may be more."))


@dataclass(frozen=True, slots=True)
class GoneReport:
    """`kvstore drop` and `kvstore purge`. what: a sentence about what is gone; name, value: its JSON field. gone: how
    much that was, and what other nodes may still have."""

    what: str
    name: str
    value: str
    gone: Counted

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        found: dict[str, object] = {self.name: self.value, "blocks": self.gone.blocks, "elsewhere": self.gone.elsewhere}
        nodes = [{"node": node, "address": address} for node, address in self.gone.not_reached]
        return found | {"not_reached": nodes}

    def render(self, console: Any) -> None:
        console.print(Text(f"{self.what}; it had {_count(self.gone.blocks, 'readable block')}"), soft_wrap=True)
        if self.gone.elsewhere:
            console.print(Text(f"elsewhere: {self.gone.elsewhere}"), soft_wrap=True)
        for node, address in self.gone.not_reached:
            console.print(Text(f"not reached: {node or 'unknown node'} at {address}"), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class RecordReport:
    """`kvstore record`."""

    recorded: RecordSummary

    def to_dict(self) -> dict[str, object]:
        return asdict(self.recorded)

    def render(self, console: Any) -> None:
        one = self.recorded
        if not one.requests:
            nothing = f"nothing was looked up in {_span(one.seconds)}: there is no {one.file}"
            console.print(Text(nothing), soft_wrap=True)
            return
        words = f"{_count(one.requests, 'request')}, {_count(one.blocks, 'block')} of {one.block_tokens} tokens"
        done = f"{one.file}: {words}, in {_span(one.seconds)}; kvstore replay reads it."
        console.print(Text(done), soft_wrap=True)
        if one.lost:
            console.print(Text(f"{_count(one.lost, 'request')} more came too fast to be written, and are not in it."))


@dataclass(frozen=True, slots=True)
class WarmReport:
    """`kvstore warm`."""

    warmed: Warmed

    def to_dict(self) -> dict[str, object]:
        return asdict(self.warmed)

    def render(self, console: Any) -> None:
        one = self.warmed
        rows: list[tuple[object, ...]] = [("warm already", one.warm), ("promoted", one.promoted)]
        rows += [(f"not promoted: {reason}", count) for reason, count in one.left.items()]
        rows += [(f"not there: {reason}", count) for reason, count in one.absent.items()]
        console.print(Text(f"{_count(one.prompts, 'prompt')}, {_count(one.asked, 'block')}, {one.seconds:.1f} s"))
        console.print(_table("|*blocks", rows))


@dataclass(frozen=True, slots=True)
class _ByWidth:
    """One table on a wide terminal, else two, so that no figure and no id is cut."""

    wide: Table
    narrow: Sequence[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from (self.wide,) if options.max_width >= _WIDE else self.narrow


def namespace_table(namespaces: Sequence[NamespaceStatus], now: float, most: int = _SHOWN) -> RenderableType:
    """A row for each; if there are too many, those with the most blocks."""
    shown = namespaces
    if len(namespaces) > most:
        shown = sorted(namespaces, key=lambda one: -one.blocks)[:most]
    rows: list[tuple[object, ...]] = [
        (
            one.id,
            one.tenant,
            one.name or one.model,
            one.codec,
            one.blocks,
            *_held(one.dram_blocks, one.dram_bytes),
            *_held(one.nvme_blocks, one.nvme_bytes),
            _percent(one.looked.hit_rate),
            f"{_span(now - one.used_at)} ago" if one.used_at is not None else "-",
        )
        for one in shown
    ]
    if len(namespaces) > most:
        rows.append((f"and {len(namespaces) - most} more", *[""] * 10))
    names = "namespace|~tenant|~model|codec|*blocks|*dram|*bytes|*nvme|*bytes|*hit rate|used".split("|")

    def cut(columns: Sequence[int]) -> Table:
        return _table("|".join(names[at] for at in columns), [[row[at] for at in columns] for row in rows])

    return _ByWidth(cut(range(len(names))), (cut((0, 1, 2, 3, 10)), cut((0, 4, 5, 6, 7, 8, 9))))


def _looked_parts(looked: LookupCounts) -> Iterator[RenderableType]:
    rate = f"{looked.granted_tokens:,} of {looked.asked_tokens:,} tokens ({_percent(looked.hit_rate)})"
    yield Text(f"hit rate: {rate}; {_count(looked.lookups, 'look-up')}, {_count(looked.leases, 'lease')}")
    rows: list[tuple[object, ...]] = []
    for what, tokens, blocks in (
        ("hit", looked.hit_tokens, looked.hit_blocks),
        ("miss", looked.miss_tokens, looked.miss_blocks),
    ):
        for origin in sorted(tokens, key=lambda one: -tokens[one]):
            rows.append((f"{what}: {origin}", tokens[origin], blocks[origin], _share(tokens[origin], looked)))
    if looked.found_blocks:
        rows.append(
            ("found, not leased", looked.found_tokens, looked.found_blocks, _share(looked.found_tokens, looked))
        )
    if rows:
        yield _table("asked for|*tokens|*blocks|*share", rows)


def _tier_row(one: TierStatus) -> tuple[object, ...]:
    order = ("used", "free", "reserved", "deleting", "quarantined", "zombie")
    return (
        one.name,
        format_size(one.budget_bytes),
        format_size(one.taken_bytes),
        *(one.slots.get(at, 0) for at in order),
    )


def _tenant_row(one: TenantStatus) -> tuple[object, ...]:
    sizes = (one.dram_bytes, one.dram_guaranteed_bytes, one.nvme_bytes, one.nvme_guaranteed_bytes)
    return (
        one.tenant,
        "-" if one.share is None else f"{one.share:g}",
        "-" if one.weight is None else f"{one.weight:g}",
        *("-" if size is None else format_size(size) for size in sizes),
    )


def _kept_row(one: TenantStatus) -> tuple[object, ...]:
    sizes = (
        one.dram_retained_bytes,
        one.dram_retained_budget_bytes,
        one.nvme_retained_bytes,
        one.nvme_retained_budget_bytes,
    )
    return (one.tenant, *("-" if size is None else format_size(size) for size in sizes))


def _built(told: msgspec.Struct) -> dict[str, object]:
    found: dict[str, object] = msgspec.to_builtins(told)
    return found


def _table(head: str, rows: Iterable[Sequence[object]]) -> Table:
    """head: column names; * aligns right, ~ may be cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title_justify="left")
    for name in head.split("|"):
        justify: Literal["right", "left"] = "right" if name.startswith("*") else "left"
        table.add_column(name.lstrip("*~"), justify=justify, no_wrap=not name.startswith("~"))
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row)
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
    return table


def _held(blocks: int | None, size_bytes: int | None) -> tuple[object, object]:
    return ("-", "-") if blocks is None or size_bytes is None else (blocks, format_size(size_bytes))


def _share(tokens: int, looked: LookupCounts) -> str:
    return _percent(tokens / looked.asked_tokens if looked.asked_tokens else None)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.2f} ms"


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def _span(seconds: float) -> str:
    """For people: "3 h 12 min"."""
    seconds = max(0, round(seconds))
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // below} {small}"
    return f"{seconds} s"
