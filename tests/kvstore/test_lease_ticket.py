"""A ticket that is sealed rightly and says what cannot be: refused before anything is made of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.block.account import HitTier
from kvstore.protocol.lease_ticket import LeaseTicket
from torture.nested import GRANT, TICKET


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
