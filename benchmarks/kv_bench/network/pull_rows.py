"""`benches.py network`, rows from node to node: frames pulled from another process, verified, into slots.

Each way beside the raw stream of the same run: as many bytes by `sendall` of each frame on one side and `recv_into` the
same slots on the other, over loopback. Beside what is sealed: how fast one core seals, and nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic, process_time, sleep
from typing import Any

from kv_bench.network.pull_holder import CLEAR, CPU, RAW, SEALED, SECRET, UCX, key_of, stamp_of
from kvstore.bench.child import Child
from kvstore.bench.measure import Cost, Stopwatch, Turn, against
from kvstore.bench.row import BenchResult, Row, Section, Target, rate_row
from kvstore.peers.checks import FrameChecks
from kvstore.peers.reader import PullTransport
from kvstore.peers.sealed import FRAMES, PIECE_BYTES, FrameSeal
from kvstore.peers.sockets import SocketPullTransport
from kvstore.peers.transport import RECORD, PullOffer, numeric_address
from kvstore.peers.ucx import UcxPullTransport
from tiering.clock import SystemClock

ONE, BESIDE, SEALED_ROW, CIPHER_ROW, UCX_ROW = (
    "sockets, verified",
    "sockets, digests on a second thread",
    "sockets, sealed",
    "AES-256-GCM of one core",
    "UCX over TCP",
)
TARGETS = {ONE: 0.78, BESIDE: 0.85, SEALED_ROW: 0.65}
IDLE_TARGET, IDLE_SECONDS = 0.03, 2.0
OPTIONS = {"TLS": "tcp", "WARN_UNUSED_ENV_VARS": "n"}
LONGEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PullBenchOptions:
    """frames: in a turn, each into a slot of its own. payload_bytes: of each."""

    frames: int = 48
    payload_bytes: int = 2 << 20
    laps: int = 25


def run(options: PullBenchOptions, say: Callable[[str], None]) -> BenchResult:
    """Every way that this machine has."""
    clock = SystemClock()
    ways: dict[str, tuple[str, PullTransport]] = {
        ONE: (CLEAR, SocketPullTransport(clock)),
        BESIDE: (CLEAR, SocketPullTransport(clock, checks_beside=True)),
    }
    if importlib.util.find_spec("cryptography") is not None:
        ways[SEALED_ROW] = (SEALED, SocketPullTransport(clock, seal="always", checks_beside=True))
    if importlib.util.find_spec("ucxx") is not None:
        ways[UCX_ROW] = (UCX, UcxPullTransport(clock, options=OPTIONS))
    stamp = stamp_of(options.payload_bytes)
    memory = mmap.mmap(-1, options.frames * stamp.frame_bytes)
    memory.write(bytes(len(memory)))
    whole = memoryview(memory)
    slots = [whole[at : at + stamp.frame_bytes] for at in range(0, len(whole), stamp.frame_bytes)]
    check = FrameChecks([stamp.pack()], [key_of(number) for number in range(options.frames)])
    job: dict[str, Any] = {"frames": options.frames, "payload_bytes": options.payload_bytes, "options": OPTIONS}
    job["doors"] = sorted({door for door, _ in ways.values()})
    with Child("kv_bench.network.pull_holder", json.dumps(job)) as holder:
        ask = holder.ask
        with socket.create_connection(numeric_address(ask(RAW))) as raw:
            say(f"pulling, {options.laps} laps")
            turns: dict[str, Turn] = {
                name: partial(_pull, ask, door, way, slots, check) for name, (door, way) in ways.items()
            }
            if SEALED_ROW in ways:
                turns[CIPHER_ROW] = partial(_seal, FrameSeal(SECRET), slots)
            found = against(partial(_stream, raw, slots), turns, options.laps)
        idle = None
        if UCX_ROW in ways:
            say("idle")
            idle = _idle(ask, ways[UCX_ROW][1])
    size = options.frames * stamp.frame_bytes
    rows = [rate_row({"way": name}, one, size, "raw stream", _wanted(name)) for name, one in found.items()]
    return BenchResult("network: peers", options, _sections(rows, idle), {"frame_bytes": stamp.frame_bytes})


def _wanted(way: str) -> Target | None:
    return Target(TARGETS[way]) if way in TARGETS else None


def _sections(rows: list[Row], idle: float | None) -> list[Section]:
    words = ["pip install 'prefix-kvstore[ucx]' brings the row of UCX"] if idle is None else []
    for ratio in (row.ratio for row in rows if row["way"] == CIPHER_ROW and row.ratio is not None):
        most = ratio / (1 + ratio)
        words.append(f"a thread that seals a frame, then sends it: at most {most:.2f} of the raw stream")
    sections = [Section(rows, "frames from node to node, over loopback", "; ".join(words))]
    if idle is not None:  # of a puller and a door together, while a connection has nothing to do
        wanted = Target(IDLE_TARGET, is_least=False, of="value")
        sections.append(Section([Row({"figure": "UCX while idle"}, idle, "of a core", target=wanted)], name="idle"))
    return sections


def _pull(
    ask: Callable[[str], Any], door: str, way: PullTransport, slots: list[memoryview], check: FrameChecks
) -> Cost:
    deadline = monotonic() + LONGEST_SECONDS
    reader = way.connect(_offer(ask, door), SECRET, deadline)
    watch = Stopwatch()
    pulled = reader.pull(slots, check, deadline)
    cost = watch.cost()
    reader.close()
    assert pulled == len(slots), reader.ended
    return cost


def _stream(raw: socket.socket, slots: list[memoryview]) -> Cost:
    watch = Stopwatch()
    raw.sendall(b"g")
    for slot in slots:
        view = slot
        while view:
            count = raw.recv_into(view)
            assert count, "the holder ended"
            view = view[count:]
    return watch.cost()


def _seal(seal: FrameSeal, slots: list[memoryview]) -> Cost:
    """As a door does, and not sent."""
    ring = memoryview(bytearray(PIECE_BYTES))
    watch = Stopwatch()
    for number, slot in enumerate(slots):
        sealing = seal.sealing(FRAMES, number, bytes(RECORD.size))
        for at in range(0, len(slot), PIECE_BYTES):
            sealing.update_into(slot[at : at + PIECE_BYTES], ring)
        sealing.finalize()
    return watch.cost()


def _idle(ask: Callable[[str], Any], way: PullTransport) -> float:
    """Of both processes together, while a connection is open and idle."""
    reader = way.connect(_offer(ask, UCX), SECRET, monotonic() + LONGEST_SECONDS)
    before = process_time() + ask(CPU)
    sleep(IDLE_SECONDS)
    share = (process_time() + float(ask(CPU)) - before) / IDLE_SECONDS
    reader.close()
    return float(share)


def _offer(ask: Callable[[str], Any], door: str) -> PullOffer:
    said = ask(door)
    return PullOffer(**{**said, "token": bytes.fromhex(said["token"]), "frame_bytes": tuple(said["frame_bytes"])})
