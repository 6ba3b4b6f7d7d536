"""Our vLLM connector with a clock on each of its hooks and on each request's look-up (floor 4).

`bench ttft --engine vllm` starts its engines with this subclass: the connector itself stays as it is, and what the
clocks add is some 0.2 us a call. A hook that calls another one counts once. Both halves have to be in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import isfunction
from time import perf_counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from engine_adapter import paged_scheduler
from engine_adapter.prefix_lookup import PrefixLookup
from engine_adapter.vllm_connector import KvStoreConnector, Orders
from kvstore.handle import Match

ON_START_AND_END = frozenset(
    {"register_kv_caches", "get_handshake_metadata", "set_xfer_handshake_metadata", "reset_cache", "shutdown"}
)
"""Hooks that no request and no step waits for."""
WAITS_WHEN_IDLE = frozenset({"get_finished", "get_transfer_results"})
"""In a step that computes nothing they wait for loads, so that they get the processor: no cost, and not counted."""


@dataclass(slots=True)
class HookTimes:
    """Seconds and calls of each hook."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    depth: int = 0

    def add(self, hook: str, seconds: float) -> None:
        """One call from the engine."""
        self.seconds[hook] = self.seconds.get(hook, 0.0) + seconds
        self.calls[hook] = self.calls.get(hook, 0) + 1

    @property
    def total(self) -> float:
        """Seconds in all hooks."""
        return sum(self.seconds.values())


@dataclass(slots=True)
class LookupTimes:
    """Of the request that was asked last: moments on the clock, 0 for what did not happen."""

    asked: float = 0.0
    found: float = 0.0
    leased: float = 0.0

    @property
    def lookup_ms(self) -> float:
        """From the first token's hash to the store's answer."""
        return 1e3 * max(0.0, self.found - self.asked)

    @property
    def lease_ms(self) -> float:
        """From there until the blocks are pinned."""
        return 1e3 * max(0.0, self.leased - self.found) if self.leased else 0.0


class TimedLookup(PrefixLookup):
    """A look-up that notes when it got on."""

    def __init__(self, times: LookupTimes, *args: Any, **kwargs: Any) -> None:
        """times: where it is noted."""
        self._times = times
        super().__init__(*args, **kwargs)

    def found(self) -> Match | None:
        match = super().found()
        if match is not None and not self._times.found:
            self._times.found = perf_counter()
        return match

    def matched(self, *args: Any, **kwargs: Any) -> int | None:
        tokens = super().matched(*args, **kwargs)
        if self.lease is not None and not self._times.leased:
            self._times.leased = perf_counter()
        return tokens


class TimedConnector(KvStoreConnector):
    """`times`: of this half's hooks. `lookup`: of the last request, in the scheduler's half."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        self.times = HookTimes()
        self.lookup = LookupTimes()
        self.is_idle = False
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            # The scheduler's half makes its look-ups itself: this process has one, and nobody else's.
            setattr(paged_scheduler, PrefixLookup.__name__, partial(TimedLookup, self.lookup))

    def on_new_request(self, request: Any) -> None:
        """Hashing is part of the look-up."""
        self.lookup.asked, self.lookup.found, self.lookup.leased = perf_counter(), 0.0, 0.0
        super().on_new_request(request)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Whether this step computes anything is with its orders."""
        self.is_idle = isinstance(connector_metadata, Orders) and not connector_metadata.step.number
        super().bind_connector_metadata(connector_metadata)


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def timed(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        times = self.times
        times.depth += 1
        start = perf_counter()
        try:
            return hook(self, *args, **kwargs)
        finally:
            times.depth -= 1
            if not times.depth and not (self.is_idle and name in WAITS_WHEN_IDLE):
                times.add(name, perf_counter() - start)

    return timed


HOOKS = tuple(
    name
    for name, member in vars(KvStoreConnector).items()
    if not name.startswith("_") and name not in ON_START_AND_END and isfunction(member)
)
for _name in HOOKS:
    setattr(TimedConnector, _name, _timed(_name, getattr(TimedConnector, _name)))
