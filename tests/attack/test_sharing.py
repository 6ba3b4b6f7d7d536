"""What differs in one token, one extra key, one field of the namespace or the tenant shares nothing from there on.

Both variants are stored with KV of their own in one store, and both are read back: a block that is shared has the KV of
who stored it first, every block behind the difference has its own. Hits and misses add up throughout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asking import Asking
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.identity import ExtraKey, Namespace
from kvstore.block.layout import KvGroup, Layout
from kvstore.client.handle import Match, NamespaceHandle
from kvstore.node import EmbeddedDoor
from model.store_model import OpenStore, PagedKv, block_kv, open_store

BLOCK_TOKENS = 64
BLOCKS = 4
TOKENS = BLOCKS * BLOCK_TOKENS
TAIL = 5
SMALL = Layout.gqa(layers=2, kv_heads=2, head_dim=4, dtype="float16")
BASE = Namespace("3f5e1c0d9a", SMALL, "raw", config={"rope": "10000"})

prompts = st.lists(st.integers(0, (1 << 32) - 1), min_size=TOKENS + TAIL, max_size=TOKENS + TAIL)
examples = settings(max_examples=50, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))


class Sharing:
    """Two prompts at a time, in a namespace or in two; a salt keeps the examples of one test apart."""

    def __init__(self, opened: OpenStore) -> None:
        self.opened = opened
        self._salts = itertools.count()

    def handle(self, namespace: Namespace = BASE, tenant: str = "default") -> NamespaceHandle:
        keys = self.opened.keys.tenant(tenant)
        self.opened.ring.add(keys)
        return NamespaceHandle(EmbeddedDoor(self.opened.core, keys), namespace, codec_named("raw"))

    def drop(self, handle: NamespaceHandle) -> None:
        assert isinstance(handle.door, EmbeddedDoor)
        Asking(handle.door).drop(handle.number)

    def salt(self) -> ExtraKey:
        return ExtraKey(b"example %d" % next(self._salts))

    def look(self, handle: NamespaceHandle, tokens: Sequence[int], extra: Sequence[Any]) -> Match:
        """A match whose account adds up."""
        match = handle.match(tokens, extra)
        account = match.account
        assert account.asked == len(tokens) == sum(account.hits.values()) + sum(account.misses.values())
        assert account.hit_tokens == match.tokens == match.blocks * handle.block_tokens
        return match

    def put(self, handle: NamespaceHandle, who: str, tokens: Sequence[int], extra: Sequence[Any]) -> tuple[int, int]:
        """Store all full blocks with the KV of `who`; how many were there, and how many are new."""
        pages = self._pages(handle, TOKENS)
        for token in range(0, TOKENS, BLOCK_TOKENS):
            pages.write(token, block_kv(handle.layout, who, ((), (token,))))
        result = handle.put(tokens, pages.pages, extra_keys=extra)
        assert result.stopped_at is None
        return result.present, result.stored

    def reads(self, handle: NamespaceHandle, tokens: Sequence[int], extra: Sequence[Any], owners: list[str]) -> None:
        """All 64-token runs are readable, and each has the KV of the owner named for it."""
        pages = self._pages(handle, TOKENS)
        before = pages.snapshot()
        with handle.lease(self.look(handle, tokens, extra)) as lease:
            loaded = handle.get(lease, pages.pages)
        assert loaded.reason is None and loaded.tokens == TOKENS and loaded.account.asked == len(tokens)
        kv = {at * BLOCK_TOKENS: block_kv(handle.layout, who, ((), (at * 64,))) for at, who in enumerate(owners)}
        pages.expect(before, kv)

    def share_until(self, one: tuple[Any, Any], two: tuple[Any, Any], blocks: int) -> None:
        """Two prompts with their extra keys share exactly their first `blocks` blocks."""
        handle = self.handle()
        assert self.put(handle, "one", *one) == (0, BLOCKS)
        match = self.look(handle, *two)
        assert match.blocks == blocks
        misses = {MissReason.PARTIAL_BLOCK: TAIL}
        if blocks < BLOCKS:
            misses[MissReason.DIVERGED if blocks else MissReason.ABSENT] = (BLOCKS - blocks) * BLOCK_TOKENS
        assert match.account.misses == misses
        assert self.put(handle, "two", *two) == (blocks, BLOCKS - blocks)
        self.reads(handle, *one, owners=["one"] * BLOCKS)
        self.reads(handle, *two, owners=["one"] * blocks + ["two"] * (BLOCKS - blocks))

    def _pages(self, handle: NamespaceHandle, tokens: int) -> PagedKv:
        return PagedKv(handle.layout, tokens // BLOCK_TOKENS, BLOCK_TOKENS, "heads", "numpy", 0)


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Sharing]:
    opened = open_store(tmp_path, dram=2 << 20)
    yield Sharing(opened)
    opened.core.check()
    opened.close()


@pytest.mark.slow
def test_one_token(sharing: Sharing) -> None:
    @examples
    @given(tokens=prompts, at=st.integers(0, TOKENS + TAIL - 1), change=st.integers(1, (1 << 32) - 1))
    def differ(tokens: list[int], at: int, change: int) -> None:
        other, salt = tokens.copy(), sharing.salt()
        other[at] ^= change
        sharing.share_until((tokens, [salt]), (other, [salt]), min(at // BLOCK_TOKENS, BLOCKS))

    differ()


@pytest.mark.slow
def test_two_tokens_that_change_places(sharing: Sharing) -> None:
    @examples
    @given(tokens=prompts, at=st.integers(0, TOKENS - 1), to=st.integers(0, TOKENS - 1))
    def differ(tokens: list[int], at: int, to: int) -> None:
        other, salt = tokens.copy(), sharing.salt()
        other[at], other[to] = tokens[to], tokens[at]
        first = min(at, to) // BLOCK_TOKENS if tokens[at] != tokens[to] else BLOCKS
        sharing.share_until((tokens, [salt]), (other, [salt]), first)

    differ()


@pytest.mark.slow
def test_one_extra_key(sharing: Sharing) -> None:
    """One more, one less, another value or another place, from any token on."""
    values = st.binary(min_size=1, max_size=20)
    places = st.integers(0, TOKENS + TAIL - 1)

    @examples
    @given(
        tokens=prompts, value=values, other=values, at=places, to=places, how=st.sampled_from(["more", "value", "at"])
    )
    def differ(tokens: list[int], value: bytes, other: bytes, at: int, to: int, how: str) -> None:
        salt = sharing.salt()
        mine = [salt, ExtraKey(value, at)]
        theirs = {
            "more": [*mine, ExtraKey(other, to)],
            "value": [salt, ExtraKey(other, at)],
            "at": [salt, ExtraKey(value, to)],
        }[how]
        first = {"more": to, "value": at, "at": min(at, to)}[how] // BLOCK_TOKENS
        if (how == "value" and value == other) or (how == "at" and at == to):
            first = BLOCKS
        sharing.share_until((tokens, mine), (tokens, theirs), min(first, BLOCKS))

    differ()


GROUP = SMALL.groups[0]
OTHER_FIELDS: dict[str, Namespace] = {
    "model": replace(BASE, model="3f5e1c0d9b"),
    "weights_epoch": replace(BASE, weights_epoch=1),
    "config.rope": replace(BASE, config={"rope": "10001"}),
    "config.scale": replace(BASE, config={"rope": "10000", "scale": "1"}),
    "layout.groups": replace(BASE, layout=Layout((replace(GROUP, dtype="bfloat16"),))),
    "layout.groups, its name": replace(BASE, layout=Layout((replace(GROUP, name="sliding"),))),
    "layout.groups, its layers": replace(BASE, layout=Layout((replace(GROUP, layers=(1, 0)),))),
    "layout.groups, in two": replace(
        BASE, layout=Layout((KvGroup("a", (0,), 2, (4, 4), "float16"), KvGroup("b", (1,), 2, (4, 4), "float16")))
    ),
    "layout.parts": replace(BASE, layout=replace(SMALL, head_shards=2)),
    "layout.parts, by layer": replace(BASE, layout=replace(SMALL, layer_shards=2)),
    "layout.packing": replace(BASE, layout=replace(SMALL, packing="other")),
}


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_one_field_of_the_namespace(sharing: Sharing, field: str) -> None:
    tokens, salt = list(range(TOKENS + TAIL)), [sharing.salt()]
    mine, theirs = sharing.handle(), sharing.handle(OTHER_FIELDS[field])
    assert sharing.put(mine, "mine", tokens, salt) == (0, BLOCKS)
    match = sharing.look(theirs, tokens, salt)
    assert match.blocks == 0 and match.reason is MissReason.OTHER_NAMESPACE
    assert match.detail.startswith(field.split(",")[0])
    assert match.account.misses == {MissReason.OTHER_NAMESPACE: TOKENS, MissReason.PARTIAL_BLOCK: TAIL}
    assert sharing.put(theirs, "theirs", tokens, salt) == (0, BLOCKS)
    sharing.reads(mine, tokens, salt, ["mine"] * BLOCKS)
    sharing.reads(theirs, tokens, salt, ["theirs"] * BLOCKS)


def test_another_block_size_shares_no_key(sharing: Sharing) -> None:
    tokens = list(range(TOKENS + TAIL))
    mine = sharing.handle()
    sharing.put(mine, "mine", tokens, ())
    theirs = sharing.handle(replace(BASE, layout=replace(SMALL, block_tokens=128)))
    match = sharing.look(theirs, tokens, ())
    assert match.blocks == 0 and match.reason is MissReason.ABSENT and not match.detail
    assert not set(match.keys) & set(sharing.look(mine, tokens, ()).keys)


def test_a_namespace_that_was_dropped_is_not_where_it_is(sharing: Sharing) -> None:
    tokens = list(range(TOKENS + TAIL))
    mine, theirs = sharing.handle(), sharing.handle(OTHER_FIELDS["model"])
    sharing.put(mine, "mine", tokens, ())
    sharing.drop(mine)
    assert sharing.look(theirs, tokens, ()).reason is MissReason.ABSENT
    assert sharing.look(mine, tokens, ()).reason is MissReason.EVICTED


def test_another_tenant(sharing: Sharing) -> None:
    """Not even that it is there: in the same namespace, or in another."""
    tokens = list(range(TOKENS + TAIL))
    mine, theirs = sharing.handle(), sharing.handle(tenant="other")
    elsewhere = sharing.handle(OTHER_FIELDS["model"], tenant="other")
    sharing.put(mine, "mine", tokens, ())
    for handle in (theirs, elsewhere):
        match = sharing.look(handle, tokens, ())
        assert match.blocks == 0 and match.reason is MissReason.ABSENT and not match.detail
        assert not set(match.keys) & set(sharing.look(mine, tokens, ()).keys)
    assert sharing.put(theirs, "theirs", tokens, ()) == (0, BLOCKS)
    sharing.reads(mine, tokens, (), ["mine"] * BLOCKS)
    sharing.reads(theirs, tokens, (), ["theirs"] * BLOCKS)
    assert sharing.look(elsewhere, tokens, ()).reason is MissReason.OTHER_NAMESPACE, "its own tenant's, that is"
    sharing.drop(theirs)
    assert sharing.look(elsewhere, tokens, ()).reason is MissReason.ABSENT
    sharing.reads(mine, tokens, (), ["mine"] * BLOCKS)


def test_keys_of_another_tenant_open_nothing(sharing: Sharing) -> None:
    """Even who learns a prefix key of another tenant finds nothing under it in a namespace of his own."""
    tokens = list(range(TOKENS + TAIL))
    mine, theirs = sharing.handle(), sharing.handle(tenant="other")
    sharing.put(mine, "mine", tokens, ())
    stolen = sharing.look(mine, tokens, ()).keys
    reply = Asking(theirs.door).match(theirs.number, stolen)
    assert reply.blocks == 0 and reply.reason is MissReason.ABSENT and not reply.detail
    assert Asking(theirs.door).lease(theirs.number, stolen, 0, 0).blocks == 0
