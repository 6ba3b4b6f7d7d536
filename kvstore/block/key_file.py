"""The file of tenants' keys in a store's directory. For a tenant with a secret of this store's own it has that secret;
for a tenant whose secrets are a pool's, the keys under which it was served here. It also lists the identities of purged
tenants, which must not be served again.

    {"version": 1, "tenants": {NAME: {"secret", "epoch"}}}
    {"version": 2, "tenants": {..., NAME: {"fingerprint", "epochs": {KEY ID: EPOCH}}}, "purged": {FINGERPRINT: NAME}}
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, convert, to_builtins

from kvstore.block.errors import BadInput, KeysUnusable, shown
from kvstore.block.identity import SECRET_BYTES, TenantKeys
from tiering.failpoint import Reach, go_on
from tiering.files import Unfit, read_secret_file, what_stands_at, write_secret_file
from tiering.frame import KEY_ID_BYTES

_log = logging.getLogger(__name__)
KEY_FILE_VERSION, POOL_VERSION = 1, 2
"""The second version is written once the file has anything of a pool's tenants."""

MAX_EPOCH = (1 << 32) - 1

MAX_TENANTS = 1024

MOST_PURGED = 4096

MOST_KEYS_BYTES = 4 << 20


def is_tenant_name(name: object) -> bool:
    """Whether a tenant may be called so."""
    return isinstance(name, str) and 0 < len(name) <= 64 and name.isprintable()


KeyId = Annotated[str, Meta(pattern=rf"^[0-9a-fA-F]{{{2 * KEY_ID_BYTES}}}\Z")]


class PooledTenant(Struct, frozen=True):
    """The keys of a pool under which a tenant is served here. fingerprint: of its identity, in hexadecimal. epochs: by
    key id, those that frames here may be signed in."""

    fingerprint: KeyId
    epochs: Mapping[KeyId, Annotated[int, Meta(ge=1, le=MAX_EPOCH)]]


class KeyFile:
    """The keys of a directory's tenants: `DIR/keys`, JSON, readable by its owner only. Thread-safe."""

    def __init__(self, path: Path, reach: Reach = go_on) -> None:
        self._path = path
        self._reach = reach
        self._lock = threading.Lock()
        self._tenants: dict[str, TenantKeys] = {}
        self._secrets: dict[str, tuple[int, bytes]] = {}
        self.pooled: dict[str, PooledTenant] = {}
        self.purged: dict[str, str] = {}
        """Names of purged tenants by the fingerprint of their identity. A pool may still have keys of these."""
        try:
            raw = read_secret_file(path, MOST_KEYS_BYTES)
        except Unfit as error:
            raise KeysUnusable(f"{path} is not the keys of a store: {error}; restore it from a backup") from None
        except PermissionError as error:
            raise KeysUnusable(f"{path} can be read by others or not by you ({error}); run: chmod 600 {path}") from None
        except OSError as error:
            raise KeysUnusable(f"{path} cannot be read ({error.strerror}); restore it from a backup") from None
        self.is_there = raw is not None
        if raw is None:
            return
        try:
            contents = json.loads(raw)
            version = contents["version"]
            is_known = version in (KEY_FILE_VERSION, POOL_VERSION)
            for name, entry in contents["tenants"].items() if is_known else ():
                if not is_tenant_name(name) or len(self._tenants) + len(self.pooled) >= MAX_TENANTS:
                    raise ValueError("a name that no tenant has, or too many of them")
                if "fingerprint" in entry and version == POOL_VERSION:
                    self.pooled[name] = convert(entry, PooledTenant)
                    continue
                secret, epoch = bytes.fromhex(entry["secret"]), int(entry["epoch"])
                if len(secret) != SECRET_BYTES or not 1 <= epoch <= MAX_EPOCH:
                    raise ValueError("a secret of another length, or an epoch out of range")
                self._secrets[name] = epoch, secret
                self._tenants[name] = TenantKeys.derive(secret, epoch)
            purged = contents["purged"] if version == POOL_VERSION else {}
            if len(purged) > MOST_PURGED or not all(map(is_tenant_name, purged.values())):
                raise ValueError("too many purged tenants, or a name that none has")
            self.purged = convert(purged, dict[KeyId, str])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise KeysUnusable(
                f"{path} is damaged; restore it from a backup, or move it and nvme/ beside it away to start with new "
                "keys (blocks stored under the old ones can then not be read)"
            ) from None
        if not is_known:
            raise KeysUnusable(
                f"{path} has version {shown(version)}; this program knows version {KEY_FILE_VERSION} and {POOL_VERSION}"
            )

    def by_name(self) -> dict[str, TenantKeys]:
        """The keys of every tenant that has a secret here."""
        with self._lock:
            return dict(self._tenants)

    def secrets(self) -> dict[str, tuple[int, bytes]]:
        """Their epochs and secrets, by name."""
        with self._lock:
            return dict(self._secrets)

    def tenant(self, name: str) -> TenantKeys:
        """A tenant's keys; a new tenant gets a new secret, which is on disk before it is used. Raises `KeysUnusable`
        for one whose secret is a pool's."""
        with self._lock:
            if name in self.pooled:
                raise KeysUnusable(
                    f"tenant {name} has keys of a pool ({self.pooled[name].fingerprint}), and {self._path} has no "
                    "secret of it; give kvstore serve the pool's directory as keys.directory"
                )
            return self._tenants.get(name) or self._new_tenant(name)

    def retire(self, name: str) -> None:
        """Remove a tenant's secret, durably; if the tenant ever comes back it gets a new one. A tenant of a pool is not
        served under that identity again before `revive`. Raises `KeysUnusable`; after a crash the secret may then be
        there or not."""
        with self._lock:
            secrets, pooled, purged = dict(self._secrets), dict(self.pooled), dict(self.purged)
            secrets.pop(name, None)
            one = pooled.pop(name, None)
            if one is not None:
                if len(purged) >= MOST_PURGED:
                    raise KeysUnusable(f"{self._path} has {MOST_PURGED} purged tenants, the most; revive some")
                purged[one.fingerprint] = name
            self._write(secrets, pooled, purged, "a retired key must be gone from there")

    def revive(self, name: str) -> list[str]:
        """Allow a purged tenant of a pool to be served again; returns the fingerprints of its identities. Raises
        `BadInput`, `KeysUnusable`."""
        with self._lock:
            found = [fingerprint for fingerprint, purged in self.purged.items() if purged == name]
            if not found:
                there = ", ".join(sorted(set(self.purged.values()))) or "none"
                raise BadInput(f"tenant {shown(name)} was not purged here; those who were: {there}")
            left = {fingerprint: purged for fingerprint, purged in self.purged.items() if purged != name}
            self._write(self._secrets, self.pooled, left, "it must be known that the tenant may come again")
            return found

    def adopt(self, name: str, found: PooledTenant) -> None:
        """Serve a tenant under these keys of a pool from now on, in place of a secret that it had here. The file is
        written before anything is signed by them. Raises `KeysUnusable`."""
        with self._lock:
            if self.pooled.get(name) == found and name not in self._secrets:
                return
            secrets = {one: secret for one, secret in self._secrets.items() if one != name}
            if len(secrets) + len(self.pooled.keys() | {name}) > MAX_TENANTS:
                raise KeysUnusable(f"{self._path} has {MAX_TENANTS} tenants, which is the limit")
            self._write(secrets, {**self.pooled, name: found}, self.purged, "it must be known whose keys were served")

    def bring_back(self) -> None:
        """Write the file again if others removed it. Raises `KeysUnusable`."""
        if what_stands_at(self._path) != "nothing":
            return
        with self._lock:
            self._write(self._secrets, self.pooled, self.purged, "what is stored cannot be used without it")
        _log.warning("%s was removed while it was in use, and is written again", self._path)

    def _new_tenant(self, name: str) -> TenantKeys:
        if not is_tenant_name(name):
            raise BadInput(f"tenant={name!r}; give 1 to 64 printable characters")
        if len(self._tenants) + len(self.pooled) >= MAX_TENANTS:
            raise BadInput(f"{len(self._tenants) + len(self.pooled)} tenants have keys, which is the limit")
        secrets_by_name = {**self._secrets, name: (1, secrets.token_bytes(SECRET_BYTES))}
        self._write(secrets_by_name, self.pooled, self.purged, "a new tenant's keys must be there before they are used")
        return self._tenants[name]

    def _write(
        self,
        secrets_by_name: Mapping[str, tuple[int, bytes]],
        pooled: Mapping[str, PooledTenant],
        purged: Mapping[str, str],
        why: str,
    ) -> None:
        own = {name: {"secret": secret.hex(), "epoch": epoch} for name, (epoch, secret) in secrets_by_name.items()}
        contents: dict[str, object] = {"version": KEY_FILE_VERSION, "tenants": own}
        if pooled or purged:
            tenants = {**own, **{name: to_builtins(one) for name, one in pooled.items()}}
            contents = {"version": POOL_VERSION, "tenants": tenants, "purged": dict(purged)}
        raw = json.dumps(contents, indent=1).encode()
        if len(raw) > MOST_KEYS_BYTES:
            raise KeysUnusable(
                f"{self._path} would have more than {MOST_KEYS_BYTES} bytes, and {why}; revive purged tenants, or "
                "retire epochs"
            )
        try:
            write_secret_file(self._path, raw, self._reach)
        except OSError as error:
            raise KeysUnusable(
                f"{self._path} cannot be written ({error.strerror}), and {why}; make room on that disk, or make the "
                "directory yours"
            ) from None
        self._tenants = {
            name: self._tenants.get(name) or TenantKeys.derive(secret, epoch)
            for name, (epoch, secret) in secrets_by_name.items()
        }
        self._secrets, self.pooled, self.purged = dict(secrets_by_name), dict(pooled), dict(purged)
