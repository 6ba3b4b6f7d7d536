"""Standard input, output and error of a long-running process.

A pipe without a reader, or a full disk, loses a line and nothing else. Closed descriptors 0 to 2 are reopened, so that
no slab or socket gets such a number: a library's writes to standard error would end up in it.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TextIO


def hold_standard_descriptors() -> None:
    """Open any of the three that is closed. Call it before opening anything else."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one


def say(line: str, stream: TextIO | None) -> bool:
    """Print a line; returns whether it was written. After a failure the stream is redirected, so that the exit does not
    fail again."""
    if stream is None:
        return False
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError):
        let_go(stream)
        return False
    return True


def let_go(stream: TextIO) -> None:
    """Redirect a stream without a reader, so that the flush at exit does not fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass


def show_any_text() -> None:
    """Show undecodable names, such as paths, with escapes on standard output, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def quiet_optional_libraries() -> None:
    """Silence what libraries warn of when transformers imports them: no command uses these, and standard error has our
    one line only."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def flush_output() -> None:
    """Raises if what was printed cannot be written."""
    if sys.stdout is not None:
        sys.stdout.flush()
