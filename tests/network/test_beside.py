"""The keeper runs the network process beside the sidecar: it comes, it comes again, also where it hangs, and no engine
notices; and the sidecar's own process knows no grpc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvstore
from kv_bench.process import free_port
from kvstore.block.errors import BadInput
from kvstore.service.keeper import BEAT_SECONDS, BESIDE_NICE
from kvstore.service.settings import read_settings
from network.running import ENVIRONMENT, Stubs, grpc, token_file, token_of
from service.sidecar import patient
from service.test_serve import PATHS, ended, serving
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout


def networks_of(keeper: int) -> list[int]:
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return [int(one) for one in children if b"\0network\0" in Path(f"/proc/{one}/cmdline").read_bytes()]


def answers(caller: Stubs) -> bool:
    try:
        return bool(caller.namespaces(5.0))
    except grpc.RpcError as error:
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return False


@pytest.mark.slow
def test_it_comes_and_comes_again_where_it_is_killed_and_where_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PATHS, "PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    port, layout = free_port(), small_layout()
    config = tmp_path / "c.toml"
    tokens = token_file(tmp_path, ("default", "team"))
    config.write_text(
        f"[network]\nlisten = '127.0.0.1:{port}'\nhttp = '127.0.0.1:{free_port()}'\ntoken_file = '{tokens}'\n"
        f"[tenants.team]\nsocket = '{tmp_path / 'team.sock'}'\n"
    )
    with serving(tmp_path, "--config", str(config), "--nvme", "off") as (process, said):
        with patient(kvstore.open(f"unix:{said['serving'][0]}")) as store:
            handle = store.namespace(model=MODEL, layout=layout)
            handle.put(ids(640), random_pages(layout, 10))
            caller = Stubs(f"127.0.0.1:{port}", token_of("default"))
            team = Stubs(f"127.0.0.1:{port}", token_of("team"))
            wait_until(lambda: answers(caller))
            assert team.namespaces() == []
            (first,) = networks_of(process.pid)
            assert os.getpriority(os.PRIO_PROCESS, first) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + BESIDE_NICE)
            held = [os.readlink(one) for one in Path(f"/proc/{first}/fd").iterdir()]
            assert not [one for one in held if "memfd" in one]
            os.kill(first, signal.SIGKILL)
            assert handle.match(ids(640)).blocks == 10
            wait_until(lambda: bool(set(networks_of(process.pid)) - {first}))
            wait_until(lambda: answers(caller))
            (second,) = networks_of(process.pid)
            os.kill(second, signal.SIGSTOP)
            began = time.monotonic()
            assert handle.match(ids(640)).blocks == 10
            wait_until(lambda: not Path(f"/proc/{second}").exists())
            assert time.monotonic() - began >= BEAT_SECONDS - 1.5
            wait_until(lambda: answers(caller))
            assert handle.match(ids(640)).blocks == 10
        (third,) = networks_of(process.pid)
        assert "grpc" not in Path(f"/proc/{said['pid']}/maps").read_text()
        assert "cygrpc" in Path(f"/proc/{third}/maps").read_text()
        status, log = ended(process)
        assert status == 0 and not Path(f"/proc/{third}").exists()
        assert [one["message"] for one in log if one["logger"] == "kvstore.keeper"] == [
            "the network process ended and is started again",
            "the network process is silent and killed",
            "the network process ended and is started again",
        ]


WITHOUT = """
import sys
{before}
sys.argv = ["kvstore", "network", "--token-file", "x"]
import kvstore.cli.main
kvstore.cli.main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["grpc", "grpc_health", "google.protobuf", "h11"])
def test_without_its_packages_it_says_which_one_is_missing(module: str) -> None:
    code = WITHOUT.format(before=f"sys.modules[{module!r}] = None")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install '.[server]'" in done.stderr and module.split(".")[0] in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listen = '127.0.0.1:1'\n", "network.token_file"),
        ("listen = 'unix:/x'\ncertificate = 'a'\nkey = 'b'\nclient_ca = 'c'\n", "network.token_file"),
        ("listen = '0.0.0.0:1'\ntoken_file = 't'\n", "network.certificate"),
        ("listen = '127.0.0.1:1'\nhttp = '0.0.0.0:1'\ntoken_file = 't'\n", "network.http="),
        ("listen = '127.0.0.1:1'\ncertificate = 'a'\n", "belong together"),
        ("listen = 'x'\ntoken_file = 't'\n", "network.listen='x'"),
        ("http = '127.0.0.1:1'\n", "network.listen is missing"),
        ("listen = '127.0.0.1:1'\ntoken_file = 't'\n[store]\nkeeper = false\n", "store.keeper"),
        ("listening = 'x'\n", "did you mean network.listen"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_served(text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_settings(f"[network]\n{text}")
    assert words in str(refused.value)


def test_files_may_be_in_a_home() -> None:
    settings = read_settings("[network]\nlisten = 'unix:/run/k.sock'\ntoken_file = '~/t'\n")
    assert settings.network.token_file == os.path.expanduser("~/t") and read_settings("").network.listen is None
