"""The tier against the vLLM that is installed: whether its interface is the one we know, which engines are refused, and
what a namespace covers. Whole engines run in test_tier_engine.py."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload import config as offload_config
from vllm.v1.kv_offload.base import LookupResult, OffloadingEvent, make_offload_key
from vllm.v1.kv_offload.tiering import factory
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from engine_adapter import vllm_tier
from engine_adapter.model_files import model_fingerprint
from engine_adapter.vllm_config import fingerprint, untried_version
from engine_adapter.vllm_connector import KvStoreConnector
from engine_adapter.vllm_tier import CHUNKS_METRIC, KvStoreTier, check_engine, engine_config, engine_facts
from engines.models import save_llama
from engines.tier_engine import be_patient, opened, takes
from kvstore.block.errors import BadInput
from service.sidecar import Sidecar
from waiting import wait_until

SLOTS, CHUNK_BYTES, SECONDS = 8, 64 << 10, 30

# --- the installed interface -----------------------------------------------------------------------------------------

CALLED = {
    "lookup": {"key", "req_context"},
    "submit_store": {"job_metadata"},
    "submit_load": {"job_metadata"},
    "get_finished_jobs": set(),
    "on_new_request": {"req_context"},
    "on_request_finished": {"req_context"},
    "drain_jobs": set(),
    "take_events": set(),
    "get_stats": set(),
    "shutdown": set(),
    "build_metric_definitions": {"extra_config"},
}
LEFT_ALONE = {
    *("block_size_bytes", "bp_detector", "cache_hit_source", "medium", "on_schedule_end", "serve_external_requests"),
    *("touch", "has_pending_work"),  # a request waits for a look-up, and is one that waits
}
HANDED_IN = {"offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"}
JOB_FIELDS = {"job_id", "keys", "chunk_ids", "block_ids", "is_promotion", "req_context", "submit_time"}
RESULT_FIELDS = {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"}
ANSWERS = {"MISS", "HIT", "HIT_PENDING", "RETRY"}
EVENT_FIELDS = {"keys", "medium", "removed", "locality", "ownership", "removal_expected"}
CONFIG_FIELDS = {
    *("groups", "worker_kv_bytes_per_block", "enable_kv_cache_events", "extra_config", "engine_id", "model", "cache"),
    *("parallel", "replicated_layout", "canonical_layout", "kv_cache_layout"),
}


def names(cls: Any) -> set[str]:
    return {it.name for it in fields(cls)}


def test_the_interface_is_the_one_that_is_known() -> None:
    """What is new in the installed vLLM is named."""
    public = {name for name in vars(SecondaryTierManager) if not name.startswith("_")}
    assert public - CALLED.keys() - LEFT_ALONE == set(), f"vLLM {vllm.__version__} asks tiers for more"
    assert SecondaryTierManager.__abstractmethods__ <= CALLED.keys() and not KvStoreTier.__abstractmethods__
    for cls in (SecondaryTierManager, KvStoreTier):
        assert {method: takes(getattr(cls, method)) for method in CALLED} == CALLED
    assert names(TransferJob) <= JOB_FIELDS and vllm_tier._SLOTS_FIELD in names(TransferJob)
    assert names(JobResult) <= RESULT_FIELDS
    assert {it.name for it in LookupResult} == ANSWERS
    assert names(OffloadingEvent) <= EVENT_FIELDS
    assert names(offload_config.OffloadingConfig) <= CONFIG_FIELDS, "is there something new that decides bytes?"


def test_a_tier_is_made_with_what_it_knows() -> None:
    assert takes(SecondaryTierManager.__init__) <= HANDED_IN
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(factory)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "tier_cls"
    ]
    assert len(calls) == 1 and not calls[0].args
    assert {word.arg for word in calls[0].keywords} - {None} <= HANDED_IN


def test_the_number_of_a_group_stands_at_a_keys_end() -> None:
    hash_bytes, number = vllm_tier.HASH_BYTES, (3).to_bytes(vllm_tier.GROUP_BYTES, "big")
    assert bytes(make_offload_key(b"h" * hash_bytes, 3))[hash_bytes:] == number
    for other in (16, 31, 33):
        assert bytes(make_offload_key(b"h" * other, 3))[hash_bytes:] != number, "another hash is none of ours"


def test_the_whole_configuration_is_up_the_stack() -> None:
    assert "vllm_config" in takes(OffloadingConnectorScheduler.__init__)
    vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="e1"))
    assert engine_config("e1") is vllm_config
    with pytest.raises(BadInput, match="was not found"):
        engine_config("e2")


def test_what_this_vllm_calls_is_known_whatever_its_version() -> None:
    assert untried_version("0.999.0", KvStoreTier) and untried_version("0.999.0", KvStoreConnector)
    assert not untried_version(vllm.__version__, KvStoreTier)


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def built(model: Path) -> Any:
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", engine_id="engine-1")
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048, kv_transfer_config=transfer
    ).create_engine_config()


@pytest.fixture
def config(built: Any) -> Any:
    return copy.deepcopy(built)


def spec_of(**parallel: int) -> Any:
    """As vLLM's connector builds it for one worker: its dataclasses, filled in here."""
    sizes = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, **parallel}
    replicas = {"data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None}
    group = {"tokens_per_block": 32, "layer_names": ("model.layers.0.self_attn.attn",), "group_id": 0}
    known = names(offload_config.OffloadingGroupConfig)
    offloading = offload_config.OffloadingConfig(
        groups=(offload_config.OffloadingGroupConfig(**{name: it for name, it in group.items() if name in known}),),
        worker_kv_bytes_per_block=CHUNK_BYTES // 2,
        enable_kv_cache_events=True,
        extra_config={},
        engine_id="engine-1",
        model=offload_config.OffloadingModelConfig(name="m", dtype="float32"),
        cache=offload_config.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=2),
        parallel=offload_config.OffloadingParallelConfig(is_parallelism_agnostic=True, **sizes, **replicas),
    )
    return SimpleNamespace(
        config=offloading,
        blocks_per_chunk=2,
        tokens_per_hash=32,
        replicated_layout=False,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )


def workers(config: Any, count: int, backend: str, hosts: int = 1) -> None:
    config.parallel_config.world_size = count
    config.parallel_config.distributed_executor_backend = backend
    config.parallel_config.nnodes = hosts


REFUSED: dict[str, Callable[[Any], object]] = {
    "not cryptographic": lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"),
    "prefix caching is off": lambda c: setattr(c.cache_config, "enable_prefix_caching", False),
    "dummy": lambda c: setattr(c.load_config, "load_format", "dummy"),
    "updated in place": lambda c: setattr(c, "weight_transfer_config", SimpleNamespace()),
    "enable_return_routed_experts": lambda c: setattr(c.aux_output_config, "enable_return_routed_experts", True),
    "sleep": lambda c: setattr(c.model_config, "enable_sleep_mode", True),
    "--language-model-only": lambda c: setattr(
        c.model_config, "multimodal_config", SimpleNamespace(language_model_only=False)
    ),
    "one host": lambda c: workers(c, 2, "ray"),
    "this host's workers": lambda c: workers(c, 4, "mp", hosts=2),
    "mamba_cache_mode=all": lambda c: setattr(c.cache_config, "mamba_cache_mode", "all"),
    "stages have unequal layers": lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_engine_that_leaves_a_doubt_is_refused_in_one_line(what: str, config: Any) -> None:
    check_engine(config)
    REFUSED[what](config)
    with pytest.raises(BadInput, match=what) as raised:
        check_engine(config)
    assert "\n" not in str(raised.value)


def test_chunks_that_may_lack_a_part_are_refused() -> None:
    """vLLM loads the middle of one where another group's chunks end, and may have stored it without that."""
    spec = spec_of()
    spec.config = replace(
        spec.config, groups=(spec.config.groups[0], replace(spec.config.groups[0], tokens_per_block=16))
    )
    with pytest.raises(BadInput, match="set blocks_per_chunk to 1"):
        vllm_tier.group_numbers(spec)
    spec.blocks_per_chunk = 1
    assert vllm_tier.group_numbers(spec)


def test_what_is_fine_is_not_refused(config: Any) -> None:
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    workers(config, 2, "mp")
    check_engine(config)


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "dtype": lambda c, s: setattr(c.model_config, "dtype", "float16"),
    "hash": lambda c, s: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "settings": lambda c, s: setattr(c.model_config.hf_config, "rope_theta", 5e5),
    "settings ": lambda c, s: setattr(c.model_config, "quantization", "fp8"),
    "settings  ": lambda c, s: setattr(c.model_config, "disable_sliding_window", True),
    "chunk": lambda c, s: setattr(s, "blocks_per_chunk", 4),
    "host_layout": lambda c, s: setattr(s, "replicated_layout", True),
    "workers": lambda c, s: setattr(s, "config", spec_of(tp_size=2).config),
    "workers ": lambda c, s: setattr(s, "config", spec_of(pp_size=2).config),
}


@pytest.mark.parametrize("field", CHANGES)
def test_whatever_decides_bytes_is_in_the_namespace(field: str, config: Any) -> None:
    spec = spec_of()
    before = engine_facts(config, spec, CHUNK_BYTES)
    assert before == engine_facts(copy.deepcopy(config), spec_of(), CHUNK_BYTES)
    CHANGES[field](config, spec)
    after = engine_facts(config, spec, CHUNK_BYTES)
    assert {name for name in before if before[name] != after[name]} == {field.strip()}
    assert all(isinstance(value, str) for value in before.values())
    assert engine_facts(config, spec, 2 * CHUNK_BYTES)["chunk"] != after["chunk"]


def test_how_states_are_packed_is_in_the_namespace(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for layout in ("SD", "DS"):
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        found.add(engine_facts(config, spec_of(), CHUNK_BYTES)["page_layout"])
    assert len(found) == 2


def test_no_path_is_in_the_namespace(config: Any, model: Path) -> None:
    before = engine_facts(config, spec_of(), CHUNK_BYTES)
    assert str(model) not in str(before)
    config.model_config.hf_config._name_or_path = "/somewhere/else"
    assert engine_facts(config, spec_of(), CHUNK_BYTES) == before


def test_weights_are_found_where_vllm_loads_them_from(config: Any, model: Path) -> None:
    assert fingerprint(config) == model_fingerprint(model) and len(model_fingerprint(model)) == 64
    config.model_config.model = "nobody/has-this-model"
    if hasattr(config.model_config, "model_weights"):
        config.model_config.model_weights = ""
    with pytest.raises(BadInput, match="model_dir"):
        make_tier(config, "unix:/no/sidecar")


# --- the tier --------------------------------------------------------------------------------------------------------


class Request:
    """What a tier reads of vLLM's request context."""

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id


def make_tier(config: Any, url: str, **parameters: Any) -> KvStoreTier:
    vllm_config = config  # the name by which it is found, as in vLLM's own constructor
    assert vllm_config is not None
    memory = np.random.default_rng(5).integers(-128, 128, (SLOTS, CHUNK_BYTES), dtype=np.int8)
    return KvStoreTier(
        offloading_spec=spec_of(),
        primary_kv_view=memoryview(memory),
        tier_type="KvStoreTier",
        url=url,
        **parameters,
    )


@pytest.fixture
def tier(config: Any, tmp_path: Path) -> Iterator[KvStoreTier]:
    with Sidecar(tmp_path, dram="16MiB") as sidecar:
        running = make_tier(config, f"unix:{sidecar.path}", enable_kv_events=True, deadline_ms=5000)
        be_patient(running)
        opened(running)
        yield running
        running.shutdown()


def job_of(number: int, keys: list[Any], slots: list[int], *, is_promotion: bool) -> TransferJob:
    places: Any = {vllm_tier._SLOTS_FIELD: np.array(slots)}
    return TransferJob(number, keys, is_promotion=is_promotion, req_context=Request("r"), **places)


def finished(tier: KvStoreTier) -> list[JobResult]:
    found: list[JobResult] = []
    wait_until(lambda: found.extend(tier.get_finished_jobs()) or found)
    return found


def answer(tier: KvStoreTier, key: Any, request: str = "r") -> LookupResult:
    asked = Request(request)
    return wait_until(
        lambda: found if (found := tier.lookup(key, asked)) is not LookupResult.RETRY else None,
        lambda: list(tier.get_finished_jobs()),
    )


KEYS = [make_offload_key(bytes([n]) * 32, 0) for n in range(4)]


def test_chunks_come_back(tier: KvStoreTier) -> None:
    tier.on_new_request(Request("r"))
    assert answer(tier, KEYS[0]) is LookupResult.MISS
    assert tier.lookup(make_offload_key(b"h" * 16, 0), Request("r")) is LookupResult.MISS, "a key of another kind"
    assert tier.lookup(make_offload_key(b"h" * 32, 1), Request("r")) is LookupResult.MISS, "a group not offloaded"
    tier.on_request_finished(Request("r"))
    tier.submit_store(job_of(1, KEYS, [0, 1, 2, 3], is_promotion=False))
    (stored,) = finished(tier)
    assert (stored.job_id, stored.success, stored.successful_keys) == (1, True, None)
    (event,) = tier.take_events()
    assert {bytes(key) for key in event.keys} == {bytes(key) for key in KEYS} and not event.removed
    assert list(tier.take_events()) == []
    assert [answer(tier, key) for key in KEYS] == [LookupResult.HIT] * 4
    memory = np.asarray(tier._primary_kv_view)
    before = memory.copy()
    memory[4:] = 0
    tier.submit_load(job_of(2, KEYS, [7, 6, 5, 4], is_promotion=True))
    (loaded,) = finished(tier)
    assert (loaded.job_id, loaded.success, loaded.successful_keys) == (2, True, None)
    assert np.array_equal(memory[4:], before[:4][::-1]) and np.array_equal(memory[:4], before[:4])
    tier.drain_jobs()
    stats = tier.get_stats()
    assert stats is not None and tier.get_stats() is None
    assert set(KvStoreTier.build_metric_definitions({})) == {CHUNKS_METRIC}


@pytest.mark.skipif(not vllm_tier.LOCALITY, reason="this vLLM does not ask tiers where their storage is")
def test_where_its_storage_is_can_be_said(config: Any, tmp_path: Path) -> None:
    """Through vLLM's own factory, and in the events that it publishes."""
    vllm_config = config
    assert vllm_config is not None
    given = {"type": "KvStoreTier", "module_path": "engine_adapter.vllm_tier", "hash_seed": "0"}
    memory = memoryview(np.zeros((SLOTS, CHUNK_BYTES), np.int8))
    make = factory.SecondaryTierFactory.create_secondary_tier
    with Sidecar(tmp_path, dram="16MiB") as sidecar:
        given |= {"url": f"unix:{sidecar.path}", "enable_kv_events": True, "deadline_ms": 5000}
        tier: Any = make({**given, "locality": "REMOTE"}, memory, spec_of())
        be_patient(tier)
        opened(tier)
        tier.on_new_request(Request("r"))
        tier.submit_store(job_of(1, KEYS, [0, 1, 2, 3], is_promotion=False))
        assert finished(tier)[0].success
        (event,) = tier.take_events()
        assert tier.locality is event.locality is vllm_tier.LOCALITY.REMOTE
        tier.shutdown()
    with pytest.raises(BadInput, match="KvStoreTier: ValueError: 'MOON' is not a valid Locality"):
        make({**given, "locality": "moon"}, memory, spec_of())


def test_of_a_load_that_fails_in_part_the_good_keys_are_named(tier: KvStoreTier) -> None:
    tier.on_new_request(Request("r"))
    tier.submit_store(job_of(1, KEYS[:3], [0, 1, 2], is_promotion=False))
    finished(tier)
    assert [answer(tier, key) for key in KEYS] == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    tier.submit_load(job_of(2, KEYS, [4, 5, 6, 7], is_promotion=True))
    (loaded,) = finished(tier)
    assert not loaded.success and set(loaded.successful_keys or ()) == {bytes(key) for key in KEYS[:3]}
    tier.submit_load(job_of(3, KEYS, [4, 5, 6, 7], is_promotion=True))
    (nothing_held,) = finished(tier)
    assert not nothing_held.success and nothing_held.successful_keys is None


def test_without_a_sidecar_it_begins_and_misses(config: Any, tmp_path: Path) -> None:
    tier = make_tier(config, f"unix:{tmp_path}/nobody.sock")
    tier.on_new_request(Request("r"))
    assert tier.lookup(KEYS[0], Request("r")) is LookupResult.MISS
    tier.submit_store(job_of(1, KEYS, [0, 1, 2, 3], is_promotion=False))
    tier.submit_load(job_of(2, KEYS, [0, 1, 2, 3], is_promotion=True))
    tier.drain_jobs()
    assert [job.success for job in tier.get_finished_jobs()] == [False, False]
    tier.shutdown()
    tier.shutdown()


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({"url": ""}, "url=''; give the store's address"),
        ({"url": "tcp:x"}, "not a store's address"),
        ({"url": "unix:x", "sise": 3}, "KvStoreTier: sise is not a setting"),
        ({"url": "unix:x", "deadline_ms": "soon"}, "KvStoreTier: deadline_ms='soon'; give a number"),
        ({"url": "unix:x", "queued_chunks": [2]}, "KvStoreTier: queued_chunks=.*; give a whole number"),
        ({"url": 3}, "url=3; give the store's address"),
        ({"url": "unix:x", "model_dir": 3}, "KvStoreTier: model_dir=3; give text"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], what: str, config: Any) -> None:
    with pytest.raises(BadInput, match=what) as raised:
        make_tier(config, **parameters)
    assert "\n" not in str(raised.value)
