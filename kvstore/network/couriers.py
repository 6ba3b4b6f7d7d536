"""Builds the courier of the network process. Imported only if it may be needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.block.identity import NodeIdentity
from kvstore.config import host_and_port
from kvstore.courier.announcing import RemoteWriting
from kvstore.courier.courier import Courier, CourierParts
from kvstore.courier.directory import DirectoryAddress, ValkeyDirectory
from kvstore.courier.figures import Figures, OncePerKind
from kvstore.courier.remote_source import RemoteWays
from kvstore.network.credentials import Rotated, SourceFile
from kvstore.network.dialling import GrpcPeers, channel_credentials
from kvstore.network.services import HeldElsewhere
from kvstore.peers.door import SocketFrameDoor
from kvstore.peers.sockets import SocketPullTransport
from kvstore.peers.transport import FrameDoor, PullTransport, written_address
from kvstore.pool.announcer import Announcer
from kvstore.pool.directory import NodeEntry
from kvstore.pool.members import AliveTable
from kvstore.pool.speeds import SpeedBook
from tiering.clock import Clock
from tiering.remote.salts import NamespaceSalts
from tiering.remote.valkey import ValkeyAddress, ValkeyEngine
from tiering.remote.workers import RemoteWorkers
from tiering.remote.writes import RemoteWrites

UCX = "ucx"


@dataclass(frozen=True, slots=True)
class UcxWays:
    """`kvstore.peers.ucx`, imported only if configured: its server and its transport."""

    door: Callable[..., FrameDoor]
    transport: Callable[..., PullTransport]


@dataclass(frozen=True, slots=True)
class CourierSettings:
    """From `NetworkSettings` and `RemoteSettings`. listen: of gRPC; None without other nodes. ucx: if that is the
    transport. The passwords are read with each connection."""

    socket: str
    tenants: tuple[str, ...]
    listen: tuple[str, int] | None
    peers: tuple[str, ...] = ()
    directory: str | None = None
    directory_password: Callable[[], bytes] = bytes
    pull: str | None = None
    seal: str = "auto"
    ucx: UcxWays | None = None
    remote: str | None = None
    remote_password: Callable[[], bytes] = bytes
    writes: str = "all"
    ttl: float = 0.0


class NetworkCourier:
    """`CourierBeside`."""

    def __init__(self, courier: Courier, *, has_peers: bool) -> None:
        self._courier = courier
        self._has_peers = has_peers

    @property
    def service(self) -> Any:
        return self._courier.holder if self._has_peers else None

    def holding(
        self, tenant: str, namespace: str, keys: Sequence[bytes], seconds: float, *, are_own: bool
    ) -> HeldElsewhere:
        found = self._courier.holders(tenant, bytes.fromhex(namespace), keys, seconds, are_own=are_own)
        return HeldElsewhere({one.node.hex(): (one.blocks, str(one.tier)) for one in found.holders}, found.left_out)

    def start(self, address: str) -> None:
        self._courier.start(address)

    def close(self) -> None:
        self._courier.close()


def make_courier(
    settings: CourierSettings, files: list[SourceFile] | None, clock: Clock, new_token: Callable[[int], bytes]
) -> NetworkCourier:
    """files: of the certificate, its key and the CA of nodes; None on loopback. Raises `BadInput`, `OSError`."""
    figures, told = Figures(SpeedBook()), OncePerKind(clock)
    has_peers = bool(settings.peers) or settings.directory is not None
    calls: GrpcPeers | None = None
    doors: dict[str, FrameDoor] = {}
    transports: dict[str, PullTransport] = {}
    directory = None
    if has_peers:
        assert settings.listen is not None, "`check_network` saw to it"
        credentials = Rotated(files, channel_credentials, clock) if files is not None else None
        if settings.directory is not None:
            directory = _directory(settings, clock)
        calls = GrpcPeers(credentials, clock)
        where = settings.pull or written_address(settings.listen[0], 0)
        if settings.ucx is not None:
            host, port = host_and_port(where, "pull")
            beside = written_address(host, port + 1 if port else 0)
            doors[UCX] = settings.ucx.door(beside, clock, new_token, seal=settings.seal)
            transports[UCX] = settings.ucx.transport(clock, seal=settings.seal, checks_beside=True)
        doors["sockets"] = SocketFrameDoor(where, clock, new_token, seal=settings.seal)
        transports["sockets"] = SocketPullTransport(clock, seal=settings.seal, checks_beside=True)
    parts = CourierParts(
        settings.socket,
        settings.tenants,
        clock,
        new_token,
        figures,
        told,
        calls,
        settings.peers,
        doors,
        transports,
        directory,
        _remote(settings, figures, told, clock, new_token) if settings.remote is not None else None,
    )
    return NetworkCourier(Courier(parts), has_peers=has_peers)


def _directory(
    settings: CourierSettings, clock: Clock
) -> Callable[[NodeIdentity, Callable[[], NodeEntry], AliveTable, Announcer], ValkeyDirectory]:
    assert settings.directory is not None
    address = DirectoryAddress.read(settings.directory)

    def make(
        here: NodeIdentity, entry: Callable[[], NodeEntry], table: AliveTable, announcer: Announcer
    ) -> ValkeyDirectory:
        password = settings.directory_password
        return ValkeyDirectory(address, here, entry, table, announcer, clock, lambda: password().decode())

    make(NodeIdentity(), lambda: NodeEntry(bytes(16), bytes(8), ""), AliveTable(NodeIdentity()), Announcer())
    return make


def _remote(
    settings: CourierSettings, figures: Figures, told: OncePerKind, clock: Clock, new_token: Callable[[int], bytes]
) -> RemoteWriting:
    assert settings.remote is not None
    try:
        address = ValkeyAddress.parse(settings.remote)
        engine = ValkeyEngine(address, clock, settings.remote_password)
    except (ValueError, OSError) as error:
        raise BadInput(f"remote.url: {error}") from None
    workers = RemoteWorkers(engine, clock)
    ways = RemoteWays(engine, workers, NamespaceSalts(engine, clock, new_token), figures, told, clock)
    return RemoteWriting(ways, RemoteWrites(settings.writes), int(1000 * settings.ttl))
