"""What one block of KV looks like: groups, parts and layer slices.

A *layout* belongs to a model in an engine and says which numbers a block holds, never where they lie (that is `Pages`).
A *group* is a set of layers with equal shapes and the same kind of attention. A *part* is what is stored in one frame:
a group's layers from `layer_start` to `layer_stop` for the KV heads from `head_start` to `head_stop`. A block is the
family of all its parts. The payload of a part, which is the order of bytes in every tier and on every wire:

    for each layer of the part:            one *layer slice*, with a digest of its own in the frame's header
        for each plane (K, V; or one latent plane for MLA):
            [kv_head, row, width]          C order, in the group's dtype; a row is of one token, or of `row_tokens`

This file knows no engine, no codec and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import lcm
from numbers import Integral

from kvstore.block.errors import BadInput, shown

BLOCK_TOKENS_UNIT = 64
"""Blocks are multiples of this where the engine's page allows it: 8-bit codecs keep their parameters per 64 tokens."""
LARGEST_DEFAULT_TOKENS = 256
"""A page that would need a larger block than that to share the unit is a block of its own."""

MAX_BLOCK_TOKENS = 16_384

MAX_GROUPS, MAX_LAYERS, MAX_LAYER_NUMBER = 64, 1024, (1 << 16) - 1
MAX_KV_HEADS, MAX_PLANE_WIDTH, MAX_WINDOW = 1 << 12, 1 << 25, 1 << 31
MAX_SHARDS, MAX_PARTS = 1 << 12, 512
"""Layouts come from other processes: these bound what is built from one. Parts: groups x layer shards x head shards, as
many as a slab's header can name."""
MAX_NAME_CHARACTERS = 128
"""Of a group's name, and of a packing."""

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


class Attention(StrEnum):
    """What a group's layers keep of the tokens they have seen; it decides which blocks of a prefix a load needs."""

    FULL = "full"
    SLIDING = "sliding"  # a token sees the last `window` tokens, itself included; a load needs only a prefix's end
    CHUNKED = "chunked"  # a token sees its own chunk of `window` tokens; a load needs the chunk that a prefix ends in
    STATE = "state"  # a recurrent state, as it was behind each block's last token; a load needs the last block's


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with equal KV shapes.

    layers: the model's layer numbers. kv_heads: 1 for MQA and MLA. plane_widths: elements per token and head of each
    plane: (head_dim, head_dim) for K and V, (latent + rope,) for MLA's one plane. dtype: a key of `DTYPE_BYTES`.
    window: tokens. Of a sliding group: the query at position p sees the keys p - window + 1 .. p; of a chunked one: the
    keys from p // window * window on; 0 for any other. row_tokens: tokens that one stored row covers: 1, more for
    compressed latents, and for a state all tokens of the block.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    plane_widths: tuple[int, ...]
    dtype: str
    attention: Attention = Attention.FULL
    window: int = 0
    row_tokens: int = 1

    def __post_init__(self) -> None:
        check_name("the name of a group", self.name)
        for name in ("layers", "plane_widths"):
            given = getattr(self, name)
            if isinstance(given, list | range) and len(given) <= MAX_LAYERS:
                object.__setattr__(self, name, tuple(given))
        if not _are_whole(self.layers, 0, MAX_LAYER_NUMBER) or len(set(self.layers)) != len(self.layers):
            raise BadInput(
                f"group {self.name!r} has layers {shown(self.layers)}; give distinct layer numbers from 0 up, at most "
                f"{MAX_LAYER_NUMBER}"
            )
        if len(self.layers) > MAX_LAYERS:
            raise BadInput(f"group {self.name!r} has {len(self.layers)} layers; give at most {MAX_LAYERS}")
        if not is_whole(self.kv_heads, 1, MAX_KV_HEADS):
            raise BadInput(
                f"group {self.name!r} has {shown(self.kv_heads)} KV heads; give 1 or more, at most {MAX_KV_HEADS}"
            )
        if not _are_whole(self.plane_widths, 1, MAX_PLANE_WIDTH) or len(self.plane_widths) > 2:
            raise BadInput(
                f"group {self.name!r} has plane widths {shown(self.plane_widths)}; give (head_dim, head_dim) for K and "
                f"V, or (latent + rope,) for MLA, each at most {MAX_PLANE_WIDTH}"
            )
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise BadInput(f"KV dtype {shown(self.dtype)} is not known; allowed: {', '.join(DTYPE_BYTES)}")
        if not isinstance(self.attention, str) or self.attention not in list(Attention):
            raise BadInput(
                f"group {self.name!r} has attention {shown(self.attention)}; allowed: {', '.join(Attention)}"
            )
        object.__setattr__(self, "attention", Attention(self.attention))
        has_window = self.attention in (Attention.SLIDING, Attention.CHUNKED)
        least, most = (1, MAX_WINDOW) if has_window else (0, 0)
        if not is_whole(self.window, least, most):
            raise BadInput(
                f"group {self.name!r} has attention {self.attention!s} and window={shown(self.window)}; give a window "
                f"of 1 token or more (at most {MAX_WINDOW}) with Attention.SLIDING or CHUNKED, and none with any other"
            )
        if not is_whole(self.row_tokens, 1, MAX_BLOCK_TOKENS):
            raise BadInput(
                f"group {self.name!r} has row_tokens={shown(self.row_tokens)}; give the tokens that one row covers, 1 "
                f"or more, at most {MAX_BLOCK_TOKENS}"
            )

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def describe(self) -> list[object]:
        """Plain values, for the namespace's digest and for its packed form. Window and rows are named only where they
        say something: other groups keep the digests that they had before there were any."""
        further = [self.window, self.row_tokens] if self.row_tokens != 1 else [self.window] if self.window else []
        shape = [self.name, list(self.layers), self.kv_heads, list(self.plane_widths), self.dtype, str(self.attention)]
        return [*shape, *further]

    def needed_from(self, end: int) -> int:
        """The first token of which a prefix of `end` tokens, in whole blocks, needs these layers' KV."""
        match self.attention:
            case Attention.FULL:
                return 0
            case Attention.SLIDING:
                return max(0, end - self.window + 1)
            case Attention.CHUNKED:
                return end // self.window * self.window
            case Attention.STATE:
                return max(0, end - self.row_tokens)


@dataclass(frozen=True, slots=True)
class Part:
    """The KV of one group, head shard and layer range: what one frame holds. `layers` are the model's numbers."""

    index: int
    group: KvGroup
    layers: tuple[int, ...]
    head_start: int
    head_stop: int
    block_tokens: int
    kv_heads: int = field(init=False)
    """Heads of this shard."""
    rows: int = field(init=False)
    """Of each plane of a block."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.head_stop - self.head_start)
        object.__setattr__(self, "rows", self.block_tokens // self.group.row_tokens)

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane of one layer slice: kv_heads x rows x width x bytes per element."""
        return tuple(self.kv_heads * self.rows * width * self.group.element_bytes for width in self.group.plane_widths)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer slice before any codec."""
        return sum(self.plane_bytes)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all layer slices before any codec."""
        return self.slice_bytes * len(self.layers)

    def alone(self) -> Part:
        """The same part for a process whose pages hold the heads of its own shard and no others."""
        return replace(self, group=replace(self.group, kv_heads=self.kv_heads), head_start=0, head_stop=self.kv_heads)


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a block: groups, block size, and how a block is cut into parts.

    page_tokens: tokens in one of the engine's pages, the least common multiple where groups differ; block_tokens must
    be a multiple of it, by default `default_block_tokens`. head_shards: tensor-parallel ranks that hold different
    heads; with more ranks than KV heads the heads are replicated and stored once. layer_shards: pipeline stages, or a
    way to keep frames small. packing: how the numbers are packed inside a plane, part of the namespace.
    """

    groups: tuple[KvGroup, ...]
    block_tokens: int = 0
    page_tokens: int = 1
    head_shards: int = 1
    layer_shards: int = 1
    packing: str = "planes"
    parts: tuple[Part, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not all(isinstance(one, KvGroup) for one in self.groups):
            raise BadInput(f"groups={shown(self.groups)}; give a tuple of KvGroup")
        if not self.groups:
            raise BadInput("a layout needs at least one group of layers")
        if len(self.groups) > MAX_GROUPS:
            raise BadInput(f"a layout of {len(self.groups)} groups of layers; give at most {MAX_GROUPS}")
        if sum(len(group.layers) for group in self.groups) > MAX_LAYERS:
            raise BadInput(f"a layout of more than {MAX_LAYERS} layers in all its groups; give no more")
        check_name("packing", self.packing)
        for name in ("block_tokens", "page_tokens", "head_shards", "layer_shards"):
            given = getattr(self, name)
            if isinstance(given, Integral) and not isinstance(given, bool):
                object.__setattr__(self, name, int(given))  # numpy's own integers do not go into JSON
        for name in ("head_shards", "layer_shards"):
            if not is_whole(getattr(self, name), -MAX_SHARDS, MAX_SHARDS):  # too few is refused below
                raise BadInput(f"{name}={shown(getattr(self, name))}; give a whole number from 1 to {MAX_SHARDS}")
        numbers = [layer for group in self.groups for layer in group.layers]
        if len(set(numbers)) != len(numbers):
            raise BadInput("a layer may stand in one group only")
        if is_whole(self.block_tokens, 0, 0):
            object.__setattr__(self, "block_tokens", default_block_tokens(self.page_tokens))
        check_block_tokens(self.block_tokens, self.page_tokens)
        for group in self.groups:
            is_state = group.attention is Attention.STATE
            if group.row_tokens != self.block_tokens if is_state else self.block_tokens % group.row_tokens:
                raise BadInput(
                    f"group {group.name!r} ({group.attention}) has rows of {group.row_tokens} tokens in blocks of "
                    f"{self.block_tokens}; rows must divide the block, and a state has one row of all its tokens"
                )
        object.__setattr__(self, "parts", _cut_into_parts(self))

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer number, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def raw_bytes(self) -> int:
        return sum(part.raw_bytes for part in self.parts)

    def parts_of(self, shard: int | None) -> tuple[Part, ...]:
        """The parts of a tensor-parallel rank: of each group its share of the heads, as its own pages have them.

        A group with fewer heads than there are ranks, such as a latent one, is replicated: neighbouring ranks have the
        same share. shard: the rank; None for all parts, for pages that hold all heads. Raises `BadInput`.
        """
        if shard is None:
            return self.parts
        if not isinstance(shard, Integral) or isinstance(shard, bool) or not 0 <= shard < self.head_shards:
            raise BadInput(
                f"shard={shard!r} is none of this layout's head shards; give 0 to {self.head_shards - 1} for a rank's "
                "own heads, or None for pages that hold all heads"
            )
        return tuple(
            part.alone()
            for part in self.parts
            if part.head_start // part.kv_heads == shard * (part.group.kv_heads // part.kv_heads) // self.head_shards
        )

    @staticmethod
    def gqa(
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        block_tokens: int = 0,
        page_tokens: int = 1,
        head_shards: int = 1,
        layer_shards: int = 1,
    ) -> Layout:
        """K and V planes of `kv_heads` heads each: MHA, GQA and (with one head) MQA."""
        _check_layers(layers)
        group = KvGroup("full", tuple(range(layers)), kv_heads, (head_dim, head_dim), dtype)
        return Layout((group,), block_tokens, page_tokens, head_shards, layer_shards)

    @staticmethod
    def mla(
        *,
        layers: int,
        latent_dim: int,
        rope_dim: int,
        dtype: str,
        block_tokens: int = 0,
        page_tokens: int = 1,
        head_shards: int = 1,
    ) -> Layout:
        """One latent plane of latent_dim + rope_dim numbers per token (DeepSeek-V2, arXiv 2405.04434).

        head_shards: ranks. All hold the same plane, so it is one part, and any of them may store it.
        """
        _check_layers(layers)
        for name, given in (("latent_dim", latent_dim), ("rope_dim", rope_dim)):
            if not is_whole(given, 0, MAX_PLANE_WIDTH):
                raise BadInput(f"{name}={shown(given)}; give a whole number from 0 to {MAX_PLANE_WIDTH}")
        group = KvGroup("latent", tuple(range(layers)), 1, (latent_dim + rope_dim,), dtype)
        return Layout((group,), block_tokens, page_tokens, head_shards)

    def describe(self) -> dict[str, object]:
        """Plain values for the namespace's digest: everything that decides what a payload's bytes mean."""
        return {
            "groups": [group.describe() for group in self.groups],
            "parts": [[list(part.layers), part.head_start, part.head_stop] for part in self.parts],
            "packing": self.packing,
        }


def is_whole(value: object, least: int, most: int) -> bool:
    """Whether a value is a whole number (which true and false are not) from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_whole(values: object, least: int, most: int) -> bool:
    return isinstance(values, tuple) and bool(values) and all(is_whole(one, least, most) for one in values)


def check_name(what: str, given: object) -> None:
    """Raise `BadInput` unless it is short, printable text. what: the beginning of the error's text."""
    if not isinstance(given, str) or len(given) > MAX_NAME_CHARACTERS or not given.isprintable():
        raise BadInput(f"{what} is {shown(given)}; give printable text of at most {MAX_NAME_CHARACTERS} characters")


def _check_layers(layers: int) -> None:
    if not is_whole(layers, 0, MAX_LAYERS):
        raise BadInput(f"layers={shown(layers)}; give their number, 1 or more, at most {MAX_LAYERS}")


def default_block_tokens(page_tokens: int) -> int:
    """The smallest multiple of 64 that is also a multiple of the engine's page; the page itself where it is above 64
    and that multiple above `LARGEST_DEFAULT_TOKENS`."""
    if not is_whole(page_tokens, 1, MAX_BLOCK_TOKENS):
        raise BadInput(
            f"page_tokens={shown(page_tokens)} is not a page size; give 1 or more, at most {MAX_BLOCK_TOKENS}"
        )
    common = lcm(page_tokens, BLOCK_TOKENS_UNIT)
    return common if page_tokens < BLOCK_TOKENS_UNIT or common <= LARGEST_DEFAULT_TOKENS else page_tokens


def check_block_tokens(block_tokens: int, page_tokens: int) -> None:
    """Raise `BadInput` unless blocks of this size can be stored and cut from pages of that size."""
    default = default_block_tokens(page_tokens)
    if not is_whole(block_tokens, 1, MAX_BLOCK_TOKENS) or block_tokens % page_tokens:
        raise BadInput(
            f"block_tokens={shown(block_tokens)} does not fit an engine page of {page_tokens} tokens: it must be a "
            f"multiple of {page_tokens}, at most {MAX_BLOCK_TOKENS}; use {default}"
        )


def _cut_into_parts(layout: Layout) -> tuple[Part, ...]:
    count = sum(layout.layer_shards * min(layout.head_shards, group.kv_heads) for group in layout.groups)
    if count > MAX_PARTS:
        raise BadInput(
            f"head_shards={layout.head_shards} and layer_shards={layout.layer_shards} cut a block of "
            f"{len(layout.groups)} groups into {count} parts; {MAX_PARTS} is the most, so give fewer shards"
        )
    parts: list[Part] = []
    for group in layout.groups:
        shards = min(layout.head_shards, group.kv_heads)
        if layout.head_shards < 1 or group.kv_heads % shards or layout.head_shards % shards:
            raise BadInput(
                f"head_shards={layout.head_shards} does not divide the {group.kv_heads} KV heads of group "
                f"{group.name!r}; give a divisor, or a multiple where heads are replicated"
            )
        if not 1 <= layout.layer_shards <= len(group.layers):
            raise BadInput(
                f"layer_shards={layout.layer_shards} is not possible with the {len(group.layers)} layers of group "
                f"{group.name!r}; give 1 to {len(group.layers)}"
            )
        heads = group.kv_heads // shards
        for range_index in range(layout.layer_shards):
            start = len(group.layers) * range_index // layout.layer_shards
            stop = len(group.layers) * (range_index + 1) // layout.layer_shards
            for shard in range(shards):
                parts.append(
                    Part(
                        len(parts),
                        group,
                        group.layers[start:stop],
                        shard * heads,
                        (shard + 1) * heads,
                        layout.block_tokens,
                    )
                )
    return tuple(parts)
