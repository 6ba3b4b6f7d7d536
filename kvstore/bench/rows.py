"""Rows of `kvstore bench tiers`: a path of one tier beside its limit, and the table they are shown in (floor 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from rich.markup import escape
from rich.table import Table

from kvstore.bench.measure import Against
from kvstore.bench.rig import Shape
from kvstore.config import format_size

DRAM, DOOR, NVME = TIERS = ("dram", "door", "nvme")

HEAD_MAJOR = "[head, token, dim]"
TOKEN_MAJOR = "[token, head, dim]"
NO_PAGES = ""

TARGETED_BYTES = 2 << 20
"""The targets hold for payloads from this size on."""

TARGETS: dict[tuple[str, str, bool, int], float] = {
    (DRAM, "get", True, 1): 0.70,
    (DRAM, "put", True, 1): 0.70,
    (DRAM, "get", True, 2): 0.85,
    (DRAM, "put", True, 2): 0.85,
    (DRAM, "get", False, 1): 0.92,
    (DRAM, "put", False, 1): 0.90,
    (DOOR, "get", True, 1): 0.68,
    (DOOR, "put", True, 1): 0.68,
    (DOOR, "get", False, 1): 0.90,
    (DOOR, "put", False, 1): 0.88,
}
"""(tier, path, with verification, threads): share of one thread's memcpy, for pages in the payload's own order."""


@dataclass(frozen=True, slots=True)
class Row:
    """One path at one frame size: decimal GB/s of payload, and that of the limit in the same run.

    tier: dram, door (the same through a sidecar's socket) or nvme. path: get, put, or memcpy itself on several threads,
    in the direction of the rows above it; promote, get or persist. prompt_tokens: what one thread moves in one turn.
    page_order: of the pages that bytes come from or go to. threads: that call the store. limit: memcpy, fio or loop.
    ratio: of the two, the median over laps; ratio_low and ratio_high are its quartiles. cpu_ratio: the same of
    processor time over all threads of this process. target: the ratio to reach.
    """

    tier: str
    path: str
    payload_bytes: int
    prompt_tokens: int
    page_order: str
    verified: bool
    threads: int
    limit: str
    gb_per_second: float
    limit_gb_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float
    target: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where none is set."""
        return None if self.target is None else self.ratio >= self.target

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**asdict(self), "met": self.met}


def row_of(
    found: Against,
    shape: Shape,
    blocks: int,
    *,
    tier: str,
    path: str,
    page_order: str,
    verified: bool,
    threads: int,
    limit: str,
    target: float | None,
) -> Row:
    """What was measured, as a row. blocks: that one thread moves in one turn."""
    turn_bytes = blocks * shape.payload_bytes
    return Row(
        tier,
        path,
        shape.payload_bytes,
        blocks * shape.block_tokens,
        page_order,
        verified,
        threads,
        limit,
        turn_bytes / found.seconds / 1e9,
        turn_bytes / found.limit_seconds / 1e9,
        found.ratio,
        found.low,
        found.high,
        found.cpu_ratio,
        target,
    )


def memcpy_row(
    tier: str, path: str, shape: Shape, order: str, verified: bool, threads: int, blocks: int, found: Against
) -> Row:
    """The same beside memcpy, with its target where there is one."""
    is_targeted = order == HEAD_MAJOR and shape.payload_bytes >= TARGETED_BYTES
    return row_of(
        found,
        shape,
        blocks,
        tier=tier,
        path=path,
        page_order=order,
        verified=verified,
        threads=threads,
        limit="memcpy",
        target=TARGETS.get((tier, path, verified, threads)) if is_targeted else None,
    )


def table_of(rows: Iterable[Row], *left_out: str) -> Table:
    """The rows of one tier, without the columns of these names."""
    table = Table()
    shown = [(name, cell) for name, cell in _COLUMNS.items() if name not in left_out]
    for name, _ in shown:
        table.add_column(name)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in shown))
    return table


_MARKS = {True: " met", False: " missed", None: ""}
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "path": lambda row: row.path,
    "payload": lambda row: format_size(row.payload_bytes),
    "tokens": lambda row: f"{row.prompt_tokens:,}",
    "pages": lambda row: escape(row.page_order),
    "verified": lambda row: "yes" if row.verified else "no",
    "threads": lambda row: str(row.threads),
    "GB/s": lambda row: f"{row.gb_per_second:.1f}",
    "limit": lambda row: f"{row.limit} {row.limit_gb_per_second:.1f}",
    "ratio": lambda row: f"{row.ratio:.2f}",
    "quartiles": lambda row: f"{row.ratio_low:.2f} .. {row.ratio_high:.2f}",
    "cpu": lambda row: f"{row.cpu_ratio:.2f}",
    "target": lambda row: "" if row.target is None else f"{row.target:.2f}{_MARKS[row.met]}",
}
