"""What a console is handed for its operator: what `kvstore drop`, `purge` and `warm` do, and the audit log's file."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.block.errors import BadInput
from kvstore.cli import ask
from kvstore.protocol.status import printable
from tiering.clock import Clock

SECONDS = 30.0
"""That a drop or a purge may take."""

MOST_BYTES = 4 << 20
"""Of a file. A full one becomes FILE.1, in place of the last one of that name."""
LAST_BYTES = 256 << 10
"""That are read again at the start."""


class AuditFile:
    """`AuditLines`. One thread at a time."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """Raises `BadInput` where it cannot be written."""
        self._path = path
        self._before = path.with_name(f"{path.name}.1")
        self._most_bytes = most_bytes
        try:
            os.close(self._open())
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; give another --audit-file (console.audit_file)") from None

    def append(self, line: bytes) -> None:
        """As `AuditLines.append`."""
        file = self._open()
        size = os.fstat(file).st_size
        if size and size + len(line) > self._most_bytes:
            os.close(file)
            os.replace(self._path, self._before)
            file, size = self._open(), 0
        try:
            is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # by a crash, or by hand
            written = b"\n" + line if is_torn else line
            if os.write(file, written) < len(written):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise
        finally:
            os.close(file)

    def last(self) -> Iterator[bytes]:
        """As `AuditLines.last`."""
        for path in (self._before, self._path):
            try:
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
                    yield from file.read(LAST_BYTES).splitlines()
            except OSError:
                pass

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a file")
        return file


@dataclass(frozen=True, slots=True)
class OperatorCommands:
    """`OperatorVerbs`. operator: the operator's socket; sockets: of tenants, by name."""

    operator: str
    sockets: Mapping[str, str]
    clock: Clock

    def drop(self, tenant: str, namespace: str) -> int:
        """As `OperatorVerbs.drop`."""
        return ask.drop(self.operator, self.clock, namespace, tenant, SECONDS)

    def purge(self, tenant: str) -> int:
        """As `OperatorVerbs.purge`."""
        return ask.purge(self.operator, self.clock, tenant, SECONDS)

    def warm(self, tenant: str, namespace: str, prompts: str) -> tuple[int, str]:
        """As `OperatorVerbs.warm`."""
        socket = self.sockets.get(tenant)
        if socket is None:
            raise BadInput(f"this console has no socket of tenant {printable(tenant)!r}; give --tenant-socket")
        read = ask.read_prompts("prompts", prompts.splitlines())
        one = ask.warm(socket, self.clock, namespace, "prompts", read, lambda *_: None)
        not_there = Counter(one.left) + Counter(one.absent)
        others = ", ".join(f"{blocks:,} {name.replace('_', ' ')}" for name, blocks in sorted(not_there.items()))
        text = f"{one.prompts:,} prompts, {one.asked:,} blocks: {one.warm:,} were in dram, {one.promoted:,} are now"
        return one.warm + one.promoted, f"{text}; the others: {others}" if others else text
