"""The edge and the transfer agent as the supervisor runs them: what they would refuse is refused at the start, what a
part of the edge lacks costs no other part, and what ends them is told in their own words."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from kv_bench.process import free_port
from kvstore.block.errors import StoreError
from kvstore.cli import ask
from network.running import Issuer, token_file
from service.test_keeper import WIRE, keeping
from service.test_serve import ended, page, serving
from test_cli import Here
from tiering.clock import SystemClock
from waiting import wait_until

TOKENS = "[network]\nlisten = '127.0.0.1:0'\ntoken_file = '{dir}/tokens'\n"
PEERS = "certificate = '{dir}/ca/server.pem'\nkey = '{dir}/ca/server.key'\nclient_ca = '{dir}/ca/ca.pem'\n"
CONSOLE = "[console]\nlisten = '127.0.0.1:0'\n"
REFUSED = {
    "a database": ("[remote]\nurl = 'redis://H/3'\n", "remote.url: not the address of a Valkey"),
    "a password": ("[remote]\nurl = 'redis://u:hidden@H'\n", "name a password_file"),
    "both": ("[remote]\nurl = 'redis://:hidden@H/3'\n", "name a password_file"),
    "an option": ("[remote]\nurl = 'valkeys://H?tls=1'\n", "remote.url: not options of a Valkey"),
    "an option without TLS": ("[remote]\nurl = 'valkey://H?ca=/x'\n", "remote.url: "),
    "no such CA": ("[remote]\nurl = 'valkeys://H?ca=/no/ca.pem'\n", "remote.url: "),
    "a port": ("[remote]\nurl = 'valkey://H:99999'\n", "remote.url: "),
    "a scheme": ("[remote]\nurl = 'http://H'\n", "remote.url: "),
    "no such password": ("[remote]\nurl = 'valkey://H'\npassword_file = '/no/pw'\n", "/no/pw: No such file"),
    "no tokens": ("[network]\nlisten = '127.0.0.1:0'\ntoken_file = '/no/tokens'\n", "/no/tokens: No such file"),
    "a short token": ("[network]\nlisten = '127.0.0.1:0'\ntoken_file = '{dir}/short'\n", "short has no token"),
    "no certificate": (TOKENS + PEERS.replace("server.pem", "none.pem"), "none.pem: No such file"),
    "another's key": (TOKENS + PEERS.replace("server.key", "other.key"), "ca/server.pem"),
    "a damaged CA": (TOKENS + PEERS.replace("ca/ca.pem", "short"), "short"),
    "directory: a database": (TOKENS + "directory = 'valkey://H/3'\n", "directory"),
    "directory: a password": (TOKENS + "directory = 'valkey://u:hidden@H'\n", "password"),
    "directory: a password and a port that is none": (TOKENS + "directory = 'valkey://:hidden@H:x'\n", "password"),
    "directory: no password": (
        TOKENS + "directory = 'valkey://H'\ndirectory_password_file = '/no/pw'\n",
        "/no/pw: No such file",
    ),
    "pull: another host's": (TOKENS + PEERS + "peers = ['127.0.0.2:1']\npull = '192.0.2.1:0'\n", "192.0.2.1:0"),
    "console: no tokens": (CONSOLE + "token_file = '/no/tokens'\n", "/no/tokens: No such file"),
    "console: a short token": (CONSOLE + "token_file = '{dir}/short'\n", "short has no token"),
    "console: a log's folder": (
        CONSOLE + "token_file = '{dir}/tokens'\noperator = true\naudit_file = '/no/log'\n",
        "console.audit_file=/no/log",
    ),
    "console: a log that is none": (
        CONSOLE + "token_file = '{dir}/tokens'\noperator = true\naudit_file = '{dir}/ca'\n",
        "give another --audit-file (console.audit_file)",
    ),
}
"""Settings that the sidecar's own process has no use for, and what is said."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    issuer = Issuer(folder / "ca")
    issuer.server()
    issuer.server("other")
    token_file(folder)
    (folder / "short").write_text("short\n")
    return folder


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_child_would_refuse_is_one_line_at_the_start(
    text: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, here: Here
) -> None:
    config = folder / "c.toml"
    config.write_text(text.replace("{dir}", str(folder)))

    def served(*_: object) -> None:
        raise AssertionError("it is served")

    monkeypatch.setattr(os, "execv", served)
    done = here("serve", "--data", str(folder / "kv"), "--config", str(config))
    assert done.returncode == 2 and not done.stdout, done
    assert done.stderr.count("\n") == 1 and words in done.stderr and "hidden" not in done.stderr
    assert not (folder / "kv").exists()


def warnings_of(data: Path) -> list[str]:
    try:
        return ask.stat(str(data / "admin.sock"), SystemClock()).warnings
    except StoreError:  # it is being started again
        return []


@pytest.mark.slow
def test_a_part_whose_port_is_taken_is_tried_again_costs_no_other_and_stands_in_stat_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the sidecar has crashed; and what a child prints is JSON in a log of JSON, with its address."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    port, data = free_port(), tmp_path / "kv"
    taken = socket.create_server(("127.0.0.1", 0))  # as another program may have it
    config = tmp_path / "c.toml"
    config.write_text(
        f"[console]\nlisten = '127.0.0.1:{taken.getsockname()[1]}'\n"
        f"[network]\nlisten = '127.0.0.1:{port}'\ntoken_file = '{token_file(tmp_path)}'\n"
    )
    where = f"127.0.0.1:{taken.getsockname()[1]}"
    told = f"the console: {where} cannot be listened on: Address already in use"
    flags = ["--config", str(config), "--nvme", "off", "--http", "127.0.0.1:0"]
    with taken, serving(tmp_path, *flags) as (process, said):
        wait_until(lambda: any(one.startswith(told) for one in warnings_of(data)))
        warnings = page(said["http_port"], "readyz")[1]["warnings"]
        assert warnings == ["the edge or the transfer agent: kvstore stat says more"]
        os.kill(said["pid"], signal.SIGKILL)
        wait_until(lambda: any(one.startswith(told) for one in warnings_of(data)))
        taken.close()
        log: list[dict[str, Any]] = []
        while not any(one["message"].startswith("console on") for one in log):
            assert process.stderr is not None
            log.append(json.loads(process.stderr.readline()))
        status, rest = ended(process)
    assert status == 0
    lines = [(one["logger"], one["level"], one["message"]) for one in (*log, *rest)]
    assert ("kvstore.edge", "info", f"console on http://{where}/") in lines
    assert ("kvstore.server", "info", f"gRPC on 127.0.0.1:{port}") in lines
    assert [(logger, level) for logger, level, text in lines if text.startswith(told)] == [("kvstore.edge", "warning")]


CHILD = """
import sys, time
print("it serves", flush=True)
sys.stderr.write({flood!r} * 4000)
sys.stderr.write("no end of a line")
sys.stderr.flush()
open({done!r}, "w")
if {hangs}: time.sleep(600)
"""
"""Prints far more than a pipe holds."""


@pytest.mark.parametrize("hangs", [False, True], ids=["and ends", "and goes on"])
def test_a_child_that_prints_without_end_and_a_log_without_a_reader_stop_nothing(hangs: bool, tmp_path: Path) -> None:
    done = tmp_path / "done"
    flood = "x" * 200 + "\n" + "\xff\x00 \x1b[2J\n"
    sidecar = f"{WIRE}\n"
    sidecar += "wire.recv(64); wire.send(b'r'); print(wire.recv(8192), flush=True); signal.pause()"
    child = CHILD.format(flood=flood, done=str(done), hangs=hangs)
    with keeping(sidecar, edge=child) as process:
        assert process.stdout is not None
        wait_until(done.exists)  # and the log has no reader
        if not hangs:
            assert "the edge ended with status 0: no end of a line" in process.stdout.readline()
        process.terminate()
        log = process.communicate(timeout=60)[1].splitlines()
    found = [json.loads(line) for line in log]
    assert process.returncode == 0 and found[0]["message"] == "it serves"
    assert {one["logger"] for one in found} <= {"kvstore.edge", "kvstore.keeper"}
