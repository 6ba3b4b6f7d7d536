"""Blocks: the index, the residency table, the policy and the DRAM slots, kept in step (floor 2).

Every change to a block's life goes through one of these methods, so that the four tables can never disagree. No lock,
no clock and no leases here: `store` has those. `check()` verifies all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.identity import Namespace, TenantKeys
from kvstore.prefix_index import NO_ROW, PrefixIndex, RowState
from tiering.dram import DramTier
from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, KEY_BYTES, MacKeys, Sealer, Stamp, digest, open_header, verify_payload
from tiering.residency import FrameState, Residency
from tiering.tier import NO_PLACE, SlotClass, extent_of, slot_of


@dataclass(frozen=True)
class Space:
    """A namespace as this store knows it: one slot class and one sealer per part."""

    number: int
    tenant: bytes
    namespace: Namespace
    classes: tuple[SlotClass, ...]
    sealers: tuple[Sealer, ...]

    @property
    def block_bytes(self) -> int:
        """DRAM that one block takes: all its frames."""
        return sum(slot_class.frame_bytes for slot_class in self.classes)


Unsealed = tuple[int, bytes, int, int, Sequence[bytes]]
"""Row, key of the parent, blocks before it, generation, and the digests of its layer slices."""


class Blocks:
    """What exists and where it is. Callers hold the store's lock."""

    def __init__(self, index: PrefixIndex, residency: Residency, dram: DramTier, keys: MacKeys) -> None:
        self.index = index
        self.residency = residency
        self.dram = dram
        self.spaces: list[Space] = []
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._next_generation = 1

    def add_space(self, keys: TenantKeys, namespace: Namespace, payload_bytes: Sequence[int]) -> Space:
        """Make a namespace of a tenant known."""
        digest_of_namespace = namespace.digest()
        layout = namespace.layout
        sealers, classes = [], []
        for part, payload in zip(layout.parts, payload_bytes, strict=True):
            stamp = Stamp(
                key_id=keys.key_id,
                epoch=keys.epoch,
                tenant=keys.tenant,
                namespace=digest_of_namespace,
                codec=namespace.codec,
                part=part.index,
                parts=len(layout.parts),
                block_tokens=layout.block_tokens,
                slices=len(part.layers),
                payload_bytes=payload,
            )
            sealers.append(Sealer(stamp, keys.mac))
            classes.append(SlotClass(keys.tenant, digest_of_namespace, part.index, stamp.frame_bytes))
        space = Space(self.index.add_namespace(keys.tenant), keys.tenant, namespace, tuple(classes), tuple(sealers))
        assert space.number == len(self.spaces)
        self.spaces.append(space)
        self.residency.add_parts(len(classes))
        return space

    # A block's life ------------------------------------------------------------------------------------------------

    def begin(self, number: int, key: bytes, parent: int, priority: int, expires_at: int) -> int:
        """1. A pending row: the block is being stored, its parent cannot go any more."""
        row = self.index.insert(number, key, parent, priority, expires_at)
        self.residency.grow_to(row)
        if parent != NO_ROW:
            self.residency.child_came(parent)
        return row

    def place(self, number: int, rows: Sequence[int]) -> list[list[int]]:
        """2. One slot per part and block, by part; every class must have as many free ones."""
        columns = []
        for part, slot_class in enumerate(self.spaces[number].classes):
            places = self.dram.reserve(slot_class, len(rows))
            assert len(places) == len(rows), "asked for slots that are not there"
            self.residency.reserved(rows, part, places)
            columns.append(places)
        return columns

    def next_generations(self, count: int) -> range:
        """Numbers that no other block of this store had or will have."""
        self._next_generation += count
        return range(self._next_generation - count, self._next_generation)

    def seal(self, number: int, part: int, unsealed: Sequence[Unsealed]) -> None:
        """3. The payloads of a part are in their slots: write the headers in front of them."""
        index, residency = self.index, self.residency
        sealer = self.spaces[number].sealers[part]
        rows, headers = [], []
        for row, parent_key, depth, generation, digests in unsealed:
            header = sealer.seal(index.key(row), parent_key, depth, generation, digests, *index.retention(row))
            residency.part_sealed(row, part, digest(header))
            rows.append(row)
            headers.append(header)
        self.dram.commit(residency.places_of(rows, part), headers)

    def publish(self, number: int, rows: Sequence[int], generations: Sequence[int]) -> None:
        """4. All parts are sealed and the parents are visible: from now on the blocks can be found."""
        index, residency = self.index, self.residency
        for row, generation in zip(rows, generations, strict=True):
            is_new = index.publish(row)
            residency.published(row, generation)
            if is_new:
                residency.listed(row, index.depth(row))
        for part in range(len(self.spaces[number].classes)):
            self.dram.own(residency.places_of(rows, part), rows)

    def evict_worst(self, blocks: int, number: int | None = None) -> int:
        """5. Give up the worst leaves that nobody pins, up to that many: rows and frames; returns how many went.

        number: for the sake of a namespace that is short of slots. A worse leaf of another one may be a step towards an
        extent, so the caller has to look again after it.
        """
        gone = 0
        places: list[int] = []
        for row in self.residency.worst() if blocks > 0 else ():
            helps = number is None or self.index.namespace_of(row) == number
            if gone and not helps:
                break
            places += self.residency.forget(row)
            self._remove(row, remember=True)
            gone += 1
            if gone == blocks or not helps:
                break
        self._free(places)
        self.counters["evicted_blocks"] += gone
        return gone

    def give_up(self, row: int) -> None:
        """A block that was never published ends here; its children were given up before."""
        self._free(self.residency.forget(row))
        self._remove(row, remember=False)

    def unfill(self, row: int) -> None:
        """A hollow row that was to be filled again stays hollow."""
        self._free(self.residency.forget(row))

    def orphan(self, row: int) -> list[int]:
        """A pending row goes while its producer still writes: the places are returned, still taken."""
        places = self.residency.forget(row)
        self._remove(row, remember=False)
        return places

    def free_orphans(self, places: Sequence[int]) -> None:
        """The producer of orphaned places is done with them."""
        self._free(places)

    def drop(self, row: int) -> None:
        """A readable or hollow leaf goes because its namespace does. Pins were lifted before."""
        assert self.residency.pins.counts[row] == 0
        self._free(self.residency.forget(row))
        self._remove(row, remember=True)

    def quarantine(self, row: int) -> None:
        """A check failed. The frames are never used again; the row stays, hollow, so that its children keep theirs.

        All parts go: a block without one of them is not readable, and somebody may be reading the others right now.
        """
        self.dram.condemn(self.residency.forget(row))
        self.index.hollow(row)
        self.counters["quarantined_blocks"] += 1

    def relocate(self, row: int, part: int, target: int) -> bool:
        """A verified copy of a frame stands at `target`: take that place over, if it is a copy of what was committed.

        False leaves everything as it was.
        """
        source = self.residency.place(row, part)
        raw = bytes(self.dram.reserved_span(target).view[:HEADER_BYTES])
        if digest(raw) != self.residency.header_digest(row, part):
            return False
        self.dram.commit([target], [raw])
        self.dram.own([target], [row])
        self.residency.moved(row, part, target)
        self.dram.delete([source])
        return True

    def verify(self, row: int, part: int) -> bool:
        """Whether a part's frame is what was committed: MAC, identity, generation and every digest."""
        place = self.residency.place(row, part)
        if place == NO_PLACE:
            return False
        view = self.dram.span_at(place).view
        raw = bytes(view[:HEADER_BYTES])
        try:
            header = open_header(raw, self._keys)
            verify_payload(header, view[HEADER_BYTES:])
        except BlockCorrupt:
            return False
        return (
            header.prefix_key == self.index.key(row)
            and header.generation == self.residency.generation(row)
            and digest(raw) == self.residency.header_digest(row, part)
        )

    def retire_empty(self, number: int) -> None:
        """Give back the extents of a namespace that hold nothing any more."""
        for slot_class in self.spaces[number].classes:
            for extent in list(self.dram.extents_of(slot_class)):
                counts = extent.slots.counts
                if counts[FrameState.FREE] + counts[FrameState.QUARANTINED] == extent.slots.capacity:
                    if not self.residency.is_any_held(extent.number):
                        self.dram.retire(extent.number)

    def check(self, pins: Mapping[int, int]) -> None:
        """Every invariant over the four tables; `pins`: row -> how many leases, reservations and moves pin it."""
        self.index.check()
        self.dram.check()
        self.residency.check()
        self.residency.pins.check(dict(pins))
        for space in self.spaces:
            for row in self.index.rows(space.number):
                state = self.index.state(row)
                assert self.residency.is_listed(row) == (state != RowState.PENDING)
                assert self.residency.children(row) == self.index.children(row)
                if state != RowState.VISIBLE:
                    continue
                parent = self.index.parent(row)
                parent_key = self.index.key(parent) if parent != NO_ROW else None
                for part, slot_class in enumerate(space.classes):
                    self._check_frame(row, part, slot_class, parent_key)

    def _check_frame(self, row: int, part: int, slot_class: SlotClass, parent_key: bytes | None) -> None:
        """Invariants 3 and 6: the place is readable, it is this block's, and its header names it."""
        place = self.residency.place(row, part)
        extent = next(extent for extent in self.dram.all_extents(slot_class) if extent.number == extent_of(place))
        assert extent.slots.states[slot_of(place)] == FrameState.RESIDENT
        assert extent.slots.owners[slot_of(place)] == row
        raw = bytes(self.dram.committed_span(place).view[:HEADER_BYTES])
        if digest(raw) != self.residency.header_digest(row, part):
            return  # damaged since: a reader will find out, which is another test's business
        header = open_header(raw, self._keys)
        assert header.prefix_key == self.index.key(row) and header.stamp.part == part
        assert header.block_index == self.index.depth(row)
        assert len(header.parent) == KEY_BYTES and (parent_key is None or header.parent == parent_key)

    def _free(self, places: Sequence[int]) -> None:
        """Free slots in whatever state they are; a late reader's are kept from reuse."""
        dram, residency = self.dram, self.residency
        written = []
        for place in places:
            if dram.is_reserved(place):
                dram.abort([place])
            elif residency.is_held(place):
                dram.retain([place])
            else:
                written.append(place)
        dram.delete(written)

    def _remove(self, row: int, *, remember: bool) -> None:
        self.residency.unlisted(row)
        parent = self.index.remove(row, remember=remember)
        if parent != NO_ROW:
            self.residency.child_went(parent)
