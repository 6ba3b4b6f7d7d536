"""`benches.py codec --quality`: a trained model reads held-out text from KV that went through the codecs.

The model is the demo's small one; the text is those of Python's own sources that it was not trained on. It runs
unchanged and in variants that make K hard to quantize without changing what the model computes (`codec_variants`);
every run checks that they do not. `codec_scores` says what is measured, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from math import exp, sqrt
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from transformers import AttentionInterface, Cache

from engine_adapter.hf.attention import ChunkMask, attend
from engine_adapter.hf.layers import BufferLayer
from kv_bench.corpus import read_sources, windows
from kv_kernels.int8 import KC64, Axis, dequantize, quantize
from kvstore.bench.row import Row, Section
from kvstore.block.codec import RawCodec
from kvstore.block.errors import BadInput
from kvstore.demo.model import describe_model, load_trained, trained_origin

POOL_DTYPE = torch.bfloat16
"""Of an engine's pages."""
MAX_WINDOWS = 64
LARGEST_ATTENTION_PERCENT = 1.2
"""A codec passes a variant if the attention's error is at most this."""

LARGEST_LOSS_CHANGE = 1e-3
"""Nats per byte by which a variant's loss may differ from the plain model's: floats are summed in another order."""

CONTINUATION = 128
"""Bytes behind the prefix; all but the first are scored."""

_WORDS = (
    "relative k, v: L2 error. attention: that of its output over the prefix, layer by layer, with the queries of the "
    f"{CONTINUATION} bytes behind it. KL: KL(raw || codec) of the next byte, the mean. perplexity: its "
    "change. top-1: bytes whose likeliest successor stays the same. All against raw, which is KV in bfloat16. At eight "
    "bits a change of perplexity of some hundredths of a percent is noise; judge by attention and KL."
)


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """windows: of held-out text at the shortest prefix, a quarter of it at the others. prefixes: in bytes (= tokens),
    multiples of 64."""

    windows: int = 32
    prefixes: tuple[int, ...] = (512, 2048, 3840)

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= MAX_WINDOWS:
            raise BadInput(f"windows={self.windows}; give 1 to {MAX_WINDOWS}")


@dataclass(frozen=True)
class QualityResult:
    """variants: for every prefix. held_out_bytes: of all files that windows come from. key_rms: root mean square of the
    plain model's K, the unit of biases."""

    options: QualityOptions
    model: dict[str, object]
    held_out_bytes: int
    key_rms: float
    variants: list[VariantQuality]
    seconds: float

    def loss_change(self, one: VariantQuality) -> float:
        """Nats per byte by which a variant's loss without a codec exceeds the plain model's."""
        plain = next(
            other for other in self.variants if other.variant == PLAIN.name and other.prefix_tokens == one.prefix_tokens
        )
        return one.nats_per_byte - plain.nats_per_byte

    @property
    def failures(self) -> list[str]:
        """Reasons why the figures are worthless, one line each."""
        return [
            f"{one.variant}, prefix {one.prefix_tokens}: its loss without a codec differs from the plain model's by "
            f"{self.loss_change(one):+.5f} nats per byte, allowed: {LARGEST_LOSS_CHANGE}; it is another function"
            for one in self.variants
            if not abs(self.loss_change(one)) <= LARGEST_LOSS_CHANGE
        ]

    def verdicts(self) -> list[str]:
        return [self._verdict(one.codec) for one in self.variants[0].codecs if one.codec != RawCodec.name]

    def found(self) -> tuple[list[Section], dict[str, Any], list[str]]:
        """A table for each prefix and one of the variants, facts beside them, and what makes the figures worthless."""
        about = {
            "options": asdict(self.options),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "model": self.model,
            "text": "held-out sources of this machine's Python standard library",
            "held_out_bytes": self.held_out_bytes,
            "key_rms": self.key_rms,
            "largest_attention_percent": LARGEST_ATTENTION_PERCENT,
            "largest_loss_change": LARGEST_LOSS_CHANGE,
            "verdicts": self.verdicts(),
            "seconds": self.seconds,
        }
        sections = [
            Section(
                [
                    _quality_row(one, quality)
                    for one in self.variants
                    if one.prefix_tokens == prefix
                    for quality in one.codecs
                ],
                f"After {prefix:,} bytes",
                name="quality",
                left_out=("prefix tokens", "nats per byte"),
            )
            for prefix in dict.fromkeys(one.prefix_tokens for one in self.variants)
        ]
        words = "\n".join([_WORDS, *self._control(), *self.verdicts()])
        sections.append(
            Section([self._variant_row(one) for one in self.variants], "Without a codec", words, "variants")
        )
        return sections, {"quality_of": about}, self.failures

    def _variant_row(self, one: VariantQuality) -> Row:
        return Row(
            {"variant": one.variant, "prefix_tokens": one.prefix_tokens},
            one.nats_per_byte,
            "nats/byte",
            one.windows,
            details={
                "scored_bytes": one.scored_bytes,
                "loss_change": self.loss_change(one),
                "channel_spread": one.channel_spread,
                "bfloat16_percent": one.bfloat16_percent,
            },
        )

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
    return quality.attention_percent <= LARGEST_ATTENTION_PERCENT


def run(options: QualityOptions | None = None, progress: Callable[[str], None] | None = None) -> QualityResult:
    """Every prefix and variant. Raises `BadInput` if this machine lacks Python's sources."""
    options = options or QualityOptions()
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


def _quality_row(one: VariantQuality, quality: Quality) -> Row:
    what = {"variant": one.variant, "codec": quality.codec, "prefix_tokens": one.prefix_tokens}
    others = {name: value for name, value in asdict(quality).items() if name not in ("codec", "attention_percent")}
    details = {**others, "holds": holds(quality)}
    return Row(what, quality.attention_percent, "attention %", one.windows, details=details)


# ---------------------------------------------------------------------------------------------------------------------
# The effect of a codec on a model's attention and on its next byte.
#
# For every window of held-out text the model prefills a prefix; its K and V, rounded to bfloat16 as in a pool, go
# through the codec and back; then the bytes behind the prefix are scored on top. The reference is the same without the
# codec. Attention is compared layer by layer with the undisturbed model's queries, over the prefix only, so that an
# error does not depend on those of the layers below. At eight bits a difference in perplexity says little: it is within
# the noise even where the attention's error is 28 %.


ATTENTION_NAME = "codec_bench_sdpa"

Planes = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, [kv_heads, tokens, head_dim]."""

RoundTrip = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""K and V of a layer as in the pool, after a codec's round trip."""


def _there_and_back(numbers: torch.Tensor, axis: Axis) -> torch.Tensor:
    decoded: torch.Tensor = dequantize(*quantize(numbers, axis), numbers.dtype)
    return decoded


CODECS: dict[str, RoundTrip] = {
    RawCodec.name: lambda k, v: (k, v),
    KC64: lambda k, v: (_there_and_back(k, Axis.CHANNEL), _there_and_back(v, Axis.TOKEN)),
}


@dataclass(frozen=True, slots=True)
class Quality:
    """One codec against raw. relative_k, relative_v, attention: relative L2 errors, means over layers. kl_nats: mean
    KL(raw | codec) of the next byte. perplexity: increase. top1: bytes with the same likeliest successor.
    nats_per_byte: the loss."""

    codec: str
    relative_k_percent: float
    relative_v_percent: float
    attention_percent: float
    kl_nats: float
    perplexity_percent: float
    top1_percent: float
    nats_per_byte: float


@dataclass(frozen=True, slots=True)
class VariantQuality:
    """One variant at one prefix length. nats_per_byte: with K and V in float32, equal for all variants. channel_spread:
    see `codec_variants.spread`. bfloat16_percent: the attention's error from rounding K and V to bfloat16 alone."""

    variant: str
    prefix_tokens: int
    windows: int
    scored_bytes: int
    nats_per_byte: float
    channel_spread: float
    bfloat16_percent: float
    codecs: list[Quality]


def measure(
    model: Any,
    variant: Variant,
    rms: float,
    texts: Sequence[bytes],
    say: Callable[[int], None],
    codecs: dict[str, RoundTrip] | None = None,
) -> VariantQuality:
    """texts: the prefix and `CONTINUATION` bytes more, of equal lengths. rms: of the plain model's K, see `key_rms`.
    say: called with the number of texts done."""
    codecs = CODECS if codecs is None else codecs
    subject = _Subject(model, variant, rms, len(texts[0]))
    sums = {name: _Sums() for name in codecs}
    rounding, nats, spreads = _Relative(), 0.0, []
    scored = CONTINUATION - 1
    for number, text in enumerate(texts):
        say(number)
        tokens = torch.tensor([list(text)])
        exact, queries, logits = subject.prefill(tokens)
        nats += float(_nats(logits, tokens))
        pool = [(k.to(POOL_DTYPE), v.to(POOL_DTYPE)) for k, v in exact]
        spreads.append(spread([k for k, _ in pool]))
        raw = _Raw(tokens, queries, pool, _attended(queries, pool), subject.score(tokens, pool))
        rounding.add(_attended(queries, exact), raw.attended)
        for name, round_trip in codecs.items():
            made = [round_trip(k, v) for k, v in pool]
            sums[name].add(raw, made, subject.score(tokens, made))
    return VariantQuality(
        variant.name,
        len(texts[0]) - CONTINUATION,
        len(texts),
        scored * len(texts),
        nats / (scored * len(texts)),
        sum(spreads) / len(spreads),
        rounding.percent,
        [sums[name].quality(name, scored * len(texts)) for name in codecs],
    )


def key_rms(model: Any, text: bytes) -> float:
    """Root mean square of K after the rotation, over all layers."""
    planes, _, _ = _Subject(model, PLAIN, 0.0, len(text)).prefill(torch.tensor([list(text)]))
    return float(torch.stack([k for k, _ in planes]).square().mean().sqrt())


class _Subject:
    """A variant of the model with buffers for one text."""

    def __init__(self, model: Any, variant: Variant, rms: float, tokens: int) -> None:
        AttentionInterface.register(ATTENTION_NAME, _attend_and_keep)
        self._model = with_outliers(model, variant)
        config = self._model.config
        config._attn_implementation = ATTENTION_NAME
        self._offset = offset_of(variant, config.head_dim, rms)
        self._prefix = tokens - CONTINUATION
        self._mask = ChunkMask(CONTINUATION, torch.float32)
        shape = (config.num_hidden_layers, 2, 1, config.num_key_value_heads, tokens, config.head_dim)
        self._buffers = torch.zeros(shape)

    def prefill(self, tokens: torch.Tensor) -> tuple[Planes, list[torch.Tensor], torch.Tensor]:
        """Run a whole text in float32: the prefix's K and V, the queries behind it, [heads, bytes, head_dim], and the
        logits there."""
        logits = self._run(tokens, 0, None)
        planes = [
            (pair[0][0, :, : self._prefix].clone(), pair[1][0, :, : self._prefix].clone()) for pair in self._buffers
        ]
        queries = [layer.self_attn.kept_query[0, :, self._prefix :] for layer in self._model.model.layers]
        return planes, queries, logits

    def score(self, tokens: torch.Tensor, planes: Planes) -> torch.Tensor:
        """Logits behind a prefix with these K and V."""
        for pair, (k, v) in zip(self._buffers, planes, strict=True):
            pair[0][0, :, : self._prefix] = k
            pair[1][0, :, : self._prefix] = v
        mask = self._mask.of(CONTINUATION, self._prefix + CONTINUATION)
        return self._run(tokens[:, self._prefix :], self._prefix, mask)

    @torch.inference_mode()
    def _run(self, tokens: torch.Tensor, length: int, mask: torch.Tensor | None) -> torch.Tensor:
        cache = Cache(layers=[BiasedLayer(pair[0], pair[1], length, self._offset) for pair in self._buffers])
        output = self._model(
            input_ids=tokens,
            past_key_values=cache,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=CONTINUATION,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class _Raw(NamedTuple):
    """One text without a codec. attended: each layer's attention output over the prefix. logits: behind it."""

    tokens: torch.Tensor
    queries: list[torch.Tensor]
    planes: Planes
    attended: list[torch.Tensor]
    logits: torch.Tensor


class _Relative:
    """Relative L2 error accumulated over layers and texts."""

    def __init__(self) -> None:
        self._errors: dict[int, tuple[float, float]] = {}

    def add(self, wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
        for layer, (right, other) in enumerate(zip(wanted, found, strict=True)):
            error, size = self._errors.get(layer, (0.0, 0.0))
            difference = (other.double() - right.double()).square().sum()
            self._errors[layer] = (error + float(difference), size + float(right.double().square().sum()))

    @property
    def percent(self) -> float:
        return 100 * sum(sqrt(error / size) for error, size in self._errors.values()) / len(self._errors)


@dataclass
class _Sums:
    keys: _Relative = field(default_factory=_Relative)
    values: _Relative = field(default_factory=_Relative)
    attention: _Relative = field(default_factory=_Relative)
    kl: float = 0.0
    nats: float = 0.0
    raw_nats: float = 0.0
    same: int = 0

    def add(self, raw: _Raw, made: Planes, logits: torch.Tensor) -> None:
        self.keys.add([k for k, _ in raw.planes], [k for k, _ in made])
        self.values.add([v for _, v in raw.planes], [v for _, v in made])
        self.attention.add(raw.attended, _attended(raw.queries, made))
        right, other = (F.log_softmax(scores[:-1].double(), -1) for scores in (raw.logits, logits))
        self.kl += float((right.exp() * (right - other)).sum())
        self.nats += float(_nats(logits, raw.tokens))
        self.raw_nats += float(_nats(raw.logits, raw.tokens))
        self.same += int((right.argmax(-1) == other.argmax(-1)).sum())

    def quality(self, name: str, scored: int) -> Quality:
        return Quality(
            name,
            self.keys.percent,
            self.values.percent,
            self.attention.percent,
            self.kl / scored,
            100 * (exp((self.nats - self.raw_nats) / scored) - 1),
            100 * self.same / scored,
            self.nats / scored,
        )


def _attended(queries: Sequence[torch.Tensor], planes: Planes) -> list[torch.Tensor]:
    """Attention of the queries behind the prefix over the prefix, per layer: [1, heads, bytes, head_dim]."""
    return [
        F.scaled_dot_product_attention(q[None], k.float()[None], v.float()[None], enable_gqa=True)
        for q, (k, v) in zip(queries, planes, strict=True)
    ]


def _nats(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Summed over the scored bytes. logits: of the continuation."""
    return F.cross_entropy(logits[:-1].double(), tokens[0, 1 - CONTINUATION :], reduction="sum")


def _attend_and_keep(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The adapter's attention; the module keeps the queries until the next pass."""
    module.kept_query = query
    return attend(module, query, *args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Variants that make K hard to quantize without changing what the model computes. Large models show both effects, a
# small one neither, so a codec that fails on them would pass unnoticed:
#
#     outlier s   two rotary pairs of channels of every KV head: their rows of k_proj times s, those of q_proj over s.
#                 Every product of a query and a key stays the same.
#     bias b      after the rotation, + and - b times K's root mean square on two channels of every KV head, the same
#                 for every token. It adds one number to all scores of a query, which a softmax cancels. Biases of
#                 k_proj do the same; in some models they are hundreds of times as large as K itself.
#
# The pairs and channels are slow ones, which turn little from token to token: fast ones would smear the values.


# Of a head of 64 channels, of which i and i + 32 turn together.
OUTLIER_PAIRS = (24, 29)
BIAS_CHANNELS = (30, 59)


@dataclass(frozen=True, slots=True)
class Variant:
    """outlier: factor on K's channels, 1 for none. bias: in units of K's root mean square, 0 for none."""

    name: str
    outlier: float = 1.0
    bias: float = 0.0


PLAIN = Variant("plain")
# Not a power of two, which would leave every float's relative error unchanged.
OUTLIER = Variant("outlier 13", outlier=13.0)
BIAS = Variant("bias 100", bias=100.0)
VARIANTS = (PLAIN, OUTLIER, BIAS, Variant("outlier 13 + bias 100", outlier=13.0, bias=100.0))


def with_outliers(model: Any, variant: Variant) -> Any:
    """A copy of a Llama with this variant's weights."""
    changed = deepcopy(model)
    config = changed.config
    width, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    rows = [channel for pair in OUTLIER_PAIRS for channel in (pair, pair + width // 2)]
    with torch.no_grad():
        for layer in changed.model.layers:
            of_keys = layer.self_attn.k_proj.weight.view(-1, width, config.hidden_size)
            of_queries = layer.self_attn.q_proj.weight.view(-1, width, config.hidden_size)
            assert len(of_queries) == group * len(of_keys)
            of_keys[:, rows] *= variant.outlier
            of_queries[:, rows] /= variant.outlier
    return changed


def offset_of(variant: Variant, width: int, rms: float) -> torch.Tensor:
    """[width]: added to every K after the rotation."""
    offset = torch.zeros(width)
    for sign, channel in zip((1.0, -1.0), BIAS_CHANNELS, strict=True):
        offset[channel] = sign * variant.bias * rms
    return offset


class BiasedLayer(BufferLayer):
    """A layer's cache that adds the offset to each incoming K; K written into it directly has it already."""

    def __init__(self, key_buffer: torch.Tensor, value_buffer: torch.Tensor, length: int, offset: torch.Tensor) -> None:
        super().__init__(key_buffer, value_buffer, length)
        self.offset = offset

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(key_states + self.offset, value_states, *args, **kwargs)


def spread(keys: Sequence[torch.Tensor]) -> float:
    """How far the largest channel stands out: the largest of the channels' maxima over their median, mean over layers
    and heads. keys: of each layer, [heads, tokens, width]."""
    found = []
    for layer in keys:
        largest = layer.float().abs().amax(1)
        found.append(largest.amax(1) / largest.median(1).values)
    return float(torch.stack(found).mean())
