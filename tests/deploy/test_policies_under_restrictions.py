"""Every policy and setting under what deploy/systemd takes away: the sidecar serves, and says what it could not do.

`test_systemd` has the list of system calls; here it is memory that may be written or run, never both, a home that is
not there, a package that cannot be written, and numba that is absent or broken.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from deploy.restricted import MISSING, settings_of
from deploy.sidecar_process import DEPLOY, serving, stores_and_reads
from kvstore.block.errors import BadInput
from kvstore.cli import ask
from kvstore.node import SystemClock
from programs import PATHS

UNIT = DEPLOY / "systemd" / "kvstore.service"
RESTRICTED = Path(__file__).with_name("restricted.py")
PR_SET_MDWE = 65


def deny_write_execute() -> None:
    ctypes.CDLL(None).prctl(PR_SET_MDWE, 1, 0, 0, 0)


@pytest.fixture(scope="module")
def denied() -> Callable[[], None]:
    """What a child does to have no memory that is written and run."""
    tried = subprocess.run(
        [sys.executable, "-c", "import mmap; mmap.mmap(-1, 4096, prot=7)"],
        preexec_fn=deny_write_execute,
        capture_output=True,
    )
    if tried.returncode == 0:
        pytest.skip("this kernel has no PR_SET_MDWE; Linux 6.3 has")
    return deny_write_execute


def served(
    directory: Path, config: str, under: Sequence[str] = (), environment: dict[str, str] | None = None, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts of a sidecar that a block went through, and its log."""
    (directory / "c.toml").write_text(config)
    flags = ["--config", str(directory / "c.toml"), "--data", str(directory / "kv"), "--dram", "16MiB"]
    with serving(*flags, under=under, environment=environment, **options) as (process, said):
        stores_and_reads(said, "volatile")
        facts = ask.stat(str(directory / "kv" / "admin.sock"), SystemClock())
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    return {"policy": facts.policy, "note": facts.policy_note, "state": facts.state}, [
        json.loads(one) for one in errors.splitlines() if one.startswith("{")
    ]


def warnings(log: list[dict[str, Any]]) -> list[str]:
    return [line["message"] for line in log if line["level"] == "warning"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_each_policy_is_served_where_nothing_may_be_written_and_run(
    tmp_path: Path, denied: Callable[[], None], policy: str
) -> None:
    config = f'[store]\npolicy = "{policy}"\nnvme = "off"\n'
    home = {"HOME": "/nonexistent", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    facts, log = served(tmp_path, config, environment=home, preexec_fn=denied)
    if policy != "adaptive":
        assert facts == {"policy": policy, "note": "", "state": "ready"} and not warnings(log)
        return
    assert facts["policy"] == "lru" and "MemoryDenyWriteExecute=no" in facts["note"]
    assert len(warnings(log)) == 1 and "blocks go by lru instead" in warnings(log)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        '[store]\npolicy = "adaptive"\nnvme = "64MiB"\nnvme_writes = "learned"\n',
        '[store]\nnvme = "64MiB"\nnvme_writes = 3\nscrub = "off"\nprefault = false\n',
        '[store]\nnvme = "64MiB"\nslab = "8MiB"\nextent = "4MiB"\nkeeper = false\n[log]\nlevel = "debug"\n',
        '[store]\nnvme = "off"\n[http]\nlisten = "127.0.0.1:0"\n[door]\nshare = 0.5\n',
    ],
)
def test_settings_are_served_under_all_of_the_unit(tmp_path: Path, config: str) -> None:
    """With its list of system calls, where that can be had."""
    under = [sys.executable, str(RESTRICTED), str(UNIT)]
    tried = subprocess.run([*under, sys.executable, "-c", "pass"], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        assert tried.returncode == MISSING or "systemd-analyze" in tried.stderr, tried.stderr
        pytest.skip(f"the unit's restrictions cannot be had here: {tried.stderr.strip()[-200:]}")
    facts, log = served(tmp_path, config, under, {"NUMBA_CACHE_DIR": str(tmp_path / "cache")})
    assert facts["state"] == "ready"
    assert len(warnings(log)) == ("adaptive" in config)


BROKEN = {
    "absent": ("raise ModuleNotFoundError(\"No module named 'numba'\", name='numba')", "needs the package numba"),
    "no library": (
        "raise OSError('Could not find/load shared object file: libllvmlite.so')",
        "may not be compiled here",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [*BROKEN, "disabled"])
def test_numba_that_is_absent_or_broken_costs_the_policy_alone(tmp_path: Path, how: str) -> None:
    environment = {}
    if how == "disabled":
        environment["NUMBA_DISABLE_JIT"] = "1"
        words = "NUMBA_DISABLE_JIT forbids"
    else:
        body, words = BROKEN[how]
        (tmp_path / "fake" / "numba").mkdir(parents=True)
        (tmp_path / "fake" / "numba" / "__init__.py").write_text(body)
        environment["PYTHONPATH"] = f"{tmp_path / 'fake'}:{PATHS['PYTHONPATH']}"
    facts, log = served(tmp_path, '[store]\npolicy = "adaptive"\nnvme = "off"\n', environment=environment)
    assert facts["policy"] == "lru" and words in facts["note"]
    assert len(warnings(log)) == 1 and words in warnings(log)[0]


def test_a_store_in_this_process_is_told_why_its_policy_cannot_be_had(
    tmp_path: Path, denied: Callable[[], None]
) -> None:
    program = f"import kvstore; kvstore.open('embedded:{tmp_path}/kv', policy='adaptive')"
    done = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=denied, capture_output=True, text=True, env={**os.environ, **PATHS}
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvstore.block.errors.BadInput: policy='adaptive'") and "take lru" in last


def test_what_numba_compiled_is_kept_in_a_directory_of_the_unit_s() -> None:
    unit = dict(settings_of(UNIT))
    name, _, value = unit["Environment"].partition("=")
    assert name == "NUMBA_CACHE_DIR"
    assert Path(value).parent == Path("/var/cache") / unit["CacheDirectory"]


def test_a_policy_that_does_not_exist_is_refused_as_before() -> None:
    with pytest.raises(BadInput, match="policy='fifo'"):
        kvstore.policy_named("fifo")
