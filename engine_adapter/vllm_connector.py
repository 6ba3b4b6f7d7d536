"""vLLM: a `KVConnectorBase_V1` that loads known prefixes from the store and saves new ones (floor 3).

    {"kv_connector": "KvStoreConnector", "kv_connector_module_path": "engine_adapter.vllm_connector",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"url": "unix:/run/kvstore/kvstore.sock"}}

One file for vLLM 0.28, 0.31 and 0.32: it translates hooks and knows nothing of the store. What is decided is in
`paged_scheduler`, what is done in `paged_worker`, what pages are in `engine_pages`. Nothing but this file and
`vllm_tier` imports vLLM. Source of the interface: vllm/distributed/kv_transfer/kv_connector/v1/base.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

import kvstore
from engine_adapter.adapter import chosen_codec
from engine_adapter.connector_settings import ConnectorSettings
from engine_adapter.engine_pages import EnginePages, RegisteredGroup, layout_of, register
from engine_adapter.model_files import adapter_digest, model_fingerprint
from engine_adapter.paged_scheduler import Computed, PagedScheduler, RequestFacts, namespace_config
from engine_adapter.paged_worker import PagedWorker
from engine_adapter.step_orders import NamespaceFacts, StepOrders, StepReports, WorkerFacts
from kvstore.errors import BadInput
from kvstore.identity import ExtraKey
from kvstore.miss import MissReason

logger = init_logger(__name__)


@dataclass
class Orders(KVConnectorMetadata):
    """One step, to every worker."""

    step: StepOrders


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """One step, from the workers."""

    step: StepReports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """vLLM merges the workers' reports two by two."""
        assert isinstance(other, Reports)
        self.step.merge(other.step)
        return self


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What the pages of one worker are, to the scheduler."""

    facts: WorkerFacts


class KvStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Either half, by its role."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._config = vllm_config
        self._groups_config = kv_cache_config
        self._settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._session = blake2b(str(self._kv_transfer_config.engine_id).encode(), digest_size=32).hexdigest()
        self._scheduler: _SchedulerSide | None = None
        self._worker: PagedWorker | None = None
        self._invalid: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerSide(vllm_config, kv_cache_config, self._settings, self._session)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later on, and no reason to compute anything again."""
        return False

    # Worker ----------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find out what the pages are."""
        pages = _register(self._config, self._groups_config, kv_caches)
        if pages.facts.refused:
            logger.warning("nothing is stored by this worker: %s", pages.facts.refused)
        self._worker = PagedWorker(
            pages,
            lambda session: _open_store(self._settings.url, session),
            time.monotonic,
            load_threads=self._settings.load_threads,
            save_bytes=self._settings.save_bytes,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Carried to the scheduler before the first request."""
        return Handshake(self._worker.pages.facts) if self._worker is not None else None

    def handle_preemptions(self, *args: Any, **kwargs: Any) -> None:
        """Before the step writes to any page."""
        metadata = args[0] if args else kwargs.get("kv_connector_metadata")
        if self._worker is not None and isinstance(metadata, Orders):
            self._worker.begin(metadata.step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The same, in steps without a forward."""
        super().bind_connector_metadata(connector_metadata)
        self.handle_preemptions(connector_metadata)

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Loads that the step waits for, before its forward; the others begin."""
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is there already."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """After the forward; nothing is waited for."""
        if self._worker is not None:
            self._worker.start_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose pages were loaded beside the steps."""
        if self._worker is None:
            return None, None
        received, self._invalid = self._worker.finished()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that a load was to bring and did not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler has to know of this step."""
        reports = self._worker.take_reports() if self._worker is not None else None
        return Reports(reports) if reports is not None else None

    # Scheduler -------------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Every worker has said what its pages are."""
        facts = [one.facts for _, one in sorted(metadata.items()) if isinstance(one, Handshake)]
        if self._scheduler is not None:
            self._scheduler.begin(facts)

    def on_new_request(self, request: Any) -> None:
        """Its look-up begins."""
        if self._scheduler is not None:
            self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind the engine's own, and whether they are loaded beside its steps."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.half.matched(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has pages."""
        if self._scheduler is not None:
            self._scheduler.half.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Orders of this step."""
        assert self._scheduler is not None
        return Orders(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Reports of the workers."""
        reports = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is not None and isinstance(reports, Reports):
            self._scheduler.half.reported(reports.step)

    def request_finished(self, request: Any, *args: Any, **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """Its pages are free at once: saves that still read them are fenced when they are used again."""
        return False, self._scheduler.finished(request) if self._scheduler is not None else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same with several KV groups."""
        return self.request_finished(request)

    def reset_cache(self) -> bool | None:
        """The engine's weights may be others now: nothing that was stored before is found from here on."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        """Let go of everything."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.half.close()


class _SchedulerSide:
    """vLLM's scheduler as `PagedScheduler` sees it."""

    def __init__(self, config: VllmConfig, groups: Any, settings: ConnectorSettings, session: str) -> None:
        self.half = PagedScheduler(settings, lambda: _open_store(settings.url, session), time.monotonic)
        self._config = config
        self._settings = settings
        self._session = session
        self._page_tokens = groups.kv_cache_groups[0].kv_cache_spec.block_size
        self._requests: dict[str, _Request] = {}
        self._tables: dict[str, list[list[int]]] = {}

    def begin(self, facts: Sequence[WorkerFacts]) -> None:
        """The pages are known: name the namespace. Whatever forbids that is one line, and the engine runs without."""
        refused = next((one.refused for one in facts if one.refused), "")
        try:
            if refused or not facts:
                raise BadInput(refused or "the workers have said nothing of their pages")
            model = self._config.model_config
            layout = layout_of(facts, model.get_total_num_kv_heads(), self._settings.block_tokens)
            codec = self._settings.codec
            if codec == "auto":
                codec = "raw" if layout.packing.startswith("opaque") else chosen_codec(None, layout)
            self.half.use(
                NamespaceFacts(
                    0,
                    self._session,
                    self._settings.model or model_fingerprint(model.model),
                    layout,
                    codec,
                    self._settings.weights_epoch,
                    _config_fields(self._config, facts),
                ),
                [one.rank for one in facts],
                facts[0].page_bytes * len(facts),
            )
        except (BadInput, OSError) as error:
            self.half.refuse(MissReason.UNSUPPORTED, str(error))
            logger.warning("no prefix is looked up or saved: %s", error)

    def added(self, request: Any) -> None:
        """A request that was not there before."""
        mine = self._requests[request.request_id] = _Request(request)
        self.half.added(mine, _request_facts(request))

    def step(self, output: Any) -> StepOrders:
        """What the scheduler decided, as both halves count it."""
        new = {one.req_id: one for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        grown = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        resumed = getattr(cached, "resumed_req_ids", ())
        computed = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            mine = self._requests.get(request_id)
            if mine is None:
                continue
            before = mine.request.num_computed_tokens
            if request_id in new or request_id in resumed:
                given = new[request_id].block_ids if request_id in new else grown[request_id]
                table = self._tables[request_id] = [list(group) for group in given or ()]
                first = self.half.local_tokens(request_id) // self._page_tokens
                allocated = [page for group in table for page in group[first:]]
            else:
                table = self._tables.setdefault(request_id, [])
                allocated = []
                for group, pages in zip(table, grown.get(request_id) or (), strict=False):
                    group += pages
                    allocated += pages
            first, stop = before // self._page_tokens, -(-(before + scheduled) // self._page_tokens)
            pages = [page for group in table for page in group[first:stop]]
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            accepted = mine.accepted(before + scheduled - drafts, self._config.speculative_config is not None)
            computed.append(Computed(request_id, accepted, table, pages, allocated))
        return self.half.step(computed, is_idle=not output.total_num_scheduled_tokens)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """It is over. What its user sees as `kv_transfer_params`."""
        self._requests.pop(request.request_id, None)
        self._tables.pop(request.request_id, None)
        told = self.half.finished(request.request_id)
        return {"kvstore": told} if told is not None else None

    def reset(self) -> None:
        """A name for weights that nobody else has: only this run of the engine knows them."""
        self.half.renamed(time.time_ns())


class _Request:
    """`EngineRequest` over one of vLLM's."""

    def __init__(self, request: Any) -> None:
        self.request = request

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def num_tokens(self) -> int:
        return int(self.request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    def token_ids(self, first: int, stop: int) -> list[int]:
        return list(self.request.all_token_ids[first:stop])

    def accepted(self, computed: int, has_drafts: bool) -> int:
        """Tokens whose KV is final once so many are computed. Where drafts are guessed, what was generated counts when
        the request is admitted anew only: its KV may be that of a draft that was turned down."""
        return min(computed, self.num_prompt_tokens) if has_drafts else min(computed, self.num_tokens)


def _request_facts(request: Any) -> RequestFacts:
    """What a request's KV depends on."""
    if request.prompt_embeds is not None:
        return RequestFacts(refused=MissReason.UNSUPPORTED, detail="a prompt of embeddings has no token ids")
    if getattr(request, "resumable", False):
        return RequestFacts(refused=MissReason.UNSUPPORTED, detail="a prompt that is streamed in")
    extra: list[ExtraKey] = []
    if request.lora_request is not None:
        digest = adapter_digest(request.lora_request.lora_path)
        if digest is None:
            return RequestFacts(refused=MissReason.UNSUPPORTED, detail="the adapter's files cannot be read")
        extra.append(ExtraKey(b"adapter:" + digest.encode()))
    if request.cache_salt:
        extra.append(ExtraKey(b"salt:" + blake2b(request.cache_salt.encode(), digest_size=32).digest()))
    for feature in request.mm_features:
        extra.append(ExtraKey(b"content:" + str(feature.identifier).encode(), feature.mm_position.offset))
    return RequestFacts(tuple(extra), reads=not getattr(request, "skip_reading_prefix_cache", False))


def _register(config: VllmConfig, groups: Any, kv_caches: Mapping[str, torch.Tensor]) -> EnginePages:
    parallel = config.parallel_config
    registered = []
    for number, group in enumerate(groups.kv_cache_groups):
        spec = group.kv_cache_spec
        layers = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
        heads, width = getattr(spec, "num_kv_heads", 0), getattr(spec, "head_size", 0)
        value_width = getattr(spec, "head_size_v", width)
        widths = (width, value_width) if value_width else (width,)
        window = getattr(spec, "sliding_window", None) or 0
        registered.append(
            RegisteredGroup(f"group{number}", layers, heads, widths, spec.block_size, groups.num_blocks, window)
        )
    layers = config.compilation_config.static_forward_context

    def write(name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        layer = layers[name]
        layer.impl.do_kv_cache_update(layer, key, value, kv_caches[name], slots)

    return register(registered, parallel.rank % parallel.world_size, _scales(layers, kv_caches), write)


def _scales(layers: Mapping[str, Any], names: Iterable[str]) -> str:
    """Digest of the KV scales of all layers; empty where all are one."""
    scales = [
        (name, scale, float(getattr(layers.get(name), f"{scale}_float", 1.0)))
        for name in names
        for scale in ("_k_scale", "_v_scale")
    ]
    if all(value == 1.0 for _, _, value in scales):
        return ""
    return blake2b(repr(scales).encode(), digest_size=16).hexdigest()


def _config_fields(config: VllmConfig, facts: Sequence[WorkerFacts]) -> Mapping[str, str]:
    """What decides KV besides weights and layout, in words that a person can compare."""
    model, cache = config.model_config, config.cache_config
    return namespace_config(
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        kv_cache_dtype=cache.cache_dtype,
        kv_scales="+".join(sorted({one.scales for one in facts})),
        rope=getattr(model.hf_text_config, "rope_parameters", None),
        overrides=model.hf_overrides if isinstance(model.hf_overrides, dict) else None,
        device=facts[0].device,
        engine="vllm",
    )


def _open_store(url: str, session: str) -> kvstore.SidecarStore:
    """The sidecar, as one of the processes of this engine."""
    store = kvstore.open(url, engine=f"vllm {vllm.__version__}", session=session)
    assert isinstance(store, kvstore.SidecarStore)
    return store
