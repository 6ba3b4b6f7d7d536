"""A client of a sidecar that leases, copies, fills and hangs up until it is killed, and compares all it is given.

ready                     namespaces are open
leasing, copying, holding, filling, scribbling, hanging      what it is about to do
hit BYTES                 a get delivered so many, and all were compared
missed REASON             a lease or a get ended before the blocks that the prompt has
put BLOCKS                so many were stored
kept BYTES FRAMES AGE     frames of a lease are as they were when they were mapped; milliseconds since then
later BYTES FRAMES AGE    the same, of a lease whose connection is gone, by hanging up or with an earlier sidecar
resumed LEASES            it was stopped, goes on, and has compared what it held
fault WHAT                something happened that must not

The KV of a block is a piece of random bytes that every process has, chosen by its namespace and chain.
"""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Any

import numpy as np

import kvstore
from asking import Asking
from kvstore.block.account import MissReason
from kvstore.block.errors import StoreClosed, StoreError, Unreachable
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.connection import SidecarConnection
from kvstore.client.handle import Loaded, NamespaceHandle
from kvstore.client.lease import Lease
from kvstore.client.sidecar_store import SidecarStore
from kvstore.client.socket_door import CallLimits
from model.store_model import BLOCK_TOKENS, Prompt
from torture.nursery import Voice

DEPTH = 3
LETTERS = [(tree, 10 + one, 20 + two) for tree in range(6) for one in range(2) for two in range(2)]
"""Prompts of three blocks that share prefixes: 42 blocks in each namespace."""

_SHAPE: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
LAYOUTS: dict[str, Layout] = {
    "huge": Layout.gqa(layers=8, **_SHAPE),  # frames of 2 MiB
    "shards": Layout.gqa(layers=4, head_shards=2, **_SHAPE),  # two frames of 512 KiB
    "small": Layout.gqa(layers=1, **_SHAPE),  # frames of 256 KiB
}
"""By namespace."""

LIMITS = CallLimits(connect=2.0, match=2.0, lease=2.0, fill=10.0, open=60.0)
"""A machine may be busy: what is late by a little is no miss here."""
MOST_HELD, LONGEST_HELD_SECONDS = 2, 3.0
"""Kept over other acts. What is mapped is not used again: whoever never lets go may leave nobody any room."""
SENTINEL = 0xA5A5
PIECE_BYTES = 64 << 10

_BASE = np.frombuffer(np.random.default_rng(0).bytes(8 << 20), np.uint16)


@lru_cache(maxsize=4096)
def _start(name: str, chain: tuple[int, ...], layer: int, plane: int) -> int:
    key = repr((name, chain, layer, plane)).encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest())


def plane_kv(name: str, chain: tuple[int, ...], layer: int, plane: int, elements: int) -> np.ndarray[Any, Any]:
    """What a plane of a block must hold: [elements]."""
    start = _start(name, chain, layer, plane) % (len(_BASE) - elements)
    return _BASE[start : start + elements]


class EnginePages:
    """Pages of `DEPTH` blocks, in the reverse order of memory, and one more that no table names."""

    def __init__(self, name: str) -> None:
        self.name = name
        layout = LAYOUTS[name]
        self.planes = {
            layer: [
                np.empty((DEPTH + 1, BLOCK_TOKENS, group.kv_heads, width), np.uint16) for width in group.plane_widths
            ]
            for group in layout.groups
            for layer in group.layers
        }
        self.pages = Pages(self.planes, range(DEPTH, 0, -1), BLOCK_TOKENS)
        self.clear()

    def clear(self) -> None:
        """Nothing was loaded."""
        for memory in self._memory():
            memory.fill(SENTINEL)

    def write(self, letters: tuple[int, ...]) -> Pages:
        """What a prompt's KV is; returns pages of as many blocks as it has."""
        for block in range(len(letters)):
            for (layer, plane), memory in self._of(block):
                memory[:] = plane_kv(self.name, letters[: block + 1], layer, plane, memory.size)
        return Pages(self.planes, range(DEPTH, DEPTH - len(letters), -1), BLOCK_TOKENS)

    def compare(self, letters: tuple[int, ...], loaded: Loaded) -> int:
        """How many bytes were delivered: each as it must be, and nothing else touched."""
        delivered = 0
        blocks = loaded.tokens // BLOCK_TOKENS
        for block in range(DEPTH):
            if block >= blocks and loaded.reason is not None:
                break
            for (layer, plane), memory in self._of(block):
                if block >= blocks:
                    assert (memory == SENTINEL).all(), f"{self.name} {letters}: block {block} was touched"
                    continue
                expected = plane_kv(self.name, letters[: block + 1], layer, plane, memory.size)
                wrong = np.count_nonzero(memory != expected)
                assert not wrong, f"{self.name} {letters}: {wrong} elements of block {block}, layer {layer} are wrong"
                delivered += memory.nbytes
        for memory in self._memory():
            assert (memory[0] == SENTINEL).all(), f"{self.name} {letters}: a page outside of the table was touched"
        return delivered

    def _memory(self) -> Iterator[np.ndarray[Any, Any]]:
        for planes in self.planes.values():
            yield from planes

    def _of(self, block: int) -> Iterator[tuple[tuple[int, int], np.ndarray[Any, Any]]]:
        for layer, planes in self.planes.items():
            for plane, memory in enumerate(planes):
                yield (layer, plane), memory[DEPTH - block].reshape(-1)


@dataclass
class Space:
    """A namespace and its memory."""

    name: str
    handle: NamespaceHandle
    pages: EnginePages

    @classmethod
    def of(cls, store: SidecarStore, name: str, model: str = "torture") -> Space:
        """Opened in a sidecar. name: of its layout."""
        return cls(name, store.namespace(model=f"{model} {name}", layout=LAYOUTS[name]), EnginePages(name))

    def put(self, letters: tuple[int, ...], durability: str = "volatile") -> int:
        """How many blocks were stored."""
        return self.handle.put(Prompt(letters).token_ids, self.pages.write(letters), durability=durability).stored

    def load(self, lease: Lease, letters: tuple[int, ...]) -> tuple[int, MissReason | None]:
        """How many bytes a get delivered and why not all that was leased; every byte is compared."""
        self.pages.clear()
        loaded = self.handle.get(lease, self.pages.pages)
        return self.pages.compare(letters, loaded), loaded.reason


@dataclass
class Held:
    """A lease, and the bytes at its frames when they were mapped. run: the connection on which it was taken."""

    space: Space
    letters: tuple[int, ...]
    lease: Lease
    run: SidecarConnection
    frames: list[np.ndarray[Any, Any]]
    before: list[np.ndarray[Any, Any]]
    since: float


def opened(socket: str, session: str | None = None) -> SidecarStore:
    """A patient client."""
    store = kvstore.open(f"unix:{socket}", engine="torture", session=session)
    assert isinstance(store, SidecarStore)
    store._door._limits = LIMITS
    return store


def live(say: Voice, socket: str, seed: int, steady: list[str], scratch: list[str], drops: bool) -> None:
    """Until somebody ends it. steady: namespaces to read and put; scratch: to fill and scribble in, and to drop."""
    Client(say, socket, Random(seed), steady, scratch, drops).work()


class Client:
    """One process of an engine."""

    def __init__(
        self, say: Voice, socket: str, random: Random, steady: list[str], scratch: list[str], drops: bool
    ) -> None:
        self.say, self.random = say, random
        self.was_stopped = False
        signal.signal(signal.SIGCONT, self._continued)
        faulthandler.register(signal.SIGUSR1)
        self.store = opened(socket)
        self.door = self.store._door
        self.spaces = {name: Space.of(self.store, name) for name in dict.fromkeys([*steady, *scratch])}
        self.steady, self.scratch, self.drops = steady, scratch, drops
        self.held: list[Held] = []
        say("ready")

    def work(self) -> None:
        """Act after act."""
        acts = [self.read, self.keep, self.fill, self.scribble, self.hang_up, self.drop]
        weights = [40, 16, 30, 10, 3, 1 if self.drops else 0]
        while True:
            self.random.choices(acts, weights)[0]()
            while self.held and time.monotonic() - self.held[0].since > LONGEST_HELD_SECONDS:
                self.let_go(self.held.pop(0), reads=True)
            if self.was_stopped:
                self.was_stopped = False
                held = len(self.held)
                while self.held:
                    self.let_go(self.held.pop(0), reads=True)
                self.say("resumed", held)

    def _continued(self, *_: object) -> None:
        self.was_stopped = True

    # Acts ----------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Lease, copy, and let go."""
        held = self.take()
        if held is not None:
            self.let_go(held, reads=True)

    def keep(self) -> None:
        """Hold leases while other things are done."""
        held = self.take()
        if held is not None:
            self.held.append(held)
        if len(self.held) > MOST_HELD:
            self.let_go(self.held.pop(0), reads=self.random.random() < 0.5)
        self.say("holding")
        time.sleep(self.random.random() * 0.02)

    def fill(self) -> None:
        """Put a prompt, or the first blocks of one."""
        space = self.spaces[self.random.choice(self.scratch)]
        letters = self.random.choice(LETTERS)[: self.random.randrange(1, DEPTH + 1)]
        durability = "disk" if space.handle._grant.durable and self.random.random() < 0.1 else "volatile"
        self.say("filling")
        self.say("put", space.put(letters, durability))

    def scribble(self) -> None:
        """Write nonsense into slots that were reserved, and commit none of it; some hang up before."""
        space = self.spaces[self.random.choice(self.scratch)]
        keys = space.handle.match(Prompt(self.random.choice(LETTERS)).token_ids).keys
        reply = Asking(self.door).reserve(space.handle.number, keys, 0, 0, None)
        if not reply.reservation:
            return
        try:
            spans = [
                span for column in reply.places for span in self.door.memory(reply.reservation, column, writable=True)
            ]
        except StoreClosed:
            spans = []
        self.say("scribbling")
        if self.random.random() < 0.3:
            self._break_off()
        for _ in range(self.random.randrange(1, 4)):
            nonsense = self.random.randbytes(PIECE_BYTES)
            for span in spans:
                for first in range(0, len(span.view), PIECE_BYTES):
                    span.view[first : first + PIECE_BYTES] = nonsense[: len(span.view) - first]
        Asking(self.door).abort(reply.reservation)

    def hang_up(self) -> None:
        """The connection breaks off; what is mapped is read on for a while."""
        if not self.held:
            self.keep()
        self.say("hanging")
        self._break_off()
        if self.random.random() < 0.7:
            time.sleep(self.random.random() * 0.3)

    def drop(self) -> None:
        """A namespace is forgotten under all who use it."""
        space = self.spaces[self.random.choice(self.scratch)]
        try:
            self.store.drop(space.handle)
            self.say("dropped")
        except StoreError:  # it is away, or moves were not over in time
            pass

    # Leases --------------------------------------------------------------------------------------------------------

    def take(self) -> Held | None:
        """Lease what there is of a prompt, and keep a copy of the raw frames."""
        space = self.spaces[self.random.choice([*self.steady, *self.scratch])]
        letters = self.random.choice(LETTERS)
        self.say("leasing")
        match = space.handle.match(Prompt(letters).token_ids)
        assert match.reason is not MissReason.CORRUPT
        lease = space.handle.lease(match, deadline_ms=self.random.choice([0, 50, 1000]))
        assert lease.reason is not MissReason.CORRUPT, f"{space.name} {letters}: block {lease.blocks} fails a check"
        if lease.blocks < len(letters):
            self.say("missed", lease.reason or match.reason)
        held = self.door._held.get(lease.reply.lease)
        if not lease.blocks or held is None:
            lease.release()
            return None
        try:
            spans = [span for column in lease.reply.places for span in self.door.memory(lease.reply.lease, column)]
        except (StoreClosed, Unreachable):
            spans = []
        if self.door._run is not held.run or len(spans) < sum(map(len, lease.reply.places)):
            lease.release()
            return None
        frames = [np.frombuffer(span.view, np.uint64) for span in spans]
        return Held(space, letters, lease, held.run, frames, [frame.copy() for frame in frames], time.monotonic())

    def let_go(self, held: Held, *, reads: bool) -> None:
        """Compare the frames, read or not, and release."""
        if reads:
            self.copy(held)
        if self.random.random() < 0.2:
            self.say("holding")
            time.sleep(self.random.random() * 0.05)
        self.compare_frames(held)
        held.frames.clear()
        held.lease.release()

    def copy(self, held: Held) -> None:
        """A get of all that was leased."""
        self.say("copying")
        delivered, reason = held.space.load(held.lease, held.letters)
        self.say("hit", delivered)
        if reason is None:
            return
        is_here = self.door._run is held.run and not held.run.wire.closed
        assert not is_here, f"{held.space.name} {held.letters}: a get under a lease ended as {reason}"
        self.say("missed", f"{reason}, of an earlier connection")

    def compare_frames(self, held: Held) -> None:
        """No byte of what was leased has changed."""
        for at, (frame, before) in enumerate(zip(held.frames, held.before, strict=True)):
            changed = np.count_nonzero(frame != before)
            assert not changed, (
                f"{held.space.name} {held.letters}: {changed} words of frame {at} changed under a lease, "
                f"{time.monotonic() - held.since:.1f} s after it was taken"
            )
        is_here = self.door._run is held.run and not held.run.wire.closed
        compared = sum(frame.nbytes for frame in held.frames)
        age = int(1000 * (time.monotonic() - held.since))
        self.say("kept" if is_here else "later", compared, len(held.frames), age)

    def _break_off(self) -> None:
        run = self.door._run
        if run is not None:
            run.wire.close()
