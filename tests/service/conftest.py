"""A sidecar, and a client's namespace, for those tests that ask nothing more of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.handle import NamespaceHandle
from service.sidecar import Sidecar


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, dram="1MiB") as running:
        yield running


@pytest.fixture
def handle(sidecar: Sidecar) -> Iterator[NamespaceHandle]:
    with sidecar.opened(name="small model") as handle:
        yield handle
