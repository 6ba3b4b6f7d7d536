"""SGLang's host pools, cache controller and storage factory on a machine without a GPU.

The package is installed without its dependencies, which are for GPUs. Of these torchvision alone is asked for when the
caches are imported, for picture models: it is left blank for that time. `sglang` itself, whose first lines load its
server, is entered by its folder. Nothing of the caches is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from engines.sglang_whole import StandIns
from kvstore.client.socket_door import CallLimits
from waiting import wait_until

SECONDS = 60
BLANK = "torchvision"
MODULES = (
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.storage.backend_factory",
    "sglang.srt.mem_cache.device_pool_info",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.memory_pool_host",
    *(
        f"sglang.srt.mem_cache.pool_host.{name}"
        for name in "mha mla dsa group mamba mha_mxfp8 minimax_m3_nvfp4 page_interleave qsa unified".split()
    ),
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "sglang.srt.managers.scheduler_components.weight_updater",
    "sglang.srt.utils.weight_checker",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.runtime_context",
)


def imported() -> dict[str, ModuleType]:
    """SGLang's modules, by the last part of their names (of two, the later)."""
    if "sglang" not in sys.modules:
        spec = importlib.util.find_spec("sglang")
        assert spec is not None and spec.origin is not None
        package = ModuleType("sglang")
        package.__path__ = [str(Path(spec.origin).parent)]
        sys.modules["sglang"] = package
        importlib.import_module("transformers").AutoProcessor  # noqa: B018  it must not see the blank module
        with StandIns(BLANK):
            for name in MODULES:
                importlib.import_module(name)
    return {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}


SGLANG = imported()
sys.modules["sglang.srt.mem_cache.pool_host.base"].HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # type: ignore[attr-defined]
"""SGLang would leave 10 GiB free for others, which engines that are tested beside this one may have."""
PAGE, LAYERS, HEADS, WIDTH = 64, 4, 2, 64
LATENT, ROPE = 64, 64
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = MHA_LAYOUTS[:3]
"""Those that SGLang can be started with. `page_first_kv_split` is of Ascend devices, whose buffers it needs."""


def device_pool(kind: str, pages: int = 4) -> Any:
    more = {
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    pools = SGLANG["memory_pool"]
    latents = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
    if kind == "mla":
        return pools.MLATokenToKVPool(PAGE * pages, **latents, **more)
    if kind == "dsa":
        with SGLANG["runtime_context"].get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
            wide = {"kv_cache_dim": LATENT + ROPE, "index_head_dim": 128}
            return pools.DSATokenToKVPool(PAGE * pages, **latents, **wide, **more)
    if kind == "k":
        return pools.MHATokenToKOnlyPool(PAGE * pages, head_num=1, head_dim=WIDTH, **more)
    narrow = {"v_head_dim": WIDTH // 2} if kind == "asymmetric" else {}
    return pools.MHATokenToKVPool(PAGE * pages, head_num=HEADS, head_dim=WIDTH, **narrow, **more)


def host_pool(device: Any, layout: str, pages: int, seed: int = 1) -> Any:
    """SGLang's host pool behind it, with numbers that tell every byte from every other."""
    info = device.get_device_pool_infos()[0].buffer_info
    is_mla = isinstance(device, SGLANG["memory_pool"].MLATokenToKVPool)
    made = SGLANG["mla"].MLATokenToKVPoolHost if is_mla else SGLANG["mha"].get_mha_host_pool_cls(info)
    layers: dict[str, Any] = {"device_capacity_tokens": device.size, "start_layer": 0, "end_layer": LAYERS}
    layers |= {"target_layer_num": LAYERS} if is_mla else {}
    pool = made(info, 1.0, 0, PAGE, layout, pin_memory=False, device="cpu", host_token_capacity=PAGE * pages, **layers)
    generator = torch.manual_seed(seed)
    for buffer in [pool.kv_buffer] if isinstance(pool.kv_buffer, torch.Tensor) else pool.kv_buffer:
        buffer.view(torch.int16).random_(generator=generator)
    return pool


def page_of(pool: Any, page: int) -> torch.Tensor:
    """Its bytes, as SGLang gives them."""
    flat: torch.Tensor = pool.get_data_page(page * PAGE)
    return flat.view(torch.int16).clone()


class HiCache:
    """SGLang's cache controller with the store behind it, through SGLang's own factory. A context."""

    def __init__(
        self,
        url: str,
        model_dir: Path,
        kind: str = "mha",
        layout: str = "page_first",
        pages: int = 400,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 1,
        **extra: Any,
    ) -> None:
        self.device = device_pool(kind)
        self.pool = host_pool(self.device, layout, pages, seed)
        self._given = {
            "backend_name": "kvstore",
            "module_path": "engine_adapter.sglang_storage",
            "class_name": "KvStoreHiCache",
            "interface_v1": 1,
            "url": url,
            "model_dir": str(model_dir),
            "deadline_ms": 30_000,
            "save_deadline_ms": 30_000,
            **extra,
        }
        self._ranks = {"tp_rank": rank, "tp_size": ranks, "pp_rank": 0, "pp_size": 1}
        made = SGLANG["cache_controller"].HiCacheController
        self.controller = made(self, self.pool, PAGE, None, threading.Event(), io_backend="direct")
        with self.parallel():
            self.controller.attach_storage_backend(
                "dynamic", model_name="tests/model", storage_backend_extra_config=dict(self._given)
            )
        self.backend: Any = self.controller.storage_backend
        for store in self.backend._stores:
            if hasattr(store, "_door"):
                store._door._limits = CallLimits(match=10.0, lease=10.0)

    def __enter__(self) -> HiCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.detach_storage_backend()

    def parallel(self) -> Any:
        """As if this process were that rank's."""
        return SGLANG["runtime_context"].get_parallel().override(**self._ranks, attn_dcp_size=1, attn_dcp_rank=0)

    def get_kvcache(self) -> Any:
        return self.device

    def opened(self) -> HiCache:
        wait_until(lambda: self.backend._spaces["kv"].handle is not None)
        return self

    def write(self, tokens: list[int], first: int = 0, *, tells_prefix: bool = True) -> tuple[int, list[torch.Tensor]]:
        """Back pages of a prompt up, from page `first` on: how many SGLang was told are stored, and their bytes."""
        hashes = hashes_of(tokens)
        indices = self.pool.alloc(PAGE * (len(hashes) - first))
        before = hashes[:first] if tells_prefix else None
        self.controller.write_storage(indices, tokens[first * PAGE :], hashes[first:], before)
        operation = self.controller.ack_backup_queue.get(timeout=SECONDS)
        contents = [page_of(self.pool, int(index) // PAGE) for index in indices[::PAGE]]
        self.pool.free(indices)
        return operation.completed_tokens // PAGE, contents

    def read(
        self, tokens: list[int], prefix_keys: list[str] | None = None, last_hash: str | None = None
    ) -> tuple[int, list[torch.Tensor]]:
        """Look a prompt up and prefetch what was found into pages of other contents: the pages found, and the bytes of
        those that were loaded. prefix_keys, last_hash: of the pages before, which are in SGLang's own cache."""
        self.controller.prefetch("request", tokens, last_hash, prefix_keys)
        operation = self.controller.prefetch_hit_queue.get(timeout=SECONDS)
        found = operation.storage_hit_count // PAGE
        if not found:
            return 0, []
        operation.host_indices = indices = self.pool.alloc(found * PAGE)
        untouched = {page: page_of(self.pool, page) for page in range(self.pool.page_num)}
        for page in {int(index) // PAGE for index in indices[::PAGE]}:
            page_of(self.pool, page)  # what is there is another page's
            del untouched[page]
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while not (told := self.controller.ack_prefetch_queue.get(timeout=SECONDS)).completed_req:
            loaded = told.completed_tokens // PAGE
        assert all(torch.equal(page_of(self.pool, page), was) for page, was in untouched.items()), "no other page"
        contents = [page_of(self.pool, int(index) // PAGE) for index in indices[: loaded * PAGE : PAGE]]
        self.pool.free(indices)
        return found, contents


def hashes_of(tokens: list[int]) -> list[str]:
    """SGLang's names of a prompt's pages."""
    found: list[str] = importlib.import_module("sglang.srt.mem_cache.utils").get_storage_hash_str(tokens, None, PAGE)
    return found


def prompt_of(pages: int, seed: int) -> list[int]:
    """Tokens of a prompt that shares none with those of other seeds."""
    return [seed * 1_000_003 + number for number in range(pages * PAGE)]


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether these are the same pages, bit for bit."""
    return len(found) == len(wanted) and all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def save_weights(directory: Path, seed: int = 0) -> Path:
    """A model's directory, for its fingerprint alone."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((16,), float(seed))}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory
