"""A whole store, DRAM above NVMe, on simulated files and a simulated index that fail, hang and lose power.

`Disk` outlives the stores that are opened on it. A process whose machine loses power does not see that as an exception
of its own here: from the cut on every call that would change the disk fails as on a disk that is gone, the store says
what it says then, and `Disk.crash` decides what the disk kept.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.display_names import DisplayNames
from kvstore.block.identity import KeyRing
from kvstore.block.key_file import KeyFile
from kvstore.config import DramConfig, Limits
from kvstore.core.store import Store
from kvstore.keys.store_keys import StoreKeys
from kvstore.node import EmbeddedStore, StoreParts, build_store
from model.store_model import BLOCK_TOKENS, OpenStore, Owned, Prompt
from simulation.machine import Machine
from simulation.power import PowerLoss
from tiering.clock import Clock
from tiering.errors import TierUnavailable
from tiering.files import DirectoryLock, make_directory
from tiering.nvme.frame_index import FrameIndex
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.slab_files import DirectFiles, Files
from tiering.nvme.slab_recovery import Found
from tiering.nvme.tier import NvmeTier
from tiering.policies.admission import AdmissionMaker, AdmitAll
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker
from tiering.slab_header import SlabSizes
from waiting import FakeClock

IDLE_SECONDS = 60
LONG_MS = 30_000
LATE_SECONDS = 10.0
"""Many times every short deadline of a test. An answer that takes longer did not keep it."""

Hook = Callable[[str], None]


def nothing(call: str) -> None:
    """The hook of a disk that works."""


class Watched:
    """`Files`, or a `FrameIndex`, as one process sees them. before: called with the name of each call but of those that
    change nothing on a disk; may wait, and may raise. off: what a call raises whose machine loses power."""

    def __init__(self, inner: Files | FrameIndex, before: Hook, off: Callable[[], Exception]) -> None:
        self._inner, self._before, self._off = inner, before, off

    def __getattr__(self, call: str) -> Any:
        really = getattr(self._inner, call)

        def watched(*arguments: Any) -> Any:
            self._before(call)
            try:
                return really(*arguments)
            except PowerLoss:
                raise self._off() from None

        return really if call in ("confirm", "bring_back", "close") else watched


def watched_files(files: Files, before: Hook) -> Any:
    return Watched(files, before, partial(OSError, errno.EIO, os.strerror(errno.EIO)))


class Disk(Machine):
    """Files and an index on one supply of power; also the `IndexMaker` of the tier that is opened on them.

    before_files, before_index: hooks of the processes to come and of the one that has it open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_files: Hook = nothing
        self.before_index: Hook = nothing

    def open(self, *, clean: bool) -> FrameIndex:
        self.before_index("open")
        off = partial(TierUnavailable, "the disk is gone")
        return Watched(super().open(clean=clean), lambda call: self.before_index(call), off)  # type: ignore[return-value]

    def discard(self) -> None:
        self.before_index("discard")
        super().discard()

    def process(self) -> Files:
        """The files for one process."""
        self.files.reopen()
        return watched_files(self.files, lambda call: self.before_files(call))

    @property
    def is_off(self) -> bool:
        """Whether the power was cut."""
        return self.power.last is not None and self.power.steps >= self.power.last

    def cut_power(self) -> None:
        """Now: nothing reaches the disk any more."""
        self.power.last = self.power.steps

    crash = Machine.lose_power


class RealDisk:
    """The same for a real directory: direct I/O and LMDB."""

    def __init__(self, directory: Path) -> None:
        make_directory(directory)
        self.directory = directory
        self.before_files: Hook = nothing
        self._maker = LmdbMaker(directory / "nvme" / "index")

    def open(self, *, clean: bool) -> FrameIndex:
        return self._maker.open(clean=clean)

    def discard(self) -> None:
        self._maker.discard()

    def new_uid(self) -> bytes:
        return os.urandom(16)

    def process(self) -> Files:
        return watched_files(DirectFiles(self.directory / "nvme"), lambda call: self.before_files(call))


@dataclass
class Sizes:
    """What a store is given. The defaults are tiny, so that both tiers evict all the time."""

    dram: int = 1 << 20
    extent: int = 64 << 10
    nvme: int = 3 << 19
    slab: int = 128 << 10


def open_two_tiers(
    directory: Path,
    disk: Disk | RealDisk,
    sizes: Sizes | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    gone: Callable[[int, bytes], None] | None = None,
    while_loading: Callable[[], object] | None = None,
    policy: PolicyMaker = LeafFirstLru,
    admission: AdmissionMaker = lambda names, clock, nvme_bytes: AdmitAll(),
) -> OpenStore:
    """As `node.open_embedded` does it, on any disk; the keys and the lock are real files in `directory`.

    gone: told of every block that NVMe gives up, as in `Blocks`. while_loading: called before each slab is taken in, in
    the thread that does it.
    """
    sizes, limits = sizes or Sizes(), limits or Limits()
    lock = DirectoryLock(directory)
    try:
        keys, ring = StoreKeys(KeyFile(directory / "keys")), KeyRing()
        keys.tenant("default")
        for one in keys.tenants():
            ring.add(one)
        tier = NvmeTier(disk.process(), disk, ring, SlabSizes(sizes.nvme, sizes.slab), disk.new_uid)
        if while_loading is not None:
            _interrupt(tier, while_loading)
        clock = clock or FakeClock()
        core = build_store(
            DramConfig(sizes.dram, sizes.extent),
            limits,
            ring,
            clock,
            tier,
            StoreParts(gone=gone, dram_policy=policy),
            admission,
        )
        core.start_loading({one.tenant: one for one in keys.tenants()})
    except BaseException:
        lock.release()
        raise
    store = EmbeddedStore(core, ring, keys, lock, StoreParts(codec_named), DisplayNames(directory / "names"))
    return OpenStore(store, core, keys, ring, clock, core._room._mover, core.blocks)  # type: ignore[arg-type]


def _interrupt(tier: NvmeTier, work: Callable[[], object]) -> None:
    load = tier.load

    def load_slowly(*arguments: Any) -> Iterator[Found]:
        for found in load(*arguments):
            work()
            yield found

    tier.load = load_slowly  # type: ignore[method-assign,assignment]


def put(space: Owned, prompt: Prompt, durability: str = "volatile") -> MissReason | None:
    """Store a prompt; why not all of it is held, or durable where that was asked."""
    pages = space.pages(prompt.tokens)
    for block in range(len(prompt.letters)):
        pages.write(block * BLOCK_TOKENS, space.kv(prompt, block))
    reason: MissReason | None = space.handle.put(prompt.token_ids, pages.pages, durability=durability).reason
    return reason


def load(space: Owned, prompt: Prompt, deadline_ms: float = LONG_MS) -> tuple[int, MissReason | None]:
    """The blocks that came, each compared, and why there were not more. In time."""
    start = time.monotonic()
    with space.handle.lease(space.match(prompt), deadline_ms=deadline_ms) as lease:
        pages = space.pages(lease.tokens)
        before = pages.snapshot()
        loaded = space.handle.get(lease, pages.pages)
    took = time.monotonic() - start
    assert took < deadline_ms / 1000 + LATE_SECONDS, f"{took:.1f} s for a deadline of {deadline_ms} ms"
    assert loaded.account.asked == prompt.tokens
    kv = {token: space.kv(prompt, token // BLOCK_TOKENS) for token in range(0, loaded.tokens, BLOCK_TOKENS)}
    pages.expect(before, kv, ignore_from=loaded.tokens)
    return loaded.tokens // BLOCK_TOKENS, loaded.reason or lease.reason


def wait_until_idle(core: Store) -> None:
    """Until no move waits or runs; a move that never ends is a failure of the test."""
    assert core._levels is not None
    queue, deadline = core._levels._queue, time.monotonic() + IDLE_SECONDS
    while queue._moves or core.blocks.promoting or core.blocks.demoting:
        assert time.monotonic() < deadline, f"moves that never end: {list(queue._moves)}"
        time.sleep(0.0005)


def bugs(core: Store) -> list[str]:
    """Stack traces of what moves raised that no move may raise."""
    return list(core._levels._queue.bugs) if core._levels is not None else []
