"""A process that a bench starts and that answers lines: a client, a flood, a holder of frames."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from kvstore.block.errors import StoreError

LONGEST_SECONDS = 120.0


class Child:
    """`python -m MODULE ARGUMENT..`, which ends with its input. Close it, or use it as a context."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout

    def say(self, line: str) -> None:
        """And do not wait; where it has ended, `hear` says so."""
        with suppress(BrokenPipeError):
            print(line, file=self._input, flush=True)

    def hear(self) -> str:
        """Its next line. Raises `StoreError` where it has ended."""
        line = self._output.readline().strip()
        if not line:
            self.process.wait(LONGEST_SECONDS)
            self._errors.seek(0)
            said = self._errors.read().strip()[-500:]
            raise StoreError(f"{self._module} ended with {self.process.returncode}: {said}")
        return line

    def ask(self, line: str) -> Any:
        """The answer, from JSON. Raises `StoreError`."""
        self.say(line)
        return json.loads(self.hear())

    def close(self) -> None:
        """End it in order, or kill it where it does not."""
        with suppress(BrokenPipeError):
            self._input.close()
        try:
            self.process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
