"""Replays a trace through the store's own index, tables and policies, without payload and without a clock.

    request   match > what is found counts as a hit, in DRAM or below > blocks below are promoted > used
              slots for the rest: free ones, else the worst leaves are evicted > readable > used
    leaf      evicted from DRAM > if NVMe lacks it and admission agrees, it is written there, ancestors first > gone
    state     of a model with recurrent states: a hit ends at the deepest block that has one > after the blocks, states
              are stored where the policy wants them, each as a chain of its own that takes as many blocks' room

These are the steps of an undisturbed lease and put, in the store's order. A request ends when the next one begins. Only
a policy's seed is random, so equal traces give equal figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.block.states import StatePolicy
from kvstore.core.rows.index import NO_ROW
from kvstore.core.table import BlockTable
from kvstore.insight.trace import Column, Trace
from tiering.slots import FrameEvent, Piece, SlotLedger
from tiering.tier import SlotClass

REQUESTS_PER_LOOK = 200
"""Requests between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Per request: blocks found in DRAM, blocks found on NVMe alone, and blocks written to each. A promotion counts as
    a write to DRAM. state_writes: states, in DRAM too."""

    dram_hits: Column
    dram_writes: Column
    nvme_hits: Column
    nvme_writes: Column
    state_writes: Column


@dataclass(frozen=True, slots=True)
class StatesKept:
    """Where states are kept. parted: also where KV was found further than a state. blocks: room that one takes."""

    policy: StatePolicy
    parted: bool
    blocks: int


class CountingTier:
    """A `LowerTier` with a single slot class that keeps no bytes: it counts slots as a real tier would."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._ledger = ledger = SlotLedger[Piece]()
        # `check` verifies that the slots of all states add up to the capacity.
        self.reserve, self.free_slots, self.check = ledger.reserve, ledger.free_slots, ledger.check
        self.own, self.own_many, self.rows_in = ledger.own, ledger.own_many, ledger.rows_in

    def open(self, slot_class: SlotClass) -> None:
        """Give the whole budget to one slot class. Call it once."""
        self._ledger.add(Piece(0, slot_class, self.budget_bytes // slot_class.frame_bytes))

    def commit(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.COMMIT)

    def abort(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.ABORT)

    def delete(self, places: Sequence[int], *, claim: bool = False) -> None:
        self._ledger.step(places, FrameEvent.EVICT, FrameEvent.DELETED)

    def quarantine(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.CONDEMN)

    def held(self) -> dict[bytes, int]:
        return self._ledger.held

    @property
    def piece_bytes(self) -> int:
        """The whole budget: it is a single piece."""
        return self.budget_bytes

    def pieces(self) -> int:
        return 1

    def frames_of(self, slot_class: SlotClass) -> int:
        return sum(piece.slots.live for piece in self._ledger.all_pieces(slot_class))


class Replay:
    """One store's tables. Call `run` once."""

    def __init__(
        self, blocks: BlockTable, number: int, nvme: CountingTier | None = None, states: StatesKept | None = None
    ) -> None:
        """number: the namespace of all requests. nvme: the lower tier, if any. states: without a lower tier alone."""
        self.seconds = 0.0
        """Time of the current request, since the trace's first."""
        self.request = 0
        """Number of the current request."""
        self.names = blocks.index.names
        """For each row, its block in the trace."""
        self._blocks = blocks
        self._number = number
        self._nvme = nvme
        self._states = states
        self._written_below = 0
        self._first_state = 0
        self._rows: list[tuple[int, int, int, int, int]] = []

    def run(self, trace: Trace, progress: Callable[[int], object] = lambda done: None) -> Replayed:
        """Replay all requests in order. progress: called with the number done."""
        names = [_name(number) for number in range(trace.distinct_blocks)]
        self._first_state = len(names)
        seconds = ((trace.timestamps_ms - trace.timestamps_ms[0]) / 1000).tolist()
        tokens = trace.input_tokens.tolist()
        for done, chain in enumerate(trace.chains()):
            if done % REQUESTS_PER_LOOK == 0:
                progress(done)
            self.request, self.seconds = done, max(self.seconds, seconds[done])
            self._request([names[block] for block in chain], tokens[done])
        progress(trace.requests)
        return Replayed(*np.array(self._rows, np.int64).reshape(-1, 5).T)

    @property
    def block_bytes(self) -> int:
        """The size that these blocks are accounted with; they have no payload."""
        (slot_class,) = self._blocks.spaces[self._number].classes
        return slot_class.frame_bytes

    def check(self) -> None:
        """Verify the invariants of all tables."""
        self._blocks.index.check()
        self._blocks.dram.check()
        self._blocks.residency.check()
        if self._blocks.lower is not None:
            self._blocks.lower.tier.check()
            self._blocks.lower.residency.check()

    def _request(self, keys: Sequence[bytes], tokens: int) -> None:
        blocks = self._blocks
        rows = blocks.index.match(self._number, keys)
        above = next((at for at, row in enumerate(rows) if not blocks.is_above(row)), len(rows))
        self._written_below = 0
        brought, stored, states = 0, 0, 0
        blocks.residency.pins.pin(rows)
        if above < len(rows):
            brought = self._bring_up(rows[above:])
        if rows:
            blocks.used(rows[::-1], len(rows))
        blocks.residency.pins.unpin(rows)
        hits = above if self._states is None else self._to_a_state(self._states, keys[:above], tokens)
        if above + brought == len(rows):
            stored = self._store(keys[len(rows) :], rows[-1] if rows else NO_ROW)
        if self._states is not None:
            states = self._store_states(self._states, keys[: len(rows) + stored], hits, len(rows), tokens)
        self._rows.append((hits, brought + stored, len(rows) - above, self._written_below, states))

    def _to_a_state(self, kept: StatesKept, keys: Sequence[bytes], tokens: int) -> int:
        """How many of the blocks a request begins behind: up to the deepest state, and its last token is computed."""
        blocks = self._blocks
        for count in range(min(len(keys), (tokens - 1) // kept.policy.block_tokens), 0, -1):
            state = blocks.index.match(self._number, self._state_keys(kept, keys[count - 1]))
            if len(state) == kept.blocks:
                blocks.used(state[::-1], len(state))
                return count
        return 0

    def _store_states(self, kept: StatesKept, keys: Sequence[bytes], first: int, found: int, tokens: int) -> int:
        size, written = kept.policy.block_tokens, 0
        parted_at = found * size if kept.parted else 0
        for boundary in kept.policy.wanted(first * size, len(keys) * size, tokens, parted_at=parted_at):
            state = self._state_keys(kept, keys[boundary // size - 1])
            there = self._blocks.index.match(self._number, state)
            written += self._store(state[len(there) :], there[-1] if there else NO_ROW) > 0
        return written

    def _state_keys(self, kept: StatesKept, key: bytes) -> list[bytes]:
        """A state's blocks, none of which is a block of the trace."""
        first = self._first_state + int.from_bytes(key, "little") * kept.blocks
        return [_name(number) for number in range(first, first + kept.blocks)]

    def _bring_up(self, rows: Sequence[int]) -> int:
        blocks, number = self._blocks, self._number
        filled = 0
        while filled < len(rows):
            free = self._room(len(rows) - filled)
            if not free:
                break
            taken = rows[filled : filled + free]
            blocks.make_place_above(number, taken)
            for row in taken:
                blocks.promoted(row, [b""])
            filled += len(taken)
        return filled

    def _room(self, wanted: int) -> int:
        blocks, number = self._blocks, self._number
        (slot_class,) = blocks.spaces[number].classes
        while not (free := blocks.dram.free_slots(slot_class)):
            if not blocks.evict_worst(wanted, self._leaves):
                return 0
        return free

    def _leaves(self, row: int) -> None:
        """DRAM evicts a block that NVMe lacks: write it and its missing ancestors, if admitted."""
        blocks, number = self._blocks, self._number
        lower, below, nvme = blocks.lower, blocks.below, self._nvme
        assert lower is not None and below is not None and nvme is not None
        (slot_class,) = blocks.spaces[number].classes
        way = []
        while row != NO_ROW and not blocks.is_below(row):
            way.append(row)
            row = blocks.index.parent(row)
        if not lower.admission.admits(way, slot_class.frame_bytes):
            return
        pinned = [*way] if row == NO_ROW else [*way, row]  # its ancestors must not be evicted for it
        blocks.residency.pins.pin(pinned)
        way.reverse()
        while way and (nvme.free_slots(slot_class) or below.evict(1, number)[0]):
            taken = way[: nvme.free_slots(slot_class)]
            (places,) = below.make_place(number, taken)
            nvme.commit(places)
            below.demoted(number, taken, blocks.residency.generations_of(taken))
            self._written_below += len(taken)
            del way[: len(taken)]
        blocks.residency.pins.unpin(pinned)

    def _store(self, keys: Sequence[bytes], parent: int) -> int:
        blocks, number = self._blocks, self._number
        rows: list[int] = []
        for key in keys:
            rows.append(blocks.begin(number, key, rows[-1] if rows else parent, 0, 0))
        filled = 0
        while filled < len(rows):
            free = self._room(len(rows) - filled)
            if not free:
                break  # only this request's own ancestors are left
            taken = rows[filled : filled + free]
            (places,) = blocks.place(number, taken)
            blocks.dram.commit(places, [b""] * len(places))
            filled += len(taken)
        for row in reversed(rows[filled:]):
            blocks.give_up(row)
        if filled:
            blocks.publish(number, rows[:filled], blocks.next_generations(number, filled))
            blocks.used(blocks.index.chain(rows[filled - 1]), filled)
        return filled


def _name(number: int) -> bytes:
    return number.to_bytes(32, "little")
