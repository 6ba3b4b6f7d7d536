"""The edge between an engine and all that is not the engine's own: what fails beyond it costs a hit, never a request.

An adapter does in this context whatever calls the store, a model's code or an engine's objects. It is the one place of
the adapters that catches every error; each says what the error becomes. Must never import an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def contained(failed: Callable[[Exception], object]) -> Iterator[None]:
    """A block that any error ends early, and that lets none through. failed: is told which; what it raises goes on."""
    try:
        yield
    except Exception as error:
        failed(error)
