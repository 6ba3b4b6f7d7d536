"""Floods against a real sidecar: clients that ask as fast as they may, in a cgroup with a limit of CPU time.

Meanwhile well-behaved connections ask at a steady pace. What they waited for in the sidecar's own queue is the
sidecar's account of their session (`kvstore stat --json`); beside it stand their round trips, which have the clients'
own waiting for a core in them, and both of the same connections without a flood, before and after.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from kvstore.protocol import messages as m
from torture import Report, quiet
from torture.doorstep import OTHER_TENANT, PATHS, Household, Sidecar
from torture.peer import Peer, opened_by
from waiting import wait_until

QUEUE_WAIT_MS = 5.0
"""Of the others, at p99."""
QUIET_TRIP_MS = 1.0
"""At p99, without a flood, on a machine that does nothing else. Where other programs have the cores and this takes
longer, the others may wait longer in proportion."""
CPU_SHARE = 0.5
"""Of one core, for all who flood."""
QUIET_SECONDS = 5.0
PACE_SECONDS = 0.004
"""Of each well-behaved connection, between two requests."""
OTHERS = ("default", "default", OTHER_TENANT, OTHER_TENANT)
ENGINE = "well-behaved"
CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"))


def flood(
    seconds: float, seed: int, kinds: Sequence[str] = (), report: Report = quiet, most_ms: float = QUEUE_WAIT_MS
) -> dict[str, float | str]:
    """So many seconds of these kinds of floods together, of all if none is named; what the others waited for, in
    milliseconds. most_ms: of their wait in the sidecar's queue, at p99, where nothing else has the cores."""
    told: dict[str, float | str] = {}
    with Sidecar() as sidecar:
        household = Household(sidecar.sockets["default"], "household")
        try:
            household.turn()
            household.hold()
            quiet = min(QUIET_SECONDS, seconds)
            for name, wait in _served(sidecar, "before", quiet, lambda: None).items():
                told[f"quiet_{name}"] = wait
            with _limited_group() as (how, enter):
                told["limited_by"] = how
                command = [sys.executable, "-m", "torture.flooder", sidecar.sockets["default"], str(seed)]
                flooders = [
                    subprocess.Popen([*command, *some], env={**os.environ, **PATHS}, stdout=subprocess.PIPE)
                    for some in ([list(kinds)] if kinds else [list(TALKING), list(CALLING)])
                ]
                try:
                    for one in flooders:
                        assert one.stdout is not None and one.stdout.read(1), "a flooder did not begin"
                        enter(one.pid)
                    most = 0

                    def look() -> None:
                        nonlocal most
                        most = max(most, sidecar.resident_bytes())
                        report(round(time.monotonic() - began))

                    began, without_core = time.monotonic(), sidecar.waited_for_core()
                    told |= _served(sidecar, "flooded", seconds, look)
                    told["flooders_core_share"] = round(sum(map(_core_seconds, flooders)) / seconds, 2)
                    told["without_core_share"] = round((sidecar.waited_for_core() - without_core) / seconds, 3)
                    for one in flooders:
                        assert one.poll() is None, f"a flooder ended by itself, with status {one.returncode}"
                finally:
                    for one in flooders:
                        one.kill()
                        one.communicate()
            for name, wait in _served(sidecar, "after", quiet, lambda: None).items():
                told[f"quiet_{name}"] = max(float(told[f"quiet_{name}"]), wait)
            household.turn()
            household.check_held()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {error}") from error
        finally:
            household.close()
        sidecar.await_rest()
        facts = sidecar.facts()
        told["messages"] = sum(facts.door.served.values())
        told["refused_connections"] = facts.door.refused
        told["most_mib"] = most >> 20
        bound = sidecar.most_bytes(FLOODING_CONNECTIONS)
        assert most <= bound, f"{most} bytes of memory; at most {bound}"
        waited, quiet_trip = float(told["queue_wait_ms_p99"]), float(told["quiet_round_trip_ms_p99"])
        told["allowed_ms_p99"] = allowed = round(most_ms * max(1.0, quiet_trip / QUIET_TRIP_MS), 1)
        assert waited < allowed, f"others waited {waited} ms in the queue at p99, not below {allowed}: {told}"
    return told


FLOODING_CONNECTIONS = 64
TALKING = ("pings", "matches", "large matches", "leases", "stores", "commits", "lists")
CALLING = ("connections",)


def _served(sidecar: Sidecar, name: str, seconds: float, look: Callable[[], None]) -> dict[str, float]:
    """Well-behaved connections for so long: waits in the sidecar's queue, and round trips."""
    ends_at = time.monotonic() + seconds
    trips: list[list[float]] = [[] for _ in OTHERS]
    failures: list[BaseException] = []
    peers = [Peer(sidecar.sockets[tenant]) for tenant in OTHERS]

    def behave(peer: Peer, mine: list[float], seed: int) -> None:
        try:
            random = Random(seed)
            namespace = opened_by(peer)
            keys = [random.randbytes(32) for _ in range(64)]
            number = 2
            while time.monotonic() < ends_at:
                verb = [m.MatchPrefix(namespace, keys), m.Ping(), m.Release([number])][number % 3]
                began = time.perf_counter()
                answer = peer.ask(verb, number)
                mine.append(time.perf_counter() - began)
                assert not isinstance(answer, m.Failed), answer
                number += 1
                time.sleep(random.random() * 2 * PACE_SECONDS)
        except BaseException as error:
            failures.append(error)

    try:
        for peer in peers:
            welcome = peer.ask(m.Hello(1, 1, f"{ENGINE} {name}", b""))
            assert isinstance(welcome, m.Welcome), f"a well-behaved client is not let in: {welcome}"
        threads = [
            threading.Thread(target=behave, args=(p, t, n)) for n, (p, t) in enumerate(zip(peers, trips, strict=True))
        ]
        for thread in threads:
            thread.start()
        while time.monotonic() < ends_at:
            time.sleep(0.2)
            look()
        for thread in threads:
            thread.join()
        assert not failures, f"a well-behaved client was not served: {failures[0]!r}"
        mine = [one for one in sidecar.facts().sessions if one.engine == f"{ENGINE} {name}"]
        assert len(mine) == len(OTHERS)
        sorted_trips = sorted(trip for some in trips for trip in some)
        return {
            "asked": len(sorted_trips),
            "queue_wait_ms_p50": max(one.wait_ms_p50 or 0.0 for one in mine),
            "queue_wait_ms_p99": max(one.wait_ms_p99 or 0.0 for one in mine),
            "round_trip_ms_p50": round(1000 * sorted_trips[len(sorted_trips) // 2], 3),
            "round_trip_ms_p99": round(1000 * sorted_trips[len(sorted_trips) * 99 // 100], 3),
        }
    finally:
        for peer in peers:
            peer.close()


def _core_seconds(process: subprocess.Popen[bytes]) -> float:
    """What it has had so far, its start included."""
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def _limited_group() -> Iterator[tuple[str, Callable[[int], None]]]:
    """A cgroup with a limit of CPU time, of either version; where none can be made, the scheduler's idle class."""
    for root in CGROUPS:
        if not (root / "cgroup.procs").exists():  # a folder that only holds the hierarchies
            continue
        group = root / f"kv-torture-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            period, quota = 20_000, int(20_000 * CPU_SHARE)
            try:
                if (group / "cpu.max").exists():
                    (group / "cpu.max").write_text(f"{quota} {period}")
                elif (group / "cpu.cfs_quota_us").exists():
                    (group / "cpu.cfs_period_us").write_text(str(period))
                    (group / "cpu.cfs_quota_us").write_text(str(quota))
                else:  # without the controller
                    continue
            except OSError:
                continue

            def enter(pid: int, group: Path = group) -> None:
                (group / "cgroup.procs").write_text(str(pid))
                assert group.name in Path(f"/proc/{pid}/cgroup").read_text(), "a flooder is not in its cgroup"

            yield f"cgroup with {CPU_SHARE} of a core", enter
            return
        finally:
            _remove(group)
    yield "SCHED_IDLE, since no cgroup with a limit of CPU time can be made here", _be_idle


def _be_idle(pid: int) -> None:
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def _remove(group: Path) -> None:
    """It is busy until its processes are buried."""

    def is_gone() -> bool:
        with suppress(OSError):
            group.rmdir()
        return not group.exists()

    wait_until(is_gone)
