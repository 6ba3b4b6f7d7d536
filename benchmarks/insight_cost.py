"""What insight costs a sidecar: CPU for each look-up and each leased block, with all of it on over with none of it.

    python benchmarks/insight_cost.py [--pairs 40] [--seconds 1] [--part all] [--json]

One sidecar holds the prompts and serves one client. Turn by turn, insight is on and off: on, `/metrics` is scraped
every five seconds, the sidecar estimates what other sizes would find and follows prefixes, and a console shows one open
page; off, the hooks of the serving thread do nothing, nothing is scraped, and the console is stopped. What is compared
is the CPU time of the thread that serves look-ups and leases, pair by pair: quote the median. Two sidecars that differ
in nothing are a twentieth apart on such a scale, which is why one of them is switched. A part alone can be switched:
`hooks`, what a look-up leaves for the estimates and the threads that work on it, or `view`, the page and the scrapes.
Threads beside it, and the console, cost by the second and not by the look-up: theirs is a share of a core, printed
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
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
from math import sqrt
from operator import truediv
from pathlib import Path
from unittest.mock import patch

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
PARTS = ("all", "hooks", "view")
SWITCHED = """
import os, socket, sys, threading

def obey():
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ["KV_INSIGHT_SWITCH"])
        for word in link.makefile():
            from kvstore.insight.whatif import WhatIf
            from kvstore.prefixes.book import PrefixBook
            for cls, name in ((WhatIf, "looked_up"), (PrefixBook, "looked_up"), (PrefixBook, "granted")):
                mine = kept.setdefault((cls, name), getattr(cls, name))
                setattr(cls, name, mine if word == "on\\n" else lambda *_: False)
            link.sendall(b"!")

kept = {}
if "--kept-at" in sys.orig_argv:  # the sidecar, and not its keeper
    threading.Thread(target=obey, daemon=True).start()
"""
"""What the sidecar's Python does first (`sitecustomize`): it puts the hooks of insight in and out as it is told."""
PROMPTS, BLOCKS = 1024, 64
WARM_UP_SECONDS = 60.0
"""After which it is known how many names may be sampled at that rate of look-ups."""
SCRAPE_SECONDS, TICK_SECONDS = 5.0, 0.05


def cpu_seconds(process: int) -> float:
    """Of all threads of a process so far (clock_getcpuclockid(3) of Linux)."""
    return time.clock_gettime(~process << 3 | 2)


class Switch:
    """Insight of a sidecar; on at first."""

    def __init__(self, link: socket.socket, console: int, metrics: str, part: str) -> None:
        """part: of `PARTS`, the one that is ever on."""
        self._link, self._console, self._metrics = link, console, metrics
        self._has_hooks, self._is_viewed = part != "view", part != "hooks"
        self._is_on = True
        self.scrapes = 0

    def set(self, is_on: bool) -> None:
        if is_on == self._is_on:
            return
        self._link.sendall(b"on\n" if is_on and self._has_hooks else b"off\n")
        assert self._link.recv(1) == b"!"
        os.kill(self._console, signal.SIGCONT if is_on and self._is_viewed else signal.SIGSTOP)
        self._is_on = is_on

    @contextmanager
    def scraping(self) -> Iterator[None]:
        """Metrics are read meanwhile, every five seconds of the time that it is on."""
        over = threading.Event()

        def scrape() -> None:
            seconds_on = 0.0
            while not over.wait(TICK_SECONDS):
                seconds_on += TICK_SECONDS * (self._is_on and self._is_viewed)
                if self._is_on and seconds_on >= SCRAPE_SECONDS:
                    seconds_on = 0.0
                    with urllib.request.urlopen(self._metrics, timeout=SECONDS) as answer:
                        answer.read()
                    self.scrapes += 1

        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@dataclass(frozen=True)
class Served:
    """The sidecar under measurement: a handle of its one client, its process, its console's, and its insight."""

    handle: NamespaceHandle
    process: int
    console: int
    insight: Switch

    def cpu(self) -> dict[int, float]:
        """Seconds of each thread so far (/proc/PID/task/TID/schedstat)."""
        took = dict[int, float]()
        for thread in Path(f"/proc/{self.process}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                took[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        return took


def console_command(observe_socket: str) -> list[str]:
    """Starts a console at a port of the system's choice, which it says in one line of JSON."""
    where = ["--socket", observe_socket, "--listen", "127.0.0.1:0", "--json"]
    return [sys.executable, "-P", "-m", "kvstore", "console", *where]


@contextmanager
def viewed(observe_socket: str) -> Iterator[tuple[int, str]]:
    """A console shows the sidecar, and a page's stream is read; yields the console's process and its address."""
    with subprocess.Popen(console_command(observe_socket), stdout=subprocess.PIPE, text=True) as console:
        try:
            assert console.stdout is not None
            url = json.loads(console.stdout.readline())["console"]
            with urllib.request.urlopen(f"{url}api/stream", timeout=SECONDS) as stream:
                reading = [sys.executable, "-P", "-c", "import sys\nwhile sys.stdin.buffer.read1(1 << 16): pass"]
                with subprocess.Popen(reading, stdin=stream.fileno()) as page:
                    yield console.pid, url
                    page.kill()
        finally:
            console.terminate()
            console.send_signal(signal.SIGCONT)


@contextmanager
def served(options: LookupOptions, part: str = "all") -> Iterator[Served]:
    """A sidecar with the prompts in it."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "sitecustomize.py").write_text(SWITCHED)
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(os.path.join(folder, "switch"))
        door.listen()
        door.settimeout(SECONDS)
        given = {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))}
        with patch.dict(os.environ, given | {"KV_INSIGHT_SWITCH": os.path.join(folder, "switch")}):
            sidecar = stack.enter_context(Sidecar({"dram": "1GiB", "nvme": "off"}, has_health=True))
            link = stack.enter_context(door.accept()[0])
        link.settimeout(SECONDS)
        sidecar.ready()
        store = stack.enter_context(sidecar.client())
        shape = shape_of(options)
        handle = store.namespace(model=MODEL, layout=shape.layout)
        pages = PagePool(shape, options.prompt_blocks, 0, 1).take()
        for prompt in prompts(options):
            assert handle.put(prompt, pages).stored == options.prompt_blocks
        data = sidecar.folder / "kv"
        console, _ = stack.enter_context(viewed(str(data / "observe.sock")))
        switch = Switch(link, console, f"http://127.0.0.1:{sidecar.http_port}/metrics", part)
        stack.enter_context(switch.scraping())
        yield Served(handle, ask.stat(str(data / "admin.sock"), SystemClock()).pid, console, switch)


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
    parser.add_argument("--part", choices=PARTS, default="all", help="what is switched on and off")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = LookupOptions(prompt_tokens=64 * BLOCKS)
    asked, rows = prompts(options), []
    with served(options, given.part) as one:
        look_ups(one.handle, asked, WARM_UP_SECONDS)
        for name, work in (("look-up", look_ups), ("leased block", leased_blocks)):
            us = dict[bool, list[float]]({True: [], False: []})
            beside = dict[bool, float]({True: 0.0, False: 0.0})
            of_console, scrapes = 0.0, one.insight.scrapes
            for pair in range(given.pairs + 1):
                for has_insight in (True, False) if pair % 2 else (False, True):
                    one.insight.set(has_insight)
                    before, console = one.cpu(), cpu_seconds(one.console)
                    count = work(one.handle, asked, given.seconds)
                    took = sorted(seconds - before.get(thread, 0.0) for thread, seconds in one.cpu().items())
                    if pair:  # the first one warms up
                        us[has_insight].append(1e6 * took[-1] / count)
                        beside[has_insight] += sum(took[:-1]) / (given.pairs * given.seconds)
                        of_console += (cpu_seconds(one.console) - console) / (given.pairs * given.seconds)
            is_read = given.part != "hooks" and given.pairs * given.seconds >= 2 * SCRAPE_SECONDS
            assert one.insight.scrapes > scrapes or not is_read, "none was read"
            ratios = list(map(truediv, us[True], us[False]))
            low, middle, high = statistics.quantiles(ratios, n=4)
            error = 1.2533 * statistics.stdev(ratios) / sqrt(given.pairs)  # of a median, of what is normal
            rows.append(
                {
                    "of": name,
                    "cpu_us_with": round(statistics.median(us[True]), 2),
                    "cpu_us_without": round(statistics.median(us[False]), 2),
                    "ratio": round(middle, 4),
                    "standard_error": round(error, 4),
                    "quartiles": [round(low, 4), round(high, 4)],
                    "pairs": given.pairs,
                    "other_threads_share_of_a_core": round(beside[True] - beside[False], 4),
                    "console_share_of_a_core": round(of_console, 4),
                }
            )
            if not given.json:
                print("CPU per {of}: {cpu_us_with} us with, {cpu_us_without} without insight; ratio".format(**rows[-1]))
                print(
                    f"  {middle:.4f}, standard error {error:.4f}, quartiles {low:.4f} and {high:.4f}; {ALLOWED} allowed"
                )
                print(
                    f"  of a core: {beside[True] - beside[False]:.2%} by other threads, {of_console:.2%} by the console"
                )
    if given.json:
        print(json.dumps(rows))
    raise SystemExit(any(row["ratio"] > ALLOWED for row in rows))


if __name__ == "__main__":
    main()
