"""A frame index that loses power on purpose: it obeys the contract of `FrameIndex` and forgets what was not synced."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from random import Random

from simulation.power import Power, PowerLoss
from tiering.errors import TierUnavailable
from tiering.nvme.frame_index import Change

LARGEST_KEY_BYTES, LARGEST_VALUE_BYTES = 511, 4080

Batch = tuple[Change, ...]


class SimulatedIndex:
    """A sorted map in memory: what is durable, and the batches that were applied since.

    `apply` and `sync` are effects and take a step of `power`. A batch that was cut off is among those that `crash`
    may keep; a sync that was cut off made nothing durable. Calls that come after the one that was cut have no effect.
    """

    def __init__(self, power: Power | None = None) -> None:
        self.power = power if power is not None else Power()
        self._lock = threading.Lock()
        self._durable: dict[bytes, bytes] = {}
        self._pending: list[Batch] = []
        self._seen: dict[bytes, bytes] = {}
        self._is_open = True
        self._calls: dict[str, int] = dict.fromkeys(("get", "apply", "sync", "iterate"), 0)
        self._faults: dict[tuple[str, int], BaseException] = {}

    # --- the contract ---

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        assert all(0 < len(key) <= LARGEST_KEY_BYTES for key in keys), "a key has 1 to 511 bytes"
        with self._lock:
            self._enter("get")
            return [self._seen.get(key) for key in keys]

    def apply(self, changes: Sequence[Change]) -> None:
        for key, value in changes:
            assert 0 < len(key) <= LARGEST_KEY_BYTES, "a key has 1 to 511 bytes"
            assert value is None or len(value) <= LARGEST_VALUE_BYTES, "a value has at most 4080 bytes"
        with self._lock:
            self._enter("apply")
            if not changes:
                return
            batch = tuple(changes)
            try:
                self.power.step()
            except PowerLoss:
                # It went off in this call, unless it was off already: the batch may have reached the disk.
                if self.power.steps == self.power.last:
                    self._pending.append(batch)
                raise
            self._pending.append(batch)
            _change(self._seen, batch)

    def iterate(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            self._enter("iterate")
            pairs = sorted(pair for pair in self._seen.items() if pair[0].startswith(prefix))
        yield from pairs

    def sync(self) -> None:
        with self._lock:
            self._enter("sync")
            self.power.step()
            self._keep(len(self._pending))

    def close(self) -> None:
        with self._lock:
            self._is_open = False

    # --- what happens to it ---

    def crash(self, random: Random) -> None:
        """The machine is on again, and the index open: some first ones of the pending batches were kept, whole."""
        with self._lock:
            self._keep(random.randint(0, len(self._pending)))
            self._seen = dict(self._durable)
            self._is_open = True

    def reopen(self) -> None:
        """The next owner opens it after a close: everything applied is there, and no more durable than before."""
        with self._lock:
            self._is_open = True

    def fail(self, call: str, nth: int, error: BaseException) -> None:
        """The `nth` of the coming calls of that name, counted from 1, raises this and has no effect."""
        assert nth >= 1, "calls are counted from 1"
        with self._lock:
            self._faults[call, self._calls[call] + nth] = error

    def copy(self) -> SimulatedIndex:
        """The same index once more, open, with a `Power` of its own and without planned faults."""
        twin = SimulatedIndex()
        with self._lock:
            twin._durable, twin._pending, twin._seen = dict(self._durable), list(self._pending), dict(self._seen)
        return twin

    def _enter(self, call: str) -> None:
        self._check_open()
        self._calls[call] += 1
        error = self._faults.pop((call, self._calls[call]), None)
        if error is not None:
            raise error

    def _check_open(self) -> None:
        if not self._is_open:
            raise TierUnavailable("the index is closed")

    def _keep(self, count: int) -> None:
        for batch in self._pending[:count]:
            _change(self._durable, batch)
        self._pending.clear()


def _change(pairs: dict[bytes, bytes], changes: Sequence[Change]) -> None:
    for key, value in changes:
        if value is None:
            pairs.pop(key, None)
        else:
            pairs[key] = value
