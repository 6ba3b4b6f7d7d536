"""Every page in a real browser, light and dark, wide and at 360 pixels: nothing logged, no other host asked, and
figures equal to the API's. Pictures lie in the test's own folder (`-s` prints where)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from console.browser import CHROMIUM, PIECES, Browser
from console.running import LAYOUT, RunningConsole, busy_console, console
from elsewhere.courier import RawCourier
from kvstore.block.account import MissReason
from kvstore.console.http_api import HELP, PAGES
from kvstore.protocol import courier as c
from kvstore.protocol.told import RequestTold
from metrics.busy_sidecar import SOURCES, tell_sources
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import MODEL, ids, random_pages

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no chromium here: apt-get install --no-install-recommends chromium fonts-dejavu-core",
)
LOOKS = (("light", 1280, 900), ("dark", 1280, 900), ("light", 360, 740), ("dark", 360, 740))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sidecar, RunningConsole]]:
    with busy_console(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("theme, width, height", LOOKS, ids=lambda one: str(one))
def test_every_page_is_whole_and_quiet(
    served: tuple[Sidecar, RunningConsole], browser: Browser, tmp_path: Path, theme: str, width: int, height: int
) -> None:
    sidecar, shown = served
    browser.looks(width, height, theme)
    browser.asked.clear()
    with sidecar.client() as store:
        assert store is not None
        for page in (*PAGES, HELP):
            browser.open(shown.url.rstrip("/") + page)
            browser.until("!document.querySelector('.wait')")
            path = tmp_path / f"{page.strip('/') or 'overview'}-{theme}-{width}.png"
            browser.picture(path)
            print(path)
            widths = browser.value("[document.documentElement.scrollWidth, innerWidth]")
            assert widths[0] <= widths[1], f"{page} is cut off at {width} pixels: {widths}"
            assert browser.value("document.documentElement.dataset.theme") == theme
            text = browser.value("document.getElementById('main').textContent")
            assert len(text) > 60 and (page == HELP or "does not answer" not in text), text
    assert browser.logged == []
    hosts = {urlsplit(url).netloc for url in browser.asked if not url.startswith(("data:", "about:"))}
    assert hosts == {urlsplit(shown.url).netloc}


def test_the_bar_has_the_tokens_of_the_api_and_the_sidecar(
    served: tuple[Sidecar, RunningConsole], browser: Browser
) -> None:
    sidecar, shown = served
    looked = sidecar.admin.facts().looked
    for window in ("run", "15m"):
        browser.open(f"{shown.url}?window={window}")
        browser.until("document.querySelector('[data-piece]')")
        assert browser.value(PIECES) == {**looked.hit_tokens, **looked.miss_tokens}, window
        sentence = browser.value("document.getElementById('sentence').textContent")
        assert f"{looked.asked_tokens:,} prompt tokens" in sentence
        assert f"{sum(looked.hit_tokens.values()):,} did not have to be computed" in sentence
    last = "[...document.querySelectorAll('.u-legend .u-value')].map(one => one.textContent)"
    browser.until(f"{last}.length && !{last}.includes('--')")  # of the last slot, while no pointer is there
    assert any(" tokens/s" in one for one in browser.value(last)) and any(" %" in one for one in browser.value(last))
    browser.open(f"{shown.url}misses")
    reasons = "Object.fromEntries([...document.querySelectorAll('.reason')].map(one => [one.id, +one.dataset.tokens]))"
    browser.until("document.querySelector('.reason')")
    assert browser.value(reasons) == looked.miss_tokens


def test_a_reason_looks_the_same_whatever_its_rank(browser: Browser, served: tuple[Sidecar, RunningConsole]) -> None:
    _, shown = served
    browser.looks(1280, 900, "light")
    browser.open(f"{shown.url}misses")
    looks = (
        "window.seen = null; import('/static/charts.js').then(({{ bar, piecesOf }}) => {{"
        " const one = bar(piecesOf({{}}, {misses}, 0, 10000), 10000, '');"
        " document.querySelector('main').append(one);"
        " const drawn = (li) => getComputedStyle(li.querySelector('i'));"
        " window.seen = Object.fromEntries([...one.querySelectorAll('[data-piece]')]"
        ".map(li => [li.dataset.piece, drawn(li).backgroundColor + drawn(li).backgroundImage])); }}); 0"
    )
    seen = []
    for misses in ("absent: 5000, partial_block: 4000, corrupt: 1000", "corrupt: 1, partial_block: 9000, absent: 999"):
        browser.value(looks.format(misses=f"{{{misses}}}"))
        browser.until("window.seen")
        seen.append(browser.value("window.seen"))
    assert seen[0] == seen[1] and len(set(seen[0].values())) == 3, seen
    assert "rgb(72, 72, 84)" in seen[0]["partial_block"] and "rgb(248, 56, 0)" in seen[0]["corrupt"]
    assert all("repeating-linear-gradient" in one for one in seen[0].values())


def test_a_reasons_link_leads_to_its_words_on_this_host(
    served: tuple[Sidecar, RunningConsole], browser: Browser
) -> None:
    _, shown = served
    browser.looks(1280, 900, "light")
    browser.open(f"{shown.url}misses")
    browser.until("document.querySelector('#evicted.reason a')")
    meaning = browser.value("document.querySelector('#evicted dd').textContent")
    browser.asked.clear()
    browser.value("document.querySelector('#evicted.reason a').click()")
    browser.until("location.pathname === '/help' && document.body && document.body.dataset.ready === '1'")
    assert browser.value("location.hash") == "#evicted"
    row = "document.getElementById('evicted').closest('tr')"
    assert meaning in browser.value(f"{row}.textContent")
    browser.until(f"{row}.getBoundingClientRect().top >= 0 && {row}.getBoundingClientRect().bottom <= innerHeight")
    assert {urlsplit(url).netloc for url in browser.asked} == {urlsplit(shown.url).netloc}
    assert browser.logged == []


def test_the_plan_has_the_apis_figures_and_says_what_cannot_be_planned(
    served: tuple[Sidecar, RunningConsole], browser: Browser
) -> None:
    _, shown = served
    browser.looks(1280, 900, "light")
    query = "?model=deepseek-v3&users=4&gpu_memory=&weights=&dram=256GiB"
    told: dict[str, Any] = {}

    def is_equal() -> bool:
        """The store's rate is one of the figures, and changes while look-ups are still worked through."""
        browser.open(f"{shown.url}plan{query}")
        browser.until("document.querySelectorAll('table').length > 2")
        told.update(shown.ask("/api/plan?model=deepseek-v3&users=4&dram=256GiB").json)
        wanted = [one["formula"] for section in told["sections"] for one in section["figures"]]
        return bool(
            browser.value("[...document.querySelectorAll('td:last-child')].map(one => one.textContent)") == wanted
        )

    wait_until(is_equal)
    assert browser.value("[document.getElementById('model').value, document.forms[0].dram.value]") == [
        "deepseek-v3",
        "256GiB",
    ]
    browser.open(f"{shown.url}plan?model=unknown")
    browser.until("document.getElementById('problem')")
    assert "not in the table" in browser.value("document.getElementById('problem').textContent")
    assert all("422" in one for one in browser.logged), "and nothing else was logged"
    browser.logged.clear()


def test_a_requests_page_has_what_its_engine_told(served: tuple[Sidecar, RunningConsole], browser: Browser) -> None:
    sidecar, shown = served
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT, name="small model")
        handle.put(ids(320, 77_000_000), random_pages(LAYOUT, 5))
        handle.lease(handle.match(ids(400, 77_000_000)), deadline_ms=5000, request="cmpl-7").release()
        evicted = next(at for at in range(1000) if handle.match(ids(640, 100_000 * at)).reason is MissReason.EVICTED)
        handle.match(ids(640, 100_000 * evicted), request="cmpl-8")
        handle.tell([RequestTold("cmpl-7", 400, {"dram": 320}, {"partial_block": 80}, "as it is", 2.5, 1)])
        shown.until("/api/request?id=cmpl-7", lambda one: bool(one["found"] and one["found"][0]["told"]))
    browser.open(f"{shown.url}request?id=cmpl-7")
    browser.until("document.querySelector('[data-piece]')")
    pieces = "[...document.querySelectorAll('[data-piece]')].map(one => [one.dataset.piece, +one.dataset.tokens])"
    assert browser.value(pieces) == [["dram", 320], ["partial_block", 80]]
    text = browser.value("document.getElementById('main').textContent")
    for words in ("cmpl-7", "small model", "leased 5 of 5 blocks", "400 tokens", "waited 2.50 ms", "as it is"):
        assert words in text, text
    browser.open(f"{shown.url}request?id=cmpl-8")
    browser.until("document.querySelector('table')")
    text = browser.value("document.querySelector('table').textContent")
    assert "looked up: found" in text and "The first of them went" in text and "for room" in text, text
    browser.open(f"{shown.url}request")
    browser.until("document.querySelector('td a')")
    last = "[...document.querySelectorAll('td a')].map(one => one.textContent)"
    assert browser.value(last) == [one["request"] for one in shown.ask("/api/request").json["found"]]
    assert {"cmpl-7", "cmpl-8"} <= set(browser.value(last))
    browser.value("[...document.querySelectorAll('td a')].find(one => one.textContent === 'cmpl-7').click()")
    browser.until("location.search === '?id=cmpl-7' && document.querySelector('[data-piece]')")
    browser.open(f"{shown.url}request?id=unknown")
    browser.until("document.getElementById('problem')")
    assert "Nothing is known" in browser.value("document.getElementById('problem').textContent")


def test_prefixes_are_those_of_the_api(served: tuple[Sidecar, RunningConsole], browser: Browser) -> None:
    sidecar, shown = served
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT, name="small model")
        handle.put(ids(320, 88_000_000), random_pages(LAYOUT, 5))
        for _ in range(40):
            assert handle.match(ids(320, 88_000_000)).blocks == 5
    wait_until(lambda: sidecar.prefixes.step() >= 0 and shown.ask("/api/prefixes").json["hottest"])
    told = shown.ask("/api/prefixes").json
    browser.open(f"{shown.url}prefixes")
    browser.until("document.querySelector('td code')")
    rows = "[...document.querySelectorAll('td code')].map(one => one.textContent)"
    assert browser.value(rows) == [one["id"] for one in told["hottest"]] != []
    for one in told["hottest"]:
        assert one["stored_tokens"] <= one["tokens"] and one["bytes"] > 0 and one["tenant"] == "default"


def test_other_nodes_have_their_state_in_words_and_the_apis_figures(tmp_path: Path, browser: Browser) -> None:
    section = "[...document.querySelectorAll('#main section')].find(one => one.textContent.startsWith('Other nodes'))"
    with Sidecar(tmp_path, couriers=True) as sidecar, console(sidecar.observe_path) as shown:
        shown.until("/api/elsewhere", lambda one: one["elsewhere"]["couriers"] == 0)
        browser.looks(1280, 900, "light")
        browser.open(f"{shown.url}moves")
        browser.until(section)
        text = browser.value(f"{section}.textContent")
        assert "no courier is there" in text and "No courier has told of one." in text
        courier = RawCourier(sidecar.courier_path)
        tell_sources(courier)
        answer = shown.until("/api/elsewhere", lambda one: len(one["elsewhere"]["sources"]) == len(SOURCES))
        assert answer["elsewhere"] == msgspec.to_builtins(sidecar.admin.facts().elsewhere)
        for theme, width, height in LOOKS:
            browser.looks(width, height, theme)
            browser.open(f"{shown.url}moves")
            browser.until(f"{section} && {section}.querySelector('b.state')")
            browser.value(f"{section}.scrollIntoView()")
            browser.picture(tmp_path / f"elsewhere-{theme}-{width}.png")
            widths = browser.value("[document.documentElement.scrollWidth, innerWidth]")
            assert widths[0] <= widths[1], widths
            states = f"[...{section}.querySelectorAll('b.state')].map(one => [one.textContent, one.className])"
            assert browser.value(states) == [
                ["up", "state ok"],
                ["banned", "state warning"],
                ["breaker open", "state warning"],
                ["down", "state error"],
            ]
            first = browser.value(f"[...{section}.querySelector('tbody tr').cells].map(cell => cell.textContent)")
            wanted = ["3", "0", "3 MiB", "0 B", "5", "3", "0", "1", "0", "digest 2", "2.50", "8.0", "40"]
            assert first == ["peer", "10.0.0.7:9400", "up", *wanted]
            assert "degraded: directory 10.0.0.2:9500 does not answer" in browser.value(f"{section}.textContent")
        courier.close()
        hostile = RawCourier(sidecar.courier_path)
        told = c.SourceFigures("<img src=x>", "<script>x()</script>", "constructor", refused={"<b>": 1}, gbps=1e300)
        hostile.questions(told=c.CourierFigures([told], ["<i>x"]))
        shown.until("/api/elsewhere", lambda one: len(one["elsewhere"]["sources"]) == 1)
        browser.open(f"{shown.url}moves")
        browser.until(f"{section}.textContent.includes('constructor')")
        assert browser.value(f"{section}.querySelectorAll('img, script, i, td b:not(.state)').length") == 0
        hostile.close()
    assert [one for one in browser.logged if "ERR_" not in one and "EventSource" not in one] == []
    browser.logged.clear()


def test_it_says_so_when_numbers_are_old_and_when_it_is_back(tmp_path: Path, browser: Browser) -> None:
    with Sidecar(tmp_path) as sidecar, console(sidecar.observe_path) as shown:
        browser.looks(1280, 900, "light")
        browser.open(shown.url)
        browser.until("document.getElementById('health') && document.getElementById('health').classList.contains('ok')")
        assert "No engine is attached" in browser.value("document.body.textContent")
        sidecar.door.close(5)
        browser.until("document.body.classList.contains('stale')")
        text = browser.value("document.getElementById('stale').textContent")
        assert "has not answered since" in text and "numbers are from" in text
    assert [one for one in browser.logged if "ERR_" not in one and "EventSource" not in one] == []


def test_where_no_sidecar_is_the_page_says_so(tmp_path: Path, browser: Browser) -> None:
    with console(tmp_path / "nothing.sock") as shown:
        browser.open(shown.url)
        browser.until("document.getElementById('health') && document.getElementById('health').textContent.length > 20")
        assert "No sidecar has answered yet" in browser.value("document.getElementById('health').textContent")


def test_the_token_is_asked_for_in_a_form(tmp_path: Path, browser: Browser) -> None:
    token = "correct-horse-battery"
    with Sidecar(tmp_path) as sidecar, console(sidecar.observe_path, tokens=token) as shown:
        is_told = "document.body && document.body.textContent.includes('That is not the token')"
        browser.log_in(shown.url, "wrong-horse-battery", then=is_told)
        browser.log_in(shown.url, token)
        assert browser.value("document.cookie") == ""
