"""vLLM: a `KVConnectorBase_V1` that loads known prefixes from the store and saves new ones.

    {"kv_connector": "KvStoreConnector", "kv_connector_module_path": "engine_adapter.vllm_connector",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"url": "unix:/run/kvstore/kvstore.sock"}}

One file for vLLM 0.28, 0.31 and 0.32: it translates hooks and knows nothing of the store. `paged/scheduler.py` decides,
`paged/worker.py` loads and saves, `paged/pages.py` finds out how KV lies in the pages. Only this file and `vllm_tier`
import vLLM. Source of the interface: vllm/distributed/kv_transfer/kv_connector/v1/base.py.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial, wraps
from hashlib import blake2b
from typing import Any

import msgspec
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.core.sched import output
from vllm.v1.engine.core import EngineCore

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # from 0.32 on
except ImportError:
    CacheHitSource = None

import kvstore
from engine_adapter.adapter import chosen_codec
from engine_adapter.connector_metrics import ConnectorSeries
from engine_adapter.cost import StepWork
from engine_adapter.model_files import AdapterDigests, adapter_digest
from engine_adapter.paged.announcements import Announcement
from engine_adapter.paged.namespace_opener import state_config
from engine_adapter.paged.pages import is_opaque, layout_of
from engine_adapter.paged.requests import LOAD_SECONDS, NEVER, SAVING, Boundary, Computed
from engine_adapter.paged.scheduler import IDLE_WAIT_SECONDS, PagedScheduler
from engine_adapter.paged.settings import ConnectorSettings, LoadMode
from engine_adapter.paged.step_plan import NamespaceSpec, StepPlan, StepReports, WorkerSpec
from engine_adapter.paged.worker import PagedWorker
from engine_adapter.vllm_config import (
    config_fields,
    fingerprint,
    has_draft_layers,
    is_told_by_page,
    page_tokens_of,
    registered_pages,
    reuse_refused,
    stages_of,
    unsupported,
    untried_version,
    unwaitable,
    with_load_mode,
)
from engine_adapter.vllm_requests import EngineView, RequestReader
from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import BadInput
from kvstore.client.edge import in_one_line

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name

KVConnectorTransferResults: Any = getattr(base, "KVConnectorTransferResults", None)  # these are from 0.31 on
KVConnectorBlockState: Any = getattr(output, "KVConnectorBlockState", None)
get_kv_cache_spec_kind: Any = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)

READ_SECONDS = 5.0
"""How long a request waits at most for its images to be read, while others run."""
HARMLESS = frozenset(
    "add_lora remove_lora list_loras pin_lora profile check_health sleep get_model_inspection get_supported_tasks "
    "reset_mm_cache reset_encoder_cache synchronize_device compute_weight_checksums update_max_model_len "
    "save_sharded_state save_tensorized_model init_weight_transfer_engine shutdown_weight_transfer_engine "
    "checkpoint_prepare".split()
)
"""What a client may have vLLM's workers do (`collective_rpc`) that leaves their weights as they are."""
START_SECONDS = 10.0
"""How long an engine waits for its store, once, when it starts."""


@dataclass
class StepPlanMetadata(KVConnectorMetadata):
    step: StepPlan


@dataclass
class StepReportsMetadata(KVConnectorWorkerMetadata):
    step: StepReports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReportsMetadata)
        self.step.merge(other.step)
        return self


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """How KV lies in one worker's pages, for the scheduler."""

    facts: WorkerSpec


@dataclass
class ConnectorCounts(KVConnectorStats):
    """Counts since the last step. data: flat, by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the other's counts; of present values (`SAVING`), take the other's."""
        for name, count in other.data.items():
            is_new = name not in self.data or name.startswith(SAVING)
            self.data[name] = count if is_new else self.data[name] + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 2) for name, count in self.data.items() if name != LOAD_SECONDS}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The same counts as Prometheus metrics; see `connector_metrics`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series = ConnectorSeries(self._counter_cls, self._gauge_cls, self._histogram_cls, labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._series.observe(transfer_stats_data, self.per_engine_labelvalues[engine_idx])


class KvStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half of the connector, or a worker's, by its role."""

    @in_one_line("KvStoreConnector")
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._config, self._groups = vllm_config, kv_cache_config
        self._settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._session = blake2b(str(self._kv_transfer_config.engine_id).encode(), digest_size=32).hexdigest()
        self._worker: PagedWorker | None = None
        self._invalid: set[int] = set()
        self._is_told = False
        self._is_told_by_page = kv_cache_config is None or is_told_by_page(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._plan_for(kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a dropped save is only a miss later, and vLLM need not compute anything again."""
        return False

    # Worker ----------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find out how KV lies in the pages, and start the worker's half; again where the engine has moved them."""
        if self._worker is not None:
            self._worker.leave_pages()  # into which random numbers are written now
        pages = registered_pages(self._config, self._groups, kv_caches)
        if not pages.facts.refused and not self._settings.without_prefix_caching:
            # A layer may have switched prefix caching off when it was built, which only this process knows.
            pages.facts = replace(pages.facts, refused=reuse_refused(self._config))
        if self._worker is not None and self._is_told:
            self._worker.register(pages)
        elif self._worker is not None:
            self._worker.close()
            self._worker = None
        if pages.facts.refused:
            logger.warning("nothing is stored by this worker: %s", pages.facts.refused)
        self._worker = self._worker or PagedWorker(
            pages,
            lambda session: _open_store(self._settings.url, session),
            time.monotonic,
            load_threads=self._settings.load_threads,
            save_bytes=self._settings.save_bytes,
            save_patience=self._save_patience(pages.facts),
        )

    def _save_patience(self, facts: WorkerSpec) -> float | None:
        """Seconds that a save waits until the engine is idle. 0 if the engine computes on another device, another
        engine waits for its saves, or several workers save one block. None where a step clears and copies pages before
        its first hook, as the second model runner does with models that have states."""
        if any(group.is_state for group in facts.groups) and getattr(self._config, "use_v2_model_runner", False):
            return None
        is_producer = self._config.kv_transfer_config.kv_role == "kv_producer"
        if facts.device != "cpu" or is_producer or self._config.parallel_config.world_size > 1:
            return 0.0
        return self._settings.save_patience_ms / 1000

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """vLLM carries this to the scheduler before the first request. A `MultiConnector` passes one child's to all
        children: there the worker's spec goes with its first report instead."""
        if self._worker is None or get_kv_transfer_group() is not self:
            return None
        self._is_told = True
        return Handshake(self._worker.pages.facts)

    def handle_preemptions(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this before the step writes to any page."""
        metadata = args[0] if args else kwargs.get("kv_connector_metadata")
        if self._worker is not None and isinstance(metadata, StepPlanMetadata):
            self._worker.begin(metadata.step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The same, for steps without a forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self.handle_preemptions(connector_metadata)

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Before the forward pass: run the loads that the step waits for, and start the others."""
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """If loads go layer by layer: wait for this layer."""
        if self._worker is not None and self._worker.awaited_layers:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """After the forward pass: start the saves, without waiting for them."""
        if self._worker is not None:
            self._worker.start_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose pages were loaded beside the steps."""
        received, _ = self._finished()
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, and the requests whose load brought less. With several groups or windows vLLM is told these;
        else `get_block_ids_with_load_errors` names the pages."""
        received, failed = self._finished()
        if not self._is_told_by_page:
            self._invalid = set()
        told = set() if self._is_told_by_page else failed
        return KVConnectorTransferResults(finished_sending=set(), finished_recving=received, failed_recving=told)

    def _finished(self) -> tuple[set[str], set[str]]:
        if self._worker is None:
            return set(), set()
        received, failed, self._invalid = self._worker.finished()
        return received, failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that a load should have filled and did not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers that are waited for one by one cannot be in a graph that is replayed as a whole."""
        return extra_config.get("load") == LoadMode.LAYERWISE

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This worker's reports to the scheduler."""
        if self._worker is None:
            return None
        reports = self._worker.take_reports()
        if not self._is_told:
            self._is_told = True
            reports = reports or StepReports()
            reports.facts.append(self._worker.pages.facts)
        return StepReportsMetadata(reports) if reports is not None else None

    # Scheduler -------------------------------------------------------------------------------------------------------

    def _plan_for(self, groups: Any) -> None:
        config = self._config
        self._settings, overruled = with_load_mode(self._settings, unwaitable(config))
        if overruled:
            logger.warning("kvstore: %s", overruled)
        if has_draft_layers(config) and self._settings.audit < 1:
            self._settings = msgspec.structs.replace(self._settings, audit=0.0)
        settings, session = self._settings, self._session
        self.half = PagedScheduler(
            settings, lambda: _open_store(settings.url, session), time.monotonic, random.Random().random, time.sleep
        )
        self._reader = RequestReader(
            AdapterDigests(adapter_digest),
            str(config.kv_transfer_config.kv_role),
            config.model_config if settings.traces else None,
            is_encoded_here=getattr(config, "ec_transfer_config", None) is None,
        )
        self._table_tokens = tuple(page_tokens_of(config, group.kv_cache_spec) for group in groups.kv_cache_groups)
        self._requests: dict[str, EngineView] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._facts: list[WorkerSpec] = []
        self._is_alone = False
        self._has_run_since_reset = True
        follow_rpcs()
        if untried := untried_version(vllm.__version__, KvStoreConnector):
            logger.warning("kvstore: %s", untried)
        self._pool: Any = None
        self._block_events: BlockEvents | None = None
        if (events := config.kv_events_config) is not None and events.enable_kv_cache_events:
            self._block_events = BlockEvents(_kinds(groups))
            self.half.announce(self._described)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Begin, now that every worker has described its pages."""
        facts = [one.facts for _, one in sorted(metadata.items()) if isinstance(one, Handshake)]
        if facts:
            self._is_alone = True
            self._begin(facts)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same by (pipeline, tensor) rank: of each stage with other layers."""
        self.set_xfer_handshake_metadata({at: one for at, (_, one) in enumerate(sorted(metadata.items()))})

    def _begin(self, facts: Sequence[WorkerSpec], wait_seconds: float = START_SECONDS) -> None:
        """The pages are known: open the namespace. If the KV cannot be stored, log why, and run without the store."""
        refused = unsupported(
            self._config,
            self._groups,
            is_failure_told=KVConnectorTransferResults is not None,
            are_states_told="boundary_state_offloads" in getattr(KVConnectorBlockState, "__dataclass_fields__", ()),
        ) or next((one.refused for one in facts if one.refused), "")
        if not refused and not self._settings.without_prefix_caching:
            refused = reuse_refused(self._config)
        try:
            if refused:
                raise BadInput(refused)
            if self._settings.audit >= 1 and has_draft_layers(self._config):
                raise BadInput(
                    "audit=1 loads nothing that was not compared, and where layers of their own draft tokens nothing "
                    "can be: their KV depends on a token that may lie behind a block; give an audit below 1"
                )
            model = self._config.model_config
            # Stages have other layers: none of their heads is another's.
            heads = model.get_total_num_kv_heads() * stages_of(self._config)
            block_tokens = self._settings.block_tokens
            states = layout_of(facts, heads, block_tokens, states=True)
            layout = layout_of(facts, heads, block_tokens) or states
            if layout is None:
                raise BadInput("the workers have no pages")
            codec, fields = self._settings.codec, config_fields(self._config, facts, vllm.__version__)
            if layout == states:
                codec, fields = "raw", state_config(fields, facts[0].groups, "")
            elif codec == "auto":
                codec = "raw" if is_opaque(layout.packing) else chosen_codec(None, layout)
            named = NamespaceSpec(
                0,
                self._session,
                self._settings.model or fingerprint(self._config),
                layout,
                codec,
                self._settings.weights_epoch,
                fields,
                str(model.model),
                facts[0].groups,
                self._table_tokens,
                states,
            )
            self.half.use(named, [one.rank for one in facts])
        except (BadInput, OSError) as error:
            self.half.refuse(MissReason.UNSUPPORTED, str(error))
            logger.warning("kvstore: no prefix is looked up or saved: %s", error)
            return
        is_there = self.half.wait_open(wait_seconds)
        logger.info(
            "kvstore: %s at %s, codec %s, blocks of %d tokens (%d KiB before the codec), pages %s on %s",
            "ready" if is_there else f"not open yet ({self.half.opener.why_not()[1]}), tried again in the background,",
            self._settings.url,
            codec,
            layout.block_tokens,
            layout.raw_bytes >> 10,
            layout.packing,
            facts[0].device,
        )
        if not is_there:
            self.half.opener.tell_when_open(lambda: logger.info("kvstore: ready at %s", self._settings.url))
        # Beside other connectors, a child does not see the settings that hold for all of them.
        if self._is_alone and self._config.kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "kvstore: a request whose load fails ends with an error; set "
                '"kv_load_failure_policy": "recompute" beside kv_connector to have it computed instead'
            )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep the engine's own cache, to evict invalid pages from it."""
        self._pool = gpu_block_pool

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        reports = metadata.step if isinstance(metadata, StepReportsMetadata) else None
        if reports is not None and reports.facts:
            self._facts += reports.facts
            if len(self._facts) == self._config.parallel_config.world_size:
                self._begin(sorted(self._facts, key=lambda one: one.rank), wait_seconds=0.0)
        self.half.reported(reports)
        invalid_pages = self.half.take_invalid_pages()
        if invalid_pages:
            self._pool.evict_blocks(invalid_pages)

    def on_new_request(self, request: Any) -> None:
        """A new request: read its spec, and look it up. One with images or the like is looked up once they are read."""
        mine = self._requests[request.request_id] = EngineView(request)
        mine.read = self._reader.reading(request)
        if mine.read is None:
            self._look_up(mine)
        else:
            mine.unread_since = time.monotonic()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are promised behind the engine's own (None: ask again, also while a request's images are
        being read), and whether they are loaded beside its steps."""
        request_id = request.request_id
        mine = self._requests[request_id]
        if mine.read is not None and mine.unread_since:
            wait([mine.read], 0.0 if self.half.is_busy else IDLE_WAIT_SECONDS)
            if not mine.read.done() and time.monotonic() - mine.unread_since < READ_SECONDS:
                return None, False
            mine.unread_since = 0.0
            self._look_up(mine)
        answer = self.half.matched(request_id, num_computed_tokens)
        parted_at = self.half.parted_at(request_id)
        if parted_at > getattr(mine.request, "shared_prefix_boundary", parted_at):
            # vLLM ends a step there and keeps its states, as where it sees itself that prompts part.
            mine.request.shared_prefix_boundary = parted_at
        return answer

    def _look_up(self, mine: EngineView) -> None:
        facts = self._reader.facts(mine.request, mine.read)
        mine.extra_keys = facts.extra_keys
        self.half.added(mine, facts)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given the request pages."""
        self.half.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's orders to the workers. In most steps nothing is due, and no request has new pages."""
        output = scheduler_output
        scheduled = output.num_scheduled_tokens
        self._has_run_since_reset |= bool(scheduled)
        resolve = getattr(getattr(output, "kv_connector_block_state", None), "get_block_ids", None)
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids  # whose pages are known from their admission
        if not self._is_alone:
            self._begin_with(output, cached, resumed)
        grown = [
            page
            for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if more and request_id not in resumed
            for pages in more
            for page in pages
        ]
        # vLLM's own cache keeps a copy of the state that a running request goes on from, in a page of no request.
        grown += [page for _, page in getattr(output, "kv_cache_block_copies", None) or ()]
        if resolve is None:
            resolve = self._kept_tables(output)
        drafts = output.scheduled_spec_decode_tokens
        due = []
        for request_id, tokens in scheduled.items():
            mine = self._requests.get(request_id)
            if mine is not None and mine.request.num_computed_tokens + tokens >= mine.due:
                if self._is_other(mine):
                    mine.due = NEVER
                    continue
                computed = mine.request.num_computed_tokens + tokens - len(drafts.get(request_id, ()))
                final = mine.final(computed, has_drafts=self._config.speculative_config is not None)
                due.append(Computed(request_id, final, partial(resolve, request_id)))
        plan = self.half.step(set(scheduled), due, grown, self._work(output), self._boundaries(output))
        return StepPlanMetadata(plan)

    def _boundaries(self, output: Any) -> list[Boundary]:
        """Where this step computes recurrent states that are whole: vLLM names their pages in this step only. Those of
        one boundary come together. Behind the prompt they may be a draft's, which vLLM corrects after the step."""
        offered = getattr(getattr(output, "kv_connector_block_state", None), "boundary_state_offloads", None) or {}
        found = []
        for request_id, states in offered.items():
            mine = self._requests.get(request_id)
            if mine is None or self._is_other(mine):
                continue
            for tokens in sorted({tokens for _, _, tokens in states}):
                if mine.final(tokens, has_drafts=self._config.speculative_config is not None) == tokens:
                    found.append(
                        Boundary(request_id, tokens, {table: page for table, page, at in states if at == tokens})
                    )
        return found

    def _begin_with(self, output: Any, cached: Any, resumed: Any) -> None:
        for new in output.scheduled_new_reqs:
            self.half.begins_with(new.req_id, new.num_computed_tokens)
        for request_id, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in resumed:
                self.half.begins_with(request_id, tokens)

    def _is_other(self, mine: EngineView) -> bool:
        """Whether its LoRA adapter's files changed since it was added: the engine may have read them anew since. Or
        whether another image came under the name of one of its own."""
        if mine.read is not None and self._reader.is_in_doubt(mine.request):
            return True
        if mine.request.lora_request is None or not mine.extra_keys:
            return False
        return self._reader.facts(mine.request, mine.read).extra_keys != mine.extra_keys

    def _work(self, output: Any) -> StepWork:
        scheduled = output.num_scheduled_tokens
        if output.total_num_scheduled_tokens == len(scheduled):
            return StepWork((), len(scheduled))
        prefills = []
        for request_id, tokens in scheduled.items():
            mine = self._requests.get(request_id)
            if tokens > 1 and mine is not None:
                prefills.append((mine.request.num_computed_tokens, tokens))
        return StepWork(prefills, len(scheduled) - len(prefills))

    def _kept_tables(self, output: Any) -> Callable[[str], Sequence[Sequence[int]]]:
        """Before 0.31 vLLM's scheduler does not tell a request's pages: they are collected from its steps."""
        for one in output.scheduled_new_reqs:
            self._tables[one.req_id] = [list(group) for group in one.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(group) for group in more or ()]
            elif more:
                for group, pages in zip(self._tables.get(request_id, ()), more, strict=False):
                    group += pages
        return lambda request_id: self._tables.get(request_id, [])

    def request_finished(self, request: Any, *args: Any, **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request is over. vLLM may free its pages at once: saves that still read them end before the pages are
        written to again. Returns what its user sees as `kv_transfer_params`."""
        self._requests.pop(request.request_id, None)
        self._tables.pop(request.request_id, None)
        told = self.half.finished(request.request_id)
        return False, {"kvstore": told} if told is not None else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same with several KV groups."""
        return self.request_finished(request)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Which tiers the tokens come from, in vLLM's words."""
        sources: dict[Any, int] = {}
        tiers = self.half.hit_tiers(request.request_id, num_external_tokens)
        for tier, tokens in (tiers or {HitTier.DRAM: num_external_tokens}).items():
            source = CacheHitSource.P2P if tier in (HitTier.PEER, HitTier.REMOTE) else CacheHitSource.HOST
            if tier is HitTier.NVME:
                source = CacheHitSource.DISK
            sources[source] = sources.get(source, 0) + tokens
        return {source: tokens for source, tokens in sources.items() if tokens}

    def take_events(self) -> Iterable[Any]:
        """KV events about blocks that the store has got, and that it then moved or evicted, by the engine's hashes."""
        if self._block_events is None:
            return ()
        return self._block_events.of(self.half.announced.take(), self._hash_tokens)

    def _described(self, view: EngineView, number: int) -> EventBlock | None:
        return described(view, number, self.half.block_tokens, self._hash_tokens)

    @property
    def _hash_tokens(self) -> int:
        return int(getattr(self._groups, "hash_block_size", None) or self._table_tokens[0])

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last step. None beside other connectors: a `MultiConnector` looks for the class of a child's
        counts among vLLM's own, and ends the engine if it is not one of them."""
        if self.role is not KVConnectorRole.SCHEDULER or not self._is_alone:
            return None
        counted = self.half.take_counts()
        return ConnectorCounts(data=counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """The counts again, in the process that logs them."""
        return ConnectorCounts(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics | None:
        return ConnectorMetrics(*args, **kwargs)

    def reset_cache(self) -> bool | None:
        """The engine's weights may have changed: nothing that was stored before is found from here on. They get a
        unique name, which only this run of the engine knows."""
        self.half.renamed(time.time_ns())
        self._has_run_since_reset = False
        return True

    def weights_may_have_changed(self, how: str) -> None:
        """A client had the workers do that: nothing is looked up or saved until `reset_cache`; one right before, under
        whose name nothing has run, will do."""
        if self.half.block_tokens and self._has_run_since_reset:
            detail = (
                f"the weights may have changed in place (collective_rpc {how}); call "
                "reset_prefix_cache(reset_connector=True) to have the store used again"
            )
            logger.warning("kvstore: %s", detail)
            self.half.refuse(MissReason.DISABLED, detail)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self.role is KVConnectorRole.SCHEDULER:
            self.half.close()
            self._reader.close()


def follow_rpcs() -> None:
    """From here on, vLLM's engine core tells its connectors of what a client had the workers do, except `HARMLESS`:
    vLLM itself does not when `reload_weights` and its like change the weights in place."""
    plain = EngineCore.collective_rpc
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(core, method, *args, **kwargs)
        finally:
            if method not in HARMLESS:
                connector = core.scheduler.get_kv_connector()
                for one in getattr(connector, "_connectors", [connector]):
                    if isinstance(one, KvStoreConnector):
                        one.weights_may_have_changed(str(getattr(method, "__name__", method)))

    EngineCore.collective_rpc = collective_rpc


# The store's blocks as vLLM's own KV events ---------------------------------------------------------------------------
#
#   a block of the store   one or more of the engine's hashes, with the tokens, the parent and the extra keys of each
#   came                   `BlockStored` with the medium of its tier; moved: removed from one, stored in the other
#   went                   `BlockRemoved` of all its hashes
#   several KV groups      one event for each, with its number and kind, as vLLM has them of its own cache
#
# So a router knows them by the engine's hashes and by where they lie. Fields that this vLLM does not have are left out.

MEDIA = {HitTier.DRAM: "CPU", HitTier.NVME: "STORAGE"}
"""Those that routers know."""
LOCALITY = "LOCAL"
"""To the engine that publishes: the store is on its host."""


@dataclass(frozen=True, slots=True)
class EventBlock:
    """A block of the store. hashes: the engine's, in order. parent: of the first one. extra_keys: for each hash."""

    hashes: tuple[Any, ...]
    parent: Any
    token_ids: array[int]
    extra_keys: list[Any] | None
    lora_id: int | None
    lora_name: str | None


def described(view: EngineView, number: int, block_tokens: int, hash_tokens: int) -> EventBlock | None:
    """Describe a request's block of that number for later events. None if a block is not a whole number of the
    engine's hashes, or the engine has not hashed it."""
    request, each = view.request, block_tokens // hash_tokens
    first, stop = number * each, (number + 1) * each
    hashes = request.block_hashes
    if block_tokens % hash_tokens or stop > len(hashes):
        return None
    extra = [_extra_keys(request, at * hash_tokens, (at + 1) * hash_tokens) for at in range(first, stop)]
    lora = request.lora_request
    return EventBlock(
        tuple(map(maybe_convert_block_hash, hashes[first:stop])),
        maybe_convert_block_hash(hashes[first - 1]) if first else None,
        array("I", view.token_ids(first * hash_tokens, stop * hash_tokens)),
        extra if any(extra) else None,
        lora.lora_int_id if lora is not None else None,
        lora.lora_name if lora is not None else None,
    )


class BlockEvents:
    def __init__(self, groups: Sequence[tuple[str | None, int | None]]) -> None:
        """groups: of each KV group vLLM's word for its layers, and their window."""
        each = [
            {"group_idx": at, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window, "locality": LOCALITY}
            for at, (kind, window) in enumerate(groups)
        ]
        has_groups = "group_idx" in BlockStored.__struct_fields__
        each = each if has_groups else each[:1]  # earlier versions' events are of a block, whatever its groups
        self._of_stored = [_known(BlockStored, one) for one in each]
        self._of_removed = [_known(BlockRemoved, one) for one in each]

    def of(self, news: Iterable[Announcement[EventBlock]], hash_tokens: int) -> list[Any]:
        """The events for these announcements, in their order; if a block moved, its removal comes first."""
        events: list[Any] = []
        for one in news:
            block = one.block
            if one.went is not None:
                events += [BlockRemoved(list(block.hashes), MEDIA[one.went], **each) for each in self._of_removed]
            if one.came is not None:
                more = _known(BlockStored, {"extra_keys": block.extra_keys})
                events += [
                    BlockStored(
                        block_hashes=list(block.hashes),
                        parent_block_hash=block.parent,
                        token_ids=list(block.token_ids),
                        block_size=hash_tokens,
                        lora_id=block.lora_id,
                        medium=MEDIA[one.came],
                        lora_name=block.lora_name,
                        **each,
                        **more,
                    )
                    for each in self._of_stored
                ]
        return events


def _known(event: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in event.__struct_fields__ and value is not None}


def _kinds(groups: Any) -> list[tuple[str | None, int | None]]:
    if get_kv_cache_spec_kind is None:
        return [(None, None)]
    specs = [group.kv_cache_spec for group in groups.kv_cache_groups]
    window_of = kv_cache_interface.get_kv_cache_spec_sliding_window
    return [(str(get_kv_cache_spec_kind(one).value), window_of(one)) for one in specs]


def _extra_keys(request: Any, first: int, stop: int) -> Any:
    keys, _ = generate_block_hash_extra_keys(request, first, stop, 0)
    as_told = getattr(kv_cache_utils, "to_event_extra_keys", list)  # earlier versions tell them as they are
    return as_told([keys])[0] if keys else None


def _open_store(url: str, session: str) -> kvstore.SidecarStore:
    store = kvstore.open(url, engine=f"vllm {vllm.__version__}", session=session)
    assert isinstance(store, kvstore.SidecarStore)
    return store
