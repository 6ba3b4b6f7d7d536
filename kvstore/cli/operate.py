"""Operators' commands: doctor, before and while a sidecar runs; for a running one stat, why, prefixes, namespaces,
drop, purge, warm, record."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from kvstore.block.errors import StoreError
from kvstore.cli import ask, report
from kvstore.cli.insight import given_model
from kvstore.cli.plain import sidecar_settings
from kvstore.cli.terminal import (
    CHECK_FAILED,
    OK,
    Console,
    Group,
    Json,
    Live,
    Shown,
    app,
    argument,
    check_folder,
    fail,
    flags_of,
    option,
    path_argument,
    path_option,
    print_result,
    shown_progress,
    typer,
    with_settings,
)
from tiering.clock import SystemClock

WATCH_SECONDS = 2


Data = Annotated[str, path_option("DIR", "Directory that the sidecar serves.", "--data", envvar="KVSTORE_DATA")]


AdminSocket = Annotated[
    str | None,
    path_option(
        "PATH",
        "The operator's socket. --socket is its former name.  [default: DIR/admin.sock]",
        "--admin-socket",
        "--socket",
    ),
]


ObserveSocket = Annotated[str | None, path_option("PATH", "The observers' socket.  [default: DIR/observe.sock]")]

Seconds = Annotated[float, option("N", "How long it may take.", "--seconds")]


SERVE_FLAGS = flags_of("""
    --data store.data DIR Directory of keys and slabs.  [default: ./kv]
    --dram store.dram SIZE Memory for blocks. Half of what the cgroup allows if left out.
    --nvme store.nvme SIZE Disk space for blocks, or off. Four fifths of what is free if left out.
    --socket door.socket PATH UNIX socket of the default tenant.  [default: DIR/kvstore.sock]
    --admin-socket admin.socket PATH UNIX socket of the operator.  [default: DIR/admin.sock]
    --keys keys.directory DIR Of tenants' keys that nodes share, as kvstore keys makes it. The store's own if left out.
    --http http.listen HOST:PORT Serve liveness, readiness and metrics there.
""")
"""Of `kvstore serve`, and of its children."""
DOCTOR_FLAGS = flags_of("""
    --data store.data DIR Its directory.  [default: ./kv]
    --dram store.dram SIZE Its memory for blocks.
    --nvme store.nvme SIZE Its disk space for blocks, or off.
    --socket door.socket PATH The default tenant's socket, which is to answer.
    --keys keys.directory DIR A pool's directory of keys.
""")


@app.command()
@with_settings(DOCTOR_FLAGS)
def doctor(
    config: Annotated[str | None, path_option("FILE", "The sidecar's settings, as for serve.")] = None,
    engine: Annotated[
        str | None, option("JSON|FILE", "What vLLM is given as --kv-transfer-config, or a file that has it.")
    ] = None,
    model: Annotated[
        str | None,
        option("MODEL", "A model's name or directory, as for kvstore models: whether the installed engines serve it."),
    ] = None,
    as_json: Json = False,
    given: Any = None,
) -> int:
    """What this machine, the data directory, the sidecar's socket and an engine's configuration lack, a line each with
    the remedy, and what is well. Changes nothing.

    Give it the flags of kvstore serve; KVSTORE_ variables count as they do there. Status 0: all is well. Status 1:
    something is missing.
    """
    from kvstore.doctor import checks_of, examine, read_transfer_config

    settings = sidecar_settings(config, given)
    transfer = read_transfer_config(engine) if engine is not None else None
    asked = given_model(model) if model is not None else None
    with shown_progress() as show:
        show("looking at the machine")
        found = examine(checks_of(settings, "door" in given, transfer, asked))
    print_result(found, as_json)
    return CHECK_FAILED if found.lacking else OK


class _Watchable(typer.core.TyperCommand):
    """A command whose --watch may be followed by a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at, one in enumerate(args):
            if one == "--watch" and not "".join(args[at + 1 : at + 2]).replace(".", "", 1).isdigit():
                args[at] = f"--watch={WATCH_SECONDS}"
        return super().parse_args(ctx, args)


@app.command(cls=_Watchable)
def stat(
    data: Data = "./kv",
    socket: AdminSocket = None,
    watch: Annotated[
        float | None, option("[SECONDS]", f"Draw it again and again, every {WATCH_SECONDS} seconds if left out.")
    ] = None,
    as_json: Json = False,
) -> int:
    """What a running sidecar holds and has served: tiers, namespaces, hits and misses, moves, sessions.

    With --watch and --json it prints one object per line.
    """
    if watch is not None and not 0.1 <= watch <= 86400:
        raise typer.BadParameter(f"--watch {watch:g}: give 0.1 to 86400 seconds")
    path, clock = _admin(data, socket)

    def found() -> Shown:
        return report.stat_report(ask.stat(path, clock))

    if watch is None:
        return print_result(found(), as_json)
    if as_json:
        while True:
            print(json.dumps(found().to_dict()), flush=True)
            clock.sleep(watch)
    if not sys.stdout.isatty():  # not a terminal: append pages, with an empty line between them
        while True:
            print_result(found(), as_json)
            print(flush=True)
            clock.sleep(watch)
    first, console = found(), Console()
    with Live(Group(*first.lines), console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            live.refresh()
            clock.sleep(watch)
            live.update(Group(*found().lines))


@app.command()
def ping(data: Data = "./kv", socket: AdminSocket = None, as_json: Json = False) -> int:
    """Whether a running sidecar answers at its socket, for liveness probes. Status 0: it does; status 1: not."""
    try:
        ask.ping(*_admin(data, socket))
    except (StoreError, OSError) as error:
        if as_json:
            print(json.dumps({"alive": False}))
        fail(str(error), CHECK_FAILED)
    print(json.dumps({"alive": True}) if as_json else "the sidecar answers")
    return OK


@app.command()
def why(
    request: Annotated[str, argument("REQUEST", "The engine's name of it, or its beginning.")],
    data: Data = "./kv",
    socket: AdminSocket = None,
    as_json: Json = False,
) -> int:
    """Why a request's tokens were hits or misses: its leases as the sidecar saw them, and its engine's report.

    A sidecar remembers the last 1,024 requests of each tenant.
    """
    path, clock = _admin(data, socket)
    return print_result(report.why_report(ask.why(path, clock, request)), as_json)


@app.command()
def prefixes(
    tenant: Annotated[str, option("NAME", "Whose alone.")] = "",
    data: Data = "./kv",
    socket: AdminSocket = None,
    as_json: Json = False,
) -> int:
    """Which stored prefixes are hot, of about the last hour."""
    path, clock = _admin(data, socket)
    return print_result(report.prefix_report(ask.prefixes(path, clock, tenant)), as_json)


@app.command()
def namespaces(data: Data = "./kv", socket: AdminSocket = None, as_json: Json = False) -> int:
    """The namespaces of a running sidecar: tenant, model, layout, codec, and size."""
    return print_result(report.namespaces_report(ask.stat(*_admin(data, socket))), as_json)


@app.command()
def drop(
    namespace: Annotated[str, argument("NAMESPACE_ID", "Or its first digits.")],
    tenant: Annotated[str, option("NAME", "Whose, where several tenants have it.")] = "",
    data: Data = "./kv",
    socket: AdminSocket = None,
    seconds: Seconds = 30.0,
    as_json: Json = False,
) -> int:
    """Evict a namespace from every tier of a running sidecar."""
    gone = ask.drop(*_admin(data, socket), namespace, tenant, seconds)
    return print_result(report.gone_report(f"Namespace {namespace} is gone", "namespace", namespace, gone), as_json)


@app.command()
def purge(
    tenant: Annotated[str, argument("TENANT", "The tenant's name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: Data = "./kv",
    socket: AdminSocket = None,
    seconds: Seconds = 30.0,
    as_json: Json = False,
) -> int:
    """Void all of a tenant's blocks durably and retire its key. This cannot be undone.

    The tenant's connections end; when it connects again it gets a new key.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("a purge cannot be undone, and there is no terminal to ask at; give --yes")
        # typer's own question writes to standard output too
        print(f"Void all blocks of tenant {tenant} and retire its key? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise typer.Abort()
    gone = ask.purge(*_admin(data, socket), tenant, seconds)
    done = report.gone_report(f"Tenant {tenant} is purged and its key retired", "tenant", tenant, gone)
    return print_result(done, as_json)


@app.command()
def warm(
    file: Annotated[
        str, path_argument("FILE", 'JSON lines: [1, 2, ...], or {"token_ids": [...], "extra_keys": [...]}.')
    ],
    namespace: Annotated[str, option("ID", "Its id, or the first digits.")],
    data: Data = "./kv",
    socket: Annotated[str | None, path_option("PATH", "The tenant's socket.  [default: DIR/kvstore.sock]")] = None,
    as_json: Json = False,
) -> int:
    """Promote the stored prefixes of prompts to DRAM, before engines ask for them."""
    from kvstore.service.settings import TENANT_SOCKET, default_socket

    with open(file, encoding="utf-8", errors="replace") as lines:
        prompts = ask.read_prompts(file, lines)
    with shown_progress() as show:
        path = socket or default_socket(data, TENANT_SOCKET)
        warmed = ask.warm(path, SystemClock(), namespace, file, prompts, show)
    return print_result(warmed, as_json)


@app.command()
def record(
    file: Annotated[str, path_argument("FILE", "What is written: JSON lines in Mooncake's form.")],
    namespace: Annotated[str, option("ID", "Of these blocks alone. Needed where blocks differ in size.")] = "",
    tenant: Annotated[str, option("NAME", "Whose, where several tenants have it.")] = "",
    seconds: Annotated[
        float | None, option("N", "For how long. Until SIGINT or SIGTERM, if left out.", min=0.0)
    ] = None,
    data: Data = "./kv",
    socket: AdminSocket = None,
    as_json: Json = False,
) -> int:
    """Record what engines look up in a running sidecar, for kvstore replay: salted hashes, no token and no key.

    The salt is drawn anew for each recording and never leaves the sidecar. SIGINT and SIGTERM end it in order.
    """
    path, clock = _admin(data, socket)
    if os.path.exists(file):
        raise typer.BadParameter(f"{file} is there already; give another name")
    if Path(file).suffix.lower() == ".gz":
        raise typer.BadParameter(f"{file} is to be text, not gzip; give a name without .gz, and pack it afterwards")
    check_folder(file, file)
    with open(file, "x", encoding="utf-8", buffering=1) as out:
        try:
            with shown_progress() as show, _ended() as is_ended:
                recorded = ask.record(path, clock, namespace, tenant, seconds, file, out.write, show, is_ended)
        finally:
            if not os.path.getsize(file):
                os.remove(file)
    return print_result(recorded, as_json)


def _admin(data: str, socket: str | None) -> tuple[str, Any]:
    from kvstore.service.settings import ADMIN_SOCKET, default_socket

    return socket or default_socket(data, ADMIN_SOCKET), SystemClock()


@contextmanager
def _ended() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM came; a second signal ends at once. An ignored SIGINT, as
    in a shell's background jobs, stays ignored."""
    heard: list[int] = []
    ends: list[int] = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        ends.append(signal.SIGINT)

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        for one in ends:
            signal.signal(one, signal.default_int_handler)

    before = {number: signal.signal(number, hear) for number in ends}
    try:
        yield lambda: bool(heard)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
