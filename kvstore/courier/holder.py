"""Answers other nodes: how much this node has of a chain, and where to pull it from.

    fingerprint > tenant    MAC under its identity key    > namespace > match, or a lease > an offer of the data server

A lease pins the blocks until the last byte is sent, the puller is gone, or 5 s are over. Pinned bytes are bounded for
one node and for all; beyond that the answer is busy, which is no fault.
"""

from __future__ import annotations

import hmac
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count as counted_from

from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, Unreachable
from kvstore.client.connection import Unavailable
from kvstore.courier.asking import VERSION, AskedBy, has_mac, offer_mac
from kvstore.courier.figures import Figures
from kvstore.courier.link import CourierRun, CourierSpace
from kvstore.peers.tokens import NONCE_BYTES, PullTerms, ask_mac, pull_secret
from kvstore.peers.transport import FrameDoor, OfferedFrames, PeerFault, PullBusy
from kvstore.pool.hottest import LEAVING_SECONDS, MOST_OFFERED_BLOCKS
from kvstore.wire import peer_pb2
from tiering.clock import Clock
from tiering.frame import KEY_BYTES

MOST_PULL_BYTES, MOST_PULL_BLOCKS = 256 << 20, 512
"""In one offer, at least one block."""
MOST_PULLS, MOST_PULLS_OF_NODE = 32, 8
MOST_PINNED_BYTES = 512 << 20
"""By all offers together; a single larger one is allowed."""
LONGEST_WAIT_SECONDS = 2.0
"""For promotions from slower tiers."""
TakesOffer = Callable[[CourierRun, CourierSpace, PullTerms, float], tuple[int, MissReason | None]]
"""Returns how many blocks are here afterwards, and why not all. Raises `Unavailable`."""
BUSY, KEY_MISMATCH, ABSENT = str(MissReason.BUSY), str(MissReason.KEY_MISMATCH), str(MissReason.ABSENT)


class PeerHolder:
    """`kvstore.v1.Peer`. Thread-safe."""

    def __init__(
        self,
        runs: Callable[[], Sequence[CourierRun]],
        doors: Mapping[str, FrameDoor],
        figures: Figures,
        clock: Clock,
        new_token: Callable[[int], bytes],
        takes: TakesOffer,
    ) -> None:
        """runs: the tenants' connections. doors: data servers, by transport. takes: pulls what a leaving node
        offers."""
        self._runs = runs
        self._doors = doors
        self._figures = figures
        self._clock = clock
        self._new_token = new_token
        self._takes = takes
        self._taking = threading.Lock()
        self._lock = threading.Lock()
        self._pulls = Counter[bytes]()
        self._pinned_bytes = 0
        self.is_leaving = False

    def WhoAreYou(self, request: peer_pb2.WhoAreYouRequest, call: AskedBy) -> peer_pb2.WhoAreYouResponse:
        runs = self._runs()
        if not runs:
            raise Unreachable("the sidecar does not answer")
        return peer_pb2.WhoAreYouResponse(
            node=runs[0].node,
            incarnation=runs[0].incarnation,
            fingerprints=[one.fingerprint for one in runs],
            versions=[VERSION],
            transports=list(self._doors),
        )

    def Has(self, request: peer_pb2.HasRequest, call: AskedBy) -> peer_pb2.HasResponse:
        """How many of these blocks are here."""
        found = self._asked(request, call, has_mac)
        if isinstance(found, str):
            return peer_pb2.HasResponse(reason=found)
        run, space, terms = found
        try:
            blocks = run.match(space, terms.keys)
        except Unavailable as away:
            return peer_pb2.HasResponse(reason=str(away.reason))
        return peer_pb2.HasResponse(blocks=blocks, reason="" if blocks else ABSENT)

    def OpenPull(self, request: peer_pb2.OpenPullRequest, call: AskedBy) -> peer_pb2.OpenPullResponse:
        """Pin blocks, and answer where to pull them from."""
        found = self._asked(request, call, ask_mac)
        if isinstance(found, str):
            return peer_pb2.OpenPullResponse(reason=found)
        run, space, terms = found
        door = next((self._doors[one] for one in request.transports if one in self._doors), None)
        if door is None:
            return peer_pb2.OpenPullResponse(reason=str(MissReason.UNSUPPORTED))
        with self._lock:
            is_busy = sum(self._pulls.values()) >= MOST_PULLS or self._pulls[terms.asking] >= MOST_PULLS_OF_NODE
            if not is_busy:
                self._pulls[terms.asking] += 1
        if is_busy:
            return peer_pb2.OpenPullResponse(reason=BUSY)
        is_offered = False
        try:
            wait = min(request.wait_ms / 1000, call.seconds_left(), LONGEST_WAIT_SECONDS)
            answer = self._opened(run, space, terms, door, wait)
            is_offered = bool(answer.token)
            return answer
        except (Unavailable, PullBusy) as away:
            return peer_pb2.OpenPullResponse(reason=str(away.reason) if isinstance(away, Unavailable) else BUSY)
        finally:
            if not is_offered:
                self._ended(terms.asking)

    def Offer(self, request: peer_pb2.OfferRequest, call: AskedBy) -> peer_pb2.OfferResponse:
        """Pull what a leaving node has, one offer at a time, as far as there is room without waiting for it."""
        if request.first_block or len(request.keys) > MOST_OFFERED_BLOCKS * KEY_BYTES:
            raise BadInput(
                f"an offer that begins late or is too long; offer the first {MOST_OFFERED_BLOCKS} blocks at most"
            )
        found = self._asked(request, call, offer_mac)
        if isinstance(found, str):
            return peer_pb2.OfferResponse(reason=found)
        if not self._taking.acquire(blocking=False):
            return peer_pb2.OfferResponse(reason=BUSY)
        try:
            blocks, reason = self._takes(*found, min(call.seconds_left(), LEAVING_SECONDS))
        except Unavailable as away:
            return peer_pb2.OfferResponse(reason=str(away.reason))
        finally:
            self._taking.release()
        return peer_pb2.OfferResponse(blocks=blocks, reason=str(reason or ""))

    def _opened(
        self, run: CourierRun, space: CourierSpace, terms: PullTerms, door: FrameDoor, wait: float
    ) -> peer_pb2.OpenPullResponse:
        most = max(1, min(len(terms.keys), MOST_PULL_BLOCKS, MOST_PULL_BYTES // space.block_bytes))
        reply = run.lease(space, terms.keys[:most], max(0.0, wait))
        if not reply.lease:
            return peer_pb2.OpenPullResponse(reason=str(reply.reason or MissReason.ABSENT))
        is_offered = False
        try:
            columns = run.frames(reply.places, writable=False)
            blocks = min(map(len, columns))
            if not blocks:
                return peer_pb2.OpenPullResponse(reason=str(MissReason.UNREACHABLE))
            spans = [column[block] for block in range(blocks) for column in columns]
            size = sum(span.nbytes for span in spans)
            if not self._pins(size):
                return peer_pb2.OpenPullResponse(reason=BUSY)

            def release() -> None:
                run.release(reply.lease)
                self._ended(terms.asking, size)

            frames_sent = counted_from(1)

            def sent(frame_bytes: int) -> None:
                is_whole = next(frames_sent) % len(columns) == 0  # a block's parts are sent in turn
                self._figures.sent(terms.asking, int(is_whole), frame_bytes)

            nonce = self._new_token(NONCE_BYTES)
            secret = pull_secret(space.grant.identity_key, terms, nonce)
            try:
                offer = door.offer(OfferedFrames(spans, space.frames, release, sent), secret)
            except BaseException:
                self._pins(-size)
                raise
            is_offered = True
        finally:
            if not is_offered:
                run.release(reply.lease)
        return peer_pb2.OpenPullResponse(
            token=offer.token,
            address=offer.address,
            transport=offer.transport,
            blocks=offer.blocks,
            frame_bytes=offer.frame_bytes,
            is_sealed=offer.is_sealed,
            nonce=nonce,
            reason=str(reply.reason or "") if blocks < len(terms.keys) else "",
        )

    def _pins(self, size: int) -> bool:
        with self._lock:
            if size > 0 and self._pinned_bytes and self._pinned_bytes + size > MOST_PINNED_BYTES:
                return False
            self._pinned_bytes += size
            return True

    def _ended(self, node: bytes, size: int = 0) -> None:
        with self._lock:
            self._pinned_bytes -= size
            self._pulls[node] -= 1
            if self._pulls[node] <= 0:
                del self._pulls[node]

    def _asked(
        self,
        request: peer_pb2.HasRequest | peer_pb2.OpenPullRequest | peer_pb2.OfferRequest,
        call: AskedBy,
        mac_of: Callable[[bytes, PullTerms], bytes],
    ) -> tuple[CourierRun, CourierSpace, PullTerms] | str:
        """The tenant and namespace of a request; or why it gets no answer. Raises `BadInput`."""
        joined = request.keys  # read once: each access to a message's field copies it
        if len(joined) % KEY_BYTES:
            raise BadInput(f"keys of {len(joined)} bytes; give {KEY_BYTES} for each block")
        if call.node and request.node != call.node:
            raise BadInput("the node of the message is another one than that of the caller's certificate")
        run = next((one for one in self._runs() if one.fingerprint == request.fingerprint), None)
        if run is None:
            return KEY_MISMATCH
        if self.is_leaving:
            return BUSY
        space = run.space_of(request.namespace)
        known = space or next(iter(run.by_id.values()), None)
        if known is None:
            return ABSENT
        keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
        terms = PullTerms(request.nonce, request.node, run.node, request.namespace, request.first_block, keys)
        try:
            right = mac_of(known.grant.identity_key, terms)
        except PeerFault as error:
            raise BadInput(str(error)) from None
        if not hmac.compare_digest(right, request.mac):
            self._figures.refused("a caller", "mac")
            return KEY_MISMATCH
        return (run, space, terms) if space is not None else ABSENT
