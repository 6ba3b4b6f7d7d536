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
import signal
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
from kvstore.bench.sidecar import open_patiently
from kvstore.client.handle import NamespaceHandle

SECONDS = 60.0
ALLOWED = 1.02
WITHOUT_ESTIMATES = """
import kvstore.insight.whatif as whatif
whatif.WhatIf.looked_up = lambda *_: False
whatif.WhatIf.run = lambda *_: None
import kvstore.prefixes.book as book
book.PrefixBook.looked_up = book.PrefixBook.granted = book.PrefixBook.run = lambda *_: None
"""
PROMPTS, BLOCKS = 1024, 64
WARM_UP_SECONDS = 60.0
"""After which it is known how many names may be sampled at that rate of look-ups."""
SCRAPE_SECONDS = 5.0


@dataclass
class Served:
    """A sidecar under measurement. processes: its own, and the console's where it has one."""

    handle: NamespaceHandle
    sidecar: int
    console: int | None

    def cpu(self) -> dict[int, float]:
        """Seconds of each thread so far (/proc/PID/task/TID/schedstat)."""
        took = dict[int, float]()
        for thread in Path(f"/proc/{self.sidecar}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                took[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        return took


def cpu_seconds(process: int) -> float:
    """Of all threads of a process so far (clock_getcpuclockid(3) of Linux)."""
    return time.clock_gettime(~process << 3 | 2)


def child(process: int, holding: str) -> int:
    """The child whose command line has that word."""
    give_up_at = time.monotonic() + SECONDS
    while time.monotonic() < give_up_at:
        for one in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            if holding.encode() in Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0"):
                return int(one)
        time.sleep(0.05)
    raise SystemExit(f"no child of {process} is a {holding}")


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
def viewed(address: str) -> Iterator[None]:
    """A page's stream is read meanwhile."""
    give_up_at = time.monotonic() + SECONDS
    while True:
        try:
            stream = urllib.request.urlopen(address, timeout=SECONDS)
            break
        except OSError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.2)
    command = [sys.executable, "-c", "import sys\nwhile sys.stdin.buffer.read1(1 << 16): pass"]
    reader = subprocess.Popen(command, stdin=stream.fileno())
    try:
        yield
    finally:
        reader.kill()
        reader.wait()
        stream.close()


@contextmanager
def served(scratch: Path, has_insight: bool, options: LookupOptions) -> Iterator[Served]:
    """A sidecar with the prompts in it."""
    scratch.mkdir()
    environment, given = dict(os.environ), list[str]()
    if has_insight:
        given = ["--http", "127.0.0.1:0"]
        (scratch / "config.toml").write_text('[console]\nlisten = "127.0.0.1:0"\n')
        given += ["--config", str(scratch / "config.toml")]
    else:
        (scratch / "sitecustomize.py").write_text(WITHOUT_ESTIMATES)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(scratch), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "kvstore", "serve", "--data", str(scratch / "kv"), "--dram", "1GiB"]
    command += ["--nvme", "off", "--socket", str(scratch / "door"), "--json", *given]
    log = (scratch / "log").open("wb")
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True)
    with ExitStack() as stack:
        stack.callback(log.close)
        stack.callback(keeper.wait)
        stack.callback(keeper.send_signal, signal.SIGTERM)
        assert keeper.stdout is not None
        said = json.loads(keeper.stdout.readline() or "{}")
        if "pid" not in said:
            raise SystemExit((scratch / "log").read_text())
        console = None
        if has_insight:
            console = child(keeper.pid, "console")
            stack.enter_context(scraped(f"http://127.0.0.1:{said['http_port']}/metrics"))
            stack.enter_context(viewed(f"http://127.0.0.1:{port_of(console)}/api/stream"))
        store = stack.enter_context(open_patiently(str(scratch / "door")))
        shape = shape_of(options)
        handle = store.namespace(model=MODEL, layout=shape.layout)
        pages = PagePool(shape, options.prompt_blocks, 0, 1).take()
        for prompt in prompts(options):
            assert handle.put(prompt, pages).stored == options.prompt_blocks
        yield Served(handle, said["pid"], console)


def port_of(process: int) -> int:
    """Where a process listens for TCP."""
    give_up_at = time.monotonic() + SECONDS
    while time.monotonic() < give_up_at:
        links = [os.readlink(one) for one in Path(f"/proc/{process}/fd").iterdir() if one.is_symlink()]
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                return int(fields[1].partition(":")[2], 16)
        time.sleep(0.1)
    raise SystemExit("the console does not listen")


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
    number, blocks, end = 0, 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        with handle.lease(handle.match(asked[number % PROMPTS]), deadline_ms=1000) as lease:
            blocks += lease.blocks
        number += 1
    assert blocks >= 0.95 * number * BLOCKS, (blocks, number)
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = LookupOptions(prompt_tokens=64 * BLOCKS)
    asked, rows = prompts(options), []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        on, off = (
            stack.enter_context(served(Path(folder, name), has_insight, options))
            for name, has_insight in (("on", True), ("off", False))
        )
        look_ups(on.handle, asked, WARM_UP_SECONDS)
        for name, work in (("look-up", look_ups), ("leased block", leased_blocks)):
            us = dict[bool, list[float]]({True: [], False: []})
            beside = dict[bool, float]({True: 0.0, False: 0.0})
            console, began = cpu_seconds(on.console or 0), time.monotonic()
            for pair in range(given.pairs + 1):
                for has_insight in (True, False) if pair % 2 else (False, True):
                    one = on if has_insight else off
                    before = one.cpu()
                    count = work(one.handle, asked, given.seconds)
                    took = sorted(seconds - before.get(thread, 0.0) for thread, seconds in one.cpu().items())
                    if pair:  # the first one warms up
                        us[has_insight].append(1e6 * took[-1] / count)
                        beside[has_insight] += sum(took[:-1]) / (given.pairs * given.seconds)
            share = (cpu_seconds(on.console or 0) - console) / (time.monotonic() - began)
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
