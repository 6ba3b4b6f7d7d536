"""The settings of an engine's connector: the keys of vLLM's `kv_connector_extra_config`. Must never read the
environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from kvstore.block.layout import MAX_BLOCK_TOKENS
from kvstore.block.pages import CODEC_NAMES, codec_meant
from kvstore.config import SettingsSection, one_of, read

MAX_DEADLINE_MS = 60_000

_log = logging.getLogger(__name__)


class SavePolicy(StrEnum):
    """Which blocks of a request are offered to the store."""

    ALL = "all"  # the prompt, and generated tokens
    PROMPT = "prompt"  # the prompt's full blocks only
    NONE = "none"  # nothing: this engine reads what others stored


class LoadMode(StrEnum):
    AUTO = "auto"  # before the step if that is quick or nothing else runs, else beside it
    ASYNC = "async"  # beside the steps of others: the request is scheduled when all of it is there
    SYNC = "sync"  # before the step that needs it
    LAYERWISE = "layerwise"  # the same, layer by layer while the step runs


Priority = Annotated[int, Meta(ge=-100, le=100)]
Ttl = Annotated[float, Meta(gt=0, lt=1 << 40, description="seconds above 0 and below 2**40")]
Epoch = Annotated[int, Meta(ge=0, le=1 << 62)]
_Deadline = Annotated[float, Meta(ge=0, le=MAX_DEADLINE_MS, description=f"milliseconds, 0 to {MAX_DEADLINE_MS}")]


class ConnectorSettings(SettingsSection, frozen=True):
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

    url: Annotated[str, Meta(pattern="^unix:", description='a sidecar\'s socket, as "unix:/run/kvstore/kvstore.sock"')]
    codec: Annotated[str, one_of("auto", *sorted(CODEC_NAMES))] = "auto"
    save: SavePolicy = SavePolicy.ALL
    load: LoadMode = LoadMode.AUTO
    match_deadline_ms: _Deadline = 20.0
    lease_deadline_ms: _Deadline = 50.0
    model: str = ""
    weights_epoch: Epoch = 0
    block_tokens: Annotated[int, Meta(ge=0, le=MAX_BLOCK_TOKENS)] = 0
    load_threads: Annotated[int, Meta(ge=1, le=16)] = 1
    save_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 1 << 30
    save_patience_ms: _Deadline = 1000.0
    cost_model: bool = True
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.001
    without_prefix_caching: bool = False
    traces: bool = False
    ttl: Ttl | None = None
    priority: Priority = 0

    @staticmethod
    def of(given: Mapping[str, Any]) -> ConnectorSettings:
        """Raises `BadInput`, with one line, for the first key or value that is wrong."""
        if "sketch_every" in given:
            _log.warning("kv_connector_extra_config: sketch_every was removed, and prompts are judged by kvstore lint")
            given = {name: value for name, value in given.items() if name != "sketch_every"}
        if "codec" in given:
            given = {**given, "codec": codec_meant(given["codec"])}
        return read(ConnectorSettings, given, "kv_connector_extra_config: ")
