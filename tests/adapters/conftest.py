"""A store and a sidecar for the adapters' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.node import EmbeddedStore
from service.sidecar import sidecar_fixture

sidecar = sidecar_fixture(dram="64MiB")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """Of which all may be pinned, since pages are pinned as long as a load lasts; whole at the end."""
    limits = kvstore.Limits(pinned_fraction=1.0)
    with kvstore.embedded(str(tmp_path / "kv"), dram="64MiB", limits=limits) as opened:
        yield opened
        opened.check()
