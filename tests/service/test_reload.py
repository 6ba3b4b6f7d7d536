"""SIGHUP: a sidecar that runs reads its settings again, and what needs a restart is named and left alone."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from console.running import console
from kvstore.cli import ask
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from kvstore.service.serve import taken_over
from kvstore.service.settings import read_settings
from kvstore.status.tree import SidecarStatus
from programs import fetched
from service.sidecar import Sidecar, wire_to
from service.test_serve import ended, serving
from waiting import wait_until

FIRST_TOKEN, SECOND_TOKEN = "first-token-of-a-scraper", "second-token-of-a-scraper"


class Configured:
    """A sidecar with a file of settings that a test writes anew."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "kvstore.toml"
        self.token = directory / "token"
        self.process: subprocess.Popen[str]
        self.said: dict[str, Any]

    def write(self, shares: tuple[float, float] = (0.5, 0.25), more: str = "", **keys: str) -> None:
        given = {"level": '"info"', "scrub": '"8MiB/s"', "rate": "20000", "burst": "2000", "policy": '"lru"'} | keys
        self.file.write_text(f"""
[store]
nvme = "32MiB"
extent = "1MiB"
scrub = {given["scrub"]}
policy = {given["policy"]}
[door]
share = {shares[0]}
rate = {given["rate"]}
burst = {given["burst"]}
[tenants.team]
socket = "{self.directory / "team.sock"}"
share = {shares[1]}
[http]
listen = "127.0.0.1:0"
token_file = "{self.token}"
[log]
level = {given["level"]}
{more}""")

    def read_again(self) -> list[dict[str, Any]]:
        """Have the sidecar do it; what it logs until it is done, the last line saying so."""
        self.process.send_signal(signal.SIGHUP)
        return self.logged("read again")

    def logged(self, words: str) -> list[dict[str, Any]]:
        assert self.process.stderr is not None
        lines: list[dict[str, Any]] = []
        while not lines or words not in lines[-1]["message"]:
            line = json.loads(self.process.stderr.readline())
            lines += [line] if line["logger"] != "kvstore.edge" else []  # it reads its tokens by itself
        return lines

    def status(self) -> SidecarStatus:
        return ask.stat(str(self.directory / "kv" / "admin.sock"), SystemClock())

    def shares(self) -> dict[str, float | None]:
        return {one.tenant: one.share for one in self.status().tenants}

    def scrape(self, token: str) -> int:
        return fetched(self.said["http_port"], "/metrics", token=token)[0]


@contextmanager
def configured(directory: Path) -> Iterator[Configured]:
    one = Configured(directory)
    one.token.write_text(FIRST_TOKEN)
    one.write()
    with serving(directory, "--config", str(one.file)) as (one.process, one.said):
        assert one.scrape(FIRST_TOKEN) == 200, "the edge has read its settings"
        yield one


def test_shares_rates_tokens_and_the_level_count_without_a_restart(tmp_path: Path) -> None:
    with configured(tmp_path) as running:
        before = running.status()
        assert running.shares() == {"default": 0.5, "team": 0.25} and running.scrape(FIRST_TOKEN) == 200
        running.token.write_text(SECOND_TOKEN)
        running.write((0.2, 0.7), rate="4", burst="4", scrub='"1MiB/s"', level='"warning"')
        last = running.read_again()[-1]
        assert last["level"] == "warning", "it is said whatever the level is"
        changed = "door.burst door.rate door.share log.level store.scrub tenants.team.share".split()
        assert last["changed"] == changed
        assert running.shares() == {"default": 0.2, "team": 0.7}
        wait_until(lambda: (running.scrape(FIRST_TOKEN), running.scrape(SECOND_TOKEN)) == (401, 200))
        after = running.status()
        assert (after.pid, after.run) == (before.pid, before.run)
        assert after.scrub is not None and after.scrub.bytes_per_second == 1 << 20
        assert seconds_of_pings(running.said["serving"][0], 9) > 1, "four at once, and four a second"
        status, log = ended(running.process)
        assert status == 0 and [line["message"] for line in log] == [], "draining is told from info on"


def seconds_of_pings(path: str, count: int) -> float:
    with closing(wire_to(path)) as wire:
        began = time.monotonic()
        for _ in range(count):
            wire.call(m.Ping(), 20.0)
        return time.monotonic() - began


def test_what_needs_a_restart_is_named_and_the_rest_counts(tmp_path: Path) -> None:
    with configured(tmp_path) as running:
        running.write((0.4, 0.25), '[tenants.new]\nsocket = "new.sock"\n', policy='"s3-fifo"')
        assert running.read_again()[-1]["changed"] == ["door.share"]
        (line,) = running.logged("need a restart")
        assert line["level"] == "warning" and line["message"].endswith(": store.policy, tenants.new.socket")
        assert running.status().policy == "lru" and running.shares()["default"] == 0.4


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda one: one.file.write_text("[store\n"), "is not TOML"),
        (lambda one: one.write((0.1, 0.1), drum="1", more="[logs]\n"), "did you mean log"),
        (lambda one: one.write((0.1, 0.1), level='"loud"'), "log.level='loud'"),
        (lambda one: one.write((0.7, 0.7)), "share"),
        (lambda one: one.write((0.001, 0.1)), "less than one piece of dram"),
        (lambda one: one.file.unlink(), "No such file"),
        (lambda one: (one.write((0.1, 0.1)), one.token.write_text("short")), "holds no token"),
    ],
    ids=["no TOML", "no setting", "no level", "too much", "too little", "gone", "no token"],
)
@pytest.mark.slow
def test_what_cannot_be_changes_nothing(tmp_path: Path, write: Any, words: str) -> None:
    with configured(tmp_path) as running:
        write(running)
        line = running.read_again()[-1]
        assert line["level"] == "error" and words in line["message"] and "nothing is changed" in line["message"]
        assert running.shares() == {"default": 0.5, "team": 0.25} and running.scrape(FIRST_TOKEN) == 200
        running.token.write_text(SECOND_TOKEN)
        running.write((0.3, 0.3))
        assert running.read_again()[-1]["changed"] == ["door.share", "tenants.team.share"]
        wait_until(lambda: running.scrape(SECOND_TOKEN) == 200)


def test_shares_that_were_not_there_from_the_start_need_a_restart() -> None:
    def settings(text: str) -> Any:
        return read_settings(text)

    team = '[tenants.team]\nsocket = "s"\n'
    now = settings(f'{team}[store]\nscrub = "off"')
    given = settings(f"{team}share = 0.5\n")
    result, live, in_vain = taken_over(now, given)
    assert result == now and (live, in_vain) == ([], ["store.scrub", "tenants.team.share"])
    result, live, in_vain = taken_over(given, now)
    assert result == given and (live, in_vain) == ([], ["store.scrub", "tenants.team.share"])
    weighed = settings(f"{team}weight = 2.0\n")
    result, live, in_vain = taken_over(given, weighed)
    assert result == weighed and (live, in_vain) == (["tenants.team.share", "tenants.team.weight"], [])


def test_settings_that_do_not_go_together_are_refused_as_a_whole() -> None:
    """A share that may not go yet, and one that counts on it."""
    from kvstore.block.errors import BadInput

    team = '[tenants.team]\nsocket = "s"\n'
    now = read_settings(f"[door]\nshare = 0.6\n{team}share = 0.3\n")
    with pytest.raises(BadInput):
        taken_over(now, read_settings(f"{team}share = 0.6\n"))


def test_a_console_reads_its_tokens_again_and_ends_every_login(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(FIRST_TOKEN)
    with Sidecar(tmp_path) as sidecar, console(sidecar.observe_path, "--token-file", str(token)) as shown:

        def status(given: str) -> int:
            return shown.ask("/api/status", Authorization=f"Bearer {given}").status

        def until_told(words: str) -> None:
            assert shown.process.stderr is not None
            while words not in shown.process.stderr.readline():
                pass

        assert (status(FIRST_TOKEN), status(SECOND_TOKEN)) == (200, 401)
        listening = urllib.request.Request(f"{shown.url}api/stream", headers={"Authorization": f"Bearer {FIRST_TOKEN}"})
        with urllib.request.urlopen(listening, timeout=20) as stream:
            assert stream.readline().startswith(b"retry")
            token.write_text(SECOND_TOKEN)
            shown.process.send_signal(signal.SIGHUP)
            until_told("were read again")
            while stream.readline():  # until its end
                pass
        assert (status(FIRST_TOKEN), status(SECOND_TOKEN)) == (401, 200)
        token.write_text("short")
        shown.process.send_signal(signal.SIGHUP)
        until_told("could not be read again")
        assert status(SECOND_TOKEN) == 200
