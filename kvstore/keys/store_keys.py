"""The keys that a store serves its tenants under: secrets of its own, or those of a pool's directory.

    no directory    DATA/keys has a secret of each tenant, and makes one for a new tenant
    a directory     its secrets, read again when they change; DATA/keys remembers which identity each tenant had here,
                    and which tenants were purged. Another identity is served only after an explicit cold start

If a directory becomes unusable while a store runs, the store only warns, and serves on under the keys that it has.

DATA/node has 16 random bytes, kept for good: which node a store is, which one store at a time has on this host. A copy
of DATA has the same bytes, and two running copies would take each other's place in a pool. So a store binds a socket
name made of these bytes, which the kernel gives to one process in each network namespace and frees when that process
ends; it finds copies on this host only. A store that cannot have the name is a clone, and warns of it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.block.errors import BadInput, DirectoryInUse, KeysUnusable, TenantPurged
from kvstore.block.identity import INCARNATION_BYTES, NODE_BYTES, KeyRing, NodeIdentity, TenantKeys
from kvstore.block.key_file import KeyFile, PooledTenant
from kvstore.config import KeysOptions, format_size
from kvstore.keys.pool_keys import NewSecret, PoolKeys, SecretDirectory, TenantSecrets, file_name
from tiering.failpoint import Reach, go_on
from tiering.files import DirectoryLock, ReadingLock, Unfit, read_secret_file, write_secret_file
from tiering.nvme.slab import STAMP_SLAB, slab_name
from tiering.nvme.slab_files import ReadOnlyFiles
from tiering.nvme.slab_recovery import LeftAlone

NODE_VERSION = 1
MOST_NODE_BYTES = 4096

_log = logging.getLogger(__name__)

Epochs = Collection[tuple[bytes, int]]
"""Key ids and numbers."""


class StoreKeys:
    """Keys by tenant. Thread-safe."""

    def __init__(self, own: KeyFile, options: KeysOptions | None = None) -> None:
        """own: DATA/keys. Raises `KeysUnusable` if there is a directory, and it cannot be read."""
        self._own, options = own, options or KeysOptions()
        self._directory = SecretDirectory(Path(options.directory)) if options.directory is not None else None
        self._cold_start = (options.cold_start or "").lower()
        self._lock = threading.RLock()
        self._served: dict[str, list[TenantKeys]] = {}  # in every epoch that is accepted; the last ones sign
        self._trouble: dict[str, KeysUnusable] = {}  # by the name of a file; of the directory itself, by no name
        self._stamp: object = None
        self._is_followed = self._is_full = False
        self.reload()
        self._is_followed = True
        if "" in self._trouble:
            raise self._trouble[""]

    # What a store asks ---------------------------------------------------------------------------------------------

    def tenant(self, name: str) -> TenantKeys:
        """A tenant's keys, in the epoch that signs. Without a directory a new tenant gets some. Raises `BadInput` and
        `KeysUnusable`, `TenantPurged` where the directory has those of a purged tenant."""
        if self._directory is None:
            return self._own.tenant(name)
        with self._lock:
            if name in self._served:
                return self._served[name][-1]
            raise self._trouble.get(file_name(name)) or self._trouble.get("") or self._absent(name)

    def find(self, name: str) -> TenantKeys | None:
        """The same; None for a tenant that is not served since it was purged."""
        try:
            return self.tenant(name)
        except TenantPurged:
            return None

    def tenants(self) -> list[TenantKeys]:
        """All known ones, in the epoch that signs."""
        return [keys[-1] for keys in self.by_name().values()]

    def by_name(self) -> dict[str, list[TenantKeys]]:
        """Every known tenant's in each accepted epoch; the last ones sign."""
        with self._lock:
            return {**{name: [one] for name, one in self._own.by_name().items()}, **self._served}

    def known(self, name: str) -> TenantKeys:
        """The keys of a tenant that has some. Raises `BadInput`."""
        by_name = self.by_name()
        if name not in by_name:
            raise BadInput(f"tenant {name!r} has no keys here; there are: {', '.join(sorted(by_name))}")
        return by_name[name][-1]

    def retire(self, name: str) -> None:
        """Retire the keys of a purged tenant: a secret of this store's own is gone when this returns, and a pool's is
        not served before it is revived. Raises `KeysUnusable`."""
        with self._lock:
            self._own.retire(name)
            served = self._served.pop(name, None)
            if served is not None:
                self._trouble[file_name(name)] = self._purged(name, served[-1].fingerprint.hex())
                self._stamp = None  # the directory may have other keys for the tenant already

    def fill(self, ring: KeyRing) -> None:
        """Add every epoch of every tenant, accepted or retired, to a ring."""
        with self._lock:
            for name, accepted in self.by_name().items():
                for one in accepted:
                    ring.add(one)
                for key_id, epoch in self.retired(name):
                    ring.retire(accepted[-1].tenant, key_id, epoch)

    # Following a directory -----------------------------------------------------------------------------------------

    def reload(self) -> list[str]:
        """Look at the directory, if anything changed there; returns the tenants whose epochs changed. Called by one
        thread; a slow mount delays no other."""
        if self._directory is None:
            return []
        stamp = self._directory.stamp()
        if stamp == self._stamp:
            return []
        there: PoolKeys | KeysUnusable
        try:
            there = PoolKeys.read(self._directory)
        except KeysUnusable as error:
            there = error
        with self._lock:
            before, trouble_before, self._is_full = dict(self._served), self._trouble, False
            self._trouble = {}
            if isinstance(there, KeysUnusable):
                self._trouble[""] = there
            else:
                self._take(there)
            self._stamp = stamp if not self._is_full else None  # DATA/keys may get room while the directory stays
            for key, trouble in self._trouble.items():
                if self._is_followed and str(trouble_before.get(key)) != str(trouble):
                    _log.warning("%s", trouble)
            return [name for name, one in self._served.items() if before.get(name) != one]

    def _take(self, there: PoolKeys) -> None:
        assert self._directory is not None
        for name, fault in there.faults.items():
            self._trouble[name] = KeysUnusable(f"{self._directory.path / name} cannot be used: {fault}; restore it")
        for name, one in there.tenants.items():
            try:
                self._admit(name, one)
            except KeysUnusable as error:
                self._trouble[file_name(name)] = error
        for name in self._served.keys() - there.tenants.keys():
            if file_name(name) not in there.faults:
                path = self._directory.path
                self._trouble[file_name(name)] = KeysUnusable(
                    f"the keys of tenant {name} are gone from {path}, and serve until the next start; bring them back"
                )

    def _admit(self, name: str, new: TenantSecrets) -> None:
        assert self._directory is not None
        where, accepted = f"of tenant {name} in {self._directory.path}", new.in_epochs()
        fingerprint = accepted[-1].fingerprint.hex()
        if fingerprint in self._own.purged:
            raise self._purged(name, fingerprint)
        serving = self._served[name][-1].fingerprint.hex() if name in self._served else fingerprint
        if serving != fingerprint:
            raise KeysUnusable(
                f"the keys {where} are of another identity ({fingerprint}) than those that are served "
                f"({serving}); bring these back, or start again with keys.cold_start={fingerprint}"
            )
        had = self._had(name)
        if had is not None and had.fingerprint != fingerprint:
            if self._cold_start != fingerprint:
                raise KeysUnusable(
                    f"the keys {where} are of another identity ({fingerprint}) than those under which it was stored "
                    f"here ({had.fingerprint}): nothing of it would be found; bring these back, or give "
                    f"keys.cold_start={fingerprint} to begin anew"
                )
            _log.warning("tenant %s begins cold: its identity is %s, and was %s", name, fingerprint, had.fingerprint)
            had = None
        epochs = {keys.key_id.hex(): keys.epoch for keys in accepted}
        # Retired epochs stay on record until nothing that they signed is left.
        try:
            self._own.adopt(name, PooledTenant(fingerprint, {**(had.epochs if had is not None else {}), **epochs}))
        except KeysUnusable:
            self._is_full = True
            raise
        self._served[name] = accepted

    def _had(self, name: str) -> PooledTenant | None:
        if name in self._own.pooled:
            return self._own.pooled[name]
        own = self._own.by_name().get(name)
        return PooledTenant(own.fingerprint.hex(), {own.key_id.hex(): own.epoch}) if own is not None else None

    def retired(self, name: str) -> Epochs:
        """A tenant's epochs that are no longer accepted, of which something may still be stored."""
        with self._lock:
            if name not in self._served or name not in self._own.pooled:
                return []
            accepted = {keys.key_id.hex() for keys in self._served[name]}
            on_record = self._own.pooled[name].epochs.items()
            return [(bytes.fromhex(key_id), epoch) for key_id, epoch in on_record if key_id not in accepted]

    def accepted(self, name: str) -> list[TenantKeys]:
        """A served tenant's keys in every accepted epoch; the last ones sign. Empty for a purged tenant."""
        with self._lock:
            return self._served.get(name, [])

    def served(self) -> list[str]:
        with self._lock:
            return list(self._served)

    def gone(self, name: str, epochs: Epochs) -> None:
        """Forget these epochs: nothing that they signed is stored any more. Raises `KeysUnusable`."""
        with self._lock:
            had = self._own.pooled.get(name)
            if had is not None:
                gone = {key_id.hex() for key_id, _ in epochs}
                left = {key_id: epoch for key_id, epoch in had.epochs.items() if key_id not in gone}
                self._own.adopt(name, PooledTenant(had.fingerprint, left))

    # What people are told ------------------------------------------------------------------------------------------

    def warnings(self) -> list[str]:
        """Faults of the directory, a line each."""
        with self._lock:
            return [str(error) for error in self._trouble.values()]

    def _purged(self, name: str, fingerprint: str) -> TenantPurged:
        assert self._directory is not None
        return TenantPurged(
            f"the keys of tenant {name} in {self._directory.path} ({fingerprint}) were purged here and are not served; "
            f"give the tenant others, or, with the sidecar stopped: kvstore keys revive {name}"
        )

    def _absent(self, name: str) -> KeysUnusable:
        assert self._directory is not None
        path = self._directory.path
        return KeysUnusable(
            f"tenant {name} has no keys in {path}; make some (kvstore keys init {path} {name}), or bring a store's own "
            f"there (kvstore keys import DATA/keys {path})"
        )


def ring_of(own: KeyFile, directory: str | None = None) -> tuple[KeyRing, dict[bytes, str]]:
    """The keys of DATA/keys and of a pool's directory, to verify frames, and names by tenants' ids. Writes nothing.
    Raises `KeysUnusable`."""
    own_keys = own.by_name()
    ring, names = KeyRing(own_keys.values()), {one.tenant: name for name, one in own_keys.items()}
    pool = PoolKeys.read(SecretDirectory(Path(directory))).tenants if directory is not None else {}
    for name, secrets in pool.items():
        accepted, had = secrets.in_epochs(), own.pooled.get(name)
        if had is None or had.fingerprint != secrets.fingerprint:
            continue
        names[accepted[-1].tenant] = name
        for key_id, epoch in had.epochs.items():
            ring.retire(accepted[-1].tenant, bytes.fromhex(key_id), epoch)
        for one in accepted:
            ring.add(one)
    return ring, names


@contextmanager
def locked(lock: type[ReadingLock | DirectoryLock], path: Path) -> Iterator[None]:
    """A context in which no other process has a store's directory. Raises `DirectoryInUse`, `OSError`."""
    try:
        held = lock(path)
    except BlockingIOError as error:
        raise DirectoryInUse(f"{path} is in use by process {error}; close that store first") from None
    try:
        yield
    finally:
        held.release()


def revive(path: Path, tenant: str) -> list[str]:
    """Let the store of a directory serve a purged tenant again; see `KeyFile.revive`. Raises `BadInput`,
    `DirectoryInUse` and `KeysUnusable`."""
    try:
        with locked(DirectoryLock, path):
            return KeyFile(path / "keys").revive(tenant)
    except OSError as error:
        raise BadInput(f"{path} cannot be used as a store's directory: {error.strerror}; give another one") from None


def refuse_new_keys(path: Path) -> None:
    """Raise `KeysUnusable` if a directory without a key file has slabs: a store with new keys could never use them.
    Raises `BadInput` if they cannot be looked at."""
    try:
        sizes = ReadOnlyFiles(path / "nvme").sizes()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BadInput(f"{path / 'nvme'} cannot be looked at: {error.strerror}; give another directory") from None
    sizes.pop(slab_name(STAMP_SLAB), None)
    if sizes:
        raise KeysUnusable(
            f"{path / 'keys'} is missing, and {slabs_in_words(len(sizes), sum(sizes.values()))} in {path / 'nvme'} "
            f"cannot be used without it; restore it from a backup, or move {path / 'nvme'} away to begin anew"
        )


def slabs_in_words(count: int, size_bytes: int) -> str:
    """So many slabs, and their bytes."""
    return f"{count} slab{'s' * (count != 1)} ({format_size(size_bytes)})"


def warn_of_left_alone(directory: Path, left_alone: Sequence[LeftAlone]) -> None:
    """Log which slabs of a directory stay as they are, since their keys are missing or they cannot be used."""
    for needs_keys, why, remedy in (
        (True, f"{directory.parent / 'keys'} does not hold the keys", "restore those from a backup"),
        (False, "unusable", f"kvstore fsck {directory.parent} says why"),
    ):
        alone = [one.size_bytes for one in left_alone if one.needs_keys is needs_keys]
        if alone:
            _log.warning(
                "%s left alone in %s: %s. What is left alone counts against nvme=; %s, or move it away",
                slabs_in_words(len(alone), sum(alone)),
                directory,
                why,
                remedy,
            )


# Which node it is -----------------------------------------------------------------------------------------------------


def node_of(path: Path, new_secret: NewSecret, reach: Reach = go_on) -> NodeIdentity:
    """The node that this file names, in a new run. The file is made if it is missing. new_secret: that many random
    bytes. Raises `KeysUnusable`."""
    mend = f"restore it, or remove {path} to have this directory be a new node"
    try:
        raw = read_secret_file(path, MOST_NODE_BYTES)
        if raw is None:
            node = new_secret(NODE_BYTES)
            write_secret_file(path, json.dumps({"version": NODE_VERSION, "node": node.hex()}).encode() + b"\n", reach)
        else:
            given = json.loads(raw)
            node = bytes.fromhex(given["node"])
            if given["version"] != NODE_VERSION or len(node) != NODE_BYTES:
                raise ValueError("of another version or length")
    except PermissionError as error:
        raise KeysUnusable(f"{path} is open to others, or not to you ({error}); run: chmod 600 {path}") from None
    except OSError as error:
        why = error if isinstance(error, Unfit) else error.strerror
        raise KeysUnusable(f"{path} cannot be used as the id of a node: {why}; {mend}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KeysUnusable(f"{path} is damaged, and is no id of a node; {mend}") from None
    return NodeIdentity(node, new_secret(INCARNATION_BYTES))


class NodeLock:
    """A node's name on this host, held for as long as this process lives and has it open."""

    def __init__(self, here: NodeIdentity) -> None:
        self._name = f"\0kvstore-node-{here.node.hex()}"
        self._held: socket.socket | None = None
        self._is_over = False
        self._taking = threading.Lock()
        self.is_clone()

    def is_clone(self) -> bool:
        """Whether another store has it. Takes it if it is free by now. Thread-safe."""
        with self._taking:
            if self._held is not None or self._is_over:
                return False
            try:
                mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            except OSError:  # no descriptors left, which says nothing
                return False
            try:
                mine.bind(self._name)
            except OSError:
                mine.close()
                return True
            self._held = mine
            return False

    def warnings(self) -> list[str]:
        """A warning if another store is this node too."""
        if not self.is_clone():
            return []
        node = self._name.rpartition("-")[2]
        return [
            f"another process of this host is node {node} already: this directory is a copy of that one's; end one of "
            "them, and remove the file node from this directory to have it be a node of its own"
        ]

    def close_after_fork(self) -> None:
        """Close it in a forked child: the name is the parent's."""
        self.release()

    def release(self) -> None:
        self._is_over = True
        if self._held is not None:
            self._held.close()
            self._held = None
