"""Tenants' secrets as the nodes of a pool share them, in a directory, and what an operator does with them.

    DIR/NAME.key    {"version": 1, "tenant": ..., "identity": {"epoch", "secret"}, "epochs": [{"epoch", "secret"}, ...]}

The identity is a tenant's first secret, for good: it names blocks. An epoch is a secret for MACs: the newest one signs,
all are accepted. Rotation adds one, and retiring takes one away; another identity finds nothing of what is stored.
A key id, in hexadecimal, is the fingerprint of a secret: it tells secrets apart, and nothing about them.

The directory may be a read-only mount. In a mount of Kubernetes each name is a link to `..data/NAME`, and `..data` is a
link to a directory, a new one after each change: the store follows links, and ignores names that begin with a dot. A
name may stand for anything: the store does not wait for a FIFO, and reads no more of a file than one may have.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from kvstore.block.errors import BadInput, KeysUnusable, shown
from kvstore.block.identity import SECRET_BYTES, TenantKeys
from kvstore.block.key_file import MAX_EPOCH, MAX_TENANTS, KeyFile, is_tenant_name
from tiering.failpoint import Reach, go_on
from tiering.files import Unfit, make_directory, read_file, what_stands_at, write_secret_file

VERSION = 1
MAX_EPOCHS = 64
"""Accepted at a time."""
SUFFIX = ".key"
MODE = 0o400
MOST_FILES, MOST_ENTRIES, MOST_FILE_BYTES = 4096, 65536, 64 << 10
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

NewSecret = Callable[[int], bytes]
Epoch = tuple[int, bytes]
"""Its number and its secret."""


@dataclass(frozen=True, slots=True, repr=False)
class TenantSecrets:
    """first: names the tenant's blocks. epochs: accepted ones, the oldest first; the last one signs."""

    tenant: str
    first: Epoch
    epochs: tuple[Epoch, ...]

    def in_epochs(self) -> list[TenantKeys]:
        """Its keys in each accepted epoch; the last ones sign."""
        number, secret = self.first
        first = TenantKeys.derive(secret, number)
        return [first if one == self.first else first.in_epoch(one[1], one[0]) for one in self.epochs]

    @property
    def fingerprint(self) -> str:
        """Of the identity."""
        return self.in_epochs()[-1].fingerprint.hex()

    def rotated(self, secret: bytes) -> TenantSecrets:
        """With one more epoch, which signs from now on. Raises `BadInput`."""
        if len(self.epochs) >= MAX_EPOCHS:
            raise BadInput(f"tenant {self.tenant} has {MAX_EPOCHS} epochs, which is the limit; retire the oldest first")
        newest = self.epochs[-1][0]
        if newest >= MAX_EPOCH:
            raise BadInput(f"tenant {self.tenant} is in epoch {newest}, which is the last one")
        return replace(self, epochs=(*self.epochs, (newest + 1, secret)))

    def without(self, epoch: int) -> TenantSecrets:
        """With one epoch less. Raises `BadInput` for the one that signs, and for one that is not there."""
        numbers = [number for number, _ in self.epochs]
        if epoch not in numbers:
            raise BadInput(f"tenant {self.tenant} has no epoch {epoch}; it has: {', '.join(map(str, numbers))}")
        if epoch == numbers[-1]:
            raise BadInput(f"epoch {epoch} of tenant {self.tenant} signs what is stored now; rotate first")
        return replace(self, epochs=tuple(one for one in self.epochs if one[0] != epoch))

    def pack(self) -> bytes:
        """As a file has it."""
        told = {"version": VERSION, "tenant": self.tenant, "identity": _told(self.first)}
        return json.dumps({**told, "epochs": list(map(_told, self.epochs))}, indent=1).encode() + b"\n"

    @staticmethod
    def unpack(raw: bytes) -> TenantSecrets:
        """The mirror of `pack`. Raises `ValueError`, which reveals nothing of a secret."""
        try:
            given = json.loads(raw)
            version = given["version"]
            tenant, first, epochs = given["tenant"], _epoch(given["identity"]), tuple(map(_epoch, given["epochs"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError("it is damaged, or no file of a tenant's keys") from None
        if type(version) is not int or version != VERSION:
            raise ValueError(f"it has version {shown(version)}; this program knows version {VERSION}")
        numbers = [number for number, _ in epochs]
        if not is_tenant_name(tenant) or not 1 <= len(epochs) <= MAX_EPOCHS or numbers != sorted(set(numbers)):
            raise ValueError("it is damaged: no tenant's name, or no list of epochs")
        if first[0] > numbers[0] or (first[0] == numbers[0] and first != epochs[0]):
            raise ValueError("it is damaged: the identity is not of the first epoch")
        return TenantSecrets(tenant, first, epochs)


def _told(epoch: Epoch) -> dict[str, object]:
    return {"epoch": epoch[0], "secret": epoch[1].hex()}


def _epoch(given: Mapping[str, object]) -> Epoch:
    number, secret = given["epoch"], bytes.fromhex(str(given["secret"]))
    if type(number) is not int or not 1 <= number <= MAX_EPOCH or len(secret) != SECRET_BYTES:
        raise ValueError("an epoch out of range, or a secret of another length")
    return number, secret


def file_name(tenant: str) -> str:
    """The name of a tenant's file, which Kubernetes takes as a key of a secret, too."""
    if _PLAIN.fullmatch(tenant):
        return tenant + SUFFIX
    return f"tenant.{blake2b(tenant.encode(), digest_size=16).hexdigest()}{SUFFIX}"


class SecretDirectory:
    """One such directory. reach: told of failpoints."""

    def __init__(self, path: Path, reach: Reach = go_on) -> None:
        self.path = path
        self._reach = reach

    def names(self) -> list[str]:
        """The names of files of secrets, sorted. Raises `OSError`, and `Unfit` where there are too many."""
        found = []
        with os.scandir(self.path) as entries:
            for entry in islice(entries, MOST_ENTRIES):
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    found.append(entry.name)
            if len(found) > MOST_FILES or next(entries, None) is not None:
                raise Unfit(f"it has more than {MOST_FILES} files of keys, or {MOST_ENTRIES} of any kind")
        return sorted(found)

    def read(self, name: str) -> bytes:
        """A file's contents. Raises `OSError`; `PermissionError` where others could read it or change it, and `Unfit`
        where it is no file, or longer than one may be."""
        return read_file(self.path / name, MOST_FILE_BYTES, _refuse_shared)

    def stamp(self) -> object:
        """A value that changes when a file comes, goes or is replaced."""
        try:
            return tuple((name, *self._stamp_of(name)) for name in self.names())
        except OSError as error:
            return error.errno, str(error)

    def _stamp_of(self, name: str) -> tuple[int | None, ...]:
        try:
            status = os.stat(self.path / name)
        except OSError as error:
            return (error.errno,)
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context for one operator at a time to change files. Makes the directory. Raises `BadInput`, `OSError`."""
        make_directory(self.path)
        if os.path.lexists(self.path / "..data"):
            raise BadInput(f"{self.path} is a mounted secret; change that one, and it changes in every pod")
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise BadInput(f"another kvstore keys is at work on {self.path}; do it again when it is done") from None
        finally:
            os.close(descriptor)

    def write(self, name: str, contents: bytes) -> None:
        """Replace a file, durably, or leave it as it is. The directory is locked. Raises `OSError`."""
        assert len(contents) <= MOST_FILE_BYTES
        write_secret_file(self.path / name, contents, self._reach, MODE)


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """What a directory holds. tenants: secrets by the tenant's name. faults: of unusable files, by the file's name."""

    tenants: Mapping[str, TenantSecrets]
    faults: Mapping[str, str]

    @staticmethod
    def read(directory: SecretDirectory) -> PoolKeys:
        """Read all files. Raises `KeysUnusable` where the directory cannot be read at all."""
        tenants: dict[str, TenantSecrets] = {}
        faults: dict[str, str] = {}
        try:
            names = directory.names()
        except OSError as error:
            raise KeysUnusable(
                f"{directory.path} cannot be read as a directory of keys ({error.strerror}); make one with: "
                f"kvstore keys init {directory.path}"
            ) from None
        for name in names:
            try:
                one = TenantSecrets.unpack(directory.read(name))
                if file_name(one.tenant) != name:
                    raise ValueError(
                        f"it has keys of tenant {shown(one.tenant)}, whose file is {file_name(one.tenant)}"
                    )
                if len(tenants) >= MAX_TENANTS:
                    raise ValueError(f"{MAX_TENANTS} tenants have keys, which is the limit")
                tenants[one.tenant] = one
            except (ValueError, OSError) as error:
                faults[name] = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return PoolKeys(tenants, faults)


# ---------------------------------------------------------------------------------------------------------------------
# What an operator does. Each raises `BadInput` and `KeysUnusable`, and changes nothing then.


def init(directory: SecretDirectory, tenants: Sequence[str], new_secret: NewSecret) -> list[TenantSecrets]:
    """Make keys for tenants that have none."""
    for name in tenants:
        if not is_tenant_name(name):
            raise BadInput(f"tenant={shown(name)}; give 1 to 64 printable characters")
    with _changing(directory) as there:
        for name in tenants:
            _refuse_fault(directory, there, name)
            if name in there.tenants:
                raise BadInput(
                    f"tenant {name} has keys in {directory.path} already ({there.tenants[name].fingerprint}); to sign "
                    f"with a new secret: kvstore keys rotate {directory.path} {name}"
                )
        made = []
        for name in dict.fromkeys(tenants):
            first = 1, new_secret(SECRET_BYTES)
            made.append(_write(directory, TenantSecrets(name, first, (first,))))
        return made


def rotate(directory: SecretDirectory, tenant: str, new_secret: NewSecret) -> TenantSecrets:
    """Sign a tenant's frames with a new secret from now on; existing ones stay readable."""
    with _changing(directory) as there:
        return _write(directory, _of(directory, there, tenant).rotated(new_secret(SECRET_BYTES)))


def retire(directory: SecretDirectory, tenant: str, epoch: int) -> TenantSecrets:
    """Stop accepting frames that were signed in an epoch."""
    with _changing(directory) as there:
        return _write(directory, _of(directory, there, tenant).without(epoch))


def take_in(
    directory: SecretDirectory, source: Path, tenants: Sequence[str] = (), *, cold_start: bool = False
) -> list[TenantSecrets]:
    """Copy tenants' keys from elsewhere: all of them if none is named. cold_start: even if that replaces another
    identity. Each tenant's are replaced as a whole; an interrupted copy is done again."""
    found = read_source(source)
    for name in tenants:
        if name not in found:
            raise BadInput(f"{source} has no secret of tenant {shown(name)}; it has: {_listed(found)}")
    chosen = [found[name] for name in (tenants or sorted(found))]
    if not chosen:
        raise BadInput(f"{source} has no tenant's secret; give a directory of keys, one file of it, or DATA/keys")
    with _changing(directory) as there:
        for one in chosen:
            _refuse_fault(directory, there, one.tenant)
            old = there.tenants.get(one.tenant)
            if old is not None and not cold_start:
                _refuse_replacing(directory, old, one)
        return [one if there.tenants.get(one.tenant) == one else _write(directory, one) for one in chosen]


def read_source(source: Path) -> dict[str, TenantSecrets]:
    """Secrets by tenant: of a directory, of one file of it, or of a store's own keys. Raises as those above."""
    if what_stands_at(source) in ("a directory", "a link to a directory"):
        there = PoolKeys.read(SecretDirectory(source))
        for name, fault in there.faults.items():
            raise KeysUnusable(f"{source / name} cannot be used: {fault}; restore it, or move it away")
        return dict(there.tenants)
    if source.suffix == SUFFIX:
        try:
            one = TenantSecrets.unpack(SecretDirectory(source.parent).read(source.name))
        except (ValueError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise KeysUnusable(f"{source} cannot be used: {why}; give a file that kvstore keys made") from None
        return {one.tenant: one}
    own = KeyFile(source)
    if not own.is_there:
        raise BadInput(f"{source} does not exist; give a directory of keys, one file of it, or DATA/keys")
    return {name: TenantSecrets(name, first, (first,)) for name, first in own.secrets().items()}


def _refuse_replacing(directory: SecretDirectory, old: TenantSecrets, new: TenantSecrets) -> None:
    if new.fingerprint != old.fingerprint:
        raise BadInput(
            f"tenant {new.tenant} has the identity {old.fingerprint} in {directory.path}, and these keys are "
            f"{new.fingerprint}: nothing that is stored would be found; give --cold-start to begin anew with them"
        )
    theirs = dict(old.epochs)
    newest, there = new.epochs[-1][0], old.epochs[-1][0]
    if newest < there or any(theirs.get(number, secret) != secret for number, secret in new.epochs):
        raise BadInput(
            f"tenant {new.tenant} is in epoch {there} in {directory.path}, and these keys in an epoch {newest} of "
            "another secret, or an older one; import in the other direction"
        )


@contextmanager
def _changing(directory: SecretDirectory) -> Iterator[PoolKeys]:
    try:
        with directory.locked():
            yield PoolKeys.read(directory)
    except OSError as error:
        why = error.strerror or str(error)
        raise KeysUnusable(f"{directory.path} cannot be written ({why}); give a directory of yours on a disk") from None


def _write(directory: SecretDirectory, secrets: TenantSecrets) -> TenantSecrets:
    directory.write(file_name(secrets.tenant), secrets.pack())
    return secrets


def _of(directory: SecretDirectory, there: PoolKeys, tenant: str) -> TenantSecrets:
    _refuse_fault(directory, there, tenant)
    if tenant not in there.tenants:
        raise BadInput(f"tenant {shown(tenant)} has no keys in {directory.path}; there are: {_listed(there.tenants)}")
    return there.tenants[tenant]


def _refuse_fault(directory: SecretDirectory, there: PoolKeys, tenant: str) -> None:
    name = file_name(tenant)
    if name in there.faults:
        raise KeysUnusable(f"{directory.path / name} cannot be used: {there.faults[name]}; restore it, or move it away")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _refuse_shared(status: os.stat_result) -> None:
    # A secret that Kubernetes mounts is root's, and its group may read it where the pod has an fsGroup.
    if status.st_mode & (0o037 if status.st_uid == 0 else 0o077):
        raise PermissionError(0, f"its mode is {stat.S_IMODE(status.st_mode):04o}, and not {MODE:04o}")
