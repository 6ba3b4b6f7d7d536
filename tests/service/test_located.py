"""A real sidecar, a real courier, and an engine between: blocks that another store has are fetched, leased and counted;
and where no courier is, nobody is asked."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from adapters.test_chunk_space import NAMES as PAGE_NAMES
from adapters.test_chunk_space import Engine as PageEngine
from adapters.test_chunk_store import Engine as ChunkEngine
from adapters.test_chunk_store import name_of
from engine_adapter.adapter import Report, StoreRequest
from engine_adapter.chunks import ChunkLimits, ChunkState
from kvstore.block.account import HitTier, MissReason
from kvstore.client import handle
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from kvstore.protocol import courier as courier_messages
from kvstore.protocol import messages as m
from paged_engine import PagedEngine, Shape, SharedStore
from service.sidecar import Sidecar
from small_courier import SmallCourier
from waiting import wait_until
from workbench import blank_pages, open_at, random_pages, same_tokens, small_layout

SECONDS = 30.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with something else answers later than in 5 ms."""
    monkeypatch.setattr(courier_messages, "LOCATE_SECONDS", 5.0)
    monkeypatch.setattr(handle, "LOCATE_GRACE_SECONDS", 10.0)


@contextmanager
def hosts(path: Path, **options: Any) -> Iterator[tuple[Sidecar, EmbeddedStore]]:
    """A sidecar, and another store with the same keys."""
    near, far = path / "near", path / "far"
    near.mkdir()
    with Sidecar(near, couriers=True, **options) as sidecar:
        far.mkdir()
        shutil.copy(near / "kv" / "keys", far / "keys")
        with open_at(far, dram="16MiB") as other:
            yield sidecar, other


class Engines:
    """One over the other store, and one at the sidecar."""

    def __init__(self, sidecar: Sidecar, far: EmbeddedStore) -> None:
        self.sidecar, self.far = sidecar, far
        self.random = Random(7)
        self.one = PagedEngine(Shape(), lambda _: SharedStore(far), Random(1), session="ab" * 16)
        self.two = PagedEngine(Shape(), sidecar.client, Random(2), session="ab" * 16)

    def close(self) -> None:
        self.one.close()
        self.two.close()

    def prompt(self, tokens: int) -> list[int]:
        prompt = [self.random.randrange(1000) for _ in range(tokens)]
        self.one.add(f"p{self.random.random()}", prompt, 1)
        self.one.run()
        self.one.settle()
        return prompt

    def ask(self, name: str, prompt: list[int]) -> dict[str, Any]:
        self.two.forget()
        request = self.two.add(name, prompt, 2)
        self.two.run()
        self.two.settle()
        account = request.told
        assert account is not None and sum(account["hits"].values()) + sum(account["misses"].values()) == len(prompt)
        return account


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Engines]:
    with hosts(tmp_path) as (sidecar, far), closing(Engines(sidecar, far)) as made:
        yield made
        wait_until(lambda: settled(sidecar))


@contextmanager
def counted(handle: NamespaceHandle) -> Iterator[Counter[str]]:
    """Messages that a client sends, by what they ask."""
    door: Any = handle.door
    wire, sent = door._run.wire, Counter[str]()
    submit, call, post = wire.submit, wire.call, wire.post

    def noting(send: Any) -> Any:
        def noted(verb: m.Verb, *given: Any) -> Any:
            sent[type(verb).__name__] += 1
            return send(verb, *given)

        return noted

    wire.submit, wire.post = noting(submit), noting(post)
    try:
        yield sent
    finally:
        wire.submit, wire.call, wire.post = submit, call, post


def settled(sidecar: Sidecar) -> bool:
    usage = sidecar.store.usage()
    return not (usage.leases or usage.reservations or sidecar.core.awaits.counts().parked)


@pytest.mark.parametrize("tier", [HitTier.PEER, HitTier.REMOTE])
def test_an_engine_gets_what_the_other_store_has_and_counts_it_once(both: Engines, tier: HitTier) -> None:
    with SmallCourier(both.sidecar.courier_path, both.far, tier=tier) as courier:
        prompt = both.prompt(500)
        account = both.ask("a", prompt)
        assert account["hits"] == {str(tier): 448}, (account, courier.brought)
        assert courier.brought == {"located": 1, "fetches": 1, "blocks": 7}
        assert both.ask("b", prompt)["hits"] == {"dram": 448}
        wait_until(lambda: both.sidecar.admin.facts().looked.hit_tokens.get(str(tier)) == 448)  # once it is reported


def test_a_courier_that_hangs_up_while_it_is_waited_for_is_unreachable(both: Engines) -> None:
    prompt = both.prompt(500)
    courier = SmallCourier(both.sidecar.courier_path, both.far)

    def hang_up(blocks: int) -> int:
        courier._run.close()
        return 0

    courier.may_bring = hang_up
    account = both.ask("a", prompt)
    assert account["hits"] == {} and account["misses"]["unreachable"] == 448, account
    courier._thread.join(SECONDS)
    assert both.ask("b", prompt)["hits"] == {"dram": 448}, "it was computed, and stored here"


def test_without_a_courier_no_message_more_is_sent(both: Engines) -> None:
    prompt = both.prompt(300)
    namespace = both.two.half.opener.now()
    assert namespace is not None
    with counted(namespace) as sent:
        both.ask("a", prompt)
        both.ask("b", prompt)
        namespace.match(prompt)
        assert namespace.locate(namespace.hashed(prompt)) == m.Located(0, 0)
        assert namespace.submit_locate(namespace.hashed(prompt)).poll() == m.Located(0, 0)
    assert (sent["MatchPrefix"], sent["LeasePrefix"]) == (2, 1), sent  # what is called goes another way
    assert not sent["Locate"] + sent["Await"] + sent["OpenTicket"], sent


# Engines that may wait, and chunks ------------------------------------------------------------------------------------


def test_a_request_that_may_wait_gets_it_in_its_look_up(tmp_path: Path) -> None:
    with hosts(tmp_path) as (sidecar, far), sidecar.client() as client:
        layout, tokens = small_layout(), list(range(450))
        pages = random_pages(layout, 7)
        StoreRequest(far.namespace(model="m", layout=layout), Report(450, 64)).save(tokens[:448], pages)
        namespace = client.namespace(model="m", layout=layout)
        with SmallCourier(sidecar.courier_path, far) as courier:
            request, into = StoreRequest(namespace, Report(450, 64)), blank_pages(layout, 7)
            assert request.matched_tokens(tokens) == 448 and request.load(into) == 448
            assert request.report.account.hits == {HitTier.PEER: 448} and same_tokens(pages, into, range(448))
            again = StoreRequest(namespace, Report(450, 64))
            assert again.matched_tokens(tokens) == 448 and again.report.account.hits == {HitTier.DRAM: 448}
            again.release()
            courier.may_bring = lambda blocks: 0
            StoreRequest(far.namespace(model="m", layout=layout), Report(450, 64)).save(
                [tokens[-1], *tokens[:447]], random_pages(layout, 7)
            )
            short = StoreRequest(namespace, Report(450, 64))
            assert short.matched_tokens([tokens[-1], *tokens[:449]]) == 0
            assert short.report.account.misses == {MissReason.STALE_HINT: 448, MissReason.PARTIAL_BLOCK: 2}
        wait_until(lambda: settled(sidecar))


def test_chunks_that_are_elsewhere_are_fetched_one_by_one(tmp_path: Path) -> None:
    limits = ChunkLimits(lease_ms=2000.0)
    with (
        hosts(tmp_path) as (sidecar, far),
        sidecar.client() as client,
        ChunkEngine(far, limits, seed=1) as there,
        ChunkEngine(client, limits, seed=2) as here,
        SmallCourier(sidecar.courier_path, far) as courier,
    ):
        names = [name_of(number) for number in range(5)]
        assert len(there.opened().store(names[:4], range(4)).good) == 4
        states = here.opened().ask(names)
        assert states == [ChunkState.HELD] * 4 + [ChunkState.MISSING]
        assert sorted(here.load(names[:4], [4, 5, 6, 7]).good) == sorted(names[:4])
        assert (here.memory[4:8] == there.memory[:4]).all()
        courier.may_bring = lambda blocks: 0
        other = [name_of(number) for number in range(10, 13)]
        there.store(other, range(3))
        assert here.ask(other, "b") == [ChunkState.MISSING] * 3
        here.chunks.forget("b")
        wait_until(lambda: settled(sidecar))


def test_pages_that_are_elsewhere_are_counted_where_they_can_be_fetched_in_time(tmp_path: Path) -> None:
    with hosts(tmp_path, dram="64MiB") as (sidecar, far), sidecar.client() as client:
        there, here = PageEngine(far, 1), PageEngine(client, 2)  # type: ignore[arg-type]
        assert all(there.store(PAGE_NAMES[:6], range(6)))
        with SmallCourier(sidecar.courier_path, far) as courier:
            assert here.space.found(PAGE_NAMES[:8]) == 0, "who may not wait for it does not find it"
            courier.milliseconds = 5000.0
            assert here.space.found(PAGE_NAMES[:8], fetch_ms=1000) == 0, "too late"
            courier.milliseconds = 500.0
            assert here.space.found(PAGE_NAMES[:8], fetch_ms=1000) == 6
            pages = here.space.pages(range(6))
            assert here.space.load(PAGE_NAMES[:6], pages, 3000, fetches=True) == 6
            assert [here.chunk(slot) for slot in range(6)] == [there.chunk(slot) for slot in range(6)]
        there.space.close()
        here.space.close()
