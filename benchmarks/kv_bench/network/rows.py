"""`benches.py network`: gRPC beside the local door, and the local door beside a flood of gRPC.

A sidecar and its network process run as under the supervisor. A match of 512 keys through gRPC takes at least an empty
call plus a local match; the three are measured in turn. Then an engine matches through the API socket in quiet turns,
in turns while another tenant keeps 256 calls in flight, and in turns while that tenant waits for as many blocks as it
may.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, sleep
from typing import Any

from kv_bench.network.flood import READY, stub_of
from kvstore.bench.child import Child
from kvstore.bench.lookup_client import MODEL
from kvstore.bench.measure import quantile
from kvstore.bench.rig import BlockShape, PagePool
from kvstore.bench.row import MS, BenchResult, Row, Section, Target
from kvstore.bench.sidecar import LONGEST_SECONDS, Sidecar, open_patiently
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


LOCAL, OTHERS = "a match at the local door", "a match through gRPC, of a tenant that does not flood"


def run(options: NetworkBenchOptions, say: Callable[[str], None]) -> BenchResult:
    """Both."""
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
        stub, metadata = stub_of(sidecar.grpc), _metadata(TOKEN)
        request = MatchRequest(namespace=namespace, prompt=Prompt(keys=b"".join(keys)))
        hashed, good, others = handle.hashed(prompt), 0, 0
        works: list[Callable[[], Any]] = [
            lambda: handle.match(hashed),
            lambda: stub.Match(request, timeout=CALL_SECONDS, metadata=metadata),
        ]
        quiet: tuple[list[float], list[float]] = ([], [])
        flooded: tuple[list[float], list[float]] = ([], [])
        with Child("kv_bench.network.flood", json.dumps(job)) as flood:
            assert flood.hear() == READY
            for lap in range(options.flood_laps):
                say(f"flooding, lap {lap + 1} of {options.flood_laps}")
                for work, found in zip(works, quiet, strict=True):
                    found.append(_p99(work, options.seconds))
                flood.say(str(perf_counter() + 2 * options.seconds))
                for work, found in zip(works, flooded, strict=True):
                    found.append(_p99(work, options.seconds))
                told = json.loads(flood.hear())
                good, others = good + told["good"], others + told["others"]
        seconds = 2 * options.seconds * options.flood_laps
        parked = _beside_awaits(options, sidecar, shape, works[0], say)
        return result_of(options, (match, empty, local), (quiet, flooded), parked, (good / seconds, others / seconds))


Laps = Sequence[float]


def result_of(
    options: NetworkBenchOptions,
    calls: tuple[Laps, Laps, Laps],
    beside_flood: tuple[Sequence[Laps], Sequence[Laps]],
    parked: tuple[Laps, Laps],
    flood: tuple[float, float],
) -> BenchResult:
    """Seconds of each lap: calls: of a match through gRPC, an empty call and a local match. beside_flood: 99th
    percentiles at the local door and through gRPC, quiet and flooded. parked: the same at the local door, quiet and
    beside parked awaits. flood: its answers a second, and what was sent away."""
    match, empty, local = calls
    both = [one + other for one, other in zip(empty, local, strict=True)]
    call = _beside(
        f"a match of {options.blocks} keys through gRPC", "empty call + local match", both, match, CALL_TARGET
    )
    details = {"empty_ms": 1e3 * median(empty), "local_ms": 1e3 * median(local)}
    floods = [
        _beside(f"{what}, p99 beside a flood", "quiet", quiet, flooded, most)
        for what, most, quiet, flooded in zip(
            (LOCAL, OTHERS), (FLOOD_TARGET, OTHERS_TARGET), *beside_flood, strict=True
        )
    ]
    awaits = _beside(f"{LOCAL}, p99 beside {MOST_PARKED:,} parked awaits", "quiet", *parked, PARKED_TARGET)
    words = f"the flood: {flood[0]:,.0f} answers a second, {flood[1]:,.0f} sent away"
    rows = [replace(call, details=details), *floods, awaits]
    about = {"good_calls": flood[0], "other_calls": flood[1]}
    return BenchResult("network", options, [Section(rows, "gRPC beside the local door", words)], about)


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


def _beside(what: str, limit_of: str, limits: Laps, times: Laps, most: float) -> Row:
    """Milliseconds, and the quotient: medians over laps."""
    ratios = [one / limit for limit, one in zip(limits, times, strict=True)]
    return Row(
        {"figure": what},
        1e3 * median(times),
        MS,
        len(times),
        limit_of=limit_of,
        limit=1e3 * median(limits),
        ratio=median(ratios),
        ratio_low=quantile(ratios, 0.25),
        ratio_high=quantile(ratios, 0.75),
        target=Target(most, is_least=False),
    )


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
