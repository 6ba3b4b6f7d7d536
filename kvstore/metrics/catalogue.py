"""Every metric of the sidecar: its name, labels, unit, and what it counts. docs/reference.md has the same table.

Names and labels are appended to, never renamed: people's dashboards and alerts name them. Counters are events since
the start of this process, which never fall; what may fall is a gauge, or two counters of which one is subtracted.
"""

from __future__ import annotations

from kvstore.metrics.exposition import MetricFamily, MetricKind

PREFIX = "kvstore_"


def _family(kind: MetricKind, name: str, labels: str, unit: str, text: str) -> MetricFamily:
    return MetricFamily(f"{PREFIX}{name}", kind, tuple(labels.split()), unit, text)


def _counter(name: str, labels: str, unit: str, text: str) -> MetricFamily:
    return _family(MetricKind.COUNTER, f"{name}_total", labels, unit, text)


def _gauge(name: str, labels: str, unit: str, text: str) -> MetricFamily:
    return _family(MetricKind.GAUGE, name, labels, unit, text)


def _histogram(name: str, labels: str, text: str) -> MetricFamily:
    return _family(MetricKind.HISTOGRAM, f"{name}_seconds", labels, "seconds", text)


METRICS = (
    # In every scrape, summed over labels: asked == (granted - revoked) + missed + (found - claimed)
    _counter(
        "asked_tokens",
        "",
        "tokens",
        "Tokens of prompts that engines reported; of other clients, of whole blocks looked up, or leased without that.",
    ),
    _counter("found_tokens", "", "tokens", "Tokens that look-ups found, but for those of requests that are reported."),
    _counter("claimed_tokens", "", "tokens", "Tokens that were found and then asked for by a lease."),
    _counter(
        "granted_tokens",
        "tier",
        "tokens",
        "Tokens that engines reported as hits, and that others' leases granted; engine: of an engine's own cache.",
    ),
    _counter("revoked_tokens", "tier", "tokens", "Tokens that were granted and then failed their reader's check."),
    _counter(
        "missed_tokens", "reason", "tokens", "Tokens that were not to be had, by reason; revoked ones are corrupt."
    ),
    _counter(
        "tenant_tokens", "tenant outcome", "tokens", "The same six of each of the first 20 tenants; the rest: other."
    ),
    _counter("lookups", "", "look-ups", "Look-ups; those of puts are none."),
    _counter("leases", "", "leases", "Leases that clients asked for, of at least one block."),
    _counter("reports", "", "reports", "Blocks that a reader's check found bad, as clients told."),
    _counter("requests", "verb", "requests", "Requests at all sockets, by verb."),
    _histogram("lookup_duration", "", "What the store took for a look-up."),
    _histogram("lease_wait", "tier result", "What the store took for a lease, by the slowest tier that it came from."),
    _histogram("door_wait", "", "From when a request may have been there until it was begun."),
    # Awaits.
    _gauge("awaits_parked", "", "awaits", "Waits for blocks that are not readable yet, now."),
    _counter("awaits", "end", "awaits", "Waits for blocks that are over, by why."),
    _histogram("await_wait", "", "From an await's coming until it was over; those over at once are left out."),
    # Puts.
    _counter(
        "put_tokens", "result", "tokens", "Tokens that puts offered; each process of a collective put offers its own."
    ),
    _counter("put_refused_tokens", "reason", "tokens", "Tokens that puts offered and that are not stored, by reason."),
    _counter("stored_tokens", "", "tokens", "Tokens of blocks that puts made readable."),
    _histogram(
        "put_duration", "", "From a put's reservation to the commit of its last block: the client copies between."
    ),
    # Tiers.
    _gauge("tier_budget_bytes", "tier", "bytes", "What a tier may take."),
    _gauge(
        "tier_used_bytes", "tier", "bytes", "Taken from the budget, in whole extents and slabs with their free slots."
    ),
    _gauge(
        "tier_blocks", "tier", "blocks", "Blocks that a tier has; damaged ones in dram until they are stored again."
    ),
    _gauge("tier_slots", "tier state", "slots", "Frames' places by state."),
    _gauge("pinned_bytes", "", "bytes", "DRAM that leases, puts and moves forbid to evict, each block once."),
    _gauge("pinned_limit_bytes", "", "bytes", "What leases may pin at a time."),
    _gauge("guarded_bytes", "", "bytes", "DRAM that clients of an earlier process still map."),
    _gauge("retained_bytes", "tier", "bytes", "Kept for a time, because a client asked for it."),
    _gauge("retained_limit_bytes", "tier", "bytes", "What may be kept for a time."),
    _counter("evicted_blocks", "tier to", "blocks", "Blocks that had to make room, and where they can still be read."),
    _histogram("eviction_idle", "tier", "From a block's last use until it was evicted."),
    _histogram(
        "wanted_again", "tier", "From a block's eviction from the last tier until it was asked for, once for each."
    ),
    # Moves.
    _counter(
        "moves", "kind result", "moves", "Moves between dram and nvme that ended; demote, save and scrub: batches."
    ),
    _histogram("move_duration", "kind", "How long a move ran, whatever came of it."),
    _gauge("moves_waiting", "kind", "moves", "Moves that have not begun."),
    _counter(
        "moved_bytes", "kind", "bytes", "Frames that arrived: promoted to dram, demoted to nvme, compacted within dram."
    ),
    _counter(
        "nvme_written_bytes",
        "",
        "bytes",
        "Frames written to nvme; index, headers of slabs and failed writes are not in.",
    ),
    _gauge("nvme_write_budget_bytes", "", "bytes", "What store.nvme_writes leaves to be written now."),
    _gauge("breaker_open", "tier direction", "0 or 1", "Whether moves are refused because the tier keeps failing."),
    # Integrity.
    _counter("verified_bytes", "where", "bytes", "Frames that were verified, by occasion."),
    _counter("damaged_frames", "where", "frames", "Frames that failed a check, by occasion."),
    _counter("quarantined_blocks", "tier", "blocks", "Blocks that were taken out of use because a frame was damaged."),
    _counter("mended_blocks", "", "blocks", "Blocks that were damaged on nvme and written again from dram."),
    _counter("scrub_unreadable_frames", "", "frames", "Times that the scrub could not read a frame."),
    _gauge("scrub_last_pass_timestamp_seconds", "", "Unix time", "When the last whole pass of the scrub ended."),
    # A restart.
    _gauge("loading_slots", "", "slots", "Slots of an earlier run's slabs."),
    _gauge("loading_slots_taken", "", "slots", "Of these, how many were taken in."),
    # Who is here.
    _gauge(
        "sessions", "", "sessions", "Engines and couriers that are connected, or have gone and may map memory still."
    ),
    _gauge("connections", "door", "connections", "Connections now; admin: of operators."),
    _counter("refused_connections", "reason", "connections", "Connections that were turned away."),
    _counter("malformed_messages", "", "messages", "Messages that ended their connection because they were none."),
    _gauge("leases_open", "", "leases", "Leases that pin."),
    _gauge("reservations_open", "", "reservations", "Puts under way."),
    # As engines tell, by the speeds that they have learned.
    _counter(
        "gpu_saved_seconds",
        "",
        "seconds",
        "By how much loads took less than computing the same, times the engine's GPUs.",
    ),
    _counter("gpu_regret_seconds", "", "seconds", "The same for loads that took longer."),
    # What other sizes would find: estimated from a sample, faded by half in each half hour.
    _gauge(
        "whatif_hit_tokens",
        "scale",
        "tokens",
        "Tokens that so many times the budget of all tiers would have found, with least recently used.",
    ),
    _gauge("whatif_asked_tokens", "", "tokens", "Tokens that these are a part of."),
    _gauge("whatif_sample_ratio", "", "ratio", "The share of all blocks that the estimate follows."),
    _counter(
        "whatif_dropped_lookups",
        "",
        "look-ups",
        "Look-ups that came too fast or were too long, and are not in the estimate.",
    ),
    # Of other nodes and remote engines; only where couriers are wanted.
    _gauge("couriers", "", "couriers", "Connections of couriers that take questions."),
    _counter("adopted_blocks", "tier", "blocks", "Blocks that couriers brought, by where they came from."),
    _counter("adopt_refused", "why", "messages", "What couriers brought that was not adopted, by what was wrong."),
    _gauge("fetched_pinned_bytes", "", "bytes", "DRAM of fetched blocks that are kept for who waits for them."),
    _counter("source_blocks", "kind name direction", "blocks", "Blocks that came from a source, or went there."),
    _counter("source_bytes", "kind name direction", "bytes", "The same in bytes."),
    _counter("source_failures", "kind name", "failures", "Calls to a source that failed, or were late."),
    _counter("source_late", "kind name", "look-ups", "Look-ups that ended after the engine had given up."),
    _counter(
        "source_unwritten_blocks", "kind name", "blocks", "Times that a block was not taken: no room, or a fault."
    ),
    _counter("source_refused", "kind name", "frames", "Frames of a source that failed a check."),
    _gauge(
        "source_percentile_seconds", "kind name", "seconds", "The 99th percentile of the last transfers from a source."
    ),
    _gauge("source_bytes_per_second", "kind name", "bytes per second", "Of the last transfers from a source."),
    _gauge("source_state", "kind name state", "1", "What state a source is in: up, down, banned or open (breaker)."),
    # For joins.
    _gauge("state", "state", "0 or 1", "What the sidecar is up to, as at /readyz."),
    _gauge("build_info", "version node incarnation", "1", "The version, the node, and which run of it this is."),
    _gauge("warnings", "", "warnings", "What should be seen to: keys that differ, a node's id that two have."),
    _gauge("tenant_info", "tenant name", "1", "Names of the tenants of tenant_tokens."),
    _gauge(
        "namespace_info", "namespace tenant model codec block_tokens", "1", "The 32 namespaces that were opened last."
    ),
)
