"""The edge between an engine and all that is not the engine's own: what fails beyond it costs a hit, never a request.

An adapter does in this context whatever calls the store, a model's code or an engine's objects. It is the one place of
the adapters that catches every error; each says what the error becomes. Must never import an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from kvstore.block.errors import BadInput, StoreError


class contained:  # read as a statement, as `contextlib.suppress` is
    """A block that any error ends early, and that lets none through. A class, since each request that waits is asked in
    one at every step: a generator would cost several times as much."""

    __slots__ = ("_failed",)

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        """failed: is called with the error; what it raises goes on."""
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failed(error)
        return True


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """A block, or a function, that no foreign exception leaves: it becomes `BadInput`, one line that begins so."""

    def failed(error: Exception) -> None:
        said = f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"
        raise error if isinstance(error, StoreError) else BadInput(said)

    with contained(failed):
        yield
