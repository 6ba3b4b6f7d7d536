"""The NVMe tier on a disk that loses power: what was acknowledged is there, what was given up stays away.

One run is a life of several sessions on one disk. Each ends in order or at a random effect on the disk, and now and
then the index is lost as well. After each start everything that is there is read and compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.customer import Customer
from simulation.machine import Machine
from simulation.power import PowerLoss
from tiering.errors import TierFull
from tiering.nvme.tier import NvmeTier

SESSIONS = 4
STEPS = 24


class Life:
    """A disk, a customer of the tier on it, and what happened to both."""

    def __init__(self, seed: int, make: Callable[..., NvmeTier] = NvmeTier) -> None:
        self.machine = Machine()
        self.customer = Customer(self.machine, seed)
        self.random = self.customer.random
        self.make = make
        self.index_lost = False
        self.losses = self.rebuilds = self.kept = 0

    def run(self) -> None:
        for _ in range(SESSIONS):
            self.start()
            if self.random.random() < 0.8:
                self.machine.power.back(last=self.random.randrange(1, 120))
            try:
                self.work(STEPS)
            except PowerLoss:
                self.losses += 1
                lost = self.random.random() < 0.3
                self.machine.lose_power(self.random, index_too=lost)
                self.index_lost = self.index_lost or lost
                self.customer.index_lost |= lost

    def work(self, steps: int) -> None:
        """A session until its end in order."""
        for _ in range(steps):
            self.step()
        self.machine.stop()
        self.customer.has_settled()

    def start(self) -> None:
        """Open, which may itself be cut short, and compare."""
        while True:
            if self.random.random() < 0.3:
                self.machine.power.back(last=self.random.randrange(1, 20))
            try:
                found = self.machine.start(self.make)
                break
            except PowerLoss:
                self.losses += 1
                self.machine.lose_power(self.random)
        self.machine.power.back()
        tier = self.customer.tier
        self.rebuilds += tier.rebuilds
        assert self.index_lost or not tier.rebuilds, "a good index was thrown away"
        assert not tier.left_alone
        self.index_lost = False
        self.customer.compare(found)
        self.kept += len(self.customer.owed)
        self.customer.settle()
        tier.check()
        self.customer.no_other_header_is_valid()

    def step(self) -> None:
        action, part = self.random.random(), self.random.randrange(2)
        if action < 0.45:
            try:
                self.customer.store(part, self.random.randrange(1, 6))
            except TierFull:
                self.customer.evict(self.customer.some(8))
                self.customer.settle()
        elif action < 0.6:
            self.replace(part, self.random.randrange(1, 8))
        elif action < 0.85:
            self.customer.evict(self.customer.some(self.random.randrange(1, 8)))
        else:
            self.customer.settle()

    def replace(self, part: int, count: int) -> None:
        """Evict frames for others that go to their places, some of which turn out to be bad while they are written; or
        think better of it."""
        mine = [name for name in self.customer.some(1 << 30) if name[0] == part]
        places = self.customer.claim(mine[:count])
        if self.random.random() < 0.2:
            self.customer.tier.abort(places)
        elif places:
            is_bad = self.random.random() < 0.2
            self.customer.fill(part, places, self.random.randrange(len(places)) if is_bad else len(places))


def live(seeds: range, make: Callable[..., NvmeTier] = NvmeTier) -> dict[str, int]:
    """That many lives; what happened in them."""
    sums = {"losses": 0, "rebuilds": 0, "frames": 0}
    for seed in seeds:
        life = Life(seed, make)
        try:
            life.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        sums["losses"] += life.losses
        sums["rebuilds"] += life.rebuilds
        sums["frames"] += life.kept
    return sums


@pytest.mark.slow
def test_power_losses() -> None:
    sums = live(range(60))
    assert sums["losses"] > 100 and sums["rebuilds"] > 10 and sums["frames"] > 500, sums
