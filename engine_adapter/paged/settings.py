"""The settings of an engine's connector, checked key by key.

The keys are those of vLLM's `kv_connector_extra_config`. An unknown key is reported together with the known ones. Must
never read the environment.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from kvstore.block import payload
from kvstore.block.errors import BadInput
from kvstore.block.layout import MAX_BLOCK_TOKENS

MAX_DEADLINE_MS = 60_000

_log = logging.getLogger(__name__)


class SavePolicy(StrEnum):
    """Which blocks of a request are offered to the store."""

    ALL = "all"  # the prompt, and generated tokens
    PROMPT = "prompt"  # the prompt's full blocks only
    NONE = "none"  # nothing: this engine reads what others stored


class LoadMode(StrEnum):
    """When a request's blocks are loaded."""

    AUTO = "auto"  # before the step if that is quick or nothing else runs, else beside it
    ASYNC = "async"  # beside the steps of others: the request is scheduled when all of it is there
    SYNC = "sync"  # before the step that needs it
    LAYERWISE = "layerwise"  # the same, layer by layer while the step runs


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """url: of the store, as for `kvstore.open`. codec: "auto" is 8 bits if the pages are known to be K and V of 16- or
    32-bit floats, else raw. match_deadline_ms: how long a request is held back for its look-up. lease_deadline_ms: and
    for blocks that are promoted from lower tiers. model: the fingerprint of the weights, if it cannot be read from
    files. weights_epoch: of weights that were changed in place before the engine started. block_tokens: of a stored
    block; 0 is the smallest that fits the engine's page. load_threads: of each worker. save_bytes: that may wait to be
    saved, in each worker. save_patience_ms: how long a save waits until an engine that computes on the same CPU cores
    is idle. cost_model: whether a prefix is loaded only as far as that is faster than computing it. audit: the share of
    hits that are computed all the same and compared. without_prefix_caching: whether the store also serves an engine
    whose own prefix caching is off. traces: whether requests that bring a traceparent get
    OpenTelemetry spans of look-ups, leases and loads. ttl: seconds for which saved blocks are retained. priority: of
    saved blocks, -100 .. 100; above 0 they are retained for nine seconds times the priority after their last use."""

    url: str
    codec: str = "auto"
    save: SavePolicy = SavePolicy.ALL
    load: LoadMode = LoadMode.AUTO
    match_deadline_ms: float = 20.0
    lease_deadline_ms: float = 50.0
    model: str = ""
    weights_epoch: int = 0
    block_tokens: int = 0
    load_threads: int = 1
    save_bytes: int = 1 << 30
    save_patience_ms: float = 1000.0
    cost_model: bool = True
    audit: float = 0.001
    without_prefix_caching: bool = False
    traces: bool = False
    ttl: float | None = None
    priority: int = 0

    @staticmethod
    def of(given: Mapping[str, Any]) -> ConnectorSettings:
        """Raises `BadInput`, with one line, for the first key or value that is wrong."""
        if "sketch_every" in given:
            _log.warning("kv_connector_extra_config: sketch_every was removed, and prompts are judged by kvstore lint")
            given = {name: value for name, value in given.items() if name != "sketch_every"}
        known = [field.name for field in fields(ConnectorSettings)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise BadInput(
                f"kv_connector_extra_config has {', '.join(map(repr, unknown))}, which is no setting; allowed: "
                f"{', '.join(known)}"
            )
        if "url" not in given:
            raise BadInput('kv_connector_extra_config has no url; give the sidecar\'s socket, {"url": "unix:PATH"}')
        checked = dict(given)
        for name, kind in (("save", SavePolicy), ("load", LoadMode)):
            if name in checked:
                checked[name] = _one_of(name, kind, checked[name])
        if "codec" in checked:
            checked["codec"] = payload.codec_meant(checked["codec"])
        settings = ConnectorSettings(**checked)
        settings._check()
        return settings

    def _check(self) -> None:
        is_url = isinstance(self.url, str) and self.url.startswith("unix:")
        _wanted("url", self.url, is_url, 'a sidecar\'s socket, as "unix:/run/kvstore/kvstore.sock"')
        codecs = ("auto", *sorted(payload.CODEC_NAMES))
        _wanted("codec", self.codec, self.codec in codecs, f"one of {', '.join(codecs)}")
        for name in ("match_deadline_ms", "lease_deadline_ms", "save_patience_ms"):
            value = getattr(self, name)
            _wanted(name, value, _is_number(value, 0, MAX_DEADLINE_MS), f"milliseconds, 0 to {MAX_DEADLINE_MS}")
        _wanted("model", self.model, isinstance(self.model, str), "the fingerprint of the weights as text")
        for name, lowest, highest in (
            ("weights_epoch", 0, 1 << 62),
            ("block_tokens", 0, MAX_BLOCK_TOKENS),
            ("load_threads", 1, 16),
            ("save_bytes", 0, 1 << 40),
            ("priority", -100, 100),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest
            _wanted(name, value, whole, f"a whole number from {lowest} to {highest}")
        for name in ("cost_model", "without_prefix_caching", "traces"):
            _wanted(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        _wanted("audit", self.audit, _is_number(self.audit, 0, 1), "a share from 0 to 1")
        is_ttl = self.ttl is None or (_is_number(self.ttl, 0, 1 << 40) and 0 < self.ttl < 1 << 40)
        _wanted("ttl", self.ttl, is_ttl, "seconds above 0 and below 2**40, or null")


def _is_number(value: object, lowest: float, highest: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest


def _one_of(name: str, kind: type[StrEnum], value: object) -> StrEnum:
    try:
        return kind(str(value))
    except ValueError:
        allowed = ", ".join(kind)
        raise BadInput(f"kv_connector_extra_config has {name}={value!r}; allowed: {allowed}") from None


def _wanted(name: str, value: object, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise BadInput(f"kv_connector_extra_config has {name}={value!r}; give {wanted}")
