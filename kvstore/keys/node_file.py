"""Which node a store is: 16 random bytes in `DIR/node`, kept for good, which one store at a time has on this host.

A copy of a directory has the same bytes, and two running copies would take each other's place in a pool. So a store
binds a socket name made of these bytes, which the kernel gives to one process in each network namespace and frees when
that process ends; it finds copies on this host only. A store that cannot have the name is a clone, and warns of it.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from pathlib import Path

from kvstore.block.errors import KeysUnusable
from kvstore.block.identity import INCARNATION_BYTES, NODE_BYTES, NodeIdentity
from tiering.failpoint import Reach, go_on
from tiering.files import Unfit, read_secret_file, write_secret_file

VERSION = 1
MOST_BYTES = 4096


def node_of(path: Path, reach: Reach = go_on) -> NodeIdentity:
    """The node that this file names, in a new run. The file is made if it is missing. Raises `KeysUnusable`."""
    mend = f"restore it, or remove {path} to have this directory be a new node"
    try:
        raw = read_secret_file(path, MOST_BYTES)
        if raw is None:
            node = secrets.token_bytes(NODE_BYTES)
            write_secret_file(path, json.dumps({"version": VERSION, "node": node.hex()}).encode() + b"\n", reach)
        else:
            given = json.loads(raw)
            node = bytes.fromhex(given["node"])
            if given["version"] != VERSION or len(node) != NODE_BYTES:
                raise ValueError("of another version or length")
    except PermissionError as error:
        raise KeysUnusable(f"{path} is open to others, or not to you ({error}); run: chmod 600 {path}") from None
    except OSError as error:
        why = error if isinstance(error, Unfit) else error.strerror
        raise KeysUnusable(f"{path} cannot be used as the id of a node: {why}; {mend}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KeysUnusable(f"{path} is damaged, and is no id of a node; {mend}") from None
    return NodeIdentity(node, secrets.token_bytes(INCARNATION_BYTES))


class NodeLock:
    """A node's name on this host, held for as long as this process lives and has it open."""

    def __init__(self, here: NodeIdentity) -> None:
        self._name = f"\0kvstore-node-{here.node.hex()}"
        self._held: socket.socket | None = None
        self._is_over = False
        self._taking = threading.Lock()
        self.is_clone()

    def is_clone(self) -> bool:
        """Whether another store has it. Takes it if it is free by now. Thread-safe."""
        with self._taking:
            if self._held is not None or self._is_over:
                return False
            try:
                mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            except OSError:  # no descriptors left, which says nothing
                return False
            try:
                mine.bind(self._name)
            except OSError:
                mine.close()
                return True
            self._held = mine
            return False

    def warnings(self) -> list[str]:
        """A warning if another store is this node too."""
        if not self.is_clone():
            return []
        node = self._name.rpartition("-")[2]
        return [
            f"another process of this host is node {node} already: this directory is a copy of that one's; end one of "
            "them, and remove the file node from this directory to have it be a node of its own"
        ]

    def close_after_fork(self) -> None:
        """Close it in a forked child: the name is the parent's."""
        self.release()

    def release(self) -> None:
        self._is_over = True
        if self._held is not None:
            self._held.close()
            self._held = None
