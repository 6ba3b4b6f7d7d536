"""Request traces: which blocks each request asked for, without a token.

The published form of Mooncake's traces, JSON lines in the order of arrival:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

timestamp in ms, lengths in tokens; one id for each block of the prompt, the last of which may be partly filled. Equal
ids at equal places mean equal prefixes. This reader names a block by its whole chain, so traces whose ids do not cover
the blocks before are read correctly too. Lines out of order are sorted by timestamp; tools that send a trace by the
clock (aiperf) do the same. Reads lines, no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvstore.block.errors import BadInput

Column = np.ndarray[Any, Any]

BLOCK_TOKENS = tuple(1 << bits for bits in range(4, 14))
"""Block sizes that are tried if none is given: 16 to 8,192 tokens."""

_EXAMPLE = '{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}'
_LENGTHS = ("input_length", "output_length")
_MOST = 1 << 62
MOST_TOKENS = 1 << 31
"""Of one prompt; sums over some billion prompts stay below 2**62."""
_SHOWN = 40
"""Characters of a wrong value shown in a message."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests ordered by timestamp; out_of_order: how many came behind a later one.

    blocks: for each block of each request a number, counted from 0 in order of first appearance; equal numbers are
    equal prefixes. starts: index of each request's first block, and the total at the end.
    """

    name: str
    block_tokens: int
    timestamps_ms: Column
    input_tokens: Column
    output_tokens: Column
    blocks: Column
    starts: Column
    out_of_order: int = 0

    @property
    def requests(self) -> int:
        return len(self.timestamps_ms)

    @property
    def distinct_blocks(self) -> int:
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def to_dict(self) -> dict[str, object]:
        return {
            "trace": self.name,
            "block_tokens": self.block_tokens,
            "requests": self.requests,
            "blocks": len(self.blocks),
            "distinct_blocks": self.distinct_blocks,
            "out_of_order": self.out_of_order,
        }

    def chains(self) -> Iterator[list[int]]:
        starts = self.starts.tolist()
        for start, stop in pairwise(starts):
            yield self.blocks[start:stop].tolist()

    def request_numbers(self) -> Column:
        """For each block of each request, the number of the request."""
        return np.repeat(np.arange(self.requests), np.diff(self.starts))

    def repeats(self) -> tuple[Column, Column]:
        """For each use of a block but its last: where it stands in `blocks`, and where that block's next use does."""
        order = np.argsort(self.blocks, kind="stable")
        is_same = self.blocks[order][1:] == self.blocks[order][:-1]
        return order[:-1][is_same], order[1:][is_same]

    def without_partial(self) -> Trace:
        """The same trace without partly filled blocks, which are never stored."""
        lengths = np.diff(self.starts)
        is_partial = lengths * self.block_tokens > self.input_tokens
        kept = np.ones(len(self.blocks), bool)
        kept[self.starts[1:][is_partial] - 1] = False
        _, numbers = np.unique(self.blocks[kept], return_inverse=True)
        starts = np.concatenate([[0], np.cumsum(lengths - is_partial)])
        columns = self.timestamps_ms, self.input_tokens, self.output_tokens
        return Trace(self.name, self.block_tokens, *columns, numbers.reshape(-1), starts, self.out_of_order)


def read_trace(name: str, lines: Iterable[str], block_tokens: int | None = None) -> Trace:
    """Raises `BadInput` with the line's number.

    block_tokens: None for the only size that fits all lengths.
    """
    rows = [_request(f"{name}, line {at}", at, line) for at, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BadInput(f"{name} has no request in it; a line looks like {_EXAMPLE}")
    size = _block_tokens(name, block_tokens, rows)
    stamps = np.array([row.timestamp for row in rows], np.int64)
    out_of_order = int((stamps < np.maximum.accumulate(stamps)).sum())
    if out_of_order:
        rows.sort(key=lambda row: row.timestamp)
    numbers: dict[tuple[int, int], int] = {}  # (number of the block before, id) -> number
    blocks: list[int] = []
    starts = [0]
    for row in rows:
        before = -1
        for one in row.ids:
            before = numbers.setdefault((before, one), len(numbers))
            blocks.append(before)
        starts.append(len(blocks))
    table = np.array([(row.timestamp, row.tokens, row.output) for row in rows], np.int64)
    columns = table[:, 0], table[:, 1], table[:, 2]
    return Trace(name, size, *columns, np.array(blocks, np.int64), np.array(starts), out_of_order)


class _TraceLine(NamedTuple):
    line: int
    timestamp: int
    tokens: int
    output: int
    ids: list[int]


def _request(where: str, at: int, line: str) -> _TraceLine:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: no JSON; a line looks like {_EXAMPLE}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{where}: {type(found).__name__} in place of an object; a line looks like {_EXAMPLE}")
    ids = found.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise BadInput(f"{where}: hash_ids has to be a list of whole numbers; a line looks like {_EXAMPLE}")
    wrong = next((one for one in ids if not -_MOST < one < _MOST), None)
    if wrong is not None:
        raise BadInput(f"{where}: hash_ids has {_shown(wrong)}; give whole numbers from {1 - _MOST} to {_MOST - 1}")
    for length in _LENGTHS:
        if not _is_number(found.get(length), MOST_TOKENS, int):
            raise BadInput(f"{where}: {length}={_shown(found.get(length))}; give tokens, 0 to {MOST_TOKENS - 1}")
    if not _is_number(found.get("timestamp"), _MOST, int, float):
        raise BadInput(f"{where}: timestamp={_shown(found.get('timestamp'))}; give milliseconds, a number from 0 on")
    return _TraceLine(at, int(found["timestamp"]), found["input_length"], found["output_length"], ids)


def _is_number(found: Any, limit: int, *kinds: type) -> bool:
    return type(found) in kinds and 0 <= found < limit


def _shown(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _block_tokens(name: str, given: int | None, rows: Sequence[_TraceLine]) -> int:
    tokens = np.array([row.tokens for row in rows], np.int64)
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    if given is not None and not 1 <= given < MOST_TOKENS:
        raise BadInput(f"--block-tokens {given}; give 1 to {MOST_TOKENS - 1}")
    sizes = BLOCK_TOKENS if given is None else (given,)
    wrong = {size: np.flatnonzero(lengths != -(-tokens // size)) for size in sizes}
    fitting = [size for size in sizes if not len(wrong[size])]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        found = " or ".join(map(str, fitting))
        raise BadInput(f"{name}: blocks of {found} tokens fit its lengths; give --block-tokens")
    best = min(sizes, key=lambda size: len(wrong[size]))
    row = rows[wrong[best][0]]
    there = f"{name}, line {row.line}: {len(row.ids)} hash_ids and {row.tokens} tokens, which are "
    there += f"{-(-row.tokens // best)} blocks of {best}"
    if given is not None:
        raise BadInput(f"{there}; give the --block-tokens that it was recorded with")
    raise BadInput(
        f"{there}; that size fits {len(rows) - len(wrong[best])} of {len(rows)} lines and no usual size fits all: give "
        "--block-tokens, or mend the line"
    )
