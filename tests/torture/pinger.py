"""A well-behaved client of a tenant, in a process of its own: `python -m torture.pinger SOCKET`

It pings at a steady pace until its standard input ends, and prints how often, and what took longest, in milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

from kvstore.protocol import messages as m
from torture.peer import come_in

PACE_SECONDS = 0.002


def main() -> None:
    peer = come_in(sys.argv[1])
    os.write(1, b"\n")  # it begins
    trips: list[float] = []
    while not select.select([0], [], [], PACE_SECONDS)[0]:
        began = time.perf_counter()
        assert peer.ask(m.Ping()) == m.Done()
        trips.append(1000 * (time.perf_counter() - began))
    trips.sort()
    told = {"pings": len(trips), "ping_ms_p99": trips[len(trips) * 99 // 100], "ping_ms_max": trips[-1]}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
