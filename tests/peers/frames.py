"""Frames as a store has them, for pulls: real headers over random payloads, and what counts when they are released."""

from __future__ import annotations

import os
import random
import threading

from kvstore.peers.reader import FrameChecks
from kvstore.peers.transport import OfferedFrames
from tiering.errors import BlockCorrupt
from tiering.frame import HEADER_BYTES, Sealer, Stamp, digest, open_header

MAC_KEY = b"m" * 32
SLICES, SLICE_BYTES = (4, 3), (8192, 5000)
"""By part: the second one's payload is padded."""


class Source:
    """Some blocks of two parts. Also the `MacKeys` of its headers."""

    def __init__(self, blocks: int, seed: int = 0, slice_bytes: tuple[int, int] = SLICE_BYTES) -> None:
        rng = random.Random(seed)
        self.keys = [rng.randbytes(32) for _ in range(blocks)]
        self.stamps = [
            Stamp(b"key-of-8", 1, b"t" * 16, b"n" * 32, "raw", part, 2, 64, slices, slices * size)
            for part, (slices, size) in enumerate(zip(SLICES, slice_bytes, strict=True))
        ]
        self.frame_bytes = tuple(stamp.frame_bytes for stamp in self.stamps)
        self.spans = [self._frame(rng, at) for at in range(2 * blocks)]
        self.releases = 0
        self.sent: list[int] = []
        self.is_released = threading.Event()

    def _frame(self, rng: random.Random, at: int) -> memoryview:
        block, part = divmod(at, 2)
        stamp = self.stamps[part]
        payload = rng.randbytes(stamp.payload_bytes)
        size = stamp.slice_bytes
        digests = [digest(payload[one * size : (one + 1) * size]) for one in range(stamp.slices)]
        parent = self.keys[block - 1] if block else bytes(32)
        header = Sealer(stamp, MAC_KEY).seal(self.keys[block], parent, block, rng.getrandbits(60), digests)
        return memoryview((header + payload).ljust(stamp.frame_bytes, b"\0"))

    def offered(self) -> OfferedFrames:
        def release() -> None:
            self.releases += 1
            self.is_released.set()

        return OfferedFrames(list(self.spans), self.frame_bytes, release, self.sent.append)

    def slots(self, first: int = 0, frames: int | None = None) -> list[memoryview]:
        stop = len(self.spans) if frames is None else first + frames
        return [memoryview(bytearray(span.nbytes)) for span in self.spans[first:stop]]

    def check(self, first_block: int = 0) -> FrameChecks:
        return FrameChecks([stamp.pack() for stamp in self.stamps], self.keys[first_block:])

    def has(self, slots: list[memoryview], first: int = 0) -> bool:
        """Whether these slots hold its frames, to the last byte."""
        return all(slot == span for slot, span in zip(slots, self.spans[first:], strict=False))

    def may_serve(self, slot: memoryview, at: int) -> bool:
        """Whether an engine could only be given the right bytes: the payload is right, and the sidecar would take no
        other header."""
        payload = self.stamps[at % 2].payload_bytes
        if slot[HEADER_BYTES:][:payload] != self.spans[at][HEADER_BYTES:][:payload]:
            return False
        if slot[:HEADER_BYTES] == self.spans[at][:HEADER_BYTES]:
            return True
        try:
            open_header(bytes(slot[:HEADER_BYTES]), self)
        except BlockCorrupt:
            return True
        return False

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes:
        return MAC_KEY

    def slab_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes:
        return MAC_KEY


SECRET = b"s" * 32
random_bytes = os.urandom
