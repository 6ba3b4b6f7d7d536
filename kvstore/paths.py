"""Paths as people give them: in an address, a setting, a flag (floor 2)."""

from __future__ import annotations

import os

from kvstore.errors import BadInput


def expanded(path: str | bytes | os.PathLike[str], name: str = "") -> str:
    """The path, with ~ and ~user as homes, as a shell has it where it stands alone. name: of what was given, for
    messages. Raises `BadInput`."""
    given = os.fsdecode(path)
    said = f"{name}={given!r}" if name else repr(given)
    if not given or "\0" in given:
        raise BadInput(f"{said} is no path; give one that is not empty and has no NUL in it")
    found = os.path.expanduser(given)
    if found.startswith("~"):
        raise BadInput(f"{said}: {given.split('/')[0]} is nobody's home here; give the whole path, or ./{given}")
    return found
