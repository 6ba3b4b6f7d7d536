"""What a check finds, and how checks are run: in parallel threads, each with a time limit, whatever it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kvstore.block.errors import StoreError
from tiering.errors import TierError

CHECK_SECONDS = 20.0
MOST_CHARACTERS = 1000
"""Of a text: a peer, or a file, may have given a part of it."""


class Health(StrEnum):
    """What a finding says."""

    OK = "ok"
    NOTE = "note"  # nothing lacks, but the operator may want to know
    LACKS = "lacks"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. check: what was looked at. remedy: what to do; "" where there is nothing to do."""

    check: str
    health: Health
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """look: yields findings. seconds: how long these are waited for; a `look` that takes longer is left running."""

    name: str
    look: Callable[[], Iterable[Finding]]
    seconds: float = CHECK_SECONDS


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, in the order of the checks."""

    findings: Sequence[Finding] = field(default_factory=tuple)

    @property
    def lacking(self) -> int:
        """How many findings say that something lacks."""
        return sum(one.health is Health.LACKS for one in self.findings)

    def to_dict(self) -> dict[str, object]:
        return {"is_well": not self.lacking, "lacking": self.lacking, "findings": [*map(asdict, self.findings)]}

    def render(self, console: Any) -> None:
        """For people: a line each, whatever the terminal's width."""
        width = max((len(one.check) for one in self.findings), default=0)
        for one in self.findings:
            said = f"{one.text}; {one.remedy}" if one.remedy else one.text
            line = f"{one.health.value:5} {one.check:{width}}  {said}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def ok(check: str, text: str) -> Finding:
    return Finding(check, Health.OK, one_line(text))


def note(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check, Health.NOTE, one_line(text), one_line(remedy))


def lacks(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Health.LACKS, one_line(text), one_line(remedy))


def refused(check: str, error: Exception) -> Finding:
    """A finding made of an error of this product, whose line ends with what to do."""
    text, _, remedy = one_line(str(error) or type(error).__name__).partition("; ")
    return Finding(check, Health.LACKS, text, remedy)


def one_line(text: str) -> str:
    """Printable, without line ends, and of a bounded length."""
    kept = "".join(one if one.isprintable() else " " for one in text[: 2 * MOST_CHARACTERS])
    line = " ".join(kept.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 3]}..."


def examine(checks: Sequence[Check]) -> Examination:
    """Run all checks at once. One that has not ended in its time, or fails by itself, is a finding."""
    began = time.monotonic()
    running = [(check, _Looking(check)) for check in checks]
    found: list[Finding] = []
    for check, looking in running:
        if looking.ended.wait(max(0.0, began + check.seconds - time.monotonic())):
            found += looking.found
        else:
            text = f"did not end within {check.seconds:g} s"
            found.append(lacks(check.name, text, "see whether a disk, a mount or a process of this machine hangs"))
    return Examination(found)


class _Looking:
    """A check in a thread of its own, which may outlive its time: a disk that hangs cannot be interrupted."""

    def __init__(self, check: Check) -> None:
        self.ended = threading.Event()
        self.found: list[Finding] = []
        self._check = check
        try:
            threading.Thread(target=self._run, name=f"doctor-{check.name}", daemon=True).start()
        except RuntimeError:  # there is none to be had
            remedy = "raise the limits of processes and address space (ulimit -u, ulimit -v, pids.max, TasksMax)"
            self.found = [lacks(check.name, "no thread can be started to look at it", remedy)]
            self.ended.set()

    def _run(self) -> None:
        found: list[Finding] = []
        try:
            for one in self._check.look():
                found.append(one)
        except (StoreError, TierError) as error:
            found.append(refused(self._check.name, error))
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            why = f"cannot be told ({error or type(error).__name__})"
            found.append(note(self._check.name, why, "look at it yourself"))
        self.found = found
        self.ended.set()
