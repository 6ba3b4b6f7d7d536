"""Pages on a device through the five verbs: on the chaos device, which checks the order of all that touches memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chaos_route import ChaosRoute, needs_interpreter
from groups import assert_same_planes, canary_planes, full, sliding
from kvstore import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.layout import Layout
from kvstore.block.pages import GroupPages, Pages
from kvstore.client.handle import NamespaceHandle, PutResult
from paged_memory import kernels_can_run
from service.sidecar import Sidecar, patient
from waiting import wait_until
from workbench import Bench, bench, blank_pages, ids, plausible_pages, same_tokens, small_layout

__all__ = ["kernels_can_run"]

pytestmark = [needs_interpreter, pytest.mark.usefixtures("kernels_can_run")]

TINY = small_layout(layers=1, kv_heads=1)
SHARDED = small_layout(kv_heads=2, head_shards=2, layer_shards=2)
CODECS = ["raw", "int8-kc64"]


@pytest.fixture
def route() -> Iterator[ChaosRoute]:
    """Five frames of the small layout in its two segments."""
    route = ChaosRoute(11)
    yield route
    route.close()


def both(a: Bench, layout: Layout, codec: str, route: ChaosRoute) -> tuple[NamespaceHandle, NamespaceHandle]:
    """A namespace as an engine with its pages on a device has it, and as one with its pages in host memory."""
    here = a.namespace(layout, codec=codec)
    return NamespaceHandle(a.door(), here.namespace, codec_named(codec, route)), here


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_what_a_device_stores_the_host_loads_and_the_other_way_round(codec: str, route: ChaosRoute) -> None:
    a = bench()
    there, here = both(a, SHARDED, codec, route)
    source, other = plausible_pages(SHARDED, 3, 32), plausible_pages(SHARDED, 2, 32, seed=1)
    assert there.put(ids(192), source) == PutResult(0, 3, None, None)
    assert here.put(ids(128, 500), other) == PutResult(0, 2, None, None)
    for prompt, tokens in ((ids(192), 192), (ids(128, 500), 128)):
        blocks = tokens // 64
        one, two, tail = (blank_pages(SHARDED, blocks, 32) for _ in range(3))
        with here.lease(here.match(prompt)) as lease:
            assert here.get(lease, one).tokens == tokens
        with there.lease(there.match(prompt)) as lease:
            assert there.get(lease, two).tokens == tokens
            assert there.get(lease, Pages(tail.planes, list(tail.table)[:-1], 32), 32).tokens == tokens
        assert same_tokens(one, two, range(tokens)) and same_tokens(tail, one, range(32, tokens), offset=32)
    if codec == "raw":
        assert same_tokens(one, other, range(128))
    a.store.check()


@pytest.mark.slow
def test_a_put_ends_before_a_block_that_cannot_be_written(route: ChaosRoute) -> None:
    a = bench()
    there, _ = both(a, SHARDED, "int8-kc64", route)
    source = plausible_pages(SHARDED, 4)
    source.planes[1][1][2, 3, 1, 5] = float("inf")  # of the last part
    assert there.put(ids(256), source) == PutResult(0, 2, 2, MissReason.NONFINITE)
    assert there.match(ids(256)).blocks == 2 and a.store.usage().reservations == 0
    a.store.check()


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 3])
def test_a_damaged_frame_ends_a_load_and_is_reported(part: int, route: ChaosRoute) -> None:
    a = bench()
    there, _ = both(a, SHARDED, "raw", route)
    source = plausible_pages(SHARDED, 4)
    there.put(ids(256), source)
    with there.lease(there.match(ids(256))) as lease:
        place = lease.reply.places[part][2]
        a.store.spans([place])[0].view[4096 + 700] ^= 4
        into = blank_pages(SHARDED, 4)
        loaded = there.get(lease, into)
        assert (loaded.tokens, loaded.reason) == (128, MissReason.CORRUPT)
        assert loaded.account.misses == {MissReason.CORRUPT: 128}
        assert same_tokens(into, source, range(128))
    assert there.match(ids(256)).blocks == 2
    a.store.check()


GROUPS = Layout((full("full", (0, 2)), sliding("sliding", (1, 3), 100)), layer_shards=2)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_windows_and_layers_are_read_as_on_the_host(codec: str, route: ChaosRoute) -> None:
    """Pages of groups lie all over; of the sliding one those of the window are there, in the middle of a block."""
    a = bench()
    there, here = both(a, GROUPS, codec, route)
    source = plausible_pages(GROUPS, 4, 16)
    order = random.Random(5).sample(range(16), 16)
    groups = {"sliding": GroupPages([order[page] for page in range(16)])}
    assert there.put(ids(256), Pages(source.planes, range(16), 16, groups)) == PutResult(0, 4, None, None)
    tables = {"full": GroupPages(order), "sliding": GroupPages([30, 17, 25, 19, 29, 20, 23], 9)}
    found = []
    for handle in (here, there):
        for by_layer in (False, True):
            pages = Pages(canary_planes(GROUPS, 32, 16, 3), range(16), 16, tables)
            with handle.lease(handle.match(ids(256))) as lease:
                told = list(handle.get_by_layer(lease, pages)) if by_layer else [handle.get(lease, pages)]
            assert [loaded.tokens for loaded in told] == [256] * len(told) and len(told) in (1, 4)
            found.append(pages.planes)
    for other in found[1:]:
        assert_same_planes(other, found[0])
    with there.lease(there.match(ids(256))) as lease:
        a.store.spans([lease.reply.places[3][3]])[0].view[4096 + 9] ^= 1
        told = list(there.get_by_layer(lease, Pages(canary_planes(GROUPS, 32, 16, 3), range(16), 16, tables)))
        assert [loaded.tokens for loaded in told] == [256, 256, 256, 0]
    a.store.check()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "int8-kc64"])
def test_through_a_sidecar(codec: str, route: ChaosRoute, tmp_path: Path) -> None:
    """Blocks enough that the first ones are committed while later ones are under way."""
    blocks = 20
    with Sidecar(tmp_path) as sidecar, sidecar.client() as client:
        patient(client)
        here = client.namespace(model="m", layout=TINY, codec=codec)
        there = NamespaceHandle(here.door, here.namespace, codec_named(codec, route))
        source = plausible_pages(TINY, blocks)
        assert there.put(ids(64 * blocks), source) == PutResult(0, blocks, None, None)
        one, two = blank_pages(TINY, blocks), blank_pages(TINY, blocks)
        with there.lease(there.match(ids(64 * blocks)), deadline_ms=10_000) as lease:
            assert there.get(lease, one).tokens == here.get(lease, two).tokens == 64 * blocks
        assert same_tokens(one, two, range(64 * blocks))
        if codec == "raw":
            assert same_tokens(one, source, range(64 * blocks))


@pytest.mark.parametrize("is_locked", [False, True])
def test_memory_of_the_store_is_page_locked_once_it_was_seen(is_locked: bool, route: ChaosRoute) -> None:
    a = bench()
    there, _ = both(a, TINY, "raw", route)
    source, into = plausible_pages(TINY, 3), blank_pages(TINY, 3)
    assert there.put(ids(64), Pages(source.planes, [0], 64)).stored == 1
    if is_locked:
        route.lock()
    assert there.put(ids(192), source) == PutResult(1, 2, None, None)
    with there.lease(there.match(ids(192))) as lease:
        assert there.get(lease, into).tokens == 192
        addresses = [span.address + 4096 for span in a.store.spans(lease.reply.places[0])]
        assert route.transfers.extents.runs(np.array(addresses), 2048)[1] is is_locked
    assert same_tokens(into, source, range(192))
    a.store.check()


def registered(route: ChaosRoute) -> list[int]:
    """Addresses of extents that are page-locked."""
    its_own = {memory.data_ptr() for memory in route.chaos._memory}
    return [address for address in list(route.chaos._registered) if address not in its_own]


@pytest.mark.parametrize("refused", [False, True], ids=["page-locked", "refused"])
def test_a_client_lets_go_of_what_the_sidecar_takes_back(refused: bool, tmp_path: Path) -> None:
    """Unregistered first, by a thread of its own: memory that is registered is not unmapped."""
    route = ChaosRoute(13, refused=refused)
    route.transfers.extents.run()
    with Sidecar(tmp_path) as sidecar, sidecar.client() as client:
        here = client.namespace(model="m", layout=TINY, codec="raw")
        there = NamespaceHandle(here.door, here.namespace, codec_named("raw", route))
        source, into = plausible_pages(TINY, 3), blank_pages(TINY, 3)
        for _ in range(2):
            assert there.put(ids(192), source) == PutResult(0, 3, None, None)
            with there.lease(there.match(ids(192)), deadline_ms=10_000) as lease:
                assert there.get(lease, into).tokens == 192
            assert same_tokens(into, source, range(192))
            if not refused:  # its mapping to fill, and the one to read
                wait_until(lambda: len(registered(route)) == 2)
            assert client.drop(here) == 3
            wait_until(lambda: sidecar.core.usage().dram.taken_bytes == 0)
            assert not registered(route)
    route.close()
