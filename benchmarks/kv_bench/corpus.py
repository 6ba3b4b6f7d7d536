"""Text that every machine has: the sources of Python's standard library, split into train and held out.

The small model was trained on the one part, and is judged on the other. The split goes by a hash of a file's name, so
that a file that was held out when the model was trained is held out on every other machine, whatever its Python.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvstore.block.errors import BadInput

HELD_OUT_OF = 20
"""One file of so many is held out."""

LEFT_OUT = frozenset(
    "site-packages dist-packages test tests idle_test encodings lib2to3 idlelib pydoc_data turtledemo ensurepip "
    "__pycache__".split()
)
"""Folders of tests, tables and other people's code."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file. name: below the library's folder, with slashes. text: its bytes, which are the model's tokens."""

    name: str
    text: bytes

    @property
    def is_held_out(self) -> bool:
        """Whether the model has never seen it."""
        digest = blake2b(self.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % HELD_OUT_OF == 0


def read_sources(held_out: bool) -> list[TextFile]:
    """The files of one part that are not empty, in the order of their names. Raises `BadInput` where there are none."""
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
        # What a build writes down about its machine, such as _sysconfigdata, differs from machine to machine.
        if LEFT_OUT.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
            yield TextFile(relative.as_posix(), path.read_bytes())


def windows(sources: list[TextFile], size: int, count: int) -> list[bytes]:
    """At most `count` pieces of `size` bytes, spread evenly over the files; none reaches over the end of a file."""
    found = [
        source.text[start : start + size] for source in sources for start in range(0, len(source.text) - size + 1, size)
    ]
    step = max(1.0, len(found) / count)
    return [found[int(index * step)] for index in range(min(count, len(found)))]
