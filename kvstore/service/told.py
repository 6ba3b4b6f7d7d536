"""Engines' reports on their requests, beside what the sidecar saw of these: for `kvstore why`, and the time that hits
saved. For people: nothing here decides anything.

    a lease names the request that it serves  > noted    > its engine reports its fate         > noted beside that
    an engine reports what its loads saved    > summed   > the sums stay when it disconnects

Each tenant has an equal number of remembered requests, so that none displaces another's. Reports are bounded by the
message and shown as text; no decision depends on them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec

from kvstore.block.account import HitTier
from kvstore.block.errors import BadInput
from kvstore.protocol import messages as m
from kvstore.protocol.messages import LeaseReply, MatchReply
from kvstore.protocol.told import GoneNote, RequestRecord, RequestTold, SavingsTold, StoreNote
from kvstore.protocol.words import printable
from kvstore.service.sessions import ClientState
from kvstore.status.tree import SavingsStatus
from tiering.clock import Clock
from tiering.counts.tally import Eviction, EvictionCause

Gone = tuple[Eviction, bool] | None
"""How a block was evicted, and whether it had a ttl."""
TTL = "ttl"

MOST_REQUESTS = 1024
"""Of one tenant, the latest."""
MOST_LEASES = 8
"""Of one request, the first ones, and as many look-ups; only the engine counts more."""
MOST_PURGES = 1024
"""Tenants whose last purge is remembered."""
MOST_SECONDS = 1e9
"""The most that an engine may report as saved at once."""
MOST_MS = 1e9
LOADED_TIERS = ("dram", "nvme")
LATEST_LOADS = 0.9
"""Weight that earlier loads of a tier keep with each new one."""
LEAST_LOAD_MS, MOST_RATE = 0.001, 1e12
"""Bounds of a reported load time, and of the tokens per second that are shown."""
MOST_ENGINES = 1024
"""Engines whose times to first token are kept; of more, the one that reported longest ago is dropped."""


@dataclass(slots=True)
class _KnownRequest:
    engine: str
    namespace: int = -1
    looked: list[StoreNote] = field(default_factory=list)
    leases: list[StoreNote] = field(default_factory=list)
    reported: int = 0
    told_at: float | None = None
    told: RequestTold | None = None

    @property
    def noted_at(self) -> float:
        """When it was last noted."""
        return max([self.told_at or 0.0, *(one.at for one in self.looked), *(one.at for one in self.leases)])


class ToldRequests:
    """One sidecar's. Thread-safe; the lock is held for some additions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By tenant, then by session and request; the most recently noted at the end.
        self._requests: dict[bytes, OrderedDict[tuple[bytes, str], _KnownRequest]] = {}
        self._saved = self._regretted = 0.0
        self._tellers: OrderedDict[bytes, SavingsTold] = OrderedDict()  # by session
        self._loads: dict[bytes, dict[int, dict[str, tuple[float, float]]]] = {}  # tokens, ms: tenant, namespace, tier
        self._purged: OrderedDict[str, float] = OrderedDict()  # by tenant's name: when

    def answered(
        self,
        caller: ClientState,
        verb: m.MatchPrefix | m.LeasePrefix,
        number: int,
        reply: MatchReply | LeaseReply,
        seconds: float,
        gone: Gone,
    ) -> None:
        """A look-up or a lease for a request was answered, after so many seconds in the store. number: of the
        namespace. gone: how the first block that it missed was evicted."""
        now, lease = self._clock.wall_seconds(), verb if isinstance(verb, m.LeasePrefix) else None
        first = lease.first_block if lease is not None else 0
        counts = seconds, len(verb.keys) - first, max(0, reply.blocks - first), by_tier(reply.tiers)
        reasons = str(reply.reason or ""), printable(reply.detail)
        with self._lock:
            noted = self._noted(caller, verb.request)
            noted.namespace = number
            notes = noted.looked if lease is None else noted.leases
            if len(notes) < MOST_LEASES:
                notes.append(StoreNote(now, *counts, *reasons, _gone_note(gone, now), None if lease is None else first))

    def reported(self, caller: ClientState, request: str) -> None:
        """A block that was leased for a request failed its reader's check."""
        with self._lock:
            noted = self._requests.get(caller.keys.tenant, OrderedDict()).get((caller.session.token, request))
            if noted is not None:
                noted.reported += 1

    def tell(self, caller: ClientState, verb: m.Tell) -> None:
        """An engine reports on its requests. Raises `BadInput` for impossible numbers."""
        savings = verb.savings
        if savings is not None:
            _check(savings)
        for one in verb.requests:
            if not 0 <= one.load_ms <= MOST_MS:
                raise BadInput(f"load_ms={one.load_ms:g} of a request; give 0 to {MOST_MS:g}")
        now = self._clock.wall_seconds()
        with self._lock:
            for one in (some for some in verb.requests if some.request):
                noted = self._noted(caller, one.request)
                noted.told_at, noted.told = now, _shown(one)
                if one in verb.firsts:
                    self._took(caller.keys.tenant, noted.namespace, one)
            if savings is not None:
                self._saved += savings.saved_seconds
                self._regretted += savings.regret_seconds
                self._tellers[caller.session.name] = savings
                self._tellers.move_to_end(caller.session.name)
                if len(self._tellers) > MOST_ENGINES:
                    self._tellers.popitem(last=False)

    def why(self, request: str, names: Mapping[bytes, str], models: Callable[[int], str]) -> m.WhyReply:
        """What is known of requests whose names begin so. names: of the tenants to search. models: a namespace's model,
        by its number."""
        found: list[tuple[float, str, str, _KnownRequest]] = []
        kept = 0
        for tenant, name in names.items():
            with self._lock:  # one tenant at a time, so that leases can be noted in between
                mine = list(reversed(self._requests.get(tenant, OrderedDict()).items()))
            kept += len(mine)
            found += [(one.noted_at, own, name, one) for (_, own), one in mine if own.startswith(request)]
        found.sort(key=lambda one: -one[0])
        records = [
            RequestRecord(
                printable(own),
                printable(name),
                printable(one.engine),
                printable(models(one.namespace)) if one.namespace >= 0 else "",
                list(one.leases),
                one.told_at,
                one.told,
                list(one.looked),
                one.reported,
                self._purged.get(name),
            )
            for _, own, name, one in found[: m.MAX_RECORDS]
        ]
        return m.WhyReply(records, kept)

    def savings(self) -> SavingsStatus | None:
        """The sum of all engines' reports since the sidecar began; None without any."""
        with self._lock:
            if not self._tellers:
                return None
            measured = [
                (one.ttft_saved_ms, one.ttft_saved_error_ms)
                for one in self._tellers.values()
                if one.ttft_saved_ms is not None and one.ttft_saved_error_ms is not None
            ]
            mean = error = None
            if measured:  # engines are weighted by certainty
                weights = [1.0 / max(spread, 1e-3) ** 2 for _, spread in measured]
                mean = sum(value * weight for (value, _), weight in zip(measured, weights, strict=True)) / sum(weights)
                error = (1.0 / sum(weights)) ** 0.5
            return SavingsStatus(self._saved, self._regretted, len(self._tellers), mean, error)

    def sums(self) -> tuple[float, float]:
        """GPU seconds saved, and regretted: both only grow."""
        with self._lock:
            return self._saved, self._regretted

    def load_rates(self, tenant: bytes, number: int) -> dict[str, float]:
        """Tokens per second of engines' recent loads from a namespace, by the tier that had all of a load."""
        with self._lock:
            loads = self._loads.get(tenant, {}).get(number, {})
            return {tier: min(1000 * tokens / ms, MOST_RATE) for tier, (tokens, ms) in loads.items()}

    def forget(self, tenant: bytes, name: str) -> None:
        """A tenant was purged."""
        with self._lock:
            self._requests.pop(tenant, None)
            self._loads.pop(tenant, None)
            self._purged[name] = self._clock.wall_seconds()
            self._purged.move_to_end(name)
            if len(self._purged) > MOST_PURGES:
                self._purged.popitem(last=False)

    def _took(self, tenant: bytes, number: int, told: RequestTold) -> None:
        """Note a load that its request waited for, if one tier had all of it. Under the lock."""
        tiers = [tier for tier in LOADED_TIERS if told.hits.get(tier)]
        if number < 0 or len(tiers) != 1 or told.load_ms < LEAST_LOAD_MS:
            return
        loads = self._loads.setdefault(tenant, {}).setdefault(number, {})
        tokens, ms = loads.get(tiers[0], (0.0, 0.0))
        loads[tiers[0]] = tokens * LATEST_LOADS + told.hits[tiers[0]], ms * LATEST_LOADS + told.load_ms

    def _noted(self, caller: ClientState, request: str) -> _KnownRequest:
        """Under the lock."""
        mine = self._requests.setdefault(caller.keys.tenant, OrderedDict())
        name = caller.session.token, request
        noted = mine.get(name)
        if noted is None:
            noted = mine[name] = _KnownRequest(caller.session.engine)
            if len(mine) > MOST_REQUESTS:
                mine.popitem(last=False)
        mine.move_to_end(name)
        return noted


def by_tier(runs: Sequence[tuple[HitTier, int]]) -> dict[str, int]:
    """Blocks of each tier, in runs."""
    tiers: dict[str, int] = {}
    for tier, blocks in runs:
        tiers[str(tier)] = tiers.get(str(tier), 0) + blocks
    return tiers


def _gone_note(gone: Gone, now: float) -> GoneNote | None:
    if gone is None:
        return None
    eviction, had_ttl = gone
    cause = TTL if had_ttl and eviction.cause is not EvictionCause.DROP else str(eviction.cause)
    return GoneNote(now - eviction.seconds_ago, str(eviction.tier), cause)


def _check(savings: SavingsTold) -> None:
    for name in ("saved_seconds", "regret_seconds"):
        value = getattr(savings, name)
        if not 0 <= value <= MOST_SECONDS:
            raise BadInput(f"{name}={value:g}; give 0 to {MOST_SECONDS:g}")
    for name in ("ttft_saved_ms", "ttft_saved_error_ms"):
        value = getattr(savings, name)
        if value is not None and not (isfinite(value) and abs(value) <= MOST_MS):
            raise BadInput(f"{name}={value:g}; give a number of milliseconds")


def _shown(told: RequestTold) -> RequestTold:
    """Made safe for a terminal."""
    hits, misses, put_reasons = (
        {printable(name): count for name, count in counts.items()}
        for counts in (told.hits, told.misses, told.put_reasons)
    )
    return msgspec.structs.replace(
        told,
        request=printable(told.request),
        detail=printable(told.detail),
        hits=hits,
        misses=misses,
        put_reasons=put_reasons,
    )
