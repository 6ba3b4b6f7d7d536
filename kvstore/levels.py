"""Levels: brings blocks up to DRAM before a lease is granted, and down to NVMe before room is short (floor 2).

    up    pinned, a slot in DRAM > read > verified: MAC, name, generation, every digest > readable from DRAM
    down  pinned, verified where it stands > a slot on NVMe > durable > readable from NVMe too

Moves run in the queue's threads; the lock is the store's, and is not held while anything is read, hashed or written.
What fails is a shorter lease or a block that stays where it is, never an error of a request. Ancestors go down before
their descendants, so that what NVMe holds is whole chains at any moment.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.blocks import Blocks, Lower, Space
from kvstore.config import Limits
from kvstore.identity import Namespace, TenantKeys, root_key
from kvstore.miss import REASON_OF_FINDING, MissReason
from kvstore.prefix_index import NO_ROW, RowState
from tiering.errors import BlockCorrupt, TierError, TierFull
from tiering.frame import HEADER_BYTES, KEY_BYTES, MacKeys, digest, open_header, verify_payload
from tiering.move_queue import Clock, Move, MoveQueue, Priority
from tiering.nvme import Found
from tiering.slab import ENTRY, Entries
from tiering.tier import Finding

WINDOW_BLOCKS = 32
"""Blocks that are brought up, or taken down, at a time."""

SPILL_FRACTION = 0.25
"""With less of the DRAM budget than this free, what DRAM alone holds is written down in the background."""

NVME = "nvme"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rise:
    """A block on its way up. settled: its slots were taken over or given back."""

    number: int
    row: int
    move: Move | None = None
    settled: bool = False


@dataclass(slots=True)
class Lift:
    """Blocks that need slots in DRAM; what `Store` finds slots for."""

    namespace: int
    rows: list[int]
    places: list[list[int]]
    filled: int = 0
    cancelled: bool = False


class Levels:
    """Moves between the two tiers of one store. All methods are called without the store's lock, unless they say so."""

    def __init__(
        self,
        blocks: Blocks,
        lower: Lower,
        queue: MoveQueue,
        keys: MacKeys,
        clock: Clock,
        limits: Limits,
        lock: threading.Lock,
        pin: Callable[[int, Sequence[int]], None],
        unpin: Callable[[int, Sequence[int]], None],
        find_slots: Callable[[Lift], MissReason | None],
    ) -> None:
        self._blocks = blocks
        self._lower = lower
        self._queue = queue
        self._keys = keys
        self._clock = clock
        self._limits = limits
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._planning = threading.Lock()  # one lease at a time finds out what is to be brought up
        self._pin = pin
        self._unpin = unpin
        self._find_slots = find_slots
        self._rising: dict[int, Rise] = {}
        self._sinking: set[int] = set()
        self._pinned_for_sinking: list[list[int]] = []
        # Rows in the order in which they were stored; one may have gone since, and come again as another block.
        self._unsunk: deque[int] = deque()
        self._making_room = threading.Lock()  # a slab must not be given back while somebody takes slots in it
        self._closing = False
        self._loaded = threading.Event()
        self._loader: threading.Thread | None = None
        self._all_taken_in = False

    # Up ------------------------------------------------------------------------------------------------------------

    def bring_up(self, number: int, rows: Sequence[int], deadline: float) -> MissReason | None:
        """Blocks that the caller has pinned, in their order; why it ended before the last one, or None.

        Moves that were begun go on when the deadline has passed.
        """
        for start in range(0, len(rows), WINDOW_BLOCKS):
            rises, reason = self._begin(number, rows[start : start + WINDOW_BLOCKS], deadline)
            for rise in rises:
                assert rise.move is not None
                if not rise.move.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
                    return MissReason.DEADLINE
                if rise.move.finding is not None:
                    return REASON_OF_FINDING[rise.move.finding]
            if reason is not None:
                return reason
        return None

    def _begin(self, number: int, rows: Sequence[int], deadline: float) -> tuple[list[Rise], MissReason | None]:
        if not self._planning.acquire(timeout=max(0.0, deadline - self._clock.monotonic_seconds())):
            return [], MissReason.DEADLINE
        try:
            with self._lock:
                under_way = [self._rising[row] for row in rows if row in self._rising]
                missing = [row for row in rows if row not in self._rising and not self._blocks.is_above(row)]
            lift = Lift(number, missing, [[] for _ in self._blocks.spaces[number].classes])
            try:
                reason = self._find_slots(lift) if missing else None
            except BaseException:  # interrupted
                with self._lock:
                    for row in missing[: lift.filled]:
                        self._blocks.not_promoted(row)
                raise
            with self._lock:
                rises = [Rise(number, row) for row in missing[: lift.filled]]
                self._pin(number, missing[: lift.filled])
                self._rising.update((rise.row, rise) for rise in rises)
            for rise in rises:
                rise.move = self._queue.submit(
                    ("up", rise.row), NVME, Priority.WAITING, self._reading(rise), deadline=deadline
                )
                rise.move.then(self._settling(rise))
            return under_way + rises, reason
        finally:
            self._planning.release()

    def _reading(self, rise: Rise) -> Callable[[], None]:
        def read() -> None:
            blocks, lower, row = self._blocks, self._lower, rise.row
            digests = []
            for part in range(len(blocks.spaces[rise.number].classes)):
                target = blocks.dram.reserved_span(blocks.residency.place(row, part)).view
                lower.tier.read(lower.residency.place(row, part), target)
                header = open_header(bytes(target[:HEADER_BYTES]), self._keys)
                if header.prefix_key != blocks.index.key(row) or header.generation != lower.residency.generation(row):
                    raise BlockCorrupt("another block's frame")
                verify_payload(header, target[HEADER_BYTES:])
                digests.append(digest(target[:HEADER_BYTES]))
            with self._lock:
                blocks.promoted(row, digests)
                self._end(rise)

        return read

    def _settling(self, rise: Rise) -> Callable[[Move], None]:
        def settle(move: Move) -> None:
            with self._lock:
                if rise.settled:
                    return
                self._blocks.not_promoted(rise.row)
                if move.finding is Finding.CORRUPT:
                    self._blocks.quarantine_below(rise.row)
                self._end(rise)

        return settle

    def _end(self, rise: Rise) -> None:
        rise.settled = True
        del self._rising[rise.row]
        self._unpin(rise.number, [rise.row])
        self._changed.notify_all()

    # Down ----------------------------------------------------------------------------------------------------------

    def stored(self, rows: Iterable[int]) -> None:
        """Blocks were published. Under the lock."""
        self._unsunk.extend(rows)

    def relieve(self) -> None:
        """If DRAM is nearly full, begin to write down what it alone holds."""
        if self._unsunk and not self._closing and self._is_pressed():
            self._queue.submit("down", NVME, Priority.DEMOTION, self._spill).then(lambda _: self.relieve())

    def _is_pressed(self) -> bool:
        dram = self._blocks.dram
        with self._lock:
            usage = dram.usage()
        free_share = usage.free / usage.capacity if usage.capacity else 1.0
        free_bytes = usage.budget_bytes - usage.taken_bytes * (1 - free_share)
        return free_bytes < SPILL_FRACTION * usage.budget_bytes

    def _spill(self) -> None:
        with self._lock:
            rows = [self._unsunk.popleft() for _ in range(min(WINDOW_BLOCKS, len(self._unsunk)))]
            by_space: dict[int, list[int]] = {}
            for row in rows:
                if self._blocks.index.state(row) is RowState.VISIBLE:
                    by_space.setdefault(self._blocks.index.namespace_of(row), []).append(row)
        for number, mine in by_space.items():
            self._sink(number, mine)

    def sink_all(self, seconds: float) -> int:
        """Write down what DRAM alone holds, for at most that long; returns how many blocks are left."""
        deadline = self._clock.monotonic_seconds() + seconds
        while self._unsunk and self._clock.monotonic_seconds() < deadline:
            move = self._queue.submit("down", NVME, Priority.SAVE, self._spill)
            if not move.wait(max(0.0, deadline - self._clock.monotonic_seconds())) or move.finding is not None:
                break
        return len(self._unsunk)

    def persist(self, number: int, rows: Sequence[int], seconds: float) -> tuple[int, MissReason | None]:
        """How many blocks of a chain, from the first on, are durable after at most that long; and why not all."""
        deadline = self._clock.monotonic_seconds() + seconds
        while True:
            with self._lock:
                done = next((at for at, row in enumerate(rows) if not self._blocks.is_below(row)), len(rows))
                if done == len(rows):
                    return done, None
                if rows[done] in self._sinking:  # by somebody else
                    if not self._changed.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
                        return done, MissReason.DEADLINE
                    continue
                if self._blocks.index.state(rows[done]) is not RowState.VISIBLE:
                    return done, MissReason.EVICTED
            window = rows[done : done + WINDOW_BLOCKS]
            move = self._queue.submit(
                ("down", window[0]), NVME, Priority.SAVE, partial(self._sink, number, window), deadline=deadline
            )
            if not move.wait(max(0.0, deadline - self._clock.monotonic_seconds())):
                return done, MissReason.DEADLINE
            if move.finding is not None:
                return done, REASON_OF_FINDING[move.finding]

    def _sink(self, number: int, rows: Sequence[int]) -> None:
        """Make blocks durable, in their order; what is durable already or under way is left out. Raises `TierError`."""
        blocks = self._blocks
        with self._lock:
            batch: list[int] = []
            for row in rows:
                parent = blocks.index.parent(row)
                follows = parent == NO_ROW or blocks.is_below(parent) or parent in batch
                here = blocks.index.state(row) is RowState.VISIBLE and blocks.is_above(row)
                if here and follows and not blocks.is_below(row) and row not in self._sinking and row not in batch:
                    batch.append(row)
            # What the batch follows must stay below until the batch is there: else NVMe would hold the end of a chain.
            parents = {blocks.index.parent(row) for row in batch} - {NO_ROW, *batch}
            pinned = [*batch, *sorted(parents)]
            self._pin(number, pinned)
            self._pinned_for_sinking.append(pinned)
            self._sinking.update(batch)
        placed: list[int] = []
        written = False
        try:
            good = self._verified(number, batch)
            while good:
                with self._making_room:
                    placed, columns = self._make_room(number, good)
                places = [place for column in columns for place in column]
                frames = [
                    blocks.dram.committed_span(blocks.residency.place(row, part)).view
                    for part in range(len(columns))
                    for row in placed
                ]
                self._lower.tier.commit(places, frames)
                with self._lock:
                    written = True
                    blocks.demoted(number, placed)
                good = good[len(placed) :]
                placed, written = [], False
        finally:
            with self._lock:
                if placed and not written:
                    blocks.not_demoted(placed)
                self._sinking.difference_update(batch)
                self._pinned_for_sinking = [one for one in self._pinned_for_sinking if one is not pinned]
                self._unpin(number, pinned)
                self._changed.notify_all()

    def _verified(self, number: int, rows: Sequence[int]) -> list[int]:
        """The blocks up to the first whose frames in DRAM fail a check; that one is quarantined."""
        for at, row in enumerate(rows):
            for part in range(len(self._blocks.spaces[number].classes)):
                if not self._blocks.verify(row, part):
                    with self._lock:
                        self._blocks.quarantine(row)
                    return list(rows[:at])
        return list(rows)

    def _make_room(self, number: int, rows: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """Slots on NVMe for as many of the blocks as can be, at least one. Raises `TierFull` and `TierUnavailable`."""
        tier, space = self._lower.tier, self._blocks.spaces[number]
        for _ in range(self._limits.room_steps):
            with self._lock:
                free = min(tier.free_slots(slot_class) for slot_class in space.classes)
                if free:
                    chosen = list(rows[:free])
                    return chosen, self._blocks.make_place_below(number, chosen)
                short = [part for part, one in enumerate(space.classes) if not tier.free_slots(one)]
            if tier.has_room():
                self._new_slab(space, short[0])
                continue
            with self._lock:
                gone = self._blocks.evict_below(len(rows), number)
            if not gone:
                raise TierFull("nothing on NVMe may go")
            tier.settle()
            if not all([tier.free_slots(slot_class) for slot_class in space.classes]):
                for empty in tier.empty_slabs()[:1]:
                    tier.retire(empty)
        raise TierFull("no room on NVMe after as many steps as are allowed")

    def _new_slab(self, space: Space, part: int) -> None:
        stamp = space.sealers[part].stamp
        key = self._keys.mac_key(stamp.tenant, stamp.key_id, stamp.epoch)
        assert key is not None
        self._lower.tier.new_slab(stamp, key, pack_about(space))

    # After a restart -----------------------------------------------------------------------------------------------

    @property
    def warming(self) -> bool:
        """Whether what is on disk is still being taken in."""
        return not self._loaded.is_set()

    @property
    def failed_to_load(self) -> bool:
        """Whether some of what is on disk could not be taken in: it cannot be found before the next start."""
        return self._loaded.is_set() and not self._all_taken_in

    def start_loading(self, tenants: Mapping[bytes, TenantKeys]) -> None:
        """`load` in a thread of its own."""

        def run() -> None:
            try:
                self.load(tenants)
                self._all_taken_in = True
            except TierError as error:
                _log.error("what is on disk cannot be taken in: %s", error)
            finally:
                self._loaded.set()

        self._loader = threading.Thread(target=run, name="kv-load", daemon=True)
        self._loader.start()

    def wait_for_load(self, timeout_seconds: float) -> bool:
        """Whether it is over after at most that long, and went well."""
        return self._loaded.wait(timeout_seconds) and self._all_taken_in

    def load(self, tenants: Mapping[bytes, TenantKeys], progress: Callable[[int, int], None] | None = None) -> None:
        """Take in what is on disk; matches find it when this returns. Raises `TierUnavailable`."""
        groups: dict[tuple[bytes, bytes], list[Found]] = {}
        for found in self._lower.tier.load(progress):
            owner = found.header.slot_class
            groups.setdefault((owner.tenant, owner.namespace), []).append(found)
            if self._closing:
                return
        for (tenant, namespace), group in groups.items():
            with self._lock:
                space = self._space(tenants.get(tenant), namespace, group[0].header.about)
            if space is not None:
                self._take_in(space, group)

    def _space(self, keys: TenantKeys | None, digest_of_namespace: bytes, about: bytes) -> Space | None:
        for space in self._blocks.spaces:
            if keys is not None and space.tenant == keys.tenant:
                if space.classes[0].namespace == digest_of_namespace:
                    return space
        try:
            payloads, namespace = unpack_about(about)
        except ValueError:
            return None
        if keys is None or namespace.digest() != digest_of_namespace:
            return None
        return self._blocks.add_space(keys, namespace, payloads)

    def _take_in(self, space: Space, group: Sequence[Found]) -> None:
        """Blocks whose parts are all there, with one generation; what else is found is given up."""
        frames: list[dict[bytes, tuple[int, int]]] = [{} for _ in space.classes]  # key -> (generation, place)
        entries: dict[bytes, np.void] = {}
        useless: list[int] = []
        for found in group:
            part = found.header.slot_class.part
            for key, place, entry in zip(keys_of(found.entries["key"]), found.places, found.entries, strict=True):
                frame = (int(entry["generation"]), place)
                known = frames[part].get(key)
                if known is not None:
                    useless.append(min(frame, known)[1])
                if known is None or frame > known:
                    frames[part][key] = frame
                    entries[key] = entry
        whole = [
            key
            for key, (generation, _) in frames[0].items()
            if all(part.get(key, (0, 0))[0] == generation for part in frames)
        ]
        chosen = set(whole)
        useless += [place for part in frames for key, (_, place) in part.items() if key not in chosen]
        if whole:
            table = np.array([entries[key] for key in whole], ENTRY)
            with self._lock:
                useless += self._insert(space, whole, table, frames)
        self._lower.tier.delete(useless)

    def _insert(
        self, space: Space, keys: list[bytes], table: Entries, frames: list[dict[bytes, tuple[int, int]]]
    ) -> list[int]:
        """Rows for whole blocks; returns the places of those that nothing leads to, or that were stored anew."""
        index, lower = self._blocks.index, self._lower.residency
        rows = index.load(space.number, keys, table["block_index"], table["priority"], table["expires_at"])
        useless = [part[key][1] for key, row in zip(keys, rows, strict=True) if row == NO_ROW for part in frames]
        fresh = [at for at, row in enumerate(rows) if row != NO_ROW]
        keys, rows, table = [keys[at] for at in fresh], [rows[at] for at in fresh], table[fresh]
        if not rows:
            return useless
        self._blocks.grow_to(max(rows))
        root = root_key(space.namespace.layout.block_tokens)
        lost = set(index.link(space.number, rows, keys_of(table["parent"]), root))
        key_of = dict(zip(rows, keys, strict=True))
        generation_of = dict(zip(rows, table["generation"].tolist(), strict=True))
        for row in sorted(lost, key=index.depth, reverse=True):
            index.remove(row)
            useless += [part[key_of[row]][1] for part in frames]
        kept = self._oldest_first({row: generation for row, generation in generation_of.items() if row not in lost})
        for part, column in enumerate(frames):
            places = [column[key_of[row]][1] for row in kept]
            if kept:
                lower.reserved(kept, part, places)
                self._lower.tier.own(places, kept)
        for row in kept:
            lower.published(row, generation_of[row])
            if index.parent(row) != NO_ROW:
                lower.child_came(index.parent(row))
        for row in kept:
            lower.listed(row, index.depth(row))
        return useless

    def _oldest_first(self, generation_of: dict[int, int]) -> list[int]:
        """In the order of the youngest block below each, so that an ancestor is always the more recent."""
        index = self._blocks.index
        newest: dict[int, int] = {}
        for row in sorted(generation_of, key=index.depth, reverse=True):
            newest[row] = max(newest.get(row, 0), generation_of[row])
            parent = index.parent(row)
            newest[parent] = max(newest.get(parent, 0), newest[row])
        return sorted(generation_of, key=lambda row: (newest[row], -index.depth(row)))

    # Ends ----------------------------------------------------------------------------------------------------------

    def is_moving(self, number: int) -> bool:
        """Whether a block of a namespace is on its way up or down. Under the lock."""
        namespace_of = self._blocks.index.namespace_of
        return any(rise.number == number for rise in self._rising.values()) or any(
            namespace_of(row) == number for row in self._sinking
        )

    def close(self, seconds: float) -> None:
        """Write down what can be in that time, then let no more moves in."""
        self.sink_all(seconds)
        self._closing = True
        if self._loader is not None:
            self._loader.join(seconds)
        self._queue.close(seconds)

    @property
    def rising(self) -> set[int]:
        """Rows on their way up."""
        return set(self._rising)

    @property
    def pinned_for_sinking(self) -> list[list[int]]:
        """Rows that are pinned while some of them go down, a list for each move."""
        return self._pinned_for_sinking

    @property
    def sinking(self) -> set[int]:
        """Rows on their way down."""
        return self._sinking


def keys_of(column: Entries) -> list[bytes]:
    """A column of 32-byte keys, one by one."""
    raw = np.ascontiguousarray(column).tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def pack_about(space: Space) -> bytes:
    """What a slab keeps of its namespace: each part's payload bytes, and the namespace itself."""
    payloads = [sealer.stamp.payload_bytes for sealer in space.sealers]
    return struct.pack(f"<H{len(payloads)}Q", len(payloads), *payloads) + space.namespace.pack()


def unpack_about(about: bytes) -> tuple[list[int], Namespace]:
    """The mirror of `pack_about`. Raises `ValueError`."""
    try:
        (parts,) = struct.unpack_from("<H", about)
        payloads = list(struct.unpack_from(f"<{parts}Q", about, 2))
    except struct.error as error:
        raise ValueError(f"not what a slab says of its namespace ({error})") from None
    return payloads, Namespace.unpack(about[2 + 8 * parts :])
