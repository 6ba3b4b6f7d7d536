"""The sidecar's HTTP server: probes beside a page that takes long, faults, and clients that are slow or many."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http import HTTPStatus

import pytest

from kvstore.metrics import server as served
from kvstore.metrics.endpoints import METRICS_PATH, HttpAnswer, MetricsAccess, Page
from kvstore.metrics.server import LIMITS, SidecarServer
from tiering.clock import SystemClock
from waiting import wait_until

GET = b"GET /fast HTTP/1.1\r\nHost: a\r\n\r\n"


def said_ok(text: bytes) -> Page:
    return lambda headers: HttpAnswer(HTTPStatus.OK, text, "text/plain")


@contextmanager
def serving(slow: Page | None = None) -> Iterator[SidecarServer]:
    pages = {"/fast": said_ok(b"fast"), METRICS_PATH: slow or said_ok(b"slow")}
    server = SidecarServer("127.0.0.1", 0, pages, MetricsAccess(None, is_shared=False), SystemClock())
    server.start()
    try:
        yield server
    finally:
        server.close(10)
        assert not server._thread.is_alive()


@pytest.fixture(autouse=True)
def _many_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests here make more connections than a scraper does; one is about how many."""
    monkeypatch.setattr(served, "LIMITS", replace(LIMITS, accepts_per_second=1e6))


def status(server: SidecarServer, path: str = "/fast") -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=20) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def connected(server: SidecarServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def everything(sock: socket.socket) -> bytes:
    received = b""
    while piece := sock.recv(1 << 16):
        received += piece
    return received


def test_a_page_that_takes_long_keeps_no_other_client_waiting() -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def slow(headers: Mapping[str, str]) -> HttpAnswer:
        is_asked.set()
        assert may_answer.wait(20)
        return HttpAnswer(HTTPStatus.OK, b"slow", "text/plain")

    with serving(slow) as server, connected(server) as sock:
        sock.sendall(b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert is_asked.wait(20)
        assert [status(server) for _ in range(5)] == [200] * 5 and status(server, "/none") == 404
        may_answer.set()
        answer = everything(sock)
        assert answer.endswith(b"\r\n\r\nslow") and b"\r\ncache-control: no-store\r\n" in answer.lower()


def test_a_page_that_fails_is_an_answer_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fails(headers: Mapping[str, str]) -> HttpAnswer:
        raise RuntimeError("a bug")

    with serving(fails) as server:
        assert status(server, METRICS_PATH) == 500 and status(server) == 200
    assert len(caplog.records) == 1 and caplog.records[0].exc_info


def test_clients_that_say_nothing_make_room_and_those_that_ask_are_served() -> None:
    with serving() as server, ExitStack() as stack:
        for number in range(3 * LIMITS.connections):
            stack.enter_context(connected(server)).sendall(b"GET /fast HTTP/1.1\r\nName: " * (number % 2))
        assert [status(server) for _ in range(5)] == [200] * 5
        assert len(server._listener.places) <= LIMITS.connections


def test_a_client_that_was_answered_and_goes_on_sending_is_hung_up_on() -> None:
    with serving() as server, connected(server) as sock:
        sock.sendall(GET)
        with pytest.raises(OSError):
            while True:
                sock.sendall(bytes(1 << 16))


def test_clients_that_come_too_often_wait_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "LIMITS", replace(LIMITS, accepts_per_second=3.0))
    with serving() as server, ExitStack() as stack:
        for _ in range(7):
            stack.enter_context(connected(server)).sendall(b"GET")
        wait_until(lambda: len(server._listener.places) >= 3)
        assert len(server._listener.places) <= 4
        wait_until(lambda: len(server._listener.places) == 7)
        assert status(server) == 200
