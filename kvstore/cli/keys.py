"""kvstore keys: tenants' secrets that a pool's nodes share. Prints fingerprints, never a secret."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from msgspec import to_builtins

from kvstore.block.key_file import KeyFile, PooledTenant
from kvstore.cli.operate import Data
from kvstore.cli.terminal import Json, Shown, argument, option, path_argument, print_result, typer
from kvstore.cli.terminal import keys as app
from kvstore.keys import pool_keys
from kvstore.keys.pool_keys import PoolKeys, SecretDirectory, TenantSecrets, read_source
from kvstore.keys.store_keys import revive as revive_tenant

Dir = Annotated[str, path_argument("DIR", "Directory of keys, as `keys.directory` names it.")]
Tenant = Annotated[str, argument("TENANT", "The tenant's name.")]


def _keys(
    where: str,
    tenants: Sequence[TenantSecrets],
    served: Mapping[str, PooledTenant] = MappingProxyType({}),
    purged: Mapping[str, str] = MappingProxyType({}),
    faults: Mapping[str, str] = MappingProxyType({}),
) -> Shown:
    """Keys found at a path. served: identity of a pool under which a store serves each tenant. purged: tenants, by
    fingerprint, that a store no longer serves. faults: of files, by name."""
    told, lines = [], []
    for one in tenants:
        epochs = [{"epoch": keys.epoch, "key_id": keys.key_id.hex()} for keys in one.in_epochs()]
        epoch = one.epochs[-1][0]
        told.append({"tenant": one.tenant, "fingerprint": one.fingerprint, "epoch": epoch, "epochs": epochs})
        signs = one.in_epochs()[-1]
        also = ", ".join(str(number) for number, _ in one.epochs[:-1])
        line = f"{one.tenant}: {one.fingerprint}, signs in epoch {signs.epoch} ({signs.key_id.hex()})"
        lines.append(line + (f", accepts {also} too" if also else ""))
    lines += [f"{name}: {pooled.fingerprint}, of a pool" for name, pooled in served.items()]
    lines += [f"{name}: {fingerprint} was purged" for fingerprint, name in purged.items()]
    lines += [f"{name} cannot be used: {fault}" for name, fault in faults.items()]
    pools = {name: to_builtins(one) for name, one in served.items()}
    facts = {"path": where, "tenants": told, "served": pools, "purged": dict(purged), "faults": dict(faults)}
    return Shown(facts, lines or [f"{where} has no keys"])


@app.command()
def init(
    directory: Dir,
    tenants: Annotated[list[str] | None, argument("[TENANT]...", "Names of tenants.  [default: default]")] = None,
    as_json: Json = False,
) -> int:
    """Make keys for tenants that have none there. Every node of the pool needs the same directory."""
    made = pool_keys.init(SecretDirectory(Path(directory)), tenants or ["default"], secrets.token_bytes)
    return print_result(_keys(directory, made), as_json)


@app.command()
def show(
    path: Annotated[
        str,
        path_argument(
            "PATH",
            "A directory of keys, one file of it, or the file keys of a store's directory.",
            envvar="KVSTORE_KEYS_DIRECTORY",
        ),
    ],
    as_json: Json = False,
) -> int:
    """Print fingerprints of the keys: they must be equal on all nodes of a pool. Never prints a secret."""
    given = Path(path)
    if given.is_dir():
        there = PoolKeys.read(SecretDirectory(given))
        found = _keys(path, [there.tenants[name] for name in sorted(there.tenants)], faults=there.faults)
    else:
        own = KeyFile(given) if given.suffix != ".key" else None
        read = read_source(given)
        told = (own.pooled, own.purged) if own is not None else ({}, {})
        found = _keys(path, [read[name] for name in sorted(read)], *told)
    return print_result(found, as_json)


@app.command(name="import")
def take_in(
    source: Annotated[
        str, path_argument("SOURCE", "A directory of keys, one file of it, or the file keys of a store's directory.")
    ],
    directory: Dir,
    tenants: Annotated[list[str] | None, option("NAME", "This tenant alone. May be given again.", "--tenant")] = None,
    cold_start: Annotated[
        bool, typer.Option("--cold-start", help="Also where another identity is there: what it stored is lost.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Take over tenants' keys from elsewhere: a store's keys become a pool's, and the store stays warm."""
    taken = pool_keys.take_in(SecretDirectory(Path(directory)), Path(source), tenants or (), cold_start=cold_start)
    return print_result(_keys(directory, taken), as_json)


@app.command()
def rotate(directory: Dir, tenant: Tenant, as_json: Json = False) -> int:
    """Begin an epoch: blocks stored from now on are signed with a new secret; older ones stay readable.

    Sidecars with the directory notice within seconds. Blocks keep their names.
    """
    rotated = pool_keys.rotate(SecretDirectory(Path(directory)), tenant, secrets.token_bytes)
    return print_result(_keys(directory, [rotated]), as_json)


@app.command()
def retire(
    directory: Dir,
    tenant: Tenant,
    epoch: Annotated[int, argument("EPOCH", "The epoch's number.")],
    as_json: Json = False,
) -> int:
    """End an epoch: blocks signed in it are evicted from every tier, and no node accepts them any more.

    Rotate first, and wait until kvstore stat shows the new epoch on every node.
    """
    left = pool_keys.retire(SecretDirectory(Path(directory)), tenant, epoch)
    return print_result(_keys(directory, [left]), as_json)


@app.command()
def revive(tenant: Tenant, data: Data = "./kv", as_json: Json = False) -> int:
    """Serve a purged tenant under the same keys again. The store's directory must not be in use.

    A purge records which keys are void, so that a mounted secret does not bring them back.
    """
    fingerprints = list(revive_tenant(Path(data), tenant))
    line = f"Tenant {tenant} may be served under {', '.join(fingerprints)} again"
    return print_result(Shown({"tenant": tenant, "fingerprints": fingerprints}, [line]), as_json)
