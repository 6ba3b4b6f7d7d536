"""A sidecar where the kernel refuses shared memory says so, and does not start."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from programs import PATHS

MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}

WITHOUT_MEMFD = """
import ctypes, errno, os, struct, sys

def step(code, on_true, on_false, value):
    return struct.pack("HBBI", code, on_true, on_false, value)

program = b"".join([
    step(0x20, 0, 0, 0),  # load the number of the call
    step(0x15, 0, 1, int(sys.argv[1])),
    step(0x06, 0, 0, 0x00050000 | errno.EPERM),
    step(0x06, 0, 0, 0x7FFF0000),  # all others are allowed
])
steps = ctypes.create_string_buffer(program, len(program))
filter = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(steps))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.create_string_buffer(filter, len(filter)), 0, 0):
    sys.exit(77)
os.execv(sys.executable, [sys.executable, "-m", "kvstore", "serve", *sys.argv[2:]])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in MEMFD_CREATE, reason="the number of the call is not known here")
@pytest.mark.parametrize("flags", [[], ["--config", "config.toml"]])
def test_without_shared_memory_it_does_not_start(tmp_path: Path, flags: list[str]) -> None:
    """With a keeper, and without one."""
    (tmp_path / "config.toml").write_text("[store]\nkeeper = false\n")
    arguments = [str(MEMFD_CREATE[platform.machine()]), "--data", "kv", "--dram", "16MiB", "--nvme", "off", *flags]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMFD, *arguments],
        cwd=tmp_path,
        env={**os.environ, **PATHS},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 77:
        pytest.skip("this kernel takes no filter of system calls")
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert "memfd_create" in line and "seccomp" in line
    assert not done.stdout
