"""The recovery order: the frames found on disk, sorted into the order in which a running store takes them in.

Frames are found slab by slab, in any order. A recovery order pairs the parts of each block, leaves out blocks without a
way to them, and sorts the rest: the most recently stored chain first, an ancestor before its descendants. So a store
can take it in piece by piece: at any moment it has complete chains, and the most recent prompts are served first.

Pure but for `is_sound`, and columns throughout: a million blocks take part of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvstore.core.rows.index import Column
from tiering.frame import KEY_BYTES, MAX_BLOCK_INDEX, MAX_NUMBER
from tiering.nvme.slab_recovery import Found

AT_ROOT, ELSEWHERE = -1, -2
"""A parent's position where it has none: a first block; a parent that was not found on disk."""

_WORDS = KEY_BYTES // 8


@dataclass(frozen=True)
class RecoveryOrder:
    """Columns, one entry per block. parents: positions in this very order, each before its child, or one of the two
    above. parent_keys: of parents that are elsewhere. places: one column per part."""

    keys: Column
    parents: Column
    parent_keys: Column
    depths: Column
    generations: Column
    priorities: Column
    expires_at: Column
    places: list[Column]

    def __len__(self) -> int:
        return len(self.keys)


def recovery_order(
    found: Sequence[Found], parts: int, root: bytes, is_sound: Callable[[Sequence[int]], bool]
) -> tuple[RecoveryOrder, list[int], list[int]]:
    """The blocks of one namespace in order; the places of superseded or incomplete frames; those of blocks without a
    way to them.

    A block is whole if all its parts are there with one generation; of several such generations the highest counts.
    root: the parent key of first blocks. is_sound: asked, where there are several generations, whether the frames at
    these places pass their checks.
    """
    found, impossible = _possible(found)
    places = np.concatenate([np.asarray(one.places, np.int64) for one in found])
    part_of = np.repeat([one.header.slot_class.part for one in found], [len(one.places) for one in found])
    keys, parent_keys = _words(found, "key"), _words(found, "parent")
    generations = _column(found, "generation", np.int64)
    chosen, useless = _pair(keys, generations, places, part_of, parts, is_sound)
    depths = _column(found, "block_index", np.int64)
    # From here on one entry per block, that of part 0, in their order on disk, where neighbours are often one chain.
    at = chosen[:, 0]
    parents = _parents(keys[at], parent_keys[at], depths[at], np.frombuffer(root, np.uint64))
    order, lost = _order(parents, depths[at], generations[at])
    position = np.full(len(at) + 2, -1, np.int64)
    position[order] = np.arange(len(order))
    position[AT_ROOT], position[ELSEWHERE] = AT_ROOT, ELSEWHERE
    at = at[order]
    blocks = RecoveryOrder(
        keys[at].view(f"V{KEY_BYTES}").ravel(),
        position[parents[order]],
        parent_keys[at].view(f"V{KEY_BYTES}").ravel(),
        depths[at],
        generations[at],
        _column(found, "priority", np.int64)[at],
        _column(found, "expires_at", np.int64)[at],
        [places[chosen[order, part]] for part in range(parts)],
    )
    return blocks, impossible + useless, places[chosen[lost]].ravel().tolist()


def _possible(found: Sequence[Found]) -> tuple[list[Found], list[int]]:
    kept, impossible = [], []
    for one in found:
        entries = one.entries
        wrong = (entries["generation"] > MAX_NUMBER) | (entries["expires_at"] > MAX_NUMBER)
        wrong |= entries["block_index"] > MAX_BLOCK_INDEX
        if wrong.any():
            at = np.asarray(one.places, np.int64)
            impossible += at[wrong].tolist()
            one = one._replace(places=at[~wrong].tolist(), entries=entries[~wrong])
        kept.append(one)
    return kept, impossible


def split_keys(column: Column) -> list[bytes]:
    """A column of keys, one by one."""
    keys: list[bytes] = column.tolist()
    return keys


def _column(found: Sequence[Found], name: str, kind: type[np.signedinteger[Any]]) -> Column:
    return np.concatenate([one.entries[name].astype(kind) for one in found])


def _words(found: Sequence[Found], name: str) -> Column:
    """Keys as rows of integers, which numpy compares much faster."""
    return np.concatenate([one.entries[name] for one in found]).view(np.uint64).reshape(-1, _WORDS)


def _pair(
    keys: Column,
    generations: Column,
    places: Column,
    part_of: Column,
    parts: int,
    is_sound: Callable[[Sequence[int]], bool],
) -> tuple[Column, list[int]]:
    """For each whole block the entries of its parts, one row per block; and the places of all other entries.

    Keys are outputs of a keyed hash, so their first word tells all but a few apart.
    """
    order = np.argsort(keys[:, 0])
    first = keys[order, 0]
    starts = np.flatnonzero(np.r_[True, first[1:] != first[:-1]]) if len(first) else np.empty(0, np.int64)
    sizes = np.diff(np.r_[starts, len(first)])
    groups = order[starts[sizes == parts][:, None] + np.arange(parts)]
    if parts > 1:
        groups = np.take_along_axis(groups, np.argsort(part_of[groups], axis=1), axis=1)
    plain = np.ones(len(groups), bool)
    for part in range(1, parts):
        mine = groups[:, part]
        plain &= (part_of[mine] == part) & _equal(keys, mine, keys, groups[:, 0])
        plain &= generations[mine] == generations[groups[:, 0]]
    plain &= part_of[groups[:, 0]] == 0
    chosen = groups[plain]
    if chosen.size == len(keys):
        return chosen[np.argsort(chosen[:, 0])], []
    rest = np.ones(len(keys), bool)
    rest[chosen.ravel()] = False
    more, useless = _pair_slowly(keys, generations, places, part_of, parts, np.flatnonzero(rest).tolist(), is_sound)
    chosen = np.concatenate([chosen, more])
    return chosen[np.argsort(chosen[:, 0])], places[useless].tolist()


def _pair_slowly(
    keys: Column,
    generations: Column,
    places: Column,
    part_of: Column,
    parts: int,
    at: list[int],
    is_sound: Callable[[Sequence[int]], bool],
) -> tuple[Column, list[int]]:
    """The same for entries that do not pair at first sight: a part is missing, or a block was stored twice.

    A generation that is not whole, or not sound, does not hide older ones: its write may have been cut short, and the
    index that knew so may be gone. Returns entries in both cases.
    """
    frames: list[dict[bytes, dict[int, int]]] = [{} for _ in range(parts)]  # of each part: key -> generation -> entry
    for one in at:
        frames[part_of[one]].setdefault(keys[one].tobytes(), {})[int(generations[one])] = one
    whole = []
    for key, mine in frames[0].items():
        common = sorted(set(mine).intersection(*(part.get(key, ()) for part in frames[1:])), reverse=True)
        families = [[part[key][generation] for part in frames] for generation in common]
        if len(families) > 1:
            families = [next((one for one in families if is_sound(places[one].tolist())), families[0])]
        whole += families
    used = {entry for family in whole for entry in family}
    useless = [entry for entry in at if entry not in used]
    return np.array(whole, np.int64).reshape(-1, parts), useless


def _parents(keys: Column, parent_keys: Column, depths: Column, root: Column) -> Column:
    if not len(keys):
        return np.empty(0, np.int64)
    by_word = np.argsort(keys[:, 0])
    words, sought = keys[by_word, 0], np.ascontiguousarray(parent_keys[:, 0])
    order = np.argsort(sought)  # sorted, so that successive searches hit nearby memory
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.searchsorted(words, sought[order])
    ranks[ranks == len(keys)] = 0
    parents = by_word[ranks]
    same = _equal(keys, parents, parent_keys, slice(None))
    for child in np.flatnonzero(~same & (depths > 0)).tolist():  # several keys share that first word, or none has it
        rank = int(ranks[child]) + 1
        while rank < len(keys) and words[rank] == sought[child] and not same[child]:
            parents[child] = by_word[rank]
            same[child] = (keys[by_word[rank]] == parent_keys[child]).all()
            rank += 1
    parents[~same | (depths[parents] + 1 != depths)] = ELSEWHERE
    first = np.flatnonzero(depths == 0)
    parents[first[(parent_keys[first] == root).all(axis=1)]] = AT_ROOT
    return parents


def _equal(keys: Column, at: Column, others: Column, others_at: Column | slice) -> Column:
    differ = keys[at] ^ others[others_at]
    same: Column = (differ[:, 0] | differ[:, 1] | differ[:, 2] | differ[:, 3]) == 0
    return same


def _order(parents: Column, depths: Column, generations: Column) -> tuple[Column, Column]:
    """Positions sorted into the recovery order, and those without a way to them.

    A first block whose parent is another key, or a later one whose parent is the root, has no way to it; nor have its
    descendants. A parent that is elsewhere may be known to the store already.
    """
    by_depth = np.argsort(depths)
    edges = np.flatnonzero(np.diff(depths[by_depth], prepend=-1, append=-1)) if len(depths) else np.empty(0, np.int64)
    levels = [by_depth[start:stop] for start, stop in pairwise(edges)]
    lost = (parents == ELSEWHERE) & (depths == 0)
    newest = generations.copy()
    for level in levels:
        mine = parents[level]
        inner = mine >= 0
        lost[level[inner]] |= lost[mine[inner]]
    for level in reversed(levels):
        mine = parents[level]
        inner = mine >= 0
        np.maximum.at(newest, mine[inner], newest[level[inner]])
    kept = by_depth[~lost[by_depth]]
    return kept[np.argsort(-newest[kept], kind="stable")], np.flatnonzero(lost)
