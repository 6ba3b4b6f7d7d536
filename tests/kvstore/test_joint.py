"""Several processes, one block: handles of one shard, and puts that their owners make together."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asking import stand_in
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, LayoutMismatch
from kvstore.block.identity import Namespace
from kvstore.block.layout import KvGroup, Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle, PutResult
from kvstore.config import Limits
from kvstore.core.reservations import (
    ALL_ENDED_KEPT,
    ENDED_KEPT,
    ENDED_SECONDS,
    MAX_UNDER_WAY,
    CollectivePut,
    CollectivePuts,
    ReservationRecord,
)
from kvstore.protocol import messages as m
from kvstore.protocol.door import Collective
from kvstore.protocol.messages import ReserveReply
from tiering.frame import HEADER_BYTES
from workbench import (
    KIB,
    Bench,
    bench,
    blank_pages,
    ids,
    plausible_pages,
    random_pages,
    refused,
    same_tokens,
    shard_pages,
    small_layout,
)

TWO = small_layout(head_shards=2)
FOUR_OF_TWO = small_layout(head_shards=4)
BY_LAYER = small_layout(kv_heads=4, head_shards=2, layer_shards=2)
LATENT = Layout.mla(layers=2, latent_dim=24, rope_dim=8, dtype="bfloat16", head_shards=2)
MIXED = Layout(
    (KvGroup("full", (0, 1), 4, (8, 8), "bfloat16"), KvGroup("latent", (2,), 1, (32,), "bfloat16")), head_shards=4
)
DISABLED, IN_FLIGHT = MissReason.DISABLED, MissReason.IN_FLIGHT


class Ranks:
    """The handles of all ranks on one store, and one that sees whole blocks."""

    def __init__(self, layout: Layout, codec: str = "raw", **options: Any) -> None:
        self.bench: Bench = bench(**{"dram": 2 << 20, **options})
        self.store = self.bench.store
        self.layout = layout
        self.whole = self.bench.namespace(layout, codec=codec)
        self.ranks = [self.bench.namespace(layout, codec=codec, shard=one) for one in range(layout.head_shards)]

    def put(self, rank: int, pages: Pages, tokens: int, collective: str, start: int = 0, **options: Any) -> PutResult:
        mine = shard_pages(pages, self.layout, rank)
        return self.ranks[rank].put(ids(tokens, start), mine, collective=collective, **options)

    def reads(self, handle: NamespaceHandle, pages: Pages, tokens: int, start: int = 0) -> int:
        """How many tokens can be read; all that can be are right."""
        blank = blank_pages(self.layout, tokens // 64)
        if handle.shard is not None:
            pages, blank = (shard_pages(one, self.layout, handle.shard) for one in (pages, blank))
        with handle.lease(handle.match(ids(tokens, start))) as lease:
            loaded = handle.get(lease, blank)
        assert same_tokens(pages, blank, range(loaded.tokens))
        return loaded.tokens

    def reserve(
        self, rank: int, blocks: int, collective: str = "j", start: int = 0, first_block: int = 0, session: bytes = b""
    ) -> ReserveReply:
        """What the store says to one rank."""
        keys = self.whole.match(ids(64 * blocks, start)).keys
        parts = tuple(part.index for part in self.layout.parts_of(rank))
        return self.store.reserve(self.whole.number, keys, first_block, 0, None, Collective(collective, parts, session))

    def commit(self, rank: int, reply: ReserveReply, blocks: int | None = None) -> int:
        """All parts of a rank, or the next blocks of each."""
        done = 0
        for part in self.layout.parts_of(rank):
            if reply.places[part.index]:
                count = len(reply.blocks) if blocks is None else blocks
                digests = [[bytes(16)] * len(part.layers)] * count
                done = self.store.commit(reply.reservation, part.index, 0, digests)
        return done

    def blocks(self, blocks: int, start: int = 0) -> int:
        return self.whole.match(ids(64 * blocks, start)).blocks

    def is_at_rest(self) -> bool:
        self.store.check()
        usage = self.store.usage()
        return not usage.reservations and not usage.dram.reserved and usage.dram.used == usage.blocks * len(TWO.parts)


@pytest.fixture
def two() -> Ranks:
    return Ranks(TWO)


# Handles of one shard -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [TWO, FOUR_OF_TWO, BY_LAYER, LATENT, MIXED])
@pytest.mark.parametrize("codec", ["raw", "int8-kc64"])
def test_every_rank_reads_its_own_heads_of_what_one_process_stored(layout: Layout, codec: str) -> None:
    ranks = Ranks(layout, codec, dram=8 << 20)
    pages = plausible_pages(layout, 3)
    assert ranks.whole.put(ids(192), pages).stored == 3
    blank = blank_pages(layout, 3)
    with ranks.whole.lease(ranks.whole.match(ids(192))) as lease:
        assert ranks.whole.get(lease, blank).tokens == 192
        for rank, handle in enumerate(ranks.ranks):
            assert handle.namespace.digest() == ranks.whole.namespace.digest() and handle.number == ranks.whole.number
            mine = shard_pages(blank_pages(layout, 3), layout, rank)
            assert handle.get(lease, mine).tokens == 192
            assert same_tokens(shard_pages(blank, layout, rank), mine, range(192))
            later = shard_pages(blank_pages(layout, 2), layout, rank)
            assert handle.get(lease, later, first_token=64).tokens == 192
            assert same_tokens(later, mine, range(64, 192), 64)


@pytest.mark.parametrize("layout", [TWO, FOUR_OF_TWO, BY_LAYER, LATENT, MIXED])
def test_the_ranks_of_a_layout_hold_all_of_it(layout: Layout) -> None:
    held = [{part.index for part in layout.parts_of(rank)} for rank in range(layout.head_shards)]
    assert set.union(*held) == set(range(len(layout.parts)))
    groups = {group.name for group in layout.groups}
    for rank, parts in enumerate(held):
        assert {layout.parts[part].group.name for part in parts} == groups, rank
        assert {layer for part in parts for layer in layout.parts[part].layers} == set(layout.layers)
    assert layout.parts_of(None) == layout.parts


def test_of_fewer_heads_than_ranks_neighbours_share_one() -> None:
    assert [[part.index for part in FOUR_OF_TWO.parts_of(rank)] for rank in range(4)] == [[0], [0], [1], [1]]
    assert [[part.index for part in LATENT.parts_of(rank)] for rank in range(2)] == [[0], [0]]
    assert [[part.index for part in MIXED.parts_of(rank)] for rank in range(4)] == [[0, 4], [1, 4], [2, 4], [3, 4]]


def test_pages_with_all_heads_are_not_a_ranks(two: Ranks) -> None:
    with pytest.raises(LayoutMismatch, match=r"wants\s+\[pages, 64, 1, 8\]"):
        two.ranks[0].put(ids(64), random_pages(TWO, 1), collective="j")
    assert two.is_at_rest()


def test_a_rank_alone_cannot_put(two: Ranks) -> None:
    with refused(BadInput, "shard 1", "1 of a block", "collective="):
        two.ranks[1].put(ids(64), shard_pages(random_pages(TWO, 1), TWO, 1))
    with refused(BadInput, "collective=", "256"):
        two.ranks[1].put(ids(64), shard_pages(random_pages(TWO, 1), TWO, 1), collective="x" * 257)


def test_a_rank_that_has_all_parts_puts_by_itself_and_others_read() -> None:
    ranks = Ranks(LATENT)
    pages = random_pages(LATENT, 2)
    assert ranks.ranks[0].put(ids(128), pages).stored == 2
    assert [ranks.reads(handle, pages, 128) for handle in (*ranks.ranks, ranks.whole)] == [128] * 3


def test_a_bad_frame_is_a_miss_for_the_rank_whose_it_is_and_then_for_all(two: Ranks) -> None:
    pages = random_pages(TWO, 3)
    two.whole.put(ids(192), pages)
    match = two.whole.match(ids(192))
    with two.whole.lease(match) as lease:
        two.store.spans([lease.reply.places[1][1]])[0].view[HEADER_BYTES] ^= 1
        mine = [shard_pages(blank_pages(TWO, 3), TWO, rank) for rank in range(2)]
        assert two.ranks[0].get(lease, mine[0]).tokens == 192
        loaded = two.ranks[1].get(lease, mine[1])
        assert (loaded.tokens, loaded.reason) == (64, MissReason.CORRUPT)
        assert loaded.account.hit_tokens == 64 and loaded.account.asked == 192
    for handle in (*two.ranks, two.whole):
        found = handle.match(ids(192))
        assert (found.blocks, found.reason) == (1, MissReason.CORRUPT)
    assert [two.put(rank, pages, 192, "again").stored for rank in range(2)] == [1, 1]
    assert [two.reads(handle, pages, 192) for handle in (*two.ranks, two.whole)] == [192] * 3
    two.store.check()


# Puts that several make together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [FOUR_OF_TWO, BY_LAYER, LATENT, MIXED])
@pytest.mark.parametrize("seed", range(6))
def test_of_parts_that_several_hold_the_first_fills_them(layout: Layout, seed: int) -> None:
    print(f"seed {seed}")
    ranks = Ranks(layout)
    pages = random_pages(layout, 3)
    order = random.Random(seed).sample(range(layout.head_shards), layout.head_shards)
    held: set[int] = set()
    for rank in order:
        parts = {part.index for part in layout.parts_of(rank)}
        everything = len(held) == len(layout.parts)
        result = ranks.put(rank, pages, 192, "j")
        if parts <= held:
            assert result == (PutResult(3, 0, None, None) if everything else PutResult(0, 0, 0, IN_FLIGHT))
        else:
            assert result == PutResult(0, 3, None, None)
        held |= parts
        assert ranks.blocks(3) == (3 if len(held) == len(layout.parts) else 0)
    assert [ranks.reads(handle, pages, 192) for handle in ranks.ranks] == [192] * layout.head_shards
    ranks.store.check()


def test_one_process_with_all_heads_may_put_under_a_name_too(two: Ranks) -> None:
    pages = random_pages(TWO, 2)
    assert two.whole.put(ids(128), pages, collective="j").stored == 2
    assert two.put(1, pages, 128, "j") == PutResult(2, 0, None, None)
    assert two.is_at_rest()


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_long_prompt_goes_in_windows_and_no_rank_waits_for_another(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank stores windows while others have not begun with the first."""
    monkeypatch.setattr("kvstore.core.reservations.ANSWER_SECONDS", 60.0)  # a busy machine may find room slowly
    ranks = Ranks(TWO, dram=16 << 20, extent=256 * KIB)
    blocks = 300
    pages = random_pages(TWO, blocks)
    one, two = ranks.ranks
    done = [0, 0]
    gate, passed = threading.Event(), threading.Semaphore(0)

    def reserved(request: m.Reserve, reserve: Callable[[], Any]) -> Any:
        if done[0] == ahead:
            gate.wait(20)
        done[0] += 1
        passed.release()
        return reserve()

    stand_in(one.door, m.Reserve, reserved)
    thread = threading.Thread(target=lambda: ranks.put(0, pages, 64 * blocks, "j"))
    thread.start()
    for _ in range(ahead):
        assert passed.acquire(timeout=20)
    if ahead == 3:
        thread.join(20)
        assert ranks.store.usage().reservations == 3 and ranks.blocks(blocks) == 0
    gate.set()
    assert ranks.put(1, pages, 64 * blocks, "j") == PutResult(0, blocks, None, None)
    thread.join(20)
    assert [ranks.reads(handle, pages, 64 * blocks) for handle in (one, two)] == [64 * blocks] * 2
    assert ranks.is_at_rest()


@pytest.mark.parametrize("present", [3, 127, 128, 129, 200, 300])
def test_what_is_there_already_is_counted_alike_by_all(present: int) -> None:
    ranks = Ranks(TWO, dram=16 << 20, extent=256 * KIB)
    pages = random_pages(TWO, 300)
    ranks.whole.put(ids(64 * present), pages=Pages(pages.planes, range(present), 64))
    for rank in range(2):
        assert ranks.put(rank, pages, 64 * 300, "j") == PutResult(present, 300 - present, None, None)
    assert ranks.blocks(300) == 300 and ranks.is_at_rest()


def test_what_follows_is_visible_after_what_it_follows_whoever_is_first(two: Ranks) -> None:
    replies = [
        [two.reserve(rank, 2 + 2 * step, f"{step}", first_block=2 * step) for rank in range(2)] for step in (0, 1)
    ]
    assert [reply.blocks for reply in replies[1]] == [[2, 3]] * 2
    for rank in range(2):
        assert two.commit(rank, replies[1][rank]) == 2
        two.store.check()
    assert two.blocks(4) == 0, "complete, but not what is before it"
    assert two.commit(0, replies[0][0]) == 2
    assert two.blocks(4) == 0 and two.store.usage().reservations == 2
    assert two.commit(1, replies[0][1], 1) == 1
    two.store.check()
    assert two.blocks(4) == 1
    assert two.store.commit(replies[0][1].reservation, 1, 1, [[bytes(16)] * 2]) == 2
    assert two.blocks(4) == 4 and two.is_at_rest()


def test_a_step_whose_beginning_is_gone_is_refused_for_all(two: Ranks) -> None:
    for rank in range(2):
        reply = two.reserve(rank, 4, first_block=2)
        assert (reply.reservation, reply.stopped_at, reply.reason) == (0, 0, MissReason.ABSENT)
    other = two.store.reserve(two.whole.number, two.whole.match(ids(128)).keys, 0, 0, None)
    assert two.reserve(0, 4, "k", first_block=2).reason is IN_FLIGHT, "somebody else's blocks are no way to go on"
    two.store.abort(other.reservation)
    assert two.is_at_rest()


def test_sessions_do_not_know_each_others_names(two: Ranks) -> None:
    mine = two.reserve(0, 2, session=b"a")
    assert mine.blocks == [0, 1]
    assert two.reserve(1, 2, session=b"b").reason is IN_FLIGHT
    other = two.bench.namespace(TWO, model="another")
    keys = other.match(ids(128)).keys
    elsewhere = two.store.reserve(other.number, keys, 0, 0, None, Collective("j", (1,), b"a"))
    assert elsewhere.blocks == [0, 1], "nor do namespaces"
    assert two.commit(1, two.reserve(1, 2, session=b"a")) == 2 and two.commit(0, mine) == 2
    two.store.abort(elsewhere.reservation)
    assert two.is_at_rest()


# The answer is the first one's ----------------------------------------------------------------------------------------


def test_all_are_told_when_the_first_is_cut_off(two: Ranks) -> None:
    def interrupted(record: Any) -> Any:
        raise KeyboardInterrupt

    find, two.store._room.find_slots = two.store._room.find_slots, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        two.reserve(0, 3)
    two.store._room.find_slots = find  # type: ignore[method-assign]
    assert two.reserve(1, 3) == ReserveReply(0, 0, stopped_at=0, reason=DISABLED)
    assert two.is_at_rest()


def test_as_much_as_there_is_room_for_is_stored_by_all() -> None:
    small = Ranks(TWO, dram=256 * KIB, limits=Limits(pinned_fraction=1.0))
    blocks = 40
    pages = random_pages(TWO, blocks)
    results = [small.put(rank, pages, 64 * blocks, "j") for rank in range(2)]
    assert results[0] == results[1] and 0 < results[0].stored < blocks
    assert results[0].reason is MissReason.QUOTA
    assert small.blocks(blocks) == results[0].stored == small.reads(small.whole, pages, 64 * blocks) // 64
    small.store.check()


# How one ends ---------------------------------------------------------------------------------------------------------


def test_a_joint_put_that_found_no_room_may_be_dropped_before_it_is_answered(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are given up under the lock, and it is aborted after that."""
    shorten = two.store._puts._shorten

    def dropped_meanwhile(record: ReservationRecord, reason: MissReason) -> Any:
        shortened = shorten(record, reason)
        two.store.drop(two.whole.number)
        return shortened

    monkeypatch.setattr(two.store._puts, "_shorten", dropped_meanwhile)
    monkeypatch.setattr(two.store._room, "find_slots", lambda *_, **__: MissReason.PINNED_FULL)
    reply = two.reserve(0, 4)
    assert not reply.reservation and reply.reason is not None
    monkeypatch.undo()
    assert two.is_at_rest()
    assert two.reserve(0, 2, "again").reservation


def test_hollow_blocks_are_filled_again_jointly(two: Ranks) -> None:
    pages = random_pages(TWO, 4)
    two.whole.put(ids(256), pages)
    with two.whole.lease(two.whole.match(ids(256))) as lease:
        two.store.spans([lease.reply.places[0][1]])[0].view[HEADER_BYTES] ^= 1
        two.ranks[0].get(lease, shard_pages(blank_pages(TWO, 4), TWO, 0))
    refill = [two.reserve(rank, 4) for rank in range(2)]
    assert [reply.blocks for reply in refill] == [[1], [1]]
    assert two.commit(0, refill[0]) == 1
    behind = two.reserve(0, 6, "behind", first_block=4)
    assert behind.blocks == [4, 5]
    two.store.check()
    two.store.abort(refill[1].reservation)
    two.store.check()
    assert two.commit(0, behind) == 0, "what was before it is lost"
    two.store.abort(behind.reservation)
    two.store.check()
    assert [two.put(rank, pages, 256, "again").stored for rank in range(2)] == [1, 1]
    assert two.reads(two.whole, pages, 256) == 256


def test_a_number_that_a_codec_cannot_write_ends_it_for_all() -> None:
    ranks = Ranks(small_layout(head_shards=2), "int8-kc64")
    good, bad = plausible_pages(TWO, 4), plausible_pages(TWO, 4)
    bad.planes[1][0][2] = torch.nan
    assert ranks.put(1, bad, 256, "j") == PutResult(0, 0, 0, MissReason.NONFINITE)
    assert ranks.put(0, good, 256, "j") == PutResult(0, 0, 0, DISABLED)
    assert ranks.is_at_rest() and ranks.blocks(4) == 0
    assert ranks.put(0, good, 256, "k").stored == 4
    assert ranks.put(1, bad, 256, "k") == PutResult(0, 0, 0, MissReason.NONFINITE), "whatever the others did"
    assert ranks.is_at_rest() and ranks.blocks(4) == 2, "the other one had filled those before it"


def test_a_put_for_the_disk_says_of_the_first_ranks_that_others_are_not_there(tmp_path: Any) -> None:
    import kvstore

    with kvstore.embedded(str(tmp_path / "kv"), dram="1MiB", nvme="64MiB") as store:
        ranks = [store.namespace(model="m", layout=TWO, shard=rank) for rank in range(2)]
        pages = random_pages(TWO, 3)
        mine = [shard_pages(pages, TWO, rank) for rank in range(2)]
        first = ranks[0].put(ids(192), mine[0], durability="disk", collective="j")
        assert first == PutResult(0, 3, 0, IN_FLIGHT)
        assert ranks[1].put(ids(192), mine[1], durability="disk", collective="j") == PutResult(0, 3, None, None)
        store.check()


# What is remembered is bounded ----------------------------------------------------------------------------------------


def test_too_many_at_a_time_are_told_so_all_alike(two: Ranks) -> None:
    replies = []
    for number in range(MAX_UNDER_WAY):
        replies.append(two.reserve(0, 1, f"j{number}", start=1000 * (1 + number)))
        assert replies[-1].blocks == [0] or replies[-1].reason is MissReason.DEADLINE
        if replies[-1].reason is MissReason.DEADLINE:
            break
    for reply in replies:
        two.store.abort(reply.reservation)
    assert two.is_at_rest()
    puts = CollectivePuts(30)
    for number in range(MAX_UNDER_WAY):
        assert isinstance(puts.begin((b"s", 0, str(number)), (0, 1, b""), 0.0), CollectivePut)
    refused = puts.begin((b"s", 0, "more"), (0, 1, b""), 0.0)
    assert isinstance(refused, ReserveReply) and refused.reason is MissReason.QUOTA
    assert puts.find((b"s", 0, "more"), (0, 1, b""), 0.0) == refused
    assert isinstance(puts.begin((b"t", 0, "more"), (0, 1, b""), 0.0), CollectivePut)
    puts.check({})


def test_time_is_over_for_those_who_hold_slots_too(two: Ranks) -> None:
    replies = [two.reserve(rank, 3) for rank in range(2)]
    assert two.commit(0, replies[0], 1) == 1
    two.bench.clock.advance(29)
    two.store.expire_due()
    assert two.store.usage().dram.reserved == 5
    two.bench.clock.advance(1)
    two.store.expire_due()
    assert two.whole.match(ids(192)).reason is MissReason.ABSENT
    assert two.commit(1, replies[1]) == 0
    for reply in replies:
        two.store.abort(reply.reservation)
    two.store.check()
    assert two.store.usage().reservations == 0


def test_names_of_what_is_over_are_forgotten() -> None:
    puts = CollectivePuts(30)
    over = ReserveReply(0, 1)

    def end(session: bytes, number: int, now: float) -> None:
        put = puts.begin((session, 0, str(number)), (0, 1, b""), now)
        assert isinstance(put, CollectivePut)
        puts.answered(put, over, now)

    def known(session: bytes, number: int, now: float) -> bool:
        return puts.find((session, 0, str(number)), (0, 1, b""), now) is not None

    for number in range(ENDED_KEPT + 10):
        end(b"s", number, 0.0)
    assert [known(b"s", number, 0.0) for number in (0, 9, 10, ENDED_KEPT + 9)] == [False, False, True, True]
    for session in range(ALL_ENDED_KEPT // 1000 + 10):
        for number in range(1000):
            end(str(session).encode(), number, 1.0)
    puts.check({})
    assert not known(b"s", ENDED_KEPT + 9, 1.0) and known(str(session).encode(), 0, 1.0)
    assert not known(str(session).encode(), 0, 1.0 + ENDED_SECONDS)
    puts.check({})
    assert not puts._ended and not puts._ended_of


def test_the_layout_decides_what_is_a_family_not_the_handle() -> None:
    """Nothing of a shard is in a namespace's digest."""
    a = bench()
    one = NamespaceHandle(a.door(), Namespace("m", TWO, "raw"), codec_named("raw"), shard=0)
    two = NamespaceHandle(a.door(), Namespace("m", TWO, "raw"), codec_named("raw"))
    assert (one.number, one.namespace.digest()) == (two.number, two.namespace.digest())
