"""What is read from vLLM's configuration, of objects that look like it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.vllm_config import unwaitable


def config(policy: str, ahead: bool, **more: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        **more,
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (config("recompute", False), ""),
        (config("recompute", False, use_v2_model_runner=False), ""),
        (config("recompute", True), "async_scheduling"),
        (config("recompute", False, use_v2_model_runner=True), "VLLM_USE_V2_MODEL_RUNNER"),
        (config("fail", True, use_v2_model_runner=True), ""),
    ],
)
def test_a_step_waits_for_loads_only_where_a_failed_one_can_be_taken_back(given: Any, why: str) -> None:
    assert why in unwaitable(given)
    assert bool(unwaitable(given)) == bool(why)
