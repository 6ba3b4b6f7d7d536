"""Runs of a real vLLM, each in a process of its own that has imported it already: python -m engines.nursery

A line on standard input names a plan's file, the one for the outcome and the one for what the engine logs; once that
run has ended its exit status is a line on standard output. Importing vLLM takes as long as everything else that a
short run does, and a process that has only imported it can be forked.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

IMPORTED = ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")


def wanted_version() -> None:
    """A report names a version: it has to be that one which runs."""
    import vllm

    wanted = os.environ.get("ENGINE_VERSION", vllm.__version__)
    assert vllm.__version__.startswith(wanted), f"vLLM {vllm.__version__} runs, {wanted} was asked for"


def run(plan: str, outcome: str, log: str) -> None:
    """In the forked process. It does not return."""
    from engines import session

    status = 1
    try:
        os.setpgid(0, 0)
        logged = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(logged, 1)
        os.dup2(logged, 2)
        Path(outcome).write_text(session.outcome_of(Path(plan).read_text()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # what vLLM leaves running is not waited for


def main() -> None:
    """A line for a line until there are no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output, from its import on
    for name in IMPORTED:
        import_module(name)
    wanted_version()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(*line.split())
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=out, flush=True)


if __name__ == "__main__":
    main()
