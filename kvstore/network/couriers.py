"""Builds the courier: the part that brings blocks from elsewhere. Imported only if it may be needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.block.errors import BadInput
from kvstore.config import RemoteSettings, host_and_port
from kvstore.courier.courier import Courier
from kvstore.courier.dialling import GrpcPeers, channel_credentials
from kvstore.courier.directory import DirectoryAddress
from kvstore.courier.figures import Figures
from kvstore.courier.sources import RemoteWays
from kvstore.edge.tokens import read_credential
from kvstore.network.credentials import Rotated
from kvstore.network.part import pems_of
from kvstore.peers.reader import PullTransport
from kvstore.peers.serving import FrameDoor
from kvstore.peers.sockets import SocketFrameDoor, SocketPullTransport
from kvstore.peers.transport import written_address
from kvstore.service.settings import Settings
from tiering.clock import Clock
from tiering.remote.salts import NamespaceSalts
from tiering.remote.valkey import ValkeyAddress, ValkeyEngine
from tiering.remote.workers import RemoteWorkers
from tiering.remote.writes import RemoteWrites

UCX = "ucx"


Ucx = tuple[Callable[..., FrameDoor], Callable[..., PullTransport]]
"""The server and the transport of `kvstore.peers.ucx`, imported only if configured."""


def make_courier(
    settings: Settings,
    socket: str,
    tenants: Sequence[str],
    clock: Clock,
    new_token: Callable[[int], bytes],
    ucx: Ucx | None,
) -> Courier:
    """socket: the sidecar's `courier.sock`. tenants: that it works for. ucx: if that is the transport. Passwords are
    read with each connection. Raises `BadInput`, `OSError`."""
    network, remote, seal = settings.network, settings.remote, settings.network.seal
    figures = Figures(clock)
    calls: GrpcPeers | None = None
    doors: dict[str, FrameDoor] = {}
    transports: dict[str, PullTransport] = {}
    directory = None
    if network.wants_peers:
        assert network.listen is not None, "`check_network` saw to it"
        pems = pems_of(network)
        credentials = Rotated(pems, channel_credentials, clock).now if pems else None
        if network.directory is not None:
            password = _secret_of(network.directory_password_file)
            directory = DirectoryAddress.read(network.directory, lambda: password().decode())
        calls = GrpcPeers(credentials, clock)
        where = network.pull or written_address(host_and_port(network.listen, "--listen")[0], 0)
        if ucx is not None:
            host, port = host_and_port(where, "pull")
            beside = written_address(host, port + 1 if port else 0)
            doors[UCX] = ucx[0](beside, clock, new_token, seal=seal)
            transports[UCX] = ucx[1](clock, seal=seal)
        doors["sockets"] = SocketFrameDoor(where, clock, new_token, seal=seal)
        transports["sockets"] = SocketPullTransport(clock, seal=seal)
    writing = _remote(remote, figures, clock, new_token) if remote.url is not None else None
    peers = network.peers or ()
    return Courier(socket, tenants, clock, new_token, figures, calls, peers, doors, transports, directory, writing)


def _secret_of(path: str | None) -> Callable[[], bytes]:
    return lambda: read_credential(path).strip() if path is not None else b""


def _remote(settings: RemoteSettings, figures: Figures, clock: Clock, new_token: Callable[[int], bytes]) -> RemoteWays:
    try:
        address = ValkeyAddress.parse(settings.url or "")
        engine = ValkeyEngine(address, clock, _secret_of(settings.password_file))
    except (ValueError, OSError) as error:
        raise BadInput(f"remote.url: {error}") from None
    workers = RemoteWorkers(engine, clock)
    salts, writes = NamespaceSalts(engine, clock, new_token), RemoteWrites(settings.writes)
    return RemoteWays(engine, workers, salts, figures, clock, writes, int(1000 * settings.ttl))
