"""A disk of a few MiB, somebody else's file that fills it, and a limit on the size of files."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of that size, where one can be mounted."""
    mount = directory / "disk"
    mount.mkdir()
    options = f"size={size_bytes},mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "kvstore-test", str(mount)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here, so no disk can be filled: {made.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    path = disk / "somebody-elses.file"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 16, 1 << 12):
            try:
                while os.write(descriptor, bytes(size)) == size:
                    pass
            except OSError:
                continue
    finally:
        os.close(descriptor)
    return path


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """No file of this process may become larger meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
