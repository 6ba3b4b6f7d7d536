"""Connections of one session, of another one, and of another tenant: what each may name, and what names nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.block.account import MissReason
from kvstore.block.identity import Namespace
from kvstore.protocol import messages as m
from kvstore.service.dispatch import MAX_LEASED_BLOCKS, MAX_LEASES
from service.sidecar import Sidecar
from tiering.frame import KEY_BYTES
from torture.peer import Peer, opened_by
from waiting import wait_until
from workbench import small_layout

BLOCKS = 4
KEYS = [bytes([number + 1] * KEY_BYTES) for number in range(BLOCKS)]
DIGESTS = [[bytes(16)] * 2]
TOKEN = b"t" * 16


class Place:
    """A sidecar of two tenants, and peers that have said hello and opened the same namespace."""

    def __init__(self, directory: Path) -> None:
        self.sidecar = Sidecar(directory, dram="1MiB")
        self.other = directory / "other.sock"
        self.sidecar.door.listen(self.other, self.sidecar.store.tenant_keys("other"))
        self.peers: list[Peer] = []

    def peer(self, session: bytes = TOKEN, *, is_other: bool = False) -> tuple[Peer, int]:
        """And the namespace's number."""
        peer = Peer(str(self.other if is_other else self.sidecar.path))
        self.peers.append(peer)
        assert isinstance(peer.ask(m.Hello(1, 1, "test", session)), m.Welcome)
        return peer, opened_by(peer)

    @property
    def usage(self) -> tuple[int, int, int]:
        """Leases, reservations and blocks that are reserved."""
        usage = self.sidecar.store.usage()
        return usage.leases, usage.reservations, usage.dram.reserved

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.sidecar.__exit__()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.close()


def reserve(peer: Peer, number: int, keys: list[bytes] = KEYS) -> int:
    answer = peer.ask(m.Reserve(number, keys, 0))
    assert isinstance(answer, m.Reserved) and len(answer.reply.blocks) == len(keys)
    return answer.reply.reservation


def store(peer: Peer, number: int) -> None:
    assert peer.ask(m.Commit(reserve(peer, number), 0, 0, DIGESTS * BLOCKS)) == m.Counted(BLOCKS)


def lease(peer: Peer, number: int, request: str = "r") -> int:
    answer = peer.ask(m.LeasePrefix(number, KEYS, 0, 1000, request))
    assert isinstance(answer, m.Leased) and answer.reply.blocks == BLOCKS
    return answer.reply.lease


def is_refused(answer: m.Answer, *fragments: str) -> bool:
    assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, answer
    assert all(fragment in answer.text for fragment in fragments), answer.text
    return True


@pytest.mark.parametrize("is_other", [False, True], ids=["another connection", "another tenant"])
def test_a_put_is_committed_and_aborted_by_its_own_connection_alone(place: Place, is_other: bool) -> None:
    """Also where the stranger has one of his own, whose number is close by."""
    mine, number = place.peer()
    theirs, their_number = place.peer(b"u" * 16, is_other=is_other)
    reservation = reserve(mine, number)
    own = reserve(theirs, their_number, [bytes([99] * KEY_BYTES)])
    assert theirs.ask(m.Abort(reservation)) == m.Done() and place.usage == (0, 2, BLOCKS + 1)
    assert theirs.ask(m.Commit(reservation, 0, 0, DIGESTS * BLOCKS)) == m.Counted(0)
    assert theirs.ask(m.Abort(own)) == m.Done() and place.usage == (0, 1, BLOCKS)
    assert mine.ask(m.Commit(reservation, 0, 0, DIGESTS * BLOCKS)) == m.Counted(BLOCKS)
    assert place.usage == (0, 0, 0)


def test_a_lease_is_released_reported_and_attached_to_within_its_session(place: Place) -> None:
    mine, number = place.peer()
    store(mine, number)
    held = lease(mine, number)
    for session, is_other in ((b"u" * 16, False), (TOKEN, True)):
        theirs, _ = place.peer(session, is_other=is_other)
        assert theirs.ask(m.Attach([held])) == m.Attached([])
        for verb in (m.Release([held]), m.ReleaseRequest("r"), m.ReportFrame(held, 0, 0)):
            assert theirs.ask(verb) == m.Done()
    again, _ = place.peer()
    assert again.ask(m.Release([held])) == m.Done(), "it has not attached to it"
    assert again.ask(m.ReportFrame(held, 0, 0)) == m.Done()
    usage = place.sidecar.store.usage()
    assert usage.leases == 1 and not usage.counters.get("reported_frames") and usage.blocks == BLOCKS
    assert again.ask(m.Attach([held])) == m.Attached([held])
    assert again.ask(m.ReportFrame(held, 0, 0)) == m.Done()
    assert place.sidecar.store.usage().counters["reported_frames"] == 1
    for peer in (mine, again):
        assert place.usage[0] == 1
        assert peer.ask(m.Release([held])) == m.Done()
    assert place.usage == (0, 0, 0)


def test_a_lease_that_ran_out_is_attached_to_by_nobody(place: Place) -> None:
    mine, number = place.peer()
    store(mine, number)
    held, again = lease(mine, number), place.peer()[0]
    (record,) = place.sidecar.core.leases.live.values()
    place.sidecar.core.expire(record.number)
    assert again.ask(m.Attach([held])) == m.Attached([])
    mine.ask(m.Release([held]))
    assert place.usage == (0, 0, 0)


def test_a_namespace_is_named_by_the_connection_that_opened_it(place: Place) -> None:
    mine, first = place.peer()
    store(mine, first)
    theirs, their_number = place.peer(is_other=True)
    assert their_number == first, "each tenant counts its own"
    assert theirs.ask(m.MatchPrefix(their_number, KEYS)).reply.blocks == 0  # type: ignore[union-attr]
    number = opened_by(mine, Namespace("another", small_layout(), "raw").pack())
    again, _ = place.peer()
    for verb in (
        m.MatchPrefix(number, KEYS),
        m.LeasePrefix(number, KEYS, 0, 0),
        m.Reserve(number, KEYS, 0),
        m.Persist(number, KEYS, 0),
        m.Drop(number),
    ):
        for stranger in (theirs, again):
            assert is_refused(stranger.ask(verb), f"namespace {number} was not opened on this connection")
    assert place.sidecar.store.usage().blocks == BLOCKS


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([KEYS[0], KEYS[1], KEYS[0]], "a prefix key that is there twice"),
        ([KEYS[0], KEYS[1][:-1]], "a prefix key of another length"),
        ([b""], "a prefix key of another length"),
    ],
)
def test_keys_that_name_no_chain_are_refused(place: Place, keys: list[bytes], said: str) -> None:
    mine, number = place.peer()
    for verb in (m.MatchPrefix(number, keys), m.LeasePrefix(number, keys, 0, 0), m.Reserve(number, keys, 0)):
        assert is_refused(mine.ask(verb), said)
    assert place.usage == (0, 0, 0)


def test_keys_behind_what_a_look_up_found_are_refused_as_well_and_nothing_is_counted(place: Place) -> None:
    mine, number = place.peer()
    store(mine, number)
    short, twice = "another length", "there twice"
    for behind, said in (([bytes(31)], short), ([bytes(32), b""], short), ([bytes(32)] * 2, twice)):
        assert is_refused(mine.ask(m.MatchPrefix(number, [*KEYS, *behind])), said)
    assert place.sidecar.admin.facts().looked.lookups == 0
    assert mine.ask(m.MatchPrefix(number, [*KEYS, bytes(32)])).reply.blocks == BLOCKS  # type: ignore[union-attr]
    assert place.sidecar.admin.facts().looked.lookups == 1
    thrice = mine.ask(m.MatchPrefix(number, [KEYS[0]] * 3))  # found, so it is not looked at again
    assert thrice.reply.blocks == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("digests", [[[bytes(16)]], [[bytes(16)] * 3], [[bytes(16), bytes(15)]], [[]]])
def test_digests_that_are_none_of_the_parts_layers_are_refused(place: Place, digests: list[list[bytes]]) -> None:
    mine, number = place.peer()
    reservation = reserve(mine, number)
    assert is_refused(mine.ask(m.Commit(reservation, 0, 0, digests)), "digests of another form")
    assert mine.ask(m.Commit(reservation, 0, 0, DIGESTS * BLOCKS)) == m.Counted(BLOCKS)


@pytest.mark.parametrize(("first", "count"), [(1, 1), (0, BLOCKS + 1), (BLOCKS, 1)])
def test_blocks_are_committed_in_their_order_and_no_more_than_were_reserved(
    place: Place, first: int, count: int
) -> None:
    mine, number = place.peer()
    reservation = reserve(mine, number)
    assert is_refused(mine.ask(m.Commit(reservation, 0, first, DIGESTS * count)), "give those that follow the last")
    assert mine.ask(m.Commit(reservation, 0, 0, DIGESTS)) == m.Counted(1)
    assert is_refused(mine.ask(m.Commit(reservation, 0, 0, DIGESTS)), "give those that follow the last")
    assert is_refused(mine.ask(m.Commit(reservation, 1, 1, DIGESTS)), "part 1", "the caller's to fill")
    assert mine.ask(m.Commit(reservation, 0, 1, DIGESTS * (BLOCKS - 1))) == m.Counted(BLOCKS)


def test_a_session_holds_so_many_leases_and_no_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all its connections together; another session has as many."""
    assert MAX_LEASES < MAX_LEASED_BLOCKS
    mine, number = place.peer()
    store(mine, number)
    monkeypatch.setattr("kvstore.service.dispatch.MAX_LEASES", 3)
    held = [lease(mine, number) for _ in range(3)]
    again, _ = place.peer()
    for peer in (mine, again):
        answer = peer.ask(m.LeasePrefix(number, KEYS, 0, 1000))
        assert isinstance(answer, m.Leased) and not answer.reply.lease
        assert answer.reply.reason is MissReason.PINNED_FULL and "3 leases" in answer.reply.detail
    other, _ = place.peer(b"u" * 16)
    lease(other, number)
    mine.ask(m.Release(held[:1]))
    lease(again, number)
    monkeypatch.setattr("kvstore.service.dispatch.MAX_LEASES", MAX_LEASES)
    monkeypatch.setattr("kvstore.service.dispatch.MAX_LEASED_BLOCKS", 4 * BLOCKS - 1)
    answer = mine.ask(m.LeasePrefix(number, KEYS, 0, 1000))
    assert isinstance(answer, m.Leased) and answer.reply.reason is MissReason.PINNED_FULL
    assert f"of {4 * BLOCKS - 1}" in answer.reply.detail


def test_what_the_leases_of_a_tenant_name_is_bounded_by_places(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks times parts, of all its sessions: with another session nobody has more, and there is some left for it."""
    most = 12 * BLOCKS
    monkeypatch.setattr("kvstore.service.sessions.MAX_LEASED_PLACES", most)
    monkeypatch.setattr("kvstore.service.dispatch.MAX_LEASED_PLACES", most)
    mine, number = place.peer()
    store(mine, number)
    held = [lease(mine, number) for _ in range(6)]
    again, _ = place.peer()
    for peer in (mine, again):
        answer = peer.ask(m.LeasePrefix(number, KEYS, 0, 1000))
        assert isinstance(answer, m.Leased) and not answer.reply.lease
        assert answer.reply.reason is MissReason.PINNED_FULL
        assert f"{6 * BLOCKS} places" in answer.reply.detail and f"may name {most}" in answer.reply.detail
    for at, more in enumerate([3, 1, 1, 0]):
        peer, _ = place.peer(bytes([at]) * 16)
        for _ in range(more):
            lease(peer, number)
        answer = peer.ask(m.LeasePrefix(number, KEYS, 0, 1000))
        assert isinstance(answer, m.Leased) and answer.reply.reason is MissReason.PINNED_FULL
    theirs, their_number = place.peer(is_other=True)
    store(theirs, their_number)
    lease(theirs, their_number)
    mine.ask(m.Release(held))
    lease(mine, number)


def test_what_is_named_is_paid_for_by_blocks_and_parts(place: Place) -> None:
    """A lease when it is asked for, and a release, which names it by its number or by its request."""
    mine, number = place.peer()
    peer, _ = place.peer(b"u" * 16)
    layout = small_layout(layers=4, layer_shards=2, head_shards=2)
    answer = peer.ask(m.OpenNamespace(Namespace("sharded", layout, "raw").pack(), [4096] * 4))
    assert isinstance(answer, m.Granted)
    store(mine, number)
    held = lease(mine, number)
    handlers, callers = place.sidecar.handlers, place.sidecar.sessions._callers.values()
    (caller,) = [one for one in callers if one.session.leases]
    (sharded,) = [one for one in callers if len(one.namespaces) == 2]
    asked = m.LeasePrefix(answer.grant.number, KEYS, 0, 0.0)
    assert handlers.cost(sharded, asked) == 4 * handlers.cost(caller, m.LeasePrefix(number, KEYS, 0, 0.0)) > 0
    caller.session.leases[held].places = 1 << 20
    named, unnamed = (handlers.cost(caller, m.Release([one])) for one in (held, held + 1))
    assert named - unnamed == handlers.cost(caller, m.ReleaseRequest("r")) == 2048
    assert handlers.cost(caller, m.Release([held, held])) - 2 * unnamed == 2048
    assert handlers.cost(caller, m.ReleaseRequest("s")) == 0


@pytest.mark.parametrize("how", ["release", "request", "close"])
def test_what_many_leases_pinned_is_given_back_behind_the_answer(
    how: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door's own thread does one piece of it, and no more."""
    monkeypatch.setattr("kvstore.core.shared.ENDED_PLACES", 2)
    mine, number = place.peer()
    store(mine, number)
    held = [lease(mine, number) for _ in range(40)]
    assert place.sidecar.store.usage().pinned_bytes > 0
    if how == "close":
        mine.close()
    else:
        assert mine.ask(m.Release(held) if how == "release" else m.ReleaseRequest("r")) == m.Done()
    wait_until(lambda: not place.sidecar.core.is_ending and place.usage[0] == 0)
    assert place.sidecar.store.usage().pinned_bytes == 0
    place.sidecar.store.check()


def test_whose_keys_are_taken_away_is_shown_out_and_nobody_else(place: Place) -> None:
    """What a connection still asked would be asked under keys that are no more."""
    mine, _ = place.peer()
    again, _ = place.peer(b"u" * 16)
    theirs, number = place.peer(is_other=True)
    sidecar = place.sidecar
    assert sidecar.door.disconnect(sidecar.store.tenant_keys(sidecar.store.tenant).tenant)
    for peer in (mine, again):
        peer.socket.settimeout(20)
        assert peer.reply() is None
    assert theirs.ask(m.MatchPrefix(number, KEYS)).reply.blocks == 0  # type: ignore[union-attr]
    place.peer()
