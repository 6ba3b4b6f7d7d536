"""KV shapes of models, layer by layer: the known ones of models.toml, and a reader of Hugging Face's `config.json`.

    full      K and V of every token                     latent    one row for all heads (MLA), the same on each rank
    window    the engine keeps the last `tokens` alone   index     keys of a sparse attention's indexer, beside its KV
    chunk     the same, of a chunk of `tokens`           state     per sequence, whatever its length; no KV at all

A model that this file does not understand is refused by name, never guessed. Opens no file but that table.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from importlib.resources import files
from itertools import cycle, islice
from math import prod
from typing import Annotated, Any

from msgspec import Meta, convert

from kvstore.block.errors import BadInput, shown
from kvstore.block.layout import DTYPE_BYTES, MAX_KV_HEADS, MAX_LAYERS, MAX_PLANE_WIDTH, MAX_WINDOW, is_whole

DEFAULT_DTYPE, _F32 = "bfloat16", "float32"
LayerCount = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]


class KvKind(StrEnum):
    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    LATENT = "latent"
    INDEX = "index"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers with equal KV. widths: of K and V, or of one latent. tokens: length of the window or chunk, else 0. dtype:
    empty for the model's."""

    kind: KvKind
    layers: LayerCount
    kv_heads: Annotated[int, Meta(ge=1, le=MAX_KV_HEADS)]
    widths: tuple[Annotated[int, Meta(ge=1, le=MAX_PLANE_WIDTH)], ...]
    tokens: Annotated[int, Meta(ge=0, le=MAX_WINDOW)] = 0
    dtype: str = ""

    def bytes_per_token(self, dtype: str) -> int:
        """Of all these layers together. dtype: the KV pool's."""
        return self.layers * self.kv_heads * sum(self.widths) * DTYPE_BYTES[self.dtype or dtype]

    def kept_tokens(self, context_tokens: int) -> int:
        return min(context_tokens, self.tokens) if self.tokens else context_tokens

    def formula(self, dtype: str) -> str:
        heads = "" if self.kind in (KvKind.LATENT, KvKind.INDEX) else f" x {self.kv_heads} KV heads"
        if len(set(self.widths)) == 1 and len(self.widths) == 2:
            numbers = f"2 x {self.widths[0]}"
        else:
            numbers = f"({' + '.join(map(str, self.widths))})" if len(self.widths) > 1 else str(self.widths[0])
        return f"{self.layers} layers{heads} x {numbers} x {DTYPE_BYTES[self.dtype or dtype]} B"


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers that keep a state of fixed size per sequence: Mamba, linear attention. tensors: of each layer, the shape
    and the dtype of its convolution's state and of its recurrence's, in vLLM's order."""

    layers: LayerCount
    tensors: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def bytes_each(self) -> int:
        return sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in self.tensors)

    @property
    def bytes(self) -> int:
        """Of one sequence."""
        return self.layers * self.bytes_each

    @property
    def formula(self) -> str:
        sizes = (" x ".join(f"{one:,}" for one in (*shape, DTYPE_BYTES[dtype])) for shape, dtype in self.tensors)
        return f"{self.layers} layers x ({' + '.join(f'{size} B' for size in sizes)})"


@dataclass(frozen=True, slots=True)
class ModelKv:
    """source: where the numbers are from. notes: what they leave out. traits: `pictures` where it takes more than text;
    `longrope` or `dynamic` where its rope depends on a sequence's length."""

    name: str
    source: str
    layers: tuple[KvLayers, ...]
    states: tuple[StateLayers, ...] = ()
    dtype: str = DEFAULT_DTYPE
    notes: tuple[str, ...] = ()
    traits: frozenset[str] = frozenset()

    @property
    def kinds(self) -> frozenset[KvKind]:
        return frozenset([*(one.kind for one in self.layers), *([KvKind.STATE] if self.states else [])])

    def bytes_per_token(self, dtype: str, *kinds: KvKind) -> int:
        """Sum over layers of these kinds, or over all layers."""
        return sum(one.bytes_per_token(dtype) for one in self.layers if not kinds or one.kind in kinds)

    @property
    def state_bytes(self) -> int:
        """Of one sequence."""
        return sum(one.bytes for one in self.states)


# The table -------------------------------------------------------------------------------------------------------

MODELS: dict[str, ModelKv] = {
    name: convert({"name": name, **row}, ModelKv)
    for name, row in tomllib.loads(files("kvstore.insight").joinpath("models.toml").read_text("utf-8")).items()
}
_PICTURES = "pictures"
_REFUSED = re.compile(r"deepseek-v4(\.1)?(-.*)?")
_WHY_REFUSED = "its KV is compressed 4:1 and 128:1, and layers share it; this store does not plan for it"
_SUFFIXES = ("-instruct", "-it", "-pt", "-chat", "-base", "-thinking", "-hf")
"""Suffixes of names that change no KV."""
_NAME_SHOWN = 80


def model_named(given: str) -> ModelKv:
    """Look a model up in the table. The name may have an owner before it and a suffix such as `-Instruct`.

    Raises `BadInput` for a model that is refused, and for an unknown one, with similar names.
    """
    name = given.strip().lower().rpartition("/")[2].removeprefix("meta-")
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    if _REFUSED.fullmatch(name):
        raise BadInput(f"model {shown(given[:_NAME_SHOWN])}: {_WHY_REFUSED}")
    if name not in MODELS:
        near = get_close_matches(name[:_NAME_SHOWN], MODELS, 3, 0.6)
        near_ones = f"near it: {', '.join(near)}; " if near else ""
        raise BadInput(
            f"model {shown(given[:_NAME_SHOWN])} is not in the table; {near_ones}see kvstore plan --models, or give "
            "--config FILE (its config.json), or --layers, --kv-heads and --head-dim"
        )
    return MODELS[name]


def described(layers: int, kv_heads: int, head_dim: int, dtype: str = DEFAULT_DTYPE) -> ModelKv:
    """A model with K and V of every token in all layers."""
    full = KvLayers(KvKind.FULL, layers, kv_heads, (head_dim, head_dim))
    return ModelKv("as described", "the command line", (full,), (), dtype)


# config.json -----------------------------------------------------------------------------------------------------

MOST_CONFIG_BYTES = 1 << 20

_FULL, _SLIDING, _CHUNKED, _LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
_IN_WINDOW_IF_SHORT = ("mistral", "mixtral", "phi3", "starcoder2")
"""If `sliding_window` is set and shorter than the longest context, all layers have it."""
_DELTAS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_PATTERNS: dict[str, Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
    # Layer pattern, repeated, for configurations without `layer_types`.
    "gemma2": lambda config: (_SLIDING, _FULL),
    "gemma3": lambda config: _every(config.get("sliding_window_pattern", 6), _SLIDING),
    "gemma4": lambda config: _every(6, _SLIDING),
    "gpt_oss": lambda config: (_SLIDING, _FULL),
    "cohere2": lambda config: _every(config.get("sliding_window_pattern", 4), _SLIDING),
    "llama4": lambda config: _every(4, _CHUNKED),
    **dict.fromkeys(_DELTAS, lambda config: _every(config.get("full_attention_interval", 4), _LINEAR)),
}
_LATENTS = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
_BY_OPTION = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""With `use_sliding_window`, layers from `max_window_layers` on have a window."""
_PLAIN = (
    *("llama", "gemma", "olmo2", "olmo3", "granite", "granitemoe", "cohere", "smollm3", "ministral", "ministral3"),
    *("glm4", "glm4_moe", "minimax_m2", "step3p7", "mimo_v2_flash", "nemotron-nas", "deci"),
)
KNOWN_TYPES = tuple(sorted({*_PLAIN, *_IN_WINDOW_IF_SHORT, *_PATTERNS, *_LATENTS, *_BY_OPTION, "nemotron_h"}))


def _every(pattern: Any, other: str) -> tuple[str, ...]:
    if not is_whole(pattern, 1, MAX_LAYERS):
        raise BadInput(f"a pattern of {shown(pattern)} layers; give a whole number from 1 to {MAX_LAYERS}")
    return (*[other] * (int(pattern) - 1), _FULL)


def names_more_than_text(fields: Iterable[str]) -> bool:
    """Whether fields of a config.json speak of images, video or sound."""
    return any(word in name for name in fields for word in ("vision", "visual", "image", "audio", "video"))


def model_of_config(name: str, text: str) -> ModelKv:
    """Read a `config.json`. name: the file's, for messages.

    Raises `BadInput` for text that is not such a file, for missing or impossible fields, and for an unknown
    `model_type`: what its layers keep is never guessed.
    """
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{name}: no JSON; give the config.json of a model of Hugging Face") from None
    if not isinstance(whole, dict):
        raise BadInput(f"{name}: {type(whole).__name__} in place of an object; give a model's config.json")
    inner = whole.get("text_config")
    config = {**whole, **inner} if isinstance(inner, dict) else whole
    try:
        return _ConfigReader(name, config).model()
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None


class _ConfigReader:
    """Fields of the text model take precedence over those around it."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        given = config.get("model_type")
        self._name = name
        self._config = config
        self._type = str(given).removesuffix("_text") if isinstance(given, str) else ""
        if self._type.startswith("deepseek_v4"):
            raise BadInput(f"model_type {shown(given)}: {_WHY_REFUSED}")
        if self._type not in KNOWN_TYPES:
            raise BadInput(
                f"model_type {shown(given)} is not known, and what its layers keep is not guessed; allowed: "
                f"{', '.join(KNOWN_TYPES)}; give --layers, --kv-heads and --head-dim"
            )

    def model(self) -> ModelKv:
        states: tuple[StateLayers, ...] = ()
        if self._type in _LATENTS:
            kinds = self._latents()
        elif self._type == "nemotron_h":
            kinds, states = self._nemotron()
        elif self._config.get("block_configs") is not None:
            kinds = self._blocks()
        else:
            kinds, states = self._by_type()
        if not kinds:
            raise BadInput("none of its layers has KV, so there is nothing to store")
        layers = tuple(KvLayers(kind[0], count, *kind[1:]) for kind, count in kinds.items())
        return ModelKv(
            str(self._config.get("_name_or_path") or self._type),
            self._name,
            layers,
            states,
            self._dtype(),
            self._notes(),
            self._traits(),
        )

    def _number(self, field: str, most: int, default: int | None = None) -> int:
        given = self._config.get(field)
        if given is None and default is not None:
            return default
        if not is_whole(given, 1, most):
            raise BadInput(f"{field}={shown(given)}; it has to be a whole number from 1 to {most}")
        return int(given)  # type: ignore[arg-type]

    def _dtype(self) -> str:
        for field in ("dtype", "torch_dtype"):
            given = self._config.get(field)
            if isinstance(given, str) and given in DTYPE_BYTES:
                return given
        return DEFAULT_DTYPE

    def _state_dtype(self) -> str:
        given = self._config.get("mamba_ssm_dtype") or self._config.get("mamba_ssm_cache_dtype") or _F32
        if given not in ("float32", "float16", "bfloat16"):
            raise BadInput(f"the dtype {shown(given)} of its states; allowed: float32, float16, bfloat16")
        return str(given)

    def _notes(self) -> tuple[str, ...]:
        for field in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            count = self._config.get(field)
            if is_whole(count, 1, MAX_LAYERS):
                return (f"{count} layers for drafts ({field}) add KV where drafting is on; they are not counted",)
        return ()

    def _traits(self) -> frozenset[str]:
        rope = self._config.get("rope_parameters") or self._config.get("rope_scaling")
        kind = rope.get("rope_type") or rope.get("type") if isinstance(rope, dict) else None
        found = {one for one in ("longrope", "dynamic") if one == kind}
        return frozenset(found | ({_PICTURES} if names_more_than_text(self._config) else set()))

    def _layers(self) -> int:
        return self._number("num_hidden_layers", MAX_LAYERS)

    def _head_dim(self) -> int:
        if self._config.get("head_dim") is not None:
            return self._number("head_dim", MAX_PLANE_WIDTH)
        hidden, heads = self._number("hidden_size", 1 << 24), self._number("num_attention_heads", 1 << 16)
        if hidden % heads:
            raise BadInput(f"no head_dim, and hidden_size={hidden} is no multiple of num_attention_heads={heads}")
        return hidden // heads

    def _heads(self) -> int:
        return self._number("num_key_value_heads", MAX_KV_HEADS, self._config.get("num_attention_heads"))

    def _types(self) -> list[str]:
        count, config = self._layers(), self._config
        given = config.get("layer_types")
        if given is not None:
            if not isinstance(given, list) or len(given) < count:
                raise BadInput(f"layer_types={shown(given)}; it has to name each of {count} layers")
            wrong = next((one for one in given if one not in (_FULL, _SLIDING, _CHUNKED, _LINEAR)), None)
            if wrong is not None:
                raise BadInput(f"layer_types has {shown(wrong)}, and what such a layer keeps is not guessed")
            types: list[str] = given[:count]
        elif self._type == "mimo_v2_flash":
            pattern = config.get("hybrid_layer_pattern")
            if not isinstance(pattern, list) or len(pattern) < count or set(pattern) - {0, 1}:
                raise BadInput(f"hybrid_layer_pattern={shown(pattern)}; it has to be 0 or 1 for each of {count} layers")
            types = [_SLIDING if one else _FULL for one in pattern[:count]]
        elif self._type == "llama4" and isinstance(config.get("no_rope_layers"), list) and config["no_rope_layers"]:
            types = [_CHUNKED if one else _FULL for one in config["no_rope_layers"][:count]]
        elif self._type in _PATTERNS:
            types = list(islice(cycle(_PATTERNS[self._type](config)), count))
            if self._type == "gemma4":
                types[-1] = _FULL
        elif self._type in _BY_OPTION:
            first = config.get("max_window_layers", count) if config.get("use_sliding_window") else count
            if not is_whole(first, 0, MAX_LAYERS):
                raise BadInput(f"max_window_layers={shown(first)}; it has to be a whole number")
            types = [_FULL if at < first else _SLIDING for at in range(count)]
        else:
            types = [self._only_type()] * count
        shared = config.get("num_kv_shared_layers") or 0
        if not is_whole(shared, 0, count - 1):
            raise BadInput(f"num_kv_shared_layers={shown(shared)}; it has to be a whole number below {count}")
        return types[: count - shared]

    def _only_type(self) -> str:
        window = self._config.get("sliding_window")
        if window is None:
            return _FULL
        if self._type not in _IN_WINDOW_IF_SHORT:
            raise BadInput(f"sliding_window={shown(window)} and no layer_types: which layers have it is not guessed")
        longest = self._number("max_position_embeddings", MAX_WINDOW)
        return _SLIDING if self._number("sliding_window", MAX_WINDOW) < longest else _FULL

    def _by_type(self) -> tuple[Counter[Any], tuple[StateLayers, ...]]:
        types = self._types()
        heads, head_dim = self._heads(), self._head_dim()
        full = heads, (head_dim, head_dim)
        window = full
        if self._type == "gemma4":
            wide = self._number("global_head_dim", MAX_PLANE_WIDTH, 512)
            is_shared = bool(self._config.get("attention_k_eq_v"))
            few = self._number("num_global_key_value_heads", MAX_KV_HEADS, heads) if is_shared else heads
            full = few, (wide, wide)
        elif self._type == "mimo_v2_flash":
            full = heads, (head_dim, self._number("v_head_dim", MAX_PLANE_WIDTH, head_dim))
            window = (
                self._number("swa_num_key_value_heads", MAX_KV_HEADS, heads),
                (
                    self._number("swa_head_dim", MAX_PLANE_WIDTH, head_dim),
                    self._number("swa_v_head_dim", MAX_PLANE_WIDTH, full[1][1]),
                ),
            )
        kinds: Counter[Any] = Counter()
        linear = 0
        for one in types:
            if one == _FULL:
                kinds[KvKind.FULL, *full] += 1
            elif one == _SLIDING:
                kinds[KvKind.WINDOW, *window, self._number("sliding_window", MAX_WINDOW)] += 1
            elif one == _CHUNKED:
                kinds[KvKind.CHUNK, *full, self._number("attention_chunk_size", MAX_WINDOW)] += 1
            else:
                linear += 1
        return kinds, (self._linear(linear),) if linear else ()

    def _linear(self, layers: int) -> StateLayers:
        if self._type not in _DELTAS:
            raise BadInput(f"layers of linear attention in a {self._type}, and what they keep is not guessed")
        v_heads, k_heads = (self._number(f"linear_num_{one}_heads", 1 << 16) for one in ("value", "key"))
        k_dim, v_dim = (self._number(f"linear_{one}_head_dim", MAX_PLANE_WIDTH) for one in ("key", "value"))
        convolved = 2 * k_heads * k_dim + v_heads * v_dim  # gated delta nets: Q, K and V
        return self._state(layers, convolved, "linear_conv_kernel_dim", (v_heads, v_dim, k_dim))

    def _state(self, layers: int, convolved: int, kernel: str, recurrence: tuple[int, int, int]) -> StateLayers:
        """convolved: channels of the convolution, which looks back one token fewer than its kernel has."""
        shape = self._number(kernel, 1 << 16) - 1, convolved
        return StateLayers(layers, ((shape, DEFAULT_DTYPE), (recurrence, self._state_dtype())))

    def _latents(self) -> Counter[Any]:
        layers = self._layers()
        width = self._number("kv_lora_rank", MAX_PLANE_WIDTH) + self._number("qk_rope_head_dim", MAX_PLANE_WIDTH)
        kinds: Counter[Any] = Counter({(KvKind.LATENT, 1, (width,)): layers})
        if self._type in _INDEXED:
            owned = self._indexed(layers)
            keys = self._number("index_head_dim", MAX_PLANE_WIDTH, 128) + 4
            kinds[KvKind.INDEX, 1, (keys,), 0, "uint8"] += owned
        return kinds

    def _indexed(self, layers: int) -> int:
        pattern = self._config.get("indexer_types") or self._config.get("index_topk_pattern")
        if isinstance(pattern, list | str):
            return sum(one in ("full", "F") for one in pattern[:layers])
        if pattern is not None:
            raise BadInput(f"indexer_types={shown(pattern)}; it has to name each of {layers} layers")
        every = self._number("index_topk_freq", MAX_LAYERS, 1)
        skipped = self._number("index_skip_topk_offset", MAX_LAYERS, 2)
        return sum(max(at - skipped + 1, 0) % every == 0 for at in range(layers))

    def _blocks(self) -> Counter[Any]:
        blocks = self._config["block_configs"]
        if not isinstance(blocks, list) or len(blocks) != self._layers():
            raise BadInput(f"block_configs={shown(blocks)}; it has to describe each of {self._layers()} layers")
        head_dim, heads = self._head_dim(), self._number("num_attention_heads", 1 << 16)
        kinds: Counter[Any] = Counter()
        for at, block in enumerate(blocks):
            attention = block.get("attention") if isinstance(block, dict) else None
            if not isinstance(attention, dict):
                raise BadInput(f"block_configs has no attention for layer {at}")
            if attention.get("no_op") or attention.get("replace_with_linear"):
                continue
            group: Any = attention.get("n_heads_in_group")
            if not is_whole(group, 1, heads) or heads % group:
                raise BadInput(f"n_heads_in_group={shown(group)} of layer {at} does not divide {heads} heads")
            kinds[KvKind.FULL, heads // group, (head_dim, head_dim)] += 1
        return kinds

    def _nemotron(self) -> tuple[Counter[Any], tuple[StateLayers, ...]]:
        pattern = self._config.get("layers_block_type") or self._config.get("hybrid_override_pattern")
        words = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe", _FULL: "attention"}
        found = [words.get(one, one) for one in pattern] if isinstance(pattern, list | str) else []
        wrong = next((one for one in found if one not in words.values()), None)
        if not found or wrong is not None:
            raise BadInput(f"hybrid_override_pattern={shown(pattern)}; it has to name each layer as M, *, - or E")
        kinds: Counter[Any] = Counter()
        head_dim = self._head_dim()
        kinds[KvKind.FULL, self._heads(), (head_dim, head_dim)] += found.count("attention")
        heads, size = self._number("mamba_num_heads", 1 << 16), self._number("ssm_state_size", MAX_PLANE_WIDTH)
        groups, width = self._number("n_groups", 1 << 16), self._number("mamba_head_dim", MAX_PLANE_WIDTH)
        convolved = heads * width + 2 * groups * size  # Mamba 2: X, B and C
        state = self._state(found.count("mamba"), convolved, "conv_kernel", (heads, width, size))
        return +kinds, (state,) if state.layers else ()
