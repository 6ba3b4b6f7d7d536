"""Accounts: every token has one origin, the sums match, and the names of reasons never change."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_kernels.copies import Flaw
from kvstore.block.account import REASON_OF_FINDING, REASON_OF_FLAW, Account, HitTier, MissReason, Segment
from kvstore.protocol.lease_ticket import LeaseTicket
from tiering.tier import TierMiss
from torture.nested import GRANT, TICKET

# Appended to, never renamed, never sorted: dashboards and alerts name them.
REASONS = """
    absent evicted diverged other_namespace partial_block last_token grid warming in_flight pinned_full deadline
    tier_down unreachable corrupt key_mismatch stale_hint quota not_admitted cheaper_to_compute audit unsupported
    disabled nonfinite out_of_range incomplete busy no_state
""".split()

hits = st.lists(st.tuples(st.sampled_from(HitTier), st.integers(0, 500)), max_size=5)
misses = st.lists(st.tuples(st.sampled_from(MissReason), st.integers(0, 500)), max_size=5)


def origins(account: Account) -> list[HitTier | MissReason]:
    """The origin of every token, in order."""
    return [segment.origin for segment in account.segments for _ in range(segment.tokens)]


def test_the_reasons_and_their_order_are_frozen() -> None:
    assert [reason.value for reason in MissReason][: len(REASONS)] == REASONS
    assert [tier.value for tier in HitTier] == ["engine", "hbm", "dram", "nvme", "peer", "remote"]


def test_a_reason_is_its_name_in_lower_case() -> None:
    assert all(str(reason) == reason.name.lower() for reason in MissReason)


def test_everything_a_tier_reports_has_a_reason() -> None:
    assert set(REASON_OF_FINDING) == set(TierMiss)
    assert len(set(REASON_OF_FINDING.values())) == len(TierMiss)


def test_everything_that_a_codec_cannot_write_has_a_reason() -> None:
    assert set(REASON_OF_FLAW) == set(Flaw)
    assert len(set(REASON_OF_FLAW.values())) == len(Flaw)


@given(hits, misses)
@settings(max_examples=150)
def test_the_sums_match(hits: list[tuple[HitTier, int]], misses: list[tuple[MissReason, int]]) -> None:
    account = Account.of([*hits, *misses])
    assert account.asked == sum(tokens for _, tokens in hits) + sum(tokens for _, tokens in misses)
    assert account.asked == sum(account.hits.values()) + sum(account.misses.values())
    assert account.hit_tokens == sum(account.hits.values()) == sum(tokens for _, tokens in hits)
    assert origins(account) == [origin for origin, tokens in [*hits, *misses] for _ in range(tokens)]
    assert all(segment.tokens > 0 for segment in account.segments)
    neighbours = pairwise(account.segments)
    assert all(one.origin is not other.origin for one, other in neighbours)


@given(hits, misses, st.integers(-5, 2600), st.sampled_from(MissReason))
@settings(max_examples=150)
def test_a_cut_turns_the_hits_behind_it_into_misses(
    hits: list[tuple[HitTier, int]], misses: list[tuple[MissReason, int]], at_token: int, reason: MissReason
) -> None:
    account = Account.of([*hits, *misses])
    cut = account.cut(at_token, reason)
    assert origins(cut) == [
        reason if isinstance(origin, HitTier) and position >= at_token else origin
        for position, origin in enumerate(origins(account))
    ]
    assert cut.asked == account.asked
    assert cut.hit_tokens == max(0, min(at_token, account.hit_tokens))
    assert cut.cut(at_token, reason) == cut


def test_a_hit_behind_a_miss_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="prefix"):
        Account.of([(HitTier.DRAM, 1), (MissReason.ABSENT, 1), (HitTier.DRAM, 1)])


def test_a_segment_is_not_negative() -> None:
    with pytest.raises(AssertionError, match="negative"):
        Account.of([(HitTier.DRAM, -1)])


def test_an_empty_prompt() -> None:
    account = Account.of([(HitTier.DRAM, 0), (MissReason.ABSENT, 0)])
    assert account.segments == () and account.asked == 0
    assert account.to_dict() == {"asked": 0, "hits": {}, "misses": {}}


def test_for_json() -> None:
    account = Account.of([(HitTier.ENGINE, 64), (HitTier.DRAM, 128), (MissReason.ABSENT, 64), (MissReason.GRID, 1)])
    assert account.to_dict() == {
        "asked": 257,
        "hits": {"engine": 64, "dram": 128},
        "misses": {"absent": 64, "grid": 1},
    }


def test_origins_that_come_twice_are_summed() -> None:
    parts = [(HitTier.DRAM, 1), (HitTier.NVME, 2), (HitTier.DRAM, 4), (MissReason.GRID, 8), (MissReason.AUDIT, 16)]
    account = Account.of([*parts, (MissReason.GRID, 32)])
    assert account.hits == {HitTier.DRAM: 5, HitTier.NVME: 2}
    assert account.misses == {MissReason.GRID: 40, MissReason.AUDIT: 16}
    assert account.segments[0] == Segment(HitTier.DRAM, 1)


@pytest.mark.parametrize("tokens", range(0, 300, 20))
def test_what_a_tier_above_has_is_taken_from_those_below_once(tokens: int) -> None:
    """Token by token: the first so many are its own, and all others are whose they were."""
    parts = [(HitTier.DRAM, 128), (HitTier.NVME, 64), (MissReason.ABSENT, 64), (MissReason.PARTIAL_BLOCK, 44)]
    account = Account.of(parts)
    each = [origin for origin, count in parts for _ in range(count)]
    wanted = Account.of([(origin, 1) for origin in [HitTier.ENGINE] * tokens + each[tokens:]])
    assert account.behind(HitTier.ENGINE, tokens) == wanted and wanted.asked == account.asked == 300
    assert account.behind(HitTier.ENGINE, tokens).hit_tokens == max(192, tokens)


# A ticket that is sealed rightly and says what cannot be: refused before anything is made of it --------------------


def test_a_ticket_is_opened_as_it_was_sealed() -> None:
    assert LeaseTicket.open(TICKET.seal(GRANT), GRANT) == TICKET


@pytest.mark.parametrize(
    "changes",
    [
        {"first_block": 1 << 62, "blocks": 1 << 62, "keys": b"", "places": ([], []), "header_digests": (b"", b"")},
        {"lease": 0, "first_block": 1 << 62},
        {"lease": 0, "blocks": 1 << 62},
        {"lease": 0, "blocks": -1},
        {"first_block": -1},
        {"blocks": 0},
        {"keys": b""},
        {"places": ([5, 6],)},
        {"header_digests": (bytes(32), bytes(31))},
        {"hits": [(HitTier.DRAM, -64)]},
        {"hits": [(HitTier.DRAM, (1 << 63) - 1)]},
    ],
)
def test_a_ticket_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    """Its holder would make a list of 2**62 keys of the first one."""
    wrong = msgspec.structs.replace(TICKET, **changes).seal(GRANT)
    with pytest.raises(ValueError, match="contradicts itself"):
        LeaseTicket.open(wrong, GRANT)
