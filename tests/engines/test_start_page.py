"""docs/start.md's part about vLLM, walked without a GPU and without a model: a hit after vLLM's restart."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines.conftest import ROOT, Sidecar
from kv_bench.process import free_port
from kvstore.cli import ask
from kvstore.node import SystemClock
from waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("curl", "jq"))), reason="curl and jq are not installed"),
]
PAGE = (ROOT / "docs/start.md").read_text("utf-8")
SECONDS = 240.0
TOKENS = 3000
PYTHON = 'python() { "$ENGINE_PYTHON" "$@"; }\n'


def commands(url: str, port: int) -> tuple[str, str]:
    """What serves, and what asks. Of the reader's own: the socket, a port that is free, the page's own model, and the
    patience that a busy machine needs: with the default of 20 ms a late look-up is a miss."""
    (block,) = [
        one for one in re.findall(r"^```sh elsewhere\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "vllm" in one
    ]
    (model,) = re.findall(r"^`--model (.*?)` in a checkout, and prompts as lists of bytes", PAGE, re.MULTILINE)
    prompt = json.dumps([ROOT.joinpath("docs/start.md").read_bytes()[at] for at in range(TOKENS)])
    here = {"--model MODEL": f"--port {port} --model {model}", "unix:/path/to/kv/kvstore.sock": url}
    here |= {'"audit": 0': '"audit": 0, "match_deadline_ms": 10000, "lease_deadline_ms": 10000'}
    here |= {":8000": f":{port}", '"PROMPT"': prompt, '"MODEL"': json.dumps(model.split()[0])}
    for given, own in here.items():
        assert block.count(given) == 1, given
        block = block.replace(given, own)
    serves, asks = re.split(r"^(?=curl)", block, flags=re.MULTILINE)
    return serves, asks


@contextmanager
def running(script: str, port: int, log: Path) -> Iterator[dict[str, str]]:
    """With nothing in the environment that would not be a reader's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "KVSTORE"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("ENGINE_PATH", "")])
    environment |= {"ENGINE_PYTHON": sys.executable, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-ec", PYTHON + script], cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )

    def is_healthy() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return process.poll() is not None

    try:
        wait_until(is_healthy)
        assert process.poll() is None, log.read_text(errors="replace")[-5000:]
        yield environment
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # also to what it has started
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(30)


def test_vllm_on_a_cpu_by_the_pages_commands_hits_after_its_restart(sidecar: Sidecar, tmp_path: Path) -> None:
    port = free_port()
    serves, asks = commands(sidecar.url, port)
    seen, admin = [], str(sidecar.directory / "admin.sock")
    for turn in range(2):
        with running(serves, port, tmp_path / f"{turn}.log") as environment:
            told = subprocess.run(
                ["bash", "-ec", asks], env=environment, capture_output=True, text=True, timeout=SECONDS
            )
            wait_until(lambda: ask.stat(admin, SystemClock()).blocks == TOKENS // 128)
        assert told.returncode == 0, told.stderr
        account = json.loads(told.stdout)["kvstore"]
        seen.append((account["asked"], account["hits"], account["misses"]))
    cold, warm = seen
    assert cold[2].keys() <= {"absent", "warming", "partial_block"}, "warming: asked before its namespace was open"
    assert cold[:2] == (TOKENS, {}) and cold[2]["partial_block"] == 56 and sum(cold[2].values()) == TOKENS
    assert warm == (TOKENS, {"dram": 2944}, {"partial_block": 56})
