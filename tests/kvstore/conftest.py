"""What tests of several files ask for: a store, and a keeper of the memory of stores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tiering.dram.keeping import NAME_BYTES, KeptExtent
from workbench import Bench, bench


@pytest.fixture
def a() -> Bench:
    return bench()


class Holder:
    """A keeper in this process. What it holds when it is frozen is what the next process finds."""

    def __init__(self) -> None:
        self.kept: dict[bytes, tuple[int, int]] = {}
        self.frozen = False
        self._names = 0

    def new_name(self) -> bytes:
        self._names += 1
        return self._names.to_bytes(NAME_BYTES, "big")

    def keep(self, name: bytes, extent: int, ledger: int) -> None:
        assert name not in self.kept
        if not self.frozen:
            self.kept[name] = os.dup(extent), os.dup(ledger)

    def forget(self, name: bytes) -> None:
        if not self.frozen:
            for descriptor in self.kept.pop(name):
                os.close(descriptor)

    def handed_over(self) -> list[KeptExtent]:
        """As the next process gets it."""
        self.frozen = False
        return [KeptExtent(name, *map(os.dup, descriptors)) for name, descriptors in self.kept.items()]


@pytest.fixture
def keeper() -> Iterator[Holder]:
    one = Holder()
    yield one
    one.frozen = False
    for name in list(one.kept):
        one.forget(name)
