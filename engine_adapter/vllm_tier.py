"""The store as a secondary tier of vLLM's own offloading: `KvStoreTier` in `secondary_tiers`.

vLLM copies between the GPU and its primary tier in host memory; this tier copies between that memory and the store. It
sees slots of bytes and `OffloadKey`s, which are vLLM's block hashes with a group's number: 256 bits of SHA-256 over the
whole prefix, from a root that must be the same in every process: else this tier serves nothing. All else that decides a
chunk's bytes is in the namespace. vLLM changes this interface between versions: they are pinned, and only this file
knows how they differ. Must know nothing of how chunks are kept.

All methods run in vLLM's scheduler, return at once and never raise because of the store; see `chunks.store`.
"""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from hashlib import blake2b
from logging import getLogger
from types import FrameType
from typing import Any

import numpy as np
import torch
import vllm

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.platforms import current_platform
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as error:
    raise ImportError(
        f"vLLM {vllm.__version__} has no offloading tiers as KvStoreTier knows them ({error}); it is for vLLM 0.28, "
        "0.31 and 0.32. KvStoreConnector (engine_adapter.vllm_connector) may serve this version"
    ) from None

import kvstore
from engine_adapter.chunks.layout import ChunkRun, chunk_layout
from engine_adapter.chunks.space import ChunkOutcomes, ChunkSpace, open_twice
from engine_adapter.chunks.store import ChunkLimits, ChunkState, ChunkStore
from engine_adapter.model_files import model_fingerprint
from engine_adapter.paged.step_plan import NamespaceSpec
from engine_adapter.vllm_config import draft_fingerprint, fingerprint, model_settings, plain, reuse_refused
from kvstore.block.errors import BadInput
from kvstore.client.edge import in_one_line

PINNED_VERSIONS = ("0.28", "0.31", "0.32")
HASHES = ("sha256", "sha256_cbor")
STATE_SETTINGS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode")
HASH_BYTES, GROUP_BYTES = 32, 4
"""Of an `OffloadKey`: the block's hash, and the group's number, big-endian."""
WAIT_SECONDS = 0.001
"""How long a step that finds nothing new may wait for answers: see `ChunkStore.proceed`."""
ANSWERS = dict(zip(ChunkState, (LookupResult.RETRY, LookupResult.HIT, LookupResult.MISS), strict=True))
MODEL_DIR = "give KvStoreTier their directory as model_dir"
CHUNKS_METRIC = "vllm:kv_offload_kvstore_chunks"

_SLOTS_FIELD = next(it.name for it in fields(TransferJob) if it.name in ("chunk_ids", "block_ids"))
"""0.28 calls them blocks, 0.31 and later chunks."""
LOCALITY: Any = getattr(base, "Locality", None)  # from 0.32 on
_RESULT_FIELDS = frozenset(it.name for it in fields(JobResult))
_TIER_PARAMETERS = frozenset(inspect.signature(SecondaryTierManager.__init__).parameters)
_FIXED_ROOT = hasattr(kv_cache_utils, "get_none_hash_seed")
"""From 0.31 on the root of SHA-256 hashes is the same in every process."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The tier's parameters, in its JSON: docs/vllm-tier.md says what they mean."""

    url: str = ""
    model_dir: str | None = None
    weights_epoch: int = 0
    hash_seed: str | None = None
    deadline_ms: float = 50
    load_threads: int = 2
    queued_chunks: int = 1024
    enable_kv_events: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> TierSettings:
        """Raises `BadInput`, one line."""
        unknown = [name for name in given if name not in cls.__slots__]
        if unknown:
            raise BadInput(f"KvStoreTier: {', '.join(map(repr, unknown))} is no parameter of it")
        if not given.get("url"):
            raise BadInput(
                'KvStoreTier: "url" is missing; give the store\'s address, e.g. "unix:/run/kvstore/kvstore.sock"'
            )
        return cls(**given)


class KvStoreTier(SecondaryTierManager):
    """Chunks of vLLM's primary tier, kept in the store.

    Raises `BadInput`, one line, for parameters that are not those of `TierSettings`, and for an engine whose chunks it
    cannot tell apart with certainty.
    """

    medium = Medium.STORAGE

    @in_one_line("KvStoreTier")
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        rest = {"backpressure_detector": backpressure_detector} if "backpressure_detector" in _TIER_PARAMETERS else {}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **rest)
        if LOCALITY and (where := given.pop("locality", None)) is not None:
            self.locality = LOCALITY(str(where).upper())
        settings = TierSettings.of(given)
        hash_seed, model_dir = settings.hash_seed, settings.model_dir
        config = engine_config(offloading_spec.config.engine_id)
        check_engine(config, hash_seed)
        self._hash_seed = None if hash_seed is None else str(hash_seed)  # as PYTHONHASHSEED, it is text
        self._hash_name: str = config.cache_config.prefix_caching_hash_algo
        self._is_root_right: bool | None = None  # vLLM makes the root after its tiers
        memory = np.asarray(primary_kv_view).view(np.uint8)
        model = model_fingerprint(model_dir) if model_dir else fingerprint(config, MODEL_DIR)
        groups = group_numbers(offloading_spec)
        facts = engine_facts(config, offloading_spec, memory.shape[1])
        epoch, name, specs = int(settings.weights_epoch), str(config.model_config.model), list[NamespaceSpec]()
        for number, tokens in groups.items():
            layout = chunk_layout(f"group {number}", tokens * offloading_spec.blocks_per_chunk, [memory.shape[1]])
            specs.append(NamespaceSpec(1, "", model, layout, "raw", epoch, {**facts, "group": str(number)}, name))
        queued, threads = max(1, min(int(settings.queued_chunks), len(memory) // 2)), max(1, int(settings.load_threads))
        limits = ChunkLimits(queued_stores=queued, load_threads=threads, lease_ms=float(settings.deadline_ms))
        runs = [ChunkRun(memory.ctypes.data, memory.strides[0], memory.shape[1])]
        self._stores = open_twice(kvstore.open, settings.url, f"vllm {vllm.__version__}")
        self._outcomes = ChunkOutcomes()
        spaces = [ChunkSpace(spec, runs, len(memory), self._stores, self._outcomes) for spec in specs]
        places = {number.to_bytes(GROUP_BYTES, "big"): position for position, number in enumerate(groups)}
        self._chunks = ChunkStore(spaces, lambda key: places.get(key[HASH_BYTES:], -1), limits, self._outcomes)
        has_events = settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if has_events else None

    def on_new_request(self, req_context: Any) -> base.RequestOffloadingContext:
        """The usual policy: chunks are offered as they are computed."""
        self._check_root()
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Release the chunks that the request asked for and did not load."""
        self._chunks.forget(req_context.req_id)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """HIT for a chunk that is pinned and verified in the store's memory; RETRY while that is being asked."""
        return ANSWERS[self._chunks.ask(req_context.req_id, bytes(key)) if self._is_root_right else ChunkState.MISSING]

    def submit_load(self, job_metadata: Any) -> None:
        """Copy what `lookup` promised into the primary tier's slots, verified."""
        names, slots = map(bytes, job_metadata.keys), getattr(job_metadata, _SLOTS_FIELD)
        self._chunks.load(job_metadata.job_id, job_metadata.req_context.req_id, list(names), slots)

    def submit_store(self, job_metadata: Any) -> None:
        """Copy slots of the primary tier into the store."""
        pairs = list(zip(map(bytes, job_metadata.keys), getattr(job_metadata, _SLOTS_FIELD), strict=True))
        position = getattr(job_metadata.req_context, "get_offload_key_position", None)
        if position is not None:  # 0.28 does not tell which chunk comes first
            pairs.sort(key=lambda pair: position(pair[0]) or 0)
        slots = [int(slot) for _, slot in pairs] if self._is_root_right else []
        self._chunks.store(job_metadata.job_id, [name for name, _ in pairs], slots)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended, each once. Of a load that failed in part the good keys are named; vLLM computes the rest."""
        self._chunks.proceed()
        jobs = self._chunks.finished()
        if not jobs:
            self._chunks.proceed(WAIT_SECONDS)
        results = []
        for job in jobs:
            if not job.is_load and self._events is not None and job.good:
                where = {"locality": self.locality} if LOCALITY else {}
                self._events.append(OffloadingEvent(keys=list(job.good), medium=self.medium, removed=False, **where))
            named: dict[str, Any] = {} if not job.is_load or not job.failed else {"successful_keys": job.good or None}
            if "transfer_bytes" in _RESULT_FIELDS:
                named["transfer_bytes"] = job.size_bytes
            results.append(JobResult(job.number, not job.failed, transfer_time=job.seconds, **named))
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that were stored. Later evictions in the store are not published: a look-up finds out."""
        if self._events:
            events, self._events = self._events, []
            yield from events

    def drain_jobs(self) -> None:
        """Wait until no copy touches the primary tier."""
        self._chunks.drain()

    def shutdown(self) -> None:
        """End all threads and disconnect. Safe to call again."""
        self._chunks.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """One counter, by outcome; see `ChunkSpace`."""
        text = "Chunks by what became of them in the store, and faults of the store, labeled by outcome."
        return {CHUNKS_METRIC: base.OffloadingCounterMetadata(documentation=text, labelnames=("outcome",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts, stats = self._outcomes.take(), OffloadingConnectorStats()
        for outcome, chunks in counts.items():
            stats.increase_counter(CHUNKS_METRIC, chunks, (outcome,))
        return stats if counts else None

    def _check_root(self) -> None:
        """With the first request: check that block hashes start from the same root as in every other process."""
        if self._is_root_right is not None:
            return
        seed = kv_cache_utils.get_none_hash_seed() if _FIXED_ROOT and self._hash_seed is None else self._hash_seed
        expected = get_hash_fn_by_name(self._hash_name)(seed)
        self._is_root_right = bool(getattr(kv_cache_utils, "NONE_HASH", None) == expected)
        if not self._is_root_right:
            _log.error(
                "KvStoreTier is off: vLLM's block hashes do not begin with %s of the seed that this tier knows; start "
                "vLLM with PYTHONHASHSEED set and give the same text to the tier as hash_seed",
                self._hash_name,
            )


def engine_config(engine_id: str) -> Any:
    """vLLM's whole configuration, of the engine that is being built at this moment.

    A tier is handed a summary without much that decides KV: quantization, overrides, LoRA, the hash of blocks. All of
    it is an argument of the connector that is being built, some calls up from here. Raises `BadInput`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        transfer = getattr(found, "kv_transfer_config", None)
        if transfer is not None and transfer.engine_id == engine_id:
            return found
        frame = frame.f_back
    raise BadInput("KvStoreTier: vLLM's configuration was not found; let vLLM build the tier, from secondary_tiers")


def check_engine(config: Any, hash_seed: str | None, version: str = vllm.__version__) -> None:
    """Raise `BadInput`, one line, for an engine whose chunks cannot be told apart by what this tier is given."""
    parallel, hash_name, reason = config.parallel_config, config.cache_config.prefix_caching_hash_algo, ""
    if not version.startswith(tuple(f"{pinned}." for pinned in PINNED_VERSIONS)):
        reason = f"vLLM {version} is installed, and this tier is for {', '.join(PINNED_VERSIONS)}; use KvStoreConnector"
    elif hash_name not in HASHES:
        reason = (
            f"prefix_caching_hash_algo={hash_name} is not cryptographic, and a collision would serve another prompt's "
            f"KV; use {' or '.join(HASHES)}"
        )
    elif not _FIXED_ROOT and hash_seed is None:
        reason = (
            f"block hashes of vLLM {version} begin at random; start vLLM with PYTHONHASHSEED=0 and give the tier "
            '"hash_seed": "0"'
        )
    elif off := reuse_refused(config, "leave the tier out, or switch it on where it was switched off by hand"):
        reason = off
    elif config.lora_config is not None:
        reason = "block hashes name a LoRA adapter, and not what is in it; use KvStoreConnector with LoRA"
    elif not getattr(getattr(config.model_config, "multimodal_config", None), "language_model_only", True):
        reason = (
            "block hashes have what clients call images and the like, and not what they show; use KvStoreConnector, or "
            "start vLLM with --language-model-only"
        )
    elif config.load_config.load_format == "dummy":
        reason = "load_format=dummy makes weights up, which no file tells"
    elif getattr(config, "weight_transfer_config", None) is not None:
        reason = "weights are updated in place, and block hashes do not change with them"
    elif getattr(config.model_config, "enable_sleep_mode", False):
        reason = "with enable_sleep_mode other weights may be there after a sleep, and block hashes do not change"
    elif parallel.world_size > 1 and (parallel.nnodes > 1 or parallel.distributed_executor_backend != "mp"):
        reason = "the primary tier has the KV of this host's workers only; use one host and the executor backend mp"
    if reason:
        raise BadInput(f"KvStoreTier: {reason}")


def group_numbers(spec: Any) -> dict[int, int]:
    """Tokens of a block of each KV group, by the group number at the end of an `OffloadKey`: the group's place in
    vLLM's configuration. vLLM 0.28 does not tell this apart from its place among the offloaded groups."""
    groups = spec.config.groups
    return {int(getattr(group, "group_id", place)): int(group.tokens_per_block) for place, group in enumerate(groups)}


def engine_facts(config: Any, spec: Any, chunk_bytes: int) -> dict[str, str]:
    """What decides a chunk's bytes besides weights and prompt: fields of the namespace, as text."""
    offloading, model, cache = spec.config, config.model_config, config.cache_config
    parallel, speculative, attention = offloading.parallel, config.speculative_config, config.attention_config
    rope = plain(model.hf_config.to_dict())
    depends_on_length = any(kind in rope for kind in ('"longrope"', '"dynamic"'))
    settings = {
        **model_settings(config),
        "attention": {it.name: str(getattr(attention, it.name)) for it in fields(attention)},
        "cache": {name: str(getattr(cache, name, None)) for name in STATE_SETTINGS},
        "max_model_len": model.max_model_len if depends_on_length else None,
        "groups": [[list(group.layer_names), group.tokens_per_block] for group in offloading.groups],
    }
    return {
        "engine": f"vllm {vllm.__version__}",
        "hash": str(cache.prefix_caching_hash_algo),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(offloading.model.dtype),
        "platform": _platform(),
        "page_layout": str(getattr(offloading, "kv_cache_layout", None)),
        "chunk": f"{chunk_bytes} bytes, {spec.blocks_per_chunk} blocks, a hash of {spec.tokens_per_hash} tokens",
        "workers": f"tp {parallel.tp_size}, pp {parallel.pp_size}, pcp {parallel.pcp_size}, dcp {parallel.dcp_size}",
        "host_layout": f"replicated {spec.replicated_layout}, canonical {offloading.canonical_layout}",
        "speculative": f"{getattr(speculative, 'method', None)} {draft_fingerprint(config)}".strip(),
        "settings": blake2b(plain(settings).encode(), digest_size=32).hexdigest(),
    }


def _platform() -> str:
    device = str(current_platform.device_type)
    if device == "cpu":
        has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: None)()
        return f"cpu {platform.machine()}, amx {has_amx}"
    return f"{device} {current_platform.get_device_name()}"
