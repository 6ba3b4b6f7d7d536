"""Long runs against the promises of disk and sidecar, for as long as one likes; the suite runs them in short forms.

    make torture ARGS="--flips 200000 --index-flips 5000 --power 1000 --points 20 --stores 1000 --seed 7"
    make torture ARGS="--clients 2000 --restarts 50"
    make torture ARGS="--messages 10000 --half-open 1000 --flood 60"
    make torture ARGS="--nested 1000000 --quiet-ms 50"

    flips        damage to a stocked directory, that many single damages (attack/test_nvme_damage.py)
    index-flips  single bits of the index file, each opened and used by another process (attack/test_index_damage.py)
    power        lives on a simulated disk that loses power (simulation/test_nvme_power.py)
    points       a process on a whole store, ended by SIGKILL at every failpoint, that many times each
    stores       a process on a whole store, ended by SIGKILL at a random moment
    clients      a client of a sidecar, ended by SIGKILL or stopped by SIGSTOP at a random moment of a copy or fill
    restarts     a sidecar, ended by SIGKILL under clients that go on, and started again by its keeper
    messages     to a sidecar, none of them as it should be, with connections of all kinds around them
    half-open    connections to a sidecar that say nothing, say half a hello, or never read
    nested       cases of values changed within what is packed, sealed, signed or checked: most are given to the
                 parsers in this process, a fourth to a sidecar, of which another tenant asks meanwhile, some to a
                 client by a sidecar that answers oddly, some to a store on a disk. --quiet-ms: what that tenant may
                 wait on a quiet machine
    flood        seconds of clients that ask a sidecar as fast as they may; what others wait for meanwhile
    long-prompts prompts of 1,000,000 tokens, and a hundred times as many of 6,400, mixed on one connection of a sidecar

It ends with status 1 at the first broken promise and prints the seed that repeats it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping

from attack.test_index_damage import index_damage
from attack.test_nvme_damage import damage
from simulation.test_nvme_power import live
from torture import Report
from torture import clients as sidecar
from torture.campaign import nursery, points, stores
from torture.door import half_open, messages
from torture.flood import flood
from torture.long_prompts import long_prompts
from torture.nested import nested
from torture.nested_disk import directories
from torture.nested_door import clients as odd_answers
from torture.nested_door import door as odd_requests
from torture.nursery import Nursery
from torture.points import POINTS


class Progress:
    """A line now and then."""

    def __init__(self, what: str, total: int, *, quiet: bool) -> None:
        self.what, self.total, self.quiet = what, total, quiet
        self.started = self.said = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if not self.quiet and (now - self.said > 5 or done >= self.total):
            self.said = now
            print(f"{self.what}: {done} of {self.total} in {now - self.started:.1f} s", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture", description="Long runs against the promises of disk and sidecar.")
    parser.add_argument("--flips", type=int, default=100_000, help="single damages to a stocked directory")
    parser.add_argument("--index-flips", type=int, default=100, help="single bits of the index file")
    parser.add_argument("--power", type=int, default=200, help="lives on a disk that loses power")
    parser.add_argument("--points", type=int, default=1, help="processes ended by SIGKILL at each failpoint")
    parser.add_argument("--stores", type=int, default=50, help="processes on a whole store ended by SIGKILL")
    parser.add_argument("--clients", type=int, default=100, help="clients of a sidecar ended by SIGKILL, or stopped")
    parser.add_argument("--restarts", type=int, default=8, help="sidecars ended by SIGKILL under their clients")
    parser.add_argument("--messages", type=int, default=2_000, help="broken messages to a sidecar")
    parser.add_argument("--half-open", type=int, default=200, help="connections to a sidecar that stop half way")
    parser.add_argument("--nested", type=int, default=5_000, help="values changed within nested structures")
    parser.add_argument("--quiet-ms", type=float, default=float("inf"), help="that another tenant may wait meanwhile")
    parser.add_argument("--flood", type=int, default=10, help="seconds of clients that flood a sidecar")
    parser.add_argument("--long-prompts", type=int, default=10, help="prompts of 1,000,000 tokens, beside short ones")
    parser.add_argument("--seed", type=int, default=0, help="of all chance, except for the moment of a kill")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON and nothing else")
    options = parser.parse_args()
    sums: dict[str, dict[str, float | str]] = {}

    def run(what: str, total: int, work: Callable[[Progress], Mapping[str, float | str]]) -> None:
        if total > 0:
            progress = Progress(what, total, quiet=options.json)
            counts: dict[str, float | str] = dict(work(progress))
            counts["seconds"] = round(time.monotonic() - progress.started, 1)
            sums[what] = counts
            if not options.json:
                told = {name: count for name, count in counts.items() if name not in POINTS}
                if what == "points":
                    told = {"failpoints": len(counts.keys() & set(POINTS)), **told}
                print(f"{what}: " + ", ".join(f"{name} {count}" for name, count in told.items()), flush=True)

    def lives(progress: Progress) -> dict[str, int]:
        total: Counter[str] = Counter()
        for number in range(options.power):
            first = options.seed * 1_000_003 + number
            total.update(live(range(first, first + 1)))
            progress(number + 1)
        return dict(total)

    def killed(
        made: Callable[[], Nursery], ends: Callable[[Nursery, int, int, Report], dict[str, int]], times: int
    ) -> Callable[[Progress], dict[str, int]]:
        def work(progress: Progress) -> dict[str, int]:
            with made() as children:
                return ends(children, times, options.seed, progress)

        return work

    try:
        run("flips", options.flips, lambda progress: damage(options.flips, options.seed, progress))
        run("index flips", options.index_flips, lambda told: index_damage(options.index_flips, options.seed, told))
        run("power", options.power, lives)
        run("points", options.points * len(POINTS), killed(nursery, points, options.points))
        run("stores", options.stores, killed(nursery, stores, options.stores))
        run("clients", options.clients, killed(sidecar.nursery, sidecar.clients, options.clients))
        run("restarts", options.restarts, killed(sidecar.nursery, sidecar.restarts, options.restarts))
        run("messages", options.messages, lambda progress: messages(options.messages, options.seed, progress))
        run("half-open", 2 * options.half_open, lambda told: half_open(options.half_open, options.seed, report=told))
        within, seed = options.nested, options.seed
        requests, answers, disks = within // 4, within // 40, within // 200
        run("nested", within - requests - answers - disks, lambda told: nested(told.total, seed, told))
        run("nested requests", requests, lambda told: odd_requests(requests, seed, told, options.quiet_ms))
        run("nested answers", answers, lambda told: odd_answers(answers, seed, told))
        run("nested disks", disks, lambda told: directories(disks, seed, told))
        run("flood", options.flood, lambda progress: flood(options.flood, options.seed, report=progress))
        long = options.long_prompts
        run("long prompts", long, lambda progress: long_prompts(long, 100 * long, progress))
    except AssertionError as error:
        print(f"a promise was broken: {error}", file=sys.stderr)
        return 1
    finally:
        if options.json:  # also of what went well before
            print(json.dumps(sums))
    return 0


if __name__ == "__main__":
    sys.exit(main())
