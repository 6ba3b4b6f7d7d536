"""The store as a secondary tier of vLLM's own offloading: `KvStoreTier` in `secondary_tiers`.

vLLM copies between the GPU and its primary tier in host memory; this tier copies between that memory and the store. It
sees slots of bytes and `OffloadKey`s, which are vLLM's block hashes with a group's number: 256 bits of SHA-256 over the
whole prefix and vLLM's root, so engines with other roots have no chunk in common. A hash has a LoRA adapter's name, so
a chunk's name has the digest of its files as well. All else that decides a chunk's bytes is in the namespace; a slot
has those of all ranks. vLLM changes this interface between versions, and only this file knows how they differ. Must
know nothing of how chunks are kept.

All methods run in vLLM's scheduler, return at once and never raise because of the store; see `chunks.store`.
"""

from __future__ import annotations

import inspect
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from hashlib import blake2b
from logging import getLogger
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import numpy as np
import torch
import vllm
from msgspec import Meta

try:
    from vllm import envs
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as error:
    raise ImportError(
        f"vLLM {vllm.__version__} has no offloading tiers as KvStoreTier knows them ({error}); it is for vLLM 0.28, "
        "0.31 and 0.32. KvStoreConnector (engine_adapter.vllm_connector) may serve this version"
    ) from None

import kvstore
from engine_adapter.chunks import (
    ChunkLimits,
    ChunkOutcomes,
    ChunkRun,
    ChunkSettings,
    ChunkSpace,
    ChunkState,
    ChunkStore,
    Milliseconds,
    chunk_layout,
    open_twice,
)
from engine_adapter.model_files import AdapterDigests, adapter_digest, model_fingerprint
from engine_adapter.paged.step_plan import NamespaceSpec
from engine_adapter.vllm_config import (
    draft_fingerprint,
    fingerprint,
    model_settings,
    plain,
    reuse_refused,
    tells_experts,
    untried_version,
)
from kvstore.block.errors import BadInput
from kvstore.client.edge import in_one_line
from kvstore.config import read

HASHES = ("sha256", "sha256_cbor")
LAYOUTS = ("VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT")
"""Variables of vLLM by which pages are packed in another way."""
STATE_SETTINGS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode")
HASH_BYTES, GROUP_BYTES, KEY_BYTES = 32, 4, 36
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
_log = getLogger(__name__)


class TierSettings(ChunkSettings, frozen=True):
    """The tier's parameters, in its JSON: docs/vllm-tier.md says what they mean."""

    hash_seed: Any = None  # was needed once
    deadline_ms: Milliseconds = 50.0
    load_threads: Annotated[int, Meta(ge=0)] = 2
    queued_chunks: Annotated[int, Meta(ge=0)] = 1024
    enable_kv_events: bool = False


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
        settings = read(TierSettings, given, "KvStoreTier: ")
        if untried := untried_version(vllm.__version__, KvStoreTier):
            _log.warning("KvStoreTier: %s", untried)
        config, model_dir = engine_config(offloading_spec.config.engine_id), settings.model_dir
        check_engine(config)
        memory = np.asarray(primary_kv_view).view(np.uint8)
        model = model_fingerprint(model_dir) if model_dir else fingerprint(config, MODEL_DIR)
        groups = group_numbers(offloading_spec)
        self._adapters = Adapters(config)
        facts = engine_facts(config, offloading_spec, memory.shape[1])
        epoch, name, specs = settings.weights_epoch, str(config.model_config.model), list[NamespaceSpec]()
        for number, tokens in groups.items():
            layout = chunk_layout(f"group {number}", tokens * offloading_spec.blocks_per_chunk, [memory.shape[1]])
            specs.append(NamespaceSpec(1, "", model, layout, "raw", epoch, {**facts, "group": str(number)}, name))
        queued, threads = max(1, min(settings.queued_chunks, len(memory) // 2)), max(1, settings.load_threads)
        limits = ChunkLimits(queued_stores=queued, load_threads=threads, lease_ms=settings.deadline_ms)
        runs = [ChunkRun(memory.ctypes.data, memory.strides[0], memory.shape[1])]
        self._stores = open_twice(kvstore.open, settings.url, f"vllm {vllm.__version__}")
        self._outcomes = ChunkOutcomes()
        spaces = [ChunkSpace(spec, runs, len(memory), self._stores, self._outcomes) for spec in specs]
        places = {number.to_bytes(GROUP_BYTES, "big"): position for position, number in enumerate(groups)}
        self._chunks = ChunkStore(
            spaces, lambda name: places.get(name[HASH_BYTES:KEY_BYTES], -1), limits, self._outcomes
        )
        has_events = settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if has_events else None

    def on_new_request(self, req_context: Any) -> base.RequestOffloadingContext:
        """The usual policy: chunks are offered as they are computed."""
        self._adapters.begins(req_context.req_id)
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Release the chunks that the request asked for and did not load."""
        self._chunks.forget(req_context.req_id)
        self._adapters.ends(req_context.req_id)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """HIT for a chunk that is pinned and verified in the store's memory; RETRY while that is being asked."""
        (name,) = self._adapters.names(req_context.req_id, [key])
        return ANSWERS[self._chunks.ask(req_context.req_id, name)]

    def submit_load(self, job_metadata: Any) -> None:
        """Copy what `lookup` promised into the primary tier's slots, verified."""
        request, slots = job_metadata.req_context.req_id, getattr(job_metadata, _SLOTS_FIELD)
        self._chunks.load(job_metadata.job_id, request, self._adapters.names(request, job_metadata.keys), slots)

    def submit_store(self, job_metadata: Any) -> None:
        """Copy slots of the primary tier into the store."""
        pairs = list(zip(map(bytes, job_metadata.keys), getattr(job_metadata, _SLOTS_FIELD), strict=True))
        position = getattr(job_metadata.req_context, "get_offload_key_position", None)
        if position is not None:  # 0.28 does not tell which chunk comes first
            pairs.sort(key=lambda pair: position(pair[0]) or 0)
        names = self._adapters.names(job_metadata.req_context.req_id, [key for key, _ in pairs], looks_again=True)
        self._chunks.store(job_metadata.job_id, names, [int(slot) for _, slot in pairs])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended, each once. Of a load that failed in part the good keys are named; vLLM computes the rest."""
        self._chunks.proceed()
        jobs = self._chunks.finished()
        if not jobs:
            self._chunks.proceed(WAIT_SECONDS)
        results = []
        for job in jobs:
            good = [base.OffloadKey(name[:KEY_BYTES]) for name in job.good]
            if not job.is_load and self._events is not None and good:
                where = {"locality": self.locality} if LOCALITY else {}
                self._events.append(OffloadingEvent(keys=good, medium=self.medium, removed=False, **where))
            named: dict[str, Any] = {} if not job.is_load or not job.failed else {"successful_keys": good or None}
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
        """Wait until no copy touches the primary tier, which is emptied then. After that vLLM offers chunks of running
        requests anew, even those that have lost pages since, as windows do: they are not taken."""
        self._chunks.drain()
        self._adapters.doubt()

    def shutdown(self) -> None:
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


class Adapters:
    """By which LoRA adapter each running request's chunks differ. One thread asks.

    vLLM reads an adapter's files at a time that it does not tell, so they are in doubt if they changed after it began.
    """

    def __init__(self, config: Any) -> None:
        self._is_on, self._dtype = config.lora_config is not None, getattr(config.lora_config, "lora_dtype", None)
        self._digests, self._began = AdapterDigests(adapter_digest), time.time()
        self._loras: dict[str, Any] = {}
        self._endings: dict[str, bytes | None] = {}
        self._paths: dict[int | str, str] = {}
        self._logged: set[str] = set()

    def begins(self, request_id: str) -> None:
        """A request, which vLLM hands to its connector some calls up from here."""
        self._endings[request_id] = None if self._is_on else b""
        if self._is_on and (it := found_above("request", lambda it: getattr(it, "request_id", "") == request_id)):
            self._loras[request_id] = it.lora_request
            self.names(request_id, (), looks_again=True)

    def names(self, request_id: str, keys: Iterable[Any], *, looks_again: bool = False) -> list[bytes]:
        """The names of its chunks; an empty one is no chunk's, where it is in doubt. looks_again: at its files."""
        if looks_again and request_id in self._loras:
            self._endings[request_id] = self._ending(self._loras[request_id])
        ending = self._endings.get(request_id, None if self._is_on else b"")
        return [b"" if ending is None else bytes(key) + ending for key in keys]

    def doubt(self) -> None:
        """Running requests have no more names."""
        self._endings = dict.fromkeys(self._endings)
        self._loras.clear()

    def ends(self, request_id: str) -> None:
        self._endings.pop(request_id, None)
        self._loras.pop(request_id, None)

    def _ending(self, lora: Any) -> bytes | None:
        if lora is None:
            return b""
        named = (lora.lora_int_id, lora.lora_name)
        digest, why = self._digests.of(lora.lora_int_id, lora.lora_path, reads_anew=False)
        if any(self._paths.setdefault(it, lora.lora_path) != lora.lora_path for it in named):
            digest, why = "", "its name or number was that of another one; restart vLLM"
        elif digest and _changed_at(Path(lora.lora_path)) >= self._began:
            digest, why = "", "its files changed after vLLM was started; restart vLLM"
        if not digest and (line := f"LoRA adapter {lora.lora_name!r} is not cached: {why}") not in self._logged:
            self._logged.add(line)
            _log.warning("KvStoreTier: %s", line)
        return f"{digest} {self._dtype}".encode() if digest else None


def _changed_at(place: Path) -> float:
    try:
        inside = [place, *place.iterdir()]
        links = [it for it in (*inside, *place.parents) if it.is_symlink()]
        return max(*(it.stat().st_ctime for it in inside), *(it.lstat().st_ctime for it in links))
    except OSError:
        return float("inf")


def found_above(name: str, is_it: Callable[[Any], bool]) -> Any:
    """A local variable of that name, some calls up from here; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (found := frame.f_locals.get(name)) is not None and is_it(found):
            return found
        frame = frame.f_back
    return None


def engine_config(engine_id: str) -> Any:
    """vLLM's whole configuration, of the engine that is being built at this moment.

    A tier is handed a summary without much that decides KV: quantization, overrides, LoRA, the hash of blocks. All of
    it is an argument of the connector that is being built, some calls up from here. Raises `BadInput`.
    """

    def is_it(found: Any) -> bool:
        return getattr(getattr(found, "kv_transfer_config", None), "engine_id", None) == engine_id

    if (found := found_above("vllm_config", is_it)) is None:
        raise BadInput("KvStoreTier: vLLM's configuration was not found; let vLLM build the tier, from secondary_tiers")
    return found


def check_engine(config: Any) -> None:
    """Raise `BadInput`, one line, for an engine whose chunks cannot be told apart by what this tier is given."""
    parallel, hash_name, reason = config.parallel_config, config.cache_config.prefix_caching_hash_algo, ""
    if hash_name not in HASHES:
        reason = (
            f"prefix_caching_hash_algo={hash_name} is not cryptographic, and a collision would serve another prompt's "
            f"KV; use {' or '.join(HASHES)}"
        )
    elif off := reuse_refused(config, "leave the tier out, or switch it on where it was switched off by hand"):
        reason = off
    elif not getattr(getattr(config.model_config, "multimodal_config", None), "language_model_only", True):
        reason = (
            "block hashes have what clients call images and the like, and not what they show; use KvStoreConnector, or "
            "start vLLM with --language-model-only"
        )
    elif tells_experts(config):
        reason = "enable_return_routed_experts wants which experts a token had, which chunks do not have; leave it out"
    elif config.load_config.load_format == "dummy":
        reason = "load_format=dummy makes weights up, which no file tells"
    elif getattr(config, "weight_transfer_config", None) is not None:
        reason = "weights are updated in place, and block hashes do not change with them"
    elif getattr(config.model_config, "enable_sleep_mode", False):
        reason = "with enable_sleep_mode other weights may be there after a sleep, and block hashes do not change"
    elif parallel.world_size > 1 and (parallel.nnodes > 1 or parallel.distributed_executor_backend != "mp"):
        reason = "the primary tier has the KV of this host's workers only; use one host and the executor backend mp"
    elif getattr(config.cache_config, "mamba_cache_mode", "") == "all":
        reason = "with mamba_cache_mode=all vLLM loads a state that is a token too far; use align"
    elif parallel.pipeline_parallel_size > 1 and not _are_stages_alike(config):
        reason = "the pipeline stages have unequal layers, and vLLM lays their chunks over each other; use equal ones"
    if reason:
        raise BadInput(f"KvStoreTier: {reason}")


def _are_stages_alike(config: Any) -> bool:
    core = found_above("self", lambda it: hasattr(it, "model_executor") and getattr(it, "vllm_config", None) is config)
    kinds = [list(specs.values()) for specs in core.model_executor.get_kv_cache_specs()] if core is not None else []
    return bool(kinds) and all(one == kinds[0] for one in kinds)


def group_numbers(spec: Any) -> dict[int, int]:
    """Tokens of a block of each KV group, by the group number at the end of an `OffloadKey`: the group's place in
    vLLM's configuration. vLLM 0.28 does not tell this apart from its place among the offloaded groups. Raises
    `BadInput` where vLLM may load a part of a chunk that it stored another part of."""
    groups = spec.config.groups
    if spec.blocks_per_chunk > 1 and len({group.tokens_per_block for group in groups}) > 1:
        raise BadInput(
            "KvStoreTier: where KV groups have blocks of unequal sizes, a chunk of several blocks may lack those that "
            "had left a window; set blocks_per_chunk to 1"
        )
    return {int(getattr(group, "group_id", place)): int(group.tokens_per_block) for place, group in enumerate(groups)}


def engine_facts(config: Any, spec: Any, chunk_bytes: int) -> dict[str, str]:
    """What decides a chunk's bytes besides weights and prompt: fields of the namespace, as text."""
    offloading, model, cache = spec.config, config.model_config, config.cache_config
    parallel, speculative, attention = offloading.parallel, config.speculative_config, config.attention_config
    rope = plain(model.hf_config.to_dict())
    packing = {it: value for it in LAYOUTS if (value := getattr(envs, it, None))}
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
        "page_layout": f"{getattr(offloading, 'kv_cache_layout', None)} {packing or ''}".strip(),
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
