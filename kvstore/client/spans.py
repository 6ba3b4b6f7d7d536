"""OpenTelemetry spans of the store's work for a request (look-up, lease, load), as children of the engine's own.

    a verb ends > queued, at most `MOST_WAITING`, or dropped and counted > a thread makes its span > the SDK

Only with `traces` on, and for requests that bring a `traceparent`. The engine's thread only appends to the queue; the
other thread imports opentelemetry. Never a token, a key or text of a prompt.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable, Mapping
from logging import getLogger
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from kvstore.block.account import Account

MOST_WAITING = 2048
"""Spans queued at most; further ones are dropped."""
MOST_STATE_CHARACTERS = 512
CLOSE_SECONDS = 2.0
MATCH, LEASE, LOAD = "kvstore match", "kvstore lease", "kvstore load"

_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_log = getLogger(__name__)


class EndedSpan(NamedTuple):
    """Times in nanoseconds since 1970. headers: the parent's, as W3C Trace Context has them."""

    name: str
    headers: Mapping[str, str]
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int | float]


class RequestTrace:
    """The trace of one request; does nothing for a request without a parent, or with tracing off."""

    __slots__ = ("_headers", "_queue")

    def __init__(self, queue: SpanQueue | None = None, headers: Mapping[str, str] | None = None) -> None:
        self._queue = queue if headers else None
        self._headers = headers or {}

    def looked_up(self, seconds: float, account: Account) -> None:
        """A look-up was just answered, after so many seconds. account: the prompt's."""
        if self._queue is not None:
            self._queue.add(MATCH, self._headers, seconds, _of_account(account))

    def leased(self, seconds: float, account: Account) -> None:
        """A lease was just answered, after so many seconds."""
        if self._queue is not None:
            self._queue.add(LEASE, self._headers, seconds, _of_account(account))

    def loaded(self, seconds: float, tokens: int) -> None:
        """A load has ended. tokens: those that need not be computed."""
        if self._queue is not None:
            self._queue.add(LOAD, self._headers, seconds, {"gen_ai.usage.cache_read.input_tokens": tokens})


NO_TRACE = RequestTrace()


def _of_account(account: Account) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {"kvstore.tokens.asked": account.asked}
    attributes |= {f"kvstore.tokens.hit.{tier}": tokens for tier, tokens in account.hits.items()}
    return attributes | {f"kvstore.miss.{reason}": tokens for reason, tokens in account.misses.items()}


class SpanQueue:
    """The spans of one engine's scheduler; only the scheduler's thread adds to it."""

    def __init__(self, model: str, wall_ns: Callable[[], int], make_tracer: Callable[[], Any] | None = None) -> None:
        """model: the engine's name of it. wall_ns: since 1970. make_tracer: in place of the process's own."""
        self._model = model
        self._wall_ns = wall_ns
        self._make_tracer = make_tracer or _tracer
        self._waiting: SimpleQueue[EndedSpan | None] = SimpleQueue()  # None: the end
        self._thread: Thread | None = None
        self.dropped = 0
        """Spans since the start that were not exported: the queue was full, or none could be made."""

    def trace(self, headers: object) -> RequestTrace:
        """The trace of a request that came with these headers; a malformed `traceparent` counts as none."""
        parent = headers.get("traceparent") if isinstance(headers, Mapping) else None
        if not isinstance(headers, Mapping) or not isinstance(parent, str) or not _PARENT.match(parent[:64]):
            return NO_TRACE
        state = headers.get("tracestate")
        is_state = isinstance(state, str) and len(state) <= MOST_STATE_CHARACTERS
        return RequestTrace(self, {"traceparent": parent[:64], **({"tracestate": str(state)} if is_state else {})})

    def add(
        self, name: str, headers: Mapping[str, str], seconds: float, attributes: dict[str, str | int | float]
    ) -> None:
        """Queue a span that just ended. Does not block."""
        if self._waiting.qsize() >= MOST_WAITING:
            self.dropped += 1
            return
        now = self._wall_ns()
        attributes |= {"gen_ai.request.model": self._model, "kvstore.wait_seconds": seconds}
        self._waiting.put(EndedSpan(name, headers, now - int(1e9 * max(0.0, seconds)), now, attributes))
        if self._thread is None:
            self._thread = Thread(target=self._run, name="kv-spans", daemon=True)
            try:
                self._thread.start()
                atexit.register(self.close)
            except RuntimeError:  # no thread available: later spans are dropped
                pass

    def close(self) -> None:
        """Export what is queued, for `CLOSE_SECONDS` at most, and end."""
        self._waiting.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            span = _maker(self._make_tracer())
        except (ImportError, RuntimeError, ValueError, OSError) as error:
            line = str(error).partition("\n")[0]
            _log.warning("no spans are made, although traces is on: %s; pip install 'prefix-kvstore[otel]'", line)
            span = None
        told = 0
        while (one := self._waiting.get()) is not None:
            try:
                if span is None:
                    self.dropped += 1
                else:
                    span(one)
            except (RuntimeError, ValueError, TypeError, OSError):
                self.dropped += 1
            if span is not None and self.dropped >= 2 * told + 1:
                told = self.dropped
                _log.warning("%d spans were dropped so far: they end faster than they can be exported", told)


def _maker(tracer: Any) -> Callable[[EndedSpan], None]:
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()

    def make(one: EndedSpan) -> None:
        parent = propagator.extract(dict(one.headers))
        span = tracer.start_span(
            one.name, context=parent, kind=SpanKind.INTERNAL, attributes=one.attributes, start_time=one.start_ns
        )
        span.end(one.end_ns)

    return make


def _tracer() -> Any:
    """From the engine's own provider; without one, from a provider configured by the standard variables (OTEL_...)."""
    from opentelemetry import trace

    provider: Any = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "kvstore"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=MOST_WAITING))
        atexit.register(provider.shutdown)
    return provider.get_tracer("kvstore")
