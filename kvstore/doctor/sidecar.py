"""A sidecar that runs: whether its sockets answer, which protocol they speak, what it warns of. Asks only."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from kvstore.block.errors import Rejected, StoreError, Unreachable
from kvstore.client.connection import stat_at
from kvstore.client.framing import FramedSocket, Silent, TimedOut
from kvstore.doctor.findings import Finding, lacks, note, ok, one_line, refused
from kvstore.protocol import messages as m
from kvstore.status.tree import SidecarStatus
from tiering.clock import SystemClock
from tiering.files import what_stands_at

CALL_SECONDS = 5.0
MOST_CLOCK_SECONDS = 2.0
MOST_WARNINGS = 20
NAME = "kvstore doctor"
_CREDENTIALS = struct.Struct("3i")


def engines_socket(check: str, path: str, is_needed: bool) -> Iterator[Finding]:
    """Check the socket that engines open. is_needed: the caller named it, so its absence is a fault."""
    absence = _absence(path)
    if absence:
        if is_needed:
            yield lacks(check, absence, "start the sidecar (kvstore serve), or give the path that its settings name")
        else:
            yield note(check, f"{absence}: no sidecar runs yet", "start it: kvstore serve")
        return
    try:
        wire = FramedSocket(path, NAME, b"", SystemClock(), CALL_SECONDS)
    except Rejected as error:
        yield refused(check, error)
        return
    except Silent as error:
        yield lacks(check, str(error), "the sidecar hangs, or has no time: see its log, and kvstore stat")
        return
    except Unreachable as error:
        yield lacks(check, str(error), "start the sidecar (kvstore serve): its socket was left by one that is gone")
        return
    try:
        version = wire.welcome.version
    finally:
        wire.close()
    if version < m.NEWEST_VERSION:
        text = f"{path} answers, and speaks version {version} of the protocol; this program speaks {m.NEWEST_VERSION}"
        yield note(check, text, "bring the sidecar to the version of its clients")
    else:
        yield ok(check, f"{path} answers, and speaks version {version} of the protocol")
    yield _owner(check, path)


def _absence(path: str) -> str:
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            return ""
    except FileNotFoundError:
        return f"{path} is not there"
    except OSError:  # whether one may enter its directory is told where it is called
        return ""
    return f"{path} is {what_stands_at(Path(path))}, and no socket"


def _owner(check: str, path: str) -> Finding:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(CALL_SECONDS)
        probe.connect(path)
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    if user == os.geteuid():
        return ok(check, f"process {pid} of this user listens at {path}")
    return note(
        check,
        f"process {pid} of user {user} listens at {path}, and this is user {os.geteuid()}",
        "see that this is the sidecar's user: who listens there is given what engines store",
    )


def status_of(path: str) -> SidecarStatus | None:
    """What a sidecar says of itself to its observers; None where it says nothing."""
    try:
        return stat_at(path, NAME, SystemClock(), CALL_SECONDS)
    except (StoreError, TimedOut, ValueError):
        return None


def state(path: str, told: SidecarStatus | None, now: float) -> Iterator[Finding]:
    """Findings from what the sidecar told its observers. path: of the observers' socket. now: Unix time, when it had
    told."""
    if told is None:
        if not _absence(path):
            yield note("sidecar", f"{path}, the observers' socket, tells nothing", "ask as a user of observe.users")
        return
    who = f"process {told.pid}, up {told.up_seconds:.0f} s"
    if told.state == "ready":
        yield ok("sidecar", f"{who}: ready")
    elif told.state == "degraded":
        yield lacks("sidecar", f"{who}: {told.health or told.state}", "mend what it names; kvstore stat says more")
    else:
        yield note("sidecar", f"{who}: {told.state}", "ask again in a moment")
    if told.policy_note:
        yield lacks("sidecar", f"it evicts by another policy: {told.policy_note}", "mend that, or set store.policy")
    for line in told.warnings[:MOST_WARNINGS]:
        text, _, remedy = one_line(line).partition(": ")
        yield lacks("sidecar", f"it warns: {text}", remedy or "kvstore stat says more")
    apart = abs(told.at - now)
    if apart > MOST_CLOCK_SECONDS:
        yield lacks("clock", f"the sidecar's clock is {apart:.1f} s from this one's", "run one time service for both")
    else:
        yield ok("clock", f"the sidecar's is {apart:.1f} s from this one's")
