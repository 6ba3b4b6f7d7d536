"""The file of tenants' secrets in a store's directory."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

from kvstore.block.errors import BadInput, KeysUnusable, shown
from kvstore.block.identity import SECRET_BYTES, TenantKeys
from tiering.failpoint import Reach, go_on
from tiering.files import (
    Unfit,
    read_secret_file,
    write_secret_file,
)

KEY_FILE_VERSION = 1

MAX_EPOCH = (1 << 32) - 1

MAX_TENANTS = 1024

MOST_KEYS_BYTES = 4 << 20


def is_tenant_name(name: object) -> bool:
    """Whether a tenant may be called so."""
    return isinstance(name, str) and 0 < len(name) <= 64 and name.isprintable()


class KeyFile:
    """The secrets of a directory's tenants: `DIR/keys`, JSON, readable by its owner only."""

    def __init__(self, path: Path, reach: Reach = go_on) -> None:
        self._path = path
        self._reach = reach
        self._lock = threading.Lock()
        self._tenants: dict[str, TenantKeys] = {}
        self._secrets: dict[str, dict[str, object]] = {}
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
            for name, entry in contents["tenants"].items() if version == KEY_FILE_VERSION else ():
                secret, epoch = bytes.fromhex(entry["secret"]), int(entry["epoch"])
                if not is_tenant_name(name) or len(self._tenants) >= MAX_TENANTS:
                    raise ValueError("a name that no tenant has, or too many of them")
                if len(secret) != SECRET_BYTES or not 1 <= epoch <= MAX_EPOCH:
                    raise ValueError("a secret of another length, or an epoch out of range")
                self._secrets[name] = {"secret": entry["secret"], "epoch": epoch}
                self._tenants[name] = TenantKeys.derive(secret, epoch)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise KeysUnusable(
                f"{path} is damaged; restore it from a backup, or move it and nvme/ beside it away to start with new "
                "keys (blocks stored under the old ones can then not be read)"
            ) from None
        if version != KEY_FILE_VERSION:
            raise KeysUnusable(f"{path} has version {shown(version)}; this program knows version {KEY_FILE_VERSION}")

    def tenants(self) -> list[TenantKeys]:
        """Every tenant's keys."""
        with self._lock:
            return list(self._tenants.values())

    def tenant(self, name: str) -> TenantKeys:
        """A tenant's keys; a new tenant gets a new secret, which is on disk before it is used. Thread-safe."""
        with self._lock:
            return self._tenants.get(name) or self._new_tenant(name)

    def names(self) -> dict[bytes, str]:
        """Names by tenants' ids."""
        with self._lock:
            return {keys.tenant: name for name, keys in self._tenants.items()}

    def known(self, name: str) -> TenantKeys:
        """The keys of a tenant that has some. Raises `BadInput`."""
        with self._lock:
            keys = self._tenants.get(name)
            if keys is None:
                raise BadInput(f"tenant {name!r} has no keys here; there are: {', '.join(sorted(self._tenants))}")
            return keys

    def retire(self, name: str) -> None:
        """A tenant's secret is gone when this returns; if it ever comes again it gets a new one. Raises
        `KeysUnusable`; after a crash it may then be there or not."""
        with self._lock:
            left = {one: entry for one, entry in self._secrets.items() if one != name}
            self._write(left, "a retired key must be gone from there")
            self._secrets = left
            self._tenants.pop(name, None)

    def _new_tenant(self, name: str) -> TenantKeys:
        if not is_tenant_name(name):
            raise BadInput(f"tenant={name!r}; give 1 to 64 printable characters")
        if len(self._tenants) >= MAX_TENANTS:
            raise BadInput(f"{len(self._tenants)} tenants have keys, which is the limit")
        secret = secrets.token_bytes(SECRET_BYTES)
        tenants = {**self._secrets, name: {"secret": secret.hex(), "epoch": 1}}
        self._write(tenants, "a new tenant's keys must be there before they are used")
        self._secrets = tenants
        self._tenants[name] = TenantKeys.derive(secret)
        return self._tenants[name]

    def _write(self, secrets_by_name: Mapping[str, Mapping[str, object]], why: str) -> None:
        contents = json.dumps({"version": KEY_FILE_VERSION, "tenants": secrets_by_name}, indent=1).encode()
        try:
            write_secret_file(self._path, contents, self._reach)
        except OSError as error:
            raise KeysUnusable(
                f"{self._path} cannot be written ({error.strerror}), and {why}; make room on that disk, or make the "
                "directory yours"
            ) from None
