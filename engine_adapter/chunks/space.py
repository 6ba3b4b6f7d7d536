"""Chunks of one kind, found, loaded and stored by threads that may wait: an engine's own I/O threads.

A namespace is opened in the background, over two connections, so that stores do not delay look-ups. Any fault of the
store becomes a miss here, or a chunk that is not stored; nothing raises because of it. Must never import an engine.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from logging import getLogger
from typing import Annotated

import torch
from msgspec import Meta

from engine_adapter.chunks.layout import ChunkRun, chunk_key, chunk_planes
from engine_adapter.handoff.block_wait import WaitPlan, wait_for_blocks
from engine_adapter.handoff.fetch import FetchPolicy
from engine_adapter.paged.namespace_opener import ClosableStore, NamespaceOpener
from engine_adapter.paged.settings import Epoch
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.identity import Prompt
from kvstore.block.pages import Pages
from kvstore.client.edge import contained
from kvstore.client.handle import Lease, Match, NamespaceHandle
from kvstore.config import SettingsSection
from kvstore.protocol import messages as m
from kvstore.protocol.told import RequestTold

KNOWN_KEYS = 1 << 14
"""Names whose keys are remembered, since those before a batch are needed again with every batch."""
CLOSE_SECONDS = TELL_SECONDS = 1.0
POLL_SECONDS = 0.0001

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


def open_twice(opened: Callable[..., ClosableStore], url: str, engine: str) -> tuple[ClosableStore, ClosableStore]:
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
        stores: tuple[ClosableStore, ClosableStore],
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
                    time.sleep(POLL_SECONDS)
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
