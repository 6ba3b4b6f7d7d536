"""A disk that is full for real: a tmpfs, which something else fills up while the store runs.

What cannot be made durable says why, the rest goes on, what was durable stays; and when there is room again everything
works again, without a restart.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.block.account import MissReason
from kvstore.config import Limits
from model.store_model import SHARDED, WHOLE, Prompt
from simulation.two_tiers import RealDisk, Sizes, bugs, load, open_two_tiers, put, wait_until_idle
from small_disk import fill, small_disk

SIZES = Sizes(dram=1 << 20, nvme=4 << 20, slab=256 << 10)
LIMITS = Limits(close_seconds=5)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, 6 << 20) as mount:
        yield mount


@pytest.mark.slow
@pytest.mark.parametrize("left_bytes", [0, 3 * 4096, 300 << 10])
def test_a_disk_gets_full_and_has_room_again(disk: Path, left_bytes: int) -> None:
    real = RealDisk(disk / "kv")
    opened = open_two_tiers(disk / "kv", real, SIZES, LIMITS)
    assert opened.store.warmed(60)
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", SHARDED)
    first = [Prompt((number, 1)) for number in range(8)]
    assert {put(space, prompt, "disk") for prompt in first} == {None}
    filler = fill(disk)
    os.truncate(filler, max(0, filler.stat().st_size - left_bytes))
    refused = {put(other, Prompt((90 + number, 1)), "disk") for number in range(8)}
    assert refused <= {MissReason.PINNED_FULL, MissReason.TIER_DOWN}, "there is no room for a slab of each part"
    opened.core.evict(1000)
    assert [load(space, prompt) for prompt in first] == [(2, None)] * 8, "and nothing went for them in vain"
    reasons: Counter[MissReason | None] = Counter()
    acknowledged = []
    for number in range(40):
        prompt = Prompt((100 + number, 1))
        reason = put((space, other)[number % 2], prompt, "disk")
        reasons[reason] += 1
        if reason is None:
            acknowledged.append(((space, other)[number % 2], prompt))
        assert put(space, Prompt((200 + number, 1))) is None, "volatile puts go on"
        assert load(space, Prompt((200 + number, 1))) == (2, None)
        opened.core.check()
    print(dict(reasons), opened.core.usage().counters)
    assert set(reasons) <= {None, MissReason.PINNED_FULL, MissReason.TIER_DOWN}
    assert left_bytes or reasons.total() > reasons[None], "on a full disk not everything can be made durable"
    wait_until_idle(opened.core)
    assert not bugs(opened.core), bugs(opened.core)
    kept = [one for one in [*((space, prompt) for prompt in first), *acknowledged] if one[0].match(one[1]).blocks == 2]
    for owner, prompt in kept:
        assert load(owner, prompt) == (2, None), "what the disk has can be read"
    filler.unlink()
    opened.clock.advance(60)
    put(space, Prompt((300, 1)), "disk")  # an open breaker finds out
    wait_until_idle(opened.core)
    for number in range(10):
        assert put(space, Prompt((400 + number, 1)), "disk") is None, "there is room again"
        assert put(other, Prompt((400 + number, 1)), "disk") is None
    opened.core.check()
    opened.close()
    opened = open_two_tiers(disk / "kv", RealDisk(disk / "kv"), SIZES, LIMITS)
    assert opened.store.warmed(60)
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", SHARDED)
    for number in range(10):
        for owner in (space, other):
            assert load(owner, Prompt((400 + number, 1))) == (2, None)
    opened.core.check()
    opened.close()


def test_a_disk_that_is_full_at_the_end_and_at_the_start(disk: Path) -> None:
    """It can be closed and opened again on a full disk, and has what was durable."""
    opened = open_two_tiers(disk / "kv", RealDisk(disk / "kv"), SIZES, LIMITS)
    assert opened.store.warmed(60)
    space = opened.namespace("a", WHOLE)
    prompts = [Prompt((number, 1)) for number in range(8)]
    assert {put(space, prompt, "disk") for prompt in prompts} == {None}
    filler = fill(disk)
    assert {put(space, Prompt((100 + number, 1))) for number in range(8)} == {None}
    opened.close()
    for _ in range(2):
        opened = open_two_tiers(disk / "kv", RealDisk(disk / "kv"), SIZES, LIMITS)
        assert opened.store.warmed(60)
        space = opened.namespace("a", WHOLE)
        for prompt in prompts:
            assert load(space, prompt) == (2, None)
        opened.core.check()
        opened.close()
    filler.unlink()
    opened = open_two_tiers(disk / "kv", RealDisk(disk / "kv"), SIZES, LIMITS)
    space = opened.namespace("a", WHOLE)
    assert opened.store.warmed(60) and put(space, Prompt((400, 1)), "disk") is None
    opened.close()
