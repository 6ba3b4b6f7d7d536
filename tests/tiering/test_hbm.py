"""The pool of decoded pages: bounded, least recently used out first, never two blocks in one slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.hbm import HbmPool


def _fill(pool: HbmPool, key: bytes, value: float) -> None:
    memory = pool.put(key)
    if memory is not None:
        memory.fill_(value)


def test_a_pool_too_small_for_one_block_holds_nothing() -> None:
    pool = HbmPool("cpu", 1024, torch.float32, capacity_bytes=100)
    assert pool.put(b"key") is None and pool.get(b"key") is None
    assert pool.usage().capacity_blocks == 0


def test_leading_counts_from_the_first_key_and_changes_nothing() -> None:
    pool = HbmPool("cpu", 1, torch.float32, capacity_bytes=3 * 4)
    for key in (b"a", b"b", b"d"):
        _fill(pool, key, 0)
    assert pool.leading([b"a", b"b", b"c", b"d"]) == 2
    assert pool.leading([b"x", b"a"]) == 0
    _fill(pool, b"e", 0)
    assert pool.leading([b"a"]) == 0, "looking did not make `a` recent"


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(["put", "get", "discard", "clear"]), st.integers(0, 8)), max_size=60),
)
def test_the_pool_is_a_bounded_lru(capacity: int, steps: list[tuple[str, int]]) -> None:
    pool = HbmPool("cpu", 2, torch.float32, capacity_bytes=capacity * 8)
    model: dict[bytes, int] = {}
    for action, number in steps:
        key = b"%d" % number
        if action == "put":
            _fill(pool, key, number)
            if capacity:
                model.pop(key, None)
                model[key] = number
                if len(model) > capacity:
                    del model[next(iter(model))]
        elif action == "get":
            found = pool.get(key)
            assert (found is not None) == (key in model)
            if found is not None:
                assert found.tolist() == [number, number]
                model[key] = model.pop(key)
        elif action == "discard":
            pool.discard(key)
            model.pop(key, None)
        else:
            pool.clear()
            model.clear()
        pool.check()
        assert pool.usage().blocks == len(model)
