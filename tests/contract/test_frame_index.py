"""What every `FrameIndex` keeps: a sorted map, batches that apply as a whole, a `sync` behind which nothing is lost.

An implementation is a subclass of `FrameIndexContract` that makes an empty index, and opens it again after its owner
closed it or died.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.index import SimulatedIndex
from tiering.errors import TierUnavailable
from tiering.nvme.frame_index import Change, FrameIndex
from tiering.nvme.lmdb_index import LmdbIndex, open_index

SMALL_MAP_BYTES = 64 << 10  # so that it has to grow

# Few keys, which share prefixes and are each other's prefix.
KEYS = st.binary(min_size=1, max_size=3).map(lambda key: bytes(byte % 3 for byte in key)) | st.sampled_from(
    [b"\xff", b"\xff\xff", b"\xff\x00", b"k" * 511]
)
VALUES = st.none() | st.binary(max_size=8) | st.sampled_from([b"", b"v" * 1000, b"v" * 2100, b"v" * 4080])
BATCHES = st.lists(st.tuples(KEYS, VALUES), max_size=12)
PREFIXES = st.sampled_from([b"", b"\x00", b"\x01\x02", b"\x02\x02\x02", b"\xff", b"\xff\xff", b"\x07", b"k"])


class FrameIndexContract:
    """What an index must do."""

    def make(self) -> Any:
        raise NotImplementedError

    def close_and_open(self, index: Any) -> Any:
        """What the next owner opens after a proper end."""
        raise NotImplementedError

    def die_and_open(self, index: Any) -> Any:
        """What the next owner opens after the last one just stopped."""
        raise NotImplementedError

    def test_a_new_one_is_empty(self) -> None:
        index = self.make()
        assert list(index.iterate(b"")) == [] and index.get([b"a", b"b"]) == [None, None] and index.get([]) == []

    def test_a_later_change_of_the_same_key_wins(self) -> None:
        index: FrameIndex = self.make()
        index.apply([(b"a", b"1"), (b"a", b"2"), (b"b", b"1"), (b"b", None), (b"c", None), (b"c", b"3")])
        assert list(index.iterate(b"")) == [(b"a", b"2"), (b"c", b"3")]

    def test_what_is_not_there_is_removed_in_silence(self) -> None:
        index: FrameIndex = self.make()
        index.apply([(b"a", None)])
        index.apply([])
        assert list(index.iterate(b"")) == []

    def test_an_empty_value_is_a_value(self) -> None:
        index: FrameIndex = self.make()
        index.apply([(b"a", b"")])
        assert index.get([b"a"]) == [b""]

    @pytest.mark.parametrize("wrong", [(b"", b"v"), (b"k" * 512, b"v"), (b"k", b"v" * 4081)])
    def test_keys_and_values_have_their_lengths(self, wrong: Change) -> None:
        index: FrameIndex = self.make()
        with pytest.raises(AssertionError):
            index.apply([(b"a", b"1"), wrong])
        if wrong[0] != b"k":
            with pytest.raises(AssertionError):
                index.get([wrong[0]])
        assert list(index.iterate(b"")) == []

    def test_an_iteration_may_be_dropped(self) -> None:
        index: FrameIndex = self.make()
        index.apply([(b"%03d" % number, b"v") for number in range(300)])
        for _ in range(300):
            assert next(index.iterate(b"1")) == (b"100", b"v")
        index.apply([(b"000", None)])
        assert next(index.iterate(b"")) == (b"001", b"v")

    def test_a_closed_index_says_so(self) -> None:
        index: FrameIndex = self.make()
        index.apply([(b"a", b"1"), (b"b", b"2")])
        index.close()
        index.close()
        uses: list[Any] = [
            lambda: index.get([b"a"]),
            lambda: index.apply([(b"a", b"2")]),
            lambda: list(index.iterate(b"")),
            index.sync,
        ]
        for use in uses:
            with pytest.raises(TierUnavailable):
                use()

    @given(steps=st.lists(BATCHES | PREFIXES | st.sampled_from(["sync", "reopen", "crash"]), max_size=12))
    @settings(max_examples=40)
    def test_against_a_dict(self, steps: list[Any]) -> None:
        index = self.make()
        model: dict[bytes, bytes] = {}
        for step in steps:
            if isinstance(step, bytes):
                assert list(index.iterate(step)) == sorted(pair for pair in model.items() if pair[0].startswith(step))
            elif step == "sync":
                index.sync()
            elif step == "reopen":
                index = self.close_and_open(index)
            elif step == "crash":
                index.sync()
                index = self.die_and_open(index)
            else:
                index.apply(step)
                for key, value in step:
                    model.pop(key, None)
                    if value is not None:
                        model[key] = value
                keys = [key for key, _ in step]
                assert index.get(keys) == [model.get(key) for key in keys]
        assert list(index.iterate(b"")) == sorted(model.items())
        index.close()


class TestLmdbIndex(FrameIndexContract):
    # In memory if possible: what is shown here is order and atomicity, and a disk would take a minute for it.
    @pytest.fixture(autouse=True, scope="class")
    def folder(self, request: pytest.FixtureRequest) -> Iterator[None]:
        memory = Path("/dev/shm")
        folder = Path(tempfile.mkdtemp(prefix="kvstore-index-", dir=memory if memory.is_dir() else None))
        request.cls.free = folder
        yield
        shutil.rmtree(folder)

    free: Path
    made = 0

    def make(self) -> LmdbIndex:
        type(self).made += 1
        return open_index(self.free / str(self.made), SMALL_MAP_BYTES, clean=False)

    def close_and_open(self, index: LmdbIndex) -> LmdbIndex:
        index.close()
        return open_index(index.directory, SMALL_MAP_BYTES, clean=True)

    def die_and_open(self, index: LmdbIndex) -> LmdbIndex:
        # A copy of the file as it is now is what a process that was killed leaves behind.
        type(self).made += 1
        left_behind = self.free / str(self.made)
        shutil.copytree(index.directory, left_behind)
        index.close()
        return open_index(left_behind, SMALL_MAP_BYTES, clean=False)


class TestSimulatedIndex(FrameIndexContract):
    def make(self) -> SimulatedIndex:
        return SimulatedIndex()

    def close_and_open(self, index: SimulatedIndex) -> SimulatedIndex:
        index.close()
        index.reopen()
        return index

    def die_and_open(self, index: SimulatedIndex) -> SimulatedIndex:
        index.crash(random.Random(0))
        return index
