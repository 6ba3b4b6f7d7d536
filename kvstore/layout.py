"""What one block of KV looks like: groups, parts and layer slices (floor 2).

A *layout* belongs to a model in an engine and says which numbers a block holds, never where they lie (that is `Pages`).
A *group* is a set of layers with equal shapes and the same kind of attention. A *part* is what is stored in one frame:
a group's layers from `layer_start` to `layer_stop` for the KV heads from `head_start` to `head_stop`. A block is the
family of all its parts. The payload of a part, which is the order of bytes in every tier and on every wire:

    for each layer of the part:            one *layer slice*, with a digest of its own in the frame's header
        for each plane (K, V; or one latent plane for MLA):
            [kv_head, token, width]        C order, in the group's dtype

This file knows no engine, no codec and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import gcd
from numbers import Integral

from kvstore.errors import BadInput

BLOCK_TOKENS_UNIT = 64
"""Blocks are multiples of this many tokens: codecs keep their parameters per 64 tokens."""

MAX_BLOCK_TOKENS = 4096

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
    """The kind of attention of a group's layers; it decides which blocks of a prefix a load needs."""

    FULL = "full"
    SLIDING = "sliding"  # a token sees so many of the last ones, itself included; a load needs the end of a prefix only


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with equal KV shapes.

    layers: the model's layer numbers. kv_heads: 1 for MQA and MLA. plane_widths: elements per token and head of each
    plane: (head_dim, head_dim) for K and V, (latent + rope,) for MLA's one plane. dtype: a key of `DTYPE_BYTES`.
    window: tokens, of a sliding group: the query at position p sees the keys p - window + 1 .. p. 0 for any other.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    plane_widths: tuple[int, ...]
    dtype: str
    attention: Attention = Attention.FULL
    window: int = 0

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise BadInput(f"group {self.name!r} has layers {self.layers}; give distinct layer numbers from 0 up")
        if self.kv_heads < 1:
            raise BadInput(f"group {self.name!r} has {self.kv_heads} KV heads; give 1 or more")
        if not 1 <= len(self.plane_widths) <= 2 or min(self.plane_widths) < 1:
            raise BadInput(
                f"group {self.name!r} has plane widths {self.plane_widths}; give (head_dim, head_dim) for K and V, "
                "or (latent + rope,) for MLA"
            )
        if self.dtype not in DTYPE_BYTES:
            raise BadInput(f"KV dtype {self.dtype!r} is not known; allowed: {', '.join(DTYPE_BYTES)}")
        is_right = isinstance(self.window, int) and (self.window > 0) == (self.attention is Attention.SLIDING)
        if not is_right or self.window < 0:
            raise BadInput(
                f"group {self.name!r} has attention {self.attention!s} and window={self.window!r}; give a window of 1 "
                "token or more with Attention.SLIDING, and none with any other"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def window_fields(self) -> tuple[int, ...]:
        """The window where there is one: groups without are described as they were before there were windows."""
        return (self.window,) if self.window else ()


@dataclass(frozen=True, slots=True)
class Part:
    """The KV of one group, head shard and layer range: what one frame holds. `layers` are the model's numbers."""

    index: int
    group: KvGroup
    layers: tuple[int, ...]
    head_start: int
    head_stop: int
    block_tokens: int

    @property
    def kv_heads(self) -> int:
        """Heads of this shard."""
        return self.head_stop - self.head_start

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane of one layer slice: kv_heads x block_tokens x width x bytes per element."""
        return tuple(
            self.kv_heads * self.block_tokens * width * self.group.element_bytes for width in self.group.plane_widths
        )

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

    page_tokens: tokens in one of the engine's pages; block_tokens must be a multiple of it and of 64, and is by default
    the smallest such number. head_shards: tensor-parallel ranks that hold different heads; with more ranks than KV
    heads the heads are replicated and stored once. layer_shards: pipeline stages, or a way to keep frames small.
    packing: how the numbers are packed inside a plane, part of the namespace.
    """

    groups: tuple[KvGroup, ...]
    block_tokens: int = 0
    page_tokens: int = 1
    head_shards: int = 1
    layer_shards: int = 1
    packing: str = "planes"
    parts: tuple[Part, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.groups:
            raise BadInput("a layout needs at least one group of layers")
        numbers = [layer for group in self.groups for layer in group.layers]
        if len(set(numbers)) != len(numbers):
            raise BadInput("a layer may stand in one group only")
        if self.block_tokens == 0:
            object.__setattr__(self, "block_tokens", default_block_tokens(self.page_tokens))
        check_block_tokens(self.block_tokens, self.page_tokens)
        object.__setattr__(self, "parts", _cut_into_parts(self))

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer number, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def raw_bytes(self) -> int:
        """Bytes of one whole block before any codec: all parts."""
        return sum(part.raw_bytes for part in self.parts)

    def parts_of(self, shard: int | None) -> tuple[Part, ...]:
        """What a tensor-parallel rank holds: of each group its share of the heads, as its own pages have them.

        A group of fewer heads than ranks, as a latent one, is held by several: neighbours have the same share. None:
        all parts, for pages that hold all heads. Raises `BadInput`.
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

        head_shards: ranks, all of which hold the same; it is one part, whoever stores it.
        """
        group = KvGroup("latent", tuple(range(layers)), 1, (latent_dim + rope_dim,), dtype)
        return Layout((group,), block_tokens, page_tokens, head_shards)

    def describe(self) -> dict[str, object]:
        """Plain values for the namespace's digest: everything that decides what a payload's bytes mean."""
        return {
            "groups": [
                [
                    group.name,
                    list(group.layers),
                    group.kv_heads,
                    list(group.plane_widths),
                    group.dtype,
                    str(group.attention),
                    *group.window_fields,
                ]
                for group in self.groups
            ],
            "parts": [[list(part.layers), part.head_start, part.head_stop] for part in self.parts],
            "packing": self.packing,
        }


def default_block_tokens(page_tokens: int) -> int:
    """The smallest multiple of 64 that is also a multiple of the engine's page."""
    if page_tokens < 1:
        raise BadInput(f"page_tokens={page_tokens} is not a page size; give 1 or more")
    return page_tokens * BLOCK_TOKENS_UNIT // gcd(page_tokens, BLOCK_TOKENS_UNIT)


def check_block_tokens(block_tokens: int, page_tokens: int) -> None:
    """Raise `BadInput` unless blocks of this size can be stored and cut from pages of that size."""
    smallest = default_block_tokens(page_tokens)
    if smallest > MAX_BLOCK_TOKENS:
        raise BadInput(
            f"page_tokens={page_tokens} would need blocks of {smallest} tokens, and {MAX_BLOCK_TOKENS} is the most; "
            "give a page that shares more factors with 64, e.g. 16, 32 or 64"
        )
    if block_tokens < 1 or block_tokens % smallest or block_tokens > MAX_BLOCK_TOKENS:
        raise BadInput(
            f"block_tokens={block_tokens} does not fit an engine page of {page_tokens} tokens: it must be a multiple "
            f"of {smallest}, at most {MAX_BLOCK_TOKENS}; use {smallest}"
        )


def _cut_into_parts(layout: Layout) -> tuple[Part, ...]:
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
