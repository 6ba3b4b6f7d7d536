"""The Plan page: `kvstore plan` with parameters from the address, and the sidecar's own sizes as defaults.

Pure. The command's function makes the figures.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.block.errors import BadInput
from kvstore.config import parse_size
from kvstore.insight.models import MODELS, ModelKv, model_named
from kvstore.insight.plan import PlanRequest, PlanSection, plan
from kvstore.status.tree import SidecarStatus


class PlannedModel(msgspec.Struct, frozen=True):
    """A known model. source: where its shape was read."""

    model: str
    bytes_per_token: int
    state_bytes: int
    source: str


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


def planned(
    facts: SidecarStatus | None,
    model_name: str,
    gpu_memory: str,
    weights: str,
    tiers: tuple[str, str],
    new_tokens_per_second: float | None,
    **numbers: Any,
) -> PlanAnswer:
    """facts: the sidecar's, None before its first answer. gpu_memory, weights: as people write sizes; tiers: likewise,
    of DRAM and NVMe, "" for the sidecar's. numbers: of `PlanRequest`. Raises `BadInput`."""
    dram, nvme = (_size(given, name, facts) for given, name in zip(tiers, ("dram", "nvme"), strict=True))
    model = model_named(model_name)
    load = _new_tokens(facts)
    measured = load if _serves_only(model, facts) else None
    is_measured = new_tokens_per_second is None and measured is not None
    new_tokens = (measured or 0.0) if new_tokens_per_second is None else new_tokens_per_second
    request = PlanRequest(
        model=model,
        gpu_memory_bytes=parse_size(gpu_memory or "0", "gpu_memory"),
        weights_bytes=parse_size(weights or "0", "weights"),
        dram_bytes=dram,
        nvme_bytes=nvme,
        new_tokens_per_second=new_tokens,
        **numbers,
    )
    found = plan(request)
    notes = list(found.notes)
    if new_tokens == 0 and load:
        notes.append(f"this sidecar sees {load:,.0f} new tokens a second of another model: give those of {model.name}")
    return PlanAnswer(
        request.model.name,
        request.model.source,
        found.codec,
        dram,
        nvme,
        new_tokens,
        is_measured,
        found.refusals,
        notes,
        found.sections,
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
