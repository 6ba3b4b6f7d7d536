"""What makes room: extents that change hands, frames that move, and everything that can happen to them meanwhile.

Memory is four extents of 64 KiB. A block of the layout WHOLE takes 20 KiB, so an extent holds three of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asking import Asking
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import StoreClosed
from kvstore.config import Limits
from kvstore.protocol.messages import ReserveReply
from model.store_model import BLOCK_TOKENS, LATENT, SHARDED, WHOLE, OpenStore, Owned, Prompt, open_store
from tiering.frame import HEADER_BYTES
from tiering.tier import FrameSpan

KIB = 1024
PER_EXTENT = 3


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenStore]:
    opened = open_store(tmp_path, dram=256 * KIB, limits=Limits(pinned_fraction=1.0))
    yield opened
    if not opened.core.closed:
        opened.core.check()
    opened.close()


def single(letter: int) -> Prompt:
    """A prompt of one block."""
    return Prompt((letter,))


def fill(space: Owned, count: int = 4 * PER_EXTENT) -> list[Prompt]:
    """That many prompts of one block each: they stand in the extents in this order."""
    prompts = [single(letter) for letter in range(count)]
    for prompt in prompts:
        assert space.put(prompt).stored == 1
    return prompts


def touch(space: Owned, prompts: list[Prompt]) -> None:
    """Use them, so that others go first."""
    for prompt in prompts:
        space.handle.lease(space.match(prompt)).release()


def with_holes(opened: OpenStore, space: Owned) -> list[Prompt]:
    """All extents full, then one block gone from each of three: two live frames each, and one extent still full."""
    prompts = fill(space)
    holes = [prompts[0], prompts[3], prompts[6]]
    touch(space, [prompt for prompt in prompts if prompt not in holes])
    assert opened.core.evict(3) == 3
    assert [space.match(prompt).blocks for prompt in holes] == [0, 0, 0]
    return [prompt for prompt in prompts if prompt not in holes]


def flip(space: Owned, prompt: Prompt, block: int, at: int, part: int = 0) -> None:
    """One bit of a stored frame."""
    with space.handle.lease(space.match(prompt)) as lease:
        space.frames(lease, block)[part].view[at] ^= 1


def fill_part(space: Owned, prompt: Prompt, reply: ReserveReply, part: int) -> list[list[bytes]]:
    """What a producer does before it commits a part."""
    pages = space.pages(len(prompt.letters) * BLOCK_TOKENS)
    for block in range(len(prompt.letters)):
        pages.write(block * BLOCK_TOKENS, space.kv(prompt, block))
    coder = codec_named("raw").bind(pages.pages, space.layout, space.layout.parts[part])
    digests = []
    for block, place in zip(reply.blocks, reply.places[part], strict=True):
        span, size = space.door.memory(0, [place])[0], space.layout.parts[part].raw_bytes
        payload = FrameSpan(span.address + HEADER_BYTES, span.view[HEADER_BYTES : HEADER_BYTES + size])
        digests += coder.encode([block * BLOCK_TOKENS], [payload], space.handle._digest)
    return digests


# Memory wanders -------------------------------------------------------------------------------------------------------


def test_an_extent_is_emptied_by_moving_and_nothing_is_lost(opened: OpenStore) -> None:
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", WHOLE)
    kept = with_holes(opened, space)
    assert other.put(single(0)).stored == 1
    counters = opened.core.usage().counters
    assert (counters["reclaimed_extents"], counters["moved_frames"], counters["evicted_blocks"]) == (1, 2, 3)
    assert [space.holds(prompt) for prompt in kept] == [1] * len(kept)
    assert other.holds(single(0)) == 1


def test_memory_wanders_back_and_forth_between_tenants_and_shapes(tmp_path: Path) -> None:
    opened = open_store(tmp_path, dram=1 << 20)
    spaces = [
        opened.namespace("a", WHOLE),
        opened.namespace("b", SHARDED, "other"),
        opened.namespace("c", LATENT),
        opened.namespace("a", WHOLE, "other"),
    ]
    for turn in range(3):
        for space in spaces:
            # The first prompt is used throughout, so that live frames stand between those that go.
            for letter in range(60):
                prompt = Prompt((letter, turn))
                assert space.put(prompt, version=turn).stopped_at is None
                assert space.holds(prompt, version=turn) >= 1
                space.match(Prompt((0, turn)))
                opened.core.check()
    counters = opened.core.usage().counters
    print(counters)
    assert counters["reclaimed_extents"] > 50 and counters["moved_frames"] > 0
    opened.close()


def test_the_parts_of_a_block_do_not_take_an_extent_from_each_other(tmp_path: Path) -> None:
    """Four parts need four extents: each that is made for one part is at first as free as any that can be reclaimed."""
    opened = open_store(tmp_path, dram=256 * KIB)
    whole, sharded = opened.namespace("a", WHOLE), opened.namespace("b", SHARDED)
    fill(whole)
    assert sharded.put(single(0)).stored == 1
    assert opened.core.usage().counters["reclaimed_extents"] == 4
    assert sharded.holds(single(0)) == 1
    opened.core.check()
    opened.close()


def test_a_pinned_extent_is_not_the_one_that_is_emptied(opened: OpenStore) -> None:
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", WHOLE)
    kept = with_holes(opened, space)
    with space.handle.lease(space.match(kept[0])) as lease:
        before = [bytes(span.view) for span in space.frames(lease, 0)]
        assert other.put(single(0)).stored == 1
        assert opened.core.usage().counters["moved_frames"] == 2
        assert space.handle.lease(space.match(kept[0])).reply.places == lease.reply.places, "it did not move"
        assert [bytes(span.view) for span in space.frames(lease, 0)] == before
    assert [space.holds(prompt) for prompt in kept] == [1] * len(kept)


@pytest.mark.parametrize("late", [False, True])
def test_a_reader_that_comes_during_a_move_keeps_its_frame(opened: OpenStore, late: bool) -> None:
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", WHOLE)
    kept = with_holes(opened, space)
    leases = []

    def meanwhile(_: object) -> None:
        leases.append(space.handle.lease(space.match(kept[0])))
        opened.core.check()

    (opened.mover.after if late else opened.mover.before).append(meanwhile)
    assert other.put(single(0)).stored == 1
    (lease,) = leases
    pages = space.pages(BLOCK_TOKENS)
    before = pages.snapshot()
    assert space.handle.get(lease, pages.pages).tokens == BLOCK_TOKENS
    pages.expect(before, {0: space.kv(kept[0], 0)})
    opened.core.check()
    assert opened.mover.runs == 2, "the first extent was in use, another was emptied"
    lease.release()
    assert [space.holds(prompt) for prompt in kept] == [1] * len(kept)


# Damage that a move finds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 200, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + WHOLE.raw_bytes - 1])
def test_a_move_quarantines_what_was_damaged(opened: OpenStore, at: int) -> None:
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", WHOLE)
    kept = with_holes(opened, space)
    flip(space, kept[0], 0, at)
    assert other.put(single(0)).stored == 1
    counters = opened.core.usage().counters
    assert counters["quarantined_blocks"] == 1 and counters["moved_frames"] == 1
    match = space.match(kept[0])
    assert match.blocks == 0 and match.reason is MissReason.CORRUPT
    assert [space.holds(prompt) for prompt in kept[1:]] == [1] * (len(kept) - 1)
    assert space.put(kept[0], version=5).stored == 1 and space.holds(kept[0], version=5) == 1


def test_a_move_does_not_carry_an_older_frame_of_the_same_block(opened: OpenStore) -> None:
    """Its MAC and its digests are right, and it is not what was committed last."""
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", WHOLE)
    space.put(single(1))
    with space.handle.lease(space.match(single(1))) as lease:
        old = bytes(space.frames(lease, 0)[0].view)
    opened.drop(space)
    kept = with_holes(opened, space)
    assert kept[0] == single(1)
    with space.handle.lease(space.match(kept[0])) as lease:
        space.frames(lease, 0)[0].view[:] = old
    assert other.put(single(0)).stored == 1
    assert opened.core.usage().counters["quarantined_blocks"] == 1
    assert space.match(kept[0]).reason is MissReason.CORRUPT


def test_a_reader_of_a_damaged_frame_that_is_being_moved_finds_out(opened: OpenStore) -> None:
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", WHOLE)
    kept = with_holes(opened, space)
    flip(space, kept[0], 0, HEADER_BYTES + 7)

    def meanwhile(_: object) -> None:
        assert space.holds(kept[0]) == 0
        opened.core.check()

    opened.mover.before.append(meanwhile)
    assert other.put(single(0)).stored == 1
    assert opened.core.usage().counters["quarantined_blocks"] == 1
    assert space.match(kept[0]).reason is MissReason.CORRUPT


def test_a_namespace_whose_extents_are_all_condemned_gets_new_ones(opened: OpenStore) -> None:
    """Nobody else is there who could want them."""
    space = opened.namespace("a", WHOLE)
    for turn in range(3):
        for prompt in fill(space):
            flip(space, prompt, 0, 100 + turn)
            assert space.holds(prompt, version=0) == 0
    assert opened.core.usage().counters["quarantined_blocks"] == 36
    assert space.put(single(0)).stored == 1 and space.holds(single(0)) == 1


# Frames of blocks that are not whole ----------------------------------------------------------------------------------


UNDER_WAY = Prompt((7,))


def half_stored(opened: OpenStore) -> tuple[Owned, ReserveReply]:
    """The first of four parts of a block is committed."""
    sharded = opened.namespace("b", SHARDED)
    reply = Asking(sharded.door).reserve(sharded.handle.number, sharded.match(UNDER_WAY).keys, 0, 0, None)
    assert Asking(sharded.door).commit(reply.reservation, 0, 0, fill_part(sharded, UNDER_WAY, reply, 0)) == 0
    return sharded, reply


def thin_out(opened: OpenStore, sharded: Owned) -> list[Prompt]:
    """Fill up the extents of the block under way, and further ones with two blocks; then only those two stay.

    The extent with one frame, which is nobody's yet, is now the one with the least to move.
    """
    prompts = [single(letter) for letter in range(100, 109)]
    assert [sharded.put(prompt).stored for prompt in prompts] == [1] * 9
    touch(sharded, prompts[7:])
    assert opened.core.evict(7) == 7
    assert opened.core.usage().dram.taken_bytes == 8 * 64 * KIB
    return prompts[7:]


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[OpenStore]:
    opened = open_store(tmp_path, dram=8 * 64 * KIB)
    yield opened
    opened.core.check()
    opened.close()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_part_of_a_block_under_way_is_left_where_it_is(wide: OpenStore, damaged: bool) -> None:
    sharded, reply = half_stored(wide)
    if damaged:
        sharded.door.memory(0, [reply.places[0][0]])[0].view[HEADER_BYTES] ^= 1
    kept = thin_out(wide, sharded)
    assert wide.namespace("a", WHOLE).put(single(0)).stored == 1
    wide.core.check()
    assert wide.core.usage().counters["moved_frames"] == 2 and "quarantined_blocks" not in wide.core.usage().counters
    for part in (1, 2, 3):
        visible = Asking(sharded.door).commit(reply.reservation, part, 0, fill_part(sharded, UNDER_WAY, reply, part))
    assert visible == 1
    assert sharded.holds(UNDER_WAY) == (0 if damaged else 1)
    assert [sharded.holds(prompt) for prompt in kept] == [1, 1]


def test_a_frame_that_was_orphaned_is_nobodys(wide: OpenStore) -> None:
    """Its namespace was dropped while it was being stored; its row belongs to another block by now."""
    sharded, reply = half_stored(wide)
    wide.drop(sharded)
    kept = thin_out(wide, sharded)
    assert wide.namespace("a", WHOLE).put(single(0)).stored == 1
    wide.core.check()
    assert wide.core.usage().counters["moved_frames"] == 2
    assert [sharded.holds(prompt) for prompt in kept] == [1, 1]
    Asking(sharded.door).abort(reply.reservation)
    assert wide.core.usage().dram.reserved == 0
    assert [sharded.holds(prompt) for prompt in kept] == [1, 1]


# What a put says ------------------------------------------------------------------------------------------------------


def test_a_put_does_not_call_held_what_it_evicted_itself(opened: OpenStore) -> None:
    """A chain lost its first block; to fill that again, its own last block has to go."""
    space = opened.namespace("a", WHOLE)
    chain = Prompt(tuple(range(4 * PER_EXTENT)))
    assert space.put(chain).stored == 12
    flip(space, chain, 0, 300)
    assert space.holds(chain) == 0
    result = space.put(chain, version=1)
    match = space.match(chain)
    assert (result.present, result.stored) == (0, 1)
    assert result.stopped_at == match.blocks == 11 and result.reason is match.reason is MissReason.EVICTED


def test_a_chain_that_does_not_fit_keeps_its_beginning(opened: OpenStore) -> None:
    """However many pieces it is stored in, and whatever was there before."""
    space, other = opened.namespace("a", LATENT), opened.namespace("b", WHOLE)
    fill(other)
    slots = 4 * 8
    chain = Prompt(tuple(range(200)))
    result = space.put(chain)
    assert (result.present, result.stored, result.stopped_at) == (0, slots, slots)
    assert result.reason is MissReason.QUOTA and space.holds(chain) == slots
    again = space.put(chain, version=1)
    assert (again.present, again.stored, again.stopped_at) == (slots, 0, slots)


@pytest.mark.parametrize("late", [False, True])
def test_a_put_that_is_interrupted_leaves_nothing_behind(opened: OpenStore, late: bool) -> None:
    """By the user's own hand, for one: no pending blocks, no pins, and nobody waits for its move for ever."""
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", WHOLE)
    kept = with_holes(opened, space)

    def meanwhile(_: object) -> None:
        raise KeyboardInterrupt

    (opened.mover.after if late else opened.mover.before).append(meanwhile)
    with pytest.raises(KeyboardInterrupt):
        other.put(Prompt((0, 1)))
    opened.core.check()
    usage = opened.core.usage()
    assert (usage.reservations, usage.pinned_bytes, usage.dram.reserved) == (0, 0, 0)
    assert other.match(single(0)).reason is MissReason.ABSENT
    assert other.put(single(0)).stored == 1
    assert [space.holds(prompt) for prompt in kept] == [1] * len(kept)
    assert opened.drop(space) == len(kept)


def test_a_store_that_closes_under_a_drop(opened: OpenStore) -> None:
    """The drop waits for a move; when that is over there is nothing left to drop."""
    space, other = opened.namespace("a", WHOLE), opened.namespace("b", WHOLE)
    with_holes(opened, space)
    raised: list[BaseException] = []

    def drop() -> None:
        try:
            opened.drop(space)
        except BaseException as error:
            raised.append(error)

    dropper = threading.Thread(target=drop)

    def meanwhile(_: object) -> None:
        dropper.start()
        dropper.join(0.2)
        opened.core.close()

    opened.mover.before.append(meanwhile)
    assert other.put(single(0)).reason is MissReason.DISABLED
    dropper.join(30)
    assert [type(error) for error in raised] == [StoreClosed]


class Opens:
    """A lock that lets somebody else in, once, as soon as it is free."""

    def __init__(self, lock: threading.Lock, enter: Callable[[], None]) -> None:
        self._lock = lock
        self._enter: Callable[[], None] | None = enter

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        enter, self._enter = self._enter, None
        if enter is not None:
            enter()


def test_a_store_that_closes_where_a_drop_lets_go_of_it(opened: OpenStore) -> None:
    """A drop notes that nothing may be stored, and takes the lock again for what is there."""
    space = opened.namespace("a", WHOLE)
    fill(space)
    core = opened.core
    core.lock = Opens(core.lock, core.close)
    with pytest.raises(StoreClosed):
        opened.drop(space)
    assert core.closed
