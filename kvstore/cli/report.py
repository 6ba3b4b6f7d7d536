"""What operators' commands print: tables for people, one object for scripts. Must never query a sidecar.

Text from clients is printed unchanged, never as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import structs
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.block.account import MissReason
from kvstore.cli.terminal import Shown
from kvstore.config import format_size
from kvstore.protocol.messages import Counted, WhyReply
from kvstore.protocol.told import PrefixFigures, RequestRecord, StoreNote
from kvstore.status.tree import LookupCounts, NamespaceStatus, SidecarStatus

_SHOWN = 20
"""Rows of a table for people; further ones are only counted."""
_WIDE = 110
"""Terminal columns that fit a namespace's figures in one row."""


def why_report(reply: WhyReply) -> Shown:
    """A line for each event."""
    lines = []
    for one in reply.found:
        of = f" of {one.engine}" if one.engine else ""
        lines.append(f"{one.request}{of}, tenant {one.tenant}, {one.model or 'no model named'}")
        lines += [f"  {line}" for line in _timeline(one)]
    return Shown({"requests": [msgspec.to_builtins(one) for one in reply.found], "kept": reply.kept}, lines)


def prefix_report(told: PrefixFigures) -> Shown:
    table = Table("prefix", "tenant", "model", box=None)
    for name in ("tokens", "requests/h", "tokens saved/h", "size", "readable"):
        table.add_column(name, justify="right")
    for row in told.hottest[:_SHOWN]:
        rates = (f"{row.requests_per_hour:,.1f}", f"{row.saved_tokens_per_hour:,.0f}")
        words = (f"{row.tokens:,}", *rates, format_size(row.bytes), f"{row.stored_tokens:,}")
        table.add_row(row.id, *(Text(one) for one in (row.tenant, row.model, *words)))
    hottest = table if told.hottest else "No prefix that was found stands out."
    last = f"{told.sampled:,} of {told.lookups:,} look-ups, of about the last hour"
    return Shown(msgspec.to_builtins(told), [hottest, last])


def _timeline(record: RequestRecord) -> Iterator[str]:
    if record.purged_at is not None:
        yield f"{_moment(record.purged_at)}  its tenant was purged: what was stored before is gone"
    notes = [*record.looked, *record.leases]
    for one in sorted(notes, key=lambda note: note.at):
        tiers = ", ".join(f"{tier} {count:,}" for tier, count in one.tiers.items() if count)
        words = f"{'looked up: found' if one.first_block is None else 'leased'} {one.blocks:,} of {one.wanted:,} blocks"
        words += f" from block {one.first_block:,} on" if one.first_block is not None else ""
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


def _gone(note: StoreNote) -> str:
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


def stat_report(facts: SidecarStatus) -> Shown:
    return Shown(msgspec.to_builtins(facts), _stat_parts(facts))


def _stat_parts(facts: SidecarStatus) -> Iterator[RenderableType]:
    """The lines that people look for first, and below them each field that has something to tell."""
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
    yield from _looked_parts(facts.looked)
    if facts.policy:  # else it is another version's sidecar
        note = f" ({facts.policy_note})" if facts.policy_note else ""
        writes = f"; nvme_writes: {facts.nvme_writes}" if facts.nvme_writes is not None else ""
        yield Text(f"policy: {facts.policy}{note}{writes}")
    if facts.namespaces:
        yield namespace_table(facts.namespaces, facts.at)
    for name in facts.__struct_fields__:
        if name not in _SAID:
            yield from _field(name, getattr(facts, name), facts.at)


_SAID = frozenset(
    "run pid state at up_seconds blocks health faults warnings node incarnation looked policy policy_note nvme_writes "
    "namespaces version whatif served".split()
)
"""Fields of a status that have lines of their own, that the console draws, or that are metrics alone."""
_NOTHING, _MOST_COLUMNS = ("", "-", "0", "0 B", "0.00 ms", "no"), 8
_INSTANTS = ("since", "used_at", "last_pass_ended")


def _field(name: str, value: Any, now: float) -> Iterator[RenderableType]:
    """A status's field, as a line or a table. What is None, 0 or empty has none; nor have histograms."""
    heading = _heading(name)
    if isinstance(value, list):
        rows = [_words_of(one, now) for one in value if not isinstance(one, str | tuple)]
        heads = [head for head in dict.fromkeys(head for row in rows for head in row) if any(map(_tells(head), rows))]
        if heads:
            yield Text(f"{heading}:")
        if len(heads) <= _MOST_COLUMNS:
            right = {head for head in heads if all(row.get(head, "-")[:1] in "-0123456789" for row in rows)}
            words = "|".join(f"*{head}" if head in right else head for head in heads)
            yield from [_table(words, [[row.get(head, "-") for head in heads] for row in rows[:_SHOWN]])] * bool(heads)
        else:
            yield from (Text(f"  {_told(row)}") for row in rows[:_SHOWN])
        if len(rows) > _SHOWN:
            yield Text(f"and {len(rows) - _SHOWN:,} more")
    elif isinstance(value, dict | msgspec.Struct) or is_dataclass(value):
        if told := _told(_words_of(value, now)):
            yield Text(f"{heading}: {told}")
        for inner in value.__struct_fields__ if isinstance(value, msgspec.Struct) else ():
            if isinstance(one := getattr(value, inner), list | msgspec.Struct):
                yield from _field(f"{name} {inner}", one, now)
    elif value:
        yield Text(f"{heading}: {_word(name, value, now)}")


def _tells(head: str) -> Callable[[dict[str, str]], bool]:
    return lambda row: row.get(head, "") not in _NOTHING


def _told(words: dict[str, str]) -> str:
    return ", ".join(f"{head} {word}" for head, word in words.items() if word not in _NOTHING)


def _words_of(value: Any, now: float, head: str = "") -> dict[str, str]:
    """What a record says, by the words for it; of a table in it each key."""
    if not isinstance(value, dict):
        value = structs.asdict(value) if isinstance(value, msgspec.Struct) else asdict(value)
    found: dict[str, str] = {}
    for name, one in value.items():
        words = f"{head} {_heading(name)}".strip()
        if isinstance(one, dict):
            found |= _words_of(one, now, words if name != "slots" else "")
        elif not isinstance(one, list | tuple | msgspec.Struct):
            found[words] = _word(name, one, now)
    return found


def _heading(name: str) -> str:
    return name.replace("_bytes", "").replace("_", " ")


def _word(name: str, value: Any, now: float) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _INSTANTS:
        return f"{_span(now - value)} ago"
    if "bytes" in name and isinstance(value, int | float):
        return format_size(value) + "/s" * name.endswith("_per_second")
    if "_ms" in name and isinstance(value, int | float):
        return f"{value:.2f} ms"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value)


def namespaces_report(facts: SidecarStatus) -> Shown:
    lines: list[RenderableType] = []
    if facts.namespaces:
        lines.append(namespace_table(facts.namespaces, facts.at, len(facts.namespaces)))
        for one in facts.namespaces:
            epoch = f", weights epoch {one.weights_epoch}" if one.weights_epoch else ""
            model = f"{one.name} ({one.model}); " if one.name else ""
            lines.append(f"{one.id}: {model}{one.layout}{epoch}")
    else:
        lines.append("No namespaces.")
    if facts.hidden_namespaces:
        lines.append(f"and {facts.hidden_namespaces:,} more")
    if facts.state == "warming":
        lines.append("What is on disk is still being taken in: there may be more.")
    return Shown({"state": facts.state, "namespaces": msgspec.to_builtins(facts.namespaces)}, lines)


def gone_report(what: str, name: str, value: str, gone: Counted) -> Shown:
    """`kvstore drop` and `kvstore purge`. what: a sentence about what is gone; name, value: its JSON field. gone: how
    much that was, and what other nodes may still have."""
    told: dict[str, object] = {name: value, "blocks": gone.blocks, "elsewhere": gone.elsewhere}
    told["not_reached"] = [{"node": node, "address": address} for node, address in gone.not_reached]
    lines = [f"{what}; it had {_count(gone.blocks, 'readable block')}"]
    if gone.elsewhere:
        lines.append(f"elsewhere: {gone.elsewhere}")
    lines += [f"not reached: {node or 'unknown node'} at {address}" for node, address in gone.not_reached]
    return Shown(told, lines)


def record_report(file: str, block_tokens: int, requests: int, blocks: int, lost: int, seconds: float) -> Shown:
    """requests, blocks: written. lost: requests that the sidecar dropped because earlier notes were not fetched in
    time."""
    told = {"file": file, "block_tokens": block_tokens, "requests": requests, "blocks": blocks, "lost": lost}
    words = f"{_count(requests, 'request')}, {_count(blocks, 'block')} of {block_tokens} tokens"
    lines = [f"{file}: {words}, in {_span(seconds)}; kvstore replay reads it."]
    if lost:
        lines.append(f"{_count(lost, 'request')} more came too fast to be written, and are not in it.")
    if not requests:
        lines = [f"nothing was looked up in {_span(seconds)}: there is no {file}"]
    return Shown({**told, "seconds": seconds}, lines)


@dataclass(frozen=True, slots=True)
class WarmReport:
    """`kvstore warm`, in blocks. warm: already in DRAM. promoted: from a lower tier. left: found but not promoted, by
    reason. absent: not stored, by reason."""

    namespace: str
    prompts: int
    asked: int
    warm: int
    promoted: int
    left: dict[str, int]
    absent: dict[str, int]
    seconds: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def render(self, console: Any) -> None:
        rows: list[tuple[object, ...]] = [("warm already", self.warm), ("promoted", self.promoted)]
        rows += [(f"not promoted: {reason}", count) for reason, count in self.left.items()]
        rows += [(f"not there: {reason}", count) for reason, count in self.absent.items()]
        console.print(Text(f"{_count(self.prompts, 'prompt')}, {_count(self.asked, 'block')}, {self.seconds:.1f} s"))
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


def _count(count: int, one: str) -> str:
    return f"{count:,} {one if count == 1 else f'{one}s'}"


def _span(seconds: float) -> str:
    """For people: "3 h 12 min"."""
    seconds = max(0, round(seconds))
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // below} {small}"
    return f"{seconds} s"
