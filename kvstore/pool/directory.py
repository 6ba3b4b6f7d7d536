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
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import ceil
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.block.account import HitTier, Holder
from kvstore.block.identity import INCARNATION_BYTES, NODE_BYTES, NodeIdentity

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


# Which nodes are alive, and whether this run may announce for its own ------------------------------------------------


MAX_NODES = 4096
FORGOTTEN_SECONDS = 1.5 * NODE_SECONDS
"""After this time, an entry that is not rewritten is gone."""


class AliveTable:
    """The other nodes. An entry is valid for `NODE_SECONDS` after it was seen, by this host's own clock: no other
    host's times are compared with it. Thread-safe."""

    def __init__(self, here: NodeIdentity) -> None:
        self._here = here.node
        self._lock = threading.Lock()
        self._seen: dict[bytes, tuple[NodeEntry, float]] = {}

    def saw(self, entries: Iterable[NodeEntry], now: float, seconds: float = NODE_SECONDS) -> None:
        """These were alive just now, and count as alive for that time; of one node the last entry counts. At most
        `MAX_NODES` are kept."""
        with self._lock:
            self._seen = {node: seen for node, seen in self._seen.items() if seen[1] > now}
            for entry in entries:
                if entry.node != self._here and (entry.node in self._seen or len(self._seen) < MAX_NODES):
                    self._seen[entry.node] = (entry, now + seconds)

    def gone(self, node: bytes) -> None:
        """It announced its end, or its entry is gone."""
        with self._lock:
            self._seen.pop(node, None)

    def alive(self, now: float) -> Mapping[bytes, NodeEntry]:
        with self._lock:
            return {node: entry for node, (entry, until) in self._seen.items() if until > now}


class ClaimState(StrEnum):
    """Whether this run may announce for its node. A node has one live incarnation; two of them mean a copied data
    directory. The second one stays silent: its entry would replace that of the first, whose hints would then lead to
    it.

    UNSURE   an entry of another run is there: of the run before, which soon expires, or of a clone
    OURS     no entry, or ours: it is written again and again
    CLONED   an entry of another run replaced ours, or does not go away
    """

    UNSURE = "unsure"
    OURS = "ours"
    CLONED = "cloned"


class NodeClaim:
    """Of this run. Not thread-safe: the thread that writes the entry looks first."""

    def __init__(self, here: NodeIdentity) -> None:
        self._incarnation = here.incarnation
        self._other: tuple[bytes, float] | None = None
        self.state = ClaimState.UNSURE

    def look(self, found: bytes | None, now: float) -> bool:
        """Returns whether our entry may be written; a clone's may, once the other run is gone. found: the incarnation
        in this node's entry now; None without one."""
        if found is None or found == self._incarnation:
            self._other, self.state = None, ClaimState.OURS
            return True
        if self._other is None or self._other[0] != found:
            self._other = (found, now)
        if self.state == ClaimState.OURS or now - self._other[1] > FORGOTTEN_SECONDS:
            self.state = ClaimState.CLONED
        return False


# What this node announces to the directory, and when -----------------------------------------------------------------


BATCH = 500
MAX_QUEUED = 1 << 14
MAX_HELD = 1 << 20
"""The most recent chunks, which are announced again: of 16 million blocks."""
AGAIN_SECONDS = 600.0
AGAIN_PER_SECOND = 2000.0
POOL_AGAIN_PER_SECOND = 100_000.0
"""Repeated announcements that a directory can take: of one node, and of all of a pool together."""
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class HintBatch:
    """For the directory, at most `BATCH` in all."""

    announce: list[tuple[bytes, HitTier]]
    withdraw: list[bytes]

    def __bool__(self) -> bool:
        return bool(self.announce or self.withdraw)


@dataclass(slots=True)
class _ToldChunk:
    tier: HitTier
    told_at: float
    told_in: int
    """How often the directory had been emptied by then."""


class Announcer:
    """Of one node. Thread-safe; one thread takes batches.

        stored    a chunk is committed       > announced in the next batch
        removed   it is about to be evicted  > withdrawn in the next batch, best effort: a node that still asks for it
                  gets the answer that it is gone
        again     after 10 minutes, and at once if the directory lost everything; at a bounded rate, so that a pool that
                  comes back does not flood it

    The queue of news is bounded: the oldest is dropped and counted. A chunk whose announcement was dropped or failed is
    announced with the repeats; a removal that was leaves a stale hint until it expires.
    """

    def __init__(self, most_queued: int = MAX_QUEUED) -> None:
        self._most_queued = most_queued
        self._lock = threading.Lock()
        self._queue: OrderedDict[bytes, HitTier | None] = OrderedDict()
        """News, the oldest first; None: removed."""
        self._held: OrderedDict[bytes, _ToldChunk] = OrderedDict()
        """What is here, least recently announced first."""
        self._emptied = 0
        self._allowance, self._allowed_at, self._rate = 0.0, _NEVER, AGAIN_PER_SECOND
        self.dropped = 0

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def stored(self, name: bytes, tier: HitTier) -> None:
        """The chunk's last block is committed, or in another tier now. name: by `hint_name`."""
        with self._lock:
            self._hold(name, tier)
            self._enqueue(name, tier)

    def kept(self, name: bytes, tier: HitTier) -> None:
        """A node that starts has it already: it is announced after all news, as a repeat."""
        with self._lock:
            self._queue.pop(name, None)
            self._hold(name, tier)

    def removed(self, name: bytes) -> None:
        """It is about to be evicted from its last tier here, or was. No effect for names that are not announced."""
        with self._lock:
            if self._held.pop(name, None) is not None:
                self._enqueue(name, None)

    def lost(self) -> None:
        """The directory was emptied: everything is announced again."""
        with self._lock:
            self._emptied += 1

    def shares(self, nodes: int) -> None:
        self._rate = min(AGAIN_PER_SECOND, POOL_AGAIN_PER_SECOND / max(1, nodes))

    def batch(self, now: float) -> HintBatch:
        """What to announce and withdraw now; empty if there is nothing. `told` or `failed` must follow."""
        with self._lock:
            announce: list[tuple[bytes, HitTier]] = []
            withdraw: list[bytes] = []
            while self._queue and len(announce) + len(withdraw) < BATCH:
                name, tier = self._queue.popitem(last=False)
                if tier is None:
                    withdraw.append(name)
                else:
                    announce.append((name, tier))
                    self._note(name, now)
            again = self._due(min(BATCH - len(announce) - len(withdraw), self._allowed(now)), now)
            self._allowance -= len(again)
            return HintBatch(announce + again, withdraw)

    def failed(self, batch: HintBatch) -> None:
        """The directory did not take it: announcements are repeated later, and removals precede others."""
        with self._lock:
            for name, tier in reversed(batch.announce):
                one = self._held.get(name)
                if one is not None and one.tier == tier:
                    self._hold(name, tier)
            for name in reversed(batch.withdraw):
                if name in self._held or name in self._queue:
                    continue  # it came back meanwhile
                if len(self._queue) < self._most_queued:
                    self._queue[name] = None
                    self._queue.move_to_end(name, last=False)
                else:
                    self.dropped += 1

    def _hold(self, name: bytes, tier: HitTier) -> None:
        self._held[name] = _ToldChunk(tier, _NEVER, self._emptied)
        self._held.move_to_end(name, last=False)
        if len(self._held) > MAX_HELD:
            self._queue.pop(self._held.popitem()[0], None)
            self.dropped += 1

    def _enqueue(self, name: bytes, tier: HitTier | None) -> None:
        self._queue.pop(name, None)
        self._queue[name] = tier
        if len(self._queue) > self._most_queued:
            oldest, was = self._queue.popitem(last=False)
            self.dropped += 1
            if was is not None:
                self._hold(oldest, was)

    def _note(self, name: bytes, now: float) -> None:
        one = self._held[name]
        one.told_at, one.told_in = now, self._emptied
        self._held.move_to_end(name)

    def _allowed(self, now: float) -> int:
        self._allowance = min(float(BATCH), self._allowance + self._rate * max(0.0, now - self._allowed_at))
        self._allowed_at = now
        return int(self._allowance)

    def _due(self, most: int, now: float) -> list[tuple[bytes, HitTier]]:
        due: list[tuple[bytes, HitTier]] = []
        while len(due) < most and self._held:
            name, one = next(iter(self._held.items()))
            if one.told_in == self._emptied and one.told_at > now - AGAIN_SECONDS:
                break
            due.append((name, one.tier))
            self._note(name, now)
        return due
