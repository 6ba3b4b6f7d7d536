"""What a store, each namespace and each tenant use of each tier: tables are read, under the lock, and nothing else.

A block counts in a tier once its first part is committed there; during a put that may exceed what can be found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from kvstore.block.errors import BadInput
from kvstore.block.identity import Namespace
from kvstore.core.index import OpenedNamespace
from kvstore.core.recovery import Recovery
from kvstore.core.scrub import Scrubbing
from kvstore.core.shared import Shared
from kvstore.protocol.words import printable
from kvstore.status.tree import RecoveryStatus, TenantStatus
from tiering.counts.tally import TallyCounts
from tiering.dram.tier import DramTier
from tiering.frame import frame_bytes
from tiering.nvme.tier import NvmeTier
from tiering.policies.admission import WriteBudget
from tiering.residency import Residency
from tiering.slab_header import PAGE_BYTES
from tiering.tier import ScrubUsage, Usage

SLAB_OVERHEAD_BYTES = 2 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """A namespace, its readable blocks, and per tier its blocks and bytes of frames. payload_bytes: of each part. nvme:
    None without that tier."""

    number: int
    tenant: bytes
    namespace: Namespace
    digest: bytes
    payload_bytes: tuple[int, ...]
    blocks: int
    dram_blocks: int
    dram_bytes: int
    nvme_blocks: int | None
    nvme_bytes: int | None


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a store holds. Fields that `SidecarStatus` has under the same name are published unchanged.

    nvme and loading: None without NVMe, and once the store is closed. scrub: None without scrubbing. guarded_bytes:
    DRAM that clients of an earlier process still map: readable, and not reused before they unmap it. retained: bytes
    that are retained, and the budget for them, retained_fraction of each tier. pinned_budget_bytes: limit of pinned
    bytes. dram_blocks: includes damaged ones, until stored again or evicted. tally: what the tiers did.
    """

    dram: Usage
    nvme: Usage | None
    loading: RecoveryStatus | None
    blocks: int
    leases: int
    reservations: int
    pinned_bytes: int
    counters: dict[str, int]
    scrub: ScrubUsage | None = None
    guarded_bytes: int = 0
    dram_retained_bytes: int = 0
    nvme_retained_bytes: int | None = None
    dram_retained_budget_bytes: int = 0
    nvme_retained_budget_bytes: int | None = None
    retained_fraction: float = 0.0
    write_budget: WriteBudget | None = None
    pinned_budget_bytes: int = 0
    dram_blocks: int = 0
    nvme_blocks: int | None = None
    tally: TallyCounts | None = None


def check_fits(shared: Shared, tenant: bytes, namespace: Namespace, payload_bytes: Sequence[int]) -> None:
    """Raise `BadInput` unless a tenant may open one more namespace, and each tier has room for its blocks."""
    blocks, lower, limits = shared.blocks, shared.lower, shared.limits
    if len(blocks.spaces) >= limits.namespaces:  # must not tell how many are other tenants'
        raise BadInput(
            f"there are as many namespaces as may be opened ({limits.namespaces}) until the store is opened "
            "again; use fewer, or give a higher limits.namespaces"
        )
    mine, most = sum(space.tenant == tenant for space in blocks.spaces), limits.most_namespaces
    if mine >= most:
        raise BadInput(
            f"{mine} namespaces of this tenant were opened, which is its share until the store is opened again; "
            "use fewer, or give a higher limits.tenant_namespaces"
        )
    extent = blocks.dram.extent_bytes
    for payload in payload_bytes:
        if frame_bytes(payload) > extent:
            raise BadInput(
                f"a block of {namespace.layout.block_tokens} tokens needs a frame of {frame_bytes(payload)} bytes "
                f"and an extent has {extent}; give more DRAM, a larger extent=, smaller blocks or layer_shards"
            )
    if lower is not None:
        slab = lower.tier.slab_bytes
        largest = max(map(frame_bytes, payload_bytes)) + SLAB_OVERHEAD_BYTES
        if largest > slab or slab * len(payload_bytes) > lower.tier.budget_bytes:
            raise BadInput(
                f"a block of {len(payload_bytes)} parts, the largest of {largest} bytes on disk, does not fit into "
                f"slabs of {slab} bytes within nvme={lower.tier.budget_bytes}: each part needs a slab "
                "of its own; give more NVMe, another slab=, smaller blocks or layer_shards"
            )
    needed = extent * len(payload_bytes)
    if needed > blocks.dram.usage().budget_bytes:
        raise BadInput(
            f"a block of {len(payload_bytes)} parts needs {needed} bytes of extents, one per part, and dram= "
            f"allows {blocks.dram.usage().budget_bytes}; give more DRAM or a smaller extent="
        )


_OfTier = tuple[int, int, int | None, int | None]


class UsageReports:
    """What one store uses, looked up under its lock; nothing once it is closed."""

    def __init__(self, shared: Shared, recovery: Recovery, scrubbing: Scrubbing | None) -> None:
        self._shared, self._blocks, self._lower = shared, shared.blocks, shared.lower
        self._recovery, self._scrubbing = recovery, scrubbing

    def usage(self) -> StoreUsage:
        with self._shared.lock:
            is_open, blocks, limits = not self._shared.closed, self._blocks, self._shared.limits
            lower = self._lower if is_open else None  # in a forked child its lock may never be free
            scrub = self._scrubbing.scrub.usage() if self._scrubbing is not None else None
            if is_open:
                blocks.dram.look_at_guarded()
            return StoreUsage(
                dram=blocks.dram.usage(),
                nvme=lower.tier.usage() if lower is not None else None,
                loading=self._recovery.progress if lower is not None else None,
                blocks=blocks.index.visible_blocks() if is_open else 0,
                leases=len(self._shared.leases),
                reservations=len(self._shared.reservations),
                pinned_bytes=blocks.pinned_bytes,
                counters=dict(blocks.counters) | (scrub.counters if scrub is not None else {}),
                scrub=scrub,
                guarded_bytes=blocks.dram.guarded_bytes(),
                dram_retained_bytes=blocks.residency.retained_bytes(),
                nvme_retained_bytes=lower.residency.retained_bytes() if lower is not None else None,
                dram_retained_budget_bytes=_retained_budget(blocks.residency),
                nvme_retained_budget_bytes=_retained_budget(lower.residency) if lower is not None else None,
                retained_fraction=limits.retained_fraction,
                write_budget=lower.admission.budget() if lower is not None else None,
                pinned_budget_bytes=int(limits.pinned_fraction * blocks.dram.budget_bytes),
                dram_blocks=blocks.residency.blocks,
                nvme_blocks=lower.residency.blocks if lower is not None else None,
                tally=blocks.tally.now(),
            )

    def namespaces(self) -> list[NamespaceUsage]:
        """Every namespace that was opened or found on disk, in the order of its number; those on disk once they are
        recovered."""
        with self._shared.lock:
            return [*map(self._namespace, self._blocks.spaces)] if not self._shared.closed else []

    def _namespace(self, space: OpenedNamespace) -> NamespaceUsage:
        tier, dram = self._lower.tier if self._lower is not None else None, self._blocks.dram
        live = [sum(extent.slots.live for extent in dram.all_extents(one)) for one in space.classes]
        below = [tier.frames_of(one) for one in space.classes] if tier is not None else None
        sizes = [one.frame_bytes for one in space.classes]
        return NamespaceUsage(
            space.number,
            space.tenant,
            space.namespace,
            space.classes[0].namespace,
            tuple(stamp.payload_bytes for stamp in space.stamps),
            self._blocks.index.visible_blocks(space.number),
            live[0],
            sum(map(mul, live, sizes)),
            below[0] if below is not None else None,
            sum(map(mul, below, sizes)) if below is not None else None,
        )

    def tenants(self, names: Mapping[bytes, str]) -> list[TenantStatus]:
        """What these tenants use of each tier, in order, under their names."""
        with self._shared.lock:
            if self._shared.closed:
                return []
            blocks, lower, shares = self._blocks, self._lower, self._blocks.shares
            above, below = blocks.dram.held(), lower.tier.held() if lower is not None else {}
            found = []
            for tenant, name in names.items():
                share = shares.share_of(tenant) if shares is not None else None
                dram = self._of_tier(tenant, blocks.dram, above, blocks.residency)
                nvme = self._of_tier(tenant, lower.tier, below, lower.residency) if lower is not None else None
                used, guaranteed, *retained = nvme or (None, None, None, None)
                given, weight = (share.guaranteed, share.weight) if share is not None else (None, None)
                of_dram, of_nvme = (*dram[:2], used, guaranteed), (*dram[2:], *retained)
                found.append(TenantStatus(printable(name), given, weight, *of_dram, *of_nvme))
            return found

    def _of_tier(
        self, tenant: bytes, tier: DramTier | NvmeTier, held: Mapping[bytes, int], residency: Residency
    ) -> _OfTier:
        """Of a tenant's blocks in a tier: bytes in use, guaranteed, retained, and that may be retained."""
        shares, retention = self._blocks.shares, residency.retention
        used = held.get(tenant, 0) * tier.piece_bytes
        if shares is None or shares.share_of(tenant) is None:
            return used, 0, None, None
        group = shares.group_of(tenant)
        guaranteed = shares.guaranteed(group, tier.pieces()) * tier.piece_bytes
        if retention is None:
            return used, guaranteed, None, None
        return used, guaranteed, retention.kept_bytes()[group], retention.budgets()[group]

    def kept_until(self, number: int, keys: Sequence[bytes]) -> float:
        """Until when a readable chain is retained, in the clock's seconds: its last block's end, which comes first; 0
        if it is not readable."""
        with self._shared.lock:
            if self._shared.closed:
                return 0.0
            kept = [one.retention for one in self._blocks.residencies if one.retention is not None]
            rows = self._blocks.index.match(number, keys[-1:])
            return max((one.until(row) for row in rows for one in kept), default=0.0)


def _retained_budget(residency: Residency) -> int:
    return sum(residency.retention.budgets()) if residency.retention is not None else 0
