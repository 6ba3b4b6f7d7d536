"""Fetches blocks: a window of slots at a time, from one source after the other, each block once.

    window: reserve > fill from the source > adopted as frames come > the next window
    reserved by another fetch: look again, until its blocks are here or are given up
    source: it has no more, is busy, or failed > the next one; at most two nodes, then the remote tier

A fetch ends when all blocks are here, when its time is over, no engine waits any more, or no source is left; blocks
that came by then stay. A node that is still publishing (a ticket's) is asked again while there is time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.block.account import MissReason
from kvstore.client.connection import Unavailable
from kvstore.courier.figures import Figures
from kvstore.courier.link import CourierRun, CourierSpace
from kvstore.courier.locate import Locator, Places
from kvstore.courier.peer_source import PeerSource
from kvstore.courier.source import Filled, ReservedWindow, Source, Stops
from kvstore.protocol.courier import FetchQuestion, QuestionAnswered
from tiering.clock import Clock

WINDOW_BYTES, WINDOW_BLOCKS = 128 << 20, 256
"""Reserved at a time, at least one block."""
AGAIN_SECONDS, LONGEST_AGAIN_SECONDS = 0.005, 0.05
"""Pauses before a busy sidecar or node, or one that is still publishing, is asked again: the first, and the longest."""
LONGEST_SECONDS = 60.0
PASSING = frozenset({MissReason.IN_FLIGHT, MissReason.BUSY, MissReason.DEADLINE})
"""Reasons after which the sidecar may soon have slots again."""
_SAYS_LITTLE = frozenset({MissReason.BUSY, MissReason.UNSUPPORTED})

_log = logging.getLogger(__name__)


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
    """Of one courier. Workers call `fetch`."""

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
