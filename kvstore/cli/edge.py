"""`kvstore edge` and `kvstore agent`, which `kvstore serve` starts with its own flags; `kvstore console` and `kvstore
network`, which start the same parts by themselves, with flags for the same settings."""

import json
import os
import resource
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket as Socket
from typing import Annotated, Any

from msgspec.structs import replace

import kvstore
from kvstore.block.errors import BadInput
from kvstore.cli import ask
from kvstore.cli.operate import SERVE_FLAGS, Data, ObserveSocket
from kvstore.cli.plain import sidecar_settings
from kvstore.cli.standard_streams import say
from kvstore.cli.terminal import (
    OK,
    Flag,
    Given,
    Json,
    app,
    check_folder,
    flags_of,
    option,
    path_option,
    settings_of,
    typer,
    with_settings,
)
from kvstore.config import DEFAULT_TENANT, expanded
from kvstore.protocol.words import printable
from tiering.clock import Clock, SystemClock

NONE = "none"
MOST_BEAT_BYTES = 1000
CHILD: Any = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Of a command whose other words are those of `kvstore serve`."""

Keeper = Annotated[int | None, typer.Option(hidden=True, help="For the keeper alone: its process.")]
Beats = Annotated[int | None, typer.Option(hidden=True, help="For the keeper alone: a pipe of it.")]
Makes = dict[str, Callable[[], Any]]
"""What builds the parts of a process, by name."""


@app.command("agent", hidden=True, context_settings=CHILD)
@app.command("edge", hidden=True, context_settings=CHILD)
def child(
    context: typer.Context,
    http_at: Annotated[list[int] | None, typer.Option(hidden=True)] = None,
    pages: Annotated[bool, typer.Option("--pages", hidden=True)] = False,
    keeper: Keeper = None,
    beats: Beats = None,
    as_json: Json = False,
) -> int:
    """For kvstore serve alone, with its words. edge: health and metrics, at sockets that listen (--http-at), and if not
    --pages alone, the console. agent: gRPC, and the transfer agent, which brings blocks from elsewhere."""
    command: Any = typer.main.get_command(app)
    values = command.commands["serve"].make_context("serve", [*context.args]).params
    read = partial(sidecar_settings, values["config"], settings_of(SERVE_FLAGS, values))
    settings = read()
    watch = _watch(settings)
    makes = agent_makes(settings, watch) if context.info_name == "agent" else edge_makes(settings, watch)
    if http_at:
        from kvstore.edge.pages import PagesPart

        sockets, is_shared = [Socket(fileno=one) for one in http_at], len(settings.sockets()) > 1
        made = partial(PagesPart, sockets, settings.http, watch, kvstore.__version__, is_shared=is_shared)
        makes = {"health pages": made, **({} if pages else makes)}  # probes are answered first
    return _run(makes, watch, keeper, beats, read, as_json)


CONSOLE_FLAGS = flags_of("""
    --listen console.listen HOST:PORT=127.0.0.1:9798 Where pages are served; port 0 is any free one.
    --token-file console.token_file FILE The operator's token, and a line NAME TOKEN for each tenant, which sees itself.
    --operator admin.socket PATH The operator's socket: who has the first token may drop, purge and warm then.
    --audit-file console.audit_file FILE What an operator did is written there.  [default: DIR/console-audit.jsonl]
""")
NETWORK_FLAGS = flags_of("""
    --observe-socket observe.socket PATH The observers' socket.  [default: DIR/observe.sock]
    --listen network.listen ADDRESS=127.0.0.1:7470 Of gRPC: HOST:PORT or unix:PATH; none: for --remote alone.
    --http network.http HOST:PORT Serve POST /query to routers there.
    --token-file network.token_file FILE The operator's token, and a line NAME TOKEN for each tenant: for callers here.
    --certificate network.certificate FILE In PEM: callers come with certificates then, by TLS.
    --key network.key FILE The certificate's key.
    --client-ca network.client_ca FILE The CA that signs callers.
    --reflection network.reflection - Tell callers with a credential which services and messages there are.
    --peer network.peers HOST:PORT... Another node's gRPC; again for each.
    --directory network.directory URL valkey://[USER@]HOST:PORT or valkey+unix:/PATH, where nodes tell what they have.
    --directory-password-file network.directory_password_file FILE Of the directory's user.
    --pull network.pull HOST:PORT Where other nodes pull blocks.  [default: any port of the host that --listen names]
    --transport network.transport NAME=sockets sockets, or ucx before them.
    --seal network.seal WHEN=auto auto: blocks are sealed beyond loopback; or always.
    --remote remote.url URL valkey://[USER@]HOST:PORT or valkey+unix:/PATH of a remote engine.
    --remote-password-file remote.password_file FILE Of the remote engine's user.
    --remote-writes remote.writes WHICH=all Blocks that are written there: all, learned or none.
    --remote-ttl remote.ttl SECONDS=86400 For which they are kept there; 0 for no end.
""")


@app.command()
@with_settings(CONSOLE_FLAGS)
def console(
    data: Data = "./kv",
    socket: ObserveSocket = None,
    tenant_socket: Annotated[
        list[str] | None,
        option(
            "NAME=PATH",
            "A tenant whose prefixes may be warmed, and its socket; as often as there are tenants.  "
            "[default: default=DIR/kvstore.sock]",
        ),
    ] = None,
    keeper: Keeper = None,
    as_json: Json = False,
    given: Any = None,
) -> int:
    """Show a running sidecar in a browser: hits, misses and why, tiers, tenants, engines, events; until SIGTERM.

    It asks through a socket that allows no changes, so it may crash or be flooded without engines noticing. It waits
    for a sidecar that is not there yet. With --operator it has a page that drops, purges and warms.
    """
    if "admin" in given:
        given["console"]["operator"] = True
    elif "audit_file" in given["console"] or tenant_socket:
        raise typer.BadParameter("--audit-file and --tenant-socket are for a console that is given --operator")
    given |= {"store": {"data": data}, "observe": {"socket": socket} if socket is not None else {}}
    settings = _settings(CONSOLE_FLAGS, given, _named("--tenant-socket", tenant_socket))
    watch = _watch(settings)
    return _run({"console": partial(_console, settings, watch)}, watch, keeper, as_json=as_json)


@app.command()
@with_settings(NETWORK_FLAGS)
def network(
    data: Data = "./kv",
    socket: Annotated[
        list[str] | None,
        option(
            "[TENANT=]PATH",
            "A tenant's socket, the default tenant's without a name; again for each tenant.  [default: "
            "DIR/kvstore.sock]",
        ),
    ] = None,
    courier_socket: Annotated[
        str | None, path_option("PATH", "Of the sidecar, for blocks from elsewhere.  [default: DIR/courier.sock]")
    ] = None,
    keeper: Keeper = None,
    beats: Beats = None,
    sockets: Annotated[str | None, typer.Option(hidden=True, help="For an earlier keeper: sockets by tenant.")] = None,
    as_json: Json = False,
    given: Any = None,
) -> int:
    """Serve gRPC beside a running sidecar: how much of a prompt is stored, for other languages, other hosts and
    routers; and fetch blocks from other nodes and from a remote tier; until SIGTERM.

    It is a client of the tenants' sockets, and may crash or be flooded without engines noticing. A token or a
    certificate identifies the caller: docs/grpc.md. Other nodes: docs/cluster.md. It waits for a sidecar that is not
    there yet.
    """
    is_alone = given["network"]["listen"] == NONE
    if is_alone:
        given["network"] = {key: one for key, one in given["network"].items() if key not in ("listen", "token_file")}
    named = _named("--socket", socket, json.loads(sockets or "{}"))
    settings = _settings(NETWORK_FLAGS, {**given, "store": {"data": data}}, named)
    paths = named or {DEFAULT_TENANT: settings.sockets()[DEFAULT_TENANT].socket}
    watch, courier = _watch(settings), _courier_of(settings, paths, courier_socket)
    if is_alone and courier is None:
        raise BadInput("listen is missing; give HOST:PORT or unix:PATH of gRPC")
    return _run({SERVER: partial(_rpc, settings, watch, paths, courier)}, watch, keeper, beats, as_json=as_json)


def _named(flag: str, given: list[str] | None, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Sockets by tenant; one without a name is the default tenant's, where the flag says so."""
    found = dict(known or {})
    for one in given or ():
        name, equals, path = one.partition("=")
        if flag == "--socket" and (not equals or "/" in name):
            name, path = DEFAULT_TENANT, one
        if not name or not path:
            raise BadInput(f"{flag} {one}: give NAME=PATH")
        if name in found:
            raise BadInput(f"{flag} {one}: tenant {name} has one already")
        found[name] = expanded(path, flag)
    return found


def _settings(flags: Sequence[Flag], given: Given, sockets: Mapping[str, str]) -> Any:
    """sockets: by tenant. Raises `BadInput`, which names the flags in place of their settings."""
    from kvstore.service.settings import settings_of as checked

    tenants = {name: {"socket": path} for name, path in sockets.items() if name != DEFAULT_TENANT}
    door = {"socket": sockets[DEFAULT_TENANT]} if DEFAULT_TENANT in sockets else {}
    try:
        return checked({**given, "door": door, "tenants": tenants})
    except BadInput as error:
        text = str(error)
        for one in sorted(flags, key=lambda one: -len(one.setting)):  # some begin with another one's name
            text = text.replace(one.setting, f"--{one.name.replace('_', '-')}")
        raise BadInput(text) from None


def _watch(settings: Any) -> Any:
    from kvstore.edge.watch import StatusWatch

    return StatusWatch(settings.observe_socket, SystemClock())


def _run(
    makes: Makes,
    watch: Any,
    keeper: int | None,
    beats: int | None = None,
    read: Callable[[], Any] | None = None,
    as_json: bool = False,
) -> int:
    """read: reads the settings again, for a child of serve: its parts are tried again where they cannot start."""
    from kvstore.edge.process import EdgeProcess
    from kvstore.service.keeper import CHILD_NICE

    with suppress(OSError):  # a service manager may forbid either
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        os.nice(CHILD_NICE if read is not None and keeper is not None else 0)
    if beats is not None:
        os.set_blocking(beats, False)

    def beat(wrong: str) -> None:
        if beats is not None:
            with suppress(BlockingIOError):  # the supervisor has not read the earlier ones
                os.write(beats, wrong.encode()[:MOST_BEAT_BYTES] + b"\n")

    def started(parts: Sequence[Any]) -> None:
        if as_json and parts:
            said = {name: one for part in parts for name, one in part.said.items()}
            say(json.dumps({**said, "pid": os.getpid()}), sys.stdout)
        for line in [part.line for part in parts if part.line and not as_json]:
            say(line, sys.stdout)

    def is_wanted() -> bool:
        return keeper is None or os.getppid() == keeper

    try:
        EdgeProcess(makes, started, read).serve(beat, is_wanted)
    finally:
        watch.close()
    return OK


# ---------------------------------------------------------------------------------------------------------------------
# The parts, from the settings of a sidecar.


SERVER, AGENT = "gRPC server", "transfer agent"


def edge_makes(settings: Any, watch: Any) -> Makes:
    """What the edge serves besides health and metrics."""
    return {"console": partial(_console, settings, watch)} if settings.console.listen is not None else {}


def agent_makes(settings: Any, watch: Any) -> Makes:
    """gRPC, in a process without pages: who floods a console must not delay routers. And what brings blocks from
    elsewhere: other nodes dial the same address."""
    paths = _paths(settings)
    courier = _courier_of(settings, paths)
    name = SERVER if courier is None else AGENT
    is_wanted = courier is not None or settings.network.listen is not None
    return {name: partial(_rpc, settings, watch, paths, courier)} if is_wanted else {}


def _paths(settings: Any) -> dict[str, str]:
    return {name: one.socket for name, one in settings.sockets().items()}


def check_edge(settings: Any) -> None:
    """Build what a child would build, which raises what it would end with again and again. Raises `BadInput`."""
    from kvstore.edge.tokens import read_credential
    from kvstore.service.settings import read_token

    file, network, watch = settings.audit_file, settings.network, _watch(settings)
    if settings.console.audit_file is not None and Path(file).parent != Path(settings.store.data):
        check_folder(f"console.audit_file={file}", file)
    elif not Path(file).parent.is_dir():  # the sidecar makes it
        settings = replace(settings, console=replace(settings.console, operator=False, audit_file=None))
    if settings.http.token_file is not None:
        read_token(settings.http.token_file)
    if not settings.store.keeper:  # it runs health and metrics alone
        return
    if network.wants_peers:  # whatever has that port now, it may be free in a moment
        pull = f"{(network.pull or network.listen).rpartition(':')[0]}:0"
        settings = replace(settings, network=replace(network, pull=pull))
    try:
        for one in (network.directory_password_file, settings.remote.password_file):
            if one is not None:
                read_credential(one)
        for make in (edge_makes(settings, watch) | agent_makes(settings, watch)).values():
            make()
    except (BadInput, OSError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        raise BadInput(f"the edge: {what}") from None


def _console(settings: Any, watch: Any) -> Any:
    from kvstore.console.audit import AuditLog
    from kvstore.console.part import ConsolePart

    operator = None
    if settings.console.operator:
        acts = OperatorCommands(settings.admin_socket, _paths(settings), watch.clock)
        operator = acts, AuditLog(Path(settings.audit_file))
    return ConsolePart(settings.console, watch, kvstore.__version__, secrets.token_bytes, operator)


def _rpc(settings: Any, watch: Any, paths: Mapping[str, str], courier: Callable[[], Any] | None = None) -> Any:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # silences grpc's own log lines
    from kvstore.network.part import RpcPart

    return RpcPart(settings.network, paths, watch, secrets.token_bytes, courier)


def _courier_of(settings: Any, paths: Mapping[str, str], socket: str | None = None) -> Callable[[], Any] | None:
    """Makes the courier for these tenants, if one is configured. socket: of couriers, where a flag names it."""
    if not settings.wants_courier:
        return None

    def make() -> Any:
        from kvstore.network.couriers import make_courier

        ucx = None
        if settings.network.transport == "ucx":
            from kvstore.peers.ucx import UcxFrameDoor, UcxPullTransport

            ucx = UcxFrameDoor, UcxPullTransport
        where = socket or settings.courier_socket
        return make_courier(settings, where, tuple(paths), SystemClock(), secrets.token_bytes, ucx)

    return make


# ---------------------------------------------------------------------------------------------------------------------
# The operator's verbs for the console, as `kvstore drop`, `purge` and `warm`.


ACTION_SECONDS = 30.0
"""Deadline of a drop or a purge."""


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
