"""What a codec of KV does to a model's attention and to its next byte (floor 4).

For every window of held-out text the model prefills a prefix; its K and V, rounded to bfloat16 as a pool has them, go
through the codec and back; then the bytes behind the prefix are scored on top. The reference is the same without the
codec. Attention is compared layer by layer with the queries that the undisturbed model has there, over the prefix
alone, so that an error does not depend on those of the layers below.

A difference in perplexity says little at eight bits: it lies in the noise where the attention's error is already 28 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Cache

from engine_adapter.hf_attention import ChunkMask, attend
from kv_kernels.int8 import KC64, TH, Axis, dequantize, quantize
from kvstore.bench.codec import POOL_DTYPE, RAW
from kvstore.bench.codec_variants import PLAIN, BiasedLayer, Variant, offset_of, spread, with_outliers

CONTINUATION = 128
"""Bytes behind the prefix. All but the first are scored."""

ATTENTION_NAME = "codec_bench_sdpa"

Planes = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, [kv_heads, tokens, head_dim]."""

RoundTrip = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""K and V of a layer as the pool has them, and what a codec makes of them."""


def _there_and_back(numbers: torch.Tensor, axis: Axis) -> torch.Tensor:
    decoded: torch.Tensor = dequantize(*quantize(numbers, axis), numbers.dtype)
    return decoded


CODECS: dict[str, RoundTrip] = {
    RAW: lambda k, v: (k, v),
    KC64: lambda k, v: (_there_and_back(k, Axis.CHANNEL), _there_and_back(v, Axis.TOKEN)),
    TH: lambda k, v: (_there_and_back(k, Axis.TOKEN), _there_and_back(v, Axis.TOKEN)),
}


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one codec, against raw. relative_k, relative_v, attention: relative L2 errors, the mean over layers. kl_nats:
    KL(raw || codec) of the next byte, the mean. perplexity: how much larger it is. top1: bytes whose likeliest
    successor is the same. nats_per_byte: the loss."""

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
    """Of one variant at one length of prefix. nats_per_byte: with K and V in float32, which every variant must have
    alike. channel_spread: see `codec_variants.spread`. bfloat16_percent: the attention's error that rounding K and V to
    bfloat16 makes already."""

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
    """texts: of the prefix and `CONTINUATION` bytes more, all of a length. rms: of the plain model's K, see `key_rms`.
    say: told how many texts are done."""
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
        """All of a text at once, in float32: K and V of the prefix, the queries of the bytes behind it, which are
        [heads, bytes, head_dim], and the logits there."""
        logits = self._run(tokens, 0, None)
        planes = [
            (pair[0][0, :, : self._prefix].clone(), pair[1][0, :, : self._prefix].clone()) for pair in self._buffers
        ]
        queries = [layer.self_attn.kept_query[0, :, self._prefix :] for layer in self._model.model.layers]
        return planes, queries, logits

    def score(self, tokens: torch.Tensor, planes: Planes) -> torch.Tensor:
        """Logits of the bytes behind a prefix with these K and V."""
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
    """One text without a codec. attended: the attention's output over the prefix, of each layer. logits: behind it."""

    tokens: torch.Tensor
    queries: list[torch.Tensor]
    planes: Planes
    attended: list[torch.Tensor]
    logits: torch.Tensor


class _Relative:
    """Relative L2 errors of several layers, over any number of texts."""

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
    """Of the queries behind the prefix over all of it, in each layer: [1, heads, bytes, head_dim]."""
    return [
        F.scaled_dot_product_attention(q[None], k.float()[None], v.float()[None], enable_gqa=True)
        for q, (k, v) in zip(queries, planes, strict=True)
    ]


def _nats(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Summed over the bytes that are scored. logits: of the continuation."""
    return F.cross_entropy(logits[:-1].double(), tokens[0, 1 - CONTINUATION :], reduction="sum")


def _attend_and_keep(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attention as the adapter has it; the queries stay with the module until the next pass."""
    module.kept_query = query
    return attend(module, query, *args, **kwargs)
