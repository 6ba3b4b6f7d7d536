"""The store against a dict: any sequence of verbs, and every byte, every count and every reason is accounted for.

The store may forget; it may never return other bytes than were last stored under that name, claim more than was put,
give a reason that cannot be true, or lose what a live lease pins. Memory is a mebibyte in extents of 64 KiB, so that
namespaces take it from each other all the time; what is put into `mover` happens in the middle of such a move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from asking import Asking
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.client import get as getting
from kvstore.client import handle
from kvstore.client.handle import Lease, Match
from kvstore.config import Limits
from learned_policy import by_worth
from model.store_model import (
    BLOCK_TOKENS,
    LATENT,
    SHARDED,
    STYLES,
    WHOLE,
    Chain,
    Owned,
    Prompt,
    open_store,
    temporary_directory,
)
from tiering.dram.tier import FrameCopy
from tiering.frame import HEADER_BYTES
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker
from tiering.slots import FrameState
from tiering.tier import FrameSpan

LEASE_SECONDS = 60.0
PINNED_FRACTION = 0.3
SPACES = (
    ("default", "a", WHOLE),
    ("default", "b", WHOLE),
    ("default", "sharded", SHARDED),
    ("default", "latent", LATENT),
    ("other", "a", WHOLE),
    ("other", "sharded", SHARDED),
)
Name = tuple[str, Chain]

prompts = st.builds(
    Prompt,
    st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=5).map(tuple),
    st.sampled_from([0, 1, 63]),
    st.sampled_from([(), (), (), ("adapter",)]),
)
# A space and a prompt, or one of those that something was done with lately.
spaces = st.integers(0, len(SPACES) - 1)
aims = st.one_of(st.tuples(spaces, prompts), st.integers(0, 3), st.integers(0, 9))
Aim = tuple[int, Prompt] | int
pagings = st.fixed_dictionaries(
    {
        "page_tokens": st.sampled_from([16, 32, 64, 64]),
        "style": st.sampled_from(STYLES),
        "library": st.sampled_from(["numpy", "torch"]),
        "seed": st.integers(0, 1000),
    }
)
which = st.integers(0, 1 << 16)
PLOTS = (["lease", "tick"], ["lease", "tick", "evict"], ["lease", "corrupt", "get"], ["lease", "release"])
ACTS = ("lease", "get", "corrupt", "release", "put", "evict", "tick", "commit", "abort")


@dataclass
class HeldLease:
    """A lease that was not released, and what it must deliver for as long as it is not."""

    space: Owned
    prompt: Prompt
    lease: Lease
    versions: list[int]
    expires_at: float
    expired: bool = False


@dataclass
class OpenReservation:
    """A put under way, part by part."""

    space: Owned
    prompt: Prompt
    number: int
    blocks: list[int]
    places: tuple[list[int], ...]
    version: int
    done: list[int]
    published: int = 0
    cancelled: bool = False


@dataclass
class Known:
    """The dict. version: of every block that ever was readable. flips: bits that differ, by place and generation."""

    version: dict[Name, int] = field(default_factory=dict)
    flips: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)
    damaged: set[Name] = field(default_factory=set)

    keys: dict[bytes, tuple[int, Prompt]] = field(default_factory=dict)

    def publish(self, name: Name, version: int) -> None:
        self.version[name] = version
        self.damaged.discard(name)


class StoreMachine(RuleBasedStateMachine):
    """See the top of the file."""

    def __init__(self, totals: Counter[str], policy: PolicyMaker = LeafFirstLru) -> None:
        super().__init__()
        self.totals = totals
        self.directory = temporary_directory()
        self.opened = open_store(
            self.directory.name,
            limits=Limits(lease_seconds=LEASE_SECONDS, pinned_fraction=PINNED_FRACTION),
            policy=policy,
        )
        self.core = self.opened.core
        self.spaces = [self.opened.namespace(model, layout, tenant) for tenant, model, layout in SPACES]
        self.known = Known()
        self.leases: list[HeldLease] = []
        self.reservations: list[OpenReservation] = []
        self.versions = 0
        self.interrupted = False
        self.opening: list[set[Name]] = []  # blocks for which slots are being found, further up the stack
        self.recent: list[tuple[int, Prompt]] = []

    # The verbs --------------------------------------------------------------------------------------------------------

    @rule(aim=aims, paging=pagings, skip=st.sampled_from([0, 0, 0, 1, 5]), others_end=st.booleans())
    def put(self, aim: Aim, paging: dict[str, Any], skip: int, others_end: bool = False) -> None:
        owned, prompt = self._at(aim)
        blocks = len(prompt.letters)
        before = self._look(owned, prompt)
        first_token = min(skip * paging["page_tokens"], blocks * BLOCK_TOKENS)
        self.versions += 1
        version = self.versions
        self.interrupted = False
        stored: list[int] = []

        def on_stored(block: int) -> None:
            stored.append(block)
            self.known.publish((owned.name, prompt.chain(block)), version)

        self.opening.append(_names(owned, prompt))
        owned.door.on_stored.append(on_stored)
        owned.door.on_await = partial(self._give_up_all, owned) if others_end else lambda: None
        result = owned.put(prompt, version, first_token=first_token, **paging)
        owned.door.on_stored.pop()
        self.opening.pop()
        assert result.stored == len(stored) == len(set(stored))
        assert result.present + result.stored <= blocks
        if result.present != before.blocks:  # found damaged, or evicted, between two pieces of the put
            assert self.interrupted and result.present < before.blocks
            assert result.present in stored or result.present == result.stopped_at
        assert (result.stopped_at is None) == (result.reason is None)
        if result.stopped_at is None:
            assert before.blocks >= min(-(-first_token // BLOCK_TOKENS), blocks)
        elif result.reason is MissReason.IN_FLIGHT:
            assert (owned.name, prompt.chain(result.stopped_at)) in self._perhaps_pending()
            assert not others_end or len(self.opening) or self.interrupted, "it goes on once the others have ended"
            assert result.in_flight > 0
        elif before.blocks < -(-first_token // BLOCK_TOKENS):
            look = self._look(owned, prompt) if others_end else before  # what is missing is in flight no longer
            assert (result.reason, result.stopped_at) == (look.reason, before.blocks)
        elif result.reason is MissReason.EVICTED:
            assert stored and result.stopped_at > max(stored), "the end of the chain made room for its beginning"
        else:
            self._check_room(result.reason)
        after = self._look(owned, prompt)
        if not self.interrupted:
            assert after.blocks == (blocks if result.stopped_at is None else result.stopped_at)

    def _give_up_all(self, owned: Owned) -> None:
        """All other puts of a namespace end while one waits for them."""
        for open_ in [one for one in self.reservations if one.space is owned]:
            self.reservations.remove(open_)
            Asking(owned.door).abort(open_.number)

    def _check_room(self, reason: MissReason | None) -> None:
        """Why a put found no more room: nothing is called pinned where nothing is leased."""
        assert reason in (MissReason.PINNED_FULL, MissReason.DEADLINE, MissReason.QUOTA)
        usage = self.core.usage()
        if not self.interrupted:
            assert (reason is MissReason.PINNED_FULL) == bool(usage.leases), (reason, usage.leases)

    @rule(space=spaces, prompts=st.integers(1, 12), depth=st.integers(1, 3))
    def flood(self, space: int, prompts: int, depth: int) -> None:
        """Other people's prompts, one after the other: memory wanders to this namespace."""
        for first in range(100, 100 + prompts):
            paging = {"page_tokens": 64, "style": "heads", "library": "numpy", "seed": 0}
            self.put((space, Prompt((first, *range(depth - 1)))), paging, 0)

    @rule(aim=aims)
    def match(self, aim: Aim) -> None:
        self._look(*self._at(aim))

    @rule(aim=aims, skip=st.sampled_from([0, 0, 0, 70, 128, 1000]), meanwhile=st.sampled_from([0, 0, 0, 1, 50]))
    def lease(self, aim: Aim, skip: int, meanwhile: int = 0) -> None:
        """Between the match and the lease some blocks may go."""
        owned, prompt = self._at(aim)
        match = self._look(owned, prompt)
        self.evict(meanwhile)
        pinned = self.core.usage().pinned_bytes
        lease = owned.handle.lease(match, first_token=skip)
        assert self.core.usage().pinned_bytes <= max(pinned, PINNED_FRACTION * self.core.usage().dram.budget_bytes)
        assert lease.blocks <= match.blocks and lease.account.asked == prompt.tokens
        assert lease.account.hit_tokens == lease.tokens == lease.blocks * BLOCK_TOKENS
        if lease.blocks < match.blocks:
            evicted = meanwhile and lease.reason is MissReason.EVICTED
            assert evicted or lease.reason is MissReason.PINNED_FULL
            assert lease.account.misses[lease.reason] >= (match.blocks - lease.blocks) * BLOCK_TOKENS
        versions = [self.known.version[owned.name, prompt.chain(block)] for block in range(lease.blocks)]
        if lease.reply.lease:
            expires_at = self.opened.clock.monotonic + LEASE_SECONDS
            self.leases.append(HeldLease(owned, prompt, lease, versions, expires_at))
        else:
            assert lease.blocks <= lease.first_token // BLOCK_TOKENS

    @rule(space=spaces, prompt=prompts, paging=pagings, skip=st.sampled_from([0, 0, 0, 70, 128]))
    def put_and_lease(self, space: int, prompt: Prompt, paging: dict[str, Any], skip: int) -> None:
        self.put((space, prompt), paging, 0)
        self.lease((space, prompt), skip)

    @precondition(lambda self: self.leases)
    @rule(held=which, paging=pagings, skip=st.integers(0, 6), short=st.sampled_from([0, 0, 0, 1, 3]))
    def get(self, held: int, paging: dict[str, Any], skip: int, short: int) -> None:
        record = self.leases[held % len(self.leases)]
        owned, prompt, lease = record.space, record.prompt, record.lease
        first_token = min(lease.first_token + skip * paging["page_tokens"], lease.tokens)
        covered = max(0, lease.tokens - first_token + (1 - short) * paging["page_tokens"])
        pages = owned.pages(covered, **paging)
        start, stop = first_token // BLOCK_TOKENS, min(lease.blocks, (first_token + pages.pages.tokens) // BLOCK_TOKENS)
        bad = next((block for block in range(start, stop) if self._is_damaged(lease, block)), None)
        before = pages.snapshot()
        loaded = owned.handle.get(lease, pages.pages, first_token)
        good = range(start, stop if bad is None else bad)
        kv = {block * BLOCK_TOKENS - first_token: owned.kv(prompt, block, record.versions[block]) for block in good}
        ignore = None if bad is None else max(0, bad * BLOCK_TOKENS - first_token)
        pages.expect(before, kv, ignore_from=ignore)
        assert loaded.account.asked == prompt.tokens
        if bad is None:
            assert loaded.reason is None and loaded.account == lease.account
            assert loaded.tokens == (stop * BLOCK_TOKENS if stop > start else min(lease.tokens, first_token))
            return
        assert loaded.reason is MissReason.CORRUPT and loaded.tokens == bad * BLOCK_TOKENS
        assert loaded.account.hit_tokens == loaded.tokens
        name = (owned.name, prompt.chain(bad))
        if not record.expired and self.known.version[name] == record.versions[bad]:
            after = self._look(owned, prompt)
            assert after.blocks <= bad and (after.blocks < bad or after.reason is MissReason.CORRUPT)

    @precondition(lambda self: self.leases)
    @rule(held=which, forget=st.booleans())
    def release(self, held: int, forget: bool) -> None:
        record = self.leases.pop(held % len(self.leases))
        if forget:
            del record  # without a word: its finalizer gives it back
            self.core.evict(0)
        else:
            record.space.handle.release(record.lease)
            assert record.lease.released

    # A put in pieces --------------------------------------------------------------------------------------------------

    @rule(aim=aims)
    def reserve(self, aim: Aim) -> None:
        owned, prompt = self._at(aim)
        match = self._look(owned, prompt)
        self.interrupted = False
        self.opening.append(_names(owned, prompt))
        reply = Asking(owned.door).reserve(owned.handle.number, match.keys, 0, 0, None)
        self.opening.pop()
        assert reply.present == match.blocks
        if reply.reason is MissReason.IN_FLIGHT:
            assert (owned.name, prompt.chain(reply.stopped_at or 0)) in self._perhaps_pending()
        elif reply.reason is MissReason.EVICTED:
            assert reply.stopped_at is not None and reply.stopped_at > reply.blocks[-1]
        elif reply.stopped_at is not None:
            self._check_room(reply.reason)
            if reply.reservation and not self.interrupted:  # else it is itself what kept its own
                assert not self.opened.blocks.evict_own(1, owned.number), "its own could go"
            if not self.interrupted:
                self._nobody_could_give(owned)
        if reply.reservation:
            assert reply.blocks and all(len(places) == len(reply.blocks) for places in reply.places)
            self.versions += 1
            done = [0] * len(owned.layout.parts)
            self.reservations.append(
                OpenReservation(owned, prompt, reply.reservation, reply.blocks, reply.places, self.versions, done)
            )

    @precondition(lambda self: self.reservations)
    @rule(chosen=which, part=which, count=st.integers(1, 5), paging=pagings)
    def commit(self, chosen: int, part: int, count: int, paging: dict[str, Any]) -> None:
        open_ = self.reservations[chosen % len(self.reservations)]
        owned = open_.space
        index = part % len(open_.done)
        pages = owned.pages(len(open_.prompt.letters) * BLOCK_TOKENS, **paging)
        coder = codec_named("raw").bind(pages.pages, owned.layout, owned.layout.parts[index])
        digests = []
        for position in range(open_.done[index], min(open_.done[index] + count, len(open_.blocks))):
            block = open_.blocks[position]
            pages.write(block * BLOCK_TOKENS, owned.kv(open_.prompt, block, open_.version))
            span = owned.door.memory(0, [open_.places[index][position]])[0]
            size = owned.layout.parts[index].raw_bytes
            payload = FrameSpan(span.address + HEADER_BYTES, span.view[HEADER_BYTES : HEADER_BYTES + size])
            digests += coder.encode([block * BLOCK_TOKENS], [payload], owned.handle._digest)
        visible = Asking(owned.door).commit(open_.number, index, open_.done[index], digests)
        if open_.cancelled:
            assert visible == 0
            return
        open_.done[index] += len(digests)
        assert visible == min(open_.done)
        for position in range(open_.published, visible):
            self.known.publish((owned.name, open_.prompt.chain(open_.blocks[position])), open_.version)
        open_.published = visible
        if visible == len(open_.blocks):
            self.reservations.remove(open_)
        self._look(owned, open_.prompt)

    @precondition(lambda self: self.reservations)
    @rule(chosen=which)
    def abort(self, chosen: int) -> None:
        open_ = self.reservations.pop(chosen % len(self.reservations))
        Asking(open_.space.door).abort(open_.number)
        Asking(open_.space.door).abort(open_.number)
        assert Asking(open_.space.door).commit(open_.number, 0, 0, []) == 0
        self._look(open_.space, open_.prompt)

    # What else happens ------------------------------------------------------------------------------------------------

    @rule(blocks=st.sampled_from([1, 3, 50]))
    def evict(self, blocks: int) -> None:
        before = self.core.usage().blocks
        assert before - blocks <= self.core.usage().blocks - self.core.evict(blocks) <= before

    @rule(space=spaces)
    def drop(self, space: int) -> None:
        owned = self.spaces[space]
        before = self.core.usage().blocks
        assert before - self.opened.drop(owned) == self.core.usage().blocks
        for record in self.leases:
            record.expired = record.expired or record.space is owned
        for open_ in self.reservations:
            open_.cancelled = open_.cancelled or open_.space is owned
        self.known.damaged = {name for name in self.known.damaged if name[0] != owned.name}
        for name in list(self.known.version):
            if name[0] == owned.name:
                extra, letters = name[1]
                assert self._look(owned, Prompt(letters, 0, extra)).blocks == 0

    @rule(seconds=st.sampled_from([1, 20, 61]))
    def tick(self, seconds: int) -> None:
        self.opened.clock.advance(seconds)
        self.core.evict(0)
        for record in self.leases:
            record.expired = record.expired or record.expires_at <= self.opened.clock.monotonic

    @precondition(lambda self: self.leases)
    @rule(held=which, block=which, part=which, at=st.integers(0, 1 << 20), bit=st.integers(0, 7), header=st.booleans())
    def corrupt(self, held: int, block: int, part: int, at: int, bit: int, header: bool) -> None:
        record = self.leases[held % len(self.leases)]
        reply, owned = record.lease.reply, record.space
        if not len(reply.generations) - 1 >= 0:
            return
        position = block % len(reply.generations)
        index = part % len(reply.places)
        place = reply.places[index][position]
        spans = owned.door.memory(0, [place])
        if not spans:  # quarantined before, and its extent is gone
            assert self._is_damaged(record.lease, reply.first_block + position)
            return
        view = spans[0].view
        byte = at % HEADER_BYTES if header else HEADER_BYTES + at % owned.layout.parts[index].raw_bytes
        view[byte] ^= 1 << bit
        self.known.flips.setdefault((place, reply.generations[position]), set()).symmetric_difference_update(
            {(byte, bit)}
        )
        name = (owned.name, record.prompt.chain(reply.first_block + position))
        if self.known.version[name] == record.versions[reply.first_block + position]:
            self.known.damaged.add(name)

    # Short stories, for what single steps seldom come to ---------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(held=which, block=which, at=st.integers(0, 1 << 20), bit=st.integers(0, 7), paging=pagings, heal=which)
    def damage_is_read(self, held: int, block: int, at: int, bit: int, paging: dict[str, Any], heal: int) -> None:
        """And stored again, at once or while somebody else is at it."""
        record = self.leases[held % len(self.leases)]
        aim = self.spaces.index(record.space), record.prompt
        self.corrupt(held, block, at, at, bit, bit < 4)
        self.get(held, paging, 0, 0)
        if heal % 3:
            self.reserve(aim)
        if heal % 2:
            self.put(aim, paging, 0)

    @precondition(lambda self: self.leases)
    @rule(held=which, block=which, at=st.integers(0, 1 << 20), bit=st.integers(0, 7), space=spaces)
    def damage_is_moved(self, held: int, block: int, at: int, bit: int, space: int) -> None:
        """Nobody holds it any more, and others need the memory."""
        self.corrupt(held, block, at, at, bit, bit < 4)
        self.release(held, False)
        self.flood(space, 8, 2)

    @precondition(lambda self: self.leases)
    @rule(held=which, space=spaces, paging=pagings)
    def a_reader_is_late(self, held: int, space: int, paging: dict[str, Any]) -> None:
        """Its time is over and its blocks are gone, but it has not said that it is done."""
        self.tick(61)
        self.evict(50)
        self.flood(self.spaces.index(self.leases[held % len(self.leases)].space), 6, 1)
        if self.leases:  # unless one that interrupted a move let go of it
            self.get(held, paging, 0, 0)

    @rule(
        acts=st.one_of(st.lists(st.sampled_from(ACTS), min_size=1, max_size=4), st.sampled_from(PLOTS)),
        late=st.booleans(),
        aim=aims,
        paging=pagings,
        number=which,
    )
    def interrupt_next_move(self, acts: list[str], late: bool, aim: Aim, paging: dict[str, Any], number: int) -> None:
        """The next time an extent is emptied, these things happen before or after its copies, outside the lock."""

        def happen(copies: Sequence[FrameCopy]) -> None:
            chosen = self._moving(copies, number) or aim
            for act in acts:
                self.totals[f"{act} during a move"] += 1
                self._act(act, chosen, paging, number)
                self.core.check()
            self.interrupted = True

        (self.opened.mover.after if late else self.opened.mover.before).append(happen)

    def _moving(self, copies: Sequence[FrameCopy], number: int) -> tuple[int, Prompt] | None:
        """Every other time one of the blocks whose frames are on their way."""
        if not copies or number % 2:
            return None
        return self.known.keys.get(self.opened.blocks.index.key(copies[number // 2 % len(copies)].row))

    def _act(self, act: str, aim: Aim, paging: dict[str, Any], number: int) -> None:
        if act == "put":
            self.put(aim, paging, 0)
        elif act == "lease":
            self.lease(aim, 0)
        elif act == "evict":
            self.evict(1 + number % 5)
        elif act == "tick":
            self.tick(61)
        elif act in ("get", "corrupt", "release") and self.leases:
            if act == "get":
                self.get(-1, paging, 0, 0)
            elif act == "corrupt":
                self.corrupt(-1, number, number, number, 0, number % 2 == 0)
            else:
                self.release(-1, False)
        elif act in ("commit", "abort") and self.reservations:
            if act == "commit":
                self.commit(number, number, 2, paging)
            else:
                self.abort(number)

    # What must always hold --------------------------------------------------------------------------------------------

    @invariant()
    def everything_checks(self) -> None:
        self.core.check()
        usage = self.core.usage()
        assert usage.leases == len(self.leases)
        assert usage.reservations == len(self.reservations)
        assert 0 <= usage.pinned_bytes <= usage.dram.budget_bytes
        assert usage.dram.taken_bytes <= usage.dram.budget_bytes

    def teardown(self) -> None:
        """With all leases released and all reservations ended, everything can be evicted and nothing is left over."""
        try:
            while self.leases:
                self.release(-1, False)
            while self.reservations:
                self.abort(-1)
            self.core.evict(1 << 30)
            self.core.check()
            usage = self.core.usage()
            left = usage.dram
            assert (usage.blocks, usage.pinned_bytes, left.used, left.reserved, left.zombie) == (0, 0, 0, 0, 0)
            self.totals.update(usage.counters)
        finally:
            self.opened.close()
            self.directory.cleanup()

    def _at(self, aim: Aim) -> tuple[Owned, Prompt]:
        """A number counts back from what was used last."""
        if isinstance(aim, int):
            aim = self.recent[-1 - aim % len(self.recent)] if self.recent else (0, Prompt((0,)))
        space, prompt = aim
        return self.spaces[space], prompt

    def _remember(self, owned: Owned, prompt: Prompt, keys: list[bytes]) -> None:
        space = self.spaces.index(owned)
        if (space, prompt) in self.recent:
            self.recent.remove((space, prompt))
        self.recent = [*self.recent[-9:], (space, prompt)]
        for block, key in enumerate(keys):
            self.known.keys[key] = (space, Prompt(prompt.letters[: block + 1], 0, prompt.extra))

    def _pending(self) -> set[Name]:
        """Blocks that are being stored at this moment."""
        return {
            (open_.space.name, open_.prompt.chain(block))
            for open_ in self.reservations
            if not open_.cancelled
            for block in open_.blocks[open_.published :]
        }

    def _perhaps_pending(self) -> set[Name]:
        """With the blocks of a put that this one interrupts."""
        return self._pending().union(*self.opening)

    def _nobody_could_give(self, owned: Owned) -> None:
        """No other namespace has an extent that nobody uses, and as many blocks that may go as it takes to do without
        it."""
        blocks = self.opened.blocks
        index, residency, dram = blocks.index, blocks.residency, blocks.dram
        for space in blocks.spaces:
            rows, staying = list(index.rows(space.number)), set()
            for row in rows:
                places = [residency.place(row, part) for part in range(len(space.classes))]
                is_read = residency.pins.counts[row] or any(place in residency.held for place in places)
                if is_read or not residency.is_listed(row):
                    staying.update(index.chain(row))
            for slot_class in space.classes if space.number != owned.number else ():
                for extent in dram.extents_of(slot_class):
                    slots = extent.slots
                    used = [(state, slots.owners[at]) for at, state in enumerate(slots.states) if state]
                    used = [(state, row) for state, row in used if state != FrameState.QUARANTINED]
                    is_free = all(  # a frame of a block that is not complete yet has no owner
                        state == FrameState.RESIDENT and row >= 0 and not residency.pins.counts[row]
                        for state, row in used
                    )
                    wanted = slots.live + slots.free - dram.free_slots(slot_class)
                    may_go = len(set(rows) - staying)
                    assert not is_free or residency.held.has_extent(extent.number) or may_go < wanted, (
                        "refused for space while an extent could be emptied"
                    )

    def _is_damaged(self, lease: Lease, block: int) -> bool:
        position = block - lease.reply.first_block
        generation = lease.reply.generations[position]
        return any(self.known.flips.get((places[position], generation)) for places in lease.reply.places)

    def _look(self, owned: Owned, prompt: Prompt) -> Match:
        """A match, with everything it says compared to what is known."""
        match = owned.match(prompt)
        self._remember(owned, prompt, match.keys)
        names = [(owned.name, prompt.chain(block)) for block in range(len(prompt.letters))]
        assert all(name in self.known.version for name in names[: match.blocks]), "claims what was never put"
        assert match.blocks >= self._pinned_blocks(owned, prompt), "lost what a live lease pins"
        there = owned.handle.which(match.keys)
        assert all(there[: match.blocks]) and not any(there[match.blocks : match.blocks + 1]), "a match says otherwise"
        assert {name for name, is_there in zip(names, there, strict=True) if is_there} <= self.known.version.keys()
        if match.reason is not None:
            self._explain(owned, prompt, match, names[match.blocks])
        return match

    def _pinned_blocks(self, owned: Owned, prompt: Prompt) -> int:
        """The prefix that live leases keep readable, up to the first frame that was damaged."""
        longest = 0
        for record in self.leases:
            if record.expired or record.space is not owned or record.prompt.extra != prompt.extra:
                continue
            blocks = 0
            for mine, theirs in zip(prompt.letters, record.prompt.letters[: record.lease.blocks], strict=False):
                if mine != theirs or (owned.name, prompt.chain(blocks)) in self.known.damaged:
                    break
                blocks += 1
            longest = max(longest, blocks)
        return longest

    def _explain(self, owned: Owned, prompt: Prompt, match: Match, name: Name) -> None:
        """The reason given for the first block that is not readable can be true."""
        reason, pending = match.reason, name in self._pending()
        was_stored = name in self.known.version
        others = [other for other in self.spaces if other is not owned and other.tenant == owned.tenant]
        if pending and name not in self.known.damaged:
            assert reason is MissReason.IN_FLIGHT
        if reason is MissReason.IN_FLIGHT:
            assert name in self._perhaps_pending()
        elif reason is MissReason.CORRUPT:
            assert name in self.known.damaged
        elif reason is MissReason.EVICTED:
            assert was_stored and not pending
        elif reason is MissReason.OTHER_NAMESPACE:
            assert not was_stored and match.detail
            assert any((other.name, name[1]) in self.known.version for other in others)
        else:
            assert reason in (MissReason.ABSENT, MissReason.DIVERGED) and not was_stored and not pending
            siblings = {
                known for known in (*self.known.version, *self._perhaps_pending()) if _parent(known) == _parent(name)
            }
            assert reason is MissReason.ABSENT or (match.blocks and siblings)
            for other in others:
                assert other.match(prompt).blocks <= match.blocks, "another namespace has it"


def _names(owned: Owned, prompt: Prompt) -> set[Name]:
    return {(owned.name, prompt.chain(block)) for block in range(len(prompt.letters))}


def _parent(name: Name) -> tuple[str, Any]:
    space, (extra, letters) = name
    return space, (extra, letters[:-1])


@pytest.mark.parametrize(("policy", "examples"), [(LeafFirstLru, 100), (by_worth, 40)])
def test_the_store_against_a_dict(policy: PolicyMaker, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "WINDOW_BLOCKS", 3)  # so that what is done with five blocks is done in pieces
    monkeypatch.setattr(getting, "PIECE_BLOCKS", 3)
    totals: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: StoreMachine(totals, policy),
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(totals))
    for count in ("stored_blocks", "evicted_blocks", "moved_frames", "reclaimed_extents", "lapsed_leases"):
        assert totals[count], f"no {count} in the whole run: the machine does not exercise it"
    assert totals["quarantined_blocks"]
