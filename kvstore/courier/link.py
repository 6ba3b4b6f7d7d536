"""A tenant's connection to `courier.sock`: takes the sidecar's questions and sends the answers.

    connect > ask for a pipe > Questions > (notified, or a worker has an answer) > Questions > ... > closed > connect

One thread waits for notifications; a worker that has an answer sends it itself, and passes on the questions that come
back. Everything learned on a connection (namespaces' numbers, mapped memory) ends with it. A sidecar of an earlier
version is not queried.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.block.account import MissReason
from kvstore.block.errors import Unreachable
from kvstore.block.identity import Namespace
from kvstore.client.connection import REASON_OF_FAULT, SidecarConnection, Unavailable, spans
from kvstore.client.framing import FramedSocket, drained
from kvstore.courier.figures import OncePerKind
from kvstore.courier.uses import Uses
from kvstore.protocol import messages as m
from kvstore.protocol.courier import MAX_QUESTIONS, CourierFigures, QuestionAnswered
from kvstore.protocol.notify_pipe import NotifyPipeEnd
from kvstore.protocol.replies import Grant, LeaseReply, ReserveReply
from tiering.clock import Clock
from tiering.frame import frame_bytes

ENGINE = "kvstore courier"
ANSWER_SECONDS = 5.0
"""For requests that a running sidecar answers at once."""
CONNECT_SECONDS, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 0.05, 2.0
UNTOLD_SECONDS = 0.05
"""How often a sidecar without notifications is asked."""
MOST_PAGES = 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CourierSpace:
    """A tenant's namespace on a connection. id: its digest. frames: bytes of a frame of each part."""

    number: int
    id: bytes
    block_tokens: int
    grant: Grant
    frames: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        return sum(self.frames)


@dataclass(eq=False)
class CourierRun:
    """One connection, and what was learned on it. node, incarnation: the sidecar's."""

    tenant: str
    connection: SidecarConnection
    by_number: dict[int, CourierSpace] = field(default_factory=dict)
    by_id: dict[bytes, CourierSpace] = field(default_factory=dict)
    uses: Uses = field(default_factory=Uses)
    _listing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def fingerprint(self) -> bytes:
        """Of the tenant's keys."""
        return self.connection.wire.welcome.fingerprint

    @property
    def node(self) -> bytes:
        return self.connection.wire.welcome.node

    @property
    def incarnation(self) -> bytes:
        return self.connection.wire.welcome.incarnation

    @property
    def is_over(self) -> bool:
        return self.connection.wire.closed

    def space(self, number: int) -> CourierSpace:
        """The namespace of that number. Raises `Unavailable`."""
        if number not in self.by_number:
            self.list_spaces()
        found = self.by_number.get(number)
        if found is None:
            raise Unavailable(MissReason.UNREACHABLE, "the sidecar names a namespace that it does not list")
        return found

    def space_of(self, digest: bytes) -> CourierSpace | None:
        """The namespace of that digest, if it is known. Lists nothing, since any peer may ask."""
        return self.by_id.get(digest)

    def list_spaces(self) -> list[CourierSpace]:
        """Open the namespaces that are new since the last call. Raises `Unavailable`."""
        with self._listing:
            first = 0
            for _ in range(MOST_PAGES):
                page = self.connection.ask(m.Namespaces(first), m.NamespacesReply, ANSWER_SECONDS)
                for one in page.namespaces:
                    self._open(one)
                first = page.next
                if not first:
                    break
            return list(self.by_id.values())

    def _open(self, listed: m.Opened) -> None:
        try:
            digest = bytes.fromhex(listed.id)
            if digest in self.by_id:
                return
            tokens = Namespace.unpack(listed.packed).layout.block_tokens
        except ValueError as error:
            raise Unavailable(MissReason.UNREACHABLE, f"a namespace of another version: {error}") from None
        verb = m.OpenNamespace(listed.packed, listed.payload_bytes)
        grant = self.connection.ask(verb, m.Granted, ANSWER_SECONDS).grant
        sizes = tuple(frame_bytes(max(0, size)) for size in grant.payload_bytes)
        opened = CourierSpace(grant.number, digest, tokens, grant, sizes)
        self.by_number[grant.number] = self.by_id[digest] = opened

    def match(self, space: CourierSpace, keys: Sequence[bytes]) -> int:
        """How many of these blocks are readable. Raises `Unavailable`."""
        verb = m.MatchPrefix(space.number, list(keys[: self.connection.max_keys]), counts=False)
        return self.connection.ask(verb, m.Matched, ANSWER_SECONDS).reply.blocks

    def lease(self, space: CourierSpace, keys: Sequence[bytes], seconds: float) -> LeaseReply:
        """Pin the readable prefix, promoted to DRAM within that time, and map it. Raises `Unavailable`."""
        verb = m.LeasePrefix(space.number, list(keys), 0, 1000 * seconds, counts=False)
        steps = self.connection.leasing(verb)
        return self.connection.walk(steps, seconds + ANSWER_SECONDS, lambda: ANSWER_SECONDS)

    def release(self, lease: int) -> None:
        """Does not block."""
        self.connection.let_go(lease)

    def frames(self, places: Sequence[Sequence[int]], *, writable: bool) -> list[list[memoryview]]:
        """The bytes at places of a lease or a reservation, by part; as many as are mapped."""
        table = self.connection.writable if writable else self.connection.readable
        return [[span.view for span in spans(table, column)] for column in places]

    def reserve(self, space: CourierSpace, before: bytes | None, keys: Sequence[bytes], first: int) -> ReserveReply:
        """Reserve and map slots for blocks of a chain from its block `first` on. before: the key of the preceding
        block, which is readable; None without one. Raises `Unavailable`."""
        known = [before] if before is not None else []
        verb = m.Reserve(space.number, [*known, *keys], first, skipped=first - len(known))
        answered = self.connection.answer(verb, ANSWER_SECONDS)
        if isinstance(answered.answer, m.Failed):
            raise Unavailable(REASON_OF_FAULT[answered.answer.fault], answered.answer.text)
        if not isinstance(answered.answer, m.Reserved):
            raise Unavailable(MissReason.UNREACHABLE, "an answer of another kind")
        reply = answered.answer.reply
        if reply.reservation:
            try:
                mapping = self.connection.mapping(reply.places, writable=True, namespace=space.number)
                self.connection.walk(mapping, ANSWER_SECONDS, lambda: ANSWER_SECONDS)
            except BaseException:
                self.abort(reply.reservation)
                raise
        return reply

    def abort(self, reservation: int) -> None:
        self.connection.post(m.Abort(reservation))

    def close(self) -> None:
        self.connection.close()


class CourierLink:
    """Start it, answer through it from any thread, close it. A subclass executes the sidecar's questions: `begin`,
    `take` and `gone` are called by any thread, and must not block."""

    def __init__(
        self,
        tenant: str,
        path: str,
        clock: Clock,
        session: bytes,
        told: OncePerKind,
    ) -> None:
        """path: of `courier.sock`. session: the token of all links of a courier: the sidecar counts what a courier
        reports once, over whichever of its links it comes."""
        self.tenant = tenant
        self._path = path
        self._clock = clock
        self._token = session
        self._told = told
        self._run: CourierRun | None = None
        self._answers: deque[tuple[CourierRun, QuestionAnswered]] = deque()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"kv-courier-{tenant}", daemon=True)

    def begin(self, run: CourierRun) -> None:
        """A connection was made."""
        raise NotImplementedError

    def take(self, run: CourierRun, wanted: m.QuestionsReply) -> None:
        """New questions, and fetches that are over."""
        raise NotImplementedError

    def gone(self, run: CourierRun) -> None:
        """The connection is gone, and all its questions are void."""
        raise NotImplementedError

    @property
    def run(self) -> CourierRun | None:
        """The connection, while there is one."""
        run = self._run
        return run if run is not None and not run.is_over else None

    def start(self) -> None:
        self._thread.start()

    def answer(self, run: CourierRun, answer: QuestionAnswered) -> None:
        """Send an answer to a question of that connection."""
        self._answers.append((run, answer))
        self.exchange(run)

    def exchange(self, run: CourierRun, told: CourierFigures | None = None) -> None:
        """Send answers, and pass on the questions that come back. Waits for the sidecar alone."""
        try:
            while not run.is_over:
                answers = []
                for of, answer in drained(self._answers):
                    if of is run:
                        answers.append(answer)
                    if len(answers) == MAX_QUESTIONS:
                        break
                wanted = run.connection.ask(m.Questions(answers, told), m.QuestionsReply, ANSWER_SECONDS)
                told = None
                self.take(run, wanted)
                run.connection.unmap(run.connection.wire.retired())
                run.connection.settle()
                if not wanted.more and not self._answers:
                    return
        except Unavailable as away:
            _log.debug("the sidecar was not asked", extra={"tenant": self.tenant, "reason": away.detail})

    def close(self) -> None:
        """Disconnect. Fetches in progress end as if the sidecar had disconnected."""
        self._ends.set()
        run = self._run
        if run is not None:
            run.close()

    # The thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._ends.is_set():
            try:
                run = self._connected()
            except (Unreachable, Unavailable) as error:
                self._told.say(f"sidecar {self.tenant}", f"tenant {self.tenant}: {error}")
                self._ends.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            self._told.ended(f"sidecar {self.tenant}", f"tenant {self.tenant}: the sidecar answers")
            try:
                self._attend(run)
            finally:
                self._run = None
                self.gone(run)
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
        self.begin(run)
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
