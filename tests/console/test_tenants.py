"""A tenant's token at the console: it shows that tenant and nothing of another one, whatever is asked."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

import kvstore
from console.browser import CHROMIUM, Browser
from console.running import RunningConsole, console
from kvstore.block.errors import BadInput
from kvstore.cli import ask
from kvstore.console.http_api import PAGES, TENANT_PATHS
from kvstore.edge.tokens import Caller, checked_tokens
from kvstore.node import SystemClock
from kvstore.protocol.told import RequestTold
from service.sidecar import patient
from service.test_serve import serving
from waiting import wait_until
from workbench import ids, random_pages, small_layout

TOKENS = {"": "operator-" + "o" * 16, "red": "red-" + "r" * 24, "blue": "blue-" + "b" * 24}
LAYOUT = small_layout()
REQUESTS = int(os.environ.get("TENANT_REQUESTS", "500"))
CONFIGURATION = """
[store]
dram = "16MiB"
nvme = "off"
[tenants.red]
socket = "{directory}/red.sock"
share = 0.25
[tenants.blue]
socket = "{directory}/blue.sock"
share = 0.5
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Both tenants did something; blue's figures are numbers that nothing else has."""
    directory = tmp_path_factory.mktemp("two")
    (directory / "kvstore.toml").write_text(CONFIGURATION.format(directory=directory))
    tokens = "\n".join([TOKENS[""], *(f"{name} {TOKENS[name]}" for name in ("red", "blue"))])
    with serving(directory, "--config", str(directory / "kvstore.toml"), "--dram", "16MiB") as (_, said):
        assert said["serving"]
        for name, blocks in (("red", 3), ("blue", 7)):
            with kvstore.open(f"unix:{directory}/{name}.sock", engine=f"engine of {name}") as store:
                handle = patient(store).namespace(model=f"model-of-{name}", layout=LAYOUT)  # type: ignore[arg-type]
                handle.put(ids(64 * blocks), random_pages(LAYOUT, blocks))
                handle.lease(handle.match(ids(64 * blocks + 1)), deadline_ms=5000, request=f"cmpl-{name}").release()
                handle.tell([RequestTold(f"cmpl-{name}", 64 * blocks + 1, {"dram": 64 * blocks}, {"partial_block": 1})])
        socket = directory / "kv" / "observe.sock"
        wait_until(lambda: len(ask.why(str(socket), SystemClock(), "cmpl-").found) == 2)
        with console(socket, tokens=tokens) as running:
            wait_until(lambda: asked(running, "/api/status", "").get("looked") is not None)
            wait_until(lambda: len(asked(running, "/api/prefixes", "")["hottest"]) == 2)
            yield running


def asked(shown: RunningConsole, path: str, who: str) -> Any:
    return shown.ask(path, authorization=f"Bearer {TOKENS[who]}").json


@pytest.mark.slow
def test_a_tenant_sees_its_own_figures(shown: RunningConsole) -> None:
    (tenant,) = asked(shown, "/api/tenants", "red")
    assert tenant["tenant"] == "red" and tenant["asked_tokens"] == 192 and tenant["share"] == 0.25
    spaces = asked(shown, "/api/namespaces", "red")
    assert [one["model"] for one in spaces["namespaces"]] == ["model-of-red"] and spaces["all"] == 1
    status = asked(shown, "/api/status", "red")
    assert status["tenant"] == "red" and status["looked"]["asked_tokens"] == 192 and status["tiers"] == []
    assert status["sessions"] is None and status["pid"] is None and status["savings"] is None
    (request,) = asked(shown, "/api/request?id=cmpl", "red")["found"]
    assert request["request"] == "cmpl-red" and asked(shown, "/api/request?id=cmpl", "red")["kept"] == 1
    assert asked(shown, "/api/misses", "red") == []
    everything = asked(shown, "/api/tenants", "")
    assert {one["tenant"] for one in everything} >= {"red", "blue"}
    assert len(asked(shown, "/api/request?id=cmpl", "")["found"]) == 2


@pytest.mark.slow
def test_a_tenants_prefixes_are_its_own(shown: RunningConsole) -> None:
    own, everything = asked(shown, "/api/prefixes", "red"), asked(shown, "/api/prefixes", "")
    assert [(one["tenant"], one["tokens"], one["model"]) for one in own["hottest"]] == [("red", 192, "model-of-red")]
    assert own["lookups"] == 1 and own["partings"] == [] and own["sketches"] is None
    assert {one["tenant"] for one in everything["hottest"]} == {"red", "blue"}
    assert asked(shown, "/api/prefixes?tenant=blue", "red")["hottest"] == own["hottest"]


def test_what_is_of_all_tenants_is_none_of_theirs(shown: RunningConsole) -> None:
    for path in ("/api/events", "/api/engines", "/api/elsewhere", "/api/whatif", "/api/stream", "/api/nothing"):
        answer = shown.ask(path, authorization=f"Bearer {TOKENS['red']}")
        assert answer.status == 403 and "that tenant alone" in answer.json["error"]
    assert asked(shown, "/api/series", "red")["sums"] == {}
    assert asked(shown, "/api/plan", "red")["dram_bytes"] == 0, "nor is how large the store is"


def test_a_login_by_a_form_is_the_tenants_too(shown: RunningConsole) -> None:
    cookie = shown.log_in(TOKENS["red"])
    assert [one["tenant"] for one in shown.ask("/api/tenants", cookie=cookie).json] == ["red"]


@pytest.mark.slow
def test_no_request_tells_anything_of_another_tenant(shown: RunningConsole) -> None:
    """Neither its name, nor its model, its engine, its namespace's id, its requests, or a count that it alone has."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    everything = asked(shown, "/api/namespaces", "")["namespaces"]
    (blue,) = [one for one in everything if one["tenant"] == "blue"]
    secret = re.compile(rf"blue|{blue['digest']}|{blue['id']}|(?<![\d.])44[89](?![\d.])")  # it asked for 449 tokens
    assert secret.search(json.dumps(blue["looked"])) and secret.search(json.dumps(everything))
    words = ["blue", "red", "", blue["id"], blue["digest"], *"cmpl-blue cmpl- c 0 -1 1e9 %00".split(), "a" * 200]
    names = ["tenant", "first", "window", "id", "model", "dram", "nvme", "users", "gpu_memory", "weights", "x"]
    others = "/api/events /api/engines /api/elsewhere /api/whatif /openapi.json /api/ /static/app.js"
    paths = [*TENANT_PATHS, *PAGES, *others.split()]
    parts = urlsplit(shown.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    statuses: dict[int, int] = {}
    for _ in range(REQUESTS):
        query = "&".join(f"{draw.choice(names)}={quote(draw.choice(words))}" for _ in range(draw.randrange(4)))
        asked_for = f"{draw.choice(paths)}?{query}"
        connection.request("GET", asked_for, headers={"authorization": f"Bearer {TOKENS['red']}"})
        answer = connection.getresponse()
        body = answer.read().decode()
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert answer.status < 500, asked_for
        told = set(secret.findall(body)) if "/api/" in asked_for.partition("?")[0] else set()
        assert all(word in asked_for for word in told), (asked_for, told)
        assert not told or answer.status == 422, "it repeats what was asked, in an error and nowhere else"
    connection.close()
    print(statuses)
    assert statuses[200] > REQUESTS / 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{TOKENS['']}\nred\n", "line 2"),
        (f"{TOKENS['']}\n {TOKENS['red']}\n", "a tenant's name and its token"),
        (f"{TOKENS['']}\nred {TOKENS['']}\n", "somebody else's"),
        (f"{TOKENS['']}\nred {TOKENS['red']}\nblue {TOKENS['red']}\n", "line 3"),
        (f"{TOKENS['']}\n" + f"red {TOKENS['red']}\n" * 2000, "at most"),
        *((text, "no token") for text in ("", "short", "two words of a long enough line", "x" * 5000, "tokén" * 5)),
        pytest.param("\n".join([TOKENS[""], *(f"t{at} {at:01023}" for at in range(1_024))]), "more; give", id="long"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_is_one_line_that_repeats_none(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        checked_tokens(text, "tokens")
    assert "tokens" in str(caught.value) and not any(
        one in str(caught.value) for one in (*TOKENS.values(), text) if one
    )


def test_names_with_spaces_have_tokens_too() -> None:
    tokens = checked_tokens(f"{TOKENS['']}\nthe red team {TOKENS['red']}\n\n", "tokens")
    assert tokens == {TOKENS[""]: Caller(), TOKENS["red"]: Caller("the red team")}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: see test_browser.py")
def test_its_pages_show_it_alone(shown: RunningConsole, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.looks(1280, 900, "light")
        browser.log_in(shown.url, TOKENS["red"])
        browser.until("location.pathname === '/tenants' && document.body.textContent.includes('model-of-red')")
        links = "[...document.querySelectorAll('#nav a')].filter(one => !one.hidden).map(one => one.textContent)"
        assert browser.value(links) == ["Why misses", "Prefixes", "Tenants", "Request", "Plan", "Help"]
        pages = {"tenants": "192", "misses": "Nothing was missed", "request?id=cmpl": "cmpl-red", "plan": "formula"}
        pages["prefixes"] = "model-of-red"
        for page, words in pages.items():
            browser.open(f"{shown.url}{page}")
            browser.until(f"document.getElementById('main')?.textContent.includes('{words}')")
            text = browser.value("document.getElementById('main').textContent")
            assert "blue" not in text and "does not answer" not in text
            browser.picture(tmp_path / f"{page.partition('?')[0]}.png")
        assert browser.logged == []
