"""vLLM's own server with the connector, started by the command of docs/vllm.md: what its users and its scraper see."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engine_adapter.audit.audits import FIRST_HITS
from engine_adapter.vllm_requests import HINTS
from engines import models
from engines.models import ROOT
from engines.serving import serving
from kv_bench.process import free_port

pytestmark = pytest.mark.slow
MOST_ASKED = 10
"""Until the first hits were compared: a verdict comes with a step, and one that is to be compared waits for it."""
NAME = "small"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
TEXT = (ROOT / "docs/vllm.md").read_bytes()[:300]


def documented(model: str, url: str) -> list[str]:
    """The command as it is written there, of this model and socket."""
    text = (ROOT / "docs/vllm.md").read_text("utf-8")
    (block,) = re.findall(r"```\n(python -P -m vllm\.entrypoints\.openai\.api_server .*?)```", text, re.DOTALL)
    command = shlex.split(block)
    assert command[0] == "python" and command.count("MODEL") == 1
    given = " ".join(command)
    assert given.count("unix:/run/kvstore/kvstore.sock") == 1
    replaced = [word.replace("unix:/run/kvstore/kvstore.sock", url).replace("MODEL", model) for word in command]
    return [sys.executable, *replaced[1:]]


class Server:
    """Asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._at = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._at + path, timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        content = json.dumps(body or {}).encode()
        asked = urllib.request.Request(self._at + path, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            said = answer.read()
            return json.loads(said) if said else None

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, with the one that says what was used."""
        content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        asked = urllib.request.Request(self._at + path, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            lines = answer.read().decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def metric(self, name: str, label: str) -> float:
        """0 where there is none."""
        found = re.findall(rf"^{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, found))


@contextmanager
def server_of(model: str, url: str, log: Path) -> Iterator[Server]:
    """The server, once it answers. Its cache can be reset by whoever asks (VLLM_SERVER_DEV_MODE)."""
    port = free_port()
    models.prepare()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('ENGINE_PATH', '')}",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    small = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME, "--chat-template", TEMPLATE]
    small += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
    small += ["--enable-prompt-tokens-details"]
    with serving(shlex.join([*documented(model, url), *small]), [port], log, ROOT, environment):
        yield Server(port)


def test_a_server_by_the_book_answers_from_the_store_and_says_so(sidecar: Any, saved: Any, tmp_path: Path) -> None:
    """On the model that has learned something, of which a token is a byte: 8 bits do not change what it says."""
    log = tmp_path / "server.log"
    with server_of(saved("trained"), sidecar.url, log) as server:
        chat = {
            "model": NAME,
            "messages": [{"role": "user", "content": " ".join(f"w{byte}" for byte in TEXT)}],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": {"kvstore": {"ttl": 3600, "typo": 1}},
        }
        first = server.post("/v1/chat/completions", chat)
        compared = []
        while server.metric("kvstore:events_total", 'event="audited_(?:exact|close)"') < FIRST_HITS:
            assert len(compared) < MOST_ASKED
            time.sleep(1.0)
            assert server.post("/reset_prefix_cache") == {"success": True}
            compared.append(server.post("/v1/chat/completions", chat)["kv_transfer_params"]["kvstore"])
        assert server.post("/reset_prefix_cache") == {"success": True}
        again = server.post("/v1/chat/completions", chat)
        plain = {"model": NAME, "prompt": [5] * 64 + list(range(200)) * 2, "max_tokens": 8, "temperature": 0}
        whole = server.post("/v1/completions", plain)
        assert first["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]
        assert len(compared) >= FIRST_HITS and all(one["hits"] == {} for one in compared)
        assert any(one["misses"].get("audit") == 256 for one in compared)
        told, found = (one["kv_transfer_params"]["kvstore"] for one in (first, again))
        assert told["asked"] == found["asked"] == first["usage"]["prompt_tokens"] >= 300
        assert told["hits"] == {} and found["hits"] == {"dram": 256}
        assert told["ignored"] == found["ignored"] == [f"typo; allowed: {', '.join(HINTS)}"]
        assert whole["kv_transfer_params"]["kvstore"]["misses"]["absent"] == 384
        assert server.metric("kvstore:prompt_tokens_total", 'origin="hit_dram"') == 256
        assert server.metric("kvstore:prompt_tokens_total", 'origin="miss_absent"') == 256 + 384
        assert server.metric("kvstore:events_total", 'event="audited_drifted"') == 0
        assert server.metric("kvstore:events_total", 'event="loads"') == 1
        assert server.metric("kvstore:events_total", 'event="saved_blocks"') >= 2
        assert server.post("/reset_prefix_cache") == {"success": True}
        chunks = server.stream("/v1/chat/completions", chat)
        assert not [chunk for chunk in chunks if "kv_transfer_params" in chunk], "then docs/vllm.md is to be changed"
        (used,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        assert used["prompt_tokens_details"]["cached_tokens"] == 256
        assert server.metric("kvstore:prompt_tokens_total", 'origin="hit_dram"') == 2 * 256
    said = log.read_text("utf-8", "replace")
    assert f"kvstore: ready at {sidecar.url}, codec int8-kc64, blocks of 128 tokens" in said
