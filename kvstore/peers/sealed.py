"""Sealed frames: AES-256-GCM with a nonce for each message, and the message's record as associated data.

A key belongs to one connection (`tokens.seal_key`), and a nonce is the direction and a number that only rises, so none
is used twice. A data server seals pieces of a frame into a small ring while they are in the cache. A puller opens a
frame in its slot, whose content must not be used before the tag was compared. The one file that imports `cryptography`.
"""

from __future__ import annotations

import struct
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.peers import transport as t
from kvstore.peers.tokens import seal_key

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, modes
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256

    _IS_HERE = True
except ModuleNotFoundError:
    _IS_HERE = False

TAG_BYTES = 16
PIECE_BYTES = 1 << 20
_NONCE = struct.Struct(">IQ")
FRAMES, ASKED = 1, 2
"""Directions: the server's frames, and the puller's requests."""


def needs_sealing() -> None:
    """Raises `BadInput` if frames cannot be sealed here."""
    if not _IS_HERE:
        raise BadInput(
            "frames that leave this host are sealed, and the package cryptography is not installed; "
            "pip install 'prefix-kvstore[tls]', or keep the door for data on loopback"
        )


def seal_of(offer: t.PullOffer, secret: bytes, seal: str) -> FrameSeal | None:
    """The seal of an offer's frames, None if in clear; `PeerFault` if that is not allowed. seal: auto or always."""
    if offer.is_sealed:
        return FrameSeal(seal_key(offer.token, secret))
    if t.must_seal(t.numeric_address(offer.address)[0], seal):
        raise t.PeerFault(f"an offer of frames in clear at {offer.address}; they are sealed beyond loopback")
    return None


class FrameSeal:
    """Seals and opens the messages of one connection, one message at a time in each direction."""

    def __init__(self, key: bytes) -> None:
        needs_sealing()
        self._algorithm = AES256(key)

    def sealing(self, direction: int, number: int, record: bytes) -> Any:
        """`update_into` for each piece, `finalize`, then `tag`."""
        sealing = self._cipher(direction, number).encryptor()
        sealing.authenticate_additional_data(record)
        return sealing

    def opening(self, direction: int, number: int, record: bytes | memoryview) -> Any:
        """`update_into` for each piece, then `opened`."""
        opening = self._cipher(direction, number).decryptor()
        opening.authenticate_additional_data(record)
        return opening

    def opens(self, direction: int, number: int, record: bytes, message: memoryview, tag: bytes | bytearray) -> bool:
        """Open a message in place; returns whether message and record are intact."""
        opening = self.opening(direction, number, record)
        opening.update_into(message, message)
        try:
            opened(opening, tag)
        except t.PeerFault:
            return False
        return True

    def tag(self, direction: int, number: int, record: bytes) -> bytes:
        """Of a message that is only a record."""
        sealing = self.sealing(direction, number, record)
        sealing.finalize()
        tag: bytes = sealing.tag
        return tag

    def _cipher(self, direction: int, number: int) -> Cipher[Any]:
        return Cipher(self._algorithm, modes.GCM(_NONCE.pack(direction, number)))


def opened(opening: Any, tag: bytes | bytearray | memoryview) -> None:
    """Raises `PeerFault` if a bit of message or record was changed."""
    try:
        opening.finalize_with_tag(bytes(tag))
    except InvalidTag:
        raise t.PeerFault("a sealed message that was altered, or is another one") from None
