"""One call to the disk or to the index fails, or all do from some moment on, in the middle of a store's life.

Whatever fails: requests are answered, what is delivered is right, the tables agree, nothing is raised that is not
documented, and when the disk works again a start finds every block that was acknowledged as durable and not evicted.
`LevelsModel` checks all that after every act; the script below is what happens to a store in its life.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from model.levels_model import LevelsModel
from model.store_model import Prompt
from tiering.errors import IndexDoubtful, TierFull, TierUnavailable

FILE_CALLS = ("sizes", "create", "read", "write", "sync", "remove")
INDEX_CALLS = ("open", "get", "apply", "iterate", "sync")
TRIES = 3
"""Lives per kind of fault in the suite; `nth_failures` with more of them leaves none out."""

A, B, C = Prompt((0, 1, 2)), Prompt((0, 1, 0, 1)), Prompt((2, 2, 2, 2, 2))

SCRIPT: tuple[Callable[[LevelsModel], Any], ...] = (
    lambda model: model.put(0, A, "disk"),
    lambda model: model.put(1, B, "disk"),
    lambda model: model.put(2, B, "volatile"),
    lambda model: model.evict(1000),
    lambda model: model.load(0, A),
    lambda model: model.load(1, B),
    lambda model: [model.put(0, Prompt((10 + number, 0, 1, 2)), "volatile") for number in range(6)],
    lambda model: [model.put(1, Prompt((10 + number, 0, 1, 2)), "disk") for number in range(4)],
    lambda model: model.load(0, A),
    lambda model: model.hold(0, B),
    lambda model: model.evict(1000),
    lambda model: model.put(0, C, "disk"),
    lambda model: model.load(0, Prompt((12, 0, 1, 2))),
    lambda model: model.read_held(0),
    lambda model: model.let_go(0),
    lambda model: model.spill(),
    lambda model: model.restart(index_too=False),
    lambda model: model.load(0, C),
    lambda model: model.load(1, B),
    lambda model: model.tick(10),  # a breaker that opened tries again
    lambda model: model.put(2, C, "disk"),
    lambda model: model.drop(1),
    lambda model: model.put(1, A, "disk"),
    lambda model: [model.put(2, Prompt((10 + number, 0, 1, 2)), "disk") for number in range(4)],
    lambda model: model.evict(1000),
    lambda model: model.load(1, A),
    lambda model: model.settle(),
)

RESTART = 16
"""Where in the script it comes."""


class Fault:
    """The n-th call of a kind fails, or with `lasting` every one from then on, until it is `gone`."""

    def __init__(self, model: LevelsModel, call: str, nth: int, error: Exception, *, lasting: bool) -> None:
        self.model, self.call, self.nth, self.error, self.lasting = model, call, nth, error, lasting
        self.calls = 0
        self.gone = False
        self._lock = threading.Lock()

    def end(self) -> None:
        self.gone = True
        self.model.disk.files._faults.clear()

    def __call__(self, call: str) -> None:
        if call != self.call or self.gone:
            return
        with self._lock:
            self.calls += 1
            if self.calls < self.nth or (self.calls > self.nth and not self.lasting):
                return
        if isinstance(self.error, OSError) and call != "sizes":
            self.model.disk.files.fail(call, 1, self.error)  # type: ignore[arg-type]  # half of it has its effect
        else:
            raise self.error


def one_life(where: str, call: str, nth: int, error: Exception, *, lasting: bool = False) -> tuple[int, Counter[str]]:
    """How many calls of that kind were made before the fault was over, and what happened."""
    model = LevelsModel(faults=True)
    fault = Fault(model, call, nth, error, lasting=lasting)
    try:
        if where == "files":
            model.disk.before_files = fault
        else:
            model.disk.before_index = fault
        for act in SCRIPT[:RESTART]:
            act(model)
        if lasting and nth % 2:  # else the disk is mended while the store tries to start on it
            fault.end()
            works_again(model, where, call, error)
        for act in SCRIPT[RESTART:]:
            act(model)
        fault.end()
        model.restart(index_too=False)
        model.compare_all()
        model.restart(index_too=True)
        model.compare_all()
    except BaseException as failure:
        raise AssertionError(f"{where} {call} {nth} {error!r} lasting={lasting}: {failure!r}") from failure
    finally:
        model.end()
    return fault.calls, model.counts


def works_again(model: LevelsModel, where: str, call: str, error: Exception) -> None:
    """The disk is mended, and no restart is needed; but for an index that may be half written, or is damaged."""
    if where == "index" and (call == "sync" or isinstance(error, IndexDoubtful)):
        return
    for number in range(3):  # an open breaker lets one move through, and that may be another one's
        model.tick(10)
        model.put(0, Prompt((300 + number,)), "disk")
    before = model.counts["put disk: None"]
    model.put(3, Prompt((310, 1)), "disk")
    model.put(1, Prompt((310, 1)), "disk")
    assert model.counts["put disk: None"] == before + 2, "it does not work again"


def nth_failures(where: str, call: str, error: Exception, most: int, *, lasting: bool = False) -> Counter[str]:
    """At most so many lives: n = 1, 2, 3 ... until no more calls are made, or as many of them in even steps."""
    calls, totals = one_life(where, call, 1 << 30, error)
    step = max(1, -(-calls // most))
    for nth in range(1 + calls % step, calls + 1, step):
        totals.update(one_life(where, call, nth, error, lasting=lasting)[1])
        totals["lives"] += 1
    return totals


def disk_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


ONCE, LASTING = False, True
NO_SPACE, FULL, BAD = TierUnavailable("no space left"), TierFull("full"), IndexDoubtful("a page is bad")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "code", "lasting"),
    [
        ("sizes", errno.EIO, ONCE),
        ("create", errno.EIO, ONCE),
        ("create", errno.ENOSPC, LASTING),
        ("read", errno.EIO, ONCE),
        ("read", errno.EIO, LASTING),
        ("write", errno.EIO, ONCE),
        ("write", errno.ENOSPC, LASTING),
        ("sync", errno.EIO, ONCE),
        ("sync", errno.EIO, LASTING),
        ("remove", errno.EIO, ONCE),
    ],
)
def test_a_call_to_the_disk_fails(call: str, code: int, lasting: bool) -> None:
    totals = nth_failures("files", call, disk_error(code), TRIES, lasting=lasting)
    print(dict(totals))
    assert totals["lives"] and totals["blocks compared"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error", "lasting"),
    [
        ("open", NO_SPACE, ONCE),
        ("open", BAD, ONCE),
        ("get", BAD, ONCE),
        ("get", NO_SPACE, LASTING),
        ("apply", FULL, ONCE),
        ("apply", NO_SPACE, LASTING),
        ("apply", BAD, ONCE),
        ("iterate", BAD, ONCE),
        ("sync", NO_SPACE, ONCE),
        ("sync", BAD, LASTING),
    ],
)
def test_a_call_to_the_index_fails(call: str, error: Exception, lasting: bool) -> None:
    totals = nth_failures("index", call, error, TRIES, lasting=lasting)
    print(dict(totals))
    assert totals["lives"] and totals["blocks compared"]
