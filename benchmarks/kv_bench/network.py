"""`kvstore bench network`: gRPC beside the local door, and the local door beside a flood of gRPC and beside awaits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

from kv_bench.flood import bearer, stub_of
from kv_bench.measure import Say, quantile
from kv_bench.process import LONGEST_SECONDS, Child, Sidecar, open_patiently
from kv_bench.rig import MODEL, SMALLEST, PagePool
from kvstore.client.framing import FramedSocket
from kvstore.protocol import messages as m
from kvstore.traffic.row import MS, BenchResult, Row, Section, Target
from kvstore.wire.store_pb2 import MatchRequest, NamespacesRequest, Prompt
from tiering.clock import SystemClock
from tiering.counts.awaits import MAX_AWAIT_SECONDS, MOST_PARKED, AwaitEnd

CALL_TARGET, FLOOD_TARGET, OTHERS_TARGET, PARKED_TARGET = 1.3, 1.5, 2.0, 1.1
TOKEN, FLOODS, FLOOD_TOKEN = "a-token-of-the-bench", "flood", "a-token-of-the-flood"
CALL_SECONDS = 30.0
LOCAL, OTHERS = "a match at the local door", "a match through gRPC, of a tenant that does not flood"
Laps = Sequence[float]


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """calls: of each kind per lap. seconds: of each turn on the API socket. streams: of the flood."""

    blocks: int = 512
    calls: int = 50
    laps: int = 15
    seconds: float = 3.0
    flood_laps: int = 5
    streams: int = 256


def run(options: GrpcOptions, say: Say) -> BenchResult:
    say("filling a sidecar")
    tokens = {"default": TOKEN, FLOODS: FLOOD_TOKEN}
    with Sidecar({"dram": "64MiB", "nvme": "off"}, tokens=tokens) as sidecar, sidecar.client() as client:
        handle = client.namespace(model=MODEL, layout=SMALLEST.layout)
        prompt = [7 * one % 50_000 for one in range(options.blocks * SMALLEST.block_tokens)]
        stored = handle.put(prompt, PagePool(SMALLEST, options.blocks).take()).stored
        assert stored == options.blocks, stored
        hashed = handle.hashed(prompt)
        say("waiting for the network process")
        namespace, keys = _namespace(sidecar, TOKEN), b"".join(hashed.keys)
        stub = stub_of(sidecar.grpc)

        def through_grpc(request: MatchRequest) -> Any:
            return stub.Match(request, timeout=CALL_SECONDS, metadata=bearer(TOKEN))

        whole = MatchRequest(namespace=namespace, prompt=Prompt(keys=keys))
        works: list[Callable[[], Any]] = [
            partial(through_grpc, whole),
            partial(through_grpc, MatchRequest(namespace=namespace)),
        ]
        say(f"matching, {options.laps} laps")
        match, empty, local = _calls(options, sidecar, hashed.keys, works)
        with open_patiently(str(sidecar.folder / FLOODS)) as flooding:
            others = flooding.namespace(model=MODEL, layout=SMALLEST.layout)
            job = {"address": sidecar.grpc, "token": FLOOD_TOKEN, "calls": options.streams}
            job |= {"namespace": _namespace(sidecar, FLOOD_TOKEN), "keys": keys.hex()}
            at_the_door = partial(handle.match, hashed)
            quiet, flooded, told = _flooded(options, job, [at_the_door, works[0]], say)
            parked = _beside_awaits(options, others, at_the_door, say)
    rows = [
        _beside(
            f"a match of {options.blocks} keys through gRPC",
            "empty call + local match",
            [one + other for one, other in zip(empty, local, strict=True)],
            match,
            CALL_TARGET,
            empty_ms=1e3 * median(empty),
            local_ms=1e3 * median(local),
        ),
        _beside(f"{LOCAL}, p99 beside a flood", "quiet", quiet[0], flooded[0], FLOOD_TARGET),
        _beside(f"{OTHERS}, p99 beside a flood", "quiet", quiet[1], flooded[1], OTHERS_TARGET),
        _beside(f"{LOCAL}, p99 beside {MOST_PARKED:,} parked awaits", "quiet", *parked, PARKED_TARGET),
    ]
    seconds = 2 * options.seconds * options.flood_laps
    about = {f"{kind}_calls": sum(one[kind] for one in told) / seconds for kind in ("good", "others")}
    about["other_calls"] = about.pop("others_calls")
    words = f"the flood: {about['good_calls']:,.0f} answers a second, {about['other_calls']:,.0f} sent away"
    return BenchResult("network", options, [Section(rows, "gRPC beside the local door", words)], about)


def _calls(
    options: GrpcOptions, sidecar: Sidecar, keys: list[bytes], works: list[Callable[[], Any]]
) -> list[list[float]]:
    wire = FramedSocket(sidecar.socket, "bench", b"", SystemClock(), LONGEST_SECONDS)
    try:
        listed = wire.call(m.Namespaces(), LONGEST_SECONDS).answer
        assert isinstance(listed, m.NamespacesReply)
        (one,) = listed.namespaces
        granted = wire.call(m.OpenNamespace(one.packed, one.payload_bytes), LONGEST_SECONDS).answer
        assert isinstance(granted, m.Granted)
        verb = m.MatchPrefix(granted.grant.number, keys, counts=False)

        def local() -> Any:
            found = wire.call(verb, LONGEST_SECONDS).answer
            assert isinstance(found, m.Matched)
            return found.reply

        wanted = [(works[0], len(keys)), (works[1], 0), (local, len(keys))]
        laps: list[list[float]] = [[], [], []]
        for lap in range(-2, options.laps):
            times: list[list[float]] = [[], [], []]
            for _ in range(options.calls):
                for (work, blocks), mine in zip(wanted, times, strict=True):
                    began = perf_counter()
                    answer = work()
                    mine.append(perf_counter() - began)
                    assert answer.blocks == blocks, answer
            for found, mine in zip(laps, times, strict=True):
                found += [median(mine)] if lap >= 0 else []
        return laps
    finally:
        wire.close()


def _flooded(
    options: GrpcOptions, job: dict[str, Any], works: list[Callable[[], Any]], say: Say
) -> tuple[list[list[float]], list[list[float]], list[dict[str, int]]]:
    quiet: list[list[float]] = [[] for _ in works]
    flooded: list[list[float]] = [[] for _ in works]
    told = []
    with Child("kv_bench.flood", job) as flood:
        assert flood.hear() == "ready"
        for lap in range(options.flood_laps):
            say(f"flooding, lap {lap + 1} of {options.flood_laps}")
            for work, found in zip(works, quiet, strict=True):
                found.append(_p99(work, options.seconds))
            flood.say(perf_counter() + 2 * options.seconds)
            for work, found in zip(works, flooded, strict=True):
                found.append(_p99(work, options.seconds))
            told.append(flood.hear())
    return quiet, flooded, told


def _beside_awaits(options: GrpcOptions, handle: Any, work: Callable[[], Any], say: Say) -> tuple[Laps, Laps]:
    seconds = min(options.seconds, MAX_AWAIT_SECONDS / 3)
    quiet: list[float] = []
    parked: list[float] = []
    for lap in range(options.flood_laps):
        say(f"beside parked awaits, lap {lap + 1} of {options.flood_laps}")
        quiet.append(_p99(work, seconds))
        prompts = [handle.hashed([lap * MOST_PARKED + one] * SMALLEST.block_tokens) for one in range(MOST_PARKED)]
        waits = [handle.submit_await(one, 0, 1e3 * MAX_AWAIT_SECONDS) for one in prompts]
        # The refusal of one more shows that all are pending.
        assert handle.await_block(prompts[0], 0, 1e3 * LONGEST_SECONDS).end is AwaitEnd.FULL
        parked.append(_p99(work, seconds))
        assert not any(one.is_ready() for one in waits), "they were to wait until the turn is over"
        for one in waits:
            one.cancel()
    return quiet, parked


def _beside(what: str, limit_of: str, limits: Laps, times: Laps, most: float, **details: float) -> Row:
    ratios = [one / limit for limit, one in zip(limits, times, strict=True)]
    limit, quartiles = 1e3 * median(limits), (quantile(ratios, 0.25), quantile(ratios, 0.75))
    beside = limit_of, limit, median(ratios), *quartiles, Target(most, is_least=False)
    return Row({"figure": what}, 1e3 * median(times), MS, len(times), None, None, *beside, details)


def _p99(work: Callable[[], Any], seconds: float) -> float:
    times, end = [], perf_counter() + seconds
    while perf_counter() < end:
        began = perf_counter()
        assert work().blocks
        times.append(perf_counter() - began)
        sleep(times[-1])
    return quantile(times, 0.99)


def _namespace(sidecar: Sidecar, token: str) -> str:
    given = {"timeout": LONGEST_SECONDS, "metadata": bearer(token), "wait_for_ready": True}
    (one,) = stub_of(sidecar.grpc).Namespaces(NamespacesRequest(), **given).namespaces
    return str(one.id)
