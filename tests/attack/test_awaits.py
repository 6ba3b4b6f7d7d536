"""Awaits as a raw client sends them: floods, odd keys, hang-ups. What one tenant parks costs another one nothing."""

from __future__ import annotations

import random
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.protocol import messages as m
from kvstore.protocol.messages import MAX_AWAITED_KEYS
from kvstore.service.connections import DoorLimits
from kvstore.service.local_door import LocalDoor
from service.sidecar import Sidecar
from tiering.counts.awaits import MOST_PARKED, AwaitEnd
from torture.peer import Peer, packed_namespace
from waiting import wait_until
from workbench import MODEL, ids, plausible_pages, small_layout

PAYLOAD = [8192]
SLICES = 2


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, DoorLimits(connections=64), dram="4MiB") as sidecar:
        yield sidecar
        wait_until(lambda: sidecar.core.awaits.counts().parked == 0)


class Attacker(Peer):
    """A bare connection with a namespace, which sends without reading."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        assert isinstance(self.ask(m.Hello(m.OLDEST_VERSION, m.NEWEST_VERSION)), m.Welcome)
        granted = self.ask(m.OpenNamespace(packed_namespace(), PAYLOAD))
        assert isinstance(granted, m.Granted)
        self.namespace = granted.grant.number
        self.numbers = iter(range(2, 1 << 30))

    def send(self, *verbs: m.Verb) -> list[int]:
        numbers = [next(self.numbers) for _ in verbs]
        self.socket.sendall(b"".join(m.pack(m.Request(*one)) for one in zip(numbers, verbs, strict=True)))
        return numbers

    def park(self, count: int = 1, seconds: float = 20.0, key: bytes | None = None) -> list[int]:
        return self.send(*[m.Await(self.namespace, [key or secrets.token_bytes(32)], seconds) for _ in range(count)])

    def answers(self, count: int) -> dict[int, m.Answer]:
        found = {}
        for _ in range(count):
            reply = self.reply()
            assert reply is not None
            assert reply.number not in found, "each is answered once"
            found[reply.number] = reply.answer
        return found

    def store(self, keys: list[bytes], committed: int) -> int:
        """Reserve these, and commit so many of them; the reservation's number."""
        (number,) = self.send(m.Reserve(self.namespace, keys, 0))
        reserved = self.answers(1)[number]
        assert isinstance(reserved, m.Reserved) and len(reserved.reply.blocks) == len(keys)
        digests = [[bytes(16)] * SLICES] * committed
        (number,) = self.send(m.Commit(reserved.reply.reservation, 0, 0, digests))
        assert self.answers(1)[number] == m.Counted(committed)
        return reserved.reply.reservation


def test_more_than_a_tenant_may_park_are_answered_at_once(sidecar: Sidecar) -> None:
    with closing(Attacker(sidecar.path)) as one, closing(Attacker(sidecar.path)) as two:
        one.park(MOST_PARKED // 2)
        two.park(MOST_PARKED // 2)
        wait_until(lambda: sidecar.core.awaits.counts().parked == MOST_PARKED)
        more = one.park(300)
        assert set(one.answers(300).items()) == {(number, m.Awaited(0, AwaitEnd.FULL)) for number in more}
        assert isinstance(one.ask(m.MatchPrefix(one.namespace, [bytes(32)])), m.Matched), "none of them is in flight"
        two.close()
        wait_until(lambda: sidecar.core.awaits.counts().parked == MOST_PARKED // 2)
        assert sidecar.admin.facts().awaits.ended["cancelled"] == MOST_PARKED // 2


def test_parked_awaits_take_up_neither_threads_nor_requests_under_way(tmp_path: Path) -> None:
    limits = DoorLimits(in_flight=2, running=1, threads=1, long_threads=1)
    with Sidecar(tmp_path, limits) as sidecar, closing(Attacker(sidecar.path)) as one:
        before = threading.active_count()
        parked = one.park(500)
        (lease,) = one.send(m.LeasePrefix(one.namespace, [bytes(32)], 0, 0.0))
        assert isinstance(one.answers(1)[lease], m.Leased)
        assert sidecar.core.awaits.counts().parked == 500 and threading.active_count() <= before
        (done,) = one.send(m.Cancel(parked))
        answers = one.answers(501)
        assert answers.pop(done) == m.Done()
        assert set(answers.values()) == {m.Awaited(0, AwaitEnd.CANCELLED)}


def test_what_is_told_when(sidecar: Sidecar) -> None:
    keys = [secrets.token_bytes(32) for _ in range(4)]
    with closing(Attacker(sidecar.path)) as waits, closing(Attacker(sidecar.path)) as puts:
        readable, short, late = waits.park(1, 20, keys[1]) + waits.park(1, 20, keys[3]) + waits.park(1, 0.2)
        again = waits.park(40, 20, keys[1])
        wait_until(lambda: sidecar.core.awaits.counts().parked == 43)
        reservation = puts.store(keys, 2)
        answers = waits.answers(42)
        assert [answers[one] for one in (readable, *again)] == [m.Awaited(1, AwaitEnd.READABLE)] * 41
        assert answers[late] == m.Awaited(0, AwaitEnd.DEADLINE)
        puts.send(m.Abort(reservation))
        assert waits.answers(1)[short] == m.Awaited(0, AwaitEnd.SHORT)
        unread = waits.park(1, 20, keys[2])
        wait_until(lambda: sidecar.core.awaits.counts().parked == 1)
        puts.answers(1)
        puts.send(m.Reserve(puts.namespace, keys[:3], 0))
        puts.answers(1)
        puts.close()  # its writer is gone
        assert waits.answers(1) == {unread[0]: m.Awaited(0, AwaitEnd.SHORT)}


def test_answers_that_a_client_reads_late_all_come(sidecar: Sidecar) -> None:
    """More than its socket takes at a time."""
    keys = [secrets.token_bytes(32)]
    with closing(Attacker(sidecar.path)) as waits, closing(Attacker(sidecar.path)) as puts:
        parked = waits.park(MOST_PARKED, 20, keys[0])
        wait_until(lambda: sidecar.core.awaits.counts().parked == MOST_PARKED)
        puts.store(keys, 1)
        wait_until(lambda: not sidecar.door._parked)
        assert any(one.unsent for one in sidecar.door._connections)
        answers = waits.answers(MOST_PARKED)
        assert set(answers) == set(parked) and set(answers.values()) == {m.Awaited(1, AwaitEnd.READABLE)}


def test_odd_awaits_cost_their_connection_a_line_or_itself(sidecar: Sidecar) -> None:
    with closing(Attacker(sidecar.path)) as one:
        key = secrets.token_bytes(32)
        for verb in (
            m.Await(one.namespace, [b"short"], 1.0),
            m.Await(one.namespace, [key, key], 1.0),
            m.Await(one.namespace + 7, [key], 1.0),
            m.Await(one.namespace, [key], -1.0),
            m.Await(one.namespace, [key], float("nan")),
        ):
            answer = one.ask(verb, number=next(one.numbers))
            assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, verb
        assert one.ask(m.Await(one.namespace, [key], 0.0), number=900) == m.Awaited(0, AwaitEnd.DEADLINE)
        one.socket.sendall(m.pack(m.Request(901, m.Await(one.namespace, [key], float("inf")))))
        taken = one.ask(m.Await(one.namespace, [key], 1.0), number=901)
        assert isinstance(taken, m.Failed), "a number that waits already"
        numbers = [901, 901, 901, 0, -5, 1 << 62]  # the same one again and again, and some that are none
        one.socket.sendall(m.pack(m.Request(902, m.Cancel(numbers))))
        assert set(map(str, one.answers(2).values())) == {
            str(m.Done()),
            str(m.Awaited(0, AwaitEnd.CANCELLED)),
        }
    for keys in ([], [bytes(32)] * (MAX_AWAITED_KEYS + 1), [bytes(33)]):
        with closing(Attacker(sidecar.path)) as one:
            answer = one.ask(m.Await(one.namespace, keys, 1.0))
            assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.MALFORMED
            assert one.reply() is None, "the connection ends, and no other"
    assert sidecar.core.awaits.counts().parked == 0


def test_absent_keys_and_those_of_another_tenant_are_the_same(tmp_path: Path) -> None:
    """In answer; in time they go the same way: a look at the caller's own namespace."""
    with Sidecar(tmp_path) as sidecar:
        other = tmp_path / "other.sock"
        sidecar.door.close(10)
        sidecar.door = LocalDoor(sidecar.handlers, DoorLimits(), sidecar.store.faults)
        sidecar.door.listen(sidecar.path, sidecar.store.tenant_keys("default"))
        sidecar.door.listen(other, sidecar.store.tenant_keys("other"))
        sidecar.door.start()
        with closing(Attacker(sidecar.path)) as mine, closing(Attacker(other)) as theirs:
            keys = [secrets.token_bytes(32) for _ in range(20)]
            theirs.store(keys, 20)
            absent, foreign = mine.park(20, 0.05), [mine.park(1, 0.05, key)[0] for key in keys]
            answers = mine.answers(40)
            assert {answers[one] for one in absent} == {answers[one] for one in foreign}
            assert set(answers.values()) == {m.Awaited(0, AwaitEnd.DEADLINE)}
            mine.park(MOST_PARKED)
            wait_until(lambda: sidecar.core.awaits.counts().parked == MOST_PARKED)
            (own,) = theirs.park(1, 20, keys[0])
            assert theirs.answers(1) == {own: m.Awaited(1, AwaitEnd.READABLE)}, "another tenant's limit is its own"
            theirs.park(1)
            wait_until(lambda: sidecar.core.awaits.counts().parked == MOST_PARKED + 1)


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_come_park_and_go_leave_nothing(sidecar: Sidecar, seed: int) -> None:
    print(f"seed {seed}")
    keys = [secrets.token_bytes(32) for _ in range(6)]

    def attack(which: int) -> None:
        draw = random.Random(10 * seed + which)
        for _ in range(15):
            with closing(Attacker(sidecar.path)) as one:
                numbers: list[int] = []
                for _ in range(draw.randrange(40)):
                    what = draw.randrange(4)
                    if what < 2:
                        numbers += one.park(draw.randrange(1, 30), draw.choice([0.0, 0.01, 20.0]), draw.choice(keys))
                    elif what == 2:
                        one.send(m.Cancel(draw.sample(numbers, min(len(numbers), 5))))
                    else:
                        one.send(m.Reserve(one.namespace, keys[: draw.randrange(1, 7)], 0))
                if draw.random() < 0.5:
                    one.socket.shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=attack, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    awaits = sidecar.core.awaits
    wait_until(lambda: not sidecar.door._parked and not awaits.counts().parked and not len(sidecar.sessions.departed))
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        assert handle.put(ids(64), plausible_pages(small_layout(), 1)).stored == 1


def test_a_sidecar_that_goes_down_answers_those_that_wait(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, closing(Attacker(sidecar.path)) as one:
        parked = one.park(100)
        wait_until(lambda: sidecar.core.awaits.counts().parked == 100)
        sidecar.door.close(10)
        answers = one.answers(100)
        assert set(answers) == set(parked) and Counter(answers.values()) == {m.Awaited(0, AwaitEnd.GONE): 100}


def test_a_client_of_the_last_version_is_served_as_before(sidecar: Sidecar) -> None:
    with closing(Peer(str(sidecar.path))) as one:
        welcome = one.ask(m.Hello(1, 2))
        assert isinstance(welcome, m.Welcome) and welcome.version == 2
        assert isinstance(one.ask(m.OpenNamespace(packed_namespace(), PAYLOAD)), m.Granted)
