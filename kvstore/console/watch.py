"""Polls the sidecar's status in a thread of its own, and keeps the last one.

    connect > Stat > wait POLL_SECONDS > Stat ...        no answer: close, wait longer each time, connect again

It speaks the observers' protocol, so the sidecar refuses every change. While the sidecar is away the last numbers stay,
and `contact` says how old they are.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import msgspec

from kvstore.block.errors import StoreError
from kvstore.client.connection import asked_stat, check_numbers
from kvstore.client.framing import FramedSocket, TimedOut
from kvstore.console.events import ConsoleEvent, events_between
from kvstore.console.figures import ConsoleStatus, Contact, reading_of, status_of, status_of_tenant
from kvstore.console.rings import Rings, SeriesAnswer
from kvstore.protocol import messages as m
from kvstore.protocol.told import PrefixFigures
from kvstore.status.tree import SidecarStatus
from tiering.clock import Clock

A = TypeVar("A")
POLL_SECONDS = 2.0
ANSWER_SECONDS = 5.0
ASK_EVERY_SECONDS = 0.1
"""From one question of a reader's to the next, so that however many ask, engines wait no longer at the sidecar."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0
MOST_EVENTS, EVENTS_TOLD = 500, 8


class SidecarWatch:
    """Start it, read it from any thread, close it."""

    def __init__(
        self, socket: str, version: str, clock: Clock, poll_seconds: float = POLL_SECONDS, acts: bool = False
    ) -> None:
        """socket: the observers' (or the operator's). version: of this program, for `/api/status`; acts: likewise."""
        self._path = socket
        self._version = version
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._acts = acts
        self._lock = threading.Lock()
        self._rings = Rings()
        self._facts: SidecarStatus | None = None
        self._events: deque[ConsoleEvent] = deque(maxlen=MOST_EVENTS)
        self._contact = Contact(False, clock.wall_seconds(), None)
        self._told: Callable[[], None] = lambda: None
        self._asking = threading.Lock()  # `why` and `prefixes` open one connection at a time
        self._asks_at = -math.inf  # the soonest that the next of them may
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-console-watch", daemon=True)

    def start(self, told: Callable[[], None]) -> None:
        """told: called by this thread after each poll."""
        self._told = told
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_SECONDS + 1)

    # What it knows -------------------------------------------------------------------------------------------------

    def facts(self) -> SidecarStatus | None:
        """The sidecar's last status."""
        return self._facts

    def status(self) -> ConsoleStatus:
        with self._lock:
            told = self._newest_first()[:EVENTS_TOLD]
            one = status_of(self._version, self._clock.wall_seconds(), self._contact, self._facts, told)
            return msgspec.structs.replace(one, acts=self._acts)

    def status_of_tenant(self, tenant: str) -> ConsoleStatus:
        with self._lock:
            return status_of_tenant(self._version, self._clock.wall_seconds(), self._contact, self._facts, tenant)

    def window(self, name: str) -> SeriesAnswer:
        """Time series; name: one of `WINDOWS`."""
        with self._lock:
            return self._rings.window(name, self._clock.wall_seconds())

    def events(self) -> list[ConsoleEvent]:
        with self._lock:
            return self._newest_first()

    def _newest_first(self) -> list[ConsoleEvent]:
        return sorted(reversed(self._events), key=lambda one: -one.at)  # the sidecar's arrive late

    def why(self, request: str, tenant: str = "") -> m.WhyReply | None:
        """What the sidecar knows of requests whose names begin so, of one tenant or of all; None while another reader
        asks. Waits. Raises `StoreError`."""
        return self._asked(m.Why(request, tenant), m.WhyReply)

    def prefixes(self, tenant: str = "") -> PrefixFigures | None:
        reply = self._asked(m.Prefixes(tenant), m.PrefixesReply)
        return reply.figures if reply is not None else None

    def _asked(self, verb: m.Verb, kind: type[A]) -> A | None:
        if not self._asking.acquire(timeout=ANSWER_SECONDS):
            return None
        try:
            self._clock.sleep(max(0.0, self._asks_at - self._clock.monotonic_seconds()))
            self._asks_at = self._clock.monotonic_seconds() + ASK_EVERY_SECONDS
            with closing(FramedSocket(self._path, "kvstore console", b"", self._clock, ANSWER_SECONDS)) as wire:
                answer = wire.call(verb, ANSWER_SECONDS).answer
            if not isinstance(answer, kind):
                raise StoreError(answer.text if isinstance(answer, m.Failed) else "the sidecar is of another version")
            check_numbers(msgspec.to_builtins(answer))
            return answer
        except (TimedOut, ValueError, OSError) as error:
            raise StoreError(" ".join(str(error).split()) or "no answer") from None
        finally:
            self._asking.release()

    # Asking --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wire: FramedSocket | None = None
        pause = FIRST_PAUSE_SECONDS
        while not self._ends.is_set():
            try:
                wire = wire or FramedSocket(self._path, "kvstore console", b"", self._clock, ANSWER_SECONDS)
                self._take(asked_stat(wire, ANSWER_SECONDS))
                pause, rest = FIRST_PAUSE_SECONDS, self._poll_seconds
            except (StoreError, TimedOut, ValueError, OSError) as error:
                if wire is not None:
                    wire.close()
                wire = None
                self._lose(" ".join(str(error).split()) or f"no answer within {ANSWER_SECONDS:g} s")
                pause, rest = min(2 * pause, LONGEST_PAUSE_SECONDS), pause
            self._told()
            self._ends.wait(rest)
        if wire is not None:
            wire.close()

    def _take(self, facts: SidecarStatus) -> None:
        with self._lock:
            now = self._clock.wall_seconds()
            if not self._contact.connected and self._facts is not None:
                away = now - self._contact.since
                text = f"The sidecar answers again, after {away:.0f} s."
                self._events.append(ConsoleEvent(now, "info", "contact", text))
            self._events.extend(events_between(self._facts, facts))
            since = self._contact.since if self._contact.connected else now
            self._contact = Contact(True, since, facts.at)
            self._facts = facts
            self._rings.take(reading_of(facts))

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._contact.connected:
                now = self._clock.wall_seconds()
                self._events.append(ConsoleEvent(now, "error", "contact", f"The sidecar does not answer: {why}."))
                self._contact = Contact(False, now, self._contact.numbers_from, why)
            else:
                self._contact = Contact(False, self._contact.since, self._contact.numbers_from, why)
