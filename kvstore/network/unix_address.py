"""A UNIX socket's path for a server that binds it itself: grpc would take over the path of a listening process, and
leave the file's mode to the umask."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from kvstore.block.errors import BadInput
from kvstore.config import MAX_SOCKET_BYTES
from tiering.files import Unfit, is_left_socket, remove_socket

MODE = 0o660


class UnixAddress:
    """Holds the path for this process, by a lock on a file beside it, which stays."""

    def __init__(self, path: str) -> None:
        """Raises `BadInput` if another process has it."""
        self.path = path
        if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
            raise BadInput(f"unix:{path} is longer than {MAX_SOCKET_BYTES} bytes; give a shorter path")
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._lock = os.open(f"{path}.lock", flags, 0o600)
        except OSError as error:
            raise BadInput(f"unix:{path} cannot be listened on: {error.strerror}; give another --listen") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_left_socket(Path(path)):
                os.unlink(path)
            elif os.path.lexists(path):
                raise BlockingIOError  # a process that knows no such lock
        except (OSError, Unfit) as error:
            os.close(self._lock)
            text = f"unix:{path} is listened on by another process; give another --listen"
            if isinstance(error, Unfit):
                text = f"unix:{path} is there and no socket; give another path, or remove it"
            raise BadInput(text) from None

    def bind(self, bind: Callable[[str], object]) -> None:
        """Bind it with its intended mode. No other thread may make files meanwhile."""
        before = os.umask(0o777 & ~MODE)
        try:
            bind(f"unix:{self.path}")
        finally:
            os.umask(before)
        os.chmod(self.path, MODE)

    def close(self) -> None:
        remove_socket(Path(self.path))
        os.close(self._lock)
