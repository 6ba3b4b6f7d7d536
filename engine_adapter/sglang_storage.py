"""The store behind SGLang's HiCache: `KvStoreHiCache`, a storage backend of its `dynamic` kind.

SGLang copies pages between the GPU and host pools; this copies them between those pools and the store. It sees pages
and their hashes: SHA-256 over the whole prefix, from a root that is the same in every process. Everything else that
decides a page's bytes is in the namespace, one for each pool and rank. SGLang calls from threads of its own, which may
wait. Must know nothing of how chunks are kept. Any fault of the store becomes a miss here, or `False`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from hashlib import blake2b
from importlib.metadata import version
from itertools import accumulate
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args

import kvstore
from engine_adapter.chunks import (
    ChunkOutcomes,
    ChunkRun,
    ChunkSettings,
    ChunkSpace,
    Milliseconds,
    chunk_layout,
    chunk_planes,
    open_twice,
)
from engine_adapter.model_files import model_fingerprint, snapshot_directory, takes_more_than_text
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.block.errors import BadInput
from kvstore.block.pages import Pages
from kvstore.client.edge import in_one_line
from kvstore.config import read
from kvstore.insight.served import Engine, served

HASH_DIGITS = 64
"""Of a page's hash: SHA-256 as hexadecimal text."""
OF_SGLANG = frozenset(
    "backend_name module_path class_name interface_v1 prefetch_threshold prefetch_timeout_base tp_lcm_size "
    "prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys file_storage_path".split()
)
"""Keys of the extra configuration that SGLang reads."""
SETTINGS = (
    "attention_backend context_length decode_attention_backend dtype enable_deepseek_v4_fp4_indexer "
    "enable_int8_mamba_checkpoint enable_mamba_cache_stochastic_rounding json_model_override_args kv_cache_dtype "
    "linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend mamba_backend mamba_ssm_dtype "
    "model_impl prefill_attention_backend qsa_indexer_dtype quantization quantization_param_path rl_quant_profile "
    "speculative_algorithm speculative_draft_kv_cache_dtype"
).split()
"""SGLang's arguments that decide KV, besides the weights."""
WRITERS = {
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"): (
        "begin_weight_update load_weights_from_distributed update_weights_from_disk update_weights_from_ipc "
        "update_weights_from_tensor"
    ),
    ("sglang.srt.utils.weight_checker", "WeightChecker"): "_reset_tensors",
}
"""Methods that change weights in place, by class. SGLang's scheduler looks these up at each call, so a backend that is
attached later can follow them, too; its own methods it bound at its start."""
_zeros = lru_cache(lambda size: torch.zeros(size, dtype=torch.uint8))
KEPT_FIGURES = 1024
"""Operations whose figures are kept until they are asked for."""
Extra: TypeAlias = hicache_storage.HiCacheStorageExtraInfo | None
Result: TypeAlias = hicache_storage.PoolTransferResult
Keys: TypeAlias = list[str]

_log = logging.getLogger(__name__)


class HiCacheSettings(ChunkSettings, frozen=True):
    """The backend's parameters, in the extra configuration: docs/sglang.md says what they mean."""

    deadline_ms: Milliseconds = 500.0
    save_deadline_ms: Milliseconds = 1000.0


class KvStoreHiCache(hicache_storage.HiCacheStorage):
    """Pages of SGLang's host pools, kept in the store.

    Raises `BadInput`, one line, for parameters that are not those of `HiCacheSettings`, and for an engine or a pool
    whose pages it cannot tell apart with certainty.
    """

    _is_off = False  # of the process: of backends that are attached later, too

    @in_one_line("KvStoreHiCache")
    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        given = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in OF_SGLANG}
        settings = self._settings = read(HiCacheSettings, given, "KvStoreHiCache: ")
        self._config, args = storage_config, None
        with suppress(ValueError):  # none were published in this process
            args = get_server_args()
        self._model, self._facts = engine_facts(args, settings.model_dir)
        self._stores = open_twice(kvstore.open, settings.url, self._facts["engine"])
        self.outcomes = ChunkOutcomes()
        """Pages of all pools by outcome: see `ChunkSpace`."""
        self._spaces: dict[str, ChunkSpace] = {}
        self._metrics = StorageMetrics()
        self.registered_pools: dict[str, Any] = {}
        self._asked_last = ""
        follow_weight_updates()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Register one more pool; its namespace is opened in the background. Raises `BadInput`."""
        name = str(host_pool_name)
        if self._is_off or self.registered_pools.get(name) is host_pool:
            return
        kind, layout = type(host_pool).__name__, host_pool.layout
        hint = "" if layout == "page_first" else " (page_first may be)"
        with in_one_line(f"KvStoreHiCache: a host pool of kind {kind} in layout {layout!r} is not served{hint}"):
            runs, slots = pool_runs(host_pool)
            tokens = self.registered_pools.get("kv", host_pool).page_size
            facts = {
                **self._facts,
                "pool": f"{name}, {kind} {layout} {host_pool.storage_format_tag}",
                "page": f"{tokens} tokens, {host_pool.dtype}",
                "rank": rank_facts(self._config, host_pool, name),
            }
        try:
            layout = chunk_layout(name, tokens, [run.size for run in runs])
        except BadInput as error:
            raise BadInput(f"KvStoreHiCache: {error}; start SGLang with a smaller --page-size") from None
        spec = NamespaceSpec(
            1, "", self._model, layout, "raw", self._settings.weights_epoch, facts, str(self._config.model_name or "")
        )
        self.registered_pools[name] = host_pool
        self._spaces[name] = ChunkSpace(spec, runs, slots, self._stores, self.outcomes)

    def close(self) -> None:
        """Disconnect. SGLang's threads have ended by then. Safe to call again."""
        for space in self._spaces.values():
            space.close()

    @classmethod
    def weights_may_have_changed(cls, how: str) -> None:
        """Neither look up nor store in this process from here on: pages of other weights have the same hashes."""
        if not cls._is_off:
            _log.warning(
                "kvstore: the weights may have changed in place (%s): no page is looked up or stored until SGLang is "
                "started again with these weights",
                how,
            )
        cls._is_off = True

    def _space(self, pool: str) -> ChunkSpace | None:
        return None if self._is_off else self._spaces.get(pool)

    def clear(self) -> bool:
        """Evict every page of these namespaces, from all tiers and for all engines; whether that was done."""
        return all([space.clear() for space in self._spaces.values()])

    def batch_exists(self, keys: Keys, extra_info: Extra = None) -> int:
        """How many leading pages are stored here, or are elsewhere and can be here in time."""
        space, names = self._space("kv"), _names(keys)
        if space is None:
            return 0
        before = getattr(extra_info, "prefix_keys", None) or []
        if before and before[-1] != self._asked_last:  # else these pages were asked for, by the batch before
            space.had(len(before))
        self._asked_last = keys[-1] if keys else ""
        return space.found(names, fetch_ms=self._settings.deadline_ms if _is_first(extra_info) else 0.0)

    def batch_get_v1(self, keys: Keys, host_indices: Any, extra_info: Extra = None) -> list[bool]:
        """Load pages, verified; `False` from the first page on that does not come."""
        return self._load("kv", keys, host_indices, extra_info)

    def batch_set_v1(self, keys: Keys, host_indices: Any, extra_info: Extra = None) -> list[bool]:
        """Store pages; `True` for those that are held, also from before."""
        return self._store("kv", keys, host_indices, extra_info)

    def batch_exists_v2(self, keys: Keys, pool_transfers: Any = None, extra_info: Extra = None) -> Result:
        """The longest prefix of which every pool has what it needs, and all such prefixes."""
        pages = self.batch_exists(keys, extra_info)
        hits, restorable = {"kv": pages} if pages else {}, list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            # Block groups never shorten a prefix, and of a pool that is not reported there is no verdict.
            if restorable and transfer.hit_policy is not PoolHitPolicy.BLOCK_GROUPS:
                good = self._restorable(transfer, _names(keys[:pages]))
                hits.update({str(transfer.name): good[-1]} if good else {})
                restorable = sorted({*restorable} & {*good})
        return Result(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Extra = None) -> dict[str, list[bool]]:
        return {one.name: self._load(str(one.name), one.keys or [], one.host_indices, extra_info) for one in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Extra = None) -> dict[str, list[bool]]:
        """As `batch_set_v1`, of each pool. A pool of trailing pages only does not have the pages before them."""
        stored = {}
        for one in transfers:
            info = extra_info if one.hit_policy is PoolHitPolicy.ALL_PAGES else None
            stored[one.name] = self._store(str(one.name), one.keys or [], one.host_indices, info)
        return stored

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """One page into a flat tensor, verified; None where it does not come."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: Keys, target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """As `get`, page by page; None from the first page on that does not come."""
        done, space, began = 0, self._space("kv"), perf_counter()
        for name, target in zip(_names(keys), target_locations or [], strict=False):
            page = self._flat(target)
            if space is None or page is None or not space.load([name], page, self._settings.deadline_ms):
                break
            done += 1
        self._note(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, "kv", done, began)
        return [*(target_locations or [])[:done], *[None] * (len(keys) - done)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(self, keys: Keys, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """As `set`; the last page first, since what was used last is evicted last."""
        space, names, pages = self._space("kv"), _names(keys), [self._flat(value) for value in values or []]
        if space is None or not len(names) == len(keys) == len(pages):
            return False
        began, each = perf_counter(), reversed(list(zip(names, pages, strict=True)))
        told = [
            space.store([], [name], page, self._settings.save_deadline_ms) if page else ([False], 0)
            for name, page in each
        ]
        self._note(self._metrics.backup_pgs, self._metrics.backup_bandwidth, "kv", sum(new for _, new in told), began)
        return all(held[0] for held, _ in told)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get_stats(self) -> StorageMetrics:
        """Pages and GB/s of each operation since the last call."""
        told, self._metrics = self._metrics, StorageMetrics()
        return told

    def _load(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None, info: Extra) -> list[bool]:
        fetches = pool == PoolName.KV and _is_first(info)
        space, pages, began = self._space(pool), self._pages(pool, keys, host_indices), perf_counter()
        done = space.load(_names(keys), pages, self._settings.deadline_ms, fetches=fetches) if space and pages else 0
        self._note(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, pool, done, began)
        return [True] * done + [False] * (len(keys) - done)

    def _store(self, pool: str, keys: Sequence[str], host_indices: Any, extra_info: Extra) -> list[bool]:
        space, pages, began = self._space(pool), self._pages(pool, keys, host_indices), perf_counter()
        if space is None or pages is None:
            return [False] * len(keys)
        if is_replicated(self._config, self.registered_pools[pool], pool) and not self._config.is_storage_writer:
            return [True] * len(keys)  # another rank writes what all have
        before: list[str] = (extra_info.prefix_keys if extra_info is not None else None) or []
        chain = _names(before) if len(_names(before)) == len(before) else []
        held, new = space.store(chain, _names(keys), pages, self._settings.save_deadline_ms)
        self._note(self._metrics.backup_pgs, self._metrics.backup_bandwidth, pool, new, began)
        return [*held, *[False] * (len(keys) - len(held))]

    def _note(self, counts: list[int], speeds: list[float], pool: str, pages: int, began: float) -> None:
        if pages and self._config.enable_storage_metrics and len(counts) < KEPT_FIGURES:
            counts.append(pages)
            speeds.append(pages * self._spaces[pool].chunk_bytes / 1e9 / max(1e-9, perf_counter() - began))

    def _pages(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> Pages | None:
        space, page = self._space(pool), getattr(self.registered_pools.get(pool), "page_size", 1)
        if space is None or host_indices is None or len(host_indices) != len(keys) * page:
            return None
        first = host_indices[::page].tolist()
        is_good = all(0 <= index < space.slots * page and index % page == 0 for index in first)
        return space.pages([index // page for index in first[: len(_names(keys))]]) if is_good else None

    def _restorable(self, transfer: PoolTransfer, names: list[bytes]) -> list[int]:
        """Lengths of a prefix, in pages, for which this pool has what it needs."""
        space = self._space(str(transfer.name))
        if space is None:
            return []
        if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
            return list(range(1, space.found(names, counts=False) + 1))
        there, trailing = space.which(names), max(1, len(transfer.keys or ()))
        return [end for end in range(1, len(names) + 1) if all(there[max(0, end - trailing) : end])]

    def _flat(self, tensor: Any) -> Pages | None:
        """A tensor that holds one page of the KV as the pool would give it, as pages; None where it holds none."""
        space = self._space("kv")
        is_flat = isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.is_contiguous()
        if space is None or not is_flat or tensor.nbytes != space.chunk_bytes:
            return None
        ends = [0, *accumulate(space.sizes)]
        runs = [ChunkRun(tensor.data_ptr() + at, size, size) for at, size in zip(ends, space.sizes, strict=False)]
        return Pages(chunk_planes(space.block_tokens, runs, 1), [0], space.block_tokens)


def follow_weight_updates() -> None:
    """From here on, a model's runner tells the backends when a client has it change the weights."""
    for (module, kind), names in WRITERS.items():
        writer = getattr(sys.modules.get(module), kind, None)
        for name in names.split() if writer else ():
            plain = getattr(writer, name)
            if not hasattr(plain, "__wrapped__"):
                setattr(writer, name, _telling(plain))


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def update(*args: Any, **kwargs: Any) -> Any:
        KvStoreHiCache.weights_may_have_changed(plain.__name__)  # before: what is copied meanwhile is of neither
        return plain(*args, **kwargs)

    return update


def pool_runs(pool: Any) -> tuple[list[ChunkRun], int]:
    """Where a host pool keeps each page, as it says itself, and how many it has. Raises `ValueError`."""
    page, pages = pool.page_size, pool.size // pool.page_size
    starts = sizes = np.zeros((3, 0), np.int64)
    # Unified memory moves its pages, and KV that ranks share out numbers them over all ranks.
    if pool.shared_allocation_domain is None and pool.logical_size == pool.size:
        wanted = (0, min(1, pages - 1), pages - 1)
        told = pool.get_page_buffer_meta(torch.cat([torch.arange(at * page, (at + 1) * page) for at in wanted]))
        if told is None:  # it stands for other pools, and has no bytes: zeros say that a page is stored
            return [ChunkRun(_zeros(pages * page).data_ptr(), page, page)], pages
        starts, sizes = (np.array(each, np.int64).reshape(3, -1) for each in told)
    steps = np.maximum(starts[1] - starts[0], sizes[0])
    if not starts.size or (starts[0] + (pages - 1) * steps != starts[2]).any():
        raise ValueError("its pages have no fixed places; start SGLang without unified memory and sharded KV")
    runs = [ChunkRun(*map(int, run)) for run in zip(starts[0], steps, sizes[0], strict=True)]
    # Of one buffer in the order of `get_data_page`; where there are several, nothing says which comes first in memory.
    return sorted(runs) if isinstance(getattr(pool, "kv_buffer", None), torch.Tensor) else runs, pages


def is_replicated(config: HiCacheStorageConfig, pool: Any, name: str) -> bool:
    """Whether all tensor-parallel ranks have the same pages: latents, but neither heads nor states."""
    return config.is_mla_model and not hasattr(pool, "head_num") and name != PoolName.MAMBA


def rank_facts(config: HiCacheStorageConfig, pool: Any, name: str) -> str:
    """Which ranks' share of a page a pool has, as text."""
    tp = "any" if is_replicated(config, pool, name) else f"{config.tp_rank} of {config.tp_size}"
    others = f"cp {config.attn_cp_rank} of {config.attn_cp_size}, dcp {config.dcp_rank} of {config.dcp_size}"
    layers = f"layers {getattr(pool, 'start_layer', 'all')} to {getattr(pool, 'end_layer', 'all')}"  # not of states
    pp = f"pp {config.pp_rank} of {config.pp_size}, {layers}"
    return f"tp {tp}, {others}, {pp}"


def engine_facts(args: Any, model_dir: str | None) -> tuple[str, dict[str, str]]:
    """A fingerprint of the weights, and what else decides a page's bytes besides prompt and pool. args: SGLang's own;
    None where this process has none. Raises `BadInput` for an engine whose pages cannot be told apart."""
    if args is None and model_dir is None:
        raise BadInput("KvStoreHiCache: SGLang's arguments are not known here; give the weights as model_dir")
    draft = getattr(args, "speculative_draft_model_path", None)
    try:
        weights = model_dir or snapshot_directory(args.model_path, args.revision, args.download_dir)
        drafting = draft and snapshot_directory(draft, args.speculative_draft_model_revision, args.download_dir)
        takes_more = takes_more_than_text(weights)
    except BadInput as error:
        raise BadInput(f"KvStoreHiCache: {error}; give its directory: as model_dir, or to SGLang as a draft") from None
    found = {
        "lora": getattr(args, "enable_lora", None) or getattr(args, "lora_paths", None),
        "load_format": getattr(args, "load_format", ""),
        "pictures": takes_more and getattr(args, "enable_multimodal", None) is not False,
    }
    if refused := served((), Engine.SGLANG, settings=found).line:
        raise BadInput(f"KvStoreHiCache: {refused}")
    settings = "\n".join(f"{name}={getattr(args, name, None)!r}" for name in SETTINGS)
    return model_fingerprint(weights), {
        "engine": f"sglang {version('sglang')}",
        "draft": model_fingerprint(drafting) if drafting else "",
        "settings": blake2b(settings.encode(), digest_size=32).hexdigest(),
    }


def _is_first(info: Extra) -> bool:
    """Whether pages are a prompt's first ones, as far as is known: others are stored behind those, and are not fetched
    without them."""
    return not getattr(info, "prefix_keys", None)


def _names(keys: Sequence[str]) -> list[bytes]:
    known = [len(key) == HASH_DIGITS and key.isascii() for key in keys]
    return [key.encode() for key in keys[: [*known, False].index(False)]]
