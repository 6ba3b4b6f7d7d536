"""Worker processes of an engine, which take orders through pipes: a test says who is how far."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
SECONDS = 60


class Worker:
    """work: what the process does; called with what is given, and its end of the pipe."""

    def __init__(self, work: Callable[..., None], *given: Any) -> None:
        self.wires, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=work, args=(*given, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hears(self) -> Any:
        assert self.wires.poll(SECONDS)
        return self.wires.recv()

    def told(self, *order: Any) -> Any:
        self.wires.send(order)
        return self.hears()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)


@contextmanager
def workers(work: Callable[..., None], given: Sequence[tuple[Any, ...]]) -> Iterator[list[Worker]]:
    """One for each of what is given, once all have said that they are ready."""
    started = [Worker(work, *one) for one in given]
    try:
        assert [one.hears() for one in started] == ["ready"] * len(started)
        yield started
    finally:
        for one in started:
            one.kill()
