"""Runs of a real vLLM, each in a process of its own that has imported it already: python -m engines.nursery

A line on standard input names an engine, a plan's file, the one for the outcome and the one for what the engine logs;
once that plan is done its exit status is a line on standard output. Importing vLLM takes as long as everything else
that a short run does, and a process that has only imported it can be forked. An engine that has a name is kept for the
next plan that names it, until one fails; one that has none ends with its plan.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

NAMELESS = "-"
IMPORTED = ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")


def wanted_version() -> None:
    """A report names a version: it has to be that one which runs."""
    import vllm

    wanted = os.environ.get("ENGINE_VERSION", vllm.__version__)
    assert vllm.__version__.startswith(wanted), f"vLLM {vllm.__version__} runs, {wanted} was asked for"


def log_to(path: str) -> None:
    logged = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(logged, 1)
    os.dup2(logged, 2)
    os.close(logged)


class Engine:
    """In a forked process of its own, which takes one plan after the other."""

    def __init__(self) -> None:
        plans, self._plans = os.pipe()
        self._done, done = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(self._plans)
            os.close(self._done)
            self._serve(plans, done)
        os.close(plans)
        os.close(done)

    def run(self, *files: str) -> int:
        """Exit status; any but 0 ends it."""
        with suppress(BrokenPipeError):
            os.write(self._plans, f"{' '.join(files)}\n".encode())
            if os.read(self._done, 1):
                return 0
        return self.end() or 1

    def end(self) -> int:
        os.close(self._plans)
        os.close(self._done)
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])

    @staticmethod
    def _serve(plans: int, done: int) -> NoReturn:
        from engines import session

        status = 1
        try:
            os.setpgid(0, 0)
            sessions = session.Sessions()
            for line in os.fdopen(plans):
                plan, outcome, log = line.split()
                log_to(log)
                Path(outcome).write_text(sessions.outcome_of(Path(plan).read_text()))
                sys.stdout.flush()
                os.write(done, b".")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:  # what vLLM leaves running is not waited for
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def main() -> None:
    """A line for a line until there are no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output, from its import on
    for name in IMPORTED:
        import_module(name)
    wanted_version()
    kept: dict[str, Engine] = {}
    for line in sys.stdin:
        name, *files = line.split()
        engine = kept.pop(name, None) or Engine()
        status = engine.run(*files)
        if status == 0 and name != NAMELESS:
            kept[name] = engine
        elif status == 0:
            status = engine.end()
        print(status, file=out, flush=True)


if __name__ == "__main__":
    main()
