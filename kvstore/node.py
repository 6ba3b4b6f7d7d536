"""The composition root: builds a store out of its parts and hands each what it needs.

The one place where clock, randomness, memory and disk enter. Nothing here is a global.
"""

from __future__ import annotations

import errno
import logging
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from kvstore.block.account import MissReason
from kvstore.block.display_names import DisplayNames
from kvstore.block.errors import BadInput, DirectoryInUse, KeysUnusable, StoreClosed
from kvstore.block.identity import (
    NOWHERE,
    NUMBER_KEY_BYTES,
    KeyRing,
    NodeIdentity,
    Numbers,
    TenantKeys,
)
from kvstore.block.key_file import KeyFile
from kvstore.block.pages import Codec
from kvstore.client.handle import NamespaceHandle, OpenStore
from kvstore.client.pending import LeaseThreads, ParkedReply, ReadyReply
from kvstore.config import (
    DEFAULT_TENANT,
    DramConfig,
    KeysOptions,
    Limits,
    NvmeConfig,
    StoreOptions,
    check_pieces,
    format_size,
    memory_limit,
    memory_limit_files,
    parse_rate,
    parse_writes,
)
from kvstore.core.index import PrefixIndex
from kvstore.core.namespaces import DROP_SECONDS
from kvstore.core.store import Store
from kvstore.core.table import BlockTable, Lower
from kvstore.core.usage import StoreUsage
from kvstore.keys.store_keys import Epochs, NodeLock, StoreKeys, node_of, refuse_new_keys, warn_of_left_alone
from kvstore.protocol import messages as m
from kvstore.protocol.door import AttachLease, NamedLease, Request, Submitted, TenantClient
from kvstore.protocol.messages import LeaseReply
from kvstore.protocol.requests import Requests
from tiering.after_fork import close_in_children
from tiering.clock import Clock, SystemClock
from tiering.dram.extents import ExtentPool, MemoryKeeper
from tiering.dram.keeping import KeptExtent
from tiering.dram.tier import DramTier
from tiering.errors import TierError
from tiering.failpoint import Reach, go_on
from tiering.faults import NEW_SLABS, NVME_WRITES, FaultKind, Faults
from tiering.files import DirectoryLock, make_directory, read_text_files
from tiering.move_queue import MoveQueue, QueueLimits
from tiering.nvme.frame_index import IndexMaker
from tiering.nvme.scrub import ScrubLimits
from tiering.nvme.slab import OtherFormat
from tiering.nvme.slab_files import DirectFiles, Files, disk_room, slab_bytes
from tiering.nvme.tier import NvmeTier
from tiering.policies.admission import Admission, AdmissionMaker, AdmitAll, LearnedAdmission
from tiering.policies.by_group import ByGroup
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import EvictionPolicy, PolicyMaker
from tiering.policies.retention import Retention
from tiering.policies.shares import Share, Shares
from tiering.residency import Pins, Residency
from tiering.slab_header import UID_BYTES
from tiering.tier import EXTENT_BITS

A = TypeVar("A")
MOVE_THREADS = 4
DISK_THREADS = 4
DAY_SECONDS = 86_400
LEASE_BITS = 64
SESSION_BITS = 40
"""Bits of a generation that count those of one tenant in one session; the session is above them: no generation is
reused after a restart."""

_log = logging.getLogger(__name__)


class EmbeddedDoor:
    """A store of this process as one tenant sees it: `Door` with that tenant's keys."""

    commits_early = False

    def __init__(
        self,
        store: Store,
        keys: TenantKeys,
        requests: Requests | None = None,
        threads: LeaseThreads | None = None,
        names: DisplayNames | None = None,
    ) -> None:
        """requests: leases held for an engine's requests, shared by all doors that `release_request` is to reach.
        threads: for submitted leases, shared by doors to one store. names: told what models are called."""
        self._store = store
        self._names = names
        self._client = TenantClient(keys)
        self.requests = requests if requests is not None else Requests()
        self._threads = threads or LeaseThreads()
        self.clock = store.clock
        self.forgotten = store.forgotten
        self.memory = store.memory

    def call(self, request: Request, kind: type[A], seconds: float | None = None) -> A:
        """As `Door.call`."""
        answer: object
        if isinstance(request, AttachLease):
            answer = self._attach(request)
        else:
            answer = self._store.handle(self._client, request, seconds)
        if isinstance(answer, m.Leased):
            answer = NamedLease(answer.reply, self._store.name, answer.reply.lease)
        elif isinstance(request, m.OpenNamespace) and isinstance(answer, m.Granted) and self._names and request.name:
            namespace = self._store.namespace_of(self.number_in_store(answer.grant.number))
            self._names.note(self._client.keys.tenant, namespace.digest(), request.name)
        assert isinstance(answer, kind), "the store answers what it was asked"
        return answer

    def submit(self, request: Request, kind: type[A], seconds: float) -> Submitted[A]:
        """As `Door.submit`: a lease waits in a thread, the rest is answered at once."""
        if isinstance(request, m.Tell):  # there is no operator to be told
            return cast(Submitted[A], ReadyReply(m.Done()))
        if isinstance(request, m.Await) and not self._store.closed:
            parking = partial(self._store.park, self._client.named[request.namespace], request.keys, request.seconds)
            return cast(Submitted[A], ParkedReply(parking, self._store.awaited, self._store.awaits))
        if not isinstance(request, m.LeasePrefix) or self._store.closed:
            return ReadyReply(self.call(request, kind))
        return cast(Submitted[A], self._threads.submit(self, request))

    def leads_to(self, store: Store, keys: TenantKeys) -> bool:
        """Whether this is that tenant's door to that store."""
        return self._store is store and self._client.keys.tenant == keys.tenant

    def number_in_store(self, number: int) -> int:
        """The store's number of a namespace."""
        return self._client.named[number]

    def _attach(self, request: AttachLease) -> NamedLease:
        reply = request.reply
        if request.run == self._store.name and self._store.attach(reply.lease):
            return NamedLease(reply, request.run, reply.lease)
        text = "no process holds it any more"
        return NamedLease(LeaseReply(0, reply.first_block, 0, reason=MissReason.STALE_HINT, detail=text))


class KeyRotation:
    """Follows the directory of keys for one store, while it serves. Called by one thread.

    an epoch more    the store accepts it, then signs new frames with it; stored frames stay readable
    an epoch less    the store accepts it no more, then removes the blocks that it signed from every tier. It tries
                     blocks in use again later; once none is left, DATA/keys forgets the epoch

    After a crash DATA/keys says of which retired epochs blocks may be left.
    """

    def __init__(self, keys: StoreKeys, ring: KeyRing, store: Store) -> None:
        self._keys, self._ring, self._store = keys, ring, store
        self._left: dict[str, tuple[Epochs, Mapping[int, Sequence[int]]]] = {}
        self._retiring = {name for name in keys.served() if keys.retired(name)}

    def step(self) -> None:
        """Apply changes of the directory, and go on removing what retired epochs signed."""
        for name in self._keys.reload():
            accepted, retired = self._keys.accepted(name), self._keys.retired(name)
            if not accepted:  # purged since
                continue
            for one in accepted:
                self._ring.add(one)
            self._store.rotate(accepted[-1])
            for key_id, epoch in retired:
                self._ring.retire(accepted[-1].tenant, key_id, epoch)
                self._retiring.add(name)
            told = {"tenant": name, "epoch": accepted[-1].epoch, "accepted": [one.epoch for one in accepted]}
            _log.info("keys are followed", extra=told)
        if self._store.is_loaded:
            for name in sorted(self._retiring):
                self._take_out(name)

    def _take_out(self, name: str) -> None:
        accepted, retired = self._keys.accepted(name), self._keys.retired(name)
        if not accepted or not retired:  # all is gone, they are accepted again, or the tenant was purged
            self._left.pop(name, None)
            self._retiring.discard(name)
            return
        epochs, rows = self._left.get(name, ((), None))
        try:
            left = self._store.retire(accepted[-1].tenant, frozenset(retired), rows if epochs == retired else None)
            self._left[name] = retired, left
            if not left:
                self._keys.gone(name, retired)
                _log.info("an epoch is retired", extra={"tenant": name, "epochs": [epoch for _, epoch in retired]})
        except (KeysUnusable, StoreClosed) as error:  # the next look tries it again
            _log.warning("what retired epochs signed cannot be taken out: %s", error)


class EmbeddedStore(OpenStore):
    """A store inside this process, opened on a directory that holds its keys."""

    def __init__(
        self,
        store: Store,
        ring: KeyRing,
        keys: StoreKeys,
        lock: DirectoryLock,
        parts: StoreParts,
        names: DisplayNames,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """names: of models, for people."""
        super().__init__(parts.codecs, parts.before_close, Requests())
        self._store = store
        self.faults = parts.faults or Faults(store.clock)
        self.names = names
        self._threads = LeaseThreads()
        self._ring = ring
        self.keys = keys
        self.rotation = KeyRotation(keys, ring, store)
        self.node_lock = NodeLock(store.node) if store.node is not NOWHERE else None
        """Tells whether another process is this node too."""
        self._lock = lock
        self.tenant = tenant

    def _door_for_handle(self) -> EmbeddedDoor:
        return EmbeddedDoor(self._store, self.tenant_keys(self.tenant), self._requests, self._threads, self.names)

    def tenant_keys(self, tenant: str) -> TenantKeys:
        """A tenant's keys, made and kept if it is new: for other processes' doors."""
        keys = self.keys.tenant(tenant)
        if self._ring.mac_key(keys.tenant, keys.key_id, keys.epoch) is None:  # nor was it retired a moment ago
            self._ring.add(keys)
        return keys

    @property
    def core(self) -> Store:
        """The store behind all handles: for other processes' doors."""
        return self._store

    def for_tenant(self, tenant: str) -> EmbeddedStore:
        """The same store for another tenant, with which only memory is shared."""
        other = copy(self)
        other.tenant, other._requests = tenant, Requests()
        return other

    def tenant_names(self) -> dict[bytes, str]:
        """The name of every tenant that has keys, by its opaque id."""
        return {keys[-1].tenant: name for name, keys in self.keys.by_name().items()}

    def purge(self, tenant: str, seconds: float = DROP_SECONDS) -> tuple[TenantKeys, int]:
        """Void all blocks of a tenant durably, then retire its key; returns the retired keys and how many blocks were
        readable. A crash leaves the old key with nothing to be found, or no key. Handles of it are of no use any more.

        Raises `BadInput` for a tenant without keys, and `TierUnavailable` where its blocks are not all void yet: it is
        served on. Raises `KeysUnusable` where the key file could not be written: whether the key would survive a crash
        is unknown, so the tenant is not served before it is purged again, or the store opened again.
        """
        keys = self.keys.known(tenant)
        blocks = self._store.purge(keys.tenant, seconds)
        self.keys.retire(tenant)
        self.names.forget(keys.tenant)
        self._ring.forget(keys.tenant)
        return keys, blocks

    def drop(self, namespace: NamespaceHandle, seconds: float = DROP_SECONDS) -> int:
        """Evict it from every tier; returns how many blocks it had. Raises `TierUnavailable` if not over in time."""
        door = namespace.door if isinstance(namespace, NamespaceHandle) else None
        if not isinstance(door, EmbeddedDoor) or not door.leads_to(self._store, self.keys.tenant(self.tenant)):
            raise BadInput("give a namespace that this store opened for this tenant; drop others where they are from")
        return door.call(m.Drop(namespace.number, seconds), m.Counted).blocks

    def evict(self, blocks: int) -> int:
        """Evict that many of the worst blocks; returns how many could go."""
        return self._store.evict(blocks)

    def warmed(self, timeout_seconds: float) -> bool:
        """Wait at most that long for recovery from disk to end; returns whether it went well."""
        return self._store.warmed(timeout_seconds)

    def usage(self) -> StoreUsage:
        """What the store holds now."""
        return self._store.usage()

    def check(self) -> None:
        """Verify every invariant of the tables. Raises `AssertionError`."""
        self._store.check()

    def close(self) -> None:
        """Give memory and directory back, an extent that is being made ahead once it is ready. Safe to call again.

        With a disk that hangs, the directory stays locked for as long as a write may yet reach it.
        """
        self._before_close()
        self._threads.close()
        self._store.close()
        self.names.close()
        if not self._store.is_stuck:
            self._lock.release()
            if self.node_lock is not None:
                self.node_lock.release()

    @property
    def closed(self) -> bool:
        return self._store.closed


def _no_codec(name: str) -> NoReturn:
    raise AssertionError("a store that was given no codecs encodes nothing")


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What a store is built of, besides its options.

    codecs: finds one by its name. dram_policy: which blocks go first there; what leaves NVMe is what was used there
    longest ago. indexes: makes the index of an NVMe tier; needed with one only. files: makes what holds its slabs.
    before_close: ends what the codecs have going with this store's memory. keeper: holds DRAM for the next process.
    kept: what it held of the one before, and guard: holders below that may be clients of that one
    (`DramTier.take_over`). faults: of the machine. numbers_key: of the permutations that number extents,
    leases and reservations, so that tenants cannot count each other's, and a number of an earlier run names nothing;
    random if not given. scrub_limits: all bounds of the scrub, in place of the rate in the options. gone: told of every
    block that NVMe gives up (see `Lower`). keys: of a pool's tenants; the caller has them followed (`rotation`). reach:
    told of failpoints.
    """

    codecs: Callable[[str], Codec] = _no_codec
    dram_policy: PolicyMaker = LeafFirstLru
    indexes: Callable[[Path], IndexMaker] | None = None
    files: Callable[[Path], Files] = DirectFiles
    before_close: Callable[[], object] = lambda: None
    keeper: MemoryKeeper | None = None
    kept: Sequence[KeptExtent] = ()
    guard: int = 0
    faults: Faults | None = None
    numbers_key: bytes | None = None
    scrub_limits: ScrubLimits | None = None
    gone: Callable[[int, bytes], None] | None = None
    keys: KeysOptions | None = None
    reach: Reach = go_on


def memory_here() -> int:
    """Bytes that this process's cgroup and the machine allow."""
    cgroups = "".join(read_text_files(["/proc/self/cgroup"]).values())
    return memory_limit(read_text_files(memory_limit_files(cgroups)))


def open_embedded(directory: str, options: StoreOptions, parts: StoreParts) -> EmbeddedStore:
    """Open a store in this process on a directory, which is made if need be. Raises `BadInput`, `DirectoryInUse` and
    `KeysUnusable`, each with one line that says what to do."""
    tiers, shares = options.tiers, options.shares
    dram_config = DramConfig.of(tiers.dram, tiers.extent, memory_here())
    rate = parse_rate(tiers.scrub, "scrub")
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
    parts = replace(parts, faults=faults, scrub_limits=parts.scrub_limits or (ScrubLimits(rate) if rate else None))
    try:
        own = KeyFile(path / "keys", parts.reach)
        if not own.is_there:
            refuse_new_keys(path)
        node = node_of(path / "node", secrets.token_bytes, parts.reach)
        keys, ring = StoreKeys(own, parts.keys), KeyRing()
        keys.find(options.tenant)  # which makes it, or says why it cannot be served
        keys.fill(ring)
        check_pieces(shares, dram_config.budget_bytes // dram_config.extent_bytes, dram_config.extent_bytes, "dram")
        tier = None
        if tiers.nvme is not None:
            tier = _open_nvme(path / "nvme", options, parts, ring)
            tier.beside = partial(_confirm_directory, lock, own)
        store = build_store(
            dram_config,
            options.limits,
            ring,
            tier=tier,
            parts=parts,
            admission=_admission_of(parse_writes(tiers.nvme_writes, "nvme_writes")),
            shares={found.tenant: share for name, share in shares.items() if (found := keys.find(name)) is not None},
            node=node,
        )
        store.start_loading({one.tenant: one for one in keys.tenants()})
    except BaseException:
        lock.release()
        raise
    names = DisplayNames(path / "names", faults)
    opened = EmbeddedStore(store, ring, keys, lock, parts, names, options.tenant)
    assert opened.node_lock is not None
    close_in_children(store, lock, opened.node_lock)
    return opened


def _confirm_directory(lock: DirectoryLock, keys: KeyFile) -> None:
    lock.confirm()
    try:
        keys.bring_back()
    except KeysUnusable as error:
        raise OSError(errno.ENOENT, str(error)) from error


def new_uid() -> bytes:
    """Names a slab or an index, so that records of one that is gone never fit another."""
    return secrets.token_bytes(UID_BYTES)


def _open_nvme(directory: Path, options: StoreOptions, parts: StoreParts, ring: KeyRing) -> NvmeTier:
    nvme, slab, faults = options.tiers.nvme, options.tiers.slab, parts.faults
    assert nvme is not None and parts.indexes is not None and faults is not None
    try:
        make_directory(directory)
        room = disk_room(directory)
        config = NvmeConfig.of(nvme, slab, room if not slab_bytes(directory) else None)
        if config.budget_bytes > room:
            words = f"nvme={nvme}, and the disk has room for {format_size(room)} of it"
            faults.failed(NEW_SLABS, FaultKind.DISK_FULL, words)
        # Before the index is open: a refusal here must leave it closed.
        check_pieces(options.shares, config.budget_bytes // config.slab_bytes, config.slab_bytes, "nvme")
        tier = NvmeTier(
            parts.files(directory),
            parts.indexes(directory / "index"),
            ring,
            config,
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
    warn_of_left_alone(directory, tier.left_alone)
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


def build_store(
    dram_config: DramConfig,
    limits: Limits,
    ring: KeyRing,
    clock: Clock | None = None,
    tier: NvmeTier | None = None,
    parts: StoreParts = StoreParts(),
    admission: AdmissionMaker = lambda names, clock, nvme_bytes: AdmitAll(),
    shares: Mapping[bytes, Share] | None = None,
    node: NodeIdentity = NOWHERE,
) -> Store:
    """Put the parts together: memory, tiers, policies, tables, movers.

    parts: without `scrub_limits` nothing is scrubbed. admission: decides which blocks that leave DRAM are written to
    NVMe. shares: of tenants, by opaque id; if not given, the worst block goes first, whichever tenant's. node: which
    one it is. Raises `BadInput` if the tier cannot be written.
    """
    clock = clock or SystemClock()
    numbers_key = parts.numbers_key or secrets.token_bytes(NUMBER_KEY_BYTES)
    pool = ExtentPool(
        dram_config.budget_bytes,
        dram_config.extent_bytes,
        parts.keeper,
        parts.faults,
        clock.monotonic_seconds,
        clock.thread_seconds,
    )
    dram = DramTier(pool, Numbers(numbers_key, EXTENT_BITS), parts.keeper)
    dram.take_over(parts.kept, parts.guard)
    pins = Pins()
    session = _session(tier, dram)
    groups = Shares(shares) if shares else None
    index = PrefixIndex(limits.forgotten, groups)

    def policies(make: PolicyMaker) -> EvictionPolicy:
        made = [make(index.names, secrets.randbelow(1 << 31)) for _ in range(len(groups) if groups is not None else 1)]
        return ByGroup(made, index.group) if groups is not None else made[0]

    residency = Residency(policies(parts.dram_policy), pins)
    lower = None
    if tier is not None:
        chooses = admission(index.names, clock.monotonic_seconds, tier.budget_bytes)
        # Writes that hang leave a thread for reads.
        queue = MoveQueue(clock, QueueLimits(), MOVE_THREADS, {NVME_WRITES: MOVE_THREADS - 1}, parts.faults)
        lower = Lower(tier, Residency(policies(LeafFirstLru), pins), chooses, queue, parts.gone)
    first = partial(_first_generation, session)
    blocks = BlockTable(index, residency, dram, ring, lower, first, clock.monotonic_seconds)
    fractions = groups.parts() if groups is not None else [1.0]
    for here, budget_bytes in (
        (residency, dram.budget_bytes),
        *([(lower.residency, lower.tier.budget_bytes)] if lower is not None else []),
    ):
        budgets = [int(part * limits.retained_fraction * budget_bytes) for part in fractions]
        here.retention = Retention(index, here.is_listed, clock.wall_seconds, budgets)
    numbers = Numbers(numbers_key, LEASE_BITS)
    return Store(blocks, clock, limits, parts.scrub_limits, numbers, new_uid(), node)


def _session(tier: NvmeTier | None, dram: DramTier) -> int:
    """The number that heads the generations of this run, above that of every existing frame. Raises `BadInput` if the
    tier's directory cannot be written."""
    session = tier.session.number if tier is not None else 0
    newest = dram.newest_generation()
    if newest and newest >> SESSION_BITS >= session:  # the directory is another one, or there is none
        session = (newest >> SESSION_BITS) + 1
        try:
            if tier is not None:
                tier.session.raise_to(session)
        except TierError as error:
            raise BadInput(f"nvme= cannot be used: {error}; free or repair it, or leave nvme= out") from None
    return session


def _first_generation(session: int) -> int:
    """A tenant's first one: random, so that the order in which tenants came stays hidden."""
    return (session << SESSION_BITS) + 1 + secrets.randbelow(1 << SESSION_BITS - 1)


def _admission_of(writes: float | None) -> AdmissionMaker:
    def made(names: array[int], seconds: Callable[[], float], nvme_bytes: int) -> Admission:
        if writes is None:
            return AdmitAll()
        return LearnedAdmission(names, seconds, writes * nvme_bytes / DAY_SECONDS if writes < inf else None)

    return made
