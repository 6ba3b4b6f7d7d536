"""The result of a proof: for each way how many answers were the same, who broke the others, and what a hit saves."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvstore.prove.judge import Answers, Blame, Compared, Party, Reference, Way, findings_of

BAR_PIXELS, ROW_PIXELS, NAME_PIXELS = 420, 26, 150


@dataclass(frozen=True)
class Proof:
    """ways: of the engine with its store. alone: of the engine without it. spread: in nats, what the engine alone
    differs by, twice. words: what was proven."""

    ways: Mapping[Way, Compared]
    alone: Mapping[Way, Compared]
    findings: list[Blame]
    spread: float
    words: str = ""

    @staticmethod
    def of(
        reference: Reference,
        ways: Mapping[Way, Answers],
        codec: str,
        shares: Mapping[Way, float],
        reference_drafts: float | None,
    ) -> Proof:
        found = findings_of(reference, ways, codec=codec, drafts=shares, reference_drafts=reference_drafts)
        compared = {way: reference.compared(answers) for way, answers in ways.items()}
        if Way.OTHER_WEIGHTS in compared:  # their answers are others, and that is right
            compared[Way.OTHER_WEIGHTS] = compared[Way.OTHER_WEIGHTS]._replace(broken=())
        alone = {way: reference.compared(answers) for way, answers in reference.ways.items()}
        return Proof(compared, alone, found, reference.spread)

    @property
    def is_held(self) -> bool:
        """Whether the store and its connector broke nothing."""
        return all([one.who is Party.ENGINE for one in self.findings])

    def to_dict(self) -> dict[str, object]:
        told = {
            name: [{"way": way, **asdict_of(one)} for way, one in compared.items()]
            for name, compared in (("alone", self.alone), ("with_store", self.ways))
        }
        findings = [one._asdict() for one in self.findings]
        return {"engine": self.words, "held": self.is_held, "findings": findings, "spread": self.spread, **told}

    def render(self, console: Any) -> None:
        table = Table(box=None, pad_edge=False)
        for name in ("way", "asked", "same tokens", "outside the spread", "from a cache", "seconds"):
            table.add_column(name, justify="left" if name == "way" else "right")
        for title, compared in (("the engine alone", self.alone), ("with the store", self.ways)):
            table.add_row(f"[bold]{title}[/bold]")
            for way, one in compared.items():
                table.add_row(f"  {way}", *cells_of(one))
        console.print(table)
        for line in self.lines():
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    def lines(self) -> Iterator[str]:
        for one in self.findings:
            yield f"broken by {one.who}: {one.what}; {one.remedy}"
        if not self.findings:
            yield "identity holds: every answer is the engine's own, in every way that was asked"
        elif self.is_held:
            yield "the store and its connector broke nothing"
        if Way.OTHER_WEIGHTS not in self.ways:
            yield "other weights were not tried: that takes a directory of safetensors, and an engine started here"
        if saved := self.speeds():
            yield saved

    def speeds(self) -> str:
        """What a hit takes beside a cold answer, and the limit: the engine's own cache, which loads nothing."""
        cold, own, store = self.ways.get(Way.COLD), self.alone.get(Way.OWN), self.ways.get(Way.STORE)
        if cold is None or own is None or store is None or not store.cached:
            return ""
        text = f"an answer takes {cold.seconds * 1e3:.0f} ms cold and {store.seconds * 1e3:.0f} ms from the store"
        return text + f"; the limit is {own.seconds * 1e3:.0f} ms, from the engine's own cache" * (own.cached > 0)

    def page(self) -> str:
        """One page of HTML, with what is shown in text and a plot of it."""
        rows = []
        for title, compared in (("the engine alone", self.alone), ("with the store", self.ways)):
            rows.append(f'<tr><th colspan="6">{title}</th></tr>')
            rows += [
                f"<tr><td>{way}</td>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells_of(one))}</tr>"
                for way, one in compared.items()
            ]
        named = "".join(
            f"<th>{name}</th>"
            for name in ("way", "asked", "same tokens", "outside the spread", "from a cache", "seconds")
        )
        said = "".join(f"<p>{html.escape(line)}</p>" for line in self.lines())
        state = "held" if self.is_held else "broken"
        return _PAGE.format(
            words=html.escape(self.words),
            state=state,
            verdict="Identity holds" if self.is_held else "Identity breaks",
            said=said,
            same=_bars(
                "Answers outside the engine's spread, of those asked",
                self.ways,
                lambda one: len(one.broken) / one.asked,
            ),
            speed=_bars("Seconds to an answer, median", {**self.ways}, lambda one: one.seconds),
            head=named,
            rows="".join(rows),
        )


def asdict_of(one: Compared) -> dict[str, object]:
    return {**one._asdict(), "broken": list(one.broken), "tiers": dict(one.tiers)}


def cells_of(one: Compared) -> tuple[str, ...]:
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in one.tiers.items() if count)
    share = f"{100 * one.cached / one.prompt_tokens:.0f} %" if one.prompt_tokens else ""
    return (
        str(one.asked),
        str(one.same),
        str(len(one.broken)),
        f"{share} {f'({tiers})' if tiers else ''}".strip(),
        f"{one.seconds:.3f}",
    )


def _bars(title: str, compared: Mapping[Way, Compared], value: Any) -> str:
    most = max([value(one) for one in compared.values() if one.asked] or [0]) or 1.0
    bars = []
    for at, (way, one) in enumerate((way, one) for way, one in compared.items() if one.asked):
        found, y = value(one), at * ROW_PIXELS
        width = BAR_PIXELS * found / most
        bars.append(
            f'<text x="{NAME_PIXELS - 8}" y="{y + 16}" text-anchor="end">{way}</text>'
            f'<rect x="{NAME_PIXELS}" y="{y + 4}" width="{max(width, 1):.1f}" height="{ROW_PIXELS - 10}"/>'
            f'<text x="{NAME_PIXELS + width + 6:.1f}" y="{y + 16}">{found:.3f}</text>'
        )
    size = f'viewBox="0 0 {NAME_PIXELS + BAR_PIXELS + 80} {ROW_PIXELS * len(bars)}"'
    return f'<h2>{title}</h2><svg {size} role="img" aria-label="{title}">{"".join(bars)}</svg>'


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kvstore prove</title>
<style>
:root {{ color-scheme: light dark; --ink: light-dark(#1c1c1c, #e8e8e8); --bar: light-dark(#2a6fbb, #6aa9e9);
  --held: light-dark(#176b2c, #6fce88); --broken: light-dark(#a3211b, #ff8b80) }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
code {{ overflow-wrap: anywhere }} .held {{ color: var(--held) }} .broken {{ color: var(--broken) }}
svg {{ width: 100%; max-width: 42rem; font-size: 13px; fill: var(--ink) }} rect {{ fill: var(--bar) }}
div {{ overflow-x: auto }} td, th {{ padding: .1rem .8rem .1rem 0; text-align: left; white-space: nowrap }}
</style>
<h1 class="{state}">{verdict}</h1><p><code>{words}</code></p>{said}{same}{speed}
<div><table><tr>{head}</tr>{rows}</table></div></html>
"""
