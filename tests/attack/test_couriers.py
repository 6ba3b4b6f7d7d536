"""What a process that has courier.sock can do to a sidecar and its engines: whatever it says, nothing of it stays."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elsewhere.courier import PAYLOAD, SPACE, OtherNode, RawCourier, chain, sidecar_with_couriers
from kvstore.block.account import HitTier, MissReason
from kvstore.protocol import courier as c
from kvstore.protocol import messages as m
from service.sidecar import Sidecar
from torture.mutate import mutated
from torture.peer import Peer, packed_namespace
from waiting import wait_until

MOST = (1 << 63) - 1
sidecar = sidecar_with_couriers


def nothing_is_left(sidecar: Sidecar) -> None:
    """Slots, pins, waiters and questions of couriers that are gone."""
    assert sidecar.desk is not None
    desk = sidecar.desk
    wait_until(lambda: desk.status().couriers == 0)
    wait_until(lambda: sidecar.core.usage().dram.reserved == 0 and sidecar.core.usage().reservations == 0)
    wait_until(lambda: desk.fetched.kept_bytes == 0)
    wait_until(lambda: sidecar.core.awaits.counts().parked == 0)
    sidecar.core.check()
    desk.check()


@contextmanager
def engine_of(sidecar: Sidecar) -> Iterator[tuple[Peer, int]]:
    """An engine's bare connection, and the number of its namespace."""
    with closing(Peer(str(sidecar.path))) as engine:
        assert isinstance(engine.ask(m.Hello(1, m.NEWEST_VERSION)), m.Welcome)
        granted = engine.ask(m.OpenNamespace(packed_namespace(), PAYLOAD), 2)
        assert isinstance(granted, m.Granted)
        yield engine, granted.grant.number


def reserves(engine: Peer, space: int) -> None:
    reserved = engine.ask(m.Reserve(space, chain(8), 0), 3)
    assert isinstance(reserved, m.Reserved) and len(reserved.reply.blocks) == 8, reserved
    engine.ask(m.Abort(reserved.reply.reservation), 4)


def engine_is_served(sidecar: Sidecar) -> None:
    with engine_of(sidecar) as (engine, space):
        reserves(engine, space)


def test_figures_that_no_counter_holds_are_told_to_people(sidecar: Sidecar) -> None:
    source = c.SourceFigures("peer", "b", "up", *[MOST] * 7, {"x": MOST}, 1e308, 1e308, MOST)
    figures = c.CourierFigures([source], [], MOST, MOST, MOST, MOST)
    couriers = [RawCourier(sidecar.courier_path, session=secrets.token_bytes(16)) for _ in range(6)]
    for one in couriers:
        one.questions(told=figures)
    for path in (sidecar.admin_path, sidecar.observe_path):
        with closing(Peer(str(path))) as person:
            person.ask(m.Hello(1, m.NEWEST_VERSION))
            answer = person.ask(m.Stat(), 2)
            assert isinstance(answer, m.StatReply), answer
    for one in couriers:
        one.close()
    nothing_is_left(sidecar)


@pytest.mark.slow
def test_lies_in_every_field_of_every_verb_of_couriers(sidecar: Sidecar) -> None:
    seed = int(os.environ.get("SEED", secrets.randbits(32)))
    print(f"SEED={seed}")
    rng = random.Random(seed)
    other = OtherNode(sidecar.store.tenant_keys("default"), SPACE, PAYLOAD)
    rounds = hung_up = 0
    courier: RawCourier | None = None
    keys: list[bytes] = []
    reply: Any = None
    space = 0
    while rounds < 1500:
        if courier is None:
            try:
                courier = RawCourier(sidecar.courier_path)
            except OSError:
                continue
            if not isinstance(courier.welcome, m.Welcome):
                courier.close()
                courier = None
                continue
            space = courier.open(SPACE, PAYLOAD)
        if reply is None:
            keys = chain(3)
            reply = courier.reserve(space, keys)
            if not reply.reservation:
                reply = None
        reservation = reply.reservation if reply is not None else 1
        headers = [other.header(0, keys, at, bytes(PAYLOAD[0])) for at in range(3)]
        base: m.Verb = rng.choice(
            [
                m.Adopt(reservation, 0, 0, headers, HitTier.PEER),
                m.Adopt(reservation, 0, 0, headers[:1], HitTier.REMOTE),
                m.Reserve(space, keys, 0),
                m.Abort(reservation),
                m.Questions([c.QuestionAnswered(1, 2, HitTier.PEER, 1.0, "x", MissReason.ABSENT, "y")]),
                m.Questions([], c.CourierFigures([c.SourceFigures("peer", "x", "up", refused={"a": 1})], ["y"])),
                m.Holdings(space),
                m.Changes(space, 0),
                m.MatchPrefix(space, keys, counts=False),
                m.LeasePrefix(space, keys, 0, 1.0, counts=False),
                m.Release(1),
                m.Namespaces(0),
                m.OpenNamespace(packed_namespace(), PAYLOAD),
            ]
        )
        verb = msgspec.to_builtins(base, builtin_types=(bytes,))
        verb = mutated(rng, verb, wire=True) if rng.random() < 0.75 else verb
        body = msgspec.msgpack.encode([rounds + 5, verb])
        rounds += 1
        cut = rng.random() < 0.05
        try:
            packed = len(body).to_bytes(m.LENGTH_BYTES, "little") + body
            courier.socket.sendall(packed[: rng.randrange(len(packed))] if cut else packed)
            answer = None if cut else courier.reply()
        except OSError:
            answer = None
        is_over = isinstance(answer, m.Reply) and isinstance(answer.answer, m.Failed)
        if answer is None or (is_over and answer.answer.fault is m.RequestFault.MALFORMED):
            hung_up += 1
            courier.close()
            courier, reply = None, None
        elif isinstance(answer.answer, m.Leased):
            courier.call(m.Release(answer.answer.reply.lease))
        if isinstance(base, m.Abort) or (answer is not None and isinstance(answer.answer, m.Counted)):
            if courier is not None and reply is not None:
                courier.call(m.Abort(reply.reservation))
            reply = None
        if rounds % 300 == 0:
            sidecar.core.check()
            assert sidecar.desk is not None
            sidecar.desk.check()
    if courier is not None:
        courier.close()
    print("rounds", rounds, "hung up", hung_up, sidecar.desk.status().refused)
    nothing_is_left(sidecar)
    engine_is_served(sidecar)


HOLDS = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from elsewhere.courier import RawCourier
from kvstore.block.identity import Namespace
from torture.peer import packed_namespace
import secrets
courier = RawCourier(Path(sys.argv[1]))
space = courier.open(Namespace.unpack(packed_namespace()), [8192])
reply = courier.reserve(space, [secrets.token_bytes(32) for _ in range(64)])
courier.fill(reply.places[0], [b"x" * 8192] * len(reply.blocks))
courier.questions()
print(len(reply.blocks), flush=True)
while True:
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_couriers_that_are_killed_or_stopped_with_slots_mapped(sidecar: Sidecar, how: str) -> None:
    tests = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(sidecar.courier_path), tests], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        held = sidecar.core.usage().dram.reserved
        assert held > 0
        process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "stop":
            engine_is_served(sidecar)
            process.kill()
    nothing_is_left(sidecar)
    engine_is_served(sidecar)


def test_what_a_courier_asks_when_it_is_gone_is_not_asked(sidecar: Sidecar) -> None:
    """A large message may be served in another thread than the one that notices that its courier hung up."""
    assert sidecar.desk is not None
    courier = RawCourier(sidecar.courier_path)
    (caller,) = [one for one in sidecar.sessions.callers() if one.is_courier]
    courier.questions()
    courier.close()
    wait_until(lambda: not any(one.is_courier for one in sidecar.sessions.callers()))
    nothing_is_left(sidecar)
    told = c.CourierFigures([], ["a ghost"])
    assert sidecar.desk.verbs[m.Questions](caller, m.Questions(told=told)) == c.QuestionsReply()
    assert not sidecar.desk.is_served(caller.keys.tenant) and "a ghost" not in sidecar.desk.status().reasons
    nothing_is_left(sidecar)


@pytest.mark.slow
def test_ten_thousand_rounds_leave_the_memory_as_it_was(sidecar: Sidecar) -> None:
    with closing(RawCourier(sidecar.courier_path)) as courier:
        space = courier.open(SPACE, PAYLOAD)
        source = c.SourceFigures("peer", "b", "up")
        before = 0
        for at in range(10_000):
            reply = courier.reserve(space, chain(2))
            assert courier.call(m.Abort(reply.reservation)) == m.Done()
            courier.questions(c.QuestionAnswered(at, 1), told=c.CourierFigures([source], [str(at)]))
            if at % 50 == 0:
                RawCourier(sidecar.courier_path, session=secrets.token_bytes(16)).close()
            if at == 2_000:
                before = resident_bytes()
        assert resident_bytes() - before < 8 << 20
    nothing_is_left(sidecar)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


FLOODS = """
import sys, secrets
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from elsewhere.courier import RawCourier
from kvstore.block.account import HitTier
from kvstore.block.identity import Namespace
from kvstore.protocol import courier as c
from kvstore.protocol import messages as m
from torture.peer import packed_namespace
couriers = [RawCourier(Path(sys.argv[1])) for _ in range(4)]
spaces = [one.open(Namespace.unpack(packed_namespace()), [8192]) for one in couriers]
reply = couriers[0].reserve(spaces[0], [secrets.token_bytes(32) for _ in range(64)])
keys = [secrets.token_bytes(32) for _ in range(8)]
floods = []
for space in spaces:
    verbs = [m.Questions([c.QuestionAnswered(at, 1) for at in range(64)]), m.Holdings(space),
        m.Adopt(reply.reservation, 0, 0, [bytes(4096)] * 512, HitTier.PEER),
        m.Reserve(space, keys, 0), m.MatchPrefix(space, keys, counts=False), m.Namespaces(0)]
    floods.append(b"".join(m.pack(m.Request(9 + at, verb)) for at, verb in enumerate(verbs)))
print("ready", flush=True)
for one in couriers:
    one.socket.setblocking(False)
left = list(floods)
import select
while True:
    reads, writes, _ = select.select([one.socket for one in couriers], [one.socket for one in couriers], [])
    for at, one in enumerate(couriers):
        try:
            if one.socket in reads and not one.socket.recv(1 << 20):
                sys.exit(1)
            if one.socket in writes:
                left[at] = left[at][one.socket.send(left[at]):] or floods[at]
        except BlockingIOError:
            pass
"""


@pytest.mark.slow
def test_a_flood_of_couriers_is_served_in_turn_with_engines(sidecar: Sidecar) -> None:
    tests = str(Path(__file__).parents[1])
    with engine_of(sidecar) as (engine, space):
        keys = chain(4)
        with subprocess.Popen(
            [sys.executable, "-c", FLOODS, str(sidecar.courier_path), tests], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            begun, between = sum(sidecar.door.usage().served.values()), []
            for at in range(20_000):
                before = sum(sidecar.door.usage().served.values())
                answer = engine.ask(m.MatchPrefix(space, keys, counts=False), 10 + at)
                between.append(sum(sidecar.door.usage().served.values()) - before)
                assert isinstance(answer, m.Matched), answer
                if at % 200 == 0:
                    reserves(engine, space)
                flooded = sum(sidecar.door.usage().served.values()) - begun - at
                if flooded > 2000:
                    break
            assert process.poll() is None, "it floods still"
            process.kill()
    p99 = sorted(between)[len(between) * 99 // 100]
    print(f"messages in all {flooded}, while a match waited: p99 {p99}")
    assert flooded > 300 and p99 <= 40
    nothing_is_left(sidecar)


@pytest.mark.slow
def test_engines_locate_no_more_than_is_asked_at_a_time(sidecar: Sidecar) -> None:
    """A flood of questions, and waits for what others located."""
    assert sidecar.desk is not None
    with closing(RawCourier(sidecar.courier_path)) as courier, engine_of(sidecar) as (engine, space):
        courier.questions()
        few, many = chain(1), chain(65_536)
        for keys, count in ((few, 3000), (many, 24)):
            for at in range(count):
                engine.socket.sendall(m.pack(m.Request(10 + at, m.Locate(space, keys))))
                if at % 100 == 99 or len(keys) > 1:
                    sidecar.desk.check()
            reasons = set()
            for _ in range(count):
                reply = engine.reply()
                assert reply is not None and isinstance(reply.answer, m.Located), reply
                reasons.add(reply.answer.reason)
            assert reasons <= {MissReason.DEADLINE, MissReason.BUSY, MissReason.UNREACHABLE}, reasons
            courier.questions()
        for located in (1, 2, 77, 2**31, 2**63 - 1):
            answer = engine.ask(m.Await(space, few, 20.0, located), 5)
            assert isinstance(answer, m.Awaited) and answer.reason is MissReason.STALE_HINT, answer
    nothing_is_left(sidecar)
