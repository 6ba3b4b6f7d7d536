"""Generations: of each tenant a count of its own, never used twice, and newer ones are always the higher ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_digest

from asking import Asking
from kvstore.block.identity import Namespace
from kvstore.block.layout import Layout
from kvstore.node import SESSION_BITS, EmbeddedStore
from tiering.frame import HEADER_BYTES, parse_header
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.slab import STAMP_PAGES, STAMP_SLAB, latest_stamp, slab_name
from tiering.slab_header import PAGE_BYTES
from workbench import open_at

from .conftest import Holder

LAYOUT = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
PAYLOAD_BYTES = 2048
NVME: dict[str, Any] = {"nvme": "4MiB", "indexes": LmdbMaker, "scrub": "off"}


class Tenant:
    """Puts blocks of zeros, and reads their generations where they stand."""

    def __init__(self, store: EmbeddedStore, name: str) -> None:
        self._door = store.for_tenant(name)._door_for_handle()
        self._number = Asking(self._door).open_namespace(Namespace("m", LAYOUT, "raw"), [PAYLOAD_BYTES]).number

    def put(self, *keys: bytes) -> list[int]:
        reply = Asking(self._door).reserve(self._number, [_key(one) for one in keys], 0, 0, None)
        assert len(reply.blocks) + reply.present == len(keys)
        digests = []
        for span in self._door.memory(0, reply.places[0]):
            payload = span.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
            payload[:] = bytes(PAYLOAD_BYTES)
            digests.append([xxh3_128_digest(payload)])
        assert Asking(self._door).commit(reply.reservation, 0, 0, digests) == len(reply.blocks)
        return self.read(*keys)[reply.present :]

    def read(self, *keys: bytes) -> list[int]:
        reply = Asking(self._door).lease(self._number, [_key(one) for one in keys], 0, 30_000)
        try:
            assert reply.blocks == len(keys), reply.reason
            headers = [
                parse_header(bytes(span.view[:HEADER_BYTES])).generation
                for span in self._door.memory(0, reply.places[0])
            ]
            assert headers == reply.generations
            return headers
        finally:
            Asking(self._door).release(reply.lease)

    def drop(self) -> None:
        Asking(self._door).drop(self._number, 30)

    def count_from(self, generation: int) -> None:
        """As a version did that numbered the generations of all tenants in one row."""
        self._door._store.blocks._next_generations[self._door._client.keys.tenant] = generation


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[EmbeddedStore]:
    store = open_at(directory, dram="2MiB", extent="64KiB", **options)
    try:
        assert store.warmed(30)
        yield store
        store.check()
    finally:
        store.close()


def _key(name: bytes) -> bytes:
    return name.ljust(32, b"\x00")


def is_rising(generations: Sequence[int]) -> bool:
    return all(one < two for one, two in pairwise(generations))


def test_each_tenant_has_a_count_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path, **NVME) as store:
        one, two = Tenant(store, "one"), Tenant(store, "two")
        mine, theirs = one.put(b"a"), two.put(b"a")
        for at in range(20):
            theirs += two.put(b"a", *[b"%d" % each for each in range(at + 1)])
            mine += one.put(b"a", *[b"%d" % each for each in range(at + 1)])
        assert mine == [mine[0] + at for at in range(21)]
        assert theirs == [theirs[0] + at for at in range(21)]
        session = store.core.lower.tier.session.number
        assert {mine[0] >> SESSION_BITS, theirs[0] >> SESSION_BITS} == {session} and mine[0] != theirs[0]


def test_where_a_count_begins_leaves_room_for_all_of_a_session(tmp_path: Path) -> None:
    firsts = []
    with opened(tmp_path) as store:
        for at in range(40):
            (first,) = Tenant(store, f"{at}").put(b"a")
            firsts.append(first)
    assert len(set(firsts)) == 40 and not is_rising(firsts)
    assert all(0 < first <= 1 << SESSION_BITS - 1 for first in firsts) and max(firsts) > 1 << SESSION_BITS - 6


def test_none_is_used_again_after_a_restart_or_a_drop(tmp_path: Path) -> None:
    seen: list[int] = []
    for at in range(3):
        with opened(tmp_path, **NVME) as store:
            tenant = Tenant(store, "one")
            assert tenant.read(*[b"%d" % each for each in range(at)]) == seen[-at:] if at else True
            if at == 2:
                tenant.drop()
                seen += tenant.put(b"0", b"1")
            seen += tenant.put(*[b"%d" % each for each in range(at + 1)])
            assert is_rising(seen), seen


def test_a_directory_of_the_one_row_is_read_and_continued(tmp_path: Path) -> None:
    with opened(tmp_path, **NVME) as store:
        one, two = Tenant(store, "one"), Tenant(store, "two")
        first = (store.core.lower.tier.session.number << SESSION_BITS) + 1
        one.count_from(first)
        two.count_from(first + 2)
        before = one.put(b"a", b"b"), two.put(b"a")
        assert before == ([first, first + 1], [first + 2])
    with opened(tmp_path, **NVME) as store:
        one, two = Tenant(store, "one"), Tenant(store, "two")
        assert (one.read(b"a", b"b"), two.read(b"a")) == before
        assert is_rising(before[0] + one.put(b"a", b"b", b"c")) and is_rising(before[1] + two.put(b"a", b"b"))


@pytest.mark.parametrize("first", [None, 7])
def test_none_is_used_again_after_memory_was_taken_over(tmp_path: Path, keeper: Holder, first: int | None) -> None:
    """first: as a version began without a disk that numbered all tenants in one row."""
    with opened(tmp_path, keeper=keeper) as store:
        tenant = Tenant(store, "one")
        if first is not None:
            tenant.count_from(first)
        seen = tenant.put(b"a", b"b")
        keeper.frozen = True
    for at in range(2):
        with opened(tmp_path, keeper=keeper, kept=keeper.handed_over()) as store:
            tenant = Tenant(store, "one")
            assert tenant.read(b"a", b"b") == seen[:2]
            seen += tenant.put(b"a", b"b", b"%d" % at)
            assert is_rising(seen) and seen[-1] >> SESSION_BITS > seen[-2] >> SESSION_BITS
            keeper.frozen = True


def test_memory_that_is_taken_over_beside_another_directory_raises_its_session(tmp_path: Path, keeper: Holder) -> None:
    """The disk was changed, or there was none before: what is written there now must not be above what is next."""
    for _ in range(3):
        with opened(tmp_path, keeper=keeper, **NVME) as store:
            pass
    with opened(tmp_path, keeper=keeper, **NVME) as store:
        seen = Tenant(store, "one").put(b"a")
        keeper.frozen = True
    shutil.rmtree(tmp_path / "nvme")
    with opened(tmp_path, keeper=keeper, kept=keeper.handed_over(), **NVME) as store:
        tenant = Tenant(store, "one")
        assert tenant.read(b"a") == seen
        seen += tenant.put(b"a", b"b")
        assert seen[-1] >> SESSION_BITS == store.core.lower.tier.session.number > seen[0] >> SESSION_BITS
        stamps = (tmp_path / "nvme" / slab_name(STAMP_SLAB)).read_bytes()
        stamp = latest_stamp([stamps[at : at + PAGE_BYTES] for at in range(0, STAMP_PAGES * PAGE_BYTES, PAGE_BYTES)])
        assert stamp is not None and stamp.session == seen[-1] >> SESSION_BITS, "before it is closed: it may crash"
        assert is_rising(seen)
    with opened(tmp_path, **NVME) as store:
        tenant = Tenant(store, "one")
        assert tenant.read(b"a", b"b") == seen
        seen += tenant.put(b"a", b"b", b"c")
        assert is_rising(seen) and len({one >> SESSION_BITS for one in seen}) == 3
