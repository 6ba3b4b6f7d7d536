"""The keeper runs the console beside the sidecar: it comes, it comes again, and its end costs no engine anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import insight_cost
import kvstore
from console import console_faults
from kv_bench.process import free_port
from kvstore.block.errors import BadInput
from kvstore.service.keeper import BESIDE_NICE
from kvstore.service.settings import read_settings
from service.sidecar import patient
from service.test_serve import ended, serving
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout


def status_at(port: int, token: str = "") -> Any:
    """What the console says, once there is one that has an answer of the sidecar's."""
    asks = urllib.request.Request(f"http://127.0.0.1:{port}/api/status", headers={"Authorization": f"Bearer {token}"})
    told: list[Any] = []

    def is_connected() -> bool:
        try:
            with urllib.request.urlopen(asks, timeout=5) as answer:
                told.append(json.loads(answer.read()))
        except OSError:
            return False
        return bool(told[-1]["contact"]["connected"])

    wait_until(is_connected)
    return told[-1]


def consoles_of(keeper: int) -> list[int]:
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return [int(one) for one in children if b"console\0" in command_of(one)]


def command_of(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it was reaped since it was listed
        return b""


@pytest.mark.slow
def test_it_comes_and_comes_again_and_engines_notice_nothing(tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "c.toml"
    config.write_text(f"[console]\nlisten = '127.0.0.1:{port}'\n")
    layout = small_layout()
    with serving(tmp_path, "--config", str(config), "--nvme", "off") as (process, said):
        with patient(kvstore.open(f"unix:{said['serving'][0]}")) as store:
            handle = store.namespace(model=MODEL, layout=layout)
            handle.put(ids(640), random_pages(layout, 10))
            assert status_at(port)["pid"] == said["pid"]
            (first,) = consoles_of(process.pid)
            own = os.getpriority(os.PRIO_PROCESS, process.pid)
            assert os.getpriority(os.PRIO_PROCESS, first) == min(19, own + BESIDE_NICE)
            held = [os.readlink(one) for one in Path(f"/proc/{first}/fd").iterdir()]
            assert not [one for one in held if "memfd" in one]
            os.kill(first, signal.SIGKILL)
            assert handle.match(ids(640)).blocks == 10
            wait_until(lambda: bool(set(consoles_of(process.pid)) - {first}))
            assert status_at(port)["run"] and handle.match(ids(640)).blocks == 10
            (second,) = consoles_of(process.pid)
            os.kill(second, signal.SIGSTOP)  # one that hangs holds nothing up either
            assert handle.match(ids(640)).blocks == 10
        status, log = ended(process)
        assert status == 0 and not Path(f"/proc/{second}").exists()
        assert [one["message"] for one in log if one["logger"] == "kvstore.keeper"] == [
            "the console ended and is started again"
        ]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core here: the console needs one of its own")
def test_no_fault_of_a_console_changes_what_an_engine_finds() -> None:
    command = [sys.executable, console_faults.__file__, "--rounds", "1", "--seconds", "0.5"]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(insight_cost.__file__)}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False)
    told = json.loads(done.stdout)  # the status is of times
    assert {one["of"] for one in told} == {"killed", "stopped", "flooded", "full"}
    assert all(one["times"] and one["p99_ms"] > 0 for one in told), "each of them happened"


@pytest.mark.parametrize(
    "text, words",
    [
        ("[console]\nlisten = '0.0.0.0:9798'\n", "console.token_file"),
        ("[console]\nlisten = 'x'\n", "console.listen='x'"),
        ("[console]\nlisten = '127.0.0.1:1'\n[store]\nkeeper = false\n", "store.keeper"),
        ("[console]\nlistens = '127.0.0.1:1'\n", "did you mean console.listen"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_served(text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_settings(text)
    assert words in str(refused.value)


def test_other_hosts_may_come_in_with_a_token() -> None:
    settings = read_settings("[console]\nlisten = '0.0.0.0:9798'\ntoken_file = '/run/token'\n")
    assert settings.console.listen == "0.0.0.0:9798" and read_settings("").console.listen is None
