"""The rows of `kvstore serve` in `kvstore bench restart`: how soon an engine can call again.

Times count from the start of a new process, interpreter and imports included: until it answers the hello of a client
that calls every few milliseconds, and until `/readyz` says that everything on disk can be found. The limit is the time
to the first hello on an empty directory of the same disk, right before and right after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any

from rich.table import Table

from kvstore.bench.measure import quantile
from kvstore.bench.restart_directory import DRAM_BYTES, MODEL, SHAPE, Plan, found_blocks, real_pages, real_prompt
from kvstore.bench.sidecar import Sidecar
from kvstore.client.socket_door import MAX_DEADLINE_MS

TARGET_SECONDS = 2.0
"""To the first hello, after a clean end and after a kill, with a million blocks or more."""

WORDS = (
    "from the start of the process on, imports and all. empty: to the hello on an empty directory, before and after; "
    "ratio: hello / empty. ready: everything on disk can be found; then every block was, through the socket."
)


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds from a process's start to its hello, and until it was ready. empty: to the hello on an empty directory,
    mean of before and after."""

    hello: float
    ready: float
    empty: float


@dataclass(frozen=True, slots=True)
class SidecarRow:
    """Sidecars after one kind of end: medians of seconds, and quartiles of hello; see `StartTimes`.

    times_empty: hello / empty.
    """

    how: str
    laps: int
    hello: float
    hello_low: float
    hello_high: float
    ready: float
    empty: float
    times_empty: float
    target: float | None

    @property
    def met(self) -> bool | None:
        """None without a target."""
        return None if self.target is None else self.hello <= self.target

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}


def run(directory: Path, plan: Plan, laps: int, *, is_targeted: bool, say: Callable[[str], None]) -> list[SidecarRow]:
    """Serve a cleanly closed directory repeatedly, then one whose sidecar was killed. It ends closed."""
    store: dict[str, str | int] = {
        "data": str(directory),
        "dram": DRAM_BYTES,
        "nvme": plan.budget_bytes,
        "slab": plan.slab_bytes,
        "scrub": "off",
    }
    found: dict[str, list[StartTimes]] = {"clean": [], "killed": []}
    before = _hello_of_an_empty_one(store)
    for how, described in (("clean", "a clean end"), ("killed", "a kill")):
        for lap in range(laps):
            say(f"sidecar {lap + 1} of {laps}, after {described}")
            # Each end is the next start's condition: from the last clean one on they are killed, except the last.
            is_last = lap == laps - 1
            with Sidecar(store, has_health=True) as sidecar:
                hello, ready = sidecar.greeted(), sidecar.ready()
                _check(sidecar, plan)
                if is_last == (how == "clean"):
                    sidecar.kill()
            after = _hello_of_an_empty_one(store)
            found[how].append(StartTimes(hello, ready, (before + after) / 2))
            before = after
    return [row_of(how, served, is_targeted=is_targeted) for how, served in found.items()]


def row_of(how: str, served: list[StartTimes], *, is_targeted: bool) -> SidecarRow:
    """The row of one kind's laps."""
    hellos = [one.hello for one in served]
    return SidecarRow(
        how,
        len(served),
        median(hellos),
        quantile(hellos, 0.25),
        quantile(hellos, 0.75),
        median(one.ready for one in served),
        median(one.empty for one in served),
        median(one.hello / one.empty for one in served),
        TARGET_SECONDS if is_targeted else None,
    )


def render(rows: list[SidecarRow], console: Any) -> None:
    table = Table("sidecar", "laps", "hello", "quartiles", "empty", "ratio", "ready", "target")
    for row in rows:
        mark = {None: "", True: " met", False: " missed"}[row.met]
        table.add_row(
            row.how,
            str(row.laps),
            f"{row.hello:.2f} s",
            f"{row.hello_low:.2f} .. {row.hello_high:.2f}",
            f"{row.empty:.2f} s",
            f"{row.times_empty:.1f}",
            f"{row.ready:.2f} s",
            "" if row.target is None else f"{row.target:g} s{mark}",
        )
    console.print("kvstore serve on the same directory, from the start of the process on", table, sep="\n")
    console.print(WORDS)


def _check(sidecar: Sidecar, plan: Plan) -> None:
    """Check that every block is found through the socket, and that the real prompt loads."""
    prompt, pages = real_prompt(), real_pages().take()
    with sidecar.client() as client:
        handle = client.namespace(model=MODEL, layout=SHAPE.layout)
        found = found_blocks(handle, plan)
        assert found == plan.blocks, f"{found} of {plan.blocks} blocks are back"
        with handle.lease(handle.match(prompt), deadline_ms=MAX_DEADLINE_MS) as lease:
            loaded = handle.get(lease, pages)
    assert loaded.tokens == len(prompt), f"{loaded.tokens} of {len(prompt)} tokens: {loaded.reason}"


def _hello_of_an_empty_one(store: Mapping[str, str | int]) -> float:
    empty = Path(str(store["data"])).with_name("empty")
    with Sidecar({**store, "data": str(empty)}, has_health=True) as sidecar:
        seconds = sidecar.greeted()
        sidecar.ready()
    rmtree(empty)
    return seconds
