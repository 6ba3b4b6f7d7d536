"""At which boundaries a recurrent state is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.errors import BadInput
from kvstore.block.states import DEFAULT_SHARE, StatePolicy

QWEN = StatePolicy(784, 153_944_064, 65_536)
"""Qwen3.5-27B in vLLM: blocks of 784 tokens."""
ENDS = StatePolicy(64, 153_944_064, 65_536, 0)


def test_states_between_ends_take_no_more_than_the_share_of_the_kv() -> None:
    assert QWEN.every_tokens == 24 * 784
    assert QWEN.every_tokens * QWEN.kv_bytes_per_token * DEFAULT_SHARE >= QWEN.state_bytes
    assert (QWEN.every_tokens - 784) * QWEN.kv_bytes_per_token * DEFAULT_SHARE < QWEN.state_bytes
    assert StatePolicy(64, 153_944_064, 0).every_tokens == ENDS.every_tokens == 0


def test_a_prompt_keeps_the_deepest_block_that_an_engine_may_offer() -> None:
    assert ENDS.wanted(0, 200, 200) == (192,)
    assert ENDS.wanted(0, 192, 192) == (128,)  # its last token is computed
    assert ENDS.wanted(0, 60, 60) == ()
    assert ENDS.wanted(192, 200, 200) == ()  # from there on it was loaded


def test_an_answer_keeps_its_deepest_block_once_it_ends() -> None:
    assert ENDS.wanted(0, 500, 200) == (192,)
    assert ENDS.wanted(0, 500, 200, end=500) == (192, 448)
    assert ENDS.wanted(0, 201, 200, end=201) == (192,)


def test_where_prompts_part_a_state_is_kept_for_the_next() -> None:
    assert ENDS.wanted(0, 400, 400, parted_at=130) == (128, 384)
    assert ENDS.wanted(128, 400, 400, parted_at=128) == (384,)  # a state was found there


def test_states_between_lie_at_the_same_places_whatever_was_found() -> None:
    every = QWEN.every_tokens
    assert QWEN.wanted(0, 3 * every, 1 << 30) == (every, 2 * every, 3 * every)
    assert QWEN.wanted(every, 2 * every + 1, 1 << 30) == (2 * every,)
    assert QWEN.wanted(every - 1, every, 1 << 30) == (every,)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(1, 9000), st.integers(0, 9000))
def test_steps_ask_for_what_the_whole_asks_for(steps: list[int], prompt: int, parted: int) -> None:
    policy = StatePolicy(64, 1 << 20, 1 << 10)
    found: list[int] = []
    first = 0
    for step in steps:
        found += policy.wanted(first, first + step, prompt, parted_at=parted, end=sum(steps))
        first += step
    assert tuple(found) == policy.wanted(0, first, prompt, parted_at=parted, end=first)
    assert all(one % 64 == 0 for one in found)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("block_tokens", 0),
        ("block_tokens", 16385),
        ("state_bytes", 0),
        ("kv_bytes_per_token", -1),
        ("state_bytes", 1.5),
    ],
)
def test_sizes_that_cannot_be_are_refused(field: str, given: object) -> None:
    fields: dict[str, object] = {"block_tokens": 64, "state_bytes": 1, "kv_bytes_per_token": 1}
    with pytest.raises(BadInput, match=f"{field}={given}; give a whole number"):
        StatePolicy(**{**fields, field: given})  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 64.5, float("nan"), "half"])
def test_a_share_that_cannot_be_is_refused(share: object) -> None:
    with pytest.raises(BadInput, match="for states; give their bytes for each byte of KV, 0 to 64"):
        StatePolicy(64, 1, 1, share)  # type: ignore[arg-type]
