"""A tenant's socket, for callers of gRPC: its namespaces, and what is stored in them.

Each tenant has a connection of its own, and another for long calls, so that no tenant waits behind another one's calls.
Nothing here counts as a request: look-ups have `counts=False`. Only keys pass here, never blocks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.block.errors import BadInput, StoreError, Unreachable
from kvstore.block.identity import Namespace, PrefixHasher
from kvstore.client.connection import check_answer, matched_up_to
from kvstore.client.framing import FramedSocket, TimedOut, drained
from kvstore.client.warming import Warming
from kvstore.protocol import messages as m
from kvstore.protocol.messages import MatchReply
from kvstore.protocol.words import ID_DIGITS, pick, printable
from tiering.clock import Clock

A = TypeVar("A")
ENGINE = "kvstore network"
ANSWER_SECONDS = 5.0
"""For a running sidecar: after it, a caller with a later deadline gets `UNAVAILABLE`."""
CONNECT_SECONDS, PAUSE_SECONDS = 2.0, 0.2
"""For connecting; and the pause after a failure, before the next call tries again."""
LISTED_SECONDS = 1.0
"""How long a list of namespaces is used."""
MOST_PAGES = 1024
MOST_WANTED = 128
"""Characters of the name of a namespace or a model."""

_log = logging.getLogger(__name__)


class SidecarBusy(StoreError):
    """The sidecar is too busy for this tenant."""


@dataclass(frozen=True, slots=True)
class CallTime:
    """A call's deadline, by the monotonic clock."""

    clock: Clock
    ends_at: float

    def left(self) -> float:
        """Seconds. Raises `TimedOut` if there are none."""
        left = self.ends_at - self.clock.monotonic_seconds()
        if left <= 0:
            raise TimedOut
        return left


@dataclass(frozen=True, slots=True)
class ListedSpace:
    """A namespace of the tenant. place: in the sidecar's list."""

    run: _LinkRun
    id: str
    namespace: Namespace
    listed: m.Opened
    place: int


@dataclass(frozen=True, slots=True)
class OpenSpace:
    """A namespace with its number on a connection."""

    run: _LinkRun
    id: str
    number: int
    block_tokens: int
    hasher: PrefixHasher


@dataclass(eq=False, slots=True)
class _LinkRun:
    """A connection, and the namespaces opened on it."""

    wire: FramedSocket
    opened: dict[str, OpenSpace] = field(default_factory=dict)
    spaces: list[ListedSpace] = field(default_factory=list)
    listed_at: float = float("-inf")


class TenantLink:
    """Thread-safe."""

    def __init__(self, tenant: str, path: str, clock: Clock) -> None:
        self.tenant = tenant
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()  # while it connects or lists
        self._run: _LinkRun | None = None
        self._waits_until = float("-inf")

    def again(self, work: Callable[[], A]) -> A:
        """Run work, and once more if its connection turns out to lead to an earlier sidecar."""
        run = self._run
        try:
            return work()
        except Unreachable:
            if run is None or not run.wire.closed or self._run is not run:
                raise
            return work()

    def node(self, time: CallTime) -> str:
        """The id of the socket's node, the same after a restart. An earlier version has only an id for its run."""
        welcome = self._connected(time).wire.welcome
        return (welcome.node or welcome.run).hex()

    def spaces(self, time: CallTime, run: _LinkRun | None = None) -> list[ListedSpace]:
        """All of the tenant's, at most `LISTED_SECONDS` old. Raises `StoreError`, `TimedOut`."""
        run = run or self._connected(time)
        if self._clock.monotonic_seconds() - run.listed_at < LISTED_SECONDS:
            return run.spaces
        with self._locked(time):
            if self._clock.monotonic_seconds() - run.listed_at >= LISTED_SECONDS:
                found: list[ListedSpace] = []
                first, began_at = 0, self._clock.monotonic_seconds()
                for _ in range(MOST_PAGES):
                    page, first = self.page(first, time, run)
                    found += page
                    if not first:
                        break
                run.spaces, run.listed_at = found, began_at
            return run.spaces

    def page(self, first: int, time: CallTime, run: _LinkRun | None = None) -> tuple[list[ListedSpace], int]:
        """Some of them, from that position on, and the position to go on from; 0 at the end."""
        run = run or self._connected(time)
        reply = self._ask(run, m.Namespaces(first), m.NamespacesReply, time)
        try:
            listed = [
                ListedSpace(run, one.id, Namespace.unpack(one.packed), one, first + at)
                for at, one in enumerate(reply.namespaces)
            ]
        except ValueError as error:
            raise StoreError(f"a namespace of another version: {error}") from None
        return listed, reply.next

    def space(self, wanted: str, time: CallTime, run: _LinkRun | None = None) -> OpenSpace:
        """The namespace whose id begins so. Raises `BadInput`, which lists the candidates."""
        run = run or self._connected(time)
        known = run.opened.get(wanted)
        if known is not None:
            return known
        if len(wanted) > MOST_WANTED:
            raise BadInput(f"a namespace's id of {len(wanted)} characters; give its first digits")
        spaces = self.spaces(time, run)
        models = [printable(one.namespace.model) for one in spaces]
        return self.open(spaces[pick(wanted, [one.id for one in spaces], models, "", "give more digits")], time)

    def spaces_of_model(self, model: str, names: Mapping[str, str], time: CallTime) -> list[ListedSpace]:
        """Those of a model, given by its fingerprint or its name in an engine. names: the latter, by id. Raises
        `BadInput` if there are none."""
        if not 0 < len(model) <= MOST_WANTED * 4:
            raise BadInput(
                f"a model's name of {len(model)} characters; give its fingerprint, or what an engine calls it"
            )
        spaces = self.spaces(time)
        found = [one for one in spaces if model in (one.namespace.model, names.get(one.id))]
        if not found:
            there = ", ".join(sorted({printable(names.get(one.id) or one.namespace.model) for one in spaces})[:8])
            raise BadInput(f"no namespace is of the model {printable(model)!r}; there are: {there or 'none yet'}")
        return found

    def open(self, space: ListedSpace, time: CallTime) -> OpenSpace:
        run, tokens = space.run, space.namespace.layout.block_tokens
        if space.id not in run.opened:
            verb = m.OpenNamespace(space.listed.packed, space.listed.payload_bytes)
            grant = self._ask(run, verb, m.Granted, time).grant
            hasher = PrefixHasher(grant.identity_key, tokens)
            run.opened[space.id] = OpenSpace(run, space.id, grant.number, tokens, hasher)
        return run.opened[space.id]

    def match(self, space: OpenSpace, keys: Sequence[bytes], time: CallTime) -> MatchReply:
        """The longest stored prefix. Pins, moves and counts nothing."""
        if not keys:
            return MatchReply(0)
        most = min(m.MAX_KEYS, max(1, space.run.wire.welcome.max_keys))
        verb = m.MatchPrefix(space.number, list(keys[:most]), counts=False)
        matched = self._ask(space.run, verb, m.Matched, time)
        try:
            check_answer(verb, matched, None)
        except ValueError as error:
            raise StoreError(f"an answer that cannot be right ({error})") from None
        return matched_up_to(matched.reply, len(keys), most)

    def drop(self, wanted: str, seconds: float, time: CallTime) -> int:
        with self._own_connection(time) as run:
            space = self.space(wanted, time, run)
            return self._ask(run, m.Drop(space.number, seconds), m.Counted, time, seconds + ANSWER_SECONDS).blocks

    def warm(
        self, wanted: str, keys_of: Callable[[OpenSpace], Sequence[list[bytes]]], time: CallTime
    ) -> tuple[str, Warming]:
        """Promote prompts to DRAM, until shortly before the call's end; returns the namespace's id, and the outcomes.
        keys_of: the prompts' keys in a namespace."""
        with self._own_connection(time) as run:
            space = self.space(wanted, time, run)
            chains = keys_of(space)
            reserve = min(1.0, time.left() / 5)  # for the answer

            def ask(verb: m.Verb, kind: type[A], seconds: float) -> A:
                return self._ask(run, verb, kind, time, seconds)

            warming = Warming(ask, space.number, self._clock, time.ends_at - reserve)
            for keys in chains:
                warming.take(keys)
            return space.id, warming

    def close(self) -> None:
        with self._lock:
            if self._run is not None:
                self._run.wire.close()

    # Asking --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _own_connection(self, time: CallTime) -> Iterator[_LinkRun]:
        run = _LinkRun(self._call_up(time))
        try:
            yield run
        finally:
            run.wire.close()

    def _connected(self, time: CallTime) -> _LinkRun:
        run = self._run
        if run is not None and not run.wire.closed:
            return run
        with self._locked(time):
            run = self._run
            if run is None or run.wire.closed:
                if self._clock.monotonic_seconds() < self._waits_until:
                    raise Unreachable("the sidecar does not answer")
                run = self._run = _LinkRun(self._call_up(time))
            return run

    @contextmanager
    def _locked(self, time: CallTime) -> Iterator[None]:
        if not self._lock.acquire(timeout=time.left()):
            raise TimedOut
        try:
            yield
        finally:
            self._lock.release()

    def _call_up(self, time: CallTime) -> FramedSocket:
        time.left()
        try:  # to a limit of its own: the next call has the connection
            return FramedSocket(self._path, ENGINE, b"", self._clock, CONNECT_SECONDS)
        except Unreachable as error:
            self._waits_until = self._clock.monotonic_seconds() + PAUSE_SECONDS
            _log.debug("no connection to the sidecar", extra={"reason": str(error)})
            raise Unreachable("the sidecar does not answer") from None  # callers need not know the path

    def _ask(self, run: _LinkRun, verb: m.Verb, kind: type[A], time: CallTime, most: float = ANSWER_SECONDS) -> A:
        left = time.left()
        try:
            answer = run.wire.call(verb, min(left, most)).answer
        except TimedOut:
            if left <= most:
                raise
            raise Unreachable(f"the sidecar did not answer in {most:g} s") from None
        except Unreachable:
            raise Unreachable("the sidecar does not answer") from None
        for undo in drained(run.wire.too_late):
            run.wire.post(undo)
        if isinstance(answer, kind):
            return answer
        if not isinstance(answer, m.Failed):
            raise Unreachable("the sidecar is of another version")
        if answer.fault is m.RequestFault.BAD_INPUT:
            raise BadInput(answer.text)
        if answer.fault is m.RequestFault.BUSY:
            raise SidecarBusy(answer.text)
        raise Unreachable(answer.text)


def described(space: ListedSpace) -> str:
    return f"{space.id[:ID_DIGITS]} ({printable(space.namespace.model)}, {printable(space.namespace.codec)})"
