"""Hit counters of endpoints and sidecars, read from their metrics before and after a replay.

Our connector counts a prompt's tokens by tier, and those missed by reason; a plain vLLM counts its own cache's hits and
a connector's; a sidecar counts what its leases granted. Without any of these, the result has no hits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from kvstore.openai.client import samples_of

_OURS = "kvstore_vllm_prompt_tokens_total"
_VLLMS = {
    "vllm:prefix_cache_queries_total": "asked",
    "vllm:prefix_cache_hits_total": "engine",
    "vllm:external_prefix_cache_hits_total": "external",
}
MISSED = "missed "
"""Begins the names of tokens that our connector missed; the reason follows."""
_SIDECARS = {"kvstore_granted_tokens_total": 1, "kvstore_revoked_tokens_total": -1}


def engine_tokens(page: str) -> Mapping[str, float]:
    """From an engine's page: tokens asked, hits by tier, and what was missed by reason if it is told."""
    ours, vllms = defaultdict[str, float](float), defaultdict[str, float](float)
    for one in samples_of(page):
        if one.name == _OURS:
            origin, is_hit = one.labels.get("origin", ""), one.labels.get("outcome") == "hit"
            ours["asked"] += one.value
            ours[origin if is_hit else MISSED + origin] += one.value
        elif one.name in _VLLMS:
            vllms[_VLLMS[one.name]] += one.value
    return ours or vllms


def sidecar_tokens(page: str) -> Mapping[str, float]:
    """From a sidecar's page: tokens granted by tier, less those that failed a check."""
    found = defaultdict[str, float](float)
    for one in samples_of(page):
        if one.name in _SIDECARS:
            found[f"sidecar {one.labels.get('tier', '')}"] += _SIDECARS[one.name] * one.value
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Growth of each counter."""
    return {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
