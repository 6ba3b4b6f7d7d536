"""What processes that were killed had been told by a store, and whether their directory keeps to it.

Of each block it is known that it is owed (acknowledged as durable, or found, and not given up since), that it must
stay away (not found by a whole comparison, or dropped, and not begun to be stored since), or neither.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from random import Random
from typing import NamedTuple

from kvstore.block.account import MissReason
from model.store_model import Prompt
from tiering.nvme.lmdb_index import LmdbMaker, discard
from torture.child import DRAM, LETTERS, SIZES, SPACES, Space
from workbench import open_at

LOADED_WITHIN_SECONDS = 60
LEASE_DEADLINE_MS = 60_000
ENDS = frozenset({MissReason.ABSENT, MissReason.DIVERGED, MissReason.EVICTED, MissReason.OTHER_NAMESPACE})
"""Why a chain may end after a restart."""


class Standing(Enum):
    """What a directory owes of a block."""

    OWED = "must be there"
    OPEN = "may be there or not"
    AWAY = "must not be there"


class Block(NamedTuple):
    """A block of a namespace: its chain of letters."""

    space: str
    letters: tuple[int, ...]


class Call(NamedTuple):
    """A put: what it offered, and the line in which it was begun."""

    blocks: list[Block]
    line: int


class Witness:
    """The journal of one directory, and what follows from it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.store_directory = directory / "store"
        self.random = Random(seed)
        self.standing: dict[Block, Standing] = {}
        self.counts: Counter[str] = Counter()
        self.spaces = list(SPACES)
        self._names: dict[str, dict[bytes, Block]] = {}  # of each namespace, what its prefix keys stand for
        self._line = 0
        self._gone_at: dict[Block, int] = {}
        self._heard: list[list[str]] = []
        self._journal = os.open(directory / "journal", os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)

    def close(self) -> None:
        """Let go of the journal."""
        os.close(self._journal)

    @property
    def guests(self) -> list[str]:
        """Namespaces of tenants that were not there at first."""
        return self.spaces[len(SPACES) :]

    # What a process said -------------------------------------------------------------------------------------------

    def hear(self, said: bytes, lines: list[str]) -> None:
        """A process has ended. What it said is durable before anything is concluded from it."""
        os.write(self._journal, said)
        os.fsync(self._journal)
        for line in lines:
            assert not line.startswith("fault"), line
            words = line.split()
            if words[0] == "space" and words[2] not in self.spaces:
                self.spaces.append(words[2])
        self._heard.append(lines)

    def _conclude(self) -> None:
        """From all that was heard since the last comparison; keys can be named now."""
        for lines in self._heard:
            numbers: dict[int, str] = {}
            calls: dict[str, Call] = {}
            ended: dict[Block, int] = {}  # the line in which the last put of a block was over
            drops: dict[str, tuple[str, int]] = {}
            for line in lines:
                self._line += 1
                what, *words = line.split()
                if what == "opening":
                    numbers = {}
                elif what == "space":
                    numbers[int(words[0])] = words[1]
                elif what == "put":
                    calls[words[0]] = self._begun(words[1], tuple(map(int, words[2:])))
                elif what == "durable":
                    self._acknowledged(calls[words[0]])
                elif what == "ended":
                    ended.update(dict.fromkeys(calls.pop(words[0]).blocks, self._line))
                elif what == "gone":
                    self._gone(self._names[numbers[int(words[0])]][bytes.fromhex(words[1])])
                elif what == "drop":
                    drops[words[0]] = (words[1], self._line)
                    self._about_to_drop(words[1])
                elif what == "dropped":
                    under_way = {block for call in calls.values() for block in call.blocks}
                    self._dropped(*drops.pop(words[0]), ended, under_way)
                elif what == "closed":
                    self.counts["closed sessions"] += 1
        self._heard.clear()

    def _begun(self, space: str, letters: tuple[int, ...]) -> Call:
        blocks = [Block(space, letters[: depth + 1]) for depth in range(len(letters))]
        for block in blocks:
            if self.standing.get(block, Standing.AWAY) is Standing.AWAY:
                self.standing[block] = Standing.OPEN
        return Call(blocks, self._line)

    def _acknowledged(self, call: Call) -> None:
        for block in call.blocks:
            if self._gone_at.get(block, -1) < call.line:  # else it may have gone since it was made durable
                self.standing[block] = Standing.OWED
        self.counts["acknowledged blocks"] += len(call.blocks)

    def _gone(self, block: Block) -> None:
        assert self.standing.get(block, Standing.AWAY) is not Standing.AWAY, f"{block} was given up, and not there"
        self.standing[block] = Standing.OPEN
        self._gone_at[block] = self._line
        self.counts["evicted blocks"] += 1

    def _about_to_drop(self, space: str) -> None:
        """A drop counts as the record of every eviction that it causes."""
        for block in [block for block in self.standing if block.space == space]:
            if self.standing[block] is Standing.OWED:
                self.standing[block] = Standing.OPEN
            self._gone_at[block] = self._line

    def _dropped(self, space: str, line_of_drop: int, ended: dict[Block, int], under_way: set[Block]) -> None:
        """What no put of that time touched is gone for good."""
        for block in self.standing.keys() - under_way:
            if block.space == space and ended.get(block, -1) < line_of_drop:
                self.standing[block] = Standing.AWAY
        self.counts["dropped namespaces"] += 1

    # What is there -------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Open the directory, and hold what is there against what was heard."""
        if self.random.random() < 0.25:
            discard(self.store_directory / "nvme" / "index")
        gone: list[tuple[int, bytes]] = []
        store = open_at(
            self.store_directory,
            dram=self.random.choice(DRAM),
            **SIZES,
            indexes=LmdbMaker,
            gone=lambda number, key: gone.append((number, key)),
        )
        try:
            assert store.warmed(LOADED_WITHIN_SECONDS), "what is on disk was not taken in"
            lower = store._store.blocks.lower
            assert lower is not None and not lower.tier.left_alone, f"slabs are left alone: {lower.tier.left_alone}"
            spaces = [Space(store, name) for name in self.spaces]
            for space in spaces:
                self._learn_names(space)
            self._conclude()
            there = {block for space in spaces for block in self._readable(space)}
            self._hold_against(there)
            store.check()
            assert not store.usage().counters.get("quarantined_blocks"), store.usage().counters
            named = {space.number: space.name for space in spaces}
            for number, key in gone:  # what hangs below a frame that was cut short goes with it
                assert number in named, f"a block of namespace {number} was given up, of {named}"
                block = self._names[named[number]][key]
                standing = self.standing.get(block, Standing.AWAY)
                assert standing is Standing.OPEN, f"{block} was given up, and {standing.value}"
                assert block not in there
            self.counts["rebuilds"] += lower.tier.rebuilds
        finally:
            store.close()
        for block in self.standing:
            self.standing[block] = Standing.OWED if block in there else Standing.AWAY
        self.counts["comparisons"] += 1
        self.counts["blocks compared"] += len(there)

    def _learn_names(self, space: Space) -> None:
        if space.name not in self._names:
            names = self._names[space.name] = {}
            for letters in LETTERS:
                for depth, key in enumerate(space.handle.match(Prompt(letters).token_ids).keys):
                    names[key] = Block(space.name, letters[: depth + 1])

    def _readable(self, space: Space) -> Iterator[Block]:
        """All blocks that can be read, and every byte of them is compared."""
        chains: set[tuple[int, ...]] = set()
        for letters in LETTERS:
            match = space.handle.match(Prompt(letters).token_ids)
            assert match.reason is None or match.reason in ENDS, f"a chain ends with {match.reason}: {match.detail}"
            chains.add(letters[: match.blocks])
        for letters in chains:
            if any(other[: len(letters)] == letters for other in chains if other != letters):
                continue  # a longer one says it all
            blocks, reason = space.read(letters, LEASE_DEADLINE_MS)
            assert blocks == len(letters), f"{space.name} {letters}: only {blocks} blocks can be read ({reason})"
            yield from (Block(space.name, letters[: depth + 1]) for depth in range(blocks))

    def _hold_against(self, there: set[Block]) -> None:
        owed = {block for block, standing in self.standing.items() if standing is Standing.OWED}
        missing = sorted(owed - there)
        assert not missing, f"{len(missing)} of {len(owed)} blocks that are owed are not there: {missing[:3]}"
        back = sorted(block for block in there if self.standing.get(block, Standing.AWAY) is Standing.AWAY)
        assert not back, f"{len(back)} blocks are there that were given up: {back[:3]}"
