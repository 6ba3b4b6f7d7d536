"""The simulated disk itself: what is synced survives every crash, what is not may go, stay, or go in part.

That it takes away all that it may is shown by test_nvme_syncs: without any one sync it breaks a promise.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.disk import PAGE_BYTES, SECTOR_BYTES, SimulatedFiles

A = "a.slab"
PAGES = 4
IN_PAGE = PAGE_BYTES // SECTOR_BYTES
SEEDS = range(60)


def page(number: int, pages: int = 1) -> memoryview:
    return memoryview(bytes([number]) * (pages * PAGE_BYTES))


def disk_with_slab() -> SimulatedFiles:
    files = SimulatedFiles()
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
