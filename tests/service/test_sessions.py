"""Sessions without a socket: whose they are, and what a connection that is gone keeps from any other use."""

from __future__ import annotations

import os
import secrets

import pytest

from kvstore.block.identity import TenantKeys
from kvstore.service.sessions import ClientState, Sessions
from tiering.dram.extents import MappedExtent
from tiering.errors import BlockMissing
from tiering.tier import extent_of
from workbench import KIB, OTHER_SECRET, Bench, bench, ids, random_pages

TOKEN = b"t" * 16
BLOCKS = 12
"""In three extents."""


@pytest.fixture
def a() -> Bench:
    return bench()


@pytest.fixture
def sessions(a: Bench) -> Sessions:
    return Sessions(a.store, 1, secrets.token_bytes)


def leased(a: Bench, sessions: Sessions, caller: ClientState) -> tuple[int, list[int]]:
    """A lease of the connection, and the extents that it leads to."""
    handle = a.namespace(keys=caller.session.tenant)
    assert handle.put(ids(64 * BLOCKS), random_pages(handle.layout, BLOCKS)).stored == BLOCKS
    reply = a.store.lease(handle.number, handle.match(ids(64 * BLOCKS)).keys, 0, 1000)
    sessions.took(caller, reply.lease, "r", BLOCKS, 1)
    return reply.lease, sorted(set(map(extent_of, reply.places[0])))


@pytest.mark.parametrize("kept", range(3))
def test_what_a_connection_leaves_is_kept_while_it_maps_any_of_its_extents(
    a: Bench, sessions: Sessions, kept: int
) -> None:
    """Whichever of them it is."""
    caller = sessions.join(a.keys, TOKEN, "e")
    lease, extents = leased(a, sessions, caller)
    assert len(extents) == 3
    mapped: list[MappedExtent] = []
    for at, extent in enumerate(extents):
        caller.extents.add(extent)
        descriptor = a.store.share(extent, a.keys.tenant, caller.number).descriptor
        if at == kept:
            mapped.append(MappedExtent(descriptor, 64 * KIB, writable=False))
        else:
            os.close(descriptor)
    sessions.left(caller)
    assert sessions.sweep() == 1 and len(sessions.departed) == 1
    assert a.store.evict(BLOCKS) == BLOCKS and a.store.usage().dram.zombie == BLOCKS
    assert not a.store.is_leased(lease)
    mapped.clear()
    assert sessions.sweep() == 0 and a.store.usage().dram.zombie == 0
    assert list(sessions.sessions()) == []
    a.store.check()


@pytest.mark.parametrize("fills", [None, (0, 1)], ids=["to read", "to fill"])
def test_memory_is_shared_with_its_own_tenant_alone(
    a: Bench, sessions: Sessions, fills: tuple[int, ...] | None
) -> None:
    """Whatever number a stranger names, and whichever namespaces he says that he fills."""
    caller, other = sessions.join(a.keys, TOKEN, "e"), TenantKeys.derive(OTHER_SECRET)
    _, extents = leased(a, sessions, caller)
    a.namespace(keys=other)
    for extent in extents:
        with pytest.raises(BlockMissing):
            a.store.share(extent, other.tenant, 99, fills)
        os.close(a.store.share(extent, a.keys.tenant, caller.number, fills).descriptor)


def test_what_is_asked_for_and_what_is_ending_counts_too(
    a: Bench, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else sixteen threads at once, or whoever releases faster than it is given back, would have more."""
    most = 10 * BLOCKS
    monkeypatch.setattr("kvstore.service.sessions.MAX_LEASED_PLACES", most)
    caller, other = sessions.join(a.keys, TOKEN, "e"), sessions.join(a.keys, b"u" * 16, "e")
    theirs = sessions.join(TenantKeys.derive(OTHER_SECRET), TOKEN, "e")
    with sessions.asking(caller, most // 2) as first, sessions.asking(caller, 1) as second:
        assert first and not second
        with sessions.asking(other, most // 4) as third, sessions.asking(other, 1) as fourth:
            assert third and not fourth
        with sessions.asking(theirs, most // 2) as another:
            assert another
    lease, _ = leased(a, sessions, caller)
    monkeypatch.setattr("kvstore.core.shared.Leases.work", lambda self: None)
    sessions.release(caller, [lease])
    assert caller.session.leased_places == 0 and a.store.leases.ending_places[a.keys.tenant] == BLOCKS
    with sessions.asking(caller, most // 2) as is_granted:
        assert not is_granted
    sessions.store.finish_ending()
    with sessions.asking(caller, most // 2) as is_granted:
        assert is_granted
    with sessions.asking(caller, most // 2 + 1) as is_granted:
        assert not is_granted
    assert not sessions._leased_places and not any(one.leased_places for one in sessions.sessions())
