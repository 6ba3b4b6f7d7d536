"""`kvstore bench codec --quality`: a trained model reads held-out text from KV that went through the codecs.

Attention is compared layer by layer with the undisturbed model's queries, over the prefix only, so that an error does
not depend on those of the layers below. The model's K goes through them unchanged and in variants that make it hard to
quantize without changing what is computed; every run checks that they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, sqrt
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kv_bench.codec import POOL_DTYPE, RAW, Mode
from kv_bench.corpus import read_sources, windows
from kv_bench.measure import Say
from kv_kernels.int8 import KC64, Axis, dequantize, quantize
from kvstore.block.errors import BadInput
from kvstore.demo.passes import describe_model, load_trained, trained_origin
from kvstore.traffic.row import Row, Section

MAX_WINDOWS = 64
LARGEST_ATTENTION_PERCENT = 1.2
"""A codec passes a variant if the attention's error is at most this."""
LARGEST_LOSS_CHANGE = 1e-3
"""Nats per byte by which a variant's loss may differ from the plain model's: floats are summed in another order."""
CONTINUATION = 128
"""Bytes behind the prefix; all but the first are scored."""
ATTENTION_NAME = "codec_bench_sdpa"

Planes = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, [kv_heads, tokens, head_dim]."""


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """windows: of held-out text at the shortest prefix, a quarter of it at the others. prefixes: in bytes (= tokens),
    multiples of 64."""

    windows: int = 32
    prefixes: tuple[int, ...] = (512, 2048, 3840)

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= MAX_WINDOWS:
            raise BadInput(f"windows={self.windows}; give 1 to {MAX_WINDOWS}")


@dataclass(frozen=True, slots=True)
class Variant:
    """K as a model with other weights has it. outlier: two rotary pairs of channels of every KV head are times this,
    as where queries are divided by it: every product of a query and a key stays the same. bias: after the rotation, +
    and - so many of K's root mean squares on two channels of every KV head, the same for every token: it adds one
    number to all scores of a query, which a softmax cancels. So the model reads K after the codec with both taken off.
    Large models show both effects, a small one neither, so a codec that fails on them would pass unnoticed."""

    name: str
    outlier: float = 1.0
    bias: float = 0.0

    def of(self, planes: Planes, rms: float) -> Planes:
        """rms: the unit of biases, see `key_rms`."""
        scale, offset = self._by_channel(planes, rms)
        return [(k * scale + offset, v) for k, v in planes]

    def taken_off(self, planes: Planes, rms: float) -> Planes:
        scale, offset = self._by_channel(planes, rms)
        return [((k.float() - offset) / scale, v) for k, v in planes]

    def _by_channel(self, planes: Planes, rms: float) -> tuple[torch.Tensor, torch.Tensor]:
        width = planes[0][0].shape[-1]
        scale, offset = torch.ones(width), torch.zeros(width)
        scale[[channel for pair in OUTLIER_PAIRS for channel in (pair, pair + width // 2)]] = self.outlier
        offset[list(BIAS_CHANNELS)] = torch.tensor([1.0, -1.0]) * self.bias * rms
        return scale, offset


PLAIN = Variant("plain")
# Not a power of two, which would leave every float's relative error unchanged.
OUTLIER, BIAS = Variant("outlier 13", outlier=13.0), Variant("bias 100", bias=100.0)
VARIANTS = (PLAIN, OUTLIER, BIAS, Variant("outlier 13 + bias 100", outlier=13.0, bias=100.0))
# Of a head of 64 channels, of which i and i + 32 turn together; slow ones, since fast ones would smear the values.
OUTLIER_PAIRS, BIAS_CHANNELS = (24, 29), (30, 59)


def run(options: QualityOptions, say: Say) -> Mode:
    """Every prefix and variant. Raises `BadInput` if this machine lacks Python's sources."""
    start, model, sources = perf_counter(), load_trained(), read_sources(held_out=True)
    shortest = min(options.prefixes)
    rms = key_rms(model, windows(sources, shortest + CONTINUATION, 1)[0])
    quality: dict[int, list[Row]] = {prefix: [] for prefix in options.prefixes}
    variants: list[Row] = []
    for prefix, rows in quality.items():
        count = options.windows if prefix == shortest else -(-options.windows // 4)
        plain_nats = None
        for variant in VARIANTS:
            say(f"{variant.name}, prefix {prefix}")
            texts = windows(sources, prefix + CONTINUATION, count)
            found, by_codec = measure(model, variant, rms, texts)
            plain_nats = found["nats_per_byte"] if plain_nats is None else plain_nats
            found["loss_change"] = found["nats_per_byte"] - plain_nats
            variants.append(_variant_row(variant.name, prefix, len(texts), found))
            rows += [_quality_row(variant.name, codec, prefix, len(texts), one) for codec, one in by_codec.items()]
    about = {
        "options": asdict(options),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": {**describe_model(model, is_trained=True), "sha256": trained_origin()["sha256"]},
        "text": "held-out sources of this machine's Python standard library",
        "held_out_bytes": sum(len(source.text) for source in sources),
        "key_rms": rms,
        "largest_attention_percent": LARGEST_ATTENTION_PERCENT,
        "largest_loss_change": LARGEST_LOSS_CHANGE,
        "seconds": perf_counter() - start,
    }
    sections = [Section(rows, f"After {prefix:,} bytes", name="quality") for prefix, rows in quality.items()]
    sections.append(Section(variants, "Without a codec", name="variants"))
    return sections, {"quality_of": about}, failures(variants)


def failures(variants: Sequence[Row]) -> list[str]:
    return [
        f"{row['variant']}, prefix {row['prefix_tokens']}: its loss without a codec differs from the plain model's by "
        f"{row['loss_change']:+.5f} nats per byte, allowed: {LARGEST_LOSS_CHANGE}; it is another function"
        for row in variants
        if not abs(row["loss_change"]) <= LARGEST_LOSS_CHANGE
    ]


def _variant_row(variant: str, prefix: int, count: int, found: dict[str, float]) -> Row:
    names = ("scored_bytes", "loss_change", "channel_spread", "bfloat16_percent")
    what, details = {"variant": variant, "prefix_tokens": prefix}, {name: found[name] for name in names}
    return Row(what, found["nats_per_byte"], "nats/byte", count, details=details)


def _quality_row(variant: str, codec: str, prefix: int, count: int, found: dict[str, float]) -> Row:
    """One codec against raw. relative_k, relative_v, attention: relative L2 errors, means over layers. kl_nats: mean
    KL(raw | codec) of the next byte. perplexity: increase. top1: bytes with the same likeliest successor."""
    what, attention = {"variant": variant, "codec": codec, "prefix_tokens": prefix}, found["attention_percent"]
    others = {name: value for name, value in found.items() if name != "attention_percent"}
    details = {**others, "holds": attention <= LARGEST_ATTENTION_PERCENT}
    return Row(what, attention, "attention %", count, details=details)


# --- the effect of a codec on a model's attention and on its next byte -----------------------------------------------


def there_and_back(numbers: torch.Tensor, axis: Axis) -> torch.Tensor:
    decoded: torch.Tensor = dequantize(*quantize(numbers, axis), numbers.dtype)
    return decoded


CODECS: dict[str, Any] = {
    RAW: lambda k, v: (k, v),
    KC64: lambda k, v: (there_and_back(k, Axis.CHANNEL), there_and_back(v, Axis.TOKEN)),
}
"""K and V of a layer as in the pool, after a codec's round trip."""


def measure(
    model: Any, variant: Variant, rms: float, texts: Sequence[bytes], codecs: dict[str, Any] | None = None
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Figures of a variant, and of each codec on it. texts: the prefix and `CONTINUATION` bytes more, of equal lengths.
    rms: of the plain model's K, see `key_rms`."""
    codecs = CODECS if codecs is None else codecs
    subject = _Subject(model, len(texts[0]))
    sums = {name: _Sums() for name in codecs}
    rounding, nats, spreads = _Relative(), 0.0, []
    for text in texts:
        tokens = torch.tensor([list(text)])
        plain, queries = subject.prefill(tokens)
        exact = variant.of(plain, rms)
        pool = [(k.to(POOL_DTYPE), v.to(POOL_DTYPE)) for k, v in exact]
        spreads.append(spread([k for k, _ in pool]))

        def read(planes: Planes, tokens: torch.Tensor = tokens, queries: Any = queries) -> _Read:
            found = variant.taken_off(planes, rms)
            return _Read(planes, _attended(queries, found), subject.score(tokens, found))

        whole, raw = read(exact), read(pool)
        nats += float(_nats(whole.logits, tokens))
        rounding.add(whole.attended, raw.attended)
        for name, round_trip in codecs.items():
            sums[name].add(tokens, raw, read([round_trip(k, v) for k, v in pool]))
    scored = (CONTINUATION - 1) * len(texts)
    found = {"scored_bytes": scored, "nats_per_byte": nats / scored, "channel_spread": sum(spreads) / len(spreads)}
    found["bfloat16_percent"] = rounding.percent
    return found, {name: one.figures(scored) for name, one in sums.items()}


def key_rms(model: Any, text: bytes) -> float:
    """Root mean square of K after the rotation, over all layers: the unit of biases."""
    planes, _ = _Subject(model, len(text)).prefill(torch.tensor([list(text)]))
    return float(torch.stack([k for k, _ in planes]).square().mean().sqrt())


class _Subject:
    """The model, run over one text. Sets the model's attention for good."""

    def __init__(self, model: Any, tokens: int) -> None:
        AttentionInterface.register(ATTENTION_NAME, _attend_and_keep)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        self._model, config = model, model.config
        config._attn_implementation = ATTENTION_NAME
        self._prefix = tokens - CONTINUATION

    def prefill(self, tokens: torch.Tensor) -> tuple[Planes, list[torch.Tensor]]:
        """Run a whole text in float32: the prefix's K and V, and the queries behind it, [heads, bytes, head_dim]."""
        cache = DynamicCache()
        self._run(tokens, cache)
        queries = [layer.self_attn.kept_query[0, :, self._prefix :] for layer in self._model.model.layers]
        layers: list[Any] = cache.layers
        return [tuple(plane[0, :, : self._prefix] for plane in (one.keys, one.values)) for one in layers], queries

    def score(self, tokens: torch.Tensor, planes: Planes) -> torch.Tensor:
        """The logits behind a prefix of these K and V."""
        cache = DynamicCache()
        for number, (keys, values) in enumerate(planes):
            cache.update(keys.float()[None], values.float()[None], number)
        return self._run(tokens[:, self._prefix :], cache)

    @torch.inference_mode()
    def _run(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        given = {"past_key_values": cache, "use_cache": True, "logits_to_keep": CONTINUATION}
        logits: torch.Tensor = self._model(input_ids=tokens, **given).logits[0]
        return logits


class _Read(NamedTuple):
    """One text behind these K and V. attended: each layer's attention output over the prefix. logits: behind it."""

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


class _Sums:
    """Of one codec, over texts."""

    def __init__(self) -> None:
        self._keys, self._values, self._attention = (_Relative() for _ in range(3))
        self._kl = self._nats = self._raw_nats = 0.0
        self._same = 0

    def add(self, tokens: torch.Tensor, raw: _Read, made: _Read) -> None:
        self._keys.add([k for k, _ in raw.planes], [k for k, _ in made.planes])
        self._values.add([v for _, v in raw.planes], [v for _, v in made.planes])
        self._attention.add(raw.attended, made.attended)
        right, other = (F.log_softmax(one.logits[:-1].double(), -1) for one in (raw, made))
        self._kl += float((right.exp() * (right - other)).sum())
        self._nats += float(_nats(made.logits, tokens))
        self._raw_nats += float(_nats(raw.logits, tokens))
        self._same += int((right.argmax(-1) == other.argmax(-1)).sum())

    def figures(self, scored: int) -> dict[str, float]:
        return {
            "relative_k_percent": self._keys.percent,
            "relative_v_percent": self._values.percent,
            "attention_percent": self._attention.percent,
            "kl_nats": self._kl / scored,
            "perplexity_percent": 100 * (exp((self._nats - self._raw_nats) / scored) - 1),
            "top1_percent": 100 * self._same / scored,
            "nats_per_byte": self._nats / scored,
        }


def _attended(queries: Sequence[torch.Tensor], planes: Planes) -> list[torch.Tensor]:
    """Attention of the queries behind the prefix over the prefix, per layer: [1, heads, bytes, head_dim]."""
    return [
        F.scaled_dot_product_attention(q[None], k.float()[None], v.float()[None], enable_gqa=True)
        for q, (k, v) in zip(queries, planes, strict=True)
    ]


def _nats(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1].double(), tokens[0, 1 - CONTINUATION :], reduction="sum")


def _attend_and_keep(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    module.kept_query = query
    attended: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, *args, **kwargs)
    return attended


def spread(keys: Sequence[torch.Tensor]) -> float:
    """How far the largest channel stands out: the largest of the channels' maxima over their median, mean over layers
    and heads. keys: of each layer, [heads, tokens, width]."""
    found = []
    for layer in keys:
        largest = layer.float().abs().amax(1)
        found.append(largest.amax(1) / largest.median(1).values)
    return float(torch.stack(found).mean())
