"""What insight costs a sidecar: CPU for each look-up and each leased block, with all of it on over with none of it.

    python benchmarks/insight_cost.py [--pairs 40] [--seconds 1] [--json]

Two sidecars hold the same prompts. One has `/metrics` scraped every five seconds, estimates what other sizes would
find, follows prefixes, and a console with one page open; the other has no door for HTTP, no console and none of these.
They take turns of a second at the same work of one client. What is compared is the CPU time of the thread
that serves look-ups and leases, pair by pair: quote the median. Threads beside it, and the console, cost by the second
and not by the look-up: theirs is a share of a core, printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import truediv
from pathlib import Path

import numpy as np

from kvstore.bench.lookup_client import MODEL, shape_of
from kvstore.bench.rig import LookupOptions, PagePool
from kvstore.bench.sidecar import Sidecar
from kvstore.cli import ask
from kvstore.client.handle import NamespaceHandle
from kvstore.node import SystemClock

SECONDS = 60.0
"""For whatever is waited for."""
ALLOWED = 1.02
WITHOUT_ESTIMATES = """
import kvstore.insight.whatif as whatif
whatif.WhatIf.looked_up = lambda *_: False
whatif.WhatIf.run = lambda *_: None
import kvstore.prefixes.book as book
book.PrefixBook.looked_up = book.PrefixBook.granted = book.PrefixBook.run = lambda *_: None
"""
"""What a Python that starts with it does first (`sitecustomize`)."""
PROMPTS, BLOCKS = 1024, 64
WARM_UP_SECONDS = 60.0
"""After which it is known how many names may be sampled at that rate of look-ups."""
SCRAPE_SECONDS = 5.0


@dataclass(frozen=True)
class Served:
    """A sidecar under measurement: a handle of its one client, its process, and its console's where it has one."""

    handle: NamespaceHandle
    process: int
    console: int | None

    def cpu(self) -> dict[int, float]:
        """Seconds of each thread so far (/proc/PID/task/TID/schedstat)."""
        took = dict[int, float]()
        for thread in Path(f"/proc/{self.process}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                took[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        return took


def cpu_seconds(process: int) -> float:
    """Of all threads of a process so far (clock_getcpuclockid(3) of Linux)."""
    return time.clock_gettime(~process << 3 | 2)


@contextmanager
def scraped(address: str) -> Iterator[None]:
    """Metrics are read every now and then meanwhile."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_SECONDS):
            with urllib.request.urlopen(address, timeout=SECONDS) as answer:
                answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def viewed(observe_socket: str) -> Iterator[int]:
    """A console shows the sidecar, and a page's stream is read; yields the console's process."""
    command = [
        sys.executable,
        "-m",
        "kvstore",
        "console",
        "--socket",
        observe_socket,
        "--listen",
        "127.0.0.1:0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as console:
        try:
            assert console.stdout is not None
            url = json.loads(console.stdout.readline())["console"]
            with urllib.request.urlopen(f"{url}api/stream", timeout=SECONDS) as stream:
                reading = [sys.executable, "-c", "import sys\nwhile sys.stdin.buffer.read1(1 << 16): pass"]
                with subprocess.Popen(reading, stdin=stream.fileno()) as page:
                    yield console.pid
                    page.kill()
        finally:
            console.terminate()


@contextmanager
def served(has_insight: bool, options: LookupOptions) -> Iterator[Served]:
    """A sidecar with the prompts in it."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if not has_insight:
            Path(folder, "sitecustomize.py").write_text(WITHOUT_ESTIMATES)
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))
        sidecar = stack.enter_context(Sidecar({"dram": "1GiB", "nvme": "off"}, has_health=has_insight))
        os.environ["PYTHONPATH"] = before
        store = stack.enter_context(sidecar.client())
        if has_insight:
            sidecar.ready()
            stack.enter_context(scraped(f"http://127.0.0.1:{sidecar.http_port}/metrics"))
        shape = shape_of(options)
        handle = store.namespace(model=MODEL, layout=shape.layout)
        pages = PagePool(shape, options.prompt_blocks, 0, 1).take()
        for prompt in prompts(options):
            assert handle.put(prompt, pages).stored == options.prompt_blocks
        data = sidecar.folder / "kv"
        console = stack.enter_context(viewed(str(data / "observe.sock"))) if has_insight else None
        yield Served(handle, ask.stat(str(data / "admin.sock"), SystemClock()).pid, console)


def prompts(options: LookupOptions) -> list[np.ndarray]:
    tokens = options.prompt_blocks * options.block_tokens
    return [np.random.default_rng(number).integers(0, 1 << 17, tokens, dtype=np.uint32) for number in range(PROMPTS)]


def look_ups(handle: NamespaceHandle, asked: list[np.ndarray], seconds: float) -> int:
    """How many were made."""
    number, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        assert handle.match(asked[number % PROMPTS]).blocks == BLOCKS
        number += 1
    return number


def leased_blocks(handle: NamespaceHandle, asked: list[np.ndarray], seconds: float) -> int:
    """How many were leased, each look-up with its lease."""
    number, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        with handle.lease(handle.match(asked[number % PROMPTS]), deadline_ms=1e3 * SECONDS) as lease:
            assert lease.blocks == BLOCKS, lease.account
        number += 1
    return number * BLOCKS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = LookupOptions(prompt_tokens=64 * BLOCKS)
    asked, rows = prompts(options), []
    with served(True, options) as on, served(False, options) as off:
        assert on.console is not None
        look_ups(on.handle, asked, WARM_UP_SECONDS)
        for name, work in (("look-up", look_ups), ("leased block", leased_blocks)):
            us = dict[bool, list[float]]({True: [], False: []})
            beside = dict[bool, float]({True: 0.0, False: 0.0})
            console, began = cpu_seconds(on.console), time.monotonic()
            for pair in range(given.pairs + 1):
                for has_insight in (True, False) if pair % 2 else (False, True):
                    one = on if has_insight else off
                    before = one.cpu()
                    count = work(one.handle, asked, given.seconds)
                    took = sorted(seconds - before.get(thread, 0.0) for thread, seconds in one.cpu().items())
                    if pair:  # the first one warms up
                        us[has_insight].append(1e6 * took[-1] / count)
                        beside[has_insight] += sum(took[:-1]) / (given.pairs * given.seconds)
            share = (cpu_seconds(on.console) - console) / (time.monotonic() - began)
            low, middle, high = statistics.quantiles(map(truediv, us[True], us[False]), n=4)
            rows.append(
                {
                    "of": name,
                    "cpu_us_with": round(statistics.median(us[True]), 2),
                    "cpu_us_without": round(statistics.median(us[False]), 2),
                    "ratio": round(middle, 4),
                    "quartiles": [round(low, 4), round(high, 4)],
                    "pairs": given.pairs,
                    "other_threads_share_of_a_core": round(beside[True] - beside[False], 4),
                    "console_share_of_a_core": round(share, 4),
                }
            )
            if not given.json:
                print("CPU per {of}: {cpu_us_with} us with, {cpu_us_without} without insight; ratio".format(**rows[-1]))
                print(f"  {middle:.4f}, quartiles {low:.4f} and {high:.4f} of {given.pairs} pairs; {ALLOWED} allowed")
                print(f"  of a core: {beside[True] - beside[False]:.2%} by other threads, {share:.2%} by the console")
    if given.json:
        print(json.dumps(rows))
    raise SystemExit(any(row["ratio"] > ALLOWED for row in rows))


if __name__ == "__main__":
    main()
