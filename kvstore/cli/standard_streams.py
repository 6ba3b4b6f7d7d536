"""Standard input, output and error of a long-running process, whatever reads them.

A pipe without a reader, or a full disk, loses a line and nothing else. A descriptor that the parent process closed is
held open, so that no slab or socket gets its number: what a library writes to standard error would end up in it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def hold_standard_descriptors() -> None:
    """Have all three be something. Call it before anything else is opened."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one


def say(line: str, stream: TextIO | None) -> bool:
    """A line, if anybody reads it; whether it was written. What cannot be is tried no more, at the exit either."""
    if stream is None:
        return False
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError):
        let_go(stream)
        return False
    return True


def let_go(stream: TextIO) -> None:
    """The stream's reader is gone: the flush at exit must not try it again."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass


def show_any_text() -> None:
    """A name that is not text, as a path may be, is shown with escapes, on standard output as on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """What was printed is out, or an error says that it is not."""
    if sys.stdout is not None:
        sys.stdout.flush()
