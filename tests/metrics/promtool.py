"""promtool, where there is one: Prometheus's own checker of metrics, rules and rules' tests.

`make promtool` fetches it into the environment; KVSTORE_PROMTOOL names another one; else PATH is searched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "KVSTORE_PROMTOOL"


def found_promtool() -> str | None:
    """Its path."""
    named = os.environ.get(VARIABLE)
    if named:
        return named
    fetched = Path(sys.prefix) / "bin" / "promtool"
    return str(fetched) if fetched.exists() else shutil.which("promtool")


def promtool(
    *arguments: str, text: str | None = None, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it. Skips where there is none."""
    program = found_promtool()
    if program is None:
        pytest.skip(f"promtool is not installed: make promtool fetches it, or {VARIABLE} names it")
    return subprocess.run(
        [program, *arguments], input=text, capture_output=True, text=True, timeout=120, cwd=directory, check=False
    )
