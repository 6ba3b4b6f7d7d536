"""`benches.py restart`: how long it takes until what is on disk can be found again.

A directory that lists a million blocks (`restart_directory` says which parts are real) is opened by a series of new
processes. Times count from the call of `kvstore.open`, without imports: until it returns, until the first match is
answered, and until all blocks can be found.

    clean     the process before closed the store
    killed    the process before was ended by SIGKILL: another process walks the index before it is trusted
    cold      closed, and the index is not in the page cache, as after a boot

The limit is one pass over the same index with LMDB alone, in this process, before and after each. A sidecar's start on
the same directory is in `restart_sidecar`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import lmdb

import kvstore
from kv_bench import restart_sidecar
from kv_bench.restart_directory import DRAM_BYTES, MODEL, REAL_BLOCKS, SHAPE, Plan, build, real_pages, real_prompt
from kvstore.bench.measure import Progress, quantile, resident_bytes, teller
from kvstore.bench.row import SECONDS, BenchResult, Row, Section, Target
from kvstore.block import codec
from kvstore.block.errors import BadInput, StoreError
from kvstore.config import format_size
from tiering.nvme import lmdb_index
from tiering.nvme.slab_files import disk_room

TARGET_SECONDS = 3.0
TARGET_BLOCKS = 1_000_000
"""The target is set for this many blocks, after a clean end and after a kill."""

MOST_BLOCKS = 4_000_000
LOOK_SECONDS = 0.01
"""Interval of matches while the store loads its index."""
LONGEST_SECONDS = 600.0
_NEEDED_BEFORE_OPEN = (codec, lmdb_index)  # `open` itself imports them, once


@dataclass(frozen=True, slots=True)
class RestartOptions:
    """blocks: on disk. prompt_blocks: of a prompt. laps: restarts after a clean end, and as many after a kill;
    sidecar_laps: the same of sidecars.

    data: a directory on the disk to measure; None for that of temporary files.
    """

    blocks: int = TARGET_BLOCKS
    prompt_blocks: int = 512
    laps: int = 5
    sidecar_laps: int = 5
    data: str | None = None

    def __post_init__(self) -> None:
        if not REAL_BLOCKS < self.blocks <= MOST_BLOCKS:
            raise BadInput(f"blocks={self.blocks}; give {REAL_BLOCKS + 1} to {MOST_BLOCKS}")


@dataclass(frozen=True, slots=True)
class Started:
    """A process's times: seconds from the call of `open`. slowest_match_ms: of one block, during loading. grown_bytes:
    the process's growth."""

    opened: float
    answered: float
    warmed: float
    slowest_match_ms: float
    grown_bytes: int


WORDS = (
    "From the call of open on until everything can be found; opened: until open returns; answered: until the first "
    "match is. beside: one pass of LMDB over the same index. slowest match: of one block, while the others came in. "
    "killed: another process walks the index first. cold: the index is not in the page cache. A start does not read "
    "frames; those of the bench are holes, but for one prompt, which was loaded and verified after each start."
)


def run(options: RestartOptions | None = None, progress: Progress = None) -> BenchResult:
    """Build the directory, then restart again and again. Raises `BadInput` where there is too little disk for it."""
    options = options or RestartOptions()
    plan = Plan(options.blocks, options.prompt_blocks)
    say = teller(progress)
    try:
        if options.data is not None:
            Path(options.data).mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.data)
    except OSError as error:
        raise BadInput(f"{options.data} cannot be used: {error.strerror}; give another directory") from None
    with scratch as name:
        room = disk_room(Path(name))
        if plan.budget_bytes > room:
            raise BadInput(
                f"{options.blocks} blocks stand for {format_size(plan.budget_bytes)} of slabs, and the disk has "
                f"{format_size(room)}: they are nearly all holes, but a store asks for the room; give fewer --blocks, "
                "or another directory with --data"
            )
        directory = Path(name) / "store"
        build(directory, plan, say)
        return _restart_all(options, plan, directory, say)


def _restart_all(options: RestartOptions, plan: Plan, directory: Path, say: Callable[[str], None]) -> BenchResult:
    index = directory / "nvme" / "index"
    data = index / lmdb_index.DATA_FILE
    found: dict[str, list[tuple[Started, float]]] = {"clean": [], "killed": [], "cold": []}
    _pass_over(index)  # from here on, what the build left is in the page cache
    for how, described in (("clean", "a clean end"), ("killed", "a kill")):
        for lap in range(options.laps):
            say(f"restart {lap + 1} of {options.laps}, after {described}")
            before = _pass_over(index)
            # Each end is the next start's condition: from the last clean one on they are killed, except the last.
            is_last = lap == options.laps - 1
            started = _start(directory, plan, kill=is_last if how == "clean" else not is_last)
            found[how].append((started, (before + _pass_over(index)) / 2))
    say("restart with a cold index")
    _forget(data)
    alone = _pass_over(index)
    _forget(data)
    found["cold"].append((_start(directory, plan), alone))
    is_targeted = options.blocks >= TARGET_BLOCKS
    sidecar = restart_sidecar.run(directory, plan, options.sidecar_laps, is_targeted=is_targeted, say=say)
    everything = [started for laps in found.values() for started, _ in laps]
    grown, size = median(started.grown_bytes for started in everything) / plan.blocks, data.stat().st_size
    words = f"{WORDS} The index has {format_size(size)}; a process grew by {grown:.0f} bytes per block."
    rows = [_row(how, laps, options) for how, laps in found.items()]
    sections = [
        Section(rows, f"{options.blocks:,} blocks, in this process", words),
        Section(sidecar, "kvstore serve on the same directory", restart_sidecar.WORDS, name="sidecar"),
    ]
    return BenchResult("restart", options, sections, {"bytes_per_block": grown, "index_bytes": size})


def _row(how: str, laps: list[tuple[Started, float]], options: RestartOptions) -> Row:
    warmed = [started.warmed for started, _ in laps]
    is_targeted = how in ("clean", "killed") and options.blocks >= TARGET_BLOCKS
    seconds = TARGET_SECONDS * options.blocks / TARGET_BLOCKS
    return Row(
        {"how": how},
        median(warmed),
        SECONDS,
        len(laps),
        quantile(warmed, 0.25),
        quantile(warmed, 0.75),
        "index alone",
        median(index for _, index in laps),
        median(started.warmed / index for started, index in laps),
        target=Target(seconds, is_least=False, of="value") if is_targeted else None,
        details={
            "opened": median(started.opened for started, _ in laps),
            "answered": median(started.answered for started, _ in laps),
            "slowest_match_ms": max(started.slowest_match_ms for started, _ in laps),
        },
    )


def _pass_over(index: Path) -> float:
    """The limit: seconds of LMDB alone for every pair of the index."""
    start, size = perf_counter(), 0
    with (
        lmdb.open(os.fspath(index), readonly=True, lock=False, create=False, readahead=False, max_dbs=0) as environment,
        environment.begin() as transaction,
    ):
        for key, value in transaction.cursor():
            size += len(key) + len(value)
    assert size, "an index with something in it"
    return perf_counter() - start


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


# The process that starts ----------------------------------------------------------------------------------------------


def _start(directory: Path, plan: Plan, *, kill: bool = False) -> Started:
    """Open the directory in a new process. kill: end it without closing."""
    answer = directory.with_name("started.json")
    job = json.dumps({"directory": str(directory), "answer": str(answer), "kill": kill, **asdict(plan)})
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kv_bench.restart", job],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    if done.returncode != (-signal.SIGKILL if kill else 0):
        raise StoreError(f"the process that restarts ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    started = Started(**json.loads(answer.read_text()))
    answer.unlink()
    return started


def main(job: dict[str, Any]) -> None:
    """Open, match, wait, and record the times."""
    plan = Plan(job["blocks"], job["prompt_blocks"])
    prompt, pages = real_prompt(), real_pages().take()
    before = resident_bytes()
    start = perf_counter()
    with kvstore.embedded(
        job["directory"], dram=DRAM_BYTES, nvme=plan.budget_bytes, slab=plan.slab_bytes, scrub="off"
    ) as store:
        opened = perf_counter() - start
        handle = store.namespace(model=MODEL, layout=SHAPE.layout)
        handle.match(prompt)
        answered = perf_counter() - start
        slowest, first_block = 0.0, prompt[: SHAPE.block_tokens]
        while not store.warmed(0) and perf_counter() - start < LONGEST_SECONDS:
            sleep(LOOK_SECONDS)
            asked = perf_counter()
            handle.match(first_block)
            slowest = max(slowest, perf_counter() - asked)
        warmed = perf_counter() - start
        grown = resident_bytes() - before
        assert store.warmed(0), "it could not be taken in"
        assert store.usage().blocks == plan.blocks, f"{store.usage().blocks} of {plan.blocks} blocks are back"
        with handle.lease(handle.match(prompt), deadline_ms=60_000) as lease:
            loaded = handle.get(lease, pages)
        assert loaded.tokens == len(prompt), f"{loaded.tokens} of {len(prompt)} tokens: {loaded.reason}"
        answer = Started(opened, answered, warmed, slowest * 1e3, grown)
        Path(job["answer"]).write_text(json.dumps(asdict(answer)))
        if job["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
