"""The rows of `kvstore serve` in `benches.py restart`: how soon an engine can call again.

Times count from the start of a new process, interpreter and imports included: until it answers the hello of a client
that calls every few milliseconds, and until `/readyz` says that everything on disk can be found. The limit is the time
to the first hello on an empty directory of the same disk, right before and right after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import median

from kv_bench.restart_directory import DRAM_BYTES, MODEL, SHAPE, Plan, found_blocks, real_pages, real_prompt
from kvstore.bench.measure import quantile
from kvstore.bench.row import SECONDS, Row, Target
from kvstore.bench.sidecar import Sidecar
from kvstore.client.socket_door import MAX_DEADLINE_MS

TARGET_SECONDS = 2.0
"""To the first hello, after a clean end and after a kill, with a million blocks or more."""

WORDS = (
    "From the start of the process on, imports and all, to the first hello that is answered; empty: the same on an "
    "empty directory, before and after. ready: all on disk can be found; then every block was, through the socket."
)


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds from a process's start to its hello, and until it was ready. empty: to the hello on an empty directory,
    mean of before and after."""

    hello: float
    ready: float
    empty: float


def run(directory: Path, plan: Plan, laps: int, *, is_targeted: bool, say: Callable[[str], None]) -> list[Row]:
    """Serve a directory that was closed in order, again and again; then one whose sidecar was killed. It is closed."""
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


def row_of(how: str, served: list[StartTimes], *, is_targeted: bool) -> Row:
    """The laps of one kind, as a row."""
    hellos = [one.hello for one in served]
    return Row(
        {"how": how},
        median(hellos),
        SECONDS,
        len(served),
        quantile(hellos, 0.25),
        quantile(hellos, 0.75),
        "empty",
        median(one.empty for one in served),
        median(one.hello / one.empty for one in served),
        target=Target(TARGET_SECONDS, is_least=False, of="value") if is_targeted else None,
        details={"ready": median(one.ready for one in served)},
    )


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
