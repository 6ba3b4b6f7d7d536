"""An engine of several processes and a real sidecar: a scheduler that submits and polls, workers that read."""

from __future__ import annotations

import gc
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.block.account import MissReason
from kvstore.client.framing import FramedSocket
from kvstore.client.handle import NamespaceHandle
from kvstore.node import SystemClock
from service.sidecar import Sidecar, patient
from service.test_serve import crash, serving
from service.workers import SECONDS, workers
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, one_line, random_pages, same_tokens, small_layout

LAYOUT = small_layout()
PAGES = random_pages(LAYOUT, 8)


def work(socket: str, session: str, wires: Connection) -> None:
    """A worker: attaches to each ticket and says how much of it is right; holds the last one until told."""
    with patient(kvstore.open(f"unix:{socket}", session=session)) as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        wires.send("ready")
        held = None
        while (order := wires.recv()) is not None:
            if order == ("release",):
                assert held is not None
                held.release()
                wires.send("released")
                continue
            held = handle.attach(*order)
            blank = blank_pages(LAYOUT, 8)
            loaded = handle.get(held, blank)
            is_right = same_tokens(PAGES, blank, range(loaded.tokens))
            wires.send((held.blocks, loaded.tokens, is_right, str(held.reason)))


READ = (8, 512, True, "None")
MISSED = (0, 0, True, "stale_hint")


def lease_of(handle: NamespaceHandle, **options: Any) -> Any:
    match = wait_until(handle.submit_match(ids(512)).poll)
    assert match.blocks == 8
    lease = wait_until(handle.submit_lease(match, deadline_ms=5000, **options).poll)
    assert lease.blocks == 8
    return lease


@pytest.mark.slow
def test_workers_read_what_the_scheduler_leased_and_a_killed_one_holds_nothing(sidecar: Sidecar) -> None:
    with sidecar.client() as store:
        scheduler = store.namespace(model=MODEL, layout=LAYOUT)
        scheduler.put(ids(512), PAGES)
        with workers(work, [(str(sidecar.path), store.session)] * 2) as (one, two):
            assert len(list(sidecar.sessions.sessions())) == 1
            ticket = lease_of(scheduler, request="r").ticket()
            gc.collect()
            assert one.told(ticket) in (READ, MISSED), "the lease was forgotten; it may be there still"
            lease = lease_of(scheduler, request="r")
            ticket = lease.ticket()
            assert one.told(ticket) == READ and two.told(ticket) == READ
            store.release_request("r")
            assert lease.released
            scheduler.match(ids(64))
            assert sidecar.store.evict(100) == 0, "the workers hold it"
            two.kill()
            wait_until(lambda: len(sidecar.sessions.departed) == 0 and len(sidecar.sessions) == 2)
            assert sidecar.store.evict(100) == 0, "one of them still does"
            assert one.told("release") == "released"
            wait_until(lambda: sidecar.store.usage().leases == 0 and sidecar.store.usage().pinned_bytes == 0)
            assert one.told(ticket) == MISSED
            assert sidecar.store.evict(100) == 8


@pytest.mark.slow
def test_one_ticket_of_a_session_is_good_across_restarts_of_the_sidecar(tmp_path: Path) -> None:
    flags = ["--nvme", "64MiB"]
    with serving(tmp_path, *flags) as (process, said):
        (socket,) = said["serving"]
        store = patient(kvstore.open(f"unix:{socket}"))
        scheduler = store.namespace(model=MODEL, layout=LAYOUT)
        assert scheduler.put(ids(512), PAGES, durability="disk").stored == 8
        with workers(work, [(socket, store.session)] * 2) as (one, two):
            old = lease_of(scheduler)
            assert one.told(old.ticket()) == READ
            ticket = old.ticket()
            crash(process, said)
            process.communicate(timeout=SECONDS)
            wait_until(lambda: wait_until(scheduler.submit_match(ids(512)).poll).reason is MissReason.UNREACHABLE)
            assert wait_until(scheduler.submit_lease(scheduler.match(ids(512))).poll).blocks == 0
            assert two.told(ticket)[:3] == (0, 0, True)
            with serving(tmp_path, *flags):
                # The worker may be the first to come back: it begins the session anew.
                wait_until(lambda: two.told(ticket) == MISSED)
                wait_until(lambda: wait_until(scheduler.submit_match(ids(512)).poll).blocks == 8)
                lease = lease_of(scheduler)
                wait_until(lambda: two.told(lease.ticket()) == READ)
                wait_until(lambda: one.told(lease.ticket()) == READ)
                assert one.told(ticket) == MISSED
                store.close()


def test_a_forked_child_is_of_the_same_session(handle: NamespaceHandle) -> None:
    handle.put(ids(512), PAGES)
    lease = lease_of(handle)
    ticket = lease.ticket()
    child = os.fork()
    if not child:
        code = 1
        try:
            wait_until(handle.submit_match(ids(512)).poll)
            blank = blank_pages(LAYOUT, 8)
            with handle.attach(ticket) as attached:
                code = 0 if handle.get(attached, blank).tokens == 512 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert handle.get(lease, blank_pages(LAYOUT, 8)).tokens == 512


# Polls that never wait ------------------------------------------------------------------------------------------------


def test_a_lease_that_comes_after_its_deadline_is_given_back(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    handle.put(ids(512), PAGES)
    match = handle.match(ids(512))
    handle.door._limits = type(handle.door._limits)(lease=0.0)  # type: ignore[attr-defined]
    with sidecar.core.lock:  # no lease is granted meanwhile
        pending = [handle.submit_lease(match, deadline_ms=1) for _ in range(10)]
        assert {wait_until(one.poll).reason for one in pending} == {MissReason.DEADLINE}
    wait_until(lambda: sidecar.door.usage().served.get("lease", 0) == 10 and sidecar.store.usage().leases == 0)
    sidecar.store.check()


@pytest.mark.parametrize("length", [1, 15, 65, 1000])
def test_a_token_of_another_length_is_refused(sidecar: Sidecar, length: int) -> None:
    with sidecar.client() as store:
        store._door.session = b"x" * length
        store._door._limits = type(store._door._limits)(open=0.1)
        with pytest.raises(kvstore.Unreachable, match="give 16 to 64"):
            store.namespace(model=MODEL, layout=LAYOUT)


def test_a_socket_whose_path_is_too_long_is_called_so() -> None:
    with pytest.raises(kvstore.Unreachable) as caught:
        FramedSocket("x" * 200, "test", b"", SystemClock(), 1.0)
    assert one_line(caught.value, "path too long")


def test_leases_that_are_submitted_together_map_an_extent_once(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    with sidecar.opened() as other:
        other.put(ids(512), PAGES)
    match = handle.match(ids(512))
    pending = [handle.submit_lease(match, deadline_ms=5000) for _ in range(48)]
    wait_until(lambda: sidecar.door.usage().served.get("lease", 0) == 48)
    (silent,) = pending[:1]
    with sidecar.core.lock:  # no extent is handed out meanwhile
        assert silent.poll() is None, "it has asked for the extent, and polls no more"
    wait_until(lambda: all([one.poll() is not None for one in pending[1:]]))
    leases = [one.poll() for one in pending[1:]]
    assert [(one.blocks, one.reason) for one in leases] == [(8, None)] * 47
    assert sidecar.door.usage().served["extents"] <= 3, "each asks the sidecar for all that it needs"
    for one in leases:
        assert handle.get(one, blank_pages(LAYOUT, 8)).tokens == 512
    assert wait_until(silent.poll).blocks == 8
