"""The messages between a handle and a store: they survive a wire, and print no key."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.block.account import HitTier, MissReason
from kvstore.protocol.messages import Grant, LeaseReply, MatchReply, ReserveReply

MESSAGES = [
    Grant(3, b"identity key of thirty-two bytes", (b"stamp",), (8192,)),
    MatchReply(2, ((HitTier.DRAM, 2),), MissReason.DIVERGED, "detail"),
    MatchReply(0),
    LeaseReply(
        7, 1, 3, ([5, 6], [7, 8]), ([b"a" * 16] * 2, [b"b" * 16] * 2), [1, 2], ((HitTier.NVME, 3),), MissReason.DEADLINE
    ),
    ReserveReply(9, 1, [1, 2], ([5, 6],), 3, MissReason.QUOTA),
    ReserveReply(0, 0),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_a_wire(message: msgspec.Struct) -> None:
    raw = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(raw, type=type(message)) == message


def test_a_grant_does_not_print_the_key_in_it() -> None:
    grant = MESSAGES[0]
    assert "thirty-two" not in repr(grant) + str(grant) and "3" in repr(grant)


def test_lists_are_not_shared_between_messages() -> None:
    one, two = ReserveReply(0, 0), ReserveReply(0, 0)
    one.blocks.append(1)
    assert two.blocks == []
