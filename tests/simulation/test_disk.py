"""The simulated disk itself: what is synced survives every crash, what is not may go, stay, or go in part."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.disk import PAGE_BYTES, SECTOR_BYTES, Call, SimulatedFiles
from simulation.power import Power, PowerLoss

A = "a.slab"
PAGES = 4
IN_PAGE = PAGE_BYTES // SECTOR_BYTES
SEEDS = range(60)
CALLS: tuple[Call, ...] = ("read", "write", "sync", "create", "remove")


def page(number: int, pages: int = 1) -> memoryview:
    return memoryview(bytes([number]) * (pages * PAGE_BYTES))


def disk_with_slab(power: Power | None = None) -> SimulatedFiles:
    files = SimulatedFiles(power)
    files.create(A, PAGES * PAGE_BYTES)
    return files


def contents(files: SimulatedFiles) -> bytes:
    into = bytearray(PAGES * PAGE_BYTES)
    files.read(A, 0, memoryview(into))
    return bytes(into)


def after_crashes(prepare: Callable[[SimulatedFiles], object]) -> list[bytes]:
    """What is on the disk after the same work and, each time, another crash."""
    found = []
    for seed in SEEDS:
        files = disk_with_slab()
        prepare(files)
        files.crash(random.Random(seed))
        assert files.image(A) == files.durable(A) == contents(files)
        found.append(contents(files))
    return found


def pieces(content: bytes, size_bytes: int) -> list[bytes]:
    return [content[start : start + size_bytes] for start in range(0, len(content), size_bytes)]


# Crashes --------------------------------------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES), st.integers(1, 255)),
            st.sampled_from(["sync", "failed sync", "failed write", "crash", "reopen"]),
        ),
        max_size=25,
    ),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=80)
def test_every_sector_holds_its_synced_content_or_that_of_a_write_since(
    steps: list[tuple[int, int, int] | str], seed: int
) -> None:
    chance, files = random.Random(seed), disk_with_slab()
    sectors = PAGES * IN_PAGE
    seen = [0] * sectors  # what a read gives
    allowed = [{0} for _ in range(sectors)]  # what a crash may leave
    lost: set[int] = set()  # sectors whose newest write had a failed sync
    for step in [*steps, "crash"]:
        if isinstance(step, tuple):
            first, count, value = step
            count = min(count, PAGES - first)
            files.write(A, first * PAGE_BYTES, page(value, count))
            for sector in range(first * IN_PAGE, (first + count) * IN_PAGE):
                seen[sector] = value
                allowed[sector].add(value)
            lost -= set(range(first * IN_PAGE, (first + count) * IN_PAGE))
        elif step == "sync":
            files.sync(A)
            for sector in set(range(sectors)) - lost:
                allowed[sector] = {seen[sector]}
        elif step == "failed sync":
            files.fail("sync", 1, OSError(errno.EIO, "failed"))
            with pytest.raises(OSError):
                files.sync(A)
            lost |= {sector for sector in range(sectors) if len(allowed[sector]) > 1}
        elif step == "failed write":
            files.fail("write", 1, OSError(errno.EIO, "failed"))
            with pytest.raises(OSError):
                files.write(A, 0, page(200))
            for sector in range(IN_PAGE):
                seen[sector] = 200 if sector % 2 == 0 else seen[sector]
                allowed[sector].add(seen[sector])
            lost -= set(range(IN_PAGE))
        elif step == "crash":
            files.crash(chance)
            found = [piece[0] for piece in pieces(contents(files), SECTOR_BYTES)]
            assert all(piece == piece[:1] * SECTOR_BYTES for piece in pieces(contents(files), SECTOR_BYTES))
            assert all(value in values for value, values in zip(found, allowed, strict=True))
            seen, allowed, lost = found, [{value} for value in found], set()
        else:
            files.close()
            files.reopen()
        assert [piece[0] for piece in pieces(files.image(A), SECTOR_BYTES)] == seen


def test_what_is_not_synced_may_go_and_may_stay_and_may_be_torn() -> None:
    found = after_crashes(lambda files: files.write(A, 0, page(1)))
    first = [content[:PAGE_BYTES] for content in found]
    assert bytes(PAGE_BYTES) in first and bytes(page(1)) in first
    assert any(len(set(content)) == 2 for content in first)
    assert all(content[PAGE_BYTES:] == bytes((PAGES - 1) * PAGE_BYTES) for content in found)


def test_it_tears_at_sectors_in_some_crashes_and_at_pages_in_others() -> None:
    found = after_crashes(lambda files: files.write(A, 0, page(1, PAGES)))
    torn = [content for content in found if len(set(content)) == 2]
    by_page = [all(len(set(piece)) == 1 for piece in pieces(content, PAGE_BYTES)) for content in torn]
    assert True in by_page and False in by_page
    assert all(len(set(piece)) == 1 for content in torn for piece in pieces(content, SECTOR_BYTES))


def test_a_crash_is_repeated_by_its_seed_and_settles_everything() -> None:
    def run(seed: int) -> bytes:
        files = disk_with_slab()
        for value in range(1, 6):
            files.write(A, 0, page(value, PAGES))
        files.crash(random.Random(seed))
        once = contents(files)
        files.crash(random.Random(seed + 1))
        assert contents(files) == once, "nothing is left to lose"
        return once

    assert [run(seed) for seed in range(5)] == [run(seed) for seed in range(5)]
    assert len({run(seed) for seed in range(5)}) > 1


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_a_planned_call_fails_and_no_other(call: Call) -> None:
    outcomes = []
    files = disk_with_slab()
    error = OSError(errno.EIO, "planned")
    files.fail(call, 2, error)
    files.fail(call, 3, error)
    for number in range(1, 5):
        name = f"{number}.slab"
        if call != "create":
            files.create(name, PAGE_BYTES)
        uses: dict[Call, tuple[Any, ...]] = {
            "read": (files.read, name, 0, memoryview(bytearray(PAGE_BYTES))),
            "write": (files.write, name, 0, page(1)),
            "sync": (files.sync, name),
            "create": (files.create, name, PAGE_BYTES),
            "remove": (files.remove, name),
        }
        use, *arguments = uses[call]
        try:
            use(*arguments)
            outcomes.append("done")
        except OSError as caught:
            assert caught is error
            outcomes.append("failed")
    assert outcomes == ["done", "failed", "failed", "done"]
    there = {"create": [1, 4], "remove": [2, 3]}.get(call, [1, 2, 3, 4])
    assert sorted(files.sizes()) == sorted([A, *(f"{number}.slab" for number in there)])


def test_a_failed_write_leaves_a_part_of_it() -> None:
    files = disk_with_slab()
    files.fail("write", 1, OSError(errno.EIO, "planned"))
    with pytest.raises(OSError):
        files.write(A, 0, page(1, 2))
    assert {piece[0] for piece in pieces(contents(files)[: 2 * PAGE_BYTES], SECTOR_BYTES)} == {0, 1}
    assert files.durable(A) == bytes(PAGES * PAGE_BYTES)


def test_after_a_failed_sync_a_good_one_helps_only_what_is_written_again() -> None:
    def prepare(files: SimulatedFiles) -> None:
        files.write(A, 0, page(1, 3))
        files.fail("sync", 1, OSError(errno.EIO, "planned"))
        with pytest.raises(OSError):
            files.sync(A)
        assert contents(files)[: 3 * PAGE_BYTES] == page(1, 3), "it can be read all the same"
        files.write(A, PAGE_BYTES, page(2))
        files.sync(A)
        files.write(A, 2 * PAGE_BYTES, page(3))

    found = after_crashes(prepare)
    assert {content[0] for content in found} == {0, 1}, "not written again: lost or not"
    assert {content[PAGE_BYTES : 2 * PAGE_BYTES] for content in found} == {bytes(page(2))}
    assert {content[2 * PAGE_BYTES] for content in found} == {0, 1, 3}, "written again and not synced"


# Losses of power ------------------------------------------------------------------------------------------------------


def crashed(steps: int, use: Callable[[SimulatedFiles], object]) -> list[SimulatedFiles]:
    """Disks on which the power went with the given step after the preparation, each after another crash."""
    found = []
    for seed in SEEDS:
        power = Power()
        files = disk_with_slab(power)
        files.write(A, 0, page(1))
        files.sync(A)
        power.back(last=steps)
        with pytest.raises(PowerLoss):
            use(files)
        with pytest.raises(PowerLoss):
            files.write(A, 0, page(9))  # comes too late
        with pytest.raises(PowerLoss):
            files.create("late.slab", PAGE_BYTES)
        files.crash(random.Random(seed))
        power.back()
        assert "late.slab" not in files.sizes()
        assert A not in files.sizes() or 9 not in files.image(A)
        found.append(files)
    return found


def test_a_write_that_is_cut_may_arrive_in_part() -> None:
    firsts = [files.image(A)[:PAGE_BYTES] for files in crashed(1, lambda files: files.write(A, 0, page(2)))]
    assert {bytes(page(1)), bytes(page(2))} < set(firsts) and all(set(first) <= {1, 2} for first in firsts)


def test_a_sync_that_is_cut_has_made_any_part_durable() -> None:
    def use(files: SimulatedFiles) -> None:
        files.write(A, 0, page(2))
        files.sync(A)

    firsts = [files.image(A)[:PAGE_BYTES] for files in crashed(2, use)]
    assert {bytes(page(1)), bytes(page(2))} < set(firsts) and all(set(first) <= {1, 2} for first in firsts)


def test_a_create_that_is_cut_leaves_nothing_or_zeros() -> None:
    found = crashed(1, lambda files: files.create("b.slab", 2 * PAGE_BYTES))
    assert {files.sizes().get("b.slab") for files in found} == {None, 2 * PAGE_BYTES}
    assert all(files.image("b.slab") == bytes(2 * PAGE_BYTES) for files in found if "b.slab" in files.sizes())


def test_a_remove_that_is_cut_leaves_all_or_nothing() -> None:
    found = crashed(1, lambda files: files.remove(A))
    assert {tuple(files.sizes()) for files in found} == {(), (A,)}
    assert all(files.image(A)[:PAGE_BYTES] == page(1) for files in found if files.sizes())
