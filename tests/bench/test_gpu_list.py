"""What `make gpu` runs: the whole list on a CPU with small shapes, and what becomes of a step that goes wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (extra: test)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
SCHEMA = json.loads((ROOT / "benchmarks" / "results.schema.json").read_text())


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_list", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_list"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_list"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


def is_valid(results: Any) -> bool:
    jsonschema.Draft202012Validator(SCHEMA).validate(results)
    return True


def test_the_whole_list_runs_on_a_cpu_and_adds_to_its_file(tmp_path: Path, gpu: ModuleType) -> None:
    path = tmp_path / "cpu.json"
    *first, last = [step.name for step in gpu.STEPS if not step.needs]
    ended = run("--device", "cpu", "--results", str(tmp_path), *_stages(first))
    before = json.loads(path.read_text())["stages"]
    assert ended.returncode == 0, (ended.stdout, ended.stderr, [entry["message"] for entry in before.values()])
    assert list(tmp_path.iterdir()) == [path] and str(path) in ended.stdout and sorted(before) == sorted(first)
    ended = run("--device", "cpu", "--results", str(tmp_path), *_stages([last]))
    results = json.loads(path.read_text())
    stages = results["stages"]
    assert ended.returncode == 0, (ended.stdout, ended.stderr, stages[last]["message"])
    assert is_valid(results) and stages == {**before, last: stages[last]}, "stages are merged"
    assert {entry["status"] for entry in stages.values()} == {"ok"}
    assert len(stages["kernels"]["result"]["kernels"]) == 6 and len(stages["ttft"]["result"]["rows"]) == 12
    assert stages["tests"]["result"]["passed"] >= 3 and not stages["tests"]["result"]["failed"]
    assert stages["codec"]["result"]["quality"] and stages["codec"]["result"]["variants"]
    assert stages["ttft"]["versions"]["torch"] == results["device"]["torch"] and results["device"]["name"] == "cpu"


def _stages(names: list[str]) -> list[str]:
    return [argument for name in names for argument in ("--stage", name)]


def test_what_the_schema_does_not_know_is_refused() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for wrong in ({"format": 2}, {"stages": {"other": {}}}, {"stages": {"tests": {"status": "ok"}}}):
        with pytest.raises(jsonschema.ValidationError):
            is_valid({"format": 1, "device": {}, "stages": {}, **wrong})


def entry_of(gpu: ModuleType, *arguments: str, limit_s: float = 30, **options: Any) -> dict[str, Any]:
    entry: dict[str, Any] = gpu._run(gpu.Step("kernels", arguments, arguments, 30, **options), "cpu", limit_s)
    return entry


@pytest.fixture
def module_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a module that a step can run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def write(text: str) -> str:
        (tmp_path / "a_step.py").write_text(text)
        return "a_step"

    yield write


@pytest.mark.parametrize(
    ("text", "message", "result"),
    [
        (
            'print("noise"); print(\'{"faults": ["one", "two", "three", "four"]}\'); raise SystemExit(1)',
            "one; two; three and 1 more",
            {"faults": ["one", "two", "three", "four"]},
        ),
        ("print('all is well')", "all is well", None),
        ("import sys; sys.exit('the last line')", "the last line", None),
    ],
)
def test_a_step_with_faults_or_without_a_result_has_failed(
    gpu: ModuleType, module_in: Any, text: str, message: str, result: Any
) -> None:
    entry = entry_of(gpu, module_in(text))
    assert (entry["status"], entry["message"], entry["result"]) == ("failed", message, result)


def test_tests_of_which_none_passes_have_failed_and_failing_ones_are_named(gpu: ModuleType, tmp_path: Path) -> None:
    skipped, mixed = tmp_path / "test_all_skipped.py", tmp_path / "test_some.py"
    skipped.write_text("import pytest\n\n\ndef test_it() -> None:\n    pytest.skip('no GPU here')\n")
    entry = entry_of(gpu, "pytest", "-q", str(skipped), kernel_tests=True)
    assert (entry["status"], entry["message"]) == ("failed", "no test ran: no GPU here")
    text = "import pytest\ndef test_good(): pass\ndef test_bad(): assert False\n"
    mixed.write_text(text + "@pytest.mark.skip(reason='no reason')\ndef test_left_out(): pass\n")
    entry = entry_of(gpu, "pytest", "-q", "--rootdir", str(tmp_path), str(mixed), kernel_tests=True)
    assert entry["status"] == "failed" and entry["message"].endswith("::test_bad")
    assert (entry["result"]["passed"], entry["result"]["skips"], entry["result"]["skipped"]) == (1, 1, ["no reason"])


def test_a_step_that_needs_what_is_not_there_says_so_in_one_line(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "STEPS", (gpu.Step("far", ("x",), ("x",), 1, needs="a_package_of_nobody"),))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--stage", "far"])
    assert gpu.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu: far needs a_package_of_nobody, which ") and sys.executable in line


def test_a_step_that_does_not_end_is_ended_with_all_of_its_processes(
    gpu: ModuleType, module_in: Any, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    text = "import subprocess, sys, time\n"
    text += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    text += f"open({str(child)!r}, 'w').write(str(child.pid))\ntime.sleep(600)\n"
    begun = time.monotonic()
    entry = entry_of(gpu, module_in(text), limit_s=3)
    assert entry["status"] == "timed out" and "after 3 seconds" in entry["message"] and time.monotonic() - begun < 20
    pid = int(child.read_text())
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("its child still runs")


def test_time_that_is_over_leaves_steps_out_and_wrong_input_is_one_line(tmp_path: Path) -> None:
    ended = run("--device", "cpu", "--results", str(tmp_path), "--seconds", "0.5", "--stage", "tests")
    assert ended.returncode == 1 and "tests: left out" in ended.stdout and not list(tmp_path.iterdir())
    (tmp_path / "cpu.json").write_text("{}")
    ended = run("--device", "cpu", "--results", str(tmp_path))
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "cpu.json is no file of results" in line and "move it away" in line


def test_kernels_are_compiled_on_a_gpu(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" not in gpu._environment("cuda") and gpu._environment("cpu")["TRITON_INTERPRET"] == "1"
    assert gpu.slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


def test_what_runs_on_a_gpu_is_known_to_the_command_line(gpu: ModuleType) -> None:
    """Every option of a step: asked with one more that nobody knows, the command complains of that one alone."""
    for step in gpu.STEPS:
        for arguments in (step.arguments, step.small):
            if arguments[:2] != gpu.BENCH:
                continue
            given = [argument.replace(gpu.SECONDS, "10") for argument in arguments]
            entry = entry_of(gpu, *given, "--nobody-knows-this")
            assert "--nobody-knows-this" in entry["message"], entry["message"]
            for option in (argument for argument in given if argument.startswith("--")):
                assert f"No such option: {option} " not in entry["message"]
    for step in gpu.STEPS:
        for argument in (*step.arguments, *step.small):
            assert not argument.startswith("tests/") or (ROOT / argument).exists(), argument
