"""Runs a command as deploy/systemd/kvstore.service would, as far as that can be had without systemd as process 1.

    python restricted.py UNIT COMMAND ...

NoNewPrivileges, MemoryDenyWriteExecute, LimitMEMLOCK, LimitCORE, UMask and SystemCallFilter, taken from the unit. The
groups of system calls are systemd's own, as `systemd-analyze syscall-filter` prints them. What the unit takes away from
a group answers EPERM, as there; a call that it never allows kills, which a test sees. Status 77: something that this
takes is missing here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

MISSING = 77
_PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE = 38, 65
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def settings_of(unit: Path) -> list[tuple[str, str]]:
    """Key and value of every line, in order."""
    lines = [line.strip() for line in unit.read_text().splitlines()]
    return [(key, value) for key, _, value in (one.partition("=") for one in lines if one[:1] not in ("#", "[", ""))]


def filtered_calls(filters: list[str]) -> tuple[set[str], set[str]]:
    """What SystemCallFilter= lines allow, the first of which allows, and what they take away again."""
    groups: dict[str, list[str]] = {}
    listed = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        if line.startswith("@"):
            members = groups.setdefault(line.strip(), [])
        elif line.startswith("    ") and not line.strip().startswith("#"):
            members.append(line.strip())

    def members_of(names: str) -> set[str]:
        found: set[str] = set()
        for name in names.split():
            found |= members_of(" ".join(groups[name])) if name.startswith("@") else {name}
        return found

    allowed, denied = members_of("@default"), set()
    for one in filters:
        if one.startswith("~"):
            denied |= members_of(one[1:]) - members_of("@default")
        else:
            allowed |= members_of(one)
    return allowed - denied, denied


def _filter_calls(allowed: set[str], denied: set[str]) -> None:
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    context = library.seccomp_init(ctypes.c_uint32(_KILL))
    for action, names in ((_ALLOW, allowed), (_ERRNO | errno.EPERM, denied)):
        for name in names:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number >= 0:
                assert library.seccomp_rule_add(context, action, number, 0) == 0, name
    assert library.seccomp_load(context) == 0


def main(unit: str, *command: str) -> None:
    settings = settings_of(Path(unit))
    given = dict(settings)
    libc = ctypes.CDLL(None, use_errno=True)
    os.umask(int(given["UMask"], 8))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(given["LimitMEMLOCK"]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (int(given["LimitCORE"]),) * 2)
    assert given["NoNewPrivileges"] == given["MemoryDenyWriteExecute"] == "yes"
    try:
        calls = filtered_calls([value for key, value in settings if key == "SystemCallFilter"])
        ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        print(f"missing: {error}", file=sys.stderr)
        sys.exit(MISSING)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if libc.prctl(_PR_SET_MDWE, 1, 0, 0, 0) != 0:
        print("missing: PR_SET_MDWE, Linux 6.3", file=sys.stderr)
        sys.exit(MISSING)
    _filter_calls(*calls)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
