"""What each namespace and each tenant takes up in each tier. Reads tables only; who calls holds the lock.

A block counts in a tier once its first part stands there, committed. For a moment, while a put is under way, that may
be more than can be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul

from kvstore.block.identity import Namespace
from kvstore.core.table import BlockTable
from kvstore.protocol.status import TenantStatus, printable
from tiering.policies.shares import Shares
from tiering.residency import Residency


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """A namespace, its readable blocks, and what it has in each tier: blocks, and bytes of frames. payload_bytes: of
    each part. nvme: None without such a tier."""

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


def tenancy(blocks: BlockTable, names: Mapping[bytes, str]) -> list[TenantStatus]:
    """Of these tenants, in their order, under their names."""
    dram, lower, shares = blocks.dram, blocks.lower.tier if blocks.lower is not None else None, blocks.shares
    above, below = dram.held(), lower.held() if lower is not None else {}
    found = []
    for tenant, name in names.items():
        share = shares.share_of(tenant) if shares is not None else None
        of_dram = shares.guaranteed_to(tenant, dram.pieces()) if shares is not None else 0
        of_nvme = shares.guaranteed_to(tenant, lower.pieces()) if shares is not None and lower is not None else 0
        found.append(
            TenantStatus(
                printable(name),
                share.guaranteed if share is not None else None,
                share.weight if share is not None else None,
                above.get(tenant, 0) * dram.piece_bytes,
                of_dram * dram.piece_bytes,
                below.get(tenant, 0) * lower.piece_bytes if lower is not None else None,
                of_nvme * lower.piece_bytes if lower is not None else None,
                *_retained(blocks.residency, shares, tenant),
                *_retained(blocks.lower.residency if blocks.lower is not None else None, shares, tenant),
            )
        )
    return found


def _retained(residency: Residency | None, shares: Shares | None, tenant: bytes) -> tuple[int | None, int | None]:
    """Bytes of a tenant that are kept for a time, and how many may be."""
    retention = residency.retention if residency is not None else None
    if retention is None or shares is None or shares.share_of(tenant) is None:
        return None, None
    group = shares.group_of(tenant)
    return retention.kept_bytes()[group], retention.budgets()[group]


def occupancy(blocks: BlockTable) -> list[NamespaceUsage]:
    """Every namespace that was opened or found on disk, in the order of its number."""
    found = []
    tier = blocks.lower.tier if blocks.lower is not None else None
    for space in blocks.spaces:
        live = [sum(extent.slots.live for extent in blocks.dram.all_extents(one)) for one in space.classes]
        below = [tier.frames_of(one) for one in space.classes] if tier is not None else None
        sizes = [one.frame_bytes for one in space.classes]
        found.append(
            NamespaceUsage(
                space.number,
                space.tenant,
                space.namespace,
                space.classes[0].namespace,
                tuple(sealer.stamp.payload_bytes for sealer in space.sealers),
                blocks.index.visible_blocks(space.number),
                live[0],
                sum(map(mul, live, sizes)),
                below[0] if below is not None else None,
                sum(map(mul, below, sizes)) if below is not None else None,
            )
        )
    return found


def retained_budget(residency: Residency) -> int:
    """Bytes that may be kept for a time, of all tenants."""
    return sum(residency.retention.budgets()) if residency.retention is not None else 0
