"""Clients of a real sidecar are killed and stopped (`clients`), sidecars are killed under their clients (`restarts`).

In `clients` six processes at a time work in three namespaces that neither memory nor disk has room for. Each is killed
at a random moment, or stopped, for longer than a lease lasts or shorter, and then killed or resumed. After every
hundred the sidecar must have no more open than at first.

In `restarts` four processes work through the life of a keeper, whose sidecar is killed again and again. Half of these
lives are calm: nothing is evicted, so that what could be read before a kill must be hit after it; in the others frames
are evicted and slots used again all the time. In half of either there is no disk. What is dropped just before a kill
must not be found after it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import StoreError
from kvstore.client.lease import Lease
from model.store_model import Prompt
from torture import Report, quiet
from torture.engine import DEPTH, LAYOUTS, LETTERS, Space, opened
from torture.nursery import Child, Nursery
from torture.outside import Sidecar

LEASE_SECONDS = 0.7
CLIENTS_AT_ONCE = 6
CLIENTS_PER_ROUND = 100
STOCKED_WITHIN_SECONDS = 60
READY_WITHIN_SECONDS = 120
RESUMES_WITHIN_SECONDS = 120
HITS_WITHIN_SECONDS = 120
AIM_SECONDS, COPY_SECONDS = 2.0, 0.006
"""For how long it is waited that a client begins to copy, and about how long a copy takes."""
LOOK_SECONDS = 0.5
"""How often it is looked how many slots wait for a reader that is late."""

CROWDED: dict[str, Any] = {"dram": "64MiB", "extent": "8MiB", "nvme": "80MiB", "slab": "8MiB"}
"""Of some 140 MiB of blocks, in three namespaces."""
CALM: dict[str, Any] = {**CROWDED, "dram": "384MiB", "nvme": "512MiB"}
"""For two namespaces with room to spare."""

KILLS_PER_LIFE = 13
CLIENTS_PER_LIFE = 4
LIVES = [(False, False), (True, True), (True, False), (False, True)]
"""Whether each is calm, and has a disk."""
AWAY = (MissReason.UNREACHABLE, MissReason.WARMING, MissReason.DEADLINE)
PHASES = ("leasing", "copying", "holding", "filling", "scribbling", "hanging")


def nursery() -> Nursery:
    """Where the clients come from."""
    return Nursery("torture.engine")


# Clients that are killed and stopped ----------------------------------------------------------------------------------


def clients(nursery: Nursery, count: int, seed: int, report: Report = quiet) -> dict[str, int]:
    """That many clients, one after the other; what happened."""
    counts: Counter[str] = Counter()
    done = 0
    try:
        with _sidecar(CROWDED) as sidecar:
            _stock(sidecar, LAYOUTS)
            first = sidecar.settled()
            with _watching(sidecar, counts), ThreadPoolExecutor(CLIENTS_AT_ONCE) as pool:
                while done < count:
                    numbers = range(done, min(count, done + CLIENTS_PER_ROUND))
                    work = [pool.submit(_one_client, nursery, sidecar, seed * 1_000_003 + one) for one in numbers]
                    try:
                        for one in work:
                            counts.update(one.result())
                            done += 1
                            report(done)
                    finally:
                        pool.shutdown(wait=False, cancel_futures=True) if done < numbers.stop else None
                    sidecar.settled(first)
                    counts["times nothing was left"] += 1
            counts["evictions from memory"] = _evicted(sidecar)
            assert sidecar.end() == 0, f"the sidecar does not end in order: {sidecar.log()}"
    except (AssertionError, StoreError, OSError) as error:
        raise AssertionError(f"seed {seed}, after {done} clients: {error}") from error
    return dict(counts)


def _one_client(nursery: Nursery, sidecar: Sidecar, seed: int) -> Counter[str]:
    random = Random(seed)
    counts: Counter[str] = Counter()
    child = nursery.start(
        socket=sidecar.socket, seed=seed, steady=list(LAYOUTS), scratch=list(LAYOUTS), drops=random.random() < 0.2
    )
    try:
        if random.random() < 0.08:  # it dies while it is being born
            child.listen(time.monotonic() + random.random() * 0.1)
        else:
            _await(child, b"ready", 1, READY_WITHIN_SECONDS)
            _work(child, random)
            fate = random.choices(["killed", "stopped and killed", "stopped and resumed"], [50, 15, 35])[0]
            counts[fate] += 1
            if fate != "killed":
                _stop(child, counts)
                time.sleep(LEASE_SECONDS * random.choice([random.random(), 1 + 2 * random.random()]))
            if fate == "stopped and resumed":
                _resume(child)
                _work(child, random)
    finally:
        child.kill()
        status = nursery.bury(child)
    _take_down(child, status, counts)
    counts["kills"] += 1
    return counts


# Sidecars that are killed ---------------------------------------------------------------------------------------------


def restarts(nursery: Nursery, count: int, seed: int, report: Report = quiet) -> dict[str, int]:
    """That many kills of a sidecar, in several lives of a keeper; what happened."""
    counts: Counter[str] = Counter()
    lives = min(count, max(2, -(-count // KILLS_PER_LIFE)))
    lives += lives % 2 and lives < count  # with and without a disk equally often
    for number in range(lives):
        kills = count * (number + 1) // lives - count * number // lives
        is_calm, has_disk = LIVES[number % len(LIVES)]
        try:
            life = Life(nursery, Random(seed * 1_000_003 + number), counts, is_calm=is_calm, has_disk=has_disk)
            life.run(kills, lambda: report(counts["restarts"]))
        except (AssertionError, StoreError, OSError) as error:
            kind = f"{'calm' if is_calm else 'crowded'}, {'with' if has_disk else 'without'} a disk"
            raise AssertionError(f"seed {seed}, life {number} ({kind}), {counts['restarts']} kills: {error}") from error
    return dict(counts)


class Life:
    """One keeper and its sidecars, the clients of all of them, and a further client in this process that counts."""

    def __init__(
        self, nursery: Nursery, random: Random, counts: Counter[str], *, is_calm: bool, has_disk: bool
    ) -> None:
        self.nursery, self.random, self.counts = nursery, random, counts
        self.is_calm = is_calm
        self.settings = {**(CALM if is_calm else CROWDED), **({} if has_disk else {"nvme": "off"})}
        self.steady = ["shards"] if is_calm else list(LAYOUTS)
        self.scratch = ["small"] if is_calm else list(LAYOUTS)

    def run(self, kills: int, report: Callable[[], None]) -> None:
        """From start to end."""
        with _sidecar(self.settings) as self.sidecar:
            _stock(self.sidecar, [*self.steady, *self.scratch])
            first = self.sidecar.settled()
            children = [
                self.nursery.start(
                    socket=self.sidecar.socket,
                    seed=self.random.getrandbits(48),
                    steady=self.steady,
                    scratch=self.scratch,
                    drops=True,
                )
                for _ in range(CLIENTS_PER_LIFE)
            ]
            store = opened(self.sidecar.socket)
            try:
                self.store = store
                self.spaces = [Space.of(store, name) for name in self.steady]
                self.dropped = Space.of(store, "small", "dropped")
                for child in children:
                    _await(child, b"ready", 1, READY_WITHIN_SECONDS)
                for _ in range(kills):
                    self.one_kill(children)
                    self.counts["restarts"] += 1
                    report()
            finally:
                store.close()
                for child in children:
                    child.kill()
                statuses = [self.nursery.bury(child) for child in children]
            for child, status in zip(children, statuses, strict=True):
                _take_down(child, status, self.counts)
            self.sidecar.settled(first)
            self.counts["times nothing was left"] += 1
            assert self.sidecar.end() == 0, f"the sidecar does not end in order: {self.sidecar.log()}"

    def one_kill(self, children: list[Child]) -> None:
        """Stop some clients, kill, see what is there again, resume them."""
        random = self.random
        self.listen(children, 0.2 + random.random() * 0.6)
        stopped = random.sample(children, random.choice([0, 1, 1, 2]))
        others = [child for child in children if child not in stopped]
        for child in stopped:
            _aim(child, random)
            _stop(child, self.counts)
        self.listen(others, random.random() * 1.5 * LEASE_SECONDS)
        before = self.readable(())
        void = self.drop_under_a_lease()
        _aim(random.choice(others), random)
        for child in others:
            child.listen(time.monotonic())
            self.counts[f"sidecar killed while {_phase(child)}"] += 1
        starts = self.sidecar.starts
        self.sidecar.kill()
        self.counts["sidecars killed"] += 1
        if random.random() < 0.2:
            self.counts["sidecars killed before they served"] += self.sidecar.kill_the_next(random.random() * 0.5)
        resumes_early = random.random() < 0.3
        if resumes_early:
            self.resume(stopped)
        began = time.monotonic()
        self.sidecar.serves(starts + 1)
        after = self.readable(AWAY)
        self.counts["most milliseconds until it was asked again"] = max(
            self.counts["most milliseconds until it was asked again"], int(1000 * (time.monotonic() - began))
        )
        self.compare(before, after)
        back = self.found(self.dropped, AWAY)
        assert not back, f"{len(back)} blocks are back that were dropped before the kill"
        void.release()
        marks = [len(child.heard) for child in children]
        if not resumes_early:
            self.listen(others, random.random() * 2)
            self.resume(stopped)
        for child, mark in zip(children, marks, strict=True):
            hits = child.heard.count(b"\nhit ", 0, mark)
            _await(child, b"\nhit ", hits + 1, HITS_WITHIN_SECONDS)

    def resume(self, children: list[Child]) -> None:
        """Go on, and compare what they hold."""
        for child in children:
            _resume(child)
            self.counts["stopped before a kill and resumed after it"] += 1

    def listen(self, children: list[Child], seconds: float) -> None:
        """Let them work."""
        deadline = time.monotonic() + seconds
        for child in children:
            child.listen(deadline)
            assert not child.ended, "\n".join(child.lines()[-1:])

    def readable(self, not_yet: tuple[MissReason, ...]) -> dict[tuple[str, tuple[int, ...]], HitTier]:
        """The tier of every block that a look-up finds. not_yet: reasons to ask again."""
        return {
            (space.name, chain): tier for space in self.spaces for chain, tier in self.found(space, not_yet).items()
        }

    def found(self, space: Space, not_yet: tuple[MissReason, ...]) -> dict[tuple[int, ...], HitTier]:
        """The same of one namespace, by the chains of blocks."""
        found: dict[tuple[int, ...], HitTier] = {}
        deadline = time.monotonic() + HITS_WITHIN_SECONDS
        for letters in LETTERS:
            while (match := space.handle.match(Prompt(letters).token_ids)).reason in not_yet:
                assert time.monotonic() < deadline, f"nothing can be found any more: {match.reason}"
                self.counts[f"asked again, {match.reason}"] += 1
                time.sleep(0.01)
            for block, tier in enumerate(match.tier_of_block):
                found[letters[: block + 1]] = tier
        return found

    def drop_under_a_lease(self) -> Lease:
        """Blocks whose memory cannot be given back at once, for somebody may read them still."""
        for letters in LETTERS[::4]:
            self.dropped.put(letters)
        match = self.dropped.handle.match(Prompt(LETTERS[0]).token_ids)
        lease = self.dropped.handle.lease(match, deadline_ms=1000)
        try:
            self.counts["blocks dropped before a kill"] += self.store.drop(self.dropped.handle)
        except StoreError:  # moves were not over in time
            self.store.drop(self.dropped.handle)
        return lease

    def compare(
        self, before: dict[tuple[str, tuple[int, ...]], HitTier], after: dict[tuple[str, tuple[int, ...]], HitTier]
    ) -> None:
        """What memory had it has again; every byte is read."""
        in_memory = {block for block, tier in before.items() if tier is HitTier.DRAM}
        again = {block for block in in_memory if after.get(block) is HitTier.DRAM}
        kind = "calm" if self.is_calm else "crowded"
        self.counts[f"{kind}: blocks in memory before"] += len(in_memory)
        self.counts[f"{kind}: found there again"] += len(again)
        if not self.is_calm:
            return
        assert len(in_memory) == sum(len({one[: depth + 1] for one in LETTERS}) for depth in range(DEPTH)), (
            f"only {len(in_memory)} blocks were in memory before the kill"
        )
        lost = sorted(in_memory - again)
        assert not lost, f"{len(lost)} of {len(in_memory)} blocks that memory had are not there: {lost[:3]}"
        for space in self.spaces:
            for letters in LETTERS:
                match = space.handle.match(Prompt(letters).token_ids)
                with space.handle.lease(match, deadline_ms=10_000) as lease:
                    delivered, reason = space.load(lease, letters)
                assert reason is None and lease.blocks == DEPTH, f"{letters}: {lease.blocks} blocks, {lease.reason}"
                self.counts["blocks hit again"] += lease.blocks
                self.counts["bytes delivered and compared"] += delivered


# Both -----------------------------------------------------------------------------------------------------------------


@contextmanager
def _sidecar(settings: dict[str, Any]) -> Iterator[Sidecar]:
    with (
        tempfile.TemporaryDirectory(prefix="kv-torture-") as directory,
        Sidecar(Path(directory), settings, LEASE_SECONDS) as sidecar,
    ):
        yield sidecar


def _stock(sidecar: Sidecar, names: Iterable[str]) -> None:
    """Every prompt is stored once, and evicted where there is no room."""
    with opened(sidecar.socket) as store:
        for name in names:
            space = Space.of(store, name)
            for letters in LETTERS:
                deadline = time.monotonic() + STOCKED_WITHIN_SECONDS
                while (match := space.handle.match(Prompt(letters).token_ids)).blocks < DEPTH:
                    assert time.monotonic() < deadline, f"{name} {letters}: {match.blocks} blocks, {match.reason}"
                    if not space.put(letters):  # what is on its way to the disk is evicted when it is there
                        time.sleep(0.01)


@contextmanager
def _watching(sidecar: Sidecar, counts: Counter[str]) -> Iterator[None]:
    """How many slots wait for late readers, now and then."""
    ends = threading.Event()

    def look() -> None:
        while not ends.wait(LOOK_SECONDS):
            slots = {tier.name: tier.slots for tier in sidecar.facts().tiers}
            counts["most slots kept for late readers"] = max(
                counts["most slots kept for late readers"], slots["dram"].get("zombie", 0)
            )

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _work(child: Child, random: Random) -> None:
    """For a while, and as a rule into the middle of a copy."""
    child.listen(time.monotonic() + random.random() * 0.4)
    _aim(child, random)


def _aim(child: Child, random: Random) -> None:
    """As a rule until it is in the middle of a copy."""
    aim = random.choice([b"\ncopying", b"\ncopying", b"\nfilling", b"\nfilling", b"\nscribbling", b""])
    if aim:
        child.listen(time.monotonic() + AIM_SECONDS, aim, child.heard.count(aim) + 1)
        child.listen(time.monotonic() + random.random() * COPY_SECONDS)


def _stop(child: Child, counts: Counter[str]) -> None:
    child.listen(time.monotonic())
    os.kill(child.pid, signal.SIGSTOP)
    child.listen(time.monotonic() + 0.01)
    counts[f"stopped while {_phase(child)}"] += 1


def _resume(child: Child) -> None:
    times = child.heard.count(b"\nresumed ")
    os.kill(child.pid, signal.SIGCONT)
    _await(child, b"\nresumed ", times + 1, RESUMES_WITHIN_SECONDS)


def _await(child: Child, what: bytes, times: int, seconds: float) -> None:
    """Until it has said that so often."""
    is_said = child.listen(time.monotonic() + seconds, what, times)
    said = child.lines()
    assert not child.ended, said[-1] if said else "a client ended and said nothing"
    if not is_said:
        os.kill(child.pid, signal.SIGUSR1)  # it prints where it is
        time.sleep(1)
    assert is_said, f"a client does not say {what.decode().strip()!r}, but {said[-1:]}"


def _phase(child: Child) -> str:
    lines = child.lines()
    return lines[-1] if lines and lines[-1] in PHASES else "between" if lines else "coming"


def _take_down(child: Child, status: int, counts: Counter[str]) -> None:
    """What it said."""
    for line in child.lines():
        what, *words = line.split(maxsplit=1)
        if what == "fault":
            raise AssertionError(line)
        if what == "hit":
            counts["gets"] += 1
            counts["bytes delivered and compared"] += int(words[0])
        elif what == "missed":
            counts[f"misses, {words[0]}"] += 1
        elif what == "put":
            counts["blocks stored"] += int(words[0])
        elif what in ("kept", "later"):
            compared, _, age = map(int, words[0].split())
            counts["leases"] += 1
            counts["leases that had run out"] += age > 1000 * LEASE_SECONDS
            counts["leases whose connection was gone"] += what == "later"
            counts["raw bytes compared"] += compared
        elif what == "resumed":
            counts["resumes"] += 1
            counts["leases held over a stop"] += int(words[0])
        elif what == "dropped":
            counts["dropped namespaces"] += 1
    counts[f"killed while {_phase(child)}"] += 1
    assert status == -signal.SIGKILL, f"a client ended by itself, with status {status}"


def _evicted(sidecar: Sidecar) -> int:
    counters = sidecar.facts().counters
    return sum(count for name, count in counters.items() if "evicted" in name)
