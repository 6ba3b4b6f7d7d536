"""What an engine has told routers of its blocks: who believes it ends with what the store holds of them."""

from __future__ import annotations

import random
import secrets
from itertools import count

from engine_adapter.paged.announcements import Announcements
from kvstore.block.account import HitTier
from kvstore.client.handle import NamespaceHandle
from kvstore.client.pending import PendingReply, ReadyReply
from kvstore.protocol import messages as m
from service.sidecar import Sidecar, sidecar_fixture
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()


class Router:
    """Believes what it is told, and holds that against what may be told."""

    def __init__(self, announced: Announcements[bytes]) -> None:
        self.announced = announced
        self.places: dict[bytes, HitTier] = {}

    def listen(self) -> int:
        news = self.announced.take()
        for one in news:
            assert self.places.get(one.block) is one.went, "what went is what was told before"
            assert one.came is not one.went
            if one.came is None:
                del self.places[one.block]
            else:
                self.places[one.block] = one.came
        return len(news)


class Told:
    """Stands where a namespace is: answers what it is given."""

    def __init__(self, *answers: m.Changed) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    def submit_changes(self, after: int) -> PendingReply[m.Changed]:
        self.asked.append(after)
        given = self.answers.pop(0) if self.answers else m.Changed(b"r", [], max(1, after))
        return PendingReply(ReadyReply(given), lambda one: one, lambda: m.Changed(b"", [], 0))


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def announced(namespace: Told | NamespaceHandle | None, most: int = 1000) -> Announcements[bytes]:
    """A block is called by its key, which a request is asked for. Time passes by itself: each question is due."""
    return Announcements(count(1.0).__next__, lambda request, number: request[number], lambda: namespace, most)


def save(news: Announcements[bytes], keys: list[bytes], held: int, first: int = 0) -> None:
    news.saved(b"".join(keys), first, held)


# By itself ------------------------------------------------------------------------------------------------------------


def test_what_the_store_tells_counts_more_than_a_report() -> None:
    keys = [key(1), key(2)]
    told = Told(m.Changed(b"r", [], 5), m.Changed(b"r", [(keys[0], 1), (keys[0], 0), (keys[1], 1), (keys[1], 2)], 9))
    news = announced(told)
    router = Router(news)
    news.step()
    news.step()
    news.expect(keys, keys, 0)
    news.step()
    save(news, keys, 2)
    router.listen()
    assert router.places == {keys[1]: HitTier.NVME}, "the first was gone before its report came"
    assert told.asked == [0, 5, 9]


def test_where_the_order_is_lost_or_the_store_began_anew_all_is_taken_back() -> None:
    keys = [key(1)]
    for after in (m.Changed(b"r", [], 40, True), m.Changed(b"s", [], 7)):
        told = Told(m.Changed(b"r", [], 5), m.Changed(b"r", [(keys[0], 1)], 6), after)
        news = announced(told)
        router = Router(news)
        news.expect(keys, keys, 0)
        for _ in range(3):
            news.step()
        router.listen()
        assert router.places == {keys[0]: HitTier.DRAM}
        news.step()
        router.listen()
        assert router.places == {} and news.resets == 1
        assert told.asked[-1] == after.next, "nothing is left out between"


def test_what_falls_out_is_taken_back() -> None:
    news = announced(None, most=3)
    router = Router(news)
    keys = [key(number) for number in range(5)]
    for name in keys:
        news.expect([name], [name], 0)
        save(news, [name], 1)
        router.listen()
    assert set(router.places) == set(keys[2:])


# With a store ---------------------------------------------------------------------------------------------------------


sidecar = sidecar_fixture(dram="1MiB", extent="64KiB", nvme="2MiB", slab="64KiB", indexes=LmdbMaker)


def test_who_believes_an_engine_ends_with_what_the_store_holds_of_its_blocks(sidecar: Sidecar) -> None:
    """Others store the same prompts, and evict what this one has stored; an engine steps now and then."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with sidecar.client() as one, sidecar.client() as two:
        handle, others = (store.namespace(model=MODEL, layout=LAYOUT) for store in (one, two))
        news = announced(handle)
        router = Router(news)
        told = []

        def step() -> None:
            news.step()
            told.append(router.listen())

        wait_until(lambda: not step() and bool(news._run))  # type: ignore[func-returns-value]
        mine: set[bytes] = set()
        for _ in range(150):
            number = draw.randrange(40)
            prompt = ids(64 * (1 + number % 5), 10_000 * number)
            keys = handle.hashed(prompt).keys
            pages = random_pages(LAYOUT, len(keys), seed=number)
            if draw.random() < 0.5:
                news.expect(keys, keys, 0)
                if draw.random() < 0.5:
                    step()
                result = handle.put(prompt, pages)
                mine.update(keys)
                if draw.random() < 0.5:
                    step()
                save(news, keys, result.present + result.stored if result.stopped_at is None else 0)
            elif draw.random() < 0.9:
                others.put(prompt, pages)
            else:
                handle.lease(handle.match(prompt), deadline_ms=1000).release()
            if draw.random() < 0.5:
                step()
        after = -1

        def is_quiet() -> bool:
            nonlocal after
            before, after = after, news._after
            step()
            return before == after == news._after and news._pending is not None

        wait_until(is_quiet)
        step()
        held = {name for name in sidecar.core.blocks.index._names[0].visible if name in mine}
        assert set(router.places) <= held, "nothing is believed that is not there"
        assert set(router.places) == held, "and all that is there"
        assert news.resets == 0
