"""Programs that a test runs in processes of their own, with the packages of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}"}


def run_python(program: str, *arguments: object, **options: Any) -> str:
    """What it prints, without the space around it; it has to end well."""
    given = {"env": {**os.environ, **PATHS}, "timeout": 120, **options}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def start_python(program: str, *arguments: object) -> subprocess.Popen[str]:
    """One that is told by its standard input when it may end."""
    command, env = [sys.executable, "-c", program, *map(str, arguments)], {**os.environ, **PATHS}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
