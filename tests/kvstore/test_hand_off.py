"""Tickets by which one engine hands a prompt over to another: none is taken for another, and what they name is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from kvstore.block.account import MissReason
from kvstore.block.identity import Identity, NodeIdentity, TenantKeys
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedStore
from kvstore.protocol import messages as m
from kvstore.protocol.hand_off_ticket import HandOff, opened
from kvstore.protocol.messages import MAX_TICKET_SECONDS
from service.sidecar import Sidecar
from torture.peer import Peer, packed_namespace
from waiting import wait_until
from workbench import MODEL, ids, open_at, plausible_pages, small_layout

NAMESPACE, HEAD, NOW = bytes(range(16)), bytes(range(32)), 1_800_000_000.0
HERE = NodeIdentity(b"n" * 16, b"r" * 8)
MINE = Identity.of(TenantKeys.derive(b"s" * 32), HERE)
GOOD = HandOff(MINE.key_id, NAMESPACE, HEAD, 31, 64, HERE.node, HERE.incarnation, "", int(1000 * NOW) + 30_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    with open_at(tmp_path / "kv", dram="1MiB") as store:
        yield store


def look(text: str, identity: Identity = MINE, namespace: bytes = NAMESPACE, now: float = NOW) -> m.TicketOpened:
    return opened(text, identity, namespace, 64, now)


def test_a_ticket_says_what_was_sealed_and_is_short() -> None:
    text = GOOD.seal(MINE)
    assert look(text) == m.TicketOpened(HEAD, 31, 30.0)
    assert len(text) < 200


def test_any_other_character_anywhere_is_refused() -> None:
    """Also one that stands for the same bits, of which a text has several."""
    text = changed_as(GOOD, head=b"\xff" * 32, owner=HERE.node).seal(MINE)
    assert "_" in text and look(text).reason is None
    for at in range(len(text)):
        for other in map(chr, range(33, 127)):
            if other != text[at]:
                assert look(text[:at] + other + text[at + 1 :]).reason is MissReason.KEY_MISMATCH, (at, other)


def changed_as(hand_off: HandOff, **fields: object) -> HandOff:
    return msgspec.structs.replace(hand_off, **fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"namespace": bytes(16)}, MissReason.OTHER_NAMESPACE),
        ({"block_tokens": 128}, MissReason.OTHER_NAMESPACE),
        ({"owner": bytes(16)}, MissReason.STALE_HINT),
        ({"incarnation": bytes(8)}, MissReason.STALE_HINT),
        ({"until_ms": int(1000 * NOW)}, MissReason.STALE_HINT),
        ({"until_ms": -(1 << 60)}, MissReason.STALE_HINT),
        ({"blocks": 0}, MissReason.KEY_MISMATCH),
        ({"blocks": m.MAX_KEYS + 1}, MissReason.KEY_MISMATCH),
        ({"head": b"short"}, MissReason.KEY_MISMATCH),
        ({"door": "x" * 300}, MissReason.KEY_MISMATCH),
    ],
)
def test_what_is_old_or_of_elsewhere_has_a_name(fields: dict[str, object], reason: MissReason) -> None:
    told = look(changed_as(GOOD, **fields).seal(MINE))
    assert told.reason is reason and told.blocks == 0 and told.detail


@pytest.mark.parametrize("ahead_seconds", [-3600, 0, 3600, -(1 << 49), 1 << 50])
def test_clocks_of_two_nodes_are_not_compared(ahead_seconds: int) -> None:
    theirs = changed_as(GOOD, owner=bytes(16), until_ms=int(1000 * (NOW + ahead_seconds))).seal(MINE)
    told = opened(theirs, MINE, NAMESPACE, 64, NOW, of_others=True)
    assert (told.reason, told.head, told.blocks) == (None, HEAD, 31)
    assert 0 <= told.seconds <= MAX_TICKET_SECONDS


def test_another_tenants_is_told_by_its_key() -> None:
    theirs = Identity.of(TenantKeys.derive(b"t" * 32), HERE)
    told = look(changed_as(GOOD, key_id=theirs.key_id).seal(theirs))
    assert told.reason is MissReason.KEY_MISMATCH
    assert theirs.key_id.hex() in told.detail and MINE.key_id.hex() in told.detail
    forged = changed_as(GOOD, key_id=MINE.key_id).seal(theirs)
    assert look(forged).reason is MissReason.KEY_MISMATCH


@pytest.mark.parametrize("text", ["", "kv1.", "kv1.====", "kv2." + "A" * 200, "kv1." + "A" * 5000, "kv1.\n", "née"])
def test_what_is_no_ticket_is_a_miss(text: str) -> None:
    assert look(text).reason is MissReason.KEY_MISMATCH


# With a store ---------------------------------------------------------------------------------------------------------


def sealed(handle: NamespaceHandle, tokens: list[int], seconds: float = 60.0) -> str:
    answer = handle.submit_seal(handle.hashed(tokens), seconds).poll()
    assert answer is not None
    return answer.ticket


def test_a_store_opens_what_it_sealed_and_no_other_does(tmp_path: Path) -> None:
    layout = small_layout()
    with open_at(tmp_path / "kv", dram="1MiB") as store:
        handle, other = (store.namespace(model=name, layout=layout) for name in (MODEL, "another"))
        began = time.monotonic()
        ticket = sealed(handle, ids(300))
        told = handle.submit_open(ticket).poll()
        assert told is not None and (told.reason, told.blocks, told.head) == (None, 4, handle.hashed(ids(256)).keys[-1])
        assert 59.9 - (time.monotonic() - began) < told.seconds <= 60
        foreign = other.submit_open(ticket).poll()
        assert foreign is not None and foreign.reason is MissReason.OTHER_NAMESPACE
    with open_at(tmp_path / "other", dram="1MiB") as store:
        told = store.namespace(model=MODEL, layout=layout).submit_open(ticket).poll()
        assert told is not None and told.reason is MissReason.KEY_MISMATCH


def test_a_ticket_of_an_earlier_run_is_stale(tmp_path: Path) -> None:
    tickets = []
    for _ in range(2):
        with open_at(tmp_path / "kv", dram="1MiB") as store:
            handle = store.namespace(model=MODEL, layout=small_layout())
            tickets.append(sealed(handle, ids(128)))
            told = [handle.submit_open(one).poll() for one in tickets]
    assert [one and one.reason for one in told] == [MissReason.STALE_HINT, None]


def test_what_a_ticket_names_is_kept_while_others_have_to_go(tmp_path: Path) -> None:
    layout = small_layout()
    with open_at(tmp_path / "kv", dram="1MiB", extent="64KiB") as store:
        handle = store.namespace(model=MODEL, layout=layout)
        assert handle.put(ids(512), plausible_pages(layout, 8)).stored == 8
        control = ids(512, 10_000)
        assert handle.put(control, plausible_pages(layout, 8)).stored == 8
        sealed(handle, ids(512))
        for at in range(1, 40):
            handle.put(ids(512, 100_000 * at), plausible_pages(layout, 8))
        assert handle.match(control).blocks == 0
        assert handle.match(ids(512)).blocks == 8


def test_a_sidecar_seals_and_opens_for_its_tenants_clients(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as one, sidecar.client() as two:
        mine, theirs = (store.namespace(model=MODEL, layout=small_layout()) for store in (one, two))
        pending = mine.submit_seal(mine.hashed(ids(200)), 30.0)
        ticket = wait_until(pending.poll).ticket
        told = wait_until(theirs.submit_open(ticket).poll)
        assert told.reason is None and (told.blocks, told.head) == (3, theirs.hashed(ids(192)).keys[-1])
        assert wait_until(theirs.submit_open(ticket[:-3] + "AAA").poll).reason is MissReason.KEY_MISMATCH
        assert wait_until(theirs.submit_open("kv1." + "A" * 100_000).poll).reason is MissReason.KEY_MISMATCH
        assert theirs.match(ids(64)).blocks == 0, "the connection is as it was"


def test_odd_requests_about_tickets_cost_a_line(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, closing(Peer(str(sidecar.path))) as one:
        assert isinstance(one.ask(m.Hello(m.OLDEST_VERSION, m.NEWEST_VERSION)), m.Welcome)
        granted = one.ask(m.OpenNamespace(packed_namespace(), [8192]))
        assert isinstance(granted, m.Granted)
        number, key = granted.grant.number, bytes(32)
        for verb in (
            m.SealTicket(number, [key], 0.0),
            m.SealTicket(number, [key], float("nan")),
            m.SealTicket(number, [key], 1e9),
            m.SealTicket(number, [b""], 1.0),
            m.SealTicket(number + 1, [key], 1.0),
            m.OpenTicket(number + 1, "kv1."),
        ):
            answer = one.ask(verb)
            assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, verb
        told = one.ask(m.OpenTicket(number, "\u2603" * 2000))
        assert isinstance(told, m.TicketOpened) and told.reason is MissReason.KEY_MISMATCH
        sealed_one = one.ask(m.SealTicket(number, [key], 60.0))
        assert isinstance(sealed_one, m.Sealed)
        assert one.ask(m.OpenTicket(number, sealed_one.ticket)).blocks == 1  # type: ignore[union-attr]
