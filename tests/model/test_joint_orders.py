"""A collective put of two and of three ranks in every order of what each of them may do, against the real store,
sessions and shared memory. What must hold after each step is written down here anew, in a dozen lines: `Expected`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest

from kvstore.block.account import MissReason
from model.joint_ranks import Rank, Ranks
from workbench import ids, small_layout

BLOCKS = 2
RESERVE, PARTLY, COMMIT, ABORT, DIE, UNMAP, EXPIRE = "RpCADUE"
FATES = ("", "RC", "RpC", "RA", "RpA", "RDU", "RpDU", "RCDU")
"""What a rank does with the put. R: reserves. p, C: commits one block, or all that is left. A: gives up. D: its
connection breaks off; U: nothing of it is left."""
SHORT_FATES = ("", "RC", "RA", "RDU")


def orders(scripts: Sequence[str]) -> Iterator[str]:
    """Every way to interleave scripts, as the numbers of those whose turn it is."""
    if not any(scripts):
        yield ""
        return
    for at, script in enumerate(scripts):
        if script:
            left = [*scripts[:at], script[1:], *scripts[at + 1 :]]
            yield from (str(at) + rest for rest in orders(left))


@dataclass
class Expected:
    """What has to come of it. done: blocks that each rank committed; None while it did not come. writers: ranks that
    may write into slots."""

    ranks: int
    done: dict[int, int] = field(default_factory=dict)
    writers: set[int] = field(default_factory=set)
    begun: bool = False
    lost: bool = False
    kept: int = 0  # blocks that were visible when it was lost

    @property
    def complete(self) -> int:
        return min(self.done.get(rank, 0) for rank in range(self.ranks))

    @property
    def visible(self) -> int:
        return self.kept if self.lost else self.complete

    @property
    def is_over(self) -> bool:
        return self.lost or self.complete == BLOCKS

    def lose(self) -> None:
        if self.begun and not self.is_over:
            self.kept, self.lost = self.complete, True

    @property
    def has_slots(self) -> bool:
        return self.begun and (bool(self.writers) if self.lost else not self.is_over)


class Run:
    """One put, step by step."""

    def __init__(self, ranks: Ranks, count: int, number: int) -> None:
        self.ranks, self.expected = ranks, Expected(count)
        self.prompt = ids(64 * BLOCKS, 1000 * number)
        self.keys = ranks.whole.match(self.prompt).keys
        self.name = f"{number}"
        self.members = [ranks.enter([rank]) for rank in range(count)]
        self.shares: dict[int, int] = {}

    def step(self, rank: int, what: str) -> None:
        expected = self.expected
        if what == EXPIRE:
            self.ranks.clock.advance(31)
            self.ranks.sessions.sweep()
            expected.lose()
            return
        member = self.members[rank]
        if what == RESERVE:
            self._reserve(rank, member)
        elif what in (PARTLY, COMMIT):
            self._commit(rank, member, 1 if what == PARTLY else BLOCKS - expected.done.get(rank, 0))
        elif what == ABORT:
            if rank in self.shares:
                self.ranks.abort(member, self.shares.pop(rank))
                expected.writers.discard(rank)
                expected.lose()
        elif what == DIE:
            self.ranks.leave(member)
            if rank in self.shares:
                expected.lose()
        else:
            self.ranks.unmap(member)
            self.shares.pop(rank, None)
            expected.writers.discard(rank)

    def _reserve(self, rank: int, member: Rank) -> None:
        expected = self.expected
        reply = self.ranks.reserve(member, self.keys, 0, self.name)
        if expected.is_over:
            assert (reply.reservation, reply.reason) == (0, MissReason.DISABLED if expected.lost else None)
            assert reply.stopped_at == (expected.kept if expected.lost else None)
            return
        assert (reply.blocks, reply.stopped_at, reply.reason) == ([0, 1], None, None)
        expected.begun = True
        expected.done[rank] = 0
        expected.writers.add(rank)
        self.shares[rank] = reply.reservation

    def _commit(self, rank: int, member: Rank, blocks: int) -> None:
        expected = self.expected
        if rank not in self.shares:
            return
        share = self.shares[rank]
        committed = self.ranks.commit(member, share, rank, blocks)
        if expected.lost:
            assert committed == 0
            self.ranks.abort(member, self.shares.pop(rank))  # as a client does that is told so
            expected.writers.discard(rank)
            return
        expected.done[rank] += blocks
        assert committed == expected.done[rank]
        if committed == BLOCKS:
            del self.shares[rank]
            expected.writers.discard(rank)

    def check(self) -> None:
        expected, store = self.expected, self.ranks.store
        self.ranks.check()
        assert self.ranks.whole.match(self.prompt).blocks == expected.visible
        assert store.usage().reservations == expected.has_slots
        assert sum(self.ranks.sessions.reservations().values()) == expected.has_slots
        dram = store.usage().dram
        slots = BLOCKS if expected.has_slots else expected.visible
        assert dram.reserved + dram.used == expected.ranks * slots
        assert dram.used == expected.ranks * expected.visible or expected.has_slots

    def end(self) -> None:
        """Whoever is left goes: nothing is pending, and no slot is taken for nothing."""
        for member in [one for one in self.members if one in self.ranks.ranks]:
            if not member.is_gone:
                self.ranks.leave(member)
            self.ranks.unmap(member)
        self.ranks.clock.advance(31)
        self.ranks.sessions.sweep()
        self.expected.lose()
        self.expected.writers.clear()
        self.check()
        assert self.ranks.store.evict(BLOCKS) == self.expected.visible
        usage = self.ranks.store.usage()
        assert not (usage.dram.reserved or usage.dram.used or usage.reservations or usage.pinned_bytes)


def all_orders(count: int, fates: Sequence[str], expiry: str) -> list[tuple[tuple[str, ...], str]]:
    """Scripts, the last of them the clock's, and whose turn it is at each step."""
    chosen = [(*scripts, expiry) for scripts in product(fates, repeat=count)]
    return [(scripts, order) for scripts in chosen for order in orders(scripts)]


def go_through(ranks: Ranks, count: int, scripts: Sequence[str], order: str, number: int) -> None:
    run, turns = Run(ranks, count, number), [iter(script) for script in scripts]
    for at, who in enumerate(order):
        try:
            run.step(int(who), next(turns[int(who)]))
            run.check()
        except AssertionError as error:
            raise AssertionError(f"scripts {scripts}, order {order}, step {at}") from error
    run.end()


@pytest.mark.parametrize(
    ("count", "fates", "expiry", "most"),
    [(2, FATES, "", None), (2, FATES[1:], EXPIRE, 600), (3, SHORT_FATES, "", 600), (3, SHORT_FATES[1:], EXPIRE, 600)],
)
def test_every_order_of_what_ranks_do(count: int, fates: Sequence[str], expiry: str, most: int | None) -> None:
    """All of them for two ranks; where there are more, as many, drawn at random."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    ranks = Ranks(small_layout(kv_heads=count, head_shards=count))
    found = all_orders(count, fates, expiry)
    chosen = found if most is None else random.Random(seed).sample(found, most)
    for number, (scripts, order) in enumerate(chosen):
        go_through(ranks, count, scripts, order, number)
