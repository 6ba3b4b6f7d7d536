"""What a running sidecar reports of itself, and a name, a text and a unit for each number that is a metric.

Programs read it as JSON, and Prometheus, gRPC, the console and `kvstore stat` are walks over it (`declared`), so a new
number is a new field. Fields are only ever appended, with defaults; sizes are in bytes, times in seconds, instants in
Unix time. Text that a client gave is cut and printable. Knows no keys and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from kvstore.status.declared import counter, gauge, histogram, label, parts
from tiering.counts.histogram import HistogramCounts as Times
from tiering.faults import MachineFault
from tiering.policies.admission import WriteBudget
from tiering.tier import MoveCounts, ScrubUsage

MAX_WHERE_CHARACTERS = 256
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Word = Annotated[str, Meta(max_length=16)]
Where = Annotated[str, Meta(max_length=MAX_WHERE_CHARACTERS)]
"""Of a courier's report, which is bounded where it is read."""
Counts = dict[str, int]
CountsByTwo = dict[str, Counts]

VERIFIED, DAMAGED = "Frames that were verified, by occasion.", "Frames that failed a check, by occasion."
CONNECTIONS = "Connections now; admin: of operators."
RETAINED = "Kept for a time, because a client asked for it."
MAY_BE_RETAINED = "What may be kept for a time."
BLOCKS_CAME, WAYS = "Blocks that came from a source, or went there.", "kind name direction"
SLOT_STATES = ("used", "free", "reserved", "deleting", "quarantined", "zombie")


class Readiness(StrEnum):
    """A sidecar's state."""

    READY = "ready"
    WARMING = "warming"  # it serves, and a miss may have the reason `warming`
    DEGRADED = "degraded"  # it serves; a resource ran out or fails, or recovery could not take in all that is on disk
    STOPPING = "stopping"


class TierStatus(msgspec.Struct, frozen=True):
    """Slots by state, bytes taken from the tier's budget."""

    name: Annotated[str, label("tier")]
    budget_bytes: Annotated[int, gauge("What a tier may take.", "tier_budget_bytes", "tier")]
    taken_bytes: Annotated[
        int,
        gauge("Taken from the budget, in whole extents and slabs with their free slots.", "tier_used_bytes", "tier"),
    ]
    slots: Annotated[Counts, gauge("Frames' places by state.", "tier_slots", "tier state")]
    blocks: Annotated[
        int, gauge("Blocks that a tier has; damaged ones in dram until they are stored again.", "tier_blocks", "tier")
    ] = 0


class TenantStatus(msgspec.Struct, frozen=True):
    """What a tenant uses of each tier, in whole extents and slabs, and what is guaranteed to it. share, weight: as they
    were set; None if they were not. nvme: None without NVMe. retained: bytes that clients asked to retain, and
    retained_budget the most that may be; None if the tenant has no settings."""

    tenant: str
    share: float | None
    weight: float | None
    dram_bytes: int
    dram_guaranteed_bytes: int
    nvme_bytes: int | None
    nvme_guaranteed_bytes: int | None
    dram_retained_bytes: int | None = None
    dram_retained_budget_bytes: int | None = None
    nvme_retained_bytes: int | None = None
    nvme_retained_budget_bytes: int | None = None


class LookupCounts(msgspec.Struct, frozen=True):
    """asked == sum of hits + sum of misses + found, in tokens and in blocks. hit_tokens: granted - revoked, by tier.
    found: looked up, and not leased (yet): found_in_all - claimed. hit_rate: tokens granted by leases from the store's
    own tiers / tokens asked for; None where nothing was."""

    asked_tokens: Annotated[
        int,
        counter(
            "Tokens of prompts that engines reported; of other clients, of whole blocks looked up, or leased without "
            "that."
        ),
    ] = 0
    hit_tokens: Counts = {}
    miss_tokens: Annotated[
        Counts,
        counter("Tokens that were not to be had, by reason; revoked ones are corrupt.", "missed_tokens", "reason"),
    ] = {}
    found_tokens: int = 0
    asked_blocks: int = 0
    hit_blocks: Counts = {}
    miss_blocks: Counts = {}
    found_blocks: int = 0
    lookups: Annotated[int, counter("Look-ups; those of puts are none.", unit="look-ups")] = 0
    leases: Annotated[int, counter("Leases that clients asked for, of at least one block.")] = 0
    reports: Annotated[int, counter("Blocks that a reader's check found bad, as clients told.")] = 0
    granted_tokens: int = 0
    hit_rate: float | None = None
    found_in_all: Annotated[
        int, counter("Tokens that look-ups found, but for those of requests that are reported.", "found_tokens")
    ] = 0
    claimed: Annotated[int, counter("Tokens that were found and then asked for by a lease.", "claimed_tokens")] = 0
    granted: Annotated[
        Counts,
        counter(
            "Tokens that engines reported as hits, and that others' leases granted; engine: of an engine's own cache.",
            "granted_tokens",
            "tier",
        ),
    ] = {}
    revoked: Annotated[
        Counts, counter("Tokens that were granted and then failed their reader's check.", "revoked_tokens", "tier")
    ] = {}

    @staticmethod
    def summed(several: Iterable[LookupCounts]) -> LookupCounts:
        """All that these count."""
        sums: dict[str, Any] = {}
        for one in several:
            for name, value in structs.asdict(one).items():
                if isinstance(value, dict):
                    mine = sums.setdefault(name, {})
                    mine |= {key: mine.get(key, 0) + count for key, count in value.items()}
                else:
                    sums[name] = sums.get(name, 0) + (value or 0)
        asked = sums.get("asked_tokens", 0)
        return LookupCounts(**{**sums, "hit_rate": sums["granted_tokens"] / asked if asked else None})


class PutCounts(msgspec.Struct, frozen=True):
    """Puts since the start, in tokens. seconds: of whole ones."""

    tokens: Annotated[
        Counts,
        counter("Tokens that puts offered; each process of a collective put offers its own.", "put_tokens", "result"),
    ] = {}
    refused: Annotated[
        Counts, counter("Tokens that puts offered and that are not stored, by reason.", "put_refused_tokens", "reason")
    ] = {}
    seconds: Annotated[
        Times | None,
        histogram(
            "From a put's reservation to the commit of its last block: the client copies between.", "put_duration"
        ),
    ] = None


class ServedCounts(msgspec.Struct, frozen=True):
    """Since the start. lease_seconds: by the slowest tier, and by how much of what was wanted was granted. tenants: the
    first 20, by a label that does not tell their names, and by outcome; named: their names. namespaces: the 32 that
    were opened last."""

    lookup_seconds: Annotated[Times | None, histogram("What the store took for a look-up.", "lookup_duration")] = None
    lease_seconds: Annotated[
        dict[str, dict[str, Times]],
        histogram(
            "What the store took for a lease, by the slowest tier that it came from.", "lease_wait", "tier result"
        ),
    ] = {}
    puts: PutCounts = PutCounts()
    tenants: Annotated[
        CountsByTwo,
        counter("The same six of each of the first 20 tenants; the rest: other.", "tenant_tokens", "tenant outcome"),
    ] = {}
    named: Annotated[
        list[tuple[str, str]], gauge("Names of the tenants of tenant_tokens.", "tenant_info", "tenant name", unit="1")
    ] = []
    namespaces: Annotated[
        list[tuple[str, str, str, str, str]],
        gauge(
            "The 32 namespaces that were opened last.",
            "namespace_info",
            "namespace tenant model codec block_tokens",
            unit="1",
        ),
    ] = []


class TierEvents(msgspec.Struct, frozen=True):
    """What the store's tiers did since the start."""

    evicted: Annotated[
        CountsByTwo,
        counter("Blocks that had to make room, and where they can still be read.", "evicted_blocks", "tier to"),
    ] = {}
    idle: Annotated[
        dict[str, Times], histogram("From a block's last use until it was evicted.", "eviction_idle", "tier")
    ] = {}
    wanted_again: Annotated[
        dict[str, Times],
        histogram("From a block's eviction from the last tier until it was asked for, once for each.", labels="tier"),
    ] = {}
    quarantined: Annotated[
        Counts, counter("Blocks that were taken out of use because a frame was damaged.", "quarantined_blocks", "tier")
    ] = {}
    verified_bytes: Annotated[Counts, counter(VERIFIED, labels="where")] = {}
    damaged: Annotated[Counts, counter(DAMAGED, "damaged_frames", "where")] = {}
    moved_bytes: Annotated[
        Counts, counter("Frames that arrived: promoted to dram, demoted to nvme, compacted within dram.", labels="kind")
    ] = {}
    written_bytes: Annotated[
        int | None,
        counter("Frames written to nvme; index, headers of slabs and failed writes are not in.", "nvme_written_bytes"),
    ] = None
    stored_tokens: Annotated[int, counter("Tokens of blocks that puts made readable.")] = 0


class QueueStatus(msgspec.Struct, frozen=True):
    """The queue of moves, by kind. breaker_open: by tier and direction."""

    ended: Annotated[
        CountsByTwo,
        counter("Moves between dram and nvme that ended; demote, save and scrub: batches.", "moves", "kind result"),
    ] = {}
    seconds: Annotated[
        dict[str, Times], histogram("How long a move ran, whatever came of it.", "move_duration", "kind")
    ] = {}
    waiting: Annotated[Counts, gauge("Moves that have not begun.", "moves_waiting", "kind", unit="moves")] = {}
    breaker_open: Annotated[
        CountsByTwo,
        gauge("Whether moves are refused because the tier keeps failing.", labels="tier direction", unit="0 or 1"),
    ] = {}


class NamespaceStatus(msgspec.Struct, frozen=True):
    """id: the first digits of the digest. nvme: None without NVMe. used_at: of the last request, in this run. name:
    what an engine called the model, "" if none did. load_tokens_per_second: by tier, of loads that engines reported
    lately."""

    id: str
    digest: str
    tenant: str
    model: str
    layout: str
    codec: str
    weights_epoch: int
    block_tokens: int
    blocks: int
    dram_blocks: int
    dram_bytes: int
    nvme_blocks: int | None
    nvme_bytes: int | None
    used_at: float | None
    looked: LookupCounts
    name: str = ""
    load_tokens_per_second: dict[str, float] = {}


class SessionStatus(msgspec.Struct, frozen=True):
    """One engine. since: when it connected. wait_ms_p50, wait_ms_p99: of all requests of its open connections, from the
    earliest that one may have arrived until it was begun; rounded up, by at most an eighth."""

    engine: str
    tenant: str
    connections: int
    leases: int
    leased_blocks: int
    reservations: int
    since: float
    wait_ms_p50: float | None = None
    wait_ms_p99: float | None = None


class DoorStatus(msgspec.Struct, frozen=True):
    """wait_ms_p50, wait_ms_p99: of the last requests, from the earliest that one may have arrived on."""

    connections: Annotated[int, gauge(CONNECTIONS, labels="door", door="tenant")]
    admin_connections: Annotated[int, gauge(CONNECTIONS, "connections", "door", door="admin")]
    refused: int
    malformed: Annotated[
        int, counter("Messages that ended their connection because they were none.", "malformed_messages")
    ]
    served: Annotated[Counts, counter("Requests at all sockets, by verb.", "requests", "verb")]
    wait_ms_p50: float | None
    wait_ms_p99: float | None
    refused_for: Annotated[Counts, counter("Connections that were turned away.", "refused_connections", "reason")] = {}
    waits: Annotated[
        Times | None, histogram("From when a request may have been there until it was begun.", "door_wait")
    ] = None


class RecoveryStatus(msgspec.Struct, frozen=True):
    """Recovery of what an earlier run left on disk. slots: examined, of all_slots. blocks: that can be found by now.
    verified_bytes, to_verify_bytes: of frames that must be read before they count, as a crash lost the index."""

    slots: Annotated[int, gauge("Of these, how many were taken in.", "loading_slots_taken", unit="slots")] = 0
    all_slots: Annotated[int, gauge("Slots of an earlier run's slabs.", "loading_slots")] = 0
    blocks: int = 0
    verified_bytes: int = 0
    to_verify_bytes: int = 0


class WhatIfPoint(msgspec.Struct, frozen=True):
    """What a store of so many bytes would have found: a share of the tokens asked for. size_bytes, scale: None for the
    ceiling, which no size exceeds. scale: times the budget of all tiers."""

    size_bytes: int | None
    scale: float | None
    token_hit_rate: float


class WhatIfStatus(msgspec.Struct, frozen=True):
    """Hit rates that other sizes would have, estimated from a sample of the look-ups of about the last hour: with LRU
    eviction, and if nothing was evicted. budget_bytes: of all tiers. points: at some multiples of it, the ceiling last.
    curve: rising sizes, from one that finds nothing to one that finds all. asked_tokens: their weight halves in each
    half hour. tokens_per_second: that were asked for. sample_ratio: of names. seconds: how long it has counted. words:
    a sentence to show beside the figures."""

    budget_bytes: int
    points: list[WhatIfPoint]
    curve: list[WhatIfPoint]
    asked_tokens: Annotated[int, gauge("Tokens that these are a part of.", "whatif_asked_tokens")]
    tokens_per_second: float
    sample_ratio: Annotated[float, gauge("The share of all blocks that the estimate follows.", "whatif_sample_ratio")]
    sampled_names: int
    seconds: float
    lookups: int
    dropped_lookups: Annotated[
        int,
        counter(
            "Look-ups that came too fast or were too long, and are not in the estimate.",
            "whatif_dropped_lookups",
            unit="look-ups",
        ),
    ]
    words: str
    hit_tokens: Annotated[
        Counts,
        gauge(
            "Tokens that so many times the budget of all tiers would have found, with least recently used.",
            "whatif_hit_tokens",
            "scale",
        ),
    ] = {}


class SavingsStatus(msgspec.Struct, frozen=True):
    """What engines report that hits saved, since the sidecar began. saved_seconds, regret_seconds: GPU seconds by which
    loads were faster, and slower, than computing the same would have been, estimated by the speeds that each engine has
    learned. engines: that reported. ttft_saved_ms: of the time to the first token, measured on hits that an engine
    computed all the same, to compare, with its standard error; None where too few were."""

    saved_seconds: Annotated[
        float,
        counter("By how much loads took less than computing the same, times the engine's GPUs.", "gpu_saved_seconds"),
    ]
    regret_seconds: Annotated[float, counter("The same for loads that took longer.", "gpu_regret_seconds")]
    engines: int
    ttft_saved_ms: float | None = None
    ttft_saved_error_ms: float | None = None


class KeyStatus(msgspec.Struct, frozen=True):
    """A tenant's keys. fingerprint: of its identity, in hexadecimal. epoch: that signs what is stored now. accepted:
    all epochs whose frames are read."""

    tenant: str
    fingerprint: str
    epoch: int
    accepted: list[int] = []


class AwaitStatus(msgspec.Struct, frozen=True):
    """Waits for blocks that other clients store."""

    parked: Annotated[
        int, gauge("Waits for blocks that are not readable yet, now.", "awaits_parked", unit="awaits")
    ] = 0
    ended: Annotated[Counts, counter("Waits for blocks that are over, by why.", "awaits", "end")] = {}
    seconds: Annotated[
        Times | None,
        histogram("From an await's coming until it was over; those over at once are left out.", "await_wait"),
    ] = None


class SourceStatus(msgspec.Struct, frozen=True):
    """Another node, a remote engine or the directory, as a courier reports it. kind: `peer`, `remote` or `directory`.
    gbps, p99_ms: of the last transfers of a megabyte and more, or 0. hints: that are known or announced."""

    kind: Annotated[Word, label("kind")]
    name: Annotated[Where, label("name")]
    state: Annotated[
        Word,
        gauge(
            "What state a source is in: up, down, banned or open (breaker).",
            "source_state",
            "kind name state",
            unit="1",
        ),
    ]
    blocks_in: Annotated[Count, counter(BLOCKS_CAME, "source_blocks", WAYS, direction="in")] = 0
    blocks_out: Annotated[Count, counter(BLOCKS_CAME, "source_blocks", WAYS, direction="out")] = 0
    bytes_in: Annotated[Count, counter("The same in bytes.", "source_bytes", WAYS, direction="in")] = 0
    bytes_out: Annotated[Count, counter("The same in bytes.", "source_bytes", WAYS, direction="out")] = 0
    lookups: Count = 0
    found: Count = 0
    failures: Annotated[
        Count, counter("Calls to a source that failed, or were late.", "source_failures", "kind name")
    ] = 0
    refused: Annotated[
        dict[Annotated[str, Meta(max_length=32)], Count],
        Meta(max_length=16),
        counter("Frames of a source that failed a check.", "source_refused", "kind name", unit="frames"),
    ] = {}
    gbps: Annotated[
        float,
        gauge(
            "Of the last transfers from a source.",
            "source_bytes_per_second",
            "kind name",
            unit="bytes per second",
            times=1e9,
        ),
    ] = 0.0
    p99_ms: Annotated[
        float,
        gauge(
            "The 99th percentile of the last transfers from a source.",
            "source_percentile_seconds",
            "kind name",
            times=1e-3,
        ),
    ] = 0.0
    hints: Count = 0
    detail: Where = ""
    late: Annotated[
        Count,
        counter("Look-ups that ended after the engine had given up.", "source_late", "kind name", unit="look-ups"),
    ] = 0
    unwritten: Annotated[
        Count, counter("Times that a block was not taken: no room, or a fault.", "source_unwritten_blocks", "kind name")
    ] = 0


class ElsewhereStatus(msgspec.Struct, frozen=True):
    """Blocks that couriers fetch. gave_way: unpinned because engines lacked room. What follows is as couriers report:
    fetching, now; reasons, why they serve less than there is; dropped_hints: that were not announced."""

    couriers: Annotated[int, gauge("Connections of couriers that take questions.")] = 0
    adopted: Annotated[
        Counts, counter("Blocks that couriers brought, by where they came from.", "adopted_blocks", "tier")
    ] = {}
    refused: Annotated[
        Counts,
        counter(
            "What couriers brought that was not adopted, by what was wrong.", "adopt_refused", "why", unit="messages"
        ),
    ] = {}
    kept_bytes: Annotated[
        int, gauge("DRAM of fetched blocks that are kept for who waits for them.", "fetched_pinned_bytes")
    ] = 0
    gave_way: int = 0
    sources: list[SourceStatus] = []
    reasons: list[str] = []
    fetching: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    dropped_hints: int = 0


class SidecarStatus(msgspec.Struct, frozen=True):
    """The whole report. counters: events since the start. departed: connections that are gone and may still map memory.
    hidden_namespaces, hidden_sessions: how many the lists leave out, so that the report stays small. policy,
    nvme_writes, retained_fraction: as they were set; nvme_writes: None without such a tier. retained: kept for a time,
    as clients asked. health: "ok", or "degraded (why)"; faults: what the machine refuses at the moment; fault_counts:
    how often it refused since the start, by kind. policy_note: why eviction does not follow the policy that was set; ""
    where it does. whatif: what other sizes would find. savings: what hits saved, as engines report. node, incarnation:
    which node this is, and which run of it, in hexadecimal. keys: of tenants. warnings: problems that stop no serving
    here and that the operator should see to: keys that differ, a node's id that two have. awaits: waits for blocks.
    elsewhere: what couriers bring; None where none is wanted. open_sessions: with couriers, and with engines that are
    gone and may map memory. version: of the program, where it is known. served, events, queue: since the start; None
    where there is none of it. reasons: those of health, a line each. public_warnings: the kinds of warnings, without
    names of tenants."""

    run: str
    pid: int
    state: Annotated[str, gauge("What the sidecar is up to, as at /readyz.", labels="state", unit="0 or 1")]
    at: float
    up_seconds: float
    tiers: list[TierStatus]
    blocks: int
    leases: Annotated[int, gauge("Leases that pin.", "leases_open", unit="leases")]
    reservations: Annotated[int, gauge("Puts under way.", "reservations_open", unit="reservations")]
    pinned_bytes: Annotated[int, gauge("DRAM that leases, puts and moves forbid to evict, each block once.")]
    looked: LookupCounts
    namespaces: list[NamespaceStatus]
    moves: list[MoveCounts]
    sessions: list[SessionStatus]
    departed: int
    counters: Counts
    door: DoorStatus
    loading: RecoveryStatus | None
    scrub: Annotated[
        ScrubUsage | None,
        parts(
            bytes=counter(VERIFIED, "verified_bytes", "where", where="scrub"),
            damaged=counter(DAMAGED, "damaged_frames", "where", where="scrub"),
            mended=counter("Blocks that were damaged on nvme and written again from dram.", "mended_blocks"),
            unreadable=counter("Times that the scrub could not read a frame.", "scrub_unreadable_frames"),
            last_pass_ended=gauge(
                "When the last whole pass of the scrub ended.", "scrub_last_pass_timestamp_seconds", unit="Unix time"
            ),
        ),
    ]
    hidden_namespaces: int = 0
    hidden_sessions: int = 0
    guarded_bytes: Annotated[int, gauge("DRAM that clients of an earlier process still map.")] = 0
    tenants: list[TenantStatus] = []
    dram_retained_bytes: Annotated[int, gauge(RETAINED, "retained_bytes", "tier", tier="dram")] = 0
    nvme_retained_bytes: Annotated[int | None, gauge(RETAINED, "retained_bytes", "tier", tier="nvme")] = None
    policy: str = ""
    nvme_writes: str | float | None = None
    write_budget: Annotated[
        WriteBudget | None,
        parts(left_bytes=gauge("What store.nvme_writes leaves to be written now.", "nvme_write_budget_bytes")),
    ] = None
    retained_fraction: float | None = None
    dram_retained_budget_bytes: Annotated[int, gauge(MAY_BE_RETAINED, "retained_limit_bytes", "tier", tier="dram")] = 0
    nvme_retained_budget_bytes: Annotated[
        int | None, gauge(MAY_BE_RETAINED, "retained_limit_bytes", "tier", tier="nvme")
    ] = None
    health: str = ""
    faults: list[MachineFault] = []
    fault_counts: Counts = {}
    policy_note: str = ""
    whatif: WhatIfStatus | None = None
    savings: SavingsStatus | None = None
    node: Annotated[str, label("node")] = ""
    incarnation: Annotated[str, label("incarnation")] = ""
    keys: list[KeyStatus] = []
    warnings: Annotated[list[str], gauge("What should be seen to: keys that differ, a node's id that two have.")] = []
    awaits: AwaitStatus = AwaitStatus()
    elsewhere: ElsewhereStatus | None = None
    pinned_budget_bytes: Annotated[int, gauge("What leases may pin at a time.", "pinned_limit_bytes")] = 0
    open_sessions: Annotated[
        int, gauge("Engines and couriers that are connected, or have gone and may map memory still.", "sessions")
    ] = 0
    version: Annotated[
        str,
        gauge(
            "The version, the node, and which run of it this is.", "build_info", "version node incarnation", unit="1"
        ),
    ] = ""
    served: ServedCounts | None = None
    events: TierEvents | None = None
    queue: QueueStatus | None = None
    reasons: list[str] = []
    public_warnings: list[str] = []
