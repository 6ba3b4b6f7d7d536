"""Rotation: a store follows its directory of keys while it serves.

    an epoch more    the store accepts it, then signs new frames with it; stored frames stay readable
    an epoch less    the store accepts it no more, then removes the blocks that it signed from every tier. It tries
                     blocks in use again later; once none is left, DATA/keys forgets the epoch

After a crash DATA/keys says of which retired epochs blocks may be left. Called by one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from kvstore.block.errors import KeysUnusable, StoreClosed
from kvstore.block.identity import KeyRing, TenantKeys
from kvstore.keys.store_keys import Epochs, StoreKeys

LOOK_SECONDS = 1.0
"""Between two looks at the directory."""

_log = logging.getLogger(__name__)


class FollowsEpochs(Protocol):
    """The store that follows."""

    @property
    def is_loaded(self) -> bool:
        """Whether recovery from disk is over."""
        ...

    def rotate(self, keys: TenantKeys) -> None:
        """Sign a tenant's frames in this epoch."""
        ...

    def retire(
        self, tenant: bytes, epochs: Container[tuple[bytes, int]], rows: Mapping[int, Sequence[int]] | None = None
    ) -> dict[int, list[int]]:
        """Remove the blocks that these epochs signed; returns those still in use, by namespace. rows: what an earlier
        call returned; None for all."""
        ...


class KeyRotation:
    """Follows the directory of keys for one store."""

    def __init__(self, keys: StoreKeys, ring: KeyRing, store: FollowsEpochs) -> None:
        self._keys, self._ring, self._store = keys, ring, store
        self._left: dict[str, tuple[Epochs, Mapping[int, Sequence[int]]]] = {}
        self._retiring = {name for name in keys.served() if keys.retired(name)}

    def step(self) -> None:
        """Apply changes of the directory, and go on removing what retired epochs signed."""
        for name in self._keys.reload():
            accepted, retired = self._keys.accepted(name), self._keys.retired(name)
            if not accepted:  # purged since
                continue
            for one in accepted:
                self._ring.add(one)
            self._store.rotate(accepted[-1])
            for key_id, epoch in retired:
                self._ring.retire(accepted[-1].tenant, key_id, epoch)
                self._retiring.add(name)
            told = {"tenant": name, "epoch": accepted[-1].epoch, "accepted": [one.epoch for one in accepted]}
            _log.info("keys are followed", extra=told)
        if self._store.is_loaded:
            for name in sorted(self._retiring):
                self._take_out(name)

    def _take_out(self, name: str) -> None:
        accepted, retired = self._keys.accepted(name), self._keys.retired(name)
        if not accepted or not retired:  # all is gone, they are accepted again, or the tenant was purged
            self._left.pop(name, None)
            self._retiring.discard(name)
            return
        epochs, rows = self._left.get(name, ((), None))
        try:
            left = self._store.retire(accepted[-1].tenant, frozenset(retired), rows if epochs == retired else None)
            self._left[name] = retired, left
            if not left:
                self._keys.gone(name, retired)
                _log.info("an epoch is retired", extra={"tenant": name, "epochs": [epoch for _, epoch in retired]})
        except (KeysUnusable, StoreClosed) as error:  # the next look tries it again
            _log.warning("what retired epochs signed cannot be taken out: %s", error)
