"""The sidecar's end of the socket to its supervisor (*keeper*): which memory was kept, and which to keep.

Its own thread sends, in order, so that a thread that holds a lock never waits for the supervisor. If the supervisor
ends, so does the sidecar: otherwise the next one would find the directory in use.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvstore.service.keeper import ALL, DESCRIPTORS, FORGET, KEEP, READY
from tiering.dram.keeping import NAME_BYTES, KeptExtent

_PR_SET_PDEATHSIG = 1
RECEIVE_SECONDS = FREEZE_SECONDS = 10.0


class KeeperWire:
    """`tiering.dram.keeping.MemoryKeeper` over a socket. Thread-safe."""

    def __init__(self, descriptor: int, new_token: Callable[[int], bytes]) -> None:
        """Takes the descriptor over. new_token: returns that many random bytes."""
        _end_with_parent(True)  # until the thread watches it: a slow start must not outlive the supervisor
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(RECEIVE_SECONDS)
        os.set_inheritable(descriptor, False)
        self._new_token = new_token
        self._lock = threading.Lock()
        self._frozen = False
        self._queue: SimpleQueue[tuple[bytes, list[int]] | threading.Event] = SimpleQueue()
        self._is_sending = False

    def receive(self) -> list[KeptExtent]:
        """The memory that an earlier process left, once. Raises `OSError` if the supervisor does not answer."""
        kept = []
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._socket, 64, DESCRIPTORS)
            if message[:1] == KEEP and len(descriptors) == DESCRIPTORS:
                for one in descriptors:
                    os.set_inheritable(one, False)
                kept.append(KeptExtent(message[1:], *descriptors))
                continue
            for one in descriptors:
                os.close(one)
            if not message:
                raise ConnectionResetError("the keeper is gone")
            if message[:1] == ALL:
                return kept

    def start(self, gone: Callable[[], None]) -> None:
        """Start sending, and watch the supervisor. gone: called when it ends."""
        self._socket.settimeout(None)
        self._is_sending = True
        threading.Thread(target=self._send_all, name="kv-keep", daemon=True).start()
        threading.Thread(target=self._watch, args=(gone,), name="kv-keeper", daemon=True).start()
        _end_with_parent(False)

    # The contract --------------------------------------------------------------------------------------------------

    def new_name(self) -> bytes:
        return self._new_token(NAME_BYTES)

    def keep(self, name: bytes, extent: int, ledger: int) -> None:
        copies: list[int] = []
        try:
            for one in (extent, ledger):
                copies.append(os.dup(one))
        except OSError:  # no descriptors left: this extent is not kept
            for one in copies:
                os.close(one)
            return
        self._put(KEEP + name, copies)

    def forget(self, name: bytes) -> None:
        self._put(FORGET + name, [])

    # Beyond it -----------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """The sidecar has started."""
        self._put(READY, [])

    def freeze(self) -> None:
        """Make the supervisor hold what it holds now, whatever this process does later: the next process starts from
        there.

        On return the supervisor has read everything, or does not read.
        """
        told = threading.Event()
        with self._lock:
            self._frozen = True
            self._queue.put(told)
        if self._is_sending:
            told.wait(FREEZE_SECONDS)

    def _put(self, message: bytes, descriptors: list[int]) -> None:
        with self._lock:
            if not self._frozen:
                self._queue.put((message, descriptors))
                return
        for one in descriptors:
            os.close(one)

    def _send_all(self) -> None:
        while True:
            asked = self._queue.get()
            if isinstance(asked, threading.Event):
                asked.set()
                continue
            message, descriptors = asked
            try:
                socket.send_fds(self._socket, [message], descriptors)
            except OSError:  # the supervisor is gone, and this process is about to end
                pass
            for one in descriptors:
                os.close(one)

    def _watch(self, gone: Callable[[], None]) -> None:
        try:
            while self._socket.recv(64):
                pass
        except OSError:
            pass
        gone()


def _end_with_parent(does: bool) -> None:
    """Set whether the kernel kills this process as soon as its parent, the supervisor, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if does else 0)
