"""The courier, put together: a link for each tenant, the other nodes, the data servers, the remote tier; and its
answers to other nodes.

The node's id comes from the sidecar. When the sidecar comes back as another run, the node enters the directory anew,
since hints belong to a run. Each tenant has a few threads for its questions, so that a busy tenant delays only itself.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count as counted_from
from itertools import islice
from typing import TypeAlias

import msgspec

from kvstore.block.account import HeldElsewhere, MissReason
from kvstore.block.errors import BadInput, Unreachable
from kvstore.block.identity import NodeIdentity
from kvstore.client.connection import SidecarConnection, Unavailable
from kvstore.client.framing import FramedSocket, drained
from kvstore.courier.announcing import Follower
from kvstore.courier.dialling import VERSION, GrpcPeers, NamedPeers
from kvstore.courier.directory import DirectoryAddress, ValkeyDirectory
from kvstore.courier.figures import BANNED, MOST_SHOWN, PEER, REMOTE, UP, Figures
from kvstore.courier.link import ANSWER_SECONDS, CONNECT_SECONDS, ENGINE, CourierRun, CourierSpace
from kvstore.courier.locate import LOOK_SECONDS, Fetcher, FetchJob, Locator
from kvstore.courier.sources import (
    LEAVING_SECONDS,
    MOST_OFFERED_BLOCKS,
    MOST_OFFERED_BYTES,
    PeerSource,
    PeerWays,
    RemoteWays,
    hand_over,
)
from kvstore.peers.reader import PullTransport
from kvstore.peers.serving import FrameDoor
from kvstore.peers.tokens import HAS, NONCE_BYTES, OFFER, PULL, PullTerms, ask_mac, pull_secret
from kvstore.peers.transport import OfferedFrames, PeerFault, PullBusy
from kvstore.pool.choice import HolderChoice, UsableTransports
from kvstore.pool.directory import MAX_FINGERPRINTS, AliveTable, Announcer, NodeEntry
from kvstore.protocol import messages as m
from kvstore.protocol.courier import (
    MAX_NOT_REACHED,
    MAX_QUESTIONS,
    MAX_WHERE_CHARACTERS,
    CourierFigures,
    FetchQuestion,
    Forget,
    LocateQuestion,
    QuestionAnswered,
    SourceFigures,
)
from kvstore.protocol.notify_pipe import NotifyPipeEnd
from kvstore.wire import peer_pb2
from tiering.clock import Clock
from tiering.frame import KEY_BYTES

LOCATE_THREADS, FETCH_THREADS = 4, 8
"""For each tenant."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0
"""Between two attempts to connect to the sidecar."""
UNTOLD_SECONDS = 0.05
"""How often a sidecar without notifications is asked."""
TOLD_SECONDS = 1.0
MOST_REASONS = 16
MOST_NAMED = 4
"""Other nodes named in a line for people."""

MOST_PULL_BYTES, MOST_PULL_BLOCKS = 256 << 20, 512
"""In one offer, at least one block."""
MOST_PULLS, MOST_PULLS_OF_NODE = 32, 8
MOST_PINNED_BYTES = 512 << 20
"""By all offers together; a single larger one is allowed."""
LONGEST_WAIT_SECONDS = 2.0
"""For promotions from slower tiers."""

_log = logging.getLogger(__name__)


class _NodeSession:
    def __init__(self, courier: Courier, here: NodeIdentity) -> None:
        clock, figures = courier.clock, courier.figures
        self._clock = clock
        self.here = here
        self.table = AliveTable(here)
        self.choice = HolderChoice(here.node, figures.speeds)
        self.directory: ValkeyDirectory | None = None
        self.announcer: Announcer | None = None
        self.named: NamedPeers | None = None
        self.ways: PeerWays | None = None
        if courier.calls is not None:
            usable = UsableTransports(list(courier.transports))
            self.ways = PeerWays(
                courier.calls, courier.transports, usable, self.choice, figures, clock, courier.new_token
            )
            if courier.directory is not None:
                self.announcer = Announcer()
                told = self.table, self.announcer
                entry = partial(courier.entry, here)
                self.directory = ValkeyDirectory(courier.directory, here, entry, *told, clock, figures)
            if courier.peers:
                self.named = NamedPeers(courier.peers, here, self.table, courier.calls, figures.faults, clock)
        self.locator = Locator(self.table, self.named, self.directory, self.ways, courier.remote, clock)
        self.fetcher = Fetcher(self.locator, figures, clock)

    def others(self) -> list[tuple[str, str]]:
        """All other nodes that are known, also those that do not answer: ids, empty for unknown ones, and addresses."""
        found = [(node.hex(), one.address) for node, one in self.table.alive(self._clock.monotonic_seconds()).items()]
        known = {address for _, address in found} | {node for node, _ in found}
        for node, address in self.named.addresses() if self.named is not None else ():
            if address not in known and node.hex() not in known:
                found.append((node.hex(), address))
        return sorted(found)

    def start(self) -> None:
        if self.directory is not None:
            self.directory.start()
        if self.named is not None:
            self.named.start()

    def close(self) -> None:
        self.locator.close()
        if self.named is not None:
            self.named.close()
        if self.directory is not None:
            self.directory.close()


class _TenantWork:
    """A tenant's connection to `courier.sock`, its threads and their work.

    connect > ask for a pipe > Questions > (notified, or a worker has an answer) > Questions > ... > closed > connect

    One thread waits for notifications; a worker that has an answer sends it itself, and passes on the questions that
    come back. Start it, close it.
    """

    def __init__(self, courier: Courier, tenant: str, token: bytes) -> None:
        """token: of all links of a courier: the sidecar counts what a courier reports once, over whichever of its links
        it comes."""
        self.tenant, self._token = tenant, token
        self._path, self._clock, self._faults = courier.socket, courier.clock, courier.figures.faults
        self._run: CourierRun | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"kv-courier-{tenant}", daemon=True)
        self._courier = courier
        self.follower: Follower | None = None
        self._session: _NodeSession | None = None
        self._locates = ThreadPoolExecutor(LOCATE_THREADS, f"kv-locate-{tenant}")
        self._fetches = ThreadPoolExecutor(FETCH_THREADS, f"kv-fetch-{tenant}")
        self._lock = threading.Lock()
        self._jobs: dict[int, FetchJob] = {}
        self._told_at = float("-inf")
        self._announced: dict[bytes, set[bytes]] = {}

    @property
    def run(self) -> CourierRun | None:
        """The connection, while there is one."""
        run = self._run
        return run if run is not None and not run.is_over else None

    def start(self) -> None:
        self._thread.start()

    def exchange(self, run: CourierRun, told: CourierFigures | None = None) -> None:
        """Send answers, and pass on the questions that come back. Waits for the sidecar alone."""
        try:
            while not run.is_over:
                answers = list(islice(drained(run.answers), MAX_QUESTIONS))
                wanted = run.connection.ask(m.Questions(answers, told), m.QuestionsReply, ANSWER_SECONDS)
                told = None
                self._take(run, wanted)
                run.connection.unmap(run.connection.wire.retired())
                run.connection.settle()
                if not wanted.more and not run.answers:
                    return
        except Unavailable as away:
            _log.debug("the sidecar was not asked", extra={"tenant": self.tenant, "reason": away.detail})

    def close(self) -> None:
        """Disconnect. Fetches in progress end as if the sidecar had disconnected."""
        self._ends.set()
        run = self._run
        if run is not None:
            run.close()
        self._locates.shutdown(wait=False, cancel_futures=True)
        self._fetches.shutdown(wait=False, cancel_futures=True)

    # The thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._ends.is_set():
            try:
                run = self._connected()
            except (Unreachable, Unavailable) as error:
                self._faults.say(f"sidecar {self.tenant}", f"tenant {self.tenant}: {error}")
                self._ends.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            self._faults.ended(f"sidecar {self.tenant}", f"tenant {self.tenant}: the sidecar answers")
            try:
                self._attend(run)
            finally:
                self._run = None
                self._gone()
                run.close()
            self._ends.wait(FIRST_PAUSE_SECONDS)

    def _connected(self) -> CourierRun:
        wire = FramedSocket(self._path, ENGINE, self._token, self._clock, CONNECT_SECONDS, tenant=self.tenant)
        run = CourierRun(self.tenant, SidecarConnection(wire, self._clock))
        try:
            run.list_spaces()
        except BaseException:
            run.close()
            raise
        return run

    def _attend(self, run: CourierRun) -> None:
        self._run = run
        self._begin(run)
        bell: NotifyPipeEnd | None = None
        try:
            answered = run.connection.answer(m.Ping(wants_bell=True), ANSWER_SECONDS)
            for descriptor in answered.descriptors:
                bell = NotifyPipeEnd(descriptor)
            self.exchange(run)
            while not run.is_over and not self._ends.is_set():
                if bell is None:
                    self._ends.wait(UNTOLD_SECONDS)
                elif not bell.wait():
                    return
                self.exchange(run)
        except Unavailable:
            return
        finally:
            if bell is not None:
                bell.close()

    # The sidecar's questions ------------------------------------------------------------------------------------------

    def _begin(self, run: CourierRun) -> None:
        session, remote, told = self._courier.session_of(run), self._courier.remote, self._announced
        self._session = session
        self.follower = Follower(run, session.announcer, remote, self._clock, lambda: self._tell(run), told)
        self.follower.start()

    def _take(self, run: CourierRun, wanted: m.QuestionsReply) -> None:
        now = self._clock.monotonic_seconds()
        for locate in wanted.locates:
            self._do(self._locates, run, partial(self._locate, run, locate, now + LOOK_SECONDS))
        for fetch in wanted.fetches:
            self._begin_fetch(run, fetch)
        for number in wanted.over:
            with self._lock:
                job = self._jobs.get(number)
            if job is not None:
                job.stops.end()
        for forget in wanted.forgets:
            self._do(self._locates, run, partial(self._forget, run, forget))

    def _gone(self) -> None:
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.stops.end()
        if self.follower is not None:
            self.follower.close()

    def _do(self, pool: ThreadPoolExecutor, run: CourierRun, work: Callable[[], QuestionAnswered]) -> None:
        def answer() -> None:
            run.answers.append(work())
            self.exchange(run)

        try:
            pool.submit(answer).add_done_callback(_log_fault)
        except RuntimeError:  # it is closed
            pass

    def _locate(self, run: CourierRun, question: LocateQuestion, ends_at: float) -> QuestionAnswered:
        number, present = question.number, question.present
        left = ends_at - self._clock.monotonic_seconds()
        session = self._session
        if left <= 0 or session is None or present >= len(question.keys):
            return QuestionAnswered(number, present, reason=MissReason.DEADLINE, detail="there was no time to look")
        try:
            space = run.space(question.namespace)
            if self.follower is not None:
                self.follower.used(space, question.keys)
            places = session.locator.find(space, question, left)
        except Unavailable as away:
            return QuestionAnswered(number, present, reason=away.reason, detail=away.detail)
        session.locator.keep(run.tenant, number, places)
        return places.answer(number, present)

    def _begin_fetch(self, run: CourierRun, question: FetchQuestion) -> None:
        session = self._session
        if session is None:
            return
        job = session.fetcher.job(run, question)
        with self._lock:
            if len(self._jobs) >= MAX_QUESTIONS:
                job.stops.end()
            else:
                self._jobs[question.number] = job

        def work() -> QuestionAnswered:
            try:
                return session.fetcher.fetch(job)
            finally:
                with self._lock:
                    self._jobs.pop(question.number, None)

        self._do(self._fetches, run, work)

    def _forget(self, run: CourierRun, question: Forget) -> QuestionAnswered:
        remote, session = self._courier.remote, self._session
        said, failed = [], ""
        if remote is not None and (failed := remote.forget(run.fingerprint, question.namespace)):
            said.append(f"{remote.name} may still have blocks of it: {failed}; drop it again")
        nodes = session.others() if session is not None else []
        if nodes:
            names = ", ".join(node[:12] or where for node, where in nodes[:MOST_NAMED])
            names += ", ..." if nodes[MOST_NAMED:] else ""
            count = "1 other node was" if len(nodes) == 1 else f"{len(nodes)} other nodes were"
            said.append(f"{count} not reached and may have copies ({names}): do the same there")
        if session is not None and session.directory is not None and session.directory.figures().state != UP:
            said.append("the directory does not answer, so other nodes that may have copies are not all known")
        reason = MissReason.UNREACHABLE if failed else None
        listed = [(node, where[:MAX_WHERE_CHARACTERS]) for node, where in nodes[:MAX_NOT_REACHED]]
        return QuestionAnswered(question.number, 0, reason=reason, detail="; ".join(said), not_reached=listed)

    def _tell(self, run: CourierRun) -> None:
        now = self._clock.monotonic_seconds()
        if now - self._told_at >= TOLD_SECONDS:
            self._told_at = now
            self.exchange(run, self._courier.told())


AskedBy: TypeAlias = tuple[bytes, Callable[[], float]]
"""The asking node's id, by its certificate, empty if it has none (on loopback); and for how many seconds it still
waits, which raises `TimedOut` once it does not."""


def _log_fault(done: Future[None]) -> None:
    fault = None if done.cancelled() else done.exception()
    if fault is not None:
        _log.error("a question of the sidecar was not answered", exc_info=fault)


class PeerHolder:
    """`kvstore.v1.Peer`: answers other nodes how much this node has of a chain, and where to pull it from. Thread-safe.

        fingerprint > tenant    MAC under its identity key    > namespace > match, or a lease > a data server's offer

    A lease pins the blocks until the last byte is sent, the puller is gone, or 5 s are over. Pinned bytes are bounded
    for one node and for all; beyond that the answer is busy, which is no fault."""

    def __init__(self, courier: Courier) -> None:
        self._courier, self._doors = courier, courier.doors
        self._taking = threading.Lock()
        self._lock = threading.Lock()
        self._pulls = Counter[bytes]()
        self._pinned_bytes = 0
        self.is_leaving = False

    def WhoAreYou(self, request: peer_pb2.WhoAreYouRequest, call: AskedBy) -> peer_pb2.WhoAreYouResponse:
        runs = self._courier.runs()
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
        try:
            space, terms = self._asked(request, call, HAS)
            blocks = space.match(terms.keys)
        except Unavailable as away:
            return peer_pb2.HasResponse(reason=str(away.reason))
        return peer_pb2.HasResponse(blocks=blocks, reason="" if blocks else str(MissReason.ABSENT))

    def OpenPull(self, request: peer_pb2.OpenPullRequest, call: AskedBy) -> peer_pb2.OpenPullResponse:
        """Pin blocks, and answer where to pull them from."""
        _, seconds_left = call
        try:
            space, terms = self._asked(request, call, PULL)
            door = next((self._doors[one] for one in request.transports if one in self._doors), None)
            if door is None:
                raise Unavailable(MissReason.UNSUPPORTED, "no transport of both")
            with self._lock:
                if sum(self._pulls.values()) >= MOST_PULLS or self._pulls[terms.asking] >= MOST_PULLS_OF_NODE:
                    raise Unavailable(MissReason.BUSY, "too many pulls")
                self._pulls[terms.asking] += 1
            with ExitStack() as undo:
                undo.callback(self._ended, terms.asking)
                wait = min(request.wait_ms / 1000, seconds_left(), LONGEST_WAIT_SECONDS)
                return self._opened(space, terms, door, wait, undo)
        except Unavailable as away:
            return peer_pb2.OpenPullResponse(reason=str(away.reason))
        except PullBusy:
            return peer_pb2.OpenPullResponse(reason=str(MissReason.BUSY))

    def Offer(self, request: peer_pb2.OfferRequest, call: AskedBy) -> peer_pb2.OfferResponse:
        """Pull what a leaving node has, one offer at a time, as far as there is room without waiting for it."""
        if request.first_block or len(request.keys) > MOST_OFFERED_BLOCKS * KEY_BYTES:
            raise BadInput(
                f"an offer that begins late or is too long; offer the first {MOST_OFFERED_BLOCKS} blocks at most"
            )
        _, seconds_left = call
        try:
            space, terms = self._asked(request, call, OFFER)
            if not self._taking.acquire(blocking=False):
                raise Unavailable(MissReason.BUSY, "another offer is taken")
            try:
                blocks, reason = self._courier.take_offer(space, terms, min(seconds_left(), LEAVING_SECONDS))
            finally:
                self._taking.release()
        except Unavailable as away:
            return peer_pb2.OfferResponse(reason=str(away.reason))
        return peer_pb2.OfferResponse(blocks=blocks, reason=str(reason or ""))

    def _opened(
        self, space: CourierSpace, terms: PullTerms, door: FrameDoor, wait: float, undo: ExitStack
    ) -> peer_pb2.OpenPullResponse:
        """undo: what is to be done when the pull is over, or now if there is none."""
        most = max(1, min(len(terms.keys), MOST_PULL_BLOCKS, MOST_PULL_BYTES // space.block_bytes))
        reply = space.lease(terms.keys[:most], max(0.0, wait))
        if not reply.lease:
            raise Unavailable(reply.reason or MissReason.ABSENT, "nothing is leased")
        undo.callback(space.run.connection.let_go, reply.lease)
        columns = space.run.frames(reply.places, writable=False)
        blocks = min(map(len, columns))
        if not blocks:
            raise Unavailable(MissReason.UNREACHABLE, "the memory of a lease is not there")
        spans = [column[block] for block in range(blocks) for column in columns]
        size = sum(span.nbytes for span in spans)
        if not self._pins(size):
            raise PullBusy("as much is pinned as may be")
        undo.callback(self._pins, -size)
        frames_sent = counted_from(1)

        def sent(frame_bytes: int) -> None:
            is_whole = next(frames_sent) % len(columns) == 0  # a block's parts are sent in turn
            self._courier.figures.count(terms.asking, blocks_out=is_whole, bytes_out=frame_bytes)

        nonce = self._courier.new_token(NONCE_BYTES)
        secret = pull_secret(space.grant.identity_key, terms, nonce)
        pulled = undo.pop_all()
        try:
            offer = door.offer(OfferedFrames(spans, space.frames, pulled.close, sent), secret)
        except BaseException:
            pulled.close()
            raise
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

    def _ended(self, node: bytes) -> None:
        with self._lock:
            self._pulls[node] -= 1
            if self._pulls[node] <= 0:
                del self._pulls[node]

    def _asked(
        self,
        request: peer_pb2.HasRequest | peer_pb2.OpenPullRequest | peer_pb2.OfferRequest,
        call: AskedBy,
        what: bytes,
    ) -> tuple[CourierSpace, PullTerms]:
        """Whose blocks, and which. Raises `Unavailable` where the answer is a reason alone, and `BadInput`."""
        joined = request.keys  # read once: each access to a message's field copies it
        if len(joined) % KEY_BYTES:
            raise BadInput(f"keys of {len(joined)} bytes; give {KEY_BYTES} for each block")
        node, _ = call
        if node and request.node != node:
            raise BadInput("the node of the message is another one than that of the caller's certificate")
        run = next((one for one in self._courier.runs() if one.fingerprint == request.fingerprint), None)
        if run is None:
            raise Unavailable(MissReason.KEY_MISMATCH, "no tenant has these keys")
        if self.is_leaving:
            raise Unavailable(MissReason.BUSY, "this node leaves")
        space = run.by_id.get(request.namespace)
        known = space or next(iter(run.by_id.values()), None)
        if known is None:
            raise Unavailable(MissReason.ABSENT, "no namespace is known")
        keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
        terms = PullTerms(request.nonce, request.node, run.node, request.namespace, request.first_block, keys)
        try:
            right = ask_mac(known.grant.identity_key, terms, what)
        except PeerFault as error:
            raise BadInput(str(error)) from None
        if not hmac.compare_digest(right, request.mac):
            self._courier.figures.refused("a caller", "mac")
            raise Unavailable(MissReason.KEY_MISMATCH, "another key of the tenant")
        if space is None:
            raise Unavailable(MissReason.ABSENT, "this namespace is not known")
        return space, terms


@dataclass(eq=False)
class Courier:
    """Start it, close it. socket: `courier.sock`. peers: addresses. calls: to other nodes; None without any: then there
    are no data servers, transports or directory either. holder: answers other nodes."""

    socket: str
    tenants: Sequence[str]
    clock: Clock
    new_token: Callable[[int], bytes]
    figures: Figures
    calls: GrpcPeers | None = None
    peers: Sequence[str] = ()
    doors: dict[str, FrameDoor] = field(default_factory=dict)
    transports: dict[str, PullTransport] = field(default_factory=dict)
    directory: DirectoryAddress | None = None
    remote: RemoteWays | None = None

    def __post_init__(self) -> None:
        self.holder = PeerHolder(self)
        self._address = ""
        self._lock = threading.Lock()
        self._session: _NodeSession | None = None
        self._is_closed = False
        token = self.new_token(m.MIN_SESSION_BYTES)
        self._tenants = [_TenantWork(self, name, token) for name in self.tenants]

    def runs(self) -> list[CourierRun]:
        return [run for one in self._tenants if (run := one.run) is not None]

    def start(self, address: str) -> None:
        """address: HOST:PORT where other nodes reach this one."""
        self._address = address
        for one in self._tenants:
            one.start()

    def close(self) -> None:
        """Leave the pool: offer hot blocks to other nodes, then withdraw from the directory and close the links."""
        if self._session is not None and self._session.ways is not None:
            hand_over(self.runs(), self._session.table, self._session.ways)
        self.holder.is_leaving = True
        with self._lock:
            self._is_closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()
        for one in self._tenants:
            one.close()
        for door in self.doors.values():
            door.close()
        if self.calls is not None:
            self.calls.close()
        if self.remote is not None:
            self.remote.workers.close()

    def session_of(self, run: CourierRun) -> _NodeSession:
        """The parts of the sidecar's present run; those of an earlier run end."""
        here = NodeIdentity(run.node, run.incarnation)
        with self._lock:
            session, was = self._session, None
            if session is None or session.here != here:
                was = session
                session = _NodeSession(self, here)
                if not self._is_closed:
                    self._session = session
                    session.start()
        if was is not None:
            was.close()
        return session

    def holding(
        self, tenant: str, namespace: str, keys: Sequence[bytes], seconds: float, *, are_own: bool
    ) -> HeldElsewhere:
        """As `Locator.holders`, of a tenant's prompt."""
        run = next((one for one in self.runs() if one.tenant == tenant), None)
        session = self._session
        if run is None or session is None:
            return HeldElsewhere(left_out="the courier has no connection to the sidecar")
        return session.locator.holders(run, bytes.fromhex(namespace), keys, seconds, are_own=are_own)

    def take_offer(self, space: CourierSpace, terms: PullTerms, seconds: float) -> tuple[int, MissReason | None]:
        """Pull what a leaving node offers; how many blocks are here afterwards, and why not all. Raises
        `Unavailable`."""
        session, now = self._session, self.clock.monotonic_seconds()
        entry = session.table.alive(now).get(terms.asking) if session is not None else None
        if session is None or session.ways is None or entry is None:
            return 0, MissReason.UNREACHABLE  # this node does not know that one
        keys = list(terms.keys[: max(1, MOST_OFFERED_BYTES // space.block_bytes)])
        question = FetchQuestion(0, 0, space.number, keys, space.match(keys), seconds)
        job = session.fetcher.job(space.run, question)
        job.invited = PeerSource(entry, session.ways)
        answer = session.fetcher.fetch(job)
        return answer.blocks, answer.reason

    def entry(self, here: NodeIdentity) -> NodeEntry:
        """What the directory is told of this node."""
        prints = tuple(sorted({one.fingerprint for one in self.runs()}))[:MAX_FINGERPRINTS]
        return NodeEntry(here.node, here.incarnation, self._address, prints, (VERSION,), tuple(self.doors))

    def told(self) -> CourierFigures:
        """Its figures for people."""
        session, now, counts = self._session, self.clock.monotonic_seconds(), self.figures
        sources = []
        reasons = counts.faults.reasons()
        if session is not None:
            for node, entry in sorted(session.table.alive(now).items())[:MOST_SHOWN]:
                banned = session.choice.is_banned(node, entry.incarnation, now)
                name = f"{node.hex()[:12]} {entry.address}"
                over = session.ways.usable.told(node, now) if session.ways is not None else ""
                sources.append(counts.told(PEER, node, name, BANNED if banned else UP, detail=over))
            if session.directory is not None:
                sources.append(session.directory.figures())
                reasons += [session.directory.reason] if session.directory.reason else []
        if (ways := self.remote) is not None:
            seen = ways.workers.figures()
            one: SourceFigures = counts.told(REMOTE, ways.name, ways.name, seen.state, detail=seen.detail)
            sources.append(msgspec.structs.replace(one, failures=seen.failures))
        dropped = session.announcer.dropped if session is not None and session.announcer is not None else 0
        lines = [line[:MAX_WHERE_CHARACTERS] for line in reasons[:MOST_REASONS]]
        return CourierFigures(sources, lines, counts.fetching, counts.fetched_blocks, counts.fetched_bytes, dropped)
