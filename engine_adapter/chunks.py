"""Opaque chunks of an engine's own offloading, kept in the store.

A chunk is one block, and one page, of a namespace of its own kind. Its key is that of a prompt of zeros that is exactly
one block long, with the engine's name for it as extra key. In the engine's memory it lies in one or more runs:

    run 0    |=======|      |=======|      |=======|      slot n of a run: `size` bytes at address + n * stride
    run 1        |==|           |==|           |==|       chunk n: slot n of all runs; what is in it is not known

`ChunkSpace` is for an engine's own I/O threads, which may wait (SGLang's and LMCache's). Its namespace is opened in the
background, over two connections, so that stores do not delay look-ups. `ChunkStore` is for an engine that hands out
(name, slot) pairs and whose thread must not wait (vLLM's):

    engine's thread              ask > PENDING, PENDING, HELD > load           store         finished
                                 match > lease (pins, verified)
                                 match > what is elsewhere: fetched, within `lease_ms` > match > lease
    threads of its own                                          get            put
                                 forget: what an owner asked for and did not load is released

Any fault of the store becomes a miss here, a chunk that is not stored, or a failed job; nothing raises because of it.
Must never import an engine.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from logging import getLogger
from typing import Annotated, NamedTuple

import numpy as np
import torch
from msgspec import Meta

from engine_adapter.handoff import BlockWait, FetchPolicy, ParkedWaits, WaitPlan, wait_for_blocks
from engine_adapter.paged.namespace_opener import NamespaceOpener
from engine_adapter.paged.settings import Epoch
from engine_adapter.paged.step_plan import NamespaceSpec
from engine_adapter.paged.worker import IDLE_WAIT_SECONDS, OPEN_SECONDS, SAVE_DEADLINE_MS, lower_priority
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.identity import ExtraKey, Prompt
from kvstore.block.layout import KvGroup, Layout
from kvstore.block.pages import Pages
from kvstore.client.edge import contained
from kvstore.client.handle import Lease, Match, NamespaceHandle, OpenStore
from kvstore.client.pending import PendingReply
from kvstore.config import SettingsSection
from kvstore.protocol import messages as m
from kvstore.protocol.told import RequestTold
from tiering.frame import MAX_SLICES

SLICE_BYTES = 512 << 10
"""Runs are cut into slices of at least this size, each with a digest: copied and checked while it is in a cache."""
MAX_RUN_SLICES = 32


class ChunkRun(NamedTuple):
    """One run of every chunk, in memory that its engine keeps."""

    address: int
    stride: int
    size: int


def chunk_layout(group: str, block_tokens: int, sizes: Sequence[int]) -> Layout:
    """The layout of a namespace of chunks whose runs have these sizes. A chunk has a row for each token where that
    divides its run, else one row. Raises `BadInput`, one line, for sizes that no block can have."""
    layers: dict[tuple[int, int], list[int]] = {}
    number = 0
    for size in sizes:
        count, rows, width = _cut(size, block_tokens)
        layers.setdefault((width, block_tokens // rows), []).extend(range(number, number + count))
        number += count
    groups = [
        KvGroup(group, tuple(numbers[first : first + MAX_SLICES]), 1, (width,), "uint8", row_tokens=row_tokens)
        for (width, row_tokens), numbers in layers.items()
        for first in range(0, len(numbers), MAX_SLICES)
    ]
    named = (replace(one, name=f"{group} +{number}" if number else group) for number, one in enumerate(groups))
    return Layout(tuple(named), block_tokens, packing="opaque")


def chunk_planes(block_tokens: int, runs: Sequence[ChunkRun], slots: int) -> dict[int, tuple[torch.Tensor]]:
    """These runs as planes of `Pages` whose page numbers are slots: views, no copy."""
    planes = []
    for address, stride, size in runs:
        memory = memoryview((ctypes.c_uint8 * ((slots - 1) * stride + size)).from_address(address))
        _, rows, width = _cut(size, block_tokens)
        shape, strides = (slots, rows, 1, width), (stride, width, width, 1)
        step = rows * width
        planes += [torch.from_numpy(np.ndarray(shape, np.uint8, memory, at, strides)) for at in range(0, size, step)]
    return {number: (plane,) for number, plane in enumerate(planes)}


def chunk_key(namespace: NamespaceHandle, name: bytes) -> bytes:
    return namespace.hashed(bytes(4 * namespace.block_tokens), (ExtraKey(b"engine:" + name),)).keys[0]


def _cut(size: int, block_tokens: int) -> tuple[int, int, int]:
    count, rows = max(1, min(MAX_RUN_SLICES, size // SLICE_BYTES)), 1 if size % block_tokens else block_tokens
    while size % (count * rows):
        count -= 1
    return count, rows, size // (count * rows)


# For threads that may wait --------------------------------------------------------------------------------------------


KNOWN_KEYS = 1 << 14
"""Names whose keys are remembered, since those before a batch are needed again with every batch."""
CLOSE_SECONDS = TELL_SECONDS = 1.0
LEASE_POLL_SECONDS = 0.0001

_APART = frozenset(
    {
        MissReason.DIVERGED,
        MissReason.ABSENT,
        MissReason.EVICTED,
        MissReason.CORRUPT,
        MissReason.OTHER_NAMESPACE,
        MissReason.IN_FLIGHT,
    }
)
"""Why chunks cannot be stored behind the chunks before them: those are missing, in another chain, or in flight."""

_log = getLogger(__name__)


Milliseconds = Annotated[float, Meta(ge=0)]


class ChunkSettings(SettingsSection, frozen=True):
    """What every such adapter is given by its engine's configuration, where numbers may be text. url: of the store.
    model_dir: where the weights are. weights_epoch: of weights that were changed in place."""

    is_lax = True
    url: Annotated[str, Meta(min_length=1, description='the store\'s address, e.g. "unix:/run/kvstore/kvstore.sock"')]
    model_dir: str | None = None
    weights_epoch: Epoch = 0


def open_twice(opened: Callable[..., OpenStore], url: str, engine: str) -> tuple[OpenStore, OpenStore]:
    """Two connections of one engine: for look-ups and loads, and for stores. A store in this process needs no second.
    Connects to no sidecar yet. opened: `kvstore.open`. Raises `BadInput`."""
    first = opened(url, engine=engine)
    session = getattr(first, "session", None)
    return first, opened(url, engine=engine, session=session) if session is not None else first


class ChunkOutcomes:
    """The outcomes of chunks, counted, and whether the store can be asked. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._is_away = False

    def count(self, **chunks: int) -> None:
        with self._lock:
            self._counts.update({outcome: number for outcome, number in chunks.items() if number})

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A context that a fault of the store ends early: the fault is counted, and not raised."""
        with contained(self._failed):
            yield

    def _failed(self, error: Exception) -> None:
        self.count(faults=1)
        _log.debug("a fault of the store: %s: %s", type(error).__name__, error)

    def told(self, reason: MissReason | None) -> None:
        """Why the last look-up found no more. Logs one line for each change of state."""
        is_away = reason is MissReason.UNREACHABLE
        with self._lock:
            was_away, self._is_away = self._is_away, is_away
        if is_away is not was_away:
            _log.warning("the store %s", "cannot be asked: chunks are computed, not loaded" if is_away else "answers")

    def take(self) -> dict[str, int]:
        """Since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def status(self) -> tuple[dict[str, int], bool]:
        """The counts, which stay, and whether the last look-up could not ask the store."""
        with self._lock:
            return dict(self._counts), self._is_away


class ChunkSpace:
    """Chunks of one kind in the store and in the engine's memory. Thread-safe. outcomes: `found`, `missing`; `loaded`,
    `failed_loads`, of which `corrupt`; `stored`, `failed_stores`, `present`, which were stored before, and `in_flight`,
    which another engine was still storing; and `faults`."""

    def __init__(
        self,
        spec: NamespaceSpec,
        runs: Sequence[ChunkRun],
        slots: int,
        stores: tuple[OpenStore, OpenStore],
        outcomes: ChunkOutcomes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """runs: where the chunk of each slot lies, as in `chunk_layout`; the caller keeps that memory until `close`.
        stores: for look-ups and loads, and for stores; they are closed with this."""
        self.spec, self.stores, self._outcomes, self._clock = spec, stores, outcomes, clock
        self.block_tokens = spec.layout.block_tokens
        self.planes: dict[int, tuple[torch.Tensor]] = chunk_planes(self.block_tokens, runs, slots)
        self.slots, self.sizes, self.chunk_bytes = slots, [run.size for run in runs], sum(run.size for run in runs)
        self._reading = NamespaceOpener(lambda: stores[0], is_told=True)
        self._writing = NamespaceOpener(lambda: stores[1])
        for opener in (self._reading, self._writing):
            opener.want(spec)
        self._key = lru_cache(KNOWN_KEYS)(chunk_key)

    @property
    def handle(self) -> NamespaceHandle | None:
        """For look-ups and loads; None while the store was not reached yet. Does not block."""
        return self._reading.now()

    def writing(self, seconds: float) -> NamespaceHandle | None:
        """For stores; waits that long while it is not open."""
        return self._writing.wait(self.spec.number, seconds)

    def pages(self, slots: Sequence[int]) -> Pages:
        return Pages(self.planes, slots, self.block_tokens)

    def prompt(self, handle: NamespaceHandle, names: Sequence[bytes]) -> Prompt:
        """These chunks as a prompt: their keys, each independent of the others."""
        return Prompt(len(names) * self.block_tokens, [self._key(handle, name) for name in names])

    def found(self, names: Sequence[bytes], *, counts: bool = True, fetch_ms: float = 0.0) -> int:
        """How many leading chunks are stored. counts: whether statistics count it as a look-up. fetch_ms: chunks
        elsewhere count as found if `load` could fetch them in that time; 0 if the names are not a prompt's first ones,
        or nothing is to be fetched."""
        blocks, handle = 0, self.handle
        with self._outcomes.caught():
            if handle is not None and names:
                match = handle.match(self.prompt(handle, names), counts=counts)
                blocks = match.blocks
                self._outcomes.told(match.reason)
                if fetch_ms and handle.has_courier and blocks < len(names):
                    located = handle.locate(self.prompt(handle, names))
                    if located.number and located.blocks > blocks:
                        blocks, _ = FetchPolicy(len(names), fetch_ms / 1000, 1).choose(located, blocks)
        self._outcomes.count(found=blocks, missing=len(names) - blocks)
        return blocks

    def which(self, names: Sequence[bytes]) -> list[bool]:
        """Which chunks are stored here, each for itself."""
        with self._outcomes.caught():
            if (handle := self.handle) is not None and names:
                return handle.which(self.prompt(handle, names).keys)
        return [False] * len(names)

    def pin(self, names: Sequence[bytes], seconds: float, *, counts: bool = True) -> tuple[int, Lease | None]:
        """How many leading chunks are stored, in any tier, and a lease of the first ones as far as they are in memory:
        none is promoted for it. seconds: to wait for the namespace until it is open, or an attempt at it has failed.
        counts: as in `found`."""
        blocks, lease = 0, None
        if self._reading.why_not()[0] is MissReason.WARMING:
            self._reading.wait(self.spec.number, seconds)
        with self._outcomes.caught():
            if (handle := self.handle) is not None and names:
                match = handle.match(self.prompt(handle, names), counts=counts)
                self._outcomes.told(match.reason)
                leasing = handle.submit_lease(match, deadline_ms=0, counts=False) if match.blocks else None
                while leasing is not None and (lease := leasing.poll()) is None:
                    time.sleep(LEASE_POLL_SECONDS)
                blocks = match.blocks
        self._outcomes.count(found=blocks, missing=len(names) - blocks)
        return blocks, lease

    def had(self, chunks: int) -> None:
        """The engine's own cache has so many chunks of a prompt, before those that are looked up."""
        with self._outcomes.caught():
            if (handle := self.handle) is not None:
                tokens = chunks * self.block_tokens
                own = RequestTold("", tokens, {HitTier.ENGINE: tokens}, {}, counts=True)
                handle.tell([own], seconds=TELL_SECONDS)

    def load(self, names: Sequence[bytes], pages: Pages, deadline_ms: float, *, fetches: bool = False) -> int:
        """Load leading chunks into their pages; returns how many are there now, verified. There is no look-up before:
        the leases tell what is stored. deadline_ms: for promotions and fetches of all of them. fetches: whether chunks
        elsewhere are fetched."""
        done, ends_at, reason, handle = 0, self._clock() + deadline_ms / 1000, None, self.handle
        with self._outcomes.caught():
            while handle is not None and done < len(names):  # a lease may be for fewer: pins are bounded
                left_ms = max(0.0, 1000 * (ends_at - self._clock()))
                wanted = self.prompt(handle, names[done:])
                hoped = Match(wanted.keys, len(wanted.keys), wanted.tokens, (), Account.of([]), None, "")
                with handle.lease(hoped, deadline_ms=left_ms) as lease:
                    loaded = handle.get(lease, into=pages.cut(done, len(names)))
                reason = loaded.reason or lease.reason
                done += loaded.tokens // self.block_tokens
                if not loaded.tokens:
                    if not fetches or not self._fetched(handle, self.prompt(handle, names), done, ends_at):
                        break
                    fetches = False
            self._outcomes.told(reason)
        failed, is_corrupt = len(names) - done, reason is MissReason.CORRUPT
        self._outcomes.count(loaded=done, failed_loads=failed, corrupt=min(failed, int(is_corrupt)))
        return done

    def _fetched(self, handle: NamespaceHandle, prompt: Prompt, here: int, ends_at: float) -> bool:
        plan = WaitPlan(None, FetchPolicy(len(prompt.keys), max(0.0, ends_at - self._clock()), self.block_tokens))
        return handle.has_courier and wait_for_blocks(handle, prompt, "", plan, here)

    def store(
        self, before: Sequence[bytes], names: Sequence[bytes], pages: Pages, deadline_ms: float
    ) -> tuple[list[bool], int]:
        """Store chunks; returns which of them are held now, those stored before, or in flight, included, and how many
        are new. before: the chunks before them, from the beginning on, as far as they are known. If they cannot be
        stored behind those, each is stored by itself: the last ones first, since what was used last is evicted last."""
        held, ends_at, in_flight, new = [False] * len(names), self._clock() + deadline_ms / 1000, 0, 0
        with self._outcomes.caught():
            handle = self.writing(deadline_ms / 1000)
            if handle is not None and names:
                chain, known = self.prompt(handle, [*before, *names]), len(before)
                result = handle.put(chain, pages, known * self.block_tokens, deadline_ms=deadline_ms)
                new = result.stored
                stopped = len(names) if result.stopped_at is None else max(0, result.stopped_at - known)
                if result.stopped_at is not None and result.in_flight:  # another engine holds these already
                    in_flight = min(len(names), max(0, result.stopped_at + result.in_flight - known)) - stopped
                    stopped += in_flight
                held[:stopped] = [True] * stopped
                for at in range(len(names) - 1, stopped - 1, -1) if result.reason in _APART else ():
                    left_ms = max(0.0, 1000 * (ends_at - self._clock()))
                    alone = Prompt(self.block_tokens, chain.keys[known + at : known + at + 1]), pages.cut(at, at + 1)
                    result = handle.put(*alone, deadline_ms=left_ms)
                    held[at], new = result.stopped_at is None or result.in_flight > 0, new + result.stored
                    in_flight += result.in_flight
                self._outcomes.told(result.reason)
        present, failed = sum(held) - in_flight - new, len(held) - sum(held)
        self._outcomes.count(stored=new, present=present, in_flight=in_flight, failed_stores=failed)
        return held, new

    def clear(self) -> bool:
        """Evict them all, from every tier and for all engines; returns whether that was done."""
        with self._outcomes.caught():
            if (handle := self.handle) is not None:
                handle.door.call(m.Drop(handle.number), m.Counted)
                return True
        return False

    def close(self) -> None:
        for opener in (self._reading, self._writing):
            opener.close(CLOSE_SECONDS)


# For a thread that must not wait --------------------------------------------------------------------------------------


POLL_SECONDS = 0.0002
"""Between two polls of submitted requests."""
IN_FLIGHT = 48
"""Look-ups and leases submitted at a time; a connection may have 64 unanswered requests."""


class ChunkState(Enum):
    """HELD: pinned in memory and verified, until it is loaded or forgotten."""

    PENDING = auto()
    HELD = auto()
    MISSING = auto()


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Named upper bounds. asked: chunks asked for or held at a time; beyond that they are missing. queued_stores:
    chunks of several jobs that wait to be stored, whose slots the engine cannot use; beyond that they fail.
    load_threads, save_threads: that copy, in each space. lease_ms: how long a chunk's promotion from a lower tier may
    take. ask_seconds: beyond that, how long an answer may take before the chunk is missing. hold_seconds: how long a
    chunk is held without being loaded. drain_seconds: after which `drain` gives up what has not begun."""

    asked: int = 4096
    queued_stores: int = 1024
    load_threads: int = 2
    save_threads: int = 2
    lease_ms: float = 50.0
    ask_seconds: float = 0.5
    hold_seconds: float = 10.0
    drain_seconds: float = 10.0


@dataclass(eq=False, slots=True)
class ChunkJob:
    """good: names of the chunks that were copied and verified, or stored; failed: all others. size_bytes: of the good
    ones. left: undecided ones. since, seconds: when it was submitted, and how long it took."""

    number: int
    owner: str
    is_load: bool
    since: float
    left: int
    good: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False, slots=True)
class _Asked:
    """A chunk that some request waits for."""

    name: bytes
    space: ChunkSpace
    handle: NamespaceHandle
    since: float
    owners: set[str] = field(default_factory=set)
    state: ChunkState = ChunkState.PENDING
    match: PendingReply[Match] | None = None
    wait: BlockWait | None = None
    leasing: PendingReply[Lease] | None = None
    lease: Lease | None = None


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy of one chunk; of a store also its `kvstore.client.handle.Reading`."""

    job: ChunkJob
    space: ChunkSpace | None
    name: bytes
    lease: Lease | None = None
    is_given_up: bool = False
    is_good: bool = False

    def begin(self) -> bool:
        return not self.is_given_up

    def end(self) -> None:
        """`drain` waits for all of the copy before the slot is used again."""


class ChunkStore:
    """Chunks in the store, for one engine. One thread of the engine calls everything."""

    def __init__(
        self,
        spaces: Sequence[ChunkSpace],
        space_of: Callable[[bytes], int],
        limits: ChunkLimits,
        outcomes: ChunkOutcomes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """space_of: the space that a chunk's name belongs to; -1 for none. The spaces are closed with this."""
        self.limits, self._spaces, self._space_of, self._outcomes = limits, spaces, space_of, outcomes
        self._clock, self._answer_seconds = clock, limits.ask_seconds + limits.lease_ms / 1000
        self._asked: dict[bytes, _Asked] = {}
        self._of_owner: dict[str, set[bytes]] = {}
        self._missing: dict[str, set[bytes]] = {}
        self._parked = ParkedWaits()
        self._waiting, self._under_way = deque[_Asked](), list[_Asked]()
        self._jobs: list[ChunkJob] = []
        self._copies, self._loads = dict[_Copy, Future[None]](), set[Future[None]]()
        self._ended = deque[_Copy]()
        self._is_closed, self._swept = False, clock()
        self._loaders = ThreadPoolExecutor(limits.load_threads * len(spaces), "kv-chunk-load")
        self._savers = ThreadPoolExecutor(limits.save_threads * len(spaces), "kv-chunk-save", lower_priority)

    def ask(self, owner: str, name: bytes) -> ChunkState:
        """Whether a chunk can be loaded now. The first call asks the store; a missing one stays so for its owner."""
        if name in self._missing.get(owner, ()):
            return ChunkState.MISSING
        asked = self._asked.get(name)
        if asked is None:
            if (found := self._reached(name)) is None:
                return ChunkState.MISSING
            if len(self._asked) >= self.limits.asked:
                self._outcomes.count(refused_asks=1)
                return ChunkState.MISSING
            self._asked[name] = asked = _Asked(name, *found, self._clock())
            self._waiting.append(asked)
        asked.owners.add(owner)
        self._of_owner.setdefault(owner, set()).add(name)
        if asked.state is ChunkState.PENDING and self._clock() > asked.since + self._answer_seconds:
            self._answer(asked, None)
        if asked.state is ChunkState.MISSING:
            self._let_go(asked)
            for each in asked.owners:
                self._missing.setdefault(each, set()).add(name)
        return asked.state

    def forget(self, owner: str) -> None:
        """An owner asks no more: chunks that only it asked for are released."""
        self._missing.pop(owner, None)
        for name in self._of_owner.pop(owner, ()):
            asked = self._asked.get(name)
            if asked is not None:
                asked.owners.discard(owner)
                if not asked.owners:
                    self._let_go(asked)

    def proceed(self, seconds: float = 0.0) -> None:
        """Advance pending requests, and wait at most `seconds` for answers: without that wait, an idle engine calls so
        often that other threads hardly get the interpreter's lock."""
        for _ in range(1 + int(seconds / POLL_SECONDS)):
            room = min(IN_FLIGHT - len(self._under_way), len(self._waiting))
            burst = [self._waiting.popleft() for _ in range(room)]
            self._parked.read()
            self._under_way += reversed(burst)  # from a prefix's end, so that its beginning is used last, more or less
            self._under_way = [asked for asked in self._under_way if not self._is_answered(asked)]
            if not seconds or not (self._under_way or self._waiting):
                return
            time.sleep(POLL_SECONDS)

    def _is_answered(self, asked: _Asked) -> bool:
        if asked.state is not ChunkState.PENDING:
            return True
        handle, lease = asked.handle, None
        with self._outcomes.caught():
            asked.match = asked.match or handle.submit_match(asked.space.prompt(handle, [asked.name]))
            if (match := asked.match.poll()) is None:
                return False
            if asked.leasing is None:
                self._outcomes.told(match.reason)
            if not match.blocks and self._is_fetching(asked, handle):
                return False
            if match.blocks:
                asked.leasing = asked.leasing or handle.submit_lease(match, deadline_ms=self.limits.lease_ms)
                if (lease := asked.leasing.poll()) is None:
                    return False
        self._answer(asked, lease)
        return True

    def _is_fetching(self, asked: _Asked, handle: NamespaceHandle) -> bool:
        wait = asked.wait
        if wait is None:
            plan = WaitPlan(None, FetchPolicy(1, self.limits.lease_ms / 1000, handle.block_tokens))
            prompt = asked.space.prompt(handle, [asked.name])
            asked.wait = wait = BlockWait(handle, prompt, "", plan, self._parked)
            return wait.goes_on(0)
        if wait.is_over or not wait.may_look() or wait.is_over:
            return not wait.is_over
        wait.is_over, asked.match = True, handle.submit_match(asked.space.prompt(handle, [asked.name]), counts=False)
        return True

    def _answer(self, asked: _Asked, lease: Lease | None) -> None:
        asked.lease = lease
        asked.state = ChunkState.HELD if lease is not None and lease.blocks else ChunkState.MISSING
        self._outcomes.count(**{asked.state.name.lower(): 1})

    def _let_go(self, asked: _Asked) -> None:
        self._asked.pop(asked.name, None)
        if asked.state is ChunkState.PENDING:
            asked.state = ChunkState.MISSING
        for pending in (asked.match, asked.leasing):
            if pending is not None:
                pending.cancel()
        if asked.wait is not None:
            asked.wait.end()
        self._release(asked.lease)

    def load(self, number: int, owner: str, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Copy chunks into slots, each verified. Chunks that are not held fail."""
        self._jobs.append(job := ChunkJob(number, owner, True, self._clock(), len(names)))
        for name, slot in zip(names, slots, strict=True):
            asked = self._asked.get(name)
            if asked is None or asked.state is not ChunkState.HELD or asked.lease is None:
                self._end(_Copy(job, None, name))
                continue
            del self._asked[name]
            copy, pages = _Copy(job, asked.space, name, asked.lease), asked.space.pages([slot])
            self._copies[copy] = future = self._loaders.submit(self._get, copy, asked.lease, asked.handle, pages)
            self._loads.add(future)

    def store(self, number: int, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Put the chunks in these slots, a prefix in order; stored ones are skipped. Without a slot they fail. If the
        queue lacks room for all, the first ones are taken; all where nothing waits, since their engine keeps a job's
        slots to its end. The last of these are begun first: what was used last is evicted last, and a prefix is
        useful without its end, but not without its beginning."""
        queued = len(self._copies) - len(self._loads)
        is_open = not self._is_closed and all(space.handle is not None for space in self._spaces)
        room = max(0, self.limits.queued_stores - queued) if queued else len(slots)
        taken = min(room, len(slots)) if is_open else 0
        self._outcomes.count(refused_stores=len(names) - taken)
        self._jobs.append(job := ChunkJob(number, "", False, self._clock(), taken, failed=list(names[taken:])))
        for name, slot in reversed(list(zip(names[:taken], slots, strict=False))):
            space, _ = self._reached(name) or (None, None)
            copy = _Copy(job, space, name)
            if space is None:
                self._end(copy)
            else:
                self._copies[copy] = self._savers.submit(self._put, copy, space, space.pages([slot]))

    def _get(self, copy: _Copy, lease: Lease, handle: NamespaceHandle, pages: Pages) -> None:
        with self._outcomes.caught():
            copy.is_good = handle.get(lease, into=pages).tokens >= pages.tokens
        self._ended.append(copy)

    def _put(self, copy: _Copy, space: ChunkSpace, pages: Pages) -> None:
        with self._outcomes.caught():
            wait(tuple(self._loads))  # requests wait for loads; none waits for a store
            if (handle := space.writing(OPEN_SECONDS)) is not None and copy.begin():
                prompt = space.prompt(handle, [copy.name])
                result = handle.put(prompt, pages, reading=copy, deadline_ms=SAVE_DEADLINE_MS)
                self._outcomes.told(result.reason)
                copy.is_good = result.reason is None
        self._ended.append(copy)

    def _reached(self, name: bytes) -> tuple[ChunkSpace, NamespaceHandle] | None:
        place = self._space_of(name)
        space = self._spaces[place] if 0 <= place < len(self._spaces) and not self._is_closed else None
        handle = space.handle if space is not None else None
        return (space, handle) if space is not None and handle is not None else None

    def finished(self) -> list[ChunkJob]:
        """Jobs that ended since the last call. Chunks that could not be loaded are missing for their owner from now on.
        While loads are under way, and none is over, it waits a moment for one."""
        now = self._clock()
        if now - self._swept >= 1.0:  # a request was held up, or its engine had no slot for it
            self._swept = now
            for asked in [it for it in self._asked.values() if now - it.since > self.limits.hold_seconds]:
                self._let_go(asked)
        if self._loads and not self._ended:  # else an engine that only waits would keep the interpreter's lock
            wait(self._loads, IDLE_WAIT_SECONDS, FIRST_COMPLETED)
        self._collect()
        jobs = [job for job in self._jobs if not job.left]
        self._jobs = [job for job in self._jobs if job.left]
        for job in jobs:
            job.seconds = now - job.since
            if job.is_load and job.owner in self._of_owner:
                self._missing.setdefault(job.owner, set()).update(job.failed)
        return jobs

    def drain(self) -> None:
        """Return when no job is left and nothing touches the memory. A begun copy is never broken off; a store that has
        not begun after `drain_seconds` fails."""
        wait(self._copies.values(), self.limits.drain_seconds)
        self._give_up(stores_only=True)
        wait(self._copies.values())
        self._collect()

    def close(self) -> None:
        """End all threads that touch the memory, and release all chunks. Jobs that have not begun fail."""
        if self._is_closed:
            return
        self._is_closed = True
        self._give_up(stores_only=False)
        for threads in (self._loaders, self._savers):
            threads.shutdown()
        self._collect()
        for asked in list(self._asked.values()):
            self._let_go(asked)
        for space in self._spaces:
            space.close()

    def _collect(self) -> None:
        while self._ended:
            copy = self._ended.popleft()
            self._loads.discard(self._copies.pop(copy))
            self._end(copy)

    def _end(self, copy: _Copy) -> None:
        job, space, is_good = copy.job, copy.space, copy.is_good
        self._release(copy.lease)
        (job.good if is_good else job.failed).append(copy.name)
        job.size_bytes += space.chunk_bytes if is_good and space is not None else 0
        outcomes = ("failed_loads", "loaded") if job.is_load else ("failed_stores", "stored")
        self._outcomes.count(**{outcomes[is_good]: 1})
        job.left -= 1

    def _give_up(self, *, stores_only: bool) -> None:
        for copy, future in self._copies.items():
            if not (stores_only and copy.job.is_load):
                copy.is_given_up = True
                if future.cancel():
                    self._ended.append(copy)

    def _release(self, lease: Lease | None) -> None:
        with self._outcomes.caught():
            if lease is not None:
                lease.release()
