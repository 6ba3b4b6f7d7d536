"""Which way a codec's bytes take, and pages that are not in host memory. The rest is in contract/test_codec.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kvstore
from kv_kernels import host, plain, routes
from kvstore.block.codec import CODECS, Codecs, codec_named
from kvstore.block.errors import BadInput
from kvstore.block.identity import token_bytes
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.client.sidecar_store import open_sidecar
from tiering.clock import SystemClock
from workbench import bench, blank_pages, ids, open_at, random_pages, refused, same_tokens, small_layout

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_gpu(pages: Pages) -> Pages:
    return Pages(
        {layer: [plane.cuda() for plane in planes] for layer, planes in pages.planes.items()},
        pages.table,
        pages.page_tokens,
    )


def on_host(pages: Pages) -> Pages:
    return Pages(
        {layer: [plane.cpu() for plane in planes] for layer, planes in pages.planes.items()},
        pages.table,
        pages.page_tokens,
    )


def test_codecs_have_the_names_they_are_found_by() -> None:
    assert set(CODECS) == {"raw", "int8-kc64"}
    for name in CODECS:
        assert codec_named(name).name == name
    with refused(BadInput, "'zip'", "allowed: int8-kc64, raw"):
        codec_named("zip")


def test_pages_in_host_memory_take_the_fast_way() -> None:
    layout = small_layout()
    torch_pages = random_pages(layout, 1)
    numpy_pages = Pages(
        {layer: [plane.view(torch.uint16).numpy() for plane in planes] for layer, planes in torch_pages.planes.items()},
        [0],
        64,
    )
    for pages in (torch_pages, numpy_pages):
        assert isinstance(codec_named("raw").bind(pages, layout, layout.parts[0]), host.RawCopy)


def test_a_prompt_may_be_stored_from_numpy_and_loaded_into_torch() -> None:
    a = bench()
    ns = a.namespace()
    source = random_pages(ns.layout, 2)
    bits = {layer: [plane.view(torch.uint16).numpy() for plane in planes] for layer, planes in source.planes.items()}
    assert ns.put(ids(128), Pages(bits, np.array([0, 1], dtype=np.int32), 64)).stored == 2
    into = blank_pages(ns.layout, 2)
    with ns.lease(ns.match(np.arange(128))) as lease:
        assert ns.get(lease, into).tokens == 128
    assert same_tokens(into, source, range(128))


class _Way:
    """Of a GPU that no pages are for. Counts its closes."""

    closed = 0

    def bind(self, *_: object) -> None:
        return None

    def close(self, timeout_s: float) -> bool:
        self.closed += 1
        return False


def test_a_way_to_a_gpu_is_made_once_and_when_it_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    way = _Way()

    def open_gpu(index: int) -> _Way:
        asked.append(index)
        if index == 1:
            raise RuntimeError("CUDA out of memory\nand much more")
        return way

    codecs = Codecs(open_gpu)
    layout = small_layout()
    devices: routes.Devices = codecs._way
    assert isinstance(codecs("raw").bind(random_pages(layout, 1), layout, layout.parts[0]), host.RawCopy) and not asked
    assert devices(torch.device("cuda", 0)) is devices(torch.device("cuda", 0)) is way
    assert devices(torch.device("cuda", 1)) is devices(torch.device("cuda", 1)) is None
    assert devices(torch.device("cpu")) is devices(torch.device("meta")) is None and asked == [0, 1]
    (record,) = caplog.records
    assert record.getMessage().endswith("through plain torch, which is slow: CUDA out of memory")
    codecs.close()
    codecs.close()
    assert way.closed == 1 and "did not finish its transfers within 10 seconds" in caplog.records[1].getMessage()
    assert devices(torch.device("cuda", 0)) is None and asked == [0, 1]


def test_a_store_ends_the_ways_before_its_memory_goes(tmp_path: Path) -> None:
    seen: list[bool] = []
    store = open_at(tmp_path, dram="16MiB", before_close=lambda: seen.append(store.closed))
    other = open_sidecar(
        str(tmp_path / "none.sock"),
        codecs=codec_named,
        clock=SystemClock(),
        session="5e" * 16,
        before_close=lambda: seen.append(other.closed),
    )
    store.for_tenant("another").close()
    other.close()
    assert seen == [False, False] and store.closed and other.closed


def test_pages_on_a_device_without_a_way_go_through_plain_torch() -> None:
    layout = small_layout()
    planes = {layer: [torch.empty(2, 64, 2, 8, dtype=torch.bfloat16, device="meta")] * 2 for layer in layout.layers}
    for devices in (None, lambda device: None, lambda device: _Way()):
        coder = codec_named("raw", devices).bind(Pages(planes, [0, 1], 64), layout, layout.parts[0])
        assert isinstance(coder, plain.PlainCopy)


@no_gpu
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize(
    "layout",
    [
        small_layout(),
        small_layout(kv_heads=4, head_shards=2, layer_shards=2),
        Layout.mla(layers=2, latent_dim=24, rope_dim=8, dtype="bfloat16"),
        small_layout(dtype="float8_e4m3fn"),
    ],
    ids=["one part", "by head and layer", "latent", "float8"],
)
@pytest.mark.parametrize("way", ["streams", "plain torch"])
def test_pages_on_a_gpu_hold_the_same_bits(layout: Layout, page_tokens: int, way: str) -> None:
    a = bench()
    ns = a.namespace(layout)
    codecs = Codecs(kvstore._open_gpu if way == "streams" else lambda index: None)
    ns = NamespaceHandle(a.door(), ns.namespace, codecs("raw"))
    source = random_pages(layout, 3, page_tokens)
    assert ns.put(ids(192), on_gpu(source)).stored == 3
    from_host, on_device = blank_pages(layout, 3, page_tokens), on_gpu(blank_pages(layout, 3, page_tokens))
    with ns.lease(ns.match(ids(192))) as lease:
        assert ns.get(lease, from_host).tokens == ns.get(lease, on_device).tokens == 192
        tail = on_gpu(blank_pages(layout, 3, page_tokens))
        assert ns.get(lease, Pages(tail.planes, list(tail.table)[:-1], page_tokens), page_tokens).tokens == 192
    assert same_tokens(from_host, source, range(192)) and same_tokens(on_host(on_device), source, range(192))
    assert same_tokens(on_host(tail), source, range(page_tokens, 192), offset=page_tokens)
    a.store.check()
    codecs.close()


@no_gpu
def test_pages_partly_on_a_gpu() -> None:
    """The planes of one layer may lie on different devices; addresses of one must not be used on another."""
    a = bench()
    ns = a.namespace()
    source = random_pages(ns.layout, 2)
    mixed = Pages({layer: [planes[0], planes[1].cuda()] for layer, planes in source.planes.items()}, [0, 1], 64)
    assert ns.put(ids(128), mixed).stored == 2
    into = blank_pages(ns.layout, 2)
    with ns.lease(ns.match(ids(128))) as lease:
        assert ns.get(lease, into).tokens == 128
    assert same_tokens(into, source, range(128))


@no_gpu
def test_token_ids_on_a_gpu_are_one_clear_line() -> None:
    with refused(BadInput, "Tensor", "host memory"):
        token_bytes(torch.tensor([1, 2], device="cuda"))
