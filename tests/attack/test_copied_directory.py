"""A directory that is copied file by file while it is being written, and one that two processes want.

The copy is of no single moment: slabs, index and stamp are each of another one, and pages are torn. It has to open
nevertheless, and whatever it delivers has to be right.
"""

from __future__ import annotations

import ast
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import IO, Any

import pytest

import kvstore
from kvstore.block.account import MissReason
from kvstore.block.errors import DirectoryInUse
from kvstore.node import EmbeddedStore
from programs import start_python
from torture.child import DEPTH, LETTERS, SIZES, SPACES, Space
from workbench import one_line

SEED = 20261124
COPIES = 5
PIECE_BYTES = 16 << 10
LONG_MS = 30_000
ANSWERS_WITHIN_SECONDS = 60


def opened(directory: Path) -> tuple[EmbeddedStore, list[Space]]:
    store = kvstore.open(f"embedded:{directory}", dram="1MiB", scrub=0, **SIZES)
    return store, [Space(store, name) for name in SPACES]


# The other processes --------------------------------------------------------------------------------------------------


def write(directory: str, seed: str) -> None:
    """Store and evict without end; asked for it, read what was stored first."""
    store, spaces = opened(Path(directory))
    random, halfway = Random(int(seed)), threading.Event()

    def work() -> None:
        for step in count():
            letters = random.choice(LETTERS)[: random.randrange(1, DEPTH + 1)]
            random.choice(spaces).put(letters, random.choice(["volatile", "disk", "disk"]))
            if step % 10 == 9:
                store.evict(random.randrange(1, 12))
            if step == 60:
                halfway.set()

    threading.Thread(target=work, daemon=True).start()
    assert halfway.wait(ANSWERS_WITHIN_SECONDS)
    print("ready", flush=True)
    while sys.stdin.readline():
        assert spaces[0].put(LETTERS[0], "disk")
        assert spaces[0].read(LETTERS[0], LONG_MS)[1] is None
        print("well", flush=True)


def read(*directories: str) -> None:
    """Open each copy and read all that it offers, twice: what was torn is known by then."""
    for directory in directories:
        store, spaces = opened(Path(directory))
        assert store.warmed(ANSWERS_WITHIN_SECONDS)
        counts = {"blocks": 0, "torn": 0, "rebuilds": int(store._store.blocks.lower.tier.rebuilds)}  # type: ignore[union-attr]
        for again in (False, True):
            for space in spaces:
                for letters in LETTERS:
                    blocks, reason = space.read(letters, LONG_MS)
                    assert reason is None or (reason is MissReason.CORRUPT and not again), (directory, letters, reason)
                    counts["torn"] += reason is not None
                    counts["blocks"] += blocks if again else 0
            store.check()
        assert all(space.put(letters, "disk") for space in spaces for letters in LETTERS[:4])
        store.check()
        store.close()
        print(counts, flush=True)


@contextmanager
def process(work: Callable[..., None], *arguments: object) -> Any:
    """One of the above in a process of its own, which does not outlive the test."""
    program = f"import sys; from attack.test_copied_directory import {work.__name__} as work; work(*sys.argv[1:])"
    child = start_python(program, *arguments)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()


def line_of(pipe: IO[str]) -> str:
    """The next line; none in time is the end of the test."""
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(pipe.readline()), daemon=True)
    reader.start()
    reader.join(ANSWERS_WITHIN_SECONDS)
    assert lines, "nothing was heard in time"
    return lines[0].strip()


# Tests ----------------------------------------------------------------------------------------------------------------


def copied(source: Path, target: Path, random: Random) -> None:
    """File by file in any order, and in small pieces, so that it takes a while."""
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in random.sample(files, len(files)):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with path.open("rb") as reader, copy.open("wb") as writer:
                while piece := reader.read(PIECE_BYTES):
                    writer.write(piece)
        except FileNotFoundError:
            continue  # it went meanwhile
        copy.chmod(0o600)


@pytest.mark.slow
def test_copies_taken_while_it_is_written_and_a_second_process(tmp_path: Path) -> None:
    """One process writes all the time. Copies deliver nothing wrong; who wants the directory too is refused in one
    line, changes nothing by that, and comes in once the first one was killed."""
    print(f"seed {SEED}")
    directory, copies = tmp_path / "kv", [tmp_path / f"copy-{number}" for number in range(COPIES)]
    with process(write, directory, SEED) as writer:
        assert line_of(writer.stdout) == "ready"
        for number, copy in enumerate(copies):
            copied(directory, copy, Random(SEED + number))
            with pytest.raises(DirectoryInUse) as caught:
                opened(directory)
            assert one_line(caught.value, str(directory), f"process {writer.pid}", "close that store")
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert line_of(writer.stdout) == "well"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    store, spaces = opened(directory)
    with store:
        assert store.warmed(ANSWERS_WITHIN_SECONDS)
        assert any(space.read(letters, LONG_MS)[0] for space in spaces for letters in LETTERS)
        store.check()
    with process(read, *copies) as reader:
        counts = [ast.literal_eval(line_of(reader.stdout)) for _ in copies]
        assert reader.wait(ANSWERS_WITHIN_SECONDS) == 0
    print(counts)
    assert all(one["blocks"] for one in counts), "a copy that offers nothing"
