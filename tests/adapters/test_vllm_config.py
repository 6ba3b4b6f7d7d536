"""What is read from vLLM's configuration, of objects that look like it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.vllm_config import fingerprint, has_draft_layers, unsupported, unwaitable
from kvstore.errors import BadInput


def config(ahead: bool, **more: Any) -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead), **more)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (config(False), ""),
        (config(False, use_v2_model_runner=False), ""),
        (config(True), "async_scheduling"),
        (config(False, use_v2_model_runner=True), "VLLM_USE_V2_MODEL_RUNNER"),
    ],
)
def test_a_step_waits_for_loads_only_where_a_failed_one_can_be_taken_back(given: Any, why: str) -> None:
    assert why in unwaitable(given)
    assert bool(unwaitable(given)) == bool(why)


class FullAttentionSpec(SimpleNamespace):
    """By name, as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Likewise."""


class MambaSpec(SimpleNamespace):
    """Likewise."""


def engine(*specs: Any, run_to: str = "generate", load_format: str = "auto", **parallel: int) -> tuple[Any, Any]:
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    given = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(runner_type=run_to),
        load_config=SimpleNamespace(load_format=load_format),
    )
    return given, groups


FULL, WINDOW = FullAttentionSpec(), SlidingWindowSpec(sliding_window=100)


@pytest.mark.parametrize(
    ("given", "is_told", "why"),
    [
        (engine(FULL, pipeline_parallel_size=1), False, ""),
        (engine(FULL, pipeline_parallel_size=2), True, "pipeline_parallel_size=2 is not supported; allowed: 1"),
        (engine(FULL, decode_context_parallel_size=2), True, "decode_context_parallel_size=2"),
        (engine(FULL, run_to="pooling"), True, "a model that is run to pooling"),
        (engine(FULL, load_format="dummy"), True, "load_format=dummy makes weights up"),
        (engine(FULL, MambaSpec()), True, "KV groups of kind MambaSpec; allowed: FullAttentionSpec"),
        (engine(FULL, WINDOW), True, ""),
        (engine(FULL, WINDOW), False, "use 0.31 or later"),
        (engine(WINDOW), True, ""),
        (engine(WINDOW), False, "use 0.31 or later"),
        (engine(FULL, SlidingWindowSpec(extra_retained_tokens=2)), True, "keeps more than a window"),
        (engine(FullAttentionSpec(non_causal=True)), True, "attention that is not causal"),
    ],
)
def test_what_cannot_be_stored_is_said(given: tuple[Any, Any], is_told: bool, why: str) -> None:
    said = unsupported(*given, is_failure_told=is_told)
    assert why in said and bool(why) == bool(said)


@pytest.mark.parametrize(
    ("speculative", "has_layers"),
    [
        (None, False),
        (SimpleNamespace(method="ngram"), False),
        (SimpleNamespace(method="eagle"), True),
        (SimpleNamespace(method="mtp"), True),
    ],
)
def test_drafts_of_layers_are_told_from_others(speculative: Any, has_layers: bool) -> None:
    assert has_draft_layers(SimpleNamespace(speculative_config=speculative)) == has_layers


def test_weights_that_are_not_there_have_no_fingerprint() -> None:
    given = SimpleNamespace(
        model_config=SimpleNamespace(model="/nowhere/at all", revision=None),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
    )
    with pytest.raises(BadInput, match='"model" in kv_connector_extra_config'):
        fingerprint(given)
