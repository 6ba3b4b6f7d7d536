"""Verbs of a namespace for blocks that are not here yet: what other nodes hold of a prompt, waits for blocks that are
being fetched or stored, and tickets, by which one engine hands a prompt to another."""

from __future__ import annotations

from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput
from kvstore.block.identity import Prompt
from kvstore.client.pending import AWAIT_GRACE_SECONDS, PendingReply, ReadyReply
from kvstore.config import check_deadline
from kvstore.protocol import messages as m
from kvstore.protocol.door import Door, Submitted
from kvstore.protocol.handing_over import MAX_TICKET_CHARACTERS
from kvstore.protocol.replies import Grant
from tiering.counts.awaits import MAX_AWAIT_SECONDS, AwaitEnd

LOCATE_GRACE_SECONDS = 0.05
"""A sidecar's answer is here within 5 ms (`LOCATE_SECONDS`); without an answer by then nothing is elsewhere."""


class HandOffVerbs:
    """A part of `NamespaceHandle`."""

    door: Door
    _grant: Grant
    has_courier = False
    """Whether the last look-up's answer reported a courier; if not, none is asked."""

    def locate(self, prompt: Prompt, ticket: str = "") -> m.Located:
        """How much of a prompt, from its first block on, is elsewhere and could be here soon."""
        return self.door.call(self._locating(prompt, ticket), m.Located) if self.has_courier else m.Located(0, 0)

    def submit_locate(self, prompt: Prompt, ticket: str = "") -> PendingReply[m.Located]:
        """`locate` for a thread that must not wait. Sends nothing without a courier."""
        submitted: Submitted[m.Located] = ReadyReply(m.Located(0, 0))
        if self.has_courier:
            submitted = self.door.submit(self._locating(prompt, ticket), m.Located, LOCATE_GRACE_SECONDS)
        return PendingReply(submitted, lambda told: told, lambda: m.Located(0, 0))

    def await_block(self, prompt: Prompt, block: int, deadline_ms: float, located: int = 0) -> m.Awaited:
        """Wait until a block of a prompt can be read, even one that was never stored, for that long and at most 30 s.
        located: the number from `locate`, whose blocks are then fetched up to this one."""
        return self.door.call(self._waiting(prompt, block, deadline_ms, located), m.Awaited)

    def submit_await(self, prompt: Prompt, block: int, deadline_ms: float, located: int = 0) -> PendingReply[m.Awaited]:
        """`await_block` for a thread that must not wait. Cancelling it ends the fetch."""
        waiting = self._waiting(prompt, block, deadline_ms, located)
        submitted = self.door.submit(waiting, m.Awaited, waiting.seconds + AWAIT_GRACE_SECONDS)
        return PendingReply(submitted, lambda told: told, lambda: m.Awaited(0, AwaitEnd.CANCELLED))

    def seal(self, prompt: Prompt, seconds: float) -> m.Sealed:
        """A ticket with which another engine waits for this prompt's blocks, of which there must be at least one;
        stored ones are retained for so many seconds."""
        return self.door.call(m.SealTicket(self._grant.number, prompt.keys, seconds), m.Sealed)

    def submit_seal(self, prompt: Prompt, seconds: float, deadline_ms: float = 1000) -> PendingReply[m.Sealed]:
        """`seal` for a thread that must not wait."""
        sealing = m.SealTicket(self._grant.number, prompt.keys, seconds)
        submitted = self.door.submit(sealing, m.Sealed, deadline_ms / 1000)
        return PendingReply(submitted, lambda told: told, lambda: m.Sealed(""))

    def open_ticket(self, ticket: str) -> m.TicketOpened:
        """What a ticket promises here; or that it promises nothing, and why."""
        return self.door.call(self._opening(ticket), m.TicketOpened)

    def submit_open(self, ticket: str, deadline_ms: float = 1000) -> PendingReply[m.TicketOpened]:
        """`open_ticket` for a thread that must not wait."""
        submitted = self.door.submit(self._opening(ticket), m.TicketOpened, deadline_ms / 1000)
        return PendingReply(submitted, lambda told: told, lambda: m.TicketOpened(b"", 0, 0.0, MissReason.DISABLED))

    def _opening(self, ticket: str) -> m.OpenTicket:
        return m.OpenTicket(self._grant.number, ticket[: MAX_TICKET_CHARACTERS + 1])

    def _locating(self, prompt: Prompt, ticket: str) -> m.Locate:
        fitting = ticket if len(ticket) <= MAX_TICKET_CHARACTERS else ""
        return m.Locate(self._grant.number, prompt.keys[: m.MAX_KEYS], fitting)

    def _waiting(self, prompt: Prompt, block: int, deadline_ms: float, located: int) -> m.Await:
        check_deadline(deadline_ms)
        if not 0 <= block < len(prompt.keys):
            raise BadInput(f"block={block}; give one of the prompt's {len(prompt.keys)} full blocks, from 0 on")
        seconds = min(deadline_ms / 1000, MAX_AWAIT_SECONDS)
        return m.Await(self._grant.number, prompt.keys[block : block + 1], seconds, located)
