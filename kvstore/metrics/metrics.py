"""`/metrics`: the sidecar's counters, sampled and rendered at most once a second.

    the store's numbers     one copy, under the store's lock
    tokens and look-ups     one copy, under the lock of `Counting`: so their sum holds in every scrape
    the door, the moves     single numbers, each read at once

The text is made under no lock but that of `Metrics`. A scraper that asks more often gets the last page again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from math import isinf
from typing import Any, get_args

from kvstore.block.account import HitTier, MissReason
from kvstore.core.levels import READS, WRITES
from kvstore.core.usage import StoreUsage
from kvstore.insight.whatif import WhatIf, WhatIfSnapshot
from kvstore.metrics.catalogue import METRICS, PREFIX
from kvstore.metrics.exposition import Exposition, LabelValues, Samples
from kvstore.node import EmbeddedStore
from kvstore.protocol import messages as m
from kvstore.protocol.status import ID_DIGITS, ElsewhereStatus, Readiness, printable
from kvstore.service.accounting import AccountingCounts, Counting, DoorCounts, OfferedTokens, Outcome
from kvstore.service.admin import all_tiers_budget_bytes
from kvstore.service.local_door import LocalDoor
from kvstore.service.parked import Parking
from kvstore.service.sessions import Sessions
from kvstore.service.told import ToldRequests
from tiering.counts.awaits import AwaitCounts
from tiering.counts.histogram import HistogramCounts
from tiering.counts.tally import CheckedAt, TierName
from tiering.move_queue import BreakerState, MoveQueue, Priority
from tiering.tier import Usage

KEPT_SECONDS = 1.0
"""A page is served again for so long."""
OTHER = "other"
UNBOUNDED = "infinite"
VERBS = tuple(m.name_of(verb) for verb in get_args(m.Verb))
SLOT_STATES = ("used", "free", "reserved", "deleting", "quarantined", "zombie")
KINDS_OF_MOVES = {
    Priority.WAITING: "promote",
    Priority.SAVE: "save",
    Priority.DEMOTION: "demote",
    Priority.SCRUB: "scrub",
}
"""A sidecar prefetches nothing."""
TIERS_OF_HITS = tuple(HitTier)
MOST_SOURCES = 64
"""Nodes and engines with series of their own."""
_NO_LABELS: LabelValues = ()


class Metrics:
    """Thread-safe."""

    def __init__(
        self,
        store: EmbeddedStore,
        counting: Counting,
        sessions: Sessions,
        door: LocalDoor,
        state: Callable[[], Readiness],
        version: str,
        whatif: WhatIf,
        told: ToldRequests,
        warnings: Callable[[], list[str]] = lambda: [],
        couriers: Parking | None = None,
    ) -> None:
        """state: the sidecar's state. version: of the program. whatif: estimates other sizes. told: engines' reports of
        what hits saved. warnings: for the operator. couriers: where they are configured."""
        self._couriers = couriers
        self._store = store
        self._counting = counting
        self._sessions = sessions
        self._door = door
        self._state = state
        self._version = version
        self._whatif = whatif
        self._told, self._warnings = told, warnings
        self._exposition = Exposition(METRICS)
        self._lock = threading.Lock()
        self._page = b""
        self._made_at: float | None = None

    def page(self) -> bytes:
        """At most a second old."""
        with self._lock:
            now = self._store.core.clock.monotonic_seconds()
            if self._made_at is None or now - self._made_at >= KEPT_SECONDS:
                self._page = self._exposition.render(self.samples())
                self._made_at = now
            return self._page

    def samples(self) -> Mapping[str, Samples]:
        """By the family's name, then by the values of its labels. Unknown values are left out."""
        couriers = self._couriers.status() if self._couriers is not None else None
        counts, usage, door = self._counting.counts(), self._store.usage(), self._door.counts()
        found: dict[str, dict[LabelValues, Any]] = {}
        for name, samples in chain(
            _tokens(counts, self._store.tenant_names()),
            _tiers(usage),
            _tier_events(usage),
            _moves(self._store.core.move_queue),
            _scrub_and_loading(usage),
            _door(door),
            _savings(self._told),
            _awaits(self._store.core.awaits.counts()),
            _what_if(self._whatif.snapshot(all_tiers_budget_bytes(usage))),
            _elsewhere(couriers) if couriers is not None else (),
        ):
            found[f"{PREFIX}{name}"] = dict(samples)
        state = self._state()
        found[f"{PREFIX}sessions"] = {_NO_LABELS: self._sessions.open_sessions}
        found[f"{PREFIX}state"] = {(one.value,): int(one is state) for one in Readiness}
        node = self._store.core.node
        found[f"{PREFIX}build_info"] = {(self._version, node.node.hex(), node.incarnation.hex()): 1}
        found[f"{PREFIX}warnings"] = {_NO_LABELS: len(self._warnings())}
        return found


_Found = Iterable[tuple[str, Mapping[LabelValues, "int | float | HistogramCounts"]]]


def _one(value: int | float | HistogramCounts) -> Mapping[LabelValues, int | float | HistogramCounts]:
    return {_NO_LABELS: value}


def tenant_label(tenant: bytes) -> str:
    """From a tenant's opaque id: it does not reveal the name, and is the same after a restart."""
    return tenant.hex()[:ID_DIGITS] if tenant else OTHER


def _tokens(counts: AccountingCounts, names: Mapping[bytes, str]) -> _Found:
    tokens = counts.tokens
    yield "asked_tokens_total", _one(tokens.asked)
    yield "found_tokens_total", _one(tokens.found)
    yield "claimed_tokens_total", _one(tokens.claimed)
    yield "granted_tokens_total", {(tier.value,): tokens.granted[tier] for tier in TIERS_OF_HITS}
    yield "revoked_tokens_total", {(tier.value,): tokens.revoked[tier] for tier in TIERS_OF_HITS}
    yield "missed_tokens_total", {(reason.value,): tokens.missed[reason] for reason in MissReason}
    yield (
        "tenant_tokens_total",
        {
            (tenant_label(tenant), outcome.value): mine[outcome]
            for tenant, mine in tokens.by_tenant.items()
            for outcome in Outcome
        },
    )
    yield (
        "tenant_info",
        {(tenant_label(tenant), printable(names[tenant])): 1 for tenant in tokens.by_tenant if tenant in names},
    )
    yield "lookups_total", _one(tokens.lookups)
    yield "leases_total", _one(tokens.leases)
    yield "reports_total", _one(tokens.reports)
    yield "put_tokens_total", {(result.value,): tokens.put[result] for result in OfferedTokens}
    yield "put_refused_tokens_total", {(reason.value,): tokens.put_refused[reason] for reason in MissReason}
    yield "lookup_duration_seconds", _one(counts.lookup_seconds)
    yield "lease_wait_seconds", {(tier, str(end)): one for (tier, end), one in counts.lease_seconds.items()}
    yield "put_duration_seconds", _one(counts.put_seconds)
    yield (
        "namespace_info",
        {
            (one.digest.hex()[:ID_DIGITS], tenant_label(one.tenant), one.model, one.codec, str(one.block_tokens)): 1
            for one in counts.namespaces
            if one.tenant in names
        },
    )


def _tiers(usage: StoreUsage) -> _Found:
    tiers: dict[str, Usage] = {TierName.DRAM.value: usage.dram}
    blocks: dict[LabelValues, int] = {(TierName.DRAM.value,): usage.dram_blocks}
    retained: dict[LabelValues, int] = {(TierName.DRAM.value,): usage.dram_retained_bytes}
    may_be_retained: dict[LabelValues, int] = {(TierName.DRAM.value,): usage.dram_retained_budget_bytes}
    if usage.nvme is not None:
        tiers[TierName.NVME.value] = usage.nvme
        blocks[TierName.NVME.value,] = usage.nvme_blocks or 0
        retained[TierName.NVME.value,] = usage.nvme_retained_bytes or 0
        may_be_retained[TierName.NVME.value,] = usage.nvme_retained_budget_bytes or 0
    yield "tier_budget_bytes", {(name,): one.budget_bytes for name, one in tiers.items()}
    yield "tier_used_bytes", {(name,): one.taken_bytes for name, one in tiers.items()}
    yield "tier_slots", {(name, state): getattr(one, state) for name, one in tiers.items() for state in SLOT_STATES}
    yield "tier_blocks", blocks
    yield "retained_bytes", retained
    yield "retained_limit_bytes", may_be_retained
    yield "pinned_bytes", _one(usage.pinned_bytes)
    yield "pinned_limit_bytes", _one(usage.pinned_budget_bytes)
    yield "guarded_bytes", _one(usage.guarded_bytes)
    yield "leases_open", _one(usage.leases)
    yield "reservations_open", _one(usage.reservations)
    if usage.write_budget is not None:
        yield "nvme_write_budget_bytes", _one(usage.write_budget.left_bytes)


def _tier_events(usage: StoreUsage) -> _Found:
    """Events of those tiers that the store has."""
    tally, scrub = usage.tally, usage.scrub
    if tally is None:
        return
    tiers = [TierName.DRAM] if usage.nvme is None else list(TierName)
    yield (
        "evicted_blocks_total",
        {
            (tier.value, to.value): count
            for (tier, to), count in tally.evicted.items()
            if tier in tiers and (len(tiers) > 1 or to == "nothing")
        },
    )
    yield "eviction_idle_seconds", {(tier.value,): tally.idle[tier] for tier in tiers}
    yield "wanted_again_seconds", {(tier.value,): tally.wanted_again[tier] for tier in tiers}
    yield "quarantined_blocks_total", {(tier.value,): tally.quarantined[tier] for tier in tiers}
    yield "stored_tokens_total", _one(tally.stored_tokens)
    verified, damaged = dict(tally.verified_bytes), dict(tally.damaged)
    del verified[CheckedAt.SCRUB], damaged[CheckedAt.SCRUB]  # the scrub's own counts are taken below
    if scrub is not None:
        verified[CheckedAt.SCRUB], damaged[CheckedAt.SCRUB] = scrub.bytes, scrub.damaged
    yield "verified_bytes_total", {(at.value,): count for at, count in verified.items()}
    yield "damaged_frames_total", {(at.value,): count for at, count in damaged.items()}
    yield "moved_bytes_total", {(kind.value,): count for kind, count in tally.copied_bytes.items()}
    if usage.nvme is not None:
        yield "nvme_written_bytes_total", _one(tally.written_bytes)


def _moves(queue: MoveQueue | None) -> _Found:
    if queue is None:
        return
    ended: dict[LabelValues, int] = {
        (kind, result): 0 for kind in KINDS_OF_MOVES.values() for result in ("done", "failed")
    }
    kinds = {priority.name.lower(): kind for priority, kind in KINDS_OF_MOVES.items()}
    for one in queue.counts():
        if one.priority in kinds:
            ended[kinds[one.priority], "done"] += one.done
            ended[kinds[one.priority], "failed"] += one.failed
    yield "moves_total", ended
    seconds, depths = queue.seconds(), queue.depths()
    yield "move_duration_seconds", {(kind,): seconds[priority] for priority, kind in KINDS_OF_MOVES.items()}
    yield "moves_waiting", {(kind,): depths[priority] for priority, kind in KINDS_OF_MOVES.items()}
    yield (
        "breaker_open",
        {
            (TierName.NVME.value, direction): int(queue.breaker_state(tier) is not BreakerState.CLOSED)
            for direction, tier in (("read", READS), ("write", WRITES))
        },
    )


def _scrub_and_loading(usage: StoreUsage) -> _Found:
    scrub, loading = usage.scrub, usage.loading
    if scrub is not None:
        yield "mended_blocks_total", _one(scrub.mended)
        yield "scrub_unreadable_frames_total", _one(scrub.unreadable)
        if scrub.last_pass_ended is not None:
            yield "scrub_last_pass_timestamp_seconds", _one(scrub.last_pass_ended)
    if loading is not None:
        yield "loading_slots", _one(loading.all_slots)
        yield "loading_slots_taken", _one(loading.slots)


def _savings(told: ToldRequests) -> _Found:
    saved, regretted = told.sums()
    yield "gpu_saved_seconds_total", _one(saved)
    yield "gpu_regret_seconds_total", _one(regretted)


def _awaits(awaits: AwaitCounts) -> _Found:
    yield "awaits_parked", _one(awaits.parked)
    yield "awaits_total", {(why.value,): count for why, count in awaits.ended.items()}
    yield "await_wait_seconds", _one(awaits.seconds)


def _elsewhere(told: ElsewhereStatus) -> _Found:
    yield "couriers", _one(told.couriers)
    yield "adopted_blocks_total", {(tier,): count for tier, count in told.adopted.items()}
    yield "adopt_refused_total", {(why,): count for why, count in told.refused.items()}
    yield "fetched_pinned_bytes", _one(told.kept_bytes)
    sources = {(one.kind, one.name): one for one in told.sources[:MOST_SOURCES]}
    for what in ("blocks", "bytes"):
        counts: dict[LabelValues, int] = {}
        for name, one in sources.items():
            counts |= {(*name, way): getattr(one, f"{what}_{way}") for way in ("in", "out")}
        yield f"source_{what}_total", counts
    yield "source_failures_total", {name: one.failures for name, one in sources.items()}
    yield "source_late_total", {name: one.late for name, one in sources.items()}
    yield "source_unwritten_blocks_total", {name: one.unwritten for name, one in sources.items()}
    yield "source_refused_total", {name: sum(one.refused.values()) for name, one in sources.items()}
    yield "source_percentile_seconds", {name: one.p99_ms / 1000 for name, one in sources.items()}
    yield "source_bytes_per_second", {name: one.gbps * 1e9 for name, one in sources.items()}
    yield "source_state", {(*name, one.state): 1 for name, one in sources.items()}


def _what_if(told: WhatIfSnapshot) -> _Found:
    scales = {one.scale: one.token_hit_rate * told.asked_tokens for one in told.points}
    yield (
        "whatif_hit_tokens",
        {(UNBOUNDED if isinf(scale) else f"{scale:g}",): tokens for scale, tokens in scales.items()},
    )
    yield "whatif_asked_tokens", _one(told.asked_tokens)
    yield "whatif_sample_ratio", _one(told.sample_ratio)
    yield "whatif_dropped_lookups_total", _one(told.dropped_lookups)


def _door(door: DoorCounts) -> _Found:
    yield "requests_total", {(verb,): door.served.get(verb, 0) for verb in VERBS}
    yield "door_wait_seconds", _one(door.waits)
    yield "connections", {("tenant",): door.connections, ("admin",): door.admin_connections}
    yield "refused_connections_total", {(why.value,): count for why, count in door.refused.items()}
    yield "malformed_messages_total", _one(door.malformed)
