"""No nonce is used for two messages."""

from __future__ import annotations

from kvstore.peers import sealed
from kvstore.peers import transport as t

KEY = b"k" * 32
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
