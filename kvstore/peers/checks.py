"""The checks of a pulled frame, before a sidecar is asked to adopt it."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, FrameHeader, names_block, parse_header, verify_payload


class FrameCheck:
    """Of one frame, while it arrives: slot class, block and part, and every digest of its payload. A layer slice is
    compared as soon as it is whole, while the processor's caches still have it. Not thread-safe."""

    def __init__(self, stamp: bytes, key: bytes, frame: memoryview) -> None:
        """stamp: of the slot class, packed. key: of the block. frame: the memory in which it arrives."""
        self._stamp, self._key, self._frame = stamp, key, frame
        self._header: FrameHeader | None = None
        self._compared = 0
        self._is_wrong = False

    @property
    def is_right(self) -> bool:
        """Whether header and payload have arrived, and are what they should be."""
        return self._header is not None and self._compared == self._header.stamp.slices

    def arrived(self, count: int) -> None:
        """The first `count` bytes are there, and stay as they are. Never raises."""
        if self._header is None and not self._is_wrong and count >= HEADER_BYTES:
            self._read_header()
        if self._header is None or self._is_wrong:
            return
        stamp = self._header.stamp
        whole = min(stamp.slices, (count - HEADER_BYTES) // stamp.slice_bytes)
        try:
            verify_payload(self._header, self._frame[HEADER_BYTES:], self._compared, whole)
        except BlockCorrupt:
            self._is_wrong = True
        else:
            self._compared = whole

    def _read_header(self) -> None:
        raw = bytes(self._frame[:HEADER_BYTES])
        try:
            if names_block(raw, self._stamp, self._key):
                self._header = parse_header(raw)
        except BlockCorrupt:
            pass
        self._is_wrong = self._header is None


class FrameChecks:
    """The `check` of a pull, for the frames of several blocks.

    stamps: packed, by part, as the sidecar grants them. keys: of the blocks that the slots of this call are for, in
    order. The sidecar checks the header's MAC, for which it alone has the key.
    """

    def __init__(self, stamps: Sequence[bytes], keys: Sequence[bytes]) -> None:
        self._stamps, self._keys = stamps, keys

    def of(self, number: int, frame: memoryview) -> FrameCheck:
        """Of a frame that is to arrive. number: of a frame of these blocks, in the order of an offer."""
        block, part = divmod(number, len(self._stamps))
        return FrameCheck(self._stamps[part], self._keys[block], frame)

    def __call__(self, number: int, frame: memoryview) -> bool:
        """Whether a frame that has arrived is what it should be."""
        check = self.of(number, frame)
        check.arrived(len(frame))
        return check.is_right
