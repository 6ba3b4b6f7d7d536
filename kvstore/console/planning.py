"""The Plan page: `kvstore plan` with parameters from the address, and the sidecar's own sizes as defaults.

Pure. The command's function makes the figures.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.block.errors import BadInput
from kvstore.config import parse_size
from kvstore.insight.models import MODELS, ModelKv, model_named
from kvstore.insight.plan import PlanRequest, PlanSection, plan
from kvstore.status.declared import picked
from kvstore.status.tree import SidecarStatus

SizeWords = Annotated[str, Meta(max_length=32)]


class PlannedModel(msgspec.Struct, frozen=True):
    """A known model. source: where its shape was read."""

    model: str
    bytes_per_token: int
    state_bytes: int
    source: str


class PlanQuery(msgspec.Struct, frozen=True):
    """Parameters of `/api/plan`. gpu_memory, weights: of a GPU, and of the model, as people write sizes; dram, nvme:
    likewise, "" for the sidecar's. new_tokens_per_second: None for what the sidecar sees."""

    model: Annotated[str, Meta(max_length=128)] = "llama-3.1-8b"
    context_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] = 8192
    users: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    window_seconds: Annotated[float, Meta(gt=0, le=31_536_000)] = 900.0
    prefill_rate: Annotated[float, Meta(ge=1, le=1e9)] = 10_000.0
    gpu_memory: SizeWords = ""
    weights: SizeWords = ""
    dram: SizeWords = ""
    nvme: SizeWords = ""
    new_tokens_per_second: Annotated[float, Meta(ge=0, le=1e9)] | None = None


class PlanAnswer(msgspec.Struct, frozen=True):
    """`/api/plan`. dram, nvme, new_tokens_per_second: the inputs used. is_measured: new_tokens_per_second is this
    sidecar's present load of that model, not a guess. refusals: with which engines the model is not served,
    or in part."""

    model: str
    source: str
    codec: str
    dram_bytes: int
    nvme_bytes: int
    new_tokens_per_second: float
    is_measured: bool
    refusals: list[str]
    notes: list[str]
    sections: list[PlanSection]


def models_of_table() -> list[PlannedModel]:
    return [
        PlannedModel(one.name, one.bytes_per_token(one.dtype), one.state_bytes, one.source) for one in MODELS.values()
    ]


def planned(facts: SidecarStatus | None, asked: PlanQuery) -> PlanAnswer:
    """facts: the sidecar's, None before its first answer. Raises `BadInput`."""
    model, load = model_named(asked.model), _new_tokens(facts)
    measured = load if _serves_only(model, facts) else None
    given = asked.new_tokens_per_second
    request = PlanRequest(
        model=model,
        gpu_memory_bytes=parse_size(asked.gpu_memory or "0", "gpu_memory"),
        weights_bytes=parse_size(asked.weights or "0", "weights"),
        dram_bytes=_size(asked.dram, "dram", facts),
        nvme_bytes=_size(asked.nvme, "nvme", facts),
        new_tokens_per_second=(measured or 0.0) if given is None else given,
        context_tokens=asked.context_tokens,
        users=asked.users,
        tensor_parallel=asked.tensor_parallel,
        window_seconds=asked.window_seconds,
        prefill_rate=asked.prefill_rate,
    )
    found = plan(request)
    notes = list(found.notes)
    if request.new_tokens_per_second == 0 and load:
        notes.append(f"this sidecar sees {load:,.0f} new tokens a second of another model: give those of {model.name}")
    is_measured = given is None and measured is not None
    return picked(
        PlanAnswer, request, found, model=model.name, source=model.source, is_measured=is_measured, notes=notes
    )


def _size(given: str, tier: str, facts: SidecarStatus | None) -> int:
    if given:
        return parse_size(given, tier)
    tiers = facts.tiers if facts is not None else []
    return next((one.budget_bytes for one in tiers if one.name == tier), 0)


def _serves_only(model: ModelKv, facts: SidecarStatus | None) -> bool:
    asked = [one.name for one in facts.namespaces if one.looked.asked_tokens] if facts is not None else []
    try:
        return bool(asked) and all(model_named(one) is model for one in asked)
    except BadInput:
        return False


def _new_tokens(facts: SidecarStatus | None) -> float | None:
    told = facts.whatif if facts is not None else None
    if told is None or not told.asked_tokens:
        return None
    return told.tokens_per_second * (1 - told.points[-1].token_hit_rate)
