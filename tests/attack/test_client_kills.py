"""Clients of a sidecar are killed and stopped in the middle of copies and fills, and sidecars under their clients.

`make torture ARGS="--clients 2000 --restarts 50"` runs the same for longer.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from kvstore.block.account import Account
from kvstore.client.handle import Loaded
from tiering.tier import SLOT_BITS
from torture.clients import CROWDED, LEASE_SECONDS, clients, nursery, restarts
from torture.engine import DEPTH, LETTERS, Client, EnginePages
from torture.nursery import Nursery
from torture.outside import Sidecar

SEED = 1


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


def test_sixteen_clients_are_killed_or_stopped(children: Nursery) -> None:
    sums = clients(children, 16, SEED)
    assert sums["kills"] == 16 and sums["times nothing was left"] == 1, sums
    for what in ("gets", "raw bytes compared", "blocks stored", "resumes", "evictions from memory"):
        assert sums[what] > 0, (what, sums)


def test_two_sidecars_are_killed_under_their_clients(children: Nursery) -> None:
    sums = restarts(children, 2, SEED)
    assert sums["restarts"] == 2 and sums["times nothing was left"] == 2, sums
    assert sums["calm: found there again"] == sums["calm: blocks in memory before"] > 0, sums


# The judge ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[tuple[Sidecar, Client, list[str]]]:
    """A client in this process."""
    before = signal.getsignal(signal.SIGCONT)
    said: list[str] = []

    def say(*words: object) -> None:
        said.append(" ".join(map(str, words)))

    with Sidecar(tmp_path, {**CROWDED, "nvme": "off"}, LEASE_SECONDS) as sidecar:
        one = Client(say, sidecar.socket, Random(SEED), ["small"], ["small"], drops=False)  # type: ignore[arg-type]
        try:
            yield sidecar, one, said
        finally:
            one.store.close()
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGCONT, before)


def test_a_byte_that_changes_under_a_lease_is_noticed(judged: tuple[Sidecar, Client, list[str]]) -> None:
    sidecar, one, said = judged
    for letters in LETTERS:
        one.spaces["small"].put(letters)
    held = one.take()
    assert held is not None
    one.compare_frames(held)
    assert said[-1].startswith("kept ")
    place = held.lease.reply.places[0][1]
    lent = one.door._run
    assert lent is not None
    extent, frame_bytes = lent.readable[place >> SLOT_BITS]
    path = next(path for path in memory_of(sidecar.pid) if begins_like(path, extent.view))
    with open(path, "r+b", buffering=0) as memory:
        memory.seek((place & (1 << SLOT_BITS) - 1) * frame_bytes + frame_bytes // 2)
        byte = memory.read(1)
        memory.seek(-1, os.SEEK_CUR)
        memory.write(bytes([byte[0] ^ 4]))
    with pytest.raises(AssertionError, match="1 words of frame 1 changed under a lease"):
        one.compare_frames(held)
    with pytest.raises(AssertionError, match="a get under a lease ended as corrupt"):
        one.copy(held)


def memory_of(pid: int) -> list[str]:
    """Paths by which a process's shared memory can be opened; what it closes meanwhile is left out."""
    paths = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            path = f"/proc/{pid}/fd/{name}"
            paths += [path] if "kv-extent" in os.readlink(path) else []
    return paths


def begins_like(path: str, view: memoryview) -> bool:
    with open(path, "rb") as memory:
        return memory.read(1 << 20) == bytes(view[: 1 << 20])


def test_other_bytes_and_a_touched_page_are_noticed() -> None:
    pages = EnginePages("small")
    pages.write(LETTERS[0])
    whole = Loaded(DEPTH * 64, Account.of([]), None)
    assert pages.compare(LETTERS[0], whole) == DEPTH * (256 << 10)
    with pytest.raises(AssertionError, match="elements of block 1, layer 0 are wrong"):
        pages.compare(LETTERS[2], whole)
    with pytest.raises(AssertionError, match="block 2 was touched"):
        pages.compare(LETTERS[0], Loaded(2 * 64, Account.of([]), None))
    pages.planes[0][1][0, 0, 0, 0] ^= 1
    with pytest.raises(AssertionError, match="a page outside of the table was touched"):
        pages.compare(LETTERS[0], whole)


def test_what_is_left_is_noticed(judged: tuple[Sidecar, Client, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torture.outside.SETTLES_WITHIN_SECONDS", 0.5)
    sidecar, one, _ = judged
    one.spaces["small"].put(LETTERS[0])
    held = [one.take() for _ in range(20)]
    assert any(held)
    with pytest.raises(AssertionError, match=r"leases left.*1 sessions left; 1 connections left"):
        sidecar.settled()
