"""Shapes of blocks: how layers and heads are cut into parts, how large they are, and which sizes are possible."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block.errors import BadInput
from kvstore.block.layout import (
    DTYPE_BYTES,
    MAX_BLOCK_TOKENS,
    MAX_GROUPS,
    MAX_KV_HEADS,
    MAX_LAYER_NUMBER,
    MAX_LAYERS,
    MAX_NAME_CHARACTERS,
    MAX_PARTS,
    MAX_PLANE_WIDTH,
    MAX_WINDOW,
    Attention,
    KvGroup,
    Layout,
    check_block_tokens,
    default_block_tokens,
)
from workbench import one_line, refused


def llama(**options: Any) -> Layout:
    """The shape of an 8B model with grouped-query attention."""
    shape: dict[str, Any] = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return Layout.gqa(**{**shape, **options})


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_grouped_query_attention() -> None:
    (part,) = llama().parts
    assert part.plane_bytes == (8 * 64 * 128 * 2,) * 2
    assert part.slice_bytes == 256 << 10 and part.raw_bytes == 8 << 20
    assert llama().raw_bytes == 64 * 32 * 2 * 8 * 128 * 2  # tokens, layers, K and V, heads, width, bytes
    assert llama().layers == tuple(range(32))


def test_multi_head_and_multi_query_attention() -> None:
    assert llama(kv_heads=32).raw_bytes == 4 * llama().raw_bytes
    assert llama(kv_heads=1).raw_bytes == llama().raw_bytes // 8


def test_a_latent_is_one_plane_of_one_head() -> None:
    layout = Layout.mla(layers=61, latent_dim=512, rope_dim=64, dtype="bfloat16")
    (part,) = layout.parts
    assert part.kv_heads == 1 and part.plane_bytes == (64 * 576 * 2,)
    assert layout.raw_bytes == 61 * 64 * 576 * 2


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_block_is_as_large_as_its_numbers(dtype: str) -> None:
    layout = llama(dtype=dtype, layers=1)
    assert layout.raw_bytes == 2 * 8 * 64 * 128 * DTYPE_BYTES[dtype]
    assert layout.groups[0].element_bytes == DTYPE_BYTES[dtype]


def test_the_sizes_of_numbers() -> None:
    assert DTYPE_BYTES == {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "uint8": 1,
        "int8": 1,
    }


# Parts ----------------------------------------------------------------------------------------------------------------


@given(
    layers=st.integers(1, 20),
    kv_heads=st.integers(1, 12),
    head_shards=st.integers(1, 24),
    layer_shards=st.integers(1, 20),
)
@settings(max_examples=200)
def test_parts_cover_every_layer_and_head_exactly_once(
    layers: int, kv_heads: int, head_shards: int, layer_shards: int
) -> None:
    shards = min(head_shards, kv_heads)
    possible = kv_heads % shards == 0 and head_shards % shards == 0 and layer_shards <= layers
    try:
        layout = llama(layers=layers, kv_heads=kv_heads, head_shards=head_shards, layer_shards=layer_shards)
    except BadInput as error:
        assert not possible and one_line(error, "give")
        return
    assert possible
    covered = Counter(
        (layer, head)
        for part in layout.parts
        for layer in part.layers
        for head in range(part.head_start, part.head_stop)
    )
    assert covered == Counter({(layer, head): 1 for layer in range(layers) for head in range(kv_heads)})
    assert [part.index for part in layout.parts] == list(range(shards * layer_shards))
    assert all(part.layers and part.kv_heads for part in layout.parts)
    assert layout.raw_bytes == llama(layers=layers, kv_heads=kv_heads).raw_bytes
    sizes = [len(part.layers) for part in layout.parts]
    assert max(sizes) - min(sizes) <= 1


def test_heads_that_every_rank_has_are_stored_once() -> None:
    assert len(llama(kv_heads=2, head_shards=8).parts) == 2
    assert len(llama(kv_heads=1, head_shards=8).parts) == 1
    assert llama(kv_heads=2, head_shards=8).describe() == llama(kv_heads=2, head_shards=2).describe()


def test_groups_are_cut_one_after_the_other() -> None:
    full = KvGroup("full", (1, 3), 4, (64, 64), "bfloat16")
    latent = KvGroup("latent", (0, 2), 1, (96,), "float16")
    layout = Layout((full, latent), head_shards=4, layer_shards=2)
    assert layout.layers == (0, 1, 2, 3)
    assert [(part.group.name, part.layers, part.head_start) for part in layout.parts] == [
        *[("full", (1,), head) for head in range(4)],
        *[("full", (3,), head) for head in range(4)],
        ("latent", (0,), 0),
        ("latent", (2,), 0),
    ]


# Windows --------------------------------------------------------------------------------------------------------------


def test_a_window_is_part_of_what_a_layout_says_of_itself() -> None:
    full = KvGroup("full", (1,), 4, (64, 64), "bfloat16")
    sliding = KvGroup("sliding", (0, 2), 4, (64, 64), "bfloat16", Attention.SLIDING, 512)
    assert Layout((full, sliding)).describe()["groups"] == [
        ["full", [1], 4, [64, 64], "bfloat16", "full"],
        ["sliding", [0, 2], 4, [64, 64], "bfloat16", "sliding", 512],
    ]
    assert Layout((full, sliding)).raw_bytes == 3 * 2 * 4 * 64 * 64 * 2, "a block holds all of its tokens"


def test_rows_of_many_tokens_are_part_of_what_a_layout_says_of_itself_and_make_it_smaller() -> None:
    latent = KvGroup("latent", (1,), 1, (96,), "bfloat16", row_tokens=16)
    chunk = KvGroup("chunk", (2,), 2, (8, 4), "bfloat16", Attention.CHUNKED, 8192)
    state = KvGroup("state", (0, 3), 1, (1000, 24), "uint8", Attention.STATE, row_tokens=784)
    layout = Layout((latent, chunk, state), page_tokens=784)
    assert layout.describe()["groups"] == [
        ["latent", [1], 1, [96], "bfloat16", "full", 0, 16],
        ["chunk", [2], 2, [8, 4], "bfloat16", "chunked", 8192],
        ["state", [0, 3], 1, [1000, 24], "uint8", "state", 0, 784],
    ]
    assert [part.rows for part in layout.parts] == [49, 784, 1]
    assert [part.raw_bytes for part in layout.parts] == [49 * 96 * 2, 784 * 2 * 12 * 2, 2 * 1024]


@pytest.mark.parametrize(
    ("kind", "window", "needed"),
    [
        ("full", 0, [0, 0, 0]),
        ("sliding", 1, [64, 128, 192]),
        ("sliding", 100, [0, 29, 93]),
        ("chunked", 128, [0, 128, 128]),
        ("chunked", 192, [0, 0, 192]),
        ("state", 0, [0, 64, 128]),
    ],
)
def test_what_a_prefix_needs_of_each_kind(kind: Attention, window: int, needed: list[int]) -> None:
    group = KvGroup("x", (0,), 1, (8,), "uint8", kind, window, 64 if kind == "state" else 1)
    assert [group.needed_from(end) for end in (64, 128, 192)] == needed


# Block sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_tokens", "block_tokens"),
    [(1, 64), (16, 64), (32, 64), (64, 64), (128, 128), (256, 256), (3, 192), (48, 192), (96, 192), (1024, 1024),
     (63, 4032), (80, 80), (127, 127), (784, 784), (544, 544), (1040, 1040), (8304, 8304)],
)  # fmt: skip
def test_the_default_block_is_of_64s_unless_the_page_forbids_it(page_tokens: int, block_tokens: int) -> None:
    assert default_block_tokens(page_tokens) == block_tokens
    assert llama(page_tokens=page_tokens).block_tokens == block_tokens


@given(st.integers(1, 4200), st.integers(-64, 4300))
@settings(max_examples=200)
def test_a_block_is_a_multiple_of_the_page(page_tokens: int, block_tokens: int) -> None:
    try:
        check_block_tokens(block_tokens, page_tokens)
    except BadInput as error:
        assert block_tokens < 1 or block_tokens % page_tokens or block_tokens > MAX_BLOCK_TOKENS
        if page_tokens <= MAX_BLOCK_TOKENS:
            default = default_block_tokens(page_tokens)
            assert one_line(error, f"block_tokens={block_tokens}", f"use {default}")
            check_block_tokens(default, page_tokens)  # what the message advises is possible
        else:
            assert one_line(error, f"page_tokens={page_tokens}", "at most 16384")
    else:
        assert block_tokens % page_tokens == 0 < block_tokens <= MAX_BLOCK_TOKENS


FULL = KvGroup("full", (0, 1), 2, (8, 8), "bfloat16")


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda: llama(block_tokens=100, page_tokens=8), ("block_tokens=100", "multiple of 8", "use 64")),
        (lambda: llama(block_tokens=64, page_tokens=48), ("page of 48", "multiple of 48", "use 192")),
        (lambda: llama(block_tokens=32768), ("32768", "at most 16384")),
        (lambda: llama(page_tokens=0), ("page_tokens=0", "1 or more")),
        (lambda: llama(page_tokens=16385), ("page_tokens=16385", "16384")),
        (lambda: llama(layers=0), ("'full'", "distinct layer numbers")),
        (lambda: llama(kv_heads=0), ("0 KV heads", "1 or more")),
        (lambda: llama(head_dim=0), ("(0, 0)", "head_dim")),
        (lambda: llama(dtype="float64"), ("'float64'", "bfloat16", "int8")),
        (lambda: llama(head_shards=3), ("head_shards=3", "8 KV heads", "divisor")),
        (lambda: llama(head_shards=12), ("head_shards=12", "8 KV heads")),
        (lambda: llama(head_shards=0), ("head_shards=0",)),
        (lambda: llama(layer_shards=0), ("layer_shards=0", "1 to 32")),
        (lambda: llama(layer_shards=33), ("layer_shards=33", "1 to 32")),
        (lambda: Layout(()), ("at least one group",)),
        (lambda: Layout((FULL, FULL)), ("one group only",)),
        (lambda: KvGroup("full", (1, 1), 2, (8, 8), "bfloat16"), ("(1, 1)", "distinct")),
        (lambda: KvGroup("full", (-1,), 2, (8, 8), "bfloat16"), ("(-1,)", "from 0 up")),
        (lambda: KvGroup("full", (0,), 2, (8, 8, 8), "bfloat16"), ("(8, 8, 8)", "MLA")),
        (lambda: KvGroup("full", (0,), 2, (), "bfloat16"), ("()", "MLA")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", window=5), ("'x'", "full", "window=5", "Attention.SLIDING")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", Attention.SLIDING), ("sliding", "window=0", "1 token or more")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", Attention.CHUNKED), ("chunked", "window=0", "1 token or more")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", Attention.STATE, 5), ("state", "window=5", "none with any other")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", row_tokens=0), ("'x'", "row_tokens=0", "at most 16384")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", row_tokens=16385), ("row_tokens=16385",)),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", row_tokens=4.0), ("row_tokens=4.0",)),
        (lambda: Layout((KvGroup("x", (0,), 2, (8,), "int8", row_tokens=5),)), ("rows of 5 tokens", "divide")),
        (lambda: Layout((KvGroup("x", (0,), 2, (8,), "int8", "state", 0, 32),)), ("'x' (state)", "32", "one row")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", Attention.SLIDING, -4), ("window=-4", "1 token or more")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", Attention.SLIDING, 0.5), ("window=0.5", "1 token or more")),
        (lambda: KvGroup("x", (0,), 2, (8,), "int8", Attention.FULL, -4), ("window=-4",)),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_one_clear_line(make: Any, fragments: tuple[str, ...]) -> None:
    with refused(BadInput, *fragments):
        make()


def test_a_layout_has_bounds_and_they_may_be_reached() -> None:
    """What is within them can be named by every header; what is beyond comes from nobody who means it."""
    small: dict[str, Any] = {"kv_heads": 1, "head_dim": 8, "dtype": "int8"}
    assert len(Layout.gqa(layers=MAX_PARTS, layer_shards=MAX_PARTS, **small).parts) == MAX_PARTS
    assert len(Layout.gqa(layers=MAX_LAYERS, **small).layers) == MAX_LAYERS
    groups = tuple(KvGroup(f"g{n}", (n,), 1, (8,), "int8") for n in range(MAX_GROUPS + 1))
    assert len(Layout(groups[:-1]).groups) == MAX_GROUPS
    for make in (
        lambda: Layout.gqa(layers=MAX_PARTS + 1, layer_shards=MAX_PARTS + 1, **small),
        lambda: Layout.gqa(
            layers=2, kv_heads=MAX_PARTS, head_dim=8, dtype="int8", head_shards=MAX_PARTS, layer_shards=2
        ),
        lambda: Layout.gqa(layers=MAX_LAYERS + 1, **small),
        lambda: Layout(groups),
        lambda: Layout((FULL, KvGroup("x", tuple(range(2, MAX_LAYERS + 1)), 1, (8,), "int8"))),
        lambda: KvGroup("x", (MAX_LAYER_NUMBER + 1,), 1, (8,), "int8"),
        lambda: KvGroup("x", (0,), MAX_KV_HEADS + 1, (8,), "int8"),
        lambda: KvGroup("x", (0,), True, (8,), "int8"),
        lambda: KvGroup("x", (0,), 1, (MAX_PLANE_WIDTH + 1,), "int8"),
        lambda: KvGroup("x" * (MAX_NAME_CHARACTERS + 1), (0,), 1, (8,), "int8"),
        lambda: KvGroup("x", (0,), 1, (8,), "int8", Attention.SLIDING, MAX_WINDOW + 1),
        lambda: Layout((FULL,), packing="x" * (MAX_NAME_CHARACTERS + 1)),
    ):
        with refused(BadInput):
            make()
