"""Secrets bind a pull to its nodes, namespace and keys, tokens are good once, and no nonce is used for two messages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from kvstore.peers import sealed
from kvstore.peers import transport as t
from kvstore.peers.tokens import Offers, PullTerms, ask_mac, hello_for, pull_secret, seal_key
from peers.frames import SECRET, Source

KEY = b"i" * 32
TERMS = PullTerms(b"n" * 16, b"a" * 16, b"h" * 16, b"s" * 32, 3, (b"1" * 32, b"2" * 32))
OTHERS = [
    dataclasses.replace(TERMS, nonce=b"m" * 16),
    dataclasses.replace(TERMS, asking=b"b" * 16),
    dataclasses.replace(TERMS, holding=b"a" * 16),
    dataclasses.replace(TERMS, asking=TERMS.holding, holding=TERMS.asking),
    dataclasses.replace(TERMS, namespace=b"t" * 32),
    dataclasses.replace(TERMS, first_block=2),
    dataclasses.replace(TERMS, keys=TERMS.keys[:1]),
    dataclasses.replace(TERMS, keys=TERMS.keys[::-1]),
]


def test_a_mac_and_a_secret_are_of_their_terms_and_tenant_alone() -> None:
    mac = ask_mac(KEY, TERMS)
    macs = [ask_mac(KEY, terms) for terms in (TERMS, *OTHERS)] + [ask_mac(b"j" * 32, TERMS)]
    assert macs[0] == mac and len(set(macs)) == len(macs)
    nonce = b"o" * 16
    secrets = [pull_secret(KEY, terms, nonce) for terms in (TERMS, *OTHERS)]
    secrets += [pull_secret(b"j" * 32, TERMS, nonce), pull_secret(KEY, TERMS, b"p" * 16), mac]
    assert len(set(secrets)) == len(secrets) and {*map(len, secrets)} == {32}
    assert seal_key(b"1" * 32, SECRET) != seal_key(b"2" * 32, SECRET)


@pytest.fixture
def offers() -> Iterator[Offers]:
    numbers = itertools.count(1)
    offers = Offers(lambda count: next(numbers).to_bytes(count, "big"), most=3)
    yield offers
    offers.end_all()
    assert offers.pinned() == 0


def test_an_offer_is_taken_once_in_its_time_with_its_secret(offers: Offers) -> None:
    source = Source(1)
    offer = offers.add(source.offered(), SECRET, False, 100.0)
    right = hello_for(offer.token, SECRET, False)
    wrong = [
        hello_for(offer.token, b"x" * 32, False),
        hello_for(bytes(32), SECRET, False),
        hello_for(offer.token, SECRET, True),
        right[:4] + b"\x02" + right[5:],
        right[:-1] + bytes([right[-1] ^ 1]),
    ]
    assert [offers.take(hello, 101.0) for hello in wrong] == [None] * len(wrong)
    assert offers.take(right, 100.0 + t.OFFER_SECONDS) is None
    assert offers.take(right, 99.0 + t.OFFER_SECONDS) is offer
    assert offers.take(right, 101.0) is None
    assert offers.end_due(1e9) == float("inf") and source.releases == 0, "its connection ends it"
    offers.end(offer)
    offers.end(offer)
    assert source.releases == 1 and offer.frames is None


def test_no_byte_of_a_hello_is_the_holder_s_choice() -> None:
    """It chooses the token and where the puller connects: another service there would read it."""
    token = b"\r\nFLUSHALL\r\n".ljust(32, b" ")
    said = hello_for(token, SECRET, False)
    assert not any(token[at : at + 4] in said for at in range(12))
    assert said[:8] == t.HELLO_MAGIC + bytes([t.VERSION, 0, 0, 0])


RECORD = t.RECORD.pack(t.FRAME_MAGIC, 1, 0, 3, 4, 5, 8192)
PLAIN = bytes(range(256)) * 40


def said(seal: sealed.FrameSeal, direction: int, number: int, record: bytes = RECORD) -> tuple[bytes, bytes]:
    sealing, into = seal.sealing(direction, number, record), bytearray(len(PLAIN))
    for at in range(0, len(PLAIN), 3000):
        piece = PLAIN[at : at + 3000]
        sealing.update_into(piece, memoryview(into)[at : at + len(piece)])
    sealing.finalize()
    return bytes(into), sealing.tag


def test_no_two_messages_of_a_connection_have_one_nonce() -> None:
    seal = sealed.FrameSeal(KEY)
    kinds = [(direction, number) for direction in (sealed.FRAMES, sealed.ASKED) for number in range(5)]
    assert len({said(seal, *kind)[0] for kind in kinds}) == len(kinds), "the same message is another one each time"
    assert len({seal.tag(*kind, RECORD) for kind in kinds}) == len(kinds)
