"""What engines with several threads and processes are promised, alike for a store in this process and for a sidecar:
leases handed on, requests released, questions that are polled for. One suite; each kind of store is a subclass.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import kvstore
from asking import Asking
from groups import full, sliding
from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, LeaseExpired
from kvstore.block.layout import Layout
from kvstore.block.pages import GroupPages, Pages
from kvstore.client.handle import Lease, NamespaceHandle, PutResult
from kvstore.config import Limits
from kvstore.node import EmbeddedStore
from kvstore.protocol.door import Collective
from kvstore.protocol.lease_ticket import LeaseTicket
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import (
    MODEL,
    blank_pages,
    blank_planes,
    ids,
    one_line,
    random_pages,
    same_tokens,
    shard_pages,
    small_layout,
)

LAYOUT = small_layout()
TWO = small_layout(head_shards=2)
PAGES = random_pages(LAYOUT, 8)
SECONDS = 20


class Engine:
    """A scheduler's and a worker's view of one store with 8 blocks of a prompt, and what it holds for them."""

    def __init__(self, core: EmbeddedStore, scheduler: Any, worker: Any) -> None:
        self.core, self.scheduler, self.worker = core, scheduler, worker
        self.mine: NamespaceHandle = scheduler.namespace(model=MODEL, layout=LAYOUT)
        self.theirs: NamespaceHandle = worker.namespace(model=MODEL, layout=LAYOUT)
        assert self.mine.put(ids(512), PAGES).stored == 8

    def ranks(self) -> list[NamespaceHandle]:
        """The same two processes as ranks, each with half of the heads."""
        return [
            store.namespace(model="ranks", layout=TWO, shard=rank)
            for rank, store in enumerate((self.scheduler, self.worker))
        ]

    def lease(self, **options: Any) -> Lease:
        lease = self.mine.lease(self.mine.match(ids(512)), deadline_ms=5000, **options)
        assert lease.blocks == 8
        return lease

    def leases(self) -> int:
        """How many are there, once what is under way has arrived."""
        for handle in (self.mine, self.theirs):
            handle.lease(handle.match(ids(512)), deadline_ms=5000).release()
            handle.match(ids(64))
        return self.core.usage().leases

    def reads(self, handle: NamespaceHandle, lease: Lease) -> bool:
        """Whether all of it can be read; what can be is right."""
        blank = blank_pages(LAYOUT, 8)
        loaded = handle.get(lease, blank)
        assert same_tokens(PAGES, blank, range(loaded.tokens)) and loaded.account.hit_tokens == loaded.tokens
        return loaded.tokens == 512


class EngineVerbs:
    """The contract; `opened` makes a store, and closes it."""

    def opened(self, directory: Path, **options: Any) -> AbstractContextManager[Engine]:
        raise NotImplementedError

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        with self.opened(tmp_path) as engine:
            yield engine

    # Leases that are handed on

    def test_a_lease_is_read_by_others_and_ends_with_the_last_of_them(self, engine: Engine) -> None:
        lease = engine.lease(request="r1")
        ticket = lease.ticket()
        one, two = engine.theirs.attach(ticket), engine.theirs.attach(ticket)
        assert (one.blocks, one.tokens, one.first_token, one.reason) == (8, 512, 0, None)
        assert one.account == lease.account and one.request == "r1"
        lease.release()
        assert engine.leases() == 1 and engine.reads(engine.theirs, one)
        one.release()
        one.release()
        assert engine.leases() == 1 and engine.reads(engine.theirs, two)
        two.release()
        wait_until(lambda: engine.leases() == 0)
        gone = engine.theirs.attach(ticket)
        assert (gone.blocks, gone.reason) == (0, MissReason.STALE_HINT)
        assert gone.account.hit_tokens == 0 and gone.account.asked == 512
        assert not engine.reads(engine.theirs, gone)
        engine.core.check()

    def test_a_lease_that_ran_out_cannot_be_handed_on(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, limits=Limits(lease_seconds=0.05)) as engine:
            lease = engine.lease()
            time.sleep(0.06)
            assert engine.theirs.attach(lease.ticket()).reason is MissReason.STALE_HINT
            assert engine.reads(engine.mine, lease)
            lease.release()

    def test_an_attached_lease_that_is_forgotten_ends(self, engine: Engine) -> None:
        lease = engine.lease()
        attached = engine.theirs.attach(lease.ticket())
        lease.release()
        del attached
        gc.collect()
        wait_until(lambda: engine.leases() == 0)

    def test_a_ticket_starts_where_the_lease_does(self, engine: Engine) -> None:
        lease = engine.lease(first_token=128)
        with engine.theirs.attach(lease.ticket()) as attached:
            assert (attached.first_token, attached.blocks) == (128, 8)
            blank = blank_pages(LAYOUT, 6)
            assert engine.theirs.get(attached, blank, first_token=128).tokens == 512
            assert same_tokens(blank, PAGES, range(128, 512), 128)
        lease.release()

    def test_a_ticket_of_nothing_is_a_lease_of_nothing(self, engine: Engine) -> None:
        nothing = engine.mine.lease(engine.mine.match(ids(512, 7)))
        attached = engine.theirs.attach(nothing.ticket())
        assert attached.blocks == 0 and attached.account == nothing.account

    def test_a_ticket_of_another_namespace(self, engine: Engine) -> None:
        other = engine.worker.namespace(model="another", layout=LAYOUT)
        with engine.lease() as lease:
            attached = other.attach(lease.ticket())
        assert (attached.blocks, attached.reason) == (0, MissReason.STALE_HINT) and "namespace" in attached.detail

    @pytest.mark.parametrize("ticket", [b"", b"x", b"\x01" * 40, "text", None, bytes(1 << 16)])
    def test_what_is_no_ticket(self, engine: Engine, ticket: Any) -> None:
        attached = engine.theirs.attach(ticket)
        assert (attached.blocks, attached.reason) == (0, MissReason.STALE_HINT)
        assert engine.theirs.get(attached, blank_pages(LAYOUT, 8)).tokens == 0

    def test_a_ticket_with_any_bit_flipped_or_cut_anywhere_is_a_miss(self, engine: Engine) -> None:
        with engine.lease() as lease:
            ticket = lease.ticket()
            flipped = [bytearray(ticket) for _ in range(8 * len(ticket))]
            for bit, damaged in enumerate(flipped):
                damaged[bit // 8] ^= 1 << bit % 8
            cuts = [ticket[:length] for length in range(len(ticket))]
            for wrong in (*map(bytes, flipped), *cuts, ticket + b"x", ticket * 2):
                attached = engine.theirs.attach(wrong)
                assert (attached.blocks, attached.reason) == (0, MissReason.STALE_HINT)
            assert engine.theirs.get(attached, blank_pages(LAYOUT, 8)).tokens == 0
            whole = engine.theirs.attach(ticket)
            assert engine.reads(engine.theirs, whole)

    def test_a_forged_ticket_leads_to_no_wrong_byte(self, engine: Engine) -> None:
        """Made by one who has the tenant's key: what it says is checked against the store and the frames."""
        other = random_pages(LAYOUT, 8, seed=1)
        assert engine.mine.put(ids(512, 9), other).stored == 8
        with engine.lease() as lease, engine.mine.lease(engine.mine.match(ids(512, 9))) as theirs:
            grant = engine.theirs._grant
            good, crossed = (LeaseTicket.open(one.ticket(), grant) for one in (lease, theirs))
            many = tuple([1 << 62] * 8 for _ in good.places)
            changes: list[dict[str, Any]] = [
                {"places": crossed.places},
                {"places": crossed.places, "header_digests": crossed.header_digests},
                {"header_digests": crossed.header_digests},
                {"keys": crossed.keys},
                {"places": many},
                {"places": tuple([-1] * 8 for _ in good.places)},
                {"lease": good.lease + 1000},
                {"lease": -1},
                {"run": b"x" * len(good.run)},
                {"blocks": 1 << 60},
                {"first_block": 1 << 60},
                {"first_block": -1},
                {"keys": b""},
                {"places": ()},
            ]
            for change in changes:
                forged = msgspec.structs.replace(good, **change).seal(grant)
                with engine.theirs.attach(forged) as attached:
                    blank = blank_pages(LAYOUT, 8)
                    assert engine.theirs.get(attached, blank).tokens == 0, change
            engine.core.check()
            assert engine.reads(engine.theirs, engine.theirs.attach(lease.ticket()))
        wait_until(lambda: engine.leases() == 0)

    # Layer by layer

    def test_layers_of_an_attached_lease_come_one_by_one(self, engine: Engine) -> None:
        lease = engine.lease(request="r1")
        attached = engine.theirs.attach(lease.ticket())
        lease.release()
        blank = blank_pages(LAYOUT, 8)
        told = engine.theirs.get_by_layer(attached, blank)
        assert next(told).tokens == 512
        assert torch.equal(blank.planes[0][0].view(torch.uint8), PAGES.planes[0][0].view(torch.uint8))
        assert not blank.planes[1][0].any() and engine.leases() == 1
        assert [loaded.tokens for loaded in told] == [512]
        assert same_tokens(PAGES, blank, range(512))
        attached.release()
        wait_until(lambda: engine.leases() == 0)

    def test_the_end_of_a_request_ends_a_get_by_layers(self, engine: Engine) -> None:
        """Between two layers nothing is held: it is over at once."""
        lease = engine.lease(request="a")
        told = engine.mine.get_by_layer(lease, blank_pages(LAYOUT, 8))
        assert next(told).tokens == 512
        engine.scheduler.release_request("a")
        wait_until(lambda: engine.leases() == 0)
        assert [(loaded.tokens, loaded.reason) for loaded in told] == [(0, MissReason.DISABLED)]

    def test_windows_are_read_through_any_door(self, engine: Engine) -> None:
        """By a worker with pages of the window alone, at once and layer by layer."""
        layout = Layout((full("full", (0, 2)), sliding("sliding", (1, 3), 100)))
        mine, theirs = (store.namespace(model=MODEL, layout=layout) for store in (engine.scheduler, engine.worker))
        source = random_pages(layout, 8, 16, seed=3)
        assert mine.put(ids(512), source).stored == 8
        with mine.lease(mine.match(ids(512)), deadline_ms=5000) as lease, theirs.attach(lease.ticket()) as attached:
            for verb in (lambda *given: [theirs.get(*given)], theirs.get_by_layer):
                planes = blank_planes(layout, 48, 16)
                pages = Pages(planes, range(32), 16, {"sliding": GroupPages(range(40, 47), 25)})
                assert [loaded.tokens for loaded in verb(attached, pages)][-1] == 512
                assert same_tokens(Pages({0: planes[0], 2: planes[2]}, range(32), 16), source, range(512))
                window = Pages({1: planes[1], 3: planes[3]}, range(40, 47), 16)
                assert same_tokens(window, source, range(400, 512), offset=400)
                assert not any(plane[:40].any() or plane[47:].any() for layer in (1, 3) for plane in planes[layer])
        freed = Pages(source.planes, range(32), 16, {"sliding": GroupPages(range(25, 32), 25)})
        assert mine.put(ids(512, 5000), freed) == PutResult(0, 0, 0, MissReason.INCOMPLETE)
        assert mine.put(ids(512), freed) == PutResult(8, 0, None, None)

    # Ranks that hold different heads

    def test_ranks_put_jointly_and_read_their_heads_through_one_ticket(self, engine: Engine) -> None:
        ranks = engine.ranks()
        for rank, handle in enumerate(ranks):
            assert ranks[0].match(ids(512)).blocks == 0
            assert handle.put(ids(512), shard_pages(PAGES, TWO, rank), collective="j").stored == 8
        with ranks[0].lease(ranks[0].match(ids(512)), deadline_ms=5000) as lease:
            for rank, handle in enumerate(ranks):
                with handle.attach(lease.ticket()) as attached:
                    blank = shard_pages(blank_pages(TWO, 8), TWO, rank)
                    assert handle.get(attached, blank).tokens == 512
                    assert same_tokens(shard_pages(PAGES, TWO, rank), blank, range(512))
        for rank, handle in enumerate(ranks):
            assert handle.put(ids(512), shard_pages(PAGES, TWO, rank), collective="k").present == 8
        engine.core.check()

    def test_what_one_rank_gives_up_is_lost_for_all(self, engine: Engine) -> None:
        ranks = engine.ranks()
        keys = ranks[0].match(ids(512)).keys
        replies = [
            Asking(handle.door).reserve(handle.number, keys, 0, 0, None, Collective("j", (rank,)))
            for rank, handle in enumerate(ranks)
        ]
        assert [reply.blocks for reply in replies] == [list(range(8))] * 2
        assert engine.core.usage().reservations == 1 and engine.core.usage().dram.reserved == 16
        digests = [[bytes(16)] * 2] * 8
        assert Asking(ranks[0].door).commit(replies[0].reservation, 0, 0, digests[:3]) == 3
        Asking(ranks[0].door).abort(replies[0].reservation)
        ranks[0].match(ids(64))
        assert Asking(ranks[1].door).commit(replies[1].reservation, 1, 0, digests) == 0
        assert engine.core.usage().reservations == 1, "the other one might still write"
        Asking(ranks[1].door).abort(replies[1].reservation)
        ranks[1].match(ids(64))
        usage = engine.core.usage()
        assert (usage.reservations, usage.dram.reserved) == (0, 0) and ranks[0].match(ids(512)).blocks == 0
        late = ranks[1].put(ids(512), shard_pages(PAGES, TWO, 1), collective="j")
        assert (late.stored, late.reason) == (8, None), "that is another name: a user's has the window's end behind it"
        engine.core.check()

    def test_ranks_that_come_at_once_are_told_the_same(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Threads of one process, or processes: the first one's answer is everybody's, however close they come."""
        monkeypatch.setattr("kvstore.core.reservations.ANSWER_SECONDS", 60.0)  # a busy machine may find room slowly
        ranks = engine.ranks()
        barrier = threading.Barrier(2)

        def put(rank: int, number: int) -> PutResult:
            barrier.wait(SECONDS)
            mine = shard_pages(PAGES, TWO, rank)
            return ranks[rank].put(ids(512, 1000 * number), mine, collective=f"{number}")

        for number in range(10):
            with ThreadPoolExecutor(2) as pool:
                results = list(pool.map(put, range(2), [number] * 2))
            assert results[0] == results[1] and results[0].stored == 8
            assert ranks[0].match(ids(512, 1000 * number)).blocks == 8
        engine.core.check()

    # Requests

    def test_the_end_of_a_request_ends_what_was_held_for_it_here_and_nothing_else(self, engine: Engine) -> None:
        leases = [engine.lease(request="a"), engine.lease(request="a"), engine.lease(request="b"), engine.lease()]
        pending = engine.mine.submit_lease(engine.mine.match(ids(512)), deadline_ms=5000, request="a")
        answered = engine.mine.submit_lease(engine.mine.match(ids(512)), deadline_ms=5000, request="a")
        third = wait_until(answered.poll)
        engine.scheduler.release_request("a")
        assert [one.released for one in (*leases, third)] == [True, True, False, False, True]
        for ended in (leases[0], third):
            loaded = engine.mine.get(ended, blank_pages(LAYOUT, 8))
            assert (loaded.tokens, loaded.reason) == (0, MissReason.DISABLED) and loaded.account.asked == 512
        late = pending.poll()
        assert late is not None and (late.blocks, late.reason) == (0, MissReason.DISABLED)
        assert all(engine.reads(engine.mine, lease) for lease in leases[2:])
        wait_until(lambda: engine.leases() == 2)
        engine.scheduler.release_request("a")
        engine.scheduler.release_request("nobody")
        leases[2].release()
        with pytest.raises(LeaseExpired):
            engine.mine.get(leases[2], blank_pages(LAYOUT, 8))
        leases[3].release()
        wait_until(lambda: engine.leases() == 0)

    def test_a_get_under_way_keeps_its_blocks_until_it_is_over(self, engine: Engine) -> None:
        lease = engine.lease(request="a")
        assert lease.begin_read()
        engine.scheduler.release_request("a")
        assert lease.released and engine.leases() == 1, "a slot must not be used again under a copy"
        assert not lease.begin_read()
        lease.end_read()
        wait_until(lambda: engine.leases() == 0)

    def test_a_request_that_is_no_name(self, engine: Engine) -> None:
        match = engine.mine.match(ids(512))
        calls: list[Callable[[Any], Any]] = [
            lambda name: engine.mine.match(ids(512), request=name),
            lambda name: engine.mine.submit_match(ids(512), request=name),
            lambda name: engine.mine.lease(match, request=name),
            lambda name: engine.mine.submit_lease(match, request=name),
            lambda name: engine.scheduler.release_request(name),
        ]
        for call in calls:
            for name in (7, 0, None, "x" * 257):
                with pytest.raises(BadInput) as raised:
                    call(name)
                assert one_line(raised.value, "request=", "256")

    @pytest.mark.slow
    def test_names_of_requests_are_forgotten(self, engine: Engine) -> None:
        for number in range(2000):
            engine.mine.lease(engine.mine.match(ids(512, 7)), request=f"r{number}").release()
        assert len(engine.mine.door.requests) <= 1000

    # Submit and poll

    def test_what_is_polled_is_what_the_blocking_verb_returns(self, engine: Engine) -> None:
        pending = engine.mine.submit_match(ids(600))
        match = wait_until(pending.poll)
        assert match == engine.mine.match(ids(600)) and pending.poll() is match
        submitted = engine.mine.submit_lease(match, first_token=64, deadline_ms=5000, request="a")
        lease = wait_until(submitted.poll)
        assert submitted.poll() is lease and isinstance(lease, Lease)
        with engine.mine.lease(match, first_token=64, deadline_ms=5000) as other:
            assert (lease.blocks, lease.account, lease.first_token) == (other.blocks, other.account, other.first_token)
        submitted.cancel()
        assert not lease.released, "it was polled: it is its owner's"
        blank = blank_pages(LAYOUT, 7)
        assert engine.mine.get(lease, blank, first_token=64).tokens == 512
        assert same_tokens(blank, PAGES, range(64, 512), 64)
        lease.release()
        wait_until(lambda: engine.leases() == 0)

    def test_what_nobody_wants_is_given_back(self, engine: Engine) -> None:
        match = engine.mine.match(ids(512))
        for number in range(30):
            pending = engine.mine.submit_lease(match, deadline_ms=5000)
            if number % 3 == 1:
                pending.poll()
            time.sleep(0.001 * (number % 4))
            if number % 2:
                pending.cancel()
                pending.cancel()
                answer = pending.poll()
                assert answer is not None
                assert answer.reason in (None, MissReason.DISABLED)
            del pending
        gc.collect()
        answer = None
        wait_until(lambda: engine.leases() == 0)
        engine.core.check()

    def test_bad_input_is_raised_where_it_is_submitted(self, engine: Engine) -> None:
        with pytest.raises(BadInput):
            engine.mine.submit_match([-1])
        with pytest.raises(BadInput, match="deadline_ms=-1; give milliseconds"):
            engine.mine.submit_match([1], deadline_ms=-1)
        with pytest.raises(BadInput):
            engine.mine.submit_lease(engine.mine.match(ids(512)), deadline_ms=-1)

    @pytest.mark.slow
    def test_one_polls_while_others_wait(self, engine: Engine) -> None:
        """Every thread gets its own answers, whoever reads for all."""
        wrong: list[Any] = []
        over = threading.Event()

        def work(handle: NamespaceHandle, number: int) -> None:
            prompt = ids(64 * (1 + number % 8))
            while not over.is_set():
                match = handle.match(prompt)
                with handle.lease(match, deadline_ms=5000) as lease:
                    blank = blank_pages(LAYOUT, len(prompt) // 64)
                    loaded = handle.get(lease, blank)
                if loaded.tokens != len(prompt) or not same_tokens(PAGES, blank, range(len(prompt))):
                    wrong.append((number, match, loaded))

        threads = [threading.Thread(target=work, args=(engine.mine, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(100):
                prompts = [ids(64 * (1 + (number + other) % 8)) for other in range(4)]
                matches = [wait_until(one.poll) for one in [engine.mine.submit_match(prompt) for prompt in prompts]]
                assert [match.tokens for match in matches] == [len(prompt) for prompt in prompts]
                leases = [
                    wait_until(one.poll) for one in [engine.mine.submit_lease(m, deadline_ms=5000) for m in matches]
                ]
                assert [lease.tokens for lease in leases] == [len(prompt) for prompt in prompts]
                for lease in leases:
                    lease.release()
        finally:
            over.set()
            for thread in threads:
                thread.join(SECONDS)
        assert not wrong
        wait_until(lambda: engine.leases() == 0)

    def test_a_closed_store_has_nothing(self, engine: Engine) -> None:
        match = engine.mine.match(ids(512))
        lease = engine.lease(request="a")
        ticket = lease.ticket()
        engine.scheduler.close()
        assert wait_until(engine.mine.submit_match(ids(512)).poll).reason is MissReason.DISABLED
        assert wait_until(engine.mine.submit_lease(match).poll).reason is MissReason.DISABLED
        assert engine.mine.attach(ticket).blocks == 0
        engine.scheduler.release_request("a")
        assert engine.mine.get(lease, blank_pages(LAYOUT, 8)).reason is MissReason.DISABLED


class TestEmbedded(EngineVerbs):
    @contextmanager
    def opened(self, directory: Path, **options: Any) -> Iterator[Engine]:
        with kvstore.embedded(str(directory / "kv"), dram="1MiB", **options) as store:
            yield Engine(store, store, store)

    def test_a_ticket_of_another_store(self, engine: Engine, tmp_path: Path) -> None:
        with self.opened(tmp_path / "x") as other, engine.lease() as lease:
            assert other.theirs.attach(lease.ticket()).blocks == 0

    def test_a_session_is_for_sidecars(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput) as raised:
            kvstore.open(f"embedded:{tmp_path}", session="5e" * 16)
        assert one_line(raised.value, "session=", "unix:PATH")


class TestSidecar(EngineVerbs):
    @contextmanager
    def opened(self, directory: Path, **options: Any) -> Iterator[Engine]:
        """Two clients of one session."""
        with (
            Sidecar(directory, dram="1MiB", **options) as sidecar,
            sidecar.client() as one,
            sidecar.client(one.session) as two,
        ):
            yield Engine(sidecar.store, one, two)

    def test_a_ticket_of_another_session(self, tmp_path: Path) -> None:
        with Sidecar(tmp_path, dram="1MiB") as sidecar, sidecar.client() as one, sidecar.client() as stranger:
            engine = Engine(sidecar.store, one, one)
            handle = stranger.namespace(model=MODEL, layout=LAYOUT)
            with engine.lease() as lease:
                attached = handle.attach(lease.ticket())
                assert (attached.blocks, attached.reason) == (0, MissReason.STALE_HINT)
                assert handle.get(attached, blank_pages(LAYOUT, 8)).tokens == 0

    @pytest.mark.parametrize("session", ["", "5e" * 15, "5e" * 65, "x" * 32, b"5e" * 16, 5])
    def test_what_is_no_session(self, tmp_path: Path, session: Any) -> None:
        with pytest.raises(BadInput) as raised:
            kvstore.open(f"unix:{tmp_path}/none.sock", session=session)
        assert one_line(raised.value, "session", "hexadecimal")
