"""What an operator does at the console, with a real sidecar: it is done and written down; and every way to have it done
without the operator's token, page, confirmation or ticket is refused and does nothing."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from console.browser import CHROMIUM, Browser
from console.running import RunningConsole, console
from edge.children import status_at
from kv_bench.process import free_port
from kvstore.block.errors import BadInput, StoreError
from kvstore.console.audit import MOST_SHOWN, AuditEntry, AuditLog
from kvstore.console.operate import MOST_ORDER_BYTES, MOST_TICKETS, TICKET_SECONDS, OperatorActions, PurgeOrder
from kvstore.service.settings import read_settings
from service.sidecar import Sidecar, patient
from service.test_serve import serving
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import FakeClock
from workbench import MODEL, ids, random_pages, small_layout

TOKENS = {"": "operator-" + "o" * 16, "red": "red-" + "r" * 24}
RED = {"authorization": f"Bearer {TOKENS['red']}"}
LAYOUT = small_layout()


class Desk:
    """A sidecar with ten blocks of one namespace, and an operator's console at it."""

    def __init__(self, sidecar: Sidecar, shown: RunningConsole, handle: Any) -> None:
        self.sidecar, self.shown, self.handle = sidecar, shown, handle
        self.audit_file = sidecar.path.with_name("audit")
        self.namespace = sidecar.admin.facts().namespaces[0].id

    def order(self, **changed: Any) -> dict[str, Any]:
        given = {
            "ticket": self.shown.ticket(),
            "tenant": "default",
            "namespace": self.namespace,
            "confirm": self.namespace,
        }
        return {**given, **changed}

    def audit(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.shown.ask("/api/audit").json
        return found

    @property
    def blocks(self) -> int:
        return self.sidecar.admin.facts().blocks


@contextmanager
def desk_at(directory: Path, **options: Any) -> Iterator[Desk]:
    with Sidecar(directory, **options) as sidecar, sidecar.client() as store:
        assert sidecar.store.warmed(20)
        handle = store.namespace(model=MODEL, layout=LAYOUT, name="small model")
        handle.put(ids(640), random_pages(LAYOUT, 10))
        flags = [
            *("--operator", str(sidecar.admin_path), "--audit-file", str(directory / "audit")),
            *("--tenant-socket", f"default={sidecar.path}"),
        ]
        with console(sidecar.observe_path, *flags, tokens=f"{TOKENS['']}\nred {TOKENS['red']}\n") as shown:
            shown.until("/api/status", lambda one: one["blocks"] is not None)
            yield Desk(sidecar, shown, handle)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with desk_at(tmp_path) as desk:
        yield desk


# What is done ---------------------------------------------------------------------------------------------------------


def test_a_namespace_is_dropped_and_a_tenant_purged_and_both_are_written_down(desk: Desk) -> None:
    assert desk.shown.ask("/api/status").json["acts"]
    done = desk.shown.act("drop", desk.order())
    assert done.status == 200 and done.json["blocks"] == 10 and desk.blocks == 0, done.body
    desk.handle.put(ids(128), random_pages(LAYOUT, 2))
    assert desk.blocks == 2
    purged = desk.shown.act("purge", {"tenant": "default", "confirm": "default"})
    assert purged.status == 200 and purged.json["blocks"] == 2 and desk.blocks == 0, purged.body
    newest, older = desk.audit()
    assert [(one["what"], one["result"], one["namespace"]) for one in (older, newest)] == [
        ("drop", "done", desk.namespace),
        ("purge", "done", ""),
    ]
    assert older["number"] == done.json["number"] and older["who"] == "operator's token at 127.0.0.1"
    assert "10 readable blocks" in older["text"] and abs(older["at"] - newest["at"]) < 60
    lines = [json.loads(one) for one in desk.audit_file.read_text().splitlines()]
    assert [one["result"] for one in lines] == ["begun", "done", "begun", "done"]
    assert stat.S_IMODE(desk.audit_file.stat().st_mode) == 0o600


@pytest.mark.slow
def test_prefixes_are_warmed_from_the_disk(tmp_path: Path) -> None:
    with desk_at(tmp_path, dram="1MiB", nvme="8MiB", indexes=LmdbMaker) as desk:
        for number in range(1, 200):  # until what came first is on the disk alone
            desk.handle.put(ids(640, 10_000 * number), random_pages(LAYOUT, 10, seed=number))
            found = desk.handle.match(ids(640))
            if found.blocks == 10 and "dram" not in {str(tier) for tier, _ in found.tiers}:
                break
        else:
            raise AssertionError(found)
        prompts = json.dumps(list(ids(640))) + "\n" + json.dumps(list(ids(64, 99_000_000)))
        done = desk.shown.act("warm", desk.order(prompts=prompts))
        assert done.status == 200 and done.json["blocks"] == 10, done.body
        assert "2 prompts, 11 blocks" in done.json["text"] and "1 absent" in done.json["text"]
        assert {str(tier) for tier, _ in desk.handle.match(ids(640)).tiers} == {"dram"}
        wrong = desk.shown.act("warm", desk.order(prompts="nonsense"))
        assert wrong.status == 422 and "prompts line 1" in wrong.json["error"]
        other = desk.shown.act("warm", desk.order(tenant="red", prompts="[1]"))
        assert other.status == 422 and "no socket of tenant" in other.json["error"]


# What is not ----------------------------------------------------------------------------------------------------------


def test_whatever_lacks_the_token_the_page_the_name_or_the_ticket_does_nothing(desk: Desk) -> None:
    own, order = desk.shown.url.rstrip("/"), desk.order()
    cookie = desk.shown.log_in(TOKENS[""])
    tries: list[tuple[int, dict[str, Any], dict[str, str]]] = [
        (401, order, {"Cookie": ""}),
        (401, order, {"authorization": "Bearer wrong-wrong-wrong-wrong"}),
        (403, order, RED),
        (403, order, {"Origin": "http://evil.example"}),
        (403, order, {"Origin": "null"}),
        (403, order, {"Cookie": cookie}),  # what a form on another page could have sent
        (403, order, {"Cookie": cookie, "Origin": "http://evil.example"}),
        (415, order, {"content_type": "text/plain"}),
        (415, order, {"content_type": "application/x-www-form-urlencoded"}),
        (422, {name: value for name, value in order.items() if name != "confirm"}, {}),
        (422, {**order, "ticket": ""}, {}),
        (422, {**order, "more": 1}, {}),
        (422, {**order, "ticket": "0" * 32}, {}),
        (422, {**order, "namespace": desk.namespace[:4], "confirm": desk.namespace[:4]}, {}),
        (422, {**order, "tenant": "x" * 200}, {}),
        (422, {**order, "prompts": "[1]"}, {}),
        (413, {**order, "tenant": "x" * MOST_ORDER_BYTES}, {}),
        (422, desk.order(confirm="default"), {}),
        (422, desk.order(confirm=desk.namespace.upper()), {}),
        (422, desk.order(confirm=desk.namespace + "0"), {}),
        (422, desk.order(tenant="blue"), {}),
        (422, desk.order(namespace="0" * 12, confirm="0" * 12), {}),
    ]
    for status, sent, headers in tries:
        answer = desk.shown.act("drop", sent, **headers)
        assert answer.status == status and list(answer.json) == ["error"], (status, headers, answer.body)
        assert "\n" not in answer.json["error"] and TOKENS[""] not in answer.json["error"]
    for body in (b"", b"[]", b"null", b"{" * 5000, b"\xff\xfe", b'{"ticket": 1e999}', b"\0" * 100):
        answer = desk.shown.ask("/api/operator/drop", "POST", body, content_type="application/json")
        assert answer.status == 422, body
    assert desk.blocks == 10, "and nothing was dropped"
    assert {one["result"] for one in desk.audit()} == {"refused"} and len(desk.audit()) == 5
    done = desk.shown.act("drop", order, Cookie=cookie, Origin=own)
    assert done.status == 200 and desk.audit()[0]["who"].startswith("operator's login")


@pytest.mark.slow
def test_the_same_request_a_second_time_does_nothing(desk: Desk) -> None:
    order = {"ticket": desk.shown.ticket(), "tenant": "default", "confirm": "default"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: desk.shown.act("purge", order).status, range(4)))
    assert sorted(answers) == [200, 422, 422, 422]
    assert len(desk.audit()) == 1
    spent = desk.order(confirm="wrong")
    assert desk.shown.act("drop", spent).status == 422
    assert desk.shown.act("drop", {**spent, "confirm": desk.namespace}).status == 422, "an attempt takes its ticket"


def test_a_tenant_is_told_the_same_of_what_is_there_and_what_is_not(desk: Desk) -> None:
    bodies = {
        desk.shown.ask(path, method, b"{}" if method == "POST" else None, **RED).body
        for path in ("/api/operator", "/api/audit", "/api/operator/drop", "/api/operator/nothing", "/api/nothing")
        for method in ("GET", "POST", "DELETE")
    }
    assert len(bodies) == 1
    status = desk.shown.ask("/api/status", **RED).json
    assert status["acts"] is False and desk.blocks == 10


@pytest.mark.slow
def test_a_console_that_only_reads_has_no_such_route(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, console(sidecar.observe_path) as shown:
        assert shown.ask("/api/operator").status == 404 and shown.ask("/api/audit").status == 404
        assert shown.ask("/api/operator/drop", "POST", b"{}", content_type="application/json").status == 405
        assert not [one for one in shown.ask("/openapi.json").json["paths"] if "operator" in one]
        assert shown.until("/api/status", lambda one: one["run"])["acts"] is False


def test_where_the_sidecar_is_gone_it_says_so_and_writes_it_down(desk: Desk) -> None:
    order = desk.order()
    desk.sidecar.door.close(5)
    gone = desk.shown.act("drop", order)
    assert gone.status == 503 and "no sidecar" in gone.json["error"], gone.body
    assert desk.audit()[0]["result"] == "failed" and "no sidecar" in desk.audit()[0]["text"]


@pytest.mark.slow
def test_what_cannot_be_written_down_is_not_done(desk: Desk) -> None:
    os.rename(desk.audit_file, desk.audit_file.with_name("moved"))
    os.mkdir(desk.audit_file)
    answer = desk.shown.act("drop", desk.order())
    assert answer.status == 503 and "audit log" in answer.json["error"] and desk.blocks == 10
    os.rmdir(desk.audit_file)
    assert desk.shown.act("drop", desk.order()).status == 200 and desk.blocks == 0


# Tickets and the file -------------------------------------------------------------------------------------------------


class _Verbs:
    def __init__(self) -> None:
        self.purged: list[str] = []

    def drop(self, tenant: str, namespace: str) -> tuple[int, str]:
        raise OSError("the disk is on fire")

    def purge(self, tenant: str) -> tuple[int, str]:
        self.purged.append(tenant)
        return 7, "2 other nodes were not reached" if tenant == "b" else ""

    def warm(self, tenant: str, namespace: str, prompts: str) -> tuple[int, str]:
        return 0, ""


def test_tickets_are_good_once_for_a_while_and_few(tmp_path: Path) -> None:
    clock, verbs = FakeClock(), _Verbs()
    actions = OperatorActions(verbs, AuditLog(tmp_path / "audit"), clock, os.urandom)
    first = actions.ticket().ticket
    tickets = [actions.ticket().ticket for _ in range(MOST_TICKETS)]
    with pytest.raises(BadInput, match="ticket"):
        actions.act(PurgeOrder(first, "a", "a"), "me")
    clock.advance(TICKET_SECONDS - 1)
    done = actions.act(PurgeOrder(tickets[0], "a", "a"), "me")
    assert (done.blocks, done.text) == (7, "tenant a is purged; it had 7 readable blocks")
    with pytest.raises(BadInput, match="ticket"):
        actions.act(PurgeOrder(tickets[0], "a", "a"), "me")
    clock.advance(1)
    with pytest.raises(BadInput, match="ticket"):
        actions.act(PurgeOrder(tickets[1], "a", "a"), "me")
    assert verbs.purged == ["a"]


def test_what_others_may_still_have_is_told_and_noted_down(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    actions = OperatorActions(_Verbs(), log, FakeClock(), os.urandom)
    done = actions.act(PurgeOrder(actions.ticket().ticket, "b", "b"), "me")
    text = "tenant b is purged; it had 7 readable blocks; elsewhere: 2 other nodes were not reached"
    assert (done.text, log.entries()[0].text) == (text, text)


def test_the_file_is_bounded_and_what_is_in_it_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    log = AuditLog(path, most_bytes=2000)
    entries = [
        AuditEntry(f"{number:x}", float(number), "me", "drop", "t", "ab", text="x" * 50) for number in range(300)
    ]
    for entry in entries:
        log.write(entry)
    assert {one.name for one in tmp_path.iterdir()} == {"audit", "audit.1"}
    assert all(one.stat().st_size <= 2000 for one in tmp_path.iterdir())
    assert log.entries() == entries[::-1][:MOST_SHOWN]
    with open(path, "ab") as file:
        file.write(b'{"number": "half a li')
    again = AuditLog(path, most_bytes=2000)
    kept = len(again.entries())
    assert 10 < kept < MOST_SHOWN and again.entries() == entries[::-1][:kept]
    again.write(AuditEntry("new", 1.0, "me", "drop", "t", "ab"))
    assert AuditLog(path, most_bytes=2000).entries()[0].number == "new", "half a line takes no other one along"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "nowhere/audit", "."):
        with pytest.raises(BadInput, match="audit-file"):
            AuditLog(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()
    log = AuditLog(tmp_path / "audit")
    os.remove(tmp_path / "audit")
    os.mkdir(tmp_path / "audit")
    with pytest.raises(StoreError, match="cannot be written"):
        log.write(AuditEntry("1", 1.0, "me", "drop", "t", "ab"))


# Settings -------------------------------------------------------------------------------------------------------------


def test_the_audit_log_is_beside_the_data_unless_a_setting_names_it() -> None:
    text = "[console]\nlisten = '127.0.0.1:1'\ntoken_file = '/t'\noperator = true\n[store]\ndata = '/d'\n"
    assert read_settings(text).audit_file == "/d/console-audit.jsonl"
    assert read_settings(text, environment={"KVSTORE_CONSOLE_AUDIT_FILE": "/a"}).audit_file == "/a"


@pytest.mark.slow
def test_the_keepers_console_acts_for_the_operator(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "tokens").write_text(f"{TOKENS['']}\n")
    config = tmp_path / "c.toml"
    text = f"[console]\nlisten = '127.0.0.1:{port}'\noperator = true\ntoken_file = '{tmp_path / 'tokens'}'\n"
    config.write_text(text)
    with serving(tmp_path, "--config", str(config), "--nvme", "off") as (_, said):
        import kvstore

        with patient(kvstore.open(f"unix:{said['serving'][0]}")) as store:
            store.namespace(model=MODEL, layout=LAYOUT).put(ids(640), random_pages(LAYOUT, 10))
            status_at(port, TOKENS[""])
            shown = RunningConsole(f"http://127.0.0.1:{port}/", None, TOKENS[""])  # type: ignore[arg-type]
            shown.until("/api/status", lambda one: one["blocks"] == 10)
            done = shown.act("purge", {"tenant": "default", "confirm": "default"})
            assert done.status == 200 and done.json["blocks"] == 10, done.body
    assert (tmp_path / "kv" / "console-audit.jsonl").exists()


# The page -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: see test_browser.py")
def test_the_page_asks_for_the_name_and_says_what_was_done(desk: Desk, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.looks(1280, 900, "light")
        browser.log_in(desk.shown.url, TOKENS[""])
        for page in ("operate", "events"):
            assert f'href="/{page}"' in browser.value("document.getElementById('nav').innerHTML")
        browser.open(f"{desk.shown.url}operate")
        browser.until("document.getElementById('drop-confirm')")
        fill = (
            "(id, text) => { const one = document.getElementById(id); one.value = text; "
            "one.dispatchEvent(new Event('input')); }"
        )
        button = "document.getElementById('drop-confirm').form.querySelector('button')"
        assert browser.value(f"{button}.disabled")
        browser.value(f"({fill})('drop-confirm', '{desk.namespace[:-1]}')")
        assert browser.value(f"{button}.disabled"), "not the whole name"
        browser.value(f"({fill})('prompts', '[1, 2]'); ({fill})('warm-confirm', '{desk.namespace}')")
        browser.value("document.getElementById('warm-confirm').form.requestSubmit()")
        browser.until("document.getElementById('warm-result').textContent.startsWith('Done: 1 prompts')")
        browser.value(f"({fill})('drop-confirm', '{desk.namespace}')")
        assert not browser.value(f"{button}.disabled") and desk.blocks == 10
        browser.picture(tmp_path / "operate.png")
        browser.value(f"{button}.click()")
        browser.until("document.getElementById('drop-result').textContent.includes('10 readable blocks')")
        assert desk.blocks == 0 and browser.value(f"{button}.disabled")
        browser.looks(360, 740, "dark")
        browser.picture(tmp_path / "operate-dark-360.png")
        widths = browser.value("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], widths
        browser.open(f"{desk.shown.url}events")
        browser.until("document.querySelectorAll('table tbody tr').length === 2")
        text = browser.value("document.querySelector('table').textContent")
        assert "operator's login" in text and "drop" in text and desk.namespace in text
        browser.looks(1280, 900, "light")
        browser.picture(tmp_path / "events.png")
        print(tmp_path)
        assert browser.logged == []
