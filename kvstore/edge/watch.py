"""A sidecar's status from its observers' socket: polled by a thread of its own for those that follow it, and asked for
at once where an answer must not be old. That socket serves no verb that changes anything.

    connect > Stat > wait POLL_SECONDS > Stat ...        no answer: close, wait longer each time, connect again
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing

from kvstore.block.errors import StoreError, Unreachable
from kvstore.client.connection import asked_stat
from kvstore.client.framing import FramedSocket, TimedOut
from kvstore.protocol import messages as m
from kvstore.protocol.words import printable
from kvstore.status.tree import NamespaceStatus, SidecarStatus
from tiering.clock import Clock

ENGINE = "kvstore edge"
POLL_SECONDS, ANSWER_SECONDS, FRESH_SECONDS = 2.0, 5.0, 0.5
FIRST_PAUSE_SECONDS = 0.5
READY = ("ready", "degraded")

Follower = Callable[[SidecarStatus | None, str], None]
"""Called by the watch's thread after each poll with the status, or with None and why there is none."""


class StatusWatch:
    """Start it, read it from any thread, close it."""

    def __init__(self, socket: str, clock: Clock) -> None:
        self.path, self.clock = socket, clock
        self._asking = threading.Lock()
        self._numbering = threading.Lock()
        self._wire: FramedSocket | None = None
        self._numbers: FramedSocket | None = None
        self._facts: SidecarStatus | None = None
        self._why = ""
        self._alive = False
        self._followers: list[Follower] = []
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Poll from now on. Another call changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="kv-edge-watch", daemon=True)
            self._thread.start()

    def follow(self, follower: Follower) -> None:
        self._followers.append(follower)

    def leave(self, follower: Follower) -> None:
        self._followers.remove(follower)

    def close(self) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join(ANSWER_SECONDS + 1)

    def facts(self) -> SidecarStatus | None:
        """The last status, some seconds old; None if the sidecar does not answer."""
        return self._facts if self._alive else None

    @property
    def is_ready(self) -> bool:
        facts = self.facts()
        return facts is not None and facts.state in READY

    def ask(self, seconds: float) -> SidecarStatus:
        """The status now. Raises `Unreachable`, `TimedOut`."""
        if not self._asking.acquire(timeout=seconds):
            raise TimedOut
        try:
            self._wire = self._wire or self.connected()
            self._facts = asked_stat(self._wire, seconds)
            self._alive = True
            return self._facts
        except (StoreError, TimedOut, ValueError, OSError) as error:
            if isinstance(error, TimedOut) and seconds < ANSWER_SECONDS:
                raise  # a fault of the query, not of the sidecar
            self._alive = False
            self._why = " ".join(str(error).split()) or f"no answer within {ANSWER_SECONDS:g} s"
            if self._wire is not None:
                self._wire.close()
            self._wire = None
            raise Unreachable("the sidecar does not answer at its observers' socket") from None
        finally:
            self._asking.release()

    def numbers(self) -> SidecarStatus:
        """The numbers now, without lists, over a connection of their own. Raises `StoreError`."""
        with self._numbering:
            try:
                if self._numbers is None or self._numbers.closed:
                    self._numbers = self.connected()
                return asked_stat(self._numbers, ANSWER_SECONDS, numbers_only=True)
            except (StoreError, TimedOut, ValueError, OSError):
                if self._numbers is not None:
                    self._numbers.close()
                raise Unreachable("the sidecar does not answer at its observers' socket") from None

    def is_alive(self) -> bool:
        """Whether the sidecar answers at all, whatever its store waits for."""
        try:
            with closing(self.connected()) as wire:
                return isinstance(wire.call(m.Ping(), ANSWER_SECONDS).answer, m.Done)
        except (StoreError, TimedOut, ValueError, OSError):
            return False

    def connected(self) -> FramedSocket:
        """A new connection. Raises `StoreError`, `TimedOut`, `OSError`."""
        return FramedSocket(self.path, ENGINE, b"", self.clock, ANSWER_SECONDS)

    # What gRPC's services look up ----------------------------------------------------------------------------------

    def names(self, tenant: str, seconds: float | None = None) -> dict[str, str]:
        """Engines' names of their models, by the namespace's id. seconds: to fetch a new status, if the last one is
        older than `FRESH_SECONDS`; None: use the last."""
        facts = self.facts()
        if seconds is not None and facts is not None and self.clock.wall_seconds() - facts.at > FRESH_SECONDS:
            try:
                self.ask(seconds)
            except (Unreachable, TimedOut):
                pass
        return {one.digest: one.name for one in self._of(tenant) if one.name}

    def load_rates(self, tenant: str, namespace: str) -> Mapping[str, float]:
        """Tokens per second that engines loaded of a namespace, by tier; empty if none has reported."""
        found = [one.load_tokens_per_second for one in self._of(tenant) if one.digest == namespace]
        return found[0] if found else {}

    def _of(self, tenant: str) -> list[NamespaceStatus]:
        facts = self.facts()
        return [one for one in facts.namespaces if one.tenant == printable(tenant)] if facts is not None else []

    def _poll(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._ends.is_set():
            try:
                facts: SidecarStatus | None = self.ask(ANSWER_SECONDS)
                pause, rest = FIRST_PAUSE_SECONDS, POLL_SECONDS
            except (Unreachable, TimedOut):
                facts, rest = None, pause
                pause = min(2 * pause, POLL_SECONDS)
            for follower in list(self._followers):
                follower(facts, self._why)
            self._ends.wait(rest)
