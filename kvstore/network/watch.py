"""The sidecar's status from the observers' socket, fetched every other second: health, for operators, and how fast
engines load."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvstore.block.errors import StoreError, Unreachable
from kvstore.client.connection import asked_stat
from kvstore.client.framing import FramedSocket, TimedOut
from kvstore.network.links import ENGINE
from kvstore.protocol.words import printable
from kvstore.status.tree import NamespaceStatus, SidecarStatus
from tiering.clock import Clock

POLL_SECONDS, ANSWER_SECONDS, FRESH_SECONDS = 2.0, 5.0, 0.5
READY = ("ready", "degraded")


class StatusWatch:
    """Start it, read it from any thread, close it."""

    def __init__(self, socket: str, clock: Clock) -> None:
        self._path = socket
        self._clock = clock
        self._asking = threading.Lock()
        self._wire: FramedSocket | None = None
        self._facts: SidecarStatus | None = None
        self._alive = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="kv-network-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
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
            self._wire = self._wire or FramedSocket(self._path, ENGINE, b"", self._clock, ANSWER_SECONDS)
            self._facts = asked_stat(self._wire, seconds)
            self._alive = True
            return self._facts
        except (StoreError, TimedOut, ValueError, OSError) as error:
            if isinstance(error, TimedOut) and seconds < ANSWER_SECONDS:
                raise  # a fault of the query, not of the sidecar
            self._alive = False
            if self._wire is not None:
                self._wire.close()
            self._wire = None
            raise Unreachable("the sidecar does not answer at its observers' socket") from None
        finally:
            self._asking.release()

    def names(self, tenant: str, seconds: float | None = None) -> dict[str, str]:
        """Engines' names of their models, by the namespace's id. seconds: to fetch a new status, if the last one is
        older than `FRESH_SECONDS`; None: use the last."""
        facts = self.facts()
        if seconds is not None and facts is not None and self._clock.wall_seconds() - facts.at > FRESH_SECONDS:
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
        while not self._ends.is_set():
            try:
                self.ask(ANSWER_SECONDS)
            except (Unreachable, TimedOut):
                pass
            self._ends.wait(POLL_SECONDS)
