"""The states of the table of models, against the shapes and dtypes that vLLM calculates for their configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import MambaSpec

from kvstore.insight.models import MODELS

DELTA = MambaStateShapeCalculator.gated_delta_net_state_shape
KDA = MambaStateShapeCalculator.kda_state_shape
MAMBA_2 = MambaStateShapeCalculator.mamba2_state_shape
DTYPES = {
    DELTA: MambaStateDtypeCalculator.gated_delta_net_state_dtype,
    KDA: MambaStateDtypeCalculator.kda_state_dtype,
    MAMBA_2: MambaStateDtypeCalculator.mamba2_state_dtype,
}
# Of each model what its config.json says, in the order of vLLM's arguments, for one GPU.
STATES: list[tuple[str, Any, tuple[int, ...]]] = [
    ("qwen3-next-80b-a3b", DELTA, (16, 32, 128, 128, 4)),
    *((name, DELTA, (16, 48, 128, 128, 4)) for name in ("qwen3.5-27b", "qwen3.6-27b")),
    *((name, DELTA, (16, 32, 128, 128, 4)) for name in ("qwen3.5-35b-a3b", "qwen3.6-35b-a3b")),
    *((name, DELTA, (16, 64, 128, 128, 4)) for name in ("qwen3.5-122b-a10b", "qwen3.5-397b-a17b")),
    ("kimi-k3", KDA, (96, 128)),
    ("nemotron-3-nano", MAMBA_2, (64 * 64, 8, 64, 64, 128, 4)),
    ("nemotron-3-super", MAMBA_2, (128 * 64, 8, 128, 64, 128, 4)),
    ("nemotron-3-ultra", MAMBA_2, (256 * 64, 8, 256, 64, 128, 4)),
    ("nemotron-h-56b", MAMBA_2, (256 * 64, 8, 256, 64, 256, 4)),
]


def test_no_model_with_states_is_left_out() -> None:
    assert {name for name, _, _ in STATES} == {name for name, model in MODELS.items() if model.states}


@pytest.mark.parametrize(("name", "shapes_of", "numbers"), STATES, ids=[one[0] for one in STATES])
def test_a_state_has_the_size_that_vllm_gives_it(name: str, shapes_of: Any, numbers: tuple[int, ...]) -> None:
    shapes = shapes_of(1, *numbers)
    dtypes = DTYPES[shapes_of](torch.bfloat16, "auto", "float32")
    (states,) = MODELS[name].states
    assert states.tensors == tuple(
        (tuple(shape), str(dtype).removeprefix("torch.")) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    spec = MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    assert spec.page_size_bytes == states.bytes_each
