"""Pages, and the contract of a codec that reads and writes them.

`Pages` says where an engine's KV lies: per layer and plane one tensor of pages, any strides, and a page table. A codec
is bound once to a view of pages and one part (`Codec.bind`), and the bound `BlockCopy` then encodes or decodes blocks,
as many at a time as there are. The coder computes digests in host memory, of each layer slice while its bytes are
still in the CPU's cache: that is why the digest function is handed in. The codecs themselves are in `codec`; nothing
here imports torch.

A coder reports a block as good only after comparing its digests. What it wrote into pages before a digest failed is
garbage, and the caller must not report those pages as loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from numbers import Integral
from operator import index
from typing import Any, Protocol

from kv_kernels import host
from kv_kernels.copies import BlockCopy
from kv_kernels.int8_form import GROUP, KC64, SliceForm, slice_form
from kvstore.block.errors import BadInput, LayoutMismatch, shown
from kvstore.block.layout import Layout, Part
from tiering.frame import frame_bytes
from tiering.tier import FrameSpan

_log = logging.getLogger(__name__)

RAW = "raw"
CODEC_NAMES = (KC64, RAW)
REMOVED_CODEC, SUCCESSOR = "int8-th", KC64
"""A name that stays valid, and what it means: blocks stored under it are not found any more."""
INT8_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of KV that an 8-bit codec can write."""
_TABLE = "give one page number each, as a list, an array or a tensor of one dimension"


@dataclass(frozen=True)
class GroupPages:
    """The pages of one group of layers that has a page table of its own.

    table: table[i] is the physical page of logical page first_page + i. Logical pages before `first_page` are missing:
    an engine frees pages behind a sliding window, which no token will see again. page_tokens: of one of these pages; 0
    for as many as the `Pages` say.
    """

    table: Sequence[int]
    first_page: int = 0
    page_tokens: int = 0

    def __post_init__(self) -> None:
        _length(self.table)
        if not isinstance(self.first_page, Integral) or self.first_page < 0:
            raise BadInput(f"first_page={self.first_page!r} is not a page of the prompt; give a whole number from 0 up")
        if not isinstance(self.page_tokens, Integral) or self.page_tokens < 0:
            raise BadInput(f"page_tokens={self.page_tokens!r} of a group; give a whole number, or 0 for the others'")

    @property
    def stop_page(self) -> int:
        """The logical page that they end before."""
        return self.first_page + len(self.table)


@dataclass(frozen=True)
class Pages:
    """A view of paged KV, for reading or for writing.

    planes: for each layer number one tensor per plane (torch, or numpy's unsigned integers of the same width), each
        of shape [pages, page_tokens // row_tokens, kv_heads, width] with any strides: a permuted view of whatever the
        engine has. All heads of the group are given; a part takes its share.
    table: the physical page of every logical page, in token order. Page i holds the tokens from i * page_tokens on,
        counted from the `first_token` that is passed beside the pages.
    groups: by name, the groups of the layout that have page tables of their own; all others use `table`. They end at
        the token where `table` does.
    """

    planes: Mapping[int, Sequence[Any]]
    table: Sequence[int]
    page_tokens: int
    groups: Mapping[str, GroupPages] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.page_tokens, Integral) or self.page_tokens < 1:
            raise BadInput(f"page_tokens={self.page_tokens!r} is not a page size; give a whole number, 1 or more")
        tokens = _length(self.table) * self.page_tokens
        if not isinstance(self.groups, Mapping):
            raise BadInput(f"groups of type {type(self.groups).__name__}; give kvstore.GroupPages by the group's name")
        for name, group in self.groups.items():
            if not isinstance(group, GroupPages):
                raise BadInput(f"pages of type {type(group).__name__} for group {name!r}; give kvstore.GroupPages(...)")
            page = group.page_tokens or self.page_tokens
            if group.stop_page * page != tokens:
                raise BadInput(
                    f"group {name!r} has {len(group.table)} pages of {page} tokens from page {group.first_page} on, "
                    f"and the page table ends at token {tokens}; give all groups pages up to the same token"
                )

    @property
    def tokens(self) -> int:
        return len(self.table) * self.page_tokens

    def of_group(self, name: str) -> GroupPages:
        """The pages that hold a group's layers, with their size."""
        group = self.groups.get(name) or GroupPages(self.table)
        return group if group.page_tokens else replace(group, page_tokens=self.page_tokens)

    def cut(self, first_page: int, stop_page: int) -> Pages:
        """The pages from one page of `table` up to another, and of each group those of the same tokens. Raises
        `BadInput` where that would split a group's page."""
        stop_page = min(stop_page, len(self.table))
        first_page = min(first_page, stop_page)
        groups = {}
        for name in self.groups:
            group = self.of_group(name)
            start, start_rest = divmod(first_page * self.page_tokens, group.page_tokens)
            stop, stop_rest = divmod(stop_page * self.page_tokens, group.page_tokens)
            if start_rest or stop_rest:
                raise BadInput(
                    f"a cut from token {first_page * self.page_tokens} to {stop_page * self.page_tokens} splits a page "
                    f"of group {name!r}; cut at multiples of its {group.page_tokens} tokens"
                )
            first = min(max(group.first_page, start), stop)
            table = group.table[max(0, first - group.first_page) : max(0, stop - group.first_page)]
            groups[name] = replace(group, table=table, first_page=first - start)
        return Pages(self.planes, self.table[first_page:stop_page], self.page_tokens, groups)

    def first_tokens(self, layout: Layout, first_token: int) -> dict[str, int]:
        """By group of the layout, the first token of a prompt that has a page, where these pages begin with
        `first_token`. Raises `BadInput` where that splits a page, and `LayoutMismatch` where a group is named that the
        layout does not have."""
        found = {}
        for one in layout.groups:
            group = self.of_group(one.name)
            if first_token < 0 or first_token % group.page_tokens:
                raise BadInput(
                    f"first_token={first_token} is not a page boundary; give a multiple of {group.page_tokens}"
                )
            found[one.name] = first_token + group.first_page * group.page_tokens
        for name in self.groups:
            if name not in found:
                raise LayoutMismatch(f"pages of group {name!r}; the layout has {', '.join(map(repr, found))}")
        return found

    def check_once(self, layout: Layout) -> None:
        """Raise `LayoutMismatch` where a table names a page twice: it would be loaded twice."""
        for group in layout.groups:
            numbers = page_numbers(self.of_group(group.name).table)
            if len(set(numbers)) != len(numbers):
                raise LayoutMismatch("the page table names a page twice; a page can hold one piece of a prompt only")

    def check_apart(self, layout: Layout) -> None:
        """Raise `LayoutMismatch` where two groups name the same page of planes that both of them have. Call it after
        binding a codec to these pages, which checks that all layers are there."""
        if len(layout.groups) == 1:
            return
        named = [sorted(page_numbers(self.of_group(group.name).table)) for group in layout.groups]
        # Engines give layers of several groups the same memory, and each group pages of its own in it.
        memory = [
            {host.address(plane): plane for layer in group.layers for plane in self.planes[layer]}
            for group in layout.groups
        ]
        for one, other in combinations(range(len(named)), 2):
            shared = memory[one].keys() & memory[other].keys()
            for steps in {tuple(host.page_step(memory[which][at]) for which in (one, other)) for at in shared}:
                common = _first_common(named[one], steps[0], named[other], steps[1])
                if common is not None:
                    first, second = layout.groups[one].name, layout.groups[other].name
                    raise LayoutMismatch(
                        f"groups {first!r} and {second!r} have planes in common, and page {common} of them; a page "
                        "can hold one piece of a prompt only"
                    )


def _first_common(
    one: Sequence[int], one_step: tuple[int, int], other: Sequence[int], other_step: tuple[int, int]
) -> int | None:
    """The first page of `one`, ascending, whose memory a page of `other` has too. steps: as `host.page_step`."""
    if one_step == other_step:
        return min(set(one) & set(other), default=None)
    (step, reach), (its_step, its_reach) = one_step, other_step
    ends = iter(other)
    page = next(ends, None)
    for number in one:
        while page is not None and page * its_step + its_reach <= number * step:
            page = next(ends, None)
        if page is not None and page * its_step < number * step + reach:
            return number
    return None


def page_numbers(table: Sequence[int]) -> list[int]:
    """A page table as Python integers: addresses computed from an int32 array would overflow, and elements of a tensor
    do not compare equal as dictionary keys. Raises `LayoutMismatch`."""
    try:
        return [index(page) for page in table]
    except TypeError:
        raise LayoutMismatch(f"the page table holds something else than integers; {_TABLE}") from None


def _length(table: Sequence[int]) -> int:
    try:
        return len(table)
    except TypeError:
        raise BadInput(f"a page table of type {type(table).__name__}; {_TABLE}") from None


class Codec(Protocol):
    """One way to write a block's numbers as bytes. A namespace has exactly one codec."""

    name: str
    is_exact: bool
    """Whether it restores bit for bit what was given. What any other codec decoded must not be encoded again."""

    def payload_bytes(self, part: Part) -> int:
        """Bytes of a part's payload: the same for every block, and a whole number per layer slice."""
        ...

    def prepare(self, layout: Layout) -> None:
        """Do slow work that is needed once, such as compiling, so that no request waits for it. Called when a namespace
        is opened; safe to call again."""
        ...

    def bind(self, pages: Pages, layout: Layout, part: Part) -> BlockCopy:
        """A coder for these pages. Raises `LayoutMismatch` where they are not what the layout says."""
        ...


def cut(span: FrameSpan, first: int, size: int) -> FrameSpan:
    """Some bytes of a span."""
    return FrameSpan(span.address + first, span.view[first : first + size], span.memory)


# How many bytes a block takes, by codec: one formula for code that writes blocks and for code that only counts them --


def codec_meant(name: str) -> str:
    """The codec that is meant by this name, known or not; warns if it was removed."""
    if name != REMOVED_CODEC:
        return name
    _log.warning("codec %r was removed and is %r now; name that", name, SUCCESSOR)
    return SUCCESSOR


def int8_form(codec: str, part: Part) -> SliceForm:
    """The form of an 8-bit layer slice. Raises `BadInput` for numbers that these codecs cannot write."""
    group = part.group
    if hindrance := _hindrance(part):
        raise BadInput(f"codec {codec!r} cannot write KV of {hindrance} (group {group.name!r}); use codec='raw'")
    return slice_form(part.kv_heads, part.rows, group.plane_widths, group.element_bytes)


def payload_bytes(codec: str, part: Part) -> int:
    """All layer slices of a part. Raises `BadInput` for a codec that is not known, and as `int8_form`."""
    if codec == RAW:
        return part.raw_bytes
    if codec != KC64:
        raise BadInput(f"codec {shown(codec)} is not known; allowed: {', '.join(CODEC_NAMES)}")
    return int8_form(codec, part).size_bytes * len(part.layers)


def block_bytes(codec: str, layout: Layout) -> int:
    """The bytes that a whole block takes in a tier: of each part a header, the payload, and padding. Raises as
    `payload_bytes`."""
    return sum(frame_bytes(payload_bytes(codec, part)) for part in layout.parts)


def default_codec(layout: Layout) -> str:
    """The adapters' default: `int8-kc64`, and `raw` for numbers that no 8-bit codec writes."""
    return RAW if any(map(_hindrance, layout.parts)) else KC64


def _hindrance(part: Part) -> str:
    """Why 8-bit codecs cannot write a part; empty if they can."""
    if part.group.dtype not in INT8_DTYPES:
        return f"dtype {part.group.dtype}, only of {', '.join(INT8_DTYPES)}"
    return f"{part.rows} rows a block, only of a multiple of {GROUP}" if part.rows % GROUP else ""
