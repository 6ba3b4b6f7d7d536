"""Traces: read as they were published, named by whole chains, and refused with a line that says where and why."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block.errors import BadInput
from kvstore.insight.trace import Trace, read_trace
from recorded import line, made_of, recorded

PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("name", "requests", "blocks", "distinct", "full"),
    [
        ("mooncake_conversation", 12_031, 288_500, 182_790, 276_491),
        ("mooncake_synthetic", 3_993, 121_877, 43_924, 117_888),
    ],
)
def test_the_public_traces_have_what_was_counted(
    name: str, requests: int, blocks: int, distinct: int, full: int
) -> None:
    trace = recorded(name)
    assert (trace.requests, len(trace.blocks), trace.distinct_blocks) == (requests, blocks, distinct)
    assert trace.block_tokens == 512
    without = trace.without_partial()
    assert len(without.blocks) == full and without.requests == requests
    assert (without.input_tokens == trace.input_tokens).all()


@given(prompts=PROMPTS)
def test_equal_numbers_are_equal_prefixes(prompts: list[list[int]]) -> None:
    trace = made_of(*prompts)
    names: dict[int, tuple[int, ...]] = {}
    for ids, chain in zip(prompts, trace.chains(), strict=True):
        assert len(chain) == len(ids)
        for depth, block in enumerate(chain):
            assert names.setdefault(block, tuple(ids[: depth + 1])) == tuple(ids[: depth + 1])
    assert len(set(names.values())) == len(names) == trace.distinct_blocks


@given(prompts=PROMPTS, missing=st.data())
def test_without_partial_blocks_every_block_is_full(prompts: list[list[int]], missing: st.DataObject) -> None:
    tokens = [16 * len(ids) - (missing.draw(st.integers(0, 15)) if ids else 0) for ids in prompts]
    whole = read_trace("made up", [line(ids, length) for ids, length in zip(prompts, tokens, strict=True)], 16)
    trace = whole.without_partial()
    for ids, length, chain in zip(prompts, tokens, trace.chains(), strict=True):
        assert len(chain) == length // 16 <= len(ids)
    kept = [ids[: length // 16] for ids, length in zip(prompts, tokens, strict=True)]
    same = made_of(*kept)
    assert trace.distinct_blocks == same.distinct_blocks
    pairs = set(zip(trace.blocks.tolist(), same.blocks.tolist(), strict=True))
    assert len(pairs) == trace.distinct_blocks, "numbers differ, and mean the same"


def test_empty_lines_are_passed_over_and_the_block_size_is_found() -> None:
    trace = read_trace("made up", ["", line(range(40), 625), "\n", line(range(3), 40)])
    assert trace.block_tokens == 16 and trace.requests == 2 and trace.input_tokens.tolist() == [625, 40]


def test_requests_are_put_in_the_order_of_their_timestamps() -> None:
    """Those of one time stay as they stand, and blocks are numbered as they are then seen."""
    lines = [line([stamp, 9], timestamp=stamp) for stamp in (5, 7, 6, 0, 7)]
    assert (ordered := read_trace("made up", lines, 16)).out_of_order == 2
    assert ordered.timestamps_ms.tolist() == [0, 5, 6, 7, 7]
    assert list(ordered.chains()) == [[0, 1], [2, 3], [4, 5], [6, 7], [6, 7]]
    assert ordered.without_partial().out_of_order == 2
    in_order = read_trace("made up", sorted(lines, key=lambda one: json.loads(one)["timestamp"]), 16)
    assert in_order.out_of_order == 0 and in_order.blocks.tolist() == ordered.blocks.tolist()
    # A line is named as it stands in the file.
    with pytest.raises(BadInput, match="made up, line 2: 3 hash_ids"):
        read_trace("made up", [line([1], timestamp=9), line([1, 2, 3], 16, timestamp=1)], 16)


def test_a_trace_without_a_block_has_none() -> None:
    trace = made_of([], [])
    assert trace.distinct_blocks == 0 and list(trace.chains()) == [[], []]
    assert isinstance(trace.without_partial(), Trace)


GOOD = json.loads(line([1, 2]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "list in place of an object"),
        (json.dumps(GOOD | {"hash_ids": "12"}), "hash_ids has to be a list"),
        (json.dumps(GOOD | {"hash_ids": [1.5, 2]}), "hash_ids has to be a list"),
        (json.dumps(GOOD | {"hash_ids": [True, 2]}), "hash_ids has to be a list"),
        (json.dumps(GOOD | {"hash_ids": [1, 10**23]}), f"hash_ids has {10**23}; give whole numbers from -46116860"),
        (json.dumps(GOOD | {"hash_ids": [-(1 << 62)]}), f"hash_ids has {-(1 << 62)}; give whole numbers from"),
        (json.dumps(GOOD | {"input_length": -1}), "input_length=-1"),
        (json.dumps(GOOD | {"output_length": "1"}), "output_length='1'"),
        (json.dumps(GOOD | {"input_length": 1 << 31}), "input_length=2147483648; give tokens, 0 to 2147483647"),
        (json.dumps(GOOD | {"input_length": "x" * 10_000}), "...; give tokens"),
        (json.dumps({key: value for key, value in GOOD.items() if key != "timestamp"}), "timestamp=None"),
        (json.dumps(GOOD | {"timestamp": -5}), "timestamp=-5"),
        (json.dumps(GOOD | {"timestamp": float("nan")}), "timestamp=nan"),
    ],
)
def test_a_line_that_is_no_request_is_named(text: str, says: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_trace("some.jsonl", [line([1, 2]), text])
    assert str(refused.value).startswith("some.jsonl, line 2: ") and says in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_lengths_that_do_not_fit_are_named() -> None:
    with pytest.raises(BadInput, match=r"some.jsonl, line 4: 3 hash_ids and 16 tokens, which are 1 blocks of 16; give"):
        read_trace("some.jsonl", ["", line([1]), "\n", line([1, 2, 3], 16)], 16)
    right, wrong = line(range(40), 625), line([1, 2], 5000)
    says = r"some.jsonl, line 3: 2 hash_ids and 5000 tokens, which are 313 blocks of 16; that size fits 3 of 4 lines"
    with pytest.raises(BadInput, match=says):
        read_trace("some.jsonl", [right, right, wrong, right])
    with pytest.raises(BadInput, match=r"line 1: 3 hash_ids .* 0 of 1 lines .*: give --block-tokens, or mend the line"):
        read_trace("some.jsonl", [line([1, 2, 3], 16)])
    with pytest.raises(BadInput, match=r"blocks of 16 or 32 .* tokens fit its lengths; give --block-tokens"):
        read_trace("some.jsonl", [line([1], 16)])
    with pytest.raises(BadInput, match="has no request in it"):
        read_trace("some.jsonl", ["\n"])
