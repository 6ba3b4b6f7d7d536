"""A UNIX socket's path for a server that binds it itself: grpc would take over the path of a listening process, and
leave the file's mode to the umask."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Callable

from kvstore.block.errors import BadInput
from kvstore.config import MAX_SOCKET_BYTES

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
            self._remove_left()
        except OSError:
            os.close(self._lock)
            raise BadInput(f"unix:{path} is listened on by another process; give another --listen") from None
        except BaseException:
            os.close(self._lock)
            raise

    def bind(self, bind: Callable[[str], object]) -> None:
        """Bind it with its intended mode. No other thread may make files meanwhile."""
        before = os.umask(0o777 & ~MODE)
        try:
            bind(f"unix:{self.path}")
        finally:
            os.umask(before)
        os.chmod(self.path, MODE)

    def close(self) -> None:
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        os.close(self._lock)

    def _remove_left(self) -> None:
        """Remove the socket of a process that has ended. Raises `OSError` if a process listens there."""
        try:
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise BadInput(f"unix:{self.path} is there and no socket; give another path, or remove it")
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(1.0)
            try:
                asking.connect(self.path)
            except ConnectionRefusedError:
                os.unlink(self.path)
                return
        raise OSError("a process listens there")
