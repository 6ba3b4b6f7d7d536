"""What the console keeps of a sidecar over time: the last status, series, events, and how long ago it answered.

It follows the edge's watch. While the sidecar is away the last numbers stay, and `contact` says how old they are.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from typing import TypeVar

import msgspec

from kvstore.block.errors import StoreError
from kvstore.client.connection import check_numbers
from kvstore.client.framing import TimedOut
from kvstore.console.answers import answers_of
from kvstore.console.events import ConsoleEvent, events_between
from kvstore.console.figures import (
    ConsoleStatus,
    Contact,
    facts_of_tenant,
    reading_of,
    status_of,
    status_of_tenant,
)
from kvstore.console.reasons import ReasonText
from kvstore.console.rings import Rings, SeriesAnswer
from kvstore.edge.watch import ANSWER_SECONDS, StatusWatch
from kvstore.protocol import messages as m
from kvstore.protocol.told import PrefixFigures
from kvstore.status.tree import SidecarStatus

A = TypeVar("A")
ASK_EVERY_SECONDS = 0.25
"""From one question of a reader's to the next, so that however many ask, engines wait no longer at the sidecar."""
MOST_EVENTS, EVENTS_TOLD = 500, 8


class SidecarHistory:
    """Thread-safe."""

    def __init__(self, watch: StatusWatch, version: str, reasons: Mapping[str, ReasonText], acts: bool = False) -> None:
        """version: of this program, for `/api/status`; acts: likewise. reasons: for a miss, in words."""
        self._watch, self._clock = watch, watch.clock
        self._version = version
        self.reasons, self._acts = reasons, acts
        self._lock = threading.Lock()
        self._rings = Rings()
        self._facts: SidecarStatus | None = None
        self._day: Mapping[str, int] | None = None
        self._events: deque[ConsoleEvent] = deque(maxlen=MOST_EVENTS)
        self._contact = Contact(False, self._clock.wall_seconds(), None)
        self._asking = threading.Lock()  # `why` and `prefixes` open one connection at a time
        self._asks_at = -math.inf  # the soonest that the next of them may

    def hear(self, facts: SidecarStatus | None, why: str) -> None:
        """A poll was answered; or it was not, for that reason."""
        with self._lock:
            if facts is not None:
                self._take(facts)
            else:
                self._lose(why)

    # What it knows -------------------------------------------------------------------------------------------------

    def facts(self) -> SidecarStatus | None:
        """The sidecar's last status."""
        return self._facts

    def status(self) -> ConsoleStatus:
        with self._lock:
            told, now = self._newest_first(), self._clock.wall_seconds()
            one = status_of(self._version, now, self._contact, self._facts, told[:EVENTS_TOLD])
            answers = answers_of(now, self._contact, self._facts, self.reasons, self._day, told)
            return msgspec.structs.replace(one, acts=self._acts, answers=answers)

    def status_of_tenant(self, tenant: str) -> ConsoleStatus:
        with self._lock:
            now, facts = self._clock.wall_seconds(), self._facts
            own = facts_of_tenant(facts, tenant) if facts is not None else None
            one = status_of_tenant(self._version, now, self._contact, facts, tenant)
            return msgspec.structs.replace(
                one, answers=answers_of(now, self._contact, own, self.reasons, tenant=tenant)
            )

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
            with closing(self._watch.connected()) as wire:
                answer = wire.call(verb, ANSWER_SECONDS).answer
            if not isinstance(answer, kind):
                raise StoreError(answer.text if isinstance(answer, m.Failed) else "the sidecar is of another version")
            check_numbers(msgspec.to_builtins(answer))
            return answer
        except (TimedOut, ValueError, OSError) as error:
            raise StoreError(" ".join(str(error).split()) or "no answer") from None
        finally:
            self._asking.release()

    def _take(self, facts: SidecarStatus) -> None:
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
        self._day = self._rings.day(facts.at)

    def _lose(self, why: str) -> None:
        if self._contact.connected:
            now = self._clock.wall_seconds()
            self._events.append(ConsoleEvent(now, "error", "contact", f"The sidecar does not answer: {why}."))
            self._contact = Contact(False, now, self._contact.numbers_from, why)
        else:
            self._contact = Contact(False, self._contact.since, self._contact.numbers_from, why)
