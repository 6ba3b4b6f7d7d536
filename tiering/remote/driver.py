"""The contract of a remote engine, and the names of frames in one.

**A value is a whole frame**: the header page and the payload, padded as in its slot. Frames are immutable: writing an
existing name succeeds and changes nothing. The engine is not trusted. The caller checks header and digests of every
frame that it reads, as of a peer's; it deletes one that is not what its name promises, so that the next write restores
it. An engine can lose bytes, never invent them.

**A name** is derived by `remote_key` from two salts, the stamp of the slot class, prefix key and part. It leaves out
the key and epoch that signed the header: nodes of a pool rotate at different times, and share their frames all the
same.

**Salts** (`salts.py`) are 16 random bytes, one per tenant and one per namespace, and are values in the engine too. A
drop replaces the namespace's salt, a purge the tenant's: all names change, and every frame is out of reach at once,
without a scan; on other nodes when they have read the salts again, a second later. The bytes themselves remain until
their TTL ends, or until the engine needs the room (Valkey: `maxmemory-policy`), and a client that can list the server's
keys can read them until then. A lost salt (FLUSHALL, eviction) costs only misses; a replica or a backup that brings an
old one back brings its frames back, too.

**Verbs block**, and are called in workers that can be abandoned (`workers.py`). `deadline` is monotonic seconds; an
engine that can obeys it by giving up its connection, and otherwise answers within its own limit. Slot and payload are
the engine's until the verb returns, and never after.

Differences of future engines: - Mooncake has no deadline, and after a time-out its transfer may still be writing. Its
driver therefore registers its
  own staging area, lends that to the library, and copies into the slot once the transfer succeeded: a slot is never
  lent beyond the verb. `put_from` of an existing name keeps the first bytes, as the contract demands.
- S3 cannot read into our memory: one copy, after the object's size was compared. A write is a conditional one
  (`mode="create"`), whose "exists" is success. It has no TTL: lifecycle rules of the bucket delete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import inf
from typing import Protocol, TypeAlias

from tiering.errors import TierError
from tiering.frame import KEY_BYTES, without_signer

SALT_BYTES = 16
PREFIX = b"kvf:"
"""All names begin with it, so that a server's access list can name them."""
PROBE_KEY = PREFIX + b"probe"
"""Never written: asking whether it exists probes the engine."""


class RemoteFault(TierError):
    """A call of a remote engine failed. The message is one line for people, without keys and content.

    reason: the miss reason. is_of_engine: whether it counts against the engine's health.
    """

    reason = "unreachable"
    is_of_engine = True


class RemoteUnreachable(RemoteFault):
    """It cannot be connected to, disconnected, or its breaker is open."""


class RemoteTimedOut(RemoteFault):
    """It did not answer by the deadline."""

    reason = "deadline"


class RemoteBusy(RemoteFault):
    """No worker was free by the deadline: the call never began."""

    reason = "busy"
    is_of_engine = False


class WrongSize(RemoteFault):
    """The value under this name has another size: no frame of ours. Nothing of it was read."""

    reason = "stale_hint"
    is_of_engine = False


Arrived: TypeAlias = Callable[[int], None]


def ignored(count: int) -> None:
    """An `Arrived` that does nothing."""


class RemoteEngine(Protocol):
    """Thread-safe. Every verb except `close` raises `RemoteFault`."""

    @property
    def name(self) -> str:
        """For people: its address, without credentials."""
        ...

    def exists(self, keys: Sequence[bytes], deadline: float = inf) -> list[bool]:
        """For each key, whether it exists."""
        ...

    def read(self, key: bytes, slot: memoryview, deadline: float = inf, arrived: Arrived = ignored) -> bool:
        """Fill the whole slot; returns False if the name does not exist. After anything else the slot's bytes are
        undefined. Raises `WrongSize` before a byte of the value is in the slot. arrived: called in this thread with the
        number of leading bytes that are there, as they come, and with all of them before True is returned."""
        ...

    def write(
        self, key: bytes, header: bytes | memoryview, payload: bytes | memoryview, ttl_ms: int, deadline: float = inf
    ) -> bool:
        """Write header and payload as one value; each may be empty. ttl_ms: 0 for none. True: it exists, by this write
        or an earlier one. False: the engine has no room now."""
        ...

    def delete(self, keys: Sequence[bytes], deadline: float = inf) -> int:
        """Delete; returns how many existed."""
        ...

    def close(self) -> None:
        """End calls in flight soon, with a fault. Idempotent."""
        ...


def remote_key(salt: bytes, stamp: bytes, prefix_key: bytes, part: int) -> bytes:
    """The name of one frame. salt: of `NamespaceSalts.of`. stamp: the packed one of this part's slot class. The prefix
    key stands in braces, so that a cluster keeps the parts of a block together."""
    assert len(prefix_key) == KEY_BYTES
    slot_class = blake2b(salt + without_signer(stamp), digest_size=16, person=b"kv-remote").hexdigest()
    return b"%bf:{%b}:%b:%d" % (PREFIX, prefix_key.hex().encode(), slot_class.encode(), part)


def salt_key(tenant: bytes, namespace: bytes = b"") -> bytes:
    """The name of the salt of a tenant's namespace, or of the tenant itself."""
    return b"%bs:{%b}:%b" % (PREFIX, tenant.hex().encode(), namespace.hex().encode())
