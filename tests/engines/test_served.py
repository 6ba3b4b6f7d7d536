"""What `served` says of each model of the table, against what vLLM's own grouping of KV and the connector make of it.

vLLM is given the specs of each layer, and nothing of what `served` knows: it groups them, allocates pages, and the
connector decides on these as in a worker and in the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from engine_adapter.paged.pages import layout_of
from engine_adapter.vllm_config import layer_specs, registered_pages, unsupported
from engines import models
from engines.test_vllm_kinds import KINDS
from kvstore.block.errors import BadInput
from kvstore.insight.models import MODELS, KvKind, KvLayers, ModelKv
from kvstore.insight.served import Engine, Verdict, served
from scheduled_engine import Writes

pytestmark = pytest.mark.skipif(not models.tells_states(), reason="this vLLM does not tell where states are whole")

LAYOUT = KVCacheLayout.LBNHC
PAGE = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    models.prepare()
    given = {"max_model_len": 512, "block_size": PAGE, "async_scheduling": False, "enable_prefix_caching": True}
    path = models.save_llama(tmp_path_factory.mktemp("model"), layers=1)
    config = EngineArgs(str(path), num_gpu_blocks_override=5, **given).create_engine_config()
    config.cache_config.kv_cache_layout = LAYOUT.name
    with set_current_vllm_config(config):
        yield config


def spec_of(layers: KvLayers, block: int, ranks: int, dtype: str) -> KVCacheSpec:
    given: dict[str, Any] = {
        "block_size": block,
        "num_kv_heads": max(1, layers.kv_heads // ranks),
        "head_size": layers.widths[0],
        "dtype": getattr(torch, layers.dtype or dtype),
    }
    match layers.kind:
        case KvKind.FULL:
            return FullAttentionSpec(**given, head_size_v=layers.widths[1])
        case KvKind.WINDOW:
            return SlidingWindowSpec(**given, head_size_v=layers.widths[1], sliding_window=layers.tokens)
        case KvKind.CHUNK:
            return ChunkedLocalAttentionSpec(**given, head_size_v=layers.widths[1], attention_chunk_size=layers.tokens)
        case _:
            return MLAAttentionSpec(**given)


def specs_of(model: ModelKv, ranks: int) -> dict[str, KVCacheSpec]:
    """Of each layer on one rank, kinds spread evenly over the model. A page of KV is as large as a state: vLLM settles
    that before it groups, in `Platform._align_hybrid_block_size`, which wants a whole model's class."""
    block = PAGE
    states: list[MambaSpec] = []
    for one in model.states:
        (lookback, channels), (heads, *state) = (shape for shape, _ in one.tensors)
        shapes = ((lookback, channels // ranks), (heads // ranks, *state))
        dtypes = [getattr(torch, dtype) for _, dtype in one.tensors]
        states += [MambaSpec(block_size=1, shapes=shapes, dtypes=tuple(dtypes), mamba_cache_mode="align")]
    if states:
        token = spec_of(model.layers[0], 1, ranks, model.dtype).page_size_bytes
        step = 128 if model.layers[0].kind is KvKind.LATENT else 16
        block = step * ceil(states[0].page_size_bytes / (step * token))
        padded = {"block_size": block, "page_size_padded": block * token}
        states = [MambaSpec(**{**vars(one), **padded}) for one in states]
    counted: list[tuple[int, KVCacheSpec]] = [
        (one.layers, spec_of(one, block, ranks, model.dtype)) for one in model.layers
    ]
    counted += [(one.layers, spec) for one, spec in zip(model.states, states, strict=True)]
    found = [((at + 1) / layers, spec) for layers, spec in counted for at in range(layers)]
    return {f"layer{at}": spec for at, (_, spec) in enumerate(sorted(found, key=lambda one: one[0]))}


def grouped(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    cache = config.cache_config
    cache.block_size = max(spec.block_size for spec in specs.values())
    cache.mamba_cache_mode = "align" if any(isinstance(spec, MambaSpec) for spec in specs.values()) else "none"
    return kv_cache_utils.get_kv_cache_groups(config, specs)


def decided(config: VllmConfig, model: ModelKv, ranks: int) -> tuple[str, int]:
    """Why the connector refuses the engine, and the tokens of its blocks."""
    specs, cache = specs_of(model, ranks), config.cache_config
    cache.num_gpu_blocks_override = 3 if model.states else 9
    modules = {name: SimpleNamespace(impl=Writes()) for name in specs}
    config.compilation_config.static_forward_context = modules
    made = grouped(config, specs)
    groups = kv_cache_utils.get_kv_cache_config_from_groups(config, made, 1 << 50)
    whole = kv_cache_utils.generate_scheduler_kv_cache_config([groups])
    if refused := unsupported(config, whole, is_failure_told=True):
        return refused, 0
    facts = registered_pages(config, groups, allocate_kv_cache(groups, torch.device("cpu"), LAYOUT)).facts
    try:
        layouts = [] if facts.refused else [layout_of([facts], 1 << 10, 0, states=states) for states in (False, True)]
    except BadInput as error:
        return str(error), 0
    sizes = {layout.block_tokens for layout in layouts if layout is not None}
    assert len(sizes) <= 1, "a state belongs to a block of the KV"
    return facts.refused, sizes.pop() if sizes else 0


@pytest.mark.parametrize("name", MODELS)
def test_vllm_and_the_connector_make_of_it_what_is_said(name: str, config: VllmConfig) -> None:
    model = MODELS[name]
    said, (refused, block) = served(model, Engine.VLLM), decided(config, model, 1)
    assert (said.verdict is Verdict.SERVED) == (not refused) == bool(block), (said, refused)


def test_none_of_the_table_is_refused() -> None:
    assert [name for name, model in MODELS.items() if served(model, Engine.VLLM).verdict is not Verdict.SERVED] == []


def test_each_grouping_of_the_table_is_one_of_those_that_random_histories_are_run_with(config: VllmConfig) -> None:
    """By kinds of KV, which of them share a table, and whose pages have more tokens than the others'."""

    def kinds(specs: dict[str, KVCacheSpec]) -> frozenset[tuple[tuple[str, int], ...]]:
        made = [{*layer_specs(one.kv_cache_spec, one.layer_names).values()} for one in grouped(config, specs)]
        least = min(spec.block_size for group in made for spec in group)
        return frozenset(
            tuple(sorted((type(spec).__name__, spec.block_size // least) for spec in group)) for group in made
        )

    found = {kinds(specs_of(model, 1)) for model in MODELS.values()}
    assert len(found) == 9 and found <= {kinds(specs) for specs, more in KINDS.values() if "layout" not in more}
