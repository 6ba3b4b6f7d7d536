"""What a leaving node offers to others: the chunks that several requests named, each with its ancestors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.pool.directory import CHUNK_BLOCKS

LEAVING_SECONDS = 2.0
"""For all of it; a supervisor kills a transfer agent 3 s after SIGTERM."""
MOST_OFFERED_CHUNKS, MOST_OFFERED_BYTES = 64, 256 << 20
"""By a leaving node; the latter also bounds what is taken from one offer."""
MOST_OFFERED_BLOCKS = MOST_OFFERED_CHUNKS * CHUNK_BLOCKS
HOT_USES = 2


def hottest(
    chains: Sequence[tuple[bytes, list[bytes]]], uses: Callable[[bytes], int]
) -> list[tuple[bytes, list[bytes]]]:
    """Namespace and leading keys of chains, of the hottest chunks only; the hottest chain first. uses: how often a key
    was named, at least as often as the keys behind it."""
    chunks: dict[tuple[bytes, bytes], tuple[int, int]] = {}  # by its last key: how hot, and how deep
    for space, keys in chains:
        for end in _ends(keys):
            count = uses(keys[end - 1])
            if count >= HOT_USES:
                chunks[space, keys[end - 1]] = -count, end
    chosen = set(sorted(chunks, key=lambda one: chunks[one])[:MOST_OFFERED_CHUNKS])
    leading: dict[tuple[bytes, bytes], list[bytes]] = {}
    for space, keys in chains:
        most = 0
        for end in _ends(keys):
            if (space, keys[end - 1]) not in chosen:
                break
            most = end
        if most:
            leading[space, keys[most - 1]] = keys[:most]
    return [(one[0], leading[one]) for one in sorted(leading, key=lambda one: chunks[one])]


def _ends(keys: Sequence[bytes]) -> list[int]:
    return sorted({*range(CHUNK_BLOCKS, len(keys), CHUNK_BLOCKS), len(keys)})
