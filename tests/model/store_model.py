"""What the tests know about a store without asking it: prompts, the KV that belongs to each block, engines' pages.

The KV of a block is a function of its tenant, namespace, chain and version, so any byte that comes back can be told
from every other that was ever stored. Pages come in the orders in which engines keep them; `PagedKv.expect` says what
all of their memory must look like after a load, gaps and pages outside the table included.

`open_store` builds a store as `node.open_embedded` does, with a clock that a test moves, and with a mover that does the
real work and lets a test act while the copies run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from asking import stand_in
from kvstore.block.codec import codec_named
from kvstore.block.display_names import DisplayNames
from kvstore.block.identity import KeyRing, Namespace, TenantKeys
from kvstore.block.key_file import KeyFile
from kvstore.block.layout import KvGroup, Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.config import DramConfig, Limits
from kvstore.core.index import PrefixIndex
from kvstore.core.store import Store
from kvstore.core.table import BlockTable
from kvstore.keys.store_keys import StoreKeys
from kvstore.node import EmbeddedDoor, EmbeddedStore, StoreParts
from kvstore.protocol import messages as m
from tiering.dram.extents import ExtentPool
from tiering.dram.tier import DramTier, FrameCopy, MoveOutcome, Mover
from tiering.files import DirectoryLock
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker
from tiering.residency import Pins, Residency
from tiering.tier import FrameSpan
from waiting import FakeClock

BLOCK_TOKENS = 64
SENTINEL = 0xA5
STYLES = ("tokens", "heads", "fused", "pages_last", "gaps", "backwards")
Array = np.ndarray[Any, Any]
Kv = dict[int, list[Array]]
"""One block: layer -> planes of [token, head, width], as unsigned integers."""


# Prompts and their KV -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """`letters`: one per full block; equal letters are equal tokens. `tail`: tokens after the last full block."""

    letters: tuple[int, ...]
    tail: int = 0
    extra: tuple[str, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """One letter's block is 64 tokens that no other letter has."""
        tokens = [letter * 1000 + at for letter in self.letters for at in range(BLOCK_TOKENS)]
        return tokens + [7] * self.tail

    @property
    def tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.letters) * BLOCK_TOKENS + self.tail

    def chain(self, block: int) -> Chain:
        """What names the block: everything up to its end, and the extra keys."""
        return (self.extra, self.letters[: block + 1])


Chain = tuple[tuple[str, ...], tuple[int, ...]]


@lru_cache(maxsize=8192)
def block_kv(layout: Layout, owner: str, chain: Chain, version: int = 0) -> Kv:
    """The KV of one block, for a namespace called `owner`. Shared between callers: not to be written to."""
    seed = blake2b(repr((owner, chain, version)).encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.SFC64(int.from_bytes(seed)))
    kv: Kv = {}
    for group in layout.groups:
        for layer in group.layers:
            kv[layer] = [
                np.frombuffer(
                    random.bytes(BLOCK_TOKENS * group.kv_heads * width * group.element_bytes), unsigned(group)
                ).reshape(BLOCK_TOKENS, group.kv_heads, width)
                for width in group.plane_widths
            ]
    return kv


def unsigned(group: KvGroup) -> np.dtype[Any]:
    """The unsigned integer of an element's width."""
    return np.dtype(f"<u{group.element_bytes}")


# Pages ----------------------------------------------------------------------------------------------------------------


class PagedKv:
    """An engine's KV memory: every byte is the sentinel, the table names pages in a shuffled order, some it leaves out.

    style: the order of the dimensions in memory, see `_allocate`. library: what the planes are handed over as.
    """

    def __init__(
        self, layout: Layout, logical_pages: int, page_tokens: int, style: str, library: str, seed: int, spare: int = 2
    ) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        self._style = style
        self.table = np.random.default_rng(seed).permutation(logical_pages + spare)[:logical_pages].tolist()
        self.memory: list[Array] = []
        self.views: Kv = {}
        planes: dict[int, list[Any]] = {}
        for group in layout.groups:
            for layer in group.layers:
                memory, views = _allocate(group, logical_pages + spare, page_tokens, style)
                self.memory.extend(memory)
                self.views[layer] = views
                planes[layer] = [_hand_over(view, group, library) for view in views]
        self.pages = Pages(planes, self.table, page_tokens)

    def write(self, token: int, kv: Kv) -> None:
        """Put a block's KV at `token` of the pages; what lies before them or behind them is left out."""
        for position in range(0, BLOCK_TOKENS, self.page_tokens):
            logical = (token + position) // self.page_tokens
            if token + position < 0 or logical >= len(self.table):
                continue
            for layer, planes in kv.items():
                for view, plane in zip(self.views[layer], planes, strict=True):
                    view[self.table[logical]] = plane[position : position + self.page_tokens]

    def expect(self, before: list[Array], blocks: Mapping[int, Kv], *, ignore_from: int | None = None) -> None:
        """All of the memory is as it was `before`, but for these blocks (token -> KV).

        ignore_from: pages of the table from this token on may hold anything: a load failed there.
        """
        actual = [memory.copy() for memory in self.memory]
        for memory, old in zip(self.memory, before, strict=True):
            memory[...] = old
        for token, kv in blocks.items():
            self.write(token, kv)
        if ignore_from is not None:
            for logical in range(max(0, ignore_from) // self.page_tokens, len(self.table)):
                page = self.table[logical]
                for memory, found in zip(self.memory, actual, strict=True):
                    _by_page(memory, self._style)[page] = _by_page(found, self._style)[page]
        for memory, found in zip(self.memory, actual, strict=True):
            assert np.array_equal(memory, found), "pages hold other bytes than the blocks that were loaded"

    def snapshot(self) -> list[Array]:
        return [memory.copy() for memory in self.memory]


def _by_page(memory: Array, style: str) -> Array:
    """Memory with physical pages first, in their order, gaps included."""
    if style == "pages_last":
        return memory.transpose(3, 0, 1, 2)
    return memory[::-1] if style == "backwards" else memory


def _allocate(group: KvGroup, pages: int, page_tokens: int, style: str) -> tuple[list[Array], list[Array]]:
    """Memory, and one view [pages, page_tokens, heads, width] of it per plane."""
    heads, widths, kind = group.kv_heads, group.plane_widths, unsigned(group)

    def filled(*shape: int) -> Array:
        return np.full(int(np.prod(shape)) * kind.itemsize, SENTINEL, np.uint8).view(kind).reshape(shape)

    if style == "fused" and len(set(widths)) == 1:
        memory = filled(pages, len(widths), heads, page_tokens, widths[0])
        return [memory], [memory[:, plane].transpose(0, 2, 1, 3) for plane in range(len(widths))]
    if style in ("heads", "fused"):
        planes = [filled(pages, heads, page_tokens, width) for width in widths]
        return planes, [plane.transpose(0, 2, 1, 3) for plane in planes]
    if style == "pages_last":
        planes = [filled(page_tokens, heads, width, pages) for width in widths]
        return planes, [plane.transpose(3, 0, 1, 2) for plane in planes]
    if style == "gaps":
        planes = [filled(pages, heads, page_tokens, 2 * width) for width in widths]
        return planes, [plane[..., ::2].transpose(0, 2, 1, 3) for plane in planes]
    planes = [filled(pages, page_tokens, heads, width) for width in widths]
    if style == "backwards":
        return planes, [plane[::-1] for plane in planes]
    assert style == "tokens"
    return planes, list(planes)


def _hand_over(view: Array, group: KvGroup, library: str) -> Any:
    """The same memory as what an engine would pass."""
    if library == "numpy" or min(view.strides) < 0:
        return view
    signed = torch.from_numpy(view.view(view.dtype.str.replace("u", "i")))
    return signed.view(getattr(torch, group.dtype))


# A store that a test can move the time of, and act in the middle of ---------------------------------------------------


Interruption = Callable[[Sequence[FrameCopy]], object]


@dataclass
class InterruptibleMover:
    """The real mover; what is in `before` and `after` is called once, around the next copies, outside the lock."""

    mover: Mover
    before: list[Interruption] = field(default_factory=list)
    after: list[Interruption] = field(default_factory=list)
    runs: int = 0

    def run(self, copies: Sequence[FrameCopy]) -> list[MoveOutcome]:
        """Copy and verify."""
        self.runs += 1
        _call(self.before, copies)
        done = self.mover.run(copies)
        _call(self.after, copies)
        return done


def _call(interruptions: list[Interruption], copies: Sequence[FrameCopy]) -> None:
    pending = interruptions[:]
    interruptions.clear()
    for interruption in pending:
        interruption(copies)


class WatchedDoor(EmbeddedDoor):
    """A tenant's door that says at once which block a put has made readable.

    on_stored: who is told, the innermost put last; one put may run in the middle of another.
    """

    def __init__(self, store: Store, keys: TenantKeys) -> None:
        super().__init__(store, keys)
        self.on_stored: list[Callable[[int], None]] = []
        self.on_await: Callable[[], object] = lambda: None  # what others do while a put waits for their blocks
        self._fillings: dict[int, tuple[list[int], Callable[[int], None]]] = {}
        stand_in(self, m.Reserve, self._watch_reserve)
        stand_in(self, m.Commit, self._watch_commit)
        stand_in(self, m.Await, self._watch_await)

    def _watch_await(self, request: m.Await, wait: Callable[[], m.Awaited]) -> m.Awaited:
        assert request.seconds > 0, "a put that may wait"
        self.on_await()
        answer = self._store.handle(self._client, msgspec.structs.replace(request, seconds=0.0))
        assert isinstance(answer, m.Awaited)
        return answer

    def _watch_reserve(self, request: m.Reserve, reserve: Callable[[], m.Reserved]) -> m.Reserved:
        reserved = reserve()
        reply = reserved.reply
        if reply.reservation and self.on_stored:
            self._fillings[reply.reservation] = (list(reply.blocks), self.on_stored[-1])
        return reserved

    def _watch_commit(self, request: m.Commit, commit: Callable[[], m.Counted]) -> m.Counted:
        committed = commit()
        if committed.blocks and request.reservation in self._fillings:
            blocks, tell = self._fillings.pop(request.reservation)
            for block in blocks[: committed.blocks]:  # all of them: a handle commits each part as a whole
                tell(block)
        return committed


@dataclass
class OpenStore:
    """An embedded store and what a test needs of its inside."""

    store: EmbeddedStore
    core: Store
    keys: KeyFile
    ring: KeyRing
    clock: FakeClock
    mover: InterruptibleMover
    blocks: BlockTable

    def namespace(self, model: str, layout: Layout, tenant: str = "default", **fields: Any) -> Owned:
        """A namespace of a tenant, with its name among all that the test uses."""
        keys = self.keys.tenant(tenant)
        self.ring.add(keys)
        door = WatchedDoor(self.core, keys)
        handle = NamespaceHandle(door, Namespace(model, layout, "raw", **fields), codec_named("raw"))
        return Owned(f"{tenant}/{model}/{fields}", tenant, layout, handle, door)

    def drop(self, space: Owned) -> int:
        """Forget a namespace, as the tenant that it belongs to."""
        return self.store.for_tenant(space.tenant).drop(space.handle)

    def close(self) -> None:
        """Give everything back."""
        self.store.close()


@dataclass(frozen=True)
class Owned:
    """A namespace that a test uses; `name` goes into its KV."""

    name: str
    tenant: str
    layout: Layout
    handle: NamespaceHandle
    door: WatchedDoor

    @property
    def number(self) -> int:
        """In the store."""
        return self.door.number_in_store(self.handle.number)

    def put(self, prompt: Prompt, version: int = 0, *, first_token: int = 0, **how: Any) -> Any:
        """Store a prompt's full blocks from pages of the given style."""
        pages = self.pages(len(prompt.letters) * BLOCK_TOKENS - first_token, **how)
        for block in range(len(prompt.letters)):
            pages.write(block * BLOCK_TOKENS - first_token, self.kv(prompt, block, version))
        return self.handle.put(prompt.token_ids, pages.pages, first_token=first_token, extra_keys=prompt.extra)

    def match(self, prompt: Prompt) -> Any:
        """Look a prompt up; hits and misses add up."""
        match = self.handle.match(prompt.token_ids, prompt.extra)
        account = match.account
        assert account.asked == prompt.tokens == sum(account.hits.values()) + sum(account.misses.values())
        assert account.hit_tokens == match.tokens == match.blocks * BLOCK_TOKENS == len(match.tier_of_block) * 64
        assert (match.reason is None) == (match.blocks == len(prompt.letters))
        return match

    def holds(self, prompt: Prompt, version: int = 0, **how: Any) -> int:
        """Blocks that can be read now; every byte of them is compared."""
        with self.handle.lease(self.match(prompt)) as lease:
            pages = self.pages(lease.tokens, **how)
            before = pages.snapshot()
            loaded = self.handle.get(lease, pages.pages)
            blocks = loaded.tokens // BLOCK_TOKENS
            kv = {block * BLOCK_TOKENS: self.kv(prompt, block, version) for block in range(blocks)}
            pages.expect(before, kv, ignore_from=None if loaded.reason is None else loaded.tokens)
            assert loaded.account.asked == prompt.tokens
            return blocks

    def pages(
        self, tokens: int, page_tokens: int = BLOCK_TOKENS, style: str = "heads", library: str = "numpy", seed: int = 0
    ) -> PagedKv:
        """Fresh pages that cover so many tokens."""
        return PagedKv(self.layout, -(-tokens // page_tokens), page_tokens, style, library, seed)

    def kv(self, prompt: Prompt, block: int, version: int = 0) -> Kv:
        """What the block's KV is."""
        return block_kv(self.layout, self.name, prompt.chain(block), version)

    def frames(self, lease: Any, block: int) -> list[FrameSpan]:
        """The whole frames of a leased block, one per part; fewer where memory was given back since."""
        position = block - lease.reply.first_block
        return [span for places in lease.reply.places for span in self.door.memory(0, [places[position]])]


def open_store(
    directory: str | Path,
    dram: int = 1 << 20,
    extent: int = 64 << 10,
    limits: Limits | None = None,
    policy: PolicyMaker = LeafFirstLru,
) -> OpenStore:
    """An embedded store of a few extents, put together by hand."""
    path = Path(directory)
    lock, keys, ring, clock = DirectoryLock(path), StoreKeys(KeyFile(path / "keys")), KeyRing(), FakeClock()
    config = DramConfig(dram, extent)
    tier = DramTier(ExtentPool(config.budget_bytes, config.extent_bytes))
    limits = limits or Limits()
    index = PrefixIndex(limits.forgotten)
    blocks = BlockTable(index, Residency(policy(index.names, 1), Pins()), tier, ring)
    mover = InterruptibleMover(Mover(tier, ring))
    core = Store(blocks, clock, limits)
    core._room._mover = mover  # type: ignore[assignment]
    store = EmbeddedStore(core, ring, keys, lock, StoreParts(codec_named), DisplayNames(path / "names"))
    return OpenStore(store, core, keys, ring, clock, mover, blocks)


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kv-model-")


# Layouts: one part; several parts; one latent plane with padding behind the payload -----------------------------------

WHOLE = Layout.gqa(layers=1, kv_heads=2, head_dim=16, dtype="float32")
SHARDED = Layout.gqa(layers=2, kv_heads=2, head_dim=8, dtype="float16", head_shards=2, layer_shards=2)
LATENT = Layout.mla(layers=2, latent_dim=8, rope_dim=4, dtype="bfloat16")
