"""An engine whose ranks are processes, at a real sidecar: one scheduler, a worker for each rank.

Workers hold their own heads only. They put collectively, and read what the scheduler leased through its ticket. Orders
go through pipes, so that a test says who is how far when one of them is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from asking import Asking, stand_in
from kvstore.block.account import MissReason
from kvstore.block.layout import Layout
from kvstore.cli import ask
from kvstore.client.handle import NamespaceHandle, PutResult
from kvstore.client.sidecar_store import SidecarStore
from kvstore.protocol import messages as m
from kvstore.protocol.door import Collective
from service.sidecar import Sidecar, patient, sidecar_fixture
from service.test_serve import serving
from service.workers import SECONDS, Worker, workers
from tiering.clock import SystemClock
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, random_pages, same_tokens, shard_pages, small_layout

TOKENS, BLOCKS = 512, 8
TWO = small_layout(head_shards=2)


def pages_of(layout: Layout, seed: int) -> Any:
    return random_pages(layout, BLOCKS, seed=seed)


def work(socket: str, session: str, layout: Layout, rank: int, wires: Connection) -> None:
    """A worker: does what it is told, and says what came of it."""
    with patient(kvstore.open(f"unix:{socket}", session=session, engine=f"rank {rank}")) as store:
        handle = store.namespace(model=MODEL, layout=layout, shard=rank)
        wires.send("ready")
        while (order := wires.recv()) is not None:
            what, *given = order
            if what == "put":
                seed, collective = given
                mine = shard_pages(pages_of(layout, seed), layout, rank)
                wires.send(handle.put(ids(TOKENS, 1000 * seed), mine, collective=collective))
            elif what == "stop before the commit":

                def stop(request: m.Commit, commit: Callable[[], Any]) -> Any:
                    wires.send("filled")
                    wires.recv()
                    return commit()

                stand_in(handle.door, m.Commit, stop)
                type(handle.door).commits_early = False
                wires.send("so be it")
            elif what == "get":
                ticket, seed = given
                blank = shard_pages(blank_pages(layout, BLOCKS), layout, rank)
                with handle.attach(ticket) as lease:
                    loaded = handle.get(lease, blank)
                is_right = same_tokens(shard_pages(pages_of(layout, seed), layout, rank), blank, range(loaded.tokens))
                wires.send((loaded.tokens, is_right, loaded.reason))


class Engine:
    """A scheduler's store and handle, and its workers."""

    def __init__(self, socket: str, store: SidecarStore, layout: Layout, workers: list[Worker]) -> None:
        self.store, self.workers = store, workers
        self.admin = str(Path(socket).with_name("admin.sock"))
        self.scheduler: NamespaceHandle = store.namespace(model=MODEL, layout=layout)

    def put(self, seed: int, collective: str, ranks: Sequence[int] | None = None) -> list[PutResult]:
        """All at once."""
        chosen = self.workers if ranks is None else [self.workers[rank] for rank in ranks]
        for one in chosen:
            one.wires.send(("put", seed, collective))
        return [one.hears() for one in chosen]

    def blocks(self, seed: int) -> int:
        return self.scheduler.match(ids(TOKENS, 1000 * seed)).blocks

    def read(self, seed: int) -> list[Any]:
        """What each rank finds under one lease of the scheduler's."""
        match = self.scheduler.match(ids(TOKENS, 1000 * seed))
        with self.scheduler.lease(match, deadline_ms=5000) as lease:
            ticket = lease.ticket()
            for one in self.workers:
                one.wires.send(("get", ticket, seed))
            return [one.hears() for one in self.workers]

    def stat(self) -> Any:
        return ask.stat(self.admin, SystemClock())

    def reservations(self) -> tuple[int, list[int]]:
        facts = self.stat()
        return facts.reservations, [one.reservations for one in facts.sessions]

    def slots(self) -> int:
        """Taken in memory, by whatever."""
        slots = self.stat().tiers[0].slots
        return int(slots["used"] + slots["reserved"])


@contextmanager
def engine(directory: Path, layout: Layout, *flags: str) -> Iterator[Engine]:
    with serving(directory, "--nvme", "off", *flags) as (_, said):
        (socket,) = said["serving"]
        with (
            patient(kvstore.open(f"unix:{socket}", engine="scheduler")) as store,
            workers(work, [(socket, store.session, layout, rank) for rank in range(layout.head_shards)]) as started,
        ):
            yield Engine(socket, store, layout, started)


READ = (TOKENS, True, None)


def test_a_rank_that_is_killed_before_its_commit_ends_the_put_for_all(tmp_path: Path) -> None:
    with engine(tmp_path, TWO) as it:
        one, two = it.workers
        assert it.put(1, "a") == [PutResult(0, BLOCKS, None, None)] * 2
        taken = it.slots()
        for worker in it.workers:
            worker.told("stop before the commit")
            worker.wires.send(("put", 2, "b"))
        assert [worker.hears() for worker in it.workers] == ["filled"] * 2
        assert it.reservations() == (1, [1]) and it.slots() == taken + 2 * BLOCKS
        os.kill(one.process.pid or 0, signal.SIGKILL)
        wait_until(lambda: it.scheduler.match(ids(TOKENS, 2000)).reason is MissReason.ABSENT)
        one.process.join(SECONDS)
        assert it.slots() == taken + 2 * BLOCKS, "the other one may still write into its slots"
        assert it.reservations() == (1, [1])
        assert two.told("go on") == PutResult(0, 0, 0, MissReason.DISABLED)
        wait_until(lambda: it.slots() == taken and it.reservations() == (0, [0]))
        assert it.blocks(2) == 0
        two.wires.send(("put", 2, "b"))
        assert two.hears() == PutResult(0, 0, 0, MissReason.DISABLED), "it is over under that name"
        # Another process takes the rank of the one that is gone, and all goes on.
        it.workers[0] = Worker(work, str(Path(it.admin).with_name("kvstore.sock")), it.store.session, TWO, 0)
        try:
            assert it.workers[0].hears() == "ready"
            for worker in it.workers:
                worker.wires.send(("put", 2, "c"))
            assert two.hears() == "filled"
            assert two.told("go on") == PutResult(0, BLOCKS, None, None)
            assert it.workers[0].hears() == PutResult(0, BLOCKS, None, None)
            assert it.read(2) == [READ] * 2 and it.read(1) == [READ] * 2
        finally:
            it.workers[0].kill()


# Sidecars inside the test's process -----------------------------------------------------------------------------------

sidecar = sidecar_fixture(dram="4MiB")


def test_other_sessions_and_nonsense_have_no_part_in_a_joint_put(sidecar: Sidecar) -> None:
    with sidecar.client() as store, sidecar.client() as stranger:
        handle, other = (one.namespace(model=MODEL, layout=TWO, shard=0) for one in (store, stranger))
        keys = handle.match(ids(TOKENS)).keys
        reply = Asking(handle.door).reserve(handle.number, keys, 0, 0, None, Collective("j", (0,)))
        assert reply.blocks
        theirs = Asking(other.door).reserve(other.number, keys, 0, 0, None, Collective("j", (1,)))
        assert (theirs.reservation, theirs.reason) == (0, MissReason.IN_FLIGHT)
        run = other.door._run
        assert run is not None
        number = run.namespaces[other.number]
        wrong = [
            m.Reserve(number, keys, 0, 0, None, "x" * 300),
            m.Reserve(number, keys, 0, 0, None, "j", [2]),
            m.Reserve(number, keys, 0, 0, None, "j", [-1]),
            m.Reserve(number, keys, 0, 0, None, "j", [0, 0]),
            m.Reserve(number, keys, 0, 0, None, "j", [1 << 70 - 8]),
        ]
        for verb in wrong:
            answer = run.wire.call(verb, 10).answer
            assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, verb
        Asking(handle.door).abort(reply.reservation)
        handle.match(ids(64))
        wait_until(lambda: not sidecar.store.usage().reservations)


def test_an_older_program_leaves_the_fields_out() -> None:
    verb = m.Reserve(1, [b"k" * 32], 0)
    whole = m.pack(m.Request(7, verb))
    assert m.unpack_request(whole[m.LENGTH_BYTES :]).verb == verb
    short = b"\x92\x07\x96" + whole[m.LENGTH_BYTES + 3 :][: -len(b"\xa0\x90\x00\xc2")]
    assert whole[m.LENGTH_BYTES : m.LENGTH_BYTES + 3] == b"\x92\x07\x9a", "a request of two, a verb of ten"
    assert m.unpack_request(short).verb == verb
