"""Small parts that many tests build on: a clock that stands still, layouts, pages and stores that fit in a hand.

Nothing here stands in for code of the house: stores are made by the real composition root, clocks obey its contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.identity import KeyRing, Namespace, TenantKeys
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import Lease, NamespaceHandle, PutResult
from kvstore.config import DramConfig, Limits, StoreOptions, TierOptions
from kvstore.core.store import Store
from kvstore.node import EmbeddedDoor, EmbeddedStore, StoreParts, build_store, open_embedded
from tiering.frame import FrameHeader, open_header
from tiering.tier import SlotClass
from waiting import FakeClock

SECRET = bytes(range(32))
OTHER_SECRET = bytes(range(32, 64))
MODEL = "3f5e1c0d9a"
KIB = 1024


def small_layout(**options: Any) -> Layout:
    """Two layers, two heads: 8 KiB of payload per block of 64 tokens, in one frame of 12 KiB."""
    shape: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
    return Layout.gqa(**{**shape, **options})


def blank_planes(layout: Layout, pages: int, page_tokens: int) -> dict[int, list[torch.Tensor]]:
    """Zeroed planes of that many pages for every layer, in the store's own order of dimensions."""
    return {
        layer: [
            torch.zeros(pages, page_tokens, group.kv_heads, width, dtype=getattr(torch, group.dtype))
            for width in group.plane_widths
        ]
        for group in layout.groups
        for layer in group.layers
    }


def random_planes(layout: Layout, pages: int, page_tokens: int, seed: int = 0) -> dict[int, list[torch.Tensor]]:
    """The same with random bits, NaNs and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    planes = blank_planes(layout, pages, page_tokens)
    for tensors in planes.values():
        for tensor in tensors:
            bits = tensor.view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=generator))
    return planes


def random_pages(layout: Layout, blocks: int, page_tokens: int = 64, seed: int = 0) -> Pages:
    """Pages full of random bits for that many blocks."""
    count = blocks * layout.block_tokens // page_tokens
    return Pages(random_planes(layout, count, page_tokens, seed), range(count), page_tokens)


def plausible_planes(layout: Layout, pages: int, page_tokens: int, seed: int = 0) -> dict[int, list[torch.Tensor]]:
    """Planes of finite numbers, as a model makes them."""
    torch.manual_seed(seed)
    planes = blank_planes(layout, pages, page_tokens)
    for tensors in planes.values():
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape))
    return planes


def plausible_pages(layout: Layout, blocks: int, page_tokens: int = 64, seed: int = 0) -> Pages:
    """Pages of finite numbers for that many blocks, in order."""
    count = blocks * layout.block_tokens // page_tokens
    return Pages(plausible_planes(layout, count, page_tokens, seed), range(count), page_tokens)


def blank_pages(layout: Layout, blocks: int, page_tokens: int = 64) -> Pages:
    """Pages of zeros for that many blocks."""
    count = blocks * layout.block_tokens // page_tokens
    return Pages(blank_planes(layout, count, page_tokens), range(count), page_tokens)


def shard_pages(pages: Pages, layout: Layout, shard: int) -> Pages:
    """What one rank has of these pages: copies of its own heads."""
    whole = [layout.parts[part.index] for part in layout.parts_of(shard)]
    planes = {
        layer: [plane[:, :, part.head_start : part.head_stop].clone() for plane in pages.planes[layer]]
        for part in whole
        for layer in part.layers
    }
    return Pages(planes, pages.table, pages.page_tokens)


def prompt_values(pages: Pages, layer: int, plane: int, first: int, stop: int) -> torch.Tensor:
    """The bits of tokens first .. stop of what pages cover: [tokens, bytes]."""
    chosen = pages.planes[layer][plane][torch.tensor(list(pages.table))]
    return chosen.flatten(0, 1).contiguous().view(torch.uint8).flatten(1)[first:stop]


def same_tokens(mine: Pages, theirs: Pages, tokens: Iterable[int], offset: int = 0) -> bool:
    """Whether token t of `theirs` has the same bits as token t - offset of `mine`, for all of `tokens`."""
    span = list(tokens)
    if not span:
        return True
    first, stop = span[0], span[-1] + 1
    return all(
        torch.equal(
            prompt_values(mine, layer, plane, first - offset, stop - offset),
            prompt_values(theirs, layer, plane, first, stop),
        )
        for layer, planes in mine.planes.items()
        for plane in range(len(planes))
    )


@dataclass
class Bench:
    """A store on a still clock, with its tenants' keys at hand."""

    store: Store
    clock: FakeClock
    ring: KeyRing
    keys: TenantKeys = field(default_factory=lambda: TenantKeys.derive(SECRET))

    def door(self, keys: TenantKeys | None = None) -> EmbeddedDoor:
        """The store as a tenant sees it."""
        keys = keys or self.keys
        self.ring.add(keys)
        return EmbeddedDoor(self.store, keys)

    def namespace(
        self,
        layout: Layout | None = None,
        *,
        model: str = MODEL,
        keys: TenantKeys | None = None,
        codec: str = "raw",
        shard: int | None = None,
    ) -> NamespaceHandle:
        """A namespace."""
        namespace = Namespace(model, layout or small_layout(), codec)
        return NamespaceHandle(self.door(keys), namespace, codec_named(codec), shard=shard)

    def header_of(self, place: int) -> FrameHeader:
        """The verified header of a frame."""
        return open_header(bytes(self.store.spans([place])[0].view[:4096]), self.ring)


def bench(*, dram: int = 1 << 20, extent: int = 64 * KIB, limits: Limits | None = None) -> Bench:
    """A store of its own: by default sixteen extents of 64 KiB, which hold five frames of the small layout each."""
    clock, ring = FakeClock(), KeyRing()
    return Bench(build_store(DramConfig(dram, extent), limits or Limits(), ring, clock), clock, ring)


def open_at(directory: Path | str, **given: Any) -> EmbeddedStore:
    """A store on a directory. given: options of it, and parts that it is built of, by their names."""
    tiers, parts = (
        {name: given.pop(name) for name in names if name in given}
        for names in (TierOptions.__struct_fields__, [one.name for one in fields(StoreParts)])
    )
    options = StoreOptions(TierOptions(**tiers), **given)
    return open_embedded(str(directory), options, StoreParts(**{"codecs": codec_named, **parts}))


def one_line(error: BaseException, *fragments: str) -> bool:
    """Whether a message is one line, and names each of the fragments."""
    message = str(error)
    assert message and "\n" not in message, message
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{message!r} does not say {missing}"
    return True


@contextmanager
def refused(kind: type[BaseException] | tuple[type[BaseException], ...], *fragments: str) -> Iterator[None]:
    """Passes only if that is raised, with one line that names each of the fragments."""
    with pytest.raises(kind) as caught:
        yield
    assert one_line(caught.value, *fragments)


def slot_class(part: int = 0, *, owner: bytes = b"a", frame_bytes: int = 16 * KIB) -> SlotClass:
    """A slot class; by default four of its frames fit an extent of 64 KiB."""
    return SlotClass(owner * 16, owner * 32, part, frame_bytes)


def ids(tokens: int, start: int = 0) -> list[int]:
    """A prompt."""
    return list(range(start, start + tokens))


def prompt_of(number: int, blocks: int) -> list[int]:
    """One of many that begin otherwise."""
    return ids(64 * blocks, 10_000 * number)


def put_prompt(handle: NamespaceHandle, number: int, blocks: int, of: int | None = None, **options: Any) -> PutResult:
    """Store it with its own random bits. of: the blocks that it has in all, if these are its first ones."""
    pages = random_pages(handle.layout, of or blocks, seed=number)
    return handle.put(prompt_of(number, blocks), Pages(pages.planes, range(blocks), 64), **options)


class Delivered(NamedTuple):
    """Of a prompt. reason: why not all of it."""

    blocks: int
    reason: MissReason | None
    lease: Lease


def read_prompt(handle: NamespaceHandle, number: int, blocks: int, deadline_ms: float = 20_000) -> Delivered:
    """What a lease and a get deliver of what `put_prompt` stored, compared bit for bit."""
    into, match = blank_pages(handle.layout, blocks), handle.match(prompt_of(number, blocks))
    with handle.lease(match, deadline_ms=deadline_ms) as lease:
        loaded = handle.get(lease, into)
    assert same_tokens(random_pages(handle.layout, blocks, seed=number), into, range(loaded.tokens))
    assert loaded.account.asked == lease.account.asked == 64 * blocks
    if loaded.tokens < lease.tokens:
        return Delivered(loaded.tokens // 64, loaded.reason, lease)
    return Delivered(lease.blocks, match.reason if match.blocks == lease.blocks else lease.reason, lease)
