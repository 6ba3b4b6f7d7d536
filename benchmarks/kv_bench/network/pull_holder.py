"""The holder of `benches.py network`: a process with frames, doors to pull them through, and a raw stream of them.

It answers each line that it reads with one: a server's name with an offer, `raw` with the address of a stream of all
frames, `cpu` with its CPU seconds. It ends with its standard input.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
from time import process_time
from typing import Any

from kvstore.peers.door import SocketFrameDoor
from kvstore.peers.transport import FrameDoor, OfferedFrames, written_address
from kvstore.peers.ucx import UcxFrameDoor
from tiering.clock import SystemClock
from tiering.frame import HEADER_BYTES, Sealer, Stamp, digest

SECRET, SLICES = bytes(32), 32
CLEAR, SEALED, UCX, RAW, CPU = "clear", "sealed", "ucx", "raw", "cpu"


def stamp_of(payload_bytes: int) -> Stamp:
    return Stamp(bytes(8), 0, bytes(16), bytes(32), "raw", 0, 1, 64, SLICES, payload_bytes)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def main(job: dict[str, Any]) -> None:
    """job: `frames`, `payload_bytes`, `doors` by name, and UCX's `options`."""
    stamp, here, clock = stamp_of(job["payload_bytes"]), "127.0.0.1:0", SystemClock()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # UCX warns on standard output
    spans = _frames(stamp, job["frames"])
    doors: dict[str, FrameDoor] = {}
    for name in job["doors"]:
        if name == UCX:
            doors[name] = UcxFrameDoor(here, clock, os.urandom, options=job["options"])
        else:
            doors[name] = SocketFrameDoor(here, clock, os.urandom, seal="always" if name == SEALED else "auto")
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_stream, args=(raw, spans), daemon=True).start()
    for line in sys.stdin:
        asked = line.strip()
        if asked == RAW:
            answer: Any = written_address(*raw.getsockname()[:2])
        elif asked == CPU:
            answer = process_time()
        else:
            offer = doors[asked].offer(OfferedFrames(spans, (stamp.frame_bytes,), lambda: None), SECRET)
            answer = {"token": offer.token.hex(), "address": offer.address, "transport": offer.transport}
            answer |= {"blocks": offer.blocks, "frame_bytes": offer.frame_bytes, "is_sealed": offer.is_sealed}
        print(json.dumps(answer), file=answers, flush=True)


def _frames(stamp: Stamp, count: int) -> list[memoryview]:
    """In one mapping, like an extent."""
    whole = memoryview(mmap.mmap(-1, count * stamp.frame_bytes))
    spans = [whole[at : at + stamp.frame_bytes] for at in range(0, len(whole), stamp.frame_bytes)]
    sealer, size = Sealer(stamp, bytes(32)), stamp.slice_bytes
    for number, span in enumerate(spans):
        payload = span[HEADER_BYTES : HEADER_BYTES + stamp.payload_bytes]
        payload[:] = os.urandom(len(payload))
        digests = [digest(payload[at : at + size]) for at in range(0, len(payload), size)]
        span[:HEADER_BYTES] = sealer.seal(key_of(number), bytes(32), number, 1, digests)
    return spans


def _stream(listener: socket.socket, spans: list[memoryview]) -> None:
    """Send all frames for each byte received."""
    while True:
        one, _ = listener.accept()
        with one:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while one.recv(1):
                for span in spans:
                    one.sendall(span)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
