"""The real LMDB file: damage, a full disk. Run as a program, this file is the process that a disk refuses.

That it lives through kills is in attack/test_store_kills.py; what comes of damage, in attack/test_index_damage.py.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiering.errors import IndexDoubtful, TierError, TierFull, TierUnavailable
from tiering.nvme import lmdb_index
from tiering.nvme.frame_index import Change
from tiering.nvme.lmdb_index import discard, open_index, open_to_read

ROOT = Path(__file__).resolve().parent.parent.parent
MAP_BYTES = 1 << 20
PAGE_BYTES = 4096
META_BYTES = 152
FREE_PAGES, PAIRS = 40, 88  # where a meta page has its two trees


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory if there is one, for what would otherwise wait for the disk thousands of times."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvstore-index-", dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


# --- opening and closing ---------------------------------------------------------------------------------------------


def test_what_was_closed_is_opened(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    index = open_index(directory, MAP_BYTES, clean=False)
    for number in range(1, 6):
        index.apply([(b"%d" % number, b"v" * number)])
    index.sync()
    index.close()
    for clean in (True, False):
        index = open_index(directory, MAP_BYTES, clean=clean)
        assert list(index.iterate(b"")) == [(b"%d" % number, b"v" * number) for number in range(1, 6)]
        index.close()


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        open_index(tmp_path / "index", MAP_BYTES, clean=False).close()
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "index").iterdir()}
    assert files == {"data.mdb": 0o600, "lock.mdb": 0o600, "data.digest": 0o600}


def test_a_new_index_that_nothing_was_applied_to_is_opened(tmp_path: Path) -> None:
    for clean in (False, True, False):
        index = open_index(tmp_path, MAP_BYTES, clean=clean)
        assert list(index.iterate(b"")) == []
        index.close()


@pytest.mark.slow
def test_a_file_that_ends_early_after_a_batch_is_sound(memory: Path) -> None:
    # A batch that takes pages from the end and gives them back leaves an intact file shorter than its meta page says.
    for seed in range(3):
        chance = random.Random(seed)
        directory = memory / str(seed)
        index = open_index(directory, MAP_BYTES, clean=False)
        for _ in range(8):
            changes = random_changes(chance, chance.choice([1, 60, 300]))
            index.apply(changes + [(key, None) for key, _ in changes if chance.random() < 0.9])
            copy = shutil.copytree(directory, memory / "copy")
            open_index(copy, MAP_BYTES, clean=True).close()
            shutil.rmtree(copy)
        index.close()
        open_index(directory, MAP_BYTES, clean=False).close()


def test_discard_removes_two_files_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    discard(directory)
    index = open_index(directory, MAP_BYTES, clean=False)
    index.apply([(b"a", b"1")])
    index.close()
    (directory / "other").write_bytes(b"kept")
    discard(directory)
    discard(directory)
    assert [path.name for path in directory.iterdir()] == ["other"]
    index = open_index(directory, MAP_BYTES, clean=False)
    assert list(index.iterate(b"")) == []
    index.close()


def test_an_index_is_looked_at_without_a_trace(tmp_path: Path) -> None:
    assert open_to_read(tmp_path / "none") is None and not (tmp_path / "none").exists()
    index = open_index(tmp_path / "index", MAP_BYTES, clean=True)
    index.apply([(b"key", b"value"), (b"kez", b"other")])
    index.sync()
    index.close()
    (tmp_path / "index" / "lock.mdb").unlink()
    facts = (tmp_path / "index").stat(), (tmp_path / "index" / "data.mdb").stat()
    looked = open_to_read(tmp_path / "index")
    assert looked is not None
    assert looked.get([b"key", b"none"]) == [b"value", None]
    assert list(looked.iterate(b"ke")) == [(b"key", b"value"), (b"kez", b"other")]
    with pytest.raises(TierError):
        looked.apply([(b"key", b"changed")])
    looked.close()
    after = (tmp_path / "index").stat(), (tmp_path / "index" / "data.mdb").stat()
    assert [(one.st_mtime_ns, one.st_ctime_ns) for one in after] == [
        (one.st_mtime_ns, one.st_ctime_ns) for one in facts
    ]


def test_an_index_that_is_looked_at_is_probed_though_it_was_closed(tmp_path: Path, sound: Path) -> None:
    path = shutil.copytree(sound, tmp_path / "index") / "data.mdb"
    contents = bytearray(path.read_bytes())
    contents[2 * PAGE_BYTES :] = random.Random(1).randbytes(len(contents) - 2 * PAGE_BYTES)
    path.write_bytes(contents)
    with pytest.raises(IndexDoubtful, match="the probe"):
        open_to_read(tmp_path / "index")


def test_a_file_that_is_open_here_is_not_called_damaged(tmp_path: Path) -> None:
    index = open_index(tmp_path, MAP_BYTES, clean=False)
    with pytest.raises(TierUnavailable, match="already open"):
        open_index(tmp_path, MAP_BYTES, clean=True)
    index.close()


def test_a_folder_that_is_not_there_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="No such file"):
        open_index(tmp_path / "missing" / "index", MAP_BYTES, clean=False)


# --- room ------------------------------------------------------------------------------------------------------------


def test_the_map_grows(tmp_path: Path) -> None:
    index = open_index(tmp_path, 64 << 10, clean=False)
    pairs = [(b"%06d" % number, b"v" * 100) for number in range(20_000)]
    index.apply(pairs)
    index.apply([(key, None) for key, _ in pairs[::2]])
    assert list(index.iterate(b"")) == pairs[1::2]
    index.close()
    index = open_index(tmp_path, 64 << 10, clean=False)
    index.apply(pairs)
    assert list(index.iterate(b"")) == pairs
    index.close()


def test_a_map_that_may_not_grow_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_index, "LARGEST_MAP_BYTES", 256 << 10)
    index = open_index(tmp_path, 64 << 10, clean=False)
    few = [(b"%06d" % number, b"v" * 100) for number in range(500)]
    index.apply(few)
    with pytest.raises(TierFull):
        index.apply([(b"x%06d" % number, b"v" * 100) for number in range(5000)])
    assert list(index.iterate(b"")) == few
    index.apply([(key, None) for key, _ in few[1:]])
    assert list(index.iterate(b"")) == few[:1]
    index.close()


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && exec "$@"', str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    assert run_program("fill", str(tmp_path), before=mount) == "TierUnavailable: no space"


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_without_permission_there_is_one_clear_error(mode: int, tmp_path: Path) -> None:
    directory = tmp_path / "index"
    open_index(directory, MAP_BYTES, clean=False).close()
    for path in directory.iterdir():
        path.chmod(mode if os.geteuid() == 0 else mode & 0o444)
    for folder in (directory, tmp_path):
        folder.chmod(0o555)
    said = run_program("trespass", str(directory))
    for folder in (tmp_path, directory):
        folder.chmod(0o700)
    assert said == "TierUnavailable: cannot open the index in index: Permission denied"


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A closed index: a branch page and its leaves, values with pages of their own, and free pages."""
    directory = tmp_path_factory.mktemp("sound")
    chance = random.Random(7)
    index = open_index(directory, MAP_BYTES, clean=False)
    for _ in range(10):
        index.apply(random_changes(chance, 400))
    index.apply([(b"big%d" % number, chance.randbytes(3000)) for number in range(10)])
    index.sync()
    index.close()
    yield directory


def random_changes(chance: random.Random, count: int) -> list[Change]:
    return [
        (
            b"%04d" % chance.randrange(1500) * 6,
            chance.randbytes(chance.randrange(300)) if chance.random() < 0.7 else None,
        )
        for _ in range(count)
    ]


# More damage, of a whole directory: attack/test_index_damage.py.
@pytest.mark.parametrize("left", [0, 100, PAGE_BYTES, 2 * PAGE_BYTES, 9 * PAGE_BYTES + 1])
def test_no_truncated_file_is_mapped(left: int, sound: Path, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes((sound / "data.mdb").read_bytes()[:left])
    with pytest.raises(IndexDoubtful, match="the probe found"):
        open_index(tmp_path, MAP_BYTES, clean=True)


@pytest.mark.parametrize(
    ("offset", "size_bytes", "value"),
    [
        (0, PAGE_BYTES, 0),
        (16, 4, 0xBEEFC0DF),  # another magic
        (136, 8, 1 << 40),  # longer than the file
        (144, 8, 1 << 20),  # transactions that are not in a row
        (FREE_PAGES + 4, 2, 0x04),  # another kind of map: a write would end the process
        (PAIRS + 4, 2, 0x04),
        (PAIRS + 32, 8, 1 << 40),  # entries
        (PAIRS + 40, 8, 1),  # a root that is a meta page
    ],
)
def test_an_impossible_meta_page_is_not_mapped(
    offset: int, size_bytes: int, value: int, sound: Path, tmp_path: Path
) -> None:
    whole = bytearray((sound / "data.mdb").read_bytes())
    at = offset + (PAGE_BYTES if whole[144:152] < whole[PAGE_BYTES + 144 : PAGE_BYTES + 152] else 0)
    whole[at : at + size_bytes] = value.to_bytes(size_bytes, sys.byteorder)
    (tmp_path / "data.mdb").write_bytes(whole)
    with pytest.raises(IndexDoubtful, match="the probe found"):
        open_index(tmp_path, MAP_BYTES, clean=True)


@pytest.mark.parametrize("seed", range(2))
def test_after_a_kill_the_probe_stands_before_the_map(seed: int, sound: Path, tmp_path: Path) -> None:
    whole = bytearray((sound / "data.mdb").read_bytes())
    chance = random.Random(1000 + seed)
    # Both meta pages and the size are as they were: only who walks the tree finds that its root is another page.
    page = root_of(bytes(whole))
    other = chance.choice([number for number in range(2, len(whole) // PAGE_BYTES) if number != page])
    whole[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = whole[other * PAGE_BYTES : (other + 1) * PAGE_BYTES]
    (tmp_path / "data.mdb").write_bytes(whole)
    with pytest.raises(IndexDoubtful, match="the probe found"):
        open_index(tmp_path, MAP_BYTES, clean=False)


def test_a_page_is_not_both_in_use_and_free(sound: Path, tmp_path: Path) -> None:
    whole = bytearray((sound / "data.mdb").read_bytes())
    # The first node of the tree of free pages: header 8, key 8 (a transaction), how many pages, the pages. No reader
    # looks there; a writer would take the root of the pairs for a page to write to.
    page = root_of(bytes(whole), tree=FREE_PAGES) * PAGE_BYTES
    node = page + int.from_bytes(whole[page + 16 : page + 18], sys.byteorder)
    assert int.from_bytes(whole[node + 16 : node + 24], sys.byteorder) in range(1, 500)
    whole[node + 24 : node + 32] = root_of(bytes(whole)).to_bytes(8, sys.byteorder)
    (tmp_path / "data.mdb").write_bytes(whole)
    with pytest.raises(IndexDoubtful, match="the probe found"):
        open_index(tmp_path, MAP_BYTES, clean=False)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.kill(os.getpid(), 7)", "ended by signal 7"),
        ("import os; os.kill(os.getpid(), 40)", "ended by signal 40"),
        ("import time; time.sleep(60)", "longer than 0 s"),
        ("import sys; sys.exit(1)", "status 1"),
    ],
)
def test_a_probe_that_does_not_come_back_well_is_a_doubt(
    program: str, message: str, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_index, "_PROBE_PROGRAM", program)
    if "sleep" in program:
        monkeypatch.setattr(lmdb_index, "PROBE_SECONDS", 0.1)
    with pytest.raises(IndexDoubtful, match=message):
        open_index(sound, MAP_BYTES, clean=False)


def test_the_probe_is_light() -> None:
    program = (
        "import sys; from tiering.nvme.lmdb_index import probe; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).strip() == "[]"


def root_of(whole: bytes, tree: int = PAIRS) -> int:
    """The root of a tree in the newer meta page."""
    metas = [whole[page : page + META_BYTES] for page in (0, PAGE_BYTES)]
    newest = max(metas, key=lambda meta: int.from_bytes(meta[144:152], sys.byteorder))
    return int.from_bytes(newest[tree + 40 : tree + 48], sys.byteorder)


# --- processes -------------------------------------------------------------------------------------------------------


def fill_the_disk(directory: Path) -> None:
    index = open_index(directory / "index", MAP_BYTES, clean=False)
    written: dict[bytes, bytes] = {}
    error: TierError | None = None
    for number in range(100):
        changes = [(b"%02d-%04d" % (number, part), b"v" * 100) for part in range(1000)]
        try:
            index.apply(changes)
        except TierError as caught:
            error = caught
            break
        written.update(changes)
    assert error is not None and len(written) >= 1000
    assert dict(index.iterate(b"")) == written, "the batch that did not fit left nothing"
    index.close()
    index = open_index(directory / "index", MAP_BYTES, clean=False)
    assert dict(index.iterate(b"")) == written
    index.close()
    print(type(error).__name__ + (": no space" if "no space left" in str(error) else f": {error}"))


def open_without_permission(directory: Path) -> None:
    os.chdir(directory.parent)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may do anything
    try:
        open_index(Path(directory.name), MAP_BYTES, clean=True)
    except TierError as error:
        print(f"{type(error).__name__}: {error}")


def start_program(*arguments: str, before: list[str] | None = None) -> subprocess.Popen[str]:
    command = [*(before or []), sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def run_program(*arguments: str, before: list[str] | None = None) -> str:
    program = start_program(*arguments, before=before)
    said, _ = program.communicate()
    assert program.returncode == 0, f"{arguments[0]} ended with {program.returncode}"
    return said.strip()


if __name__ == "__main__":
    act, folder = sys.argv[1:]
    if act == "fill":
        fill_the_disk(Path(folder))
    elif act == "trespass":
        open_without_permission(Path(folder))
