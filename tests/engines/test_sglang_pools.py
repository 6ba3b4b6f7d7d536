"""Every host pool that SGLang has, by its own interface for storage: served bit for bit, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_uint8
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engines.sglang_cpu  # noqa: F401  prepares what the others import
from engines.sglang_cpu import (
    LAYERS,
    PAGE,
    SGLANG,
    HiCache,
    device_pool,
    hashes_of,
    host_pool,
    prompt_of,
    save_weights,
)
from kvstore.block.errors import BadInput
from service.sidecar import Sidecar
from waiting import wait_until

PoolTransfer = SGLANG["hicache_storage"].PoolTransfer
PAGES, ROW = 8, PAGE * 132


def pool_of(kind: str, layout: str) -> Any:
    """SGLang's own host pool of this class, beside one of the KV; of what a device has, no more than it needs."""
    made = next(vars(module)[kind] for module in SGLANG.values() if kind in vars(module))
    if kind == "MHATokenToKVPoolMXFP8Host":  # no machine without a GPU makes one
        pool = object.__new__(made)
        pool.page_size, pool.size, pool.layout = PAGE, PAGE * PAGES, layout
        return pool
    anchor = host_pool(device_pool("mla" if kind.startswith("DSA") else "mha"), layout, PAGES)
    rows, infos = torch.zeros(LAYERS, PAGES, ROW, dtype=torch.uint8), SGLANG["device_pool_info"]
    plain: dict[str, Any] = {"layout": layout, "pin_memory": False}
    layers: dict[str, Any] = {"start_layer": 0, "end_layer": LAYERS}
    page_rows = infos.PageRowBufferInfo(slab=rows, rows=tuple(rows), row_bytes=ROW, page_size=PAGE, num_pages=PAGES)
    states = infos.MambaStateBufferInfo(temporal=torch.zeros(LAYERS, 8, 2, 256), conv=(torch.zeros(LAYERS, 8, 64, 3),))
    ring = SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(64, 32)), ring_size=8)
    compressed = SimpleNamespace(qsa_compress_ratio=4, qsa_compressed_k_buffer_pool=[torch.zeros(PAGE, 128)] * LAYERS)
    shared = SimpleNamespace(shard_rank=0, shard_size=2, page_size=PAGE)
    unified = SimpleNamespace(
        get_page_envelope_buffer=lambda: rows[0],
        get_contiguous_buf_infos=lambda: ([rows.data_ptr()], [rows.nbytes], [ROW]),
        **{"page_size": PAGE, "size": PAGE * PAGES, "host_capacity_tokens": None, "grow_direction": "up"},
        **layers,
    )
    makers: dict[str, Callable[[], Any]] = {
        "DSAIndexerPoolHost": lambda: made(
            SGLANG["dsa"].make_dsa_indexer_pool_decl(device_pool("dsa")), anchor, pin_memory=False
        ),
        "MHATokenToKOnlyPoolHost": lambda: made(device_pool("k"), anchor, **plain),
        "AsymmetricMHATokenToKVPoolHost": lambda: host_pool(device_pool("asymmetric"), layout, PAGES),
        "MambaPoolHost": lambda: made(states, 1.0, 0, device_capacity=PAGES, **plain),
        "QSAIndexerPoolHost": lambda: made(compressed, anchor),
        "DeepSeekV4PagedHostPool": lambda: made("c4", list(rows), ROW, PAGES, PAGE, **plain),
        "DeepSeekV4StateHostPool": lambda: made("state", [ring] * 3, PAGES, PAGE, **plain),
        "MiniMaxM3Nvfp4IndexKPoolHost": lambda: made(page_rows, anchor, **plain, **layers),
        "MiniMaxM3Nvfp4MainKVPoolHost": lambda: made(
            page_rows, 1.0, 0, PAGE, device_capacity_tokens=PAGE * PAGES, **plain, **layers
        ),
        "LogicalHostPool": lambda: made(PAGE * PAGES, PAGE, layout),
        "UnifiedPageEnvelopeHostPool": lambda: made(unified, 1.0, 0, PAGE, **plain),
        "PageInterleaveHostPool": lambda: made(anchor, SGLANG["page_interleave"].PageInterleavePlacement(shared)),
    }
    return makers[kind]()


FIRST = ("page_first", "page_first_direct")
SERVED = {
    "DSAIndexerPoolHost": FIRST,
    "MHATokenToKOnlyPoolHost": FIRST,
    "AsymmetricMHATokenToKVPoolHost": FIRST,
    "MambaPoolHost": FIRST,
    "QSAIndexerPoolHost": ("layer_first", *FIRST),
    "DeepSeekV4PagedHostPool": ("layer_first", *FIRST),
    "DeepSeekV4StateHostPool": ("layer_first", *FIRST),
    "MiniMaxM3Nvfp4IndexKPoolHost": FIRST,
    "MiniMaxM3Nvfp4MainKVPoolHost": FIRST,
    "LogicalHostPool": ("layer_first",),
}
NOT_LAYER_FIRST = ("DSAIndexerPoolHost", "MHATokenToKOnlyPoolHost", "MiniMaxM3Nvfp4MainKVPoolHost")
NEVER = ("MHATokenToKVPoolMXFP8Host", "UnifiedPageEnvelopeHostPool", "PageInterleaveHostPool")
REFUSED = [*((kind, "layer_first") for kind in NOT_LAYER_FIRST), *((kind, "page_first") for kind in NEVER)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HiCache]:
    directory = tmp_path_factory.mktemp("pools")
    with (
        Sidecar(directory, dram="256MiB") as running,
        HiCache(f"unix:{running.path}", save_weights(directory / "weights"), pages=PAGES).opened() as made,
    ):
        yield made


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, layouts in SERVED.items() for layout in layouts])
def test_pages_of_a_pool_come_back_bit_for_bit(kind: str, layout: str, engine: HiCache) -> None:
    backend, pool, name = engine.backend, pool_of(kind, layout), f"{kind} {layout}"
    backend.register_mem_host_pool_v2(pool, name)
    wait_until(lambda: backend._spaces[name].handle is not None)
    keys, generator = hashes_of(prompt_of(3, seed=len(name))), torch.manual_seed(1)

    def indices(numbers: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(one * pool.page_size, (one + 1) * pool.page_size) for one in numbers])

    def pages(numbers: list[int], *, anew: bool) -> list[torch.Tensor]:
        told = zip(*(pool.get_page_buffer_meta(indices(numbers)) or ([], [])), strict=True)
        found = [torch.frombuffer((c_uint8 * size).from_address(at), dtype=torch.uint8) for at, size in told]
        return [one.random_(generator=generator).clone() if anew else one.clone() for one in found]

    def transfer(numbers: list[int]) -> Any:
        return PoolTransfer(name, indices(numbers), keys=keys)

    written = pages([5, 1, 6], anew=True)
    assert backend.batch_exists_v2(keys, [transfer([5, 1, 6])]).kv_hit_pages == 0
    assert backend.batch_set_v2([transfer([5, 1, 6])]) == {name: [True] * 3}
    kept = pages([0, 1, 3, 5], anew=True)
    assert backend.batch_get_v2([transfer([7, 2, 4])]) == {name: [True] * 3}
    assert all(map(torch.equal, pages([7, 2, 4], anew=False), written))
    assert all(map(torch.equal, pages([0, 1, 3, 5], anew=False), kept)), "and no other page"


@pytest.mark.parametrize(("kind", "layout"), REFUSED)
def test_a_pool_that_is_not_served_is_refused_in_one_line(kind: str, layout: str, engine: HiCache) -> None:
    with pytest.raises(BadInput, match=f"kind {kind} in layout '{layout}' is not served.*: ") as raised:
        engine.backend.register_mem_host_pool_v2(pool_of(kind, layout), "refused")
    assert "\n" not in str(raised.value) and "refused" not in engine.backend.registered_pools
