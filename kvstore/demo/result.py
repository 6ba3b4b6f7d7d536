"""The demo's result, as one object and as text for people."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from rich.table import Table
from rich.text import Text

import kvstore
from kvstore.block.account import HitTier, MissReason
from kvstore.config import format_size
from kvstore.demo.passes import ColdAgainstGenerate, PassResult, restored_answer_tokens
from kvstore.demo.questions import DemoRequest, Kind

SHOWN_ANSWER_BYTES = 12


@dataclass(frozen=True)
class DemoResult:
    """passes: cold, fill, warm, restart. stored_blocks, stored_bytes: in the store at the end, a recurrent model's
    states included. read_bytes: from disk after the restart. seconds: of the whole demo."""

    requests: list[DemoRequest]
    passes: list[PassResult]
    against_generate: ColdAgainstGenerate | None
    model: dict[str, object]
    seed: int | None
    threads: int
    answer_tokens: int
    block_tokens: int
    stored_blocks: int
    stored_bytes: int
    has_states: bool
    read_bytes: int
    seconds: float

    @property
    def differing(self) -> list[int]:
        answers = zip(*(result.answers for result in self.passes), strict=True)
        return [number for number, given in enumerate(answers) if any(answer != given[0] for answer in given)]

    @property
    def identical(self) -> int:
        return len(self.requests) - len(self.differing)

    @property
    def failures(self) -> list[str]:
        if not self.differing:
            return []
        numbers = ", ".join(str(number + 1) for number in self.differing)
        return [f"{len(self.differing)} of {len(self.requests)} answers differ between passes: {numbers}"]

    def ttft_ratio(self, percent: str, name: str = "warm") -> float:
        """Speed-up of the first token in a pass against cold, at "p50" or "p99"."""
        times = {result.name: result.ttft_ms() for result in self.passes}
        return times["cold"][percent] / times[name][percent]

    def to_dict(self) -> dict[str, object]:
        """Tokens, bytes, milliseconds, and ratios that are better when larger, except cold_vs_generate: cold's time /
        plain `generate`'s."""
        against = self.against_generate
        return {
            "versions": {
                "kvstore": kvstore.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "model": self.model,
            "seed": self.seed,
            "threads": self.threads,
            "requests": len(self.requests),
            "requests_by_kind": {str(kind): self._count(kind) for kind in Kind},
            "answer_tokens": self.answer_tokens,
            "grid_tokens": self.passes[0].reports[0].grid_tokens,
            "block_tokens": self.block_tokens,
            "passes": {result.name: result.to_dict() for result in self.passes},
            "ttft_ratio": self.ttft_ratio("p50"),
            "ttft_ratio_p99": self.ttft_ratio("p99"),
            "ttft_ratio_restart": self.ttft_ratio("p50", "restart"),
            "cold_vs_generate": against.ratio if against else None,
            "cold_vs_generate_pairs": asdict(against) if against else None,
            "stored": {"blocks": self.stored_blocks, "bytes": self.stored_bytes},
            "restart": {"read_bytes": self.read_bytes},
            "restored_answer_tokens": self._restored_answers(),
            "identical": self.identical,
            "failures": self.failures,
            "seconds": self.seconds,
        }

    def render(self, console: Any) -> None:
        console.print(self._table())
        for line in self._lines():
            console.print(Text(line), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(title=f"{len(self.requests)} requests, four times", title_justify="left")
        table.add_column("")
        for result in self.passes:
            table.add_column(result.name, justify="right")
        hits = [result.hits() for result in self.passes]
        misses = [result.misses() for result in self.passes]
        _row(table, "prompt tokens", [sum(map(len, result.prompts)) for result in self.passes])
        for tier in _seen(HitTier, hits):
            _row(table, f"  reused from {tier}", [found.get(tier, 0) for found in hits])
        for reason in _seen(MissReason, misses):
            _row(table, f"  missed: {reason}", [missed.get(reason, 0) for missed in misses])
        _row(table, "blocks stored", [result.saved_blocks for result in self.passes])
        table.add_section()
        for percent in ("p50", "p99"):
            _row(table, f"first token, {percent}, ms", [result.ttft_ms()[percent] for result in self.passes])
        for percent in ("p50", "p99"):
            _row(table, f"each next token, {percent}, ms", [result.itl_ms()[percent] for result in self.passes])
        return table

    def _lines(self) -> list[str]:
        lines = [
            "cold: the store is closed. fill: it is empty at first. warm: it holds all prompts. "
            "restart: it is opened anew, its memory is empty.",
            f"Warm, the first token comes {self.ttft_ratio('p50'):.1f} times sooner than cold (p50; "
            f"{self.ttft_ratio('p99'):.1f} times at p99).",
            f"After the restart it comes {self.ttft_ratio('p50', 'restart'):.1f} times sooner than cold (p50); "
            f"{format_size(self.read_bytes)} were read from the disk.",
            f"Identical answers in all passes: {self.identical} of {len(self.requests)}.",
            f"Stored: {self.stored_blocks:,} blocks of {self.block_tokens} tokens"
            f"{' and states of recurrent layers' if self.has_states else ''}, {format_size(self.stored_bytes)}.",
            f"Reused in the chat: {self._restored_answers()['warm']} tokens of its own earlier answers.",
        ]
        against = self.against_generate
        if against is not None:
            lines.append(
                f"Cold takes {against.ratio:.2f} times as long as plain transformers generate, to the first token "
                f"(median of {against.pairs} pairs; by themselves, medians of {against.cold_ms:.0f} ms and "
                f"{against.generate_ms:.0f} ms)."
            )
        return [*lines, self._words_on_answers()]

    def _words_on_answers(self) -> str:
        if self.seed is None:
            return (
                "The model is too small to answer: what it writes reads like Python's documentation and means nothing."
            )
        first = bytes(self.passes[0].answers[0][:SHOWN_ANSWER_BYTES])
        return f"The model's weights are random, so its answers mean nothing; the first one begins {first!r}."

    def _restored_answers(self) -> dict[str, int]:
        return {result.name: restored_answer_tokens(self.requests, result, self.block_tokens) for result in self.passes}

    def _count(self, kind: Kind) -> int:
        return sum(request.kind is kind for request in self.requests)


def _seen(names: Iterable[str], counts: Sequence[dict[str, int]]) -> list[str]:
    return [str(name) for name in names if any(name in count for count in counts)]


def _row(table: Table, name: str, values: Sequence[float]) -> None:
    cells = [f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if value else "" for value in values]
    table.add_row(name, *cells)
