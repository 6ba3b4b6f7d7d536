"""The contract of a pool's directory, and its content: nodes, and hints which of them has a chunk of a prompt.

A *chunk* is 16 blocks in a row, from the first block of a prompt on. Its *head* is the prefix key of its last block,
and its hint's name a hash of that and the namespace:

    blocks of a prompt     1 .. 16   17 .. 32   33 .. 40
    hints                      16         32     none: the tail is shorter than a chunk

A prefix key names every token before it, and a node keeps prefixes whole, so a node with a hint for block 32 should
have all of 1 .. 32; a request to it includes the tail as well, as it may have that too. A prompt of less than 16 blocks
has no hint: for these, only the nodes of `network.peers` are asked.

    kv:h:<name>   node > incarnation (8 bytes), tier (1), and its end, if fields have no time to live of their own
    kv:n:<node>   a `NodeEntry` in JSON
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.block.account import HitTier, Holder
from kvstore.block.identity import INCARNATION_BYTES, NODE_BYTES

CHUNK_BLOCKS = 16
HINT_BYTES = 16
MAX_HEADS = 1024
"""In one look-up: of 16,384 blocks. Further blocks of a prompt are not looked up."""
MAX_HOLDERS = 64
"""That are read, of one chunk."""
MAX_ENTRY_BYTES = 8192
MAX_FINGERPRINTS = 256
"""Of one node, which is not asked for blocks of further tenants."""
NODE_SECONDS = 5.0
"""A node without a sign of life for this long is gone."""
HINT_SECONDS = 15 * 60.0
_PERSON = b"kv-hint-v1"
_TIERS = {HitTier.DRAM: b"\1", HitTier.NVME: b"\2"}
_TIER_OF = {said: tier for tier, said in _TIERS.items()}
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,64}\]|[0-9A-Za-z_][0-9A-Za-z_.-]{0,252}):[0-9]{1,5}", re.ASCII)
"""HOST:PORT. An entry in the directory may be forged: it names no scheme, path or user."""
_SAID_BYTES = INCARNATION_BYTES + 1
_STAMP_BYTES = 8

_Id = Annotated[bytes, Meta(min_length=NODE_BYTES, max_length=NODE_BYTES)]
_Run = Annotated[bytes, Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)]
_Word = Annotated[str, Meta(max_length=32)]


class DirectoryDown(Exception):
    """The directory does not answer, or not in time; the text says why, for people."""


class NodeEntry(msgspec.Struct, frozen=True):
    """A node of the pool. node: permanent; incarnation: of this run. address: HOST:PORT of its gRPC server, to connect
    to, not to trust. fingerprints: of the tenants' keys that it has. versions: of the protocol between nodes.
    transports: for bytes of blocks, the best first."""

    node: _Id
    incarnation: _Run
    address: Annotated[str, Meta(max_length=300)]
    fingerprints: Annotated[tuple[Annotated[bytes, Meta(max_length=16)], ...], Meta(max_length=MAX_FINGERPRINTS)] = ()
    versions: Annotated[tuple[int, ...], Meta(max_length=16)] = ()
    transports: Annotated[tuple[_Word, ...], Meta(max_length=8)] = ()


def is_head(index: int) -> bool:
    """Whether the block of that index in its prompt, from 0 on, is the last one of a chunk."""
    return index % CHUNK_BLOCKS == CHUNK_BLOCKS - 1


def hint_name(namespace: bytes, key: bytes) -> bytes:
    """The name of the hint for the chunk whose last block has that prefix key. namespace: its digest. It reveals
    nothing of tokens, and cannot be computed without the tenant's identity key."""
    return blake2b(key, key=namespace, digest_size=HINT_BYTES, person=_PERSON).digest()


def chunk_heads(namespace: bytes, keys: Sequence[bytes], first: int = 0) -> list[tuple[int, bytes]]:
    """The chunks of a prompt behind its `first` blocks, which are here: the number of blocks up to the end of each, and
    its hint's name. keys: of all blocks. At most `MAX_HEADS`."""
    begin = first - first % CHUNK_BLOCKS + CHUNK_BLOCKS
    end = min(len(keys) + 1, begin + MAX_HEADS * CHUNK_BLOCKS)
    return [(blocks, hint_name(namespace, keys[blocks - 1])) for blocks in range(begin, end, CHUNK_BLOCKS)]


def leading_places(heads: Sequence[tuple[int, bytes]], most: int) -> list[tuple[int, bytes]]:
    """At most so many of a prompt's chunks to look up, the last among them: a hint stands for all chunks before it.
    Each is further from the beginning by about the same factor, so of a node with a part of the prompt, long or short,
    about the same share goes unseen."""
    end, at, places = len(heads), 0, list[tuple[int, bytes]]()
    for left in range(most, 0, -1):
        if at == end:
            break
        at = max(at + 1, ceil(at * (end / max(1, at)) ** (1 / left) - 1e-9))
        places.append(heads[at - 1])
    return places


def hint_value(incarnation: bytes, tier: HitTier, until_ms: int | None = None) -> bytes:
    """A node's hint of a chunk. until_ms: by the directory's clock, if fields do not expire there by themselves."""
    value = incarnation + _TIERS[tier]
    return value if until_ms is None else value + until_ms.to_bytes(_STAMP_BYTES, "big")


def read_hint(value: object, now_ms: int | None) -> tuple[bytes, HitTier] | None:
    """Incarnation and tier; None for a malformed or expired hint. now_ms: by the directory's clock, None if unknown: a
    hint with a stamp is then ignored."""
    if not isinstance(value, bytes) or len(value) not in (_SAID_BYTES, _SAID_BYTES + _STAMP_BYTES):
        return None
    if len(value) > _SAID_BYTES:
        left_ms = None if now_ms is None else int.from_bytes(value[_SAID_BYTES:], "big") - now_ms
        if left_ms is None or not 0 < left_ms <= 1e3 * HINT_SECONDS:
            return None
    tier = _TIER_OF.get(value[INCARNATION_BYTES:_SAID_BYTES])
    return None if tier is None else (value[:INCARNATION_BYTES], tier)


def leading_holders(
    heads: Sequence[tuple[int, bytes]],
    said: Iterable[Mapping[bytes, bytes]],
    alive: Mapping[bytes, NodeEntry],
    now_ms: int | None = None,
) -> list[Holder]:
    """The nodes that have leading chunks without a gap, most blocks first. said: the nodes' hints of each chunk, in the
    order of `heads`. alive: hints of other nodes, or of an earlier run of one of these, are ignored."""
    best: dict[bytes, tuple[int, HitTier]] = {}
    going: dict[bytes, tuple[int, HitTier]] = {}
    known: dict[bytes, tuple[bytes, HitTier] | None] = {}
    for at, ((blocks, _), values) in enumerate(zip(heads, said, strict=False)):
        going_on = {}
        for node, value in values.items():
            if value not in known:  # a node's hints of most chunks are equal
                known[value] = read_hint(value, now_ms)
            entry, hint = alive.get(node), known[value]
            if entry is None or hint is None or hint[0] != entry.incarnation or (at and node not in going):
                continue
            is_slow = at and going[node][1] == HitTier.NVME
            going_on[node] = (blocks, HitTier.NVME if is_slow else hint[1])
        if not going_on:
            break
        going = going_on
        best |= going
    found = [Holder(node, alive[node].incarnation, *of) for node, of in best.items()]
    return sorted(found, key=lambda one: (-one.blocks, one.node))


def entry_bytes(entry: NodeEntry) -> bytes:
    return msgspec.json.encode(entry)


def read_entry(node: bytes, value: object) -> NodeEntry | None:
    """That node's entry; None for a malformed one."""
    if not isinstance(value, bytes) or len(value) > MAX_ENTRY_BYTES:
        return None
    try:
        entry = msgspec.json.decode(value, type=NodeEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return entry if entry.node == node and _ADDRESS.fullmatch(entry.address) else None
