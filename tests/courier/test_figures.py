"""What a courier reports is counted once by its sidecar, however many tenants it has a connection for."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path

import pytest

from kvstore.courier import courier as courier_module
from kvstore.courier.courier import Courier
from kvstore.courier.figures import Figures
from kvstore.elsewhere import desk as told_module
from kvstore.elsewhere.desk import FiguresTold
from kvstore.node import SystemClock
from kvstore.protocol.courier import CourierFigures
from kvstore.service.sessions import ClientState
from service.sidecar import Sidecar
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
