"""Files that are removed, moved or cut while a sidecar uses them: no durable put is acknowledged into a file that no
start would find. What can be written again from what is open is; else puts are `tier_down`, `stat` says what is gone,
and puts are durable again once the directory is there, or after a restart.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.block.account import MissReason
from kvstore.client.handle import NamespaceHandle
from service.test_serve import ended, opened, serving
from service.test_shortages import stat
from waiting import wait_until
from workbench import put_prompt, read_prompt, small_layout

LAYOUT = small_layout()
FLAGS = ["--nvme", "16MiB"]
PUTS = 200
AGAIN_SECONDS = 5.0


def put(handle: NamespaceHandle, number: int) -> MissReason | None:
    return put_prompt(handle, number, 1, durability="disk").reason


def is_right(handle: NamespaceHandle, number: int) -> bool:
    return read_prompt(handle, number, 1).blocks == 1


@contextmanager
def running(directory: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], NamespaceHandle]]:
    """A sidecar that is ready, and a client's namespace."""
    with serving(directory, *FLAGS, *flags) as (process, said), opened(said) as handle:
        wait_until(lambda: stat(directory).state == "ready")
        yield process, handle


def absent_after_a_restart(directory: Path, numbers: list[int]) -> list[int]:
    with running(directory) as (process, handle):
        absent = [number for number in numbers if not is_right(handle, number)]
        assert put(handle, 9_999) is None, "and puts are durable"
        ended(process)
    return absent


def slabs(directory: Path) -> list[Path]:
    return sorted((directory / "kv" / "nvme").glob("*.slab"))


def remove_slabs(directory: Path) -> None:
    for path in slabs(directory):
        path.unlink()


def remove_nvme(directory: Path) -> None:
    shutil.rmtree(directory / "kv" / "nvme")


def make_nvme_again(directory: Path) -> None:
    (directory / "kv" / "nvme").mkdir(mode=0o700)


def move_away(directory: Path) -> None:
    (directory / "kv").rename(directory / "elsewhere")


def move_back(directory: Path) -> None:
    (directory / "elsewhere").rename(directory / "kv")


def remove_keys(directory: Path) -> None:
    (directory / "kv" / "keys").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("remove", [remove_slabs, remove_keys])
def test_what_is_removed_and_can_be_written_again_is(tmp_path: Path, remove: Callable[[Path], None]) -> None:
    with running(tmp_path) as (process, handle):
        before = [number for number in range(PUTS // 2) if put(handle, number) is None]
        remove(tmp_path)
        after = [number for number in range(PUTS // 2, PUTS) if put(handle, number) is None]
        assert (len(before), len(after)) == (PUTS // 2, PUTS // 2)
        assert put(handle, 0) is None, "and what NVMe holds already"
        status, log = ended(process)
    assert status == 0
    assert [line for line in log if "written again" in line["message"]], "the operator is told"
    assert absent_after_a_restart(tmp_path, before + after) == []


@pytest.mark.slow
@pytest.mark.parametrize(("remove", "bring_back"), [(remove_nvme, make_nvme_again), (move_away, move_back)])
def test_nothing_is_acknowledged_while_the_directory_is_gone(
    tmp_path: Path, remove: Callable[[Path], None], bring_back: Callable[[Path], None]
) -> None:
    with running(tmp_path, "--http", "127.0.0.1:0") as (process, handle):
        before = [number for number in range(PUTS // 2) if put(handle, number) is None]
        remove(tmp_path)
        assert {put(handle, number) for number in (0, *range(PUTS // 2, PUTS))} == {MissReason.TIER_DOWN}
        assert is_right(handle, 0), "what is open is read"
        began = time.monotonic()
        bring_back(tmp_path)
        facts = stat(tmp_path)
        assert facts.state == "degraded" and "files gone" in facts.health, facts.health
        wait_until(lambda: put(handle, PUTS) is None)
        assert time.monotonic() - began < AGAIN_SECONDS
        assert stat(tmp_path).health == "ok"
        after = [number for number in range(PUTS + 1, 2 * PUTS) if put(handle, number) is None]
        assert len(after) == PUTS - 1
        assert ended(process)[0] == 0
    assert absent_after_a_restart(tmp_path, [*before, PUTS, *after]) == []


@pytest.mark.slow
@pytest.mark.parametrize("remove", [remove_nvme, lambda directory: shutil.rmtree(directory / "kv")])
def test_after_a_restart_without_the_directory_puts_are_durable(tmp_path: Path, remove: Callable[[Path], None]) -> None:
    with running(tmp_path) as (process, handle):
        assert {put(handle, number) for number in range(PUTS // 2)} == {None}
        remove(tmp_path)
        after = [number for number in range(PUTS // 2, PUTS) if put(handle, number) is None]
        assert ended(process)[0] == 0
    assert absent_after_a_restart(tmp_path, after) == []


@pytest.mark.slow
def test_another_file_under_a_slabs_name_is_left_alone_and_said(tmp_path: Path) -> None:
    with running(tmp_path) as (process, handle):
        assert put(handle, 0) is None
        path = slabs(tmp_path)[-1]
        copy = path.with_suffix(".copy")
        shutil.copy2(path, copy)
        copy.rename(path)
        assert put(handle, 1) is MissReason.TIER_DOWN and put(handle, 0) is MissReason.TIER_DOWN
        (fault,) = stat(tmp_path).faults
        assert fault.kind == "files gone" and path.name in fault.detail and "move it away" in fault.detail
        path.unlink()
        wait_until(lambda: put(handle, 1) is None)
        ended(process)
    assert absent_after_a_restart(tmp_path, [0, 1]) == [], "it was written again from what was open"


@pytest.mark.slow
def test_a_slab_that_was_cut_acknowledges_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as (process, handle):
        assert put(handle, 0) is None
        with slabs(tmp_path)[-1].open("r+b") as slab:
            slab.truncate(8192)
        assert put(handle, 0) is MissReason.TIER_DOWN
        (fault,) = stat(tmp_path).faults
        assert "8192" in fault.detail
        ended(process)
