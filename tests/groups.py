"""Layouts of several groups, pages with a table for each, and a plain model of what a load of them delivers.

Planes are full of random bits before anything is loaded: whatever a load writes where it should not shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.block.pages import GroupPages, Pages

Planes = dict[int, list[torch.Tensor]]


def sliding(name: str, layers: tuple[int, ...], window: int, **options: Any) -> KvGroup:
    """A group with a window, of two heads of eight numbers unless told otherwise."""
    shape: dict[str, Any] = {"kv_heads": 2, "plane_widths": (8, 8), "dtype": "bfloat16", **options}
    return KvGroup(name, layers, attention=Attention.SLIDING, window=window, **shape)


def full(name: str, layers: tuple[int, ...], **options: Any) -> KvGroup:
    """One without."""
    shape: dict[str, Any] = {"kv_heads": 2, "plane_widths": (8, 8), "dtype": "bfloat16", **options}
    return KvGroup(name, layers, **shape)


def canary_planes(
    layout: Layout,
    pages: int,
    page_tokens: int,
    seed: int,
    shared: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Planes:
    """Random bits, NaNs among them. shared: the groups' first layers have one memory, their second ones another, as
    engines do; they must be of one shape. sizes: of the pages of groups that have others, by name."""
    generator = torch.Generator().manual_seed(seed)
    planes: Planes = {}
    for group in layout.groups:
        for at, layer in enumerate(group.layers):
            if shared and group is not layout.groups[0]:
                planes[layer] = [plane.view_as(plane) for plane in planes[layout.groups[0].layers[at]]]
                continue
            planes[layer] = []
            rows = (sizes or {}).get(group.name, page_tokens) // group.row_tokens
            for width in group.plane_widths:
                plane = torch.zeros(pages, rows, group.kv_heads, width, dtype=getattr(torch, group.dtype))
                bits = plane.view(torch.uint8)
                bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=generator))
                planes[layer].append(plane)
    return planes


def copied(planes: Planes) -> Planes:
    """The same bits in other memory; what is one there is one here."""
    clones = {plane.data_ptr(): plane.clone() for tensors in planes.values() for plane in tensors}
    return {layer: [clones[plane.data_ptr()] for plane in tensors] for layer, tensors in planes.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class Prompt:
    """What an engine has of a prompt: every token of every group, at a place of its own choosing."""

    pages: Pages
    layout: Layout

    def page(self, group: str, token: int) -> int | None:
        """The physical page of a token, counted from where these pages begin; None where there is none."""
        of_group = self.pages.of_group(group)
        number = token // of_group.page_tokens
        if not of_group.first_page <= number < of_group.stop_page:
            return None
        return int(of_group.table[number - of_group.first_page])

    def numbers(self, group: KvGroup, layer: int, plane: int, token: int) -> torch.Tensor:
        """Those of the page that begins with this token: [rows, heads, width]."""
        page = self.page(group.name, token)
        assert page is not None and not token % self.pages.of_group(group.name).page_tokens
        return self.pages.planes[layer][plane][page]


@dataclass(frozen=True)
class Load:
    """What a load of blocks start .. stop - 1 into some pages comes to, told without any code of the store's.

    bad: blocks with a bad frame, by the group's name. sizes: of the pages of groups that have others.
    """

    layout: Layout
    page_tokens: int
    first_token: int
    first_pages: Mapping[str, int]
    stop: int
    bad: Mapping[str, Sequence[int]]
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """The block that it begins in."""
        return self.first_token // self.layout.block_tokens

    def page(self, group: KvGroup) -> int:
        """Tokens of one of its pages."""
        return self.sizes.get(group.name, self.page_tokens)

    def needed(self, group: KvGroup, blocks: int) -> range:
        """Tokens of a group that a prefix of so many blocks needs from these pages, in whole pages."""
        end, page = blocks * self.layout.block_tokens, self.page(group)
        sees = {
            Attention.FULL: lambda token: True,
            Attention.SLIDING: lambda token: token > end - group.window,
            Attention.CHUNKED: lambda token: token // group.window == end // group.window,
            Attention.STATE: lambda token: token >= end - self.layout.block_tokens,
        }[group.attention]
        seen = [token for token in range(self.first_token, end) if sees(token)]
        return range(seen[0] // page * page, end) if seen else range(end, end)  # a block is whole pages

    def has_pages(self, blocks: int) -> bool:
        """Whether the pages hold all that such a prefix needs."""
        return all(
            not self.needed(group, blocks)
            or self.needed(group, blocks).start
            >= self.first_token + self.first_pages.get(group.name, 0) * self.page(group)
            for group in self.layout.groups
        )

    def end(self) -> int:
        """Blocks that are loaded in the end."""
        fault = self.first_fault()
        if fault == self.stop:
            return fault
        end = next((blocks for blocks in range(fault, self.start, -1) if self.has_pages(blocks)), self.start)
        return self.start if self._broken(end) else end

    def first_fault(self) -> int:
        """The first bad block that the whole load has to do with; its end where there is none."""
        return min(self._broken(self.stop), default=self.stop)

    def _broken(self, blocks: int) -> list[int]:
        size = self.layout.block_tokens
        return [
            block
            for group in self.layout.groups
            for block in self.bad.get(group.name, ())
            if block in {token // size for token in self.needed(group, blocks)}
        ]


def expected_planes(before: Planes, into: Prompt, source: Prompt, load: Load, end: int) -> Planes:
    """What a load leaves that ends at this block, and tried no later one: right bytes where they are promised, and all
    else as it was."""
    after = copied(before)
    for group in load.layout.groups:
        for token in load.needed(group, end)[:: load.page(group)]:
            page = into.page(group.name, token - load.first_token)
            assert page is not None
            for layer in group.layers:
                for plane, tensor in enumerate(after[layer]):
                    tensor[page] = source.numbers(group, layer, plane, token)
    return after


def check_loaded(
    before: Planes, into: Prompt, source: Prompt, load: Load, tokens: int, on_the_way: Iterable[int] = ()
) -> None:
    """Right bytes up to `tokens` in all groups, and nothing touched but what such a load has to do with. on_the_way:
    blocks that it may have ended at before a later layer failed."""
    touched = copied(before)
    end = tokens // load.layout.block_tokens
    for group in load.layout.groups:
        of_group = into.pages.of_group(group.name)
        ends = {load.stop, load.first_fault(), end, *on_the_way}
        tried = {token for blocks in ends for token in load.needed(group, blocks)}
        for token in load.needed(group, end)[:: load.page(group)]:
            for layer in group.layers:
                for plane in range(len(group.plane_widths)):
                    got = into.numbers(group, layer, plane, token - load.first_token)
                    want = source.numbers(group, layer, plane, token)
                    assert same_bits(got, want), f"page of token {token} of layer {layer}, plane {plane}"
        for number, page in enumerate(of_group.table, of_group.first_page):
            if load.first_token + number * load.page(group) in tried:
                for layer in group.layers:
                    for tensor, now in zip(touched[layer], into.pages.planes[layer], strict=True):
                        tensor[page] = now[page]
    assert_same_planes(into.pages.planes, touched)


def assert_same_planes(found: Mapping[int, Sequence[torch.Tensor]], wanted: Planes) -> None:
    """Bit for bit, canaries included."""
    for layer, planes in wanted.items():
        for plane, (got, want) in enumerate(zip(found[layer], planes, strict=True)):
            assert same_bits(got, want), f"layer {layer}, plane {plane}"


def spread(
    layout: Layout,
    planes: Planes,
    page_tokens: int,
    order: Sequence[int],
    pages: int,
    firsts: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Prompt:
    """Pages of a prompt: each group takes the next ones of `order`, which names each physical page once. The last group
    has the common page table, if it has all pages, and these have the common size. sizes: of groups with others."""
    left, firsts, sizes = iter(order), firsts or {}, sizes or {}
    groups = {}
    for group in layout.groups:
        first, size = firsts.get(group.name, 0), sizes.get(group.name, 0)
        count = pages * page_tokens // (size or page_tokens) - first
        groups[group.name] = GroupPages([next(left) for _ in range(count)], first, size)
    table: Sequence[int] = range(pages)
    last = groups[layout.groups[-1].name]
    if not last.first_page and last.page_tokens in (0, page_tokens):
        table = groups.pop(layout.groups[-1].name).table
    return Prompt(Pages(planes, table, page_tokens, groups), layout)
