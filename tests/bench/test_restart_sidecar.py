"""A sidecar that does not find all, and the row of those that do; test_restart runs these."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bench.test_restart import PLAN
from kv_bench import restart_directory, restart_sidecar
from kv_bench.restart_sidecar import StartTimes, row_of
from kvstore.bench.row import Target


def test_a_sidecar_that_does_not_find_all_is_no_measurement(tmp_path: Path) -> None:
    copy = tmp_path / "store"
    restart_directory.build(copy, PLAN, lambda _: None)
    (last,) = sorted((copy / "nvme").glob("*.slab"))[-1:]
    with last.open("r+b") as slab:
        slab.write(bytes(4096))  # one of its two headers
        slab.seek(-4096, io.SEEK_END)
        slab.write(bytes(4096))
    with pytest.raises(AssertionError, match="of 700 blocks are back"):
        restart_sidecar.run(copy, PLAN, 1, is_targeted=False, say=lambda _: None)


def test_the_row_is_of_medians_and_judged_by_the_hello() -> None:
    served = [StartTimes(1.0, 9.0, 0.5), StartTimes(3.0, 5.0, 1.0), StartTimes(1.5, 7.0, 0.5)]
    row = row_of("killed", served, is_targeted=True)
    assert (row["how"], row.samples, row.value, row["ready"], row["limit"], row["ratio"]) == (
        "killed",
        3,
        1.5,
        7.0,
        0.5,
        3.0,
    )
    assert (row["low"], row["high"], row.target, row.met) == (1.0, 3.0, Target(2.0, is_least=False, of="value"), True)
    slow = row_of("clean", [StartTimes(2.1, 2.2, 1.0)], is_targeted=True)
    assert slow.met is False and slow.to_dict()["met"] is False
