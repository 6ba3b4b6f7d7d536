"""Transfers that are cut, stalled, dripped and flipped at random: verified prefixes and misses come of them alone,
no deadline is missed, and no pin is left. The seed of each transfer is printed."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from kvstore.peers import transport as t
from peers.frames import SECRET, Source
from peers.media import CLEAR, SEALED, SocketMedium
from remote.between import Harm, proxy
from waiting import wait_until

HARMS = (None, Harm.FLIP, Harm.FLIP, Harm.CUT, Harm.RESET, Harm.STALL, Harm.DRIP)
MANY = 2000
SLACK_SECONDS = 0.1
SOURCE = Source(10, seed=7)


def transfer(seed: int, medium: SocketMedium, door: object) -> str:
    """One of them; what came of it."""
    rng = random.Random(seed)
    harm = rng.choice(HARMS)
    every = sum(SOURCE.frame_bytes) * len(SOURCE.keys)
    head = t.RECORD.size + t.PROOF_BYTES
    at = rng.choice((rng.randrange(every + head), rng.randrange(head), head + rng.randrange(t.RECORD.size + 4096)))
    spoil = harm, at, rng.randrange(8)
    began = time.monotonic()
    offer = door.offer(SOURCE.offered(), SECRET)  # type: ignore[attr-defined]
    with proxy(t.numeric_address(offer.address)[1]) as between:
        if harm is not None:
            between.plan(*spoil)
        moved = dataclasses.replace(offer, address=f"127.0.0.1:{between.port}")
        deadline = time.monotonic() + (rng.uniform(0.02, 0.2) if harm in (Harm.STALL, Harm.DRIP) else 20)
        verified, slots, first, end = 0, SOURCE.slots(), 0, "done"
        try:
            reader = medium.transport().connect(moved, SECRET, deadline)
            while first < len(slots):
                window = slots[first : first + 2 * rng.randrange(1, 12)]
                found = reader.pull(window, SOURCE.check(first // 2), deadline)
                first, verified = first + len(window), verified + found
                if found < len(window):
                    end = "refused" if reader.is_refused else "short"
                    break
        except t.PullFault as fault:
            verified, end = verified + fault.verified, type(fault).__name__
        assert time.monotonic() <= deadline + SLACK_SECONDS, (seed, medium.name, spoil)
        if verified < len(slots):
            assert harm is not None, (seed, medium.name, end)
        for number in range(verified):
            assert SOURCE.may_serve(slots[number], number), (seed, medium.name, spoil, number)
        if harm is Harm.FLIP and medium is SEALED:
            assert verified < len(slots), (seed, spoil)
        if "reader" in locals():
            reader.close()
    assert time.monotonic() - began <= 30
    return f"{harm} {end}"


def many(first: int, count: int) -> None:
    for medium in (CLEAR, SEALED):
        door = medium.door()
        try:
            outcomes: dict[str, int] = {}
            for seed in range(first, first + count // 2):
                print("seed", seed, medium.name)
                outcome = transfer(seed, medium, door)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
            print(medium.name, outcomes)
            ended = time.monotonic()
            wait_until(lambda door=door: door.pinned() == 0)  # type: ignore[misc]
            assert time.monotonic() - ended <= t.OFFER_SECONDS
        finally:
            door.close()


@pytest.mark.slow
def test_many_spoiled_transfers() -> None:
    many(random.SystemRandom().randrange(1 << 30), MANY)
