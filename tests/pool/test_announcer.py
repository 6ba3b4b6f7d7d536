"""What the directory is told: everything that is held in the end, and nothing that is not; bounded and at a rate."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.block.account import HitTier
from kvstore.pool.directory import AGAIN_PER_SECOND, AGAIN_SECONDS, BATCH, POOL_AGAIN_PER_SECOND, Announcer, HintBatch

DRAM, NVME = HitTier.DRAM, HitTier.NVME
NAMES = st.integers(0, 30)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def tell(announcer: Announcer, now: float, known: dict[bytes, HitTier]) -> HintBatch:
    """The next batch, and what a directory knows after it."""
    batch = announcer.batch(now)
    for one in batch.withdraw:
        known.pop(one, None)
    known.update(batch.announce)
    return batch


class AnnouncerMachine(RuleBasedStateMachine):
    """Against what is held, with a directory that fails and forgets."""

    @initialize(queued=st.sampled_from([3, 1000]))
    def begin(self, queued: int) -> None:
        self.announcer = Announcer(most_queued=queued)
        self.most_queued, self.now = queued, 0.0
        self.held: dict[bytes, HitTier] = {}
        self.known: dict[bytes, HitTier] = {}

    @rule(number=NAMES, tier=st.sampled_from([DRAM, NVME]), is_new=st.booleans())
    def stored(self, number: int, tier: HitTier, is_new: bool) -> None:
        if is_new or name(number) in self.held:
            self.announcer.stored(name(number), tier)
        else:
            self.announcer.kept(name(number), tier)
        self.held[name(number)] = tier

    @rule(number=NAMES)
    def removed(self, number: int) -> None:
        self.announcer.removed(name(number))
        self.held.pop(name(number), None)

    @rule(seconds=st.sampled_from([0.0, 0.5, 100.0, AGAIN_SECONDS + 1]))
    def tells(self, seconds: float) -> None:
        self.now += seconds
        batch = tell(self.announcer, self.now, self.known)
        assert {one: tier for one, tier in batch.announce if self.held.get(one) != tier} == {}, "it is not here"
        assert not set(batch.withdraw) & set(self.held)

    @rule()
    def fails(self) -> None:
        self.announcer.failed(self.announcer.batch(self.now))

    @rule()
    def forgets(self) -> None:
        self.known.clear()
        self.announcer.lost()

    @rule()
    def heals(self) -> None:
        """Within some seconds the directory knows all that is held; and no more, unless removals were dropped."""
        for _ in range(3):
            self.now += 1.0
            tell(self.announcer, self.now, self.known)
        assert {one: self.known.get(one) for one in self.held} == self.held
        assert self.announcer.dropped or self.known == self.held

    @invariant()
    def is_bounded(self) -> None:
        if hasattr(self, "held"):
            assert self.announcer.queued <= self.most_queued
            assert self.announcer.held == len(self.held)


TestAnnouncer = AnnouncerMachine.TestCase
TestAnnouncer.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_oldest_news_is_dropped_counted_and_told_later() -> None:
    announcer = Announcer(most_queued=10)
    for number in range(25):
        announcer.stored(name(number), DRAM)
    assert (announcer.queued, announcer.dropped) == (10, 15)
    batch = announcer.batch(0.0)
    assert [one for one, _ in batch.announce[:10]] == [name(number) for number in range(15, 25)]
    assert {one for one, _ in batch.announce[10:]} == {name(number) for number in range(15)}
    assert len(batch.announce) == 25


def test_batches_are_of_500_and_all_is_told_again_at_a_bounded_rate() -> None:
    announcer = Announcer()
    for number in range(10_000):
        announcer.kept(name(number), DRAM)
    known: dict[bytes, HitTier] = {}
    assert len(tell(announcer, 0.0, known).announce) == BATCH
    told, now = 0, 0.0
    while len(known) < 10_000:
        now += 0.1
        while batch := tell(announcer, now, known):
            assert len(batch.announce) <= BATCH
            told += len(batch.announce)
        assert told <= AGAIN_PER_SECOND * now + BATCH
    assert now < 10_000 / AGAIN_PER_SECOND + 1
    assert not announcer.batch(now + AGAIN_SECONDS - 10)
    assert announcer.batch(now + AGAIN_SECONDS + 1)


def test_many_nodes_share_what_a_directory_can_take() -> None:
    announcer = Announcer()
    announcer.shares(1000)
    for number in range(2000):
        announcer.kept(name(number), DRAM)
    told = sum(len(announcer.batch(at / 10).announce) for at in range(101))
    assert abs(told - BATCH - 10 * POOL_AGAIN_PER_SECOND / 1000) <= 2
