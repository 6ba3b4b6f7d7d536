"""The command line as scripts see it: exit status, standard output, and one line on standard error."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import kvstore
from workbench import MODEL, ids, random_pages, small_layout

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

import benches
from kvstore.cli import main as cli
from kvstore.cli.bench import SCRIPTS
from kvstore.cli.terminal import COMMANDS, bench

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 200
NO_TORCH = "sys.modules['torch'] = sys.modules['transformers'] = None"


def environment() -> dict[str, str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return settings | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "COLUMNS": "100"}


def run_cli(
    *arguments: str, before: str = "", seconds: float = LIMIT_SECONDS, **settings: str
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; `before` is Python that runs there first."""
    program = f"import sys\n{before}\nfrom kvstore.cli.main import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment() | settings,
        timeout=seconds,
    )


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """The same in this process, which imports what takes seconds once for all tests."""
    monkeypatch.setattr(sys, "argv", ["kvstore", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return subprocess.CompletedProcess(sys.argv, left.value.code, shown.out, shown.err)


Here = Callable[..., subprocess.CompletedProcess[str]]
"""What the fixture `here` is: `run_here` of the test that asks for it."""


def told(*arguments: str) -> Any:
    """The one object that a command prints that needs no torch."""
    result = run_cli(*arguments, "--json", before=NO_TORCH, seconds=60)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return json.loads(result.stdout)


def error_line(result: subprocess.CompletedProcess[str], status: int = 2) -> str:
    """The one line on standard error, after checking that there is nothing else."""
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvstore: ") and "Traceback" not in line
    return line


# Without torch --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_version() -> None:
    result = run_cli("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"kvstore {kvstore.__version__}\n", "")
    result = run_cli("--version", "--json")
    assert (result.returncode, json.loads(result.stdout)) == (0, {"version": kvstore.__version__})


@pytest.mark.parametrize(
    ("arguments", "names"),
    [((), COMMANDS), (("--help",), COMMANDS), (("demo", "--help"), ()), (("bench", "--help"), (*SCRIPTS, "traffic"))],
)
def test_help_names_what_there_is_and_needs_no_torch(arguments: tuple[str, ...], names: tuple[str, ...]) -> None:
    result = run_cli(*arguments, before=NO_TORCH)
    assert result.returncode == 0 and result.stderr == ""
    assert "Usage: kvstore" in result.stdout and [name for name in names if name not in result.stdout.split()] == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("demo", "--no-such-option"), "--no-such-option"),
        (("nonsense",), "nonsense"),
        (("bench", "nonsense"), "nonsense"),
        (("bench",), "kvstore bench --help"),
        (("demo", "--tokens", "many"), "--tokens"),
        (("--json", "demo"), "behind the command"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], hint: str) -> None:
    assert hint in error_line(run_cli(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "extra"), [("typer", "server"), ("torch", "hf"), ("transformers", "hf")])
def test_a_missing_package_names_its_extra(module: str, extra: str) -> None:
    line = error_line(run_cli("demo", before=f"sys.modules[{module!r}] = None"))
    assert module in line and f"run: pip install 'prefix-kvstore[{extra}]'" in line


@pytest.mark.slow
def test_a_bug_is_one_line_unless_a_traceback_is_asked_for() -> None:
    broken = "import kvstore.cli.main; kvstore.cli.main.json = None"
    assert "internal error: AttributeError" in error_line(run_cli("--version", "--json", before=broken), status=1)
    shown = run_cli("--version", "--json", before=broken, KVSTORE_TRACEBACK="1")
    assert shown.returncode == 1 and "Traceback" in shown.stderr


# Completion -----------------------------------------------------------------------------------------------------

COMPLETED = """
source "$1"
COMP_WORDS=(kvstore "$2")
COMP_CWORD=1
_kvstore_completion kvstore
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_the_commands(tmp_path: Path) -> None:
    """By the script that `--show-completion` prints, which asks the program itself."""
    program = tmp_path / "kvstore"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvstore "$@"\n')
    program.chmod(0o700)
    settings = environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def bash(line: str, *arguments: str) -> str:
        command = ["bash", "--norc", "-c", line, "bash", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=LIMIT_SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = tmp_path / "completion"
    script.write_text(bash("kvstore --show-completion; true"))
    assert "complete -o default -F _kvstore_completion kvstore" in script.read_text()
    assert bash(COMPLETED, str(script), "").split() == list(COMMANDS)
    assert bash(COMPLETED, str(script), "d").split() == ["demo", "doctor", "drop"]
    installed = bash("kvstore --install-completion; true")
    assert "completion installed in" in installed
    assert (tmp_path / ".bash_completions" / "kvstore.sh").read_text().strip() == script.read_text().strip()


# The benches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (("tiers", "--only", "tape"), ("only='tape'", "dram, door, nvme")),
        (("restart", "--blocks", "7"), ("blocks=7", "give 33 to")),
        (("codec", "--windows", "4"), ("--windows belongs to --quality",)),
        (("codec", "--quality", "--windows", "0"), ("windows=0", "give 1 to 64")),
        (("kernels", "--stage", "gather"), ("stage='gather'", "kernels, ways, transfers, decode")),
        (("ttft", "--engine", "sglang"), ("engine='sglang'", "allowed: hf, vllm")),
        (("ttft", "--device", "cpu", "--context", "300"), ("context=300", "use 256")),
    ],
)
def test_unusable_options_of_a_bench_are_one_line(
    arguments: tuple[str, ...], hints: tuple[str, ...], here: Here
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
    assert benches.bench is bench, "it adds the words that only a checkout has"
    line = error_line(here("bench", *arguments))
    assert all(hint in line for hint in hints), line


def test_a_bench_that_is_not_installed_is_started_in_a_checkout_and_named_elsewhere() -> None:
    assert "blocks=7" in error_line(run_cli("bench", "restart", "--blocks", "7"))
    away = """
import kvstore
from kvstore.cli.bench import SCRIPTS
from kvstore.cli.main import main
kvstore.__file__ = "/nowhere/kvstore/__init__.py"
for words in [*([word] for word in SCRIPTS), ["traffic", "trace", "--engines", "own"]]:
    sys.argv = ["kvstore", "bench", *words, "--json"]
    try:
        main()
    except SystemExit as left:
        assert left.code == 2, words
sys.exit(2)"""
    result = run_cli(before=away)
    assert (result.returncode, result.stdout) == (2, "")
    for word, line in zip([*SCRIPTS, "traffic"], result.stderr.splitlines(), strict=True):
        assert line.startswith("kvstore: ")
        assert "not installed" in line and f"python benchmarks/benches.py {word}" in line


# The check of a directory ---------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store's directory with eight blocks on disk, in one slab of twenty slots."""
    pytest.importorskip("torch", reason="torch is not installed (extra: hf)")
    with kvstore.open(f"embedded:{tmp_path / 'kv'}", dram="1MiB", nvme="1MiB") as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        assert handle.put(ids(512), random_pages(handle.layout, 8), durability="disk").stored == 8
    return tmp_path / "kv"


def damage(directory: Path, slot: int) -> None:
    """One byte of a payload."""
    with (directory / "nvme" / "00000001.slab").open("r+b") as slab:
        slab.seek(4096 + 12288 * slot + 8000)
        slab.write(b"rot")


@pytest.mark.slow
def test_fsck_says_what_is_wrong_and_repairs_it(directory: Path) -> None:
    damage(directory, 3)
    damaged = run_cli("fsck", str(directory))
    assert (damaged.returncode, damaged.stderr) == (1, "")
    assert "00000001.slab slot 3: damaged payload" in damaged.stdout and "--repair" in damaged.stdout
    found = run_cli("fsck", str(directory), "--json", before=NO_TORCH)
    assert (found.returncode, found.stderr) == (1, "")
    as_object = json.loads(found.stdout)
    assert as_object["ok"] is False and as_object["problems_by_kind"] == {"damaged_payload": 1}
    (problem,) = as_object["first_problems"]
    assert (problem["slab"], problem["slot"], problem["what"]) == ("00000001.slab", 3, "damaged_payload")
    assert as_object["totals"]["good"] == 7 and as_object["slabs"][0]["damaged_payload"] == 1
    repaired = run_cli("fsck", str(directory), "--repair", "--json", before=NO_TORCH)
    assert (repaired.returncode, repaired.stderr) == (0, "")
    assert json.loads(repaired.stdout)["repair"] == {
        "headers_rewritten": 0,
        "emptied": 0,
        "given_up": 1,
        "frames": 7,
        "left": [],
    }
    well = run_cli("fsck", str(directory))
    assert (well.returncode, well.stderr) == (0, "") and "All is well: 7 good frames in 1 slab;" in well.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--json",), ("--repair",)])
def test_fsck_of_what_cannot_be_checked_is_one_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert "does not exist" in error_line(run_cli("fsck", str(tmp_path / "none"), *options))
    assert "has no nvme/" in error_line(run_cli("fsck", str(tmp_path), *options))


def test_fsck_names_the_extra_that_it_needs() -> None:
    line = error_line(run_cli("fsck", ".", before="sys.modules['lmdb'] = None"))
    assert "lmdb" in line and "run: pip install 'prefix-kvstore[server]'" in line


# The demo -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def needs_engine() -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra: hf)")
    pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (("--dram", "12parsecs"), ("12parsecs", "GiB")),
        (("--tokens", "0"), ("tokens=0", "1 to")),
        (("--tokens", "129"), ("tokens=129", "1 to 128")),
        (("--requests", "21"), ("requests=21", "1 to 20")),
        (("--threads", "0"), ("threads=0", "1 to")),
        (("--seed", "-1"), ("seed=-1", "0 to")),
    ],
)
def test_unusable_values_are_one_line_and_need_no_torch(arguments: tuple[str, ...], hints: tuple[str, ...]) -> None:
    line = error_line(run_cli("demo", "--json", *arguments, before="sys.modules['torch'] = None"))
    assert all(hint in line for hint in hints), line


def test_the_environment_sets_what_no_option_does() -> None:
    assert "12parsecs" in error_line(run_cli("demo", KVSTORE_DRAM="12parsecs"))


@pytest.mark.usefixtures("needs_engine")
def test_more_memory_than_there_is(here: Here) -> None:
    line = error_line(here("demo", "--dram", "900TiB"))
    assert "900TiB" in line and "cgroup" in line and "give less" in line


@pytest.mark.slow
@pytest.mark.usefixtures("needs_engine")
def test_a_directory_in_use_names_its_holder(tmp_path: Path) -> None:
    with kvstore.open(f"embedded:{tmp_path}", dram="16MiB"):
        line = error_line(run_cli("demo", "--data", str(tmp_path)))
    assert str(tmp_path) in line and str(os.getpid()) in line


@pytest.mark.slow
@pytest.mark.usefixtures("needs_engine")
def test_demo_as_one_json_object(tmp_path: Path) -> None:
    result = run_cli("demo", "--json", "--requests", "2", "--tokens", "3", "--data", str(tmp_path / "kv"))
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["requests"] == found["identical"] == 2
    assert set(found["passes"]) == {"cold", "fill", "warm", "restart"} and found["restart"]["read_bytes"] > 0
    for counts in found["passes"].values():
        assert sum(counts["hits"].values()) + sum(counts["misses"].values()) == counts["prompt_tokens"]
        assert {"p50", "p99"} == set(counts["ttft_ms"]) == set(counts["itl_ms"])
    assert found["passes"]["warm"]["hits"]["dram"] > 0
    assert {"model", "ttft_ratio", "cold_vs_generate", "stored", "grid_tokens", "versions"} <= set(found)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_engine")
def test_differing_answers_end_with_status_1(monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    """Each pass has draws of its own."""
    import torch

    seed, numbers = torch.manual_seed, count()
    monkeypatch.setattr(torch, "manual_seed", lambda _: seed(next(numbers)))
    result = here("demo", "--json", "--requests", "1", "--tokens", "32")
    assert result.returncode == 1
    assert json.loads(result.stdout)["identical"] == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvstore: 1 of 1 answers differ")


@pytest.mark.slow
@pytest.mark.usefixtures("needs_engine")
def test_an_interrupt_ends_quietly_with_status_130(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "demo", "--data", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (directory / "keys").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, stdout, stderr.strip()) == (130, "", "")
