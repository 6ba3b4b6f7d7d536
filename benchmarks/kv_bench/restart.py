"""`kvstore bench restart`: how long it takes until what is on disk can be found again.

New processes open a directory that lists a million blocks, after a clean end, after SIGKILL, and with an index that is
not in the page cache, beside one pass of LMDB over the same index; then `kvstore serve` starts on it, beside one on an
empty directory.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from shutil import rmtree
from statistics import median
from time import perf_counter, sleep
from typing import Any

import lmdb
import numpy as np

import kvstore
from kv_bench.measure import Say, quartile_row, resident_bytes
from kv_bench.process import Child, Parent, Sidecar
from kv_bench.rig import MODEL, BlockShape, PagePool, prompt_of
from kv_bench.script import enough
from kvstore.block import codec
from kvstore.block.errors import BadInput
from kvstore.block.identity import PrefixHasher, root_key, token_bytes
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.client.socket_door import MAX_DEADLINE_MS
from kvstore.config import MAX_SLAB_BYTES, StoreOptions, TierOptions
from kvstore.node import SESSION_BITS, StoreParts, open_embedded
from kvstore.traffic.row import SECONDS, BenchResult, Row, Section, Target
from tiering.frame import frame_bytes
from tiering.nvme import lmdb_index
from tiering.nvme.slab import ENTRY, entry_of, split_entries
from tiering.nvme.slab_files import DirectFiles, disk_room
from tiering.slab_header import PAGE_BYTES

TARGET_SECONDS, HELLO_TARGET_SECONDS = 3.0, 2.0
TARGET_BLOCKS = 1_000_000
"""Targets are set for this many blocks, after a clean end and after a kill."""
MOST_BLOCKS = 4_000_000
LOOK_SECONDS = 0.01
"""Interval of matches while the store loads its index."""
LONGEST_SECONDS = 600.0
_NEEDED_BEFORE_OPEN = (codec, lmdb_index)  # `open` itself imports them, once

SHAPE = BlockShape(layers=1, block_tokens=64, kv_heads=1, head_dim=16)
"""A payload of one page."""
FRAME_BYTES = frame_bytes(SHAPE.payload_bytes)
REAL_BLOCKS = 32
DRAM_BYTES = 64 << 20
_TOGETHER, _STEP_BLOCKS = 16, 32
"""Prompts stored concurrently, so that their blocks interleave; blocks of one prompt side by side."""


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


def run(options: RestartOptions, say: Say) -> BenchResult:
    """Build the directory, then restart again and again. Raises `BadInput` where there is too little disk for it."""
    plan = Plan(options.blocks, options.prompt_blocks)
    try:
        if options.data is not None:
            Path(options.data).mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.data)
    except OSError as error:
        raise BadInput(f"{options.data} cannot be used: {error.strerror}; give another directory") from None
    with scratch as name:
        what = f"a directory of {options.blocks} blocks (--blocks, --data)"
        enough(what, plan.budget_bytes, disk_room(Path(name)), "disk")
        directory = Path(name) / "store"
        build(directory, plan, say)
        embedded, about = _embedded_rows(options, plan, directory, say)
        served = _sidecar_rows(options, plan, directory, say)
    sections = [
        Section(embedded, f"{options.blocks:,} blocks, in this process"),
        Section(served, "kvstore serve on the same directory", name="sidecar"),
    ]
    return BenchResult("restart", options, sections, about)


def _ends(laps: int) -> Iterator[tuple[str, int, bool]]:
    """How the process before ended, the lap, and whether this one is to be killed: each end is the next start's
    condition, so from the last clean one on they are killed, except the last."""
    for how in ("clean", "killed"):
        for lap in range(laps):
            yield how, lap, (lap == laps - 1) == (how == "clean")


def _row(
    how: str, seconds: Sequence[float], limit_of: str, limits: Sequence[float], target: float | None, **details: float
) -> Row:
    wanted = None if target is None else Target(target, is_least=False, of="value")
    return quartile_row({"how": how}, seconds, SECONDS, limit_of, limits, wanted, **details)


def _embedded_rows(
    options: RestartOptions, plan: Plan, directory: Path, say: Say
) -> tuple[list[Row], dict[str, float]]:
    index = directory / "nvme" / "index"
    data = index / lmdb_index.DATA_FILE
    found: dict[str, list[tuple[dict[str, float], float]]] = {"clean": [], "killed": [], "cold": []}
    pass_over(index)  # from here on, what the build left is in the page cache
    for how, lap, kills in _ends(options.laps):
        say(f"restart {lap + 1} of {options.laps}, after {'a clean end' if how == 'clean' else 'a kill'}")
        before = pass_over(index)
        started = _start(directory, plan, kill=kills)
        found[how].append((started, (before + pass_over(index)) / 2))
    say("restart with a cold index")
    _forget(data)
    alone = pass_over(index)
    _forget(data)
    found["cold"].append((_start(directory, plan), alone))
    grown = median(started["grown_bytes"] for laps in found.values() for started, _ in laps) / plan.blocks
    rows = []
    for how, laps in found.items():
        is_targeted = how != "cold" and plan.blocks >= TARGET_BLOCKS
        target = TARGET_SECONDS * plan.blocks / TARGET_BLOCKS if is_targeted else None
        details = {name: median(one[name] for one, _ in laps) for name in ("opened", "answered")}
        details["slowest_match_ms"] = max(started["slowest_match_ms"] for started, _ in laps)
        seconds, limits = [started["warmed"] for started, _ in laps], [limit for _, limit in laps]
        rows.append(_row(how, seconds, "index alone", limits, target, **details))
    return rows, {"bytes_per_block": grown, "index_bytes": data.stat().st_size}


def pass_over(index: Path) -> float:
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
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _start(directory: Path, plan: Plan, *, kill: bool = False) -> dict[str, float]:
    with Child("kv_bench.restart", {"directory": str(directory), "kill": kill, **asdict(plan)}) as child:
        started: dict[str, float] = child.hear()
        child.process.wait(LONGEST_SECONDS)
        wanted = -signal.SIGKILL if kill else 0
        assert child.process.returncode == wanted, f"the process that restarts ended with {child.process.returncode}"
    return started


def main() -> None:
    parent = Parent()
    plan = Plan(parent.job["blocks"], parent.job["prompt_blocks"])
    prompt, pages = real_prompt(), PagePool(SHAPE, REAL_BLOCKS).take()
    before, start = resident_bytes(), perf_counter()
    sizes: dict[str, Any] = {"dram": DRAM_BYTES, "nvme": plan.budget_bytes, "slab": plan.slab_bytes}
    with kvstore.embedded(parent.job["directory"], **sizes, scrub="off") as store:
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
        load_real_prompt(handle, pages)
        answer = {"opened": opened, "answered": answered, "warmed": warmed, "grown_bytes": grown}
        answer["slowest_match_ms"] = slowest * 1e3
        if parent.job["kill"]:
            parent.answer(answer)
            os.kill(os.getpid(), signal.SIGKILL)
    parent.answer(answer)


# --- a sidecar on the directory --------------------------------------------------------------------------------------


def _sidecar_rows(options: RestartOptions, plan: Plan, directory: Path, say: Say) -> list[Row]:
    store: dict[str, str | int] = {"data": str(directory), "dram": DRAM_BYTES, "nvme": plan.budget_bytes}
    store |= {"slab": plan.slab_bytes, "scrub": "off"}
    found: dict[str, list[tuple[float, float, float]]] = {"clean": [], "killed": []}
    before = _hello_of_an_empty_one(store)
    for how, lap, kills in _ends(options.sidecar_laps):
        say(f"sidecar {lap + 1} of {options.sidecar_laps}, after {'a clean end' if how == 'clean' else 'a kill'}")
        with Sidecar(store, has_health=True) as sidecar:
            hello, ready = sidecar.greeted(), sidecar.ready()
            check_all_is_found(sidecar, plan)
            if kills:
                sidecar.kill()
        after = _hello_of_an_empty_one(store)
        found[how].append((hello, ready, (before + after) / 2))
        before = after
    target = HELLO_TARGET_SECONDS if plan.blocks >= TARGET_BLOCKS else None
    rows = []
    for how, served in found.items():
        hellos, readies, empties = (list(times) for times in zip(*served, strict=True))
        rows.append(_row(how, hellos, "empty", empties, target, ready=median(readies)))
    return rows


def check_all_is_found(sidecar: Sidecar, plan: Plan) -> None:
    with sidecar.client() as client:
        handle = client.namespace(model=MODEL, layout=SHAPE.layout)
        found = found_blocks(handle, plan)
        assert found == plan.blocks, f"{found} of {plan.blocks} blocks are back"
        load_real_prompt(handle, PagePool(SHAPE, REAL_BLOCKS).take())


def load_real_prompt(handle: NamespaceHandle, pages: Pages) -> None:
    prompt = real_prompt()
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


# --- the directory ---------------------------------------------------------------------------------------------------
#
# All that a start reads is real and written by the store's own code, and so is one prompt, whose frames can be read.
# The frames of all other blocks are holes in sparse files, of which a lease would find zeros.


@dataclass(frozen=True, slots=True)
class Plan:
    """blocks: in all. prompt_blocks: of a chain. slab_bytes, slabs: the real prompt has its own slab."""

    blocks: int
    prompt_blocks: int

    @property
    def slab_bytes(self) -> int:
        return min(MAX_SLAB_BYTES, max(1 << 20, self.blocks * FRAME_BYTES // 8 // PAGE_BYTES * PAGE_BYTES))

    @property
    def slots(self) -> int:
        return (self.slab_bytes - 2 * PAGE_BYTES) // FRAME_BYTES

    @property
    def budget_bytes(self) -> int:
        return self.slab_bytes * (1 + -(-(self.blocks - REAL_BLOCKS) // self.slots))


def build(directory: Path, plan: Plan, say: Say) -> None:
    tiers = TierOptions(DRAM_BYTES, plan.budget_bytes, slab=plan.slab_bytes, scrub="off")
    parts = StoreParts(codec.codec_named, indexes=lmdb_index.LmdbMaker, files=_FilesWithHoles)
    with open_embedded(str(directory), StoreOptions(tiers), parts) as store:
        handle = store.namespace(model=MODEL, layout=SHAPE.layout)
        pool = PagePool(SHAPE, REAL_BLOCKS)
        pool.fill_randomly()
        result = handle.put(real_prompt(), pool.take(), durability="disk")
        assert result.stored == REAL_BLOCKS and result.reason is None, result
        inner = store._store
        assert inner.lower is not None
        tier, space = inner.lower.tier, inner.blocks.spaces[handle.number]
        (real,) = tier._ledger.pieces.values()
        identity = handle._grant.identity_key
        entries = _entries(plan, identity, (tier.session.number << SESSION_BITS) + (1 << SESSION_BITS - 1))
        done = REAL_BLOCKS
        while done < plan.blocks:
            tier.new_slab(space.sealers[0].stamp, real.mac_key, real.header.about)
            slab = tier._ledger.pieces[max(tier._ledger.pieces)]
            found = list(islice(entries, min(plan.slots, plan.blocks - done)))
            whole = b"".join(found).ljust(plan.slots * ENTRY.itemsize, b"\x00")
            tier._records.build(slab, split_entries(whole), is_proven=True)
            done += len(found)
            say(f"naming blocks: {done:,} of {plan.blocks:,}")
        tier._records.write([])


def real_prompt() -> np.ndarray:
    return prompt_of(0, REAL_BLOCKS * SHAPE.block_tokens)


def found_blocks(handle: NamespaceHandle, plan: Plan) -> int:
    others = -(-(plan.blocks - REAL_BLOCKS) // plan.prompt_blocks) + _TOGETHER  # the last ones are cut short
    tokens = plan.prompt_blocks * SHAPE.block_tokens
    found = (handle.match(prompt_of(number, tokens)).blocks for number in range(1, 1 + others))
    return handle.match(real_prompt()).blocks + sum(found)


class _FilesWithHoles(DirectFiles):
    """Slabs take no disk space until written."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._folder = directory

    def create(self, name: str, size_bytes: int) -> None:
        with open(self._folder / name, "xb") as file:
            os.truncate(file.fileno(), size_bytes)


def _entries(plan: Plan, identity: bytes, first_generation: int) -> Iterator[bytes]:
    hasher, root = PrefixHasher(identity, SHAPE.block_tokens), root_key(SHAPE.block_tokens)
    generations, numbers = count(first_generation), count(1)
    tokens = plan.prompt_blocks * SHAPE.block_tokens
    while True:
        chains = [hasher.keys(token_bytes(prompt_of(number, tokens))) for number in islice(numbers, _TOGETHER)]
        for first in range(0, plan.prompt_blocks, _STEP_BLOCKS):
            for chain in chains:
                for index in range(first, min(first + _STEP_BLOCKS, plan.prompt_blocks)):
                    parent = chain[index - 1] if index else root
                    yield entry_of(chain[index], parent, index, next(generations), 0, 0)


if __name__ == "__main__":
    main()
