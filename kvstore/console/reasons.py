"""Each miss reason in words: meaning, usual cause, and what an operator can do. They stand in the table of reasons of
docs/dashboard.md, which the package carries. Pure text."""

from __future__ import annotations

import re

import msgspec

from kvstore.block.account import MissReason

FINE = frozenset(
    {
        MissReason.PARTIAL_BLOCK,
        MissReason.LAST_TOKEN,
        MissReason.GRID,
        MissReason.IN_FLIGHT,
        MissReason.CHEAPER_TO_COMPUTE,
        MissReason.AUDIT,
        MissReason.DISABLED,
        MissReason.INCOMPLETE,
    }
)
"""Need no action, however frequent."""
_ROW = re.compile(r'^\| <a id="(\w+)"></a>`\1` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$', re.MULTILINE)


class ReasonText(msgspec.Struct, frozen=True):
    """One sentence each."""

    meaning: str
    cause: str
    remedy: str


NEWER = ReasonText("A reason of a newer sidecar.", "-", "-")


def reasons_of(page: str) -> dict[str, ReasonText]:
    """By the reason's name. page: docs/dashboard.md."""
    return {name: ReasonText(*words) for name, *words in _ROW.findall(page)}
