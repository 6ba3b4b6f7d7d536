"""docs/start.md's part about vLLM, walked without a GPU and without a model: a hit after vLLM's restart."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines.conftest import ROOT, Sidecar
from engines.serving import serving
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


def readers_environment() -> dict[str, str]:
    """With nothing in it that would not be a reader's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "KVSTORE"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("ENGINE_PATH", "")])
    return environment | {"ENGINE_PYTHON": sys.executable, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def test_vllm_on_a_cpu_by_the_pages_commands_hits_after_its_restart(sidecar: Sidecar, tmp_path: Path) -> None:
    port = free_port()
    serves, asks = commands(sidecar.url, port)
    seen, admin, environment = [], str(sidecar.directory / "admin.sock"), readers_environment()
    for turn in range(2):
        with serving(PYTHON + serves, [port], tmp_path / f"{turn}.log", ROOT, environment):
            told = subprocess.run(
                ["bash", "-ec", asks], env=environment, capture_output=True, text=True, timeout=SECONDS
            )
            assert told.returncode == 0, told.stderr
            wait_until(lambda: ask.stat(admin, SystemClock()).blocks == TOKENS // 128)
        account = json.loads(told.stdout)["kvstore"]
        seen.append((account["asked"], account["hits"], account["misses"]))
    cold, warm = seen
    assert cold[2].keys() <= {"absent", "warming", "partial_block"}, "warming: asked before its namespace was open"
    assert cold[:2] == (TOKENS, {}) and cold[2]["partial_block"] == 56 and sum(cold[2].values()) == TOKENS
    assert warm == (TOKENS, {"dram": 2944}, {"partial_block": 56})
