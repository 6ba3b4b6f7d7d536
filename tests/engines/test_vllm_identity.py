"""What makes a prefix the same prefix, in a real vLLM: salts, adapters and their files; and what is never the same."""

from __future__ import annotations

from typing import Any

import pytest

from engines.session import FORGET, SEED, account_of, apart, tokens

FIRST, SECOND = 1, 2
"""The numbers that the engine gives the adapter."""


*PROMPTS, LAST = apart(3, 330)  # two full blocks, and some
SHORT = [[7, 8, 9]]
ASK = {"do": "generate", "prompts": PROMPTS, "max_tokens": 8}

STEPS: dict[str, tuple[int, set[str], str]] = {
    "plain": (0, {"absent"}, "plain"),
    "plain again": (256, set(), "plain"),
    "not to be read": (0, {"disabled"}, "plain"),  # as vLLM wants it where logprobs of the prompt are asked for
    "salted": (0, {"absent"}, "plain"),
    "salted again": (256, set(), "plain"),
    "another salt": (0, {"absent"}, "plain"),
    "adapted": (0, {"absent"}, "adapted"),
    "adapted again": (256, set(), "adapted"),
    "its files have changed": (0, {"unsupported"}, "adapted"),  # the engine goes on with what it has read
    "read anew": (0, {"absent"}, "read anew"),
    "read anew again": (256, set(), "read anew"),
    "the same files by another number": (256, set(), "read anew"),
    "its files are gone": (0, {"unsupported"}, "read anew"),
}
"""Of each of them: how many tokens of each prompt the store has, why it has no others, and whose answers are right.
What `again` finds was saved by the step before it, of which the engine has forgotten everything."""


def save_and_ask(name: str, **how: Any) -> list[dict[str, Any]]:
    ask = {**ASK, **how}
    return [{"do": "reset"}, {**ask, "as": name}, *FORGET, {**ask, "as": f"{name} again"}]


@pytest.fixture(scope="module")
def told(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    print(f"seed {SEED}")
    path = str(tmp_path_factory.mktemp("adapters") / "mine")
    first = {"adapter": FIRST, "path": path}
    anew = {**first, "anew": True}
    second = {"adapter": SECOND, "path": path}
    steps = [
        *save_and_ask("plain"),
        {**ASK, "as": "own"},
        {"do": "reset"},
        {**ASK, "as": "not to be read", "skip_reading": True},
        *save_and_ask("salted", salt="one"),
        {**ASK, "as": "another salt", "salt": "another"},
        {"do": "adapter", "path": path, "seed": 1},
        {"do": "generate", "prompts": SHORT, "as": "being read", **first},  # whose files are read meanwhile
        {"do": "settle"},
        *save_and_ask("adapted", **first),
        {"do": "adapter", "path": path, "seed": 2},
        {"do": "reset"},
        {**ASK, "as": "its files have changed", **first},
        {"do": "generate", "prompts": SHORT, **anew},
        {"do": "settle"},
        *save_and_ask("read anew", **anew),
        {"do": "overtaken", "prompt": LAST, "max_tokens": 80, "after": 20, "seed": 3, **anew, "as": "overtaken"},
        {"do": "adapter", "path": path, "seed": 2},
        {"do": "generate", "prompts": SHORT, **anew},
        *FORGET,
        {"do": "generate", "prompts": "overtaken", "as": "after overtaken", **anew},
        {"do": "generate", "prompts": SHORT, **second},
        *FORGET,
        {**ASK, "as": "the same files by another number", **second},
        {"do": "run", "command": f"rm -r {path}"},
        {"do": "reset"},
        {**ASK, "as": "its files are gone", **second},
        {"do": "generate", "prompts": PROMPTS[:1], "as": "embedded", "embeddings": True},
        {"do": "settle"},
        {"do": "generate", "prompts": PROMPTS[:1], "as": "embedded again", "embeddings": True},
    ]
    return dict(pair.with_store(steps))


@pytest.fixture(scope="module")
def alone(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same of an engine without a connector: an adapter that was written anew has a number of its own there."""
    path = str(tmp_path_factory.mktemp("adapters") / "theirs")
    steps = [
        {**ASK, "as": "plain"},
        {"do": "adapter", "path": path, "seed": 1},
        {"do": "reset"},
        {**ASK, "as": "adapted", "adapter": FIRST, "path": path},
        {"do": "adapter", "path": path, "seed": 2},
        {"do": "reset"},
        {**ASK, "as": "read anew", "adapter": SECOND, "path": path},
    ]
    return dict(pair.alone(steps))


@pytest.mark.parametrize("step", STEPS)
def test_a_prompt_finds_what_is_the_same_in_everything_and_nothing_else(
    step: str, told: dict[str, Any], alone: dict[str, Any]
) -> None:
    hit, why, whose = STEPS[step]
    for one in told[step]:
        account = account_of(one)
        assert account["hits"].get("dram", 0) == one["cached"] == hit
        assert account["misses"].keys() - {"partial_block", "last_token"} == why
    assert tokens(told[step]) == tokens(alone[whose])


def test_answers_differ_where_prefixes_do(told: dict[str, Any], alone: dict[str, Any]) -> None:
    """Else the test above would say nothing."""
    assert account_of(told["being read"][0])["hits"] == {}
    assert tokens(told["own"]) == tokens(alone["plain"])
    for mine, other in (("adapted", "plain"), ("read anew", "adapted")):
        assert all(one != another for one, another in zip(tokens(alone[mine]), tokens(alone[other]), strict=True))


def test_what_was_computed_after_an_adapter_changed_is_not_stored(told: dict[str, Any]) -> None:
    """The engine reads such an adapter anew in each step: 20 tokens fill no further block, 80 fill one."""
    assert len(told["overtaken"]) == 80
    (account,) = map(account_of, told["after overtaken"])
    assert account["hits"] == {"dram": 256}


def test_embeddings_are_not_cached(told: dict[str, Any]) -> None:
    for (one,) in told["embedded"], told["embedded again"]:
        account = account_of(one)
        assert account["hits"].keys() <= {"engine"} and account["saved_blocks"] == 0
        assert account["misses"].keys() - {"partial_block", "last_token"} == {"unsupported"}
