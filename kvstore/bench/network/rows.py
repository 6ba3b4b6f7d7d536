"""`kvstore bench network`: gRPC beside the API socket, and the API socket beside a flood of gRPC.

A sidecar and its network process run as under the supervisor. A match of 512 keys through gRPC takes at least an empty
call plus a local match; the three are measured in turn. Then an engine matches through the API socket in quiet turns,
in turns while another tenant keeps 256 calls in flight, and in turns while that tenant waits for as many blocks as it
may.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter, sleep
from typing import Any

from rich.table import Table

from kvstore.bench.lookup_client import MODEL
from kvstore.bench.measure import quantile
from kvstore.bench.network.flood import READY, stub_of
from kvstore.bench.rig import BlockShape, PagePool
from kvstore.bench.sidecar import LONGEST_SECONDS, Sidecar, open_patiently
from kvstore.block.errors import StoreError
from kvstore.client.framing import FramedSocket
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from kvstore.wire.store_pb2 import MatchRequest, NamespacesRequest, Prompt
from tiering.counts.awaits import MAX_AWAIT_SECONDS, MOST_PARKED, AwaitEnd

CALL_TARGET, FLOOD_TARGET, OTHERS_TARGET, PARKED_TARGET = 1.3, 1.5, 2.0, 1.1
TOKEN, FLOODS = "a-token-of-the-bench", "flood"
FLOOD_TOKEN = "a-token-of-the-flood"
CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class NetworkBenchOptions:
    """calls: of each kind per lap. seconds: of each turn on the API socket. streams: of the flood."""

    blocks: int = 512
    calls: int = 50
    laps: int = 15
    seconds: float = 3.0
    flood_laps: int = 5
    streams: int = 256


@dataclass(frozen=True)
class NetworkBenchResult:
    """Medians over laps, times in milliseconds. ratio: a match to an empty call plus a local match. quiet_ms_p99,
    flooded_ms_p99: of a local match; flood_ratio: of the two. others_ms_p99, others_flooded_ms_p99, others_ratio: the
    same for gRPC matches of a tenant that does not flood. good_calls, other_calls: the flood's, per second.
    unparked_ms_p99, parked_ms_p99, parked_ratio: of a local match while another tenant waits for no blocks, and for as
    many as it may."""

    blocks: int
    match_ms: float
    empty_ms: float
    local_ms: float
    ratio: float
    quiet_ms_p99: float
    flooded_ms_p99: float
    flood_ratio: float
    others_ms_p99: float
    others_flooded_ms_p99: float
    others_ratio: float
    good_calls: float
    other_calls: float
    unparked_ms_p99: float
    parked_ms_p99: float
    parked_ratio: float

    def targets(self) -> list[tuple[str, float, float]]:
        """(what, measured, at most)."""
        return [
            ("gRPC match / (empty call + local match)", self.ratio, CALL_TARGET),
            ("local door, p99 beside a flood / quiet", self.flood_ratio, FLOOD_TARGET),
            ("gRPC of another tenant, p99 beside a flood / quiet", self.others_ratio, OTHERS_TARGET),
            (f"local door, p99 beside {MOST_PARKED:,} parked awaits / quiet", self.parked_ratio, PARKED_TARGET),
        ]

    def to_dict(self) -> dict[str, object]:
        targets = [
            {"what": what, "measured": found, "at_most": most, "met": found <= most}
            for what, found, most in self.targets()
        ]
        return {"bench": "network", **asdict(self), "targets": targets}

    def render(self, console: Any) -> None:
        table = Table("blocks", "gRPC match p50", "empty call", "local match", "match / both", f"target {CALL_TARGET}")
        times = [f"{one:.3f} ms" for one in (self.match_ms, self.empty_ms, self.local_ms)]
        table.add_row(f"{self.blocks:,}", *times, f"{self.ratio:.2f}", _word(self.ratio, CALL_TARGET))
        console.print("a match of keys through gRPC", table, sep="\n")
        table = Table("while another tenant floods gRPC", "quiet p99", "flooded p99", "flooded / quiet", "target")
        local = (self.quiet_ms_p99, self.flooded_ms_p99, self.flood_ratio, FLOOD_TARGET)
        others = (self.others_ms_p99, self.others_flooded_ms_p99, self.others_ratio, OTHERS_TARGET)
        for what, (quiet, flooded, ratio, most) in {"a match at the local door": local, "through gRPC": others}.items():
            word = f"{most} {_word(ratio, most)}"
            table.add_row(what, f"{quiet:.3f} ms", f"{flooded:.3f} ms", f"{ratio:.2f}", word)
        told = f"the flood: {self.good_calls:,.0f} answers a second, {self.other_calls:,.0f} sent away"
        console.print(table, told, sep="\n")
        table = Table(
            f"while another tenant has {MOST_PARKED:,} awaits parked", "quiet p99", "beside them", "ratio", "target"
        )
        times = [f"{one:.3f} ms" for one in (self.unparked_ms_p99, self.parked_ms_p99)]
        word = f"{PARKED_TARGET} {_word(self.parked_ratio, PARKED_TARGET)}"
        table.add_row("a match at the local door", *times, f"{self.parked_ratio:.2f}", word)
        console.print(table)


def _word(found: float, most: float) -> str:
    return "met" if found <= most else "missed"


def run(options: NetworkBenchOptions, say: Callable[[str], None]) -> NetworkBenchResult:
    """Measure calls, then floods."""
    say("filling a sidecar")
    tokens = {"default": TOKEN, FLOODS: FLOOD_TOKEN}
    with Sidecar({"dram": "64MiB", "nvme": "off"}, tokens=tokens) as sidecar, sidecar.client() as client:
        shape = BlockShape(layers=1, block_tokens=64, kv_heads=1, head_dim=8)
        handle = client.namespace(model=MODEL, layout=shape.layout)
        prompt = [7 * one % 50_000 for one in range(options.blocks * 64)]
        stored = handle.put(prompt, PagePool(shape, options.blocks, 0, prompts=1).take()).stored
        assert stored == options.blocks, stored
        keys = handle.hashed(prompt).keys
        say("waiting for the network process")
        namespace = _namespace(sidecar)
        say(f"matching, {options.laps} laps")
        match, empty, local = _calls(options, sidecar, namespace, keys)
        job: dict[str, Any] = {
            "address": sidecar.grpc,
            "token": FLOOD_TOKEN,
            "namespace": _namespace_of_flood(sidecar, shape),
        }
        job |= {"keys": b"".join(keys).hex(), "calls": options.streams}
        command = [sys.executable, "-m", "kvstore.bench.network.flood", json.dumps(job)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
            assert flood.stdin is not None and flood.stdout is not None
            try:
                if flood.stdout.readline().strip() != READY:
                    raise StoreError(f"the flood ended with {flood.wait(LONGEST_SECONDS)}")
                stub, metadata = stub_of(sidecar.grpc), _metadata(TOKEN)
                request = MatchRequest(namespace=namespace, prompt=Prompt(keys=b"".join(keys)))
                hashed, good, others = handle.hashed(prompt), 0, 0
                works = [
                    lambda: handle.match(hashed),
                    lambda: stub.Match(request, timeout=CALL_SECONDS, metadata=metadata),
                ]
                quiet: list[list[float]] = [[], []]
                flooded: list[list[float]] = [[], []]
                for lap in range(options.flood_laps):
                    say(f"flooding, lap {lap + 1} of {options.flood_laps}")
                    for work, found in zip(works, quiet, strict=True):
                        found.append(_p99(work, options.seconds))
                    end = perf_counter() + 2 * options.seconds
                    print(end, file=flood.stdin, flush=True)
                    for work, found in zip(works, flooded, strict=True):
                        found.append(_p99(work, options.seconds))
                    told = json.loads(flood.stdout.readline())
                    good, others = good + told["good"], others + told["others"]
            finally:
                flood.stdin.close()
        seconds = 2 * options.seconds * options.flood_laps
        parked = _beside_awaits(options, sidecar, shape, works[0], say)
        ratio = median(m / (e + o) for m, e, o in zip(match, empty, local, strict=True))
        return NetworkBenchResult(
            options.blocks,
            1e3 * median(match),
            1e3 * median(empty),
            1e3 * median(local),
            ratio,
            *_beside(quiet[0], flooded[0]),
            *_beside(quiet[1], flooded[1]),
            good / seconds,
            others / seconds,
            *_beside(*parked),
        )


def _calls(
    options: NetworkBenchOptions, sidecar: Sidecar, namespace: str, keys: list[bytes]
) -> tuple[list[float], list[float], list[float]]:
    """Medians per lap in seconds: gRPC match, empty gRPC call, match through the API socket."""
    stub, metadata = stub_of(sidecar.grpc), _metadata(TOKEN)
    requests = [
        MatchRequest(namespace=namespace, prompt=Prompt(keys=b"".join(keys))),
        MatchRequest(namespace=namespace),
    ]
    wire = FramedSocket(sidecar.socket, "bench", b"", SystemClock(), LONGEST_SECONDS)
    try:
        listed = wire.call(m.Namespaces(), LONGEST_SECONDS).answer
        assert isinstance(listed, m.NamespacesReply)
        (one,) = listed.namespaces
        granted = wire.call(m.OpenNamespace(one.packed, one.payload_bytes), LONGEST_SECONDS).answer
        assert isinstance(granted, m.Granted)
        verb = m.MatchPrefix(granted.grant.number, keys, counts=False)

        def through_grpc(request: MatchRequest, blocks: int) -> None:
            assert stub.Match(request, timeout=CALL_SECONDS, metadata=metadata).blocks == blocks

        def local() -> None:
            found = wire.call(verb, LONGEST_SECONDS).answer
            assert isinstance(found, m.Matched) and found.reply.blocks == len(keys)

        works = [lambda: through_grpc(requests[0], len(keys)), lambda: through_grpc(requests[1], 0), local]
        laps: list[list[float]] = [[], [], []]
        for lap in range(-2, options.laps):
            times: list[list[float]] = [[], [], []]
            for _ in range(options.calls):
                for work, mine in zip(works, times, strict=True):
                    began = perf_counter()
                    work()
                    mine.append(perf_counter() - began)
            for found, mine in zip(laps, times, strict=True):
                found += [median(mine)] if lap >= 0 else []
        return laps[0], laps[1], laps[2]
    finally:
        wire.close()


def _beside_awaits(
    options: NetworkBenchOptions,
    sidecar: Sidecar,
    shape: BlockShape,
    work: Callable[[], Any],
    say: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    """99th percentiles per lap, in quiet turns and in turns while another tenant's awaits are pending."""
    seconds, quiet, parked = min(options.seconds, MAX_AWAIT_SECONDS / 3), [], []
    with open_patiently(str(sidecar.folder / FLOODS)) as client:
        handle = client.namespace(model=MODEL, layout=shape.layout)
        for lap in range(options.flood_laps):
            say(f"beside parked awaits, lap {lap + 1} of {options.flood_laps}")
            quiet.append(_p99(work, seconds))
            prompts = [handle.hashed([lap * MOST_PARKED + one] * 64) for one in range(MOST_PARKED)]
            waits = [handle.submit_await(one, 0, 1e3 * MAX_AWAIT_SECONDS) for one in prompts]
            # The refusal of one more shows that all are pending.
            assert handle.await_block(prompts[0], 0, 1e3 * LONGEST_SECONDS).end is AwaitEnd.FULL
            parked.append(_p99(work, seconds))
            assert not any(one.is_ready() for one in waits), "they were to wait until the turn is over"
            for one in waits:
                one.cancel()
    return quiet, parked


def _beside(quiet: list[float], flooded: list[float]) -> tuple[float, float, float]:
    """Both in milliseconds, and their quotient: medians over laps."""
    ratio = median(beside / alone for alone, beside in zip(quiet, flooded, strict=True))
    return 1e3 * median(quiet), 1e3 * median(flooded), ratio


def _p99(work: Callable[[], Any], seconds: float) -> float:
    """99th percentile of repeated calls, with pauses as long as each call."""
    times, end = [], perf_counter() + seconds
    while perf_counter() < end:
        began = perf_counter()
        assert work().blocks
        times.append(perf_counter() - began)
        sleep(times[-1])
    return quantile(times, 0.99)


def _metadata(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def _namespace(sidecar: Sidecar, token: str = TOKEN) -> str:
    """The id of the tenant's only namespace, once the network process answers."""
    stub = stub_of(sidecar.grpc)
    request, metadata = NamespacesRequest(), _metadata(token)
    listed = stub.Namespaces(request, timeout=LONGEST_SECONDS, metadata=metadata, wait_for_ready=True)
    (one,) = listed.namespaces
    return str(one.id)


def _namespace_of_flood(sidecar: Sidecar, shape: BlockShape) -> str:
    """Open an empty namespace for the flooding tenant."""
    with open_patiently(str(sidecar.folder / FLOODS)) as client:
        client.namespace(model=MODEL, layout=shape.layout)
        return _namespace(sidecar, FLOOD_TOKEN)
