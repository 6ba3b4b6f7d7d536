"""Frames found on disk in any order become a recovery order; compared with the plainest way to say the same."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvstore.core.recovery import AT_ROOT, ELSEWHERE, recovery_order, split_keys
from tiering.nvme.slab import ENTRY, HELD, entry_of, split_entries
from tiering.nvme.slab_recovery import Found
from tiering.slab_header import SlabHeader
from tiering.tier import SlotClass, place_of

ROOT = b"R" * 32
TOP = (1 << 64) - 1
IMPOSSIBLE = (1 << 63, (1 << 63) + 5, TOP)
"""Generations of no frame: as signed numbers they would come before all others, and their blocks before the parents."""
Frame = tuple[int, bytes, bytes, int, int, int]
"""Part, key, parent, depth, generation, place."""


def found_of(frames: list[Frame], slabs: int, random: Random) -> list[Found]:
    """The frames, spread over slabs of one part each; some slabs hold nothing."""
    found = []
    for part in {frame[0] for frame in frames} | {0}:
        mine = [frame for frame in frames if frame[0] == part]
        random.shuffle(mine)
        for at in range(slabs):
            header = SlabHeader(at, SlotClass(b"t" * 16, b"n" * 32, part, 8192), 40, b"k" * 8, 1, b"u" * 16, b"")
            held = mine[at::slabs]
            entries = b"".join(
                entry_of(key, parent, depth, generation, generation % 100, 2 * generation & TOP, HELD)
                for _, key, parent, depth, generation, _ in held
            )
            table = split_entries(entries) if held else np.empty(0, ENTRY)
            found.append(Found(header, [frame[5] for frame in held], table))
    random.shuffle(found)
    return found


def expected(frames: list[Frame], parts: int, unsound: set[int]) -> tuple[dict[bytes, Any], set[int], set[int]]:
    """Blocks by key, places of what is useless and of what is lost."""
    families: dict[tuple[bytes, int], dict[int, Frame]] = {}
    for frame in frames:
        if frame[4] in IMPOSSIBLE:
            continue
        families.setdefault((frame[1], frame[4]), {})[frame[0]] = frame
    candidates = [
        (key, not any(frame[5] in unsound for frame in family.values()), generation, family)
        for (key, generation), family in families.items()
        if len(family) == parts
    ]
    # The last one of a key counts: the highest generation that is sound, or else the highest.
    candidates.sort(key=lambda one: one[:3])
    whole = {key: [family[part] for part in range(parts)] for key, _, _, family in candidates}
    used = {frame[5] for family in whole.values() for frame in family}
    useless = {frame[5] for frame in frames} - used

    def leads(key: bytes) -> bool:
        """Whether there may be a way to it: it ends at the root, or at what the store may know."""
        _, _, parent, depth, _, _ = whole[key][0]
        if depth == 0:
            return parent == ROOT
        if parent in whole and whole[parent][0][3] + 1 == depth:
            return leads(parent)
        return True

    kept = {key: family for key, family in whole.items() if leads(key)}
    lost = {frame[5] for key, family in whole.items() if key not in kept for frame in family}
    return kept, useless, lost


@pytest.mark.parametrize("seed", range(60))
def test_it_says_what_the_frames_say(seed: int) -> None:
    random = Random(seed)
    parts, blocks, there = random.randrange(1, 4), random.randrange(0, 40), random.choice([0.97, 0.7])
    keys = [random.randbytes(32) for _ in range(blocks)]
    for twin in range(1, blocks):  # first words that are the same
        if random.random() < 0.05:
            keys[twin] = keys[twin - 1][:8] + keys[twin][8:]
    depths: list[int] = []
    frames: list[Frame] = []
    places = iter(random.sample(range(1000), 4 * parts * blocks))
    generations = iter(random.sample(range(1, 1000), 3 * blocks))
    for at, key in enumerate(keys):
        above = random.randrange(-1, at)
        parent, depth = (keys[above], depths[above] + 1) if above >= 0 else (ROOT, 0)
        odd = random.random()
        if odd < 0.05:
            parent = random.randbytes(32)  # lost, or known to the store
        elif odd < 0.1:
            depth += 1
        elif odd < 0.13:
            parent = key  # no key is a hash over itself
        depths.append(depth)
        for _ in range(1 + (random.random() < 0.3)):
            generation = next(generations)
            for part in range(parts):
                if random.random() < there:
                    frames.append((part, key, parent, depth, generation, place_of(1, next(places))))
        if random.random() < 0.1:
            frames += [
                (part, key, parent, depth, IMPOSSIBLE[at % 3], place_of(2, at * parts + part)) for part in range(parts)
            ]
    unsound = {frame[5] for frame in frames if random.random() < 0.2}
    found = found_of(frames, random.randrange(1, 4), random)
    got, useless, lost = recovery_order(found, parts, ROOT, unsound.isdisjoint)
    kept, want_useless, want_lost = expected(frames, parts, unsound)
    assert sorted(useless) == sorted(want_useless), f"seed {seed}"
    assert sorted(lost) == sorted(want_lost), f"seed {seed}"
    names = split_keys(got.keys)
    assert sorted(names) == sorted(kept) and len(got) == len(names)
    newest: dict[bytes, int] = {}
    for at in reversed(range(len(names))):
        key, parent = names[at], int(got.parents[at])
        _, _, parent_key, depth, generation, _ = kept[key][0]
        assert (got.depths[at], got.generations[at]) == (depth, generation)
        assert (got.priorities[at], got.expires_at[at]) == (generation % 100, 2 * generation)
        assert [column[at] for column in got.places] == [frame[5] for frame in kept[key]]
        assert got.parent_keys[at].tobytes() == parent_key
        newest[key] = max(newest.get(key, 0), generation)
        if parent >= 0:
            assert parent < at and names[parent] == parent_key, "an ancestor comes first"
            newest[parent_key] = max(newest.get(parent_key, 0), newest[key])
        elif depth == 0:
            assert parent == AT_ROOT and parent_key == ROOT
        else:
            assert parent == ELSEWHERE
    order = [newest[key] for key in names]
    assert order == sorted(order, reverse=True), "the chain that was stored last comes first"
