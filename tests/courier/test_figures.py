"""A courier at a real sidecar: what it reports is counted once, however many tenants it has a connection for, and it
goes on only as far as the sidecar has adopted."""

from __future__ import annotations

import secrets
import weakref
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest

from elsewhere.courier import PAYLOAD, SPACE, OtherNode, chain
from kvstore.block.account import HitTier, MissReason
from kvstore.client.connection import SidecarConnection, Unavailable
from kvstore.client.framing import FramedSocket
from kvstore.courier import courier as courier_module
from kvstore.courier.courier import Courier
from kvstore.courier.figures import Figures
from kvstore.courier.link import CONNECT_SECONDS, ENGINE, CourierRun
from kvstore.courier.sources import ReservedWindow
from kvstore.elsewhere import desk as told_module
from kvstore.elsewhere.desk import FiguresTold
from kvstore.node import SystemClock
from kvstore.protocol.courier import CourierFigures
from kvstore.service.sessions import ClientState
from service.sidecar import Sidecar
from tiering.errors import TierError
from tiering.frame import HEADER_BYTES
from torture.peer import come_in, opened_by
from waiting import wait_until

TENANTS = ("default", "red", "blue")


def test_what_a_courier_of_several_tenants_reports_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, tell = Counter[bytes](), FiguresTold.tell

    def counted(self: FiguresTold, caller: ClientState, figures: CourierFigures) -> None:
        tell(self, caller, figures)
        told[caller.keys.tenant] += 1

    monkeypatch.setattr(FiguresTold, "tell", counted)
    for module in (courier_module, told_module):  # each connection reports at once, and again and again
        monkeypatch.setattr(module, "TOLD_SECONDS", 0.0)
    clock = SystemClock()
    figures = Figures(clock)
    figures.came(b"another node", 3, 3 * 8192)
    figures.begins(2)
    with Sidecar(tmp_path, couriers=True) as sidecar:
        for tenant in TENANTS:
            sidecar.store.tenant_keys(tenant)
        courier = Courier(str(sidecar.courier_path), TENANTS, clock, secrets.token_bytes, figures)
        courier.start("")
        try:
            wait_until(lambda: len(told) == len(TENANTS) and min(told.values()) > 1)
            status = sidecar.admin.facts().elsewhere
            assert status is not None and status.couriers == len(TENANTS)
            assert (status.fetched_blocks, status.fetched_bytes, status.fetching) == (3, 3 * 8192, 2)
        finally:
            courier.close()
        desk = sidecar.desk
        assert desk is not None
        wait_until(lambda: desk.status().fetched_blocks == 0)  # a courier that is gone is not counted


def test_a_courier_stops_where_the_sidecar_adopted_fewer_than_asked(tmp_path: Path) -> None:
    """The namespace is dropped while a source still sends: no slot is filled that may be another client's by then."""
    keys, clock = chain(4), SystemClock()
    with Sidecar(tmp_path, couriers=True) as sidecar, closing(come_in(sidecar.path)) as engine:
        opened_by(engine)
        wire = FramedSocket(str(sidecar.courier_path), ENGINE, b"", clock, CONNECT_SECONDS, tenant="default")
        run = CourierRun("default", SidecarConnection(wire, clock))
        (space,) = run.list_spaces()
        abandoned = ReservedWindow(space, space.reserve(None, keys, 0), keys, HitTier.PEER)
        abandoned.returned()
        of_abandoned = weakref.ref(abandoned)
        del abandoned
        assert of_abandoned() is None, "its slots would stay mapped until the garbage collector comes"
        window = ReservedWindow(space, space.reserve(None, keys, 0), keys, HitTier.PEER)
        other, payload = OtherNode(sidecar.store.tenant_keys("default"), SPACE, PAYLOAD), bytes(PAYLOAD[0])
        frames = [memoryview(other.header(0, keys, at, payload) + payload) for at in range(window.blocks)]
        assert window.blocks == 4 and len(frames[0]) == HEADER_BYTES + PAYLOAD[0]

        assert window.take(frames[0], is_right=True) and window.adopted == 1
        with suppress(TierError):  # it would wait for the slots that are still lent
            sidecar.core.drop(0, 0.0)
        taken = [window.take(one, is_right=True) for one in frames[1:]]
        window.adopt()
        assert isinstance(window.failed, Unavailable) and window.failed.reason is MissReason.DISABLED
        assert not window.take(frames[3], is_right=True), "its source is told to stop"
        assert window.adopted <= 1 and not space.match(keys), taken
        window.returned()
        run.close()
