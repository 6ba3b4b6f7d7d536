"""What is read from vLLM's configuration, of objects that look like it."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.paged.step_plan import WorkerSpec
from engine_adapter.vllm_config import (
    config_fields,
    draft_fingerprint,
    fingerprint,
    has_draft_layers,
    reuse_refused,
    unsupported,
    untried_version,
    unwaitable,
)
from kvstore.block.errors import BadInput


def config(ahead: bool, stages: int = 1, **more: Any) -> Any:
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    return SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead), parallel_config=parallel, **more)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (config(False), ""),
        (config(False, use_v2_model_runner=False), ""),
        (config(True), "async_scheduling"),
        (config(False, use_v2_model_runner=True), "VLLM_USE_V2_MODEL_RUNNER"),
        (config(False, stages=2), "pipeline_parallel_size"),
    ],
)
def test_a_step_waits_for_loads_only_where_a_failed_one_can_be_taken_back(given: Any, why: str) -> None:
    assert why in unwaitable(given)
    assert bool(unwaitable(given)) == bool(why)


class Spec(SimpleNamespace):
    """What vLLM says of a group; `like` is of the same kind."""

    def like(self, **changed: Any) -> Spec:
        return Spec(**{**vars(self), **changed})


def engine(
    *specs: Any,
    run_to: str = "generate",
    load_format: str = "auto",
    scales: bool = False,
    experts: bool = False,
    hisparse_host_num_blocks: int | None = None,
    **parallel: int,
) -> tuple[Any, Any]:
    groups = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs],
        hisparse_host_num_blocks=hisparse_host_num_blocks,
    )
    given = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(runner_type=run_to),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=experts),
        load_config=SimpleNamespace(load_format=load_format),
        cache_config=SimpleNamespace(calculate_kv_scales=scales),
    )
    return given, groups


FULL = Spec(sliding_window=None, attention_chunk_size=None)
WINDOW, CHUNKS = Spec(sliding_window=100), Spec(attention_chunk_size=8192)
STATE = Spec(mamba_cache_mode="align")
RING = Spec(prefix_cacheable=False)
NESTED = Spec(kv_cache_specs={"a": FULL, "b": FULL.like(head_size=64)})


@pytest.mark.parametrize(
    ("given", "is_told", "why"),
    [
        (engine(FULL, pipeline_parallel_size=1), False, ""),
        (engine(FULL, pipeline_parallel_size=2), True, ""),
        (engine(FULL, decode_context_parallel_size=2), True, ""),
        (engine(FULL, prefill_context_parallel_size=2), True, "prefill_context_parallel_size=2"),
        (engine(FULL, experts=True), True, "enable_return_routed_experts"),
        (engine(FULL, run_to="pooling"), True, "a model that is run to pooling"),
        (engine(FULL, load_format="dummy"), True, "load_format=dummy makes weights up"),
        (engine(FULL, scales=True), True, "calculate_kv_scales makes scales of the first prompt's KV"),
        (engine(FULL, Spec()), True, "KV groups of kind Spec; allowed: full attention, sliding windows"),
        (engine(FULL.like(rswa_window=9)), True, "generated tokens see another past"),
        (engine(FULL, STATE), True, ""),
        (engine(STATE), True, ""),
        (engine(STATE), False, "use 0.32 or later"),
        (engine(FULL, STATE.like(mamba_cache_mode="all")), True, "start vLLM with --mamba-cache-mode align"),
        (engine(FULL, CHUNKS), True, ""),
        (engine(FULL.like(attention_chunk_size=8192)), False, ""),
        (engine(NESTED), False, ""),
        (engine(NESTED, WINDOW), True, ""),
        (engine(Spec(kv_cache_specs={"a": FULL, "b": Spec()})), True, "KV groups of kind Spec"),
        (engine(FULL, RING), True, ""),
        (engine(FULL, WINDOW.like(prefix_cacheable=False, prefix_replay_tokens=100)), True, "bounded replay"),
        (engine(RING), True, "no KV group whose prefixes vLLM itself would reuse"),
        (engine(FULL, hisparse_host_num_blocks=9), True, "HiSparse"),
        (engine(FULL, WINDOW), True, ""),
        (engine(FULL, WINDOW), False, "use 0.31 or later"),
        (engine(WINDOW), True, ""),
        (engine(WINDOW), False, "use 0.31 or later"),
        (engine(FULL, WINDOW.like(extra_retained_tokens=2)), True, "keeps more than a window"),
        (engine(FULL.like(non_causal=True)), True, "attention that is not causal"),
    ],
)
def test_what_cannot_be_stored_is_said(given: tuple[Any, Any], is_told: bool, why: str) -> None:
    said = unsupported(*given, is_failure_told=is_told)
    assert why in said and bool(why) == bool(said)


class Hooks:
    """What a vLLM calls."""

    def begin(self, request: object) -> None: ...

    def end(self, request: object, *, blocks: object = None) -> None: ...


class Ours(Hooks):
    def begin(self, request: object) -> None: ...

    def end(self, request: object, **more: object) -> None: ...


class Outgrown(Hooks):
    def begin(self, request: object) -> None: ...

    def end(self, request: object) -> None: ...


def test_what_a_vllm_calls_decides_whether_it_is_served_and_not_its_number() -> None:
    assert [untried_version(version, Ours) for version in ("0.28.1", "0.31.0", "0.32.0rc1+cpu")] == [""] * 3
    for version in ("0.29.0", "0.33.0", "0.320.0", "1.0.0"):
        assert untried_version(version, Ours) == f"vLLM {version} was not tried (0.28, 0.31, 0.32 were)"
        with pytest.raises(BadInput, match=f"vLLM {version} calls end with arguments .* use 0.28, 0.31, 0.32"):
            untried_version(version, Outgrown)


def test_states_are_served_where_vllm_tells_their_boundaries() -> None:
    assert "use 0.32 or later" in unsupported(*engine(FULL, STATE), is_failure_told=True, are_states_told=False)
    assert not unsupported(*engine(FULL, WINDOW), is_failure_told=True, are_states_told=False)


@pytest.mark.parametrize("is_on", [True, False])
def test_what_the_engine_does_not_reuse_itself_is_not_reused(is_on: bool) -> None:
    said = reuse_refused(SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=is_on)))
    assert bool(said) != is_on
    assert is_on or ("prefix caching is off" in said and '"without_prefix_caching": true' in said)


@pytest.mark.parametrize(("method", "has_layers"), [(None, False), ("ngram", False), ("eagle", True), ("mtp", True)])
def test_drafts_of_layers_are_told_from_others(method: str | None, has_layers: bool) -> None:
    speculative = SimpleNamespace(method=method) if method else None
    assert has_draft_layers(SimpleNamespace(speculative_config=speculative)) == has_layers


def test_weights_that_are_not_there_have_no_fingerprint() -> None:
    absent = SimpleNamespace(model="/nowhere/at all", revision=None)
    given = SimpleNamespace(
        model_config=absent,
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(model="/nor here", revision=None)),
    )
    with pytest.raises(BadInput, match='"model" in kv_connector_extra_config'):
        fingerprint(given)
    with pytest.raises(BadInput, match=r"the draft model: .* give vLLM its snapshot directory"):
        draft_fingerprint(given)
    given.speculative_config.draft_model_config = absent
    assert draft_fingerprint(given) == "", "drafts of the model's own layers"


FACTS = WorkerSpec(0, 32, (), "slabs", "", "cpu", 4096)


DYNAMIC = SimpleNamespace(rope_parameters={"rope_type": "dynamic"})


def fields(
    place: str = "/here",
    *,
    hf_config: dict[str, Any] | None = None,
    parallel: dict[str, int] | None = None,
    cache_dtype: str = "auto",
    **of_model: Any,
) -> dict[str, str]:
    """Of an engine's configuration, as far as it decides KV."""
    read = {"_name_or_path": place, "transformers_version": place, "rope_theta": 10000.0, "layers": [1, {"a": 2}]}
    read |= hf_config or {}
    usual = dict(
        hf_config=SimpleNamespace(to_dict=lambda: read),
        hf_text_config=SimpleNamespace(rope_parameters={"rope_type": "default"}),
        dtype="torch.float32",
        quantization=None,
        model_impl="auto",
        disable_sliding_window=False,
        max_model_len=2048,
        model=place,
    )
    given = SimpleNamespace(
        model_config=SimpleNamespace(**{**usual, **of_model}),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        speculative_config=None,
        parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1, **(parallel or {})}),
    )
    return config_fields(given, [FACTS], "0.32.0")


def of_ranks(ranks: int, turn: int) -> dict[str, str]:
    return fields(parallel={"decode_context_parallel_size": ranks, "cp_kv_cache_interleave_size": turn})


def test_the_same_model_at_another_place_has_the_same_fields() -> None:
    found = fields()
    assert found == fields("/there") == of_ranks(1, 4)
    assert found["engine"] == "vllm 0.32.0" and found["dtype"] == "float32" and "max_model_len" not in found
    assert not set(found) & {"quantization", "kv_scales", "draft"}, "what is empty is left out"


def test_whatever_decides_kv_is_in_the_fields() -> None:
    """Also which tokens a rank has, and the longest prompt where rope depends on it."""
    assert fields(hf_text_config=DYNAMIC)["max_model_len"] == "2048"
    found = [
        fields(),
        fields(hf_config={"rope_theta": 500000.0}),
        fields(hf_config={"layers": [1, {"a": 3}]}),
        fields(hf_text_config=DYNAMIC),
        fields(hf_text_config=DYNAMIC, max_model_len=4096),
        fields(dtype="torch.bfloat16"),
        fields(quantization="fp8"),
        fields(model_impl="transformers"),
        fields(disable_sliding_window=True),
        fields(cache_dtype="fp8"),
        fields(parallel={"pipeline_parallel_size": 2}),
        of_ranks(2, 1),
        of_ranks(4, 1),
        of_ranks(2, 4),
    ]
    assert [one for one, other in combinations(found, 2) if one == other] == []
