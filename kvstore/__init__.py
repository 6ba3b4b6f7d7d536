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

from typing import Any

from kvstore.config import Limits
from kvstore.errors import (
    BadInput,
    DirectoryInUse,
    KeysUnusable,
    LayoutMismatch,
    LeaseExpired,
    StoreClosed,
    StoreError,
    Unauthorized,
)
from kvstore.identity import ExtraKey
from kvstore.layout import KvGroup, Layout
from kvstore.miss import Account, HitTier, MissReason
from kvstore.node import EmbeddedStore, open_embedded
from kvstore.pages import Pages

__version__ = "0.1.0"
__all__ = [
    "Account",
    "BadInput",
    "DirectoryInUse",
    "EmbeddedStore",
    "ExtraKey",
    "HitTier",
    "KeysUnusable",
    "KvGroup",
    "Layout",
    "LayoutMismatch",
    "LeaseExpired",
    "Limits",
    "MissReason",
    "Pages",
    "StoreClosed",
    "StoreError",
    "Unauthorized",
    "open",
]


def open(url: str, **options: Any) -> EmbeddedStore:
    """Open a store.

    url: "embedded:DIRECTORY" for a store in this process; its keys are kept in DIRECTORY/keys. options: dram (size,
    e.g. "2GiB"), extent (size of the pieces that memory is shared out in), tenant (whose blocks these are), limits.
    Raises `BadInput`, `DirectoryInUse` or `KeysUnusable`, each with one line that says what to do.
    """
    scheme, _, rest = str(url).partition(":")
    if scheme != "embedded" or not rest:
        raise BadInput(f"{url!r} is not a store's address; allowed: embedded:DIRECTORY, e.g. embedded:./kv")
    from kvstore.codec import codec_named  # imports torch, which is none of a client's business

    return open_embedded(rest, codecs=codec_named, **options)
