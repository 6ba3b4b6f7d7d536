"""What the tests know about a store of two tiers without asking it: which bytes may be where, and which must.

`LevelsModel` acts on a whole store over a simulated disk and keeps a dict beside it. For every block that was ever
stored it knows the versions of its bytes that may still come back, and it keeps the debts: blocks that were
acknowledged as durable and that NVMe has not been seen to give up. After each act all moves are awaited, every
invariant of the store is checked, and the dict is brought up to date with what the tables say was given up.

The store may forget what it does not owe. It may never deliver other bytes, claim a block that was never stored or
whose end is durable, lose a debt, call a block corrupt that nobody damaged, or refuse for lack of space while nothing
is pinned.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from kvstore.block.account import HitTier, MissReason
from kvstore.client import handle
from kvstore.client.handle import Lease, Match
from kvstore.config import Limits
from kvstore.core.index import NO_ROW, RowState
from kvstore.insight.replay import CoinAdmission
from model.store_model import BLOCK_TOKENS, LATENT, SHARDED, WHOLE, Chain, OpenStore, Owned, PagedKv, Prompt
from simulation.two_tiers import Disk, Sizes, bugs, nothing, open_two_tiers, wait_until_idle
from tiering.errors import TierError, TierUnavailable
from tiering.frame import HEADER_BYTES
from tiering.policies.admission import AdmitAll
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker
from tiering.tier import extent_of, slot_of

SPACES = (
    ("default", "a", WHOLE),
    ("default", "sharded", SHARDED),
    ("default", "latent", LATENT),
    ("other", "a", WHOLE),
)
LIMITS = Limits(lease_seconds=60, pinned_fraction=0.5, close_seconds=20)
LONG_MS = 30_000
USED_HEADER_BYTES = 200
Name = tuple[str, Chain]

NOT_THERE = {MissReason.ABSENT, MissReason.EVICTED, MissReason.DIVERGED, MissReason.OTHER_NAMESPACE}


@dataclass
class Held:
    """A lease that was not released, and the versions that it must deliver."""

    owned: Owned
    prompt: Prompt
    lease: Lease
    versions: list[set[int]]
    stale: bool = False  # its store was closed


@dataclass
class Dict:
    """versions: of every block that may be in the store. ghosts: given up, but not durably. rotten: damaged on the
    disk, where the frame stays: an index built again from headers does not know that it was quarantined. lingering:
    on disk before a start that found the same block being stored again. owed: acknowledged as durable. damaged: may be
    found corrupt. keys: prefix keys."""

    versions: dict[Name, set[int]] = field(default_factory=dict)
    ghosts: dict[Name, set[int]] = field(default_factory=dict)
    rotten: dict[Name, set[int]] = field(default_factory=dict)
    lingering: dict[Name, set[int]] = field(default_factory=dict)
    owed: set[Name] = field(default_factory=set)
    damaged: set[Name] = field(default_factory=set)
    keys: dict[Name, bytes] = field(default_factory=dict)

    def give_up(self, name: Name) -> None:
        self.ghosts.setdefault(name, set()).update(self.versions.pop(name, ()))
        if name not in self.damaged:  # a quarantined block has no room for what is on disk
            self.lingering.pop(name, None)


class Coin(CoinAdmission):
    """Tells whenever it says no."""

    def __init__(self, chance: float, declines: Callable[[], None]) -> None:
        super().__init__(chance, 1)
        self._declines = declines

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        is_admitted = super().admits(way, block_bytes)
        if not is_admitted:
            self._declines()
        return is_admitted


class LevelsModel:
    """See the top of the file. Every public method is one act."""

    def __init__(
        self,
        sizes: Sizes | None = None,
        *,
        faults: bool = False,
        policy: PolicyMaker = LeafFirstLru,
        chance: float | None = None,
    ) -> None:
        """faults: the disk fails besides, so that requests may be refused, and starts may have to be tried again.
        chance: with which a block that leaves DRAM is written down; all are if not given."""
        self.faults = faults
        self.policy = policy
        self.chance = chance
        self.declined = 0
        self.warming = False
        self.directory = tempfile.TemporaryDirectory(prefix="kv-levels-")
        self.sizes = sizes or Sizes()
        self.disk = Disk()
        self.known = Dict()
        self.held: list[Held] = []
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.opened: OpenStore
        self.spaces: list[Owned] = []
        self._open()

    # Verbs ---------------------------------------------------------------------------------------------------------

    def put(self, space: int, prompt: Prompt, durability: str, ttl: float | None = None) -> None:
        owned = self.spaces[space]
        before = self._match(owned, prompt)
        self.version += 1
        version, stored = self.version, []
        names = _names(owned, prompt)

        def on_stored(block: int) -> None:
            stored.append(block)
            if self.warming:  # and its older copy may yet be taken in
                self.known.lingering.setdefault(names[block], set()).update(self.known.versions.get(names[block], ()))
                self.known.versions.setdefault(names[block], set()).add(version)
                return
            self.known.give_up(names[block])
            self.known.versions[names[block]] = {version}
            self.known.owed.discard(names[block])
            self.known.damaged.discard(names[block])

        owned.door.on_stored.append(on_stored)
        pages = owned.pages(len(names) * BLOCK_TOKENS)
        for block in range(len(names)):
            pages.write(block * BLOCK_TOKENS, owned.kv(prompt, block, version))
        wish = {"durability": durability, "ttl": ttl, "extra_keys": prompt.extra}
        result = owned.handle.put(prompt.token_ids, pages.pages, **wish)  # type: ignore[arg-type]
        owned.door.on_stored.pop()
        assert result.stored == len(stored) == len(set(stored)) and result.present == before.blocks
        assert (result.stopped_at is None) == (result.reason is None)
        self.counts[f"put {durability}: {result.reason}"] += 1
        if result.reason is None and durability == "disk":
            whole = next((at for at, name in enumerate(names) if name in self.known.damaged), len(names))
            self.known.owed.update(names[:whole])  # nobody has read what rotted, or what leads over it
        if result.reason is not None and not self._may_fail(names):
            made_room = result.reason is MissReason.EVICTED and stored and (result.stopped_at or 0) > max(stored)
            assert made_room, f"a put of {len(names)} blocks was refused: {result}"
        self.after()

    def load(self, space: int, prompt: Prompt, deadline_ms: float = LONG_MS) -> None:
        """Match, lease, get: every byte of what is delivered is compared."""
        owned = self.spaces[space]
        match = self._match(owned, prompt)
        with owned.handle.lease(match, deadline_ms=deadline_ms) as lease:
            self._check_lease(owned, prompt, match, lease, deadline_ms)
            self._deliver(
                owned, prompt, lease, [self.known.versions[name] for name in _names(owned, prompt)[: lease.blocks]]
            )
        self.after()

    def hold(self, space: int, prompt: Prompt) -> None:
        owned = self.spaces[space]
        match = self._match(owned, prompt)
        lease = owned.handle.lease(match, deadline_ms=LONG_MS)
        self._check_lease(owned, prompt, match, lease, LONG_MS)
        self.held.append(Held(owned, prompt, lease, self._versions(owned, prompt, lease)))
        self.after()

    def read_held(self, which: int) -> None:
        if self.held:
            held = self.held[which % len(self.held)]
            if held.stale:
                pages = held.owned.pages(held.lease.tokens)
                loaded = held.owned.handle.get(held.lease, pages.pages)
                assert not held.lease.blocks or (loaded.tokens, loaded.reason) == (0, MissReason.DISABLED)
            else:
                self._deliver(held.owned, held.prompt, held.lease, held.versions)
        self.after()

    def let_go(self, which: int) -> None:
        if self.held:
            self.held.pop(which % len(self.held)).lease.release()
        self.after()

    # What else happens ---------------------------------------------------------------------------------------------

    def evict(self, blocks: int) -> None:
        self.opened.core.evict(blocks)
        self.after()

    def tick(self, seconds: float) -> None:
        self.opened.clock.advance(seconds)
        self.after()

    def spill(self) -> None:
        """What DRAM alone holds goes down, as at a close."""
        assert self.opened.core._levels is not None
        self.opened.core._levels.demote_all(20)
        self.after()

    def settle(self) -> None:
        try:
            self._tier.settle()
        except TierUnavailable:
            assert self.disk.is_off or self.faults
        self.after()

    def drop(self, space: int) -> None:
        owned = self.spaces[space]
        if not self.disk.is_off:
            try:
                self.opened.drop(owned)
                assert not self._tier._commits.is_unsettled(), "what was dropped is gone for good when it is said to be"
            except TierUnavailable:
                assert self.disk.is_off or self.faults
            for name in [name for name in self.known.versions if name[0] == owned.name]:
                self.known.owed.discard(name)
                self.known.give_up(name)
            assert all(self._row(name) == NO_ROW for name in self.known.keys if name[0] == owned.name)
        self.after()

    def flip_above(self, space: int, prompt: Prompt, block: int, at: int) -> None:
        """A bit turns in DRAM."""
        name = self._chosen(space, prompt, block)
        row = self._row(name)
        if row != NO_ROW and self._blocks.index.state(row) is RowState.VISIBLE and self._blocks.is_above(row):
            part, offset, bit = self._spot(space, at)
            place = self._blocks.residency.place(row, part)
            self.opened.core.spans([place])[0].view[offset] ^= bit
            self.known.damaged.add(name)
            self.counts["flipped in DRAM"] += 1
        self.after()

    def flip_below(self, space: int, prompt: Prompt, block: int, at: int) -> None:
        """A bit rots on the disk. What stands behind the block in its chain can be lost with it."""
        name = self._chosen(space, prompt, block)
        row = self._row(name)
        assert self._blocks.lower is not None
        if row != NO_ROW and self._blocks.is_below(row) and not self.disk.is_off:
            part, offset, bit = self._spot(space, at)
            place = self._blocks.lower.residency.place(row, part)
            slab = self._tier._ledger.pieces[extent_of(place)]
            start = slab.header.offset(slot_of(place)) + offset
            byte = self.disk.files.image(slab.name)[start]
            self.disk.files.poke(slab.name, start, bytes([byte ^ bit]))
            self.known.damaged.add(name)
            self.known.rotten.setdefault(name, set()).update(self.known.versions[name])
            self.known.owed -= {one for one in self.known.owed if _leads_to(name, one)}
            self.counts["flipped on disk"] += 1
        self.after()

    def plan_cut(self, effects: int) -> None:
        """The power will go at that many effects on the disk from now on."""
        if not self.disk.is_off:
            self.disk.power.back(last=effects)

    # Ends and starts -----------------------------------------------------------------------------------------------

    def restart(self, *, index_too: bool) -> None:
        """Closed in order, and opened again. index_too: somebody removed the index."""
        self.opened.close()
        self._refresh()  # closing writes down, and may have to make room for it
        if self.disk.is_off:
            return self.after()
        assert self.faults or not self.known.ghosts, "nothing is in doubt after an end in order"
        self.disk.power.back()
        if index_too:
            self.disk.discard()
        if index_too or self.faults:
            self._rot()
            for name, versions in self.known.ghosts.items():
                self.known.versions.setdefault(name, set()).update(versions)
        self._stale()
        if self.faults:
            self._open_in_the_end()
        else:
            self._open()
            has_slabs = len(self.disk.files.sizes()) > 1
            assert self._tier.rebuilds == (index_too and has_slabs), "a good index is used, a lost one is built again"
        self.counts["restarts"] += 1
        self.counts["rebuilds"] += self._tier.rebuilds
        self._check_all()
        return self.after()

    def restart_and_go_on(self, acts: Sequence[Callable[[], None]]) -> None:
        """Closed in order and opened again; what is on disk is taken in when all of these were done."""
        self.opened.close()
        self._refresh()
        if self.disk.is_off:
            return self.after()
        self.disk.power.back()
        self._stale()
        gate = threading.Event()
        self.warming = True
        self._open(lambda: gate.wait(60))
        with patch.object(handle, "DURABLE_SECONDS", 0.1):  # a full disk evicts nothing before all of it is known
            for act in acts:
                act()
        self.warming = False
        gate.set()
        assert self.opened.store.warmed(60), "what is on disk could not be taken in"
        self.counts["starts while serving"] += 1
        self._check_all()
        return self.after()

    def _open_in_the_end(self) -> None:
        """A start may fail, and what it took in may be a part: the next one is another chance. The third finds a disk
        that was mended."""
        for attempt in range(5):
            if attempt == 2:
                self.disk.before_files = self.disk.before_index = nothing
                self.disk.files._faults.clear()
            try:
                self._open()
            except TierError:
                self.counts["starts refused"] += 1
                continue
            if self.opened.store.warmed(60):
                return
            self.counts["starts in part"] += 1
            self._serves_in_part()
            self.opened.close()
        raise AssertionError("no start succeeds")

    def _serves_in_part(self) -> None:
        """What could not be taken in is not called absent, and nothing that is delivered is wrong."""
        for name in sorted(self.known.owed, key=repr)[:5]:
            space, prompt = self._prompt_of(name)
            match = self.spaces[space].match(prompt)
            assert match.blocks == len(prompt.letters) or match.reason in (MissReason.TIER_DOWN, MissReason.CORRUPT), (
                match
            )
            with self.spaces[space].handle.lease(match, deadline_ms=LONG_MS) as lease:
                names = _names(self.spaces[space], prompt)
                self._deliver(self.spaces[space], prompt, lease, [set(self.known.versions[one]) for one in names])

    def _prompt_of(self, name: Name) -> tuple[int, Prompt]:
        (space,) = [at for at, owned in enumerate(self.spaces) if owned.name == name[0]]
        extra, letters = name[1]
        return space, Prompt(letters, 0, extra)

    def crash(self, seed: int, *, index_too: bool) -> None:
        """The power goes now, while nothing is under way."""
        if not self.disk.is_off:
            self._refresh()
            self.disk.cut_power()
            for name in list(self.known.versions):
                row = self._row(name)
                if row == NO_ROW or not self._blocks.is_below(row):
                    del self.known.versions[name]  # DRAM alone had it
        self._come_back(seed, index_too=index_too, torn=False)
        self._check_all()

    def after(self) -> None:
        """After every act."""
        if not self.opened.core.closed:
            wait_until_idle(self.opened.core)
            self._refresh()
            self.opened.core.check()
            assert not bugs(self.opened.core), "\n".join(bugs(self.opened.core))
        if self.disk.is_off:
            self.counts["cuts"] += 1
            self._come_back(self.version, index_too=self.version % 5 == 0, torn=True)
            self._check_all()

    def end(self) -> None:
        """Whatever was held is let go: nothing is left pinned, reserved or waiting."""
        try:
            if not self.disk.is_off:
                self.disk.power.back()
            while self.held:
                self.held.pop().lease.release()
            core = self.opened.core
            core.evict(0)
            self.after()
            core = self.opened.core
            usage = core.usage()
            assert (usage.leases, usage.reservations, usage.pinned_bytes) == (0, 0, 0)
            assert (usage.dram.reserved, usage.dram.zombie) == (0, 0)
            if not self.disk.is_off and not self.faults:
                self._tier.settle()
                after = self._tier.usage()
                assert (after.reserved, after.deleting) == (0, 0)
        finally:
            self.opened.close()
            self.directory.cleanup()

    def compare_all(self) -> None:
        """Read everything that the dict knows of."""
        for space, owned in enumerate(self.spaces):
            for prompt in _longest([name for name in self.known.versions if name[0] == owned.name]):
                self.load(space, prompt)

    # Inside --------------------------------------------------------------------------------------------------------

    @property
    def _blocks(self) -> Any:
        return self.opened.blocks

    @property
    def _tier(self) -> Any:
        return self.opened.blocks.lower.tier  # type: ignore[union-attr]

    def _declines(self) -> None:
        self.declined += 1

    def _open(self, while_loading: Callable[[], object] | None = None) -> None:
        path = Path(self.directory.name)
        chance = self.chance
        self.opened = open_two_tiers(
            path,
            self.disk,
            self.sizes,
            LIMITS,
            None,
            None,
            while_loading,
            self.policy,
            lambda names, clock, nvme_bytes: AdmitAll() if chance is None else Coin(chance, self._declines),
        )
        for name, versions in self.known.lingering.items():
            self.known.versions.setdefault(name, set()).update(versions)
        self.spaces = [self.opened.namespace(model, layout, tenant) for tenant, model, layout in SPACES]
        self.evictions = 0

    def _stale(self) -> None:
        for held in self.held:
            held.stale = True

    def _rot(self) -> None:
        """What was known to be bad is forgotten: the index is lost, or was not told yet."""
        for name, versions in self.known.rotten.items():
            self.known.versions.setdefault(name, set()).update(versions)
            self.known.damaged.add(name)

    def _come_back(self, seed: int, *, index_too: bool, torn: bool) -> None:
        """From a loss of power. torn: it went in the middle of something."""
        self.opened.close()
        self._stale()
        known, random = self.known, Random(seed)
        for name, versions in known.ghosts.items():
            known.versions.setdefault(name, set()).update(versions)
        if torn and index_too:  # the one that knew which frames were cut while they were written
            known.damaged |= known.versions.keys() - known.owed
        self._rot()
        while True:
            self.disk.crash(random, index_too=index_too)
            if random.random() < 0.3:
                self.disk.power.back(last=random.randrange(1, 30))
            try:
                self._open()
                if self.opened.store.warmed(60):
                    break
                assert self.disk.is_off, "what is on disk could not be taken in"
                self.opened.close()
            except TierUnavailable:
                assert self.disk.is_off
            self.counts["cuts"] += 1
        self.disk.power.back()
        self.counts["crashes"] += 1
        self.counts["rebuilds"] += self._tier.rebuilds

    def _check_all(self) -> None:
        """After a start: every debt is there, and nothing that was given up for good."""
        assert self.opened.store.warmed(60)
        self.opened.core.check()
        index = self._blocks.index
        for name in self.known.owed:
            row = self._row(name)
            found = row != NO_ROW and index.state(row) is RowState.VISIBLE
            assert found, f"{name} was acknowledged as durable, and is gone"
        name_of = {(name[0], key): name for name, key in self.known.keys.items()}
        for owned in self.spaces:
            for row in index.rows(owned.number):
                name = name_of[owned.name, index.key(row)]
                assert self.known.versions.get(name), f"{name} is back, which was given up"
        self._refresh()

    def _refresh(self) -> None:
        """Bring the dict up to date with what the tables say was given up; every loss of a debt is accounted for."""
        known, index = self.known, self._blocks.index
        if self.warming:
            return
        lost = 0
        for name in list(known.versions):
            row = self._row(name)
            if row == NO_ROW:
                known.give_up(name)
            if name in known.owed and (row == NO_ROW or not self._blocks.is_below(row)):
                known.owed.discard(name)
                lost += name not in known.damaged
            if row != NO_ROW and index.state(row) is RowState.LOST:
                assert name in known.damaged, f"{name} was quarantined, and nobody damaged it"
        evictions = self.opened.core.usage().counters.get("nvme_evicted_blocks", 0)
        assert lost <= evictions - self.evictions, f"{lost} durable blocks are gone, {evictions} were evicted"
        self.evictions = evictions
        if not self.disk.is_off and not self._tier._commits.is_unsettled():
            known.ghosts.clear()

    def _row(self, name: Name) -> int:
        (owned,) = (one for one in self.spaces if one.name == name[0])
        row: int = self._blocks.index.find(owned.number, self.known.keys[name])
        return row

    def _may_fail(self, names: list[Name]) -> bool:
        """Whether something is damaged, pinned or off that can be the reason for a refusal."""
        return bool(
            self.faults
            or self.warming
            or self.disk.is_off
            or self.known.damaged
            or any(not held.stale for held in self.held)
        )

    def _match(self, owned: Owned, prompt: Prompt) -> Match:
        match: Match = owned.match(prompt)
        names = _names(owned, prompt)
        self.known.keys.update(zip(names, match.keys, strict=True))
        for name in names[: match.blocks]:
            assert self.known.versions.get(name), f"claims {name}, which was never put or was given up"
        if match.reason is not None:
            name = names[match.blocks]
            if match.reason is MissReason.CORRUPT:
                assert name in self.known.damaged
            elif not self.warming or match.reason is not MissReason.WARMING:
                assert match.reason in NOT_THERE and name not in self.known.owed, match
        return match

    def _check_lease(self, owned: Owned, prompt: Prompt, match: Match, lease: Lease, deadline_ms: float) -> None:
        assert lease.account.asked == prompt.tokens and lease.account.hit_tokens == lease.tokens
        self.counts[f"lease: {lease.reason if lease.blocks < match.blocks else None}"] += 1
        if lease.blocks == match.blocks:
            return
        names = _names(owned, prompt)
        if lease.reason is MissReason.CORRUPT:
            assert names[lease.blocks] in self.known.damaged, "called corrupt, and nobody damaged it"
        elif lease.reason is MissReason.DEADLINE and not lease.reply.lacks_room:
            assert deadline_ms < LONG_MS
        else:
            assert self._may_fail(names), f"a lease of {match.blocks} blocks has {lease.blocks}: {lease.reason}"
            self.counts["leases cut short"] += 1
            no_room = (MissReason.PINNED_FULL, MissReason.DEADLINE, MissReason.QUOTA)
            assert lease.reason in no_room or lease.reason is MissReason.TIER_DOWN, lease.reason

    def _deliver(self, owned: Owned, prompt: Prompt, lease: Lease, versions: list[set[int]]) -> None:
        names = _names(owned, prompt)
        pages = owned.pages(lease.tokens)
        before = pages.snapshot()
        loaded = owned.handle.get(lease, pages.pages)
        assert loaded.account.asked == prompt.tokens and loaded.account.hit_tokens == loaded.tokens
        blocks = loaded.tokens // BLOCK_TOKENS
        if loaded.reason is None:
            assert blocks == lease.blocks
        else:
            # What is read past DRAM has a deadline of its own, which a busy machine may miss.
            is_late = loaded.reason is MissReason.DEADLINE and blocks >= lease.reply.blocks
            assert is_late or (loaded.reason is MissReason.CORRUPT and names[blocks] in self.known.damaged), loaded
        expected = {}
        for block in range(blocks):
            version = _version_in(pages, block, owned, prompt, versions[block])
            expected[block * BLOCK_TOKENS] = owned.kv(prompt, block, version)
            if names[block] not in self.known.lingering:  # else DRAM and NVMe may have two versions
                versions[block].intersection_update({version})
        pages.expect(before, expected, ignore_from=None if loaded.reason is None else loaded.tokens)
        self.counts["blocks compared"] += blocks
        self.counts["past DRAM"] += max(0, blocks - lease.reply.blocks)
        self.counts["from NVMe"] += lease.account.hits.get(HitTier.NVME, 0) // BLOCK_TOKENS

    def _versions(self, owned: Owned, prompt: Prompt, lease: Lease) -> list[set[int]]:
        return [self.known.versions[name] for name in _names(owned, prompt)[: lease.blocks]]

    def _chosen(self, space: int, prompt: Prompt, block: int) -> Name:
        owned = self.spaces[space]
        self._match(owned, prompt)
        return _names(owned, prompt)[block % len(prompt.letters)]

    def _spot(self, space: int, at: int) -> tuple[int, int, int]:
        """A part, a byte of its header's or payload's used bytes, and a bit."""
        parts = self.spaces[space].layout.parts
        part = parts[at % len(parts)]
        at //= len(parts)
        offset = at % USED_HEADER_BYTES if at & 1 else HEADER_BYTES + at % part.raw_bytes
        return part.index, offset, 1 << (at >> 3) % 8


def _version_in(pages: PagedKv, block: int, owned: Owned, prompt: Prompt, candidates: set[int]) -> int:
    """Which of the versions stands in the pages; anything else is a wrong byte."""
    page = pages.table[block]
    for version in candidates:
        kv = owned.kv(prompt, block, version)
        if all(
            np.array_equal(view[page], plane)
            for layer, planes in kv.items()
            for view, plane in zip(pages.views[layer], planes, strict=True)
        ):
            return version
    raise AssertionError(f"block {block} of {prompt} in {owned.name} has bytes that are none of {candidates}")


def _names(owned: Owned, prompt: Prompt) -> list[Name]:
    return [(owned.name, prompt.chain(block)) for block in range(len(prompt.letters))]


def _leads_to(name: Name, other: Name) -> bool:
    """Whether the other one stands behind it in a chain, or is it."""
    (space, (extra, letters)), (other_space, (other_extra, other_letters)) = name, other
    return (space, extra) == (other_space, other_extra) and other_letters[: len(letters)] == letters


def _longest(names: list[Name]) -> list[Prompt]:
    """Prompts that cover all of these blocks."""
    chains = [chain for _, chain in names]
    inner = {(extra, letters[:-1]) for extra, letters in chains}
    return [Prompt(letters, 0, extra) for extra, letters in chains if (extra, letters) not in inner]
