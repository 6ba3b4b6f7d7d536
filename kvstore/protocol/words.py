"""Words about what clients sent and operators asked for: made safe for a terminal, short, and one line where wrong."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.block.errors import BadInput
from kvstore.block.layout import Layout

MAX_TEXT = 128
ID_DIGITS = 12
MAX_SECONDS = 3600.0
"""That a drop or a purge may take."""
MOST_NAMED = 8
"""Namespaces that a line about a wrong id names."""


def checked_seconds(seconds: float) -> float:
    """How long a drop or a purge may take. Raises `BadInput`."""
    if not 0 <= seconds <= MAX_SECONDS:
        raise BadInput(f"seconds={seconds:g}; give 0 to {MAX_SECONDS:g}")
    return seconds


def layout_in_words(layout: Layout) -> str:
    """As people say it: "32 layers x 8 heads x (128 + 128) bfloat16, 64 tokens"."""
    groups = [
        f"{len(group.layers)} layers x {group.kv_heads} heads x ({' + '.join(map(str, group.plane_widths))}) "
        f"{group.dtype}"
        for group in layout.groups
    ]
    shards = "".join(
        f", {count} {what} shards"
        for count, what in ((layout.head_shards, "head"), (layout.layer_shards, "layer"))
        if count > 1
    )
    return printable(f"{'; '.join(groups)}, {layout.block_tokens} tokens{shards}")


def printable(text: str) -> str:
    """A client's text, made safe for a terminal and short."""
    kept = "".join(one for one in text[: 8 * MAX_TEXT] if one.isprintable())
    return kept if len(kept) <= MAX_TEXT else f"{kept[: MAX_TEXT - 3]}..."


def pick(wanted: str, digests: Sequence[str], words: Sequence[str], whose: str, more: str) -> int:
    """The index of the one digest that begins with `wanted`. words: about each digest. whose, more: for messages.
    Raises `BadInput`."""
    found = [at for at, digest in enumerate(digests) if wanted and digest.startswith(wanted.lower())]
    if len(found) == 1:
        return found[0]
    listed = found or range(len(digests))
    named = ", ".join(f"{digests[at][:ID_DIGITS]} ({words[at]})" for at in listed[:MOST_NAMED])
    if len(listed) > MOST_NAMED:
        named += f" and {len(listed) - MOST_NAMED} more"
    if not found:
        there = f"there {'is' if len(digests) == 1 else 'are'}: {named}" if digests else "there are none"
        raise BadInput(f"no namespace{whose} begins with {printable(wanted)!r}; {there}")
    raise BadInput(f"{len(found)} namespaces{whose} begin with {printable(wanted)!r}: {named}; {more}")
