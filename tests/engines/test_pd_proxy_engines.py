"""`kvstore pd-proxy`, `prime` and `bench traffic` with a vLLM that prefills and one that decodes, on one sidecar."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engines.conftest import PRODUCT, Sidecar, started
from engines.models import PATIENT
from engines.serving import SECONDS, Server, chunks_of
from kv_bench import traffic_engines as engines
from kv_bench.ttft_vllm import connector
from kvstore.cli import ask
from kvstore.insight.trace import read_trace
from kvstore.node import SystemClock
from kvstore.traffic import run
from kvstore.traffic.run import Endpoint, Slo, engine_tokens
from waiting import wait_until

pytestmark = pytest.mark.slow
PROMPTS = 6


@dataclass
class Pair:
    """Two engines and the proxy before them."""

    sidecar: Sidecar
    prefill: Server
    decode: Server
    proxy: Server

    def saved(self) -> float:
        """Blocks of the prefill engine, which counts as it computes: it is given a token to do so."""
        self.prefill.post("/v1/completions", prompt=[5], max_tokens=1)
        return self.prefill.metric("kvstore_vllm_saved_blocks_total")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    scratch = tmp_path_factory.mktemp("pd")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("PYTHONPATH", PRODUCT["PYTHONPATH"])
        sidecar = stack.enter_context(started("pd"))
        model = scratch / "model"
        engines.save_model("tiny", model)
        servers = {}
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            transfer = connector(sidecar.url.removeprefix("unix:"), codec="raw", **PATIENT) | {"kv_role": role}
            flags = ["--max-model-len", "4096"]
            servers[name] = stack.enter_context(engines.vllm_server(name, model, scratch, flags, transfer))
            servers[name].wait()
        proxy = stack.enter_context(engines.proxy_server(servers["prefill"].url, [servers["decode"].url], scratch))
        proxy.wait()
        always = {"model": engines.MODEL, "temperature": 0, "ignore_eos": True}
        yield Pair(sidecar, *(Server(one.url, **always) for one in (servers["prefill"], servers["decode"], proxy)))


def prompts(count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(5, 999) for _ in range(random.randrange(300, 1500))] for _ in range(count)]


def test_what_prefill_computed_decode_loads_and_says_the_same(pair: Pair) -> None:
    given = prompts(PROMPTS, 1)
    before = engine_tokens(pair.decode.metrics())
    said = []
    for prompt in given:
        answer, headers = pair.proxy.post("/v1/completions", prompt=prompt, max_tokens=8)
        assert headers["x-kvstore-prefill"] == "done" and headers["x-kvstore-decode"] == "decode-0"
        said.append(answer["choices"][0]["text"])
        account = answer["kv_transfer_params"]["kvstore"]
        assert account["asked"] == len(prompt)
    alone = [pair.prefill.post("/v1/completions", prompt=prompt, max_tokens=8)[0] for prompt in given]
    assert said == [one["choices"][0]["text"] for one in alone], "raw blocks, and the same tokens as of one engine"
    after = engine_tokens(pair.decode.metrics())
    hits = after.get("dram", 0) - before.get("dram", 0)
    print(f"{hits:.0f} of {sum(map(len, given))} tokens were loaded")
    assert hits >= 0.5 * sum(len(prompt) // 128 * 128 for prompt in given)


def test_streams_and_chats_go_through(pair: Pair) -> None:
    words = " ".join(f"w{number % 990}" for number in range(400))
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "max_tokens": 6}
    whole, _ = pair.proxy.post("/v1/chat/completions", **chat)
    stream, headers = pair.proxy.post("/v1/chat/completions", **chat, stream=True)
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks_of(stream) if one["choices"])
    assert text == whole["choices"][0]["message"]["content"] and stream.rstrip().endswith("data: [DONE]")
    assert headers["content-type"].startswith("text/event-stream")


def test_a_client_that_hangs_up_ends_its_request_in_vllm(pair: Pair) -> None:
    (prompt,) = prompts(1, 2)
    before, saved = pair.decode.metric("vllm:generation_tokens_total"), pair.saved()
    body = {"model": engines.MODEL, "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    host, port = pair.proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        assert wire.recv(1 << 16).startswith(b"HTTP/1.1 200")
        wait_until(lambda: pair.decode.metric("vllm:num_requests_running") == 1)
    wait_until(lambda: pair.decode.metric("vllm:num_requests_running") == 0)
    assert 0 < pair.decode.metric("vllm:generation_tokens_total") - before < 2000
    wait_until(lambda: pair.saved() >= saved + len(prompt) // 128)  # what is primed next is counted by itself


def test_what_is_primed_is_kept_and_found(pair: Pair, tmp_path: Path) -> None:
    document = tmp_path / "handbook.txt"
    document.write_text(" ".join(f"w{number * 7 % 990}" for number in range(700)))
    for turn in range(2):
        command = [sys.executable, "-m", "kvstore", "prime", str(document), "--engine", pair.prefill.url]
        done = subprocess.run(
            [*command, "--ttl", "600", "--json"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["block_tokens"] == 128 and told["tokens"] == 700
        assert (told["stored_tokens"], told["engine"]) == ((640, 0) if turn == 0 else (0, 640)), told
    kept = ask.stat(str(pair.sidecar.directory / "admin.sock"), SystemClock()).dram_retained_bytes
    assert kept >= 5 * 128 * 1024
    chat = {"messages": [{"role": "system", "content": document.read_text()}, {"role": "user", "content": "w1 w2"}]}
    answer, _ = pair.decode.post("/v1/chat/completions", **chat, max_tokens=2)
    assert answer["kv_transfer_params"]["kvstore"]["hits"] == {"dram": 640}


def test_recorded_traffic_is_replayed_and_its_hits_are_counted(pair: Pair) -> None:
    lines = [
        {"timestamp": 300 * at, "input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 10 + at]}
        for at in range(6)
    ]
    trace = read_trace("made", map(json.dumps, lines), 512)
    options = run.TrafficOptions(turns=2, scale=0.5, request_seconds=SECONDS, slos=(Slo(1e6, 1e6),))
    endpoints = [Endpoint("decode alone", pair.decode.url), Endpoint("pd", pair.proxy.url, (pair.decode.url,))]
    result = run.run(trace, endpoints, options, lambda *_: None)
    print(json.dumps(result.found().to_dict()["rows"]))
    for name, turns in result.turns.items():
        for turn in turns:
            assert (turn.failed, turn.requests) == (0, 6), (name, turn.errors)
            assert turn.tokens["asked"] == 6 * 550 + 1
            assert turn.figures["good, TTFT 1e+06 ms, ITL 1e+06 ms"] == 1
            assert turn.figures["hit, engine"] + turn.figures.get("hit, dram", 0) > 0
