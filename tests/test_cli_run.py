"""`kvstore run`: which engine a command starts, and what becomes of its signals, its status and its sidecar.

Sidecars are real. A program stands in an engine's place, since the tests are of what is around one:
`engines/test_vllm_server.py` runs vLLM.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

from kvstore.block.errors import BadInput
from kvstore.cli.run import CONSOLE, engine_of
from programs import PATHS
from waiting import wait_until

MODULE = "vllm.entrypoints.openai.api_server"
PYTHON = Path(sys.executable).name
ENGINE = """
import json, os, signal, sys
def note(**facts):
    with open(sys.argv[sys.argv.index("--notes") + 1], "a") as notes:
        notes.write(json.dumps(facts) + "\\n")
def heard(number, frame):
    note(heard=number)
    if number != signal.SIGINT:
        raise SystemExit(7)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, heard)
print("the engine's own output", flush=True)
note(began=os.getpid(), words=sys.argv[1:])
while "--ends" not in sys.argv:
    signal.pause()
"""


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that has a program in vLLM's place."""
    there = tmp_path / "packages" / "vllm" / "entrypoints" / "openai"
    there.mkdir(parents=True)
    for folder in (there, there.parent, there.parent.parent):
        (folder / "__init__.py").touch()
    (there / "api_server.py").write_text(ENGINE)
    kept = {name: one for name, one in os.environ.items() if not name.startswith("KVSTORE_")}
    return {**kept, "PYTHONPATH": f"{PATHS['PYTHONPATH']}:{tmp_path / 'packages'}", CONSOLE: "127.0.0.1:0"}


class Run:
    """One `kvstore run`, and what its engine noted."""

    def __init__(self, folder: Path, name: str, environment: dict[str, str], *flags: str, ends: bool = False) -> None:
        self.notes, self.data = folder / f"{name}.notes", folder / "kv"
        sizes = ["--data", str(self.data), "--dram", "16MiB", "--nvme", "off"]
        engine = [sys.executable, "-m", MODULE, "--notes", str(self.notes), *["--ends"] * ends]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore", "run", *sizes, *flags, "--", *engine],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def noted(self, key: str) -> list[object]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [one[key] for one in map(json.loads, lines) if key in one]

    def begun(self) -> list[str]:
        """The engine's words, once it runs."""
        wait_until(lambda: self.noted("began") or self.process.poll() is not None)
        (words,) = self.noted("words")
        assert isinstance(words, list)
        return words

    def ended(self) -> tuple[int, str, list[str]]:
        out, errors = self.process.communicate(timeout=120)
        return self.process.returncode, out, errors.splitlines()


@contextmanager
def running(folder: Path, name: str, environment: dict[str, str], *flags: str, ends: bool = False) -> Iterator[Run]:
    one = Run(folder, name, environment, *flags, ends=ends)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


def serving(data: Path) -> int:
    """The process that serves there; 0 for none."""
    command = [sys.executable, "-P", "-m", "kvstore", "stat", "--data", str(data), "--json"]
    asked = subprocess.run(command, env={**os.environ, **PATHS}, capture_output=True, text=True, timeout=60)
    return int(json.loads(asked.stdout)["pid"]) if asked.returncode == 0 else 0


@pytest.mark.parametrize(
    ("command", "engine", "model"),
    [
        (f"{PYTHON} -m {MODULE} --model some/model --port 1", "vllm", "some/model"),
        (f"{PYTHON} -P -m {MODULE} --model=/a/folder", "vllm", "/a/folder"),
        (f"{PYTHON} -m {MODULE}", "vllm", ""),
        (f"{PYTHON} -m sglang.launch_server --model-path some/model", "sglang", "some/model"),
        (f"{PYTHON} -m sglang.launch_server --model_path some/model --page-size 128", "sglang", "some/model"),
        ("vllm serve some/model --port 1", "vllm", "some/model"),
        ("vllm serve --port 1 --model some/model", "vllm", "some/model"),
        ("sglang serve --model-path some/model", "sglang", "some/model"),
    ],
)
def test_an_engine_is_known_by_its_command_and_gets_one_store(
    command: str, engine: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "sglang"):
        (tmp_path / name).write_text(f"#!{sys.executable}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}")
    found = engine_of(shlex.split(command))
    assert (found.engine, found.model) == (engine, model)
    assert found.python == sys.executable
    words = found.with_store("unix:/s")
    assert words[: len(found.words)] == found.words
    flag = "--kv-transfer-config" if engine == "vllm" else "--hicache-storage-backend-extra-config"
    given = json.loads(words[words.index(flag) + 1])
    assert (given.get("kv_connector_extra_config") or given)["url"] == "unix:/s"
    if engine == "sglang":
        assert "--enable-hierarchical-cache" in words and words.count("--page-size") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "no command: this starts no engine that is known; give vllm serve MODEL"),
        ("nginx -g off", "nginx -g off: this starts no engine"),
        (f"{PYTHON} -m http.server", "this starts no engine"),
        ("vllm bench", "this starts no engine"),
        ("/not/there/vllm serve m", "/not/there/vllm is not found; give the path"),
        (f"{PYTHON} -m {MODULE} --kv_transfer_config={{}}", "--kv-transfer-config is given: the engine has a store"),
        (f"{PYTHON} -m sglang.launch_server --hicache-storage-backend file", "--hicache-storage-backend is given"),
    ],
)
def test_what_is_no_engine_or_has_a_store_is_refused(command: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        engine_of(shlex.split(command))
    assert str(refused.value).startswith(said) or said in str(refused.value)


def test_the_engine_has_the_signals_and_the_status_and_its_sidecar_ends_with_it(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    with running(tmp_path, "one", packages) as one:
        words = one.begun()
        url = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]["url"]
        assert url == f"unix:{tmp_path}/kv/kvstore.sock" and serving(one.data)
        one.process.send_signal(signal.SIGINT)
        wait_until(lambda: one.noted("heard"))
        assert one.process.poll() is None and serving(one.data)
        one.process.send_signal(signal.SIGTERM)
        status, out, errors = one.ended()
        assert one.noted("heard") == [signal.SIGINT, signal.SIGTERM] and status == 7
        assert out == "the engine's own output\n"
        assert len(errors) == 1 and errors[0].startswith("kvstore: a sidecar serves "), errors
        assert "dram 16.0 MiB" in errors[0] and "its console is http://127.0.0.1:" in errors[0]
    assert not serving(one.data)


def test_a_signal_that_comes_when_the_engine_has_ended_changes_nothing(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    """As where a service manager signals all processes at once."""
    with running(tmp_path, "one", packages) as one:
        one.begun()
        (engine,) = one.noted("began")
        assert isinstance(engine, int)
        one.process.send_signal(signal.SIGSTOP)
        os.kill(engine, signal.SIGTERM)
        wait_until(lambda: Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        one.process.send_signal(signal.SIGTERM)
        one.process.send_signal(signal.SIGCONT)
        assert one.ended()[0] == 7
    assert not serving(one.data)


def test_an_engine_does_not_outlive_a_kill_and_what_is_left_is_used_again(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    with running(tmp_path, "one", packages) as one:
        one.begun()
        one.process.kill()
        wait_until(lambda: one.noted("heard") == [signal.SIGTERM])
    sidecar = serving(one.data)
    assert sidecar
    with running(tmp_path, "two", packages, "--json", ends=True) as two:
        status, _, errors = two.ended()
    assert status == 0 and serving(one.data) == sidecar
    said = f"the sidecar at unix:{one.data}/kvstore.sock is used; --dram and --nvme are for one that is started here"
    assert [json.loads(line)["kvstore"] for line in errors] == [said]
    _end(one.data)


def test_of_two_at_once_one_starts_the_sidecar_and_keep_leaves_it(tmp_path: Path, packages: dict[str, str]) -> None:
    with running(tmp_path, "one", packages, "--keep") as one, running(tmp_path, "two", packages, "--keep") as two:
        for run in (one, two):
            run.begun()
        sidecar = serving(one.data)
        for run in (one, two):
            run.process.send_signal(signal.SIGTERM)
        ends = [run.ended() for run in (one, two)]
    assert [status for status, _, _ in ends] == [7, 7]
    assert sidecar and serving(one.data) == sidecar
    lines = sorted(line for _, _, errors in ends for line in errors)
    assert sum(line.startswith("kvstore: the sidecar stays, as --keep says; kill ") for line in lines) == 1, lines
    _end(one.data)


def _end(data: Path) -> None:
    """The sidecar that was left."""
    os.kill(os.getsid(serving(data)), signal.SIGTERM)
    wait_until(lambda: not serving(data))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dram", "1TiB"], "dram"),
        (["--socket", "/not/there"], "--socket /not/there: no sidecar answers there; start it, or leave --socket out"),
        (["--data", "/proc/kv"], "/proc/kv: No such file or directory; give --data DIR that this user may write to"),
        (["--data", "/" + "d" * 120], "107"),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], said: str, tmp_path: Path, packages: dict[str, str]) -> None:
    with running(tmp_path, "one", packages, *flags) as one:
        status, out, errors = one.ended()
    assert status == 2 and not out and said in errors[-1], errors
    assert all(line.startswith("kvstore: ") for line in errors), errors


def test_a_python_without_the_engine_or_without_this_package_is_named(tmp_path: Path, packages: dict[str, str]) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    for paths, said in (("", "has no vllm"), (str(tmp_path / "packages"), "-m pip install prefix-kvstore")):
        environment = {**packages, "PYTHONPATH": paths}
        code = f"import sys; sys.path[:0] = {PATHS['PYTHONPATH'].split(':')}; from kvstore.cli.main import main; main()"
        engine = [str(bare / "bin" / "python"), "-m", MODULE]
        done = subprocess.run(
            [sys.executable, "-c", code, "run", "--", *engine],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
