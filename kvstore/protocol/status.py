"""What a running sidecar reports of itself: to `kvstore stat`, and to programs that read its JSON.

Plain values under names that scripts may rely on: fields are only ever appended, with defaults. Sizes are in bytes,
times in seconds, instants in Unix time. Text that a client gave is cut and printable. Knows no keys and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvstore.block.errors import BadInput
from kvstore.block.layout import Layout
from tiering.faults import MachineFault
from tiering.policies.admission import WriteBudget
from tiering.tier import MoveCounts, ScrubUsage

MAX_TEXT = 128
ID_DIGITS = 12
MAX_SECONDS = 3600.0
"""That a drop or a purge may take."""
MOST_NAMED = 8
"""Namespaces that a line about a wrong id names."""


class Readiness(StrEnum):
    """A sidecar's state."""

    READY = "ready"
    WARMING = "warming"  # it serves, and a miss may have the reason `warming`
    DEGRADED = "degraded"  # it serves; a resource ran out or fails, or recovery could not take in all that is on disk
    STOPPING = "stopping"


class TierStatus(msgspec.Struct, frozen=True):
    """Slots by state, bytes taken from the tier's budget."""

    name: str
    budget_bytes: int
    taken_bytes: int
    slots: dict[str, int]


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
    """asked == sum of hits + sum of misses + found, in tokens and in blocks. found: looked up, and not leased (yet).
    hit_rate: tokens granted by leases from the store's own tiers / tokens asked for; None where nothing was."""

    asked_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    miss_tokens: dict[str, int] = {}
    found_tokens: int = 0
    asked_blocks: int = 0
    hit_blocks: dict[str, int] = {}
    miss_blocks: dict[str, int] = {}
    found_blocks: int = 0
    lookups: int = 0
    leases: int = 0
    reports: int = 0
    granted_tokens: int = 0
    hit_rate: float | None = None


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
    """refused: rejected connections. malformed: messages that ended their connection. served: requests by verb.
    wait_ms_p50, wait_ms_p99: of the last requests, from the earliest that one may have arrived until it was begun."""

    connections: int
    admin_connections: int
    refused: int
    malformed: int
    served: dict[str, int]
    wait_ms_p50: float | None
    wait_ms_p99: float | None


class RecoveryStatus(msgspec.Struct, frozen=True):
    """Recovery of what an earlier run left on disk. slots: examined, of all_slots. blocks: that can be found by now.
    verified_bytes, to_verify_bytes: of frames that must be read before they count, as a crash lost the index."""

    slots: int = 0
    all_slots: int = 0
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
    asked_tokens: int
    tokens_per_second: float
    sample_ratio: float
    sampled_names: int
    seconds: float
    lookups: int
    dropped_lookups: int
    words: str


class SavingsStatus(msgspec.Struct, frozen=True):
    """What engines report that hits saved, since the sidecar began. saved_seconds, regret_seconds: GPU seconds by which
    loads were faster, and slower, than computing the same would have been, estimated by the speeds that each engine has
    learned. engines: that reported. ttft_saved_ms: of the time to the first token, measured on hits that an engine
    computed all the same, to compare, with its standard error; None where too few were."""

    saved_seconds: float
    regret_seconds: float
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
    """Waits for blocks that other clients store. parked: now; ended: since the start, by why (`readable`, `short`,
    `deadline`, `cancelled`, `gone`, `full`)."""

    parked: int = 0
    ended: dict[str, int] = {}


class SourceStatus(msgspec.Struct, frozen=True):
    """Another node, a remote engine or the directory, as a courier reports it: `protocol.courier.SourceFigures`."""

    kind: str
    name: str
    state: str
    blocks_in: int = 0
    blocks_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    lookups: int = 0
    found: int = 0
    failures: int = 0
    refused: dict[str, int] = {}
    gbps: float = 0.0
    p99_ms: float = 0.0
    hints: int = 0
    detail: str = ""
    late: int = 0
    unwritten: int = 0


class ElsewhereStatus(msgspec.Struct, frozen=True):
    """Blocks that couriers fetch. couriers: connected ones. adopted: blocks by origin; refused: what couriers brought
    that was not adopted, by fault. kept_bytes: pinned for waiting engines; gave_way: blocks unpinned because engines
    lacked room. The rest is as couriers report: fetching, now; fetched; reasons, why they serve less than there is;
    dropped_hints: that were not announced."""

    couriers: int = 0
    adopted: dict[str, int] = {}
    refused: dict[str, int] = {}
    kept_bytes: int = 0
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
    elsewhere: what couriers bring; None where none is wanted."""

    run: str
    pid: int
    state: str
    at: float
    up_seconds: float
    tiers: list[TierStatus]
    blocks: int
    leases: int
    reservations: int
    pinned_bytes: int
    looked: LookupCounts
    namespaces: list[NamespaceStatus]
    moves: list[MoveCounts]
    sessions: list[SessionStatus]
    departed: int
    counters: dict[str, int]
    door: DoorStatus
    loading: RecoveryStatus | None
    scrub: ScrubUsage | None
    hidden_namespaces: int = 0
    hidden_sessions: int = 0
    guarded_bytes: int = 0
    tenants: list[TenantStatus] = []
    dram_retained_bytes: int = 0
    nvme_retained_bytes: int | None = None
    policy: str = ""
    nvme_writes: str | float | None = None
    write_budget: WriteBudget | None = None
    retained_fraction: float | None = None
    dram_retained_budget_bytes: int = 0
    nvme_retained_budget_bytes: int | None = None
    health: str = ""
    faults: list[MachineFault] = []
    fault_counts: dict[str, int] = {}
    policy_note: str = ""
    whatif: WhatIfStatus | None = None
    savings: SavingsStatus | None = None
    node: str = ""
    incarnation: str = ""
    keys: list[KeyStatus] = []
    warnings: list[str] = []
    awaits: AwaitStatus = AwaitStatus()
    elsewhere: ElsewhereStatus | None = None


def checked_seconds(seconds: float) -> float:
    """How long a drop or a purge may take. Raises `BadInput`."""
    if not 0 <= seconds <= MAX_SECONDS:
        raise BadInput(f"seconds={seconds:g}; give 0 to {MAX_SECONDS:g}")
    return seconds


def layout_in_words(layout: Layout) -> str:
    """As people say it: "32 layers x 8 heads x (128 + 128) bfloat16, 64 tokens"."""
    groups = [
        f"{len(group.layers)} layers x {group.kv_heads} heads x ({' + '.join(map(str, group.plane_widths))}) "
        f"{group.dtype}"
        for group in layout.groups
    ]
    shards = "".join(
        f", {count} {what} shards"
        for count, what in ((layout.head_shards, "head"), (layout.layer_shards, "layer"))
        if count > 1
    )
    return printable(f"{'; '.join(groups)}, {layout.block_tokens} tokens{shards}")


def printable(text: str) -> str:
    """A client's text, made safe for a terminal and short."""
    kept = "".join(one for one in text[: 8 * MAX_TEXT] if one.isprintable())
    return kept if len(kept) <= MAX_TEXT else f"{kept[: MAX_TEXT - 3]}..."


def pick(wanted: str, digests: Sequence[str], words: Sequence[str], whose: str, more: str) -> int:
    """The index of the one digest that begins with `wanted`. words: about each digest. whose, more: for messages.
    Raises `BadInput`."""
    found = [at for at, digest in enumerate(digests) if wanted and digest.startswith(wanted.lower())]
    if len(found) == 1:
        return found[0]
    listed = found or range(len(digests))
    named = ", ".join(f"{digests[at][:ID_DIGITS]} ({words[at]})" for at in listed[:MOST_NAMED])
    if len(listed) > MOST_NAMED:
        named += f" and {len(listed) - MOST_NAMED} more"
    if not found:
        there = f"there {'is' if len(digests) == 1 else 'are'}: {named}" if digests else "there are none"
        raise BadInput(f"no namespace{whose} begins with {printable(wanted)!r}; {there}")
    raise BadInput(f"{len(found)} namespaces{whose} begin with {printable(wanted)!r}: {named}; {more}")
