"""`kvstore prime` before a small server that accounts as our connector does: what is asked and reported, and faults."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.block.errors import BadInput
from kvstore.openai.prime import line_prompts
from openai_api.small_openai import Asked, SmallOpenAi
from test_cli import error_line, run_cli

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class StoringEngine(SmallOpenAi):
    """Of each new prompt it saves two blocks of 128 tokens, which it counts when it is asked again."""

    def __init__(self) -> None:
        super().__init__()
        self.saved, self.coming = 7, 0
        self.seen: set[bytes] = set()
        self.account: dict[str, Any] | None = {"block_tokens": 128, "put_reasons": {}}
        self.answers |= {
            "/v1/models": self._models,
            COMPLETIONS: self._answer,
            CHAT: self._answer,
            "/metrics": self._metrics,
        }

    async def _models(self, asked: Asked) -> None:
        await asked.json({"data": [{"id": "small"}]})

    async def _metrics(self, asked: Asked) -> None:
        await asked.page(f'kvstore_vllm_saved_blocks_total{{engine="0"}} {self.saved}\n')

    async def _answer(self, asked: Asked) -> None:
        self.saved, self.coming = self.saved + self.coming, 0
        if not asked.body["kv_transfer_params"]["kvstore"].get("store", True):
            await asked.json({})
            return
        prompt = json.dumps(asked.body.get("prompt") or asked.body["messages"]).encode()
        hits = {"dram": 256} if prompt in self.seen else {}
        self.coming += 0 if hits else 2
        self.seen.add(prompt)
        misses = {"partial_block": 44} if hits else {"absent": 256, "partial_block": 44}
        account = {"asked": 300, "hits": hits, "misses": misses, **(self.account or {})}
        await asked.json({"choices": [], "kv_transfer_params": {"kvstore": account} if self.account else None})


@pytest.fixture
def engine() -> Iterator[StoringEngine]:
    made = StoringEngine()
    yield made
    made.close()


def test_prompts_of_all_kinds_are_computed_once_and_kept(engine: StoringEngine, tmp_path: Path) -> None:
    lines = [
        {"prompt": "as it is"},
        {"prompt": [1, 2, 3], "priority": 50},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "ttl": 60},
        {"prompt": "as it is"},
    ]
    with gzip.open(tmp_path / "some.jsonl.gz", "wt") as packed:
        packed.write("\n\n".join(map(json.dumps, lines)))
    (tmp_path / "document.txt").write_text("\ufeffA document.\n")
    files = [str(tmp_path / name) for name in ("some.jsonl.gz", "document.txt")]
    done = run_cli("prime", *files, "--engine", engine.url + "/v1", "--ttl", "3600", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {**told, "seconds": 0} == {
        "prompts": 5,
        "tokens": 1500,
        "there": 256,
        "engine": 0,
        "computed": 4 * 300 + 44,
        "stored_blocks": 8,
        "stored_tokens": 1024,
        "block_tokens": 128,
        "seconds": 0,
        "failed": [],
        "notes": {},
    }
    of = [one.body for one in engine.asked if one.method == "POST"]
    asked = [one for one in of if one["kv_transfer_params"]["kvstore"].get("store", True)]
    assert [one["kv_transfer_params"]["kvstore"] for one in asked] == [
        {"ttl": 3600.0},
        {"priority": 50},
        {"ttl": 60},
        {"ttl": 3600.0},
        {"ttl": 3600.0},
    ]
    assert all(one["max_tokens"] == 1 and one["model"] == "small" and one["stream"] is False for one in of)
    assert [one.get("prompt") for one in asked[:2]] == ["as it is", [1, 2, 3]]
    assert asked[2]["messages"] == lines[2]["messages"] and asked[2]["add_generation_prompt"] is False
    assert asked[4]["messages"] == [{"role": "system", "content": "A document.\n"}]


def test_what_the_store_says_is_shown(engine: StoringEngine, tmp_path: Path) -> None:
    engine.account = {"block_tokens": 128, "put_reasons": {"quota": 1}, "ignored": ["odd; allowed: store"]}
    (tmp_path / "a.md").write_text("text")
    done = run_cli("prime", str(tmp_path / "a.md"), "--engine", engine.url, "--priority", "9", "--as", "prompt")
    assert done.returncode == 0, done.stderr
    assert (
        "256 tokens in 2 blocks" in done.stdout and "not stored: quota" in done.stdout and "odd; allowed" in done.stdout
    )
    assert engine.of(COMPLETIONS)[0].body["kv_transfer_params"] == {"kvstore": {"priority": 9}}


def test_an_engine_without_a_store_and_prompts_that_fail_are_named(engine: StoringEngine, tmp_path: Path) -> None:
    async def refuses(asked: Asked) -> None:
        await asked.json({"error": {"message": "this is too long"}}, 400)

    engine.account = None
    engine.answers[CHAT] = refuses
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "b.txt").write_text("b")
    done = run_cli("prime", str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt"), "--engine", engine.url)
    assert done.returncode == 1
    assert "a.jsonl, line 1: the engine says nothing of a store" in done.stderr
    assert "b.txt: 400:" in done.stderr and "too long" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "{",
        '{"prompt": ""}',
        '{"prompt": []}',
        '{"prompt": [1.5]}',
        '{"prompt": [-1]}',
        '{"messages": []}',
        '{"messages": ["a"]}',
        '{"prompt": "a", "messages": [{}]}',
        '{"prompt": "a", "max_tokens": 5}',
        '{"prompt": "a", "ttl": 0}',
        '{"prompt": "a", "ttl": true}',
        '{"prompt": "a", "priority": 101}',
        '{"prompt": ' + "[" * 100_000,
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str) -> None:
    with pytest.raises(BadInput, match="f, line 2"):
        list(line_prompts("f", ['{"prompt": "good"}', line]))


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.txt").write_text(" ")
    (tmp_path / "empty.jsonl").write_text("\n")
    file = str(tmp_path / "a.txt")
    for arguments, hint in (
        ((file, "--engine", "http://127.0.0.1:1"), "cannot be reached"),
        ((file, "--engine", "127.0.0.1:1"), "give an address"),
        ((file, "--engine", "http://127.0.0.1:1", "--as", "tool"), "system, user, prompt"),
        ((file, "--engine", "http://127.0.0.1:1", "--ttl", "-1"), "seconds above 0"),
        ((str(tmp_path / "empty.txt"), "--engine", "http://127.0.0.1:1"), "empty.txt is empty"),
        ((str(tmp_path / "empty.jsonl"), "--engine", "http://127.0.0.1:1"), "no prompt in it"),
        ((str(tmp_path / "absent"), "--engine", "http://127.0.0.1:1"), "No such file"),
    ):
        assert hint in error_line(run_cli("prime", *arguments))
