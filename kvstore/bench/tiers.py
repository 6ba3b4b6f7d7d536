"""`kvstore bench tiers`: how near put and get of the DRAM tier come to memcpy (floor 4).

What is measured is what a user calls: `put`, and `match`, `lease`, `get`, `release`, on the product's own store and
handle, prompt after prompt. What it is compared with is `memmove` of whole payloads on one thread, between the same two
kinds of memory in the same direction, right before and right after.

Stores, pages and the limit's own buffers are each many times the last-level cache. A put always stores new blocks into
a full store, so every block stored evicts one: the steady state of a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvstore.bench.measure import Against, Progress, Together, against, available_bytes, machine
from kvstore.bench.rig import PROMPTS, Memcpy, PagePool, Shape, Side, no_digest, turn_of
from kvstore.config import format_size
from kvstore.errors import BadInput
from kvstore.pages import Digest
from tiering.frame import digest

HEAD_MAJOR = "[head, token, dim]"
TOKEN_MAJOR = "[token, head, dim]"
BUFFERS = 5
"""Two stores, the pages, and the limit's source and target: a working set each."""

TARGETED_BYTES = 2 << 20
"""The targets hold for payloads from this size on."""

TARGETS: dict[tuple[str, bool, int], float] = {
    ("get", True, 1): 0.70,
    ("put", True, 1): 0.70,
    ("get", True, 2): 0.85,
    ("put", True, 2): 0.85,
    ("get", False, 1): 0.92,
    ("put", False, 1): 0.90,
}
"""(path, with verification, threads): share of one thread's memcpy, for pages in the payload's own order."""

DIGESTS: dict[bool, Digest] = {True: digest, False: no_digest}
WITHOUT = (
    "without verification: put takes no xxh3_128 digests of the payload's layer slices and get compares none. The rest "
    "stays: prompts are hashed, put seals each header with its MAC, get compares each header's digest and its name."
)


@dataclass(frozen=True, slots=True)
class Options:
    """shapes: the frames to measure. page_tokens: of the token-major pages; the head-major ones hold a whole block.

    working_set_bytes: of each of two stores, of the pages and of each of the limit's two buffers; less where five times
    as much is not to be had. A quarter of it is one prompt, which a thread moves in one turn. laps: turns of each.
    """

    shapes: tuple[Shape, ...] = (Shape(8, 64), Shape(32, 64), Shape(32, 256))
    page_tokens: int = 16
    working_set_bytes: int = 1 << 30
    laps: int = 16
    threads: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, slots=True)
class Row:
    """One path at one frame size: decimal GB/s of payload, and one thread's memcpy of the same run beside it.

    path: get, put, or memcpy itself on several threads, in the direction of the rows above it.
    ratio: of the two, the median over laps; ratio_low and ratio_high are its quartiles. cpu_ratio: the same of
    processor time over all threads. target: the ratio to reach.
    """

    path: str
    payload_bytes: int
    page_order: str
    verified: bool
    threads: int
    gb_per_second: float
    memcpy_gb_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float
    target: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where none is set."""
        return None if self.target is None else self.ratio >= self.target


@dataclass(frozen=True)
class TiersResult:
    """All rows, and under which conditions they were taken."""

    options: Options
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "bench": "tiers",
            "machine": machine(),
            "options": asdict(self.options),
            "without_verification": WITHOUT,
            "rows": [{**asdict(row), "met": row.met} for row in self.rows],
        }

    def render(self, console: Any) -> None:
        """One table, and what its words mean."""
        table = Table(
            "path", "payload", "pages", "verified", "threads", "GB/s", "memcpy", "ratio", "quartiles", "cpu", "target"
        )
        for row in self.rows:
            mark = {None: "", True: " met", False: " missed"}[row.met]
            table.add_row(
                row.path,
                format_size(row.payload_bytes),
                escape(row.page_order),
                "yes" if row.verified else "no",
                str(row.threads),
                f"{row.gb_per_second:.1f}",
                f"{row.memcpy_gb_per_second:.1f}",
                f"{row.ratio:.2f}",
                f"{row.ratio_low:.2f} .. {row.ratio_high:.2f}",
                f"{row.cpu_ratio:.2f}",
                "" if row.target is None else f"{row.target:.2f}{mark}",
            )
        console.print(table)
        console.print(
            f"ratio: to memcpy of whole payloads on one thread, median over {self.options.laps} laps, by wall time; "
            "cpu: the same by processor time, summed over threads."
        )
        console.print(WITHOUT)


def run(options: Options | None = None, progress: Progress = None) -> TiersResult:
    """Measure every shape in both orders of pages. Raises `BadInput` where there is too little memory to measure in."""
    options = options or Options()
    smallest = BUFFERS * PROMPTS * max(shape.payload_bytes for shape in options.shapes)
    spare = available_bytes() // 2
    if spare < smallest:
        raise BadInput(
            f"this bench needs {format_size(smallest)} of memory and may take {format_size(spare)}, half of what is "
            "available; free some, or measure smaller frames"
        )
    options = replace(options, working_set_bytes=min(options.working_set_bytes, spare // BUFFERS))
    result = TiersResult(options)
    for shape in options.shapes:
        blocks = max(1, options.working_set_bytes // (PROMPTS * shape.payload_bytes))
        for order, page_tokens in ((HEAD_MAJOR, 0), (TOKEN_MAJOR, options.page_tokens)):
            say = partial(_say, progress, f"{format_size(shape.payload_bytes)} frames, pages {order}")
            result.rows.extend(_measure(shape, blocks, order, page_tokens, options, say))
    return result


def _measure(
    shape: Shape, blocks: int, order: str, page_tokens: int, options: Options, say: Callable[[str], None]
) -> list[Row]:
    say("filling memory")
    pool = PagePool(shape, blocks, page_tokens)
    threads = max(options.threads)
    sides = {checked: Side(shape, blocks, pool, threads, taken) for checked, taken in DIGESTS.items()}
    limit = Memcpy(shape, blocks)
    rows = []
    try:
        for path in ("get", "put"):
            for threads in options.threads:
                say(f"{path}, threads: {threads}")
                moved = getattr(limit, path)
                with Together(1) as alone, Together(threads) as team:
                    turns = {(path, side): turn_of(team, getattr(sides[side], path), threads) for side in sides}
                    if threads > 1:  # what the memory has to give to that many threads
                        turns["memcpy", False] = turn_of(team, moved, threads)
                    measured = against(turn_of(alone, moved, 1), turns, options.laps)
                for (what, verified), found in measured.items():
                    rows.append(_row(what, shape, order, verified, threads, blocks, found))
        for side in sides.values():
            side.check()
    finally:
        limit.close()
        for side in sides.values():
            side.store.close()
    return rows


def _row(path: str, shape: Shape, order: str, verified: bool, threads: int, blocks: int, found: Against) -> Row:
    targeted = order == HEAD_MAJOR and shape.payload_bytes >= TARGETED_BYTES
    turn_bytes = blocks * shape.payload_bytes
    return Row(
        path,
        shape.payload_bytes,
        order,
        verified,
        threads,
        turn_bytes / found.seconds / 1e9,
        turn_bytes / found.limit_seconds / 1e9,
        found.ratio,
        found.low,
        found.high,
        found.cpu_ratio,
        TARGETS.get((path, verified, threads)) if targeted else None,
    )


def _say(progress: Progress, subject: str, what: str) -> None:
    if progress is not None:
        progress(f"{subject}: {what}")
