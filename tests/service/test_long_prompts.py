"""Long prompts through a sidecar: they are found and leased whole, or the limit that bites is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asking import Asking
from kvstore.block.account import MissReason
from kvstore.block.identity import Namespace
from kvstore.block.pages import Pages
from kvstore.client import connection as run_module
from kvstore.client import socket_door as remote_door
from kvstore.client.handle import PutResult
from kvstore.client.pending import BLOCK_SECONDS, MAX_QUEUED_SECONDS, SHORT_BLOCKS
from kvstore.client.socket_door import CallLimits
from kvstore.protocol import messages as m
from kvstore.protocol.messages import ReserveReply
from kvstore.service import dispatch as handlers
from kvstore.service.connections import DoorLimits
from service.sidecar import Sidecar, sidecar_fixture
from tiering.tier import SLOT_BITS
from torture.long_prompts import LAYOUT, blank, prompt
from torture.peer import Peer
from waiting import wait_until
from workbench import MODEL

LONG = 160_000
sidecar = sidecar_fixture(dram="256MiB")


def filled(blocks: int) -> Pages:
    """Pages of which no two blocks are alike."""
    pages = blank(blocks * 64)
    for plane in pages.planes[0]:
        plane.copy_(torch.arange(plane.numel(), dtype=torch.int64).remainder(30_011).view(plane.shape))
    return pages


def test_a_client_waits_the_longer_for_an_answer_the_more_it_asks_for(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is for each block is enough, where there is no time for a call as such."""
    with sidecar.opened(layout=LAYOUT) as handle:
        tokens = prompt(LONG, 1)
        assert handle.put(tokens, blank(LONG)).reason is None
        hashed = handle.hashed(tokens)
        handle.door._limits = CallLimits(match=0.05, lease=0.05)
        monkeypatch.setattr(run_module, "BLOCK_SECONDS", 0.0)
        with sidecar.core.lock:  # which its answer waits for
            assert handle.match(hashed).reason is MissReason.DEADLINE
        breaker = handle.door._run.breaker
        wait_until(lambda: not breaker.is_open and not breaker.is_suspected)
        monkeypatch.setattr(run_module, "BLOCK_SECONDS", 0.01)  # 25 seconds for these
        match = handle.match(hashed)
        assert (match.blocks, match.reason) == (LONG // 64, None)
        with handle.lease(match, deadline_ms=0) as lease:
            assert (lease.blocks, lease.reply.reason) == (LONG // 64, None)
        asked = handle.submit_match(hashed, deadline_ms=0)
        while (found := asked.poll()) is None:
            pass
        assert (found.blocks, found.reason) == (LONG // 64, None)
        wanted = handle.submit_lease(match, deadline_ms=0)
        while (leased := wanted.poll()) is None:
            pass
        assert (leased.blocks, leased.reply.reason) == (LONG // 64, None)
        leased.release()
        assert handle.put(tokens, blank(LONG)).present == LONG // 64


def test_a_prompt_of_more_blocks_than_a_message_takes(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning is kept and found; the line says how much, and why not the rest."""
    monkeypatch.setattr(m, "MAX_KEYS", 200)
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        tokens = prompt(300 * 64 + 5, 1)
        put = handle.put(tokens, blank(300 * 64 + 64))
        assert (put.present, put.stored, put.stopped_at, put.reason) == (0, 200, 200, MissReason.UNSUPPORTED)
        again = handle.put(tokens, blank(300 * 64 + 64))
        assert (again.present, again.stored, again.stopped_at, again.reason) == (200, 0, 200, MissReason.UNSUPPORTED)
        asked = handle.submit_match(tokens, deadline_ms=10_000)
        while (found := asked.poll()) is None:
            pass
        for match in (handle.match(tokens), found):
            assert (match.blocks, match.reason) == (200, MissReason.UNSUPPORTED)
            assert "300 blocks" in match.detail and "first 200" in match.detail and "\n" not in match.detail
            assert match.account.misses == {MissReason.UNSUPPORTED: 6400, MissReason.PARTIAL_BLOCK: 5}
            with handle.lease(match, deadline_ms=10_000) as lease:
                assert handle.get(lease, blank(200 * 64)).tokens == 200 * 64
        assert Asking(store._door).persist(handle.number, handle.hashed(tokens).keys, 1.0) == (
            0,
            MissReason.UNSUPPORTED,
        )
        elsewhere = handle.match(prompt(300 * 64, 2))
        assert (elsewhere.blocks, elsewhere.reason) == (0, MissReason.ABSENT), "the store's own reason comes first"


def test_a_sidecar_that_takes_fewer_blocks_is_not_asked_for_more(sidecar: Sidecar) -> None:
    """An older one says nothing of it, and ends a connection on which a longer message comes."""
    with sidecar.opened(layout=LAYOUT) as handle:
        run = handle.door._run
        assert run is not None and run.max_keys == m.MAX_KEYS
        assert m.Welcome(1, b"", b"").max_keys == m.OLDER_MAX_KEYS == 30_000
        tokens = prompt(300 * 64, 1)
        assert handle.put(tokens, blank(300 * 64)).stored == 300
        match = handle.match(tokens)
        run.max_keys = 200
        assert handle.match(tokens).blocks == 200
        for lease in (handle.lease(match), handle.submit_lease(match).poll()):
            assert lease is not None and (lease.blocks, lease.reply.reason) == (0, MissReason.UNSUPPORTED)
            assert "300 blocks" in lease.reply.detail
        assert not run.wire.closed


def test_a_question_behind_long_ones_is_waited_for(sidecar: Sidecar) -> None:
    """Messages of a connection are taken in their order; after a while there is nothing before it any more."""
    with sidecar.client() as store:
        store.namespace(model=MODEL, layout=LAYOUT)
        run = store._door._run
        assert run is not None
        assert run.allowance(SHORT_BLOCKS, 100.0) == run.allowance(0, 100.0) + SHORT_BLOCKS * BLOCK_SECONDS
        own = 15_625 * BLOCK_SECONDS
        assert run.allowance(15_625, 100.0) == pytest.approx(own)
        assert run.allowance(15_625, 100.0) == pytest.approx(2 * own)
        assert run.allowance(100, 100.0) == pytest.approx(2 * own + 100 * BLOCK_SECONDS)
        assert run.allowance(100, 100.0 + own) == pytest.approx(own + 100 * BLOCK_SECONDS)
        assert run.allowance(100, 100.0 + 3 * own) == pytest.approx(100 * BLOCK_SECONDS)
        for _ in range(100):
            assert run.allowance(15_625, 200.0) <= MAX_QUEUED_SECONDS + own


def test_memory_that_is_handed_over_slowly_does_not_end_a_lease_that_was_granted(tmp_path: Path) -> None:
    """Extents count for ten messages each, and a lease may be in hundreds: only the first one has to map them."""
    limits = DoorLimits(rate=1000.0, burst=100)
    with Sidecar(tmp_path, limits, dram="4MiB", extent="64KiB") as sidecar, sidecar.client() as store:
        store._door._limits = CallLimits(connect=60.0, match=10.0)
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        tokens = prompt(300 * 64, 1)
        with sidecar.client() as other:
            theirs = other.namespace(model=MODEL, layout=LAYOUT)
            assert theirs.put(tokens, blank(300 * 64)).stored == 300
        match = handle.match(tokens)
        lease = wait_until(handle.submit_lease(match, deadline_ms=10_000).poll)
        assert len({place >> SLOT_BITS for place in lease.reply.places[0]}) > m.MAX_EXTENTS
        assert (lease.blocks, lease.reply.reason) == (300, None)
        lease.release()


@pytest.mark.slow
def test_whoever_reads_no_answers_is_served_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was asked before: each of 64 leases under way may have an answer of many megabytes."""
    for module in ("leases", "table"):
        monkeypatch.setattr(f"kvstore.core.{module}.LOCKED_BLOCKS", 1)  # none is granted by the door's own thread
    with Sidecar(tmp_path, DoorLimits(unread_bytes=1), dram="16MiB") as sidecar:
        with sidecar.opened(layout=LAYOUT) as handle:
            assert handle.put(prompt(600 * 64, 1), blank(600 * 64)).stored == 600
            keys = list(handle.match(prompt(600 * 64, 1)).keys)
        wait_until(lambda: not sidecar.door._connections)
        peer = Peer(str(sidecar.path))
        peer.ask(m.Hello(1, 1, "t"))
        packed = Namespace(MODEL, LAYOUT, "raw").pack()
        granted = peer.ask(m.OpenNamespace(packed, [LAYOUT.parts[0].raw_bytes]))
        assert isinstance(granted, m.Granted)
        count = 60
        asked = [
            m.pack(m.Request(at, m.LeasePrefix(granted.grant.number, keys, 0, 60_000.0))) for at in range(2, 2 + count)
        ]
        (connection,) = [one for one in sidecar.door._connections if not one.closed]
        with sidecar.core.lock:  # all of them are under way
            peer.socket.sendall(b"".join(asked))
            wait_until(lambda: connection.in_flight == count)
        wait_until(lambda: connection.unsent_bytes > 0 and connection.running == 0)
        most = (DoorLimits().running + 1) * 40 * 600
        assert connection.unsent_bytes < most and len(connection.waiting) > count // 2
        numbers = set()
        for _ in range(count):
            reply = peer.reply()
            assert reply is not None and isinstance(reply.answer, m.Leased) and reply.answer.reply.blocks == 600
            numbers.add(reply.number)
        assert numbers == set(range(2, 2 + count))
        peer.close()
        wait_until(lambda: sidecar.store.usage().leases == 0)


def test_a_put_of_a_long_prompt_names_its_last_blocks_only(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """And names them all where what was skipped is gone, or where all of them are to be kept for longer."""
    monkeypatch.setattr(remote_door, "SENT_BLOCKS", 150)
    with sidecar.opened(layout=LAYOUT) as handle:
        tokens, pages = prompt(600 * 64, 1), filled(600)
        asked: list[tuple[int, int, int]] = []
        reserve = sidecar.core.reserve

        def watched(number: int, keys: list[bytes], first_block: int, *others: Any, skipped: int) -> ReserveReply:
            asked.append((len(keys), first_block, skipped))
            return reserve(number, keys, first_block, *others, skipped=skipped)

        monkeypatch.setattr(sidecar.core, "reserve", watched)
        assert handle.put(tokens, pages) == PutResult(0, 600, None, None)
        assert asked == [(128, 0, 0), (150, 106, 106), (150, 234, 234), (150, 362, 362), (150, 450, 450)]
        sidecar.store.check()
        match = handle.match(tokens)
        into = blank(600 * 64)
        with handle.lease(match, deadline_ms=10_000) as lease:
            assert handle.get(lease, into).tokens == 600 * 64
        assert all(torch.equal(*pair) for pair in zip(pages.planes[0], into.planes[0], strict=True))
        wait_until(lambda: not sidecar.store.usage().leases)
        assert sidecar.store.evict(100) == 100  # the last ones
        asked.clear()
        assert handle.put(tokens, pages) == PutResult(500, 100, None, None)
        assert asked == [(128, 0, 0), (150, 106, 106), (150, 234, 234), (150, 362, 362), (150, 450, 450)]
        asked.clear()
        assert handle.put(tokens, pages, ttl=60.0).present == 600
        assert asked[-1] == (600, 0, 0)
        door, keys = handle.door, handle.hashed(tokens).keys
        assert sidecar.store.evict(300) == 300
        asked.clear()
        gone = Asking(door).reserve(handle.number, keys, 600, 0, None)  # block 450 is gone, and so is its parent
        assert (gone.present, gone.stopped_at) == (300, 300) and gone.reason is MissReason.EVICTED
        assert asked == [(150, 600, 450), (600, 600, 0)]
        assert handle.put(tokens, pages) == PutResult(300, 300, None, None)
        with handle.lease(handle.match(tokens), deadline_ms=10_000) as lease:
            assert handle.get(lease, into).tokens == 600 * 64
        sidecar.store.check()


def test_a_wrong_place_in_a_chain_stores_nothing(sidecar: Sidecar) -> None:
    """Whoever says that other blocks come before his keys than do is told so, and harms nobody."""
    with sidecar.opened(layout=LAYOUT) as handle:
        tokens = prompt(40 * 64, 1)
        keys = handle.hashed(tokens).keys
        assert handle.put(tokens[: 20 * 64], blank(20 * 64)).stored == 20
        run = handle.door._run
        assert run is not None
        number = run.namespaces[handle.number]
        before = sidecar.store.usage().dram.used

        def asked(verb: m.Reserve) -> ReserveReply | m.Failed:
            answer = run.answer(verb, 10.0).answer
            return answer.reply if isinstance(answer, m.Reserved) else answer  # type: ignore[return-value]

        for skipped in (1, 9, 11, 1000, 1 << 30):
            reply = asked(m.Reserve(number, keys[10:], skipped, skipped=skipped))
            assert isinstance(reply, ReserveReply), reply
            assert (reply.reservation, reply.reason) == (0, MissReason.DIVERGED)
        for verb in (
            m.Reserve(number, keys[10:], 10, skipped=-1),
            m.Reserve(number, keys[10:], (1 << 31), skipped=1 << 31),
            m.Reserve(number, keys[10:], 9, skipped=10),
            m.Reserve(number, keys[10:], 41, skipped=10),
            m.Reserve(number, [], 10, skipped=10),
            m.Reserve(number, keys[10:], 40, collective="together", skipped=10),
        ):
            failed = asked(verb)
            assert isinstance(failed, m.Failed) and failed.fault is m.RequestFault.BAD_INPUT, verb
        absent = asked(m.Reserve(number, keys[25:], 25, skipped=25))
        assert isinstance(absent, ReserveReply)
        assert (absent.reservation, absent.present, absent.stopped_at) == (0, 25, 25)
        assert sidecar.store.usage().dram.used == before and sidecar.store.usage().reservations == 0
        right = asked(m.Reserve(number, keys[10:], 20, skipped=10))
        assert isinstance(right, ReserveReply) and right.blocks == list(range(20, 40)) and right.present == 20
        run.post(m.Abort(right.reservation))
        sidecar.store.check()


def test_a_lease_of_more_frames_than_an_answer_holds_is_shorter_and_says_so(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads on behind what was leased, as with any other lease that ended early."""
    monkeypatch.setattr(handlers, "MAX_LEASED_FRAMES", 7)
    with sidecar.opened(layout=LAYOUT) as handle:
        tokens = prompt(10 * 64, 1)
        assert handle.put(tokens, filled(10)).stored == 10
        match = handle.match(tokens)
        most = 7 // len(LAYOUT.parts)
        with handle.lease(match):
            looked = sidecar.admin.facts().looked
            assert (looked.asked_blocks, looked.found_blocks) == (10, 0), "it takes what its look-up found, once"
        for first in range(0, 10, most):
            with handle.lease(match, first_token=first * 64) as lease:
                assert lease.blocks == min(10, first + most)
                if lease.blocks < 10:
                    assert lease.reason is MissReason.PINNED_FULL and "at most 7 frames" in lease.reply.detail
                else:
                    assert lease.reason is None
        assert wait_until(handle.submit_lease(match).poll).blocks == most
