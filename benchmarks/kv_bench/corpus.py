"""Text that every machine has: the sources of Python's standard library, split by a hash of each file's name."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvstore.block.errors import BadInput

HELD_OUT_OF = 20
"""One file in so many is held out."""

LEFT_OUT = frozenset(
    "site-packages dist-packages test tests idle_test encodings lib2to3 idlelib pydoc_data turtledemo ensurepip "
    "__pycache__".split()
)
"""Folders of tests, tables and other people's code."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """name: path below the library's folder, with slashes. text: its bytes, the model's tokens."""

    name: str
    text: bytes

    @property
    def is_held_out(self) -> bool:
        digest = blake2b(self.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % HELD_OUT_OF == 0


def read_sources(held_out: bool) -> list[TextFile]:
    """One part's files that are not empty, sorted by name. Raises `BadInput` if there are none."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [source for source in _files(folder) if source.is_held_out is held_out and source.text]
    if not sources:
        raise BadInput(
            f"{folder} has no sources of Python's standard library; use a Python that was installed with them"
        )
    return sources


def _files(folder: Path) -> Iterator[TextFile]:
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        # Build files such as _sysconfigdata differ from machine to machine.
        if LEFT_OUT.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
            yield TextFile(relative.as_posix(), path.read_bytes())


def windows(sources: list[TextFile], size: int, count: int) -> list[bytes]:
    found = [
        source.text[start : start + size] for source in sources for start in range(0, len(source.text) - size + 1, size)
    ]
    step = max(1.0, len(found) / count)
    return [found[int(index * step)] for index in range(min(count, len(found)))]
