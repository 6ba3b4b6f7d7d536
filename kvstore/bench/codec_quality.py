"""`kvstore bench codec --quality`: a trained model reads held-out text from KV that went through the codecs (floor 4).

The model is the demo's small one, the text Python's own sources, those files that it was not trained on. It runs as it
is and in variants that make K hard to quantize without changing what it computes (`codec_variants`); that they do not
is checked in every run. What is measured, and how, is in `codec_scores`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
import transformers
from rich.table import Table

from kvstore.bench.codec import RAW
from kvstore.bench.codec_scores import CONTINUATION, Quality, VariantQuality, key_rms, measure
from kvstore.bench.codec_variants import PLAIN, VARIANTS
from kvstore.bench.measure import Progress
from kvstore.demo.corpus import read_sources, windows
from kvstore.demo.model import describe_model, load_trained, trained_origin
from kvstore.errors import BadInput

MAX_WINDOWS = 64
LARGEST_ATTENTION_PERCENT = 1.2
"""A codec holds on a variant where the attention's error is at most this."""

LARGEST_LOSS_CHANGE = 1e-3
"""Nats per byte by which a variant's loss may differ from the plain model's: floats are summed in another order."""

_WORDS = (
    "K, V: relative L2 error. attention: that of its output over the prefix, layer by layer, with the queries of the "
    f"{CONTINUATION} bytes behind it. KL: KL(raw || codec) of the next byte, the mean, in 1e-4 nats. perplexity: its "
    "change. top-1: bytes whose likeliest successor stays the same. All against raw, which is KV in bfloat16. At eight "
    "bits a change of perplexity of some hundredths of a percent is noise; judge by attention and KL."
)


@dataclass(frozen=True, slots=True)
class Options:
    """windows: of held-out text at the shortest prefix, a quarter of it at the others. prefixes: in bytes, which
    are tokens; multiples of 64."""

    windows: int = 32
    prefixes: tuple[int, ...] = (512, 2048, 3840)

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= MAX_WINDOWS:
            raise BadInput(f"windows={self.windows}; give 1 to {MAX_WINDOWS}")


@dataclass(frozen=True)
class QualityResult:
    """variants: of every prefix. held_out_bytes: of all files that windows are taken from. key_rms: root mean square of
    the plain model's K, of which biases are multiples."""

    options: Options
    model: dict[str, object]
    held_out_bytes: int
    key_rms: float
    variants: list[VariantQuality]
    seconds: float

    def loss_change(self, one: VariantQuality) -> float:
        """Nats per byte by which a variant's loss without a codec differs from the plain model's."""
        plain = next(
            other for other in self.variants if other.variant == PLAIN.name and other.prefix_tokens == one.prefix_tokens
        )
        return one.nats_per_byte - plain.nats_per_byte

    @property
    def failures(self) -> list[str]:
        """What makes the figures worthless, one line each."""
        return [
            f"{one.variant}, prefix {one.prefix_tokens}: its loss without a codec differs from the plain model's by "
            f"{self.loss_change(one):+.5f} nats per byte, allowed: {LARGEST_LOSS_CHANGE}; it is another function"
            for one in self.variants
            if not abs(self.loss_change(one)) <= LARGEST_LOSS_CHANGE
        ]

    def verdicts(self) -> list[str]:
        """A sentence for each codec."""
        return [self._verdict(one.codec) for one in self.variants[0].codecs if one.codec != RAW]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "options": asdict(self.options),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "model": self.model,
            "text": "held-out sources of this machine's Python standard library",
            "held_out_bytes": self.held_out_bytes,
            "key_rms": self.key_rms,
            "largest_attention_percent": LARGEST_ATTENTION_PERCENT,
            "largest_loss_change": LARGEST_LOSS_CHANGE,
            "variants": [
                {
                    **asdict(one),
                    "loss_change": self.loss_change(one),
                    "codecs": [{**asdict(quality), "holds": holds(quality)} for quality in one.codecs],
                }
                for one in self.variants
            ],
            "verdicts": self.verdicts(),
            "failures": self.failures,
            "seconds": self.seconds,
        }

    def render(self, console: Any) -> None:
        """A table for each prefix, and what they say in words."""
        for prefix in dict.fromkeys(one.prefix_tokens for one in self.variants):
            console.print(_table([one for one in self.variants if one.prefix_tokens == prefix]))
        for line in (_WORDS, *self._control(), *self.verdicts()):
            console.print(line, highlight=False)

    def _verdict(self, codec: str) -> str:
        worst: dict[str, Quality] = {}
        for one in self.variants:
            (found,) = (quality for quality in one.codecs if quality.codec == codec)
            if one.variant not in worst or not found.attention_percent <= worst[one.variant].attention_percent:
                worst[one.variant] = found
        failed = {variant: quality for variant, quality in worst.items() if not holds(quality)}
        if not failed:
            largest = max(quality.attention_percent for quality in worst.values())
            return (
                f"{codec} holds on every variant and at every length: the attention's error is at most "
                f"{largest:.2f} %, allowed are {LARGEST_ATTENTION_PERCENT} %."
            )
        where = "; ".join(
            f"{variant}, {quality.attention_percent:.1f} % (top-1 {quality.top1_percent:.1f} %)"
            for variant, quality in failed.items()
        )
        return (
            f"{codec} does not hold, by the attention's largest error of all lengths, where "
            f"{LARGEST_ATTENTION_PERCENT} % are allowed: {where}."
        )

    def _control(self) -> list[str]:
        largest = max(abs(self.loss_change(one)) for one in self.variants)
        plain = [one for one in self.variants if one.variant == PLAIN.name]
        losses = ", ".join(f"{one.nats_per_byte:.3f} after {one.prefix_tokens:,}" for one in plain)
        rounding = {name: 0.0 for name in dict.fromkeys(one.variant for one in self.variants)}
        for one in self.variants:
            rounding[one.variant] = max(rounding[one.variant], one.bfloat16_percent)
        costs = ", ".join(f"{percent:.2f} % ({variant})" for variant, percent in rounding.items())
        return [
            f"Control: with K and V in float32 every variant has the plain model's loss within {largest:.1e} nats per "
            f"byte (allowed: {LARGEST_LOSS_CHANGE:.0e}), which is {losses} bytes.",
            f"What rounding K and V to bfloat16 costs the attention before any codec, at most: {costs}.",
        ]


def holds(quality: Quality) -> bool:
    """Whether the attention's error is small enough."""
    return quality.attention_percent <= LARGEST_ATTENTION_PERCENT


def run(options: Options | None = None, progress: Progress = None) -> QualityResult:
    """Every prefix and variant. Raises `BadInput` where this machine has no text to judge on."""
    options = options or Options()
    start = perf_counter()
    sources, model = read_sources(held_out=True), load_trained()
    shortest = min(options.prefixes)
    rms = key_rms(model, windows(sources, shortest + CONTINUATION, 1)[0])
    found = []
    for prefix in options.prefixes:
        texts = windows(
            sources, prefix + CONTINUATION, options.windows if prefix == shortest else -(-options.windows // 4)
        )
        for variant in VARIANTS:

            def say(number: int, where: str = f"{variant.name}, prefix {prefix}", count: int = len(texts)) -> None:
                if progress is not None:
                    progress(f"{where}: window {number + 1} of {count}")

            found.append(measure(model, variant, rms, texts, say))
    described = {**describe_model(model, is_trained=True), "sha256": trained_origin()["sha256"]}
    held_out_bytes = sum(len(source.text) for source in sources)
    return QualityResult(options, described, held_out_bytes, rms, found, perf_counter() - start)


def _table(variants: list[VariantQuality]) -> Table:
    first = variants[0]
    title = f"After {first.prefix_tokens:,} bytes: windows: {first.windows}, bytes scored: {first.scored_bytes:,}"
    table = Table(title=title, title_justify="left")
    for name in ("variant", "codec", "K %", "V %", "attention %", "KL", "perplexity %", "top-1 %", ""):
        table.add_column(name, justify="left" if name in ("variant", "codec", "") else "right")
    for one in variants:
        for quality in one.codecs:
            table.add_row(
                one.variant if quality is one.codecs[0] else "",
                quality.codec,
                f"{quality.relative_k_percent:.3f}",
                f"{quality.relative_v_percent:.3f}",
                f"{quality.attention_percent:.2f}",
                f"{1e4 * quality.kl_nats:.3f}",
                f"{quality.perplexity_percent:+.3f}",
                f"{quality.top1_percent:.2f}",
                "" if holds(quality) else "does not hold",
            )
        table.add_section()
    return table
