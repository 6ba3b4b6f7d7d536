"""Where the rest of a chain is: on other nodes, or in the remote tier. An engine is told what is known in a few
milliseconds; the look-up goes on.

    hints of the directory > at most two nodes, and those of `network.peers` > Has, all at once > blocks by node
    the remote tier        > which names exist                                                  > blocks
    the engine's time is over > told what has come by then
    all have answered, or the look-up's own limit > known for a second, for the next request of that chain

A look-up is never cut short for an engine's sake: a connection that is closed because its answer is late makes the next
answer late, too. Requests of one chain share a look-up. Findings are kept for the fetch that may follow. A ticket's
node is asked first, if it is a node of the pool: blocks that it promises count as there, since it may still be
publishing them. A `Fetcher` fetches what was found.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeAlias

from kvstore.block.account import HeldElsewhere, HitTier, Holder, MissReason
from kvstore.client.connection import Unavailable
from kvstore.courier.dialling import NamedPeers
from kvstore.courier.directory import ValkeyDirectory
from kvstore.courier.figures import DIRECTORY, Figures
from kvstore.courier.link import CourierRun, CourierSpace
from kvstore.courier.sources import (
    MOST_ASKED_KEYS,
    Filled,
    PeerSource,
    PeerWays,
    RemoteSource,
    RemoteWays,
    ReservedWindow,
    Source,
    Stops,
)
from kvstore.pool.choice import MOST_ASKED, REMOTE_PRIOR
from kvstore.pool.directory import (
    CHUNK_BLOCKS,
    MAX_HEADS,
    AliveTable,
    DirectoryDown,
    NodeEntry,
    chunk_heads,
    hint_name,
    leading_places,
)
from kvstore.protocol.courier import FetchQuestion, LocateQuestion, QuestionAnswered
from tiering.clock import Clock
from tiering.remote.driver import RemoteFault
from tiering.remote.workers import RemoteCall

LOOK_SECONDS = 0.003
"""For all of a `Locate`: the sidecar answers "nothing" after `LOCATE_SECONDS`."""
LIMIT_SECONDS = 1.0
"""For a look-up, whether or not an engine waits for it."""
LOOK_THREADS, MOST_LOOKS = 16, 64
"""Look-ups at once, and those that wait for a thread besides."""
DIRECTORY_SECONDS, HAS_SECONDS = 0.002, 0.0025
"""For a router's question; and for the first nodes' answers, if one of them is late."""
MOST_NAMED = 8
"""Nodes of `network.peers` that are asked at once."""
MOST_PLACES = 16
"""In a prompt, at which the directory is asked. Where all nodes have it a longer look-up would not end in its time, and
three in a row stop all tenants' look-ups for a while."""
MOST_KEPT = 4096
RECENT_SECONDS, MOST_RECENT = 1.0, 256
"""How long a finding about a chain, perhaps too late for its own request, serves others; and how many are kept."""

_Chain: TypeAlias = tuple[bytes, bytes, int, bytes]
"""Namespace, last key, blocks that are here; and a ticket's node and run of it."""


@dataclass
class Places:
    """sources: to ask in this order. blocks, tier, milliseconds, where: the best one's. reason, detail: why none."""

    sources: list[Source] = field(default_factory=list)
    blocks: int = 0
    tier: HitTier | None = None
    milliseconds: float = 0.0
    where: str = ""
    reason: MissReason | None = MissReason.ABSENT
    detail: str = ""

    def answer(self, number: int, present: int) -> QuestionAnswered:
        """To a question of that number. present: blocks that are here."""
        blocks = max(present, self.blocks) if self.sources else present
        told = self.where, self.reason, self.detail[:1000]
        return QuestionAnswered(number, blocks, self.tier, self.milliseconds, *told)

    def add(self, source: Source, blocks: int, milliseconds: float, *, is_best: bool) -> None:
        """At the end, or as the best one at the beginning."""
        self.sources.insert(0 if is_best else len(self.sources), source)
        if is_best:
            self.blocks, self.milliseconds, self.tier, self.where = blocks, milliseconds, source.tier, source.name


@dataclass(eq=False, slots=True)
class _Look:
    """A look-up in progress, of the blocks behind a question's first `present`. wanted_by: then no engine waits any
    more; ends_at: its own limit. nearer: what the nodes say, as far as is known. remote: the call, if there is a
    tier."""

    space: CourierSpace
    question: LocateQuestion | FetchQuestion
    wanted_by: float
    ends_at: float
    nearer: Places = field(
        default_factory=lambda: Places(
            reason=MissReason.DEADLINE, detail="it was not known in the time that an engine waits"
        )
    )
    remote: RemoteCall[int] | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def chain(self) -> _Chain:
        asked = self.question
        return self.space.id, asked.keys[-1], asked.present, asked.node + asked.incarnation


class Locator:
    """Of one courier. Thread-safe."""

    def __init__(
        self,
        table: AliveTable,
        named: NamedPeers | None,
        directory: ValkeyDirectory | None,
        peers: PeerWays | None,
        remote: RemoteWays | None,
        clock: Clock,
    ) -> None:
        self._table = table
        self._named = named
        self._directory = directory
        self._peers = peers
        self._remote = remote
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Places] = OrderedDict()
        self._recent: OrderedDict[_Chain, tuple[float, Places]] = OrderedDict()
        self._looks: dict[_Chain, _Look] = {}
        self._threads = ThreadPoolExecutor(LOOK_THREADS, "kv-look")
        self._hinting = ThreadPoolExecutor(LOOK_THREADS, "kv-hints")

    def close(self) -> None:
        for one in (self._threads, self._hinting):
            one.shutdown(wait=False, cancel_futures=True)

    def keep(self, tenant: str, number: int, places: Places) -> None:
        """Keep places for the fetch that names that question; question numbers are per tenant."""
        with self._lock:
            self._kept[tenant, number] = places
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)

    def kept(self, tenant: str, number: int) -> Places | None:
        """Take them out."""
        with self._lock:
            return self._kept.pop((tenant, number), None)

    def find(self, space: CourierSpace, question: LocateQuestion | FetchQuestion, seconds: float) -> Places:
        """The places of the blocks behind the first `present`, as far as they are known after `seconds`."""
        now = self._clock.monotonic_seconds()
        mine = _Look(space, question, now + seconds, now + seconds)
        with self._lock:
            found_at, recent = self._recent.get(mine.chain, (-inf, Places()))
            if now - found_at < RECENT_SECONDS:
                return replace(recent, sources=list(recent.sources))
            if mine.chain not in self._looks and len(self._looks) >= MOST_LOOKS:
                return Places(reason=MissReason.BUSY, detail=f"{MOST_LOOKS} look-ups are on their way")
            if len(self._looks) < LOOK_THREADS // 2:  # else a source that stalls would take all threads
                mine.ends_at = now + max(seconds, LIMIT_SECONDS)
            look = self._looks.setdefault(mine.chain, mine)
        if look is mine:
            try:
                self._threads.submit(self._look, look)
            except RuntimeError:  # it is closed
                self._over(look)
        look.is_over.wait(seconds)
        return self._composed(look)

    def _look(self, look: _Look) -> None:
        try:
            if self._remote is not None:
                limit_at = max(look.ends_at, self._clock.monotonic_seconds() + LIMIT_SECONDS)
                keys = look.question.keys[look.question.present :]
                look.remote = self._remote.has(look.space, keys, look.wanted_by, limit_at)
            if self._peers is not None:
                self._find_peers(look, self._peers)
            else:
                look.nearer = Places()
            if look.remote is not None:
                look.remote.is_settled(look.ends_at - self._clock.monotonic_seconds())
            places = self._composed(look)
            if places.sources and not look.question.node:  # a ticket's promise is for its own request only
                with self._lock:
                    self._recent[look.chain] = self._clock.monotonic_seconds(), places
                    while len(self._recent) > MOST_RECENT:
                        self._recent.popitem(last=False)
        finally:
            self._over(look)

    def _over(self, look: _Look) -> None:
        with self._lock:
            del self._looks[look.chain]
        look.is_over.set()

    def _composed(self, look: _Look) -> Places:
        call, nearer = look.remote, look.nearer
        places = replace(nearer, sources=list(nearer.sources))
        if call is not None and self._remote is not None:
            if call.is_settled():
                self._add_remote(places, self._remote, call, look)
            elif not places.sources:
                places.reason, places.detail = MissReason.DEADLINE, f"{self._remote.name} did not answer in time"
        if places.sources:
            places.reason = None
        return places

    def holders(
        self, run: CourierRun, namespace: bytes, keys: Sequence[bytes], seconds: float, *, are_own: bool
    ) -> HeldElsewhere:
        """Which other nodes have leading chunks of a prompt, for a router, which may send it to any of them. are_own:
        the keys were made with the tenant's identity key. Others may be another tenant's: for these each node is asked,
        since it looks at the tenant's own blocks alone."""
        if self._directory is None:
            return HeldElsewhere(left_out="no directory is configured here")
        most = CHUNK_BLOCKS * MAX_HEADS if are_own else MOST_ASKED_KEYS
        heads = leading_places(chunk_heads(namespace, keys[:most]), MOST_PLACES)
        ends_at = self._clock.monotonic_seconds() + seconds
        try:
            asking = self._hinting.submit(self._directory.holders, heads, max(seconds, LIMIT_SECONDS))
            found = asking.result(seconds if are_own else DIRECTORY_SECONDS)
        except (DirectoryDown, FutureTimeoutError, RuntimeError):  # RuntimeError: it is closed
            return HeldElsewhere(left_out="the directory did not answer in time")
        alive = self._table.alive(self._clock.monotonic_seconds())
        fit = [one for one in found if one.node in alive and run.fingerprint in alive[one.node].fingerprints]
        if not are_own:
            fit, is_whole = self._proven(run, namespace, keys, fit, ends_at)
            if not is_whole:
                return HeldElsewhere(fit, "not all nodes answered in time")
        is_cut = len(keys) - most >= CHUNK_BLOCKS
        return HeldElsewhere(fit, f"only the first {most} blocks are looked up" if is_cut else "")

    def _proven(
        self, run: CourierRun, namespace: bytes, keys: Sequence[bytes], hinted: Sequence[Holder], ends_at: float
    ) -> tuple[list[Holder], bool]:
        space, alive = run.by_id.get(namespace), self._table.alive(self._clock.monotonic_seconds())
        asked = [one for one in hinted[:MOST_NAMED] if one.node in alive]
        left = ends_at - self._clock.monotonic_seconds()
        counts: list[int | None] = [None] * len(asked)
        if asked and space is not None and self._peers is not None and left > 0:
            counts = self._peers.has(space, [alive[one.node] for one in asked], keys, 0, left)
        proven = [one._replace(blocks=min(one.blocks, of)) for one, of in zip(asked, counts, strict=True) if of]
        return proven, len(asked) == len(hinted) and None not in counts

    def _add_remote(self, places: Places, remote: RemoteWays, call: RemoteCall[int], look: _Look) -> None:
        try:
            found = call.result()
        except RemoteFault as fault:
            if not places.sources:
                places.reason, places.detail = MissReason(fault.reason), str(fault)
            return
        if not found:
            return
        now, blocks = self._clock.monotonic_seconds(), look.question.present + found
        size = found * look.space.block_bytes
        milliseconds = remote.figures.speeds.milliseconds(remote.name, size, now, REMOTE_PRIOR)
        is_better = (blocks, -milliseconds) > (places.blocks, -places.milliseconds)
        is_best = is_better and not any(one.publishes for one in places.sources)
        places.add(RemoteSource(remote), blocks, milliseconds, is_best=is_best)

    def _find_peers(self, look: _Look, peers: PeerWays) -> None:
        began_at = self._clock.monotonic_seconds()
        hinting = self._hinting.submit(self._hinted, look, look.ends_at - began_at)
        for seconds in (DIRECTORY_SECONDS, look.ends_at - began_at):
            hinted: list[Holder] = []
            places = Places()
            try:
                hinted = hinting.result(seconds)
            except DirectoryDown as down:
                places.reason, places.detail = MissReason.UNREACHABLE, f"the directory does not answer: {down}"
            except FutureTimeoutError:
                places.reason, places.detail = MissReason.DEADLINE, "the directory did not answer in time"
            now = self._clock.monotonic_seconds()
            self._ask_nodes(look, peers, places, hinted)
            if hinting.done():
                break
        if self._directory is not None:
            is_late = not hinting.done() or now > look.wanted_by
            peers.figures.answered(DIRECTORY, "the directory", now - began_at, is_late)

    def _ask_nodes(self, look: _Look, peers: PeerWays, places: Places, hinted: Sequence[Holder]) -> None:
        run, space, question = look.space.run, look.space, look.question
        keys, present, node = question.keys, question.present, question.node
        began_at, alive = self._clock.monotonic_seconds(), self._table.alive(self._clock.monotonic_seconds())
        chosen = peers.choice.choose(
            hinted, alive, hint_name(space.id, keys[-1]), space.block_bytes, began_at, run.fingerprint
        )
        asked = {one.node: alive[one.node] for one in chosen}
        for other in self._named.nodes() if self._named is not None else ():
            entry = alive.get(other)
            if entry is None or other in asked or len(asked) >= MOST_ASKED + MOST_NAMED:
                continue
            if run.fingerprint not in entry.fingerprints:
                peers.mismatch(entry, run)
            elif not peers.choice.is_banned(entry.node, entry.incarnation, began_at):
                asked[other] = entry
        promised = alive.get(node) if node and node != run.node else None
        if promised is not None and promised.incarnation == question.incarnation:
            asked.setdefault(node, promised)
        elif node and node != run.node:
            places.reason, places.detail, promised = MissReason.STALE_HINT, "the ticket's node is not in the pool", None
        # A hint of the last chunk says nothing of the tail, which the node may have as well.
        said = {one.node: len(keys) if len(keys) - one.blocks < CHUNK_BLOCKS else one.blocks for one in chosen}
        entries = list(asked.values())
        answers = peers.ask(space, entries, keys[present:], present, max(0.0, look.ends_at - began_at))
        late: list[NodeEntry] = []
        for until in (min(began_at + HAS_SECONDS, look.wanted_by), look.wanted_by, look.ends_at):
            counts = answers(max(0.0, until - self._clock.monotonic_seconds()))
            found = []
            for entry, count in zip(entries, counts, strict=True):
                blocks = present + count if count is not None else said.get(entry.node, 0)
                if blocks > present:
                    found.append(Holder(entry.node, entry.incarnation, blocks, HitTier.DRAM))
            look.nearer = self._placed(look, peers, replace(places, sources=[]), found, promised, alive)
            if chosen and not found:
                look.nearer.reason = MissReason.STALE_HINT
                look.nearer.detail = "the directory names nodes that have it no more"
            if None not in counts:
                break
            if until == look.wanted_by and self._clock.monotonic_seconds() >= until:
                late = [entry for entry, count in zip(entries, counts, strict=True) if count is None]
        now = self._clock.monotonic_seconds()
        for entry, count in zip(entries, counts, strict=True):
            peers.figures.count(entry.node, lookups=1, found=bool(count))
            if began_at < look.wanted_by:
                name = f"node {entry.node.hex()[:12]}"
                peers.figures.answered(entry.node, name, now - began_at, entry in late)

    def _placed(
        self,
        look: _Look,
        peers: PeerWays,
        places: Places,
        found: Sequence[Holder],
        promised: NodeEntry | None,
        alive: Mapping[bytes, NodeEntry],
    ) -> Places:
        keys, present = look.question.keys, look.question.present
        size, now = look.space.block_bytes, self._clock.monotonic_seconds()
        head = hint_name(look.space.id, keys[-1])
        best = peers.choice.choose(found, alive, head, size, now, look.space.run.fingerprint)
        speeds = peers.figures.speeds
        if promised is not None:
            milliseconds = speeds.milliseconds(promised.node, (len(keys) - present) * size, now)
            places.add(PeerSource(promised, peers, publishes=True), len(keys), milliseconds, is_best=True)
        for one in best:
            if promised is None or one.node != promised.node:
                milliseconds = speeds.milliseconds(one.node, (one.blocks - present) * size, now)
                places.add(PeerSource(alive[one.node], peers), one.blocks, milliseconds, is_best=not places.sources)
        return places

    def _hinted(self, look: _Look, seconds: float) -> list[Holder]:
        heads = leading_places(chunk_heads(look.space.id, look.question.keys, look.question.present), MOST_PLACES)
        return self._directory.holders(heads, seconds) if self._directory is not None and heads else []


WINDOW_BYTES, WINDOW_BLOCKS = 128 << 20, 256
"""Reserved at a time, at least one block."""
AGAIN_SECONDS, LONGEST_AGAIN_SECONDS = 0.005, 0.05
"""Pauses before a busy sidecar or node, or one that is still publishing, is asked again: the first, and the longest."""
LONGEST_SECONDS = 60.0
PASSING = frozenset({MissReason.IN_FLIGHT, MissReason.BUSY, MissReason.DEADLINE})
"""Reasons after which the sidecar may soon have slots again."""
_SAYS_LITTLE = frozenset({MissReason.BUSY, MissReason.UNSUPPORTED})


@dataclass(eq=False)
class FetchJob:
    """A fetch in progress. reached: blocks that are here. invited: the node that offered it, if no engine waits: then
    only that node is asked, and the fetch ends as soon as there is no room. pause: before the sidecar is next asked for
    slots that it did not have."""

    run: CourierRun
    question: FetchQuestion
    stops: Stops
    reached: int
    reason: MissReason | None = None
    detail: str = ""
    source: Source | None = None
    invited: PeerSource | None = None
    pause: float = AGAIN_SECONDS

    def misses(self, reason: MissReason | None, detail: str) -> None:
        """Record why there are no more; of several sources' reasons, the most specific."""
        if self.reason is None or self.reason in _SAYS_LITTLE:
            self.reason, self.detail = reason or MissReason.ABSENT, detail

    def answer(self) -> QuestionAnswered:
        tier = self.source.tier if self.source is not None else None
        where = self.source.name if self.source is not None else ""
        reason = (self.reason or MissReason.DEADLINE) if self.reached < len(self.question.keys) else None
        return QuestionAnswered(self.question.number, self.reached, tier, 0.0, where, reason, self.detail[:1000])


class Fetcher:
    """Of one courier. Workers call `fetch`, which fetches a window of slots at a time, from one source after the other,
    each block once.

        window: reserve > fill from the source > adopted as frames come > the next window
        reserved by another fetch: look again, until its blocks are here or are given up
        source: it has no more, is busy, or failed > the next one; at most two nodes, then the remote tier

    A fetch ends when all blocks are here, when its time is over, no engine waits any more, or no source is left; blocks
    that came by then stay. A node that is still publishing (a ticket's) is asked again while there is time.
    """

    def __init__(self, locator: Locator, figures: Figures, clock: Clock) -> None:
        self._locator = locator
        self._figures = figures
        self._clock = clock

    def job(self, run: CourierRun, question: FetchQuestion) -> FetchJob:
        """A job that begins now, and so does its time."""
        seconds = min(max(0.0, question.seconds), LONGEST_SECONDS)
        return FetchJob(run, question, Stops(self._clock.monotonic_seconds() + seconds), question.present)

    def fetch(self, job: FetchJob) -> QuestionAnswered:
        self._figures.begins(1)
        try:
            self._fetch(job)
        except Unavailable as away:
            job.misses(away.reason, away.detail)
        finally:
            self._figures.begins(-1)
        return job.answer()

    def _fetch(self, job: FetchJob) -> None:
        question, run = job.question, job.run
        space = run.space(question.namespace)
        places = Places([job.invited]) if job.invited else self._locator.kept(run.tenant, question.located)
        if places is None:
            places = self._locator.find(space, question, self._left(job) / 4)
        sources = list(places.sources)
        if not sources:
            job.misses(places.reason, places.detail)
        while job.reached < len(question.keys) and sources:
            if job.stops.over.is_set():
                return
            if self._left(job) <= 0:
                job.reason, job.detail = MissReason.DEADLINE, "it did not come in time"
                return
            if not self._window(job, space, sources):
                return

    def _left(self, job: FetchJob) -> float:
        return job.stops.ends_at - self._clock.monotonic_seconds()

    def _pause(self, job: FetchJob, seconds: float) -> None:
        job.stops.over.wait(min(seconds, max(0.0, self._left(job))))

    def _window(self, job: FetchJob, space: CourierSpace, sources: list[Source]) -> bool:
        keys, first, source = job.question.keys, job.reached, sources[0]
        if isinstance(source, PeerSource) and source.publishes and not self._is_published(job, space, source, sources):
            return True
        most = max(1, min(WINDOW_BLOCKS, WINDOW_BYTES // space.block_bytes))
        reply = space.reserve(keys[first - 1] if first else None, keys[first : first + most], first)
        if reply.present > first:
            job.reached = reply.present
        if not reply.reservation or reply.blocks[0] != job.reached:
            if reply.reservation:
                space.run.abort(reply.reservation)
            if job.reached > first:
                return True
            if reply.reason not in PASSING or job.invited is not None:
                job.misses(reply.reason, reply.detail or "the sidecar has no room for it")
                return False
            self._pause(job, job.pause)
            job.pause = min(2 * job.pause, LONGEST_AGAIN_SECONDS)
            return True
        job.pause = AGAIN_SECONDS
        window = ReservedWindow(space, reply, keys, source.tier)
        try:
            filled = source.fill(window, job.stops) if window.blocks else Filled(MissReason.UNREACHABLE, "no memory")
        finally:
            window.returned()
        if window.adopted:
            job.reached, job.source = window.first + window.adopted, source
        if isinstance(window.failed, Unavailable):
            raise window.failed
        if filled.reason is not None:
            self._ended(job, sources, filled)
        return True

    def _ended(self, job: FetchJob, sources: list[Source], filled: Filled) -> None:
        source = sources[0]
        if filled.reason is MissReason.BUSY and len(sources) == 1:
            self._pause(job, LONGEST_AGAIN_SECONDS)
            return
        gone = (MissReason.STALE_HINT, MissReason.BUSY)
        if isinstance(source, PeerSource) and source.publishes and filled.reason in gone:
            self._pause(job, AGAIN_SECONDS)
            return
        sources.pop(0)
        job.misses(filled.reason, filled.detail)

    def _is_published(self, job: FetchJob, space: CourierSpace, source: PeerSource, sources: list[Source]) -> bool:
        pause = AGAIN_SECONDS
        following: Sequence[bytes] = job.question.keys[job.reached :]
        while not job.stops.over.is_set() and self._left(job) > 0:
            found = source.has(space, following, job.reached, min(0.5, self._left(job)))
            if found:
                return True
            if found is None:
                sources.pop(0)
                job.misses(MissReason.UNREACHABLE, f"{source.name} does not answer")
                return False
            if len(sources) > 1:  # another node may have it already
                sources.append(sources.pop(0))
                return False
            self._pause(job, pause)
            pause = min(2 * pause, LONGEST_AGAIN_SECONDS)
        return False
