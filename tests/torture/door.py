"""Attacks on a real sidecar's sockets: messages that are none, connections that say nothing, floods.

messages    seeded mutations of every verb, and of namespaces within (`torture.nested`), on tenants' sockets and the
            admin socket, delivered in every odd way; what
            the bytes deserve is known beforehand (`mutations.expected`), and nothing of another tenant may be answered
            or changed
half-open   connections that are silent, stop within a hello, or never read: others are let in, and all of it is given
            back
flood       clients in a cgroup with a limit of CPU time; see `torture.flood`

Every campaign ends with a sidecar that is the same process, has nothing in its log, and ends in order.
"""

from __future__ import annotations

import resource
import socket
import tempfile
import time
from collections import Counter
from dataclasses import replace
from random import Random

import msgspec

from asking import Asking
from kvstore.protocol import messages as m
from service.sidecar import number_of
from tiering.frame import KEY_BYTES
from tiering.tier import SLOT_BITS
from torture import Report, quiet
from torture.doorstep import OTHER_TENANT, SLACK_BYTES, Household, Sidecar, visit
from torture.mutations import ADMIN, OFTEN, VALID, Booty, attack, expected
from torture.nested import packed_bytes, some_payloads
from torture.peer import LONG_SECONDS, Peer, packed_namespace

BATCH = 500
"""Messages, after which well-behaved clients are asked how they are."""
VICTIM_MODEL = "victim-2a7f8d51"
HOUSEHOLD_MODEL = "household-c0d9e1f3"
DELIVERIES = ("whole", "bytes", "pieces", "descriptors", "half closed", "unread", "many")
IN_ONE_CONNECTION = 4
"""Messages at most, if none of them ends it."""


class Victim(Household):
    """A household of another tenant, with a lease, a reservation and memory; an attacker knows all their numbers."""

    def __init__(self, path: str) -> None:
        super().__init__(path, VICTIM_MODEL, session="51" * 16)
        self.turn()
        self.lease = self.hold()
        keys = self.handle.match(range(1000, 1000 + 64 * 2)).keys
        self.reserved = Asking(self.handle.door).reserve(self.handle.number, keys, 0, 0, None)
        assert len(self.reserved.blocks) == 2
        run = self.handle.door._run  # type: ignore[attr-defined]
        self.booty = Booty(
            namespaces_of_others=[run.namespaces[self.handle.number]],
            leases_of_others=[number_of(self.lease)],
            reservations_of_others=sorted(run.reservations),
            extents_of_others=sorted({place >> SLOT_BITS for place in self.lease.reply.places[0]}),
            keys_of_others=[*self.lease.keys],
            sessions_of_others=[bytes.fromhex("51" * 16)],
        )
        identity = self.handle.door._opened[0].grant.identity_key  # type: ignore[attr-defined]
        self.marks = [VICTIM_MODEL.encode(), identity, *self.lease.keys]

    def settle(self) -> None:
        """What it began to store can be finished still."""
        visible = Asking(self.handle.door).commit(self.reserved.reservation, 0, 0, [[bytes(16)] * 2] * 2)
        assert visible == 2, f"{visible} of 2 blocks of the other tenant's reservation are there"


def messages(count: int, seed: int, report: Report = quiet) -> dict[str, int]:
    """That many mutated messages; what came of them."""
    random, counts = Random(seed), Counter[str]()
    with Sidecar() as sidecar:
        household = Household(sidecar.sockets["default"], HOUSEHOLD_MODEL)
        victim = Victim(sidecar.sockets[OTHER_TENANT])
        household.turn()
        victim.booty.leases_of_others.append(number_of(household.hold()))  # of its own tenant, and of another session
        try:
            before = _of_tenant(sidecar, OTHER_TENANT)
            while counts["messages"] < count:
                first = counts["messages"]
                until = min(count, first + BATCH)
                try:
                    while counts["messages"] < until:
                        _attack_once(sidecar, random, victim, until - counts["messages"], counts)
                    household.turn()
                    household.check_held()
                    victim.check_held()
                    sidecar.check()
                    sidecar.await_rest(connections=2)
                    assert _of_tenant(sidecar, OTHER_TENANT) == before, "what the other tenant has was changed"
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}, messages {first} to {counts['messages']}: {error}") from error
                most = sidecar.most_bytes(4)
                assert sidecar.resident_bytes() <= most, f"{sidecar.resident_bytes()} bytes of memory; at most {most}"
                report(counts["messages"])
            victim.settle()
        finally:
            household.close()
            victim.close()
        sidecar.await_rest()
        counts["grown_mib"] = max(0, sidecar.resident_bytes() - sidecar.rest_bytes) >> 20
    return dict(counts)


def _of_tenant(sidecar: Sidecar, tenant: str) -> list[object]:
    """What a tenant has, as the operator sees it."""
    facts = sidecar.facts()
    spaces = [(one.digest, one.blocks, one.looked) for one in facts.namespaces if one.tenant == tenant]
    sessions = [
        (one.connections, one.leases, one.leased_blocks, one.reservations)
        for one in facts.sessions
        if one.tenant == tenant
    ]
    return [spaces, sessions]


def _attack_once(sidecar: Sidecar, random: Random, victim: Victim, most: int, counts: Counter[str]) -> None:
    """One connection, and all that comes of it."""
    is_admin = random.random() < 0.1
    peer = Peer(sidecar.admin if is_admin else sidecar.sockets["default"])
    try:
        counts["connections"] += 1
        is_greeted = random.random() < 0.85
        booty = victim.booty
        if is_greeted:
            booty = _come_in(peer, random, victim.booty, is_admin)
        delivery = random.choice(DELIVERIES)
        number = min(
            most, 200 if delivery == "many" and random.random() < 0.1 else random.randint(1, IN_ONE_CONNECTION)
        )
        sent: list[bytes] = []
        while len(sent) < number and not expected(b"".join(sent), is_greeted).is_last:
            if is_admin or random.random() < 0.8:
                sent.append(attack(random, booty, random.choice(OFTEN), ADMIN if is_admin else tuple(VALID)))
            else:
                sizes = some_payloads(random, random.choice((1, 1, 2, 16, 512)))
                body = msgspec.msgpack.encode([len(sent) + 1, ["namespace", packed_bytes(random), sizes]])
                sent.append(len(body).to_bytes(m.LENGTH_BYTES, "little") + body)
        counts["messages"] += len(sent)
        stream = b"".join(sent)
        if delivery == "bytes" and len(stream) > 3000:
            delivery = "pieces"
        if not _deliver(peer.socket, random, stream, sent, delivery):
            counts["cut_off"] += 1  # the sidecar hung up before all of it was sent
        if delivery in ("half closed", "unread"):
            counts["unread"] += 1
            return
        _hear(peer, stream, is_greeted, None if is_admin else victim, counts, delivery == "descriptors")
    finally:
        peer.close()


def _come_in(peer: Peer, random: Random, others: Booty, is_admin: bool) -> Booty:
    """Hello, and things of its own to be wrong about."""
    booty = replace(others)
    welcome = peer.ask(m.Hello(1, 1, "attacker \x1b[31m", random.choice([b"", random.randbytes(16)])))
    assert isinstance(welcome, m.Welcome), f"not let in: {welcome}"
    if is_admin or random.random() < 0.3:
        return booty
    granted = peer.ask(m.OpenNamespace(packed_namespace(), [8192]))
    if not isinstance(granted, m.Granted):
        return booty
    booty.namespace = granted.grant.number
    assert booty.namespace not in others.namespaces_of_others, "a namespace of another tenant"
    booty.keys = [random.randbytes(KEY_BYTES) for _ in range(4)]
    reserved = peer.ask(m.Reserve(booty.namespace, booty.keys[:2], 0))
    if isinstance(reserved, m.Reserved) and reserved.reply.reservation:
        booty.reservation = reserved.reply.reservation
        booty.extent = reserved.reply.places[0][0] >> SLOT_BITS
        if random.random() < 0.5:
            peer.ask(m.Commit(booty.reservation, 0, 0, [[random.randbytes(16)] * 2] * len(reserved.reply.blocks)))
            leased = peer.ask(m.LeasePrefix(booty.namespace, booty.keys[:2], 0, 100.0))
            booty.lease = leased.reply.lease if isinstance(leased, m.Leased) else 0
    return booty


def _deliver(sock: socket.socket, random: Random, stream: bytes, sent: list[bytes], how: str) -> bool:
    """Send it in that way; whether the sidecar took all of it."""
    try:
        if how == "bytes":
            for at in range(len(stream)):
                sock.sendall(stream[at : at + 1])
        elif how == "pieces":
            at = 0
            while at < len(stream):
                size = random.choice([1, 2, 3, 5, 100, 70_000])
                sock.sendall(stream[at : at + size])
                at += size
        elif how == "descriptors":
            with tempfile.TemporaryFile() as one, socket.socket() as two:
                given = [one.fileno(), two.fileno()] * random.choice([1, 60])
                for frame in filter(None, sent):
                    try:
                        socket.send_fds(sock, [frame[:1]], given)
                    except PermissionError:  # the kernel refuses them, with the byte
                        sock.sendall(frame[:1])
                    sock.sendall(frame[1:])
        else:
            sock.sendall(stream)
            if how == "half closed":
                sock.shutdown(socket.SHUT_WR)
                if random.random() < 0.5:
                    time.sleep(0.002)
        return True
    except ConnectionError:
        return False


def _hear(
    peer: Peer, stream: bytes, is_greeted: bool, victim: Victim | None, counts: Counter[str], may_be_cut: bool
) -> None:
    """All answers that there must be, and none that there must not be. victim: of whom nothing may be told, but to
    the operator. may_be_cut: descriptors were sent, and a kernel before 6.16 leaves it to the sidecar to hang up."""
    right = expected(stream, is_greeted)
    left = Counter(right.numbers)
    while left or right.ends:
        try:
            reply = peer.reply()
        except TimeoutError:
            raise AssertionError(f"no answer to {len(left)} of {len(right.numbers)} messages") from None
        if reply is None:
            counts["ended"] += 1
            assert right.is_last or may_be_cut, f"hung up on, with {len(left)} of {len(right.numbers)} not answered"
            return
        if victim is not None:
            _check_answer(reply, victim)
        is_malformed = isinstance(reply.answer, m.Failed) and reply.answer.fault is m.RequestFault.MALFORMED
        if is_malformed:
            assert right.ends and reply.number == 0, f"a message was called malformed: {reply}"
            counts["malformed"] += 1
            continue
        assert left[reply.number] > 0, f"an answer that nobody asked for: {type(reply.answer).__name__}"
        left = left - Counter([reply.number])
        counts["refused" if isinstance(reply.answer, m.Failed) else "answered"] += 1


def _check_answer(reply: m.Reply, victim: Victim) -> None:
    """Nothing of another tenant may be in it."""
    said, answer, booty = m.pack(reply), reply.answer, victim.booty
    if not isinstance(answer, m.Welcome):  # which repeats the token of a session that was given
        for mark in victim.marks:
            assert mark not in said, f"an answer with something of another tenant: {type(answer).__name__}"
    if isinstance(answer, m.Attached):
        assert not set(answer.leases) & set(booty.leases_of_others), "a lease of another tenant was attached to"
    if isinstance(answer, m.ExtentsReply):
        numbers = {one.number for one in answer.extents}
        assert not numbers & set(booty.extents_of_others), "memory of another tenant was handed out"
    if isinstance(answer, m.Granted):
        assert answer.grant.number not in booty.namespaces_of_others, "a namespace of another tenant was opened"


# Half-open ------------------------------------------------------------------------------------------------------------


def half_open(count: int, seed: int, silence_seconds: float = 10.0, report: Report = quiet) -> dict[str, int]:
    """That many connections that stop before they said who they are, and as many that read nothing."""
    _allow_descriptors(count + 200)
    random, counts = Random(seed), Counter[str]()
    with Sidecar({"silence_seconds": silence_seconds}) as sidecar:
        household = Household(sidecar.sockets["default"], HOUSEHOLD_MODEL)
        try:
            for of in range(LISTED):
                household.store.namespace(model=f"namespace {of}", layout=household.handle.layout)
            household.turn()
            household.hold()
            held: list[socket.socket] = []
            for way, open_one in (("silent", _say_little), ("unread", _never_read)):
                try:
                    for number in range(count):
                        one = open_one(sidecar.sockets["default"], random)
                        held += [one] if one is not None else []
                        counts[way if one is not None else "turned_away"] += 1
                        report(number + 1 + count * (way == "unread"))
                    _check_crowd(sidecar, household, way, counts)
                    for one in held[: len(held) // 2]:
                        one.close()
                    sidecar.await_rest(silence_seconds + LONG_SECONDS, connections=1)  # the others hold on to theirs
                finally:
                    for one in held:
                        one.close()
                    held.clear()
                sidecar.await_rest(connections=1)
                household.turn()
                household.check_held()
                sidecar.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {error}") from error
        finally:
            household.close()
        sidecar.await_rest()
        counts["grown_mib"] = max(0, sidecar.resident_bytes() - sidecar.rest_bytes) >> 20
        assert sidecar.resident_bytes() <= sidecar.rest_bytes + SLACK_BYTES, f"{counts['grown_mib']} MiB were kept"
    return dict(counts)


LISTED = 64
"""Namespaces, so that an answer that lists them is long."""
UNREAD_REQUESTS = 50


def _say_little(path: str, random: Random) -> socket.socket | None:
    """Nothing, or part of a hello."""
    one = socket.socket(socket.AF_UNIX)
    one.connect(path)
    hello = m.pack(m.Request(1, m.Hello(1, 1, "half", bytes(16))))
    try:
        one.sendall(hello[: random.choice([0, 0, 1, 3, 4, 5, len(hello) - 1])])
    except ConnectionError:  # its place was somebody else's already
        pass
    return one


def _never_read(path: str, random: Random) -> socket.socket | None:
    """A hello, and questions with long answers; None where it was not let in."""
    peer = Peer(path)
    asked = b"".join(m.pack(m.Request(number, m.Namespaces())) for number in range(UNREAD_REQUESTS))
    try:
        peer.socket.sendall(m.pack(m.Request(1, m.Hello(1, 1, "unread"))))
        reply = peer.reply()
        if reply is not None and isinstance(reply.answer, m.Welcome):
            peer.socket.sendall(asked)
            return peer.socket
    except ConnectionError:
        pass
    peer.close()
    return None


def _check_crowd(sidecar: Sidecar, household: Household, way: str, counts: Counter[str]) -> None:
    """While they are there: those who were before are served, others are let in, and what is kept has bounds."""
    limits = sidecar.limits
    household.turn()
    at_once = min(AT_ONCE_SECONDS, 0.8 * limits.silence_seconds)  # sooner than any of them has to go
    waited = visit(sidecar.sockets[OTHER_TENANT], "visitor", at_once)
    counts["other_tenant_let_in_ms"] = max(counts["other_tenant_let_in_ms"], round(1000 * waited))
    seconds = at_once if way == "silent" else limits.silence_seconds + AT_ONCE_SECONDS
    waited = visit(sidecar.sockets["default"], "visitor", seconds)
    counts[f"{way}_let_in_ms"] = round(1000 * waited)
    descriptors, most = sidecar.descriptors(), sidecar.rest_descriptors + limits.connections + MOST_BESIDE
    assert descriptors <= most, f"{descriptors} descriptors, at most {most}"
    memory, most = sidecar.resident_bytes(), sidecar.most_bytes(limits.connections)
    assert memory <= most, f"{memory} bytes of memory, at most {most}"
    counts["most_mib"] = max(counts["most_mib"], memory >> 20)


AT_ONCE_SECONDS = 8.0
"""For whoever need not wait for a limit, on a busy machine."""
MOST_BESIDE = 80
"""Descriptors: connections that are told why they are turned away, and a few more."""


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
