"""8-bit codecs through the five verbs: what comes back, what is not stored and why, what needs `raw`."""

from __future__ import annotations

import pytest

from kvstore import MissReason
from kvstore.block.codec import codec_named, default_codec
from kvstore.block.errors import BadInput
from kvstore.block.layout import KvGroup, Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import PutResult
from workbench import Bench, bench, blank_pages, ids, one_line, plausible_pages, same_tokens, small_layout

LAYOUT = small_layout(kv_heads=4, head_shards=2, layer_shards=2)
CODECS = ["int8-kc64"]


@pytest.fixture
def a() -> Bench:
    return bench()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_a_prompt_comes_back_within_its_bound_and_always_the_same(a: Bench, codec: str, page_tokens: int) -> None:
    ns = a.namespace(LAYOUT, codec=codec)
    source = plausible_pages(LAYOUT, 3, page_tokens)
    assert ns.put(ids(192), source) == PutResult(0, 3, None, None)
    whole, tail, again = (blank_pages(LAYOUT, 3, page_tokens) for _ in range(3))
    with ns.lease(ns.match(ids(192))) as lease:
        assert ns.get(lease, whole).tokens == ns.get(lease, again).tokens == 192
        some = Pages(tail.planes, list(tail.table)[:-1], page_tokens)
        assert ns.get(lease, some, page_tokens).tokens == 192
    assert same_tokens(whole, again, range(192))
    assert same_tokens(tail, whole, range(page_tokens, 192), offset=page_tokens)
    for layer, planes in source.planes.items():
        for plane, want in enumerate(planes):
            got = whole.planes[layer][plane]
            apart = (got.float() - want.float()).abs().max()
            assert 0 < apart < 0.5 * 2 * want.float().abs().max() / 255 + 2**-8 * want.float().abs().max()
    a.store.check()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("layer", LAYOUT.layers)
@pytest.mark.parametrize("flawed", [0, 1, 2])
def test_a_put_ends_before_a_block_that_cannot_be_written(a: Bench, value: float, layer: int, flawed: int) -> None:
    ns = a.namespace(LAYOUT, codec="int8-kc64")
    pages = plausible_pages(LAYOUT, 3)
    healthy = pages.planes[layer][1][flawed, 5, 3, 2].clone()
    pages.planes[layer][1][flawed, 5, 3, 2] = value
    reason = MissReason.OUT_OF_RANGE if value == 3e38 else MissReason.NONFINITE
    assert ns.put(ids(192), pages) == PutResult(0, flawed, flawed, reason)
    assert ns.match(ids(192)).blocks == flawed
    a.store.check()
    assert a.store.usage().reservations == 0
    pages.planes[layer][1][flawed, 5, 3, 2] = healthy
    assert ns.put(ids(192), pages) == PutResult(flawed, 3 - flawed, None, None)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_float_of_16_or_32_bits_needs_raw(a: Bench, codec: str) -> None:
    layout = small_layout(dtype="float8_e4m3fn")
    with pytest.raises(BadInput) as caught:
        a.namespace(layout, codec=codec)
    assert one_line(caught.value, codec, "float8_e4m3fn", "codec='raw'")
    assert a.store.usage().blocks == 0
    a.namespace(layout, codec="raw")


def test_each_codec_has_its_namespace(a: Bench) -> None:
    pages = plausible_pages(LAYOUT, 1)
    for codec in ("raw", *CODECS):
        assert a.namespace(LAYOUT, codec=codec).put(ids(64), pages).stored == 1
    assert a.store.usage().blocks == 2
    other = a.namespace(LAYOUT, codec="raw").match(ids(64))
    assert other.blocks == 1


def test_adapters_take_8_bits_where_they_can() -> None:
    assert default_codec(small_layout()) == default_codec(small_layout(dtype="float32")) == "int8-kc64"
    assert default_codec(small_layout(dtype="float8_e5m2")) == "raw"
    mixed = Layout((KvGroup("a", (0,), 1, (8, 8), "float16"), KvGroup("b", (1,), 1, (8, 8), "uint8")))
    assert default_codec(mixed) == "raw"
    assert codec_named(default_codec(mixed)).name == "raw"


@pytest.mark.parametrize("given", ["int8", "INT8-KC64", "", None, 8, ["raw"]])
def test_a_codec_that_does_not_exist_is_one_line(given: object) -> None:
    with pytest.raises(BadInput) as caught:
        codec_named(given)  # type: ignore[arg-type]
    assert one_line(caught.value, f"codec {given!r}", "int8-kc64, raw")
