"""The vLLM that is installed has hooks and arguments that the connector knows; what is new is named."""

from __future__ import annotations

import inspect

import pytest
from vllm.config import SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engine_adapter.vllm_connector import KvStoreConnector
from engines.nursery import wanted_version


def test_the_vllm_that_runs_is_the_one_that_was_asked_for() -> None:
    wanted_version()


# What 0.28, 0.31 and 0.32 have. A hook that is not here may be one that a connector has to answer.
HOOKS = {
    "bind_connector_metadata": "connector_metadata",
    "bind_gpu_block_pool": "gpu_block_pool",
    "bind_kv_cache_manager": "kv_cache_manager",
    "build_connector_meta": "scheduler_output",
    "build_kv_connector_stats": "data",
    "build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
    "get_external_cache_hit_sources": "request num_external_tokens",
    "get_finished": "finished_req_ids",
    "get_loaded_kv_cache_group_ids": "request",
    "get_num_new_matched_tokens": "request num_computed_tokens",
    "get_required_kvcache_layout": "vllm_config",
    "get_transfer_results": "finished_req_ids",
    "handle_preemptions": "kv_connector_metadata",
    "on_new_request": "request",
    "register_cross_layers_kv_cache": "kv_cache attn_backend",
    "register_finished_partial_tail": "request block_ids partial_tail_offloads",
    "register_kv_caches": "kv_caches",
    "request_finished": "request block_ids",
    "request_finished_all_groups": "request block_ids",
    "requires_piecewise_for_cudagraph": "extra_config",
    "save_kv_layer": "layer_name kv_layer attn_metadata kwargs",
    "set_host_xfer_buffer_ops": "copy_operation",
    "set_xfer_handshake_metadata": "metadata",
    "set_xfer_handshake_metadata_pp_aware": "metadata",
    "start_load_kv": "forward_context kwargs",
    "update_connector_output": "connector_output",
    "update_state_after_alloc": "request blocks num_external_tokens",
    "wait_for_layer_load": "layer_name",
    **dict.fromkeys(
        """
        build_connector_worker_meta clear_connector_metadata finish_forward get_block_ids_with_load_errors
        get_finished_count get_handshake_metadata get_kv_connector_kv_cache_events get_kv_connector_stats
        get_mem_pool_context has_connector_metadata has_pending_block_frees has_pending_push_work
        prefer_cross_layer_blocks requires_kv_delivery reset_cache reset_capture_state role shutdown
        supports_divergent_local_hybrid_hits take_events wait_for_save
        """.split(),
        "",
    ),
}


def arguments(hook: object) -> str:
    function = hook.fget if isinstance(hook, property) else getattr(hook, "__func__", hook)
    return " ".join(name for name in inspect.signature(function).parameters if name not in ("self", "cls"))


def test_every_hook_and_argument_of_this_vllm_is_known() -> None:
    found = {
        name: arguments(hook)
        for kind in (base.KVConnectorBase_V1, base.SupportsHMA)
        for name, hook in vars(kind).items()
        if not name.startswith("_") and (callable(hook) or isinstance(hook, property | classmethod))
    }
    unknown = {name: given for name, given in found.items() if HOOKS.get(name) != given}
    assert not unknown, f"hooks or arguments that the connector does not know: {unknown}"
    assert len(found) >= 40


def test_no_abstract_hook_is_left() -> None:
    assert not KvStoreConnector.__abstractmethods__
    assert issubclass(KvStoreConnector, base.SupportsHMA)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (
            SchedulerOutput,
            "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
            "scheduled_spec_decode_tokens",
        ),
        (NewRequestData, "req_id block_ids num_computed_tokens"),
        (CachedRequestData, "req_ids new_block_ids resumed_req_ids num_computed_tokens"),
        (KVConnectorOutput, "kv_connector_worker_meta"),
    ],
)
def test_what_is_read_of_a_step_is_there(kind: type, fields: str) -> None:
    there = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    assert not set(fields.split()) - there, set(fields.split()) - there


def test_what_is_read_of_a_request_is_there() -> None:
    """Where a name is new, what it says would be overlooked in silence."""
    request = Request("a", [1, 2, 3], SamplingParams(), None)
    for name in (
        "request_id num_tokens num_prompt_tokens num_computed_tokens all_token_ids block_hashes prompt_embeds "
        "resumable sampling_params lora_request cache_salt mm_features kv_transfer_params skip_reading_prefix_cache"
    ).split():
        assert hasattr(request, name), name


def test_what_is_asked_of_the_engines_own_cache_is_there() -> None:
    assert list(inspect.signature(BlockPool.evict_blocks).parameters) == ["self", "block_ids"]
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    assert "async_scheduling" in SchedulerConfig.__dataclass_fields__
