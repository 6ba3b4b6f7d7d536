"""A sidecar, and a client's namespace, for those tests that ask nothing more of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore.client.handle import NamespaceHandle
from service.sidecar import Sidecar, sidecar_fixture
from torture.peer import Peer, come_in

sidecar = sidecar_fixture(dram="1MiB")


@pytest.fixture
def peer(sidecar: Sidecar) -> Iterator[Peer]:
    """A client of bare messages."""
    with closing(come_in(sidecar.path, newest=2)) as peer:
        yield peer


@pytest.fixture
def handle(sidecar: Sidecar) -> Iterator[NamespaceHandle]:
    with sidecar.opened(name="small model") as handle:
        yield handle
