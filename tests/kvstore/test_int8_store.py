"""8-bit codecs through the five verbs: what comes back, what is not stored and why, what needs `raw`."""

from __future__ import annotations

from kvstore.block.codec import codec_named, default_codec
from kvstore.block.layout import KvGroup, Layout
from workbench import Bench, ids, plausible_pages, small_layout

LAYOUT = small_layout(kv_heads=4, head_shards=2, layer_shards=2)
CODECS = ["int8-kc64"]


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
