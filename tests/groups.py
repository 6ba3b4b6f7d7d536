"""Layouts of several groups, pages with a table for each, and a plain model of what a load of them delivers.

Planes are full of random bits before anything is loaded: whatever a load writes where it should not shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


def canary_planes(layout: Layout, pages: int, page_tokens: int, seed: int, shared: bool = False) -> Planes:
    """Random bits, NaNs among them. shared: the groups' first layers have one memory, their second ones another, as
    engines do; they must be of one shape."""
    generator = torch.Generator().manual_seed(seed)
    planes: Planes = {}
    for group in layout.groups:
        for at, layer in enumerate(group.layers):
            if shared and group is not layout.groups[0]:
                planes[layer] = [plane.view_as(plane) for plane in planes[layout.groups[0].layers[at]]]
                continue
            planes[layer] = []
            for width in group.plane_widths:
                plane = torch.zeros(pages, page_tokens, group.kv_heads, width, dtype=getattr(torch, group.dtype))
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
        of_group, number = self.pages.of_group(group), token // self.pages.page_tokens
        if not of_group.first_page <= number < of_group.stop_page:
            return None
        return int(of_group.table[number - of_group.first_page])

    def numbers(self, group: KvGroup, layer: int, plane: int, token: int) -> torch.Tensor:
        """Those of the page that begins with this token: [page_tokens, heads, width]."""
        page = self.page(group.name, token)
        assert page is not None and not token % self.pages.page_tokens
        return self.pages.planes[layer][plane][page]


@dataclass(frozen=True)
class Load:
    """What a load of blocks start .. stop - 1 into some pages comes to, told without any code of the store's.

    bad: blocks with a bad frame, by the group's name.
    """

    layout: Layout
    page_tokens: int
    first_token: int
    first_pages: Mapping[str, int]
    stop: int
    bad: Mapping[str, Sequence[int]]

    @property
    def start(self) -> int:
        """The block that it begins in."""
        return self.first_token // self.layout.block_tokens

    def needed(self, group: KvGroup, blocks: int) -> range:
        """Tokens of a group that a prefix of so many blocks needs from these pages, in whole pages."""
        end, page = blocks * self.layout.block_tokens, self.page_tokens
        seen = [token for token in range(self.first_token, end) if not group.window or token > end - group.window]
        return range(seen[0] // page * page, end) if seen else range(0)  # whole pages: a block is so many of them

    def has_pages(self, blocks: int) -> bool:
        """Whether the pages hold all that such a prefix needs."""
        begins = {name: self.first_token + page * self.page_tokens for name, page in self.first_pages.items()}
        return all(
            not self.needed(group, blocks) or self.needed(group, blocks).start >= begins.get(group.name, 0)
            for group in self.layout.groups
        )

    def end(self) -> int:
        """Blocks that are loaded in the end."""
        end = self.first_fault()
        return end if end == self.stop or (self.has_pages(end) and not self._broken(end)) else self.start

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
        for token in load.needed(group, end)[:: load.page_tokens]:
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
        for token in load.needed(group, end)[:: load.page_tokens]:
            for layer in group.layers:
                for plane in range(len(group.plane_widths)):
                    got = into.numbers(group, layer, plane, token - load.first_token)
                    want = source.numbers(group, layer, plane, token)
                    assert same_bits(got, want), f"page of token {token} of layer {layer}, plane {plane}"
        for number, page in enumerate(of_group.table, of_group.first_page):
            if load.first_token + number * load.page_tokens in tried:
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
) -> Prompt:
    """Pages of a prompt: each group takes the next ones of `order`, which names each physical page once. The last group
    has the common page table, if it has all pages."""
    left, firsts = iter(order), firsts or {}
    groups = {}
    for group in layout.groups:
        first = firsts.get(group.name, 0)
        groups[group.name] = GroupPages([next(left) for _ in range(pages - first)], first)
    table: Sequence[int] = range(pages)
    if not groups[layout.groups[-1].name].first_page:
        table = groups.pop(layout.groups[-1].name).table
    return Prompt(Pages(planes, table, page_tokens, groups), layout)
