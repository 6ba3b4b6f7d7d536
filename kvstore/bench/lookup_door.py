"""Matches through the API socket in `kvstore bench lookup`: by one client, and by several at once.

A sidecar in its own process holds whole prompts of minimal blocks. One client in this process asks for them in turn;
its limit is the chain of hashes, right before and right after. Then client processes ask at once, for some seconds at a
time; their limit is what the same processes hash when they do nothing else, which is what the cores give.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain, count
from statistics import median
from time import perf_counter, thread_time

import numpy as np

from kvstore.bench.child import Child
from kvstore.bench.lookup_client import MODEL, READY, shape_of
from kvstore.bench.measure import Cost, Stopwatch, Turn, against, quantile
from kvstore.bench.rig import Chain, LookupOptions, PagePool, Prompts
from kvstore.bench.row import Row, Target, time_row
from kvstore.bench.sidecar import Sidecar
from kvstore.block.errors import StoreError
from kvstore.client.handle import NamespaceHandle
from kvstore.config import MIN_DRAM_BYTES
from tiering.frame import frame_bytes

MATCH_TARGET = 2.97
"""Limit of match time / time of the chain of hashes: 0.8 ms where that is 0.27."""
CLIENTS_TARGET = 3.7
"""Time per match over all clients, in chains: 1,000 matches a second where the chain is 0.27 ms."""

SOCKET = "a sidecar's socket"
_HEAD_START_SECONDS = 0.05
"""Time for all processes to read their order."""


def run(options: LookupOptions, say: Callable[[str], None]) -> tuple[Row, Row]:
    """Fill a sidecar, then match through its door: one client, and many together."""
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
            return one, _together(options, clients, one["limit"])


def _one(options: LookupOptions, handle: NamespaceHandle, stored: int) -> Row:
    prompts = Prompts(options)
    order = np.random.default_rng(7).permutation(stored).tolist()
    turns = count()

    def match() -> Cost:
        prompt = prompts[order[next(turns) % stored]]
        watch = Stopwatch(thread_time)
        found = handle.match(prompt)
        cost = watch.cost()
        assert found.blocks == options.prompt_blocks and found.reason is None, found
        return cost

    matches, chains = _TimedTurn(match), _TimedTurn(Chain(options).turn)
    found = against(chains, {"match": matches}, options.door_laps)["match"]
    return time_row(
        {"by": SOCKET, "blocks": stored * options.prompt_blocks, "prompts": "in turn"},
        found,
        "chain",
        Target(MATCH_TARGET, is_least=False),
        ms_p99=quantile(matches.last(options.door_laps), 0.99) * 1e3,
        chain_ms_p99=quantile(chains.last(options.door_laps), 0.99) * 1e3,
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


def _together(options: LookupOptions, clients: Clients, chain_ms: float) -> Row:
    """ratio: of the matches to what the same processes hash when they do nothing else. ms_p50, ms_p99: how long a
    client waits for one. times_chain: time for each match more / the chain of a client that has the machine alone."""
    found = against(clients.hash, {"match": clients.match}, options.client_laps)["match"]
    waited = list(chain(*clients.waits[-options.client_laps :]))
    return Row(
        {"clients": options.clients},
        1 / found.seconds,
        "matches/s",
        found.laps,
        limit_of="hashing only",
        limit=1 / found.limit_seconds,
        ratio=found.ratio,
        ratio_low=found.low,
        ratio_high=found.high,
        target=Target(CLIENTS_TARGET, is_least=False, of="times_chain"),
        details={
            "ms_p50": median(waited) * 1e3,
            "ms_p99": quantile(waited, 0.99) * 1e3,
            "times_chain": found.seconds * 1e3 / chain_ms,
        },
    )


class Clients:
    """Client processes of one sidecar; see `lookup_client`. A context manager that ends them."""

    def __init__(self, options: LookupOptions, socket: str, stored: int) -> None:
        """stored: prompts. Raises `StoreError` if a client does not start."""
        self._seconds = options.client_seconds
        self.waits: list[list[float]] = []
        """Of each turn of matches, how long every one of them took, in seconds."""
        with ExitStack() as stack:
            jobs = [
                {"socket": socket, "number": number, "prompts": stored, "options": asdict(options)}
                for number in range(options.clients)
            ]
            self.children = [stack.enter_context(Child("kvstore.bench.lookup_client", json.dumps(job))) for job in jobs]
            for child in self.children:
                said = child.hear()
                assert said == READY, said
            self._stack = stack.pop_all()

    def match(self) -> Cost:
        """All match for a while; returns the cost per match."""
        cost, seconds = self._turn("match")
        self.waits.append(seconds)
        return cost

    def hash(self) -> Cost:
        """All hash for a while; returns the cost per chain."""
        return self._turn("hash")[0]

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _turn(self, work: str) -> tuple[Cost, list[float]]:
        start = perf_counter() + _HEAD_START_SECONDS
        order = json.dumps({"work": work, "start": start, "end": start + self._seconds})
        for child in self.children:
            child.say(order)
        answers = [json.loads(child.hear()) for child in self.children]
        seconds = list(chain(*(answer["seconds"] for answer in answers)))
        if not seconds:
            raise StoreError(f"nothing was done in {self._seconds} s; give the clients longer")
        return Cost(self._seconds / len(seconds), sum(answer["cpu"] for answer in answers) / len(seconds)), seconds
