"""Electricity for simulated disks: one counter that all of them share, so that the lights go out everywhere at once."""

from __future__ import annotations


class PowerLoss(BaseException):
    """The machine is off. Not an `Exception`: nothing that handles errors may survive it."""


class Power:
    """Counts the effects on simulated disks; from the `last`-th on, counted from 1, each raises `PowerLoss` instead."""

    def __init__(self, last: int | None = None) -> None:
        self.steps = 0
        self.last = last

    def step(self) -> None:
        """One effect on a disk is about to happen."""
        self.steps += 1
        if self.last is not None and self.steps >= self.last:
            raise PowerLoss

    def back(self, last: int | None = None) -> None:
        """The machine is on again; it may go off again."""
        self.steps, self.last = 0, last
