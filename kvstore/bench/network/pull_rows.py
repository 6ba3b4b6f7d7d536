"""`kvstore bench network`, node to node: frames pulled from another process, verified, into slots.

Each way runs beside the raw stream of the same run: as many bytes by `sendall` of each frame on one side and
`recv_into` the same slots on the other, over loopback. For encrypted ways, also the rate at which one core encrypts.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from time import monotonic, perf_counter, process_time, sleep
from typing import Any

from rich.table import Table

from kvstore.bench.measure import Against, Cost, Turn, against
from kvstore.bench.network.pull_holder import CLEAR, CPU, RAW, SEALED, SECRET, UCX, key_of, stamp_of
from kvstore.peers.checks import FrameChecks
from kvstore.peers.sealed import FRAMES, PIECE_BYTES, FrameSeal
from kvstore.peers.sockets import SocketPullTransport
from kvstore.peers.transport import RECORD, PullOffer, PullTransport, numeric_address
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
    """frames: per turn, each into its own slot. payload_bytes: of each."""

    frames: int = 48
    payload_bytes: int = 2 << 20
    laps: int = 25


@dataclass(frozen=True)
class PullRow:
    """gbps, raw_gbps: medians. ratio: to the raw stream, median over laps, with quartiles. at_least: the target, if
    any."""

    what: str
    gbps: float
    raw_gbps: float
    ratio: float
    low: float
    high: float
    at_least: float | None
    met: bool | None


@dataclass(frozen=True)
class PullBenchResult:
    """ucx_idle: share of a core that a puller and a server use while a UCX connection is idle; None without ucxx."""

    frame_bytes: int
    rows: list[PullRow]
    ucx_idle: float | None

    @property
    def most_sealed(self) -> float | None:
        """The ratio of a thread that encrypts each frame and then sends it as the raw stream does."""
        speeds = [row.ratio for row in self.rows if row.what == CIPHER_ROW]
        return speeds[0] / (1 + speeds[0]) if speeds else None

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = {"bench": "network: peers", **asdict(self), "most_sealed": self.most_sealed}
        if self.ucx_idle is not None:
            what = "UCX, share of a core while idle"
            found["idle"] = {"what": what, "at_most": IDLE_TARGET, "met": self.ucx_idle <= IDLE_TARGET}
        return found

    def render(self, console: Any) -> None:
        table = Table("frames from node to node", "GB/s", "raw stream", "ratio", "quartiles", "target")
        for row in self.rows:
            word = "" if row.at_least is None else f"{row.at_least:.2f} {'met' if row.met else 'missed'}"
            spread = f"{row.low:.2f} to {row.high:.2f}"
            table.add_row(row.what, f"{row.gbps:.2f}", f"{row.raw_gbps:.2f}", f"{row.ratio:.2f}", spread, word)
        console.print(f"frames of {self.frame_bytes / (1 << 20):.2f} MiB, over loopback", table, sep="\n")
        if self.most_sealed is not None:
            console.print(
                f"a thread that seals a frame, then sends it: at most {self.most_sealed:.2f} of the raw stream"
            )
        if self.ucx_idle is not None:
            word = f"{IDLE_TARGET:.0%} {'met' if self.ucx_idle <= IDLE_TARGET else 'missed'}"
            console.print(f"UCX while idle: {self.ucx_idle:.1%} of a core, at most {word}")
        else:
            console.print("no row of UCX: pip install 'prefix-kvstore[ucx]'")


def run(options: PullBenchOptions, say: Callable[[str], None]) -> PullBenchResult:
    """Measure every way that this machine has."""
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
    job = {"frames": options.frames, "payload_bytes": options.payload_bytes, "options": OPTIONS}
    with _holder({**job, "doors": sorted({door for door, _ in ways.values()})}) as ask:
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
    rows = [_row(name, one, options.frames * stamp.frame_bytes) for name, one in found.items()]
    return PullBenchResult(stamp.frame_bytes, rows, idle)


def _row(what: str, found: Against, size: int) -> PullRow:
    least = TARGETS.get(what)
    speeds = size / found.seconds / 1e9, size / found.limit_seconds / 1e9
    return PullRow(
        what, *speeds, found.ratio, found.low, found.high, least, None if least is None else found.ratio >= least
    )


def _pull(
    ask: Callable[[str], Any], door: str, way: PullTransport, slots: list[memoryview], check: FrameChecks
) -> Cost:
    deadline = monotonic() + LONGEST_SECONDS
    reader = way.connect(_offer(ask, door), SECRET, deadline)
    began, worked = perf_counter(), process_time()
    pulled = reader.pull(slots, check, deadline)
    cost = Cost(perf_counter() - began, process_time() - worked)
    reader.close()
    assert pulled == len(slots), reader.ended
    return cost


def _stream(raw: socket.socket, slots: list[memoryview]) -> Cost:
    began, worked = perf_counter(), process_time()
    raw.sendall(b"g")
    for slot in slots:
        view = slot
        while view:
            count = raw.recv_into(view)
            assert count, "the holder ended"
            view = view[count:]
    return Cost(perf_counter() - began, process_time() - worked)


def _seal(seal: FrameSeal, slots: list[memoryview]) -> Cost:
    """Encrypt as a server does, without sending."""
    ring = memoryview(bytearray(PIECE_BYTES))
    began, worked = perf_counter(), process_time()
    for number, slot in enumerate(slots):
        sealing = seal.sealing(FRAMES, number, bytes(RECORD.size))
        for at in range(0, len(slot), PIECE_BYTES):
            sealing.update_into(slot[at : at + PIECE_BYTES], ring)
        sealing.finalize()
    return Cost(perf_counter() - began, process_time() - worked)


def _idle(ask: Callable[[str], Any], way: PullTransport) -> float:
    """CPU share of both processes while a connection is open and idle."""
    reader = way.connect(_offer(ask, UCX), SECRET, monotonic() + LONGEST_SECONDS)
    before = process_time() + ask(CPU)
    sleep(IDLE_SECONDS)
    share = (process_time() + float(ask(CPU)) - before) / IDLE_SECONDS
    reader.close()
    return float(share)


def _offer(ask: Callable[[str], Any], door: str) -> PullOffer:
    said = ask(door)
    return PullOffer(**{**said, "token": bytes.fromhex(said["token"]), "frame_bytes": tuple(said["frame_bytes"])})


@contextmanager
def _holder(job: dict[str, Any]) -> Iterator[Callable[[str], Any]]:
    """Yields a function that asks the other process."""
    command = [sys.executable, "-m", "kvstore.bench.network.pull_holder", json.dumps(job)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        asks, answers = holder.stdin, holder.stdout

        def ask(what: str) -> Any:
            print(what, file=asks, flush=True)
            return json.loads(answers.readline())

        try:
            yield ask
        finally:
            asks.close()
