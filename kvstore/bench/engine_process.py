"""The bench's end of an engine in another process (floor 4). See `vllm_engine`, which is the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.errors import StoreError

START_SECONDS = 300.0
LONGEST_SECONDS = 900.0
"""That one verb may take."""
END_SECONDS = 30.0
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are driven, and both halves of a connector are seen
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class EngineProcess:
    """An engine that has begun to start. A context: it is ended with it, or killed where something failed."""

    def __init__(self, name: str, plan: Mapping[str, Any], kv_gib: int, scratch: Path) -> None:
        """name: for messages, and of its log in `scratch`. kv_gib: memory of the engine's own pages."""
        self.name = name
        self._log = scratch / f"{name.replace(' ', '-')}.log"
        settings = [f"{key}={value}" for key, value in {**SETTINGS, "VLLM_CPU_KVCACHE_SPACE": kv_gib}.items()]
        # The engine's threads wait as they do where nobody measures, and not as this command line's.
        command = ["env", "-u", "OMP_WAIT_POLICY", *settings, sys.executable, "-m", "kvstore.bench.vllm_engine"]
        answers, theirs = os.pipe()  # on its standard output vLLM logs, from its import on
        self._answers = os.fdopen(answers)
        with self._log.open("wb") as log, os.fdopen(theirs, "w"):
            self._process = subprocess.Popen(
                [*command, str(theirs)], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=(theirs,)
            )
        self._send(plan)

    def started(self) -> dict[str, Any]:
        """Wait until it is there: what it says of itself. Raises `StoreError` where it cannot start."""
        return self._answer(START_SECONDS)  # type: ignore[no-any-return]

    def do(self, verb: str, **given: Any) -> Any:
        """Its answer. Raises `StoreError` where it fails or takes too long."""
        self._send({"do": verb, **given})
        return self._answer(LONGEST_SECONDS)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        try:
            if kind is None:
                self._process.stdin.close()
                self._process.wait(END_SECONDS)
        except (subprocess.TimeoutExpired, OSError):
            pass  # it is measured already; what is left of it goes
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._answers.close()

    def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure("it is gone") from None

    def _answer(self, seconds: float) -> Any:
        watch = threading.Timer(seconds, self._process.kill)
        watch.start()
        try:
            line = self._answers.readline()
        finally:
            watch.cancel()
        if not line:
            raise self._failure(f"no answer within {seconds:.0f} s, or it ended")
        return json.loads(line)

    def _failure(self, what: str) -> StoreError:
        """One line: the last one of its log that names an error."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line] or lines
        return StoreError(f"the engine '{self.name}': {what}: {named[-1].strip()[-300:] if named else 'no log'}")
