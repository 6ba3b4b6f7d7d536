"""Collective puts of an engine's ranks among everything that goes on in a store, in long random histories: steps that
go on behind each other, ranks that break off and come back, strangers who need the room, evictions, drops, time.

What is looked for: a slot that is given away under a writer, a block that is visible without all its parts, and what
stays pending or taken for ever.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.block.account import MissReason
from kvstore.block.layout import KvGroup, Layout
from kvstore.protocol.door import Collective
from kvstore.protocol.messages import ReserveReply
from model.joint_ranks import DIGEST, TOKEN, Rank, Ranks
from workbench import KIB, ids

HEADS = KvGroup("heads", (0, 1), 2, (8, 8), "bfloat16")
LATENT = KvGroup("latent", (2,), 1, (32,), "bfloat16")
LAYOUT = Layout((HEADS, LATENT), head_shards=2)
PARTS = [[part.index for part in LAYOUT.parts_of(shard)] for shard in range(2)]
PROMPTS, STEPS, STEP_BLOCKS = 4, 3, 2
MAX_RANKS = 4
LATE_TICKS = 3  # so that no name is forgotten, and then used again

DISTURBANCES = ("needs room", "needs room", "gives up", "stores", "evicts", "drops", "expires")

which = st.integers(0, 1 << 16)
prompts = st.integers(0, PROMPTS - 1)


class JointMachine(RuleBasedStateMachine):
    """See the top of the file."""

    def __init__(self, totals: Counter[str]) -> None:
        super().__init__()
        self.totals = totals
        self.ranks = Ranks(LAYOUT, dram=768 * KIB)
        self.store = self.ranks.store
        self.keys = [
            self.ranks.whole.match(ids(64 * STEPS * STEP_BLOCKS, 10_000 * prompt)).keys for prompt in range(PROMPTS)
        ]
        self.names: dict[tuple[int, int], str] = {}
        self.numbers = count()
        self.name_of: dict[tuple[Rank, int], tuple[str, int]] = {}
        self.done: dict[str, Counter[int]] = {}  # blocks that were committed of each part, by the put's name
        self.filled: dict[str, ReserveReply] = {}
        self.may_be_there: set[bytes] = set()
        self.late_ticks = 0
        for parts in PARTS:
            self.ranks.enter(parts)

    # Ranks ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.ranks.ranks) < MAX_RANKS)
    @rule(shard=st.integers(0, 1))
    def enter(self, shard: int) -> None:
        self.ranks.enter(PARTS[shard])

    def _alive(self) -> list[Rank]:
        return [rank for rank in self.ranks.ranks if not rank.is_gone]

    @precondition(lambda self: self._alive())
    @rule(prompt=prompts, steps=st.integers(1, STEPS))
    def all_reserve(self, prompt: int, steps: int) -> None:
        """As many ranks as there are, some steps of a prompt."""
        for step in range(steps):
            for rank in self._alive():
                self._reserve(rank, prompt, step)

    @precondition(lambda self: self._alive())
    @rule(who=which, prompt=prompts, step=st.integers(0, STEPS - 1))
    def reserve(self, who: int, prompt: int, step: int) -> None:
        alive = self._alive()
        self._reserve(alive[who % len(alive)], prompt, step)

    def _reserve(self, rank: Rank, prompt: int, step: int) -> None:
        name = self.names.setdefault((prompt, step), f"{next(self.numbers)}")
        keys = self.keys[prompt][: STEP_BLOCKS * (step + 1)]
        reply = self.ranks.reserve(rank, keys, STEP_BLOCKS * step, name)
        if not reply.reservation:
            self.totals[f"refused {reply.reason}"] += 1
            if reply.reason is not MissReason.IN_FLIGHT:
                del self.names[prompt, step]  # this one is over, or never began: the next one is another
            return
        self.totals["shares"] += 1
        self.totals["behind others"] += any(one.depends_on for one in self.store.reservations.values())
        first = self.filled.setdefault(name, reply)
        assert (first.blocks, first.present, first.stopped_at) == (reply.blocks, reply.present, reply.stopped_at)
        self.done.setdefault(name, Counter())
        self.name_of[rank, reply.reservation] = name, prompt

    def _shares(self) -> list[tuple[Rank, int]]:
        return [(rank, share) for rank in self._alive() for share in rank.replies]

    @precondition(lambda self: self._shares())
    @rule(who=which, times=st.integers(1, 6))
    def commit_all(self, who: int, times: int) -> None:
        """Several shares, from one on."""
        shares = self._shares()
        for at in range(min(times, len(shares))):
            rank, share = shares[(who + at) % len(shares)]
            for part in range(len(LAYOUT.parts)):
                if share in rank.replies:
                    self._commit(rank, share, part, STEPS * STEP_BLOCKS)

    @precondition(lambda self: self._shares())
    @rule(who=which, part=which, blocks=st.integers(1, 2))
    def commit(self, who: int, part: int, blocks: int) -> None:
        shares = self._shares()
        self._commit(*shares[who % len(shares)], part, blocks)

    def _commit(self, rank: Rank, share: int, part: int, blocks: int) -> None:
        name, prompt = self.name_of[rank, share]
        mine, reply = sorted(rank.done[share]), rank.replies[share]
        part = mine[part % len(mine)]
        before = dict(rank.done[share])
        blocks = min(blocks, len(reply.blocks) - before[part])
        if not blocks:
            return
        committed = self.ranks.commit(rank, share, part, blocks)
        after = {**before, part: before[part] + blocks}
        done = self.done[name]
        is_lost = name not in self._under_way()
        if is_lost and share in rank.replies:
            assert committed == 0
            self.ranks.abort(rank, share)
            self.totals["told that it is lost"] += 1
            return
        assert committed == min(after.values())
        done[part] += blocks
        complete = min(done[one] for one in range(len(LAYOUT.parts)))
        self.may_be_there.update(self.keys[prompt][block] for block in reply.blocks[:complete])
        if complete == len(reply.blocks):
            self.totals["whole"] += 1
        if complete and reply.present >= reply.blocks[0]:  # it follows nothing that is pending
            assert self.store.match(self.ranks.whole.number, self.keys[prompt]).blocks > reply.blocks[complete - 1]

    def _under_way(self) -> set[str]:
        """Names of puts that are not lost, and of those that became visible just now."""
        known = self.store._puts.collective
        lost = {name[2] for name, ended in known._ended.items() if ended.ending.reason is MissReason.DISABLED}
        return set(self.done) - lost

    @precondition(lambda self: self._shares())
    @rule(who=which)
    def abort(self, who: int) -> None:
        shares = self._shares()
        self.ranks.abort(*shares[who % len(shares)])

    @precondition(lambda self: self._alive())
    @rule(who=which)
    def leave(self, who: int) -> None:
        alive = self._alive()
        self.ranks.leave(alive[who % len(alive)])

    @precondition(lambda self: any(rank.is_gone for rank in self.ranks.ranks))
    @rule(who=which)
    def unmap(self, who: int) -> None:
        gone = [rank for rank in self.ranks.ranks if rank.is_gone]
        self.ranks.unmap(gone[who % len(gone)])

    # Everything else -----------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(DISTURBANCES), prompt=prompts, blocks=st.integers(1, STEPS * STEP_BLOCKS))
    def disturb(self, what: str, prompt: int, blocks: int) -> None:
        """Somebody else stores the same prompt, at once, or needs all the room that there is: whatever is given away is
        given to him. Time passes. A namespace goes."""
        if what in ("stores", "gives up"):
            self._store(self.keys[prompt][:blocks], what)
        elif what == "needs room":
            self._store(self.ranks.whole.match(ids(64 * 40, 1_000_000)).keys, "stores" if blocks == 1 else what)
        elif what == "evicts":
            self.store.evict(4 * blocks)
        elif what == "drops":
            self.store.drop(self.ranks.whole.number)
            self.totals[what] += 1
        elif self.late_ticks < LATE_TICKS:
            self.late_ticks += 1
            self.ranks.clock.advance(31)
            self.ranks.sessions.sweep()
            self.totals[what] += 1

    def _store(self, keys: list[bytes], ends: str) -> None:
        number = self.ranks.whole.number
        reply = self.store.reserve(number, keys, 0, 0, None)
        if not reply.reservation:
            return
        taken = {place for column in reply.places for place in column}
        assert not taken & self.ranks.written(), "a slot under a writer was given away"
        self.totals["blocks of others"] += len(reply.blocks)
        for part in range(len(LAYOUT.parts)) if ends == "stores" else ():
            digests = [[DIGEST] * len(LAYOUT.parts[part].layers)] * len(reply.blocks)
            self.store.commit(reply.reservation, part, 0, digests)
            self.may_be_there.update(keys[block] for block in reply.blocks)
        self.store.abort(reply.reservation)

    @rule()
    def other_blocks_under_a_known_name(self) -> None:
        for name in list(self.done):
            keys = self.ranks.whole.match(ids(64, 77_000)).keys
            put = Collective(name, (0,), self.ranks.bench.keys.tenant + TOKEN)
            reply = self.store.reserve(self.ranks.whole.number, keys, 0, 0, None, put)
            assert (reply.reservation, reply.reason) == (0, MissReason.DIVERGED)

    # What holds ----------------------------------------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        self.ranks.check()
        index = self.store.blocks.index
        there = {index.key(row) for row in index.rows(self.ranks.whole.number) if self.store.blocks.is_above(row)}
        assert there <= self.may_be_there, "a block without all its parts"
        usage = self.store.usage()
        assert usage.reservations == sum(self.store.collective_puts().values())

    def teardown(self) -> None:
        for rank in list(self.ranks.ranks):
            if not rank.is_gone:
                self.ranks.leave(rank)
            self.ranks.unmap(rank)
        self.ranks.clock.advance(31)
        self.ranks.sessions.sweep()
        self.everything_holds()
        usage = self.store.usage()
        assert (usage.reservations, usage.dram.reserved, usage.pinned_bytes) == (0, 0, 0)
        assert usage.dram.used == len(LAYOUT.parts) * usage.blocks
        assert not any(
            self.store.blocks.index.why_not(self.ranks.whole.number, key, -1) == "in_flight"
            for keys in self.keys
            for key in keys
        )
        self.store.close()


def test_joint_puts_in_random_histories() -> None:
    totals: Counter[str] = Counter()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: JointMachine(totals), settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )
    print(dict(totals))
    for event in ("shares", "whole", "told that it is lost", "blocks of others", "expires", "drops"):
        assert totals[event], f"no history had {event}"
