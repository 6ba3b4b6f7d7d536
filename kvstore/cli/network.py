"""`kvstore network`: gRPC for other languages and hosts, and HTTP for routers, beside a running sidecar."""

import json
import os
import resource
import secrets
import socket as socket_module
import sys
from functools import partial
from typing import Annotated, Any

from msgspec.structs import replace

from kvstore.cli.operate import Data, ObserveSocket
from kvstore.cli.standard_streams import say
from kvstore.cli.terminal import OK, Checks, Json, app, option, path_option, typer

LISTEN = "127.0.0.1:7470"
NONE = "none"
_MOST_FILE_BYTES = 1 << 20


@app.command()
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
    observe_socket: ObserveSocket = None,
    listen: Annotated[
        str, option("ADDRESS", "Of gRPC: HOST:PORT (port 0 is any free one) or unix:PATH; none: for --remote alone.")
    ] = LISTEN,
    http: Annotated[str | None, option("HOST:PORT", "Serve POST /query to routers there.")] = None,
    token_file: Annotated[
        str | None,
        path_option("FILE", "The operator's token, and a line NAME TOKEN for each tenant: for callers on this host."),
    ] = None,
    certificate: Annotated[
        str | None, path_option("FILE", "In PEM: callers come with certificates then, by TLS.")
    ] = None,
    key: Annotated[str | None, path_option("FILE", "The certificate's key.")] = None,
    client_ca: Annotated[str | None, path_option("FILE", "The CA that signs callers.")] = None,
    reflection: Annotated[
        bool, typer.Option("--reflection", help="Tell callers with a credential which services and messages there are.")
    ] = False,
    peer: Annotated[list[str] | None, option("HOST:PORT", "Another node's gRPC; again for each.")] = None,
    directory: Annotated[
        str | None, option("URL", "valkey://[USER@]HOST:PORT or valkey+unix:/PATH, where nodes tell what they have.")
    ] = None,
    directory_password_file: Annotated[str | None, path_option("FILE", "Of the directory's user.")] = None,
    pull: Annotated[
        str | None,
        option(
            "HOST:PORT", "Where other nodes pull blocks from here.  [default: any port of the host that --listen names]"
        ),
    ] = None,
    transport: Annotated[str, option("NAME", "sockets, or ucx before them.")] = "sockets",
    seal: Annotated[str, option("WHEN", "auto: blocks are sealed beyond loopback; or always.")] = "auto",
    remote: Annotated[
        str | None, option("URL", "valkey://[USER@]HOST:PORT or valkey+unix:/PATH of a remote engine.")
    ] = None,
    remote_password_file: Annotated[str | None, path_option("FILE", "Of the remote engine's user.")] = None,
    remote_writes: Annotated[str, option("WHICH", "Blocks that are written there: all, learned or none.")] = "all",
    remote_ttl: Annotated[float, option("SECONDS", "For which they are kept there; 0 for no end.")] = 86400.0,
    courier_socket: Annotated[
        str | None, path_option("PATH", "Of the sidecar, for blocks from elsewhere.  [default: DIR/courier.sock]")
    ] = None,
    keeper: Annotated[int | None, typer.Option(hidden=True, help="For the keeper alone: its process.")] = None,
    beats: Annotated[int | None, typer.Option(hidden=True, help="For the keeper alone: a pipe of it.")] = None,
    sockets: Annotated[str | None, typer.Option(hidden=True, help="For the keeper alone: sockets by tenant.")] = None,
    checks: Checks = False,
    as_json: Json = False,
) -> int:
    """Serve gRPC beside a running sidecar: how much of a prompt is stored, for other languages, other hosts and
    routers; and fetch blocks from other nodes and from a remote tier; until SIGTERM.

    It is a client of the tenants' sockets, and may crash or be flooded without engines noticing. A token or a
    certificate identifies the caller: docs/grpc.md. Other nodes: docs/cluster.md. It waits for a sidecar that is not
    there yet.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # silences grpc's own log lines
    from kvstore.block.errors import BadInput
    from kvstore.config import DEFAULT_TENANT, NetworkSettings, RemoteSettings, check_network, expanded
    from kvstore.console.access import checked_tokens
    from kvstore.network.credentials import Certificates
    from kvstore.network.serve import UNIX, NetworkOptions, NetworkParts, serve_network
    from kvstore.network.services import DoorCaller
    from kvstore.service.settings import COURIER_SOCKET, OBSERVE_SOCKET, TENANT_SOCKET, default_socket, host_and_port
    from tiering.clock import SystemClock

    named: dict[str, str] = json.loads(sockets) if sockets is not None else {}
    for given in socket or ([default_socket(data, TENANT_SOCKET)] if sockets is None else []):
        name, equals, path = given.partition("=")
        if not equals or "/" in name:
            name, path = DEFAULT_TENANT, given
        if name in named:
            raise BadInput(f"--socket {given}: tenant {name} has one already")
        named[name] = expanded(path, "--socket")
    pems = [one for one in (certificate, key, client_ca) if one is not None]
    if len(pems) not in (0, 3):
        raise BadInput("--certificate, --key and --client-ca belong together; give all three, or none")
    address: str | tuple[str, int] | None = None
    if listen.startswith(UNIX):
        address = f"{UNIX}{expanded(listen.removeprefix(UNIX))}"
    elif listen != NONE:
        address = host_and_port(listen, "--listen")
    wanted = NetworkSettings(
        listen=None if address is None else listen,
        token_file=token_file if address is not None else None,
        certificate=certificate,
        key=key,
        client_ca=client_ca,
        peers=peer,
        directory=directory,
        directory_password_file=directory_password_file,
        pull=pull,
        transport=transport,
        seal=seal,
    )
    if checks and wanted.wants_peers:  # whatever has that port now, it may be free in a moment
        wanted = replace(wanted, pull=f"{(pull or listen).rpartition(':')[0]}:0")
    engine = RemoteSettings(remote, remote_password_file, remote_writes, remote_ttl)
    has_courier = wanted.wants_peers or remote is not None
    if has_courier or any((pull, directory_password_file, remote_password_file)):
        check_network(wanted, engine)
    options = NetworkOptions(
        address,
        named,
        observe_socket or default_socket(data, OBSERVE_SOCKET),
        host_and_port(http, "--http") if http is not None else None,
        token_file,
        Certificates(*pems) if pems else None,
    )

    def tokens(text: bytes, name: str) -> dict[str, DoorCaller]:
        found = checked_tokens(text.decode("utf-8", "replace"), name)
        return {token: DoorCaller(one.tenant) for token, one in found.items()}

    def beat() -> None:
        if beats is not None:
            try:
                os.write(beats, b".")
            except BlockingIOError:  # the supervisor has not read the earlier ones
                pass

    def started(where: str | None, port: int | None) -> None:
        if as_json:
            say(json.dumps({"network": where, "http_port": port, "pid": os.getpid()}), sys.stdout)
        else:
            say(
                (f"gRPC on {where}" if where else "a remote engine alone")
                + (f", queries on port {port}" if port is not None else ""),
                sys.stdout,
            )

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if beats is not None:
        os.set_blocking(beats, False)
    parts = NetworkParts(
        SystemClock(),
        secrets.token_bytes,
        ExchangedFile,
        own_sockets_at,
        tokens,
        beat,
        lambda: keeper is None or os.getppid() == keeper,
        _reflection() if reflection else None,
        _courier(courier_socket or default_socket(data, COURIER_SOCKET), tuple(named), wanted, engine)
        if has_courier
        else None,
        checks,
    )
    for file in (directory_password_file, remote_password_file) if checks else ():
        if file is not None:
            ExchangedFile(file).read()
    serve_network(options, parts, started)
    return OK


def _reflection() -> Any:
    from kvstore.block.errors import BadInput

    try:
        from kvstore.network.reflection import reflection_of
    except ImportError as error:
        raise BadInput(
            f"--reflection needs grpcio-reflection ({error}); install prefix-kvstore[server], or leave it out"
        ) from None
    return reflection_of


def _courier(socket: str, tenants: tuple[str, ...], network: Any, remote: Any) -> Any:
    from kvstore.block.errors import BadInput

    try:
        from kvstore.network.couriers import make_courier
    except ImportError as error:
        raise BadInput(
            f"other nodes and remote engines need {error.name or error}; install prefix-kvstore[server,tls]"
        ) from None
    ucx = None
    if network.transport == "ucx":
        from kvstore.peers.ucx import UcxFrameDoor, UcxPullTransport

        ucx = UcxFrameDoor, UcxPullTransport
    return partial(make_courier, network, remote, (socket, tenants), ucx)


def own_sockets_at(port: int) -> list[socket_module.socket]:
    """Duplicates of this process's sockets at a port, for the caller to close."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sock = socket_module.socket(fileno=os.dup(int(name)))
                if sock.family in (socket_module.AF_INET, socket_module.AF_INET6) and sock.getsockname()[1] == port:
                    found.append(sock)
                else:
                    sock.close()
        except OSError:  # closed meanwhile, or no descriptor is left
            pass
    return found


class ExchangedFile:
    """A `SourceFile` on the disk."""

    def __init__(self, path: str) -> None:
        self.path = path

    def stamp(self) -> tuple[float, object]:
        found = os.stat(self.path)
        return found.st_mtime, (found.st_mtime_ns, found.st_size, found.st_ino)

    def read(self) -> bytes:
        with open(self.path, "rb") as source:
            return source.read(_MOST_FILE_BYTES)
