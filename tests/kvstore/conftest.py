"""A store for those tests that ask nothing more of it."""

from __future__ import annotations

import pytest

from workbench import Bench, bench


@pytest.fixture
def a() -> Bench:
    return bench()
