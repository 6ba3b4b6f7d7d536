"""`kvstore serve` as a process, with its clients in others: what people run beside their engines."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.block.account import HitTier, MissReason
from kvstore.cli import ask
from kvstore.client.handle import Match, NamespaceHandle
from kvstore.service.serve import LogLines
from programs import PATHS as PATHS
from programs import ROOT as ROOT
from programs import fetched, run_python, serving_program
from service.sidecar import patient
from tiering.clock import SystemClock
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, random_pages, same_tokens, small_layout
from wrong_values import every_setting

SERVE = [sys.executable, "-m", "kvstore", "serve", "--json"]


@contextmanager
def serving(directory: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A sidecar on `directory / kv`, and what it printed once it took connections."""
    sizes = ["--dram", "16MiB"] if "--dram" not in flags else []
    command = [*SERVE, "--data", str(directory / "kv"), *sizes, *flags]
    with serving_program(command) as served:
        yield served


@contextmanager
def opened(said: dict[str, Any]) -> Iterator[NamespaceHandle]:
    """A client's namespace at the first socket of such a sidecar."""
    with patient(kvstore.open(f"unix:{said['serving'][0]}", engine="test 1.0")) as store:
        yield store.namespace(model=MODEL, layout=small_layout())


def refused(directory: Path, *flags: str) -> str:
    """What is said of a start that ends with status 2."""
    command = [*SERVE, "--data", str(directory / "kv"), "--dram", "16MiB", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **PATHS})
    assert (done.returncode, done.stdout) == (2, ""), done
    return done.stderr


def ended(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
    """Its status and its log, after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    return process.returncode, [json.loads(line) for line in errors.splitlines()]


def crash(process: subprocess.Popen[str], said: dict[str, Any]) -> None:
    """The sidecar and its keeper are killed, and neither gets to do anything about it."""
    process.send_signal(signal.SIGSTOP)  # else it starts another one
    os.kill(said["pid"], signal.SIGKILL)
    process.kill()


CLIENT = """
import sys
import kvstore
from service.sidecar import patient
from workbench import MODEL, blank_pages, ids, random_pages, same_tokens, small_layout

layout = small_layout()
with patient(kvstore.open(f"unix:{sys.argv[1]}", engine="test 1.0")) as store:
    handle = store.namespace(model=MODEL, layout=layout)
    if sys.argv[2] == "put":
        print(handle.put(ids(640), random_pages(layout, 10, seed=3), durability="disk").stored)
    else:
        blank = blank_pages(layout, 10)
        with handle.lease(handle.match(ids(640)), deadline_ms=5000) as lease:
            print(handle.get(lease, blank).tokens, same_tokens(random_pages(layout, 10, seed=3), blank, range(640)))
"""


def client(socket: str, what: str) -> str:
    return run_python(CLIENT, socket, what)


@pytest.mark.slow
def test_two_processes_share_blocks_and_a_third_finds_them_after_a_restart(tmp_path: Path) -> None:
    flags = ["--nvme", "64MiB"]
    with serving(tmp_path, *flags) as (process, said):
        assert said["keeper_pid"] == process.pid != said["pid"] and said["serving"] == [
            str(tmp_path / "kv" / "kvstore.sock")
        ]
        (socket,) = said["serving"]
        assert client(socket, "put") == "10"
        assert client(socket, "get") == "640 True"
        status, log = ended(process)
        assert status == 0 and [line["message"] for line in log] == ["serving", "draining", "stopped"]
        assert not Path(socket).exists()
    with serving(tmp_path, *flags) as (_, said):
        assert client(said["serving"][0], "get") == "640 True"


@pytest.mark.slow
def test_a_sidecar_that_learns_what_to_keep_serves_right_bytes(tmp_path: Path) -> None:
    """Eviction and writing by what was learned: more than DRAM has room for, put and asked for again, and a restart."""
    config = tmp_path / "config.toml"
    config.write_text('[store]\npolicy = "adaptive"\nnvme_writes = 1000.0\nnvme = "64MiB"\ndram = "1MiB"\n')
    layout = small_layout()
    prompts = [[*ids(320), *ids(320, 1_000_000 + 1_000 * number)] for number in range(60)]
    pages = [random_pages(layout, 10, seed=number) for number in range(60)]
    found = 0
    with serving(tmp_path, "--dram", "1MiB", "--config", str(config)) as (process, said):
        with patient(kvstore.open(f"unix:{said['serving'][0]}")) as store:
            handle = store.namespace(model=MODEL, layout=layout)
            for number in [*range(60), *range(60)]:
                assert handle.put(prompts[number], pages[number]).reason is None
                earlier, blank = max(0, number - 2), blank_pages(layout, 10)
                with handle.lease(handle.match(prompts[earlier]), deadline_ms=5000) as lease:
                    tokens = handle.get(lease, blank).tokens
                assert same_tokens(pages[0], blank, range(min(tokens, 320)))
                assert same_tokens(pages[earlier], blank, range(320, tokens))
                found += tokens
        status, _ = ended(process)
        assert status == 0 and found > 60 * 320
    with (
        serving(tmp_path, "--dram", "1MiB", "--config", str(config)) as (_, said),
        patient(kvstore.open(f"unix:{said['serving'][0]}")) as store,
    ):
        handle = store.namespace(model=MODEL, layout=layout)
        wait_until(lambda: handle.match(prompts[59]).blocks == 10)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_client_outlives_its_sidecar(tmp_path: Path, end: signal.Signals) -> None:
    flags = ["--nvme", "64MiB"]
    layout = small_layout()
    pages = random_pages(layout, 10)
    with serving(tmp_path, *flags) as (process, said):
        store = patient(kvstore.open(f"unix:{said['serving'][0]}"))
        handle = store.namespace(model=MODEL, layout=layout)
        assert handle.put(ids(640), pages, durability="disk").stored == 10
        lease = handle.lease(handle.match(ids(640)))
        if end == signal.SIGKILL:
            crash(process, said)
        process.send_signal(end)
        process.communicate(timeout=20)
    match = handle.match(ids(640))
    assert match.blocks == 0 and match.reason is MissReason.UNREACHABLE and match.account.asked == 640
    assert handle.get(lease, blank_pages(layout, 10)).reason in (None, MissReason.UNREACHABLE)
    assert handle.lease(match).blocks == 0
    assert handle.put(ids(640), pages).reason is MissReason.UNREACHABLE
    with serving(tmp_path, *flags):

        def found() -> Match | None:
            match = handle.match(ids(640))
            assert match.blocks == 10 or match.reason in (MissReason.UNREACHABLE, MissReason.WARMING), match
            return match if match.blocks == 10 else None

        match = wait_until(found)
        blank = blank_pages(layout, 10)
        with handle.lease(match, deadline_ms=5000) as fresh:
            assert handle.get(fresh, blank).tokens == 640
        assert same_tokens(pages, blank, range(640))
        loaded = handle.get(lease, blank_pages(layout, 10))
        assert loaded.tokens == 0 and loaded.reason is MissReason.UNREACHABLE, "it was leased from the one before"
        lease.release()
    store.close()
    assert handle.match(ids(640)).reason is MissReason.DISABLED


def test_nobody_waits_long_for_a_sidecar_that_is_not_there(tmp_path: Path) -> None:
    store = kvstore.open(f"unix:{tmp_path / 'none.sock'}")
    store._door._limits = type(store._door._limits)(open=0.2)
    start = time.monotonic()
    with pytest.raises(kvstore.Unreachable, match="start the sidecar"):
        store.namespace(model=MODEL, layout=small_layout())
    assert 0.2 <= time.monotonic() - start < 5


@pytest.mark.slow
def test_a_socket_that_this_user_may_not_open_is_told_as_that(tmp_path: Path) -> None:
    nobody = 65534
    socket = tmp_path / "kv" / "kvstore.sock"
    call = f"""
import os, sys
import kvstore
from kvstore.client.framing import FramedSocket
from tiering.clock import SystemClock
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid({nobody})
try:
    FramedSocket({str(socket)!r}, "test", bytes(16), SystemClock(), 5)
except kvstore.Unreachable as error:
    print(error)
"""
    config = tmp_path / "kvstore.toml"
    config.write_text('[door]\nmode = "0"\n')
    with serving(tmp_path, "--config", str(config), "--nvme", "off"):
        said = run_python(call)
    assert f"{socket} cannot be opened (Permission denied)" in said and "door.mode" in said, said


@pytest.mark.slow
def test_a_directory_that_another_sidecar_has_is_told_as_that_and_not_as_a_shortage(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off") as (process, _):
        config = tmp_path / "other.toml"
        config.write_text("[store]\nkeeper = false\n")
        for keeper in ([], ["--config", str(config)]):
            said = refused(tmp_path, "--nvme", "off", *keeper, "--socket", str(tmp_path / "other.sock"))
            assert "kv is in use by process " in said and "close that store, or give another" in said
            assert "threads" not in said and "cannot serve" not in said
        assert process.poll() is None


def test_a_line_of_text_in_the_log_says_what_one_of_json_does() -> None:
    record = logging.makeLogRecord({"levelname": "INFO", "name": "a.b", "msg": "serving", "data": "./kv", "bytes": 5})
    assert LogLines("text").format(record).endswith(" INFO a.b: serving data=./kv bytes=5")


@pytest.mark.slow
def test_each_tenant_comes_in_by_a_socket_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text(f'[tenants.other]\nsocket = "{tmp_path / "other.sock"}"\n[log]\nlevel = "warning"\n')
    layout = small_layout()
    with serving(tmp_path, "--config", str(config), "--nvme", "off") as (process, said):
        mine, other = (patient(kvstore.open(f"unix:{path}")) for path in said["serving"])
        one, two = (store.namespace(model=MODEL, layout=layout) for store in (mine, other))
        assert one.put(ids(640), random_pages(layout, 10)).stored == 10
        assert one.match(ids(640)).blocks == 10
        match = two.match(ids(640))
        assert (match.blocks, match.reason) == (0, MissReason.ABSENT)
        assert one.match(ids(640)).keys != match.keys
        assert two.put(ids(640), random_pages(layout, 10, seed=1)).stored == 10
        assert other.drop(two) == 10 and one.match(ids(640)).tiers == ((HitTier.DRAM, 10),)
        assert ended(process) == (0, [])


def page(port: int, name: str) -> tuple[int, dict[str, Any]]:
    status, text = fetched(port, f"/{name}")
    return status, json.loads(text)


@pytest.mark.slow
def test_it_says_that_it_lives_and_when_it_is_ready(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "64MiB", "--http", "127.0.0.1:0") as (process, said):
        assert page(said["http_port"], "livez") == (200, {"alive": True})
        wait_until(lambda: page(said["http_port"], "readyz")[0] == 200)
        facts = ask.stat(f"{tmp_path}/kv/admin.sock", SystemClock())
        here = {"node": facts.node, "incarnation": facts.incarnation}
        assert page(said["http_port"], "readyz") == (200, {"ready": True, "state": "ready", **here})
        assert ended(process)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "flags", "fragments"),
    [
        ("[stor]\n", [], ("stor is not a setting", "did you mean store?")),
        ("", ["--dram", "5"], ("dram=5 is too small", "at least 1.0 MiB")),
        ("[admin]\nsocket = '/nonexistent/dir/s'\n", [], ("admin.socket=/nonexistent/dir/s", "cannot be used")),
        ("", ["--dram", "900TiB"], ("dram=900TiB", "cgroup")),
        ("", ["--http", "nowhere.invalid:1"], ("nowhere.invalid:1", "cannot be listened on")),
        ("", ["--socket", "x" * 120], ("longer than 107 bytes",)),
        ("", ["--socket", "/nonexistent/dir/s"], ("door.socket=/nonexistent/dir/s", "make its directory first")),
        ("", ["--config", "/nonexistent.toml"], ("/nonexistent.toml",)),
    ],
)
def test_wrong_settings_are_one_clear_line(
    tmp_path: Path, text: str, flags: list[str], fragments: tuple[str, ...]
) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text(text)
    (line,) = refused(tmp_path, "--nvme", "16MiB", "--config", str(config), *flags).splitlines()
    assert all(fragment in line for fragment in fragments), line


@pytest.mark.slow
def test_a_socket_that_is_in_use_is_not_taken_over_and_one_that_was_left_is(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off") as (process, said):
        taken = refused(tmp_path / "other", "--nvme", "off", "--socket", said["serving"][0])
        assert "Address already in use" in taken
        assert kvstore.open(f"unix:{said['serving'][0]}").namespace(model=MODEL, layout=small_layout())
        crash(process, said)
    assert Path(said["serving"][0]).exists()
    with serving(tmp_path, "--nvme", "off") as (_, said):
        assert kvstore.open(f"unix:{said['serving'][0]}").namespace(model=MODEL, layout=small_layout())


def test_every_setting_is_documented_with_its_default() -> None:
    """Each row of the table names a key that exists, and each key has a row."""
    text = (ROOT / "docs" / "sidecar.md").read_text()
    rows = dict(re.findall(r"^\| `([a-zA-Z_.]+)`[^|]*\|\s*([^|]*?)\s*\|", text, re.MULTILINE))
    known = {f"{section}.{key}": default for section, key, _, default in every_setting()}
    assert rows.keys() == known.keys()
    for key, default in known.items():
        if default not in (None, ""):
            written = default if isinstance(default, str) else str(default).removesuffix(".0")
            written = written.lower() if isinstance(default, bool) else written
            assert rows[key].strip("`") == written, key
