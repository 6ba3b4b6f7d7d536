"""The checks of a pulled frame, before a sidecar is asked to adopt it."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, names_block, parse_header, verify_payload


class FrameChecks:
    """The `check` of a pull: slot class, block and part of a frame, and every digest of its payload.

    stamps: packed, by part, as the sidecar grants them. keys: of the blocks that the slots of this call are for, in
    order. The sidecar checks the header's MAC, for which it alone has the key.
    """

    def __init__(self, stamps: Sequence[bytes], keys: Sequence[bytes]) -> None:
        self._stamps, self._keys = stamps, keys

    def __call__(self, number: int, frame: memoryview) -> bool:
        """number: of a frame of these blocks, in the order of an offer."""
        raw = bytes(frame[:HEADER_BYTES])
        block, part = divmod(number, len(self._stamps))
        if not names_block(raw, self._stamps[part], self._keys[block]):
            return False
        try:
            verify_payload(parse_header(raw), frame[HEADER_BYTES:])
        except BlockCorrupt:
            return False
        return True
