"""Runs tests in copies of the tree, with a mutant and without."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import waiting
from mutants.mutation import ENVIRONMENTS, TREE, Mutant, mutated

LEAST_LIMIT_SECONDS = 90.0
LIMIT_PER_SECOND = 10.0
"""A run with a mutant may take that many times what it takes without: then it hangs, and the tests have found it."""
WAIT_SECONDS = 30.0
"""For what a test waits for: a mutant that keeps it from coming is found by then."""
WITHOUT_LIMIT_SECONDS = 300.0
_PACKAGES = ("kvstore", "tiering", "engine_adapter", "kv_kernels")
_LINE_CHARACTERS = 400  # else pytest cuts errors off
_TESTS_FAILED = 1  # pytest's exit status; others say that it could not run them
_FINDING = re.compile(r"^(?:FAILED|ERROR) (\S+\.py\b.*)$", re.MULTILINE)  # of the summary, not of what was logged
_NEVER_MEANT = re.compile(r"\b(?:NameError|UnboundLocalError|SyntaxError|IndentationError)\b")


class Verdict(Enum):
    """What became of a mutant. Only the first one is as it should be."""

    FOUND = "found"
    SURVIVED = "survived"
    UNFIT = "does not fit"  # the code, the tests, or Python: it says nothing about the tests
    LEFT_OUT = "left out"  # there is no environment for its tests


@dataclass(frozen=True)
class Outcome:
    """What a run of tests ended with. finding: the first test that failed, with its error, or why there is none."""

    status: int
    seconds: float
    finding: str
    hung: bool = False


class Copy:
    """A copy of the tree, for one run at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._times = 0
        self._running: subprocess.Popen[str] | None = None
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=TREE,
            check=True,
            capture_output=True,
        ).stdout.split(b"\0")
        for name in map(os.fsdecode, filter(None, listed)):
            if (TREE / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(TREE / name, root / name)

    @contextmanager
    def having(self, mutant: Mutant) -> Iterator[None]:
        """With that mutant in it meanwhile. Raises `DoesNotFit`."""
        file = self.root / mutant.path
        before, stat = file.read_bytes(), file.stat()
        self._times += 1
        try:
            file.write_text(mutated(mutant, before.decode()))
            # What was compiled is told from what is there by the time in seconds and the size.
            os.utime(file, (stat.st_atime, stat.st_mtime + self._times))
            yield
        finally:
            file.write_bytes(before)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def run(self, tests: Sequence[str], environment: str, limit: float, *, keep_compiled: bool) -> Outcome:
        """Run tests until one fails."""
        command = [str(python_of(environment)), "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-rfE"]
        begun = time.monotonic()
        self._running = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", f"--basetemp={self.root.with_name(f't{self.root.name}')}", *tests],
            cwd=self.root,
            env=self._variables(keep_compiled),
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        hung = False
        try:
            output, _ = self._running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            hung = True
            self.end()
            output, _ = self._running.communicate()
        finally:
            self.end()  # what tests have started goes with them
            shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # no example of one mutant is tried on another
        status = self._running.returncode
        found = _FINDING.search(output)
        said = found.group(1) if found else output.strip().rpartition("\n")[2]
        return Outcome(status, time.monotonic() - begun, f"still running after {limit:.0f} s" if hung else said, hung)

    def end(self) -> None:
        """Whatever runs, with all that it has started."""
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)

    def check(self, environment: str) -> None:
        """That environment's tests must see the copy, and no other checkout."""
        code = "import sys; print(*(__import__(one).__file__ for one in sys.argv[1:]), sep='\\n')"
        printed = subprocess.run(
            [str(python_of(environment)), "-c", code, *_PACKAGES],
            cwd="/",
            env=self._variables(keep_compiled=True),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        for file in printed.splitlines():
            if not Path(file).is_relative_to(self.root):
                raise SystemExit(f"error: the tests would run {file}, and not the copy in {self.root}")

    def _variables(self, keep_compiled: bool) -> dict[str, str]:
        folders = (self.root, self.root / "kernels", self.root / "tests")
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "COLUMNS": str(_LINE_CHARACTERS)}
        variables[waiting.VARIABLE] = str(WAIT_SECONDS)
        return variables if keep_compiled else {**variables, "PYTHONDONTWRITEBYTECODE": "1"}


def python_of(environment: str) -> Path:
    """Its interpreter."""
    return Path(sys.executable) if environment == "main" else TREE / ENVIRONMENTS[environment] / "bin" / "python"


def judged(with_it: Outcome) -> tuple[Verdict, str]:
    """Whether a mutant was found, and by what."""
    if with_it.hung or with_it.status < 0:
        return Verdict.FOUND, with_it.finding if with_it.hung else f"ended by signal {-with_it.status}"
    if with_it.status == 0:
        return Verdict.SURVIVED, "every test passed"
    if with_it.status != _TESTS_FAILED or _NEVER_MEANT.search(with_it.finding):
        return Verdict.UNFIT, f"status {with_it.status}: {with_it.finding}"
    return Verdict.FOUND, with_it.finding


def limit_of(seconds: float) -> float:
    """How long tests may take with a mutant that take so long without one."""
    return max(LEAST_LIMIT_SECONDS, LIMIT_PER_SECOND * seconds)
