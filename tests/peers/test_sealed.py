"""What is sealed opens with the same key, direction, number and record, and no nonce is used for two messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.peers import sealed
from kvstore.peers import transport as t

KEY, OTHER = b"k" * 32, b"o" * 32
RECORD = t.RECORD.pack(t.FRAME_MAGIC, 1, 0, 3, 4, 5, 8192)
PLAIN = bytes(range(256)) * 40


def said(seal: sealed.FrameSeal, direction: int, number: int, record: bytes = RECORD) -> tuple[bytes, bytes]:
    sealing, into = seal.sealing(direction, number, record), bytearray(len(PLAIN))
    for at in range(0, len(PLAIN), 3000):
        piece = PLAIN[at : at + 3000]
        sealing.update_into(piece, memoryview(into)[at : at + len(piece)])
    sealing.finalize()
    return bytes(into), sealing.tag


def heard(seal: sealed.FrameSeal, direction: int, number: int, record: bytes, message: bytes, tag: bytes) -> bytes:
    opening, into = seal.opening(direction, number, record), bytearray(len(message))
    opening.update_into(message, into)
    sealed.opened(opening, tag)
    return bytes(into)


def test_what_was_sealed_opens_and_nothing_else_does() -> None:
    seal = sealed.FrameSeal(KEY)
    message, tag = said(seal, sealed.FRAMES, 5)
    assert heard(sealed.FrameSeal(KEY), sealed.FRAMES, 5, RECORD, message, tag) == PLAIN
    flipped = bytes([message[0] ^ 1]) + message[1:]
    wrong: list[Callable[[], bytes]] = [
        lambda: heard(sealed.FrameSeal(OTHER), sealed.FRAMES, 5, RECORD, message, tag),
        lambda: heard(seal, sealed.ASKED, 5, RECORD, message, tag),
        lambda: heard(seal, sealed.FRAMES, 6, RECORD, message, tag),
        lambda: heard(seal, sealed.FRAMES, 5, RECORD[:-1] + b"\x01", message, tag),
        lambda: heard(seal, sealed.FRAMES, 5, RECORD, flipped, tag),
        lambda: heard(seal, sealed.FRAMES, 5, RECORD, message[:-1], tag),
        lambda: heard(seal, sealed.FRAMES, 5, RECORD, message, tag[:-1] + bytes([tag[-1] ^ 1])),
    ]
    for hears in wrong:
        with pytest.raises(t.PeerFault, match="altered"):
            hears()


def test_no_two_messages_of_a_connection_have_one_nonce() -> None:
    seal = sealed.FrameSeal(KEY)
    kinds = [(direction, number) for direction in (sealed.FRAMES, sealed.ASKED) for number in range(5)]
    assert len({said(seal, *kind)[0] for kind in kinds}) == len(kinds), "the same message is another one each time"
    assert len({seal.tag(*kind, RECORD) for kind in kinds}) == len(kinds)
