"""Hit counters of endpoints and sidecars, read from their metrics before and after a replay.

Our connector counts a prompt's tokens by tier, and those missed by reason; a plain vLLM counts its own cache's hits and
a connector's; a sidecar counts what its leases granted. Without any of these, the result has no hits.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.openai.metrics import samples_of

_OURS = "kvstore_vllm_prompt_tokens_total"
_VLLMS = {
    "vllm:prefix_cache_queries_total": "asked",
    "vllm:prefix_cache_hits_total": "engine",
    "vllm:external_prefix_cache_hits_total": "external",
}
MISSED = "missed "
"""Begins the names of tokens that our connector missed; the reason follows."""
_SIDECARS = ("kvstore_granted_tokens_total", "kvstore_revoked_tokens_total")


def engine_tokens(page: str) -> dict[str, float]:
    """From an engine's page: tokens asked, hits by tier, and what was missed by reason if it is told."""
    ours: dict[str, float] = {}
    vllms: dict[str, float] = {}
    for one in samples_of(page):
        if one.name == _OURS:
            ours["asked"] = ours.get("asked", 0.0) + one.value
            origin, is_hit = one.labels.get("origin", ""), one.labels.get("outcome") == "hit"
            name = origin if is_hit else MISSED + origin
            ours[name] = ours.get(name, 0.0) + one.value
        elif one.name in _VLLMS:
            vllms[_VLLMS[one.name]] = vllms.get(_VLLMS[one.name], 0.0) + one.value
    return ours or vllms


def sidecar_tokens(page: str) -> dict[str, float]:
    """From a sidecar's page: tokens granted by tier, less those that failed a check."""
    found: dict[str, float] = {}
    for one in samples_of(page):
        if one.name in _SIDECARS:
            tier = f"sidecar {one.labels.get('tier', '')}"
            sign = 1.0 if one.name == _SIDECARS[0] else -1.0
            found[tier] = found.get(tier, 0.0) + sign * one.value
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Growth of each counter."""
    return {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
