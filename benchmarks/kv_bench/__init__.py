"""Benches that decisions about the product rest on: `benchmarks/benches.py` runs them, and nothing of it is installed.

Benches start processes, engines among them, which import this package by its name: they find it by their environment.
"""

import os
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[1])
_before = os.environ.get("PYTHONPATH", "")
if FOLDER not in _before.split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [FOLDER, _before]))
