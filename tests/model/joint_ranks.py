"""Ranks of an engine at a real store, real sessions and real shared memory, of which a test says who does what when.

A rank is a connection, and a process behind it that may write wherever it was once told to: from its reservation until
all its parts are committed, it gave up, or it is gone and the kernel knows of no mapping. What stands for a process
here is the descriptors that were sent to it: closing them is its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.block.layout import Layout
from kvstore.client.handle import NamespaceHandle
from kvstore.protocol import messages as m
from kvstore.protocol.messages import ReserveReply
from kvstore.service.dispatch import Handlers
from kvstore.service.sessions import ClientState
from tiering.slots import FrameState
from tiering.tier import extent_of
from workbench import Bench, bench

DIGEST = bytes(16)
TOKEN = b"an engine's session, of all ranks"


@dataclass(eq=False)
class Rank:
    """One process. replies: of each share that is not over; done: blocks that it committed of each part."""

    caller: ClientState
    parts: tuple[int, ...]
    mapped: list[int] = field(default_factory=list)
    replies: dict[int, ReserveReply] = field(default_factory=dict)
    done: dict[int, dict[int, int]] = field(default_factory=dict)
    is_gone: bool = False


class Ranks:
    """A store, and the connections of one engine to it."""

    def __init__(self, layout: Layout, **options: Any) -> None:
        self.bench: Bench = bench(**options)
        self.store, self.clock, self.layout = self.bench.store, self.bench.clock, layout
        self.whole: NamespaceHandle = self.bench.namespace(layout)
        self.handlers = Handlers(self.store, 1, os.urandom)
        self.sessions = self.handlers.sessions
        self.ranks: list[Rank] = []

    def enter(self, parts: Iterable[int]) -> Rank:
        """One more process, of the same session."""
        hello = m.Hello(m.OLDEST_VERSION, m.NEWEST_VERSION, "test", TOKEN)
        caller, _ = self.handlers.greet(self.bench.keys, hello)
        assert caller is not None
        sizes = [part.raw_bytes for part in self.layout.parts]
        self.ask(caller, m.OpenNamespace(self.whole.namespace.pack(), sizes), m.Granted)
        rank = Rank(caller, tuple(parts))
        self.ranks.append(rank)
        return rank

    def ask(self, caller: ClientState, verb: m.Verb, kind: type[Any]) -> Any:
        served = self.handlers.serve(caller, verb)
        assert isinstance(served.answer, kind), served.answer
        return served.answer

    # What a rank does ----------------------------------------------------------------------------------------------

    def reserve(self, rank: Rank, keys: Sequence[bytes], first_block: int, collective: str) -> ReserveReply:
        """Its share of a collective put, mapped for writing. No place is anybody else's."""
        verb = m.Reserve(self.whole.number, list(keys), first_block, 0, None, collective, list(rank.parts))
        reply: ReserveReply = self.ask(rank.caller, verb, m.Reserved).reply
        if reply.reservation:
            taken = [place for column in reply.places for place in column]
            assert not self.written().intersection(taken), "a slot under two writers"
            rank.replies[reply.reservation] = reply
            mine = [part for part, column in enumerate(reply.places) if column]
            rank.done[reply.reservation] = dict.fromkeys(mine, 0)
            self._map(rank, taken)
        return reply

    def _map(self, rank: Rank, places: Sequence[int]) -> None:
        wanted = sorted({extent_of(place) for place in places})
        served = self.handlers.serve(rank.caller, m.Extents(wanted, True))
        assert isinstance(served.answer, m.ExtentsReply)
        assert [extent.number for extent in served.answer.extents] == wanted, "it may write where it was told to"
        rank.mapped += served.descriptors

    def commit(self, rank: Rank, share: int, part: int, blocks: int) -> int:
        """The next blocks of a part; how many of the share's are committed in all its parts, 0 where it has ended."""
        first = rank.done[share][part]
        digests = [[DIGEST] * len(self.layout.parts[part].layers)] * blocks
        committed: int = self.ask(rank.caller, m.Commit(share, part, first, digests), m.Counted).blocks
        rank.done[share][part] += blocks
        if min(rank.done[share].values()) == len(rank.replies[share].blocks) == committed:
            self._is_over(rank, share)
        return committed

    def abort(self, rank: Rank, share: int) -> None:
        self.ask(rank.caller, m.Abort(share), m.Done)
        self._is_over(rank, share)

    def _is_over(self, rank: Rank, share: int) -> None:
        rank.replies.pop(share, None)
        rank.done.pop(share, None)

    def leave(self, rank: Rank) -> None:
        """Its connection breaks; the process is there still, perhaps in the middle of a copy."""
        self.sessions.left(rank.caller)
        rank.is_gone = True

    def unmap(self, rank: Rank) -> None:
        """Nothing of the process is left."""
        for descriptor in rank.mapped:
            os.close(descriptor)
        rank.mapped.clear()
        self.ranks.remove(rank)
        self.sessions.sweep()

    # What holds at any time ----------------------------------------------------------------------------------------

    def written(self) -> set[int]:
        """Places that some process may be writing into: it has not said that it is done with them."""
        return {
            place
            for rank in self.ranks
            for share, reply in rank.replies.items()
            for part, done in rank.done[share].items()
            for place in reply.places[part][done:]
        }

    def check(self) -> None:
        """Every invariant of the tables, and that no slot is free or another block's that somebody may write into."""
        self.store.check()
        dram = self.store.blocks.dram
        visible = {
            self.store.blocks.residency.place(row, part)
            for row in self.store.blocks.index.rows(self.whole.number)
            if self.store.blocks.is_above(row)
            for part in range(len(self.layout.parts))
        }
        for place in self.written():
            assert dram.ledger.state(place) == FrameState.RESERVED, "a slot under a writer was given away"
            assert place not in visible
