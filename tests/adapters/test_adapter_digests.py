"""Digests of LoRA adapters: of a number and the files as they were when the engine read them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from engine_adapter import model_files
from engine_adapter.model_files import AdapterDigests
from waiting import wait_until

SECONDS = 30
READING = ("", "the adapter's files are being read")
CHANGED = ("", "the adapter's files have changed since the engine read them")
UNREADABLE = ("", "the adapter's files cannot be read")


def adapter(path: Path, content: str = "one") -> str:
    path.mkdir(exist_ok=True)
    (path / "adapter.safetensors").write_text(content)
    return str(path)


def content_digest(path: Path) -> str | None:
    return "of " + (path / "adapter.safetensors").read_text()


def known(digests: AdapterDigests, number: int, path: str, *, anew: bool = False) -> tuple[str, str]:
    if (found := digests.of(number, path, reads_anew=anew)) != READING:
        return found
    return wait_until(lambda: found if (found := digests.of(number, path, reads_anew=False)) != READING else None)


def test_files_are_read_in_the_background_and_nobody_waits(tmp_path: Path) -> None:
    gate, path = threading.Event(), adapter(tmp_path / "a")

    def slow(folder: Path) -> str | None:
        assert gate.wait(SECONDS)
        return content_digest(folder)

    digests = AdapterDigests(slow)
    started = time.monotonic()
    assert digests.of(1, path, reads_anew=False) == READING == digests.of(1, path, reads_anew=False)
    assert time.monotonic() - started < 5.0
    gate.set()
    assert known(digests, 1, path)[0] == "of one"


def test_a_digest_is_of_the_content_and_a_number_that_names_another_folder_is_a_doubt(tmp_path: Path) -> None:
    digests = AdapterDigests(content_digest)
    assert known(digests, 1, adapter(tmp_path / "a"))[0] == "of one"
    assert known(digests, 2, adapter(tmp_path / "b"))[0] == "of one"
    assert known(digests, 3, adapter(tmp_path / "c", "two"))[0] == "of two"
    assert digests.of(1, adapter(tmp_path / "c", "two"), reads_anew=False) == CHANGED


def test_an_adapter_whose_files_change_is_not_cached_until_it_is_read_anew(tmp_path: Path) -> None:
    digests, path = AdapterDigests(content_digest), adapter(tmp_path / "a")
    assert known(digests, 1, path)[0] == "of one"
    adapter(tmp_path / "a", "other")
    assert digests.of(1, path, reads_anew=False) == CHANGED
    assert digests.of(1, path, reads_anew=False) == CHANGED
    adapter(tmp_path / "a", "one")
    assert digests.of(1, path, reads_anew=False) == CHANGED, "the same text at another time may be another file"
    assert known(digests, 1, path, anew=True)[0] == "of one"
    adapter(tmp_path / "a", "third")
    assert known(digests, 1, path, anew=True)[0] == "of third"


def test_files_that_change_while_they_are_read_are_a_doubt(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")

    def changes(folder: Path) -> str | None:
        found = content_digest(folder)
        adapter(folder, "other")
        return found

    assert known(AdapterDigests(changes), 1, path) in (
        ("", "the adapter's files changed while they were read"),
        CHANGED,
    )


def test_what_cannot_be_read_is_not_cached(tmp_path: Path) -> None:
    digests = AdapterDigests(lambda path: None)
    assert digests.of(1, str(tmp_path / "none"), reads_anew=False) == UNREADABLE
    (tmp_path / "empty").mkdir()
    assert digests.of(2, str(tmp_path / "empty"), reads_anew=False) == UNREADABLE
    assert known(digests, 3, adapter(tmp_path / "a")) == UNREADABLE


def test_a_file_with_another_inode_is_another_file(tmp_path: Path) -> None:
    digests, path = AdapterDigests(content_digest), adapter(tmp_path / "a")
    assert known(digests, 1, path)[0] == "of one"
    file = tmp_path / "a" / "adapter.safetensors"
    times = file.stat()
    (tmp_path / "other").write_text("two")
    os.utime(tmp_path / "other", ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(tmp_path / "other", file)
    assert digests.of(1, path, reads_anew=False) == CHANGED


def test_the_oldest_of_too_many_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_ADAPTERS", 2)
    read: list[str] = []

    def counts(folder: Path) -> str | None:
        read.append(folder.name)
        return content_digest(folder)

    digests = AdapterDigests(counts)
    for number, name in enumerate("abc"):
        known(digests, number, adapter(tmp_path / name))
    assert known(digests, 2, str(tmp_path / "c"))[0] == "of one" and read == ["a", "b", "c"]
    assert known(digests, 0, str(tmp_path / "a"))[0] == "of one" and read == ["a", "b", "c", "a"]
