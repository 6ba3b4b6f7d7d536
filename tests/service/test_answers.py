"""Which answers a client believes: what it would count, map or copy by must fit what it asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.door import Grant, LeaseReply, MatchReply, ReserveReply
from kvstore.miss import HitTier, MissReason
from kvstore.service import messages as m
from kvstore.service.answers import check_answer, checked_facts
from torture.nested import FACTS

KEYS = [bytes([n]) * 32 for n in range(3)]
DIGESTS = [b"d" * 16] * 2
GRANT = Grant(0, b"i" * 32, (b"s", b"t"), (8192, 8192))
MATCH = MatchReply(2, ((HitTier.DRAM, 2),), MissReason.ABSENT)
LEASE = LeaseReply(9, 1, 3, ([5, 6], [7, 8]), (DIGESTS, DIGESTS), [1, 1], ((HitTier.DRAM, 2),))
RESERVED = ReserveReply(4, 1, [1, 2], ([5, 6], []))
ASKED: dict[str, tuple[m.Verb, Any, Any]] = {
    "grant": (m.OpenNamespace(b"", [8192, 8192]), m.Granted, GRANT),
    "match": (m.Match(0, KEYS), m.Matched, MATCH),
    "lease": (m.Lease(0, KEYS, 1, 5.0), m.Leased, LEASE),
    "reserve": (m.Reserve(0, KEYS, 0), m.Reserved, RESERVED),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_right_answer_is_believed(name: str) -> None:
    verb, kind, reply = ASKED[name]
    check_answer(verb, kind(reply), 2)
    check_answer(verb, kind(reply), None)
    check_answer(verb, m.Failed(m.Fault.BUSY, "another kind"), 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grant", {"identity_key": b""}),
        ("grant", {"identity_key": b"i" * 65}),
        ("grant", {"stamps": (b"s",)}),
        ("grant", {"payload_bytes": ()}),
        ("match", {"blocks": 4}),
        ("match", {"blocks": -1}),
        ("match", {"tiers": ((HitTier.DRAM, 3),)}),
        ("match", {"tiers": ((HitTier.DRAM, 3), (HitTier.NVME, -1))}),
        ("match", {"reason": None}),
        ("lease", {"lease": -1}),
        ("lease", {"lease": 0}),
        ("lease", {"first_block": 0}),
        ("lease", {"blocks": 4}),
        ("lease", {"blocks": 0}),
        ("lease", {"places": ([5, 6],)}),
        ("lease", {"places": ([5, 6], [7])}),
        ("lease", {"places": ([5, 6], [7, -1])}),
        ("lease", {"places": ([5, 6], [7, 1 << 63])}),
        ("lease", {"header_digests": (DIGESTS, [b"d" * 16, b"d"])}),
        ("lease", {"header_digests": (DIGESTS,)}),
        ("lease", {"tiers": ((HitTier.DRAM, 4),)}),
        ("reserve", {"reservation": -1}),
        ("reserve", {"present": 4}),
        ("reserve", {"blocks": [2, 1]}),
        ("reserve", {"blocks": [1, 1]}),
        ("reserve", {"blocks": [-1, 1]}),
        ("reserve", {"blocks": [1, 3]}),
        ("reserve", {"places": ([5, 6],)}),
        ("reserve", {"places": ([5, 6], [7])}),
        ("reserve", {"places": ([5, -6], [])}),
        ("reserve", {"stopped_at": -1}),
        ("reserve", {"stopped_at": 1 << 40}),
    ],
)
def test_an_answer_that_does_not_fit_is_not(name: str, changes: dict[str, Any]) -> None:
    verb, kind, reply = ASKED[name]
    with pytest.raises(ValueError):
        check_answer(verb, kind(msgspec.structs.replace(reply, **changes)), 2)


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        (m.Commit(1, 0, 0, []), m.Counted(-1)),
        (m.Persist(0, KEYS, 1.0), m.Persisted(4, None)),
        (m.Persist(0, KEYS, 1.0), m.Persisted(2, None)),
        (m.Extents([3], False), m.ExtentsReply([m.Extent(4, 1 << 16, 1 << 13)])),
        (m.Extents([3], False), m.ExtentsReply([m.Extent(3, 1 << 16, 0)])),
        (m.Extents([3], False), m.ExtentsReply([m.Extent(3, 1 << 16, 1 << 17)])),
        (m.Extents([3], False), m.ExtentsReply([m.Extent(3, 1 << 16, 1 << 13)] * 2)),
    ],
)
def test_counts_and_memory_that_do_not_fit_are_not(verb: m.Verb, answer: m.Answer) -> None:
    with pytest.raises(ValueError):
        check_answer(verb, answer, None)


def test_facts_that_do_not_add_up_are_not_printed() -> None:
    assert checked_facts(FACTS) is FACTS
    wrong = msgspec.structs.replace(FACTS.looked, hit_blocks={})
    for changes in (
        {"up_seconds": float("nan")},
        {"at": float("inf")},
        {"looked": wrong},
        {"namespaces": [msgspec.structs.replace(FACTS.namespaces[0], looked=wrong)]},
        {"retained_fraction": None},
    ):
        with pytest.raises(ValueError):
            checked_facts(msgspec.structs.replace(FACTS, **changes))
