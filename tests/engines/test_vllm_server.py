"""vLLM's own server with the connector, started by the command of docs/vllm.md and by `kvstore run`: what its users and
its scraper see."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine_adapter.audit.audits import FIRST_HITS
from engine_adapter.vllm_requests import HINTS
from engines import models
from engines.conftest import PRODUCT, ROOT, sidecar_python
from engines.serving import Server, chunks_of, serving
from kv_bench.process import free_port
from kvstore.client.connection import stat_at
from tiering.clock import SystemClock
from waiting import wait_until

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


@contextmanager
def server_of(command: list[str], log: Path) -> Iterator[Server]:
    """The server, once it answers. Its cache can be reset by whoever asks (VLLM_SERVER_DEV_MODE)."""
    port = free_port()
    models.prepare()
    environment = {**os.environ, **PRODUCT, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    small = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME, "--chat-template", TEMPLATE]
    small += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
    small += ["--enable-prompt-tokens-details"]
    with serving(shlex.join([*command, *small]), [port], log, ROOT, environment):
        yield Server(f"http://127.0.0.1:{port}", model=NAME, temperature=0)


def test_a_server_by_the_book_answers_from_the_store_and_says_so(sidecar: Any, saved: Any, tmp_path: Path) -> None:
    """On the model that has learned something, of which a token is a byte: 8 bits do not change what it says."""
    log = tmp_path / "server.log"
    with server_of(documented(saved("trained"), sidecar.url), log) as server:
        text = " ".join(f"w{byte}" for byte in TEXT)
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "ignore_eos": True}
        chat["kv_transfer_params"] = {"kvstore": {"ttl": 3600, "typo": 1}}

        def said_to(path: str, **body: Any) -> Any:
            return server.post(path, **body)[0]

        def forget() -> None:
            assert said_to("/reset_prefix_cache") == {"success": True}

        def audited(*verdicts: str) -> float:
            return sum(server.metric("kvstore:events_total", event=f"audited_{one}") for one in verdicts)

        first = said_to("/v1/chat/completions", **chat)
        compared = []
        while audited("exact", "close") < FIRST_HITS:
            assert len(compared) < MOST_ASKED
            time.sleep(1.0)
            forget()
            compared.append(said_to("/v1/chat/completions", **chat)["kv_transfer_params"]["kvstore"])
        forget()
        again = said_to("/v1/chat/completions", **chat)
        whole = said_to("/v1/completions", prompt=[5] * 64 + list(range(200)) * 2, max_tokens=8)
        assert first["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]
        assert len(compared) >= FIRST_HITS and all(one["hits"] == {} for one in compared)
        assert any(one["misses"].get("audit") == 256 for one in compared)
        told, found = (one["kv_transfer_params"]["kvstore"] for one in (first, again))
        assert told["asked"] == found["asked"] == first["usage"]["prompt_tokens"] >= 300
        assert told["hits"] == {} and found["hits"] == {"dram": 256}
        assert told["ignored"] == found["ignored"] == [f"typo; allowed: {', '.join(HINTS)}"]
        assert whole["kv_transfer_params"]["kvstore"]["misses"]["absent"] == 384
        assert server.metric("kvstore:prompt_tokens_total", origin="hit_dram") == 256
        assert server.metric("kvstore:prompt_tokens_total", origin="miss_absent") == 256 + 384
        assert audited("drifted") == 0
        assert server.metric("kvstore:events_total", event="loads") == 1
        assert server.metric("kvstore:events_total", event="saved_blocks") >= 2
        forget()
        chunks = chunks_of(said_to("/v1/chat/completions", stream=True, stream_options={"include_usage": True}, **chat))
        assert not [chunk for chunk in chunks if "kv_transfer_params" in chunk], "then docs/vllm.md is to be changed"
        (used,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        assert used["prompt_tokens_details"]["cached_tokens"] == 256
        assert server.metric("kvstore:prompt_tokens_total", origin="hit_dram") == 2 * 256
    said = log.read_text("utf-8", "replace")
    assert f"kvstore: ready at {sidecar.url}, codec int8-kc64, blocks of 128 tokens" in said


@pytest.fixture
def short() -> Iterator[str]:
    """A folder with a short name, since sockets' names are short."""
    with TemporaryDirectory(prefix="kv-") as folder:
        yield folder


def test_one_command_brings_vllm_a_sidecar_of_its_own_and_hits(saved: Any, short: str, tmp_path: Path) -> None:
    log, data = tmp_path / "server.log", Path(short) / "kv"
    store = ["--data", str(data), "--dram", "256MiB", "--nvme", "off"]
    engine = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", saved("trained")]
    with server_of([sidecar_python(), "-P", "-m", "kvstore", "run", *store, "--", *engine], log) as server:
        prompt = list(range(200)) * 3

        def hits() -> Any:
            assert server.post("/reset_prefix_cache")[0] == {"success": True}
            told = server.post("/v1/completions", prompt=prompt, max_tokens=2)[0]["kv_transfer_params"]["kvstore"]
            return told["hits"].get("dram")

        assert wait_until(hits) == 512
        observed = str(data / "observe.sock")
        wait_until(lambda: stat_at(observed, "test", SystemClock(), 60.0).looked.granted.get("dram"))
    said = log.read_text("utf-8", "replace").splitlines()
    ours = [line for line in said if line.startswith("kvstore: ")]
    assert ours[0].startswith(f"kvstore: a sidecar serves {data}, dram 256.0 MiB for ")
    assert " prompt tokens (" in ours[-1] and "came from the store (dram " in ours[-1]
    assert not (data / "kvstore.sock").exists()
