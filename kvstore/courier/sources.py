"""Slots of the sidecar, for one reservation: filled by a source, checked here, adopted by the sidecar; and the contract
of sources, and the two that there are: other nodes, and the remote tier.

    reserve > a source fills the slots, block by block > each frame is checked > adopted as they come > the rest aborted

A frame counts when its header names this block and part and the payload has the header's digests; the sidecar then
checks the header's MAC. Slots that a source's call may still write stay lent; the reservation ends when the last of
these calls has returned.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import inf
from typing import Any

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import BadInput
from kvstore.client.connection import Unavailable
from kvstore.config import is_loopback
from kvstore.courier.dialling import Dialled, GrpcPeers, PeerAway
from kvstore.courier.figures import Figures
from kvstore.courier.link import ANSWER_SECONDS, CourierRun, CourierSpace
from kvstore.peers.reader import FrameCheck, FrameChecks, FramePuller, PullTransport
from kvstore.peers.tokens import HAS, NONCE_BYTES, OFFER, PULL, PullTerms, ask_mac, pull_secret
from kvstore.peers.transport import PeerFault, PullOffer, TimedOutPull, numeric_address, stays_here
from kvstore.pool.choice import (
    MOST_ASKED,
    PEER_PRIOR,
    REMOTE_PRIOR,
    HolderChoice,
    SourcePrior,
    UsableTransports,
    late_has_failed,
)
from kvstore.pool.directory import CHUNK_BLOCKS, AliveTable, NodeEntry
from kvstore.protocol import messages as m
from kvstore.protocol.courier import MAX_ADOPTED
from kvstore.protocol.messages import ReserveReply
from kvstore.wire import peer_pb2
from tiering.clock import Clock
from tiering.frame import HEADER_BYTES
from tiering.remote.driver import RemoteEngine, RemoteFault, WrongSize, remote_key
from tiering.remote.salts import NamespaceSalts
from tiering.remote.workers import RemoteCall, RemoteWorkers
from tiering.remote.writes import RemoteWrites

ADOPT_BYTES = 8 << 20
"""Adopted together: the engine reads these while the rest is on its way. The first block is adopted at once."""


class Forged(Exception):
    """The sidecar refused a frame as altered or misplaced; the text is one line for people."""


class Lending:
    """Memory that calls use, besides its holder: `over` is called once, when all have returned it. Thread-safe."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._lock = threading.Lock()
        self._count = 1  # to its holder

    def lend(self) -> None:
        """A call may use it until `returned`."""
        with self._lock:
            self._count += 1

    def returned(self) -> None:
        """A call, or the holder, is done with it. Any thread."""
        with self._lock:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self._over()
            del self._over  # a holder's own: its memory is unmapped now, not when the garbage collector comes


class ReservedWindow(Lending):
    """A reservation, as far as its blocks are consecutive. One thread fills it, and has it `returned` in the end; calls
    of its source may use the slots for longer."""

    def __init__(self, space: CourierSpace, reply: ReserveReply, keys: Sequence[bytes], tier: HitTier) -> None:
        """keys: of the whole chain. reply: of a reservation that begins with the chain's first missing block."""
        super().__init__(self._abort_rest)
        self.space = space
        self.tier = tier
        self.first = reply.blocks[0]
        count = next((at for at, one in enumerate(reply.blocks) if one != self.first + at), len(reply.blocks))
        columns = [column[:count] for column in space.run.frames(reply.places, writable=True)]
        count = min(map(len, columns), default=0)
        self.keys = list(keys[self.first : self.first + count])
        self.slots = [column[block] for block in range(count) for column in columns]
        self.adopted = 0
        """Blocks that are readable."""
        self.failed: Forged | Unavailable | None = None
        """Why no more is adopted: the source's fault, or the sidecar's."""
        self._reservation = reply.reservation
        self._blocks = len(reply.blocks)
        self._parts = len(columns)
        self._headers: list[bytes] = []  # of checked frames that are not adopted yet
        self._checks = FrameChecks(space.grant.stamps, self.keys)
        self.refused = False
        """Whether a frame came that does not belong in its slot."""

    @property
    def blocks(self) -> int:
        return len(self.keys)

    def check_of(self, at: int) -> FrameCheck:
        """The check of the frame that is to arrive in slot `at`."""
        return self._checks.of(at, self.slots[at])

    def check(self, at: int, frame: memoryview) -> bool:
        """Whether this is the frame that belongs in slot `at`; frames come in order. Adopts now and then."""
        return self.take(frame, is_right=self._checks(at, frame))

    def take(self, frame: memoryview, *, is_right: bool) -> bool:
        """The same, of the next frame, which was checked."""
        if not is_right:
            self.refused = True
            return False
        self._headers.append(bytes(frame[:HEADER_BYTES]))
        whole, further = divmod(len(self._headers), self._parts)
        size = whole * self.space.block_bytes
        if whole and not further and (not self.adopted or size >= ADOPT_BYTES or whole >= MAX_ADOPTED):
            self.adopt()
        return self.failed is None

    def adopt(self) -> None:
        """Have the sidecar adopt the checked frames. Faults are in `failed`."""
        whole = len(self._headers) // self._parts
        if not whole or self.failed is not None:
            return
        headers, self._headers = self._headers[: whole * self._parts], self._headers[whole * self._parts :]
        try:
            for part in range(self._parts):
                verb = m.Adopt(self._reservation, part, self.adopted, headers[part :: self._parts], self.tier)
                answer = self.space.run.connection.answer(verb, ANSWER_SECONDS).answer
                if isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT:
                    raise Forged(answer.text)
                if not isinstance(answer, m.Counted):
                    text = answer.text if isinstance(answer, m.Failed) else "an answer of another kind"
                    raise Unavailable(MissReason.UNREACHABLE, text)
                done = answer.blocks
        except (Forged, Unavailable) as failed:
            self.failed = failed
            return
        if done < self.adopted + whole:  # the reservation is over: dropped, purged or expired
            self.failed = Unavailable(MissReason.DISABLED, "the sidecar gave the slots to another client")
        self.adopted = max(self.adopted, min(done, self.adopted + whole))

    def _abort_rest(self) -> None:
        if self.adopted < self._blocks:
            self.space.run.abort(self._reservation)


@dataclass(frozen=True, slots=True)
class Filled:
    """A source's result for a window. reason: why there are no more blocks; None if it is full."""

    reason: MissReason | None = None
    detail: str = ""


NOT_WANTED = Filled(MissReason.DISABLED, "no engine waits for it any more")


class Stops:
    """Ends what a fetch waits for, from another thread. over: the fetch is to end."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None

    def waits_for(self, stop: Callable[[], None] | None) -> None:
        """A wait begins. stop: ends it; None once it is over."""
        with self._lock:
            self._stop = stop
        if stop is not None and self.over.is_set():
            stop()

    def end(self) -> None:
        self.over.set()
        with self._lock:
            stop = self._stop
        if stop is not None:
            stop()


class Source(ABC):
    """One source, for one fetch. counted_as: in figures and speeds. name: for people. publishes: whether a ticket says
    that it will have more soon."""

    tier: HitTier
    prior: SourcePrior = PEER_PRIOR

    def __init__(
        self, counted_as: Hashable, name: str, figures: Figures, clock: Clock, *, publishes: bool = False
    ) -> None:
        self.name, self.publishes = name, publishes
        self._counted_as, self._figures, self._clock = counted_as, figures, clock

    def fill(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Bring the blocks of the window that the source has, and have the sidecar adopt them."""
        began_at = self._clock.monotonic_seconds()
        filled = self._read(window, stops)
        window.adopt()
        if isinstance(window.failed, Forged):
            self._figures.refused(self._counted_as, "header")
            filled = self._forged(str(window.failed))
        if window.adopted:
            now, size = self._clock.monotonic_seconds(), window.adopted * window.space.block_bytes
            self._figures.came(self._counted_as, window.adopted, size)
            self._figures.speeds.learn(self._counted_as, size, now - began_at, now, self.prior)
        return filled

    @abstractmethod
    def _read(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Fill slots in order, each frame checked by the window."""

    def _forged(self, detail: str) -> Filled:
        """The sidecar refused what came."""
        return Filled(MissReason.CORRUPT, detail)


LEAVING_SECONDS = 2.0
"""For all of it; a supervisor kills a transfer agent 3 s after SIGTERM."""
MOST_OFFERED_CHUNKS, MOST_OFFERED_BYTES = 64, 256 << 20
"""By a leaving node; the latter also bounds what is taken from one offer."""
MOST_OFFERED_BLOCKS = MOST_OFFERED_CHUNKS * CHUNK_BLOCKS
HOT_USES = 2


def hottest(
    chains: Sequence[tuple[bytes, list[bytes]]], uses: Callable[[bytes], int]
) -> list[tuple[bytes, list[bytes]]]:
    """What a leaving node offers to others: the chunks that several requests named, each with its ancestors. Namespace
    and leading keys of chains, of the hottest chunks only; the hottest chain first. uses: how often a key
    was named, at least as often as the keys behind it."""
    chunks: dict[tuple[bytes, bytes], tuple[int, int]] = {}  # by its last key: how hot, and how deep
    for space, keys in chains:
        for end in _ends(keys):
            count = uses(keys[end - 1])
            if count >= HOT_USES:
                chunks[space, keys[end - 1]] = -count, end
    chosen = set(sorted(chunks, key=lambda one: chunks[one])[:MOST_OFFERED_CHUNKS])
    leading: dict[tuple[bytes, bytes], list[bytes]] = {}
    for space, keys in chains:
        most = 0
        for end in _ends(keys):
            if (space, keys[end - 1]) not in chosen:
                break
            most = end
        if most:
            leading[space, keys[most - 1]] = keys[:most]
    return [(one[0], leading[one]) for one in sorted(leading, key=lambda one: chunks[one])]


def _ends(keys: Sequence[bytes]) -> list[int]:
    return sorted({*range(CHUNK_BLOCKS, len(keys), CHUNK_BLOCKS), len(keys)})


OPEN_SECONDS = 1.0
"""For a node to answer, beyond its wait for promotions."""
BRING_UP_SECONDS = 1.0
TRY_SECONDS, FAIR_TRY_SECONDS = 1.0, 0.05
"""To reach a node over any transport but the last: some do not report that a port has no listener. If a try
shorter than the second times out, that does not count against the transport."""
MOST_ASKED_KEYS = 4096
"""In one `Has`."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerWays:
    """What all sources of this kind share. transports: by name. usable: their order."""

    calls: GrpcPeers
    transports: Mapping[str, PullTransport]
    usable: UsableTransports
    choice: HolderChoice
    figures: Figures
    clock: Clock
    new_token: Callable[[int], bytes]

    def has(
        self, space: CourierSpace, nodes: Sequence[NodeEntry], keys: Sequence[bytes], first: int, seconds: float
    ) -> list[int | None]:
        """How many of these blocks each of the nodes has, all asked at once; None for those that do not answer."""
        counts = self.ask(space, nodes, keys, first, seconds)(seconds)
        for entry, blocks in zip(nodes, counts, strict=True):
            self.figures.count(entry.node, lookups=1, found=bool(blocks))
        return counts

    def ask(
        self, space: CourierSpace, nodes: Sequence[NodeEntry], keys: Sequence[bytes], first: int, seconds: float
    ) -> Callable[[float], list[int | None]]:
        """As `has`. The returned function gives the answers that are there after so many seconds at most, also when it
        is called again."""
        calls = []
        for one in nodes:
            _, fields = self.signed(HAS, space, one, keys[:MOST_ASKED_KEYS], first)
            request = peer_pb2.HasRequest(**fields)
            calls.append((one, self.calls.has(Dialled(one.address, one.node), request, seconds)))

        def counts(within: float) -> list[int | None]:
            found: list[int | None] = []
            ends_at = self.clock.monotonic_seconds() + within
            for entry, call in calls:
                answer = self.calls.answer_of(call, ends_at)
                is_told = answer is not None and not (answer.reason and answer.reason != "absent")
                if answer is not None and answer.reason == MissReason.KEY_MISMATCH:
                    self.mismatch(entry, space.run)
                found.append(min(answer.blocks, len(keys)) if answer is not None and is_told else None)
            return found

        return counts

    def signed(
        self, what: bytes, space: CourierSpace, entry: NodeEntry, keys: Sequence[bytes], first: int = 0
    ) -> tuple[PullTerms, dict[str, Any]]:
        """The terms of a question about blocks, and its message's fields, with their MAC. what: as in `ask_mac`."""
        run = space.run
        terms = PullTerms(self.new_token(NONCE_BYTES), run.node, entry.node, space.id, first, keys)
        return terms, {
            "fingerprint": run.fingerprint,
            "namespace": space.id,
            "first_block": first,
            "keys": b"".join(keys),
            "node": run.node,
            "nonce": terms.nonce,
            "mac": ask_mac(space.grant.identity_key, terms, what),
        }

    def mismatch(self, entry: NodeEntry, run: CourierRun) -> None:
        """Record that a node has other keys of the tenant."""
        name = entry.node.hex()[:12]
        self.figures.faults.say(
            f"keys {name} {run.tenant}",
            f"node {name} at {entry.address} has other keys of tenant {run.tenant}: nothing is fetched from it "
            "(key_mismatch); give all nodes of a pool the same [keys] directory",
        )


class PeerSource(Source):
    """One node: permission to pull blocks, a connection to its data server, frames straight into slots."""

    tier = HitTier.PEER

    def __init__(self, entry: NodeEntry, ways: PeerWays, *, publishes: bool = False) -> None:
        super().__init__(entry.node, f"node {entry.node.hex()[:12]}", ways.figures, ways.clock, publishes=publishes)
        self.entry = entry
        self._ways = ways

    def has(self, space: CourierSpace, keys: Sequence[bytes], first: int, seconds: float) -> int | None:
        """How many of these blocks it has now; None if it does not answer."""
        (found,) = self._ways.has(space, [self.entry], keys, first, seconds)
        return found

    def _read(self, window: ReservedWindow, stops: Stops) -> Filled:
        given = stops.ends_at - self._clock.monotonic_seconds()
        try:
            return self._pulled(window, stops)
        except PeerAway as away:
            return self._late(str(away), given, 0) if away.is_late else self._failed(MissReason.UNREACHABLE, str(away))
        except TimedOutPull as late:
            return self._late(str(late), given, late.verified)
        except PeerFault as fault:
            if window.refused:
                self._figures.refused(self.entry.node, "frame")
            if window.failed is not None or stops.over.is_set():
                return NOT_WANTED
            return self._failed(MissReason.CORRUPT if window.refused else MissReason.UNREACHABLE, str(fault))
        except BadInput as error:  # the offer needs something that is missing here; the text names it
            self._figures.faults.say("pull", str(error))
            return Filled(MissReason.UNSUPPORTED, str(error))

    def _forged(self, detail: str) -> Filled:
        line = f"{self.name} at {self.entry.address} sent what is not taken: {detail}"
        self._figures.faults.say(f"forged {self.name}", line)
        return self._failed(MissReason.CORRUPT, detail)

    def _late(self, detail: str, given: float, frames: int) -> Filled:
        has_failed = late_has_failed(given, frames)
        return self._failed(MissReason.DEADLINE, detail) if has_failed else Filled(MissReason.DEADLINE, detail)

    def _failed(self, reason: MissReason, detail: str) -> Filled:
        entry = self.entry
        self._ways.choice.failed(entry.node, entry.incarnation, self._clock.monotonic_seconds())
        self._figures.count(entry.node, failures=1)
        return Filled(reason, f"{self.name}: {detail}")

    def _pulled(self, window: ReservedWindow, stops: Stops) -> Filled:
        ways, entry = self._ways, self.entry
        reader: FramePuller | None = None
        while reader is None:
            opened = self._opened(window, stops)
            if isinstance(opened, Filled):
                return opened
            offer, secret = opened
            reader = self._connected(offer, secret, stops)
        window.lend()
        try:
            stops.waits_for(reader.close)
            pulled = reader.pull(window.slots[: offer.frames], window.check, stops.ends_at)
        finally:
            stops.waits_for(None)
            reader.close()
            if reader.free_slots(window.returned):
                window.returned()
        ways.choice.worked(entry.node, entry.incarnation)
        frames = len(window.space.frames)
        if pulled // frames == window.blocks:
            return Filled()
        return Filled(MissReason.STALE_HINT, f"{self.name} has no more of it")

    def _opened(self, window: ReservedWindow, stops: Stops) -> tuple[PullOffer, bytes] | Filled:
        ways, entry, space = self._ways, self.entry, window.space
        terms, fields = ways.signed(PULL, space, entry, window.keys, window.first)
        now = ways.clock.monotonic_seconds()
        left, names = stops.ends_at - now, ways.usable.names(entry.node, now)
        wait = max(0.0, min(left / 2, BRING_UP_SECONDS))
        request = peer_pb2.OpenPullRequest(**fields, wait_ms=int(1000 * wait), transports=names)
        left = min(left, wait + OPEN_SECONDS)
        answer: peer_pb2.OpenPullResponse
        answer = ways.calls.ask("OpenPull", Dialled(entry.address, entry.node), request, left)
        if not answer.token:
            return self._not_offered(answer.reason, space.run)
        offer = PullOffer(
            answer.token, answer.address, answer.transport, answer.blocks, tuple(answer.frame_bytes), answer.is_sealed
        )
        is_asked = offer.transport in names and 0 < offer.blocks <= window.blocks
        if not is_asked or offer.frame_bytes != space.frames:
            raise PeerFault("an offer that is none to what was asked")
        if stays_here(numeric_address(offer.address)[0]) and not is_loopback(
            entry.address.rpartition(":")[0].strip("[]")
        ):
            raise PeerFault("a door at the loopback of this host, where the node is not")
        return offer, pull_secret(space.grant.identity_key, terms, answer.nonce)

    def _connected(self, offer: PullOffer, secret: bytes, stops: Stops) -> FramePuller | None:
        ways, entry, name = self._ways, self.entry, offer.transport
        now, ends_at = ways.clock.monotonic_seconds(), stops.ends_at
        is_last = ways.usable.is_last(name)
        if not is_last:
            ends_at = now + min(TRY_SECONDS, (ends_at - now) / 2)
        try:
            reader = ways.transports[name].connect(offer, secret, ends_at)
        except (PeerFault, TimedOutPull) as fault:
            is_hasty = isinstance(fault, TimedOutPull) and ends_at - now < FAIR_TRY_SECONDS
            if is_last or is_hasty or stops.over.is_set():
                raise
            ways.usable.failed(entry.node, name, ways.clock.monotonic_seconds())
            line = f"{self.name} at {entry.address} is not reached over {name}, and another transport is taken: {fault}"
            ways.figures.faults.say(f"{name} {self.name}", line)
            return None
        ways.usable.worked(entry.node, name)
        return reader

    def _not_offered(self, said: str, run: CourierRun) -> Filled:
        if said == MissReason.BUSY:
            return Filled(MissReason.BUSY, f"{self.name} is busy")
        if said == MissReason.KEY_MISMATCH:
            self._ways.mismatch(self.entry, run)
            return Filled(MissReason.KEY_MISMATCH, f"{self.name} has other keys of this tenant")
        return Filled(MissReason.STALE_HINT, f"{self.name} has it no more")


def hand_over(runs: Sequence[CourierRun], table: AliveTable, ways: PeerWays) -> None:
    """Offer hot blocks to other nodes, tenant by tenant, until all are offered or the time is over. They pull them as
    usual, or decline: nothing is pushed. Chains with a common beginning go to the same node."""
    ends_at = ways.clock.monotonic_seconds() + LEAVING_SECONDS
    nodes = list(table.alive(ways.clock.monotonic_seconds()).values())
    taken, room = 0, MOST_OFFERED_BYTES
    for run in runs if nodes else ():
        for space_id, keys in hottest(run.uses.chains(), run.uses.of):
            space = run.by_id.get(space_id)
            if space is None or run.is_over or room < space.block_bytes or ways.clock.monotonic_seconds() >= ends_at:
                continue
            with suppress(Unavailable):
                here = keys[: min(space.match(keys), room // space.block_bytes)]
                blocks = _offered(space, here, nodes, ways, ends_at) if here else 0
                taken, room = taken + blocks, room - blocks * space.block_bytes
    if taken:
        _log.info("other nodes have what was hot here", extra={"blocks": taken})


def _offered(
    space: CourierSpace, keys: Sequence[bytes], nodes: Sequence[NodeEntry], ways: PeerWays, ends_at: float
) -> int:
    head = keys[:CHUNK_BLOCKS][-1]
    fit = [one for one in nodes if space.run.fingerprint in one.fingerprints]
    for entry in sorted(fit, key=lambda one: blake2b(head + one.node, digest_size=8).digest())[:MOST_ASKED]:
        left = ends_at - ways.clock.monotonic_seconds()
        if left <= 0:
            break
        _, fields = ways.signed(OFFER, space, entry, keys)
        with suppress(PeerAway):  # an earlier version knows no offers
            request = peer_pb2.OfferRequest(**fields)
            answer: peer_pb2.OfferResponse = ways.calls.ask("Offer", Dialled(entry.address, entry.node), request, left)
            if answer.blocks:
                return min(answer.blocks, len(keys))
    return 0


READS_AHEAD = 8
MOST_PROBED = 512
"""Names in one question; of a longer chain, blocks at equal distances."""
FORGET_SECONDS = 2.0
WARM_SECONDS, WARM_EVERY_SECONDS = 1.0, 0.4


@dataclass
class RemoteWays:
    """One remote tier: what all fetches and writes share. writes: which blocks are written there. ttl_ms: how long they
    are kept; 0 for no end."""

    engine: RemoteEngine
    workers: RemoteWorkers
    salts: NamespaceSalts
    figures: Figures
    clock: Clock
    writes: RemoteWrites
    ttl_ms: int
    _warming: RemoteCall[None] | None = None
    _warmed_at: float = -inf

    @property
    def name(self) -> str:
        """In the speeds, and for people."""
        return self.engine.name

    def has(self, space: CourierSpace, keys: Sequence[bytes], wanted_by: float, ends_at: float) -> RemoteCall[int]:
        """Ask how many leading blocks there are. wanted_by: then it is late. ends_at: the call's own limit."""
        began_at = self.clock.monotonic_seconds()
        stamps, step = space.grant.stamps, max(1, -(-len(keys) // MOST_PROBED))
        last = len(stamps) - 1

        def work() -> int:
            try:
                salt = self.salts.of(space.run.fingerprint, space.id, ends_at)
                names = [remote_key(salt, stamps[last], keys[at], last) for at in range(step - 1, len(keys), step)]
                found = self.engine.exists(names, ends_at)
            finally:
                now = self.clock.monotonic_seconds()
                self.figures.answered(self.name, self.name, now - began_at, now > wanted_by)
            blocks = (found.index(False) if False in found else len(found)) * step
            self.figures.count(self.name, lookups=1, found=bool(blocks))
            return blocks

        return self.workers.submit(work, ends_at)

    def keep_warm(self) -> None:
        """While requests look things up: keep a connection and the salts, so that a look-up is one round trip. Called
        now and then; does not block."""
        now = self.clock.monotonic_seconds()
        is_due = now - self._warmed_at >= WARM_EVERY_SECONDS and (self._warming is None or self._warming.is_settled())
        if is_due and self.salts.are_used:
            self._warmed_at = now
            self._warming = self.workers.submit(lambda: self.salts.warm(now + WARM_SECONDS), now + WARM_SECONDS)

    def names(self, space: CourierSpace, keys: Sequence[bytes], ends_at: float) -> list[bytes]:
        """Names of all frames of these blocks, the parts of each in order. Raises `RemoteFault`."""
        salt = self.workers.submit(lambda: self.salts.of(space.run.fingerprint, space.id, ends_at), ends_at).result()
        stamps = space.grant.stamps
        return [remote_key(salt, stamp, key, part) for key in keys for part, stamp in enumerate(stamps)]

    def forget(self, fingerprint: bytes, namespace: bytes) -> str:
        """Drop a namespace, or all of a tenant if it is empty; returns why that failed, or nothing."""
        ends_at = self.clock.monotonic_seconds() + FORGET_SECONDS
        try:
            self.workers.submit(lambda: self.salts.replace(fingerprint, namespace, ends_at), ends_at).result()
        except RemoteFault as fault:
            return str(fault)
        return ""


class RemoteSource(Source):
    """The remote tier: frames under salted names, several calls in flight."""

    tier = HitTier.REMOTE
    prior = REMOTE_PRIOR

    def __init__(self, ways: RemoteWays) -> None:
        super().__init__(ways.name, ways.name, ways.figures, ways.clock)
        self._ways = ways

    def fill(self, window: ReservedWindow, stops: Stops) -> Filled:
        """The same; and note what the tier has, so that it is not written there."""
        uses = window.space.run.uses
        uses.came(window.keys)
        filled = super().fill(window, stops)
        uses.did_not_come(window.keys[window.adopted :])
        if window.adopted:
            self._figures.faults.ended(f"remote {self.name}", f"the remote engine {self.name} answers")
        return filled

    def _read(self, window: ReservedWindow, stops: Stops) -> Filled:
        """Several frames at a time, checked in order."""
        try:
            return self._read_frames(window, stops)
        except RemoteFault as fault:
            if fault.is_of_engine:
                self._figures.faults.say(f"remote {self.name}", f"the remote engine {self.name} fails: {fault}")
            return Filled(MissReason(fault.reason), str(fault))

    def _read_frames(self, window: ReservedWindow, stops: Stops) -> Filled:
        ways, workers = self._ways, self._ways.workers
        names = ways.names(window.space, window.keys, stops.ends_at)
        calls: deque[tuple[RemoteCall[bool], FrameCheck]] = deque()
        sent = 0
        for at, slot in enumerate(window.slots):
            while sent < len(names) and len(calls) < READS_AHEAD:
                check = window.check_of(sent)
                window.lend()
                read = partial(ways.engine.read, names[sent], window.slots[sent], stops.ends_at, check.arrived)
                call = workers.submit(read, stops.ends_at, window.returned)
                calls.append((call, check))
                sent += 1
            if stops.over.is_set():
                return NOT_WANTED
            call, check = calls.popleft()
            try:
                is_there = call.result()
            except WrongSize:
                self._refuse(names[at])
                raise
            if not is_there:
                return Filled(MissReason.STALE_HINT, f"{self.name} has it no more")
            if not window.take(slot, is_right=check.is_right):
                if window.refused:
                    self._refuse(names[at])
                return Filled(MissReason.CORRUPT, f"{self.name}: a frame that is not what it should be")
        return Filled()

    def _refuse(self, name: bytes) -> None:
        self._figures.refused(self.name, "frame")
        ends_at = self._clock.monotonic_seconds() + FORGET_SECONDS
        self._ways.workers.submit(lambda: self._ways.engine.delete([name], ends_at), ends_at)
