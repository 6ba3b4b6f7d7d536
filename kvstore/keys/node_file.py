"""Which node a store is: 16 random bytes in `DIR/node`, for good, and on this host at most one store that has them.

A copy of a directory has the same ones. Two of them that run would take each other's place in a pool, so the second one
is told from the first as far as one host can: both bind the node's name, which the kernel gives once in each network
namespace and takes back with the process. A store that has it not is a clone, and says so.
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
    """The node of the directory with this file, which is made if it is missing, in a new run. Raises `KeysUnusable`."""
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
        """In a forked child: it is the parent's."""
        self.release()

    def release(self) -> None:
        """Release the name. Safe to call twice."""
        self._is_over = True
        if self._held is not None:
            self._held.close()
            self._held = None
