"""What is run on a GPU, and where its results go: `make gpu`.

    python benchmarks/gpu.py                      all steps but those of vLLM, in eight minutes at most
    python benchmarks/gpu.py --stage ttft         that one alone; may be given again
    python benchmarks/gpu.py --device cpu         small shapes on a CPU, which shows that the list runs
    python benchmarks/gpu.py --stage vllm-tests --stage vllm --seconds 1300
                                                  a real vLLM: only where named, with the Python that has it

Results are added to benchmarks/results/DEVICE.json (results.schema.json says what is in it): of each step the latest,
with its date, versions and commit. Each step is a process of its own, so that one which fails leaves the others alone.
It needs what `kvstore bench` needs, pytest and hypothesis, and no installation: the packages are taken from this tree.

    status 0    all steps ran and are well       1    a step failed or was left out       2    wrong input
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_SECONDS = 480
FORMAT = 1
SECONDS = "{seconds}"
"""Stands in a step's arguments for the time in which it may begin something: its limit, less MARGIN_SECONDS."""
MARGIN_SECONDS = 90
OK, FAILED, TIMED_OUT = "ok", "failed", "timed out"
CUDA, CPU = "cuda", "cpu"


@dataclass(frozen=True)
class Step:
    """arguments: behind `python -m`, on a GPU. small: the same on a CPU. limit_s: when it is ended. kernel_tests: it is
    pytest, whose report is the result; other steps print JSON. needs: a package
    that not every Python has; such a step runs only where it is named."""

    name: str
    arguments: tuple[str, ...]
    small: tuple[str, ...]
    limit_s: int
    kernel_tests: bool = False
    needs: str = ""


KERNEL_TESTS = ("test_triton_pools.py", "test_triton_digest.py", "test_cuda.py")
ADAPTER_TESTS = ("tests/adapters/test_engine_stream.py", "tests/adapters/test_paged_engine.py")
BENCH = ("kvstore", "bench")


def _bench(words: str) -> tuple[str, ...]:
    return (*BENCH, *words.split(), "--json")


ON_GPU = ("pytest", "-q", *(f"tests/kernels/{name}" for name in KERNEL_TESTS), *ADAPTER_TESTS)
HF = "ttft --engine hf --device"
VLLM_TESTS = [("pytest", "-q", f"tests/engines/test_vllm_{name}.py") for name in ("gpu", "interface")]
VLLM = ("ttft --engine vllm --device cuda", "ttft --engine vllm --shape tiny --only ttft")
STEPS = (
    Step("tests", ON_GPU, ("pytest", "-q", "tests/kernels/test_cuda.py"), 120, kernel_tests=True),
    Step("kernels", _bench("kernels --device cuda"), _bench("kernels --device cpu --laps 1"), 150),
    Step("codec", _bench("codec --quality"), _bench("codec --quality --windows 1"), 90),
    # Its limit is what the others leave; alone it has time for 128k tokens in 8 bits.
    Step("ttft", _bench(f"{HF} cuda --laps 3 --seconds {SECONDS}"), _bench(f"{HF} cpu --laps 1"), 460),
    # Thirteen engines, one after another.
    Step("vllm-tests", VLLM_TESTS[0], VLLM_TESTS[1], 900, kernel_tests=True, needs="vllm"),
    Step("vllm", _bench(VLLM[0]), _bench(VLLM[1]), 400, needs="vllm"),
)


class BadInput(Exception):
    """One line for who called."""


def main() -> int:
    options = _options()
    try:
        named = options.stage or [step.name for step in STEPS if not step.needs]
        steps = [step for step in STEPS if step.name in named]
        lacking = next((step for step in steps if step.needs and find_spec(step.needs) is None), None)
        if lacking is not None:
            raise BadInput(f"{lacking.name} needs {lacking.needs}, which {sys.executable} does not have")
        end = time.monotonic() + options.seconds
        device = _described(options.device)
        path = Path(options.results) / f"{slug(str(device['name']))}.json"
        results = _read(path)
    except BadInput as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    versions = _versions(device)
    commit = options.commit or _said("git", "rev-parse", "HEAD")
    is_clean = None if commit in (None, options.commit) else _said("git", "status", "--porcelain") == ""
    is_well = True
    for step in steps:
        left = end - time.monotonic()
        if left < 1:
            print(f"{step.name}: left out, {options.seconds:.0f} seconds are over", flush=True)
            is_well = False
            continue
        print(f"{step.name}: begins", flush=True)
        entry = _run(step, str(device["type"]), min(step.limit_s, left))
        entry |= {"commit": commit, "is_clean": is_clean, "versions": versions}
        results["device"] = device
        results["stages"][step.name] = entry
        _write(path, results)
        message = f": {entry['message']}" if entry["message"] else ""
        print(f"{step.name}: {entry['status']} after {entry['seconds']:.0f} s{message}", flush=True)
        is_well = is_well and entry["status"] == OK
    print(f"results are in {path}")
    return 0 if is_well else 1


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu", description="Tests and benches on a GPU; results as JSON.")
    parser.add_argument("--stage", action="append", choices=[step.name for step in STEPS], help="may be given again")
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA, help="cpu: small shapes, to see that it runs")
    parser.add_argument("--results", default=str(RESULTS), metavar="DIR")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="for all steps")
    parser.add_argument("--commit", help="of this tree, where there is no git to ask")
    return parser.parse_args()


def _environment(device: str) -> dict[str, str]:
    """This process's, with the packages of this tree; kernels are compiled on a GPU, and interpreted on a CPU."""
    paths = [str(ROOT / folder) for folder in (".", "kernels", "benchmarks", "tests")]
    paths += filter(None, [os.environ.get("PYTHONPATH", "")])
    settings = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if device == CUDA:
        settings.pop("TRITON_INTERPRET", None)
        return settings
    return settings | {"TRITON_INTERPRET": "1"}


def _described(device: str) -> dict[str, Any]:
    # In a process of its own, so that this one takes none of a GPU's memory.
    status, output, errors = _ended(("kv_bench.on_device", device), device, 120)
    found = _json(output)
    if status or found is None:
        raise BadInput(_last_line(errors))
    return found


def _run(step: Step, device: str, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvstore-gpu-") as scratch:
        report = Path(scratch) / "report.xml"
        seconds = str(max(10, round(limit_s) - MARGIN_SECONDS))
        named = step.arguments if device == CUDA else step.small
        command = tuple(seconds if argument == SECONDS else argument for argument in named)
        arguments = command
        if step.kernel_tests:
            arguments += ("-p", "no:cacheprovider", f"--junitxml={report}")
        started, begun = datetime.now(UTC), time.monotonic()
        status, output, errors = _ended(arguments, device, limit_s)
        entry: dict[str, Any] = {
            "status": OK,
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - begun, 2),
            "command": ["python", "-P", "-m", *command],
            "message": "",
            "result": _tests(report) if step.kernel_tests else _json(output),
        }
    if status is None:
        return entry | {"status": TIMED_OUT, "message": f"ended after {limit_s:.0f} seconds; {_last_line(errors)}"}
    tests = entry["result"] if step.kernel_tests else None
    if tests is not None and not (tests["passed"] or tests["failed"]):
        why = "; ".join(tests["skipped"]) or _last_line(output)
        return entry | {"status": FAILED, "message": f"no test ran: {why}"}
    if status or entry["result"] is None:
        return entry | {"status": FAILED, "message": _why(entry["result"]) or _last_line(errors) or _last_line(output)}
    return entry


def _ended(arguments: tuple[str, ...], device: str, limit_s: float) -> tuple[int | None, str, str]:
    """Exit status (None: it was ended), standard output, standard error. All of its processes are gone then."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-P", "-m", *arguments]
        how: dict[str, Any] = {"stdout": output, "stderr": errors, "cwd": ROOT, "env": _environment(device)}
        process, status = subprocess.Popen(command, start_new_session=True, **how), None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        return status, output.read(), errors.read()


def _tests(report: Path) -> dict[str, Any] | None:
    if not report.exists():
        return None
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
        "skipped": sorted({skip.get("message", "") for skip in skipped if skip is not None}),
        "skips": len(skipped),
    }


def _json(output: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        found = json.loads(_last_line(output))
        return found if isinstance(found, dict) else None
    return None


def _why(result: dict[str, Any] | None) -> str:
    found = (result or {}).get("faults") or (result or {}).get("failed") or []
    return "; ".join(map(str, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"format": FORMAT, "device": {}, "stages": {}}
    with suppress(ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads(path.read_text())
        if found["format"] == FORMAT and isinstance(found["stages"], dict):
            return found
    raise BadInput(f"{path} is no file of results of format {FORMAT}; move it away")


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def _versions(device: dict[str, Any]) -> dict[str, Any]:
    named = {name: device.get(name) for name in ("torch", "triton", "transformers", "cuda")}
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    vllm = [version(name) for name in packages_distributions().get("vllm", ())]  # it has two names
    return {"python": platform.python_version(), "driver": driver, **named, "vllm": next(iter(vllm), None)}


def _said(*command: str) -> str | None:
    try:
        asked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
