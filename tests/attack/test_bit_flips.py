"""Bits that flip, and frames that stand where they do not belong: a miss at the reader, never other bytes.

Every bit of a header and thousands of random bits of payloads, each before the match, between match and lease, and
after the lease was granted. Frames that are valid in themselves, under their own MAC, in a place that is not theirs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvstore.block.account import MissReason
from kvstore.block.layout import Layout
from kvstore.client.handle import Lease
from kvstore.config import Limits
from kvstore.protocol.door import NamedLease
from model.store_model import (
    BLOCK_TOKENS,
    LATENT,
    SHARDED,
    WHOLE,
    OpenStore,
    Owned,
    PagedKv,
    Prompt,
    open_store,
    temporary_directory,
)
from tiering.frame import HEADER_BYTES, frame_bytes

CHAIN = Prompt(tuple(range(64)))
"""A chain of 64 blocks: a flip in each of them is one round."""

WHEN = ("before the match", "after the match", "after the lease")
PAYLOAD_FLIPS = 5000
SEED = 20261121

# (part, byte of the frame, bit)
Flip = tuple[int, int, int]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenStore]:
    opened = open_store(tmp_path, dram=6 << 20, extent=256 << 10, limits=Limits(pinned_fraction=1.0))
    yield opened
    opened.core.check()
    opened.close()


def put_chain(space: Owned, pages: PagedKv, prompt: Prompt = CHAIN) -> None:
    """Store the whole chain, or what of it is not readable."""
    result = space.handle.put(prompt.token_ids, pages.pages)
    assert result.stopped_at is None and result.reason is None


def chain_pages(space: Owned, prompt: Prompt = CHAIN, version: int = 0) -> PagedKv:
    """Pages with a chain's KV."""
    pages = space.pages(len(prompt.letters) * BLOCK_TOKENS)
    for block in range(len(prompt.letters)):
        pages.write(block * BLOCK_TOKENS, space.kv(prompt, block, version))
    return pages


def flip(space: Owned, lease: Lease, flips: Sequence[Flip]) -> None:
    """One bit in each of the leased blocks, in order."""
    for block, (part, byte, bit) in enumerate(flips):
        space.frames(lease, block)[part].view[byte] ^= 1 << bit


def every_block_is_a_miss(space: Owned, lease: Lease, blocks: int, into: PagedKv) -> None:
    """From whichever block a reader starts, it gets nothing, and the blocks before it stay promised."""
    for block in range(blocks):
        loaded = space.handle.get(lease, into.pages, block * BLOCK_TOKENS)
        assert loaded.reason is MissReason.CORRUPT and loaded.tokens == block * BLOCK_TOKENS, block
        assert loaded.account.hit_tokens == loaded.tokens and loaded.account.asked == CHAIN.tokens


def attack(opened: OpenStore, space: Owned, flips: Sequence[Flip], when: str) -> None:
    """Rounds of 64 blocks: flip one bit in each, read each, and store what was quarantined anew."""
    pages, into = chain_pages(space), space.pages(BLOCK_TOKENS)
    quarantined = 0
    for start in range(0, len(flips), len(CHAIN.letters)):
        chosen = flips[start : start + len(CHAIN.letters)]
        put_chain(space, pages)
        match = space.match(CHAIN) if when == "after the match" else None
        lease = space.handle.lease(space.match(CHAIN))
        flip(space, lease, chosen)
        if when != "after the lease":
            lease.release()
            match = match or space.match(CHAIN)
            lease = space.handle.lease(match)
        assert lease.blocks == len(CHAIN.letters)
        every_block_is_a_miss(space, lease, len(chosen), into)
        lease.release()
        quarantined += len(chosen)
        assert opened.core.usage().counters["quarantined_blocks"] == quarantined
        found = space.match(CHAIN)
        assert found.blocks == 0 and found.reason is MissReason.CORRUPT
        opened.drop(space)


@pytest.mark.parametrize("when", WHEN)
def test_every_bit_of_a_header(opened: OpenStore, when: str) -> None:
    space = opened.namespace("a", Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="float16"))
    flips = [(0, bit // 8, bit % 8) for bit in range(HEADER_BYTES * 8)]
    attack(opened, space, flips, when)
    assert opened.core.usage().counters["reported_frames"] == 32768


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("layout", [WHOLE, SHARDED, LATENT], ids=["whole", "sharded", "latent"])
def test_random_bits_of_payloads(opened: OpenStore, layout: Layout, when: str) -> None:
    """A third of them in each layout, in any part of a family."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    space = opened.namespace("a", layout)
    flips = []
    for _ in range(PAYLOAD_FLIPS // 3 + 1):
        part = chance.choice(layout.parts)
        flips.append((part.index, HEADER_BYTES + chance.randrange(part.raw_bytes), chance.randrange(8)))
    attack(opened, space, flips, when)


def test_every_bit_of_a_header_of_any_part(opened: OpenStore) -> None:
    """The stamps of a family differ in their part only: each of their first bytes is watched in each part."""
    space = opened.namespace("a", SHARDED)
    flips = [(part, byte, bit) for part in range(4) for byte in range(256) for bit in (byte % 8,)]
    attack(opened, space, flips, "after the lease")


def test_bits_of_the_padding_are_nobodys(opened: OpenStore) -> None:
    space = opened.namespace("a", LATENT)
    size = LATENT.parts[0].raw_bytes
    padding = range(HEADER_BYTES + size, frame_bytes(size))
    assert len(padding) == 1024
    put_chain(space, chain_pages(space))
    with space.handle.lease(space.match(CHAIN)) as lease:
        for block in range(lease.blocks):
            view = space.frames(lease, block)[0].view
            for byte in padding:
                view[byte] ^= 0xFF
    assert space.holds(CHAIN) == 64
    assert "reported_frames" not in opened.core.usage().counters


def test_every_bit_of_a_small_frame_read_from_the_middle_of_its_block(opened: OpenStore) -> None:
    """Half a block is loaded, the whole of it is verified: the other half's bits count too."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    space = opened.namespace("a", LATENT)
    put_chain(space, chain_pages(space))
    with space.handle.lease(space.match(CHAIN)) as lease:
        for block in range(lease.blocks):
            byte = HEADER_BYTES + chance.randrange(LATENT.parts[0].raw_bytes)
            space.frames(lease, block)[0].view[byte] ^= 1 << chance.randrange(8)
            into = space.pages(32, page_tokens=32)
            before = into.snapshot()
            loaded = space.handle.get(lease, into.pages, block * BLOCK_TOKENS + 32)
            assert loaded.reason is MissReason.CORRUPT and loaded.tokens == block * BLOCK_TOKENS
            into.expect(before, {}, ignore_from=0)


def test_the_blocks_before_a_damaged_one_are_delivered(opened: OpenStore) -> None:
    space = opened.namespace("a", SHARDED)
    put_chain(space, chain_pages(space))
    for block in (63, 40, 7, 0):
        with space.handle.lease(space.match(CHAIN)) as lease:
            space.frames(lease, block)[block % 4].view[HEADER_BYTES + block] ^= 4
        assert space.holds(CHAIN) == block
        match = space.match(CHAIN)
        assert match.blocks == block and match.account.misses == {MissReason.CORRUPT: (64 - block) * BLOCK_TOKENS}
    put_chain(space, chain_pages(space))
    assert space.holds(CHAIN) == 64


# Frames in places that are not theirs ---------------------------------------------------------------------------------


def bytes_of(space: Owned, prompt: Prompt, block: int, part: int = 0) -> bytes:
    """A whole frame."""
    with space.handle.lease(space.match(prompt)) as lease:
        return bytes(space.frames(lease, block)[part].view)


A, B = Prompt((1, 2, 3)), Prompt((5, 6))


def two_chains(opened: OpenStore) -> Owned:
    space = opened.namespace("a", SHARDED)
    assert space.put(A).stored == 3 and space.put(B).stored == 2
    return space


def of_another_namespace(opened: OpenStore, *name: str) -> bytes:
    other = opened.namespace(name[0], SHARDED, *name[1:])
    assert other.put(A).stored == 3
    return bytes_of(other, A, 1, part=2)


def of_another_store(opened: OpenStore, space: Owned) -> bytes:
    """The same block, committed first in another store: equal in all but its generation and its keys."""
    with temporary_directory() as directory:
        other = open_store(directory)
        twin = other.namespace("a", SHARDED)
        assert twin.put(A).stored == 3
        frame = bytes_of(twin, A, 1, part=2)
        other.close()
    return frame


def of_an_older_generation(opened: OpenStore, space: Owned, version: int) -> bytes:
    """The same block as it was before it was evicted, under the same keys."""
    old = bytes_of(space, A, 1, part=2)
    opened.drop(space)
    assert space.put(A, version=version).stored == 3
    return old


def crossed_frames(header: bytes, payload: bytes) -> bytes:
    return header[:HEADER_BYTES] + payload[HEADER_BYTES:]


MISPLACED: dict[str, Callable[[OpenStore, Owned], bytes]] = {
    "another block": lambda opened, space: bytes_of(space, B, 1, part=2),
    "the block before": lambda opened, space: bytes_of(space, A, 0, part=2),
    "another part": lambda opened, space: bytes_of(space, A, 1, part=3),
    "another namespace": lambda opened, space: of_another_namespace(opened, "b"),
    "another tenant": lambda opened, space: of_another_namespace(opened, "a", "other"),
    "another store": of_another_store,
    "an older generation": lambda opened, space: of_an_older_generation(opened, space, 1),
    "an older generation of the same bytes": lambda opened, space: of_an_older_generation(opened, space, 0),
    "the header of another": lambda _, space: crossed_frames(bytes_of(space, B, 1, 2), bytes_of(space, A, 1, 2)),
    "the payload of another": lambda _, space: crossed_frames(bytes_of(space, A, 1, 2), bytes_of(space, B, 1, 2)),
    "nothing": lambda opened, space: bytes(len(bytes_of(space, A, 1, part=2))),
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("source", MISPLACED)
def test_a_frame_that_stands_where_it_does_not_belong(opened: OpenStore, source: str, when: str) -> None:
    space = two_chains(opened)
    wrong = MISPLACED[source](opened, space)
    match = space.match(A)
    lease = space.handle.lease(match)
    assert lease.blocks == 3
    space.frames(lease, 1)[2].view[:] = wrong
    if when != "after the lease":
        lease.release()
        lease = space.handle.lease(match if when == "after the match" else space.match(A))
    into = space.pages(3 * BLOCK_TOKENS)
    loaded = space.handle.get(lease, into.pages)
    assert loaded.reason is MissReason.CORRUPT and loaded.tokens == BLOCK_TOKENS
    assert loaded.account.misses == {MissReason.CORRUPT: 2 * BLOCK_TOKENS}
    lease.release()
    match = space.match(A)
    assert match.blocks == 1 and match.reason is MissReason.CORRUPT
    assert space.put(A, version=2).stored == 1
    with space.handle.lease(space.match(A)) as lease:
        into = space.pages(BLOCK_TOKENS)
        before = into.snapshot()
        assert space.handle.get(lease, into.pages, BLOCK_TOKENS).reason is None
        into.expect(before, {0: space.kv(A, 1, 2)})
    assert opened.core.usage().counters["quarantined_blocks"] == 1


def crossed(lease: Lease, keys: Sequence[bytes], parts: Sequence[int]) -> Lease:
    """A lease as a door would grant it that mixed something up: its frames and their digests belong together."""
    reply = msgspec.structs.replace(
        lease.reply,
        lease=0,
        places=tuple(lease.reply.places[part] for part in parts),
        header_digests=tuple(lease.reply.header_digests[part] for part in parts),
    )
    return Lease(lease._door, NamedLease(reply), list(keys), lease.account, BLOCK_TOKENS, lease._grant)


def test_a_lease_on_the_frames_of_another_block(opened: OpenStore) -> None:
    space = two_chains(opened)
    into = space.pages(2 * BLOCK_TOKENS)
    with space.handle.lease(space.match(B)) as lease:
        straight = crossed(lease, lease.keys, range(4))
        assert space.handle.get(straight, into.pages).tokens == 2 * BLOCK_TOKENS
        before = into.snapshot()
        for wrong in (crossed(lease, space.match(A).keys, range(4)), crossed(lease, lease.keys, (0, 2, 1, 3))):
            loaded = space.handle.get(wrong, into.pages)
            assert loaded.tokens == 0 and loaded.reason is MissReason.CORRUPT
        into.expect(before, {})
    assert space.holds(B) == 2, "its frames are as good as they were"
