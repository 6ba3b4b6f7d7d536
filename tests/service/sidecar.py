"""A sidecar inside the test's process, with a real store and a real socket."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import patience
from kvstore.block.codec import codec_named
from kvstore.client.framing import FramedSocket
from kvstore.client.handle import Lease, NamespaceHandle
from kvstore.client.sidecar_store import SidecarStore, open_sidecar
from kvstore.client.socket_door import CallLimits
from kvstore.elsewhere.desk import CourierDesk
from kvstore.node import EmbeddedStore, SystemClock
from kvstore.protocol import messages as m
from kvstore.service.admin import Admin
from kvstore.service.connections import DoorLimits
from kvstore.service.dispatch import Handlers
from kvstore.service.local_door import LocalDoor
from kvstore.service.settings import StoreSettings
from workbench import MODEL, open_at, small_layout


def patient(store: SidecarStore) -> SidecarStore:
    """A store whose answers may be as late as a busy machine makes them; a test of deadlines sets its own. Also in a
    process that a test starts: nothing else is patient there."""
    patience.wait_for_leases()
    store._door._limits = CallLimits(connect=10.0, match=10.0, lease=10.0)
    return store


def number_of(lease: Lease) -> int:
    """The sidecar's number of a client's lease."""
    return lease._store_name[1]


def wire_to(path: Path | str, seconds: float = 20.0) -> FramedSocket:
    """A client's connection, which takes any verb."""
    return FramedSocket(str(path), "test", b"", SystemClock(), seconds)


def asked(path: Path | str, *verbs: m.Verb) -> list[m.Answer]:
    """What is answered there, over a connection of its own."""
    with closing(wire_to(path)) as wire:
        return [wire.call(verb, 20.0).answer for verb in verbs]


class Sidecar:
    """Close it, or use it as a context."""

    def __init__(
        self, directory: Path, door: DoorLimits | None = None, *, couriers: bool = False, **options: Any
    ) -> None:
        self.path = directory / "kvstore.sock"
        given = {"dram": "16MiB", **options}
        self.store: EmbeddedStore = open_at(directory / "kv", **given)
        self.core = self.store._store
        self.handlers = Handlers(self.core, 1, secrets.token_bytes, self.store.names)
        self.sessions, self.counting, self.whatif = self.handlers.sessions, self.handlers.counting, self.handlers.whatif
        self.told, self.prefixes = self.handlers.told, self.handlers.prefixes
        self.door = LocalDoor(self.handlers, door or DoorLimits(), self.store.faults)
        self.door.listen(
            self.path,
            self.store.tenant_keys(self.store.tenant),
            renew=lambda: self.store.tenant_keys(self.store.tenant),
        )
        self.desk = CourierDesk(self.store, self.sessions, self.handlers) if couriers else None
        self.courier_path = directory / "courier.sock"
        if self.desk is not None:
            self.door.listen(self.courier_path, self.desk, 0o600)
        self.admin = Admin(self.store, self.handlers, self.door, StoreSettings())
        self.admin_path = directory / "admin.sock"
        self.door.listen(self.admin_path, self.admin.serve, 0o600, is_operator=True)
        self.observe_path = directory / "observe.sock"
        self.door.listen(self.observe_path, self.admin.observe)
        self.door.start()

    def client(self, session: str | None = None, engine: str = "t") -> SidecarStore:
        token, clock = session or secrets.token_hex(16), SystemClock()
        return patient(open_sidecar(str(self.path), codecs=codec_named, clock=clock, session=token, engine=engine))

    @contextmanager
    def opened(self, **options: Any) -> Iterator[NamespaceHandle]:
        """A namespace of a client's, by default of the small layout."""
        with self.client() as store:
            yield store.namespace(**{"model": MODEL, "layout": small_layout(), **options})

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.door.close(10)
        self.store.check()
        if self.desk is not None:
            self.desk.check()
        self.store.close()


def sidecar_fixture(**options: Any) -> Any:
    """A fixture for a module or a folder: a sidecar with these options for each test."""

    @pytest.fixture
    def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
        with Sidecar(tmp_path, **options) as running:
            yield running

    return sidecar
