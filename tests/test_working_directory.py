"""Nothing in the directory where a program is started is run, whatever it is called."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from network.running import token_file
from programs import PATHS, ROOT, serving_program
from waiting import wait_until

KVSTORE = Path(sys.executable).with_name("kvstore")
OF_RUNPY = {"runpy", "importlib", "io", "os", "sys", "types", "warnings", "functools", "collections", "pkgutil"}
"""What Python itself imports for -m, from the working directory first, before any line of the product runs."""
TRAP = "import builtins\nwith builtins.open({mark!r}, 'a'):\n    pass\nraise ImportError('a trap')\n"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "PYTHON"))}


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A directory with a file of each name that some program may import; one that is run leaves a mark."""
    folder, marks = tmp_path / "traps", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir()
    names = {*sys.stdlib_module_names, *packages_distributions(), "kvstore", "tiering", "engine_adapter", "kv_kernels"}
    for name in names | {"sitecustomize", "usercustomize", "kv_bench", "benches"}:
        (folder / f"{name}.py").write_text(TRAP.format(mark=str(marks / name)))
    return folder


def sprung(traps: Path) -> set[str]:
    return {one.name for one in (traps.parent / "marks").iterdir()}


def run(traps: Path, *command: object, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=traps,
        env={**ENVIRONMENT, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )


@contextmanager
def started(traps: Path, *command: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """A program that serves, and the line of JSON that it prints."""
    with serving_program([str(word) for word in command], ENVIRONMENT, cwd=traps) as served:
        yield served
        served[0].terminate()
        served[0].communicate(timeout=60)


@pytest.mark.slow
def test_a_sidecar_and_its_children_run_no_file_of_the_working_directory(traps: Path) -> None:
    grpc = traps.parent / "grpc.sock"
    config = traps.parent / "c.toml"
    config.write_text(
        f"[store]\ndata = '{traps.parent / 'kv'}'\ndram = '16MiB'\nnvme = '64MiB'\n"
        f"[console]\nlisten = '127.0.0.1:0'\n[log]\nformat = 'text'\n"
        f"[network]\nlisten = 'unix:{grpc}'\ntoken_file = '{token_file(traps.parent)}'\n"
    )
    with started(traps, KVSTORE, "serve", "--json", "--config", config) as (process, said):
        assert said["keeper_pid"] == process.pid != said["pid"]
        wait_until(lambda: grpc.exists() or sprung(traps))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        commands = [Path(f"/proc/{one}/cmdline").read_bytes() for one in children]
        assert all(b"\0-P\0-m\0kvstore\0" in one for one in commands) and len(commands) == 3, commands
        for word in ("stat", "doctor"):
            assert run(traps, KVSTORE, word, "--data", traps.parent / "kv").stdout
    assert not sprung(traps)
    assert run(traps, KVSTORE, "fsck", traps.parent / "kv").returncode == 0
    assert not sprung(traps)


def test_a_proxy_and_commands_without_a_sidecar_run_no_file_of_the_working_directory(traps: Path) -> None:
    legs = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"]
    with started(traps, KVSTORE, "pd-proxy", "--json", *legs):
        pass
    for words in (["--version"], ["plan", "llama-3.1-8b"], ["keys", "init", traps.parent / "keys", "team"]):
        assert run(traps, KVSTORE, *words).returncode == 0
    assert not sprung(traps)


@pytest.mark.slow
def test_the_demo_and_the_benches_run_no_file_of_the_working_directory(traps: Path) -> None:
    few = ["--requests", "1", "--tokens", "2", "--data", traps.parent / "demo", "--dram", "64MiB"]
    assert run(traps, KVSTORE, "demo", "--json", *few).returncode == 0
    done = run(traps, KVSTORE, "bench", "kernels", "--device", "cpu", "--laps", "1", "--json")
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    assert not sprung(traps)


def test_python_m_kvstore_runs_no_file_of_the_working_directory(traps: Path) -> None:
    """Beyond what Python itself looks for there before it comes to the package."""
    kept = {path.stem for path in traps.glob("*.py")} - OF_RUNPY - {"kvstore"}
    for path in traps.glob("*.py"):
        if path.stem not in kept:
            path.unlink()
    assert run(traps, sys.executable, "-m", "kvstore", "--version").returncode == 0
    assert run(traps, sys.executable, "-m", "kvstore", "doctor", "--data", traps.parent / "kv").stdout
    assert not sprung(traps)


def test_python_m_kvstore_works_where_the_working_directory_is_a_checkout(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "--version"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout
    assert run(tmp_path, sys.executable, "-P", "-m", "kvstore", "--version", **PATHS).stdout == done.stdout


def test_no_python_is_started_with_the_working_directory_on_its_path() -> None:
    """In the product and its benches: -m and -c come after -P, or after -I, which means it too."""
    unsafe = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("kvstore", "tiering", "engine_adapter", "kernels", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple)
        for one, before in zip(node.elts[1:], node.elts, strict=False)
        if isinstance(one, ast.Constant) and one.value in ("-m", "-c") and ast.unparse(before) not in ("'-P'", "'-I'")
        if "python" in (word := ast.unparse(before)).lower() or word == "sys.executable"
    ]
    assert not unsafe


@pytest.mark.parametrize("page", ["README.md", "docs", "deploy"])
def test_no_command_of_a_page_has_the_working_directory_on_pythons_path(page: str) -> None:
    place = ROOT / page
    files = [place] if place.is_file() else [one for one in place.rglob("*") if one.is_file() and one.suffix != ".json"]
    commands = re.compile(r"python[0-9.]* -[mc]\b(?! (?:pytest|grpc_tools)\b).*")  # those two are run in a checkout
    found = [
        f"{file.relative_to(ROOT)}: {line}"
        for file in files
        for line in commands.findall(file.read_text("utf-8", "replace"))
    ]
    assert not found
