"""What an answer of the sidecar must be to be believed: whoever asked does arithmetic with it (floor 2).

A sidecar of another version, or one that is broken, must cost its clients misses and no exceptions. Types are checked
where a message is read; here it is looked at whether counts, places and sizes fit what was asked. Bytes of KV are not
looked at: whoever reads them compares digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

import msgspec

from kvstore.door import LeaseReply, MatchReply, ReserveReply
from kvstore.service import messages as m
from kvstore.service.facts import Facts
from tiering.frame import DIGEST_BYTES, KEY_BYTES

MAX_PLACE = (1 << 63) - 1
MOST_SECONDS = 1e15


def check_answer(verb: m.Verb, answer: m.Answer, parts: int | None) -> None:
    """Raises `ValueError` with what cannot be. parts: of the namespace that was asked for; None where that is unknown.

    An answer of another kind than the verb's is none of this file's business.
    """
    match verb, answer:
        case m.OpenNamespace(), m.Granted():
            grant = answer.grant
            count = len(verb.payload_bytes)
            _hold(len(grant.identity_key) == KEY_BYTES, "a key of another length")
            _hold(len(grant.stamps) == len(grant.payload_bytes) == count, "another number of parts")
        case m.Match(), m.Matched():
            _check_match(answer.reply, len(verb.keys))
        case m.Lease(), m.Leased():
            _check_lease(answer.reply, verb.first_block, len(verb.keys), parts)
        case m.Reserve(), m.Reserved():
            _check_reserve(answer.reply, verb.skipped + len(verb.keys), parts)
        case m.Commit(), m.Counted():
            _hold(0 <= answer.blocks <= m.MAX_COMMITTED * m.MAX_PARTS, "a count that cannot be")
        case m.Persist(), m.Persisted():
            _hold(0 <= answer.blocks <= len(verb.keys), "more blocks than were asked for")
            _hold(answer.reason is not None or answer.blocks == len(verb.keys), "fewer blocks, and no reason")
        case m.Extents(), m.ExtentsReply():
            numbers = [one.number for one in answer.extents]
            _hold(len(set(numbers)) == len(numbers) and set(numbers) <= set(verb.numbers), "memory nobody asked for")
            _hold(all(0 < one.frame_bytes <= one.size_bytes for one in answer.extents), "frames of impossible sizes")
        case _:
            pass


def checked_facts(facts: Facts) -> Facts:
    """What `kvstore stat` is told, fit to be printed. Raises `ValueError`."""
    _check_numbers(msgspec.to_builtins(facts))
    for looked in (facts.looked, *(one.looked for one in facts.namespaces)):
        _hold(looked.hit_tokens.keys() == looked.hit_blocks.keys(), "hits in tokens, and others in blocks")
        _hold(looked.miss_tokens.keys() == looked.miss_blocks.keys(), "misses in tokens, and others in blocks")
    _hold(not facts.policy or facts.retained_fraction is not None, "a policy, and no fraction that is retained")
    return facts


def _check_numbers(value: object) -> None:
    if isinstance(value, dict):
        for one in value.values():
            _check_numbers(one)
    elif isinstance(value, list):
        for one in value:
            _check_numbers(one)
    elif isinstance(value, float):
        _hold(isfinite(value) and abs(value) <= MOST_SECONDS, "a number that cannot be")


def _check_match(reply: MatchReply, asked: int) -> None:
    _hold(0 <= reply.blocks <= asked, "more blocks than were asked for")
    _hold(all(count >= 0 for _, count in reply.tiers), "fewer than no blocks")
    _hold(sum(count for _, count in reply.tiers) == reply.blocks, "tiers that do not add up")
    _hold(reply.reason is not None or reply.blocks == asked, "fewer blocks, and no reason")


def _check_lease(reply: LeaseReply, first_block: int, asked: int, parts: int | None) -> None:
    _hold(0 <= reply.lease < 1 << 64, "a number that is none")
    _hold(0 <= reply.first_block <= asked and 0 <= reply.blocks <= asked, "more blocks than were asked for")
    _hold(all(count >= 0 for _, count in reply.tiers), "fewer than no blocks")
    _hold(sum(count for _, count in reply.tiers) <= asked, "tiers that do not add up")
    _hold(reply.first_block == first_block, "other blocks than were asked for")
    pinned = reply.blocks - reply.first_block
    if not reply.lease:
        _hold(pinned <= 0, "blocks without a lease")
        return
    _hold(pinned >= 0, "other blocks than were asked for")
    _hold(len(reply.places) == len(reply.header_digests) == (parts or len(reply.places)), "another number of parts")
    lengths = {*map(len, reply.places), *map(len, reply.header_digests)}
    _hold(lengths <= {pinned}, "columns of other lengths")
    _check_places(reply.places)
    digests = (digest for column in reply.header_digests for digest in column)
    _hold({DIGEST_BYTES}.issuperset(map(len, digests)), "digests of another length")


def _check_reserve(reply: ReserveReply, asked: int, parts: int | None) -> None:
    _hold(0 <= reply.reservation < 1 << 64, "a number that is none")
    _hold(0 <= reply.present <= asked, "more blocks than were asked for")
    _hold(reply.stopped_at is None or 0 <= reply.stopped_at <= asked, "a block that was not asked for")
    blocks = reply.blocks
    _hold(all(one < other for one, other in pairwise(blocks)), "blocks that do not ascend")
    _hold(not blocks or (blocks[0] >= 0 and blocks[-1] < asked), "blocks that were not asked for")
    if reply.reservation:
        _hold(len(reply.places) == (parts or len(reply.places)), "another number of parts")
        _hold(all(len(column) in (0, len(blocks)) for column in reply.places), "columns of other lengths")
        _check_places(reply.places)


def _check_places(columns: Sequence[Sequence[int]]) -> None:
    _hold(all(min(column) >= 0 and max(column) <= MAX_PLACE for column in columns if column), "places that are none")


def _hold(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(what)
