"""What makes a prefix the same prefix, in a real vLLM: salts, adapters and their files; and what is never the same."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines.session import SEED, apart, named, tokens

FIRST, SECOND = 1, 2
"""The numbers that the engine gives the adapter."""


*PROMPTS, LAST = apart(3, 330)  # two full blocks, and some
SHORT = [[7, 8, 9]]
ASK = {"do": "generate", "prompts": PROMPTS, "max_tokens": 8}


def save_and_ask(name: str, **how: Any) -> list[dict[str, Any]]:
    """The prompts twice: `name`_first, which are saved, and `name`, after the engine has forgotten them."""
    ask = {**ASK, **how}
    return [{"do": "reset"}, {**ask, "as": f"{name}_first"}, {"do": "settle"}, {"do": "reset"}, {**ask, "as": name}]


@pytest.fixture(scope="module")
def told(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One engine's story."""
    print(f"seed {SEED}")
    path = str(tmp_path_factory.mktemp("adapters") / "mine")
    first = {"adapter": FIRST, "path": path}
    anew = {**first, "anew": True}
    second = {"adapter": SECOND, "path": path}
    steps = [
        *save_and_ask("plain"),
        {**ASK, "as": "own"},
        {"do": "reset"},
        {**ASK, "as": "not_read", "skip_reading": True},
        *save_and_ask("salted", salt="one"),
        {**ASK, "as": "other_salt", "salt": "another"},
        {"do": "adapter", "path": path, "seed": 1},
        {"do": "generate", "prompts": SHORT, "as": "being_read", **first},  # whose files are read meanwhile
        {"do": "settle"},
        *save_and_ask("adapted", **first),
        {"do": "adapter", "path": path, "seed": 2},
        {"do": "reset"},
        {**ASK, "as": "changed", **first},
        {"do": "generate", "prompts": SHORT, **anew},
        {"do": "settle"},
        *save_and_ask("anew", **anew),
        {
            "do": "overtaken",
            "prompt": LAST,
            "max_tokens": 80,
            "after": 20,
            "seed": 3,
            **anew,
            "as": "overtaken",
        },
        {"do": "adapter", "path": path, "seed": 2},
        {"do": "generate", "prompts": SHORT, **anew},
        {"do": "settle"},
        {"do": "reset"},
        {"do": "generate", "prompts": "overtaken", "as": "after_overtaken", **anew},
        {"do": "generate", "prompts": SHORT, **second},
        {"do": "settle"},
        {"do": "reset"},
        {**ASK, "as": "renumbered", **second},
        {"do": "run", "command": f"rm -r {path}"},
        {"do": "reset"},
        {**ASK, "as": "gone", **second},
        {"do": "generate", "prompts": PROMPTS[:1], "as": "embedded", "embeddings": True},
        {"do": "settle"},
        {"do": "generate", "prompts": PROMPTS[:1], "as": "embedded_again", "embeddings": True},
    ]
    return named(steps, pair.with_store(steps))


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
        {**ASK, "as": "anew", "adapter": SECOND, "path": path},
    ]
    return named(steps, pair.alone(steps))


def external(told: list[dict[str, Any]]) -> list[int]:
    """Tokens that came from the store; every account adds up."""
    for one in told:
        account = one["kvstore"]
        assert sum(account["hits"].values()) + sum(account["misses"].values()) == account["asked"]
    return [one["kvstore"]["hits"].get("dram", 0) for one in told]


def reasons(told: list[dict[str, Any]]) -> set[str]:
    """Of the misses in front of the last block."""
    return {reason for one in told for reason in one["kvstore"]["misses"]} - {"partial_block", "last_token"}


HIT = [256] * len(PROMPTS)
NONE = [0] * len(PROMPTS)


def test_a_prompt_is_found_again(told: dict[str, Any], alone: dict[str, Any]) -> None:
    """What the others are compared with."""
    assert external(told["plain_first"]) == NONE and external(told["plain"]) == HIT
    assert tokens(told["plain"]) == tokens(told["own"]) == tokens(alone["plain"])


def test_a_prompt_that_is_not_to_be_read_is_computed(told: dict[str, Any], alone: dict[str, Any]) -> None:
    """As vLLM itself wants it where logprobs of the prompt are asked for."""
    assert external(told["not_read"]) == NONE and reasons(told["not_read"]) == {"disabled"}
    assert [one["cached"] for one in told["not_read"]] == NONE
    assert tokens(told["not_read"]) == tokens(alone["plain"])


def test_a_salt_has_prefixes_of_its_own(told: dict[str, Any], alone: dict[str, Any]) -> None:
    assert external(told["salted_first"]) == NONE and reasons(told["salted_first"]) == {"absent"}
    assert external(told["salted"]) == HIT
    assert external(told["other_salt"]) == NONE and reasons(told["other_salt"]) == {"absent"}
    for name in ("salted_first", "salted", "other_salt"):
        assert tokens(told[name]) == tokens(alone["plain"])


def test_an_adapter_has_prefixes_of_its_own(told: dict[str, Any], alone: dict[str, Any]) -> None:
    assert external(told["being_read"]) == [0]
    assert external(told["adapted_first"]) == NONE and reasons(told["adapted_first"]) == {"absent"}
    assert external(told["adapted"]) == HIT
    assert tokens(told["adapted_first"]) == tokens(told["adapted"]) == tokens(alone["adapted"])
    assert all(mine != plain for mine, plain in zip(tokens(told["adapted"]), tokens(alone["plain"]), strict=True))


def test_an_adapter_whose_files_changed_is_not_cached_until_it_is_read_anew(
    told: dict[str, Any], alone: dict[str, Any]
) -> None:
    assert external(told["changed"]) == NONE and reasons(told["changed"]) == {"unsupported"}
    assert tokens(told["changed"]) == tokens(alone["adapted"]), "the engine goes on with what it has read"
    assert external(told["anew_first"]) == NONE and reasons(told["anew_first"]) == {"absent"}
    assert external(told["anew"]) == HIT
    assert tokens(told["anew_first"]) == tokens(told["anew"]) == tokens(alone["anew"])
    assert all(mine != old for mine, old in zip(tokens(told["anew"]), tokens(alone["adapted"]), strict=True))


def test_what_was_computed_after_an_adapter_changed_is_not_stored(told: dict[str, Any]) -> None:
    """The engine reads such an adapter anew in each step: 20 tokens fill no further block, 80 fill one."""
    assert len(told["overtaken"]) == 80
    assert external(told["after_overtaken"]) == [256], told["after_overtaken"]


def test_the_same_files_are_the_same_adapter_by_another_number(told: dict[str, Any], alone: dict[str, Any]) -> None:
    assert external(told["renumbered"]) == HIT
    assert tokens(told["renumbered"]) == tokens(alone["anew"])


def test_an_adapter_whose_files_are_gone_is_not_cached(told: dict[str, Any], alone: dict[str, Any]) -> None:
    assert external(told["gone"]) == NONE and reasons(told["gone"]) == {"unsupported"}
    assert tokens(told["gone"]) == tokens(alone["anew"])


def test_embeddings_are_not_cached(told: dict[str, Any]) -> None:
    for name in ("embedded", "embedded_again"):
        (one,) = told[name]
        assert external([one]) == [0] and reasons([one]) == {"unsupported"} and one["kvstore"]["saved_blocks"] == 0
        assert one["kvstore"]["asked"] == one["prompt_tokens"]
