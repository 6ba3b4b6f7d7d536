"""The flood of `kvstore bench network`: a process on one core that keeps so many gRPC matches under way."""

from __future__ import annotations

import os
import threading
from time import perf_counter
from typing import Any

import grpc

from kv_bench.process import Parent
from kvstore.wire.store_pb2 import MatchRequest, Prompt
from kvstore.wire.store_pb2_grpc import StoreStub

STREAMS = 128
"""Per connection: the server's limit."""
NICE = 10


def stub_of(address: str) -> StoreStub:
    """A client on its own connection."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    return StoreStub(grpc.insecure_channel(address, options))


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def main() -> None:
    parent = Parent()
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


if __name__ == "__main__":
    main()
