"""Blocks from another node: permission to pull them, a connection to its data server, frames straight into slots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import BadInput
from kvstore.client.connection import Unavailable
from kvstore.config import is_loopback
from kvstore.courier.dialling import Dialled, GrpcPeers, PeerAway
from kvstore.courier.figures import Figures
from kvstore.courier.link import CourierRun, CourierSpace
from kvstore.courier.source import NOT_WANTED, Filled, ReservedWindow, Source, Stops
from kvstore.peers.reader import FramePuller, PullTransport
from kvstore.peers.tokens import HAS, NONCE_BYTES, OFFER, PULL, PullTerms, ask_mac, pull_secret
from kvstore.peers.transport import PeerFault, PullOffer, TimedOutPull, numeric_address, stays_here
from kvstore.pool.choice import MOST_ASKED, HolderChoice, UsableTransports, late_has_failed
from kvstore.pool.directory import CHUNK_BLOCKS, AliveTable, NodeEntry
from kvstore.wire import peer_pb2
from tiering.clock import Clock

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
        asked = []
        for one in nodes:
            _, fields = self.signed(HAS, space, one, keys[:MOST_ASKED_KEYS], first)
            asked.append((Dialled(one.address, one.node), peer_pb2.HasRequest(**fields)))
        answers = self.calls.has(asked, seconds)

        def counts(within: float) -> list[int | None]:
            found: list[int | None] = []
            for entry, answer in zip(nodes, answers(within), strict=True):
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
    """One node."""

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
