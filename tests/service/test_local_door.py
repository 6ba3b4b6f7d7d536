"""The local door and its client: what one process stored is read by another, and no payload crosses the socket.

What is kept for whoever is out of reach, and for how long, is seen from outside: by the store's own usage.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asking import Asking, stand_in
from kvstore.block.account import MissReason
from kvstore.block.errors import StoreClosed, Unreachable
from kvstore.block.identity import Namespace
from kvstore.block.layout import Layout
from kvstore.client.handle import EARLY_BLOCKS, LAST_BLOCKS, NamespaceHandle, PutResult
from kvstore.protocol import messages as m
from kvstore.service import dispatch as handlers
from kvstore.service import local_door
from kvstore.service.connections import (
    COST_BYTES,
    LARGE_BURST_BYTES,
    LARGE_BYTES,
    LARGE_BYTES_PER_SECOND,
    LARGE_LINE,
    LATELY_SECONDS,
    DoorLimits,
    Listener,
)
from kvstore.service.local_door import TURNED_AWAY
from kvstore.service.sessions import ClientState
from service.sidecar import Sidecar, wire_to
from service.test_turns import made
from tiering.dram.extents import MappedExtent
from tiering.frame import HEADER_BYTES, KEY_BYTES
from tiering.nvme.lmdb_index import LmdbMaker
from torture.peer import Peer, come_in, opened_by
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, plausible_pages, random_pages, same_tokens, small_layout


def is_at_rest(sidecar: Sidecar) -> bool:
    """Whether nothing is held for anybody."""
    usage = sidecar.store.usage()
    held = usage.leases, usage.reservations, usage.pinned_bytes, usage.dram.reserved, usage.dram.zombie
    return held == (0, 0, 0, 0, 0) and len(sidecar.sessions.departed) == 0


@pytest.fixture
def peer(sidecar: Sidecar) -> Iterator[Peer]:
    """A bare client, for which nothing is held once it is gone."""
    with closing(come_in(sidecar.path)) as peer:
        yield peer
    wait_until(lambda: is_at_rest(sidecar))


# The main job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flawed", [0, 36, 50, 84, 99])  # 36 and 84: where what precedes was committed already
def test_a_put_ends_before_a_block_that_its_codec_cannot_write(tmp_path: Path, flawed: int) -> None:
    assert {36, 84} == set(range(100 - LAST_BLOCKS, 0, -EARLY_BLOCKS))
    sizes = {"dram": "4MiB", "extent": "64KiB"}
    with Sidecar(tmp_path, **sizes) as sidecar, sidecar.client() as one, sidecar.client() as two:
        mine, theirs = (store.namespace(model=MODEL, layout=small_layout(), codec="int8-kc64") for store in (one, two))
        pages = plausible_pages(small_layout(), 100)
        whole = pages.planes[1][0][flawed, 3, 1, 2].clone()
        pages.planes[1][0][flawed, 3, 1, 2] = float("nan")
        assert mine.put(ids(6400), pages) == PutResult(0, flawed, flawed, MissReason.NONFINITE)
        assert theirs.match(ids(6400)).blocks == flawed
        wait_until(lambda: is_at_rest(sidecar))
        pages.planes[1][0][flawed, 3, 1, 2] = whole
        assert mine.put(ids(6400), pages) == PutResult(flawed, 100 - flawed, None, None)
        blank = blank_pages(small_layout(), 100)
        with theirs.lease(theirs.match(ids(6400))) as lease:
            assert theirs.get(lease, blank).tokens == 6400
        (key, value), (want_key, want_value) = blank.planes[1], pages.planes[1]
        assert (key - want_key).abs().max() < 0.03 and (value - want_value).abs().max() < 0.03


def test_what_is_leased_can_not_be_written(handle: NamespaceHandle) -> None:
    handle.put(ids(64), random_pages(handle.layout, 1))
    with handle.lease(handle.match(ids(64))) as lease:
        (span,) = handle.door.memory(lease.reply.lease, lease.reply.places[0])
        with pytest.raises(TypeError, match="read-only"):
            span.view[0] = 1


# Those who are gone ---------------------------------------------------------------------------------------------------


def test_a_client_that_hangs_up_and_still_maps_what_it_had(sidecar: Sidecar) -> None:
    store = sidecar.client()
    handle = store.namespace(model=MODEL, layout=small_layout())
    pages = random_pages(handle.layout, 8)
    handle.put(ids(512), pages)
    lease = handle.lease(handle.match(ids(512)))
    views: list[Any] = [span.view for span in handle.door.memory(lease.reply.lease, lease.reply.places[0])]
    before = [bytes(view) for view in views]
    store.close()
    wait_until(lambda: len(sidecar.sessions.departed) == 1)
    assert sidecar.store.usage().pinned_bytes == 0 and sidecar.store.evict(100) == 8
    assert sidecar.store.usage().dram.zombie == 8
    with sidecar.client() as other:
        theirs = other.namespace(model=MODEL, layout=small_layout())
        for number in range(40):
            theirs.put(ids(512, 1000 * number), random_pages(handle.layout, 8))
        assert [bytes(view) for view in views] == before and len(sidecar.sessions.departed) == 1
        views.clear()
        wait_until(lambda: is_at_rest(sidecar))
    lease.release()


def test_memory_of_a_lease_goes_with_its_connection(sidecar: Sidecar) -> None:
    """Also where the same memory is mapped anew: its slots may hold another block by now."""
    with sidecar.client() as store:
        handle, door = store.namespace(model=MODEL, layout=small_layout()), store._door
        handle.put(ids(512), random_pages(handle.layout, 8))
        lease = handle.lease(handle.match(ids(512)), deadline_ms=10_000)
        places = lease.reply.places[0]
        assert len(door.memory(lease.reply.lease, places)) == 8
        assert door._run is not None
        door._run.wire.close()
        again = handle.lease(handle.match(ids(512)), deadline_ms=10_000)
        assert len(door.memory(again.reply.lease, places)) == 8
        with pytest.raises(Unreachable):
            door.memory(lease.reply.lease, places)
        loaded = handle.get(lease, blank_pages(handle.layout, 8))
        assert (loaded.tokens, loaded.reason) == (0, MissReason.UNREACHABLE)
        assert handle.get(again, blank_pages(handle.layout, 8)).tokens == 512


# What cannot be -------------------------------------------------------------------------------------------------------


def talk(sidecar: Sidecar, *frames: bytes) -> list[m.Reply]:
    """What the sidecar answers to these bytes, until it has answered each of them or hangs up."""
    with closing(Peer(str(sidecar.path))) as peer:
        for frame in frames:
            peer.socket.sendall(frame)
        return [reply for reply in (peer.reply() for _ in frames) if reply is not None]


HELLO = m.pack(m.Request(1, m.Hello(1, 1, "test")))
LARGE = LARGE_BYTES + 1


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff\xff\xff\xff"],
        [(m.MAX_BODY_BYTES + 1).to_bytes(4, "little")],
        [b"\x01\0\0\0\xc1"],
        [m.pack(m.Request(1, m.MatchPrefix(0, [])))],
        [HELLO, HELLO],
        [HELLO, b"\x03\0\0\0\x92\x01\x90"],
        [b"\0\0\0\0"],
        [HELLO, LARGE.to_bytes(4, "little") + bytes(LARGE)],
        [HELLO, m.pack(m.Request(2, m.Hello(1, 1, "x" * LARGE)))],
        [m.pack(m.Request(1, m.Hello(1, 1, "x" * LARGE)))],
        [m.pack(m.Request(1, m.ReleaseRequest("x" * LARGE)))],
    ],
)
def test_what_is_no_message_ends_the_connection_and_nothing_else(sidecar: Sidecar, frames: list[bytes]) -> None:
    with sidecar.opened() as handle:
        answer = talk(sidecar, *frames)[-1].answer
        assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.MALFORMED
        assert handle.put(ids(64), random_pages(handle.layout, 1)).stored == 1
    assert sidecar.door.usage().malformed == 1


@pytest.mark.parametrize("arguments", [[], [7, b"keys", {"of": "a later client"}]])
def test_a_verb_of_a_later_client_is_answered_unsupported_and_the_connection_goes_on(
    sidecar: Sidecar, arguments: list[object]
) -> None:
    body = msgspec.msgpack.encode([2, ["verb_of_tomorrow", *arguments]])
    unknown, known = talk(
        sidecar, HELLO, len(body).to_bytes(m.LENGTH_BYTES, "little") + body, m.pack(m.Request(3, m.Namespaces()))
    )[-2:]
    assert isinstance(unknown.answer, m.Failed) and unknown.answer.fault is m.RequestFault.UNSUPPORTED
    assert unknown.number == 2 and isinstance(known.answer, m.NamespacesReply) and known.number == 3
    assert sidecar.door.usage().malformed == 0


@pytest.mark.parametrize(
    ("oldest", "newest", "spoken"), [(1, 1, 1), (1, 2, 2), (1, 9, 4), (3, 9, 4), (4, 9, 4), (5, 9, 0), (0, 0, 0)]
)
def test_the_highest_version_in_common_is_spoken(sidecar: Sidecar, oldest: int, newest: int, spoken: int) -> None:
    """spoken: 0 for none."""
    (reply,) = talk(sidecar, m.pack(m.Request(7, m.Hello(oldest, newest))))
    if spoken:
        assert isinstance(reply.answer, m.Welcome) and reply.answer.version == spoken and reply.number == 7
    else:
        assert isinstance(reply.answer, m.Failed) and reply.answer.fault is m.RequestFault.VERSION


def test_keys_that_are_no_chain_store_nothing_and_harm_nothing(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    assert handle.put(ids(192), random_pages(handle.layout, 3)).stored == 3
    keys = handle.match(ids(640)).keys
    with handle.lease(handle.match(ids(192))) as lease:
        sidecar.core.spans([lease.reply.places[0][0]])[0].view[HEADER_BYTES] ^= 1
        handle.get(lease, blank_pages(handle.layout, 3))
    wait_until(lambda: sidecar.store.usage().counters.get("quarantined_blocks") == 1)
    for wrong in ([keys[0]] * 3, [keys[1], keys[5]], [keys[0], keys[2], keys[1]], [keys[4], keys[4]]):
        reply = Asking(handle.door).reserve(handle.number, wrong, 0, 0, None)
        assert len(reply.blocks) <= 1 and reply.reason is not None
        Asking(handle.door).abort(reply.reservation)
        leased = Asking(handle.door).lease(handle.number, wrong, 0, 50)
        assert leased.blocks <= 1
        Asking(handle.door).release(leased.lease)
        handle.match(ids(64))
        sidecar.store.check()
    assert handle.put(ids(192), random_pages(handle.layout, 3)).stored == 1
    wait_until(lambda: is_at_rest(sidecar))


def test_memory_is_not_inherited_by_programs_that_a_client_starts(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    inheritable: list[bool] = []

    class Watched(MappedExtent):
        def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
            inheritable.append(os.get_inheritable(descriptor))
            super().__init__(descriptor, size_bytes, writable=writable)

    monkeypatch.setattr("kvstore.client.connection.MappedExtent", Watched)
    with sidecar.opened() as handle:
        assert handle.put(ids(512), random_pages(handle.layout, 8)).stored == 8
    assert inheritable and not any(inheritable)


def test_whoever_is_turned_away_is_told_why(tmp_path: Path) -> None:
    """Also where the hello comes late; and they are turned away for good, however many they are."""
    with Sidecar(tmp_path, DoorLimits(connections=1)) as sidecar, sidecar.client() as store:
        store.namespace(model=MODEL, layout=small_layout())
        for _ in range(2 * TURNED_AWAY):
            with pytest.raises(
                Unreachable, match=r"refused: there are as many connections as may be; .* door\.connections$"
            ):
                wire_to(sidecar.path)
        silent = [socket.socket(socket.AF_UNIX) for _ in range(2 * TURNED_AWAY)]
        for one in silent:
            one.connect(str(sidecar.path))
        wait_until(lambda: sidecar.door.usage().refused == 4 * TURNED_AWAY)
        wait_until(lambda: len(sidecar.door) == 1 + TURNED_AWAY)
        assert sidecar.door.usage().connections == 1
        silent[-1].sendall(HELLO)
        assert b"as many connections" in silent[-1].recv(1000)
        for one in silent:
            one.close()
        wait_until(lambda: len(sidecar.door) == 1)


def test_a_large_message_does_not_wait_behind_those_of_a_flooder(sidecar: Sidecar) -> None:
    """They are read one at a time, those of whoever asked for least first; of who is gone, none."""
    served: list[str] = []
    release_request = sidecar.sessions.release_request

    def watched(caller: ClientState, request: str) -> None:
        served.append(request[0])
        release_request(caller, request)

    sidecar.sessions.release_request = watched  # type: ignore[method-assign]
    first, *flooders, other = [come_in(sidecar.path) for _ in range(8)]
    absent = [at.to_bytes(KEY_BYTES, "big") for at in range(LARGE // KEY_BYTES)]
    match = m.MatchPrefix(opened_by(first), absent)
    with sidecar.core.lock:  # which the first one waits for, and all behind it
        first.socket.sendall(m.pack(m.Request(2, match)))
        wait_until(lambda: sidecar.door.usage().served.get("match") == 1)
        for at, flooder in enumerate(flooders):
            flooder.socket.sendall(m.pack(m.Request(2, m.ReleaseRequest(str(at) * (m.MAX_BODY_BYTES - 100)))))
        wait_until(lambda: len(sidecar.door._listeners[0].lines[LARGE_LINE].waiting) == len(flooders))
        other.socket.sendall(m.pack(m.Request(2, m.ReleaseRequest("x" * LARGE))))
        wait_until(lambda: len(sidecar.door._listeners[0].lines[LARGE_LINE].waiting) == len(flooders) + 1)
        flooders[0].close()
        wait_until(lambda: len(sidecar.door._listeners[0].lines[LARGE_LINE].waiting) == len(flooders))
    for peer in (first, *flooders[1:], other):
        assert peer.reply() is not None
    assert served[0] == "x" and sorted(served) == ["1", "2", "3", "4", "5", "x"]
    for peer in (first, *flooders, other):
        peer.close()
    wait_until(lambda: is_at_rest(sidecar))


def test_a_large_message_does_not_wait_for_slow_ones_of_its_connection(sidecar: Sidecar, peer: Peer) -> None:
    number = opened_by(peer)
    slow = [m.Reserve(number, [at.to_bytes(KEY_BYTES, "big")], 0) for at in range(DoorLimits().running + 1)]
    with sidecar.core.lock:  # which the slow ones wait for
        for at, verb in enumerate(slow, 3):
            peer.socket.sendall(m.pack(m.Request(at, verb)))
        assert isinstance(peer.ask(m.ReleaseRequest("x" * LARGE), 2), m.Done)
    numbers = {reply.number for reply in (peer.reply() for _ in slow) if reply is not None}
    assert numbers == set(range(3, 3 + len(slow)))


def test_what_no_thread_was_found_for_is_answered_once(sidecar: Sidecar, peer: Peer) -> None:
    """A pool keeps it for its other threads, and it must not be done by one of them after that answer."""
    number = opened_by(peer)
    verbs = [m.Reserve(number, [at.to_bytes(KEY_BYTES, "big")], 0) for at in range(2)]
    before = threading.stack_size()
    with sidecar.core.lock:
        peer.socket.sendall(m.pack(m.Request(2, verbs[0])))
        wait_until(lambda: sidecar.door.usage().served.get("reserve") == 1)
        threading.stack_size(1 << 46)  # the machine has no thread of that size
        try:
            answer = peer.ask(verbs[1], 3)
        finally:
            threading.stack_size(before)
    assert answer == m.Failed(m.RequestFault.BUSY, "no thread is free")
    reply = peer.reply()
    assert reply is not None and reply.number == 2 and isinstance(reply.answer, m.Reserved)
    wait_until(lambda: sidecar.door._threads._pool.executor._work_queue.empty())
    peer.ask(m.ReleaseRequest(""), 4)
    assert sidecar.store.usage().reservations == 1
    (connection,) = sidecar.door._connections
    assert (connection.in_flight, connection.in_flight_bytes, connection.running) == (0, 0, 0)


def test_memory_is_writable_for_whoever_stores_into_its_namespace(sidecar: Sidecar, peer: Peer) -> None:
    """And for nobody else of its tenant; all of them may read it."""
    with sidecar.opened() as handle:
        handle.put(ids(64), random_pages(handle.layout, 1))
        (extent,) = sidecar.core.blocks.dram.all_extents(sidecar.core.blocks.spaces[0].classes[0])

    def is_handed_over(*, writable: bool) -> bool:
        answer = peer.ask(m.Extents([extent.number], writable))
        assert isinstance(answer, m.ExtentsReply)
        return bool(answer.extents)

    assert is_handed_over(writable=False) and not is_handed_over(writable=True)
    for model in ("another", MODEL):
        space = opened_by(peer, Namespace(model, small_layout(), "raw").pack())
        reserved = peer.ask(m.Reserve(space, [bytes([1] * KEY_BYTES)], 0))
        assert isinstance(reserved, m.Reserved) and reserved.reply.reservation
        assert is_handed_over(writable=True) is (model == MODEL)
        peer.ask(m.Abort(reserved.reply.reservation))
        assert not is_handed_over(writable=True)


def test_a_fault_of_the_door_is_logged_and_told(sidecar: Sidecar, caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    sidecar.door._failed = told.set
    sidecar.door._take_turn = lambda ready: 1 / 0  # type: ignore[assignment, method-assign]
    assert told.wait(20)
    assert sidecar.door._thread is not None
    sidecar.door._thread.join(20)
    assert not sidecar.door._thread.is_alive()
    assert "the door has failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_the_reason_why_a_connection_was_ended_is_told(sidecar: Sidecar) -> None:
    wire = wire_to(sidecar.path)
    with pytest.raises(Unreachable, match="the sidecar ended it: a connection begins with one hello"):
        wire.call(m.Hello(1, 1), 10.0)


def test_a_put_is_committed_while_it_is_being_filled(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    blocks = LAST_BLOCKS + EARLY_BLOCKS + 3
    seen: list[int] = []

    def watched(request: m.Commit, commit: Callable[[], Any]) -> Any:
        wait_until(lambda: sidecar.store.usage().blocks == request.first)  # by what was posted
        seen.append(request.first)
        return commit()

    stand_in(handle.door, m.Commit, watched)
    pages = random_pages(handle.layout, blocks)
    assert handle.put(ids(64 * blocks), pages) == PutResult(0, blocks, None, None)
    assert seen == [EARLY_BLOCKS + 3] and sidecar.door.usage().served["commit"] == 3
    found = blank_pages(handle.layout, blocks)
    with handle.lease(handle.match(ids(64 * blocks))) as lease:
        assert handle.get(lease, found).tokens == 64 * blocks
    assert same_tokens(found, pages, range(64 * blocks))


def test_what_was_reserved_on_a_connection_that_broke_is_not_filled(sidecar: Sidecar) -> None:
    """Its slots may be somebody else's by now, in memory that is mapped here for another put."""
    with sidecar.client() as store:
        handle, door = store.namespace(model=MODEL, layout=small_layout()), store._door
        keys = [number.to_bytes(KEY_BYTES, "big") for number in range(2)]
        assert handle.put(ids(64), random_pages(handle.layout, 1)).stored == 1  # in the same memory, which stays
        before = Asking(door).reserve(handle.number, keys[:1], 0, 0, None)
        assert len(door.memory(before.reservation, before.places[0], writable=True)) == 1
        assert door._run is not None
        door._run.wire.close()
        wait_until(lambda: is_at_rest(sidecar))
        after = Asking(door).reserve(handle.number, keys[1:], 0, 0, None)
        assert (
            after.places == before.places and len(door.memory(after.reservation, after.places[0], writable=True)) == 1
        )
        with pytest.raises(StoreClosed):
            door.memory(before.reservation, before.places[0], writable=True)
        Asking(door).abort(after.reservation)
        with pytest.raises(StoreClosed):
            door.memory(after.reservation, after.places[0], writable=True)
        wait_until(lambda: is_at_rest(sidecar))


def test_messages_of_a_connection_are_served_in_their_order(tmp_path: Path) -> None:
    """Large ones and small ones are served by different threads."""
    layout, blocks = Layout.gqa(layers=240, kv_heads=1, head_dim=8, dtype="bfloat16"), 24
    with Sidecar(tmp_path, dram="32MiB") as sidecar:
        peer = come_in(sidecar.path)
        space = opened_by(peer, Namespace("m", layout, "raw").pack(), 240 * 2048)
        keys = [number.to_bytes(KEY_BYTES, "big") for number in range(blocks)]
        reserved = peer.ask(m.Reserve(space, keys, 0))
        assert isinstance(reserved, m.Reserved) and len(reserved.reply.blocks) == blocks
        digests = [[bytes(16)] * 240]
        number = reserved.reply.reservation
        pieces = [(0, 20), (20, 3), (20, 3), (23, 20), (22, 1), (23, 1), (24, 1)]
        verbs = [m.Commit(number, 0, first, digests * count) for first, count in pieces]
        frames = [m.pack(m.Request(at, verb)) for at, verb in enumerate(verbs, 2)]
        assert len(frames[0]) > LARGE > len(frames[1])
        peer.socket.sendall(b"".join(frames))
        replies = [reply for reply in (peer.reply() for _ in frames) if reply is not None]
        assert [reply.number for reply in replies] == list(range(2, 2 + len(frames)))
        counts = [reply.answer.blocks if isinstance(reply.answer, m.Counted) else None for reply in replies]
        assert counts == [20, 23, None, None, None, 24, 0]
        peer.close()
        wait_until(lambda: is_at_rest(sidecar))


LENGTHS = [0, 1, COST_BYTES, 17 << 10, LARGE_BYTES, LARGE_BYTES + 1, 531_279, m.MAX_BODY_BYTES, (1 << 32) - 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_what_a_message_counts_for_grows_with_its_length_and_no_faster(length: int) -> None:
    """A large one in a bucket of its own; who is served first is decided by all of it."""
    limits, counted = DoorLimits(), min(length, m.MAX_BODY_BYTES)
    with socket.socketpair()[0] as listening:
        one = made(Listener(Path("door"), listening, None, None), 0.0, length)
        assert one.may_ask(limits, 0.0)
        assert limits.burst - one.tokens == 1 + min(counted, LARGE_BYTES) / COST_BYTES
        assert LARGE_BURST_BYTES - one.large_bytes == (counted if counted > LARGE_BYTES else 0)
        assert one.asked_lately(0.0) == 1 + counted / COST_BYTES
        assert 0.36 < one.asked_lately(LATELY_SECONDS) / (1 + counted / COST_BYTES) < 0.37


def test_large_messages_have_a_rate_of_their_own() -> None:
    limits = DoorLimits()
    with socket.socketpair()[0] as listening:
        one = made(Listener(Path("door"), listening, None, None), 0.0, m.MAX_BODY_BYTES)
        taken = 0
        while one.may_ask(limits, 0.0):
            taken += 1
        assert taken == -(-LARGE_BURST_BYTES // m.MAX_BODY_BYTES) and one.tokens > limits.burst / 2
        one.read[:] = LARGE_BYTES.to_bytes(m.LENGTH_BYTES, "little")
        assert one.may_ask(limits, 0.0), "a small one does not wait"
        one.read[:] = (LARGE_BYTES + 1).to_bytes(m.LENGTH_BYTES, "little")
        owed = -one.large_bytes / LARGE_BYTES_PER_SECOND
        assert owed > 0 and not one.may_ask(limits, owed - 0.001) and one.may_ask(limits, owed + 0.001)


def test_a_prompt_of_a_million_tokens_does_not_use_up_what_a_connection_may_ask(sidecar: Sidecar, peer: Peer) -> None:
    """A look-up and a lease of its 15,625 blocks: ten of them are nothing that others would have to wait for."""
    number = opened_by(peer)
    keys = [at.to_bytes(KEY_BYTES, "big") for at in range(15_625)]
    (connection,) = sidecar.door._connections
    tokens = connection.tokens
    assert isinstance(peer.ask(m.MatchPrefix(number, keys), 2), m.Matched)
    assert isinstance(peer.ask(m.LeasePrefix(number, keys, 0, 50.0), 3), m.Leased)
    spent = 2 * (1 + LARGE_BYTES / COST_BYTES) + 10 + len(keys) / 64
    assert 5 * spent < DoorLimits().burst and connection.tokens > tokens - spent - 1
    assert LARGE_BURST_BYTES > 10 * 2 * 531_300


def test_what_is_left_behind_at_a_door_that_rests_is_looked_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody comes it looks around seldom; when somebody goes and a mapping outlives him, often again."""
    monkeypatch.setattr(local_door, "IDLE_LOOK_SECONDS", 3600.0)
    with Sidecar(tmp_path, dram="1MiB") as sidecar:
        store = sidecar.client()
        handle = store.namespace(model=MODEL, layout=small_layout())
        assert handle.put(ids(512), random_pages(handle.layout, 8)).stored == 8
        lease = handle.lease(handle.match(ids(512)))
        views = [span.view for span in handle.door.memory(lease.reply.lease, lease.reply.places[0])]
        time.sleep(4 * DoorLimits().sweep_seconds)
        store.close()
        wait_until(lambda: len(sidecar.sessions.departed) == 1)
        time.sleep(4 * DoorLimits().sweep_seconds)
        views.clear()
        del lease
        wait_until(lambda: len(sidecar.sessions.departed) == 0)


@pytest.mark.parametrize("kind", ["persist", "lease", "reserve"])
def test_who_has_as_much_under_way_as_he_may_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The sidecar answers: it is not unreachable."""
    limits = DoorLimits()
    msgspec.structs.force_setattr(limits, "long_running", 0 if kind == "persist" else 1)  # no user may set 0
    nvme: dict[str, Any] = {"nvme": "16MiB", "indexes": LmdbMaker} if kind == "persist" else {}
    with Sidecar(tmp_path, limits, dram="16MiB", **nvme) as sidecar, sidecar.opened() as handle:
        pages = random_pages(small_layout(), 2)
        handle.put(ids(128), pages)
        match = handle.match(ids(128))
        monkeypatch.setattr(handlers, "MAX_LEASES", 0)
        monkeypatch.setattr(handlers, "MAX_RESERVATIONS", 0)
        if kind == "persist":
            assert handle.put(ids(128), pages, durability="disk").reason is MissReason.BUSY
        elif kind == "lease":
            lease = handle.lease(match)
            assert lease.reason is MissReason.PINNED_FULL and "release some first" in lease.reply.detail
            assert lease.account.misses == {MissReason.PINNED_FULL: 128}
        else:
            assert handle.put(ids(128, 3), pages).reason is MissReason.BUSY


@pytest.mark.parametrize("keys", [[b"k" * 32] * 2, [b"short"]])
def test_what_the_sidecar_cannot_take_is_unsupported(handle: NamespaceHandle, keys: list[bytes]) -> None:
    reply = Asking(handle.door).match(handle.number, keys)
    assert reply.reason is MissReason.UNSUPPORTED and "prefix key" in reply.detail
