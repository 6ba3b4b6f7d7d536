"""What every `Files` keeps: slabs of a fixed size that give back what was written, whole or with an `OSError`. An
implementation is a subclass of `FilesContract` that makes a new, empty folder."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.disk import SimulatedFiles
from tiering.nvme import slab_files
from tiering.nvme.slab_files import DirectFiles, Files
from waiting import wait_until

PAGE = 4096
PAGES = 8
A, B = "a.slab", "b.slab"


def aligned(contents: bytes) -> memoryview:
    """The contents in memory that begins at a page, as a tier's frames do."""
    memory = mmap.mmap(-1, len(contents))
    memory[:] = contents
    return memoryview(memory)


def page(number: int, pages: int = 1) -> bytes:
    return bytes([number]) * (pages * PAGE)


def contents(files: Files, name: str, offset: int = 0, length: int = PAGES * PAGE) -> bytes:
    into = aligned(b"\x55" * length)
    files.read(name, offset, into)
    return bytes(into)


class FilesContract:
    """What a folder of slabs must do; `make` gives a new one without any."""

    def make(self) -> Any:
        raise NotImplementedError

    def with_slab(self) -> Any:
        files = self.make()
        files.create(A, PAGES * PAGE)
        return files

    def test_a_new_slab_is_zeros(self) -> None:
        assert contents(self.with_slab(), A) == bytes(PAGES * PAGE)

    def test_slabs_have_names_and_sizes(self) -> None:
        files = self.make()
        assert files.sizes() == {}
        files.create(A, PAGE)
        files.create(B, 3 * PAGE)
        assert files.sizes() == {A: PAGE, B: 3 * PAGE}

    def test_slabs_do_not_share_bytes(self) -> None:
        files = self.with_slab()
        files.create(B, PAGES * PAGE)
        files.write(A, 0, aligned(page(1, PAGES)))
        assert contents(files, B) == bytes(PAGES * PAGE)

    @given(
        writes=st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES), st.integers(0, 255)), max_size=12),
        look=st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)),
    )
    @settings(max_examples=25)
    def test_what_was_written_is_read(self, writes: list[tuple[int, int, int]], look: tuple[int, int]) -> None:
        files, expected = self.with_slab(), bytearray(PAGES * PAGE)
        for number, (first, count, seed) in enumerate(writes):
            data = random.Random(seed).randbytes(min(count, PAGES - first) * PAGE)
            # Every other one from memory that begins at no page.
            files.write(A, first * PAGE, memoryview(b"x" + data)[1:] if number % 2 else aligned(data))
            expected[first * PAGE : first * PAGE + len(data)] = data
            if number % 3 == 0:
                files.sync(A)
        assert contents(files, A) == expected
        start, end = look[0] * PAGE, min(sum(look), PAGES) * PAGE
        assert contents(files, A, start, end - start) == expected[start:end]
        files.close()

    def test_no_bytes_are_no_work(self) -> None:
        files = self.with_slab()
        files.write(A, 0, memoryview(b""))
        files.read(A, 0, memoryview(bytearray()))
        files.read(A, PAGES * PAGE, memoryview(bytearray()))
        assert contents(files, A) == bytes(PAGES * PAGE)

    def test_memory_may_have_items_of_any_width(self) -> None:
        files = self.with_slab()
        files.write(A, PAGE, aligned(page(7, 2)).cast("I"))
        into = aligned(page(0, 2))
        files.read(A, PAGE, into.cast("d"))
        assert into == page(7, 2)

    def test_a_name_is_made_once(self) -> None:
        files = self.with_slab()
        files.write(A, 0, aligned(page(1)))
        with pytest.raises(FileExistsError):
            files.create(A, PAGE)
        assert files.sizes() == {A: PAGES * PAGE}
        assert contents(files, A, 0, PAGE) == page(1), "the old one is as it was"

    def test_many_threads_make_a_name_once(self) -> None:
        files = self.make()
        kinds = map(type, run([lambda: files.create(A, PAGE)] * 4))
        assert sorted(kinds, key=str) == [FileExistsError] * 3 + [type(None)]
        assert files.sizes() == {A: PAGE}

    def test_a_removed_slab_is_gone(self) -> None:
        files = self.with_slab()
        files.write(A, 0, aligned(page(1)))
        files.remove(A)
        assert files.sizes() == {}
        for use in uses(files, A)[1:]:
            with pytest.raises(FileNotFoundError):
                use()
        files.create(A, 2 * PAGE)
        assert contents(files, A, 0, 2 * PAGE) == bytes(2 * PAGE), "a name that comes back has nothing of its past"

    @pytest.mark.parametrize(("first", "count"), [(PAGES, 1), (PAGES - 1, 2), (0, PAGES + 1), (1 << 30, 1)])
    def test_nothing_is_read_or_written_past_the_end(self, first: int, count: int) -> None:
        files = self.with_slab()
        with pytest.raises(OSError):
            files.read(A, first * PAGE, aligned(page(1, count)))
        with pytest.raises(OSError):
            files.write(A, first * PAGE, aligned(page(1, count)))
        assert files.sizes() == {A: PAGES * PAGE} and contents(files, A) == bytes(PAGES * PAGE)

    def test_only_whole_pages(self) -> None:
        files = self.with_slab()
        for offset, length in ((1, PAGE), (512, PAGE), (0, PAGE - 1), (0, 512), (-PAGE, PAGE)):
            with pytest.raises(AssertionError):
                files.read(A, offset, memoryview(bytearray(length)))
            with pytest.raises(AssertionError):
                files.write(A, offset, memoryview(bytes(length)))
        for size_bytes in (0, 1, PAGE + 512, -PAGE):
            with pytest.raises(AssertionError):
                files.create(B, size_bytes)

    @pytest.mark.parametrize("name", ["slab", "a.slab.new", "../a.slab", "folder/a.slab", "/a.slab", ""])
    def test_only_names_of_slabs(self, name: str) -> None:
        for use in uses(self.make(), name):
            with pytest.raises(AssertionError):
                use()

    def test_threads_read_and_write_pages_of_their_own(self) -> None:
        files = self.with_slab()

        def work(number: int) -> None:
            for round_number in range(1, 13):
                expected = page(16 * number + round_number % 16, 2)
                files.write(A, 2 * number * PAGE, aligned(expected))
                if round_number % 4 == 0:
                    files.sync(A)
                assert contents(files, A, 2 * number * PAGE, 2 * PAGE) == expected, f"round {round_number}"

        assert run([partial(work, number) for number in range(4)]) == [None] * 4
        assert contents(files, A) == b"".join(page(16 * number + 12, 2) for number in range(4))

    def test_after_close_there_is_nothing_to_use(self) -> None:
        files = self.with_slab()
        files.write(A, 0, aligned(page(1)))
        files.close()
        files.close()
        for use in (files.sizes, *uses(files, B)):
            with pytest.raises(OSError) as caught:
                use()
            assert caught.value.errno == errno.EBADF


def uses(files: Any, name: str) -> list[Callable[[], Any]]:
    """Each call that takes a slab's name; the first is `create`."""
    return [
        lambda: files.create(name, PAGE),
        lambda: files.read(name, 0, aligned(page(0))),
        lambda: files.write(name, 0, aligned(page(0))),
        lambda: files.sync(name),
        lambda: files.remove(name),
    ]


def run(works: list[Callable[[], Any]]) -> list[BaseException | None]:
    """Each work's error, of works at once."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [each.exception() for each in [pool.submit(work) for work in works]]


class TestSimulatedFiles(FilesContract):
    def make(self) -> SimulatedFiles:
        return SimulatedFiles()


class OnDisk(FilesContract):
    """Folders that are removed when a test is over, with whatever it left open."""

    parent: str | None = None

    def setup_method(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="slabs-", dir=self.parent))
        self._made: list[DirectFiles] = []

    def teardown_method(self) -> None:
        for files in self._made:
            files.close()
        shutil.rmtree(self._root)

    def make(self) -> DirectFiles:
        files = DirectFiles(self._root / str(len(self._made)))
        self._made.append(files)
        return files

    def path(self, name: str = A) -> Path:
        return self._root / str(len(self._made) - 1) / name

    @pytest.mark.parametrize("call", ["sync", "bring_back"])
    def test_a_slab_that_others_removed_is_written_again(self, call: str) -> None:
        files = self.with_slab()
        written = random.Random(1).randbytes(PAGES * PAGE)
        files.write(A, 0, aligned(written))
        self.path().unlink()
        with pytest.raises(FileNotFoundError):
            files.confirm(A)
        getattr(files, call)(A)
        files.confirm(A)
        files.write(A, 0, aligned(page(7)))
        files.sync(A)
        assert self.path().read_bytes() == page(7) + written[PAGE:] == contents(files, A)
        assert [path.name for path in self.path().parent.iterdir()] == [A]

    def test_nothing_is_written_again_where_another_file_has_the_name_or_the_folder_is_gone(self) -> None:
        files = self.with_slab()
        files.write(A, 0, aligned(page(1, PAGES)))
        self.path().unlink()
        self.path().write_bytes(b"another's")
        for call in (files.confirm, files.sync, files.bring_back):
            with pytest.raises(OSError, match="move it away"):
                call(A)
        assert self.path().read_bytes() == b"another's"
        shutil.rmtree(self.path().parent)
        for call in (files.sync, files.bring_back):
            with pytest.raises(FileNotFoundError, match="bring it back"):
                call(A)
        self.path().parent.mkdir()
        files.sync(A)
        assert self.path().read_bytes() == page(1, PAGES)

    def test_a_slab_that_was_cut_is_not_confirmed(self) -> None:
        files = self.with_slab()
        files.write(A, 0, aligned(page(1, PAGES)))
        os.truncate(self.path(), PAGE)
        for call in (files.confirm, files.sync, files.bring_back):
            with pytest.raises(OSError, match="was cut"):
                call(A)

    def test_no_write_is_lost_while_a_slab_is_written_again(self) -> None:
        files = self.with_slab()
        files.write(A, 0, aligned(page(0, PAGES)))

        def write(number: int) -> None:
            for round_ in range(60):
                files.write(A, number * PAGE, aligned(page(round_)))
                files.sync(A)

        with ThreadPoolExecutor(PAGES) as pool:
            writes = [pool.submit(write, number) for number in range(PAGES)]
            while not all(each.done() for each in writes):
                self.path().unlink(missing_ok=True)
        assert [each.exception() for each in writes] == [None] * PAGES
        files.sync(A)
        assert self.path().read_bytes() == page(59, PAGES)

    def test_a_slab_is_copied_after_the_writes_that_began_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        files = self.with_slab()
        began, goes_on = held_once(monkeypatch, os, "pwritev")
        with ThreadPoolExecutor(2) as pool:
            written = pool.submit(files.write, A, 0, aligned(page(1, PAGES)))
            began.wait()
            self.path().unlink()
            copied = pool.submit(files.bring_back, A)
            wait_until(lambda: copied.done() or files._turn._waiters)  # type: ignore[attr-defined]
            goes_on.set()
            assert written.result() is copied.result() is None
        assert self.path().read_bytes() == page(1, PAGES)

    def test_a_copy_that_has_the_name_already_is_no_other_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        files = self.with_slab()
        files.sync(A)
        renamed, goes_on = held_once(monkeypatch, slab_files, "sync_directory")
        self.path().unlink()
        with ThreadPoolExecutor(2) as pool:
            copied = pool.submit(files.bring_back, A)
            renamed.wait()
            confirmed = pool.submit(files.confirm, A)
            wait_until(lambda: confirmed.done() or files._turn._waiters)  # type: ignore[attr-defined]
            goes_on.set()
            assert copied.result() is confirmed.result() is None


def held_once(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> tuple[threading.Event, threading.Event]:
    """Events: that a function's first call has begun, and that it may go on."""
    began, goes_on, really = threading.Event(), threading.Event(), getattr(module, name)

    def held(*arguments: Any) -> Any:
        if not began.is_set():
            began.set()
            goes_on.wait()
        return really(*arguments)

    monkeypatch.setattr(module, name, held)
    return began, goes_on


class TestDirectFiles(OnDisk):
    def make(self) -> DirectFiles:
        files = super().make()
        if not files.direct:
            pytest.skip(f"{self._root} is on a file system without direct I/O")
        return files


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
class TestBufferedFiles(OnDisk):
    """In memory, and refused direct I/O, which newer kernels grant there too."""

    parent = "/dev/shm"

    def setup_method(self) -> None:
        super().setup_method()
        really_open = os.open

        def refuse(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
            return really_open(path, flags, *arguments, **named)

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr("tiering.files.os.open", refuse)

    def teardown_method(self) -> None:
        self._patch.undo()
        super().teardown_method()

    def make(self) -> DirectFiles:
        files = super().make()
        assert not files.direct
        return files
