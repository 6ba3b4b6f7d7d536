"""What a raw client can do to the door for data: it costs that client its connection, and nobody else anything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.block.errors import BadInput
from kvstore.peers import sealed, serving
from kvstore.peers import transport as t
from kvstore.peers.sockets import SocketFrameDoor, SocketPullTransport
from kvstore.peers.tokens import hello_for, seal_key
from peers.frames import SECRET, Source, random_bytes
from tiering.clock import SystemClock
from waiting import wait_until


@pytest.fixture(params=["auto", pytest.param("always", marks=pytest.mark.slow)])
def door(request: pytest.FixtureRequest) -> Iterator[SocketFrameDoor]:
    door = SocketFrameDoor("127.0.0.1:0", SystemClock(), random_bytes, seal=request.param)
    yield door
    door.close()
    assert door.pinned() == 0


def raw(door: SocketFrameDoor) -> socket.socket:
    sock = socket.create_connection(t.numeric_address(door.address))
    sock.settimeout(10)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Once everything that was sent is read."""
    try:
        while sock.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    return True


def pulls(door: SocketFrameDoor) -> None:
    source = Source(3)
    deadline = time.monotonic() + 20
    reader = SocketPullTransport(SystemClock(), seal="auto").connect(
        door.offer(source.offered(), SECRET), SECRET, deadline
    )
    slots = source.slots()
    assert reader.pull(slots, source.check(), deadline) == 6 and source.has(slots)
    reader.close()


def asked(number: int, frames: int, request: int = 0, magic: bytes = t.ASK_MAGIC, seal: object = None) -> bytes:
    record = t.RECORD.pack(magic, t.VERSION, 0, frames, request, number, 0)
    return record + (seal.tag(sealed.ASKED, request, record) if isinstance(seal, sealed.FrameSeal) else b"")


def test_sockets_that_say_nothing_are_closed_and_hold_up_nobody(door: SocketFrameDoor) -> None:
    before = threading.active_count()
    idle = [raw(door) for _ in range(200)]
    half = raw(door)
    half.sendall(b"KVPH\x01")
    pulls(door)
    wait_until(lambda: threading.active_count() == before)
    began = time.monotonic()
    assert all(is_closed(sock) for sock in [*idle, half])
    assert time.monotonic() - began <= t.HANDSHAKE_SECONDS + 1
    for sock in [*idle, half]:
        sock.close()


def test_a_handshake_that_drips_ends_with_its_time(door: SocketFrameDoor) -> None:
    sock, began = raw(door), time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() < began + 5:
            sock.sendall(b"K")
            time.sleep(0.05)
    assert time.monotonic() - began <= t.HANDSHAKE_SECONDS + 0.5
    sock.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n" + bytes(200),
        t.HELLO.pack(b"KVPX", 1, 0, 0, bytes(32), bytes(32)),
        t.HELLO.pack(t.HELLO_MAGIC, 2, 0, 0, bytes(32), bytes(32)),
        t.HELLO.pack(t.HELLO_MAGIC, 1, 0, 7, bytes(32), bytes(32)),
        t.HELLO.pack(t.HELLO_MAGIC, 1, 0, 0, bytes(32), bytes(32)),
    ],
)
def test_what_is_no_hello_is_answered_in_one_way(door: SocketFrameDoor, said: bytes) -> None:
    with raw(door) as sock:
        sock.sendall(said)
        answer = sock.recv(1 << 10)
        assert len(answer) == t.RECORD.size
        assert t.checked_record(answer, t.FRAME_MAGIC).status == t.PullStatus.REFUSED
        assert is_closed(sock)
    pulls(door)


def test_sealed_and_clear_are_not_the_same_offer(door: SocketFrameDoor) -> None:
    source = Source(1)
    offer = door.offer(source.offered(), SECRET)
    with raw(door) as sock:
        sock.sendall(hello_for(offer.token, SECRET, not offer.is_sealed))
        assert t.checked_record(sock.recv(1 << 10), t.FRAME_MAGIC).status == t.PullStatus.REFUSED
    assert not source.is_released.is_set()


WRONG: list[tuple[str, Callable[[object], list[bytes]]]] = [
    ("another frame", lambda seal: [asked(1, 1, seal=seal)]),
    ("no frame", lambda seal: [asked(0, 0, seal=seal)]),
    ("more than one request has", lambda seal: [asked(0, t.FRAMES_ASKED + 1, seal=seal)]),
    ("more than is offered", lambda seal: [asked(0, 8, 0, seal=seal), asked(8, 8, 1, seal=seal)]),
    ("another magic", lambda seal: [asked(0, 1, magic=t.FRAME_MAGIC, seal=seal)]),
    ("the same twice", lambda seal: [asked(0, 2, seal=seal), asked(0, 2, 1, seal=seal)]),
    ("anything", lambda seal: [bytes(range(48))]),
]


@pytest.mark.parametrize(("why", "says"), WRONG, ids=[why for why, _ in WRONG])
def test_a_puller_that_asks_for_what_it_may_not_have_loses_its_connection(
    door: SocketFrameDoor, why: str, says: Callable[[object], list[bytes]]
) -> None:
    source = Source(5)
    offer = door.offer(source.offered(), SECRET)
    seal = sealed.FrameSeal(seal_key(offer.token, SECRET)) if offer.is_sealed else None
    with raw(door) as sock:
        began = time.monotonic()
        sock.sendall(hello_for(offer.token, SECRET, offer.is_sealed) + b"".join(says(seal)))
        assert is_closed(sock)
        assert time.monotonic() - began < t.OFFER_SECONDS - 1, "at once, and not with the end of its offer"
    assert source.is_released.wait(5) and source.releases == 1
    pulls(door)


def test_requests_that_are_altered_on_the_way_are_not_answered() -> None:
    door = SocketFrameDoor("127.0.0.1:0", SystemClock(), random_bytes, seal="always")
    source = Source(5)
    offer = door.offer(source.offered(), SECRET)
    seal = sealed.FrameSeal(seal_key(offer.token, SECRET))
    request = bytearray(asked(0, 1, seal=seal))
    request[6] = 2  # frames
    with raw(door) as sock:
        sock.sendall(hello_for(offer.token, SECRET, True) + request)
        assert is_closed(sock)
    assert source.is_released.wait(5)
    door.close()


def test_a_puller_that_asks_and_never_reads_holds_its_pins_for_their_time_alone(
    door: SocketFrameDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(t, "OFFER_SECONDS", 0.7)
    source, began = Source(8, slice_bytes=(1 << 20, 5000)), time.monotonic()
    offer = door.offer(source.offered(), SECRET)
    seal = sealed.FrameSeal(seal_key(offer.token, SECRET)) if offer.is_sealed else None
    with raw(door) as sock:
        said = asked(0, 8, 0, seal=seal) + asked(8, 8, 1, seal=seal)
        sock.sendall(hello_for(offer.token, SECRET, offer.is_sealed) + said)
        pulls(door)
        assert not source.is_released.is_set()
        assert source.is_released.wait(5)
        assert 0.7 <= time.monotonic() - began <= 1.0
    pulls(door)


def test_a_door_that_is_closed_takes_no_offer() -> None:
    """Nothing would end it, and its pins would stay."""
    door, source = SocketFrameDoor("127.0.0.1:0", SystemClock(), random_bytes), Source(1)
    door.close()
    with pytest.raises(t.PullBusy, match="closed"):
        door.offer(source.offered(), SECRET)
    assert door.pinned() == 0 and source.releases == 0, "it is the caller's"


def test_strangers_make_room_for_each_other(door: SocketFrameDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_STRANGERS", 8)
    monkeypatch.setattr(t, "HANDSHAKE_SECONDS", 30.0)
    idle = [raw(door) for _ in range(8)]
    pulls(door)
    assert is_closed(idle[0]), "the oldest"
    for sock in idle:
        sock.close()


def test_connections_are_bounded(door: SocketFrameDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 1)
    source = Source(2)
    deadline = time.monotonic() + 20
    reader = SocketPullTransport(SystemClock()).connect(door.offer(source.offered(), SECRET), SECRET, deadline)
    assert reader.pull(source.slots(0, 2), source.check(), deadline) == 2
    with raw(door) as sock:
        assert is_closed(sock)
    reader.close()
    wait_until(lambda: door.pinned() == 0)
    pulls(door)


def test_frames_whose_release_fails_do_not_end_the_door(door: SocketFrameDoor) -> None:
    source = Source(1)
    offered = source.offered()

    def release() -> None:
        raise OSError("the sidecar is gone")

    offered.release = release
    reader = SocketPullTransport(SystemClock()).connect(door.offer(offered, SECRET), SECRET, time.monotonic() + 10)
    assert reader.pull(source.slots(), source.check(), time.monotonic() + 10) == 2
    reader.close()
    pulls(door)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "nowhere", "127.0.0.1", "no such host.:1", "[::]:0", ":80"])
def test_a_door_is_where_peers_reach_it(listen: str) -> None:
    with pytest.raises(BadInput, match=r"HOST:PORT|its own address"):
        SocketFrameDoor(listen, SystemClock(), random_bytes)


def test_a_door_that_is_taken_says_so(door: SocketFrameDoor) -> None:
    with pytest.raises(BadInput, match=r"cannot be listened on: Address already in use; give another address"):
        SocketFrameDoor(door.address, SystemClock(), random_bytes)


def test_without_cryptography_nothing_leaves_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "_IS_HERE", False)
    with pytest.raises(BadInput, match=r"pip install 'prefix-kvstore\[tls\]', or keep the door for data on loopback"):
        SocketFrameDoor("127.0.0.1:0", SystemClock(), random_bytes, seal="always")
    offer = t.PullOffer(bytes(32), "192.0.2.1:7472", "sockets", 1, (8192,), True)
    with pytest.raises(BadInput, match="cryptography is not installed"):
        SocketPullTransport(SystemClock()).connect(offer, SECRET, time.monotonic() + 1)
    SocketFrameDoor("127.0.0.1:0", SystemClock(), random_bytes).close()
