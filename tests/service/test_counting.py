"""Hits and misses as the sidecar counts them: the sums match, and they are what its clients saw."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from kvstore.block.account import HitTier, MissReason
from kvstore.client.handle import NamespaceHandle
from kvstore.protocol.messages import LeaseReply, MatchReply
from kvstore.service.accounting import OPEN_LOOKUPS, Counting
from kvstore.status.tree import LookupCounts
from service.sidecar import Sidecar
from tiering.frame import HEADER_BYTES
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import FakeClock
from workbench import MODEL, blank_pages, ids, random_pages, small_layout


def adds_up(one: LookupCounts) -> bool:
    tokens = sum(one.hit_tokens.values()) + sum(one.miss_tokens.values()) + one.found_tokens
    blocks = sum(one.hit_blocks.values()) + sum(one.miss_blocks.values()) + one.found_blocks
    counts = (*one.hit_blocks.values(), *one.miss_blocks.values(), one.found_blocks)
    return (one.asked_tokens, one.asked_blocks) == (tokens, blocks) and min(counts, default=0) >= 0


def looked(counting: Counting) -> LookupCounts:
    return LookupCounts.summed(counts for counts, _ in counting.of_namespaces().values())


def keys(*names: int) -> list[bytes]:
    return [bytes([name]) * 32 for name in names]


def found(blocks: int, of: int) -> MatchReply:
    return MatchReply(blocks, ((HitTier.DRAM, blocks),), None if blocks == of else MissReason.ABSENT)


def test_a_lease_without_a_look_up_asks_by_itself_and_what_the_engine_has_is_its_own() -> None:
    one = Counting(FakeClock())
    one.opened(0, 64)
    one.leased(0, keys(1, 2, 3), LeaseReply(7, 2, 3, tiers=((HitTier.NVME, 3),)))
    facts = looked(one)
    assert facts.hit_tokens == {"engine": 128, "nvme": 64} and facts.asked_tokens == 192
    assert facts.granted_tokens == 64 and facts.hit_rate == pytest.approx(1 / 3)


def test_of_what_a_shorter_lease_leaves_out_it_is_known_that_it_was_there() -> None:
    """An engine that computes the rest of what was found had that much of the prompt, and not more."""
    one = Counting(FakeClock())
    one.opened(0, 64)
    for _ in range(2):
        one.looked_up(0, keys(1, 2, 3, 4), found(3, 4))
    one.leased(0, keys(1, 2), LeaseReply(7, 0, 2, tiers=((HitTier.DRAM, 2),)), found=3)
    counts = looked(one)
    assert (counts.asked_tokens, counts.found_tokens, counts.hit_tokens) == (512, 256, {"dram": 128})
    one.leased(0, keys(1, 2), LeaseReply(8, 0, 2, tiers=((HitTier.DRAM, 2),)), found=3)
    one.leased(0, keys(1, 2), LeaseReply(9, 0, 2, tiers=((HitTier.DRAM, 2),)), found=3)  # had no look-up
    counts = looked(one)
    assert (counts.asked_tokens, counts.found_tokens, counts.hit_tokens) == (640, 128, {"dram": 384}), (
        "the third had no look-up"
    )
    assert adds_up(counts)


def test_what_is_remembered_is_bounded() -> None:
    one = Counting(FakeClock())
    one.opened(0, 64)
    for number in range(OPEN_LOOKUPS + 10):
        one.looked_up(0, [number.to_bytes(32, "little")], found(1, 1))
        one.looked_up(0, keys(1, 2), found(2, 2))
    assert len(one._open) <= OPEN_LOOKUPS
    assert adds_up(looked(one))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_the_sums_match(seed: int) -> None:
    """Also where clients lease what they never looked up, twice, and report what they never had."""
    random, one, next_lease = Random(seed), Counting(FakeClock()), 1
    for number in range(3):
        one.opened(number, 64 * (number + 1))
    for _ in range(2000):
        number, chain = random.randrange(3), keys(*(random.randrange(4) for _ in range(random.randrange(6))))
        blocks = random.randint(0, len(chain))
        reason = random.choice([None, *MissReason])
        tiers = ((HitTier.DRAM, blocks // 2), (HitTier.NVME, blocks - blocks // 2))
        match random.randrange(3):
            case 0:
                one.looked_up(number, chain, MatchReply(blocks, tiers, reason))
            case 1:
                first = random.randint(0, len(chain))
                one.leased(
                    number, chain, LeaseReply(next_lease * bool(blocks), first, blocks, tiers=tiers, reason=reason)
                )
                next_lease += 1
            case _:
                one.reported(random.randrange(next_lease + 1), random.randrange(-2, 8))
        assert adds_up(looked(one))
    each = [counts for counts, _ in one.of_namespaces().values()]
    assert all(map(adds_up, each)) and all(facts.asked_blocks for facts in each)
    assert looked(one).asked_tokens == sum(facts.asked_tokens for facts in each)


@pytest.mark.parametrize("seed", range(2))
def test_a_random_run_is_counted_as_its_clients_saw_it(tmp_path: Path, seed: int) -> None:
    """Puts, requests, evictions and damage; what each request's account says, in sum, by tier and by reason."""
    random = Random(seed)
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    asked = 0
    options = {"dram": "1MiB", "extent": "64KiB", "nvme": "1MiB", "slab": "64KiB", "indexes": LmdbMaker}
    with Sidecar(tmp_path, **options) as sidecar, sidecar.client() as store:
        assert sidecar.store.warmed(20)
        handles: list[NamespaceHandle] = [
            store.namespace(model=name, layout=small_layout()) for name in (MODEL, "other")
        ]
        for _ in range(120):
            handle = random.choice(handles)
            blocks = random.randint(1, 12)
            prompt = ids(64 * random.randint(0, blocks)) + ids(64 * blocks, 1000 * random.randrange(8))
            prompt = prompt[: 64 * blocks]
            if random.random() < 0.4:
                handle.put(prompt, random_pages(handle.layout, blocks), durability=random.choice(["volatile", "disk"]))
                continue
            if random.random() < 0.2:
                sidecar.store.evict(random.randint(1, 30))
            match = handle.match(prompt)
            with handle.lease(match, deadline_ms=random.choice([0, 5000])) as lease:
                if lease.blocks and random.random() < 0.1:
                    place = lease.reply.places[0][random.randrange(lease.blocks)]
                    sidecar.core.spans([place])[0].view[HEADER_BYTES + 5] ^= 1
                loaded = handle.get(lease, blank_pages(handle.layout, blocks))
            asked += loaded.account.asked
            hits.update({str(tier): tokens for tier, tokens in loaded.account.hits.items()})
            misses.update({str(reason): tokens for reason, tokens in loaded.account.misses.items()})
        facts = sidecar.admin.facts()
        whole = facts.looked
        assert adds_up(whole) and all(adds_up(one.looked) for one in facts.namespaces)
        assert (whole.asked_tokens, whole.hit_tokens, whole.miss_tokens) == (asked, dict(hits), dict(misses))
        assert whole.found_tokens == 0 and whole.granted_tokens == sum(hits.values())
        assert {"dram", "nvme"} <= hits.keys() and {"corrupt", "absent"} <= misses.keys(), (hits, misses)
        assert sum(one.looked.asked_tokens for one in facts.namespaces) == asked
