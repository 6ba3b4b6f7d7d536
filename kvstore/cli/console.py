"""`kvstore console`: serves the dashboard and its API, beside a running sidecar."""

import errno
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import kvstore
from kvstore.block.errors import BadInput
from kvstore.cli import ask
from kvstore.cli.operate import Data, ObserveSocket
from kvstore.cli.terminal import OK, Checks, Json, app, option, path_option, say_started, typer, url_of
from kvstore.config import AUDIT_FILE, DEFAULT_TENANT
from kvstore.protocol.words import printable
from tiering.clock import Clock

LISTEN = "127.0.0.1:9798"
_MOST_TOKEN_BYTES = 1 << 20


@app.command()
def console(
    data: Data = "./kv",
    socket: ObserveSocket = None,
    listen: Annotated[str, option("HOST:PORT", "Where pages are served; port 0 is any free one.")] = LISTEN,
    token_file: Annotated[
        str | None,
        path_option(
            "FILE",
            "Who gives its first line may read all; a further line NAME TOKEN is for a tenant, which sees itself "
            "alone. Needed where other hosts can come in.",
        ),
    ] = None,
    operator: Annotated[
        str | None,
        path_option(
            "PATH", "The operator's socket: who has the first token may drop, purge and warm then. Needs --token-file."
        ),
    ] = None,
    audit_file: Annotated[
        str | None, path_option("FILE", f"Where it is written down what an operator did.  [default: DIR/{AUDIT_FILE}]")
    ] = None,
    tenant_socket: Annotated[
        list[str] | None,
        option(
            "NAME=PATH",
            "A tenant whose prefixes may be warmed, and its socket; as often as there are tenants.  "
            "[default: default=DIR/kvstore.sock]",
        ),
    ] = None,
    keeper: Annotated[int | None, typer.Option(hidden=True, help="For the keeper alone: its process.")] = None,
    checks: Checks = False,
    as_json: Json = False,
) -> int:
    """Show a running sidecar in a browser: hits, misses and why, tiers, tenants, engines, events; until SIGTERM.

    It asks through a socket that allows no changes, so it may crash or be flooded without engines noticing. It waits
    for a sidecar that is not there yet. With --operator it has a page that drops, purges and warms.
    """
    from kvstore.console.access import ConsoleReader, checked_tokens
    from kvstore.console.audit import AuditLog
    from kvstore.console.serve import ConsoleParts, serve_console
    from kvstore.service.settings import OBSERVE_SOCKET, TENANT_SOCKET, default_socket, host_and_port
    from tiering.clock import SystemClock

    address = host_and_port(listen, "--listen")
    file = Path(audit_file or default_socket(data, AUDIT_FILE))

    def read_tokens() -> dict[str, ConsoleReader]:
        assert token_file is not None
        with open(token_file, encoding="utf-8", errors="replace") as lines:
            return checked_tokens(lines.read(_MOST_TOKEN_BYTES), token_file)

    def started(port: int) -> None:
        say_started("console", f"{url_of(address[0], port)}/", as_json)

    if checks:
        if token_file is not None:
            read_tokens()
        if operator is not None and file.parent.is_dir():  # else it is the sidecar's own, which comes later
            AuditFile(file)
        return OK
    acts = None
    if operator is not None:
        sockets = _tenant_sockets(tenant_socket or [f"{DEFAULT_TENANT}={default_socket(data, TENANT_SOCKET)}"])
        lines = AuditFile(file)
        log = AuditLog(lines.append, lines.last())
        acts = OperatorCommands(operator, sockets, SystemClock()), log
    elif audit_file or tenant_socket:
        raise typer.BadParameter("--audit-file and --tenant-socket are for a console that is given --operator")
    parts = ConsoleParts(
        SystemClock(),
        secrets.token_bytes,
        static_files(),
        kvstore.__version__,
        lambda: keeper is None or os.getppid() == keeper,
        acts,
    )
    tokens = read_tokens if token_file is not None else None
    serve_console(socket or default_socket(data, OBSERVE_SOCKET), address, tokens, parts, started)
    return OK


def _tenant_sockets(given: list[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    wrong = next((one for one, (name, _, path) in zip(given, pairs, strict=True) if not name or not path), None)
    if wrong is not None:
        raise typer.BadParameter(f"--tenant-socket {wrong}: give NAME=PATH")
    return {name: path for name, _, path in pairs}


def static_files() -> dict[str, bytes]:
    """Contents of the console's files, by name."""
    root = Path(str(resources.files("kvstore.console") / "static"))
    return {str(one.relative_to(root)): one.read_bytes() for one in sorted(root.rglob("*")) if one.is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# The operator's verbs for the console, as `kvstore drop`, `purge` and `warm`, and the audit log's file.


ACTION_SECONDS = 30.0
"""Deadline of a drop or a purge."""

MOST_AUDIT_BYTES = 4 << 20
"""A full file becomes FILE.1, replacing the last of that name."""
LAST_AUDIT_BYTES = 256 << 10
"""Read from each file at the start."""


class AuditFile:
    """The lines of an `AuditLog` on the disk. Not thread-safe."""

    def __init__(self, path: Path, most_bytes: int = MOST_AUDIT_BYTES) -> None:
        """Raises `BadInput` if it cannot be written."""
        self._path = path
        self._before = path.with_name(f"{path.name}.1")
        self._most_bytes = most_bytes
        try:
            os.close(self._open())
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; give another --audit-file (console.audit_file)") from None

    def append(self, line: bytes) -> None:
        file = self._open()
        size = os.fstat(file).st_size
        if size and size + len(line) > self._most_bytes:
            os.close(file)
            os.replace(self._path, self._before)
            file, size = self._open(), 0
        try:
            is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # cut off by a crash, or edited by hand
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
        for path in (self._before, self._path):
            try:
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_AUDIT_BYTES))
                    yield from file.read(LAST_AUDIT_BYTES).splitlines()
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

    def drop(self, tenant: str, namespace: str) -> tuple[int, str]:
        """As `OperatorVerbs.drop`."""
        gone = ask.drop(self.operator, self.clock, namespace, tenant, ACTION_SECONDS)
        return gone.blocks, gone.elsewhere

    def purge(self, tenant: str) -> tuple[int, str]:
        """As `OperatorVerbs.purge`."""
        gone = ask.purge(self.operator, self.clock, tenant, ACTION_SECONDS)
        return gone.blocks, gone.elsewhere

    def warm(self, tenant: str, namespace: str, prompts: str) -> tuple[int, str]:
        socket = self.sockets.get(tenant)
        if socket is None:
            raise BadInput(f"this console has no socket of tenant {printable(tenant)!r}; give --tenant-socket")
        read = ask.read_prompts("prompts", prompts.splitlines())
        one = ask.warm(socket, self.clock, namespace, "prompts", read, lambda *_: None)
        not_there = Counter(one.left) + Counter(one.absent)
        others = ", ".join(f"{blocks:,} {name.replace('_', ' ')}" for name, blocks in sorted(not_there.items()))
        text = f"{one.prompts:,} prompts, {one.asked:,} blocks: {one.warm:,} were in dram, {one.promoted:,} are now"
        return one.warm + one.promoted, f"{text}; the others: {others}" if others else text
