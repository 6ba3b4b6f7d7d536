"""The two public request traces that stand beside a checkout, where they do; made up ones; and how to write one."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from kvstore.insight.trace import Trace, read_trace

FOLDER = Path(os.environ.get("KVSTORE_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
PUBLIC = ("mooncake_conversation", "mooncake_synthetic")


def path_of(name: str) -> Path:
    """Skips where it is not there."""
    path = FOLDER / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {FOLDER}: docs/traces.md fetches it, or set KVSTORE_TRACES")
    return path


def recorded(name: str) -> Trace:
    """A public trace."""
    path_of(name)
    return _read(name)


@cache
def _read(name: str) -> Trace:
    with gzip.open(path_of(name), "rt") as lines:
        return read_trace(name, lines)


def line(ids: Sequence[int], tokens: int | None = None, **more: object) -> str:
    """A request for these blocks of 16 tokens, all full unless it says how many tokens there are."""
    length = 16 * len(ids) if tokens is None else tokens
    return json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": list(ids)} | more)


def made_of(*requests: Sequence[int]) -> Trace:
    """A trace of these requests, in blocks of 16 tokens."""
    return read_trace("made up", [line(ids) for ids in requests], 16)
