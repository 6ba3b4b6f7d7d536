"""Namespaces: opened, signed in newer epochs, and dropped, which is done a piece at a time.

    open      the same one again gets the same number
    drop      recovery and moves are over > leases expired, puts cancelled > rows, deepest first > durably forgotten
    purge     a drop of each of a tenant's namespaces > its slabs are given back
    retire    blocks that retired epochs signed go; those in use are told, and tried again later

From a drop's first step on nothing is stored into its namespace, and from its first piece on nothing of it is found.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from kvstore.block.errors import BadInput
from kvstore.block.identity import Namespace, TenantKeys, check_can_be_kept
from kvstore.core.index import RowState
from kvstore.core.leases import Leasing
from kvstore.core.levels import Levels
from kvstore.core.recovery import Recovery
from kvstore.core.reservations import ABORTED_PLACES, Reservations
from kvstore.core.room import Room
from kvstore.core.shared import GIVE_WAY_SECONDS, Shared
from kvstore.core.usage import check_fits
from kvstore.protocol.messages import Grant
from tiering.counts.awaits import AwaitEnd
from tiering.errors import TierError, TierUnavailable
from tiering.frame import HEADER_BYTES, epoch_in
from tiering.nvme.slab_files import private_pages
from tiering.tier import NO_PLACE, Column, TierMiss

DROP_SECONDS = 30.0
"""Default timeout of a drop or a purge."""
DROP_LOOKS_SECONDS = 0.1
"""Interval at which a drop checks whether moves of its namespace have ended."""
RETIRED_AT_ONCE, RETIRED_IN_ALL = 256, 1 << 16
"""Rows whose epochs are checked under one hold of the lock, about a millisecond; and in one call, some seconds of a
disk."""
SCANNED_ROWS = 1 << 20
"""Rows scanned for those of one namespace under one hold of the lock, at a nanosecond a row."""

_ASK_AGAIN = "ask again, or give it more time"


class NamespaceVerbs:
    """Opens and drops the namespaces of one store. Thread-safe."""

    def __init__(
        self,
        shared: Shared,
        leasing: Leasing,
        reservations: Reservations,
        room: Room,
        levels: Levels | None,
        recovery: Recovery,
    ) -> None:
        self._shared, self._blocks, self._clock = shared, shared.blocks, shared.clock
        self._leases, self._leasing = shared.leases, leasing
        self._reservations, self._room = reservations, room
        self._levels, self._recovery = levels, recovery
        self._under_way: set[int] = set()
        self.unfound: set[int] = set()
        """Namespaces whose blocks matches no longer find, some being gone already."""
        self.leaving: set[bytes] = set()
        """Tenants that are being purged, or were."""

    def open(self, keys: TenantKeys, namespace: Namespace, payload_bytes: Sequence[int]) -> Grant:
        """Make a namespace known to a tenant; the same one again gives the same number. Raises `BadInput`."""
        check_can_be_kept(namespace, payload_bytes)
        wanted = namespace.digest()
        with self._shared.lock:
            self._shared.check_open()
            if keys.tenant in self.leaving:
                raise BadInput("this tenant is being purged, or its key was retired; connect again, or open it anew")
            space = self._blocks.find_space(keys.tenant, wanted)
            if space is None:
                check_fits(self._shared, keys.tenant, namespace, payload_bytes)
                space = self._blocks.add_space(keys, namespace, payload_bytes)
            return Grant(
                space.number,
                keys.identity,
                tuple(stamp.pack() for stamp in space.stamps),
                tuple(stamp.payload_bytes for stamp in space.stamps),
                durable=self._levels is not None,
            )

    def own_number(self, number: int) -> int:
        """A namespace's number among its tenant's, from 0 on. Clients see only this one: it hides others' number."""
        with self._shared.lock:
            spaces = self._blocks.spaces
            return sum(space.tenant == spaces[number].tenant for space in spaces[:number])

    def drop(self, number: int, seconds: float = DROP_SECONDS) -> int:
        """Forget every block of a namespace; returns how many were readable. Readers finish what they hold.

        Waits until recovery from disk is over. Raises `TierUnavailable` if it does not end in time, or if the disk does
        not forget; the message contains how far it came, and the drop may be repeated.
        """
        deadline = self._clock.monotonic_seconds() + seconds
        with self._shared.lock:
            self._shared.check_open()
            self._blocks.dropping.add(number)
            self._blocks.index.awaits.end_all(AwaitEnd.GONE, number)
            self._blocks.refreshing.clear()  # its rows may become another namespace's
        try:
            return self._drop(number, deadline)
        finally:
            with self._shared.lock:
                self._serve_again([number])

    def purge(self, tenant: bytes, seconds: float = DROP_SECONDS) -> int:
        """Void every block of a tenant durably, give back its slabs, and serve it no more under these keys; returns how
        many blocks were readable. Raises `TierUnavailable` as `drop` does; the tenant is then still served."""
        deadline = self._clock.monotonic_seconds() + seconds
        with self._shared.lock:
            self._shared.check_open()
            self.leaving.add(tenant)
        try:
            with self._shared.lock:
                self._await_taken_in(lambda: False, deadline)
                numbers = [space.number for space in self._blocks.spaces if space.tenant == tenant]
                self._blocks.dropping.update(numbers)
                for number in numbers:
                    self._blocks.index.awaits.end_all(AwaitEnd.GONE, number)
            readable = sum([self._drop(number, deadline) for number in numbers])
            if self._levels is not None and not self._levels.retire_slabs(tenant, deadline):
                raise TierUnavailable(f"the tenant's slabs were not given back; {_ASK_AGAIN}")
            with self._shared.lock:
                self._blocks.index.forget(tenant)
            return readable
        except BaseException:
            with self._shared.lock:
                self.leaving.discard(tenant)
                self._serve_again([space.number for space in self._blocks.spaces if space.tenant == tenant])
            raise

    def rotate(self, keys: TenantKeys) -> None:
        """Sign a tenant's frames in this epoch from now on."""
        with self._shared.lock:
            self._blocks.rotate(keys)

    def retire(
        self, tenant: bytes, epochs: Container[tuple[bytes, int]], rows: Mapping[int, Sequence[int]] | None = None
    ) -> dict[int, list[int]]:
        """Remove a tenant's blocks that these epochs (key id and number) signed from every tier. rows: by namespace, as
        an earlier call returned them; None for all. Returns rows in use, to pass again later."""
        numbers = [space.number for space in list(self._blocks.spaces) if space.tenant == tenant]
        found = {one: self._rows_of(one).tolist() for one in numbers} if rows is None else rows
        left = {number: self._take_out(number, mine, epochs) for number, mine in found.items()}
        return {number: some for number, some in left.items() if some}

    def _drop(self, number: int, deadline: float) -> int:
        """The lock is free between pieces. A second drop of this namespace waits for the first."""
        with self._shared.lock:
            self._await_taken_in(lambda: number in self._under_way, deadline)
            self._under_way.add(number)
            self._blocks.dropping.add(number)  # a drop that ended just now has removed it
        try:
            readable = self._drop_rows(number, deadline)
            self._room.retire_emptied()
            if self._levels is not None and not self._levels.settle(deadline):
                raise TierUnavailable(f"the blocks are gone from memory, but not durably from the disk; {_ASK_AGAIN}")
            return readable
        finally:
            with self._shared.lock:
                self._under_way.discard(number)
                self.unfound.discard(number)
                self._shared.moves_done.notify_all()

    def _drop_rows(self, number: int, deadline: float) -> int:
        with self._shared.lock:
            self._await_taken_in(lambda: self._is_moving(number), deadline)
            self._shared.end_due()  # from here on the namespace has no leases, and gets none
            ending = [one for one in self._leases.ending.values() if one.namespace == number]
            self._leases.finish([*self._leases.expire_all(number), *ending])
            self._await_taken_in(lambda: self._is_moving(number), deadline)
            self._reservations.cancel_all(number)
            self._shared.fetched.forget(number)
            self._shared.check_open()
            readable = self._blocks.index.visible_blocks(number)
            self.unfound.add(number)
            self._blocks.refreshing.clear()  # its rows may become another namespace's
        rows = self._rows_of(number)
        most = max(1, ABORTED_PLACES // len(self._blocks.spaces[number].classes))
        for first in range(0, len(rows), most):
            with self._shared.lock:
                self._shared.check_open()
                for row in rows[first : first + most].tolist():
                    self._drop_row(number, row, deadline)
                self._shared.moves_done.wait(GIVE_WAY_SECONDS)
        with self._shared.lock:
            self._shared.check_open()
            self._room.emptied[number] = None
            self._recovery.forget(number)
        return readable

    def _rows_of(self, number: int) -> Column:
        """Deepest first. The lock is free between pieces."""
        index, found = self._blocks.index, []
        with self._shared.lock:
            for first in range(0, index.rows_end, SCANNED_ROWS):
                if first:
                    self._shared.moves_done.wait(GIVE_WAY_SECONDS)
                    self._shared.check_open()
                found.append(index.rows_and_depths(number, first, first + SCANNED_ROWS))
        rows, depths = map(np.concatenate, zip(*found, strict=True)) if found else (np.empty(0, np.int64),) * 2
        deepest_first: Column = rows[np.argsort(-depths, kind="stable")]
        return deepest_first

    def _drop_row(self, number: int, row: int, deadline: float) -> None:
        """Under the lock, which is released while a move pins the row."""
        blocks = self._blocks
        while blocks.index.is_row_of(row, number) and blocks.residency.pins.counts[row]:
            left = deadline - self._clock.monotonic_seconds()
            if left <= 0:
                raise TierUnavailable(f"blocks are still on the move, and not all were dropped; {_ASK_AGAIN}")
            self._shared.moves_done.wait(min(DROP_LOOKS_SECONDS, left))
            self._shared.check_open()
        if blocks.index.is_row_of(row, number):
            blocks.drop(row)

    def _serve_again(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self._under_way and self._blocks.spaces[number].tenant not in self.leaving:
                self._blocks.dropping.discard(number)

    def _await_taken_in(self, is_busy: Callable[[], bool], deadline: float) -> None:
        """Wait until recovery is over and no move is in flight. Under the lock. Raises `TierUnavailable`, and
        `StoreClosed`."""
        self._shared.check_open()
        while (is_warming := self._recovery.is_under_way) or is_busy():
            left = deadline - self._clock.monotonic_seconds()
            if left <= 0:
                what = "what is on disk is still being taken in" if is_warming else "blocks are still on the move"
                raise TierUnavailable(f"{what}, and nothing was dropped; {_ASK_AGAIN}")
            self._shared.moves_done.wait(min(DROP_LOOKS_SECONDS, left))
            self._shared.check_open()
        if self._recovery.failed:
            raise TierUnavailable(
                "some of what is on disk could not be taken in at the start, and would be back; mend the disk, "
                "open the store again, and drop the namespace then"
            )

    def _is_moving(self, number: int) -> bool:
        if self._room.vacating or any(waiting == number for waiting, _ in self._leases.promoting):
            return True
        return self._levels is not None and self._levels.is_moving(number)

    # Retired epochs --------------------------------------------------------------------------------------------------

    def _take_out(self, number: int, rows: Sequence[int], epochs: Container[tuple[bytes, int]]) -> list[int]:
        """Remove the blocks among these rows that such epochs signed. Returns rows to pass again: those pinned, being
        stored or moved, and all beyond `RETIRED_IN_ALL`. The lock is free between pieces."""
        left = [*rows[RETIRED_IN_ALL:]]
        for first in range(0, len(rows[:RETIRED_IN_ALL]), RETIRED_AT_ONCE):
            left += self._retire_piece(number, rows[first : min(first + RETIRED_AT_ONCE, RETIRED_IN_ALL)], epochs)
        return left

    def _retire_piece(self, number: int, rows: Sequence[int], epochs: Container[tuple[bytes, int]]) -> list[int]:
        blocks, index = self._blocks, self._blocks.index
        left, below = [], []
        with self._shared.lock:
            self._shared.check_open()
            for row in rows:
                if not index.is_row_of(row, number):
                    continue
                parts = range(len(blocks.spaces[number].classes))
                if self._is_old_above(row, parts, epochs):
                    if blocks.residency.pins.counts[row]:
                        left.append(row)
                        continue
                    blocks.quarantine(row)
                state = index.state(row)
                is_refilled = state is RowState.LOST and blocks.residency.place(row, 0) != NO_PLACE
                if state is RowState.PENDING or is_refilled:
                    left.append(row)
                elif self._shared.lower is not None and blocks.is_below(row):
                    residency = self._shared.lower.residency
                    below.append((row, index.key(row), tuple(residency.place(row, part) for part in parts)))
        for row, key, places in below:
            if any(self._is_old(place, epochs) for place in places) and not self._out_of_nvme(row, key, places):
                left.append(row)
        return left

    def _is_old_above(self, row: int, parts: range, epochs: Container[tuple[bytes, int]]) -> bool:
        residency, dram = self._blocks.residency, self._blocks.dram
        places = [residency.place(row, part) for part in parts] if residency.is_listed(row) else []
        return NO_PLACE not in places and any(epoch_in(dram.span_at(place).view) in epochs for place in places)

    def _is_old(self, place: int, epochs: Container[tuple[bytes, int]]) -> bool:
        assert self._shared.lower is not None
        header = private_pages(HEADER_BYTES).view
        try:
            self._shared.lower.tier.read(place, header)
        except TierError:  # gone meanwhile, or unreadable: its next reader gets the error
            return False
        return epoch_in(header) in epochs

    def _out_of_nvme(self, row: int, key: bytes, places: tuple[int, ...]) -> bool:
        assert self._shared.lower is not None and self._levels is not None
        residency, index = self._shared.lower.residency, self._blocks.index

        def stands() -> bool:
            is_same = index.state(row) is RowState.VISIBLE and index.key(row) == key
            return is_same and all(residency.place(row, part) == place for part, place in enumerate(places))

        return self._levels.quarantine_below(row, stands, TierMiss.RETIRED)
