"""Whether memory or descriptors of sidecar, edge, gRPC and console grow while a real vLLM serves traffic.

    .venv/bin/python benchmarks/soak.py TRACE [--engine .venv-engines/bin/python] [--seconds 3600] [--speed 1]

A recorded trace is replayed at a sidecar whose memory and disk are both smaller than what it asks for. Slopes are lines
of least squares through each process's anonymous memory after the warm-up. Status 1: a slope above its bar, more
descriptors at the end, a request that failed, or a process that was started anew. One descriptor of each slab file
that exists is not counted.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

from kv_bench import script
from kv_bench.llamas import TINY, kv_bytes_per_token, save_model
from kv_bench.process import Sidecar, viewed
from kv_bench.traffic_engines import KVSTORE, Engines, vllm_server
from kv_bench.ttft_vllm import connector
from kvstore.insight.trace import Trace
from kvstore.traffic.run import Endpoint, TrafficOptions, Workload
from kvstore.traffic.run import run as run_traffic
from kvstore.wire.store_pb2 import MatchRequest, NamespacesRequest, Prompt
from kvstore.wire.store_pb2_grpc import StoreStub
from tiering.frame import KEY_BYTES

SLOPE_MIB = 4.0
"""An hour, of each process."""
MORE_DESCRIPTORS = 2
"""A connection that is open just then."""
LONGEST_TOKENS, REQUESTS = 4096, 1_000_000
DRAM, NVME_MIB = "96MiB", 192
NVME = f"{NVME_MIB}MiB"
TURN_SECONDS, ASK_SECONDS = 2.0, 30.0
WARM_UP_SHARE = 0.25
SLAB, EMPTY_SLAB_MIB = ".slab", 8 / 1024
"""A slab file that holds no blocks: beside the budget there may be one."""
TOKEN = "a-token-of-the-soak"
ROLES = ("sidecar", "edge", "agent", "console")


def kind_of(link: str) -> str:
    """What a descriptor is of, without the numbers that tell one from another."""
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "", Path(link).name)


def links_of(process: int) -> list[str]:
    links = []
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    return links


@dataclass
class Watched:
    """Samples of one process: seconds since the start, anonymous MiB, descriptors by kind, MiB of open slab files."""

    process: int
    at: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    descriptors: list[Counter[str]] = field(default_factory=list)
    slab_mib: list[float] = field(default_factory=list)

    def sample(self, at: float) -> None:
        status = Path(f"/proc/{self.process}/status").read_text()
        (kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
        self.at.append(at)
        self.mib.append(kib / 1024)
        links = links_of(self.process)
        slabs = {link for link in links if link.endswith(SLAB)}
        self.descriptors.append(Counter(map(kind_of, links)) - Counter({SLAB: len(slabs)}))
        self.slab_mib.append(0.0)
        for slab in slabs:
            with suppress(FileNotFoundError):
                self.slab_mib[-1] += os.stat(slab).st_size / (1 << 20)

    def figures(self, warm_at: float) -> dict[str, Any]:
        """slope_mib: an hour, by least squares, with its standard error. descriptors_more: between the first and the
        last tenth of the samples, medians; more_by_kind: of what kind, likewise. slab_mib: the most at a time."""
        first = next(at for at, seconds in enumerate(self.at) if seconds >= warm_at)
        hours, mib = np.array(self.at[first:]) / 3600, np.array(self.mib[first:])
        (slope, _), covariance = np.polyfit(hours, mib, 1, cov=True)
        tenth = max(1, len(hours) // 10)

        def ends(values: Sequence[float]) -> tuple[float, float]:
            return median(values[:tenth]), median(values[-tenth:])

        kinds = self.descriptors[first:]
        (warm, last), (few, many) = ends(self.mib[first:]), ends([one.total() for one in kinds])
        by_kind = {kind: ends([one[kind] for one in kinds]) for kind in sorted(set().union(*kinds))}
        return {
            "slope_mib": float(slope),
            "slope_error_mib": sqrt(covariance[0, 0]),
            "mib_warm": warm,
            "mib_at_the_end": last,
            "descriptors": many,
            "descriptors_more": many - few,
            "slab_mib": max(self.slab_mib),
            "more_by_kind": {kind: now - before for kind, (before, now) in by_kind.items() if now > before},
            "samples": len(hours),
        }


def processes_under(keeper: int) -> dict[str, int]:
    """The sidecar, the edge and the process of gRPC that a keeper runs, by role."""
    found = {}
    threads = Path(f"/proc/{keeper}/task").iterdir()  # a child belongs to the thread that started it
    for child in chain.from_iterable((thread / "children").read_text().split() for thread in threads):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        role = {"serve": "sidecar", "edge": "edge", "agent": "agent"}.get(words[words.index("kvstore") + 1])
        if role is not None:
            found[role] = int(child)
    return found


def asked_of(urls: list[str], grpc_address: str) -> dict[str, Callable[[], None]]:
    stub, metadata = StoreStub(grpc.insecure_channel(grpc_address)), [("authorization", f"Bearer {TOKEN}")]

    def fetch(url: str) -> None:
        with urllib.request.urlopen(url, timeout=ASK_SECONDS) as answer:
            answer.read()

    def match() -> None:
        found = stub.Namespaces(NamespacesRequest(), timeout=ASK_SECONDS, metadata=metadata).namespaces
        for one in found[:1]:
            prompt = Prompt(keys=os.urandom(512 * KEY_BYTES))
            stub.Match(MatchRequest(namespace=one.id, prompt=prompt), timeout=ASK_SECONDS, metadata=metadata)

    return {url: partial(fetch, url) for url in urls} | {"grpc": match}


def soak(trace: Trace, options: TrafficOptions, python: str, say: Callable[[str], None]) -> dict[str, Any]:
    failures: list[str] = []
    answers: Counter[str] = Counter()
    over = threading.Event()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-soak-")))
        workload = Workload.of(trace, options, LONGEST_TOKENS)
        asked_mib = workload.working_set_tokens * kv_bytes_per_token(TINY) >> 20
        say(f"{len(workload.requests)} requests, which ask for {asked_mib} MiB; {DRAM} of memory, {NVME} of disk")
        settings = {"dram": DRAM, "nvme": NVME}
        sidecar = stack.enter_context(Sidecar(settings, has_health=True, token=TOKEN))
        sidecar.ready()
        console, page = stack.enter_context(viewed(sidecar))
        model = scratch / "model"
        save_model(TINY, model)
        flags = Engines((KVSTORE,)).flags(KVSTORE, workload)
        server = stack.enter_context(vllm_server("soak", model, scratch, flags, connector(sidecar.socket), python))
        server.wait()
        found = processes_under(sidecar.keeper)
        watched = {role: Watched(process) for role, process in (found | {"console": console}).items()}
        assert set(watched) == set(ROLES), watched
        asked = asked_of([f"{sidecar.http}/metrics", f"{page}api/status"], sidecar.grpc)

        def turns() -> None:
            began_at = time.monotonic()
            while not over.wait(TURN_SECONDS):
                for one in watched.values():
                    one.sample(time.monotonic() - began_at)
                for name, once in asked.items():
                    try:
                        once()
                        answers[name] += 1
                    except (OSError, HTTPException, grpc.RpcError) as error:
                        failures.append(f"{name}: {error!r}"[:200])

        beside = stack.enter_context(ThreadPoolExecutor(1)).submit(turns)
        stack.callback(over.set)

        def show(what: str, done: int, of: int) -> None:
            if beside.done():
                beside.result()  # what ended it
            if done and not done % 100:
                memory = ", ".join(f"{role} {one.mib[-1]:.1f} MiB" for role, one in watched.items())
                say(f"{what}: {done} of {of}; {memory}")

        result = run_traffic(trace, [Endpoint("kvstore", server.url, (), sidecar.http)], options, show)
        over.set()
        beside.result()
        is_same = processes_under(sidecar.keeper) == found
    (turn,) = result.turns["kvstore"]
    rows = {role: one.figures(WARM_UP_SHARE * options.seconds) for role, one in watched.items()}
    is_flat = [row["slope_mib"] < SLOPE_MIB and row["descriptors_more"] <= MORE_DESCRIPTORS for row in rows.values()]
    is_met = is_same and not failures and not turn.failed and all(is_flat)
    return {
        "bench": "soak",
        "trace": trace.name,
        "seconds": round(turn.seconds, 1),
        "requests": len(workload.requests),
        "asked_mib": asked_mib,
        "failed_requests": turn.failed,
        "failures": failures[:10],
        "answers": dict(answers),
        "is_same_processes": is_same,
        "processes": rows,
        "is_met": is_met and rows["sidecar"]["slab_mib"] <= NVME_MIB + EMPTY_SLAB_MIB,
    }


def main() -> None:
    given = script.options(__doc__, "trace", engine=".venv-engines/bin/python", seconds=3600.0, speed=1.0)
    options = TrafficOptions(seconds=given.seconds, requests=REQUESTS, turns=1, speed=given.speed)
    told = soak(script.trace_of(given.trace), options, given.engine, script.say)
    script.end(told, told["is_met"])


if __name__ == "__main__":
    script.run(main)
