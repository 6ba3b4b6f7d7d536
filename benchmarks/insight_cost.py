"""What insight costs a sidecar: CPU for each look-up and each leased block, with all of it on over with none of it.

    python benchmarks/insight_cost.py [--pairs 40] [--seconds 1]

One sidecar is switched turn by turn, since two that differ in nothing are a twentieth apart. On: `/metrics` is scraped,
other sizes are estimated, prefixes followed, and a console shows a page. Off: the hooks of the serving thread do
nothing and the console is stopped. Compared is the CPU time of the thread that serves: quote the median.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import sqrt
from operator import truediv
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from kv_bench import script
from kv_bench.measure import repeated
from kv_bench.process import LONGEST_SECONDS, Sidecar, viewed
from kv_bench.rig import MODEL, SMALLEST, PagePool
from kvstore.client.handle import NamespaceHandle

ALLOWED = 1.02
SWITCHED = """
import os, socket, sys, threading

def obey():
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ["KV_INSIGHT_SWITCH"])
        for word in link.makefile():
            from kvstore.insight.curve import WhatIf
            from kvstore.insight.prefixes import PrefixBook
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


class Served:
    """The sidecar under measurement: a handle of its one client, its process, its console's, and its insight."""

    def __init__(self, handle: NamespaceHandle, sidecar: Sidecar, link: socket.socket, console: int) -> None:
        self.handle, self._link, self._console, self._metrics = handle, link, console, f"{sidecar.http}/metrics"
        self._process = sidecar.told["pid"]
        self._is_on = True
        self.scrapes = 0

    def switch(self, is_on: bool) -> None:
        if is_on == self._is_on:
            return
        self._link.sendall(b"on\n" if is_on else b"off\n")
        assert self._link.recv(1) == b"!"
        os.kill(self._console, signal.SIGCONT if is_on else signal.SIGSTOP)
        self._is_on = is_on

    def cpu(self) -> dict[int, float]:
        took = dict[int, float]()
        for thread in Path(f"/proc/{self._process}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                took[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        return took

    def scrape(self, over: threading.Event) -> None:
        seconds_on = 0.0
        while not over.wait(TICK_SECONDS):
            seconds_on += TICK_SECONDS * self._is_on
            if self._is_on and seconds_on >= SCRAPE_SECONDS:
                seconds_on = 0.0
                with urllib.request.urlopen(self._metrics, timeout=LONGEST_SECONDS) as answer:
                    answer.read()
                self.scrapes += 1


@contextmanager
def served(prompts: list[np.ndarray]) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "sitecustomize.py").write_text(SWITCHED)
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(os.path.join(folder, "switch"))
        door.listen()
        door.settimeout(LONGEST_SECONDS)
        given = {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))}
        with patch.dict(os.environ, given | {"KV_INSIGHT_SWITCH": os.path.join(folder, "switch")}):
            sidecar = stack.enter_context(Sidecar({"dram": "1GiB", "nvme": "off"}, has_health=True))
            link = stack.enter_context(door.accept()[0])
        link.settimeout(LONGEST_SECONDS)
        sidecar.ready()
        handle = stack.enter_context(sidecar.client()).namespace(model=MODEL, layout=SMALLEST.layout)
        pages = PagePool(SMALLEST, BLOCKS).take()
        for prompt in prompts:
            assert handle.put(prompt, pages).stored == BLOCKS
        console, _ = stack.enter_context(viewed(sidecar))
        one, over = Served(handle, sidecar, link, console), threading.Event()
        scraper = threading.Thread(target=one.scrape, args=(over,))
        scraper.start()
        stack.callback(scraper.join)
        stack.callback(over.set)
        yield one


def drawn_prompts(count: int = PROMPTS) -> list[np.ndarray]:
    tokens = BLOCKS * SMALLEST.block_tokens
    return [np.random.default_rng(number).integers(0, 1 << 17, tokens, dtype=np.uint32) for number in range(count)]


def look_up(handle: NamespaceHandle, prompt: np.ndarray) -> None:
    match = handle.match(prompt)
    assert match.blocks == BLOCKS, match.account


def lease(handle: NamespaceHandle, prompt: np.ndarray) -> None:
    with handle.lease(handle.match(prompt), deadline_ms=1e3 * LONGEST_SECONDS) as lease:
        assert lease.blocks == BLOCKS, lease.account


WORKS = {"look-up": (look_up, 1), "leased block": (lease, BLOCKS)}
"""What is measured, and how many there are in one piece of work."""


def done(one: Served, name: str, prompts: list[np.ndarray], seconds: float) -> int:
    work, pieces = WORKS[name]
    return pieces * len(repeated(lambda turn: work(one.handle, prompts[turn % len(prompts)]), seconds))


def measured(one: Served, name: str, prompts: list[np.ndarray], pairs: int, seconds: float) -> dict[str, Any]:
    us: dict[bool, list[float]] = {True: [], False: []}
    beside, scrapes, spent = {True: 0.0, False: 0.0}, one.scrapes, pairs * seconds
    for pair in range(pairs + 1):
        for has_insight in (True, False) if pair % 2 else (False, True):
            one.switch(has_insight)
            before = one.cpu()
            count = done(one, name, prompts, seconds)
            took = sorted(seconds - before.get(thread, 0.0) for thread, seconds in one.cpu().items())
            if pair:  # the first one warms up
                us[has_insight].append(1e6 * took[-1] / count)
                beside[has_insight] += sum(took[:-1]) / spent
    assert one.scrapes > scrapes or spent < 2 * SCRAPE_SECONDS, "none was read"
    ratios = list(map(truediv, us[True], us[False]))
    low, middle, high = statistics.quantiles(ratios, n=4)
    error = 1.2533 * statistics.stdev(ratios) / sqrt(pairs)  # of a median, of what is normal
    figures = {"ratio": middle, "standard_error": error, "other_threads_share_of_a_core": beside[True] - beside[False]}
    times = {"cpu_us_with": statistics.median(us[True]), "cpu_us_without": statistics.median(us[False])}
    spread = {"quartiles": [round(low, 4), round(high, 4)], "pairs": pairs}
    return {"of": name, **script.rounded(2, **times), **script.rounded(4, **figures), **spread}


def main() -> None:
    given = script.options(__doc__, pairs=40, seconds=1.0)
    prompts = drawn_prompts()
    with served(prompts) as one:
        done(one, "look-up", prompts, WARM_UP_SECONDS)
        rows = [measured(one, name, prompts, given.pairs, given.seconds) for name in WORKS]
    script.end(rows, all(row["ratio"] <= ALLOWED for row in rows))


if __name__ == "__main__":
    script.run(main)
