"""Sidecars are started on a directory that was closed, or was not; how long it takes, no test asserts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.test_restart import PLAN, stamp_is_clean
from kvstore.bench import restart_directory, restart_sidecar, sidecar
from kvstore.bench.restart_sidecar import Served, row_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("restart") / "store"
    restart_directory.build(made, PLAN, lambda _: None)
    return made


@pytest.mark.slow
def test_each_sidecar_finds_the_directory_as_the_one_before_left_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, bool]] = []
    start = sidecar.Sidecar.__init__

    def watched(self: sidecar.Sidecar, store: Any, **options: Any) -> None:
        data = Path(store["data"])
        found.append((data.name, data.exists() and stamp_is_clean(data)))
        start(self, store, **options)

    monkeypatch.setattr(sidecar.Sidecar, "__init__", watched)
    said: list[str] = []
    rows = restart_sidecar.run(directory, PLAN, 2, is_targeted=False, say=said.append)
    assert [clean for name, clean in found if name == "store"] == [True, True, False, False]
    assert [name for name, _ in found] == ["empty", *["store", "empty"] * 4], "an empty one before and after each"
    assert stamp_is_clean(directory) and not directory.with_name("empty").exists()
    assert [(row.how, row.laps, row.met) for row in rows] == [("clean", 2, None), ("killed", 2, None)]
    for row in rows:
        assert 0 < row.hello_low <= row.hello <= row.hello_high and row.hello <= row.ready
        assert row.empty > 0 and row.times_empty > 0
    assert len(said) == 4 and "after a clean end" in said[0] and "after a kill" in said[-1]


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
    served = [Served(1.0, 9.0, 0.5), Served(3.0, 5.0, 1.0), Served(1.5, 7.0, 0.5)]
    row = row_of("killed", served, is_targeted=True)
    assert (row.how, row.laps, row.hello, row.ready, row.empty, row.times_empty) == ("killed", 3, 1.5, 7.0, 0.5, 3.0)
    assert (row.hello_low, row.hello_high, row.target, row.met) == (1.0, 3.0, 2.0, True)
    slow = row_of("clean", [Served(2.1, 2.2, 1.0)], is_targeted=True)
    assert slow.met is False and slow.to_dict()["met"] is False
    console = Console(file=io.StringIO(), width=200)
    restart_sidecar.render([row, slow], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 s met" in text and "2 s missed" in text and "empty directory" in text
