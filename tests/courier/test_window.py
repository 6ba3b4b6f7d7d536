"""A courier's reserved slots, at a real sidecar's socket: it goes on only as far as the sidecar has adopted."""

from __future__ import annotations

import weakref
from contextlib import closing, suppress
from pathlib import Path

from elsewhere.courier import PAYLOAD, SPACE, OtherNode, chain
from kvstore.block.account import HitTier, MissReason
from kvstore.client.connection import SidecarConnection, Unavailable
from kvstore.client.framing import FramedSocket
from kvstore.courier.link import CONNECT_SECONDS, ENGINE, CourierRun
from kvstore.courier.source import ReservedWindow
from kvstore.node import SystemClock
from service.sidecar import Sidecar
from tiering.errors import TierError
from tiering.frame import HEADER_BYTES
from torture.peer import come_in, opened_by


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
