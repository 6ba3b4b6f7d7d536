"""The pages for probes and scrapers: who may read the metrics, what readiness says, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kvstore.block.errors import BadInput, Unreachable
from kvstore.client.connection import stat_at
from kvstore.edge import pages as served
from kvstore.edge.pages import LIMITS, PagesPart, metrics_refusal
from kvstore.edge.watch import StatusWatch
from kvstore.listeners.addresses import listening_sockets
from kvstore.listeners.http_server import HttpListener
from kvstore.service.settings import HttpSettings, read_token
from kvstore.status.tree import SidecarStatus
from programs import fetched
from service.sidecar import Sidecar
from tiering.clock import SystemClock
from waiting import wait_until

TOKEN = "0123456789abcdef/+=_"


@pytest.mark.parametrize(
    ("token", "is_shared", "given", "words"),
    [
        (None, False, "", ""),
        (None, True, "", "set http.token_file"),
        (None, True, "Bearer ", "set http.token_file"),
        (None, True, f"Bearer {TOKEN}", "set http.token_file"),
        *((TOKEN, shared, one, "") for shared in (False, True) for one in (f"Bearer {TOKEN}", f"bearer  {TOKEN} ")),
        *(
            (TOKEN, shared, one, "http.token_file")
            for shared in (False, True)
            for one in (
                *("", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x"),
                "Bearer \xff☃",
            )
        ),
    ],
)
def test_the_metrics_are_for_whom_may_see_all_tenants(
    token: str | None, is_shared: bool, given: str, words: str
) -> None:
    why = metrics_refusal(token, given, is_shared=is_shared)
    assert bool(why) == bool(words) and words in why and "\n" not in why and TOKEN not in why


@pytest.mark.parametrize("content", [TOKEN, f"\n {TOKEN} \r\n", "x" * 16, "x" * 1024])
def test_a_token_is_what_stands_in_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    assert read_token(str(tmp_path / "token")) == content.strip()


@pytest.mark.parametrize(
    "content", [b"", b"x" * 15, b"x" * 1025, b"x" * 5000, b"two words of many letters", b"\xff" * 20, b"x" * 16 + b"\0"]
)
def test_what_is_no_token_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(BadInput, match=r"http\.token_file=.*give a file of 16 to 1024 printable"):
        read_token(str(tmp_path / "token"))
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadInput, match=r"http\.token_file=.* cannot be read: "):
            read_token(str(path))


# Served ---------------------------------------------------------------------------------------------------------------


class Sidecars:
    """What the pages ask of a `StatusWatch`: answers that a test sets. slow: what `numbers` waits for."""

    def __init__(self, facts: SidecarStatus | Exception) -> None:
        self.clock, self.facts, self.alive = SystemClock(), facts, True
        self.asked, self.slow, self.times = threading.Event(), threading.Event(), 0
        self.slow.set()

    def numbers(self) -> SidecarStatus:
        self.asked.set()
        self.times += 1
        assert self.slow.wait(20)
        if isinstance(self.facts, Exception):
            raise self.facts
        return self.facts

    def is_alive(self) -> bool:
        return self.alive


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> SidecarStatus:
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        return stat_at(str(sidecar.observe_path), "test", SystemClock(), 20.0)


@contextmanager
def serving(watch: Sidecars, listeners: list[HttpListener] | None = None) -> Iterator[int]:
    """The port of the pages. listeners: gets what serves them."""
    sockets = listening_sockets("127.0.0.1", 0, "--http")
    port = int(sockets[0].getsockname()[1])
    part = PagesPart(sockets, HttpSettings(), cast(StatusWatch, watch), "1.2.3", is_shared=False)
    loop = asyncio.new_event_loop()
    (listener,) = part.start(loop.call_soon_threadsafe)
    (listeners if listeners is not None else []).append(listener)
    thread = threading.Thread(target=lambda: loop.run_until_complete(listener.serve()))
    thread.start()
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(listener.end)
        thread.join(20)
        part.close()
        loop.close()


def test_probes_say_how_the_sidecar_is_and_nothing_of_tenants(facts: SidecarStatus) -> None:
    here = {"node": facts.node, "incarnation": facts.incarnation}
    for changed, status, body in (
        ({"state": "ready"}, 200, {"ready": True, "state": "ready"}),
        ({"state": "warming"}, 503, {"ready": False, "state": "warming"}),
        ({"state": "stopping"}, 503, {"ready": False, "state": "stopping"}),
        ({"state": "degraded", "reasons": ["a"]}, 200, {"ready": True, "state": "degraded", "reasons": ["a"]}),
        (
            {"state": "ready", "public_warnings": ["w"], "warnings": ["w of red"]},
            200,
            {"ready": True, "state": "ready", "warnings": ["w"]},
        ),
    ):
        with serving(Sidecars(msgspec.structs.replace(facts, **cast(Any, changed)))) as port:
            answer = fetched(port, "/readyz")
            assert (answer[0], json.loads(answer[1])) == (status, body | here)
            assert fetched(port, "/livez") == (200, '{"alive":true}')
    gone = Sidecars(Unreachable("away"))
    gone.alive = False
    with serving(gone) as port:
        assert fetched(port, "/livez") == (503, '{"alive":false}') and fetched(port, "/metrics")[0] == 503
        assert fetched(port, "/readyz") == (503, '{"ready":false,"state":"unreachable"}')
        assert fetched(port, "/none")[0] == 404


def test_a_page_that_takes_long_keeps_no_other_client_waiting(facts: SidecarStatus) -> None:
    watch = Sidecars(facts)
    watch.slow.clear()
    with serving(watch) as port, socket.create_connection(("127.0.0.1", port), 20) as sock:
        sock.sendall(b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert watch.asked.wait(20)
        assert [fetched(port, "/livez")[0] for _ in range(5)] == [200] * 5
        watch.slow.set()
        answer = b""
        while piece := sock.recv(1 << 16):
            answer += piece
        assert b"\nkvstore_build_info{" in answer and b'version="1.2.3"' in answer
        assert b"\r\ncache-control: no-store\r\n" in answer.lower()


@pytest.mark.parametrize(("kept_seconds", "made"), [(1e9, 1), (0.0, 5)])
def test_a_page_is_made_once_for_all_who_ask_soon(
    monkeypatch: pytest.MonkeyPatch, facts: SidecarStatus, kept_seconds: float, made: int
) -> None:
    assert served.KEPT_SECONDS == 1.0
    monkeypatch.setattr(served, "KEPT_SECONDS", kept_seconds)
    watch = Sidecars(facts)
    with serving(watch) as port:
        assert {fetched(port, "/metrics")[0] for _ in range(5)} == {200}
    assert watch.times == made


def test_a_page_that_fails_is_an_answer_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Sidecars(RuntimeError("a bug"))) as port:
        assert fetched(port, "/metrics")[0] == 500 and fetched(port, "/livez")[0] == 200
    assert len(caplog.records) == 1 and caplog.records[0].exc_info


def test_clients_that_come_too_often_wait_in_the_kernel(monkeypatch: pytest.MonkeyPatch, facts: SidecarStatus) -> None:
    monkeypatch.setattr(served, "LIMITS", replace(LIMITS, accepts_per_second=3.0))
    made: list[HttpListener] = []
    with serving(Sidecars(facts), made) as port, ExitStack() as stack:
        for _ in range(7):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)).sendall(b"GET")
        wait_until(lambda: len(made[0].places) >= 3)
        assert len(made[0].places) <= 4
        wait_until(lambda: len(made[0].places) == 7)
        assert fetched(port, "/livez")[0] == 200
