"""Zeros that grow in place."""

from __future__ import annotations

import numpy as np
import pytest

from tiering.policies.lazy_memory import LazyRecords

PAIR = np.dtype([("name", "<i8"), ("count", "<i4")], align=True)


def test_what_is_there_stays_when_it_grows() -> None:
    records = LazyRecords(3, PAIR)
    records.array["name"][:] = (1, 2, 3)
    records.grow_to(100_000)
    assert len(records.array) == 100_000 and records.array["name"][:4].tolist() == [1, 2, 3, 0]
    assert not records.array["count"].any()
    records.array["count"][99_999] = 7
    records.grow_to(300_000)
    assert records.array["count"][99_999] == 7 and records.array["name"][:3].tolist() == [1, 2, 3]
    assert records.array.ctypes.data % 4096 == 0


def test_where_there_is_no_memory_what_was_there_stays() -> None:
    records = LazyRecords(3, PAIR)
    records.array["name"][:] = (1, 2, 3)
    with pytest.raises(OSError):
        records.grow_to(1 << 55)
    assert records.array["name"].tolist() == [1, 2, 3]
