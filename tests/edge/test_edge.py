"""The edge as the supervisor runs it: it comes back where it is killed and where it hangs, while probes wait, and no
engine notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")

import insight_cost
import kvstore
from console import console_faults
from edge.children import children_of, status_at
from kv_bench.process import free_port
from kvstore.block.errors import BadInput
from kvstore.service.keeper import CHILD_NICE
from kvstore.service.settings import read_settings
from network.running import ENVIRONMENT, Stubs, grpc, token_file, token_of
from programs import PATHS
from service.sidecar import patient
from service.test_serve import ended, page, serving
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

SOON_SECONDS = 3.0
"""In which an edge that was killed answers again, on a machine that is not busy."""
LIVENESS_SECONDS = 30.0
"""failureThreshold times periodSeconds of the manifests in deploy/."""


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
    console, rpc, layout = free_port(), free_port(), small_layout()
    tokens = token_file(tmp_path, ("default", "team"))
    config = tmp_path / "c.toml"
    config.write_text(
        f"[console]\nlisten = '127.0.0.1:{console}'\n"
        f"[network]\nlisten = '127.0.0.1:{rpc}'\nhttp = '127.0.0.1:{free_port()}'\ntoken_file = '{tokens}'\n"
        f"[tenants.team]\nsocket = '{tmp_path / 'team.sock'}'\n"
    )
    flags = ["--config", str(config), "--nvme", "off", "--http", "127.0.0.1:0"]
    with serving(tmp_path, *flags) as (process, said), patient(kvstore.open(f"unix:{said['serving'][0]}")) as store:
        handle, port = store.namespace(model=MODEL, layout=layout), said["http_port"]
        handle.put(ids(640), random_pages(layout, 10))
        handle.lease(handle.match(ids(640)), deadline_ms=60_000).release()
        caller = Stubs(f"127.0.0.1:{rpc}", token_of("default"))
        team = Stubs(f"127.0.0.1:{rpc}", token_of("team"))
        wait_until(lambda: answers(caller))
        assert team.namespaces() == [] and status_at(console)["pid"] == said["pid"]
        assert page(port, "livez") == (200, {"alive": True}) and page(port, "readyz")[0] == 200
        (first,) = children_of(process.pid, "edge")
        own = os.getpriority(os.PRIO_PROCESS, process.pid)
        assert os.getpriority(os.PRIO_PROCESS, first) == min(19, own + CHILD_NICE)
        held = [os.readlink(one) for one in Path(f"/proc/{first}/fd").iterdir()]
        assert not [one for one in held if "memfd" in one]
        assert "grpc" not in Path(f"/proc/{said['pid']}/maps").read_text()
        (rpc_process,) = children_of(process.pid, "agent")
        has_grpc = ["cygrpc" in Path(f"/proc/{one}/maps").read_text() for one in (first, rpc_process)]
        assert has_grpc == [False, True], "who floods the console does not delay routers"

        os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        assert page(port, "livez") == (200, {"alive": True}), "it waits in the kernel, and is not refused"
        print(f"an edge that was killed answers again after {time.monotonic() - began:.2f} s")
        assert handle.match(ids(640)).blocks == 10
        wait_until(lambda: answers(caller))
        assert status_at(console)["run"]
        (second,) = children_of(process.pid, "edge")

        os.kill(second, signal.SIGSTOP)
        began = time.monotonic()
        assert handle.match(ids(640)).blocks == 10
        wait_until(lambda: not Path(f"/proc/{second}").exists())
        assert page(port, "livez") == (200, {"alive": True})
        assert time.monotonic() - began < LIVENESS_SECONDS
        assert handle.match(ids(640)).blocks == 10
        status, log = ended(process)
        assert status == 0 and not Path(f"/proc/{first}").exists()
        assert [one["message"] for one in log if one["logger"] == "kvstore.keeper"] == [
            "the edge ended and is started again",
            "the edge is silent and killed",
            "the edge ended and is started again",
        ]


@pytest.mark.slow
def test_without_a_supervisor_it_is_the_sidecars_own_child(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[store]\nkeeper = false\n")
    flags = ["--config", str(config), "--nvme", "off", "--http", "127.0.0.1:0"]
    with serving(tmp_path, *flags) as (process, said):
        assert said["pid"] == process.pid and page(said["http_port"], "livez")[0] == 200
        (first,) = children_of(process.pid, "edge")
        os.kill(first, signal.SIGKILL)
        assert page(said["http_port"], "readyz")[0] == 200
        (second,) = children_of(process.pid, "edge")
        status, log = ended(process)
        assert status == 0 and not Path(f"/proc/{second}").exists()
        assert "the edge ended and is started again" in [one["message"] for one in log]


def ping(directory: Path, *flags: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "kvstore", "ping", "--data", str(directory / "kv"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **PATHS}, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_probe_without_http_tells_a_sidecar_that_lives_from_one_that_does_not(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off") as (process, said):
        assert ping(tmp_path) == (0, "the sidecar answers\n", "") and ping(tmp_path, "--json")[1] == '{"alive": true}\n'
        os.kill(said["pid"], signal.SIGSTOP)
        status, output, error = ping(tmp_path, "--json")
        os.kill(said["pid"], signal.SIGCONT)
        assert (status, output) == (1, '{"alive": false}\n') and error.count("\n") == 1
        assert ended(process)[0] == 0
    status, output, error = ping(tmp_path)
    assert (status, output) == (1, "") and error.count("\n") == 1 and "no sidecar" in error


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core here: the console needs one of its own")
def test_no_fault_of_a_console_changes_what_an_engine_finds() -> None:
    command = [sys.executable, console_faults.__file__, "--rounds", "1", "--seconds", "0.5"]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(insight_cost.__file__)}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False)
    told = json.loads(done.stdout)  # the status is of times
    assert {one["of"] for one in told} == {"killed", "stopped", "flooded", "full"}
    assert all(one["times"] and one["p99_ms"] > 0 for one in told), "each of them happened"


WITHOUT = """
import sys
{before}
sys.argv = ["kvstore", "network", "--token-file", "x"]
import kvstore.cli.main
kvstore.cli.main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["grpc", "grpc_health", "grpc_reflection", "google.protobuf", "h11"])
def test_without_its_packages_it_says_which_one_is_missing(module: str) -> None:
    code = WITHOUT.format(before=f"sys.modules[{module!r}] = None")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install 'prefix-kvstore[server]'" in done.stderr and module.split(".")[0] in done.stderr


NO_KEEPER = "[store]\nkeeper = false\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[console]\nlisten = '0.0.0.0:9798'\n", "console.token_file"),
        ("[console]\nlisten = 'x'\n", "console.listen='x'"),
        (f"[console]\nlisten = '127.0.0.1:1'\n{NO_KEEPER}", "store.keeper"),
        ("[console]\nlistens = '127.0.0.1:1'\n", "did you mean console.listen"),
        ("[console]\nlisten = '127.0.0.1:1'\noperator = true\n", "console.token_file"),
        ("[console]\noperator = true\ntoken_file = '/t'\n", "console.listen"),
        ("[console]\nlisten = '127.0.0.1:1'\naudit_file = '/a'\n", "console.operator"),
        ("[console]\nlisten = '127.0.0.1:1'\noperator = 'yes'\n", "true or false"),
        ("[network]\nlisten = '127.0.0.1:1'\n", "network.token_file"),
        ("[network]\nlisten = 'unix:/x'\ncertificate = 'a'\nkey = 'b'\nclient_ca = 'c'\n", "network.token_file"),
        ("[network]\nlisten = '0.0.0.0:1'\ntoken_file = 't'\n", "network.certificate"),
        ("[network]\nlisten = '127.0.0.1:1'\nhttp = '0.0.0.0:1'\ntoken_file = 't'\n", "network.http="),
        ("[network]\nlisten = '127.0.0.1:1'\ncertificate = 'a'\n", "belong together"),
        ("[network]\nlisten = 'x'\ntoken_file = 't'\n", "network.listen='x'"),
        ("[network]\nhttp = '127.0.0.1:1'\n", "network.listen is missing"),
        (f"[network]\nlisten = '127.0.0.1:1'\ntoken_file = 't'\n{NO_KEEPER}", "store.keeper"),
        ("[network]\nlistening = 'x'\n", "did you mean network.listen"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_served(text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_settings(text)
    assert words in str(refused.value)


def test_files_may_be_in_a_home_and_other_hosts_may_come_in_with_a_token() -> None:
    settings = read_settings("[network]\nlisten = 'unix:/run/k.sock'\ntoken_file = '~/t'\n")
    assert settings.network.token_file == os.path.expanduser("~/t")
    settings = read_settings("[console]\nlisten = '0.0.0.0:9798'\ntoken_file = '/run/token'\n")
    assert settings.console.listen == "0.0.0.0:9798"
    assert (read_settings("").console.listen, read_settings("").network.listen) == (None, None)
