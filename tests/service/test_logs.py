"""Levels of the log are the store's own; at debug it says what is worth reading, and never what nobody may read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvstore
from service.sidecar import patient
from service.test_serve import PATHS, ended, serving
from workbench import MODEL, ids, random_pages, small_layout

PROGRAM = """
import logging, sys
from kvstore.service.serve import log_to_stderr
log_to_stderr(sys.argv[1], "json")
ours = ("kvstore.core.store", "tiering.nvme.tier", "kv_kernels.host", "engine_adapter.audit.audits")
for name in (*ours, "numba.core.ssa", "asyncio", ""):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger(name).log(level, "x")
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_is_that_of_our_own_loggers(level: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, check=True, env={**os.environ, **PATHS}
    )
    levels = ("debug", "info", "warning", "error")
    said: dict[str, list[str]] = {}
    for line in map(json.loads, done.stderr.splitlines()):
        said.setdefault(line["logger"], []).append(line["level"])
    mine = list(levels[levels.index(level) :])
    theirs = list(levels[max(2, levels.index(level)) :])
    assert said == {
        **dict.fromkeys(
            ("kvstore.core.store", "tiering.nvme.tier", "kv_kernels.host", "engine_adapter.audit.audits"), mine
        ),
        **dict.fromkeys(("numba.core.ssa", "asyncio", "root"), theirs),
    }


@pytest.mark.slow
def test_debug_says_who_came_and_what_moved_and_tells_nothing_of_prompts(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[store]\npolicy = "adaptive"\nextent = "256KiB"\n[log]\nlevel = "debug"\n')
    with serving(tmp_path, "--dram", "1MiB", "--nvme", "16MiB", "--config", str(config)) as (process, said):
        layout = small_layout()
        with patient(kvstore.open(f"unix:{said['serving'][0]}", engine="an engine 1.0")) as store:
            handle = store.namespace(model=MODEL, layout=layout)
            for first in range(40):
                handle.put(ids(640 + first)[first:], random_pages(layout, 10, seed=first), durability="disk")
            with handle.lease(handle.match(ids(640)), deadline_ms=5000):
                pass
        status, log = ended(process)
    assert status == 0
    said_at: dict[str, list[dict[str, Any]]] = {}
    for line in log:
        if line["level"] == "debug":
            said_at.setdefault(line["message"], []).append(line)
    assert {"client let in", "client left", "namespace opened", "written to nvme", "evicted from dram"} <= set(said_at)
    assert said_at["client let in"][0]["engine"] == "an engine 1.0"
    assert said_at["namespace opened"][0]["model"] == MODEL
    assert len(log) < 1000, "a line per batch, and none of the compiler's"
    secrets = json.loads((tmp_path / "kv" / "keys").read_text())["tenants"]["default"]["secret"]
    text = "\n".join(json.dumps({key: value for key, value in line.items() if key != "model"}) for line in log)
    assert secrets not in text and not re.search(r"[0-9a-f]{32}", text), "no key, salt or digest"
