"""`kvstore bench traffic` before small servers: requests come when they are due, and faults are counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from openai_api.small_openai import Asked, SmallOpenAi, text_chunk
from test_cli import error_line, run_cli

STEP = 0.02
LINES = [
    {"timestamp": 200 * at, "input_length": 96 + at, "output_length": 4, "hash_ids": [0, 10 + at]} for at in range(5)
]


class SmallEngine(SmallOpenAi):
    """It says of each prompt what of it was seen before, and counts as a vLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[float] = []
        self.asked_tokens = self.hit_tokens = 0
        self._seen: set[tuple[int, ...]] = set()
        self.answers |= {
            "/v1/models": self._models,
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._chat,
            "/metrics": self._metrics,
        }

    async def _models(self, asked: Asked) -> None:
        await asked.json({"data": [{"id": "small", "max_model_len": 1000}]})

    async def _metrics(self, asked: Asked) -> None:
        counts = {"queries": self.asked_tokens, "hits": self.hit_tokens}
        await asked.page("".join(f"vllm:prefix_cache_{name}_total {count}\n" for name, count in counts.items()))

    async def _complete(self, asked: Asked) -> None:
        body = asked.body
        if body["stream"]:
            self.came.append(time.monotonic())
        tokens, count = body["prompt"], body["max_tokens"]
        head = tuple(tokens[:64])
        cached = 64 if head in self._seen and len(tokens) >= 64 else 0
        self._seen.add(head)
        self.asked_tokens += len(tokens)
        self.hit_tokens += cached
        if not body["stream"]:
            await asked.json({})
            return
        await asked.begin_events()
        for number in range(count):
            await asyncio.sleep(STEP)
            await asked.event(text_chunk(str(number)))
        details = {"prompt_tokens": len(tokens), "completion_tokens": count}
        await asked.event({"choices": [], "usage": {**details, "prompt_tokens_details": {"cached_tokens": cached}}})
        await asked.event("[DONE]")
        await asked.end_chunks()

    async def _chat(self, asked: Asked) -> None:
        await asked.events([
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "a"}}]},
            {"choices": [{"delta": {"reasoning": "b"}}]},
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
        ])  # fmt: skip


@pytest.fixture
def engines() -> Iterator[list[SmallEngine]]:
    made = [SmallEngine(), SmallEngine()]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    return str(file)


def told(*arguments: str) -> dict[str, Any]:
    done = run_cli("bench", "traffic", *arguments, "--json", "--block-tokens", "64")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_two_endpoints_take_turns(engines: list[SmallEngine], trace: str) -> None:
    first, second = engines
    flags = ["--endpoint", f"a={first.url}/v1/", "--endpoint", f"b={second.url}", "--sidecar", f"b={second.url}"]
    found = told(trace, *flags, "--turns", "3", "--ttft-slo", "1,60000", "--itl-slo", "60000")
    assert found["workload"]["requests"] == 5 and found["workload"]["shared_tokens"] == 4 * 64
    assert [one["name"] for one in found["endpoints"]] == ["a", "b"] and found["faults"] == []
    for endpoint, engine in zip(found["endpoints"], engines, strict=True):
        for turn in endpoint["turns"]:
            figures = turn["figures"]
            assert (turn["requests"], turn["failed"], turn["errors"]) == (5, 0, [])
            assert figures["TTFT p50, ms"] >= 1e3 * STEP and figures["ITL p50, ms"] >= 0.9e3 * STEP
            assert figures["good, TTFT 60000 ms, ITL 60000 ms"] == 1 and figures["good, TTFT 1 ms, ITL 60000 ms"] == 0
            assert turn["tokens"] == {"asked": sum(96 + at for at in range(5)) + 1, "engine": 4 * 64}
            assert figures["hit, as answers say"] == pytest.approx(4 * 64 / sum(96 + at for at in range(5)))
            assert turn["seconds"] >= 0.8
        bodies = [one.body for one in engine.of("/v1/completions") if one.body["stream"]]
        assert len(bodies) == 3 * 5
        assert all(body["model"] == "small" and body["max_tokens"] == 4 for body in bodies)
    units = {row["figure"].partition(",")[0].partition(" p")[0]: row["unit"] for row in found["rows"]}
    assert (units["TTFT"], units["ITL"], units["good"], units["hit"]) == ("ms", "ms", "share", "share")
    assert units["output tokens/s"] == "tokens/s"
    a, b = (row for row in found["rows"] if row["figure"] == "TTFT p50, ms")
    assert (a["endpoint"], a["ratio"], b["endpoint"], b["limit_of"]) == ("a", None, "b", "a") and b["ratio"] > 0
    assert 1e3 * STEP <= a["low"] <= a["value"] == b["limit"] <= a["high"] and (a["unit"], a["samples"]) == ("ms", 3)
    came = sorted([(at, "a") for at in first.came] + [(at, "b") for at in second.came])
    turns = [(name, len(list(group))) for name, group in groupby(name for _, name in came)]
    assert turns == [("a", 5), ("b", 10), ("a", 10), ("b", 5)], "in turn, and each turn begins with the next one"


def test_requests_come_when_they_are_due_whatever_becomes_of_those_before(
    engines: list[SmallEngine], trace: str
) -> None:
    async def hangs(asked: Asked) -> None:
        if asked.body["stream"]:
            engines[0].came.append(time.monotonic())
            await asked.until_gone()
        else:
            await asked.json({})

    engines[0].answers["/v1/completions"] = hangs
    flags = ["--endpoint", f"a={engines[0].url}", "--endpoint", f"b={engines[1].url}", "--turns", "1"]
    done = run_cli(
        "bench", "traffic", trace, *flags, "--request-seconds", "2", "--block-tokens", "64", "--json", "--scale", "1"
    )
    assert done.returncode == 1 and "all of 5 requests failed: it took more than 2 s" in done.stderr
    found = json.loads(done.stdout)
    assert [one["turns"][0]["failed"] for one in found["endpoints"]] == [5, 0]
    came = [at - engines[0].came[-5] for at in engines[0].came[-5:]]
    assert all(at > 0.2 * number - 0.1 for number, at in enumerate(came)) and came[-1] < 1.9


def test_each_fault_of_an_endpoint_is_one_requests(engines: list[SmallEngine], trace: str) -> None:
    engine = engines[0]
    whole = engine.answers["/v1/completions"]
    faults = iter(["status", "nonsense", "silent", "cut"])

    async def fails(asked: Asked) -> None:
        fault = next(faults, "") if asked.body["stream"] else ""
        if fault == "status":
            await asked.json({"error": {"message": "no"}}, 400)
        elif fault == "nonsense":
            await asked.events(["{nonsense"])
        elif fault == "silent":
            await asked.events([])
        elif fault == "cut":
            await asked.begin_events()
            await asked.event(text_chunk("a"))
        else:
            await whole(asked)

    engine.answers["/v1/completions"] = fails
    command = ("bench", "traffic", trace, "--endpoint", f"a={engine.url}", "--turns", "1", "--block-tokens", "64")
    done = run_cli(*command, "--json")
    found = json.loads(done.stdout)
    (turn,) = found["endpoints"][0]["turns"]
    assert done.returncode == 0, done.stderr
    assert turn["failed"] == 4 and len(turn["errors"]) == 3, turn["errors"]
    assert run_cli(*command, "--check").returncode == 0, "none fails any more"
    faults = iter(["status"])
    done = run_cli(*command, "--check")
    assert done.returncode == 1
    assert done.stderr == "kvstore: target missed: figure failed, endpoint a: 1 requests, wanted <= 0\n"


def test_chats_begin_with_what_they_say(engines: list[SmallEngine], trace: str) -> None:
    found = told(trace, "--endpoint", f"a={engines[0].url}", "--form", "chat", "--turns", "1")
    asked = engines[0].of("/v1/chat/completions")[-2].body
    (message,) = asked["messages"]
    assert message["role"] == "user" and set(word[0] for word in message["content"].split()) == {"w"}
    assert found["endpoints"][0]["turns"][0]["failed"] == 0


def test_a_model_that_an_endpoint_has_not_is_one_line(engines: list[SmallEngine], trace: str) -> None:
    engine = engines[0]
    command = ("bench", "traffic", trace, "--endpoint", f"a={engine.url}", "--block-tokens", "64", "--model", "large")
    assert f"--model 'large'; {engine.url} has 'small'" in error_line(run_cli(*command))

    async def wants_a_key(asked: Asked) -> None:
        await asked.json({"error": "Unauthorized"}, 401)

    engine.answers["/v1/models"] = wants_a_key
    assert "(status 401)" in error_line(run_cli(*command)) and not engine.of("/v1/completions")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "--endpoint NAME=URL"),
        (("--endpoint", "http://127.0.0.1:1"), "NAME=URL"),
        (("--endpoint", "a=127.0.0.1:1"), "address"),
        (("--endpoint", "a=http://10.0.0.7:8000"), "--anywhere"),
        (("--endpoint", "a=http://127.0.0.1:1"), "cannot be reached"),
        (("--endpoint", "a=http://127.0.0.1:1", "--sidecar", "b=http://127.0.0.1:1"), "no --endpoint of that name"),
        (("--engines", "own,other"), "none, own, kvstore, pd"),
        (("--endpoint", "a=http://127.0.0.1:1", "--form", "words"), "tokens, text, chat"),
        (("--endpoint", "a=http://127.0.0.1:1", "--ttft-slo", "soon"), "milliseconds"),
    ],
)
def test_wrong_options_are_one_line(trace: str, arguments: tuple[str, ...], hint: str) -> None:
    assert hint in error_line(run_cli("bench", "traffic", trace, *arguments, "--block-tokens", "64"))
