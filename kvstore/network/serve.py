"""The network process, put together: links to the tenants' sockets, the watch, gRPC, a router's HTTP, the heartbeat."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.config import is_loopback
from kvstore.listeners.addresses import numeric_hosts
from kvstore.network.credentials import Certificates, Rotated, SourceFile, Tokens, caller_of_uris, server_context
from kvstore.network.grpc_server import (
    HEALTH,
    SERVICES,
    Answers,
    GrpcDoor,
    by_certificate,
    by_token,
    certificate_configuration,
    node_by_certificate,
)
from kvstore.network.lanes import CallerLanes
from kvstore.network.links import TenantLink
from kvstore.network.query import QueryApp, QueryPages, QueryServer
from kvstore.network.services import DoorCaller, Others, Scorer
from kvstore.network.unix_address import UnixAddress
from kvstore.network.watch import StatusWatch
from tiering.clock import Clock

UNIX = "unix:"
LOOK_SECONDS = 1.0
SWITCH_SECONDS = 0.0005
"""How long a thread keeps the interpreter while others want it: a flooding tenant's threads must not delay others."""
END_SECONDS = 2.0
"""For running calls at the end: less than the supervisor allows."""

_log = logging.getLogger(__name__)

Address = tuple[str, int]
Reflection = tuple[Answers, Callable[[bytes], Any], Callable[[Any], bytes]]
"""Its answers, the parser of requests, and the serializer of answers."""


@dataclass(frozen=True, slots=True)
class CourierBeside:
    """A courier, whose room is imported only where one is configured. peers: answers other nodes, `kvstore.v1.Peer`;
    others: knows what these hold; both None without any. start: begins, given the address where other nodes reach this
    one, empty without any. close: leaves the pool."""

    peers: Any
    others: Others | None
    start: Callable[[str], None]
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """listen: `unix:PATH` or host and port of gRPC; None: no gRPC, for a remote tier alone. http: host and port for
    routers. sockets: by tenant. With certificates, callers identify themselves by theirs; otherwise, and on a UNIX
    socket, by tokens."""

    listen: str | Address | None
    sockets: Mapping[str, str]
    observe: str
    http: Address | None = None
    token_file: str | None = None
    certificates: Certificates | None = None


@dataclass(frozen=True, slots=True)
class NetworkParts:
    """The process's dependencies. tokens: parses a token file's text; the name is for messages. beat: writes the
    heartbeat. is_wanted: whether the parent process still runs. reflection: of these services, if it is to be served.
    courier: built from these, and from the files of the certificate, its key and the CA, if there are some; None if
    nothing is elsewhere. only_checks: return before anything is served. sockets_at: duplicates of the process's own
    sockets at a port."""

    clock: Clock
    new_token: Callable[[int], bytes]
    file: Callable[[str], SourceFile]
    sockets_at: Callable[[int], list[socket.socket]]
    tokens: Callable[[bytes, str], Mapping[str, DoorCaller]]
    beat: Callable[[], None] = lambda: None
    is_wanted: Callable[[], bool] = lambda: True
    reflection: Callable[[Sequence[str]], Reflection] | None = None
    courier: Callable[[NetworkParts, list[SourceFile] | None], CourierBeside] | None = None
    only_checks: bool = False


def serve_network(
    options: NetworkOptions, parts: NetworkParts, started: Callable[[str | None, int | None], None]
) -> None:
    """Serve until SIGTERM or SIGINT. started: called with gRPC's address and HTTP's port. Raises `BadInput`."""
    check_addresses(options)
    sys.setswitchinterval(SWITCH_SECONDS)
    ends = threading.Event()
    clock = parts.clock
    tokens = _tokens(options, parts)
    certificates, contexts = options.certificates, None
    configurations, files = None, None
    if certificates is not None:
        files = [parts.file(one) for one in (certificates.certificate, certificates.key, certificates.client_ca)]

        def checked(contents: list[bytes]) -> object:
            server_context(certificates)  # for its errors, which grpc does not report
            return certificate_configuration(contents)

        configurations = Rotated(files, checked, clock)
        contexts = Rotated(files, lambda _: server_context(certificates), clock)
    with ExitStack() as stack:
        courier = parts.courier(parts, files) if parts.courier is not None else None
        if parts.only_checks:
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ends.set())
        if options.listen is None:
            _serve_courier(options, parts, courier, stack, ends, started)
            return
        links = {name: TenantLink(name, path, clock) for name, path in options.sockets.items()}
        for link in links.values():
            stack.callback(link.close)
        watch, lanes = StatusWatch(options.observe, clock), CallerLanes(clock)
        is_unix = isinstance(options.listen, str)
        identify = by_certificate if configurations is not None and not is_unix else by_token(_given(tokens))
        scorer = Scorer(watch, courier.others if courier is not None else None)
        door = GrpcDoor(links, watch, identify, lanes, clock, scorer)
        if parts.reflection is not None:
            door.reflect(*parts.reflection((*SERVICES, HEALTH)))
        stack.callback(lambda: door.close(END_SECONDS))
        if courier is not None:
            stack.callback(courier.close)
            if courier.peers is not None:
                door.serve_peers(courier.peers, node_by_certificate if configurations is not None else _any_process)
        port = 0
        if isinstance(options.listen, str):
            address = UnixAddress(options.listen.removeprefix(UNIX))
            stack.callback(address.close)
            address.bind(door.bind)
            where = options.listen
        else:
            host, port = options.listen
            for one in numeric_hosts(host, port, "--listen (network.listen)"):  # grpc takes a name that it has in part
                port = door.bind(f"[{one}]:{port}" if ":" in one else f"{one}:{port}", configurations)
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        http = None
        if options.http is not None:
            header = None if contexts is not None else lambda given: _given(tokens).now().caller(given)
            app = QueryApp(QueryPages(links, scorer, watch, clock), lanes, header, caller_of_uris)
            http = QueryServer(options.http, app, contexts, clock)
            stack.callback(lambda: http.close(END_SECONDS))
        watch.start()
        stack.callback(watch.close)
        door.start()
        if http is not None:
            http.start()
        if courier is not None:
            courier.start("" if is_unix else where)
        started(where, http.port if http is not None else None)
        while not ends.is_set() and parts.is_wanted():
            parts.beat()
            door.give_up_late()
            is_crowded = port != 0 and door.callers.make_room(parts.sockets_at(port))
            ends.wait(LOOK_SECONDS / 10 if is_crowded else LOOK_SECONDS)


def _serve_courier(
    options: NetworkOptions,
    parts: NetworkParts,
    courier: CourierBeside | None,
    stack: ExitStack,
    ends: threading.Event,
    started: Callable[[str | None, int | None], None],
) -> None:
    if courier is None or courier.peers is not None or options.http is not None:
        raise BadInput("listen is missing; give HOST:PORT or unix:PATH of gRPC")
    stack.callback(courier.close)
    courier.start("")
    started(None, None)
    while not ends.is_set() and parts.is_wanted():
        parts.beat()
        ends.wait(LOOK_SECONDS)


def _any_process(context: Any) -> bytes:
    return b""


def check_addresses(options: NetworkOptions) -> None:
    """Raises `BadInput` if a credential would cross a network in clear, or if callers have none."""
    for key, address in (("listen", options.listen), ("http", options.http)):
        if isinstance(address, str) or address is None or options.certificates is not None:
            continue
        if not is_loopback(address[0]):
            raise BadInput(
                f"{key}: {address[0]} can be reached by other hosts; give certificate, key and client_ca, or listen on "
                "127.0.0.1 or a UNIX socket"
            )
    if options.listen is None:
        return
    needs_tokens = options.certificates is None or isinstance(options.listen, str)
    if needs_tokens and options.token_file is None:
        raise BadInput(
            "callers need a credential: give token_file, or, for callers of other hosts, certificate, key and client_ca"
        )


def _tokens(options: NetworkOptions, parts: NetworkParts) -> Rotated[Tokens] | None:
    name = options.token_file
    if name is None:
        return None
    key = parts.new_token(32)
    return Rotated([parts.file(name)], lambda contents: Tokens(parts.tokens(contents[0], name), key), parts.clock)


def _given(tokens: Rotated[Tokens] | None) -> Rotated[Tokens]:
    assert tokens is not None, "`check_addresses` saw to it"
    return tokens
