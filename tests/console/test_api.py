"""The console's process beside a sidecar that served hits, misses and an eviction: its figures, and hostile HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.running import RunningConsole, busy_console, console, serve_traffic
from kvstore.cli import ask
from kvstore.console.history import ASK_EVERY_SECONDS, SidecarHistory
from kvstore.console.rings import WINDOWS
from kvstore.console.stream import MOST_STREAMS
from kvstore.edge.watch import StatusWatch
from kvstore.node import SystemClock
from kvstore.protocol.told import RequestTold, SavingsTold
from programs import PATHS, refused_start
from service.sidecar import Sidecar
from waiting import FakeClock, wait_until
from workbench import MODEL, ids, small_layout

CLOCK = SystemClock()
TOKEN = "correct-horse-battery"
_WITHOUT_PARAMETERS = (
    "status stat series misses prefixes tenants namespaces engines elsewhere whatif models plan events"
)
READS = tuple(f"/api/{one}" for one in (*_WITHOUT_PARAMETERS.split(), "request?id=unknown"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sidecar, RunningConsole]]:
    with busy_console(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[RunningConsole]:
    with Sidecar(tmp_path) as sidecar, console(sidecar.observe_path, tokens=f"{TOKEN}\n") as shown:
        shown.token = ""
        yield shown


# Figures --------------------------------------------------------------------------------------------------------------


def test_its_figures_are_those_of_stat_to_the_token(served: tuple[Sidecar, RunningConsole]) -> None:
    sidecar, shown = served
    told: dict[str, Any] = msgspec.to_builtins(ask.stat(str(sidecar.admin_path), CLOCK))
    status = shown.ask("/api/status").json
    assert status["looked"] == told["looked"] and told["looked"]["miss_tokens"]["evicted"] > 0
    assert status["looked"]["hit_tokens"]["dram"] > 0
    for key in ("run", "pid", "state", "blocks", "leases", "reservations", "pinned_bytes", "tiers", "policy"):
        assert status[key] == told[key], key
    looked = told["looked"]
    for window in WINDOWS:
        sums = shown.ask(f"/api/series?window={window}").json["sums"]
        assert sums["asked"] == looked["asked_tokens"]
        assert {name[5:]: count for name, count in sums.items() if name.startswith("miss.")} == looked["miss_tokens"]
        hits = {name[4:]: count for name, count in sums.items() if name.startswith("hit.") and count}
        assert hits == looked["hit_tokens"]
        reasons = shown.ask(f"/api/misses?window={window}").json
        assert {one["reason"]: one["window_tokens"] for one in reasons} == looked["miss_tokens"]
        assert {one["reason"]: one["tokens"] for one in reasons} == looked["miss_tokens"]
    (tenant,) = shown.ask("/api/tenants").json
    assert (tenant["asked_tokens"], tenant["hit_tokens"]) == (looked["asked_tokens"], looked["hit_tokens"])
    assert tenant["miss_tokens"] == looked["miss_tokens"] and tenant["share"] is None
    (space,) = shown.ask("/api/namespaces").json["namespaces"]
    assert space == told["namespaces"][0] and space["name"] == "small model"
    engines = shown.ask("/api/engines").json
    assert engines["engines"]["sessions"] == told["sessions"]
    assert [(one["kind"], one["done"]) for one in engines["moves"]] == [
        (one["kind"], one["done"]) for one in told["moves"]
    ]
    assert shown.ask("/api/events").json[-1]["kind"] == "contact"


def test_without_couriers_nothing_is_said_of_elsewhere(served: tuple[Sidecar, RunningConsole]) -> None:
    sidecar, shown = served
    assert shown.ask("/api/elsewhere").json == {"elsewhere": None} and sidecar.desk is None


def test_what_other_sizes_would_find_is_what_was_asked_for_again(served: tuple[Sidecar, RunningConsole]) -> None:
    """Of so few blocks all are followed, so the ceiling is exact."""
    sidecar, shown = served
    told = shown.until("/api/whatif", lambda one: bool(one["sizes"]))
    looked, estimate = sidecar.admin.facts().looked, told["estimate"]
    assert estimate["lookups"] == looked.lookups and estimate["dropped_lookups"] == 0
    assert estimate["sample_ratio"] == 1 and estimate["asked_tokens"] == pytest.approx(looked.asked_tokens, rel=0.05)
    assert told["dram_bytes"] == 2 << 20 and estimate["budget_bytes"] == 6 << 20
    rates = [one["token_hit_rate"] for one in told["sizes"]]
    assert rates == sorted(rates) and rates[-1] < 1 and told["sizes"][-1]["size_bytes"] is None
    first_ones = 640 * (estimate["sampled_names"] // 10)
    assert rates[-1] == pytest.approx(1 - first_ones / looked.asked_tokens, abs=0.02)
    today = next(one for one in told["sizes"] if one["size_bytes"] == estimate["budget_bytes"])
    assert today["more_tokens_per_day"] == 0 and told["sizes"][-1]["more_tokens_per_day"] > 0


def test_the_plan_is_that_of_the_command_with_what_the_sidecar_has(served: tuple[Sidecar, RunningConsole]) -> None:
    _, shown = served
    query = "model=llama-3.1-8b&gpu_memory=80GB&weights=16GB&users=4&new_tokens_per_second=5000"
    told = shown.ask(f"/api/plan?{query}").json
    command = [sys.executable, "-m", "kvstore", "plan", "llama-3.1-8b", "--gpu-memory", "80GB", "--weights", "16GB"]
    more = ["--users", "4", "--new-tokens-per-second", "5000", "--dram", "2MiB", "--nvme", "4MiB", "--json"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, env={**os.environ, **PATHS}, check=True)
    wanted = json.loads(done.stdout)
    figures = [one for section in told["sections"] for one in section["figures"]]
    assert [(one.pop("key"), one) for one in figures] == list(wanted["figures"].items())
    assert (told["dram_bytes"], told["nvme_bytes"], told["is_measured"]) == (2 << 20, 4 << 20, False)
    unserved = shown.ask("/api/plan?model=llama-3.1-8b").json
    assert not unserved["is_measured"] and unserved["new_tokens_per_second"] == 0
    assert any("new tokens a second of another model" in one for one in unserved["notes"]), unserved["notes"]
    assert {one["model"] for one in shown.ask("/api/models").json} >= {"llama-3.1-8b", "deepseek-v3"}
    for wrong, words in (("model=unknown", "not in the table"), ("dram=much", "much"), ("gpu_memory=80GB", "weights")):
        answer = shown.ask(f"/api/plan?{wrong}")
        assert answer.status == 422 and words in answer.json["error"], answer.body


def test_a_request_is_shown_as_the_command_shows_it(served: tuple[Sidecar, RunningConsole]) -> None:
    sidecar, shown = served
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        handle.tell([RequestTold("cmpl-7", 400, {"dram": 320}, {"partial_block": 80})], SavingsTold(2.5, 0.5))
        told = shown.until("/api/request?id=cmpl-", lambda one: bool(one["found"]))
        assert told["found"] == [
            msgspec.to_builtins(one) for one in ask.why(str(sidecar.admin_path), CLOCK, "cmpl-").found
        ]
        assert told["found"][0]["told"]["hits"] == {"dram": 320}
        shown.until("/api/status", lambda one: one["savings"] and one["savings"]["saved_seconds"] == 2.5)
    assert shown.ask("/api/request?id=unknown").json["found"] == []
    (latest,) = shown.ask("/api/request").json["found"]
    assert latest["request"] == "cmpl-7" and shown.ask(f"/api/request?id={'x' * 300}").status == 422


@pytest.mark.slow
def test_an_engine_that_comes_and_goes_is_told(served: tuple[Sidecar, RunningConsole]) -> None:
    sidecar, shown = served
    with sidecar.client() as store:
        store.namespace(model=MODEL, layout=small_layout())
        shown.until("/api/events", lambda told: told[0]["text"] == "t of default attached.")
    shown.until("/api/events", lambda told: told[0]["text"] == "t of default left.")


def test_the_document_names_each_answer_and_every_answer_is_as_it_says(served: tuple[Sidecar, RunningConsole]) -> None:
    _, shown = served
    document = shown.ask("/openapi.json").json
    assert set(document["paths"]) == {path.partition("?")[0] for path in READS}
    schemas = document["components"]["schemas"]
    for path in READS:
        answers = document["paths"][path.partition("?")[0]]["get"]["responses"]
        assert {"200", "401", "421", "422", "503"} <= set(answers)
        schema = answers["200"]["content"]["application/json"]["schema"]
        answer = shown.ask(path).json
        if "$ref" in schema:
            known = schemas[schema["$ref"].rpartition("/")[2]]["properties"]
            assert set(answer) == set(known), path
        else:
            known = schemas[schema["items"]["$ref"].rpartition("/")[2]]["properties"]
            assert all(set(one) == set(known) for one in answer), path


def test_a_page_is_small_and_asks_nobody_else(served: tuple[Sidecar, RunningConsole]) -> None:
    _, shown = served
    root = Path(__file__).resolve().parents[2] / "kvstore" / "console" / "static"
    files = {str(one.relative_to(root)) for one in root.rglob("*") if one.is_file()}
    sizes = {name: len(shown.ask(f"/static/{name}").body) for name in files}
    assert sum(sizes.values()) < 150_000 and "uplot/LICENSE" in files
    for name in files - {"uplot/uPlot.iife.min.js", "uplot/LICENSE", "favicon.svg"}:
        assert "//" not in (root / name).read_text().replace("// ", ""), f"{name} names another host"
    first = shown.ask("/static/app.js")
    assert shown.ask("/static/app.js", if_none_match=first.headers["etag"]).status == 304


# Hostile HTTP ---------------------------------------------------------------------------------------------------------


def test_other_names_other_origins_and_other_methods_are_refused(served: tuple[Sidecar, RunningConsole]) -> None:
    _, shown = served
    for path in ("/", *READS, "/api/stream", "/static/app.js", "/openapi.json", "/nothing"):
        assert shown.ask(path, Host="evil.example").status == 421, path
        assert shown.ask(path, Origin="http://evil.example").status == 403, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            assert shown.ask(path, method).status == 405, (path, method)
    for path in ("/nothing", "/docs", "/redoc", "/static/", "/static/../pages.py", "/static/%2e%2e/pages.py", "/api/"):
        assert shown.ask(path).status == 404, path


def test_every_answer_has_its_headers(served: tuple[Sidecar, RunningConsole]) -> None:
    _, shown = served
    for path in ("/", "/api/status", "/static/app.js", "/nothing"):
        headers = shown.ask(path).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] in ("no-store", "no-cache")
        assert "server" not in headers and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/api/series?window=1y",
        "/api/series?window=",
        "/api/misses?window=1h%00",
        "/api/misses?window=1h%0A",
        "/api/namespaces?first=-1",
        "/api/namespaces?first=9999999999999999999999",
        "/api/namespaces?first=x",
        "/api/namespaces?tenant=" + "x" * 200,
    ],
)
def test_what_cannot_be_is_one_line(served: tuple[Sidecar, RunningConsole], path: str) -> None:
    answer = served[1].ask(path)
    assert answer.status == 422 and list(answer.json) == ["error"] and "\n" not in answer.json["error"]


@pytest.mark.slow
def test_streams_are_bounded_and_have_the_same_bytes(served: tuple[Sidecar, RunningConsole]) -> None:
    _, shown = served
    port = int(shown.url.rstrip("/").rpartition(":")[2])

    def stream() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port), 20)
        sock.sendall(f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        return sock

    def read(sock: socket.socket, until: int) -> bytes:
        found = b""
        while found.count(b"data: ") < until or not found.endswith(b"\n\r\n"):
            found += sock.recv(65536)
        return found

    socks = [stream() for _ in range(MOST_STREAMS)]
    try:
        texts = [read(sock, 2) for sock in socks]
        assert all(b"retry: 2000" in one and b"text/event-stream" in one for one in texts)
        newest = [one[one.rindex(b"id: ") :] for one in texts]
        assert len({one.partition(b"\n")[0] for one in newest}) <= 2 and len(set(newest)) <= 2
        body = newest[0].partition(b"data: ")[2].partition(b"\n")[0]
        assert json.loads(body)["looked"]["asked_tokens"] > 0
        refused = shown.ask("/api/stream")
        assert refused.status == 503 and "close one" in refused.json["error"]
    finally:
        for sock in socks:
            sock.close()

    def is_let_in() -> bool:
        with stream() as sock:
            return b" 200 " in sock.recv(65536)

    wait_until(is_let_in)


# A token --------------------------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_told(locked: RunningConsole) -> None:
    for path in (*READS, "/api/stream", "/openapi.json", "/static/app.js"):
        assert locked.ask(path).status == 401, path
        assert locked.ask(path, Authorization="Bearer wrong").status in (401, 429)
    assert locked.ask("/").status == 303 and locked.ask("/").headers["location"] == "/login"
    page = locked.ask("/login")
    assert page.status == 200 and TOKEN.encode() not in page.body


@pytest.mark.slow
def test_the_token_opens_the_api_and_the_form_gives_a_cookie(locked: RunningConsole) -> None:
    assert locked.ask("/api/status", Authorization=f"Bearer {TOKEN}").status == 200
    origin = locked.url.rstrip("/")
    assert locked.ask("/login", "POST", f"token={TOKEN}".encode(), Origin="http://evil.example").status == 403
    assert locked.ask("/login", "POST", f"token={TOKEN}".encode(), Origin="null").status == 403
    assert locked.ask("/login", "POST", b"token=wrong", Origin=origin).status == 403
    assert locked.ask("/login", "POST", b"x" * 10_000, Origin=origin).status == 413
    let_in = locked.ask("/login", "POST", f"token={TOKEN}".encode(), Origin=origin)
    cookie = let_in.headers["set-cookie"]
    assert let_in.status == 303 and "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    name = cookie.partition(";")[0]
    assert locked.ask("/api/status", Cookie=name).status == 200 and locked.ask("/", Cookie=name).status == 200
    assert locked.ask("/logout", "POST", b"", Cookie=name, Origin=origin).status == 303
    assert locked.ask("/api/status", Cookie=name).status == 401


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--listen", "0.0.0.0:0"], "--token-file"),
        (["--listen", "nonsense"], "--listen='nonsense'"),
        (["--listen", "127.0.0.1:99999"], "--listen"),
        (["--listen", "192.0.2.1:0", "--token-file", "TOKEN"], "cannot be listened on"),
        (["--token-file", "/nonexistent/token"], "/nonexistent/token"),
        (["--token-file", "EMPTY"], "has no token"),
    ],
)
def test_what_is_wrong_at_the_start_is_one_line(tmp_path: Path, flags: list[str], words: str) -> None:
    (tmp_path / "TOKEN").write_text(TOKEN)
    (tmp_path / "EMPTY").write_text("\n")
    given = [str(tmp_path / one) if one in ("TOKEN", "EMPTY") else one for one in flags]
    assert words in refused_start("console", "--socket", "x.sock", *given)


# Beside a sidecar -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_console_that_is_stopped_or_killed_changes_no_answer(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        serve_traffic(sidecar, 4)
        before = handle.match(ids(640)).blocks
        for number in (signal.SIGSTOP, signal.SIGKILL):
            with console(sidecar.observe_path) as shown:
                shown.until("/api/status", lambda one: one["contact"]["connected"])
                os.kill(shown.process.pid, number)
                assert handle.match(ids(640)).blocks == before == 10
                facts = ask.stat(str(sidecar.admin_path), CLOCK)
                assert facts.state == "ready" and facts.door.refused == facts.door.malformed == 0


@pytest.mark.slow
def test_it_waits_for_a_sidecar_and_finds_the_next_one(tmp_path: Path) -> None:
    with console(tmp_path / "observe.sock") as shown:
        status = shown.until("/api/status", lambda one: one["contact"]["error"])
        assert status["looked"] is None and status["health"]["level"] == "error"
        assert shown.ask("/api/tenants").status == 503 and "no sidecar" in shown.ask("/api/tenants").json["error"]
        runs = []
        for _ in range(2):
            with Sidecar(tmp_path):
                runs.append(shown.until("/api/status", lambda one: one["contact"]["connected"])["run"])
            away = shown.until("/api/status", lambda one: not one["contact"]["connected"])
            assert away["run"] == runs[-1] and away["contact"]["numbers_from"] < away["at"]
        assert runs[0] != runs[1]
        assert "restart" in {one["kind"] for one in shown.ask("/api/events").json}
        assert len(shown.ask("/api/series").json["restarts"]) == 1


@pytest.mark.slow
def test_it_ends_soon_although_a_page_listens(served: tuple[Sidecar, RunningConsole]) -> None:
    sidecar, _ = served
    with console(sidecar.observe_path) as shown:
        port = int(shown.url.rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            sock.sendall(f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            assert sock.recv(1000)
            shown.process.send_signal(signal.SIGTERM)
            assert shown.process.wait(15) == 0


def test_readers_that_ask_without_end_ask_the_sidecar_now_and_then(tmp_path: Path) -> None:
    clock = FakeClock()
    began = clock.monotonic
    with Sidecar(tmp_path, dram="2MiB") as sidecar:
        history = SidecarHistory(StatusWatch(str(sidecar.observe_path), clock), "test", {})
        assert history.prefixes() is not None and history.why("a") is not None and history.prefixes() is not None
    assert clock.monotonic - began == pytest.approx(2 * ASK_EVERY_SECONDS)
