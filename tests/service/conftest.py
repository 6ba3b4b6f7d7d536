"""A sidecar for those tests that ask nothing more of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.sidecar import Sidecar


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, dram="1MiB") as running:
        yield running
