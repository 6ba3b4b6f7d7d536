"""What a faulty console costs an engine: look-ups while it is killed, stopped, flooded, or can write nothing.

    PYTHONPATH=benchmarks python tests/console/console_faults.py [--rounds 7] [--seconds 2]

Sidecar and client share one core; the console has the others. Each look-up has to find all blocks, and a prompt that is
read back has to have its bytes. Compared are the 99th percentiles of a round. `flooders` is the limit of `flooded`:
what the same clients cost where a program that asks the sidecar nothing answers them, beside a quiet console.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from insight_cost import BLOCKS, drawn_prompts, look_up
from kv_bench import script
from kv_bench.measure import repeated
from kv_bench.process import HOST, LONGEST_SECONDS, Sidecar, console_command
from kv_bench.rig import MODEL, SMALLEST, PagePool
from kvstore.client.handle import NamespaceHandle

ALLOWED = 1.25
"""Of the quiet figure of the same round."""
PROMPTS = 64
QUIET = "quiet"
FLOOD = """
import itertools, socket, sys
host, port, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3].split()
asked = 0
for path in itertools.cycle(paths):
    links = []
    try:
        for _ in range(int(sys.argv[4])):
            links.append(socket.create_connection((host, port), 5))
            links[-1].sendall(f"GET {path} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n".encode())
        for link in links:
            asked += bool(link.recv(1 << 20))
    except OSError:
        pass
    for link in links:
        link.close()
    print(asked, flush=True)
"""
ANSWERER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0), backlog=64)
print(listener.getsockname()[1], flush=True)
while True:
    with listener.accept()[0] as link:
        link.recv(1 << 16)
        link.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""
KEPT = "/api/status /api/series /api/misses /api/namespaces /api/engines /api/whatif /api/events /"
"""What the console answers from what it has."""
ASKED = "/api/prefixes /api/request?id=a"
"""For what it asks the sidecar each time."""
CONNECTIONS = 16
"""At a time, of each of two processes that flood: one for what it has, one for what it asks for."""
Happened = Callable[[], int]
"""Says afterwards that the fault was there."""


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started meanwhile runs on these cores, and so does this thread."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


class Consoles:
    """Consoles of one sidecar, one after the other, on their own cores."""

    def __init__(self, sidecar: Sidecar, cores: set[int]) -> None:
        self._command, self._cores = console_command(sidecar), cores

    @contextmanager
    def running(self, *, writes: bool = True) -> Iterator[tuple[subprocess.Popen[str], int]]:
        """A console that serves, and its port. writes: whether it can write to a file, or to its log."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        log = os.open(os.devnull if writes else "/dev/full", os.O_WRONLY)
        try:
            with on_cores(self._cores):
                if not writes:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
                process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            os.close(log)
        with process:
            try:
                assert process.stdout is not None
                said = json.loads(process.stdout.readline())
                yield process, int(said["console"].rstrip("/").rpartition(":")[2])
            finally:
                process.kill()

    @contextmanager
    def quiet(self, *, writes: bool = True) -> Iterator[Happened]:
        with self.running(writes=writes) as (console, _):
            yield lambda: int(console.poll() is None)

    @contextmanager
    def killed(self) -> Iterator[Happened]:
        over, began, times = threading.Event(), threading.Event(), [0]

        def kill() -> None:
            while not over.is_set():
                with self.running():
                    times[0] += 1
                began.set()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            assert began.wait(LONGEST_SECONDS), "no console came"
            yield lambda: times[0]
        finally:
            over.set()
            thread.join()

    @contextmanager
    def stopped(self) -> Iterator[Happened]:
        with self.running() as (console, _):
            console.send_signal(signal.SIGSTOP)
            yield lambda: int(Path(f"/proc/{console.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    @contextmanager
    def flooded(self) -> Iterator[Happened]:
        with self.running() as (_, port), self._flooding(port) as answered:
            yield answered

    @contextmanager
    def flooders(self) -> Iterator[Happened]:
        command = [sys.executable, "-P", "-c", ANSWERER, HOST]
        with self.running(), ExitStack() as stack:
            with on_cores(self._cores):
                answerer = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(answerer.kill)
            assert answerer.stdout is not None
            yield stack.enter_context(self._flooding(int(answerer.stdout.readline())))

    @contextmanager
    def _flooding(self, port: int) -> Iterator[Happened]:
        with ExitStack() as stack:
            flooders = []
            with on_cores(self._cores):
                for paths in (KEPT, ASKED):
                    command = [sys.executable, "-P", "-c", FLOOD, HOST, str(port), paths, str(CONNECTIONS)]
                    flooders.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
                    stack.callback(flooders[-1].kill)
            begun = [flooder.stdout.readline() for flooder in flooders if flooder.stdout is not None]
            assert all(begun), "a flooder did not begin"

            def answered() -> int:
                for flooder in flooders:
                    flooder.kill()
                said = [flooder.communicate()[0] for flooder in flooders]
                return sum(int((first + rest).split()[-1]) for first, rest in zip(begun, said, strict=True))

            yield answered


class Engine:
    """A client that looks up prompts, all of which are stored."""

    def __init__(self, handle: NamespaceHandle) -> None:
        self._handle = handle
        pool = PagePool(SMALLEST, BLOCKS, prompts=2)
        self._pages, self._into = pool.take(), pool.take()
        self._prompts = drawn_prompts(PROMPTS)
        for prompt in self._prompts:
            assert handle.put(prompt, self._pages).stored == BLOCKS

    def p99_ms(self, seconds: float) -> float:
        self._read_back()
        took = repeated(lambda turn: look_up(self._handle, self._prompts[turn % PROMPTS]), seconds)
        self._read_back()
        return 1e3 * statistics.quantiles(took, n=100)[-1]

    def _read_back(self) -> None:
        with self._handle.lease(self._handle.match(self._prompts[0]), deadline_ms=1e3 * LONGEST_SECONDS) as lease:
            loaded = self._handle.get(lease, into=self._into)
        assert loaded.tokens == len(self._prompts[0]), loaded.account
        for layer, planes in self._pages.planes.items():
            for stored, read in zip(planes, self._into.planes[layer], strict=True):
                assert (stored[list(self._pages.table)] == read[list(self._into.table)]).all(), "other bytes"


def main() -> None:
    given = script.options(__doc__, rounds=7, seconds=2.0)
    own, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("this needs two cores: one for sidecar and client, another one for the console")
    with ExitStack() as stack:
        stack.enter_context(on_cores({own}))
        sidecar = stack.enter_context(Sidecar({"dram": "1GiB", "nvme": "off"}, has_health=True))
        sidecar.ready()
        store = stack.enter_context(sidecar.client())
        engine = Engine(store.namespace(model=MODEL, layout=SMALLEST.layout))
        consoles = Consoles(sidecar, set(others))
        faults: dict[str, Callable[[], AbstractContextManager[Happened]]] = {QUIET: consoles.quiet}
        faults |= {"killed": consoles.killed, "stopped": consoles.stopped, "flooded": consoles.flooded}
        faults["flooders"] = consoles.flooders
        faults["full"] = partial(consoles.quiet, writes=False)
        figures, times = {name: list[float]() for name in faults}, dict.fromkeys(faults, 0)
        for turn in range(given.rounds + 1):
            for name in random.sample(list(faults), len(faults)):
                with faults[name]() as happened:
                    p99, count = engine.p99_ms(given.seconds), happened()
                assert count, f"{name}: it did not happen"
                if turn:  # the first round warms up
                    figures[name].append(p99)
                    times[name] += count
    quiet = figures.pop(QUIET)
    rows = []
    for name, found in figures.items():
        ratio = statistics.median(one / beside for one, beside in zip(found, quiet, strict=True))
        figure = {"p99_ms": statistics.median(found), "quiet_p99_ms": statistics.median(quiet), "ratio": ratio}
        rows.append({"of": name, **script.rounded(3, **figure), "rounds": given.rounds, "times": times[name]})
    script.end(rows, all(row["ratio"] <= ALLOWED for row in rows))


if __name__ == "__main__":
    script.run(main)
