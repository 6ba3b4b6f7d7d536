"""Which answers a client believes: what it would count, map or copy by must fit what it asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvstore
from asking import Asking
from kvstore.block.account import HitTier, MissReason
from kvstore.client.connection import check_answer, checked_facts, spans
from kvstore.protocol import messages as m
from kvstore.protocol.messages import Grant, LeaseReply, MatchReply, ReserveReply
from service.sidecar import patient
from tiering.dram.extents import Extent, MappedExtent
from tiering.faults import MachineFault
from tiering.frame import STAMP_BYTES
from tiering.tier import place_of
from torture.nested import FACTS
from torture.nested_door import EXTENT_BYTES, FRAME_BYTES, LAYOUT, OddSidecar
from workbench import ids, random_pages

KEYS = [bytes([n]) * 32 for n in range(3)]
DIGESTS = [b"d" * 16] * 2
GRANT = Grant(0, b"i" * 32, (b"s" * STAMP_BYTES, b"t" * STAMP_BYTES), (8192, 8192))
MATCH = MatchReply(2, ((HitTier.DRAM, 2),), MissReason.ABSENT)
LEASE = LeaseReply(9, 1, 3, ([5, 6], [7, 8]), (DIGESTS, DIGESTS), [1, 1], ((HitTier.DRAM, 2),))
RESERVED = ReserveReply(4, 1, [1, 2], ([5, 6], []))
ASKED: dict[str, tuple[m.Verb, Any, Any]] = {
    "grant": (m.OpenNamespace(b"", [8192, 8192]), m.Granted, GRANT),
    "match": (m.MatchPrefix(0, KEYS), m.Matched, MATCH),
    "lease": (m.LeasePrefix(0, KEYS, 1, 5.0), m.Leased, LEASE),
    "reserve": (m.Reserve(0, KEYS, 0), m.Reserved, RESERVED),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_right_answer_is_believed(name: str) -> None:
    verb, kind, reply = ASKED[name]
    check_answer(verb, kind(reply), 2)
    check_answer(verb, kind(reply), None)
    check_answer(verb, m.Failed(m.RequestFault.BUSY, "another kind"), 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grant", {"identity_key": b""}),
        ("grant", {"identity_key": b"i" * 65}),
        ("grant", {"stamps": GRANT.stamps[:1]}),
        ("grant", {"stamps": (GRANT.stamps[0], b"t" * (STAMP_BYTES - 1))}),
        ("grant", {"stamps": (b"", b"")}),
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
        (m.Which(0, KEYS), m.Held(b"12")),
        (m.Persist(0, KEYS, 1.0), m.Persisted(4, None)),
        (m.Persist(0, KEYS, 1.0), m.Persisted(2, None)),
        (m.Extents([3], False), m.ExtentsReply([m.ExtentEntry(4, 1 << 16, 1 << 13)])),
        (m.Extents([3], False), m.ExtentsReply([m.ExtentEntry(3, 1 << 16, 0)])),
        (m.Extents([3], False), m.ExtentsReply([m.ExtentEntry(3, 1 << 16, 1 << 17)])),
        (m.Extents([3], False), m.ExtentsReply([m.ExtentEntry(3, 1 << 16, 1 << 13)] * 2)),
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


def test_facts_of_a_later_version_are_read() -> None:
    """What tiers say of themselves travels as they made it, whatever more a sidecar knows."""
    fault = {"what": "a thing", "kind": "of tomorrow", "count": 1, "since_seconds_ago": 2.0, "last_seconds_ago": 1.0}
    facts = {**msgspec.to_builtins(FACTS), "faults": [{**fault, "detail": "why", "more": 1}]}
    facts["scrub"]["more"] = facts["moves"][0]["more"] = facts["write_budget"]["more"] = 1
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=type(FACTS))
    assert read == msgspec.structs.replace(FACTS, faults=[MachineFault(**fault, detail="why")])


# Memory ---------------------------------------------------------------------------------------------------------------


def test_a_place_outside_its_extent_is_none() -> None:
    """An address behind the mapping would be what a copy reads from, or writes to."""
    extent = Extent(EXTENT_BYTES)
    mapped = MappedExtent(extent.share(1, writable=True), EXTENT_BYTES, writable=True)
    fitting = EXTENT_BYTES // FRAME_BYTES
    places = [place_of(3, slot) for slot in range(fitting + 1)]
    assert len(spans({3: (mapped, FRAME_BYTES)}, places)) == fitting
    assert spans({3: (mapped, FRAME_BYTES)}, [place_of(3, (1 << 24) - 1)]) == []
    extent.close()


class WrongFrames(OddSidecar):
    """Says that frames are smaller than the payloads of the namespace that are in them."""

    def _right(self, verb: m.Verb) -> tuple[m.Answer, list[int]]:
        answer, descriptors = super()._right(verb)
        if isinstance(answer, m.ExtentsReply):
            answer = m.ExtentsReply([msgspec.structs.replace(one, frame_bytes=8192) for one in answer.extents])
        return answer, descriptors


def test_frames_of_another_size_than_the_namespaces_are_neither_read_nor_filled(tmp_path: Path) -> None:
    path = tmp_path / "odd.sock"
    with WrongFrames(path, 1) as sidecar:
        sidecar.is_odd = False
        with kvstore.open(f"unix:{path}", engine="test") as store:
            handle = patient(store).namespace(model="m" * 40, layout=LAYOUT)  # type: ignore[arg-type]
            prompt = ids(3 * 64)
            match = handle.match(prompt)
            assert match.blocks == 3
            lease = handle.lease(match, deadline_ms=1000)
            assert lease.blocks == 0 and lease.reply.reason is MissReason.UNREACHABLE
            assert handle.put(prompt, random_pages(LAYOUT, 3)).reason is MissReason.UNREACHABLE
            reserved = Asking(handle.door).reserve(handle.number, match.keys, 0, 0, None)
            assert not reserved.reservation and reserved.reason is MissReason.UNREACHABLE
