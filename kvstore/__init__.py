"""A tiered, verified store of KV-cache blocks for inference engines.

    store = kvstore.open("embedded:./kv", dram="2GiB")
    ns = store.namespace(model=fingerprint, layout=kvstore.Layout.gqa(...))
    match = ns.match(token_ids)
    with ns.lease(match) as lease:
        loaded = ns.get(lease, into=pages)
    ns.put(token_ids, pages)

Importing this module needs neither torch nor a GPU; opening a store in this process does need torch.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and __file__ != f"{sys.path[0]}/kvstore/__init__.py":
    # `python -m kvstore` without -P: no file in the working directory may be imported in place of a package.
    del sys.path[0]

import logging
import secrets
import threading
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if _foreign := [
    f"{found.name} is found at {found.origin}"
    for found in map(find_spec, ("tiering", "engine_adapter", "kv_kernels"))
    if found is not None and not str(found.origin).startswith(__file__.removesuffix("kvstore/__init__.py"))
]:  # these names are common ones: a project's folder, or another distribution, may have them too
    raise ImportError(
        f"kvstore: of its own packages {', '.join(_foreign)}, which is not kvstore's; rename that one, take it off the "
        "path, or uninstall it"
    )

from msgspec.structs import asdict

from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.errors import (
    BadInput,
    DirectoryInUse,
    KeysUnusable,
    LayoutMismatch,
    LeaseExpired,
    StoreClosed,
    StoreError,
    Unreachable,
)
from kvstore.block.identity import ExtraKey, Prompt
from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.block.pages import Codec, GroupPages, Pages
from kvstore.client.sidecar_store import SidecarStore, open_sidecar
from kvstore.config import (
    DEFAULT_DRAM,
    DEFAULT_POLICY,
    DEFAULT_SCRUB,
    DEFAULT_TENANT,
    DEFAULT_WRITES,
    REMOVED_POLICY,
    Limits,
    Size,
    StoreOptions,
    TierOptions,
    checked_policy,
    expanded,
)
from kvstore.protocol.messages import MIN_SESSION_BYTES
from tiering.clock import SystemClock
from tiering.policies.lru import LeafFirstLru
from tiering.policies.shares import Share

if TYPE_CHECKING:
    from kv_kernels.device_copy import DeviceTransfers
    from kvstore.block.codec import Codecs
    from kvstore.node import EmbeddedStore
    from tiering.policies.policy import PolicyMaker

__version__ = "0.1.0"
__all__ = [
    "Account",
    "Attention",
    "BadInput",
    "DirectoryInUse",
    "EmbeddedStore",
    "ExtraKey",
    "GroupPages",
    "HitTier",
    "KeysUnusable",
    "KvGroup",
    "Layout",
    "LayoutMismatch",
    "LeaseExpired",
    "Limits",
    "MissReason",
    "Pages",
    "Prompt",
    "Share",
    "SidecarStore",
    "StoreClosed",
    "StoreError",
    "Unreachable",
    "embedded",
    "open",
]

_log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """`EmbeddedStore`, which a client of a sidecar need not load."""
    if name != "EmbeddedStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.node import EmbeddedStore

    return EmbeddedStore


def open(
    url: str,
    *,
    dram: Size = DEFAULT_DRAM,
    nvme: Size | None = None,
    slab: Size | None = None,
    extent: Size | None = None,
    tenant: str = DEFAULT_TENANT,
    limits: Limits | None = None,
    scrub: Size = DEFAULT_SCRUB,
    policy: str = DEFAULT_POLICY,
    nvme_writes: str | float = DEFAULT_WRITES,
    shares: Mapping[str, Share] | None = None,
    engine: str = "",
    session: str | None = None,
) -> EmbeddedStore | SidecarStore:
    """Open a store.

    url: "unix:PATH" for the sidecar behind that socket, "embedded:DIRECTORY" for a store in this process; its keys are
    kept in DIRECTORY/keys. engine: name and version of the client, which a sidecar shows. session: for a sidecar, the
    `session` of the store that another process of the same engine opened: leases can be handed between such processes.
    All other options are those of a store in this process, which a sidecar was given when it was started. dram: the
    memory budget, as a size ("2GiB"). nvme: the budget on disk, in DIRECTORY/nvme; without it blocks live in memory
    only. slab, extent: size of the pieces that disk and memory are shared out in, chosen from the budgets if not given.
    tenant: whose blocks these are. limits: the store's named upper bounds. scrub: bytes per second at which what is on
    disk is read and verified again in the background, once a day; "off" for never. policy: which blocks go first when
    DRAM is full: "lru" or "adaptive" (LRU, and what it learns where that finds more). nvme_writes: what of
    that is written to disk: "all", "learned" (what is likely to come back), or a number for no more of that than so
    many times the size of `nvme` a day; what a put asks to keep is written whatever it says. shares: what single
    tenants have of each tier, by name; if not given, the worst block goes first, whichever tenant's. Raises `BadInput`,
    `DirectoryInUse` or `KeysUnusable`, each with one line that says what to do.
    """
    scheme, _, rest = str(url).partition(":")
    if scheme not in ("embedded", "unix") or not rest:
        raise BadInput(
            f"{url!r} is not a store's address; allowed: unix:PATH of a sidecar's socket, e.g. "
            "unix:/run/kvstore/kvstore.sock, or embedded:DIRECTORY, e.g. embedded:./kv"
        )
    given: dict[str, Any] = {"dram": dram, "nvme": nvme, "slab": slab, "extent": extent, "tenant": tenant}
    given |= {"limits": limits, "scrub": scrub, "policy": policy, "nvme_writes": nvme_writes, "shares": shares}
    rest = expanded(rest, scheme)
    if scheme == "unix":
        usual = {"tenant": DEFAULT_TENANT} | asdict(TierOptions())
        for name, value in given.items():
            if value != usual.get(name):
                raise BadInput(f"{name}={value!r} is the sidecar's to know; give it to kvstore serve, and not to open")
        token = secrets.token_hex(MIN_SESSION_BYTES) if session is None else session
        codecs = _Codecs()
        return open_sidecar(
            rest, codecs=codecs, clock=SystemClock(), session=token, engine=engine, before_close=codecs.close
        )
    if session is not None:
        raise BadInput(
            "session= is for processes that share a sidecar, unix:PATH; leave it out for a store in this one"
        )
    return embedded(rest, **given)


def embedded(
    directory: str,
    *,
    dram: Size = DEFAULT_DRAM,
    nvme: Size | None = None,
    slab: Size | None = None,
    extent: Size | None = None,
    tenant: str = DEFAULT_TENANT,
    limits: Limits | None = None,
    scrub: Size = DEFAULT_SCRUB,
    policy: str = DEFAULT_POLICY,
    nvme_writes: str | float = DEFAULT_WRITES,
    shares: Mapping[str, Share] | None = None,
) -> EmbeddedStore:
    """Open a store in this process: `open("embedded:DIRECTORY", ...)` with its exact type."""
    from kvstore.node import StoreParts, open_embedded  # a client of a sidecar has no store in its process

    options = StoreOptions(
        TierOptions(dram, nvme, extent, slab, scrub, policy, nvme_writes),
        tenant,
        limits if limits is not None else Limits(),
        shares if shares is not None else {},
    )
    indexes = None
    if nvme is not None:
        try:
            from tiering.nvme.lmdb_index import LmdbMaker  # so that lmdb is needed only where there is a disk
        except ImportError:
            raise BadInput("nvme= needs the package lmdb; run: pip install 'prefix-kvstore[server]'") from None
        indexes = LmdbMaker
    codecs = _Codecs()
    try:
        maker = policy_named(policy)
    except BadInput as error:
        if policy != REMOVED_POLICY:  # which needed no package
            raise
        _log.warning("blocks go by %s instead: %s", DEFAULT_POLICY, error)
        maker = LeafFirstLru
    parts = StoreParts(codecs, maker, indexes, before_close=codecs.close)
    return open_embedded(expanded(directory, "directory"), options, parts)


class _Codecs:
    """Codecs by their names. Torch is imported when the first one is asked for, which is when a namespace is opened: a
    program that inspects a sidecar, or wraps a store in a service, needs no torch."""

    def __init__(self) -> None:
        self._loaded: Codecs | None = None
        self._lock = threading.Lock()

    def __call__(self, name: str) -> Codec:
        """The codec. Raises `BadInput`."""
        with self._lock:
            if self._loaded is None:
                try:
                    from kvstore.block.codec import Codecs
                except ModuleNotFoundError as error:
                    if error.name != "torch":
                        raise
                    raise BadInput(
                        "a namespace's pages are tensors of torch, which is not installed; run: "
                        "pip install 'prefix-kvstore[hf]'"
                    ) from None
                self._loaded = Codecs(_open_gpu)
            loaded = self._loaded
        return loaded(name)

    def close(self) -> None:
        """End their work on GPUs."""
        if self._loaded is not None:
            self._loaded.close()


def policy_named(name: str, thinned: float = 1.0) -> PolicyMaker:
    """The maker of an eviction policy. thinned: the share of all blocks that it is told of, if a tier is modelled by a
    part of its blocks. Raises `BadInput`, also if a package that it needs is missing."""
    given, name = name, checked_policy(name, "policy")
    if given != name:
        _log.warning("policy %r was removed and is %r now; name that, or lru", given, name)
    if name == DEFAULT_POLICY:
        return LeafFirstLru
    try:
        # Imports numba: half a second, and vLLM on a CPU must not find it imported.
        from tiering.policies.adaptive import Adaptive
        from tiering.policies.adaptive_loops import NotCompiled, is_usable, prepare
    except ImportError:
        remedy = "run: pip install 'prefix-kvstore[adaptive]', or take lru"
        raise BadInput(f"policy={name!r} needs the package numba; {remedy}") from None
    except OSError as error:  # llvmlite asks whether it may, when it is imported
        reason = (error.strerror or str(error)).split(". ")[0]
        raise BadInput(
            f"policy={name!r} may not be compiled here ({reason}); set MemoryDenyWriteExecute=no, or take lru"
        ) from None
    if not is_usable():
        raise BadInput(f"policy={name!r} is compiled by numba, which NUMBA_DISABLE_JIT forbids; unset it, or take lru")
    try:
        prepare()
    except NotCompiled as error:
        raise BadInput(f"policy={name!r} is compiled by numba, which fails here ({error}); take lru") from None
    return Adaptive if thinned == 1 else partial(Adaptive, thinned=thinned)


def _open_gpu(index: int) -> DeviceTransfers | None:
    """The route between pages on a GPU and host memory, made when such pages are first seen."""
    try:
        from kv_kernels.gpu import on_cuda
    except ImportError:  # there is no triton
        return None
    return on_cuda(index)
