"""The contract of a remote engine, and the names under which frames lie in one.

**A value is a whole frame**: the header page and the payload, padded as in its slot. Frames are immutable: a write of a
name that is there is a success and changes nothing. The engine is trusted with nothing. The caller checks header and
digests of every frame that it reads, as of a peer's; it deletes one that is not what its name promises, so that the
next write puts it back. An engine can lose bytes, never invent them.

**A name** is derived by `remote_key` from two salts, the stamp of the slot class, prefix key and part. Not from the
key and epoch that signed the header: nodes of a pool rotate at different times, and share their frames all the same.

**Salts** (`salts.py`) are 16 random bytes, one of the tenant and one of each of its namespaces, and lie in the engine
as values do. A drop replaces the namespace's salt, a purge the tenant's: from then on all names are others, and every
frame is out of reach at once, without a scan; on other nodes when they have read the salts again, a second later. The
bytes themselves remain until their TTL is over, or until the engine needs the room (Valkey: `maxmemory-policy`), and
who can list the server's keys can read them until then. A salt that is lost (FLUSHALL, eviction) costs misses alone; a
replica or a backup that brings an old one back brings its frames back, too.

**Verbs block**, and are called in workers that can be abandoned (`workers.py`). `deadline` is monotonic seconds; an
engine that can obeys it, by giving up its connection, and answers within a limit of its own where there is none. Slot
and payload are the engine's until the verb returns, and after that never.

Where the next engines differ:
- Mooncake has no deadline, and after a time-out its transfer may still be writing. Its driver therefore registers a
  staging area of its own, lends that to the library, and copies into the slot once the transfer succeeded: a slot is
  never lent beyond the verb. `put_from` of a name that is there keeps the first bytes, as the contract has it.
- S3 has no read into memory of ours: one copy, after the object's size was compared. A write is a conditional one
  (`mode="create"`), "exists" its success. It knows no TTL: lifecycle rules of the bucket delete.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import inf
from typing import Protocol

from tiering.errors import TierError
from tiering.frame import KEY_BYTES, without_signer

SALT_BYTES = 16
PREFIX = b"kvf:"
"""All names begin with it, so that a server's access list can be told."""
PROBE_KEY = PREFIX + b"probe"
"""Is never written: whether it exists asks whether the engine answers."""


class RemoteFault(TierError):
    """A call of a remote engine failed. The message is one line for people, without keys and content.

    reason: the word of the miss. is_of_engine: whether it says something of the engine's health.
    """

    reason = "unreachable"
    is_of_engine = True


class RemoteUnreachable(RemoteFault):
    """It cannot be connected to, hung up, or its breaker is open."""


class RemoteTimedOut(RemoteFault):
    """It did not answer by the deadline."""

    reason = "deadline"


class RemoteBusy(RemoteFault):
    """No worker was free by the deadline: the call never began."""

    reason = "busy"
    is_of_engine = False


class WrongSize(RemoteFault):
    """A value of another size lies under this name: no frame of ours. Nothing of it was read."""

    reason = "stale_hint"
    is_of_engine = False


class RemoteEngine(Protocol):
    """Thread-safe. Every verb but `close` raises `RemoteFault`."""

    @property
    def name(self) -> str:
        """For people: where it is, without credentials."""
        ...

    def exists(self, keys: Sequence[bytes], deadline: float = inf) -> list[bool]:
        """For each, whether it is there now."""
        ...

    def read(self, key: bytes, slot: memoryview, deadline: float = inf) -> bool:
        """Whether it is there: then the whole slot is filled. After anything else the slot's bytes are undefined.
        Raises `WrongSize` before a byte of the value is in the slot."""
        ...

    def write(
        self, key: bytes, header: bytes | memoryview, payload: bytes | memoryview, ttl_ms: int, deadline: float = inf
    ) -> bool:
        """header and payload are one value, each may be empty. ttl_ms: 0 for none. True: it is there, by this write or
        an earlier one. False: the engine has no room now."""
        ...

    def delete(self, keys: Sequence[bytes], deadline: float = inf) -> int:
        """How many of them were there."""
        ...

    def close(self) -> None:
        """Calls under way end soon, with a fault. Twice is once."""
        ...


def remote_key(salt: bytes, stamp: bytes, prefix_key: bytes, part: int) -> bytes:
    """The name of one frame. salt: of `NamespaceSalts.of`. stamp: the packed one of this part's slot class. The prefix
    key stands in braces, so that a cluster keeps the parts of a block together."""
    assert len(prefix_key) == KEY_BYTES
    slot_class = blake2b(salt + without_signer(stamp), digest_size=16, person=b"kv-remote").hexdigest()
    return b"%bf:{%b}:%b:%d" % (PREFIX, prefix_key.hex().encode(), slot_class.encode(), part)


def salt_key(tenant: bytes, namespace: bytes = b"") -> bytes:
    """Where the salt of a tenant's namespace lies, or that of the tenant itself."""
    return b"%bs:{%b}:%b" % (PREFIX, tenant.hex().encode(), namespace.hex().encode())
