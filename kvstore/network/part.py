"""gRPC and a router's HTTP as a part of the edge, or, with a courier, of the transfer agent: where other nodes dial the
same address, or for a remote engine alone."""

from __future__ import annotations

import fcntl
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.config import MAX_SOCKET_BYTES, NetworkSettings, expanded, host_and_port
from kvstore.edge.process import END_SECONDS, EdgePart, Soon
from kvstore.edge.tokens import Tokens
from kvstore.edge.watch import StatusWatch
from kvstore.listeners.addresses import listening_sockets, numeric_hosts
from kvstore.listeners.http_server import HttpListener
from kvstore.network.credentials import Rotated, server_context
from kvstore.network.grpc_server import GrpcDoor, certificate_configuration, own_sockets_at
from kvstore.network.lanes import CallerLanes
from kvstore.network.links import TenantLink
from kvstore.network.query import LIMITS, QueryApp
from kvstore.network.services import Scorer
from tiering.files import Unfit, is_left_socket, remove_socket

MODE = 0o660


class UnixAddress:
    """A UNIX socket's path for a server that binds it itself: grpc would take over the path of a listening process, and
    leave the file's mode to the umask. Holds the path for this process, by a lock on a file beside it, which stays."""

    def __init__(self, path: str) -> None:
        """Raises `BadInput` if another process has it."""
        self.path = path
        if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
            raise BadInput(f"unix:{path} is longer than {MAX_SOCKET_BYTES} bytes; give a shorter path")
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._lock = os.open(f"{path}.lock", flags, 0o600)
        except OSError as error:
            raise BadInput(f"unix:{path} cannot be listened on: {error.strerror}; give another --listen") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_left_socket(Path(path)):
                os.unlink(path)
            elif os.path.lexists(path):
                raise BlockingIOError  # a process that knows no such lock
        except (OSError, Unfit) as error:
            os.close(self._lock)
            text = f"unix:{path} is listened on by another process; give another --listen"
            if isinstance(error, Unfit):
                text = f"unix:{path} is there and no socket; give another path, or remove it"
            raise BadInput(text) from None

    def bind(self, bind: Callable[[str], object]) -> None:
        """Bind it with its intended mode. No other thread may make files meanwhile."""
        before = os.umask(0o777 & ~MODE)
        try:
            bind(f"unix:{self.path}")
        finally:
            os.umask(before)
        os.chmod(self.path, MODE)

    def close(self) -> None:
        remove_socket(Path(self.path))
        os.close(self._lock)


UNIX = "unix:"


class RpcPart(EdgePart):
    """Callers identify themselves by certificates where there are some; otherwise, and on a UNIX socket, by
    tokens. Its files are looked at again by themselves."""

    def __init__(
        self,
        network: NetworkSettings,
        sockets: Mapping[str, str],
        watch: StatusWatch,
        new_token: Callable[[int], bytes],
        courier: Callable[[], Any] | None = None,
    ) -> None:
        """sockets: by tenant. courier: makes the one that brings blocks from elsewhere, if configured; it answers other
        nodes here, and knows what these hold. Raises `BadInput`, `OSError`."""
        self._network, self._sockets, self._watch = network, sockets, watch
        clock = self._clock = watch.clock
        self._door: GrpcDoor | None = None
        self._unix: UnixAddress | None = None
        self._port = 0
        self._links: dict[str, TenantLink] = {}
        self._tokens: Rotated[Tokens] | None = None
        self._certificates: Rotated[tuple[ssl.SSLContext, Any]] | None = None
        file, pems = network.token_file, pems_of(network)
        if file is not None:
            key = new_token(32)
            self._tokens = Rotated([file], lambda contents: Tokens(contents[0], file, key), clock)
        if pems:
            self._certificates = Rotated(
                pems, lambda contents: (server_context(*pems), certificate_configuration(contents)), clock
            )
        self._courier: Any = courier() if courier is not None else None

    def start(self, soon: Soon) -> Sequence[HttpListener]:
        if self._network.listen is None:
            self.said, self.line = {"network": None, "http_port": None}, "a remote engine alone"
            self._courier.start("")
            return []
        listen, http, watch, clock = self._network.listen, self._network.http, self._watch, self._clock
        listeners: list[HttpListener] = []
        is_unix, has_peers = listen.startswith(UNIX), self._courier is not None and self._network.wants_peers
        sockets = listening_sockets(*host_and_port(http, "--http"), "--http (network.http)") if http is not None else []
        self._links.update({name: TenantLink(name, path, clock) for name, path in self._sockets.items()})
        lanes, scorer = CallerLanes(clock), Scorer(watch, self._courier.holding if has_peers else None)
        certificates = self._certificates
        tokens = self._tokens if certificates is None or is_unix else None
        door = self._door = GrpcDoor(self._links, watch, tokens, lanes, clock, scorer)
        if self._network.reflection:
            door.reflect()
        if self._courier is not None and has_peers:
            door.serve_peers(self._courier.holder, has_certificates=certificates is not None)
        if is_unix:
            self._unix = UnixAddress(expanded(listen.removeprefix(UNIX)))
            self._unix.bind(door.bind)
            listen = f"{UNIX}{self._unix.path}"
        else:
            host, port = host_and_port(listen, "--listen")
            configuration = (lambda: certificates.now()[1]) if certificates is not None else None
            for one in numeric_hosts(host, port, "--listen (network.listen)"):  # grpc takes a name that it has in part
                port = door.bind(f"[{one}]:{port}" if ":" in one else f"{one}:{port}", configuration)
            listen, self._port = f"[{host}]:{port}" if ":" in host else f"{host}:{port}", port
        self.line, http_port = f"gRPC on {listen}", None
        if sockets:
            app = QueryApp(self._links, scorer, watch, lanes, self._tokens if certificates is None else None)
            context = (lambda: certificates.now()[0]) if certificates is not None else None
            listeners.append(HttpListener(sockets, app, LIMITS, clock, context=context))
            http_port = sockets[0].getsockname()[1]
            self.line += f", queries on port {http_port}"
        self.said = {"network": listen, "http_port": http_port}
        watch.start()
        door.start()
        if self._courier is not None:
            self._courier.start("" if is_unix else listen)
        return listeners

    def look(self) -> bool:
        if self._door is None:
            return False
        self._door.give_up_late()
        return self._port != 0 and self._door.callers.make_room(own_sockets_at(self._port))

    def close(self) -> None:
        if self._unix is not None:
            self._unix.close()
        if self._courier is not None:
            self._courier.close()
        if self._door is not None:
            self._door.close(END_SECONDS)
        for link in self._links.values():
            link.close()


def pems_of(network: NetworkSettings) -> list[str]:
    """The certificate, its key and the CA of callers; empty if there are none."""
    return [one for one in (network.certificate, network.key, network.client_ca) if one is not None]
