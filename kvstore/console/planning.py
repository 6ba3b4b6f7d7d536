"""The Plan page: `kvstore plan` with parameters from the address, and the sidecar's own sizes as defaults.

Pure. The command's function makes the figures.
"""

from __future__ import annotations

import msgspec

from kvstore.block.errors import BadInput
from kvstore.config import parse_size
from kvstore.insight.models import MODELS, ModelKv, model_named
from kvstore.insight.plan import PlanRequest, plan
from kvstore.status.tree import SidecarStatus


class PlannedModel(msgspec.Struct, frozen=True):
    """A known model. source: where its shape was read."""

    model: str
    bytes_per_token: int
    state_bytes: int
    source: str


class PlanFigure(msgspec.Struct, frozen=True):
    """words: a label. value: in `unit`; None if there is none. formula: how it is computed."""

    words: str
    value: float | None
    unit: str
    formula: str


class PlanSection(msgspec.Struct, frozen=True):
    heading: str
    figures: list[PlanFigure]


class PlanAnswer(msgspec.Struct, frozen=True):
    """`/api/plan`. dram, nvme, new_tokens_per_second: the inputs used. is_measured: new_tokens_per_second is this
    sidecar's present load of that model, not a guess. refusals: what of the model this store does not keep."""

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


class PlanQuestion(msgspec.Struct, frozen=True):
    """Parameters as people write them. Sizes: "80GB"; "" for the sidecar's."""

    model: str
    context_tokens: int
    users: int
    tensor_parallel: int
    window_seconds: float
    prefill_rate: float
    gpu_memory: str
    weights: str
    dram: str
    nvme: str
    new_tokens_per_second: float | None


def models_of_table() -> list[PlannedModel]:
    return [
        PlannedModel(one.name, one.bytes_per_token(one.dtype), one.state_bytes, one.source) for one in MODELS.values()
    ]


def planned(asked: PlanQuestion, facts: SidecarStatus | None) -> PlanAnswer:
    """facts: the sidecar's, None before its first answer. Raises `BadInput`."""
    dram, nvme = (_size(given, name, facts) for given, name in ((asked.dram, "dram"), (asked.nvme, "nvme")))
    model = model_named(asked.model)
    load = _new_tokens(facts)
    measured = load if _serves_only(model, facts) else None
    new_tokens = asked.new_tokens_per_second
    is_measured = new_tokens is None and measured is not None
    if new_tokens is None:
        new_tokens = measured or 0.0
    request = PlanRequest(
        model=model,
        context_tokens=asked.context_tokens,
        users=asked.users,
        tensor_parallel=asked.tensor_parallel,
        window_seconds=asked.window_seconds,
        prefill_rate=asked.prefill_rate,
        gpu_memory_bytes=parse_size(asked.gpu_memory or "0", "gpu_memory"),
        weights_bytes=parse_size(asked.weights or "0", "weights"),
        dram_bytes=dram,
        nvme_bytes=nvme,
        new_tokens_per_second=new_tokens,
    )
    found = plan(request)
    notes = list(found.notes)
    if new_tokens == 0 and load:
        notes.append(f"this sidecar sees {load:,.0f} new tokens a second of another model: give those of {model.name}")
    sections = [
        PlanSection(heading, [PlanFigure(one.words, one.value, one.unit, one.formula) for one in figures])
        for heading, figures in found.sections
    ]
    return PlanAnswer(
        request.model.name,
        request.model.source,
        found.codec,
        dram,
        nvme,
        new_tokens,
        is_measured,
        list(found.refusals),
        notes,
        sections,
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
