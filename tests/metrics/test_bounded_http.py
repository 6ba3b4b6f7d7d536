"""The HTTP server and clients that are slow, hostile or many: each costs itself something, and no other client."""

from __future__ import annotations

import random
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus

import pytest

from kvstore.metrics import bounded_http
from kvstore.metrics.bounded_http import (
    HttpAnswer,
    HttpRequest,
    HttpServer,
    Page,
)
from kvstore.node import SystemClock
from waiting import wait_until

GET = b"GET /fast HTTP/1.1\r\nHost: a\r\n\r\n"


@contextmanager
def serving(slow: Callable[[HttpRequest], HttpAnswer] | None = None) -> Iterator[HttpServer]:
    pages = {
        "/fast": Page(lambda request: HttpAnswer(HTTPStatus.OK, b"fast")),
        "/slow": Page(slow or (lambda request: HttpAnswer(HTTPStatus.OK, b"slow")), is_slow=True),
    }
    server = HttpServer("127.0.0.1", 0, pages, SystemClock().monotonic_seconds)
    server.start()
    try:
        yield server
    finally:
        server.close(10)
        assert not server._thread.is_alive()


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with serving() as one:
        yield one


@pytest.fixture(autouse=True)
def _many_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests here make more connections than a scraper does; one is about how many."""
    monkeypatch.setattr(bounded_http, "ACCEPTS_PER_SECOND", 1e6)
    monkeypatch.setattr(bounded_http, "ACCEPT_BURST", 1e6)


def status(server: HttpServer, path: str = "/fast") -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=20) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def connected(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def said(server: HttpServer, raw: bytes) -> bytes:
    """All that it answers to these bytes, until it hangs up."""
    with connected(server) as sock:
        sock.sendall(raw)
        return everything(sock)


def everything(sock: socket.socket) -> bytes:
    received = b""
    while piece := sock.recv(1 << 16):
        received += piece
    return received


def test_a_page_is_given_and_the_connection_ends(server: HttpServer) -> None:
    answer = said(server, GET)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\nfast")
    assert b"\r\nConnection: close\r\n" in answer and b"\r\nContent-Length: 4\r\n" in answer
    assert said(server, b"GET http://a/slow?x=1 HTTP/1.0\n\n").endswith(b"\r\n\r\nslow")


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (b"GET /none HTTP/1.1\r\nHost: a\r\n\r\n", 404),
        (b"get /fast HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"GET /fast\r\n\r\n", 400),
        (b"GET  /fast HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /fast HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET /fast HTTP/1.1\r\nName : value\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\n\n", 400),
    ],
)
def test_what_is_no_request_for_a_page_is_refused_in_one_line(server: HttpServer, raw: bytes, wanted: int) -> None:
    head, _, body = said(server, raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % wanted), head
    assert body.endswith(b"\n") and body.count(b"\n") == 1
    assert status(server) == 200


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_are_answered_or_hung_up_on(server: HttpServer, seed: int) -> None:
    chooser = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(100):
        raw = bytearray(GET)
        for _ in range(chooser.randrange(8)):
            raw[chooser.randrange(len(raw))] = chooser.randrange(256)
        with connected(server) as sock:
            sock.sendall(bytes(raw) + b"\n\n")
            sock.shutdown(socket.SHUT_WR)
            assert everything(sock).startswith(b"HTTP/1.1 ")
    assert status(server) == 200


def test_a_page_that_takes_long_keeps_no_other_client_waiting() -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def slow(request: HttpRequest) -> HttpAnswer:
        is_asked.set()
        assert may_answer.wait(20)
        return HttpAnswer(HTTPStatus.OK, b"slow")

    with serving(slow) as server, connected(server) as sock:
        sock.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        assert is_asked.wait(20)
        assert [status(server) for _ in range(5)] == [200] * 5
        may_answer.set()
        assert everything(sock).endswith(b"\r\n\r\nslow")


def test_a_page_that_fails_is_an_answer_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fails(request: HttpRequest) -> HttpAnswer:
        raise RuntimeError("a bug")

    with serving(fails) as server:
        assert status(server, "/slow") == 500 and status(server) == 200
    assert [record.getMessage() for record in caplog.records] == ["a page could not be made"]


def test_clients_that_say_nothing_make_room_and_those_that_ask_are_served(server: HttpServer) -> None:
    with ExitStack() as stack:
        for number in range(3 * bounded_http.MAX_CONNECTIONS):
            stack.enter_context(connected(server)).sendall(b"GET /fast HTTP/1.1\r\nName: " * (number % 2))
        assert [status(server) for _ in range(5)] == [200] * 5
        assert len(server._connections) <= bounded_http.MAX_CONNECTIONS


def test_a_client_that_sends_a_byte_now_and_then_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "EXCHANGE_SECONDS", 0.3)
    with serving() as server, connected(server) as sock:
        wait_until(lambda: bool(server._connections))
        wait_until(lambda: _is_hung_up(sock))
        assert not server._connections and status(server) == 200


def _is_hung_up(sock: socket.socket) -> bool:
    try:
        sock.sendall(b"G")
        sock.settimeout(0.01)
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_client_that_was_answered_and_goes_on_sending_is_hung_up_on(server: HttpServer) -> None:
    with connected(server) as sock:
        sock.sendall(GET)
        with pytest.raises(OSError):
            while True:
                sock.sendall(bytes(1 << 16))
    wait_until(lambda: not server._connections)
    assert status(server) == 200


def test_clients_that_come_too_often_wait_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "ACCEPT_BURST", 3.0)
    monkeypatch.setattr(bounded_http, "ACCEPTS_PER_SECOND", 0.0)
    with serving() as server, ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(connected(server)).sendall(b"GET")
        wait_until(lambda: not server._is_accepting)
        assert len(server._connections) <= 3
        monkeypatch.setattr(bounded_http, "ACCEPTS_PER_SECOND", 1e6)
        monkeypatch.setattr(bounded_http, "ACCEPT_BURST", 1e6)
        assert status(server) == 200
