"""Puts of prompts with a common head, at the same moment: each stores what only it has behind the head.

A put waits for what another one is storing, holds nothing meanwhile, and goes on: once that is stored, once the other
client is gone, and not for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asking import Asking, stand_in
from kvstore.block.account import MissReason
from kvstore.client.handle import IN_FLIGHT_SECONDS, NamespaceHandle, PutResult
from kvstore.protocol import messages as m
from kvstore.status.tree import PutCounts
from service.sidecar import Sidecar
from tiering.counts.awaits import AwaitEnd
from waiting import wait_until
from workbench import MODEL, ids, random_pages, shard_pages, small_layout

HEAD, TAIL, THREADS = 6, 3, 8
BLOCKS = HEAD + TAIL
WHOLE, TWO = small_layout(), small_layout(head_shards=2)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, dram="64MiB") as running:
        yield running
        assert running.core.awaits.counts().parked == 0


def prompt(head: int, tail: int) -> list[int]:
    return ids(64 * HEAD, 100_000 * head) + ids(64 * TAIL, 50_000_000 + 100_000 * head + 1000 * tail)


def in_flight(handle: NamespaceHandle, blocks: int, head: int = 0) -> int:
    """Reserve leading blocks as a client would that does not go on; returns the reservation."""
    keys = handle.match(prompt(head, 0), counts=False).keys[:blocks]
    reply = Asking(handle.door).reserve(handle.number, keys)
    assert len(reply.blocks) == blocks
    return reply.reservation


def at_once(puts: Sequence[Callable[[], PutResult]]) -> list[PutResult]:
    begin = threading.Barrier(len(puts))

    def run(put: Callable[[], PutResult]) -> PutResult:
        begin.wait(30)
        return put()

    with ThreadPoolExecutor(len(puts)) as pool:
        return list(pool.map(run, puts))


def put_counts(sidecar: Sidecar) -> PutCounts:
    served = sidecar.admin.numbers().served
    assert served is not None
    return served.puts


@pytest.mark.parametrize("place", ["in this process", "through sockets"])
def test_every_tail_behind_a_common_head_is_stored(place: str, sidecar: Sidecar) -> None:
    with ExitStack() as stack:
        if place == "in this process":
            handles = [sidecar.store.namespace(model=MODEL, layout=WHOLE) for _ in range(THREADS)]
        else:
            stores = [stack.enter_context(sidecar.client()) for _ in range(THREADS)]
            handles = [store.namespace(model=MODEL, layout=WHOLE) for store in stores]
        pages = random_pages(WHOLE, BLOCKS)
        for head in range(10):
            puts = [partial(handle.put, prompt(head, tail), pages) for tail, handle in enumerate(handles)]
            for result in at_once(puts):
                assert (result.stopped_at, result.reason) == (None, None)
                assert result.present + result.stored == BLOCKS or 0 < result.stored < BLOCKS
            assert [handles[0].match(prompt(head, tail)).blocks for tail in range(THREADS)] == [BLOCKS] * THREADS


@pytest.mark.parametrize("first_block", [0, HEAD])
def test_a_put_goes_on_once_the_other_client_is_gone(first_block: int, sidecar: Sidecar) -> None:
    """The head is then this put's to store, if it has its pages."""
    with sidecar.client() as other, sidecar.client() as mine, ThreadPoolExecutor(1) as pool:
        handle = mine.namespace(model=MODEL, layout=WHOLE)
        in_flight(other.namespace(model=MODEL, layout=WHOLE), HEAD)
        pages = random_pages(WHOLE, BLOCKS - first_block)
        put = pool.submit(handle.put, prompt(0, 1), pages, 64 * first_block)
        wait_until(lambda: sidecar.core.awaits.counts().parked == 1)
        other.close()
        result = put.result(30)
        assert result == (PutResult(0, 0, 0, MissReason.ABSENT) if first_block else PutResult(0, BLOCKS, None, None))
        assert sidecar.core.awaits.counts().ended[AwaitEnd.SHORT] == 1


def test_a_put_waits_for_a_hung_client_within_its_deadline_and_holds_nothing_meanwhile(sidecar: Sidecar) -> None:
    with sidecar.client() as other, sidecar.client() as mine, ThreadPoolExecutor(1) as pool:
        theirs, handle = (store.namespace(model=MODEL, layout=WHOLE) for store in (other, mine))
        reservation = in_flight(theirs, HEAD)
        refused = put_counts(sidecar)
        assert handle.put(prompt(0, 1), random_pages(WHOLE, BLOCKS), deadline_ms=50).in_flight == HEAD
        put = pool.submit(handle.put, prompt(0, 1), random_pages(WHOLE, BLOCKS))
        wait_until(lambda: sidecar.core.awaits.counts().parked == 1)
        assert sidecar.core.usage().reservations == 1, "none of the put that waits"
        result = put.result(30 * IN_FLIGHT_SECONDS)
        assert (result, result.in_flight) == (PutResult(0, 0, 0, MissReason.IN_FLIGHT), HEAD)
        counts = put_counts(sidecar)
        assert not refused.refused
        assert counts.refused[MissReason.IN_FLIGHT] == 2 * 64 * BLOCKS, "once for each put that gave up"
        Asking(theirs.door).abort(reservation)
        assert handle.put(prompt(0, 1), random_pages(WHOLE, BLOCKS)) == PutResult(0, BLOCKS, None, None)


def test_what_is_waited_for_and_stored_is_no_refused_token(sidecar: Sidecar) -> None:
    with sidecar.client() as other, sidecar.client() as mine, ThreadPoolExecutor(1) as pool:
        theirs, handle = (store.namespace(model=MODEL, layout=WHOLE) for store in (other, mine))
        held, go_on = threading.Event(), threading.Event()

        def stop(request: m.Commit, commit: Callable[[], Any]) -> Any:
            held.set()
            assert go_on.wait(30)
            return commit()

        stand_in(theirs.door, m.Commit, stop)
        pages = random_pages(WHOLE, BLOCKS)
        with ThreadPoolExecutor(1) as first:
            one = first.submit(theirs.put, prompt(0, 0), pages)
            assert held.wait(30)
            two = pool.submit(handle.put, prompt(0, 1), pages)
            wait_until(lambda: sidecar.core.awaits.counts().parked == 1)
            go_on.set()
            assert one.result(30) == PutResult(0, BLOCKS, None, None)
            assert two.result(30) == PutResult(HEAD, TAIL, None, None)
        counts = put_counts(sidecar)
        assert counts.tokens == {"reserved": 64 * (BLOCKS + TAIL), "refused": 0} and not counts.refused
        assert sidecar.core.awaits.counts().ended[AwaitEnd.READABLE] == 1


def test_ranks_of_two_engines_store_every_tail_behind_a_common_head(sidecar: Sidecar) -> None:
    """Each rank waits by itself, and all take part in the next try: no share stays open."""
    with ExitStack() as stack:
        ranks: list[tuple[int, int, NamespaceHandle]] = []
        for engine in range(2):
            first = stack.enter_context(sidecar.client())
            second = stack.enter_context(sidecar.client(first.session))
            for rank, store in enumerate((first, second)):
                ranks.append((engine, rank, store.namespace(model=MODEL, layout=TWO, shard=rank)))
        pages = random_pages(TWO, BLOCKS)
        mine = [shard_pages(pages, TWO, rank) for rank in range(2)]
        for head in range(12):
            puts = [
                partial(handle.put, prompt(head, engine), mine[rank], collective=f"{head}")
                for engine, rank, handle in ranks
            ]
            assert [(one.stopped_at, one.reason) for one in at_once(puts)] == [(None, None)] * len(ranks)
            assert [ranks[0][2].match(prompt(head, engine)).blocks for engine in range(2)] == [BLOCKS] * 2
        assert not sidecar.core.collective_puts()


def test_ranks_give_up_together_where_a_client_hangs(sidecar: Sidecar) -> None:
    with sidecar.client() as other, sidecar.client() as first, sidecar.client(first.session) as second:
        in_flight(other.namespace(model=MODEL, layout=TWO), HEAD)
        handles = [store.namespace(model=MODEL, layout=TWO, shard=rank) for rank, store in enumerate((first, second))]
        mine = [shard_pages(random_pages(TWO, BLOCKS), TWO, rank) for rank in range(2)]
        puts = [
            partial(handles[rank].put, prompt(0, 1), mine[rank], collective="a", deadline_ms=2000) for rank in range(2)
        ]
        assert at_once(puts) == [PutResult(0, 0, 0, MissReason.IN_FLIGHT)] * 2
        assert not sidecar.core.collective_puts()
