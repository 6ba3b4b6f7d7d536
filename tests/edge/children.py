"""The children of a supervisor, and what they answer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from waiting import wait_until


def children_of(keeper: int, word: str) -> list[int]:
    """Those that were started with that word."""
    children = [pid for one in Path(f"/proc/{keeper}/task").iterdir() for pid in (one / "children").read_text().split()]
    return [int(one) for one in children if f"\0{word}\0".encode() in command_of(one)]


def command_of(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it was reaped since it was listed
        return b""


def status_at(port: int, token: str = "") -> Any:
    """What the console says, once there is one that has an answer of the sidecar's."""
    asks = urllib.request.Request(f"http://127.0.0.1:{port}/api/status", headers={"Authorization": f"Bearer {token}"})
    told: list[Any] = []

    def is_connected() -> bool:
        try:
            with urllib.request.urlopen(asks, timeout=5) as answer:
                told.append(json.loads(answer.read()))
        except OSError:
            return False
        return bool(told[-1]["contact"]["connected"])

    wait_until(is_connected)
    return told[-1]
