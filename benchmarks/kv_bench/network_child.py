"""Processes beside `kvstore bench network`, by the role in their job:

    flood   on one core, keeps so many gRPC matches under way until the time of the host-wide clock that each line has,
            and answers how many calls succeeded and how many failed
    holder  has frames, and doors to pull them through: it answers a door's name with an offer
    raw     a raw socket, over TCP of loopback or at a path. `g` asks for all of its bytes; `s` announces as many, and
            is answered by a byte

They answer `ready`, or where they listen, once they can be asked.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from time import perf_counter
from typing import Any

import grpc

from kv_bench.process import HOST, Parent
from kvstore.peers.door import SocketFrameDoor
from kvstore.peers.transport import FrameDoor, OfferedFrames
from kvstore.peers.ucx import UcxFrameDoor
from kvstore.wire.store_pb2 import MatchRequest, Prompt
from kvstore.wire.store_pb2_grpc import StoreStub
from tiering.clock import SystemClock
from tiering.frame import HEADER_BYTES, Sealer, Stamp, digest

STREAMS = 128
"""Per gRPC connection: the server's limit."""
NICE = 10
GET, SET = b"g", b"s"
SECRET, SLICES = bytes(32), 32
CLEAR, SEALED, UCX = "clear", "sealed", "ucx"


def stub_of(address: str) -> StoreStub:
    """A client on its own connection."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    return StoreStub(grpc.insecure_channel(address, options))


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def fill(one: socket.socket, view: memoryview) -> None:
    """Receive until the view is full."""
    while view:
        count = one.recv_into(view)
        if not count:
            raise ConnectionResetError("the raw peer ended")
        view = view[count:]


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Frames:
    """Whole frames in slots of their own, in one mapping like an extent."""

    def __init__(self, payload_bytes: int, count: int) -> None:
        """They are zeros until `make`."""
        self.stamp = Stamp(bytes(8), 0, bytes(16), bytes(32), "raw", 0, 1, 64, SLICES, payload_bytes)
        self.size = self.stamp.frame_bytes
        whole = memoryview(mmap.mmap(-1, count * self.size))
        self.slots = [whole[at : at + self.size] for at in range(0, len(whole), self.size)]
        for slot in self.slots:
            slot[:] = bytes(self.size)

    def make(self) -> None:
        """Of random payloads."""
        sealer, size = Sealer(self.stamp, bytes(32)), self.stamp.slice_bytes
        for number, slot in enumerate(self.slots):
            payload = slot[HEADER_BYTES : HEADER_BYTES + self.stamp.payload_bytes]
            payload[:] = os.urandom(len(payload))
            digests = [digest(payload[at : at + size]) for at in range(0, len(payload), size)]
            slot[:HEADER_BYTES] = sealer.seal(key_of(number), bytes(32), number, 1, digests)


def flood(parent: Parent) -> None:
    """job: `address`, `token`, `namespace`, `keys` in hexadecimal, `calls` in flight."""
    job = parent.job
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(NICE)  # stands for another host, which takes none of our CPU
    stubs = [stub_of(job["address"]) for _ in range(-(-job["calls"] // STREAMS))]
    request = MatchRequest(namespace=job["namespace"], prompt=Prompt(keys=bytes.fromhex(job["keys"])))
    metadata = bearer(job["token"])
    parent.answer("ready")
    for end in parent:
        ended: list[bool] = []  # whether each succeeded
        room = threading.Semaphore(job["calls"])

        def is_over(call: Any, ended: list[bool] = ended, room: threading.Semaphore = room) -> None:
            ended.append(call.code() is grpc.StatusCode.OK)
            room.release()

        number = 0
        while perf_counter() < end:
            if not room.acquire(timeout=0.1):
                continue
            call = stubs[number % len(stubs)].Match.future(request, timeout=30, metadata=metadata)
            call.add_done_callback(is_over)
            number += 1
        for _ in range(job["calls"]):
            room.acquire(timeout=30)
        parent.answer({"good": ended.count(True), "others": ended.count(False)})


def holder(parent: Parent) -> None:
    """job: `frames`, `payload_bytes`, `doors` by name, and UCX's `options`."""
    job, clock = parent.job, SystemClock()
    frames = Frames(job["payload_bytes"], job["frames"])
    frames.make()
    doors: dict[str, FrameDoor] = {}
    for name in job["doors"]:
        if name == UCX:
            doors[name] = UcxFrameDoor(f"{HOST}:0", clock, os.urandom, options=job["options"])
        else:
            doors[name] = SocketFrameDoor(f"{HOST}:0", clock, os.urandom, seal="always" if name == SEALED else "auto")
    parent.answer("ready")
    for asked in parent:
        offer = doors[asked].offer(OfferedFrames(frames.slots, (frames.size,), lambda: None), SECRET)
        answer: dict[str, Any] = {"token": offer.token.hex(), "address": offer.address, "transport": offer.transport}
        answer |= {"blocks": offer.blocks, "frame_bytes": offer.frame_bytes, "is_sealed": offer.is_sealed}
        parent.answer(answer)


def raw(parent: Parent) -> None:
    """job: `size` in bytes, `path` or "". Serves connections one after another."""
    size, path = parent.job["size"], parent.job["path"]
    door = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    door.bind(path or (HOST, 0))
    door.listen()
    given, taken = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size))

    def serve() -> None:
        while True:
            one, _ = door.accept()
            if not path:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while asked := one.recv(1):
                if asked == GET:
                    one.sendall(given)
                else:
                    fill(one, taken)
                    one.sendall(asked)

    threading.Thread(target=serve, daemon=True).start()
    parent.answer(path or door.getsockname()[1])
    for _ in parent:
        pass


if __name__ == "__main__":
    _parent = Parent()
    {"flood": flood, "holder": holder, "raw": raw}[_parent.job["role"]](_parent)
