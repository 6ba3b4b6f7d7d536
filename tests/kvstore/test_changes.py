"""What became of blocks, as it is told to engines: an engine that follows it ends with what the store holds."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest

from kvstore.client.handle import NamespaceHandle
from kvstore.protocol import messages as m
from service.sidecar import Sidecar
from tiering.counts.changes import MOST_KEPT, MOST_TOLD, MOST_WATCHED, BlockChanges, BlockPlace
from tiering.nvme.lmdb_index import LmdbMaker
from torture.peer import Peer, packed_namespace
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


# What is kept ---------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_before_somebody_asks() -> None:
    changes = BlockChanges()
    changes.note(1, key(1), BlockPlace.DRAM)
    assert not changes.is_watching
    assert changes.since(1, 0)[:3] == ([], 1, False) and changes.is_watching
    changes.note(1, key(2), BlockPlace.DRAM)
    changes.note(2, key(3), BlockPlace.DRAM)
    assert changes.since(1, 1)[:3] == ([(key(2), BlockPlace.DRAM)], 2, False)
    assert changes.since(1, 2)[:3] == ([], 2, False)


def test_a_long_answer_goes_on_where_it_ended() -> None:
    changes = BlockChanges()
    changes.since(1, 0)
    for number in range(MOST_TOLD + 10):
        changes.note(1, key(number), BlockPlace.NVME)
    first, after, *_ = changes.since(1, 1)
    rest, end, *_ = changes.since(1, after)
    assert [one for one, _ in first + rest] == [key(number) for number in range(MOST_TOLD + 10)]
    assert len(first) == MOST_TOLD and changes.since(1, end)[:3] == ([], end, False)


def test_who_asks_too_rarely_is_told_so_and_nothing_is_kept_for_who_does_not_ask() -> None:
    changes = BlockChanges()
    changes.since(1, 0)
    for number in range(MOST_KEPT):
        changes.note(1, key(number), BlockPlace.DRAM)
    assert changes.since(1, 1).changes and not changes.since(1, 1).is_lost
    for number in range(MOST_KEPT):
        changes.note(1, key(number), BlockPlace.NOWHERE)
    lost = changes.since(1, 1)
    assert lost.is_lost and not lost.changes
    assert not changes.since(1, lost.next).is_lost, "it goes on from there"
    for number in range(MOST_KEPT + 1):
        changes.note(1, key(number), BlockPlace.DRAM)
    assert not changes.is_watching, "no engine asked"
    again = changes.since(1, lost.next)
    assert again.is_lost and again.next > lost.next + MOST_KEPT
    assert changes.since(1, again.next + 1).is_lost, "a number that was never given"


def test_many_namespaces_are_not_watched_for_ever() -> None:
    changes = BlockChanges()
    for number in range(MOST_WATCHED + 1):
        changes.since(number, 0)
    changes.note(0, key(1), BlockPlace.DRAM)
    changes.note(1, key(1), BlockPlace.DRAM)
    assert changes.since(1, 1).changes
    assert changes.since(0, 1).is_lost, "the one that was asked for longest ago"


# What a store tells ---------------------------------------------------------------------------------------------------


class Follower:
    """Believes what it is told of a namespace."""

    def __init__(self, handle: NamespaceHandle) -> None:
        self.handle = handle
        self.after = 0
        self.places: dict[bytes, int] = {}
        self.lost = 0
        self.follow()

    def follow(self) -> None:
        while True:
            changed = wait_until(self.handle.submit_changes(self.after, deadline_ms=20_000).poll)
            assert changed.run, "it was answered"
            self.lost += changed.is_lost
            self.after = changed.next
            self.places.update(changed.changes)
            if not changed.changes:
                return


def is_one_moved_below(other: NamespaceHandle, handle: NamespaceHandle, prompts: list[list[int]]) -> bool:
    """Put other blocks, until some of these prompts' are on NVMe alone."""
    for number in range(200):
        other.put(ids(128, 10_000_000 + 1_000 * number), random_pages(small_layout(), 2))
        if any(str(tier) == "nvme" for prompt in prompts for tier, _ in handle.match(prompt).tiers):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("nvme", ["off", "2MiB"])
def test_who_follows_ends_with_what_the_store_holds(tmp_path: Path, nvme: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    layout = small_layout()
    options = {"indexes": LmdbMaker, "nvme": nvme, "slab": "64KiB"} if nvme != "off" else {}
    with Sidecar(tmp_path, dram="1MiB", extent="64KiB", **options) as sidecar, sidecar.client() as store:
        handle, other = (store.namespace(model=name, layout=layout) for name in (MODEL, "another"))
        follower = Follower(handle)
        prompts: list[list[int]] = []
        for turn in range(190):
            kind = "drop" if turn % 50 == 49 else draw.choice(["new", "grow", "again", "other", "lease"])
            if kind == "new" or not prompts:
                prompts.append(ids(64 * draw.randint(1, 6), 10_000 * turn))
            elif kind == "grow":
                prompts.append(draw.choice(prompts) + ids(64 * draw.randint(1, 3), 10_000 * turn + 5_000))
            if kind == "drop":
                store.drop(handle)
            elif kind == "other":
                other.put(ids(128, 10_000 * turn), random_pages(layout, 2))
            elif kind == "lease":
                handle.lease(handle.match(draw.choice(prompts)), deadline_ms=1000).release()
            else:
                prompt = draw.choice(prompts) if kind == "again" else prompts[-1]
                handle.put(prompt, random_pages(layout, len(prompt) // 64))
            if draw.random() < 0.3:
                follower.follow()
        if nvme != "off":
            assert is_one_moved_below(other, handle, prompts), "blocks leave DRAM behind the last drop, too"
        follower.follow()
        held = 0
        for prompt in prompts:
            keys = handle.hashed(prompt).keys
            found = handle.match(prompt)
            tiers = [place for tier, count in found.tiers for place in [1 if str(tier) == "dram" else 2] * count]
            assert [follower.places.get(name, 0) for name in keys[: found.blocks]] == tiers
            assert all(not follower.places.get(name) for name in keys[found.blocks : found.blocks + 1])
            held += found.blocks
        readable = {name for name, place in follower.places.items() if place}
        index = sidecar.core.blocks.index
        spaces = [one.number for one in sidecar.core.blocks.spaces if one.namespace.model == MODEL]
        assert readable == {name for one in spaces for name in index._names[one].visible}
        assert held and follower.lost == 0


def test_a_message_about_a_namespace_that_was_not_opened_is_refused(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        peer = Peer(str(sidecar.path))
        assert isinstance(peer.ask(m.Hello(1, 2, "test")), m.Welcome)
        for number in (0, -1, 1 << 40):
            assert isinstance(peer.ask(m.Changes(number, 0)), m.Failed)
        granted = peer.ask(m.OpenNamespace(packed_namespace(), [8192]))
        assert isinstance(granted, m.Granted)
        for after in (0, 1, (1 << 63) - 1):
            told = peer.ask(m.Changes(granted.grant.number, after))
            assert isinstance(told, m.Changed) and not told.changes
        peer.close()
