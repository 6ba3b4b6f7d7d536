"""The client of the sidecar: a store in another process on this host.

Several processes of one engine open it with the same session, whose token the first one makes. Must import without
torch, and quickly.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvstore.block.errors import BadInput
from kvstore.block.pages import Codec
from kvstore.client.handle import NamespaceHandle, OpenStore
from kvstore.client.socket_door import CallLimits, SocketDoor
from kvstore.config import MAX_SOCKET_BYTES
from kvstore.protocol import messages as m
from kvstore.protocol.messages import MAX_SESSION_BYTES, MIN_SESSION_BYTES
from tiering.clock import Clock


class SidecarStore(OpenStore):
    """A store in another process on this host."""

    def __init__(self, door: SocketDoor, codecs: Callable[[str], Codec], before_close: Callable[[], object]) -> None:
        """before_close: ends the codecs' work in the sidecar's memory."""
        super().__init__(codecs, before_close, door.requests)
        self._door = door

    def _door_for_handle(self) -> SocketDoor:
        return self._door

    def drop(self, namespace: NamespaceHandle) -> int:
        """Evict a namespace from every tier; returns how many blocks it had."""
        if not isinstance(namespace, NamespaceHandle) or namespace.door is not self._door:
            raise BadInput("give a namespace that this store opened; drop others where they are from")
        return self._door.call(m.Drop(namespace.number), m.Counted).blocks

    @property
    def session(self) -> str:
        """The token of this engine's session, as text, for `kvstore.open(session=...)` in its other processes."""
        return self._door.session.hex()

    def close(self) -> None:
        """Hang up, which ends its leases. Safe to call again."""
        self._before_close()
        self._door.close()

    @property
    def closed(self) -> bool:
        return self._door.closed


def open_sidecar(
    path: str,
    *,
    codecs: Callable[[str], Codec],
    clock: Clock,
    session: str,
    engine: str = "",
    before_close: Callable[[], object] = lambda: None,
) -> SidecarStore:
    """The store behind a socket. Connects only when a namespace is opened. Raises `BadInput`.

    session: the engine's own token as hexadecimal digits, drawn at random by its first process. before_close: ends the
    codecs' work in the sidecar's memory.
    """
    if "\0" in path:
        raise BadInput(f"unix:{path!r} is no socket's path; give a path without NUL")
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        raise BadInput(f"unix:{path} is longer than {MAX_SOCKET_BYTES} bytes; give a shorter path, or a relative one")
    try:
        token = bytes.fromhex(session)
    except (TypeError, ValueError):
        token = b""
    if not MIN_SESSION_BYTES <= len(token) <= MAX_SESSION_BYTES:
        raise BadInput(
            f"session= is not a session's token; give the `session` of another store of this engine, which is text, or "
            f"{2 * MIN_SESSION_BYTES} to {2 * MAX_SESSION_BYTES} random hexadecimal digits"
        )
    return SidecarStore(SocketDoor(path, engine, token, clock, CallLimits()), codecs, before_close)
