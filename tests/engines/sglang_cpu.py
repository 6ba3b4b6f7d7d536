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
import time
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvstore.client.socket_door import CallLimits

SECONDS = 60
BLANK = "torchvision"
MODULES = (
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.storage.backend_factory",
    "sglang.srt.mem_cache.device_pool_info",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "sglang.srt.mem_cache.pool_host.dsa",
    "sglang.srt.mem_cache.pool_host.group",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "sglang.srt.managers.scheduler_components.weight_updater",
    "sglang.srt.utils.weight_checker",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.runtime_context",
)


class _BlankModule(ModuleType):
    """Has whatever is asked for, and it is good for nothing."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Blanks(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == BLANK else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _BlankModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def imported() -> dict[str, ModuleType]:
    """SGLang's modules, by the last part of their names (of two, the later). Skips the test where SGLang is missing."""
    spec = importlib.util.find_spec("sglang") if "sglang" not in sys.modules else None
    if "sglang" not in sys.modules:
        if spec is None or spec.origin is None:
            pytest.skip(
                "SGLang is not installed here; docs/sglang.md says how these tests are run", allow_module_level=True
            )
        package = ModuleType("sglang")
        package.__path__ = [str(Path(spec.origin).parent)]
        sys.modules["sglang"] = package
        importlib.import_module("transformers").AutoProcessor  # noqa: B018  it must not see the blank module
        blanks = _Blanks()
        sys.meta_path.insert(0, blanks)
        try:
            for name in MODULES:
                importlib.import_module(name)
        finally:
            sys.meta_path.remove(blanks)
            for name in [name for name in sys.modules if name.partition(".")[0] == BLANK]:
                del sys.modules[name]
    return {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}


SGLANG = imported()
sys.modules["sglang.srt.mem_cache.pool_host.base"].HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # type: ignore[attr-defined]
"""SGLang would leave 10 GiB free for others, which engines that are tested beside this one may have."""
PAGE, LAYERS, HEADS, WIDTH = 64, 4, 2, 64
LATENT, ROPE = 64, 64
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_unified")
"""`page_first_kv_split` is of Ascend devices, whose buffers it needs."""


def device_pool(kind: str, pages: int = 4) -> Any:
    """SGLang's pool of a device, which is the CPU here."""
    more = {
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    pools = SGLANG["memory_pool"]
    if kind == "mla":
        return pools.MLATokenToKVPool(PAGE * pages, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, **more)
    return pools.MHATokenToKVPool(PAGE * pages, head_num=HEADS, head_dim=WIDTH, **more)


def host_pool(device: Any, layout: str, pages: int, seed: int = 1) -> Any:
    """SGLang's host pool behind it, with numbers that tell every byte from every other."""
    info = device.get_device_pool_infos()[0].buffer_info
    is_mla = isinstance(device, SGLANG["memory_pool"].MLATokenToKVPool)
    made = SGLANG["mla"].MLATokenToKVPoolHost if is_mla else SGLANG["mha"].MHATokenToKVPoolHost
    layers: dict[str, Any] = {"device_capacity_tokens": device.size, "start_layer": 0, "end_layer": LAYERS}
    layers |= {"target_layer_num": LAYERS} if is_mla else {}
    pool = made(info, 1.0, 0, PAGE, layout, pin_memory=False, device="cpu", host_token_capacity=PAGE * pages, **layers)
    noise = torch.randint(-32768, 32767, pool.kv_buffer.shape, dtype=torch.int16, generator=torch.manual_seed(seed))
    pool.kv_buffer.view(torch.int16).copy_(noise)
    return pool


def page_of(pool: Any, page: int) -> torch.Tensor:
    """Its bytes, by what the layout's name says of the buffer's axes."""
    buffer = pool.kv_buffer.view(torch.int16)
    tokens = slice(page * PAGE, (page + 1) * PAGE)
    is_mla = buffer.ndim == (5 if pool.layout == "page_first_direct" else 4)
    if pool.layout == "page_unified":
        return buffer[page].clone()
    if pool.layout == "layer_first":
        return (buffer[:, tokens] if is_mla else buffer[:, :, tokens]).clone()
    if pool.layout == "page_first":
        return (buffer[tokens] if is_mla else buffer[:, tokens]).clone()
    return (buffer[page] if is_mla else buffer[:, page]).clone()


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
        """As SGLang's allocator."""
        return self.device

    def opened(self) -> HiCache:
        """Return once the store's namespace is open."""
        deadline = time.monotonic() + SECONDS
        while self.backend._spaces["kv"].handle is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
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
