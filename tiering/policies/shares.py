"""Which group of tenants gives way when a tier is full and another needs room in it.

    free room   any group may take it: what one does not use, others borrow
    full        victim: the largest (held - guaranteed) / weight, the asking group included; idle groups first

A group is a tenant with settings, or all tenants without any together. Room is counted in whole pieces of a tier
(extents of memory, slabs on disk): a group that holds no more pieces than it is guaranteed loses none to others. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LAST_PIECE = 1e-9
THE_REST = 0
"""The group of tenants without settings."""


@dataclass(frozen=True, slots=True)
class Share:
    """A group's share of each tier. guaranteed: the part of the tier, from 0 to 1, that no other group takes from it.
    weight: its part of the rest, relative to the others, while all want more."""

    guaranteed: float = 0.0
    weight: float = 1.0


class Shares:
    """The groups of a store."""

    def __init__(self, tenants: Mapping[bytes, Share]) -> None:
        """tenants: those with settings, by their opaque ids."""
        self._shares = [Share(), *tenants.values()]
        self._groups = {tenant: number for number, tenant in enumerate(tenants, THE_REST + 1)}
        self.change(tenants)
        self.of_namespace: list[int] = []
        """The group of each namespace, by its number."""

    def __len__(self) -> int:
        return len(self._shares)

    def change(self, tenants: Mapping[bytes, Share]) -> None:
        """Change shares of tenants that have a group; others get none. A group that is not mentioned, such as that of a
        purged tenant, is guaranteed nothing any more."""
        assert sum(share.guaranteed for share in tenants.values()) <= 1 + 1e-9
        assert all(share.weight > 0 for share in tenants.values())
        for tenant, group in self._groups.items():
            self._shares[group] = tenants.get(tenant, Share(0.0, self._shares[group].weight))

    def add_namespace(self, tenant: bytes) -> None:
        """The next namespace is that tenant's."""
        self.of_namespace.append(self.group_of(tenant))

    def held(self, pieces_of: Mapping[bytes, int]) -> list[int]:
        """Pieces that each group holds. pieces_of: each tenant's."""
        held = [0] * len(self._shares)
        for tenant, pieces in pieces_of.items():
            held[self.group_of(tenant)] += pieces
        return held

    def guaranteed(self, group: int, pieces: int) -> int:
        """How many of so many pieces are guaranteed to a group: rounded down, so that all guarantees can be kept."""
        return int(self._shares[group].guaranteed * pieces + 1e-9)

    def share_of(self, tenant: bytes) -> Share | None:
        """A tenant's settings, if it has any."""
        return self._shares[self._groups[tenant]] if tenant in self._groups else None

    def group_of(self, tenant: bytes) -> int:
        """The tenant's own group, or that of all without settings."""
        return self._groups.get(tenant, THE_REST)

    def parts(self) -> list[float]:
        """Each group's part of a tier while all want more; 1 in all."""
        free = 1 - sum(share.guaranteed for share in self._shares)
        weights = sum(share.weight for share in self._shares)
        return [share.guaranteed + free * share.weight / weights for share in self._shares]

    def givers(self, asker: int, held: Sequence[int], pieces: int, idle: Sequence[bool]) -> list[int]:
        """Groups that may have to give way so that `asker` gets one more piece, in order.

        held: pieces, by group; of so many in the whole tier. idle: groups without requests for long.
        """
        ranks = []
        for group, share in enumerate(self._shares):
            is_asker = group == asker
            beyond = held[group] - self.guaranteed(group, pieces)
            if held[group] and (is_asker or beyond > 0):
                # After the step the asker must not hold more for its weight than the group that gave way. The only
                # piece of a group goes last: else a group whose weight is worth less than a piece would lose and
                # regain it in turn.
                rank = (beyond + is_asker) / share.weight if is_asker or held[group] > 1 else _LAST_PIECE
                ranks.append((idle[group] and not is_asker, rank, is_asker, group))
        return [group for _, _, _, group in sorted(ranks, reverse=True)]
