"""Matches through the API socket in `kvstore bench lookup`: by one client, and by several at once.

A sidecar in its own process holds whole prompts of minimal blocks. One client in this process asks for them in turn;
its limit is the chain of hashes, right before and right after. Then client processes ask at once, for some seconds at a
time; their limit is what the same processes hash when they do nothing else, which is what the cores give.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from types import TracebackType
from typing import IO, Any

import numpy as np
from rich.table import Table

from kvstore.bench.lookup_client import MODEL, READY, shape_of
from kvstore.bench.measure import Against, Cost, Turn, against, quantile
from kvstore.bench.rig import Chain, LookupOptions, PagePool, Prompts
from kvstore.bench.sidecar import LONGEST_SECONDS, Sidecar
from kvstore.block.errors import StoreError
from kvstore.client.handle import NamespaceHandle
from kvstore.config import MIN_DRAM_BYTES
from tiering.frame import frame_bytes

MATCH_TARGET = 2.97
"""Limit of match time / time of the chain of hashes: 0.8 ms where that is 0.27."""
CLIENTS_TARGET = 3.7
"""Time per match over all clients, in chains: 1,000 matches a second where the chain is 0.27 ms."""

_HEAD_START_SECONDS = 0.05
"""Time for all processes to read their order."""


@dataclass(frozen=True, slots=True)
class DoorMatch:
    """Matches by one client, of prompts in turn, in milliseconds beside the bare chain's: medians and 99th percentiles.

    times_chain: median over laps of their quotient, and its quartiles.
    """

    blocks: int
    match_ms: float
    match_ms_p99: float
    chain_ms: float
    chain_ms_p99: float
    times_chain: float
    times_chain_low: float
    times_chain_high: float


@dataclass(frozen=True, slots=True)
class ClientsMatch:
    """Clients that match at once. matches_per_second: of all. chains_per_second: the limit, the same processes only
    hashing. share: of the two, median over laps; share_low, share_high: quartiles. match_ms, match_ms_p99: a client's
    wait. times_chain: time per match / the chain of one client with the machine to itself."""

    clients: int
    matches_per_second: float
    chains_per_second: float
    share: float
    share_low: float
    share_high: float
    match_ms: float
    match_ms_p99: float
    times_chain: float


@dataclass(frozen=True)
class DoorResult:
    one: DoorMatch
    together: ClientsMatch

    def targets(self) -> list[tuple[str, float, float]]:
        """(what, measured, at most)."""
        return [
            ("match through the door / chain", self.one.times_chain, MATCH_TARGET),
            (f"{self.together.clients} clients, time per match / chain", self.together.times_chain, CLIENTS_TARGET),
        ]

    def to_dict(self) -> dict[str, object]:
        return {"match": asdict(self.one), "clients": asdict(self.together)}

    def render(self, console: Any) -> None:
        one, together = self.one, self.together
        table = Table("blocks", "match p50", "p99", "chain p50", "p99", "match / chain", "quartiles")
        times = (one.match_ms, one.match_ms_p99, one.chain_ms, one.chain_ms_p99)
        table.add_row(
            f"{one.blocks:,}",
            *(f"{milliseconds:.3f} ms" for milliseconds in times),
            f"{one.times_chain:.2f}",
            f"{one.times_chain_low:.2f} .. {one.times_chain_high:.2f}",
        )
        console.print("the same through a sidecar's socket, prompts in turn", table, sep="\n")
        table = Table("clients", "matches/s", "hashing only", "share", "quartiles", "match p50", "p99")
        table.add_row(
            str(together.clients),
            f"{together.matches_per_second:,.0f}",
            f"{together.chains_per_second:,.0f}/s",
            f"{together.share:.2f}",
            f"{together.share_low:.2f} .. {together.share_high:.2f}",
            f"{together.match_ms:.3f} ms",
            f"{together.match_ms_p99:.3f} ms",
        )
        console.print("by as many client processes together", table, sep="\n")


def run(options: LookupOptions, say: Callable[[str], None]) -> DoorResult:
    """Fill a sidecar, then match through its socket."""
    stored = options.small_blocks // options.prompt_blocks
    size = frame_bytes(shape_of(options).payload_bytes)
    dram = MIN_DRAM_BYTES + 2 * stored * options.prompt_blocks * size  # prompts need not end with an extent
    say("filling a sidecar")
    with Sidecar({"dram": dram, "nvme": "off"}) as sidecar:
        with sidecar.client() as client:
            handle = client.namespace(model=MODEL, layout=shape_of(options).layout)
            pages = PagePool(shape_of(options), options.prompt_blocks, 0, prompts=1).take()
            for number in range(stored):
                result = handle.put(Prompts(options)[number], pages)
                assert result.stored == options.prompt_blocks, result
            say(f"matching through the door, {options.door_laps} laps")
            one = _one(options, handle, stored)
        say(f"starting {options.clients} clients")
        with Clients(options, sidecar.socket, stored) as clients:
            say(f"matching by {options.clients} clients, {options.client_laps} laps")
            return DoorResult(one, _together(options, clients, one.chain_ms))


def _one(options: LookupOptions, handle: NamespaceHandle, stored: int) -> DoorMatch:
    prompts = Prompts(options)
    order = np.random.default_rng(7).permutation(stored).tolist()
    turns = count()

    def match() -> Cost:
        prompt = prompts[order[next(turns) % stored]]
        cpu, start = thread_time(), perf_counter()
        found = handle.match(prompt)
        cost = Cost(perf_counter() - start, thread_time() - cpu)
        assert found.blocks == options.prompt_blocks and found.reason is None, found
        return cost

    matches, chains = _TimedTurn(match), _TimedTurn(Chain(options).turn)
    found = against(chains, {"match": matches}, options.door_laps)["match"]
    return DoorMatch(
        stored * options.prompt_blocks,
        found.seconds * 1e3,
        quantile(matches.last(options.door_laps), 0.99) * 1e3,
        found.limit_seconds * 1e3,
        quantile(chains.last(options.door_laps), 0.99) * 1e3,
        1 / found.ratio,
        1 / found.high,
        1 / found.low,
    )


class _TimedTurn:
    """A turn that also records each single time."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._walls: list[float] = []

    def __call__(self) -> Cost:
        cost = self._turn()
        self._walls.append(cost.wall)
        return cost

    def last(self, turns: int) -> list[float]:
        """Without the earlier ones, which warm up."""
        return self._walls[-turns:]


def _together(options: LookupOptions, clients: Clients, chain_ms: float) -> ClientsMatch:
    found: Against = against(clients.hash, {"match": clients.match}, options.client_laps)["match"]
    waited = list(chain(*clients.waits[-options.client_laps :]))
    return ClientsMatch(
        options.clients,
        1 / found.seconds,
        1 / found.limit_seconds,
        found.ratio,
        found.low,
        found.high,
        median(waited) * 1e3,
        quantile(waited, 0.99) * 1e3,
        found.seconds * 1e3 / chain_ms,
    )


class Clients:
    """Client processes of one sidecar; see `lookup_client`. A context manager that ends them."""

    def __init__(self, options: LookupOptions, socket: str, stored: int) -> None:
        """stored: prompts. Raises `StoreError` if a client does not start."""
        self._seconds = options.client_seconds
        self.waits: list[list[float]] = []
        """For each turn, the seconds of every match."""
        self._scratch = tempfile.TemporaryDirectory(prefix="kvstore-")
        self._errors = Path(self._scratch.name) / "errors"
        jobs = [
            {"socket": socket, "number": number, "prompts": stored, "options": asdict(options)}
            for number in range(options.clients)
        ]
        with self._errors.open("ab") as errors:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "kvstore.bench.lookup_client", json.dumps(job)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                for job in jobs
            ]
        try:
            for process in self._processes:
                said = self._line(process)
                assert said == READY, said
        except BaseException:
            self.close()
            raise

    def match(self) -> Cost:
        """All match for a while; returns the cost per match."""
        cost, seconds = self._turn("match")
        self.waits.append(seconds)
        return cost

    def hash(self) -> Cost:
        """All hash for a while; returns the cost per chain."""
        return self._turn("hash")[0]

    def close(self) -> None:
        for process in self._processes:
            with suppress(BrokenPipeError):
                _stream(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _stream(process.stdout).close()
        self._scratch.cleanup()

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _turn(self, work: str) -> tuple[Cost, list[float]]:
        start = perf_counter() + _HEAD_START_SECONDS
        order = json.dumps({"work": work, "start": start, "end": start + self._seconds})
        for process in self._processes:
            with suppress(BrokenPipeError):  # it ended; the missing answer reports why
                print(order, file=process.stdin, flush=True)
        answers = [json.loads(self._line(process)) for process in self._processes]
        seconds = list(chain(*(answer["seconds"] for answer in answers)))
        if not seconds:
            raise StoreError(f"nothing was done in {self._seconds} s; give the clients longer")
        return Cost(self._seconds / len(seconds), sum(answer["cpu"] for answer in answers) / len(seconds)), seconds

    def _line(self, process: subprocess.Popen[str]) -> str:
        line = _stream(process.stdout).readline().strip()
        if not line:
            process.wait(LONGEST_SECONDS)
            said = self._errors.read_text(errors="replace").strip()
            raise StoreError(f"a client ended with {process.returncode}: {said[-500:]}")
        return line


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
