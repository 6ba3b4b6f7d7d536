"""The composition root: builds a store out of its parts and hands each what it needs.

The one place where clock, randomness, memory and disk enter. Nothing here is a global.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import TracebackType

import msgspec

from kvstore.block.account import MissReason
from kvstore.block.display_names import DisplayNames, checked_name
from kvstore.block.errors import BadInput, DirectoryInUse, KeysUnusable
from kvstore.block.identity import SECRET_BYTES, KeyRing, Namespace, TenantKeys
from kvstore.block.key_file import KeyFile
from kvstore.block.layout import Layout
from kvstore.block.pages import Codec
from kvstore.client.handle import NamespaceHandle
from kvstore.client.pending import LeaseThreads, ReadyReply
from kvstore.config import (
    DEFAULT_SCRUB,
    DEFAULT_TENANT,
    DramConfig,
    Limits,
    NvmeConfig,
    check_pieces,
    format_size,
    memory_limit,
    memory_limit_files,
    parse_rate,
)
from kvstore.core.index import IndexRetentionHints, PrefixIndex
from kvstore.core.leases import NUMBER_KEY_BYTES, Numbers
from kvstore.core.levels import WRITES
from kvstore.core.store import DROP_SECONDS, Store, StoreUsage
from kvstore.core.table import BlockTable, Lower
from kvstore.insight.counting_tier import CountingTier
from kvstore.insight.replay import Replay
from kvstore.protocol.door import Collective, Grant, LeaseReply, MatchReply, ReserveReply, Submitted
from kvstore.protocol.requests import Requests
from tiering.after_fork import close_in_children
from tiering.clock import Clock, SystemClock
from tiering.dram.extents import BlankPool, ExtentPool
from tiering.dram.keeping import KeptExtent, MemoryKeeper
from tiering.dram.mover import Mover
from tiering.dram.tier import DramTier
from tiering.errors import TierError
from tiering.failpoint import Reach, go_on
from tiering.faults import FaultReports, Faults
from tiering.files import (
    DirectFiles,
    DirectoryLock,
    Files,
    ReadOnlyFiles,
    disk_room,
    make_directory,
    read_text_files,
)
from tiering.frame import frame_bytes
from tiering.move_queue import MoveQueue, QueueLimits
from tiering.nvme.scrub import ScrubLimits
from tiering.nvme.slab import STAMP_SLAB, OtherFormat
from tiering.nvme.tier import IndexMaker, NvmeTier, slab_name
from tiering.policies.admission import Admission, AdmissionMaker, AdmitAll, LearnedAdmission
from tiering.policies.by_group import ByGroup
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import EvictionPolicy, PolicyMaker
from tiering.policies.retention import Retention
from tiering.policies.shares import Share, Shares
from tiering.residency import Pins, Residency
from tiering.slab_header import UID_BYTES
from tiering.tier import EXTENT_BITS

MOVE_THREADS = 4
DISK_THREADS = 4
DAY_SECONDS = 86_400
LEASE_BITS = 64
SESSION_BITS = 40
"""Of a generation that say which it is of those of one tenant in one session; the session is above them: no generation
is used again after a restart."""

_log = logging.getLogger(__name__)


class TenantDoor:
    """A store as one tenant sees it, in this process: `Door` with that tenant's keys."""

    def __init__(
        self,
        store: Store,
        keys: TenantKeys,
        requests: Requests | None = None,
        threads: LeaseThreads | None = None,
        names: DisplayNames | None = None,
    ) -> None:
        """requests: what is held for an engine's requests, for all doors that `release_request` is to reach. threads:
        for leases that are submitted, shared by doors to one store. names: told what models are called."""
        self._store = store
        self._names = names
        self._keys = keys
        self.requests = requests if requests is not None else Requests()
        self._threads = threads or LeaseThreads(store.clock)
        self._named: dict[int, int] = {}  # the tenant's numbers of namespaces -> the store's
        self.now = store.clock.monotonic_seconds
        self.release = store.release
        self.release_later = store.release_later
        self.report = store.report
        self.commit = store.commit
        self.commits_early = False
        self.abort = store.abort
        self.spans = self.spans_to_fill = store.spans

    def match(self, number: int, keys: Sequence[bytes]) -> MatchReply:
        """As `Door.match`."""
        return self._store.match(self._named[number], keys)

    def present(self, number: int, keys: Sequence[bytes], seconds: float | None = None) -> int:
        """As `Door.present`."""
        return self._store.present(self._named[number], keys, seconds)

    def lease(
        self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float, request: str = ""
    ) -> LeaseReply:
        """As `Door.lease`."""
        return self._store.lease(self._named[number], keys, first_block, deadline_ms)

    def submit_match(self, number: int, keys: Sequence[bytes], deadline_ms: float) -> Submitted[MatchReply]:
        """As `Door.submit_match`: tables in memory answer at once."""
        return ReadyReply(self.match(number, keys))

    def submit_lease(
        self, number: int, keys: Sequence[bytes], first_block: int, deadline_ms: float, request: str = ""
    ) -> Submitted[LeaseReply]:
        """As `Door.submit_lease`, in a thread."""
        if self._store.closed:
            return ReadyReply(self.lease(number, keys, first_block, 0))

        def lease(remaining_ms: float) -> LeaseReply:
            return self.lease(number, keys, first_block, remaining_ms)

        return self._threads.submit(lease, self.release, self.release_later, first_block, deadline_ms, len(keys))

    def reserve(
        self,
        number: int,
        keys: Sequence[bytes],
        first_block: int,
        priority: int,
        ttl_seconds: float | None,
        collective: Collective | None = None,
        seconds: float | None = None,
    ) -> ReserveReply:
        """As `Door.reserve`."""
        return self._store.reserve(self._named[number], keys, first_block, priority, ttl_seconds, collective, seconds)

    def persist(self, number: int, keys: Sequence[bytes], seconds: float) -> tuple[int, MissReason | None]:
        """As `Door.persist`."""
        return self._store.persist(self._named[number], keys, seconds)

    def post_commit(self, reservation: int, part: int, first: int, digests: Sequence[Sequence[bytes]]) -> None:
        """As `Door.post_commit`."""
        self._store.commit(reservation, part, first, digests)

    def named(self, lease: int) -> tuple[bytes, int]:
        """As `Door.named`."""
        return self._store.name, lease

    def attach(self, run: bytes, reply: LeaseReply) -> LeaseReply:
        """As `Door.attach`."""
        if run == self._store.name and self._store.attach(reply.lease):
            return reply
        return LeaseReply(0, reply.first_block, 0, reason=MissReason.STALE_HINT, detail="nobody holds it any more")

    def is_within_reach(self, lease: int) -> bool:
        """As `Door.is_within_reach`."""
        return not self._store.closed

    def leads_to(self, store: Store, keys: TenantKeys) -> bool:
        """Whether this is that tenant's door to that store."""
        return self._store is store and self._keys.tenant == keys.tenant

    def open_namespace(self, namespace: Namespace, payload_bytes: Sequence[int], name: str = "") -> Grant:
        """Make a namespace known to this tenant."""
        grant = self._store.open_namespace(self._keys, namespace, payload_bytes)
        if self._names is not None and name:
            self._names.note(self._keys.tenant, namespace.digest(), name)
        own = self._store.own_number(grant.number)
        self._named[own] = grant.number
        return msgspec.structs.replace(grant, number=own)

    def number_in_store(self, number: int) -> int:
        """By which the store knows a namespace."""
        return self._named[number]

    def drop(self, number: int, seconds: float = DROP_SECONDS) -> int:
        """Forget every block of a namespace, as `Store.drop`."""
        return self._store.drop(self._named[number], seconds)


class EmbeddedStore:
    """A store inside this process, opened on a directory that holds its keys. Close it, or use it as a context."""

    def __init__(
        self,
        store: Store,
        ring: KeyRing,
        keys: KeyFile,
        lock: DirectoryLock,
        codecs: Callable[[str], Codec],
        tenant: str = DEFAULT_TENANT,
        threads: LeaseThreads | None = None,
        before_close: Callable[[], object] = lambda: None,
        faults: Faults | None = None,
        names: DisplayNames | None = None,
    ) -> None:
        """before_close: ends what else uses this store's memory. faults: of the machine, as the store was told.
        names: of models, for people."""
        self._store = store
        self.faults = faults or Faults(store.clock)
        self.names = names
        self._before_close = before_close
        self._requests = Requests()
        self._threads = threads or LeaseThreads(store.clock)
        self._ring = ring
        self._keys = keys
        self._lock = lock
        self._codecs = codecs
        self.tenant = tenant

    def namespace(
        self,
        *,
        model: str,
        layout: Layout,
        codec: str = "raw",
        weights_epoch: int = 0,
        config: Mapping[str, str] | None = None,
        shard: int | None = None,
        name: str = "",
    ) -> NamespaceHandle:
        """The namespace of these weights, this layout and this codec; see `identity.Namespace` for the fields.

        name: of the model, or its path, which people are shown beside the fingerprint; no part of what decides.

        shard: for one rank of `layout.head_shards`, whose pages have its own heads only: what it gets and puts are the
        parts of that shard (`Layout.parts_of`). The namespace is the same for all ranks. Raises `BadInput`.
        """
        chosen = self._codecs(codec)
        for key, value in (config or {}).items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise BadInput(f"config {key!r}={value!r}: names and values must be text")
        namespace = Namespace(model, layout, codec, weights_epoch, dict(config or {}))
        return NamespaceHandle(self._door(), namespace, chosen, shard=shard, name=checked_name(name))

    def _door(self) -> TenantDoor:
        return TenantDoor(self._store, self.tenant_keys(self.tenant), self._requests, self._threads, self.names)

    def tenant_keys(self, tenant: str) -> TenantKeys:
        """A tenant's keys, made and kept if it is new: for doors to other processes."""
        keys = self._keys.tenant(tenant)
        self._ring.add(keys)
        return keys

    @property
    def core(self) -> Store:
        """What is behind all handles: for doors to other processes."""
        return self._store

    def for_tenant(self, tenant: str) -> EmbeddedStore:
        """The same store as another tenant, which shares memory with this one and nothing else."""
        return EmbeddedStore(
            self._store,
            self._ring,
            self._keys,
            self._lock,
            self._codecs,
            tenant,
            self._threads,
            self._before_close,
            self.faults,
            self.names,
        )

    def release_request(self, request: str) -> None:
        """End every lease, and every submitted one, that was taken or attached to for a request of the engine."""
        self._requests.release(request)

    def tenant_names(self) -> dict[bytes, str]:
        """The name of every tenant that has keys, by its opaque id."""
        return self._keys.names()

    def purge(self, tenant: str, seconds: float = DROP_SECONDS) -> tuple[TenantKeys, int]:
        """Void all blocks of a tenant durably, then retire its key; returns the retired keys and how many blocks were
        readable. A crash leaves the old key with nothing to be found, or no key. Handles of it are of no use any more.

        Raises `BadInput` for a tenant without keys, and `TierUnavailable` where its blocks are not all void yet: it is
        served on. Raises `KeysUnusable` where the key file could not be written: nobody knows whether the key would be
        there after a crash, so the tenant is not served before it is purged again, or the store opened again.
        """
        keys = self._keys.known(tenant)
        blocks = self._store.purge(keys.tenant, seconds)
        self._keys.retire(tenant)
        if self.names is not None:
            self.names.forget(keys.tenant)
        self._ring.remove(keys)
        return keys, blocks

    def drop(self, namespace: NamespaceHandle, seconds: float = DROP_SECONDS) -> int:
        """Evict a namespace of this store and tenant from every tier; returns how many blocks it had. Raises
        `TierUnavailable` where that was not over in time."""
        door = namespace.door if isinstance(namespace, NamespaceHandle) else None
        if not isinstance(door, TenantDoor) or not door.leads_to(self._store, self._keys.tenant(self.tenant)):
            raise BadInput("give a namespace that this store opened for this tenant; drop others where they are from")
        return door.drop(namespace.number, seconds)

    def evict(self, blocks: int) -> int:
        """Evict that many of the worst blocks; returns how many could go."""
        return self._store.evict(blocks)

    def warmed(self, timeout_seconds: float) -> bool:
        """Wait until what was on disk can be found; whether it can after at most that long."""
        return self._store.warmed(timeout_seconds)

    def usage(self) -> StoreUsage:
        """What the store holds now."""
        return self._store.usage()

    def check(self) -> None:
        """Verify every invariant of the tables. Raises `AssertionError`."""
        self._store.check()

    def close(self) -> None:
        """Give memory and directory back. Safe to call again.

        With a disk that hangs, the directory stays locked for as long as a write may yet reach it.
        """
        self._before_close()
        self._threads.close()
        self._store.close()
        if self.names is not None:
            self.names.close()
        if not self._store.is_stuck:
            self._lock.release()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._store.closed

    def __enter__(self) -> EmbeddedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_embedded(
    directory: str,
    *,
    codecs: Callable[[str], Codec],
    dram: str | int = "1GiB",
    nvme: str | int | None = None,
    slab: str | int | None = None,
    extent: str | int | None = None,
    tenant: str = DEFAULT_TENANT,
    limits: Limits | None = None,
    scrub: str | int | ScrubLimits = DEFAULT_SCRUB,
    indexes: Callable[[Path], IndexMaker] | None = None,
    files: Callable[[Path], Files] | None = None,
    gone: Callable[[int, bytes], None] | None = None,
    reach: Reach = go_on,
    numbers_key: bytes | None = None,
    keeper: MemoryKeeper | None = None,
    kept: Sequence[KeptExtent] = (),
    guard: int = 0,
    before_close: Callable[[], object] = lambda: None,
    policy: PolicyMaker = LeafFirstLru,
    writes: float | None = None,
    shares: Mapping[str, Share] | None = None,
) -> EmbeddedStore:
    """Open a store in this process on a directory, which is made if need be. Raises `BadInput`, `DirectoryInUse` and
    `KeysUnusable`, each with one line that says what to do.

    scrub: how fast the NVMe tier is read and verified again in the background, or all its limits. indexes: makes the
    index of an NVMe tier; needed with `nvme` only. files, gone, reach: for tests; what holds the
    slabs, who is told of every block that NVMe gives up (see `BlockTable`), and who is told of failpoints. numbers_key,
    keeper, kept, guard: as in `build_store`. before_close: ends what the codecs have going with this store's memory.
    policy: which blocks go first when DRAM is full. writes: what of that is written to NVMe, as `config.parse_writes`
    says. shares: of tenants, by their names, checked without the tiers.
    """
    if nvme is None and slab is not None:
        raise BadInput(f"slab={slab} is a size on NVMe, and there is no nvme=; give both, or leave slab= out")
    cgroups = "".join(read_text_files(["/proc/self/cgroup"]).values())
    dram_config = DramConfig.of(dram, extent, memory_limit(read_text_files(memory_limit_files(cgroups))))
    limits = limits if limits is not None else Limits()
    if not isinstance(limits, Limits):
        raise BadInput(f"limits={limits!r}; give kvstore.Limits(...), or leave limits= out")
    if not isinstance(scrub, ScrubLimits):
        rate = parse_rate(scrub, "scrub")
        scrub_limits = ScrubLimits(rate) if rate else None
    else:
        scrub_limits = scrub
    path = Path(directory)
    try:
        make_directory(path)
        lock = DirectoryLock(path)
    except BlockingIOError as error:
        raise DirectoryInUse(
            f"{path} is in use by process {error}; close that store, or give another directory"
        ) from None
    except OSError as error:
        raise BadInput(f"{path} cannot be used as a store's directory: {error.strerror}; give another one") from None
    faults = Faults(SystemClock())
    try:
        keys = KeyFile(path / "keys", reach)
        if not keys.is_there:
            _refuse_new_keys(path)
        ring = KeyRing()
        ring.add(keys.tenant(tenant))
        known = keys.tenants()
        for one in known:
            ring.add(one)
        shares = shares or {}
        dram_pieces = dram_config.budget_bytes // dram_config.extent_bytes
        check_pieces(shares, dram_pieces, dram_config.extent_bytes, "dram")
        tier = None
        if nvme is not None:
            assert indexes is not None
            tier = _open_nvme(path / "nvme", nvme, slab, indexes, files or DirectFiles, ring, shares, faults)
        store = build_store(
            dram_config,
            limits,
            ring,
            tier=tier,
            gone=gone,
            scrub=scrub_limits,
            numbers_key=numbers_key,
            keeper=keeper,
            kept=kept,
            guard=guard,
            policy=policy,
            admission=_admission_of(writes),
            shares={keys.tenant(name).tenant: share for name, share in shares.items()},
            faults=faults,
        )
        store.start_loading({one.tenant: one for one in known})
    except BaseException:
        lock.release()
        raise
    close_in_children(store, lock)
    names = DisplayNames(path / "names", faults)
    return EmbeddedStore(store, ring, keys, lock, codecs, tenant, before_close=before_close, faults=faults, names=names)


def _refuse_new_keys(path: Path) -> None:
    """Slabs that stand there need keys that are gone: beside new ones they would be left alone for ever."""
    try:
        sizes = ReadOnlyFiles(path / "nvme").sizes()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BadInput(f"{path / 'nvme'} cannot be looked at: {error.strerror}; give another directory") from None
    sizes.pop(slab_name(STAMP_SLAB), None)
    if sizes:
        raise KeysUnusable(
            f"{path / 'keys'} is missing, and {_slabs(len(sizes), sum(sizes.values()))} in {path / 'nvme'} cannot be "
            f"used without it; restore it from a backup, or move {path / 'nvme'} away to begin anew"
        )


def _slabs(count: int, size_bytes: int) -> str:
    return f"{count} slab{'s' * (count != 1)} ({format_size(size_bytes)})"


def new_uid() -> bytes:
    """Names a slab or an index, so that what belongs to one that is gone never fits another."""
    return secrets.token_bytes(UID_BYTES)


def _open_nvme(
    directory: Path,
    nvme: str | int,
    slab: str | int | None,
    indexes: Callable[[Path], IndexMaker],
    files: Callable[[Path], Files],
    ring: KeyRing,
    shares: Mapping[str, Share],
    faults: FaultReports,
) -> NvmeTier:
    """The tier on disk, its frames not loaded yet."""
    try:
        make_directory(directory)
        config = NvmeConfig.of(nvme, slab, disk_room(directory))
        # Before the index is open, which whoever is refused here would leave so.
        check_pieces(shares, config.budget_bytes // config.slab_bytes, config.slab_bytes, "nvme")
        tier = NvmeTier(
            files(directory),
            indexes(directory / "index"),
            ring,
            config.budget_bytes,
            config.slab_bytes,
            new_uid,
            DISK_THREADS,
            faults,
        )
    except OtherFormat as error:
        raise BadInput(
            f"{directory} was written in {error}; use the version that wrote it, or another directory"
        ) from None
    except (OSError, TierError) as error:
        raise BadInput(
            f"{directory} cannot be used for nvme=: {error}; free or repair it, or leave nvme= out"
        ) from None
    _warn_of_left_alone(directory, tier)
    taken = tier.usage().taken_bytes
    if taken > config.budget_bytes:
        _log.warning(
            "%s has slabs of %s, more than nvme=%s allows: no further ones are made, and none is given back; to have "
            "less, open another directory",
            directory,
            format_size(taken),
            format_size(config.budget_bytes),
        )
    return tier


def _warn_of_left_alone(directory: Path, tier: NvmeTier) -> None:
    for needs_keys, why, remedy in (
        (True, f"{directory.parent / 'keys'} does not hold the keys", "restore those from a backup"),
        (False, "unusable", f"kvstore fsck {directory.parent} says why"),
    ):
        alone = [one.size_bytes for one in tier.left_alone if one.needs_keys is needs_keys]
        if alone:
            _log.warning(
                "%s left alone in %s: %s. What is left alone counts against nvme=; %s, or move it away",
                _slabs(len(alone), sum(alone)),
                directory,
                why,
                remedy,
            )


def build_store(
    dram_config: DramConfig,
    limits: Limits,
    ring: KeyRing,
    clock: Clock | None = None,
    tier: NvmeTier | None = None,
    gone: Callable[[int, bytes], None] | None = None,
    scrub: ScrubLimits | None = None,
    numbers_key: bytes | None = None,
    keeper: MemoryKeeper | None = None,
    kept: Sequence[KeptExtent] = (),
    guard: int = 0,
    policy: PolicyMaker = LeafFirstLru,
    admission: AdmissionMaker = lambda names, clock, nvme_bytes: AdmitAll(),
    shares: Mapping[bytes, Share] | None = None,
    faults: FaultReports | None = None,
) -> Store:
    """Put the parts together: memory, tiers, policies, tables, movers. gone: as in `BlockTable`. scrub: None for none.

    numbers_key: of the permutations by which extents, leases and reservations are numbered, so that no tenant counts
    another's and numbers of earlier runs name nothing; random if not given. keeper: holds DRAM for the next process.
    kept: what it held of the one before, and guard: holders below may be its clients (`DramTier.take_over`). policy: of
    DRAM; NVMe gives up what was used longest ago. admission: what of that which leaves DRAM is written there. shares:
    of tenants, by opaque id. faults: told of what the machine lacks. Raises `BadInput` where NVMe cannot be written.
    """
    clock = clock or SystemClock()
    numbers_key = numbers_key or secrets.token_bytes(NUMBER_KEY_BYTES)
    pool = ExtentPool(
        dram_config.budget_bytes,
        dram_config.extent_bytes,
        keeper,
        faults,
        clock.monotonic_seconds,
        clock.thread_seconds,
    )
    dram = DramTier(pool, Numbers(numbers_key, EXTENT_BITS), keeper)
    taken_over = dram.take_over(kept, guard)
    pins = Pins()
    session = _session(tier, dram)
    index = PrefixIndex(limits.forgotten)
    groups = Shares(shares) if shares else None

    def policies(make: PolicyMaker) -> EvictionPolicy:
        made = [make(index.names, secrets.randbelow(1 << 31)) for _ in range(len(groups) if groups is not None else 1)]
        return (
            ByGroup(made, lambda row: groups.of_namespace[index.namespace_of(row)]) if groups is not None else made[0]
        )

    residency = Residency(policies(policy), pins)
    lower = None
    if tier is not None:
        chooses = admission(index.names, clock.monotonic_seconds, tier.budget_bytes)
        lower = Lower(tier, Residency(policies(LeafFirstLru), pins), chooses)
    blocks = BlockTable(
        index, residency, dram, ring, lower, lambda: _first_generation(session), gone, groups, clock.monotonic_seconds
    )
    wishes = IndexRetentionHints(index, blocks.spaces, groups.of_namespace if groups is not None else None)
    parts = groups.parts() if groups is not None else [1.0]
    for here, budget_bytes in (
        (residency, dram.budget_bytes),
        *([(lower.residency, lower.tier.budget_bytes)] if lower is not None else []),
    ):
        budgets = [int(part * limits.retained_fraction * budget_bytes) for part in parts]
        here.retention = Retention(wishes, here.is_listed, clock.wall_seconds, budgets)
    # Writes that hang leave a thread for reads.
    queue = None
    if tier is not None:
        queue = MoveQueue(clock, QueueLimits(), MOVE_THREADS, {WRITES: MOVE_THREADS - 1}, faults)
    numbers = Numbers(numbers_key, LEASE_BITS)
    return Store(blocks, Mover(dram, ring), clock, limits, queue, scrub, numbers, taken_over, new_uid(), lower)


def _session(tier: NvmeTier | None, dram: DramTier) -> int:
    """The number that heads the generations of this run, above that of every frame that is there. Raises
    `BadInput` where the tier's directory cannot be written."""
    session = tier.session if tier is not None else 0
    newest = dram.newest_generation()
    if newest and newest >> SESSION_BITS >= session:  # the directory is another one, or there is none
        session = (newest >> SESSION_BITS) + 1
        try:
            if tier is not None:
                tier.raise_session(session)
        except TierError as error:
            raise BadInput(f"nvme= cannot be used: {error}; free or repair it, or leave nvme= out") from None
    return session


def _first_generation(session: int) -> int:
    """A tenant's first one: random, so that it tells nothing of the order in which tenants came."""
    return (session << SESSION_BITS) + 1 + secrets.randbelow(1 << SESSION_BITS - 1)


def _admission_of(writes: float | None) -> AdmissionMaker:
    def made(names: array[int], seconds: Callable[[], float], nvme_bytes: int) -> Admission:
        if writes is None:
            return AdmitAll()
        return LearnedAdmission(names, seconds, writes * nvme_bytes / DAY_SECONDS if writes < inf else None)

    return made


def build_replay(
    policy: PolicyMaker,
    dram_blocks: int,
    seed: int = 0,
    nvme_blocks: int = 0,
    admission: Callable[[Replay], Admission] | None = None,
) -> Replay:
    """The tables of a store that has room for so many blocks, and no memory: for traces. nvme_blocks: of the tier
    below, where there is one. admission: to it; None for everything."""
    layout = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=64)
    payload_bytes = 1 << 12
    dram_bytes = dram_blocks * frame_bytes(payload_bytes)
    dram = DramTier(BlankPool(dram_bytes, dram_bytes))
    keys = TenantKeys.derive(bytes(SECRET_BYTES))
    index = PrefixIndex(forgotten_limit=0)
    pins = Pins()
    nvme = CountingTier(nvme_blocks * frame_bytes(payload_bytes)) if nvme_blocks else None
    lower = None
    if nvme is not None:
        lower = Lower(nvme, Residency(LeafFirstLru(), pins), AdmitAll())
    blocks = BlockTable(index, Residency(policy(index.names, seed), pins), dram, KeyRing([keys]), lower)
    space = blocks.add_space(keys, Namespace("0" * 40, layout, "raw"), [payload_bytes])
    dram.adopt(dram.new_extent(), space.classes[0])
    replay = Replay(blocks, space.number, nvme)
    if nvme is not None and lower is not None:
        nvme.open(space.classes[0])
        if admission is not None:
            blocks.lower = replace(lower, admission=admission(replay))
            blocks.lower.admission.expect(nvme_blocks)
    return replay
