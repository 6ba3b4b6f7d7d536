"""Spans of look-ups, leases and loads: children of the engine's, bounded, and none without a parent. With the SDK's
exporter in memory; where the SDK is absent the tests that need it skip."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.test_vllm_requests import request
from engine_adapter.model_files import AdapterDigests
from engine_adapter.paged.lookup import PrefixLookup
from engine_adapter.paged.settings import ConnectorSettings
from engine_adapter.vllm_requests import RequestReader
from kvstore.block.account import MissReason
from kvstore.client.spans import MOST_WAITING, NO_TRACE, SpanQueue
from service.sidecar import Sidecar
from service.test_serve import PATHS
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SECRET = 987_654


class Exported:
    """A queue whose spans end in memory."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed (extra: dev)")
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.queue = SpanQueue("small model", time.time_ns, lambda: provider.get_tracer("kvstore"))

    def spans(self, count: int) -> list[Any]:
        wait_until(lambda: len(self.exporter.get_finished_spans()) >= count)
        found = list(self.exporter.get_finished_spans())
        assert len(found) == count
        return found


def test_a_hit_has_a_look_up_and_a_lease_below_the_engines_span(tmp_path: Path) -> None:
    exported = Exported()
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        handle.put(ids(320, SECRET), random_pages(LAYOUT, 5))
        began = time.time_ns()
        settings = ConnectorSettings("unix:x", match_deadline_ms=5000, lease_deadline_ms=5000)
        lookup = PrefixLookup(handle, handle.hashed(ids(400, SECRET)), "r", time.monotonic, settings)
        lookup.trace = exported.queue.trace(HEADERS)
        assert wait_until(lambda: lookup.matched(0, 1 << 20, MissReason.GRID)) == 320
        lookup.give_back()
        match, lease = exported.spans(2)
        ended = time.time_ns()
        assert (match.name, lease.name) == ("kvstore match", "kvstore lease")
        for span in (match, lease):
            assert span.kind.name == "INTERNAL"
            assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
            assert span.context.trace_state.get("vendor") == "1"
            assert began - 10**9 <= span.start_time <= span.end_time <= ended
            seconds = span.attributes["kvstore.wait_seconds"]
            assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds, abs=1e-6)
            assert span.attributes["gen_ai.request.model"] == "small model"
            assert span.attributes["kvstore.tokens.asked"] == 400
            assert span.attributes["kvstore.tokens.hit.dram"] == 320
            assert str(SECRET) not in repr(dict(span.attributes))
        assert match.attributes["kvstore.miss.partial_block"] == 16
        assert match.attributes["kvstore.miss.absent"] == 64 or match.attributes["kvstore.miss.diverged"] == 64


def test_a_load_says_what_need_not_be_computed_and_none_is_sampled_that_the_parent_did_not_choose() -> None:
    exported = Exported()
    exported.queue.trace({"traceparent": f"00-{TRACE}-{PARENT}-00"}).loaded(0.1, 1)
    exported.queue.trace(HEADERS).loaded(0.25, 192)
    (span,) = exported.spans(1)
    assert span.name == "kvstore load" and span.attributes["gen_ai.usage.cache_read.input_tokens"] == 192
    assert span.end_time - span.start_time == 250_000_000


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        "traceparent",
        {"tracestate": "vendor=1"},
        {"traceparent": 7},
        {"traceparent": "00-0af7-b7ad-01"},
        {"traceparent": f"00-{TRACE.upper()}-{PARENT}-01"},
        {"traceparent": "x" * 1_000_000},
    ],
    ids=lambda one: repr(one)[:30],
)
def test_without_a_parent_there_is_no_span(headers: object) -> None:
    queue = SpanQueue("m", time.time_ns)
    trace = queue.trace(headers)
    trace.loaded(1.0, 1)
    assert trace is NO_TRACE and queue._waiting.empty() and queue._thread is None


def test_a_long_tracestate_is_left_out_and_the_parent_stays() -> None:
    exported = Exported()
    exported.queue.trace({**HEADERS, "tracestate": f"vendor={'x' * 10_000}"}).loaded(1.0, 1)
    (span,) = exported.spans(1)
    assert f"{span.parent.span_id:016x}" == PARENT and not span.context.trace_state


def test_what_cannot_be_exported_in_time_is_dropped_and_counted() -> None:
    is_open = threading.Event()

    class Tracer:
        def start_span(self, *_: Any, **__: Any) -> Any:
            is_open.wait()
            return SimpleNamespace(end=lambda _: None)

    pytest.importorskip("opentelemetry.trace", reason="opentelemetry-api is not installed (extra: otel)")
    queue = SpanQueue("m", time.time_ns, Tracer)
    trace = queue.trace(HEADERS)
    for _ in range(MOST_WAITING + 500):
        trace.loaded(0.1, 1)
    assert queue._waiting.qsize() <= MOST_WAITING and queue.dropped >= 499
    dropped = queue.dropped
    is_open.set()
    wait_until(queue._waiting.empty)
    trace.loaded(0.1, 1)
    queue.close()
    assert queue.dropped == dropped and queue._waiting.empty()


def test_an_exporter_that_fails_costs_its_span_alone() -> None:
    pytest.importorskip("opentelemetry.trace", reason="opentelemetry-api is not installed (extra: otel)")

    class Tracer:
        def start_span(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no")

    queue = SpanQueue("m", time.time_ns, Tracer)
    for number in range(1, 4):
        queue.trace(HEADERS).loaded(0.1, 1)
        wait_until(lambda number=number: queue.dropped == number)


def test_where_opentelemetry_is_absent_that_is_one_line_and_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    def tracer() -> Any:
        raise ImportError("No module named 'opentelemetry.sdk'")

    queue = SpanQueue("m", time.time_ns, tracer)
    for _ in range(3):
        queue.trace(HEADERS).loaded(0.1, 1)
    wait_until(lambda: queue.dropped == 3)
    assert [one for one in caplog.messages if "prefix-kvstore[otel]" in one and "\n" not in one] == caplog.messages


@pytest.mark.slow
def test_nothing_of_opentelemetry_is_imported_by_the_adapter() -> None:
    program = (
        "import sys, engine_adapter.paged.scheduler, engine_adapter.vllm_requests, kvstore.client.spans as s; "
        f"s.SpanQueue('m', int).trace({HEADERS!r}); "
        "print([one for one in sys.modules if one.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**PATHS}, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_it_is_off_until_it_is_set() -> None:
    assert ConnectorSettings.of({"url": "unix:x"}).traces is False
    digests = AdapterDigests(lambda path: ("", ""))
    traced = RequestReader(digests, traced=SimpleNamespace(served_model_name="m"))
    assert RequestReader(digests).facts(request(trace_headers=HEADERS)).trace is NO_TRACE
    assert traced.facts(request(trace_headers=HEADERS)).trace is not NO_TRACE
    assert traced.facts(request(trace_headers=None)).trace is NO_TRACE
